//! Expert products. Only the GPU knows the segments, so grids follow from sizes alone.

use super::super::group_tables::GroupTables;
use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{MULTIPROCESSORS, WARP, whole_vectors, wide};
use crate::device::{GroupedMatmul, GroupedShape, Kernel, MatmulLayout, MatmulShape, RouterLogits, SegmentSums, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/grouped.ptx"),
    typed: &[
        "grouped_nt",
        "grouped_nt_any",
        "grouped_nn",
        "grouped_nn_any",
        "grouped_tn",
        "grouped_tn_any",
        "router_logits",
        "router_logits_any",
        "segment_sums",
        "segment_sums_any",
    ],
    plain: &[],
};

/// Expert products with instructions of Hopper only.
pub(super) const HOPPER_SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/grouped_sm90a.ptx"),
    typed: &[],
    plain: &[
        "grouped_nt_sm90a_bf16",
        "grouped_nt_sm90a_f16",
        "grouped_nn_sm90a_bf16",
        "grouped_nn_sm90a_f16",
        "grouped_tn_sm90a_bf16",
        "grouped_tn_sm90a_f16",
    ],
};

/// Kernels that write the tables of cuBLASLt's grouped layouts.
pub(super) const TABLES_SOURCE: PtxSource =
    PtxSource { file: ptx_file!("groups.ptx"), typed: &[], plain: &["group_tables", "zero_groups"] };

/// Threads of a block, as in `grouped.cu`, and of a block that sums an expert's rows.
const THREADS: u32 = 256;
const SUM_THREADS: u32 = 1024;

/// Constants of `grouped_sm90a.cu`: threads of a block; bytes of four slots of 128 and 256 rows of 128 bytes, plus alignment.
const HOPPER_THREADS: u32 = 384;
const HOPPER_SHARED_BYTES: u32 = 4 * (128 + 256) * 128 + 1024;

/// Constants of `groups.ptx`: blocks that fill one expert's weight with zeros, and bytes of one write.
const ZERO_BLOCKS: usize = 32;
const ZERO_BYTES: usize = 16;

impl GpuKernel for GroupedMatmul {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { shape: GroupedShape { layout, experts, rows, outs, ins }, a, b, bounds, c, accumulate } = self;
        let dtype = self.float_format()?;
        let vectors = [outs, ins].into_iter().all(|cols| whole_vectors(cols, &[a, b]));
        if let Some(tables) = queue.group_tables() {
            if !vectors || !whole_vectors(ins, &[c]) || dtype == Dtype::Float32 {
                return Err(Error::Unsupported(format!(
                    "products of experts of {outs} x {ins} in {dtype} by cuBLASLt: it supports 16-bit formats and rows of whole 16-byte \
                        vectors"
                )));
            }
            return self.enqueue_for_cublaslt(queue, tables, dtype);
        }
        if vectors && whole_vectors(ins, &[c]) && queue.is_hopper() && dtype != Dtype::Float32 {
            return self.enqueue_on_hopper(queue, dtype);
        }
        let tile = tile(dtype);
        let row_tiles = rows / tile + experts;
        let (name, any, across, down, deep) = match layout {
            MatmulLayout::Nt => ("grouped_nt", "grouped_nt_any", outs, row_tiles, 1),
            MatmulLayout::Nn => ("grouped_nn", "grouped_nn_any", ins, row_tiles, 1),
            MatmulLayout::Tn => ("grouped_tn", "grouped_tn_any", ins, outs.div_ceil(tile), experts),
        };
        let (name, blocks) = (if vectors { name } else { any }, blocks([across.div_ceil(tile), down, deep])?);
        let (outs, ins) = (size(outs)?, size(ins)?);
        match layout {
            MatmulLayout::Tn => queue.launch(Stream::Compute, name, Some(dtype), blocks, args![a, b, bounds, c, outs, ins, accumulate]),
            _ => {
                let args = args![a, b, bounds, c, size(experts)?, size(rows)?, outs, ins];
                queue.launch(Stream::Compute, name, Some(dtype), blocks, args)
            }
        }
    }
}

impl GroupedMatmul {
    /// Writes the tables, then enqueues the products that read them. Weight gradients of experts without rows are set to zero by a kernel,
    /// because cuBLASLt releases differ in their results for sums of no terms.
    fn enqueue_for_cublaslt(self, queue: &mut impl Queue, tables: GroupTables, dtype: Dtype) -> Result<()> {
        let Self { shape, a, b, bounds, c, accumulate } = self;
        let GroupedShape { layout, experts, rows, outs, ins } = shape;
        let [x, y, weights] = match layout {
            MatmulLayout::Nt => [a, c, b],
            MatmulLayout::Nn => [c, a, b],
            MatmulLayout::Tn => [b, a, c],
        };
        let blocks = LaunchConfig::new(size(experts.div_ceil(THREADS as usize))?, THREADS);
        let args = args![bounds, x, y, weights, tables.0, size(experts)?, size(outs)?, size(ins)?, accumulate];
        queue.launch(Stream::Compute, "group_tables", None, blocks, args)?;
        if layout == MatmulLayout::Tn && !accumulate {
            let blocks = LaunchConfig::new(size(experts * ZERO_BLOCKS)?, THREADS);
            let vectors = (outs * ins * dtype.bytes() / ZERO_BYTES) as u64;
            queue.launch(Stream::Compute, "zero_groups", None, blocks, args![bounds, weights, vectors])?;
        }
        if rows * outs * ins == 0 { Ok(()) } else { queue.multiply_groups(shape, dtype) }
    }

    /// Launches one block for each multiprocessor; each block processes any number of tiles, possibly none.
    fn enqueue_on_hopper(self, queue: &mut impl Queue, dtype: Dtype) -> Result<()> {
        let Self { shape: GroupedShape { layout, experts, rows, outs, ins }, a, b, bounds, c, accumulate } = self;
        let name = match (layout, dtype) {
            (MatmulLayout::Nt, Dtype::Float16) => "grouped_nt_sm90a_f16",
            (MatmulLayout::Nt, _) => "grouped_nt_sm90a_bf16",
            (MatmulLayout::Nn, Dtype::Float16) => "grouped_nn_sm90a_f16",
            (MatmulLayout::Nn, _) => "grouped_nn_sm90a_bf16",
            (MatmulLayout::Tn, Dtype::Float16) => "grouped_tn_sm90a_f16",
            (MatmulLayout::Tn, _) => "grouped_tn_sm90a_bf16",
        };
        let grid = [size(MULTIPROCESSORS)?, 1, 1];
        let blocks = LaunchConfig { grid, block: [HOPPER_THREADS, 1, 1], shared_bytes: HOPPER_SHARED_BYTES };
        let (experts, rows, outs, ins) = (size(experts)?, size(rows)?, size(outs)?, size(ins)?);
        match layout {
            MatmulLayout::Tn => queue.launch(Stream::Compute, name, None, blocks, args![a, b, bounds, c, experts, outs, ins, accumulate]),
            _ => queue.launch(Stream::Compute, name, None, blocks, args![a, b, bounds, c, experts, rows, outs, ins]),
        }
    }
}

impl GpuKernel for RouterLogits {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, weight, bias, logits, channels } = self;
        let MatmulShape { m, n, .. } = self.product();
        let dtype = self.float_format()?;
        let (name, tile) = (if whole_vectors(channels, &[x, weight]) { "router_logits" } else { "router_logits_any" }, tile(dtype));
        let blocks = blocks([n.div_ceil(tile), m.div_ceil(tile), 1])?;
        let args = args![x, weight, bias, logits, size(m)?, size(n)?, size(channels)?];
        queue.launch(Stream::Compute, name, Some(dtype), blocks, args)
    }
}

impl GpuKernel for SegmentSums {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, weights, entries, bounds, out, accumulate, cols } = self;
        let (name, each) = if whole_vectors(cols, &[x]) { (Self::NAME, wide(x.dtype())) } else { ("segment_sums_any", 1) };
        let blocks = LaunchConfig { block: [SUM_THREADS, 1, 1], ..blocks([cols.div_ceil(WARP * each), bounds.elems() - 1, 1])? };
        let args = args![x, weights, entries, bounds, out, size(cols)?, accumulate];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)
    }
}

/// Rows and columns of a tile.
fn tile(dtype: Dtype) -> usize {
    if dtype == Dtype::Float32 { 64 } else { 128 }
}

/// # Errors
/// `Unsupported` when a GPU does not support a grid of this size.
fn blocks(grid: [usize; 3]) -> Result<LaunchConfig> {
    if grid[1..].iter().any(|&blocks| blocks > usize::from(u16::MAX)) {
        return Err(Error::Unsupported(format!("a grid of {grid:?} blocks: use smaller micro-batches")));
    }
    let [x, y, z] = grid;
    Ok(LaunchConfig { grid: [size(x)?, size(y)?, size(z)?], block: [THREADS, 1, 1], shared_bytes: 0 })
}

#[cfg(test)]
#[path = "grouped_tests.rs"]
mod products;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_that_no_gpu_has_is_refused() {
        assert_eq!(blocks([1 << 20, 65535, 1]).unwrap().grid, [1 << 20, 65535, 1]);
        assert!(blocks([1, 65536, 1]).unwrap_err().to_string().contains("smaller micro-batches"));
    }
}
