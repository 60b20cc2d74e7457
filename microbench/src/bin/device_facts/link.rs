//! Copies over the link: by size, way, kind of host memory, alone and beside what a step runs meanwhile.

use crate::bench::{Bench, rate};
use crate::load::Load;
use microbench::facts::join;
use microbench::{fill, fill_from, values};
use serde_json::{Value, json};
use superoffload::device::{Device, DeviceSlice, Kernels, Stream};
use superoffload::dtype::Dtype;
use superoffload::error::Result;
use superoffload::host::pinned::{HostMemory, PinnedSlice};
use superoffload::memory::{Addressing, Place};
use superoffload::probe::copies::Way;
use superoffload::probe::samples::Samples;

/// The smallest copy.
const SMALLEST_BYTES: usize = 4 << 10;
/// Copies beside a load: a small one, and a bucket.
const LOADED_BYTES: [usize; 2] = [256 << 10, 64 << 20];
/// Values that memory repeats.
const PATTERN: usize = 1 << 10;

/// Memory on both sides, for each way, and a place to look at what arrived.
struct Ends {
    host: [PinnedSlice; 2],
    device: [DeviceSlice; 2],
    check: PinnedSlice,
    seed: u32,
}

impl Ends {
    fn enqueue<D: Device>(&self, dev: &mut D, way: Way, bytes: usize) -> Result<()> {
        let (host, device) = self.of(way, bytes);
        match way {
            Way::ToHost => dev.copy_d2h(way.stream(), device, host),
            Way::ToDevice => dev.copy_h2d(way.stream(), host, device),
        }
    }

    fn of(&self, way: Way, bytes: usize) -> (PinnedSlice, DeviceSlice) {
        (self.host[way as usize].slice(0, bytes), self.device[way as usize].slice(0, bytes / 4))
    }

    /// Writes at the beginning of `way` what was not there before, and zeros at its end; says what was written.
    fn prepare<D: Kernels>(&mut self, bench: &mut Bench<'_, D>, way: Way, bytes: usize) -> Result<u32> {
        self.seed += 1;
        let ((host, device), check) = (self.of(way, bytes), self.check.slice(0, bytes));
        fill_from(bench.memory, if way == Way::ToHost { check } else { host }, &values(self.seed, PATTERN));
        match way {
            Way::ToHost => {
                fill(bench.memory, host, 0f32);
                bench.rig.seconds(|dev| dev.copy_h2d(Stream::H2d, check, device))?;
            }
            Way::ToDevice => _ = bench.rig.seconds(|dev| dev.zero(device))?,
        }
        Ok(self.seed)
    }

    /// Whether the end of `way` holds what was written at its beginning.
    fn has_arrived<D: Kernels>(&self, bench: &mut Bench<'_, D>, way: Way, bytes: usize, written: u32) -> Result<bool> {
        let ((host, device), check) = (self.of(way, bytes), self.check.slice(0, bytes));
        if way == Way::ToHost {
            return Ok(is_pattern(bench.memory, host, written));
        }
        fill(bench.memory, check, 0f32);
        bench.rig.seconds(|dev| dev.copy_d2h(Stream::D2h, device, check))?;
        Ok(is_pattern(bench.memory, check, written))
    }
}

fn is_pattern(host: &HostMemory, memory: PinnedSlice, seed: u32) -> bool {
    let pattern = values(seed, PATTERN);
    host.lend::<f32>(memory).chunks(PATTERN).all(|part| *part == pattern[..part.len()])
}

/// Every case of the link.
///
/// # Errors
/// The device's; `Resource` when data arrived wrong.
pub fn measure<D: Kernels>(bench: &mut Bench<'_, D>) -> Result<()> {
    let bytes = bench.sizes.max_bytes;
    let check = bench.registered(bytes)?;
    let mut device = || bench.rig.dev.alloc("copies", bytes / 4, Dtype::Float32);
    let device = [device()?, device()?];
    let registered = [bench.registered(bytes)?, bench.registered(bytes)?];
    let pageable = [bench.memory.alloc("pageable copies", bytes)?, bench.memory.alloc("pageable copies", bytes)?];
    for (kind, host) in [("registered", registered), ("pageable", pageable)] {
        let mut ends = Ends { host, device, check, seed: 0 };
        for size in bench.sizes.by_four(SMALLEST_BYTES) {
            for way in Way::BOTH {
                copy(bench, &mut ends, (kind, way, size), Load::None)?;
            }
        }
    }
    let mut ends = Ends { host: registered, device, check, seed: 1 << 10 };
    for size in LOADED_BYTES.map(|size| size.min(bytes)) {
        for (way, load) in Way::BOTH.into_iter().flat_map(|way| Load::ALL[1..].iter().map(move |&load| (way, load))) {
            copy(bench, &mut ends, ("registered", way, size), load)?;
        }
    }
    if bench.addressing == Some(Addressing::Managed) { managed(bench, check) } else { Ok(()) }
}

fn copy<D: Kernels>(bench: &mut Bench<'_, D>, ends: &mut Ends, case: (&str, Way, usize), load: Load) -> Result<()> {
    let (_, way, size) = case;
    let ways: Vec<Way> = Way::BOTH.into_iter().filter(|&each| each == way || load == Load::OtherWay).collect();
    let written = ways.iter().map(|&way| ends.prepare(bench, way, size)).collect::<Result<Vec<_>>>()?;
    let (topology, threads, states, time_s) = (bench.topology, bench.limits.workers, bench.states, bench.sizes.seconds);
    let rates = load.beside(topology, threads, states, || {
        bench.rig.rates(time_s, size as f64, |dev| ways.iter().try_for_each(|&way| ends.enqueue(dev, way, size)))
    })?;
    let mut is_right = true;
    for (&way, written) in ways.iter().zip(written) {
        is_right &= ends.has_arrived(bench, way, size, written)?;
    }
    report(bench, case, load, &rates, is_right)
}

fn report<D: Kernels>(bench: &Bench<'_, D>, case: (&str, Way, usize), load: Load, rates: &Samples, is_right: bool) -> Result<()> {
    let (kind, way, size) = case;
    let fields = json!({ "memory": kind, "way": name(way), "load": load.name(), "bytes": size, "megabytes": size as f64 * 1e-6, "us": 1e6 * size as f64 / rates.median() });
    bench.line("link", is_right, join(fields, rate(rates, &bench.limits.link)))
}

fn name(way: Way) -> Value {
    match way {
        Way::ToHost => "to the host",
        Way::ToDevice => "to the device",
    }
    .into()
}

/// Pages of managed memory that the driver moves ahead of their use.
fn managed<D: Kernels>(bench: &mut Bench<'_, D>, check: PinnedSlice) -> Result<()> {
    let pages = bench.rig.dev.alloc_unified("managed copies", bench.sizes.max_bytes / 4, Dtype::Float32)?;
    for size in bench.sizes.by_four(SMALLEST_BYTES) {
        let (pages, check) = (pages.slice(0, size / 4), check.slice(0, size));
        fill_from(bench.memory, check, &values(1, PATTERN));
        bench.rig.seconds(|dev| dev.copy_h2d(Stream::H2d, check, pages))?;
        for (way, there) in [(Way::ToDevice, Place::Device), (Way::ToHost, Place::Host)] {
            let back = if there == Place::Host { Place::Device } else { Place::Host };
            let rates = bench.rig.samples(bench.sizes.seconds, |rig| {
                rig.seconds(|dev| dev.prefetch(Stream::D2h, pages, back))?;
                Ok(size as f64 / rig.seconds(|dev| dev.prefetch(way.stream(), pages, there))?)
            })?;
            fill(bench.memory, check, 0f32);
            bench.rig.seconds(|dev| dev.copy_d2h(Stream::D2h, pages, check))?;
            report(bench, ("managed", way, size), Load::None, &rates, is_pattern(bench.memory, check, 1))?;
        }
    }
    Ok(())
}
