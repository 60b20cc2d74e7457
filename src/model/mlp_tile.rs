//! The MLP of a long micro-batch is computed in tiles of tokens, so that its wide arrays exist for one tile at a time. Layers that save
//! these arrays save them for all tokens, and compute in the same tiles.

use super::Model;
use super::activation_arrays::{LayerActivations, NormActivations, RawActivations};
use crate::device::DeviceSlice;
use std::ops::Range;

/// Tokens of a tile. Products of a tile are as fast as products of all tokens; gradients of weights are rounded once for each tile.
const TILE_TOKENS: usize = 32 << 10;
/// Maximum tokens without tiles.
const WHOLE_TOKENS: usize = 64 << 10;

/// Tokens of a tile, if an MLP of `tokens` is divided. Sums over tiles change bits, so the size follows from the shape alone, not from
/// available memory. FP8 products have one scale for all tokens, and are not divided.
pub(crate) fn tile_tokens(tokens: usize, fp8: bool) -> Option<usize> {
    (tokens > WHOLE_TOKENS && !fp8).then_some(TILE_TOKENS)
}

/// A tile of tokens in a layer's MLP.
pub(super) struct MlpTile {
    tokens: Range<usize>,
    of: usize,
    /// The layer's activations with the MLP's arrays limited to the tile.
    pub act: LayerActivations,
}

impl MlpTile {
    /// The tile's rows of an array of all tokens.
    pub(super) fn rows(&self, all: DeviceSlice) -> DeviceSlice {
        rows(all, &self.tokens, all.elems() / self.of)
    }

    /// Whether the tile contains all tokens.
    pub(super) fn is_whole(&self) -> bool {
        self.tokens.len() == self.of
    }
}

impl Model {
    /// Tiles of the MLP of `layer`, in order. Experts process all tokens at once, because they sort them.
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

/// `act` with the MLP's arrays limited to `tokens`.
fn narrowed(act: &LayerActivations, tokens: &Range<usize>, of: usize, (cols_in, cols_act): (usize, usize)) -> LayerActivations {
    let all = |slice: DeviceSlice| rows(slice, tokens, slice.elems() / of);
    // An array that is not saved has the size of one tile.
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
