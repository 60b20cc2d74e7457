//! Activations and rotations: the CPU's bits, also for infinite, NaN and subnormal inputs.

use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{
    AttentionShape, Geglu, GegluBackward, Gelu, GeluBackward, Rope, ScaleAdd, SigmoidGate, SigmoidGateBackward, Swiglu, SwigluBackward,
};
use superoffload::internals::dtype::Dtype;

/// Rows and columns: one element, odd tails, the widths of real models.
const MATRICES: [(usize, usize); 9] = [(1, 1), (3, 7), (1, 1023), (65, 33), (5, 64), (7, 2560), (3, 4096), (3, 9728), (67, 515)];
/// Tokens of a real micro-batch, for the widest tensor.
const FULL: (usize, usize) = (2048, 9728);

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in FLOATS {
        let full = suite.full(dtype);
        for (rows, cols) in MATRICES.into_iter().chain(full.then_some(FULL)) {
            for (kind, values) in [("ordinary", Random::uniform as Values), ("wild", Random::wild)] {
                let name = |kernel: &str| format!("{kernel} {dtype} {rows}x{cols} {kind}");
                suite.case(&name("swiglu"), |bench, random| {
                    swiglu(bench, dtype, rows, cols, &mut || values(random, dtype, 2 * rows * cols))
                });
                suite.case(&name("swiglu_backward"), |bench, random| {
                    let (x, dout) = (values(random, dtype, 2 * rows * cols), values(random, dtype, rows * cols));
                    swiglu_backward(bench, dtype, cols, &x, &dout)
                });
                suite.case(&name("geglu"), |bench, random| {
                    let mut case = Case::default();
                    let x = case.input("gate_up", dtype, &values(random, dtype, 2 * rows * cols));
                    let out = case.output("out", dtype, rows * cols, Want::Same);
                    case.check(bench, &|dev, at| dev.launch(Geglu { gate_up: at[x], out: at[out], cols }))
                });
                suite.case(&name("geglu_backward"), |bench, random| {
                    let (x, dout) = (values(random, dtype, 2 * rows * cols), values(random, dtype, rows * cols));
                    let mut case = Case::default();
                    let (dout, x) = (case.input("dout", dtype, &dout), case.input("gate_up", dtype, &x));
                    let dx = case.output("dgate_up", dtype, 2 * rows * cols, Want::Same);
                    case.check(bench, &|dev, at| dev.launch(GegluBackward { dout: at[dout], gate_up: at[x], dgate_up: at[dx], cols }))
                });
                suite.case(&name("gelu"), |bench, random| {
                    let mut case = Case::default();
                    let x = case.input("x", dtype, &values(random, dtype, rows * cols));
                    let out = case.output("out", dtype, rows * cols, Want::Same);
                    case.check(bench, &|dev, at| dev.launch(Gelu { x: at[x], out: at[out] }))
                });
                suite.case(&name("gelu_backward"), |bench, random| {
                    let (x, dout) = (values(random, dtype, rows * cols), values(random, dtype, rows * cols));
                    gelu_backward(bench, dtype, &x, &dout)
                });
                suite.case(&name("scale_add"), |bench, random| {
                    let (x, base) = (values(random, dtype, rows * cols), values(random, dtype, rows * cols));
                    scale_add(bench, dtype, &x, &base)
                });
                suite.case(&name("sigmoid_gate"), |bench, random| {
                    let [x, gate, dout] = [(); 3].map(|()| values(random, dtype, rows * cols));
                    sigmoid_gate(bench, dtype, &x, &gate, &dout)
                });
            }
        }
        for (shape, rotary_dim) in rotations() {
            for (kind, values) in [("ordinary", Random::uniform as Values), ("wild", Random::wild)] {
                let AttentionShape { seq_length, heads, kv_heads, head_dim, .. } = shape;
                let name = format!("rope {dtype} {seq_length}x({heads}+2x{kv_heads})x{head_dim} {rotary_dim} rotate {kind}");
                suite.case(&name, |bench, random| {
                    let qkv = values(random, dtype, shape.tokens() * shape.qkv_cols());
                    let table = random.uniform(Dtype::Float32, seq_length * rotary_dim);
                    let positions: Vec<i32> = (0..shape.tokens()).map(|_| random.below(seq_length) as i32).collect();
                    for (interleaved, inverse) in [(false, false), (false, true), (true, false), (true, true)] {
                        let mut case = Case::default();
                        let (qkv, positions) = (case.updated("qkv", dtype, &qkv, Want::Same), case.ints("positions", &positions));
                        let table = case.input("table", Dtype::Float32, &table);
                        case.check(bench, &|dev, at| {
                            let (qkv, positions, table) = (at[qkv], at[positions], at[table]);
                            dev.launch(Rope { qkv, positions, table, rotary_dim, interleaved, inverse, shape })
                        })?;
                    }
                    Ok(0.0)
                });
            }
        }
    }
}

/// Draws inputs.
type Values = fn(&mut Random, Dtype, usize) -> Vec<f32>;

fn swiglu(bench: &mut Bench, dtype: Dtype, rows: usize, cols: usize, gate_up: &mut dyn FnMut() -> Vec<f32>) -> Outcome {
    let mut case = Case::default();
    let x = case.input("gate_up", dtype, &gate_up());
    let out = case.output("out", dtype, rows * cols, Want::Same);
    case.check(bench, &|dev, at| dev.launch(Swiglu { gate_up: at[x], out: at[out], cols }))
}

fn swiglu_backward(bench: &mut Bench, dtype: Dtype, cols: usize, gate_up: &[f32], dout: &[f32]) -> Outcome {
    let mut case = Case::default();
    let (dout, x) = (case.input("dout", dtype, dout), case.input("gate_up", dtype, gate_up));
    let dx = case.output("dgate_up", dtype, gate_up.len(), Want::Same);
    case.check(bench, &|dev, at| dev.launch(SwigluBackward { dout: at[dout], gate_up: at[x], dgate_up: at[dx], cols }))
}

/// Out of place and in place.
fn gelu_backward(bench: &mut Bench, dtype: Dtype, x: &[f32], dout: &[f32]) -> Outcome {
    let mut apart = Case::default();
    let (x_in, dout_in) = (apart.input("x", dtype, x), apart.input("dout", dtype, dout));
    let dx = apart.output("dx", dtype, x.len(), Want::Same);
    apart.check(bench, &|dev, at| dev.launch(GeluBackward { dout: at[dout_in], x: at[x_in], dx: at[dx] }))?;
    let mut in_place = Case::default();
    let (x, dx) = (in_place.input("x", dtype, x), in_place.updated("dx", dtype, dout, Want::Same));
    in_place.check(bench, &|dev, at| dev.launch(GeluBackward { dout: at[dx], x: at[x], dx: at[dx] }))
}

/// With a base, and in place without one.
fn scale_add(bench: &mut Bench, dtype: Dtype, x: &[f32], base: &[f32]) -> Outcome {
    let mut apart = Case::default();
    let (x_in, base, out) = (apart.input("x", dtype, x), apart.input("base", dtype, base), apart.output("out", dtype, x.len(), Want::Same));
    apart.check(bench, &|dev, at| dev.launch(ScaleAdd { x: at[x_in], scale: 0.3, base: Some(at[base]), out: at[out] }))?;
    let mut in_place = Case::default();
    let x = in_place.updated("x", dtype, x, Want::Same);
    in_place.check(bench, &|dev, at| dev.launch(ScaleAdd { x: at[x], scale: 0.3, base: None, out: at[x] }))
}

/// Both passes.
fn sigmoid_gate(bench: &mut Bench, dtype: Dtype, x: &[f32], gate: &[f32], dout: &[f32]) -> Outcome {
    let mut forward = Case::default();
    let (x_in, gate_in) = (forward.input("x", dtype, x), forward.input("gate", dtype, gate));
    let out = forward.output("out", dtype, x.len(), Want::Same);
    forward.check(bench, &|dev, at| dev.launch(SigmoidGate { x: at[x_in], gate: at[gate_in], out: at[out] }))?;
    let mut backward = Case::default();
    let (dout, x) = (backward.input("dout", dtype, dout), backward.input("x", dtype, x));
    let (gate, n) = (backward.input("gate", dtype, gate), gate.len());
    let (dx, dgate) = (backward.output("dx", dtype, n, Want::Same), backward.output("dgate", dtype, n, Want::Same));
    backward
        .check(bench, &|dev, at| dev.launch(SigmoidGateBackward { dout: at[dout], x: at[x], gate: at[gate], dx: at[dx], dgate: at[dgate] }))
}

/// Full and partial rotations, odd heads, the heads of real models.
fn rotations() -> [(AttentionShape, usize); 7] {
    let shape = |batch, seq_length, heads, kv_heads, head_dim| AttentionShape {
        batch,
        seq_length,
        heads,
        kv_heads,
        head_dim,
        scale: 1.0,
        window: None,
        softcap: None,
    };
    [
        (shape(1, 1, 1, 1, 2), 2),
        (shape(2, 35, 4, 2, 10), 10),
        (shape(2, 35, 4, 2, 10), 6),
        (shape(1, 67, 3, 1, 7), 4),
        (shape(2, 33, 32, 8, 128), 128),
        (shape(1, 50, 8, 8, 96), 96),
        (shape(3, 20, 12, 12, 64), 32),
    ]
}
