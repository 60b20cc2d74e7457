//! Log-probabilities of a reference for the tokens of completions, by rows.

use crate::policy_loss::{REFERENCE_WORD, TOKEN_WORDS};
use std::ops::Range;

/// A log-probability for each trained token of all rows; none until they are known.
#[derive(Default)]
pub(super) struct TokenReferences {
    logps: Vec<f32>,
    /// For each row the tokens up to its end.
    ends: Vec<u64>,
}

impl TokenReferences {
    /// `logps` of rows with so many trained tokens each; `None` if the numbers differ.
    pub(super) fn of(logps: Vec<f32>, trained: Vec<u64>) -> Option<Self> {
        let mut ends = trained;
        let mut end = 0;
        for tokens in &mut ends {
            end += *tokens;
            *tokens = end;
        }
        (logps.len() as u64 == end).then_some(Self { logps, ends })
    }

    /// The log-probabilities of row `row`; none until they are known.
    pub(super) fn of_row(&self, row: usize) -> &[f32] {
        let range: Range<u64> = match self.ends.get(row) {
            Some(end) => row.checked_sub(1).map_or(0, |before| self.ends[before])..*end,
            None => 0..0,
        };
        &self.logps[range.start as usize..range.end as usize]
    }
}

/// Writes the first of `logps` to the words of the trained `targets`, one each. Returns the rest.
pub(super) fn place<'a>(logps: &'a [f32], targets: &[i32], words: &mut [i32]) -> &'a [f32] {
    let mut left = logps.iter();
    let trained = targets.iter().zip(words.as_chunks_mut::<TOKEN_WORDS>().0).filter(|(target, _)| **target >= 0);
    for ((_, token), logp) in trained.zip(left.by_ref()) {
        token[REFERENCE_WORD] = logp.to_bits() as i32;
    }
    left.as_slice()
}
