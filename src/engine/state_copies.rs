//! Memory for copies of states that wait to be saved.

use crate::bucket::slot::Slot;
use crate::device::DeviceSlice;
use crate::dtype::Dtype;
use crate::host::pinned::PinnedSlice;
use crate::optim::state_array::{StateArrays, StatePart};
use std::ops::Range;

/// Format of the words in which a device copies states.
const WORD: Dtype = Dtype::Bfloat16;

/// Size of the largest base page of any kernel.
const PAGE_BYTES_MAX: usize = 64 << 10;

/// Slots, consecutive in each memory. Each has the arrays of one bucket, one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateCopies {
    pub(in crate::engine) memory: CopyMemory,
    arrays: StateArrays,
    /// Elements of the largest bucket.
    slot_elems: usize,
}

/// Memory of slots.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct CopyMemory {
    /// Slots of the pool, then those for states that leave the device from their own memory.
    pub(in crate::engine) host: PinnedSlice,
    /// Slots of the host through which the copies of the device leave it. Their numbers follow those of `host`.
    pub(in crate::engine) staged: PinnedSlice,
    /// Whether the staged slots are pinned.
    pub(in crate::engine) is_staged_pinned: bool,
    /// Slots of the device, with numbers of their own.
    pub(in crate::engine) device: DeviceSlice,
}

impl StateCopies {
    /// As many slots for states of `slot_elems` elements as each `memory` has.
    pub(in crate::engine) fn new(memory: CopyMemory, arrays: StateArrays, slot_elems: usize) -> Self {
        Self { memory, arrays, slot_elems }
    }

    /// The arrays of a state.
    pub(in crate::engine) fn arrays(&self) -> StateArrays {
        self.arrays
    }

    /// Number of slots of the host without the staged ones.
    pub(in crate::engine) fn slots(&self) -> usize {
        self.memory.host.bytes() / self.slot_bytes().max(1)
    }

    /// Number of slots of the device.
    pub(in crate::engine) fn device_slots(&self) -> usize {
        self.memory.device.bytes() / self.slot_bytes().max(1)
    }

    /// Whether the memory of `slot` is staged and not pinned.
    pub(in crate::engine) fn is_unpinned(&self, slot: Slot) -> bool {
        slot.0 >= self.slots() && !self.memory.is_staged_pinned
    }

    /// The staged slot number `nth`.
    pub(in crate::engine) fn staged(&self, nth: usize) -> Slot {
        Slot(self.slots() + nth)
    }

    /// The memory of the slots `range` of the host, which are not staged.
    ///
    /// # Panics
    /// If there are no such slots.
    pub(in crate::engine) fn memory_of(&self, range: Range<usize>) -> PinnedSlice {
        self.memory.host.slice(range.start * self.slot_bytes(), range.len() * self.slot_bytes())
    }

    /// Bytes of a slot if slots are whole pages, else of all slots of the host: no part of this size shares a page with the next one.
    pub(in crate::engine) fn page_aligned_bytes(&self) -> usize {
        if self.slot_bytes().is_multiple_of(PAGE_BYTES_MAX) { self.slot_bytes() } else { self.memory.host.bytes() }
    }

    fn slot_bytes(&self) -> usize {
        self.arrays.bytes(self.slot_elems)
    }

    /// The copy of array `part` of a bucket of `elems` elements in `slot` of the host.
    ///
    /// # Panics
    /// If there is no such slot.
    pub(in crate::engine) fn array(&self, slot: Slot, part: StatePart, elems: usize) -> PinnedSlice {
        let slots = self.slots();
        let (memory, nth) = if slot.0 < slots { (self.memory.host, slot.0) } else { (self.memory.staged, slot.0 - slots) };
        memory.slice(nth * self.slot_bytes() + self.arrays.offset(part, elems), self.arrays[part].bytes(elems))
    }

    /// The copy of array `part` of a bucket of `elems` elements in slot `nth` of the device, as [`words`].
    ///
    /// # Panics
    /// If there is no such slot.
    pub(in crate::engine) fn on_device(&self, nth: usize, part: StatePart, elems: usize) -> DeviceSlice {
        let start = nth * self.slot_bytes() + self.arrays.offset(part, elems);
        self.memory.device.view(start, self.arrays[part].bytes(elems) / WORD.bytes(), WORD)
    }

    /// Number of [`words`] of `slots` slots for states of `slot_elems` elements.
    pub(in crate::engine) fn words_of(slots: usize, arrays: StateArrays, slot_elems: usize) -> (usize, Dtype) {
        (slots * arrays.bytes(slot_elems) / WORD.bytes(), WORD)
    }
}

/// `memory` of any format, in the words in which a device copies states.
pub(in crate::engine) fn words(memory: DeviceSlice) -> DeviceSlice {
    memory.view(0, memory.bytes() / WORD.bytes(), WORD)
}
