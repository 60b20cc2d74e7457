//! The engine on the device that was chosen, and the order in which a run comes up: train and bench go this way.

use super::devices::{self, SelectedDevice};
use super::gpu::{self, GpuDevice};
use super::open;
use super::partners::Partner;
use super::ranks::{self, Crew};
use super::share::{self, Share};
use crate::config::options::Technique;
use crate::config::settings::Settings;
use crate::device::cpu::{CpuDevice, Schedule};
use crate::device::{DeviceKind, Engines, Kernels};
use crate::engine::executor::Engine;
use crate::engine::pool::Pool;
use crate::engine::step_job::StepJob;
use crate::error::Result;
use crate::hardware::topology::Topology;
use crate::host::affinity::{Placement, name_and_pin, pinning_refusal};
use crate::host::doorbell::Doorbell;
use crate::host::memory_policy::MemoryPolicy;
#[cfg(feature = "mpam")]
use crate::host::partition;
use crate::host::perf::WORKER_ROLE;
use crate::host::pool::Threads;
use crate::model::shape::ModelShape;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::ranks::Seat;
use crate::search::best_plan;
#[cfg(feature = "mpam")]
use std::path::Path;
use std::sync::Arc;

/// This machine and the device that computes on it.
pub(crate) struct Launcher {
    pub topology: Topology,
    pub chosen: SelectedDevice,
}

/// What is done with an engine, whichever device it runs on.
pub trait UseEngine {
    type Output;

    /// Does it.
    ///
    /// # Errors
    /// Its own.
    fn run<D: Kernels>(self, engine: Engine<D>) -> Result<Self::Output>;
}

impl Launcher {
    /// What `settings` ask for on this machine, and these settings with the GPUs counted.
    pub(crate) fn new(settings: &Settings) -> Result<(Self, Settings)> {
        let topology = Topology::this_machine();
        let chosen = devices::choose(settings, &topology)?;
        let settings = settings.on_gpus(chosen.gpus.len())?;
        Ok((Self { topology, chosen }, settings))
    }

    /// The same for a process among others of its run, which has its part of `machine`.
    pub(crate) fn among(settings: &Settings, machine: &Topology, partner: &Partner) -> Result<(Self, Settings)> {
        let (own, cpus) = partner.share_of(machine);
        let chosen = devices::agreed(settings, machine, partner, cpus)?;
        Ok((
            Self { topology: own.unwrap_or_else(|| machine.clone()), chosen },
            Settings { transport: partner.transport, ..settings.on_gpus(settings.gpus)? },
        ))
    }

    /// What is not as it should be on this machine for a run of `settings`, a line each.
    pub(crate) fn warnings(&self, settings: &Settings) -> Vec<String> {
        let pins = cfg!(feature = "mpam") && !settings.without.contains(&Technique::Mpam);
        let refusal = pinning_refusal().filter(|_| pins);
        let unpinned = refusal
            .map(|why| format!("threads are not pinned to CPUs: {why}; allow sched_setaffinity in the sandbox, or say --without mpam"));
        self.chosen.warning.clone().into_iter().chain(unpinned).collect()
    }

    /// The plan of a run, its host memory as this machine offers it; with room for a timeline if `trace`.
    ///
    /// # Errors
    /// Those of [`best_plan`]; `Resource` when `--huge-pages explicit` cannot be had.
    pub(crate) fn plan(&self, settings: &Settings, shape: &ModelShape, trace: bool) -> Result<Plan> {
        let plan = best_plan(settings, shape, &self.machine_for(settings, shape), trace)?;
        let host_memory = host_memory(settings, &plan, &self.topology)?;
        Ok(Plan { host_memory, ..plan })
    }

    /// The machine, of which is known who can multiply by the experts of a model of `shape`, if it has any: others need not open cuBLASLt yet.
    fn machine_for(&self, settings: &Settings, shape: &ModelShape) -> Machine {
        let machine = self.chosen.machine.clone();
        if !self.chosen.is_gpu() || shape.experts() == 0 {
            return machine;
        }
        Machine { grouped_layouts: gpu::grouped_layouts(settings.cuda_libraries.as_slice()), ..machine }
    }

    /// Makes the engine of `plan` and hands it to `user`. This is where a run learns which device it has.
    ///
    /// # Errors
    /// `Resource` when the device, memory or threads cannot be had; those of `user`.
    pub(crate) fn engine<U: UseEngine>(&self, plan: &Plan, shape: &ModelShape, user: U) -> Result<U::Output> {
        match self.chosen.machine.kind {
            DeviceKind::Cpu => on_cpus(plan, shape, &self.topology, user),
            DeviceKind::Gpu => on_gpus(plan, shape, &self.topology, false, user),
        }
    }

    /// Divides the CPUs once the engine of `plan`, the whole one, has its state: the driver, beside a GPU, keeps off the optimizer's, whose
    /// threads join their partition. Returns the partition in words; `warn` hears why there is none.
    ///
    /// # Errors
    /// `Resource` when the kernel refuses the driver's CPUs.
    pub(crate) fn divide_cpus(&self, settings: &Settings, plan: &Plan, warn: impl FnOnce(&str)) -> Result<String> {
        if self.chosen.is_gpu() {
            let homes = gpu::homes(&self.chosen.gpus, &self.topology);
            share::of(plan, &self.topology, &homes)[0].keep_off_workers()?;
        }
        Ok(join_partition(settings, plan, warn))
    }
}

/// The engine on this machine's CPU.
///
/// # Errors
/// `Resource` when memory or threads cannot be had.
pub fn cpu_engine(plan: &Plan, shape: &ModelShape, topology: &Topology) -> Result<Engine<CpuDevice>> {
    let (share, bell) = (share::whole(plan, topology), Arc::new(Doorbell::default()));
    let (dev, pool) = (cpu_device(&share.plan, &bell)?, cpu_pool(&share, &bell)?);
    Engine::new(share.plan, shape.clone(), dev, pool, bell)
}

/// The engines of `plan` on this machine's CPU, one for each rank, and what `user` makes of the first one.
///
/// # Errors
/// `Resource` when memory or threads cannot be had; those of `user`; `Rank` when another rank has failed.
pub fn on_cpus<U: UseEngine>(plan: &Plan, shape: &ModelShape, topology: &Topology, user: U) -> Result<U::Output> {
    if plan.ranks == 1 {
        return user.run(cpu_engine(plan, shape, topology)?);
    }
    let shares = share::of(plan, topology, &vec![None; plan.ranks]);
    let make = |share: &Share, bell: &Arc<Doorbell>, _| Ok((cpu_device(&share.plan, bell)?, cpu_pool(share, bell)?));
    ranks::run(Crew::here(plan), shape, &shares, make, |engine, _| user.run(engine), |engine, _| engine.follow(|| Ok(())))
}

/// The CPU as the device of `plan`.
pub(crate) fn cpu_device(plan: &Plan, bell: &Arc<Doorbell>) -> Result<CpuDevice> {
    let schedule = plan.adversary.map_or(Schedule::Threads, |seed| Schedule::Adversary { seed });
    open::cpu(plan.threads, schedule, bell.clone(), plan.trace_spans)
}

/// What runs the optimizer's jobs beside such a device.
pub(crate) fn cpu_pool(share: &Share, bell: &Arc<Doorbell>) -> Result<Pool<StepJob>> {
    if share.plan.adversary.is_some() { Ok(Pool::stepped(share.plan.trace_spans)) } else { worker_threads(share, bell) }
}

/// The engine on this machine's first GPU, by kernels that every GPU since Ampere takes where it is to be `portable`.
///
/// # Errors
/// `Resource` when there is none, one of NVIDIA's libraries is missing, or memory or threads cannot be had.
pub fn gpu_engine(plan: &Plan, shape: &ModelShape, topology: &Topology, portable: bool) -> Result<Engine<GpuDevice>> {
    let (share, bell) = (share::whole(plan, topology), Arc::new(Doorbell::default()));
    let (dev, pool) = (gpu_device(&share.plan, 0, portable)?, worker_threads(&share, &bell)?);
    Engine::new(share.plan, shape.clone(), dev, pool, bell)
}

/// The engines of `plan` on this machine's first GPUs, one for each rank, and what `user` makes of the first one. `portable`: see
/// [`gpu_engine`].
///
/// # Errors
/// As [`gpu_engine`]; `Usage` and `Unsupported` when there are fewer GPUs, or several models; those of `user`; `Rank` when another rank has
/// failed.
pub fn on_gpus<U: UseEngine>(plan: &Plan, shape: &ModelShape, topology: &Topology, portable: bool, user: U) -> Result<U::Output> {
    if plan.ranks == 1 {
        return user.run(gpu_engine(plan, shape, topology, portable)?);
    }
    let shares = share::of(plan, topology, &gpu::homes(&gpu::first(gpu::visible()?, plan.ranks)?, topology));
    let make = |share: &Share, bell: &Arc<Doorbell>, rank| Ok((gpu_device(&share.plan, rank, portable)?, worker_threads(share, bell)?));
    let follow = |engine: &mut Engine<GpuDevice>, seat: &Seat| engine.follow(|| shares[seat.rank].keep_off_workers());
    ranks::run(Crew::here(plan), shape, &shares, make, |engine, _| user.run(engine), follow)
}

/// The visible GPU `ordinal`.
pub(super) fn gpu_device(plan: &Plan, ordinal: usize, portable: bool) -> Result<GpuDevice> {
    let engines = Engines { attention: plan.attention, expert_products: plan.expert_products };
    gpu::open(ordinal, plan.cuda_libraries.clone(), engines, plan.trace_spans, portable)
}

/// The optimizer's threads join their partition; what is in force, in words. `warn` hears why they could not.
#[cfg(feature = "mpam")]
fn join_partition(settings: &Settings, plan: &Plan, warn: impl FnOnce(&str)) -> String {
    if !plan.techniques.mpam {
        return "off".into();
    }
    partition::join_optimizer(&settings.resctrl_group, Path::new(superoffload_resctrl::DEFAULT_ROOT)).unwrap_or_else(|error| {
        warn(&error.to_string());
        "none".into()
    })
}

/// The optimizer's threads join no partition: the feature is off.
#[cfg(not(feature = "mpam"))]
fn join_partition(_: &Settings, _: &Plan, _: impl FnOnce(&str)) -> String {
    "compiled out (cargo feature mpam)".into()
}

/// Where host memory comes from on the machine of `topology`, beside the CPUs of the optimizer's workers.
///
/// # Errors
/// `Resource` when `--huge-pages explicit` cannot be had.
fn host_memory(settings: &Settings, plan: &Plan, topology: &Topology) -> Result<MemoryPolicy> {
    let workers = Some(topology).filter(|_| plan.techniques.mpam).and_then(|topology| Placement::on(topology, plan.threads));
    let workers = workers.map_or_else(Vec::new, |placement| placement.workers);
    MemoryPolicy::new(topology, settings.huge_pages, &workers, plan.threads)
}

pub(super) fn worker_threads(Share { plan, placement }: &Share, bell: &Arc<Doorbell>) -> Result<Pool<StepJob>> {
    let placement = placement.clone();
    let pin = |place: &Placement, worker: usize| name_and_pin(WORKER_ROLE, worker, place.workers[worker]);
    let on_start = move |worker: usize| placement.as_ref().map_or(Ok(()), |place| pin(place, worker));
    Threads::start(plan.threads, plan.host_memory.homes(), bell.clone(), plan.trace_spans, on_start).map(Pool::Threads)
}
