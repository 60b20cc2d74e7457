//! The synchronous step of split masters: a block is decoded, stepped as a block with fp32 masters, and encoded.

use super::{AdamBlock, AdamKernels, ArraySpan, BLOCK, PassAccess, lifting, shells};
use crate::optim::adam::{self, AdamStep};
use crate::optim::formats::{Grads, typed};
use crate::optim::moments::Moment;
use crate::optim::split::{self, SplitMaster, SplitState, decoded};
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
}

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
