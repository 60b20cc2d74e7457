//! Normalisation of query and key heads.

use super::bounds::{Near, Sum, growth};
use super::formats::{FLOATS, wide};
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::norms::{rms_row, rms_row_backward, rms_rstd};
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{AttentionShape, QkNorm, QkNormBackward};
use superoffload::internals::dtype::Dtype;

const FP32: Dtype = Dtype::Float32;
/// What [`rms_rstd`] computes with.
const EPS: f32 = 1e-5;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    let shapes = [
        shape(1, 1, 1, 1, 1),
        shape(2, 33, 3, 1, 7),
        shape(1, 70, 4, 2, 64),
        shape(2, 13, 8, 8, 96),
        shape(1, 20, 32, 8, 128),
        shape(3, 65, 2, 1, 40),
    ];
    for dtype in FLOATS {
        let full = suite.full(dtype).then(|| shape(1, 2048, 32, 8, 128));
        for shape in shapes.into_iter().chain(full) {
            let AttentionShape { batch, seq_length, heads, kv_heads, head_dim, .. } = shape;
            let name = |kernel: &str| format!("{kernel} {dtype} {batch}x{seq_length} tokens, ({heads}+2x{kv_heads})x{head_dim}");
            suite.case(&name("qk_norm"), |bench, random| forward(bench, random, dtype, shape));
            suite.case(&name("qk_norm_backward"), |bench, random| backward(bench, random, dtype, shape));
        }
    }
}

fn shape(batch: usize, seq_length: usize, heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape { batch, seq_length, heads, kv_heads, head_dim, scale: 1.0, window: None }
}

/// Heads in the order of memory, and which of a token they are.
fn heads_of<'a>(shape: &AttentionShape, qkv: &'a [f64]) -> impl Iterator<Item = (usize, &'a [f64])> + use<'a> {
    let heads = shape.heads + 2 * shape.kv_heads;
    qkv.chunks_exact(shape.head_dim).enumerate().map(move |(i, head)| (i % heads, head))
}

fn forward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: AttentionShape) -> Outcome {
    let qkv = random.scaled(dtype, shape.tokens() * shape.qkv_cols(), 3.0);
    let weights = [(); 2].map(|()| random.uniform(dtype, shape.head_dim));
    let weights_wide = weights.each_ref().map(|w| wide(w));
    let (mut out, mut rstd) = (Vec::new(), Vec::new());
    for (head, x) in heads_of(&shape, &wide(&qkv)) {
        if head >= shape.heads + shape.kv_heads {
            out.extend(x.iter().map(|&x| Near::exact(x)));
            continue;
        }
        let (weight, head_rstd) = (&weights_wide[usize::from(head >= shape.heads)], rms_rstd(x));
        out.extend(rms_row(x, weight, head_rstd));
        rstd.push(head_rstd);
    }
    let mut case = Case::default();
    let (qkv, [q_weight, k_weight]) = (case.input("qkv", dtype, &qkv), weights.map(|w| case.input("weight", dtype, &w)));
    let (out_elems, rstd_elems) = (out.len(), rstd.len());
    let out = case.output("out", dtype, out_elems, Want::Near(out));
    let rstd = case.output("rstd", FP32, rstd_elems, Want::Near(rstd));
    case.check(bench, &|dev, at| {
        let (qkv, q_weight, k_weight) = (at[qkv], at[q_weight], at[k_weight]);
        dev.launch(QkNorm { qkv, q_weight, k_weight, eps: EPS, out: at[out], rstd: at[rstd], shape })
    })
}

fn backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: AttentionShape) -> Outcome {
    let elems = shape.tokens() * shape.qkv_cols();
    let (dqkv, qkv) = (random.uniform(dtype, elems), random.scaled(dtype, elems, 3.0));
    let [q_weight, k_weight, dq_before, dk_before] = [(); 4].map(|()| random.uniform(dtype, shape.head_dim));
    let rstd = random.positive(shape.tokens() * (shape.heads + shape.kv_heads));
    let weights = [wide(&q_weight), wide(&k_weight)];
    let mut sums = [(); 2].map(|()| vec![Sum::default(); shape.head_dim]);
    let (mut want, mut rstd_left) = (Vec::new(), rstd.iter());
    for ((head, dout), (_, x)) in heads_of(&shape, &wide(&dqkv)).zip(heads_of(&shape, &wide(&qkv))) {
        if head >= shape.heads + shape.kv_heads {
            want.extend(dout.iter().map(|&d| Near::exact(d)));
            continue;
        }
        let (kind, rstd) = (usize::from(head >= shape.heads), f64::from(*rstd_left.next().expect("one for each head")));
        want.extend(rms_row_backward(dout, x, &weights[kind], rstd));
        sums[kind].iter_mut().zip(dout.iter().zip(x)).for_each(|(sum, (d, x))| sum.add(d * x * rstd));
    }
    // As for the weight of any norm, with a row for every token and head.
    let [dq, dk] = [(0, shape.heads), (1, shape.kv_heads)].map(|(kind, heads)| {
        let growth = growth(shape.tokens() * heads) + 2.0;
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
            dev.launch(QkNormBackward { dqkv, qkv, q_weight, k_weight, rstd, dq_weight, dk_weight, accumulate, shape })
        });
        worst = worst.max(outcome?);
    }
    Ok(worst)
}
