//! RMS normalisation of queries and keys before the rotation, over each head or over all heads of a token.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::norm::{factor, rms_norm_gradient, rms_norm_mean, rms_norm_row};
use super::reduce::row_blocks;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{AttentionShape, QkNorm, QkNormBackward};
use crate::dtype::Element;

impl CpuArithmetic for QkNorm {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let weights = [self.q_weight, self.k_weight].map(|weight| (memory.read::<T>(weight), self.plus_one));
        qk_norm(cx, &self.shape, memory.read(self.qkv), weights, self.eps, memory.write(self.out), memory.write(self.rstd));
    }
}

/// See [`QkNorm`].
pub(crate) fn qk_norm<T: Element>(
    cx: &mut Compute,
    shape: &AttentionShape,
    qkv: &[T],
    weights: [(&[T], bool); 2],
    eps: f32,
    out: &mut [T],
    rstd: &mut [f32],
) {
    let (isa, cols, parts) = (cx.isa, shape.qkv_cols(), parts(shape));
    let spans = spans(parts, weights);
    cx.team.for_each((Chunks::new(out, ROW_BLOCK * cols), Chunks::new(rstd, ROW_BLOCK * spans)), |block, (out, rstd)| {
        let qkv = qkv[block * ROW_BLOCK * cols..].chunks_exact(cols);
        for ((qkv, out), rstd) in qkv.zip(out.chunks_exact_mut(cols)).zip(rstd.chunks_exact_mut(spans)) {
            norm_spans(isa, qkv, weights, parts, eps, out, rstd);
        }
    });
}

/// Columns of queries and of keys.
fn parts(shape: &AttentionShape) -> [usize; 2] {
    [shape.heads, shape.kv_heads].map(|heads| heads * shape.head_dim)
}

/// Number of normalised spans of a token: the columns of queries and keys divided by the lengths of their weights.
fn spans<T>([q_cols, k_cols]: [usize; 2], [(q_weight, _), (k_weight, _)]: [(&[T], bool); 2]) -> usize {
    q_cols / q_weight.len() + k_cols / k_weight.len()
}

impl CpuArithmetic for QkNormBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let weights = [self.q_weight, self.k_weight].map(|weight| (memory.read::<T>(weight), self.plus_one));
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
    weights: [(&[T], bool); 2],
    rstd: &[f32],
    (dq_weight, dk_weight, accumulate): (&mut [T], &mut [T], bool),
) {
    let (isa, cols, parts) = (cx.isa, shape.qkv_cols(), parts(shape));
    let spans = spans(parts, weights);
    let chunks = Chunks::new(dqkv, ROW_BLOCK * cols);
    row_blocks(cx, chunks, &mut [(dq_weight, accumulate), (dk_weight, accumulate)], |block, dqkv, sums| {
        let qkv = qkv[block * ROW_BLOCK * cols..].chunks_exact(cols);
        let rstd = rstd[block * ROW_BLOCK * spans..].chunks_exact(spans);
        for ((dqkv, qkv), rstd) in dqkv.chunks_exact_mut(cols).zip(qkv).zip(rstd) {
            norm_spans_backward(isa, dqkv, qkv, weights, parts, rstd, sums);
        }
    });
}

vectorised! {
    /// One token: normalises the spans of queries and of keys, and copies the values.
    fn norm_spans<T>(qkv: &[T], weights: [(&[T], bool); 2], parts: [usize; 2], eps: f32, out: &mut [T], rstd: &mut [f32]) {
        let (mut start, mut rstd) = (0, rstd.iter_mut());
        for (weight, cols) in weights.into_iter().zip(parts) {
            let (x, out) = (&qkv[start..start + cols], &mut out[start..start + cols]);
            for ((x, out), rstd) in x.chunks_exact(weight.0.len()).zip(out.chunks_exact_mut(weight.0.len())).zip(rstd.by_ref()) {
                *rstd = rms_norm_row(x, weight, eps, out);
            }
            start += cols;
        }
        out[start..].copy_from_slice(&qkv[start..]);
    }
}

vectorised! {
    /// One token; `sums` holds the query weight's gradient, then the key weight's.
    fn norm_spans_backward<T>(dqkv: &mut [T], qkv: &[T], weights: [(&[T], bool); 2], parts: [usize; 2], rstd: &[f32], sums: &mut [f32]) {
        let (q_sums, k_sums) = sums.split_at_mut(weights[0].0.len());
        let (mut start, mut rstd) = (0, rstd.iter());
        for ((weight, sums), cols) in weights.into_iter().zip([q_sums, k_sums]).zip(parts) {
            let (x, d) = (&qkv[start..start + cols], &mut dqkv[start..start + cols]);
            for ((dqkv, qkv), rstd) in d.chunks_exact_mut(weight.0.len()).zip(x.chunks_exact(weight.0.len())).zip(rstd.by_ref()) {
                let mean = rms_norm_mean(dqkv, qkv, weight, *rstd);
                for (((d, x), w), sum) in dqkv.iter_mut().zip(qkv).zip(weight.0).zip(&mut *sums) {
                    let (dout, xhat) = (d.to_f32(), x.to_f32() * rstd);
                    *sum = dout.mul_add(xhat, *sum);
                    *d = T::from_f32(rms_norm_gradient(dout * factor(w.to_f32(), weight.1), xhat, *rstd, mean));
                }
            }
            start += cols;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, dot, fastest, slopes, values, wide, widened};
    use super::*;
    use half::{bf16, f16};

    const EPS: f32 = 1e-2;
    const SHAPE: AttentionShape =
        AttentionShape { batch: 2, seq_length: 33, heads: 4, kv_heads: 2, head_dim: 6, scale: 1.0, window: None, softcap: None };
    const ELEMS: usize = 2 * 33 * 8 * 6;
    /// Lengths of the weights: one head each, or all heads.
    const SPANS: [[usize; 2]; 2] = [[6, 6], [24, 12]];

    struct Run<T> {
        out: Vec<T>,
        rstd: Vec<f32>,
        dqkv: Vec<T>,
        dq_weight: Vec<T>,
        dk_weight: Vec<T>,
    }

    /// `qkv`, the weights, the output's gradient, and the previous values of the weights' gradients.
    fn inputs<T: Element>([q, k]: [usize; 2]) -> [Vec<T>; 6] {
        let elems = [ELEMS, q, k, ELEMS, q, k];
        std::array::from_fn(|i| values(i as u64 + 1, elems[i]))
    }

    fn run<T: Element>(cx: &mut Compute, inputs: [Vec<T>; 6], accumulate: bool) -> Run<T> {
        run_with(cx, inputs, accumulate, false)
    }

    fn run_with<T: Element>(cx: &mut Compute, inputs: [Vec<T>; 6], accumulate: bool, plus_one: bool) -> Run<T> {
        let [qkv, q_weight, k_weight, mut dqkv, mut dq_weight, mut dk_weight] = inputs;
        let (mut out, mut rstd) = (
            vec![T::from_f32(f32::NAN); ELEMS],
            vec![0.0; SHAPE.tokens() * spans(parts(&SHAPE), [(&q_weight[..], plus_one), (&k_weight, plus_one)])],
        );
        qk_norm(cx, &SHAPE, &qkv, [(&q_weight, plus_one), (&k_weight, plus_one)], EPS, &mut out, &mut rstd);
        let gradients = (&mut dq_weight[..], &mut dk_weight[..], accumulate);
        qk_norm_backward(cx, &SHAPE, &mut dqkv, &qkv, [(&q_weight, plus_one), (&k_weight, plus_one)], &rstd, gradients);
        Run { out, rstd, dqkv, dq_weight, dk_weight }
    }

    fn reference(qkv: &[f64], q_weight: &[f64], k_weight: &[f64]) -> Vec<f64> {
        let span = |x: &[f64], weight: &[f64]| -> Vec<f64> {
            let rstd = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt();
            x.iter().zip(weight).map(|(x, w)| x * rstd * w).collect()
        };
        let token = |x: &[f64]| -> Vec<f64> {
            let q = x[..24].chunks_exact(q_weight.len()).flat_map(|x| span(x, q_weight));
            let k = x[24..36].chunks_exact(k_weight.len()).flat_map(|x| span(x, k_weight));
            q.chain(k).chain(x[36..].iter().copied()).collect()
        };
        qkv.chunks_exact(48).flat_map(token).collect()
    }

    #[test]
    fn heads_and_gradients_agree_with_f64() {
        for (spans, accumulate) in SPANS.into_iter().flat_map(|spans| [(spans, false), (spans, true)]) {
            let [qkv, q_weight, k_weight, dout, dq_weight, dk_weight] = inputs::<f32>(spans).map(|x| wide(&x));
            let run = run(&mut fastest(), inputs::<f32>(spans), accumulate);
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
        for spans in SPANS {
            assert_same_everywhere(|cx| {
                let run = run(cx, inputs::<bf16>(spans), true);
                [bits(&run.out), bits(&run.rstd), bits(&run.dqkv), bits(&run.dq_weight), bits(&run.dk_weight)].concat()
            });
        }
    }

    #[test]
    fn a_weight_plus_one_is_that_weight() {
        for spans in SPANS {
            let mut added = inputs::<f32>(spans);
            added[1..3].iter_mut().flatten().for_each(|w| *w += 1.0);
            let [stored, plus] = [run(&mut fastest(), added, true), run_with(&mut fastest(), inputs::<f32>(spans), true, true)];
            assert_eq!((stored.out, stored.rstd, stored.dqkv), (plus.out, plus.rstd, plus.dqkv));
            assert_eq!((stored.dq_weight, stored.dk_weight), (plus.dq_weight, plus.dk_weight));
        }
    }

    fn rounds_once<T: Element>(spans: [usize; 2]) {
        let narrow = run(&mut fastest(), inputs::<T>(spans), true);
        let wide = run(&mut fastest(), inputs::<T>(spans).map(|x| widened(&x)), true);
        assert_rounded("out", &narrow.out, &wide.out);
        assert_rounded("dqkv", &narrow.dqkv, &wide.dqkv);
        assert_rounded("dq_weight", &narrow.dq_weight, &wide.dq_weight);
        assert_rounded("dk_weight", &narrow.dk_weight, &wide.dk_weight);
    }

    #[test]
    fn narrow_formats_are_the_f32_result_rounded_once() {
        SPANS.into_iter().for_each(rounds_once::<bf16>);
        SPANS.into_iter().for_each(rounds_once::<f16>);
    }
}
