//! Numbers in a stream of tokens. Data that has numbers beside its tokens writes them as words of untrained tokens, behind the tokens of their
//! record, so that they are wherever the tokens are.
//!
//! The bits of a 32-bit float are in three words: 12 bits in the bits 19 to 30 of each, the lowest first. Bit 31 is set, and the id is 0.

use crate::data::loss_weight::{ID_BITS, UNTRAINED};

/// Words of a number.
pub(in crate::data) const NUMBER_WORDS: usize = 3;
/// Bits of a number in a word.
const BITS: u32 = 31 - ID_BITS;

/// The words of a number.
pub(in crate::data) fn words_of(number: f32) -> [u32; NUMBER_WORDS] {
    [0, 1, 2].map(|word| UNTRAINED | (number.to_bits() >> (word * BITS) & ((1 << BITS) - 1)) << ID_BITS)
}

/// The number of its words.
pub(in crate::data) fn number_of(words: &[i32; NUMBER_WORDS]) -> f32 {
    let bits = words.map(|word| (word as u32 & !UNTRAINED) >> ID_BITS);
    f32::from_bits(bits[0] | bits[1] << BITS | bits[2] << (2 * BITS))
}

/// The words of a number that belongs to token `id`: the first of them has this id.
pub(in crate::data) fn words_with_id(id: u32, number: f32) -> [u32; NUMBER_WORDS] {
    let [first, middle, last] = words_of(number);
    [first | id, middle, last]
}

/// Whether a word is one of a number or a count. A word of a token that is not trained has no such bits; neither has a zero.
pub(in crate::data) fn is_number(word: u32) -> bool {
    word & UNTRAINED != 0 && count_of(word as i32) > 0
}

/// The word of a count below 4096.
pub(in crate::data) fn word_of_count(count: usize) -> u32 {
    UNTRAINED | (count as u32) << ID_BITS
}

/// The count of its word.
pub(in crate::data) fn count_of(word: i32) -> usize {
    ((word as u32 & !UNTRAINED) >> ID_BITS) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::loss_weight::{LossWeight, id_of};

    #[test]
    fn a_number_survives_its_words_which_are_untrained_tokens() {
        for bits in [0.0f32, -0.0, 1.5, -1234.5678, f32::MIN_POSITIVE, f32::MAX, f32::NAN]
            .map(f32::to_bits)
            .into_iter()
            .chain([u32::MAX, 0x8765_4321])
        {
            let words = words_of(f32::from_bits(bits));
            assert!(words.iter().all(|word| id_of(*word) == 0 && LossWeight::of(*word) == LossWeight::NONE), "{words:?}");
            assert_eq!(number_of(&words.map(|word| word as i32)).to_bits(), bits);
            let with_id = words_with_id(151_935, f32::from_bits(bits)).map(|word| word as i32);
            assert_eq!((id_of(with_id[0] as u32), number_of(&with_id).to_bits()), (151_935, bits));
        }
        assert_eq!([0, 1, 64, 4095].map(|count| count_of(word_of_count(count) as i32)), [0, 1, 64, 4095]);
        assert!(is_number(word_of_count(1)) && ![LossWeight::NONE.word(7), LossWeight::LEAST.word(7), 7].into_iter().any(is_number));
    }
}
