//! Training on records with weights: beside masks that say the same, on several devices, after a resume, in evaluations, and what is
//! refused.

use crate::program::{Outcome, Workspace, program, run};
use serde_json::{Value, json};

/// Writes 24 records of 16 tokens, each with the columns that `beside` gives for its number and ids. Returns the flag that reads them.
fn records(workspace: &Workspace, name: &str, beside: impl Fn(usize, &[usize]) -> Value) -> String {
    let record = |nth: usize| {
        let ids: Vec<usize> = (0..16).map(|i| (nth * 31 + i * 7) % 256).collect();
        let mut record = beside(nth, &ids);
        record["input_ids"] = json!(ids);
        record.to_string()
    };
    format!("--data={}", workspace.write(name, (0..24).map(record).collect::<Vec<_>>().join("\n")).display())
}

/// Records with weights from 0 to 1 in steps of 1/16.
fn weighted(workspace: &Workspace) -> String {
    let weights = |nth: usize, ids: &[usize]| ids.iter().map(|id| ((nth + id) % 17) as f64 / 16.0).collect::<Vec<_>>();
    records(workspace, "weighted.jsonl", |nth, ids| json!({"weights": weights(nth, ids)}))
}

const BFD: &str = "--packing=bfd";

fn train(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    run(&mut workspace.train(out, &[&["--seq-length=16"], flags].concat()))
}

#[test]
fn weights_of_0_and_1_train_to_the_bits_of_labels_and_weights_of_1_to_those_of_ids_alone() {
    let workspace = Workspace::new();
    let is_trained = |at: usize, nth: usize| !(at + nth).is_multiple_of(3);
    let labels =
        |nth: usize, ids: &[usize]| (0..).zip(ids).map(|(at, id)| if is_trained(at, nth) { *id as i64 } else { -100 }).collect::<Vec<_>>();
    let weights = |nth: usize| (0..16).map(|at| f64::from(u8::from(is_trained(at, nth)))).collect::<Vec<_>>();
    for (name, plain, weighted) in [
        (
            "masked",
            records(&workspace, "labels.jsonl", |nth, ids| json!({"labels": labels(nth, ids)})),
            records(&workspace, "0_and_1.jsonl", |nth, _| json!({"weights": weights(nth)})),
        ),
        (
            "whole",
            records(&workspace, "ids.jsonl", |_, _| json!({})),
            records(&workspace, "ones.jsonl", |_, ids| json!({"weights": vec![1; ids.len()]})),
        ),
    ] {
        for [head_rows, packing] in [["--head-rows=all", "--packing=wrapped"], ["--head-rows=trained", BFD]] {
            let of = |data: &str| train(&workspace, "out", &[data, "--max-steps=3", head_rows, packing]).digest().to_string();
            assert_eq!(of(&plain), of(&weighted), "{name} {head_rows}");
        }
    }
}

#[test]
fn devices_a_resume_and_evaluations_have_the_bits_of_one_weighted_run() {
    let workspace = Workspace::new();
    let data = weighted(&workspace);
    let flags = [&*data, BFD, "--gradient-shares=2", "--eval-split=4", "--eval-steps=3", "--head-rows=trained"];
    let one = train(&workspace, "one", &[&flags[..], &["--gradient-accumulation-steps=2"]].concat()).digest().to_string();
    let two = ["--gradient-accumulation-steps=1", "--gpus=2", "--device=cpu"];
    assert_eq!(train(&workspace, "two", &[&flags[..], &two].concat()).digest(), one);
    let losses = |out: &str| workspace.metrics(out).iter().map(|line| line["eval_loss"].clone()).collect::<Vec<_>>();
    assert!(losses("one") == losses("two") && losses("one").iter().any(Value::is_number), "{:?}", losses("one"));
    // The tokens come from the folder that the run has prepared.
    std::fs::remove_file(data.strip_prefix("--data=").unwrap()).unwrap();
    for later in workspace.names("one", "checkpoint-").iter().filter(|name| *name != "checkpoint-6") {
        std::fs::remove_dir_all(workspace.path("one").join(later)).unwrap();
    }
    let resumed = [&flags[..], &["--gradient-accumulation-steps=2", "--resume-from-checkpoint=auto"]].concat();
    assert_eq!(train(&workspace, "one", &resumed).digest(), one);
}

/// The records in ```json blocks of the guide.
#[test]
fn the_records_of_the_guide_are_trained_with_their_weights() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/guide/data-formats.md")).unwrap();
    let blocks: Vec<&str> = page.split("```json\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let workspace = Workspace::new();
    let source = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
    let template = workspace.write("chat.jinja", source);
    let template = format!("--chat-template={}", template.display());
    for (block, shown, flags) in [
        (blocks[0], "<72><105><33><32>\u{27e6}<79>\u{27e7}\u{27e6}<107>\u{27e7}*0.5\u{27e6}<46>\u{27e7}*0.25", &[][..]),
        (blocks[1], "<u>Hi!<a>\u{27e6}Ok.\u{27e7}*0.25", &[&*template]),
    ] {
        let path = workspace.write("guide.jsonl", block);
        let view = run(program(&["data", "--seq-length=16", "--tokenizer=bytes", BFD]).args(flags).arg(&path));
        assert!(view.stdout.contains(shown), "{view:?}");
        let data = format!("--data={}", path.display());
        train(&workspace, "out", &[&[&*data, BFD, "--max-steps=2"], flags].concat()).digest();
    }
    assert_eq!(blocks.len(), 2);
}

#[test]
fn an_evaluation_is_the_weighted_mean_however_it_is_cut() {
    let workspace = Workspace::new();
    let evaluated = format!("--eval-data={}", weighted(&workspace).strip_prefix("--data=").unwrap());
    let data = records(&workspace, "plain.jsonl", |_, _| json!({}));
    let loss = |rows: usize| {
        let rows = format!("--per-device-train-batch-size={rows}");
        let flags = ["--max-steps=1", "--eval-on-start", "--dtype=float32", BFD, &*rows, &*data, &*evaluated];
        train(&workspace, "out", &flags).digest();
        workspace.metrics("out").iter().find_map(|line| line["eval_loss"].as_f64()).unwrap()
    };
    let [whole, cut] = [12, 1].map(loss);
    assert!((whole / cut - 1.0).abs() < 1e-6, "{whole} and {cut}");
}

#[test]
fn bad_weights_are_refused_with_the_file_and_the_record() {
    let workspace = Workspace::new();
    let range = "weights are numbers from 0 to 1; divide all weights by the largest one";
    for (weights, cause) in [
        ("[1, -0.5, 1]", format!("`weights` has -0.5 for token 1: {range}")),
        ("[1, 1, 2]", format!("`weights` has 2 for token 2: {range}")),
        ("[1, NaN, 1]", "`weights` holds NaN, which is not a JSON number".into()),
        ("[1, 1]", "`weights` has 2 values for 3 token ids; write one weight for each id".into()),
        ("[0, 0, 0]", "all `weights` are 0, so no token is trained; leave the record out".into()),
    ] {
        let lines = format!("{{\"input_ids\": [1, 2, 3]}}\n{{\"input_ids\": [1, 2, 3], \"weights\": {weights}}}\n");
        let data = format!("--data={}", workspace.write("a.jsonl", lines).display());
        train(&workspace, "out", &[&data, BFD]).refused(1, &["a.jsonl: line 2: ", &cause]);
    }
}

#[cfg(feature = "parquet")]
#[test]
fn weights_of_a_table_are_those_of_lines_and_nan_is_refused() {
    let workspace = Workspace::new();
    let golden = |name: &str| format!("--data={}/tests/golden/parquet/{name}.parquet", env!("CARGO_MANIFEST_DIR"));
    let line = |n: usize| json!({"input_ids": [n, n + 1, 7], "weights": [1.0, n as f64 / 64.0, 0.25]}).to_string();
    let lines = workspace.write("lines.jsonl", (0..40).map(line).collect::<Vec<_>>().join("\n"));
    let of = |data: &str| train(&workspace, "out", &[data, "--max-steps=3", BFD]).digest().to_string();
    assert_eq!(of(&golden("weights")), of(&format!("--data={}", lines.display())));
    train(&workspace, "out", &[&golden("nan"), BFD]).refused(1, &["nan.parquet: row 2: `weights` has null for token 1: "]);
}

#[test]
fn weights_are_shown_and_rounding_is_a_warning() {
    let workspace = Workspace::new();
    let lines = "{\"input_ids\": [65, 66, 67, 68], \"weights\": [0, 1, 0.25, 0.1]}\n{\"input_ids\": [65, 66], \"weights\": [1, 1]}";
    let path = workspace.write("a.jsonl", lines);
    let shown = run(program(&["data", "--seq-length=4", "--tokenizer=bytes"]).arg(&path));
    let text = "<65>\u{27e6}<66>\u{27e7}\u{27e6}<67>\u{27e7}*0.25\u{27e6}<68>\u{27e7}*0.1001";
    assert!(shown.stdout.contains(text) && shown.stdout.contains("and *WEIGHT follows it"), "{shown:?}");
    let rounded = "a.jsonl: line 1: a weight is rounded to the nearest multiple of 1/4096 above 0 (in 1 of 2 records)";
    assert!(format!("{shown:?}").contains(rounded), "{shown:?}");
    let json = run(program(&["data", "--json", "--seq-length=4", "--tokenizer=bytes"]).arg(&path));
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    let pieces = json["first"][0]["pieces"].as_array().unwrap();
    assert_eq!((&pieces[0]["trained"], pieces[0].get("weight"), &pieces[2]["weight"]), (&json!(false), None, &json!(0.25)), "{json}");
}
