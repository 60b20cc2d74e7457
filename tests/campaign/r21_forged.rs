//! R21: manifests with a valid checksum and invalid content.

use crate::doors::sealed;
use crate::harness::*;
use serde_json::{Value, json};
use std::fs;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R21b",
    what: "every field of a checkpoint's manifest replaced by extremes and nonsense, sealed with a right checksum, then resumed and \
           digested: an orderly end, no panic, no abort",
    runs: 1500,
    smoke: 4,
    start,
};

fn values() -> Vec<Value> {
    vec![
        json!(0),
        json!(-1),
        json!(1),
        json!(u64::MAX),
        json!(1u64 << 63),
        json!(4.5),
        json!(-0.0),
        json!(1e-45),
        json!(1e300),
        json!(-1e300),
        json!(null),
        json!(""),
        json!("auto"),
        json!("nan"),
        json!("../../x"),
        json!([]),
        json!({}),
        json!([1, 2]),
        json!(true),
        json!(8_796_093_022_208u64),
    ]
}

fn start(harness: &Harness) -> Result<Trial, String> {
    harness.reference("whole", &["--max-steps", "4"])?;
    let text = fs::read(harness.path("whole/checkpoint-4/trainer_state.json")).unwrap();
    let manifest = serde_json::from_slice::<Value>(&text).map_err(|e| e.to_string())?["manifest"].clone();
    expect(fs::read(harness.path("whole/checkpoint-4/trainer_state.json")).unwrap() == sealed(manifest.to_string().as_bytes()), || {
        "the manifest is sealed in another way than this campaign knows".into()
    })?;
    let mut pointers = vec![];
    collect(&manifest, String::new(), &mut pointers);
    let values = values();
    Ok(Box::new(move |harness, turn| {
        // All combinations of fields and values, in an order in which any prefix is a sample.
        let all = (pointers.len() * values.len()) as u64;
        turn.over = turn.index >= all;
        if turn.over {
            return Ok(());
        }
        let nth = (turn.index * 10_007 % all) as usize;
        let (pointer, value) = (&pointers[nth / values.len()], &values[nth % values.len()]);
        turn.kind = pointer.split('/').nth(1).unwrap_or_default().into();
        forge(harness, &manifest, pointer, value).map_err(|e| format!("{pointer} = {value}: {e}"))
    }))
}

/// Collects JSON pointers of all leaf values.
fn collect(value: &Value, at: String, pointers: &mut Vec<String>) {
    match value {
        Value::Object(map) if !map.is_empty() => map.iter().for_each(|(key, value)| collect(value, format!("{at}/{key}"), pointers)),
        // One element of a list stands for all.
        Value::Array(list) if !list.is_empty() => collect(&list[0], format!("{at}/0"), pointers),
        _ => pointers.push(at),
    }
}

fn forge(harness: &Harness, manifest: &Value, pointer: &str, value: &Value) -> Result<(), String> {
    let mut forged = manifest.clone();
    *forged.pointer_mut(pointer).unwrap() = value.clone();
    harness.remove("forged");
    copy_dir(&harness.path("whole/checkpoint-4"), &harness.path("forged/checkpoint-4"));
    fs::write(harness.path("forged/checkpoint-4/trainer_state.json"), sealed(forged.to_string().as_bytes())).unwrap();
    let mut digest = std::process::Command::new(&harness.program);
    digest.arg("digest").arg(harness.path("forged/checkpoint-4"));
    harness.run(digest).expect_orderly(&[0, 1, 2])?;
    let checkpoint = harness.path("forged/checkpoint-4");
    let flags = ["--resume-from-checkpoint", checkpoint.to_str().unwrap(), "--max-steps", "6"];
    harness.run(harness.train("forged", &flags)).expect_orderly(&[0, 1, 2])
}
