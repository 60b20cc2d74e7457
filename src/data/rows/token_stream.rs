//! One stream of tokens out of parts, in the order in which they were pushed.

use crate::data::prepared::token_file::TokenFile;
use crate::error::Result;
use std::ops::Range;
use std::sync::Arc;

/// Tokens that are read at once.
const BLOCK_TOKENS: usize = 16 << 10;

/// A stream of token ids, each with its weight ([`crate::data::loss_weight`]). Small text is in memory, all else is read where it lies.
#[derive(Clone, Default)]
pub struct TokenStream {
    parts: Vec<Part>,
    tokens: usize,
}

#[derive(Clone)]
struct Part {
    /// Position in the stream of the part's first token.
    start: usize,
    /// Which of the tokens.
    range: Range<usize>,
    tokens: Arc<Tokens>,
}

/// Tokens somewhere.
pub(in crate::data) enum Tokens {
    Memory(Vec<u32>),
    File(TokenFile),
}

impl TokenStream {
    /// Tokens in the stream.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Appends those `tokens` that `range` names.
    pub(in crate::data) fn push(&mut self, tokens: Arc<Tokens>, range: Range<usize>) {
        let start = self.tokens;
        self.tokens += range.len();
        match self.parts.last_mut() {
            Some(last) if Arc::ptr_eq(&last.tokens, &tokens) && last.range.end == range.start => last.range.end = range.end,
            _ if range.is_empty() => {}
            _ => self.parts.push(Part { start, range, tokens }),
        }
    }

    /// Appends all of `tokens`.
    pub(in crate::data) fn push_all(&mut self, tokens: Tokens) {
        let range = 0..tokens.len();
        self.push(Arc::new(tokens), range);
    }

    /// Appends tokens `range` of `other`.
    pub(in crate::data) fn push_part(&mut self, other: &Self, range: Range<usize>) {
        let first = other.parts.partition_point(|part| part.start <= range.start).saturating_sub(1);
        for part in &other.parts[first..] {
            let within = |at: usize| part.range.start + at.saturating_sub(part.start).min(part.range.len());
            self.push(part.tokens.clone(), within(range.start)..within(range.end));
            if part.start >= range.end {
                break;
            }
        }
    }

    /// Gives `each` the tokens `range`, a block at a time.
    ///
    /// # Errors
    /// Errors of [`Self::read`].
    pub(in crate::data) fn for_each_block(&self, range: Range<u64>, mut each: impl FnMut(&[i32])) -> Result<()> {
        let mut block = [0; BLOCK_TOKENS];
        for start in range.clone().step_by(BLOCK_TOKENS) {
            let block = &mut block[..BLOCK_TOKENS.min((range.end - start) as usize)];
            self.read(start as usize, block)?;
            each(block);
        }
        Ok(())
    }

    /// Reads tokens `start..start + out.len()` without allocating, as words with their weights.
    ///
    /// # Panics
    /// If the range reaches beyond the stream.
    pub fn read(&self, mut start: usize, mut out: &mut [i32]) -> Result<()> {
        assert!(start + out.len() <= self.tokens, "read {start}+{} of {} tokens", out.len(), self.tokens);
        let mut part_idx = self.parts.partition_point(|part| part.start <= start).saturating_sub(1);
        while !out.is_empty() {
            let part = &self.parts[part_idx];
            let within = start - part.start;
            let (here, rest) = out.split_at_mut(out.len().min(part.range.len() - within));
            part.tokens.read(part.range.start + within, here)?;
            start += here.len();
            out = rest;
            part_idx += 1;
        }
        Ok(())
    }
}

impl Tokens {
    pub(in crate::data) fn len(&self) -> usize {
        match self {
            Self::Memory(ids) => ids.len(),
            Self::File(file) => file.tokens(),
        }
    }

    fn read(&self, start: usize, out: &mut [i32]) -> Result<()> {
        match self {
            Self::Memory(ids) => out.iter_mut().zip(&ids[start..]).for_each(|(token, &id)| *token = id as i32),
            Self::File(file) => file.read(start, out)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::InFile;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn reads_cross_the_parts(
            parts in prop::collection::vec((any::<bool>(), prop::collection::vec(0..256u32, 1..40), 0..40usize), 1..8), cut: (u16, u16),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let (mut stream, mut all) = (TokenStream::default(), Vec::new());
            for (idx, (is_file, ids, first)) in parts.iter().enumerate() {
                let range = (*first).min(ids.len())..ids.len();
                all.extend(ids[range.clone()].iter().map(|&id| id as i32));
                let tokens = if *is_file {
                    let path = dir.path().join(idx.to_string());
                    std::fs::write(&path, bytemuck::cast_slice::<u32, u8>(ids)).unwrap();
                    Tokens::File(TokenFile::trusted(InFile::open(&path).unwrap(), 256))
                } else {
                    Tokens::Memory(ids.clone())
                };
                prop_assert_eq!(tokens.len(), ids.len());
                stream.push(tokens.into(), range);
            }
            prop_assert_eq!(stream.tokens(), all.len());
            let start = cut.0 as usize % (all.len() + 1);
            let mut out = vec![-1; cut.1 as usize % (all.len() - start + 1)];
            stream.read(start, &mut out).unwrap();
            prop_assert_eq!(&out[..], &all[start..start + out.len()]);
        }
    }
}
