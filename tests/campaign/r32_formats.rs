//! R32: checkpoints of other format versions.

use crate::doors::sealed;
use crate::harness::*;
use serde_json::{Value, json};
use std::fs;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R32",
    what: "a checkpoint that says it is of a later format, or of none: refused in one line that says so",
    runs: 12,
    smoke: 2,
    start,
};

fn start(harness: &Harness) -> Result<Trial, String> {
    harness.reference("whole", &["--max-steps", "4"])?;
    let path = harness.path("whole/checkpoint-4/trainer_state.json");
    let mut manifest = serde_json::from_slice::<Value>(&fs::read(&path).unwrap()).map_err(|e| e.to_string())?["manifest"].clone();
    // The next three versions are those of packed moments, of several processes and of 8-bit moments, which this program reads.
    let this = manifest["format_version"].as_u64().ok_or("the manifest names no format")? + 3;
    Ok(Box::new(move |harness, turn| {
        let (low, high) = (u64::from(u32::MAX), u64::MAX);
        let others = [json!(this + 1), json!(0), json!(this + 2), json!(this + 100), json!(low), json!(low + 1), json!(high)];
        let more = [json!(-1), json!(1.5), json!("2"), json!(null), json!([1])];
        let version = others.iter().chain(&more).nth(turn.index as usize % 12).unwrap();
        turn.kind = if turn.index % 12 < 7 { "another number" } else { "no number" }.into();
        manifest["format_version"] = version.clone();
        fs::write(&path, sealed(manifest.to_string().as_bytes())).unwrap();
        let outcome = harness.run(harness.train("other", &["--resume-from-checkpoint", path.parent().unwrap().to_str().unwrap()]));
        outcome.expect_orderly(&[1, 2]).map_err(|e| format!("format {version}: {e}"))?;
        let names_file = outcome.stderr.contains("trainer_state.json");
        expect(names_file, || format!("format {version}: names no file: {outcome}"))
    }))
}
