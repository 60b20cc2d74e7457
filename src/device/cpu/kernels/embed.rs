//! Token and position embeddings.

use super::arithmetic::{CpuArithmetic, by_float};
use super::isa::vectorised;
use super::pointwise::add_elems;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK, SUM_BLOCK, SUMS};
use crate::device::cpu::CpuDevice;
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{Checked, Embed, EmbedBackward, Kernel, Launch, ScatterRows};
use crate::dtype::Element;
use crate::error::Result;

impl CpuArithmetic for Embed {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let wpe = self.wpe.map(|wpe| memory.read::<T>(wpe));
        let entries = (memory.read(self.tokens), memory.read(self.positions));
        embed(cx, entries, memory.read(self.wte), wpe, memory.write(self.out), self.channels);
    }
}

/// See [`Embed`].
pub(crate) fn embed<T: Element>(
    cx: &mut Compute,
    (tokens, positions): (&[i32], &[i32]),
    wte: &[T],
    wpe: Option<&[T]>,
    out: &mut [T],
    channels: usize,
) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(out, ROW_BLOCK * channels), |block, out| {
        for (row, out) in out.chunks_exact_mut(channels).enumerate() {
            let t = block * ROW_BLOCK + row;
            out.copy_from_slice(&wte[tokens[t] as usize * channels..][..channels]);
            if let Some(wpe) = wpe {
                add_elems(isa, &wpe[positions[t] as usize * channels..][..channels], out);
            }
        }
    });
}

impl CpuArithmetic for EmbedBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let (dout, channels) = (memory.read::<T>(self.dout), self.channels);
        embed_backward(cx, (memory.read(self.tokens), self.first_token), dout, memory.write(self.dwte), self.accumulate_wte, channels);
        if let Some(dwpe) = self.dwpe {
            embed_backward(cx, (memory.read(self.positions), 0), dout, memory.write(dwpe), self.accumulate_wpe, channels);
        }
    }
}

/// `dtable[e] (+)=` the sum over the rows of `dout` that used entry `e` of a table, in ascending order and in blocks of [`SUM_BLOCK`].
/// `entries` holds the entry of each row: its token or its position. `dtable` begins with the entry `lowest`, and entries without a place in
/// it are left out.
pub(crate) fn embed_backward<T: Element>(
    cx: &mut Compute,
    (entries, lowest): (&[i32], usize),
    dout: &[T],
    dtable: &mut [T],
    accumulate: bool,
    channels: usize,
) {
    let isa = cx.isa;
    // Sorting by entry, then by row, makes the rows of each entry contiguous and ordered.
    cx.sorted.clear();
    cx.sorted.extend(entries.iter().zip(0u64..).map(|(&entry, row)| (entry as u64) << 32 | row));
    cx.sorted.sort_unstable();
    let sorted = &cx.sorted;
    cx.team.for_each(Chunks::new(dtable, ROW_BLOCK * channels), |block, dtable| {
        let first = (lowest + block * ROW_BLOCK) as u64;
        let mut rest = &sorted[sorted.partition_point(|key| key >> 32 < first)..];
        for (entry, dtable) in (first..).zip(dtable.chunks_exact_mut(channels)) {
            let (rows, later) = rest.split_at(rest.partition_point(|key| key >> 32 == entry));
            rest = later;
            if accumulate && rows.is_empty() {
                // The entry's gradient stays unchanged.
                continue;
            }
            sum_rows(isa, dout, rows, accumulate, dtable);
        }
    });
}

vectorised! {
    fn sum_rows<T>(dout: &[T], rows: &[u64], accumulate: bool, out: &mut [T]) {
        let channels = out.len();
        for (group, out) in out.chunks_mut(SUMS).enumerate() {
            let mut sums = [0.0f32; SUMS];
            for rows in rows.chunks(SUM_BLOCK) {
                let mut block = [0.0f32; SUMS];
                for row in rows {
                    let dout = &dout[(row & 0xffff_ffff) as usize * channels + group * SUMS..][..out.len()];
                    block.iter_mut().zip(dout).for_each(|(sum, x)| *sum += x.to_f32());
                }
                sums.iter_mut().zip(block).for_each(|(sum, x)| *sum += x);
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = T::from_f32(if accumulate { sum + out.to_f32() } else { sum });
            }
        }
    }
}

/// Runs on the thread of the stream that did the copy before it.
impl Launch<ScatterRows> for CpuDevice {
    fn accept(&mut self, kernel: Checked<ScatterRows>) -> Result<()> {
        by_float!(kernel.float_format()?, T => self.beside(kernel, |kernel, memory| {
            let table = memory.write::<T>(kernel.table);
            scatter_rows(kernel, memory.read(kernel.rows), memory.read(kernel.packed), table);
        }))
    }
}

fn scatter_rows<T: Element>(kernel: ScatterRows, rows: &[i32], mut packed: &[T], table: &mut [T]) {
    let ScatterRows { below, skipped, channels, .. } = kernel;
    for (nth, row) in rows.iter().enumerate() {
        let column = if nth == 0 { skipped } else { 0 };
        let (values, later) = packed.split_at((channels - column).min(packed.len()));
        table[*row as usize * channels + column - below..][..values.len()].copy_from_slice(values);
        packed = later;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, fastest, values, wide, widened};
    use super::*;
    use crate::device::{DeviceSlice, Stream};
    use crate::dtype::Dtype;
    use half::bf16;

    const VOCAB: usize = 140;
    const CHANNELS: usize = 70;
    const SEQ_LENGTH: usize = 33;

    /// Repeated entries, gaps, the first and the last entry.
    fn tokens() -> Vec<i32> {
        (0..2 * SEQ_LENGTH as i32).map(|t| if t == 5 { VOCAB as i32 - 1 } else { t * t % 50 }).collect()
    }

    #[test]
    fn rows_come_from_both_tables() {
        let (wte, wpe) = (values::<f32>(1, VOCAB * CHANNELS), values::<f32>(2, 40 * CHANNELS));
        let mut out = vec![0.0; tokens().len() * CHANNELS];
        let positions: Vec<i32> = (0..tokens().len() as i32).map(|t| t * 7 % 40).collect();
        for position in [None, Some(&wpe[..])] {
            embed(&mut fastest(), (&tokens(), &positions), &wte, position, &mut out, CHANNELS);
            for (t, token) in tokens().iter().enumerate() {
                for c in 0..CHANNELS {
                    let p = position.map_or(0.0, |wpe| wpe[positions[t] as usize * CHANNELS + c]);
                    assert_eq!(out[t * CHANNELS + c], wte[*token as usize * CHANNELS + c] + p);
                }
            }
        }
    }

    fn backward<T: Element>(cx: &mut Compute, dout: &[T], accumulate: bool) -> Vec<T> {
        let mut dwte = values(4, VOCAB * CHANNELS);
        embed_backward(cx, (&tokens(), 0), dout, &mut dwte, accumulate, CHANNELS);
        dwte
    }

    #[test]
    fn entries_sum_their_rows_and_the_others_are_zero_or_stay() {
        let dout = values::<f32>(3, tokens().len() * CHANNELS);
        for accumulate in [false, true] {
            let mut want = if accumulate { wide(&values::<f32>(4, VOCAB * CHANNELS)) } else { vec![0.0; VOCAB * CHANNELS] };
            for (row, token) in wide(&dout).chunks_exact(CHANNELS).zip(tokens()) {
                want[token as usize * CHANNELS..].iter_mut().zip(row).for_each(|(want, x)| *want += x);
            }
            assert_close("dwte", &backward(&mut fastest(), &dout, accumulate), &want, 1e-6);
        }
    }

    /// Rows of a range of entries have the bits of the same rows of the whole table. The range spans blocks of rows and begins and ends
    /// between used entries.
    #[test]
    fn a_range_of_entries_sums_its_rows_alone() {
        let dout = values::<f32>(3, tokens().len() * CHANNELS);
        for (accumulate, range) in [(false, 3..VOCAB), (true, 5..37), (false, 49..50), (true, VOCAB - 2..VOCAB), (false, 51..60)] {
            let (all, range) = (backward(&mut fastest(), &dout, accumulate), range.start * CHANNELS..range.end * CHANNELS);
            let mut rows = values(4, VOCAB * CHANNELS)[range.clone()].to_vec();
            embed_backward(&mut fastest(), (&tokens(), range.start / CHANNELS), &dout, &mut rows, accumulate, CHANNELS);
            assert_eq!(bits(&rows), bits(&all[range]), "{accumulate}");
        }
    }

    #[test]
    fn rows_of_one_entry_are_summed_in_blocks() {
        let rows = 2 * SUM_BLOCK + 3;
        let (dout, mut dwte) = (values::<f32>(3, rows * CHANNELS), vec![f32::NAN; CHANNELS]);
        embed_backward(&mut fastest(), (&vec![0; rows], 0), &dout, &mut dwte, false, CHANNELS);
        for (channel, got) in dwte.iter().enumerate() {
            let terms: Vec<f32> = dout.iter().skip(channel).step_by(CHANNELS).copied().collect();
            let chain = |terms: &[f32]| terms.iter().fold(0.0f32, |sum, x| sum + x);
            let want = terms.chunks(SUM_BLOCK).fold(0.0, |sum, block| sum + chain(block));
            assert_eq!(got.to_bits(), want.to_bits(), "channel {channel}");
        }
    }

    /// Rows 1, 4 and 7 of a table of ten; the first lacks its first element, the last its last two.
    #[test]
    fn rows_go_to_their_places_and_all_else_stays() {
        let (rows, channels) = ([1, 4, 7], 5);
        let mut table: Vec<f32> = (0..50).map(|i| i as f32).collect();
        let packed: Vec<f32> = (0..12).map(|i| 100.0 + i as f32).collect();
        let at = |elems, dtype| DeviceSlice::at(0, elems, dtype);
        let [ids, float] = [Dtype::Int32, Dtype::Float32];
        let (stream, below, skipped) = (Stream::H2d, 6, 1);
        let kernel = ScatterRows { stream, rows: at(3, ids), packed: at(12, float), table: at(44, float), below, skipped, channels };
        scatter_rows(kernel, &rows, &packed, &mut table[below..]);
        let written: Vec<_> = (0..50).filter(|&i| table[i] != i as f32).collect();
        assert_eq!(written, [6, 7, 8, 9, 20, 21, 22, 23, 24, 35, 36, 37]);
        assert!(written.iter().zip(&packed).all(|(&i, &value)| table[i] == value));
        let fits = |rows, skipped| ScatterRows { rows: at(rows, ids), skipped, ..kernel }.check_shape().is_ok();
        assert!(fits(3, 1) && fits(3, 3) && !fits(2, 1) && !fits(3, 4) && !fits(4, 5));
    }

    /// With accumulation, gradients of rows that no token used keep their bits, including the sign of a zero.
    #[test]
    fn rows_that_no_token_uses_are_not_touched() {
        let (dout, mut dwte) = (vec![1.0f32; tokens().len() * CHANNELS], vec![-0.0f32; VOCAB * CHANNELS]);
        embed_backward(&mut fastest(), (&tokens(), 0), &dout, &mut dwte, true, CHANNELS);
        for (row, values) in (0..).zip(dwte.chunks_exact(CHANNELS)) {
            assert!(tokens().contains(&row) || values.iter().all(|x| x.to_bits() == (-0.0f32).to_bits()), "row {row}");
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit_and_bf16_rounds_once() {
        let dout = values::<bf16>(3, tokens().len() * CHANNELS);
        assert_same_everywhere(|cx| bits(&backward(cx, &dout, true)));
        assert_rounded("dwte", &backward(&mut fastest(), &dout, false), &backward(&mut fastest(), &widened(&dout), false));
    }
}
