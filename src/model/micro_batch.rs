//! A whole micro-batch at once, to measure its time or to prepare the device.

use super::Model;
use super::head::{HeadGradients, MicroStep};
use super::head_rows;
use super::sequence::PassRunner;
use super::tensors::Module;
use crate::device::{EventId, Kernels, Stream};
use crate::error::Result;

/// A micro-step that is a whole step.
const ALONE: MicroStep = MicroStep { first: true, inv_weight: 1.0, loss_scale: 1.0, balance: 0.0, head_rows: None };

impl Model {
    /// Prepares the device for the attention of every layer. If the device loads kernels on first use, also runs a micro-batch of zeros
    /// through one layer of each kind; all layers would take as long as a step. The results are overwritten by the first micro-batch of a
    /// step.
    pub(crate) fn prepare<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        let (activations, dtype) = (&self.activations, self.weights.dtype());
        let documents = activations.documents;
        self.shape.layers_with_scores().try_for_each(|layer| dev.prepare_attention(self.heads_shape(layer), dtype, documents.is_some()))?;
        if let Some(delta) = self.shape.first_delta(activations.batch, activations.seq_length) {
            dev.prepare_delta(delta, dtype)?;
        }
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
        self.micro_step(dev, &self.layer_kinds(), |dev| wait(dev, done))?;
        self.prepare_head_rows(dev, done)
    }

    /// Runs the head for every number of rows in which it computes a list of selected rows. The list is zeros: every copy of row 0 has the
    /// same gradient, so the order in which copies are scattered does not matter.
    fn prepare_head_rows<D: Kernels>(&self, dev: &mut D, done: EventId) -> Result<()> {
        if self.activations.head_rows.is_none() {
            return Ok(());
        }
        for count in head_rows::piece_counts(self.activations.tile.rows) {
            self.head(dev, MicroStep { head_rows: Some(count), ..ALONE }, Some(HeadGradients::All))?;
            wait(dev, done)?;
        }
        Ok(())
    }

    /// The first layer of each kind. Layers of the same shape and policy need the same kernels and products if the same tensors are frozen and
    /// both have a backward pass or none, because all tensors have at least the alignment that products distinguish.
    pub(super) fn layer_kinds(&self) -> Vec<usize> {
        let of_table = |layer| (self.table.runs_backward(layer), self.table.frozen_roles(layer));
        let kind = |layer: usize| (&self.shape.layers[layer], self.activations.layers[layer].policy, of_table(Module::Layer(layer)));
        (0..self.shape.layers.len()).filter(|layer| (0..*layer).all(|before| kind(before) != kind(*layer))).collect()
    }

    /// Enqueues forward and backward pass of a micro-batch through `layers` with the present contents of memory; calls `after` for each
    /// module.
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
        self.head(run.dev(), ALONE, Some(HeadGradients::All))?;
        for module in layers().rev().chain([Module::Embed]) {
            after(run.dev())?;
            self.backward(run, module, ALONE)?;
        }
        after(run.dev())
    }
}

/// Waits for all enqueued work, with `done` for the event.
fn wait<D: Kernels>(dev: &mut D, done: EventId) -> Result<()> {
    dev.record(done, Stream::Compute)?;
    dev.synchronize(done)?;
    // Makes the device collect its spans.
    dev.is_done(done).map(drop)
}
