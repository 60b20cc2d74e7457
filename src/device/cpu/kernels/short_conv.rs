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
