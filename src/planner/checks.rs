//! Checks that a model, a device and the processes support the settings.

use super::budget::Rings;
use crate::bucket::layout::BucketLayout;
use crate::device::{DeviceKind, RouterRule};
use crate::error::{Error, Result};
use crate::model::layer_shape::Moe;
use crate::model::tensors::TensorTable;
use crate::model::{fp8, heads};
use crate::optim::norm::BLOCK;
use crate::request::Request;
use crate::request::choices::WeightsChoice;
use clap::ValueEnum;

/// The value of the flag `--weights`.
pub(super) fn name(weights: WeightsChoice) -> String {
    weights.to_possible_value().map_or(String::new(), |value| value.get_name().to_string())
}

/// Checks that a requested weight ring is shorter than the weights.
pub(super) fn check_streams(weights: WeightsChoice, rings: Rings) -> Result<()> {
    if matches!(weights, WeightsChoice::Sharded | WeightsChoice::FullySharded) && rings.weights.is_none() {
        return Err(Error::usage(format!(
            "--weights {}: no memory would be saved: the model has too few layers besides the two that each device holds, or its layers \
                are small compared with the device's pages; use --weights replicated",
            name(weights)
        )));
    }
    if weights == WeightsChoice::Flow && rings.weights.is_none() {
        return Err(Error::usage(
            "--weights flow: no memory would be saved: too few layers are offloaded, or they are small compared with the device's pages",
        ));
    }
    Ok(())
}

/// Checks that the model and the device support `request`.
pub(super) fn check(request: &Request, table: &TensorTable, kind: DeviceKind) -> Result<()> {
    if table.specs().is_empty() {
        return Err(Error::usage("every tensor of the model is frozen, so nothing is left to train"));
    }
    if kind == DeviceKind::Cpu {
        request.site.check_needs_no_gpu(request.kernels)?;
    }
    check_inject(request, table)?;
    check_balance(request)?;
    check_sequences(request)
}

/// Checks that the model supports the requested format of matrix products.
pub(super) fn check_products(request: &Request) -> Result<()> {
    if request.recipe.numerics.fp8 { fp8::check(request.shape(), request.step().tokens_of_rank()) } else { Ok(()) }
}

/// Checks that the model has routers that a requested load-balancing loss can balance: the loss is one of softmaxes.
fn check_balance(request: &Request) -> Result<()> {
    let coefficient = request.recipe.router_aux_loss_coef;
    let lacking = match request.shape().layers.iter().find_map(|layer| layer.mlp.moe()) {
        _ if coefficient == 0.0 => return Ok(()),
        None => "the model has no experts to balance",
        Some(Moe { rule: RouterRule::Sigmoid(_), .. }) => "the loss is not defined for the model's routers, which choose by sigmoids",
        Some(_) => return Ok(()),
    };
    Err(Error::usage(format!("--router-aux-loss-coef {coefficient}: {lacking}; leave it out")))
}

/// Checks that ranks can share sequences. The search may try lengths and numbers of devices for which they cannot.
fn check_sequences(request: &Request) -> Result<()> {
    request.cut.check_sequence_ranks(request.recipe.router_aux_loss_coef)?;
    heads::check_degree(&request.shape().layers, request.cut.sequence_ranks).map_err(Error::usage)
}

/// Checks the limits of several devices.
pub(super) fn check_ranks(request: &Request, layout: &BucketLayout) -> Result<()> {
    let (ranks, all) = (request.cut.ranks(), request.cut.ranks_in_words());
    match request.wanted.weights {
        _ if ranks == 1 => Ok(()),
        _ if request.cut.processes > 1 && !layout.is_uniform() => Err(Error::usage(format!(
            "{all}: this optimizer needs whole tensors in a bucket, and checkpoints of several processes hold buckets of equal sizes; use \
             --processes 1"
        ))),
        WeightsChoice::Flow => Err(Error::usage(format!("--weights flow cannot be combined with {all}: use --weights sharded"))),
        _ if layout.flat_elems() / BLOCK < ranks => Err(Error::usage(format!(
            "{all}: the trained tensors have {} elements, too few blocks of {BLOCK} for each to own one; train more tensors, or \
             use fewer devices",
            layout.flat_elems()
        ))),
        _ if layout.bucket_elems() / BLOCK < ranks => Err(Error::usage(format!(
            "{all}: a bucket of {} elements has too few blocks of {BLOCK} for each to own one; use a larger --bucket-mib",
            layout.bucket_elems()
        ))),
        _ => Ok(()),
    }
}

/// Checks that an injected fault is inside a tensor. Padding between tensors has no gradient, so a fault there would never be overwritten.
fn check_inject(request: &Request, table: &TensorTable) -> Result<()> {
    let outside = |element: usize| !table.specs().iter().any(|spec| spec.range().contains(&element));
    match request.recipe.inject.iter().find(|i| outside(i.element)) {
        None => Ok(()),
        Some(i) => {
            Err(Error::usage(format!("inject: element {} of the flat order of {} belongs to no tensor", i.element, table.flat_elems())))
        }
    }
}
