//! Token and position embeddings.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{WARP, rows_blocks, threads, whole_vectors, wide};
use crate::device::{DeviceSlice, Embed, EmbedBackward, Kernel, ScatterRows, Stream};
use crate::dtype::Dtype;
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/embed.ptx"),
    typed: &["embed", "embed_any", "embed_backward", "embed_backward_any", "scatter_rows", "scatter_rows_any"],
    plain: &["sort_entries"],
};

/// Maximum threads of a block of `embed`, and vectors that a thread loads at a time.
const EMBED_THREADS: usize = 256;
const EMBED_VECS: usize = 2;
/// Maximum threads of a block of `scatter_rows`, which copies one row.
const SCATTER_THREADS: usize = 256;
/// Maximum threads of a block of the gradients.
const BACKWARD_THREADS: usize = 128;
/// Threads of a block of `sort_entries`, which ranks 32 rows, one for each lane of a warp.
const SORT_THREADS: u32 = 256;

impl GpuKernel for Embed {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { tokens, positions, wte, wpe, out, channels } = self;
        let dtype = self.float_format()?;
        let vectors = whole_vectors(channels, &[wte, wpe.unwrap_or(wte), out]);
        let (name, lanes) = if vectors { ("embed", wide(dtype)) } else { ("embed_any", 1) };
        let threads = threads(channels, EMBED_VECS * lanes).min(EMBED_THREADS);
        let args = args![tokens, positions, wte, wpe, out, size(channels)?];
        queue.launch(Stream::Compute, name, Some(dtype), LaunchConfig::new(size(tokens.elems())?, size(threads)?), args)
    }
}

impl GpuKernel for EmbedBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { tokens, positions, dout, dwte, first_token, accumulate_wte, dwpe, accumulate_wpe, channels } = self;
        let dtype = self.float_format()?;
        let table = |entries, lowest, dtable, accumulate| Table { entries, lowest, dout, dtable, accumulate, channels };
        table(tokens, first_token, dwte, accumulate_wte).enqueue(queue, dtype)?;
        if let Some(dwpe) = dwpe { table(positions, 0, dwpe, accumulate_wpe).enqueue(queue, dtype) } else { Ok(()) }
    }
}

impl GpuKernel for ScatterRows {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { stream, rows, packed, table, below, skipped, channels } = self;
        let dtype = self.float_format()?;
        let lanes = wide(dtype);
        // The last row must end on a whole vector, too.
        let is_whole = [below, skipped, packed.elems()].iter().all(|elems| elems.is_multiple_of(lanes));
        let vectors = is_whole && whole_vectors(channels, &[packed, table]);
        let (name, lanes) = if vectors { ("scatter_rows", lanes) } else { ("scatter_rows_any", 1) };
        let blocks = LaunchConfig::new(size(rows.elems())?, size(threads(channels, lanes).min(SCATTER_THREADS))?);
        let args = args![rows, packed, table, packed.elems() as u64, below as u64, size(skipped)?, size(channels)?];
        queue.launch(stream, name, Some(dtype), blocks, args)
    }
}

/// `dtable[e - lowest] (+)=` the sum of the rows of `dout` whose entry, int32 `[T]`, is `e`, for all `e` with a place in `dtable`.
struct Table {
    entries: DeviceSlice,
    lowest: usize,
    dout: DeviceSlice,
    dtable: DeviceSlice,
    accumulate: bool,
    channels: usize,
}

impl Table {
    fn enqueue(self, queue: &mut impl Queue, dtype: Dtype) -> Result<()> {
        let Self { entries, lowest, dout, dtable, accumulate, channels } = self;
        if !accumulate {
            // Most rows of a vocabulary are unused, so writing the used rows twice costs little.
            queue.zero(dtable)?;
        }
        let t = entries.elems();
        let sorted = queue.scratch(2 * t)?;
        let blocks = LaunchConfig::new(size(t.div_ceil(WARP))?, SORT_THREADS);
        queue.launch(Stream::Compute, "sort_entries", None, blocks, args![entries, sorted, size(t)?])?;
        let (vectors, blocks) = rows_blocks(t, channels, BACKWARD_THREADS, &[dout, dtable])?;
        let name = if vectors { "embed_backward" } else { "embed_backward_any" };
        let places = dtable.elems() / channels.max(1);
        let args = args![sorted, dout, dtable, size(t)?, size(channels)?, size(lowest)?, size(places)?, accumulate];
        queue.launch(Stream::Compute, name, Some(dtype), blocks, args)
    }
}
