//! A profile as a printed table.

use super::Profile;
use crate::hardware::sourced::{Curve, Number, Sourced};
use crate::units::Bytes;

/// A row: field, value with unit, and source.
pub(super) type Row = (String, String, String);

impl Profile {
    /// The table of all numbers: field, value, source. Absent values have no row.
    pub fn table(&self) -> String {
        let mut lines = vec![self.machine.clone()];
        lines.extend(self.facts.iter().map(|fact| format!("  {fact}")));
        for (section, fields) in self.sections() {
            lines.push(format!("\n{section}"));
            lines.extend(Some(meaning(section)).filter(|meaning| !meaning.is_empty()).map(|meaning| format!("  ({meaning})")));
            let rows = fields.into_iter().flat_map(|(name, field)| field.rows(name));
            lines.extend(rows.map(|(name, value, source)| format!("  {name:<42} {value:>15}  {source}").trim_end().into()));
        }
        lines.join("\n")
    }
}

/// A note on the rates of `section`, if their names are ambiguous: rates of different loops are not comparable.
fn meaning(section: &str) -> &'static str {
    match section {
        "host" => {
            "memory_bytes_per_s: a triad on every CPU, three streams as STREAM counts them, without write-allocate traffic; \
                adam_bytes_per_s: reads and writes of AdamW's vector pass"
        }
        _ => "",
    }
}

/// The row of a number.
pub(super) fn number(name: &str, number: &Number) -> Vec<Row> {
    vec![(name.into(), with_unit(name, number.value), short(number))]
}

/// A row for each point of a curve. The source is in the first row.
pub(super) fn curve(name: &str, curve: &Curve) -> Vec<Row> {
    let (quantity, by) = name.split_once("_by_").unwrap_or((name, ""));
    let value = |y: f64| if quantity.ends_with("_share") { format!("{:.1} %", 100.0 * y) } else { with_unit(quantity, y) };
    let units = by.replace('_', " ");
    let unit = |x: f64| if x == 1.0 { units.trim_end_matches('s') } else { &units };
    let at = |x: f64| if by == "bytes" { Bytes(x as u64).to_string() } else { format!("{x} {}", unit(x)) };
    let mut source = short(curve);
    curve.value.0.iter().map(|&(x, y)| (format!("{quantity}, {}", at(x)), value(y), std::mem::take(&mut source))).collect()
}

/// The source without the prefix that all measured values share.
fn short<T>(sourced: &Sourced<T>) -> String {
    sourced.source.trim_start_matches(crate::hardware::sourced::MEASURED).trim_start_matches(": ").into()
}

/// `value` with the unit that `name` ends with.
fn with_unit(name: &str, value: f64) -> String {
    let scaled = |factor: f64, unit: &str| format!("{:.2} {unit}", value * factor);
    match name {
        _ if name.ends_with("_bytes_per_s") => scaled(1e-9, "GB/s"),
        _ if name.ends_with("_flops") && value >= 1e12 => scaled(1e-12, "TFLOP/s"),
        _ if name.ends_with("_flops") => scaled(1e-9, "GFLOP/s"),
        _ if name.ends_with("_bytes") => Bytes(value as u64).to_string(),
        _ if name.ends_with("_s") => scaled(1e6, "us"),
        _ if name.contains("_under_") => format!("{:.1} %", 100.0 * value),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_line_with_its_unit() {
        let table = Profile::load("h200-pcie5").unwrap().table();
        let lines: Vec<_> = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        for start in [
            "addressing managed memory",
            "matmul_flops 680.00 TFLOP/s for seconds",
            "memory_bytes 139.8 GiB free on",
            "adam_bytes_per_s, 8 threads 128.00 GB/s",
            "to_host_share, 64.0 KiB 23.7 % pinned memory, alone",
            "latency_s 4.00 us",
            "matmul_under_copies 92.0 %",
            "cpus 16 the machine",
        ] {
            assert!(lines.iter().any(|line| line.starts_with(start)), "{start}\n{table}");
        }
        assert!(table.lines().all(|line| line == line.trim_end()), "{table}");
        assert!(!Profile::load("mi300a").unwrap().table().contains("\nlink"));
    }
}
