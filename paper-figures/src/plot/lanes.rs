//! Timelines: a panel for each series, a lane for each stream, a box for each span.

use super::axis::{self, Axis};
use super::picture::{Anchor, Colour, GREY, HEIGHT, INK, PAPER, PagePoint, Picture, colour, tint};
use super::{BODY, RIGHT, TITLED, wrapped};
use crate::config::{Origin, Plot};
use crate::error::Result;
use crate::figure::Figure;
use crate::lines;
use crate::series;
use crate::timeline::{self, LaneSpan};
use serde_json::Value;

/// Left end of the panels, after the names of lanes, and right end.
const LEFT: f64 = 120.0;
const PANEL_RIGHT: f64 = RIGHT + 40.0;
/// Top of the first panel, and margin below the last one.
const TOP: f64 = TITLED + 14.0;
const BELOW: f64 = 24.0;
/// Maximum height of a panel. A page with few panels is shorter.
const HIGHEST: f64 = 165.0;
/// Space above a panel for its name, and below it for its ticks.
const HEAD: f64 = 22.0;
const FOOT: f64 = 22.0;
/// Kinds of spans; the index is the colour. Unknown kinds use the last colour.
const KINDS: [&str; 10] =
    ["forward", "backward", "gradients", "weights", "speculate", "step", "commit", "restore", "validate", "step on the device"];

/// Lanes of copies, and the largest gap between two copies that are drawn as one, as a fraction of the panel's time.
const LINKS: [&str; 2] = ["to the host", "to the device"];
const COPY_GAP_FRACTION: f64 = 1.0 / 100.0;
/// Note on the merged boxes.
const NOTE: &str = "Copies less than 1 % of a panel apart are one box: there the link is in use, not full.";

/// Content of a panel.
pub struct Panel {
    name: String,
    origin: Origin,
    lanes: Vec<(String, Vec<LaneSpan>)>,
}

impl Panel {
    /// End of the panel's last span.
    fn end_ms(&self) -> Option<f64> {
        self.lanes.iter().flat_map(|(_, spans)| spans).map(|span| span.end_ms).reduce(f64::max)
    }
}

/// The panels of a figure: the last line of each series, or the paper's timeline from `expected.csv`.
///
/// # Errors
/// Errors of reading data.
pub fn panels(figure: &Figure) -> Result<Vec<Panel>> {
    let mut panels = Vec::new();
    for series in &figure.config.series {
        let found = series::lines(figure, series)?;
        let lanes = match series.origin {
            Origin::Paper => drawn(&found),
            _ => found.last().and_then(|line| lines::field(line, &series.y)).map(timeline::lanes).map(joined).unwrap_or_default(),
        };
        if !lanes.is_empty() {
            panels.push(Panel { name: series.name.clone(), origin: series.origin, lanes });
        }
    }
    Ok(panels)
}

/// Merges copies that are close together.
fn joined(mut lanes: Vec<(String, Vec<LaneSpan>)>) -> Vec<(String, Vec<LaneSpan>)> {
    let end_ms = lanes.iter().flat_map(|(_, spans)| spans).map(|span| span.end_ms).fold(0.0, f64::max);
    for (_, spans) in lanes.iter_mut().filter(|(lane, _)| LINKS.contains(&lane.as_str())) {
        *spans = timeline::merged(std::mem::take(spans), COPY_GAP_FRACTION * end_ms);
    }
    lanes
}

/// Lanes from rows of `lane`, `kind`, `start` and `end` in units of the drawing. Skips incomplete rows.
fn drawn(rows: &[Value]) -> Vec<(String, Vec<LaneSpan>)> {
    let mut lanes: Vec<(String, Vec<LaneSpan>)> = Vec::new();
    for row in rows {
        let (Some(lane), Some(kind)) = (row["lane"].as_str(), row["kind"].as_str()) else { continue };
        let (Some(start_ms), Some(end_ms)) = (row["start"].as_f64(), row["end"].as_f64()) else { continue };
        let span = LaneSpan { kind: kind.into(), start_ms, end_ms };
        match lanes.iter_mut().find(|(name, _)| name == lane) {
            Some((_, spans)) => spans.push(span),
            None => lanes.push((lane.into(), vec![span])),
        }
    }
    lanes
}

/// Draws the panels from top to bottom, each with its own time scale unless the plot sets `one_scale`.
pub fn draw(picture: &mut Picture, panels: &[Panel], plot: &Plot) {
    let mut kinds: Vec<&str> = Vec::new();
    for span in panels.iter().flat_map(|panel| &panel.lanes).flat_map(|(_, spans)| spans) {
        if !kinds.contains(&span.kind.as_str()) {
            kinds.push(&span.kind);
        }
    }
    let panel_height = ((HEIGHT - BELOW - TOP) / panels.len().max(1) as f64).min(HIGHEST);
    picture.height = TOP + panel_height * panels.len().max(1) as f64 + BELOW;
    let longest_ms = panels.iter().filter_map(Panel::end_ms).reduce(f64::max).filter(|_| plot.one_scale);
    for (index, panel) in panels.iter().enumerate() {
        let end_ms = longest_ms.or(panel.end_ms());
        let time = Axis::of(end_ms.into_iter(), false, LEFT, PANEL_RIGHT).up_to(end_ms);
        draw_panel(picture, panel, (TOP + index as f64 * panel_height, panel_height), (&time, &plot.x));
    }
    let entries = kinds.iter().map(|kind| (colour_of(kind), *kind)).chain([(idle(), "idle: nothing runs")]);
    let mut at = (RIGHT + 58.0, TOP + HEAD + 8.0);
    for (colour, name) in entries {
        entry(picture, at, colour, name);
        at.1 += 24.0;
    }
    for line in wrapped(NOTE, 28) {
        at.1 += 17.0;
        picture.text(at, line, BODY - 2.0, Anchor::Start);
    }
}

/// Draws an entry of the legend.
fn entry(picture: &mut Picture, (left, y): PagePoint, colour: Colour, name: &str) {
    picture.rectangle((left, y - 7.0), (left + 26.0, y + 7.0), colour);
    picture.text((left + 34.0, y), name, BODY - 1.0, Anchor::Start);
}

/// Colour of a lane without boxes.
fn idle() -> Colour {
    tint(GREY, 0.35)
}

fn draw_panel(picture: &mut Picture, panel: &Panel, (top, panel_height): (f64, f64), (time, unit): (&Axis, &str)) {
    // The lane ends with its last span, because space after it would look like idle time.
    let right = panel.end_ms().map_or(PANEL_RIGHT, |end_ms| time.place(end_ms));
    picture.text((20.0, top + HEAD / 2.0), panel.name.clone(), BODY, Anchor::Start);
    let height = (panel_height - HEAD - FOOT) / panel.lanes.len().max(1) as f64;
    for (index, (lane, spans)) in panel.lanes.iter().enumerate() {
        let y = top + HEAD + index as f64 * height;
        picture.rectangle((LEFT, y + 2.0), (right, y + height - 2.0), idle());
        picture.text((LEFT - 8.0, y + height / 2.0), lane.clone(), BODY - 2.0, Anchor::End);
        for span in spans {
            let corners =
                ((time.place(span.start_ms), y + 2.0), (time.place(span.end_ms).max(time.place(span.start_ms) + 0.5), y + height - 2.0));
            draw_span(picture, corners, colour_of(&span.kind), panel.origin);
        }
    }
    let floor = top + panel_height - FOOT;
    picture.line(&[(LEFT, floor), (PANEL_RIGHT, floor)], INK, 1.0);
    let ticks = if panel.origin == Origin::Paper { Vec::new() } else { time.ticks() };
    for tick in ticks {
        picture.text((time.place(tick), floor + 10.0), format!("{} {unit}", axis::label(tick)), BODY - 3.0, Anchor::Middle);
    }
}

fn colour_of(kind: &str) -> Colour {
    colour(KINDS.iter().position(|known| *known == kind).unwrap_or(KINDS.len() - 1))
}

/// Draws a span: outlined for the paper, filled for our lines.
fn draw_span(picture: &mut Picture, (from, to): ((f64, f64), (f64, f64)), colour: Colour, origin: Origin) {
    if origin == Origin::Paper {
        picture.rectangle(from, to, tint(colour, 0.25));
        picture.outline(from, to, colour);
    } else {
        picture.rectangle(from, to, colour);
        picture.line(&[from, (from.0, to.1)], PAPER, 0.5);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_joined_alike_in_both_directions() {
        let spans = |ends: &[(f64, f64)]| {
            ends.iter().map(|&(start_ms, end_ms)| LaneSpan { kind: "weights".into(), start_ms, end_ms }).collect::<Vec<_>>()
        };
        let apart = [(0.0, 1.0), (1.9, 3.0), (50.0, 100.0)];
        let lanes = joined(["compute", "to the host", "to the device"].map(|lane| (lane.to_owned(), spans(&apart))).into());
        assert_eq!(lanes[0].1, spans(&apart), "a gap of the GPU is an idle GPU");
        assert!(lanes[1..].iter().all(|(_, joined)| *joined == spans(&[(0.0, 3.0), (50.0, 100.0)])), "{lanes:?}");
    }
}
