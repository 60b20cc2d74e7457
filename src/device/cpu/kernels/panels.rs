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
    // Two rows of sums and their operands fit the 16 registers of AVX2, eight rows the 32 of AVX-512.
    match isa.level() {
        Level::Baseline => tiles::<2>(tile::<2>, a, b, k, c, size, pitch),
        // SAFETY: an `Isa` of this level exists only where the processor has it.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => tiles::<2>(|a, first, b, c, pitch| unsafe { tile_avx2(a, first, b, c, pitch) }, a, b, k, c, size, pitch),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => tiles::<A_PANEL>(|a, _, b, c, pitch| unsafe { tile_avx512(a, b, c, pitch) }, a, b, k, c, size, pitch),
    }
}

/// [`multiply`] with register tiles of `ROWS` rows, which divide a panel of `a`.
#[inline(always)]
fn tiles<const ROWS: usize>(
    tile: impl Fn(&[f32], usize, &[f32], &mut [f32], usize),
    a: Panels<'_>,
    b: Panels<'_>,
    k: usize,
    c: &mut [f32],
    size: (usize, usize),
    pitch: usize,
) {
    for k0 in (0..k).step_by(K_CHUNK) {
        let steps = K_CHUNK.min(k - k0);
        for col in (0..size.1).step_by(B_PANEL) {
            let b = &b.data[col / B_PANEL * b.stride + k0 * B_PANEL..][..steps * B_PANEL];
            for row in (0..size.0).step_by(ROWS) {
                let a = &a.data[row / A_PANEL * a.stride + k0 * A_PANEL..][..steps * A_PANEL];
                tile(a, row % A_PANEL, b, &mut c[row * pitch + col..], pitch);
            }
        }
    }
}

/// One register tile: `ROWS` rows of panel `a` from row `first` on, all columns of panel `b`.
#[inline(always)]
fn tile<const ROWS: usize>(a: &[f32], first: usize, b: &[f32], c: &mut [f32], pitch: usize) {
    let mut sums = [[0.0f32; B_PANEL]; ROWS];
    for (i, sum) in sums.iter_mut().enumerate() {
        sum.copy_from_slice(&c[i * pitch..][..B_PANEL]);
    }
    for (a, b) in a.as_chunks::<A_PANEL>().0.iter().zip(b.as_chunks::<B_PANEL>().0) {
        for i in 0..ROWS {
            for j in 0..B_PANEL {
                // The remainder spares a bounds check, whose way out would keep the sums in memory.
                sums[i][j] = a[(first + i) % A_PANEL].mul_add(b[j], sums[i][j]);
            }
        }
    }
    for (i, sum) in sums.iter().enumerate() {
        c[i * pitch..][..B_PANEL].copy_from_slice(sum);
    }
}

// Functions of their own: inlined into the loops around it, the compiler no longer keeps the sums in registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
#[inline(never)]
fn tile_avx2(a: &[f32], first: usize, b: &[f32], c: &mut [f32], pitch: usize) {
    tile::<2>(a, first, b, c, pitch);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
#[inline(never)]
fn tile_avx512(a: &[f32], b: &[f32], c: &mut [f32], pitch: usize) {
    tile::<A_PANEL>(a, 0, b, c, pitch);
}
