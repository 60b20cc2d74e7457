//! Reproducible inputs.

use super::formats::round;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use superoffload::internals::dtype::Dtype;

/// Values at the limits of formats and formulas.
const SPECIAL: [f32; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-45,
    -1e-40,
    f32::MIN_POSITIVE,
    6e-8,
    65520.0,
    -88.5,
    103.0,
    1e30,
    f32::MAX,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

/// The random numbers of one case.
pub struct Random(ChaCha8Rng);

impl Random {
    /// Numbers that depend only on `seed` and `name`, so that a case has the same inputs after any other cases.
    pub fn new(seed: u64, name: &str) -> Self {
        let hash = name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Self(ChaCha8Rng::seed_from_u64(hash))
    }

    /// Random bits.
    pub fn bits(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0.next_u64() as usize % end
    }

    /// Numbers between -1 and 1, in the format.
    pub fn uniform(&mut self, dtype: Dtype, elems: usize) -> Vec<f32> {
        self.scaled(dtype, elems, 1.0)
    }

    /// Numbers between `-size` and `size`, in the format.
    pub fn scaled(&mut self, dtype: Dtype, elems: usize, size: f32) -> Vec<f32> {
        (0..elems).map(|_| round(dtype, ((self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0) * size)).collect()
    }

    /// Positive numbers around 1 in fp32, like statistics of a forward pass.
    pub fn positive(&mut self, elems: usize) -> Vec<f32> {
        self.uniform(Dtype::Float32, elems).iter().map(|x| 1.25 + x).collect()
    }

    /// One third special values, one third arbitrary bits, one third ordinary values up to 8, in the format.
    pub fn wild(&mut self, dtype: Dtype, elems: usize) -> Vec<f32> {
        let plain = self.scaled(dtype, elems, 8.0);
        let value = |plain: f32| match self.below(3) {
            0 => SPECIAL[self.below(SPECIAL.len())],
            1 => f32::from_bits(self.bits()),
            _ => plain,
        };
        plain.into_iter().map(value).map(|x| round(dtype, x)).collect()
    }

    /// Token ids below `vocab`, some of them frequent.
    pub fn tokens(&mut self, elems: usize, vocab: usize) -> Vec<i32> {
        (0..elems).map(|_| if self.below(4) == 0 { self.below(vocab.min(3)) } else { self.below(vocab) } as i32).collect()
    }
}
