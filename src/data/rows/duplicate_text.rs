//! Records that have a document in common, whatever the weights of its tokens are in each.

use super::bounds::{Bounds, RecordBounds};
use super::token_stream::TokenStream;
use crate::data::context::Preparation;
use crate::data::loss_weight::id_of;
use crate::error::Result;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::ops::Range;

/// Digest of a document's ids.
type TextDigest = [u8; 32];

/// Finds such records among those of `stream`, which begin and end at `bounds`.
pub(in crate::data) struct DuplicateText<'a> {
    pub(in crate::data) stream: &'a TokenStream,
    pub(in crate::data) bounds: &'a Bounds,
    pub(in crate::data) preparation: &'a Preparation<'a>,
}

impl DuplicateText<'_> {
    /// `chosen`, ascending, with all records that have a document in common with one of them, or with one of those, and so on. A record is
    /// given by the numbers of its documents.
    ///
    /// # Errors
    /// When the tokens cannot be read; `Interrupted`.
    pub(in crate::data) fn with_equal(&self, mut chosen: Vec<Range<u64>>) -> Result<Vec<Range<u64>>> {
        let mut texts = HashSet::new();
        self.bounds.for_each_record(self.preparation, |record| {
            if has(&chosen, record) {
                texts.extend(self.digests(record)?);
            }
            Ok(())
        })?;
        loop {
            let mut more = Vec::new();
            self.bounds.for_each_record(self.preparation, |record| {
                if has(&chosen, record) {
                    return Ok(());
                }
                let digests = self.digests(record)?;
                if digests.iter().any(|digest| texts.contains(digest)) {
                    texts.extend(digests);
                    more.push(record.numbers());
                }
                Ok(())
            })?;
            if more.is_empty() {
                return Ok(chosen);
            }
            chosen.extend(more);
            chosen.sort_unstable_by_key(|documents| documents.start);
        }
    }

    fn digests(&self, record: &RecordBounds) -> Result<Vec<TextDigest>> {
        record.documents.iter().map(|tokens| self.digest(tokens.clone())).collect()
    }

    fn digest(&self, tokens: Range<u64>) -> Result<TextDigest> {
        let mut digest = Sha256::new();
        self.stream.for_each_block(tokens, |block| {
            let ids: Vec<u32> = block.iter().map(|token| id_of(*token as u32)).collect();
            digest.update(bytemuck::cast_slice::<u32, u8>(&ids));
        })?;
        Ok(digest.finalize().into())
    }
}

fn has(chosen: &[Range<u64>], record: &RecordBounds) -> bool {
    chosen.binary_search_by_key(&record.numbers().start, |documents| documents.start).is_ok()
}
