//! Causal attention, backward. One block is one key head of one sequence with all query heads that read it. The gradient of each key and
//! value is therefore one sum in a fixed order: query heads ascending, groups of queries ascending. A group of at most 64 queries is one
//! chain of fused multiply-adds.
//!
//! Probabilities are recomputed from the scores and the stored log-sum-exp.
//!
//! With blocks of queries and keys, each block has its own sum. The sum of a block is rounded to the format and added to the sums of the
//! earlier blocks, as [`AddKeyGradients`](crate::device::AddKeyGradients) adds it. The total is rounded at the end.

use super::arithmetic::CpuArithmetic;
use super::attention::{HeadInput, QUERIES};
use super::isa::vectorised;
use super::math::{exp, soft_capped};
use super::panels::{A_PANEL, B_PANEL, PanelOperand, Panels, multiply};
use super::reduce::{fold2, store};
use super::split::{Chunks, MatMut};
use super::{Arena, Compute, KernelIsa};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{AttentionBackward, AttentionShape};
use crate::dtype::Element;
use std::ops::Range;

/// Inputs and outputs of the forward pass, and the gradient of its output.
#[derive(Clone, Copy)]
pub(crate) struct Forward<'a, T> {
    /// `[T, heads * head_dim]`.
    pub(crate) dout: &'a [T],
    /// `[T, (heads + 2 kv_heads) * head_dim]`.
    pub(crate) qkv: &'a [T],
    /// Index of the first token of each token's document in its row, `[T]`.
    pub(crate) documents: Option<&'a [i32]>,
    /// `[T, heads * head_dim]`.
    pub(crate) out: &'a [T],
    /// `[batch, heads, seq_length]`.
    pub(crate) lse: &'a [f32],
}

impl CpuArithmetic for AttentionBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let [dout, qkv, out] = [self.dout, self.qkv, self.out].map(|slice| memory.read::<T>(slice));
        let documents = self.documents.map(|documents| memory.read(documents));
        let forward = Forward { dout, qkv, documents, out, lse: memory.read(self.lse) };
        attention_backward(cx, &self.shape, self.block, forward, memory.write(self.dqkv));
    }
}

/// See [`AttentionBackward`].
pub(crate) fn attention_backward<T: Element>(
    cx: &mut Compute,
    shape: &AttentionShape,
    block: Option<usize>,
    forward: Forward<'_, T>,
    dqkv: &mut [T],
) {
    let (isa, d, t, kv_heads) = (cx.isa, shape.head_dim, shape.seq_length, shape.kv_heads);
    let group = shape.heads / kv_heads;
    let (dq, dkv) = MatMut::new(dqkv, shape.qkv_cols()).split_cols(shape.heads * d);
    let (dk, dv) = dkv.split_cols(kv_heads * d);
    let outputs = (dq.tiles(t, group * d), (dk.tiles(t, d), dv.tiles(t, d)));
    let block = block.unwrap_or(t).min(t);
    let local = scratch_elems(shape, block);
    let scratch = Chunks::new(cx.local.get(cx.team.threads() * local), local);
    cx.team.for_each_with(scratch, outputs, |scratch, part, (mut dq, (dk, dv))| {
        let (sequence, kv_head) = (part / kv_heads, part % kv_heads);
        let first = kv_head * group;
        let input = HeadInput::new(shape, (forward.qkv, forward.documents), sequence, first);
        let mut scratch = Scratch::new(shape, block, Arena(scratch));
        scratch.load_keys(shape, input);
        for queries in input.blocks(shape, block) {
            let keys = input.key_blocks(shape, block, &queries);
            for (index, head) in (first..first + group).enumerate() {
                let dq = dq.columns(index * d..(index + 1) * d);
                backward_head(isa, shape, &forward, (sequence, head), (&queries, keys.clone()), &mut scratch, dq);
            }
            scratch.end_block::<T>(d, input.keys_of(shape, &queries));
        }
        scratch.store_keys(isa, d, dk, dv);
    });
}

/// Operands and results of one block's multiplications. Names are those of the formulas; the suffixes `_a` and `_b` give the panel layout,
/// `_t` marks a transposed operand.
struct Scratch<'a> {
    k_t_b: &'a mut [f32],
    v_t_b: &'a mut [f32],
    k_b: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// Sums of dk and dv over blocks, and of dq. `None` when there is only one block.
    sums: Option<([&'a mut [f32]; 2], &'a mut [f32])>,
    q_a: &'a mut [f32],
    dout_a: &'a mut [f32],
    q_b: &'a mut [f32],
    dout_b: &'a mut [f32],
    dq: &'a mut [f32],
    /// Scores, then probabilities.
    p: &'a mut [f32],
    /// Gradients of probabilities, then of scores.
    ds: &'a mut [f32],
    /// Probabilities or score gradients, packed as an operand.
    packed: &'a mut [f32],
}

/// Scratch floats of [`Scratch`].
fn scratch_elems(shape: &AttentionShape, block: usize) -> usize {
    let (t, d) = (shape.seq_length.next_multiple_of(B_PANEL), shape.head_dim.next_multiple_of(B_PANEL));
    let (of_keys, of_queries) = if block < shape.seq_length { (7, 6) } else { (5, 5) };
    of_keys * t * d + QUERIES * (of_queries * d + 3 * t)
}

impl<'a> Scratch<'a> {
    fn new(shape: &AttentionShape, block: usize, mut arena: Arena<'a>) -> Self {
        let (t, d) = (shape.seq_length.next_multiple_of(B_PANEL), shape.head_dim.next_multiple_of(B_PANEL));
        let [k_t_b, v_t_b, k_b, dk, dv] = [(); 5].map(|()| arena.take(t * d));
        let sums = (block < shape.seq_length).then(|| ([(); 2].map(|()| arena.take(t * d)), arena.take(QUERIES * d)));
        let [q_a, dout_a, q_b, dout_b, dq] = [(); 5].map(|()| arena.take(QUERIES * d));
        let [p, ds, packed] = [(); 3].map(|()| arena.take(QUERIES * t));
        Self { k_t_b, v_t_b, k_b, dk, dv, sums, q_a, dout_a, q_b, dout_b, dq, p, ds, packed }
    }

    fn load_keys<T: Element>(&mut self, shape: &AttentionShape, input: HeadInput<'_, T>) {
        let (t, d) = (shape.seq_length, shape.head_dim);
        input.k.pack::<B_PANEL>(0, t, d, self.k_t_b);
        PanelOperand::by_rows(input.v, input.pitch).pack::<B_PANEL>(0, t, d, self.v_t_b);
        PanelOperand::by_k(input.k.data, input.pitch).pack::<B_PANEL>(0, d, t, self.k_b);
        self.dk.fill(0.0);
        self.dv.fill(0.0);
        self.sums.iter_mut().flat_map(|(of_keys, _)| of_keys).for_each(|sums| sums.fill(0.0));
    }

    /// Adds one block's gradients of `keys` to the sums over blocks and clears them. The rows have `head_dim` columns.
    fn end_block<T: Element>(&mut self, head_dim: usize, keys: Range<usize>) {
        let Some((sums, _)) = &mut self.sums else { return };
        let pitch = head_dim.next_multiple_of(B_PANEL);
        for (sums, block) in sums.iter_mut().zip([&mut *self.dk, &mut *self.dv]) {
            let rows = keys.start * pitch..keys.end * pitch;
            for (sum, x) in sums[rows.clone()].iter_mut().zip(&mut block[rows]) {
                *sum += T::from_f32(std::mem::take(x)).to_f32();
            }
        }
    }

    fn store_keys<T: Element>(&self, isa: KernelIsa, head_dim: usize, mut dk: MatMut<'_, T>, mut dv: MatMut<'_, T>) {
        let d = head_dim.next_multiple_of(B_PANEL);
        let (all_dk, all_dv) = self.sums.as_ref().map_or((&*self.dk, &*self.dv), |([dk, dv], _)| (&**dk, &**dv));
        for row in 0..dk.rows() {
            store(isa, &all_dk[row * d..][..head_dim], false, dk.row(row));
            store(isa, &all_dv[row * d..][..head_dim], false, dv.row(row));
        }
    }
}

fn backward_head<T: Element>(
    isa: KernelIsa,
    shape: &AttentionShape,
    forward: &Forward<'_, T>,
    (sequence, head): (usize, usize),
    (block, key_blocks): (&Range<usize>, impl Iterator<Item = Range<usize>> + Clone),
    scratch: &mut Scratch<'_>,
    mut dq: MatMut<'_, T>,
) {
    let (t, d, pitch) = (shape.seq_length, shape.head_dim, shape.out_cols());
    let input = HeadInput::new(shape, (forward.qkv, forward.documents), sequence, head);
    let start = sequence * t * pitch + head * d;
    let (dout, out) = (&forward.dout[start..], &forward.out[start..]);
    let lse = &forward.lse[(sequence * shape.heads + head) * t..][..t];
    for queries in input.groups(block) {
        let keys = input.keys_of(shape, &queries);
        let (rows, width) = (queries.len(), keys.len().next_multiple_of(B_PANEL));
        let dout_rows = &dout[queries.start * pitch..];
        input.q.pack::<A_PANEL>(queries.start, rows, d, scratch.q_a);
        PanelOperand::by_k(&input.q.data[queries.start * input.pitch..], input.pitch).pack::<B_PANEL>(0, d, rows, scratch.q_b);
        PanelOperand::by_rows(dout_rows, pitch).pack::<A_PANEL>(0, rows, d, scratch.dout_a);
        PanelOperand::by_k(dout_rows, pitch).pack::<B_PANEL>(0, d, rows, scratch.dout_b);
        scores(isa, scratch, &keys, rows, d);
        for (row, query) in queries.clone().enumerate() {
            let seen = input.visible(shape, query);
            let seen = seen.start - keys.start..seen.end - keys.start;
            let (p, ds) = (&mut scratch.p[row * width..][..width], &mut scratch.ds[row * width..][..width]);
            let delta = dot(isa, &dout[query * pitch..][..d], &out[query * pitch..][..d]);
            score_gradients(isa, p, ds, seen, shape.scale, shape.softcap, lse[query], delta);
        }
        let first = input.visible(shape, queries.start).start;
        query_gradients::<T>(isa, scratch, (&keys, first, key_blocks.clone()), rows, (t, d));
        key_gradients(isa, scratch, &keys, rows, d);
        for (row, query) in queries.enumerate() {
            store(isa, &scratch.dq[row * d.next_multiple_of(B_PANEL)..][..d], false, dq.row(query));
        }
    }
}

/// `p = q k^T` and `ds = dout v^T` for `rows` queries.
fn scores(isa: KernelIsa, scratch: &mut Scratch<'_>, keys: &Range<usize>, rows: usize, d: usize) {
    let width = keys.len().next_multiple_of(B_PANEL);
    let size = (rows.next_multiple_of(A_PANEL), width);
    let Scratch { k_t_b, v_t_b, q_a, dout_a, p, ds, .. } = scratch;
    for (a, b, c) in [(q_a, k_t_b, p), (dout_a, v_t_b, ds)] {
        let a = Panels { data: a, stride: A_PANEL * d };
        let b = Panels { data: &b[keys.start * d..], stride: B_PANEL * d };
        c[..size.0 * width].fill(0.0);
        multiply(isa, a, b, d, c, size, width);
    }
}

/// `dq = ds k` for `rows` queries of `d` channels and `t` keys, one block of keys at a time. The queries see no key before `first`.
fn query_gradients<T: Element>(
    isa: KernelIsa,
    scratch: &mut Scratch<'_>,
    (keys, first, blocks): (&Range<usize>, usize, impl Iterator<Item = Range<usize>> + Clone),
    rows: usize,
    (t, d): (usize, usize),
) {
    let Scratch { k_b, dq, ds, packed, sums, .. } = scratch;
    let (width, d_padded) = (keys.len().next_multiple_of(B_PANEL), d.next_multiple_of(B_PANEL));
    let are_several = blocks.clone().nth(1).is_some();
    let mut sums = sums.as_mut().map(|(_, of_queries)| &mut **of_queries).filter(|_| are_several);
    sums.iter_mut().for_each(|sums| sums.fill(0.0));
    for (i, block) in blocks.enumerate() {
        let start = if i == 0 { first } else { block.start };
        let n = block.end.min(keys.end) - start;
        PanelOperand::by_rows(&ds[start - keys.start..], width).pack::<A_PANEL>(0, rows, n, packed);
        let k = Panels { data: &k_b[start * B_PANEL..], stride: B_PANEL * t };
        dq.fill(0.0);
        let size = (rows.next_multiple_of(A_PANEL), d_padded);
        multiply(isa, Panels { data: packed, stride: A_PANEL * n }, k, n, dq, size, d_padded);
        if let Some(sums) = &mut sums {
            sums.iter_mut().zip(&**dq).for_each(|(sum, x)| *sum += T::from_f32(*x).to_f32());
        }
    }
    if let Some(sums) = sums {
        dq.copy_from_slice(sums);
    }
}

/// `dv += p^T dout` and `dk += ds^T q` for `rows` queries of `d` channels.
fn key_gradients(isa: KernelIsa, scratch: &mut Scratch<'_>, keys: &Range<usize>, rows: usize, d: usize) {
    let Scratch { dk, dv, q_b, dout_b, p, ds, packed, .. } = scratch;
    let (n, width, d_padded) = (keys.len(), keys.len().next_multiple_of(B_PANEL), d.next_multiple_of(B_PANEL));
    for (a, b, c) in [(p, dout_b, dv), (ds, q_b, dk)] {
        PanelOperand::by_k(a, width).pack::<A_PANEL>(0, n, rows, packed);
        let b = Panels { data: b, stride: B_PANEL * rows };
        let size = (n.next_multiple_of(A_PANEL), d_padded);
        multiply(isa, Panels { data: packed, stride: A_PANEL * rows }, b, rows, &mut c[keys.start * d_padded..], size, d_padded);
    }
}

vectorised! {
    fn dot<T>(a: &[T], b: &[T]) -> f32 {
        fold2(a, b, |sum, a, b| a.mul_add(b, sum))
    }
}

vectorised! {
    /// Turns scores `p` into probabilities, and gradients `ds` of probabilities into gradients of raw scores. Both are 0 outside `seen`.
    fn score_gradients(
        p: &mut [f32], ds: &mut [f32], seen: std::ops::Range<usize>, scale: f32, softcap: Option<f32>, lse: f32, delta: f32,
    ) {
        for row in [&mut *p, &mut *ds] {
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
        }
        let pairs = p[seen.clone()].iter_mut().zip(&mut ds[seen]);
        match softcap {
            None => pairs.for_each(|(p, ds)| {
                *p = exp(*p * scale - lse);
                *ds = *p * (*ds - delta) * scale;
            }),
            Some(cap) => pairs.for_each(|(p, ds)| {
                let (score, slope) = soft_capped(*p * scale, cap);
                *p = exp(score - lse);
                *ds = *p * (*ds - delta) * slope * scale;
            }),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::attention::attention;
    use super::super::attention::tests::{
        SHAPES, at, documents, probabilities, reference as forward_reference, row_with_a_document, run as forward,
    };
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, dot, fastest, slopes, values, wide, widened};
    use super::*;
    use half::{bf16, f16};

    fn run<T: Element>(cx: &mut Compute, shape: &AttentionShape, documents: Option<&[i32]>, block: Option<usize>) -> Vec<T> {
        let (qkv, out, lse) = forward::<T>(cx, shape, documents);
        let dout = values::<T>(2, out.len());
        let mut dqkv = vec![T::from_f32(f32::NAN); qkv.len()];
        attention_backward(cx, shape, block, Forward { dout: &dout, qkv: &qkv, documents, out: &out, lse: &lse }, &mut dqkv);
        dqkv
    }

    pub(in super::super) fn reference(shape: &AttentionShape, qkv: &[f64], documents: Option<&[i32]>, dout: &[f64]) -> Vec<f64> {
        let mut dqkv = vec![0.0; qkv.len()];
        for (sequence, head) in (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h))) {
            let key_head = shape.heads + head / (shape.heads / shape.kv_heads);
            let value_head = key_head + shape.kv_heads;
            for query in 0..shape.seq_length {
                let (p, lse) = probabilities(shape, (qkv, documents), sequence, query, head);
                let dout = &dout[(sequence * shape.seq_length + query) * shape.out_cols() + head * shape.head_dim..];
                let row = |key: usize, head: usize| at(shape, (sequence, key), head, 0);
                let dp: Vec<f64> =
                    (0..=query).map(|key| (0..shape.head_dim).map(|c| dout[c] * qkv[row(key, value_head) + c]).sum()).collect();
                let mean: f64 = dp.iter().zip(&p).map(|(dp, p)| dp * p).sum();
                for key in 0..=query {
                    let capped = shape.softcap.filter(|_| p[key] > 0.0).map_or(0.0, |cap| (p[key].ln() + lse) / f64::from(cap));
                    let ds = p[key] * (dp[key] - mean) * f64::from(shape.scale) * (1.0 - capped * capped);
                    for c in 0..shape.head_dim {
                        dqkv[row(query, head) + c] += ds * qkv[row(key, key_head) + c];
                        dqkv[row(key, key_head) + c] += ds * qkv[row(query, head) + c];
                        dqkv[row(key, value_head) + c] += p[key] * dout[c];
                    }
                }
            }
        }
        dqkv
    }

    #[test]
    fn every_shape_agrees_with_f64() {
        let mut cx = fastest();
        for shape in SHAPES {
            let several = documents(&shape);
            for documents in [None, Some(&several[..])] {
                let (qkv, _, _) = forward::<f32>(&mut cx, &shape, documents);
                let dout = values::<f32>(2, shape.tokens() * shape.out_cols());
                let want = reference(&shape, &wide(&qkv), documents, &wide(&dout));
                for block in [None, Some(1), Some(20), Some(64)] {
                    assert_close(&format!("{shape:?} {block:?}"), &run::<f32>(&mut cx, &shape, documents, block), &want, 5e-5);
                }
            }
        }
    }

    #[test]
    fn the_reference_is_the_slope_of_the_forward() {
        for softcap in [None, Some(2.5)] {
            let shape = AttentionShape { softcap, ..SHAPES[1] };
            let qkv = wide(&forward::<f32>(&mut fastest(), &shape, None).0);
            let dout = wide(&values::<f32>(2, shape.tokens() * shape.out_cols()));
            let want = slopes(&qkv, |qkv| dot(&forward_reference(&shape, qkv, None).0, &dout));
            for (i, (got, want)) in reference(&shape, &qkv, None, &dout).iter().zip(want).enumerate() {
                assert!((got - want).abs() < 1e-7 * (1.0 + want.abs()), "{i}: {got} for {want}");
            }
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        for shape in [SHAPES[3], SHAPES[5], SHAPES[8]] {
            for block in [None, Some(24)] {
                assert_same_everywhere(|cx| bits(&run::<f32>(cx, &shape, Some(&documents(&shape)), block)));
                assert_same_everywhere(|cx| bits(&run::<bf16>(cx, &shape, Some(&documents(&shape)), block)));
            }
        }
    }

    #[test]
    fn a_document_has_the_same_gradients_wherever_it_lies() {
        for (window, block) in [(None, None), (Some(170), None), (None, Some(96))] {
            let of = |at: usize| {
                let (shape, qkv, starts) = row_with_a_document(at);
                let shape = AttentionShape { window, ..shape };
                let (mut out, mut lse) = (vec![0.0f32; shape.tokens() * shape.out_cols()], vec![0.0; shape.tokens() * shape.heads]);
                attention(&mut fastest(), &shape, &qkv, Some(&starts), &mut out, &mut lse);
                let (mut dout, mut dqkv) = (values::<f32>(3, out.len()), vec![f32::NAN; qkv.len()]);
                let document = values(4, 300 * shape.out_cols());
                dout[at * shape.out_cols()..][..document.len()].copy_from_slice(&document);
                let forward = Forward { dout: &dout, qkv: &qkv, documents: Some(&starts), out: &out, lse: &lse };
                attention_backward(&mut fastest(), &shape, block, forward, &mut dqkv);
                bits(&dqkv[at * shape.qkv_cols()..][..300 * shape.qkv_cols()])
            };
            let alone = of(0);
            assert!([1, 37, 64, 131].into_iter().all(|at| of(at) == alone), "{window:?} {block:?}");
        }
    }

    fn rounds_once<T: Element>() {
        let shape = SHAPES[7];
        let mut cx = fastest();
        let (qkv, out, lse) = forward::<T>(&mut cx, &shape, None);
        let dout = values::<T>(2, out.len());
        let mut dqkv = vec![0.0; qkv.len()];
        let (wide_dout, wide_qkv, wide_out) = (widened(&dout), widened(&qkv), widened(&out));
        let forward = Forward { dout: &wide_dout, qkv: &wide_qkv, documents: None, out: &wide_out, lse: &lse };
        attention_backward(&mut cx, &shape, None, forward, &mut dqkv);
        assert_rounded("dqkv", &run::<T>(&mut cx, &shape, None, None), &dqkv);
    }

    #[test]
    fn narrow_formats_are_the_f32_result_rounded_once() {
        rounds_once::<bf16>();
        rounds_once::<f16>();
    }
    /// Gradients when only the outputs of `queries` (indices in their rows) have a gradient.
    fn run_of<T: Element>(shape: &AttentionShape, documents: Option<&[i32]>, queries: Range<usize>) -> Vec<T> {
        let mut cx = fastest();
        let (qkv, out, lse) = forward::<T>(&mut cx, shape, documents);
        let mut dout = values::<T>(2, out.len());
        for (token, row) in dout.chunks_exact_mut(shape.out_cols()).enumerate() {
            if !queries.contains(&(token % shape.seq_length)) {
                row.fill(T::from_f32(0.0));
            }
        }
        let mut dqkv = vec![T::from_f32(f32::NAN); qkv.len()];
        attention_backward(&mut cx, shape, None, Forward { dout: &dout, qkv: &qkv, documents, out: &out, lse: &lse }, &mut dqkv);
        dqkv
    }

    /// Gradients of queries when only `keys` (indices in their rows) contribute.
    fn run_with<T: Element>(shape: &AttentionShape, documents: Option<&[i32]>, keys: Range<usize>) -> Vec<T> {
        let mut cx = fastest();
        let (mut qkv, out, lse) = forward::<T>(&mut cx, shape, documents);
        let dout = values::<T>(2, out.len());
        // A key's contribution to dq is a multiple of the key, and the factor does not depend on other keys.
        let columns = shape.heads * shape.head_dim..(shape.heads + shape.kv_heads) * shape.head_dim;
        for (token, row) in qkv.chunks_exact_mut(shape.qkv_cols()).enumerate() {
            if !keys.contains(&(token % shape.seq_length)) {
                row[columns.clone()].fill(T::from_f32(0.0));
            }
        }
        let mut dqkv = vec![T::from_f32(f32::NAN); qkv.len()];
        attention_backward(&mut cx, shape, None, Forward { dout: &dout, qkv: &qkv, documents, out: &out, lse: &lse }, &mut dqkv);
        dqkv
    }

    /// Expects the gradients of each block alone, rounded, and their sum in order, rounded.
    fn blocks_are_rounded_and_added_in_order<T: Element>(shape: &AttentionShape, documents: Option<&[i32]>, blocks: &[Range<usize>]) {
        let got = run::<T>(&mut fastest(), shape, documents, Some(blocks[0].len()));
        let queries = shape.heads * shape.head_dim;
        let is_of_queries = |index: usize| index % shape.qkv_cols() < queries;
        let mut sums = vec![0.0; got.len()];
        let mut add = |block: Vec<T>, of_queries: bool| {
            let of_these = sums.iter_mut().zip(block).enumerate().filter(|(index, _)| is_of_queries(*index) == of_queries);
            of_these.for_each(|(_, (sum, x))| *sum += x.to_f32());
        };
        let is_cut = shape.hiding_window().is_none();
        let whole = 0..shape.seq_length;
        let key_blocks = if is_cut { blocks } else { std::slice::from_ref(&whole) };
        blocks.iter().for_each(|queries| add(run_of(shape, documents, queries.clone()), false));
        key_blocks.iter().for_each(|keys| add(run_with(shape, documents, keys.clone()), true));
        assert_rounded("dqkv", &got, &sums);
        let whole = run::<T>(&mut fastest(), shape, documents, None);
        let differ = |of_queries: bool| {
            let mut pairs = got.iter().zip(&whole).enumerate();
            pairs.any(|(index, (got, whole))| is_of_queries(index) == of_queries && got.to_f32() != whole.to_f32())
        };
        assert_eq!(differ(false), blocks.len() > 1, "what blocks round shows");
        assert_eq!(differ(true), blocks.len() > 1 && is_cut, "keys behind a window are not cut");
    }

    #[test]
    fn each_block_is_rounded_and_added_in_order() {
        let shape = SHAPES[5];
        let blocks = [0..48, 48..96, 96..130];
        blocks_are_rounded_and_added_in_order::<bf16>(&shape, None, &blocks);
        blocks_are_rounded_and_added_in_order::<f16>(&SHAPES[8], None, &[0..32, 32..64, 64..70]);
        blocks_are_rounded_and_added_in_order::<bf16>(&shape, None, std::slice::from_ref(&(0..130)));
        let all = AttentionShape { window: None, ..shape };
        blocks_are_rounded_and_added_in_order::<bf16>(&all, None, &blocks);
        blocks_are_rounded_and_added_in_order::<f16>(&AttentionShape { window: None, ..SHAPES[8] }, None, &[0..32, 32..64, 64..70]);
        // A last block of one query is merged with the block before it, except within one of several documents, because a GPU pads
        // documents.
        blocks_are_rounded_and_added_in_order::<bf16>(&shape, None, &[0..43, 43..86, 86..130]);
        blocks_are_rounded_and_added_in_order::<bf16>(&shape, Some(&[0; 130]), &[0..43, 43..86, 86..129, 129..130]);
        // The second document begins at token 70, and its blocks begin there.
        let starts: Vec<i32> = (0..130).map(|token| if token < 70 { 0 } else { 70 }).collect();
        let blocks = [0..48, 48..70, 70..118, 118..130];
        blocks_are_rounded_and_added_in_order::<bf16>(&shape, Some(&starts), &blocks);
        blocks_are_rounded_and_added_in_order::<bf16>(&all, Some(&starts), &blocks);
    }
}
