//! Conditions for resuming: the same model, tokenizer and data, at any location. Also checkpoints that cannot be read, are damaged, or
//! contain nonsense with a valid checksum.

use crate::program::{CONFIG, Outcome, Workspace, copy_dir, program, run};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A tokenizer of words with the vocabulary `vocab`.
fn words(vocab: &Value) -> String {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null, "decoder": null,
        "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    })
    .to_string()
}

fn warnings(outcome: &Outcome) -> Vec<&str> {
    outcome.stderr.lines().filter(|line| line.starts_with("warning: ")).collect()
}

pub fn manifest(checkpoint: &Path) -> Value {
    let sealed: Value = serde_json::from_slice(&fs::read(checkpoint.join("trainer_state.json")).unwrap()).unwrap();
    sealed["manifest"].clone()
}

/// Writes `manifest` into the checkpoint with a valid checksum.
pub fn forge(checkpoint: &Path, manifest: &Value) {
    let body = format!("{{\"manifest\":{manifest}");
    let crc = crc32c::crc32c(body.as_bytes());
    fs::write(checkpoint.join("trainer_state.json"), format!("{body},\n\"crc32c\":\"{crc:08x}\"}}\n")).unwrap();
}

/// Checks that `out` has these checkpoints and that nothing was moved aside.
fn assert_untouched(workspace: &Workspace, out: &str, checkpoints: &[&str]) {
    assert_eq!(workspace.names(out, "checkpoint-"), checkpoints);
    assert_eq!(workspace.names(out, "previous-"), [""; 0]);
}

#[test]
fn a_checkpoint_of_format_1_is_continued_with_one_warning() {
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/checkpoint-format-1");
    let workspace = Workspace::new();
    let (old, data) = (workspace.path("old"), committed.join("data.txt"));
    copy_dir(&committed.join("checkpoint-2"), &old);
    let recorded = "1e51f0ccfcf6d8f5655b60c4e4f761ebf2703926e0f37180a090ffbe629982ba";
    assert_eq!(run(program(&["digest"]).arg(&old)).digest(), recorded);
    let train = |out: &str, flags: &[&str]| {
        let mut command = program(&["train", "--init=random", "--seq-length=32", "--per-device-train-batch-size=2", "--max-steps=4"]);
        command.args(["--learning-rate=1e-2", "--device=cpu", "--threads=1", "--save-steps=2", "--digest"]).args(flags);
        run(command.arg("--model").arg(old.join("model")).arg("--data").arg(&data).arg("--output-dir").arg(workspace.path(out)))
    };
    let whole = train("whole", &[]);
    let resumed = train("resumed", &["--resume-from-checkpoint", old.to_str().unwrap()]);
    // The digest of the program that made the checkpoint, after the same steps.
    let end = "04f5b7a7752eb1f3ffe226217a383e7b03bbfe1dcd6c79234052c404677425d9";
    assert_eq!([resumed.digest(), whole.digest()], [end, end]);
    let printed = warnings(&resumed);
    assert!(
        printed.len() == 1 && printed[0].contains("format 1") && printed[0].contains("no record of model, tokenizer, data, numerics"),
        "{resumed:?}"
    );
    let (saved, fresh) = (manifest(&workspace.path("resumed/checkpoint-4")), manifest(&workspace.path("whole/checkpoint-4")));
    assert_eq!((&saved["format_version"], &saved["run"]), (&json!(2), &fresh["run"]));
    assert!(train("resumed", &["--resume-from-checkpoint=auto", "--max-steps=5"]).stderr.lines().count() == 1, "only the new length");
}

/// Checkpoints from before gradient shares and recorded numerics resume with one share and the planned tile, with a warning.
#[test]
fn a_checkpoint_without_shares_and_numerics_is_continued_as_one_share() {
    let workspace = Workspace::new();
    let flags = ["--gradient-accumulation-steps", "2", "--gradient-shares", "1"];
    let digest = run(&mut workspace.train("whole", &flags)).digest().to_string();
    workspace.copy_checkpoints("whole", "old", &[6]);
    let checkpoint = workspace.path("old/checkpoint-6");
    let mut old = manifest(&checkpoint);
    let record = old["run"].as_object_mut().unwrap();
    assert_eq!(record.remove("step").unwrap(), json!({"micro_batches": 2, "gradient_shares": 1}));
    assert!(record.remove("numerics").unwrap()["loss_tile"]["rows"].as_u64() > Some(0));
    assert_eq!(old["trainer"]["settings"].as_object_mut().unwrap().remove("gradient_shares").unwrap(), json!(1));
    forge(&checkpoint, &old);
    let resumed = run(&mut workspace.resume("old", &[]));
    assert_eq!(resumed.digest(), digest);
    assert!(warnings(&resumed).len() == 1 && resumed.stderr.contains("no record of numerics"), "{resumed:?}");
}

/// Numerics that the plan chooses are taken from the checkpoint. Those that the run cannot reproduce are rejected.
#[test]
fn numerics_are_kept_or_refused_unless_changes_are_allowed() {
    let workspace = Workspace::new();
    whole(&workspace);
    let checkpoint = workspace.path("whole/checkpoint-6");
    let honest = manifest(&checkpoint);
    let resume = |out: &str, key: &str, value: Value, flags: &[&str]| {
        let mut forged = honest.clone();
        forged["run"]["numerics"][key] = value;
        forge(&checkpoint, &forged);
        workspace.copy_checkpoints("whole", out, &[6]);
        run(&mut workspace.resume(out, flags))
    };
    let tile = |out: &str| manifest(&workspace.path(&format!("{out}/checkpoint-12")))["run"]["numerics"]["loss_tile"].clone();
    let other = json!({"rows": 5, "vocab": 100});
    assert_eq!(resume("kept", "loss_tile", other.clone(), &[]).code, 0);
    assert_eq!(tile("kept"), other);
    let anew = resume("anew", "loss_tile", other.clone(), &["--allow-changed", "numerics"]);
    assert!(warnings(&anew)[0].contains("rows was 5 and is"), "{anew:?}");
    assert_eq!(tile("anew"), honest["run"]["numerics"]["loss_tile"]);
    let words = ["computed_on was \"gpu\" and is \"cpu\"", "--allow-changed numerics"];
    resume("gpu", "computed_on", json!("gpu"), &[]).refused(2, &words);
    assert_eq!(resume("moved", "computed_on", json!("gpu"), &["--allow-changed", "numerics"]).code, 0);
    let words = ["cpu_sum_block was null and is 128", "--allow-changed numerics"];
    resume("chains", "cpu_sum_block", json!(null), &[]).refused(2, &words);
    let sums = resume("blocks", "cpu_sum_block", json!(null), &["--allow-changed", "numerics"]);
    assert!(sums.code == 0 && warnings(&sums).iter().any(|line| line.contains(words[0])), "{sums:?}");
    resume("broken", "loss_tile", json!("all"), &[]).refused(1, &["trainer_state.json", "loss_tile"]);
}

#[test]
fn other_places_of_the_same_model_and_data_are_no_change() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("whole", &[])).digest().to_string();
    run(&mut workspace.train("part", &["--max-steps", "4"])).digest();
    let dtype = CONFIG.replace("{\n", "{\"initializer_range\": 0.5, \"torch_dtype\": \"bfloat16\", \"_name_or_path\": \"x\",\n");
    workspace.write("elsewhere/model/config.json", dtype);
    fs::rename(workspace.path("data.txt"), workspace.path("elsewhere/corpus.txt")).unwrap();
    let (model, data) = (workspace.path("elsewhere/model"), workspace.path("elsewhere/corpus.txt"));
    let flags = ["--model", model.to_str().unwrap(), "--data", data.to_str().unwrap()];
    let resumed = run(&mut workspace.resume("part", &flags));
    assert_eq!(resumed.digest(), digest);
    let printed = warnings(&resumed);
    assert!(printed.len() == 1 && printed[0].contains("--max-steps was 4 before and is "), "{resumed:?}");
}

/// Trains 4 steps and applies `change` to the files. Resuming must fail with these words, and succeed with `--allow-changed part`.
fn assert_compared(workspace: &Workspace, part: &str, change: impl FnOnce(), refusal: &[&str]) {
    run(&mut workspace.train(part, &["--max-steps", "4"])).digest();
    change();
    let refused = run(&mut workspace.resume(part, &[]));
    refused.refused(2, &[refusal, &[&format!("--allow-changed {part}")]].concat());
    assert_untouched(workspace, part, &["checkpoint-2", "checkpoint-4"]);
    let accepted = run(&mut workspace.resume(part, &["--max-steps", "6", "--allow-changed", part]));
    accepted.digest();
    let printed = warnings(&accepted);
    assert!(printed.iter().any(|line| refusal.iter().all(|word| line.contains(word))), "{accepted:?}");
    let saved = manifest(&workspace.path(&format!("{part}/checkpoint-6")));
    let changed = saved["run"]["changed"].as_array().unwrap();
    assert!(changed.len() == 1 && changed[0]["step"] == 4 && changed[0]["part"] == part, "{changed:?}");
    let further = run(&mut workspace.resume(part, &["--max-steps", "6"]));
    assert!(further.code == 0 && further.stderr.is_empty(), "the changed one is the run's now: {further:?}");
}

#[test]
fn another_model_is_refused_unless_it_is_allowed() {
    let workspace = Workspace::new();
    let other = CONFIG.replace("10000.0", "7.0").replace("1e-5", "0.5");
    let change = || fs::write(workspace.path("model/config.json"), other).unwrap();
    assert_compared(&workspace, "model", change, &["rope_theta was 10000.0 and is 7.0", "norm_eps was 0.00001 and is 0.5"]);
}

/// A checkpoint of an older program has another version of the rules, or none.
#[test]
fn records_that_other_rules_read_are_refused_unless_they_are_allowed() {
    let workspace = Workspace::new();
    let record = |n: usize| json!({"text": format!("document {n} has a few words of its own")}).to_string();
    let data = format!("--data={}", workspace.write("data.jsonl", (0..400).map(record).collect::<Vec<_>>().join("\n")).display());
    for (version, before) in [(json!(1), 1), (json!(null), 1), (json!(7), 7)] {
        let out = format!("of-{version}");
        run(&mut workspace.train(&out, &[&data, "--max-steps=4"])).digest();
        let checkpoint = workspace.path(&format!("{out}/checkpoint-4"));
        let mut older = manifest(&checkpoint);
        let now = older["run"]["data"]["record_rules"].as_u64().unwrap();
        older["run"]["data"]["record_rules"] = version;
        forge(&checkpoint, &older);
        let change = format!("the rules by which records become tokens and masks had version {before} and have version {now} now");
        run(&mut workspace.resume(&out, &[&data])).refused(2, &[&change, "--allow-changed data"]);
        assert_untouched(&workspace, &out, &["checkpoint-2", "checkpoint-4"]);
        let accepted = run(&mut workspace.resume(&out, &[&data, "--max-steps=6", "--allow-changed=data"]));
        accepted.digest();
        assert!(warnings(&accepted).iter().any(|line| line.contains(&change)), "{accepted:?}");
        let saved = manifest(&workspace.path(&format!("{out}/checkpoint-6")));
        assert_eq!((&saved["run"]["data"]["record_rules"], &saved["run"]["changed"][0]["part"]), (&json!(now), &json!("data")));
        let further = run(&mut workspace.resume(&out, &[&data, "--max-steps=6"]));
        assert!(further.code == 0 && !further.stderr.contains("rules"), "the new rules are the run's now: {further:?}");
    }
}

/// Moments of another format are converted if the user allows it: rounded to bfloat16, or exactly to float32.
#[test]
fn moments_of_another_format_are_refused_unless_they_may_be_converted() {
    let (workspace, packed) = (Workspace::new(), ["--moments", "bfloat16"]);
    run(&mut workspace.train("wide", &["--max-steps", "4"])).digest();
    let refusal = "they were float32 and are bfloat16";
    run(&mut workspace.resume("wide", &packed)).refused(2, &[refusal, "use the former --moments", "--allow-changed moments"]);
    let allowed = ["--max-steps", "6", "--allow-changed", "moments"];
    let converted = run(&mut workspace.resume("wide", &[&packed[..], &allowed].concat()));
    converted.digest();
    assert!(warnings(&converted)[0].contains(&format!("{refusal}: rounded as the checkpoint's last step rounds")), "{converted:?}");
    let saved = manifest(&workspace.path("wide/checkpoint-6"));
    assert_eq!((&saved["format_version"], &saved["run"]["moments"]), (&json!(3), &json!("bfloat16")));
    assert_eq!(saved["run"]["changed"][0]["part"], "moments");
    run(&mut workspace.resume("wide", &["--max-steps", "6"])).refused(2, &["they were bfloat16 and are float32"]);
    let bytes = |step: u64| fs::metadata(workspace.path(&format!("wide/checkpoint-{step}/state.bin"))).unwrap().len();
    assert_eq!(3 * bytes(6), 2 * bytes(4));
    let back = run(&mut workspace.resume("wide", &["--max-steps", "8", "--allow-changed", "moments"]));
    assert!(warnings(&back)[0].contains("they were bfloat16 and are float32: no value changes"), "{back:?}");
    let saved = manifest(&workspace.path("wide/checkpoint-8"));
    assert_eq!((&saved["format_version"], &saved["run"]["moments"], bytes(8)), (&json!(2), &json!("float32"), bytes(4)));
    let further = run(&mut workspace.resume("wide", &["--max-steps", "8"]));
    assert!(further.code == 0 && further.stderr.is_empty(), "the changed one is the run's now: {further:?}");
}

/// 8-bit moments are made of those of both other formats, and become those of both without another value.
#[test]
fn moments_in_8_bits_are_converted_in_both_directions() {
    for other in ["float32", "bfloat16"] {
        let workspace = Workspace::new();
        let shares = ["--gradient-shares", "2"];
        let of = |moments, steps| [&shares[..], &["--moments", moments, "--max-steps", steps, "--allow-changed", "moments"]].concat();
        run(&mut workspace.train("run", &[&shares[..], &["--moments", other, "--max-steps", "4"]].concat())).digest();
        let refusal = format!("they were {other} and are int8");
        run(&mut workspace.resume("run", &[&shares[..], &["--moments", "int8"]].concat()))
            .refused(2, &[&refusal, "--allow-changed moments"]);
        let converted = run(&mut workspace.resume("run", &of("int8", "6")));
        let digest = converted.digest();
        assert!(warnings(&converted)[0].contains(&format!("{refusal}: rounded as the checkpoint's last step rounds")), "{converted:?}");
        let saved = manifest(&workspace.path("run/checkpoint-6"));
        assert_eq!((&saved["format_version"], &saved["run"]["moments"]), (&json!(5), &json!("int8")));
        // A conversion does not depend on the number of ranks.
        workspace.copy_checkpoints("run", "ranks", &[4]);
        assert_eq!(run(&mut workspace.resume("ranks", &[&of("int8", "6")[..], &["--gpus", "2"]].concat())).digest(), digest);
        let back = run(&mut workspace.resume("run", &of(other, "8")));
        assert!(warnings(&back)[0].contains(&format!("they were int8 and are {other}: no value changes")), "{back:?}");
    }
}

#[test]
fn another_tokenizer_is_refused_unless_it_is_allowed() {
    let workspace = Workspace::new();
    workspace.write("model/tokenizer.json", words(&json!({"green": 0, "ideas": 1, "<unk>": 2})));
    let change = || drop(workspace.write("model/tokenizer.json", words(&json!({"green": 1, "ideas": 0, "<unk>": 2}))));
    assert_compared(&workspace, "tokenizer", change, &["tokenizer.json was \"", "\" and is \""]);
}

#[test]
fn other_data_under_the_same_name_are_refused_unless_they_are_allowed() {
    let workspace = Workspace::new();
    let text = fs::read_to_string(workspace.path("data.txt")).unwrap();
    let change = || drop(workspace.write("data.txt", text.replace("green", "black")));
    assert_compared(&workspace, "data", change, &["file 1 was ", "data.txt", "and is "]);
    let longer = workspace.write("data.txt", text.replace("green", "black") + &text);
    run(&mut workspace.resume("data", &[])).refused(2, &["file 1 was "]);
    let anew = run(&mut workspace.resume("data", &["--max-steps", "7", "--allow-changed", "data"]));
    assert!(anew.code == 0 && anew.stderr.contains("epoch 0 restarts"), "{longer:?}: {anew:?}");
}

#[test]
fn unchanged_data_are_not_read_again() {
    let workspace = Workspace::new();
    run(&mut workspace.train("out", &["--max-steps", "4"])).digest();
    let kept = workspace.path("out/.superoffload/data-checksums.json");
    let mut sums: Value = serde_json::from_slice(&fs::read(&kept).unwrap()).unwrap();
    let file = workspace.path("data.txt").to_str().unwrap().to_string();
    assert_eq!(sums["content"][&file]["bytes"], fs::metadata(&file).unwrap().len());
    // If the file were read, its true checksum would be found.
    sums["content"][&file]["sha256"] = json!("0".repeat(64));
    let (mark, content) = (&sums["superoffload"], &sums["content"]);
    fs::write(&kept, format!("{{\"superoffload\":{mark},\"content\":{content}}}\n")).unwrap();
    run(&mut workspace.resume("out", &[])).refused(2, &["data.txt", &"0".repeat(64)]);
    fs::remove_file(&kept).unwrap();
    run(&mut workspace.resume("out", &[])).digest();
}

/// Trains a run with checkpoints 2 to 12 and returns its digest.
fn whole(workspace: &Workspace) -> String {
    run(&mut workspace.train("whole", &[])).digest().to_string()
}

#[test]
fn a_checkpoint_that_cannot_be_read_ends_the_run_and_nothing_is_moved() {
    let workspace = Workspace::new();
    let digest = whole(&workspace);
    workspace.copy_checkpoints("whole", "out", &[6, 8]);
    let state = workspace.path("out/checkpoint-8/state.bin");
    let aside = workspace.path("aside");
    fs::rename(&state, &aside).unwrap();
    // A loop of links fails like a disk: with a system error, not with invalid content.
    for target in [state.clone(), PathBuf::from("/not/mounted/state.bin")] {
        symlink(target, &state).unwrap();
        run(&mut workspace.resume("out", &[])).refused(1, &["read ", "checkpoint-8/state.bin", "os error"]);
        assert_untouched(&workspace, "out", &["checkpoint-6", "checkpoint-8"]);
        run(program(&["export"]).arg(workspace.path("out")).arg(workspace.path("x"))).refused(1, &["checkpoint-8/state.bin"]);
        fs::remove_file(&state).unwrap();
    }
    fs::rename(&aside, &state).unwrap();
    let resumed = run(&mut workspace.resume("out", &[]));
    assert!(resumed.digest() == digest && resumed.stdout.contains("checkpoint-8\n"), "{resumed:?}");
}

#[test]
fn damage_everywhere_is_an_error_that_names_each_and_no_fresh_start() {
    let workspace = Workspace::new();
    whole(&workspace);
    workspace.copy_checkpoints("whole", "out", &[2, 4, 6]);
    fs::write(workspace.path("out/checkpoint-2/state.bin"), "short").unwrap();
    fs::remove_file(workspace.path("out/checkpoint-4/trainer_state.json")).unwrap();
    fs::write(workspace.path("out/checkpoint-6/model/config.json"), "{}").unwrap();
    let words = ["checkpoint-2/state.bin", "checkpoint-4/trainer_state.json", "checkpoint-6/model/config.json"];
    let refused = run(&mut workspace.resume("out", &[]));
    refused.refused(1, &[&words[..], &["every checkpoint here is damaged", "without --resume-from-checkpoint"]].concat());
    assert!(warnings(&refused).is_empty() && !refused.stdout.contains("starting afresh"), "{refused:?}");
    assert_untouched(&workspace, "out", &["checkpoint-2", "checkpoint-4", "checkpoint-6"]);
    run(program(&["export"]).arg(workspace.path("out")).arg(workspace.path("x"))).refused(1, &words);
    // A checkpoint that was moved aside while another took its name counts, too.
    workspace.copy_checkpoints("whole", "old", &[6]);
    fs::write(workspace.path("old/checkpoint-6/state.bin"), "short").unwrap();
    fs::rename(workspace.path("old/checkpoint-6"), workspace.path("old/.checkpoint-6.old-999999999")).unwrap();
    run(&mut workspace.resume("old", &[])).refused(1, &["checkpoint-6/state.bin", "every checkpoint"]);
}

#[test]
fn nonsense_under_a_right_checksum_is_refused_by_resume_export_and_digest() {
    let workspace = Workspace::new();
    let digest = whole(&workspace);
    let checkpoint = workspace.path("whole/checkpoint-12");
    let honest = manifest(&checkpoint);
    let lies = [
        ("/trainer/step", json!(u64::MAX)),
        ("/trainer/optimizer_step", json!(u64::MAX)),
        ("/trainer/loss_scale/scale", json!(-1.0)),
        ("/trainer/loss_scale/scale", json!(1e-45)),
        ("/trainer/loss_scale/good_steps", json!(u64::MAX)),
        ("/trainer/scheduler/base_lr", json!(null)),
        ("/tensors/0/elems", json!(1u64 << 60)),
        ("/state_bytes", json!(1u64 << 43)),
        ("/files/0/bytes", json!(1u64 << 43)),
    ];
    let config = checkpoint.join("model/config.json");
    for (place, lie) in lies {
        let mut forged = honest.clone();
        *forged.pointer_mut(place).unwrap() = lie;
        forge(&checkpoint, &forged);
        if place.starts_with("/files") {
            fs::File::create(&config).unwrap().set_len(1 << 43).unwrap();
        }
        let named = checkpoint.to_str().unwrap();
        run(&mut workspace.train("x", &["--resume-from-checkpoint", named])).refused(1, &["checkpoint-12/trainer_state.json: "]);
        run(program(&["export", named]).arg(workspace.path("y"))).refused(1, &["checkpoint-12/trainer_state.json: "]);
        run(&mut program(&["digest", named])).refused(1, &["checkpoint-12/trainer_state.json: "]);
    }
    let fallen_back = run(&mut workspace.resume("whole", &[]));
    assert!(fallen_back.digest() == digest && fallen_back.stdout.contains("checkpoint-10\n"), "{fallen_back:?}");
}

#[test]
fn a_run_may_be_as_long_as_counters_reach() {
    let workspace = Workspace::new();
    run(&mut workspace.train("out", &["--max-steps", "2"])).digest();
    let checkpoint = workspace.path("out/checkpoint-2");
    let honest = manifest(&checkpoint);
    for step in [u64::from(u32::MAX), (1 << 53) - 2] {
        let mut late = honest.clone();
        (late["trainer"]["step"], late["trainer"]["optimizer_step"]) = (json!(step), json!(step));
        forge(&checkpoint, &late);
        let out = format!("late-{step}");
        let flags = ["--resume-from-checkpoint", checkpoint.to_str().unwrap(), "--max-steps", &(step + 2).to_string()];
        let resumed = run(&mut workspace.train(&out, &flags));
        resumed.digest();
        assert!(resumed.stdout.contains(&format!("finished {0} of {0} steps", step + 2)), "{resumed:?}");
    }
}

#[test]
fn numbers_without_sense_name_the_checkpoint() {
    let workspace = Workspace::new();
    run(&mut workspace.train("out", &["--max-steps", "2"])).digest();
    let checkpoint = workspace.path("out/checkpoint-2");
    let honest = manifest(&checkpoint);
    let lies = [
        ("/trainer/data_position", json!([])),
        ("/trainer/speculation/failures", json!(-1)),
        ("/run/step/micro_batches", json!(0)),
        ("/run/step/micro_batches", json!(1u64 << 63)),
        ("/run/step/gradient_shares", json!(1u64 << 62)),
        ("/run/numerics/loss_tile/rows", json!(0)),
        ("/run/numerics/loss_tile/vocab", json!(0)),
        ("/run/numerics/loss_tile", json!("all")),
    ];
    for (place, lie) in lies {
        let mut forged = honest.clone();
        *forged.pointer_mut(place).unwrap() = lie;
        forge(&checkpoint, &forged);
        run(&mut workspace.resume("out", &[])).refused(1, &[checkpoint.join("trainer_state.json").to_str().unwrap()]);
    }
}
