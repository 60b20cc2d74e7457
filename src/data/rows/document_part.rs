//! A part of a document in a row.

/// Parts of documents in a run at most: their table is in memory, and the plan counts it.
pub(super) const PARTS_MAX: u64 = 1 << 24;
/// The target of a token that nothing follows.
pub(super) const NO_TARGET: i32 = -1;

/// A document, or a part of one, in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DocumentPart {
    /// Its first token's place in the stream.
    pub(super) start: u64,
    /// At least 1.
    pub(super) tokens: u32,
    /// The target of its last token.
    pub(super) next: i32,
}
