//! The report of `superchip-check` in Markdown: filled in where the program knows, and open where its reader does.

use serde_json::Value;
use std::fmt::Write;

/// The report of a record.
pub(super) fn of(record: &Value) -> String {
    let gpu = text(&record["gpu"]);
    let mut page = format!("# Superchip check: {gpu}\n\n");
    if record["is_superchip"] != true {
        page += "This machine has no superchip. The report shows the form, with this machine's numbers.\n\n";
    }
    let machine = &record["machine"];
    let facts = [
        ("program", format!("{} (commit {})", text(&record["build"]["version"]), text(&record["build"]["git_commit"]))),
        ("CPU", format!("{}, {} usable", text(&machine["cpu"]), text(&machine["usable_cpus"]))),
        ("memory of the host", format!("{:.0} GB", machine["memory_bytes"].as_f64().unwrap_or(0.0) / 1e9)),
        ("driver", text(&machine["gpu"]["driver"])),
        ("power limit", format!("{} W", text(&machine["gpu"]["power_limit_w"]))),
        ("selftest", format!("{} passed, {} failed", text(&record["selftest"]["passed"]), text(&record["selftest"]["failed"]))),
        ("probe", text(&record["probe"])),
    ];
    page += "| | |\n|---|---|\n";
    for (name, value) in facts {
        let _ = writeln!(page, "| {name} | {value} |");
    }
    page += "\n| run | step | predicted | TFLOP/s | GPU busy | the paper's TFLOP/s |\n|---|---:|---:|---:|---:|---:|\n";
    record["rows"].as_array().into_iter().flatten().for_each(|row| page += &line(row));
    page +=
        "\nTFLOP/s count `6 N T` and causal attention, without recompute; the paper counts full attention, which adds 2 % to its 5B.\n\n";
    page += "## Please add\n\n- Location of the machine (cloud, cluster, desk):\n- Other work on it during the check:\n- Limits of power, clocks or memory:\n\n";
    page + "Send `superchip.json`, `profile.toml` and this page in an issue of the repository. They name no user and no host. A path is in them if you passed one, or if an error names it.\n"
}

/// A row of the table, or the reason for its absence.
fn line(row: &Value) -> String {
    let paper = row["paper_tflops"].as_f64().map_or_else(String::new, |tflops| format!("{tflops:.0}"));
    let name = text(&row["name"]);
    if let Some(error) = row["error"].as_str() {
        return format!("| {name} | not run: {} | | | | {paper} |\n", error.replace('|', "/").replace('\n', " "));
    }
    let record = &row["record"];
    let number = |path: &str, digits: usize, factor: f64| {
        record.pointer(path).and_then(Value::as_f64).map_or_else(|| "?".into(), |value| format!("{:.digits$}", value * factor))
    };
    let [step, predicted] = ["/step_ms/median", "/plan/predicted_step_ms"].map(|path| number(path, 0, 1.0));
    let [tflops, busy] = [number("/speed/model_tflops", 0, 1.0), number("/exposed/device_busy_share", 0, 100.0)];
    format!("| {name} | {step} ms | {predicted} ms | {tflops} | {busy} % | {paper} |\n")
}

/// A value without quotes; a question mark for a missing one.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "?".into(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_report_has_every_row_and_says_what_it_is_not() {
        let rows = json!([
            {"name": "W1", "record": {"step_ms": {"median": 876.6}, "plan": {"predicted_step_ms": 860.0},
                "speed": {"model_tflops": 518.5}, "exposed": {"device_busy_share": 0.89}}},
            {"name": "Table 2: + speculation", "paper_tflops": 209.36, "error": "plan 190 GiB | of memory"},
        ]);
        let record = |is_superchip: bool| json!({"gpu": "NVIDIA H200", "is_superchip": is_superchip, "rows": rows, "selftest": {"passed": 9, "failed": 0}});
        let page = of(&record(false));
        assert!(page.contains("| W1 | 877 ms | 860 ms | 518 | 89 % |  |"), "{page}");
        assert!(page.contains("| Table 2: + speculation | not run: plan 190 GiB / of memory | | | | 209 |"), "{page}");
        assert!(page.contains("This machine has no superchip") && page.contains("9 passed, 0 failed"), "{page}");
        assert!(!of(&record(true)).contains("has no superchip"));
    }
}
