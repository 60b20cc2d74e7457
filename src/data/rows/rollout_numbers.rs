//! Numbers of the tokens of sampled completions, which stand behind the tokens of their record.

use super::token_stream::TokenStream;
use crate::data::number_words::{NUMBER_WORDS, number_of};
use crate::error::Result;
use crate::policy_loss::{PolicyToken, TOKEN_WORDS};
use std::ops::Range;

/// Numbers of a token: its advantage, its log-probability when it was sampled, and that of the reference.
const NUMBERS: usize = 3;
/// Words of the numbers of a token.
const WORDS: usize = NUMBERS * NUMBER_WORDS;
/// Tokens whose numbers are read at once.
const BLOCK_TOKENS: usize = 64;

/// Words of the numbers of `tokens` tokens.
pub(super) fn words(tokens: u64) -> u64 {
    tokens * WORDS as u64
}

/// Whether the first token of the numbers `range` has a log-probability of the reference.
///
/// # Errors
/// When the tokens cannot be read.
pub(super) fn have_reference(stream: &TokenStream, range: Range<u64>) -> Result<bool> {
    let mut words = [0; NUMBER_WORDS];
    stream.read(range.start as usize + (NUMBERS - 1) * NUMBER_WORDS, &mut words)?;
    Ok(!number_of(&words).is_nan())
}

/// Reads the numbers of each trained target of a document, from place `start` of the stream on. Writes those of target i to the words i of
/// `out`. Does not allocate.
///
/// # Errors
/// When the tokens cannot be read any more.
pub(super) fn read(stream: &TokenStream, start: usize, targets: &[i32], out: &mut [i32]) -> Result<()> {
    let trained = targets.iter().filter(|target| **target >= 0).count();
    let mut places = targets.iter().zip(out.as_chunks_mut::<TOKEN_WORDS>().0).filter(|(target, _)| **target >= 0);
    let mut block = [0; BLOCK_TOKENS * WORDS];
    for first in (0..trained).step_by(BLOCK_TOKENS) {
        let block = &mut block[..BLOCK_TOKENS.min(trained - first) * WORDS];
        stream.read(start + first * WORDS, block)?;
        for (numbers, (_, words)) in block.as_chunks::<NUMBER_WORDS>().0.as_chunks::<NUMBERS>().0.iter().zip(&mut places) {
            *words = PolicyToken::words(numbers.each_ref().map(number_of), trained as i32);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::number_words::words_of;
    use crate::data::rows::token_stream::Tokens;

    #[test]
    fn numbers_of_trained_targets_are_read_in_blocks() {
        let count = BLOCK_TOKENS + 5;
        let number = |at: usize, which: usize| (NUMBERS * at + which) as f32 - 0.5;
        let numbers = (0..count).flat_map(|at| (0..NUMBERS).flat_map(move |which| words_of(number(at, which))));
        let mut stream = TokenStream::default();
        stream.push_all(Tokens::Memory([7, 7].into_iter().chain(numbers).collect()));
        let targets: Vec<i32> = [-1, -1].into_iter().chain((0..count).map(|_| 3)).chain([-1]).collect();
        let mut out = vec![-7; targets.len() * TOKEN_WORDS];
        read(&stream, 2, &targets, &mut out).unwrap();
        let words = out.as_chunks::<TOKEN_WORDS>().0;
        assert_eq!([words[0], words[1], words[count + 2]], [[-7; TOKEN_WORDS]; 3], "words of other targets stay");
        for at in 0..count {
            let expected = PolicyToken::words([0, 1, 2].map(|which| number(at, which)), count as i32);
            assert_eq!(words[at + 2], expected, "token {at}");
        }
    }
}
