//! Starts the hops that the coordinator commands, and reports their completion to it. `block_until` is the event loop in which the driver
//! waits.
#![allow(unsafe_code)]

use super::executor::Engine;
use super::protocol::coordinator::{Command, Event, Load, Work};
use super::protocol::route::Hop;
use super::step_job::StepJob;
use super::watch::driver_state::DriverActivity;
use super::watch::fault_injector::FaultInjector;
use crate::bucket::slot::Slot;
use crate::device::{Adam, Cast, DeviceSlice, Kernels, SplitAdam, Stream};
use crate::error::Result;
use crate::faults::FaultPhase;
use crate::host::pinned::PinnedSlice;
use crate::host::pool::Job;
use crate::memory::MemorySpace;
use crate::optim::adam::{AdamConsts, AdamHyper};
use crate::optim::optimizer::{Optimizer, Update};
use std::ops::Range;
use std::time::Duration;

/// Pause of a scheduled driver between two looks at a save.
const READ_BY_SAVE_PAUSE: Duration = Duration::from_micros(200);

impl<D: Kernels> Engine<D> {
    /// Runs the event loop until `ready`. `activity` describes the wait; `number` is its bucket, if it has one.
    pub(super) fn block_until(
        &mut self,
        activity: DriverActivity,
        number: usize,
        mut ready: impl FnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let before = self.driver_state.activity();
        self.driver_state.set_activity(activity, number as u64);
        let is_scheduled = self.fault_injector.as_ref().is_some_and(FaultInjector::decides);
        loop {
            let rung = self.bell.rings();
            // Before the pump, which then reports all that a save has read.
            let is_read = is_scheduled && self.is_read_by_save();
            let progressed = self.pump()?;
            if ready(self)? {
                self.driver_state.set_activity(before.0, before.1);
                return Ok(());
            }
            if self.advance_one()? || progressed {
                self.exchange.pass()?;
            } else if is_read {
                // Threads that are not scheduled read the state, most often at the rate of a disk: a poll without a pause takes a CPU.
                std::thread::sleep(READ_BY_SAVE_PAUSE);
                self.exchange.pass()?;
            } else if is_scheduled {
                self.exchange.pass_idle()?;
            } else {
                self.bell.wait(rung);
            }
        }
    }

    /// Runs the injected fault of this phase, if a test has one.
    pub(super) fn inject(&self, phase: FaultPhase) -> Result<()> {
        if let Some(injector) = &self.fault_injector { injector.inject(phase, self.steps.current()) } else { Ok(()) }
    }

    /// Lets a device and a pool without threads do one operation. Returns false if they have threads, or nothing to do.
    fn advance_one(&mut self) -> Result<bool> {
        if self.fault_injector.as_mut().is_some_and(FaultInjector::pool_is_first) && self.pool.advance() {
            return Ok(true);
        }
        Ok(self.dev.idle()? || self.pool.advance())
    }

    /// Reports everything that has completed since the last call to the coordinator. Returns false if nothing has. Never blocks.
    fn pump(&mut self) -> Result<bool> {
        let mut progressed = false;
        if self.fault_injector.as_mut().is_some_and(FaultInjector::pool_hurries) {
            self.pool.advance();
        }
        for stream in Stream::WITH_PEERS {
            while let Some((hop, bucket)) = self.transfers.poll(&mut self.dev, stream)? {
                progressed = true;
                self.driver_state.set_pending(stream, self.transfers.front(stream));
                self.notify(Event::Done { hop, bucket })?;
            }
        }
        while let Some(bucket) = self.exchange.poll(&mut self.dev, self.model.grads)? {
            progressed = true;
            self.inject(FaultPhase::Sum)?;
            self.bucket_ready(bucket)?;
        }
        while let Some((hop, bucket)) = self.poll_save() {
            progressed = true;
            self.notify(Event::Done { hop, bucket })?;
        }
        progressed |= self.move_device_copies()?;
        self.report.poll(&mut self.dev, &self.host, &mut *self.exchange, self.steps.current())?;
        while let Some(bucket) = self.in_pool
            && self.pool.is_idle()?
        {
            self.in_pool = None;
            progressed = true;
            self.notify(Event::Done { hop: Hop::Optimize, bucket })?;
        }
        self.settle_owed();
        Ok(self.exchange.gather(&mut self.dev, self.model.weights)? || progressed)
    }

    /// Publishes buckets with newly final weights, if a peer waits for any.
    fn settle_owed(&mut self) {
        let settlings = Some(self.coordinator.settlings());
        let is_news = self.settlings_reported != settlings && self.exchange.is_owing();
        self.settlings_reported = settlings;
        let buckets = if is_news { self.plan.placement.layout.count() } else { 0 };
        for bucket in (0..buckets).rev() {
            if self.exchange.is_owed(bucket) && self.coordinator.is_settled(bucket) {
                self.exchange.settle(bucket);
            }
        }
    }

    pub(super) fn notify(&mut self, event: Event) -> Result<()> {
        self.driver_state.event(event, self.steps.current());
        self.coordinator.handle(event);
        self.run_commands()
    }

    pub(super) fn run_commands(&mut self) -> Result<()> {
        while let Some(command) = self.coordinator.next_command() {
            self.driver_state.command(&command);
            let Command::Start { hop, bucket, load } = command;
            self.start(hop, bucket, load)?;
        }
        Ok(())
    }

    fn start(&mut self, hop: Hop, bucket: usize, load: Load) -> Result<()> {
        let (flat, local) = (self.exchange.slices().global(bucket), self.exchange.slices().local(bucket));
        match hop {
            Hop::GradsOut | Hop::RowsOut => self.inject(FaultPhase::GradsOut)?,
            Hop::Optimize => self.inject(FaultPhase::Optimize)?,
            Hop::ParamsIn | Hop::RowsIn => self.inject(FaultPhase::ParamsIn)?,
            Hop::StepOnDevice => {
                self.inject(FaultPhase::StepOnDevice)?;
                self.send_states_before_steps()?;
            }
            Hop::Backward | Hop::HeadBackward | Hop::PageIn | Hop::PageOut | Hop::Save | Hop::SaveCopy => {}
        }
        self.transfers.wait(&mut self.dev, hop, bucket)?;
        match (hop, hop.leg().stream, load) {
            (Hop::GradsOut, Some(stream), Load::Slot(slot)) => self.copy_grads(stream, &flat, &local, slot)?,
            (Hop::Optimize, None, Load::Job(work, params)) => self.give_to_pool(bucket, (local, flat.start), work, params),
            (Hop::ParamsIn, _, Load::Slot(_)) if self.plan.streams_from_host() && self.beside_flow(&flat).is_empty() => {
                let done = Event::Done { hop, bucket };
                self.driver_state.event(done, self.steps.current());
                self.coordinator.handle(done);
                return Ok(());
            }
            (Hop::ParamsIn, Some(stream), Load::Slot(slot)) => self.copy_params(stream, &flat, &local, slot)?,
            (Hop::RowsOut, Some(stream), Load::Slot(slot)) => self.copy_rows_out(stream, &flat, slot)?,
            (Hop::RowsIn, Some(stream), Load::Slot(slot)) => self.copy_rows_in(stream, &flat, slot)?,
            (Hop::PageIn, Some(stream), _) => self.counters.h2d_bytes += self.page(stream, &local, MemorySpace::Device)?,
            (Hop::StepOnDevice, _, Load::Update(update)) => self.step_on_device(&flat, &local, update)?,
            (Hop::Save, None, Load::State) => self.hold_for_save(bucket),
            (Hop::SaveCopy, None, Load::Slot(slot)) => self.save_copy(bucket, slot),
            (Hop::PageOut, Some(stream), _) => self.counters.d2h_bytes += self.page(stream, &local, MemorySpace::Host)?,
            (hop, _, load) => unreachable!("{hop:?} does not start with {load:?}"),
        }
        let slot = if let Load::Slot(slot) = load { Some(slot) } else { None };
        self.issue(hop, bucket, slot)
    }

    /// Records the events of `hop` of `bucket` after its work was enqueued.
    pub(super) fn issue(&mut self, hop: Hop, bucket: usize, slot: Option<Slot>) -> Result<()> {
        // A gradient is complete on the stream that computes sums.
        let stream = if hop == Hop::Backward { Some(self.exchange.sums_on()) } else { hop.leg().stream };
        if let Some(stream) = stream {
            self.transfers.issue(&mut self.dev, stream, hop, bucket, slot)?;
            self.driver_state.set_pending(stream, self.transfers.front(stream));
        }
        Ok(())
    }

    /// Submits `work` on a bucket to the pool. The bucket is given as a range of the local order and the flat position of its first
    /// element.
    fn give_to_pool(&mut self, bucket: usize, (range, flat): (Range<usize>, usize), work: Work, params: Option<Slot>) {
        if let (Some(flow), Some(_), true) = (&mut self.flow, params, self.plan.streams_from_host()) {
            flow.forget(&range);
        }
        let state = self.memory.states.on_host(&range);
        // SAFETY: the engine drops host memory after its pool. The coordinator starts `Optimize` only when no other bucket runs, when the
        // gradients have arrived in their slot, and when the last copy from the parameter slot is complete. It gives neither slot to any
        // other user until the pool is idle again. No copy touches the state of such a bucket, and the driver touches it only when there is
        // no job (`expect_no_job`).
        let mut job = unsafe { StepJob::new(bucket, (range.clone(), flat), work, params, state, self.scratch.step.clone()) };
        if let Work::SpeculateRows(_) = work {
            let rows = self.late_rows().part(&self.host, &range);
            // SAFETY: the row numbers are next written in the next step, which begins when all buckets are settled.
            job = unsafe { job.with_rows(rows) };
        }
        if let Work::Copy(_) = work {
            // SAFETY: the coordinator lends each slot to one bucket, until its copy was saved.
            job = unsafe { job.with_copies(self.scratch.copies) };
        }
        self.counters.adam_elems += if params.is_some() { job.elems() as u64 } else { 0 };
        self.counters.adam_bytes += job.traffic_bytes();
        self.pool.submit(job);
        self.in_pool = Some(bucket);
    }

    fn copy_grads(&mut self, stream: Stream, range: &Range<usize>, local: &Range<usize>, slot: Slot) -> Result<()> {
        self.copy_out(stream, self.grads(range, local.start), self.scratch.step.grads.slot(slot, range.len()))
    }

    pub(super) fn copy_out(&mut self, stream: Stream, mut source: DeviceSlice, target: PinnedSlice) -> Result<()> {
        if self.plan.device_casts() {
            let staging = self.scratch.staging_d2h.slice(0, source.elems());
            self.dev.launch(Cast { stream, src: source, dst: staging })?;
            source = staging;
        }
        self.counters.d2h_bytes += target.bytes() as u64;
        self.dev.copy_d2h(stream, source, target)
    }

    fn copy_params(&mut self, stream: Stream, whole: &Range<usize>, local: &Range<usize>, slot: Slot) -> Result<()> {
        let range = self.beside_flow(whole);
        let (source, weights) =
            (self.scratch.step.params.part(slot, whole, &range), self.weights(&range, local.start + range.start - whole.start));
        self.copy_in(stream, source, weights)
    }

    pub(super) fn copy_in(&mut self, stream: Stream, source: PinnedSlice, target: DeviceSlice) -> Result<()> {
        self.counters.h2d_bytes += source.bytes() as u64;
        if !self.plan.device_casts() {
            return self.dev.copy_h2d(stream, source, target);
        }
        let staging = self.scratch.staging_h2d.slice(0, target.elems());
        self.dev.copy_h2d(stream, source, staging)?;
        self.dev.launch(Cast { stream, src: staging, dst: target })
    }

    /// The part of a bucket that has its own location on the device, because it is not streamed.
    fn beside_flow(&self, range: &Range<usize>) -> Range<usize> {
        self.flow.as_ref().map_or(range.clone(), |flow| flow.beside(range))
    }

    fn step_on_device(&mut self, flat: &Range<usize>, local: &Range<usize>, update: Update) -> Result<()> {
        let segments = self.scratch.step.segments.clone();
        for segment in segments.iter() {
            let part = segment.range.start.max(local.start)..segment.range.end.min(local.end);
            if part.is_empty() {
                continue;
            }
            let state = self.memory.states.on_device(&part);
            let own_flat = flat.start + part.start - local.start..flat.start + part.end - local.start;
            let (grads, out) = (self.grads(&own_flat, part.start), self.weights(&own_flat, part.start));
            match self.plan.optimizer() {
                Optimizer::AdamW { hyper, .. } => {
                    let hyper = AdamHyper { lr: update.learning_rate, ..hyper };
                    let consts = AdamConsts::new(&hyper, update.optimizer_step, segment.decay);
                    let ([params, m, v], first, scale) = (state.arrays.into_array(), own_flat.start, update.scale);
                    match state.weights() {
                        None => self.dev.launch(Adam { first, params, m, v, grads, out, consts, scale })?,
                        Some(weights) => self.dev.launch(SplitAdam { first, weights, lower: params, m, v, grads, consts, scale })?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves a bucket's state between host and device; returns its bytes. All moves of a step are enqueued at once, so that they overlap
    /// with the steps of other buckets.
    fn page(&mut self, stream: Stream, range: &Range<usize>, space: MemorySpace) -> Result<u64> {
        let mut bytes = 0;
        for memory in self.memory.states.on_device(range).arrays {
            self.dev.prefetch(stream, memory, space)?;
            bytes += memory.bytes() as u64;
        }
        Ok(bytes)
    }

    /// The step's gradient of `range`, which begins at `local` in the local order.
    pub(super) fn grads(&self, range: &Range<usize>, local: usize) -> DeviceSlice {
        self.exchange.own_grads(self.model.grads, range, local)
    }

    /// This rank's weights of `range`, which begins at `local` in the local order.
    pub(super) fn weights(&self, range: &Range<usize>, local: usize) -> DeviceSlice {
        self.exchange.own_weights(self.model.weights, range, local)
    }
}
