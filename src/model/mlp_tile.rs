//! The MLP of a long micro-batch goes tile by tile of its tokens, so that what is wide exists of one tile at a time. Layers that keep more keep
//! it of all tokens, and compute by the same tiles.

use super::Model;
use super::activations::{LayerActivations, NormActivations, RawActivations};
use crate::device::DeviceSlice;
use std::ops::Range;

/// Tokens of a tile. Its products are as fast as those of all tokens, and weights' gradients are rounded once for each.
const TILE_TOKENS: usize = 32 << 10;
/// So many tokens are still one.
const WHOLE_TOKENS: usize = 64 << 10;

/// Tokens of a tile, where an MLP of `tokens` goes in several. Sums over tiles change bits, so it follows from the shape alone, whatever
/// memory there is. Products in FP8 keep their inputs with one scale, and go whole.
pub(crate) fn tile_tokens(tokens: usize, fp8: bool) -> Option<usize> {
    (tokens > WHOLE_TOKENS && !fp8).then_some(TILE_TOKENS)
}

/// Some tokens of a layer's MLP.
pub(super) struct MlpTile {
    tokens: Range<usize>,
    of: usize,
    /// What the MLP reads and writes of them; all else is the whole layer's.
    pub act: LayerActivations,
}

impl MlpTile {
    /// Their rows of an array of all tokens.
    pub(super) fn rows(&self, all: DeviceSlice) -> DeviceSlice {
        rows(all, &self.tokens, all.elems() / self.of)
    }

    /// There are no others.
    pub(super) fn is_whole(&self) -> bool {
        self.tokens.len() == self.of
    }
}

impl Model {
    /// All tokens of the MLP of `layer`, in order. Experts sort them and take all at once.
    pub(super) fn mlp_tiles(&self, layer: usize) -> impl Iterator<Item = MlpTile> + use<> {
        let (act, of, shape) = (self.activations.layers[layer], self.activations.tokens.elems(), self.shape.layers[layer]);
        let tile = if shape.mlp.moe().is_none() { self.activations.mlp_tile } else { of };
        (0..of).step_by(tile).map(move |first| {
            let tokens = first..(first + tile).min(of);
            let act = if tokens.len() < of { narrowed(&act, &tokens, of, shape.mlp_cols()) } else { act };
            MlpTile { tokens, of, act }
        })
    }
}

/// `act`, with what the MLP of `tokens` reads and writes instead of what that of all does.
fn narrowed(act: &LayerActivations, tokens: &Range<usize>, of: usize, (cols_in, cols_act): (usize, usize)) -> LayerActivations {
    let all = |slice: DeviceSlice| rows(slice, tokens, slice.elems() / of);
    // What is not kept is there of one tile.
    let wide = |slice: DeviceSlice, cols: usize| {
        if slice.elems() == of * cols { rows(slice, tokens, cols) } else { slice.slice(0, tokens.len() * cols) }
    };
    LayerActivations {
        mid: all(act.mid),
        mlp_norm: NormActivations { out: all(act.mlp_norm.out), stats: all(act.mlp_norm.stats) },
        mlp_in: wide(act.mlp_in, cols_in),
        mlp_act: wide(act.mlp_act, cols_act),
        post_mlp: RawActivations { raw: all(act.post_mlp.raw), stats: all(act.post_mlp.stats) },
        ..*act
    }
}

fn rows(array: DeviceSlice, tokens: &Range<usize>, cols: usize) -> DeviceSlice {
    array.slice(tokens.start * cols, tokens.len() * cols)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_micro_batches_have_tiles() {
        assert_eq!([4 * 4096, 65_536].map(|tokens| tile_tokens(tokens, false)), [None, None]);
        assert_eq!([65_537, 131_072, 1 << 20].map(|tokens| tile_tokens(tokens, false)), [Some(32_768); 3]);
        assert_eq!(tile_tokens(131_072, true), None);
    }
}
