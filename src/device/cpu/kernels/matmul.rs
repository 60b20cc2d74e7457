//! Matrix multiplication. See [`panels`](super::panels) for the order of its sums.

use super::panels::{A_PANEL, B_PANEL, Operand, Panels, multiply, packed_elems};
use super::split::{Chunks, MatMut};
use super::{Arena, Compute, reduce};
use crate::device::{MatmulLayout, MatmulShape};
use crate::dtype::Element;

/// Rows and columns of `c` that one block computes: multiples of the panels.
const TILE_ROWS: usize = 64;
const TILE_COLS: usize = 128;
/// Rows of an operand that one block packs.
const PACK_ROWS: usize = 64;
/// Floats that a packed operand may take: wider matrices go in slabs.
const PACKED_ELEMS_MAX: usize = 1 << 23;

/// `c = a * b (+ bias over columns) (+ c)`; see [`crate::device::Kernels::matmul`].
///
/// # Panics
/// If a slice is shorter than `shape` says.
pub(crate) fn matmul<T: Element>(
    cx: &mut Compute,
    shape: MatmulShape,
    a: &[T],
    b: &[T],
    bias: Option<&[T]>,
    c: &mut [T],
    accumulate: bool,
) {
    let MatmulShape { layout, m, n, k } = shape;
    let a = if layout == MatmulLayout::Tn { Operand::by_k(a, m) } else { Operand::by_rows(a, k) };
    let b = if layout == MatmulLayout::Nt { Operand::by_rows(b, k) } else { Operand::by_k(b, n) };
    let rows_max = (PACKED_ELEMS_MAX / k.max(1) / TILE_COLS * TILE_COLS).max(TILE_COLS);
    for (row, c) in c[..m * n].chunks_mut(rows_max * n).enumerate().map(|(slab, c)| (slab * rows_max, c)) {
        for col in (0..n).step_by(rows_max) {
            let size = (c.len() / n, rows_max.min(n - col));
            let columns = MatMut::new(c, n).split_cols(col).1.split_cols(size.1).0;
            slab(cx, (a, row), (b, col), k, bias.map(|bias| &bias[col..]), columns, accumulate);
        }
    }
}

/// The part of `c` that starts at row and column `first` of the operands.
fn slab<T: Element>(
    cx: &mut Compute,
    (a, a_first): (Operand<'_, T>, usize),
    (b, b_first): (Operand<'_, T>, usize),
    k: usize,
    bias: Option<&[T]>,
    c: MatMut<'_, T>,
    accumulate: bool,
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
            if let Some(bias) = bias {
                reduce::add_into(isa, &bias[col..], sums);
            }
            reduce::store(isa, sums, accumulate, c.row(row));
        }
    });
}
