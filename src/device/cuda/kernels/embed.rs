//! Token and position embeddings.

use super::super::launch::{LaunchConfig, Queue, args, size};
use super::super::modules::PtxSource;
use super::grid::{WARP, threads, whole_vectors, wide};
use crate::device::arguments::{arguments, check, rows};
use crate::device::{DeviceSlice, Stream};
use crate::dtype::Dtype;
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: "transformer/embed.ptx",
    ptx: include_str!("../../../../ptx/transformer/embed.ptx"),
    typed: &["embed", "embed_any", "embed_backward", "embed_backward_any"],
    plain: &["sort_entries"],
};

/// Most threads of a block of `embed`, and the vectors of a row that each has at a time.
const EMBED_THREADS: usize = 256;
const EMBED_VECS: usize = 2;
/// Most threads of a block of the gradients.
const BACKWARD_THREADS: usize = 128;
/// Threads of a block of `sort_entries`, which ranks a warp's rows.
const SORT_THREADS: u32 = 256;

/// See [`crate::device::Kernels::embed`].
pub(super) fn embed(
    dev: &mut impl Queue,
    tokens: DeviceSlice,
    positions: DeviceSlice,
    wte: DeviceSlice,
    wpe: Option<DeviceSlice>,
    out: DeviceSlice,
    channels: usize,
) -> Result<()> {
    let (dtype, t, vocab) = (out.dtype, tokens.elems, rows(wte, channels) * channels);
    check("embed", arguments![dtype => in wte[vocab], out out[t * channels]; Dtype::Int32 => in tokens[t], in positions[t]])?;
    if let Some(wpe) = wpe {
        check("embed", arguments![dtype => in wpe[rows(wpe, channels) * channels], out out[t * channels]])?;
    }
    let vectors = whole_vectors(channels, &[wte, wpe.unwrap_or(wte), out]);
    let (name, lanes) = if vectors { ("embed", wide(dtype)) } else { ("embed_any", 1) };
    let threads = threads(channels, EMBED_VECS * lanes).min(EMBED_THREADS);
    let args = args![tokens, positions, wte, wpe, out, size(channels)?];
    dev.launch(Stream::Compute, name, Some(dtype), LaunchConfig::new(size(t)?, size(threads)?), args)
}

/// See [`crate::device::Kernels::embed_backward`].
#[expect(clippy::too_many_arguments, reason = "as in the trait")]
pub(super) fn embed_backward(
    dev: &mut impl Queue,
    tokens: DeviceSlice,
    positions: DeviceSlice,
    dout: DeviceSlice,
    dwte: DeviceSlice,
    accumulate_wte: bool,
    dwpe: Option<DeviceSlice>,
    accumulate_wpe: bool,
    channels: usize,
) -> Result<()> {
    let (dtype, t, vocab) = (dout.dtype, tokens.elems, rows(dwte, channels) * channels);
    check("embed_backward", arguments![dtype => in dout[t * channels], out dwte[vocab]; Dtype::Int32 => in tokens[t], in positions[t]])?;
    if let Some(dwpe) = dwpe {
        let table = rows(dwpe, channels) * channels;
        check("embed_backward", arguments![dtype => in dout[t * channels], in dwte[vocab], out dwpe[table]])?;
    }
    table_backward(dev, tokens, dout, dwte, accumulate_wte, channels)?;
    dwpe.map_or(Ok(()), |dwpe| table_backward(dev, positions, dout, dwpe, accumulate_wpe, channels))
}

/// `dtable[e] (+)=` the sum of the rows of `dout` whose entry, int32 `[T]`, is `e`.
fn table_backward(
    dev: &mut impl Queue,
    entries: DeviceSlice,
    dout: DeviceSlice,
    dtable: DeviceSlice,
    accumulate: bool,
    channels: usize,
) -> Result<()> {
    if !accumulate {
        // Most rows of a vocabulary are used by no token: writing those that are used twice costs little.
        dev.zero(dtable)?;
    }
    let t = entries.elems;
    let sorted = dev.scratch(2 * t)?;
    let launch = LaunchConfig::new(size(t.div_ceil(WARP))?, SORT_THREADS);
    dev.launch(Stream::Compute, "sort_entries", None, launch, args![entries, sorted, size(t)?])?;
    let (vectors, launch) = rows_launch(t, channels, &[dout, dtable])?;
    let name = if vectors { "embed_backward" } else { "embed_backward_any" };
    let args = args![sorted, dout, dtable, size(t)?, size(channels)?, accumulate];
    dev.launch(Stream::Compute, name, Some(dout.dtype), launch, args)
}

/// Whether `channels` are taken by vectors; blocks for `rows`, each over a part of the channels.
fn rows_launch(rows: usize, channels: usize, slices: &[DeviceSlice]) -> Result<(bool, LaunchConfig)> {
    let vectors = whole_vectors(channels, slices);
    let items = if vectors { channels / wide(slices[0].dtype) } else { channels };
    let threads = threads(items, 1).min(BACKWARD_THREADS);
    let grid = [size(rows)?, size(items.div_ceil(threads))?, 1];
    Ok((vectors, LaunchConfig { grid, block: [size(threads)?, 1, 1], shared_bytes: 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_into_parts_of_at_most_one_block() {
        let x = DeviceSlice { addr: 0, elems: 1 << 20, dtype: Dtype::Bfloat16 };
        let shape = |rows, channels| {
            let (vectors, launch) = rows_launch(rows, channels, &[x]).unwrap();
            (vectors, launch.grid, launch.block[0])
        };
        assert_eq!(shape(7, 2560), (true, [7, 3, 1], 128));
        assert_eq!(shape(7, 64), (true, [7, 1, 1], 32));
        assert_eq!(shape(7, 70), (false, [7, 1, 1], 96));
        assert_eq!(shape(0, 129), (false, [0, 2, 1], 128));
    }
}
