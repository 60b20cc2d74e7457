//! ShareSums in fp32 of the gradients of a step's shares, on one device. Where the device has no room for all of them, those of buckets whose
//! optimizer state is on the host lie there, too: each passes through a few places on the device, where the gradient of a share is added,
//! and goes back. The device adds in either case, in the order of shares, so that no bit depends on where the sums lie.

use super::bounce::Sides;
use super::groups::{Addition, KeptSums};
use crate::device::{Device, DeviceSlice, EventId, Kernels, Lease, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::planner::budget::{SUM_PLACES, host_sums};
use crate::planner::plan::Plan;
use std::ops::Range;

#[derive(Debug)]
pub(super) struct ShareSums {
    places: [SumPlace; SUM_PLACES],
    /// By bucket: its last share so far is added.
    added: Vec<EventId>,
    memory: SumMemory,
    addition: Addition,
    shares: usize,
    /// Buckets that have passed so far.
    passed: usize,
    /// Bytes that crossed the link since somebody asked: to the device, and to the host.
    crossed: [u64; 2],
}

/// One of the places on the device that sums pass through, by turns.
#[derive(Clone, Copy, Debug)]
struct SumPlace {
    /// The gradient is written.
    written: EventId,
    /// The sum has come.
    came: EventId,
    /// It has gone, or nobody needs it any more.
    left: EventId,
}

/// What a plan decides of it; it holds nothing between two steps.
#[derive(Debug)]
struct SumMemory {
    /// Sums of each element: those of a bucket lie behind each other.
    each: usize,
    /// Of the first elements in flat order.
    on_host: PinnedSlice,
    /// Of all others.
    on_device: DeviceSlice,
    passing: DeviceSlice,
    place_elems: usize,
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
        let [elems, passing] = host_sums(&plan.layout, plan.sums_on_host).map(|elems| elems * each);
        let place_elems = plan.layout.bucket_elems() * each;
        Ok(Self {
            each,
            on_host: lease.alloc_pinned((dev, host), "gradient sums", elems * 4, place_elems.min(elems) * 4)?,
            on_device: lease.alloc(dev, "gradient sums", plan.layout.flat_elems() * each - elems, Dtype::Float32)?,
            passing: lease.alloc(dev, "passing sums", passing, Dtype::Float32)?,
            place_elems,
            lease: Lease::default(),
        })
    }

    fn host_elems(&self) -> usize {
        self.on_host.bytes() / 4
    }

    /// Where the sums of `range`, a bucket, lie among all.
    fn place_of(&self, range: &Range<usize>) -> Range<usize> {
        range.start * self.each..range.end * self.each
    }
}

impl ShareSums {
    /// # Errors
    /// `Resource` when there is no memory for them.
    pub(super) fn new<D: Device>(plan: &Plan, (dev, host): Sides<'_, D>) -> Result<Self> {
        let mut place = || Ok(SumPlace { written: dev.event()?, came: dev.event()?, left: dev.event()? });
        let places = [place()?, place()?, place()?];
        let added = (0..plan.layout.count()).map(|_| dev.event()).collect::<Result<_>>()?;
        let (memory, addition) = (SumMemory::take(plan, (dev, host))?, Addition::of(plan));
        Ok(Self { places, added, memory, addition, shares: plan.shares, passed: 0, crossed: [0; 2] })
    }

    pub(super) fn give_back<D: Device>(&mut self, (dev, host): Sides<'_, D>) -> Result<()> {
        self.memory.lease.give_back(dev, host)
    }

    /// Takes what another `plan` of the same buckets says.
    pub(super) fn take<D: Device>(&mut self, plan: &Plan, sides: Sides<'_, D>) -> Result<()> {
        self.memory = SumMemory::take(plan, sides)?;
        Ok(())
    }

    /// Bytes that crossed the link since the last call: to the device, and to the host.
    pub(super) fn crossed(&mut self) -> [u64; 2] {
        std::mem::take(&mut self.crossed)
    }

    /// Adds `grads`, the gradient of `bucket` of a `share`, to the sum of `range`; with the last share the sum, rounded once, takes the gradient's
    /// place.
    pub(super) fn add<D: Kernels>(
        &mut self,
        dev: &mut D,
        grads: DeviceSlice,
        bucket: usize,
        range: &Range<usize>,
        share: usize,
    ) -> Result<()> {
        let (host_elems, place) = (self.memory.host_elems(), self.memory.place_of(range));
        if place.start < host_elems {
            return self.pass(dev, grads, bucket, &place, share);
        }
        self.sum(dev, Stream::Compute, grads, self.memory.on_device.slice(place.start - host_elems, place.len()), share)
    }

    fn sum<D: Kernels>(&self, dev: &mut D, stream: Stream, grads: DeviceSlice, sums: DeviceSlice, share: usize) -> Result<()> {
        self.addition.add(dev, stream, (share, &[grads]), KeptSums::of(sums, grads.elems()), grads)
    }

    /// What is computed from now on may overwrite the gradients of `bucket` and those before it.
    pub(super) fn wait_for<D: Device>(&self, dev: &mut D, bucket: usize) -> Result<()> {
        let passing = self.memory.host_elems().div_ceil(self.memory.place_elems);
        passing.checked_sub(1).map_or(Ok(()), |last| dev.wait(Stream::Compute, self.added[bucket.min(last)]))
    }

    /// A sum comes as soon as a place is free, which asks for no gradient: copies to the device are not held up by what is computed.
    fn pass<D: Kernels>(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize, place: &Range<usize>, share: usize) -> Result<()> {
        let SumMemory { on_host, passing, place_elems, .. } = self.memory;
        let at = self.passed % (passing.elems() / place_elems);
        let SumPlace { written, came, left } = self.places[at];
        let (there, here) = (on_host.slice(place.start * 4, place.len() * 4), passing.slice(at * place_elems, place.len()));
        self.passed += 1;
        if share > 0 {
            // There are no more places than buckets: who left this one last left after this sum, which is there then.
            dev.wait(Stream::H2d, left)?;
            dev.copy_h2d(Stream::H2d, there, here)?;
            dev.record(came, Stream::H2d)?;
            dev.wait(Stream::D2h, came)?;
            self.crossed[0] += there.bytes() as u64;
        }
        dev.record(written, Stream::Compute)?;
        dev.wait(Stream::D2h, written)?;
        self.sum(dev, Stream::D2h, grads, here, share)?;
        dev.record(self.added[bucket], Stream::D2h)?;
        if share + 1 == self.shares {
            dev.wait(Stream::Compute, self.added[bucket])?;
        } else {
            dev.copy_d2h(Stream::D2h, here, there)?;
            self.crossed[1] += there.bytes() as u64;
        }
        dev.record(left, Stream::D2h)
    }
}
