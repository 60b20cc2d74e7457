//! Changes of plan during a run. The run compares its steps with the assumptions of the plan; if they differ, a thread searches another
//! plan beside training, and the run takes it between two steps.

use crate::config::options::ReplanChoice;
use crate::config::settings::Settings;
use crate::engine::executor::StepReport;
use crate::error::{Error, Result};
use crate::host::pool::yield_to_others;
use crate::planner::plan::Plan;
use crate::request::Request;
use crate::request::choices::{ActivationsChoice, ResidentBuckets, WeightsChoice};
use crate::request::wanted::Wanted;
use crate::search::replan::observed_rates::{ObservedRates, RecentSteps, WINDOW};
use crate::search::replan::{ReplanAnswer, ReplanRequest, is_possible};
use clap::ValueEnum;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Steps after the start, and after a move, of which nothing is learned.
const SETTLING_STEPS: u64 = 2;
/// Steps between two questions at least: twice as many after each, up to a limit, so that no run goes to and fro.
const REST_STEPS: u64 = WINDOW as u64;
const REST_STEPS_MAX: u64 = 640;

/// The decision of a run after a step.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time")]
pub(super) enum ReplanStep {
    Stay,
    /// Keep the plan, and report this line.
    Note(String),
    /// It goes over to this plan; why, in words.
    Move(Plan, String),
}

#[expect(clippy::large_enum_variant, reason = "a run has one")]
pub(super) enum Replanner {
    Off,
    /// A test of the engine: random places at random steps.
    Random(Request),
    Watching(PlanWatch),
}

impl Replanner {
    pub(super) fn new(settings: &Settings, plan: &Plan) -> Self {
        match settings.replan {
            // The new plan would not reach other processes.
            _ if plan.site.processes > 1 || !plan.is_movable() => Self::Off,
            ReplanChoice::Auto if is_possible(plan) => Self::Watching(PlanWatch::new(settings.request(&plan.recipe.model))),
            ReplanChoice::Random => Self::Random(settings.request(&plan.recipe.model)),
            ReplanChoice::Auto | ReplanChoice::Off => Self::Off,
        }
    }

    /// How to go on after `step`, which took `time`.
    ///
    /// # Errors
    /// Why no other plan will be looked for any more.
    pub(super) fn next(&mut self, plan: &Plan, (step, max_steps): (u64, u64), report: &StepReport, time: Duration) -> Result<ReplanStep> {
        match self {
            Self::Random(request) => Ok(draw(request, plan, step)),
            Self::Watching(watch) => {
                let next = watch.next(plan, (step, max_steps), report, time);
                if next.is_err() {
                    *self = Self::Off;
                }
                next
            }
            Self::Off => Ok(ReplanStep::Stay),
        }
    }
}

/// Observations since the last change of plan, and the pending search.
pub(super) struct PlanWatch {
    request: Request,
    window: RecentSteps,
    settling: u64,
    /// As steps are to go by the present plan, once that is known.
    assumed: Option<ObservedRates>,
    /// The plan before the present one and how its steps went, until it is known which is faster.
    before: Option<(Plan, ObservedRates)>,
    rest: u64,
    /// No question before this step.
    rests_until: u64,
    pending_search: Option<JoinHandle<Result<ReplanAnswer>>>,
}

impl PlanWatch {
    fn new(request: Request) -> Self {
        let (window, settling, rest) = (RecentSteps::default(), SETTLING_STEPS, REST_STEPS);
        Self { request, window, settling, assumed: None, before: None, rest, rests_until: 0, pending_search: None }
    }

    fn next(&mut self, plan: &Plan, (step, max_steps): (u64, u64), report: &StepReport, time: Duration) -> Result<ReplanStep> {
        match self.settling.checked_sub(1) {
            Some(left) => self.settling = left,
            None => self.window.add(report, time),
        }
        let Some(observed_rates) = self.window.observed_rates() else { return Ok(ReplanStep::Stay) };
        if let Some((plan, before)) = self.before.take() {
            return Ok(self.weigh((plan, step), &before, &observed_rates));
        }
        if let Some(pending_search) = self.pending_search.take_if(|pending_search| pending_search.is_finished()) {
            let answer = pending_search
                .join()
                .map_err(|_| Error::resource("look for another plan", "the search panicked; see the message above"))??;
            return Ok(self.heed(answer, step, plan, observed_rates));
        }
        let is_asking = self.pending_search.is_some() || step < self.rests_until || step >= max_steps;
        if !is_asking && self.assumed.is_none_or(|assumed| observed_rates.has_left(&assumed)) {
            let (request, assumed, steps_left) = (self.request.clone(), self.assumed, max_steps - step);
            self.pending_search = Some(start_search(ReplanRequest { request, plan: plan.clone(), observed_rates, assumed, steps_left })?);
        }
        Ok(ReplanStep::Stay)
    }

    fn heed(&mut self, answer: ReplanAnswer, step: u64, plan: &Plan, observed_rates: ObservedRates) -> ReplanStep {
        self.assumed = Some(answer.assumed);
        self.rest = (2 * self.rest).min(REST_STEPS_MAX);
        self.rests_until = step + self.rest;
        let Some(change) = answer.change else { return ReplanStep::Stay };
        self.before = Some((plan.clone(), observed_rates));
        self.move_to(change.to_string(), change.plan)
    }

    fn move_to(&mut self, words: String, plan: Plan) -> ReplanStep {
        self.window.clear();
        self.settling = SETTLING_STEPS;
        ReplanStep::Move(plan, words)
    }

    /// Whether the last move was worth it: if not, back to the plan `before` it.
    fn weigh(&mut self, (plan, step): (Plan, u64), before: &ObservedRates, now: &ObservedRates) -> ReplanStep {
        let times = format!("{:.0} -> {:.0} ms a step, measured", before.step_s * 1e3, now.step_s * 1e3);
        if !now.is_clipped_as(before) {
            let [before, now] = [before, now].map(|observed_rates| observed_rates.clipped_fraction * 1e2);
            return ReplanStep::Note(format!(
                "the gain of the new plan is unknown: {before:.0} % of steps were clipped before, {now:.0} % since; {times}"
            ));
        }
        if now.step_s <= before.step_s {
            return ReplanStep::Note(format!("the plan gained {:.1} %: {times}", (before.step_s / now.step_s - 1.0) * 1e2));
        }
        // The assumptions are wrong: a search based on them finds nothing better.
        self.assumed = Some(*before);
        (self.rest, self.rests_until) = (REST_STEPS_MAX, step + REST_STEPS_MAX);
        self.move_to(format!("the previous one, since this one gained nothing: {times}"), plan)
    }
}

/// Answers `question` on a thread of its own, which gives way to all others.
fn start_search(question: ReplanRequest) -> Result<JoinHandle<Result<ReplanAnswer>>> {
    let answer = move || {
        yield_to_others();
        question.answer()
    };
    Builder::new().name("replan".into()).spawn(answer).map_err(|e| Error::resource("start a thread that looks for another plan", e))
}

/// Random places after one step in three, the same for the same seed and step.
fn draw(request: &Request, plan: &Plan, step: u64) -> ReplanStep {
    let mut rng = ChaCha8Rng::seed_from_u64(request.recipe.rows.seed ^ step.rotate_left(32));
    let mut one_of = |count: usize| rng.next_u32() as usize % count;
    if one_of(3) > 0 {
        return ReplanStep::Stay;
    }
    let request = plan.fixed(request);
    let places = |one_of: &mut dyn FnMut(usize) -> usize| Wanted {
        resident_buckets: if plan.protocol.techniques.repartition {
            ResidentBuckets::Count(one_of(plan.placement.layout.count() + 1))
        } else {
            request.wanted.resident_buckets
        },
        activations: ActivationsChoice::value_variants()[one_of(ActivationsChoice::value_variants().len())],
        weights: [if plan.site.ranks > 1 { WeightsChoice::Sharded } else { WeightsChoice::Flow }, WeightsChoice::Auto][one_of(2)],
        slots: Some(1 + one_of(6)),
        ..request.wanted.clone()
    };
    // Not everything goes with everything: few weights, or none that are offloaded, do not stream.
    let mut plans = (0..8).map(|_| Plan::new(&request.with(places(&mut one_of)), &plan.site.machine, plan.site.trace_spans > 0));
    let plan = plans.find_map(|plan| plan.ok().filter(|plan| plan.shortage().is_none() && plan.is_movable()));
    plan.map_or(ReplanStep::Stay, |plan| ReplanStep::Move(plan, "places drawn at random".into()))
}

#[cfg(all(test, feature = "stv", feature = "deadline-order", feature = "repartition", feature = "weight-flow"))]
mod simulated;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::protocol::coordinator::Counts;
    use crate::engine::protocol::counters::{Counters, Exposed};
    use crate::engine::protocol::verdict::Verdict;
    use crate::model::shape::ModelShape;
    use crate::planner::machine::Machine;
    use crate::ranks::RANKS_MAX;
    use crate::units::{ClipScale, Norm};

    fn report(verdict: Verdict) -> StepReport {
        let (counts, exposed, counters) = (Counts::default(), Exposed::default(), Counters::default());
        let (loss, learning_rate, loss_scale, grad_norm, exposed_to_peers_ns) = (1.0, 0.1, 1.0, Norm(1.0), [0; RANKS_MAX]);
        StepReport {
            loss,
            grad_norm,
            learning_rate,
            loss_scale,
            verdict,
            counts,
            exposed,
            counters,
            objective: None,
            exposed_to_peers_ns,
            expert_load: None,
        }
    }

    /// The first decision of a run after a change of plan, whose steps took a second before and take `ms` now.
    fn after_a_move(ms: u64, verdict: Verdict) -> (ReplanStep, u64) {
        let (settings, shape) = (Settings::demo(), ModelShape::demo());
        let plan =
            |slots| Plan::new(&Settings { slots: Some(slots), ..settings.clone() }.request(&shape), &Machine::cpu(2), false).unwrap();
        let observed_rates = ObservedRates { step_s: 1.0, adam_bytes_per_s: None, device_s: ms as f64 / 1e3, clipped_fraction: 0.0 };
        let mut watch = PlanWatch {
            assumed: Some(observed_rates),
            before: Some((plan(3), observed_rates)),
            rests_until: 1000,
            ..PlanWatch::new(settings.request(&shape))
        };
        for step in 1..200 {
            let next = watch.next(&plan(5), (step, 1000), &report(verdict), Duration::from_millis(ms)).unwrap();
            if !matches!(next, ReplanStep::Stay) {
                assert!(watch.before.is_none() && watch.pending_search.is_none());
                return (next, step);
            }
        }
        (ReplanStep::Stay, 200)
    }

    #[test]
    fn a_gaining_plan_change_is_logged_and_a_losing_one_is_taken_back() {
        let looked = SETTLING_STEPS + WINDOW as u64;
        let (ReplanStep::Note(words), step) = after_a_move(800, Verdict::Commit) else { panic!("it gained") };
        assert_eq!((words.as_str(), step), ("the plan gained 25.0 %: 1000 -> 800 ms a step, measured", looked));
        let (ReplanStep::Move(plan, words), step) = after_a_move(1100, Verdict::Commit) else { panic!("it lost") };
        assert_eq!((plan.placement.param_slots, step), (3, looked));
        assert!(words.contains("1000 -> 1100 ms"), "{words}");
        let (ReplanStep::Note(words), _) = after_a_move(1100, Verdict::Clip(ClipScale(0.5))) else {
            panic!("steps that are clipped are not those that were not")
        };
        assert!(words.contains("0 % of steps were clipped before, 100 % since; 1000 -> 1100 ms"), "{words}");
    }

    #[test]
    fn random_positions_depend_on_the_seed_and_the_step() {
        let (settings, shape) = (Settings { seed: 3, ..Settings::demo() }, ModelShape::demo());
        let plan = Plan::new(&settings.request(&shape), &Machine::cpu(2), false).unwrap();
        let drawn = |step| match draw(&settings.request(&shape), &plan, step) {
            ReplanStep::Move(plan, _) => {
                Some((plan.placement.layout.offloaded(), plan.placement.param_slots, plan.placement.layer_policies))
            }
            _ => None,
        };
        let all: Vec<_> = (1..60).map(drawn).collect();
        assert_eq!(all, (1..60).map(drawn).collect::<Vec<_>>());
        let moves: Vec<_> = all.into_iter().flatten().collect();
        assert!((10..30).contains(&moves.len()) && moves.windows(2).any(|pair| pair[0] != pair[1]), "{}", moves.len());
    }
}
