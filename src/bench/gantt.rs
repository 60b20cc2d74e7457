//! A step as a text picture: how busy each track was, from left to right.

use crate::trace::{Recorder, Span};
use std::fmt;
use std::ops::Range;

/// Columns of the picture.
const COLUMNS: usize = 96;
/// Shades for a column that is idle, busy up to a third, up to 90 %, and fully busy.
const SHADES: [char; 4] = [' ', '░', '▒', '█'];
/// Spans that are waits, not work. On the driver's track a wait means that the device was idle.
const WAITS: [&str; 1] = ["wait"];

/// One row for each track.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gantt {
    span_ns: u64,
    rows: Vec<(String, String, u64)>,
}

impl Gantt {
    /// Draws how busy each of `tracks` was in `window_ns`. The driver's own track is left out.
    pub(crate) fn new(tracks: &[Recorder], window_ns: Range<u64>) -> Self {
        let shown = tracks.iter().filter(|track| track.track != "driver");
        let rows = shown.map(|track| {
            let busy = busy_ns(track.spans().iter(), &window_ns);
            let row = busy.iter().map(|fraction| shade(*fraction)).collect();
            let column_ns = (window_ns.end - window_ns.start) as f64 / COLUMNS as f64;
            (track.track.clone(), row, (busy.iter().sum::<f64>() * column_ns) as u64)
        });
        Self { rows: rows.collect(), span_ns: window_ns.end - window_ns.start }
    }
}

/// The fraction of each column's time that spans cover.
fn busy_ns<'a>(spans: impl Iterator<Item = &'a Span>, window_ns: &Range<u64>) -> [f64; COLUMNS] {
    let column_ns = ((window_ns.end - window_ns.start) as f64 / COLUMNS as f64).max(1.0);
    let mut busy = [0.0; COLUMNS];
    for span in spans.filter(|span| !WAITS.contains(&span.name)) {
        let (start, end) = (span.start_ns.max(window_ns.start), (span.start_ns + span.duration_ns).min(window_ns.end));
        if start >= end {
            continue;
        }
        let at = |ns: u64| (ns - window_ns.start) as f64 / column_ns;
        let (from, to) = (at(start), at(end));
        for (column, busy) in busy.iter_mut().enumerate().take(to.ceil() as usize).skip(from as usize) {
            *busy += to.min(column as f64 + 1.0) - from.max(column as f64);
        }
    }
    busy
}

fn shade(fraction: f64) -> char {
    // 90 % counts as fully busy: rounding and the gaps between kernels take the rest.
    match fraction {
        s if s < 0.02 => SHADES[0],
        s if s < 0.34 => SHADES[1],
        s if s < 0.9 => SHADES[2],
        _ => SHADES[3],
    }
}

impl fmt::Display for Gantt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ms, width) = (self.span_ns as f64 / 1e6, COLUMNS - 6);
        write!(f, "  {:<8} 0 ms{:>width$.0} ms   busy", "", ms)?;
        for (track, row, busy_ns) in &self.rows {
            write!(f, "\n  {track:<8}|{row}| {:>6.1} %", *busy_ns as f64 / self.span_ns.max(1) as f64 * 1e2)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_when_its_track_was_busy() {
        let mut track = Recorder::new("d2h", 8);
        track.past_span("copy_d2h", 0, 1000, 480);
        track.past_span("wait", 0, 1480, 480);
        track.past_span("copy_d2h", 0, 1900, 1000);
        let gantt = Gantt::new(&[Recorder::new("driver", 0), track], 1000..1960);
        let (name, row, busy) = &gantt.rows[0];
        assert_eq!((gantt.rows.len(), name.as_str(), row.chars().count(), *busy), (1, "d2h", COLUMNS, 540));
        let row: Vec<char> = row.chars().collect();
        assert!(row[..48].iter().all(|c| *c == '█') && row[48..90].iter().all(|c| *c == ' ') && row[95] == '█', "{gantt}");
        assert!(gantt.to_string().contains("56.2 %"), "{gantt}");
    }
}
