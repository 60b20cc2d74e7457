//! Split masters: every instruction set against the step of fp32 masters, bit for bit.

use super::*;
use crate::optim::int8::{GROUP, MomentGroup, MomentKind, settled};
use crate::optim::samples::split_masters;
use crate::optim::split::{self, SplitInt8State, SplitState, decoded, encoded};
use crate::optim::state_array::StateArray;

fn wild_masters(len: usize) -> Vec<f32> {
    let ties = split_masters(7, len);
    wild::<f32>(1, len).into_iter().zip(ties).enumerate().map(|(i, (wild, tie))| if i % 2 == 0 { wild } else { tie }).collect()
}

/// A case whose second moments are not negative.
fn case<M: Moment, G: Element>(params: Vec<f32>, is_wild: bool) -> Case<M, G, bf16> {
    let case = if is_wild { Case::wild(params.len()) } else { Case::ordinary(params.len()) };
    let v = case.v.iter().map(|v: &M| v.with_sign(false)).collect();
    Case { params, v, ..case }
}

fn check<M: Moment, G: Element>(case: &Case<M, G, bf16>, stores: Stores, offset: usize) {
    let mut golden = case.clone();
    golden.by_specification(Pass::Step, steps());
    for isa in Isa::available() {
        let kernels = AdamKernels::new(isa).unwrap().with_stores(stores);
        let halves = case.params.iter().zip(&case.v).map(|(&param, &v)| encoded(param, v));
        let (weights, (lower, v)): (Vec<_>, (Vec<_>, Vec<_>)) = halves.map(|(weight, lower, v)| (weight, (lower, v))).unzip();
        // Lower halves are placed as bfloat16 numbers, which have their size.
        let lower: Vec<bf16> = lower.into_iter().map(bf16::from_bits).collect();
        let (mut weights, mut lower) = (Placed::new(&weights, offset), Placed::new(&lower, offset));
        let (mut m, mut v) = (Placed::new(&case.m, offset), Placed::new(&v, offset));
        let mut state = SplitState {
            first: case.first,
            weights: weights.inner(),
            lower: bytemuck::cast_slice_mut(lower.inner()),
            m: m.inner(),
            v: v.inner(),
        };
        kernels.step_split(steps().0, &mut state, Grads::from_bytes(G::DTYPE, bytemuck::cast_slice(&case.grads)));
        let mut got = case.clone();
        let mut lower_halves = vec![bf16::ZERO; got.params.len()];
        weights.take_back(&mut got.out);
        lower.take_back(&mut lower_halves);
        m.take_back(&mut got.m);
        v.take_back(&mut got.v);
        for (i, lower) in lower_halves.iter().enumerate() {
            got.params[i] = decoded(got.out[i], lower.to_bits(), got.v[i]);
            got.v[i] = got.v[i].with_sign(false);
        }
        let label = |field| format!("{kernels} of {}, moments {}, {} elements at {offset}: {field}", G::DTYPE, M::DTYPE, got.m.len());
        assert_same(&got.params, &golden.params, &label("masters"));
        assert_same(&got.m, &golden.m, &label("m"));
        assert_same(&got.v, &golden.v, &label("v"));
        assert_same(&got.out, &golden.out, &label("weights"));
    }
}

fn check_all<M: Moment, G: Element>() {
    for len in (0..=200).chain([4096 + 13]) {
        for (params, is_wild) in [(split_masters(1, len), false), (wild_masters(len), true)] {
            check(&case::<M, G>(params, is_wild), STORES[len % STORES.len()], [0, 1, 17, 31][len % 4]);
        }
    }
}

#[test]
fn all_instruction_sets_step_split_masters_as_fp32_masters() {
    check_all::<f32, bf16>();
    check_all::<f32, f32>();
    check_all::<bf16, bf16>();
    check_all::<bf16, f32>();
}

/// Working weights, lower halves, and moments in groups.
type Int8Arrays = (Vec<bf16>, Vec<u16>, [Vec<MomentGroup>; 2]);

fn int8_arrays(len: usize) -> Int8Arrays {
    let masters: Vec<f32> = split_masters(1, len).into_iter().map(settled).collect();
    let (mut weights, mut lower) = (vec![bf16::ZERO; len], vec![0; len]);
    split::split(&StateArray::PARAMS, &masters, &mut weights, &mut lower);
    let seconds: Vec<f32> = ordinary::<f32>(4, len).into_iter().map(f32::abs).collect();
    (weights, lower, [MomentKind::First.groups(&ordinary::<f32>(3, len)), MomentKind::Second.groups(&seconds)])
}

#[test]
fn all_instruction_sets_step_split_masters_beside_8_bit_moments_as_the_specification() {
    for len in (0..=200).chain([3 * 1024 + 45]) {
        let (grads, step, first) = (ordinary::<bf16>(2, len), steps().0, len % 5 * GROUP);
        let (mut weights, mut lower, [mut m, mut v]) = int8_arrays(len);
        split::step_int8(step, &mut SplitInt8State { first, weights: &mut weights, lower: &mut lower, m: &mut m, v: &mut v }, &grads);
        for isa in Isa::available() {
            let mut got = int8_arrays(len);
            let [got_m, got_v] = &mut got.2;
            let state = SplitInt8State { first, weights: &mut got.0, lower: &mut got.1, m: got_m, v: got_v };
            AdamKernels::new(isa).unwrap().step_split_int8(step, state, Grads::Bf16(&grads));
            assert!(got == (weights.clone(), lower.clone(), [m.clone(), v.clone()]), "{isa}: {len} elements from {first} on");
        }
    }
}
