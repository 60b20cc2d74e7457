//! Reads and writes state and weights from outside, between steps.

use super::executor::Engine;
use super::memory::permanent::Memory;
use super::packed_mail;
use super::protocol::order::Order;
use super::protocol::route::Hop;
use super::ranks::exchange::OrderWords;
use super::step::Pass;
use super::watch::driver_state::DriverActivity;
use crate::bucket::slices::Slices;
use crate::data::rows::batch::Batches;
use crate::device::{Cast, Kernels, Stream};
use crate::dtype::Dtype;
use crate::dtype::mxfp4::{BLOCK_ELEMS, Mxfp4};
use crate::error::Result;
use crate::faults::FaultPhase;
use crate::model::tensors::Module;
use crate::optim::int8::whole_groups;
use crate::optim::moments::{Rounding, rounding_key};
use crate::optim::state_array::StatePart;

impl<D: Kernels> Engine<D> {
    /// Sets all parameters to random values that depend on `seed` only. The moments are unchanged: zero in an engine that has not stepped.
    /// Call [`Engine::send_weights`] afterwards.
    ///
    /// # Errors
    /// Errors of the device; `Resource` when a thread cannot start.
    ///
    /// # Panics
    /// If an update is pending: see [`Engine::flush`].
    pub(crate) fn init_state(&mut self, seed: u64, threads: usize) -> Result<()> {
        self.lead(Order::Init, [seed, threads as u64, 0, 0, 0, 0])?;
        self.expect_no_job();
        let made = self.memory.init_params((&mut self.dev, &mut self.host), self.exchange.slices(), &self.model.table, seed, threads);
        self.named(made)
    }

    /// Sets values of an array from element `start` of the flat order on. They are rounded to the array's format as in the engine's
    /// last step: call [`Engine::resume`] before, and [`Engine::send_weights`] after the last call.
    ///
    /// # Panics
    /// If the range exceeds the flat order, an update is pending (see [`Engine::flush`]), or 8-bit moments do not begin with a
    /// [`MomentGroup`](crate::optim::int8::MomentGroup).
    pub fn write_state(&mut self, part: StatePart, start: usize, source: &[f32]) -> Result<()> {
        let piece_elems = self.mail_elems().min(source.len()).max(1);
        for (at, piece) in (start..).step_by(piece_elems).zip(source.chunks(piece_elems)) {
            self.await_done()?;
            self.exchange.post(0, piece);
            self.lead(Order::Write, [part.index() as u64, at as u64, piece.len() as u64, 0, 0, 0])?;
            let written = self.write_own(part, at, piece);
            self.named(written)?;
        }
        Ok(())
    }

    /// Sets weights of frozen tensors from element `start` of their range on, rounded to the compute format.
    ///
    /// # Errors
    /// Errors of the device.
    ///
    /// # Panics
    /// If the range exceeds that of frozen tensors.
    pub fn write_frozen(&mut self, start: usize, source: &[f32]) -> Result<()> {
        let piece_elems = self.mail_elems().min(source.len()).max(1);
        for (at, piece) in (start..).step_by(piece_elems).zip(source.chunks(piece_elems)) {
            self.await_done()?;
            self.exchange.post(0, piece);
            self.lead(Order::WriteFrozen, [at as u64, piece.len() as u64, 0, 0, 0, 0])?;
            let written = self.write_own_frozen(at, piece);
            self.named(written)?;
        }
        Ok(())
    }

    /// Like [`Engine::write_frozen`], for this rank only.
    pub(super) fn write_own_frozen(&mut self, start: usize, source: &[f32]) -> Result<()> {
        let Memory { frozen, bounce_buffer, .. } = &self.memory;
        frozen.write((&mut self.dev, &mut self.host), bounce_buffer, start, source)
    }

    /// Sets weights of frozen tensors in MXFP4 from element `start` of their range on.
    ///
    /// # Errors
    /// Errors of the device.
    ///
    /// # Panics
    /// If the range exceeds that of packed tensors.
    pub fn write_packed(&mut self, start: usize, source: Mxfp4<'_>) -> Result<()> {
        let piece_elems = packed_mail::elems(self.exchange.mail_words()).min(source.elems()).max(BLOCK_ELEMS);
        for at in (0..source.elems()).step_by(piece_elems) {
            let piece = source.slice(at, piece_elems.min(source.elems() - at));
            self.await_done()?;
            if self.exchange.slices().ranks() > 1 {
                self.exchange.post(0, &packed_mail::words(piece));
            }
            self.lead(Order::WritePacked, [(start + at) as u64, piece.elems() as u64, 0, 0, 0, 0])?;
            let written = self.write_own_packed(start + at, piece);
            self.named(written)?;
        }
        Ok(())
    }

    /// Like [`Engine::write_packed`], for this rank only.
    pub(super) fn write_own_packed(&mut self, start: usize, source: Mxfp4<'_>) -> Result<()> {
        let Memory { frozen, bounce_buffer, .. } = &self.memory;
        frozen.write_packed((&mut self.dev, &mut self.host), bounce_buffer, start, source)
    }

    /// Elements of a piece of state that the mail buffer carries.
    fn mail_elems(&self) -> usize {
        whole_groups(self.exchange.mail_words())
    }

    /// Like [`Engine::write_state`], for this rank's slices only.
    pub(super) fn write_own(&mut self, part: StatePart, start: usize, source: &[f32]) -> Result<()> {
        self.inject(FaultPhase::Write)?;
        self.expect_no_job();
        let own: &Slices = self.exchange.slices();
        let mut parts = own.owned(start..start + source.len());
        let key = rounding_key(self.steps.optimizer());
        parts.try_for_each(|(flat, local)| {
            self.memory.states.write(
                (&mut self.dev, &mut self.host),
                &self.memory.bounce_buffer,
                part,
                local,
                &source[flat.start - start..flat.end - start],
                Rounding { key, first: flat.start },
            )
        })
    }

    /// Reads values of an array from element `start` of the flat order on. Call [`Engine::flush`] first.
    ///
    /// # Panics
    /// If the range exceeds the flat order, or an update is pending: see [`Engine::flush`].
    pub fn read_state(&mut self, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        let piece_elems = self.mail_elems().min(out.len()).max(1);
        for (at, piece) in (start..).step_by(piece_elems).zip(out.chunks_mut(piece_elems)) {
            self.lead(Order::Read, [part.index() as u64, at as u64, piece.len() as u64, 0, 0, 0])?;
            self.await_done()?;
            self.exchange.mail(0, piece);
            let read = self.read_own(part, at, piece);
            self.named(read)?;
        }
        Ok(())
    }

    /// Like [`Engine::read_state`], for this rank's slices only; the rest of `out` is unchanged.
    pub(super) fn read_own(&mut self, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        self.inject(FaultPhase::Read)?;
        self.expect_no_job();
        let own: &Slices = self.exchange.slices();
        let mut parts = own.owned(start..start + out.len());
        parts.try_for_each(|(flat, local)| {
            self.memory.states.read(
                (&mut self.dev, &mut self.host),
                &self.memory.bounce_buffer,
                part,
                local,
                &mut out[flat.start - start..flat.end - start],
            )
        })
    }

    /// The slices that this rank owns.
    pub(crate) fn slices(&self) -> &Slices {
        self.exchange.slices()
    }

    /// Reads values of an array of this rank's slices in the local order, from element `start` on.
    ///
    /// # Panics
    /// As [`Engine::read_state`].
    pub(crate) fn read_slices(&mut self, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        self.inject(FaultPhase::Read)?;
        self.expect_no_job();
        self.memory.states.read((&mut self.dev, &mut self.host), &self.memory.bounce_buffer, part, start, out)
    }

    /// Checks that the pool has no job. Only jobs of the pool modify the state, and a caller that borrows the engine submits none.
    pub(super) fn expect_no_job(&self) {
        assert!(self.in_pool.is_none(), "an update of the state is under way: flush the engine first");
    }

    /// Computes the device's working weights from the state.
    pub fn send_weights(&mut self) -> Result<()> {
        self.lead(Order::Send, OrderWords::default())?;
        let sent = self.send_own_weights();
        self.named(sent)
    }

    fn send_own_weights(&mut self) -> Result<()> {
        // The working weights of split masters are part of the state.
        for state in self.memory.states.device.iter().filter(|state| state.weights().is_none()) {
            for (flat, local) in self.exchange.slices().pieces(state.local.clone()) {
                let (src, dst) = (state.arrays[StatePart::PARAMS].slice(local - state.local.start, flat.len()), self.weights(&flat, local));
                self.dev.launch(Cast { stream: Stream::Compute, src, dst })?;
            }
        }
        (self.plan.placement.layout.offloaded()..self.plan.placement.layout.count())
            .try_for_each(|bucket| self.issue(Hop::StepOnDevice, bucket, None))?;
        self.coordinator.restore();
        self.run_commands()?;
        self.next_version();
        self.wait_for_all_params()
    }

    /// Adds this rank's name to its failure, or returns the failure of the rank that failed first.
    pub(super) fn named<T>(&self, own: Result<T>) -> Result<T> {
        own.map_err(|error| self.exchange.attribute(error))
    }

    /// Writes every decided update into the state, so that it can be read. Waits for a running save, which reads the state.
    pub fn flush(&mut self) -> Result<()> {
        self.end_save()?;
        self.lead(Order::Flush, OrderWords::default())?;
        self.driver_state.set_activity(DriverActivity::Updates, 0);
        let flushed = self.write_updates();
        self.driver_state.set_activity(DriverActivity::Else, 0);
        self.named(flushed)
    }

    fn write_updates(&mut self) -> Result<()> {
        self.inject(FaultPhase::Flush)?;
        self.block_until(DriverActivity::Updates, 0, |engine| Ok(engine.coordinator.all_settled()))?;
        self.coordinator.flush();
        self.run_commands()?;
        self.wait_for_all_params()?;
        self.dev.record(self.compute_tail, Stream::Compute)?;
        self.dev.synchronize(self.compute_tail)
    }
}

impl<D: Kernels> Engine<D> {
    /// The logits `[batch * seq_length, vocab]` of one batch in fp32, for evaluation.
    ///
    /// # Errors
    /// Errors of the device and of `batches`.
    pub fn logits(&mut self, batches: &mut impl Batches) -> Result<Vec<f32>> {
        self.wait_for_all_params()?;
        let elems = self.plan.recipe.step.micro_batch * self.plan.recipe.step.seq_length * self.model.shape.vocab;
        let out = self.dev.alloc("logits", elems, self.plan.recipe.numerics.dtype)?;
        let wide = self.dev.alloc("logits fp32", elems, Dtype::Float32)?;
        self.read_batch(0, 0, batches)?;
        self.upload_inputs(0)?;
        self.forward_modules(true)?;
        self.with_weights(Module::Head, Pass::FORWARD, |engine| engine.model.logits(&mut engine.dev, out))?;
        self.dev.launch(Cast { stream: Stream::Compute, src: out, dst: wide })?;
        let mut values = vec![0.0; elems];
        self.memory.bounce_buffer.download((&mut self.dev, &mut self.host), wide, bytemuck::cast_slice_mut(&mut values))?;
        if let Some(cap) = self.model.shape.logit_softcap {
            for x in &mut values {
                *x = cap * libm::tanhf(*x / cap);
            }
        }
        Ok(values)
    }
}
