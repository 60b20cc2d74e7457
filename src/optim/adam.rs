//! AdamW with decoupled weight decay: the scalar specification.
//!
//! [`AdamStep::apply`] is the arithmetic of one element; all other functions here are loops around it. Every fused operation is written as
//! `mul_add`, and every other operation rounds separately, so that a compiler has no freedom: any instruction set and any device produces
//! the same bits (NaN payloads excepted).
//!
//! Formats: parameters are fp32, moments `M` any [`Moment`], gradients `G` and working weights `O` any [`Element`]. A step computes
//! parameters from fp32 moments and then stores the moments rounded. `scale` multiplies every gradient: clip scale over loss scale.

use crate::dtype::Element;
use crate::optim::moments::{Moment, Rounding, rounding_key};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamHyper {
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
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
    pub(crate) one_minus_beta1: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub(crate) one_minus_beta2: f32,
    /// `1 - lr * weight_decay`.
    pub decay: f32,
    /// `-lr / (1 - beta1^t)`.
    pub(crate) neg_step_size: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub(crate) inv_sqrt_bias2: f32,
    /// `epsilon`.
    pub eps: f32,
    /// Key of the stochastic rounding of second moments: see [`Rounding`].
    pub(crate) rounding: u32,
}

impl AdamConsts {
    /// Constants of step number `step`, counted from 1. `decay` says whether weight decay applies to the group.
    ///
    /// Powers come from `libm`, not from the system's library, so that all machines round alike.
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
            rounding: rounding_key(step),
        }
    }
}

/// The state of a range of parameters: three slices of equal length.
#[derive(Debug)]
pub struct AdamState<'a, M = f32> {
    /// Index of the first element in the flat order.
    pub first: usize,
    /// Master weights.
    pub params: &'a mut [f32],
    /// First moments.
    pub m: &'a mut [M],
    /// Second moments.
    pub v: &'a mut [M],
}

impl<M: Moment> AdamState<'_, M> {
    /// This state with a length check: the loops below then need no further bounds checks.
    #[inline(always)]
    pub(super) fn sized(&mut self, elems: usize) -> AdamState<'_, M> {
        self.check_len(elems);
        AdamState { first: self.first, params: &mut self.params[..elems], m: &mut self.m[..elems], v: &mut self.v[..elems] }
    }

    /// Three separate comparisons, because comparisons of arrays are not always folded away when the lengths are constants.
    #[inline(always)]
    pub(super) fn check_len(&self, elems: usize) {
        let whole = self.params.len() == elems && self.m.len() == elems && self.v.len() == elems;
        assert!(whole, "params, m and v must each have {elems} elements, as the gradients");
    }

    #[inline(always)]
    fn get(&self, i: usize) -> AdamElement {
        AdamElement { param: self.params[i], m: self.m[i].to_f32(), v: self.v[i].to_f32() }
    }

    /// Stores the result `new` of `step` for element `i`, with rounded moments, and returns the stored values, which the next step reads.
    #[inline(always)]
    pub(super) fn set(&mut self, i: usize, new: AdamElement, step: AdamStep) -> AdamElement {
        let rounding = Rounding { key: step.consts.rounding, first: self.first };
        let (m, v) = stored_moments::<M>(new, rounding.bits(i));
        (self.params[i], self.m[i], self.v[i]) = (new.param, m, v);
        AdamElement { param: new.param, m: m.to_f32(), v: v.to_f32() }
    }
}

/// The moments of `new` in their stored format; `bits` round the second.
#[inline(always)]
pub(super) fn stored_moments<M: Moment>(new: AdamElement, bits: u32) -> (M, M) {
    (M::from_f32(new.m), M::second(new.v, bits))
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

    /// The element before this step, by algebra; see [`inverse`] for its precision.
    #[inline(always)]
    pub fn undo(&self, new: AdamElement, grad: f32) -> AdamElement {
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
    pub(super) fn denominator(&self, v: f32) -> f32 {
        v.sqrt().mul_add(self.consts.inv_sqrt_bias2, self.consts.eps)
    }
}

/// The synchronous step: updates `state` and writes the new working weights to `out`.
///
/// # Panics
/// If lengths differ; this also holds for all passes below.
#[inline(always)]
pub(crate) fn step<M: Moment, G: Element, O: Element>(step: AdamStep, state: &mut AdamState<'_, M>, grads: &[G], out: &mut [O]) {
    let elems = grads.len();
    assert_eq!(out.len(), elems, "working weights against gradients");
    let mut state = state.sized(elems);
    for i in 0..elems {
        let new = step.apply(state.get(i), grads[i].to_f32());
        state.set(i, new, step);
        out[i] = O::from_f32(new.param);
    }
}

/// Writes the working weights that [`step`] would write, and leaves the state unchanged.
#[inline(always)]
pub(crate) fn speculate<M: Moment, G: Element, O: Element>(step: AdamStep, state: &AdamState<'_, M>, grads: &[G], out: &mut [O]) {
    let elems = grads.len();
    assert_eq!(out.len(), elems, "working weights against gradients");
    state.check_len(elems);
    // Plain slices: behind the struct the compiler assumes that `out` may overlap them, and does not vectorise.
    let (params, m, v) = (&state.params[..elems], &state.m[..elems], &state.v[..elems]);
    for i in 0..elems {
        let old = AdamElement { param: params[i], m: m[i].to_f32(), v: v[i].to_f32() };
        out[i] = O::from_f32(step.apply(old, grads[i].to_f32()).param);
    }
}

/// [`step`] without working weights.
#[inline(always)]
pub(crate) fn commit<M: Moment, G: Element>(step: AdamStep, state: &mut AdamState<'_, M>, grads: &[G]) {
    let mut state = state.sized(grads.len());
    for (i, grad) in grads.iter().enumerate() {
        state.set(i, step.apply(state.get(i), grad.to_f32()), step);
    }
}

/// [`commit`] of the pending step, then [`speculate`] of the next, in one pass over memory: the deferred commit. The next step reads
/// moments as they were stored.
#[inline(always)]
pub(crate) fn commit_then_speculate<M: Moment, G: Element, O: Element>(
    pending: AdamStep,
    pending_grads: &[G],
    next: AdamStep,
    grads: &[G],
    state: &mut AdamState<'_, M>,
    out: &mut [O],
) {
    let elems = grads.len();
    assert_eq!(pending_grads.len(), elems, "pending gradients against gradients");
    assert_eq!(out.len(), elems, "working weights against gradients");
    let mut state = state.sized(elems);
    for i in 0..elems {
        let committed = pending.apply(state.get(i), pending_grads[i].to_f32());
        let stored = state.set(i, committed, pending);
        out[i] = O::from_f32(next.apply(stored, grads[i].to_f32()).param);
    }
}

/// Undoes [`step`] by algebra: the in-place rollback of the paper and of released systems, for comparison only.
///
/// It is not exact, so every other rollback is a restore. With usual gradients about 1 % of params, 7 % of v and 30 % of m have other bits
/// afterwards. After a gradient 1000 times larger than usual nearly all of m and v do, because the step has already rounded the old value
/// away. A still larger gradient leaves negative second moments; the next step makes their params NaN, and its rollback turns the NaNs into
/// 0, as in released systems. A beta or decay of 0 cannot be undone.
#[inline(always)]
pub(crate) fn inverse<M: Moment, G: Element>(step: AdamStep, state: &mut AdamState<'_, M>, grads: &[G]) {
    let mut state = state.sized(grads.len());
    for (i, grad) in grads.iter().enumerate() {
        state.set(i, step.undo(state.get(i), grad.to_f32()), step);
    }
}

/// Narrows master weights to working weights.
#[inline(always)]
pub(crate) fn emit<O: Element>(params: &[f32], out: &mut [O]) {
    assert_eq!(out.len(), params.len(), "working weights against params");
    for (out, &param) in out.iter_mut().zip(params) {
        *out = O::from_f32(param);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::samples::{assert_same, ordinary};
    use half::{bf16, f16};

    const HYPER: AdamHyper = AdamHyper { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-4, weight_decay: 0.1 };
    /// Half an ulp of 1: the relative error of one rounding.
    const U: f64 = 1.0 / (1u32 << 24) as f64;

    struct Owned<M = f32> {
        params: Vec<f32>,
        m: Vec<M>,
        v: Vec<M>,
    }

    impl<M: Moment> Owned<M> {
        fn new(params: Vec<f32>) -> Self {
            let zeros = vec![M::from_f32(0.0); params.len()];
            Self { params, m: zeros.clone(), v: zeros }
        }

        fn state(&mut self) -> AdamState<'_, M> {
            AdamState { first: 1000, params: &mut self.params, m: &mut self.m, v: &mut self.v }
        }

        fn element(&self, i: usize) -> AdamElement {
            AdamElement { param: self.params[i], m: self.m[i].to_f32(), v: self.v[i].to_f32() }
        }
    }

    fn at(step: u64, scale: f32) -> AdamStep {
        AdamStep { consts: AdamConsts::new(&HYPER, step, true), scale }
    }

    #[test]
    fn constants_are_rounded_once_and_know_their_group() {
        let c = AdamConsts::new(&HYPER, 2, true);
        assert_eq!(c.one_minus_beta1, 0.1);
        assert_eq!(c.one_minus_beta2, (1.0 - 0.95f64) as f32);
        assert_eq!(c.decay, 0.999);
        assert_eq!(c.neg_step_size, (-0.01 / (1.0 - 0.9f64 * 0.9)) as f32);
        assert_eq!(c.inv_sqrt_bias2, (1.0 / (1.0 - 0.95f64 * 0.95).sqrt()) as f32);
        assert_eq!(AdamConsts::new(&HYPER, 2, false), AdamConsts { decay: 1.0, ..c });
    }

    /// `torch.optim.AdamW` 2.15 on the CPU, float32, `foreach=False`, with `HYPER`, after 10 steps.
    #[test]
    fn ten_steps_are_torchs() {
        let golden_params: [f32; 8] =
            [-0.825_886_1, -0.619_110_1, -0.355_055_72, -0.119_778_92, 0.127_135_92, 0.351_966_5, 0.603_639_8, 0.903_330_74];
        let golden_m: [f32; 8] =
            [-0.190_486_95, 0.023_257_29, 7.073_73e-4, -4.235_624_8e-4, -0.013_178_19, 0.008_828_501, -0.001_994_371, -3.322_913e-4];
        let golden_v: [f32; 8] =
            [0.530_341_86, 0.008_061_07, 1.255_650_6e-4, 2.220_334_6e-6, 0.574_297_5, 0.008_216_771, 1.298_446_4e-4, 1.993_958e-6];
        let grad = |i: i32, t: i32| (((i * 37 + t * 101 + 11) % 257) - 128) as f32 / 64.0 * 2f32.powi(i % 4 * -3);
        let mut owned = Owned::<f32>::new((0..8).map(|i| (i as f32 - 3.5) / 4.0).collect());
        for t in 0..10 {
            let grads: Vec<f32> = (0..8).map(|i| grad(i, t)).collect();
            commit(at(t as u64 + 1, 1.0), &mut owned.state(), &grads);
        }
        for i in 0..8 {
            let near = |got: f32, torch: f32, bound: f64| assert!(f64::from(got - torch).abs() <= bound, "{i}: {got} {torch}");
            // Both sides round a parameter below 1 at most three times a step; all other differences are scaled by lr = 0.01.
            near(owned.params[i], golden_params[i], 2.0 * 3.0 * 10.0 * U);
            // Moments: four roundings for each step and side, of values up to the largest gradient (2, squared 4), over the memory of beta.
            let g = f64::from(2f32.powi(i as i32 % 4 * -3)) * 2.0;
            near(owned.m[i], golden_m[i], 2.0 * 4.0 * U * g);
            near(owned.v[i], golden_v[i], 2.0 * 4.0 * U * g * g);
        }
    }

    #[test]
    fn one_step_is_the_formula_in_f64_to_rounding() {
        let n = 4096;
        let (params, m): (Vec<f32>, Vec<f32>) = (ordinary(1, n), ordinary(2, n));
        let v: Vec<f32> = ordinary(3, n).into_iter().map(f32::abs).collect();
        let grads: Vec<f32> = ordinary(4, n);
        for i in 0..n {
            let new = at(7, 0.7).apply(AdamElement { param: params[i], m: m[i], v: v[i] }, grads[i]);
            let [p, m, v, g] = [params[i], m[i], v[i], grads[i]].map(f64::from);
            let g = g * f64::from(0.7f32);
            let (ref_m, ref_v) = (0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g);
            let denominator = (ref_v / (1.0 - 0.95f64.powi(7))).sqrt() + HYPER.eps;
            let step_size = HYPER.lr / (1.0 - 0.9f64.powi(7));
            let ref_p = p * (1.0 - HYPER.lr * HYPER.weight_decay) - step_size * ref_m / denominator;
            // Number of roundings of each result, including constants; magnitudes before cancellation.
            let size_m = 0.9 * m.abs() + 0.1 * g.abs();
            assert!((f64::from(new.m) - ref_m).abs() <= 4.0 * U * size_m);
            assert!((f64::from(new.v) - ref_v).abs() <= 5.0 * U * ref_v);
            assert!((f64::from(new.param) - ref_p).abs() <= U * (4.0 * p.abs() + 13.0 * step_size * size_m / denominator));
        }
    }

    /// One run of 40 steps in both ways; some steps are clipped, some skipped. State and working weights must agree after each step.
    fn deferred_equals_synchronous<M: Moment, G: Element, O: Element>() {
        let n = 333;
        let params: Vec<f32> = ordinary(1, n);
        let (mut sync, mut deferred) = (Owned::<M>::new(params.clone()), Owned::<M>::new(params));
        let (mut sync_out, mut out) = (vec![O::from_f32(0.0); n], vec![O::from_f32(0.0); n]);
        let mut pending: Option<(AdamStep, Vec<G>)> = None;
        let mut taken = 0;
        for t in 0..40u64 {
            let grads: Vec<G> = ordinary(100 + t, n);
            let final_scale = if t % 3 == 0 { 1.0 } else { ordinary::<f32>(200 + t, 1)[0].abs() };
            let skipped = t % 7 == 5;
            let guess = at(taken + 1, 1.0);
            match pending.take() {
                Some((step, old)) => commit_then_speculate(step, &old, guess, &grads, &mut deferred.state(), &mut out),
                None => speculate(guess, &deferred.state(), &grads, &mut out),
            }
            if skipped {
                emit(&sync.params, &mut sync_out);
                emit(&deferred.params, &mut out);
            } else {
                let last = at(taken + 1, final_scale);
                step(last, &mut sync.state(), &grads, &mut sync_out);
                if final_scale != 1.0 {
                    speculate(last, &deferred.state(), &grads, &mut out);
                }
                pending = Some((last, grads));
                taken += 1;
            }
            assert_same(&out, &sync_out, "working weights");
        }
        let (step, grads) = pending.expect("the last step is not skipped");
        commit(step, &mut deferred.state(), &grads);
        assert_same(&deferred.params, &sync.params, "params");
        assert_same(&deferred.m, &sync.m, "m");
        assert_same(&deferred.v, &sync.v, "v");
    }

    #[test]
    fn deferred_commit_gives_the_bits_of_the_synchronous_step() {
        deferred_equals_synchronous::<f32, bf16, bf16>();
        deferred_equals_synchronous::<f32, f32, bf16>();
        deferred_equals_synchronous::<f32, f16, f16>();
        deferred_equals_synchronous::<f32, f32, f32>();
        deferred_equals_synchronous::<bf16, bf16, bf16>();
        deferred_equals_synchronous::<bf16, f32, f32>();
    }

    /// Moments stored in 16 bits: the first step's parameters are those of fp32, and the state is the rounded result of `apply`.
    #[test]
    fn packed_moments_are_rounded_after_the_parameters_were_taken_from_them() {
        let (n, step) = (4096, at(1, 0.7));
        let (mut wide, mut packed) = (Owned::<f32>::new(ordinary(1, n)), Owned::<bf16>::new(ordinary(1, n)));
        let grads: Vec<f32> = ordinary(2, n);
        commit(step, &mut wide.state(), &grads);
        commit(step, &mut packed.state(), &grads);
        assert_same(&packed.params, &wide.params, "params");
        let mut rose = 0;
        for i in 0..n {
            let (element, down) = (wide.element(i), f32::from_bits(wide.v[i].to_bits() & 0xffff_0000));
            assert_eq!(packed.m[i], bf16::from_f32(element.m));
            assert_eq!(packed.v[i], bf16::second(element.v, Rounding { key: rounding_key(1), first: 1000 }.bits(i)));
            rose += usize::from(packed.v[i].to_f32() > down);
        }
        assert!((n * 2 / 5..n * 3 / 5).contains(&rose), "{rose} of {n} second moments rose");
    }

    /// State in its 51st step, before one more step with `grads_factor` times the usual gradients, and after that step was undone.
    fn stepped_and_undone(grads_factor: f32) -> (Owned, Owned) {
        let n = 20_000;
        let run = |steps| {
            let mut owned = Owned::<f32>::new(ordinary(1, n));
            for t in 1..=steps {
                commit(at(t, 1.0), &mut owned.state(), &ordinary::<f32>(t, n));
            }
            owned
        };
        let (before, mut undone) = (run(50), run(50));
        let spike: Vec<f32> = ordinary::<f32>(51, n).iter().map(|g| g * grads_factor).collect();
        commit(at(51, 1.0), &mut undone.state(), &spike);
        inverse(at(51, 1.0), &mut undone.state(), &spike);
        (before, undone)
    }

    fn fraction(owned: &Owned, is: impl Fn(usize) -> bool) -> f64 {
        (0..owned.params.len()).filter(|&i| is(i)).count() as f64 / owned.params.len() as f64
    }

    #[test]
    fn inverse_is_near_but_never_exact() {
        let differing = |factor| {
            let (before, undone) = stepped_and_undone(factor);
            let fields: [fn(AdamElement) -> f32; 3] = [|e| e.param, |e| e.m, |e| e.v];
            fields.map(|field| fraction(&before, |i| field(before.element(i)) != field(undone.element(i))))
        };
        let [params, m, v] = differing(1.0);
        assert!((0.003..0.02).contains(&params) && (0.2..0.4).contains(&m) && (0.03..0.1).contains(&v), "{params} {m} {v}");
        let [params, m, v] = differing(1000.0);
        assert!((0.003..0.02).contains(&params) && m > 0.98 && v > 0.98, "after a spike: {params} {m} {v}");
    }

    #[test]
    fn inverse_of_a_large_spike_destroys_state_for_good() {
        let (before, mut undone) = stepped_and_undone(1e5);
        assert!(fraction(&before, |i| before.v[i] < 0.0) == 0.0);
        let negative = fraction(&undone, |i| undone.v[i] < 0.0);
        assert!((0.2..0.6).contains(&negative), "negative second moments: {negative}");
        // The next step takes their square roots, and its rollback replaces the NaNs by zeros.
        let grads = vec![0.0f32; undone.params.len()];
        commit(at(51, 1.0), &mut undone.state(), &grads);
        inverse(at(51, 1.0), &mut undone.state(), &grads);
        assert_eq!(fraction(&undone, |i| undone.params[i] == 0.0), negative);
    }
}
