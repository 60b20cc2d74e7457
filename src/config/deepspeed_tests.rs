//! Tests with published DeepSpeed configurations and with invalid ones.

use super::*;
use crate::config::deepspeed_keys::KEYS;
use crate::config::document::Syntax;
use crate::config::settings::tests::{command_line, flags};
use proptest::prelude::*;
use serde_json::json;

fn read(config: &serde_json::Value, args: &[&str]) -> Understood<(TrainOptions, String)> {
    let document = Document::parse(config.to_string(), Syntax::Json)?;
    translate(&document, &command_line(args).unwrap())
}

/// Checks that the configuration sets the same options as the command line `expected`.
fn sets(config: serde_json::Value, args: &[&str], expected: &[&str]) -> String {
    let (options, table) = read(&config, args).unwrap();
    assert_eq!(options, command_line(expected).unwrap(), "{table}");
    table
}

/// The line of the key at `path`.
fn row<'t>(table: &'t str, path: &str) -> &'t str {
    table.lines().find(|line| line.split_whitespace().next() == Some(path)).unwrap_or_else(|| panic!("no {path} in {table}"))
}

/// From the documentation of Hugging Face's Trainer.
fn hugging_face_zero3() -> serde_json::Value {
    json!({
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": true},
            "offload_param": {"device": "cpu", "pin_memory": true},
            "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000, "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    })
}

/// Every key of an object and of the objects in it that is no group.
fn leaves(prefix: &str, value: &serde_json::Value) -> Vec<String> {
    let inner = |(key, value): (&String, &serde_json::Value)| {
        let path = format!("{prefix}{key}");
        if value.is_object() { leaves(&format!("{path}."), value) } else { vec![path] }
    };
    value.as_object().unwrap().iter().flat_map(inner).collect()
}

#[test]
fn zero_3_of_hugging_face_is_zero_offload_with_streamed_weights() {
    let expected =
        ["--strategy=zero-offload", "--weights=flow", "--lr-scheduler-type=constant", "--logging-steps=2000", "--perf-counters=false"];
    let table = sets(hugging_face_zero3(), &[], &expected);
    for path in leaves("", &hugging_face_zero3()) {
        let fate = row(&table, &path);
        assert!(fate.contains(" used") || fate.contains(" ignored: "), "{fate}");
    }
    assert!(row(&table, "gradient_clipping").ends_with("used: the default here, or the plan's choice"), "{table}");
    assert!(row(&table, "scheduler.params.warmup_type").contains("logarithmic"), "{table}");
}

#[test]
fn zero_2_of_hugging_face_keeps_its_numbers() {
    let config = json!({
        "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 4e-5, "warmup_num_steps": 500, "total_num_steps": 2000, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "allgather_partitions": true, "sub_group_size": 4e8,
            "allgather_bucket_size": 2e8, "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 2e8},
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0
    });
    let expected = [
        "--dtype=float16",
        "--learning-rate=4e-5",
        "--adam-beta1=0.8",
        "--adam-beta2=0.99",
        "--adam-epsilon=1e-7",
        "--weight-decay=0.1",
        "--lr-scheduler-type=linear",
        "--warmup-steps=500",
        "--max-steps=2000",
        "--strategy=zero-offload",
        "--bucket-mib=762.939453125",
        "--per-device-train-batch-size=4",
        "--gradient-accumulation-steps=8",
        "--max-grad-norm=1",
    ];
    let table = sets(config.clone(), &[], &expected);
    assert!(row(&table, "optimizer.params.lr").ends_with("not used: scheduler.params.warmup_max_lr wins, as in DeepSpeed"), "{table}");
    let upper = ["--max-grad-norm=2", "--num-train-epochs=1"];
    let (options, table) = read(&config, &upper).unwrap();
    let merged = command_line(&upper).unwrap().over(options);
    assert_eq!((merged.max_grad_norm, merged.max_steps), (Some(2.0), None));
    assert!(row(&table, "gradient_clipping").ends_with("not used: --max-grad-norm is set elsewhere"), "{table}");
    assert!(row(&table, "scheduler.params.total_num_steps").contains("not used"), "{table}");
}

#[test]
fn deepspeeds_superoffload_is_superoffload() {
    let config = json!({
        "train_batch_size": 4, "gradient_accumulation_steps": 1, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "overlap_comm": false, "reduce_bucket_size": 4e8, "sub_group_size": 4e8,
            "offload_optimizer": {"device": "cpu", "pin_memory": true, "ratio": 0.90, "super_offload": true, "cpuadam_cores_perc": 0.90}},
        "wall_clock_breakdown": true
    });
    let cores = std::thread::available_parallelism().unwrap().get();
    let threads = format!("--threads={}", (cores * 9 / 10).max(1));
    let expected = [
        "--per-device-train-batch-size=4",
        "--gradient-accumulation-steps=1",
        "--dtype=bfloat16",
        "--strategy=superoffload",
        "--bucket-mib=762.939453125",
        "--perf-counters",
        "--max-grad-norm=0",
        &threads,
    ];
    let table = sets(config, &[], &expected);
    assert!(table.lines().any(|line| line.contains("gradient_clipping") && line.contains("absent") && line.contains("--max-grad-norm 0")));
    assert!(row(&table, "scheduler").contains("would keep the rate constant"), "{table}");
}

#[test]
fn defaults_of_deepspeed_are_applied_and_logged() {
    let expected = ["--dtype=float32", "--max-grad-norm=0", "--learning-rate=1e-3", "--lr-scheduler-type=cosine", "--warmup-steps=1000"];
    let config = json!({"optimizer": {"type": "Adam", "params": {}}, "scheduler": {"type": "WarmupCosineLR"}});
    // An empty group has no keys: DeepSpeed's own rate holds because the type is there.
    sets(config, &[], &expected);
    sets(json!({"bf16": {"enabled": false}, "gradient_clipping": null}), &[], &["--dtype=float32", "--max-grad-norm=0"]);
}

#[test]
fn batch_sizes_are_completed_and_checked_as_deepspeed_does() {
    let base = |more: serde_json::Value| {
        let mut config = json!({"bf16": {"enabled": "auto"}, "gradient_clipping": "auto"});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let flags =
        |micro: u32, steps: u32| [format!("--per-device-train-batch-size={micro}"), format!("--gradient-accumulation-steps={steps}")];
    for (config, upper, micro, steps) in [
        (json!({"train_batch_size": 6}), "--gpus=2", 3, 1),
        (json!({"train_batch_size": 12, "gradient_accumulation_steps": 2}), "--gpus=2", 3, 2),
        (json!({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}), "--gpus=1", 2, 6),
        (json!({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}), "--gpus=2", 2, 3),
        (json!({"train_batch_size": 12.0, "train_micro_batch_size_per_gpu": "auto"}), "--gradient-accumulation-steps=4", 3, 4),
    ] {
        let (options, table) = read(&base(config), &[upper]).unwrap();
        let merged = command_line(&[upper]).unwrap().over(options);
        let flags = flags(micro, steps);
        let expected = command_line(&[&flags[0], &flags[1]]).unwrap();
        let sizes = |options: &TrainOptions| (options.per_device_train_batch_size, options.gradient_accumulation_steps);
        assert_eq!(sizes(&merged), sizes(&expected), "{table}");
    }
    let wrong = json!({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2});
    let message = read(&base(wrong), &[]).unwrap_err();
    let words = "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 10 != 4 * 2 * 1";
    assert!(message.contains(&format!("Check batch related parameters. {words}")), "{message}");
    let message = read(&base(json!({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4})), &[]).unwrap_err();
    assert!(message.contains("Gradient accumulation steps: 0 has to be greater than 0"), "{message}");
}

#[test]
fn unsupported_keys_are_refused_by_line_and_key() {
    for (config, words) in [
        (json!({"gradient_cliping": 1}), &["line 1, column 2", "unknown key `gradient_cliping`", "`gradient_clipping`"][..]),
        (json!({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}), &["`zero_optimization.offload_optimizer.device`"]),
        (json!({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}), &["device nvme", "host memory"]),
        (json!({"zero_optimization": {"offload_param": {"device": "nvme"}}}), &["device nvme"]),
        (json!({"zero_optimization": {"offload_optimizer": {"super_offload": true}}}), &["super_offload true", "cpu"]),
        (json!({"zero_optimization": {"stage": 4}}), &["stage 4", "0 to 3"]),
        (json!({"zero_optimization": 2}), &["zero_optimization 2", "expected an object"]),
        (json!({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false, "weight_decay": 0.1}}}), &["adam_w_mode false", "L2"]),
        (json!({"optimizer": {"type": "Lamb"}}), &["optimizer.type Lamb", "AdamW"]),
        (json!({"optimizer": {"type": "AdamW", "params": {"amsgrad": true}}}), &["amsgrad true"]),
        (json!({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}), &["optimizer.params.lr fast", "expected a number"]),
        (json!({"optimizer": {"params": {"betas": [0.9]}}}), &["expected two numbers"]),
        (json!({"scheduler": {"type": "OneCycle"}}), &["scheduler.type OneCycle", "WarmupDecayLR"]),
        (json!({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}), &["warmup_type log", "use linear"]),
        (json!({"fp16": {"enabled": true, "loss_scale": 128}}), &["loss_scale 128", "dynamic"]),
        (json!({"fp16": {"enabled": true}, "bf16": {"enabled": true}}), &["fp16.enabled true", "bf16.enabled is true, too"]),
        (json!({"fp16": {"scale": 1}}), &["unknown key `fp16.scale`"]),
        (json!({"fp16": {"enabled": "yes"}}), &["expected true or false"]),
        (json!({"curriculum_learning": {"enabled": true}}), &["curriculum_learning.enabled true", "training gives other results"]),
        (json!({"train_batch_size": 1.5}), &["train_batch_size 1.5", "whole number"]),
        (json!({"gradient_clipping": [1]}), &["gradient_clipping 1", "expected a number"]),
        (json!({"steps_per_print": -1}), &["`logging-steps`"]),
    ] {
        let message = read(&config, &[]).unwrap_err();
        assert!(words.iter().all(|word| message.contains(word)) && message.starts_with("line ") && !message.contains('\n'), "{message}");
    }
}

/// The table must not name unknown flags or groups without an entry.
#[test]
fn the_table_leads_to_flags_and_every_group_is_in_it() {
    for (path, rule) in KEYS {
        if let KeyRule::Flag(flag) = rule {
            assert!(flags().iter().any(|known| known.get_long() == Some(flag)), "{path}: {flag}");
        }
        for (dot, _) in path.match_indices('.') {
            assert!(matches!(crate::config::deepspeed_keys::rule(&path[..dot]), Some(KeyRule::Group)), "{path}");
        }
    }
}

proptest! {
    /// For any value, every key has its row or there is one line of error.
    #[test]
    fn every_key_is_accounted_for(
        picks in prop::collection::vec((prop::sample::select(KEYS.iter().map(|(key, _)| *key).collect::<Vec<_>>()), 0usize..9), 0..8)
    ) {
        let values = [json!("auto"), json!(null), json!(true), json!(false), json!(0), json!(2), json!(0.5), json!("cpu"), json!([0.9, 0.99])];
        let mut config = json!({});
        for (path, pick) in picks {
            let mut at = &mut config;
            for part in path.trim_end_matches('*').trim_end_matches('.').split('.') {
                if !at.is_object() {
                    *at = json!({});
                }
                at = &mut at[part];
            }
            if !at.is_object() {
                *at = values[pick].clone();
            }
        }
        match read(&config, &[]) {
            Ok((_, table)) => prop_assert!(leaves("", &config).iter().all(|path| !row(&table, path).is_empty())),
            Err(message) => prop_assert!(message.starts_with("line ") && !message.contains('\n'), "{}", message),
        }
    }
}

#[test]
fn partial_residency_of_states_is_logged_or_warned_of() {
    let fate = |ratio: serde_json::Value, speculates: bool| {
        let offload = json!({"device": "cpu", "super_offload": speculates, "ratio": ratio});
        read(&json!({"zero_optimization": {"offload_optimizer": offload}}), &[]).map(|(_, table)| {
            let row = row(&table, "zero_optimization.offload_optimizer.ratio");
            row.split_once(&ratio.to_string()).unwrap().1.trim().to_string()
        })
    };
    assert_eq!(fate(json!(1.0), false).unwrap(), "used: always so in this program");
    assert!(fate(json!(0.5), false).unwrap().starts_with("ignored: every state is in host memory; with \"super_offload\": true"));
    assert!(fate(json!(0.5), true).unwrap().ends_with("stay on the device: --resident-buckets"));
    assert!(fate(json!(1.5), true).unwrap_err().ends_with("ratio 1.5: must be from 0 to 1"));
}
