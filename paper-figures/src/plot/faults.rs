//! Finds problems in a picture's shapes that make it hard to read: series that look alike, legends of invisible series, and overlapping
//! texts.

use super::picture::{Anchor, Picture, Shape, WIDTH};
use super::{Frame, bars, curves, frames, picture, render};
use crate::config::Kind;
use crate::error::Result;
use crate::figure::Figure;
use crate::series::Curve;

/// Allowed overlap of two text boxes, in points. A box includes room for letters that its text may not contain.
const TOUCH: f64 = 2.0;

/// Returns a sentence for each problem of the figure's picture.
///
/// # Errors
/// Errors of reading data.
pub fn faults(figure: &Figure) -> Result<Vec<String>> {
    let mut faults = texts(&picture(figure)?);
    for frame in frames(figure)?.iter().filter(|frame| matches!(frame.plot.kind, Kind::Bars | Kind::Lines)) {
        faults.extend(alike(frame));
        let hidden = match frame.plot.kind {
            Kind::Bars => bars::hidden(&frame.curves, frame.plot, frame.area),
            _ => curves::hidden(&frame.curves, frame.plot, frame.area),
        };
        if frame.plot.kind == Kind::Bars {
            faults.extend(bars::alone(frame).iter().map(|place| format!("the bar at {place:?} stands alone: nothing is compared with it")));
        }
        faults.extend(hidden.iter().map(|name| format!("{name:?} has a legend and nothing that is seen")));
    }
    Ok(faults)
}

/// Pairs of series in one frame that look the same.
fn alike(frame: &Frame<'_>) -> Vec<String> {
    let look = |curve: &Curve| {
        let marker = (frame.plot.kind == Kind::Lines).then_some((curve.marker, curve.scattered));
        (super::colour_of(curve), curve.origin, marker)
    };
    let pairs = |index: usize| frame.curves[..index].iter().map(move |other| (other, &frame.curves[index]));
    let all = (0..frame.curves.len()).flat_map(pairs);
    all.filter(|(a, b)| look(a) == look(b)).map(|(a, b)| format!("{:?} and {:?} look the same", a.name, b.name)).collect()
}

/// Left, top, right, bottom.
type Sides = [f64; 4];

/// Texts that overlap or leave the page.
fn texts(picture: &Picture) -> Vec<String> {
    let texts: Vec<_> = picture.shapes.iter().filter_map(sides).collect();
    let mut faults = Vec::new();
    for (index, (text, sides)) in texts.iter().enumerate() {
        if sides[0] < 0.0 || sides[1] < 0.0 || sides[2] > WIDTH || sides[3] > picture.height {
            faults.push(format!("{text:?} leaves the page"));
        }
        let on = texts[..index].iter().filter(|(_, other)| overlap(sides, other));
        faults.extend(on.map(|(other, _)| format!("{text:?} lies on {other:?}")));
    }
    faults
}

fn sides(shape: &Shape) -> Option<(&str, Sides)> {
    let Shape::Text { at, text, size, anchor } = shape else { return None };
    let (width, height) = render::text_size(text, *size);
    let left = match anchor {
        Anchor::Start => at.0,
        Anchor::Middle => at.0 - width / 2.0,
        Anchor::End => at.0 - width,
    };
    (!text.is_empty()).then_some((text, [left, at.1 - height / 2.0, left + width, at.1 + height / 2.0]))
}

fn overlap(a: &Sides, b: &Sides) -> bool {
    (0..2).all(|side| a[side].max(b[side]) + TOUCH < a[side + 2].min(b[side + 2]))
}

#[cfg(test)]
mod tests {
    use super::super::Area;
    use super::*;
    use crate::config::{Marker, Origin, Plot};
    use crate::series::Point;

    fn curve(name: &str, marker: Marker, ys: [f64; 2]) -> Curve {
        let point =
            |(index, y): (usize, f64)| Point { label: index.to_string(), x: Some(index as f64), y, spread: None, does_not_fit: false };
        let points = ys.into_iter().enumerate().map(point).collect();
        Curve { name: name.into(), origin: Origin::Measured, scattered: false, colour: 0, shade: 1.0, marker, points }
    }

    fn plot(kind: &str) -> Plot {
        toml::from_str(&format!("kind = \"{kind}\"\nx = \"x\"\n")).unwrap()
    }

    #[test]
    fn series_of_one_look_are_faults() {
        let message = |kind, markers: [Marker; 2]| {
            let curves = vec![curve("a", markers[0], [1.0, 2.0]), curve("b", markers[1], [3.0, 4.0])];
            alike(&Frame { plot: &plot(kind), curves, categories: Vec::new(), area: Area::of(0, 1) })
        };
        assert_eq!(message("lines", [Marker::Circle; 2]), ["\"a\" and \"b\" look the same"]);
        assert_eq!(message("lines", [Marker::Circle, Marker::Diamond]), [""; 0]);
        assert_eq!(message("bars", [Marker::Circle, Marker::Diamond]).len(), 1, "bars have no markers");
    }

    #[test]
    fn a_bar_alone_is_a_fault() {
        let plot = plot("bars");
        let alone = |curves: Vec<Curve>, categories: &[&str]| {
            let categories = categories.iter().map(|&name| name.into()).collect();
            bars::alone(&Frame { plot: &plot, curves, categories, area: Area::of(0, 1) })
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>()
        };
        let curve = |name| curve(name, Marker::Circle, [1.0, 2.0]);
        let mut short = curve("b");
        short.points.truncate(1);
        assert_eq!(alone(vec![curve("a"), short.clone()], &["0", "1"]), ["1"]);
        assert_eq!(alone(vec![curve("a")], &["0", "1"]), [""; 0], "categories of one series are compared");
        assert_eq!(alone(vec![short], &["0"]), ["0"]);
    }

    #[test]
    fn a_legend_of_what_is_not_seen_is_a_fault() {
        let (lines, bar, area) = (plot("lines"), plot("bars"), Area::of(0, 1));
        let below = |ys| [curve("a", Marker::Circle, [1.0, 2.0]), curve("b", Marker::Circle, ys)];
        assert_eq!(curves::hidden(&below([1.0, 2.001]), &lines, area), ["a"]);
        assert_eq!(curves::hidden(&below([1.0, 1.5]), &lines, area), [""; 0], "one of its points is seen");
        let under = [curve("a", Marker::Diamond, [1.0, 2.0]), curve("b", Marker::Circle, [1.0, 2.0])];
        assert_eq!(curves::hidden(&under, &lines, area), [""; 0], "corners of a diamond are seen around a circle");
        assert_eq!(bars::hidden(&below([1e-4, 1e-3]), &bar, area), ["b"]);
        assert_eq!(bars::hidden(&below([1e-4, 1.0]), &bar, area), [""; 0]);
    }

    #[test]
    fn texts_on_texts_and_beside_the_page_are_faults() {
        let mut picture = Picture::default();
        picture.text((100.0, 100.0), "0.026", 10.0, Anchor::Middle);
        picture.text((140.0, 100.0), "0.052", 10.0, Anchor::Middle);
        assert_eq!(texts(&picture), [""; 0]);
        picture.text((148.0, 102.0), "0.049", 10.0, Anchor::Middle);
        picture.text((100.0, picture.height), "below", 10.0, Anchor::Start);
        assert_eq!(texts(&picture), ["\"0.049\" lies on \"0.052\"", "\"below\" leaves the page"]);
    }
}
