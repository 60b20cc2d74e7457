//! Runs with frozen tensors: bits, exports, checkpoints, refusals.

use crate::program::{CONFIG, Outcome, Workspace, copy_dir, program, run};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

pub const FLAGS: [&str; 8] = ["--init", "checkpoint", "--tokenizer", "bytes", "--device", "cpu", "--seq-length", "16"];

/// Flags of the frozen part of a two-layer model.
const FREEZE: [&str; 4] = ["--freeze", "embed_tokens", "--freeze", r"layers\.0\.(self_attn|input|post)"];

/// Bytes of each tensor, by name.
pub type Tensors = BTreeMap<String, Vec<u8>>;

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// All tensors of the files in `dir`.
pub fn tensors(dir: &Path) -> Tensors {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let is_weights = |name: &str| name.starts_with("model") && name.ends_with(".safetensors");
    let files = paths.filter(|path| path.file_name().unwrap().to_str().is_some_and(is_weights));
    let of = |path: PathBuf| {
        let bytes = fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        file.iter().map(|(name, tensor)| (name.to_string(), tensor.data().to_vec())).collect::<Vec<_>>()
    };
    files.flat_map(of).collect()
}

/// A workspace with a copy of the golden model `name` and a text of digits, which are tokens of a vocabulary of 64.
pub fn workspace(name: &str) -> Workspace {
    let workspace = Workspace::new();
    fs::remove_dir_all(workspace.path("model")).unwrap();
    copy_dir(&golden(name), &workspace.path("model"));
    fs::remove_file(workspace.path("model/golden.safetensors")).ok();
    workspace.write("data.txt", "0123456789".repeat(100));
    workspace
}

pub fn train(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    run(&mut workspace.train(out, &[&FLAGS, flags].concat()))
}

fn refused(workspace: &Workspace, out: &str, flags: &[&str]) -> String {
    let outcome = train(workspace, out, flags);
    assert_ne!(outcome.code, 0, "{outcome:?}");
    outcome.stderr
}

pub fn export(workspace: &Workspace, from: &str, out: &str) -> Tensors {
    let exported = run(program(&["export"]).arg(workspace.path(from)).arg(workspace.path(out)));
    assert_eq!(exported.code, 0, "{exported:?}");
    tensors(&workspace.path(out))
}

#[test]
fn an_export_has_frozen_tensors_byte_for_byte_and_new_values_of_all_others() {
    // Separate and tied output matrices, two shards, experts in MXFP4, gated delta rules, a text part.
    let cases = [
        ("llama", "embed_tokens|layers\\.0\\."),
        ("qwen3", "embed_tokens|norm"),
        ("gpt2", "wte|wpe|ln_f|h\\.1\\.attn"),
        ("mistral", "lm_head|layers\\.1\\.mlp"),
        ("gpt_oss_mxfp4", "mlp\\.experts\\."),
        ("qwen3_5", "conv1d|A_log|layers\\.0\\.mlp"),
        ("qwen3_moe", "mlp\\.(experts|gate)\\."),
        ("gemma4_moe", "layer_scalar|experts\\.|router\\.scale|layers\\.0\\.(mlp|post_feedforward_layernorm_2)"),
        ("deepseek_v3_lora", "kv_b_proj|q_a_layernorm|e_score_correction_bias|layers\\.0\\.(mlp|self_attn\\.kv_a_proj)"),
        ("qwen3_vl", "embed_tokens|layers\\.0\\."),
    ];
    for (name, pattern) in cases {
        let (workspace, regex) = (workspace(name), regex_automata::meta::Regex::new(pattern).unwrap());
        if name == "gpt_oss_mxfp4" {
            // Its vocabulary has eight tokens.
            workspace.write("data.txt", "\u{1}\u{2}\u{3}\u{4}\u{5}\u{6}\u{7}".repeat(100));
        }
        train(&workspace, "out", &["--max-steps", "3", "--freeze", pattern]).digest();
        let (have, want) = (export(&workspace, "out", "exported"), tensors(&workspace.path("model")));
        assert_eq!(Vec::from_iter(have.keys()), Vec::from_iter(want.keys()), "{name}");
        for (tensor, bytes) in &want {
            let is_carried = regex.is_match(tensor) || tensor.contains("visual.");
            assert_eq!(have[tensor] == *bytes, is_carried, "{name}: {tensor}");
        }
        assert_eq!(fs::read(workspace.path("exported/config.json")).unwrap(), fs::read(workspace.path("model/config.json")).unwrap());
        let again = ["--max-steps", "1", "--model", workspace.path("exported").to_str().unwrap()].map(String::from);
        train(&workspace, "again", &[&again.each_ref().map(String::as_str)[..], &["--freeze", pattern]].concat()).digest();
    }
}

/// A workspace with a model of twelve layers, whose weights an export of a run wrote.
pub fn deep_workspace(tied: bool) -> Workspace {
    let workspace = Workspace::new();
    let deeper =
        CONFIG.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 12").replace("\"hidden_size\": 32", "\"hidden_size\": 64");
    workspace.write("model/config.json", deeper.replace("true", &tied.to_string()));
    become_exported(&workspace, &[]);
    workspace
}

/// Replaces the model's configuration by the export of a run of one step with `flags`, which has weights.
pub fn become_exported(workspace: &Workspace, flags: &[&str]) {
    run(&mut workspace.train("first", &[&["--max-steps=1", "--tokenizer=bytes", "--device=cpu"], flags].concat())).digest();
    export(workspace, "first", "exported");
    fs::remove_dir_all(workspace.path("model")).unwrap();
    fs::rename(workspace.path("exported"), workspace.path("model")).unwrap();
}

#[test]
fn no_bit_of_the_trained_tensors_depends_on_places_times_or_ranks() {
    const ALONE: &str = "--gradient-accumulation-steps=2";
    const SMALL: &str = "--bucket-mib=0.03125";
    let scattered = [r"--freeze=layers\.[01]\.", "--freeze=down_proj", r"--freeze=layers\.4\.", "--freeze=model.norm"];
    let variants: [&[&str]; 12] = [
        &[ALONE, "--adversary=7"],
        &[ALONE, "--threads=1"],
        &[ALONE, SMALL, "--slots=2", "--adversary=8"],
        &[ALONE, "--strategy=zero-offload"],
        &[ALONE, "--replan=random", SMALL],
        &[ALONE, "--activations=recompute-block"],
        &[ALONE, "--activations=host"],
        &[ALONE, SMALL, "--weights=flow", "--resident-buckets=0"],
        &[ALONE, SMALL, "--weights=flow", "--resident-buckets=0", "--layer-order=segments:2,2"],
        &["--gpus=2"],
        &["--gpus=2", SMALL, "--weights=sharded"],
        &["--gpus=2", SMALL, "--weights=fully-sharded"],
    ];
    for (tied, embedding) in [(true, "--freeze=embed_tokens"), (true, "--freeze=layers.7.mlp"), (false, "--freeze=lm_head")] {
        let workspace = deep_workspace(tied);
        let shared = ["--gradient-shares=2", "--max-steps=4", embedding];
        let of = |flags: &[&str]| train(&workspace, "out", &[&scattered[..], &shared, flags].concat()).digest().to_string();
        let digest = of(&[ALONE]);
        for flags in variants {
            assert_eq!(of(flags), digest, "{embedding} {flags:?}");
        }
    }
}

#[test]
fn a_run_resumes_with_the_same_frozen_tensors_and_no_others() {
    let workspace = workspace("llama");
    let digest = train(&workspace, "whole", &[&FREEZE[..], &["--max-steps", "6"]].concat()).digest().to_string();
    train(&workspace, "half", &[&FREEZE[..], &["--max-steps", "4", "--save-steps", "2"]].concat()).digest();
    let resume = |flags: &[&str]| train(&workspace, "half", &[&["--max-steps", "6", "--resume-from-checkpoint", "auto"], flags].concat());
    let refused = |flags: &[&str]| {
        let outcome = resume(flags);
        assert_ne!(outcome.code, 0, "{outcome:?}");
        outcome.stderr
    };
    let none = refused(&[]);
    assert!(none.contains("layers.0.attn.out was frozen when the checkpoint was made and is trained now"), "{none}");
    let more = refused(&[&FREEZE[..], &["--freeze", "lm_head", "--allow-changed", "model"]].concat());
    assert!(more.contains("lm_head was trained when the checkpoint was made and is frozen now"), "{more}");
    let source = workspace.path("model/model.safetensors");
    let (original, mut changed) = (fs::read(&source).unwrap(), fs::read(&source).unwrap());
    let embedding = tensors(&workspace.path("model"))["model.embed_tokens.weight"].clone();
    let place = changed.windows(embedding.len()).position(|window| window == embedding).unwrap();
    changed[place] ^= 1;
    fs::write(&source, &changed).unwrap();
    let other = refused(&FREEZE);
    assert!(other.contains("its tensors that training does not change are not those of the checkpoint"), "{other}");
    fs::write(&source, &original).unwrap();
    let from_record = run(program(&["resume", "--max-steps", "6"]).arg(workspace.path("half")));
    assert_eq!(from_record.code, 0, "{from_record:?}");
    assert_eq!(run(program(&["digest"]).arg(workspace.path("half"))).digest(), digest);
    assert_eq!(export(&workspace, "half", "resumed"), export(&workspace, "whole", "exported"));
    let sampled = |out: &str| run(program(&["sample", "--prompt", "01234"]).arg(workspace.path(out)));
    let (half, whole) = (sampled("half"), sampled("whole"));
    assert_eq!((half.code, &half.stdout), (0, &whole.stdout), "{half:?}");
}

#[test]
fn a_run_has_the_losses_and_samples_of_one_without_frozen_tensors_until_weights_change() {
    let workspace = deep_workspace(true);
    let of = |out: &str, freeze: &[&str]| {
        let flags = ["--learning-rate", "0", "--max-steps", "2", "--eval-steps", "1", "--eval-data", "data.txt"].map(String::from);
        let flags = flags.map(|flag| if flag == "data.txt" { workspace.path("data.txt").to_str().unwrap().to_string() } else { flag });
        train(&workspace, out, &[&flags.each_ref().map(String::as_str)[..], freeze].concat()).digest();
        let losses: Vec<_> = workspace.metrics(out).iter().map(|line| (line["loss"].clone(), line["eval_loss"].clone())).collect();
        let sampled = run(program(&["sample", "--prompt", "Colour"]).arg(workspace.path(out)));
        assert_eq!(sampled.code, 0, "{sampled:?}");
        (losses, sampled.stdout)
    };
    assert_eq!(of("frozen", &FREEZE), of("whole", &[]));
}

#[test]
fn impossible_choices_are_refused_before_data_is_read() {
    let workspace = workspace("llama");
    let flags = |more: &[&'static str]| [&["--data", "/nowhere.txt", "--max-steps", "1"], more].concat();
    let cases: [(&[&str], &str); 4] = [
        (&["--freeze", "q_proj"], "is one matrix here"),
        (&["--train-only", "nothing"], "--train-only \"nothing\": matches no tensor of the model"),
        (&["--freeze", "."], "nothing is left to train"),
        (&["--freeze", "embed", "--init", "random"], "random weights cannot be frozen"),
    ];
    workspace.write("nowhere", "");
    for (more, words) in cases {
        let mut flags = flags(more);
        flags[1] = "/dev/null";
        let refusal = run(&mut workspace.train("out", &[&FLAGS[2..], &flags[..]].concat())).stderr;
        assert!(refusal.contains(words), "{more:?}: {refusal}");
    }
    assert!(refused(&workspace, "out", &["--freeze", "("]).contains("not a regular expression"));
}

#[test]
fn losses_of_pairs_evaluation_and_formats_train_with_frozen_tensors() {
    let workspace = deep_workspace(false);
    let pairs: String =
        (0..20).map(|n| format!("{{\"prompt\": \"1\", \"chosen\": \"{}\", \"rejected\": \"{}\"}}\n", n % 7, n % 5 + 2)).collect();
    let pairs = workspace.write("pairs.jsonl", pairs);
    let eval = workspace.write("eval.txt", "9876543210".repeat(20));
    let flags = ["--data", pairs.to_str().unwrap(), "--loss", "dpo", "--max-steps", "3", "--eos-token", "0"];
    train(&workspace, "dpo", &[&FREEZE[..], &flags].concat()).digest();
    let first = &workspace.metrics("dpo")[0];
    assert_eq!(first["loss"].as_f64().unwrap() as f32, std::f32::consts::LN_2, "{first}");
    for more in [
        &["--dtype", "float16"][..],
        &["--moments", "int8"],
        &["--eval-data", eval.to_str().unwrap(), "--eval-steps", "2"],
        &["--head-rows", "trained"],
        &["--matmul-dtype", "fp8"],
        &["--masters", "split", "--strategy", "no-offload"],
    ] {
        train(&workspace, more[0].trim_start_matches('-'), &[&FREEZE[..], &["--max-steps", "3"], more].concat()).digest();
    }
}

/// A text of the tokens of the golden GPT-OSS, whose vocabulary is eight.
const FEW_TOKENS: &str = "\u{1}\u{2}\u{3}\u{7}\u{4}\u{5}\u{2}\u{6}\u{7}\u{1}";

/// A workspace with a GPT-OSS of `layers` layers, whose experts are in MXFP4. Each layer has the bytes of the golden layer, turned by its number.
fn gpt_oss_workspace(layers: usize) -> Workspace {
    let workspace = workspace("gpt_oss_mxfp4");
    workspace.write("data.txt", FEW_TOKENS.repeat(70));
    let (config, weights) = (workspace.path("model/config.json"), workspace.path("model/model.safetensors"));
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    json["num_hidden_layers"] = layers.into();
    json["layer_types"] = (0..layers).map(|layer| if layer % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
    fs::write(&config, json.to_string()).unwrap();
    let bytes = fs::read(&weights).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let mut all = Vec::new();
    for (name, tensor) in golden.iter() {
        let copies = if name.contains("layers.0.") { layers } else { 1 };
        for layer in 0..copies {
            let mut data = tensor.data().to_vec();
            if !name.ends_with("_scales") {
                let turn = 16 * layer % data.len();
                data.rotate_left(turn);
            }
            all.push((name.replace("layers.0.", &format!("layers.{layer}.")), tensor.dtype(), tensor.shape().to_vec(), data));
        }
    }
    let views = all.iter().map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(&weights, safetensors::serialize(views, None).unwrap()).unwrap();
    workspace
}

/// Makes the run expand experts when it reads them: its configuration does not name MXFP4.
fn expand_at_load(workspace: &Workspace) {
    let path = workspace.path("model/config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("quantization_config").unwrap();
    fs::write(&path, json.to_string()).unwrap();
}

const FREEZE_EXPERTS: [&str; 2] = ["--freeze", r"mlp\.experts\..*_proj$"];

#[test]
fn no_bit_depends_on_whether_frozen_experts_stay_in_mxfp4() {
    const ALONE: &str = "--gradient-accumulation-steps=2";
    const SMALL: &str = "--bucket-mib=0.03125";
    let variants: [&[&str]; 10] = [
        &[ALONE],
        &[ALONE, "--adversary=7", "--threads=1"],
        &[ALONE, SMALL, "--slots=2", "--adversary=8", "--activations=recompute-block"],
        &[ALONE, "--activations=host"],
        &[ALONE, "--replan=random", SMALL],
        &[ALONE, SMALL, "--weights=flow", "--resident-buckets=0"],
        &[ALONE, SMALL, "--weights=flow", "--resident-buckets=0", "--layer-order=segments:4,4"],
        &["--gpus=2"],
        &["--gpus=2", SMALL, "--weights=sharded"],
        &["--gpus=2", SMALL, "--weights=fully-sharded"],
    ];
    let workspace = gpt_oss_workspace(16);
    let shared = ["--gradient-shares=2", "--max-steps=4"];
    let of = |flags: &[&str]| {
        let outcome = train(&workspace, "out", &[&FREEZE_EXPERTS[..], &shared, flags].concat());
        (outcome.digest().to_string(), outcome.stdout.contains("32 frozen tensors of experts stay in MXFP4"))
    };
    let packed: Vec<_> = variants.iter().map(|flags| of(flags)).collect();
    expand_at_load(&workspace);
    let (digest, stays) = of(&[ALONE]);
    assert!(!stays);
    for (flags, found) in variants.iter().zip(packed) {
        assert_eq!(found, (digest.clone(), true), "{flags:?}");
    }
}

#[test]
fn a_run_with_experts_in_mxfp4_resumes_and_exports_like_one_that_expands_them() {
    let workspace = gpt_oss_workspace(2);
    let eval = workspace.path("data.txt");
    let flags = |steps: &'static str| {
        [&FREEZE_EXPERTS[..], &["--eval-data", eval.to_str().unwrap(), "--eval-steps", "2", "--max-steps", steps]].concat()
    };
    train(&workspace, "half", &[&flags("4")[..], &["--save-steps", "2"]].concat()).digest();
    let source = tensors(&workspace.path("model"));
    let config = fs::read(workspace.path("model/config.json")).unwrap();
    expand_at_load(&workspace);
    let digest = train(&workspace, "whole", &flags("6")).digest().to_string();
    // A checkpoint names the bytes of the source, which both runs share.
    let expanded = train(&workspace, "half", &[&flags("5")[..], &["--resume-from-checkpoint", "auto"]].concat());
    assert_eq!(expanded.code, 0, "{expanded:?}");
    fs::write(workspace.path("model/config.json"), &config).unwrap();
    let resumed = run(program(&["resume", "--max-steps", "6"]).arg(workspace.path("half")));
    assert_eq!(resumed.code, 0, "{resumed:?}");
    assert_eq!(run(program(&["digest"]).arg(workspace.path("half"))).digest(), digest);
    let (packed, whole) = (export(&workspace, "half", "packed"), export(&workspace, "whole", "expanded"));
    assert_eq!(packed, whole);
    assert!(
        source.iter().filter(|(name, _)| name.contains("_proj_")).all(|(name, bytes)| name.ends_with("bias") || packed[name] == *bytes)
    );
    let losses = |out: &str| workspace.metrics(out).iter().map(|line| line["eval_loss"].clone()).next_back();
    assert_eq!(losses("half"), losses("whole"));
    let sampled = |out: &str| run(program(&["sample", "--prompt", "\u{1}\u{2}"]).arg(workspace.path(out)));
    let (half, whole) = (sampled("half"), sampled("whole"));
    assert_eq!((half.code, &half.stdout), (0, &whole.stdout), "{half:?}");
}

#[test]
fn experts_in_mxfp4_train_in_every_format_and_are_refused_beyond_it() {
    let workspace = gpt_oss_workspace(2);
    for dtype in ["float32", "float16", "bfloat16"] {
        let first = train(&workspace, dtype, &[&FREEZE_EXPERTS[..], &["--max-steps", "2", "--dtype", dtype]].concat());
        first.digest();
        assert_eq!(first.stdout.contains("stay in MXFP4"), dtype == "bfloat16", "{first:?}");
        for more in [&["resume", "--max-steps", "3"][..], &["sample", "--prompt", "\u{1}"]] {
            let outcome = run(program(more).arg(workspace.path(dtype)));
            assert_eq!(outcome.code, 0, "{dtype}: {outcome:?}");
        }
    }
    fs::copy(golden("gpt_oss_mxfp4").join("unpacked.safetensors"), workspace.path("model/model.safetensors")).unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(workspace.path("model/config.json")).unwrap()).unwrap();
    (json["num_hidden_layers"], json["layer_types"]) = (1.into(), serde_json::json!(["sliding_attention"]));
    fs::write(workspace.path("model/config.json"), json.to_string()).unwrap();
    let other = refused(&workspace, "other", &[&FREEZE_EXPERTS[..], &["--max-steps", "2"]].concat());
    assert!(other.contains("is BF16, config.json implies MXFP4; remove quantization_config from config.json"), "{other}");
}
