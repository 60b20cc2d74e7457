//! Packed operands and the register tile that multiplies them: the core of matrix multiplication and attention.
//!
//! This is not a library's GEMM because those allocate on every call and choose the order of summation by machine and
//! thread count. Here each element of the result is one chain of fused multiply-adds in ascending `k`, whatever the
//! tile, so the bits are the same everywhere. Chunks of `k` keep panels in cache; between chunks the chain
//! rests in fp32 memory, which changes no bit.

use super::isa::{Isa, Level};
use crate::dtype::Element;

/// Rows of `a` that lie side by side in a packed panel.
pub(crate) const A_PANEL: usize = 8;
/// Columns of `b` that lie side by side in a packed panel.
pub(crate) const B_PANEL: usize = 32;
/// Steps of `k` that run over a panel before the next panel has its turn.
const K_CHUNK: usize = 512;

/// An operand in memory: element `(r, k)`, where `r` counts rows of `a` or columns of `b`, is `data[r * row_step + k * k_step]`.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) row_step: usize,
    pub(crate) k_step: usize,
}

impl<'a, T: Element> Operand<'a, T> {
    /// Rows lie one after the other, `pitch` elements apart.
    pub(crate) fn by_rows(data: &'a [T], pitch: usize) -> Self {
        Self { data, row_step: pitch, k_step: 1 }
    }

    /// Steps of `k` lie one after the other, `pitch` elements apart.
    pub(crate) fn by_k(data: &'a [T], pitch: usize) -> Self {
        Self { data, row_step: 1, k_step: pitch }
    }

    /// Packs `rows` rows from `first` on, `k` steps each, into panels of `WIDTH` rows: widened to fp32, step by step, the last panel
    /// filled up with zeros. `out` holds [`packed_elems`].
    pub(crate) fn pack<const WIDTH: usize>(&self, first: usize, rows: usize, k: usize, out: &mut [f32]) {
        for (panel, out) in out[..packed_elems::<WIDTH>(rows, k)].chunks_exact_mut(WIDTH * k).enumerate() {
            let width = WIDTH.min(rows - panel * WIDTH);
            let start = (first + panel * WIDTH) * self.row_step;
            let steps = out.as_chunks_mut::<WIDTH>().0;
            if self.row_step == 1 {
                for (step, out) in steps.iter_mut().enumerate() {
                    copy_step(&self.data[start + step * self.k_step..][..width], out);
                }
            } else {
                for row in 0..WIDTH {
                    let data = if row < width { &self.data[start + row * self.row_step..][..k] } else { &[] };
                    spread_row(data, row, steps);
                }
            }
        }
    }
}

/// Floats that `rows` rows of `k` steps take in panels of `WIDTH`.
pub(crate) const fn packed_elems<const WIDTH: usize>(rows: usize, k: usize) -> usize {
    rows.next_multiple_of(WIDTH) * k
}

#[inline(always)]
fn copy_step<T: Element, const WIDTH: usize>(data: &[T], out: &mut [f32; WIDTH]) {
    if let Some(data) = data.first_chunk::<WIDTH>() {
        *out = data.map(T::to_f32);
        return;
    }
    out.fill(0.0);
    out.iter_mut().zip(data).for_each(|(o, x)| *o = x.to_f32());
}

#[inline(always)]
fn spread_row<T: Element, const WIDTH: usize>(data: &[T], row: usize, steps: &mut [[f32; WIDTH]]) {
    if data.is_empty() {
        steps.iter_mut().for_each(|step| step[row] = 0.0);
    }
    steps.iter_mut().zip(data).for_each(|(step, x)| step[row] = x.to_f32());
}

/// Packed panels: `stride` floats from one panel to the next.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
}

/// `c += a * b` on packed panels: `c[i, j]` gains `k` products in ascending order. `c` is `size` rows by columns, whole panels
/// both, with rows `pitch` apart.
pub(crate) fn multiply(isa: Isa, a: Panels<'_>, b: Panels<'_>, k: usize, c: &mut [f32], size: (usize, usize), pitch: usize) {
    for k0 in (0..k).step_by(K_CHUNK) {
        let steps = K_CHUNK.min(k - k0);
        for col in (0..size.1).step_by(B_PANEL) {
            let b = &b.data[col / B_PANEL * b.stride + k0 * B_PANEL..][..steps * B_PANEL];
            for row in (0..size.0).step_by(A_PANEL) {
                let a = &a.data[row / A_PANEL * a.stride + k0 * A_PANEL..][..steps * A_PANEL];
                tile(isa, a, b, &mut c[row * pitch + col..], pitch);
            }
        }
    }
}

/// One register tile: all rows of panel `a` times all columns of panel `b`.
///
/// By intrinsics, because what the compiler makes of the plain loop changes with the optimisation level: from full speed to
/// a tenth of it. Each element is the same chain of fused multiply-adds in all three.
fn tile(isa: Isa, a: &[f32], b: &[f32], c: &mut [f32], pitch: usize) {
    let (a, b) = (a.as_chunks::<A_PANEL>().0, b.as_chunks::<B_PANEL>().0);
    assert!(a.len() == b.len() && c.len() >= (A_PANEL - 1) * pitch + B_PANEL);
    match isa.level() {
        Level::Baseline => tile_scalar(a, b, c, pitch),
        // SAFETY: an `Isa` of this level exists only where the processor has it; the sizes are checked above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { x86::tile_avx2(a, b, c.as_mut_ptr(), pitch) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { x86::tile_avx512(a, b, c.as_mut_ptr(), pitch) },
    }
}

fn tile_scalar(a: &[[f32; A_PANEL]], b: &[[f32; B_PANEL]], c: &mut [f32], pitch: usize) {
    for i in 0..A_PANEL {
        let sums = &mut c[i * pitch..][..B_PANEL];
        for (a, b) in a.iter().zip(b) {
            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum = a[i].mul_add(*b, *sum));
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{A_PANEL, B_PANEL};
    use std::arch::x86_64::*;

    /// Eight rows of two vectors: 16 of the 32 registers hold sums.
    ///
    /// # Safety
    /// `c` has [`A_PANEL`] rows of [`B_PANEL`] floats, `pitch` apart.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn tile_avx512(a: &[[f32; A_PANEL]], b: &[[f32; B_PANEL]], c: *mut f32, pitch: usize) {
        // SAFETY: rows of `c` by the caller's promise, rows of `b` by their type.
        unsafe {
            let row = |i: usize| c.add(i * pitch);
            let mut sums = [[_mm512_setzero_ps(); 2]; A_PANEL];
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = [_mm512_loadu_ps(row(i)), _mm512_loadu_ps(row(i).add(16))];
            }
            for (a, b) in a.iter().zip(b) {
                let (b0, b1) = (_mm512_loadu_ps(b.as_ptr()), _mm512_loadu_ps(b.as_ptr().add(16)));
                for i in 0..A_PANEL {
                    let a = _mm512_set1_ps(a[i]);
                    sums[i] = [_mm512_fmadd_ps(a, b0, sums[i][0]), _mm512_fmadd_ps(a, b1, sums[i][1])];
                }
            }
            for (i, sum) in sums.iter().enumerate() {
                _mm512_storeu_ps(row(i), sum[0]);
                _mm512_storeu_ps(row(i).add(16), sum[1]);
            }
        }
    }

    /// Rows and columns whose sums the 16 registers hold beside their operands.
    const ROWS: usize = 4;
    const COLS: usize = 16;

    /// The tile in parts of [`ROWS`] by [`COLS`].
    ///
    /// # Safety
    /// As [`tile_avx512`].
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn tile_avx2(a: &[[f32; A_PANEL]], b: &[[f32; B_PANEL]], c: *mut f32, pitch: usize) {
        for (i, j) in (0..A_PANEL / ROWS).flat_map(|i| (0..B_PANEL / COLS).map(move |j| (i * ROWS, j * COLS))) {
            // SAFETY: inside the tile.
            unsafe { part_avx2(a, b, (i, j), c.add(i * pitch + j), pitch) };
        }
    }

    /// # Safety
    /// `c` has [`ROWS`] rows of [`COLS`] floats, `pitch` apart; `at` is a part of the tile.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn part_avx2(a: &[[f32; A_PANEL]], b: &[[f32; B_PANEL]], at: (usize, usize), c: *mut f32, pitch: usize) {
        // SAFETY: rows of `c` by the caller's promise, parts of `b` because `at` is inside.
        unsafe {
            let row = |i: usize| c.add(i * pitch);
            let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = [_mm256_loadu_ps(row(i)), _mm256_loadu_ps(row(i).add(8))];
            }
            for (a, b) in a.iter().zip(b) {
                let b = b.as_ptr().add(at.1);
                let (b0, b1) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8)));
                for i in 0..ROWS {
                    let a = _mm256_set1_ps(a[at.0 + i]);
                    sums[i] = [_mm256_fmadd_ps(a, b0, sums[i][0]), _mm256_fmadd_ps(a, b1, sums[i][1])];
                }
            }
            for (i, sum) in sums.iter().enumerate() {
                _mm256_storeu_ps(row(i), sum[0]);
                _mm256_storeu_ps(row(i).add(8), sum[1]);
            }
        }
    }
}
