//! RMS normalisation with a gate.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::math::sigmoid;
use super::reduce::{fold, row_blocks};
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{GatedNorm, GatedNormBackward};
use crate::dtype::Element;

impl CpuArithmetic for GatedNorm {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let [x, gate, weight] = [self.x, self.gate, self.weight].map(|slice| memory.read::<T>(slice));
        gated_norm(cx, (x, gate, weight), self.eps, memory.write(self.out));
    }
}

/// See [`GatedNorm`].
pub(crate) fn gated_norm<T: Element>(cx: &mut Compute, (x, gate, weight): (&[T], &[T], &[T]), eps: f32, out: &mut [T]) {
    let (isa, block_elems) = (cx.isa, ROW_BLOCK * weight.len());
    cx.team.for_each(Chunks::new(out, block_elems), |block, out| {
        let start = block * block_elems;
        gated_norm_rows(isa, &x[start..], &gate[start..], weight, eps, out);
    });
}

impl CpuArithmetic for GatedNormBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let [dout, x, gate, weight] = [self.dout, self.x, self.gate, self.weight].map(|slice| memory.read::<T>(slice));
        let gradients = (memory.write(self.dx), memory.write(self.dgate));
        gated_norm_backward(cx, (dout, x, gate, weight), self.eps, gradients, (memory.write(self.dweight), self.accumulate));
    }
}

/// See [`GatedNormBackward`].
pub(crate) fn gated_norm_backward<T: Element>(
    cx: &mut Compute,
    (dout, x, gate, weight): (&[T], &[T], &[T], &[T]),
    eps: f32,
    (dx, dgate): (&mut [T], &mut [T]),
    (dweight, accumulate): (&mut [T], bool),
) {
    let (isa, block_elems) = (cx.isa, ROW_BLOCK * weight.len());
    let parts = (Chunks::new(dx, block_elems), Chunks::new(dgate, block_elems));
    row_blocks(cx, parts, &mut [(dweight, accumulate)], |block, (dx, dgate), sums| {
        let start = block * block_elems;
        gated_norm_backward_rows(isa, (&dout[start..], &x[start..], &gate[start..]), weight, eps, (dx, dgate), sums);
    });
}

#[inline(always)]
fn rstd_of<T: Element>(x: &[T], eps: f32) -> f32 {
    1.0 / (fold(x, |sum, x| x.mul_add(x, sum)) / x.len() as f32 + eps).sqrt()
}

vectorised! {
    fn gated_norm_rows<T>(x: &[T], gate: &[T], weight: &[T], eps: f32, out: &mut [T]) {
        let cols = weight.len();
        for ((x, gate), out) in x.chunks_exact(cols).zip(gate.chunks_exact(cols)).zip(out.chunks_exact_mut(cols)) {
            let rstd = rstd_of(x, eps);
            for (((out, x), gate), w) in out.iter_mut().zip(x).zip(gate).zip(weight) {
                let gate = gate.to_f32();
                *out = T::from_f32(x.to_f32() * rstd * w.to_f32() * (gate * sigmoid(gate)));
            }
        }
    }
}

vectorised! {
    fn gated_norm_backward_rows<T>(
        inputs: (&[T], &[T], &[T]), weight: &[T], eps: f32, gradients: (&mut [T], &mut [T]), sums: &mut [f32],
    ) {
        let (cols, (dout, x, gate)) = (weight.len(), inputs);
        let gradients = gradients.0.chunks_exact_mut(cols).zip(gradients.1.chunks_exact_mut(cols));
        let rows = dout.chunks_exact(cols).zip(x.chunks_exact(cols)).zip(gate.chunks_exact(cols)).zip(gradients);
        for (((dout, x), gate), (dx, dgate)) in rows {
            let (rstd, mut sum) = (rstd_of(x, eps), 0.0f32);
            for (c, (((d, x), g), w)) in dout.iter().zip(x).zip(gate).zip(weight).enumerate() {
                let (d, xhat, g, w) = (d.to_f32(), x.to_f32() * rstd, g.to_f32(), w.to_f32());
                let s = sigmoid(g);
                let (silu, slope) = (g * s, s * g.mul_add(1.0 - s, 1.0));
                sum = (d * silu * w).mul_add(xhat, sum);
                sums[c] = (d * silu).mul_add(xhat, sums[c]);
                dgate[c] = T::from_f32(d * w * xhat * slope);
            }
            let mean = sum / cols as f32;
            for ((((dx, d), x), g), w) in dx.iter_mut().zip(dout).zip(x).zip(gate).zip(weight) {
                let (xhat, g) = (x.to_f32() * rstd, g.to_f32());
                *dx = T::from_f32(rstd * xhat.mul_add(-mean, d.to_f32() * (g * sigmoid(g)) * w.to_f32()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_same_everywhere, bits, dot, fastest, slopes, values, wide};
    use super::*;
    use half::bf16;

    const EPS: f32 = 1e-2;
    const SIZES: [(usize, usize); 4] = [(1, 1), (3, 16), (65, 7), (130, 20)];

    /// `dout`, `x`, `gate`, `weight`.
    fn inputs<T: Element>((rows, cols): (usize, usize)) -> [Vec<T>; 4] {
        let elems = [rows * cols, rows * cols, rows * cols, cols];
        std::array::from_fn(|i| values(i as u64 + 1, elems[i]))
    }

    fn run<T: Element>(cx: &mut Compute, size: (usize, usize), accumulate: bool) -> [Vec<T>; 4] {
        let [dout, x, gate, weight] = inputs::<T>(size);
        let (mut out, mut dx, mut dgate, mut dweight) = (x.clone(), x.clone(), x.clone(), vec![T::from_f32(1.0); size.1]);
        gated_norm(cx, (&x, &gate, &weight), EPS, &mut out);
        gated_norm_backward(cx, (&dout, &x, &gate, &weight), EPS, (&mut dx, &mut dgate), (&mut dweight, accumulate));
        [out, dx, dgate, dweight]
    }

    fn reference(x: &[f64], gate: &[f64], weight: &[f64]) -> Vec<f64> {
        let n = weight.len();
        let row = |(x, gate): (&[f64], &[f64])| -> Vec<f64> {
            let rstd = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / n as f64 + f64::from(EPS)).sqrt();
            (0..n).map(|c| x[c] * rstd * weight[c] * gate[c] / (1.0 + (-gate[c]).exp())).collect()
        };
        x.chunks_exact(n).zip(gate.chunks_exact(n)).flat_map(row).collect()
    }

    #[test]
    fn the_norm_and_its_gradients_agree_with_f64() {
        for size in SIZES {
            let [dout, x, gate, weight] = inputs::<f32>(size).map(|x| wide(&x));
            let [out, dx, dgate, dweight] = run::<f32>(&mut fastest(), size, false);
            assert_close("out", &out, &reference(&x, &gate, &weight), 2e-6);
            assert_close("dx", &dx, &slopes(&x, |x| dot(&reference(x, &gate, &weight), &dout)), 5e-6);
            assert_close("dgate", &dgate, &slopes(&gate, |gate| dot(&reference(&x, gate, &weight), &dout)), 5e-6);
            assert_close("dweight", &dweight, &slopes(&weight, |weight| dot(&reference(&x, &gate, weight), &dout)), 5e-6);
            let [.., added] = run::<f32>(&mut fastest(), size, true);
            assert_eq!(added, dweight.iter().map(|x| x + 1.0).collect::<Vec<_>>());
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        assert_same_everywhere(|cx| run::<bf16>(cx, (200, 45), true).map(|x| bits(&x)).concat());
    }
}
