//! Prefetch buffer for streamed weights that arrive before the ring has room. It uses the memory of gradients, which is unused until the
//! first backward pass of a step.

use crate::device::DeviceSlice;

/// Memory lent to weights from the beginning of a step until its first backward pass.
#[derive(Debug)]
pub(in crate::engine) struct PrefetchBuffer {
    memory: DeviceSlice,
    is_open: bool,
    taken_elems: usize,
    /// By module, the location of its prefetched weights.
    waiting: Vec<Option<DeviceSlice>>,
}

impl PrefetchBuffer {
    /// An empty buffer in `memory` for `modules` modules. The memory is not yet lent.
    pub(in crate::engine) fn new(memory: DeviceSlice, modules: usize) -> Self {
        Self { memory, is_open: false, taken_elems: 0, waiting: vec![None; modules] }
    }

    /// Starts to use the memory.
    pub(in crate::engine) fn open(&mut self) {
        (self.is_open, self.taken_elems) = (true, 0);
    }

    /// Ends the use of the memory.
    ///
    /// # Panics
    /// If it still contains weights.
    pub(in crate::engine) fn close(&mut self) {
        assert!(self.waiting.iter().all(Option::is_none), "weights wait where gradients are about to be written");
        self.is_open = false;
    }

    /// Location for `elems` weights of `module`, if there is room.
    pub(in crate::engine) fn put(&mut self, module: usize, elems: usize) -> Option<DeviceSlice> {
        let fits = self.is_open && elems <= self.memory.elems() - self.taken_elems;
        let place = fits.then(|| self.memory.slice(self.taken_elems, elems))?;
        self.taken_elems += elems;
        self.waiting[module] = Some(place);
        Some(place)
    }

    /// Whether the buffer contains weights of `module`.
    pub(in crate::engine) fn has(&self, module: usize) -> bool {
        self.waiting[module].is_some()
    }

    /// Removes the weights of `module` and returns their location.
    pub(in crate::engine) fn take(&mut self, module: usize) -> Option<DeviceSlice> {
        self.waiting[module].take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    fn buffer() -> PrefetchBuffer {
        PrefetchBuffer::new(DeviceSlice::at(64, 10, Dtype::Bfloat16), 4)
    }

    #[test]
    fn weights_wait_side_by_side_while_there_is_room() {
        let mut buffer = buffer();
        assert_eq!(buffer.put(3, 4), None, "it is not lent yet");
        buffer.open();
        let [a, b] = [(3, 4), (2, 5)].map(|(module, elems)| buffer.put(module, elems).unwrap());
        assert_eq!((a.addr(), a.elems(), b.addr(), b.elems()), (64, 4, 72, 5));
        assert_eq!(buffer.put(1, 2), None, "one element is left");
        assert!(buffer.has(3) && buffer.has(2) && !buffer.has(1));
        assert_eq!((buffer.take(3), buffer.take(3), buffer.take(2)), (Some(a), None, Some(b)));
        assert_eq!(buffer.put(1, 4), None, "places are not lent twice in a step");
        buffer.close();
        buffer.open();
        assert_eq!(buffer.put(1, 10).map(DeviceSlice::elems), Some(10));
    }

    #[test]
    fn gradients_do_not_overwrite_weights_that_wait() {
        let mut buffer = buffer();
        buffer.open();
        buffer.put(0, 1).unwrap();
        assert!(std::panic::catch_unwind(move || buffer.close()).is_err());
    }
}
