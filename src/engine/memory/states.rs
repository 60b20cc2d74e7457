//! Optimizer state of one rank in its local order: the tier of each bucket, and moves between tiers. The host holds the first buckets, the
//! device the last.

use super::bounce_buffer::BounceBuffer;
use crate::bucket::layout::Tier;
use crate::bucket::slices::Slices;
use crate::device::{Device, DeviceSlice, Sides};
use crate::engine::step_job::HostState;
use crate::error::Result;
use crate::host::pinned::HostMemory;
use crate::optim::StatePart;
use crate::optim::moments::{Moments, Rounding};
use std::ops::Range;

/// State of a bucket that the device steps.
#[derive(Clone, Debug)]
pub(in crate::engine) struct DeviceState {
    /// Local range of the state.
    pub(in crate::engine) local: Range<usize>,
    pub(in crate::engine) params: DeviceSlice,
    pub(in crate::engine) m: DeviceSlice,
    pub(in crate::engine) v: DeviceSlice,
}

impl DeviceState {
    fn new<D: Device>(dev: &mut D, moments: Moments, tier: Tier, local: Range<usize>) -> Result<Self> {
        let mut array = |part, resident: &str, paged: &str| match tier {
            Tier::Unified => dev.alloc_unified(paged, local.len(), moments.dtype(part)),
            Tier::Host | Tier::Device => dev.alloc(resident, local.len(), moments.dtype(part)),
        };
        let params = array(StatePart::Params, "resident parameters", "paged parameters")?;
        let (m, v) = (array(StatePart::M, "resident m", "paged m")?, array(StatePart::V, "resident v", "paged v")?);
        Ok(Self { params, m, v, local })
    }

    /// The part within a local range, if any.
    fn part(&self, local: &Range<usize>) -> Option<Self> {
        let common = local.start.max(self.local.start)..local.end.min(self.local.end);
        let part = |s: DeviceSlice| s.slice(common.start - self.local.start, common.len());
        let [params, m, v] = self.arrays();
        (!common.is_empty()).then(|| Self { params: part(params), m: part(m), v: part(v), local: common.clone() })
    }

    pub(in crate::engine) fn arrays(&self) -> [DeviceSlice; 3] {
        [self.params, self.m, self.v]
    }
}

/// The state of all buckets.
#[derive(Debug)]
pub(in crate::engine) struct StateTiers {
    moments: Moments,
    /// Pieces of whole buckets in order, from the first bucket on. There are several after buckets were moved from the device.
    host: Vec<HostState>,
    /// By bucket, after the buckets of the host.
    pub(in crate::engine) device: Vec<DeviceState>,
}

impl StateTiers {
    pub(in crate::engine) fn new<D: Device>(moments: Moments, slices: &Slices, (dev, host): Sides<'_, D>) -> Result<Self> {
        let (layout, on_host) = (slices.layout(), slices.elems_in(Tier::Host));
        let state = |bucket| DeviceState::new(dev, moments, layout.tier(bucket), slices.local(bucket));
        let device = (layout.offloaded()..layout.count()).map(state).collect::<Result<_>>()?;
        let host = if on_host.is_empty() { Vec::new() } else { vec![host_state(host, moments, on_host, slices)?] };
        Ok(Self { moments, host, device })
    }

    /// Number of elements on the host.
    pub(in crate::engine) fn host_elems(&self) -> usize {
        self.host.last().map_or(0, HostState::end)
    }

    /// The host's state of a local range of one bucket.
    ///
    /// # Panics
    /// If it is not on the host.
    pub(in crate::engine) fn on_host(&self, local: &Range<usize>) -> HostState {
        let piece = self.host.iter().find(|state| state.first <= local.start && local.end <= state.end());
        // The range may be empty: a short bucket has fewer blocks than there are ranks.
        piece.expect("a bucket that the pool steps").slice(local)
    }

    /// The device's state of a local range of one bucket.
    ///
    /// # Panics
    /// If it is not on the device.
    pub(in crate::engine) fn on_device(&self, local: &Range<usize>) -> DeviceState {
        let before = self.device.partition_point(|state| state.local.end <= local.start);
        self.device.get(before).and_then(|state| state.part(local)).expect("a bucket that the device steps")
    }

    /// The parts of a local range that are on the host.
    pub(in crate::engine) fn host_parts(&self, local: &Range<usize>) -> impl Iterator<Item = HostState> {
        self.host.iter().filter_map(|state| state.part(local))
    }

    /// Writes values from local element `start` on, rounded by `rounding`. No job may be running.
    pub(in crate::engine) fn write<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
        part: StatePart,
        start: usize,
        source: &[f32],
        rounding: Rounding,
    ) -> Result<()> {
        let local = start..start + source.len();
        let store = |from: usize, to: &mut [u8]| {
            let values = &source[from..][..to.len() / self.moments.dtype(part).bytes()];
            self.moments.store(part, values, rounding.behind(from), to);
        };
        for state in self.host_parts(&local) {
            store(state.first - start, host.lend_mut(state.arrays()[part as usize]));
        }
        for state in self.device.iter().filter_map(|state| state.part(&local)) {
            let from = state.local.start - start;
            bounce_buffer.fill((dev, host), state.arrays()[part as usize], |elems, to| store(from + elems.start, to))?;
        }
        Ok(())
    }

    /// Reads state from local element `start` on. No job may be running.
    pub(in crate::engine) fn read<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
        part: StatePart,
        start: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let local = start..start + out.len();
        for state in self.host_parts(&local) {
            let memory = state.arrays()[part as usize];
            self.moments.load(part, &mut out[state.first - start..state.end() - start], |bytes| {
                bytes.copy_from_slice(host.lend(memory));
                Ok(())
            })?;
        }
        for state in self.device.iter().filter_map(|state| state.part(&local)) {
            let memory = state.arrays()[part as usize];
            let out = &mut out[state.local.start - start..][..memory.elems()];
            self.moments.load(part, out, |bytes| bounce_buffer.download((dev, host), memory, bytes))?;
        }
        Ok(())
    }

    /// Moves buckets from the device to the host if `slices` has them there. No job may be running.
    ///
    /// # Errors
    /// `Resource` when host memory is not available; errors of the device. No bucket is moved then.
    pub(in crate::engine) fn bring_to_host<D: Device>(
        &mut self,
        slices: &Slices,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
    ) -> Result<()> {
        let coming = self.host_elems()..slices.elems_in(Tier::Host).end;
        if coming.is_empty() {
            return Ok(());
        }
        let piece = host_state(host, self.moments, coming.clone(), slices)?;
        let count = self.device.partition_point(|state| state.local.end <= coming.end);
        // A rank may own nothing of a short bucket.
        for state in self.device[..count].iter().filter(|state| !state.local.is_empty()) {
            let targets = piece.part(&state.local).expect("a part of the incoming data").arrays();
            for (source, target) in state.arrays().into_iter().zip(targets) {
                bounce_buffer.to_host((dev, host), source, target)?;
            }
        }
        self.host.push(piece);
        self.device.drain(..count).flat_map(|state| state.arrays()).try_for_each(|memory| dev.free(memory))
    }

    /// Moves buckets from the host to the device if `slices` has them there. No job may be running.
    ///
    /// # Errors
    /// `Resource` when device memory is not available; errors of the device. No bucket is moved then.
    pub(in crate::engine) fn send_to_device<D: Device>(
        &mut self,
        slices: &Slices,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
    ) -> Result<()> {
        let kept = slices.elems_in(Tier::Host).end;
        let going = (0..slices.layout().count()).map(|bucket| slices.local(bucket));
        let going = going.filter(|local| (kept..self.host_elems()).contains(&local.start));
        let mut sent = Vec::new();
        let taken = going.into_iter().try_for_each(|local| {
            sent.push(DeviceState::new(dev, self.moments, Tier::Device, local)?);
            Ok(())
        });
        let copied = taken.and_then(|()| {
            let arrays = |state: &DeviceState| self.on_host(&state.local).arrays().into_iter().zip(state.arrays()).collect::<Vec<_>>();
            let mut copies = sent.iter().flat_map(arrays);
            copies.try_for_each(|(source, target)| bounce_buffer.to_device((dev, host), source, target))
        });
        if let Err(error) = copied {
            sent.iter().flat_map(DeviceState::arrays).try_for_each(|memory| dev.free(memory))?;
            return Err(error);
        }
        self.device.splice(..0, sent);
        self.keep_on_host(kept, host);
        Ok(())
    }

    /// Frees the host's state after its first `kept` elements.
    fn keep_on_host(&mut self, kept: usize, host: &mut HostMemory) {
        for state in self.host.iter_mut().filter(|state| state.end() > kept) {
            let left = state.slice(&(state.first..kept.max(state.first)));
            state.arrays().iter().zip(left.arrays()).for_each(|(memory, left)| host.give_back(memory.addr(), left.bytes()));
            *state = left;
        }
        self.host.retain(|state| state.end() > state.first);
    }
}

/// Allocates host memory for the state of the local range `local`, which consists of whole buckets.
fn host_state(host: &mut HostMemory, moments: Moments, local: Range<usize>, slices: &Slices) -> Result<HostState> {
    let period_elems = slices.slice_elems().min(local.len());
    let mut taken = Vec::new();
    let all = ["parameters", "m", "v"].into_iter().zip(StatePart::ALL).try_for_each(|(name, part)| {
        let width = moments.dtype(part).bytes();
        taken.push(host.alloc_periodic(name, local.len() * width, period_elems * width)?);
        Ok(())
    });
    match taken[..] {
        [params, m, v] => Ok(HostState { first: local.start, moments, params, m, v }),
        _ => {
            taken.iter().for_each(|memory| host.give_back(memory.addr(), 0));
            all.map(|()| unreachable!("three arrays"))
        }
    }
}
