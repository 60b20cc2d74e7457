//! Horizontal bars: one per series, with its name on the left and its numbers on the right.

use super::axis::{self, Axis};
use super::picture::{Anchor, INK, Picture};
use super::{BODY, TITLED, bar, colour_of};
use crate::config::Plot;
use crate::series::{Curve, Point};

/// Left end of the bars, right end of the longest bar, and right end of the second numbers.
const LEFT: f64 = 350.0;
const RIGHT: f64 = 780.0;
const SECOND: f64 = 936.0;
/// Top of the first row.
const TOP: f64 = TITLED + 52.0;
/// Heights of a row and of its bar, and the gap between rows of different colours.
const ROW: f64 = 30.0;
const BAR: f64 = 21.0;
const GAP: f64 = 8.0;
/// Half the height of a whisker's ends.
const WHISKER: f64 = 4.0;
/// Text size of the numbers, in points.
const NUMBER: f64 = BODY + 1.0;

/// Draws one row per series with a point, from top to bottom. The page ends below the last row.
pub fn draw(picture: &mut Picture, curves: &[Curve], plot: &Plot) {
    let rows: Vec<(&Curve, &Point)> = curves.iter().filter_map(|curve| Some((curve, curve.points.last()?))).collect();
    let ends = rows.iter().map(|(_, point)| point.spread.map_or(point.y, |spread| spread.high));
    let axis = Axis::of(ends, false, LEFT, RIGHT).up_to(plot.y_max);
    let gaps = |index: usize| rows[..=index].windows(2).filter(|pair| pair[0].0.colour != pair[1].0.colour).count();
    let top = |index: usize| TOP + index as f64 * ROW + gaps(index) as f64 * GAP;
    let bottom = rows.len().checked_sub(1).map_or(TOP, |last| top(last) + ROW);
    for (index, (curve, point)) in rows.iter().enumerate() {
        draw_row(picture, curve, point, top(index) + ROW / 2.0, &axis);
    }
    picture.line(&[(axis.floor(), TOP - 6.0), (axis.floor(), bottom)], INK, 1.0);
    picture.text((LEFT, TOP - 22.0), plot.y.clone(), BODY, Anchor::Start);
    picture.text((SECOND, TOP - 22.0), plot.x.clone(), BODY, Anchor::End);
    picture.height = bottom + 18.0;
}

fn draw_row(picture: &mut Picture, curve: &Curve, point: &Point, middle: f64, axis: &Axis) {
    let end = axis.place(point.y);
    bar(picture, (axis.floor(), middle - BAR / 2.0), (end, middle + BAR / 2.0), colour_of(curve), curve.origin);
    picture.text((LEFT - 10.0, middle), curve.name.clone(), BODY, Anchor::End);
    let mut right = end;
    let mut message = axis::label(point.y);
    if let Some(spread) = point.spread {
        let (low, high) = (axis.place(spread.low), axis.place(spread.high));
        picture.line(&[(low, middle), (high, middle)], INK, 1.2);
        for x in [low, high] {
            picture.line(&[(x, middle - WHISKER), (x, middle + WHISKER)], INK, 1.2);
        }
        right = right.max(high);
        message = format!("{message} ({} runs)", spread.runs);
    }
    picture.text((right + 8.0, middle), message, NUMBER, Anchor::Start);
    let second = point.x.map(|x| grouped(x.round() as i64)).unwrap_or_default();
    picture.text((SECOND, middle), second, BODY, Anchor::End);
}

/// Formats a number with commas between groups of three digits: `18,685`.
fn grouped(number: i64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().filter_map(|group| std::str::from_utf8(group).ok()).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::super::picture::Shape;
    use super::*;
    use crate::config::{Marker, Origin};

    #[test]
    fn bars_are_as_long_as_their_numbers_and_colours_stand_apart() {
        let curve = |(name, colour, y): (&str, usize, f64)| Curve {
            name: name.into(),
            origin: Origin::Measured,
            scattered: false,
            colour,
            shade: 1.0,
            marker: Marker::Circle,
            points: vec![Point { label: "W1".into(), x: Some(36.4 * y), y, spread: None, does_not_fit: false }],
        };
        let plot: Plot = toml::from_str("kind = \"rows\"\nx = \"tokens/s\"\ny = \"TFLOP/s\"\n").unwrap();
        let mut picture = Picture::default();
        draw(&mut picture, &[("a", 1, 100.0), ("b", 1, 200.0), ("c", 2, 500.0)].map(curve), &plot);
        let sides = |shape: &Shape| match shape {
            Shape::Area { points, .. } => Some((points[0].1, points[1].0 - points[0].0)),
            _ => None,
        };
        let bars: Vec<_> = picture.shapes.iter().filter_map(sides).collect();
        assert!((bars[2].1 / bars[0].1 - 5.0).abs() < 1e-9, "{bars:?}");
        assert!((bars[2].0 - bars[1].0 - (bars[1].0 - bars[0].0) - GAP).abs() < 1e-9, "{bars:?}");
        assert!(picture.shapes.iter().any(|shape| matches!(shape, Shape::Text { text, .. } if text == "18,200")));
        assert!(picture.height > bars[2].0);
    }
}
