//! Points of a series, from rows of the paper's table or from lines of results.

use crate::config::{Kind, Marker, Origin, Series};
use crate::csv::Table;
use crate::error::Result;
use crate::figure::Figure;
use crate::lines;
use crate::system::System;
use crate::workload::Pick;
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
    /// Range of several runs, or of the steps of one.
    pub spread: Option<Spread>,
    /// The run does not fit the machine, so that `y` is 0.
    pub does_not_fit: bool,
}

/// Lowest and highest of several runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Lowest value.
    pub low: f64,
    /// Highest value.
    pub high: f64,
    /// Number of runs.
    pub runs: usize,
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
    /// Fraction of the colour.
    pub shade: f64,
    /// Shape of the markers.
    pub marker: Marker,
    /// Points in order, one in each category.
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
    let lines = lines(figure, series)?;
    let found = lines.iter().filter_map(|line| Some((lines::number(line, SPEED), point(series, line)?)));
    let points = if series.counted { counted(series, found.map(|(_, point)| point)) } else { picked(found, pick(figure, series)) };
    Ok(Curve {
        name: series.name.clone(),
        origin: series.origin,
        scattered: series.scattered,
        colour: series.colour.or(series.system.map(System::colour)).unwrap_or(index),
        shade: series.shade,
        marker: series.marker.unwrap_or(if series.origin == Origin::Simulated { Marker::Square } else { Marker::Circle }),
        points: series.whole.as_ref().map_or_else(|| points.clone(), |whole| percent(&points, whole)),
    })
}

/// The field by which the best of several lines is chosen.
pub const SPEED: &str = "speed.model_tflops";

/// How one of several lines in a category is chosen.
fn pick(figure: &Figure, series: &Series) -> Pick {
    let kind = figure.config.frames().nth(figure.config.frame_of(series)).map(|frame| frame.kind);
    let is_bar = matches!(kind, Some(Kind::Bars | Kind::Rows));
    // Percentages compare runs of one session.
    let is_median = is_bar && series.origin == Origin::Measured && series.whole.is_none();
    series.pick.unwrap_or(if is_median { Pick::Median } else { Pick::Last })
}

/// Numbers of positive points so far.
fn counted(series: &Series, points: impl Iterator<Item = Point>) -> Vec<Point> {
    let mut count = 0;
    let count = |point: Point| {
        count += u32::from(point.y > 0.0);
        Point { y: f64::from(count) * series.y_scale, ..point }
    };
    points.map(count).collect()
}

/// One point for each category, in order of first appearance, from points with their speeds.
fn picked(found: impl Iterator<Item = (Option<f64>, Point)>, pick: Pick) -> Vec<Point> {
    let mut groups: Vec<Vec<(Option<f64>, Point)>> = Vec::new();
    for (speed, point) in found {
        match groups.iter_mut().find(|group| group[0].1.label == point.label) {
            Some(group) => group.push((speed, point)),
            None => groups.push(vec![(speed, point)]),
        }
    }
    groups.into_iter().filter_map(|group| one_of(group, pick)).collect()
}

fn one_of(mut group: Vec<(Option<f64>, Point)>, pick: Pick) -> Option<Point> {
    let runs = group.len();
    let ys = group.iter().map(|(_, point)| point.y);
    let spread = Spread { low: ys.clone().fold(f64::INFINITY, f64::min), high: ys.fold(f64::NEG_INFINITY, f64::max), runs };
    match pick {
        Pick::Last => {}
        Pick::Best => group.sort_by(|a, b| a.0.unwrap_or(a.1.y).total_cmp(&b.0.unwrap_or(b.1.y))),
        Pick::Median => group.sort_by(|a, b| a.1.y.total_cmp(&b.1.y)),
    }
    let spread = if runs > 1 && pick != Pick::Last { Some(spread) } else { group[0].1.spread };
    let (_, upper) = if pick == Pick::Median { group[runs / 2].clone() } else { group.pop()? };
    let lower = if pick == Pick::Median { group[(runs - 1) / 2].1.clone() } else { upper.clone() };
    let x = lower.x.zip(upper.x).map(|(a, b)| (a + b) / 2.0);
    Some(Point { x, y: (lower.y + upper.y) / 2.0, spread, ..upper })
}

/// The lines of a series.
///
/// # Errors
/// Errors of reading `expected.csv` or a file of lines.
pub fn lines(figure: &Figure, series: &Series) -> Result<Vec<Value>> {
    let is_positive = |line: &Value| series.positive.iter().all(|path| lines::number(line, path).is_some_and(|number| number > 0.0));
    let is_new = |line: &Value| series.since == 0.0 || lines::number(line, "unix_seconds").is_some_and(|time| time >= series.since);
    let is_wanted = |line: &Value| lines::holds(line, &series.only) && is_positive(line) && is_new(line);
    if series.files.is_empty() && series.sources.is_empty() {
        return Ok(rows(&figure.expected()?).into_iter().filter(is_wanted).collect());
    }
    let mut lines = figure.select(&series.files, is_wanted)?;
    for source in &series.sources {
        lines.extend(figure.select(&source.files(), |line| source.takes(line) && is_wanted(line))?);
    }
    Ok(lines)
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
    if line.get("does_not_fit").is_some() {
        return Some(Point { label, x: None, y: 0.0, spread: None, does_not_fit: true });
    }
    let over = series.over.as_ref().map_or(Some(1.0), |path| lines::number(line, path))?;
    let counted = if series.full_attention { attention_in_full(line)? } else { 1.0 };
    let y = lines::number(line, &series.y)? * counted * series.y_scale / over + series.y_offset;
    let spread = series.range_of_steps.then(|| of_steps(line, y)).flatten();
    Some(Point { label, x, y, spread, does_not_fit: false })
}

/// Range of a rate over the steps of one run.
fn of_steps(line: &Value, rate: f64) -> Option<Spread> {
    let [median, min, max] = ["median", "min", "max"].map(|name| lines::number(line, &format!("step_ms.{name}")));
    Some(Spread { low: rate * median? / max?, high: rate * median? / min?, runs: 1 })
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
fn percent(points: &[Point], whole: &str) -> Vec<Point> {
    let Some(all) = points.iter().find(|point| point.label == whole).map(|point| point.y) else { return Vec::new() };
    let of_all = |value: f64| 100.0 * value / all;
    let spread = |spread: Spread| Spread { low: of_all(spread.low), high: of_all(spread.high), ..spread };
    points.iter().map(|point| Point { y: of_all(point.y), spread: point.spread.map(spread), ..point.clone() }).collect()
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
    fn a_run_that_does_not_fit_is_a_point_and_steps_have_a_range() {
        let series: Series =
            toml::from_str("name = \"s\"\norigin = \"measured\"\nx = \"cell\"\ny = \"rate\"\nrange_of_steps = true\n").unwrap();
        let missing = point(&series, &serde_json::json!({"cell": "a", "does_not_fit": "out of memory"})).unwrap();
        assert!(missing.does_not_fit && missing.y == 0.0);
        let line = serde_json::json!({"cell": "a", "rate": 100.0, "step_ms": {"median": 10.0, "min": 8.0, "max": 20.0}});
        assert_eq!(point(&series, &line).unwrap().spread, Some(Spread { low: 50.0, high: 125.0, runs: 1 }));
    }

    #[test]
    fn heights_are_percent_of_the_whole() {
        let points = |heights: [f64; 2]| ["all", "less"].into_iter().zip(heights).map(|(label, y)| place(label, y)).collect::<Vec<_>>();
        let percent = |whole| percent(&points([50.0, 40.0]), whole);
        assert_eq!(percent("all"), points([100.0, 80.0]));
        assert_eq!(percent("nothing"), []);
    }

    fn place(label: &str, y: f64) -> Point {
        Point { label: label.into(), x: None, y, spread: None, does_not_fit: false }
    }

    #[test]
    fn several_runs_give_their_median_and_their_range() {
        let runs = || [519.0, 454.0, 523.0, 500.0].map(|y| (Some(y), place("W1", y))).into_iter().chain([(None, place("W2", 7.0))]);
        let drawn = |pick| picked(runs(), pick).into_iter().map(|point| (point.y, point.spread)).collect::<Vec<_>>();
        let spread = Some(Spread { low: 454.0, high: 523.0, runs: 4 });
        assert_eq!(drawn(Pick::Median), [(509.5, spread), (7.0, None)]);
        assert_eq!(drawn(Pick::Best), [(523.0, spread), (7.0, None)]);
        assert_eq!(drawn(Pick::Last), [(500.0, None), (7.0, None)]);
        let odd = picked(runs().skip(1).take(3), Pick::Median);
        assert_eq!(odd[0].y, 500.0);
    }
}
