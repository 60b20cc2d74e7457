//! States with 8-bit moments: every instruction set against the specification, bit for bit.

use super::*;
use crate::optim::int8::{GROUP, MomentGroup, MomentKind};
use crate::optim::int8_state::{self, Int8State};
use crate::optim::samples::faint;
use bytemuck::Zeroable;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The passes: whether an update is written into the state, one is speculated on, and there are working weights.
const INT8_PASSES: [[bool; 3]; 4] = [[true, false, true], [false, true, true], [true, false, false], [true, true, true]];

/// Indices in the flat order cross 2^32 within a case.
const FIRST: usize = (1 << 32) - 3 * BLOCK;

#[derive(Clone)]
struct Int8Case<G, O> {
    first: usize,
    params: Vec<f32>,
    m: Vec<MomentGroup>,
    v: Vec<MomentGroup>,
    grads: Vec<G>,
    pending_grads: Vec<G>,
    out: Vec<O>,
}

impl<G: Element, O: Element> Int8Case<G, O> {
    fn new(first: usize, len: usize, kind: usize) -> Self {
        let case = if kind == 0 { Case::<f32, G, O>::ordinary(len) } else { Case::wild(len) };
        let mut rng = ChaCha8Rng::seed_from_u64(len as u64);
        let groups = (first % GROUP + len).div_ceil(GROUP);
        // Any codes, with exponents that occur.
        let mut any = |kind: MomentKind| {
            let mut groups = vec![MomentGroup::zeroed(); groups];
            bytemuck::cast_slice_mut::<_, u8>(&mut groups).iter_mut().for_each(|byte| *byte = rng.next_u32() as u8);
            groups.iter_mut().flat_map(|group| &mut group.exponents).for_each(|exponent| *exponent = (*exponent).min(kind.most()));
            groups
        };
        let (mut m, mut v) = (any(MomentKind::First), any(MomentKind::Second));
        if kind != 1 {
            let values = |seed| -> Vec<f32> {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                let faint = (0..groups * GROUP).map(|_| faint(&mut rng, -90));
                if kind == 0 { ordinary(seed, groups * GROUP) } else { faint.collect() }
            };
            m = MomentKind::First.groups(&values(2));
            v = MomentKind::Second.groups(&values(3).into_iter().map(f32::abs).collect::<Vec<_>>());
        }
        let Case { params, grads, pending_grads, out, .. } = case;
        Self { first, params, m, v, grads, pending_grads, out }
    }

    fn by_specification(&mut self, [commits, speculates, emits]: [bool; 3]) {
        let Self { first, params, m, v, grads, pending_grads, out } = self;
        let state = &mut Int8State::new(*first, params, m, v);
        let updates = [commits.then_some((steps().0, &pending_grads[..])), speculates.then_some((steps().1, &grads[..]))];
        int8_state::run(updates, state, emits.then_some(&mut out[..]));
    }

    fn by_kernels(&mut self, kernels: AdamKernels, [commits, speculates, emits]: [bool; 3], offset: usize) {
        let Self { first, params, m, v, grads, pending_grads, out } = self;
        let (mut masters, mut weights) = (Placed::new(params, offset), Placed::new(out, offset));
        let [h, g] = [pending_grads, grads].map(|grads| Grads::from_bytes(G::DTYPE, bytemuck::cast_slice(grads)));
        let state = &mut Int8State::new(*first, masters.inner(), m, v);
        let narrow = emits.then(|| Weights::from_bytes(O::DTYPE, bytemuck::cast_slice_mut(weights.inner())));
        kernels.run_int8([commits.then_some((steps().0, h)), speculates.then_some((steps().1, g))], state, narrow);
        masters.take_back(params);
        weights.take_back(out);
    }

    fn check(&self, pass: [bool; 3], stores: Stores, offset: usize) {
        let mut golden = self.clone();
        golden.by_specification(pass);
        for isa in Isa::available() {
            let (mut got, kernels) = (self.clone(), AdamKernels::new(isa).unwrap().with_stores(stores));
            got.by_kernels(kernels, pass, offset);
            let formats = format!("{} to {}", G::DTYPE, O::DTYPE);
            let label = |field| format!("{kernels} {pass:?} {formats}, {} elements from {} on: {field}", got.params.len(), got.first);
            assert_same(&got.params, &golden.params, &label("params"));
            assert_same(&MomentKind::First.values(&got.m), &MomentKind::First.values(&golden.m), &label("m"));
            assert_same(&MomentKind::Second.values(&got.v), &MomentKind::Second.values(&golden.v), &label("v"));
            assert_same(&got.out, &golden.out, &label("out"));
        }
    }
}

fn check_all<G: Element, O: Element>() {
    for len in (0..=200).chain([4096 + 13]) {
        for (pass, kind) in INT8_PASSES.into_iter().flat_map(|pass| [0, 1, 2].map(|kind| (pass, kind))) {
            // Only speculations begin within a block.
            let inside = if pass[0] { 0 } else { [0, 5, 31][len % 3] };
            let case = Int8Case::<G, O>::new(FIRST + inside, len, kind);
            case.check(pass, STORES[len % STORES.len()], [0, 1, 17, 31][len % 4]);
        }
    }
}

#[test]
fn all_instruction_sets_agree_with_the_specification_of_8_bit_moments() {
    check_all::<bf16, bf16>();
    check_all::<f32, bf16>();
    check_all::<f16, f16>();
    check_all::<f32, f32>();
}

/// Ordinary blocks first, then blocks of denormal moments: the second kind takes the careful path, and the first kind follows again.
#[test]
fn denormal_moments_beside_ordinary_ones_have_the_bits_of_the_specification() {
    let span = 64 * GROUP;
    let mut case = Int8Case::<bf16, bf16>::new(0, 8 * span, 0);
    let faint = Int8Case::<bf16, bf16>::new(0, 8 * span, 2);
    let groups = 3 * span / GROUP..5 * span / GROUP;
    case.m[groups.clone()].copy_from_slice(&faint.m[groups.clone()]);
    case.v[groups.clone()].copy_from_slice(&faint.v[groups]);
    for grads in [&mut case.grads, &mut case.pending_grads] {
        grads[3 * span..5 * span].fill(bf16::ZERO);
    }
    INT8_PASSES.into_iter().for_each(|pass| case.check(pass, Stores::StreamWeights, 0));
}

#[test]
#[should_panic(expected = "gradients and working weights must have 64 elements")]
fn gradients_of_another_length_are_refused() {
    let mut case = Int8Case::<bf16, bf16>::new(0, 64, 0);
    case.grads.pop();
    case.pending_grads.pop();
    case.by_kernels(AdamKernels::new(Isa::detect()).unwrap(), INT8_PASSES[0], 0);
}
