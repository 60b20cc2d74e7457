//! Configuration files of other trainers: each converts and runs, or is refused once with every key that prevents it.

use crate::program::{Outcome, Workspace, program, run};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};

/// A workspace with records of text, which every format's file may name.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    let record = |n: usize| format!("{}\n", json!({"text": format!("record {n} says that ideas sleep furiously")}));
    workspace.write("records.jsonl", (0..60).map(record).collect::<String>());
    workspace
}

/// The example `name` with the paths of `workspace` in place of its own.
fn example(workspace: &Workspace, name: &str) -> PathBuf {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs").join(name)).unwrap();
    let path = |name: &str| workspace.path(name).display().to_string();
    workspace.write(name, text.replace("MODEL", &path("model")).replace("DATA", &path("records.jsonl")))
}

fn convert(file: &Path, out: &Path) -> Outcome {
    run(program(&["convert-config"]).arg(file).arg("-o").arg(out))
}

/// A dry run of the converted `file`.
fn dry_run(workspace: &Workspace, file: &Path) -> Outcome {
    let mut command = program(&["train"]);
    command.arg(file).args(["--dry-run", "--device=cpu", "--threads=1", "--tokenizer=bytes", "--init=random"]);
    run(command.current_dir(workspace.path("")))
}

#[test]
fn examples_convert_and_run() {
    let workspace = workspace();
    for (name, trainer, message) in [
        (
            "axolotl-full.yml",
            "axolotl",
            &["used     evals_per_epoch: 2", "eval-strategy = \"epoch\" (one evaluation per epoch", "ignored  strict: false"][..],
        ),
        ("axolotl-completion.yml", "axolotl", &["used     datasets: [1 entries]", "holds    fp16: false"]),
        (
            "llama-factory-full.yaml",
            "LLaMA-Factory",
            &["ignored  template: qwen3_nothink", "ignored  max_samples: 1000", "holds    stage: sft"],
        ),
        (
            "trl-sft.yaml",
            "TRL",
            &[
                "ignored  attn_implementation: flash_attention_2",
                "used     dataset_name:",
                "holds    push_to_hub: false",
                "ignored  assistant_only_loss: not set",
            ],
        ),
    ] {
        let (file, out) = (example(&workspace, name), workspace.path(&format!("{name}.toml")));
        let converted = convert(&file, &out);
        assert_eq!(converted.code, 0, "{name}: {converted:?}");
        let table = converted.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        let message = message.iter().map(|words| words.split_whitespace().collect::<Vec<_>>().join(" "));
        message.for_each(|words| assert!(table.contains(&words), "{words:?} is not in the table of {name}: {converted:?}"));
        assert!(converted.stderr.contains(&format!("a configuration of {trainer}")), "{converted:?}");
        let ran = dry_run(&workspace, &out);
        assert!(ran.code == 0 && ran.stdout.contains("would be trained"), "{name}: {ran:?}\n{}", fs::read_to_string(&out).unwrap());
    }
}

#[test]
fn examples_that_cannot_run_print_all_reasons_at_once() {
    let workspace = workspace();
    for (name, words) in [
        ("axolotl-lora.yml", &["load_in_8bit", "adapter", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "optimizer"][..]),
        ("axolotl-chat.yml", &["1 keys", "loss_watchdog_threshold"]),
        ("axolotl-template.yml", &["chat_template", "train[:10%]", "paged_adamw_8bit", "tokens", "unfrozen_parameters", "rl dpo"]),
        (
            "llama-factory-lora.yaml",
            &["finetuning_type", "lora_rank", "lora_target", "identity: neither a file nor in data/dataset_info.json"],
        ),
        ("llama-factory-pretrain.yaml", &["1 keys", "pure_bf16"]),
        ("llama-factory-dpo.yaml", &["stage", "quantization_bit", "dpo_en_demo"]),
        ("trl-peft.yaml", &["dataset_config", "use_peft", "lora_r", "load_in_4bit", "save_strategy", "report_to"]),
        ("accelerate-zero3.yaml", &["1 keys", "num_machines 2", "--rendezvous HOST:PORT"]),
    ] {
        let (file, out) = (example(&workspace, name), workspace.path("out.toml"));
        let refused = convert(&file, &out);
        assert_eq!(refused.code, 2, "{name}: {refused:?}");
        let error = refused.stderr.lines().last().unwrap();
        assert!(
            error.starts_with("error: ") && words.iter().all(|word| error.replace(": ", " ").contains(&word.replace(": ", " "))),
            "{name}: {error}"
        );
        assert!(!out.exists(), "{name}");
    }
}

#[test]
fn accelerate_and_deepspeed_convert_to_what_train_reads() {
    let workspace = workspace();
    let toml = |file: &Path| {
        let converted = run(program(&["convert-config"]).arg(file));
        assert_eq!(converted.code, 0, "{converted:?}");
        converted.stdout
    };
    let accelerate = toml(&example(&workspace, "accelerate-multi-gpu.yaml"));
    assert!(accelerate.contains("\ngpus = 8\n") && accelerate.contains("dtype = \"bfloat16\""), "{accelerate}");
    // What a program does where its file is silent is said, too.
    let silent = workspace.write("silent.yaml", "model_name_or_path: m\ndataset_name: d\nreport_to: none\n");
    let silent = toml(&silent);
    assert!(silent.contains("\nlearning-rate = 2e-5\n") && silent.contains("report-to = \"none\""), "{silent}");
    let silent = toml(&workspace.write("axolotl.yaml", "base_model: m\ndatasets: [d]\nmax_steps: 3\n"));
    let lines = ["seq-length = 512", "per-device-train-batch-size = 1", "lr-scheduler-type = \"cosine\""];
    assert!(lines.iter().all(|line| silent.contains(line)) && !silent.contains("epochs"), "{silent}");
    let zero = json!({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 1});
    let zero = workspace.write("ds.json", zero.to_string());
    assert!(toml(&zero).contains(&format!("deepspeed = {:?}", zero.display().to_string())));
    let other = workspace.write("other.yaml", "seed: 1\n");
    run(program(&["convert-config"]).arg(other)).refused(2, &["other.yaml", "not a configuration of TRL, axolotl"]);
    // Nothing but an earlier conversion is replaced.
    let (file, own_file) = (example(&workspace, "trl-sft.yaml"), workspace.write("mine.toml", "seed = 1\n"));
    assert_eq!((convert(&file, &workspace.path("a.toml")).code, convert(&file, &workspace.path("a.toml")).code), (0, 0));
    let kept = convert(&file, &own_file);
    assert!(kept.code == 2 && fs::read_to_string(&own_file).unwrap() == "seed = 1\n", "{kept:?}");
}

#[test]
fn a_list_of_data_sets_beside_the_data_names_files_and_columns() {
    let workspace = workspace();
    let list = json!({
        "mine": {"file_name": "../records.jsonl", "columns": {"prompt": "question", "response": "answer"}},
        "hub": {"hf_hub_url": "org/data", "formatting": "sharegpt", "columns": {"messages": "chat"}},
        "odd": {"file_name": "x.json", "tags": {"role_tag": "who"}},
        "dpo": {"file_name": "x.json", "ranking": true},
    });
    workspace.write("data/dataset_info.json", list.to_string());
    let of = |names: &str| {
        let text = format!("model_name_or_path: model\nfinetuning_type: full\ncutoff_len: 16\ndataset: {names}\noutput_dir: out\n");
        let file = workspace.write("lf.yaml", text);
        run(program(&["convert-config"]).arg(file).current_dir(workspace.path("")))
    };
    let both = of("mine,hub");
    assert!(both.stdout.contains("data = [\"data/../records.jsonl\", \"org/data\"]"), "{both:?}");
    assert!(both.stdout.contains("columns = [\"instruction=question\", \"output=answer\", \"messages=chat\"]"), "{both:?}");
    for (name, words) in
        [("odd", "from and value"), ("dpo", "--data FILE --loss dpo"), ("none", "neither a file nor in data/dataset_info.json")]
    {
        let refused = of(name);
        assert!(refused.code == 2 && refused.stderr.contains(words), "{refused:?}");
    }
}

#[test]
fn config_names_the_program_every_unknown_key_and_the_command() {
    let workspace = workspace();
    for (name, trainer, words) in [
        ("axolotl-chat.yml", "axolotl", &["unknown key `datasets`", "unknown key `loss_watchdog_threshold`", "evals-per-epoch 1"][..]),
        ("llama-factory-full.yaml", "LLaMA-Factory", &["template qwen3_nothink", "max-samples 1000"]),
        ("accelerate-multi-gpu.yaml", "accelerate", &["unknown key `compute_environment`", "unknown key `num_machines`"]),
    ] {
        let file = example(&workspace, name);
        let refused = run(program(&["train", "--dry-run", "--config"]).arg(file));
        refused.refused(2, words);
        let named = format!("this is a configuration of {trainer}: `superoffload convert-config FILE`");
        assert!(refused.stderr.contains(&named), "{refused:?}");
        for wrong in ["`strategy`", "`matmul-dtype`", "`slots`", "`train-on-prompt`"] {
            assert!(!refused.stderr.contains(wrong), "a suggestion by spelling alone: {refused:?}");
        }
    }
}

#[test]
fn the_files_that_the_guide_shows_convert_and_run() {
    let workspace = workspace();
    let guide = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide/from-other-trainers.md")).unwrap();
    let blocks: Vec<_> = guide.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 3, "{blocks:?}");
    for (number, block) in blocks.into_iter().enumerate() {
        let path = |name: &str| workspace.path(name).display().to_string();
        let text = block.replace("DIR", &path("model")).replace("chat.jsonl", &path("records.jsonl")).replace("2048", "16");
        let (file, out) = (workspace.write(&format!("{number}.yaml"), text), workspace.path(&format!("{number}.toml")));
        let converted = convert(&file, &out);
        assert_eq!(converted.code, 0, "{block}: {converted:?}");
        let ran = dry_run(&workspace, &out);
        assert!(ran.code == 0 && ran.stdout.contains("would be trained"), "{block}: {ran:?}");
    }
}
