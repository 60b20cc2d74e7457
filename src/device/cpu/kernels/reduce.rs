//! Sums in a fixed order.
//!
//! Along a row: sixteen partial sums, of which number `l` adds the elements `l`, `l + 16`, ... in ascending order, then a fixed tree. A
//! partial sum adds blocks of [`SUM_BLOCK`] terms, then the element behind the last sixteen, if there is one. Down the columns: blocks of
//! [`ROW_BLOCK`] rows, each summed in ascending order, then the blocks in ascending order.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::split::{Chunks, Split};
use super::{Compute, ROW_BLOCK, SUM_BLOCK};
use crate::device::BiasBackward;
use crate::device::cpu::task_memory::TaskMemory;
use crate::dtype::Element;

const LANES: usize = 16;

/// Folds pairs of elements with `f(sum, a, b)`, which must start at zero.
#[inline(always)]
pub(crate) fn fold2<A: Element, B: Element>(a: &[A], b: &[B], f: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.chunks(SUM_BLOCK).zip(b.chunks(SUM_BLOCK)) {
        let mut lanes = [0.0f32; LANES];
        for (a, b) in a.iter().zip(b) {
            for l in 0..LANES {
                lanes[l] = f(lanes[l], a[l].to_f32(), b[l].to_f32());
            }
        }
        add_lanes(&mut sums, &lanes);
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *sum = f(*sum, a.to_f32(), b.to_f32());
    }
    tree(sums, |a, b| a + b)
}

/// Folds triples of elements with `f(sum, a, b, c)`.
#[inline(always)]
pub(crate) fn fold3<A: Element, B: Element, C: Element>(a: &[A], b: &[B], c: &[C], f: impl Fn(f32, f32, f32, f32) -> f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let ((a, a_tail), (b, b_tail), (c, c_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    for ((a, b), c) in a.chunks(SUM_BLOCK).zip(b.chunks(SUM_BLOCK)).zip(c.chunks(SUM_BLOCK)) {
        let mut lanes = [0.0f32; LANES];
        for ((a, b), c) in a.iter().zip(b).zip(c) {
            for l in 0..LANES {
                lanes[l] = f(lanes[l], a[l].to_f32(), b[l].to_f32(), c[l].to_f32());
            }
        }
        add_lanes(&mut sums, &lanes);
    }
    for (sum, ((a, b), c)) in sums.iter_mut().zip(a_tail.iter().zip(b_tail).zip(c_tail)) {
        *sum = f(*sum, a.to_f32(), b.to_f32(), c.to_f32());
    }
    tree(sums, |a, b| a + b)
}

#[inline(always)]
fn add_lanes(sums: &mut [f32; LANES], lanes: &[f32; LANES]) {
    for l in 0..LANES {
        sums[l] += lanes[l];
    }
}

/// Folds elements with `f(sum, a)`.
#[inline(always)]
pub(crate) fn fold<A: Element>(a: &[A], f: impl Fn(f32, f32) -> f32) -> f32 {
    fold2(a, a, |sum, a, _| f(sum, a))
}

/// The largest element; NaN is ignored, and a row without numbers gives minus infinity.
#[inline(always)]
pub(crate) fn max<A: Element>(a: &[A]) -> f32 {
    let larger = |m: f32, x: f32| if x > m { x } else { m };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = a.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], chunk[l].to_f32());
        }
    }
    lanes.iter_mut().zip(tail).for_each(|(lane, x)| *lane = larger(*lane, x.to_f32()));
    tree(lanes, larger)
}

#[inline(always)]
fn tree(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] = f(lanes[l], lanes[l + half]);
        }
    }
    lanes[0]
}

/// Visits blocks of [`ROW_BLOCK`] rows and sums over all rows into `out`. `block(block_idx, part, sums)` receives part `block_idx` of
/// `parts` and adds its rows, in ascending order, to `sums`, which starts at zero and has the total length of all slices of `out`.
pub(crate) fn row_blocks<T: Element, S: Split>(
    cx: &mut Compute,
    parts: S,
    out: &mut [(&mut [T], bool)],
    block: impl Fn(usize, S::Part, &mut [f32]) + Sync,
) {
    let cols: usize = out.iter().map(|(out, _)| out.len()).sum();
    let partials = cx.shared.get(parts.count() * cols);
    cx.team.for_each((parts, Chunks::new(partials, cols)), |index, (part, sums)| {
        sums.fill(0.0);
        block(index, part, sums);
    });
    let (total, rest) = partials.split_at_mut(cols);
    rest.chunks_exact(cols).for_each(|sums| add_into(cx.isa, sums, total));
    let mut start = 0;
    for (out, accumulate) in out {
        store(cx.isa, &total[start..start + out.len()], *accumulate, out);
        start += out.len();
    }
}

impl CpuArithmetic for BiasBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        bias_backward::<T>(cx, memory.read(self.dout), memory.write(self.dbias), self.accumulate);
    }
}

/// `dbias (+)=` the column sums of `dout`.
pub(crate) fn bias_backward<T: Element>(cx: &mut Compute, dout: &[T], dbias: &mut [T], accumulate: bool) {
    let (isa, cols) = (cx.isa, dbias.len());
    let blocks = Blocks(dout.len().div_ceil(cols * ROW_BLOCK));
    row_blocks(cx, blocks, &mut [(dbias, accumulate)], |block, (), sums| {
        let rows = &dout[block * cols * ROW_BLOCK..];
        rows[..rows.len().min(cols * ROW_BLOCK)].chunks_exact(cols).for_each(|row| add_into(isa, row, sums));
    });
}

/// Blocks whose only memory is their partial sums.
struct Blocks(usize);

impl Split for Blocks {
    type Part = ();
    fn count(&self) -> usize {
        self.0
    }
    unsafe fn part(&self, _: usize) {}
}

vectorised! {
    /// `sums += row`.
    pub(crate) fn add_into<T>(row: &[T], sums: &mut [f32]) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x.to_f32());
    }
}

vectorised! {
    /// Rounds `values`, plus the present values of `out` with `accumulate`, into `out`.
    pub(crate) fn store<T>(values: &[f32], accumulate: bool, out: &mut [T]) {
        if accumulate {
            out.iter_mut().zip(values).for_each(|(o, x)| *o = T::from_f32(x + o.to_f32()));
        } else {
            out.iter_mut().zip(values).for_each(|(o, x)| *o = T::from_f32(*x));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, fastest, values, wide, widened};
    use super::*;
    use half::bf16;

    #[test]
    fn a_row_folds_in_sixteen_lanes_of_blocks_and_a_tree() {
        for elems in [77, 16 * SUM_BLOCK, 40 * SUM_BLOCK + 5] {
            let x: Vec<f32> = values(1, elems);
            let (runs, tail) = x.as_chunks::<16>();
            let mut lanes = [0.0f32; 16];
            for block in runs.chunks(SUM_BLOCK) {
                lanes.iter_mut().enumerate().for_each(|(l, lane)| *lane += block.iter().fold(0.0, |sum, run| sum + run[l]));
            }
            lanes.iter_mut().zip(tail).for_each(|(lane, x)| *lane += x);
            for half in [8, 4, 2, 1] {
                (0..half).for_each(|l| lanes[l] += lanes[l + half]);
            }
            assert_eq!(fold(&x, |sum, x| sum + x).to_bits(), lanes[0].to_bits(), "{elems}");
            assert_eq!(fold3(&x, &x, &x, |sum, x, _, _| sum + x).to_bits(), lanes[0].to_bits(), "{elems}");
        }
    }

    /// The sum of exponentials of a flat row of logits, whose roundings all have one direction. In 16 chains it is off by up to 2e-4.
    #[test]
    fn a_long_row_of_equal_terms_has_an_accurate_sum() {
        for term in [0.1f32, 0.7, 1.0 / 3.0] {
            let (sum, want) = (fold(&vec![term; 262_144], |sum, x| sum + x), 262_144.0 * f64::from(term));
            let error = (f64::from(sum) / want - 1.0).abs();
            assert!(error < 3e-6, "{term}: off by {error}");
        }
    }

    #[test]
    fn the_maximum_passes_over_nan() {
        for len in [1, 15, 16, 17, 50] {
            for at in 0..len {
                let mut x = vec![-3.0f32; len];
                x[at] = -1.0;
                x[(at + 1) % len] = f32::NAN;
                assert_eq!(max(&x), if len == 1 { f32::NEG_INFINITY } else { -1.0 }, "{at} of {len}");
            }
        }
    }

    fn bias<T: Element>(cx: &mut Compute, dout: &[T], cols: usize, accumulate: bool) -> Vec<T> {
        let mut dbias = values(2, cols);
        bias_backward(cx, dout, &mut dbias, accumulate);
        dbias
    }

    #[test]
    fn columns_sum_over_all_rows() {
        for (rows, cols) in [(1, 1), (63, 5), (64, 40), (65, 1), (300, 33)] {
            let dout = values::<f32>(1, rows * cols);
            for accumulate in [false, true] {
                let mut want = if accumulate { wide(&values::<f32>(2, cols)) } else { vec![0.0; cols] };
                for row in wide(&dout).chunks_exact(cols) {
                    want.iter_mut().zip(row).for_each(|(want, x)| *want += x);
                }
                assert_close("dbias", &bias(&mut fastest(), &dout, cols, accumulate), &want, 3e-6);
            }
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit_and_bf16_rounds_once() {
        let dout = values::<bf16>(1, 300 * 33);
        assert_same_everywhere(|cx| bits(&bias(cx, &dout, 33, true)));
        assert_rounded("dbias", &bias(&mut fastest(), &dout, 33, false), &bias(&mut fastest(), &widened(&dout), 33, false));
    }
}
