//! The weights of frozen tensors, which no step changes and no plan moves.

use super::bounce_buffer::BounceBuffer;
use crate::device::{Device, DeviceSlice, Sides};
use crate::dtype::{Dtype, Element};
use crate::error::Result;
use crate::model::init::init_frozen;
use crate::model::tensors::TensorTable;
use crate::optim::PIECE_ELEMS;
use crate::planner::budget::FrozenSizes;
use half::{bf16, f16};

/// Memory of frozen tensors on one device, in the compute format.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct FrozenWeights {
    /// Weights, in the order of [`TensorTable::frozen`].
    pub(super) weights: DeviceSlice,
    /// Memory for gradients that kernels compute and nothing reads.
    pub(super) unused_grads: DeviceSlice,
}

impl FrozenWeights {
    /// # Errors
    /// `Resource` when memory is not available.
    pub(super) fn new<D: Device>(dev: &mut D, table: &TensorTable, dtype: Dtype) -> Result<Self> {
        let FrozenSizes { weights, unused_grads } = FrozenSizes::of(table);
        let (weights, unused_grads) = (dev.alloc("frozen weights", weights, dtype)?, dev.alloc("unused gradients", unused_grads, dtype)?);
        Ok(Self { weights, unused_grads })
    }

    /// Writes `values` from element `start` of the range of frozen tensors on, rounded to the compute format.
    pub(in crate::engine) fn write<D: Device>(
        &self,
        sides: Sides<'_, D>,
        buffer: &BounceBuffer,
        start: usize,
        values: &[f32],
    ) -> Result<()> {
        let target = self.weights.slice(start, values.len());
        buffer.fill(sides, target, |elems, bytes| match target.dtype() {
            Dtype::Bfloat16 => narrow::<bf16>(&values[elems], bytes),
            Dtype::Float16 => narrow::<f16>(&values[elems], bytes),
            _ => narrow::<f32>(&values[elems], bytes),
        })
    }

    /// Writes random values that depend on `seed` only.
    pub(super) fn init<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        buffer: &BounceBuffer,
        table: &TensorTable,
        (seed, threads): (u64, usize),
    ) -> Result<()> {
        let mut piece = vec![0.0; PIECE_ELEMS.min(self.weights.elems())];
        for start in (0..self.weights.elems()).step_by(PIECE_ELEMS) {
            let part = &mut piece[..PIECE_ELEMS.min(self.weights.elems() - start)];
            init_frozen(table, seed, start, part, threads)?;
            self.write((&mut *dev, &mut *host), buffer, start, part)?;
        }
        Ok(())
    }
}

fn narrow<E: Element>(values: &[f32], bytes: &mut [u8]) {
    let out: &mut [E] = bytemuck::cast_slice_mut(bytes);
    out.iter_mut().zip(values).for_each(|(out, value)| *out = E::from_f32(*value));
}
