//! The passes of an optimizer over the state of a part of a bucket in host memory.
//!
//! The engine calls them through [`HostPasses`], once for each part of a bucket. The calls are resolved at compile time, and the loops over
//! elements are inside the passes.

use crate::optim::adam::{AdamConsts, AdamHyper, AdamState, AdamStep};
use crate::optim::formats::{Grads, Weights};
use crate::optim::moments::{Moment, Moments};
use crate::optim::optimizer::{Optimizer, Update};
use crate::optim::simd::AdamKernels;
use crate::optim::state_array::PerArray;
use half::bf16;
use std::marker::PhantomData;

/// The passes of an optimizer. `decay` is the rule of weight decay of the part: a part has one rule.
pub(crate) trait HostPasses: Copy {
    /// The arrays of a part, in their formats.
    type State<'a>;
    /// The constants of one update.
    type Step: Copy;

    /// The state in `arrays`; `first` is the index of its first element in the flat order.
    fn state<'a>(self, first: usize, arrays: PerArray<&'a mut [u8]>) -> Self::State<'a>;

    /// The constants of `update`.
    fn constants(self, update: Update, decay: bool) -> Self::Step;

    /// Applies a gradient to the state and writes the new working weights.
    fn step(self, step: Self::Step, state: &mut Self::State<'_>, grads: Grads<'_>, out: Weights<'_>);

    /// Writes the working weights that [`HostPasses::step`] would write, and leaves the state unchanged.
    fn speculate(self, step: Self::Step, state: &Self::State<'_>, grads: Grads<'_>, out: Weights<'_>);

    /// [`HostPasses::step`] without working weights.
    #[cfg(feature = "stv")]
    fn commit(self, step: Self::Step, state: &mut Self::State<'_>, grads: Grads<'_>);

    /// [`HostPasses::commit`] of a pending update, then [`HostPasses::speculate`] on the next one, in one pass over the state.
    #[cfg(feature = "stv")]
    fn commit_then_speculate(
        self,
        pending: (Self::Step, Grads<'_>),
        next: (Self::Step, Grads<'_>),
        state: &mut Self::State<'_>,
        out: Weights<'_>,
    );

    /// Undoes an update by algebra.
    fn inverse(self, step: Self::Step, state: &mut Self::State<'_>, grads: Grads<'_>);

    /// Writes the working weights of the state.
    fn emit(self, state: &Self::State<'_>, out: Weights<'_>);
}

/// Work on the passes of an optimizer that is known at run time: see [`Optimizer::with_host_passes`].
pub(crate) trait UseHostPasses {
    fn use_passes(self, passes: impl HostPasses);
}

impl Optimizer {
    /// Gives the passes of this optimizer to `user`, compiled for the formats of its state.
    pub(crate) fn with_host_passes(&self, kernels: AdamKernels, user: impl UseHostPasses) {
        match *self {
            Self::AdamW { hyper, moments: Moments::Float32 } => user.use_passes(AdamWPasses::<f32>::new(kernels, hyper)),
            Self::AdamW { hyper, moments: Moments::Bfloat16 } => user.use_passes(AdamWPasses::<bf16>::new(kernels, hyper)),
        }
    }
}

/// The passes of AdamW with moments in the format `M`.
#[derive(Clone, Copy, Debug)]
struct AdamWPasses<M> {
    kernels: AdamKernels,
    hyper: AdamHyper,
    moments: PhantomData<M>,
}

impl<M> AdamWPasses<M> {
    fn new(kernels: AdamKernels, hyper: AdamHyper) -> Self {
        Self { kernels, hyper, moments: PhantomData }
    }
}

impl<M: Moment> HostPasses for AdamWPasses<M> {
    type State<'a> = AdamState<'a, M>;
    type Step = AdamStep;

    fn state<'a>(self, first: usize, arrays: PerArray<&'a mut [u8]>) -> AdamState<'a, M> {
        let [params, m, v] = arrays.into_array();
        AdamState { first, params: bytemuck::cast_slice_mut(params), m: bytemuck::cast_slice_mut(m), v: bytemuck::cast_slice_mut(v) }
    }

    fn constants(self, update: Update, decay: bool) -> AdamStep {
        let hyper = AdamHyper { lr: update.learning_rate, ..self.hyper };
        AdamStep { consts: AdamConsts::new(&hyper, update.optimizer_step, decay), scale: update.scale }
    }

    fn step(self, step: AdamStep, state: &mut AdamState<'_, M>, grads: Grads<'_>, out: Weights<'_>) {
        self.kernels.step(step, state, grads, out);
    }

    fn speculate(self, step: AdamStep, state: &AdamState<'_, M>, grads: Grads<'_>, out: Weights<'_>) {
        self.kernels.speculate(step, state, grads, out);
    }

    #[cfg(feature = "stv")]
    fn commit(self, step: AdamStep, state: &mut AdamState<'_, M>, grads: Grads<'_>) {
        self.kernels.commit(step, state, grads);
    }

    #[cfg(feature = "stv")]
    fn commit_then_speculate(
        self,
        (pending, pending_grads): (AdamStep, Grads<'_>),
        (next, grads): (AdamStep, Grads<'_>),
        state: &mut AdamState<'_, M>,
        out: Weights<'_>,
    ) {
        self.kernels.commit_then_speculate(pending, pending_grads, next, grads, state, out);
    }

    fn inverse(self, step: AdamStep, state: &mut AdamState<'_, M>, grads: Grads<'_>) {
        self.kernels.inverse(step, state, grads);
    }

    fn emit(self, state: &AdamState<'_, M>, out: Weights<'_>) {
        self.kernels.emit(state.params, out);
    }
}
