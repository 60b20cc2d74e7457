//! Inputs of the gated delta rule on the CPU, by token, head, document and chunk.

use super::math::{exp, sigmoid};
use super::short_conv::DocumentRows;
use crate::device::{CHUNK, DeltaShape};
use crate::dtype::Element;
use std::ops::Range;

/// The heads of a unit of work.
#[derive(Clone, Copy)]
pub(super) struct RuleHeads {
    pub(super) key: usize,
    pub(super) value: usize,
}

/// Inputs of both passes; see [`DeltaRule`](crate::device::DeltaRule).
#[derive(Clone, Copy)]
pub(crate) struct DeltaInputs<'a, T> {
    pub(crate) shape: DeltaShape,
    pub(crate) qkv: &'a [T],
    pub(crate) a: &'a [T],
    pub(crate) b: &'a [T],
    pub(crate) a_log: &'a [T],
    pub(crate) dt_bias: &'a [T],
    pub(crate) documents: Option<&'a [i32]>,
}

impl<'a, T: Element> DeltaInputs<'a, T> {
    /// Query, key and value of a token.
    pub(super) fn rows(&self, token: usize, heads: RuleHeads) -> [&'a [T]; 3] {
        let DeltaShape { key_heads, width, .. } = self.shape;
        let row = &self.qkv[token * self.shape.qkv_cols()..];
        [heads.key, key_heads + heads.key, 2 * key_heads + heads.value].map(|head| &row[head * width..][..width])
    }

    /// Logarithm of the decay, and the factor of the correction.
    pub(super) fn gates(&self, token: usize, head: usize) -> (f32, f32) {
        let at = token * self.a_log.len() + head;
        let slope = -exp(self.a_log[head].to_f32());
        (slope * softplus(self.a[at].to_f32() + self.dt_bias[head].to_f32()), sigmoid(self.b[at].to_f32()))
    }

    /// Writes the documents of all rows, as ranges of tokens.
    pub(super) fn list_documents(&self, documents: &mut Vec<Range<usize>>) {
        let rows = DocumentRows { documents: self.documents, seq_length: self.shape.seq_length };
        documents.clear();
        for token in 0..self.shape.tokens() {
            match documents.last_mut() {
                Some(document) if rows.index(token) > 0 => document.end += 1,
                _ => documents.push(token..token + 1),
            }
        }
    }

    /// Value heads that read key head `key`.
    pub(super) fn readers(&self, key: usize) -> impl Iterator<Item = RuleHeads> + use<T> {
        let sharing = self.shape.value_heads / self.shape.key_heads;
        (key * sharing..(key + 1) * sharing).map(move |value| RuleHeads { key, value })
    }
}

/// The chunks of a document, as ranges of tokens.
pub(super) fn chunks(document: &Range<usize>) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
    let Range { start, end } = *document;
    (0..document.len().div_ceil(CHUNK)).map(move |chunk| start + chunk * CHUNK..end.min(start + (chunk + 1) * CHUNK))
}

/// `ln(1 + e^x)`
fn softplus(x: f32) -> f32 {
    // From here on the result rounds to x.
    if x > 20.0 { x } else { exp(x).ln_1p() }
}
