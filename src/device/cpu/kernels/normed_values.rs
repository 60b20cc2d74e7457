//! RMS normalisation of queries, keys and values, and a factor on the residual stream.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::norm::{rms_norm_gradient, rms_norm_row};
use super::reduce::{fold2, row_blocks};
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{NormedHeads, QkvNorm, QkvNormBackward, ScaleBy};
use crate::dtype::Element;

impl CpuArithmetic for QkvNorm {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let weights = [self.q_weight, self.k_weight].map(|weight| memory.read::<T>(weight));
        qkv_norm(cx, &self.heads, memory.read(self.qkv), weights, self.eps, memory.write(self.out), memory.write(self.rstd));
    }
}

/// See [`QkvNorm`].
fn qkv_norm<T: Element>(cx: &mut Compute, heads: &NormedHeads, qkv: &[T], weights: [&[T]; 2], eps: f32, out: &mut [T], rstd: &mut [f32]) {
    let (isa, d) = (cx.isa, heads.head_dim);
    // Weights plus one of zeros are no weights.
    let none = vec![T::from_f32(0.0); d];
    let (raw, all) = (heads.raw(), heads.all());
    cx.team.for_each((Chunks::new(out, ROW_BLOCK * all * d), Chunks::new(rstd, ROW_BLOCK * raw)), |block, (out, rstd)| {
        let qkv = qkv[block * ROW_BLOCK * raw * d..].chunks_exact(raw * d);
        for ((qkv, out), rstd) in qkv.zip(out.chunks_exact_mut(all * d)).zip(rstd.chunks_exact_mut(raw)) {
            norm_token(isa, *heads, qkv, weights, &none, eps, out, rstd);
        }
    });
}

vectorised! {
    /// One token. Values come last, so that keys have left their statistic where values are keys.
    fn norm_token<T>(
        heads: NormedHeads, qkv: &[T], weights: [&[T]; 2], none: &[T], eps: f32, out: &mut [T], rstd: &mut [f32],
    ) {
        let d = heads.head_dim;
        for (head, out) in out.chunks_exact_mut(d).enumerate() {
            let raw = heads.raw_head(head);
            let weight = match head {
                head if head < heads.heads => (weights[0], false),
                head if head < heads.heads + heads.kv_heads => (weights[1], false),
                _ => (none, true),
            };
            rstd[raw] = rms_norm_row(&qkv[raw * d..][..d], weight, eps, out);
        }
    }
}

impl NormedHeads {
    /// The head before the norms of head `head` after them.
    fn raw_head(&self, head: usize) -> usize {
        if self.values_are_keys && head >= self.heads + self.kv_heads { head - self.kv_heads } else { head }
    }
}

impl CpuArithmetic for QkvNormBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let weights = [self.q_weight, self.k_weight].map(|weight| memory.read::<T>(weight));
        let gradients = (memory.write(self.dq_weight), memory.write(self.dk_weight), self.accumulate);
        qkv_norm_backward(cx, &self.heads, memory.read(self.dout), memory.write(self.qkv), weights, memory.read(self.rstd), gradients);
    }
}

/// See [`QkvNormBackward`].
fn qkv_norm_backward<T: Element>(
    cx: &mut Compute,
    heads: &NormedHeads,
    dout: &[T],
    qkv: &mut [T],
    weights: [&[T]; 2],
    rstd: &[f32],
    (dq_weight, dk_weight, accumulate): (&mut [T], &mut [T], bool),
) {
    let (isa, d, raw, all) = (cx.isa, heads.head_dim, heads.raw(), heads.all());
    let chunks = Chunks::new(qkv, ROW_BLOCK * raw * d);
    row_blocks(cx, chunks, &mut [(dq_weight, accumulate), (dk_weight, accumulate)], |block, qkv, sums| {
        let dout = dout[block * ROW_BLOCK * all * d..].chunks_exact(all * d);
        let rstd = rstd[block * ROW_BLOCK * raw..].chunks_exact(raw);
        let mut gradient = vec![0.0f32; d];
        for ((qkv, dout), rstd) in qkv.chunks_exact_mut(raw * d).zip(dout).zip(rstd) {
            norm_token_backward(isa, *heads, qkv, dout, weights, rstd, sums, &mut gradient);
        }
    });
}

vectorised! {
    /// One token; `sums` holds the query weight's gradient, then the key weight's.
    fn norm_token_backward<T>(
        heads: NormedHeads, qkv: &mut [T], dout: &[T], weights: [&[T]; 2], rstd: &[f32], sums: &mut [f32], gradient: &mut [f32],
    ) {
        let d = heads.head_dim;
        let (q_sums, k_sums) = sums.split_at_mut(d);
        for (head, (x, rstd)) in qkv.chunks_exact_mut(d).zip(rstd).enumerate() {
            let dhead = &dout[head * d..][..d];
            let (is_query, is_value) = (head < heads.heads, head >= heads.heads + heads.kv_heads);
            if is_value {
                gradient.iter_mut().zip(dhead).for_each(|(g, d)| *g = d.to_f32());
            } else {
                let (weight, sums) = if is_query { (weights[0], &mut *q_sums) } else { (weights[1], &mut *k_sums) };
                for ((g, sum), ((dout, x), w)) in gradient.iter_mut().zip(sums).zip(dhead.iter().zip(&*x).zip(weight)) {
                    *sum = dout.to_f32().mul_add(x.to_f32() * rstd, *sum);
                    *g = dout.to_f32() * w.to_f32();
                }
            }
            if heads.values_are_keys && !is_query {
                let dvalue = &dout[(head + heads.kv_heads) * d..][..d];
                gradient.iter_mut().zip(dvalue).for_each(|(g, d)| *g += d.to_f32());
            }
            let mean = fold2(gradient, x, |sum, g, x| g.mul_add(x * rstd, sum)) / d as f32;
            for (x, g) in x.iter_mut().zip(&*gradient) {
                *x = T::from_f32(rms_norm_gradient(*g, x.to_f32() * rstd, *rstd, mean));
            }
        }
    }
}

impl CpuArithmetic for ScaleBy {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let factor = memory.read::<T>(self.factor)[0].to_f32();
        cx.team.for_each(Chunks::new(memory.write::<T>(self.x), ROW_BLOCK * ROW_BLOCK), |_, x| {
            x.iter_mut().for_each(|x| *x = T::from_f32(x.to_f32() * factor));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_same_everywhere, bits, dot, fastest, slopes, values, wide};
    use super::*;
    use half::bf16;

    const EPS: f32 = 1e-2;
    const TOKENS: usize = 70;
    const HEADS: [NormedHeads; 2] = [heads(false), heads(true)];

    const fn heads(values_are_keys: bool) -> NormedHeads {
        NormedHeads { heads: 4, kv_heads: 2, head_dim: 6, values_are_keys }
    }

    /// Queries, keys, values if they are stored, and the weights.
    fn inputs<T: Element>(heads: &NormedHeads) -> [Vec<T>; 4] {
        let d = heads.head_dim;
        let elems = [TOKENS * heads.raw() * d, d, d, TOKENS * heads.all() * d];
        std::array::from_fn(|i| values(i as u64 + 1, elems[i]))
    }

    fn run<T: Element>(cx: &mut Compute, heads: &NormedHeads, accumulate: bool) -> [Vec<T>; 4] {
        let ([mut qkv, q_weight, k_weight, dout], d) = (inputs::<T>(heads), heads.head_dim);
        let (mut out, mut rstd) = (vec![T::from_f32(f32::NAN); dout.len()], vec![f32::NAN; TOKENS * heads.raw()]);
        qkv_norm(cx, heads, &qkv, [&q_weight, &k_weight], EPS, &mut out, &mut rstd);
        let [mut dq, mut dk] = [7, 8].map(|seed| values::<T>(seed, d));
        qkv_norm_backward(cx, heads, &dout, &mut qkv, [&q_weight, &k_weight], &rstd, (&mut dq, &mut dk, accumulate));
        [out, qkv, dq, dk]
    }

    fn reference(heads: &NormedHeads, qkv: &[f64], weights: [&[f64]; 2]) -> Vec<f64> {
        let (d, ones) = (heads.head_dim, vec![1.0; heads.head_dim]);
        let head = |token: &[f64], head: usize| -> Vec<f64> {
            let x = &token[heads.raw_head(head) * d..][..d];
            let rstd = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / d as f64 + f64::from(EPS)).sqrt();
            let weight = match head {
                head if head < heads.heads => weights[0],
                head if head < heads.heads + heads.kv_heads => weights[1],
                _ => &ones,
            };
            x.iter().zip(weight).map(|(x, w)| x * rstd * w).collect()
        };
        let token = |token: &[f64]| (0..heads.all()).flat_map(|h| head(token, h)).collect::<Vec<_>>();
        qkv.chunks_exact(heads.raw() * d).flat_map(token).collect()
    }

    #[test]
    fn heads_and_gradients_agree_with_f64() {
        for heads in HEADS {
            let [qkv, q_weight, k_weight, dout] = inputs::<f32>(&heads).map(|x| wide(&x));
            let [out, dqkv, dq, dk] = run::<f32>(&mut fastest(), &heads, false);
            assert_close("out", &out, &reference(&heads, &qkv, [&q_weight, &k_weight]), 2e-6);
            assert_close("dqkv", &dqkv, &slopes(&qkv, |x| dot(&reference(&heads, x, [&q_weight, &k_weight]), &dout)), 5e-6);
            assert_close("dq", &dq, &slopes(&q_weight, |w| dot(&reference(&heads, &qkv, [w, &k_weight]), &dout)), 5e-6);
            assert_close("dk", &dk, &slopes(&k_weight, |w| dot(&reference(&heads, &qkv, [&q_weight, w]), &dout)), 5e-6);
            let [.., more, _] = run::<f32>(&mut fastest(), &heads, true);
            let before = values::<f32>(7, heads.head_dim);
            assert_close("dq", &more, &dq.iter().zip(before).map(|(new, old)| f64::from(new + old)).collect::<Vec<_>>(), 1e-6);
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        for heads in HEADS {
            assert_same_everywhere(|cx| run::<bf16>(cx, &heads, true).map(|x| bits(&x)).concat());
        }
    }
}
