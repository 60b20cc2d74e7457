//! Event files for TensorBoard: complete records, one per step, and their removal by a resumed run.

use crate::campaign::record;
use crate::program::{Workspace, run};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Event files of a run, oldest first.
fn event_files(workspace: &Workspace, out: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(workspace.path(out).join("tb")).unwrap();
    let mut files: Vec<_> =
        entries.map(|entry| entry.unwrap()).map(|entry| (entry.metadata().unwrap().modified().unwrap(), entry.path())).collect();
    files.sort();
    files.into_iter().map(|(_, path)| path).collect()
}

fn masked(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The events of a file. Each is preceded by its length with a checksum, and followed by its own checksum.
fn events(path: &Path) -> Vec<Vec<u8>> {
    let (mut rest, mut events): (&[u8], Vec<_>) = (&fs::read(path).unwrap(), vec![]);
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        assert_eq!(rest[8..12], masked(&rest[..8]).to_le_bytes());
        let event = &rest[12..12 + length];
        assert_eq!(rest[12 + length..16 + length], masked(event).to_le_bytes());
        events.push(event.to_vec());
        rest = &rest[16 + length..];
    }
    events
}

#[test]
fn every_step_is_an_event_and_a_resumed_run_takes_later_ones_back() {
    let workspace = Workspace::new();
    run(&mut workspace.train("out", &[])).digest();
    let [whole] = event_files(&workspace, "out").try_into().unwrap();
    assert_eq!(events(&whole).len(), 1 + 12, "the version and twelve steps");
    fs::remove_dir_all(workspace.path("out/checkpoint-12")).unwrap();
    fs::remove_dir_all(workspace.path("out/checkpoint-10")).unwrap();
    let resumed = run(&mut workspace.resume("out", &[]));
    resumed.digest();
    let files = event_files(&workspace, "out");
    let second = events(&files[1]);
    let begun = workspace.metrics("out").len() - (second.len() - 2) + 1;
    // Field 2 is the step. Field 7 is a session; its field 1 marks the start.
    assert_eq!(second[1][9..], [0x10, begun as u8, 0x3a, 2, 8, 1], "{resumed:?}");
    // A new run has its own file.
    run(&mut workspace.train("out", &["--max-steps=3"])).digest();
    let [fresh] = event_files(&workspace, "out").try_into().unwrap();
    assert!(events(&fresh).len() == 4 && workspace.path("out/previous-1/tb").is_dir());
}

#[test]
fn events_are_left_out_on_request_and_replace_nothing_foreign() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("none", &["--report-to=none"])).digest().to_string();
    assert!(!workspace.path("none/tb").exists());
    fs::create_dir_all(workspace.path("out")).unwrap();
    fs::create_dir(workspace.path("elsewhere")).unwrap();
    std::os::unix::fs::symlink(workspace.path("elsewhere"), workspace.path("out/tb")).unwrap();
    let refused = run(&mut workspace.train("out", &["--resume-from-checkpoint=auto"]));
    refused.refused(2, &["out/tb: not a folder of events of this program", "or use --report-to none"]);
    assert_eq!(workspace.names("out", ""), ["tb"], "it was refused before it wrote anything");
    assert_eq!(run(&mut workspace.train("out", &["--report-to=none"])).digest(), digest);
    assert!(workspace.path("out/tb").is_symlink());
    // A resumed run renames the foreign entry.
    let resumed = run(&mut workspace.resume("out", &["--max-steps=13"]));
    resumed.digest();
    assert!(resumed.stderr.contains("out/tb: not a folder of events of this program; it is now tb.foreign-1"), "{resumed:?}");
    assert!(workspace.path("out/tb.foreign-1").is_symlink() && event_files(&workspace, "out").len() == 1);
    assert_eq!(fs::read_dir(workspace.path("elsewhere")).unwrap().count(), 0);
}

/// TensorBoard reads the steps and losses of metrics.jsonl, also after a resume. A line of `tests/campaigns/tensorboard.jsonl` records the
/// result.
#[test]
#[ignore = "needs a Python with tensorboard 2.21 in SUPEROFFLOAD_PYTHON"]
fn tensorboard_reads_the_values_of_the_metrics() {
    let workspace = Workspace::new();
    run(&mut workspace.train("out", &[])).digest();
    fs::remove_dir_all(workspace.path("out/checkpoint-12")).unwrap();
    run(&mut workspace.resume("out", &[])).digest();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tensorboard/losses.py");
    let python = std::env::var("SUPEROFFLOAD_PYTHON").unwrap();
    let output = Command::new(&python).arg(script).arg(workspace.path("out/tb")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let read: Vec<(u64, f32)> = serde_json::from_slice(&output.stdout).unwrap();
    let message = workspace.metrics("out");
    let message: Vec<_> = message.iter().map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap() as f32)).collect();
    assert_eq!(read, message);
    let version = Command::new(python).args(["-c", "import tensorboard; print(tensorboard.__version__)"]).output().unwrap().stdout;
    let version = String::from_utf8(version).unwrap().trim().to_string();
    record("tensorboard", json!({"tensorboard": version, "losses": message.len(), "resumed": true, "equal": true}));
}
