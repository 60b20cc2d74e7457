//! Reads and writes the optimizer state of the host from outside. Split masters are joined from the streamed weights and lower halves.

use crate::engine::step_job::HostState;
use crate::error::Result;
use crate::host::pinned::HostMemory;
use crate::optim::moments::Rounding;
use crate::optim::split;
use crate::optim::state_array::{StateArray, StatePart};

impl HostState {
    /// Writes `values`, one for each element, rounded by `rounding`; `array` is their array in a checkpoint.
    pub(super) fn write(&self, host: &mut HostMemory, (part, array): (StatePart, &StateArray), values: &[f32], rounding: Rounding) {
        match part {
            StatePart::PARAMS if self.upper.is_some() => self.write_split(host, array, values),
            StatePart::V if self.has_ties() => {
                let signed = host.lend::<u8>(self.arrays[part]).to_vec();
                let stored: &mut [u8] = host.lend_mut(self.arrays[part]);
                array.store(values, rounding, stored);
                split::copy_signs(&signed, stored, values.len());
            }
            _ => array.store(values, rounding, host.lend_mut(self.arrays[part])),
        }
    }

    /// Reads one value for each element into `out`; `array` is their array in a checkpoint.
    ///
    /// # Errors
    /// None: the memory is the host's.
    pub(super) fn read(&self, host: &HostMemory, (part, array): (StatePart, &StateArray), out: &mut [f32]) -> Result<()> {
        match (part, self.upper) {
            (StatePart::PARAMS, Some(upper)) => {
                let seconds = self.has_ties().then(|| host.lend(self.arrays[StatePart::V]));
                split::join(host.lend(upper), host.lend(self.arrays[part]), seconds, out);
                Ok(())
            }
            _ => {
                let elems = out.len();
                array.load(out, |bytes| {
                    bytes.copy_from_slice(host.lend(self.arrays[part]));
                    if part == StatePart::V && self.has_ties() {
                        split::clear_signs(bytes, elems);
                    }
                    Ok(())
                })
            }
        }
    }

    /// Writes split masters: weights, lower halves, and ties in the signs of second moments.
    fn write_split(&self, host: &mut HostMemory, array: &StateArray, values: &[f32]) {
        let halves = [self.upper.expect("split masters"), self.arrays[StatePart::PARAMS]];
        let [upper, lower] = host.lend_each_mut(halves);
        split::split(array, values, bytemuck::cast_slice_mut(upper), bytemuck::cast_slice_mut(lower));
        if self.has_ties() {
            split::set_ties(values, host.lend_mut(self.arrays[StatePart::V]));
        }
    }

    /// Whether the signs of second moments are ties of masters. Masters beside 8-bit moments have none.
    fn has_ties(&self) -> bool {
        self.upper.is_some() && !self.list[StatePart::V].has_groups()
    }
}
