//! State and weights from outside and to the outside, between steps.

use super::executor::Engine;
use super::step::Pass;
use super::vitals::Doing;
use crate::data::batch::Batches;
use crate::device::{Kernels, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::model::tensors::Stage;
use crate::optim::StatePart;

impl<D: Kernels> Engine<D> {
    /// Sets all parameters to random values that depend on `seed` alone; the moments stay as they are: zero in an engine that
    /// has not stepped. Call [`Engine::send_weights`] after it.
    ///
    /// # Errors
    /// The device's; `Resource` when a thread cannot start.
    ///
    /// # Panics
    /// If an update is under way: see [`Engine::flush`].
    pub fn init_state(&mut self, seed: u64, threads: usize) -> Result<()> {
        self.expect_no_job();
        self.memory.init_params((&mut self.dev, &mut self.host), &self.model.table, seed, threads)
    }

    /// Sets parameters or moments from element `start` of the flat range on. Call [`Engine::send_weights`] after the last.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// If they reach beyond the flat range, or an update is under way: see [`Engine::flush`].
    pub fn write_state(&mut self, part: StatePart, start: usize, source: &[f32]) -> Result<()> {
        self.expect_no_job();
        self.memory.write((&mut self.dev, &mut self.host), part, start..start + source.len(), source)
    }

    /// Reads parameters or moments from element `start` of the flat range on. Call [`Engine::flush`] first.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// If they reach beyond the flat range, or an update is under way: see [`Engine::flush`].
    pub fn read_state(&mut self, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        self.expect_no_job();
        self.memory.read((&mut self.dev, &mut self.host), part, start..start + out.len(), out)
    }

    /// Nobody but jobs of the pool touches the state, and who borrows the engine submits none.
    fn expect_no_job(&self) {
        assert!(self.in_pool.is_none(), "an update of the state is under way: flush the engine first");
    }

    /// Derives the device's working weights from the state.
    ///
    /// # Errors
    /// The device's.
    pub fn send_weights(&mut self) -> Result<()> {
        for state in &self.memory.device {
            self.dev.cast(Stream::Compute, state.params, self.model.weights.slice(state.flat.start, state.flat.len()))?;
        }
        self.coordinator.restore();
        self.obey()?;
        self.wait_for_all_params()
    }

    /// Writes every decided update into the state, so that it can be read.
    ///
    /// # Errors
    /// The device's.
    pub fn flush(&mut self) -> Result<()> {
        self.vitals.now(Doing::Updates, 0);
        let flushed = self.write_updates();
        self.vitals.now(Doing::Else, 0);
        flushed
    }

    fn write_updates(&mut self) -> Result<()> {
        self.block_until(Doing::Updates, 0, |engine| Ok(engine.coordinator.all_settled()))?;
        self.coordinator.flush();
        self.obey()?;
        self.wait_for_all_params()?;
        self.dev.record(self.compute_tail, Stream::Compute)?;
        self.dev.synchronize(self.compute_tail)
    }

    /// The logits `[batch * seq_length, vocab]` of one batch, as fp32, for evaluation.
    ///
    /// # Errors
    /// The device's; `batches`'.
    pub fn logits(&mut self, batches: &mut impl Batches) -> Result<Vec<f32>> {
        self.wait_for_all_params()?;
        let elems = self.plan.batch * self.plan.seq_length * self.model.shape.vocab;
        let out = self.dev.alloc("logits", elems, self.plan.dtype)?;
        let wide = self.dev.alloc("logits fp32", elems, Dtype::Float32)?;
        self.read_batch(0, batches)?;
        self.upload_batch(0)?;
        self.forward_stages()?;
        self.with_weights(Stage::Head, Pass::Forward, |engine| engine.model.logits(&mut engine.dev, out))?;
        self.dev.cast(Stream::Compute, out, wide)?;
        let mut values = vec![0.0; elems];
        self.memory.download((&mut self.dev, &mut self.host), wide, &mut values)?;
        Ok(values)
    }
}
