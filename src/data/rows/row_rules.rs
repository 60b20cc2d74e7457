//! Rules by which documents become rows.

use super::document_part::{DocumentPart, PARTS_MAX};
use std::fmt;

/// No record with a token is shorter.
const DOCUMENT_BYTES_MIN: u64 = 10;
/// A token id in a list takes as many bytes at least.
const TOKEN_BYTES_MIN: u64 = 2;

/// How documents become rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// `bfd` for chats, prompts with completions and instructions, else `wrapped`.
    Auto,
    /// One stream of text, cut into rows: rows may begin and end within a document, and attention crosses documents.
    Wrapped,
    /// Best-fit decreasing: as many whole documents in a row as fit, each with separate attention.
    Bfd,
    /// One document in a row, followed by padding.
    Off,
}

/// Treatment of a document that is longer than a row of [`Packing::Bfd`] or [`Packing::Off`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overlong {
    /// Text is split, records are truncated.
    Auto,
    /// Keep the first tokens.
    Truncate,
    /// Split the document into row-sized documents.
    Split,
    /// Leave the document out.
    Drop,
}

/// How tokens become rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRules {
    /// Tokens of a row.
    pub seq_length: usize,
    /// How documents become rows.
    pub packing: Packing,
    /// Treatment of documents that are longer than a row.
    pub overlong: Overlong,
    /// Largest number of tokens of an answer of a pair with its prompt, at most half a row; `None` if the data has no pairs.
    pub pair_length: Option<usize>,
    /// Whether the tokens of a chosen answer's prompt are targets, with the least weight.
    pub trains_prompts: bool,
    /// Numbers behind each record; `None` if the data has none.
    pub numbers: Option<NumberRules>,
}

/// Numbers beside the trained tokens of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberRules {
    /// Advantages and log-probabilities of sampled completions.
    Rollouts {
        /// Whether the loss compares each token with a log-probability of the reference.
        needs_reference: bool,
    },
    /// Tokens of a teacher with their probabilities.
    Teacher {
        /// Most tokens of the teacher for each token.
        top_k: usize,
    },
}

impl NumberRules {
    /// Noun for a record.
    pub(super) fn noun(self) -> &'static str {
        match self {
            Self::Rollouts { .. } => "completion",
            Self::Teacher { .. } => "document",
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Wrapped => "wrapped",
            Self::Bfd => "bfd",
            Self::Off => "off",
        })
    }
}

impl Packing {
    /// Whether rows are cut from one stream. So they are where nobody has looked at the data yet.
    pub(crate) fn is_cut(self) -> bool {
        matches!(self, Self::Auto | Self::Wrapped)
    }
}

impl RowRules {
    /// One stream, cut into rows of `seq_length` tokens.
    pub fn wrapped(seq_length: usize) -> Self {
        Self { seq_length, packing: Packing::Wrapped, overlong: Overlong::Auto, pair_length: None, trains_prompts: false, numbers: None }
    }

    /// The flag that limits the length of documents.
    pub(super) fn length_flag(self) -> &'static str {
        if self.pair_length.is_some() { "--pair-length" } else { "--seq-length" }
    }

    /// Host memory that the table of rows takes at most, of `text` bytes of text.
    pub(in crate::data) fn table_bytes(self, text: u64) -> u64 {
        let parts = (text / DOCUMENT_BYTES_MIN + text / self.seq_length.max(1) as u64).min(PARTS_MAX);
        let is_compared = self.numbers == Some(NumberRules::Rollouts { needs_reference: true });
        let reference = if self.pair_length.is_some() || is_compared { size_of::<f64>() } else { 0 };
        let of_tokens = if is_compared { text / TOKEN_BYTES_MIN * size_of::<f32>() as u64 } else { 0 };
        if self.packing.is_cut() { 0 } else { parts * (size_of::<DocumentPart>() + size_of::<u32>() + reference) as u64 + of_tokens }
    }

    /// Rows of `text` bytes of text and `ids` token ids, at most.
    pub(in crate::data) fn rows_max(self, text: u64, ids: u64) -> u64 {
        let cut = (text + ids) / self.seq_length.max(1) as u64;
        if self.packing.is_cut() { cut } else { (cut + text / DOCUMENT_BYTES_MIN).min(PARTS_MAX) }
    }
}
