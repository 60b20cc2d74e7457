//! Encoded documents in their order: the pieces of a long one are joined where both neighbours have the same tokens.

use super::diagnostics::{RecordRemarks, RecordSamples};
use super::documents::{DocumentPosition, DocumentTotals, Documents, Sink};
use super::tokenizer_handle::Tokenizer;
use crate::data::tokenizer::Token;
use crate::error::Result;
use crate::units::Bytes;

/// Tokens on each side of a seam that both pieces have.
const AGREEING: usize = 8;

/// How documents are cut, in bytes. A tokenizer may take some hundred bytes for each byte that it encodes.
#[derive(Clone, Copy)]
pub(in crate::data) struct PieceSizes {
    /// Distance of two cuts, and what a batch has.
    pub(in crate::data) piece: usize,
    /// Text before and after a piece.
    pub(in crate::data) context: usize,
    /// Longest piece where neighbours do not agree.
    pub(in crate::data) merged_max: usize,
}

/// Text to be encoded by itself: a document or a piece of one.
pub(in crate::data) struct EncodeJob {
    pub(in crate::data) place: DocumentPosition,
    pub(in crate::data) text: String,
    /// Where the text begins in the document.
    pub(in crate::data) start: u64,
    /// Where the piece begins, after its context.
    pub(in crate::data) cut: u64,
    pub(in crate::data) is_first: bool,
    pub(in crate::data) is_last: bool,
}

/// Result of an encoding job.
pub(in crate::data) enum Encoded {
    /// A text, whole.
    Document(DocumentPosition, Vec<u32>),
    /// A part of a text.
    Part(EncodeJob, PartTokens),
    /// The samples of a record, whole.
    Samples(DocumentPosition, RecordSamples),
}

pub(in crate::data) enum PartTokens {
    /// Ids that stand as they are.
    Ids(Vec<u32>),
    /// Ids to be joined to their neighbours'.
    Placed(Vec<Token>),
}

/// A piece with an end that is not joined yet.
struct Piece {
    text: String,
    start: u64,
    tokens: Vec<Token>,
    /// Tokens before this one belong to the piece before, or were handed on.
    from: usize,
}

/// Takes encoded pieces, hands ids on.
pub(in crate::data) struct Joiner<'a, S> {
    tokenizer: &'a Tokenizer,
    documents: Documents<S>,
    sizes: PieceSizes,
    open: Option<Piece>,
}

impl<'a, S: Sink> Joiner<'a, S> {
    pub(in crate::data) fn new(tokenizer: &'a Tokenizer, documents: Documents<S>, sizes: PieceSizes) -> Self {
        Self { tokenizer, documents, sizes, open: None }
    }

    /// All that was encoded has come.
    ///
    /// # Errors
    /// The sink's.
    pub(in crate::data) fn finish(self) -> Result<DocumentTotals<S>> {
        self.documents.finish()
    }

    /// Takes the next piece.
    ///
    /// # Errors
    /// The sink's, those of the vocabulary, and for pieces that do not meet.
    pub(in crate::data) fn absorb(&mut self, encoded: Encoded) -> Result<()> {
        match encoded {
            Encoded::Document(place, ids) => {
                self.documents.begin()?;
                self.documents.append(&ids, &place)?;
                self.documents.end(&place)
            }
            Encoded::Samples(place, RecordSamples { samples, remarks }) if samples.is_empty() => {
                self.documents.remark(&RecordRemarks { sentences: remarks.sentences, ..RecordRemarks::default() }, &place);
                self.documents.skip(place);
                Ok(())
            }
            Encoded::Samples(place, RecordSamples { samples, remarks }) => {
                self.documents.record(&samples, &place)?;
                self.documents.remark(&remarks, &place);
                Ok(())
            }
            Encoded::Part(job, tokens) => self.absorb_part(job, tokens),
        }
    }

    fn absorb_part(&mut self, job: EncodeJob, tokens: PartTokens) -> Result<()> {
        let EncodeJob { place, text, start, cut, is_first, is_last } = job;
        if is_first {
            self.documents.begin()?;
        }
        match tokens {
            PartTokens::Ids(ids) => self.documents.append(&ids, &place)?,
            PartTokens::Placed(tokens) => self.join(Piece { text, start, tokens, from: 0 }, cut, &place)?,
        }
        if is_last {
            let last = self.open.take();
            last.iter().try_for_each(|piece| self.documents.append(&piece.ids(piece.tokens.len()), &place))?;
            self.documents.end(&place)?;
        }
        Ok(())
    }

    /// Hands on the ids before the seam of the open piece and `after`, which begins at `cut`; `after` is open then.
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
