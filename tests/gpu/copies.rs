//! Memory, copies and events: what the step protocol stands on.

use super::formats::encode;
use super::kernels::Suite;
use super::random::Random;
use super::report::{Missed, Outcome, require};
use super::rig::{Bench, Rig};
use std::io::Write;
use superoffload::device::{AdamArgs, DeviceSlice, Stream};
use superoffload::dtype::Dtype;
use superoffload::error::{Error, Result};
use superoffload::memory::Place;
use superoffload::optim::adam::{AdamConsts, AdamHyper};

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
    suite.case("unified memory is zeroed and keeps its content on both sides", |bench, random| unified(&mut bench.subject, random));
    suite.case("adam_step on unified memory, fetched and left where it is", step_unified);
}

fn alloc(rig: &mut Rig) -> Outcome {
    require(!rig.dev.describe().is_empty(), || "the device has no name".into())?;
    for (elems, dtype) in [(0, Dtype::Float32), (1, Dtype::Bfloat16), (77, Dtype::Float16), (100_003, Dtype::Int32)] {
        let slice = rig.dev.alloc("conformance", elems, dtype)?;
        require((slice.elems, slice.dtype) == (elems, dtype), || format!("asked for {elems} {dtype}, got {slice:?}"))?;
        require(slice.addr != 0 && slice.addr.is_multiple_of(256), || format!("{elems} {dtype} at {:#x}", slice.addr))?;
        let host = rig.host.slice(0, slice.bytes());
        rig.memory.lend_mut::<u8>(host).fill(1);
        rig.dev.copy_d2h(Stream::Compute, slice, host)?;
        rig.synchronize(Stream::Compute)?;
        require(rig.memory.lend::<u8>(host).iter().all(|&byte| byte == 0), || format!("{elems} {dtype} are not zero"))?;
    }
    Ok(0.0)
}

/// Where a device has no unified memory there is nothing to test.
fn alloc_unified(rig: &mut Rig, elems: usize) -> std::result::Result<DeviceSlice, Missed> {
    match rig.dev.alloc_unified("conformance", elems, Dtype::Float32) {
        Err(e @ Error::Unsupported(_)) => Err(Missed::Skipped(e.to_string())),
        memory => Ok(memory?),
    }
}

/// What `memory` holds, read on the compute stream after everything that `after` did.
fn content(rig: &mut Rig, memory: DeviceSlice, after: Stream) -> Result<Vec<u8>> {
    rig.synchronize(after)?;
    let host = rig.host.slice(0, memory.bytes());
    rig.dev.copy_d2h(Stream::Compute, memory, host)?;
    rig.synchronize(Stream::Compute)?;
    Ok(rig.memory.lend(host).to_vec())
}

fn fill(rig: &mut Rig, memory: DeviceSlice, bytes: &[u8]) -> Result<()> {
    let host = rig.host.slice(0, bytes.len());
    rig.memory.lend_mut(host).copy_from_slice(bytes);
    rig.dev.copy_h2d(Stream::Compute, host, memory)?;
    rig.synchronize(Stream::Compute)
}

fn unified(rig: &mut Rig, random: &mut Random) -> Outcome {
    for elems in [0, 1, 100_003, 5 << 20] {
        let memory = alloc_unified(rig, elems)?;
        require(memory.elems == elems && memory.addr.is_multiple_of(256), || format!("asked for {elems}, got {memory:?}"))?;
        let zeros = content(rig, memory, Stream::Compute)?;
        require(zeros.iter().all(|&byte| byte == 0), || format!("{elems} elements are not zero"))?;
        // A part that ends inside pages moves, and the rest stays.
        let part = memory.slice(elems / 3, elems / 2);
        let sent = encode(Dtype::Float32, &random.uniform(Dtype::Float32, elems));
        fill(rig, memory, &sent)?;
        for (stream, place) in [(Stream::H2d, Place::Device), (Stream::D2h, Place::Host), (Stream::Compute, Place::Device)] {
            rig.dev.prefetch(stream, part, place)?;
            require(content(rig, memory, stream)? == sent, || format!("{elems} elements changed on their way to the {place:?}"))?;
        }
    }
    Ok(0.0)
}

/// The optimizer's step of an array that was fetched, of one that was not, and of one of which a part was: the reference's bits.
fn step_unified(bench: &mut Bench, random: &mut Random) -> Outcome {
    const ELEMS: usize = (1 << 20) + 4096;
    let state = [(); 3].map(|()| random.uniform(Dtype::Float32, ELEMS).iter().map(|x| x.abs()).collect::<Vec<_>>());
    let state = state.map(|values| encode(Dtype::Float32, &values));
    let grads = encode(Dtype::Bfloat16, &random.uniform(Dtype::Bfloat16, ELEMS));
    for fetched in [ELEMS, 0, ELEMS / 2 + 1] {
        let step = |rig: &mut Rig| -> std::result::Result<Vec<Vec<u8>>, Missed> {
            let arrays = [alloc_unified(rig, ELEMS)?, alloc_unified(rig, ELEMS)?, alloc_unified(rig, ELEMS)?];
            let half = |i: usize| DeviceSlice { dtype: Dtype::Bfloat16, ..rig.device.slice(i * ELEMS, ELEMS) };
            let [grads_here, out] = [half(0), half(1)];
            fill(rig, grads_here, &grads)?;
            arrays.iter().zip(&state).try_for_each(|(memory, bytes)| fill(rig, *memory, bytes))?;
            let [arrived, stepped] = [rig.dev.event()?, rig.dev.event()?];
            arrays.iter().try_for_each(|memory| rig.dev.prefetch(Stream::H2d, memory.slice(0, fetched), Place::Device))?;
            rig.dev.record(arrived, Stream::H2d)?;
            rig.dev.wait(Stream::Compute, arrived)?;
            let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
            let ([params, m, v], consts) = (arrays, AdamConsts::new(&hyper, 3, true));
            rig.dev.adam_step(AdamArgs { params, m, v, grads: grads_here, out, consts, scale: 0.37 })?;
            rig.dev.record(stepped, Stream::Compute)?;
            rig.dev.wait(Stream::D2h, stepped)?;
            arrays.iter().try_for_each(|memory| rig.dev.prefetch(Stream::D2h, *memory, Place::Host))?;
            arrays.into_iter().chain([out]).map(|memory| Ok(content(rig, memory, Stream::D2h)?)).collect()
        };
        let (have, want) = (step(&mut bench.subject)?, step(&mut bench.reference)?);
        require(want[0] != state[0], || "the reference stepped nothing".into())?;
        require(have == want, || format!("other bits than the reference with {fetched} of {ELEMS} elements fetched"))?;
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
        rig.memory.lend_mut(from).copy_from_slice(&sent);
        rig.memory.lend_mut::<u8>(to).fill(0xff);
        rig.dev.copy_h2d(stream, from, device)?;
        rig.dev.copy_d2h(stream, device, to)?;
        rig.synchronize(stream)?;
        require(rig.memory.lend::<u8>(to) == sent, || format!("{bytes} bytes came back changed"))?;
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
    let host = rig.host;
    let numbers = |round: usize| host.slice(2 * round * bytes, bytes);
    let results = |round: usize| host.slice((2 * round + 1) * bytes, bytes);
    for round in 0..ROUNDS {
        rig.memory.lend_mut(numbers(round)).fill(round as f32 + 1.0);
        rig.memory.lend_mut(results(round)).fill(f32::NAN);
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
        let wrong = rig.memory.lend::<f32>(results(round)).iter().find(|&&x| x != round as f32 + 1.0);
        require(wrong.is_none(), || format!("round {} of {ROUNDS} brought {wrong:?}", round + 1))?;
    }
    Ok(0.0)
}
