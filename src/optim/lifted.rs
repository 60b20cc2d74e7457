//! Products and sums of fp32 with the same bits as hardware arithmetic, but without a denormal operand or result.
//!
//! An x86-64 core multiplies normal numbers in a cycle or less, but takes 100 to 150 cycles for a denormal operand or result. Here every
//! magnitude is *lifted*: multiplied by 2^56, so that the smallest denormal number becomes 2^-93 and no number is denormal. A lifted result
//! below [`LEAST`] represents a denormal number, and must be rounded to the grid of denormal numbers with a single rounding. The addend
//! [`LEAST`] in a fused multiply-add ensures this: the ulp of numbers from [`LEAST`] to twice [`LEAST`] is the distance of that grid.
//!
//! A *packed* magnitude equals the lifted magnitude from [`LEAST`] on; below, it is the midpoint of the lifted magnitude and [`LEAST`]. Its
//! bits are those of the fp32 magnitude plus a constant. Both conversions have no branches, because the packed magnitude is the maximum of
//! two functions of the lifted magnitude, and the lifted magnitude is the minimum of two functions of the packed magnitude.

/// Exponent of the lift factor, a power of two; even, so that the factor has an exact square root.
const LIFT: i32 = 56;

/// The difference between bits of an fp32 magnitude and bits of its packed form.
const PACKED_BITS: u32 = (LIFT as u32) << 23;

/// The smallest normal number, lifted.
const LEAST: f32 = lifted_power(-126);

/// From this magnitude on, a sum that becomes denormal has cancelled so far that it is exact.
const FAR: f32 = lifted_power(-102);

/// The sign bit.
pub(super) const SIGN: u32 = 1 << 31;

/// Two to a power in the range of normal fp32 numbers.
pub(super) const fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// Two to a power, lifted.
pub(super) const fn lifted_power(exponent: i32) -> f32 {
    power(exponent + LIFT)
}

/// The bits of a number without its sign.
#[inline(always)]
pub(super) fn magnitude(x: f32) -> u32 {
    x.to_bits() & !SIGN
}

#[inline(always)]
pub(super) fn sign(x: f32) -> u32 {
    x.to_bits() & SIGN
}

/// Flips the sign of `x` if `sign` is set.
#[inline(always)]
pub(super) fn signed(x: f32, sign: u32) -> f32 {
    f32::from_bits(x.to_bits() ^ sign)
}

/// `yes` or `no`, as one vector instruction.
#[inline(always)]
pub(super) fn pick<T>(condition: bool, yes: T, no: T) -> T {
    if condition { yes } else { no }
}

/// The lifted form of an fp32 magnitude below 2^71.
#[inline(always)]
pub(super) fn lift(magnitude: u32) -> f32 {
    unpack(f32::from_bits(magnitude.wrapping_add(PACKED_BITS)))
}

/// The fp32 magnitude of a packed one.
#[inline(always)]
pub(super) fn lower(packed: f32) -> u32 {
    packed.to_bits().wrapping_sub(PACKED_BITS)
}

/// The lifted form of a packed magnitude.
#[inline(always)]
fn unpack(packed: f32) -> f32 {
    let denormal = packed.mul_add(2.0, -LEAST);
    pick(denormal < packed, denormal, packed)
}

/// The packed form of a lifted magnitude that lies on the grid of fp32.
#[inline(always)]
fn pack(lifted: f32) -> f32 {
    larger(lifted, lifted.mul_add(0.5, 0.5 * LEAST))
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    pick(a > b, a, b)
}

/// The product of a lifted magnitude and a factor of at least 0, packed. The product is 0 or normal without further care.
#[inline(always)]
pub(super) fn product(lifted: f32, factor: f32) -> f32 {
    larger(lifted * factor, lifted.mul_add(0.5 * factor, 0.5 * LEAST))
}

/// The product of a lifted magnitude and a factor of at least 0, lifted.
#[inline(always)]
pub(super) fn lifted_product(lifted: f32, factor: f32) -> f32 {
    unpack(product(lifted, factor))
}

/// The square of a lifted magnitude, lifted.
#[inline(always)]
pub(super) fn lifted_square(lifted: f32) -> f32 {
    let root = root_lifted(lifted);
    lifted_product(root, root)
}

/// The magnitude multiplied by the square root of the lift factor; 0 if its square is less than a quarter of the smallest number.
#[inline(always)]
fn root_lifted(lifted: f32) -> f32 {
    pick(lifted < lifted_power(-76), 0.0, lifted) * power(-LIFT / 2)
}

/// The square root of a lifted magnitude, to be multiplied by [`ROOT_SCALE`].
#[inline(always)]
pub(super) fn root(lifted: f32) -> f32 {
    lifted.sqrt()
}

/// See [`root`].
pub(super) const ROOT_SCALE: f32 = power(-LIFT / 2);

/// `a * factor + addend` of lifted magnitudes and a factor of at least 0, packed.
#[inline(always)]
pub(super) fn sum(a: f32, factor: f32, addend: f32) -> f32 {
    larger(a.mul_add(factor, addend), a.mul_add(0.5 * factor, addend.mul_add(0.5, 0.5 * LEAST)))
}

/// The sum of a lifted sum of squares and one more square, lifted.
#[inline(always)]
pub(super) fn add_square(lifted: f32, sum_of_squares: f32) -> f32 {
    let root = root_lifted(lifted);
    unpack(sum(root, root, sum_of_squares))
}

/// `a * factor + addend` of signed lifted numbers and a factor of at least 0: the packed magnitude, and the sign.
///
/// If addend and sum differ in sign, the constant that rounds a denormal sum to its grid is [`LEAST`], otherwise -2 [`LEAST`]. Both
/// constants have the sign for which their own sum with the addend is exact.
#[inline(always)]
pub(super) fn signed_sum(a: f32, factor: f32, addend: f32) -> (f32, u32) {
    let plain = a.mul_add(factor, addend);
    let sign = sign(plain);
    let (a, addend) = (signed(a, sign), signed(addend, sign));
    let differ = addend.to_bits() as i32 >> 31 != 0;
    let (shift, back) = (pick(differ, LEAST, -2.0 * LEAST), pick(differ, 0.0, 1.5 * LEAST));
    let denormal = a.mul_add(factor, addend + shift).mul_add(0.5, back);
    let plain = signed(plain, sign);
    let near = addend.abs() < FAR;
    (pick(near, larger(plain, denormal), pack(plain)), sign)
}

/// The fp32 number of a lifted magnitude.
#[inline(always)]
pub(super) fn lowered(lifted: f32) -> f32 {
    f32::from_bits(lower(pack(lifted)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::samples::faint;
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    fn lifted(x: f32) -> f32 {
        signed(lift(magnitude(x)), sign(x))
    }

    #[track_caller]
    fn assert_bits(got: f32, native: f32, operands: &[f32]) {
        assert_eq!(got.to_bits(), native.to_bits(), "{got:e} is not {native:e}: {operands:?}");
    }

    #[test]
    fn every_magnitude_is_lifted_and_lowered_again() {
        for bits in (0..3 << 23).chain((0..power(70).to_bits()).step_by(4099)) {
            let lifted = lift(bits);
            assert_eq!(f64::from(lifted), f64::from(f32::from_bits(bits)) * f64::from(power(LIFT)), "{bits:#x}");
            assert_eq!(lowered(lifted).to_bits(), bits);
        }
    }

    #[test]
    fn products_sums_and_roots_have_the_bits_of_the_hardware() {
        let rng = &mut ChaCha8Rng::seed_from_u64(1);
        let mut denormal = 0;
        for case in 0..400_000 {
            let [x, y] = [(); 2].map(|()| faint(rng, 16));
            let factor = if case % 2 == 0 { 0.9 } else { faint(rng, 0).abs().max(power(-30)) };
            let magnitude = lifted(x.abs());
            assert_bits(lowered(lifted_product(magnitude, factor)), x.abs() * factor, &[x, factor]);
            assert_bits(lowered(lifted_square(magnitude)), x * x, &[x]);
            assert_bits(lowered(add_square(magnitude, lifted(y.abs()))), x.mul_add(x, y.abs()), &[x, y]);
            assert_bits(root(magnitude) * ROOT_SCALE, x.abs().sqrt(), &[x]);
            assert_bits(f32::from_bits(lower(sum(magnitude, factor, lifted(y.abs())))), x.abs().mul_add(factor, y.abs()), &[x, factor, y]);
            // Every third addend cancels all but the last bits of the product.
            let near = f32::from_bits((x * factor).to_bits().wrapping_add(rng.next_u32() % 5).wrapping_sub(2) ^ SIGN);
            let addend = if case % 3 == 0 && near.abs() < power(16) { near } else { y };
            let (packed, sign) = signed_sum(lifted(x), factor, lifted(addend));
            let native = x.mul_add(factor, addend);
            assert_bits(f32::from_bits(lower(packed) | sign), native, &[x, factor, addend]);
            denormal += u32::from(native.is_subnormal());
        }
        assert!(denormal > 40_000, "{denormal} sums are denormal");
    }
}
