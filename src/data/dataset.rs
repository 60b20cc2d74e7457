//! Data in sequences: the stream cut, or whole documents ([`crate::data::rows::row_table`]). Sequence `i` of `S` tokens covers stream tokens
//! `i S ..= i S + S`: `S` inputs, and the `S` tokens that follow each of them. Consecutive sequences share one token; the rest at the end
//! is shorter than a sequence.

use crate::data::context::Preparation;
use crate::data::encode::documents::{DocumentTotals, DocumentsInMemory};
use crate::data::encode::text_files;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::loss_weight::{VOCAB_MAX, id_of};
use crate::data::prepared::cache;
use crate::data::prepared::checked_files::CheckedFiles;
use crate::data::prepared::folder::Prepared;
use crate::data::prepared::token_file::TokenFile;
use crate::data::read::files::{SourceKind, kind};
use crate::data::rows::batch::BatchRow;
use crate::data::rows::bounds::{Bounds, DocumentEnds};
use crate::data::rows::hold_out::{EvalSplit, HeldOut, Side};
use crate::data::rows::lengths::DocumentLengths;
use crate::data::rows::row_rules::{Packing, RowRules};
use crate::data::rows::row_table::RowTable;
use crate::data::rows::token_stream::{TokenStream, Tokens};
use crate::data::run_sources::KeptText;
use crate::disk::InFile;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A stream of tokens in sequences of equal length.
pub struct Dataset {
    stream: TokenStream,
    /// Tokens in it that are this dataset's.
    tokens: usize,
    documents: u64,
    seq_length: usize,
    sequences: usize,
    cut: Cut,
    untrained: u64,
}

/// Which tokens of the stream are in which sequence.
enum Cut {
    /// One after another.
    All,
    /// Sequences with at least one trained target, one after another.
    Trained(Vec<u32>),
    /// Whole documents.
    Packed(RowTable),
}

/// Training data, held-out data, and statistics of the documents of both.
pub(super) struct MeasuredData {
    pub(super) kept: Dataset,
    pub(super) held_out: Option<Dataset>,
    /// Of all documents of text; none where token files are among the data.
    pub(super) lengths: DocumentLengths,
    /// Records without a trained token.
    pub(super) skipped: u64,
}

/// Data as it was opened.
struct Opened {
    files: Vec<PathBuf>,
    stream: TokenStream,
    /// Bounds of its documents; token files have none.
    bounds: Option<Bounds>,
    /// Of text.
    documents: u64,
    /// Tokens that are not trained.
    untrained: u64,
    /// Records without a trained token.
    skipped: u64,
}

impl Dataset {
    /// Opens the files and directories in `paths`, or the text that ships with the program when there are none, for a
    /// model with `vocab_size` ids.
    ///
    /// # Errors
    /// Errors of [`crate::data::read::files::find_files`]; a file's fault with its place; `Unsupported` when the vocabulary has more than
    /// [`VOCAB_MAX`] ids or does not hold the tokenizer's end of text; `Format` (or `Usage`, for the shipped text) when all of it is less
    /// than one sequence and the token after it; `Usage` for whole documents of a token file, which has none; `Interrupted`.
    ///
    /// # Panics
    /// If the sequences have no token.
    pub fn open(
        paths: &[PathBuf],
        tokenizer: &Tokenizer,
        vocab_size: usize,
        rules: RowRules,
        preparation: &mut Preparation<'_>,
    ) -> Result<Self> {
        Opened::new(paths, tokenizer, vocab_size, rules.packing, None, false, preparation)?.dataset(
            Side::All,
            rules,
            tokenizer,
            preparation,
        )
    }

    /// As [`Dataset::open`], in two: the documents that are left when `split` has held some out, and those. They depend on what the
    /// documents hold and on the seed.
    ///
    /// # Errors
    /// Errors of [`Dataset::open`]; `Usage` where the data has no document boundaries, or no document would be left.
    pub(crate) fn open_split(
        paths: &[PathBuf],
        tokenizer: &Tokenizer,
        vocab_size: usize,
        rules: RowRules,
        (split, seed): (EvalSplit, u64),
        preparation: &mut Preparation<'_>,
    ) -> Result<(Self, Self)> {
        let opened = Opened::new(paths, tokenizer, vocab_size, rules.packing, Some(split), false, preparation)?;
        opened.split(rules, tokenizer, (split, seed), preparation)
    }

    /// As [`Dataset::open`], or [`Dataset::open_split`] where something is held out, and how long the documents are.
    ///
    /// # Errors
    /// Errors of [`Dataset::open`] and [`Dataset::open_split`].
    pub(super) fn open_measured(
        paths: &[PathBuf],
        tokenizer: &Tokenizer,
        vocab_size: usize,
        rules: RowRules,
        split: Option<(EvalSplit, u64)>,
        preparation: &mut Preparation<'_>,
    ) -> Result<MeasuredData> {
        let opened = Opened::new(paths, tokenizer, vocab_size, rules.packing, split.map(|(split, _)| split), true, preparation)?;
        let lengths = opened.bounds.as_ref().map(|bounds| DocumentLengths::of(bounds, preparation)).transpose()?;
        let (kept, held_out) = match split {
            None => (opened.dataset(Side::All, rules, tokenizer, preparation)?, None),
            Some(split) => {
                let (kept, held_out) = opened.split(rules, tokenizer, split, preparation)?;
                (kept, Some(held_out))
            }
        };
        Ok(MeasuredData { kept, held_out, lengths: lengths.unwrap_or_default(), skipped: opened.skipped })
    }

    /// Cuts `stream`; `None` when it is less than one sequence and the token after it.
    ///
    /// # Panics
    /// If `seq_length` is 0.
    pub fn new(stream: TokenStream, seq_length: usize) -> Option<Self> {
        let sequences = stream.tokens().saturating_sub(1) / seq_length;
        let tokens = stream.tokens();
        (sequences > 0).then_some(Self { stream, tokens, documents: 0, seq_length, sequences, cut: Cut::All, untrained: 0 })
    }

    /// Leaves out sequences without a trained target: a step of those alone would have no loss.
    fn without_untrained(self, files: &[PathBuf], preparation: &mut Preparation<'_>) -> Result<Self> {
        let all = u32::try_from(self.sequences).map_err(|_| Error::Unsupported(format!("{} sequences in the data", self.sequences)))?;
        let (mut inputs, mut targets) = (vec![0; self.seq_length], vec![0; self.seq_length]);
        let mut trained = Vec::new();
        for idx in 0..all {
            self.read_cut(idx as usize, &mut inputs, &mut targets)?;
            trained.extend(targets.iter().any(|target| *target >= 0).then_some(idx));
            preparation.check_stop()?;
        }
        trained.shrink_to_fit();
        match (files, trained.len()) {
            ([file, ..], 0) => Err(Error::format(file, format!("no token is trained in {all} sequences of {}", self.seq_length))),
            (_, sequences) if sequences == self.sequences => Ok(self),
            (_, sequences) => {
                preparation.note(format!("{} of {all} sequences have no trained token and are left out", self.sequences - sequences));
                Ok(Self { sequences, cut: Cut::Trained(trained), ..self })
            }
        }
    }

    /// Tokens that are read and not trained.
    pub(crate) fn untrained(&self) -> u64 {
        self.untrained
    }

    /// Sequences in one pass over the data, at least 1.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// Tokens of a sequence.
    pub fn seq_length(&self) -> usize {
        self.seq_length
    }

    /// Tokens of the data, those after the last sequence included.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Documents of text in the stream; token files are not counted.
    pub fn documents(&self) -> u64 {
        self.documents
    }

    /// How many documents have which length in tokens, as attention sees them.
    pub(crate) fn lengths(&self) -> BTreeMap<usize, usize> {
        match &self.cut {
            Cut::Packed(table) => table.lengths(),
            Cut::All | Cut::Trained(_) => [(self.seq_length, self.sequences)].into(),
        }
    }

    /// Summary of packing: documents kept whole, cut or left out.
    pub(crate) fn became(&self) -> Option<&str> {
        if let Cut::Packed(table) = &self.cut { Some(table.became()) } else { None }
    }

    /// Indices of the pairs in sequence `idx`; none if the data has no pairs.
    pub(crate) fn pairs_of(&self, idx: usize) -> std::ops::Range<usize> {
        if let Cut::Packed(table) = &self.cut { table.pairs_of(idx) } else { 0..0 }
    }

    /// Number of pairs.
    pub(crate) fn pairs(&self) -> usize {
        self.pairs_of(self.sequences - 1).end
    }

    /// Sets the reference sums of each pair.
    pub(crate) fn set_references(&mut self, references: Vec<[f64; 2]>) {
        if let Cut::Packed(table) = &mut self.cut {
            table.set_references(references);
        }
    }

    /// Sets the log-probabilities of the reference of all trained tokens of completions, in the order of sequences. Returns whether they are as
    /// many as these tokens.
    ///
    /// # Errors
    /// When the tokens cannot be read.
    pub(crate) fn set_token_references(&mut self, logps: Vec<f32>) -> Result<bool> {
        if let Cut::Packed(table) = &mut self.cut { table.set_token_references(&self.stream, logps) } else { Ok(false) }
    }

    /// Whether a loss with a reference needs one beside the data.
    pub(crate) fn lacks_reference(&self) -> bool {
        if let Cut::Packed(table) = &self.cut { table.lacks_reference() } else { false }
    }

    /// SHA-256 of the tokens of all pairs or completions, in hexadecimal; empty if the data has none.
    ///
    /// # Errors
    /// When the tokens cannot be read.
    pub(crate) fn documents_digest(&self) -> Result<String> {
        if let Cut::Packed(table) = &self.cut { table.digest(&self.stream) } else { Ok(String::new()) }
    }

    /// Writes sequence `idx`. Positions and bounds of a row that is one document stay as they are.
    ///
    /// # Errors
    /// When a token file cannot be read any more or has changed for the worse.
    ///
    /// # Panics
    /// If there is no such sequence or the row has another length.
    pub(crate) fn read_sequence(&self, idx: usize, row: BatchRow<'_>) -> Result<()> {
        assert!(idx < self.sequences, "sequence {idx} of {}", self.sequences);
        assert_eq!((row.tokens.len(), row.targets.len()), (self.seq_length, self.seq_length));
        match &self.cut {
            Cut::All => self.read_cut(idx, row.tokens, row.targets),
            Cut::Trained(trained) => self.read_cut(trained[idx] as usize, row.tokens, row.targets),
            Cut::Packed(table) => table.read(&self.stream, idx, row),
        }
    }

    /// Writes sequence `idx` of the stream: ids as `inputs`, and words as `targets`, one token further, and -1 where nothing is trained.
    fn read_cut(&self, idx: usize, inputs: &mut [i32], targets: &mut [i32]) -> Result<()> {
        let start = idx * self.seq_length;
        let (shared, last) = targets.split_at_mut(self.seq_length - 1);
        self.stream.read(start, inputs)?;
        shared.copy_from_slice(&inputs[1..]);
        self.stream.read(start + self.seq_length, last)?;
        for token in inputs.iter_mut() {
            *token = id_of(*token as u32) as i32;
        }
        for target in targets.iter_mut() {
            *target = (*target).max(-1);
        }
        Ok(())
    }
}

impl Opened {
    /// The tokens of all that `paths` name. The data must have document bounds if `packing` or `split` needs them.
    fn new(
        paths: &[PathBuf],
        tokenizer: &Tokenizer,
        vocab_size: usize,
        packing: Packing,
        split: Option<EvalSplit>,
        is_measured: bool,
        preparation: &mut Preparation<'_>,
    ) -> Result<Self> {
        check_vocabulary(vocab_size, tokenizer)?;
        let files = preparation.known.find_files(paths)?;
        let needs_bounds = !packing.is_cut() || split.is_some();
        if needs_bounds {
            check_bounds(&files, packing, split)?;
        }
        open_stream(paths, files, tokenizer, vocab_size, needs_bounds || is_measured, preparation)
    }

    /// The remaining documents and the held-out documents.
    fn split(
        &self,
        rules: RowRules,
        tokenizer: &Tokenizer,
        (split, seed): (EvalSplit, u64),
        preparation: &mut Preparation<'_>,
    ) -> Result<(Dataset, Dataset)> {
        let held_out = HeldOut::choose((&self.stream, self.whole()), self.untrained, (split, seed), preparation)?;
        let mut side = |side| self.dataset(side, rules, tokenizer, preparation);
        Ok((side(Side::Kept(&held_out))?, side(Side::HeldOut(&held_out))?))
    }

    /// Where its documents are.
    ///
    /// # Panics
    /// If token files are among the data: [`check_bounds`] refuses those.
    fn whole(&self) -> &Bounds {
        self.bounds.as_ref().expect("documents with bounds")
    }

    /// The documents of `side`, packed by `rules`.
    fn dataset(&self, side: Side<'_>, rules: RowRules, tokenizer: &Tokenizer, preparation: &mut Preparation<'_>) -> Result<Dataset> {
        let (files, seq_length) = (&self.files, rules.seq_length);
        let (documents, untrained) = match side {
            Side::All => (self.documents, self.untrained),
            Side::Kept(held_out) => (self.documents - held_out.documents(), self.untrained - held_out.untrained),
            Side::HeldOut(held_out) => (held_out.documents(), held_out.untrained),
        };
        if rules.packing.is_cut() {
            let stream = if let Side::All = side { self.stream.clone() } else { side.stream(&self.stream, self.whole(), preparation)? };
            let tokens = stream.tokens();
            let cut = Dataset::new(stream, seq_length).ok_or_else(|| too_short(side, files, tokens, seq_length))?;
            let cut = Dataset { documents, untrained, ..cut };
            return if untrained == 0 { Ok(cut) } else { cut.without_untrained(files, preparation) };
        }
        let (stream, after) = (self.stream.clone(), (tokenizer.end_of_text(), untrained));
        let table = RowTable::new(&stream, self.whole(), side, rules, after, preparation)?;
        let table = table.ok_or_else(|| nothing_trained(files, seq_length))?;
        let tokens = match side {
            Side::All => stream.tokens(),
            Side::Kept(held_out) => stream.tokens() - held_out.tokens as usize,
            Side::HeldOut(held_out) => held_out.tokens as usize,
        };
        let (sequences, beside) = (table.rows(), table.beside());
        let (tokens, untrained) = (tokens - beside.words as usize, untrained - beside.words);
        let documents = documents - beside.documents;
        Ok(Dataset { stream, tokens, documents, seq_length, sequences, cut: Cut::Packed(table), untrained })
    }
}

/// Whole documents are to be had where documents have ends.
fn check_bounds(files: &[PathBuf], packing: Packing, split: Option<EvalSplit>) -> Result<()> {
    let has_none = |path: &&PathBuf| kind(path) == Some(SourceKind::Tokens);
    files.iter().find(has_none).map_or(Ok(()), |path| {
        let file = path.display();
        let (flag, remedy) = match split {
            Some(split) => (format!("--eval-split {split}"), "name evaluation files with --eval-data, or use a .jsonl with input_ids"),
            None => (format!("--packing {packing}"), "use --packing wrapped, or a .jsonl with input_ids"),
        };
        Err(Error::usage(format!("{flag}: {file} does not mark where documents end; {remedy}")))
    })
}

pub(super) fn check_vocabulary(vocab_size: usize, tokenizer: &Tokenizer) -> Result<()> {
    if vocab_size > VOCAB_MAX {
        return Err(Error::Unsupported(format!("a vocabulary of {vocab_size} ids: at most {VOCAB_MAX} are possible")));
    }
    let outside = |id: &u32| *id as usize >= vocab_size;
    if let Some(id) = tokenizer.end_of_text().filter(outside) {
        let cause = format!("end-of-text token {id} is outside the model's vocabulary of {vocab_size}; choose another with --eos-token");
        return Err(Error::Unsupported(cause));
    }
    match tokenizer.begin_of_text().iter().copied().find(outside) {
        Some(id) => {
            Err(Error::Unsupported(format!("begin-of-text token {id} is outside the model's vocabulary of {vocab_size}; use --add-bos no")))
        }
        None => Ok(()),
    }
}

/// All `files`, which `paths` name, in their order, and where documents are if somebody `wants_bounds` and no token file is among them.
/// Text is one run of documents, wherever token files stand between them.
fn open_stream(
    paths: &[PathBuf],
    files: Vec<PathBuf>,
    tokenizer: &Tokenizer,
    vocab_size: usize,
    wants_bounds: bool,
    preparation: &mut Preparation<'_>,
) -> Result<Opened> {
    let is_text = |path: &&Path| kind(path) != Some(SourceKind::Tokens);
    let texts: Vec<&Path> = files.iter().map(PathBuf::as_path).filter(is_text).collect();
    let mut checked = CheckedFiles::load(preparation.output_dir.as_deref());
    let AllText { tokens: text, source_ends, ends, documents, untrained, skipped, kept } = if texts.is_empty() && !files.is_empty() {
        AllText::default()
    } else {
        open_text(&texts, tokenizer, vocab_size, &mut checked, preparation)?
    };
    let mut stream = TokenStream::default();
    if files.is_empty() {
        stream.push(text.clone(), 0..text.len());
    }
    let (mut begin, mut file_ends) = (0, source_ends.iter());
    for path in &files {
        if is_text(&path.as_path()) {
            let end = file_ends.next().map_or(begin, |end| *end as usize);
            stream.push(text.clone(), begin..end);
            begin = end;
        } else {
            let tokens = Tokens::File(TokenFile::open(path, (vocab_size, tokenizer.media_tokens()), &mut checked, preparation)?);
            stream.push_all(tokens);
        }
    }
    checked.save()?;
    let (tokens, has_separator) = (stream.tokens() as u64, tokenizer.end_of_text().is_some());
    let bounds = match wants_bounds && texts.len() == files.len() {
        false => None,
        true => {
            Some(Bounds { ends, source_ends, holds_records: hold_records(paths, &texts, tokenizer, preparation)?, has_separator, tokens })
        }
    };
    if preparation.output_dir.is_some() && !files.is_empty() {
        let holds_records = bounds.as_ref().map_or(&[][..], |bounds| &bounds.holds_records);
        preparation.known.add(paths, &files, holds_records, kept)?;
    }
    Ok(Opened { stream, bounds, documents, untrained, skipped, files })
}

/// For each of `texts`, all that `paths` name, whether it holds records.
fn hold_records(paths: &[PathBuf], texts: &[&Path], tokenizer: &Tokenizer, preparation: &Preparation<'_>) -> Result<Vec<bool>> {
    let known = preparation.known.holds_records(paths, texts.len());
    known.map_or_else(|| text_files::hold_records(texts, tokenizer.rules()), |known| Ok(known.into()))
}

struct AllText {
    tokens: Arc<Tokens>,
    /// Tokens up to the end of each file.
    source_ends: Vec<u64>,
    /// Tokens up to the end of each document.
    ends: DocumentEnds,
    documents: u64,
    untrained: u64,
    /// Records without a trained token.
    skipped: u64,
    /// Where they are kept, if they are.
    kept: Option<KeptText>,
}

impl Default for AllText {
    /// No text.
    fn default() -> Self {
        let (tokens, ends) = (Arc::new(Tokens::Memory(Vec::new())), DocumentEnds::Memory(Vec::new()));
        Self { tokens, source_ends: Vec::new(), ends, documents: 0, untrained: 0, skipped: 0, kept: None }
    }
}

/// The tokens of `texts`, in memory if they are small. Those are tokenized at every start where there is no run that keeps them.
fn open_text(
    texts: &[&Path],
    tokenizer: &Tokenizer,
    vocab_size: usize,
    checked: &mut CheckedFiles,
    preparation: &mut Preparation<'_>,
) -> Result<AllText> {
    let is_small = text_files::bytes_of(texts, &preparation.known) <= preparation.in_memory_bytes_max;
    let is_kept = preparation.output_dir.is_some() && !texts.is_empty() || preparation.known.stand_in(texts).is_some();
    if is_small && !is_kept {
        let (mut totals, _) = text_files::tokenize(texts, tokenizer, vocab_size, DocumentsInMemory::default(), preparation)?;
        totals.sink.tokens.shrink_to_fit();
        let DocumentTotals { sink: DocumentsInMemory { tokens, ends }, source_ends, documents, untrained, skipped, .. } = totals;
        let (tokens, ends) = (Arc::new(Tokens::Memory(tokens)), DocumentEnds::Memory(ends));
        return Ok(AllText { tokens, source_ends, ends, documents, untrained, skipped, kept: None });
    }
    let Prepared { kept, tokens, ends, source_ends, documents, untrained, skipped, .. } =
        cache::find_or_prepare(texts, tokenizer, vocab_size, checked, preparation)?;
    let tokens = if is_small { Tokens::Memory(read_all(&tokens)?) } else { Tokens::File(TokenFile::trusted(tokens, vocab_size)) };
    let (tokens, ends) = (Arc::new(tokens), DocumentEnds::File(ends));
    Ok(AllText { tokens, source_ends, ends, documents, untrained, skipped, kept: Some(kept) })
}

fn read_all(file: &InFile) -> Result<Vec<u32>> {
    let mut ids = vec![0; file.bytes() as usize / size_of::<u32>()];
    file.read_at(0, bytemuck::cast_slice_mut(&mut ids))?;
    Ok(ids)
}

fn nothing_trained(files: &[PathBuf], seq_length: usize) -> Error {
    let cause = format!("no document has a trained token in a row of {seq_length}; a larger --seq-length holds more of each");
    match files {
        [] => Error::usage(format!("the built-in text: {cause}")),
        [file, ..] => Error::format(file, cause),
    }
}

fn too_short(side: Side<'_>, files: &[PathBuf], tokens: usize, seq_length: usize) -> Error {
    let need = format!("{tokens} tokens, less than one sequence of {seq_length} and the token after it");
    match files {
        _ if matches!(side, Side::HeldOut(_)) => Error::usage(format!("--eval-split: the documents held out have {need}; hold out more")),
        [] => Error::usage(format!("--seq-length {seq_length}: the built-in text has {need}")),
        [file] => Error::format(file, need),
        [file, others @ ..] => Error::format(file, format!("with {} more files {need}", others.len())),
    }
}

#[cfg(test)]
impl Dataset {
    /// The tokens of sequence `idx`.
    pub(super) fn read_tokens(&self, idx: usize) -> Vec<i32> {
        let mut memory = vec![0; crate::data::rows::batch::arrays(true) * self.seq_length];
        let mut batch = crate::data::rows::batch::Batch::new(&mut memory, self.seq_length, true);
        batch.rows().try_for_each(|row| self.read_sequence(idx, row)).unwrap();
        batch.tokens.to_vec()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::data::encode::tokenizer_handle::tests::{WORDS, load_or_bytes, model_dir};
    use crate::data::read::demo::DEMO_TEXT;
    use crate::data::tokenizer::AddBos;
    use crate::signals::StopFlag;
    use proptest::prelude::*;

    #[test]
    fn inputs_are_ids_and_targets_keep_their_weights_in_sequences_and_in_rows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        std::fs::write(&path, "{\"input_ids\": [1, 2, 3, 4, 5], \"weights\": [1, 0.25, 0, 1, 0.5]}").unwrap();
        let quarter_of_2 = 2 | (4096 - 1024) << 19;
        let half_of_5 = 5 | 2048 << 19;
        for packing in [Packing::Wrapped, Packing::Off] {
            let rules = RowRules { packing, ..RowRules::wrapped(4) };
            let mut preparation = Preparation::default();
            let dataset = Dataset::open(std::slice::from_ref(&path), &Tokenizer::bytes(), 256, rules, &mut preparation).unwrap();
            let (mut inputs, mut targets) = ([0; 4], [0; 4]);
            let row = BatchRow { tokens: &mut inputs, targets: &mut targets, positions: &mut [0; 4], documents: None, list: None };
            dataset.read_sequence(0, row).unwrap();
            let last = if packing == Packing::Off { -1 } else { half_of_5 };
            assert_eq!((inputs, targets), ([1, 2, 3, 4], [quarter_of_2, -1, 4, last]), "{packing}");
        }
    }

    /// Tokens 0, 1, 2, ... in sequences of `seq_length`.
    pub(crate) fn counting(tokens: usize, seq_length: usize) -> Option<Dataset> {
        let mut stream = TokenStream::default();
        stream.push_all(Tokens::Memory((0..tokens as u32).collect()));
        Dataset::new(stream, seq_length)
    }

    #[test]
    fn untrained_tokens_have_no_target_and_sequences_of_them_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        let line = "{\"input_ids\": [1, 2, 3, 4, 5, 6, 7], \"labels\": [1, 2, -100, -100, -100, -100, 7]}";
        std::fs::write(&path, line).unwrap();
        let dataset = Dataset::open(&[path], &Tokenizer::bytes(), 256, RowRules::wrapped(2), &mut Preparation::default()).unwrap();
        assert_eq!((dataset.sequences(), dataset.untrained()), (2, 4));
        let (mut inputs, mut targets) = ([0; 2], [0; 2]);
        let mut read = |idx| {
            let (positions, documents) = (&mut [0; 2], None);
            let row = BatchRow { tokens: &mut inputs, targets: &mut targets, positions, documents, list: None };
            dataset.read_sequence(idx, row).unwrap();
            (inputs, targets)
        };
        assert_eq!([read(0), read(1)], [([1, 2], [2, -1]), ([5, 6], [-1, 7])]);
    }

    #[test]
    fn the_shipped_text_is_read_when_no_path_is_given() {
        let dataset = Dataset::open(&[], &Tokenizer::bytes(), 256, RowRules::wrapped(256), &mut Preparation::default()).unwrap();
        assert_eq!(dataset.tokens(), DEMO_TEXT.len());
        let (mut inputs, mut targets) = (vec![0; 256], vec![0; 256]);
        dataset.read_cut(0, &mut inputs, &mut targets).unwrap();
        assert!(inputs.iter().zip(DEMO_TEXT.bytes()).all(|(&token, byte)| token == i32::from(byte)));
        assert!(targets.iter().zip(DEMO_TEXT.bytes().skip(1)).all(|(&token, byte)| token == i32::from(byte)));
    }

    #[test]
    fn too_little_data_is_refused_with_the_file() {
        let dir = crate::data::encode::tokenizer_handle::tests::model_dir(&[("a.txt", "abcd"), ("b.txt", "ef")]);
        let open = |paths: &[PathBuf], seq_length| {
            Dataset::open(paths, &Tokenizer::bytes(), 256, RowRules::wrapped(seq_length), &mut Preparation::default())
        };
        let a = dir.path().join("a.txt");
        assert_eq!(open(std::slice::from_ref(&a), 3).unwrap().sequences(), 1);
        let message = open(&[a], 4).err().unwrap().to_string();
        assert!(message.contains("a.txt: 4 tokens, less than one sequence of 4"), "{message}");
        let message = open(&[dir.path().into()], 6).err().unwrap().to_string();
        assert!(message.contains("a.txt: with 1 more files 6 tokens"), "{message}");
        assert_eq!(open(&[], usize::MAX).err().unwrap().exit_code(), 2);
        let outside =
            Dataset::open(&[], &Tokenizer::bytes(), 100, RowRules::wrapped(8), &mut Preparation::default()).err().unwrap().to_string();
        assert!(outside.contains("the built-in text: token ") && outside.contains("vocabulary of 100"), "{outside}");
    }

    #[test]
    fn a_vocabulary_that_cannot_be_is_refused() {
        let ending = |id: &str| Tokenizer::bytes_with(Some(id), AddBos::No, Arc::default()).unwrap();
        assert!(check_vocabulary(VOCAB_MAX + 1, &Tokenizer::bytes()).is_err() && check_vocabulary(10, &ending("10")).is_err());
        assert!(check_vocabulary(VOCAB_MAX, &ending("9")).is_ok());
    }

    #[test]
    fn text_in_memory_and_prepared_text_are_one_stream_with_token_files_between() {
        let dir = model_dir(&[
            ("tokenizer.json", WORDS),
            ("a.txt", "a b"),
            ("c.jsonl", "{\"text\": \"b\"}\n{\"text\": \"a a\"}"),
            ("e.txt", "b b"),
        ]);
        let path = |name: &str| dir.path().join(name);
        for (name, ids) in [("b.bin", [3u16, 4]), ("d.bin", [5, 6])] {
            std::fs::write(path(name), bytemuck::cast_slice::<u16, u8>(&ids)).unwrap();
        }
        let tokenizer = load_or_bytes(dir.path()).unwrap();
        let names = ["a.txt", "b.bin", "c.jsonl", "d.bin", "e.txt"].map(path);
        let read = |in_memory_bytes_max, output_dir| {
            let mut preparation = Preparation::new(&StopFlag::default(), Some(path("cache")), output_dir, |_| ());
            preparation.in_memory_bytes_max = in_memory_bytes_max;
            let Opened { stream, documents, .. } = open_stream(&names, names.to_vec(), &tokenizer, 8, false, &mut preparation).unwrap();
            assert_eq!(documents, 4);
            let mut all = vec![-1; stream.tokens()];
            stream.read(0, &mut all).unwrap();
            all
        };
        let all = [0, 1, 3, 4, 7, 1, 7, 0, 0, 5, 6, 7, 1, 1];
        let run = || Some(dir.path().into());
        assert_eq!((read(100, None), path("cache").exists(), path(".superoffload/tokens").exists()), (all.to_vec(), false, false));
        assert_eq!((read(100, run()), path("cache").exists(), path(".superoffload/tokens").exists()), (all.to_vec(), false, true));
        assert_eq!((read(0, run()), path("cache").exists()), (all.to_vec(), true));
        assert_eq!((read(100, run()), read(0, run())), (all.to_vec(), all.to_vec()), "from the folders");
    }

    proptest! {
        #[test]
        fn every_token_but_the_tail_is_an_input_once_and_its_successor_the_target(tokens in 0..500usize, seq_length in 1..40usize) {
            let Some(dataset) = counting(tokens, seq_length) else {
                prop_assert!(tokens < seq_length + 1);
                return Ok(());
            };
            let (mut inputs, mut targets) = (vec![0; seq_length], vec![0; seq_length]);
            let mut next = 0;
            for idx in 0..dataset.sequences() {
                dataset.read_cut(idx, &mut inputs, &mut targets).unwrap();
                for (&input, &target) in inputs.iter().zip(&targets) {
                    prop_assert_eq!((input, target), (next, next + 1));
                    next += 1;
                }
            }
            prop_assert!(tokens - (next as usize + 1) < seq_length);
        }
    }
}
