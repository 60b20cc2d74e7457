//! Memory that lives as long as the engine: the state of all buckets, and buffers of the driver. The model's weights are here because split
//! masters share them; another plan allocates them anew.

use super::bounce_buffer::BounceBuffer;
use super::frozen_weights::FrozenWeights;
use super::states::StateTiers;
use crate::bucket::layout::Tier;
use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, Kernels, Lease, Sides};
use crate::engine::ranks::exchange::Exchange;
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::model::init::init_flat;
use crate::model::tensors::TensorTable;
use crate::optim::PIECE_ELEMS;
use crate::optim::moments::Rounding;
use crate::optim::split::Masters;
use crate::optim::state_array::StatePart;
use crate::planner::plan::Plan;

pub(in crate::engine) struct Memory {
    pub(in crate::engine) states: StateTiers,
    /// The model's flat weights.
    pub(in crate::engine) weights: DeviceSlice,
    weights_lease: Lease,
    pub(in crate::engine) frozen: FrozenWeights,
    /// Inputs of all micro-batches of a step.
    batches: PinnedSlice,
    pub(in crate::engine) bounce_buffer: BounceBuffer,
    /// Slots of streamed weights that are the upper halves of the host's masters.
    pub(super) split_weights: Option<PinnedSlice>,
}

impl Memory {
    pub(in crate::engine) fn new<D: Kernels>(plan: &Plan, exchange: &dyn Exchange<D>, (dev, host): Sides<'_, D>) -> Result<Self> {
        let slices = exchange.slices();
        let split_weights = split_weights(plan, slices, (dev, host))?;
        let states = StateTiers::new((plan.optimizer(), plan.protocol.masters), slices, split_weights, (dev, host))?;
        let batches = host.alloc("batches", plan.micro_batches_of_rank() * input_bytes(plan))?;
        dev.pin(batches)?;
        let (dtype, bounce_buffer) = (plan.recipe.numerics.dtype, BounceBuffer::new((dev, host))?);
        let frozen = FrozenWeights::new(dev, &TensorTable::new(&plan.recipe.model), dtype)?;
        let weights = DeviceSlice::at(0, 0, dtype);
        let mut memory = Self { states, weights, weights_lease: Lease::default(), frozen, batches, bounce_buffer, split_weights };
        memory.take_weights(plan, exchange, dev)?;
        Ok(memory)
    }

    /// Allocates the weights of `plan`. Split masters move there.
    ///
    /// # Errors
    /// `Resource` when memory is not available; split masters stay where they are then.
    pub(in crate::engine) fn take_weights<D: Kernels>(&mut self, plan: &Plan, exchange: &dyn Exchange<D>, dev: &mut D) -> Result<()> {
        let (flat, dtype) = (plan.placement.layout.flat_elems(), plan.recipe.numerics.dtype);
        let weights = self.weights_lease.alloc_flat(dev, "weights", flat, dtype, plan.placement.rings.weights)?;
        self.weights = weights;
        self.states.place_weights(dev, |bucket| match exchange.slices().pieces(bucket.clone()).next() {
            Some((flat, local)) => exchange.own_weights(weights, &flat, local),
            // A rank may own nothing of a short bucket.
            None => weights.slice(0, 0),
        })
    }

    /// Frees the weights. Split masters move out of them, into less memory than gradients take: free those before.
    ///
    /// # Errors
    /// `Resource` when memory for split masters is not available; the weights stay then.
    pub(in crate::engine) fn free_weights<D: Kernels>(&mut self, dev: &mut D) -> Result<()> {
        self.states.keep_weights(dev)?;
        self.weights_lease.give_back_device(dev)
    }

    /// The memory of one micro-batch: a [`crate::data::rows::batch::Batch`], int32 `[arrays, T]`, or this rank's part of it.
    pub(in crate::engine) fn batch(&self, plan: &Plan, micro_step: usize) -> PinnedSlice {
        self.inputs(plan, micro_step).slice(0, plan.batch_words() * 4)
    }

    /// The memory of all inputs of one micro-batch: its [`Self::batch`], and the lists of selected rows of the head.
    pub(in crate::engine) fn inputs(&self, plan: &Plan, micro_step: usize) -> PinnedSlice {
        self.batches.slice(micro_step * input_bytes(plan), input_bytes(plan))
    }

    /// Writes random initial parameters into the state and the frozen weights, with `threads` threads. Leaves all other arrays unchanged. No job may be running.
    pub(in crate::engine) fn init_params<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        slices: &Slices,
        table: &TensorTable,
        seed: u64,
        threads: usize,
    ) -> Result<()> {
        for state in self.states.host_parts(&(0..self.states.host_elems())).filter(|state| state.upper.is_none()) {
            for (flat, local) in slices.pieces(state.first..state.end()) {
                let memory = state.arrays[StatePart::PARAMS].slice((local - state.first) * 4, flat.len() * 4);
                let params: &mut [f32] = host.lend_mut(memory);
                init_flat(table, seed, flat.start, params, threads)?;
                state.list[StatePart::PARAMS].settle(params);
            }
        }
        self.frozen.init((&mut *dev, &mut *host), &self.bounce_buffer, table, (seed, threads))?;
        let split = self.split_weights.map(|_| 0..self.states.host_elems());
        for range in split.into_iter().chain(self.states.device.iter().map(|state| state.local.clone())) {
            let mut buffer = vec![0.0; PIECE_ELEMS.min(range.len())];
            for (flat, start) in slices.pieces(range) {
                for piece in (0..flat.len()).step_by(PIECE_ELEMS) {
                    let part = &mut buffer[..PIECE_ELEMS.min(flat.len() - piece)];
                    init_flat(table, seed, flat.start + piece, part, threads)?;
                    let (first, rounding) = (start + piece, Rounding { key: 0, first: flat.start + piece });
                    self.states.write((dev, host), &self.bounce_buffer, StatePart::PARAMS, first, part, rounding)?;
                }
            }
        }
        Ok(())
    }
}

/// Zeroed slots for the streamed weights of `plan`, if they are the upper halves of masters.
fn split_weights<D: Device>(plan: &Plan, slices: &Slices, (dev, host): Sides<'_, D>) -> Result<Option<PinnedSlice>> {
    if plan.host_masters() == Masters::Float32 {
        return Ok(None);
    }
    let slot_bytes = slices.slice_elems().min(slices.elems_in(Tier::Host).len()) * plan.recipe.numerics.dtype.bytes();
    let memory = host.alloc_periodic("parameter slots", plan.placement.param_slots * slot_bytes, slot_bytes)?;
    dev.pin(memory)?;
    Ok(Some(memory))
}

/// Bytes of the inputs of one micro-batch.
fn input_bytes(plan: &Plan) -> usize {
    (plan.batch_words() + plan.head_row_words()) * 4
}
