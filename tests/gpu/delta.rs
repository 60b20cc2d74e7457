//! Gated delta nets: the convolution has the CPU's bits; the norm and the delta rule are near f64. The reference of the delta rule is its
//! recurrence, token by token.

use super::bounds::{Near, Sum, growth};
use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{
    DeltaRule, DeltaRuleBackward, DeltaShape, GatedNorm, GatedNormBackward, ShortConv, ShortConvBackward,
};
use superoffload::internals::dtype::Dtype;

const EPS: f32 = 1e-3;
/// Error of a kernel in fp32, relative to the typical size of its results.
const FP32_ERROR: f64 = 2e-5;
/// Error of results of the delta rule with factors of 16 bits, and of the gradients of decays, which are differences.
const NARROW_ERROR: f64 = 0.06;
const DECAY_ERROR: f64 = 0.2;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in FLOATS {
        for (lengths, channels) in [(&[1][..], 1), (&[3, 1, 2, 60], 7), (&[200], 20), (&[130, 70], 516)] {
            let name = |kernel: &str| format!("{kernel} {dtype} {channels} channels, documents of {lengths:?}");
            suite.case(&name("short_conv"), |bench, random| convolution(bench, random, dtype, (lengths, channels)));
            suite.case(&name("short_conv_backward"), |bench, random| convolution_backward(bench, random, dtype, (lengths, channels)));
        }
        for (rows, cols) in [(1, 1), (70, 33), (300, 128), (9, 64), (20, 260)] {
            let name = |kernel: &str| format!("{kernel} {dtype} {rows}x{cols}");
            suite.case(&name("gated_norm"), |bench, random| norm(bench, random, dtype, (rows, cols)));
            suite.case(&name("gated_norm_backward"), |bench, random| norm_backward(bench, random, dtype, (rows, cols)));
        }
        for (lengths, width, [key_heads, value_heads]) in [
            (&[1][..], 128, [1, 1]),
            (&[64], 64, [1, 2]),
            (&[130], 128, [2, 4]),
            (&[1, 63, 64, 65, 7], 64, [1, 3]),
            (&[70, 60], 16, [2, 2]),
        ] {
            let shape = DeltaShape { batch: 2, seq_length: lengths.iter().sum(), key_heads, value_heads, width };
            let name = |kernel: &str| format!("{kernel} {dtype} {key_heads} to {value_heads} heads of {width}, documents of {lengths:?}");
            suite.case(&name("delta_rule"), |bench, random| rule(bench, random, dtype, (lengths, shape)));
            suite.case(&name("delta_rule_backward"), |bench, random| rule_backward(bench, random, dtype, (lengths, shape)));
        }
    }
}

/// The document of each token of two rows; no operand if there is one document a row.
fn documents(lengths: &[usize]) -> Vec<i32> {
    let starts = lengths.iter().scan(0, |end, length| Some(vec![std::mem::replace(end, *end + length) as i32; *length]));
    starts.flatten().collect::<Vec<_>>().repeat(2)
}

/// Results within `error` times their typical size. Gradients of a decay without a state before it are zero, and the kernel adds rounded
/// terms that cancel.
fn near(values: &[f64], error: f64) -> Vec<Near> {
    let typical = (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt().max(1e-6);
    values.iter().map(|&want| Near { want, error: error * (typical + want.abs()) }).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn convolution(bench: &mut Bench, random: &mut Random, dtype: Dtype, (lengths, channels): (&[usize], usize)) -> Outcome {
    let starts = documents(lengths);
    let (n, seq_length) = (starts.len() * channels, starts.len() / 2);
    let mut case = Case::default();
    let (x, weight) =
        (case.input("x", dtype, &random.uniform(dtype, n)), case.input("weight", dtype, &random.uniform(dtype, 4 * channels)));
    let (of_tokens, out) = (case.ints("documents", &starts), case.output("out", dtype, n, Want::Same));
    let packed = lengths.len() > 1;
    case.check(bench, &|dev, at| {
        let documents = packed.then_some(at[of_tokens]);
        dev.launch(ShortConv { x: at[x], weight: at[weight], documents, out: at[out], seq_length })
    })
}

fn convolution_backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, (lengths, channels): (&[usize], usize)) -> Outcome {
    let starts = documents(lengths);
    let (tokens, seq_length) = (starts.len(), starts.len() / 2);
    let [dout, x] = [(); 2].map(|()| random.uniform(dtype, tokens * channels));
    let weight = random.uniform(dtype, 4 * channels);
    let terms = |channel: usize, tap: usize| {
        let (dout, x, weight, starts) = (&dout, &x, &weight, &starts);
        (0..tokens).filter_map(move |token| {
            let at = |tap: usize| {
                (token % seq_length + tap >= starts[token] as usize + 3).then(|| f64::from(x[(token + tap - 3) * channels + channel]))
            };
            let y: f64 = (0..4).filter_map(|tap| Some(f64::from(weight[channel * 4 + tap]) * at(tap)?)).sum();
            let slope = sigmoid(y) * (1.0 + y * (1.0 - sigmoid(y)));
            Some(f64::from(dout[token * channels + channel]) * slope * at(tap)?)
        })
    };
    let gained: Vec<Near> = (0..4 * channels).map(|i| Sum::of(terms(i / 4, i % 4)).near(growth(tokens) + 24.0)).collect();
    let mut worst = 0.0f64;
    for accumulate in [false, true] {
        let mut case = Case::default();
        let before = random.uniform(dtype, 4 * channels);
        let [dout, x, weight] = [("dout", &dout), ("x", &x), ("weight", &weight)].map(|(name, values)| case.input(name, dtype, values));
        let (of_tokens, dx) = (case.ints("documents", &starts), case.output("dx", dtype, tokens * channels, Want::Same));
        let dweight = case.gradient("dweight", dtype, accumulate.then_some(&before[..]), gained.clone());
        let packed = lengths.len() > 1;
        worst = worst.max(case.check(bench, &|dev, at| {
            let (documents, dx, dweight) = (packed.then_some(at[of_tokens]), at[dx], at[dweight]);
            dev.launch(ShortConvBackward { dout: at[dout], x: at[x], weight: at[weight], documents, dx, dweight, accumulate, seq_length })
        })?);
    }
    Ok(worst)
}

fn norm(bench: &mut Bench, random: &mut Random, dtype: Dtype, (rows, cols): (usize, usize)) -> Outcome {
    let [x, gate] = [(); 2].map(|()| random.uniform(dtype, rows * cols));
    let weight = random.uniform(dtype, cols);
    let [of_x, of_gate, of_weight] = [&x, &gate, &weight].map(|x| wide(x));
    let want = |i: usize| of_x[i] * rstd(&of_x, i / cols, cols) * of_weight[i % cols] * of_gate[i] * sigmoid(of_gate[i]);
    let want: Vec<f64> = (0..rows * cols).map(want).collect();
    let mut case = Case::default();
    let [x, gate, weight] = [("x", &x), ("gate", &gate), ("weight", &weight)].map(|(name, values)| case.input(name, dtype, values));
    let out = case.output("out", dtype, rows * cols, Want::Near(near(&want, FP32_ERROR)));
    case.check(bench, &|dev, at| dev.launch(GatedNorm { x: at[x], gate: at[gate], weight: at[weight], eps: EPS, out: at[out] }))
}

fn rstd(x: &[f64], row: usize, cols: usize) -> f64 {
    let mean = x[row * cols..][..cols].iter().map(|x| x * x).sum::<f64>() / cols as f64;
    1.0 / (mean + f64::from(EPS)).sqrt()
}

fn norm_backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, (rows, cols): (usize, usize)) -> Outcome {
    let [dout, x, gate] = [(); 3].map(|()| random.uniform(dtype, rows * cols));
    let weight = random.uniform(dtype, cols);
    let [d, of_x, g, w] = [&dout, &x, &gate, &weight].map(|x| wide(x));
    let (mut dx, mut dgate, mut dweight) = (vec![0.0; rows * cols], vec![0.0; rows * cols], vec![0.0; cols]);
    for row in 0..rows {
        let (rstd, at) = (rstd(&of_x, row, cols), row * cols..(row + 1) * cols);
        let silu = |i: usize| g[i] * sigmoid(g[i]);
        let mean = at.clone().map(|i| d[i] * silu(i) * w[i % cols] * of_x[i] * rstd).sum::<f64>() / cols as f64;
        for i in at {
            dx[i] = rstd * (d[i] * silu(i) * w[i % cols] - of_x[i] * rstd * mean);
            dgate[i] = d[i] * w[i % cols] * of_x[i] * rstd * sigmoid(g[i]) * (1.0 + g[i] * (1.0 - sigmoid(g[i])));
            dweight[i % cols] += d[i] * silu(i) * of_x[i] * rstd;
        }
    }
    let mut worst = 0.0f64;
    for accumulate in [false, true] {
        let (mut case, before) = (Case::default(), random.uniform(dtype, cols));
        let [dout, x, gate, weight] =
            [("dout", &dout), ("x", &x), ("gate", &gate), ("weight", &weight)].map(|(name, values)| case.input(name, dtype, values));
        let [dx, dgate] =
            [("dx", &dx), ("dgate", &dgate)].map(|(name, want)| case.output(name, dtype, rows * cols, Want::Near(near(want, FP32_ERROR))));
        let dweight = case.gradient("dweight", dtype, accumulate.then_some(&before[..]), near(&dweight, FP32_ERROR));
        worst = worst.max(case.check(bench, &|dev, at| {
            let (dout, x, gate, weight, dx, dgate, dweight) = (at[dout], at[x], at[gate], at[weight], at[dx], at[dgate], at[dweight]);
            dev.launch(GatedNormBackward { dout, x, gate, weight, eps: EPS, dx, dgate, dweight, accumulate })
        })?);
    }
    Ok(worst)
}

/// Inputs of the delta rule in the order of its operands: `qkv`, `a`, `b`, `a_log`, `dt_bias`.
fn inputs(random: &mut Random, dtype: Dtype, shape: &DeltaShape) -> [Vec<f32>; 5] {
    let (tokens, heads) = (shape.tokens(), shape.value_heads);
    let mut inputs = [tokens * shape.qkv_cols(), tokens * heads, tokens * heads, heads, heads].map(|elems| random.uniform(dtype, elems));
    // Slow and fast decays.
    inputs[3].iter_mut().enumerate().for_each(|(head, x)| *x = [-8.0, 0.5, -1.0, 3.0][head % 4]);
    inputs
}

const NAMES: [&str; 5] = ["qkv", "a", "b", "a_log", "dt_bias"];

fn rule(bench: &mut Bench, random: &mut Random, dtype: Dtype, (lengths, shape): (&[usize], DeltaShape)) -> Outcome {
    let (starts, inputs) = (documents(lengths), inputs(random, dtype, &shape));
    let want = Recurrence::new(&shape, &starts, &inputs).out;
    let mut case = Case::default();
    let handles: [_; 5] = std::array::from_fn(|i| case.input(NAMES[i], dtype, &inputs[i]));
    let of_tokens = case.ints("documents", &starts);
    let error = if dtype == Dtype::Float32 { FP32_ERROR } else { NARROW_ERROR };
    let out = case.output("out", dtype, want.len(), Want::Near(near(&want, error)));
    // GPUs have kernels for some widths and formats.
    case.optional(shape.width < 64 || dtype == Dtype::Float32);
    case.aligned();
    let packed = lengths.len() > 1;
    case.check(bench, &|dev, at| {
        let ([qkv, a, b, a_log, dt_bias], documents) = (handles.map(|handle| at[handle]), packed.then_some(at[of_tokens]));
        dev.launch(DeltaRule { qkv, a, b, a_log, dt_bias, documents, out: at[out], shape })
    })
}

fn rule_backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, (lengths, shape): (&[usize], DeltaShape)) -> Outcome {
    let (starts, inputs) = (documents(lengths), inputs(random, dtype, &shape));
    let dout = random.uniform(dtype, shape.tokens() * shape.out_cols());
    let want = Recurrence::new(&shape, &starts, &inputs).gradients(&wide(&dout));
    let errors = if dtype == Dtype::Float32 { [FP32_ERROR, 50.0 * FP32_ERROR] } else { [NARROW_ERROR, DECAY_ERROR] };
    let mut worst = 0.0f64;
    for accumulate in [false, true] {
        let mut case = Case::default();
        let before = random.uniform(dtype, shape.value_heads);
        let handles: [_; 5] = std::array::from_fn(|i| case.input(NAMES[i], dtype, &inputs[i]));
        let (dout, of_tokens) = (case.input("dout", dtype, &dout), case.ints("documents", &starts));
        let results: [_; 5] = std::array::from_fn(|i| {
            let error = errors[usize::from([1, 3, 4].contains(&i))];
            let before = (accumulate && i > 2).then_some(&before[..]);
            case.gradient(["dqkv", "da", "db", "da_log", "ddt_bias"][i], dtype, before, near(&want[i], error))
        });
        case.optional(shape.width < 64 || dtype == Dtype::Float32);
        case.aligned();
        let packed = lengths.len() > 1;
        worst = worst.max(case.check(bench, &|dev, at| {
            let ([qkv, a, b, a_log, dt_bias], documents) = (handles.map(|handle| at[handle]), packed.then_some(at[of_tokens]));
            let [dqkv, da, db, da_log, ddt_bias] = results.map(|handle| at[handle]);
            let dout = at[dout];
            let inputs =
                DeltaRuleBackward { dout, qkv, a, b, a_log, dt_bias, documents, dqkv, da, db, da_log, ddt_bias, accumulate, shape };
            dev.launch(inputs)
        })?);
    }
    Ok(worst)
}

/// The delta rule token by token, with its states.
struct Recurrence<'a> {
    shape: &'a DeltaShape,
    starts: &'a [i32],
    inputs: [Vec<f64>; 5],
    out: Vec<f64>,
    /// States after each token, by head.
    states: Vec<Vec<f64>>,
}

/// One token of one head: unit vectors with their lengths, gates and indices.
struct Step {
    q: Vec<f64>,
    k: Vec<f64>,
    lengths: [f64; 2],
    v: Vec<f64>,
    /// Index of a gate, and first elements of query, key and value.
    gate: usize,
    at: [usize; 3],
    al: f64,
    beta: f64,
    is_first: bool,
}

impl<'a> Recurrence<'a> {
    fn new(shape: &'a DeltaShape, starts: &'a [i32], inputs: &[Vec<f32>; 5]) -> Self {
        let inputs = inputs.each_ref().map(|x| wide(x));
        let mut all = Self { shape, starts, inputs, out: vec![0.0; shape.tokens() * shape.out_cols()], states: Vec::new() };
        let d = shape.width;
        for head in 0..shape.value_heads {
            let (mut state, mut states) = (vec![0.0; d * d], Vec::new());
            for token in 0..shape.tokens() {
                let step = all.step(token, head);
                let new = all.correct(&step, &mut state);
                (0..d * d).for_each(|i| state[i] += step.k[i / d] * step.beta * new[i % d]);
                let out = &mut all.out[step.gate * d..][..d];
                (0..d * d).for_each(|i| out[i % d] += state[i] * step.q[i / d] / (d as f64).sqrt());
                states.extend_from_slice(&state);
            }
            all.states.push(states);
        }
        all
    }

    fn step(&self, token: usize, head: usize) -> Step {
        let DeltaShape { seq_length, key_heads, value_heads, width: d, .. } = *self.shape;
        let [qkv, a, b, a_log, dt_bias] = &self.inputs;
        let (row, key, gate) = (token * self.shape.qkv_cols(), head / (value_heads / key_heads), token * value_heads + head);
        let at = [key, key_heads + key, 2 * key_heads + head].map(|head| row + head * d);
        let lengths = [at[0], at[1]].map(|at| (qkv[at..at + d].iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt());
        let unit = |which: usize| qkv[at[which]..at[which] + d].iter().map(|x| x / lengths[which]).collect();
        let al = -a_log[head].exp() * (a[gate] + dt_bias[head]).exp().ln_1p();
        let is_first = token % seq_length == self.starts[token] as usize;
        Step { q: unit(0), k: unit(1), lengths, v: qkv[at[2]..at[2] + d].to_vec(), gate, at, al, beta: sigmoid(b[gate]), is_first }
    }

    /// Decays the state, and returns the difference of the value from what the state holds for the key.
    fn correct(&self, step: &Step, state: &mut [f64]) -> Vec<f64> {
        let (d, decay) = (self.shape.width, if step.is_first { 0.0 } else { step.al.exp() });
        state.iter_mut().for_each(|x| *x *= decay);
        (0..d).map(|c| step.v[c] - (0..d).map(|i| state[i * d + c] * step.k[i]).sum::<f64>()).collect()
    }

    fn gradients(&self, dout: &[f64]) -> [Vec<f64>; 5] {
        let d = self.shape.width;
        let mut results = self.inputs.each_ref().map(|x| vec![0.0; x.len()]);
        for head in 0..self.shape.value_heads {
            let mut dstate = vec![0.0; d * d];
            for token in (0..self.shape.tokens()).rev() {
                self.step_back(token, head, dout, &mut dstate, &mut results);
            }
        }
        results
    }

    fn step_back(&self, token: usize, head: usize, dout: &[f64], dstate: &mut [f64], results: &mut [Vec<f64>; 5]) {
        let (d, step) = (self.shape.width, self.step(token, head));
        let state = &self.states[head][token * d * d..][..d * d];
        let mut before = if token == 0 { vec![0.0; d * d] } else { self.states[head][(token - 1) * d * d..][..d * d].to_vec() };
        let new = self.correct(&step, &mut before);
        let dout = &dout[step.gate * d..][..d];
        let scale = 1.0 / (d as f64).sqrt();
        (0..d * d).for_each(|i| dstate[i] += scale * step.q[i / d] * dout[i % d]);
        let dq: Vec<f64> = (0..d).map(|i| scale * (0..d).map(|c| state[i * d + c] * dout[c]).sum::<f64>()).collect();
        let dnew: Vec<f64> = (0..d).map(|c| (0..d).map(|i| dstate[i * d + c] * step.k[i]).sum::<f64>()).collect();
        let dk: Vec<f64> =
            (0..d).map(|i| (0..d).map(|c| step.beta * (dstate[i * d + c] * new[c] - before[i * d + c] * dnew[c])).sum::<f64>()).collect();
        (0..d * d).for_each(|i| dstate[i] -= step.beta * step.k[i / d] * dnew[i % d]);
        let dal: f64 = dstate.iter().zip(&before).map(|(x, y)| x * y).sum();
        let decay = if step.is_first { 0.0 } else { step.al.exp() };
        dstate.iter_mut().for_each(|x| *x *= decay);
        let [dqkv, da, db, da_log, ddt_bias] = results;
        for (gradient, unit, which) in [(dq, &step.q, 0), (dk, &step.k, 1)] {
            let along: f64 = gradient.iter().zip(unit).map(|(x, y)| x * y).sum();
            (0..d).for_each(|i| dqkv[step.at[which] + i] += (gradient[i] - along * unit[i]) / step.lengths[which]);
        }
        (0..d).for_each(|c| dqkv[step.at[2] + c] = step.beta * dnew[c]);
        db[step.gate] = step.beta * (1.0 - step.beta) * dnew.iter().zip(&new).map(|(x, y)| x * y).sum::<f64>();
        let [_, a, _, a_log, dt_bias] = &self.inputs;
        da[step.gate] = -a_log[head].exp() * sigmoid(a[step.gate] + dt_bias[head]) * dal;
        ddt_bias[head] += da[step.gate];
        da_log[head] += step.al * dal;
    }
}
