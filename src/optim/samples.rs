//! Numbers for this module's tests, and their comparison.

use crate::dtype::Element;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Special values and limits of formats.
const SPECIAL: [f32; 14] =
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, f32::MIN_POSITIVE, 6e-8, 65520.0, 1e30, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];

/// Uniformly distributed over (-1, 1).
pub(crate) fn ordinary<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| T::from_f32(even(&mut rng))).collect()
}

/// One third special values, one third arbitrary bit patterns, one third ordinary values.
pub(crate) fn wild<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut rng = ChaCha8Rng::seed_from_u64(!seed);
    ordinary(seed, len).into_iter().map(|plain| T::from_f32(bewildered(&mut rng, plain))).collect()
}

/// Masters for splitting: ordinary values, of which every third lies in the middle of two bfloat16 values.
pub(crate) fn split_masters(seed: u64, len: usize) -> Vec<f32> {
    let tie = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000 | 0x8000);
    ordinary::<f32>(seed, len).into_iter().enumerate().map(|(i, x)| if i % 3 == 0 { tie(x) } else { x }).collect()
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

/// Whether two values have the same bits; payloads of NaN are ignored.
pub(crate) fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Panics at the first difference.
pub(crate) fn assert_same<T: Element>(a: &[T], b: &[T], label: &str) {
    assert_eq!(a.len(), b.len(), "{label}");
    let differs = |i: &usize| !same(a[*i].to_f32(), b[*i].to_f32());
    if let Some(i) = (0..a.len()).find(differs) {
        panic!("{label}: element {i} is {:?}, not {:?}", a[i], b[i]);
    }
}

/// Magnitudes with uniformly distributed exponents from below the smallest denormal number up to 2^`below`, and with mantissas that are
/// prone to rounding errors.
pub(crate) fn faint(rng: &mut ChaCha8Rng, below: i32) -> f32 {
    let [kind, bits, exponent] = [(); 3].map(|()| rng.next_u32());
    let mantissa = match kind % 6 {
        0 => 0,
        1 => bits & 7,
        2 => 0x40_0000 | bits & 3,
        3 => 0x7f_ffff & !(bits & 7),
        _ => bits & 0x7f_ffff,
    };
    let exponent = (exponent % (below + 150) as u32) as i32 - 150;
    let magnitude = match exponent + 149 {
        ..0 => 0,
        place @ 0..23 => 1 << place | mantissa & ((1 << place) - 1),
        _ => ((exponent + 127) as u32) << 23 | mantissa,
    };
    f32::from_bits(magnitude | kind & 1 << 31)
}
