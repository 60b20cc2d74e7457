//! Documents to ids on all CPUs, in bounded memory.
//!
//! Documents are collected into batches; threads encode the documents of a batch, each its own, and the ids go on in the order of the
//! documents. So neither threads nor batches change an id.
//!
//! A long document is encoded in pieces. Each piece is read with some text before and after it, so that neighbours overlap, and two
//! neighbours are joined where both have the same tokens, at the same bytes, several on each side. From there on a tokenizer
//! has nothing left to decide by what came before, which is assumed of every normalizer, pre-tokenizer and model that is in use: all of
//! them look a bounded way back and ahead. Where neighbours do not agree (a run of spaces longer than the overlap, say) they are encoded
//! again as one piece. The byte tokenizer needs none of this.

use super::chat::mask::ChatSample;
use super::chat::record::{Content, DataFormat, RecordRules};
use super::documents::{DocumentPosition, DocumentTotals, Documents, Sink, UNTRAINED};
use super::preparation::interrupted;
use super::scan::threads;
use super::shown::TextPiece;
use super::tokenizer::{Token, Tokenizer};
use crate::error::{Error, Result};
use crate::signals::StopFlag;
use crate::units::Bytes;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Tokens on each side of a seam that both pieces have.
const AGREEING: usize = 8;
/// What a job costs beside its text, so that a batch of empty documents ends, too.
const JOB_BYTES: usize = 256;
/// Jobs of full length in a batch, for each thread.
const JOBS_PER_THREAD: usize = 4;

/// How documents are cut, in bytes. A tokenizer takes some hundred bytes for each byte that it encodes.
#[derive(Clone, Copy)]
pub(super) struct PieceSizes {
    /// Distance of two cuts.
    piece: usize,
    /// Text before and after a piece.
    context: usize,
    /// Longest piece where neighbours do not agree.
    merged_max: usize,
}

const SIZES: PieceSizes = PieceSizes { piece: 64 << 10, context: 2 << 10, merged_max: 1 << 20 };

/// Text to be encoded by itself: a document or a piece of one.
struct EncodeJob {
    place: DocumentPosition,
    text: String,
    /// Where the text begins in the document.
    start: u64,
    /// Where the piece begins, after its context.
    cut: u64,
    is_first: bool,
    is_last: bool,
}

/// What is encoded by itself.
enum EncodeWork {
    Piece(EncodeJob),
    Record { place: DocumentPosition, format: DataFormat, line: String },
}

enum Encoded {
    /// Ids that stand as they are.
    Ids(Vec<u32>),
    /// Ids to be joined to their neighbours'.
    Tokens(Vec<Token>),
    /// The samples of a record, whole.
    Samples(Vec<Vec<u32>>),
}

struct Reading {
    place: DocumentPosition,
    pending: String,
    /// Where `pending` begins in the document.
    start: u64,
    /// Where the next piece begins.
    cut: u64,
    is_first: bool,
}

/// A piece whose end is not joined yet.
struct Piece {
    text: String,
    start: u64,
    tokens: Vec<Token>,
    /// Tokens before this one belong to the piece before, or were handed on.
    from: usize,
}

/// Takes text, hands ids on.
pub(super) struct Encoder<'a, S> {
    tokenizer: &'a Tokenizer,
    documents: Documents<S>,
    stop: StopFlag,
    sizes: PieceSizes,
    threads: usize,
    jobs: Vec<EncodeWork>,
    jobs_bytes: usize,
    reading: Option<Reading>,
    open: Option<Piece>,
}

impl<'a, S: Sink> Encoder<'a, S> {
    /// An encoder on all CPUs, until `stop` is set.
    pub(super) fn new(tokenizer: &'a Tokenizer, documents: Documents<S>, stop: &StopFlag) -> Self {
        let sizes = if tokenizer.is_bytes() { PieceSizes { context: 0, ..SIZES } } else { SIZES };
        // Bytes are ids: threads would only wait for one another.
        let threads = if tokenizer.is_bytes() { 1 } else { threads() };
        let stop = stop.clone();
        Self { tokenizer, documents, stop, sizes, threads, jobs: Vec::new(), jobs_bytes: 0, reading: None, open: None }
    }

    /// How records are read.
    pub(super) fn rules(&self) -> &'a RecordRules {
        self.tokenizer.rules()
    }

    /// A document begins; the one before has ended.
    pub(super) fn begin(&mut self, place: DocumentPosition) {
        self.reading = Some(Reading { place, pending: String::new(), start: 0, cut: 0, is_first: true });
    }

    /// The next text of the document.
    ///
    /// # Errors
    /// The tokenizer's, the sink's; `Interrupted`.
    pub(super) fn push(&mut self, mut text: &str) -> Result<()> {
        while !text.is_empty() {
            let (here, rest) = text.split_at(floor_boundary(text, self.sizes.piece));
            text = rest;
            let Some(reading) = &mut self.reading else { return Ok(()) };
            reading.pending.push_str(here);
            while let Some(job) = self.reading.as_mut().and_then(|reading| reading.next_piece(self.sizes)) {
                self.add(EncodeWork::Piece(job))?;
            }
        }
        Ok(())
    }

    /// The document ends.
    pub(super) fn end(&mut self) -> Result<()> {
        let Some(Reading { place, pending: text, start, cut, is_first }) = self.reading.take() else { return Ok(()) };
        self.add(EncodeWork::Piece(EncodeJob { place, text, start, cut, is_first, is_last: true }))
    }

    /// A record of a file of `format`, which is not text.
    ///
    /// # Errors
    /// The record's, the tokenizer's, the sink's; `Interrupted`.
    pub(super) fn record(&mut self, place: DocumentPosition, format: DataFormat, line: &str) -> Result<()> {
        self.add(EncodeWork::Record { place, format, line: line.into() })
    }

    /// Encodes what is left.
    pub(super) fn finish(mut self) -> Result<DocumentTotals<S>> {
        self.flush()?;
        Ok(self.documents.finish())
    }

    fn flush(&mut self) -> Result<()> {
        let jobs = std::mem::take(&mut self.jobs);
        self.jobs_bytes = 0;
        let encoded = self.encode_all(&jobs)?;
        jobs.into_iter().zip(encoded).try_for_each(|(job, encoded)| self.absorb(job, encoded?))
    }

    fn add(&mut self, job: EncodeWork) -> Result<()> {
        self.jobs_bytes += job.bytes() + JOB_BYTES;
        self.jobs.push(job);
        let is_full = self.jobs_bytes >= JOBS_PER_THREAD * self.threads * self.sizes.piece;
        if is_full { self.flush() } else { Ok(()) }
    }

    /// The jobs' results, in their order.
    fn encode_all(&self, jobs: &[EncodeWork]) -> Result<Vec<Result<Encoded>>> {
        let (tokenizer, stop, next) = (self.tokenizer, &self.stop, AtomicUsize::new(0));
        let work = || {
            let mut done = Vec::new();
            while !stop.is_set() {
                let idx = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(idx) else { break };
                done.push((idx, job.encode(tokenizer)));
            }
            done
        };
        let mut done = thread::scope(|scope| {
            let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).map_err(|e| Error::resource("start a thread that encodes", e));
            let others: Vec<_> = (1..self.threads.min(jobs.len())).map(spawn).collect::<Result<_>>()?;
            let mut done = work();
            others.into_iter().for_each(|other| done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))));
            Ok::<_, Error>(done)
        })?;
        if self.stop.is_set() {
            return Err(interrupted());
        }
        done.sort_unstable_by_key(|(idx, _)| *idx);
        Ok(done.into_iter().map(|(_, encoded)| encoded).collect())
    }

    fn absorb(&mut self, job: EncodeWork, encoded: Encoded) -> Result<()> {
        match job {
            EncodeWork::Piece(job) => self.absorb_piece(job, encoded),
            EncodeWork::Record { place, .. } => self.absorb_record(place, encoded),
        }
    }

    fn absorb_record(&mut self, place: DocumentPosition, encoded: Encoded) -> Result<()> {
        let Encoded::Samples(samples) = encoded else { return Ok(()) };
        if samples.is_empty() {
            self.documents.skip(place);
            return Ok(());
        }
        samples.iter().try_for_each(|sample| self.documents.record(sample, &place))
    }

    fn absorb_piece(&mut self, job: EncodeJob, encoded: Encoded) -> Result<()> {
        let EncodeJob { place, text, start, cut, is_first, is_last } = job;
        if is_first {
            self.documents.begin()?;
        }
        match encoded {
            Encoded::Ids(ids) => self.documents.append(&ids, &place)?,
            Encoded::Tokens(tokens) => self.join(Piece { text, start, tokens, from: 0 }, cut, &place)?,
            Encoded::Samples(_) => {}
        }
        if is_last {
            let last = self.open.take();
            last.iter().try_for_each(|piece| self.documents.append(&piece.ids(piece.tokens.len()), &place))?;
            self.documents.end(&place)?;
        }
        Ok(())
    }

    /// Hands on what comes before the seam of the open piece and `after`, which begins at `cut`; `after` is open then.
    fn join(&mut self, mut after: Piece, cut: u64, place: &DocumentPosition) -> Result<()> {
        let Some(before) = self.open.take() else {
            self.open = Some(after);
            return Ok(());
        };
        if let Some((end, from)) = seam(&before, &after, cut) {
            self.documents.append(&before.ids(end), place)?;
            after.from = from;
            self.open = Some(after);
        } else {
            self.open = Some(self.merge(before, &after, place)?);
        }
        Ok(())
    }

    /// Two pieces as one.
    fn merge(&self, before: Piece, after: &Piece, place: &DocumentPosition) -> Result<Piece> {
        let overlap = (before.start + before.text.len() as u64 - after.start) as usize;
        let text = [&before.text, &after.text[overlap..]].concat();
        let undecided = || {
            let (at, max) = (after.start, Bytes(self.sizes.merged_max as u64));
            place.error(format_args!(
                "the tokens at byte {at} of the document depend on more than {max} around them: make shorter documents"
            ))
        };
        if text.len() > self.sizes.merged_max {
            return Err(undecided());
        }
        let tokens = self.tokenizer.encode_part(&text).map_err(|e| place.error(e))?;
        let merged = Piece { text, start: before.start, tokens, from: 0 };
        if before.from == 0 {
            return Ok(merged);
        }
        let from = merged.token_at(before.position(before.from).1);
        if merged.tokens.get(from) == before.tokens.get(before.from) { Ok(Piece { from, ..merged }) } else { Err(undecided()) }
    }
}

impl EncodeWork {
    /// Text in it.
    fn bytes(&self) -> usize {
        match self {
            Self::Piece(job) => job.text.len(),
            Self::Record { line, .. } => line.len(),
        }
    }

    fn encode(&self, tokenizer: &Tokenizer) -> Result<Encoded> {
        match self {
            Self::Piece(job) => job.encode(tokenizer),
            Self::Record { place, format, line } => {
                let content = tokenizer.rules().read(*format, line).map_err(|cause| place.error(cause))?;
                let samples = samples(content, tokenizer).map_err(|e| place.error(e))?;
                Ok(Encoded::Samples(
                    samples.into_iter().filter(|sample| sample.iter().skip(1).any(|token| token & UNTRAINED == 0)).collect(),
                ))
            }
        }
    }
}

/// The tokens of a record's samples. The first token of a sample is nobody's target, whether it is trained or not.
fn samples(content: Content, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    let marked = |id: u32, is_trained: bool| if is_trained { id } else { id | UNTRAINED };
    let begin = tokenizer.begin_of_text().iter().map(|&id| marked(id, false));
    match content {
        Content::Rendered(samples) => samples.iter().map(|sample| masked(sample, tokenizer)).collect(),
        Content::Completed(sample) => Ok(vec![begin.chain(masked(&sample, tokenizer)?).chain(tokenizer.end_of_text()).collect()]),
        Content::Text(text) => Ok(vec![begin.chain(tokenizer.encode(&text)?).chain(tokenizer.end_of_text()).collect()]),
        Content::Ids(ids) => Ok(vec![ids.into_iter().map(|(id, is_trained)| marked(id, is_trained)).collect()]),
    }
}

fn masked(sample: &ChatSample, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let tokens = tokens_of(sample, tokenizer)?.into_iter();
    Ok(tokens.map(|(Token { id, .. }, is_trained)| if is_trained { id } else { id | UNTRAINED }).collect())
}

/// One encoding of the whole text; a token is trained if its first character is.
fn tokens_of(sample: &ChatSample, tokenizer: &Tokenizer) -> Result<Vec<(Token, bool)>> {
    let mut spans = sample.trained.iter().peekable();
    let is_trained = |token: Token| {
        let start = token.start as usize;
        while spans.next_if(|span| span.end <= start).is_some() {}
        (token, spans.peek().is_some_and(|span| span.contains(&start)))
    };
    Ok(tokenizer.encode_part(&sample.text)?.into_iter().map(is_trained).collect())
}

/// The samples of a record in text: for each the number of its tokens, and which text is trained.
///
/// # Errors
/// The tokenizer's.
pub(super) fn shown(content: Content, tokenizer: &Tokenizer) -> Result<Vec<(usize, Vec<TextPiece>)>> {
    let named = |id: u32, trained| TextPiece { text: tokenizer.name_of(id), trained };
    let around = |sample: &ChatSample| {
        let (tokens, pieces) = text_pieces(sample, tokenizer)?;
        let (begin, end) = (tokenizer.begin_of_text(), tokenizer.end_of_text());
        let all = begin.iter().map(|id| named(*id, false)).chain(pieces).chain(end.map(|id| named(id, true)));
        Ok((tokens + begin.len() + usize::from(end.is_some()), all.collect()))
    };
    match content {
        Content::Rendered(samples) => samples.iter().map(|sample| text_pieces(sample, tokenizer)).collect(),
        Content::Completed(sample) => Ok(vec![around(&sample)?]),
        Content::Text(text) => Ok(vec![around(&ChatSample { trained: std::iter::once(0..text.len()).collect(), text })?]),
        Content::Ids(ids) => Ok(vec![(ids.len(), ids.into_iter().map(|(id, is_trained)| named(id, is_trained)).collect())]),
    }
}

/// A sample's text, token by token; what no token stands for goes with the next one.
fn text_pieces(sample: &ChatSample, tokenizer: &Tokenizer) -> Result<(usize, Vec<TextPiece>)> {
    let (tokens, text, mut done) = (tokens_of(sample, tokenizer)?, &sample.text, 0);
    let mut pieces = Vec::with_capacity(tokens.len());
    for (Token { end, .. }, trained) in &tokens {
        let end = floor_boundary(text, *end as usize).max(done);
        pieces.push(TextPiece { text: text[done..end].into(), trained: *trained });
        done = end;
    }
    Ok((tokens.len(), pieces))
}

impl EncodeJob {
    fn encode(&self, tokenizer: &Tokenizer) -> Result<Encoded> {
        let is_whole = self.is_first && self.is_last;
        let encoded = if is_whole || tokenizer.is_bytes() {
            tokenizer.encode(&self.text).map(Encoded::Ids)
        } else {
            tokenizer.encode_part(&self.text).map(Encoded::Tokens)
        };
        encoded.map_err(|e| self.place.error(e))
    }
}

impl Reading {
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

impl Piece {
    /// Token `idx`, where it begins and ends in the document.
    fn position(&self, idx: usize) -> (u32, u64, u64) {
        let Token { id, start, end } = self.tokens[idx];
        (id, self.start + u64::from(start), self.start + u64::from(end))
    }

    /// The first token that begins at `offset` of the document or later.
    fn token_at(&self, offset: u64) -> usize {
        self.tokens.partition_point(|token| self.start + u64::from(token.start) < offset)
    }

    /// The ids from `from` to `end`.
    fn ids(&self, end: usize) -> Vec<u32> {
        self.tokens[self.from..end].iter().map(|token| token.id).collect()
    }
}

/// The first place from `cut` on where both pieces have the same tokens: the index of the token after it, in each.
fn seam(before: &Piece, after: &Piece, cut: u64) -> Option<(usize, usize)> {
    let first = before.token_at(cut).max(before.from + AGREEING);
    let last = before.tokens.len().saturating_sub(AGREEING);
    (first..=last).filter(|&i| i < before.tokens.len()).find_map(|i| {
        let (_, start, _) = before.position(i);
        let j = after.token_at(start);
        let both = j >= AGREEING && j + AGREEING <= after.tokens.len();
        let is_seam = both && before.position(i - 1).2 <= start;
        let agrees = || (0..2 * AGREEING).all(|k| before.position(i - AGREEING + k) == after.position(j - AGREEING + k));
        (is_seam && agrees()).then_some((i, j))
    })
}

/// The last character boundary of `text` up to `at`.
fn floor_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tokenizer::tests::{load_or_bytes, model_dir};
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
        let mut encoder = Encoder { sizes, threads, ..Encoder::new(tokenizer, documents, &StopFlag::default()) };
        for text in texts {
            encoder.begin(place());
            let chars: Vec<char> = text.chars().collect();
            chars.chunks(step).try_for_each(|part| encoder.push(&part.iter().collect::<String>()))?;
            encoder.end()?;
        }
        Ok(encoder.finish()?.sink)
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
        stop.set();
        let mut encoder = Encoder::new(&bytes, Documents::new(Vec::new(), 256, None, &[]), &stop);
        encoder.begin(place());
        encoder.push("abc").unwrap();
        encoder.end().unwrap();
        assert_eq!(encoder.finish().err().unwrap().exit_code(), 75);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(sweep(32, 96)))]
        #[test]
        fn pieces_threads_and_blocks_change_no_id(
            texts in prop::collection::vec("([ab]{1,6}| {1,9}|é|\n|<s>|𝄞){0,300}", 1..4), threads in 1..5usize, step in 1..200usize,
        ) {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            for tokenizer in [tokenizer(BYTE_LEVEL), tokenizer(WHOLE), tokenizer(UNIGRAM), tokenizer(crate::data::tokenizer::tests::WORDS), Tokenizer::bytes()] {
                let sizes = if tokenizer.is_bytes() { PieceSizes { context: 0, ..SMALL } } else { SMALL };
                prop_assert_eq!(encode(&tokenizer, &texts, sizes, threads, step).unwrap(), whole(&tokenizer, &texts));
            }
        }
    }
}
