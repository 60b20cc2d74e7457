//! A whole micro-batch at once: for its time, or for what its first run prepares.

use super::Model;
use super::head::MicroStep;
use super::sequence::PassRunner;
use super::tensors::Module;
use crate::device::{Kernels, Stream};
use crate::error::Result;

impl Model {
    /// Lets the device get ready for every layer's attention, and, where it only learns by doing, for all else: by a micro-batch of zeros through
    /// one layer of each kind, since all of them would take as long as a step. What that leaves behind a step's first micro-batch overwrites.
    pub(crate) fn prepare<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        let (activations, dtype) = (&self.activations, self.weights.dtype());
        let documents = activations.documents;
        (0..self.shape.layers.len()).try_for_each(|layer| dev.prepare_attention(self.heads_shape(layer), dtype, documents.is_some()))?;
        if activations.fp8.is_some() {
            dev.prepare_fp8()?;
        }
        if let Some(documents) = documents {
            dev.set_documents(&vec![0; documents.elems()], activations.seq_length)?;
        }
        if !dev.learns_by_doing() {
            return Ok(());
        }
        let done = dev.event()?;
        self.micro_step(dev, &self.layer_kinds(), |dev| {
            dev.record(done, Stream::Compute)?;
            dev.synchronize(done)?;
            // Has its spans read, too.
            dev.is_done(done).map(drop)
        })
    }

    /// Of layers that are made alike and keep alike the first: the others need the same kernels and products, since all tensors are as well
    /// aligned as products take note of.
    pub(super) fn layer_kinds(&self) -> Vec<usize> {
        let kind = |layer: usize| (&self.shape.layers[layer], self.activations.layers[layer].policy);
        (0..self.shape.layers.len()).filter(|layer| (0..*layer).all(|before| kind(before) != kind(*layer))).collect()
    }

    /// Enqueues forward and backward of a micro-batch through `layers` on what lies in memory; `after` each module.
    pub(crate) fn micro_step<P: PassRunner>(
        &self,
        run: &mut P,
        layers: &[usize],
        mut after: impl FnMut(&mut P::Dev) -> Result<()>,
    ) -> Result<()> {
        let layers = || layers.iter().copied().map(Module::Layer);
        for module in [Module::Embed].into_iter().chain(layers()) {
            self.scale_weights(run.dev(), module)?;
            self.forward(run, module)?;
            after(run.dev())?;
        }
        let micro = MicroStep { first: true, inv_targets: 1.0, loss_scale: 1.0, balance: 0.0 };
        self.head(run.dev(), micro, true)?;
        for module in layers().rev().chain([Module::Embed]) {
            after(run.dev())?;
            self.backward(run, module, micro)?;
        }
        after(run.dev())
    }
}
