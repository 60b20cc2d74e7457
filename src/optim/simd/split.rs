//! The synchronous step of split masters: a block is decoded, stepped as a block with fp32 masters, and encoded.

use super::int8::{Int8Update, Liftings, Operands, prefetch_groups};
use super::lifting::Lifting;
use super::{AdamBlock, AdamKernels, ArraySpan, BLOCK, LineAligned, PassAccess, shells};
use crate::optim::adam::{self, AdamStep};
use crate::optim::formats::{Grads, Weights, typed};
use crate::optim::int8::GROUP;
use crate::optim::int8_state::{BlockGrads, Int8State};
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
            let (state, lifting) = (state.sized(g.len()), Lifting::new(step));
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

    /// See [`split::step_int8`].
    pub(crate) fn step_split_int8(self, step: AdamStep, mut state: SplitInt8State<'_>, grads: Grads<'_>) {
        if shells::WHOLE {
            return typed!(Grads(g) = grads => self.run(#[inline(always)] |_| split::step_int8(step, &mut state, g)));
        }
        let elems = grads.len();
        state.check(elems);
        let liftings = [Some(Lifting::new(step)), None];
        // Halves are read and written, so their lines are in the caches when they are stored.
        self.run_blocks_from(
            0,
            false,
            elems,
            state,
            #[inline(always)]
            move |state, access, at| state.run_block((step, grads), &liftings, access, at),
        );
    }
}

impl SplitInt8State<'_> {
    /// The step of the elements `at`, at most a block: the block is a state with fp32 masters while it is stepped. Returns whether it had
    /// small numbers.
    #[inline(always)]
    fn run_block(&mut self, (step, grads): Int8Update<'_>, liftings: &Liftings, access: PassAccess, at: Range<usize>) -> bool {
        let (mut masters, group) = (LineAligned([0.0; BLOCK]), at.start / GROUP);
        let params = &mut masters.0[..at.len()];
        split::join_settled(access.read(self.weights, &at), access.read(self.lower, &at), params);
        prefetch_groups(access, [&*self.m, &*self.v], at.start);
        typed!(Grads(grads) = grads => access.prefetch(grads, at.start));
        let [m, v] = [&mut *self.m, &mut *self.v].map(|groups| std::slice::from_mut(&mut groups[group]));
        let state = Int8State::new(self.first + at.start, params, m, v);
        let mut block = Operands { state, out: Some(Weights::Bf16(&mut self.weights[at.clone()])) };
        let updates = [Some((step, grads.part(at.clone()))), None];
        let small = block.run((updates, liftings), PassAccess { prefetch_elems: 0, ..access }, 0..at.len());
        for (lower, master) in self.lower[at].iter_mut().zip(masters.0) {
            *lower = master.to_bits() as u16;
        }
        small
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
        access.write(access.stream_state, &mut state.lower[at.clone()], &LineAligned(lower).0);
        access.write(access.stream_state, &mut state.m[at.clone()], &self.m);
        access.write(access.stream_state, &mut state.v[at.clone()], &LineAligned(v).0);
    }
}
