//! The optimizer on resident memory: passes of [`crate::optim`] on the compute threads.

use super::Compute;
use super::isa::vectorised;
use super::split::Chunks;
use crate::dtype::Element;
use crate::optim::adam::{self, AdamState, AdamStep};
use crate::optim::norm::{self, BLOCK};
use std::sync::atomic::{AtomicBool, Ordering};

/// Partial sums of one block of work.
const PARTIALS: usize = 4;
/// Parameters of one block of work.
const PARAMS: usize = 4 * BLOCK;

/// See [`crate::device::Kernels::grad_norm_partials`].
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

/// See [`crate::device::Kernels::adam_step`].
pub(crate) fn adam_step<G: Element, O: Element>(cx: &mut Compute, step: AdamStep, state: AdamState<'_>, grads: &[G], out: &mut [O]) {
    let isa = cx.isa;
    let moments = (Chunks::new(state.m, PARAMS), Chunks::new(state.v, PARAMS));
    let parts = (Chunks::new(state.params, PARAMS), (moments, Chunks::new(out, PARAMS)));
    cx.team.for_each(parts, |block, (params, ((m, v), out))| {
        adam_elems(isa, step, params, m, v, &grads[block * PARAMS..][..out.len()], out);
    });
}

vectorised! {
    fn norm_partials<T>(grads: &[T], out: &mut [f32]) -> bool {
        norm::partials(grads, out)
    }
}

vectorised! {
    fn adam_elems<G, O>(step: AdamStep, params: &mut [f32], m: &mut [f32], v: &mut [f32], grads: &[G], out: &mut [O]) {
        adam::step(step, &mut AdamState { params, m, v }, grads, out);
    }
}
