//! Lines and markers.

use super::axis::{self, Axis};
use super::picture::{Anchor, GREY, PAPER, PagePoint, Picture};
use super::{Area, BODY, LEFT, RIGHT, colour_of, vertical_axis};
use crate::config::{Marker, Origin, Plot};
use crate::series::Curve;

/// Maximum number of points of a curve with markers.
const MARKED_MAX: usize = 60;
const RADIUS: f64 = 4.5;

/// Draws a line through the points of each curve that have an x, in order of x.
pub fn draw(picture: &mut Picture, curves: &[Curve], plot: &Plot, area: Area) {
    let (x, y) = axes(curves, plot, area);
    for tick in x.ticks() {
        picture.line(&[(x.place(tick), area.top), (x.place(tick), area.bottom)], GREY, 1.0);
        picture.text((x.place(tick), area.bottom + 14.0), axis::label(tick), BODY, Anchor::Middle);
    }
    vertical_axis(picture, &y, &plot.y, area);
    picture.text(((LEFT + RIGHT) / 2.0, area.bottom + 38.0), plot.x.clone(), BODY, Anchor::Middle);
    for curve in curves {
        let places = places(curve, (&x, &y));
        line(picture, curve, &places);
        if has_markers(curve) {
            places.iter().for_each(|place| marker(picture, *place, curve, places.len() > MARKED_MAX));
        }
    }
}

fn axes(curves: &[Curve], plot: &Plot, area: Area) -> (Axis, Axis) {
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let x = Axis::of(all().filter_map(|point| point.x), plot.log_x, LEFT, RIGHT);
    (x, Axis::of(all().map(|point| point.y), plot.log_y, area.bottom, area.top).up_to(plot.y_max))
}

fn places(curve: &Curve, (x, y): (&Axis, &Axis)) -> Vec<PagePoint> {
    let mut places: Vec<PagePoint> = curve.points.iter().filter_map(|point| Some((x.place(point.x?), y.place(point.y)))).collect();
    places.sort_by(|a, b| a.0.total_cmp(&b.0));
    places
}

/// Whether a curve has markers. Unconnected points always have them. On a line, markers show the measured points, unless there are too
/// many.
fn has_markers(curve: &Curve) -> bool {
    curve.origin != Origin::Model && (curve.scattered || curve.points.len() <= MARKED_MAX)
}

/// Names of curves that are invisible because later markers cover all their points.
pub fn hidden<'a>(curves: &'a [Curve], plot: &Plot, area: Area) -> Vec<&'a str> {
    let (x, y) = axes(curves, plot, area);
    let places: Vec<_> = curves.iter().map(|curve| places(curve, (&x, &y))).collect();
    let is_under = |index: usize, place: &PagePoint| {
        // A larger marker is seen around a smaller one.
        let is_over = |curve: &Curve| has_markers(curve) && form(curve.marker).1 >= form(curves[index].marker).1;
        let later = curves.iter().zip(&places).skip(index + 1).filter(|(curve, _)| is_over(curve));
        later.flat_map(|(_, places)| places).any(|other| (place.0 - other.0).hypot(place.1 - other.1) < RADIUS / 1.5)
    };
    let is_hidden = |(index, _): &(usize, &Curve)| places[*index].iter().all(|place| is_under(*index, place));
    curves.iter().enumerate().filter(is_hidden).map(|(_, curve)| curve.name.as_str()).collect()
}

/// Draws a sample of a curve for the legend.
pub fn sample(picture: &mut Picture, curve: &Curve, from: PagePoint, to: PagePoint) {
    line(picture, curve, &[from, to]);
    if has_markers(curve) {
        marker(picture, ((from.0 + to.0) / 2.0, from.1), curve, false);
    }
}

fn line(picture: &mut Picture, curve: &Curve, places: &[PagePoint]) {
    let dash = match curve.origin {
        Origin::Paper => 7.0,
        Origin::Simulated => 3.0,
        Origin::Model | Origin::Measured => 0.0,
    };
    if !curve.scattered && places.len() > 1 {
        picture.dashed(places, colour_of(curve), if curve.origin == Origin::Model { 1.0 } else { 2.0 }, dash);
    }
}

/// Draws a marker; the paper's markers are hollow.
fn marker(picture: &mut Picture, place: PagePoint, curve: &Curve, is_small: bool) {
    let (form, stretch) = form(curve.marker);
    let radius = stretch * if is_small { RADIUS / 1.8 } else { RADIUS };
    picture.polygon(place, radius, form, colour_of(curve));
    if curve.origin == Origin::Paper {
        picture.polygon(place, 0.6 * radius, form, PAPER);
    }
}

/// Corners and rotation of a marker, and its size in proportion to a circle.
fn form(marker: Marker) -> ((u32, f64), f64) {
    match marker {
        Marker::Circle => ((20, 0.0), 1.0),
        Marker::Square => ((4, 0.0), 1.3),
        Marker::Triangle => ((3, 0.0), 1.5),
        Marker::Diamond => ((4, 0.5), 1.6),
    }
}
