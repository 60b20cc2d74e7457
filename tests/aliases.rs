//! Flags and settings in the spelling of other programs, tested up to their effect on a run.

use crate::program::{Workspace, program, run};
use serde_json::Value;
use std::fs;

/// Settings of a run, read from its last checkpoint.
fn settings(workspace: &Workspace, out: &str) -> Value {
    let last = workspace.names(out, "checkpoint-").pop().unwrap();
    let state = fs::read_to_string(workspace.path(out).join(last).join("trainer_state.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    ["manifest", "trainer", "settings"].iter().fold(&state, |value, key| value.get(key).unwrap_or(value)).clone()
}

#[test]
fn a_command_line_of_hugging_face_trains() {
    let workspace = Workspace::new();
    let flags = ["--bf16", "True", "--max_steps=4", "--warmup_steps", "0.5", "--lr_scheduler_type", "constant_with_warmup", "--optim"];
    let more =
        ["adamw_torch", "--train_on_inputs", "--gradient_checkpointing", "--report_to", "none", "--save_strategy=steps", "--tf32", "true"];
    let printed = run(&mut workspace.train("out", &[&flags[..], &more].concat()));
    assert_eq!(printed.code, 0, "{printed:?}");
    assert_eq!(printed.stderr.lines().count(), 1, "{printed:?}");
    assert!(printed.stderr.starts_with("ignored: --tf32 ("), "{printed:?}");
    let rates: Vec<f64> = workspace.metrics("out").iter().map(|line| line["learning_rate"].as_f64().unwrap()).collect();
    assert_eq!(rates, [0.0, 5e-3, 1e-2, 1e-2], "half of four steps warm up");
    let settings = settings(&workspace, "out");
    assert_eq!((settings["activations"].as_str(), settings["dtype"].as_str()), (Some("recompute-block"), Some("bfloat16")), "{settings}");
    assert_eq!(settings["train_on"], "all");
}

#[test]
fn the_settings_file_takes_the_same_names() {
    let workspace = Workspace::new();
    workspace.settings("fp16 = true\nassistant_only_loss = false\nwarmup_ratio = 0.25\ndataloader_num_workers = 4\nreport_to = 'none'");
    let printed = run(&mut workspace.train("out", &["--max-steps", "4"]));
    assert!(printed.code == 0 && printed.stderr.contains("ignored: dataloader-num-workers ("), "{printed:?}");
    let lines = workspace.metrics("out");
    assert_eq!(lines.iter().map(|line| line["learning_rate"].as_f64().unwrap()).collect::<Vec<_>>(), [0.0, 1e-2, 1e-2, 1e-2]);
    assert_eq!(settings(&workspace, "out")["train_on"], "all");
    assert!(lines[0]["loss_scale"].as_f64() > Some(1.0), "float16 is scaled: {}", lines[0]);
    workspace.settings("deepspeed = 'nowhere.json'");
    run(&mut workspace.train("out", &[])).refused(1, &["nowhere.json", "No such file"]);
}

/// YAML and JSON files with equal keys, as the first argument. Flags take precedence.
#[test]
fn yaml_and_json_train_as_toml_does() {
    let workspace = Workspace::new();
    let model = workspace.path("model");
    let json = serde_json::json!({"model_name_or_path": model, "init": "random", "dataset": [workspace.path("data.txt")], "device": "cpu",
        "max_seq_length": 32, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 9, "bf16": true, "seed": null});
    let yaml = json.as_object().unwrap().iter().map(|(key, value)| format!("{key}: {value}\n")).collect::<String>();
    let digest = |name: &str, text: String| {
        let file = workspace.write(name, text);
        let printed = run(program(&["train"])
            .arg(file)
            .args(["--max-steps", "2", "--digest", "--output-dir"])
            .arg(workspace.path(name.split('.').next().unwrap())));
        assert_eq!(printed.code, 0, "{printed:?}");
        printed.stdout.lines().last().unwrap().to_string()
    };
    let digests = [digest("as-yaml.yml", yaml), digest("as-json.json", json.to_string())];
    assert!(digests[0].starts_with("digest: ") && digests[0] == digests[1], "{digests:?}");
    assert_eq!(workspace.metrics("as-json").len(), 2);
}

#[test]
fn options_without_effect_are_logged_and_change_no_bit() {
    let workspace = Workspace::new();
    let offload = serde_json::json!({"device": "cpu", "ratio": 0.4});
    let config = serde_json::json!({"zero_optimization": {"stage": 2, "offload_optimizer": offload}, "gradient_clipping": 1.0});
    let (config, data) = (workspace.write("ds.json", config.to_string()), workspace.path("data.txt"));
    let flags = ["--deepspeed", config.to_str().unwrap(), "--eval-data", data.to_str().unwrap(), "--max-steps=2"];
    let printed = run(&mut workspace.train("out", &[&flags[..], &["--per_device_eval_batch_size", "4"]].concat()));
    assert_eq!(printed.digest(), run(&mut workspace.train("without", &flags)).digest());
    let message = "ignored: --per-device-eval-batch-size (an evaluation uses the micro-batches of a step)";
    assert!(printed.stderr.lines().any(|line| line == message), "{printed:?}");
    let message = |line: &str| line.contains("offload_optimizer.ratio") && line.contains("ignored: every state is in host memory");
    assert!(printed.stdout.lines().chain(printed.stderr.lines()).any(message), "{printed:?}");
}

#[test]
fn unsupported_options_name_the_flag_to_use() {
    let workspace = Workspace::new();
    for (flags, words) in [
        (&["--optim", "lion"][..], &["--optim lion", "adamw_torch"][..]),
        (&["--report_to", "wandb"], &["--report-to", "tensorboard"]),
        (&["--save_strategy", "epoch"], &["--save-steps"]),
        (&["--eval_strategy", "epoch"], &["--eval-strategy epoch", "--eval-data"]),
        (&["--warmup_ratio", "2"], &["--warmup-ratio 2", "0 to 1"]),
        (&["--learning_rat", "1"], &["--learning-rat", "--learning-rate"]),
    ] {
        run(&mut workspace.train("out", flags)).refused(2, words);
    }
    assert!(!workspace.path("out").exists());
    run(&mut program(&["plan", "--model_name_or_path", "nobody", "--hardware", "gb200"])).refused(2, &["--model nobody", "llama-8b"]);
}
