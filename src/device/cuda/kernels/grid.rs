//! Blocks and threads of the transformer's kernels.

use super::super::launch::{LaunchConfig, size};
use crate::device::DeviceSlice;
use crate::dtype::Dtype;
use crate::error::Result;

/// Multiprocessors of an H200, for which grids are sized. This is a constant because sums are split at block boundaries, and results must
/// not depend on the machine.
pub(super) const MULTIPROCESSORS: usize = 132;

/// Threads of a warp.
pub(super) const WARP: usize = 32;

/// Elements of a 16-byte vector.
pub(super) fn wide(dtype: Dtype) -> usize {
    16 / dtype.bytes()
}

/// Whether rows of `cols` elements are whole 16-byte vectors in all of `slices`.
pub(super) fn whole_vectors(cols: usize, slices: &[DeviceSlice]) -> bool {
    slices.iter().all(|x| x.addr().is_multiple_of(16) && cols.is_multiple_of(wide(x.dtype())))
}

/// Number of threads for `items` at `each` per thread: whole warps, at least one.
pub(super) fn threads(items: usize, each: usize) -> usize {
    items.div_ceil(each).next_multiple_of(WARP).max(WARP)
}

/// Whether rows of `cols` are processed as vectors, and a grid of blocks of at most `most` threads: each block processes a part of the
/// columns of one of `rows`.
pub(super) fn rows_blocks(rows: usize, cols: usize, most: usize, slices: &[DeviceSlice]) -> Result<(bool, LaunchConfig)> {
    let vectors = whole_vectors(cols, slices);
    let items = if vectors { cols / wide(slices[0].dtype()) } else { cols };
    let threads = threads(items, 1).min(most);
    let grid = [size(rows)?, size(items.div_ceil(threads))?, 1];
    Ok((vectors, LaunchConfig { grid, block: [size(threads)?, 1, 1], shared_bytes: 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_need_whole_rows_and_aligned_addresses() {
        let x = DeviceSlice::at(256, 64, Dtype::Bfloat16);
        assert!(whole_vectors(8, &[x, x.slice(8, 8)]));
        assert!(!whole_vectors(8, &[x, x.slice(4, 8)]));
        assert!(!whole_vectors(12, &[x]));
        assert!(whole_vectors(12, &[DeviceSlice::at(256, 64, Dtype::Float32)]));
    }

    #[test]
    fn rows_are_cut_into_parts_of_at_most_one_block() {
        let x = DeviceSlice::at(0, 1 << 20, Dtype::Bfloat16);
        let shape = |rows, cols| {
            let (vectors, blocks) = rows_blocks(rows, cols, 128, &[x]).unwrap();
            (vectors, blocks.grid, blocks.block[0])
        };
        assert_eq!(shape(7, 2560), (true, [7, 3, 1], 128));
        assert_eq!(shape(7, 64), (true, [7, 1, 1], 32));
        assert_eq!(shape(7, 70), (false, [7, 1, 1], 96));
        assert_eq!(shape(0, 129), (false, [0, 2, 1], 128));
    }

    #[test]
    fn threads_are_whole_warps() {
        assert_eq!([0, 1, 64, 65, 320].map(|items| threads(items, 2)), [32, 32, 32, 64, 160]);
    }
}
