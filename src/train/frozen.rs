//! The weights of frozen tensors, which every run reads from its model: a checkpoint names them by their checksum.

use crate::checkpoint::Loaded;
use crate::checkpoint::carried::Carrier;
use crate::config::settings::Settings;
use crate::device::Kernels;
use crate::engine::executor::Engine;
use crate::error::{Error, Result};
use crate::hub::HubQuery;
use crate::model::shape::ModelShape;
use crate::model::weights::ModelWeights;
use crate::signals::StopFlag;

/// Refuses frozen tensors of a model without weights.
///
/// # Errors
/// `Usage` if `shape` has frozen tensors and the run has no weights.
pub(super) fn expect_weights(shape: &ModelShape, has_weights: bool) -> Result<()> {
    if shape.frozen.is_empty() || has_weights {
        return Ok(());
    }
    Err(Error::usage("--freeze and --train-only: random weights cannot be frozen; give a --model with weights, and --init checkpoint"))
}

/// The carried tensors of a run of `shape` that goes on from `loaded`, if it has any. `open` opens the weights of its model.
///
/// # Errors
/// Errors of [`Carrier::frozen`] and [`Carrier::resumed`].
pub(super) fn carrier(loaded: &Loaded, shape: &ModelShape, open: impl FnOnce() -> Result<ModelWeights>) -> Result<Option<Carrier>> {
    match (shape.carries_tensors(), shape.frozen.is_empty()) {
        (false, _) => Ok(None),
        (true, true) => Carrier::resumed(loaded, open).map(Some),
        (true, false) => Carrier::frozen(loaded, open()?).map(Some),
    }
}

/// The carried tensors of the run of `loaded`, if tensors of its `shape` are frozen, outside a run with `settings`.
///
/// # Errors
/// Errors of [`carrier`]; a model that is not found.
pub(super) fn carrier_of(settings: &Settings, loaded: &Loaded, shape: &ModelShape, stop: &StopFlag) -> Result<Option<Carrier>> {
    let Some(model) = settings.model.as_deref().filter(|_| !shape.frozen.is_empty()) else { return Ok(None) };
    let dir = HubQuery { with_weights: true, stop, emit: &mut |_| () }.model(model)?;
    carrier(loaded, shape, || ModelWeights::open(&dir, shape))
}

/// Reads the frozen tensors among `weights` into `engine`, if it has any.
///
/// # Errors
/// A file that cannot be read; errors of the device.
pub(super) fn read<D: Kernels>(engine: &mut Engine<D>, weights: Option<&ModelWeights>) -> Result<()> {
    let Some(weights) = weights.filter(|weights| !weights.shape().frozen.is_empty()) else { return Ok(()) };
    weights.read_frozen(|start, block| engine.write_frozen(start, block))?;
    weights.read_packed(|start, numbers| engine.write_packed(start, numbers))
}
