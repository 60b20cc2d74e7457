//! Documents to ids on all CPUs, in bounded memory.
//!
//! Documents are collected into batches; threads encode batches, and the ids go on in the order of the documents. So neither threads nor
//! batches change an id.
//!
//! A long document is encoded in pieces. Each piece is read with some text before and after it, so that neighbours overlap, and two
//! neighbours are joined where both have the same tokens, at the same bytes, several on each side ([`super::pieces`]). From there on a
//! tokenizer has nothing left to decide by what came before, which is assumed of every normalizer, pre-tokenizer and model that is in use:
//! all of them look a bounded way back and ahead. Where neighbours do not agree (a run of spaces longer than the overlap, say) they are
//! encoded again as one piece. The byte tokenizer needs none of this.

use super::documents::{DocumentPosition, DocumentTotals, Documents, Sink};
use super::pieces::{EncodeJob, Encoded, Joiner, PartTokens, PieceSizes};
use super::pipeline::{self, WorkQueue, threads};
use super::text_work::{Done, TextWork};
use super::tokenizer_handle::Tokenizer;
use crate::data::chat::record::{Content, DataFormat, RecordRules};
use crate::data::stopped::interrupted;
use crate::data::tokenizer::floor_boundary;
use crate::error::{Error, Result};
use crate::signals::StopFlag;

/// Cost of a job in addition to its text, which bounds a batch of empty documents.
const JOB_BYTES: usize = 256;

const SIZES: PieceSizes = PieceSizes { piece: 64 << 10, context: 2 << 10, merged_max: 1 << 20 };

/// Unit of work of an encoding thread.
enum EncodeWork {
    Piece(EncodeJob),
    Record { place: DocumentPosition, format: DataFormat, line: String },
}

type EncodeBatch = Vec<EncodeWork>;

struct ReadProgress {
    place: DocumentPosition,
    pending: String,
    /// Where `pending` begins in the document.
    start: u64,
    /// Where the next piece begins.
    cut: u64,
    is_first: bool,
}

/// Takes text, and gives batches of it to threads.
pub(in crate::data) struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    stop: &'a StopFlag,
    sizes: PieceSizes,
    queue: WorkQueue<EncodeBatch, Result<Vec<Encoded>>>,
    batch: EncodeBatch,
    batch_bytes: usize,
    reading: Option<ReadProgress>,
}

/// The ids of all that `read` gives to an encoder, in `documents`: on all CPUs, until `stop` is set.
///
/// # Errors
/// The tokenizer's, the sink's, those of `read`; `Interrupted`.
pub(in crate::data) fn encode<S: Sink + Send>(
    tokenizer: &Tokenizer,
    documents: Documents<S>,
    stop: &StopFlag,
    read: impl FnOnce(&mut Encoder<'_>) -> Result<()>,
) -> Result<DocumentTotals<S>> {
    // Bytes are ids: threads would only wait for one another.
    let sizes = if tokenizer.is_bytes() { PieceSizes { context: 0, ..SIZES } } else { SIZES };
    let threads = if tokenizer.is_here() { 1 } else { threads() };
    encode_on(threads, sizes, tokenizer, documents, stop, read)
}

fn encode_on<S: Sink + Send>(
    threads: usize,
    sizes: PieceSizes,
    tokenizer: &Tokenizer,
    documents: Documents<S>,
    stop: &StopFlag,
    read: impl FnOnce(&mut Encoder<'_>) -> Result<()>,
) -> Result<DocumentTotals<S>> {
    let work = |batch: EncodeBatch| encode_batch(batch, tokenizer, stop);
    let take = |batches: &mut dyn Iterator<Item = Result<Vec<Encoded>>>| {
        let mut joiner = Joiner::new(tokenizer, documents, sizes);
        for batch in batches {
            batch?.into_iter().try_for_each(|encoded| joiner.absorb(encoded))?;
        }
        joiner.finish()
    };
    pipeline::run(threads, work, take, |queue| {
        let mut encoder = Encoder { tokenizer, stop, sizes, queue, batch: Vec::new(), batch_bytes: 0, reading: None };
        read(&mut encoder)?;
        encoder.flush()
    })
}

impl<'a> Encoder<'a> {
    /// How records are read.
    pub(in crate::data) fn rules(&self) -> &'a RecordRules {
        self.tokenizer.rules()
    }

    /// Whether somebody asked to stop.
    pub(in crate::data) fn stop(&self) -> &'a StopFlag {
        self.stop
    }

    /// A document begins; the one before has ended.
    pub(in crate::data) fn begin(&mut self, place: DocumentPosition) {
        self.reading = Some(ReadProgress { place, pending: String::new(), start: 0, cut: 0, is_first: true });
    }

    /// The next text of the document.
    ///
    /// # Errors
    /// When the consumer of encoded text has stopped.
    pub(in crate::data) fn push(&mut self, mut text: &str) -> Result<()> {
        while !text.is_empty() {
            let (piece, rest) = text.split_at(floor_boundary(text, self.sizes.piece));
            text = rest;
            let Some(reading) = &mut self.reading else { return Ok(()) };
            reading.pending.push_str(piece);
            while let Some(job) = self.reading.as_mut().and_then(|reading| reading.next_piece(self.sizes)) {
                self.add(EncodeWork::Piece(job))?;
            }
        }
        Ok(())
    }

    /// The document ends.
    pub(in crate::data) fn end(&mut self) -> Result<()> {
        let Some(ReadProgress { place, pending: text, start, cut, is_first }) = self.reading.take() else { return Ok(()) };
        self.add(EncodeWork::Piece(EncodeJob { place, text, start, cut, is_first, is_last: true }))
    }

    /// A record of a file of `format`.
    ///
    /// # Errors
    /// `Format` for a long record that cannot be read; errors of [`Self::push`].
    pub(in crate::data) fn record(&mut self, place: DocumentPosition, format: DataFormat, line: &str) -> Result<()> {
        if format != DataFormat::Text || line.len() <= self.sizes.piece {
            return self.add(EncodeWork::Record { place, format, line: line.into() });
        }
        if let Content::Text(text) = self.rules().read(format, line).map_err(|cause| place.error(cause))? {
            self.begin(place);
            self.push(&text)?;
        }
        self.end()
    }

    fn flush(&mut self) -> Result<()> {
        self.batch_bytes = 0;
        self.queue.give(std::mem::take(&mut self.batch))
    }

    fn add(&mut self, work: EncodeWork) -> Result<()> {
        self.batch_bytes += work.bytes() + JOB_BYTES;
        self.batch.push(work);
        if self.batch_bytes >= self.sizes.piece { self.flush() } else { Ok(()) }
    }
}

fn encode_batch(batch: EncodeBatch, tokenizer: &Tokenizer, stop: &StopFlag) -> Result<Vec<Encoded>> {
    let works: Vec<TextWork<'_>> = batch.iter().map(|work| work.text_work(tokenizer.is_bytes())).collect();
    let done = tokenizer.run(&works, stop, |item, cause| batch[item].place().error(cause));
    // Work that ends early has no fault.
    if stop.is_set() {
        return Err(interrupted());
    }
    batch.into_iter().zip(done?).map(|(work, done)| work.done(done)).collect()
}

impl EncodeWork {
    /// Text in it.
    fn bytes(&self) -> usize {
        match self {
            Self::Piece(job) => job.text.len(),
            Self::Record { line, .. } => line.len(),
        }
    }

    fn place(&self) -> &DocumentPosition {
        match self {
            Self::Piece(EncodeJob { place, .. }) | Self::Record { place, .. } => place,
        }
    }

    /// The request. Bytes have their places without being asked.
    fn text_work(&self, is_bytes: bool) -> TextWork<'_> {
        match self {
            Self::Piece(job) if is_bytes || job.is_whole() => TextWork::Text(&job.text),
            Self::Piece(job) => TextWork::Part(&job.text),
            Self::Record { format, line, .. } => TextWork::Record(*format, line),
        }
    }

    fn done(self, done: Done) -> Result<Encoded> {
        match (self, done) {
            (Self::Piece(job), Done::Ids(ids)) if job.is_whole() => Ok(Encoded::Document(job.place, ids)),
            (Self::Piece(job), Done::Ids(ids)) => Ok(Encoded::Part(job, PartTokens::Ids(ids))),
            (Self::Piece(job), Done::Placed(tokens)) => Ok(Encoded::Part(job, PartTokens::Placed(tokens))),
            (Self::Record { place, .. }, Done::Ids(ids)) => Ok(Encoded::Document(place, ids)),
            (Self::Record { place, .. }, Done::Samples(samples)) => Ok(Encoded::Samples(place, samples)),
            (work, done) => Err(Error::resource("tokenize", work.place().error(format_args!("an answer to another question: {done:?}")))),
        }
    }
}

impl EncodeJob {
    /// Whether it is a whole document.
    fn is_whole(&self) -> bool {
        self.is_first && self.is_last
    }
}

impl ReadProgress {
    /// The next piece, once all its text is there. Cuts depend on the document alone, not on how it was pushed.
    fn next_piece(&mut self, sizes: PieceSizes) -> Option<EncodeJob> {
        let target = (self.cut - self.start) as usize + sizes.piece;
        if self.pending.len() < target + sizes.context {
            return None;
        }
        let cut = floor_boundary(&self.pending, target);
        let end = floor_boundary(&self.pending, cut + sizes.context);
        let keep = floor_boundary(&self.pending, cut - sizes.context);
        let (place, text) = (self.place.clone(), self.pending[..end].to_string());
        let job = EncodeJob { place, text, start: self.start, cut: self.cut, is_first: self.is_first, is_last: false };
        self.cut = self.start + cut as u64;
        self.pending.drain(..keep);
        self.start += keep as u64;
        self.is_first = false;
        Some(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::tokenizer_handle::tests::{load_or_bytes, model_dir};
    use crate::sweep::sweep;
    use proptest::prelude::*;
    use std::path::Path;

    /// Byte-level BPE with merges of letters and of spaces, as GPT-2's.
    const BYTE_LEVEL: &str = r#"{"version": "1.0", "added_tokens": [{"id": 20, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true}], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "Ċ": 3, "aa": 4, "ab": 5, "aaaa": 6, "Ġa": 7, "ĠĠ": 8, "ĠĠĠĠ": 9, "Ã": 10, "©": 11, "<s>": 20},
        "merges": [["a", "a"], ["a", "b"], ["aa", "aa"], ["Ġ", "a"], ["Ġ", "Ġ"], ["ĠĠ", "ĠĠ"]]}}"#;

    /// BPE over the whole text as one word, with a mark at its begin, as Llama-2's.
    const WHOLE: &str = r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": null,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": {"<unk>": 0, "a": 1, "b": 2, "▁": 3, "▁a": 4, "ab": 5, "▁▁": 6, "▁ab": 7, "▁▁▁▁": 8, "aa": 9},
        "merges": [["▁", "▁"], ["▁", "a"], ["a", "b"], ["▁▁", "▁▁"], ["▁", "ab"], ["a", "a"]]}}"#;

    /// Unigram with SentencePiece's treatment of spaces.
    const UNIGRAM: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false,
        "vocab": [["<unk>", 0.0], ["▁", -2.0], ["a", -3.0], ["b", -3.5], ["ab", -4.0], ["▁a", -3.2], ["aba", -5.0], ["▁ab", -4.1], ["é", -4.0], ["\n", -5.0]]}}"#;

    fn tokenizer(json: &str) -> Tokenizer {
        load_or_bytes(model_dir(&[("tokenizer.json", json)]).path()).unwrap()
    }

    fn place() -> DocumentPosition {
        DocumentPosition { path: Path::new("a.txt").into(), source: 0, line: None }
    }

    /// The ids of `texts`, each pushed in parts of `step` characters.
    fn encode(tokenizer: &Tokenizer, texts: &[&str], sizes: PieceSizes, threads: usize, step: usize) -> Result<Vec<u32>> {
        let documents = Documents::new(Vec::new(), 1 << 20, Some(999), &[998]);
        let read = |encoder: &mut Encoder<'_>| {
            texts.iter().try_for_each(|text| {
                encoder.begin(place());
                let chars: Vec<char> = text.chars().collect();
                chars.chunks(step).try_for_each(|part| encoder.push(&part.iter().collect::<String>()))?;
                encoder.end()
            })
        };
        Ok(encode_on(threads, sizes, tokenizer, documents, &StopFlag::default(), read)?.sink)
    }

    fn whole(tokenizer: &Tokenizer, texts: &[&str]) -> Vec<u32> {
        let ids: Vec<_> = texts.iter().map(|text| [&[998], &tokenizer.encode(text).unwrap()[..]].concat()).collect();
        ids.join(&999)
    }

    const SMALL: PieceSizes = PieceSizes { piece: 100, context: 60, merged_max: 4000 };

    #[test]
    fn a_run_longer_than_the_overlap_is_encoded_as_one_piece_or_refused() {
        let text = |spaces: usize| "ab a b\n".repeat(40) + &" ".repeat(spaces) + &"a ab b\n".repeat(40);
        for json in [BYTE_LEVEL, WHOLE, UNIGRAM] {
            let tokenizer = tokenizer(json);
            for spaces in [0, 3, 99, 401, 1003] {
                let text = text(spaces);
                assert_eq!(encode(&tokenizer, &[&text], SMALL, 2, 50).unwrap(), whole(&tokenizer, &[&text]), "{spaces} spaces");
            }
        }
        let message = encode(&tokenizer(WHOLE), &[&text(5001)], SMALL, 2, 50).unwrap_err().to_string();
        assert!(message.starts_with("a.txt: the tokens at byte ") && message.contains("depend on more than 3.9 KiB"), "{message}");
    }

    #[test]
    fn a_set_flag_ends_it() {
        let (bytes, stop) = (Tokenizer::bytes(), StopFlag::default());
        stop.request();
        let ended = super::encode(&bytes, Documents::new(Vec::new(), 256, None, &[]), &stop, |encoder| {
            encoder.begin(place());
            encoder.push("abc")?;
            encoder.end()
        });
        assert_eq!(ended.err().unwrap().exit_code(), 75);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(sweep(32, 96)))]
        #[test]
        fn pieces_threads_and_blocks_change_no_id(
            texts in prop::collection::vec("([ab]{1,6}| {1,9}|é|\n|<s>|𝄞){0,300}", 1..4), threads in 1..5usize, step in 1..200usize,
        ) {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            for tokenizer in [tokenizer(BYTE_LEVEL), tokenizer(WHOLE), tokenizer(UNIGRAM), tokenizer(crate::data::encode::tokenizer_handle::tests::WORDS), Tokenizer::bytes()] {
                let sizes = if tokenizer.is_bytes() { PieceSizes { context: 0, ..SMALL } } else { SMALL };
                prop_assert_eq!(encode(&tokenizer, &texts, sizes, threads, step).unwrap(), whole(&tokenizer, &texts));
            }
        }
    }
}
