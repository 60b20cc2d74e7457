//! Rows of whole documents: cutting of documents that are longer than a row, grouping of documents, and positions of tokens in a row.
//!
//! A document of text is its tokens, and the end-of-text token is the target of its last one, which is so never read. A record is as it
//! stands; nothing follows its last token. Documents without a trained target are left out: they would change nothing.

use super::batch::{BatchRow, RowList, RowPairs};
use super::best_fit::best_fit_decreasing;
use super::bounds::Bounds;
use super::document_part::{DocumentPart, NO_TARGET};
use super::hold_out::Side;
use super::packer::{NumbersBeside, Packer, PackingCounts};
use super::rollout_numbers;
use super::row_rules::{NumberRules, Overlong, Packing, RowRules};
use super::teacher_numbers;
use super::token_references::{self, TokenReferences};
use super::token_stream::TokenStream;
use crate::data::checksum::hex;
use crate::data::context::Preparation;
use crate::data::loss_weight::{LossWeight, id_of};
use crate::error::Result;
use crate::policy_loss::TOKEN_WORDS;
use crate::teacher_loss::ENTRY_WORDS;
use crate::units::counted;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ops::Range;

/// Which documents are in which row.
pub(in crate::data) struct RowTable {
    /// Row after row.
    parts: Vec<DocumentPart>,
    /// For each row the parts up to its end.
    ends: Vec<u32>,
    /// The token id of padding.
    padding: i32,
    /// Summary of packing for people.
    became: String,
    /// Consecutive parts that share a row: 2 of a pair of answers, else 1.
    unit: usize,
    /// The reference sums of each pair, in the order of `parts`; empty until they are known.
    references: Vec<[f64; 2]>,
    /// Log-probabilities of the reference for the tokens of completions.
    token_references: TokenReferences,
    /// Numbers beside the tokens of all documents, also of those that are left out.
    beside: NumbersBeside,
    /// Numbers behind each document.
    numbers: Option<NumberRules>,
    /// Whether the tokens of a chosen answer's prompt are targets, with the least weight.
    trains_prompts: bool,
}

/// Gives the least weight to all targets that are not trained.
fn train_prompt(targets: &mut [i32]) {
    for target in targets.iter_mut().filter(|target| **target < 0) {
        *target = LossWeight::LEAST.word(id_of(*target as u32)) as i32;
    }
}

impl RowTable {
    /// Packs the documents of `side` of `stream`, which begin and end at `bounds`; `untrained` tokens of it are not trained. `None` where
    /// no row comes of it. A person hears what became of documents.
    ///
    /// # Errors
    /// When the tokens cannot be read; `Unsupported` for too many documents; `Interrupted`.
    pub(in crate::data) fn new(
        stream: &TokenStream,
        bounds: &Bounds,
        side: Side<'_>,
        rules: RowRules,
        (end_of_text, untrained): (Option<u32>, u64),
        preparation: &mut Preparation<'_>,
    ) -> Result<Option<Self>> {
        let RowRules { seq_length, packing, .. } = rules;
        let mut packer = Packer {
            stream,
            rules,
            end_of_text: end_of_text.map_or(NO_TARGET, |id| id as i32),
            is_all_trained: untrained == 0,
            tokens: vec![0; seq_length],
            parts: Vec::new(),
            counts: PackingCounts::default(),
            first: None,
            beside: NumbersBeside::default(),
        };
        let mut number = 0;
        bounds.for_each(preparation, |document| {
            let is_in = side.has(number);
            number += 1;
            match (rules.pair_length, rules.numbers) {
                _ if !is_in => Ok(()),
                (Some(limit), _) => packer.add_answer(document, limit as u64),
                (None, Some(rules)) => packer.add_with_numbers(document, rules),
                (None, None) => packer.add(document),
            }
        })?;
        let Packer { parts, counts, beside, .. } = packer;
        let unit = if rules.pair_length.is_some() { 2 } else { 1 };
        let mut table = Self::of((parts, unit), packing, seq_length as u32, end_of_text.map_or(0, |id| id as i32));
        if table.ends.is_empty() {
            return Ok(None);
        }
        (table.beside, table.numbers, table.trains_prompts) = (beside, rules.numbers, rules.trains_prompts);
        table.became = table.describe(rules, counts);
        match rules.overlong == Overlong::Auto && counts.loses_much() {
            true => preparation.warn(format!("{}; a larger {} keeps more of them", table.became, rules.length_flag())),
            false => preparation.detail(table.became.clone()),
        }
        Ok(Some(table))
    }

    /// The table of `parts`, of which `unit` consecutive ones share a row.
    fn of((parts, unit): (Vec<DocumentPart>, usize), packing: Packing, seq_length: u32, padding: i32) -> Self {
        let (became, references, beside) = (String::new(), Vec::new(), NumbersBeside::default());
        let (numbers, trains_prompts, token_references) = (None, false, TokenReferences::default());
        if packing != Packing::Bfd {
            return Self {
                ends: (1..=parts.len() as u32).collect(),
                parts,
                padding,
                became,
                unit,
                references,
                token_references,
                beside,
                numbers,
                trains_prompts,
            };
        }
        let units = || parts.chunks_exact(unit);
        let lengths: Vec<u32> = units().map(|parts| parts.iter().map(|part| part.tokens).sum()).collect();
        let rows = best_fit_decreasing(&lengths, seq_length);
        let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
        order.sort_by_key(|idx| rows[*idx as usize]);
        let mut ends = vec![0; rows.iter().max().map_or(0, |last| *last as usize + 1)];
        for (end, idx) in (1..).zip(&order) {
            ends[rows[*idx as usize] as usize] = end * unit as u32;
        }
        let parts = order.into_iter().flat_map(|idx| &parts[idx as usize * unit..][..unit]).copied().collect();
        Self { parts, ends, padding, became, unit, references, token_references, beside, numbers, trains_prompts }
    }

    /// The documents of row `row`.
    fn parts_of(&self, row: usize) -> &[DocumentPart] {
        let first = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.parts[first as usize..self.ends[row] as usize]
    }

    /// Indices of the pairs in row `row`; none if the data has no pairs.
    pub(in crate::data) fn pairs_of(&self, row: usize) -> Range<usize> {
        let first = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        if self.unit == 2 { first as usize / 2..self.ends[row] as usize / 2 } else { 0..0 }
    }

    /// Sets the reference sums of each pair.
    pub(in crate::data) fn set_references(&mut self, references: Vec<[f64; 2]>) {
        self.references = references;
    }

    /// Sets the log-probabilities of the reference of all trained tokens, row after row. Returns whether they are as many as these tokens.
    ///
    /// # Errors
    /// When the tokens cannot be read.
    pub(in crate::data) fn set_token_references(&mut self, stream: &TokenStream, logps: Vec<f32>) -> Result<bool> {
        let mut tokens = Vec::new();
        let mut trained = |part: &DocumentPart| {
            tokens.resize(part.tokens as usize - 1, 0);
            stream.read(part.start as usize + 1, &mut tokens)?;
            Ok(tokens.iter().filter(|token| **token >= 0).count() as u64)
        };
        let rows = (0..self.rows()).map(|row| self.parts_of(row).iter().map(&mut trained).sum::<Result<u64>>());
        let references = TokenReferences::of(logps, rows.collect::<Result<_>>()?);
        let fits = references.is_some();
        self.token_references = references.unwrap_or_default();
        Ok(fits)
    }

    /// Whether the loss compares the data with a reference that the data does not have in whole.
    pub(in crate::data) fn lacks_reference(&self) -> bool {
        self.unit == 2 || self.beside.lacking > 0
    }

    /// SHA-256 of the tokens of all documents, in hexadecimal.
    ///
    /// # Errors
    /// When the tokens cannot be read.
    pub(in crate::data) fn digest(&self, stream: &TokenStream) -> Result<String> {
        let (mut hash, mut tokens) = (Sha256::new(), Vec::new());
        for part in &self.parts {
            tokens.resize(part.tokens as usize, 0);
            stream.read(part.start as usize, &mut tokens)?;
            hash.update(part.tokens.to_le_bytes());
            tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
        }
        Ok(hex(hash.finalize()))
    }

    /// Numbers beside the tokens of all documents of the side that the table was made of.
    pub(in crate::data) fn beside(&self) -> NumbersBeside {
        self.beside
    }

    pub(in crate::data) fn became(&self) -> &str {
        &self.became
    }

    pub(in crate::data) fn rows(&self) -> usize {
        self.ends.len()
    }

    /// How many documents, or parts of such, have which length.
    pub(in crate::data) fn lengths(&self) -> BTreeMap<usize, usize> {
        let mut lengths = BTreeMap::new();
        for part in &self.parts {
            *lengths.entry(part.tokens as usize).or_default() += 1;
        }
        lengths
    }

    /// Writes row `row`. Does not allocate.
    ///
    /// # Errors
    /// When the tokens cannot be read any more.
    ///
    /// # Panics
    /// If there is no such row, or it is shorter than this table's.
    pub(in crate::data) fn read(&self, stream: &TokenStream, row: usize, out: BatchRow<'_>) -> Result<()> {
        let BatchRow { tokens, targets, positions, mut documents, mut list } = out;
        let mut references = self.token_references.of_row(row);
        let mut column = 0;
        let mut begin = |column: usize, end: usize| {
            for (place, position) in (0..).zip(&mut positions[column..end]) {
                *position = place;
            }
            if let Some(documents) = &mut documents {
                documents[column..end].fill(column as i32);
            }
        };
        for (number, part) in self.parts_of(row).iter().enumerate() {
            let end = column + part.tokens as usize;
            stream.read(part.start as usize, &mut tokens[column..end])?;
            targets[column..end - 1].copy_from_slice(&tokens[column + 1..end]);
            targets[end - 1] = part.next;
            if self.trains_prompts && number % 2 == 0 {
                train_prompt(&mut targets[column..end - 1]);
            }
            let numbers = part.start as usize + part.tokens as usize;
            match &mut list {
                Some(RowList::Rollouts(words)) => {
                    let words = &mut words[TOKEN_WORDS * column..TOKEN_WORDS * end];
                    rollout_numbers::read(stream, numbers, &targets[column..end], words)?;
                    references = token_references::place(references, &targets[column..end], words);
                }
                Some(RowList::Teacher { words, top_k }) => {
                    let words = &mut words[*top_k * ENTRY_WORDS * column..*top_k * ENTRY_WORDS * end];
                    teacher_numbers::read(stream, numbers, &targets[column..end], (*top_k, words))?;
                }
                Some(RowList::Pairs(_)) | None => {}
            }
            begin(column, end);
            column = end;
        }
        begin(column, tokens.len());
        if let Some(RowList::Pairs(pairs)) = list {
            self.add_pairs(row, pairs);
        }
        for token in &mut tokens[..column] {
            *token = id_of(*token as u32) as i32;
        }
        for target in &mut targets[..column] {
            *target = (*target).max(NO_TARGET);
        }
        tokens[column..].fill(self.padding);
        targets[column..].fill(NO_TARGET);
        Ok(())
    }

    /// Adds the pairs of row `row` to their places.
    fn add_pairs(&self, row: usize, mut places: RowPairs<'_>) {
        let mut column = 0;
        for pair in self.pairs_of(row) {
            let [chosen, rejected] = [0, 1].map(|answer| self.parts[2 * pair + answer].tokens as usize);
            let reference = self.references.get(pair).copied().unwrap_or_default();
            places.add([column, column + chosen, column + chosen + rejected], reference);
            column += chosen + rejected;
        }
    }

    /// `packing bfd: 120 documents in 31 rows, 3.1 % padding`, and the numbers of documents that were cut or left out.
    fn describe(&self, RowRules { seq_length, packing, pair_length, .. }: RowRules, counts: PackingCounts) -> String {
        let PackingCounts { documents, truncated, split, dropped, untrained } = counts;
        let tokens: u64 = self.parts.iter().map(|part| u64::from(part.tokens)).sum();
        let (rows, all) = (self.rows(), (self.rows() * seq_length) as f64);
        let padding = 100.0 * (1.0 - tokens as f64 / all);
        let (whole, noun) = match (pair_length, self.numbers) {
            (Some(_), _) => ("--pair-length", "pair"),
            (None, numbers) => ("a row", numbers.map_or("document", NumberRules::noun)),
        };
        let untrained_noun = match pair_length {
            Some(_) => "whose prompt fills --pair-length and left out",
            None => "without a trained token in it and left out",
        };
        let all = [
            (split, format!("longer than {whole} and split")),
            (truncated, format!("longer than {whole} and truncated")),
            (dropped, format!("longer than {whole} and left out")),
            (untrained, untrained_noun.into()),
        ];
        let odd: String = all.into_iter().filter(|(count, _)| *count > 0).map(|(count, words)| format!("; {count} {words}")).collect();
        format!("packing {packing}: {} in {}, {padding:.1} % padding{odd}", counted(documents, noun), counted(rows, "row"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::chat::record::{DataFormat, RecordRules};
    use crate::data::dataset::Dataset;
    use crate::data::encode::tokenizer_handle::Tokenizer;
    use crate::data::loader::{DataPosition, Loader};
    use crate::data::rows::batch::{Batch, Batches, arrays};
    use crate::data::tokenizer::AddBos;
    use crate::objective::tests::{DISTILL, DPO, policy};
    use crate::policy_loss::{PolicyLossKind, PolicyToken, reference_of};
    use crate::progress_event::ProgressEvent;
    use crate::signals::StopFlag;
    use proptest::prelude::*;
    use serde_json::json;
    use std::path::PathBuf;
    use std::sync::Arc;

    /// The end-of-text token of these tests.
    const END: i32 = 300;
    const VOCAB: usize = 301;
    /// Ids that tests of counted tokens need.
    const VOCAB_OF_COUNTING: usize = 2000;

    fn rules(seq_length: usize, packing: Packing) -> RowRules {
        RowRules { packing, ..RowRules::wrapped(seq_length) }
    }

    /// Records of these token ids and labels, in a file.
    fn records(dir: &tempfile::TempDir, records: &[serde_json::Value]) -> PathBuf {
        let path = dir.path().join("records.jsonl");
        std::fs::write(&path, records.iter().map(|record| format!("{record}\n")).collect::<String>()).unwrap();
        path
    }

    fn texts(dir: &tempfile::TempDir, texts: &[&str]) -> PathBuf {
        let path = dir.path().join("texts.jsonl");
        std::fs::write(&path, texts.iter().map(|text| format!("{}\n", json!({"text": text}))).collect::<String>()).unwrap();
        path
    }

    /// The data, and the messages to the user.
    fn open(paths: &[PathBuf], rules: RowRules) -> (Result<Dataset>, Vec<String>) {
        let (tokenizer, mut messages) = (Tokenizer::bytes_with(Some("300"), AddBos::No, Arc::default()).unwrap(), Vec::new());
        let dir = tempfile::tempdir().unwrap();
        let log = |event: ProgressEvent<'_>| {
            if let ProgressEvent::Note(line) | ProgressEvent::Detail(line) | ProgressEvent::Warn(line) = event {
                messages.push(line.to_string());
            }
        };
        let mut preparation = Preparation::new(&StopFlag::default(), None, Some(dir.path().into()), log);
        let dataset = Dataset::open(paths, &tokenizer, VOCAB, rules, &mut preparation);
        drop(preparation);
        (dataset, messages)
    }

    /// A token of a row: id, target, position, where its document begins.
    type Cell = [i32; 4];

    /// Every row of the data, in order.
    fn rows(dataset: Dataset) -> Vec<Vec<Cell>> {
        let (seq_length, rows) = (dataset.seq_length(), dataset.sequences());
        let mut memory = vec![7; arrays(true) * seq_length * rows];
        let mut batch = Batch::new(&mut memory, seq_length, true);
        Loader::new(dataset, rows, 0, false, DataPosition::default()).unwrap().fill(&mut batch).unwrap();
        batch.count_targets(VOCAB_OF_COUNTING).unwrap();
        let documents = batch.documents.as_ref().unwrap();
        let cells: Vec<Cell> =
            (0..seq_length * rows).map(|at| [batch.tokens[at], batch.targets[at], batch.positions[at], documents[at]]).collect();
        cells.chunks(seq_length).map(<[Cell]>::to_vec).collect()
    }

    #[test]
    fn documents_keep_to_themselves_and_the_end_of_text_is_their_last_target() {
        let dir = tempfile::tempdir().unwrap();
        let path = texts(&dir, &["abc", "", "d", "efgh"]);
        let (dataset, messages) = open(std::slice::from_ref(&path), rules(6, Packing::Bfd));
        let pad = |place, begin| [END, -1, place, begin];
        let [a, b, c, d] = [97, 98, 99, 100];
        let want = [
            vec![[a, b, 0, 0], [b, c, 1, 0], [c, END, 2, 0], pad(0, 3), pad(1, 3), pad(2, 3)],
            vec![[d, END, 0, 0], [101, 102, 0, 1], [102, 103, 1, 1], [103, 104, 2, 1], [104, END, 3, 1], pad(0, 5)],
        ];
        assert_eq!(rows(dataset.unwrap()), want);
        assert_eq!(messages, ["packing bfd: 3 documents in 2 rows, 33.3 % padding"]);
        let (dataset, messages) = open(&[path], rules(6, Packing::Off));
        assert_eq!(rows(dataset.unwrap()).iter().map(|row| row[0][0]).collect::<Vec<_>>(), [a, d, 101]);
        assert_eq!(messages, ["packing off: 3 documents in 3 rows, 55.6 % padding"]);
    }

    /// Rows of four pairs, of which one has no room for its answers, and the messages.
    fn rows_of_pairs(pair_length: usize) -> (Dataset, Vec<String>) {
        let pair = |prompt: &str, chosen: &str, rejected: &str| json!({"prompt": prompt, "chosen": chosen, "rejected": rejected});
        let pairs = [pair("ab", "c", "de"), pair("abcdef", "g", "h"), pair("f", "ghijk", "l"), pair("m", "n", "op")];
        let rules = RowRules { packing: Packing::Bfd, pair_length: Some(pair_length), ..RowRules::wrapped(12) };
        let (dataset, messages) = rows_of_objective(DataFormat::Preference, &pairs, rules);
        (dataset.unwrap(), messages)
    }

    /// Rows of records of a format that a loss of its own reads, and the messages.
    fn rows_of_objective(format: DataFormat, all: &[serde_json::Value], rules: RowRules) -> (Result<Dataset>, Vec<String>) {
        let dir = tempfile::tempdir().unwrap();
        let (path, of_records) = (records(&dir, all), RecordRules { format, ..RecordRules::default() });
        let (tokenizer, mut messages) = (Tokenizer::bytes_with(Some("300"), AddBos::No, Arc::new(of_records)).unwrap(), Vec::new());
        let log = |event: ProgressEvent<'_>| {
            if let ProgressEvent::Detail(line) | ProgressEvent::Warn(line) = event {
                messages.push(line.to_string());
            }
        };
        let mut preparation = Preparation::new(&StopFlag::default(), None, Some(dir.path().into()), log);
        let dataset = Dataset::open(&[path], &tokenizer, VOCAB, rules, &mut preparation);
        drop(preparation);
        (dataset, messages)
    }

    #[test]
    fn targets_of_a_prompt_that_is_trained_have_the_least_weight() {
        let pair = json!({"prompt": "ab", "chosen": "c", "rejected": "de"});
        let rules = RowRules { packing: Packing::Bfd, pair_length: Some(6), trains_prompts: true, ..RowRules::wrapped(12) };
        let dataset = rows_of_objective(DataFormat::Preference, &[pair], rules).0.unwrap();
        let mut memory = vec![7; 4 * 12 + DPO.list_words((1, 12))];
        let mut batch = Batch::of_objective(&mut memory, 12, &DPO);
        Loader::new(dataset, 1, 0, false, DataPosition::default()).unwrap().fill(&mut batch).unwrap();
        let least = LossWeight::LEAST.word(98) as i32;
        assert_eq!(batch.targets[..9], [least, 99, END, -1, -1, 100, 101, END, -1], "of the chosen answer alone");
    }

    /// A completion of three tokens, one of a token, and one that is longer than a row.
    fn rows_of_completions(needs_reference: bool) -> (Result<Dataset>, Vec<String>) {
        let ids = |count: usize| (1..=count).collect::<Vec<_>>();
        let row =
            |prompt, completion, advantage| json!({"prompt_ids": ids(prompt), "completion_ids": ids(completion), "advantage": advantage});
        let numbers = Some(NumberRules::Rollouts { needs_reference });
        let rules = RowRules { packing: Packing::Bfd, numbers, ..RowRules::wrapped(8) };
        rows_of_objective(DataFormat::Rollouts, &[row(2, 3, 0.5), row(7, 2, 1.0), row(1, 1, -2.0)], rules)
    }

    #[test]
    fn completions_share_a_row_with_their_numbers_and_long_ones_are_left_out() {
        let (dataset, messages) = rows_of_completions(false);
        let dataset = dataset.unwrap();
        let line = "packing bfd: 2 completions in 1 row, 12.5 % padding; 1 longer than a row and left out; a larger --seq-length keeps more of them";
        assert_eq!((&messages[..], dataset.tokens(), dataset.untrained(), dataset.documents()), (&[line.to_string()][..], 16, 10, 3));
        let loss = policy(PolicyLossKind::Grpo);
        let mut memory = vec![7; 4 * 8 + loss.list_words((1, 8))];
        let mut batch = Batch::of_objective(&mut memory, 8, &loss);
        Loader::new(dataset, 1, 0, false, DataPosition::default()).unwrap().fill(&mut batch).unwrap();
        assert_eq!((&batch.tokens[..7], &batch.targets[..7]), (&[1, 2, 1, 2, 3, 1, 1][..], &[-1, 1, 2, 3, -1, 1, -1][..]));
        let words = batch.list.as_ref().unwrap().words.as_chunks::<TOKEN_WORDS>().0;
        let numbers = |advantage, tokens| PolicyToken::words([advantage, f32::NAN, f32::NAN], tokens);
        assert_eq!((words[0], words[1], words[3], words[5]), ([0; 4], numbers(0.5, 3), numbers(0.5, 3), numbers(-2.0, 1)));
        assert_eq!(batch.count_targets(VOCAB).unwrap().units, 2 * 4096);
    }

    #[test]
    fn completions_without_a_reference_take_the_numbers_of_their_tokens_in_order() {
        let lacks = |needs_reference| rows_of_completions(needs_reference).0.unwrap().lacks_reference();
        assert_eq!([false, true].map(lacks), [false, true]);
        let mut dataset = rows_of_completions(true).0.unwrap();
        assert!(!dataset.set_token_references(vec![-1.0; 3]).unwrap() && !dataset.set_token_references(vec![-1.0; 5]).unwrap());
        assert!(dataset.set_token_references(vec![-1.0, -2.0, -3.0, -4.0]).unwrap());
        let loss = policy(PolicyLossKind::Grpo);
        let mut memory = vec![7; 4 * 8 + loss.list_words((1, 8))];
        let mut batch = Batch::of_objective(&mut memory, 8, &loss);
        Loader::new(dataset, 1, 0, false, DataPosition::default()).unwrap().fill(&mut batch).unwrap();
        let references: Vec<f32> = batch.list.as_ref().unwrap().words.as_chunks().0.iter().filter_map(reference_of).collect();
        assert_eq!(references, [-1.0, -2.0, -3.0, -4.0]);
    }

    #[test]
    fn documents_share_a_row_with_the_teachers_tokens_of_their_targets() {
        let row = |ids: &[u32], labels: &[i32], teacher, probs| json!({"input_ids": ids, "labels": labels, "teacher_ids": teacher, "teacher_probs": probs});
        let all = [
            row(&[1, 2, 3], &[-100, -100, 3], json!([[], [], [3, 9]]), json!([[], [], [0.5, 0.25]])),
            row(&[1; 9], &[1; 9], json!(vec![[2]; 9]), json!(vec![[1.0]; 9])),
            row(&[6, 7, 8], &[6, 7, 8], json!([[1], [7], [8]]), json!([[1.0], [0.75], [1.0]])),
        ];
        let rules = |top_k| RowRules { packing: Packing::Bfd, numbers: Some(NumberRules::Teacher { top_k }), ..RowRules::wrapped(8) };
        let (dataset, messages) = rows_of_objective(DataFormat::Teacher, &all, rules(2));
        let mut memory = vec![7; 4 * 8 + DISTILL.list_words((1, 8))];
        let mut batch = Batch::of_objective(&mut memory, 8, &DISTILL);
        Loader::new(dataset.unwrap(), 1, 0, false, DataPosition::default()).unwrap().fill(&mut batch).unwrap();
        assert!(
            messages.iter().any(|line| line.starts_with("packing bfd: 2 documents in 1 row, 25.0 % padding; 1 longer than a row and left"))
        );
        assert_eq!((&batch.tokens[..6], &batch.targets[..6]), (&[1, 2, 3, 6, 7, 8][..], &[-1, 3, -1, 7, 8, -1][..]));
        let words = batch.list.as_ref().unwrap().words.chunks(4).map(|words| crate::teacher_loss::entries(words).collect::<Vec<_>>());
        let none = || vec![];
        let want = [none(), vec![(3, 0.5), (9, 0.25)], none(), vec![(7, 0.75)], vec![(8, 1.0)], none(), none(), none()];
        assert_eq!(words.collect::<Vec<_>>(), want);
        assert_eq!(batch.count_targets(VOCAB).unwrap().units, 3 * 4096);
        batch.tokens.fill(1);
        assert!(batch.count_targets(9).unwrap_err().contains("teacher's token 9"));
        let refused = rows_of_objective(DataFormat::Teacher, &all, rules(1)).0.err().unwrap().to_string();
        assert!(refused.contains("record 1 has 2 teacher ids for a token; use --loss-top-k 2"), "{refused}");
    }

    #[test]
    fn both_answers_of_a_pair_share_a_row_and_only_answers_are_trained() {
        let (mut dataset, messages) = rows_of_pairs(6);
        let odd = "; 1 longer than --pair-length and truncated; 1 whose prompt fills --pair-length and left out";
        assert_eq!(messages, [format!("packing bfd: 3 pairs in 3 rows, 30.6 % padding{odd}; a larger --pair-length keeps more of them")]);
        assert_eq!((dataset.pairs(), dataset.pairs_of(1)), (3, 1..2));
        dataset.set_references(vec![[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]);
        let mut memory = vec![7; 4 * 36 + DPO.list_words((3, 12))];
        let mut batch = Batch::of_objective(&mut memory, 12, &DPO);
        Loader::new(dataset, 3, 0, false, DataPosition::default()).unwrap().fill(&mut batch).unwrap();
        let bytes = |text: &str| text.bytes().map(i32::from).collect::<Vec<_>>();
        assert_eq!(batch.tokens[..9], [bytes("abc"), vec![END], bytes("abde"), vec![END]].concat());
        assert_eq!(batch.targets[..9], [-1, 99, END, -1, -1, 100, 101, END, -1]);
        assert_eq!(batch.tokens[12..21], [bytes("fghijkfl"), vec![END]].concat());
        let pairs = batch.list.as_ref().unwrap().words.chunks(8).filter(|pair| pair[2] > 0).map(|pair| pair[..3].to_vec());
        assert_eq!(pairs.collect::<Vec<_>>(), [[0, 4, 9], [12, 18, 21], [24, 27, 31]]);
        assert_eq!(batch.count_targets(VOCAB).unwrap().units, 3 * 4096);
    }

    #[test]
    fn rows_hold_as_many_pairs_as_fit_and_their_tokens_have_a_digest() {
        let [short, long] = [4, 6].map(|length| rows_of_pairs(length).0);
        assert_eq!((short.sequences(), short.pairs()), (3, 3));
        let digests = [&short, &long].map(|dataset| dataset.documents_digest().unwrap());
        assert_ne!(digests[0], digests[1]);
        assert_eq!(rows_of_pairs(6).0.documents_digest().unwrap(), digests[1]);
    }

    #[test]
    fn a_record_is_as_it_stands_and_one_without_a_trained_target_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let labelled = |ids: &[i32], labels: &[i32]| json!({"input_ids": ids, "labels": labels});
        let path = records(
            &dir,
            &[
                labelled(&[1, 2, 3], &[1, -100, 3]),
                // Truncated before the first token that is trained.
                labelled(&[1, 2, 3, 4, 5], &[-100, -100, -100, -100, 5]),
                labelled(&[6, 7, 8, 9], &[-100, 7, -100, -100]),
            ],
        );
        let (dataset, messages) = open(&[path], rules(4, Packing::Off));
        let rows = rows(dataset.unwrap());
        let pairs: Vec<Vec<[i32; 2]>> = rows.iter().map(|row| row.iter().map(|cell| [cell[0], cell[1]]).collect()).collect();
        assert_eq!(pairs, [[[1, -1], [2, 3], [3, -1], [END, -1]], [[6, 7], [7, -1], [8, -1], [9, -1]]]);
        let odd = "; 1 longer than a row and truncated; 1 without a trained token in it and left out";
        let remedy = "; a larger --seq-length keeps more of them";
        assert_eq!(messages, [format!("packing off: 2 documents in 2 rows, 12.5 % padding{odd}{remedy}")]);
    }

    /// Ids and targets of the documents in one row each.
    fn cut(paths: &[PathBuf], overlong: Overlong) -> (Vec<Vec<[i32; 2]>>, String) {
        let (dataset, messages) = open(paths, RowRules { overlong, ..rules(4, Packing::Off) });
        let filled = |row: Vec<Cell>| row.iter().map(|cell| [cell[0], cell[1]]).filter(|pair| *pair != [END, -1]).collect();
        (rows(dataset.unwrap()).into_iter().map(filled).collect(), messages.concat())
    }

    #[test]
    fn overlong_documents_are_split_truncated_or_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let text = texts(&dir, &["abcd", "efghijklm"]);
        let record = records(&dir, &[json!({"input_ids": [1, 2, 3, 4, 5, 6]}), json!({"input_ids": [7, 8, 9, 10]})]);
        let first = vec![[97, 98], [98, 99], [99, 100], [100, END]];
        let split = [
            first.clone(),
            vec![[101, 102], [102, 103], [103, 104], [104, 105]],
            vec![[105, 106], [106, 107], [107, 108], [108, 109]],
            vec![[109, END]],
        ];
        let truncated = vec![[1, 2], [2, 3], [3, 4], [4, -1]];
        let last = vec![[7, 8], [8, 9], [9, 10], [10, -1]];
        let (rows, messages) = cut(std::slice::from_ref(&text), Overlong::Auto);
        assert!(
            rows == split && messages.contains("2 documents in 4 rows") && messages.ends_with("; 1 longer than a row and split"),
            "{messages}"
        );
        assert_eq!(cut(std::slice::from_ref(&text), Overlong::Split).0, split);
        assert_eq!(cut(std::slice::from_ref(&text), Overlong::Truncate).0[1], [[101, 102], [102, 103], [103, 104], [104, -1]]);
        let (rows, messages) = cut(std::slice::from_ref(&text), Overlong::Drop);
        assert!(rows == [first] && messages.ends_with("; 1 longer than a row and left out"), "{messages}");
        assert_eq!(cut(std::slice::from_ref(&record), Overlong::Auto).0, [truncated, last.clone()]);
        assert_eq!(cut(std::slice::from_ref(&record), Overlong::Split).0[1], [[5, 6], [6, -1]]);
        // Each file by its content.
        let (rows, messages) = cut(&[text, record], Overlong::Auto);
        assert!(
            rows[..4] == split
                && rows[5] == last
                && messages.contains("row and split; 1 longer than a row and truncated; a larger --seq-length")
        );
    }

    #[test]
    fn whole_documents_are_refused_where_they_have_no_ends_or_nothing_is_left_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids.u16.bin");
        std::fs::write(&path, [0; 64]).unwrap();
        let refused = open(&[path], rules(4, Packing::Bfd)).0.err().unwrap();
        let message = refused.to_string();
        assert!(refused.exit_code() == 2 && message.contains("ids.u16.bin") && message.contains("--packing wrapped"), "{message}");
        let long = RowRules { overlong: Overlong::Drop, ..rules(2, Packing::Bfd) };
        let nothing = open(&[texts(&dir, &["abc"])], long).0.err().unwrap().to_string();
        assert!(nothing.contains("texts.jsonl: no document has a trained token in a row of 2; a larger --seq-length"), "{nothing}");
        assert!(open(&[], rules(64, Packing::Off)).0.is_ok(), "the text that ships");
    }

    #[test]
    fn the_table_is_no_larger_than_planned() {
        let wrapped = RowRules::wrapped(8);
        assert_eq!((wrapped.table_bytes(1 << 40), wrapped.rows_max(80, 8)), (0, 11));
        let packed = rules(8, Packing::Bfd);
        assert_eq!(packed.table_bytes(u64::MAX / 2), 20 << 24);
        let compared = RowRules { numbers: Some(NumberRules::Rollouts { needs_reference: true }), ..packed };
        assert_eq!(compared.table_bytes(1000) - packed.table_bytes(1000), 4 * 500 + 8 * (100 + 1000 / packed.seq_length as u64));
        let dir = tempfile::tempdir().unwrap();
        let path = texts(&dir, &["a"; 50]);
        let text = path.metadata().unwrap().len();
        for packing in [Packing::Bfd, Packing::Off] {
            let rules = rules(1, packing);
            let dataset = open(std::slice::from_ref(&path), rules).0.unwrap();
            assert!(dataset.sequences() == 50 && rules.rows_max(text, 0) >= 50 && rules.table_bytes(text) >= 50 * 20);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_token_is_read_once_and_its_successor_is_its_target(
            lengths in prop::collection::vec(2..40i32, 1..30), seq_length in 1..24usize, is_bfd: bool, is_prepared: bool,
        ) {
            let starts = lengths.iter().scan(1, |next, length| Some(std::mem::replace(next, *next + length)));
            let documents: Vec<Vec<i32>> = starts.zip(&lengths).map(|(start, length)| (start..start + length).collect()).collect();
            let dir = tempfile::tempdir().unwrap();
            let path = records(&dir, &documents.iter().map(|ids| json!({"input_ids": ids})).collect::<Vec<_>>());
            let packing = if is_bfd { Packing::Bfd } else { Packing::Off };
            let rules = RowRules { overlong: Overlong::Split, ..rules(seq_length, packing) };
            let mut preparation = Preparation::new(&StopFlag::default(), Some(dir.path().join("cache")), None, |_| ());
            preparation.in_memory_bytes_max = if is_prepared { 0 } else { u64::MAX };
            let rows = rows(Dataset::open(&[path], &Tokenizer::bytes(), VOCAB_OF_COUNTING, rules, &mut preparation).unwrap());
            let mut trained: Vec<[i32; 2]> = rows.iter().flatten().filter(|cell| cell[1] >= 0).map(|cell| [cell[0], cell[1]]).collect();
            trained.sort_unstable();
            let pairs: Vec<[i32; 2]> = documents.iter().flat_map(|ids| ids.windows(2).map(|pair| [pair[0], pair[1]])).collect();
            prop_assert_eq!(trained, pairs);
            for row in &rows {
                let mut begun: Vec<i32> = row.iter().filter(|cell| cell[0] > 0).map(|cell| cell[3]).collect();
                begun.dedup();
                prop_assert!(is_bfd || begun.len() == 1);
                for (column, [_, _, place, begin]) in (0..).zip(row) {
                    prop_assert_eq!(*place, column - begin);
                }
                for pair in row.windows(2).filter(|pair| pair[0][3] == pair[1][3] && pair[0][0] > 0) {
                    prop_assert_eq!(pair[0][1], pair[1][0]);
                }
            }
        }
    }
}
