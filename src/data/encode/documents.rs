//! Documents one after another, a separator between them, every id checked.
//!
//! A token is a word of its id and its weight ([`crate::data::loss_weight`]), so that a weight is wherever its token is.

use super::boundary_tokens::missing_begin;
use super::diagnostics::{RecordRemarks, Remarks};
use super::media_token::{MediaToken, find};
use crate::data::loss_weight::id_of;
use crate::data::number_words::is_number;
pub(in crate::data) use crate::data::read::position::{DocumentPosition, place_word};
use crate::error::Result;

/// Highest bit of the end of a document that is made of the same record as the document before it. Numbers of tokens are below it.
pub(in crate::data) const SAME_RECORD: u64 = 1 << 63;

/// Where tokens go.
pub(in crate::data) trait Sink {
    /// Takes the next tokens.
    fn append(&mut self, ids: &[u32]) -> Result<()>;
    /// A document has its end after so many tokens, counted from the first document on, with [`SAME_RECORD`] or without.
    fn end_document(&mut self, end: u64) -> Result<()>;
}

impl Sink for Vec<u32> {
    fn append(&mut self, ids: &[u32]) -> Result<()> {
        self.extend_from_slice(ids);
        Ok(())
    }

    fn end_document(&mut self, _: u64) -> Result<()> {
        Ok(())
    }
}

/// Documents in memory: their tokens, and for each the number of tokens up to its end, with [`SAME_RECORD`] or without.
#[derive(Default)]
pub(in crate::data) struct DocumentsInMemory {
    pub(in crate::data) tokens: Vec<u32>,
    pub(in crate::data) ends: Vec<u64>,
}

impl Sink for DocumentsInMemory {
    fn append(&mut self, ids: &[u32]) -> Result<()> {
        Sink::append(&mut self.tokens, ids)
    }

    fn end_document(&mut self, end: u64) -> Result<()> {
        self.ends.push(end);
        Ok(())
    }
}

/// Hands documents on to a sink. The separator goes before each but the first, and each begins with the ids `begin`. Text that begins or
/// ends with these already has them once.
pub(in crate::data) struct Documents<S> {
    sink: S,
    vocab_size: usize,
    media: Vec<MediaToken>,
    separator: Option<u32>,
    begin: Vec<u32>,
    tokens: u64,
    documents: u64,
    records: u64,
    tokens_of_document: u64,
    text: OpenText,
    largest: u32,
    source_ends: Vec<u64>,
    untrained: u64,
    skipped: u64,
    first_skipped: Option<DocumentPosition>,
    remarks: Remarks,
}

/// The state of a document around which tokens are put.
#[derive(Clone, Copy, PartialEq)]
enum OpenText {
    /// There is none: a record brings all its tokens.
    None,
    Empty,
    Begun,
    /// Its last token is a separator, which is held back: it belongs to the text only if more follows.
    Separated,
}

pub(in crate::data) struct DocumentTotals<S> {
    pub(in crate::data) sink: S,
    pub(in crate::data) tokens: u64,
    pub(in crate::data) documents: u64,
    /// Documents, those of one record counted once.
    pub(in crate::data) records: u64,
    /// The largest id.
    pub(in crate::data) largest: u32,
    /// For each text file the tokens up to its end.
    pub(in crate::data) source_ends: Vec<u64>,
    /// Tokens that are not trained.
    pub(in crate::data) untrained: u64,
    /// Records without a trained token, left out, and the first of them.
    pub(in crate::data) skipped: u64,
    pub(in crate::data) first_skipped: Option<DocumentPosition>,
    /// Remarks on the records.
    pub(in crate::data) remarks: Remarks,
}

impl<S: Sink> Documents<S> {
    /// For a model of `vocab_size` ids.
    pub(in crate::data) fn new(sink: S, vocab_size: usize, separator: Option<u32>, begin: &[u32]) -> Self {
        Self {
            sink,
            vocab_size,
            media: Vec::new(),
            separator,
            begin: begin.to_vec(),
            tokens: 0,
            documents: 0,
            records: 0,
            tokens_of_document: 0,
            text: OpenText::None,
            largest: 0,
            source_ends: Vec::new(),
            untrained: 0,
            skipped: 0,
            first_skipped: None,
            remarks: Remarks::default(),
        }
    }

    /// Refuses these tokens.
    pub(in crate::data) fn without(self, media: &[MediaToken]) -> Self {
        Self { media: media.to_vec(), ..self }
    }

    /// The next document begins.
    pub(in crate::data) fn begin(&mut self) -> Result<()> {
        (self.tokens_of_document, self.text) = (0, OpenText::Empty);
        let separator = self.separator.filter(|_| self.documents > 0);
        let around: Vec<u32> = separator.into_iter().chain(self.begin.iter().copied()).collect();
        self.write(&around)
    }

    /// The documents of the record at `place`, all their tokens: nothing is put around them.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(in crate::data) fn record(&mut self, documents: &[Vec<u32>], place: &DocumentPosition) -> Result<()> {
        for (idx, tokens) in documents.iter().enumerate() {
            (self.tokens_of_document, self.text) = (0, OpenText::None);
            self.append(tokens, place)?;
            self.end_with(if idx == 0 { 0 } else { SAME_RECORD }, place)?;
        }
        Ok(())
    }

    /// The record at `place` has no trained token.
    pub(in crate::data) fn skip(&mut self, place: DocumentPosition) {
        self.skipped += 1;
        self.reach(place.source);
        self.first_skipped.get_or_insert(place);
    }

    /// Remarks on the record at `place`, which has come.
    pub(in crate::data) fn remark(&mut self, remarks: &RecordRemarks, place: &DocumentPosition) {
        self.remarks.add(remarks, place);
    }

    /// The next tokens of the document at `place`.
    ///
    /// # Errors
    /// `Format` that names place, token and id when one is outside the vocabulary, or stands for other input than text; the sink's.
    pub(in crate::data) fn append(&mut self, ids: &[u32], place: &DocumentPosition) -> Result<()> {
        if let Some(idx) = ids.iter().position(|&token| id_of(token) as usize >= self.vocab_size) {
            let (nth, id, vocab_size) = (self.tokens_of_document + idx as u64, id_of(ids[idx]), self.vocab_size);
            if ids.first().is_some_and(|word| is_number(*word)) {
                return Err(place.error(format_args!("id {id} of a teacher is outside the vocabulary of {vocab_size}")));
            }
            return Err(place.error(format_args!("token {nth} has id {id}, outside the vocabulary of {vocab_size}")));
        }
        self.expect_text(ids, place)?;
        self.tokens_of_document += ids.len() as u64;
        match self.text {
            OpenText::None => self.write(ids),
            _ if ids.is_empty() => Ok(()),
            text => self.append_text(ids, text),
        }
    }

    fn expect_text(&self, ids: &[u32], place: &DocumentPosition) -> Result<()> {
        if self.media.is_empty() {
            return Ok(());
        }
        let found = ids.iter().zip(self.tokens_of_document..).find_map(|(id, nth)| Some((find(&self.media, id_of(*id))?, nth)));
        found.map_or(Ok(()), |(token, nth)| Err(place.error(format_args!("token {nth} {}", token.refusal()))))
    }

    /// Text without the tokens that stand around it anyway.
    fn append_text(&mut self, ids: &[u32], text: OpenText) -> Result<()> {
        let has_begin = text == OpenText::Empty && missing_begin(ids, &self.begin).is_empty();
        let ids = if has_begin { &ids[self.begin.len()..] } else { ids };
        if let (OpenText::Separated, Some(separator)) = (text, self.separator) {
            self.write(&[separator])?;
        }
        let separator = self.separator.filter(|separator| ids.last() == Some(separator));
        self.text = if separator.is_some() { OpenText::Separated } else { OpenText::Begun };
        self.write(&ids[..ids.len() - usize::from(separator.is_some())])
    }

    /// The document at `place` ends.
    pub(in crate::data) fn end(&mut self, place: &DocumentPosition) -> Result<()> {
        self.end_with(0, place)
    }

    fn end_with(&mut self, same_record: u64, place: &DocumentPosition) -> Result<()> {
        self.documents += 1;
        self.records += u64::from(same_record == 0);
        self.reach(place.source);
        self.sink.end_document(self.tokens | same_record)
    }

    /// All documents have come. An end of text that the last one has stays behind it.
    ///
    /// # Errors
    /// The sink's.
    pub(in crate::data) fn finish(mut self) -> Result<DocumentTotals<S>> {
        if let (OpenText::Separated, Some(separator)) = (self.text, self.separator) {
            self.write(&[separator])?;
            if let Some(end) = self.source_ends.last_mut() {
                *end += 1;
            }
        }
        let Self { sink, tokens, documents, records, largest, source_ends, untrained, skipped, first_skipped, remarks, .. } = self;
        Ok(DocumentTotals { sink, tokens, documents, records, largest, source_ends, untrained, skipped, first_skipped, remarks })
    }

    /// Text file `source` goes as far as the tokens do by now. Files before it that hold no document end where the one before them does.
    fn reach(&mut self, source: usize) {
        let before = self.source_ends.last().copied().unwrap_or(0);
        self.source_ends.resize(source + 1, before);
        self.source_ends[source] = self.tokens;
    }

    fn write(&mut self, ids: &[u32]) -> Result<()> {
        self.tokens += ids.len() as u64;
        self.untrained += ids.iter().map(|token| u64::from(token >> 31)).sum::<u64>();
        self.largest = ids.iter().map(|token| id_of(*token)).fold(self.largest, u32::max);
        self.sink.append(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::loss_weight::UNTRAINED;
    use std::path::Path;

    #[test]
    fn the_separator_stands_between_documents_and_nowhere_else() {
        let place = DocumentPosition { path: Path::new("a.txt").into(), source: 0, line: None };
        let mut documents = Documents::new(Vec::new(), 10, Some(9), &[]);
        for document in [&[1, 2][..], &[], &[3]] {
            documents.begin().unwrap();
            document.iter().for_each(|&id| documents.append(&[id], &place).unwrap());
            documents.end(&place).unwrap();
        }
        documents.begin().unwrap();
        documents.append(&[4], &place).unwrap();
        let message = documents.append(&[4, 10], &place).unwrap_err().to_string();
        assert_eq!(message, "a.txt: token 2 has id 10, outside the vocabulary of 10");
        documents.end(&DocumentPosition { source: 2, ..place }).unwrap();
        let totals = documents.finish().unwrap();
        assert_eq!((totals.sink, totals.documents, totals.largest), (vec![1, 2, 9, 9, 3, 9, 4], 4, 9));
        assert_eq!((totals.tokens, totals.source_ends), (7, vec![5, 5, 7]));
    }

    #[test]
    fn a_token_of_an_image_is_refused_with_its_place_whether_it_is_trained_or_not() {
        let place = DocumentPosition { path: Path::new("a.jsonl").into(), source: 0, line: None };
        for id in [5, 5 | UNTRAINED] {
            let media = [MediaToken { key: "video_token_id", id: 6 }, MediaToken { key: "image_token_id", id: 5 }];
            let mut documents = Documents::new(Vec::new(), 10, None, &[]).without(&media);
            documents.record(&[vec![1, 2, 3]], &place).unwrap();
            let message = documents.record(&[vec![4], vec![1, id]], &place).unwrap_err().to_string();
            assert_eq!(
                message,
                "a.jsonl: token 1 has id 5, which is image_token_id in config.json: the text part is trained on text alone"
            );
        }
    }

    #[test]
    fn a_separator_or_a_begin_that_text_has_is_not_written_twice() {
        let place = DocumentPosition { path: Path::new("a.txt").into(), source: 0, line: None };
        let written = |texts: &[&[&[u32]]]| {
            let mut documents = Documents::new(Vec::new(), 10, Some(9), &[7, 8]);
            for parts in texts {
                documents.begin().unwrap();
                parts.iter().for_each(|part| documents.append(part, &place).unwrap());
                documents.end(&place).unwrap();
            }
            documents.finish().unwrap().sink
        };
        let [plain, marked] = [&[1, 2][..], &[7, 8, 1, 2, 9]];
        assert_eq!(written(&[&[marked], &[plain]]), written(&[&[plain], &[plain]]));
        assert_eq!(written(&[&[plain], &[marked]]), [7, 8, 1, 2, 9, 7, 8, 1, 2, 9], "that of the last one stays");
        assert_eq!(written(&[&[&[1], &[2, 9], &[]], &[plain]]), written(&[&[plain], &[plain]]), "the end of several parts");
        assert_eq!(written(&[&[&[1, 9], &[2]]]), [7, 8, 1, 9, 2], "within a text it stays");
        assert_eq!(written(&[&[&[1, 9, 9]], &[plain]]), [7, 8, 1, 9, 9, 7, 8, 1, 2], "one of two is the end");
        assert_eq!(written(&[&[&[1], &[7, 8]]]), [7, 8, 1, 7, 8], "a begin within a text stays");
        assert_eq!(written(&[&[&[9]], &[&[7, 8]], &[&[8]]]), [7, 8, 9, 7, 8, 9, 7, 8, 8]);
    }
}
