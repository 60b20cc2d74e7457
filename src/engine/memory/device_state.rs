//! The optimizer state of one bucket on the device. Split masters share the bucket's working weights, which lie among the model's weights.

use super::bounce_buffer::BounceBuffer;
use super::split_masters::{SplitBuffers, SplitPlaces};
use crate::bucket::layout::Tier;
use crate::device::{Cast, Device, DeviceSlice, Launch, Sides, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::optim::moments::Rounding;
use crate::optim::optimizer::Optimizer;
use crate::optim::split::{self, Masters};
use crate::optim::state_array::{PerArray, StateArray, StateArrays, StatePart};
use crate::planner::budget::BOUNCE_ELEMS;
use std::ops::Range;

/// State of a bucket that the device steps.
#[derive(Clone, Debug)]
pub(in crate::engine) struct DeviceState {
    /// Local range of the state.
    pub(in crate::engine) local: Range<usize>,
    /// The arrays as a checkpoint stores them.
    list: StateArrays,
    /// The arrays as the device stores them.
    stored: StateArrays,
    pub(in crate::engine) arrays: PerArray<DeviceSlice>,
    /// The working weights, if the masters are split.
    upper: Option<UpperHalves>,
}

/// The working weights of split masters.
#[derive(Clone, Copy, Debug)]
enum UpperHalves {
    /// In memory of the state: the model has no weights now.
    Own(DeviceSlice),
    /// Among the model's weights.
    Model(DeviceSlice),
}

impl UpperHalves {
    fn memory(self) -> DeviceSlice {
        match self {
            Self::Own(memory) | Self::Model(memory) => memory,
        }
    }
}

impl DeviceState {
    /// Zeroed memory for the local range `local`. Split masters have own upper halves until [`DeviceState::place_weights`].
    ///
    /// # Errors
    /// `Resource` when memory is not available.
    pub(super) fn new<D: Device>(dev: &mut D, (optimizer, masters): (Optimizer, Masters), tier: Tier, local: Range<usize>) -> Result<Self> {
        // Unified memory has float32 masters: only their states cross the link.
        let (elems, masters) = (local.len(), if tier == Tier::Device { masters } else { Masters::Float32 });
        let alloc = |array: &StateArray| match tier {
            Tier::Unified => dev.alloc_unified(&format!("paged {}", array.name), array.stored_values(elems), array.dtype),
            Tier::Host | Tier::Device => dev.alloc(&format!("resident {}", array.name), array.stored_values(elems), array.dtype),
        };
        let arrays = PerArray::try_new(optimizer.device_arrays(masters), alloc)?;
        let (list, stored) = (optimizer.arrays(), optimizer.device_arrays(masters));
        let state = Self { local, list, stored, arrays, upper: None };
        if masters == Masters::Float32 {
            return Ok(state);
        }
        match dev.alloc("resident weights", elems, Dtype::Bfloat16) {
            Ok(weights) => Ok(Self { upper: Some(UpperHalves::Own(weights)), ..state }),
            Err(error) => state.free(dev).and(Err(error)),
        }
    }

    /// The working weights, if the masters are split.
    pub(in crate::engine) fn weights(&self) -> Option<DeviceSlice> {
        self.upper.map(UpperHalves::memory)
    }

    /// The memory of an array that the device stores as a checkpoint does.
    pub(in crate::engine) fn stored(&self, part: StatePart) -> Option<DeviceSlice> {
        let is_split = self.split_places().is_some_and(|places| part == StatePart::PARAMS || part == StatePart::V && places.has_ties);
        (!is_split).then(|| self.arrays[part])
    }

    /// The part within a local range, if any.
    pub(super) fn part(&self, local: &Range<usize>) -> Option<Self> {
        let common = local.start.max(self.local.start)..local.end.min(self.local.end);
        (!common.is_empty()).then(|| self.slice(common))
    }

    fn slice(&self, local: Range<usize>) -> Self {
        let part = |whole: DeviceSlice| whole.slice(local.start - self.local.start, local.len());
        let upper = self.upper.map(|upper| match upper {
            UpperHalves::Own(memory) => UpperHalves::Own(part(memory)),
            UpperHalves::Model(memory) => UpperHalves::Model(part(memory)),
        });
        let stored = |part, whole: DeviceSlice| {
            let place = self.stored[part].place(self.local.start, &local);
            whole.view(place.start, self.stored[part].stored_values(local.len()), whole.dtype())
        };
        Self { arrays: self.arrays.map(stored), upper, local, ..self.clone() }
    }

    /// This state in parts of at most a bounce buffer.
    fn pieces(&self) -> impl Iterator<Item = Self> {
        let starts = self.local.clone().step_by(BOUNCE_ELEMS);
        starts.map(|start| self.slice(start..self.local.end.min(start + BOUNCE_ELEMS)))
    }

    /// Frees the memory.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn free<D: Device>(&self, dev: &mut D) -> Result<()> {
        if let Some(UpperHalves::Own(memory)) = self.upper {
            dev.free(memory)?;
        }
        self.arrays.into_iter().try_for_each(|memory| dev.free(memory))
    }

    /// Moves the upper halves of split masters out of the model's weights, which may be freed afterwards.
    ///
    /// # Errors
    /// `Resource` when memory is not available.
    pub(super) fn keep_weights<D: Launch<Cast>>(&mut self, dev: &mut D) -> Result<()> {
        if let Some(UpperHalves::Model(src)) = self.upper {
            let dst = dev.alloc("resident weights", src.elems(), src.dtype())?;
            dev.launch(Cast { stream: Stream::Compute, src, dst })?;
            self.upper = Some(UpperHalves::Own(dst));
        }
        Ok(())
    }

    /// Moves the upper halves of split masters to `dst` among the model's weights.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn place_weights<D: Launch<Cast>>(&mut self, dev: &mut D, dst: DeviceSlice) -> Result<()> {
        if let Some(UpperHalves::Own(src)) = self.upper {
            dev.launch(Cast { stream: Stream::Compute, src, dst })?;
            self.upper = Some(UpperHalves::Model(dst));
            dev.free(src)?;
        }
        Ok(())
    }

    /// Writes `source`, one value for each element, rounded by `rounding`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn write<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
        part: StatePart,
        source: &[f32],
        rounding: Rounding,
    ) -> Result<()> {
        let (array, mut buffers) = (&self.list[part], SplitBuffers::default());
        for piece in self.pieces() {
            let from = piece.local.start - self.local.start;
            let values = &source[from..][..piece.local.len()];
            let store = |to: &mut [u8]| array.store(values, rounding.behind(from), to);
            match piece.split_places() {
                Some(places) if part == StatePart::PARAMS => {
                    places.write_masters((dev, host), bounce_buffer, (array, values), &mut buffers)?;
                }
                Some(places) if part == StatePart::V && places.has_ties => {
                    places.write_magnitudes((dev, host), bounce_buffer, store, &mut buffers)?;
                }
                _ => bounce_buffer.fill((dev, host), piece.arrays[part], |_, to| store(to))?,
            }
        }
        Ok(())
    }

    /// Reads one value for each element into `out`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn read<D: Device>(
        &self,
        (dev, host): Sides<'_, D>,
        bounce_buffer: &BounceBuffer,
        part: StatePart,
        out: &mut [f32],
    ) -> Result<()> {
        let (array, mut buffers) = (&self.list[part], SplitBuffers::default());
        for piece in self.pieces() {
            let out = &mut out[piece.local.start - self.local.start..][..piece.local.len()];
            match piece.split_places() {
                Some(places) if part == StatePart::PARAMS => {
                    places.read_masters((dev, host), bounce_buffer, out, &mut buffers)?;
                }
                Some(places) if part == StatePart::V && places.has_ties => array.load(out, |bytes| {
                    bounce_buffer.download((dev, host), piece.arrays[part], bytes)?;
                    split::clear_signs(bytes, piece.local.len());
                    Ok(())
                })?,
                _ => array.load(out, |bytes| bounce_buffer.download((dev, host), piece.arrays[part], bytes))?,
            }
        }
        Ok(())
    }

    /// The places of split masters. Masters beside 8-bit moments have no ties.
    fn split_places(&self) -> Option<SplitPlaces> {
        let (lower, v) = (self.arrays[StatePart::PARAMS], self.arrays[StatePart::V]);
        self.weights().map(|weights| SplitPlaces { weights, lower, v, has_ties: !self.stored[StatePart::V].has_groups() })
    }
}
