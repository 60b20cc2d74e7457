//! Spans of time, with one recorder for each thread or stream, written at the end as a Chrome/Perfetto trace.
//!
//! A recorder belongs to one thread. Its memory is allocated at the start and never grows, so recording takes no lock. When it is full, new
//! spans replace the oldest, so that a timeline shows the last steps.

pub(crate) mod file;

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::time::Instant;

/// Largest number of spans in all, and on one track.
const SPANS_ALL: usize = 1 << 20;
const SPANS_MAX: usize = 1 << 16;

/// Room for spans on each of `tracks` tracks.
pub(crate) fn spans_per_track(tracks: usize) -> usize {
    (SPANS_ALL / tracks.max(1)).min(SPANS_MAX)
}

/// The clock of all traces: nanoseconds since the first call in this process.
pub(crate) fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Name of a step on a driver's track.
pub(crate) const STEP_SPAN: &str = "step";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Name of the kernel or protocol step.
    pub name: &'static str,
    /// Bucket, layer or step; `u32::MAX` when there is none.
    pub index: u32,
    /// Start on the trace's clock.
    pub start_ns: u64,
    pub duration_ns: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Recorder {
    /// Name shown beside the track: `compute`, `adam-03`.
    pub track: String,
    capacity: usize,
    spans: VecDeque<Span>,
    dropped: u64,
}

impl Recorder {
    /// A recorder with room for `capacity` spans. The memory is touched now, so that the resident set does not grow during a run.
    pub fn new(track: impl Into<String>, capacity: usize) -> Self {
        let mut spans = VecDeque::from(vec![Span::default(); capacity]);
        spans.clear();
        Self { track: track.into(), capacity, spans, dropped: 0 }
    }

    /// Records a span from `start_ns` until now.
    pub fn span(&mut self, name: &'static str, index: u32, start_ns: u64) {
        self.past_span(name, index, start_ns, now_ns().saturating_sub(start_ns));
    }

    /// Records a span with times converted from another clock.
    pub(crate) fn past_span(&mut self, name: &'static str, index: u32, start_ns: u64, duration_ns: u64) {
        if self.spans.len() == self.capacity {
            self.dropped += 1;
            // A recorder without room drops every span.
            if self.spans.pop_front().is_none() {
                return;
            }
        }
        self.spans.push_back(Span { name, index, start_ns, duration_ns });
    }

    /// Counts a span that could not be measured.
    #[cfg(feature = "cuda")]
    pub(crate) fn drop_span(&mut self) {
        self.dropped += 1;
    }

    /// Spans that were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The spans that were recorded last, in order.
    pub fn spans(&self) -> &VecDeque<Span> {
        &self.spans
    }
}

/// First bytes of every timeline; they identify a file as a timeline of this program.
pub(super) const HEAD: &str = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";

/// Writes the tracks as a Chrome trace (open it in ui.perfetto.dev).
pub(crate) fn write_chrome(out: &mut impl Write, tracks: &[Recorder]) -> io::Result<()> {
    write!(out, "{HEAD}")?;
    for (tid, track) in tracks.iter().enumerate() {
        let comma = if tid == 0 { "" } else { "," };
        write!(out, "{comma}\n{}", track_name(tid, &track.track))?;
        for span in &track.spans {
            write!(out, ",\n{}", span_event(tid, span))?;
        }
    }
    writeln!(out, "\n]}}")
}

fn track_name(tid: usize, name: &str) -> serde_json::Value {
    serde_json::json!({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}})
}

fn span_event(tid: usize, span: &Span) -> serde_json::Value {
    let (ts, dur) = (span.start_ns as f64 / 1e3, span.duration_ns as f64 / 1e3);
    let mut event = serde_json::json!({"ph": "X", "name": span.name, "pid": 1, "tid": tid, "ts": ts, "dur": dur});
    if span.index != u32::MAX {
        event["args"] = serde_json::json!({"index": span.index});
    }
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_json_with_a_name_for_every_track() {
        let mut compute = Recorder::new("compute", 8);
        compute.span("matmul", 3, now_ns());
        let mut off = Recorder::new("d2h", 0);
        off.span("copy", u32::MAX, now_ns());
        let mut text = vec![];
        write_chrome(&mut text, &[compute, off]).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let names: Vec<_> = json["traceEvents"].as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["thread_name", "matmul", "thread_name"]);
        assert_eq!(json["traceEvents"][1]["args"]["index"], 3);
    }

    #[test]
    fn a_full_recorder_keeps_the_last_spans_and_counts_the_others() {
        let mut r = Recorder::new("x", 3);
        let place = r.spans.as_slices().0.as_ptr();
        (0..3 + 5).for_each(|index| r.span("s", index, 0));
        assert_eq!((r.spans().iter().map(|span| span.index).collect::<Vec<_>>(), r.dropped()), (vec![5, 6, 7], 5));
        assert_eq!(r.spans.as_slices().0.as_ptr_range().start.wrapping_sub(2), place, "it did not grow");
        let mut none = Recorder::new("x", 0);
        none.span("s", 0, 0);
        assert_eq!((none.spans().len(), none.dropped()), (0, 1));
    }
}
