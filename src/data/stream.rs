//! One stream of tokens out of many documents and token files, in the order in which they were pushed.

use crate::data::token_file::TokenFile;
use crate::error::{Error, Result};

/// A stream of token ids, all below the vocabulary size. Text is kept in memory, token files are read where they lie.
pub struct TokenStream {
    parts: Vec<Part>,
    tokens: usize,
    vocab_size: usize,
    end_of_text: Option<u32>,
    documents: usize,
}

struct Part {
    /// Position in the stream of the part's first token.
    start: usize,
    tokens: Tokens,
}

enum Tokens {
    Text(Vec<i32>),
    File(TokenFile),
}

/// A token that the vocabulary does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutsideVocab {
    /// Which token of the document, from 0.
    pub token_idx: usize,
    /// Its id.
    pub id: u32,
}

impl TokenStream {
    /// An empty stream for a model of `vocab_size` ids; `end_of_text` goes between documents.
    ///
    /// # Errors
    /// `Unsupported` when the vocabulary does not fit 32-bit signed ids or does not hold `end_of_text`.
    pub fn new(vocab_size: usize, end_of_text: Option<u32>) -> Result<Self> {
        if vocab_size > 1 << 31 {
            return Err(Error::Unsupported(format!("a vocabulary of {vocab_size} ids")));
        }
        if let Some(id) = end_of_text.filter(|&id| id as usize >= vocab_size) {
            return Err(Error::Unsupported(format!("end-of-text token {id} with a model whose vocabulary is {vocab_size}")));
        }
        Ok(Self { parts: Vec::new(), tokens: 0, vocab_size, end_of_text, documents: 0 })
    }

    /// Number of ids in the model's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Tokens in the stream.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Documents in the stream.
    pub fn documents(&self) -> usize {
        self.documents
    }

    /// Appends a document, after an end-of-text token unless it is the first.
    ///
    /// # Errors
    /// Names the first id outside the vocabulary; the stream is as before.
    pub fn push_document(&mut self, ids: &[u32]) -> std::result::Result<(), OutsideVocab> {
        if let Some(token_idx) = ids.iter().position(|&id| id as usize >= self.vocab_size) {
            return Err(OutsideVocab { token_idx, id: ids[token_idx] });
        }
        let separator = self.end_of_text.filter(|_| self.documents > 0);
        let document = separator.iter().chain(ids).map(|&id| id as i32);
        self.documents += 1;
        let start = self.tokens;
        self.tokens += document.clone().count();
        match self.parts.last_mut() {
            Some(Part { tokens: Tokens::Text(text), .. }) => text.extend(document),
            _ => self.parts.push(Part { start, tokens: Tokens::Text(document.collect()) }),
        }
        Ok(())
    }

    /// Appends a token file as it is.
    pub fn push_file(&mut self, file: TokenFile) {
        let start = self.tokens;
        self.tokens += file.tokens();
        self.parts.push(Part { start, tokens: Tokens::File(file) });
    }

    /// Reads tokens `start..start + out.len()` without allocating.
    ///
    /// # Errors
    /// Those of [`TokenFile::read`].
    ///
    /// # Panics
    /// If the range reaches beyond the stream.
    pub fn read(&self, mut start: usize, mut out: &mut [i32]) -> Result<()> {
        assert!(start + out.len() <= self.tokens, "read {start}+{} of {} tokens", out.len(), self.tokens);
        let mut part_idx = self.parts.partition_point(|part| part.start <= start).saturating_sub(1);
        while !out.is_empty() {
            let part = &self.parts[part_idx];
            let within = start - part.start;
            let (here, rest) = out.split_at_mut(out.len().min(part.tokens.len() - within));
            part.tokens.read(within, here)?;
            start += here.len();
            out = rest;
            part_idx += 1;
        }
        Ok(())
    }
}

impl Tokens {
    fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::File(file) => file.tokens(),
        }
    }

    fn read(&self, start: usize, out: &mut [i32]) -> Result<()> {
        match self {
            Self::Text(text) => out.copy_from_slice(&text[start..start + out.len()]),
            Self::File(file) => file.read(start, out)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn end_of_text_stands_between_documents_and_nowhere_else() {
        let mut stream = TokenStream::new(10, Some(9)).unwrap();
        for document in [&[1, 2][..], &[], &[3]] {
            stream.push_document(document).unwrap();
        }
        assert_eq!(stream.push_document(&[4, 10]), Err(OutsideVocab { token_idx: 1, id: 10 }));
        let mut all = [0; 5];
        stream.read(0, &mut all).unwrap();
        assert_eq!((stream.tokens(), all), (5, [1, 2, 9, 9, 3]));
    }

    #[test]
    fn a_vocabulary_that_cannot_be_is_refused() {
        assert!(TokenStream::new((1 << 31) + 1, None).is_err());
        assert!(TokenStream::new(10, Some(10)).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn reads_cross_the_parts(parts in prop::collection::vec((any::<bool>(), prop::collection::vec(0..256u32, 1..40)), 1..8), cut: (u16, u16)) {
            let dir = tempfile::tempdir().unwrap();
            let mut stream = TokenStream::new(256, None).unwrap();
            for (idx, (is_file, ids)) in parts.iter().enumerate() {
                if *is_file {
                    let path = dir.path().join(format!("{idx}.bin"));
                    std::fs::write(&path, ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect::<Vec<_>>()).unwrap();
                    stream.push_file(TokenFile::open(&path, 256).unwrap());
                } else {
                    stream.push_document(ids).unwrap();
                }
            }
            let all: Vec<i32> = parts.iter().flat_map(|(_, ids)| ids).map(|&id| id as i32).collect();
            prop_assert_eq!(stream.tokens(), all.len());
            let start = cut.0 as usize % (all.len() + 1);
            let mut out = vec![-1; cut.1 as usize % (all.len() - start + 1)];
            stream.read(start, &mut out).unwrap();
            prop_assert_eq!(&out[..], &all[start..start + out.len()]);
        }
    }
}
