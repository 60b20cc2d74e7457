//! Training on rows of whole documents: results, resume and rejected settings.

use crate::program::{Outcome, Workspace, program, run};
use serde_json::json;

/// Twenty-four text documents, from empty to three rows of 16 bytes.
fn texts(workspace: &Workspace) -> String {
    let text = |n: usize| json!({"text": "a few words of text, then some more of them"[..n * 7 % 44].to_string()}).to_string();
    let path = workspace.write("texts.jsonl", (0..24).map(text).collect::<Vec<_>>().join("\n"));
    format!("--data={}", path.display())
}

/// Records of token ids with these lengths.
fn records(workspace: &Workspace, lengths: &[usize]) -> String {
    let record = |(nth, length): (usize, &usize)| json!({"input_ids": (0..*length).map(|i| (nth * 31 + i * 7) % 256).collect::<Vec<_>>()});
    let lines: Vec<String> = lengths.iter().enumerate().map(|all| record(all).to_string()).collect();
    format!("--data={}", workspace.write("records.jsonl", lines.join("\n")).display())
}

fn train(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    run(&mut workspace.train(out, flags))
}

/// The output line about packing.
fn message(outcome: &Outcome) -> &str {
    let line = outcome.stdout.lines().find(|line| line.contains("packing "));
    line.unwrap_or_else(|| panic!("{outcome:?}"))
}

#[test]
fn packed_documents_are_trained_and_a_resume_is_exact() {
    let workspace = Workspace::new();
    let data = texts(&workspace);
    let mut digests = Vec::new();
    for packing in ["wrapped", "bfd", "off"] {
        let flags = [data.as_str(), "--packing", packing, "--eos-token=0"];
        let whole = train(&workspace, packing, &flags);
        let resumed = format!("{packing}-resumed");
        workspace.copy_checkpoints(packing, &resumed, &[6]);
        assert_eq!(run(&mut workspace.resume(&resumed, &flags)).digest(), whole.digest(), "{packing}");
        digests.push(whole.digest().to_string());
        if packing != "wrapped" {
            let line = message(&whole);
            assert!(line.contains(" documents in ") && line.contains(" % padding") && line.contains("row and split"), "{line}");
        }
    }
    assert!(digests[0] != digests[1] && digests[1] != digests[2]);
}

/// Forty records with the columns that `record` fills.
fn of_kind(workspace: &Workspace, name: &str, record: impl Fn(String, String) -> serde_json::Value) -> String {
    let lines = (0..40).map(|n| record(format!("what is {n}?"), format!("it is {}", n % 7)).to_string());
    format!("--data={}", workspace.write(name, lines.collect::<Vec<_>>().join("\n")).display())
}

#[test]
fn answers_stay_whole_and_text_is_cut_unless_a_flag_changes_it() {
    let workspace = Workspace::new();
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let template = format!("--chat-template={}", workspace.write("chat.jinja", template).display());
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let whole = [
        of_kind(&workspace, "chat.jsonl", |q, a| json!({"messages": [turn("user", &q), turn("assistant", &a)]})),
        of_kind(&workspace, "shared.jsonl", |q, a| json!({"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]})),
        of_kind(&workspace, "pairs.jsonl", |q, a| json!({"prompt": q, "completion": a})),
        of_kind(&workspace, "alpaca.jsonl", |q, a| json!({"instruction": q, "output": a})),
    ];
    let cut = [texts(&workspace), of_kind(&workspace, "ids.jsonl", |q, a| json!({"input_ids": (q + &a).into_bytes()}))];
    let cases = whole.iter().map(|data| (data, "bfd")).chain(cut.iter().map(|data| (data, "wrapped")));
    for (nth, (data, packing)) in cases.enumerate() {
        let of = |kind: &str, flags: &[&str]| {
            let flags = [&[data.as_str(), &template, "--eos-token=0", "--max-steps=3"], flags].concat();
            train(&workspace, &format!("{kind}-{nth}"), &flags)
        };
        let (requested, auto) = (of("asked", &["--packing", packing]), of("auto", &[]));
        let output = format!("--packing auto is {packing}: ");
        assert!(auto.stdout.contains(&output) && !requested.stdout.contains("--packing auto"), "{data}: {output:?} is not in {auto:?}");
        assert_eq!(auto.digest(), requested.digest(), "{data}");
        assert_eq!(workspace.metrics_and_facts(&format!("auto-{nth}"))[0]["facts"]["settings"]["packing"], packing, "{data}");
    }
    let ids = format!("--data={}", workspace.write("ids.u16.bin", [1, 0].repeat(400)).display());
    let beside = train(&workspace, "beside", &[&whole[0], &ids, &template, "--max-steps=1"]);
    assert!(
        beside.stdout.contains("--packing auto is wrapped: ") && beside.stdout.contains("ids.u16.bin does not mark where"),
        "{beside:?}"
    );
    let eval = ids.replace("--data", "--eval-data");
    let evaluated = train(&workspace, "evaluated", &[&whole[0], &eval, &template, "--max-steps=1"]);
    assert!(evaluated.stdout.contains("--packing auto is wrapped: "), "{evaluated:?}");
}

#[test]
fn a_resume_keeps_the_rows_of_its_checkpoint_by_default() {
    let workspace = Workspace::new();
    let data = of_kind(&workspace, "pairs.jsonl", |q, a| json!({"prompt": q, "completion": a}));
    for packing in ["wrapped", "off", "auto"] {
        let digest = train(&workspace, packing, &[&data, "--packing", packing]).digest().to_string();
        let resumed = format!("{packing}-resumed");
        workspace.copy_checkpoints(packing, &resumed, &[6]);
        let resumed = run(&mut workspace.resume(&resumed, &[&data]));
        assert_eq!(resumed.digest(), digest, "{packing}");
        let kept = if packing == "auto" { "bfd" } else { packing };
        assert!(resumed.stdout.contains(&format!("--packing auto is {kept}: as the checkpoint's rows are")), "{resumed:?}");
    }
}

#[test]
fn a_plan_is_of_the_rows_that_training_would_choose() {
    let workspace = Workspace::new();
    let plan = |data: &str, more: &[&str]| {
        let flags = ["plan", "--hardware=h200-pcie5", "--seq-length=16", "--json", "--data", data, "--model"];
        let outcome = run(program(&flags).arg(workspace.path("model")).args(more));
        assert_eq!(outcome.code, 0, "{outcome:?}");
        outcome
    };
    let pairs = of_kind(&workspace, "pairs.jsonl", |q, a| json!({"prompt": q, "completion": a})).replace("--data=", "");
    let (whole, [bfd, cut]) = (plan(&pairs, &[]), ["bfd", "wrapped"].map(|packing| plan(&pairs, &["--packing", packing])));
    assert!(whole.stdout == bfd.stdout && whole.stdout != cut.stdout, "rows of documents need memory of their own: {whole:?}");
    assert!(whole.stderr.contains("--packing auto is bfd: "), "{whole:?}");
    let missing = plan("org/not-here", &[]);
    assert_eq!(missing.stdout, plan(&pairs, &["--packing", "wrapped", "--head-rows", "all"]).stdout);
    assert!(missing.stderr.contains("--packing auto is planned as wrapped: ") && missing.stderr.contains("org/not-here"), "{missing:?}");
}

/// No two of these documents fit in a row of 16.
#[test]
fn one_document_a_row_is_the_same_run_with_and_without_packing() {
    let workspace = Workspace::new();
    for dtype in ["float32", "bfloat16"] {
        let data = records(&workspace, &[9, 16, 12, 10, 15, 11, 13, 9, 20]);
        let digest = |packing: &str| {
            let out = format!("{packing}-{dtype}");
            train(&workspace, &out, &[&data, "--packing", packing, "--dtype", dtype]).digest().to_string()
        };
        assert_eq!(digest("bfd"), digest("off"));
    }
}

/// All documents in one step: the mean is over the same targets in separate rows and packed.
#[test]
fn documents_that_share_rows_give_the_loss_and_the_norm_of_each_alone() {
    let workspace = Workspace::new();
    let data = records(&workspace, &[9, 3, 7, 16, 4, 12, 2, 5, 6, 16]);
    let first = |packing: &str, rows: usize, accumulation: usize| {
        let (rows, accumulation) =
            (format!("--per-device-train-batch-size={rows}"), format!("--gradient-accumulation-steps={accumulation}"));
        let out = format!("{packing}{rows}");
        let outcome = train(&workspace, &out, &[&data, "--packing", packing, &rows, &accumulation, "--dtype=float32", "--max-steps=1"]);
        assert!(message(&outcome).contains("10 documents in "), "{outcome:?}");
        let line = workspace.metrics(&out).remove(0);
        (line["loss"].as_f64().unwrap(), line["grad_norm"].as_f64().unwrap())
    };
    let (alone, packed) = (first("off", 10, 1), first("bfd", 5, 1));
    assert!((packed.0 / alone.0 - 1.0).abs() < 1e-6 && (packed.1 / alone.1 - 1.0).abs() < 1e-5, "{packed:?} and {alone:?}");
    // This holds for any division into micro-batches.
    let spread = first("bfd", 1, 5);
    assert!((spread.0 / alone.0 - 1.0).abs() < 1e-6 && (spread.1 / alone.1 - 1.0).abs() < 1e-5, "{spread:?} and {alone:?}");
}

#[test]
fn several_devices_train_on_packed_documents_to_the_bits_of_one() {
    let workspace = Workspace::new();
    let data = texts(&workspace);
    for packing in ["bfd", "off"] {
        let flags = [data.as_str(), "--packing", packing, "--device=cpu", "--bucket-mib=0.03125", "--gradient-shares=2"];
        let digest = |gpus: &str, accumulation: &str| {
            let out = format!("{packing}-{gpus}");
            train(&workspace, &out, &[&flags[..], &["--gpus", gpus, "--gradient-accumulation-steps", accumulation]].concat())
                .digest()
                .to_string()
        };
        assert_eq!(digest("1", "2"), digest("2", "1"), "{packing}");
    }
}

#[test]
fn evaluation_is_packed_as_training_is_and_counts_every_target() {
    let workspace = Workspace::new();
    let data = records(&workspace, &[9, 3, 7, 16, 4, 12, 2, 5, 6, 16]);
    let evaluated = |packing: &str| {
        let eval = data.replace("--data", "--eval-data");
        train(&workspace, packing, &[&data, &eval, "--packing", packing, "--eval-on-start", "--dtype=float32", "--max-steps=2"]).digest();
        let line = workspace.metrics(packing).into_iter().find(|line| line.get("eval_loss").is_some()).unwrap();
        (line["eval_loss"].as_f64().unwrap(), line["eval_tokens"].as_u64().unwrap())
    };
    let (packed, alone) = (evaluated("bfd"), evaluated("off"));
    assert_eq!((packed.1, alone.1), (70, 70));
    assert!((packed.0 / alone.0 - 1.0).abs() < 1e-6, "{packed:?} and {alone:?}");
}

#[test]
fn other_rows_than_the_checkpoints_are_refused() {
    let workspace = Workspace::new();
    let data = texts(&workspace);
    train(&workspace, "wrapped", &[&data]).digest();
    workspace.copy_checkpoints("wrapped", "other", &[6]);
    run(&mut workspace.resume("other", &[&data, "--packing=bfd"])).refused(2, &["--packing", "\"wrapped\"", "\"bfd\"", "other sequences"]);
    train(&workspace, "bfd", &[&data, "--packing=bfd"]).digest();
    workspace.copy_checkpoints("bfd", "others", &[6]);
    run(&mut workspace.resume("others", &[&data, "--packing=wrapped"])).refused(2, &["--packing", "\"bfd\"", "\"wrapped\""]);
    let cut = run(&mut workspace.resume("others", &[&data, "--packing=bfd", "--overlong=drop"]));
    cut.refused(2, &["--overlong", "the default", "\"drop\""]);
}

#[test]
fn unpackable_data_is_refused_before_training() {
    let workspace = Workspace::new();
    let ids = format!("--data={}", workspace.write("ids.u16.bin", [1, 0].repeat(400)).display());
    train(&workspace, "out", &[&ids, "--packing=bfd"]).refused(2, &["--packing bfd", "ids.u16.bin", "--packing wrapped"]);
    let data = texts(&workspace);
    let eval = ids.replace("--data", "--eval-data");
    train(&workspace, "out", &[&data, &eval, "--packing=off"]).refused(2, &["--packing off", "ids.u16.bin"]);
    train(&workspace, "out", &[&data, "--packing=best"]).refused(2, &["--packing", "best"]);
    let long = records(&workspace, &[40, 50]);
    train(&workspace, "out", &[&long, "--packing=bfd", "--overlong=drop"]).refused(1, &["records.jsonl", "a row of 16"]);
    assert!(workspace.names("out", "checkpoint-").is_empty());
}

#[test]
fn other_programs_names_are_understood() {
    let workspace = Workspace::new();
    let data = records(&workspace, &[9, 3, 7, 16, 4, 12, 2, 5, 6, 16]);
    let digest = |out: &str, flags: &[&str]| train(&workspace, out, &[&[data.as_str()], flags].concat()).digest().to_string();
    let (bfd, off) = (digest("bfd", &["--packing=bfd"]), digest("off", &["--packing=off"]));
    assert_eq!(digest("trl", &["--packing", "true", "--packing_strategy", "bfd"]), bfd);
    assert_eq!(digest("axolotl", &["--sample_packing", "true"]), bfd);
    assert_eq!(digest("without", &["--packing", "false"]), off);
}

/// Attention within 5 tokens needs fewer FLOPs than within the 16 of a row, and padding needs none.
#[test]
fn arithmetic_is_counted_for_documents_and_not_for_rows() {
    let workspace = Workspace::new();
    let lengths = [5, 9, 5, 2, 14, 5, 9, 7];
    let flags = [&*records(&workspace, &lengths), "--packing=bfd", "--max-steps=1"];
    train(&workspace, "out", &flags).digest();
    let facts = workspace.metrics_and_facts("out").remove(0)["facts"].clone();
    let (matrices, heads) = (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 256 * 32, 32);
    let all: usize = lengths.iter().map(|length| 6 * length * (matrices + length * heads)).sum();
    let rows = facts["data_counts"]["rows"].as_f64().unwrap();
    let message = facts["flops_per_step"].as_f64().unwrap();
    assert!((message / (2.0 * all as f64 / rows) - 1.0).abs() < 1e-9, "{message} for {all} in {rows} rows");
}
