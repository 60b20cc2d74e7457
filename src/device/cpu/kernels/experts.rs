//! Activations, biases and gradients between the two matrix products of experts.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::math::sigmoid;
use super::pointwise::{add_elems, gelu_of, gelu_slope};
use super::reduce::fold2;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK, SUM_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{ClampedSwiglu, ExpertActivation, ExpertBackward, ExpertBias, ExpertBiasDot, ScaleChoices, ScaleChoicesBackward};
use crate::dtype::Element;

/// Elements of one block.
const BLOCK_ELEMS: usize = 16384;

impl CpuArithmetic for ClampedSwiglu {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        clamped_swiglu::<T>(cx, memory.read(self.gate_up), memory.write(self.out), (self.alpha, self.limit));
    }
}

/// See [`ClampedSwiglu`].
pub(crate) fn clamped_swiglu<T: Element>(cx: &mut Compute, gate_up: &[T], out: &mut [T], (alpha, limit): (f32, f32)) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(out, BLOCK_ELEMS), |block, out| {
        clamped_elems(isa, &gate_up[2 * block * BLOCK_ELEMS..], alpha, limit, out);
    });
}

vectorised! {
    fn clamped_elems<T>(gate_up: &[T], alpha: f32, limit: f32, out: &mut [T]) {
        for (out, [gate, up]) in out.iter_mut().zip(gate_up.as_chunks::<2>().0) {
            *out = T::from_f32(clamped(gate.to_f32(), up.to_f32(), alpha, limit).out);
        }
    }
}

/// Output of an activation, and its derivatives.
struct Glu {
    out: f32,
    by_gate: f32,
    by_up: f32,
}

#[inline(always)]
fn swiglu(gate: f32, up: f32) -> Glu {
    let s = sigmoid(gate);
    let silu = gate * s;
    Glu { out: silu * up, by_gate: up * (s * gate.mul_add(1.0 - s, 1.0)), by_up: silu }
}

#[inline(always)]
fn geglu(gate: f32, up: f32) -> Glu {
    let glu = gelu_of(gate);
    Glu { out: glu * up, by_gate: up * gelu_slope(gate), by_up: glu }
}

/// At exactly the limit the slope is that of the inside.
#[inline(always)]
fn clamped(gate: f32, up: f32, alpha: f32, limit: f32) -> Glu {
    let g = if gate > limit { limit } else { gate };
    let u = if up > limit { limit } else { up };
    let u = if u < -limit { -limit } else { u };
    let s = sigmoid(alpha * g);
    let (glu, u) = (g * s, u + 1.0);
    let by_gate = if gate > limit { 0.0 } else { u * (s * (alpha * g).mul_add(1.0 - s, 1.0)) };
    let by_up = if up > limit || up < -limit { 0.0 } else { glu };
    Glu { out: u * glu, by_gate, by_up }
}

impl CpuArithmetic for ExpertBias {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let rows = RowExperts { experts: memory.read(self.experts), entries: memory.read(self.entries) };
        expert_bias::<T>(cx, memory.read(self.bias), rows, memory.write(self.x), self.cols);
    }
}

/// Expert of each row.
#[derive(Clone, Copy)]
pub(crate) struct RowExperts<'a> {
    /// Experts by index of the routing choice.
    pub(crate) experts: &'a [i32],
    /// Index of the routing choice of each row.
    pub(crate) entries: &'a [i32],
}

impl RowExperts<'_> {
    /// The row of `table` that belongs to the expert of `row`; the table has `cols` columns.
    fn of<'t, T>(&self, row: usize, table: &'t [T], cols: usize) -> &'t [T] {
        &table[self.experts[self.entries[row] as usize] as usize * cols..][..cols]
    }
}

/// See [`ExpertBias`].
pub(crate) fn expert_bias<T: Element>(cx: &mut Compute, bias: &[T], rows: RowExperts<'_>, x: &mut [T], cols: usize) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(x, cols), |row, x| add_elems(isa, rows.of(row, bias, cols), x));
}

impl CpuArithmetic for ExpertBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let (weights, entries) = (memory.read::<f32>(self.weights), memory.read::<i32>(self.entries));
        let out = Gradients {
            dgate_up: memory.write::<T>(self.dgate_up),
            weighted: memory.write(self.weighted),
            dweights: memory.write(self.dweights),
        };
        let weight = |row: usize| weights[entries[row] as usize];
        expert_backward(cx, self.activation, (memory.read(self.da), memory.read(self.gate_up)), weight, out);
    }
}

/// Outputs of [`ExpertBackward`].
pub(crate) struct Gradients<'a, T> {
    pub(crate) dgate_up: &'a mut [T],
    pub(crate) weighted: &'a mut [T],
    pub(crate) dweights: &'a mut [f32],
}

/// See [`ExpertBackward`].
pub(crate) fn expert_backward<T: Element>(
    cx: &mut Compute,
    activation: ExpertActivation,
    (da, gate_up): (&[T], &[T]),
    weight: impl Fn(usize) -> f32 + Sync,
    out: Gradients<'_, T>,
) {
    let (isa, cols) = (cx.isa, out.weighted.len() / out.dweights.len().max(1));
    let rows = Chunks::new(out.dweights, ROW_BLOCK);
    let parts = ((Chunks::new(out.dgate_up, 2 * ROW_BLOCK * cols), Chunks::new(out.weighted, ROW_BLOCK * cols)), rows);
    cx.team.for_each(parts, |block, ((dgate_up, weighted), dweights)| {
        let first = block * ROW_BLOCK;
        let da = da[first * cols..].chunks_exact(cols).zip(gate_up[2 * first * cols..].chunks_exact(2 * cols));
        let out = dgate_up.chunks_exact_mut(2 * cols).zip(weighted.chunks_exact_mut(cols)).zip(dweights);
        for (row, ((da, gate_up), ((dgate_up, weighted), dweight))) in da.zip(out).enumerate() {
            let weight = weight(first + row);
            *dweight = match activation {
                ExpertActivation::Swiglu => swiglu_row(isa, da, gate_up, weight, dgate_up, weighted),
                ExpertActivation::Geglu => geglu_row(isa, da, gate_up, weight, dgate_up, weighted),
                ExpertActivation::Clamped { alpha, limit } => clamped_row(isa, da, gate_up, alpha, limit, weight, dgate_up, weighted),
            };
        }
    });
}

/// Partial sums of one row: see [`super::reduce`].
const LANES: usize = 16;

/// Stores the gradients of one element and adds its term to a partial sum of the row weight's gradient.
macro_rules! element {
    ($lanes:ident, $i:ident, $weight:ident, $da:expr, $glu:expr, $dgate:expr, $dup:expr, $weighted:expr) => {
        let (da, glu) = ($da.to_f32(), $glu);
        let weighted_da = $weight * da;
        $dgate = T::from_f32(weighted_da * glu.by_gate);
        $dup = T::from_f32(weighted_da * glu.by_up);
        $weighted = T::from_f32($weight * glu.out);
        $lanes[$i % LANES] = da.mul_add(glu.out, $lanes[$i % LANES]);
    };
}

vectorised! {
    fn swiglu_row<T>(da: &[T], gate_up: &[T], weight: f32, dgate_up: &mut [T], weighted: &mut [T]) -> f32 {
        let ((gate, up), (dgate, dup)) = (gate_up.split_at(da.len()), dgate_up.split_at_mut(da.len()));
        let mut lanes = [0.0f32; LANES];
        for i in 0..da.len() {
            element!(lanes, i, weight, da[i], swiglu(gate[i].to_f32(), up[i].to_f32()), dgate[i], dup[i], weighted[i]);
        }
        fold2(&lanes, &lanes, |sum, lane, _| sum + lane)
    }
}

vectorised! {
    fn geglu_row<T>(da: &[T], gate_up: &[T], weight: f32, dgate_up: &mut [T], weighted: &mut [T]) -> f32 {
        let ((gate, up), (dgate, dup)) = (gate_up.split_at(da.len()), dgate_up.split_at_mut(da.len()));
        let mut lanes = [0.0f32; LANES];
        for i in 0..da.len() {
            element!(lanes, i, weight, da[i], geglu(gate[i].to_f32(), up[i].to_f32()), dgate[i], dup[i], weighted[i]);
        }
        fold2(&lanes, &lanes, |sum, lane, _| sum + lane)
    }
}

vectorised! {
    fn clamped_row<T>(
        da: &[T], gate_up: &[T], alpha: f32, limit: f32, weight: f32, dgate_up: &mut [T], weighted: &mut [T],
    ) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for i in 0..da.len() {
            let glu = clamped(gate_up[2 * i].to_f32(), gate_up[2 * i + 1].to_f32(), alpha, limit);
            element!(lanes, i, weight, da[i], glu, dgate_up[2 * i], dgate_up[2 * i + 1], weighted[i]);
        }
        fold2(&lanes, &lanes, |sum, lane, _| sum + lane)
    }
}

impl CpuArithmetic for ExpertBiasDot {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let rows = RowExperts { experts: memory.read(self.experts), entries: memory.read(self.entries) };
        expert_bias_dot::<T>(cx, memory.read(self.dout), memory.read(self.bias), rows, memory.write(self.dweights));
    }
}

/// See [`ExpertBiasDot`].
pub(crate) fn expert_bias_dot<T: Element>(cx: &mut Compute, dout: &[T], bias: &[T], rows: RowExperts<'_>, dweights: &mut [f32]) {
    let (isa, cols) = (cx.isa, dout.len() / dweights.len().max(1));
    cx.team.for_each(Chunks::new(dweights, ROW_BLOCK), |block, dweights| {
        for (row, dweight) in (block * ROW_BLOCK..).zip(dweights) {
            *dweight += dot(isa, &dout[row * cols..][..cols], rows.of(row, bias, cols));
        }
    });
}

vectorised! {
    fn dot<T>(a: &[T], b: &[T]) -> f32 {
        fold2(a, b, |sum, a, b| a.mul_add(b, sum))
    }
}

impl CpuArithmetic for ScaleChoices {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        scale_choices::<T>(cx, memory.read(self.weights), memory.read(self.experts), memory.read(self.scale), memory.write(self.out));
    }
}

/// See [`ScaleChoices`].
pub(crate) fn scale_choices<T: Element>(cx: &mut Compute, weights: &[f32], experts: &[i32], scale: &[T], out: &mut [f32]) {
    cx.team.for_each(Chunks::new(out, BLOCK_ELEMS), |block, out| {
        let first = block * BLOCK_ELEMS;
        let choices = weights[first..].iter().zip(&experts[first..]);
        out.iter_mut().zip(choices).for_each(|(out, (weight, expert))| *out = weight * scale[*expert as usize].to_f32());
    });
}

impl CpuArithmetic for ScaleChoicesBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let choices = (memory.read(self.weights), memory.read(self.entries), memory.read(self.bounds));
        let out = (memory.write(self.dweights), memory.write(self.dscale));
        scale_choices_backward::<T>(cx, choices, memory.read(self.scale), out, self.accumulate);
    }
}

/// See [`ScaleChoicesBackward`]: sums over blocks of [`SUM_BLOCK`] rows.
pub(crate) fn scale_choices_backward<T: Element>(
    cx: &mut Compute,
    (weights, entries, bounds): (&[f32], &[i32], &[i32]),
    scale: &[T],
    (dweights, dscale): (&mut [f32], &mut [T]),
    accumulate: bool,
) {
    let before = &*dweights;
    cx.team.for_each(Chunks::new(dscale, 1), |expert, dscale| {
        let (start, end) = (bounds[expert] as usize, bounds[expert + 1] as usize);
        let add = |sum: f32, row: usize| weights[entries[row] as usize].mul_add(before[row], sum);
        let blocks = (start..end).step_by(SUM_BLOCK).map(|first| (first..end.min(first + SUM_BLOCK)).fold(0.0f32, add));
        let sum = blocks.fold(0.0f32, |sum, block| sum + block);
        dscale[0] = T::from_f32(if accumulate { sum + dscale[0].to_f32() } else { sum });
    });
    cx.team.for_each(Chunks::new(dweights, BLOCK_ELEMS), |block, dweights| {
        for (row, dweight) in (block * BLOCK_ELEMS..).zip(dweights) {
            let expert = bounds.partition_point(|start| *start as usize <= row) - 1;
            *dweight *= scale[expert].to_f32();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, fastest, slopes, values, wide, widened};
    use super::*;
    use ExpertActivation::{Clamped, Geglu, Swiglu};
    use half::bf16;

    const ROWS: usize = 70;
    const COLS: usize = 21;
    /// Half of the inputs, which lie in -6..6, exceed the limit.
    const ACTIVATIONS: [ExpertActivation; 3] = [Swiglu, Clamped { alpha: 1.702, limit: 3.0 }, Geglu];

    fn inputs<T: Element>(seed: u64, elems: usize) -> Vec<T> {
        values(seed, elems).iter().map(|x: &f32| T::from_f32(6.0 * x)).collect()
    }

    /// The activation of one row in f64.
    fn reference(activation: ExpertActivation, x: &[f64]) -> Vec<f64> {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let of = |c: usize| match activation {
            Swiglu => x[c] * sigmoid(x[c]) * x[COLS + c],
            Geglu => x[c] * sigmoid(2.0 * 0.797_884_560_8 * (x[c] + 0.044_715 * x[c].powi(3))) * x[COLS + c],
            Clamped { alpha, limit } => {
                let (alpha, limit) = (f64::from(alpha), f64::from(limit));
                let (gate, up) = (x[2 * c].min(limit), x[2 * c + 1].clamp(-limit, limit));
                (up + 1.0) * gate * sigmoid(alpha * gate)
            }
        };
        (0..COLS).map(of).collect()
    }

    fn backward<T: Element>(cx: &mut Compute, activation: ExpertActivation, x: &[T], da: &[T]) -> (Vec<T>, Vec<T>, Vec<f32>) {
        let (mut dgate_up, mut weighted, mut dweights) = (x.to_vec(), da.to_vec(), vec![f32::NAN; ROWS]);
        let weights = values::<f32>(9, ROWS);
        let out = Gradients { dgate_up: &mut dgate_up, weighted: &mut weighted, dweights: &mut dweights };
        expert_backward(cx, activation, (da, x), |row| weights[ROWS - 1 - row], out);
        (dgate_up, weighted, dweights)
    }

    #[test]
    fn activations_and_their_gradients_agree_with_f64() {
        let (x, da, weights) = (inputs::<f32>(1, 2 * ROWS * COLS), inputs::<f32>(2, ROWS * COLS), wide(&values::<f32>(9, ROWS)));
        for activation in ACTIVATIONS {
            let (dx, weighted, dweights) = backward(&mut fastest(), activation, &x, &da);
            for row in 0..ROWS {
                let (x, da, w) = (wide(&x[2 * row * COLS..][..2 * COLS]), wide(&da[row * COLS..][..COLS]), weights[ROWS - 1 - row]);
                let weighted_sum = |out: &[f64]| -> f64 { out.iter().zip(&da).map(|(out, da)| out * da).sum() };
                let want = slopes(&x, |x| w * weighted_sum(&reference(activation, x)));
                assert_close("dgate_up", &dx[2 * row * COLS..][..2 * COLS], &want, 2e-6);
                let out = reference(activation, &x);
                assert_close("weighted", &weighted[row * COLS..][..COLS], &out.iter().map(|out| w * out).collect::<Vec<_>>(), 1e-6);
                assert_close("dweights", &dweights[row..=row], &[weighted_sum(&out)], 2e-5);
            }
        }
        let Clamped { alpha, limit } = ACTIVATIONS[1] else { unreachable!() };
        let mut out = da.clone();
        clamped_swiglu(&mut fastest(), &x, &mut out, (alpha, limit));
        let want: Vec<f64> = wide(&x).chunks(2 * COLS).flat_map(|x| reference(ACTIVATIONS[1], x)).collect();
        assert_close("clamped_swiglu", &out, &want, 1e-6);
    }

    #[test]
    fn slopes_pass_at_the_limit_and_not_beyond() {
        let glu = |gate, up| clamped(gate, up, 1.702, 7.0);
        assert!(glu(7.0, 7.0).by_gate != 0.0 && glu(7.0, -7.0).by_up != 0.0 && glu(-100.0, 0.0).by_gate == 0.0);
        assert_eq!((glu(7.5, 1.0).by_gate, glu(1.0, 7.5).by_up, glu(1.0, -7.5).by_up), (0.0, 0.0, 0.0));
        assert!(glu(f32::NAN, 1.0).out.is_nan() && glu(1.0, f32::NAN).out.is_nan());
    }

    #[test]
    fn rows_meet_the_bias_of_their_expert() {
        let (experts, entries) = ([2, 0, 1, 2], [1, 2, 0, 3]);
        let rows = RowExperts { experts: &experts, entries: &entries };
        let (bias, before) = (values::<f32>(1, 3 * COLS), values::<f32>(2, 4 * COLS));
        let mut x = before.clone();
        expert_bias(&mut fastest(), &bias, rows, &mut x, COLS);
        let mut dots = vec![0.5; 4];
        expert_bias_dot(&mut fastest(), &before, &bias, rows, &mut dots);
        for (row, expert) in [0, 1, 2, 2].into_iter().enumerate() {
            let (bias, before) = (&bias[expert * COLS..][..COLS], &before[row * COLS..][..COLS]);
            assert_eq!(x[row * COLS..][..COLS], before.iter().zip(bias).map(|(x, b)| x + b).collect::<Vec<_>>());
            let want = 0.5 + before.iter().zip(bias).map(|(x, b)| f64::from(*x) * f64::from(*b)).sum::<f64>();
            assert_close("dot", &dots[row..=row], &[want], 1e-6);
        }
    }

    /// An expert without rows, and one with more rows than a block of a sum.
    #[test]
    fn choices_have_the_scale_of_their_expert() {
        let (counts, rows) = ([3usize, 0, SUM_BLOCK + 9, 1], SUM_BLOCK + 13);
        let bounds = counts.iter().fold(vec![0i32], |mut bounds, count| {
            bounds.push(bounds[bounds.len() - 1] + *count as i32);
            bounds
        });
        // Row r is the choice rows - 1 - r.
        let entries: Vec<i32> = (0..rows as i32).rev().collect();
        let of_row: Vec<usize> = counts.iter().enumerate().flat_map(|(expert, count)| vec![expert; *count]).collect();
        let experts: Vec<i32> = of_row.iter().rev().map(|expert| *expert as i32).collect();
        let (weights, dscaled, scale) = (values::<f32>(1, rows), values::<f32>(2, rows), values::<f32>(3, 4));
        let mut out = vec![f32::NAN; rows];
        scale_choices(&mut fastest(), &weights, &experts, &scale, &mut out);
        assert!(out.iter().enumerate().all(|(choice, out)| *out == weights[choice] * scale[experts[choice] as usize]));
        for accumulate in [false, true] {
            let (mut dweights, mut dscale) = (dscaled.clone(), vec![0.5f32; 4]);
            let choices = (&weights[..], &entries[..], &bounds[..]);
            scale_choices_backward(&mut fastest(), choices, &scale, (&mut dweights, &mut dscale), accumulate);
            assert!((0..rows).all(|row| dweights[row] == dscaled[row] * scale[of_row[row]]));
            let term = |row: usize| f64::from(weights[rows - 1 - row]) * f64::from(dscaled[row]);
            let sum = |expert: usize| (0..rows).filter(|row| of_row[*row] == expert).map(term).sum::<f64>();
            let want: Vec<f64> = (0..4).map(|expert| sum(expert) + if accumulate { 0.5 } else { 0.0 }).collect();
            assert_close("dscale", &dscale, &want, 1e-5);
        }
        assert_same_everywhere(|cx| {
            let (mut dweights, mut dscale) = (dscaled.clone(), vec![bf16::ZERO; 4]);
            let scale: Vec<bf16> = scale.iter().map(|x| bf16::from_f32(*x)).collect();
            scale_choices_backward(cx, (&weights, &entries, &bounds), &scale, (&mut dweights, &mut dscale), true);
            [bits(&dweights), bits(&dscale)].concat()
        });
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit_and_bf16_rounds_once() {
        let (x, da) = (inputs::<bf16>(1, 2 * ROWS * COLS), inputs::<bf16>(2, ROWS * COLS));
        for activation in ACTIVATIONS {
            assert_same_everywhere(|cx| {
                let (dx, weighted, dweights) = backward(cx, activation, &x, &da);
                [bits(&dx), bits(&weighted), bits(&dweights)].concat()
            });
            let narrow = backward(&mut fastest(), activation, &x, &da);
            let exact = backward(&mut fastest(), activation, &widened(&x), &widened(&da));
            assert_rounded("dgate_up", &narrow.0, &exact.0);
            assert_rounded("weighted", &narrow.1, &exact.1);
            assert_eq!(narrow.2, exact.2);
        }
    }
}
