//! Optimizer state of one rank in its local order: the tier of each bucket, and moves between tiers. The host holds the first buckets, the
//! device the last.

use super::bounce_buffer::BounceBuffer;
use super::device_state::DeviceState;
use crate::bucket::layout::Tier;
use crate::bucket::slices::Slices;
use crate::device::{Cast, Device, DeviceSlice, Launch, Sides};
use crate::engine::step_job::HostState;
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::optim::PIECE_ELEMS;
use crate::optim::moments::Rounding;
use crate::optim::optimizer::Optimizer;
use crate::optim::split::Masters;
use crate::optim::state_array::{PerArray, StateArrays, StatePart};
use half::bf16;
use std::ops::Range;

/// The state of all buckets.
#[derive(Debug)]
pub(in crate::engine) struct StateTiers {
    optimizer: Optimizer,
    /// Storage of the masters of buckets on the device.
    masters: Masters,
    /// The arrays of the host.
    arrays: StateArrays,
    /// Pieces of whole buckets in order, from the first bucket on. There are several after buckets were moved from the device.
    host: Vec<HostState>,
    /// By bucket, after the buckets of the host.
    pub(in crate::engine) device: Vec<DeviceState>,
}

impl StateTiers {
    /// Zeroed memory for the states of all buckets. `split_weights` are the upper halves of the host's masters, if these are split.
    ///
    /// # Errors
    /// `Resource` when memory is not available.
    pub(in crate::engine) fn new<D: Device>(
        (optimizer, masters): (Optimizer, Masters),
        slices: &Slices,
        split_weights: Option<PinnedSlice>,
        (dev, host): Sides<'_, D>,
    ) -> Result<Self> {
        let (layout, arrays, on_host) = (slices.layout(), optimizer.arrays(), slices.elems_in(Tier::Host));
        let stored = split_weights.map_or(arrays, |_| optimizer.device_arrays(Masters::Split));
        let state = |bucket| DeviceState::new(dev, (optimizer, masters), layout.tier(bucket), slices.local(bucket));
        let device = (layout.offloaded()..layout.count()).map(state).collect::<Result<_>>()?;
        let upper = split_weights.map(|weights| weights.slice(0, on_host.len() * size_of::<bf16>()));
        let host = if on_host.is_empty() { Vec::new() } else { vec![HostState { upper, ..host_state(host, stored, on_host, slices)? }] };
        Ok(Self { optimizer, masters, arrays, host, device })
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
        let array = &self.arrays[part];
        for state in self.host_parts(&local) {
            let from = state.first - start;
            state.write(host, (part, array), &source[from..state.end() - start], rounding.behind(from));
        }
        for state in self.device.iter().filter_map(|state| state.part(&local)) {
            let from = state.local.start - start;
            let values = &source[from..][..state.local.len()];
            state.write((dev, host), bounce_buffer, part, values, rounding.behind(from))?;
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
        let (local, array) = (start..start + out.len(), &self.arrays[part]);
        for state in self.host_parts(&local) {
            state.read(host, (part, array), &mut out[state.first - start..state.end() - start])?;
        }
        for state in self.device.iter().filter_map(|state| state.part(&local)) {
            let out = &mut out[state.local.start - start..][..state.local.len()];
            state.read((dev, host), bounce_buffer, part, out)?;
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
        let piece = host_state(host, self.arrays, coming.clone(), slices)?;
        let count = self.device.partition_point(|state| state.local.end <= coming.end);
        // A rank may own nothing of a short bucket.
        for state in self.device[..count].iter().filter(|state| !state.local.is_empty()) {
            self.copy_to_host(state, &piece, (dev, host), bounce_buffer)?;
        }
        self.host.push(piece);
        self.device.drain(..count).try_for_each(|state| state.free(dev))
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
            sent.push(DeviceState::new(dev, (self.optimizer, self.masters), Tier::Device, local)?);
            Ok(())
        });
        let copied = taken.and_then(|()| sent.iter().try_for_each(|state| self.copy_to_device(state, (dev, host), bounce_buffer)));
        if let Err(error) = copied {
            sent.iter().try_for_each(|state| state.free(dev))?;
            return Err(error);
        }
        self.device.splice(..0, sent);
        self.keep_on_host(kept, host);
        Ok(())
    }

    /// Copies `state` of a bucket on the device to its part of `target` on the host: as bytes, if both sides have one format.
    fn copy_to_host<D: Device>(
        &self,
        state: &DeviceState,
        target: &HostState,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
    ) -> Result<()> {
        if state.weights().is_none() {
            let mut arrays = state.arrays.into_iter().zip(target.slice(&state.local).arrays);
            return arrays.try_for_each(|(from, to)| bounce_buffer.to_host((dev, host), from, to));
        }
        for (local, part) in self.values_of(&state.local) {
            let mut values = vec![0.0; local.len()];
            self.read((dev, host), bounce_buffer, part, local.start, &mut values)?;
            if host.is_backed() {
                self.arrays[part].store(&values, exactly(&local), host.lend_mut(target.slice(&local).arrays[part]));
            }
        }
        Ok(())
    }

    /// Copies the host's state of a bucket to `state` on the device: as bytes, if both sides have one format.
    fn copy_to_device<D: Device>(&self, state: &DeviceState, (dev, host): Sides<'_, D>, bounce_buffer: &BounceBuffer) -> Result<()> {
        if state.weights().is_none() {
            let mut arrays = self.on_host(&state.local).arrays.into_iter().zip(state.arrays);
            return arrays.try_for_each(|(from, to)| bounce_buffer.to_device((dev, host), from, to));
        }
        for (local, part) in self.values_of(&state.local) {
            let mut values = vec![0.0; local.len()];
            if host.is_backed() {
                self.read((dev, host), bounce_buffer, part, local.start, &mut values)?;
            }
            let target = state.part(&local).expect("a part of the bucket");
            target.write((dev, host), bounce_buffer, part, &values, exactly(&local))?;
        }
        Ok(())
    }

    /// The values of a local range in pieces, each with its array. Masters come before the moments whose signs they use.
    fn values_of(&self, local: &Range<usize>) -> impl Iterator<Item = (Range<usize>, StatePart)> + use<> {
        let (end, arrays) = (local.end, self.arrays);
        let pieces = local.clone().step_by(PIECE_ELEMS).map(move |start| start..end.min(start + PIECE_ELEMS));
        pieces.flat_map(move |piece| arrays.parts().map(move |part| (piece.clone(), part)))
    }

    /// Moves the upper halves of split masters out of the model's weights: see [`DeviceState::keep_weights`].
    pub(super) fn keep_weights<D: Launch<Cast>>(&mut self, dev: &mut D) -> Result<()> {
        self.device.iter_mut().try_for_each(|state| state.keep_weights(dev))
    }

    /// Moves the upper halves of split masters to the model's weights; `place` is the location of a local range.
    pub(super) fn place_weights<D: Launch<Cast>>(&mut self, dev: &mut D, place: impl Fn(&Range<usize>) -> DeviceSlice) -> Result<()> {
        self.device.iter_mut().try_for_each(|state| {
            let place = place(&state.local);
            state.place_weights(dev, place)
        })
    }

    /// Frees the host's state after its first `kept` elements.
    fn keep_on_host(&mut self, kept: usize, host: &mut HostMemory) {
        for state in self.host.iter_mut().filter(|state| state.end() > kept) {
            let left = state.slice(&(state.first..kept.max(state.first)));
            for (memory, left) in state.arrays.into_iter().zip(left.arrays) {
                host.give_back(memory.addr(), left.bytes());
            }
            *state = left;
        }
        self.host.retain(|state| state.end() > state.first);
    }
}

/// The rounding of values that their format represents: it changes none of them.
fn exactly(local: &Range<usize>) -> Rounding {
    Rounding { key: 0, first: local.start }
}

/// Allocates host memory for the arrays `list` of the local range `local`, which consists of whole buckets.
fn host_state(host: &mut HostMemory, list: StateArrays, local: Range<usize>, slices: &Slices) -> Result<HostState> {
    let (period_elems, mut taken) = (slices.slice_elems().min(local.len()), Vec::new());
    let arrays = PerArray::try_new(list, |array| {
        let memory = host.alloc_periodic(array.name, array.bytes(local.len()), array.bytes(period_elems))?;
        taken.push(memory);
        Ok(memory)
    });
    let arrays = arrays.inspect_err(|_| taken.iter().for_each(|memory| host.give_back(memory.addr(), 0)))?;
    Ok(HostState { first: local.start, list, arrays, upper: None })
}
