//! Numbers for this module's tests, and how they are compared.

use crate::dtype::Element;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Where formats and formulas break.
const SPECIAL: [f32; 14] =
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, f32::MIN_POSITIVE, 6e-8, 65520.0, 1e30, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];

/// Evenly spread over (-1, 1).
pub(crate) fn ordinary<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| T::from_f32(even(&mut rng))).collect()
}

/// A third special values, a third arbitrary bit patterns, a third ordinary ones.
pub(crate) fn wild<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut rng = ChaCha8Rng::seed_from_u64(!seed);
    ordinary(seed, len).into_iter().map(|plain| T::from_f32(bewildered(&mut rng, plain))).collect()
}

/// The next number in (-1, 1).
pub(crate) fn even(rng: &mut ChaCha8Rng) -> f32 {
    (f64::from(rng.next_u32()) / f64::from(u32::MAX) * 2.0 - 1.0) as f32
}

/// A special value, an arbitrary bit pattern, or `plain`.
pub(crate) fn bewildered(rng: &mut ChaCha8Rng, plain: f32) -> f32 {
    match rng.next_u32() % 3 {
        0 => SPECIAL[rng.next_u32() as usize % SPECIAL.len()],
        1 => f32::from_bits(rng.next_u32()),
        _ => plain,
    }
}

/// Whether two values hold the same bits; payloads of NaN are nobody's promise.
pub(crate) fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Panics at the first place where the two differ.
pub(crate) fn assert_same<T: Element>(a: &[T], b: &[T], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let differs = |i: &usize| !same(a[*i].to_f32(), b[*i].to_f32());
    if let Some(i) = (0..a.len()).find(differs) {
        panic!("{what}: element {i} is {:?}, not {:?}", a[i], b[i]);
    }
}
