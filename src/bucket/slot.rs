//! Staging slots: fixed pieces of pinned memory, lent and returned, never grown.

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot(pub usize);

/// The free slots of a fixed number. It allocates only in `new`.
#[derive(Clone, Debug)]
pub(crate) struct FreeList {
    free: Vec<Slot>,
    count: usize,
}

impl FreeList {
    /// `count` slots, all free.
    pub(crate) fn new(count: usize) -> Self {
        Self { free: (0..count).rev().map(Slot).collect(), count }
    }

    /// A free slot, or `None`: the caller then waits (back-pressure).
    pub(crate) fn take(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// The given slot, if it is free.
    pub(crate) fn take_this(&mut self, slot: Slot) -> Option<Slot> {
        let at = self.free.iter().position(|free| *free == slot)?;
        Some(self.free.swap_remove(at))
    }

    /// Returns a slot.
    ///
    /// # Panics
    /// If the slot was free already: it would have two owners.
    pub(crate) fn give(&mut self, slot: Slot) {
        assert!(slot.0 < self.count && !self.free.contains(&slot), "slot {} given back twice", slot.0);
        self.free.push(slot);
    }
}

/// Counts for the coordinator's invariant check in debug builds.
#[cfg(any(test, debug_assertions))]
impl FreeList {
    /// Number of slots, free or lent.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn lent(&self) -> usize {
        self.count - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_free_list_lends_each_slot_once() {
        let mut list = FreeList::new(2);
        let (a, b) = (list.take().unwrap(), list.take().unwrap());
        assert!(a != b && list.take().is_none() && list.lent() == 2);
        list.give(a);
        assert_eq!((list.take_this(b), list.take_this(a), list.take_this(a)), (None, Some(a), None));
        list.give(a);
        assert_eq!(list.take(), Some(a));
        list.give(b);
        assert!(std::panic::catch_unwind(move || list.give(b)).is_err());
    }
}
