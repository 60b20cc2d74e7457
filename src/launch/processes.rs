//! Several processes, a rank each: the engine of this one, and what it does. Process 0 leads, the others follow.

use super::agreement::expect_same_libraries;
use super::engine::{Launcher, UseEngine, cpu_device, cpu_pool, gpu_device, worker_threads};
use super::gpu::{self, GpuDevice};
use super::share::{self, Share};
use crate::bucket::slices::Slices;
use crate::device::cpu::CpuDevice;
use crate::device::{DeviceKind, Kernels, Peers};
use crate::engine::hall::Hall;
use crate::engine::orders::RankEngine;
use crate::engine::pool::Pool;
use crate::engine::pulls::Reach;
use crate::engine::step_job::StepJob;
use crate::error::{Error, Result};
use crate::host::doorbell::Doorbell;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::ranks::board::Board;
use crate::ranks::links::Links;
use crate::ranks::{RailKey, Seat};
use std::sync::Arc;

/// What a process behind process 0 does with its engine.
pub(crate) trait FollowEngine {
    /// Does it; before the first step, once the state is there, `settle_down`.
    ///
    /// # Errors
    /// Its own, and those of `settle_down`.
    fn run<D: Kernels + Peers>(self, engine: &mut RankEngine<D>, settle_down: impl FnOnce() -> Result<()>) -> Result<()>;
}

/// This process's rank: its engine, its place among all, and its share of the machine.
type Joined<D> = (RankEngine<D>, Seat, Share);

/// The rank of this process, on what `make` makes of its share and its bell, once all others have theirs.
///
/// # Errors
/// `Resource` when memory or threads cannot be had; `Rank` when another process has ended.
fn join<D: Kernels + Peers>(
    launch: &Launcher,
    plan: &Plan,
    shape: &ModelShape,
    links: &Links,
    make: impl FnOnce(&Share, &Arc<Doorbell>) -> Result<(D, Pool<StepJob>)>,
) -> Result<Joined<D>> {
    let slices = Slices::new(plan.layout.clone(), links.process(), plan.ranks);
    let parcel_bytes = slices.longest() * plan.dtype.bytes();
    if !plan.by_nccl && u32::try_from(parcel_bytes).is_err() {
        return Err(Error::usage(format!("--bucket-mib: a slice of {parcel_bytes} bytes is too long for one parcel; use smaller buckets")));
    }
    let (board, lanes) = links.attach(|abroad| Board::linked(plan.board_sizes(), abroad), parcel_bytes)?;
    let seat = Seat { board, rank: links.process() };
    let join = || -> Result<_> {
        // All that the launcher has found is this rank's, and so is what an adversary draws.
        let adversary = plan.adversary.map(|seed| seed.wrapping_add(seat.rank as u64));
        let share = share::whole(&Plan { ranks: 1, adversary, ..plan.clone() }, &launch.topology);
        let bell = seat.board.bell(seat.rank);
        let made = make(&share, &bell)?;
        let own = Plan { ranks: plan.ranks, ..share.plan.clone() };
        let reach = if plan.by_nccl { Reach::Rail(one_key(plan, links)?) } else { Reach::Lanes(lanes) };
        let engine = RankEngine::join((own, shape.clone()), made, &seat, &Arc::new(Hall::new(1)), reach)?;
        Ok((engine, share))
    };
    let (engine, share) = join().map_err(|error| seat.blame(error))?;
    expect_same_libraries(links, &engine).inspect_err(|error| seat.fail(error))?;
    Ok((engine, seat, share))
}

/// The key by which all devices find each other, which process 0 makes.
fn one_key(plan: &Plan, links: &Links) -> Result<RailKey> {
    let format = |e| Error::format("the key of NCCL", e);
    if links.process() == 0 {
        let key = gpu::rail_key(&plan.cuda_libraries)?;
        links.propose(&serde_json::to_string(&key.0[..]).map_err(format)?);
        return Ok(key);
    }
    let key: Vec<u8> = serde_json::from_str(&links.expect_proposal()?).map_err(format)?;
    key.try_into().map(RailKey).map_err(|key: Vec<u8>| Error::format("the key of NCCL", format!("it has {} bytes", key.len())))
}

fn on_cpus(launch: &Launcher, plan: &Plan, shape: &ModelShape, links: &Links) -> Result<Joined<CpuDevice>> {
    join(launch, plan, shape, links, |share, bell| Ok((cpu_device(&share.plan, bell)?, cpu_pool(share, bell)?)))
}

fn on_gpu(launch: &Launcher, plan: &Plan, shape: &ModelShape, links: &Links) -> Result<Joined<GpuDevice>> {
    let ordinal = launch.chosen.gpus.first().map_or(0, |gpu| gpu.index);
    join(launch, plan, shape, links, |share, bell| Ok((gpu_device(&share.plan, ordinal, false)?, worker_threads(share, bell)?)))
}

/// What `user` makes of the engine of process 0, which leads all others.
///
/// # Errors
/// As [`join`]; those of `user`.
pub(crate) fn lead<U: UseEngine>(launch: &Launcher, plan: &Plan, shape: &ModelShape, links: &Links, user: U) -> Result<U::Output> {
    match launch.chosen.machine.kind {
        DeviceKind::Cpu => user.run(on_cpus(launch, plan, shape, links)?.0),
        DeviceKind::Gpu => user.run(on_gpu(launch, plan, shape, links)?.0),
    }
}

/// Does what process 0 says, as `user` does it, until the run is over or a process has ended: returns which.
pub(crate) fn follow(launch: &Launcher, plan: &Plan, shape: &ModelShape, links: &Links, user: impl FollowEngine) -> Error {
    let followed = match launch.chosen.machine.kind {
        DeviceKind::Cpu => on_cpus(launch, plan, shape, links).and_then(|joined| carry_out(joined, user, |_| Ok(()))),
        DeviceKind::Gpu => on_gpu(launch, plan, shape, links).and_then(|joined| carry_out(joined, user, Share::keep_off_workers)),
    };
    followed.err().unwrap_or_else(|| Error::resource("follow process 0", "it gave no more orders"))
}

fn carry_out<D: Kernels + Peers>(
    (mut engine, seat, share): Joined<D>,
    user: impl FollowEngine,
    settle_down: impl FnOnce(&Share) -> Result<()>,
) -> Result<()> {
    user.run(&mut engine, || settle_down(&share)).map_err(|error| seat.blame(error))
}
