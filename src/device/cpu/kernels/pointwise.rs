//! Elementwise kernels.

use super::arithmetic::CpuArithmetic;
use super::isa::{KernelIsa, vectorised};
use super::math::sigmoid;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd, SigmoidGate, SigmoidGateBackward, Swiglu, SwigluBackward};
use crate::dtype::Element;

/// Elements of one block.
pub(super) const BLOCK_ELEMS: usize = 16384;

/// `sqrt(2 / pi)` and the cubic coefficient of GELU's tanh approximation.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

impl CpuArithmetic for Swiglu {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        swiglu::<T>(cx, memory.read(self.gate_up), memory.write(self.out), self.cols);
    }
}

/// See [`Swiglu`].
pub(crate) fn swiglu<T: Element>(cx: &mut Compute, gate_up: &[T], out: &mut [T], cols: usize) {
    gated(cx, gate_up, out, cols, swiglu_row);
}

impl CpuArithmetic for SwigluBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        swiglu_backward::<T>(cx, memory.read(self.dout), memory.read(self.gate_up), memory.write(self.dgate_up), self.cols);
    }
}

/// See [`SwigluBackward`].
pub(crate) fn swiglu_backward<T: Element>(cx: &mut Compute, dout: &[T], gate_up: &[T], dgate_up: &mut [T], cols: usize) {
    gated_backward(cx, [dout, gate_up], dgate_up, cols, swiglu_backward_row);
}

impl CpuArithmetic for Geglu {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        geglu::<T>(cx, memory.read(self.gate_up), memory.write(self.out), self.cols);
    }
}

/// See [`Geglu`].
pub(crate) fn geglu<T: Element>(cx: &mut Compute, gate_up: &[T], out: &mut [T], cols: usize) {
    gated(cx, gate_up, out, cols, geglu_row);
}

impl CpuArithmetic for GegluBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        geglu_backward::<T>(cx, memory.read(self.dout), memory.read(self.gate_up), memory.write(self.dgate_up), self.cols);
    }
}

/// See [`GegluBackward`].
pub(crate) fn geglu_backward<T: Element>(cx: &mut Compute, dout: &[T], gate_up: &[T], dgate_up: &mut [T], cols: usize) {
    gated_backward(cx, [dout, gate_up], dgate_up, cols, geglu_backward_row);
}

/// Forward pass of a gated unit for one row: gates, up projections, output.
type GatedRow<T> = fn(KernelIsa, &[T], &[T], &mut [T]);
/// Backward pass of a gated unit for one row: output gradients, gates, up projections, gradients of gates and of up projections.
type GatedBackwardRow<T> = fn(KernelIsa, &[T], &[T], &[T], &mut [T], &mut [T]);

fn gated<T: Element>(cx: &mut Compute, gate_up: &[T], out: &mut [T], cols: usize, row: GatedRow<T>) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(out, ROW_BLOCK * cols), |block, out| {
        let gate_up = gate_up[2 * block * ROW_BLOCK * cols..].chunks_exact(2 * cols);
        for (gate_up, out) in gate_up.zip(out.chunks_exact_mut(cols)) {
            row(isa, &gate_up[..cols], &gate_up[cols..], out);
        }
    });
}

fn gated_backward<T: Element>(cx: &mut Compute, [dout, gate_up]: [&[T]; 2], dgate_up: &mut [T], cols: usize, row: GatedBackwardRow<T>) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(dgate_up, 2 * ROW_BLOCK * cols), |block, dgate_up| {
        let start = block * ROW_BLOCK * cols;
        let rows = dout[start..].chunks_exact(cols).zip(gate_up[2 * start..].chunks_exact(2 * cols));
        for (dgate_up, (dout, gate_up)) in dgate_up.chunks_exact_mut(2 * cols).zip(rows) {
            let (dgate, dup) = dgate_up.split_at_mut(cols);
            row(isa, dout, &gate_up[..cols], &gate_up[cols..], dgate, dup);
        }
    });
}

impl CpuArithmetic for Gelu {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        gelu::<T>(cx, memory.read(self.x), memory.write(self.out));
    }
}

/// See [`Gelu`].
pub(crate) fn gelu<T: Element>(cx: &mut Compute, x: &[T], out: &mut [T]) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(out, BLOCK_ELEMS), |block, out| gelu_elems(isa, &x[block * BLOCK_ELEMS..], out));
}

impl CpuArithmetic for GeluBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let dx = memory.write::<T>(self.dx);
        if self.dout != self.dx {
            copy(cx, memory.read(self.dout), dx);
        }
        gelu_backward(cx, memory.read(self.x), dx);
    }
}

/// See [`GeluBackward`]; `dx` holds `dout` on entry and the input's gradient on return.
pub(crate) fn gelu_backward<T: Element>(cx: &mut Compute, x: &[T], dx: &mut [T]) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(dx, BLOCK_ELEMS), |block, dx| gelu_backward_elems(isa, &x[block * BLOCK_ELEMS..], dx));
}

impl CpuArithmetic for ScaleAdd {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let out = memory.write::<T>(self.out);
        if self.x != self.out {
            copy(cx, memory.read(self.x), out);
        }
        scale_add(cx, self.scale, self.base.map(|base| memory.read(base)), out);
    }
}

/// See [`ScaleAdd`]; `out` holds `x` on entry.
pub(crate) fn scale_add<T: Element>(cx: &mut Compute, scale: f32, base: Option<&[T]>, out: &mut [T]) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(out, BLOCK_ELEMS), |block, out| match base {
        Some(base) => scale_add_elems(isa, scale, &base[block * BLOCK_ELEMS..], out),
        None => scale_elems(isa, scale, out),
    });
}

impl CpuArithmetic for SigmoidGate {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        sigmoid_gate::<T>(cx, memory.read(self.x), memory.read(self.gate), memory.write(self.out));
    }
}

/// See [`SigmoidGate`].
pub(crate) fn sigmoid_gate<T: Element>(cx: &mut Compute, x: &[T], gate: &[T], out: &mut [T]) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(out, BLOCK_ELEMS), |block, out| {
        let start = block * BLOCK_ELEMS;
        sigmoid_gate_elems(isa, &x[start..], &gate[start..], out);
    });
}

impl CpuArithmetic for SigmoidGateBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let read = [self.dout, self.x, self.gate].map(|slice| memory.read::<T>(slice));
        sigmoid_gate_backward(cx, read, memory.write(self.dx), memory.write(self.dgate));
    }
}

/// See [`SigmoidGateBackward`].
pub(crate) fn sigmoid_gate_backward<T: Element>(cx: &mut Compute, [dout, x, gate]: [&[T]; 3], dx: &mut [T], dgate: &mut [T]) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(dx, BLOCK_ELEMS), |block, dx| {
        let start = block * BLOCK_ELEMS;
        sigmoid_gate_elems(isa, &dout[start..], &gate[start..], dx);
    });
    cx.team.for_each(Chunks::new(dgate, BLOCK_ELEMS), |block, dgate| {
        let start = block * BLOCK_ELEMS;
        gate_gradient_elems(isa, &dout[start..], &x[start..], &gate[start..], dgate);
    });
}

/// Copies `src` to `dst`.
pub(crate) fn copy<T: Element>(cx: &mut Compute, src: &[T], dst: &mut [T]) {
    cx.team.for_each(Chunks::new(dst, BLOCK_ELEMS), |block, dst| {
        dst.copy_from_slice(&src[block * BLOCK_ELEMS..][..dst.len()]);
    });
}

/// Fills with zero.
pub(crate) fn zero<T: bytemuck::Pod + Send>(cx: &mut Compute, x: &mut [T]) {
    cx.team.for_each(Chunks::new(x, BLOCK_ELEMS), |_, x| x.fill(T::zeroed()));
}

/// Runs [`cast_elems`] on all threads.
pub(crate) fn cast<S: Element, D: Element>(cx: &mut Compute, src: &[S], dst: &mut [D]) {
    let isa = cx.isa;
    cx.team.for_each(Chunks::new(dst, BLOCK_ELEMS), |block, dst| cast_elems(isa, &src[block * BLOCK_ELEMS..], dst));
}

vectorised! {
    /// Converts every element, rounding once.
    pub(crate) fn cast_elems<S, D>(src: &[S], dst: &mut [D]) {
        dst.iter_mut().zip(src).for_each(|(d, s)| *d = D::from_f32(s.to_f32()));
    }
}

vectorised! {
    /// `out += b`.
    pub(super) fn add_elems<T>(b: &[T], out: &mut [T]) {
        out.iter_mut().zip(b).for_each(|(o, b)| *o = T::from_f32(o.to_f32() + b.to_f32()));
    }
}

vectorised! {
    fn swiglu_row<T>(gate: &[T], up: &[T], out: &mut [T]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            let gate = gate.to_f32();
            *out = T::from_f32(gate * sigmoid(gate) * up.to_f32());
        }
    }
}

vectorised! {
    fn swiglu_backward_row<T>(dout: &[T], gate: &[T], up: &[T], dgate: &mut [T], dup: &mut [T]) {
        for ((((dgate, dup), dout), gate), up) in dgate.iter_mut().zip(dup).zip(dout).zip(gate).zip(up) {
            let (dout, gate) = (dout.to_f32(), gate.to_f32());
            let s = sigmoid(gate);
            let slope = s * gate.mul_add(1.0 - s, 1.0);
            *dgate = T::from_f32(dout * up.to_f32() * slope);
            *dup = T::from_f32(dout * (gate * s));
        }
    }
}

vectorised! {
    fn scale_add_elems<T>(scale: f32, base: &[T], out: &mut [T]) {
        out.iter_mut().zip(base).for_each(|(x, base)| *x = T::from_f32(x.to_f32().mul_add(scale, base.to_f32())));
    }
}

vectorised! {
    fn scale_elems<T>(scale: f32, out: &mut [T]) {
        out.iter_mut().for_each(|x| *x = T::from_f32(x.to_f32() * scale));
    }
}

vectorised! {
    fn sigmoid_gate_elems<T>(x: &[T], gate: &[T], out: &mut [T]) {
        for ((out, x), gate) in out.iter_mut().zip(x).zip(gate) {
            *out = T::from_f32(x.to_f32() * sigmoid(gate.to_f32()));
        }
    }
}

vectorised! {
    fn gate_gradient_elems<T>(dout: &[T], x: &[T], gate: &[T], dgate: &mut [T]) {
        for (((dgate, dout), x), gate) in dgate.iter_mut().zip(dout).zip(x).zip(gate) {
            let s = sigmoid(gate.to_f32());
            *dgate = T::from_f32(dout.to_f32() * x.to_f32() * (s * (1.0 - s)));
        }
    }
}

// 0.5 x (1 + tanh u) equals x sigmoid(2u), which stays precise where tanh u is close to -1.
#[inline(always)]
pub(super) fn gelu_of(x: f32) -> f32 {
    let u = GELU_SCALE * (x * x * GELU_CUBIC).mul_add(x, x);
    x * sigmoid(2.0 * u)
}

#[inline(always)]
pub(super) fn gelu_slope(x: f32) -> f32 {
    let u = GELU_SCALE * (x * x * GELU_CUBIC).mul_add(x, x);
    let du = GELU_SCALE * (x * x).mul_add(3.0 * GELU_CUBIC, 1.0);
    let s = sigmoid(2.0 * u);
    (2.0 * x * s * (1.0 - s)).mul_add(du, s)
}

vectorised! {
    fn gelu_elems<T>(x: &[T], out: &mut [T]) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = T::from_f32(gelu_of(x.to_f32())));
    }
}

vectorised! {
    fn gelu_backward_elems<T>(x: &[T], dx: &mut [T]) {
        dx.iter_mut().zip(x).for_each(|(dx, x)| *dx = T::from_f32(dx.to_f32() * gelu_slope(x.to_f32())));
    }
}

vectorised! {
    fn geglu_row<T>(gate: &[T], up: &[T], out: &mut [T]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = T::from_f32(gelu_of(gate.to_f32()) * up.to_f32());
        }
    }
}

vectorised! {
    fn geglu_backward_row<T>(dout: &[T], gate: &[T], up: &[T], dgate: &mut [T], dup: &mut [T]) {
        for ((((dgate, dup), dout), gate), up) in dgate.iter_mut().zip(dup).zip(dout).zip(gate).zip(up) {
            let (dout, gate) = (dout.to_f32(), gate.to_f32());
            *dgate = T::from_f32(dout * up.to_f32() * gelu_slope(gate));
            *dup = T::from_f32(dout * gelu_of(gate));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, dot, fastest, slopes, values, wide, widened};
    use super::*;
    use half::{bf16, f16};

    const ROWS: usize = 70;
    const COLS: usize = 21;

    /// Values in -6..6, where the activations are far from linear.
    fn inputs<T: Element>(seed: u64, elems: usize) -> Vec<T> {
        values(seed, elems).iter().map(|x: &f32| T::from_f32(6.0 * x)).collect()
    }

    fn reference_swiglu(x: &[f64]) -> Vec<f64> {
        let row = |x: &[f64]| -> Vec<f64> { (0..COLS).map(|c| x[c] / (1.0 + (-x[c]).exp()) * x[c + COLS]).collect() };
        x.chunks_exact(2 * COLS).flat_map(row).collect()
    }

    fn reference_gelu(x: &[f64]) -> Vec<f64> {
        let scale = (2.0 / std::f64::consts::PI).sqrt();
        x.iter().map(|x| 0.5 * x * (1.0 + (scale * (x + 0.044715 * x * x * x)).tanh())).collect()
    }

    fn run_swiglu<T: Element>(cx: &mut Compute, x: &[T], dout: &[T]) -> (Vec<T>, Vec<T>) {
        let (mut out, mut dx) = (dout.to_vec(), x.to_vec());
        swiglu(cx, x, &mut out, COLS);
        swiglu_backward(cx, dout, x, &mut dx, COLS);
        (out, dx)
    }

    fn reference_geglu(x: &[f64]) -> Vec<f64> {
        x.chunks_exact(2 * COLS)
            .flat_map(|x| reference_gelu(&x[..COLS]).into_iter().zip(&x[COLS..]).map(|(g, up)| g * up).collect::<Vec<_>>())
            .collect()
    }

    fn run_geglu<T: Element>(cx: &mut Compute, x: &[T], dout: &[T]) -> (Vec<T>, Vec<T>) {
        let (mut out, mut dx) = (dout.to_vec(), x.to_vec());
        geglu(cx, x, &mut out, COLS);
        geglu_backward(cx, dout, x, &mut dx, COLS);
        (out, dx)
    }

    fn run_gelu<T: Element>(cx: &mut Compute, x: &[T], dout: &[T]) -> (Vec<T>, Vec<T>) {
        let (mut out, mut dx) = (x.to_vec(), dout.to_vec());
        gelu(cx, x, &mut out);
        gelu_backward(cx, x, &mut dx);
        (out, dx)
    }

    #[test]
    fn swiglu_and_gelu_agree_with_f64() {
        let mut cx = fastest();
        let (x, dout) = (inputs::<f32>(1, 2 * ROWS * COLS), inputs::<f32>(2, ROWS * COLS));
        let (out, dx) = run_swiglu(&mut cx, &x, &dout);
        assert_close("swiglu", &out, &reference_swiglu(&wide(&x)), 1e-6);
        // Central differences over all rows at once would be slow. Rows are independent, so the test differentiates one row at a time.
        for row in 0..ROWS {
            let (x, dout) = (wide(&x[2 * row * COLS..][..2 * COLS]), wide(&dout[row * COLS..][..COLS]));
            assert_close("swiglu dx", &dx[2 * row * COLS..][..2 * COLS], &slopes(&x, |x| dot(&reference_swiglu(x), &dout)), 1e-6);
        }
        let (x, dout) = (inputs::<f32>(3, 1000), inputs::<f32>(4, 1000));
        let (out, dx) = run_gelu(&mut cx, &x, &dout);
        assert_close("gelu", &out, &reference_gelu(&wide(&x)), 1e-6);
        // The slope contains 2 x du (1 - s). 1 - s has an error of up to half an ulp of 1, and the gradient is up to 6 times that.
        assert_close("gelu dx", &dx, &slopes(&wide(&x), |x| dot(&reference_gelu(x), &wide(&dout))), 3e-6);
    }

    #[test]
    fn geglu_agrees_with_f64() {
        let (x, dout) = (inputs::<f32>(1, 2 * ROWS * COLS), inputs::<f32>(2, ROWS * COLS));
        let (out, dx) = run_geglu(&mut fastest(), &x, &dout);
        assert_close("geglu", &out, &reference_geglu(&wide(&x)), 1e-6);
        for row in 0..ROWS {
            let (x, dout) = (wide(&x[2 * row * COLS..][..2 * COLS]), wide(&dout[row * COLS..][..COLS]));
            // The tolerance for GELU's own gradient, times the up projection, which is at most 6.
            assert_close("geglu dx", &dx[2 * row * COLS..][..2 * COLS], &slopes(&x, |x| dot(&reference_geglu(x), &dout)), 2e-5);
        }
    }

    fn reference_gate(x: &[f64], gate: &[f64]) -> Vec<f64> {
        x.iter().zip(gate).map(|(x, gate)| x / (1.0 + (-gate).exp())).collect()
    }

    fn run_gate<T: Element>(cx: &mut Compute, [x, gate, dout]: [&[T]; 3]) -> [Vec<T>; 3] {
        let [mut out, mut dx, mut dgate] = [x.to_vec(), x.to_vec(), x.to_vec()];
        sigmoid_gate(cx, x, gate, &mut out);
        sigmoid_gate_backward(cx, [dout, x, gate], &mut dx, &mut dgate);
        [out, dx, dgate]
    }

    #[test]
    fn a_gate_agrees_with_f64_rounds_once_and_is_the_same_everywhere() {
        let [x, gate, dout] = [1, 2, 3].map(|seed| inputs::<f32>(seed, 1000));
        let [out, dx, dgate] = run_gate(&mut fastest(), [&x, &gate, &dout]);
        let (wide_x, wide_gate, wide_dout) = (wide(&x), wide(&gate), wide(&dout));
        assert_close("gate", &out, &reference_gate(&wide_x, &wide_gate), 1e-6);
        assert_close("gate dx", &dx, &slopes(&wide_x, |x| dot(&reference_gate(x, &wide_gate), &wide_dout)), 1e-6);
        assert_close("gate dgate", &dgate, &slopes(&wide_gate, |gate| dot(&reference_gate(&wide_x, gate), &wide_dout)), 3e-6);
        let narrow = [1, 2, 3].map(|seed| inputs::<bf16>(seed, 2 * BLOCK_ELEMS + 7));
        let widened = narrow.each_ref().map(|x| widened(x));
        let (exact, rounded) =
            (run_gate(&mut fastest(), widened.each_ref().map(|x| &x[..])), run_gate(&mut fastest(), narrow.each_ref().map(|x| &x[..])));
        exact.iter().zip(&rounded).for_each(|(exact, rounded)| assert_rounded("gate", rounded, exact));
        assert_same_everywhere(|cx| run_gate(cx, narrow.each_ref().map(|x| &x[..])).map(|x| bits(&x)).concat());
    }

    #[test]
    fn scale_add_agrees_with_f64_and_rounds_once() {
        let (x, base) = (inputs::<f32>(5, 1000), inputs::<f32>(6, 1000));
        for base in [None, Some(&base[..])] {
            let mut out = x.clone();
            scale_add(&mut fastest(), 0.3, base, &mut out);
            let want = |(i, x): (usize, &f32)| f64::from(0.3f32) * f64::from(*x) + base.map_or(0.0, |base| f64::from(base[i]));
            assert_close("scale_add", &out, &x.iter().enumerate().map(want).collect::<Vec<_>>(), 1e-7);
        }
        let (mut x, base) = (inputs::<bf16>(5, 1000), inputs::<bf16>(6, 1000));
        let mut wide = widened(&x);
        scale_add(&mut fastest(), 0.3, Some(&widened(&base)), &mut wide);
        scale_add(&mut fastest(), 0.3, Some(&base), &mut x);
        assert_rounded("scale_add", &x, &wide);
    }

    #[test]
    fn gelu_keeps_its_ends() {
        let x = [-1e30f32, -20.0, 0.0, 20.0, 1e30, f32::INFINITY, f32::NAN];
        let (out, _) = run_gelu(&mut fastest(), &x, &x);
        assert_eq!(out[..6], [0.0, 0.0, 0.0, 20.0, 1e30, f32::INFINITY]);
        assert!(out[6].is_nan());
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        let (x, dout) = (inputs::<bf16>(1, 2 * ROWS * COLS), inputs::<bf16>(2, ROWS * COLS));
        assert_same_everywhere(|cx| {
            let ((out, dx), (gelu_out, gelu_dx)) = (run_swiglu(cx, &x, &dout), run_geglu(cx, &x, &dout));
            [bits(&out), bits(&dx), bits(&gelu_out), bits(&gelu_dx)].concat()
        });
        let (x, dout) = (inputs::<f32>(1, 3 * BLOCK_ELEMS + 5), inputs::<f32>(2, 3 * BLOCK_ELEMS + 5));
        assert_same_everywhere(|cx| {
            let (out, dx) = run_gelu(cx, &x, &dout);
            let mut narrow = vec![f16::ZERO; out.len()];
            cast(cx, &out, &mut narrow);
            let mut sum = out.clone();
            scale_add(cx, 0.7, Some(&dx), &mut sum);
            [bits(&out), bits(&dx), bits(&narrow), bits(&sum)].concat()
        });
    }

    fn rounds_once<T: Element>() {
        let mut cx = fastest();
        let (x, dout) = (inputs::<T>(1, 2 * ROWS * COLS), inputs::<T>(2, 2 * ROWS * COLS));
        let (wide_x, wide_dout) = (widened(&x), widened(&dout));
        let half = ROWS * COLS;
        let (narrow, wide) = (run_swiglu(&mut cx, &x, &dout[..half]), run_swiglu(&mut cx, &wide_x, &wide_dout[..half]));
        assert_rounded("swiglu", &narrow.0, &wide.0);
        assert_rounded("swiglu dx", &narrow.1, &wide.1);
        let (narrow, wide) = (run_geglu(&mut cx, &x, &dout[..half]), run_geglu(&mut cx, &wide_x, &wide_dout[..half]));
        assert_rounded("geglu", &narrow.0, &wide.0);
        assert_rounded("geglu dx", &narrow.1, &wide.1);
        let (narrow, wide) = (run_gelu(&mut cx, &x, &dout), run_gelu(&mut cx, &wide_x, &wide_dout));
        assert_rounded("gelu", &narrow.0, &wide.0);
        assert_rounded("gelu dx", &narrow.1, &wide.1);
    }

    #[test]
    fn narrow_formats_are_the_f32_result_rounded_once() {
        rounds_once::<bf16>();
        rounds_once::<f16>();
    }
}
