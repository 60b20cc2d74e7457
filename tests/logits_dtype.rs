//! Logits in float32: the choice in checkpoints, when a run resumes, and in plans.

use crate::program::{Outcome, Workspace, copy_dir, program, run};
use crate::resume_compare::{forge, manifest};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Four steps of pairs in bfloat16.
fn dpo(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    let path = |flag: &str, path: PathBuf| format!("--{flag}={}", path.display());
    let paths = [
        path("model", golden("trl/model")),
        path("data", golden("preference/text.jsonl")),
        path("chat-template", golden("chat/templates/llama3.jinja")),
        path("output-dir", workspace.path(out)),
    ];
    let shared = "--loss=dpo --device=cpu --threads=2 --learning-rate=2e-3 --seq-length=96 --per-device-train-batch-size=1 --max-steps=4 \
        --save-steps=2 --report-to=none --digest";
    run(program(&["train"]).args(paths).args(shared.split_whitespace()).args(flags))
}

/// Goes on after step 2 of the run `from`, whose checkpoint `change` has changed.
fn resume(workspace: &Workspace, from: &str, out: &str, flags: &[&str], change: impl FnOnce(&mut Value)) -> Outcome {
    workspace.copy_checkpoints(from, out, &[2]);
    copy_dir(&workspace.path(from).join(".superoffload"), &workspace.path(out).join(".superoffload"));
    let checkpoint = workspace.path(out).join("checkpoint-2");
    let mut record = manifest(&checkpoint);
    change(&mut record["run"]["numerics"]);
    forge(&checkpoint, &record);
    dpo(workspace, out, &[&["--resume-from-checkpoint=auto"], flags].concat())
}

#[test]
fn a_run_keeps_the_format_of_its_logits_when_it_resumes_and_another_is_refused() {
    let workspace = Workspace::new();
    let whole = dpo(&workspace, "whole", &[]).digest().to_string();
    let narrow = dpo(&workspace, "narrow", &["--logits-dtype=bfloat16"]).digest().to_string();
    assert_ne!(whole, narrow);
    let format = |out: &str| manifest(&workspace.path(out).join("checkpoint-4"))["run"]["numerics"]["logits_dtype"].clone();
    assert_eq!([format("whole"), format("narrow")], ["float32", "bfloat16"]);
    let kept = |_: &mut Value| ();
    assert_eq!(resume(&workspace, "whole", "same", &[], kept).digest(), whole);
    assert_eq!(resume(&workspace, "narrow", "same-narrow", &[], kept).digest(), narrow);
    let other = ["--logits-dtype=bfloat16"];
    let words = ["logits_dtype was \"float32\" and is \"bfloat16\"", "--allow-changed numerics"];
    resume(&workspace, "whole", "other", &other, kept).refused(2, &words);
    let allowed = resume(&workspace, "whole", "allowed", &[&other[..], &["--allow-changed=numerics"]].concat(), kept);
    assert!(![&whole, &narrow].contains(&&allowed.digest().to_string()) && allowed.stderr.contains(words[0]), "{allowed:?}");
    // Checkpoints of before have no format, and logits in the format of the weights.
    let of_before = |numerics: &mut Value| assert_eq!(numerics.as_object_mut().unwrap().remove("logits_dtype").unwrap(), "bfloat16");
    assert_eq!(resume(&workspace, "narrow", "before", &[], of_before).digest(), narrow);
    let broken = |numerics: &mut Value| numerics["logits_dtype"] = "float12".into();
    resume(&workspace, "whole", "broken", &[], broken).refused(1, &["trainer_state.json", "logits_dtype: unknown variant `float12`"]);
}

#[test]
fn plans_name_the_format_of_logits_and_refuse_formats_of_other_weights() {
    let workspace = Workspace::new();
    let plan = |flags: &[&str]| {
        let shared = ["plan", "--hardware=h200-pcie5", "--strategy=no-offload", "--seq-length=64", "--model"];
        run(program(&shared).arg(workspace.path("model")).args(flags))
    };
    let of = |flags: &[&str]| plan(flags).stdout;
    let (tokens, pairs) = (of(&[]), of(&["--loss=dpo", "--packing=bfd", "--data-format=preference"]));
    assert!(tokens.contains("loss in tiles of ") && !tokens.contains("logits in"), "{tokens}");
    assert!(pairs.lines().any(|line| line == "  head        logits in float32"), "{pairs}");
    let both = of(&["--logits-dtype=float32", "--head-rows=trained"]);
    assert!(both.contains("  head        computed for rows with trained targets, logits in float32; times"), "{both}");
    assert_eq!(of(&["--logits-dtype=bfloat16"]), tokens);
    let words = ["--logits-dtype float16 with --dtype bfloat16: use --logits-dtype bfloat16 or float32"];
    plan(&["--logits-dtype=float16"]).refused(2, &words);
    let words = ["--logits-dtype bfloat16 with --dtype float32: use --logits-dtype float32"];
    plan(&["--logits-dtype=bfloat16", "--dtype=float32"]).refused(2, &words);
}
