//! Blocks of queries, one after another, where a sequence's scores take too much memory at once.

use crate::device::AttentionShape;
use std::ops::Range;

/// A block's first key is a multiple of this, so that cuDNN's tiles are whole and blocks behind a window have one plan.
const KEY_GRAIN: usize = 128;

/// Queries of a sequence, and the keys that some of them see, up to the last of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QueryBlock {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl QueryBlock {
    /// Numbers of queries and of keys.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.queries.len(), self.keys.len())
    }
}

/// Blocks of `block` queries.
pub(super) fn query_blocks(shape: &AttentionShape, block: usize) -> impl Iterator<Item = QueryBlock> + use<> {
    let window = shape.window;
    shape.query_blocks(block).map(move |queries| {
        let seen = window.map_or(0, |window| (queries.start + 1).saturating_sub(window));
        QueryBlock { keys: seen / KEY_GRAIN * KEY_GRAIN..queries.end, queries }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape =
        AttentionShape { batch: 2, seq_length: 1000, heads: 4, kv_heads: 2, head_dim: 64, scale: 1.0, window: None, softcap: None };

    fn blocks(window: Option<usize>, block: usize) -> Vec<(Range<usize>, Range<usize>)> {
        query_blocks(&AttentionShape { window, ..SHAPE }, block).map(|block| (block.queries, block.keys)).collect()
    }

    #[test]
    fn a_block_sees_all_before_it_or_what_its_window_leaves() {
        assert_eq!(blocks(None, 1000), [(0..1000, 0..1000)]);
        assert_eq!(blocks(None, 512), [(0..512, 0..512), (512..1000, 0..1000)]);
        assert_eq!(blocks(Some(256), 512), [(0..512, 0..512), (512..1000, 256..1000)]);
        assert_eq!(blocks(Some(1), 512)[1], (512..1000, 512..1000));
        // Query 512 sees key 413.
        assert_eq!(blocks(Some(100), 512)[1], (512..1000, 384..1000));
    }
}
