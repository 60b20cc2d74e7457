//! Compares the emulated PTX of the transfer kernels with the CPU specification, bit for bit.

use super::super::emulator::{EmulatedMemory, run};
use super::*;
use crate::device::GroupedShape;
use crate::device::cuda::group_tables::GroupTables;
use crate::device::cuda::launch::Arg;
use crate::dtype::Element;
use crate::optim::adam::{self, AdamConsts, AdamHyper, AdamState, AdamStep};
use crate::optim::int8::{self, GROUP, MomentGroup, MomentKind};
use crate::optim::int8_state::{self, Int8State};
use crate::optim::moments::Moment;
use crate::optim::norm;
use crate::optim::samples::{assert_same, ordinary, split_masters, wild};
use crate::optim::split::{self, SplitMaster};
use half::{bf16, f16};

impl Queue for EmulatedMemory {
    fn is_hopper(&self) -> bool {
        false
    }

    fn group_tables(&self) -> Option<GroupTables> {
        None
    }

    fn multiply_groups(&mut self, _: GroupedShape, _: Dtype) -> Result<()> {
        unreachable!("the transfer path knows no experts")
    }

    fn launch<const N: usize>(
        &mut self,
        _: Stream,
        name: &'static str,
        dtype: Option<Dtype>,
        blocks: LaunchConfig,
        args: [Arg; N],
    ) -> Result<()> {
        let has = |source: &&PtxSource| source.plain.contains(&name) || source.typed.contains(&name);
        let suffix = match dtype {
            None => "",
            Some(Dtype::Bfloat16) => "_bf16",
            Some(Dtype::Float16) => "_f16",
            Some(_) => "_f32",
        };
        let source = SOURCES.iter().chain([&super::super::product::SOURCE]).find(has).unwrap();
        run(self, &source.file.text()?, &format!("{name}{suffix}"), blocks, &args);
        Ok(())
    }

    fn scratch(&mut self, elems: usize) -> Result<DeviceSlice> {
        Ok(self.with(Dtype::Float32, 0, &vec![f32::NAN; elems]))
    }

    fn zero(&mut self, _: DeviceSlice) -> Result<()> {
        unreachable!("a driver's call, not PTX")
    }

    fn copy(&mut self, _: Stream, _: DeviceSlice, _: DeviceSlice) -> Result<()> {
        unreachable!("a driver's call, not PTX")
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    let wide = |x: &T| bytemuck::bytes_of(x).iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte));
    values.iter().map(wide).collect()
}

/// Sums `count` parts, which begin `offset` elements after multiples of 16 bytes, both into separate memory and in place.
fn sum_matches<T: Element>(elems: usize, count: usize, offset: usize) {
    let before = wild::<f32>(99, elems);
    for (begun, wide, in_place) in (0..8).map(|bits| (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0)) {
        let mut memory = EmulatedMemory::default();
        let values: Vec<Vec<T>> = (0..count as u64).map(|seed| wild(seed, elems)).collect();
        let parts: Vec<_> = values.iter().map(|values| memory.with(T::DTYPE, offset, values)).collect();
        let sum_before = memory.with(Dtype::Float32, offset, &before);
        let out = match (wide, in_place) {
            (true, true) => sum_before,
            (true, false) => memory.with(Dtype::Float32, 0, &vec![7.0f32; elems]),
            (false, true) => parts[0],
            (false, false) => memory.with(T::DTYPE, 0, &vec![T::from_f32(7.0); elems]),
        };
        SumSlices::new(Stream::Compute, &parts, begun.then_some(sum_before), out).enqueue(&mut memory).unwrap();
        let terms = |i: usize| begun.then_some(before[i]).into_iter().chain(values.iter().map(move |part| part[i].to_f32()));
        let want: Vec<f32> = (0..elems).map(|i| terms(i).reduce(|sum, term| sum + term).unwrap()).collect();
        if wide {
            assert_same(&memory.read::<f32>(out), &want, "sums");
        } else {
            let narrow: Vec<T> = want.iter().map(|&sum| T::from_f32(sum)).collect();
            assert_same(&memory.read::<T>(out), &narrow, "rounded sums");
        }
    }
}

#[test]
fn sums_take_any_number_length_and_alignment_of_parts() {
    for count in 1..=crate::device::kernels::transfer::PARTS_MAX {
        for (elems, offset) in [(0, 0), (1, 0), (7, 1), (1024, 0), (1027, 4), (2500, 3)] {
            sum_matches::<bf16>(elems, count, offset);
            sum_matches::<f16>(elems, count, offset);
            sum_matches::<f32>(elems, count, offset);
        }
    }
}

fn cast_matches<S: Element, D: Element>(values: &[S], offsets: [usize; 2]) {
    let mut memory = EmulatedMemory::default();
    let src = memory.with(S::DTYPE, offsets[0], values);
    let dst = memory.with(D::DTYPE, offsets[1], &vec![D::from_f32(7.0); values.len()]);
    Cast { stream: Stream::Compute, src, dst }.enqueue(&mut memory).unwrap();
    let want: Vec<D> = values.iter().map(|x| D::from_f32(x.to_f32())).collect();
    assert!(bits(&memory.read::<D>(dst)) == bits(&want), "{} {} to {}", values.len(), S::DTYPE, D::DTYPE);
}

#[test]
fn casts_are_exact_for_every_half_and_round_as_the_specification() {
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    cast_matches::<f16, f32>(bytemuck::cast_slice(&halves), [0, 0]);
    cast_matches::<bf16, f32>(bytemuck::cast_slice(&halves), [0, 0]);
    // Upper halves combined with lower halves that decide rounding.
    let edges = [0u32, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001].into_iter().enumerate();
    let floats: Vec<f32> =
        edges.flat_map(|(i, low)| (i as u32..0x1_0000).step_by(7).map(move |high| f32::from_bits(high << 16 | low))).collect();
    cast_matches::<f32, f16>(&floats, [0, 0]);
    cast_matches::<f32, bf16>(&floats, [0, 0]);
}

#[test]
fn casts_take_any_length_and_alignment() {
    for elems in [0, 1, 3, 4, 5, 1023, 4096, 4103, 9000] {
        for offsets in [[0, 0], [4, 4], [1, 0], [0, 3], [2, 2]] {
            cast_matches::<bf16, f32>(&wild(1, elems), offsets);
            cast_matches::<f16, f32>(&wild(2, elems), offsets);
            cast_matches::<f32, bf16>(&wild(3, elems), offsets);
            cast_matches::<f32, f16>(&wild(4, elems), offsets);
        }
    }
}

fn norm_matches<T: Element>(grads: &[T], offset: usize) {
    let blocks = grads.len().div_ceil(BLOCK);
    for before in [0, 1] {
        let mut memory = EmulatedMemory::default();
        let source = memory.with(T::DTYPE, offset, grads);
        let partials = memory.with(Dtype::Float32, 0, &vec![7.0f32; blocks]);
        let nonfinite = memory.with(Dtype::Int32, 0, &[before]);
        GradNormPartials { stream: Stream::Compute, grads: source, partials, nonfinite }.enqueue(&mut memory).unwrap();
        let mut want = vec![0.0; blocks];
        let found = norm::partials(grads, &mut want);
        assert_same(&memory.read::<f32>(partials), &want, "partials");
        assert_eq!(memory.read::<i32>(nonfinite), [i32::from(found || before == 1)]);
    }
}

fn norms_match<T: Element>() {
    for elems in [1, 127, 130, BLOCK - 1, BLOCK, 9 * BLOCK + 77] {
        let grads: Vec<T> = ordinary(elems as u64, elems);
        [0, 1, 4].into_iter().for_each(|offset| norm_matches(&grads, offset));
    }
    for (poison, at) in [(f32::NAN, 0), (f32::INFINITY, 131), (f32::NEG_INFINITY, BLOCK - 1), (f32::NAN, BLOCK + 199)] {
        let mut grads: Vec<T> = ordinary(5, BLOCK + 200);
        grads[at] = T::from_f32(poison);
        norm_matches(&grads, 0);
    }
    norm_matches(&wild::<T>(6, BLOCK + 5), 0);
}

#[test]
fn norms_keep_the_specified_order() {
    norms_match::<bf16>();
    norms_match::<f16>();
    norms_match::<f32>();
    // The squares overflow, but the gradients are finite: no flag.
    norm_matches(&[1e30f32; 200], 0);
}

/// `offset` moves every operand off its alignment.
fn adam_matches<M: Moment, T: Element>(elems: usize, offset: usize) {
    let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let (consts, scale) = (AdamConsts::new(&hyper, 3, true), 0.7);
    // Includes rare magnitudes: zeros, subnormals, infinities.
    let mixed = |seed| [ordinary::<f32>(seed, elems - elems / 3), wild(seed, elems / 3)].concat();
    let (mut params, first) = (mixed(1), (1 << 32) - 700);
    let mut m: Vec<M> = mixed(2).into_iter().map(M::from_f32).collect();
    let mut v: Vec<M> = mixed(3).iter().map(|x| M::from_f32(x.abs())).collect();
    let grads: Vec<T> = mixed(4).into_iter().map(T::from_f32).collect();
    let mut out = vec![T::from_f32(7.0); elems];
    let mut memory = EmulatedMemory::default();
    let (p, [mm, vv]) = (memory.with(Dtype::Float32, offset, &params), [&m, &v].map(|x| memory.with(M::DTYPE, offset, x)));
    let [g, o] = [&grads, &out].map(|x| memory.with(T::DTYPE, offset, x));
    Adam { first, params: p, m: mm, v: vv, grads: g, out: o, consts, scale }.enqueue(&mut memory).unwrap();
    adam::step(AdamStep { consts, scale }, &mut AdamState { first, params: &mut params, m: &mut m, v: &mut v }, &grads, &mut out);
    assert_same(&memory.read::<f32>(p), &params, "params");
    assert_same(&memory.read::<M>(mm), &m, "m");
    assert_same(&memory.read::<M>(vv), &v, "v");
    assert_same(&memory.read::<T>(o), &out, "out");
}

#[test]
fn adam_is_the_specification() {
    for elems in [1, 2, 4, 7, 1024, 1500] {
        for offset in [0, 1, 4] {
            adam_matches::<f32, bf16>(elems, offset);
            adam_matches::<f32, f16>(elems, offset);
            adam_matches::<f32, f32>(elems, offset);
            adam_matches::<bf16, bf16>(elems, offset);
            adam_matches::<bf16, f16>(elems, offset);
            adam_matches::<bf16, f32>(elems, offset);
        }
    }
}

/// Like [`adam_matches`], of split masters of which many are ties.
fn split_adam_matches<M: Moment>(elems: usize, offset: usize) {
    let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let (consts, scale, first) = (AdamConsts::new(&hyper, 3, true), 0.7, (1 << 32) - 700);
    let mixed = |seed| [ordinary::<f32>(seed, elems - elems / 3), wild(seed, elems / 3)].concat();
    let mut params = mixed(1);
    params.iter_mut().zip(split_masters(1, elems)).step_by(3).for_each(|(param, tie)| *param = tie);
    let mut m: Vec<M> = mixed(2).into_iter().map(M::from_f32).collect();
    let mut v: Vec<M> = mixed(3).iter().map(|x| M::from_f32(x.abs())).collect();
    let grads: Vec<bf16> = mixed(4).into_iter().map(<bf16 as Element>::from_f32).collect();
    let halves = params.iter().zip(&v).map(|(&param, &v)| split::encoded(param, v));
    let (weights, (lower, signed)): (Vec<_>, (Vec<_>, Vec<_>)) = halves.map(|(weight, lower, v)| (weight, (lower, v))).unzip();
    let mut memory = EmulatedMemory::default();
    let (weights, lower) = (memory.with(Dtype::Bfloat16, offset, &weights), memory.with(Dtype::Uint16, offset, &lower));
    let [mm, vv] = [&m, &signed].map(|x| memory.with(M::DTYPE, offset, x));
    let g = memory.with(Dtype::Bfloat16, offset, &grads);
    SplitAdam { first, weights, lower, m: mm, v: vv, grads: g, consts, scale }.enqueue(&mut memory).unwrap();
    let mut out = vec![bf16::ZERO; elems];
    adam::step(AdamStep { consts, scale }, &mut AdamState { first, params: &mut params, m: &mut m, v: &mut v }, &grads, &mut out);
    let (got, lower, signed) = (memory.read::<bf16>(weights), memory.read::<u16>(lower), memory.read::<M>(vv));
    assert_same(&got, &out, "weights");
    assert_same(&(0..elems).map(|i| split::decoded(got[i], lower[i], signed[i])).collect::<Vec<_>>(), &params, "masters");
    assert_same(&memory.read::<M>(mm), &m, "m");
    assert_same(&signed.iter().map(|v| v.with_sign(false)).collect::<Vec<_>>(), &v, "v");
}

#[test]
fn adam_on_split_masters_gives_the_bits_of_fp32_masters() {
    for elems in [1, 2, 4, 7, 1024, 1500] {
        for offset in [0, 1, 4] {
            split_adam_matches::<f32>(elems, offset);
            split_adam_matches::<bf16>(elems, offset);
        }
    }
}

/// Moments in 8 bits: of ordinary and rare magnitudes, or any bytes. A NaN has another payload on a GPU, so stored NaNs have other codes.
fn groups(seed: u64, kind: MomentKind, elems: usize) -> Vec<MomentGroup> {
    if seed.is_multiple_of(2) {
        let bytes: Vec<u8> =
            wild::<f32>(seed, elems * size_of::<MomentGroup>() / GROUP).iter().map(|x| (x.to_bits() >> 13) as u8).collect();
        return bytemuck::pod_collect_to_vec(&bytes);
    }
    let mixed = [ordinary::<f32>(seed, elems - elems / 3), wild(seed, elems / 3)].concat();
    kind.groups(&mixed.iter().map(|x| if kind == MomentKind::Second { x.abs() } else { *x }).collect::<Vec<_>>())
}

/// `is_split` takes split masters and bfloat16 gradients.
fn int8_adam_matches<T: Element>(elems: usize, seed: u64, is_split: bool) {
    let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let (consts, scale, first) = (AdamConsts::new(&hyper, 3, true), 0.7, (1 << 32) - 5 * GROUP);
    let mut params: Vec<f32> =
        wild::<f32>(seed, elems).into_iter().zip(split_masters(1, elems)).map(|(x, tie)| if x == 0.0 { x } else { tie }).collect();
    if is_split {
        params.iter_mut().for_each(|param| *param = int8::settled(*param));
    }
    let (mut m, mut v) = (groups(seed, MomentKind::First, elems), groups(seed + 2, MomentKind::Second, elems));
    let (grads, mut out): (Vec<T>, _) = (ordinary(4, elems), vec![T::from_f32(7.0); elems]);
    let mut memory = EmulatedMemory::default();
    let [mm, vv] = [&m, &v].map(|x| memory.with::<u8>(Dtype::Uint8, 0, bytemuck::cast_slice(x)));
    let [g, o] = [&grads, &out].map(|x| memory.with(T::DTYPE, 0, x));
    let halves: Vec<SplitMaster> = params.iter().map(|&param| SplitMaster::of(param)).collect();
    let weights = memory.with(Dtype::Bfloat16, 0, &halves.iter().map(|half| half.weight).collect::<Vec<_>>());
    let lower = memory.with(Dtype::Uint16, 0, &halves.iter().map(|half| half.lower).collect::<Vec<_>>());
    let p = memory.with(Dtype::Float32, 0, &params);
    if is_split {
        SplitAdam { first, weights, lower, m: mm, v: vv, grads: g, consts, scale }.enqueue(&mut memory).unwrap();
    } else {
        Adam { first, params: p, m: mm, v: vv, grads: g, out: o, consts, scale }.enqueue(&mut memory).unwrap();
    }
    let state = &mut Int8State::new(first, &mut params, &mut m, &mut v);
    int8_state::run([Some((AdamStep { consts, scale }, &grads[..])), None], state, Some(&mut out));
    let (lower, upper) = (memory.read::<u16>(lower), memory.read::<bf16>(weights));
    let joined = |i: usize| SplitMaster { weight: upper[i], lower: lower[i], tie: false }.master();
    let masters = if is_split { (0..elems).map(joined).collect() } else { memory.read::<f32>(p) };
    assert_same(&masters, &params, "masters");
    assert_same(&memory.read::<T>(if is_split { weights } else { o }), &out, "working weights");
    for (kind, have, want) in [(MomentKind::First, mm, &m), (MomentKind::Second, vv, &v)] {
        assert_same(&kind.values(&memory.read(have)), &kind.values(want), &format!("{kind:?}, seed {seed}"));
    }
}

#[test]
fn adam_with_8_bit_moments_is_the_specification() {
    for (elems, seed) in [(128, 1), (256, 2), (1024, 3), (1024, 4), (1152, 5), (1152, 6)] {
        int8_adam_matches::<bf16>(elems, seed, false);
        int8_adam_matches::<f16>(elems, seed, false);
        int8_adam_matches::<f32>(elems, seed, false);
        int8_adam_matches::<bf16>(elems, seed, true);
    }
}

#[test]
fn adam_with_8_bit_moments_refuses_addresses_inside_of_vectors() {
    let at = |dtype, offset: u64, elems| DeviceSlice::at((1 << 20) + offset, elems, dtype);
    let [params, out] = [Dtype::Float32, Dtype::Bfloat16].map(|dtype| at(dtype, 0, 128));
    let [m, v] = [0, 1 << 12].map(|offset| at(Dtype::Uint8, offset, 132));
    let consts = AdamConsts::new(&AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }, 3, true);
    let refused = |grads, m| {
        let error = Adam { first: 0, params, m, v, grads, out, consts, scale: 1.0 }.enqueue(&mut EmulatedMemory::default()).unwrap_err();
        assert_eq!(error.to_string(), "unsupported: adam_step with 8-bit moments at addresses that are not aligned to 4 elements");
    };
    refused(at(Dtype::Bfloat16, 2, 128), m);
    refused(out, at(Dtype::Uint8, 2, 132));
}

fn poke_matches<T: Element>() {
    for offset in [0, 1, 8] {
        let values: Vec<T> = wild(9, 9000);
        let mut memory = EmulatedMemory::default();
        let x = memory.with(T::DTYPE, offset, &values);
        for (index, value) in [(0, f32::NAN), (4500, 0.3), (8999, 1e30)] {
            Poke { x, index, value }.enqueue(&mut memory).unwrap();
            let mut want = values.clone();
            want[index] = T::from_f32(value);
            assert_same(&memory.read::<T>(x)[index..index + 1], &want[index..index + 1], "poked");
        }
        assert_same(&memory.read::<T>(x)[1..4500], &values[1..4500], "left alone");
    }
}

#[test]
fn a_poke_rounds_once() {
    poke_matches::<bf16>();
    poke_matches::<f16>();
    poke_matches::<f32>();
}
