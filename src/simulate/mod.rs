//! Simulates a plan's steps on a machine given by its rates: the engine runs on a device that only counts time.

pub(crate) mod clip;
pub(crate) mod flops;
// These tests compare with measurements of a build with every technique.
#[cfg(all(test, feature = "stv", feature = "deadline-order", feature = "repartition"))]
mod network_tests;
pub(crate) mod outcome;
pub(crate) mod random_tokens;
pub(crate) mod saves;
#[cfg(all(test, feature = "stv", feature = "deadline-order", feature = "repartition"))]
mod saves_tests;
pub(crate) mod timed;
#[cfg(all(test, feature = "stv", feature = "deadline-order", feature = "repartition", feature = "weight-flow"))]
mod waits_tests;

use crate::device::sim::{CLOCK_MAX_NS, SimDevice, SimDisk};
use crate::engine::executor::Engine;
use crate::engine::pool::Pool;
use crate::error::{Error, Result};
use crate::host::doorbell::Doorbell;
use crate::host::memory_policy::MemoryPolicy;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::trace::Recorder;
use outcome::Outcome;
use random_tokens::RandomTokens;
use std::ops::Range;
use std::sync::Arc;
use timed::{Steps, Timed};

/// Numbers of micro-batches of a share that are simulated if a plan has more than both together. The cost of one more micro-batch follows
/// from these two simulations. This does not hold for segments of layers: the optimizer bounds steps of few micro-batches, and the device
/// steps of many.
const FEW: [usize; 2] = [2, 4];

/// Simulates `steps` of `plan` on the machine of the plan; with several ranks, the first rank. Returns the outcome, the timeline with room
/// for `trace_spans` on each track, and the window of the timed steps on the simulated clock. Without a timeline, steps of many
/// micro-batches are extrapolated from shorter ones.
///
/// # Errors
/// `Resource` when not even addresses can be reserved, or when the steps exceed the range of the clock.
pub(crate) fn simulate(
    plan: &Plan,
    shape: &ModelShape,
    name: &str,
    steps: Steps,
    trace_spans: usize,
) -> Result<(Outcome, Vec<Recorder>, Range<u64>)> {
    let (each, peak) = (plan.micro_batches_per_partial_sum(), Some(plan.site.machine.rates.matmul_flops(8192)));
    let simulated = |each: usize| run(plan.with_micro_batches_per_partial_sum(each), shape, name, steps, trace_spans);
    let (timed, tracks) = if trace_spans > 0 || each <= FEW.iter().sum() || !plan.placement.segments.is_whole() {
        simulated(each)?
    } else {
        let [(few, _), (more, tracks)] = [simulated(FEW[0])?, simulated(FEW[1])?];
        (more.drawn_out(few, (each - FEW[1]) as f64 / (FEW[1] - FEW[0]) as f64), tracks)
    };
    let window_ns = timed.window_ns.clone();
    if window_ns.end >= CLOCK_MAX_NS as u64 {
        let cause =
            format!("they take more than 31 years: the hardware profile {name} has a rate that is too low, or a time that is too long");
        return Err(Error::resource("simulate steps", cause));
    }
    Ok((timed.outcome(shape, plan, peak, &tracks), tracks, window_ns))
}

fn run(plan: Plan, shape: &ModelShape, name: &str, steps: Steps, trace_spans: usize) -> Result<(Timed, Vec<Recorder>)> {
    let (mut engine, _) = simulated_engine(plan, shape, name, trace_spans)?;
    let mut tokens = RandomTokens::new(0, engine.shape().vocab);
    steps.warm_up(&mut engine, &mut tokens)?;
    let timed = steps.time(&mut engine, &mut tokens, &mut |_| ())?;
    engine.flush()?;
    Ok((timed, engine.finish()?))
}

/// The first rank of `plan`, ready for steps, and the disk of its machine.
fn simulated_engine(plan: Plan, shape: &ModelShape, name: &str, trace_spans: usize) -> Result<(Engine<SimDevice>, SimDisk)> {
    let mut plan = plan.with_host_memory(MemoryPolicy::unbacked());
    plan.site.trace_spans = trace_spans;
    let on = (plan.site.machine.kind, plan.site.machine.device);
    let (dev, pool) =
        SimDevice::new(name, &plan.site.machine.rates, on, (plan.site.threads, plan.site.isa, plan.host_formats()), trace_spans);
    let (shape, pool, dev) = (shape.clone(), Pool::Simulated(pool), dev.among(plan.site.ranks / plan.site.processes));
    let disk = dev.disk();
    let mut engine = if plan.site.ranks == 1 {
        Engine::new(plan, shape, dev, pool, Arc::new(Doorbell::default()))?
    } else {
        Engine::mirrored(plan, shape, dev, pool)?
    };
    engine.pretend_norm();
    engine.send_weights()?;
    Ok((engine, disk))
}
