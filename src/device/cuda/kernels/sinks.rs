//! Attention sinks.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::bias::fold_columns;
use super::grid::{MULTIPROCESSORS, WARP, whole_vectors, wide};
use crate::device::{AttentionShape, DeviceSlice, Kernel, Sinks, SinksBackward, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/sinks.ptx"),
    typed: &["sinks", "sinks_any", "sinks_backward", "sinks_backward_any"],
    plain: &[],
};

/// Constant of `sinks.cu`.
const THREADS: usize = 256;
/// Partial sums over tokens: the number of blocks of 256 threads that a GPU runs concurrently.
const PARTS: usize = 8 * MULTIPROCESSORS;

/// Whether a head is processed as vectors, and the base-2 logarithm of the number of lanes for it.
fn lanes_log2(head_dim: usize, slices: &[DeviceSlice]) -> (bool, u32) {
    let vectors = whole_vectors(head_dim, slices);
    let items = if vectors { head_dim / wide(slices[0].dtype()) } else { head_dim };
    (vectors, items.next_power_of_two().min(WARP).ilog2())
}

impl GpuKernel for Sinks {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { sinks, out, lse, shape } = self;
        let AttentionShape { seq_length, heads, head_dim, .. } = shape;
        let rows = shape.tokens() * heads;
        let (vectors, lanes) = lanes_log2(head_dim, &[out]);
        let name = if vectors { Self::NAME } else { "sinks_any" };
        let blocks = LaunchConfig::new(size(rows.div_ceil(THREADS >> lanes))?, THREADS as u32);
        let args = args![sinks, out, lse, size(rows)?, size(heads)?, size(head_dim)?, size(seq_length)?, lanes];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for SinksBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dout, out, lse, sinks, dsinks, accumulate, shape } = self;
        let AttentionShape { seq_length, heads, head_dim, .. } = shape;
        let (vectors, lanes) = lanes_log2(head_dim, &[dout, out]);
        let name = if vectors { Self::NAME } else { "sinks_backward_any" };
        let parts = shape.tokens().min(PARTS);
        let partials = queue.scratch(parts * heads)?;
        let grid = [size(parts)?, size(heads.div_ceil(THREADS >> lanes))?, 1];
        let blocks = LaunchConfig { grid, block: [THREADS as u32, 1, 1], shared_bytes: 0 };
        let tokens = size(shape.tokens())?;
        let args = args![dout, out, lse, sinks, partials, tokens, size(heads)?, size(head_dim)?, size(seq_length)?, lanes];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)?;
        fold_columns(queue, partials, parts, (dsinks, None), accumulate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    #[test]
    fn a_head_takes_as_many_lanes_as_its_vectors_and_at_most_a_warp() {
        let lanes = |dtype, d| lanes_log2(d, &[DeviceSlice::at(0, d, dtype)]);
        assert_eq!([8, 64, 96, 128, 512].map(|d| lanes(Dtype::Bfloat16, d)), [0, 3, 4, 4, 5].map(|lanes| (true, lanes)));
        assert_eq!([5, 21, 66].map(|d| lanes(Dtype::Bfloat16, d)), [3, 5, 5].map(|lanes| (false, lanes)));
    }
}
