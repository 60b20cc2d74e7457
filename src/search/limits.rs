//! Limits of a machine: the largest batch, sequence and model that fit, and the number of tokens below which the optimizer is exposed.

use crate::config::options::ResidentBuckets;
use crate::config::settings::Settings;
use crate::error::Result;
use crate::hardware::profile::Profile;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
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
    /// The limits of `settings` for `shape` on `machine`.
    pub(crate) fn of(settings: &Settings, shape: &ModelShape, machine: &Machine) -> Self {
        let fits = |settings: &Settings, shape: &ModelShape| fits(settings, shape, machine);
        let with_batch = |batch| Settings { per_device_train_batch_size: batch, ..settings.clone() };
        let batch = largest(BATCH_MAX, |batch| fits(&with_batch(batch), shape));
        let with_length = |seq_length| Settings { seq_length, ..with_batch(1) };
        let seq_length_is_the_models = fits(&with_length(shape.max_positions), shape);
        let grains = || largest(shape.max_positions / SEQ_LENGTH_GRAIN, |grains| fits(&with_length(grains * SEQ_LENGTH_GRAIN), shape));
        let seq_length = if seq_length_is_the_models { shape.max_positions } else { grains() * SEQ_LENGTH_GRAIN };
        let LargestModel { layers, params, .. } = LargestModel::of(settings, shape, machine);
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
    /// The largest model for `settings` with the width of `shape` on `machine`.
    fn of(settings: &Settings, shape: &ModelShape, machine: &Machine) -> Self {
        let fits = |shape: &ModelShape| fits(settings, shape, machine);
        // With fewer layers, streaming may save no memory and is rejected. That is not a limit.
        let layers_here = if fits(shape) { shape.layers.len() } else { 0 };
        let layers = largest(LAYERS_MAX, |layers| layers <= layers_here || fits(&shape.with_layers(layers)));
        let params = if layers > 0 { TensorTable::new(&shape.with_layers(layers)).params() } else { 0 };
        Self { gpus: settings.gpus, layers, params }
    }

    /// The largest models on 1, 2, 4 and 8 GPUs, as far as `profile` has rates for them. Empty if it knows a single GPU only.
    pub(crate) fn by_gpus(settings: &Settings, shape: &ModelShape, profile: &Profile) -> Vec<Self> {
        let is_possible = |gpus: &usize| *gpus <= profile.gpus() && gpus.is_multiple_of(settings.sequence_ranks);
        let known = [1, 2, 4, 8].into_iter().filter(|gpus| profile.gpus() > 1 && is_possible(gpus));
        let on = |gpus| {
            // One micro-batch for each GPU, which is a gradient share.
            let settings =
                Settings { gpus, gradient_shares: None, gradient_group: None, gradient_accumulation_steps: None, ..settings.clone() };
            Machine::of_run(profile, &settings).ok().map(|machine| Self::of(&settings, shape, &machine))
        };
        known.filter_map(on).collect()
    }
}

fn fits(settings: &Settings, shape: &ModelShape, machine: &Machine) -> bool {
    Plan::new(settings, shape, machine, false).is_ok_and(|plan| plan.shortage().is_none())
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
    /// The break-even of `settings` for `shape` on `machine`; `None` if nothing can be offloaded.
    ///
    /// # Errors
    /// Errors of [`Plan::new`] and of the simulation.
    pub(crate) fn of(settings: &Settings, shape: &ModelShape, machine: &Machine) -> Result<Option<Self>> {
        let sizes = sizes(settings, shape);
        let all_offloaded = |(batch, seq_length): (usize, usize)| Settings {
            per_device_train_batch_size: batch,
            seq_length,
            gradient_accumulation_steps: Some(1),
            gradient_shares: None,
            gradient_group: None,
            resident_buckets: ResidentBuckets::Count(0),
            ..settings.clone()
        };
        let (mut hides, mut fitting) = (None, None);
        for size in sizes {
            let Some((exposed, _)) = exposed_share(&all_offloaded(size), shape, machine)? else { break };
            fitting = Some(size);
            if exposed < HIDDEN {
                hides = Some(size);
                break;
            }
        }
        let Some((batch, seq_length)) = hides.map(half).or(fitting) else { return Ok(None) };
        let below = Settings { resident_buckets: ResidentBuckets::Auto, ..all_offloaded((batch, seq_length)) };
        let Some((exposed_share, plan)) = exposed_share(&below, shape, machine)? else { return Ok(None) };
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
fn sizes(settings: &Settings, shape: &ModelShape) -> Vec<(usize, usize)> {
    let seq_length = settings.seq_length.min(shape.max_positions);
    let shorter = std::iter::successors(Some(seq_length), |s| Some(s / 2)).take_while(|s| *s >= SEQ_LENGTH_MIN.min(seq_length));
    let shorter = shorter.filter(|length| length.is_multiple_of(settings.sequence_ranks));
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
fn exposed_share(settings: &Settings, shape: &ModelShape, machine: &Machine) -> Result<Option<(f64, Plan)>> {
    let plan = Plan::new(settings, shape, machine, false)?;
    if plan.shortage().is_some() {
        return Ok(None);
    }
    let (outcome, ..) = simulate(&plan, shape, &machine.rates.profile, STEPS, 0)?;
    Ok(Some(((outcome.exposed.cpu_ms + outcome.exposed.transfer_ms) / outcome.step_ms.median, plan)))
}
