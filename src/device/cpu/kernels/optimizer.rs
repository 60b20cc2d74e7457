//! The optimizer on device memory: the passes of [`crate::optim`] on the compute threads.

use super::Compute;
use super::arithmetic::by_float;
use super::isa::vectorised;
use super::split::Chunks;
use crate::device::cpu::CpuDevice;
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{Adam, Checked, DeviceSlice, GradNormPartials, Launch, SplitAdam, Stream};
use crate::dtype::{Dtype, Element};
use crate::error::Result;
use crate::optim::adam::{self, AdamState, AdamStep};
use crate::optim::int8::{GROUP, MomentGroup};
use crate::optim::int8_state::{self, Int8State};
use crate::optim::moments::Moment;
use crate::optim::norm::{self, BLOCK};
use crate::optim::split::{self, SplitInt8State, SplitState};
use half::bf16;
use std::sync::atomic::{AtomicBool, Ordering};

/// Partial sums that one block of work computes.
const PARTIALS: usize = 4;
/// Parameters that one block of work steps.
const PARAMS: usize = 4 * BLOCK;

impl Launch<GradNormPartials> for CpuDevice {
    fn accept(&mut self, kernel: Checked<GradNormPartials>) -> Result<()> {
        let isa = self.compute.isa();
        by_float!(kernel.grads.dtype(), T => match kernel.stream {
            Stream::Compute => self.compute(kernel, |GradNormPartials { grads, partials, nonfinite, .. }, cx, memory| {
                let (partials, nonfinite) = (memory.write(partials), memory.write::<i32>(nonfinite));
                grad_norm_partials::<T>(cx, memory.read(grads), partials, &mut nonfinite[0]);
            }),
            // Only the compute stream may use the compute threads.
            _ => self.beside(kernel, move |GradNormPartials { grads, partials, nonfinite, .. }, memory| {
                if norm_partials::<T>(isa, memory.read(grads), memory.write(partials)) {
                    memory.write::<i32>(nonfinite)[0] = 1;
                }
            }),
        })
    }
}

/// See [`GradNormPartials`].
pub(crate) fn grad_norm_partials<T: Element>(cx: &mut Compute, grads: &[T], partials: &mut [f32], nonfinite: &mut i32) {
    let isa = cx.isa;
    let found = AtomicBool::new(false);
    cx.team.for_each(Chunks::new(partials, PARTIALS), |block, partials| {
        let grads = &grads[block * PARTIALS * BLOCK..];
        if norm_partials(isa, &grads[..grads.len().min(partials.len() * BLOCK)], partials) {
            found.store(true, Ordering::Relaxed);
        }
    });
    if found.into_inner() {
        *nonfinite = 1;
    }
}

/// Moments, gradients and working weights may have three different formats.
impl Launch<Adam> for CpuDevice {
    fn accept(&mut self, kernel: Checked<Adam>) -> Result<()> {
        let moments = kernel.m.dtype();
        by_float!(kernel.grads.dtype(), G => by_float!(kernel.out.dtype(), O => match moments {
            Dtype::Bfloat16 => self.compute(kernel, resident_step::<bf16, G, O>),
            Dtype::Uint8 => self.compute(kernel, resident_int8_step::<G, O>),
            _ => self.compute(kernel, resident_step::<f32, G, O>),
        }))
    }
}

impl Launch<SplitAdam> for CpuDevice {
    fn accept(&mut self, kernel: Checked<SplitAdam>) -> Result<()> {
        match kernel.m.dtype() {
            Dtype::Bfloat16 => self.compute(kernel, resident_split_step::<bf16>),
            Dtype::Uint8 => self.compute(kernel, resident_split_int8_step),
            _ => self.compute(kernel, resident_split_step::<f32>),
        }
    }
}

fn resident_split_step<M: Moment>(adam: SplitAdam, cx: &mut Compute, memory: &TaskMemory<'_>) {
    let SplitAdam { first, weights, lower, m, v, grads, consts, scale } = adam;
    let (weights, lower) = (memory.write(weights), memory.write(lower));
    let state = SplitState { first, weights, lower, m: memory.write::<M>(m), v: memory.write(v) };
    split_adam_step(cx, AdamStep { consts, scale }, state, memory.read(grads));
}

/// See [`SplitAdam`].
fn split_adam_step<M: Moment>(cx: &mut Compute, step: AdamStep, state: SplitState<'_, M>, grads: &[bf16]) {
    let (isa, first) = (cx.isa, state.first);
    let moments = (Chunks::new(state.m, PARAMS), Chunks::new(state.v, PARAMS));
    let halves = (Chunks::new(state.weights, PARAMS), Chunks::new(state.lower, PARAMS));
    cx.team.for_each((halves, moments), |block, ((weights, lower), (m, v))| {
        let start = block * PARAMS;
        let grads = &grads[start..][..weights.len()];
        split_adam_elems(isa, step, first + start, weights, lower, m, v, grads);
    });
}

fn resident_split_int8_step(adam: SplitAdam, cx: &mut Compute, memory: &TaskMemory<'_>) {
    let SplitAdam { first, weights, lower, m, v, grads, consts, scale } = adam;
    let (weights, lower, m, v) = (memory.write(weights), memory.write(lower), groups(memory, m), groups(memory, v));
    split_int8_adam_step(cx, AdamStep { consts, scale }, SplitInt8State { first, weights, lower, m, v }, memory.read(grads));
}

/// See [`SplitAdam`].
fn split_int8_adam_step(cx: &mut Compute, step: AdamStep, state: SplitInt8State<'_>, grads: &[bf16]) {
    let (isa, first) = (cx.isa, state.first);
    let moments = (Chunks::new(state.m, PARAMS / GROUP), Chunks::new(state.v, PARAMS / GROUP));
    let halves = (Chunks::new(state.weights, PARAMS), Chunks::new(state.lower, PARAMS));
    cx.team.for_each((halves, moments), |block, ((weights, lower), (m, v))| {
        let start = block * PARAMS;
        let grads = &grads[start..][..weights.len()];
        split_int8_adam_elems(isa, step, first + start, weights, lower, m, v, grads);
    });
}

fn resident_int8_step<G: Element, O: Element>(adam: Adam, cx: &mut Compute, memory: &TaskMemory<'_>) {
    let Adam { first, params, m, v, grads, out, consts, scale } = adam;
    let (moments, step) = ([m, v].map(|moments| groups(memory, moments)), AdamStep { consts, scale });
    int8_adam_step::<G, O>(cx, step, (first, memory.write(params)), moments, memory.read(grads), memory.write(out));
}

/// The groups of 8-bit moments in `memory`.
fn groups<'a>(memory: &TaskMemory<'a>, moments: DeviceSlice) -> &'a mut [MomentGroup] {
    bytemuck::cast_slice_mut(memory.write::<u8>(moments))
}

/// See [`Adam`].
fn int8_adam_step<G: Element, O: Element>(
    cx: &mut Compute,
    step: AdamStep,
    (first, params): (usize, &mut [f32]),
    [m, v]: [&mut [MomentGroup]; 2],
    grads: &[G],
    out: &mut [O],
) {
    let isa = cx.isa;
    let moments = (Chunks::new(m, PARAMS / GROUP), Chunks::new(v, PARAMS / GROUP));
    let parts = (Chunks::new(params, PARAMS), (moments, Chunks::new(out, PARAMS)));
    cx.team.for_each(parts, |block, (params, ((m, v), out))| {
        let start = block * PARAMS;
        int8_adam_elems(isa, step, first + start, params, m, v, &grads[start..][..out.len()], out);
    });
}

fn resident_step<M: Moment, G: Element, O: Element>(adam: Adam, cx: &mut Compute, memory: &TaskMemory<'_>) {
    let Adam { first, params, m, v, grads, out, consts, scale } = adam;
    let state = AdamState { first, params: memory.write(params), m: memory.write::<M>(m), v: memory.write(v) };
    adam_step::<M, G, O>(cx, AdamStep { consts, scale }, state, memory.read(grads), memory.write(out));
}

/// See [`Adam`].
pub(crate) fn adam_step<M: Moment, G: Element, O: Element>(
    cx: &mut Compute,
    step: AdamStep,
    state: AdamState<'_, M>,
    grads: &[G],
    out: &mut [O],
) {
    let (isa, first) = (cx.isa, state.first);
    let moments = (Chunks::new(state.m, PARAMS), Chunks::new(state.v, PARAMS));
    let parts = (Chunks::new(state.params, PARAMS), (moments, Chunks::new(out, PARAMS)));
    cx.team.for_each(parts, |block, (params, ((m, v), out))| {
        let start = block * PARAMS;
        adam_elems(isa, step, first + start, params, m, v, &grads[start..][..out.len()], out);
    });
}

vectorised! {
    fn norm_partials<T>(grads: &[T], out: &mut [f32]) -> bool {
        norm::partials(grads, out)
    }
}

vectorised! {
    fn adam_elems<M: Moment, G, O>(step: AdamStep, first: usize, params: &mut [f32], m: &mut [M], v: &mut [M], grads: &[G], out: &mut [O]) {
        adam::step(step, &mut AdamState { first, params, m, v }, grads, out);
    }
}

vectorised! {
    fn split_adam_elems<M: Moment>(
        step: AdamStep, first: usize, weights: &mut [bf16], lower: &mut [u16], m: &mut [M], v: &mut [M], grads: &[bf16],
    ) {
        split::step(step, &mut SplitState { first, weights, lower, m, v }, grads);
    }
}

vectorised! {
    fn int8_adam_elems<G, O>(
        step: AdamStep, first: usize, params: &mut [f32], m: &mut [MomentGroup], v: &mut [MomentGroup], grads: &[G], out: &mut [O],
    ) {
        int8_state::run([Some((step, grads)), None], &mut Int8State::new(first, params, m, v), Some(out));
    }
}

vectorised! {
    fn split_int8_adam_elems(
        step: AdamStep, first: usize, weights: &mut [bf16], lower: &mut [u16], m: &mut [MomentGroup], v: &mut [MomentGroup],
        grads: &[bf16],
    ) {
        split::step_int8(step, &mut SplitInt8State { first, weights, lower, m, v }, grads);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_same_everywhere, bits, fastest, values};
    use super::*;
    use crate::optim::adam::{AdamConsts, AdamHyper};
    use crate::optim::int8::{self, MomentKind};
    use crate::optim::samples::split_masters;

    const ELEMS: usize = 3 * PARAMS + 77;

    #[test]
    fn partials_and_flag_are_those_of_the_specification() {
        let mut grads = values::<bf16>(1, ELEMS);
        for poison in [None, Some(0), Some(ELEMS - 1)] {
            if let Some(at) = poison {
                grads[at] = bf16::INFINITY;
            }
            let (mut got, mut want) = (vec![0.0; ELEMS.div_ceil(BLOCK)], vec![0.0; ELEMS.div_ceil(BLOCK)]);
            for before in [0, 1] {
                let mut nonfinite = before;
                grad_norm_partials(&mut fastest(), &grads, &mut got, &mut nonfinite);
                assert_eq!(nonfinite == 1, norm::partials(&grads, &mut want) || before == 1);
                assert_eq!(bits(&got), bits(&want));
            }
        }
    }

    fn adam_matches<M: Moment>() {
        let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let step = AdamStep { consts: AdamConsts::new(&hyper, 3, true), scale: 0.7 };
        let (grads, positive) = (values::<bf16>(1, ELEMS), |x: &f32| M::from_f32(x.abs()));
        let run = |pass: &mut dyn FnMut(AdamState<'_, M>, &mut [bf16])| {
            let (mut params, mut m) = (values::<f32>(2, ELEMS), values::<M>(3, ELEMS));
            let mut v: Vec<M> = values::<f32>(4, ELEMS).iter().map(positive).collect();
            let mut out = vec![bf16::ZERO; ELEMS];
            pass(AdamState { first: 99, params: &mut params, m: &mut m, v: &mut v }, &mut out);
            [bits(&params), bits(&m), bits(&v), bits(&out)].concat()
        };
        let want = run(&mut |mut state, out| adam::step(step, &mut state, &grads, out));
        assert_same_everywhere(|cx| {
            let got = run(&mut |state, out| adam_step(cx, step, state, &grads, out));
            assert!(got == want);
            got
        });
    }

    #[test]
    fn adam_is_the_specification_to_the_bit() {
        adam_matches::<f32>();
        adam_matches::<bf16>();
    }

    fn int8_moments(seed: u64) -> [Vec<MomentGroup>; 2] {
        let v: Vec<f32> = values::<f32>(seed + 1, WHOLE).iter().map(|v| v.abs()).collect();
        [MomentKind::First.groups(&values::<f32>(seed, WHOLE)), MomentKind::Second.groups(&v)]
    }

    const WHOLE: usize = 3 * PARAMS + GROUP;

    /// A step on parameters, moments and working weights.
    type Int8Pass<'a> = dyn FnMut(&mut [f32], [&mut [MomentGroup]; 2], &mut [bf16]) + 'a;

    #[test]
    fn adam_with_8_bit_moments_is_the_specification_to_the_bit() {
        let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let (step, first) = (AdamStep { consts: AdamConsts::new(&hyper, 3, true), scale: 0.7 }, GROUP);
        let (grads, masters) = (values::<bf16>(1, WHOLE), values::<f32>(2, WHOLE).into_iter().map(int8::settled).collect::<Vec<_>>());
        let bytes = |groups: &[MomentGroup]| bytemuck::cast_slice::<_, u8>(groups).to_vec();
        let whole = |pass: &mut Int8Pass<'_>| {
            let (mut params, [mut m, mut v], mut out) = (masters.clone(), int8_moments(3), vec![bf16::ZERO; WHOLE]);
            pass(&mut params, [&mut m, &mut v], &mut out);
            [bits(&params), bits(&out), bytes(&m), bytes(&v)].concat()
        };
        let want = whole(&mut |params, [m, v], out| {
            int8_state::run([Some((step, &grads[..])), None], &mut Int8State::new(first, params, m, v), Some(out));
        });
        let split = |cx: &mut Compute| {
            let halves = masters.iter().map(|&master| split::SplitMaster::of(master));
            let (mut weights, mut lower): (Vec<_>, Vec<_>) = halves.map(|half| (half.weight, half.lower)).unzip();
            let [mut m, mut v] = int8_moments(3);
            let state = SplitInt8State { first, weights: &mut weights, lower: &mut lower, m: &mut m, v: &mut v };
            split_int8_adam_step(cx, step, state, &grads);
            let mut params = vec![0.0; WHOLE];
            split::join(&weights, &lower, None, &mut params);
            [bits(&params), bits(&weights), bytes(&m), bytes(&v)].concat()
        };
        assert_same_everywhere(|cx| {
            let got = whole(&mut |params, moments, out| int8_adam_step(cx, step, (first, params), moments, &grads, out));
            assert!(got == want && split(cx) == want);
            got
        });
    }

    fn split_adam_matches<M: Moment>() {
        let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let step = AdamStep { consts: AdamConsts::new(&hyper, 3, true), scale: 0.7 };
        let (grads, masters) = (values::<bf16>(1, ELEMS), split_masters(2, ELEMS));
        let run = |pass: &mut dyn FnMut(SplitState<'_, M>)| {
            let mut m = values::<M>(3, ELEMS);
            let v = values::<f32>(4, ELEMS);
            let halves = masters.iter().zip(v).map(|(&master, v)| split::encoded(master, M::from_f32(v.abs())));
            let (mut weights, (mut lower, mut v)): (Vec<_>, (Vec<_>, Vec<_>)) = halves.map(|(w, lower, v)| (w, (lower, v))).unzip();
            pass(SplitState { first: 99, weights: &mut weights, lower: &mut lower, m: &mut m, v: &mut v });
            let lower: Vec<bf16> = lower.into_iter().map(bf16::from_bits).collect();
            [bits(&weights), bits(&lower), bits(&m), bits(&v)].concat()
        };
        let want = run(&mut |mut state| split::step(step, &mut state, &grads));
        assert_same_everywhere(|cx| {
            let got = run(&mut |state| split_adam_step(cx, step, state, &grads));
            assert!(got == want);
            got
        });
    }

    #[test]
    fn adam_with_split_masters_is_the_specification_to_the_bit() {
        split_adam_matches::<f32>();
        split_adam_matches::<bf16>();
    }
}
