//! What a figure looks like: its page, and what points become on it.
//!
//! Colour says which series, manner says where it comes from. Paper: dashed and hollow; simulated: dotted and hatched;
//! a formula: a line without markers, pale; measured: full.

mod axis;
mod bars;
mod curves;
mod lanes;
mod picture;
mod render;

use crate::config::{Kind, Origin};
use crate::error::{Error, Result};
use crate::figure::Figure;
use crate::series::{self, Curve};
use axis::Axis;
use picture::{Anchor, Colour, GREY, INK, PAPER, Picture, Place, SIZE};

/// The part of the page that axes enclose.
const LEFT: f64 = 70.0;
const TOP: f64 = 76.0;
const RIGHT: f64 = 700.0;
const BOTTOM: f64 = 470.0;
/// Sizes of text.
const TITLE: f64 = 20.0;
const BODY: f64 = 14.0;
/// Characters of a line of the legend.
const LEGEND_CHARS: usize = 32;

/// Draws `figure` from its lines into its folder, as SVG and as PNG.
///
/// # Errors
/// When data cannot be read or a picture cannot be written.
pub fn write(figure: &Figure) -> Result<()> {
    render::write(&picture(figure)?, &figure.id, &figure.output_path(""))
}

/// Whether the figure's SVG is what its lines draw now.
///
/// # Errors
/// When data cannot be read or drawn.
pub fn is_current(figure: &Figure) -> Result<bool> {
    let drawn = render::svg(&picture(figure)?).map_err(|cause| Error::Draw { figure: figure.id.clone(), cause })?;
    Ok(std::fs::read(figure.output_path("figure.svg")).is_ok_and(|bytes| bytes == drawn))
}

fn picture(figure: &Figure) -> Result<Picture> {
    let mut picture = Picture::default();
    picture.text((20.0, 24.0), format!("{}: {}", figure.label, figure.title), TITLE, Anchor::Start);
    let plot = &figure.config.plot;
    match plot.kind {
        Kind::Timeline => lanes::draw(&mut picture, &lanes::panels(figure)?, &plot.x),
        kind => {
            let curves: Vec<_> = series::curves(figure)?.into_iter().filter(|curve| !curve.points.is_empty()).collect();
            match kind {
                Kind::Bars => bars::draw(&mut picture, &curves, plot),
                _ => curves::draw(&mut picture, &curves, plot),
            }
            legend(&mut picture, &curves, kind);
        }
    }
    Ok(picture)
}

/// Ticks and grid of the vertical axis, its name above it, the frame's floor.
fn vertical_axis(picture: &mut Picture, axis: &Axis, name: &str) {
    for tick in axis.ticks() {
        let y = axis.place(tick);
        picture.line(&[(LEFT, y), (RIGHT, y)], GREY, 1.0);
        picture.text((LEFT - 8.0, y), axis::label(tick), BODY, Anchor::End);
    }
    picture.line(&[(LEFT, BOTTOM), (RIGHT, BOTTOM)], INK, 1.0);
    picture.text((20.0, 52.0), name, BODY, Anchor::Start);
}

/// Samples and names to the right of the axes, smaller where they would leave the page.
fn legend(picture: &mut Picture, curves: &[Curve], kind: Kind) {
    let names: Vec<_> = curves.iter().map(|curve| wrapped(&curve.name, LEGEND_CHARS)).collect();
    let height: f64 = names.iter().map(|lines| 17.0 * lines.len() as f64 + 7.0).sum();
    let scale = ((SIZE.1 - TOP - 8.0) / height).min(1.0);
    let mut y = TOP + 8.0;
    for (curve, lines) in curves.iter().zip(names) {
        let (left, right) = ((RIGHT + 18.0, y - 7.0 * scale), (RIGHT + 44.0, y + 7.0 * scale));
        match kind {
            Kind::Bars => bar(picture, left, right, picture::colour(curve.colour), curve.origin),
            _ => curves::sample(picture, curve, (left.0, y), (right.0, y)),
        }
        for line in lines {
            picture.text((RIGHT + 52.0, y), line, (BODY - 1.0) * scale, Anchor::Start);
            y += 17.0 * scale;
        }
        y += 7.0 * scale;
    }
}

/// A bar from corner to corner, in the manner of its origin.
fn bar(picture: &mut Picture, (left, top): Place, (right, bottom): Place, colour: Colour, origin: Origin) {
    let fill = match origin {
        Origin::Measured => colour,
        Origin::Model => picture::tint(colour, 0.35),
        Origin::Paper | Origin::Simulated => PAPER,
    };
    picture.rectangle((left, top), (right, bottom), fill);
    let mut y = bottom - 4.0;
    while origin == Origin::Simulated && y > top {
        picture.line(&[(left, y), (right, y)], colour, 1.5);
        y -= 4.0;
    }
    picture.outline((left, top), (right, bottom), colour);
}

/// `text` in lines of at most `chars`, cut at blanks.
fn wrapped(text: &str, chars: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= chars => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

/// Height that is left for anything below the axes.
fn below() -> f64 {
    SIZE.1 - BOTTOM
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_at_blanks() {
        assert_eq!(wrapped("SuperOffload (paper, GH200)", 13), ["SuperOffload", "(paper,", "GH200)"]);
        assert!(wrapped("", 10).is_empty());
    }
}
