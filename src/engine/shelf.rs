//! Streamed weights that come before the ring has room for them: until the first backward pass of a step nothing uses the memory of gradients,
//! and there they wait.

use crate::device::DeviceSlice;

/// Memory that is lent to weights, from the beginning of a step until its first backward pass.
#[derive(Debug)]
pub(super) struct Shelf {
    memory: DeviceSlice,
    is_open: bool,
    taken_elems: usize,
    /// Of each module what waits here.
    waiting: Vec<Option<DeviceSlice>>,
}

impl Shelf {
    /// Nothing waits in `memory`, which is not lent yet, of so many modules.
    pub(super) fn new(memory: DeviceSlice, modules: usize) -> Self {
        Self { memory, is_open: false, taken_elems: 0, waiting: vec![None; modules] }
    }

    /// The memory is lent.
    pub(super) fn open(&mut self) {
        (self.is_open, self.taken_elems) = (true, 0);
    }

    /// It is needed again.
    ///
    /// # Panics
    /// If weights wait there.
    pub(super) fn close(&mut self) {
        assert!(self.waiting.iter().all(Option::is_none), "weights wait where gradients are about to be written");
        self.is_open = false;
    }

    /// A place for so many weights of `module`, if there is one.
    pub(super) fn put(&mut self, module: usize, elems: usize) -> Option<DeviceSlice> {
        let fits = self.is_open && elems <= self.memory.elems() - self.taken_elems;
        let place = fits.then(|| self.memory.slice(self.taken_elems, elems))?;
        self.taken_elems += elems;
        self.waiting[module] = Some(place);
        Some(place)
    }

    /// Whether weights of `module` wait here.
    pub(super) fn has(&self, module: usize) -> bool {
        self.waiting[module].is_some()
    }

    /// Where they do; then they wait no longer.
    pub(super) fn take(&mut self, module: usize) -> Option<DeviceSlice> {
        self.waiting[module].take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    fn shelf() -> Shelf {
        Shelf::new(DeviceSlice::at(64, 10, Dtype::Bfloat16), 4)
    }

    #[test]
    fn weights_wait_side_by_side_while_there_is_room() {
        let mut shelf = shelf();
        assert_eq!(shelf.put(3, 4), None, "it is not lent yet");
        shelf.open();
        let [a, b] = [(3, 4), (2, 5)].map(|(module, elems)| shelf.put(module, elems).unwrap());
        assert_eq!((a.addr(), a.elems(), b.addr(), b.elems()), (64, 4, 72, 5));
        assert_eq!(shelf.put(1, 2), None, "one element is left");
        assert!(shelf.has(3) && shelf.has(2) && !shelf.has(1));
        assert_eq!((shelf.take(3), shelf.take(3), shelf.take(2)), (Some(a), None, Some(b)));
        assert_eq!(shelf.put(1, 4), None, "places are not lent twice in a step");
        shelf.close();
        shelf.open();
        assert_eq!(shelf.put(1, 10).map(DeviceSlice::elems), Some(10));
    }

    #[test]
    fn gradients_do_not_overwrite_weights_that_wait() {
        let mut shelf = shelf();
        shelf.open();
        shelf.put(0, 1).unwrap();
        assert!(std::panic::catch_unwind(move || shelf.close()).is_err());
    }
}
