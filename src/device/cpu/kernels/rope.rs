//! Rotary position embedding.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{AttentionShape, Rope};
use crate::dtype::Element;

impl CpuArithmetic for Rope {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let table = (memory.read(self.table), self.rotary_dim);
        let way = (self.interleaved, self.inverse);
        rope::<T>(cx, &self.shape, memory.write(self.qkv), memory.read(self.positions), table, way);
    }
}

/// See [`Rope`].
pub(crate) fn rope<T: Element>(
    cx: &mut Compute,
    shape: &AttentionShape,
    qkv: &mut [T],
    positions: &[i32],
    (table, rotary_dim): (&[f32], usize),
    (interleaved, inverse): (bool, bool),
) {
    let (isa, cols, head_dim) = (cx.isa, shape.qkv_cols(), shape.head_dim);
    let rotated = (shape.heads + shape.kv_heads) * head_dim;
    let sign = if inverse { -1.0 } else { 1.0 };
    cx.team.for_each(Chunks::new(qkv, ROW_BLOCK * cols), |block, rows| {
        for (row, qkv) in rows.chunks_exact_mut(cols).enumerate() {
            let position = positions[block * ROW_BLOCK + row] as usize;
            let (heads, table) = (&mut qkv[..rotated], &table[position * rotary_dim..][..rotary_dim]);
            if interleaved { rotate_neighbours(isa, heads, table, head_dim, sign) } else { rotate_heads(isa, heads, table, head_dim, sign) }
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

vectorised! {
    /// As [`rotate_heads`], for pairs of adjacent elements.
    fn rotate_neighbours<T>(heads: &mut [T], table: &[f32], head_dim: usize, sign: f32) {
        for head in heads.chunks_exact_mut(head_dim) {
            for (pair, &[cos, sin]) in head.as_chunks_mut::<2>().0.iter_mut().zip(table.as_chunks::<2>().0) {
                let (x, y, sin) = (pair[0].to_f32(), pair[1].to_f32(), sin * sign);
                *pair = [x.mul_add(cos, -(y * sin)), y.mul_add(cos, x * sin)].map(T::from_f32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, fastest, values, wide, widened};
    use super::*;
    use half::{bf16, f16};

    const SHAPE: AttentionShape =
        AttentionShape { batch: 2, seq_length: 35, heads: 4, kv_heads: 2, head_dim: 10, scale: 1.0, window: None, softcap: None };
    const ELEMS: usize = 2 * 35 * 8 * 10;

    /// Two documents in each row, the second one shorter.
    fn positions() -> Vec<i32> {
        (0..70).map(|t| if t % 35 < 20 { t % 35 } else { t % 35 - 20 }).collect()
    }

    fn run<T: Element>(cx: &mut Compute, rotary_dim: usize, way: (bool, bool)) -> Vec<T> {
        let (mut qkv, table) = (values(1, ELEMS), values::<f32>(2, 35 * rotary_dim));
        rope::<T>(cx, &SHAPE, &mut qkv, &positions(), (&table, rotary_dim), way);
        qkv
    }

    fn reference(rotary_dim: usize, (interleaved, inverse): (bool, bool)) -> Vec<f64> {
        let (mut qkv, table) = (wide(&values::<f32>(1, ELEMS)), wide(&values::<f32>(2, 35 * rotary_dim)));
        for token in 0..70 {
            for (head, pair) in (0..6).flat_map(|head| (0..rotary_dim / 2).map(move |pair| (head, pair))) {
                let angle = &table[positions()[token] as usize * rotary_dim + 2 * pair..];
                let (cos, sin) = (angle[0], if inverse { -angle[1] } else { angle[1] });
                let (first, second) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + rotary_dim / 2) };
                let (first, second) = (token * 80 + head * 10 + first, token * 80 + head * 10 + second);
                let (x, y) = (qkv[first], qkv[second]);
                qkv[first] = x * cos - y * sin;
                qkv[second] = y * cos + x * sin;
            }
        }
        qkv
    }

    #[test]
    fn whole_and_partial_rotations_agree_with_f64() {
        let ways = [(false, false), (false, true), (true, false), (true, true)];
        for (rotary_dim, way) in [10, 6, 2].into_iter().flat_map(|rotary_dim| ways.map(|way| (rotary_dim, way))) {
            assert_close("qkv", &run::<f32>(&mut fastest(), rotary_dim, way), &reference(rotary_dim, way), 2e-7);
        }
    }

    #[test]
    fn the_inverse_undoes_a_rotation() {
        let table: Vec<f32> = (0..35 * 5).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
        let before = values::<f32>(1, ELEMS);
        let mut qkv = before.clone();
        rope(&mut fastest(), &SHAPE, &mut qkv, &positions(), (&table, 10), (false, false));
        assert_ne!(qkv, before);
        rope(&mut fastest(), &SHAPE, &mut qkv, &positions(), (&table, 10), (false, true));
        assert_close("qkv", &qkv, &wide(&before), 1e-6);
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        assert_same_everywhere(|cx| bits(&run::<f32>(cx, 10, (false, false))));
        assert_same_everywhere(|cx| bits(&run::<bf16>(cx, 10, (true, false))));
        assert_same_everywhere(|cx| bits(&run::<f16>(cx, 6, (false, true))));
    }

    #[test]
    fn narrow_formats_are_the_f32_result_rounded_once() {
        let mut wide = widened(&values::<bf16>(1, ELEMS));
        rope(&mut fastest(), &SHAPE, &mut wide, &positions(), (&values::<f32>(2, 350), 10), (false, false));
        assert_rounded("qkv", &run::<bf16>(&mut fastest(), 10, (false, false)), &wide);
    }
}
