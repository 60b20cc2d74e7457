//! The search for the fastest choices, each simulated with the machine's rates.
//!
//! [`crate::planner::choice`] chooses resident buckets by arithmetic; this module decides the rest. The locations of weights, the policies
//! of layers and the resident buckets compete for one memory, so they are tried together. The other choices are tried one after another,
//! each at its other values with the best values so far for the rest. Only choices that the user left open are tried.

use crate::planner::machine::Machine;
pub(crate) mod limits;
#[cfg(all(test, feature = "stv", feature = "deadline-order", feature = "repartition", feature = "weight-flow"))]
mod order_tests;
pub(crate) mod progress;
pub(crate) mod replan;
pub(crate) mod report;
// The measured programs had every technique, so the tests need all of them.
#[cfg(all(
    test,
    feature = "stv",
    feature = "deadline-order",
    feature = "repartition",
    feature = "superchip-cast",
    feature = "weight-flow"
))]
mod tests;

use crate::device::DeviceKind;
use crate::error::{Error, Result};
use crate::planner::order::{SEGMENT_LAYERS, may_have_segments};
use crate::planner::plan::Plan;
use crate::planner::resolve::SLOTS;
use crate::request::Request;
use crate::request::choices::{ActivationsChoice, CastSide, LayerOrder, ResidentBuckets, Technique, WeightsChoice};
use crate::request::wanted::Wanted;
use crate::simulate::clip::Clip;
use crate::simulate::outcome::Outcome;
use crate::simulate::simulate;
use crate::simulate::timed::Steps;
use clap::ValueEnum;
use std::iter;
use std::num::NonZeroU64;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, available_parallelism};

/// Steps of a simulation. One in ten is clipped and waits for its verdict; a settled run clips fewer steps, a new model more.
const STEPS: Steps = Steps { warmup: 2, timed: 10, clip: Clip::OneIn(NonZeroU64::new(10).unwrap()) };
/// Steps of a simulation of a run that clips as many steps as `clip`. Rarely clipped steps are taken as one in ten.
fn steps_of(clip: Clip) -> Steps {
    match clip {
        Clip::OneIn(every) if every.get() < STEPS.timed => Steps { timed: every.get() * STEPS.timed.div_ceil(every.get()), clip, ..STEPS },
        _ => STEPS,
    }
}

/// A change must shorten the step to this fraction. Rates are not known more precisely.
const WORTH: f64 = 0.995;
/// Maximum number of concurrent simulations. Each reserves as much address space as its plan has memory.
const WORKERS_MAX: usize = 16;

/// Choices and their simulated step.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) wanted: Wanted,
    pub plan: Plan,
    pub outcome: Outcome,
}

impl Candidate {
    /// Seconds of a mean step.
    pub(crate) fn mean_s(&self) -> f64 {
        self.outcome.step_ms.total() / self.outcome.step_ms.samples.len() as f64 / 1e3
    }

    /// Whether this candidate is enough faster than `best`.
    fn is_worth_leaving(&self, best: &Self) -> bool {
        self.mean_s() < WORTH * best.mean_s()
    }
}

/// All candidates that fit, the fastest first.
#[derive(Clone, Debug)]
pub(crate) struct Ranking {
    /// Candidates that fit, by [`Candidate::mean_s`].
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) unfit: usize,
}

/// The plan of `request` on `machine`, with memory for a timeline if `trace`: the best simulated choice of all that is open. On the CPU
/// device, which has no assumed rates, the result of [`Plan::new`].
pub(crate) fn best_plan(request: &Request, machine: &Machine, trace: bool) -> Result<Plan> {
    best_plan_for(request, machine, trace, STEPS.clip)
}

/// [`best_plan`] for a run that clips as many steps as `clip`. If it clips none, the plan is that of [`best_plan`]: a run has clipped steps.
pub(crate) fn best_plan_for(request: &Request, machine: &Machine, trace: bool, clip: Clip) -> Result<Plan> {
    if machine.kind == DeviceKind::Cpu {
        return largest_that_fits(request, machine, trace);
    }
    let ranking = SearchQuery::new(request, machine).clipping(clip).rank()?;
    let best = &ranking.candidates[0];
    let chosen = request.with(best.wanted.clone());
    let plan = Plan::new(&chosen, machine, trace)?;
    // The timeline needs host memory, too.
    plan.check_fits(&chosen)?;
    Ok(plan.with_simulated_step(best.outcome.step_ms.median))
}

/// The plan with the largest micro-batches that fit.
fn largest_that_fits(request: &Request, machine: &Machine, trace: bool) -> Result<Plan> {
    let mut last = Err(Error::usage("nothing to choose from"));
    for split in request.splits()? {
        let request = request.with(split);
        last = Plan::new(&request, machine, trace).and_then(|plan| plan.check_fits(&request).map(|()| plan));
        if !matches!(last, Err(Error::Resource { .. })) {
            break;
        }
    }
    last
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SearchQuery<'a> {
    /// Base of every candidate. Choices that are not open stay fixed.
    pub request: &'a Request,
    pub machine: &'a Machine,
    scope: Scope,
}

/// Extent of a search.
#[derive(Clone, Copy, Debug)]
struct Scope {
    choices: &'static [OpenChoice],
    /// Steps simulated for each candidate.
    steps: Steps,
    /// Maximum number of simulation threads.
    workers_max: usize,
}

impl Scope {
    const ALL: Self = Self { choices: &CHOICES, steps: STEPS, workers_max: WORKERS_MAX };

    /// A search over placements during a run. It uses one thread, because the run needs the CPUs.
    fn places(steps: Steps) -> Self {
        Self { choices: &[placement, residency_nearby, sharing, slots], steps, workers_max: 1 }
    }
}

impl<'a> SearchQuery<'a> {
    pub(crate) fn new(request: &'a Request, machine: &'a Machine) -> Self {
        Self { request, machine, scope: Scope::ALL }
    }

    /// This search, for a run that clips as many steps as `clip`.
    fn clipping(self, clip: Clip) -> Self {
        Self { scope: Scope { steps: steps_of(clip), ..self.scope }, ..self }
    }
}

impl SearchQuery<'_> {
    /// Ranks the candidates that fit.
    ///
    /// # Errors
    /// `Usage` if settings are invalid; `Resource` if nothing fits, with the smallest change that would help.
    pub(crate) fn rank(&self) -> Result<Ranking> {
        let mut ranking = Ranking { candidates: Vec::new(), unfit: 0 };
        let mut best: Option<Candidate> = None;
        let splits = self.request.splits()?;
        self.weigh(&splits, &mut best, &mut ranking)?;
        if best.is_none() {
            let orders: Vec<_> = splits.iter().flat_map(|split| self.orders(split)).collect();
            self.weigh(&orders, &mut best, &mut ranking)?;
        }
        if best.is_none() {
            return Err(self.refusal()?);
        }
        for choice in self.scope.choices {
            let others = best.as_ref().map_or_else(Vec::new, |from| choice(self, from));
            self.weigh(&others, &mut best, &mut ranking)?;
        }
        ranking.candidates.sort_by(|a, b| a.mean_s().total_cmp(&b.mean_s()));
        // The best candidate has the fewest changes among those of nearly equal speed.
        let at = ranking.candidates.iter().position(|candidate| best.as_ref().is_some_and(|best| candidate.wanted == best.wanted));
        ranking.candidates[..=at.unwrap_or(0)].rotate_right(1);
        Ok(ranking)
    }

    /// Plans and simulates the new candidates. A candidate that is enough faster replaces `best`.
    fn weigh(&self, all: &[Wanted], best: &mut Option<Candidate>, ranking: &mut Ranking) -> Result<()> {
        let is_new = |wanted: &&Wanted| !ranking.candidates.iter().any(|candidate| candidate.wanted == **wanted);
        let new: Vec<_> = all.iter().filter(is_new).cloned().collect();
        for candidate in self.candidates(&new) {
            let Some(candidate) = candidate? else {
                ranking.unfit += 1;
                continue;
            };
            if best.as_ref().is_none_or(|best| candidate.is_worth_leaving(best)) {
                *best = Some(candidate.clone());
            }
            ranking.candidates.push(candidate);
        }
        Ok(())
    }

    /// Candidates in order, computed by several threads. Each thread takes the next one, because candidates are independent and those that
    /// do not fit take no time.
    fn candidates(&self, all: &[Wanted]) -> Vec<Result<Option<Candidate>>> {
        let workers = available_parallelism().map_or(1, usize::from).min(self.scope.workers_max).min(all.len());
        let taken = AtomicUsize::new(0);
        let next = || all.iter().enumerate().nth(taken.fetch_add(1, Ordering::Relaxed));
        let work = || iter::from_fn(next).map(|(nth, wanted)| (nth, self.candidate(wanted))).collect::<Vec<_>>();
        let mut done: Vec<_> = thread::scope(|scope| {
            let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        });
        done.sort_unstable_by_key(|(nth, _)| *nth);
        done.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// The candidate with these choices; `None` if it does not fit or its choices contradict each other.
    pub(super) fn candidate(&self, wanted: &Wanted) -> Result<Option<Candidate>> {
        let plan = match self.plan(wanted) {
            Err(Error::Usage(_)) if *wanted != self.request.wanted => return Ok(None),
            plan => plan?,
        };
        if plan.shortage().is_some() {
            return Ok(None);
        }
        let (outcome, ..) = simulate(&plan, self.request.shape(), &self.machine.rates.profile, self.scope.steps, 0)?;
        progress::count();
        let plan = plan.with_simulated_step(outcome.step_ms.median);
        Ok(Some(Candidate { wanted: wanted.clone(), plan, outcome }))
    }

    fn plan(&self, wanted: &Wanted) -> Result<Plan> {
        Plan::new(&self.request.with(wanted.clone()), self.machine, false)
    }

    /// These choices with the most resident buckets that need no gradient ring; `None` if their plan has no ring.
    fn most_without_grad_ring(&self, wanted: &Wanted) -> Option<Wanted> {
        let with = |count| Wanted { resident_buckets: ResidentBuckets::Count(count), ..wanted.clone() };
        let plan = |wanted: &Wanted| self.plan(wanted).ok();
        let has_capacity = |count| plan(&with(count)).is_some_and(|plan| plan.placement.rings.grads.is_none() && plan.shortage().is_none());
        let ringed = plan(wanted).filter(|plan| plan.placement.rings.grads.is_some())?;
        let (mut fits, mut most) = (0, ringed.placement.layout.count() - ringed.placement.layout.offloaded());
        while most - fits > 1 {
            let middle = fits.midpoint(most);
            *(if has_capacity(middle) { &mut fits } else { &mut most }) = middle;
        }
        (fits > 0).then(|| with(fits))
    }

    /// These choices with the layers in segments, if the order is open and each device of a single process has several micro-batches in a
    /// step.
    fn orders(&self, wanted: &Wanted) -> Vec<Wanted> {
        let layer_order = self.request.wanted.layer_order;
        if !may_have_segments(&self.request.with(Wanted { layer_order, ..wanted.clone() })) {
            return Vec::new();
        }
        SEGMENT_LAYERS.into_iter().flat_map(|layers| self.turns(wanted, layers)).collect()
    }

    /// Segments of `layers` with the longest turn that fits, and with half of it. A longer turn computes fewer layers a second time.
    fn turns(&self, wanted: &Wanted, layers: usize) -> Vec<Wanted> {
        let with = |turn| Wanted { layer_order: LayerOrder::Segments { layers, turn }, ..wanted.clone() };
        let fits = |turn| self.plan(&with(turn)).is_ok_and(|plan| plan.shortage().is_none());
        let (mut fitting, mut most) = (0, self.request.shape().layers.len());
        if layers >= most || !fits(0) {
            return Vec::new();
        }
        while most - fitting > 1 {
            let middle = fitting.midpoint(most);
            *(if fits(middle) { &mut fitting } else { &mut most }) = middle;
        }
        let shorter = fitting / 2;
        [fitting].into_iter().chain((shorter < fitting).then_some(shorter)).map(with).collect()
    }

    fn refusal(&self) -> Result<Error> {
        // The error refers to the smallest micro-batches.
        let smallest = self.request.splits()?.pop().unwrap_or_else(|| self.request.wanted.clone());
        let request = self.request.with(smallest);
        let plan = Plan::new(&request, self.machine, false)?;
        Ok(plan.check_fits(&request).err().unwrap_or_else(|| Error::usage("nothing to choose from")))
    }

    /// The open activation policies, the requested one first. If attention takes long, the automatic policy copies its output to the host.
    /// Otherwise `host-attention` is not tried, because no run has shown a gain.
    fn policies(&self) -> Vec<ActivationsChoice> {
        let requested = self.request.wanted.activations;
        let tried = |policy: &ActivationsChoice| ![requested, ActivationsChoice::HostAttention].contains(policy);
        let others = ActivationsChoice::value_variants().iter().copied().filter(tried);
        let others = others.filter(|_| requested == ActivationsChoice::Auto);
        [requested].into_iter().chain(others).collect()
    }

    fn is_residency_open(&self, from: &Candidate) -> bool {
        self.request.wanted.resident_buckets == ResidentBuckets::Auto && from.plan.protocol.techniques.repartition
    }
}

/// Choices that differ from a candidate's in one aspect; empty if the user fixed it.
type OpenChoice = fn(&SearchQuery, &Candidate) -> Vec<Wanted>;

const CHOICES: [OpenChoice; 10] =
    [placement, layer_order, residency_nearby, bucket_mib, sharing, residency_nearby, cast, slots, threads, techniques];

/// Device memory: location of weights, policies of layers, resident buckets. The best policy for the maximum of resident buckets is rarely
/// the best for fewer, and streamed weights leave room for both.
fn placement(query: &SearchQuery, from: &Candidate) -> Vec<Wanted> {
    let requested = query.request.wanted.weights;
    let can_stream = requested == WeightsChoice::Auto && query.request.cut.ranks() == 1 && from.plan.placement.rings.weights.is_none();
    let weights = [requested].into_iter().chain(can_stream.then_some(WeightsChoice::Flow));
    weights.flat_map(|weights| placed(query, from, weights)).collect()
}

/// Segments of layers, if weights are fetched or sums cross the link with every micro-batch, or gradients share memory. Other plans gain
/// nothing from a second forward pass.
fn layer_order(query: &SearchQuery, from: &Candidate) -> Vec<Wanted> {
    let rings = from.plan.placement.rings;
    if rings.weights.is_none() && !rings.sums_on_host && rings.grads.is_none() {
        return Vec::new();
    }
    let Wanted { activations, weights, resident_buckets, .. } = query.request.wanted;
    query.orders(&Wanted { activations, weights, resident_buckets, ..from.wanted.clone() })
}

/// Weights sharded over the devices of each process although they fit on each device, so that layers may keep more activations. Also tried
/// if the best candidate so far shards only because weights do not fit next to its resident buckets: with fewer buckets they would. Tried
/// last, with all other settings at their best.
fn sharing(query: &SearchQuery, from: &Candidate) -> Vec<Wanted> {
    let Wanted { weights: requested, resident_buckets, .. } = query.request.wanted;
    let can_share = requested == WeightsChoice::Auto && query.request.cut.ranks() > query.request.cut.processes;
    let from = Candidate { wanted: Wanted { resident_buckets, ..from.wanted.clone() }, ..from.clone() };
    if can_share { placed(query, &from, WeightsChoice::Sharded) } else { Vec::new() }
}

/// With this location of weights: every policy with several numbers of resident buckets.
fn placed(query: &SearchQuery, from: &Candidate, weights: WeightsChoice) -> Vec<Wanted> {
    let with = |activations| Wanted { activations, weights, ..from.wanted.clone() };
    query.policies().into_iter().flat_map(|policy| residencies(query, from, with(policy))).collect()
}

/// Numbers of resident buckets: as many as fit; as many as fit without a gradient ring, because with a ring the backward pass waits for the
/// pool and a clipped step cannot hide that; and, if the policy is open, eighths of all buckets, which leave room for activations.
fn residencies(query: &SearchQuery, from: &Candidate, wanted: Wanted) -> Vec<Wanted> {
    let mut all = vec![wanted.clone()];
    if query.is_residency_open(from) {
        all.extend(query.most_without_grad_ring(&wanted));
        let with = |count| Wanted { resident_buckets: ResidentBuckets::Count(count), ..wanted.clone() };
        let eighths = if wanted.activations == query.request.wanted.activations { 0..8 } else { 0..0 };
        all.extend(eighths.map(|eighths| with(from.plan.placement.layout.count() * eighths / 8)));
    }
    all
}

/// A few resident buckets more or fewer than the best so far, between the values already tried and just below the maximum.
fn residency_nearby(query: &SearchQuery, from: &Candidate) -> Vec<Wanted> {
    let layout = &from.plan.placement.layout;
    let resident = layout.count() - layout.offloaded();
    let steps = [layout.count() / 16, layout.count() / 32];
    let nearby = steps.into_iter().flat_map(|step| [resident.saturating_sub(step), resident + step]).filter(|near| *near != resident);
    let with = |count| Wanted { resident_buckets: ResidentBuckets::Count(count), ..from.wanted.clone() };
    nearby.filter(|_| query.is_residency_open(from)).map(with).collect()
}

/// Bucket sizes for every policy, because each policy has its own best size. On an H200 a 14 B model gains 1 % with buckets of 256 MiB if
/// it recomputes blocks, and nothing if it keeps inputs on the host.
fn bucket_mib(query: &SearchQuery, from: &Candidate) -> Vec<Wanted> {
    let requested = &query.request.wanted;
    // With another size, a fixed number of resident buckets would be another choice.
    if requested.bucket_mib.is_some() || matches!(requested.resident_buckets, ResidentBuckets::Count(1..)) {
        return Vec::new();
    }
    let bucket_bytes = from.plan.placement.layout.bucket_elems() * from.plan.recipe.numerics.dtype.bytes();
    let weight_bytes = from.plan.placement.layout.count() * bucket_bytes;
    // Rings and exchange buffers grow with buckets and may need the memory of one. If buckets shrink, there may be room for more of them.
    let resized = |mib: usize| match from.wanted.resident_buckets {
        ResidentBuckets::Count(count) => {
            let (same, grows) = (count * bucket_bytes / (mib << 20), mib << 20 > bucket_bytes);
            let nearby = if grows { same.checked_sub(1) } else { Some(same + weight_bytes / (mib << 20) / 32) };
            [Some(same), nearby].map(|count| count.map(ResidentBuckets::Count))
        }
        other => [Some(other), None],
    };
    let with = |activations, mib| {
        let of = move |resident_buckets| Wanted { activations, resident_buckets, bucket_mib: Some(mib as f64), ..from.wanted.clone() };
        resized(mib).into_iter().flatten().map(of)
    };
    let sizes = |policy| [16, 32, 128, 256].into_iter().flat_map(move |mib| with(policy, mib));
    query.policies().into_iter().flat_map(sizes).collect()
}

fn cast(query: &SearchQuery, from: &Candidate) -> Vec<Wanted> {
    let is_open = query.request.wanted.cast == CastSide::Auto && from.plan.protocol.techniques.superchip_cast;
    is_open.then(|| Wanted { cast: CastSide::Device, ..from.wanted.clone() }).into_iter().collect()
}

/// Numbers of slots. A bucket's last gradient keeps its slot until the new one arrives, so the slots beyond the number of buckets limit how
/// far copies run ahead of the pool. With a gradient ring the backward pass waits for these copies.
fn slots(query: &SearchQuery, from: &Candidate) -> Vec<Wanted> {
    let is_open = query.request.wanted.slots.is_none();
    let others = [4, SLOTS, 16, 32, 64].into_iter().filter(|slots| is_open && *slots != from.wanted.slots.unwrap_or(SLOTS));
    others.map(|slots| Wanted { slots: Some(slots), ..from.wanted.clone() }).collect()
}

fn threads(query: &SearchQuery, from: &Candidate) -> Vec<Wanted> {
    let (workers, is_open) = (from.plan.site.threads, query.request.wanted.threads.is_none());
    let fewer = [workers - workers / 8, workers - workers / 4].into_iter();
    let fewer = fewer.filter(|threads| is_open && (1..workers).contains(threads));
    fewer.map(|threads| Wanted { threads: Some(threads), ..from.wanted.clone() }).collect()
}

fn techniques(query: &SearchQuery, from: &Candidate) -> Vec<Wanted> {
    let (on, is_open) = (from.plan.protocol.techniques, query.request.wanted.without.is_empty());
    let all = [(Technique::Stv, on.stv), (Technique::DeadlineOrder, on.deadline_order), (Technique::EarlyCommit, on.early_commit)];
    let off = all.into_iter().filter(|(_, on)| is_open && *on);
    off.map(|(technique, _)| Wanted { without: vec![technique], ..from.wanted.clone() }).collect()
}
