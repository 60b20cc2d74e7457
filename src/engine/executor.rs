//! The engine: the fields that it owns, its start and its end. One thread, the driver, runs it. Its work is in `step.rs`, `hops.rs`,
//! `exposed.rs` and `state_io.rs`.

use super::idle_times::IdleTimes;
use super::memory::expert_rows::{ExpertLoad, ExpertRows};
use super::memory::permanent::Memory;
use super::memory::scratch::StepScratch;
use super::memory::weight_flow::WeightFlow;
use super::module_events::ModuleEvents;
use super::pool::Pool;
use super::protocol::coordinator::{Coordinator, Counts, Staging};
use super::protocol::counters::{Counters, Exposed};
use super::protocol::loss_scale::LossScale;
use super::protocol::order::Order;
use super::protocol::verdict::{SpeculationHistory, Verdict};
use super::ranks::exchange::{Exchange, OrderWords, SingleRank};
use super::reported_amounts::ReportedAmounts;
use super::save::device_copies::DeviceCopies;
use super::save::running_save::RunningSave;
use super::step_counters::StepCounters;
use super::step_job::StepJob;
use super::step_results::StepResults;
use super::transfers::Transfers;
use super::watch::driver_state::DriverState;
use super::watch::fault_injector::FaultInjector;
use super::watch::watchdog::Watched;
use crate::device::{EventId, Kernels, ProductAlgorithm, Sides};
use crate::error::Result;
use crate::host::doorbell::Doorbell;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::model::Model;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::objective::ObjectiveMetrics;
use crate::optim::clip::ClipMemory;
use crate::planner::plan::Plan;
use crate::ranks::RANKS_MAX;
use crate::trace::Recorder;
use crate::units::Norm;
use std::sync::Arc;

/// The data of a step, read and checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepData {
    /// Sum of the weights of all counted targets, in units of 1/4096.
    pub(super) weight_units: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct StepReport {
    /// Weighted mean of the loss over the step's counted targets, before the update.
    pub loss: f32,
    /// Gradient norm before clipping.
    pub grad_norm: Norm,
    pub learning_rate: f64,
    /// Factor on the loss during the step.
    pub(crate) loss_scale: f32,
    pub verdict: Verdict,
    /// Bucket steps since the last report, of all ranks. Each rank steps its slice of every bucket.
    pub counts: Counts,
    /// Idle time of the device by cause. With several devices, each time is the maximum over the devices.
    pub(crate) exposed: Exposed,
    /// Amounts moved and stepped since the last report.
    pub counters: Counters,
    /// Means over the pairs of the step, if the loss is one of pairs. On ranks other than rank 0 they are not complete.
    pub objective: Option<ObjectiveMetrics>,
    /// Time that each rank waited for its peers, in nanoseconds.
    pub(crate) exposed_to_peers_ns: [u64; RANKS_MAX],
    /// Load of the experts over all ranks, if the model has experts.
    pub expert_load: Option<ExpertLoad>,
}

/// The training engine on one device, alone or as one of several ranks.
pub struct Engine<D: Kernels> {
    pub(super) plan: Plan,
    pub(super) dev: D,
    pub(super) pool: Pool<StepJob>,
    // Fields with threads that use the memory are declared before it, so that they are dropped first.
    /// The save that reads the state while steps run.
    pub(super) save: Option<RunningSave>,
    /// Its copies within the device.
    pub(super) device_copies: DeviceCopies,
    pub(super) host: HostMemory,
    pub(super) memory: Memory,
    pub(super) scratch: StepScratch,
    pub(super) report: StepResults,
    /// Host memory that logits are copied to, once somebody asks for them.
    pub(super) logits: Option<PinnedSlice>,
    /// Host memory that the numbers of a reference are copied to, once somebody asks for them.
    pub(super) reference: Option<PinnedSlice>,
    pub(super) expert_rows: ExpertRows,
    pub(super) model: Arc<Model>,
    pub(super) flow: Option<WeightFlow>,
    pub(super) coordinator: Coordinator,
    pub(super) transfers: Transfers,
    pub(super) exchange: Box<dyn Exchange<D>>,
    /// [`Coordinator::settlings`] when this rank last published final weights; `None` after a new version of them began.
    pub(super) settlings_reported: Option<u64>,
    /// The bucket of the pool's job.
    pub(super) in_pool: Option<usize>,
    pub(super) compute_tail: EventId,
    pub(super) modules: ModuleEvents,
    pub(super) bell: Arc<Doorbell>,
    pub(super) driver_state: Arc<DriverState>,
    pub(super) fault_injector: Option<FaultInjector>,
    pub(super) recorder: Recorder,
    pub(super) steps: StepCounters,
    /// Values that the rule of clipping keeps.
    pub(super) clip_memory: ClipMemory,
    pub(super) idle: IdleTimes,
    pub(super) counters: Counters,
    pub(super) reported: ReportedAmounts,
}

pub(super) fn staging(plan: &Plan) -> Staging {
    Staging {
        ringed_grads: plan.placement.rings.grads.is_some(),
        grad_slots: plan.placement.grad_slots,
        param_slots: plan.placement.param_slots,
        streamed_weights: plan.streams_from_host(),
        split_masters: plan.placement.rings.split_masters,
    }
}

impl<D: Kernels> Engine<D> {
    /// Allocates all memory. The state is zero until [`Engine::write_state`] and [`Engine::send_weights`]. Use the engine from one thread
    /// only: `bell` wakes the thread that waits first.
    ///
    /// # Errors
    /// `Resource` when memory or threads are not available.
    pub fn new(plan: Plan, shape: ModelShape, dev: D, pool: Pool<StepJob>, bell: Arc<Doorbell>) -> Result<Self> {
        Self::assemble(plan, shape, dev, pool, bell, |sides, plan| Ok(Box::new(SingleRank::new(sides, plan)?)))
    }
}

impl<D: Kernels> Engine<D> {
    /// Allocates all memory; `exchange` makes the exchange with other ranks.
    pub(super) fn assemble(
        plan: Plan,
        shape: ModelShape,
        dev: D,
        pool: Pool<StepJob>,
        bell: Arc<Doorbell>,
        exchange: impl FnOnce(Sides<'_, D>, &Plan) -> Result<Box<dyn Exchange<D>>>,
    ) -> Result<Self> {
        // Declared before the owners of threads, and so dropped after them, also when a call below fails.
        let mut host = HostMemory::new(plan.site.host_memory.clone());
        let (mut dev, pool) = (dev, pool);
        let exchange = exchange((&mut dev, &mut host), &plan)?;
        let (slices, memory) = (exchange.slices(), Memory::new(&plan, &*exchange, (&mut dev, &mut host))?);
        let (scratch, model, flow) = StepScratch::take(&plan, &shape, slices, &memory, (&mut dev, &mut host))?;
        let reported = (plan.recipe.step.shares / slices.ranks(), plan.recipe.report_words());
        let report = StepResults::new(slices.elems(), reported, exchange.sums_on(), (&mut dev, &mut host))?;
        let expert_rows = ExpertRows::new(&shape, plan.micro_batches_of_rank(), (&mut dev, &mut host))?;
        model.prepare(&mut dev)?;
        Ok(Self {
            coordinator: Coordinator::new(plan.placement.layout.clone(), plan.protocol.rules, staging(&plan)),
            transfers: Transfers::new(&mut dev, &plan.placement.layout, plan.placement.param_slots)?,
            settlings_reported: None,
            in_pool: None,
            compute_tail: dev.event()?,
            device_copies: DeviceCopies::new(&mut dev)?,
            modules: ModuleEvents::new(&mut dev)?,
            fault_injector: FaultInjector::of(&plan, exchange.slices().rank()),
            exchange,
            recorder: Recorder::new("driver", plan.site.trace_spans),
            steps: StepCounters::new(plan.recipe.numerics.dtype),
            clip_memory: plan.clip().memory(),
            idle: IdleTimes::new(dev.waited_ns()),
            counters: Counters::default(),
            reported: ReportedAmounts::default(),
            driver_state: Arc::new(DriverState::new(plan.placement.layout.count(), bell.clone(), pool.heartbeats())),
            plan,
            dev,
            pool,
            save: None,
            host,
            memory,
            scratch,
            report,
            logits: None,
            reference: None,
            expert_rows,
            model,
            flow,
            bell,
        })
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Description of the device.
    pub fn describe(&self) -> String {
        self.dev.describe()
    }

    /// Versions of the libraries that the device's bits depend on.
    pub(crate) fn versions(&self) -> Vec<(&'static str, String)> {
        self.dev.versions()
    }

    /// The algorithms of the device's matrix products so far.
    pub fn product_algorithms(&self) -> Vec<ProductAlgorithm> {
        self.dev.product_algorithms()
    }

    /// Lines about products that are computed in another format than the requested one.
    pub(crate) fn product_notes(&self) -> Vec<String> {
        let versions = self.dev.versions();
        let library =
            versions.iter().find(|(name, _)| *name == "cuBLASLt").map_or_else(String::new, |(name, version)| format!("{name} {version}"));
        self.dev.product_algorithms().iter().filter_map(|product| product.note(&library)).collect()
    }

    /// The driver states of the local ranks, and the progress counters, for a watchdog.
    pub fn watched(&self) -> Watched {
        self.exchange.watched(self.driver_state.clone())
    }

    pub fn now_ns(&self) -> u64 {
        self.dev.now_ns()
    }

    pub fn shape(&self) -> &ModelShape {
        &self.model.shape
    }

    /// The model's tensors in canonical order.
    pub fn table(&self) -> &TensorTable {
        &self.model.table
    }

    /// Completed optimizer steps; skipped steps do not count.
    pub fn optimizer_step(&self) -> u64 {
        self.steps.optimizer()
    }

    /// Completed training steps; skipped steps count, because their data is used up.
    pub fn train_step(&self) -> u64 {
        self.steps.train()
    }

    /// State of dynamic loss scaling.
    pub(crate) fn loss_scale(&self) -> LossScale {
        self.steps.loss_scale()
    }

    /// The last verdicts.
    pub(crate) fn history(&self) -> SpeculationHistory {
        self.coordinator.history()
    }

    /// Values that the rule of clipping keeps.
    pub(crate) fn clip_memory(&self) -> &ClipMemory {
        &self.clip_memory
    }

    /// Host memory mapped by the engine.
    pub fn host_memory(&self) -> &HostMemory {
        &self.host
    }

    /// See [`Device::allocations`](crate::device::Device::allocations).
    pub fn device_allocations(&self) -> Vec<(&str, usize)> {
        self.dev.allocations()
    }

    /// Sets the gradient norm above which steps are clipped, from the next verdict on; 0 turns clipping off.
    pub(crate) fn set_max_grad_norm(&mut self, max_grad_norm: f64) {
        self.plan.recipe.max_grad_norm = max_grad_norm;
    }

    /// Checks that no rank has failed so far.
    ///
    /// # Errors
    /// The failure of the first rank that failed.
    pub(crate) fn check(&self) -> Result<()> {
        self.exchange.check()
    }

    /// Makes every gradient norm 1, for a device that computes none.
    pub(crate) fn pretend_norm(&mut self) {
        self.report.pretend(&mut self.host);
    }

    /// Restores counters from a checkpoint.
    ///
    /// # Errors
    /// The failure that ended another rank.
    pub fn resume(
        &mut self,
        train_step: u64,
        optimizer_step: u64,
        loss_scale: LossScale,
        history: SpeculationHistory,
        clip_memory: ClipMemory,
    ) -> Result<()> {
        let values = clip_memory.values();
        let (scale, good_steps) = (u64::from(loss_scale.scale().to_bits()), u64::from(loss_scale.good_steps()));
        if !values.is_empty() {
            self.await_done()?;
            self.exchange.post(0, values);
        }
        self.lead(Order::Resume, [train_step, optimizer_step, scale, good_steps, history.bits(), values.len() as u64])?;
        self.resume_own(train_step, optimizer_step, loss_scale, history, clip_memory);
        Ok(())
    }

    /// Like [`Engine::resume`], for this rank only.
    pub(super) fn resume_own(
        &mut self,
        train_step: u64,
        optimizer_step: u64,
        loss_scale: LossScale,
        history: SpeculationHistory,
        clip_memory: ClipMemory,
    ) {
        self.steps.resume(train_step, optimizer_step, loss_scale);
        self.clip_memory = clip_memory;
        self.coordinator.set_history(history);
    }

    /// Ends all threads and returns the tracks of the timeline of all ranks. With several ranks, track names contain the rank.
    ///
    /// # Errors
    /// An optimizer worker panicked; the failure that ended another rank.
    pub fn finish(mut self) -> Result<Vec<Recorder>> {
        self.lead(Order::Finish, OrderWords::default())?;
        let tracks = self.end_threads()?;
        self.await_done()?;
        Ok(self.exchange.all_tracks(tracks))
    }

    /// Ends this rank's threads and returns their tracks.
    pub(super) fn end_threads(&mut self) -> Result<Vec<Recorder>> {
        let mut tracks = vec![std::mem::take(&mut self.recorder)];
        tracks.extend(self.dev.finish());
        tracks.extend(self.pool.finish()?);
        Ok(tracks)
    }
}
