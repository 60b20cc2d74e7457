//! Data of a benchmark: random tokens, as one text or as documents of random lengths.

use crate::data::rows::batch::{Batch, Batches, RowList};
use crate::error::Result;
use crate::policy_loss::PolicyToken;
use crate::teacher_loss::entry_words;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::fmt;
use std::iter;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Kernels index tokens with 32 bits.
const LENGTH_MAX: usize = i32::MAX as usize;

/// Least and most tokens of a document.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LengthRange(RangeInclusive<usize>);

impl FromStr for LengthRange {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bounds = text.split_once('-').and_then(|(least, most)| Some((least.parse().ok()?, most.parse().ok()?)));
        let is_allowed = |Self(lengths): &Self| *lengths.start() > 0 && !lengths.is_empty() && *lengths.end() <= LENGTH_MAX;
        let lengths = bounds.map(|(least, most)| Self(least..=most)).filter(is_allowed);
        lengths.ok_or_else(|| "expected LEAST-MOST, numbers of tokens from 1 to 2147483647, as 200-4096".into())
    }
}

/// Exponent of a Zipf distribution of tokens: token `i` has a frequency proportional to `(i + 1)^-exponent`. 0 is uniform.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
#[serde(transparent)]
pub struct TokenSkew(f64);

impl TokenSkew {
    /// Larger exponents make almost all tokens equal.
    const MAX: f64 = 8.0;

    pub(crate) fn is_uniform(&self) -> bool {
        self.0 == 0.0
    }

    /// For each of `vocab` tokens, the probability of this token or one before it.
    fn cumulative(self, vocab: usize) -> Vec<f64> {
        let mut sum = 0.0;
        let mut sums: Vec<f64> = (1..=vocab)
            .map(|rank| {
                sum += libm::pow(rank as f64, -self.0);
                sum
            })
            .collect();
        for end in &mut sums {
            *end /= sum;
        }
        sums
    }
}

impl FromStr for TokenSkew {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let exponent = text.parse().ok().filter(|exponent| (0.0..=Self::MAX).contains(exponent));
        exponent.map(Self).ok_or_else(|| format!("expected an exponent from 0 to {}", Self::MAX))
    }
}

/// Fraction of a row's tokens that are trained: the last ones, as in a prompt with its answer. Above 0, at most 1.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(transparent)]
pub struct TrainedShare(f64);

impl TrainedShare {
    pub(crate) fn is_all(&self) -> bool {
        self.0 == 1.0
    }

    /// How many targets at the begin of a row of `length` tokens are not trained.
    fn masked(self, length: usize) -> usize {
        length - ((length as f64 * self.0).ceil() as usize).clamp(1, length)
    }
}

impl Default for TrainedShare {
    fn default() -> Self {
        Self(1.0)
    }
}

impl FromStr for TrainedShare {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
        share.map(Self).ok_or_else(|| "expected a fraction above 0 and at most 1, as 0.25".into())
    }
}

impl fmt::Display for TrainedShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The random tokens that a benchmark trains on.
#[derive(clap::Args, Clone, Debug, Default, serde::Serialize)]
pub struct RandomData {
    /// With --packing bfd: range of document lengths in tokens, drawn uniformly.
    #[arg(long, value_name = "LEAST-MOST")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<LengthRange>,

    /// Exponent of a Zipf distribution of the random tokens; 0 is uniform. Frequent tokens choose the same experts, so the load of experts
    /// becomes uneven.
    #[arg(long, value_name = "EXPONENT", default_value = "0")]
    #[serde(skip_serializing_if = "TokenSkew::is_uniform")]
    pub token_skew: TokenSkew,

    /// Fraction of each row's tokens that are trained: the last ones, as in a prompt with its answer.
    #[arg(long, value_name = "SHARE", default_value_t)]
    #[serde(skip_serializing_if = "TrainedShare::is_all")]
    pub trained_share: TrainedShare,
}

/// An endless text of random tokens.
#[derive(Clone)]
pub struct RandomTokens {
    rng: ChaCha8Rng,
    vocab: usize,
    /// Cumulative probabilities of skewed tokens; empty if all tokens are equally frequent.
    cumulative: Vec<f64>,
    next: i32,
    /// Document lengths for rows of separate documents; without them, a row is one document.
    lengths: Option<LengthRange>,
    trained: TrainedShare,
    /// Number of tokens without a trained target.
    untrained: usize,
    /// Number of documents by length.
    documents: BTreeMap<usize, usize>,
}

impl RandomTokens {
    /// A text that depends on `seed` alone.
    pub fn new(seed: u64, vocab: usize) -> Self {
        let mut tokens = Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            vocab,
            cumulative: Vec::new(),
            next: 0,
            lengths: None,
            trained: TrainedShare::default(),
            untrained: 0,
            documents: BTreeMap::new(),
        };
        tokens.advance();
        tokens
    }

    /// Draws all tokens after the next one as `data` asks. The last document of a row is cut at the end of the row.
    pub(crate) fn drawn_as(self, data: &RandomData) -> Self {
        let skew = data.token_skew;
        let cumulative = if skew.is_uniform() { Vec::new() } else { skew.cumulative(self.vocab) };
        Self { cumulative, lengths: data.documents.clone(), trained: data.trained_share, ..self }
    }

    /// Number of documents by length since the last [`RandomTokens::forget`].
    pub(crate) fn documents(&self) -> &BTreeMap<usize, usize> {
        &self.documents
    }

    /// Number of tokens without a trained target since the last [`RandomTokens::forget`].
    pub(crate) fn untrained(&self) -> usize {
        self.untrained
    }

    pub(crate) fn forget(&mut self) {
        self.documents.clear();
        self.untrained = 0;
    }

    /// A random number below `end`, which must fit into 32 bits: a 32-bit product replaces the division.
    fn below(&mut self, end: usize) -> usize {
        ((u64::from(self.rng.next_u32()) * end as u64) >> 32) as usize
    }

    /// Returns the current token and draws the next one.
    fn advance(&mut self) -> i32 {
        let next = if self.cumulative.is_empty() { self.below(self.vocab) } else { self.skewed_token() };
        std::mem::replace(&mut self.next, next as i32)
    }

    fn skewed_token(&mut self) -> usize {
        let drawn = f64::from(self.rng.next_u32()) / 2f64.powi(32);
        self.cumulative.partition_point(|&end| end <= drawn)
    }

    /// Length of the next document, at most `left` tokens.
    fn length(&mut self, left: usize) -> usize {
        let drawn = match &self.lengths {
            None => left,
            Some(LengthRange(lengths)) => {
                let (least, count) = (*lengths.start(), lengths.end() - lengths.start() + 1);
                least + self.below(count)
            }
        };
        drawn.min(left)
    }

    /// Fills a row with documents: each token's document start and position in the document.
    fn separate(&mut self, starts: &mut [i32], positions: &mut [i32]) {
        let mut left = starts.len();
        let lengths: Vec<_> = iter::from_fn(|| {
            let length = self.length(left);
            left -= length;
            (length > 0).then_some(length)
        })
        .collect();
        self.write_documents(&lengths, starts, positions);
    }

    /// Fills a row with documents of `lengths`: each token's document start and position in the document.
    fn write_documents(&mut self, lengths: &[usize], starts: &mut [i32], positions: &mut [i32]) {
        let mut start = 0;
        for &length in lengths {
            starts[start..][..length].fill(start as i32);
            positions[start..][..length].iter_mut().zip(0..).for_each(|(position, place)| *position = place);
            *self.documents.entry(length).or_default() += 1;
            start += length;
        }
    }
}

impl Batches for RandomTokens {
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        for (token, target) in batch.tokens.iter_mut().zip(&mut *batch.targets) {
            *token = self.advance();
            *target = self.next;
        }
        let length = batch.seq_length;
        let masked = self.trained.masked(length);
        for row in batch.rows() {
            // A negative target has no loss.
            row.targets[..masked].fill(-1);
            self.untrained += masked;
            match (row.documents, row.list) {
                (Some(starts), Some(RowList::Pairs(mut pairs))) => {
                    let answers = [length / 2, length - length / 2];
                    self.write_documents(&answers, starts, row.positions);
                    pairs.add([0, answers[0], length], [0.0; 2]);
                }
                (Some(starts), Some(RowList::Rollouts(words))) => {
                    self.separate(starts, row.positions);
                    row.targets[length - 1] = -1;
                    let absent = f32::NAN;
                    let numbers = PolicyToken::words([1.0, absent, -1.0], length as i32);
                    words.as_chunks_mut().0.fill(numbers);
                }
                (Some(starts), Some(RowList::Teacher { words, top_k })) => {
                    self.separate(starts, row.positions);
                    row.targets[length - 1] = -1;
                    for (place, words) in words.as_chunks_mut().0.iter_mut().enumerate() {
                        *words = entry_words((place % top_k) as u32, 1.0 / (top_k + 1) as f32);
                    }
                }
                (Some(starts), None) => self.separate(starts, row.positions),
                (None, _) => *self.documents.entry(length).or_default() += 1,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::loss_weight::LossWeight;
    use crate::data::rows::batch;
    use crate::objective::tests::{DISTILL, DPO, policy};
    use crate::policy_loss::PolicyLossKind;

    /// Simulated steps of a loss of pairs have data, too.
    #[test]
    fn rows_of_pairs_have_a_pair_each() {
        for seq_length in [4, 7, 64] {
            let mut memory = vec![0; 2 * batch::part_words((1, seq_length), 1, true) + DPO.list_words((2, seq_length))];
            let mut batch = Batch::of_objective(&mut memory, seq_length, &DPO);
            let mut tokens = RandomTokens::new(3, 50);
            tokens.fill(&mut batch).unwrap();
            assert_eq!(tokens.documents().iter().map(|(length, count)| length * count).sum::<usize>(), 2 * seq_length);
            assert_eq!(batch.count_targets(50).map(|counted| counted.units), Ok(2 * u64::from(LossWeight::WHOLE.units())));
        }
    }

    #[test]
    fn rows_of_completions_have_numbers_for_each_token() {
        let loss = policy(PolicyLossKind::Dapo);
        let mut memory = vec![0; 2 * batch::part_words((1, 16), 1, true) + loss.list_words((2, 16))];
        let mut batch = Batch::of_objective(&mut memory, 16, &loss);
        RandomTokens::new(3, 50).fill(&mut batch).unwrap();
        assert_eq!(batch.count_targets(50).map(|counted| counted.targets), Ok(30), "nothing follows a completion");
        assert!(batch.list.as_ref().unwrap().words.chunks(4).all(|words| words[3] == 16));
    }

    #[test]
    fn rows_of_a_teacher_have_as_many_tokens_as_the_loss_reads() {
        let mut memory = vec![0; 2 * batch::part_words((1, 16), 1, true) + DISTILL.list_words((2, 16))];
        let mut batch = Batch::of_objective(&mut memory, 16, &DISTILL);
        RandomTokens::new(3, 50).fill(&mut batch).unwrap();
        assert_eq!(batch.count_targets(50).map(|counted| counted.targets), Ok(30));
        let teachers = batch.list.as_ref().unwrap().words.chunks(4).map(|words| crate::teacher_loss::entries(words).map(|(id, _)| id));
        assert!(teachers.flatten().eq((0..64).map(|place| place % 2)));
    }

    #[test]
    fn documents_fill_rows_with_the_requested_lengths() {
        let mut memory = vec![0; 4 * 300];
        let mut tokens =
            RandomTokens::new(3, 50).drawn_as(&RandomData { documents: Some("10-20".parse().unwrap()), ..RandomData::default() });
        let mut batch = Batch::new(&mut memory, 100, true);
        tokens.fill(&mut batch).unwrap();
        assert_eq!(batch.count_targets(50).map(|counted| counted.targets), Ok(300));
        let (starts, positions) = (batch.documents.as_deref().unwrap(), &batch.positions);
        assert!((0..300).all(|at| starts[at] + positions[at] == at as i32 % 100));
        let begins = |at: &usize| positions[*at] == 0;
        let begun: Vec<usize> = (0..300).filter(begins).chain([300]).collect();
        let cut = |end: usize| end.is_multiple_of(100);
        assert!(begun.windows(2).all(|ends| (10..=20).contains(&(ends[1] - ends[0])) || cut(ends[1])), "{begun:?}");
        assert!(begun.len() > 15 && tokens.documents().values().sum::<usize>() == begun.len() - 1);
        assert_eq!(tokens.documents().iter().map(|(length, count)| length * count).sum::<usize>(), 300);
        tokens.forget();
        assert!(tokens.documents().is_empty());
    }

    #[test]
    fn tokens_have_the_frequencies_of_their_skew() {
        let count = |skew: &str| {
            let mut tokens = RandomTokens::new(3, 4).drawn_as(&RandomData { token_skew: skew.parse().unwrap(), ..RandomData::default() });
            tokens.advance();
            let mut counts = [0.0; 4];
            (0..100_000).for_each(|_| counts[tokens.advance() as usize] += 1e-5);
            counts
        };
        let close = |counts: [f64; 4], expected: [f64; 4]| counts.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.01);
        assert!(close(count("0"), [0.25; 4]));
        assert!(close(count("1"), [12.0, 6.0, 4.0, 3.0].map(|share| share / 25.0)), "{:?}", count("1"));
        for text in ["-1", "9", "NaN", "inf", "", "a"] {
            assert_eq!(text.parse::<TokenSkew>(), Err("expected an exponent from 0 to 8".into()), "{text}");
        }
    }

    #[test]
    fn the_last_tokens_of_each_row_are_trained() {
        let mut memory = vec![0; 3 * 200];
        let mut tokens = RandomTokens::new(3, 50).drawn_as(&RandomData { trained_share: "0.25".parse().unwrap(), ..RandomData::default() });
        let mut batch = Batch::new(&mut memory, 100, false);
        tokens.fill(&mut batch).unwrap();
        assert!((0..200).all(|at| (batch.targets[at] >= 0) == (at % 100 >= 75)), "{:?}", batch.targets);
        assert_eq!((tokens.untrained(), TrainedShare(1e-9).masked(100), TrainedShare::default().masked(100)), (150, 99, 0));
        for text in ["0", "-1", "1.1", "NaN", "inf", "", "a"] {
            assert!(text.parse::<TrainedShare>().unwrap_err().contains("at most 1"), "{text}");
        }
    }

    #[test]
    fn lengths_are_two_numbers_of_which_the_second_is_no_less() {
        assert_eq!("7-7".parse(), Ok(LengthRange(7..=7)));
        assert!("1-2147483647".parse::<LengthRange>().is_ok());
        let too_long = ["1-2147483648", "1-18446744073709551615", "18446744073709551615-18446744073709551615"];
        for text in ["", "7", "0-4", "5-4", "a-b", "1-2-3"].into_iter().chain(too_long) {
            assert!(text.parse::<LengthRange>().unwrap_err().contains("200-4096"), "{text}");
        }
    }
}
