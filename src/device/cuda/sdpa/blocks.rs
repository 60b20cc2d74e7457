//! Blocks of queries and keys, which are processed in sequence when the scores of a whole sequence would take too much memory.

use crate::device::AttentionShape;
use std::ops::Range;

/// A range of queries of a sequence, and a range of keys that some of them see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ScoreBlock {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

/// Size of a block, which determines its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockSize {
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// True if the last keys belong to the same tokens as the queries, so that a mask hides later keys; false if every query sees every
    /// key.
    pub(super) is_causal: bool,
}

impl ScoreBlock {
    pub(super) fn size(&self) -> BlockSize {
        BlockSize { queries: self.queries.len(), keys: self.keys.len(), is_causal: self.keys.end == self.queries.end }
    }
}

/// Blocks of `block` queries and `block` keys: for each block of queries, the blocks of keys in order.
pub(super) fn blocks(shape: &AttentionShape, block: usize) -> Vec<ScoreBlock> {
    let of = |queries: Range<usize>| {
        let keys = shape.key_blocks(&queries, block).into_iter();
        keys.map(move |keys| ScoreBlock { queries: queries.clone(), keys })
    };
    shape.query_blocks(block).flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape =
        AttentionShape { batch: 2, seq_length: 1000, heads: 4, kv_heads: 2, head_dim: 64, scale: 1.0, window: None, softcap: None };

    fn cut(window: Option<usize>, block: usize) -> Vec<(Range<usize>, Range<usize>)> {
        blocks(&AttentionShape { window, ..SHAPE }, block).into_iter().map(|block| (block.queries, block.keys)).collect()
    }

    #[test]
    fn a_block_attends_to_earlier_blocks_or_those_of_its_window() {
        assert_eq!(cut(None, 1000), [(0..1000, 0..1000)]);
        assert_eq!(cut(None, 512), [(0..512, 0..512), (512..1000, 0..512), (512..1000, 512..1000)]);
        assert_eq!(cut(Some(256), 512), [(0..512, 0..512), (512..1000, 256..1000)]);
        assert_eq!(cut(Some(1), 512)[1], (512..1000, 512..1000));
        // Query 512 sees key 413.
        assert_eq!(cut(Some(100), 512)[1], (512..1000, 384..1000));
    }

    #[test]
    fn keys_before_all_queries_are_seen_by_all() {
        let sizes: Vec<_> = blocks(&SHAPE, 512).iter().map(ScoreBlock::size).collect();
        let size = |queries, keys, is_causal| BlockSize { queries, keys, is_causal };
        assert_eq!(sizes, [size(512, 512, true), size(488, 512, false), size(488, 488, true)]);
    }
}
