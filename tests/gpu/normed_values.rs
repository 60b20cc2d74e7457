//! Normalisation of queries, keys and values, and a factor on the residual stream.

use super::bounds::{Near, Sum, U, growth};
use super::formats::{FLOATS, wide};
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::norms::{rms_row, rms_row_backward, rms_rstd};
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{NormedHeads, QkvNorm, QkvNormBackward, ScaleBy};
use superoffload::internals::dtype::Dtype;

const FP32: Dtype = Dtype::Float32;
/// The epsilon of [`rms_rstd`].
const EPS: f32 = 1e-5;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    // Tokens, query heads, key heads, channels: fewer channels than a warp has lanes, as many as it keeps, and between.
    let small = [(1, 1, 1, 1), (70, 3, 1, 7), (33, 4, 2, 64), (13, 8, 8, 96), (21, 4, 1, 512), (40, 6, 2, 256)];
    for dtype in FLOATS {
        let full = suite.full(dtype).then_some((2048, 32, 4, 512));
        for (tokens, heads, kv_heads, head_dim) in small.into_iter().chain(full) {
            for values_are_keys in [false, true] {
                let of = NormedHeads { heads, kv_heads, head_dim, values_are_keys };
                let kind = if values_are_keys { " of keys" } else { "" };
                let name = |kernel: &str| format!("{kernel}{kind} {dtype} {tokens} tokens, ({heads}+2x{kv_heads})x{head_dim}");
                suite.case(&name("qkv_norm"), |bench, random| forward(bench, random, dtype, (tokens, of)));
                suite.case(&name("qkv_norm_backward"), |bench, random| backward(bench, random, dtype, (tokens, of)));
            }
        }
        for elems in [1, 4097] {
            suite.case(&format!("scale_by {dtype} {elems}"), |bench, random| scale_by(bench, random, dtype, elems));
        }
    }
}

/// The head before the norms, and the index of the weight, of head `head` after them; no weight is 2.
fn source(of: &NormedHeads, head: usize) -> (usize, usize) {
    let keys_end = of.heads + of.kv_heads;
    let raw = if of.values_are_keys && head >= keys_end { head - of.kv_heads } else { head };
    (
        raw,
        if head < of.heads {
            0
        } else if head < keys_end {
            1
        } else {
            2
        },
    )
}

/// Heads before the norms.
fn raw_heads(of: &NormedHeads) -> usize {
    of.heads + of.kv_heads * if of.values_are_keys { 1 } else { 2 }
}

fn forward(bench: &mut Bench, random: &mut Random, dtype: Dtype, (tokens, of): (usize, NormedHeads)) -> Outcome {
    let (d, raw, all) = (of.head_dim, raw_heads(&of), of.heads + 2 * of.kv_heads);
    let qkv = random.scaled(dtype, tokens * raw * d, 3.0);
    let weights = [(); 2].map(|()| random.uniform(dtype, d));
    let factors = [wide(&weights[0]), wide(&weights[1]), vec![1.0; d]];
    let (mut out, mut rstd) = (Vec::new(), Vec::new());
    for token in wide(&qkv).chunks_exact(raw * d) {
        let stats: Vec<Near> = token.chunks_exact(d).map(rms_rstd).collect();
        for (raw, weight) in (0..all).map(|head| source(&of, head)) {
            out.extend(rms_row(&token[raw * d..][..d], &factors[weight], stats[raw]));
        }
        rstd.extend(stats);
    }
    let mut case = Case::default();
    let (qkv, [q_weight, k_weight]) = (case.input("qkv", dtype, &qkv), weights.map(|w| case.input("weight", dtype, &w)));
    let (out_elems, rstd_elems) = (out.len(), rstd.len());
    let out = case.output("out", dtype, out_elems, Want::Near(out));
    let rstd = case.output("rstd", FP32, rstd_elems, Want::Near(rstd));
    case.check(bench, &|dev, at| {
        let (qkv, q_weight, k_weight) = (at[qkv], at[q_weight], at[k_weight]);
        dev.launch(QkvNorm { qkv, q_weight, k_weight, eps: EPS, out: at[out], rstd: at[rstd], tokens, heads: of })
    })
}

fn backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, (tokens, of): (usize, NormedHeads)) -> Outcome {
    let (d, raw, all) = (of.head_dim, raw_heads(&of), of.heads + 2 * of.kv_heads);
    let (dout, qkv) = (random.uniform(dtype, tokens * all * d), random.scaled(dtype, tokens * raw * d, 3.0));
    let [q_weight, k_weight, dq_before, dk_before] = [(); 4].map(|()| random.uniform(dtype, d));
    let rstd = random.positive(tokens * raw);
    let factors = [wide(&q_weight), wide(&k_weight), vec![1.0; d]];
    let mut sums = [(); 2].map(|()| vec![Sum::default(); d]);
    let mut want = vec![Near::exact(0.0); qkv.len()];
    let (wide_dout, wide_qkv) = (wide(&dout), wide(&qkv));
    for (token, head) in (0..tokens).flat_map(|token| (0..all).map(move |head| (token, head))) {
        let (from, weight) = source(&of, head);
        let place = token * raw + from;
        let (x, dout, rstd) = (&wide_qkv[place * d..][..d], &wide_dout[(token * all + head) * d..][..d], f64::from(rstd[place]));
        for (near, more) in want[place * d..][..d].iter_mut().zip(rms_row_backward(dout, x, &factors[weight], rstd)) {
            // A key that is a value, too, has the sum of two gradients.
            let rounding = 4.0 * U * (near.want.abs() + more.want.abs());
            *near = Near { want: near.want + more.want, error: near.error + more.error + if near.want == 0.0 { 0.0 } else { rounding } };
        }
        if let Some(sums) = sums.get_mut(weight) {
            sums.iter_mut().zip(dout.iter().zip(x)).for_each(|(sum, (d, x))| sum.add(d * x * rstd));
        }
    }
    let [dq, dk] = [(0, of.heads), (1, of.kv_heads)].map(|(kind, count)| {
        let growth = growth(tokens * count) + 2.0;
        sums[kind].iter().map(|sum| sum.near(growth)).collect::<Vec<_>>()
    });
    let mut worst = 0f64;
    for accumulate in [false, true] {
        let mut case = Case::default();
        let (dout, qkv) = (case.input("dout", dtype, &dout), case.updated("qkv", dtype, &qkv, Want::Near(want.clone())));
        let (q_weight, k_weight) = (case.input("q_weight", dtype, &q_weight), case.input("k_weight", dtype, &k_weight));
        let rstd = case.input("rstd", FP32, &rstd);
        let dq = case.gradient("dq_weight", dtype, accumulate.then_some(&dq_before), dq.clone());
        let dk = case.gradient("dk_weight", dtype, accumulate.then_some(&dk_before), dk.clone());
        worst = worst.max(case.check(bench, &|dev, at| {
            let (dout, qkv, q_weight, k_weight) = (at[dout], at[qkv], at[q_weight], at[k_weight]);
            let (rstd, dq_weight, dk_weight) = (at[rstd], at[dq], at[dk]);
            dev.launch(QkvNormBackward { dout, qkv, q_weight, k_weight, rstd, dq_weight, dk_weight, accumulate, tokens, heads: of })
        })?);
    }
    Ok(worst)
}

fn scale_by(bench: &mut Bench, random: &mut Random, dtype: Dtype, elems: usize) -> Outcome {
    let (x, factor) = (random.scaled(dtype, elems, 3.0), random.uniform(dtype, 1));
    let product = |x: &f32| f64::from(*x) * f64::from(factor[0]);
    let want = x.iter().map(product).map(|want| Near { want, error: U * want.abs() }).collect();
    let mut case = Case::default();
    let (x, factor) = (case.updated("x", dtype, &x, Want::Near(want)), case.input("factor", dtype, &factor));
    case.check(bench, &|dev, at| dev.launch(ScaleBy { x: at[x], factor: at[factor] }))
}
