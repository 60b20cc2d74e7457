//! Preview of training data: counts, lengths, and the text of a few records with their trained tokens marked.

use super::context::Preparation;
use super::dataset::{Dataset, MeasuredData};
use super::encode::documents::place_word;
use super::encode::marked_text::ShownDocument;
use super::encode::text_files;
use super::encode::tokenizer_handle::Tokenizer;
use super::read::files;
use super::rows::hold_out::EvalSplit;
use super::rows::lengths::DocumentLengths;
use super::rows::row_rules::RowRules;
use crate::error::Result;
use crate::error::printable;
use crate::error::terminal::printable_lines;
use crate::units::counted;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};

/// Around trained text where there is no colour.
const MARKS: [&str; 2] = ["\u{27e6}", "\u{27e7}"];
/// Trained text in green, and back.
const COLOURS: [&str; 2] = ["\x1b[32m", "\x1b[0m"];

/// How data is looked at.
pub(crate) struct ViewRequest<'a> {
    pub(crate) paths: &'a [PathBuf],
    pub(crate) rules: RowRules,
    /// Size of the held-out split, and the seed that chooses its documents.
    pub(crate) split: Option<(EvalSplit, u64)>,
    /// Documents that are shown.
    pub(crate) shown: usize,
    pub(crate) in_colour: bool,
}

/// Data as training reads it.
#[derive(Debug, Serialize)]
pub(crate) struct DataView {
    tokenizer: String,
    /// Token files are not counted.
    documents: u64,
    /// Of them held out to evaluate on.
    held_out: u64,
    /// Tokens of the training data.
    tokens: usize,
    trained_tokens: u64,
    /// Records that have no trained token.
    skipped_records: u64,
    lengths: DocumentLengths,
    packing: String,
    seq_length: usize,
    sequences: usize,
    /// Messages that training would print.
    notes: Vec<String>,
    first: Vec<ShownDocument>,
    #[serde(skip)]
    in_colour: bool,
}

impl DataView {
    /// Opens the data as training does.
    ///
    /// # Errors
    /// The errors that training has when it opens this data.
    pub(crate) fn new(
        request: &ViewRequest<'_>,
        tokenizer: &Tokenizer,
        vocab_size: usize,
        preparation: &mut Preparation<'_>,
    ) -> Result<Self> {
        let ViewRequest { paths, rules, split, shown, in_colour } = *request;
        let MeasuredData { kept, held_out, lengths, skipped } =
            Dataset::open_measured(paths, tokenizer, vocab_size, rules, split, preparation)?;
        Ok(Self {
            tokenizer: tokenizer.to_string(),
            documents: lengths.documents,
            held_out: held_out.map_or(0, |held_out| held_out.documents()),
            tokens: kept.tokens(),
            trained_tokens: kept.tokens() as u64 - kept.untrained(),
            skipped_records: skipped,
            lengths,
            packing: rules.packing.to_string(),
            seq_length: rules.seq_length,
            sequences: kept.sequences(),
            notes: Vec::new(),
            first: text_files::first_documents(&files::find_files(paths)?, tokenizer, shown, preparation.stop())?,
            in_colour,
        })
    }

    /// Adds the messages that training printed.
    pub(crate) fn with_notes(self, notes: Vec<String>) -> Self {
        Self { notes, ..self }
    }

    fn write_document(&self, f: &mut fmt::Formatter<'_>, document: &ShownDocument) -> fmt::Result {
        let ShownDocument { file, line, tokens, pieces } = document;
        let line = line.map_or(String::new(), |line| format!(", {} {line}", place_word(Path::new(file))));
        let tokens = tokens.map_or("the beginning".into(), |tokens| counted(tokens, "token"));
        let legend = if self.in_colour { "in green".into() } else { format!("between {} and {}", MARKS[0], MARKS[1]) };
        let weights = if pieces.iter().any(|piece| piece.shown_weight().is_some()) { ", and *WEIGHT follows it" } else { "" };
        writeln!(f, "--- {}{line}: {tokens}; trained text is {legend}{weights}", printable(file))?;
        let [begin, end] = if self.in_colour { COLOURS } else { MARKS };
        for piece in pieces {
            let (begin, end) = if piece.weight.is_trained() { (begin, end) } else { ("", "") };
            let weight = piece.shown_weight().map_or(String::new(), |weight| format!("*{weight}"));
            write!(f, "{begin}{}{end}{weight}", printable_lines(&piece.text))?;
        }
        f.write_str("\n\n")
    }
}

impl fmt::Display for DataView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.first.iter().try_for_each(|document| self.write_document(f, document))?;
        self.notes.iter().try_for_each(|note| writeln!(f, "note       {}", printable_lines(note)))?;
        let percent = 100.0 * self.trained_tokens as f64 / self.tokens.max(1) as f64;
        writeln!(f, "tokenizer  {}", printable(&self.tokenizer))?;
        write!(f, "documents  {}", self.documents)?;
        if self.held_out > 0 {
            write!(f, ", {} of them held out to evaluate on", self.held_out)?;
        }
        if self.skipped_records > 0 {
            write!(f, "; {} without a trained token left out", counted(self.skipped_records, "record"))?;
        }
        writeln!(f, "\ntokens     {}, of which {} are trained ({percent:.1} %)", self.tokens, self.trained_tokens)?;
        writeln!(f, "rows       {} of {}, --packing {}", self.sequences, counted(self.seq_length, "token"), self.packing)?;
        write!(f, "lengths    {}", self.lengths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::marked_text::TextPiece;
    use crate::data::loss_weight::LossWeight;

    #[test]
    fn text_of_data_does_not_steer_a_terminal_in_colour_either() {
        let evil = "a\x1b[31mb\r\u{9b}\u{202e}\n\tc";
        let piece = TextPiece { text: evil.into(), weight: LossWeight::WHOLE };
        let view = DataView {
            tokenizer: evil.into(),
            documents: 1,
            held_out: 0,
            tokens: 1,
            trained_tokens: 1,
            skipped_records: 0,
            lengths: DocumentLengths::default(),
            packing: "wrapped".into(),
            seq_length: 1,
            sequences: 1,
            notes: vec![evil.into()],
            first: vec![ShownDocument { file: evil.into(), line: Some(1), tokens: Some(1), pieces: vec![piece] }],
            in_colour: true,
        };
        let shown = view.to_string();
        let escaped = "a\\u{1b}[31mb\\r\\u{9b}\\u{202e}\n\tc";
        assert!(shown.contains(&format!("{}{escaped}{}", COLOURS[0], COLOURS[1])), "{shown:?}");
        let plain = COLOURS.iter().fold(shown, |shown, colour| shown.replace(colour, ""));
        assert_eq!(printable_lines(&plain), plain);
    }
}
