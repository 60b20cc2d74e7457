//! Runs that are watched on the simulated device, from the first step on: when they ask, where they go when the share of clipped steps
//! changes, and whether they come back.

use super::*;
use crate::device::sim::SimDevice;
use crate::engine::executor::Engine;
use crate::hardware::rates::Rates;
use crate::search::replan::tests::SimulatedRun;
use crate::simulate::clip::Clip;
use crate::simulate::random_tokens::RandomTokens;
use std::thread::sleep;

/// A run, its watch, and the reported lines.
struct WatchedRun {
    engine: Engine<SimDevice>,
    watch: PlanWatch,
    tokens: RandomTokens,
    message: Vec<(u64, String)>,
    step_ms: Vec<f64>,
}

impl WatchedRun {
    /// At the first step of `plan`, that of `run`, on a machine of these `rates`.
    fn new(run: &SimulatedRun, plan: &Plan, rates: &Rates) -> Self {
        let engine = run.start(plan, rates);
        let tokens = RandomTokens::new(0, engine.shape().vocab);
        Self { engine, watch: PlanWatch::new(run.settings.request(&run.shape)), tokens, message: Vec::new(), step_ms: Vec::new() }
    }

    /// Goes on until `last`, a step.
    fn go(&mut self, last: u64, clip: &str) {
        let clip: Clip = clip.parse().unwrap();
        while self.engine.train_step() < last {
            let step = self.engine.train_step() + 1;
            self.engine.set_max_grad_norm(clip.max_grad_norm(step));
            let start_ns = self.engine.now_ns();
            let report = self.engine.step(1e-3, &mut self.tokens).unwrap();
            let time = Duration::from_nanos(self.engine.now_ns() - start_ns);
            self.step_ms.push(time.as_secs_f64() * 1e3);
            match self.watch.next(self.engine.plan(), (step, 1000), &report, time).unwrap() {
                ReplanStep::Stay => {}
                ReplanStep::Note(words) => self.message.push((step, words)),
                ReplanStep::Move(plan, words) => {
                    assert!(self.engine.replan(plan).unwrap().is_none());
                    self.message.push((step, format!("moved: {words}")));
                }
            }
            // A search takes no simulated time: the next step finds its answer.
            while self.watch.pending_search.as_ref().is_some_and(|pending_search| !pending_search.is_finished()) {
                sleep(Duration::from_millis(1));
            }
        }
    }

    /// Places that the engine has.
    fn places(&self) -> String {
        let plan = self.engine.plan();
        format!(
            "{:?}",
            (
                plan.placement.layout.offloaded(),
                &plan.placement.layer_policies,
                plan.placement.rings.grads,
                plan.placement.rings.weights,
                plan.placement.grad_slots,
                plan.placement.param_slots
            )
        )
    }

    /// The mean of these steps.
    fn mean_ms(&self, steps: std::ops::RangeInclusive<u64>) -> f64 {
        let all: Vec<_> = steps.map(|step| self.step_ms[step as usize - 1]).collect();
        all.iter().sum::<f64>() / all.len() as f64
    }
}

/// The step after which the first question is answered.
const ANSWERED: u64 = SETTLING_STEPS + WINDOW as u64 + 1;
/// Steps from a move to its weighing.
const WEIGHED: u64 = SETTLING_STEPS + WINDOW as u64;

/// The run on an H200 whose every step was clipped (`h200-replan.jsonl`), at the rates that it saw, beside the one that kept its plan.
#[test]
fn a_recorded_run_goes_as_it_went() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/paper-figures/results/h200-replan.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mean = |line: usize, steps: std::ops::Range<usize>| {
        let all: Vec<f64> = lines[line]["step_ms"].as_array().unwrap()[steps].iter().map(|ms| ms.as_f64().unwrap()).collect();
        all.iter().sum::<f64>() / all.len() as f64
    };
    let output = lines[0]["said"][0].as_str().unwrap();
    let percent = |before: &str| output.split_once(before).unwrap().1.split_once(" %").unwrap().0.parse::<f64>().unwrap() / 1e2;
    let [adam, device] = ["the optimizer has ", "the device "].map(percent);
    let run = SimulatedRun::on_h200("qwen3-4b", 48, Settings { per_device_train_batch_size: 4, ..Settings::default() });
    let rates = run.machine.rates.with_faster_host(adam).with_faster_device(device);
    let mut watched = WatchedRun::new(&run, &run.plan(), &rates);
    watched.go(ANSWERED + WEIGHED, "always");
    let [(moved, _), (_, gained)] = &watched.message[..] else { panic!("{:?}", watched.message) };
    assert_eq!((*moved, gained.starts_with("the plan gained ")), (ANSWERED, true), "{:?}", watched.message);
    let [before, after] = [watched.mean_ms(3..=ANSWERED), watched.mean_ms(ANSWERED + 3..=ANSWERED + WEIGHED)];
    // The recorded run moved after 25 steps.
    for (name, simulated, measured) in
        [("before", before, mean(0, 2..25)), ("without a move", before, mean(1, 2..25)), ("after", after, mean(0, 27..47))]
    {
        assert!((0.9..1.1).contains(&(simulated / measured)), "{name}: {simulated:.0} ms simulated, {measured:.0} measured");
    }
}

#[test]
fn a_falling_clip_rate_leads_to_another_plan_and_back() {
    let (run, plan) = SimulatedRun::plain();
    let mut watched = WatchedRun::new(&run, &plan, &run.machine.rates);
    let planned = watched.places();
    watched.go(ANSWERED + WEIGHED, "always");
    let places = watched.places();
    let [(moved, why), (weighed, gained)] = &watched.message[..] else { panic!("{:?}", watched.message) };
    assert_eq!([*moved, *weighed], [ANSWERED, ANSWERED + WEIGHED]);
    assert!(places != planned && why.contains("100 % of steps are clipped"), "{why}");
    assert!(gained.starts_with("the plan gained "), "{gained}");
    watched.go(ANSWERED + 5 * REST_STEPS, "every-10");
    let [back, rest @ ..] = &watched.message[2..] else { panic!("{:?}", watched.message) };
    assert!(back.1.starts_with("moved: ") && rest.iter().all(|(_, words)| !words.starts_with("moved")), "{:?}", watched.message);
    // Not before its rest is over, and then to the plan that it began with, or one that is as fast.
    assert!(back.0 > ANSWERED + 2 * REST_STEPS, "{:?}", watched.message);
    let mut fresh = WatchedRun::new(&run, &plan, &run.machine.rates);
    fresh.go(40, "every-10");
    assert!(fresh.message.is_empty(), "{:?}", fresh.message);
    let [now, at_first] = [watched.mean_ms(ANSWERED + 5 * REST_STEPS - 19..=ANSWERED + 5 * REST_STEPS), fresh.mean_ms(21..=40)];
    assert!(now < 1.02 * at_first, "{at_first:.1} ms a step at first, {now:.1} after all: {:?}", watched.message);
}

#[test]
fn a_plan_change_with_another_clip_rate_is_logged_without_a_gain() {
    let (run, plan) = SimulatedRun::plain();
    let mut watched = WatchedRun::new(&run, &plan, &run.machine.rates);
    watched.go(ANSWERED, "always");
    watched.go(ANSWERED + WEIGHED, "every-10");
    let [_, (weighed, words)] = &watched.message[..] else { panic!("{:?}", watched.message) };
    assert_eq!(*weighed, ANSWERED + WEIGHED);
    assert!(words.starts_with("the gain of the new plan is unknown: 100 % of steps were clipped before, 10 % since"), "{words}");
}
