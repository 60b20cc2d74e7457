//! Token and position embeddings.

use super::isa::vectorised;
use super::pointwise::add_elems;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::dtype::Element;

/// Channels summed at a time.
const SUMS: usize = 64;

/// See [`crate::device::Kernels::embed`].
pub(crate) fn embed<T: Element>(
    cx: &mut Compute,
    tokens: &[i32],
    wte: &[T],
    wpe: Option<&[T]>,
    out: &mut [T],
    (seq_length, channels): (usize, usize),
) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(out, ROW_BLOCK * channels), |block, out| {
        for (row, out) in out.chunks_exact_mut(channels).enumerate() {
            let t = block * ROW_BLOCK + row;
            out.copy_from_slice(&wte[tokens[t] as usize * channels..][..channels]);
            if let Some(wpe) = wpe {
                add_elems(isa, &wpe[t % seq_length * channels..][..channels], out);
            }
        }
    });
}

/// `dtable[e] (+)=` the sum over the rows of `dout` that used entry `e` of a table, in ascending order. `entries` names each row's entry: its
/// token, or its position.
pub(crate) fn embed_backward<T: Element>(
    cx: &mut Compute,
    entries: impl Iterator<Item = usize>,
    dout: &[T],
    dtable: &mut [T],
    accumulate: bool,
    channels: usize,
) {
    let isa = cx.isa;
    // Sorted by entry, then by row: each entry finds its rows together and in order.
    cx.sorted.clear();
    cx.sorted.extend(entries.enumerate().map(|(row, entry)| (entry as u64) << 32 | row as u64));
    cx.sorted.sort_unstable();
    let sorted = &cx.sorted;
    cx.team.for_each(Chunks::new(dtable, ROW_BLOCK * channels), |block, dtable| {
        let first = (block * ROW_BLOCK) as u64;
        let mut rest = &sorted[sorted.partition_point(|key| key >> 32 < first)..];
        for (entry, dtable) in (first..).zip(dtable.chunks_exact_mut(channels)) {
            let (rows, later) = rest.split_at(rest.partition_point(|key| key >> 32 == entry));
            rest = later;
            sum_rows(isa, dout, rows, accumulate, dtable);
        }
    });
}

vectorised! {
    fn sum_rows<T>(dout: &[T], rows: &[u64], accumulate: bool, out: &mut [T]) {
        let channels = out.len();
        for (group, out) in out.chunks_mut(SUMS).enumerate() {
            let mut sums = [0.0f32; SUMS];
            for row in rows {
                let dout = &dout[(row & 0xffff_ffff) as usize * channels + group * SUMS..][..out.len()];
                sums.iter_mut().zip(dout).for_each(|(sum, x)| *sum += x.to_f32());
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = T::from_f32(if accumulate { sum + out.to_f32() } else { sum });
            }
        }
    }
}
