//! Text parts of multimodal models: the export mirrors the source, carried tensors lie once in the folder of records, and a run needs the
//! source only to begin.

use crate::program::{Outcome, Workspace, copy_dir, program, run};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const MODELS: [&str; 12] = [
    "gemma3_vision",
    "gemma4_vision",
    "gemma4_moe_vision",
    "mistral3_vision",
    "ministral3_vision",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_vl_moe_4_57",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
];
const FLAGS: [&str; 8] = ["--init", "checkpoint", "--tokenizer", "bytes", "--device", "cpu", "--seq-length", "16"];

/// Format, shape and bytes of each tensor, by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn tensors(file: &Path) -> Tensors {
    let bytes = fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter().map(|(name, tensor)| (name.to_string(), (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()))).collect()
}

fn is_of_tower(name: &str) -> bool {
    ["visual.", "vision_tower.", "embed_vision.", "multi_modal_projector.", "mtp."]
        .iter()
        .any(|begin| name.trim_start_matches("model.").starts_with(begin))
}

/// A workspace with a copy of the golden model `name` and a text of digits, which are tokens of a vocabulary of 64.
fn workspace(name: &str) -> Workspace {
    let workspace = Workspace::new();
    fs::remove_dir_all(workspace.path("model")).unwrap();
    copy_dir(&golden(name), &workspace.path("model"));
    fs::remove_file(workspace.path("model/golden.safetensors")).unwrap();
    workspace.write("model/processor_config.json", "{\"processor_class\": \"X\"}");
    workspace.write("data.txt", "0123456789".repeat(100));
    workspace
}

fn train(workspace: &Workspace, out: &str, flags: &[&str]) -> Outcome {
    run(&mut workspace.train(out, &[&FLAGS, flags].concat()))
}

fn export(workspace: &Workspace, from: &str, out: &str) -> Outcome {
    run(program(&["export"]).arg(workspace.path(from)).arg(workspace.path(out)))
}

/// The file of carried tensors of the run in `out`.
fn carried_file(workspace: &Workspace, out: &str) -> PathBuf {
    let folder = workspace.path(out).join(".superoffload");
    let [name] = workspace.names(&format!("{out}/.superoffload"), "carried-").try_into().expect("one file of carried tensors");
    folder.join(name)
}

/// Bytes of all files in `dir` and below.
fn bytes_below(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { bytes_below(&path) } else { path.metadata().unwrap().len() }).sum()
}

#[test]
fn an_export_has_new_values_of_trained_tensors_and_all_else_of_the_source() {
    for name in MODELS {
        let workspace = workspace(name);
        train(&workspace, "out", &["--max-steps", "4"]).digest();
        let exported = export(&workspace, "out", "exported");
        assert_eq!(exported.code, 0, "{name}: {exported:?}");
        let (have, want) = (tensors(&workspace.path("exported/model.safetensors")), tensors(&workspace.path("model/model.safetensors")));
        assert_eq!(Vec::from_iter(have.keys()), Vec::from_iter(want.keys()), "{name}");
        for (tensor, (dtype, shape, bytes)) in &want {
            let have = &have[tensor];
            assert_eq!((have.0, &have.1), (*dtype, shape), "{name}: {tensor}");
            // Training reads the factor of a layer of Gemma 4 and never changes it.
            let stays = is_of_tower(tensor) || tensor.ends_with("layer_scalar");
            assert_eq!(have.2 == *bytes, stays, "{name}: {tensor}");
        }
        for file in ["config.json", "processor_config.json"] {
            assert_eq!(
                fs::read(workspace.path("exported").join(file)).unwrap(),
                fs::read(workspace.path("model").join(file)).unwrap(),
                "{name}"
            );
        }
        let order = |file: &str| {
            let bytes = fs::read(workspace.path(file)).unwrap();
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
            let mut names: Vec<_> = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__").collect();
            names.sort_by_key(|(_, tensor)| tensor["data_offsets"][0].as_u64());
            names.into_iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(order("exported/model.safetensors"), order("model/model.safetensors"), "{name}");
        let again = run(workspace.train("again", &[&FLAGS[..], &["--max-steps", "1", "--model"]].concat()).arg(workspace.path("exported")));
        again.digest();
    }
}

#[test]
fn carried_tensors_lie_once_in_the_folder_of_records_and_the_run_needs_no_source() {
    let workspace = workspace("qwen3_vl");
    let whole = train(&workspace, "whole", &["--max-steps", "6", "--save-steps", "2"]);
    let carried = carried_file(&workspace, "whole");
    let tower: u64 =
        tensors(&workspace.path("model/model.safetensors")).iter().filter(|t| is_of_tower(t.0)).map(|t| t.1.2.len() as u64).sum();
    assert!(carried.metadata().unwrap().len() > tower && tower > 10_000);
    let plain: Value = serde_json::from_slice(&fs::read(workspace.path("whole/checkpoint-6/trainer_state.json")).unwrap()).unwrap();
    let record = &plain["manifest"]["run"]["carried"];
    assert_eq!(record["bytes"], carried.metadata().unwrap().len());
    assert!(whole.stdout.contains("carried tensors of") || whole.stderr.contains("carried tensors of"), "{whole:?}");
    let params =
        tensors(&workspace.path("model/model.safetensors")).iter().filter(|t| !is_of_tower(t.0)).map(|t| t.1.2.len() as u64).sum::<u64>();
    let checkpoint = workspace.path("whole/checkpoint-6");
    assert_eq!(checkpoint.join("state.bin").metadata().unwrap().len(), 3 * params, "a checkpoint has the trained tensors alone");
    assert!(bytes_below(&checkpoint.join("model")) < 20_000);

    train(&workspace, "half", &["--max-steps", "4", "--save-steps", "2"]).digest();
    export(&workspace, "whole", "with");
    fs::rename(workspace.path("model"), workspace.path("gone")).unwrap();
    let resumed = run(program(&["resume", "--max-steps", "6"]).arg(workspace.path("half")));
    assert!(resumed.code == 0, "{resumed:?}");
    let digest = |out: &str| run(program(&["digest"]).arg(workspace.path(out))).digest().to_string();
    assert_eq!(digest("half"), digest("whole"));
    for (from, out) in [("half", "resumed"), ("whole", "without")] {
        let exported = export(&workspace, from, out);
        assert_eq!(exported.code, 0, "{exported:?}");
        assert_eq!(
            fs::read(workspace.path(out).join("model.safetensors")).unwrap(),
            fs::read(workspace.path("with/model.safetensors")).unwrap()
        );
    }

    let intact = fs::read(&carried).unwrap();
    let mut damaged = intact.clone();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&carried, &damaged).unwrap();
    export(&workspace, "whole", "damaged").refused(1, &[carried.file_name().unwrap().to_str().unwrap(), "damaged: its checksum differs"]);
    fs::remove_file(&carried).unwrap();
    export(&workspace, "whole", "missing").refused(1, &["checkpoint-6", "carries over are missing: no carried-", ".superoffload"]);
    run(program(&["resume", "--max-steps", "8"]).arg(workspace.path("whole"))).refused(1, &["carries over are missing"]);
    assert!(!workspace.path("damaged").exists() && !workspace.path("missing").exists());
    fs::rename(workspace.path("gone"), workspace.path("model")).unwrap();
    let mended = run(program(&["resume", "--max-steps", "8"]).arg(workspace.path("whole")));
    assert!(mended.code == 0 && fs::read(&carried).unwrap() == intact, "{mended:?}");
    assert_eq!(export(&workspace, "whole", "mended").code, 0);
}

/// Qwen3 with the weights of the text part of Qwen3-VL.
fn text_model(workspace: &Workspace) -> PathBuf {
    let config: Value = serde_json::from_slice(&fs::read(workspace.path("model/config.json")).unwrap()).unwrap();
    let mut text = config["text_config"].clone();
    text["architectures"] = json!(["Qwen3ForCausalLM"]);
    text["tie_word_embeddings"] = json!(true);
    text["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 1000.0});
    workspace.write("text/config.json", text.to_string());
    let all = tensors(&workspace.path("model/model.safetensors"));
    let own = all.iter().filter(|(name, _)| !is_of_tower(name));
    let views = own.map(|(name, (dtype, shape, data))| {
        (name.replace("model.language_model.", "model."), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &workspace.path("text/model.safetensors")).unwrap();
    workspace.path("text")
}

#[test]
fn a_text_part_trains_as_the_text_model_bit_for_bit() {
    let workspace = workspace("qwen3_vl");
    let text = text_model(&workspace);
    let part = train(&workspace, "part", &["--max-steps", "5"]);
    let alone = train(&workspace, "alone", &["--max-steps", "5", "--model", text.to_str().unwrap()]);
    assert_eq!(part.digest(), alone.digest());
    let of = |out: &str| -> Vec<Value> {
        let keys = ["loss", "grad_norm", "verdict"];
        workspace.metrics(out).into_iter().map(|line| keys.map(|key| line[key].clone()).into()).collect()
    };
    assert_eq!(of("part"), of("alone"));
    let names = |out: &str| -> Vec<String> {
        workspace.names(out, "").into_iter().chain(workspace.names(&format!("{out}/.superoffload"), "")).collect()
    };
    assert!(names("alone").iter().all(|name| !name.contains("carried")), "{:?}", names("alone"));
    assert!(names("part").iter().any(|name| name.contains("carried")), "{:?}", names("part"));
}

#[test]
fn a_run_that_would_lose_the_tower_is_refused() {
    let workspace = workspace("qwen2_5_vl");
    let random = run(&mut workspace.train("out", &["--init", "random", "--tokenizer", "bytes", "--device", "cpu"]));
    random.refused(2, &["--init random", "Qwen2_5_VLForConditionalGeneration has more tensors", "use --init checkpoint"]);
    assert!(!workspace.path("out").exists());
}

#[test]
fn sequences_of_ministral3_end_where_queries_would_have_a_factor() {
    let workspace = workspace("ministral3_vision");
    let train = |length: &str| {
        let mut flags = FLAGS;
        flags[7] = length;
        run(&mut workspace.train(&format!("out-{length}"), &[&flags, &["--max-steps", "1"][..]].concat()))
    };
    train("32").digest();
    let words = ["--seq-length 48", "scales queries from position 32 on (llama_4_scaling_beta and", "use --seq-length 32 or less"];
    train("48").refused(2, &words);
    let plan =
        |length: &str| run(program(&["plan", "--hardware", "h200-pcie5", "--seq-length", length, "--model"]).arg(workspace.path("model")));
    plan("48").refused(2, &words);
    assert_eq!(plan("32").code, 0);
    let prompt = "0".repeat(40);
    let sampled = run(program(&["sample", "--prompt", &prompt, "--max-new-tokens", "1"]).arg(workspace.path("out-32")));
    sampled.refused(2, &["scales queries from position 32 on"]);
}

#[test]
fn tokens_of_images_in_data_are_refused_with_file_and_record() {
    let workspace = workspace("qwen2_5_vl");
    workspace.write("ids.jsonl", "{\"input_ids\": [1, 2, 3, 4]}\n{\"input_ids\": [5, 60, 6]}\n");
    workspace.write("text.txt", "0123 > 4567".repeat(20));
    workspace.write("ids.u16.bin", [1u16, 2, 3, 63, 5].map(u16::to_le_bytes).concat());
    for (file, words) in [
        ("ids.jsonl", &["ids.jsonl: line 2: token 1 has id 60, which is image_token_id in config.json"][..]),
        ("text.txt", &["text.txt: token ", "has id 62, which is vision_start_token_id in config.json"]),
        ("ids.u16.bin", &["ids.u16.bin: byte offset 6: a token has id 63, which is vision_end_token_id in config.json"]),
    ] {
        let data = workspace.path(file);
        let refused = train(&workspace, "refused", &["--max-steps", "1", "--data", data.to_str().unwrap()]);
        refused.refused(1, &[words, &["the text part is trained on text alone"]].concat());
    }
    let text = text_model_of_flat(&workspace);
    let data = workspace.path("text.txt");
    let accepted = train(&workspace, "alone", &["--max-steps", "1", "--data", data.to_str().unwrap(), "--model", text.to_str().unwrap()]);
    accepted.digest();
    // Tokens that a run of the text model prepared are not taken for a run of the text part.
    let part = train(&workspace, "alone", &["--max-steps", "1", "--data", data.to_str().unwrap()]);
    part.refused(1, &["which is vision_start_token_id"]);
}

#[test]
fn tokens_of_images_in_prompts_are_refused_by_name() {
    let workspace = workspace("qwen2_5_vl");
    train(&workspace, "out", &["--max-steps", "1"]).digest();
    let sample = |prompt: &str| {
        let flags = ["sample", "--max-new-tokens", "1", "--prompt", "0123", "--prompt", prompt];
        run(program(&flags).arg(workspace.path("out")))
    };
    let words =
        ["prompt \"01>\": token 3 has id 62, which is vision_start_token_id in config.json: the text part is trained on text alone"];
    sample("01>").refused(2, &words);
    assert_eq!(sample("01;").code, 0);
    let prompts = workspace.write("prompts.txt", "0123\n01>\n");
    let held = workspace.path("data.txt");
    let flags = ["--max-steps", "1", "--eval-data", held.to_str().unwrap(), "--prompts", prompts.to_str().unwrap()];
    train(&workspace, "evaluated", &flags).refused(2, &["--prompts", &format!("prompts.txt: {}", words[0])]);
}

/// Qwen2 with the weights of the text part of Qwen2.5-VL.
fn text_model_of_flat(workspace: &Workspace) -> PathBuf {
    let mut config: Value = serde_json::from_slice(&fs::read(workspace.path("model/config.json")).unwrap()).unwrap();
    config["architectures"] = json!(["Qwen2ForCausalLM"]);
    config["rope_scaling"] = Value::Null;
    workspace.write("text/config.json", config.to_string());
    let all = tensors(&workspace.path("model/model.safetensors"));
    let own = all.iter().filter(|(name, _)| !is_of_tower(name));
    let views = own.map(|(name, (dtype, shape, data))| (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &workspace.path("text/model.safetensors")).unwrap();
    workspace.path("text")
}

#[test]
fn a_text_part_plans_and_samples_and_starts_anew_beside_its_earlier_run() {
    let workspace = workspace("mistral3_vision");
    let trained = train(&workspace, "out", &["--max-steps", "2"]);
    assert!(trained.stderr.contains("config.json ties language_model.lm_head.weight to the token embedding"), "{trained:?}");
    trained.digest();
    let first = export(&workspace, "out", "first");
    assert_eq!(first.code, 0, "{first:?}");
    let sampled = run(program(&["sample", "--prompt", "0123", "--max-new-tokens", "4"]).arg(workspace.path("out")));
    assert_eq!(sampled.code, 0, "{sampled:?}");
    let planned = run(program(&["plan", "--hardware", "h200-pcie5", "--seq-length", "16", "--model"]).arg(workspace.path("model")));
    let carried = carried_file(&workspace, "out").metadata().unwrap().len() as f64 / 1024.0;
    assert!(planned.code == 0 && planned.stdout.contains(&format!("; carried tensors of {carried:.1} KiB, once")), "{planned:?}");
    // Another model trains in the directory; the earlier run keeps its tower.
    let other = self::workspace("qwen3_vl");
    train(&workspace, "out", &["--max-steps", "2", "--model", other.path("model").to_str().unwrap()]).digest();
    assert_eq!(workspace.names("out/.superoffload", "carried-").len(), 2);
    let earlier = export(&workspace, "out/previous-1", "earlier");
    assert_eq!(earlier.code, 0, "{earlier:?}");
    assert_eq!(
        fs::read(workspace.path("earlier/model.safetensors")).unwrap(),
        fs::read(workspace.path("first/model.safetensors")).unwrap()
    );
}

#[test]
fn a_foreign_file_with_the_name_of_carried_tensors_outlives_the_run() {
    let workspace = workspace("qwen3_vl");
    train(&workspace, "out", &["--max-steps", "2"]).digest();
    let carried = carried_file(&workspace, "out");
    let whole = fs::read(&carried).unwrap();
    fs::write(&carried, "mine").unwrap();
    train(&workspace, "out", &["--max-steps", "1"]).refused(2, &["not a file of carried tensors of this program", "--output-dir"]);
    assert_eq!(fs::read_to_string(&carried).unwrap(), "mine");
    train(&workspace, "out", &["--max-steps", "4", "--resume-from-checkpoint", "auto"]).digest();
    assert_eq!(fs::read(&carried).unwrap(), whole);
    assert_eq!(fs::read_to_string(format!("{}.foreign-1", carried.display())).unwrap(), "mine");
}
