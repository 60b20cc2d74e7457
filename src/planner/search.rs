//! The plan in full: which settings give the fastest step, by simulating each on the machine's rates.
//!
//! [`super::choice`] weighs what stays on the device by arithmetic. What is left is decided here, one setting after another: each
//! is tried at its other values while the rest stay as they are best so far. Only settings that were left open are tried.

use super::machine::{DeviceMemory, Machine};
use crate::bench::clip::Clip;
use crate::bench::record::Outcome;
use crate::bench::simulate::simulate;
use crate::bench::timed::Steps;
use crate::config::options::{ActivationsChoice, CastSide, ResidentBuckets, Technique, WeightsChoice};
use crate::config::plan::Plan;
use crate::config::settings::Settings;
use crate::error::{Error, Result};
use crate::model::policy::LayerPolicy;
use crate::model::shape::ModelShape;
use clap::ValueEnum;
use std::num::NonZeroU64;

/// Steps of a simulation: one in ten is clipped, and waits for its verdict. A settled run clips fewer, a new model more.
const STEPS: Steps = Steps { warmup: 2, timed: 10, clip: Clip::OneIn(NonZeroU64::new(10).unwrap()) };
/// A change is worth making only if it makes steps this much shorter: rates are not known better.
const WORTH: f64 = 0.995;
/// What a step takes longer than simulated if every layer's input goes to the host and comes back, in comparisons. Measured on an
/// H200: 8 % where 39 of 40 layers' did (`paper-figures/results/h200-step.jsonl`, line 31), for a reason not found yet.
const HOST_DOUBT: f64 = 0.08;

/// A way to run a step, and what the simulation says about it.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// How it differs from the defaults, as flags; empty when it does not.
    pub flags: Vec<String>,
    /// All settings.
    pub settings: Settings,
    /// Their plan.
    pub plan: Plan,
    /// Its steps.
    pub outcome: Outcome,
}

impl Candidate {
    /// Seconds of a mean step.
    pub fn mean_s(&self) -> f64 {
        self.outcome.step_ms.total() / self.outcome.step_ms.samples.len() as f64 / 1e3
    }

    /// By which candidates are compared: a mean step, longer by what simulations leave out.
    pub fn weighed_s(&self) -> f64 {
        let policies = &self.plan.layer_policies;
        let on_host = policies.iter().filter(|policy| **policy == LayerPolicy::Host).count();
        self.mean_s() * (1.0 + HOST_DOUBT * on_host as f64 / policies.len() as f64)
    }
}

/// Every candidate that fits, the fastest first.
#[derive(Clone, Debug)]
pub struct Ranking {
    /// Fitting ones by [`Candidate::weighed_s`].
    pub candidates: Vec<Candidate>,
    /// Candidates that did not fit.
    pub unfit: usize,
}

/// The plan that a run of `settings` gets on `machine`, with room for a timeline if `trace`: the best of what was left open, by
/// simulation. On a device that shares the host's memory, whose rates nobody assumes, the plan of [`Plan::new`].
///
/// # Errors
/// Those of [`Question::rank`].
pub fn best_plan(settings: &Settings, shape: &ModelShape, machine: &Machine, trace: bool) -> Result<Plan> {
    if machine.device == DeviceMemory::Shared {
        let plan = Plan::new(settings, shape, machine, trace)?;
        plan.check_fits(settings, shape)?;
        return Ok(plan);
    }
    let ranking = Question { settings, tokens_per_step: None, shape, machine }.rank()?;
    let best = &ranking.candidates[0];
    let plan = Plan::new(&best.settings, shape, machine, trace)?;
    // A timeline takes host memory, too.
    plan.check_fits(&best.settings, shape)?;
    Ok(Plan { simulated_step_ms: Some(best.outcome.step_ms.median), ..plan })
}

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// What every candidate begins from; what is not left at its default stays.
    pub settings: &'a Settings,
    /// Tokens of a step, if micro-batches are to be chosen, too.
    pub tokens_per_step: Option<usize>,
    /// The model.
    pub shape: &'a ModelShape,
    /// Where.
    pub machine: &'a Machine,
}

/// One setting at another value.
struct Change {
    /// What a user would write, each option with its value.
    flags: Vec<String>,
    settings: Settings,
}

impl Question<'_> {
    /// Ranks what fits.
    ///
    /// # Errors
    /// `Usage` when settings make no sense; `Resource` when nothing fits, with the smallest change that would.
    pub fn rank(&self) -> Result<Ranking> {
        let mut ranking = Ranking { candidates: Vec::new(), unfit: 0 };
        let mut best: Option<Candidate> = None;
        for (settings, flags) in self.splits()? {
            self.weigh(settings, flags, &mut best, &mut ranking)?;
        }
        let Some(mut best) = best else { return Err(self.refusal()?) };
        for setting in SETTINGS {
            let from = best.clone();
            for change in setting(self, &from) {
                let mut better = Some(best.clone());
                self.weigh(change.settings, amended(&from.flags, change.flags), &mut better, &mut ranking)?;
                best = better.unwrap_or(best);
            }
        }
        ranking.candidates.sort_by(|a, b| a.weighed_s().total_cmp(&b.weighed_s()));
        // The best is the one with the fewest changes among those that are hardly slower.
        let at = ranking.candidates.iter().position(|candidate| candidate.flags == best.flags).unwrap_or(0);
        ranking.candidates[..=at].rotate_right(1);
        Ok(ranking)
    }

    /// Plans and simulates; takes the place of `best` if it is worth it.
    fn weigh(&self, settings: Settings, flags: Vec<String>, best: &mut Option<Candidate>, ranking: &mut Ranking) -> Result<()> {
        let Some(candidate) = self.candidate(settings, flags)? else {
            ranking.unfit += 1;
            return Ok(());
        };
        if best.as_ref().is_none_or(|best| candidate.weighed_s() < WORTH * best.weighed_s()) {
            *best = Some(candidate.clone());
        }
        ranking.candidates.push(candidate);
        Ok(())
    }

    /// A candidate, unless it does not fit or contradicts itself.
    fn candidate(&self, settings: Settings, flags: Vec<String>) -> Result<Option<Candidate>> {
        let plan = match Plan::new(&settings, self.shape, self.machine, false) {
            Err(Error::Usage(_)) if !flags.is_empty() => return Ok(None),
            plan => plan?,
        };
        if plan.shortage().is_some() {
            return Ok(None);
        }
        let (outcome, ..) = simulate(&plan, self.shape, &self.machine.rates.profile, STEPS, 0)?;
        Ok(Some(Candidate { flags, settings, plan, outcome }))
    }

    /// These settings with the most resident buckets that need no gradient ring, if their own plan has one.
    fn most_without_grad_ring(&self, settings: &Settings) -> Option<Settings> {
        let with = |count| Settings { resident_buckets: ResidentBuckets::Count(count), ..settings.clone() };
        let plan = |settings: &Settings| Plan::new(settings, self.shape, self.machine, false).ok();
        let has_room = |count| plan(&with(count)).is_some_and(|plan| plan.grad_ring.is_none() && plan.shortage().is_none());
        let ringed = plan(settings).filter(|plan| plan.grad_ring.is_some())?;
        let (mut fits, mut most) = (0, ringed.layout.count() - ringed.layout.offloaded());
        while most - fits > 1 {
            let middle = fits.midpoint(most);
            *(if has_room(middle) { &mut fits } else { &mut most }) = middle;
        }
        (fits > 0).then(|| with(fits))
    }

    fn refusal(&self) -> Result<Error> {
        let (settings, _) = self.splits()?.remove(0);
        let plan = Plan::new(&settings, self.shape, self.machine, false)?;
        Ok(plan.check_fits(&settings, self.shape).err().unwrap_or_else(|| Error::usage("nothing to choose from")))
    }

    /// Micro-batches for the tokens of a step, largest first; as the settings say when nobody asked.
    fn splits(&self) -> Result<Vec<(Settings, Vec<String>)>> {
        let Some(tokens) = self.tokens_per_step else { return Ok(vec![(self.settings.clone(), Vec::new())]) };
        let seq_length = self.settings.seq_length;
        if tokens == 0 || !tokens.is_multiple_of(seq_length) {
            return Err(Error::usage(format!("--tokens-per-step {tokens}: not a multiple of the sequence length, {seq_length}")));
        }
        let sequences = tokens / seq_length;
        let batches = (1..=sequences).rev().filter(|batch| sequences.is_multiple_of(*batch));
        let split = |batch: usize| {
            let accum = sequences / batch;
            let settings = Settings { per_device_train_batch_size: batch, gradient_accumulation_steps: accum, ..self.settings.clone() };
            (settings, vec![format!("--per-device-train-batch-size {batch}"), format!("--gradient-accumulation-steps {accum}")])
        };
        Ok(batches.map(split).collect())
    }
}

/// `flags` with `changed` in the place of those for the same options.
fn amended(flags: &[String], changed: Vec<String>) -> Vec<String> {
    let option = |flag: &String| flag.split(' ').next().map(str::to_owned);
    let kept = flags.iter().filter(|flag| !changed.iter().any(|change| option(change) == option(flag)));
    kept.cloned().chain(changed.iter().cloned()).collect()
}

/// Values of one setting that differ from a candidate's; none where it was fixed.
type Setting = fn(&Question, &Candidate) -> Vec<Change>;

const SETTINGS: [Setting; 9] = [activations, weights, no_grad_ring, resident_buckets, bucket_mib, cast, slots, threads, techniques];

fn changes<T, const FLAGS: usize>(
    is_fixed: bool,
    values: impl IntoIterator<Item = T>,
    change: impl Fn(T) -> ([String; FLAGS], Settings),
) -> Vec<Change> {
    let change = |value| {
        let (flags, settings) = change(value);
        Change { flags: flags.into(), settings }
    };
    if is_fixed { Vec::new() } else { values.into_iter().map(change).collect() }
}

/// The activation policies that are open.
fn policies(question: &Question) -> Vec<ActivationsChoice> {
    let asked = question.settings.activations;
    let is_open = |policy: &&ActivationsChoice| asked == ActivationsChoice::Auto || asked == **policy;
    ActivationsChoice::value_variants().iter().filter(is_open).copied().collect()
}

fn activations(question: &Question, from: &Candidate) -> Vec<Change> {
    let others = ActivationsChoice::value_variants().iter().copied().filter(|activations| *activations != from.settings.activations);
    let is_fixed = question.settings.activations != ActivationsChoice::Auto;
    changes(is_fixed, others, |activations| ([activations_flag(activations)], Settings { activations, ..from.settings.clone() }))
}

fn activations_flag(activations: ActivationsChoice) -> String {
    format!("--activations {}", activations.to_possible_value().expect("no choice is hidden").get_name())
}

/// For every policy: streamed weights leave room for activations.
fn weights(question: &Question, from: &Candidate) -> Vec<Change> {
    let is_fixed = question.settings.weights != WeightsChoice::Auto || from.plan.weight_ring.is_some();
    changes(is_fixed, policies(question), |activations| {
        let settings = Settings { activations, weights: WeightsChoice::Flow, ..from.settings.clone() };
        ([activations_flag(activations), "--weights flow".into()], settings)
    })
}

/// As many resident buckets as fit beside gradients that have a place each, for every policy: a ring makes room for some more, but
/// backward waits in it for the pool, and a clipped step pays for that whole.
fn no_grad_ring(question: &Question, from: &Candidate) -> Vec<Change> {
    let is_fixed = question.settings.resident_buckets != ResidentBuckets::Auto || !from.plan.techniques.repartition;
    let largest = policies(question)
        .into_iter()
        .filter_map(|activations| question.most_without_grad_ring(&Settings { activations, ..from.settings.clone() }));
    changes(is_fixed, largest, |settings| {
        ([activations_flag(settings.activations), format!("--resident-buckets {}", settings.resident_buckets)], settings)
    })
}

/// Fewer than fit: what they leave free may keep activations.
fn resident_buckets(question: &Question, from: &Candidate) -> Vec<Change> {
    let layout = &from.plan.layout;
    let resident = layout.count() - layout.offloaded();
    let fewer = [3 * resident / 4, resident / 2, resident / 4, 0].into_iter().filter(|count| *count < resident);
    let is_fixed = question.settings.resident_buckets != ResidentBuckets::Auto || !from.plan.techniques.repartition;
    changes(is_fixed, fewer, |count| {
        let resident_buckets = ResidentBuckets::Count(count);
        ([format!("--resident-buckets {count}")], Settings { resident_buckets, ..from.settings.clone() })
    })
}

/// For every policy, since each has its own best size: on an H200 a 14 B model whose blocks are computed again gains 1 % by buckets of
/// 256 MiB, with inputs kept on the host nothing.
fn bucket_mib(question: &Question, from: &Candidate) -> Vec<Change> {
    // A number of buckets of another size would be another choice.
    let is_fixed = question.settings.bucket_mib.is_some() || matches!(from.settings.resident_buckets, ResidentBuckets::Count(1..));
    let sizes = policies(question).into_iter().flat_map(|activations| [16, 32, 128, 256].map(|mib| (activations, mib)));
    changes(is_fixed, sizes, |(activations, mib)| {
        let settings = Settings { activations, bucket_mib: Some(f64::from(mib)), ..from.settings.clone() };
        ([activations_flag(activations), format!("--bucket-mib {mib}")], settings)
    })
}

fn cast(question: &Question, from: &Candidate) -> Vec<Change> {
    let is_fixed = question.settings.cast != Settings::default().cast || !from.plan.techniques.superchip_cast;
    changes(is_fixed, [CastSide::Device], |cast| (["--cast device".into()], Settings { cast, ..from.settings.clone() }))
}

fn slots(question: &Question, from: &Candidate) -> Vec<Change> {
    let values = [4, 16, 32].into_iter().filter(|slots| *slots != from.settings.slots);
    changes(question.settings.slots != Settings::default().slots, values, |slots| {
        ([format!("--slots {slots}")], Settings { slots, ..from.settings.clone() })
    })
}

fn threads(question: &Question, from: &Candidate) -> Vec<Change> {
    let workers = from.plan.threads;
    let fewer = [workers - workers / 8, workers - workers / 4].into_iter().filter(|threads| (1..workers).contains(threads));
    changes(question.settings.threads.is_some(), fewer, |threads| {
        ([format!("--threads {threads}")], Settings { threads: Some(threads), ..from.settings.clone() })
    })
}

fn techniques(question: &Question, from: &Candidate) -> Vec<Change> {
    let on = from.plan.techniques;
    let values = [(Technique::Stv, "stv", on.stv), (Technique::DeadlineOrder, "deadline-order", on.deadline_order)];
    let values = values.into_iter().filter(|(.., on)| *on);
    changes(!question.settings.without.is_empty(), values, |(technique, name, _)| {
        ([format!("--without {name}")], Settings { without: vec![technique], ..from.settings.clone() })
    })
}
