//! Passes over states with 8-bit moments, for every instruction set: blocks of [`int8_state`], with prefetches and streamed weights.
//!
//! The formats of gradients and weights are distinguished in every block. A pass for each combination of formats would be at most 5 %
//! faster, and would be compiled nine times.

use super::lifting::Lifting;
use super::{AdamKernels, BLOCK, Isa, LINE_BYTES, PassAccess, StoreLine, shells};
#[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
use super::{int8_avx2::Avx2, int8_avx512::Avx512, int8_codec::VectorCodec};
use crate::optim::adam::{self, AdamState, AdamStep};
use crate::optim::formats::{Grads, Weights, typed};
use crate::optim::int8::{self, BlockCodec, GROUP, MomentGroup, PlainCodec};
use crate::optim::int8_state::{self, BlockGrads, BlockPass, BlockStep, Int8State, Lanes};
use std::ops::Range;

/// Blocks of passes are blocks of the format.
const _: () = assert!(BLOCK == int8::BLOCK);

/// An update of a range of parameters: the step and the gradients.
pub(super) type Int8Update<'a> = (AdamStep, Grads<'a>);

/// The updates `commit` and `speculate` of a pass.
type Int8Updates<'a> = [Option<Int8Update<'a>>; 2];

impl AdamKernels {
    /// See [`int8_state::run`]: the updates are `commit` and `speculate`.
    ///
    /// # Panics
    /// Also if there is no update.
    pub fn run_int8(self, updates: Int8Updates<'_>, state: &mut Int8State<'_>, out: Option<Weights<'_>>) {
        state.check(updates.map(|update| update.map(|(_, grads)| grads.len())), out.as_ref().map(Weights::len));
        let elems = state.params.len();
        if shells::WHOLE {
            return self.run(
                #[inline(always)]
                |_| Operands { state: state.reborrow(), out }.run_part(updates, 0..elems),
            );
        }
        let operands = Operands { state: state.reborrow(), out };
        // Functions and not values, so that the compiler leaves out the parts of the other update.
        match updates {
            [Some(commit), None] => self.run_int8_blocks(
                #[inline(always)]
                move || [Some(commit), None],
                operands,
            ),
            [None, Some(speculate)] => self.run_int8_blocks(
                #[inline(always)]
                move || [None, Some(speculate)],
                operands,
            ),
            [Some(commit), Some(speculate)] => self.run_int8_blocks(
                #[inline(always)]
                move || [Some(commit), Some(speculate)],
                operands,
            ),
            [None, None] => panic!("a pass without an update"),
        }
    }

    /// The pass in blocks. `updates` returns the updates.
    #[inline(always)]
    fn run_int8_blocks<'a>(self, updates: impl Fn() -> Int8Updates<'a> + Copy, operands: Operands<'_>) {
        let (liftings, elems) = (updates().map(|update| update.map(|(step, _)| Lifting::new(step))), operands.state.params.len());
        // Blocks of the flat order: only they may be written.
        let lead = (BLOCK - operands.state.first % BLOCK) % BLOCK;
        self.run_blocks_from(
            lead,
            operands.out.as_ref().is_some_and(|out| begins_line(out, lead)),
            elems,
            operands,
            #[inline(always)]
            move |operands, access, at| operands.run((updates(), &liftings), access, at),
        );
    }
}

/// Whether element `lead` begins a cache line.
fn begins_line(out: &Weights<'_>, lead: usize) -> bool {
    typed!(Weights(out) = out => (out.as_ptr().addr() + lead * size_of_val(&out[..1.min(out.len())])).is_multiple_of(LINE_BYTES))
}

/// The steps of blocks that may have small numbers: of each update.
pub(super) type Liftings = [Option<Lifting>; 2];

/// Takes an update's step on a block.
#[derive(Clone, Copy)]
struct Stepper<'a> {
    isa: Isa,
    /// If the block may have small numbers.
    lifting: Option<&'a Lifting>,
}

impl BlockStep for Stepper<'_> {
    #[inline(always)]
    fn step(self, step: AdamStep, block: &mut AdamState<'_>, grads: &[f32; BLOCK]) -> bool {
        if let Some(lifting) = self.lifting {
            return lifting.commit(self.isa, block, grads);
        }
        adam::commit(step, block, grads);
        false
    }
}

impl BlockGrads for Grads<'_> {
    #[inline(always)]
    fn len(self) -> usize {
        typed!(Grads(grads) = self => grads.len())
    }

    #[inline(always)]
    fn widened(self, lanes: Lanes) -> [f32; BLOCK] {
        typed!(Grads(grads) = self => grads.widened(lanes))
    }
}

/// The state and the working weights of a pass.
pub(super) struct Operands<'a> {
    pub state: Int8State<'a>,
    pub out: Option<Weights<'a>>,
}

impl Operands<'_> {
    /// The pass on the elements `at`, by the specification.
    #[inline(always)]
    fn run_part(&mut self, updates: Int8Updates<'_>, at: Range<usize>) {
        match &mut self.out {
            None => int8_state::run_part::<_, f32>(updates, &mut self.state, None, at),
            Some(out) => typed!(Weights(out) = out => int8_state::run_part(updates, &mut self.state, Some(&mut out[..]), at)),
        }
    }

    /// The pass on the elements `at`: a block, or a part of blocks for [`Isa::Scalar`]. Returns whether they had small numbers.
    #[inline(always)]
    pub(super) fn run(&mut self, (updates, liftings): (Int8Updates<'_>, &Liftings), access: PassAccess, at: Range<usize>) -> bool {
        let stepped = [0, 1].map(|nth| Stepper { isa: access.isa, lifting: liftings[nth].as_ref().filter(|_| access.careful) });
        match access.isa {
            Isa::Scalar => {
                self.run_part(updates, at);
                false
            }
            #[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
            // SAFETY: this pass runs with AVX2.
            Isa::Avx2 => self.run_block(BlockPass { codec: unsafe { VectorCodec::<Avx2>::new() }, updates, stepped }, access, at),
            #[cfg(all(feature = "grace-adam", target_arch = "x86_64"))]
            // SAFETY: this pass runs with AVX-512.
            Isa::Avx512 => self.run_block(BlockPass { codec: unsafe { VectorCodec::<Avx512>::new() }, updates, stepped }, access, at),
            _ => self.run_block(BlockPass { codec: PlainCodec, updates, stepped }, access, at),
        }
    }

    /// The pass on a block.
    #[inline(always)]
    fn run_block(&mut self, pass: BlockPass<impl BlockCodec, Stepper<'_>, Grads<'_>>, access: PassAccess, at: Range<usize>) -> bool {
        self.prefetch(pass.updates, access, at.start);
        let (block, small) = pass.run(&mut self.state, Lanes::whole(at.start));
        if let Some(out) = &mut self.out {
            typed!(Weights(out) = out => access.emit(&block.params, &mut out[at]));
        }
        small
    }

    /// Prefetches the state and the gradients of later elements.
    #[inline(always)]
    fn prefetch(&self, updates: Int8Updates<'_>, access: PassAccess, at: usize) {
        access.prefetch(self.state.params, at);
        for (_, grads) in updates.into_iter().flatten() {
            typed!(Grads(grads) = grads => access.prefetch(grads, at));
        }
        prefetch_groups(access, [self.state.m.all(), self.state.v.all()], at);
    }
}

/// Prefetches the groups of moments that a pass at element `at` will read later.
#[inline(always)]
pub(super) fn prefetch_groups(access: PassAccess, moments: [&[MomentGroup]; 2], at: usize) {
    if access.prefetch_elems > 0 {
        // Groups and lines have nearly the same period, so a line for each block suffices.
        let ahead = (at + access.prefetch_elems) * size_of::<MomentGroup>() / GROUP;
        for groups in moments {
            shells::prefetch(groups.as_ptr().cast::<u8>().wrapping_add(ahead).cast::<StoreLine>());
        }
    }
}
