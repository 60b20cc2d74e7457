//! Column sums: the gradient of a bias, and the last stage of every other sum over rows.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{MULTIPROCESSORS, WARP, whole_vectors, wide};
use crate::device::kernel::rows;
use crate::device::{BiasBackward, DeviceSlice, Kernel, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource =
    PtxSource { file: ptx_file!("generated/bias.ptx"), typed: &["column_sums", "column_sums_any", "fold_columns"], plain: &[] };

/// Warps of a block of `column_sums`; six of these blocks fit on a multiprocessor.
const SLICE_WARPS: usize = 8;
const BLOCKS: usize = 6 * MULTIPROCESSORS;
/// Minimum rows of a block.
const SLICE_ROWS_MIN: usize = 8 * SLICE_WARPS;
/// Warps of a block of `fold_columns`.
const FOLD_WARPS: u32 = 32;

impl GpuKernel for BiasBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dout, dbias, accumulate } = self;
        let (dtype, cols, rows) = (self.float_format()?, dbias.elems(), rows(dout, dbias.elems()));
        let (name, lanes) = if whole_vectors(cols, &[dout]) { ("column_sums", wide(dtype)) } else { ("column_sums_any", 1) };
        let tiles = cols.div_ceil(WARP * lanes);
        let slice_rows = slice_rows(rows, tiles);
        let slices = rows.div_ceil(slice_rows);
        let partials = queue.scratch(slices * cols)?;
        let blocks = LaunchConfig { grid: [size(tiles)?, size(slices)?, 1], block: [WARP as u32, SLICE_WARPS as u32, 1], shared_bytes: 0 };
        let args = args![dout, partials, size(rows)?, size(cols)?, size(slice_rows)?];
        queue.launch(Stream::Compute, name, Some(dtype), blocks, args)?;
        fold_columns(queue, partials, slices, (dbias, None), accumulate)
    }
}

/// `out (+)=` the column sums of `partials`, fp32 `[rows, cols]`. The partials of the optional second `out` follow those of the first.
pub(super) fn fold_columns(
    queue: &mut impl Queue,
    partials: DeviceSlice,
    rows: usize,
    (out, second): (DeviceSlice, Option<DeviceSlice>),
    accumulate: bool,
) -> Result<()> {
    let cols = out.elems();
    let grid = [size(cols.div_ceil(WARP))?, 1 + u32::from(second.is_some()), 1];
    let launch = LaunchConfig { grid, block: [WARP as u32, FOLD_WARPS, 1], shared_bytes: 0 };
    let args = args![partials, out, second, size(rows)?, size(cols)?, accumulate];
    queue.launch(Stream::Compute, "fold_columns", Some(out.dtype()), launch, args)
}

/// Rows of a slice, so that the blocks of all `tiles` fill the GPU once.
fn slice_rows(rows: usize, tiles: usize) -> usize {
    let slices = (BLOCKS / tiles.max(1)).max(1);
    rows.div_ceil(slices).max(SLICE_ROWS_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_fill_the_gpu_and_are_not_too_small() {
        for (rows, cols) in [(16384, 3072), (16384, 28672), (8192, 4096), (8192, 9728)] {
            let tiles = cols / 256;
            let blocks = tiles * usize::div_ceil(rows, slice_rows(rows, tiles));
            assert!((BLOCKS * 9 / 10..=BLOCKS).contains(&blocks), "{rows} x {cols}: {blocks}");
        }
        assert_eq!((slice_rows(10, 1), slice_rows(0, 0)), (SLICE_ROWS_MIN, SLICE_ROWS_MIN));
        assert_eq!(slice_rows(1000, 10_000), 1000);
    }
}
