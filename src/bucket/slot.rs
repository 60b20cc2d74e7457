//! The staging slots: fixed pieces of pinned memory, lent and given back, never grown.

/// One slot of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot(pub usize);

/// Which slots are free. Nothing allocates after construction.
#[derive(Clone, Debug)]
pub struct SlotRing {
    free: Vec<Slot>,
    count: usize,
}

impl SlotRing {
    /// A ring of `count` free slots.
    pub fn new(count: usize) -> Self {
        Self { free: (0..count).rev().map(Slot).collect(), count }
    }

    /// A free slot, or `None`: then the asker waits (back-pressure).
    pub fn take(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// This slot, if it is free.
    pub fn take_this(&mut self, slot: Slot) -> Option<Slot> {
        let at = self.free.iter().position(|free| *free == slot)?;
        Some(self.free.swap_remove(at))
    }

    /// Gives a slot back.
    ///
    /// # Panics
    /// If it was free already: two owners would share it.
    pub fn give(&mut self, slot: Slot) {
        assert!(slot.0 < self.count && !self.free.contains(&slot), "slot {} given back twice", slot.0);
        self.free.push(slot);
    }

    /// All slots, free or not.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Slots now lent.
    pub fn lent(&self) -> usize {
        self.count - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_lends_each_slot_once() {
        let mut ring = SlotRing::new(2);
        let (a, b) = (ring.take().unwrap(), ring.take().unwrap());
        assert!(a != b && ring.take().is_none() && ring.lent() == 2);
        ring.give(a);
        assert_eq!((ring.take_this(b), ring.take_this(a), ring.take_this(a)), (None, Some(a), None));
        ring.give(a);
        assert_eq!(ring.take(), Some(a));
        ring.give(b);
        assert!(std::panic::catch_unwind(move || ring.give(b)).is_err());
    }
}
