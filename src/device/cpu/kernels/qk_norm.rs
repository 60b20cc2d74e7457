//! RMS normalisation of every query and key head, as Qwen3 has it before the rotation.

use super::isa::vectorised;
use super::norm::{rms_norm_gradient, rms_norm_mean, rms_norm_row};
use super::reduce::row_blocks;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::launch::{CpuArithmetic, TaskMemory};
use crate::device::{AttentionShape, QkNorm, QkNormBackward};
use crate::dtype::Element;

impl CpuArithmetic for QkNorm {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let weights = (memory.read::<T>(self.q_weight), memory.read(self.k_weight));
        qk_norm(cx, &self.shape, memory.read(self.qkv), weights, self.eps, memory.write(self.out), memory.write(self.rstd));
    }
}

/// See [`QkNorm`].
pub(crate) fn qk_norm<T: Element>(
    cx: &mut Compute,
    shape: &AttentionShape,
    qkv: &[T],
    (q_weight, k_weight): (&[T], &[T]),
    eps: f32,
    out: &mut [T],
    rstd: &mut [f32],
) {
    let (isa, heads) = (cx.isa, shape.heads);
    let (cols, normed) = (shape.qkv_cols(), heads + shape.kv_heads);
    cx.team.for_each((Chunks::new(out, ROW_BLOCK * cols), Chunks::new(rstd, ROW_BLOCK * normed)), |block, (out, rstd)| {
        let qkv = qkv[block * ROW_BLOCK * cols..].chunks_exact(cols);
        for ((qkv, out), rstd) in qkv.zip(out.chunks_exact_mut(cols)).zip(rstd.chunks_exact_mut(normed)) {
            norm_heads(isa, qkv, q_weight, k_weight, heads, eps, out, rstd);
        }
    });
}

impl CpuArithmetic for QkNormBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let weights = (memory.read::<T>(self.q_weight), memory.read(self.k_weight));
        let gradients = (memory.write(self.dq_weight), memory.write(self.dk_weight), self.accumulate);
        let (dqkv, qkv, rstd) = (memory.write(self.dqkv), memory.read(self.qkv), memory.read(self.rstd));
        qk_norm_backward(cx, &self.shape, dqkv, qkv, weights, rstd, gradients);
    }
}

/// See [`QkNormBackward`].
pub(crate) fn qk_norm_backward<T: Element>(
    cx: &mut Compute,
    shape: &AttentionShape,
    dqkv: &mut [T],
    qkv: &[T],
    (q_weight, k_weight): (&[T], &[T]),
    rstd: &[f32],
    (dq_weight, dk_weight, accumulate): (&mut [T], &mut [T], bool),
) {
    let (isa, heads) = (cx.isa, shape.heads);
    let (cols, normed) = (shape.qkv_cols(), heads + shape.kv_heads);
    let parts = Chunks::new(dqkv, ROW_BLOCK * cols);
    row_blocks(cx, parts, &mut [(dq_weight, accumulate), (dk_weight, accumulate)], |block, dqkv, sums| {
        let qkv = qkv[block * ROW_BLOCK * cols..].chunks_exact(cols);
        let rstd = rstd[block * ROW_BLOCK * normed..].chunks_exact(normed);
        for ((dqkv, qkv), rstd) in dqkv.chunks_exact_mut(cols).zip(qkv).zip(rstd) {
            norm_heads_backward(isa, dqkv, qkv, q_weight, k_weight, heads, rstd, sums);
        }
    });
}

vectorised! {
    /// One token: normalises `rstd.len()` heads, the first `heads` of them queries, and copies the rest.
    fn norm_heads<T>(qkv: &[T], q_weight: &[T], k_weight: &[T], heads: usize, eps: f32, out: &mut [T], rstd: &mut [f32]) {
        let head_dim = q_weight.len();
        let values = rstd.len() * head_dim;
        out[values..].copy_from_slice(&qkv[values..]);
        for (h, ((qkv, out), rstd)) in qkv.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)).zip(rstd).enumerate() {
            *rstd = rms_norm_row(qkv, if h < heads { q_weight } else { k_weight }, eps, out);
        }
    }
}

vectorised! {
    /// One token; `sums` holds the query weight's gradient, then the key weight's.
    fn norm_heads_backward<T>(
        dqkv: &mut [T], qkv: &[T], q_weight: &[T], k_weight: &[T], heads: usize, rstd: &[f32], sums: &mut [f32],
    ) {
        let head_dim = q_weight.len();
        let (q_sums, k_sums) = sums.split_at_mut(head_dim);
        for (h, ((dqkv, qkv), rstd)) in dqkv.chunks_exact_mut(head_dim).zip(qkv.chunks_exact(head_dim)).zip(rstd).enumerate() {
            let (weight, sums) = if h < heads { (q_weight, &mut *q_sums) } else { (k_weight, &mut *k_sums) };
            let mean = rms_norm_mean(dqkv, qkv, weight, *rstd);
            for (((d, x), w), sum) in dqkv.iter_mut().zip(qkv).zip(weight).zip(sums) {
                let (dout, xhat) = (d.to_f32(), x.to_f32() * rstd);
                *sum = dout.mul_add(xhat, *sum);
                *d = T::from_f32(rms_norm_gradient(dout * w.to_f32(), xhat, *rstd, mean));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, dot, fastest, slopes, values, wide, widened};
    use super::*;
    use half::{bf16, f16};

    const EPS: f32 = 1e-2;
    const SHAPE: AttentionShape = AttentionShape { batch: 2, seq_length: 33, heads: 4, kv_heads: 2, head_dim: 6, scale: 1.0, window: None };
    const ELEMS: usize = 2 * 33 * 8 * 6;

    struct Run<T> {
        out: Vec<T>,
        rstd: Vec<f32>,
        dqkv: Vec<T>,
        dq_weight: Vec<T>,
        dk_weight: Vec<T>,
    }

    /// `qkv`, the weights, the output's gradient, and what the weights' gradients hold before.
    fn inputs<T: Element>() -> [Vec<T>; 6] {
        let elems = [ELEMS, 6, 6, ELEMS, 6, 6];
        std::array::from_fn(|i| values(i as u64 + 1, elems[i]))
    }

    fn run<T: Element>(cx: &mut Compute, inputs: [Vec<T>; 6], accumulate: bool) -> Run<T> {
        let [qkv, q_weight, k_weight, mut dqkv, mut dq_weight, mut dk_weight] = inputs;
        let (mut out, mut rstd) = (vec![T::from_f32(f32::NAN); ELEMS], vec![0.0; SHAPE.tokens() * 6]);
        qk_norm(cx, &SHAPE, &qkv, (&q_weight, &k_weight), EPS, &mut out, &mut rstd);
        let gradients = (&mut dq_weight[..], &mut dk_weight[..], accumulate);
        qk_norm_backward(cx, &SHAPE, &mut dqkv, &qkv, (&q_weight, &k_weight), &rstd, gradients);
        Run { out, rstd, dqkv, dq_weight, dk_weight }
    }

    fn reference(qkv: &[f64], q_weight: &[f64], k_weight: &[f64]) -> Vec<f64> {
        let head = |(index, x): (usize, &[f64])| -> Vec<f64> {
            let weight = match index % 8 {
                0..4 => q_weight,
                4..6 => k_weight,
                _ => return x.to_vec(),
            };
            let rstd = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / 6.0 + f64::from(EPS)).sqrt();
            x.iter().zip(weight).map(|(x, w)| x * rstd * w).collect()
        };
        qkv.chunks_exact(6).enumerate().flat_map(head).collect()
    }

    #[test]
    fn heads_and_gradients_agree_with_f64() {
        let [qkv, q_weight, k_weight, dout, dq_weight, dk_weight] = inputs::<f32>().map(|x| wide(&x));
        for accumulate in [false, true] {
            let run = run(&mut fastest(), inputs::<f32>(), accumulate);
            let kept = |old: &[f64], new: Vec<f64>| -> Vec<f64> {
                old.iter().zip(new).map(|(old, new)| if accumulate { old + new } else { new }).collect()
            };
            assert_close("out", &run.out, &reference(&qkv, &q_weight, &k_weight), 2e-6);
            assert_close("dqkv", &run.dqkv, &slopes(&qkv, |x| dot(&reference(x, &q_weight, &k_weight), &dout)), 5e-6);
            let dq = kept(&dq_weight, slopes(&q_weight, |w| dot(&reference(&qkv, w, &k_weight), &dout)));
            assert_close("dq_weight", &run.dq_weight, &dq, 5e-6);
            let dk = kept(&dk_weight, slopes(&k_weight, |w| dot(&reference(&qkv, &q_weight, w), &dout)));
            assert_close("dk_weight", &run.dk_weight, &dk, 5e-6);
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        assert_same_everywhere(|cx| {
            let run = run(cx, inputs::<bf16>(), true);
            [bits(&run.out), bits(&run.rstd), bits(&run.dqkv), bits(&run.dq_weight), bits(&run.dk_weight)].concat()
        });
    }

    fn rounds_once<T: Element>() {
        let narrow = run(&mut fastest(), inputs::<T>(), true);
        let wide = run(&mut fastest(), inputs::<T>().map(|x| widened(&x)), true);
        assert_rounded("out", &narrow.out, &wide.out);
        assert_rounded("dqkv", &narrow.dqkv, &wide.dqkv);
        assert_rounded("dq_weight", &narrow.dq_weight, &wide.dq_weight);
        assert_rounded("dk_weight", &narrow.dk_weight, &wide.dk_weight);
    }

    #[test]
    fn narrow_formats_are_the_f32_result_rounded_once() {
        rounds_once::<bf16>();
        rounds_once::<f16>();
    }
}
