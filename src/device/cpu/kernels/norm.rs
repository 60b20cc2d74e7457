//! RMS and layer normalisation by rows. The backward pass reads each row once: it adds the gradient of the input and sums the gradients of
//! the parameters.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::reduce::{fold, fold2, fold3, row_blocks};
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use crate::dtype::Element;

impl CpuArithmetic for RmsNorm {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let weight = (memory.read(self.weight), self.plus_one);
        rms_norm::<T>(cx, memory.read(self.x), weight, self.eps, memory.write(self.out), memory.write(self.rstd));
    }
}

/// See [`RmsNorm`].
pub(crate) fn rms_norm<T: Element>(cx: &mut Compute, x: &[T], weight: (&[T], bool), eps: f32, out: &mut [T], rstd: &mut [f32]) {
    let (isa, block_elems) = (cx.isa, ROW_BLOCK * weight.0.len());
    cx.team.for_each((Chunks::new(out, block_elems), Chunks::new(rstd, ROW_BLOCK)), |block, (out, rstd)| {
        rms_norm_rows(isa, &x[block * block_elems..], weight, eps, out, rstd);
    });
}

impl CpuArithmetic for RmsNormBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let [dout, x, weight] = [self.dout, self.x, self.weight].map(|slice| memory.read::<T>(slice));
        rms_norm_backward(
            cx,
            dout,
            x,
            (weight, self.plus_one),
            memory.read(self.rstd),
            memory.write(self.dx),
            (memory.write(self.dweight), self.accumulate),
        );
    }
}

/// See [`RmsNormBackward`].
pub(crate) fn rms_norm_backward<T: Element>(
    cx: &mut Compute,
    dout: &[T],
    x: &[T],
    weight: (&[T], bool),
    rstd: &[f32],
    dx: &mut [T],
    (dweight, accumulate): (&mut [T], bool),
) {
    let (isa, block_elems) = (cx.isa, ROW_BLOCK * weight.0.len());
    row_blocks(cx, Chunks::new(dx, block_elems), &mut [(dweight, accumulate)], |block, dx, sums| {
        let start = block * block_elems;
        rms_norm_backward_rows(isa, &dout[start..], &x[start..], weight, &rstd[block * ROW_BLOCK..], dx, sums);
    });
}

impl CpuArithmetic for LayerNorm {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let affine = (memory.read::<T>(self.weight), memory.read(self.bias));
        layer_norm(cx, memory.read(self.x), affine, self.eps, memory.write(self.out), memory.write(self.stats));
    }
}

/// See [`LayerNorm`].
pub(crate) fn layer_norm<T: Element>(cx: &mut Compute, x: &[T], (weight, bias): (&[T], &[T]), eps: f32, out: &mut [T], stats: &mut [f32]) {
    let (isa, block_elems) = (cx.isa, ROW_BLOCK * weight.len());
    cx.team.for_each((Chunks::new(out, block_elems), Chunks::new(stats, 2 * ROW_BLOCK)), |block, (out, stats)| {
        layer_norm_rows(isa, &x[block * block_elems..], weight, bias, eps, out, stats);
    });
}

impl CpuArithmetic for LayerNormBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let [dout, x, weight] = [self.dout, self.x, self.weight].map(|slice| memory.read::<T>(slice));
        let parameters = (memory.write(self.dweight), memory.write(self.dbias), self.accumulate);
        layer_norm_backward(cx, dout, x, weight, memory.read(self.stats), memory.write(self.dx), parameters);
    }
}

/// See [`LayerNormBackward`].
pub(crate) fn layer_norm_backward<T: Element>(
    cx: &mut Compute,
    dout: &[T],
    x: &[T],
    weight: &[T],
    stats: &[f32],
    dx: &mut [T],
    (dweight, dbias, accumulate): (&mut [T], &mut [T], bool),
) {
    let (isa, block_elems) = (cx.isa, ROW_BLOCK * weight.len());
    row_blocks(cx, Chunks::new(dx, block_elems), &mut [(dweight, accumulate), (dbias, accumulate)], |block, dx, sums| {
        let start = block * block_elems;
        layer_norm_backward_rows(isa, &dout[start..], &x[start..], weight, &stats[2 * block * ROW_BLOCK..], dx, sums);
    });
}

/// The factor that a stored weight represents.
#[inline(always)]
pub(super) fn factor(weight: f32, plus_one: bool) -> f32 {
    if plus_one { 1.0 + weight } else { weight }
}

/// `out = x * rstd * weight`; returns `rstd`.
#[inline(always)]
pub(super) fn rms_norm_row<T: Element>(x: &[T], (weight, plus_one): (&[T], bool), eps: f32, out: &mut [T]) -> f32 {
    let mean_sq = fold(x, |sum, x| x.mul_add(x, sum)) / x.len() as f32;
    let rstd = 1.0 / (mean_sq + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = T::from_f32(x.to_f32() * rstd * factor(w.to_f32(), plus_one));
    }
    rstd
}

/// The mean over a row of `dout * weight * xhat`, where `xhat = x * rstd`.
#[inline(always)]
pub(super) fn rms_norm_mean<T: Element>(dout: &[T], x: &[T], (weight, plus_one): (&[T], bool), rstd: f32) -> f32 {
    fold3(dout, x, weight, |sum, d, x, w| (d * factor(w, plus_one)).mul_add(x * rstd, sum)) / x.len() as f32
}

/// The gradient of one input, from the row's mean and from `dweighted = dout * weight`.
#[inline(always)]
pub(super) fn rms_norm_gradient(dweighted: f32, xhat: f32, rstd: f32, mean: f32) -> f32 {
    rstd * xhat.mul_add(-mean, dweighted)
}

vectorised! {
    fn rms_norm_rows<T>(x: &[T], weight: (&[T], bool), eps: f32, out: &mut [T], rstd: &mut [f32]) {
        let cols = weight.0.len();
        for ((x, out), rstd) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)).zip(rstd) {
            *rstd = rms_norm_row(x, weight, eps, out);
        }
    }
}

vectorised! {
    fn rms_norm_backward_rows<T>(dout: &[T], x: &[T], weight: (&[T], bool), rstd: &[f32], dx: &mut [T], sums: &mut [f32]) {
        let cols = weight.0.len();
        for (((dout, x), dx), rstd) in dout.chunks_exact(cols).zip(x.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols)).zip(rstd) {
            let mean = rms_norm_mean(dout, x, weight, *rstd);
            for ((((dx, d), x), w), sum) in dx.iter_mut().zip(dout).zip(x).zip(weight.0).zip(sums.iter_mut()) {
                let (d, xhat) = (d.to_f32(), x.to_f32() * rstd);
                *sum = d.mul_add(xhat, *sum);
                *dx = T::from_f32(dx.to_f32() + rms_norm_gradient(d * factor(w.to_f32(), weight.1), xhat, *rstd, mean));
            }
        }
    }
}

vectorised! {
    fn layer_norm_rows<T>(x: &[T], weight: &[T], bias: &[T], eps: f32, out: &mut [T], stats: &mut [f32]) {
        let cols = weight.len();
        for ((x, out), stats) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)).zip(stats.as_chunks_mut::<2>().0) {
            let mean = fold(x, |sum, x| sum + x) / cols as f32;
            let variance = fold(x, |sum, x| (x - mean).mul_add(x - mean, sum)) / cols as f32;
            let rstd = 1.0 / (variance + eps).sqrt();
            for (((out, x), w), b) in out.iter_mut().zip(x).zip(weight).zip(bias) {
                *out = T::from_f32(((x.to_f32() - mean) * rstd).mul_add(w.to_f32(), b.to_f32()));
            }
            *stats = [mean, rstd];
        }
    }
}

vectorised! {
    /// `sums` holds `dweight`, then `dbias`.
    fn layer_norm_backward_rows<T>(dout: &[T], x: &[T], weight: &[T], stats: &[f32], dx: &mut [T], sums: &mut [f32]) {
        let cols = weight.len();
        let (dweight, dbias) = sums.split_at_mut(cols);
        let rows = dout.chunks_exact(cols).zip(x.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols));
        for (((dout, x), dx), &[mean, rstd]) in rows.zip(stats.as_chunks::<2>().0) {
            let mean_g = fold2(dout, weight, |sum, d, w| d.mul_add(w, sum)) / cols as f32;
            let mean_gx = fold3(dout, x, weight, |sum, d, x, w| (d * w).mul_add((x - mean) * rstd, sum)) / cols as f32;
            let sums = dweight.iter_mut().zip(dbias.iter_mut());
            for ((((dx, d), x), w), (dweight, dbias)) in dx.iter_mut().zip(dout).zip(x).zip(weight).zip(sums) {
                let (d, xhat) = (d.to_f32(), (x.to_f32() - mean) * rstd);
                *dweight = d.mul_add(xhat, *dweight);
                *dbias += d;
                let gradient = rstd * xhat.mul_add(-mean_gx, d.mul_add(w.to_f32(), -mean_g));
                *dx = T::from_f32(dx.to_f32() + gradient);
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
    /// More rows than a block of rows, numbers of columns around the number of partial sums.
    const SIZES: [(usize, usize); 5] = [(1, 1), (3, 16), (5, 19), (65, 7), (130, 33)];

    struct Run<T> {
        out: Vec<T>,
        stats: Vec<f32>,
        dx: Vec<T>,
        dweight: Vec<T>,
        dbias: Vec<T>,
    }

    impl<T: Element> Run<T> {
        fn bits(&self) -> Vec<u8> {
            [bits(&self.out), bits(&self.stats), bits(&self.dx), bits(&self.dweight), bits(&self.dbias)].concat()
        }
    }

    /// `x`, `dout`, `weight`, `bias`, and the previous values of `dx`, `dweight` and `dbias`.
    fn inputs<T: Element>((rows, cols): (usize, usize)) -> [Vec<T>; 7] {
        let elems = [rows * cols, rows * cols, cols, cols, rows * cols, cols, cols];
        std::array::from_fn(|i| values(i as u64 + 1, elems[i]))
    }

    fn rms<T: Element>(cx: &mut Compute, size: (usize, usize), inputs: [Vec<T>; 7], accumulate: bool) -> Run<T> {
        either_rms(cx, size, inputs, accumulate, false)
    }

    fn rms_plus_one<T: Element>(cx: &mut Compute, size: (usize, usize), inputs: [Vec<T>; 7], accumulate: bool) -> Run<T> {
        either_rms(cx, size, inputs, accumulate, true)
    }

    fn either_rms<T: Element>(
        cx: &mut Compute,
        size: (usize, usize),
        [x, dout, weight, _, mut dx, mut dweight, _]: [Vec<T>; 7],
        accumulate: bool,
        plus_one: bool,
    ) -> Run<T> {
        let (mut out, mut stats) = (x.clone(), vec![0.0; size.0]);
        rms_norm(cx, &x, (&weight, plus_one), EPS, &mut out, &mut stats);
        rms_norm_backward(cx, &dout, &x, (&weight, plus_one), &stats, &mut dx, (&mut dweight, accumulate));
        Run { out, stats, dx, dweight, dbias: Vec::new() }
    }

    fn layer<T: Element>(
        cx: &mut Compute,
        size: (usize, usize),
        [x, dout, weight, bias, mut dx, mut dweight, mut dbias]: [Vec<T>; 7],
        accumulate: bool,
    ) -> Run<T> {
        let (mut out, mut stats) = (x.clone(), vec![0.0; 2 * size.0]);
        layer_norm(cx, &x, (&weight, &bias), EPS, &mut out, &mut stats);
        layer_norm_backward(cx, &dout, &x, &weight, &stats, &mut dx, (&mut dweight, &mut dbias, accumulate));
        Run { out, stats, dx, dweight, dbias }
    }

    /// Both norms in f64; `centred` selects layer norm.
    fn reference(x: &[f64], weight: &[f64], bias: &[f64], centred: bool) -> Vec<f64> {
        let n = weight.len() as f64;
        let row = |x: &[f64]| -> Vec<f64> {
            let mean = if centred { x.iter().sum::<f64>() / n } else { 0.0 };
            let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
            let rstd = 1.0 / (variance + f64::from(EPS)).sqrt();
            (0..x.len()).map(|c| (x[c] - mean) * rstd * weight[c] + if centred { bias[c] } else { 0.0 }).collect()
        };
        x.chunks_exact(weight.len()).flat_map(row).collect()
    }

    fn add(a: &[f64], b: Vec<f64>, on: bool) -> Vec<f64> {
        a.iter().zip(b).map(|(a, b)| if on { a + b } else { b }).collect()
    }

    #[test]
    fn both_norms_and_their_gradients_agree_with_f64() {
        let mut cx = fastest();
        for size in SIZES {
            let inputs = inputs::<f32>(size);
            let [x, dout, weight, bias, dx, dweight, dbias] = inputs.each_ref().map(|x| wide(x));
            for (centred, accumulate) in [(false, false), (false, true), (true, false), (true, true)] {
                let run = if centred { layer } else { rms }(&mut cx, size, inputs.clone(), accumulate);
                assert_close("out", &run.out, &reference(&x, &weight, &bias, centred), 2e-6);
                let slope_x = slopes(&x, |x| dot(&reference(x, &weight, &bias, centred), &dout));
                assert_close("dx", &run.dx, &add(&dx, slope_x, true), 5e-6);
                let slope_weight = slopes(&weight, |weight| dot(&reference(&x, weight, &bias, centred), &dout));
                assert_close("dweight", &run.dweight, &add(&dweight, slope_weight, accumulate), 5e-6);
                if centred {
                    let slope_bias = slopes(&bias, |bias| dot(&reference(&x, &weight, bias, centred), &dout));
                    assert_close("dbias", &run.dbias, &add(&dbias, slope_bias, accumulate), 5e-6);
                }
            }
        }
    }

    #[test]
    fn a_weight_plus_one_is_that_weight() {
        for size in SIZES {
            let inputs = inputs::<f32>(size);
            let mut added = inputs.clone();
            added[2].iter_mut().for_each(|w| *w += 1.0);
            let (stored, plus) = (rms(&mut fastest(), size, added, true), rms_plus_one(&mut fastest(), size, inputs, true));
            assert!(stored.bits() == plus.bits(), "{size:?}");
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        let size = (200, 45);
        assert_same_everywhere(|cx| rms_plus_one(cx, size, inputs::<bf16>(size), true).bits());
        assert_same_everywhere(|cx| {
            [rms(cx, size, inputs::<f32>(size), true).bits(), layer(cx, size, inputs::<f32>(size), true).bits()].concat()
        });
        assert_same_everywhere(|cx| {
            [rms(cx, size, inputs::<bf16>(size), true).bits(), layer(cx, size, inputs::<bf16>(size), true).bits()].concat()
        });
    }

    fn rounds_once<T: Element>() {
        let (mut cx, size) = (fastest(), (70, 21));
        let inputs = inputs::<T>(size);
        for norm in [
            (rms::<T> as fn(&mut _, _, _, _) -> _, rms::<f32> as fn(&mut _, _, _, _) -> _),
            (rms_plus_one::<T>, rms_plus_one::<f32>),
            (layer::<T>, layer::<f32>),
        ] {
            let narrow: Run<T> = norm.0(&mut cx, size, inputs.clone(), true);
            let wide: Run<f32> = norm.1(&mut cx, size, inputs.each_ref().map(|x| widened(x)), true);
            assert_eq!(narrow.stats, wide.stats);
            assert_rounded("out", &narrow.out, &wide.out);
            assert_rounded("dx", &narrow.dx, &wide.dx);
            assert_rounded("dweight", &narrow.dweight, &wide.dweight);
            assert_rounded("dbias", &narrow.dbias, &wide.dbias);
        }
    }

    #[test]
    fn narrow_formats_are_the_f32_result_rounded_once() {
        rounds_once::<bf16>();
        rounds_once::<f16>();
    }
}
