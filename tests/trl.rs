//! Against TRL's trainer: ten steps on chats through three templates, in rows of both kinds, in float32, and an evaluation before them. How they
//! were made, and how rows that TRL cuts otherwise come to mean the same, says golden/trl/generate.py.

use crate::program::{Workspace, program, run};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Losses are about 6, and each differs by some roundings of float32.
const LOSS_ERROR_MAX: f64 = 1e-5;

#[test]
fn ten_steps_have_the_losses_of_trl() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(golden.join("trl/losses.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 6);
    for case in &cases {
        let (have, evaluated) = losses(&golden, case);
        let (want, want_evaluated) = (case["losses"].as_array().unwrap(), case["eval_loss"].as_f64().unwrap());
        let at = format!("{} {} evaluated", case["case"], case["packing"]);
        assert!((evaluated - want_evaluated).abs() <= LOSS_ERROR_MAX, "{at}: {evaluated}, TRL {want_evaluated}");
        assert_eq!(have.len(), want.len());
        for (step, (have, want)) in have.iter().zip(want).enumerate() {
            let (want, at) = (want.as_f64().unwrap(), format!("{} {} step {step}", case["case"], case["packing"]));
            assert!((have - want).abs() <= LOSS_ERROR_MAX, "{at}: {have}, TRL {want}");
        }
    }
}

/// The losses of the steps that the trainer did, and that of all rows before the first one.
fn losses(golden: &Path, case: &Value) -> (Vec<f64>, f64) {
    let workspace = Workspace::new();
    let text = |key: &str| case[key].as_str().unwrap();
    let path = |flag: &str, path: PathBuf| format!("--{flag}={}", path.display());
    let flags = [
        path("model", golden.join("trl/model")),
        path("data", golden.join(format!("trl/{}.jsonl", text("case")))),
        path("eval-data", golden.join(format!("trl/{}.jsonl", text("case")))),
        path("chat-template", golden.join(format!("chat/templates/{}.jinja", text("template")))),
        path("output-dir", workspace.path("out")),
        format!("--packing={}", text("packing")),
        format!("--seq-length={}", case["seq_length"]),
    ];
    let shared = "--device=cpu --dtype=float32 --threads=2 --no-shuffle --max-steps=10 --per-device-train-batch-size=2 \
        --gradient-accumulation-steps=2 --learning-rate=2e-3 --lr-scheduler-type=linear --warmup-steps=2 --weight-decay=0.1 \
        --max-grad-norm=1.0 --report-to=none --eval-on-start";
    let outcome = run(program(&["train"]).args(&flags).args(shared.split_whitespace()));
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let rows = format!(" {} sequences of ", case["rows"]);
    assert!(outcome.stdout.contains(&rows), "not{rows}: {outcome:?}");
    let lines = workspace.metrics("out");
    let evaluated = lines.iter().find_map(|line| line["eval_loss"].as_f64()).unwrap();
    (lines.iter().filter_map(|line| line["loss"].as_f64()).collect(), evaluated)
}
