//! From bfloat16 to numbers of 8 bits, on GPUs since Ada.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{MULTIPROCESSORS, whole_vectors, wide};
use crate::device::{AbsMaxScale, DeviceSlice, Quantize, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("transformer/quantize_sm89.ptx"),
    typed: &[],
    plain: &["abs_max_scale_e4m3", "abs_max_scale_e5m2", "quantize_e4m3", "quantize_e5m2"],
};

/// As in `quantize_sm89.cu`: threads of a block, rows and columns of its tile.
const THREADS: usize = 256;
const TILE: usize = 128;
/// Blocks that look for a largest number on each multiprocessor: as many as it runs at once.
const BLOCKS_EACH: usize = 8;

impl GpuKernel for AbsMaxScale {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, scale, format } = self;
        check_input(x)?;
        queue.zero(scale)?;
        let (vectors, rest) = (x.elems() / wide(x.dtype()), x.elems() % wide(x.dtype()));
        let blocks = vectors.div_ceil(THREADS).clamp(1, BLOCKS_EACH * MULTIPROCESSORS);
        let name = if format == Dtype::Float8E5m2 { "abs_max_scale_e5m2" } else { "abs_max_scale_e4m3" };
        let blocks = LaunchConfig::new(size(blocks)?, THREADS as u32);
        queue.launch(Stream::Compute, name, None, blocks, args![x, scale, vectors as u64, size(rest)?])
    }
}

impl GpuKernel for Quantize {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, scale, out, transposed, cols } = self;
        [Some(x), out, transposed].into_iter().flatten().try_for_each(check_aligned)?;
        check_input(x)?;
        let rows = x.elems() / cols;
        let tiles = rows.div_ceil(TILE) * cols.div_ceil(TILE);
        let name = if self.format()? == Dtype::Float8E5m2 { "quantize_e5m2" } else { "quantize_e4m3" };
        let blocks = LaunchConfig::new(size(tiles)?, THREADS as u32);
        queue.launch(Stream::Compute, name, None, blocks, args![x, scale, out, transposed, size(rows)?, size(cols)?])
    }
}

/// # Errors
/// `Unsupported` for another format, and for addresses within vectors.
fn check_input(x: DeviceSlice) -> Result<()> {
    if x.dtype() != Dtype::Bfloat16 {
        return Err(Error::Unsupported(format!("FP8 of {}: kernels take bfloat16", x.dtype())));
    }
    check_aligned(x)
}

fn check_aligned(x: DeviceSlice) -> Result<()> {
    let vectors = whole_vectors(wide(x.dtype()), &[x]);
    if vectors { Ok(()) } else { Err(Error::Unsupported(format!("FP8 at address {:x}: kernels take multiples of 16", x.addr()))) }
}
