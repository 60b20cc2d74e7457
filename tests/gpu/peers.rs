//! Several devices that train as one: the bits of one device, overlapping copies, and ranks that are late.

use super::random::Random;
use super::report::{Missed, Outcome, Report, require};
use super::training::{Course, FP8, RECIPE, Run, SPECULATE, median_norm, narrow_shape, places, run_engine, runs_beside, shape, wide_shape};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use superoffload::internals::device::Kernels;
use superoffload::internals::engine::{Counts, Engine};
use superoffload::internals::hardware::Topology;
use superoffload::internals::launch::UseEngine;
use superoffload::internals::model::ModelShape;
use superoffload::internals::planner::Machine;
use superoffload::{Error, Plan, Result, Settings, TrainOptions};

/// Occasionally keeps the device of a rank busy until the [`Disturbance`] is over. `usize` is the rank.
pub type Disturb<'a> = &'a (dyn Fn(usize, &Disturbance) -> Result<()> + Sync);

/// The tested devices, for training on several of them.
pub struct Ranks<'a> {
    /// Trains on the number of devices in the plan.
    pub launch: &'a dyn Fn(&Plan, &ModelShape, &Topology, Training<'_>) -> Result<Run>,
    /// The machine of the plan.
    pub machine: Machine,
    /// Settings of the device, as lines of a configuration file.
    pub settings: &'a str,
    /// Number of devices.
    pub devices: usize,
    /// Whether streams are real, so that spans may overlap.
    pub overlaps: bool,
    pub disturb: Disturb<'a>,
    /// Steps of a run: more than five, because faults are injected up to step 5.
    pub steps: usize,
    /// Number of runs with a late rank.
    pub late_runs: usize,
}

/// The rank that is to be late.
#[derive(Default)]
pub struct Disturbance {
    rank: AtomicUsize,
    is_over: AtomicBool,
}

#[cfg(feature = "cuda")]
impl Disturbance {
    /// Calls `work` repeatedly while `rank` is to be late, until the run is over.
    pub fn while_late(&self, rank: usize, mut work: impl FnMut() -> Result<()>) -> Result<()> {
        while !self.is_over.load(Ordering::Relaxed) {
            if self.rank.load(Ordering::Relaxed) == rank {
                work()?;
            }
            std::thread::sleep(Duration::from_micros(300));
        }
        Ok(())
    }
}

/// A training run on any device.
pub struct Training<'a> {
    settings: &'a Settings,
    course: Course<'a>,
}

impl UseEngine for Training<'_> {
    type Output = Run;

    fn run<D: Kernels>(self, engine: Engine<D>) -> Result<Run> {
        run_engine(engine, self.settings, self.course)
    }
}

/// Buckets of 8 blocks: one block for each of up to eight devices.
const CUT: &str = "bucket-mib = 0.0625\n";

impl Ranks<'_> {
    /// Gradient shares of all cases, independent of the devices: the largest number of devices in a case.
    fn shares(&self) -> usize {
        1 << self.devices.clamp(2, 8).ilog2()
    }

    /// Two, four and eight devices, as far as available.
    fn counts(&self) -> impl Iterator<Item = usize> {
        let most = self.shares();
        [2, 4, 8].into_iter().take_while(move |count| *count <= most)
    }

    /// Settings for `gpus` devices. Unless `lines` set the shares, each device computes equally many.
    fn settings(&self, gpus: usize, lines: &str) -> Result<Settings> {
        let shares = self.shares();
        let cut = format!("gradient-shares = {shares}\ngradient-accumulation-steps = {}\n", shares / gpus);
        let cut = if lines.contains("gradient-shares") { "" } else { &cut };
        let toml = format!("{RECIPE}{}gpus = {gpus}\n{cut}{lines}", self.settings);
        Settings::resolve(TrainOptions::from_toml(&toml)?)
    }

    fn train(&self, shape: &ModelShape, gpus: usize, lines: &str, trace: bool, before_data: &mut dyn FnMut()) -> Result<Run> {
        let settings = self.settings(gpus, lines)?;
        let plan = Plan::new(&settings.request(shape), &self.machine, trace)?;
        let course = Course { steps: self.steps, before_data, moves: &|_| Ok(None) };
        let training = Training { settings: &settings, course };
        (self.launch)(&plan, shape, &Topology::this_machine(), training)
    }

    fn on(&self, gpus: usize, lines: &str) -> Result<Run> {
        self.train(&shape(), gpus, &format!("{CUT}{lines}"), false, &mut || ())
    }
}

/// Runs all cases of several devices; they are skipped with one device.
pub fn run<W: Write>(report: &mut Report<W>, ranks: &Ranks<'_>) {
    let mut case = |name: &str, body: &dyn Fn(&Ranks<'_>) -> Outcome| {
        report.case(&format!("peers/{name}"), || if ranks.devices < 2 { alone(ranks) } else { body(ranks) });
    };
    case("all have the digest of one, every state on the host", &|ranks| same_bits(ranks, OFFLOADED, false));
    case("all have the digest of one, no state on the host", &|ranks| same_bits(ranks, "strategy = \"no-offload\"\n", false));
    case("all have the digest of one, some states on the host", &|ranks| same_bits(ranks, PARTLY, false));
    case("all have the digest of one, NaN and Inf on one of them", &|ranks| same_bits(ranks, OFFLOADED, true));
    case("all have the digest of one, products in FP8", &in_fp8);
    case("all have the digest of one, each with its part of the weights", &sharded);
    case("all have the digest of one, gradients in a ring", &ringed);
    case("all have the digest of one, plans that change between steps", &replanned);
    case("all share sequences: one digest, and nearly the losses of one", &sequences);
    case("gradients and weights are pulled while products run", &overlap);
    case("a rank that is late changes nothing", &late);
}

fn alone(ranks: &Ranks<'_>) -> Outcome {
    Err(Missed::Skipped(format!("this needs two devices; here are {}", ranks.devices)))
}

const OFFLOADED: &str = "strategy = \"superoffload\"\nwithout = [\"adaptive\"]\nslots = 2\nresident-buckets = 0\n";
const PARTLY: &str = if cfg!(feature = "repartition") {
    "strategy = \"superoffload\"\nwithout = [\"adaptive\"]\nslots = 3\nresident-buckets = 2\n"
} else {
    OFFLOADED
};

/// One device and several, with about half of the steps clipped, and optionally with invalid gradients in one share or another.
fn same_bits(ranks: &Ranks<'_>, lines: &str, is_poisoned: bool) -> Outcome {
    let faults =
        "inject = [{step = 3, element = 20, share = 1, value = \"nan\"}, {step = 5, element = 9000, share = 0, value = \"-inf\"}]\n";
    let lines = format!("{lines}{}", if is_poisoned { faults } else { "" });
    let max_norm = median_norm(&ranks.on(1, &format!("{lines}max-grad-norm = 0\n"))?)?;
    let lines = format!("{lines}max-grad-norm = {max_norm}\n");
    let one = ranks.on(1, &lines)?;
    for count in ranks.counts() {
        let several = ranks.on(count, &lines)?;
        same_as(&one, &several, count)?;
        let Counts { committed, clipped, skipped, .. } = several.counts;
        require(committed > 0 && clipped > 0 && (skipped > 0) == is_poisoned, || format!("{:?}", several.counts))?;
    }
    Ok(0.0)
}

fn same_as(one: &Run, several: &Run, count: usize) -> Outcome {
    require(several.losses() == one.losses(), || format!("losses {:?} of {count}, on one device {:?}", several.losses(), one.losses()))?;
    require(several.digest == one.digest, || format!("another state of {count} than on one device"))?;
    Ok(0.0)
}

/// Enough layers for a ring to save memory. Chunks of rings are larger on a GPU.
fn many_layers(ranks: &Ranks<'_>) -> ModelShape {
    if ranks.overlaps { wide_shape(6) } else { narrow_shape(12) }
}

/// FP8 products, if a device supports them. Ranks compare the algorithms of their products, which are distinguished by format, too.
fn in_fp8(ranks: &Ranks<'_>) -> Outcome {
    match ranks.on(1, FP8) {
        Err(e @ Error::Unsupported(_)) => Err(Missed::Skipped(e.to_string())),
        Err(e) => Err(e.into()),
        Ok(_) => same_bits(ranks, &format!("{OFFLOADED}{FP8}"), false),
    }
}

/// Fixed activation policy, so that plans do not differ in it.
const IN_RINGS: &str = "activations = \"keep\"\nmax-grad-norm = 0.5\n";

/// Compares one device with `count` devices, which train with `lines`.
fn same_as_one(ranks: &Ranks<'_>, lines: &dyn Fn(usize) -> std::result::Result<String, Missed>) -> Outcome {
    let shape = many_layers(ranks);
    let train = |gpus, lines: &str| ranks.train(&shape, gpus, &format!("{PARTLY}{IN_RINGS}{lines}"), false, &mut || ());
    let one = train(1, "")?;
    for count in ranks.counts() {
        same_as(&one, &train(count, &lines(count)?)?, count)?;
    }
    Ok(0.0)
}

/// Sharded weights: each device pulls every module's weights twice per micro-batch, including its own slice.
fn sharded(ranks: &Ranks<'_>) -> Outcome {
    if cfg!(feature = "weight-flow") {
        same_as_one(ranks, &|_| Ok("weights = \"sharded\"\n".into()))
    } else {
        Err(Missed::Skipped("weight-flow is off".into()))
    }
}

/// A gradient ring, on memory that lacks 32 MiB for separate gradients.
fn ringed(ranks: &Ranks<'_>) -> Outcome {
    if !ranks.overlaps {
        return Err(Missed::Skipped("a device that shares the host's memory has no ring of gradients".into()));
    }
    same_as_one(ranks, &|count| {
        let plan = |more: &str| {
            let settings = ranks.settings(count, &format!("{PARTLY}{IN_RINGS}{more}"))?;
            Plan::new(&settings.request(&many_layers(ranks)), &ranks.machine, false)
        };
        let needed = plan("weights = \"replicated\"\n")?.balances()[0].needed;
        let limit = format!("weights = \"replicated\"\nhbm-limit = \"{}MiB\"\n", (needed >> 20) - 32);
        require(plan(&limit)?.placement.rings.grads.is_some(), || "no ring was planned".into())?;
        Ok(limit)
    })
}

/// All ranks change their placements before every second step.
fn replanned(ranks: &Ranks<'_>) -> Outcome {
    let shape = many_layers(ranks);
    let settings = |gpus, places: &str| {
        let places = places.replace("\"flow\"", "\"sharded\"");
        ranks.settings(gpus, &format!("{SPECULATE}max-grad-norm = 0.5\n{places}"))
    };
    let train = |gpus, moves: &dyn Fn(usize) -> Result<Option<Plan>>| -> Result<Run> {
        let settings = settings(gpus, &places()[0])?;
        let plan = Plan::new(&settings.request(&shape), &ranks.machine, false)?;
        let course = Course { steps: 10, before_data: &mut || (), moves };
        (ranks.launch)(&plan, &shape, &Topology::this_machine(), Training { settings: &settings, course })
    };
    let one = train(1, &|_| Ok(None))?;
    for count in ranks.counts() {
        let moves = |step: usize| {
            let plan = || Plan::new(&settings(count, &places()[step / 2 % 4])?.request(&shape), &ranks.machine, false);
            if step > 0 && step.is_multiple_of(2) { plan().map(Some) } else { Ok(None) }
        };
        same_as(&one, &train(count, &moves)?, count)?;
    }
    Ok(0.0)
}

/// Every strategy and policy has the bits of the synchronous step on as many devices. One device with the same micro-batches has nearly the
/// same losses: in bfloat16 each partial gradient is rounded, which affects later losses.
fn sequences(ranks: &Ranks<'_>) -> Outcome {
    let common = "bucket-mib = 0.0625\nmax-grad-norm = 0.5\ngradient-accumulation-steps = 2\n";
    let train = |gpus, lines: &str| ranks.train(&shape(), gpus, &format!("{common}{lines}"), false, &mut || ());
    let one = train(1, "gradient-shares = 2\nstrategy = \"no-offload\"\n")?;
    let mut largest: f64 = 0.0;
    // The shape has four heads.
    for count in ranks.counts().filter(|count| *count <= 4) {
        let several = |lines: &str| train(count, &format!("sequence-ranks = {count}\ngradient-shares = {}\n{lines}", 2 * count));
        let want = several("strategy = \"no-offload\"\n")?;
        for policy in ["keep", "recompute-cheap", "recompute-block", "host-attention", "host"] {
            let have = several(&format!("{OFFLOADED}activations = \"{policy}\"\n"))?;
            let is_same = have.losses() == want.losses() && have.digest == want.digest;
            require(is_same, || format!("{policy} on {count}: losses {:?}, then {:?}", want.losses(), have.losses()))?;
        }
        let differences = one.losses().into_iter().zip(want.losses()).map(|(one, several)| f64::from((one - several).abs() / one));
        largest = differences.fold(largest, f64::max);
        require(largest < 1.0 / 256.0, || format!("losses {:?} of {count}, on one device {:?}", want.losses(), one.losses()))?;
    }
    Ok(largest * 256.0)
}

/// Checks in the timeline that pulls overlap with the compute stream.
fn overlap(ranks: &Ranks<'_>) -> Outcome {
    if !ranks.overlaps {
        return Err(Missed::Skipped("on this device it is up to the scheduler".into()));
    }
    // With few tokens nothing is left to compute while weights arrive one by one from the host. If weights are on the devices, they arrive
    // at once.
    let offloaded = format!("{SPECULATE}resident-buckets = 0\n");
    for (track, lines) in [("reduce", &*offloaded), ("gather", "strategy = \"no-offload\"\n")] {
        let lines = format!("max-grad-norm = 0\n{lines}");
        let run = ranks.train(&wide_shape(4), ranks.shares(), &lines, true, &mut || ())?;
        require(runs_beside(&run, "rank 0 ", track, "pull")?, || format!("{track} never pulled beside the compute stream"))?;
    }
    Ok(0.0)
}

/// A random rank's device is kept busy in each run, and the data of the first rank is randomly late.
fn late(ranks: &Ranks<'_>) -> Outcome {
    let lines = format!("{PARTLY}max-grad-norm = 0.5\n");
    let (want, count) = (ranks.on(1, &lines)?, ranks.shares());
    let disturbance = Disturbance::default();
    let mut random = Random::new(0, "late ranks");
    std::thread::scope(|scope| {
        let (disturb, disturbance) = (ranks.disturb, &disturbance);
        let disturbed: Vec<_> = (0..count).map(|rank| scope.spawn(move || disturb(rank, disturbance))).collect();
        let mut body = || -> Outcome {
            for nth in 0..ranks.late_runs {
                disturbance.rank.store(random.bits() as usize % count, Ordering::Relaxed);
                let mut wait = || std::thread::sleep(Duration::from_micros(u64::from(random.bits() % 2000)));
                let have = ranks.train(&shape(), count, &format!("{CUT}{lines}"), false, &mut wait)?;
                require(have.losses() == want.losses() && have.digest == want.digest, || format!("run {nth}: other bits"))?;
            }
            Ok(0.0)
        };
        let outcome = body();
        disturbance.is_over.store(true, Ordering::Relaxed);
        for thread in disturbed {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        outcome
    })
}
