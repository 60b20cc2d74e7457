//! The tile in which the loss is computed.

use std::ops::Range;

/// Size of the logits that exist at once: the loss processes `rows` tokens at a time, in tiles of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LossTile {
    /// Tokens of one pass, limited to the tokens of the micro-batch.
    pub rows: usize,
    /// Vocabulary columns of one tile, limited to the vocabulary. A single tile computes logits once instead of twice.
    pub vocab: usize,
    /// Last columns of a single tile, which products of their own compute, so that the other columns fill whole vectors; 0: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub tail: usize,
}

/// Columns of an aligned part are a multiple of this: 128 bytes of a 16-bit format.
const ALIGNED_COLUMNS: usize = 64;
/// Matrix libraries read vectors of 16 bytes: 8 elements of a 16-bit format.
const VECTOR: usize = 8;
/// Products of smaller vocabularies take too little time to be divided.
const SMALLEST_DIVIDED: usize = 8192;

fn is_zero(value: &usize) -> bool {
    *value == 0
}

impl LossTile {
    /// A tile of the whole vocabulary for a GPU. Rows of `vocab` logits that do not fill whole vectors make the three products of the output
    /// matrix slow, so the last columns of such a vocabulary are a tail.
    pub(crate) fn of_vocabulary(rows: usize, vocab: usize) -> Self {
        let is_divided = vocab >= SMALLEST_DIVIDED && !vocab.is_multiple_of(VECTOR);
        Self { rows, vocab, tail: if is_divided { vocab % ALIGNED_COLUMNS } else { 0 } }
    }

    /// Whether the logits of all `vocab` tokens exist together.
    pub(crate) fn holds(&self, vocab: usize) -> bool {
        self.vocab == vocab
    }

    /// Parts of a vocabulary of `vocab` tokens whose logits are a matrix each, ascending.
    pub(crate) fn parts(&self, vocab: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (step, end) = if self.holds(vocab) { (vocab - self.tail, vocab - self.tail) } else { (self.vocab, vocab) };
        (0..end).step_by(step).map(move |start| start..end.min(start + step)).chain((end < vocab).then_some(end..vocab))
    }
}

impl std::fmt::Display for LossTile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {}", self.rows, self.vocab)?;
        if self.tail > 0 { write!(f, ", the last {} columns by products of their own", self.tail) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First and last bound of each part.
    fn parts(tile: LossTile, vocab: usize) -> Vec<(usize, usize)> {
        tile.parts(vocab).map(|part| (part.start, part.end)).collect()
    }

    #[test]
    fn a_vocabulary_that_fills_no_whole_vectors_has_a_tail() {
        let tail = |vocab| LossTile::of_vocabulary(1, vocab).tail;
        assert_eq!([49_159, 50_257, 49_152, 50_304, 151_936, 257].map(tail), [7, 17, 0, 0, 0, 0]);
        assert_eq!(parts(LossTile::of_vocabulary(1, 49_159), 49_159), [(0, 49_152), (49_152, 49_159)]);
        assert_eq!(parts(LossTile::of_vocabulary(1, 257), 257), [(0, 257)]);
        assert_eq!(parts(LossTile { rows: 1, vocab: 100, tail: 0 }, 257), [(0, 100), (100, 200), (200, 257)]);
    }

    #[test]
    fn a_tail_is_recorded_where_there_is_one() {
        let json = |tile: LossTile| serde_json::to_string(&tile).unwrap();
        assert_eq!(json(LossTile::of_vocabulary(4, 257)), r#"{"rows":4,"vocab":257}"#);
        let odd = LossTile::of_vocabulary(4, 49_159);
        assert_eq!(serde_json::from_str::<LossTile>(&json(odd)).unwrap(), odd);
        let before = serde_json::from_str::<LossTile>(r#"{"rows":4,"vocab":49159}"#).unwrap();
        assert_eq!(before.tail, 0, "a run of before goes on without a tail");
    }
}
