//! Points of a series, from rows of the paper's table or from lines of results.

use crate::config::{Marker, Origin, Series};
use crate::csv::Table;
use crate::error::Result;
use crate::figure::Figure;
use crate::lines;
use serde_json::{Map, Value};

/// A point of a series.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Category, which identifies a point in comparisons of series.
    pub label: String,
    /// Numeric x, if any.
    pub x: Option<f64>,
    /// Value in the unit of the axis.
    pub y: f64,
}

/// A series with its points.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Name in the legend.
    pub name: String,
    /// Origin of the numbers.
    pub origin: Origin,
    /// Draw markers only.
    pub scattered: bool,
    /// Index of the colour.
    pub colour: usize,
    /// Shape of the markers.
    pub marker: Marker,
    /// Points in order; of several points in one category, the last one.
    pub points: Vec<Point>,
}

/// All series of `figure`. A series without lines has no points.
///
/// # Errors
/// Errors of reading `expected.csv` or a file of lines.
pub fn curves(figure: &Figure) -> Result<Vec<Curve>> {
    figure.config.series.iter().enumerate().map(|(index, series)| curve(figure, series, index)).collect()
}

fn curve(figure: &Figure, series: &Series, index: usize) -> Result<Curve> {
    let mut points: Vec<Point> = Vec::new();
    let mut count = 0;
    for mut point in lines(figure, series)?.iter().filter_map(|line| point(series, line)) {
        if series.counted {
            count += u32::from(point.y > 0.0);
            point.y = f64::from(count) * series.y_scale;
        }
        match points.iter_mut().find(|known| known.label == point.label) {
            Some(known) => *known = point,
            None => points.push(point),
        }
    }
    if let Some(whole) = &series.whole {
        points = percent(points, whole);
    }
    Ok(Curve {
        name: series.name.clone(),
        origin: series.origin,
        scattered: series.scattered,
        colour: series.colour.unwrap_or(index),
        marker: series.marker.unwrap_or(if series.origin == Origin::Simulated { Marker::Square } else { Marker::Circle }),
        points,
    })
}

/// The lines of a series.
///
/// # Errors
/// Errors of reading `expected.csv` or a file of lines.
pub fn lines(figure: &Figure, series: &Series) -> Result<Vec<Value>> {
    let lines = if series.files.is_empty() { rows(&figure.expected()?) } else { figure.lines(&series.files)? };
    let is_positive = |line: &Value| series.positive.iter().all(|path| lines::number(line, path).is_some_and(|number| number > 0.0));
    Ok(lines.into_iter().filter(|line| lines::holds(line, &series.only) && is_positive(line)).collect())
}

/// Rows as objects without empty cells.
fn rows(table: &Table) -> Vec<Value> {
    let cell = |(name, cell): (&String, &String)| {
        let value = cell.parse::<f64>().map_or_else(|_| Value::from(cell.as_str()), Value::from);
        (!cell.is_empty()).then(|| (name.clone(), value))
    };
    let object = |row: &Vec<String>| Value::Object(table.header.iter().zip(row).filter_map(cell).collect::<Map<_, _>>());
    table.rows.iter().map(object).collect()
}

fn point(series: &Series, line: &Value) -> Option<Point> {
    let x = lines::number(line, &series.x).map(|x| x * series.x_scale);
    let paths = if series.label.is_empty() { &series.x } else { &series.label };
    let message = paths.split(' ').map(|path| lines::field(line, path).map(message)).collect::<Option<Vec<_>>>()?.join(" ");
    let label = series.labels.get(&message).cloned().unwrap_or(message);
    let over = series.over.as_ref().map_or(Some(1.0), |path| lines::number(line, path))?;
    let counted = if series.full_attention { attention_in_full(line)? } else { 1.0 };
    Some(Point { label, x, y: lines::number(line, &series.y)? * counted * series.y_scale / over + series.y_offset })
}

/// Factor by which a line's FLOPs per GPU grow if attention is counted in full. Causal attention omits half of it.
fn attention_in_full(line: &Value) -> Option<f64> {
    let product = |paths: &[&str]| paths.iter().map(|path| lines::number(line, path)).product::<Option<f64>>();
    let half = 6.0 * product(&["model.layers", "model.heads", "model.head_dim", "settings.seq_length", "tokens_per_step"])?;
    let gpus: f64 = ["settings.gpus", "settings.processes"].iter().filter_map(|path| lines::number(line, path)).product();
    Some(1.0 + half / gpus / lines::number(line, "speed.model_flops")?)
}

fn message(place: &Value) -> String {
    place.as_f64().map_or_else(|| lines::text(place), |number| number.to_string())
}

/// Values in percent of the value at `whole`; empty if `whole` does not exist.
fn percent(points: Vec<Point>, whole: &str) -> Vec<Point> {
    let Some(all) = points.iter().find(|point| point.label == whole).map(|point| point.y) else { return Vec::new() };
    points.into_iter().map(|point| Point { y: 100.0 * point.y / all, ..point }).collect()
}

/// Pairs of points with a category in both curves.
pub fn common<'a>(a: &'a Curve, b: &'a Curve) -> impl Iterator<Item = (&'a Point, &'a Point)> {
    a.points.iter().filter_map(|point| Some((point, b.points.iter().find(|other| other.label == point.label)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_in_full_is_twice_the_causal_half() {
        // One layer, one head of 4 channels, 8 tokens: causal attention adds 6 * 4 * 8 * 8 FLOPs to the 6 * 10 * 8 FLOPs of the rest.
        let line = serde_json::json!({
            "model": {"layers": 1, "heads": 1, "head_dim": 4}, "settings": {"seq_length": 8}, "tokens_per_step": 8,
            "speed": {"model_flops": 480 + 1536}
        });
        assert_eq!(attention_in_full(&line), Some((480.0 + 2.0 * 1536.0) / (480.0 + 1536.0)));
        let mut of_two = line.clone();
        (of_two["settings"]["gpus"], of_two["tokens_per_step"]) = (2.into(), 16.into());
        assert_eq!(attention_in_full(&of_two), attention_in_full(&line), "the same on each of two");
        (of_two["settings"]["processes"], of_two["tokens_per_step"]) = (3.into(), 48.into());
        assert_eq!(attention_in_full(&of_two), attention_in_full(&line), "and of two in each of three processes");
        assert_eq!(attention_in_full(&serde_json::json!({})), None);
    }

    #[test]
    fn heights_are_percent_of_the_whole() {
        let points =
            |heights: [f64; 2]| ["all", "less"].into_iter().zip(heights).map(|(label, y)| Point { label: label.into(), x: None, y });
        let percent = |whole| percent(points([50.0, 40.0]).collect(), whole);
        assert_eq!(percent("all"), points([100.0, 80.0]).collect::<Vec<_>>());
        assert_eq!(percent("nothing"), []);
    }
}
