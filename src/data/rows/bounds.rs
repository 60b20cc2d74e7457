//! Where documents begin and end in a stream of text and records.
//!
//! The separator before a document of text belongs to no document; records are whole as they stand. Which of the two a file holds, its
//! first record determines, as it did when the file was tokenized.

use crate::data::context::Preparation;
use crate::data::encode::documents::SAME_RECORD;
use crate::data::prepared::parallel_scan::BLOCK_BYTES;
use crate::disk::InFile;
use crate::error::{Error, Result};
use std::ops::Range;

/// For each document the number of tokens up to its end, with [`SAME_RECORD`] or without.
pub(in crate::data) enum DocumentEnds {
    Memory(Vec<u64>),
    /// 64 bits each, little endian.
    File(InFile),
}

/// Documents of text files and records.
pub(in crate::data) struct Bounds {
    pub(in crate::data) ends: DocumentEnds,
    /// For each file the tokens up to its end.
    pub(in crate::data) source_ends: Vec<u64>,
    /// For each file whether it holds records; the text that ships with the program has no file.
    pub(in crate::data) holds_records: Vec<bool>,
    /// Whether a separator stands before each document of text but the first.
    pub(in crate::data) has_separator: bool,
    /// Tokens in all.
    pub(in crate::data) tokens: u64,
}

/// A document.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct DocumentBounds {
    /// Its tokens, which may be none.
    pub(in crate::data) tokens: Range<u64>,
    pub(in crate::data) is_record: bool,
    /// Whether the document before is of the same record.
    pub(in crate::data) continues: bool,
}

/// The documents of a record, or a document of text.
#[derive(Debug, Default)]
pub(in crate::data) struct RecordBounds {
    /// Number of the first.
    first: u64,
    /// The tokens of each.
    pub(in crate::data) documents: Vec<Range<u64>>,
}

impl RecordBounds {
    /// Numbers of the documents.
    pub(in crate::data) fn numbers(&self) -> Range<u64> {
        self.first..self.first + self.documents.len() as u64
    }

    /// Tokens of all documents: no separator stands between those of one record.
    pub(in crate::data) fn tokens(&self) -> Range<u64> {
        let (first, last) = (self.documents.first(), self.documents.last());
        first.zip(last).map_or(0..0, |(first, last)| first.start..last.end)
    }
}

impl Bounds {
    pub(in crate::data) fn documents(&self) -> u64 {
        match &self.ends {
            DocumentEnds::Memory(ends) => ends.len() as u64,
            DocumentEnds::File(file) => file.bytes() / size_of::<u64>() as u64,
        }
    }

    /// Gives `each` every document in order.
    ///
    /// # Errors
    /// `Io`; `Format` for ends that contradict each other; those of `each`; `Interrupted`.
    pub(in crate::data) fn for_each(
        &self,
        preparation: &Preparation<'_>,
        mut each: impl FnMut(DocumentBounds) -> Result<()>,
    ) -> Result<()> {
        let mut before = None;
        let mut next = |end: u64| {
            let (end, continues) = (end & !SAME_RECORD, end & SAME_RECORD > 0);
            let document = self.document(before, end)?;
            before = Some(end);
            each(DocumentBounds { continues, ..document })
        };
        match &self.ends {
            DocumentEnds::Memory(ends) => ends.iter().try_for_each(|end| next(*end)),
            DocumentEnds::File(file) => for_each_number(file, preparation, next),
        }
    }

    /// Gives `each` every record in order.
    ///
    /// # Errors
    /// As [`Self::for_each`].
    pub(in crate::data) fn for_each_record(
        &self,
        preparation: &Preparation<'_>,
        mut each: impl FnMut(&RecordBounds) -> Result<()>,
    ) -> Result<()> {
        let mut open = RecordBounds::default();
        self.for_each(preparation, |DocumentBounds { tokens, continues, .. }| {
            if !continues && !open.documents.is_empty() {
                each(&open)?;
                open.first = open.numbers().end;
                open.documents.clear();
            }
            open.documents.push(tokens);
            Ok(())
        })?;
        if open.documents.is_empty() { Ok(()) } else { each(&open) }
    }

    /// The document that goes up to `end`; the one before ended after `before` tokens.
    fn document(&self, before: Option<u64>, end: u64) -> Result<DocumentBounds> {
        let source = self.source_ends.partition_point(|source_end| *source_end < end);
        let is_record = self.holds_records.get(source).is_some_and(|holds_records| *holds_records);
        let separator = u64::from(before.is_some() && self.has_separator && !is_record);
        let start = before.unwrap_or(0).saturating_add(separator);
        if start <= end && end <= self.tokens {
            return Ok(DocumentBounds { tokens: start..end, is_record, continues: false });
        }
        let cause = format_args!("a document from token {start} to {end} of {}", self.tokens);
        match &self.ends {
            DocumentEnds::File(file) => Err(Error::format(file.path(), cause)),
            DocumentEnds::Memory(_) => Err(Error::format("the text", cause)),
        }
    }
}

/// Gives `each` the numbers of a file of 64 bits each, a block at a time.
fn for_each_number(file: &InFile, preparation: &Preparation<'_>, mut each: impl FnMut(u64) -> Result<()>) -> Result<()> {
    let mut block = vec![0u64; BLOCK_BYTES / size_of::<u64>()];
    for offset in (0..file.bytes()).step_by(BLOCK_BYTES) {
        preparation.check_stop()?;
        let bytes = BLOCK_BYTES.min((file.bytes() - offset) as usize);
        let numbers = &mut block[..bytes / size_of::<u64>()];
        file.read_at(offset, bytemuck::cast_slice_mut(numbers))?;
        numbers.iter().try_for_each(|number| each(*number))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two files of text around one of records, in memory or in a file.
    fn bounds(ends: DocumentEnds, has_separator: bool) -> Bounds {
        Bounds { ends, source_ends: vec![6, 10, 13], holds_records: vec![false, true, false], has_separator, tokens: 13 }
    }

    fn documents(bounds: &Bounds) -> Result<Vec<(Range<u64>, bool)>> {
        let mut found = Vec::new();
        bounds.for_each(&Preparation::default(), |document| {
            found.push((document.tokens, document.is_record));
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn separators_belong_to_no_document_and_records_have_none() {
        let ends = vec![3, 4, 6, 8, 10, 13];
        let want = [(0..3, false), (4..4, false), (5..6, false), (6..8, true), (8..10, true), (11..13, false)];
        assert_eq!(documents(&bounds(DocumentEnds::Memory(ends.clone()), true)).unwrap(), want);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ends.u64");
        std::fs::write(&path, bytemuck::cast_slice::<u64, u8>(&ends)).unwrap();
        let file = |path| DocumentEnds::File(InFile::open(path).unwrap());
        assert_eq!(documents(&bounds(file(&path), true)).unwrap(), want);
        assert_eq!(documents(&bounds(file(&path), false)).unwrap()[1..3], [(3..4, false), (4..6, false)]);
        std::fs::write(&path, bytemuck::cast_slice::<u64, u8>(&[3, 3])).unwrap();
        let damage = documents(&bounds(file(&path), true)).unwrap_err().to_string();
        assert!(damage.ends_with("ends.u64: a document from token 4 to 3 of 13"), "{damage}");
        assert!(documents(&bounds(DocumentEnds::Memory(vec![14]), true)).is_err());
    }

    #[test]
    fn documents_of_one_record_are_one() {
        let mut found = Vec::new();
        let ends = vec![3, 6, 7, 8 | SAME_RECORD, 9, 10 | SAME_RECORD, 13];
        let record = |record: &RecordBounds| {
            found.push((record.numbers(), record.tokens()));
            Ok(())
        };
        bounds(DocumentEnds::Memory(ends), true).for_each_record(&Preparation::default(), record).unwrap();
        assert_eq!(found, [(0..1, 0..3), (1..2, 4..6), (2..4, 6..8), (4..6, 8..10), (6..7, 11..13)]);
        let none = Bounds { ends: DocumentEnds::Memory(vec![]), ..bounds(DocumentEnds::Memory(vec![]), true) };
        none.for_each_record(&Preparation::default(), |_| panic!("there is no record")).unwrap();
    }
}
