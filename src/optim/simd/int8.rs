//! Passes over states with 8-bit moments, for every instruction set: blocks of [`int8_state`], with prefetches and streamed weights.

#[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
use super::int8_avx512::Avx512Codec;
use super::lifting::Lifting;
use super::{AdamKernels, BLOCK, Isa, LINE_BYTES, LineAligned, PassAccess, StoreLine, shells};
use crate::dtype::Element;
use crate::optim::adam::{self, AdamState, AdamStep};
use crate::optim::formats::{Grads, Weights, typed};
use crate::optim::int8::{self, BlockCodec, GROUP, MomentGroup, PlainCodec};
use crate::optim::int8_state::{self, Int8State, Int8Update, Lanes, run_block};
use std::ops::Range;

/// Blocks of passes are blocks of the format.
const _: () = assert!(BLOCK == int8::BLOCK);

impl AdamKernels {
    /// See [`int8_state::run`]: the updates are `commit` and `speculate`.
    ///
    /// # Panics
    /// Also if the gradients have different formats, or there is no update.
    pub fn run_int8(self, updates: [Option<(AdamStep, Grads<'_>)>; 2], state: &mut Int8State<'_>, out: Option<Weights<'_>>) {
        use Grads::{Bf16, F16, F32};
        let [commit, speculate] = updates.map(|update| update.map(|(_, grads)| grads));
        let steps = updates.map(|update| update.map(|(step, _)| step));
        match (commit, speculate) {
            (Some(F32(h)), Some(F32(g))) => self.in_format(steps, [h, g], state, out),
            (Some(Bf16(h)), Some(Bf16(g))) => self.in_format(steps, [h, g], state, out),
            (Some(F16(h)), Some(F16(g))) => self.in_format(steps, [h, g], state, out),
            (Some(g), None) | (None, Some(g)) => typed!(Grads(g) = g => self.in_format(steps, [g, g], state, out)),
            _ => panic!("an update, or two with gradients of one format"),
        }
    }

    fn in_format<G: Element>(
        self,
        [commit, speculate]: [Option<AdamStep>; 2],
        [h, g]: [&[G]; 2],
        state: &mut Int8State<'_>,
        out: Option<Weights<'_>>,
    ) {
        let updates = [commit.map(|step| (step, h)), speculate.map(|step| (step, g))];
        match out {
            None => self.in_formats::<G, f32>(updates, state, None),
            Some(out) => typed!(Weights(o) = out => self.in_formats(updates, state, Some(o))),
        }
    }

    fn in_formats<G: Element, O: Element>(self, updates: [Int8Update<'_, G>; 2], state: &mut Int8State<'_>, out: Option<&mut [O]>) {
        if shells::WHOLE {
            return self.run(
                #[inline(always)]
                |_| int8_state::run(updates, state, out),
            );
        }
        let elems = state.params.len();
        state.check(updates, &out);
        let liftings = updates.map(|update| update.map(|(step, _)| Lifting::new(step)));
        // Blocks of the flat order: only they may be written.
        let lead = (BLOCK - state.first % BLOCK) % BLOCK;
        let lines = out.as_ref().is_some_and(|out| (out.as_ptr().addr() + lead * size_of::<O>()).is_multiple_of(LINE_BYTES));
        let state = Int8State { first: state.first, params: &mut *state.params, m: state.m.reborrow(), v: state.v.reborrow() };
        self.run_blocks_from(
            lead,
            lines,
            elems,
            (state, out),
            #[inline(always)]
            move |(state, out), access, at| access.int8_block((updates, &liftings), state, out.as_deref_mut(), at),
        );
    }
}

/// The steps of blocks that may have small numbers: of each update.
type Liftings = [Option<Lifting>; 2];

/// Takes the updates' steps on a block.
struct Stepper<'a> {
    isa: Isa,
    /// If the block may have small numbers.
    liftings: Option<&'a Liftings>,
}

impl Stepper<'_> {
    /// Takes the step of the update `nth`. Returns whether the block had small numbers.
    #[inline(always)]
    fn step(&self, nth: usize, step: AdamStep, block: &mut AdamState<'_>, grads: &[f32; BLOCK]) -> bool {
        if let Some(lifting) = self.liftings.and_then(|liftings| liftings[nth].as_ref()) {
            return lifting.commit(self.isa, block, grads);
        }
        adam::commit(step, block, grads);
        false
    }

    /// See [`run_block`].
    #[inline(always)]
    fn run<G: Element, O: Element>(
        &self,
        codec: impl BlockCodec,
        updates: [Int8Update<'_, G>; 2],
        state: &mut Int8State<'_>,
        lanes: Lanes,
        out: Option<&mut [O]>,
    ) -> bool {
        run_block(
            codec,
            updates,
            state,
            lanes,
            out,
            #[inline(always)]
            |nth, step, block, grads| self.step(nth, step, block, grads),
        )
    }
}

impl PassAccess {
    /// The pass on the elements `at`. Returns whether they had small numbers.
    #[inline(always)]
    fn int8_block<G: Element, O: Element>(
        self,
        (updates, liftings): ([Int8Update<'_, G>; 2], &Liftings),
        state: &mut Int8State<'_>,
        out: Option<&mut [O]>,
        at: Range<usize>,
    ) -> bool {
        self.prefetch_state(state, &at);
        for (_, grads) in updates.into_iter().flatten() {
            self.prefetch(grads, at.start);
        }
        let mut weights = LineAligned([O::from_f32(0.0); BLOCK]);
        let lanes = if self.isa == Isa::Scalar { Lanes::part(state.first, &at) } else { Lanes::whole(at.start) };
        let narrow = out.is_some().then_some(&mut weights.0[..lanes.len()]);
        let stepper = Stepper { isa: self.isa, liftings: self.careful.then_some(liftings) };
        let small = match self.isa {
            #[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
            // SAFETY: this pass runs with AVX-512.
            Isa::Avx512 => stepper.run(unsafe { Avx512Codec::new() }, updates, state, lanes, narrow),
            _ => stepper.run(PlainCodec, updates, state, lanes, narrow),
        };
        if let Some(out) = out {
            self.write(self.stream_out, &mut out[at], &weights.0);
        }
        small
    }

    /// Prefetches the state of later elements.
    #[inline(always)]
    fn prefetch_state(self, state: &Int8State<'_>, at: &Range<usize>) {
        self.prefetch(state.params, at.start);
        if self.prefetch_elems > 0 {
            // Groups and lines have nearly the same period, so a line for each block suffices.
            let ahead = (at.start + self.prefetch_elems) * size_of::<MomentGroup>() / GROUP;
            for groups in [state.m.all(), state.v.all()] {
                shells::prefetch(groups.as_ptr().cast::<u8>().wrapping_add(ahead).cast::<StoreLine>());
            }
        }
    }
}
