//! A micro-batch as the model reads it, and where micro-batches come from.

use crate::data::loss_weight::{LossWeight, id_of, sum_of_units};
use crate::error::Result;
use crate::objective::Objective;
use crate::pair_loss::{PAIR_WORDS, words_of};
use crate::teacher_loss::ENTRY_WORDS;
use std::iter::Sum;
use std::ops::{Add, Range};

/// A micro-batch of T tokens in rows of `seq_length`, in memory that is filled in place.
pub struct Batch<'a> {
    /// Tokens of a row.
    pub seq_length: usize,
    /// Token ids `[T]`.
    pub tokens: &'a mut [i32],
    /// The token that should follow each `[T]`, with its weight in the bits from 19 on: 0 for the weight 1, else `4096 - 4096 * weight`. A
    /// negative one counts for nothing: it has no loss and no gradient.
    pub targets: &'a mut [i32],
    /// Each token's place in its document `[T]`, below `seq_length`.
    pub positions: &'a mut [i32],
    /// Where in its row each token's document begins `[T]`: a token sees nothing before that. `None` where the plan does not separate
    /// documents.
    pub documents: Option<&'a mut [i32]>,
    /// The list of the loss; `None` where the loss is that of tokens.
    pub list: Option<BatchList<'a>>,
}

/// Numbers that a loss reads beside the tokens.
pub struct BatchList<'a> {
    /// The numbers of all rows. Unused places are zero.
    pub(crate) words: &'a mut [i32],
    kind: ListKind,
}

/// Contents of a list, and what counts in the mean of the loss.
#[derive(Clone, Copy)]
enum ListKind {
    /// Pairs of answers, int32 `[rows, seq_length / 4, 8]`: see [`PAIR_WORDS`]. Each pair counts 1.
    Pairs,
    /// Numbers of the tokens of completions, int32 `[T, 4]`: see [`crate::policy_loss::TOKEN_WORDS`]. Each token counts 1.
    Tokens,
    /// The numbers of [`ListKind::Tokens`]. Each completion counts 1.
    Completions,
    /// Tokens of a teacher for each token, int32 `[T, top_k, 2]`: see [`ENTRY_WORDS`]. Each target counts by its weight.
    Teacher { top_k: usize },
}

/// A row's part of the list of the loss.
pub(crate) enum RowList<'a> {
    Pairs(RowPairs<'a>),
    /// int32 `[seq_length, 4]`
    Rollouts(&'a mut [i32]),
    Teacher {
        /// int32 `[seq_length, top_k, 2]`
        words: &'a mut [i32],
        top_k: usize,
    },
}

/// The places of pairs of a row.
pub(crate) struct RowPairs<'a> {
    /// Index of the row's first token in the batch.
    first: usize,
    free: &'a mut [i32],
}

impl RowPairs<'_> {
    /// Adds a pair: the columns at which the chosen and the rejected answer begin, the column behind both, and the reference sums.
    ///
    /// # Panics
    /// If the row has no place left, which holds for no row of pairs with at least [`PAIR_TOKENS_MIN`] tokens.
    pub(crate) fn add(&mut self, columns: [usize; 3], reference: [f64; 2]) {
        let (words, rest) = std::mem::take(&mut self.free).split_at_mut(PAIR_WORDS);
        words[..3].iter_mut().zip(columns).for_each(|(word, column)| *word = (self.first + column) as i32);
        words[4..].as_chunks_mut::<2>().0.iter_mut().zip(reference).for_each(|(words, sum)| *words = words_of(sum));
        self.free = rest;
    }
}

/// A row of a batch: its part of each array.
pub(crate) struct BatchRow<'a> {
    pub(crate) tokens: &'a mut [i32],
    pub(crate) targets: &'a mut [i32],
    pub(crate) positions: &'a mut [i32],
    pub(crate) documents: Option<&'a mut [i32]>,
    pub(crate) list: Option<RowList<'a>>,
}

/// The targets of some micro-batches that count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CountedTargets {
    /// How many there are.
    pub(crate) targets: usize,
    /// The sum of their weights, in units of 1/4096: a whole number, so that it is the same in any order. Where the loss is a mean over
    /// pairs or completions, each of them has the weight 1, and targets have none.
    pub(crate) units: u64,
}

impl CountedTargets {
    /// The sum of their weights, which is the number of targets where all weights are 1.
    pub(crate) fn weight(self) -> f64 {
        sum_of_units(self.units)
    }
}

impl BatchList<'_> {
    /// The parts of `rows` rows of `length` tokens.
    fn of_rows(&mut self, rows: usize, length: usize) -> impl Iterator<Item = RowList<'_>> {
        let kind = self.kind;
        let words = self.words.chunks_exact_mut(self.words.len() / rows);
        words.enumerate().map(move |(row, words)| match kind {
            ListKind::Pairs => RowList::Pairs(RowPairs { first: row * length, free: words }),
            ListKind::Tokens | ListKind::Completions => RowList::Rollouts(words),
            ListKind::Teacher { top_k } => RowList::Teacher { words, top_k },
        })
    }
}

impl Add for CountedTargets {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { targets: self.targets + other.targets, units: self.units + other.units }
    }
}

impl Sum for CountedTargets {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Add::add)
    }
}

/// Arrays of T numbers that a batch consists of.
pub(crate) const fn arrays(separates_documents: bool) -> usize {
    if separates_documents { 4 } else { 3 }
}

/// Size in words of one rank's slices of a batch of `rows` rows and `seq_length` columns, as [`parts`] cuts it: the rank's columns of each
/// array, and the whole array of document starts, if the batch separates documents.
pub(crate) const fn part_words((rows, seq_length): (usize, usize), ranks: usize, separates_documents: bool) -> usize {
    let own = arrays(false) * rows * (seq_length / ranks);
    if separates_documents { own + rows * seq_length } else { own }
}

/// Slices of a batch's memory `[arrays, T]` for rank `rank` of the `ranks` ranks that share its rows: this rank's columns of tokens,
/// targets and positions, and of documents, which attention over whole rows reads, all.
pub(crate) fn parts(memory: &[i32], (tokens, seq_length): (usize, usize), (rank, ranks): (usize, usize)) -> impl Iterator<Item = &[i32]> {
    let (own, documents) = memory.split_at(arrays(false) * tokens);
    let columns = rank * seq_length / ranks..(rank + 1) * seq_length / ranks;
    own.chunks_exact(seq_length).map(move |row| &row[columns.clone()]).chain([documents])
}

/// The targets in a rank's part of a batch of `tokens` tokens on that rank.
pub(crate) fn targets(memory: &[i32], tokens: usize) -> &[i32] {
    &memory[tokens..2 * tokens]
}

/// Where documents begin, in a rank's part of a batch of `tokens` tokens that separates them and has no list.
pub(crate) fn documents(memory: &[i32], tokens: usize) -> &[i32] {
    &memory[memory.len() - tokens..]
}

/// Most different ids that `tokens` tokens of a vocabulary have.
pub(crate) fn distinct(tokens: usize, vocab: usize) -> usize {
    tokens.min(vocab)
}

impl<'a> Batch<'a> {
    /// A batch in `memory`, int32 `[arrays, T]`. Positions and documents are initialized as if each row were one document; tokens and
    /// targets keep the values in memory.
    ///
    /// # Panics
    /// If `memory` does not hold that many arrays of whole rows.
    pub fn new(memory: &'a mut [i32], seq_length: usize, separates_documents: bool) -> Self {
        let elems = memory.len() / arrays(separates_documents);
        assert!(memory.len() == elems * arrays(separates_documents) && elems.is_multiple_of(seq_length), "a batch of whole rows");
        let (tokens, rest) = memory.split_at_mut(elems);
        let (targets, rest) = rest.split_at_mut(elems);
        let (positions, documents) = rest.split_at_mut(elems);
        for row in positions.chunks_exact_mut(seq_length) {
            (0..).zip(row).for_each(|(column, position)| *position = column);
        }
        documents.fill(0);
        Self { seq_length, tokens, targets, positions, documents: separates_documents.then_some(documents), list: None }
    }

    /// A batch for `objective` in `memory`, int32 `[4, T]` and the list of the loss, which is cleared.
    ///
    /// # Panics
    /// If `memory` does not hold arrays and lists of whole rows.
    pub fn of_objective(memory: &'a mut [i32], seq_length: usize, objective: &Objective) -> Self {
        let of_row = arrays(true) * seq_length + objective.list_words((1, seq_length));
        let rows = memory.len() / of_row;
        let (arrays_of_rows, words) = memory.split_at_mut(rows * arrays(true) * seq_length);
        assert_eq!(words.len(), objective.list_words((rows, seq_length)), "a batch of whole rows");
        words.fill(0);
        let kind = match objective {
            Objective::Pairs(_) => ListKind::Pairs,
            Objective::Policy(loss) if loss.kind.counts_completions() => ListKind::Completions,
            Objective::Policy(_) => ListKind::Tokens,
            Objective::Teacher(loss) => ListKind::Teacher { top_k: loss.top_k },
        };
        Self { list: Some(BatchList { words, kind }), ..Self::new(arrays_of_rows, seq_length, true) }
    }

    /// Its rows, one after another.
    pub(crate) fn rows(&mut self) -> impl Iterator<Item = BatchRow<'_>> {
        let length = self.seq_length;
        let mut documents = self.documents.iter_mut().flat_map(move |documents| documents.chunks_exact_mut(length));
        let rows = self.tokens.len() / length;
        let mut lists = self.list.iter_mut().flat_map(move |list| list.of_rows(rows, length));
        let places = self.targets.chunks_exact_mut(length).zip(self.positions.chunks_exact_mut(length));
        self.tokens.chunks_exact_mut(length).zip(places).map(move |(tokens, (targets, positions))| BatchRow {
            tokens,
            targets,
            positions,
            documents: documents.next(),
            list: lists.next(),
        })
    }

    /// Counts the targets that count, once nothing in the batch makes a kernel reach outside of its tables.
    ///
    /// # Errors
    /// The first number that does, and where, in words.
    pub(crate) fn count_targets(&self, vocab: usize) -> std::result::Result<CountedTargets, String> {
        let (ids, columns) = (i32::try_from(vocab).unwrap_or(i32::MAX), i32::try_from(self.seq_length).unwrap_or(i32::MAX));
        self.check("token", self.tokens, 0..ids)?;
        self.check_targets(ids)?;
        self.check("position", self.positions, 0..columns)?;
        self.documents.iter().try_for_each(|documents| self.check_documents(documents))?;
        let counted = self.targets.iter().filter(|target| **target >= 0);
        let counted = counted.map(|word| CountedTargets { targets: 1, units: LossWeight::of(*word as u32).units().into() }).sum();
        let whole = |count: u64| CountedTargets { units: u64::from(LossWeight::WHOLE.units()) * count, ..counted };
        match &self.list {
            Some(BatchList { kind: ListKind::Pairs, words }) => self.count_pairs(words).map(whole),
            Some(BatchList { kind: ListKind::Completions, .. }) => Ok(whole(self.count_completions())),
            Some(BatchList { kind: ListKind::Teacher { .. }, words }) => check_teacher(words, ids).map(|()| counted),
            Some(BatchList { kind: ListKind::Tokens, .. }) | None => Ok(counted),
        }
    }

    /// The number of completions. No target follows the last token of a document, so each is one run of targets that count.
    fn count_completions(&self) -> u64 {
        let begins = |row: &[i32]| (0..row.len()).filter(|&at| row[at] >= 0 && (at == 0 || row[at - 1] < 0)).count();
        self.targets.chunks_exact(self.seq_length).map(begins).sum::<usize>() as u64
    }

    /// The number of pairs, once their rows are within the batch.
    fn count_pairs(&self, pairs: &[i32]) -> std::result::Result<u64, String> {
        let used = || pairs.as_chunks::<PAIR_WORDS>().0.iter().filter(|words| **words != [0; PAIR_WORDS]);
        let is_wrong = |words: &&[i32; PAIR_WORDS]| {
            let [chosen, rejected, end, ..] = **words;
            !(0 <= chosen && chosen < rejected && rejected < end && end as usize <= self.tokens.len())
        };
        match used().find(is_wrong) {
            Some([chosen, rejected, end, ..]) => Err(format!("a pair of the rows {chosen} to {rejected} and {rejected} to {end}")),
            None => Ok(used().count() as u64),
        }
    }

    /// The ids of targets that count are below `ids`, whatever their weights are.
    fn check_targets(&self, ids: i32) -> std::result::Result<(), String> {
        let is_outside = |word: &i32| (*word >= 0) & (id_of(*word as u32) as i32 >= ids);
        if !self.targets.iter().fold(false, |outside, word| outside | is_outside(word)) {
            return Ok(());
        }
        let at = self.targets.iter().position(is_outside).unwrap_or(0);
        Err(format!("target {} in {} must be below {ids}", id_of(self.targets[at] as u32), self.place(at)))
    }

    fn check(&self, name: &str, values: &[i32], allowed: Range<i32>) -> std::result::Result<(), String> {
        // Every number of every step passes here: no branch for each of them.
        if !values.iter().fold(false, |outside, value| outside | !allowed.contains(value)) {
            return Ok(());
        }
        let at = values.iter().position(|value| !allowed.contains(value)).unwrap_or(0);
        Err(format!("{name} {} in {} must be below {} and not negative", values[at], self.place(at), allowed.end))
    }

    /// A document begins where one of its tokens stands, and goes on until the next one begins.
    fn check_documents(&self, documents: &[i32]) -> std::result::Result<(), String> {
        for (row, starts) in documents.chunks_exact(self.seq_length).enumerate() {
            let mut start = 0;
            for (column, &next) in (0..).zip(starts) {
                if next != start && next != column {
                    let at = self.place(row * self.seq_length + column as usize);
                    return Err(format!(
                        "the document of {at} begins at {next}: neither there nor at {start}, as that of the token before"
                    ));
                }
                start = next;
            }
        }
        Ok(())
    }

    fn place(&self, at: usize) -> String {
        format!("row {}, column {}", at / self.seq_length, at % self.seq_length)
    }
}

/// The ids of a teacher's tokens are below `ids`.
fn check_teacher(words: &[i32], ids: i32) -> std::result::Result<(), String> {
    let is_outside = |[id, _]: &[i32; ENTRY_WORDS]| !(0..=ids).contains(id);
    match words.as_chunks::<ENTRY_WORDS>().0.iter().find(|words| is_outside(words)) {
        Some([id, _]) => Err(format!("the teacher's token {} must be below {ids}", i64::from(*id) - 1)),
        None => Ok(()),
    }
}

/// Where the batches come from.
pub trait Batches {
    /// Writes the next micro-batch: tokens and targets, and where a row holds several documents their bounds and positions.
    ///
    /// # Errors
    /// When the data cannot be read.
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::tests::{DPO, policy};
    use crate::policy_loss::{PolicyLossKind, TOKEN_WORDS};

    #[test]
    fn completions_or_their_tokens_count_and_rows_have_numbers_of_their_tokens() {
        for (kind, count) in [(PolicyLossKind::Dapo, 7), (PolicyLossKind::Grpo, 5), (PolicyLossKind::DrGrpo, 5)] {
            let mut memory = vec![7; 8 * 16];
            let mut batch = Batch::of_objective(&mut memory, 8, &policy(kind));
            batch.tokens.fill(1);
            batch.targets.copy_from_slice(&[-1, 3, 3, -1, -1, 3, -1, 3, 3, 3, -1, -1, -1, -1, 3, -1]);
            let row = batch.rows().nth(1).unwrap();
            let Some(RowList::Rollouts(words)) = row.list else { panic!("a row of completions") };
            assert_eq!(words, [0; 8 * TOKEN_WORDS]);
            assert_eq!(batch.count_targets(8), Ok(CountedTargets { targets: 7, units: 4096 * count }), "{kind:?}");
        }
    }

    #[test]
    fn rows_are_one_document_each_by_default() {
        let mut memory = vec![7; 4 * 6];
        let batch = Batch::new(&mut memory, 3, true);
        assert_eq!((&batch.positions[..], batch.documents.as_deref()), (&[0, 1, 2, 0, 1, 2][..], Some(&[0; 6][..])));
        assert_eq!(batch.count_targets(8).map(|counted| counted.targets), Ok(6));
        assert!(Batch::new(&mut memory[..18], 3, false).documents.is_none());
    }

    #[test]
    fn ranks_that_share_rows_have_their_columns_and_all_bounds_of_documents() {
        // Two rows of four columns.
        let memory: Vec<i32> = (0..4 * 8).collect();
        let of = |rank: usize, memory: &[i32]| parts(memory, (8, 4), (rank, 2)).flatten().copied().collect::<Vec<_>>();
        let own = [vec![0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21], vec![2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23]];
        for (rank, columns) in own.into_iter().enumerate() {
            assert_eq!(of(rank, &memory[..24]), columns);
            let with_documents = of(rank, &memory);
            assert_eq!((&with_documents[..12], documents(&with_documents, 8)), (&columns[..], &memory[24..]));
            assert_eq!([false, true].map(|separates| part_words((2, 4), 2, separates)), [columns.len(), with_documents.len()]);
        }
    }

    #[test]
    fn only_targets_from_0_on_count_and_out_of_range_ones_are_named() {
        let checked = |change: fn(&mut Batch<'_>)| {
            let mut memory = vec![0; 4 * 6];
            let mut batch = Batch::new(&mut memory, 3, true);
            change(&mut batch);
            batch.count_targets(5).map(|counted| counted.targets)
        };
        assert_eq!(checked(|batch| batch.targets.copy_from_slice(&[4, -1, 0, -100, i32::MIN, 3])), Ok(3));
        let refused = |change, words: &str| assert_eq!(checked(change).unwrap_err(), words);
        refused(|batch| batch.tokens[4] = 5, "token 5 in row 1, column 1 must be below 5 and not negative");
        refused(|batch| batch.tokens[0] = -1, "token -1 in row 0, column 0 must be below 5 and not negative");
        refused(|batch| batch.targets[2] = 5, "target 5 in row 0, column 2 must be below 5");
        refused(|batch| batch.positions[3] = 3, "position 3 in row 1, column 0 must be below 3 and not negative");
        refused(|batch| batch.positions[3] = -1, "position -1 in row 1, column 0 must be below 3 and not negative");
    }

    #[test]
    fn weights_of_targets_are_summed_and_a_target_outside_of_the_vocabulary_is_found_under_its_weight() {
        let mut memory = vec![0; 3 * 6];
        let batch = Batch::new(&mut memory, 3, false);
        let quarter = |id| LossWeight::nearest(0.25).unwrap().word(id) as i32;
        batch.targets.copy_from_slice(&[4, -1, quarter(4), quarter(0), -100, 3]);
        let counted = batch.count_targets(5).unwrap();
        assert_eq!((counted.targets, counted.units, counted.weight()), (4, 2 * 4096 + 2 * 1024, 2.5));
        batch.targets[3] = quarter(5);
        assert_eq!(batch.count_targets(5).unwrap_err(), "target 5 in row 1, column 0 must be below 5");
    }

    #[test]
    fn pairs_are_counted_and_their_rows_are_those_of_the_batch() {
        let mut memory = vec![7; 4 * 16 + DPO.list_words((2, 8))];
        let mut batch = Batch::of_objective(&mut memory, 8, &DPO);
        batch.targets.fill(1);
        let mut rows = batch.rows();
        let (first, second) = (rows.next().unwrap(), rows.next().unwrap());
        assert!(rows.next().is_none());
        drop(rows);
        let mut places = [first, second].map(|row| match row.list {
            Some(RowList::Pairs(pairs)) => pairs,
            _ => panic!("a row of pairs"),
        });
        places[0].add([0, 2, 4], [-1.5, 2.5]);
        places[1].add([0, 2, 5], [0.0; 2]);
        places[1].add([5, 6, 8], [0.0; 2]);
        let pairs: Vec<i32> = batch.list.as_ref().unwrap().words.to_vec();
        assert_eq!(pairs.chunks(8).map(|pair| pair[..3].to_vec()).collect::<Vec<_>>(), [[0, 2, 4], [0, 0, 0], [8, 10, 13], [13, 14, 16]]);
        assert_eq!([4, 6].map(|at| crate::pair_loss::float_of([pairs[at], pairs[at + 1]])), [-1.5, 2.5]);
        batch.tokens.fill(0);
        assert_eq!(batch.count_targets(8), Ok(CountedTargets { targets: 16, units: 3 * 4096 }));
        for wrong in [[0, 0, 4], [-1, 2, 4], [2, 5, 4], [14, 15, 17]] {
            batch.list.as_mut().unwrap().words[..3].copy_from_slice(&wrong);
            assert!(batch.count_targets(8).unwrap_err().starts_with("a pair of the rows "), "{wrong:?}");
        }
    }

    #[test]
    fn documents_begin_where_one_of_their_tokens_stands() {
        let checked = |starts: [i32; 6]| {
            let (mut memory, mut starts) = (vec![0; 4 * 6], starts);
            Batch { documents: Some(&mut starts), ..Batch::new(&mut memory, 3, true) }.count_targets(5).map(|counted| counted.targets)
        };
        for starts in [[0, 0, 0, 0, 0, 0], [0, 1, 2, 0, 0, 2], [0, 1, 1, 0, 1, 1]] {
            assert_eq!(checked(starts), Ok(6), "{starts:?}");
        }
        for starts in [[1, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 2, 2], [0, 0, 0, -1, 0, 0]] {
            assert!(checked(starts).unwrap_err().contains("begins at"), "{starts:?}");
        }
    }
}
