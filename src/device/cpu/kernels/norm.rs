//! RMS and layer normalisation by rows. The backward pass takes each row once: it adds the input's gradient and sums
//! the parameters' gradients.

use super::isa::vectorised;
use super::reduce::{fold, fold2, fold3, row_blocks};
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::dtype::Element;

/// See [`crate::device::Kernels::rms_norm`].
pub(crate) fn rms_norm<T: Element>(cx: &mut Compute, x: &[T], weight: &[T], eps: f32, out: &mut [T], rstd: &mut [f32]) {
    let (isa, block_elems) = (cx.isa, ROW_BLOCK * weight.len());
    cx.team.for_each((Chunks::new(out, block_elems), Chunks::new(rstd, ROW_BLOCK)), |block, (out, rstd)| {
        rms_norm_rows(isa, &x[block * block_elems..], weight, eps, out, rstd);
    });
}

/// See [`crate::device::Kernels::rms_norm_backward`].
pub(crate) fn rms_norm_backward<T: Element>(
    cx: &mut Compute,
    dout: &[T],
    x: &[T],
    weight: &[T],
    rstd: &[f32],
    dx: &mut [T],
    (dweight, accumulate): (&mut [T], bool),
) {
    let (isa, block_elems) = (cx.isa, ROW_BLOCK * weight.len());
    row_blocks(cx, Chunks::new(dx, block_elems), &mut [(dweight, accumulate)], |block, dx, sums| {
        let start = block * block_elems;
        rms_norm_backward_rows(isa, &dout[start..], &x[start..], weight, &rstd[block * ROW_BLOCK..], dx, sums);
    });
}

/// See [`crate::device::Kernels::layer_norm`].
pub(crate) fn layer_norm<T: Element>(cx: &mut Compute, x: &[T], (weight, bias): (&[T], &[T]), eps: f32, out: &mut [T], stats: &mut [f32]) {
    let (isa, block_elems) = (cx.isa, ROW_BLOCK * weight.len());
    cx.team.for_each((Chunks::new(out, block_elems), Chunks::new(stats, 2 * ROW_BLOCK)), |block, (out, stats)| {
        layer_norm_rows(isa, &x[block * block_elems..], weight, bias, eps, out, stats);
    });
}

/// See [`crate::device::Kernels::layer_norm_backward`].
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

/// `out = x * rstd * weight`; the result is `rstd`.
#[inline(always)]
pub(super) fn rms_norm_row<T: Element>(x: &[T], weight: &[T], eps: f32, out: &mut [T]) -> f32 {
    let mean_sq = fold(x, |sum, x| x.mul_add(x, sum)) / x.len() as f32;
    let rstd = 1.0 / (mean_sq + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = T::from_f32(x.to_f32() * rstd * w.to_f32());
    }
    rstd
}

/// The mean over a row of `dout * weight * xhat`, where `xhat = x * rstd`.
#[inline(always)]
pub(super) fn rms_norm_mean<T: Element>(dout: &[T], x: &[T], weight: &[T], rstd: f32) -> f32 {
    fold3(dout, x, weight, |sum, d, x, w| (d * w).mul_add(x * rstd, sum)) / x.len() as f32
}

/// The gradient of one input, from the row's mean and from `dweighted = dout * weight`.
#[inline(always)]
pub(super) fn rms_norm_gradient(dweighted: f32, xhat: f32, rstd: f32, mean: f32) -> f32 {
    rstd * xhat.mul_add(-mean, dweighted)
}

vectorised! {
    fn rms_norm_rows<T>(x: &[T], weight: &[T], eps: f32, out: &mut [T], rstd: &mut [f32]) {
        let cols = weight.len();
        for ((x, out), rstd) in x.chunks_exact(cols).zip(out.chunks_exact_mut(cols)).zip(rstd) {
            *rstd = rms_norm_row(x, weight, eps, out);
        }
    }
}

vectorised! {
    fn rms_norm_backward_rows<T>(dout: &[T], x: &[T], weight: &[T], rstd: &[f32], dx: &mut [T], sums: &mut [f32]) {
        let cols = weight.len();
        for (((dout, x), dx), rstd) in dout.chunks_exact(cols).zip(x.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols)).zip(rstd) {
            let mean = rms_norm_mean(dout, x, weight, *rstd);
            for ((((dx, d), x), w), sum) in dx.iter_mut().zip(dout).zip(x).zip(weight).zip(sums.iter_mut()) {
                let (d, xhat) = (d.to_f32(), x.to_f32() * rstd);
                *sum = d.mul_add(xhat, *sum);
                *dx = T::from_f32(dx.to_f32() + rms_norm_gradient(d * w.to_f32(), xhat, *rstd, mean));
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
