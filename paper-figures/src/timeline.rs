//! Two steps of a trace as lanes with a few hundred spans, and the fraction of the optimizer's work that overlaps the backward pass.
//!
//! A trace has a track for each stream and each thread, with a span for every kernel. A step begins with the `embed` kernel; its backward
//! pass begins with the loss. Spans of one kind with gaps of at most 1/400 of the window are merged.

use crate::error::{Error, Result};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Name of a plan change on the driver's track.
const REPLAN: &str = "replan";
/// First kernels of a step and of its backward pass.
const STEP: &str = "embed";
const BACKWARD: &str = "cross_entropy_grad";
/// Number of steps to draw.
const STEPS: usize = 2;
/// Largest gap between merged spans, as a fraction of the window.
const GAP_FRACTION: f64 = 1.0 / 400.0;
/// Lanes from top to bottom, and the prefix of the tracks that each lane merges.
const LANES: [(&str, &str); 4] = [("compute", "compute"), ("to the host", "d2h"), ("optimizer", "adam"), ("to the device", "h2d")];

#[derive(Deserialize)]
struct Trace {
    #[serde(rename = "traceEvents")]
    events: Vec<TraceEvent>,
}

#[derive(Clone, Deserialize)]
struct TraceEvent {
    ph: String,
    name: String,
    tid: u64,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: TraceArgs,
}

#[derive(Clone, Default, Deserialize)]
struct TraceArgs {
    name: Option<String>,
}

/// A span, in milliseconds from the start of the window.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneSpan {
    /// Kind, which selects the colour.
    pub kind: String,
    /// Start time.
    pub start_ms: f64,
    /// End time.
    pub end_ms: f64,
}

/// The last complete steps of the trace at `path`: `{"ms", "optimizer_share_in_backward", "lanes"}`.
///
/// # Errors
/// An error if the file is not a trace or contains too few steps.
pub fn read(path: &Path) -> Result<Value> {
    of(&events(path)?).map_err(|cause| Error::Format { path: path.into(), cause })
}

/// The last complete steps of each plan of a run, in the order of the plans. A run changes its plan between two steps.
///
/// # Errors
/// Errors of [`read`]; each plan needs enough steps.
pub fn of_each_plan(path: &Path) -> Result<Vec<Value>> {
    let timelines = each_plan(events(path)?).into_iter().map(|events| of(&events));
    timelines.collect::<std::result::Result<_, _>>().map_err(|cause| Error::Format { path: path.into(), cause })
}

fn events(path: &Path) -> Result<Vec<TraceEvent>> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let trace: Trace = serde_json::from_str(&text).map_err(|error| Error::Format { path: path.into(), cause: error.to_string() })?;
    Ok(trace.events)
}

/// Splits the events at changes of plan. Each part includes the names of all tracks.
fn each_plan(mut events: Vec<TraceEvent>) -> Vec<Vec<TraceEvent>> {
    events.sort_by(|a, b| a.ts.total_cmp(&b.ts));
    let (names, spans): (Vec<_>, Vec<_>) = events.into_iter().partition(|event| event.ph == "M");
    let plans = spans.split(|event| event.name == REPLAN);
    plans.map(|spans| [&names[..], spans].concat()).collect()
}

fn of(events: &[TraceEvent]) -> std::result::Result<Value, String> {
    let name = |event: &TraceEvent| event.args.name.clone().map(|name| (event.tid, name));
    let tracks: BTreeMap<u64, String> = events.iter().filter(|event| event.ph == "M").filter_map(name).collect();
    let spans = |prefix: &str| -> Vec<&TraceEvent> {
        let is_of = |event: &&TraceEvent| event.ph == "X" && tracks.get(&event.tid).is_some_and(|track| track.starts_with(prefix));
        let mut spans: Vec<_> = events.iter().filter(is_of).filter(|event| event.name != "wait").collect();
        spans.sort_by(|a, b| a.ts.total_cmp(&b.ts));
        spans
    };
    let compute = spans("compute");
    let starts = |name: &str| -> Vec<f64> { compute.iter().filter(|event| event.name == name).map(|event| event.ts).collect() };
    let steps = starts(STEP);
    let Some(first) = steps.len().checked_sub(STEPS + 1) else {
        return Err(format!("{} steps; {STEPS} and the begin of another are needed", steps.len()));
    };
    let (from, to) = (steps[first], steps[first + STEPS]);
    let backwards = starts(BACKWARD);
    let lanes = LANES.map(|(lane, track)| {
        let inside = spans(track).into_iter().filter(|event| (from..to).contains(&event.ts));
        let span = |event: &TraceEvent| {
            let kind = if lane == "compute" { phase(&steps, &backwards, event) } else { kind(&event.name) };
            LaneSpan { kind: kind.into(), start_ms: (event.ts - from) / 1e3, end_ms: ((event.ts + event.dur).min(to) - from) / 1e3 }
        };
        (lane, merged(inside.map(span).collect(), (to - from) / 1e3 * GAP_FRACTION))
    });
    Ok(json!({
        "ms": rounded((to - from) / 1e3),
        "optimizer_share_in_backward": fraction_in_backward(&lanes[0].1, &lanes[2].1),
        "lanes": lanes.map(|(lane, spans)| json!({"lane": lane, "spans": spans.iter().map(LaneSpan::json).collect::<Vec<_>>()})),
    }))
}

/// Phase of the step to which a kernel of the compute stream belongs.
fn phase<'a>(steps: &[f64], backwards: &[f64], event: &TraceEvent) -> &'a str {
    let last = |starts: &[f64]| starts.iter().rev().find(|&&start| start <= event.ts).copied().unwrap_or(f64::NEG_INFINITY);
    match event.name.as_str() {
        "adam_step" => "step on the device",
        _ if last(backwards) > last(steps) => "backward",
        _ => "forward",
    }
}

/// Kind of a span of the pool or of a copy.
fn kind(name: &str) -> &str {
    match name {
        "commit_then_speculate" | "speculate" => "speculate",
        "copy_d2h" => "gradients",
        "copy_h2d" => "weights",
        name => name,
    }
}

/// Merges spans of one kind that overlap or nearly touch. A span that begins inside another kind's span is cut to begin at its end.
pub fn merged(spans: Vec<LaneSpan>, gap_ms: f64) -> Vec<LaneSpan> {
    let mut merged: Vec<LaneSpan> = Vec::new();
    for mut span in spans {
        match merged.last_mut() {
            Some(last) if last.kind == span.kind && span.start_ms <= last.end_ms + gap_ms => last.end_ms = last.end_ms.max(span.end_ms),
            last => {
                span.start_ms = span.start_ms.max(last.map_or(0.0, |last| last.end_ms));
                merged.extend(Some(span).filter(|span| span.end_ms > span.start_ms));
            }
        }
    }
    merged
}

/// Fraction of the pool's time that overlaps backward passes.
fn fraction_in_backward(compute: &[LaneSpan], pool: &[LaneSpan]) -> f64 {
    let backward: Vec<_> = compute.iter().filter(|span| span.kind == "backward").collect();
    let overlap = |span: &LaneSpan| -> f64 {
        backward.iter().map(|under| (span.end_ms.min(under.end_ms) - span.start_ms.max(under.start_ms)).max(0.0)).sum()
    };
    let (hidden, all) = pool.iter().fold((0.0, 0.0), |(hidden, all), span| (hidden + overlap(span), all + span.end_ms - span.start_ms));
    if all > 0.0 { rounded(hidden / all) } else { 0.0 }
}

impl LaneSpan {
    fn json(&self) -> Value {
        json!([self.kind, rounded(self.start_ms), rounded(self.end_ms)])
    }

    fn parse(value: &Value) -> Option<Self> {
        Some(Self { kind: value.get(0)?.as_str()?.into(), start_ms: value.get(1)?.as_f64()?, end_ms: value.get(2)?.as_f64()? })
    }
}

/// The lanes of a line's timeline, from top to bottom.
pub fn lanes(timeline: &Value) -> Vec<(String, Vec<LaneSpan>)> {
    let lane =
        |lane: &Value| Some((lane["lane"].as_str()?.to_owned(), lane["spans"].as_array()?.iter().filter_map(LaneSpan::parse).collect()));
    timeline["lanes"].as_array().into_iter().flatten().filter_map(lane).collect()
}

/// Rounds to microseconds.
fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(tid: u64, name: &str, ts: f64, dur: f64) -> TraceEvent {
        TraceEvent { ph: "X".into(), name: name.into(), tid, ts, dur, args: TraceArgs::default() }
    }

    /// Steps of 10 ms: 4 ms forward and 4 ms backward. The pool works for 2 ms from `pool_us` on.
    fn trace(steps: u32, pool_us: f64) -> Vec<TraceEvent> {
        let mut events = Vec::new();
        for (tid, name) in ["compute", "adam-00", "d2h"].into_iter().enumerate() {
            let args = TraceArgs { name: Some(name.into()) };
            events.push(TraceEvent { ph: "M".into(), name: "thread_name".into(), tid: tid as u64, ts: 0.0, dur: 0.0, args });
        }
        for step in 0..steps {
            let start = f64::from(step) * 10e3;
            for (name, at, us) in [("embed", 0.0, 1e3), ("matmul", 1e3, 3e3), ("cross_entropy_grad", 4e3, 1e3), ("matmul", 5e3, 3e3)] {
                events.push(event(0, name, start + at, us));
            }
            events.push(event(1, "speculate", start + pool_us, 2e3));
            events.push(event(2, "wait", start, 1e3));
        }
        events
    }

    #[test]
    fn two_whole_steps_become_lanes() {
        let timeline = of(&trace(4, 7e3)).unwrap();
        assert_eq!(timeline["ms"], 20.0);
        let lanes = lanes(&timeline);
        let spans: Vec<_> = lanes[0].1.iter().map(|span| (span.kind.as_str(), span.start_ms, span.end_ms)).collect();
        assert_eq!(spans, [("forward", 0.0, 4.0), ("backward", 4.0, 8.0), ("forward", 10.0, 14.0), ("backward", 14.0, 18.0)]);
        assert!(lanes[1].1.is_empty(), "waiting is not copying");
        assert_eq!(timeline["optimizer_share_in_backward"], 0.5);
        assert_eq!(of(&trace(4, 8e3)).unwrap()["optimizer_share_in_backward"], 0.0);
    }

    #[test]
    fn each_plan_has_its_own_steps() {
        let change = event(0, REPLAN, 40e3, 5e3);
        let later = trace(3, 8e3).into_iter().skip(3).map(|event| TraceEvent { ts: event.ts + 45e3, ..event });
        let plans = each_plan(trace(4, 7e3).into_iter().chain([change]).chain(later).collect());
        let fractions: Vec<_> = plans.iter().map(|events| of(events).unwrap()["optimizer_share_in_backward"].clone()).collect();
        assert_eq!(fractions, [0.5, 0.0]);
    }

    #[test]
    fn too_few_steps_are_an_error() {
        assert_eq!(of(&trace(2, 0.0)).unwrap_err(), "2 steps; 2 and the begin of another are needed");
        assert!(of(&[]).is_err());
    }
}
