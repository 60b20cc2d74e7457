//! Documents on their way into rows: which of them, or which parts of them, rows hold.

use super::bounds::DocumentBounds;
use super::document_part::{DocumentPart, NO_TARGET, PARTS_MAX};
use super::rollout_numbers;
use super::row_rules::{NumberRules, Overlong, Packing, RowRules};
use super::teacher_numbers;
use super::token_stream::TokenStream;
use crate::error::{Error, Result};
use std::ops::Range;

/// Numbers beside the tokens of documents, in the same stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::data) struct NumbersBeside {
    /// Documents of the stream that are numbers.
    pub(in crate::data) documents: u64,
    /// Their words.
    pub(in crate::data) words: u64,
    /// Completions in rows whose tokens lack a log-probability of the reference that the loss needs.
    pub(in crate::data) lacking: u64,
}

/// Numbers of documents by their treatment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PackingCounts {
    pub(super) documents: u64,
    pub(super) truncated: u64,
    pub(super) split: u64,
    pub(super) dropped: u64,
    pub(super) untrained: u64,
}

impl PackingCounts {
    /// Whether more than one in a hundred documents lacks something.
    pub(super) fn loses_much(self) -> bool {
        100 * (self.truncated + self.untrained + self.dropped) > self.documents + self.untrained + self.dropped
    }
}

/// Documents on their way into rows.
pub(super) struct Packer<'a> {
    pub(super) stream: &'a TokenStream,
    pub(super) rules: RowRules,
    /// The token that follows a document of text.
    pub(super) end_of_text: i32,
    /// Whether every token of the stream is trained.
    pub(super) is_all_trained: bool,
    pub(super) tokens: Vec<i32>,
    pub(super) parts: Vec<DocumentPart>,
    pub(super) counts: PackingCounts,
    /// The chosen answer of a pair whose rejected answer comes next, or the tokens of a record whose numbers come next.
    pub(super) first: Option<Range<u64>>,
    pub(super) beside: NumbersBeside,
}

impl Packer<'_> {
    /// An answer of a pair of `limit` tokens at most; the chosen answer comes first. A pair with an answer that is cut before its first
    /// trained token is left out.
    pub(super) fn add_answer(&mut self, document: DocumentBounds, limit: u64) -> Result<()> {
        let Some([chosen, rejected]) = self.both(document, "a record does not have a chosen and a rejected answer")? else { return Ok(()) };
        let answers = [chosen, rejected].map(|answer| (answer.start, answer.end - answer.start));
        let before = self.parts.len();
        for (start, length) in answers {
            self.part(start, length.min(limit), NO_TARGET)?;
        }
        let is_in = self.parts.len() == before + 2;
        self.parts.truncate(if is_in { before + 2 } else { before });
        self.counts.truncated += u64::from(is_in && answers.iter().any(|(_, length)| *length > limit));
        self.counts.documents += u64::from(is_in);
        self.counts.untrained += u64::from(!is_in);
        if self.parts.len() as u64 <= PARTS_MAX { Ok(()) } else { Err(too_many(self.rules.packing)) }
    }

    /// The tokens of a record, or the numbers of its trained tokens. A record that is longer than a row is left out.
    pub(super) fn add_with_numbers(&mut self, document: DocumentBounds, rules: NumberRules) -> Result<()> {
        let wrong = "a record does not have tokens with their numbers";
        let Some([tokens, numbers]) = self.both(document, wrong)? else { return Ok(()) };
        let length = tokens.end - tokens.start;
        self.beside.documents += 1;
        self.beside.words += numbers.end - numbers.start;
        if length > self.rules.seq_length as u64 {
            self.counts.dropped += 1;
            return Ok(());
        }
        self.counts.documents += 1;
        self.parts.push(DocumentPart { start: tokens.start, tokens: length as u32, next: NO_TARGET });
        if self.parts.len() as u64 > PARTS_MAX {
            return Err(too_many(self.rules.packing));
        }
        let targets = &mut self.tokens[1..length as usize];
        self.stream.read(tokens.start as usize + 1, targets)?;
        let trained = targets.iter().filter(|target| **target >= 0).count() as u64;
        if tokens.end != numbers.start || trained == 0 {
            return Err(Error::format("the data", wrong));
        }
        self.check_numbers(numbers, trained, rules)
    }

    /// Checks that `words` are the numbers of so many trained tokens, and counts the completions without a reference.
    fn check_numbers(&mut self, words: Range<u64>, trained: u64, rules: NumberRules) -> Result<()> {
        let number = self.beside.documents;
        match rules {
            NumberRules::Rollouts { needs_reference } => {
                if rollout_numbers::words(trained) != words.end - words.start {
                    return Err(Error::format("the data", "a record does not have a completion with its numbers"));
                }
                let is_lacking = needs_reference && !rollout_numbers::have_reference(self.stream, words)?;
                self.beside.lacking += u64::from(is_lacking);
                Ok(())
            }
            NumberRules::Teacher { top_k } => match teacher_numbers::widest(self.stream, words, trained as usize)? {
                widest if widest <= top_k => Ok(()),
                widest => {
                    let remedy = format_args!("record {number} has {widest} teacher ids for a token; use --loss-top-k {widest}");
                    Err(Error::format("the data", remedy))
                }
            },
        }
    }

    /// Both documents of a record, once the second one is known.
    fn both(&mut self, document: DocumentBounds, wrong: &str) -> Result<Option<[Range<u64>; 2]>> {
        match (document.continues, self.first.take()) {
            (false, None) => {
                self.first = Some(document.tokens);
                Ok(None)
            }
            (true, Some(first)) => Ok(Some([first, document.tokens])),
            _ => Err(Error::format("the data", wrong)),
        }
    }

    pub(super) fn add(&mut self, DocumentBounds { tokens, is_record, .. }: DocumentBounds) -> Result<()> {
        let (length, row, before) = (tokens.end - tokens.start, self.rules.seq_length as u64, self.parts.len());
        let next = if is_record { NO_TARGET } else { self.end_of_text };
        match self.rules.overlong {
            _ if length == 0 => return Ok(()),
            _ if length <= row => self.part(tokens.start, length, next)?,
            Overlong::Drop => {
                self.counts.dropped += 1;
                return Ok(());
            }
            overlong if overlong == Overlong::Truncate || overlong == Overlong::Auto && is_record => {
                self.counts.truncated += 1;
                self.part(tokens.start, row, NO_TARGET)?;
            }
            _ => {
                self.counts.split += 1;
                self.split(tokens, next)?;
            }
        }
        let is_in = self.parts.len() > before;
        self.counts.documents += u64::from(is_in);
        self.counts.untrained += u64::from(!is_in);
        if self.parts.len() as u64 <= PARTS_MAX { Ok(()) } else { Err(too_many(self.rules.packing)) }
    }

    /// Every row's worth of a document; the first token of each is the target of the last of the one before.
    fn split(&mut self, tokens: Range<u64>, next: i32) -> Result<()> {
        let row = self.rules.seq_length as u64;
        for start in tokens.clone().step_by(row as usize) {
            let left = tokens.end - start;
            let next = if left > row { self.token(start + row)? } else { next };
            self.part(start, left.min(row), next)?;
        }
        Ok(())
    }

    /// A part of a document, unless none of its targets is trained.
    fn part(&mut self, start: u64, tokens: u64, next: i32) -> Result<()> {
        if next >= 0 || self.is_trained(start, tokens as usize)? {
            self.parts.push(DocumentPart { start, tokens: tokens as u32, next });
        }
        Ok(())
    }

    /// Whether a token after the first of a document's is.
    fn is_trained(&mut self, start: u64, tokens: usize) -> Result<bool> {
        if self.is_all_trained || tokens < 2 {
            return Ok(tokens >= 2);
        }
        let targets = &mut self.tokens[1..tokens];
        self.stream.read(start as usize + 1, targets)?;
        Ok(targets.iter().any(|target| *target >= 0))
    }

    /// The token at `at`, as a target.
    fn token(&self, at: u64) -> Result<i32> {
        let mut token = [0];
        self.stream.read(at as usize, &mut token)?;
        Ok(token[0].max(NO_TARGET))
    }
}

fn too_many(packing: Packing) -> Error {
    Error::Unsupported(format!("--packing {packing} with more than {PARTS_MAX} documents; use --packing wrapped"))
}
