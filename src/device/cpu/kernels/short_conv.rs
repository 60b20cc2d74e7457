//! Short causal convolutions. Taps are added from the oldest token to the token itself.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::math::sigmoid;
use super::reduce::row_blocks;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{ShortConv, ShortConvBackward, TAPS};
use crate::dtype::Element;

impl CpuArithmetic for ShortConv {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let rows = DocumentRows { documents: self.documents.map(|documents| memory.read(documents)), seq_length: self.seq_length };
        short_conv::<T>(cx, rows, memory.read(self.x), memory.read(self.weight), memory.write(self.out));
    }
}

/// See [`ShortConv`].
pub(crate) fn short_conv<T: Element>(cx: &mut Compute, rows: DocumentRows<'_>, x: &[T], weight: &[T], out: &mut [T]) {
    let (isa, channels) = (cx.isa, weight.len() / TAPS);
    cx.team.for_each(Chunks::new(out, ROW_BLOCK * channels), |block, out| {
        for (row, out) in out.chunks_exact_mut(channels).enumerate() {
            let token = block * ROW_BLOCK + row;
            let first = token - rows.seen(token);
            convolve(isa, &x[first * channels..(token + 1) * channels], weight, out);
        }
    });
}

impl CpuArithmetic for ShortConvBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let rows = DocumentRows { documents: self.documents.map(|documents| memory.read(documents)), seq_length: self.seq_length };
        let [dout, x, weight] = [self.dout, self.x, self.weight].map(|slice| memory.read::<T>(slice));
        short_conv_backward(cx, rows, (dout, x, weight), memory.write(self.dx), (memory.write(self.dweight), self.accumulate));
    }
}

/// See [`ShortConvBackward`]. The gradient of a token adds the outputs that see it, from its own output to the last.
pub(crate) fn short_conv_backward<T: Element>(
    cx: &mut Compute,
    rows: DocumentRows<'_>,
    (dout, x, weight): (&[T], &[T], &[T]),
    dx: &mut [T],
    (dweight, accumulate): (&mut [T], bool),
) {
    let (isa, channels) = (cx.isa, weight.len() / TAPS);
    let tokens = x.len() / channels;
    let output = |token: usize| {
        let first = token - rows.seen(token);
        (&dout[token * channels..][..channels], &x[first * channels..(token + 1) * channels])
    };
    row_blocks(cx, Chunks::new(dx, ROW_BLOCK * channels), &mut [(dweight, accumulate)], |block, dx, sums| {
        for (row, dx) in dx.chunks_exact_mut(channels).enumerate() {
            let token = block * ROW_BLOCK + row;
            let sees = |distance: usize| token + distance < tokens && rows.seen(token + distance) >= distance;
            let count = (0..TAPS).take_while(|distance| sees(*distance)).count();
            let outputs: [_; TAPS] = std::array::from_fn(|distance| output(token + distance.min(count - 1)));
            deconvolve(isa, &outputs[..count], weight, dx, sums);
        }
    });
}

/// Rows of tokens, and the documents in them.
#[derive(Clone, Copy)]
pub(crate) struct DocumentRows<'a> {
    /// See [`ShortConv::documents`].
    pub(crate) documents: Option<&'a [i32]>,
    pub(crate) seq_length: usize,
}

impl DocumentRows<'_> {
    /// Index of `token` in its document.
    pub(crate) fn index(&self, token: usize) -> usize {
        token % self.seq_length - self.documents.map_or(0, |documents| documents[token] as usize)
    }

    /// Number of earlier tokens that the output of `token` sees.
    fn seen(&self, token: usize) -> usize {
        self.index(token).min(TAPS - 1)
    }
}

/// Sum over the taps of channel `channel`. `x` holds the tokens that the output sees.
#[inline(always)]
fn taps<T: Element>(x: &[T], weight: &[T], channel: usize, channels: usize) -> f32 {
    let missing = TAPS - x.len() / channels;
    (missing..TAPS)
        .fold(0.0, |sum, tap| weight[channel * TAPS + tap].to_f32().mul_add(x[(tap - missing) * channels + channel].to_f32(), sum))
}

vectorised! {
    fn convolve<T>(x: &[T], weight: &[T], out: &mut [T]) {
        let channels = out.len();
        for (channel, out) in out.iter_mut().enumerate() {
            let y = taps(x, weight, channel, channels);
            *out = T::from_f32(y * sigmoid(y));
        }
    }
}

vectorised! {
    /// The gradient of a token from those of the outputs that see it, with the tokens that each of them sees. The first output, which is the
    /// token's own, adds to `sums`, the gradient of the weight.
    fn deconvolve<T>(outputs: &[(&[T], &[T])], weight: &[T], dx: &mut [T], sums: &mut [f32]) {
        let channels = dx.len();
        for (channel, dx) in dx.iter_mut().enumerate() {
            let mut gradient = 0.0f32;
            for (distance, (dout, x)) in outputs.iter().enumerate() {
                let y = taps(x, weight, channel, channels);
                let s = sigmoid(y);
                let dy = dout[channel].to_f32() * (s * y.mul_add(1.0 - s, 1.0));
                gradient = weight[channel * TAPS + TAPS - 1 - distance].to_f32().mul_add(dy, gradient);
                let seen = x.len() / channels;
                for tap in if distance == 0 { TAPS - seen..TAPS } else { 0..0 } {
                    let sum = &mut sums[channel * TAPS + tap];
                    *sum = dy.mul_add(x[(tap + seen - TAPS) * channels + channel].to_f32(), *sum);
                }
            }
            *dx = T::from_f32(gradient);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_same_everywhere, bits, dot, fastest, slopes, values, wide};
    use super::*;
    use half::bf16;

    const CHANNELS: usize = 5;
    /// Two rows of 70 tokens: documents of 1, 2, 3 and 64 tokens.
    const SEQ_LENGTH: usize = 70;
    const TOKENS: usize = 2 * SEQ_LENGTH;

    fn documents() -> Vec<i32> {
        let row = (0..SEQ_LENGTH as i32).map(|t| [0, 1, 1, 3, 3, 3].get(t as usize).copied().unwrap_or(6));
        row.collect::<Vec<_>>().repeat(2)
    }

    fn forward<T: Element>(cx: &mut Compute, documents: Option<&[i32]>, x: &[T], weight: &[T]) -> Vec<T> {
        let mut out = x.to_vec();
        short_conv(cx, DocumentRows { documents, seq_length: SEQ_LENGTH }, x, weight, &mut out);
        out
    }

    fn backward<T: Element>(cx: &mut Compute, documents: Option<&[i32]>, accumulate: bool) -> [Vec<T>; 2] {
        let [dout, x, weight] = [(1, TOKENS * CHANNELS), (2, TOKENS * CHANNELS), (3, TAPS * CHANNELS)].map(|(seed, n)| values(seed, n));
        let (mut dx, mut dweight) = (x.clone(), vec![T::from_f32(1.0); weight.len()]);
        let rows = DocumentRows { documents, seq_length: SEQ_LENGTH };
        short_conv_backward(cx, rows, (&dout, &x, &weight), &mut dx, (&mut dweight, accumulate));
        [dx, dweight]
    }

    fn reference(documents: Option<&[i32]>, x: &[f64], weight: &[f64]) -> Vec<f64> {
        let one = |token: usize, channel: usize| {
            let start = token / SEQ_LENGTH * SEQ_LENGTH + documents.map_or(0, |documents| documents[token] as usize);
            let seen = start.max((token + 1).saturating_sub(TAPS))..token + 1;
            let y: f64 = seen.map(|t| weight[channel * TAPS + TAPS - 1 + t - token] * x[t * CHANNELS + channel]).sum();
            y / (1.0 + (-y).exp())
        };
        (0..TOKENS).flat_map(|token| (0..CHANNELS).map(move |channel| one(token, channel))).collect()
    }

    #[test]
    fn outputs_and_gradients_agree_with_f64_in_rows_and_documents() {
        let documents = documents();
        for documents in [None, Some(&documents[..])] {
            let [dout, x, weight] = [(1, TOKENS * CHANNELS), (2, TOKENS * CHANNELS), (3, TAPS * CHANNELS)].map(|(seed, n)| values(seed, n));
            let [dx, dweight] = backward::<f32>(&mut fastest(), documents, false);
            let (out, [dout, x, weight]) = (forward(&mut fastest(), documents, &x, &weight), [&dout, &x, &weight].map(|x| wide::<f32>(x)));
            assert_close("out", &out, &reference(documents, &x, &weight), 5e-7);
            assert_close("dweight", &dweight, &slopes(&weight, |weight| dot(&reference(documents, &x, weight), &dout)), 2e-6);
            assert_close("dx", &dx, &slopes(&x, |x| dot(&reference(documents, x, &weight), &dout)), 2e-6);
            let [_, added] = backward::<f32>(&mut fastest(), documents, true);
            assert_eq!(added, dweight.iter().map(|x| x + 1.0).collect::<Vec<_>>());
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        let [x, weight] = [(2, TOKENS * CHANNELS), (3, TAPS * CHANNELS)].map(|(seed, n)| values::<bf16>(seed, n));
        assert_same_everywhere(|cx| bits(&forward(cx, Some(&documents()), &x, &weight)));
        assert_same_everywhere(|cx| backward::<bf16>(cx, Some(&documents()), true).map(|x| bits(&x)).concat());
    }
}
