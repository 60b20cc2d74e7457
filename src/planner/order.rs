//! The segments of layers of a requested order, and the combinations that have no segments.

use crate::error::{Error, Result};
use crate::model::head_rows::HeadRows;
use crate::model::segments::LayerSegments;
use crate::request::Request;
use crate::request::choices::{ActivationsChoice, LayerOrder};
use crate::request::wanted::Wanted;

/// Layers of a segment that are tried.
pub(crate) const SEGMENT_LAYERS: [usize; 5] = [1, 2, 3, 4, 8];

/// Whether the order of layers is open, and each device of a single process has several micro-batches in a step.
pub(crate) fn may_have_segments(request: &Request) -> bool {
    let micro_batches = request.step().micro_batches_each(request.cut.ranks());
    request.wanted.layer_order == LayerOrder::Auto && request.cut.processes == 1 && micro_batches > 1
}

/// `request` with its layers in segments that are tried, if its order is open. Segments without a turn take least memory.
pub(crate) fn in_segments(request: &Request) -> impl Iterator<Item = Request> {
    let lengths = SEGMENT_LAYERS.into_iter().filter(|_| may_have_segments(request));
    lengths.map(|layers| request.with(Wanted { layer_order: LayerOrder::Segments { layers, turn: 0 }, ..request.wanted.clone() }))
}

/// The segments of `request`.
///
/// # Errors
/// `Usage` that names the order, the setting that it cannot be combined with, and a remedy.
pub(super) fn segments(request: &Request) -> Result<LayerSegments> {
    let layers = request.shape().layers.len();
    let LayerOrder::Segments { layers: each, turn } = request.wanted.layer_order else { return Ok(LayerSegments::whole(layers)) };
    let segments = LayerSegments::new(layers, each, turn);
    match obstacle(request).filter(|_| !segments.is_whole()) {
        Some(obstacle) => Err(Error::usage(format!("--layer-order {} {obstacle}, or --layer-order whole", request.wanted.layer_order))),
        None => Ok(segments),
    }
}

fn obstacle(request: &Request) -> Option<&'static str> {
    let shape = request.shape();
    match request {
        _ if request.cut.processes > 1 => Some("needs all devices in one process: use --processes 1"),
        _ if shape.tied && request.kernels.head_rows.resolve() == HeadRows::Trained => {
            Some("needs all rows of the head, because the output matrix is the embedding: use --head-rows all")
        }
        _ if matches!(request.wanted.activations, ActivationsChoice::Host | ActivationsChoice::HostAttention) => {
            Some("keeps inputs of segments in host memory, not those of layers: use --activations auto")
        }
        _ => None,
    }
}
