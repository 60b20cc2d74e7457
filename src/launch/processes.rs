//! The engines of one process in a run of several processes. All processes have the same number of ranks. Process 0 leads, and the other
//! processes follow its orders.

use super::agreement::expect_same_libraries;
use super::cpu_slice::{self, CpuSlice};
use super::engine::{Launcher, UseEngine, cpu_device, cpu_pool, gpu_device, worker_threads};
use super::gpu::{self, GpuDevice};
use super::ranks::{self, LocalRanks};
use crate::bucket::slices::Slices;
use crate::device::cpu::CpuDevice;
use crate::device::{DeviceKind, Kernels, Peers};
use crate::engine::executor::Engine;
use crate::engine::pool::Pool;
use crate::engine::ranks::peer_exchange::PeerTransport;
use crate::engine::step_job::StepJob;
use crate::engine::watch::watchdog::{Watchdog, Watched};
use crate::error::{Error, Result};
use crate::host::doorbell::Doorbell;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::ranks::NcclUniqueId;
use crate::ranks::RankContext;
use crate::ranks::links::Links;
use crate::ranks::progress::ProgressCounters;
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
            DeviceKind::Cpu => self.on_cpus(followers, |engine, context| follow_watched(engine, context, followers, watch, || Ok(()))),
            DeviceKind::Gpu => {
                let settle_down = || self.cpu_slices()[0].keep_off_workers();
                self.on_gpus(followers, |engine, context| follow_watched(engine, context, followers, watch, settle_down))
            }
        };
        followed.err().unwrap_or_else(|| Error::resource("follow process 0", "it sent no more orders"))
    }

    fn on_cpus<T>(self, followers: &impl FollowEngine, lead: impl FnOnce(Engine<CpuDevice>, &RankContext) -> Result<T>) -> Result<T> {
        let make = |cpu_slice: &CpuSlice, bell: &Arc<Doorbell>, _| Ok((cpu_device(&cpu_slice.plan, bell)?, cpu_pool(cpu_slice, bell)?));
        self.run(make, lead, |engine, _| followers.run(engine, || Ok(())))
    }

    fn on_gpus<T>(self, followers: &impl FollowEngine, lead: impl FnOnce(Engine<GpuDevice>, &RankContext) -> Result<T>) -> Result<T> {
        let gpus = &self.launch.chosen.gpus;
        let make = |cpu_slice: &CpuSlice, bell: &Arc<Doorbell>, place: usize| {
            Ok((gpu_device(&cpu_slice.plan, gpus[place].index, false)?, worker_threads(cpu_slice, bell)?))
        };
        self.run(make, lead, |engine, cpu_slice| followers.run(engine, || cpu_slice.keep_off_workers()))
    }

    /// Runs the ranks of this process after the rendezvous of all processes. `make` creates the device and the pool of a rank from its
    /// share, its doorbell and its index in the process.
    fn run<D: Kernels + Peers, T>(
        self,
        make: impl Fn(&CpuSlice, &Arc<Doorbell>, usize) -> Result<(D, Pool<StepJob>)> + Sync,
        lead: impl FnOnce(Engine<D>, &RankContext) -> Result<T>,
        follow: impl Fn(&mut Engine<D>, &CpuSlice) -> Result<()> + Sync,
    ) -> Result<T> {
        let (local_ranks, cpu_slices) = (self.meet()?, self.cpu_slices());
        let first = local_ranks.progress.local_ranks().start;
        let lead = |engine: Engine<D>, context: &RankContext| {
            expect_same_libraries(self.links, &engine).inspect_err(|error| context.fail(error))?;
            lead(engine, context)
        };
        ranks::run(local_ranks, self.shape, &cpu_slices, make, lead, |engine, context| follow(engine, &cpu_slices[context.rank - first]))
    }

    /// Connects the progress counters to the other processes, and each rank of this process to the ranks of other processes.
    fn meet(self) -> Result<LocalRanks> {
        let Self { plan, links, .. } = self;
        let longest = Slices::new(plan.placement.layout.clone(), 0, plan.site.ranks).longest();
        let parcel_bytes = longest * plan.recipe.numerics.dtype.bytes();
        if !plan.site.by_nccl && u32::try_from(parcel_bytes).is_err() {
            let cause = format!("--bucket-mib: a slice of {parcel_bytes} bytes is too long for one parcel; use smaller buckets");
            return Err(Error::usage(cause));
        }
        let (progress, connections) = links.attach(|remote| ProgressCounters::linked(plan.board_sizes(), remote), parcel_bytes)?;
        let context = RankContext { progress: progress.clone(), rank: progress.local_ranks().start };
        let reaches = match plan.site.by_nccl {
            true => vec![one_key(plan, links).map_err(|error| context.attribute(error))?; connections.len()]
                .into_iter()
                .map(PeerTransport::Nccl)
                .collect(),
            false => connections.into_iter().map(PeerTransport::Tcp).collect(),
        };
        Ok(LocalRanks { progress, reaches })
    }

    /// Divides the resources of this process among its ranks.
    fn cpu_slices(self) -> Vec<CpuSlice> {
        let ranks = self.plan.site.ranks / self.plan.site.processes;
        let mut plan = self.plan.clone();
        plan.site.adversary = self.plan.site.adversary.map(|seed| seed.wrapping_add((self.links.process() * ranks) as u64));
        let near = gpu::gpu_nodes(&self.launch.chosen.gpus, &self.launch.topology);
        // A single rank gets all CPUs of the process.
        let gpu_nodes = if near.len() > 1 { near } else { vec![None; ranks] };
        cpu_slice::of(&plan, &self.launch.topology, &gpu_nodes)
    }
}

/// Runs the first rank of a process other than 0, with the watchdog of all its ranks.
fn follow_watched<D: Kernels + Peers>(
    mut engine: Engine<D>,
    context: &RankContext,
    followers: &impl FollowEngine,
    watch: impl FnOnce(Watched) -> Result<Option<Watchdog>>,
    settle_down: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let watchdog = watch(engine.watched()).map_err(|error| context.attribute(error))?;
    let followed = followers.run(&mut engine, settle_down).map_err(|error| context.attribute(error));
    drop(watchdog);
    followed
}

/// The NCCL unique ID by which all GPUs find each other. Process 0 creates it.
fn one_key(plan: &Plan, links: &Links) -> Result<NcclUniqueId> {
    let format = |e| Error::format("the key of NCCL", e);
    if links.process() == 0 {
        let key = gpu::rail_key(&plan.site.cuda_libraries)?;
        links.propose(&serde_json::to_string(&key.0[..]).map_err(format)?);
        return Ok(key);
    }
    let key: Vec<u8> = serde_json::from_str(&links.expect_proposal()?).map_err(format)?;
    key.try_into().map(NcclUniqueId).map_err(|key: Vec<u8>| Error::format("the key of NCCL", format!("it has {} bytes", key.len())))
}
