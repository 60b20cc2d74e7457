//! Renders a picture as SVG and as PNG, from the same shapes.

use super::picture::{Anchor, Colour, INK, PAPER, PagePoint, Picture, Shape, WIDTH};
use crate::error::{Error, Result};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::fmt::Write as _;
use std::path::Path;

/// Pixels of the PNG per point of the page.
const PIXELS: f64 = 2.0;
/// Supersampling factor: each pixel is the mean of FINE x FINE samples. Edges become smooth, and a line has the same width at every angle.
const FINE: usize = 3;
/// Font family of all texts. The PNG uses the font in this crate.
const FAMILY: &str = "sans-serif";
static FONT: &[u8] = include_bytes!("../../fonts/Roboto-Latin.ttf");
/// Ratio of the font's line height, which text sizes refer to, to the font size of SVG.
const LINE_HEIGHT: f64 = 1.24;

/// Writes `figure.svg` and `figure.png` into `folder`.
///
/// # Errors
/// Errors of drawing or writing.
pub fn write(picture: &Picture, figure: &str, folder: &Path) -> Result<()> {
    let failed = |cause: String| Error::Draw { figure: figure.into(), cause };
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.into(), source })?;
    for (name, bytes) in [("figure.svg", svg(picture).into_bytes()), ("figure.png", png(picture).map_err(failed)?)] {
        let path = folder.join(name);
        std::fs::write(&path, bytes).map_err(|source| Error::Io { path, source })?;
    }
    Ok(())
}

/// Renders the picture as SVG.
pub fn svg(picture: &Picture) -> String {
    let (height, paper) = (picture.height, hex(PAPER));
    let mut svg =
        format!("<svg width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" xmlns=\"http://www.w3.org/2000/svg\">\n");
    let _ = writeln!(svg, "<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"{paper}\"/>");
    for shape in &picture.shapes {
        let _ = writeln!(svg, "{}", element(shape));
    }
    svg + "</svg>\n"
}

fn element(shape: &Shape) -> String {
    let corners = |points: &[PagePoint]| {
        let corner = |(x, y): &PagePoint| format!("{},{}", hundredths(*x), hundredths(*y));
        points.iter().map(corner).collect::<Vec<_>>().join(" ")
    };
    match shape {
        Shape::Line { points, colour, width } => {
            let (points, colour) = (corners(points), hex(*colour));
            format!("<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-linejoin=\"bevel\" points=\"{points}\"/>")
        }
        Shape::Area { points, colour } => format!("<polygon fill=\"{}\" points=\"{}\"/>", hex(*colour), corners(points)),
        Shape::Text { at, text, size, anchor } => {
            let side = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            let (x, y, size, ink) = (hundredths(at.0), hundredths(at.1), hundredths(size / LINE_HEIGHT), hex(INK));
            let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            format!(
                "<text x=\"{x}\" y=\"{y}\" dy=\"0.5ex\" text-anchor=\"{side}\" font-family=\"{FAMILY}\" font-size=\"{size}\" fill=\"{ink}\">{text}</text>"
            )
        }
    }
}

fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn hex((red, green, blue): Colour) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

fn png(picture: &Picture) -> std::result::Result<Vec<u8>, String> {
    let (width, height) = ((WIDTH * PIXELS) as usize, (picture.height * PIXELS) as usize);
    let pixels = pixels(picture, (width, height))?;
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_compression(png::Compression::High);
    let mut writer = encoder.write_header().map_err(|error| error.to_string())?;
    writer.write_image_data(&pixels).map_err(|error| error.to_string())?;
    writer.finish().map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// RGB values of `width` times `height` pixels, each the mean of its samples.
fn pixels(picture: &Picture, (width, height): (usize, usize)) -> std::result::Result<Vec<u8>, String> {
    let mut fine = vec![u8::MAX; width * height * FINE * FINE * 3];
    draw(picture, BitMapBackend::with_buffer(&mut fine, ((width * FINE) as u32, (height * FINE) as u32)))?;
    let mean = |index: usize| {
        let (pixel, channel) = (index / 3, index % 3);
        let (left, top) = (pixel % width * FINE, pixel / width * FINE);
        let of = |each: usize| u32::from(fine[((top + each / FINE) * width * FINE + left + each % FINE) * 3 + channel]);
        ((0..FINE * FINE).map(of).sum::<u32>() / (FINE * FINE) as u32) as u8
    };
    Ok((0..width * height * 3).map(mean).collect())
}

fn draw<DB: DrawingBackend>(picture: &Picture, backend: DB) -> std::result::Result<(), String> {
    register()?;
    let area = backend.into_drawing_area();
    picture.shapes.iter().try_for_each(|shape| draw_shape(&area, PIXELS * FINE as f64, shape)).map_err(|error| error.to_string())?;
    area.present().map_err(|error| error.to_string())
}

fn register() -> std::result::Result<(), String> {
    plotters::style::register_font(FAMILY, FontStyle::Normal, FONT).map_err(|_| "the font cannot be read".into())
}

/// Width and height of a text in points.
pub fn text_size(text: &str, size: f64) -> (f64, f64) {
    let measured = register().ok().and_then(|()| (FAMILY, size * PIXELS).into_font().box_size(text).ok());
    measured.map_or((0.0, 0.0), |(width, height)| (f64::from(width) / PIXELS, f64::from(height) / PIXELS))
}

fn draw_shape<DB: DrawingBackend>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    scale: f64,
    shape: &Shape,
) -> std::result::Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let at = |place: &PagePoint| ((place.0 * scale).round() as i32, (place.1 * scale).round() as i32);
    let fill =
        |points: &[PagePoint], colour: Colour| area.draw(&Polygon::new(points.iter().map(at).collect::<Vec<_>>(), rgb(colour).filled()));
    match shape {
        // Each segment is drawn separately, because the library draws sharp corners of thick lines with spikes that are not in the data.
        // Segments are polygons, because the width of the library's thick lines depends on the angle.
        Shape::Line { points, colour, width } => {
            points.windows(2).filter(|ends| ends[0] != ends[1]).try_for_each(|ends| fill(&stroke(ends[0], ends[1], *width), *colour))
        }
        Shape::Area { points, colour } => fill(points, *colour),
        Shape::Text { at: place, text, size, anchor } => {
            let side = match anchor {
                Anchor::Start => HPos::Left,
                Anchor::Middle => HPos::Center,
                Anchor::End => HPos::Right,
            };
            let style = (FAMILY, size * scale).into_font().color(&rgb(INK)).pos(Pos::new(side, VPos::Center));
            area.draw(&Text::new(text.as_str(), at(place), style))
        }
    }
}

/// Corners of a straight line with a width.
fn stroke(from: PagePoint, to: PagePoint, width: f64) -> [PagePoint; 4] {
    let (x, y) = (to.0 - from.0, to.1 - from.1);
    let half = width / 2.0 / x.hypot(y);
    let (x, y) = (-y * half, x * half);
    [(from.0 + x, from.1 + y), (to.0 + x, to.1 + y), (to.0 - x, to.1 - y), (from.0 - x, from.1 - y)]
}

fn rgb((red, green, blue): Colour) -> RGBColor {
    RGBColor(red, green, blue)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_files_hold_the_picture() {
        let mut picture = Picture::default();
        picture.text((100.0, 100.0), "GB/s at <64 MiB", 20.0, Anchor::Middle);
        picture.rectangle((10.0, 10.0), (20.0, 20.0), INK);
        let dir = tempfile::tempdir().unwrap();
        write(&picture, "fig-00", dir.path()).unwrap();
        let svg = std::fs::read_to_string(dir.path().join("figure.svg")).unwrap();
        assert!(svg.contains("GB/s at &lt;64 MiB") && svg.contains("sans-serif"), "{svg}");
        let png = png::Decoder::new(std::io::BufReader::new(std::fs::File::open(dir.path().join("figure.png")).unwrap()));
        let mut reader = png.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        let dark = |x: usize, y: usize| pixels[(y * 1920 + x) * 3] < 128;
        assert!(dark(30, 30) && !dark(50, 50));
        let is_text = (150..250).any(|x| (180..220).any(|y| dark(x, y)));
        assert!(is_text, "the font draws");
    }

    /// Darkness of a line of 100 points, in pixels per point of its length.
    fn ink(degrees: f64, width: f64) -> f64 {
        let mut picture = Picture { height: 120.0, ..Picture::default() };
        let (sin, cos) = degrees.to_radians().sin_cos();
        picture.line(&[(10.0, 10.0), (10.0 + 100.0 * cos, 10.0 + 100.0 * sin)], (0, 0, 0), width);
        let pixels = pixels(&picture, (1920, 240)).unwrap();
        pixels.iter().step_by(3).map(|&light| 1.0 - f64::from(light) / 255.0).sum::<f64>() / 100.0
    }

    #[test]
    fn a_line_is_as_wide_whichever_way_it_runs() {
        for width in [1.0, 2.0] {
            let fractions = [0.0, 10.0, 30.0, 45.0, 60.0, 80.0, 90.0].map(|degrees| ink(degrees, width) / (width * PIXELS * PIXELS));
            assert!(fractions.iter().all(|fraction| (fraction / fractions[0] - 1.0).abs() < 0.1), "{width} points wide: {fractions:.2?}");
        }
    }
}
