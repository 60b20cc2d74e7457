//! Copies between pinned memory and the device, by size and direction, in one direction and in both, and migration of managed memory.

use super::samples::{Samples, fraction_curve};
use super::timer::Timer;
use crate::device::{Device, DeviceSlice, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::hardware::profile::Link;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::memory::{Addressing, MemorySpace};

/// Ratio of consecutive copy sizes.
const STEP: usize = 4;
/// The smallest copy of the curves. The latency is the time of a `TINY_BYTES` copy.
const SMALLEST_BYTES: usize = 64 << 10;
const TINY_BYTES: usize = 4 << 10;
/// Bytes of a bucket, and of copies in both directions.
const BUCKET_BYTES: usize = 64 << 20;

/// A direction of copies over the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// From the device to the host.
    ToHost,
    ToDevice,
}

impl CopyDirection {
    pub const BOTH: [Self; 2] = [Self::ToHost, Self::ToDevice];

    pub fn stream(self) -> Stream {
        match self {
            Self::ToHost => Stream::D2h,
            Self::ToDevice => Stream::H2d,
        }
    }
}

/// Memory on both sides for each direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copies {
    host: [PinnedSlice; 2],
    device: [DeviceSlice; 2],
}

impl Copies {
    /// Memory for copies of up to `bytes`, at least `SMALLEST_BYTES`. The memory of `host` must outlive the device.
    ///
    /// # Errors
    /// `Resource` if there is not enough memory.
    pub(crate) fn new<D: Device>(dev: &mut D, host: &mut HostMemory, bytes: usize) -> Result<Self> {
        let bytes = bytes.max(SMALLEST_BYTES);
        let mut pinned = || -> Result<PinnedSlice> {
            let memory = host.alloc("copies", bytes)?;
            dev.pin(memory)?;
            Ok(memory)
        };
        let host = [pinned()?, pinned()?];
        let mut device = || dev.alloc("copies", bytes / 4, Dtype::Float32);
        Ok(Self { host, device: [device()?, device()?] })
    }

    /// Bytes of the largest copy.
    fn bytes(self) -> usize {
        self.host[0].bytes()
    }

    /// Bytes of a bucket, at most those of the largest copy.
    pub(crate) fn bucket_bytes(self) -> usize {
        self.bytes().min(BUCKET_BYTES)
    }

    /// Enqueues a copy of `bytes` on the stream of this direction.
    pub(crate) fn enqueue<D: Device>(self, dev: &mut D, way: CopyDirection, bytes: usize) -> Result<()> {
        let (host, device) = (self.host[way as usize].slice(0, bytes), self.device[way as usize].slice(0, bytes / 4));
        match way {
            CopyDirection::ToHost => dev.copy_d2h(way.stream(), device, host),
            CopyDirection::ToDevice => dev.copy_h2d(way.stream(), host, device),
        }
    }

    /// Measures the link for about `time_s`.
    pub(crate) fn measure<D: Device>(self, timer: &mut Timer<'_, D>, addressing: Addressing, time_s: f64) -> Result<Link> {
        let rates = |timer: &mut Timer<'_, D>, way: CopyDirection, bytes: usize, time_s: f64| {
            timer.rates(time_s, bytes as f64, |dev| self.enqueue(dev, way, bytes))
        };
        let sizes: Vec<usize> =
            std::iter::successors(Some(SMALLEST_BYTES), |size| Some(size * STEP)).take_while(|&size| size <= self.bytes()).collect();
        let each_s = 0.6 * time_s / (2 * sizes.len()) as f64;
        let by_size = |timer: &mut Timer<'_, D>, way: CopyDirection| -> Result<Vec<(f64, Samples)>> {
            sizes.iter().map(|&size| Ok((size as f64, rates(timer, way, size, each_s)?))).collect()
        };
        let (to_host, to_device) = (by_size(timer, CopyDirection::ToHost)?, by_size(timer, CopyDirection::ToDevice)?);
        let tiny = rates(timer, CopyDirection::ToHost, TINY_BYTES, 0.05 * time_s)?;
        let bucket = self.bucket_bytes();
        let both = timer.rates(0.15 * time_s, bucket as f64, |dev| {
            CopyDirection::BOTH.into_iter().try_for_each(|way| self.enqueue(dev, way, bucket))
        })?;
        let managed = if addressing == Addressing::Managed { Some(managed(timer, self.bytes(), 0.2 * time_s)?) } else { None };
        let largest = |points: &[(f64, Samples)]| points[points.len() - 1].1.sourced();
        Ok(Link {
            to_host_bytes_per_s: largest(&to_host),
            to_device_bytes_per_s: largest(&to_device),
            both_ways_bytes_per_s: both.sourced(),
            to_host_share_by_bytes: fraction_curve(&to_host),
            to_device_share_by_bytes: fraction_curve(&to_device),
            latency_s: tiny.inverse(TINY_BYTES as f64).sourced(),
            managed_bytes_per_s: managed.map(|samples| samples.sourced()),
        })
    }
}

/// Bytes of managed memory per second in each direction, while `bytes` migrate in each direction.
fn managed<D: Device>(timer: &mut Timer<'_, D>, bytes: usize, time_s: f64) -> Result<Samples> {
    let mut pages = || timer.dev.alloc_unified("pages", bytes / 4, Dtype::Float32);
    let (mut coming, mut going) = (pages()?, pages()?);
    timer.seconds(|dev| dev.prefetch(Stream::H2d, going, MemorySpace::Device))?;
    timer.samples(time_s, |timer| {
        let seconds = timer.seconds(|dev| {
            dev.prefetch(Stream::H2d, coming, MemorySpace::Device)?;
            dev.prefetch(Stream::D2h, going, MemorySpace::Host)
        })?;
        std::mem::swap(&mut coming, &mut going);
        Ok(bytes as f64 / seconds)
    })
}
