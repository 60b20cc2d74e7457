//! Remarks on records: facts about their conversion that a run prints once, with the first record of each and the number of records.

use super::diagnostic_lines::Sentences;
use crate::data::read::position::DocumentPosition;
use crate::data::sandbox::codec::{MessageReader, MessageWriter};

/// The samples of a record: their tokens, none where nothing is trained.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::data) struct RecordSamples {
    pub(in crate::data) samples: Vec<Vec<u32>>,
    pub(in crate::data) remarks: RecordRemarks,
}

/// Remarks on a record.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::data) struct RecordRemarks {
    /// It begins with an answer that is not trained: nothing asks for it.
    pub(in crate::data) is_unasked: bool,
    /// Tokens that begin in a prompt and end in an answer.
    pub(in crate::data) crossing: usize,
    /// The template leaves out the reasoning of an answer.
    pub(in crate::data) loses_reasoning: bool,
    /// An answer is trained, and no token that ends it.
    pub(in crate::data) is_endless: bool,
    /// Sentences about columns, keys and messages that decide something elsewhere and nothing here.
    pub(in crate::data) sentences: Vec<String>,
}

/// Remarks on all records of a run.
#[derive(Debug, Default)]
pub(in crate::data) struct Remarks {
    unasked: Counted,
    crossed: Counted,
    crossing: usize,
    loses_reasoning: Counted,
    endless: Counted,
    sentences: Sentences,
}

/// How many records a remark is about, and the first of them.
#[derive(Debug, Default)]
struct Counted {
    records: u64,
    first: Option<DocumentPosition>,
}

impl RecordSamples {
    pub(in crate::data) fn write(&self, writer: &mut MessageWriter) {
        let RecordRemarks { is_unasked, crossing, loses_reasoning, is_endless, ref sentences } = self.remarks;
        for number in [is_unasked.into(), crossing, loses_reasoning.into(), is_endless.into()] {
            writer.number(number);
        }
        writer.number(sentences.len());
        for sentence in sentences {
            writer.text(sentence);
        }
        writer.number(self.samples.len());
        for sample in &self.samples {
            writer.ids(sample);
        }
    }

    pub(in crate::data) fn read(parts: &mut MessageReader<'_>) -> Option<Self> {
        let mut flag = || parts.number().map(|number| number != 0);
        let is_unasked = flag()?;
        let crossing = parts.number()?;
        let mut flag = || parts.number().map(|number| number != 0);
        let (loses_reasoning, is_endless) = (flag()?, flag()?);
        let sentences = parts.list(|parts| parts.text().map(String::from))?;
        let remarks = RecordRemarks { is_unasked, crossing, loses_reasoning, is_endless, sentences };
        Some(Self { samples: parts.list(MessageReader::ids)?, remarks })
    }
}

impl Counted {
    fn count(&mut self, applies: bool, place: &DocumentPosition) {
        if applies {
            self.records += 1;
            self.first.get_or_insert_with(|| place.clone());
        }
    }

    /// The remark on the first record, where there is one: that it does something, `as` so many of `all` records do.
    fn sentence(&self, all: u64, does: &str) -> Option<String> {
        let place = self.first.as_ref()?;
        Some(place.error(format_args!("{does}, as {} of {all} records do", self.records)).to_string())
    }
}

impl Remarks {
    /// Adds those on the record at `place`.
    pub(in crate::data) fn add(&mut self, remarks: &RecordRemarks, place: &DocumentPosition) {
        self.unasked.count(remarks.is_unasked, place);
        self.crossed.count(remarks.crossing > 0, place);
        self.crossing += remarks.crossing;
        self.loses_reasoning.count(remarks.loses_reasoning, place);
        self.endless.count(remarks.is_endless, place);
        for sentence in &remarks.sentences {
            self.sentences.add(sentence.clone(), place);
        }
    }

    /// The warnings, of `all` records; `end` is the name of the token that ends a text.
    pub(in crate::data) fn warnings(&self, all: u64, end: Option<&str>) -> Vec<String> {
        let unasked = self.unasked.sentence(all, "begins with an answer without a question");
        let unasked = unasked.map(|message| format!("{message}; such answers are not trained"));
        let endless = self.endless.sentence(all, "has an answer after which no end token is trained").map(|message| {
            let end = end.map_or("its end token".into(), |end| format!("{end:?}"));
            let remedy = format!("use --chat-template FILE with a template that writes {end} after each answer");
            format!("{message}: the model does not learn to stop; {remedy}")
        });
        self.sentences.warnings(all).into_iter().chain(unasked).chain(endless).collect()
    }

    /// The notes, of `all` records.
    pub(in crate::data) fn notes(&self, all: u64) -> Vec<String> {
        let crossed = self.crossed.sentence(all, "has a token that begins in the prompt and ends in the answer");
        let crossed = crossed.map(|message| format!("{message}; such tokens are trained: {}", self.crossing));
        let lost = self.loses_reasoning.sentence(all, "has reasoning that the chat template leaves out");
        crossed.into_iter().chain(lost.map(|message| format!("{message}; it is not trained"))).collect()
    }
}
