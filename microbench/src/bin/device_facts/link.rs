//! Copies over the link, by size, direction, kind of host memory and concurrent load.

use crate::bench::{DeviceBench, rate};
use crate::load::CopyLoad;
use microbench::facts::join;
use microbench::{fill, fill_from, values};
use serde_json::{Value, json};
use superoffload::Result;
use superoffload::internals::device::{Device, DeviceSlice, Kernels, Stream, Zero};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::host::{HostMemory, PinnedSlice};
use superoffload::internals::memory::{Addressing, MemorySpace};
use superoffload::internals::probe::{CopyDirection, Samples};

/// The smallest copy.
const SMALLEST_BYTES: usize = 4 << 10;
/// Sizes of copies under load: a small copy, and a bucket.
const LOADED_BYTES: [usize; 2] = [256 << 10, 64 << 20];
/// Elements after which the test values repeat.
const PATTERN: usize = 1 << 10;

/// Memory on both sides for each direction, and a host buffer to check the result.
struct LinkMemory {
    host: [PinnedSlice; 2],
    device: [DeviceSlice; 2],
    check: PinnedSlice,
    seed: u32,
}

impl LinkMemory {
    fn enqueue<D: Device>(&self, dev: &mut D, way: CopyDirection, bytes: usize) -> Result<()> {
        let (host, device) = self.of(way, bytes);
        match way {
            CopyDirection::ToHost => dev.copy_d2h(way.stream(), device, host),
            CopyDirection::ToDevice => dev.copy_h2d(way.stream(), host, device),
        }
    }

    fn of(&self, way: CopyDirection, bytes: usize) -> (PinnedSlice, DeviceSlice) {
        (self.host[way as usize].slice(0, bytes), self.device[way as usize].slice(0, bytes / 4))
    }

    /// Writes new values to the source of `way` and zeros to its destination. Returns the seed of the values.
    fn prepare<D: Kernels>(&mut self, bench: &mut DeviceBench<'_, D>, way: CopyDirection, bytes: usize) -> Result<u32> {
        self.seed += 1;
        let ((host, device), check) = (self.of(way, bytes), self.check.slice(0, bytes));
        fill_from(bench.memory, if way == CopyDirection::ToHost { check } else { host }, &values(self.seed, PATTERN));
        match way {
            CopyDirection::ToHost => {
                fill(bench.memory, host, 0f32);
                bench.timer.seconds(|dev| dev.copy_h2d(Stream::H2d, check, device))?;
            }
            CopyDirection::ToDevice => _ = bench.timer.seconds(|dev| dev.launch(Zero { x: device }))?,
        }
        Ok(self.seed)
    }

    /// Whether the destination of `way` holds the values of seed `written`.
    fn has_arrived<D: Kernels>(&self, bench: &mut DeviceBench<'_, D>, way: CopyDirection, bytes: usize, written: u32) -> Result<bool> {
        let ((host, device), check) = (self.of(way, bytes), self.check.slice(0, bytes));
        if way == CopyDirection::ToHost {
            return Ok(is_pattern(bench.memory, host, written));
        }
        fill(bench.memory, check, 0f32);
        bench.timer.seconds(|dev| dev.copy_d2h(Stream::D2h, device, check))?;
        Ok(is_pattern(bench.memory, check, written))
    }
}

fn is_pattern(host: &HostMemory, memory: PinnedSlice, seed: u32) -> bool {
    let pattern = values(seed, PATTERN);
    host.lend::<f32>(memory).chunks(PATTERN).all(|part| *part == pattern[..part.len()])
}

/// Measures every case of the link.
///
/// # Errors
/// Errors of the device; `Resource` if the copied data are wrong.
pub fn measure<D: Kernels>(bench: &mut DeviceBench<'_, D>) -> Result<()> {
    let bytes = bench.sizes.max_bytes;
    let check = bench.registered(bytes)?;
    let mut device = || bench.timer.dev.alloc("copies", bytes / 4, Dtype::Float32);
    let device = [device()?, device()?];
    let registered = [bench.registered(bytes)?, bench.registered(bytes)?];
    let pageable = [bench.memory.alloc("pageable copies", bytes)?, bench.memory.alloc("pageable copies", bytes)?];
    for (kind, host) in [("registered", registered), ("pageable", pageable)] {
        let mut ends = LinkMemory { host, device, check, seed: 0 };
        for size in bench.sizes.by_four(SMALLEST_BYTES) {
            for way in CopyDirection::BOTH {
                copy(bench, &mut ends, (kind, way, size), CopyLoad::None)?;
            }
        }
    }
    let mut ends = LinkMemory { host: registered, device, check, seed: 1 << 10 };
    for size in LOADED_BYTES.map(|size| size.min(bytes)) {
        for (way, load) in CopyDirection::BOTH.into_iter().flat_map(|way| CopyLoad::ALL[1..].iter().map(move |&load| (way, load))) {
            copy(bench, &mut ends, ("registered", way, size), load)?;
        }
    }
    if bench.addressing == Some(Addressing::Managed) { managed(bench, check) } else { Ok(()) }
}

fn copy<D: Kernels>(
    bench: &mut DeviceBench<'_, D>,
    ends: &mut LinkMemory,
    case: (&str, CopyDirection, usize),
    load: CopyLoad,
) -> Result<()> {
    let (_, way, size) = case;
    let ways: Vec<CopyDirection> = CopyDirection::BOTH.into_iter().filter(|&each| each == way || load == CopyLoad::OtherWay).collect();
    let written = ways.iter().map(|&way| ends.prepare(bench, way, size)).collect::<Result<Vec<_>>>()?;
    let (topology, threads, states, time_s) = (bench.topology, bench.limits.workers, bench.states, bench.sizes.seconds);
    let rates = load.beside(topology, threads, states, || {
        bench.timer.rates(time_s, size as f64, |dev| ways.iter().try_for_each(|&way| ends.enqueue(dev, way, size)))
    })?;
    let mut is_right = true;
    for (&way, written) in ways.iter().zip(written) {
        is_right &= ends.has_arrived(bench, way, size, written)?;
    }
    report(bench, case, load, &rates, is_right)
}

fn report<D: Kernels>(
    bench: &DeviceBench<'_, D>,
    case: (&str, CopyDirection, usize),
    load: CopyLoad,
    rates: &Samples,
    is_right: bool,
) -> Result<()> {
    let (kind, way, size) = case;
    let fields = json!({ "memory": kind, "way": name(way), "load": load.name(), "bytes": size, "megabytes": size as f64 * 1e-6, "us": 1e6 * size as f64 / rates.median() });
    bench.line("link", is_right, join(fields, rate(rates, &bench.limits.link)))
}

fn name(way: CopyDirection) -> Value {
    match way {
        CopyDirection::ToHost => "to the host",
        CopyDirection::ToDevice => "to the device",
    }
    .into()
}

/// Measures managed memory that the driver prefetches.
fn managed<D: Kernels>(bench: &mut DeviceBench<'_, D>, check: PinnedSlice) -> Result<()> {
    let pages = bench.timer.dev.alloc_unified("managed copies", bench.sizes.max_bytes / 4, Dtype::Float32)?;
    for size in bench.sizes.by_four(SMALLEST_BYTES) {
        let (pages, check) = (pages.slice(0, size / 4), check.slice(0, size));
        fill_from(bench.memory, check, &values(1, PATTERN));
        bench.timer.seconds(|dev| dev.copy_h2d(Stream::H2d, check, pages))?;
        for (way, target) in [(CopyDirection::ToDevice, MemorySpace::Device), (CopyDirection::ToHost, MemorySpace::Host)] {
            let origin = if target == MemorySpace::Host { MemorySpace::Device } else { MemorySpace::Host };
            let rates = bench.timer.samples(bench.sizes.seconds, |timer| {
                timer.seconds(|dev| dev.prefetch(Stream::D2h, pages, origin))?;
                Ok(size as f64 / timer.seconds(|dev| dev.prefetch(way.stream(), pages, target))?)
            })?;
            fill(bench.memory, check, 0f32);
            bench.timer.seconds(|dev| dev.copy_d2h(Stream::D2h, pages, check))?;
            report(bench, ("managed", way, size), CopyLoad::None, &rates, is_pattern(bench.memory, check, 1))?;
        }
    }
    Ok(())
}
