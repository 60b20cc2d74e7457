//! The optimizer on the device and the gradient norm: the CPU's bits for every gradient.

use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{Adam, GradNormPartials, SplitAdam, Stream, SumSlices};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::optim::{AdamConsts, AdamHyper, BLOCK, MomentGroup, MomentKind, SplitMaster};

const FP32: Dtype = Dtype::Float32;
const BF16: Dtype = Dtype::Bfloat16;

/// Odd lengths, and lengths around a block.
const LENGTHS: [usize; 9] = [1, 7, 129, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 20 * BLOCK + 77];
const FULL: usize = 1000 * BLOCK;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for grads in FLOATS {
        let full = suite.full(grads);
        for elems in LENGTHS.into_iter().chain(full.then_some(FULL)) {
            for kind in KINDS {
                let name = format!("grad_norm_partials {grads} {elems} {kind:?}");
                suite.case(&name, |bench, random| norm(bench, &kind.draw(random, grads, elems), grads));
            }
        }
        suite.case(&format!("grad_norm_partials {grads} sees every gradient that is not finite"), |bench, random| {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 127, BLOCK - 1, BLOCK, 3 * BLOCK + 20] {
                    let mut values = random.uniform(grads, 3 * BLOCK + 21);
                    values[at] = value;
                    norm(bench, &values, grads)?;
                }
            }
            Ok(0.0)
        });
        for elems in LENGTHS {
            suite.case(&format!("sum_slices {grads} {elems}"), |bench, random| sums(bench, random, grads, elems));
        }
        for (moments, kind) in MOMENTS.into_iter().flat_map(|moments| KINDS.map(|kind| (moments, kind))) {
            suite.case(&format!("adam_step {grads}, {kind:?}, moments {moments}"), |bench, random| {
                let lengths = [1, 7, 1000, 4 * BLOCK + 5];
                let mut step = |elems| adam(bench, random, (grads, moments), kind, elems).map(drop);
                lengths.into_iter().chain(full.then_some(FULL)).try_for_each(&mut step)?;
                Ok(0.0)
            });
        }
    }
    for (grads, kind) in FLOATS.into_iter().flat_map(|grads| KINDS_OF_SPLIT.map(|kind| (grads, kind))) {
        suite.case(&format!("adam_step {grads}, {kind:?}, moments int8"), |bench, random| {
            [1, 8, 33, 1000].into_iter().try_for_each(|groups| int8_adam(bench, random, (grads, false), kind, groups).map(drop))?;
            Ok(0.0)
        });
    }
    for kind in KINDS_OF_SPLIT {
        suite.case(&format!("adam_step_split, {kind:?}, moments int8"), |bench, random| {
            [1, 8, 33, 1000].into_iter().try_for_each(|groups| int8_adam(bench, random, (BF16, true), kind, groups).map(drop))?;
            Ok(0.0)
        });
    }
    for (moments, kind) in MOMENTS.into_iter().flat_map(|moments| KINDS_OF_SPLIT.map(|kind| (moments, kind))) {
        suite.case(&format!("adam_step_split, {kind:?}, moments {moments}"), |bench, random| {
            let mut step = |elems| split_adam(bench, random, moments, kind, elems).map(drop);
            [1, 7, 1000, 4 * BLOCK + 5].into_iter().try_for_each(&mut step)?;
            Ok(0.0)
        });
    }
}

/// Split masters and codes of 8 bits have the bits of NaN that a device computes, which are not specified: no wild gradients.
const KINDS_OF_SPLIT: [Grads; 3] = [Grads::Ordinary, Grads::Large, Grads::Zero];
const KINDS: [Grads; 4] = [Grads::Ordinary, Grads::Wild, Grads::Large, Grads::Zero];
const MOMENTS: [Dtype; 2] = [FP32, Dtype::Bfloat16];

/// Kinds of gradients.
#[derive(Clone, Copy, Debug)]
enum Grads {
    Ordinary,
    /// Subnormal, huge, infinite, NaN.
    Wild,
    /// Finite, with squares beyond fp32.
    Large,
    Zero,
}

impl Grads {
    fn draw(self, random: &mut Random, dtype: Dtype, elems: usize) -> Vec<f32> {
        match self {
            Self::Ordinary => random.uniform(dtype, elems),
            Self::Wild => random.wild(dtype, elems),
            Self::Large => random.scaled(dtype, elems, if dtype == Dtype::Float16 { 6e4 } else { 3e38 }),
            Self::Zero => vec![0.0; elems],
        }
    }
}

/// One to eight parts, with or without a previous sum, rounded or not.
fn sums(bench: &mut Bench, random: &mut Random, dtype: Dtype, elems: usize) -> Outcome {
    for (count, begun, wide) in [(1, true, false), (1, false, true), (3, true, true), (8, false, false)] {
        let mut case = Case::default();
        let parts: Vec<_> = (0..count).map(|_| case.input("part", dtype, &random.uniform(dtype, elems))).collect();
        let before = begun.then(|| case.input("before", FP32, &random.uniform(FP32, elems)));
        let out = case.output("out", if wide { FP32 } else { dtype }, elems, Want::Same);
        case.check(bench, &|dev, at| {
            let parts: Vec<_> = parts.iter().map(|&part| at[part]).collect();
            dev.launch(SumSlices::new(Stream::Compute, &parts, before.map(|before| at[before]), at[out]))
        })?;
    }
    Ok(0.0)
}

/// The flag is set by a gradient that is not finite, and unchanged otherwise.
fn norm(bench: &mut Bench, values: &[f32], dtype: Dtype) -> Outcome {
    let found = values.iter().any(|x| !x.is_finite());
    for before in [0i32, 1] {
        let after = if found { 1 } else { before };
        let mut case = Case::default();
        let grads = case.input("grads", dtype, values);
        let partials = case.output("partials", FP32, values.len().div_ceil(BLOCK), Want::Same);
        let flag = case.updated_int("nonfinite", before, after);
        case.check(bench, &|dev, at| {
            dev.launch(GradNormPartials { stream: Stream::Compute, grads: at[grads], partials: at[partials], nonfinite: at[flag] })
        })?;
    }
    Ok(0.0)
}

/// Early and late steps, with and without decay, clipped or not, with ordinary state and with extreme state and gradients.
fn adam(bench: &mut Bench, random: &mut Random, (dtype, moments): (Dtype, Dtype), kind: Grads, elems: usize) -> Outcome {
    let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    for (step, decay, scale) in [(1, true, 1.0), (2, false, 0.37), (1000, true, 1.0 / 65536.0)] {
        let wild = matches!(kind, Grads::Wild);
        let mut state = |dtype| if wild { random.wild(dtype, elems) } else { random.uniform(dtype, elems) };
        let (params, m, v) = (state(FP32), state(moments), state(moments));
        // Second moments are never negative after a valid step.
        let v: Vec<f32> = v.iter().map(|v| v.abs()).collect();
        let grads = kind.draw(random, dtype, elems);
        let consts = AdamConsts::new(&hyper, step, decay);
        let mut case = Case::default();
        let params = case.updated("params", FP32, &params, Want::Same);
        let [m, v] = [("m", &m), ("v", &v)].map(|(name, x)| case.updated(name, moments, x, Want::Same));
        let grads = case.input("grads", dtype, &grads);
        let out = case.output("out", dtype, elems, Want::Same);
        case.check(bench, &|dev, at| {
            // Positions in the flat order exceed 2^32.
            let first = (1 << 32) - 500;
            dev.launch(Adam { first, params: at[params], m: at[m], v: at[v], grads: at[grads], out: at[out], consts, scale })
        })?;
    }
    Ok(0.0)
}

/// Moments in 8 bits, with float32 or split masters.
fn int8_adam(bench: &mut Bench, random: &mut Random, (dtype, is_split): (Dtype, bool), kind: Grads, groups: usize) -> Outcome {
    let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let elems = 128 * groups;
    for (step, decay, scale) in [(1, true, 1.0), (2, false, 0.37), (1000, true, 1.0 / 65536.0)] {
        let masters = random.uniform(FP32, elems);
        let halves: Vec<_> = masters.iter().map(|&x| SplitMaster::of(x)).collect();
        let (weights, lower): (Vec<f32>, Vec<f32>) = halves.iter().map(|half| (half.weight.to_f32(), f32::from(half.lower))).unzip();
        let bytes =
            |groups: Vec<MomentGroup>| -> Vec<f32> { bytemuck::cast_slice::<_, u8>(&groups).iter().map(|&x| f32::from(x)).collect() };
        let m = bytes(MomentKind::First.groups(&random.uniform(FP32, elems)));
        let v = bytes(MomentKind::Second.groups(&random.uniform(FP32, elems).into_iter().map(f32::abs).collect::<Vec<_>>()));
        let grads = kind.draw(random, dtype, elems);
        let consts = AdamConsts::new(&hyper, step, decay);
        let mut case = Case::default();
        case.aligned();
        let params = case.updated("params", FP32, &masters, Want::Same);
        let weights = case.updated("weights", BF16, &weights, Want::Same);
        let lower = case.updated("lower", Dtype::Uint16, &lower, Want::Same);
        let [m, v] = [("m", &m), ("v", &v)].map(|(name, x)| case.updated(name, Dtype::Uint8, x, Want::Same));
        let grads = case.input("grads", dtype, &grads);
        let out = case.updated("out", dtype, &vec![0.0; elems], Want::Same);
        case.check(bench, &|dev, at| {
            let (first, m, v, grads) = ((1 << 32) - 512, at[m], at[v], at[grads]);
            if is_split {
                dev.launch(SplitAdam { first, weights: at[weights], lower: at[lower], m, v, grads, consts, scale })
            } else {
                dev.launch(Adam { first, params: at[params], m, v, grads, out: at[out], consts, scale })
            }
        })?;
    }
    Ok(0.0)
}

/// Split masters: every third master is a tie.
fn split_adam(bench: &mut Bench, random: &mut Random, moments: Dtype, kind: Grads, elems: usize) -> Outcome {
    let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    for (step, decay, scale) in [(1, true, 1.0), (2, false, 0.37), (1000, true, 1.0 / 65536.0)] {
        let masters = random.uniform(FP32, elems).into_iter().enumerate();
        let tie = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000 | 0x8000);
        let halves: Vec<_> = masters.map(|(i, x)| SplitMaster::of(if i % 3 == 0 { tie(x) } else { x })).collect();
        let weights: Vec<f32> = halves.iter().map(|half| half.weight.to_f32()).collect();
        let lower: Vec<f32> = halves.iter().map(|half| half.lower.into()).collect();
        let signed = |(v, half): (f32, &SplitMaster)| if half.tie { -v.abs() } else { v.abs() };
        let v: Vec<f32> = random.uniform(moments, elems).into_iter().zip(&halves).map(signed).collect();
        let (m, grads) = (random.uniform(moments, elems), kind.draw(random, BF16, elems));
        let consts = AdamConsts::new(&hyper, step, decay);
        let mut case = Case::default();
        let weights = case.updated("weights", BF16, &weights, Want::Same);
        let lower = case.updated("lower", Dtype::Uint16, &lower, Want::Same);
        let [m, v] = [("m", &m), ("v", &v)].map(|(name, x)| case.updated(name, moments, x, Want::Same));
        let grads = case.input("grads", BF16, &grads);
        case.check(bench, &|dev, at| {
            let (weights, lower, first) = (at[weights], at[lower], (1 << 32) - 500);
            dev.launch(SplitAdam { first, weights, lower, m: at[m], v: at[v], grads: at[grads], consts, scale })
        })?;
    }
    Ok(0.0)
}
