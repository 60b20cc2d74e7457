//! Lines and markers.

use super::axis::{self, Axis};
use super::picture::{Anchor, GREY, PAPER, Picture, Place, colour};
use super::{BODY, BOTTOM, LEFT, RIGHT, TOP, below, vertical_axis};
use crate::config::{Origin, Plot};
use crate::series::Curve;

/// Points above which a curve is drawn without markers.
const MARKED_MAX: usize = 60;
const RADIUS: f64 = 4.5;

/// A line through the points of each curve that have a place, in order of place.
pub fn draw(picture: &mut Picture, curves: &[Curve], plot: &Plot) {
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let x = Axis::of(all().filter_map(|point| point.x), plot.log_x, LEFT, RIGHT);
    let y = Axis::of(all().map(|point| point.y), plot.log_y, BOTTOM, TOP);
    for tick in x.ticks() {
        picture.line(&[(x.place(tick), TOP), (x.place(tick), BOTTOM)], GREY, 1.0);
        picture.text((x.place(tick), BOTTOM + 14.0), axis::label(tick), BODY, Anchor::Middle);
    }
    vertical_axis(picture, &y, &plot.y);
    picture.text(((LEFT + RIGHT) / 2.0, BOTTOM + below() - 24.0), plot.x.clone(), BODY, Anchor::Middle);
    for curve in curves {
        let mut places: Vec<Place> = curve.points.iter().filter_map(|point| Some((x.place(point.x?), y.place(point.y)))).collect();
        places.sort_by(|a, b| a.0.total_cmp(&b.0));
        line(picture, curve, &places);
        let is_crowded = places.len() > MARKED_MAX;
        if curve.scattered || !is_crowded {
            places.iter().for_each(|place| marker(picture, *place, curve, is_crowded));
        }
    }
}

/// How a curve looks, for the legend.
pub fn sample(picture: &mut Picture, curve: &Curve, from: Place, to: Place) {
    line(picture, curve, &[from, to]);
    marker(picture, ((from.0 + to.0) / 2.0, from.1), curve, false);
}

fn line(picture: &mut Picture, curve: &Curve, places: &[Place]) {
    let dash = match curve.origin {
        Origin::Paper => 7.0,
        Origin::Simulated => 3.0,
        Origin::Model | Origin::Measured => 0.0,
    };
    if !curve.scattered && places.len() > 1 {
        picture.dashed(places, colour(curve.colour), if curve.origin == Origin::Model { 1.0 } else { 2.0 }, dash);
    }
}

/// Hollow circle, square, nothing, full circle.
fn marker(picture: &mut Picture, place: Place, curve: &Curve, is_small: bool) {
    let colour = colour(curve.colour);
    let radius = if is_small { RADIUS / 1.8 } else { RADIUS };
    match curve.origin {
        Origin::Model => {}
        Origin::Simulated => picture.polygon(place, radius * 1.3, 4, colour),
        Origin::Measured => picture.polygon(place, radius, 20, colour),
        Origin::Paper => {
            picture.polygon(place, radius, 20, colour);
            picture.polygon(place, radius - 1.8, 20, PAPER);
        }
    }
}
