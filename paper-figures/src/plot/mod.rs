//! Drawing of figures: the page, and the representation of points.
//!
//! The colour shows the system or the series, and the style shows the origin. Whiskers show the range of several runs. The paper's series are dashed and hollow, simulated series dotted and
//! hatched, formulas pale lines without markers, measured series solid. No two series of a frame may look the same.

mod axis;
mod bars;
mod curves;
mod faults;
mod lanes;
mod picture;
mod render;
mod rows;

use crate::config::{Kind, Origin, Plot};
use crate::error::Result;
use crate::figure::Figure;
use crate::series::{self, Curve};
use axis::Axis;
pub use faults::faults;
use picture::{Anchor, Colour, GREY, HEIGHT, INK, PAPER, PagePoint, Picture, WIDTH};

/// Left and right end of the axes of every frame.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 700.0;
/// Height of the page's title.
const TITLED: f64 = 40.0;
/// Sizes of text.
const TITLE: f64 = 20.0;
const BODY: f64 = 14.0;
/// Characters in a line of the legend.
const LEGEND_CHARS: usize = 32;

/// Draws `figure` from its lines into its output folder, as SVG and as PNG.
///
/// # Errors
/// Errors of reading data or of writing a picture.
pub fn write(figure: &Figure) -> Result<()> {
    render::write(&picture(figure)?, &figure.id, &figure.output_path(""))
}

/// Whether the figure's SVG file equals a new drawing of its lines.
///
/// # Errors
/// Errors of reading or drawing data.
pub fn is_current(figure: &Figure) -> Result<bool> {
    let drawn = render::svg(&picture(figure)?);
    Ok(std::fs::read(figure.output_path("figure.svg")).is_ok_and(|bytes| bytes == drawn.as_bytes()))
}

fn picture(figure: &Figure) -> Result<Picture> {
    let mut picture = Picture::default();
    picture.text((20.0, 24.0), format!("{}: {}", figure.label, figure.title), TITLE, Anchor::Start);
    let plot = &figure.config.plot;
    match plot.kind {
        Kind::Timeline => lanes::draw(&mut picture, &lanes::panels(figure)?, plot),
        Kind::Rows => rows::draw(&mut picture, &series::curves(figure)?, plot),
        Kind::Bars | Kind::Lines => draw_frames(&mut picture, figure)?,
    }
    Ok(picture)
}

fn draw_frames(picture: &mut Picture, figure: &Figure) -> Result<()> {
    for frame in frames(figure)? {
        frame.draw(picture);
        picture.height = frame.area.end;
    }
    Ok(())
}

/// Axes, their curves, and their position.
struct Frame<'a> {
    plot: &'a Plot,
    curves: Vec<Curve>,
    /// Categories of all frames in order of appearance, so that a category has the same position in every frame.
    categories: Vec<String>,
    area: Area,
}

/// The frames with curves; always includes the first frame.
fn frames(figure: &Figure) -> Result<Vec<Frame<'_>>> {
    let config = &figure.config;
    let mut frames: Vec<_> = config.frames().map(|plot| (plot, Vec::new())).collect();
    for (series, curve) in config.series.iter().zip(series::curves(figure)?) {
        frames[config.frame_of(series)].1.extend(Some(curve).filter(|curve| !curve.points.is_empty()));
    }
    let mut index = 0..;
    frames.retain(|(_, curves)| index.next() == Some(0) || !curves.is_empty());
    let count = frames.len();
    let categories = categories(frames.iter().flat_map(|(_, curves)| curves));
    let place = |(index, (plot, curves))| Frame { plot, curves, categories: categories.clone(), area: Area::of(index, count) };
    Ok(frames.into_iter().enumerate().map(place).collect())
}

fn categories<'a>(curves: impl Iterator<Item = &'a Curve>) -> Vec<String> {
    let mut categories: Vec<String> = Vec::new();
    for point in curves.flat_map(|curve| &curve.points) {
        if !categories.contains(&point.label) {
            categories.push(point.label.clone());
        }
    }
    categories
}

impl Frame<'_> {
    fn draw(&self, picture: &mut Picture) {
        if !self.plot.name.is_empty() {
            picture.line(&[(20.0, self.area.top - 66.0), (WIDTH - 20.0, self.area.top - 66.0)], GREY, 1.0);
        }
        picture.text((20.0, self.area.top - 52.0), self.plot.name.clone(), BODY + 2.0, Anchor::Start);
        match self.plot.kind {
            Kind::Bars => bars::draw(picture, self),
            _ => curves::draw(picture, &self.curves, self.plot, self.area),
        }
        legend(picture, &self.curves, self.plot.kind, self.area);
    }
}

/// The vertical range of a frame on the page. The axes are between `top` and `bottom`; axis labels end above `end`.
#[derive(Clone, Copy)]
struct Area {
    top: f64,
    bottom: f64,
    end: f64,
}

impl Area {
    /// The area of frame `index` of `count`, from top to bottom.
    fn of(index: usize, count: usize) -> Self {
        let (height, head) = match count {
            1 => (HEIGHT - TITLED, 36.0),
            2 => (350.0, 66.0),
            _ => (310.0, 66.0),
        };
        let end = TITLED + height * (index + 1) as f64;
        Self { top: end - height + head, bottom: end - 70.0, end }
    }
}

/// Draws ticks and grid of the vertical axis, its name above it, and the frame's baseline.
fn vertical_axis(picture: &mut Picture, axis: &Axis, name: &str, area: Area) {
    for tick in axis.ticks() {
        let y = axis.place(tick);
        picture.line(&[(LEFT, y), (RIGHT, y)], GREY, 1.0);
        picture.text((LEFT - 8.0, y), axis::label(tick), BODY, Anchor::End);
    }
    picture.line(&[(LEFT, area.bottom), (RIGHT, area.bottom)], INK, 1.0);
    picture.text((20.0, area.top - 26.0), name, BODY, Anchor::Start);
}

/// Draws samples and names to the right of the axes, smaller if they would exceed the frame.
fn legend(picture: &mut Picture, curves: &[Curve], kind: Kind, area: Area) {
    let names: Vec<_> = curves.iter().map(|curve| wrapped(&format!("{}{}", curve.name, runs(curve)), LEGEND_CHARS)).collect();
    let height: f64 = names.iter().map(|lines| 17.0 * lines.len() as f64 + 7.0).sum();
    let scale = ((area.end - area.top - 8.0) / height).min(1.0);
    let mut y = area.top + 8.0;
    for (curve, lines) in curves.iter().zip(names) {
        let (left, right) = ((RIGHT + 18.0, y - 7.0 * scale), (RIGHT + 44.0, y + 7.0 * scale));
        match kind {
            Kind::Bars => bar(picture, left, right, colour_of(curve), curve.origin),
            _ => curves::sample(picture, curve, (left.0, y), (right.0, y)),
        }
        for line in lines {
            picture.text((RIGHT + 52.0, y), line, (BODY - 1.0) * scale, Anchor::Start);
            y += 17.0 * scale;
        }
        y += 7.0 * scale;
    }
}

/// Number of runs behind a curve's points, if there are several.
fn runs(curve: &Curve) -> String {
    let runs = || curve.points.iter().map(|point| point.spread.map_or(1, |spread| spread.runs));
    match (runs().min(), runs().max()) {
        (_, None | Some(1)) => String::new(),
        (Some(low), Some(high)) if low < high => format!(", n = {low} to {high}"),
        (_, Some(high)) => format!(", n = {high}"),
    }
}

/// Colour of a curve.
fn colour_of(curve: &Curve) -> Colour {
    picture::tint(picture::colour(curve.colour), curve.shade)
}

/// Draws a bar between two corners, in the style of its origin.
fn bar(picture: &mut Picture, (left, top): PagePoint, (right, bottom): PagePoint, colour: Colour, origin: Origin) {
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

/// Wraps `text` at spaces into lines of at most `chars` characters.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_at_blanks() {
        assert_eq!(wrapped("SuperOffload (paper, GH200)", 13), ["SuperOffload", "(paper,", "GH200)"]);
        assert!(wrapped("", 10).is_empty());
    }
}
