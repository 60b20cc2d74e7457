//! Attention sinks: outputs with the CPU's bits, sums within their bound. Without a sink nothing changes.

use super::bounds::{Near, Sum, U, growth};
use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{AttentionShape, Sinks, SinksBackward};
use superoffload::internals::dtype::Dtype;

const FP32: Dtype = Dtype::Float32;
/// Two exponentials, their sum and its logarithm.
const LSE_ROUNDINGS: f64 = 8.0;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in FLOATS {
        // The last shape has more tokens than are summed separately, and heads with lanes without a vector.
        let small = [(1, 1, 1, 1), (2, 35, 3, 10), (2, 35, 3, 66), (1, 130, 8, 64), (3, 7, 64, 64), (1, 2200, 4, 80)];
        let full = suite.full(dtype).then_some((2, 4096, 64, 64));
        for (batch, seq_length, heads, head_dim) in small.into_iter().chain(full) {
            let shape = AttentionShape { batch, seq_length, heads, kv_heads: 1, head_dim, scale: 1.0, window: None, softcap: None };
            let name = |kernel: &str| format!("{kernel} {dtype} {batch}x{seq_length} tokens, {heads}x{head_dim}");
            suite.case(&name("sinks"), |bench, random| forward(bench, random, dtype, shape));
            suite.case(&(name("sinks") + " without a sink"), |bench, random| none(bench, random, dtype, shape));
            suite.case(&name("sinks_backward"), |bench, random| backward(bench, random, dtype, shape));
        }
    }
}

/// The head and the token of element `i` of `[batch, heads, seq_length]`.
fn place(shape: &AttentionShape, i: usize) -> (usize, usize) {
    let (row, at) = (i / shape.seq_length, i % shape.seq_length);
    (row % shape.heads, row / shape.heads * shape.seq_length + at)
}

fn forward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: AttentionShape) -> Outcome {
    let (n, rows) = (shape.tokens() * shape.out_cols(), shape.tokens() * shape.heads);
    let (sinks, lse) = (random.scaled(dtype, shape.heads, 5.0), random.scaled(FP32, rows, 5.0));
    let near = |i: usize| {
        let (before, sink) = (f64::from(lse[i]), f64::from(sinks[place(&shape, i).0]));
        let largest = before.max(sink);
        let want = largest + ((before - largest).exp() + (sink - largest).exp()).ln();
        Near { want, error: U * (LSE_ROUNDINGS + largest.abs() + before.abs() + sink.abs()) }
    };
    let mut case = Case::default();
    let after = case.updated("lse", FP32, &lse, Want::Near((0..rows).map(near).collect()));
    let (sinks, out) = (case.input("sinks", dtype, &sinks), case.updated("out", dtype, &random.uniform(dtype, n), Want::Same));
    case.check(bench, &|dev, at| dev.launch(Sinks { sinks: at[sinks], out: at[out], lse: at[after], shape }))
}

fn none(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: AttentionShape) -> Outcome {
    let (n, rows) = (shape.tokens() * shape.out_cols(), shape.tokens() * shape.heads);
    let (before, lse) = (random.uniform(dtype, n), random.scaled(FP32, rows, 5.0));
    let exact = |values: &[f32]| Want::Near(values.iter().map(|&x| Near::exact(f64::from(x))).collect());
    let mut case = Case::default();
    let sinks = case.input("sinks", dtype, &vec![f32::NEG_INFINITY; shape.heads]);
    let (out, lse) = (case.updated("out", dtype, &before, exact(&before)), case.updated("lse", FP32, &lse, exact(&lse)));
    case.check(bench, &|dev, at| dev.launch(Sinks { sinks: at[sinks], out: at[out], lse: at[lse], shape }))
}

fn backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: AttentionShape) -> Outcome {
    let AttentionShape { heads, head_dim, .. } = shape;
    let (n, rows) = (shape.tokens() * shape.out_cols(), shape.tokens() * heads);
    let (dout, out) = (random.uniform(dtype, n), random.uniform(dtype, n));
    let sinks = random.uniform(dtype, heads);
    let lse: Vec<f32> = random.uniform(FP32, rows).iter().map(|x| 3.0 + x).collect();
    let near = |head: usize| {
        let own = (0..rows).filter(|&i| place(&shape, i).0 == head);
        let terms = own.flat_map(|i| {
            let p = (f64::from(sinks[head]) - f64::from(lse[i])).exp();
            let first = (place(&shape, i).1 * heads + head) * head_dim;
            let (dout, out) = (&dout, &out);
            (first..first + head_dim).map(move |at| -p * f64::from(dout[at]) * f64::from(out[at]))
        });
        // Sums over tokens and channels, and the exponential with its rounded argument.
        Sum::of(terms).near(growth(shape.tokens()) + growth(head_dim) + 12.0)
    };
    let gained: Vec<Near> = (0..heads).map(near).collect();
    for accumulate in [false, true] {
        let mut case = Case::default();
        let before = random.uniform(dtype, heads);
        let (dout, out) = (case.input("dout", dtype, &dout), case.input("out", dtype, &out));
        let (lse, sinks) = (case.input("lse", FP32, &lse), case.input("sinks", dtype, &sinks));
        let dsinks = case.gradient("dsinks", dtype, accumulate.then_some(&before[..]), gained.clone());
        case.check(bench, &|dev, at| {
            let (dout, out, lse, sinks) = (at[dout], at[out], at[lse], at[sinks]);
            dev.launch(SinksBackward { dout, out, lse, sinks, dsinks: at[dsinks], accumulate, shape })
        })?;
    }
    Ok(0.0)
}
