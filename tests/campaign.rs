//! Results of long campaigns: one JSON line each, which the run writes with its commit and machine.

use serde_json::{Value, json};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// Appends `result` (an object) to `tests/campaigns/<name>.jsonl`.
pub(crate) fn record(name: &str, result: Value) {
    let text = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_string()
    };
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap();
    let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let mut line = json!({
        "date": text("date", &["-u", "+%F"]), "commit": text("git", &["rev-parse", "HEAD"]),
        "profile": if cfg!(debug_assertions) { "dev" } else { "release" },
        "cpu": cpu.trim_start_matches([':', ' ', '\t']), "cores": std::thread::available_parallelism().unwrap().get(),
    });
    line.as_object_mut().unwrap().extend(result.as_object().unwrap().clone());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/campaigns").join(format!("{name}.jsonl"));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
    writeln!(file, "{line}").unwrap();
}
