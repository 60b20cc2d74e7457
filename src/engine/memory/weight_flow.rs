//! Weight-flow (paper 4.2), for models whose weights do not fit on the device. Layers' weights are stored in host memory, or sharded over
//! ranks, and are copied to the device module by module, into a ring. The ring normally holds at least two neighbouring modules, so that
//! one is copied while the other is computed.

use super::prefetch_buffer::PrefetchBuffer;
use crate::device::{Cast, Device, DeviceSlice, EventId, Kernels, Stream};
use crate::engine::ranks::exchange::WeightPort;
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::memory::RingShape;
use crate::model::tensors::TensorTable;
use std::ops::Range;

/// Content of the ring for one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RingContent {
    /// No usable weights.
    Nothing,
    /// Weights that have changed on the host since, or that are partly overwritten: no later work uses them.
    Stale,
    /// The module's weights, except this rank's own slice.
    Fetched,
    /// The module's weights.
    Fresh,
}

/// Tracks the modules with weights in the ring. Modules are numbered in backward order.
#[derive(Debug)]
struct WeightRing {
    ring: RingShape,
    /// By module, the streamed flat range and the content of the ring.
    modules: Vec<(Range<usize>, RingContent)>,
}

impl WeightRing {
    /// An empty ring.
    ///
    /// # Panics
    /// If a module is longer than the ring.
    fn new(table: &TensorTable, ring: RingShape) -> Self {
        let streamed = |range: Range<usize>| range.start.min(ring.ringed_elems)..range.end.min(ring.ringed_elems);
        let modules: Vec<_> = table.modules().map(|module| (streamed(table.module_range(module)), RingContent::Nothing)).collect();
        assert!(modules.iter().all(|(range, _)| range.len() <= ring.period_elems), "a ring shorter than a module");
        Self { ring, modules }
    }

    /// Whether the ring holds the module's weights, or nothing of the module is streamed.
    fn has(&self, module: usize) -> bool {
        let (range, held) = &self.modules[module];
        range.is_empty() || matches!(held, RingContent::Fetched | RingContent::Fresh)
    }

    /// The modules that occupy the location of `module`, including itself if it is there already.
    fn in_the_way(&self, module: usize) -> impl Iterator<Item = usize> + '_ {
        let place = &self.modules[module].0;
        let in_the_way =
            move |(range, held): &(Range<usize>, RingContent)| *held != RingContent::Nothing && self.share_a_place(place, range);
        self.modules.iter().enumerate().filter(move |(_, module)| in_the_way(module)).map(|(other, _)| other)
    }

    /// Whether `module` is present, or no usable weights occupy its location.
    fn has_capacity(&self, module: usize) -> bool {
        self.has(module) || self.in_the_way(module).all(|other| self.modules[other].1 == RingContent::Stale)
    }

    /// Marks `module` as present, and the modules that it overwrites as absent.
    fn put(&mut self, module: usize) {
        self.overwrite(module, RingContent::Nothing);
    }

    /// Like `put`, for a copy on the compute stream: later copies on another stream must still wait for the overwritten modules' last use.
    fn put_in_turn(&mut self, module: usize) {
        self.overwrite(module, RingContent::Stale);
    }

    fn overwrite(&mut self, module: usize, remains: RingContent) {
        for other in 0..self.modules.len() {
            if self.modules[other].1 != RingContent::Nothing && self.share_a_place(&self.modules[module].0, &self.modules[other].0) {
                self.modules[other].1 = remains;
            }
        }
        self.modules[module].1 = RingContent::Fetched;
    }

    /// Marks the modules in `flat` as stale, because the host is about to overwrite their weights.
    fn forget(&mut self, flat: &Range<usize>) {
        for (range, held) in &mut self.modules {
            if matches!(held, RingContent::Fetched | RingContent::Fresh) && range.start < flat.end && flat.start < range.end {
                *held = RingContent::Stale;
            }
        }
    }

    fn share_a_place(&self, a: &Range<usize>, b: &Range<usize>) -> bool {
        let period = self.ring.period_elems;
        // Distance around the ring from the start of `a` to the start of `b`.
        let behind = (b.start % period + period - a.start % period) % period;
        !a.is_empty() && !b.is_empty() && (behind < a.len() || behind + b.len() > period)
    }
}

/// Source of streamed weights.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum Source {
    /// Host memory with all streamed weights, in flat order from 0, in the device's format.
    Host(PinnedSlice),
    /// The slices of all ranks.
    Ranks,
}

/// The streamed weights, and the events that order their copies and kernels.
#[derive(Debug)]
pub(in crate::engine) struct WeightFlow {
    weight_ring: WeightRing,
    source: Source,
    /// The flat weights; the first part of their address range is the ring.
    weights: DeviceSlice,
    /// Prefetch buffer for weights without room in the ring.
    prefetch_buffer: PrefetchBuffer,
    /// Last use of the prefetch buffer's memory by the compute stream.
    prefetch_buffer_free: EventId,
    /// By module, the last use of its weights by the compute stream.
    used: Vec<EventId>,
    /// By module, the end of the last copy of its weights.
    fetched: Vec<EventId>,
}

impl WeightFlow {
    /// Streams the part of the flat `weights` that lies in `ring` from `source`. Prefetched weights use `spare`, memory of the same format
    /// that has another use from the first backward pass of a step on.
    pub(in crate::engine) fn new<D: Device>(
        dev: &mut D,
        table: &TensorTable,
        ring: RingShape,
        source: Source,
        (weights, spare): (DeviceSlice, DeviceSlice),
    ) -> Result<Self> {
        let weight_ring = WeightRing::new(table, ring);
        let mut events = || weight_ring.modules.iter().map(|_| dev.event()).collect::<Result<Vec<_>>>();
        let (used, fetched) = (events()?, events()?);
        let (prefetch_buffer, shelf_free) = (PrefetchBuffer::new(spare, weight_ring.modules.len()), dev.event()?);
        Ok(Self { weight_ring, source, weights, prefetch_buffer, prefetch_buffer_free: shelf_free, used, fetched })
    }

    /// Opens the prefetch buffer at the beginning of a step. All earlier uses of its memory are enqueued, except copies to the host.
    pub(in crate::engine) fn open_prefetch_buffer<D: Device>(&mut self, dev: &mut D) -> Result<()> {
        self.prefetch_buffer.open();
        dev.record(self.prefetch_buffer_free, Stream::Compute)
    }

    /// Closes the prefetch buffer after the first forward pass of a step is enqueued.
    ///
    /// # Panics
    /// If it still contains weights: the pass did not use them.
    pub(in crate::engine) fn close_prefetch_buffer(&mut self) {
        self.prefetch_buffer.close();
    }

    /// Whether the weights of `module` are on the device, in the ring or in the prefetch buffer.
    pub(in crate::engine) fn has(&self, module: usize) -> bool {
        self.weight_ring.has(module) || self.awaits_place(module)
    }

    /// Whether the weights of `module` are in the prefetch buffer. They are copied into the ring before they are used.
    pub(in crate::engine) fn awaits_place(&self, module: usize) -> bool {
        self.prefetch_buffer.has(module)
    }

    /// Enqueues the copy of the weights of `module` to the prefetch buffer. No copy from this memory to the host may be pending. Returns
    /// the bytes that cross the host's link, or `None` if there is no room.
    pub(in crate::engine) fn prefetch<D: Device>(&mut self, dev: &mut D, module: usize) -> Result<Option<u64>> {
        let (Source::Host(host), range) = (self.source, self.streamed(module)) else { return Ok(None) };
        let Some(place) = self.prefetch_buffer.put(module, range.len()) else { return Ok(None) };
        let bytes = range.len() * self.weights.dtype().bytes();
        dev.wait(Stream::H2d, self.prefetch_buffer_free)?;
        dev.copy_h2d(Stream::H2d, host.slice(range.start * self.weights.dtype().bytes(), bytes), place)?;
        dev.record(self.fetched[module], Stream::H2d)?;
        Ok(Some(bytes as u64))
    }

    /// The streamed flat range of `module`; empty if nothing of it is streamed, or if there is no such module.
    pub(in crate::engine) fn streamed(&self, module: usize) -> Range<usize> {
        self.weight_ring.modules.get(module).map_or(0..0, |(range, _)| range.clone())
    }

    /// Whether `module` has to be fetched. If so, later copies of its weights wait for the last use of the modules that they overwrite.
    pub(in crate::engine) fn make_way<D: Device>(&self, dev: &mut D, module: usize) -> Result<bool> {
        if self.streamed(module).is_empty() || self.has(module) {
            return Ok(false);
        }
        self.weight_ring.in_the_way(module).try_for_each(|other| dev.wait(self.stream(), self.used[other]))?;
        Ok(true)
    }

    /// Whether a copy of `module` overwrites the weights of a module that is `needed`.
    pub(in crate::engine) fn overwrites(&self, module: usize, needed: impl Fn(usize) -> bool) -> bool {
        self.weight_ring.in_the_way(module).any(needed)
    }

    /// Whether `module` is present or can be fetched without overwriting usable weights.
    pub(in crate::engine) fn has_capacity(&self, module: usize) -> bool {
        self.weight_ring.has_capacity(module)
    }

    fn stream(&self) -> Stream {
        if let Source::Host(_) = self.source { Stream::H2d } else { Stream::Gather }
    }

    /// Enqueues the copy of the weights of `module` into the ring, after [`WeightFlow::make_way`]; returns the bytes that cross the host's
    /// link.
    pub(in crate::engine) fn fetch<D: Kernels>(&mut self, dev: &mut D, exchange: &mut dyn WeightPort<D>, module: usize) -> Result<u64> {
        let range = self.streamed(module);
        let bytes = match self.source {
            Source::Host(host) => {
                let bytes = range.len() * self.weights.dtype().bytes();
                let source = host.slice(range.start * self.weights.dtype().bytes(), bytes);
                dev.copy_h2d(Stream::H2d, source, self.weights.slice(range.start, range.len()))?;
                bytes as u64
            }
            Source::Ranks => exchange.fetch(dev, self.weights, range).map(|()| 0)?,
        };
        dev.record(self.fetched[module], self.stream())?;
        self.weight_ring.put(module);
        Ok(bytes)
    }

    /// Makes later work on the compute stream wait for the weights of `module`, which was fetched or prefetched.
    pub(in crate::engine) fn arrive<D: Kernels>(&mut self, dev: &mut D, exchange: &dyn WeightPort<D>, module: usize) -> Result<()> {
        if let Some(src) = self.prefetch_buffer.take(module) {
            // The compute stream no longer uses the weights that this overwrites: a pass goes from neighbour to neighbour.
            dev.wait(Stream::Compute, self.fetched[module])?;
            let range = self.streamed(module);
            dev.launch(Cast { stream: Stream::Compute, src, dst: self.weights.slice(range.start, range.len()) })?;
            self.weight_ring.put_in_turn(module);
        }
        let (range, held) = &mut self.weight_ring.modules[module];
        if *held == RingContent::Fetched {
            exchange.place_own(dev, self.weights, range)?;
            *held = RingContent::Fresh;
        }
        dev.wait(Stream::Compute, self.fetched[module])
    }

    /// Records the last use of the weights of `module` so far.
    pub(in crate::engine) fn leave<D: Device>(&self, dev: &mut D, module: usize) -> Result<()> {
        dev.record(self.used[module], Stream::Compute)
    }

    /// Marks weights as stale that are about to be overwritten in the source; this step no longer needs them.
    pub(in crate::engine) fn forget(&mut self, flat: &Range<usize>) {
        self.weight_ring.forget(flat);
    }

    /// Marks all weights as stale, because all are about to change.
    pub(in crate::engine) fn forget_all(&mut self) {
        self.weight_ring.forget(&(0..usize::MAX));
    }

    /// The part of a slice that the host sends to its own location on the device, because it is not streamed.
    pub(in crate::engine) fn beside(&self, flat: &Range<usize>) -> Range<usize> {
        if let Source::Ranks = self.source {
            return flat.clone();
        }
        flat.start.max(self.weight_ring.ring.ringed_elems).min(flat.end)..flat.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::ModelShape;
    use crate::model::tensors::Module;
    use proptest::prelude::*;

    /// Consecutive modules of these lengths, all streamed.
    fn weight_ring(lens: &[usize], period_elems: usize) -> WeightRing {
        let mut end = 0;
        let mut next = |len: &usize| {
            end += len;
            (end - len..end, RingContent::Nothing)
        };
        let modules: Vec<_> = lens.iter().map(&mut next).collect();
        WeightRing { ring: RingShape { ringed_elems: end, period_elems }, modules }
    }

    fn in_the_way(weight_ring: &WeightRing, module: usize) -> Vec<usize> {
        weight_ring.in_the_way(module).collect()
    }

    #[test]
    fn a_ring_of_two_modules_holds_two_neighbours() {
        let mut w = weight_ring(&[4, 4, 4, 4], 8);
        (0..2).for_each(|module| w.put(module));
        assert!(w.has(0) && w.has(1) && in_the_way(&w, 2) == [0]);
        w.put(2);
        assert!(!w.has(0) && w.has(1) && w.has(2) && in_the_way(&w, 3) == [1] && in_the_way(&w, 0) == [2]);
    }

    #[test]
    fn weights_that_the_host_rewrites_are_stale_and_still_occupy_the_ring() {
        let mut w = weight_ring(&[4, 4, 4], 8);
        (0..2).for_each(|module| w.put(module));
        w.forget(&(2..4));
        assert!(!w.has(0) && w.has(1) && in_the_way(&w, 0) == [0] && in_the_way(&w, 2) == [0]);
        assert!(w.has_capacity(1) && w.has_capacity(2), "what is stale makes room");
        w.forget(&(3..5));
        assert!(!w.has(1));
        w.put(0);
        assert!(w.has(0) && !w.has(1));
        assert!(w.has_capacity(0) && w.has_capacity(1) && !w.has_capacity(2), "the third lies where the first does");
    }

    #[test]
    fn copies_wait_for_overwrites_on_the_compute_stream() {
        let mut w = weight_ring(&[1, 4, 4, 4], 9);
        [3, 2].into_iter().for_each(|module| w.put(module));
        w.put_in_turn(1);
        assert!(w.has(1) && w.has(2) && !w.has(3));
        assert_eq!(in_the_way(&w, 0), [3], "its first element, which the next one did not overwrite");
        w.put(0);
        assert!(w.has(0) && w.has(1) && in_the_way(&w, 3) == [0, 1]);
    }

    #[test]
    fn only_weights_in_the_ring_stream() {
        let table = TensorTable::new(&ModelShape::demo());
        let (layer, embed) = (table.module_range(Module::Layer(0)), table.module_range(Module::Embed));
        let ring = RingShape { ringed_elems: embed.start - 100, period_elems: 2 * layer.len() };
        let w = WeightRing::new(&table, ring);
        let streamed = |module| w.modules[table.module_index(module)].0.clone();
        assert_eq!(streamed(Module::Layer(0)), layer.start..layer.end - 100);
        assert!(streamed(Module::Embed).is_empty() && w.has(table.module_index(Module::Embed)));
        let short = RingShape { period_elems: layer.len() - 1, ..ring };
        assert!(std::panic::catch_unwind(|| WeightRing::new(&table, short)).is_err());
    }

    proptest! {
        /// Compares with a ring that records the owner of every element.
        #[test]
        fn the_ring_tracks_the_content_of_every_element(
            lens in prop::collection::vec(1usize..12, 1..9), slack in 0usize..12, walk in prop::collection::vec(0usize..9, 0..40),
        ) {
            let period = lens.iter().max().unwrap() + slack;
            let mut w = weight_ring(&lens, period);
            let mut elements = vec![None; period];
            for module in walk.into_iter().map(|at| at % lens.len()) {
                let places: Vec<_> = w.modules[module].0.clone().map(|element| element % period).collect();
                let mut owners: Vec<usize> = places.iter().filter_map(|&place| elements[place]).collect();
                owners.retain(|&owner| w.modules[owner].1 != RingContent::Nothing);
                owners.sort_unstable();
                owners.dedup();
                prop_assert_eq!(in_the_way(&w, module), owners);
                places.iter().for_each(|&place| elements[place] = Some(module));
                w.put(module);
                for (other, (range, _)) in w.modules.iter().enumerate() {
                    prop_assert_eq!(w.has(other), range.clone().all(|element| elements[element % period] == Some(other)));
                }
            }
        }
    }
}
