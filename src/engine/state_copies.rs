//! Slots of host memory for copies of states that wait to be saved.

use crate::bucket::slot::Slot;
use crate::host::pinned::PinnedSlice;
use crate::optim::state_array::{StateArrays, StatePart};

/// The slots, consecutive in one allocation. Each has the arrays of one bucket, one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateCopies {
    memory: PinnedSlice,
    arrays: StateArrays,
    /// Elements of the largest bucket.
    slot_elems: usize,
}

impl StateCopies {
    /// As many slots for states of `slot_elems` elements as `memory` has.
    pub(in crate::engine) fn new(memory: PinnedSlice, arrays: StateArrays, slot_elems: usize) -> Self {
        Self { memory, arrays, slot_elems }
    }

    /// The arrays of a state.
    pub(in crate::engine) fn arrays(&self) -> StateArrays {
        self.arrays
    }

    /// Number of slots.
    pub(in crate::engine) fn slots(&self) -> usize {
        self.memory.bytes() / self.slot_bytes().max(1)
    }

    /// The memory of all slots from slot `first` on.
    ///
    /// # Panics
    /// If there are fewer than `first` slots.
    pub(in crate::engine) fn slots_from(&self, first: usize) -> PinnedSlice {
        self.memory.slice(first * self.slot_bytes(), (self.slots() - first) * self.slot_bytes())
    }

    fn slot_bytes(&self) -> usize {
        self.arrays.bytes(self.slot_elems)
    }

    /// The copy of array `part` of a bucket of `elems` elements in `slot`.
    ///
    /// # Panics
    /// If there is no such slot.
    pub(in crate::engine) fn array(&self, slot: Slot, part: StatePart, elems: usize) -> PinnedSlice {
        self.memory.slice(slot.0 * self.slot_bytes() + self.arrays.offset(part, elems), self.arrays[part].bytes(elems))
    }
}
