//! A typical step of a run and the slowest one, from the timeline: utilization of each part of the machine over time.

use super::html::escape;
use crate::disk::Dir;
use crate::error::{Error, Result};
use crate::trace::STEP_SPAN;
use crate::trace::file::TRACE;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;

/// Lanes from top to bottom, with the prefixes of the tracks that each lane combines. In a run of several ranks, only the tracks of rank 0.
const LANES: [(&str, &[&str]); 3] =
    [("Compute", &["compute"]), ("Copies", &["d2h", "h2d", "reduce", "gather"]), ("Optimizer on the CPU", &["adam-"])];
const DRIVER: &str = "driver";
/// Number of time intervals in a step.
const PARTS: usize = 300;
/// Height of a lane in SVG units.
const HEIGHT: f64 = 100.0;
/// Length limit in bytes of a line. Longer lines are not from this program.
const LINE_BYTES_MAX: u64 = 4096;

/// A step and its utilization.
#[derive(Debug)]
pub(super) struct DrawnStep {
    pub(super) step: u64,
    pub(super) ms: f64,
    /// For each lane, the fraction of its tracks that was busy in each time interval.
    lanes: [Vec<f64>; 3],
}

/// A line of the timeline: the name of a track, or a span.
#[derive(Deserialize)]
struct TraceEvent {
    ph: String,
    name: String,
    tid: u64,
    /// Start in microseconds.
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: TraceArgs,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct TraceArgs {
    name: Option<String>,
    index: u64,
}

/// Result of a first pass over the timeline: tracks by number, and the time range of each step.
#[derive(Default)]
struct Outline {
    drivers: Vec<u64>,
    /// Index of the lane for each track.
    lanes: BTreeMap<u64, usize>,
    steps: Vec<(u64, Range<f64>)>,
    /// End of the compute stream's last span. A full track has no spans of later steps.
    until: f64,
}

impl DrawnStep {
    /// The typical and the slowest step in the timeline of the run in `dir`. Empty if the timeline has fewer than three steps. The first
    /// step is a warm-up and is not considered.
    ///
    /// # Errors
    /// `Io` if the timeline cannot be read, `Format` if it is not a regular file.
    pub(super) fn of_run(dir: &Dir) -> Result<Vec<Self>> {
        let mut outline = Outline::default();
        each_event(dir, |event| outline.add(event))?;
        let mut drawn = outline.typical_and_slowest();
        each_event(dir, |event| {
            let lane = outline.lanes.get(&event.tid).copied().filter(|_| event.ph == "X" && event.name != "wait");
            if let Some(lane) = lane {
                drawn.iter_mut().for_each(|(step, within)| step.add(lane, &event, within));
            }
        })?;
        let tracks = |lane: usize| outline.lanes.values().filter(|of| **of == lane).count().max(1) as f64;
        let shared = |mut step: Self| {
            for lane in 0..LANES.len() {
                step.lanes[lane].iter_mut().for_each(|busy| *busy = (*busy / tracks(lane)).min(1.0));
            }
            step
        };
        Ok(drawn.into_iter().map(|(step, _)| shared(step)).collect())
    }

    /// Adds the part of a span that lies within the step.
    fn add(&mut self, lane: usize, event: &TraceEvent, within: &Range<f64>) {
        let part = (within.end - within.start) / PARTS as f64;
        let at = |us: f64| ((us - within.start) / part).clamp(0.0, PARTS as f64);
        let (from, to) = (at(event.ts), at(event.ts + event.dur));
        for (busy, idx) in self.lanes[lane].iter_mut().zip(0..).skip(from as usize).take_while(|(_, idx)| f64::from(*idx) < to) {
            *busy += (to.min(f64::from(idx + 1)) - from.max(f64::from(idx))).max(0.0);
        }
    }

    /// Draws the step under the title `title`, one lane below another.
    pub(super) fn draw(&self, title: &str) -> String {
        let mut lanes = String::new();
        for (idx, ((name, _), busy)) in LANES.iter().zip(&self.lanes).enumerate() {
            let mean = 100.0 * busy.iter().sum::<f64>() / PARTS as f64;
            let heights: String = busy.iter().map(|busy| format!("V{:.0}h1", HEIGHT * (1.0 - busy))).collect();
            let _ = writeln!(
                lanes,
                "<p class=\"lane\">{name} <b>{mean:.0} % busy</b></p><svg class=\"lane\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" \
                 aria-label=\"{name}\" viewBox=\"0 0 {PARTS} {HEIGHT}\" preserveAspectRatio=\"none\" width=\"100%\" height=\"34\">\
                 <path class=\"p{idx}\" d=\"M0,{HEIGHT}{heights}V{HEIGHT}z\"/></svg>"
            );
        }
        let title = escape(format!("{title}: step {}, {:.1} ms", self.step, self.ms));
        format!("<figure><figcaption>{title}</figcaption>{lanes}</figure>\n")
    }
}

impl Outline {
    fn add(&mut self, event: TraceEvent) {
        match event.args.name {
            Some(track) if event.ph == "M" => {
                let track = track.strip_prefix("rank 0 ").unwrap_or(&track);
                let lane = LANES.iter().position(|(_, tracks)| tracks.iter().any(|begin| track.starts_with(begin)));
                if let Some(lane) = lane {
                    _ = self.lanes.insert(event.tid, lane);
                }
                self.drivers.extend((track == DRIVER).then_some(event.tid));
            }
            _ if event.ph == "X" && event.name == STEP_SPAN && self.drivers.contains(&event.tid) => {
                self.steps.push((event.args.index, event.ts..event.ts + event.dur));
            }
            _ if self.lanes.get(&event.tid) == Some(&0) => self.until = self.until.max(event.ts + event.dur),
            _ => {}
        }
    }

    fn typical_and_slowest(&self) -> Vec<(DrawnStep, Range<f64>)> {
        let is_whole = |(_, within): &&(u64, Range<f64>)| within.start < within.end && within.end <= self.until;
        let mut steps: Vec<_> = self.steps.iter().skip(1).filter(is_whole).collect();
        steps.sort_by(|(_, a), (_, b)| (a.end - a.start).total_cmp(&(b.end - b.start)));
        if steps.len() < 2 {
            return Vec::new();
        }
        let drawn = |(step, within): &(u64, Range<f64>)| {
            let lanes = std::array::from_fn(|_| vec![0.0; PARTS]);
            (DrawnStep { step: *step, ms: (within.end - within.start) / 1e3, lanes }, within.clone())
        };
        [steps[(steps.len() - 1) / 2], steps[steps.len() - 1]].map(drawn).into()
    }
}

/// Calls `each` with every event of the timeline. Other lines are skipped.
fn each_event(dir: &Dir, mut each: impl FnMut(TraceEvent)) -> Result<()> {
    let Some(file) = dir.open_log(TRACE.pattern)? else { return Ok(()) };
    let (mut lines, mut line) = (BufReader::new(file), Vec::new());
    let failed = |e| Error::io("read", dir.join(TRACE.pattern), e);
    loop {
        line.clear();
        if lines.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(failed)? == 0 {
            return Ok(());
        }
        let event = line.trim_ascii_end();
        let event = serde_json::from_slice::<TraceEvent>(event.strip_suffix(b",").unwrap_or(event));
        event.into_iter().filter(|event| event.ts.is_finite() && event.dur >= 0.0).for_each(&mut each);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Recorder, write_chrome};
    use std::fs;

    /// A recorder of a track with these spans: name, index, start and duration in microseconds.
    fn track(name: &str, spans: &[(&'static str, u32, u64, u64)]) -> Recorder {
        let mut track = Recorder::new(name, spans.len());
        spans.iter().for_each(|&(name, index, start, us)| track.past_span(name, index, 1000 * start, 1000 * us));
        track
    }

    fn drawn(tracks: &[Recorder]) -> Vec<DrawnStep> {
        let dir = tempfile::tempdir().unwrap();
        let mut text = Vec::new();
        write_chrome(&mut text, tracks).unwrap();
        fs::write(dir.path().join(TRACE.pattern), text).unwrap();
        DrawnStep::of_run(&Dir::open(dir.path()).unwrap()).unwrap()
    }

    #[test]
    fn the_typical_step_and_the_slowest_are_drawn_without_the_first() {
        let driver = track(
            "driver",
            &[("step", 1, 0, 9000), ("step", 2, 9000, 600), ("step", 3, 10_000, 900), ("step", 4, 11_000, 300), ("step", 5, 99_000, 5000)],
        );
        let compute =
            track("compute", &[("matmul", 0, 0, 9000), ("wait", 0, 9000, 600), ("matmul", 0, 10_000, 450), ("norm", 0, 11_000, 300)]);
        let adam = [track("adam-00", &[("step", 7, 9300, 150)]), track("adam-01", &[])];
        let steps = drawn(&[vec![driver, compute], adam.into()].concat());
        assert_eq!(steps.iter().map(|step| (step.step, step.ms)).collect::<Vec<_>>(), [(2, 0.6), (3, 0.9)]);
        let busy = |step: usize, lane: usize| steps[step].lanes[lane].iter().map(|fraction| (fraction * 100.0).round()).collect::<Vec<_>>();
        assert_eq!(busy(1, 0), [vec![100.0; 150], vec![0.0; 150]].concat());
        assert!(busy(0, 0).iter().all(|fraction| *fraction == 0.0), "waiting is not computing");
        assert_eq!(busy(0, 2), [vec![0.0; 150], vec![50.0; 75], vec![0.0; 75]].concat(), "one of two workers");
        let svg = steps[1].draw("Slowest");
        assert!(svg.contains("Slowest: step 3, 0.9 ms") && svg.contains("Compute <b>50 % busy</b>"), "{svg}");
    }

    #[test]
    fn few_steps_and_foreign_files_are_not_drawn() {
        assert!(drawn(&[track("driver", &[("step", 1, 0, 1), ("step", 2, 1, 1)]), track("compute", &[("matmul", 0, 0, 9)])]).is_empty());
        let dir = tempfile::tempdir().unwrap();
        let odd = [
            "{}".into(),
            "x".repeat(10_000),
            r#"{"ph":"X","name":"step","tid":-1}"#.into(),
            r#"{"ph":"M","name":"thread_name","tid":0,"args":{"name":"driver"}},"#.into(),
            r#"{"ph":"X","name":"step","tid":0,"ts":1e308,"dur":1e308},"#.into(),
            "\0".into(),
        ];
        fs::write(dir.path().join(TRACE.pattern), odd.join("\n")).unwrap();
        assert!(DrawnStep::of_run(&Dir::open(dir.path()).unwrap()).unwrap().is_empty());
        fs::remove_file(dir.path().join(TRACE.pattern)).unwrap();
        assert!(DrawnStep::of_run(&Dir::open(dir.path()).unwrap()).unwrap().is_empty());
    }
}
