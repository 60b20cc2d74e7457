//! Weights of tokens in the loss. The word of a token holds its id and its weight, wherever the token is: in prepared text, in memory, in a
//! batch, and as a target on the device.
//!
//! | bits of the word | |
//! |---|---|
//! | 0 to 18 | the id |
//! | 19 to 30 | 4096 minus the weight in units of 1/4096, so 0 for the weight 1 |
//! | 31 | set where the token is not trained, which is the weight 0 |
//!
//! Numbers beside tokens are words of untrained tokens with other bits in the place of the weight: see [`super::number_words`].

/// Bits of an id.
pub(super) const ID_BITS: u32 = 19;
/// Units of the weight 1. The sum of the weights of a step is a whole number of units, the same in any order.
const WHOLE_UNITS: u32 = 1 << (31 - ID_BITS);

/// Ids that a vocabulary has at most.
pub(crate) const VOCAB_MAX: usize = 1 << ID_BITS;
/// Highest bit of the word of a token that is read and not learned.
pub(crate) const UNTRAINED: u32 = 1 << 31;

/// Weight of a token in the loss, a multiple of 1/4096 from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LossWeight {
    units: u32,
}

impl LossWeight {
    /// The weight 0, of a token that is not trained.
    pub(crate) const NONE: Self = Self { units: 0 };
    /// The least weight of a token that is trained.
    pub(crate) const LEAST: Self = Self { units: 1 };
    /// The weight 1.
    pub(crate) const WHOLE: Self = Self { units: WHOLE_UNITS };

    /// The weight nearest to `weight`; a weight above 0 does not become 0. `None` if `weight` is not from 0 to 1.
    pub(crate) fn nearest(weight: f64) -> Option<Self> {
        let units = (weight * f64::from(WHOLE_UNITS)).round() as u32;
        (0.0..=1.0).contains(&weight).then(|| Self { units: units.max(u32::from(weight > 0.0)) })
    }

    /// The weight of `units` units; `None` if the weight 1 has fewer.
    pub(crate) fn of_units(units: usize) -> Option<Self> {
        u32::try_from(units).ok().filter(|units| *units <= WHOLE_UNITS).map(|units| Self { units })
    }

    /// The weight of a token, or of a target.
    #[inline(always)]
    pub(crate) fn of(word: u32) -> Self {
        if word & UNTRAINED == 0 { Self { units: WHOLE_UNITS - (word >> ID_BITS) } } else { Self::NONE }
    }

    /// The word of token `id` with this weight.
    pub(crate) fn word(self, id: u32) -> u32 {
        if self.is_trained() { id | (WHOLE_UNITS - self.units) << ID_BITS } else { id | UNTRAINED }
    }

    /// Whether the weight is `weight`, without rounding.
    pub(crate) fn is(self, weight: f64) -> bool {
        f64::from(self.value()) == weight
    }

    /// Whether the weight is above 0.
    pub(crate) fn is_trained(self) -> bool {
        self != Self::NONE
    }

    /// The weight in units of 1/4096.
    pub(crate) fn units(self) -> u32 {
        self.units
    }

    /// The weight as a number, which is exact.
    #[inline(always)]
    pub(crate) fn value(self) -> f32 {
        self.units as f32 / WHOLE_UNITS as f32
    }
}

/// The id in the word of a token.
#[inline(always)]
pub(crate) fn id_of(word: u32) -> u32 {
    word & (VOCAB_MAX as u32 - 1)
}

/// The sum of so many units as a number.
pub(crate) fn sum_of_units(units: u64) -> f64 {
    units as f64 / f64::from(WHOLE_UNITS)
}

/// 1 divided by the sum of so many units. For whole weights it has the bits of 1 divided by their number.
pub(crate) fn inverse_of_units(units: u64) -> f32 {
    WHOLE_UNITS as f32 / units as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_holds_any_id_with_any_weight() {
        for id in [0, 1, 151_935, VOCAB_MAX as u32 - 1] {
            for units in 0..=WHOLE_UNITS {
                let weight = LossWeight { units };
                let word = weight.word(id);
                assert_eq!((id_of(word), LossWeight::of(word)), (id, weight));
                assert_eq!((word as i32) < 0, units == 0, "a token without weight is negative");
            }
            assert_eq!((LossWeight::WHOLE.word(id), LossWeight::NONE.word(id)), (id, id | UNTRAINED), "as a mask has them");
        }
        assert_eq!(LossWeight::of(-1i32 as u32), LossWeight::NONE);
    }

    #[test]
    fn weights_are_rounded_to_the_nearest_unit_but_never_to_none() {
        let units = |weight| LossWeight::nearest(weight).map(LossWeight::units);
        for (weight, expected) in [(0.0, 0), (-0.0, 0), (1.0, 4096), (0.25, 1024), (0.1, 410), (1e-9, 1), (0.99999, 4096)] {
            assert_eq!(units(weight), Some(expected), "{weight}");
        }
        for wrong in [-1e-9, 1.000_001, f64::NAN, f64::INFINITY] {
            assert_eq!(units(wrong), None, "{wrong}");
        }
        assert_eq!(LossWeight::nearest(0.25).unwrap().value(), 0.25);
    }

    #[test]
    fn the_inverse_of_whole_weights_is_that_of_their_number() {
        for count in (1..5000).chain([16_777_217, 123_456_789]) {
            assert_eq!(inverse_of_units(count * u64::from(WHOLE_UNITS)), 1.0 / count as f32, "{count}");
        }
    }
}
