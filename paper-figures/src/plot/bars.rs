//! Groups of bars.

use super::axis::{self, Axis};
use super::picture::{Anchor, INK, Picture, colour};
use super::{BODY, BOTTOM, LEFT, RIGHT, TOP, bar, below, vertical_axis, wrapped};
use crate::config::Plot;
use crate::series::Curve;

/// Share of a group's room that its bars take.
const FILLED: f64 = 0.82;
/// Narrowest bar that has its height written above it, in points.
const NUMBERED: f64 = 17.0;
/// Width of a character of the categories' names, about, in points.
const CHAR: f64 = 7.0;

/// A group for each category, in order of appearance; a bar for each curve that has a point there.
pub fn draw(picture: &mut Picture, curves: &[Curve], plot: &Plot) {
    let y = Axis::of(curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.y)), plot.log_y, BOTTOM, TOP);
    vertical_axis(picture, &y, &plot.y);
    let categories = categories(curves);
    let room = (RIGHT - LEFT) / categories.len().max(1) as f64;
    for (index, category) in categories.iter().enumerate() {
        let middle = LEFT + (index as f64 + 0.5) * room;
        group(picture, curves, category, middle, room, &y);
        for (line, text) in wrapped(category, ((room / CHAR) as usize).max(4)).iter().enumerate() {
            picture.text((middle, BOTTOM + 14.0 + 16.0 * line as f64), text, BODY - 1.0, Anchor::Middle);
        }
    }
    picture.line(&[(LEFT, BOTTOM), (RIGHT, BOTTOM)], INK, 1.0);
    picture.text(((LEFT + RIGHT) / 2.0, BOTTOM + below() - 12.0), plot.x.clone(), BODY, Anchor::Middle);
}

/// Bars side by side, without gaps for curves that have none here.
fn group(picture: &mut Picture, curves: &[Curve], category: &str, middle: f64, room: f64, axis: &Axis) {
    let height = |curve: &Curve| curve.points.iter().find(|point| point.label == category).map(|point| point.y);
    let bars: Vec<_> = curves.iter().filter_map(|curve| Some((curve, height(curve)?))).collect();
    let width = (room * FILLED / bars.len().max(1) as f64).min(70.0);
    for (place, (curve, value)) in bars.iter().enumerate() {
        let left = middle + (place as f64 - bars.len() as f64 / 2.0) * width;
        bar(picture, (left + 1.0, axis.place(*value)), (left + width - 1.0, axis.floor()), colour(curve.colour), curve.origin);
        if width >= NUMBERED {
            picture.text((left + width / 2.0, axis.place(*value) - 8.0), axis::label(*value), BODY - 4.0, Anchor::Middle);
        }
    }
}

fn categories(curves: &[Curve]) -> Vec<&str> {
    let mut categories = Vec::new();
    for point in curves.iter().flat_map(|curve| &curve.points) {
        if !categories.contains(&point.label.as_str()) {
            categories.push(point.label.as_str());
        }
    }
    categories
}
