//! Construction of the engine on the selected device, and the startup order that `train` and `bench` share.

use super::cpu_slice::{self, CpuSlice};
use super::devices::{self, SelectedDevice};
use super::gpu::{self, GpuDevice};
use super::open;
use super::process_info::ProcessInfo;
use super::ranks::{self, LocalRanks};
use crate::config::settings::Settings;
use crate::device::cpu::{CpuDevice, StreamOrder};
use crate::device::{DeviceKind, Engines, Kernels};
use crate::engine::executor::Engine;
use crate::engine::pool::Pool;
use crate::engine::step_job::StepJob;
use crate::error::Result;
use crate::hardware::topology::Topology;
use crate::host::affinity::{CpuPlacement, name_and_pin, pinning_refusal};
use crate::host::doorbell::Doorbell;
use crate::host::memory_policy::MemoryPolicy;
#[cfg(feature = "mpam")]
use crate::host::partition;
use crate::host::perf::WORKER_ROLE;
use crate::host::pool::Threads;
use crate::model::shape::ModelShape;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::ranks::RankContext;
use crate::recipe::Numerics;
use crate::request::choices::Technique;
use crate::search::{best_plan, best_plan_for};
use crate::simulate::clip::Clip;
#[cfg(feature = "mpam")]
use std::path::Path;
use std::sync::Arc;

/// This machine and the selected device.
pub(crate) struct Launcher {
    pub topology: Topology,
    pub chosen: SelectedDevice,
}

/// A computation with an engine that is generic over the device.
pub trait UseEngine {
    type Output;

    /// Runs the computation.
    ///
    /// # Errors
    /// Errors of the implementation.
    fn run<D: Kernels>(self, engine: Engine<D>) -> Result<Self::Output>;
}

impl Launcher {
    /// Selects the device of `settings` on this machine. Also returns the settings with the number of GPUs filled in.
    pub(crate) fn new(settings: &Settings) -> Result<(Self, Settings)> {
        let topology = Topology::this_machine();
        let chosen = devices::choose(settings, &topology)?;
        let settings = settings.on_gpus(chosen.gpus.len())?;
        Ok((Self { topology, chosen }, settings))
    }

    /// Like [`Self::new`], for one of several processes, which gets its part of `machine`.
    pub(crate) fn among(settings: &Settings, machine: &Topology, process_info: &ProcessInfo) -> Result<(Self, Settings)> {
        let (own, cpus) = process_info.cpu_slice_of(machine);
        let chosen = devices::agreed(settings, machine, process_info, cpus)?;
        Ok((
            Self { topology: own.unwrap_or_else(|| machine.clone()), chosen },
            Settings { transport: process_info.transport, ..settings.on_gpus(settings.gpus)? },
        ))
    }

    /// Warnings about this machine for a run of `settings`, one per line.
    pub(crate) fn warnings(&self, settings: &Settings) -> Vec<String> {
        let pins = cfg!(feature = "mpam") && !settings.without.contains(&Technique::Mpam);
        let refusal = pinning_refusal().filter(|_| pins);
        let unpinned = refusal
            .map(|why| format!("threads are not pinned to CPUs: {why}; allow sched_setaffinity in the sandbox, or use --without mpam"));
        self.chosen.warning.clone().into_iter().chain(unpinned).collect()
    }

    /// The plan of a run, with host memory placed for this machine. `trace` reserves memory for a timeline.
    ///
    /// # Errors
    /// Errors of [`best_plan`]; `Resource` if `--huge-pages explicit` is not possible.
    pub(crate) fn plan(&self, settings: &Settings, shape: &ModelShape, trace: bool) -> Result<Plan> {
        self.placed(settings, best_plan(&settings.request(shape), &self.machine_for(settings, shape), trace)?)
    }

    /// [`Launcher::plan`] for a run that clips as many steps as `clip`.
    pub(crate) fn plan_for(&self, settings: &Settings, shape: &ModelShape, trace: bool, clip: Clip) -> Result<Plan> {
        self.placed(settings, best_plan_for(&settings.request(shape), &self.machine_for(settings, shape), trace, clip)?)
    }

    /// `plan`, with host memory placed for this machine.
    fn placed(&self, settings: &Settings, plan: Plan) -> Result<Plan> {
        let host_memory = host_memory(settings, &plan, &self.topology)?;
        Ok(plan.with_host_memory(host_memory))
    }

    /// The machine for the planner. For a mixture-of-experts model on a GPU, includes whether cuBLASLt supports grouped layouts; other
    /// models do not open cuBLASLt yet.
    fn machine_for(&self, settings: &Settings, shape: &ModelShape) -> Machine {
        let machine = self.chosen.machine.clone();
        if !self.chosen.is_gpu() || shape.experts() == 0 {
            return machine;
        }
        Machine { grouped_layouts: gpu::grouped_layouts(settings.cuda_libraries.as_slice()), ..machine }
    }

    /// Creates the engine of `plan` and passes it to `user`. Selects the device type at run time.
    ///
    /// # Errors
    /// `Resource` if the device, memory or threads are not available; errors of `user`.
    pub(crate) fn engine<U: UseEngine>(&self, plan: &Plan, shape: &ModelShape, user: U) -> Result<U::Output> {
        match self.chosen.machine.kind {
            DeviceKind::Cpu => on_cpus(plan, shape, &self.topology, user),
            DeviceKind::Gpu => on_gpus(plan, shape, &self.topology, false, user),
        }
    }

    /// Divides the CPUs after the engine of the complete `plan` has its state. On a GPU, the driver thread leaves the CPUs of the
    /// optimizer's threads; the optimizer's threads join their resctrl partition. Returns a description of the partition; `warn` receives
    /// the reason if there is none.
    ///
    /// # Errors
    /// `Resource` if the kernel rejects the driver thread's CPUs.
    pub(crate) fn divide_cpus(&self, settings: &Settings, plan: &Plan, warn: impl FnOnce(&str)) -> Result<String> {
        if self.chosen.is_gpu() {
            let gpu_nodes = gpu::gpu_nodes(&self.chosen.gpus, &self.topology);
            cpu_slice::of(plan, &self.topology, &gpu_nodes)[0].keep_off_workers()?;
        }
        Ok(join_partition(settings, plan, warn))
    }
}

/// Creates the engine on this machine's CPU.
///
/// # Errors
/// `Resource` if memory or threads are not available.
pub fn cpu_engine(plan: &Plan, shape: &ModelShape, topology: &Topology) -> Result<Engine<CpuDevice>> {
    let (cpu_slice, bell) = (cpu_slice::whole(plan, topology), Arc::new(Doorbell::default()));
    let (dev, pool) = (cpu_device(&cpu_slice.plan, &bell)?, cpu_pool(&cpu_slice, &bell)?);
    Engine::new(cpu_slice.plan, shape.clone(), dev, pool, bell)
}

/// Creates the engines of `plan` on this machine's CPU, one per rank, and runs `user` with the engine of rank 0.
///
/// # Errors
/// `Resource` if memory or threads are not available; errors of `user`; `Rank` if another rank has failed.
pub fn on_cpus<U: UseEngine>(plan: &Plan, shape: &ModelShape, topology: &Topology, user: U) -> Result<U::Output> {
    if plan.site.ranks == 1 {
        return user.run(cpu_engine(plan, shape, topology)?);
    }
    let cpu_slices = cpu_slice::of(plan, topology, &vec![None; plan.site.ranks]);
    let make = |cpu_slice: &CpuSlice, bell: &Arc<Doorbell>, _| Ok((cpu_device(&cpu_slice.plan, bell)?, cpu_pool(cpu_slice, bell)?));
    ranks::run(
        LocalRanks::of_this_process(plan),
        shape,
        &cpu_slices,
        make,
        |engine, _| user.run(engine),
        |engine, _| engine.follow(|| Ok(())),
    )
}

/// Creates the CPU device of `plan`.
pub(crate) fn cpu_device(plan: &Plan, bell: &Arc<Doorbell>) -> Result<CpuDevice> {
    let schedule = plan.site.adversary.map_or(StreamOrder::Threads, |seed| StreamOrder::Adversary { seed });
    open::cpu(plan.site.threads, schedule, bell.clone(), plan.site.trace_spans)
}

/// Creates the pool that runs the optimizer's jobs beside a CPU device.
pub(crate) fn cpu_pool(cpu_slice: &CpuSlice, bell: &Arc<Doorbell>) -> Result<Pool<StepJob>> {
    if cpu_slice.plan.site.adversary.is_some() {
        Ok(Pool::stepped(cpu_slice.plan.site.trace_spans))
    } else {
        let (workers, on_start) = workers(cpu_slice);
        let site = &cpu_slice.plan.site;
        Threads::start_beside_compute(workers, site.host_memory.worker_nodes(), bell.clone(), site.trace_spans, on_start).map(Pool::Threads)
    }
}

/// Creates the engine on this machine's first GPU. `portable` selects kernels that run on every GPU since Ampere.
///
/// # Errors
/// `Resource` if there is no GPU, if one of NVIDIA's libraries is missing, or if memory or threads are not available.
pub fn gpu_engine(plan: &Plan, shape: &ModelShape, topology: &Topology, portable: bool) -> Result<Engine<GpuDevice>> {
    let (cpu_slice, bell) = (cpu_slice::whole(plan, topology), Arc::new(Doorbell::default()));
    let (dev, pool) = (gpu_device(&cpu_slice.plan, 0, portable)?, worker_threads(&cpu_slice, &bell)?);
    Engine::new(cpu_slice.plan, shape.clone(), dev, pool, bell)
}

/// Creates the engines of `plan` on this machine's first GPUs, one per rank, and runs `user` with the engine of rank 0. See [`gpu_engine`]
/// for `portable`.
///
/// # Errors
/// Errors of [`gpu_engine`]; `Usage` if there are fewer GPUs; `Unsupported` if their models differ; those of `user`; `Rank` if another rank
/// has failed.
pub fn on_gpus<U: UseEngine>(plan: &Plan, shape: &ModelShape, topology: &Topology, portable: bool, user: U) -> Result<U::Output> {
    if plan.site.ranks == 1 {
        return user.run(gpu_engine(plan, shape, topology, portable)?);
    }
    let cpu_slices = cpu_slice::of(plan, topology, &gpu::gpu_nodes(&gpu::first(gpu::visible()?, plan.site.ranks)?, topology));
    let make = |cpu_slice: &CpuSlice, bell: &Arc<Doorbell>, rank| {
        Ok((gpu_device(&cpu_slice.plan, rank, portable)?, worker_threads(cpu_slice, bell)?))
    };
    let follow = |engine: &mut Engine<GpuDevice>, context: &RankContext| engine.follow(|| cpu_slices[context.rank].keep_off_workers());
    ranks::run(LocalRanks::of_this_process(plan), shape, &cpu_slices, make, |engine, _| user.run(engine), follow)
}

/// Opens the visible GPU `ordinal`.
pub(super) fn gpu_device(plan: &Plan, ordinal: usize, portable: bool) -> Result<GpuDevice> {
    let Numerics { attention, experts, long_sums, .. } = plan.recipe.numerics;
    let engines = Engines { attention, expert_products: experts, long_sums };
    gpu::open(ordinal, plan.site.cuda_libraries.clone(), engines, plan.site.trace_spans, portable)
}

/// Moves the optimizer's threads into their resctrl partition. Returns a description of the partition; `warn` receives the reason of a
/// failure.
#[cfg(feature = "mpam")]
fn join_partition(settings: &Settings, plan: &Plan, warn: impl FnOnce(&str)) -> String {
    if !plan.protocol.techniques.mpam {
        return "off".into();
    }
    partition::join_optimizer(&settings.resctrl_group, Path::new(superoffload_resctrl::DEFAULT_ROOT)).unwrap_or_else(|error| {
        warn(&error.to_string());
        "none".into()
    })
}

/// Without the feature `mpam`, the optimizer's threads join no partition.
#[cfg(not(feature = "mpam"))]
fn join_partition(_: &Settings, _: &Plan, _: impl FnOnce(&str)) -> String {
    "compiled out (cargo feature mpam)".into()
}

/// The placement of host memory on the machine of `topology`, near the CPUs of the optimizer's threads.
///
/// # Errors
/// `Resource` if `--huge-pages explicit` is not possible.
fn host_memory(settings: &Settings, plan: &Plan, topology: &Topology) -> Result<MemoryPolicy> {
    let workers =
        Some(topology).filter(|_| plan.protocol.techniques.mpam).and_then(|topology| CpuPlacement::on(topology, plan.site.threads));
    let workers = workers.map_or_else(Vec::new, |placement| placement.workers);
    MemoryPolicy::new(topology, settings.huge_pages, &workers, plan.site.threads)
}

pub(super) fn worker_threads(cpu_slice: &CpuSlice, bell: &Arc<Doorbell>) -> Result<Pool<StepJob>> {
    let (workers, on_start) = workers(cpu_slice);
    let site = &cpu_slice.plan.site;
    Threads::start(workers, site.host_memory.worker_nodes(), bell.clone(), site.trace_spans, on_start).map(Pool::Threads)
}

/// Number of workers, and their names and placement.
fn workers(CpuSlice { plan, placement }: &CpuSlice) -> (usize, impl Fn(usize) -> Result<()> + Send + Clone + 'static) {
    let placement = placement.clone();
    let pin = |place: &CpuPlacement, worker: usize| name_and_pin(WORKER_ROLE, worker, place.workers[worker]);
    (plan.site.threads, move |worker: usize| placement.as_ref().map_or(Ok(()), |place| pin(place, worker)))
}
