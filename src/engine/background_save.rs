//! Saves that read the state while later steps run, on all ranks of a process.

use super::executor::Engine;
use super::protocol::order::Order;
use super::protocol::route::Hop;
use super::ranks::exchange::OrderWords;
use super::save::board::{SaveBoard, Source};
use super::save::device_copies::Move;
use super::save::frozen_state::FrozenState;
use super::save::running_save::RunningSave;
use super::save::simulated_reader::SimulatedReader;
use super::state_copies::words;
use super::watch::driver_state::DriverActivity;
use crate::bucket::slot::Slot;
use crate::device::{Cast, Kernels, Stream};
use crate::error::Result;
use crate::faults::FaultPhase;
use crate::host::pinned::PinnedSlice;
use crate::optim::split::Masters;
use crate::optim::state_array::StatePart;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Elements of an array in another form that are copied from the device at once.
const COPY_ELEMS: usize = 1 << 20;

impl<D: Kernels> Engine<D> {
    /// Why a save must stop training; `None` if [`Engine::begin_save`] can be called.
    pub(crate) fn save_obstacle(&self) -> Option<String> {
        self.plan.save_obstacle().or_else(|| (!self.host.is_backed()).then(|| "the memory of the host is simulated".into()))
    }

    /// Lets all devices begin to pin the memory through which states leave them, and to fault in that for copies of the pool, so that the
    /// first save waits for no pages.
    ///
    /// # Errors
    /// The failure that ended another rank.
    pub(crate) fn prepare_saves(&mut self) -> Result<()> {
        if self.scratch.has_begun_to_pin() || self.plan.placement.save_copies.host == 0 || self.save_obstacle().is_some() {
            return Ok(());
        }
        self.lead(Order::PrepareSave, OrderWords::default())?;
        self.prepare_own_save();
        self.await_done()
    }

    /// Like [`Engine::prepare_saves`], for this rank only.
    pub(super) fn prepare_own_save(&mut self) {
        let (layout, copies) = (self.exchange.slices().layout(), self.scratch.copies);
        let (offloaded, leaving) = (layout.offloaded(), layout.count() - layout.offloaded() - copies.device_slots());
        self.scratch.begin_to_pin_copies(&mut self.dev, copies.slots() - leaving, offloaded);
    }

    /// Begins a save of the state after the last step on all ranks. The results, one of each rank, read that state, while later steps run:
    /// a step waits only where it would write a state that is not read yet. A save that runs is ended first.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    ///
    /// # Panics
    /// If there is an obstacle: see [`Engine::save_obstacle`].
    pub fn begin_save(&mut self) -> Result<Vec<FrozenState>> {
        assert!(self.save_obstacle().is_none(), "a save that must stop training");
        self.freeze_states()
    }

    /// Like [`Engine::begin_save`], on a device that only counts time: there is no memory to read.
    ///
    /// # Errors
    /// As [`Engine::begin_save`].
    ///
    /// # Panics
    /// If saves of this plan stop training.
    pub(crate) fn begin_simulated_save(&mut self) -> Result<Vec<SimulatedReader>> {
        assert!(self.plan.save_obstacle().is_none(), "a save that must stop training");
        Ok(self.freeze_states()?.into_iter().map(SimulatedReader::new).collect())
    }

    fn freeze_states(&mut self) -> Result<Vec<FrozenState>> {
        self.end_save()?;
        self.lead(Order::BeginSave, OrderWords::default())?;
        let own = self.begin_own_save();
        let own = self.named(own)?;
        self.await_done()?;
        let mut states = self.exchange.take_frozen();
        if let Some(save) = &mut self.save {
            save.set_peers(states.iter().map(FrozenState::board).collect());
        }
        states.insert(0, own);
        Ok(states)
    }

    /// Like [`Engine::begin_save`], for this rank only.
    pub(super) fn begin_own_save(&mut self) -> Result<FrozenState> {
        self.inject(FaultPhase::Flush)?;
        self.inject(FaultPhase::Read)?;
        let (slices, copies) = (self.exchange.slices(), self.scratch.copies);
        let count = slices.layout().count();
        let ranges: Vec<_> = (0..count).map(|bucket| slices.local(bucket)).collect();
        let global = (0..count).map(|bucket| slices.global(bucket)).collect();
        let (on_host, resident) = ranges.split_at(slices.layout().offloaded());
        let buckets = on_host.iter().map(|range| self.memory.states.on_host(range)).collect();
        // The last slots are for states that leave from their own memory. The states of the last buckets have copies within the device.
        let (leaving, copied) = resident.split_at(resident.len() - copies.device_slots());
        let (free_slots, first_copied) = (copies.slots() - leaving.len(), count - copied.len());
        let leaves_later = self.leaves_later(leaving, free_slots);
        if !leaves_later {
            self.copy_from_device(leaving, free_slots)?;
        }
        self.copy_within_device(copied)?;
        self.device_copies.begin(if leaves_later { on_host.len() } else { first_copied }..count, first_copied);
        let board = Arc::new(SaveBoard::new(count, self.bell.clone()));
        for bucket in if leaves_later { 0..0 } else { on_host.len()..first_copied } {
            board.offer(bucket, Source::Nowhere, Source::Copy(self.own_copy(bucket)));
        }
        self.save = Some(RunningSave::new(board.clone(), count));
        self.coordinator.set_copy_slots(free_slots);
        self.coordinator.begin_save();
        self.run_commands()?;
        Ok(FrozenState::new(board, global, buckets, copies))
    }

    /// Whether the states of `leaving` can leave their memory while the next step runs: the device has them in the form of checkpoints, and
    /// the slots from `first` on can be pinned.
    fn leaves_later(&mut self, leaving: &[Range<usize>], first: usize) -> bool {
        let is_pinned = leaving.is_empty() || self.scratch.pin_copies((&mut self.dev, &mut self.host), first);
        is_pinned && self.plan.protocol.masters == Masters::Float32
    }

    /// The slot of the host for the state of `bucket`, which leaves the device from its own memory.
    fn own_copy(&self, bucket: usize) -> Slot {
        let (layout, copies) = (self.exchange.slices().layout(), self.scratch.copies);
        Slot(copies.slots() + copies.device_slots() + bucket - layout.count())
    }

    /// Copies the states of `leaving`, local ranges of buckets on the device, to the slots from `first` on, while training stops.
    fn copy_from_device(&mut self, leaving: &[Range<usize>], first: usize) -> Result<()> {
        if leaving.is_empty() {
            return Ok(());
        }
        self.dev.record(self.compute_tail, Stream::Compute)?;
        self.dev.synchronize(self.compute_tail)?;
        let is_pinned = self.scratch.pin_copies((&mut self.dev, &mut self.host), first);
        for (range, slot) in leaving.iter().zip(first..).filter(|(range, _)| !range.is_empty()) {
            let (state, copies) = (self.memory.states.on_device(range), self.scratch.copies);
            for part in copies.arrays().parts() {
                let target = copies.array(Slot(slot), part, range.len());
                match state.stored(part).filter(|_| is_pinned) {
                    Some(source) => self.dev.copy_d2h(Stream::D2h, source, target)?,
                    None => self.copy_by_values(range, part, target)?,
                }
            }
        }
        self.dev.record(self.compute_tail, Stream::D2h)?;
        self.dev.synchronize(self.compute_tail)
    }

    /// Enqueues copies of the states of `copied`, local ranges of buckets, within the device. Copies to the host follow the last step.
    fn copy_within_device(&mut self, copied: &[Range<usize>]) -> Result<()> {
        let copies = self.scratch.copies;
        for (nth, range) in copied.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
            let state = self.memory.states.on_device(range);
            for part in copies.arrays().parts() {
                let (src, dst) = (words(state.arrays[part]), copies.on_device(nth, part, range.len()));
                self.dev.launch(Cast { stream: Stream::Compute, src, dst })?;
            }
        }
        self.dev.record(self.device_copies.made, Stream::Compute)?;
        self.dev.wait(Stream::D2h, self.device_copies.made)
    }

    /// Lets states leave the device, and offers those that have arrived to the save. Returns false if there was nothing to do.
    pub(super) fn move_device_copies(&mut self) -> Result<bool> {
        let mut progressed = false;
        while let Some(save) = &self.save
            && let Some(next) = self.device_copies.next(save.board(), |event| self.dev.is_done(event))?
        {
            progressed = true;
            match next {
                Move::Offer { bucket, passage } => save.board().offer(bucket, Source::Nowhere, Source::Copy(self.copy_of(bucket, passage))),
                Move::Send { bucket, passage } => {
                    self.send_state(bucket, self.copy_of(bucket, Some(passage)))?;
                    self.dev.record(self.device_copies.arrival(passage), Stream::D2h)?;
                }
            }
        }
        Ok(progressed)
    }

    /// Before the device steps its buckets: enqueues the copies of all states that have to leave their memory, and lets the steps wait.
    pub(super) fn send_states_before_steps(&mut self) -> Result<()> {
        if !self.device_copies.reads_states() {
            return Ok(());
        }
        for bucket in self.device_copies.leave_now() {
            self.send_state(bucket, self.own_copy(bucket))?;
        }
        self.dev.record(self.device_copies.left, Stream::D2h)?;
        self.dev.wait(Stream::Compute, self.device_copies.left)
    }

    /// The slot of the host for a state that leaves the device by `passage`.
    fn copy_of(&self, bucket: usize, passage: Option<usize>) -> Slot {
        match passage.filter(|_| self.device_copies.is_copied(bucket)) {
            Some(passage) => self.scratch.copies.staged(passage),
            None => self.own_copy(bucket),
        }
    }

    /// Enqueues the copy of the state of `bucket` to `slot` of the host, or waits for it if the slot is not pinned.
    fn send_state(&mut self, bucket: usize, slot: Slot) -> Result<()> {
        let (slices, copies) = (self.exchange.slices(), self.scratch.copies);
        let (range, first_copied) = (slices.local(bucket), slices.layout().count() - copies.device_slots());
        for part in copies.arrays().parts().filter(|_| !range.is_empty()) {
            let source = match bucket.checked_sub(first_copied) {
                Some(nth) => copies.on_device(nth, part, range.len()),
                None => self.memory.states.on_device(&range).arrays[part],
            };
            let target = copies.array(slot, part, range.len());
            match copies.is_unpinned(slot) {
                true => self.memory.bounce_buffer.to_host((&mut self.dev, &mut self.host), source, target)?,
                false => self.dev.copy_d2h(Stream::D2h, source, target)?,
            }
        }
        Ok(())
    }

    /// Copies an array of the local range `range` from the device to `target`, in the form that a checkpoint stores.
    fn copy_by_values(&mut self, range: &Range<usize>, part: StatePart, target: PinnedSlice) -> Result<()> {
        let (array, mut values) = (self.scratch.copies.arrays()[part], Vec::new());
        for start in range.clone().step_by(COPY_ELEMS) {
            values.resize(COPY_ELEMS.min(range.end - start), 0.0);
            self.memory.states.read((&mut self.dev, &mut self.host), &self.memory.bounce_buffer, part, start, &mut values)?;
            let (mut at, bytes) = (0, target.slice(array.bytes(start - range.start), array.bytes(values.len())));
            array.stored(&values, |stored| {
                self.host.lend_mut(bytes.slice(at, stored.len())).copy_from_slice(stored);
                at += stored.len();
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Waits until the running save has read the whole state of all ranks, without another step.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    pub(crate) fn end_save(&mut self) -> Result<()> {
        if self.save.is_none() {
            return Ok(());
        }
        self.lead(Order::EndSave, OrderWords::default())?;
        let ended = self.end_own_save();
        self.named(ended)?;
        self.await_done()
    }

    /// Like [`Engine::end_save`], for this rank only.
    pub(super) fn end_own_save(&mut self) -> Result<()> {
        self.block_until(DriverActivity::Save, 0, |engine| Ok(engine.coordinator.all_settled()))?;
        self.coordinator.commit_due();
        self.run_commands()?;
        self.block_until(DriverActivity::Save, 0, |engine| {
            let is_complete = engine.save.as_ref().is_none_or(RunningSave::is_complete);
            Ok(!engine.coordinator.is_saving() && is_complete && engine.device_copies.is_idle())
        })?;
        self.save = None;
        Ok(())
    }

    /// Whether a running save still needs a state of this rank, or on rank 0 of any rank, that it has not read.
    pub(crate) fn is_read_by_save(&self) -> bool {
        self.save.as_ref().is_some_and(|save| !save.is_complete_on_all_ranks())
    }

    /// Whether a later step may wait for the running save.
    pub(crate) fn may_wait_for_save(&self) -> bool {
        self.coordinator.is_holding() || self.device_copies.reads_states()
    }

    /// Time that steps waited for a save since the last call.
    pub(crate) fn take_save_wait(&mut self) -> Duration {
        Duration::from_nanos(self.idle.take_save_ns())
    }

    /// The state of `bucket` can be read by the save.
    pub(super) fn hold_for_save(&mut self, bucket: usize) {
        self.save.as_mut().expect("a running save").hold(bucket);
    }

    /// The copy of the state of `bucket` in `slot` can be read by the save.
    pub(super) fn save_copy(&mut self, bucket: usize, slot: Slot) {
        self.save.as_mut().expect("a running save").copied(bucket, slot);
    }

    /// A bucket whose memory or copy the save needs no more.
    pub(super) fn poll_save(&mut self) -> Option<(Hop, usize)> {
        self.save.as_mut()?.poll()
    }
}
