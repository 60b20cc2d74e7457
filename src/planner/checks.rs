//! Checks that a model, a device and the processes support the settings.

use super::budget::Rings;
use crate::bucket::layout::BucketLayout;
use crate::config::options::{MatmulDtype, WeightsChoice};
use crate::config::settings::Settings;
use crate::device::DeviceKind;
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::model::{fp8, heads};
use crate::optim::norm::BLOCK;
use clap::ValueEnum;

/// The value of the flag `--weights`.
pub(super) fn name(weights: WeightsChoice) -> String {
    weights.to_possible_value().map_or(String::new(), |value| value.get_name().to_string())
}

/// Checks that a requested weight ring is shorter than the weights.
pub(super) fn check_streams(settings: &Settings, rings: Rings) -> Result<()> {
    if matches!(settings.weights, WeightsChoice::Sharded | WeightsChoice::FullySharded) && rings.weights.is_none() {
        return Err(Error::usage(format!(
            "--weights {}: no memory would be saved: the model has too few layers besides the two that each device holds, or its layers \
                are small compared with the device's pages; use --weights replicated",
            name(settings.weights)
        )));
    }
    if settings.weights == WeightsChoice::Flow && rings.weights.is_none() {
        return Err(Error::usage(
            "--weights flow: no memory would be saved: too few layers are offloaded, or they are small compared with the device's pages",
        ));
    }
    Ok(())
}

/// Checks that the model and the device support `settings`.
pub(super) fn check(settings: &Settings, (shape, table): (&ModelShape, &TensorTable), kind: DeviceKind) -> Result<()> {
    if kind == DeviceKind::Cpu {
        settings.check_needs_no_gpu()?;
    }
    check_inject(settings, table)?;
    check_balance(settings, shape)?;
    check_sequences(settings, shape)
}

/// Checks that the model supports the requested format of matrix products.
pub(super) fn check_products(settings: &Settings, shape: &ModelShape) -> Result<()> {
    match settings.matmul_dtype {
        Some(MatmulDtype::Fp8) => fp8::check(shape, settings.step_shape().tokens_of_rank()),
        Some(MatmulDtype::Bfloat16) | None => Ok(()),
    }
}

/// Checks that the model has experts if a load-balancing loss is requested.
fn check_balance(settings: &Settings, shape: &ModelShape) -> Result<()> {
    let coefficient = settings.router_aux_loss_coef;
    if coefficient == 0.0 || shape.experts() > 0 {
        return Ok(());
    }
    Err(Error::usage(format!("--router-aux-loss-coef {coefficient}: the model has no experts to balance; leave it out")))
}

/// Checks that ranks can share sequences. The search may try lengths and numbers of devices for which they cannot.
fn check_sequences(settings: &Settings, shape: &ModelShape) -> Result<()> {
    settings.check_sequence_ranks()?;
    heads::check_degree(&shape.layers, settings.sequence_ranks).map_err(Error::usage)
}

/// Checks the limits of several devices.
pub(super) fn check_ranks(settings: &Settings, layout: &BucketLayout) -> Result<()> {
    let (ranks, all) = (settings.ranks(), settings.ranks_in_words());
    match settings.weights {
        _ if ranks == 1 => Ok(()),
        _ if settings.processes > 1 && !layout.is_uniform() => Err(Error::usage(format!(
            "{all}: this optimizer needs whole tensors in a bucket, and checkpoints of several processes hold buckets of equal sizes; use \
             --processes 1"
        ))),
        WeightsChoice::Flow => Err(Error::usage(format!("--weights flow cannot be combined with {all}: use --weights sharded"))),
        _ if layout.bucket_elems() / BLOCK < ranks => Err(Error::usage(format!(
            "{all}: a bucket of {} elements has too few blocks of {BLOCK} for each to own one; use a larger --bucket-mib",
            layout.bucket_elems()
        ))),
        _ => Ok(()),
    }
}

/// Checks that an injected fault is inside a tensor. Padding between tensors has no gradient, so a fault there would never be overwritten.
fn check_inject(settings: &Settings, table: &TensorTable) -> Result<()> {
    let outside = |element: usize| !table.specs().iter().any(|spec| spec.range().contains(&element));
    match settings.inject.iter().find(|i| outside(i.element)) {
        None => Ok(()),
        Some(i) => {
            Err(Error::usage(format!("inject: element {} of the flat order of {} belongs to no tensor", i.element, table.flat_elems())))
        }
    }
}
