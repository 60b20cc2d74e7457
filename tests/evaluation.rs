//! Evaluation during training: its schedule, its results, and that it does not affect training.

use crate::program::{Workspace, run};
use serde_json::Value;

/// A text of two thousand bytes that differs from the training text.
fn eval_text(workspace: &Workspace) -> String {
    let text: String = (0..250).map(|n| format!("{:7}\n", n * n % 9973)).collect();
    workspace.write("eval.txt", text).to_str().unwrap().to_string()
}

/// The evaluation records in a run's metrics.
fn evaluations(workspace: &Workspace, out: &str) -> Vec<Value> {
    workspace.metrics(out).into_iter().filter(|line| line.get("eval_loss").is_some()).collect()
}

fn steps(evaluations: &[Value]) -> Vec<u64> {
    evaluations.iter().map(|line| line["step"].as_u64().unwrap()).collect()
}

#[test]
fn training_does_not_notice_that_it_is_evaluated() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("none", &[])).digest().to_string();
    let data = format!("--eval-data={}", eval_text(&workspace));
    let outcome = run(&mut workspace.train("out", &[&data, "--eval-steps=5", "--eval-on-start"]));
    assert_eq!(outcome.digest(), digest);
    let found = evaluations(&workspace, "out");
    assert_eq!(steps(&found), [0, 5, 10, 12]);
    let loss = |at: usize| found[at]["eval_loss"].as_f64().unwrap();
    for (at, line) in found.iter().enumerate() {
        assert!((line["eval_perplexity"].as_f64().unwrap() / loss(at).exp() - 1.0).abs() < 1e-12, "{line}");
        assert_eq!(line["eval_tokens"].as_u64().unwrap() % 16, 0, "{line}");
    }
    assert!(loss(0) > 5.0 && loss(3) < loss(0), "bytes of a fresh model cost ln 256 each, and learning helps: {found:?}");
    let message = format!("; evaluation {:.4}, perplexity ", loss(3));
    assert!(outcome.stdout.contains(&message) && outcome.stdout.contains("eval      5  loss "), "{outcome:?}");
    // The data is not exhausted within these steps, but the last step is always evaluated.
    run(&mut workspace.train("epochs", &[&data, "--eval-strategy=epoch"])).digest();
    assert_eq!(steps(&evaluations(&workspace, "epochs")).last(), Some(&12));
}

#[test]
fn several_devices_find_the_bits_of_one() {
    let workspace = Workspace::new();
    let data = format!("--eval-data={}", eval_text(&workspace));
    let evaluated = |count: usize| {
        let (gpus, accumulation) = (format!("--gpus={count}"), format!("--gradient-accumulation-steps={}", 4 / count));
        let flags = ["--device=cpu", "--bucket-mib=0.03125", "--gradient-shares=4", "--eval-steps=6", &data, &gpus, &accumulation];
        let out = count.to_string();
        let digest = run(&mut workspace.train(&out, &flags)).digest().to_string();
        let losses: Vec<Value> = evaluations(&workspace, &out).iter().map(|line| line["eval_loss"].clone()).collect();
        (digest, losses)
    };
    let one = evaluated(1);
    assert_eq!(one.1.len(), 2);
    assert_eq!(evaluated(2), one);
    assert_eq!(evaluated(4), one);
}

#[test]
fn a_resumed_run_evaluates_where_the_whole_one_did() {
    let workspace = Workspace::new();
    let data = format!("--eval-data={}", eval_text(&workspace));
    let flags = [data.as_str(), "--eval-steps=4", "--eval-on-start"];
    let digest = run(&mut workspace.train("whole", &flags)).digest().to_string();
    let losses = |out: &str| -> Vec<(u64, String)> {
        let found = evaluations(&workspace, out);
        found.iter().map(|line| (line["step"].as_u64().unwrap(), line["eval_loss"].to_string())).collect()
    };
    workspace.copy_checkpoints("whole", "resumed", &[6]);
    assert_eq!(run(&mut workspace.resume("resumed", &flags)).digest(), digest);
    assert_eq!(losses("resumed"), losses("whole"));
}

#[test]
fn invalid_evaluations_are_refused_before_training() {
    let workspace = Workspace::new();
    let empty = workspace.write("empty.txt", "").to_str().unwrap().to_string();
    let (missing, short) = ("--eval-data=nowhere.txt".to_string(), format!("--eval-data={empty}"));
    run(&mut workspace.train("out", &["--eval-steps=3"])).refused(2, &["--eval-steps 3", "--eval-data"]);
    run(&mut workspace.train("out", &["--eval-strategy=epoch"])).refused(2, &["--eval-strategy epoch", "--eval-data"]);
    run(&mut workspace.train("out", &["--eval-on-start"])).refused(2, &["--eval-on-start", "--eval-data"]);
    run(&mut workspace.train("out", &[&short, "--eval-steps=0"])).refused(2, &["--eval-steps 0", "at least 1"]);
    run(&mut workspace.train("out", &[&missing])).refused(1, &["nowhere.txt"]);
    run(&mut workspace.train("out", &[&short])).refused(1, &["empty.txt"]);
    assert!(workspace.names("out", "checkpoint-").is_empty());
    // With `no` there is no evaluation.
    let data = format!("--eval-data={}", eval_text(&workspace));
    run(&mut workspace.train("off", &[&data, "--eval-strategy=no"])).digest();
    assert!(evaluations(&workspace, "off").is_empty());
}

/// Forty documents, one per line.
fn documents(workspace: &Workspace) -> String {
    let lines: String = (0..40).map(|n| format!("{{\"text\": \"line {n} has {} words, or about so many\"}}\n", n * n % 97)).collect();
    format!("--data={}", workspace.write("lines.jsonl", lines).display())
}

#[test]
fn a_part_of_the_data_is_held_out_and_a_resume_holds_out_the_same() {
    let workspace = Workspace::new();
    let data = documents(&workspace);
    let flags = [data.as_str(), "--eval-split=0.2", "--eval-steps=4"];
    let whole = run(&mut workspace.train("whole", &flags));
    let digest = whole.digest().to_string();
    assert!(whole.stdout.contains("held out 8 of 40 documents, ") && whole.stdout.contains("evaluated on "), "{whole:?}");
    assert_eq!(steps(&evaluations(&workspace, "whole")), [4, 8, 12]);
    assert_eq!(run(&mut workspace.train("silent", &[&data, "--eval-split=0.2", "--eval-strategy=no"])).digest(), digest);
    assert_ne!(run(&mut workspace.train("all", &[&data])).digest(), digest, "what is held out is not learned");
    workspace.copy_checkpoints("whole", "resumed", &[6]);
    run(&mut workspace.resume("resumed", &[&data])).refused(2, &["--eval-split", "was 0.2", "the default now"]);
    run(&mut workspace.resume("resumed", &[&data, "--eval-split=9"])).refused(2, &["--eval-split", "was 0.2", "is 9 now"]);
    assert_eq!(run(&mut workspace.resume("resumed", &flags)).digest(), digest);
    assert_eq!(evaluations(&workspace, "resumed").last().unwrap()["eval_loss"], evaluations(&workspace, "whole")[2]["eval_loss"]);
}

#[test]
fn the_best_checkpoint_outlives_the_rotation_and_is_exported() {
    let workspace = Workspace::new();
    let data = documents(&workspace);
    let flags = [&data, "--eval-split=8", "--eval-steps=2", "--save-steps=2", "--save-total-limit=1", "--learning-rate=0.3"];
    let outcome = run(&mut workspace.train("out", &flags));
    outcome.digest();
    let found = evaluations(&workspace, "out");
    let lowest = found.iter().min_by(|a, b| a["eval_loss"].as_f64().unwrap().total_cmp(&b["eval_loss"].as_f64().unwrap())).unwrap();
    let (best, loss) = (lowest["step"].as_u64().unwrap(), lowest["eval_loss"].as_f64().unwrap());
    assert!(best < 12, "a learning rate that is too high makes it worse: {found:?}");
    let mut kept = vec![format!("checkpoint-{best}"), "checkpoint-12".to_string()];
    kept.sort();
    assert_eq!(workspace.names("out", "checkpoint-"), kept);
    assert!(outcome.stdout.contains(&format!("; best {loss:.4}, the checkpoint of step {best}")), "{outcome:?}");
    let export = |from: &str, to: &str| {
        let (from, to) = (workspace.path(from), workspace.path(to));
        run(&mut crate::program::program(&["export", from.to_str().unwrap(), to.to_str().unwrap(), "--best"]))
    };
    let exported = export("out", "exported");
    assert!(exported.code == 0 && exported.stdout.contains(&format!("exported step {best} of ")), "{exported:?}");
    export("out/checkpoint-12", "x").refused(2, &["--best", "name its output directory"]);
    std::fs::remove_file(workspace.path("out").join(&kept[usize::from(kept[0] == "checkpoint-12")]).join("state.bin")).unwrap();
    export("out", "y").refused(1, &["the best checkpoint, of eval loss", "state.bin"]);
    run(&mut workspace.train("none", &[])).digest();
    export("none", "z").refused(1, &["no checkpoint here was evaluated"]);
}

#[test]
fn a_run_with_a_constant_loss_ends_early_also_after_a_resume() {
    let workspace = Workspace::new();
    let data = format!("--eval-data={}", eval_text(&workspace));
    let flags = [&data, "--eval-steps=2", "--save-steps=2", "--early-stopping-patience=2", "--early-stopping-threshold=9"];
    let whole = run(&mut workspace.train("whole", &flags));
    let digest = whole.digest().to_string();
    assert!(whole.stdout.contains("finished 6 of 12 steps; no lower loss in 2 evaluations"), "{whole:?}");
    assert_eq!(steps(&evaluations(&workspace, "whole")), [2, 4, 6]);
    workspace.copy_checkpoints("whole", "resumed", &[2, 4]);
    let resumed = run(&mut workspace.resume("resumed", &flags));
    assert!(
        resumed.digest() == digest && resumed.stdout.contains("finished 6 of 12 steps, 2 of them since the resume; no lower"),
        "{resumed:?}"
    );
    assert_eq!(evaluations(&workspace, "resumed")[2]["eval_loss"], evaluations(&workspace, "whole")[2]["eval_loss"]);
    let again = run(&mut workspace.resume("resumed", &flags));
    assert!(again.code == 0 && again.stdout.contains("nothing to do: step 6 was already done, 12 were asked for; no lower"), "{again:?}");
    let longer = [&flags[..3], &["--early-stopping-patience=3", "--early-stopping-threshold=9"]].concat();
    let more = run(&mut workspace.resume("resumed", &longer));
    assert!(more.stdout.contains("finished 8 of 12 steps, 2 of them since the resume; no lower"), "{more:?}");
    run(&mut workspace.train("x", &["--early-stopping-patience=2"])).refused(2, &["--early-stopping-patience 2", "needs evaluations"]);
    run(&mut workspace.train("x", &[&data, "--early-stopping-threshold=1"])).refused(2, &["--early-stopping-threshold 1"]);
    run(&mut workspace.train("x", &[&data, "--eval-split=0.5"])).refused(2, &["--eval-split 0.5", "cannot be combined with --eval-data"]);
}
