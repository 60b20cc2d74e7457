//! Expert bounds of all layers in one array: where the rows of each expert start and end.

use super::layer_shape::Moe;
use super::shape::ModelShape;
use super::sized_allocator::PART_ALIGN_ELEMS;
use std::ops::Range;

/// Elements between the bounds of a layer's experts and the bounds of the next layer's.
pub(super) fn bounds_stride(moe: Moe) -> usize {
    (moe.experts + 1).next_multiple_of(PART_ALIGN_ELEMS)
}

/// Elements of the expert bounds of all layers.
pub(crate) fn bounds_elems(shape: &ModelShape) -> usize {
    shape.layers.iter().filter_map(|layer| layer.mlp.moe()).map(bounds_stride).sum()
}

/// Elements of the expert bounds of `layers`.
pub(super) fn bounds_of(shape: &ModelShape, layers: Range<usize>) -> Range<usize> {
    let before = |layer: usize| shape.layers[..layer].iter().filter_map(|layer| layer.mlp.moe()).map(bounds_stride).sum();
    before(layers.start)..before(layers.end)
}

/// Range of the expert bounds of each layer with experts.
pub(crate) fn expert_bounds(shape: &ModelShape) -> impl Iterator<Item = Range<usize>> + '_ {
    shape.layers.iter().filter_map(|layer| layer.mlp.moe()).scan(0, |end, moe| {
        let start = *end;
        *end += bounds_stride(moe);
        Some(start..start + moe.experts + 1)
    })
}
