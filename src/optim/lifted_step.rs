//! AdamW's step on a block with small moments or gradients, which would be denormal in fp32, by [`lifted`](crate::optim::lifted)
//! arithmetic.
//!
//! The bits are those of [`AdamStep::apply`]. If they cannot be guaranteed (numbers of 2^16 and more, infinite numbers and NaN, unusual
//! constants) the specification itself runs. A first moment below 2^-112 moves only parameters that are small themselves: its quotient is
//! zero here. If no element has a gradient, moments only decay; if all first moments are this small, no square root and no quotient is
//! needed.

use crate::dtype::Element;
use crate::optim::adam::{AdamElement, AdamState, AdamStep};
use crate::optim::lifted::{
    ROOT_SCALE, SIGN, lift, lifted_power, lifted_product, lifted_square, lower, magnitude, pick, power, product, root, sign, signed,
    signed_sum, sum,
};
use crate::optim::moments::Moment;

/// Moments below this magnitude may become denormal in a step.
const SMALL_MOMENT: f32 = power(-120);

/// Squares of gradients below this magnitude, and their contributions to second moments, may be denormal.
const SMALL_GRAD: f32 = power(-56);

/// First moments below this magnitude count as zero in a quotient.
const NEGLIGIBLE: f32 = power(-112);

/// Parameters, moments and scaled gradients from this magnitude on are large.
const LARGE: f32 = power(16);

/// Elements of a block in fp32, before and after a step.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Numbers<const N: usize> {
    pub params: [f32; N],
    pub m: [f32; N],
    pub v: [f32; N],
    pub grads: [f32; N],
}

impl<const N: usize> Numbers<N> {
    /// State and gradients of `N` elements or fewer.
    #[inline(always)]
    pub(super) fn of<M: Moment, G: Element>(state: &AdamState<'_, M>, grads: &[G]) -> Self {
        Self { params: filled(state.params), m: filled(state.m), v: filled(state.v), grads: filled(grads) }
    }

    /// Stores the state with rounded moments.
    #[inline(always)]
    pub(super) fn store_state<M: Moment>(&self, state: &mut AdamState<'_, M>, step: AdamStep) {
        for i in 0..state.params.len() {
            state.set(i, AdamElement { param: self.params[i], m: self.m[i], v: self.v[i] }, step);
        }
    }

    /// Writes the working weights.
    #[inline(always)]
    pub(super) fn store_out<O: Element>(&self, out: &mut [O]) {
        for (out, &param) in out.iter_mut().zip(&self.params) {
            *out = O::from_f32(param);
        }
    }
}

#[inline(always)]
fn filled<T: Element, const N: usize>(values: &[T]) -> [f32; N] {
    let mut numbers = [0.0; N];
    for (to, value) in numbers.iter_mut().zip(values) {
        *to = value.to_f32();
    }
    numbers
}

/// A step's constants for lifted arithmetic.
#[derive(Clone, Copy, Debug)]
pub(super) struct LiftedStep {
    pub step: AdamStep,
    /// Whether the constants are in the range for which bits are guaranteed.
    is_ordinary: bool,
    /// First factor on gradients; see `scale`.
    prescale: f32,
    /// Second factor on gradients. The product of both factors is the step's scale, and neither factor is denormal.
    scale: f32,
    /// A lifted gradient below this value becomes zero by scaling.
    least_grad: f32,
    /// Magnitudes below which gradients are small, and from which on they are large.
    small_grad: u32,
    large_grad: u32,
    /// No parameter of this magnitude or more is moved by a moment below [`NEGLIGIBLE`].
    least_param: f32,
}

/// Kinds of numbers in a block.
struct BlockSizes {
    /// Whether a number is small.
    small: bool,
    /// Whether a number is large.
    large: bool,
    /// Whether all gradients are zero.
    no_grads: bool,
}

impl LiftedStep {
    pub(super) fn new(step: AdamStep) -> Self {
        let AdamStep { consts, scale } = step;
        let is_fraction = |x: f32| x == 0.0 || (power(-30)..=1.0).contains(&x);
        let factors = [consts.beta1, consts.one_minus_beta1, consts.beta2, consts.one_minus_beta2];
        let is_ordinary = factors.into_iter().all(is_fraction)
            && (0.5..=1.0).contains(&consts.decay)
            && (1.0..1024.0).contains(&consts.inv_sqrt_bias2)
            && (power(-50)..1.0).contains(&consts.eps)
            && consts.neg_step_size.abs() < 32.0
            && (0.0..1024.0).contains(&scale);
        let (prescale, in_range) = if scale < power(-100) { (power(-24), scale * power(24)) } else { (1.0, scale) };
        let grad_of = |scaled: f32| (scaled / scale).min(power(60)).to_bits();
        Self {
            step,
            is_ordinary,
            prescale,
            scale: in_range,
            least_grad: lifted_power(-152) / scale,
            small_grad: if scale > 0.0 { grad_of(SMALL_GRAD) } else { 0 },
            large_grad: grad_of(LARGE),
            // A quotient is at most the moment divided by epsilon, and a change by 2^-26 of a parameter rounds to nothing.
            least_param: NEGLIGIBLE / consts.eps * consts.neg_step_size.abs() * power(30),
        }
    }

    /// Takes the step. Returns whether the block is small, so that the specification's step may have denormal operands or results.
    #[inline(always)]
    pub(super) fn apply<const N: usize>(&self, block: &mut Numbers<N>) -> bool {
        let BlockSizes { small, large, no_grads } = self.sizes(block);
        if !small || large || !self.is_ordinary {
            self.apply_specification(block);
        } else {
            if no_grads {
                self.decay_moments(block);
            } else {
                self.update_moments(block);
            }
            self.update_params(block);
        }
        small
    }

    #[inline(always)]
    fn sizes<const N: usize>(&self, block: &Numbers<N>) -> BlockSizes {
        let (mut least, mut least_grad, mut largest, mut largest_grad) = (u32::MAX, u32::MAX, 0, 0);
        for i in 0..N {
            let (param, m, grad) = (magnitude(block.params[i]), magnitude(block.m[i]), magnitude(block.grads[i]));
            // The bits of a negative second moment are those of a large number. Zero does not count as small: it wraps to the largest
            // number.
            let v = block.v[i].to_bits();
            least = least.min(m.wrapping_sub(1)).min(v.wrapping_sub(1));
            least_grad = least_grad.min(grad.wrapping_sub(1));
            largest = largest.max(param).max(m).max(v);
            largest_grad = largest_grad.max(grad);
        }
        let small = least < SMALL_MOMENT.to_bits() || least_grad < self.small_grad;
        BlockSizes { small, large: largest >= LARGE.to_bits() || largest_grad >= self.large_grad, no_grads: largest_grad == 0 }
    }

    #[inline(always)]
    fn apply_specification<const N: usize>(&self, block: &mut Numbers<N>) {
        for i in 0..N {
            let old = AdamElement { param: block.params[i], m: block.m[i], v: block.v[i] };
            let new = self.step.apply(old, block.grads[i]);
            (block.params[i], block.m[i], block.v[i]) = (new.param, new.m, new.v);
        }
    }

    /// Moments without a gradient; the sign of the zero gradient determines the sign of a moment that becomes zero.
    #[inline(always)]
    fn decay_moments<const N: usize>(&self, block: &mut Numbers<N>) {
        let decayed = |x: f32, beta: f32| f32::from_bits(lower(product(lift(magnitude(x)), beta)) | sign(x));
        for i in 0..N {
            block.m[i] = decayed(block.m[i], self.step.consts.beta1) + block.grads[i];
            block.v[i] = decayed(block.v[i], self.step.consts.beta2);
        }
    }

    #[inline(always)]
    fn update_moments<const N: usize>(&self, block: &mut Numbers<N>) {
        let c = &self.step.consts;
        for i in 0..N {
            let grad = lift(magnitude(block.grads[i]));
            let grad = pick(grad < self.least_grad, 0.0, grad) * self.prescale;
            let grad = lifted_product(grad, self.scale);
            let m = lifted_product(lift(magnitude(block.m[i])), c.beta1);
            let v = lifted_product(lift(block.v[i].to_bits()), c.beta2);
            let signed_grad = signed(grad, sign(block.grads[i]));
            let (m, sign_of_m) = signed_sum(signed_grad, c.one_minus_beta1, signed(m, sign(block.m[i])));
            block.m[i] = f32::from_bits(lower(m) | sign_of_m);
            block.v[i] = f32::from_bits(lower(sum(lifted_square(grad), c.one_minus_beta2, v)));
        }
    }

    /// Updates parameters with the moments after the step.
    #[inline(always)]
    fn update_params<const N: usize>(&self, block: &mut Numbers<N>) {
        let c = &self.step.consts;
        let (mut largest, mut all_count) = (0, false);
        for i in 0..N {
            let m = magnitude(block.m[i]);
            largest = m.max(largest);
            all_count |= (m.wrapping_sub(1) < NEGLIGIBLE.to_bits() - 1) & (block.params[i].abs() < self.least_param);
        }
        let dividend = |m: f32| f32::from_bits(m.to_bits() & pick(magnitude(m) < NEGLIGIBLE.to_bits(), SIGN, u32::MAX));
        let moved = |quotient: f32, param: f32| quotient.mul_add(c.neg_step_size, param * c.decay);
        if all_count {
            for i in 0..N {
                block.params[i] = moved(block.m[i] / self.step.denominator(block.v[i]), block.params[i]);
            }
        } else if largest < NEGLIGIBLE.to_bits() {
            for i in 0..N {
                block.params[i] = moved(dividend(block.m[i]), block.params[i]);
            }
        } else {
            for i in 0..N {
                let divisor = root(lift(block.v[i].to_bits())).mul_add(ROOT_SCALE * c.inv_sqrt_bias2, c.eps);
                block.params[i] = moved(dividend(block.m[i]) / divisor, block.params[i]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::adam::{AdamConsts, AdamHyper};
    use crate::optim::samples::{assert_same, faint};
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    const N: usize = 32;

    fn random_step(rng: &mut ChaCha8Rng) -> AdamStep {
        let mut one_of = |values: &[f64]| values[rng.next_u32() as usize % values.len()];
        let hyper = AdamHyper {
            lr: one_of(&[0.0, 1e-8, 1e-3, 1.0]),
            beta1: one_of(&[0.0, 0.3, 0.9, 0.99]),
            beta2: one_of(&[0.0, 0.95, 0.999, 0.9999]),
            eps: one_of(&[1e-15, 1e-8, 1e-4, 0.0]),
            weight_decay: one_of(&[0.0, 0.1]),
        };
        let step = one_of(&[1.0, 2.0, 1000.0]) as u64;
        let scale = [1.0, 0.37, faint(rng, 4).abs()][rng.next_u32() as usize % 3];
        AdamStep { consts: AdamConsts::new(&hyper, step, true), scale }
    }

    fn random_block(rng: &mut ChaCha8Rng, step: AdamStep) -> Numbers<N> {
        let below = [16, -90, -115][rng.next_u32() as usize % 3];
        let params_below = [16, -100][rng.next_u32() as usize % 2];
        let mut numbers = |below: i32| -> [f32; N] { [(); N].map(|()| faint(rng, below)) };
        let (params, m, v, mut grads) = (numbers(params_below), numbers(below), numbers(below).map(f32::abs), numbers(below));
        match rng.next_u32() % 4 {
            0 => grads = grads.map(|grad| grad * 0.0),
            // Gradients that cancel all but the last bits of a moment.
            1 => {
                for (grad, m) in grads.iter_mut().zip(&m) {
                    let near = -m * step.consts.beta1 / step.consts.one_minus_beta1 / step.scale;
                    *grad = f32::from_bits(near.to_bits().wrapping_add(rng.next_u32() % 5).wrapping_sub(2));
                }
            }
            _ => {}
        }
        Numbers { params, m, v, grads }
    }

    #[test]
    fn blocks_of_small_numbers_have_the_bits_of_the_specification() {
        let cases = std::env::var("SUPEROFFLOAD_VECTORS").map_or(10_000, |n| n.parse().unwrap());
        let rng = &mut ChaCha8Rng::seed_from_u64(2);
        let mut lifted_blocks = 0;
        for _ in 0..cases {
            let step = random_step(rng);
            let (old, lifted) = (random_block(rng, step), LiftedStep::new(step));
            let (mut got, mut golden) = (old.clone(), old.clone());
            lifted.apply_specification(&mut golden);
            let small = lifted.apply(&mut got);
            lifted_blocks += usize::from(small && lifted.is_ordinary && !lifted.sizes(&old).large);
            let label = |field| format!("{field} after {step:?} of {old:?}");
            assert_same(&got.m, &golden.m, &label("m"));
            assert_same(&got.v, &golden.v, &label("v"));
            assert_same(&got.params, &golden.params, &label("params"));
        }
        assert!(lifted_blocks > cases / 2, "{lifted_blocks} of {cases} blocks are lifted");
    }

    #[test]
    fn only_blocks_with_small_numbers_are_small() {
        let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };
        let step = |scale| LiftedStep::new(AdamStep { consts: AdamConsts::new(&hyper, 9, true), scale });
        let block = |[param, m, v, grad]: [f32; 4]| Numbers { params: [param; N], m: [m; N], v: [v; N], grads: [grad; N] };
        for (small, scale, numbers) in [
            (false, 1.0, [0.1, 1e-3, 1e-6, 1e-3]),
            (false, 1.0, [0.0, 0.0, 0.0, 0.0]),
            (false, 1.0, [0.1, -0.0, 0.0, -0.0]),
            (true, 1.0, [0.1, -1e-40, 1e-6, 0.0]),
            (true, 1.0, [0.1, 1e-3, 1e-45, 1e-3]),
            (true, 1.0, [0.1, 1e-3, 1e-6, -1e-20]),
            (true, 1e-20, [0.1, 1e-3, 1e-6, 1e-3]),
            (false, 0.0, [0.1, 1e-3, 1e-6, 1e-3]),
        ] {
            assert_eq!(step(scale).apply(&mut block(numbers)), small, "{scale:e} {numbers:?}");
        }
    }
}
