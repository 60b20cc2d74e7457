//! The logits that follow tokens of a micro-batch, for whoever writes text: forward passes of an evaluation, and rows of the output matrix.

use super::executor::Engine;
use super::protocol::order::Order;
use crate::data::rows::batch::{Batches, CountedTargets};
use crate::device::{Kernels, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use half::{bf16, f16};

impl<D: Kernels> Engine<D> {
    /// The logits that follow the tokens at `places` of this rank's first micro-batch, one vocabulary after another, into `out`. The
    /// micro-batch has at least one target that counts. Training goes on as if nothing had been.
    ///
    /// # Errors
    /// As [`Engine::evaluate`].
    pub(crate) fn next_logits(&mut self, batches: &mut impl Batches, places: &[usize], out: &mut Vec<f32>) -> Result<()> {
        let CountedTargets { units, .. } = self.read_micro_batches(batches)?;
        self.reserve(places.len())?;
        self.lead(Order::Evaluate, [units, 1, 0, 0, 0, 0])?;
        let evaluated = self.run_evaluation(units, 1, places);
        self.named(evaluated)?;
        self.await_done()?;
        self.read_logits(places.len(), out);
        Ok(())
    }

    /// Enqueues the copies of the logits at `places`, once the head's forward pass is.
    pub(super) fn send_logits(&mut self, places: &[usize]) -> Result<()> {
        let Some(memory) = self.logits.filter(|_| !places.is_empty()) else { return Ok(()) };
        let row_bytes = self.logits_bytes();
        for (row, place) in places.iter().enumerate() {
            self.model.logits_at(&mut self.dev, *place, |dev, logits, first| {
                let start = row * row_bytes + first * logits.dtype().bytes();
                dev.copy_d2h(Stream::Compute, logits, memory.slice(start, logits.bytes()))
            })?;
        }
        Ok(())
    }

    /// Bytes of one vocabulary's logits.
    fn logits_bytes(&self) -> usize {
        self.model.shape.vocab * self.model.activations.logits.dtype().bytes()
    }

    fn reserve(&mut self, rows: usize) -> Result<()> {
        let bytes = rows * self.logits_bytes();
        if self.logits.is_none_or(|memory| memory.bytes() < bytes) {
            let memory = self.host.alloc("logits", bytes)?;
            self.dev.pin(memory)?;
            self.logits = Some(memory);
        }
        Ok(())
    }

    fn read_logits(&self, rows: usize, out: &mut Vec<f32>) {
        let Some(memory) = self.logits else { return };
        let memory = memory.slice(0, rows * self.logits_bytes());
        out.clear();
        match self.model.activations.logits.dtype() {
            Dtype::Bfloat16 => out.extend(self.host.lend::<bf16>(memory).iter().map(|x| x.to_f32())),
            Dtype::Float16 => out.extend(self.host.lend::<f16>(memory).iter().map(|x| x.to_f32())),
            _ => out.extend(self.host.lend::<f32>(memory)),
        }
        if let Some(cap) = self.model.shape.logit_softcap {
            for x in out {
                *x = cap * libm::tanhf(*x / cap);
            }
        }
    }
}
