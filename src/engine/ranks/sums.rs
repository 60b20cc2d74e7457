//! fp32 sums of the gradients of a step's partial sums, on one device. If the device has no room for all of them, the sums of buckets with
//! optimizer state on the host are stored on the host. Each passes through one of a few staging buffers on the device, where the gradient
//! of a partial sum is added, and is copied back. The device adds in both cases, in the order of partial sums, so that the bits do not
//! depend on where the sums are stored.

use super::gradient_groups::{KeptSums, PartialSumChain};
use crate::device::{Device, DeviceSlice, EventId, Kernels, Lease, Sides, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::planner::budget::{SUM_PLACES, host_sums};
use crate::planner::plan::Plan;
use std::ops::Range;

#[derive(Debug)]
pub(in crate::engine) struct PartialSums {
    places: [SumPlace; SUM_PLACES],
    /// By bucket: the addition of its last partial sum.
    added: Vec<EventId>,
    memory: SumMemory,
    addition: PartialSumChain,
    partial_sums: usize,
    /// Number of sums that have passed through the device so far.
    passed: usize,
    /// Bytes that crossed the link since the last read: to the device, and to the host.
    crossed: [u64; 2],
}

/// Events of one of the staging buffers on the device, which sums use in turn.
#[derive(Clone, Copy, Debug)]
struct SumPlace {
    /// The gradient is written.
    written: EventId,
    /// The sum has arrived on the device.
    came: EventId,
    /// The sum has been copied back, or is no longer needed.
    left: EventId,
}

/// Memory that depends on the plan; it holds nothing between two steps.
#[derive(Debug)]
struct SumMemory {
    /// Sums of each element. The sums of a bucket are consecutive.
    each: usize,
    /// Sums of the first elements in flat order.
    on_host: PinnedSlice,
    /// Sums of all other elements.
    on_device: DeviceSlice,
    passing: DeviceSlice,
    place_elems: usize,
    /// Buckets with their sums on the host.
    on_host_buckets: usize,
    lease: Lease,
}

impl SumMemory {
    fn take<D: Device>(plan: &Plan, (dev, host): Sides<'_, D>) -> Result<Self> {
        let mut lease = Lease::default();
        match Self::fill(plan, (dev, host), &mut lease) {
            Ok(memory) => Ok(Self { lease, ..memory }),
            Err(error) => lease.give_back(dev, host).and(Err(error)),
        }
    }

    fn fill<D: Device>(plan: &Plan, (dev, host): Sides<'_, D>, lease: &mut Lease) -> Result<Self> {
        let each = plan.kept_sums();
        let [elems, passing] = host_sums(&plan.placement.layout, plan.placement.rings.sums_on_host).map(|elems| elems * each);
        let place_elems = plan.placement.layout.bucket_elems() * each;
        Ok(Self {
            each,
            on_host: lease.alloc_pinned((dev, host), "gradient sums", elems * 4, place_elems.min(elems) * 4)?,
            on_device: lease.alloc_flat(
                dev,
                "gradient sums",
                plan.placement.layout.flat_elems() * each - elems,
                Dtype::Float32,
                plan.placement.rings.sums,
            )?,
            passing: lease.alloc(dev, "passing sums", passing, Dtype::Float32)?,
            place_elems,
            on_host_buckets: if plan.placement.rings.sums_on_host { plan.placement.layout.offloaded() } else { 0 },
            lease: Lease::default(),
        })
    }

    fn host_elems(&self) -> usize {
        self.on_host.bytes() / 4
    }

    /// Location of the sums of the bucket `range` among all sums.
    fn place_of(&self, range: &Range<usize>) -> Range<usize> {
        range.start * self.each..range.end * self.each
    }
}

impl PartialSums {
    /// # Errors
    /// `Resource` when memory for sums is not available.
    pub(in crate::engine) fn new<D: Device>(plan: &Plan, (dev, host): Sides<'_, D>) -> Result<Self> {
        let mut place = || Ok(SumPlace { written: dev.event()?, came: dev.event()?, left: dev.event()? });
        let places = [place()?, place()?, place()?];
        let added = (0..plan.placement.layout.count()).map(|_| dev.event()).collect::<Result<_>>()?;
        let (memory, addition) = (SumMemory::take(plan, (dev, host))?, PartialSumChain::of(plan));
        Ok(Self { places, added, memory, addition, partial_sums: plan.recipe.step.shares, passed: 0, crossed: [0; 2] })
    }

    pub(in crate::engine) fn give_back<D: Device>(&mut self, (dev, host): Sides<'_, D>) -> Result<()> {
        self.memory.lease.give_back(dev, host)
    }

    /// Allocates the memory of another `plan` with the same buckets.
    pub(in crate::engine) fn take<D: Device>(&mut self, plan: &Plan, sides: Sides<'_, D>) -> Result<()> {
        self.memory = SumMemory::take(plan, sides)?;
        Ok(())
    }

    /// Bytes that crossed the link since the last call: to the device, and to the host.
    pub(in crate::engine) fn crossed(&mut self) -> [u64; 2] {
        std::mem::take(&mut self.crossed)
    }

    /// Adds `grads`, the gradient of `bucket` (`range`) of a `partial_sum`, to its sum. After the last share the sum, rounded once,
    /// replaces the gradient.
    pub(in crate::engine) fn add<D: Kernels>(
        &mut self,
        dev: &mut D,
        grads: DeviceSlice,
        bucket: usize,
        range: &Range<usize>,
        partial_sum: usize,
    ) -> Result<()> {
        let place = self.memory.place_of(range);
        if place.start < self.memory.host_elems() {
            return self.pass(dev, grads, bucket, &place, partial_sum);
        }
        self.add_range(dev, grads, range, partial_sum)
    }

    /// Like [`Self::add`], for a `range` whose sums are on the device. A range is the same for all partial sums.
    pub(in crate::engine) fn add_range<D: Kernels>(
        &self,
        dev: &mut D,
        grads: DeviceSlice,
        range: &Range<usize>,
        partial_sum: usize,
    ) -> Result<()> {
        let place = self.memory.place_of(range);
        let sums = self.memory.on_device.slice(place.start - self.memory.host_elems(), place.len());
        self.sum(dev, Stream::Compute, grads, sums, partial_sum)
    }

    fn sum<D: Kernels>(&self, dev: &mut D, stream: Stream, grads: DeviceSlice, sums: DeviceSlice, partial_sum: usize) -> Result<()> {
        self.addition.add(dev, stream, (partial_sum, &[grads]), KeptSums::of(sums, grads.elems()), grads)
    }

    /// Makes later work on the compute stream wait until the gradients of `bucket` and the buckets before it may be overwritten.
    pub(in crate::engine) fn wait_for<D: Device>(&self, dev: &mut D, bucket: usize) -> Result<()> {
        self.memory.on_host_buckets.checked_sub(1).map_or(Ok(()), |last| dev.wait(Stream::Compute, self.added[bucket.min(last)]))
    }

    /// Adds a gradient to a sum on the host. The copy to the device waits only for a free buffer, not for the gradient, so computation does
    /// not delay it.
    fn pass<D: Kernels>(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize, place: &Range<usize>, partial_sum: usize) -> Result<()> {
        let SumMemory { on_host, passing, place_elems, .. } = self.memory;
        let at = self.passed % (passing.elems() / place_elems);
        let SumPlace { written, came, left } = self.places[at];
        let (stored, staged) = (on_host.slice(place.start * 4, place.len() * 4), passing.slice(at * place_elems, place.len()));
        self.passed += 1;
        if partial_sum > 0 {
            // There are no more buffers than buckets, so the last user of this buffer left it after this sum's previous pass. The sum is on
            // the host then.
            dev.wait(Stream::H2d, left)?;
            dev.copy_h2d(Stream::H2d, stored, staged)?;
            dev.record(came, Stream::H2d)?;
            dev.wait(Stream::D2h, came)?;
            self.crossed[0] += stored.bytes() as u64;
        }
        dev.record(written, Stream::Compute)?;
        dev.wait(Stream::D2h, written)?;
        self.sum(dev, Stream::D2h, grads, staged, partial_sum)?;
        dev.record(self.added[bucket], Stream::D2h)?;
        if partial_sum + 1 == self.partial_sums {
            dev.wait(Stream::Compute, self.added[bucket])?;
        } else {
            dev.copy_d2h(Stream::D2h, staged, stored)?;
            self.crossed[1] += stored.bytes() as u64;
        }
        dev.record(left, Stream::D2h)
    }
}
