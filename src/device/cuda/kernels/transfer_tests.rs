//! The transfer path's PTX, emulated, against the specification: to the bit.

use super::super::emulator::{EmulatedMemory, run};
use super::*;
use crate::dtype::Element;
use crate::optim::adam::{self, AdamConsts, AdamHyper, AdamState, AdamStep};
use crate::optim::norm;
use crate::optim::samples::{assert_same, ordinary, wild};
use half::{bf16, f16};

/// Runs what a launcher would enqueue.
fn emulate<const N: usize>(memory: &mut EmulatedMemory, call: KernelCall<N>) {
    let has = |source: &&PtxSource| source.plain.contains(&call.name) || source.typed.contains(&call.name);
    let suffix = match call.dtype {
        None => "",
        Some(Dtype::Bfloat16) => "_bf16",
        Some(Dtype::Float16) => "_f16",
        Some(_) => "_f32",
    };
    let source = SOURCES.into_iter().find(|source| has(&source)).unwrap();
    run(memory, source.ptx, &format!("{}{suffix}", call.name), call.launch, &call.args);
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    let wide = |x: &T| bytemuck::bytes_of(x).iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte));
    values.iter().map(wide).collect()
}

fn cast_matches<S: Element, D: Element>(values: &[S], offsets: [usize; 2]) {
    let mut memory = EmulatedMemory::default();
    let src = memory.with(S::DTYPE, offsets[0], values);
    let dst = memory.with(D::DTYPE, offsets[1], &vec![D::from_f32(7.0); values.len()]);
    emulate(&mut memory, cast_call(src, dst).unwrap());
    let want: Vec<D> = values.iter().map(|x| D::from_f32(x.to_f32())).collect();
    assert!(bits(&memory.read::<D>(dst)) == bits(&want), "{} {} to {}", values.len(), S::DTYPE, D::DTYPE);
}

#[test]
fn casts_are_exact_for_every_half_and_round_as_the_specification() {
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    cast_matches::<f16, f32>(bytemuck::cast_slice(&halves), [0, 0]);
    cast_matches::<bf16, f32>(bytemuck::cast_slice(&halves), [0, 0]);
    // Every upper half with lower halves that decide rounding.
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

/// `staged`: with gradients as fp32, beginning so many elements behind a multiple of 16 bytes.
fn norm_matches<T: Element>(grads: &[T], offset: usize, staged: Option<usize>) {
    let blocks = grads.len().div_ceil(BLOCK);
    for before in [0, 1] {
        let mut memory = EmulatedMemory::default();
        let source = memory.with(T::DTYPE, offset, grads);
        let staging = staged.map(|offset| memory.with(Dtype::Float32, offset, &vec![7.0f32; grads.len()]));
        let partials = memory.with(Dtype::Float32, 0, &vec![7.0f32; blocks]);
        let nonfinite = memory.with(Dtype::Int32, 0, &[before]);
        emulate(&mut memory, grad_norm_call(source, staging, partials, nonfinite).unwrap());
        let mut want = vec![0.0; blocks];
        let found = norm::partials(grads, &mut want);
        assert_same(&memory.read::<f32>(partials), &want, "partials");
        assert_eq!(memory.read::<i32>(nonfinite), [i32::from(found || before == 1)]);
        if let Some(staging) = staging {
            assert_same(&memory.read::<f32>(staging), &grads.iter().map(|g| g.to_f32()).collect::<Vec<_>>(), "staging");
        }
    }
}

fn norms_match<T: Element>() {
    for elems in [1, 127, 130, BLOCK - 1, BLOCK, 9 * BLOCK + 77] {
        let grads: Vec<T> = ordinary(elems as u64, elems);
        for (offset, staged) in [(0, None), (1, None), (0, Some(0)), (4, Some(4)), (0, Some(1))] {
            norm_matches(&grads, offset, staged);
        }
    }
    for (poison, at) in [(f32::NAN, 0), (f32::INFINITY, 131), (f32::NEG_INFINITY, BLOCK - 1), (f32::NAN, BLOCK + 199)] {
        let mut grads: Vec<T> = ordinary(5, BLOCK + 200);
        grads[at] = T::from_f32(poison);
        norm_matches(&grads, 0, Some(0));
    }
    norm_matches(&wild::<T>(6, BLOCK + 5), 0, Some(0));
}

#[test]
fn norms_keep_the_specified_order() {
    norms_match::<bf16>();
    norms_match::<f16>();
    norms_match::<f32>();
    // Squares overflow, gradients do not: no flag.
    norm_matches(&[1e30f32; 200], 0, None);
}

/// `offset` moves every argument off its alignment.
fn adam_matches<T: Element>(elems: usize, offset: usize) {
    let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let (consts, scale) = (AdamConsts::new(&hyper, 3, true), 0.7);
    // Rare magnitudes too: zeros, subnormals, infinities.
    let mixed = |seed| [ordinary::<f32>(seed, elems - elems / 3), wild(seed, elems / 3)].concat();
    let (mut params, mut m) = (mixed(1), mixed(2));
    let mut v: Vec<f32> = mixed(3).iter().map(|x| x.abs()).collect();
    let grads: Vec<T> = mixed(4).into_iter().map(T::from_f32).collect();
    let mut out = vec![T::from_f32(7.0); elems];
    let mut memory = EmulatedMemory::default();
    let [p, mm, vv] = [&params, &m, &v].map(|x| memory.with(Dtype::Float32, offset, x));
    let [g, o] = [&grads, &out].map(|x| memory.with(T::DTYPE, offset, x));
    emulate(&mut memory, adam_call(AdamArgs { params: p, m: mm, v: vv, grads: g, out: o, consts, scale }).unwrap());
    adam::step(AdamStep { consts, scale }, &mut AdamState { params: &mut params, m: &mut m, v: &mut v }, &grads, &mut out);
    assert_same(&memory.read::<f32>(p), &params, "params");
    assert_same(&memory.read::<f32>(mm), &m, "m");
    assert_same(&memory.read::<f32>(vv), &v, "v");
    assert_same(&memory.read::<T>(o), &out, "out");
}

#[test]
fn adam_is_the_specification() {
    for elems in [1, 2, 4, 7, 1024, 1500] {
        for offset in [0, 1, 4] {
            adam_matches::<bf16>(elems, offset);
            adam_matches::<f16>(elems, offset);
            adam_matches::<f32>(elems, offset);
        }
    }
}

fn scale_and_poke_match<T: Element>() {
    for elems in [1, 8, 4096, 4099, 9000] {
        for offset in [0, 1, 8] {
            let values: Vec<T> = wild(9, elems);
            let mut memory = EmulatedMemory::default();
            let x = memory.with(T::DTYPE, offset, &values);
            emulate(&mut memory, scale_call(x, 0.3).unwrap());
            emulate(&mut memory, poke_call(x.slice(elems / 2, 1), f32::NAN));
            let mut want: Vec<T> = values.iter().map(|x| T::from_f32(x.to_f32() * 0.3)).collect();
            want[elems / 2] = T::from_f32(f32::NAN);
            assert_same(&memory.read::<T>(x), &want, "scaled");
        }
    }
}

#[test]
fn scale_and_poke_round_once() {
    scale_and_poke_match::<bf16>();
    scale_and_poke_match::<f16>();
    scale_and_poke_match::<f32>();
}
