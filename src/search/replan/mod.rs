//! Replanning during a run, based on its measured steps: other locations of buckets, activations and weights, and other numbers of slots.
//! Choices that the user fixed, and the cut of steps and buckets, stay.

pub(crate) mod observed_rates;
#[cfg(all(test, feature = "stv", feature = "deadline-order", feature = "repartition", feature = "weight-flow"))]
pub(crate) mod tests;

use super::{Candidate, Scope, SearchQuery};
use crate::device::DeviceKind;
use crate::error::{Error, Result};
use crate::memory::MemorySpace;
use crate::planner::display::describe_policies;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::request::Request;
use crate::simulate::simulate;
use crate::simulate::timed::Steps;
use crate::units::counted;
use observed_rates::ObservedRates;
use std::fmt;
use std::sync::Arc;

/// Another plan must shorten steps to this fraction, because rates change from hour to hour.
const WORTH: f64 = 0.98;
/// Number of steps within which another plan must save the time of the move.
const PAYS_WITHIN: u64 = 200;
/// Bytes per second of a move: states pass through the driver's buffer, and new slots are page-locked.
const MOVED_BYTES_PER_S: f64 = 4e9;

/// Inputs of a replanning search.
#[derive(Clone, Debug)]
pub(crate) struct ReplanRequest {
    pub(crate) request: Request,
    /// The present plan, with the rates that it was made for.
    pub(crate) plan: Plan,
    pub(crate) observed_rates: ObservedRates,
    /// The rates that the plan assumes, if they are known.
    pub(crate) assumed: Option<ObservedRates>,
    pub(crate) steps_left: u64,
}

/// The result of a replanning search.
#[derive(Clone, Debug)]
pub(crate) struct ReplanAnswer {
    /// The expected rates under the plan that the run has afterwards.
    pub(crate) assumed: ObservedRates,
    /// Another plan, if it pays off.
    pub(crate) change: Option<PlanChange>,
}

/// Another plan and the reason for it.
#[derive(Clone, Debug)]
pub(crate) struct PlanChange {
    pub(crate) plan: Plan,
    from: Plan,
    why: String,
    /// Mean simulated steps.
    before_ms: f64,
    after_ms: f64,
}

impl ReplanRequest {
    /// Searches for a better plan.
    ///
    /// # Errors
    /// `Resource` if nothing can be simulated.
    pub(crate) fn answer(&self) -> Result<ReplanAnswer> {
        if self.assumed.is_none() {
            let assumed = self.simulate(&self.plan.site.machine, super::STEPS)?;
            if !self.observed_rates.has_left(&assumed) {
                return Ok(ReplanAnswer { assumed, change: None });
            }
        }
        let (machine, steps) = (&self.plan.site.machine, self.observed_rates.steps());
        let by_profile = self.simulate(machine, steps)?;
        let machine = Machine { rates: Arc::new(self.observed_rates.rates(&by_profile, &machine.rates)), ..machine.clone() };
        let assumed = self.simulate(&machine, steps)?;
        let request = self.plan.fixed(&self.request);
        let query = SearchQuery { request: &request, machine: &machine, scope: Scope::places(steps) };
        let best = match query.rank() {
            Ok(ranking) => ranking.candidates.into_iter().next(),
            Err(Error::Resource { .. }) => None,
            Err(other) => return Err(other),
        };
        let best = best.filter(|best| best.plan.is_movable() && self.pays(&best.plan, assumed.step_s, best.mean_s()));
        let Some((best, plan)) = best.and_then(|best| self.planned(best, &request, &machine)) else {
            return Ok(ReplanAnswer { assumed, change: None });
        };
        let (why, after_s) = (self.why(&by_profile), best.mean_s());
        let change = PlanChange { from: self.plan.clone(), why, before_ms: assumed.step_s * 1e3, after_ms: after_s * 1e3, plan };
        Ok(ReplanAnswer { assumed: ObservedRates::of(&best.outcome), change: Some(change) })
    }

    /// The candidate with a plan that includes the run's timeline, if that fits.
    fn planned(&self, best: Candidate, request: &Request, machine: &Machine) -> Option<(Candidate, Plan)> {
        let plan = Plan::new(&request.with(best.wanted.clone()), machine, self.plan.site.trace_spans > 0).ok()?;
        let plan = plan.with_simulated_step(best.outcome.step_ms.median);
        plan.shortage().is_none().then_some((best, plan))
    }

    /// The simulated rates of the present plan on `machine`.
    fn simulate(&self, machine: &Machine, steps: Steps) -> Result<ObservedRates> {
        let mut plan = self.plan.clone();
        plan.site.machine = machine.clone();
        let (outcome, ..) = simulate(&plan, self.request.shape(), &machine.rates.profile, steps, 0)?;
        Ok(ObservedRates::of(&outcome))
    }

    fn pays(&self, plan: &Plan, before_s: f64, after_s: f64) -> bool {
        let saved_s = (before_s - after_s) * self.steps_left.min(PAYS_WITHIN) as f64;
        after_s < WORTH * before_s && saved_s > move_s(&self.plan, plan)
    }

    /// A description of how the run deviates from the profile.
    fn why(&self, by_profile: &ObservedRates) -> String {
        let [adam, device] = self.observed_rates.relative_to(by_profile);
        let percent = |fraction: f64| format!("{:.0} %", fraction * 1e2);
        format!(
            "{} of steps are clipped, the optimizer has {} of its assumed rate, the device {}",
            percent(self.observed_rates.clipped_fraction),
            percent(adam),
            percent(device)
        )
    }
}

/// Seconds of a move between two plans. Ranks move their parts at the same time, and each rank sends all weights.
fn move_s(from: &Plan, to: &Plan) -> f64 {
    let states = from.placement.layout.offloaded_elems().abs_diff(to.placement.layout.offloaded_elems()) as f64
        * from.optimizer().arrays().bytes_per_elem();
    let weights = (to.placement.layout.flat_elems() * to.recipe.numerics.dtype.bytes()) as f64;
    let slots = to
        .forecast
        .memory
        .iter()
        .filter(|class| class.space == MemorySpace::Host && (class.name.ends_with("slots") || class.name.ends_with("sums")));
    let parts = states + slots.map(|class| class.bytes as f64).sum::<f64>();
    (parts / to.site.ranks as f64 + weights) / MOVED_BYTES_PER_S
}

impl fmt::Display for PlanChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let resident = |plan: &Plan| plan.placement.layout.count() - plan.placement.layout.offloaded();
        let of = |plan: &Plan| {
            let weights = match plan.placement.rings.weights {
                None => "on the device",
                Some(_) if plan.streams_from_host() => "streamed",
                Some(_) => "sharded",
            };
            [
                format!("{} resident", counted(resident(plan), "bucket")),
                describe_policies(&plan.placement.layer_policies),
                counted(plan.placement.grad_slots, "gradient slot"),
                counted(plan.placement.param_slots, "parameter slot"),
                format!("weights {weights}"),
                format!("sums of gradients on the {}", if plan.placement.rings.sums_on_host { "host" } else { "device" }),
                format!("gradients in {}", if plan.placement.rings.grads.is_some() { "a ring" } else { "their own places" }),
            ]
        };
        let changed: Vec<_> = of(&self.from).into_iter().zip(of(&self.plan)).filter(|(from, to)| from != to).collect();
        let changed: Vec<_> = changed.into_iter().map(|(from, to)| format!("{from} -> {to}")).collect();
        write!(f, "{}, since {}; mean step by simulation {:.0} -> {:.0} ms", changed.join("; "), self.why, self.before_ms, self.after_ms)
    }
}

/// Whether a run of `plan` can be replanned: it runs on GPUs, whose rates are known, and its states can move between host and device.
pub(crate) fn is_possible(plan: &Plan) -> bool {
    plan.site.machine.kind == DeviceKind::Gpu && plan.placement.layout.away().is_offloaded()
}
