//! The device benchmark with small sizes, on the CPU device: every case prints a line with the fields that the figures need.

use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

fn lines(arguments: &[&str]) -> Vec<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_device_facts")).args(["--device", "cpu", "--quick"]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn values<'a>(lines: &'a [Value], case: &str, name: &str) -> BTreeSet<&'a str> {
    lines.iter().filter(|line| line["case"] == case).map(|line| line[name].as_str().unwrap()).collect()
}

fn is_positive(line: &Value, name: &str) -> bool {
    line[name].as_f64().is_some_and(|number| number.is_finite() && number > 0.0)
}

#[test]
fn every_case_leaves_a_line() {
    let lines = lines(&["--parts", "link,cast,latency,pipeline,grouped"]);
    assert_eq!(values(&lines, "link", "memory"), ["pageable", "registered"].into());
    assert_eq!(values(&lines, "link", "way"), ["to the device", "to the host"].into());
    assert_eq!(values(&lines, "link", "load").len(), 4);
    assert_eq!(values(&lines, "cast alone", "by"), ["device", "host"].into());
    assert_eq!(values(&lines, "cast and copy", "arm").len(), 3);
    assert_eq!(values(&lines, "cast and copy", "direction").len(), 2);
    assert_eq!(values(&lines, "latency", "what").len(), 7);
    let counts = ["model", "load", "product"].map(|name| values(&lines, "grouped", name).len());
    assert_eq!((counts, lines.iter().filter(|line| line["case"] == "grouped").count()), ([3, 2, 3], 36));
    for line in &lines {
        assert!(line["verified"] == true && line["machine"].is_object() && line["settings"]["device"] == "cpu", "{line}");
        let wanted = match line["case"].as_str().unwrap() {
            "link" | "cast alone" => &["gb_per_s", "share_of_limit", "limit_gb_per_s"][..],
            "cast and copy" => &["ms", "limit_ms", "fp32_megabytes"],
            "latency" => &["us"],
            "grouped" => &["tflops", "gb_per_s", "loop_tflops", "share_of_loop", "largest_over_mean"],
            "pipeline" => &["gparams_per_s", "share_of_limit", "bucket_params"],
            other => panic!("unknown case {other}"),
        };
        assert!(wanted.iter().all(|name| is_positive(line, name)), "{line}");
    }
    assert!(lines.iter().any(|line| line["case"] == "pipeline"));
}

#[test]
fn a_part_alone_and_its_largest_size() {
    let lines = lines(&["--parts", "link", "--max-bytes", "65536"]);
    let sizes: BTreeSet<u64> = lines.iter().map(|line| line["bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [4 << 10, 16 << 10, 64 << 10].into());
    assert!(lines.iter().all(|line| line["case"] == "link" && line["settings"]["max-bytes"] == 65536));
}
