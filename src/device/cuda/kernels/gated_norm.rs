//! RMS normalisation with a gate.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::bias::fold_columns;
use super::grid::{MULTIPROCESSORS, WARP};
use crate::device::kernel::rows;
use crate::device::{DeviceSlice, GatedNorm, GatedNormBackward, Kernel, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/gated_norm.ptx"),
    typed: &["gated_norm", "gated_norm_any", "gated_norm_backward", "gated_norm_backward_any"],
    plain: &[],
};

/// Constants of `gated_norm.cu`: threads of a block, columns of a lane.
const THREADS: usize = 256;
const VECTOR: usize = 4;
/// Rows of a block, one for each warp.
const WARPS: usize = THREADS / WARP;
/// Maximum blocks of the backward pass: as many as run concurrently.
const BACKWARD_BLOCKS: usize = 4 * MULTIPROCESSORS;

impl GpuKernel for GatedNorm {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, gate, weight, eps, out } = self;
        let (cols, rows) = (weight.elems(), rows(x, weight.elems()));
        let name = if has_vectors(cols, &[x, gate, weight, out]) { "gated_norm" } else { "gated_norm_any" };
        let blocks = LaunchConfig::new(size(rows.div_ceil(WARPS))?, THREADS as u32);
        let args = args![x, gate, weight, eps, out, size(rows)?, size(cols)?];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for GatedNormBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dout, x, gate, weight, eps, dx, dgate, dweight, accumulate } = self;
        let (cols, rows) = (weight.elems(), rows(x, weight.elems()));
        let vectors = has_vectors(cols, &[dout, x, gate, weight, dx, dgate]) && cols <= WARP * VECTOR;
        let name = if vectors { "gated_norm_backward" } else { "gated_norm_backward_any" };
        let blocks = rows.div_ceil(WARPS).min(BACKWARD_BLOCKS);
        let partials = queue.scratch(blocks * WARPS * cols)?;
        let args = args![dout, x, gate, weight, eps, dx, dgate, partials, size(rows)?, size(cols)?];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), LaunchConfig::new(size(blocks)?, THREADS as u32), args)?;
        fold_columns(queue, partials, blocks * WARPS, (dweight, None), accumulate)
    }
}

/// Whether rows of `cols` elements are whole vectors in all of `slices`.
fn has_vectors(cols: usize, slices: &[DeviceSlice]) -> bool {
    let aligned = |x: &DeviceSlice| x.addr().is_multiple_of((VECTOR * x.dtype().bytes()) as u64);
    cols.is_multiple_of(VECTOR) && slices.iter().all(aligned)
}
