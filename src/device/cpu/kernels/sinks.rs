//! Attention sinks, applied after attention.

use super::arithmetic::CpuArithmetic;
use super::math::exp;
use super::reduce::fold2;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK, SUM_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{AttentionShape, Sinks, SinksBackward};
use crate::dtype::Element;

impl CpuArithmetic for Sinks {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        sinks::<T>(cx, &self.shape, memory.read(self.sinks), memory.write(self.out), memory.write(self.lse));
    }
}

/// See [`Sinks`].
pub(crate) fn sinks<T: Element>(cx: &mut Compute, shape: &AttentionShape, sinks: &[T], out: &mut [T], lse: &mut [f32]) {
    let AttentionShape { seq_length, heads, head_dim, .. } = *shape;
    let before = &*lse;
    cx.team.for_each(Chunks::new(out, ROW_BLOCK * heads * head_dim), |block, rows| {
        for (i, out) in rows.chunks_exact_mut(head_dim).enumerate() {
            let (token, head) = (block * ROW_BLOCK + i / heads, i % heads);
            let place = (token / seq_length * heads + head) * seq_length + token % seq_length;
            let (seen, sunk, _) = parts(before[place], sinks[head].to_f32());
            let scale = seen / (seen + sunk);
            out.iter_mut().for_each(|x| *x = T::from_f32(x.to_f32() * scale));
        }
    });
    cx.team.for_each(Chunks::new(lse, seq_length), |row, lse| {
        for lse in lse {
            let (seen, sunk, largest) = parts(*lse, sinks[row % heads].to_f32());
            *lse = largest + (seen + sunk).ln();
        }
    });
}

/// `exp(lse - m)`, `exp(sink - m)` and `m`, where `m` is the larger of `lse` and `sink`.
fn parts(lse: f32, sink: f32) -> (f32, f32, f32) {
    let largest = if sink > lse { sink } else { lse };
    (exp(lse - largest), exp(sink - largest), largest)
}

impl CpuArithmetic for SinksBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let (dout, out, lse) = (memory.read::<T>(self.dout), memory.read(self.out), memory.read(self.lse));
        sinks_backward(cx, &self.shape, (dout, out, lse), memory.read(self.sinks), memory.write(self.dsinks), self.accumulate);
    }
}

/// See [`SinksBackward`]: one sum for each head, in token order and in blocks of [`SUM_BLOCK`] tokens.
pub(crate) fn sinks_backward<T: Element>(
    cx: &mut Compute,
    shape: &AttentionShape,
    (dout, out, lse): (&[T], &[T], &[f32]),
    sinks: &[T],
    dsinks: &mut [T],
    accumulate: bool,
) {
    let AttentionShape { seq_length, heads, head_dim, .. } = *shape;
    cx.team.for_each(Chunks::new(dsinks, 1), |head, dsink| {
        let (sink, tokens) = (sinks[head].to_f32(), shape.tokens());
        let add = |sum: f32, token: usize| {
            let row = (token * heads + head) * head_dim..(token * heads + head + 1) * head_dim;
            let delta = fold2(&dout[row.clone()], &out[row], |sum, dout, out| dout.mul_add(out, sum));
            let p = exp(sink - lse[(token / seq_length * heads + head) * seq_length + token % seq_length]);
            p.mul_add(-delta, sum)
        };
        let blocks = (0..tokens).step_by(SUM_BLOCK).map(|first| first..tokens.min(first + SUM_BLOCK));
        let sum = blocks.fold(0.0f32, |sum, block| sum + block.fold(0.0f32, add));
        dsink[0] = T::from_f32(if accumulate { sum + dsink[0].to_f32() } else { sum });
    });
}

#[cfg(test)]
mod tests {
    use super::super::attention::attention;
    use super::super::attention_backward::{Forward, attention_backward};
    use super::super::testing::{assert_close, assert_same_everywhere, bits, dot, fastest, slopes, values, wide};
    use super::*;
    use half::bf16;

    const SHAPE: AttentionShape =
        AttentionShape { batch: 2, seq_length: 35, heads: 4, kv_heads: 2, head_dim: 10, scale: 0.3, window: Some(7), softcap: None };

    fn qkv<T: Element>() -> Vec<T> {
        values(1, SHAPE.tokens() * SHAPE.qkv_cols())
    }

    fn forward<T: Element>(cx: &mut Compute, qkv: &[T], sink: &[T]) -> (Vec<T>, Vec<f32>) {
        let (mut out, mut lse) = (vec![T::from_f32(0.0); SHAPE.tokens() * SHAPE.out_cols()], vec![0.0; SHAPE.tokens() * SHAPE.heads]);
        attention(cx, &SHAPE, qkv, None, &mut out, &mut lse);
        sinks(cx, &SHAPE, sink, &mut out, &mut lse);
        (out, lse)
    }

    /// Attention with an additional column for the sink, in f64.
    fn reference(qkv: &[f64], sinks: &[f64]) -> Vec<f64> {
        let AttentionShape { seq_length, heads, kv_heads, head_dim, .. } = SHAPE;
        let at = |token: usize, head: usize| &qkv[token * SHAPE.qkv_cols() + head * head_dim..][..head_dim];
        let one = |token: usize, head: usize| {
            let (start, key_head) = (token / seq_length * seq_length, heads + head / (heads / kv_heads));
            let keys = start.max((token + 1).saturating_sub(7))..token + 1;
            let weights: Vec<f64> =
                keys.clone().map(|key| (f64::from(SHAPE.scale) * dot(at(token, head), at(key, key_head))).exp()).collect();
            let sum = weights.iter().sum::<f64>() + sinks[head].exp();
            let mut out = vec![0.0; head_dim];
            for (key, weight) in keys.zip(weights) {
                out.iter_mut().zip(at(key, key_head + kv_heads)).for_each(|(out, v)| *out += weight / sum * v);
            }
            out
        };
        (0..SHAPE.tokens()).flat_map(|token| (0..heads).flat_map(move |head| one(token, head))).collect()
    }

    fn backward<T: Element>(cx: &mut Compute, sink: &[T], accumulate: bool) -> (Vec<T>, Vec<T>) {
        let (qkv, dout) = (qkv::<T>(), values::<T>(2, SHAPE.tokens() * SHAPE.out_cols()));
        let (out, lse) = forward(cx, &qkv, sink);
        let (mut dqkv, mut dsinks) = (qkv.clone(), values::<T>(3, SHAPE.heads));
        let forward = Forward { dout: &dout, qkv: &qkv, documents: None, out: &out, lse: &lse };
        attention_backward(cx, &SHAPE, None, forward, &mut dqkv);
        sinks_backward(cx, &SHAPE, (&dout, &out, &lse), sink, &mut dsinks, accumulate);
        (dqkv, dsinks)
    }

    #[test]
    fn a_sink_is_a_column_without_a_value() {
        let sink = [-1.0f32, 0.5, 3.0, 20.0];
        let (out, _) = forward(&mut fastest(), &qkv(), &sink);
        assert_close("out", &out, &reference(&wide(&qkv::<f32>()), &wide(&sink)), 1e-6);
    }

    #[test]
    fn gradients_are_slopes() {
        let (sink, dout) = ([-1.0f32, 0.5, 1.5, 2.0], wide(&values::<f32>(2, SHAPE.tokens() * SHAPE.out_cols())));
        let (dqkv, dsinks) = backward(&mut fastest(), &sink, false);
        let (qkv, sink) = (wide(&qkv::<f32>()), wide(&sink));
        assert_close("dsinks", &dsinks, &slopes(&sink, |sink| dot(&reference(&qkv, sink), &dout)), 2e-6);
        for at in [0, 50, 333, 80 * 35 + 7, qkv.len() - 1] {
            let moved = |x: &[f64]| [&qkv[..at], x, &qkv[at + 1..]].concat();
            assert_close("dqkv", &dqkv[at..=at], &slopes(&qkv[at..=at], |x| dot(&reference(&moved(x), &sink), &dout)), 2e-6);
        }
        let added = backward(&mut fastest(), &[-1.0f32, 0.5, 1.5, 2.0], true).1;
        let want: Vec<f32> = dsinks.iter().zip(values::<f32>(3, SHAPE.heads)).map(|(d, before)| d + before).collect();
        assert_eq!(added, want);
    }

    #[test]
    fn no_sink_changes_no_bit_and_a_large_one_takes_all() {
        let (qkv, none) = (qkv::<bf16>(), [bf16::NEG_INFINITY; 4]);
        let (mut out, mut lse) = (vec![bf16::ZERO; SHAPE.tokens() * SHAPE.out_cols()], vec![0.0; SHAPE.tokens() * SHAPE.heads]);
        attention(&mut fastest(), &SHAPE, &qkv, None, &mut out, &mut lse);
        let (with_out, with_lse) = forward(&mut fastest(), &qkv, &none);
        assert!(bits(&with_out) == bits(&out) && bits(&with_lse) == bits(&lse));
        assert_eq!(backward(&mut fastest(), &none, false).1, [bf16::ZERO; 4]);
        let all = [bf16::from_f32(500.0); 4];
        assert!(forward(&mut fastest(), &qkv, &all).0.iter().all(|x| *x == bf16::ZERO));
        let (dqkv, dsinks) = backward(&mut fastest(), &all, false);
        assert!(dqkv.iter().chain(&dsinks).all(|x| *x == bf16::ZERO));
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        assert_same_everywhere(|cx| {
            let sink = [0.5, -1.0, 2.0, 0.0].map(bf16::from_f32);
            let (out, lse) = forward(cx, &qkv::<bf16>(), &sink);
            [bits(&out), bits(&lse), bits(&backward(cx, &sink, true).1)].concat()
        });
    }
}
