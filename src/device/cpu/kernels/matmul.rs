//! Matrix multiplication. See [`panels`](super::panels) for the order of summation.

use super::arithmetic::CpuArithmetic;
use super::isa::KernelIsa;
use super::panels::{A_PANEL, B_PANEL, PanelOperand, Panels, multiply, packed_elems};
use super::pointwise::copy;
use super::split::{Chunks, MatMut};
use super::{Arena, Compute, reduce};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{Matmul, MatmulLayout, MatmulShape, ScaledMatmul};
use crate::dtype::{Dtype, E4m3, E5m2, Element};

/// Rows and columns of `c` in one block: multiples of the panel sizes.
const TILE_ROWS: usize = 64;
const TILE_COLS: usize = 128;
/// Rows of an operand that one block packs.
const PACK_ROWS: usize = 64;
/// Maximum floats of a packed operand; larger matrices are multiplied in slabs.
const PACKED_ELEMS_MAX: usize = 1 << 23;

impl CpuArithmetic for Matmul {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        if self.c.dtype() == T::DTYPE { into::<T, T>(self, cx, memory) } else { into::<T, f32>(self, cx, memory) }
    }
}

/// The product of factors in `T`, rounded to `C`.
fn into<T: Element, C: Element>(kernel: Matmul, cx: &mut Compute, memory: &TaskMemory<'_>) {
    let (bias, c) = (kernel.bias.map(|bias| memory.read::<T>(bias)), memory.write::<C>(kernel.c));
    if let Some(base) = kernel.base_apart() {
        copy(cx, memory.read(base), c);
    }
    let after = AfterSums { scale: 1.0, bias, accumulate: kernel.base.is_some() };
    product::<T, T, T, C>(cx, (kernel.shape, kernel.pitch()), memory.read(kernel.a), memory.read(kernel.b), after, c);
}

impl CpuArithmetic for ScaledMatmul {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        match self.a.dtype() {
            Dtype::Float8E5m2 => scaled::<E5m2, T>(self, cx, memory),
            _ => scaled::<E4m3, T>(self, cx, memory),
        }
    }
}

fn scaled<A: Element, T: Element>(kernel: ScaledMatmul, cx: &mut Compute, memory: &TaskMemory<'_>) {
    let c = memory.write::<T>(kernel.c);
    if let Some(base) = kernel.base_apart() {
        copy(cx, memory.read(base), c);
    }
    let [a_scale, b_scale] = [kernel.a_scale, kernel.b_scale].map(|scale| memory.read::<f32>(scale)[0]);
    let bias = kernel.bias.map(|bias| memory.read::<T>(bias));
    let after = AfterSums { scale: a_scale * b_scale, bias, accumulate: kernel.base.is_some() };
    product::<A, E4m3, T, T>(cx, (kernel.shape(), kernel.k), memory.read(kernel.a), memory.read(kernel.b), after, c);
}

/// `c = a * b (+ bias over columns) (+ c)`; see [`Matmul`].
///
/// # Panics
/// If a slice is shorter than `shape` requires.
pub(crate) fn matmul<T: Element, C: Element>(
    cx: &mut Compute,
    shape: MatmulShape,
    a: &[T],
    b: &[T],
    bias: Option<&[T]>,
    c: &mut [C],
    accumulate: bool,
) {
    let pitch = if shape.layout == MatmulLayout::Tn { shape.m } else { shape.k };
    product(cx, (shape, pitch), a, b, AfterSums { scale: 1.0, bias, accumulate }, c);
}

/// Operations on a product's sums before they are rounded.
#[derive(Clone, Copy)]
struct AfterSums<'a, T> {
    /// Factor of the sums.
    scale: f32,
    bias: Option<&'a [T]>,
    /// Whether to add the sums to the present values of `c`.
    accumulate: bool,
}

impl<T: Element> AfterSums<'_, T> {
    /// Stores `sums` into a part of a row of `c` that begins at column `col`.
    fn store<C: Element>(&self, isa: KernelIsa, sums: &mut [f32], col: usize, c: &mut [C]) {
        if self.scale != 1.0 {
            sums.iter_mut().for_each(|sum| *sum *= self.scale);
        }
        if let Some(bias) = self.bias {
            reduce::add_into(isa, &bias[col..], sums);
        }
        reduce::store(isa, sums, self.accumulate, c);
    }
}

/// The product of a matrix whose stored rows begin `pitch` elements apart, and one with contiguous rows.
fn product<A: Element, B: Element, T: Element, C: Element>(
    cx: &mut Compute,
    (shape, pitch): (MatmulShape, usize),
    a: &[A],
    b: &[B],
    after: AfterSums<'_, T>,
    c: &mut [C],
) {
    let MatmulShape { layout, m, n, k } = shape;
    let a = if layout == MatmulLayout::Tn { PanelOperand::by_k(a, pitch) } else { PanelOperand::by_rows(a, pitch) };
    let b = if layout == MatmulLayout::Nt { PanelOperand::by_rows(b, k) } else { PanelOperand::by_k(b, n) };
    let rows_max = rows_max(k);
    for (row, c) in c[..m * n].chunks_mut(rows_max * n).enumerate().map(|(slab, c)| (slab * rows_max, c)) {
        for col in (0..n).step_by(rows_max) {
            let size = (c.len() / n, rows_max.min(n - col));
            let columns = MatMut::new(c, n).split_cols(col).1.split_cols(size.1).0;
            let after = AfterSums { bias: after.bias.map(|bias| &bias[col..]), ..after };
            slab(cx, (a, row), (b, col), k, after, columns);
        }
    }
}

/// Maximum rows and columns of a slab.
fn rows_max(k: usize) -> usize {
    (PACKED_ELEMS_MAX / k.max(1) / TILE_COLS * TILE_COLS).max(TILE_COLS)
}

/// Allocates the scratch memory for a product of this shape, and of any shape that is not larger in any dimension.
pub(crate) fn reserve(cx: &mut Compute, shape: MatmulShape) {
    let MatmulShape { m, n, k, .. } = shape;
    let slab_max = PACKED_ELEMS_MAX.max(TILE_COLS * k);
    cx.shared.get(packed_elems::<A_PANEL>(m, k).min(slab_max) + packed_elems::<B_PANEL>(n, k).min(slab_max));
    cx.local.get(cx.team.threads() * TILE_ROWS * TILE_COLS);
}

/// Computes the part of `c` that begins at row and column `first` of the operands.
fn slab<A: Element, B: Element, T: Element, C: Element>(
    cx: &mut Compute,
    (a, a_first): (PanelOperand<'_, A>, usize),
    (b, b_first): (PanelOperand<'_, B>, usize),
    k: usize,
    after: AfterSums<'_, T>,
    c: MatMut<'_, C>,
) {
    let (m, n, isa) = (c.rows(), c.cols(), cx.isa);
    let (a_elems, b_elems) = (packed_elems::<A_PANEL>(m, k), packed_elems::<B_PANEL>(n, k));
    let mut arena = Arena(cx.shared.get(a_elems + b_elems));
    let (a_packed, b_packed) = (arena.take(a_elems), arena.take(b_elems));
    cx.team.for_each(Chunks::new(a_packed, PACK_ROWS * k), |block, out| {
        let row = block * PACK_ROWS;
        a.pack::<A_PANEL>(a_first + row, PACK_ROWS.min(m - row), k, out);
    });
    cx.team.for_each(Chunks::new(b_packed, PACK_ROWS * k), |block, out| {
        let row = block * PACK_ROWS;
        b.pack::<B_PANEL>(b_first + row, PACK_ROWS.min(n - row), k, out);
    });
    let across = n.div_ceil(TILE_COLS);
    let sums = Chunks::new(cx.local.get(cx.team.threads() * TILE_ROWS * TILE_COLS), TILE_ROWS * TILE_COLS);
    cx.team.for_each_with(sums, c.tiles(TILE_ROWS, TILE_COLS), |sums, block, mut c| {
        let (row, col) = (block / across * TILE_ROWS, block % across * TILE_COLS);
        let a = Panels { data: &a_packed[row * k..], stride: A_PANEL * k };
        let b = Panels { data: &b_packed[col * k..], stride: B_PANEL * k };
        let size = (c.rows().next_multiple_of(A_PANEL), c.cols().next_multiple_of(B_PANEL));
        sums.fill(0.0);
        multiply(isa, a, b, k, sums, size, TILE_COLS);
        for (row, sums) in sums.chunks_exact_mut(TILE_COLS).take(c.rows()).enumerate() {
            let sums = &mut sums[..c.cols()];
            after.store(isa, sums, col, c.row(row));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::SUM_BLOCK;
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, dot, fastest, values, wide, widened};
    use super::*;
    use MatmulLayout::{Nn, Nt, Tn};
    use half::{bf16, f16};

    const SHAPES: [(usize, usize, usize); 9] =
        [(1, 1, 1), (3, 5, 7), (8, 32, 16), (9, 33, 17), (64, 128, 64), (65, 129, 513), (130, 260, 40), (1, 300, 70), (300, 1, 1030)];

    fn run<T: Element>(cx: &mut Compute, shape: MatmulShape, bias: bool, accumulate: bool) -> Vec<T> {
        let MatmulShape { m, n, k, .. } = shape;
        let (a, b, bias_values, mut c) = (values(1, m * k), values(2, n * k), values(3, n), values(4, m * n));
        matmul::<T, T>(cx, shape, &a, &b, bias.then_some(&bias_values), &mut c, accumulate);
        c
    }

    fn reference<T: Element>(shape: MatmulShape, bias: bool, accumulate: bool) -> Vec<f64> {
        let MatmulShape { layout, m, n, k } = shape;
        let (a, b) = (wide(&values::<T>(1, m * k)), wide(&values::<T>(2, n * k)));
        let (bias_values, mut c) = (wide(&values::<T>(3, n)), wide(&values::<T>(4, m * n)));
        for i in 0..m {
            for j in 0..n {
                let a = |k_idx: usize| if layout == Tn { a[k_idx * m + i] } else { a[i * k + k_idx] };
                let b = |k_idx: usize| if layout == Nt { b[j * k + k_idx] } else { b[k_idx * n + j] };
                let old = if accumulate { c[i * n + j] } else { 0.0 };
                let product: f64 = (0..k).map(|k_idx| a(k_idx) * b(k_idx)).sum();
                c[i * n + j] = product + old + if bias { bias_values[j] } else { 0.0 };
            }
        }
        c
    }

    #[test]
    fn every_layout_and_shape_agrees_with_f64() {
        let mut cx = fastest();
        for (m, n, k) in SHAPES {
            for layout in [Nt, Nn, Tn] {
                for (bias, accumulate) in [(false, false), (true, false), (false, true), (true, true)] {
                    let shape = MatmulShape { layout, m, n, k };
                    let want = reference::<f32>(shape, bias, accumulate);
                    // k rounded partial sums below k, each rounding within 2^-24.
                    assert_close(&format!("{shape:?}"), &run::<f32>(&mut cx, shape, bias, accumulate), &want, 6e-8 * k as f64);
                }
            }
        }
    }

    #[test]
    fn an_element_adds_blocks_of_ascending_chains() {
        let (m, n, k) = (65, 129, 1030);
        let (a, b): (Vec<f32>, Vec<f32>) = (values(1, m * k), values(2, n * k));
        let got = run::<f32>(&mut fastest(), MatmulShape { layout: Nt, m, n, k }, false, false);
        for (i, j) in [(0, 0), (64, 128), (13, 77)] {
            let (a, b) = (a[i * k..][..k].chunks(SUM_BLOCK), b[j * k..][..k].chunks(SUM_BLOCK));
            let chain = |(a, b): (&[f32], &[f32])| a.iter().zip(b).fold(0.0f32, |sum, (a, b)| a.mul_add(*b, sum));
            let want = a.zip(b).map(chain).fold(0.0f32, |sum, block| sum + block);
            assert_eq!(got[i * n + j].to_bits(), want.to_bits(), "element {i},{j}");
        }
    }

    /// The gradient of hidden states that leaves the head. The rows of a trained output matrix share a mean, whose many small terms one
    /// chain would lose.
    #[test]
    fn a_sum_over_a_large_vocabulary_keeps_the_mean_that_rows_share() {
        let (tokens, channels, vocab) = (8, 64, 151_936);
        let (noise, mean, hidden) = (values::<f32>(1, vocab * channels), values::<f32>(2, channels), values::<f32>(3, tokens * channels));
        let weight: Vec<f32> = noise.iter().enumerate().map(|(i, x)| 0.4 * x + mean[i % channels]).collect();
        let rows = wide(&weight);
        let mut slopes = Vec::new();
        for (token, hidden) in wide(&hidden).chunks_exact(channels).enumerate() {
            let mut e: Vec<f64> = rows.chunks_exact(channels).map(|row| dot(row, hidden).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.iter_mut().for_each(|e| *e /= sum * tokens as f64);
            e[token * 18_991 + 7] -= 1.0 / tokens as f64;
            slopes.extend(e.into_iter().map(|x| x as f32));
        }
        let mut got = vec![0.0f32; tokens * channels];
        let shape = MatmulShape { layout: Nn, m: tokens, n: channels, k: vocab };
        matmul(&mut fastest(), shape, &slopes, &weight, None, &mut got, false);
        let mut want = vec![0.0f64; tokens * channels];
        for (want, slopes) in want.chunks_exact_mut(channels).zip(wide(&slopes).chunks_exact(vocab)) {
            for (slope, row) in slopes.iter().zip(rows.chunks_exact(channels)) {
                want.iter_mut().zip(row).for_each(|(want, w)| *want += slope * w);
            }
        }
        let norm = |x: &[f64]| dot(x, x).sqrt();
        let error = (norm(&wide(&got)) / norm(&want) - 1.0).abs();
        assert!(error < 3e-7, "the norm is off by {error}");
        let apart: Vec<f64> = wide(&got).iter().zip(&want).map(|(got, want)| got - want).collect();
        let error = norm(&apart) / norm(&want);
        assert!(error < 2e-6, "the gradient is off by {error}");
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        for layout in [Nt, Nn, Tn] {
            assert_same_everywhere(|cx| bits(&run::<f32>(cx, MatmulShape { layout, m: 131, n: 161, k: 70 }, true, true)));
            assert_same_everywhere(|cx| bits(&run::<bf16>(cx, MatmulShape { layout, m: 131, n: 161, k: 70 }, true, true)));
        }
    }

    #[test]
    fn slabs_change_no_bit() {
        // The sum is so long that the operands of only one tile fit, so `c` is computed in slabs.
        let (m, n, k) = (129, 130, PACKED_ELEMS_MAX / TILE_COLS);
        let (a, b): (Vec<bf16>, Vec<bf16>) = (values(1, m * k), values(2, n * k));
        let mut c = vec![0.0f32; 1];
        let mut whole = vec![bf16::ZERO; m * n];
        let mut cx = fastest();
        matmul(&mut cx, MatmulShape { layout: Nt, m, n, k }, &a, &b, None, &mut whole, false);
        let shape = MatmulShape { layout: Nt, m: 1, n: 1, k };
        for (i, j) in [(0, 0), (128, 129), (127, 127)] {
            let row = |x: &[bf16], r: usize| widened(&x[r * k..][..k]);
            matmul(&mut cx, shape, &row(&a, i), &row(&b, j), None, &mut c, false);
            assert_rounded("c", &whole[i * n + j..][..1], &c);
        }
    }

    fn rounds_once<T: Element>() {
        let shape = MatmulShape { layout: Nn, m: 33, n: 40, k: 50 };
        let input = |seed: u64, elems: usize| widened(&values::<T>(seed, elems));
        let (a, b, bias, mut c) = (input(1, 33 * 50), input(2, 40 * 50), input(3, 40), input(4, 33 * 40));
        let mut cx = fastest();
        matmul(&mut cx, shape, &a, &b, Some(&bias), &mut c, true);
        assert_rounded("c", &run::<T>(&mut cx, shape, true, true), &c);
    }

    #[test]
    fn narrow_formats_are_the_f32_result_rounded_once() {
        rounds_once::<bf16>();
        rounds_once::<f16>();
    }

    fn scaled_matmul<A: Element>() {
        let (m, n, k) = (48, 160, 80);
        let shape = MatmulShape { layout: Nt, m, n, k };
        let (a, b): (Vec<A>, Vec<E4m3>) = (values(1, m * k), values(2, n * k));
        let (bias, before): (Vec<bf16>, Vec<bf16>) = (values(3, n), values(4, m * n));
        let (mut cx, mut sums, scale) = (fastest(), vec![0f32; m * n], 0.25);
        matmul(&mut cx, shape, &widened(&a), &widened(&b), None, &mut sums, false);
        for (with_bias, accumulate) in [(false, false), (true, false), (true, true)] {
            let mut c = before.clone();
            let after = AfterSums { scale, bias: with_bias.then_some(&bias[..]), accumulate };
            product(&mut cx, (shape, k), &a, &b, after, &mut c);
            let added = |i: usize, sum: f32| if with_bias { sum + Element::to_f32(bias[i % n]) } else { sum };
            let kept = |i: usize, sum: f32| if accumulate { sum + Element::to_f32(before[i]) } else { sum };
            let want: Vec<f32> = sums.iter().enumerate().map(|(i, sum)| kept(i, added(i, sum * scale))).collect();
            assert_rounded("c", &c, &want);
        }
        product(&mut cx, (shape, k), &a, &b, AfterSums::<bf16> { scale: f32::NAN, bias: None, accumulate: false }, &mut sums);
        assert!(sums.iter().all(|sum| sum.is_nan()));
    }

    #[test]
    fn numbers_of_8_bits_are_multiplied_by_value() {
        scaled_matmul::<E4m3>();
        scaled_matmul::<E5m2>();
    }
}
