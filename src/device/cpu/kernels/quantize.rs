//! Quantization of 16-bit floats to 8-bit floats and their scale.

use super::arithmetic::CpuArithmetic;
use super::pointwise::BLOCK_ELEMS;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{AbsMaxScale, Quantize, ScaleCell, WithScale, WritesMatrix, scale_of};
use crate::dtype::{Dtype, E4m3, E5m2, Element};

impl CpuArithmetic for AbsMaxScale {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let scale = memory.write::<f32>(self.scale);
        scale[0] = scale_of(abs_max::<T>(cx, memory.read(self.x)), self.format);
    }
}

impl<K: CpuArithmetic + WritesMatrix> CpuArithmetic for WithScale<K> {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        self.kernel.run::<T>(cx, memory);
        let Some(ScaleCell { scale, format }) = self.cell else { return };
        let (scale, found) = (memory.write::<f32>(scale), scale_of(abs_max::<T>(cx, memory.written(self.kernel.written())), format));
        scale[0] = f32::from_bits(scale[0].to_bits().max(found.to_bits()));
    }
}

/// The largest magnitude; NaN counts as larger than all numbers.
pub(crate) fn abs_max<T: Element>(cx: &mut Compute, x: &[T]) -> f32 {
    let largest = |x: &[T]| x.iter().map(|x| x.to_f32().abs().to_bits()).max().unwrap_or(0);
    let blocks = cx.shared.get(x.len().div_ceil(BLOCK_ELEMS));
    cx.team.for_each(Chunks::new(blocks, 1), |block, out| {
        let start = block * BLOCK_ELEMS;
        out[0] = f32::from_bits(largest(&x[start..x.len().min(start + BLOCK_ELEMS)]));
    });
    f32::from_bits(blocks.iter().map(|x| x.to_bits()).max().unwrap_or(0))
}

impl CpuArithmetic for Quantize {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        match self.format() {
            Ok(Dtype::Float8E5m2) => run::<T, E5m2>(self, cx, memory),
            _ => run::<T, E4m3>(self, cx, memory),
        }
    }
}

fn run<T: Element, Q: Element>(kernel: Quantize, cx: &mut Compute, memory: &TaskMemory<'_>) {
    let (x, scale) = (memory.read::<T>(kernel.x), memory.read::<f32>(kernel.scale)[0]);
    if let Some(out) = kernel.out {
        quantize::<T, Q>(cx, x, scale, memory.write(out));
    }
    if let Some(transposed) = kernel.transposed {
        quantize_transposed::<T, Q>(cx, x, scale, memory.write(transposed), kernel.cols);
    }
}

/// `1 / scale`, which is exact because scales are powers of two. NaN if `scale` is not positive, for example because no kernel computed it.
fn inverse(scale: f32) -> f32 {
    if scale > 0.0 { 1.0 / scale } else { f32::NAN }
}

/// `x / scale`, rounded.
pub(crate) fn quantize<T: Element, Q: Element>(cx: &mut Compute, x: &[T], scale: f32, out: &mut [Q]) {
    let inverse = inverse(scale);
    cx.team.for_each(Chunks::new(out, BLOCK_ELEMS), |block, out| {
        let x = &x[block * BLOCK_ELEMS..][..out.len()];
        out.iter_mut().zip(x).for_each(|(out, x)| *out = Q::from_f32(x.to_f32() * inverse));
    });
}

/// As [`quantize`], for a transposed copy of `x`, `[rows, cols]`.
fn quantize_transposed<T: Element, Q: Element>(cx: &mut Compute, x: &[T], scale: f32, out: &mut [Q], cols: usize) {
    let (inverse, rows) = (inverse(scale), x.len() / cols);
    cx.team.for_each(Chunks::new(out, ROW_BLOCK * rows), |block, out| {
        for (col, out) in (block * ROW_BLOCK..).zip(out.chunks_exact_mut(rows)) {
            let x = x[col..].iter().step_by(cols);
            out.iter_mut().zip(x).for_each(|(out, x)| *out = Q::from_f32(x.to_f32() * inverse));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_same_everywhere, bits, fastest, values};
    use super::*;
    use half::bf16;

    #[test]
    fn a_transposed_matrix_has_the_same_numbers() {
        let (rows, cols) = (48, 160);
        let (x, mut cx): (Vec<bf16>, _) = (values(1, rows * cols), fastest());
        let scale = scale_of(abs_max(&mut cx, &x), Dtype::Float8E4m3);
        let (mut out, mut transposed) = (vec![E4m3(0); x.len()], vec![E4m3(0); x.len()]);
        quantize(&mut cx, &x, scale, &mut out);
        quantize_transposed(&mut cx, &x, scale, &mut transposed, cols);
        for (at, got) in out.iter().enumerate() {
            assert_eq!(*got, E4m3::from_f32(Element::to_f32(x[at]) / scale), "element {at}");
            assert_eq!(*got, transposed[at % cols * rows + at / cols], "element {at}");
        }
    }

    #[test]
    fn the_largest_magnitude_is_found_anywhere_and_nan_is_it() {
        let mut cx = fastest();
        for at in [0, 1, BLOCK_ELEMS - 1, BLOCK_ELEMS, 2 * BLOCK_ELEMS + 3] {
            let mut x = vec![bf16::from_f32(-2.0); 2 * BLOCK_ELEMS + 4];
            x[at] = bf16::from_f32(-3.5);
            assert_eq!(abs_max(&mut cx, &x), 3.5, "at {at}");
            x[at / 2] = bf16::INFINITY;
            assert_eq!(abs_max(&mut cx, &x), f32::INFINITY);
            x[at / 3] = bf16::NAN;
            assert!(abs_max(&mut cx, &x).is_nan());
        }
        assert_eq!(abs_max(&mut cx, &[bf16::NEG_ZERO; 3]).to_bits(), 0);
    }

    #[test]
    fn no_number_comes_out_of_a_scale_that_is_none() {
        for scale in [f32::NAN, 0.0] {
            let mut out = [E5m2(0); 3];
            quantize(&mut fastest(), &[0.0f32, 1.0, -2.0], scale, &mut out);
            assert!(out.iter().all(|x| x.to_f32().is_nan()), "{scale}");
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit() {
        assert_same_everywhere(|cx| {
            let x: Vec<bf16> = values(2, 3 * BLOCK_ELEMS);
            let mut out = vec![E5m2(0); x.len()];
            let scale = scale_of(abs_max(cx, &x), Dtype::Float8E5m2);
            quantize_transposed(cx, &x, scale, &mut out, BLOCK_ELEMS / 4);
            [bits(&out), bits(&[scale])].concat()
        });
    }
}
