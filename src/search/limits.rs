//! How far a machine goes: the largest batch, sequence and model that fit, and below how many tokens the optimizer shows.

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

/// Beyond these nobody looks.
const BATCH_MAX: usize = 1 << 14;
const LAYERS_MAX: usize = 1 << 11;
/// Sequences grow in steps of so many tokens.
const SEQ_LENGTH_GRAIN: usize = 1024;
/// The optimizer hides when compute waits for it in less than this share of a step. Some always shows: what backward writes last is
/// what forward reads first, embeddings and all.
const HIDDEN: f64 = 0.1;
const SEQ_LENGTH_MIN: usize = 64;
const STEPS: Steps = Steps { warmup: 2, timed: 3, clip: Clip::Never };

/// The largest of each that fits while the others stay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Limits {
    /// Sequences of a micro-batch; 0 when not even one fits.
    pub batch: usize,
    /// Tokens of one sequence, with a batch of 1; at most what the model has positions for.
    pub seq_length: usize,
    /// Whether the model's positions, not memory, end the sequence.
    pub(crate) seq_length_is_the_models: bool,
    /// Layers of a model that is as wide as this one.
    pub layers: usize,
    pub params: usize,
}

impl Limits {
    /// Those of `settings` for `shape` on `machine`.
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
    /// On so many GPUs.
    pub gpus: usize,
    pub layers: usize,
    pub params: usize,
}

impl LargestModel {
    /// That of `settings` as wide as `shape` on `machine`.
    fn of(settings: &Settings, shape: &ModelShape, machine: &Machine) -> Self {
        let fits = |shape: &ModelShape| fits(settings, shape, machine);
        // With fewer layers streaming weights may save nothing, and is refused: that is no limit.
        let layers_here = if fits(shape) { shape.layers.len() } else { 0 };
        let layers = largest(LAYERS_MAX, |layers| layers <= layers_here || fits(&shape.with_layers(layers)));
        let params = if layers > 0 { TensorTable::new(&shape.with_layers(layers)).params() } else { 0 };
        Self { gpus: settings.gpus, layers, params }
    }

    /// Those on one GPU, two, four and eight, as far as `profile` knows so many together; none where it knows one.
    pub(crate) fn by_gpus(settings: &Settings, shape: &ModelShape, profile: &Profile) -> Vec<Self> {
        let is_possible = |gpus: &usize| *gpus <= profile.gpus() && gpus.is_multiple_of(settings.sequence_ranks);
        let known = [1, 2, 4, 8].into_iter().filter(|gpus| profile.gpus() > 1 && is_possible(gpus));
        let on = |gpus| {
            // A micro-batch for each, of which each is a share.
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

/// The largest of `1..=max` that `fits`, 0 if none does; what fits must fit when it is smaller.
fn largest(max: usize, fits: impl Fn(usize) -> bool) -> usize {
    // By doubling first: large ones are costly to try.
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

/// Where the optimizer on the CPUs begins to hide, and what is done below.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct BreakEven {
    /// Tokens of a micro-step from which it hides with every state on the CPUs; `None`: it does not with any batch that fits.
    pub tokens: Option<usize>,
    /// Tokens of a micro-step with half of that, or of the largest that fits.
    pub(crate) below_tokens: usize,
    /// Buckets, and those that the plan then keeps on the device.
    pub buckets: usize,
    /// See [`BreakEven::buckets`].
    pub(crate) resident_buckets: usize,
    /// Share of that step in which compute waits for the optimizer.
    pub(crate) exposed_share: f64,
}

impl BreakEven {
    /// That of `settings` for `shape` on `machine`; `None` where nothing can be offloaded.
    ///
    /// # Errors
    /// Those of [`Plan::new`] and of the simulation.
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
        let buckets = plan.layout.count();
        Ok(Some(Self {
            tokens: hides.map(|(batch, seq_length)| batch * seq_length),
            below_tokens: batch * seq_length,
            buckets,
            resident_buckets: buckets - plan.layout.offloaded(),
            exposed_share,
        }))
    }
}

/// Batches and sequence lengths from few tokens to many: shorter sequences one by one, then larger batches.
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

/// The share of a step in which compute waits for the optimizer; `None` when it does not fit.
fn exposed_share(settings: &Settings, shape: &ModelShape, machine: &Machine) -> Result<Option<(f64, Plan)>> {
    let plan = Plan::new(settings, shape, machine, false)?;
    if plan.shortage().is_some() {
        return Ok(None);
    }
    let (outcome, ..) = simulate(&plan, shape, &machine.rates.profile, STEPS, 0)?;
    Ok(Some(((outcome.exposed.cpu_ms + outcome.exposed.transfer_ms) / outcome.step_ms.median, plan)))
}
