//! RMS and layer normalisation.

use super::super::launch::{Arg, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::bias::fold_columns;
use super::grid::{MULTIPROCESSORS, threads, whole_vectors, wide};
use super::quantize::{ScalingKernel, also_without_scale};
use crate::device::kernel::rows;
use crate::device::{DeviceSlice, Kernel, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward, Stream};
use crate::dtype::Dtype;
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/norm.ptx"),
    typed: &[
        "rms_norm",
        "rms_norm_any",
        "rms_norm_backward",
        "rms_norm_backward_any",
        "rms_norm_plus_one",
        "rms_norm_plus_one_any",
        "rms_norm_plus_one_backward",
        "rms_norm_plus_one_backward_any",
        "layer_norm",
        "layer_norm_any",
        "layer_norm_backward",
        "layer_norm_backward_any",
    ],
    plain: &[],
};

/// Threads of a block of the kernels with suffix `any`.
const ANY_THREADS: usize = 256;

/// Two kernels of one pass over rows, and their launch parameters.
struct RowPass {
    /// The kernel that keeps a row in registers.
    name: &'static str,
    /// The kernel for all other rows.
    any: &'static str,
    /// 16-byte vectors of a row that a thread keeps in registers.
    vecs: usize,
    /// Maximum threads of a block.
    threads_max: usize,
    /// Threads that the registers of a multiprocessor suffice for.
    resident_threads: usize,
}

const RMS_NORM: RowPass = RowPass { name: "rms_norm", any: "rms_norm_any", vecs: 4, threads_max: 1024, resident_threads: 1024 };
const RMS_NORM_PLUS_ONE: RowPass = RowPass { name: "rms_norm_plus_one", any: "rms_norm_plus_one_any", ..RMS_NORM };
const LAYER_NORM: RowPass = RowPass { name: "layer_norm", any: "layer_norm_any", ..RMS_NORM };
const RMS_NORM_BACKWARD: RowPass =
    RowPass { name: "rms_norm_backward", any: "rms_norm_backward_any", vecs: 2, threads_max: 512, resident_threads: 1024 };
const RMS_NORM_PLUS_ONE_BACKWARD: RowPass =
    RowPass { name: "rms_norm_plus_one_backward", any: "rms_norm_plus_one_backward_any", ..RMS_NORM_BACKWARD };
const LAYER_NORM_BACKWARD: RowPass =
    RowPass { name: "layer_norm_backward", any: "layer_norm_backward_any", resident_threads: 640, ..RMS_NORM_BACKWARD };

impl RowPass {
    /// The kernel for rows of `cols` columns in `slices`, and the threads of its blocks.
    fn choose(&self, cols: usize, slices: &[DeviceSlice]) -> (&'static str, usize) {
        let threads = threads(cols, self.vecs * wide(slices[0].dtype()));
        if whole_vectors(cols, slices) && threads <= self.threads_max { (self.name, threads) } else { (self.any, ANY_THREADS) }
    }

    /// Number of blocks for `rows` rows: at most as many as run concurrently.
    fn blocks(&self, rows: usize, threads: usize) -> usize {
        rows.min(MULTIPROCESSORS * (self.resident_threads / threads).clamp(1, 8))
    }
}

also_without_scale!(RmsNorm, LayerNorm, RmsNormBackward, LayerNormBackward);

impl ScalingKernel for RmsNorm {
    fn enqueue_scaling(self, queue: &mut impl Queue, [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { x, weight, plus_one, eps, out, rstd } = self;
        let (cols, rows) = (weight.elems(), rstd.elems());
        let (name, threads) = if plus_one { RMS_NORM_PLUS_ONE } else { RMS_NORM }.choose(cols, &[x, weight, out]);
        let args = args![x, weight, eps, out, rstd, size(cols)?, cell, exponent];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), LaunchConfig::new(size(rows)?, size(threads)?), args)
    }
}

impl ScalingKernel for LayerNorm {
    fn enqueue_scaling(self, queue: &mut impl Queue, [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { x, weight, bias, eps, out, stats } = self;
        let (cols, rows) = (weight.elems(), rows(x, weight.elems()));
        let (name, threads) = LAYER_NORM.choose(cols, &[x, weight, bias, out]);
        let args = args![x, weight, bias, eps, out, stats, size(cols)?, cell, exponent];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), LaunchConfig::new(size(rows)?, size(threads)?), args)
    }
}

impl ScalingKernel for RmsNormBackward {
    fn enqueue_scaling(self, queue: &mut impl Queue, scale: [Arg; 2]) -> Result<()> {
        let Self { dout, x, weight, plus_one, rstd, dx, dweight, accumulate } = self;
        let pass = if plus_one { RMS_NORM_PLUS_ONE_BACKWARD } else { RMS_NORM_BACKWARD };
        let both = Backward { dout, x, weight, stats: rstd, dx, dweight, dbias: None, accumulate };
        both.enqueue(queue, (self.float_format()?, pass), scale)
    }
}

impl ScalingKernel for LayerNormBackward {
    fn enqueue_scaling(self, queue: &mut impl Queue, scale: [Arg; 2]) -> Result<()> {
        let Self { dout, x, weight, stats, dx, dweight, dbias, accumulate } = self;
        let both = Backward { dout, x, weight, stats, dx, dweight, dbias: Some(dbias), accumulate };
        both.enqueue(queue, (self.float_format()?, LAYER_NORM_BACKWARD), scale)
    }
}

/// Common operands of the backward passes of both norms.
struct Backward {
    dout: DeviceSlice,
    x: DeviceSlice,
    weight: DeviceSlice,
    stats: DeviceSlice,
    dx: DeviceSlice,
    dweight: DeviceSlice,
    dbias: Option<DeviceSlice>,
    accumulate: bool,
}

impl Backward {
    /// Enqueues both stages: one pass computes `dx` and sums over each block's rows; then the sums over blocks go to `dweight` and `dbias`.
    fn enqueue(self, queue: &mut impl Queue, (dtype, pass): (Dtype, RowPass), [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { dout, x, weight, stats, dx, dweight, dbias, accumulate } = self;
        let (cols, rows) = (weight.elems(), rows(x, weight.elems()));
        let (name, threads) = pass.choose(cols, &[dout, x, weight, dx]);
        let blocks = pass.blocks(rows, threads);
        let partials = queue.scratch((1 + usize::from(dbias.is_some())) * blocks * cols)?;
        let args = args![dout, x, weight, stats, dx, partials, size(rows)?, size(cols)?, cell, exponent];
        queue.launch(Stream::Compute, name, Some(dtype), LaunchConfig::new(size(blocks)?, size(threads)?), args)?;
        fold_columns(queue, partials, blocks, (dweight, dbias), accumulate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stay_in_registers_when_they_are_whole_vectors_and_fit() {
        let x = DeviceSlice::at(0, 1 << 20, Dtype::Bfloat16);
        let chosen = |pass: &RowPass, cols| pass.choose(cols, &[x]);
        assert_eq!(chosen(&RMS_NORM, 2560), ("rms_norm", 96));
        assert_eq!(chosen(&RMS_NORM, 32768), ("rms_norm", 1024));
        assert_eq!(chosen(&RMS_NORM, 32776), ("rms_norm_any", ANY_THREADS));
        assert_eq!(chosen(&LAYER_NORM, 8191), ("layer_norm_any", ANY_THREADS));
        assert_eq!(chosen(&LAYER_NORM_BACKWARD, 8192), ("layer_norm_backward", 512));
        assert_eq!(RMS_NORM_BACKWARD.choose(64, &[x, x.slice(1, 64)]), ("rms_norm_backward_any", ANY_THREADS));
    }

    #[test]
    fn the_blocks_of_a_backward_run_at_a_time() {
        assert_eq!(RMS_NORM_BACKWARD.blocks(16384, 160), 6 * MULTIPROCESSORS);
        assert_eq!(LAYER_NORM_BACKWARD.blocks(16384, 192), 3 * MULTIPROCESSORS);
        assert_eq!(RMS_NORM_BACKWARD.blocks(16384, 32), 8 * MULTIPROCESSORS);
        assert_eq!(RMS_NORM_BACKWARD.blocks(5, 160), 5);
        assert_eq!(RMS_NORM_BACKWARD.blocks(0, 160), 0);
    }
}
