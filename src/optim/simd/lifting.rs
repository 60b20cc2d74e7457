//! Denormal moments and gradients at the speed of normal ones.
//!
//! x86-64 cores multiply denormal numbers in microcode, ten times and more slower than normal ones: a moment that gets no gradient decays
//! until it is denormal, and stays so. The CPU notes denormal operands and underflows. A pass asks for the note after each
//! [`DenormalWatch::ELEMS`] elements, and looks at the magnitudes of every block while there is one; a block of small numbers is stepped by
//! [`LiftedStep`], whose bits are the specification's. Nothing depends on the note but time. Arm's vectors take denormal numbers at full
//! speed and need none of this.

use super::{BLOCK, Isa, shells};
use crate::dtype::Element;
use crate::optim::adam::{AdamState, AdamStep};
use crate::optim::lifted_step::{LiftedStep, Numbers};
use crate::optim::moments::Moment;

/// Decides in which spans of a pass blocks are looked at one by one: from where the CPU noted a denormal operand or an underflow, until
/// several spans had no small block. The note stays until then, and so the thread's next pass begins as this one ended.
#[derive(Clone, Copy)]
pub(super) struct DenormalWatch {
    /// The specification itself needs no watch.
    isa: Isa,
    spans_left: u32,
}

impl DenormalWatch {
    /// Elements of a span.
    pub(super) const ELEMS: usize = 64 * BLOCK;

    /// Spans without a small block after which none is expected.
    const SPANS: u32 = 8;

    #[inline(always)]
    pub(super) fn new(isa: Isa) -> Self {
        let mut watch = Self { isa, spans_left: 0 };
        watch.ask();
        watch
    }

    /// Whether blocks of the next span are looked at.
    #[inline(always)]
    pub(super) fn is_careful(self) -> bool {
        self.spans_left > 0
    }

    /// Begins to look if the CPU made its note.
    #[inline(always)]
    pub(super) fn ask(&mut self) {
        if self.isa != Isa::Scalar && shells::denormals_noted() {
            self.spans_left = Self::SPANS;
        }
    }

    /// Ends a span that was looked at.
    #[inline(always)]
    pub(super) fn saw(&mut self, small: bool) {
        self.spans_left = if small { Self::SPANS } else { self.spans_left - 1 };
        if self.spans_left == 0 {
            shells::forget_denormals();
        }
    }
}

/// The passes of [`adam`](crate::optim::adam) on a block that may hold small numbers. Each returns whether it did.
#[derive(Clone, Copy)]
pub(super) struct Lifting(LiftedStep);

impl Lifting {
    pub(super) fn new(step: AdamStep) -> Self {
        Self(LiftedStep::new(step))
    }

    #[inline(always)]
    pub(super) fn step<M: Moment, G: Element, O: Element>(
        &self,
        isa: Isa,
        state: &mut AdamState<'_, M>,
        grads: &[G],
        out: &mut [O],
    ) -> bool {
        let (numbers, small) = self.stepped(isa, state, grads);
        numbers.store_state(state, self.0.step);
        numbers.store_out(out);
        small
    }

    #[inline(always)]
    pub(super) fn speculate<M: Moment, G: Element, O: Element>(
        &self,
        isa: Isa,
        state: &AdamState<'_, M>,
        grads: &[G],
        out: &mut [O],
    ) -> bool {
        let (numbers, small) = self.stepped(isa, state, grads);
        numbers.store_out(out);
        small
    }

    #[inline(always)]
    pub(super) fn commit<M: Moment, G: Element>(&self, isa: Isa, state: &mut AdamState<'_, M>, grads: &[G]) -> bool {
        let (numbers, small) = self.stepped(isa, state, grads);
        numbers.store_state(state, self.0.step);
        small
    }

    #[inline(always)]
    fn stepped<M: Moment, G: Element>(&self, isa: Isa, state: &AdamState<'_, M>, grads: &[G]) -> (Numbers<BLOCK>, bool) {
        let mut numbers = Numbers::of(state, grads);
        // SAFETY: the instruction set of a pass is one that the CPU has.
        let small = unsafe { shells::lifted(isa, &self.0, &mut numbers) };
        (numbers, small)
    }
}
