//! The engines of one process in a run of several processes. All processes have the same number of ranks. Process 0 leads, and the other
//! processes follow its orders.

use super::agreement::expect_same_libraries;
use super::engine::{Launcher, UseEngine, cpu_device, cpu_pool, gpu_device, worker_threads};
use super::gpu::{self, GpuDevice};
use super::ranks::{self, Crew};
use super::share::{self, Share};
use crate::bucket::slices::Slices;
use crate::device::cpu::CpuDevice;
use crate::device::{DeviceKind, Kernels, Peers};
use crate::engine::executor::Engine;
use crate::engine::pool::Pool;
use crate::engine::pulls::Reach;
use crate::engine::step_job::StepJob;
use crate::engine::watchdog::{Watchdog, Watched};
use crate::error::{Error, Result};
use crate::host::doorbell::Doorbell;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::ranks::RailKey;
use crate::ranks::Seat;
use crate::ranks::board::Board;
use crate::ranks::links::Links;
use std::sync::Arc;

/// The work of a rank other than rank 0 with its engine.
pub(crate) trait FollowEngine: Sync {
    /// Runs the engine. Calls `settle_down` when the state exists, before the first step.
    ///
    /// # Errors
    /// Errors of the implementation and of `settle_down`.
    fn run<D: Kernels + Peers>(&self, engine: &mut Engine<D>, settle_down: impl FnOnce() -> Result<()>) -> Result<()>;
}

/// One process of a run.
#[derive(Clone, Copy)]
pub(crate) struct ThisProcess<'a> {
    pub(crate) launch: &'a Launcher,
    /// The plan for all ranks of the run.
    pub(crate) plan: &'a Plan,
    pub(crate) shape: &'a ModelShape,
    pub(crate) links: &'a Links,
}

impl ThisProcess<'_> {
    /// Runs `user` with the engine of rank 0, which leads all other ranks. The other ranks of this process run `followers`.
    ///
    /// # Errors
    /// `Resource` if memory or threads are not available; `Rank` if another rank has failed; errors of `user`.
    pub(crate) fn lead<U: UseEngine>(self, user: U, followers: &impl FollowEngine) -> Result<U::Output> {
        match self.launch.chosen.machine.kind {
            DeviceKind::Cpu => self.on_cpus(followers, |engine, _| user.run(engine)),
            DeviceKind::Gpu => self.on_gpus(followers, |engine, _| user.run(engine)),
        }
    }

    /// Runs `followers` on all ranks of this process, under the orders of rank 0, until the run is over or a process has ended; returns the
    /// reason. The watchdog that `watch` creates runs meanwhile.
    pub(crate) fn follow(self, followers: &impl FollowEngine, watch: impl FnOnce(Watched) -> Result<Option<Watchdog>>) -> Error {
        let followed = match self.launch.chosen.machine.kind {
            DeviceKind::Cpu => self.on_cpus(followers, |engine, seat| follow_watched(engine, seat, followers, watch, || Ok(()))),
            DeviceKind::Gpu => {
                let settle_down = || self.shares()[0].keep_off_workers();
                self.on_gpus(followers, |engine, seat| follow_watched(engine, seat, followers, watch, settle_down))
            }
        };
        followed.err().unwrap_or_else(|| Error::resource("follow process 0", "it sent no more orders"))
    }

    fn on_cpus<T>(self, followers: &impl FollowEngine, lead: impl FnOnce(Engine<CpuDevice>, &Seat) -> Result<T>) -> Result<T> {
        let make = |share: &Share, bell: &Arc<Doorbell>, _| Ok((cpu_device(&share.plan, bell)?, cpu_pool(share, bell)?));
        self.run(make, lead, |engine, _| followers.run(engine, || Ok(())))
    }

    fn on_gpus<T>(self, followers: &impl FollowEngine, lead: impl FnOnce(Engine<GpuDevice>, &Seat) -> Result<T>) -> Result<T> {
        let gpus = &self.launch.chosen.gpus;
        let make = |share: &Share, bell: &Arc<Doorbell>, place: usize| {
            Ok((gpu_device(&share.plan, gpus[place].index, false)?, worker_threads(share, bell)?))
        };
        self.run(make, lead, |engine, share| followers.run(engine, || share.keep_off_workers()))
    }

    /// Runs the ranks of this process after the rendezvous of all processes. `make` creates the device and the pool of a rank from its
    /// share, its doorbell and its index in the process.
    fn run<D: Kernels + Peers, T>(
        self,
        make: impl Fn(&Share, &Arc<Doorbell>, usize) -> Result<(D, Pool<StepJob>)> + Sync,
        lead: impl FnOnce(Engine<D>, &Seat) -> Result<T>,
        follow: impl Fn(&mut Engine<D>, &Share) -> Result<()> + Sync,
    ) -> Result<T> {
        let (crew, shares) = (self.meet()?, self.shares());
        let first = crew.board.mates().start;
        let lead = |engine: Engine<D>, seat: &Seat| {
            expect_same_libraries(self.links, &engine).inspect_err(|error| seat.fail(error))?;
            lead(engine, seat)
        };
        ranks::run(crew, self.shape, &shares, make, lead, |engine, seat| follow(engine, &shares[seat.rank - first]))
    }

    /// Connects the progress counters (`Board`) to the other processes, and each rank of this process to the ranks of other processes.
    fn meet(self) -> Result<Crew> {
        let Self { plan, links, .. } = self;
        let longest = Slices::new(plan.layout.clone(), 0, plan.ranks).longest();
        let parcel_bytes = longest * plan.dtype.bytes();
        if !plan.by_nccl && u32::try_from(parcel_bytes).is_err() {
            let cause = format!("--bucket-mib: a slice of {parcel_bytes} bytes is too long for one parcel; use smaller buckets");
            return Err(Error::usage(cause));
        }
        let (board, lanes) = links.attach(|abroad| Board::linked(plan.board_sizes(), abroad), parcel_bytes)?;
        let seat = Seat { board: board.clone(), rank: board.mates().start };
        let reaches = match plan.by_nccl {
            true => vec![one_key(plan, links).map_err(|error| seat.blame(error))?; lanes.len()].into_iter().map(Reach::Rail).collect(),
            false => lanes.into_iter().map(Reach::Lanes).collect(),
        };
        Ok(Crew { board, reaches })
    }

    /// Divides the resources of this process among its ranks.
    fn shares(self) -> Vec<Share> {
        let ranks = self.plan.ranks / self.plan.processes;
        let adversary = self.plan.adversary.map(|seed| seed.wrapping_add((self.links.process() * ranks) as u64));
        let near = gpu::homes(&self.launch.chosen.gpus, &self.launch.topology);
        // A single rank gets all CPUs of the process.
        let homes = if near.len() > 1 { near } else { vec![None; ranks] };
        share::of(&Plan { adversary, ..self.plan.clone() }, &self.launch.topology, &homes)
    }
}

/// Runs the first rank of a process other than 0, with the watchdog of all its ranks.
fn follow_watched<D: Kernels + Peers>(
    mut engine: Engine<D>,
    seat: &Seat,
    followers: &impl FollowEngine,
    watch: impl FnOnce(Watched) -> Result<Option<Watchdog>>,
    settle_down: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let watchdog = watch(engine.watched()).map_err(|error| seat.blame(error))?;
    let followed = followers.run(&mut engine, settle_down).map_err(|error| seat.blame(error));
    drop(watchdog);
    followed
}

/// The NCCL unique ID by which all GPUs find each other. Process 0 creates it.
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
