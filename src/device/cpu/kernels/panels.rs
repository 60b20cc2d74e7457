//! Packed operands and the register tile that multiplies them: the core of matrix multiplication and attention.
//!
//! GEMM libraries are not used because they allocate on every call and choose the order of summation by machine and thread count. Here each
//! element of the result is a sum in blocks of [`SUM_BLOCK`] steps of `k`, whatever the tile, so the bits are the same everywhere. A block
//! is one chain of fused multiply-adds in ascending `k`. The blocks are added in ascending order. The panels of a block stay in cache.

use super::SUM_BLOCK;
use super::isa::{KernelIsa, Level};
use crate::dtype::Element;

/// Rows of `a` that are interleaved in a packed panel.
pub(crate) const A_PANEL: usize = 8;
/// Columns of `b` that are interleaved in a packed panel.
pub(crate) const B_PANEL: usize = 32;

/// An operand in memory: element `(r, k)` is `data[r * row_step + k * k_step]`, where `r` counts rows of `a` or columns of `b`.
#[derive(Clone, Copy)]
pub(crate) struct PanelOperand<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) row_step: usize,
    pub(crate) k_step: usize,
}

impl<'a, T: Element> PanelOperand<'a, T> {
    /// An operand with contiguous rows, which begin `pitch` elements apart.
    pub(crate) fn by_rows(data: &'a [T], pitch: usize) -> Self {
        Self { data, row_step: pitch, k_step: 1 }
    }

    /// An operand with contiguous steps of `k`, which begin `pitch` elements apart.
    pub(crate) fn by_k(data: &'a [T], pitch: usize) -> Self {
        Self { data, row_step: 1, k_step: pitch }
    }

    /// Packs `rows` rows of `k` steps, beginning with row `first`, into panels of `WIDTH` rows. Elements are widened to fp32 and stored
    /// step by step; the last panel is padded with zeros. `out` holds [`packed_elems`] floats.
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

/// Floats of `rows` rows of `k` steps in panels of `WIDTH`.
pub(crate) const fn packed_elems<const WIDTH: usize>(rows: usize, k: usize) -> usize {
    rows.next_multiple_of(WIDTH) * k
}

#[inline(always)]
fn copy_step<T: Element, const WIDTH: usize>(data: &[T], out: &mut [f32; WIDTH]) {
    if let Some(data) = data.first_chunk::<WIDTH>() {
        // `map` would be a function call per element in builds without optimization across codegen units.
        out.iter_mut().zip(data).for_each(|(o, x)| *o = x.to_f32());
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

/// Packed panels that begin `stride` floats apart.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
}

/// `c += a * b` on packed panels: each `c[i, j]` adds the sums of blocks of [`SUM_BLOCK`] products in ascending order. `size` is rows by
/// columns of `c`, both whole panels; the rows of `c` begin `pitch` elements apart.
///
/// # Panics
/// If a panel or a tile exceeds its slice.
pub(crate) fn multiply(isa: KernelIsa, a: Panels<'_>, b: Panels<'_>, k: usize, c: &mut [f32], size: (usize, usize), pitch: usize) {
    // Two rows of sums and their operands fit the 16 registers of AVX2; eight rows fit the 32 registers of AVX-512.
    let (rows, tile): (usize, TileKernel) = match isa.level() {
        Level::Baseline => (2, tile::<f32, 2, B_PANEL>),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => (2, x86::tile_avx2),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => (A_PANEL, x86::tile_avx512),
    };
    for k0 in (0..k).step_by(SUM_BLOCK) {
        let steps = SUM_BLOCK.min(k - k0);
        for col in (0..size.1).step_by(B_PANEL) {
            let b = &b.data[col / B_PANEL * b.stride + k0 * B_PANEL..][..steps * B_PANEL];
            for row in (0..size.0).step_by(rows) {
                let a = &a.data[row / A_PANEL * a.stride + k0 * A_PANEL..][..steps * A_PANEL];
                // SAFETY: a `KernelIsa` of this level exists only if the processor supports it.
                unsafe { tile(a, row % A_PANEL, b, &mut c[row * pitch + col..], pitch) };
            }
        }
    }
}

/// `(a, first, b, c, pitch)`; see [`tile`].
type TileKernel = unsafe fn(&[f32], usize, &[f32], &mut [f32], usize);

/// A vector register with the operations of a tile.
///
/// Only this trait uses intrinsics and pointers. Without it the compiler keeps the sums of a tile in registers at some optimisation levels
/// and in memory, thirty times slower, at others.
///
/// # Safety
/// All methods: the processor supports the instructions. `load` and `store`: the pointer is valid for [`Vector::LANES`] floats, at any
/// alignment.
trait Vector: Copy {
    const LANES: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// `self + x`.
    unsafe fn add(self, x: Self) -> Self;
    /// `self + a * b`, rounded once.
    unsafe fn fused_add(self, a: Self, b: Self) -> Self;
}

impl Vector for f32 {
    const LANES: usize = 1;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        x
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller upholds the contract.
        unsafe { *from }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller upholds the contract.
        unsafe { *to = self }
    }
    #[inline(always)]
    unsafe fn add(self, x: Self) -> Self {
        self + x
    }
    #[inline(always)]
    unsafe fn fused_add(self, a: Self, b: Self) -> Self {
        a.mul_add(b, self)
    }
}

/// One register tile: adds to `c` the products of `ROWS` rows of panel `a`, from row `first` on, with all columns of panel `b` in `VECTORS`
/// vectors.
///
/// # Safety
/// The processor supports the instructions of `V`.
///
/// # Panics
/// If the tile exceeds `c`.
// By index, because an iterator over the sums would take their address.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn tile<V: Vector, const ROWS: usize, const VECTORS: usize>(a: &[f32], first: usize, b: &[f32], c: &mut [f32], pitch: usize) {
    const { assert!(V::LANES * VECTORS == B_PANEL && A_PANEL.is_multiple_of(ROWS)) };
    assert!((ROWS - 1) * pitch + B_PANEL <= c.len());
    let c = c.as_mut_ptr();
    // SAFETY: the assertion above keeps the vectors of row i inside `c`; the vectors of a row of `b` fill the row exactly; the caller
    // guarantees the instructions.
    unsafe {
        let at = |i: usize, v: usize| c.add(i.wrapping_mul(pitch).wrapping_add(v * V::LANES));
        let mut sums = [[V::splat(0.0); VECTORS]; ROWS];
        for (a, b) in a.as_chunks::<A_PANEL>().0.iter().zip(b.as_chunks::<B_PANEL>().0) {
            let mut row = [V::splat(0.0); VECTORS];
            for v in 0..VECTORS {
                row[v] = V::load(b.as_ptr().add(v * V::LANES));
            }
            for i in 0..ROWS {
                // Wrapping addition and the remainder remove the bounds checks from the loop.
                let a = V::splat(a[first.wrapping_add(i) % A_PANEL]);
                for v in 0..VECTORS {
                    sums[i][v] = sums[i][v].fused_add(a, row[v]);
                }
            }
        }
        for i in 0..ROWS {
            for v in 0..VECTORS {
                V::load(at(i, v)).add(sums[i][v]).store(at(i, v));
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{A_PANEL, Vector, tile};
    use std::arch::x86_64::*;

    impl Vector for __m256 {
        const LANES: usize = 8;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm256_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn add(self, x: Self) -> Self {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm256_add_ps(self, x) }
        }
        #[inline(always)]
        unsafe fn fused_add(self, a: Self, b: Self) -> Self {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm256_fmadd_ps(a, b, self) }
        }
    }

    impl Vector for __m512 {
        const LANES: usize = 16;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm512_storeu_ps(to, self) }
        }
        #[inline(always)]
        unsafe fn add(self, x: Self) -> Self {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm512_add_ps(self, x) }
        }
        #[inline(always)]
        unsafe fn fused_add(self, a: Self, b: Self) -> Self {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm512_fmadd_ps(a, b, self) }
        }
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn tile_avx2(a: &[f32], first: usize, b: &[f32], c: &mut [f32], pitch: usize) {
        // SAFETY: this function enables the instructions of the tile.
        unsafe { tile::<__m256, 2, 4>(a, first, b, c, pitch) }
    }

    // The tile covers a whole panel, so its first row is 0.
    #[target_feature(enable = "avx512f")]
    pub(super) fn tile_avx512(a: &[f32], _first: usize, b: &[f32], c: &mut [f32], pitch: usize) {
        // SAFETY: this function enables the instructions of the tile.
        unsafe { tile::<__m512, A_PANEL, 2>(a, 0, b, c, pitch) }
    }
}
