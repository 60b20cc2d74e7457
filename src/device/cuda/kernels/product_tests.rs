//! Products in parts, by emulated PTX and a library that multiplies one element after the other.

use super::super::emulator::EmulatedMemory;
use super::*;
use crate::device::{MatmulLayout, MatmulShape};
use crate::dtype::{E4m3, E5m2, Element};
use crate::optim::samples::{assert_same, ordinary, wild};
use half::{bf16, f16};

impl EmulatedMemory {
    fn number(&self, addr: u64, dtype: Dtype, elem: usize) -> f32 {
        let at = DeviceSlice::at(addr + (elem * dtype.bytes()) as u64, 1, dtype);
        match dtype {
            Dtype::Float32 => self.read::<f32>(at)[0],
            Dtype::Bfloat16 => self.read::<bf16>(at)[0].to_f32(),
            Dtype::Float16 => self.read::<f16>(at)[0].to_f32(),
            Dtype::Float8E4m3 => self.read::<E4m3>(at)[0].to_f32(),
            Dtype::Float8E5m2 => self.read::<E5m2>(at)[0].to_f32(),
            Dtype::Int32 | Dtype::Uint16 | Dtype::Uint8 => unreachable!("no float"),
        }
    }
}

/// Elements of a and b for term `l` of the element at `row` and `col`.
fn places(layout: MatmulLayout, [a, b]: [usize; 2], (row, col): (usize, usize), l: usize) -> [usize; 2] {
    match layout {
        MatmulLayout::Nt => [row * a + l, col * b + l],
        MatmulLayout::Nn => [row * a + l, l * b + col],
        MatmulLayout::Tn => [l * a + row, l * b + col],
    }
}

impl ProductQueue for EmulatedMemory {
    fn call(&mut self, call: LibraryProduct, addresses: CallAddresses) -> Result<()> {
        let LibraryProduct { shape: MatmulShape { layout, m, n, k }, pitches, formats, batch, .. } = call;
        let [a_pitch, b_pitch, c_pitch] = pitches;
        let CallAddresses { a, b, addend, adds, c, pointers } = addresses;
        let (count, [a_apart, b_apart, c_apart]) = batch.map_or((1, [0; 3]), |batch| (batch.count, batch.strides));
        assert_eq!((formats.c, call.bias), (Dtype::Float32, 0), "parts are fp32 sums alone");
        let scales = pointers.scales.into_iter().filter(|scale| *scale != 0);
        let scale: f32 = scales.map(|scale| self.number(scale, Dtype::Float32, 0)).product();
        for each in 0..count {
            for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
                let terms = (0..k)
                    .map(|l| places(layout, [a_pitch, b_pitch], (row, col), l))
                    .map(|[x, y]| self.number(a, formats.a, each * a_apart + x) * self.number(b, formats.b, each * b_apart + y));
                let (sum, at) = (terms.sum::<f32>() * scale, each * c_apart + row * c_pitch + col);
                let sum = if adds { self.number(addend, Dtype::Float32, at) + sum } else { sum };
                self.write(DeviceSlice::at(c + 4 * at as u64, 1, Dtype::Float32), &[sum]);
            }
        }
        Ok(())
    }
}

/// A product with its operands as numbers.
struct TestProduct {
    shape: MatmulShape,
    a: Vec<f32>,
    b: Vec<f32>,
    scale: f32,
    bias: Option<Vec<f32>>,
    base: Option<Vec<f32>>,
}

impl TestProduct {
    /// The specification: slices of `terms` in their order, the base, the bias.
    fn sum(&self, pitches: [usize; 2], terms: usize, at: (usize, usize)) -> f32 {
        let MatmulShape { layout, n, k, .. } = self.shape;
        let term = |l| places(layout, pitches, at, l);
        let slice = |start: usize| (start..k.min(start + terms)).map(term).map(|[x, y]| self.a[x] * self.b[y]).sum::<f32>() * self.scale;
        let slices = (0..k).step_by(terms).map(slice).reduce(|sum, slice| sum + slice);
        let added = [self.base.as_ref().map(|base| base[at.0 * n + at.1]), self.bias.as_ref().map(|bias| bias[at.1])];
        added.into_iter().flatten().fold(slices.unwrap(), |sum, x| sum + x)
    }
}

fn floats<T: Element>(values: &[T]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}

/// Compares a product of `A` and `B` into `C` with the specification, in every course, without addends, and with all of them. `offset`
/// moves bias, base and result off their alignment.
fn matches<A: Element, B: Element, C: Element>(shape: MatmulShape, scratch_elems: usize, slices: usize, offset: usize) {
    matches_with_gaps::<A, B, C>((shape, 0), scratch_elems, slices, offset);
}

/// As [`matches`], with `between` elements between the stored rows of the first factor.
fn matches_with_gaps<A: Element, B: Element, C: Element>(
    (shape, between): (MatmulShape, usize),
    scratch_elems: usize,
    slices: usize,
    offset: usize,
) {
    let MatmulShape { layout, m, n, k } = shape;
    let (rows, cols) = if layout == MatmulLayout::Tn { (k, m) } else { (m, k) };
    let pitch = cols + between;
    let (a, b): (Vec<A>, Vec<B>) = (ordinary(1, rows * pitch), ordinary(2, n * k));
    let (bias, before): (Vec<C>, Vec<C>) = (ordinary(3, n), ordinary(4, m * n));
    let is_fp8 = A::DTYPE.is_fp8();
    let pitches = [pitch, if layout == MatmulLayout::Nt { k } else { n }];
    let has_bias = A::DTYPE == C::DTYPE || is_fp8;
    let ways = [(false, false, false), (true, true, true), (true, false, false), (false, true, false)];
    for (with_bias, with_base, in_place) in ways.into_iter().filter(|(with_bias, ..)| has_bias || !with_bias) {
        let mut memory = EmulatedMemory::default();
        let [x, y] = [memory.with(A::DTYPE, 0, &a), memory.with(B::DTYPE, 0, &b)];
        let scales = [0.5f32, 4.0].map(|scale| memory.with(Dtype::Float32, 0, &[scale]));
        let bias_at = memory.with(C::DTYPE, offset, &bias);
        let c = memory.with(C::DTYPE, offset, &before);
        let base_at = if in_place { c } else { memory.with(C::DTYPE, offset, &before) };
        let (bias_at, base_at) = (with_bias.then_some(bias_at), with_base.then_some(base_at));
        let product = if is_fp8 {
            let [a_scale, b_scale] = scales;
            CublasProduct::scaled(ScaledMatmul { a: x, a_scale, b: y, b_scale, bias: bias_at, base: base_at, c, m, n, k }).unwrap()
        } else {
            CublasProduct::of(Matmul { shape, a: x, a_pitch: (between > 0).then_some(pitch), b: y, bias: bias_at, base: base_at, c })
                .unwrap()
        };
        let test = TestProduct {
            shape,
            a: floats(&a),
            b: floats(&b),
            scale: if is_fp8 { 2.0 } else { 1.0 },
            bias: with_bias.then(|| floats(&bias)),
            base: with_base.then(|| floats(&before)),
        };
        let in_slices = [Course::AtOnce, Course::InTurn].map(|course| ProductCut::in_slices(&product.key(), slices, course, scratch_elems));
        for cut in in_slices.into_iter().chain([ProductCut::widened(&product.key(), scratch_elems).filter(|_| is_fp8)]).flatten() {
            memory.write(c, &before);
            multiply_parts(&mut memory, &product, &cut).unwrap();
            let terms = cut.parts(&(0..1)).next().unwrap().terms.len();
            let at = (0..m).flat_map(|row| (0..n).map(move |col| (row, col)));
            let want: Vec<C> = at.map(|at| C::from_f32(test.sum(pitches, terms, at))).collect();
            assert_same(&memory.read::<C>(c), &want, &format!("{cut:?}, bias {with_bias}, base {with_base}"));
        }
    }
}

#[test]
fn parts_add_up_to_the_product_in_every_layout_and_format() {
    for layout in MatmulLayout::ALL {
        for (m, n, k, slices) in [(48, 20, 96, 2), (33, 7, 80, 3), (5, 12, 64, 4)] {
            let shape = MatmulShape { layout, m, n, k };
            matches::<bf16, bf16, bf16>(shape, 2000, slices, 0);
            matches::<f16, f16, f16>(shape, 2000, slices, 1);
            matches::<f32, f32, f32>(shape, 2000, slices, 0);
        }
    }
}

#[test]
fn parts_of_rows_with_gaps_and_parts_of_an_fp32_result_add_up_to_the_product() {
    for layout in MatmulLayout::ALL {
        let shape = MatmulShape { layout, m: 33, n: 12, k: 96 };
        matches_with_gaps::<bf16, bf16, bf16>((shape, 33), 2000, 2, 0);
        matches_with_gaps::<f16, f16, f16>((shape, 7), 2000, 3, 1);
        matches::<bf16, bf16, f32>(shape, 2000, 2, 0);
        matches::<f16, f16, f32>(shape, 2000, 3, 1);
    }
}

#[test]
fn parts_of_factors_of_8_bits_add_up_in_slices_and_widened() {
    for (m, n, k, slices) in [(48, 32, 96, 2), (32, 16, 112, 3)] {
        let shape = MatmulShape { layout: MatmulLayout::Nt, m, n, k };
        for scratch_elems in [2400, 1 << 20] {
            matches::<E4m3, E4m3, bf16>(shape, scratch_elems, slices, 0);
            matches::<E5m2, E4m3, bf16>(shape, scratch_elems, slices, 3);
        }
    }
}

#[test]
fn small_scratch_means_blocks_of_rows() {
    let [x, y, c] = [(48 * 96, Dtype::Float8E5m2), (32 * 96, Dtype::Float8E4m3), (48 * 32, Dtype::Bfloat16)]
        .map(|(elems, dtype)| DeviceSlice::at(256, elems, dtype));
    let scale = DeviceSlice::at(256, 1, Dtype::Float32);
    let kernel = ScaledMatmul { a: x, a_scale: scale, b: y, b_scale: scale, bias: None, base: None, c, m: 48, n: 32, k: 96 };
    let key = CublasProduct::scaled(kernel).unwrap().key();
    let blocks = |cut: Option<ProductCut>| cut.map(|cut| (cut.blocks().count(), cut.slices()));
    assert_eq!(blocks(ProductCut::in_slices(&key, 2, Course::AtOnce, 2400)), Some((2, 2)));
    assert_eq!(blocks(ProductCut::widened(&key, 2400)), Some((2, 3)));
}

/// Widens `values`, in rows of `cols` with `skipped` more between two rows.
fn widens<T: Element>(values: &[T], cols: usize, skipped: usize, scale: Option<f32>) {
    let (pitch, mut memory) = (cols + skipped, EmulatedMemory::default());
    let rows = values.len() / pitch;
    let x = memory.with(T::DTYPE, 0, values);
    let out = memory.with(Dtype::Bfloat16, 0, &vec![bf16::ONE; rows * cols]);
    let at = scale.map(|scale| memory.with(Dtype::Float32, 0, &[scale]));
    Widen { x, pitch, scale: at, out, cols }.enqueue(&mut memory).unwrap();
    let kept = values.chunks_exact(pitch).flat_map(|row| &row[..cols]);
    let want: Vec<bf16> = kept.map(|x| bf16::from_f32(x.to_f32() * scale.unwrap_or(1.0))).collect();
    assert_same(&memory.read::<bf16>(out), &want, &format!("{} with scale {scale:?}", T::DTYPE));
}

#[test]
fn every_number_of_8_bits_is_widened_exactly() {
    let all: Vec<u8> = (0..=u8::MAX).chain(0..=u8::MAX).rev().collect();
    for scale in [None, Some(1.0), Some(0.25), Some(1024.0)] {
        for (cols, skipped) in [(512, 0), (16, 0), (12, 4), (48, 16)] {
            widens::<E4m3>(bytemuck::cast_slice(&all), cols, skipped, scale);
            widens::<E5m2>(bytemuck::cast_slice(&all), cols, skipped, scale);
        }
    }
}

#[test]
fn sums_of_wild_parts_have_the_specified_order() {
    let parts: Vec<Vec<f32>> = (0..3).map(|seed| wild(seed, 1030)).collect();
    let (base, apart): (Vec<bf16>, usize) = (wild(9, 1030), 1032);
    let mut memory = EmulatedMemory::default();
    let gap = [7.0; 2];
    let joined: Vec<f32> = parts.iter().flat_map(|part| part.iter().copied().chain(gap)).collect();
    let at = memory.with(Dtype::Float32, 0, &joined);
    let [base_at, out] = [memory.with(Dtype::Bfloat16, 0, &base), memory.with(Dtype::Bfloat16, 0, &base)];
    SumProducts { parts: at, apart, count: 3, base: Some(base_at), bias: None, out, cols: 1030 }.enqueue(&mut memory).unwrap();
    let want: Vec<bf16> = (0..1030).map(|i| bf16::from_f32(((parts[0][i] + parts[1][i]) + parts[2][i]) + base[i].to_f32())).collect();
    assert_same(&memory.read::<bf16>(out), &want, "sums");
}
