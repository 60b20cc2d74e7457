//! RMS and layer normalisation.

use super::super::launch::{LaunchConfig, Queue, args, size};
use super::super::modules::PtxSource;
use super::bias::fold_columns;
use super::grid::{MULTIPROCESSORS, threads, whole_vectors, wide};
use crate::device::arguments::{arguments, check, rows};
use crate::device::{DeviceSlice, Stream};
use crate::dtype::Dtype;
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: "transformer/norm.ptx",
    ptx: include_str!("../../../../ptx/transformer/norm.ptx"),
    typed: &[
        "rms_norm",
        "rms_norm_any",
        "rms_norm_backward",
        "rms_norm_backward_any",
        "layer_norm",
        "layer_norm_any",
        "layer_norm_backward",
        "layer_norm_backward_any",
    ],
    plain: &[],
};

/// Threads of a block of the kernels named `any`.
const ANY_THREADS: usize = 256;

/// How a pair of kernels goes through rows.
struct RowPass {
    /// The kernel that keeps a row in registers.
    name: &'static str,
    /// The one for all other rows.
    any: &'static str,
    /// 16-byte vectors of a row that a thread keeps.
    vecs: usize,
    /// Most threads of a block.
    threads_max: usize,
    /// Threads that a multiprocessor has registers for.
    resident_threads: usize,
}

const RMS_NORM: RowPass = RowPass { name: "rms_norm", any: "rms_norm_any", vecs: 4, threads_max: 1024, resident_threads: 1024 };
const LAYER_NORM: RowPass = RowPass { name: "layer_norm", any: "layer_norm_any", ..RMS_NORM };
const RMS_NORM_BACKWARD: RowPass =
    RowPass { name: "rms_norm_backward", any: "rms_norm_backward_any", vecs: 2, threads_max: 512, resident_threads: 1024 };
const LAYER_NORM_BACKWARD: RowPass =
    RowPass { name: "layer_norm_backward", any: "layer_norm_backward_any", resident_threads: 640, ..RMS_NORM_BACKWARD };

impl RowPass {
    /// The kernel for rows of `cols` in `slices`, and the threads of its blocks.
    fn choose(&self, cols: usize, slices: &[DeviceSlice]) -> (&'static str, usize) {
        let threads = threads(cols, self.vecs * wide(slices[0].dtype));
        if whole_vectors(cols, slices) && threads <= self.threads_max { (self.name, threads) } else { (self.any, ANY_THREADS) }
    }

    /// Blocks that share out `rows`: as many as run at a time.
    fn blocks(&self, rows: usize, threads: usize) -> usize {
        rows.min(MULTIPROCESSORS * (self.resident_threads / threads).clamp(1, 8))
    }
}

/// See [`crate::device::Kernels::rms_norm`].
pub(super) fn rms_norm(
    dev: &mut impl Queue,
    x: DeviceSlice,
    weight: DeviceSlice,
    eps: f32,
    out: DeviceSlice,
    rstd: DeviceSlice,
) -> Result<()> {
    let (cols, rows) = (weight.elems, rstd.elems);
    let n = rows * cols;
    check("rms_norm", arguments![x.dtype => in x[n], in weight[cols], out out[n]; Dtype::Float32 => out rstd[rows]])?;
    let (name, threads) = RMS_NORM.choose(cols, &[x, weight, out]);
    let args = args![x, weight, eps, out, rstd, size(cols)?];
    dev.launch(Stream::Compute, name, Some(x.dtype), LaunchConfig::new(size(rows)?, size(threads)?), args)
}

/// See [`crate::device::Kernels::layer_norm`].
pub(super) fn layer_norm(
    dev: &mut impl Queue,
    x: DeviceSlice,
    weight: DeviceSlice,
    bias: DeviceSlice,
    eps: f32,
    out: DeviceSlice,
    stats: DeviceSlice,
) -> Result<()> {
    let (cols, rows) = (weight.elems, rows(x, weight.elems));
    let n = rows * cols;
    check("layer_norm", arguments![x.dtype => in x[n], in weight[cols], in bias[cols], out out[n]; Dtype::Float32 => out stats[2 * rows]])?;
    let (name, threads) = LAYER_NORM.choose(cols, &[x, weight, bias, out]);
    let args = args![x, weight, bias, eps, out, stats, size(cols)?];
    dev.launch(Stream::Compute, name, Some(x.dtype), LaunchConfig::new(size(rows)?, size(threads)?), args)
}

/// See [`crate::device::Kernels::rms_norm_backward`].
#[expect(clippy::too_many_arguments, reason = "as in the trait")]
pub(super) fn rms_norm_backward(
    dev: &mut impl Queue,
    dout: DeviceSlice,
    x: DeviceSlice,
    weight: DeviceSlice,
    rstd: DeviceSlice,
    dx: DeviceSlice,
    dweight: DeviceSlice,
    accumulate: bool,
) -> Result<()> {
    let (cols, rows) = (weight.elems, rows(x, weight.elems));
    let n = rows * cols;
    check(
        "rms_norm_backward",
        arguments![
            x.dtype => in dout[n], in x[n], in weight[cols], out dx[n], out dweight[cols];
            Dtype::Float32 => in rstd[rows]
        ],
    )?;
    backward(dev, &RMS_NORM_BACKWARD, [dout, x, weight, rstd, dx], rows, (dweight, None), accumulate)
}

/// See [`crate::device::Kernels::layer_norm_backward`].
#[expect(clippy::too_many_arguments, reason = "as in the trait")]
pub(super) fn layer_norm_backward(
    dev: &mut impl Queue,
    dout: DeviceSlice,
    x: DeviceSlice,
    weight: DeviceSlice,
    stats: DeviceSlice,
    dx: DeviceSlice,
    dweight: DeviceSlice,
    dbias: DeviceSlice,
    accumulate: bool,
) -> Result<()> {
    let (cols, rows) = (weight.elems, rows(x, weight.elems));
    let n = rows * cols;
    check(
        "layer_norm_backward",
        arguments![
            x.dtype => in dout[n], in x[n], in weight[cols], out dx[n], out dweight[cols], out dbias[cols];
            Dtype::Float32 => in stats[2 * rows]
        ],
    )?;
    backward(dev, &LAYER_NORM_BACKWARD, [dout, x, weight, stats, dx], rows, (dweight, Some(dbias)), accumulate)
}

/// Both stages: `dx` and sums over each block's rows in one pass, then the sums over blocks into `dweight` and `dbias`.
fn backward(
    dev: &mut impl Queue,
    pass: &RowPass,
    [dout, x, weight, stats, dx]: [DeviceSlice; 5],
    rows: usize,
    (dweight, dbias): (DeviceSlice, Option<DeviceSlice>),
    accumulate: bool,
) -> Result<()> {
    let cols = weight.elems;
    let (name, threads) = pass.choose(cols, &[dout, x, weight, dx]);
    let blocks = pass.blocks(rows, threads);
    let partials = dev.scratch((1 + usize::from(dbias.is_some())) * blocks * cols)?;
    let args = args![dout, x, weight, stats, dx, partials, size(rows)?, size(cols)?];
    dev.launch(Stream::Compute, name, Some(x.dtype), LaunchConfig::new(size(blocks)?, size(threads)?), args)?;
    fold_columns(dev, partials, blocks, (dweight, dbias), accumulate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stay_in_registers_when_they_are_whole_vectors_and_fit() {
        let x = DeviceSlice { addr: 0, elems: 1 << 20, dtype: Dtype::Bfloat16 };
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
