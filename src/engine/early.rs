//! The driver's part for buckets of a tied embedding that leave early: it notifies the coordinator when the output matrix's gradient is
//! enqueued, and copies the rows of the batch, which are completed last, in packed form. The protocol is in `coordinator/early.rs`.

use super::executor::Engine;
use super::late_rows::LateRows;
use super::protocol::coordinator::Event;
use super::protocol::route::Hop;
use crate::bucket::slot::Slot;
use crate::device::{Kernels, ScatterRows, Stream};
use crate::error::Result;
use std::ops::Range;

impl<D: Kernels> Engine<D> {
    /// The buckets that leave early in this step. There are none without speculation, since only a speculation may lack rows.
    fn early(&self) -> Range<usize> {
        if self.coordinator.is_speculating() { self.plan.placement.layout.early() } else { 0..0 }
    }

    /// # Panics
    /// If no bucket of the plan leaves early.
    pub(super) fn late_rows(&self) -> &LateRows {
        self.scratch.rows.as_ref().expect("a plan with buckets that leave early")
    }

    /// Called when the output matrix's gradient of the step's last micro-batch is enqueued.
    pub(super) fn head_grads_ready(&mut self, micro_step: usize) -> Result<()> {
        let early = self.early();
        let Some(rows) = self.scratch.rows.as_mut().filter(|_| !early.is_empty()) else { return Ok(()) };
        let tokens = self.plan.recipe.step.micro_batch * self.plan.recipe.step.seq_length;
        rows.collect(&mut self.host, self.memory.batch(&self.plan, micro_step).slice(0, tokens * 4));
        for bucket in early.rev() {
            // A value that a test injects into a gradient must be in the early copy, too.
            self.spoil(&self.plan.placement.layout.range(bucket), 0)?;
            self.issue(Hop::HeadBackward, bucket, None)?;
            self.notify(Event::HeadGradReady(bucket))?;
        }
        Ok(())
    }

    /// Called before kernels that write rows of the embedding's gradient are enqueued. They wait for copies of the same buckets.
    pub(super) fn rows_begin(&mut self) -> Result<()> {
        self.early().try_for_each(|bucket| {
            self.notify(Event::RowsBegin(bucket))?;
            self.dev.wait(Stream::Compute, self.transfers.event(Hop::GradsOut, bucket))
        })
    }

    /// Called when the embedding's gradient is enqueued: packs its late rows.
    pub(super) fn pack_rows(&mut self) -> Result<()> {
        let mut early = self.early();
        if early.is_empty() {
            return Ok(());
        }
        early.try_for_each(|bucket| self.spoil(&self.plan.placement.layout.range(bucket), 0))?;
        let ids = self.late_rows().ids();
        self.model.pack_rows(&mut self.dev, ids)
    }

    /// Copies the gradient of a bucket's late rows to `slot`. A bucket may have none.
    pub(super) fn copy_rows_out(&mut self, stream: Stream, flat: &Range<usize>, slot: Slot) -> Result<()> {
        let packed = self.late_rows().packing(&self.host).packed(flat);
        if packed.is_empty() {
            return Ok(());
        }
        self.copy_out(stream, self.model.packed_rows(&packed), self.scratch.step.params.slot(slot, packed.len()))
    }

    /// Copies the new weights of a bucket's late rows from `slot` and scatters them.
    pub(super) fn copy_rows_in(&mut self, stream: Stream, flat: &Range<usize>, slot: Slot) -> Result<()> {
        let packing = self.late_rows().packing(&self.host);
        let packed = packing.packed(flat);
        if packed.is_empty() {
            return Ok(());
        }
        let ((rows, skipped), below, channels) = (packing.rows_of(&packed), flat.start - packing.start, packing.channels);
        let (values, table) = (self.model.packed_rows(&packed), self.weights(flat, flat.start));
        self.copy_in(stream, self.scratch.step.params.slot(slot, packed.len()), values)?;
        self.dev.launch(ScatterRows { stream, rows: self.model.row_ids(rows), packed: values, table, below, skipped, channels })
    }
}
