//! Causal attention, forward and backward, compared with f64.
//!
//! Sources of errors, for query `q`, key `k` with score `s = scale * q k`, probability `p`:
//! - a score: the error of a product over `head_dim`, with magnitudes bounded by `|q| |k|` (Cauchy-Schwarz);
//! - an exponential: 2 ulp, and its argument. `s` and the subtracted maximum are rounded, scaled by log2(e), and rounded again, each with a
//!   relative error of `u`, which is a relative error of the result: `4 u (|s| + |lse|) + 4 u`;
//! - tensor cores take narrow operands: probabilities, and gradients of scores, are rounded to the format (relative error `r`) before the
//!   product. These roundings are independent: `min(sum of |terms|, 6 sqrt(sum of terms^2))` (Hoeffding, as in [`growth`]). float16 also
//!   has an absolute error for subnormal numbers;
//! - with several query heads per key head, each head's gradient of a key may be rounded to the format before the sum;
//! - with several blocks, the contribution of each block to the gradient of a key or a query is rounded to the format, and summed in fp32.

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
    let full = [
        shape(2, 1024, (32, 8), 128, None),
        shape(1, 1024, (12, 12), 64, None),
        shape(1, 1024, (16, 8), 128, Some(300)),
        shape(1, 1300, (8, 2), 512, None),
        AttentionShape { softcap: Some(50.0), ..shape(4, 700, (8, 2), 256, Some(300)) },
    ];
    for dtype in FLOATS {
        let full = if suite.full(dtype) { &full[..] } else { &[] };
        for &shape in shapes().iter().chain(full) {
            let AttentionShape { batch, seq_length, heads, kv_heads, head_dim, window, softcap, .. } = shape;
            let window = window.map_or(String::new(), |window| format!(", window {window}"));
            let window = window + if softcap.is_some() { ", capped" } else { "" };
            let name = |kernel: &str| format!("{kernel} {dtype} {batch}x{seq_length} tokens, ({heads}+2x{kv_heads})x{head_dim}{window}");
            suite.case(&name("attention"), |bench, random| forward(bench, random, dtype, shape, false));
            suite.case(&name("attention_backward"), |bench, random| backward(bench, random, dtype, (shape, None), false));
            let name = |kernel: &str| name(kernel) + ", several documents";
            suite.case(&name("attention"), |bench, random| forward(bench, random, dtype, shape, true));
            suite.case(&name("attention_backward"), |bench, random| backward(bench, random, dtype, (shape, None), true));
        }
        let full = if suite.full(dtype) { &full_blocks()[..] } else { &[] };
        for &(shape, block) in blocks().iter().chain(full) {
            let AttentionShape { batch, seq_length, heads, kv_heads, head_dim, window, .. } = shape;
            let window = window.map_or(String::new(), |window| format!(", window {window}"));
            let of = format!("{dtype} {batch}x{seq_length} tokens, ({heads}+2x{kv_heads})x{head_dim}{window}");
            let name = format!("attention_backward {of} in blocks of {block}");
            suite.case(&name, |bench, random| backward(bench, random, dtype, (shape, Some(block)), false));
            suite.case(&(name + ", several documents"), |bench, random| backward(bench, random, dtype, (shape, Some(block)), true));
        }
    }
    if suite.full(Dtype::Bfloat16) {
        suite.case("attention_backward bfloat16 1x131072 tokens, (4+2x1)x128", |bench, random| long(bench, random, Dtype::Bfloat16));
    }
}

/// Shapes with a backward pass in blocks, and the number of queries and keys of a block.
fn blocks() -> [(AttentionShape, usize); 6] {
    [
        (shape(1, 130, (4, 1), 64, Some(40)), 32),
        (shape(2, 76, (4, 4), 96, None), 20),
        (shape(1, 129, (8, 2), 128, None), 64),
        (shape(1, 257, (2, 1), 128, Some(128)), 128),
        (shape(3, 72, (6, 3), 8, Some(7)), 16),
        (shape(1, 300, (4, 2), 64, None), 256),
    ]
}

fn full_blocks() -> [(AttentionShape, usize); 2] {
    [(shape(2, 1024, (32, 8), 128, None), 256), (shape(1, 1024, (16, 8), 128, Some(300)), 256)]
}

/// Every ratio of heads, sequences around the sizes of tiles, odd head dimensions, shapes of real models, windows.
fn shapes() -> [AttentionShape; 17] {
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
        shape(1, 65, (4, 2), 512, None),
        AttentionShape { softcap: Some(30.0), ..shape(3, 70, (2, 1), 512, Some(40)) },
    ]
}

fn shape(batch: usize, seq_length: usize, (heads, kv_heads): (usize, usize), head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { batch, seq_length, heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt(), window, softcap: None }
}

/// cuDNN and products support narrow formats and heads of whole 16-byte vectors.
fn may_be_unsupported(dtype: Dtype, shape: &AttentionShape) -> bool {
    dtype == FP32 || !shape.head_dim.is_multiple_of(8)
}

/// The first token of each token's document in its row: always 0, or `several` documents per row, from one token to a few tiles long.
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

/// Rows of one head in `qkv`, widened.
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

/// Rows of head `head`. Keys and values are numbered after the queries.
fn head<'a>(shape: &AttentionShape, qkv: &'a [f64], head: usize) -> Rows<'a> {
    Rows { data: qkv, pitch: shape.qkv_cols(), first: head * shape.head_dim, len: shape.head_dim }
}

/// The key head of a query head, as a head of `qkv`, and the head of its values.
fn key_head(shape: &AttentionShape, query_head: usize) -> (usize, usize) {
    let key = shape.heads + query_head / group(shape);
    (key, key + shape.kv_heads)
}

/// The keys that are visible to a query of a sequence. `starts` has the first token of each token's document.
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

/// Scores of one query with the keys `keys`.
fn scores(shape: &AttentionShape, dtype: Dtype, q: &[f64], k: &Rows<'_>, keys: Range<usize>) -> Vec<Near> {
    let (scale, growth) = (f64::from(shape.scale), product_growth(dtype, shape.head_dim));
    let q_norm = norm(q);
    let score = |key| Near { want: scale * dot(q, k.row(key)), error: scale.abs() * U * growth * q_norm * norm(k.row(key)) };
    keys.map(|key| capped(shape, score(key))).collect()
}

/// A score after the soft cap, if there is one. `cap * tanh(s / cap)` has a slope of at most 1 and takes up to 8 roundings.
fn capped(shape: &AttentionShape, score: Near) -> Near {
    let Some(cap) = shape.softcap.map(f64::from) else { return score };
    let want = cap * (score.want / cap).tanh();
    Near { want, error: score.error + 8.0 * U * want.abs() }
}

/// The slope of the soft cap at a capped score.
fn slope(shape: &AttentionShape, score: &Near) -> Near {
    let Some(cap) = shape.softcap.map(f64::from) else { return Near::exact(1.0) };
    let t = score.want / cap;
    Near { want: 1.0 - t * t, error: 2.0 * t.abs() * score.error / cap + 8.0 * U }
}

/// A sum of products with narrow operands: its exact value, the error of the operands before rounding, and squares and magnitudes for the
/// roundings.
#[derive(Clone, Copy, Default)]
struct OperandSum {
    sum: f64,
    error: f64,
    size: f64,
    squares: f64,
    others: f64,
}

impl OperandSum {
    /// Adds `operand * other`. The operand is computed and then rounded.
    fn add(&mut self, operand: Near, other: f64) {
        let term = operand.want * other;
        self.sum += term;
        self.error += operand.error * other.abs();
        self.size += term.abs();
        self.squares += term * term;
        self.others += other.abs();
    }

    /// The sum of `terms` terms with its error. `largest` is the value of an operand of 1 if operands are scaled.
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
fn forward_head(
    (shape, by_products): (&AttentionShape, bool),
    dtype: Dtype,
    (qkv, starts): (&[f64], &[i32]),
    sequence: usize,
    query_head: usize,
) -> Forward {
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
        // The relative error of each exponential; that of their sum is the weighted mean.
        let relative = |s: &Near| s.error + U * (4.0 * (s.want.abs() + lse.abs()) + 4.0);
        let p = |s: &Near| (s.want - lse).exp();
        let lse_error = scores.iter().map(|s| p(s) * relative(s)).sum::<f64>() + U * (growth(keys.len()) + 4.0 * lse.abs());
        let mut sums = vec![OperandSum::default(); shape.head_dim];
        for (s, key) in scores.iter().zip(keys.clone()) {
            let p = Near { want: p(s), error: p(s) * (relative(s) + lse_error) };
            sums.iter_mut().zip(v.row(key)).for_each(|(sum, &v)| sum.add(p, v));
        }
        result.lse.push(Near { want: lse, error: lse_error });
        // Operands of fused kernels are scaled so that the largest probability is 1; those of products are the probabilities.
        let largest = if by_products { 1.0 } else { (max - lse).exp() };
        result.out.extend(sums.iter().map(|sum| sum.near(dtype, keys.len(), largest)));
    }
    result
}

/// All heads: output `[T, heads * head_dim]` and log-sum-exp `[batch, heads, seq_length]`.
fn exact_forward((shape, by_products): (&AttentionShape, bool), dtype: Dtype, qkv: &[f64], starts: &[i32]) -> Forward {
    let of = |i: usize| forward_head((shape, by_products), dtype, (qkv, starts), i / shape.heads, i % shape.heads);
    let heads = parallel(shape.batch * shape.heads, of);
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
    // Large enough that the softmax is far from uniform.
    let qkv = random.scaled(dtype, shape.tokens() * shape.qkv_cols(), 3.0);
    let starts = documents(random, &shape, several);
    let Forward { out, lse } = exact_forward((&shape, (bench.by_products)(&shape)), dtype, &wide(&qkv), &starts);
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

/// Inputs of the backward pass, widened.
struct Kept<'a> {
    dout: &'a [f64],
    qkv: &'a [f64],
    starts: &'a [i32],
    out: &'a [f64],
    lse: &'a [f64],
}

/// Gradients of one sequence: of each query head that shares one key head, and of the keys and values of that key head.
struct Gradients {
    dq: Vec<Vec<Near>>,
    dk: Vec<Near>,
    dv: Vec<Near>,
}

/// The blocks of a sequence: `block` queries at a time within each document, or the whole sequence.
fn blocks_of(shape: &AttentionShape, starts: &[i32], sequence: usize, block: Option<usize>) -> Vec<Range<usize>> {
    let starts = &starts[sequence * shape.seq_length..][..shape.seq_length];
    let Some(block) = block.filter(|block| *block < shape.seq_length) else {
        return std::iter::once(0..shape.seq_length).collect();
    };
    let begins = |query: &usize| (query - starts[*query] as usize).is_multiple_of(block);
    let ends: Vec<usize> = (0..shape.seq_length).filter(begins).chain([shape.seq_length]).collect();
    ends.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

fn backward_head(
    (shape, block): (&AttentionShape, Option<usize>),
    dtype: Dtype,
    kept: &Kept<'_>,
    sequence: usize,
    kv_head: usize,
) -> Gradients {
    let (group, elems) = (group(shape), shape.seq_length * shape.head_dim);
    let (mut dk, mut dv) = (KeyGradients::new(shape, dtype, elems), KeyGradients::new(shape, dtype, elems));
    let mut dq = vec![Vec::new(); group];
    let blocks = blocks_of(shape, kept.starts, sequence, block);
    for queries in &blocks {
        for (dq, query_head) in dq.iter_mut().zip(kv_head * group..) {
            let (mut head_dk, mut head_dv) = (vec![OperandSum::default(); elems], vec![OperandSum::default(); elems]);
            let at = (sequence, query_head);
            dq.extend(backward_query_head((shape, block), dtype, kept, at, queries.clone(), &mut head_dk, &mut head_dv));
            dk.add_head(&head_dk, queries.len());
            dv.add_head(&head_dv, queries.len());
        }
        [&mut dk, &mut dv].into_iter().for_each(|gradients| gradients.end_block(blocks.len() > 1));
    }
    Gradients { dq, dk: dk.all, dv: dv.all }
}

/// Gradients of some keys, or of their values.
struct KeyGradients {
    dtype: Dtype,
    /// Whether several query heads share a key head.
    is_shared: bool,
    /// The value of 1 if operands are scaled.
    largest: f64,
    block: Vec<Near>,
    all: Vec<Near>,
}

impl KeyGradients {
    fn new(shape: &AttentionShape, dtype: Dtype, elems: usize) -> Self {
        let (is_shared, largest) = (group(shape) > 1, f64::from(shape.scale).max(1.0));
        Self { dtype, is_shared, largest, block: vec![Near::exact(0.0); elems], all: vec![Near::exact(0.0); elems] }
    }

    /// Adds the contribution of a query head, from `queries` queries. With a shared key head each contribution may be rounded to the format
    /// before the sum.
    fn add_head(&mut self, sums: &[OperandSum], queries: usize) {
        let rounds = self.is_shared && self.dtype != FP32;
        for (total, sum) in self.block.iter_mut().zip(sums) {
            *total = added(*total, sum.near(self.dtype, queries, self.largest), rounds.then_some(self.dtype));
        }
    }

    /// Ends a block. One of `several` blocks is rounded to the format before the sum.
    fn end_block(&mut self, several: bool) {
        for (total, block) in self.all.iter_mut().zip(&mut self.block) {
            let block = std::mem::replace(block, Near::exact(0.0));
            *total = if several { added(*total, block, Some(self.dtype)) } else { block };
        }
    }
}

/// An fp32 sum plus one more number, which may be rounded to a format before.
fn added(total: Near, next: Near, rounded: Option<Dtype>) -> Near {
    let (rounding, flushed) = rounded.map_or((U, 0.0), |dtype| (unit(dtype), subnormal(dtype) / 2.0));
    let of_next = next.error + rounding * (next.want.abs() + next.error) + flushed;
    Near { want: total.want + next.want, error: total.error + of_next + U * total.want.abs() }
}

/// One query head: returns its gradient at `queries`, and adds the contributions to the keys' and values' gradients.
fn backward_query_head(
    (shape, block): (&AttentionShape, Option<usize>),
    dtype: Dtype,
    kept: &Kept<'_>,
    (sequence, query_head): (usize, usize),
    queries: Range<usize>,
    dk: &mut [OperandSum],
    dv: &mut [OperandSum],
) -> Vec<Near> {
    let d = shape.head_dim;
    let mut dq = Vec::new();
    for at in queries {
        let query = Query::new(shape, kept, (sequence, query_head), at);
        dq.extend(query.backward((shape, block), dtype, kept, |key, p, ds| {
            for c in 0..d {
                dk[key * d + c].add(ds, query.q[c]);
                dv[key * d + c].add(p, query.dout[c]);
            }
        }));
    }
    dq
}

/// A query of one head, with its inputs of the backward pass.
struct Query<'a> {
    /// Sequence, head, and position in the sequence.
    at: (usize, usize, usize),
    q: &'a [f64],
    dout: &'a [f64],
    dout_norm: f64,
    lse: f64,
    delta: Near,
}

impl<'a> Query<'a> {
    fn new(shape: &AttentionShape, kept: &Kept<'a>, (sequence, query_head): (usize, usize), at: usize) -> Self {
        let token = sequence * shape.seq_length + at;
        let row = |data: &'a [f64], pitch: usize| &data[token * pitch + query_head * shape.head_dim..][..shape.head_dim];
        let (q, dout, out) = (row(kept.qkv, shape.qkv_cols()), row(kept.dout, shape.out_cols()), row(kept.out, shape.out_cols()));
        let dout_norm = norm(dout);
        let delta = Near { want: dot(dout, out), error: U * growth(shape.head_dim) * dout_norm * norm(out) };
        let lse = kept.lse[(sequence * shape.heads + query_head) * shape.seq_length + at];
        Self { at: (sequence, query_head, at), q, dout, dout_norm, lse, delta }
    }

    /// The gradient of the query, summed over blocks of keys. `each` is called for every visible key with the probability and the gradient
    /// of the score.
    fn backward(
        &self,
        (shape, block): (&AttentionShape, Option<usize>),
        dtype: Dtype,
        kept: &Kept<'_>,
        mut each: impl FnMut(usize, Near, Near),
    ) -> Vec<Near> {
        let (sequence, query_head, at) = self.at;
        let (key, value) = key_head(shape, query_head);
        let (k, v) = (head(shape, kept.qkv, key), head(shape, kept.qkv, value));
        let (first, keys) = (sequence * shape.seq_length, visible(shape, kept.starts, sequence, at));
        let scores = scores(shape, dtype, self.q, &k, first + keys.start..first + keys.end);
        let document = kept.starts[first + at] as usize;
        // Keys before a window are cut only if the document, with padding, is not longer than the window.
        let block = block.filter(|block| shape.window.is_none_or(|window| window > *block));
        let block_of = |key: usize| block.map_or(0, |block| (key - document) / block);
        let largest = f64::from(shape.scale).max(1.0);
        let mut total: Option<Vec<Near>> = None;
        let pairs: Vec<_> = scores.iter().zip(keys).collect();
        for pairs in pairs.chunk_by(|(_, a), (_, b)| block_of(*a) == block_of(*b)) {
            let mut sums = vec![OperandSum::default(); shape.head_dim];
            for (s, key) in pairs {
                let (p, ds) = self.gradients(shape, dtype, s, v.row(first + key));
                sums.iter_mut().zip(k.row(first + key)).for_each(|(sum, &k)| sum.add(ds, k));
                each(*key, p, ds);
            }
            let of_block = sums.iter().map(|sum| sum.near(dtype, pairs.len(), largest));
            total = Some(match total {
                None if block_of(at) == block_of(pairs[0].1) => of_block.collect(),
                None => of_block.map(|near| added(Near::exact(0.0), near, Some(dtype))).collect(),
                Some(total) => total.into_iter().zip(of_block).map(|(total, near)| added(total, near, Some(dtype))).collect(),
            });
        }
        total.unwrap_or_default()
    }

    /// The probability of a key with score `s` and value `v`, and the gradient of its score: `p (dp - delta) scale`, times the slope of the
    /// cap, with the errors of all factors and five roundings.
    fn gradients(&self, shape: &AttentionShape, dtype: Dtype, s: &Near, v: &[f64]) -> (Near, Near) {
        let Self { dout, dout_norm, lse, delta, .. } = self;
        let scale = f64::from(shape.scale);
        let (p, relative) = ((s.want - lse).exp(), s.error + U * (4.0 * (s.want.abs() + lse.abs()) + 4.0));
        let dp = dot(dout, v);
        let dp_error = U * product_growth(dtype, shape.head_dim) * dout_norm * norm(v);
        let (slope, before_cap) = (slope(shape, s), p * (dp - delta.want) * scale);
        let ds = before_cap * slope.want;
        let parts = p * scale * slope.want * (dp_error + delta.error + U * (dp.abs() + delta.want.abs()));
        let ds_error = ds.abs() * (relative + 5.0 * U) + parts + before_cap.abs() * slope.error;
        (Near { want: p, error: p * relative }, Near { want: ds, error: ds_error })
    }
}

/// The gradient of `qkv`, `[T, (heads + 2 kv_heads) * head_dim]`.
fn exact_backward((shape, block): (&AttentionShape, Option<usize>), dtype: Dtype, kept: &Kept<'_>) -> Vec<Near> {
    let (kv_heads, d) = (shape.kv_heads, shape.head_dim);
    let heads = parallel(shape.batch * kv_heads, |i| backward_head((shape, block), dtype, kept, i / kv_heads, i % kv_heads));
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

/// Number of query heads per key head.
fn group(shape: &AttentionShape) -> usize {
    shape.heads / shape.kv_heads
}

/// The backward pass, from the outputs of an exact forward pass, rounded to their formats.
fn backward(
    bench: &mut Bench,
    random: &mut Random,
    dtype: Dtype,
    (shape, block): (AttentionShape, Option<usize>),
    several: bool,
) -> Outcome {
    let qkv = random.scaled(dtype, shape.tokens() * shape.qkv_cols(), 3.0);
    let dout = random.uniform(dtype, shape.tokens() * shape.out_cols());
    let starts = documents(random, &shape, several);
    let forward = exact_forward((&shape, false), dtype, &wide(&qkv), &starts);
    let out: Vec<f32> = forward.out.iter().map(|near| round(dtype, near.want as f32)).collect();
    let lse: Vec<f32> = forward.lse.iter().map(|near| near.want as f32).collect();
    let (wide_dout, wide_qkv, wide_out, wide_lse) = (wide(&dout), wide(&qkv), wide(&out), wide(&lse));
    let kept = Kept { dout: &wide_dout, qkv: &wide_qkv, starts: &starts, out: &wide_out, lse: &wide_lse };
    let want = exact_backward((&shape, block), dtype, &kept);
    let mut case = Case::default();
    // The GPU's plain kernels have no blocks.
    case.optional(may_be_unsupported(dtype, &shape) || block.is_some());
    case.aligned();
    let (dout, qkv) = (case.input("dout", dtype, &dout), case.input("qkv", dtype, &qkv));
    let (out, lse, documents) = (case.input("out", dtype, &out), case.input("lse", FP32, &lse), case.ints("documents", &starts));
    let elems = want.len();
    let dqkv = case.output("dqkv", dtype, elems, Want::Near(want));
    case.check(bench, &|dev, at| {
        dev.set_documents(&starts, shape.seq_length)?;
        let (documents, out, lse) = (several.then(|| at[documents]), at[out], at[lse]);
        dev.launch(AttentionBackward { dout: at[dout], qkv: at[qkv], documents, out, lse, dqkv: at[dqkv], shape, block })
    })
}

/// Queries and keys of a block of [`long`] on a GPU.
const LONG_BLOCK: usize = 16_384;

/// The queries of one key head over enough tokens for cuDNN's backward pass to run in blocks. Queries and keys share no channel, so all
/// scores are 0 and the outputs of the forward pass are known. Some of the gradients are compared.
fn long(bench: &mut Bench, random: &mut Random, dtype: Dtype) -> Outcome {
    let shape = shape(1, 131_072, (4, 1), 128, None);
    let (n, d, cols) = (shape.seq_length, shape.head_dim, shape.qkv_cols());
    let (mut qkv, dout) = (random.uniform(dtype, n * cols), random.uniform(dtype, n * shape.out_cols()));
    for row in qkv.chunks_exact_mut(cols) {
        row[..shape.heads * d].chunks_exact_mut(d).for_each(|q| q[..d / 2].fill(0.0));
        row[shape.heads * d..][d / 2..d].fill(0.0);
    }
    let (out, lse) = means(&shape, dtype, &qkv);
    let (wide_dout, wide_qkv, wide_out, wide_lse) = (wide(&dout), wide(&qkv), wide(&out), wide(&lse));
    let kept = Kept { dout: &wide_dout, qkv: &wide_qkv, starts: &vec![0; n], out: &wide_out, lse: &wide_lse };
    let mut want = vec![Near { want: 0.0, error: f64::INFINITY }; qkv.len()];
    let queries = [0, LONG_BLOCK - 1, LONG_BLOCK, 70_001, n - 1];
    for (query_head, at) in (0..shape.heads).flat_map(|head| queries.map(|at| (head, at))) {
        let dq = Query::new(&shape, &kept, (0, query_head), at).backward((&shape, Some(LONG_BLOCK)), dtype, &kept, |_, _, _| ());
        want[at * cols + query_head * d..][..d].copy_from_slice(&dq);
    }
    let keys = [0, 1, LONG_BLOCK - 1, LONG_BLOCK, 70_000, n - 1];
    for (at, [dk, dv]) in keys.into_iter().zip(parallel(keys.len(), |i| long_key(&shape, dtype, &kept, keys[i]))) {
        want[at * cols + shape.heads * d..][..d].copy_from_slice(&dk);
        want[at * cols + (shape.heads + 1) * d..][..d].copy_from_slice(&dv);
    }
    let mut case = Case::default();
    case.aligned();
    let (dout, qkv) = (case.input("dout", dtype, &dout), case.input("qkv", dtype, &qkv));
    let (out, lse) = (case.input("out", dtype, &out), case.input("lse", FP32, &lse));
    let dqkv = case.output("dqkv", dtype, want.len(), Want::Near(want));
    case.check(bench, &|dev, at| {
        let (dout, qkv, out, lse, dqkv) = (at[dout], at[qkv], at[out], at[lse], at[dqkv]);
        dev.launch(AttentionBackward { dout, qkv, documents: None, out, lse, dqkv, shape, block: None })
    })
}

/// The outputs of attention for one sequence with scores of 0: the running means of the values, equal for all heads, and their log-sum-exp.
fn means(shape: &AttentionShape, dtype: Dtype, qkv: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let d = shape.head_dim;
    let (mut sums, mut out, mut lse) = (vec![0.0; d], Vec::new(), Vec::new());
    for (i, row) in qkv.chunks_exact(shape.qkv_cols()).enumerate() {
        let seen = (i + 1) as f64;
        sums.iter_mut().zip(&row[(shape.heads + 1) * d..]).for_each(|(sum, &v)| *sum += f64::from(v));
        let means: Vec<f32> = sums.iter().map(|sum| round(dtype, (sum / seen) as f32)).collect();
        (0..shape.heads).for_each(|_| out.extend(&means));
        lse.push(seen.ln() as f32);
    }
    (out, lse.repeat(shape.heads))
}

/// The gradients of one key and of its value, from all later queries.
fn long_key(shape: &AttentionShape, dtype: Dtype, kept: &Kept<'_>, key: usize) -> [Vec<Near>; 2] {
    let d = shape.head_dim;
    let (of_keys, of_values) = key_head(shape, 0);
    let (k, v) = (head(shape, kept.qkv, of_keys), head(shape, kept.qkv, of_values));
    let mut gradients = [(); 2].map(|()| KeyGradients::new(shape, dtype, d));
    for queries in blocks_of(shape, kept.starts, 0, Some(LONG_BLOCK)).into_iter().filter(|queries| queries.end > key) {
        for query_head in 0..shape.heads {
            let (mut dk, mut dv) = (vec![OperandSum::default(); d], vec![OperandSum::default(); d]);
            for at in queries.start.max(key)..queries.end {
                let query = Query::new(shape, kept, (0, query_head), at);
                let score = scores(shape, dtype, query.q, &k, key..key + 1)[0];
                let (p, ds) = query.gradients(shape, dtype, &score, v.row(key));
                dk.iter_mut().zip(query.q).for_each(|(sum, &q)| sum.add(ds, q));
                dv.iter_mut().zip(query.dout).for_each(|(sum, &dout)| sum.add(p, dout));
            }
            gradients.iter_mut().zip([&dk, &dv]).for_each(|(gradients, sums)| gradients.add_head(sums, queries.len()));
        }
        gradients.iter_mut().for_each(|gradients| gradients.end_block(true));
    }
    gradients.map(|gradients| gradients.all)
}
