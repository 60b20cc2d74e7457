//! The passes of an optimizer over the state of a part of a bucket in host memory.
//!
//! The engine calls them through [`HostPasses`], once for each part of a bucket. The calls are resolved at compile time, and the loops over
//! elements are inside the passes.

use crate::optim::adam::{AdamConsts, AdamHyper, AdamState, AdamStep};
use crate::optim::formats::{Grads, Weights};
use crate::optim::int8_state::{Int8State, MomentGroups};
use crate::optim::moments::{Moment, Moments};
use crate::optim::optimizer::{Optimizer, Update};
use crate::optim::simd::AdamKernels;
use crate::optim::split::{Masters, SplitInt8State, SplitState};
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
    fn state<'a>(self, first: usize, arrays: PerArray<ArrayMemory<'a>>) -> Self::State<'a>;

    /// The constants of `update`.
    fn constants(self, update: Update, decay: bool) -> Self::Step;

    /// Applies a gradient to the state and writes the new working weights.
    fn step(self, step: Self::Step, state: &mut Self::State<'_>, grads: Grads<'_>, out: Weights<'_>);

    /// Writes the working weights that [`HostPasses::step`] would write, and leaves the state unchanged.
    fn speculate(self, step: Self::Step, state: &mut Self::State<'_>, grads: Grads<'_>, out: Weights<'_>);

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

/// Memory of an array of a part of the state.
pub(crate) enum ArrayMemory<'a> {
    /// Memory of this part alone.
    Own(&'a mut [u8]),
    /// Whole groups of a part that may begin or end within a group. Other threads may read them at the same time, and none writes them.
    Shared(&'a [u8]),
}

impl<'a> ArrayMemory<'a> {
    /// # Panics
    /// If the memory is shared.
    fn own(self) -> &'a mut [u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(_) => panic!("a part of an array without groups shares no memory"),
        }
    }
}

/// Work on the passes of an optimizer that is known at run time: see [`Optimizer::with_host_passes`].
pub(crate) trait UseHostPasses {
    fn use_passes(self, passes: impl HostPasses);
}

impl Optimizer {
    /// Gives the passes of this optimizer to `user`, compiled for the formats of its state. The masters are stored as `masters`.
    pub(crate) fn with_host_passes(&self, (kernels, masters): (AdamKernels, Masters), user: impl UseHostPasses) {
        let Self::AdamW { hyper, moments } = *self;
        match (masters, moments) {
            (Masters::Float32, Moments::Float32) => user.use_passes(AdamWPasses::<f32>::new(kernels, hyper)),
            (Masters::Float32, Moments::Bfloat16) => user.use_passes(AdamWPasses::<bf16>::new(kernels, hyper)),
            (Masters::Float32, Moments::Int8) => user.use_passes(Int8Passes { kernels, hyper }),
            (Masters::Split, Moments::Float32) => user.use_passes(SplitPasses(AdamWPasses::<f32>::new(kernels, hyper))),
            (Masters::Split, Moments::Bfloat16) => user.use_passes(SplitPasses(AdamWPasses::<bf16>::new(kernels, hyper))),
            (Masters::Split, Moments::Int8) => user.use_passes(SplitPasses(Int8Passes { kernels, hyper })),
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

    fn state<'a>(self, first: usize, arrays: PerArray<ArrayMemory<'a>>) -> AdamState<'a, M> {
        let [params, m, v] = arrays.into_array().map(ArrayMemory::own);
        AdamState { first, params: bytemuck::cast_slice_mut(params), m: bytemuck::cast_slice_mut(m), v: bytemuck::cast_slice_mut(v) }
    }

    fn constants(self, update: Update, decay: bool) -> AdamStep {
        constants(self.hyper, update, decay)
    }

    fn step(self, step: AdamStep, state: &mut AdamState<'_, M>, grads: Grads<'_>, out: Weights<'_>) {
        self.kernels.step(step, state, grads, out);
    }

    fn speculate(self, step: AdamStep, state: &mut AdamState<'_, M>, grads: Grads<'_>, out: Weights<'_>) {
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

/// The constants of `update` with the hyperparameters `hyper`, whose learning rate is the update's.
fn constants(hyper: AdamHyper, update: Update, decay: bool) -> AdamStep {
    let hyper = AdamHyper { lr: update.learning_rate, ..hyper };
    AdamStep { consts: AdamConsts::new(&hyper, update.optimizer_step, decay), scale: update.scale }
}

/// The passes of AdamW with moments in 8 bits.
#[derive(Clone, Copy, Debug)]
struct Int8Passes {
    kernels: AdamKernels,
    hyper: AdamHyper,
}

impl HostPasses for Int8Passes {
    type State<'a> = Int8State<'a>;
    type Step = AdamStep;

    fn state<'a>(self, first: usize, arrays: PerArray<ArrayMemory<'a>>) -> Int8State<'a> {
        let ([params, m, v], groups) = (arrays.into_array(), |memory| match memory {
            ArrayMemory::Own(bytes) => MomentGroups::Own(bytemuck::cast_slice_mut(bytes)),
            ArrayMemory::Shared(bytes) => MomentGroups::Shared(bytemuck::cast_slice(bytes)),
        });
        Int8State { first, params: bytemuck::cast_slice_mut(params.own()), m: groups(m), v: groups(v) }
    }

    fn constants(self, update: Update, decay: bool) -> AdamStep {
        constants(self.hyper, update, decay)
    }

    fn step(self, step: AdamStep, state: &mut Int8State<'_>, grads: Grads<'_>, out: Weights<'_>) {
        self.kernels.run_int8([Some((step, grads)), None], state, Some(out));
    }

    fn speculate(self, step: AdamStep, state: &mut Int8State<'_>, grads: Grads<'_>, out: Weights<'_>) {
        self.kernels.run_int8([None, Some((step, grads))], state, Some(out));
    }

    #[cfg(feature = "stv")]
    fn commit(self, step: AdamStep, state: &mut Int8State<'_>, grads: Grads<'_>) {
        self.kernels.run_int8([Some((step, grads)), None], state, None);
    }

    #[cfg(feature = "stv")]
    fn commit_then_speculate(
        self,
        (pending, pending_grads): (AdamStep, Grads<'_>),
        (next, grads): (AdamStep, Grads<'_>),
        state: &mut Int8State<'_>,
        out: Weights<'_>,
    ) {
        self.kernels.run_int8([Some((pending, pending_grads)), Some((next, grads))], state, Some(out));
    }

    /// # Panics
    /// Always: settings with the inverse rollback have fp32 moments.
    fn inverse(self, _: AdamStep, _: &mut Int8State<'_>, _: Grads<'_>) {
        unreachable!("the inverse rollback has fp32 moments")
    }

    fn emit(self, state: &Int8State<'_>, out: Weights<'_>) {
        self.kernels.emit(state.params, out);
    }
}

/// The passes of AdamW with split masters, whose upper halves are the working weights. Such a state is stepped after the verdict alone.
#[derive(Clone, Copy, Debug)]
struct SplitPasses<P>(P);

/// The arrays of a part beside its working weights.
pub(crate) struct LowerState<'a> {
    /// Index of the first element in the flat order.
    first: usize,
    /// Lower halves of the masters.
    lower: &'a mut [u8],
    m: &'a mut [u8],
    v: &'a mut [u8],
}

/// Passes whose state can also have split masters.
trait SplitStep: HostPasses<Step = AdamStep> {
    /// The step of split masters, whose upper halves are `weights`.
    fn split_step(self, step: AdamStep, state: &mut LowerState<'_>, grads: Grads<'_>, weights: &mut [bf16]);
}

impl<M: Moment> SplitStep for AdamWPasses<M> {
    fn split_step(self, step: AdamStep, state: &mut LowerState<'_>, grads: Grads<'_>, weights: &mut [bf16]) {
        let LowerState { first, lower, m, v } = state;
        let [m, v] = [m, v].map(|moments| bytemuck::cast_slice_mut::<u8, M>(moments));
        let state = &mut SplitState { first: *first, weights, lower: bytemuck::cast_slice_mut(lower), m, v };
        self.kernels.step_split(step, state, grads);
    }
}

impl SplitStep for Int8Passes {
    fn split_step(self, step: AdamStep, state: &mut LowerState<'_>, grads: Grads<'_>, weights: &mut [bf16]) {
        let LowerState { first, lower, m, v } = state;
        let [m, v] = [m, v].map(|moments| bytemuck::cast_slice_mut(moments));
        let state = SplitInt8State { first: *first, weights, lower: bytemuck::cast_slice_mut(lower), m, v };
        self.kernels.step_split_int8(step, state, grads);
    }
}

impl<P: SplitStep> HostPasses for SplitPasses<P> {
    type State<'a> = LowerState<'a>;
    type Step = AdamStep;

    fn state<'a>(self, first: usize, arrays: PerArray<ArrayMemory<'a>>) -> LowerState<'a> {
        let [lower, m, v] = arrays.into_array().map(ArrayMemory::own);
        LowerState { first, lower, m, v }
    }

    fn constants(self, update: Update, decay: bool) -> AdamStep {
        self.0.constants(update, decay)
    }

    fn step(self, step: AdamStep, state: &mut LowerState<'_>, grads: Grads<'_>, out: Weights<'_>) {
        let Weights::Bf16(weights) = out else { unreachable!("split masters have bfloat16 weights") };
        self.0.split_step(step, state, grads, weights);
    }

    /// # Panics
    /// Always: a speculation would write into the state.
    fn speculate(self, _: AdamStep, _: &mut LowerState<'_>, _: Grads<'_>, _: Weights<'_>) {
        unreachable!("split masters are stepped after the verdict")
    }

    /// # Panics
    /// Always: no update is pending.
    #[cfg(feature = "stv")]
    fn commit(self, _: AdamStep, _: &mut LowerState<'_>, _: Grads<'_>) {
        unreachable!("split masters are stepped after the verdict")
    }

    /// # Panics
    /// Always: no update is pending.
    #[cfg(feature = "stv")]
    fn commit_then_speculate(self, _: (AdamStep, Grads<'_>), _: (AdamStep, Grads<'_>), _: &mut LowerState<'_>, _: Weights<'_>) {
        unreachable!("split masters are stepped after the verdict")
    }

    /// # Panics
    /// Always: settings with the inverse rollback have float32 masters.
    fn inverse(self, _: AdamStep, _: &mut LowerState<'_>, _: Grads<'_>) {
        unreachable!("the inverse rollback has float32 masters")
    }

    /// Leaves the working weights as they are: they are part of the state.
    fn emit(self, _: &LowerState<'_>, _: Weights<'_>) {}
}
