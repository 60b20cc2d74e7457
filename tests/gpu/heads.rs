//! Normalisation of query and key heads.

use super::bounds::{Near, Sum, growth};
use super::formats::{FLOATS, wide};
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::norms::{factors, rms_row, rms_row_backward, rms_rstd};
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{AttentionShape, QkNorm, QkNormBackward};
use superoffload::internals::dtype::Dtype;

const FP32: Dtype = Dtype::Float32;
/// The epsilon of [`rms_rstd`].
const EPS: f32 = 1e-5;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    let shapes = [
        shape(1, 1, 1, 1, 1),
        shape(2, 33, 3, 1, 7),
        shape(1, 70, 4, 2, 64),
        shape(2, 13, 8, 8, 96),
        shape(1, 20, 32, 8, 128),
        shape(3, 65, 2, 1, 40),
        // More queries than a block has vectors.
        shape(1, 13, 80, 8, 128),
    ];
    for dtype in FLOATS {
        let full = suite.full(dtype).then(|| shape(1, 2048, 32, 8, 128));
        for shape in shapes.into_iter().chain(full) {
            let AttentionShape { batch, seq_length, heads, kv_heads, head_dim, .. } = shape;
            let name = |kernel: &str| format!("{kernel} {dtype} {batch}x{seq_length} tokens, ({heads}+2x{kv_heads})x{head_dim}");
            let (head, whole) = ([head_dim; 2], [heads * head_dim, kv_heads * head_dim]);
            for (kernel, spans, plus_one) in [
                ("qk_norm", head, false),
                ("qk_norm plus one", head, true),
                ("qk_norm of whole rows", whole, false),
                ("qk_norm of whole rows plus one", whole, true),
            ] {
                suite.case(&name(kernel), |bench, random| forward(bench, random, dtype, shape, (spans, plus_one)));
                let name = name(&format!("{kernel}, backward"));
                suite.case(&name, |bench, random| backward(bench, random, dtype, shape, (spans, plus_one)));
            }
        }
    }
}

fn shape(batch: usize, seq_length: usize, heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape { batch, seq_length, heads, kv_heads, head_dim, scale: 1.0, window: None, softcap: None }
}

/// Spans of a weight in the order of memory: 0 for queries, 1 for keys, and 2 for values, which no weight covers.
fn spans_of<'a>(shape: &AttentionShape, [q, k]: [usize; 2], qkv: &'a [f64]) -> impl Iterator<Item = (usize, &'a [f64])> + use<'a> {
    let (q_cols, k_cols) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    qkv.chunks_exact(shape.qkv_cols()).flat_map(move |token| {
        let (queries, rest) = token.split_at(q_cols);
        let (keys, values) = rest.split_at(k_cols);
        let (queries, keys) = (queries.chunks_exact(q).map(|x| (0, x)), keys.chunks_exact(k).map(|x| (1, x)));
        queries.chain(keys).chain([(2, values)])
    })
}

fn forward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: AttentionShape, (spans, plus_one): ([usize; 2], bool)) -> Outcome {
    let qkv = random.scaled(dtype, shape.tokens() * shape.qkv_cols(), 3.0);
    let weights = spans.map(|span| random.uniform(dtype, span));
    let weights_wide = weights.each_ref().map(|w| factors(w, plus_one));
    let (mut out, mut rstd) = (Vec::new(), Vec::new());
    for (kind, x) in spans_of(&shape, spans, &wide(&qkv)) {
        let Some(weight) = weights_wide.get(kind) else {
            out.extend(x.iter().map(|&x| Near::exact(x)));
            continue;
        };
        let span_rstd = rms_rstd(x);
        out.extend(rms_row(x, weight, span_rstd));
        rstd.push(span_rstd);
    }
    let mut case = Case::default();
    let (qkv, [q_weight, k_weight]) = (case.input("qkv", dtype, &qkv), weights.map(|w| case.input("weight", dtype, &w)));
    let (out_elems, rstd_elems) = (out.len(), rstd.len());
    let out = case.output("out", dtype, out_elems, Want::Near(out));
    let rstd = case.output("rstd", FP32, rstd_elems, Want::Near(rstd));
    case.check(bench, &|dev, at| {
        let (qkv, q_weight, k_weight) = (at[qkv], at[q_weight], at[k_weight]);
        dev.launch(QkNorm { qkv, q_weight, k_weight, plus_one, eps: EPS, out: at[out], rstd: at[rstd], shape })
    })
}

fn backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: AttentionShape, (spans, plus_one): ([usize; 2], bool)) -> Outcome {
    let elems = shape.tokens() * shape.qkv_cols();
    let (dqkv, qkv) = (random.uniform(dtype, elems), random.scaled(dtype, elems, 3.0));
    let [q, k] = spans;
    let [q_weight, k_weight, dq_before, dk_before] = [q, k, q, k].map(|span| random.uniform(dtype, span));
    let counts = [shape.heads * shape.head_dim / q, shape.kv_heads * shape.head_dim / k];
    let rstd = random.positive(shape.tokens() * (counts[0] + counts[1]));
    let weights = [factors(&q_weight, plus_one), factors(&k_weight, plus_one)];
    let mut sums = spans.map(|span| vec![Sum::default(); span]);
    let (mut want, mut rstd_left) = (Vec::new(), rstd.iter());
    for ((kind, dout), (_, x)) in spans_of(&shape, spans, &wide(&dqkv)).zip(spans_of(&shape, spans, &wide(&qkv))) {
        let Some(weight) = weights.get(kind) else {
            want.extend(dout.iter().map(|&d| Near::exact(d)));
            continue;
        };
        let rstd = f64::from(*rstd_left.next().expect("one for each span"));
        want.extend(rms_row_backward(dout, x, weight, rstd));
        sums[kind].iter_mut().zip(dout.iter().zip(x)).for_each(|(sum, (d, x))| sum.add(d * x * rstd));
    }
    // The bound of any norm's weight, with a row for every token and span.
    let [dq, dk] = [0, 1].map(|kind| {
        let growth = growth(shape.tokens() * counts[kind]) + 2.0;
        sums[kind].iter().map(|sum| sum.near(growth)).collect::<Vec<_>>()
    });
    let mut worst = 0f64;
    for accumulate in [false, true] {
        let mut case = Case::default();
        let (dqkv, qkv) = (case.updated("dqkv", dtype, &dqkv, Want::Near(want.clone())), case.input("qkv", dtype, &qkv));
        let (q_weight, k_weight) = (case.input("q_weight", dtype, &q_weight), case.input("k_weight", dtype, &k_weight));
        let rstd = case.input("rstd", FP32, &rstd);
        let dq = case.gradient("dq_weight", dtype, accumulate.then_some(&dq_before), dq.clone());
        let dk = case.gradient("dk_weight", dtype, accumulate.then_some(&dk_before), dk.clone());
        let outcome = case.check(bench, &|dev, at| {
            let (dqkv, qkv, q_weight, k_weight) = (at[dqkv], at[qkv], at[q_weight], at[k_weight]);
            let (rstd, dq_weight, dk_weight) = (at[rstd], at[dq], at[dk]);
            dev.launch(QkNormBackward { dqkv, qkv, q_weight, k_weight, plus_one, rstd, dq_weight, dk_weight, accumulate, shape })
        });
        worst = worst.max(outcome?);
    }
    Ok(worst)
}
