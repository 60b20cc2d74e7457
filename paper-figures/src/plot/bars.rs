//! Grouped bars.

use super::axis::{self, Axis};
use super::picture::{Anchor, INK, Picture};
use super::render::text_size;
use super::{Area, BODY, Frame, LEFT, RIGHT, bar, colour_of, vertical_axis, wrapped};
use crate::config::Plot;
use crate::series::{Curve, Point};

/// Fraction of a group's width that the bars of the fullest group fill.
const FILLED: f64 = 0.82;
const WIDEST: f64 = 70.0;
/// Height of the numbers above bars, in points.
const NUMBER: f64 = BODY - 4.0;
/// Approximate width of a character in a category's name, in points.
const CHAR: f64 = 7.0;
/// Half the width of a whisker's ends, in points.
const WHISKER: f64 = 3.0;
/// Minimum visible height of a bar, in points.
const SEEN: f64 = 1.5;

/// Draws one group per category of the frame, with one bar for each curve that has a point in it. All bars have the same width.
pub fn draw(picture: &mut Picture, frame: &Frame<'_>) {
    let (curves, plot, area) = (&frame.curves[..], frame.plot, frame.area);
    let y = axis(curves, plot, area);
    vertical_axis(picture, &y, &plot.y, area);
    let has_bars = |category: &&str| heights(curves, category).next().is_some();
    let categories: Vec<_> = frame.categories.iter().map(String::as_str).filter(has_bars).collect();
    let slot = (RIGHT - LEFT) / categories.len().max(1) as f64;
    let fullest = categories.iter().map(|category| heights(curves, category).count()).max().unwrap_or(1);
    let width = (slot * FILLED / fullest.max(1) as f64).min(WIDEST);
    let names: Vec<_> = categories.iter().map(|category| wrapped(category, ((slot / CHAR) as usize).max(4))).collect();
    for (index, (category, lines)) in categories.iter().zip(&names).enumerate() {
        let middle = LEFT + (index as f64 + 0.5) * slot;
        group(picture, heights(curves, category).collect(), (middle, width), &y);
        for (line, text) in lines.iter().enumerate() {
            picture.text((middle, area.bottom + 14.0 + 16.0 * line as f64), text, BODY - 1.0, Anchor::Middle);
        }
    }
    if has_numbers(curves, width) {
        numbers(picture, curves, &categories, (slot, width), &y);
    }
    let lines = names.iter().map(Vec::len).max().unwrap_or(0);
    picture.text(((LEFT + RIGHT) / 2.0, area.bottom + 16.0 + 16.0 * lines as f64), plot.x.clone(), BODY, Anchor::Middle);
}

fn axis(curves: &[Curve], plot: &Plot, area: Area) -> Axis {
    let heights = curves.iter().flat_map(|curve| curve.points.iter().map(top));
    Axis::of(heights, plot.log_y, area.bottom, area.top).up_to(plot.y_max)
}

/// Upper end of a bar and its whisker.
fn top(point: &Point) -> f64 {
    point.spread.map_or(point.y, |spread| spread.high)
}

/// The curves with a bar in a group, and the bars.
pub fn heights<'a>(curves: &'a [Curve], category: &'a str) -> impl Iterator<Item = (&'a Curve, &'a Point)> {
    let bar = move |curve: &'a Curve| curve.points.iter().find(|point| point.label == category);
    curves.iter().filter_map(move |curve| Some((curve, bar(curve)?)))
}

/// Left ends of the bars of a group, side by side, without gaps for missing curves.
fn lefts(count: usize, (middle, width): (f64, f64)) -> impl Iterator<Item = f64> {
    (0..count).map(move |place| middle + (place as f64 - count as f64 / 2.0) * width)
}

fn group(picture: &mut Picture, bars: Vec<(&Curve, &Point)>, (middle, width): (f64, f64), axis: &Axis) {
    for (left, (curve, point)) in lefts(bars.len(), (middle, width)).zip(bars) {
        if point.does_not_fit {
            for (line, word) in ["does", "not", "fit"].into_iter().enumerate() {
                picture.text((left + width / 2.0, axis.floor() - 36.0 + 13.0 * line as f64), word, NUMBER, Anchor::Middle);
            }
            continue;
        }
        bar(picture, (left + 1.0, axis.place(point.y)), (left + width - 1.0, axis.floor()), colour_of(curve), curve.origin);
        whisker(picture, point, left + width / 2.0, axis);
    }
    picture.line(&[(LEFT, axis.floor()), (RIGHT, axis.floor())], INK, 1.0);
}

/// Draws the range of several runs as a line with ends.
fn whisker(picture: &mut Picture, point: &Point, x: f64, axis: &Axis) {
    let Some(spread) = point.spread else { return };
    let (low, high) = (axis.place(spread.low), axis.place(spread.high));
    picture.line(&[(x, low), (x, high)], INK, 1.2);
    for y in [low, high] {
        picture.line(&[(x - WHISKER, y), (x + WHISKER, y)], INK, 1.2);
    }
}

/// Whether the bars of a frame have numbers. Either all have them or none, because a number wider than its bar would overlap the next one.
fn has_numbers(curves: &[Curve], width: f64) -> bool {
    let mut values = curves.iter().flat_map(|curve| &curve.points).map(|point| axis::label(point.y));
    values.all(|text| text_size(&text, NUMBER).0 <= width)
}

fn numbers(picture: &mut Picture, curves: &[Curve], categories: &[&str], (slot, width): (f64, f64), axis: &Axis) {
    for (index, category) in categories.iter().enumerate() {
        let bars: Vec<_> = heights(curves, category).collect();
        let placed = lefts(bars.len(), (LEFT + (index as f64 + 0.5) * slot, width)).zip(bars);
        for (left, (_, point)) in placed.filter(|(_, (_, point))| !point.does_not_fit) {
            picture.text((left + width / 2.0, axis.place(top(point)) - 8.0), axis::label(point.y), NUMBER, Anchor::Middle);
        }
    }
}

/// Categories in which a bar has no other bar to be compared with. A frame of one series compares its categories, and so does a frame that
/// says so.
pub fn alone<'a>(frame: &'a Frame<'_>) -> Vec<&'a str> {
    let bars = |category: &str| heights(&frame.curves, category).count();
    let categories = || frame.categories.iter().map(String::as_str).filter(|category| bars(category) > 0);
    match frame.curves.len() {
        count if (count == 1 || frame.plot.across) && categories().count() > 1 => Vec::new(),
        _ => categories().filter(|category| bars(category) == 1).collect(),
    }
}

/// Names of curves whose bars are all too low to be visible.
pub fn hidden<'a>(curves: &'a [Curve], plot: &Plot, area: Area) -> Vec<&'a str> {
    let axis = axis(curves, plot, area);
    let is_seen = |curve: &Curve| curve.points.iter().any(|point| axis.floor() - axis.place(point.y) >= SEEN);
    curves.iter().filter(|curve| !is_seen(curve)).map(|curve| curve.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::picture::Shape;
    use super::*;
    use crate::config::{Marker, Origin};
    use crate::series::Point;

    /// Widths of the bars, and the number of labels above them, for `count` series of which only the first has a bar in the second group.
    fn drawn(count: usize, y: f64) -> (Vec<f64>, usize) {
        let point = |label: &str| Point { label: label.into(), x: None, y, spread: None, does_not_fit: false };
        let curve = |index: usize| Curve {
            name: index.to_string(),
            origin: Origin::Measured,
            scattered: false,
            colour: index,
            shade: 1.0,
            marker: Marker::Circle,
            points: if index == 0 { vec![point("one"), point("two")] } else { vec![point("one")] },
        };
        let plot: Plot = toml::from_str("kind = \"bars\"\nx = \"x\"\n").unwrap();
        let categories = vec!["one".into(), "two".into()];
        let frame = Frame { plot: &plot, curves: (0..count).map(curve).collect(), categories, area: Area::of(0, 1) };
        let mut picture = Picture::default();
        draw(&mut picture, &frame);
        let widths = picture.shapes.iter().filter_map(|shape| match shape {
            Shape::Area { points, .. } => Some(points[1].0 - points[0].0),
            _ => None,
        });
        let numbers = picture.shapes.iter().filter(|shape| matches!(shape, Shape::Text { size, .. } if *size == NUMBER)).count();
        (widths.collect(), numbers)
    }

    #[test]
    fn bars_of_a_frame_are_as_wide_however_full_their_group_is() {
        let (widths, _) = drawn(4, 50.0);
        assert_eq!(widths.len(), 5);
        assert!(widths.iter().all(|width| (width - widths[0]).abs() < 1e-9), "{widths:?}");
    }

    #[test]
    fn numbers_that_are_wider_than_bars_are_left_out() {
        assert_eq!(drawn(13, 50.0).1, 14, "two digits fit");
        assert_eq!(drawn(13, 0.026).1, 0, "five characters do not");
    }
}
