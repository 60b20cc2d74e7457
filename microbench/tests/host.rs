//! The host benchmarks with small sizes: standard output contains only result lines, each with its settings and machine.

use serde_json::Value;
use std::process::Command;

fn lines(program: &str, arguments: &str) -> Vec<Value> {
    let output = Command::new(program).args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<Value> = String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &lines {
        assert!(line["machine"]["kernel"].is_string() && line["build"]["version"].is_string() && line["settings"].is_object(), "{line}");
    }
    lines
}

#[test]
fn the_pool_is_timed_by_pass_beside_memory() {
    let lines = lines(env!("CARGO_BIN_EXE_host_adam"), "--threads 1 --params 65536 --bucket-params 32768 --seconds 0.01 --huge-pages off");
    let passes: Vec<_> = lines.iter().map(|line| line["pass"].as_str().unwrap()).collect();
    assert_eq!(passes, ["copy past caches", "triad", "speculate", "step", "commit", "commit_then_speculate"]);
    assert!(lines.iter().all(|line| line["settings"]["huge-pages"] == "off" && line["gparam_s"].as_f64() > Some(0.0)));
}

#[test]
fn rows_with_denormal_moments_are_timed_beside_rows_without() {
    let flags = "--threads 1 --params 131072 --bucket-params 65536 --seconds 0.01 --huge-pages off --passes step --memory triad --denormal-moments 0,0.5";
    let lines = lines(env!("CARGO_BIN_EXE_host_adam"), flags);
    let fractions: Vec<_> = lines.iter().map(|line| line["denormal_moments"].as_f64().unwrap()).collect();
    // The fractions are counted in memory. A few of the scaled values are zero.
    assert!(fractions[..2] == [0.0, 0.0] && (fractions[2] - 0.5).abs() < 1e-3, "{fractions:?}");
}

#[test]
fn facts_of_the_host_have_units() {
    let lines = lines(env!("CARGO_BIN_EXE_host_facts"), "--threads 1 --elems 65536 --seconds 0.01");
    assert!(lines.len() > 10 && lines.iter().all(|line| line["value"].as_f64() > Some(0.0) && line["unit"].is_string()));
}

#[test]
fn rollback_by_algebra_loses_bits() {
    let lines = lines(env!("CARGO_BIN_EXE_inverse_error"), "--params 4096 --steps 20");
    assert_eq!(lines.len(), 6);
    assert!(lines.iter().all(|line| line["loss"]["m"]["differing_share"].as_f64() > Some(0.0)));
}

#[test]
fn preparing_text_is_timed_by_cpus_with_its_memory() {
    // The workspace's `superoffload` program, which a build of this crate does not produce.
    let Some(program) = std::path::Path::new(env!("CARGO_BIN_EXE_prepare")).parent().map(|dir| dir.join("superoffload")) else { return };
    if !program.exists() {
        return eprintln!("skipped: {} is not built", program.display());
    }
    let lines = lines(env!("CARGO_BIN_EXE_prepare"), "--cpus 1 --text-mib 5 --vocab-size 2000");
    let number = |name: &str| lines[0][name].as_f64().unwrap();
    assert_eq!((lines.len(), number("cpus"), number("times_first")), (1, 1.0, 1.0));
    assert!(number("text_bytes") >= (5 << 20) as f64 && number("tokens") > 1e6);
    assert!(["peak_bytes", "tokenizer_bytes"].iter().all(|name| number(name) > 1e6));
}
