//! A picture as SVG and as PNG, from the same shapes.

use super::picture::{Anchor, Colour, PAPER, Picture, Place, SIZE, Shape};
use crate::error::{Error, Result};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

/// Pixels of the PNG for a point of the page.
const PIXELS: f64 = 2.0;
/// Family of every text; the PNG takes the font that comes with this crate.
const FAMILY: &str = "sans-serif";
static FONT: &[u8] = include_bytes!("../../fonts/Roboto-Latin.ttf");

/// Writes `figure.svg` and `figure.png` into `folder`.
///
/// # Errors
/// When drawing or writing fails.
pub fn write(picture: &Picture, figure: &str, folder: &Path) -> Result<()> {
    let failed = |cause: String| Error::Draw { figure: figure.into(), cause };
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.into(), source })?;
    for (name, bytes) in [("figure.svg", svg(picture).map_err(failed)?), ("figure.png", png(picture).map_err(failed)?)] {
        let path = folder.join(name);
        std::fs::write(&path, bytes).map_err(|source| Error::Io { path, source })?;
    }
    Ok(())
}

/// The picture as SVG.
///
/// # Errors
/// What the drawing library says.
pub fn svg(picture: &Picture) -> std::result::Result<Vec<u8>, String> {
    let mut text = String::new();
    draw(picture, 1.0, SVGBackend::with_string(&mut text, (SIZE.0 as u32, SIZE.1 as u32)))?;
    Ok(text.into_bytes())
}

fn png(picture: &Picture) -> std::result::Result<Vec<u8>, String> {
    let (width, height) = ((SIZE.0 * PIXELS) as u32, (SIZE.1 * PIXELS) as u32);
    let mut pixels = vec![0; (width * height * 3) as usize];
    draw(picture, PIXELS, BitMapBackend::with_buffer(&mut pixels, (width, height)))?;
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_compression(png::Compression::High);
    let mut writer = encoder.write_header().map_err(|error| error.to_string())?;
    writer.write_image_data(&pixels).map_err(|error| error.to_string())?;
    writer.finish().map_err(|error| error.to_string())?;
    Ok(bytes)
}

fn draw<DB: DrawingBackend>(picture: &Picture, scale: f64, backend: DB) -> std::result::Result<(), String> {
    plotters::style::register_font(FAMILY, FontStyle::Normal, FONT).map_err(|_| "the font cannot be read")?;
    let area = backend.into_drawing_area();
    area.fill(&rgb(PAPER)).map_err(|error| error.to_string())?;
    picture.shapes.iter().try_for_each(|shape| draw_shape(&area, scale, shape)).map_err(|error| error.to_string())?;
    area.present().map_err(|error| error.to_string())
}

fn draw_shape<DB: DrawingBackend>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    scale: f64,
    shape: &Shape,
) -> std::result::Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let at = |place: &Place| ((place.0 * scale).round() as i32, (place.1 * scale).round() as i32);
    match shape {
        Shape::Line { points, colour, width } => {
            let style = rgb(*colour).stroke_width((width * scale).round().max(1.0) as u32);
            // Segment by segment: a thick line's sharp corner would be drawn with a spike that is in no data.
            points.windows(2).try_for_each(|ends| area.draw(&PathElement::new([at(&ends[0]), at(&ends[1])], style)))
        }
        Shape::Area { points, colour } => area.draw(&Polygon::new(points.iter().map(at).collect::<Vec<_>>(), rgb(*colour).filled())),
        Shape::Text { at: place, text, size, anchor } => {
            let side = match anchor {
                Anchor::Start => HPos::Left,
                Anchor::Middle => HPos::Center,
                Anchor::End => HPos::Right,
            };
            let style = (FAMILY, size * scale).into_font().color(&rgb(super::picture::INK)).pos(Pos::new(side, VPos::Center));
            area.draw(&Text::new(text.as_str(), at(place), style))
        }
    }
}

fn rgb((red, green, blue): Colour) -> RGBColor {
    RGBColor(red, green, blue)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::picture::INK;

    #[test]
    fn both_files_hold_the_picture() {
        let mut picture = Picture::default();
        picture.text((100.0, 100.0), "GB/s at 64 MiB", 20.0, Anchor::Middle);
        picture.rectangle((10.0, 10.0), (20.0, 20.0), INK);
        let dir = tempfile::tempdir().unwrap();
        write(&picture, "fig-00", dir.path()).unwrap();
        let svg = std::fs::read_to_string(dir.path().join("figure.svg")).unwrap();
        assert!(svg.contains("GB/s at 64 MiB") && svg.contains("sans-serif"), "{svg}");
        let png = png::Decoder::new(std::io::BufReader::new(std::fs::File::open(dir.path().join("figure.png")).unwrap()));
        let mut reader = png.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        let dark = |x: usize, y: usize| pixels[(y * 1920 + x) * 3] < 128;
        assert!(dark(30, 30) && !dark(50, 50));
        let is_text = (150..250).any(|x| (180..220).any(|y| dark(x, y)));
        assert!(is_text, "the font draws");
    }
}
