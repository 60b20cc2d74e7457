//! Memory that lives as long as the engine: the state of all buckets, and buffers of the driver.

use super::bounce_buffer::BounceBuffer;
use super::states::{DeviceState, StateTiers};
use crate::bucket::slices::Slices;
use crate::device::{Device, Sides};
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::model::init::init_flat;
use crate::model::tensors::TensorTable;
use crate::optim::PIECE_ELEMS;
use crate::optim::state_array::StatePart;
use crate::planner::plan::Plan;

pub(in crate::engine) struct Memory {
    pub(in crate::engine) states: StateTiers,
    /// Inputs of all micro-batches of a step.
    batches: PinnedSlice,
    pub(in crate::engine) bounce_buffer: BounceBuffer,
}

impl Memory {
    pub(in crate::engine) fn new<D: Device>(plan: &Plan, slices: &Slices, (dev, host): Sides<'_, D>) -> Result<Self> {
        let states = StateTiers::new(plan.optimizer().arrays(), slices, (dev, host))?;
        let batches = host.alloc("batches", plan.micro_batches_of_rank() * input_bytes(plan))?;
        dev.pin(batches)?;
        Ok(Self { states, batches, bounce_buffer: BounceBuffer::new((dev, host))? })
    }

    /// The memory of one micro-batch: a [`crate::data::rows::batch::Batch`], int32 `[arrays, T]`, or this rank's part of it.
    pub(in crate::engine) fn batch(&self, plan: &Plan, micro_step: usize) -> PinnedSlice {
        self.inputs(plan, micro_step).slice(0, plan.batch_words() * 4)
    }

    /// The memory of all inputs of one micro-batch: its [`Self::batch`], and the lists of selected rows of the head.
    pub(in crate::engine) fn inputs(&self, plan: &Plan, micro_step: usize) -> PinnedSlice {
        self.batches.slice(micro_step * input_bytes(plan), input_bytes(plan))
    }

    /// Writes random initial parameters into the state, with `threads` threads. Leaves all other arrays unchanged. No job may be running.
    pub(in crate::engine) fn init_params<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        slices: &Slices,
        table: &TensorTable,
        seed: u64,
        threads: usize,
    ) -> Result<()> {
        for state in self.states.host_parts(&(0..self.states.host_elems())) {
            for (flat, local) in slices.pieces(state.first..state.end()) {
                let memory = state.arrays[StatePart::PARAMS].slice((local - state.first) * 4, flat.len() * 4);
                init_flat(table, seed, flat.start, host.lend_mut(memory), threads)?;
            }
        }
        for DeviceState { local, arrays } in &self.states.device {
            let params = arrays[StatePart::PARAMS];
            let mut buffer = vec![0.0; PIECE_ELEMS.min(params.elems())];
            for (flat, start) in slices.pieces(local.clone()) {
                for piece in (0..flat.len()).step_by(PIECE_ELEMS) {
                    let part = &mut buffer[..PIECE_ELEMS.min(flat.len() - piece)];
                    init_flat(table, seed, flat.start + piece, part, threads)?;
                    self.bounce_buffer.upload((dev, host), part, params.slice(start - local.start + piece, part.len()))?;
                }
            }
        }
        Ok(())
    }
}

/// Bytes of the inputs of one micro-batch.
fn input_bytes(plan: &Plan) -> usize {
    (plan.batch_words() + plan.head_row_words()) * 4
}
