//! A picture as data: lines, areas and texts in points of a page with the origin at the top left.

/// A position on the page.
pub type PagePoint = (f64, f64);

/// Red, green, blue.
pub type Colour = (u8, u8, u8);

/// Width of the page in points.
pub const WIDTH: f64 = 960.0;
/// Height of a page with one frame.
pub const HEIGHT: f64 = 540.0;
/// Colour of text and axes.
pub const INK: Colour = (34, 34, 34);
/// Colour of ticks and grid.
pub const GREY: Colour = (208, 208, 208);
/// Colour of the page. The picture has its own background, so it is readable in dark mode and in print.
pub const PAPER: Colour = (255, 255, 255);
/// Colours that colour-blind readers can distinguish (Okabe and Ito, and Tol).
const PALETTE: [Colour; 12] = [
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (90, 90, 90),
    (148, 103, 50),
    (120, 94, 240),
    (0, 0, 0),
    (153, 153, 51),
    (136, 34, 85),
];

/// Colour of the series with this index.
pub fn colour(index: usize) -> Colour {
    PALETTE[index % PALETTE.len()]
}

/// Mixes `colour` with the page; `fraction` is the fraction of `colour`.
pub fn tint(colour: Colour, fraction: f64) -> Colour {
    let mix = |ink: u8, page: u8| (f64::from(ink) * fraction + f64::from(page) * (1.0 - fraction)).round() as u8;
    (mix(colour.0, PAPER.0), mix(colour.1, PAPER.1), mix(colour.2, PAPER.2))
}

/// The part of a text that is at its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// Left end.
    Start,
    /// Middle.
    Middle,
    /// Right end.
    End,
}

/// A drawing operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// An open line.
    Line {
        /// Corners.
        points: Vec<PagePoint>,
        /// Colour.
        colour: Colour,
        /// Width in points.
        width: f64,
    },
    /// A filled polygon.
    Area {
        /// Corners.
        points: Vec<PagePoint>,
        /// Colour.
        colour: Colour,
    },
    /// A line of text, vertically centred on its position.
    Text {
        /// Position.
        at: PagePoint,
        /// Content.
        text: String,
        /// Height in points.
        size: f64,
        /// Part of the text at the position.
        anchor: Anchor,
    },
}

/// Shapes in drawing order.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Height of the page in points.
    pub height: f64,
    /// Content of the page.
    pub shapes: Vec<Shape>,
}

impl Default for Picture {
    fn default() -> Self {
        Self { height: HEIGHT, shapes: Vec::new() }
    }
}

impl Picture {
    /// Draws a line.
    pub fn line(&mut self, points: &[PagePoint], colour: Colour, width: f64) {
        self.shapes.push(Shape::Line { points: points.to_vec(), colour, width });
    }

    /// Draws a dashed line; a dash length of 0 draws a solid line.
    pub fn dashed(&mut self, points: &[PagePoint], colour: Colour, width: f64, dash: f64) {
        if dash == 0.0 {
            return self.line(points, colour, width);
        }
        let mut walked = 0.0;
        for ends in points.windows(2) {
            let (from, to) = (ends[0], ends[1]);
            let length = (to.0 - from.0).hypot(to.1 - from.1);
            let at = |walk: f64| (from.0 + (to.0 - from.0) * walk / length, from.1 + (to.1 - from.1) * walk / length);
            let mut walk = 0.0;
            while walk < length {
                let next = ((walked / dash).floor() + 1.0) * dash - walked;
                let end = (walk + next.max(1e-3)).min(length);
                if (walked / dash).floor() as i64 % 2 == 0 {
                    self.line(&[at(walk), at(end)], colour, width);
                }
                walked += end - walk;
                walk = end;
            }
        }
    }

    /// Draws a filled rectangle.
    pub fn rectangle(&mut self, (left, top): PagePoint, (right, bottom): PagePoint, colour: Colour) {
        self.shapes.push(Shape::Area { points: vec![(left, top), (right, top), (right, bottom), (left, bottom)], colour });
    }

    /// Draws the outline of a rectangle.
    pub fn outline(&mut self, (left, top): PagePoint, (right, bottom): PagePoint, colour: Colour) {
        self.line(&[(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], colour, 1.5);
    }

    /// Draws a filled regular polygon that stands on a side and is rotated by `turn` sides. Many corners make a circle.
    pub fn polygon(&mut self, (x, y): PagePoint, radius: f64, (corners, turn): (u32, f64), colour: Colour) {
        let corner = |index: u32| {
            let angle = (f64::from(index) + 0.5 + turn) * std::f64::consts::TAU / f64::from(corners) + std::f64::consts::FRAC_PI_2;
            (x + radius * angle.cos(), y + radius * angle.sin())
        };
        self.shapes.push(Shape::Area { points: (0..corners).map(corner).collect(), colour });
    }

    /// Draws a text.
    pub fn text(&mut self, at: PagePoint, text: impl Into<String>, size: f64, anchor: Anchor) {
        self.shapes.push(Shape::Text { at, text: text.into(), size, anchor });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dashes_go_on_around_corners() {
        let mut picture = Picture::default();
        picture.dashed(&[(0.0, 0.0), (15.0, 0.0), (15.0, 15.0)], INK, 1.0, 10.0);
        let ends = picture.shapes.iter().map(|shape| match shape {
            Shape::Line { points, .. } => (points[0], points[1]),
            shape => panic!("{shape:?}"),
        });
        assert_eq!(ends.collect::<Vec<_>>(), [((0.0, 0.0), (10.0, 0.0)), ((15.0, 5.0), (15.0, 15.0))]);
    }
}
