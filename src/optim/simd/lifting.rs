//! Denormal moments and gradients at the speed of normal ones.
//!
//! x86-64 cores multiply denormal numbers in microcode, more than ten times slower than normal numbers. A moment without gradients decays
//! until it is denormal, and stays denormal. The CPU sets flags for denormal operands and underflows. A pass reads the flags after each
//! [`DenormalWatch::ELEMS`] elements, and checks the magnitudes of every block while a flag is set. A block of small numbers is stepped by
//! [`LiftedStep`], with the bits of the specification. The flags affect only the time. Arm's vectors process denormal numbers at full speed
//! and need none of this.

use super::{BLOCK, Isa, shells};
use crate::dtype::Element;
use crate::optim::adam::{AdamState, AdamStep};
use crate::optim::lifted_step::{LiftedStep, Numbers};
use crate::optim::moments::Moment;

/// Decides for which spans of a pass blocks are checked individually: from the span in which the CPU set a flag for a denormal operand or
/// an underflow, until several spans had no small block. The flag is cleared only then, so the thread's next pass begins in the state in
/// which this one ended.
#[derive(Clone, Copy)]
pub(super) struct DenormalWatch {
    /// With `Isa::Scalar`, the specification runs without a watch.
    isa: Isa,
    spans_left: u32,
}

impl DenormalWatch {
    /// Elements of a span.
    pub(super) const ELEMS: usize = 64 * BLOCK;

    /// Number of spans without a small block after which checking ends.
    const SPANS: u32 = 8;

    #[inline(always)]
    pub(super) fn new(isa: Isa) -> Self {
        let mut watch = Self { isa, spans_left: 0 };
        watch.poll();
        watch
    }

    /// Whether blocks of the next span are checked.
    #[inline(always)]
    pub(super) fn is_careful(self) -> bool {
        self.spans_left > 0
    }

    /// Begins checking if the CPU's flags are set.
    #[inline(always)]
    pub(super) fn poll(&mut self) {
        if self.isa != Isa::Scalar && shells::denormals_noted() {
            self.spans_left = Self::SPANS;
        }
    }

    /// Ends a span with checks.
    #[inline(always)]
    pub(super) fn saw(&mut self, small: bool) {
        self.spans_left = if small { Self::SPANS } else { self.spans_left - 1 };
        if self.spans_left == 0 {
            shells::forget_denormals();
        }
    }
}

/// The passes of [`adam`](crate::optim::adam) on a block that may contain small numbers. Each returns whether it did.
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
        // SAFETY: the CPU supports the instruction set of the pass.
        let small = unsafe { shells::lifted(isa, &self.0, &mut numbers) };
        (numbers, small)
    }
}
