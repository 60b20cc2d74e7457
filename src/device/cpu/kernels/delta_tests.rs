//! The gated delta rule against its recurrence in f64, which knows no chunks.

use super::Compute;
use super::delta::delta_rule;
use super::delta_backward::{DeltaGradients, delta_rule_backward};
use super::delta_inputs::DeltaInputs;
use super::testing::{assert_close, assert_same_everywhere, bits, dot, fastest, slopes, values, wide};
use crate::device::{DeltaShape, UNIT_EPS};
use crate::dtype::Element;
use half::bf16;

/// Two value heads for each key head.
const SHAPE: DeltaShape = DeltaShape { batch: 1, seq_length: 1, key_heads: 2, value_heads: 4, width: 6 };

/// `qkv`, `a`, `b`, `a_log`, `dt_bias` and the documents of each token.
#[derive(Clone)]
struct Inputs<T> {
    shape: DeltaShape,
    floats: [Vec<T>; 5],
    documents: Option<Vec<i32>>,
}

/// Gates between open and closed, and decays between slow and fast.
fn inputs<T: Element>(batch: usize, lengths: &[usize]) -> Inputs<T> {
    let shape = DeltaShape { batch, seq_length: lengths.iter().sum(), ..SHAPE };
    let (tokens, heads) = (shape.tokens(), shape.value_heads);
    let sizes = [tokens * shape.qkv_cols(), tokens * heads, tokens * heads, heads, heads];
    let mut floats: [Vec<T>; 5] = std::array::from_fn(|i| values(i as u64 + 1, sizes[i]));
    floats[3] = [-8.0, -1.0, 0.5, 3.0].map(T::from_f32).to_vec();
    let starts = lengths.iter().scan(0, |end, length| Some(vec![std::mem::replace(end, *end + length) as i32; *length]));
    let starts: Vec<i32> = starts.flatten().collect();
    Inputs { shape, floats, documents: (lengths.len() > 1).then(|| starts.repeat(batch)) }
}

impl<T: Element> Inputs<T> {
    fn input(&self) -> DeltaInputs<'_, T> {
        let [qkv, a, b, a_log, dt_bias] = self.floats.each_ref().map(|x| &x[..]);
        DeltaInputs { shape: self.shape, qkv, a, b, a_log, dt_bias, documents: self.documents.as_deref() }
    }

    fn forward(&self, cx: &mut Compute) -> Vec<T> {
        let mut out = vec![T::from_f32(9.0); self.shape.tokens() * self.shape.out_cols()];
        delta_rule(cx, self.input(), &mut out);
        out
    }

    fn dout(&self) -> Vec<T> {
        values(9, self.shape.tokens() * self.shape.out_cols())
    }

    /// Gradients in the order of the inputs.
    fn backward(&self, cx: &mut Compute, accumulate: bool) -> [Vec<T>; 5] {
        let mut gradients = self.floats.each_ref().map(|x| vec![T::from_f32(2.0); x.len()]);
        let [dqkv, da, db, da_log, ddt_bias] = &mut gradients;
        delta_rule_backward(cx, self.input(), &self.dout(), DeltaGradients { dqkv, da, db, da_log, ddt_bias, accumulate });
        gradients
    }

    fn wide(&self) -> [Vec<f64>; 5] {
        self.floats.each_ref().map(|x| wide(x))
    }
}

/// The recurrence, token by token.
fn reference(shape: &DeltaShape, documents: Option<&[i32]>, [qkv, a, b, a_log, dt_bias]: &[Vec<f64>; 5]) -> Vec<f64> {
    let DeltaShape { seq_length, key_heads, value_heads, width: d, .. } = *shape;
    let unit = |x: &[f64]| {
        let length = (x.iter().map(|x| x * x).sum::<f64>() + f64::from(UNIT_EPS)).sqrt();
        x.iter().map(|x| x / length).collect::<Vec<_>>()
    };
    let mut out = vec![0.0; shape.tokens() * shape.out_cols()];
    for head in 0..value_heads {
        let mut state = vec![0.0; d * d];
        for token in 0..shape.tokens() {
            if token % seq_length == documents.map_or(0, |documents| documents[token] as usize) {
                state.fill(0.0);
            }
            let row = |head: usize| &qkv[token * shape.qkv_cols() + head * d..][..d];
            let key = head / (value_heads / key_heads);
            let (q, k, v) = (unit(row(key)), unit(row(key_heads + key)), row(2 * key_heads + head));
            let at = token * value_heads + head;
            let decay = (-a_log[head].exp() * (a[at] + dt_bias[head]).exp().ln_1p()).exp();
            let beta = 1.0 / (1.0 + (-b[at]).exp());
            state.iter_mut().for_each(|x| *x *= decay);
            let correct = |c: usize, state: &[f64]| beta * (v[c] - (0..d).map(|i| state[i * d + c] * k[i]).sum::<f64>());
            let new: Vec<f64> = (0..d).map(|c| correct(c, &state)).collect();
            (0..d * d).for_each(|i| state[i] += k[i / d] * new[i % d]);
            for c in 0..d {
                out[at * d + c] = (0..d).map(|i| state[i * d + c] * q[i]).sum::<f64>() / (d as f64).sqrt();
            }
        }
    }
    out
}

fn assert_forward(name: &str, inputs: &Inputs<f32>) {
    let want = reference(&inputs.shape, inputs.documents.as_deref(), &inputs.wide());
    assert_close(name, &inputs.forward(&mut fastest()), &want, 2e-6);
}

/// Compares some elements of each gradient, and each gradient along a direction, with slopes of the recurrence.
fn assert_backward(name: &str, inputs: &Inputs<f32>) {
    let (gradients, dout, all) = (inputs.backward(&mut fastest(), false), wide(&inputs.dout()), inputs.wide());
    for (which, gradient) in gradients.iter().enumerate() {
        // These gradients are sums over all tokens of differences, times a rate of up to 20.
        let loose = if which >= 3 { 20.0 } else { 1.0 };
        let value = |moved: Vec<f64>| {
            let mut all = all.clone();
            all[which] = moved;
            dot(&reference(&inputs.shape, inputs.documents.as_deref(), &all), &dout)
        };
        let n = gradient.len();
        for at in [0, n / 3, n / 2, n - 1] {
            let moved = |x: &[f64]| [&all[which][..at], x, &all[which][at + 1..]].concat();
            let want = slopes(&all[which][at..=at], |x| value(moved(x)));
            assert_close(&format!("{name}: gradient {which}, element {at}"), &gradient[at..=at], &want, 2e-5 * loose);
        }
        let direction = wide(&values::<f32>(77, n));
        let along = |x: &[f64]| all[which].iter().zip(&direction).map(|(at, direction)| at + x[0] * direction).collect();
        let want = slopes(&[0.0], |x| value(along(x)));
        let length = direction.iter().map(|x| x.abs()).sum::<f64>();
        let error = (dot(&wide(gradient), &direction) - want[0]).abs();
        assert!(error < 3e-6 * loose * (1.0 + length), "{name}: gradient {which} along a direction: off by {error}");
    }
}

#[test]
fn chunks_agree_with_the_recurrence_for_documents_of_any_length() {
    for length in [1, 63, 64, 65, 130] {
        let inputs = inputs(2, &[length]);
        assert_forward(&format!("{length} tokens"), &inputs);
        assert_backward(&format!("{length} tokens"), &inputs);
    }
    let packed = inputs(2, &[1, 70, 64, 130, 3]);
    assert_forward("five documents", &packed);
    assert_backward("five documents", &packed);
}

#[test]
fn gates_that_are_open_or_closed_agree_with_the_recurrence() {
    for b in [-30.0, 30.0] {
        let mut inputs = inputs(1, &[130]);
        inputs.floats[2].iter_mut().for_each(|x| *x += b);
        assert_forward(&format!("b about {b}"), &inputs);
        assert_backward(&format!("b about {b}"), &inputs);
    }
}

#[test]
fn equal_keys_agree_with_the_recurrence() {
    let mut inputs = inputs(1, &[130]);
    let (cols, keys) = (inputs.shape.qkv_cols(), 2 * 6..4 * 6);
    let first = inputs.floats[0][keys.clone()].to_vec();
    inputs.floats[0].chunks_exact_mut(cols).for_each(|row| row[keys.clone()].copy_from_slice(&first));
    assert_forward("equal keys", &inputs);
    assert_backward("equal keys", &inputs);
}

#[test]
fn a_document_has_the_same_bits_among_others_and_alone() {
    let lengths = [5, 130, 64];
    let packed = inputs::<bf16>(1, &lengths);
    let alone = |first: usize, length: usize| {
        let mut alone = packed.clone();
        alone.documents = None;
        alone.shape.seq_length = length;
        for x in &mut alone.floats[..3] {
            let cols = x.len() / packed.shape.tokens();
            *x = x[first * cols..(first + length) * cols].to_vec();
        }
        alone
    };
    let part = |x: &[bf16], first: usize, length: usize| {
        let cols = x.len() / packed.shape.tokens();
        bits(&x[first * cols..(first + length) * cols])
    };
    let (out, gradients) = (packed.forward(&mut fastest()), packed.backward(&mut fastest(), false));
    let mut first = 0;
    for length in lengths {
        let alone = alone(first, length);
        assert!(bits(&alone.forward(&mut fastest())) == part(&out, first, length), "output of {length} tokens");
        let mut dout = values::<bf16>(9, packed.shape.tokens() * packed.shape.out_cols());
        dout = dout[first * packed.shape.out_cols()..][..length * packed.shape.out_cols()].to_vec();
        let mut own = alone.floats.each_ref().map(|x| vec![bf16::ZERO; x.len()]);
        let [dqkv, da, db, da_log, ddt_bias] = &mut own;
        let results = DeltaGradients { dqkv, da, db, da_log, ddt_bias, accumulate: false };
        delta_rule_backward(&mut fastest(), alone.input(), &dout, results);
        for which in 0..3 {
            assert!(bits(&own[which]) == part(&gradients[which], first, length), "gradient {which} of {length} tokens");
        }
        first += length;
    }
}

#[test]
fn gradients_of_weights_accumulate() {
    let inputs = inputs::<f32>(2, &[40, 30]);
    let [once, added] = [false, true].map(|accumulate| inputs.backward(&mut fastest(), accumulate));
    for which in 0..5 {
        let added_to = if which < 3 { 0.0 } else { 2.0 };
        let want: Vec<f64> = once[which].iter().map(|x| f64::from(*x) + added_to).collect();
        assert_close(&format!("gradient {which}"), &added[which], &want, 1e-7);
    }
}

#[test]
fn threads_and_instruction_sets_change_no_bit() {
    assert_same_everywhere(|cx| bits(&inputs::<f32>(2, &[70, 5, 66]).forward(cx)));
    assert_same_everywhere(|cx| inputs::<bf16>(2, &[70, 5, 66]).backward(cx, true).map(|gradient| bits(&gradient)).concat());
}
