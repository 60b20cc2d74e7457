//! Times of operations on the GPU, on the host's clock.
//!
//! Pairs of timed events surround operations. A pair is read when both events have passed. Its distance to a base event, whose host time is
//! known, turns it into a span. The number of pairs is fixed: when none is free, an operation gets no span and is counted as dropped.
//!
//! A separate track has the host's long calls, because a late enqueue leaves streams idle that wait for nothing else.

use super::driver::{RawEvent, RawStream};
use crate::device::Stream;
use crate::error::Result;
use crate::trace::{Recorder, now_ns};
use std::collections::VecDeque;
use std::mem;

/// Maximum pending pairs of events.
const PAIRS: usize = 4096;
/// Maximum pending pairs when only waits are timed, without tracing.
const WAIT_PAIRS: usize = 256;
/// Event distances are f32 milliseconds. The base moves forward before their resolution reaches a microsecond.
const REBASE_NS: u64 = 4_000_000_000;

/// Minimum duration of a call with a span, many times that of an enqueue; and the capacity of the track.
const LONG_CALL_NS: u64 = 100_000;
const LONG_CALLS: usize = 1 << 13;

/// A span that has begun, or nothing if it is not recorded.
#[derive(Clone, Copy)]
pub(super) struct Begun(Option<Open>);

#[derive(Clone, Copy)]
struct Open {
    pair: usize,
    stream: usize,
    name: &'static str,
    /// The cause, if the operation is a wait.
    awaited: Option<StreamWait>,
}

/// The cause of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamWait {
    /// Work of this device's other streams for this device alone.
    Own,
    /// A peer, or a stream that pulls from peers.
    Peers,
}

pub(super) struct Timeline {
    base: RawEvent,
    base_ns: u64,
    pairs: Vec<[RawEvent; 2]>,
    free: Vec<usize>,
    under_way: VecDeque<Open>,
    /// Indexed by stream.
    recorders: Vec<Recorder>,
    /// Long driver calls, and waits for room in the launch queues.
    calls: Recorder,
    trace_spans: usize,
    compute_waited_ns: u64,
    compute_waited_for_peers_ns: u64,
}

impl Timeline {
    pub(super) fn new(streams: &[RawStream], trace_spans: usize) -> Result<Self> {
        let count = if trace_spans > 0 { PAIRS } else { WAIT_PAIRS };
        let pairs = (0..count).map(|_| Ok([RawEvent::new(true)?, RawEvent::new(true)?])).collect::<Result<Vec<_>>>()?;
        let base = RawEvent::new(true)?;
        let base_ns = calibrate(&base, &streams[Stream::Compute as usize])?;
        Ok(Self {
            base,
            base_ns,
            free: (0..count).collect(),
            pairs,
            under_way: VecDeque::with_capacity(count),
            recorders: Stream::recorders(trace_spans).into(),
            calls: Recorder::new("calls", if trace_spans > 0 { LONG_CALLS } else { 0 }),
            trace_spans,
            compute_waited_ns: 0,
            compute_waited_for_peers_ns: 0,
        })
    }

    /// Adds a stream after the existing ones.
    pub(super) fn add(&mut self, stream: Stream) {
        self.recorders.push(Recorder::new(stream.name(), self.trace_spans));
    }

    fn records_all(&self) -> bool {
        self.trace_spans > 0
    }

    pub(super) fn begin(&mut self, raw: &RawStream, stream: Stream, name: &'static str) -> Result<Begun> {
        if self.records_all() { self.open(raw, stream, name, None) } else { Ok(Begun(None)) }
    }

    /// Records the call that began at `start_ns` and has just returned, if it was long.
    pub(super) fn called(&mut self, name: &'static str, start_ns: u64) {
        if self.records_all() && now_ns() - start_ns >= LONG_CALL_NS {
            self.calls.span(name, u32::MAX, start_ns);
        }
    }

    /// Begins the span of a wait. Waits of the compute stream are always timed, because step summaries report them.
    pub(super) fn begin_wait(&mut self, raw: &RawStream, stream: Stream, awaited: StreamWait) -> Result<Begun> {
        if self.records_all() || stream == Stream::Compute { self.open(raw, stream, "wait", Some(awaited)) } else { Ok(Begun(None)) }
    }

    fn open(&mut self, raw: &RawStream, stream: Stream, name: &'static str, awaited: Option<StreamWait>) -> Result<Begun> {
        if self.free.is_empty() {
            self.collect()?;
        }
        let Some(pair) = self.free.pop() else {
            self.recorders[stream as usize].drop_span();
            return Ok(Begun(None));
        };
        self.pairs[pair][0].record(raw)?;
        Ok(Begun(Some(Open { pair, stream: stream as usize, name, awaited })))
    }

    pub(super) fn end(&mut self, raw: &RawStream, begun: Begun) -> Result<()> {
        let Some(open) = begun.0 else { return Ok(()) };
        self.pairs[open.pair][1].record(raw)?;
        self.under_way.push_back(open);
        Ok(())
    }

    /// Reads the pairs that have passed, oldest first.
    pub(super) fn collect(&mut self) -> Result<()> {
        for _ in 0..self.under_way.len() {
            let Some(open) = self.under_way.pop_front() else { break };
            if !self.pairs[open.pair][1].is_done()? {
                // Pairs of other streams may have passed, but they can wait for the next call.
                self.under_way.push_front(open);
                break;
            }
            self.read(open)?;
        }
        Ok(())
    }

    fn read(&mut self, open: Open) -> Result<()> {
        let [start, end] = &self.pairs[open.pair];
        let duration_ns = end.ns_since(start)?.max(0).cast_unsigned();
        if let Some(awaited) = open.awaited.filter(|_| open.stream == Stream::Compute as usize) {
            self.compute_waited_ns += duration_ns;
            self.compute_waited_for_peers_ns += if awaited == StreamWait::Peers { duration_ns } else { 0 };
        }
        if self.records_all() {
            let start_ns = self.base_ns.saturating_add_signed(start.ns_since(&self.base)?);
            self.recorders[open.stream].past_span(open.name, u32::MAX, start_ns, duration_ns);
            if start_ns > self.base_ns + REBASE_NS {
                // A span of another stream that began earlier has a negative distance to the new base.
                mem::swap(&mut self.base, &mut self.pairs[open.pair][0]);
                self.base_ns = start_ns;
            }
        }
        self.free.push(open.pair);
        Ok(())
    }

    pub(super) fn waited_ns(&self) -> u64 {
        self.compute_waited_ns
    }

    /// The part of `waited_ns` that was spent on peers and on streams that pull from peers.
    pub(super) fn waited_for_peers_ns(&self) -> u64 {
        self.compute_waited_for_peers_ns
    }

    /// Returns the recorders, once all operations have run.
    pub(super) fn finish(&mut self) -> Vec<Recorder> {
        // Spans that can no longer be read are lost with the GPU.
        let _ = self.collect();
        // Pending spans have no track any more.
        self.under_way.clear();
        let calls = mem::take(&mut self.calls);
        let mut tracks = mem::take(&mut self.recorders);
        tracks.extend((!calls.spans().is_empty()).then_some(calls));
        tracks
    }
}

/// Records `base` on an idle stream and returns the host time at which it passed.
fn calibrate(base: &RawEvent, stream: &RawStream) -> Result<u64> {
    base.record(stream)?;
    base.synchronize()?;
    Ok(now_ns())
}
