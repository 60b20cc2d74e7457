//! Evaluation during training: when it comes, what it says, and that training does not notice.

use crate::program::{Workspace, run};
use serde_json::Value;

/// A text unlike the one that is trained on, two thousand bytes long.
fn eval_text(workspace: &Workspace) -> String {
    let text: String = (0..250).map(|n| format!("{:7}\n", n * n % 9973)).collect();
    workspace.write("eval.txt", text).to_str().unwrap().to_string()
}

/// The evaluations among a run's lines.
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
    let told = format!("evaluation    loss {:.4}", loss(3));
    assert!(outcome.stdout.contains(&told) && outcome.stdout.contains("eval      5  loss "), "{outcome:?}");
    // A pass over the data is not complete within these steps, but the last step is always evaluated.
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
fn what_makes_no_sense_is_refused_before_training() {
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
    // Nothing is evaluated where somebody says so.
    let data = format!("--eval-data={}", eval_text(&workspace));
    run(&mut workspace.train("off", &[&data, "--eval-strategy=no"])).digest();
    assert!(evaluations(&workspace, "off").is_empty());
}
