//! The weights of frozen tensors, which no step changes and no plan moves.

use super::bounce_buffer::BounceBuffer;
use crate::device::{Device, Sides};
use crate::dtype::mxfp4::Mxfp4;
use crate::dtype::{Dtype, Element};
use crate::error::Result;
use crate::model::FrozenMemory;
use crate::model::init::{INIT_SCALE, init_codes, init_frozen};
use crate::model::tensors::TensorTable;
use crate::optim::PIECE_ELEMS;
use half::{bf16, f16};

/// Memory of frozen tensors on one device.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct FrozenWeights(pub(super) FrozenMemory);

impl FrozenWeights {
    /// # Errors
    /// `Resource` when memory is not available.
    pub(super) fn new<D: Device>(dev: &mut D, table: &TensorTable, dtype: Dtype) -> Result<Self> {
        FrozenMemory::alloc(dev, table, dtype).map(Self)
    }

    /// Writes `values` from element `start` of the range of frozen tensors on, rounded to the compute format.
    pub(in crate::engine) fn write<D: Device>(
        &self,
        sides: Sides<'_, D>,
        buffer: &BounceBuffer,
        start: usize,
        values: &[f32],
    ) -> Result<()> {
        let target = self.0.weights.slice(start, values.len());
        buffer.fill(sides, target, |elems, bytes| match target.dtype() {
            Dtype::Bfloat16 => narrow::<bf16>(&values[elems], bytes),
            Dtype::Float16 => narrow::<f16>(&values[elems], bytes),
            _ => narrow::<f32>(&values[elems], bytes),
        })
    }

    /// Writes packed weights from element `start` of their range on.
    pub(in crate::engine) fn write_packed<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        buffer: &BounceBuffer,
        start: usize,
        numbers: Mxfp4<'_>,
    ) -> Result<()> {
        for (target, source) in self.0.packed(start, numbers.elems()).into_iter().zip([numbers.codes, numbers.scales]) {
            buffer.fill((&mut *dev, &mut *host), target, |range, bytes| bytes.copy_from_slice(&source[range]))?;
        }
        Ok(())
    }

    /// Writes random values that depend on `seed` only.
    pub(super) fn init<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        buffer: &BounceBuffer,
        table: &TensorTable,
        (seed, threads): (u64, usize),
    ) -> Result<()> {
        let mut piece = vec![0.0; PIECE_ELEMS.min(self.0.weights.elems())];
        for start in (0..self.0.weights.elems()).step_by(PIECE_ELEMS) {
            let part = &mut piece[..PIECE_ELEMS.min(self.0.weights.elems() - start)];
            init_frozen(table, seed, start, part, threads)?;
            self.write((&mut *dev, &mut *host), buffer, start, part)?;
        }
        let [codes, scales] = self.0.packed(0, table.packed_elems());
        buffer.fill((&mut *dev, &mut *host), codes, |range, bytes| init_codes(seed, range.start, bytes))?;
        buffer.fill((dev, host), scales, |_, bytes| bytes.fill(INIT_SCALE))
    }
}

fn narrow<E: Element>(values: &[f32], bytes: &mut [u8]) {
    let out: &mut [E] = bytemuck::cast_slice_mut(bytes);
    out.iter_mut().zip(values).for_each(|(out, value)| *out = E::from_f32(*value));
}
