//! Limits of a machine: the largest batch, sequence and model that fit, and the number of tokens below which the optimizer is exposed.

use crate::error::Result;
use crate::hardware::profile::Profile;
use crate::model::tensors::TensorTable;
use crate::planner::machine::Machine;
use crate::planner::order::in_segments;
use crate::planner::plan::Plan;
use crate::request::Request;
use crate::request::choices::{ActivationsChoice, EarlyRows, ResidentBuckets, WeightsChoice};
use crate::request::cut::{StepCut, StepSplit};
use crate::request::wanted::Wanted;
use crate::simulate::clip::Clip;
use crate::simulate::simulate;
use crate::simulate::timed::Steps;
use serde::Serialize;

/// Upper bounds of the search for limits.
const BATCH_MAX: usize = 1 << 14;
const LAYERS_MAX: usize = 1 << 11;
/// Step between tried sequence lengths, in tokens.
const SEQ_LENGTH_GRAIN: usize = 1024;
/// The optimizer counts as hidden if compute waits for it in less than this fraction of a step. A part is always exposed: the backward pass
/// writes last the gradients of the weights that the forward pass reads first, among them the embeddings.
const HIDDEN: f64 = 0.1;
const SEQ_LENGTH_MIN: usize = 64;
const STEPS: Steps = Steps { warmup: 2, timed: 3, clip: Clip::Never };

/// The largest value of each dimension that fits while the others stay fixed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Limits {
    /// Sequences of a micro-batch; 0 if not even one fits.
    pub batch: usize,
    /// Tokens of one sequence with a batch of 1, at most the positions of the model.
    pub seq_length: usize,
    /// Whether the model's positions limit the sequence, and not memory.
    pub(crate) seq_length_is_the_models: bool,
    /// Layers of a model with this width.
    pub layers: usize,
    pub params: usize,
}

impl Limits {
    /// The limits of `request` on `machine`.
    pub(crate) fn of(request: &Request, machine: &Machine) -> Self {
        let (fits, shape) = (|request: &Request| fits(request, machine), request.shape());
        let batch = largest(BATCH_MAX, |batch| fits(&request.with_micro_batch(batch)));
        let with_length = |seq_length| request.with_micro_batch(1).with_seq_length(seq_length);
        let seq_length_is_the_models = fits(&with_length(shape.max_positions));
        let grains = || largest(shape.max_positions / SEQ_LENGTH_GRAIN, |grains| fits(&with_length(grains * SEQ_LENGTH_GRAIN)));
        let seq_length = if seq_length_is_the_models { shape.max_positions } else { grains() * SEQ_LENGTH_GRAIN };
        let LargestModel { layers, params, .. } = LargestModel::of(request, machine);
        Self { batch, seq_length, seq_length_is_the_models, layers, params }
    }
}

/// The largest model of one width that fits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct LargestModel {
    /// Number of GPUs.
    pub gpus: usize,
    pub layers: usize,
    pub params: usize,
}

impl LargestModel {
    /// The largest model for `request` with the width of its model on `machine`.
    fn of(request: &Request, machine: &Machine) -> Self {
        let shape = request.shape();
        let fits = |layers: usize| fits(&request.with_shape(shape.with_layers(layers)), machine);
        // With fewer layers, streaming may save no memory and is rejected. That is not a limit.
        let layers_here = if fits(shape.layers.len()) { shape.layers.len() } else { 0 };
        let layers = largest(LAYERS_MAX, |layers| layers <= layers_here || fits(layers));
        let params = if layers > 0 { TensorTable::new(&shape.with_layers(layers)).params() } else { 0 };
        Self { gpus: request.cut.gpus, layers, params }
    }

    /// The largest models on 1, 2, 4 and 8 GPUs, as far as `profile` has rates for them. Empty if it knows a single GPU only.
    pub(crate) fn by_gpus(request: &Request, profile: &Profile) -> Vec<Self> {
        let is_possible = |gpus: &usize| *gpus <= profile.gpus() && gpus.is_multiple_of(request.cut.sequence_ranks);
        let known = [1, 2, 4, 8].into_iter().filter(|gpus| profile.gpus() > 1 && is_possible(gpus));
        let on = |gpus| {
            // One micro-batch for each GPU, which is a gradient share.
            let mut request = request.clone();
            request.cut = StepCut { gpus, shares: None, group: None, ..request.cut };
            request.wanted.split.accumulation = None;
            Machine::of_run(profile, &request.cut).ok().map(|machine| Self::of(&request, &machine))
        };
        known.filter_map(on).collect()
    }
}

/// Whether `request` has a plan that fits, in the usual order or in segments of layers.
fn fits(request: &Request, machine: &Machine) -> bool {
    fits_in_order(request, machine) || in_segments(request).any(|request| fits_in_order(&request, machine))
}

/// Whether `request` has a plan that fits in its order, or in the usual one if the order is open. Two uniform policies with little memory
/// are tried first. They are among the candidates of every plan whose policies are open, so a plan fits if one of them does.
fn fits_in_order(request: &Request, machine: &Machine) -> bool {
    // A request for streams or early rows is refused if the fastest plan that fits has none, so all candidates count.
    let any_will_do =
        matches!(request.wanted.weights, WeightsChoice::Auto | WeightsChoice::Replicated) && request.early_rows != EarlyRows::On;
    if !any_will_do {
        return has_plan(request, machine);
    }
    let least = [ActivationsChoice::RecomputeBlock, ActivationsChoice::Host];
    let with = |activations| Request { wanted: Wanted { activations, ..request.wanted.clone() }, ..request.clone() };
    let is_open = request.wanted.activations == ActivationsChoice::Auto;
    is_open && least.into_iter().any(|activations| Plan::fits(&with(activations), machine)) || Plan::fits(request, machine)
}

/// Whether the fastest plan of `request` fits.
fn has_plan(request: &Request, machine: &Machine) -> bool {
    Plan::new(request, machine, false).is_ok_and(|plan| plan.shortage().is_none())
}

/// The largest value in `1..=max` that `fits`, or 0. `fits` must be monotonic.
fn largest(max: usize, fits: impl Fn(usize) -> bool) -> usize {
    // Doubles first, because large values are slow to try.
    let mut high = 1;
    while high <= max && fits(high) {
        high *= 2;
    }
    let (mut low, mut high) = (high / 2, high.min(max + 1));
    while low + 1 < high {
        let middle = low.midpoint(high);
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

/// The micro-step from which the optimizer on the CPUs is hidden, and the plan below that size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct BreakEven {
    /// Tokens of a micro-step from which the optimizer is hidden with every state on the CPUs; `None` if it is exposed at every batch that
    /// fits.
    pub tokens: Option<usize>,
    /// Tokens of a micro-step of half that size, or of the largest that fits.
    pub(crate) below_tokens: usize,
    /// Number of buckets at `below_tokens`.
    pub buckets: usize,
    /// Resident buckets of the plan at `below_tokens`.
    pub(crate) resident_buckets: usize,
    /// Fraction of the step at `below_tokens` in which compute waits for the optimizer.
    pub(crate) exposed_share: f64,
}

impl BreakEven {
    /// The break-even of `request` on `machine`; `None` if nothing can be offloaded.
    ///
    /// # Errors
    /// Errors of [`Plan::new`] and of the simulation.
    pub(crate) fn of(request: &Request, machine: &Machine) -> Result<Option<Self>> {
        let sizes = sizes(request);
        let with = |(micro_batch, seq_length): (usize, usize), resident_buckets| {
            let split = StepSplit { micro_batch, accumulation: Some(1) };
            let cut = StepCut { seq_length, shares: None, group: None, ..request.cut };
            Request { cut, wanted: Wanted { split, resident_buckets, ..request.wanted.clone() }, ..request.clone() }
        };
        let (mut hides, mut fitting) = (None, None);
        for size in sizes {
            let Some((exposed, _)) = exposed_share(&with(size, ResidentBuckets::Count(0)), machine)? else { break };
            fitting = Some(size);
            if exposed < HIDDEN {
                hides = Some(size);
                break;
            }
        }
        let Some((batch, seq_length)) = hides.map(half).or(fitting) else { return Ok(None) };
        let below = with((batch, seq_length), ResidentBuckets::Auto);
        let Some((exposed_share, plan)) = exposed_share(&below, machine)? else { return Ok(None) };
        let buckets = plan.placement.layout.count();
        Ok(Some(Self {
            tokens: hides.map(|(batch, seq_length)| batch * seq_length),
            below_tokens: batch * seq_length,
            buckets,
            resident_buckets: buckets - plan.placement.layout.offloaded(),
            exposed_share,
        }))
    }
}

/// Batches and sequence lengths with ascending tokens: first short sequences, then larger batches.
fn sizes(request: &Request) -> Vec<(usize, usize)> {
    let seq_length = request.cut.seq_length.min(request.shape().max_positions);
    let shorter = std::iter::successors(Some(seq_length), |s| Some(s / 2)).take_while(|s| *s >= SEQ_LENGTH_MIN.min(seq_length));
    let shorter = shorter.filter(|length| length.is_multiple_of(request.cut.sequence_ranks));
    let mut sizes: Vec<_> = shorter.map(|seq_length| (1, seq_length)).collect();
    sizes.reverse();
    sizes.extend((2..=4).map(|batch| (batch, seq_length)));
    sizes.extend(std::iter::successors(Some(6), |b| Some(b + b / 3)).take_while(|b| *b <= 512).map(|batch| (batch, seq_length)));
    sizes
}

fn half((batch, seq_length): (usize, usize)) -> (usize, usize) {
    if batch > 1 { (batch / 2, seq_length) } else { (1, (seq_length / 2).max(1)) }
}

/// Fraction of a step in which compute waits for the optimizer; `None` if the plan does not fit.
fn exposed_share(request: &Request, machine: &Machine) -> Result<Option<(f64, Plan)>> {
    let plan = Plan::new(request, machine, false)?;
    if plan.shortage().is_some() {
        return Ok(None);
    }
    let (outcome, ..) = simulate(&plan, request.shape(), &machine.rates.profile, STEPS, 0)?;
    Ok(Some(((outcome.exposed.cpu_ms + outcome.exposed.transfer_ms) / outcome.step_ms.median, plan)))
}

#[cfg(all(test, feature = "weight-flow", feature = "repartition"))]
mod tests {
    use super::*;
    use crate::config::settings::Settings;
    use crate::model::presets;
    use crate::units::Bytes;
    use std::path::Path;

    /// Depths around the limit of machines that are short of device memory, of host memory, and of both.
    #[test]
    fn the_policies_with_the_least_memory_decide_as_all_candidates_do() {
        let shape = presets::shape(Path::new("qwen3-4b")).unwrap();
        let mut counts = [0, 0];
        for (hbm_limit, host_limit) in [(8_u64 << 30, None), (40 << 30, Some(24_u64 << 30)), (4 << 30, Some(48 << 30))] {
            for layers in [1, 4, 12, 24, 36, 60] {
                for (weights, micro_batch) in [(WeightsChoice::Auto, 1), (WeightsChoice::Replicated, 4), (WeightsChoice::Flow, 1)] {
                    let settings = Settings { weights, seq_length: 2048, per_device_train_batch_size: micro_batch, ..Settings::demo() };
                    let mut request = settings.request(&shape.with_layers(layers));
                    (request.site.hbm_limit, request.site.host_limit) = (Some(Bytes(hbm_limit)), host_limit.map(Bytes));
                    let machine = Machine::of_run(&Profile::load("h100").unwrap(), &request.cut).unwrap();
                    let expected = has_plan(&request, &machine);
                    assert_eq!(fits(&request, &machine), expected, "{layers} layers of {weights:?} in {hbm_limit} and {host_limit:?}");
                    counts[usize::from(expected)] += 1;
                }
            }
        }
        assert!(counts.into_iter().all(|count| count >= 10), "{counts:?}");
    }
}
