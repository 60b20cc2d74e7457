//! Memory, copies and events: what the step protocol stands on.

use super::kernels::Suite;
use super::random::Random;
use super::report::{Outcome, require};
use super::rig::{Bench, Rig};
use std::io::Write;
use superoffload::device::{DeviceSlice, Stream};
use superoffload::dtype::Dtype;
use superoffload::error::Result;

/// Rounds of the relay, and int32 elements that each passes on.
const ROUNDS: usize = 24;
const BATON: usize = 300_001;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    suite.case("alloc gives zeros at aligned addresses", |bench, _| alloc(&mut bench.subject));
    for stream in Stream::ALL {
        suite.case(&format!("copies of any size at any address on {stream:?}"), move |bench, random| round_trips(bench, random, stream));
    }
    suite.case("events are done when their past is", |bench, _| events(&mut bench.subject));
    suite.case("streams wait for each other", relay);
}

fn alloc(rig: &mut Rig) -> Outcome {
    require(!rig.dev.describe().is_empty(), || "the device has no name".into())?;
    for (elems, dtype) in [(0, Dtype::Float32), (1, Dtype::Bfloat16), (77, Dtype::Float16), (100_003, Dtype::Int32)] {
        let slice = rig.dev.alloc("conformance", elems, dtype)?;
        require((slice.elems, slice.dtype) == (elems, dtype), || format!("asked for {elems} {dtype}, got {slice:?}"))?;
        require(slice.addr != 0 && slice.addr.is_multiple_of(256), || format!("{elems} {dtype} at {:#x}", slice.addr))?;
        let host = rig.host.slice(0, slice.bytes());
        host.with(|bytes: &mut [u8]| bytes.fill(1));
        rig.dev.copy_d2h(Stream::Compute, slice, host)?;
        rig.synchronize(Stream::Compute)?;
        require(host.with(|bytes: &mut [u8]| bytes.iter().all(|&byte| byte == 0)), || format!("{elems} {dtype} are not zero"))?;
    }
    Ok(0.0)
}

fn round_trips(bench: &mut Bench, random: &mut Random, stream: Stream) -> Outcome {
    let rig = &mut bench.subject;
    for bytes in [2, 6, 254, 4098, 1 << 20, (3 << 20) + 2] {
        let sent: Vec<u8> = (0..bytes).map(|_| random.bits() as u8).collect();
        // Halves in the middle of device memory; any byte of the host's.
        let device = DeviceSlice { addr: rig.device.addr + 2 * random.below(1000) as u64, elems: bytes / 2, dtype: Dtype::Bfloat16 };
        let (from, to) = (rig.host.slice(random.below(1000), bytes), rig.host.slice((8 << 20) + random.below(1000), bytes));
        from.with(|host: &mut [u8]| host.copy_from_slice(&sent));
        to.with(|host: &mut [u8]| host.fill(0xff));
        rig.dev.copy_h2d(stream, from, device)?;
        rig.dev.copy_d2h(stream, device, to)?;
        rig.synchronize(stream)?;
        require(to.with(|host: &mut [u8]| host == sent), || format!("{bytes} bytes came back changed"))?;
    }
    Ok(0.0)
}

fn events(rig: &mut Rig) -> Outcome {
    let event = rig.dev.event()?;
    require(rig.dev.is_done(event)?, || "an event that was never recorded is not done".into())?;
    rig.dev.synchronize(event)?;
    Stream::ALL.into_iter().try_for_each(|stream| rig.dev.wait(stream, event))?;
    let big = rig.device.slice(0, 4 << 20);
    let waited = rig.dev.waited_ns();
    for stream in [Stream::H2d, Stream::D2h, Stream::H2d] {
        rig.dev.copy_h2d(stream, rig.host.slice(0, big.bytes()), big)?;
        rig.dev.record(event, stream)?;
        rig.dev.wait(Stream::Compute, event)?;
        rig.dev.synchronize(event)?;
        require(rig.dev.is_done(event)?, || "an event is not done after the driver has waited for it".into())?;
    }
    require(rig.dev.waited_ns() >= waited, || "time waited went backwards".into())?;
    Ok(0.0)
}

/// A number goes from the host through all three streams and back, over memory that every round uses again; the driver waits
/// only at the end. A wait that does not wait hands on an earlier or a later number.
fn relay(bench: &mut Bench, _: &mut Random) -> Outcome {
    let rig = &mut bench.subject;
    let bytes = 4 * BATON;
    let numbers = |round: usize| rig.host.slice(2 * round * bytes, bytes);
    let results = |round: usize| rig.host.slice((2 * round + 1) * bytes, bytes);
    for round in 0..ROUNDS {
        numbers(round).with(|x: &mut [f32]| x.fill(round as f32 + 1.0));
        results(round).with(|x: &mut [f32]| x.fill(f32::NAN));
    }
    let part = |i: usize| DeviceSlice { dtype: Dtype::Float32, ..rig.device.slice(i * BATON, BATON) };
    let (arrived, narrow, leaving) = (part(0), DeviceSlice { dtype: Dtype::Bfloat16, ..part(1) }, part(2));
    let [sent, calculated, fetched] = [rig.dev.event()?, rig.dev.event()?, rig.dev.event()?];
    let mut round = |round: usize| -> Result<()> {
        let dev = &mut rig.dev;
        dev.wait(Stream::H2d, calculated)?;
        dev.copy_h2d(Stream::H2d, numbers(round), arrived)?;
        dev.record(sent, Stream::H2d)?;
        dev.wait(Stream::Compute, sent)?;
        dev.cast(Stream::Compute, arrived, narrow)?;
        dev.wait(Stream::Compute, fetched)?;
        dev.cast(Stream::Compute, narrow, leaving)?;
        dev.record(calculated, Stream::Compute)?;
        dev.wait(Stream::D2h, calculated)?;
        dev.copy_d2h(Stream::D2h, leaving, results(round))?;
        dev.record(fetched, Stream::D2h)
    };
    (0..ROUNDS).try_for_each(&mut round)?;
    rig.dev.synchronize(fetched)?;
    for round in 0..ROUNDS {
        let wrong = results(round).with(|x: &mut [f32]| x.iter().copied().find(|&x| x != round as f32 + 1.0));
        require(wrong.is_none(), || format!("round {} of {ROUNDS} brought {wrong:?}", round + 1))?;
    }
    Ok(0.0)
}
