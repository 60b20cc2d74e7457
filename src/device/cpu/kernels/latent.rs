//! Queries, keys and values of multi-head latent attention, and the width of heads.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{AssembleHeads, AssembleHeadsBackward, LatentHeads, ResizeRows};
use crate::dtype::Element;

impl CpuArithmetic for AssembleHeads {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let inputs = [self.queries, self.projected, self.key].map(|input| memory.read::<T>(input));
        assemble(cx, &self.heads, inputs, (memory.read(self.positions), memory.read(self.table)), memory.write(self.qkv));
    }
}

/// See [`AssembleHeads`].
fn assemble<T: Element>(
    cx: &mut Compute,
    heads: &LatentHeads,
    [queries, projected, key]: [&[T]; 3],
    (positions, table): (&[i32], &[f32]),
    qkv: &mut [T],
) {
    let (isa, cols) = (cx.isa, heads.query_cols());
    let row = |of: usize, token: usize| token * of..(token + 1) * of;
    cx.team.for_each(Chunks::new(qkv, ROW_BLOCK * 3 * cols), |block, rows| {
        for (i, qkv) in rows.chunks_exact_mut(3 * cols).enumerate() {
            let token = block * ROW_BLOCK + i;
            let angles = &table[row(heads.rotary, positions[token] as usize)];
            let inputs = [&queries[row(cols, token)], &projected[row(heads.projected_cols(), token)], &key[row(heads.rotary, token)]];
            assemble_token(isa, *heads, inputs, angles, qkv);
        }
    });
}

vectorised! {
    fn assemble_token<T>(heads: LatentHeads, inputs: [&[T]; 3], angles: &[f32], qkv: &mut [T]) {
        let ([queries, projected, key], LatentHeads { plain, value, .. }, d) = (inputs, heads, heads.head_dim());
        let (q, kv) = qkv.split_at_mut(queries.len());
        let (k, v) = kv.split_at_mut(queries.len());
        for (q, query) in q.chunks_exact_mut(d).zip(queries.chunks_exact(d)) {
            q[..plain].copy_from_slice(&query[..plain]);
            rotate(heads, &query[plain..], angles, 1.0, &mut q[plain..]);
        }
        for ((k, v), projected) in k.chunks_exact_mut(d).zip(v.chunks_exact_mut(d)).zip(projected.chunks_exact(plain + value)) {
            k[..plain].copy_from_slice(&projected[..plain]);
            rotate(heads, key, angles, 1.0, &mut k[plain..]);
            v[..value].copy_from_slice(&projected[plain..]);
            v[value..].fill(T::from_f32(0.0));
        }
    }
}

/// Rotates `x`, the rotating channels of a head, by `angles`, (cos, sin) of each pair, the sines times `sign`.
#[inline(always)]
fn rotate<T: Element>(heads: LatentHeads, x: &[impl Element], angles: &[f32], sign: f32, out: &mut [T]) {
    for (pair, &[cos, sin]) in angles.as_chunks::<2>().0.iter().enumerate() {
        let [first, second] = if heads.interleaved { [2 * pair, 2 * pair + 1] } else { [pair, pair + heads.rotary / 2] };
        let (a, b, sin) = (x[first].to_f32(), x[second].to_f32(), sin * sign);
        out[first] = T::from_f32(a.mul_add(cos, -(b * sin)));
        out[second] = T::from_f32(b.mul_add(cos, a * sin));
    }
}

impl CpuArithmetic for AssembleHeadsBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let outputs = (memory.write(self.dqueries), memory.write(self.dprojected), memory.write(self.dkey));
        let angles = (memory.read(self.positions), memory.read(self.table));
        assemble_backward::<T>(cx, &self.heads, memory.read(self.dqkv), angles, outputs);
    }
}

/// See [`AssembleHeadsBackward`].
fn assemble_backward<T: Element>(
    cx: &mut Compute,
    heads: &LatentHeads,
    dqkv: &[T],
    (positions, table): (&[i32], &[f32]),
    (dqueries, dprojected, dkey): (&mut [T], &mut [T], &mut [T]),
) {
    let (isa, cols, projected, rotary) = (cx.isa, heads.query_cols(), heads.projected_cols(), heads.rotary);
    let chunks =
        ((Chunks::new(dqueries, ROW_BLOCK * cols), Chunks::new(dprojected, ROW_BLOCK * projected)), Chunks::new(dkey, ROW_BLOCK * rotary));
    cx.team.for_each(chunks, |block, ((dqueries, dprojected), dkey)| {
        let outputs = dqueries.chunks_exact_mut(cols).zip(dprojected.chunks_exact_mut(projected)).zip(dkey.chunks_exact_mut(rotary));
        let mut sums = vec![0.0f32; rotary];
        for (i, ((dqueries, dprojected), dkey)) in outputs.enumerate() {
            let token = block * ROW_BLOCK + i;
            let angles = &table[positions[token] as usize * rotary..][..rotary];
            let dqkv = &dqkv[token * 3 * cols..][..3 * cols];
            assemble_token_backward(isa, *heads, dqkv, angles, dqueries, dprojected, dkey, &mut sums);
        }
    });
}

vectorised! {
    /// One token; `sums` is memory for the gradient of the rotated channels of its keys.
    fn assemble_token_backward<T>(
        heads: LatentHeads, dqkv: &[T], angles: &[f32], dqueries: &mut [T], dprojected: &mut [T], dkey: &mut [T], sums: &mut [f32],
    ) {
        let (LatentHeads { plain, value, .. }, d) = (heads, heads.head_dim());
        let (dq, dkv) = dqkv.split_at(dqueries.len());
        let (dk, dv) = dkv.split_at(dqueries.len());
        for (dq, dquery) in dq.chunks_exact(d).zip(dqueries.chunks_exact_mut(d)) {
            dquery[..plain].copy_from_slice(&dq[..plain]);
            rotate(heads, &dq[plain..], angles, -1.0, &mut dquery[plain..]);
        }
        sums.fill(0.0);
        for ((dk, dv), dprojected) in dk.chunks_exact(d).zip(dv.chunks_exact(d)).zip(dprojected.chunks_exact_mut(plain + value)) {
            dprojected[..plain].copy_from_slice(&dk[..plain]);
            dprojected[plain..].copy_from_slice(&dv[..value]);
            sums.iter_mut().zip(&dk[plain..]).for_each(|(sum, dk)| *sum += dk.to_f32());
        }
        rotate(heads, sums, angles, -1.0, dkey);
    }
}

impl CpuArithmetic for ResizeRows {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let (Self { from, to, .. }, x) = (self, memory.read::<T>(self.x));
        cx.team.for_each(Chunks::new(memory.write::<T>(self.out), ROW_BLOCK * to), |block, rows| {
            for (out, x) in rows.chunks_exact_mut(to).zip(x[block * ROW_BLOCK * from..].chunks_exact(from)) {
                let kept = from.min(to);
                out[..kept].copy_from_slice(&x[..kept]);
                out[kept..].fill(T::from_f32(0.0));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_same_everywhere, bits, dot, fastest, slopes, values, wide};
    use super::*;
    use half::bf16;

    const TOKENS: usize = 70;
    const HEADS: [LatentHeads; 2] = [
        LatentHeads { heads: 3, plain: 5, rotary: 4, value: 7, interleaved: true },
        LatentHeads { heads: 2, plain: 4, rotary: 6, value: 10, interleaved: false },
    ];

    /// Positions in two documents, and angles.
    fn angles(heads: &LatentHeads) -> (Vec<i32>, Vec<f32>) {
        ((0..TOKENS as i32).map(|token| token % 40).collect(), values(9, 40 * heads.rotary))
    }

    /// Queries, projected keys and values, keys, and the gradient of the output.
    fn inputs<T: Element>(heads: &LatentHeads) -> [Vec<T>; 4] {
        let cols = [heads.query_cols(), heads.projected_cols(), heads.rotary, 3 * heads.query_cols()];
        std::array::from_fn(|i| values(i as u64 + 1, TOKENS * cols[i]))
    }

    fn run<T: Element>(cx: &mut Compute, heads: &LatentHeads) -> [Vec<T>; 4] {
        let ([queries, projected, key, dqkv], (positions, table)) = (inputs::<T>(heads), angles(heads));
        let empty = |like: &[T]| vec![T::from_f32(f32::NAN); like.len()];
        let [mut qkv, mut dqueries, mut dprojected, mut dkey] = [empty(&dqkv), empty(&queries), empty(&projected), empty(&key)];
        assemble(cx, heads, [&queries, &projected, &key], (&positions, &table), &mut qkv);
        assemble_backward(cx, heads, &dqkv, (&positions, &table), (&mut dqueries, &mut dprojected, &mut dkey));
        [qkv, dqueries, dprojected, dkey]
    }

    fn reference(heads: &LatentHeads, [queries, projected, key]: [&[f64]; 3]) -> Vec<f64> {
        let ((positions, table), d) = (angles(heads), heads.head_dim());
        let rotated = |token: usize, x: &[f64]| -> Vec<f64> {
            let mut out = vec![0.0; heads.rotary];
            for pair in 0..heads.rotary / 2 {
                let at = positions[token] as usize * heads.rotary + 2 * pair;
                let (cos, sin) = (f64::from(table[at]), f64::from(table[at + 1]));
                let [i, j] = if heads.interleaved { [2 * pair, 2 * pair + 1] } else { [pair, pair + heads.rotary / 2] };
                (out[i], out[j]) = (x[i] * cos - x[j] * sin, x[j] * cos + x[i] * sin);
            }
            out
        };
        let token = |token: usize| {
            let mut parts = [const { Vec::new() }; 3];
            for head in 0..heads.heads {
                let query = &queries[token * heads.query_cols() + head * d..][..d];
                let projected =
                    &projected[token * heads.projected_cols() + head * (heads.plain + heads.value)..][..heads.plain + heads.value];
                parts[0].extend([&query[..heads.plain], &rotated(token, &query[heads.plain..])].concat());
                parts[1].extend([&projected[..heads.plain], &rotated(token, &key[token * heads.rotary..][..heads.rotary])].concat());
                parts[2].extend([&projected[heads.plain..], &vec![0.0; d - heads.value]].concat());
            }
            parts.concat()
        };
        (0..TOKENS).flat_map(token).collect()
    }

    #[test]
    fn heads_and_gradients_agree_with_f64() {
        for heads in HEADS {
            let [queries, projected, key, dqkv] = inputs::<f32>(&heads).map(|x| wide(&x));
            let [qkv, dqueries, dprojected, dkey] = run::<f32>(&mut fastest(), &heads);
            assert_close("qkv", &qkv, &reference(&heads, [&queries, &projected, &key]), 2e-7);
            let of = |inputs: [&[f64]; 3]| dot(&reference(&heads, inputs), &dqkv);
            assert_close("dqueries", &dqueries, &slopes(&queries, |x| of([x, &projected, &key])), 2e-6);
            assert_close("dprojected", &dprojected, &slopes(&projected, |x| of([&queries, x, &key])), 2e-6);
            assert_close("dkey", &dkey, &slopes(&key, |x| of([&queries, &projected, x])), 2e-6);
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        for heads in HEADS {
            assert_same_everywhere(|cx| run::<bf16>(cx, &heads).map(|x| bits(&x)).concat());
        }
    }
}
