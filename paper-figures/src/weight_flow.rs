//! Figure 6: the share of time that streaming every weight over the link leaves for computing.
//!
//! A forward pass computes `2 * batch * seq_length` operations a parameter and moves 2 bytes a parameter, one after the
//! other: `efficiency = 1 / (1 + peak / (bandwidth * batch * seq_length))`.

use crate::csv::Table;
use serde_json::{Value, json};

/// The figure's id.
pub const ID: &str = "fig-06";
/// How far a point may lie from the paper's, in percentage points: the reading of the curves and of their labels.
pub const DEVIATION_POINTS_LIMIT: f64 = 1.5;

/// Achievable peak of the GPU, fitted to the paper's curves.
const PEAK_TFLOPS: f64 = 718.0;
/// Sequence length of the figure.
const SEQ_LENGTH: u32 = 1024;

/// A point of the figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    bandwidth_gbps: f64,
    batch: u32,
    expected_percent: f64,
}

/// The points of the paper's table: a row for each `bandwidth_gbps`, a column `batch_N` for each batch.
///
/// # Errors
/// Names the column or cell that is something else.
pub fn points(table: &Table) -> Result<Vec<Point>, String> {
    let (first, columns) = table.header.split_first().ok_or("no columns")?;
    if first != "bandwidth_gbps" {
        return Err(format!("the first column is {first:?}, not bandwidth_gbps"));
    }
    let batches: Vec<u32> = columns.iter().map(|name| batch(name)).collect::<Result<_, _>>()?;
    let mut points = Vec::new();
    for row in &table.rows {
        let bandwidth_gbps = number(&row[0])?;
        for (&batch, cell) in batches.iter().zip(&row[1..]) {
            points.push(Point { bandwidth_gbps, batch, expected_percent: number(cell)? });
        }
    }
    if points.is_empty() { Err("no points".into()) } else { Ok(points) }
}

fn batch(name: &str) -> Result<u32, String> {
    name.strip_prefix("batch_").and_then(|batch| batch.parse().ok()).ok_or_else(|| format!("column {name:?} is not batch_N"))
}

fn number(cell: &str) -> Result<f64, String> {
    cell.parse().ok().filter(|&number: &f64| number.is_finite() && number > 0.0).ok_or_else(|| format!("{cell:?} is not a positive number"))
}

/// Share of time spent computing, in percent.
fn efficiency_percent(bandwidth_gbps: f64, batch: u32, seq_length: u32) -> f64 {
    let flops_hidden = bandwidth_gbps * 1e9 * f64::from(batch) * f64::from(seq_length);
    100.0 / (1.0 + PEAK_TFLOPS * 1e12 / flops_hidden)
}

impl Point {
    fn efficiency_percent(&self) -> f64 {
        efficiency_percent(self.bandwidth_gbps, self.batch, SEQ_LENGTH)
    }

    /// The point as a JSON object.
    pub fn json(&self) -> Value {
        json!({
            "figure": ID,
            "bandwidth_gbps": self.bandwidth_gbps,
            "batch": self.batch,
            "seq_length": SEQ_LENGTH,
            "peak_tflops": PEAK_TFLOPS,
            "efficiency_percent": rounded(self.efficiency_percent()),
            "expected_percent": self.expected_percent,
        })
    }
}

/// The largest distance between model and paper, in percentage points.
pub fn deviation_points_max(points: &[Point]) -> f64 {
    points.iter().map(|point| (point.efficiency_percent() - point.expected_percent).abs()).fold(0.0, f64::max)
}

/// The last line: how well the model agrees.
pub fn summary(points: usize, deviation: f64, agrees: bool) -> Value {
    json!({
        "figure": ID,
        "points": points,
        "deviation_points_max": rounded(deviation),
        "deviation_points_limit": DEVIATION_POINTS_LIMIT,
        "agrees": agrees,
    })
}

/// Three decimals: more than the paper's figure can be read to.
fn rounded(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_the_time_computes_when_the_link_feeds_the_peak() {
        // 718e12 operations a second need 718e12 / (4 * 1024) bytes a second for each of 2 bytes and 2 operations.
        let balanced_gbps = PEAK_TFLOPS * 1e3 / (4.0 * 1024.0);
        assert!((efficiency_percent(balanced_gbps, 4, 1024) - 50.0).abs() < 1e-9);
        assert!(efficiency_percent(450.0, 4, 1024) > 60.0 && efficiency_percent(450.0, 2, 1024) < 60.0);
    }

    #[test]
    fn a_table_of_something_else_is_refused() {
        let cause = |text: &str| points(&Table::parse(text).unwrap()).unwrap_err();
        assert_eq!(cause("tensor_mb,batch_1\n1,2\n"), "the first column is \"tensor_mb\", not bandwidth_gbps");
        assert_eq!(cause("bandwidth_gbps,batch_x\n1,2\n"), "column \"batch_x\" is not batch_N");
        assert_eq!(cause("bandwidth_gbps,batch_1\n1,NaN\n"), "\"NaN\" is not a positive number");
        assert_eq!(cause("bandwidth_gbps,batch_1\n1,\n"), "\"\" is not a positive number");
        assert_eq!(cause("bandwidth_gbps,batch_1\n-1,2\n"), "\"-1\" is not a positive number");
        assert_eq!(cause("bandwidth_gbps\n1\n"), "no points");
    }
}
