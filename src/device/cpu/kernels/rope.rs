//! Rotary positions.

use super::isa::vectorised;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::AttentionShape;
use crate::dtype::Element;

/// See [`crate::device::Kernels::rope`].
pub(crate) fn rope<T: Element>(cx: &mut Compute, shape: &AttentionShape, qkv: &mut [T], table: &[f32], rotary_dim: usize, inverse: bool) {
    let (isa, cols, head_dim) = (cx.isa, shape.qkv_cols(), shape.head_dim);
    let rotated = (shape.heads + shape.kv_heads) * head_dim;
    let sign = if inverse { -1.0 } else { 1.0 };
    cx.team.for_each(Chunks::new(qkv, ROW_BLOCK * cols), |block, rows| {
        for (row, qkv) in rows.chunks_exact_mut(cols).enumerate() {
            let position = (block * ROW_BLOCK + row) % shape.seq_length;
            rotate_heads(isa, &mut qkv[..rotated], &table[position * rotary_dim..][..rotary_dim], head_dim, sign);
        }
    });
}

vectorised! {
    /// Rotates every head of one token by `table`'s (cos, sin), the sines times `sign`.
    fn rotate_heads<T>(heads: &mut [T], table: &[f32], head_dim: usize, sign: f32) {
        for head in heads.chunks_exact_mut(head_dim) {
            let (low, high) = head[..table.len()].split_at_mut(table.len() / 2);
            for ((low, high), &[cos, sin]) in low.iter_mut().zip(high).zip(table.as_chunks::<2>().0) {
                let (x, y, sin) = (low.to_f32(), high.to_f32(), sin * sign);
                *low = T::from_f32(x.mul_add(cos, -(y * sin)));
                *high = T::from_f32(y.mul_add(cos, x * sin));
            }
        }
    }
}
