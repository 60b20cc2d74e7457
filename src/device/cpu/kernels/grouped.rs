//! Matrix products of experts: one for each expert, over the rows of its segment.

use super::arithmetic::CpuArithmetic;
use super::matmul::{matmul, reserve};
use super::reduce::store;
use super::split::Chunks;
use super::{Compute, SUM_BLOCK, SUMS};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{GroupedMatmul, GroupedShape, MatmulLayout, MatmulShape, SegmentSums};
use crate::dtype::Element;
use std::ops::Range;

impl CpuArithmetic for GroupedMatmul {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let (a, b, bounds) = (memory.read::<T>(self.a), memory.read(self.b), memory.read(self.bounds));
        grouped_matmul(cx, self.shape, (a, b), bounds, memory.write(self.c), self.accumulate);
    }
}

/// See [`GroupedMatmul`].
pub(crate) fn grouped_matmul<T: Element>(
    cx: &mut Compute,
    shape: GroupedShape,
    (a, b): (&[T], &[T]),
    bounds: &[i32],
    c: &mut [T],
    accumulate: bool,
) {
    let GroupedShape { layout, rows, outs, ins, .. } = shape;
    // The number of rows of an expert changes from step to step, so the scratch memory is reserved for the maximum.
    reserve(cx, product(layout, rows, outs, ins));
    for (expert, rows) in segments(bounds).enumerate() {
        let (x, y, w) = (part(&rows, ins), part(&rows, outs), part(&(expert..expert + 1), outs * ins));
        let product = product(layout, rows.len(), outs, ins);
        match layout {
            MatmulLayout::Nt => matmul(cx, product, &a[x], &b[w], None, &mut c[y], false),
            MatmulLayout::Nn => matmul(cx, product, &a[y], &b[w], None, &mut c[x], false),
            MatmulLayout::Tn => matmul(cx, product, &a[y], &b[x], None, &mut c[w], accumulate),
        }
    }
}

/// An expert's product over `rows` rows.
fn product(layout: MatmulLayout, rows: usize, outs: usize, ins: usize) -> MatmulShape {
    let (m, n, k) = match layout {
        MatmulLayout::Nt => (rows, outs, ins),
        MatmulLayout::Nn => (rows, ins, outs),
        MatmulLayout::Tn => (outs, ins, rows),
    };
    MatmulShape { layout, m, n, k }
}

/// Rows of each expert.
fn segments(bounds: &[i32]) -> impl Iterator<Item = Range<usize>> {
    bounds.windows(2).map(|ends| ends[0] as usize..ends[1] as usize)
}

/// Range of elements of `rows` in a matrix with `cols` columns.
fn part(rows: &Range<usize>, cols: usize) -> Range<usize> {
    rows.start * cols..rows.end * cols
}

impl CpuArithmetic for SegmentSums {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let weights = self.weights.map(|weights| memory.read(weights));
        let (entries, bounds) = (memory.read(self.entries), memory.read(self.bounds));
        segment_sums::<T>(
            cx,
            memory.read(self.x),
            weights.map(|weights| (weights, entries)),
            bounds,
            memory.write(self.out),
            self.accumulate,
        );
    }
}

/// See [`SegmentSums`]: sums over blocks of [`SUM_BLOCK`] rows. `weights` holds the weights by routing choice and the choice of each row.
pub(crate) fn segment_sums<T: Element>(
    cx: &mut Compute,
    x: &[T],
    weights: Option<(&[f32], &[i32])>,
    bounds: &[i32],
    out: &mut [T],
    accumulate: bool,
) {
    let (isa, cols) = (cx.isa, out.len() / (bounds.len() - 1));
    let weight = |row: usize| weights.map_or(1.0, |(weights, entries)| weights[entries[row] as usize]);
    cx.team.for_each(Chunks::new(out, cols), |expert, out| {
        for (group, out) in out.chunks_mut(SUMS).enumerate() {
            let (mut sums, end) = ([0.0f32; SUMS], bounds[expert + 1] as usize);
            for first in (bounds[expert] as usize..end).step_by(SUM_BLOCK) {
                let mut block = [0.0f32; SUMS];
                for row in first..end.min(first + SUM_BLOCK) {
                    let (w, x) = (weight(row), &x[row * cols + group * SUMS..][..out.len()]);
                    block.iter_mut().zip(x).for_each(|(sum, x)| *sum = w.mul_add(x.to_f32(), *sum));
                }
                sums.iter_mut().zip(block).for_each(|(sum, x)| *sum += x);
            }
            store(isa, &sums[..out.len()], accumulate, out);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_same_everywhere, bits, fastest, values, wide};
    use super::*;
    use MatmulLayout::{Nn, Nt, Tn};
    use half::bf16;

    /// Empty segments, segments of one row, segments that fill no tile, one segment with all rows.
    const BOUNDS: [&[i32]; 5] = [&[0, 0, 1, 1, 68, 70], &[0, 70, 70, 70], &[0, 0, 0, 70], &[0, 70], &[0, 33, 70]];

    fn shape(layout: MatmulLayout, bounds: &[i32]) -> GroupedShape {
        GroupedShape { layout, experts: bounds.len() - 1, rows: 70, outs: 37, ins: 41 }
    }

    fn inputs<T: Element>(shape: GroupedShape) -> [Vec<T>; 3] {
        let GroupedShape { layout, experts, rows, outs, ins } = shape;
        let (x, y, w) = (rows * ins, rows * outs, experts * outs * ins);
        match layout {
            Nt => [values(1, x), values(2, w), values(3, y)],
            Nn => [values(1, y), values(2, w), values(3, x)],
            Tn => [values(1, y), values(2, x), values(3, w)],
        }
    }

    fn run<T: Element>(cx: &mut Compute, shape: GroupedShape, bounds: &[i32], accumulate: bool) -> Vec<T> {
        let [a, b, mut c] = inputs::<T>(shape);
        grouped_matmul(cx, shape, (&a, &b), bounds, &mut c, accumulate);
        c
    }

    #[test]
    fn an_experts_rows_are_a_product_of_their_own_to_the_bit() {
        let mut cx = fastest();
        for bounds in BOUNDS {
            for (layout, accumulate) in [(Nt, false), (Nn, false), (Tn, false), (Tn, true)] {
                let shape = shape(layout, bounds);
                let GroupedShape { outs, ins, .. } = shape;
                let [a, b, mut want] = inputs::<bf16>(shape);
                for (e, ends) in bounds.windows(2).enumerate() {
                    let (start, end) = (ends[0] as usize, ends[1] as usize);
                    let (x, y, w) = (start * ins..end * ins, start * outs..end * outs, e * outs * ins..(e + 1) * outs * ins);
                    let (a, b, c) = match layout {
                        Nt => (&a[x], &b[w], &mut want[y]),
                        Nn => (&a[y], &b[w], &mut want[x]),
                        Tn => (&a[y], &b[x], &mut want[w]),
                    };
                    matmul(&mut cx, product(layout, end - start, outs, ins), a, b, None, c, accumulate);
                }
                assert_eq!(bits(&run::<bf16>(&mut cx, shape, bounds, accumulate)), bits(&want), "{shape:?} {bounds:?}");
            }
        }
    }

    #[test]
    fn an_expert_without_rows_gets_zeros_or_keeps_its_gradient() {
        let shape = shape(Tn, BOUNDS[0]);
        let expert = 37 * 41;
        let [a, b, before] = inputs::<f32>(shape);
        let mut fresh = vec![f32::NAN; before.len()];
        grouped_matmul(&mut fastest(), shape, (&a, &b), BOUNDS[0], &mut fresh, false);
        let kept = run::<f32>(&mut fastest(), shape, BOUNDS[0], true);
        for empty in [0, 2] {
            assert!(fresh[empty * expert..][..expert].iter().all(|x| x.to_bits() == 0));
            assert_eq!(kept[empty * expert..][..expert], before[empty * expert..][..expert]);
        }
        assert!(fresh.iter().all(|x| x.is_finite()));
    }

    #[test]
    fn sums_of_segments_are_weighted_and_agree_with_f64() {
        let (x, weights) = (values::<f32>(1, 70 * 133), values::<f32>(2, 70));
        let entries: Vec<i32> = (0..70).map(|row| (row * 3) % 70).collect();
        for (bounds, accumulate) in BOUNDS.into_iter().flat_map(|bounds| [(bounds, false), (bounds, true)]) {
            let before = values::<f32>(3, (bounds.len() - 1) * 133);
            for weighted in [None, Some((&weights[..], &entries[..]))] {
                let mut want = if accumulate { wide(&before) } else { vec![0.0; before.len()] };
                for (e, ends) in bounds.windows(2).enumerate() {
                    for row in ends[0] as usize..ends[1] as usize {
                        let w = weighted.map_or(1.0, |(weights, entries)| f64::from(weights[entries[row] as usize]));
                        (0..133).for_each(|col| want[e * 133 + col] += w * f64::from(x[row * 133 + col]));
                    }
                }
                let mut out = if accumulate { before.clone() } else { vec![f32::NAN; before.len()] };
                segment_sums(&mut fastest(), &x, weighted, bounds, &mut out, accumulate);
                assert_close("sums", &out, &want, 3e-6);
            }
        }
    }

    #[test]
    fn a_long_segment_is_summed_in_blocks() {
        let rows = 2 * SUM_BLOCK + 3;
        let (x, mut out) = (values::<f32>(1, (rows + 1) * 70), vec![f32::NAN; 140]);
        segment_sums(&mut fastest(), &x, None, &[0, 1, rows as i32 + 1], &mut out, false);
        for (col, got) in out[70..].iter().enumerate() {
            let terms: Vec<f32> = x[70..].iter().skip(col).step_by(70).copied().collect();
            let chain = |terms: &[f32]| terms.iter().fold(0.0f32, |sum, x| sum + x);
            let want = terms.chunks(SUM_BLOCK).fold(0.0, |sum, block| sum + chain(block));
            assert_eq!(got.to_bits(), want.to_bits(), "column {col}");
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        for layout in [Nt, Nn, Tn] {
            assert_same_everywhere(|cx| bits(&run::<bf16>(cx, shape(layout, BOUNDS[0]), BOUNDS[0], layout == Tn)));
        }
        assert_same_everywhere(|cx| {
            let mut out = values::<bf16>(3, 5 * 133);
            segment_sums(cx, &values::<bf16>(1, 70 * 133), None, BOUNDS[0], &mut out, true);
            bits(&out)
        });
    }
}
