//! Memory, copies and events, the foundations of the step protocol.

use super::formats::encode;
use super::harness::{Bench, Harness};
use super::kernels::Suite;
use super::random::Random;
use super::report::{Missed, Outcome, require};
use std::io::Write;
use superoffload::internals::device::{Adam, Cast, DeviceSlice, Stream};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::memory::MemorySpace;
use superoffload::internals::optim::{AdamConsts, AdamHyper};
use superoffload::{Error, Result};

/// Rounds of the relay, and int32 elements that each round passes on.
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

fn alloc(harness: &mut Harness) -> Outcome {
    require(!harness.dev.describe().is_empty(), || "the device has no name".into())?;
    for (elems, dtype) in [(0, Dtype::Float32), (1, Dtype::Bfloat16), (77, Dtype::Float16), (100_003, Dtype::Int32)] {
        let slice = harness.dev.alloc("conformance", elems, dtype)?;
        require((slice.elems(), slice.dtype()) == (elems, dtype), || format!("asked for {elems} {dtype}, got {slice:?}"))?;
        require(slice.addr() != 0 && slice.addr().is_multiple_of(256), || format!("{elems} {dtype} at {:#x}", slice.addr()))?;
        let host = harness.host.slice(0, slice.bytes());
        harness.memory.lend_mut::<u8>(host).fill(1);
        harness.dev.copy_d2h(Stream::Compute, slice, host)?;
        harness.synchronize(Stream::Compute)?;
        require(harness.memory.lend::<u8>(host).iter().all(|&byte| byte == 0), || format!("{elems} {dtype} are not zero"))?;
    }
    Ok(0.0)
}

/// Allocates unified memory. Skips the case on a device that has none.
fn alloc_unified(harness: &mut Harness, elems: usize) -> std::result::Result<DeviceSlice, Missed> {
    match harness.dev.alloc_unified("conformance", elems, Dtype::Float32) {
        Err(e @ Error::Unsupported(_)) => Err(Missed::Skipped(e.to_string())),
        memory => Ok(memory?),
    }
}

/// The content of `memory`, read on the compute stream after all work on `after`.
fn content(harness: &mut Harness, memory: DeviceSlice, after: Stream) -> Result<Vec<u8>> {
    harness.synchronize(after)?;
    let host = harness.host.slice(0, memory.bytes());
    harness.dev.copy_d2h(Stream::Compute, memory, host)?;
    harness.synchronize(Stream::Compute)?;
    Ok(harness.memory.lend(host).to_vec())
}

fn fill(harness: &mut Harness, memory: DeviceSlice, bytes: &[u8]) -> Result<()> {
    let host = harness.host.slice(0, bytes.len());
    harness.memory.lend_mut(host).copy_from_slice(bytes);
    harness.dev.copy_h2d(Stream::Compute, host, memory)?;
    harness.synchronize(Stream::Compute)
}

fn unified(harness: &mut Harness, random: &mut Random) -> Outcome {
    for elems in [0, 1, 100_003, 5 << 20] {
        let memory = alloc_unified(harness, elems)?;
        require(memory.elems() == elems && memory.addr().is_multiple_of(256), || format!("asked for {elems}, got {memory:?}"))?;
        let zeros = content(harness, memory, Stream::Compute)?;
        require(zeros.iter().all(|&byte| byte == 0), || format!("{elems} elements are not zero"))?;
        // A part that ends inside pages is moved, and the rest stays.
        let part = memory.slice(elems / 3, elems / 2);
        let sent = encode(Dtype::Float32, &random.uniform(Dtype::Float32, elems));
        fill(harness, memory, &sent)?;
        for (stream, space) in
            [(Stream::H2d, MemorySpace::Device), (Stream::D2h, MemorySpace::Host), (Stream::Compute, MemorySpace::Device)]
        {
            harness.dev.prefetch(stream, part, space)?;
            require(content(harness, memory, stream)? == sent, || format!("{elems} elements changed on their way to the {space:?}"))?;
        }
    }
    Ok(0.0)
}

/// Optimizer steps of an array that was prefetched, one that was not, and one that was prefetched in part: the reference's bits.
fn step_unified(bench: &mut Bench, random: &mut Random) -> Outcome {
    const ELEMS: usize = (1 << 20) + 4096;
    let state = [(); 3].map(|()| random.uniform(Dtype::Float32, ELEMS).iter().map(|x| x.abs()).collect::<Vec<_>>());
    let state = state.map(|values| encode(Dtype::Float32, &values));
    let grads = encode(Dtype::Bfloat16, &random.uniform(Dtype::Bfloat16, ELEMS));
    for fetched in [ELEMS, 0, ELEMS / 2 + 1] {
        let step = |harness: &mut Harness| -> std::result::Result<Vec<Vec<u8>>, Missed> {
            let arrays = [alloc_unified(harness, ELEMS)?, alloc_unified(harness, ELEMS)?, alloc_unified(harness, ELEMS)?];
            let half = |i: usize| harness.device.view(4 * i * ELEMS, ELEMS, Dtype::Bfloat16);
            let [grads_here, out] = [half(0), half(1)];
            fill(harness, grads_here, &grads)?;
            arrays.iter().zip(&state).try_for_each(|(memory, bytes)| fill(harness, *memory, bytes))?;
            let [arrived, stepped] = [harness.dev.event()?, harness.dev.event()?];
            arrays.iter().try_for_each(|memory| harness.dev.prefetch(Stream::H2d, memory.slice(0, fetched), MemorySpace::Device))?;
            harness.dev.record(arrived, Stream::H2d)?;
            harness.dev.wait(Stream::Compute, arrived)?;
            let hyper = AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
            let ([params, m, v], consts) = (arrays, AdamConsts::new(&hyper, 3, true));
            harness.dev.launch(Adam { first: 0, params, m, v, grads: grads_here, out, consts, scale: 0.37 })?;
            harness.dev.record(stepped, Stream::Compute)?;
            harness.dev.wait(Stream::D2h, stepped)?;
            arrays.iter().try_for_each(|memory| harness.dev.prefetch(Stream::D2h, *memory, MemorySpace::Host))?;
            arrays.into_iter().chain([out]).map(|memory| Ok(content(harness, memory, Stream::D2h)?)).collect()
        };
        let (have, want) = (step(&mut bench.subject)?, step(&mut bench.reference)?);
        require(want[0] != state[0], || "the reference stepped nothing".into())?;
        require(have == want, || format!("other bits than the reference with {fetched} of {ELEMS} elements fetched"))?;
    }
    Ok(0.0)
}

fn round_trips(bench: &mut Bench, random: &mut Random, stream: Stream) -> Outcome {
    let harness = &mut bench.subject;
    for bytes in [2, 6, 254, 4098, 1 << 20, (3 << 20) + 2] {
        let sent: Vec<u8> = (0..bytes).map(|_| random.bits() as u8).collect();
        // Random even offsets in device memory, and any offsets in host memory.
        let device = harness.device.view(2 * random.below(1000), bytes / 2, Dtype::Bfloat16);
        let (from, to) = (harness.host.slice(random.below(1000), bytes), harness.host.slice((8 << 20) + random.below(1000), bytes));
        harness.memory.lend_mut(from).copy_from_slice(&sent);
        harness.memory.lend_mut::<u8>(to).fill(0xff);
        harness.dev.copy_h2d(stream, from, device)?;
        harness.dev.copy_d2h(stream, device, to)?;
        harness.synchronize(stream)?;
        require(harness.memory.lend::<u8>(to) == sent, || format!("{bytes} bytes came back changed"))?;
    }
    Ok(0.0)
}

fn events(harness: &mut Harness) -> Outcome {
    let event = harness.dev.event()?;
    require(harness.dev.is_done(event)?, || "an event that was never recorded is not done".into())?;
    harness.dev.synchronize(event)?;
    Stream::ALL.into_iter().try_for_each(|stream| harness.dev.wait(stream, event))?;
    let big = harness.device.slice(0, 4 << 20);
    let waited = harness.dev.waited_ns();
    for stream in [Stream::H2d, Stream::D2h, Stream::H2d] {
        harness.dev.copy_h2d(stream, harness.host.slice(0, big.bytes()), big)?;
        harness.dev.record(event, stream)?;
        harness.dev.wait(Stream::Compute, event)?;
        harness.dev.synchronize(event)?;
        require(harness.dev.is_done(event)?, || "an event is not done after the driver has waited for it".into())?;
    }
    require(harness.dev.waited_ns() >= waited, || "time waited went backwards".into())?;
    Ok(0.0)
}

/// A number passes from the host through all three streams and back, in memory that every round reuses. The driver waits only at the end,
/// so a missing wait passes on an earlier or later number.
fn relay(bench: &mut Bench, _: &mut Random) -> Outcome {
    let harness = &mut bench.subject;
    let bytes = 4 * BATON;
    let host = harness.host;
    let numbers = |round: usize| host.slice(2 * round * bytes, bytes);
    let results = |round: usize| host.slice((2 * round + 1) * bytes, bytes);
    for round in 0..ROUNDS {
        harness.memory.lend_mut(numbers(round)).fill(round as f32 + 1.0);
        harness.memory.lend_mut(results(round)).fill(f32::NAN);
    }
    let part = |i: usize, dtype| harness.device.view(4 * i * BATON, BATON, dtype);
    let (arrived, narrow, leaving) = (part(0, Dtype::Float32), part(1, Dtype::Bfloat16), part(2, Dtype::Float32));
    let [sent, calculated, fetched] = [harness.dev.event()?, harness.dev.event()?, harness.dev.event()?];
    let mut round = |round: usize| -> Result<()> {
        let dev = &mut harness.dev;
        dev.wait(Stream::H2d, calculated)?;
        dev.copy_h2d(Stream::H2d, numbers(round), arrived)?;
        dev.record(sent, Stream::H2d)?;
        dev.wait(Stream::Compute, sent)?;
        dev.launch(Cast { stream: Stream::Compute, src: arrived, dst: narrow })?;
        dev.wait(Stream::Compute, fetched)?;
        dev.launch(Cast { stream: Stream::Compute, src: narrow, dst: leaving })?;
        dev.record(calculated, Stream::Compute)?;
        dev.wait(Stream::D2h, calculated)?;
        dev.copy_d2h(Stream::D2h, leaving, results(round))?;
        dev.record(fetched, Stream::D2h)
    };
    (0..ROUNDS).try_for_each(&mut round)?;
    harness.dev.synchronize(fetched)?;
    for round in 0..ROUNDS {
        let wrong = harness.memory.lend::<f32>(results(round)).iter().find(|&&x| x != round as f32 + 1.0);
        require(wrong.is_none(), || format!("round {} of {ROUNDS} brought {wrong:?}", round + 1))?;
    }
    Ok(0.0)
}
