//! AdamW with decoupled weight decay: the scalar specification.
//!
//! [`AdamStep::apply`] is the arithmetic of one element; everything else here is a loop around it. Every fused operation
//! is written as `mul_add` and every other one rounds by itself, so that a compiler has no freedom: any instruction set
//! and any device produces the same bits (NaN payloads excepted).
//!
//! Formats: state is fp32, gradients `G` and working weights `O` are any [`Element`]. `scale` multiplies every gradient:
//! clip scale over loss scale.

use crate::dtype::Element;

/// What the user sets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamHyper {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, per unit of learning rate.
    pub weight_decay: f64,
}

/// The constants of one AdamW step for one decay group, rounded once from f64 so that every device uses the same bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamConsts {
    /// `beta1`.
    pub beta1: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `1 - lr * weight_decay`.
    pub decay: f32,
    /// `-lr / (1 - beta1^t)`.
    pub neg_step_size: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub inv_sqrt_bias2: f32,
    /// `epsilon`.
    pub eps: f32,
}

impl AdamConsts {
    /// Constants of step number `step`, counted from 1. `decay` says whether weight decay applies to the group.
    ///
    /// Powers come from `libm`, not from the system, so that all machines round alike.
    ///
    /// # Panics
    /// If `step` is 0: there is no bias correction before the first step.
    pub fn new(hyper: &AdamHyper, step: u64, decay: bool) -> Self {
        assert!(step > 0, "Adam steps are counted from 1");
        let bias = |beta: f64| 1.0 - libm::pow(beta, step as f64);
        let decay = if decay { 1.0 - hyper.lr * hyper.weight_decay } else { 1.0 };
        Self {
            beta1: hyper.beta1 as f32,
            one_minus_beta1: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            one_minus_beta2: (1.0 - hyper.beta2) as f32,
            decay: decay as f32,
            neg_step_size: (-hyper.lr / bias(hyper.beta1)) as f32,
            inv_sqrt_bias2: (1.0 / bias(hyper.beta2).sqrt()) as f32,
            eps: hyper.eps as f32,
        }
    }
}

/// The fp32 state of a range of parameters: three slices of equal length.
#[derive(Debug)]
pub struct AdamState<'a> {
    /// Master weights.
    pub params: &'a mut [f32],
    /// First moments.
    pub m: &'a mut [f32],
    /// Second moments.
    pub v: &'a mut [f32],
}

impl AdamState<'_> {
    /// The same state, known to hold `elems` elements: the loops below then need no further bounds checks.
    #[inline(always)]
    fn sized(&mut self, elems: usize) -> AdamState<'_> {
        assert_eq!([self.params.len(), self.m.len(), self.v.len()], [elems; 3], "params, m, v against gradients");
        AdamState { params: &mut self.params[..elems], m: &mut self.m[..elems], v: &mut self.v[..elems] }
    }

    #[inline(always)]
    fn get(&self, i: usize) -> AdamElement {
        AdamElement { param: self.params[i], m: self.m[i], v: self.v[i] }
    }

    #[inline(always)]
    fn set(&mut self, i: usize, new: AdamElement) {
        (self.params[i], self.m[i], self.v[i]) = (new.param, new.m, new.v);
    }
}

/// The state of one element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamElement {
    /// Master weight.
    pub param: f32,
    /// First moment.
    pub m: f32,
    /// Second moment.
    pub v: f32,
}

/// One step with its verdict: the constants and the factor on the gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// The step's constants.
    pub consts: AdamConsts,
    /// Factor on every gradient.
    pub scale: f32,
}

impl AdamStep {
    /// The specification: the element after this step.
    #[inline(always)]
    pub fn apply(&self, old: AdamElement, grad: f32) -> AdamElement {
        let c = &self.consts;
        let g = grad * self.scale;
        let m = g.mul_add(c.one_minus_beta1, old.m * c.beta1);
        let v = (g * g).mul_add(c.one_minus_beta2, old.v * c.beta2);
        let param = (m / self.denominator(v)).mul_add(c.neg_step_size, old.param * c.decay);
        AdamElement { param, m, v }
    }

    /// The element before this step, by algebra; see [`inverse`] for what that is worth.
    #[inline(always)]
    pub fn revert(&self, new: AdamElement, grad: f32) -> AdamElement {
        let c = &self.consts;
        let g = grad * self.scale;
        let param = (new.m / self.denominator(new.v)).mul_add(-c.neg_step_size, new.param) / c.decay;
        AdamElement {
            param: if param.is_finite() { param } else { 0.0 },
            m: g.mul_add(-c.one_minus_beta1, new.m) / c.beta1,
            v: (g * g).mul_add(-c.one_minus_beta2, new.v) / c.beta2,
        }
    }

    #[inline(always)]
    fn denominator(&self, v: f32) -> f32 {
        v.sqrt().mul_add(self.consts.inv_sqrt_bias2, self.consts.eps)
    }
}

/// The synchronous step: updates `state` and writes the new working weights to `out`.
///
/// # Panics
/// If lengths differ; so do all passes below.
#[inline(always)]
pub fn step<G: Element, O: Element>(step: AdamStep, state: &mut AdamState<'_>, grads: &[G], out: &mut [O]) {
    let elems = grads.len();
    assert_eq!(out.len(), elems, "working weights against gradients");
    let mut state = state.sized(elems);
    for i in 0..elems {
        let new = step.apply(state.get(i), grads[i].to_f32());
        state.set(i, new);
        out[i] = O::from_f32(new.param);
    }
}

/// Writes the working weights that [`step`] would write and leaves the state alone.
#[inline(always)]
pub fn speculate<G: Element, O: Element>(step: AdamStep, state: &AdamState<'_>, grads: &[G], out: &mut [O]) {
    let elems = grads.len();
    assert_eq!(out.len(), elems, "working weights against gradients");
    assert_eq!([state.params.len(), state.m.len(), state.v.len()], [elems; 3], "params, m, v against gradients");
    // Plain slices: behind the struct the compiler fears that `out` might overlap them, and gives up on vectors.
    let (params, m, v) = (&state.params[..elems], &state.m[..elems], &state.v[..elems]);
    for i in 0..elems {
        let old = AdamElement { param: params[i], m: m[i], v: v[i] };
        out[i] = O::from_f32(step.apply(old, grads[i].to_f32()).param);
    }
}

/// [`step`] without working weights.
#[inline(always)]
pub fn commit<G: Element>(step: AdamStep, state: &mut AdamState<'_>, grads: &[G]) {
    let mut state = state.sized(grads.len());
    for (i, grad) in grads.iter().enumerate() {
        state.set(i, step.apply(state.get(i), grad.to_f32()));
    }
}

/// [`commit`] of the pending step, then [`speculate`] of the next, in one pass over memory: the deferred commit.
#[inline(always)]
pub fn commit_then_speculate<G: Element, O: Element>(
    pending: AdamStep,
    pending_grads: &[G],
    next: AdamStep,
    grads: &[G],
    state: &mut AdamState<'_>,
    out: &mut [O],
) {
    let elems = grads.len();
    assert_eq!([pending_grads.len(), out.len()], [elems; 2], "pending gradients, working weights against gradients");
    let mut state = state.sized(elems);
    for i in 0..elems {
        let committed = pending.apply(state.get(i), pending_grads[i].to_f32());
        state.set(i, committed);
        out[i] = O::from_f32(next.apply(committed, grads[i].to_f32()).param);
    }
}

/// Undoes [`step`] by algebra.
#[inline(always)]
pub fn inverse<G: Element>(step: AdamStep, state: &mut AdamState<'_>, grads: &[G]) {
    let mut state = state.sized(grads.len());
    for (i, grad) in grads.iter().enumerate() {
        state.set(i, step.revert(state.get(i), grad.to_f32()));
    }
}

/// Narrows master weights to working weights.
#[inline(always)]
pub fn emit<O: Element>(params: &[f32], out: &mut [O]) {
    assert_eq!(out.len(), params.len(), "working weights against params");
    for (out, &param) in out.iter_mut().zip(params) {
        *out = O::from_f32(param);
    }
}
