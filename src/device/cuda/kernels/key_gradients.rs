//! Gradients of keys and values, accumulated over blocks of queries.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{whole_vectors, wide};
use crate::device::{AddKeyGradients, Kernel, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource =
    PtxSource { file: ptx_file!("generated/key_gradients.ptx"), typed: &["add_key_gradients"], plain: &[] };

/// Constant of `key_gradients.cu`.
const THREADS: usize = 256;

impl GpuKernel for AddKeyGradients {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dqkv, sums, pitch, columns: [of_keys, of_values], width, begun, done } = self;
        let whole = |cols: usize| whole_vectors(cols, &[dqkv]);
        let is_wide = [pitch, of_keys, of_values, width].into_iter().all(whole) && whole_vectors(width, &[sums]);
        let items = self.keys() * 2 * width / if is_wide { wide(dqkv.dtype()) } else { 1 };
        let blocks = LaunchConfig::new(size(items.div_ceil(THREADS))?, THREADS as u32);
        let [pitch, of_keys, of_values, width, begun, done] =
            [size(pitch)?, size(of_keys)?, size(of_values)?, size(width)?, size(begun)?, size(done)?];
        let args = args![dqkv, sums, items as u64, pitch, of_keys, of_values, width, begun, done, is_wide];
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), blocks, args)
    }
}
