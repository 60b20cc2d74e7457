//! Causal attention, forward. One block is one head of one sequence. It processes queries in groups of at most 64 and multiplies on the
//! register tiles of [`matmul`](super::matmul). Groups start anew at each document, and sums over keys begin at the first key that a group
//! sees, so a document has the same bits wherever it lies in a row. A masked key inside the key range of a query's group has probability 0
//! and is still multiplied, so it affects the result only if its value is not finite.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::math::{exp, soft_capped};
use super::panels::{A_PANEL, B_PANEL, PanelOperand, Panels, multiply, packed_elems};
use super::reduce::{fold, max};
use super::split::{Chunks, MatMut};
use super::{Arena, Compute, KernelIsa};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{AttentionForward, AttentionShape};
use crate::dtype::Element;
use std::ops::Range;

/// Queries in one group.
pub(super) const QUERIES: usize = 64;

impl CpuArithmetic for AttentionForward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let documents = self.documents.map(|documents| memory.read(documents));
        attention::<T>(cx, &self.shape, memory.read(self.qkv), documents, memory.write(self.out), memory.write(self.lse));
    }
}

/// See [`AttentionForward`].
pub(crate) fn attention<T: Element>(
    cx: &mut Compute,
    shape: &AttentionShape,
    qkv: &[T],
    documents: Option<&[i32]>,
    out: &mut [T],
    lse: &mut [f32],
) {
    let (isa, head_dim, seq_length) = (cx.isa, shape.head_dim, shape.seq_length);
    let heads = MatMut::new(out, shape.out_cols()).tiles(seq_length, head_dim);
    let local = scratch_elems(shape);
    let scratch = Chunks::new(cx.local.get(cx.team.threads() * local), local);
    cx.team.for_each_with(scratch, (heads, Chunks::new(lse, seq_length)), |scratch, block, (out, lse)| {
        let (sequence, head) = (block / shape.heads, block % shape.heads);
        forward_head(isa, shape, HeadInput::new(shape, (qkv, documents), sequence, head), Arena(scratch), out, lse);
    });
}

/// Queries, keys and values of one head of one sequence: rows are `pitch` apart.
#[derive(Clone, Copy)]
pub(super) struct HeadInput<'a, T> {
    pub(super) q: PanelOperand<'a, T>,
    pub(super) k: PanelOperand<'a, T>,
    pub(super) v: &'a [T],
    pub(super) pitch: usize,
    /// Index of the first token of each token's document.
    documents: Option<&'a [i32]>,
}

impl<'a, T: Element> HeadInput<'a, T> {
    pub(super) fn new(shape: &AttentionShape, (qkv, documents): (&'a [T], Option<&'a [i32]>), sequence: usize, head: usize) -> Self {
        let pitch = shape.qkv_cols();
        let kv_head = head / (shape.heads / shape.kv_heads);
        let first = sequence * shape.seq_length;
        let column = |head: usize| &qkv[first * pitch + head * shape.head_dim..];
        let (q, k) = (column(head), column(shape.heads + kv_head));
        let v = column(shape.heads + shape.kv_heads + kv_head);
        let documents = documents.map(|starts| &starts[first..][..shape.seq_length]);
        Self { q: PanelOperand::by_rows(q, pitch), k: PanelOperand::by_rows(k, pitch), v, pitch, documents }
    }

    /// Keys that are visible to query `query`.
    pub(super) fn visible(&self, shape: &AttentionShape, query: usize) -> Range<usize> {
        let in_window = shape.window.map_or(0, |window| (query + 1).saturating_sub(window));
        let in_document = self.documents.map_or(0, |starts| starts[query] as usize);
        in_window.max(in_document)..query + 1
    }

    /// Blocks of `block` queries. Blocks start anew at each document of the sequence; without documents they cover the whole sequence.
    pub(super) fn blocks(&self, shape: &AttentionShape, block: usize) -> impl Iterator<Item = Range<usize>> + Clone + use<'a, T> {
        let (shape, all) = (*shape, shape.seq_length);
        let starts = self.documents.filter(|_| block < all);
        let end = move |start: usize| {
            let Some(starts) = starts else {
                return shape.query_blocks(block).find(|queries| queries.start == start).map_or(all, |queries| queries.end);
            };
            let begins = |query: &usize| (query - starts[*query] as usize).is_multiple_of(block);
            (start + 1..all).find(begins).unwrap_or(all)
        };
        std::iter::successors(Some(0), move |start| Some(end(*start)).filter(|next| *next < all)).map(move |start| start..end(start))
    }

    /// Blocks of keys that are visible to `queries`, one of the blocks of [`Self::blocks`]: all blocks of the same document up to and
    /// including `queries`. With a window that hides keys, one block covers all keys.
    pub(super) fn key_blocks(
        &self,
        shape: &AttentionShape,
        block: usize,
        queries: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + Clone + use<'a, T> {
        let whole = shape.hiding_window().is_some().then_some(0..queries.end);
        let (first, last) = (self.documents.map_or(0, |starts| starts[queries.start] as usize), queries.start);
        let is_cut = whole.is_none();
        self.blocks(shape, block).filter(move |keys| is_cut && (first..=last).contains(&keys.start)).chain(whole)
    }

    /// Keys that are visible to at least one query of a group, extended downwards to a multiple of [`B_PANEL`].
    pub(super) fn keys_of(&self, shape: &AttentionShape, queries: &Range<usize>) -> Range<usize> {
        self.visible(shape, queries.start).start / B_PANEL * B_PANEL..queries.end
    }

    /// Groups of at most [`QUERIES`] queries of one document.
    pub(super) fn groups(&self, queries: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<'a, T> {
        let (documents, Range { start, end }) = (self.documents, queries.clone());
        let group = move |start: usize| {
            let most = end.min(start + QUERIES);
            let next = documents.and_then(|starts| (start + 1..most).find(|&query| starts[query] != starts[start]));
            start..next.unwrap_or(most)
        };
        std::iter::successors(Some(group(start)), move |last| (last.end < end).then(|| group(last.end)))
    }
}

/// Scratch floats of [`forward_head`].
fn scratch_elems(shape: &AttentionShape) -> usize {
    let (t, d) = (shape.seq_length.next_multiple_of(B_PANEL), shape.head_dim.next_multiple_of(B_PANEL));
    2 * t * d + QUERIES * (2 * t + 2 * d)
}

fn forward_head<T: Element>(
    isa: KernelIsa,
    shape: &AttentionShape,
    input: HeadInput<'_, T>,
    mut arena: Arena<'_>,
    mut out: MatMut<'_, T>,
    lse: &mut [f32],
) {
    let (seq_length, d) = (shape.seq_length, shape.head_dim);
    let d_padded = d.next_multiple_of(B_PANEL);
    let keys = arena.take(packed_elems::<B_PANEL>(seq_length, d));
    input.k.pack::<B_PANEL>(0, seq_length, d, keys);
    let values = arena.take(packed_elems::<B_PANEL>(d, seq_length));
    PanelOperand::by_k(input.v, input.pitch).pack::<B_PANEL>(0, d, seq_length, values);
    let q_packed = arena.take(QUERIES * d);
    let sums = arena.take(QUERIES * d_padded);
    let t_padded = seq_length.next_multiple_of(B_PANEL);
    let (scores, p_packed) = (arena.take(QUERIES * t_padded), arena.take(QUERIES * t_padded));
    for queries in input.groups(&(0..seq_length)) {
        let visible_keys = input.keys_of(shape, &queries);
        let (rows, n) = (queries.len(), visible_keys.len());
        let (rows_padded, width) = (rows.next_multiple_of(A_PANEL), n.next_multiple_of(B_PANEL));

        input.q.pack::<A_PANEL>(queries.start, rows, d, q_packed);
        let scores = &mut scores[..rows_padded * width];
        scores.fill(0.0);
        let q = Panels { data: q_packed, stride: A_PANEL * d };
        let k = Panels { data: &keys[visible_keys.start * d..], stride: B_PANEL * d };
        multiply(isa, q, k, d, scores, (rows_padded, width), width);

        let mut inv_sums = [0.0f32; QUERIES];
        for (row, query) in queries.clone().enumerate() {
            let seen = input.visible(shape, query);
            let seen = seen.start - visible_keys.start..seen.end - visible_keys.start;
            let (max, sum) = softmax(isa, &mut scores[row * width..][..n], seen, shape.scale, shape.softcap);
            lse[query] = max + libm::logf(sum);
            inv_sums[row] = 1.0 / sum;
        }

        let first = input.visible(shape, queries.start).start;
        let (hidden, n) = (first - visible_keys.start, visible_keys.end - first);
        PanelOperand::by_rows(&scores[hidden..], width).pack::<A_PANEL>(0, rows, n, p_packed);
        let sums = &mut sums[..rows_padded * d_padded];
        sums.fill(0.0);
        let p = Panels { data: p_packed, stride: A_PANEL * n };
        let v = Panels { data: &values[first * B_PANEL..], stride: B_PANEL * seq_length };
        multiply(isa, p, v, n, sums, (rows_padded, d_padded), d_padded);
        for (row, query) in queries.enumerate() {
            store_scaled(isa, &sums[row * d_padded..], inv_sums[row], out.row(query));
        }
    }
}

vectorised! {
    /// Scales and caps the raw scores, then turns them into `exp(score - max)` inside `seen` and 0 elsewhere. Returns the maximum and the
    /// sum.
    fn softmax(scores: &mut [f32], seen: std::ops::Range<usize>, scale: f32, softcap: Option<f32>) -> (f32, f32) {
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let scores = &mut scores[seen];
        scores.iter_mut().for_each(|s| *s *= scale);
        if let Some(cap) = softcap {
            scores.iter_mut().for_each(|s| *s = soft_capped(*s, cap).0);
        }
        let max = max(scores);
        scores.iter_mut().for_each(|s| *s = exp(*s - max));
        (max, fold(scores, |sum, e| sum + e))
    }
}

vectorised! {
    fn store_scaled<T>(sums: &[f32], factor: f32, out: &mut [T]) {
        out.iter_mut().zip(sums).for_each(|(o, sum)| *o = T::from_f32(sum * factor));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, fastest, values, wide, widened};
    use super::*;
    use half::{bf16, f16};

    /// All ratios of heads, sequence lengths around the sizes of panels and groups, odd head sizes, windows.
    pub(in super::super) const SHAPES: [AttentionShape; 9] = [
        shape(1, 1, (1, 1), 1, None),
        shape(2, 5, (2, 1), 4, None),
        shape(1, 33, (3, 3), 17, None),
        shape(2, 64, (4, 2), 32, None),
        shape(1, 65, (2, 2), 33, Some(1)),
        shape(1, 130, (4, 1), 16, Some(40)),
        shape(1, 150, (2, 1), 64, Some(1000)),
        shape(3, 70, (6, 3), 8, Some(7)),
        AttentionShape { softcap: Some(2.5), ..shape(2, 70, (4, 2), 16, Some(30)) },
    ];

    const fn shape(batch: usize, seq_length: usize, heads: (usize, usize), head_dim: usize, window: Option<usize>) -> AttentionShape {
        AttentionShape { batch, seq_length, heads: heads.0, kv_heads: heads.1, head_dim, scale: 0.7, window, softcap: None }
    }

    /// Starts of documents with 1, 2, 3, ... tokens, which begin anew in each row.
    pub(in super::super) fn documents(shape: &AttentionShape) -> Vec<i32> {
        let row = (1..).flat_map(|len| std::iter::repeat_n(len * (len - 1) / 2, len as usize)).take(shape.seq_length);
        (0..shape.batch).flat_map(|_| row.clone()).collect()
    }

    pub(in super::super) fn run<T: Element>(
        cx: &mut Compute,
        shape: &AttentionShape,
        documents: Option<&[i32]>,
    ) -> (Vec<T>, Vec<T>, Vec<f32>) {
        // Three times the usual magnitude, so that the softmax is far from flat.
        let qkv: Vec<T> = values(1, shape.tokens() * shape.qkv_cols()).iter().map(|x: &f32| T::from_f32(3.0 * x)).collect();
        let mut out = vec![T::from_f32(f32::NAN); shape.tokens() * shape.out_cols()];
        let mut lse = vec![f32::NAN; shape.tokens() * shape.heads];
        attention(cx, shape, &qkv, documents, &mut out, &mut lse);
        (qkv, out, lse)
    }

    /// Index of element `channel` of `(token, head)` in `qkv`. Heads of keys and values are numbered after the query heads.
    pub(in super::super) fn at(shape: &AttentionShape, (sequence, query): (usize, usize), head: usize, channel: usize) -> usize {
        (sequence * shape.seq_length + query) * shape.qkv_cols() + head * shape.head_dim + channel
    }

    /// Probabilities and log-sum-exp of one query of one head.
    pub(in super::super) fn probabilities(
        shape: &AttentionShape,
        (qkv, documents): (&[f64], Option<&[i32]>),
        sequence: usize,
        query: usize,
        head: usize,
    ) -> (Vec<f64>, f64) {
        let key_head = shape.heads + head / (shape.heads / shape.kv_heads);
        let start = documents.map_or(0, |documents| documents[sequence * shape.seq_length + query] as usize);
        let sees = |key: usize| start <= key && key <= query && shape.window.is_none_or(|w| query - key < w);
        let product = |key: usize, c: usize| qkv[at(shape, (sequence, query), head, c)] * qkv[at(shape, (sequence, key), key_head, c)];
        let raw = |key: usize| (0..shape.head_dim).map(|c| product(key, c)).sum::<f64>() * f64::from(shape.scale);
        let score = |key: usize| shape.softcap.map(f64::from).map_or(raw(key), |cap| cap * (raw(key) / cap).tanh());
        let e: Vec<f64> = (0..shape.seq_length).map(|key| if sees(key) { score(key).exp() } else { 0.0 }).collect();
        let sum: f64 = e.iter().sum();
        (e.iter().map(|e| e / sum).collect(), sum.ln())
    }

    pub(in super::super) fn reference(shape: &AttentionShape, qkv: &[f64], documents: Option<&[i32]>) -> (Vec<f64>, Vec<f64>) {
        let mut out = vec![0.0; shape.tokens() * shape.out_cols()];
        let mut lse = Vec::new();
        for (sequence, head) in (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h))) {
            let value_head = shape.heads + shape.kv_heads + head / (shape.heads / shape.kv_heads);
            for query in 0..shape.seq_length {
                let (p, row_lse) = probabilities(shape, (qkv, documents), sequence, query, head);
                lse.push(row_lse);
                for channel in 0..shape.head_dim {
                    let value = |key: usize| qkv[at(shape, (sequence, key), value_head, channel)];
                    let index = (sequence * shape.seq_length + query) * shape.out_cols() + head * shape.head_dim + channel;
                    out[index] = p.iter().enumerate().map(|(key, p)| p * value(key)).sum();
                }
            }
        }
        (out, lse)
    }

    #[test]
    fn every_shape_agrees_with_f64() {
        let mut cx = fastest();
        for shape in SHAPES {
            let several = documents(&shape);
            // With few keys a score may be off by the rounding of `scale |q| |k|`, which is 134 for the longest heads.
            for (documents, error) in [(None, 2e-6), (Some(&several[..]), 8e-6)] {
                let (qkv, out, lse) = run::<f32>(&mut cx, &shape, documents);
                let (want_out, want_lse) = reference(&shape, &wide(&qkv), documents);
                assert_close(&format!("out of {shape:?}"), &out, &want_out, 2e-5);
                assert_close(&format!("lse of {shape:?}"), &lse, &want_lse, error);
            }
        }
    }

    fn same_bits<T: Element>(shape: &AttentionShape) {
        assert_same_everywhere(|cx| {
            let (_, out, lse) = run::<T>(cx, shape, Some(&documents(shape)));
            [bits(&out), bits(&lse)].concat()
        });
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        for shape in [SHAPES[3], SHAPES[5], SHAPES[8]] {
            same_bits::<f32>(&shape);
            same_bits::<bf16>(&shape);
        }
    }

    #[test]
    fn a_later_group_of_tokens_changes_no_bit_even_if_nan() {
        let shape = SHAPES[6];
        let (qkv, out, lse) = run::<f32>(&mut fastest(), &shape, None);
        let (mut poisoned, mut other_out, mut other_lse) = (qkv.clone(), out.clone(), lse.clone());
        poisoned[128 * shape.qkv_cols()..].fill(f32::NAN);
        attention(&mut fastest(), &shape, &poisoned, None, &mut other_out, &mut other_lse);
        assert_eq!(out[..128 * shape.out_cols()], other_out[..128 * shape.out_cols()]);
        assert_eq!(lse[..128], other_lse[..128]);
    }

    /// A row with a document of 300 tokens that begins at token `at`, between other documents.
    pub(in super::super) fn row_with_a_document(at: usize) -> (AttentionShape, Vec<f32>, Vec<i32>) {
        let shape = shape(1, at + 310, (4, 2), 20, None);
        let (mut qkv, document) = (values::<f32>(1, shape.tokens() * shape.qkv_cols()), values(2, 300 * shape.qkv_cols()));
        qkv[at * shape.qkv_cols()..][..document.len()].copy_from_slice(&document);
        let starts = (0..at + 310).map(|token| if token < at { token / 50 * 50 } else { at + (token - at) / 300 * 300 });
        (shape, qkv, starts.map(|start| start as i32).collect())
    }

    #[test]
    fn a_document_has_the_same_bits_wherever_it_lies() {
        for (window, softcap) in [(None, None), (Some(170), None), (None, Some(2.5))] {
            let of = |at: usize| {
                let (shape, qkv, starts) = row_with_a_document(at);
                let shape = AttentionShape { window, softcap, ..shape };
                let (mut out, mut lse) = (vec![0.0f32; shape.tokens() * shape.out_cols()], vec![0.0; shape.tokens() * shape.heads]);
                attention(&mut fastest(), &shape, &qkv, Some(&starts), &mut out, &mut lse);
                let lse = lse.chunks_exact(shape.seq_length).map(|lse| bits(&lse[at..at + 300])).collect::<Vec<_>>();
                (bits(&out[at * shape.out_cols()..][..300 * shape.out_cols()]), lse)
            };
            let alone = of(0);
            assert!([1, 37, 64, 131].into_iter().all(|at| of(at) == alone), "{window:?} {softcap:?}");
        }
    }

    fn rounds_once<T: Element>() {
        let shape = SHAPES[7];
        let (qkv, out, lse) = run::<T>(&mut fastest(), &shape, None);
        let qkv = widened(&qkv);
        let (mut f32_out, mut f32_lse) = (vec![0.0; out.len()], vec![0.0; lse.len()]);
        attention(&mut fastest(), &shape, &qkv, None, &mut f32_out, &mut f32_lse);
        assert_rounded("out", &out, &f32_out);
        assert_eq!(lse, f32_lse);
    }

    #[test]
    fn narrow_formats_are_the_f32_result_rounded_once() {
        rounds_once::<bf16>();
        rounds_once::<f16>();
    }
}
