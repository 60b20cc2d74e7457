//! RMS normalisation of every query and key head, as Qwen3 has it before the rotation.

use super::isa::vectorised;
use super::norm::{rms_norm_gradient, rms_norm_mean, rms_norm_row};
use super::reduce::row_blocks;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::AttentionShape;
use crate::dtype::Element;

/// See [`crate::device::Kernels::qk_norm`].
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

/// See [`crate::device::Kernels::qk_norm_backward`].
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
