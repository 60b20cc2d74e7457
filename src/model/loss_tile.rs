//! The tile in which the loss is computed.

/// Size of the logits that exist at once: the loss processes `rows` tokens at a time, in tiles of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LossTile {
    /// Tokens of one pass, limited to the tokens of the micro-batch.
    pub rows: usize,
    /// Vocabulary columns of one tile, limited to the vocabulary. A single tile computes logits once instead of twice.
    pub vocab: usize,
}
