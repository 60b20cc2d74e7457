//! The synchronous step of split masters: a block is decoded, stepped as a block with fp32 masters, and encoded.

use super::{AdamBlock, AdamKernels, ArraySpan, BLOCK, PassAccess, Stores, lifting, shells};
use crate::optim::adam::{self, AdamStep};
use crate::optim::formats::{Grads, Weights, typed};
use crate::optim::int8::GROUP;
use crate::optim::int8_state::Int8State;
use crate::optim::moments::Moment;
use crate::optim::split::{self, SplitInt8State, SplitMaster, SplitState, decoded};
use half::bf16;
use std::ops::Range;

impl AdamKernels {
    /// See [`split::step`].
    pub fn step_split<M: Moment>(self, step: AdamStep, state: &mut SplitState<'_, M>, grads: Grads<'_>) {
        typed!(Grads(g) = grads => {
            if shells::WHOLE {
                return self.run(#[inline(always)] |_| split::step(step, state, g));
            }
            let (state, lifting) = (state.sized(g.len()), lifting::Lifting::new(step));
            self.run_blocks(g.len(), spans(&state), state, #[inline(always)] move |state, access, at| {
                let (mut block, grads) = (AdamBlock::decoded(access, state, &at), access.read(g, &at));
                let (mut new, narrow) = block.buffers(at.len());
                let small = access.careful && lifting.step(access.isa, &mut new, grads, narrow);
                if !access.careful {
                    adam::step(step, &mut new, grads, narrow);
                }
                block.store_encoded(access, state, &at);
                small
            });
        });
    }

    /// [`split::step_int8`]: parts of the masters are joined in memory that the first cache holds.
    pub(crate) fn step_split_int8(self, step: AdamStep, state: SplitInt8State<'_>, grads: Grads<'_>) {
        let (kernels, SplitInt8State { first, weights, lower, m, v }) = (self.with_stores(Stores::Temporal), state);
        let (mut masters, elems) = ([0.0; PART], weights.len());
        for start in (0..elems).step_by(PART) {
            let (at, groups) = (start..elems.min(start + PART), start / GROUP..elems.min(start + PART).div_ceil(GROUP));
            let (weights, lower) = (&mut weights[at.clone()], &mut lower[at.clone()]);
            let params = &mut masters[..at.len()];
            self.run(
                #[inline(always)]
                |_| split::join_settled(weights, lower, params),
            );
            let state = &mut Int8State::new(first + start, params, &mut m[groups.clone()], &mut v[groups]);
            let grads = grads.part(at);
            kernels.run_int8([Some((step, grads)), None], state, Some(Weights::Bf16(weights)));
            self.run(
                #[inline(always)]
                |_| lower.iter_mut().zip(params).for_each(|(lower, master)| *lower = master.to_bits() as u16),
            );
        }
    }
}

/// Masters that are joined at once: 4 KiB.
const PART: usize = 1024;

#[inline(always)]
fn spans<M: Moment>(state: &SplitState<'_, M>) -> [ArraySpan; 4] {
    [ArraySpan::of(state.weights), ArraySpan::of(state.lower), ArraySpan::of(state.m), ArraySpan::of(state.v)]
}

impl<M: Moment> AdamBlock<M, bf16> {
    /// Loads the elements `at` of the state, at most a block.
    #[inline(always)]
    fn decoded(access: PassAccess, state: &SplitState<'_, M>, at: &Range<usize>) -> Self {
        let (out, lower) = (access.head(state.weights, at), access.head(state.lower, at));
        let (m, signed) = (access.head(state.m, at), access.head(state.v, at));
        let (mut params, mut v) = ([0.0; BLOCK], signed);
        for i in 0..BLOCK {
            params[i] = decoded(out[i], lower[i], signed[i]);
            v[i] = signed[i].with_sign(false);
        }
        Self { first: state.first.wrapping_add(at.start), params, m, v, out }
    }

    /// Stores the elements `at`. Their working weights are in the block already.
    #[inline(always)]
    fn store_encoded(&self, access: PassAccess, state: &mut SplitState<'_, M>, at: &Range<usize>) {
        let (mut lower, mut v) = ([0; BLOCK], self.v);
        for i in 0..BLOCK {
            let split = SplitMaster::of(self.params[i]);
            (lower[i], v[i]) = (split.lower, v[i].with_sign(split.tie));
        }
        self.store_out(access, state.weights, at);
        access.write(access.stream_state, &mut state.lower[at.clone()], &super::LineAligned(lower).0);
        access.write(access.stream_state, &mut state.m[at.clone()], &self.m);
        access.write(access.stream_state, &mut state.v[at.clone()], &super::LineAligned(v).0);
    }
}
