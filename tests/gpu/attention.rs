//! Causal attention, forward and backward, against f64.
//!
//! Where the errors come from, for query `q`, key `k` with score `s = scale * q k`, probability `p`:
//! - a score: that of a product over `head_dim`, with magnitudes bounded by `|q| |k|` (Cauchy and Schwarz);
//! - an exponential: 2 ulp, and its argument: `s` and what is subtracted are rounded, scaled by log2(e), and rounded again, each by `u` of
//!   itself, which is a relative error of the result: `4 u (|s| + |lse|) + 4 u`;
//! - tensor cores take narrow operands: probabilities, and gradients of scores, are rounded to the format (by `r` of themselves) before they
//!   are multiplied. These roundings are independent: `min(sum of |terms|, 6 sqrt(sum of terms^2))` (Hoeffding, as in
//!   [`growth`]). float16 also has an absolute error where they are subnormal;
//! - with several query heads to a key head, each head's gradient of a key may be rounded to the format before they are added.

use super::bounds::{Near, U, growth, product_growth, subnormal, unit};
use super::formats::{FLOATS, round, wide};
use super::harness::{Bench, Case, Want};
use super::kernels::{Suite, parallel};
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use std::ops::Range;
use superoffload::internals::device::{AttentionBackward, AttentionForward, AttentionShape};
use superoffload::internals::dtype::Dtype;

const FP32: Dtype = Dtype::Float32;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    let full = [shape(2, 1024, (32, 8), 128, None), shape(1, 1024, (12, 12), 64, None), shape(1, 1024, (16, 8), 128, Some(300))];
    for dtype in FLOATS {
        let full = if suite.full(dtype) { &full[..] } else { &[] };
        for &shape in shapes().iter().chain(full) {
            let AttentionShape { batch, seq_length, heads, kv_heads, head_dim, window, softcap, .. } = shape;
            let window = window.map_or(String::new(), |window| format!(", window {window}"));
            let window = window + if softcap.is_some() { ", capped" } else { "" };
            let name = |kernel: &str| format!("{kernel} {dtype} {batch}x{seq_length} tokens, ({heads}+2x{kv_heads})x{head_dim}{window}");
            suite.case(&name("attention"), |bench, random| forward(bench, random, dtype, shape, false));
            suite.case(&name("attention_backward"), |bench, random| backward(bench, random, dtype, shape, false));
            let name = |kernel: &str| name(kernel) + ", several documents";
            suite.case(&name("attention"), |bench, random| forward(bench, random, dtype, shape, true));
            suite.case(&name("attention_backward"), |bench, random| backward(bench, random, dtype, shape, true));
        }
    }
}

/// Every ratio of heads, sequences around the sizes of tiles, odd heads, those of real models, windows.
fn shapes() -> [AttentionShape; 15] {
    [
        shape(1, 1, (1, 1), 1, None),
        shape(2, 5, (2, 1), 4, None),
        shape(1, 33, (3, 3), 17, None),
        shape(3, 70, (6, 3), 8, Some(7)),
        shape(1, 1, (2, 1), 64, None),
        shape(2, 64, (4, 2), 32, None),
        shape(1, 65, (2, 2), 64, Some(1)),
        shape(1, 130, (4, 1), 64, Some(40)),
        shape(1, 150, (2, 1), 64, Some(1000)),
        shape(2, 77, (4, 4), 96, None),
        shape(1, 129, (8, 2), 128, None),
        shape(1, 50, (32, 8), 128, None),
        shape(1, 257, (2, 1), 128, Some(128)),
        AttentionShape { softcap: Some(2.0), ..shape(2, 70, (4, 2), 64, Some(20)) },
        AttentionShape { softcap: Some(50.0), ..shape(1, 67, (2, 1), 7, None) },
    ]
}

fn shape(batch: usize, seq_length: usize, (heads, kv_heads): (usize, usize), head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { batch, seq_length, heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), window, softcap: None }
}

/// cuDNN has this for narrow formats and heads of whole 16 bytes.
fn may_be_unsupported(dtype: Dtype, shape: &AttentionShape) -> bool {
    dtype == FP32 || !shape.head_dim.is_multiple_of(8) || shape.softcap.is_some()
}

/// Where each token's document begins in its row: all at 0, or `several` a row, from one token to some tiles long.
fn documents(random: &mut Random, shape: &AttentionShape, several: bool) -> Vec<i32> {
    let mut starts = Vec::new();
    for _ in 0..shape.batch {
        let (mut start, mut end) = (0, 0);
        for token in 0..shape.seq_length {
            if token == end {
                (start, end) = (token, token + if several { 1 + random.below([5, 70, 200][token % 3]) } else { shape.seq_length });
            }
            starts.push(start as i32);
        }
    }
    starts
}

/// A head's rows in `qkv` or in an output, widened.
struct Rows<'a> {
    data: &'a [f64],
    pitch: usize,
    first: usize,
    len: usize,
}

impl Rows<'_> {
    fn row(&self, token: usize) -> &[f64] {
        &self.data[token * self.pitch + self.first..][..self.len]
    }
}

/// Rows of head `head` (keys and values count on after the queries).
fn head<'a>(shape: &AttentionShape, qkv: &'a [f64], head: usize) -> Rows<'a> {
    Rows { data: qkv, pitch: shape.qkv_cols(), first: head * shape.head_dim, len: shape.head_dim }
}

/// Rows of head `head` of the output.
fn out_head<'a>(shape: &AttentionShape, out: &'a [f64], head: usize) -> Rows<'a> {
    Rows { data: out, pitch: shape.out_cols(), first: head * shape.head_dim, len: shape.head_dim }
}

/// The key head that a query head reads, counted as a head of `qkv`; its values' head.
fn key_head(shape: &AttentionShape, query_head: usize) -> (usize, usize) {
    let key = shape.heads + query_head / group(shape);
    (key, key + shape.kv_heads)
}

/// The keys that a query of a sequence sees, whose `starts` are those of the tokens' documents.
fn visible(shape: &AttentionShape, starts: &[i32], sequence: usize, query: usize) -> Range<usize> {
    let in_window = shape.window.map_or(0, |window| (query + 1).saturating_sub(window));
    in_window.max(starts[sequence * shape.seq_length + query] as usize)..query + 1
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(a: &[f64]) -> f64 {
    dot(a, a).sqrt()
}

/// Scores of one query with the keys of `keys` (tokens).
fn scores(shape: &AttentionShape, dtype: Dtype, q: &[f64], k: &Rows<'_>, keys: Range<usize>) -> Vec<Near> {
    let (scale, growth) = (f64::from(shape.scale), product_growth(dtype, shape.head_dim));
    let q_norm = norm(q);
    let score = |key| Near { want: scale * dot(q, k.row(key)), error: scale.abs() * U * growth * q_norm * norm(k.row(key)) };
    keys.map(|key| capped(shape, score(key))).collect()
}

/// A score below the cap, if there is one: `cap * tanh(s / cap)` is no steeper than 1 and takes up to 8 roundings.
fn capped(shape: &AttentionShape, score: Near) -> Near {
    let Some(cap) = shape.softcap.map(f64::from) else { return score };
    let want = cap * (score.want / cap).tanh();
    Near { want, error: score.error + 8.0 * U * want.abs() }
}

/// The slope of the cap at what it made of a score.
fn slope(shape: &AttentionShape, score: &Near) -> Near {
    let Some(cap) = shape.softcap.map(f64::from) else { return Near::exact(1.0) };
    let t = score.want / cap;
    Near { want: 1.0 - t * t, error: 2.0 * t.abs() * score.error / cap + 8.0 * U }
}

/// A sum of products with narrow operands: exact value, error of the operands before they are rounded, squares and sizes for the roundings.
#[derive(Clone, Copy, Default)]
struct OperandSum {
    sum: f64,
    error: f64,
    size: f64,
    squares: f64,
    others: f64,
}

impl OperandSum {
    /// Adds `operand * other`, where `operand` is calculated and then rounded.
    fn add(&mut self, operand: Near, other: f64) {
        let term = operand.want * other;
        self.sum += term;
        self.error += operand.error * other.abs();
        self.size += term.abs();
        self.squares += term * term;
        self.others += other.abs();
    }

    /// `terms` of them added up; `largest` is what an operand of 1 means when operands are scaled.
    fn near(self, dtype: Dtype, terms: usize, largest: f64) -> Near {
        let rounded = if dtype == FP32 { 0.0 } else { unit(dtype) * self.size.min(6.0 * self.squares.sqrt()) };
        let flushed = if dtype == FP32 { 0.0 } else { subnormal(dtype) / 2.0 * largest * self.others };
        Near { want: self.sum, error: self.error + rounded + flushed + U * product_growth(dtype, terms) * self.size }
    }
}

struct Forward {
    out: Vec<Near>,
    lse: Vec<Near>,
}

/// One head of one sequence: its output `[seq_length, head_dim]` and log-sum-exp.
fn forward_head(shape: &AttentionShape, dtype: Dtype, qkv: &[f64], starts: &[i32], sequence: usize, query_head: usize) -> Forward {
    let (key, value) = key_head(shape, query_head);
    let (q, k, v) = (head(shape, qkv, query_head), head(shape, qkv, key), head(shape, qkv, value));
    let first = sequence * shape.seq_length;
    let mut result = Forward { out: Vec::new(), lse: Vec::new() };
    for query in 0..shape.seq_length {
        let keys = visible(shape, starts, sequence, query);
        let keys = first + keys.start..first + keys.end;
        let scores = scores(shape, dtype, q.row(first + query), &k, keys.clone());
        let max = scores.iter().map(|s| s.want).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s.want - max).exp()).sum();
        let lse = max + sum.ln();
        // The relative error of each exponential; that of their sum is their mean.
        let relative = |s: &Near| s.error + U * (4.0 * (s.want.abs() + lse.abs()) + 4.0);
        let p = |s: &Near| (s.want - lse).exp();
        let lse_error = scores.iter().map(|s| p(s) * relative(s)).sum::<f64>() + U * (growth(keys.len()) + 4.0 * lse.abs());
        let mut sums = vec![OperandSum::default(); shape.head_dim];
        for (s, key) in scores.iter().zip(keys.clone()) {
            let p = Near { want: p(s), error: p(s) * (relative(s) + lse_error) };
            sums.iter_mut().zip(v.row(key)).for_each(|(sum, &v)| sum.add(p, v));
        }
        result.lse.push(Near { want: lse, error: lse_error });
        // Operands are scaled so that 1 is the largest probability.
        result.out.extend(sums.iter().map(|sum| sum.near(dtype, keys.len(), (max - lse).exp())));
    }
    result
}

/// All heads: output `[T, heads * head_dim]` and lse `[batch, heads, seq_length]`.
fn exact_forward(shape: &AttentionShape, dtype: Dtype, qkv: &[f64], starts: &[i32]) -> Forward {
    let heads = parallel(shape.batch * shape.heads, |i| forward_head(shape, dtype, qkv, starts, i / shape.heads, i % shape.heads));
    let mut out = vec![Near::exact(0.0); shape.tokens() * shape.out_cols()];
    for (i, result) in heads.iter().enumerate() {
        let (sequence, query_head) = (i / shape.heads, i % shape.heads);
        for (query, row) in result.out.chunks_exact(shape.head_dim).enumerate() {
            let start = (sequence * shape.seq_length + query) * shape.out_cols() + query_head * shape.head_dim;
            out[start..start + shape.head_dim].copy_from_slice(row);
        }
    }
    Forward { out, lse: heads.into_iter().flat_map(|head| head.lse).collect() }
}

fn forward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: AttentionShape, several: bool) -> Outcome {
    // Large enough that the softmax is far from flat.
    let qkv = random.scaled(dtype, shape.tokens() * shape.qkv_cols(), 3.0);
    let starts = documents(random, &shape, several);
    let Forward { out, lse } = exact_forward(&shape, dtype, &wide(&qkv), &starts);
    let mut case = Case::default();
    case.optional(may_be_unsupported(dtype, &shape));
    case.aligned();
    let (qkv, documents) = (case.input("qkv", dtype, &qkv), case.ints("documents", &starts));
    let (out_elems, lse_elems) = (out.len(), lse.len());
    let (out, lse) = (case.output("out", dtype, out_elems, Want::Near(out)), case.output("lse", FP32, lse_elems, Want::Near(lse)));
    case.check(bench, &|dev, at| {
        dev.set_documents(&starts, shape.seq_length)?;
        dev.launch(AttentionForward { qkv: at[qkv], documents: several.then(|| at[documents]), out: at[out], lse: at[lse], shape })
    })
}

/// What the backward pass reads, widened.
struct Kept<'a> {
    dout: &'a [f64],
    qkv: &'a [f64],
    starts: &'a [i32],
    out: &'a [f64],
    lse: &'a [f64],
}

/// Gradients of one sequence's tokens: of each query head that reads one key head, and of that key head's keys and values.
struct Gradients {
    dq: Vec<Vec<Near>>,
    dk: Vec<Near>,
    dv: Vec<Near>,
}

fn backward_head(shape: &AttentionShape, dtype: Dtype, kept: &Kept<'_>, sequence: usize, kv_head: usize) -> Gradients {
    let (group, elems) = (group(shape), shape.seq_length * shape.head_dim);
    let (mut dk, mut dv) = (vec![Near::exact(0.0); elems], vec![Near::exact(0.0); elems]);
    let mut dq = Vec::new();
    for query_head in kv_head * group..(kv_head + 1) * group {
        let (mut head_dk, mut head_dv) = (vec![OperandSum::default(); elems], vec![OperandSum::default(); elems]);
        dq.push(backward_query_head(shape, dtype, kept, sequence, query_head, &mut head_dk, &mut head_dv));
        // Shared keys and values: each head's part may be rounded to the format before they are added up.
        let rounds = group > 1 && dtype != FP32;
        let (rounding, flushed) = if rounds { (unit(dtype), subnormal(dtype) / 2.0) } else { (U, 0.0) };
        let add = |(total, sum): (&mut Near, &OperandSum)| {
            let near = sum.near(dtype, shape.seq_length, f64::from(shape.scale).max(1.0));
            *total = Near {
                want: total.want + near.want,
                error: total.error + near.error + rounding * near.want.abs() + flushed + U * total.want.abs(),
            };
        };
        dk.iter_mut().zip(&head_dk).for_each(add);
        dv.iter_mut().zip(&head_dv).for_each(add);
    }
    Gradients { dq, dk, dv }
}

/// One query head: returns its gradient and adds its part of the keys' and values'.
fn backward_query_head(
    shape: &AttentionShape,
    dtype: Dtype,
    kept: &Kept<'_>,
    sequence: usize,
    query_head: usize,
    dk: &mut [OperandSum],
    dv: &mut [OperandSum],
) -> Vec<Near> {
    let (key, value) = key_head(shape, query_head);
    let (q, k, v) = (head(shape, kept.qkv, query_head), head(shape, kept.qkv, key), head(shape, kept.qkv, value));
    let (dout, out) = (out_head(shape, kept.dout, query_head), out_head(shape, kept.out, query_head));
    let (scale, d, first) = (f64::from(shape.scale), shape.head_dim, sequence * shape.seq_length);
    let mut dq = Vec::new();
    for query in 0..shape.seq_length {
        let (q, dout, out) = (q.row(first + query), dout.row(first + query), out.row(first + query));
        let lse = kept.lse[(sequence * shape.heads + query_head) * shape.seq_length + query];
        let (delta, dout_norm) = (dot(dout, out), norm(dout));
        let delta_error = U * growth(d) * dout_norm * norm(out);
        let keys = visible(shape, kept.starts, sequence, query);
        let scores = scores(shape, dtype, q, &k, first + keys.start..first + keys.end);
        let mut sums = vec![OperandSum::default(); d];
        for (s, key) in scores.iter().zip(keys.clone()) {
            let (k, v) = (k.row(first + key), v.row(first + key));
            let (p, relative) = ((s.want - lse).exp(), s.error + U * (4.0 * (s.want.abs() + lse.abs()) + 4.0));
            let dp = dot(dout, v);
            let dp_error = U * product_growth(dtype, d) * dout_norm * norm(v);
            // p (dp - delta) scale, times the cap's slope: the errors of all, and five roundings.
            let (slope, before_cap) = (slope(shape, s), p * (dp - delta) * scale);
            let ds = before_cap * slope.want;
            let parts = p * scale * slope.want * (dp_error + delta_error + U * (dp.abs() + delta.abs()));
            let ds_error = ds.abs() * (relative + 5.0 * U) + parts + before_cap.abs() * slope.error;
            let (p, ds) = (Near { want: p, error: p * relative }, Near { want: ds, error: ds_error });
            for c in 0..d {
                sums[c].add(ds, k[c]);
                dk[key * d + c].add(ds, q[c]);
                dv[key * d + c].add(p, dout[c]);
            }
        }
        dq.extend(sums.iter().map(|sum| sum.near(dtype, keys.len(), scale.max(1.0))));
    }
    dq
}

/// The gradient of `qkv`, `[T, (heads + 2 kv_heads) * head_dim]`.
fn exact_backward(shape: &AttentionShape, dtype: Dtype, kept: &Kept<'_>) -> Vec<Near> {
    let (kv_heads, d) = (shape.kv_heads, shape.head_dim);
    let heads = parallel(shape.batch * kv_heads, |i| backward_head(shape, dtype, kept, i / kv_heads, i % kv_heads));
    let mut dqkv = vec![Near::exact(0.0); shape.tokens() * shape.qkv_cols()];
    let mut put = |sequence: usize, head: usize, rows: &[Near]| {
        for (token, row) in rows.chunks_exact(d).enumerate() {
            let start = (sequence * shape.seq_length + token) * shape.qkv_cols() + head * d;
            dqkv[start..start + d].copy_from_slice(row);
        }
    };
    for (i, Gradients { dq, dk, dv }) in heads.iter().enumerate() {
        let (sequence, kv_head) = (i / kv_heads, i % kv_heads);
        dq.iter().enumerate().for_each(|(h, dq)| put(sequence, kv_head * group(shape) + h, dq));
        put(sequence, shape.heads + kv_head, dk);
        put(sequence, shape.heads + kv_heads + kv_head, dv);
    }
    dqkv
}

/// Query heads to a key head.
fn group(shape: &AttentionShape) -> usize {
    shape.heads / shape.kv_heads
}

/// From what an exact forward pass would have left, rounded to its formats.
fn backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: AttentionShape, several: bool) -> Outcome {
    let qkv = random.scaled(dtype, shape.tokens() * shape.qkv_cols(), 3.0);
    let dout = random.uniform(dtype, shape.tokens() * shape.out_cols());
    let starts = documents(random, &shape, several);
    let forward = exact_forward(&shape, dtype, &wide(&qkv), &starts);
    let out: Vec<f32> = forward.out.iter().map(|near| round(dtype, near.want as f32)).collect();
    let lse: Vec<f32> = forward.lse.iter().map(|near| near.want as f32).collect();
    let (wide_dout, wide_qkv, wide_out, wide_lse) = (wide(&dout), wide(&qkv), wide(&out), wide(&lse));
    let kept = Kept { dout: &wide_dout, qkv: &wide_qkv, starts: &starts, out: &wide_out, lse: &wide_lse };
    let want = exact_backward(&shape, dtype, &kept);
    let mut case = Case::default();
    case.optional(may_be_unsupported(dtype, &shape));
    case.aligned();
    let (dout, qkv) = (case.input("dout", dtype, &dout), case.input("qkv", dtype, &qkv));
    let (out, lse, documents) = (case.input("out", dtype, &out), case.input("lse", FP32, &lse), case.ints("documents", &starts));
    let elems = want.len();
    let dqkv = case.output("dqkv", dtype, elems, Want::Near(want));
    case.check(bench, &|dev, at| {
        dev.set_documents(&starts, shape.seq_length)?;
        let (documents, out, lse) = (several.then(|| at[documents]), at[out], at[lse]);
        dev.launch(AttentionBackward { dout: at[dout], qkv: at[qkv], documents, out, lse, dqkv: at[dqkv], shape })
    })
}
