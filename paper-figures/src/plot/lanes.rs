//! Timelines: a panel for each series, a lane for each stream, a box for each span.

use super::axis::{self, Axis};
use super::picture::{Anchor, Colour, GREY, INK, PAPER, Picture, colour, tint};
use super::{BODY, BOTTOM, RIGHT, TOP, below};
use crate::config::Origin;
use crate::error::Result;
use crate::figure::Figure;
use crate::lines;
use crate::series;
use crate::timeline::{self, Span};
use serde_json::Value;

/// Room for the lanes' names.
const LEFT: f64 = 120.0;
/// Room above a panel for its name and below it for its ticks.
const HEAD: f64 = 22.0;
const FOOT: f64 = 22.0;
/// Kinds of spans, each with the colour of its place; any other one is as the last.
const KINDS: [&str; 10] =
    ["forward", "backward", "gradients", "weights", "speculate", "step", "commit", "restore", "validate", "step on the device"];

/// What one panel shows.
pub struct Panel {
    name: String,
    origin: Origin,
    lanes: Vec<(String, Vec<Span>)>,
}

/// The panels of a figure: the last line of each series, or the paper's drawing from `expected.csv`.
///
/// # Errors
/// When data cannot be read.
pub fn panels(figure: &Figure) -> Result<Vec<Panel>> {
    let mut panels = Vec::new();
    for series in &figure.config.series {
        let found = series::lines(figure, series)?;
        let lanes = match series.origin {
            Origin::Paper => drawn(&found),
            _ => found.last().and_then(|line| lines::field(line, &series.y)).map(timeline::lanes).unwrap_or_default(),
        };
        if !lanes.is_empty() {
            panels.push(Panel { name: series.name.clone(), origin: series.origin, lanes });
        }
    }
    Ok(panels)
}

/// Rows of `lane`, `kind`, `start` and `end`, in units of the drawing; one that lacks any of them draws nothing.
fn drawn(rows: &[Value]) -> Vec<(String, Vec<Span>)> {
    let mut lanes: Vec<(String, Vec<Span>)> = Vec::new();
    for row in rows {
        let (Some(lane), Some(kind)) = (row["lane"].as_str(), row["kind"].as_str()) else { continue };
        let (Some(start_ms), Some(end_ms)) = (row["start"].as_f64(), row["end"].as_f64()) else { continue };
        let span = Span { kind: kind.into(), start_ms, end_ms };
        match lanes.iter_mut().find(|(name, _)| name == lane) {
            Some((_, spans)) => spans.push(span),
            None => lanes.push((lane.into(), vec![span])),
        }
    }
    lanes
}

/// Panels from top to bottom, each with its own time.
pub fn draw(picture: &mut Picture, panels: &[Panel], unit: &str) {
    let mut kinds: Vec<&str> = Vec::new();
    for span in panels.iter().flat_map(|panel| &panel.lanes).flat_map(|(_, spans)| spans) {
        if !kinds.contains(&span.kind.as_str()) {
            kinds.push(&span.kind);
        }
    }
    let room = (BOTTOM + below() - 24.0 - (TOP - HEAD)) / panels.len().max(1) as f64;
    for (index, panel) in panels.iter().enumerate() {
        let top = TOP - HEAD + index as f64 * room;
        draw_panel(picture, panel, top, room, unit);
    }
    for (index, kind) in kinds.iter().enumerate() {
        let y = TOP + 8.0 + 24.0 * index as f64;
        picture.rectangle((RIGHT + 58.0, y - 7.0), (RIGHT + 84.0, y + 7.0), colour_of(kind));
        picture.text((RIGHT + 92.0, y), *kind, BODY - 1.0, Anchor::Start);
    }
}

fn draw_panel(picture: &mut Picture, panel: &Panel, top: f64, room: f64, unit: &str) {
    let right = RIGHT + 40.0;
    let spans = || panel.lanes.iter().flat_map(|(_, spans)| spans);
    let time = Axis::of(spans().map(|span| span.end_ms), false, LEFT, right);
    picture.text((20.0, top + HEAD / 2.0), panel.name.clone(), BODY, Anchor::Start);
    let height = (room - HEAD - FOOT) / panel.lanes.len().max(1) as f64;
    for (index, (lane, spans)) in panel.lanes.iter().enumerate() {
        let y = top + HEAD + index as f64 * height;
        picture.rectangle((LEFT, y + 2.0), (right, y + height - 2.0), tint(GREY, 0.35));
        picture.text((LEFT - 8.0, y + height / 2.0), lane.clone(), BODY - 2.0, Anchor::End);
        for span in spans {
            let corners =
                ((time.place(span.start_ms), y + 2.0), (time.place(span.end_ms).max(time.place(span.start_ms) + 0.5), y + height - 2.0));
            draw_span(picture, corners, colour_of(&span.kind), panel.origin);
        }
    }
    let floor = top + room - FOOT;
    picture.line(&[(LEFT, floor), (right, floor)], INK, 1.0);
    let ticks = if panel.origin == Origin::Paper { Vec::new() } else { time.ticks() };
    for tick in ticks {
        picture.text((time.place(tick), floor + 10.0), format!("{} {unit}", axis::label(tick)), BODY - 3.0, Anchor::Middle);
    }
}

fn colour_of(kind: &str) -> Colour {
    colour(KINDS.iter().position(|known| *known == kind).unwrap_or(KINDS.len() - 1))
}

/// What the paper drew is outlined, what ran is full.
fn draw_span(picture: &mut Picture, (from, to): ((f64, f64), (f64, f64)), colour: Colour, origin: Origin) {
    if origin == Origin::Paper {
        picture.rectangle(from, to, tint(colour, 0.25));
        picture.outline(from, to, colour);
    } else {
        picture.rectangle(from, to, colour);
        picture.line(&[from, (from.0, to.1)], PAPER, 0.5);
    }
}
