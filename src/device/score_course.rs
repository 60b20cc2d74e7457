//! The course of attention by products: which queries and heads are computed together, and the memory that their scores take.

use super::{AttentionShape, PRODUCT_BLOCK, ScoreTile};
use crate::dtype::Dtype;
#[cfg(any(test, feature = "cuda"))]
use std::ops::Range;

/// Maximum bytes of the scores that exist at once; one head's scores of a block may exceed it.
const SCORES_BYTES: usize = 1 << 30;
/// Formats of a score: raw scores and gradients of probabilities in fp32, probabilities and gradients of scores in the model's format.
const WIDE_SCORES: usize = 2;
const NARROW_SCORES: usize = 2;
/// Arrays begin at multiples of this number of bytes.
const ALIGN_BYTES: usize = 256;

/// Keys of one or more sequences: all sums of key gradients that exist at once.
#[cfg(any(test, feature = "cuda"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyGroup {
    /// First sequence and first key head.
    pub(crate) sequence: usize,
    pub(crate) kv_head: usize,
}

/// How attention of one shape and format is computed by products. It follows from the shape alone. Products are those of several heads at
/// equal distances (*lanes*): of all key heads of a sequence, or of one key head of all sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScoreCourse {
    shape: AttentionShape,
    narrow: Dtype,
    /// Queries of a block.
    block: usize,
    across_sequences: bool,
    /// Lanes that are computed together; divides their number.
    pub(crate) lanes: usize,
    /// Query heads of each key head that are computed together; divides their number.
    pub(crate) members: usize,
}

/// Bytes of the arrays in the workspace, in this order: raw scores, gradients of probabilities, probabilities, gradients of scores, sums of
/// key gradients and of value gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScoreBytes {
    pub(crate) wide: usize,
    pub(crate) narrow: usize,
    pub(crate) sums: usize,
}

impl ScoreBytes {
    pub(crate) fn total(&self) -> usize {
        WIDE_SCORES * self.wide + NARROW_SCORES * self.narrow + 2 * self.sums
    }
}

impl ScoreCourse {
    /// The course for operands in the format `narrow`, in blocks of `block` queries if given.
    pub(crate) fn new(shape: &AttentionShape, narrow: Dtype, block: Option<usize>) -> Self {
        let across_sequences = shape.batch > shape.kv_heads;
        let block = block.unwrap_or(PRODUCT_BLOCK).min(shape.seq_length);
        let one = Self { shape: *shape, narrow, block, across_sequences, lanes: 1, members: 1 };
        let fits = |course: &Self| course.scores_bytes() <= SCORES_BYTES;
        let divisors = |n: usize| (1..=n).rev().filter(move |part| n.is_multiple_of(*part));
        let all = if across_sequences { shape.batch } else { shape.kv_heads };
        let lanes = divisors(all).map(|lanes| Self { lanes, ..one }).find(fits).unwrap_or(one);
        divisors(shape.heads / shape.kv_heads).map(|members| Self { members, ..lanes }).find(fits).unwrap_or(lanes)
    }

    /// Scores of one matrix of the largest tile.
    fn matrix(&self) -> usize {
        let keys = if self.shape.hiding_window().is_some() { self.shape.most_keys(self.block) } else { self.shape.seq_length };
        self.shape.longest_block(self.block) * keys.next_multiple_of(ScoreTile::GRAIN)
    }

    fn scores_bytes(&self) -> usize {
        let of_a_score = WIDE_SCORES * Dtype::Float32.bytes() + NARROW_SCORES * self.narrow.bytes();
        self.members.saturating_mul(self.lanes).saturating_mul(self.matrix()).saturating_mul(of_a_score)
    }

    /// Bytes of the workspace for the backward pass, which suffices for the forward pass.
    pub(crate) fn bytes(&self) -> ScoreBytes {
        let (scores, sums) = (self.members * self.lanes * self.matrix(), self.sums_elems());
        let bytes = |elems: usize, dtype: Dtype| (elems * dtype.bytes()).next_multiple_of(ALIGN_BYTES);
        ScoreBytes { wide: bytes(scores, Dtype::Float32), narrow: bytes(scores, self.narrow), sums: bytes(sums, Dtype::Float32) }
    }

    /// Elements of the sums of key gradients of a [`KeyGroup`].
    pub(crate) fn sums_elems(&self) -> usize {
        self.lanes * self.shape.seq_length * self.shape.head_dim
    }
}

#[cfg(any(test, feature = "cuda"))]
impl ScoreCourse {
    /// Blocks of queries, in order.
    pub(crate) fn query_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        self.shape.query_blocks(self.block)
    }

    /// Keys that some query of a block sees, extended downwards so that blocks behind a window have equally many.
    pub(crate) fn keys(&self, queries: &Range<usize>) -> Range<usize> {
        self.shape.keys_behind_window(queries)
    }

    /// Groups of keys whose gradients are summed together.
    pub(crate) fn key_groups(&self) -> impl Iterator<Item = KeyGroup> + use<> {
        let (lanes, across) = (self.lanes, self.across_sequences);
        let [sequences, kv_heads] = if across { [lanes, 1] } else { [1, lanes] };
        let AttentionShape { batch, kv_heads: all, .. } = self.shape;
        let of = move |sequence| (0..all).step_by(kv_heads).map(move |kv_head| KeyGroup { sequence, kv_head });
        (0..batch).step_by(sequences).flat_map(of)
    }

    /// Tiles of scores of `queries`, one of the blocks, in the order of query heads.
    pub(crate) fn tiles(
        &self,
        KeyGroup { sequence, kv_head }: KeyGroup,
        queries: &Range<usize>,
    ) -> impl Iterator<Item = ScoreTile> + use<> {
        let &Self { lanes, members, across_sequences, .. } = self;
        let (keys, (query, rows)) = (self.keys(queries), (queries.start, queries.len()));
        let pitch = keys.len().next_multiple_of(ScoreTile::GRAIN);
        let (key, keys) = (keys.start, keys.len());
        let group = self.shape.heads / self.shape.kv_heads;
        (0..group).step_by(members).map(move |member| ScoreTile {
            sequence,
            kv_head,
            member,
            members,
            lanes,
            across_sequences,
            query,
            rows,
            key,
            keys,
            pitch,
        })
    }

    /// Elements between two lanes, where two sequences are `sequence` elements apart and two key heads `kv_head` elements.
    pub(crate) fn stride(&self, sequence: usize, kv_head: usize) -> usize {
        if self.across_sequences { sequence } else { kv_head }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full layer of Gemma-4-31B.
    const WIDE: AttentionShape =
        AttentionShape { batch: 4, seq_length: 4096, heads: 32, kv_heads: 4, head_dim: 512, scale: 1.0, window: None, softcap: None };

    fn course(shape: AttentionShape) -> ScoreCourse {
        ScoreCourse::new(&shape, Dtype::Bfloat16, None)
    }

    #[test]
    fn heads_are_computed_together_while_their_scores_fit() {
        let of = |shape| {
            let course = course(shape);
            (course.lanes, course.members, course.across_sequences)
        };
        // 50 MB a head: 4 key heads, and 4 of the 8 query heads of each.
        assert_eq!(of(WIDE), (4, 4, false));
        assert_eq!(of(AttentionShape { batch: 8, seq_length: 1024, ..WIDE }), (8, 8, true));
        // 1.6 GB a head, and 0.4 GB.
        assert_eq!(of(AttentionShape { batch: 1, seq_length: 131_072, ..WIDE }), (1, 1, false));
        assert_eq!(of(AttentionShape { batch: 1, seq_length: 32_768, ..WIDE }), (2, 1, false));
    }

    #[test]
    fn the_workspace_is_that_of_scores_and_sums() {
        let scores = 4 * 4 * 1024 * 4096;
        assert_eq!(course(WIDE).bytes(), ScoreBytes { wide: 4 * scores, narrow: 2 * scores, sums: 4 * 4096 * 512 * 4 });
        // 1024 queries, 1024 keys before them, and up to 127 keys because the first is a multiple of 128.
        let windowed = course(AttentionShape { window: Some(1024), ..WIDE }).bytes();
        assert_eq!(windowed.narrow, 2 * 4 * 8 * 1024 * 2176);
        let odd = course(AttentionShape { batch: 1, seq_length: 67, heads: 3, kv_heads: 1, head_dim: 7, ..WIDE }).bytes();
        assert_eq!(odd, ScoreBytes { wide: 3 * 67 * 72 * 4 + 224, narrow: 3 * 67 * 72 * 2 + 240, sums: 67 * 7 * 4 + 172 });
    }

    #[test]
    fn every_query_of_every_head_is_in_one_tile() {
        for (batch, heads, kv_heads, block) in [(1, 4, 2, 20), (5, 4, 2, 64), (2, 6, 6, 33), (3, 4, 1, 70)] {
            let shape = AttentionShape { batch, seq_length: 70, heads, kv_heads, head_dim: 8, ..WIDE };
            let course = ScoreCourse::new(&shape, Dtype::Bfloat16, Some(block));
            let mut seen = vec![0; shape.tokens() * heads];
            for group in course.key_groups() {
                for tile in course.query_blocks().flat_map(|queries| course.tiles(group, &queries).collect::<Vec<_>>()) {
                    for (i, row) in (0..tile.matrices()).flat_map(|i| (0..tile.rows).map(move |row| (i, row))) {
                        let (sequence, head) = tile.place(&shape, i);
                        seen[(sequence * heads + head) * 70 + tile.query + row] += 1;
                    }
                }
            }
            assert!(seen.iter().all(|count| *count == 1), "{shape:?}");
        }
    }
}
