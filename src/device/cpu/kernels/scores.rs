//! Parts of attention by products: the specification of a GPU's kernels. The CPU device's own attention keeps no scores in memory.

use super::Compute;
use super::arithmetic::CpuArithmetic;
use super::math::{exp, soft_capped};
use super::matmul::matmul;
use super::reduce::{fold, fold2, max};
use super::split::Chunks;
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{AttentionShape, BatchedMatmul, DeviceSlice, MaskedSoftmax, RoundSums, ScoreTile, SoftmaxBackward, StridedMatrices};
use crate::dtype::{Dtype, Element};
use std::ops::Range;

impl CpuArithmetic for BatchedMatmul {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        if self.c.memory.dtype() == Dtype::Float32 { multiply::<T, f32>(self, cx, memory) } else { multiply::<T, T>(self, cx, memory) }
    }
}

/// Products one after the other, of contiguous copies.
fn multiply<T: Element, C: Element>(kernel: BatchedMatmul, cx: &mut Compute, memory: &TaskMemory<'_>) {
    let BatchedMatmul { shape, count, a, b, c, accumulate } = kernel;
    let [of_a, of_b, [m, n]] = kernel.stored();
    let (a_all, b_all, c_all) = (memory.read::<T>(a.memory), memory.read::<T>(b.memory), memory.write::<C>(c.memory));
    for i in 0..count {
        let (a, b) = (contiguous(a_all, &a, i, of_a), contiguous(b_all, &b, i, of_b));
        let mut sums = vec![C::from_f32(0.0); m * n];
        let at = |row: usize| i * c.stride + row * c.pitch;
        let mut rows = sums.chunks_exact_mut(n).enumerate();
        if accumulate {
            rows.by_ref().for_each(|(row, sums)| sums.copy_from_slice(&c_all[at(row)..][..n]));
        }
        matmul(cx, shape, &a, &b, None, &mut sums, accumulate);
        sums.chunks_exact(n).enumerate().for_each(|(row, sums)| c_all[at(row)..][..n].copy_from_slice(sums));
    }
}

/// Matrix `i`, without the elements between its rows.
fn contiguous<T: Element>(all: &[T], matrices: &StridedMatrices, i: usize, [rows, cols]: [usize; 2]) -> Vec<T> {
    (0..rows).flat_map(|row| &all[i * matrices.stride + row * matrices.pitch..][..cols]).copied().collect()
}

/// Columns of a tile that query `row` sees.
fn seen(tile: &ScoreTile, shape: &AttentionShape, row: usize) -> Range<usize> {
    let query = tile.query + row;
    let first = shape.window.map_or(0, |window| (query + 1).saturating_sub(window)).max(tile.key);
    first - tile.key..query + 1 - tile.key
}

/// Index of row `row` of matrix `i` in `[batch, heads, seq_length]`.
fn row_index(tile: &ScoreTile, shape: &AttentionShape, i: usize, row: usize) -> usize {
    let (sequence, head) = tile.place(shape, i);
    (sequence * shape.heads + head) * shape.seq_length + tile.query + row
}

impl CpuArithmetic for MaskedSoftmax {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let Self { scores, probabilities, lse, tile, shape } = self;
        let (scores, lse) = (memory.read::<f32>(scores), memory.write::<f32>(lse));
        let mut sums = vec![0.0f32; tile.matrices() * tile.rows];
        let parts = (Chunks::new(memory.write::<T>(probabilities), tile.pitch), Chunks::new(&mut sums, 1));
        cx.team.for_each(parts, |at, (out, sum)| {
            let seen = seen(&tile, &shape, at % tile.rows);
            let mut capped: Vec<f32> = scores[at * tile.pitch..][seen.clone()].iter().map(|x| capped(&shape, *x).0).collect();
            let largest = max(&capped);
            capped.iter_mut().for_each(|x| *x = exp(*x - largest));
            let total = fold(&capped, |sum, x| sum + x);
            sum[0] = largest + libm::logf(total);
            out.fill(T::from_f32(0.0));
            let inverse = 1.0 / total;
            out[seen].iter_mut().zip(&capped).for_each(|(out, x)| *out = T::from_f32(x * inverse));
        });
        for (at, sum) in sums.into_iter().enumerate() {
            lse[row_index(&tile, &shape, at / tile.rows, at % tile.rows)] = sum;
        }
    }
}

/// A raw score, scaled and capped, and the slope of the cap.
fn capped(shape: &AttentionShape, raw: f32) -> (f32, f32) {
    shape.softcap.map_or((raw * shape.scale, 1.0), |cap| soft_capped(raw * shape.scale, cap))
}

impl CpuArithmetic for SoftmaxBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let Self { scores, dprobabilities, lse, tile, shape, .. } = self;
        let [scores, dp, lse] = [scores, dprobabilities, lse].map(|x| memory.read::<f32>(x));
        let [dout, out] = [self.dout, self.out].map(|x| memory.read::<T>(x));
        let chunks = |x: DeviceSlice| Chunks::new(memory.write::<T>(x), tile.pitch);
        cx.team.for_each((chunks(self.probabilities), chunks(self.dscores)), |at, (p, ds)| {
            let (i, row) = (at / tile.rows, at % tile.rows);
            let (sequence, head) = tile.place(&shape, i);
            let first = (sequence * shape.seq_length + tile.query + row) * shape.out_cols() + head * shape.head_dim;
            let of_head = first..first + shape.head_dim;
            let delta = fold2(&dout[of_head.clone()], &out[of_head], |sum, dout, out| dout.mul_add(out, sum));
            let lse = lse[row_index(&tile, &shape, i, row)];
            p.fill(T::from_f32(0.0));
            ds.fill(T::from_f32(0.0));
            for col in seen(&tile, &shape, row) {
                let (score, slope) = capped(&shape, scores[at * tile.pitch + col]);
                let probability = exp(score - lse);
                p[col] = T::from_f32(probability);
                ds[col] = T::from_f32(probability * (dp[at * tile.pitch + col] - delta) * slope * shape.scale);
            }
        });
    }
}

impl CpuArithmetic for RoundSums {
    fn run<T: Element>(self, _: &mut Compute, memory: &TaskMemory<'_>) {
        let [rows, cols, count] = self.size;
        let (sums, out) = (memory.read::<f32>(self.sums), memory.write::<T>(self.out.memory));
        for (at, sums) in sums.chunks_exact(cols).enumerate().take(rows * count) {
            let first = at / rows * self.out.stride + at % rows * self.out.pitch;
            out[first..first + cols].iter_mut().zip(sums).for_each(|(out, sum)| *out = T::from_f32(*sum));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::attention::tests::{SHAPES, reference};
    use super::super::attention_backward::tests::reference as backward_reference;
    use super::super::testing::{assert_close, bits, values, wide};
    use super::*;
    use crate::device::cpu::StreamOrder;
    use crate::device::cpu::launch::tests::Harness;
    use crate::device::{AttentionBackward, AttentionForward, Device, Launch, score_passes};
    use half::bf16;

    /// Output, log-sum-exp, and the gradient of `qkv`.
    struct Passes<T> {
        out: Vec<T>,
        lse: Vec<f32>,
        dqkv: Vec<T>,
    }

    fn qkv<T: Element>(shape: &AttentionShape) -> Vec<T> {
        values(1, shape.tokens() * shape.qkv_cols()).iter().map(|x: &f32| T::from_f32(3.0 * x)).collect()
    }

    fn dout<T: Element>(shape: &AttentionShape) -> Vec<T> {
        values(2, shape.tokens() * shape.out_cols())
    }

    /// Both passes by products, or by the CPU's own attention.
    fn passes<T: Element>(
        harness: &mut Harness,
        (shape, block, by_products): (&AttentionShape, Option<usize>, bool),
        [qkv, dout]: [&[T]; 2],
    ) -> Passes<T> {
        let nan = |elems: usize| vec![T::from_f32(f32::NAN); elems];
        let (qkv_at, dout_at) = (harness.with(T::DTYPE, qkv), harness.with(T::DTYPE, dout));
        let [out, dqkv] = [dout.len(), qkv.len()].map(|elems| harness.with(T::DTYPE, &nan(elems)));
        let lse = harness.with(Dtype::Float32, &vec![f32::NAN; shape.tokens() * shape.heads]);
        let bytes = [None, block].map(|block| score_passes::workspace_bytes(shape, T::DTYPE, block)).into_iter().max().unwrap();
        let workspace = harness.with(Dtype::Float32, &vec![f32::NAN; bytes / 4]);
        let forward = AttentionForward { qkv: qkv_at, documents: None, out, lse, shape: *shape };
        let backward = AttentionBackward { dout: dout_at, qkv: qkv_at, documents: None, out, lse, dqkv, shape: *shape, block };
        if by_products {
            score_passes::forward(&mut harness.0, &forward, workspace).unwrap();
            score_passes::backward(&mut harness.0, &backward, workspace).unwrap();
        } else {
            harness.0.launch(forward).unwrap();
            harness.0.launch(backward).unwrap();
        }
        let passes = Passes { out: harness.read(out), lse: harness.read(lse), dqkv: harness.read(dqkv) };
        for memory in [qkv_at, dout_at, out, dqkv, lse, workspace] {
            harness.0.free(memory).unwrap();
        }
        passes
    }

    /// Shapes of all kinds, more sequences than key heads, and heads of 512 channels.
    fn shapes() -> Vec<(AttentionShape, Option<usize>)> {
        let wide = AttentionShape { batch: 1, seq_length: 37, heads: 2, kv_heads: 1, head_dim: 512, ..SHAPES[3] };
        let many = AttentionShape { batch: 5, seq_length: 19, ..SHAPES[3] };
        let all = SHAPES.into_iter().chain([wide, many, AttentionShape { softcap: Some(2.0), window: Some(140), ..SHAPES[6] }]);
        all.flat_map(|shape| [(shape, None), (shape, Some(20))]).collect()
    }

    #[test]
    fn attention_by_products_agrees_with_f64() {
        let mut harness = Harness::with_threads(2, StreamOrder::Threads);
        for (shape, block) in shapes() {
            let (qkv, dout) = (qkv::<f32>(&shape), dout::<f32>(&shape));
            let Passes { out, lse, dqkv } = passes(&mut harness, (&shape, block, true), [&qkv, &dout]);
            let (want_out, want_lse) = reference(&shape, &wide(&qkv), None);
            let name = format!("{shape:?} {block:?}");
            assert_close(&format!("out of {name}"), &out, &want_out, 2e-5);
            assert_close(&format!("lse of {name}"), &lse, &want_lse, 4e-6);
            assert_close(&format!("dqkv of {name}"), &dqkv, &backward_reference(&shape, &wide(&qkv), None, &wide(&dout)), 5e-5);
        }
    }

    #[test]
    fn attention_by_products_in_bfloat16_agrees_with_the_plain_kernels() {
        let mut harness = Harness::with_threads(2, StreamOrder::Threads);
        for (shape, block) in shapes() {
            let (qkv, dout) = (qkv::<bf16>(&shape), dout::<bf16>(&shape));
            let [products, plain] = [true, false].map(|by| passes(&mut harness, (&shape, block, by), [&qkv, &dout]));
            let name = format!("{shape:?} {block:?}");
            assert_near(&format!("out of {name}"), &products.out, &plain.out);
            assert_close(&format!("lse of {name}"), &products.lse, &wide(&plain.lse), 1e-5);
            assert_near(&format!("dqkv of {name}"), &products.dqkv, &plain.dqkv);
        }
    }

    /// Expects the root mean square of the difference to be a small part of that of the numbers, because products round probabilities.
    fn assert_near(name: &str, got: &[bf16], want: &[bf16]) {
        let squares = |x: Vec<f64>| x.into_iter().map(|x| x * x).sum::<f64>();
        let difference = squares(wide(got).into_iter().zip(wide(want)).map(|(got, want)| got - want).collect());
        assert!(difference <= 1e-3 * squares(wide(want)), "{name}: {difference}");
    }

    #[test]
    fn threads_and_the_order_of_streams_change_no_bit_of_attention_by_products() {
        for shape in [SHAPES[5], SHAPES[8]] {
            let (qkv, dout) = (qkv::<bf16>(&shape), dout::<bf16>(&shape));
            let on = |threads, order| {
                let mut harness = Harness::with_threads(threads, order);
                let Passes { out, lse, dqkv } = passes(&mut harness, (&shape, Some(48), true), [&qkv, &dout]);
                [bits(&out), bits(&lse), bits(&dqkv)]
            };
            let alone = on(1, StreamOrder::Threads);
            assert!(
                [(3, StreamOrder::Threads), (2, StreamOrder::Adversary { seed: 5 })].map(|(threads, order)| on(threads, order))
                    == [alone.clone(), alone]
            );
        }
    }

    /// The first sequence and the first key head with its query heads have the bits that they have beside others.
    #[test]
    fn neighbours_change_no_bit_of_attention_by_products() {
        let shape = AttentionShape { batch: 3, kv_heads: 2, heads: 4, ..SHAPES[3] };
        let (all_qkv, all_dout) = (qkv::<bf16>(&shape), dout::<bf16>(&shape));
        let alone = AttentionShape { batch: 1, kv_heads: 1, heads: 2, ..shape };
        let d = shape.head_dim;
        let take = |rows: &[bf16], cols: usize, heads: &[usize]| -> Vec<bf16> {
            let row = |row: &[bf16]| heads.iter().flat_map(|head| row[head * d..][..d].to_vec()).collect::<Vec<_>>();
            rows.chunks_exact(cols).take(shape.seq_length).flat_map(row).collect()
        };
        let (of_qkv, of_out) = ([0, 1, 4, 6], [0, 1]);
        let (one_qkv, one_dout) = (take(&all_qkv, shape.qkv_cols(), &of_qkv), take(&all_dout, shape.out_cols(), &of_out));
        let mut harness = Harness::with_threads(2, StreamOrder::Threads);
        let all = passes(&mut harness, (&shape, Some(20), true), [&all_qkv, &all_dout]);
        let one = passes(&mut harness, (&alone, Some(20), true), [&one_qkv, &one_dout]);
        assert_eq!(bits(&take(&all.out, shape.out_cols(), &of_out)), bits(&one.out));
        assert_eq!(bits(&take(&all.dqkv, shape.qkv_cols(), &of_qkv)), bits(&one.dqkv));
        assert_eq!(all.lse[..2 * shape.seq_length], one.lse[..]);
    }
}
