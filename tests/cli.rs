//! The command line: one-line errors, the output of a run, and the other commands.

use crate::program::{CONFIG, Outcome, STEPS, Workspace, program, run};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::process::{Command, Stdio};
use superoffload::internals::hardware::Profile;

#[test]
fn flags_that_make_no_sense_are_refused() {
    let workspace = Workspace::new();
    let cases: [(&[&str], &[&str]); 14] = [
        (&["--strategy", "nope"], &["nope", "--strategy", "zero-offload"]),
        (&["--devcie", "cpu"], &["--devcie", "--device"]),
        (&["--max-steps", "many"], &["many", "--max-steps"]),
        (&["--max-steps"], &["--max-steps", "value is required"]),
        (&["--learning-rate", "NaN"], &["--learning-rate", "NaN"]),
        (&["--learning-rate", "-1"], &["--learning-rate", "-1"]),
        (&["--adam-beta1", "1"], &["--adam-beta1"]),
        (&["--threads", "0"], &["--threads 0", "1 to"]),
        (&["--slots", "0"], &["--slots 0"]),
        (&["--bucket-mib", "0"], &["--bucket-mib"]),
        (&["--save-total-limit", "0"], &["--save-total-limit 0"]),
        (&["--seq-length", "18446744073709551615"], &["--seq-length"]),
        (&["--seed", "-1"], &["--seed"]),
        (&["--hardware", "typo"], &["typo", "h200-pcie5"]),
    ];
    for (flags, words) in cases {
        run(&mut workspace.train("out", flags)).refused(2, words);
    }
    for (args, words) in [(&["digest"][..], "<DIR>"), (&["export", "x"], "<OUT>"), (&["trian"], "train")] {
        run(&mut program(args)).refused(2, &[words]);
    }
    assert!(!workspace.path("out").exists(), "a refusal writes nothing");
}

#[test]
fn mistakes_in_the_settings_file_name_the_place() {
    let workspace = Workspace::new();
    for (line, words) in [
        ("learning_rat = 1", &["run.toml", "learning_rat", "nearest key is `learning-rate`"][..]),
        ("seed = 'x'", &["run.toml", "seed"]),
        ("seed = ", &["run.toml", "line"]),
        ("max-steps = 3", &["run.toml", "max-steps"]),
        ("adam-beta2 = nan", &["--adam-beta2"]),
    ] {
        workspace.settings(line);
        run(&mut workspace.train("out", &[])).refused(2, words);
    }
    for (name, text, words) in [
        ("run.yaml", "seed: 1\nlerning_rate: 1\n", &["run.yaml: line 2, column 1", "`lerning_rate`", "`learning-rate`"][..]),
        ("run.json", "{\"seed\": 1,\n \"seed\": 2}", &["run.json: line 2, column 2", "duplicate key `seed`"]),
        ("run.cfg", "seed = 1", &["run.cfg", ".yaml"]),
        ("bomb.yml", "a: &a [x,x,x]\nb: &b [*a,*a,*a]\nmodel: [*b,*b]\nseed: *c\n", &["bomb.yml: line 4"]),
    ] {
        let path = workspace.write(name, text);
        run(program(&["train"]).arg(path).args(["--max-steps", "1"])).refused(2, words);
    }
    run(&mut program(&["train", "--config", "/nowhere.toml"])).refused(1, &["/nowhere.toml", "No such file"]);
}

#[test]
fn places_that_cannot_be_written_are_refused_before_training() {
    let workspace = Workspace::new();
    workspace.write("file", "");
    let (below_file, file) = (workspace.path("file/out"), workspace.path("file"));
    for dir in [below_file.to_str().unwrap(), file.to_str().unwrap(), "/proc/nope", "/proc", "/dev/full"] {
        run(program(&["train", "--max-steps", "1", "--output-dir"]).arg(dir)).refused(1, &[dir]);
    }
    for trace in ["/proc/nope.json", "/nowhere/trace.json"] {
        let refused = run(&mut workspace.train("out", &["--trace", trace]));
        refused.refused(1, &[trace]);
        assert!(!refused.stdout.contains("step "), "found out too late: {refused:?}");
    }
    run(&mut workspace.train("out", &["--trace", "/dev/full"])).refused(1, &["/dev/full", "No space left"]);
    assert_eq!(workspace.names("out", "checkpoint-").len(), 6, "the training is not lost");
    assert_eq!(run(&mut workspace.train("null", &["--trace", "/dev/null"])).code, 0);
}

#[test]
fn data_that_does_not_fit_the_model_is_refused() {
    let workspace = Workspace::new();
    let token = |id: u16| [&[1, 0].repeat(50)[..], &id.to_le_bytes()].concat();
    for (name, content, words) in [
        ("empty.txt", vec![], "empty"),
        ("short.txt", b"abc".to_vec(), "short.txt"),
        ("latin.txt", b"caf\xe9 au lait".to_vec(), "byte offset 3"),
        ("odd.bin", vec![1; 99], "truncated"),
        ("big.bin", token(256), "byte offset 100: token id 256 is outside the vocabulary of 256"),
        ("lines.jsonl", b"{\"text\": \"a\"}\n{\"txt\": 1}\n".to_vec(), "line 2"),
        ("data.csv", b"a,b".to_vec(), "not a .txt"),
    ] {
        let path = workspace.write(name, content);
        run(&mut workspace.train("out", &["--data", path.to_str().unwrap()])).refused(1, &[words]);
    }
    run(&mut workspace.train("out", &["--data", "/nowhere.txt"])).refused(1, &["/nowhere.txt", "No such file"]);
    workspace.write("model/config.json", CONFIG.replace("\"vocab_size\": 256", "\"vocab_size\": 99"));
    run(&mut workspace.train("out", &["--tokenizer", "bytes"])).refused(1, &["data.txt", "outside the vocabulary of 99"]);
    run(&mut workspace.train("out", &[])).refused(1, &["model: no tokenizer.json", "AutoTokenizer", "--tokenizer bytes"]);
    workspace.write("model/tokenizer.json", words(120, Value::Null));
    workspace.write("words.txt", "w1 w98 w2 ".repeat(20));
    let data = workspace.path("words.txt");
    let fits = run(&mut workspace.train("out", &["--data", data.to_str().unwrap(), "--max-steps", "1"]));
    assert_eq!(fits.code, 0, "ids that no text uses are no reason to refuse: {fits:?}");
    workspace.write("words.txt", "w1 w99 w2 ".repeat(20));
    run(&mut workspace.train("out", &["--data", data.to_str().unwrap()])).refused(1, &["token 1 has id 99, outside the vocabulary of 99"]);
}

/// A `tokenizer.json` with the words `w0`, `w1` and so on.
fn words(count: u32, post_processor: Value) -> String {
    let vocab: BTreeMap<String, u32> = (0..count).map(|id| (format!("w{id}"), id)).collect();
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "w0"});
    let split = json!({"type": "WhitespaceSplit"});
    json!({"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "post_processor": post_processor, "model": model}).to_string()
}

#[test]
fn models_that_are_not_there_or_not_ready_are_answered_with_the_way_to_get_them() {
    let workspace = Workspace::new();
    run(&mut program(&["train", "--model", "x"])).refused(2, &["--model x: no such directory"]);
    run(&mut program(&["train", "--model", "org/x"])).refused(2, &["--model: --data is missing"]);
    let unknown = ["owner/name-7B: no such directory, and not in the Hugging Face cache", "hf download owner/name-7B"];
    run(workspace.train("out", &["--model", "owner/name-7B"]).env("HF_HUB_OFFLINE", "1")).refused(2, &unknown);
    run(&mut workspace.train("out", &["--model", "/nowhere"])).refused(2, &["--model /nowhere: no such directory"]);
    let near = |args: &[&str]| run(program(args).current_dir(workspace.path("")));
    for args in [&["train", "--model=modle"][..], &["train", "--model=modle", "--data=data.txt"], &["data", "--model=modle", "data.txt"]] {
        near(args).refused(2, &["--model modle: no such directory; did you mean model?", "org/model"]);
    }
    workspace.write("model/pytorch_model.bin", "");
    run(&mut workspace.train("out", &["--init", "checkpoint"])).refused(1, &["pytorch_model.bin", "only safetensors", "save_pretrained"]);
    workspace.write("secret", "s");
    std::os::unix::fs::symlink(workspace.path("secret"), workspace.path("model/merges.txt")).unwrap();
    run(&mut workspace.train("out", &[])).refused(1, &["merges.txt: is a link to", "secret"]);
}

#[test]
fn the_tokens_around_documents_are_logged_and_kept_by_a_resumed_run() {
    let workspace = Workspace::new();
    let begin = json!({"type": "RobertaProcessing", "cls": ["w1", 1], "sep": ["w2", 2], "trim_offsets": true, "add_prefix_space": false});
    workspace.write("model/tokenizer.json", words(256, begin));
    workspace.write("data.jsonl", "{\"text\": \"w9 w8 w7\"}\n".repeat(60));
    let data = workspace.path("data.jsonl");
    let with = |steps, more: &[&'static str]| [&["--data", data.to_str().unwrap(), "--max-steps", steps], more].concat();
    // 60 documents of four tokens, with a separator token between documents.
    let first = run(&mut workspace.train("out", &with("2", &["--eos-token", "w2"])));
    let output = "data    299 tokens, 18 sequences of 16";
    assert!(first.stdout.contains(output) && first.stdout.contains("(256 ids, end of text 2, each document begins with 1)"), "{first:?}");
    assert!(first.stderr.is_empty(), "{first:?}");
    let on = run(&mut workspace.resume("out", &with("4", &[])));
    assert!(on.code == 0 && on.stdout.contains("end of text 2, each document begins with 1)"), "{on:?}");
    run(&mut workspace.resume("out", &with("6", &["--add-bos", "no"]))).refused(2, &["--add-bos was \"yes\"", "is \"no\" now"]);
    let joined = run(&mut workspace.train("joined", &with("2", &["--add-bos", "no"])));
    assert!(joined.code == 0 && joined.stdout.contains("data    180 tokens"), "{joined:?}");
    assert!(joined.stderr.starts_with("warning: 60 documents are joined") && joined.stderr.contains("--eos-token"), "{joined:?}");
}

#[test]
fn an_export_has_the_requested_format_and_the_models_code() {
    let workspace = Workspace::new();
    workspace.write("model/config.json", config(&json!({"torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "configuration_x.X"}})));
    for name in ["configuration_x.py", "chat_template.jinja", "LICENSE"] {
        workspace.write(&format!("model/{name}"), name);
    }
    run(&mut workspace.train("out", &["--max-steps", "1"])).digest();
    fs::remove_dir_all(workspace.path("model")).unwrap();
    for (dtype, output, bytes) in [("auto", "bfloat16", 2), ("bfloat16", "bfloat16", 2), ("float32", "float32", 4)] {
        let out = workspace.path(dtype);
        assert_eq!(run(program(&["export", "--dtype", dtype]).arg(workspace.path("out")).arg(&out)).code, 0);
        let config: Value = serde_json::from_str(&fs::read_to_string(out.join("config.json")).unwrap()).unwrap();
        let weights = fs::metadata(out.join("model.safetensors")).unwrap().len();
        let params = 256 * 32 + 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 3 * 32;
        assert_eq!((config["torch_dtype"].as_str(), weights / params), (Some(output), bytes), "{weights}");
        assert_eq!(workspace.names(dtype, "")[..3], ["LICENSE", "chat_template.jinja", "config.json"]);
        assert_eq!(fs::read_to_string(out.join("configuration_x.py")).unwrap(), "configuration_x.py");
    }
    run(program(&["export", "--dtype", "int8"]).arg(workspace.path("out")).arg(workspace.path("x"))).refused(2, &["int8", "bfloat16"]);
}

/// The test model's configuration with changed keys. A null value removes a key.
fn config(changes: &Value) -> String {
    let mut config: Value = serde_json::from_str(CONFIG).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
            value => config[key] = value.clone(),
        }
    }
    config.to_string()
}

#[test]
fn configurations_that_lie_are_refused() {
    let workspace = Workspace::new();
    let refused = |config: &str, flags: &[&str], code: i32, words: &[&str]| {
        workspace.write("model/config.json", config);
        run(&mut workspace.train("out", flags)).refused(code, words);
    };
    for number in ["NaN", "1e999", "-Infinity"] {
        refused(&CONFIG.replace("1e-5", number), &[], 1, &["config.json"]);
    }
    for (changes, word) in [
        (json!({"hidden_size": -32}), "hidden_size"),
        (json!({"hidden_size": null}), "hidden_size"),
        (json!({"hidden_size": 1e300}), "hidden_size"),
        (json!({"hidden_size": 1u64 << 40}), "hidden_size"),
        (json!({"num_attention_heads": 5}), "num_attention_heads"),
        (json!({"rms_norm_eps": 0}), "rms_norm_eps"),
        (json!({"architectures": ["MambaForCausalLM"]}), "MambaForCausalLM"),
        (json!({"architectures": []}), "architectures"),
    ] {
        refused(&config(&changes), &[], 1, &["config.json", word]);
    }
    refused("{", &[], 1, &["config.json"]);
    let huge = json!({"hidden_size": 16384, "num_hidden_layers": 500, "intermediate_size": 65536});
    refused(&config(&huge), &[], 1, &["memory", "GiB"]);
    refused(CONFIG, &["--device", "cuda"], 1, &["--device cuda"]);
    let gpt2 = json!({"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 8,
        "vocab_size": 256, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"});
    refused(&gpt2.to_string(), &[], 2, &["--seq-length 16", "8 positions"]);
    fs::remove_file(workspace.path("model/config.json")).unwrap();
    run(&mut workspace.train("out", &[])).refused(1, &["config.json", "No such file"]);
}

/// A safetensors file with this header and `data_bytes` bytes of tensors.
fn safetensors(header: &str, data_bytes: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data_bytes]].concat()
}

#[test]
fn weights_that_lie_are_refused() {
    let workspace = Workspace::new();
    let refused = |words: &[&str]| run(&mut workspace.train("out", &["--init", "checkpoint"])).refused(1, words);
    refused(&["neither model.safetensors nor", "--init random"]);
    let f32s = |start, end| json!({"dtype": "F32", "shape": [8], "data_offsets": [start, end]});
    for (content, words) in [
        (vec![], "too few"),
        (vec![255; 64], "does not fit"),
        (safetensors("{", 0), "header"),
        (safetensors(&json!({"a": f32s(0, 32)}).to_string(), 31), "31 bytes"),
        (safetensors(&json!({"a": f32s(0, 32), "b": f32s(16, 48)}).to_string(), 48), "does not add up"),
        (safetensors(&json!({"a": f32s(0, 64)}).to_string(), 64), "does not add up"),
        (safetensors(&json!({"a": {"dtype": "F32", "shape": [u64::MAX, 2], "data_offsets": [0, 8]}}).to_string(), 8), "does not add up"),
        (safetensors(&json!({"a": f32s(0, 32)}).to_string(), 32), "missing"),
    ] {
        workspace.write("model/model.safetensors", content);
        refused(&["model.safetensors", words]);
    }
    fs::remove_file(workspace.path("model/model.safetensors")).unwrap();
    for (shard, words) in
        [("gone.safetensors", "No such file"), ("../data.txt", "not a file in this directory"), ("/etc/passwd", "not a file")]
    {
        workspace.write("model/model.safetensors.index.json", json!({"weight_map": {"a": shard}}).to_string());
        refused(&[shard, words]);
    }
}

#[test]
fn a_run_logs_its_plan_and_its_results() {
    let workspace = Workspace::new();
    workspace.settings("without = ['adaptive']");
    let printed = run(&mut workspace.train("out", &["--per-device-train-batch-size", "8"]));
    let digest = printed.digest().to_string();
    assert_eq!(printed.stderr, "", "no bar on a pipe");
    let at = |words: &str| printed.stdout.find(words).unwrap_or_else(|| panic!("no {words:?} in {}", printed.stdout));
    let order = [
        "\nplan\n",
        "\nresctrl ",
        "\nmodel   ",
        "\ndata    ",
        "\nplan    ",
        "\nmemory  ",
        "\nfiles   ",
        "\ndevice  cpu",
        "step      1  loss",
        "checkpoint-2\n",
        "step     12  loss",
        "finished 12 of 12 steps",
    ];
    assert!(order.iter().map(|words| at(words)).is_sorted(), "{}", printed.stdout);
    for words in [
        "  loss   ",
        " -> ",
        "tokens/s",
        "committed, ",
        "clipped, ",
        "skipped; ",
        "speculated",
        "checkpoint-12\n",
        "trace.json",
        "next: superoffload report ",
    ] {
        assert!(at(words) > 0);
    }
    let facts = workspace.metrics_and_facts("out").remove(0)["facts"].clone();
    assert_eq!((&facts["from_step"], &facts["max_steps"]), (&0.into(), &STEPS.into()), "{facts}");
    assert_eq!(facts["build"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!((&facts["settings"]["seq_length"], &facts["model"]["vocab"]), (&16.into(), &256.into()), "{facts}");
    assert!(facts["memory"]["device_bytes"]["weights"].as_u64() > Some(0) && facts["plan"]["threads"].as_u64() > Some(0), "{facts}");
    assert!(facts["flops_formula"].as_str().unwrap().contains("6*N*T") && facts["machine"]["arch"].is_string(), "{facts}");
    let lines = workspace.metrics("out");
    assert_eq!(lines.len() as u64, STEPS);
    for (line, step) in lines.iter().zip(1..) {
        assert_eq!(line["step"], step);
        for key in ["loss", "grad_norm", "learning_rate", "tokens_per_second", "model_tflops"] {
            assert!(line[key].as_f64().is_some_and(|x| x > 0.0), "{key} of {line}");
        }
        for key in ["speculated", "committed", "clipped", "skipped", "exposed_cpu_ms", "exposed_transfer_ms"] {
            assert!(line[key].as_f64().is_some_and(|x| x >= 0.0), "{key} of {line}");
        }
        assert!(line["rss_bytes"].as_u64() > Some(1 << 20), "{line}");
        assert!(line.get("memory").is_none() && line.get("flops_formula").is_none(), "what is the same in every line is not in it: {line}");
    }
    assert!(lines[11]["loss"].as_f64() < lines[0]["loss"].as_f64(), "it learns");
    let speculated: u64 = lines.iter().map(|line| line["speculated"].as_u64().unwrap()).sum();
    assert_eq!(speculated > 0, cfg!(feature = "stv"));
    exported_weights_train_on(&workspace, &digest);
}

fn exported_weights_train_on(workspace: &Workspace, digest: &str) {
    let (out, exported) = (workspace.path("out"), workspace.path("exported"));
    let export = || run(program(&["export"]).arg(&out).arg(&exported));
    let output = export();
    assert!(output.code == 0 && output.stdout.contains("exported step 12"), "{output:?}");
    export().refused(2, &["exported", "not empty"]);
    run(program(&["export"]).arg(workspace.path("model")).arg(workspace.path("x"))).refused(1, &["model", "no good checkpoint"]);
    let model = exported.to_str().unwrap();
    let further = run(&mut workspace.train("further", &["--model", model, "--init", "checkpoint", "--max-steps", "2"]));
    assert_ne!(further.digest(), digest);
    let (first, last) = (workspace.metrics("further")[0]["loss"].as_f64(), workspace.metrics("out")[0]["loss"].as_f64());
    assert!(first < last, "it begins where the other had learned to be");
}

/// Name, start and end of every span on the tracks with this name prefix.
fn spans(trace: &Value, track: &str) -> Vec<(String, f64, f64)> {
    let events = trace["traceEvents"].as_array().unwrap();
    let is_track = |e: &&Value| e["ph"] == "M" && e["args"]["name"].as_str().unwrap().starts_with(track);
    let tids: Vec<_> = events.iter().filter(is_track).map(|e| &e["tid"]).collect();
    assert!(!tids.is_empty(), "no track {track}");
    let spans = events.iter().filter(|e| e["ph"] == "X" && tids.contains(&&e["tid"]));
    spans
        .map(|e| (e["name"].as_str().unwrap().into(), e["ts"].as_f64().unwrap(), e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap()))
        .collect()
}

#[test]
fn the_timeline_shows_the_optimizer_beside_the_backward_pass() {
    let workspace = Workspace::new();
    workspace.write("model/config.json", config(&json!({"num_hidden_layers": 4, "hidden_size": 64})));
    workspace.settings("without = ['adaptive']");
    run(&mut workspace.train("out", &["--per-device-train-batch-size", "8", "--threads", "2", "--max-grad-norm", "0"])).digest();
    let trace: Value = serde_json::from_str(&fs::read_to_string(workspace.path("out/trace.json")).unwrap()).unwrap();
    for track in ["driver", "d2h", "h2d", "adam-00", "adam-01"] {
        assert!(!spans(&trace, track).is_empty(), "{track} is empty");
    }
    let decision = if cfg!(feature = "stv") { "speculate" } else { "validate first" };
    assert!(spans(&trace, "driver").iter().any(|(name, ..)| name == decision), "the trace shows what was decided");
    let compute: Vec<_> = spans(&trace, "compute").into_iter().filter(|(name, ..)| name != "wait").collect();
    let speculations: Vec<_> = spans(&trace, "adam").into_iter().filter(|(name, ..)| name.ends_with("speculate")).collect();
    let beside = speculations.iter().filter(|(_, start, end)| compute.iter().any(|(_, from, to)| start < to && from < end));
    let (beside, all) = (beside.count(), speculations.len());
    assert!(beside > 0 || !cfg!(feature = "stv"), "{beside} of {all} speculations run beside the {} spans of compute", compute.len());
}

#[test]
fn token_files_need_no_tokenizer_and_any_vocabulary_will_do() {
    let workspace = Workspace::new();
    workspace.write("model/config.json", config(&json!({"vocab_size": 97})));
    let ids: Vec<u8> = (0..400u16).flat_map(|i| (i * 7 % 97).to_le_bytes()).collect();
    fs::write(workspace.path("ids.bin"), ids).unwrap();
    let ids = workspace.path("ids.bin");
    run(&mut workspace.train("out", &["--data", ids.to_str().unwrap(), "--max-steps", "2"])).digest();
    run(&mut workspace.train("text", &["--tokenizer", "bytes"])).refused(1, &["outside the vocabulary of 97"]);
}

#[test]
fn the_other_commands_and_every_help_answer() {
    let doctor = run(&mut program(&["doctor"]));
    assert!(doctor.code == 0 && doctor.stdout.contains("cpus usable") && doctor.stdout.ends_with('\n'), "{doctor:?}");
    for args in [
        &["--help"][..],
        &["train", "--help"],
        &["export", "--help"],
        &["digest", "--help"],
        &["doctor", "--help"],
        &["selftest", "--help"],
        &["bench", "step", "--help"],
        &["probe", "--help"],
        &["superchip-check", "--help"],
        &["--version"],
    ] {
        let help = run(&mut program(args));
        assert!(help.code == 0 && help.stderr.is_empty() && help.stdout.contains("superoffload"), "{args:?}: {help:?}");
    }
}

#[test]
fn doctor_prints_the_same_facts_in_json() {
    let found: Value = serde_json::from_str(&run(&mut program(&["doctor", "--json"])).stdout).unwrap();
    assert_eq!(found["program"]["version"], env!("CARGO_PKG_VERSION"));
    let features: Vec<_> = found["program"]["features"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!((features.contains(&"cuda"), features.contains(&"default")), (cfg!(feature = "cuda"), false), "{features:?}");
    let version = run(&mut program(&["--version"])).stdout;
    assert!(features.is_empty() || version.ends_with(&format!(", features {}\n", features.join(","))), "{version}");
    let facts: Vec<_> = found["facts"].as_array().unwrap().iter().map(|fact| fact["name"].as_str().unwrap()).collect();
    assert!(["isa", "cpus usable", "kernel"].iter().all(|name| facts.contains(name)) && facts[0] == "cuda device", "{facts:?}");
    let text = run(&mut program(&["doctor"])).stdout;
    assert!(facts.iter().all(|name| text.contains(&format!("\n{name}:")) || text.starts_with(name)), "{text}");
    assert!(found["advice"].is_array() && found["machine"]["usable_cpus"].is_u64(), "{found}");
    let dir = tempfile::tempdir().unwrap();
    let rates = run(program(&["doctor", "--output-dir"]).arg(dir.path())).stdout;
    let line = rates.lines().find(|line| line.starts_with("disk: ")).unwrap_or_else(|| panic!("{rates}"));
    assert!(line.contains(dir.path().to_str().unwrap()) && line.contains("(1), ") && line.contains("(4) a second"), "{line}");
}

#[test]
fn a_user_tests_devices_with_the_program_alone() {
    let selftest = |args: &[&str]| run(program(&["selftest"]).args(args).env("CUDA_VISIBLE_DEVICES", ""));
    let done = selftest(&["--json", "--device", "cpu", "--seed", "3", "kernels/swiglu", "training/losses in float32"]);
    let result: Value = serde_json::from_str(&done.stdout).unwrap();
    let cases = result["cases"].as_array().unwrap();
    let has = |words: &str| cases.iter().any(|case| case["case"].as_str().unwrap().contains(words) && case["outcome"] == "ok");
    assert!(done.code == 0 && has("kernels/swiglu") && has("training/losses"), "{done:?}");
    assert_eq!((&result["passed"], &result["failed"], &result["seed"]), (&json!(cases.len()), &json!(0), &json!(3)), "{result}");
    assert!(done.stderr.contains(" passed, 0 failed"), "{done:?}");
    let message = selftest(&["--device", "cpu", "--verbose", "kernels/swiglu"]);
    assert!(message.code == 0 && message.stdout.contains("ok kernels/swiglu") && message.stderr.is_empty(), "{message:?}");
    let gpu = selftest(&["--device", "cuda", "--require-gpu"]);
    gpu.refused(1, &["GPU"]);
    selftest(&["--device", "cpu", "kernels/no such"]).refused(2, &["no case"]);
    selftest(&["--device", "tpu"]).refused(2, &["tpu", "cpu, cuda"]);
}

#[test]
fn a_superchip_check_says_how_long_it_takes_and_needs_a_gpu() {
    let workspace = Workspace::new();
    let out = workspace.path("check");
    let check = |args: &[&str]| run(program(&["superchip-check", "--out"]).arg(&out).args(args).env("CUDA_VISIBLE_DEVICES", ""));
    let planned = check(&["--dry-run"]);
    assert!(planned.code == 0 && planned.stdout.contains("about 10 minutes") && planned.stderr.is_empty(), "{planned:?}");
    assert!(
        ["probe", "selftest", "W1: Qwen3-4B", "Table 2: + speculation"].iter().all(|part| planned.stdout.contains(part)),
        "{planned:?}"
    );
    let refused = check(&[]);
    assert!(refused.code == 1 && refused.stderr.contains("about 10 minutes"), "{refused:?}");
    assert!(refused.stderr.lines().last().is_some_and(|line| line.starts_with("error: ")) && !out.exists(), "{refused:?}");
}

#[test]
fn shells_and_manuals_know_every_flag() {
    let workspace = Workspace::new();
    for (shell, flag) in [("bash", "--learning-rate"), ("zsh", "--learning-rate="), ("fish", "-l learning-rate")] {
        let script = run(&mut program(&["completions", shell]));
        assert!(script.code == 0 && script.stdout.contains(flag) && script.stdout.contains("selftest"), "{shell}: {script:?}");
        if shell == "bash" {
            let file = workspace.write("superoffload.bash", &script.stdout);
            let complete = "source \"$1\"; COMP_WORDS=(superoffload train --learning-r); COMP_CWORD=2; \
                            _superoffload superoffload --learning-r train; echo \"${COMPREPLY[@]}\"";
            let found = run(Command::new("bash").args(["-c", complete, "bash"]).arg(file));
            assert_eq!(found.stdout, "--learning-rate\n", "{found:?}");
        }
    }
    run(&mut program(&["completions", "cmd.exe"])).refused(2, &["cmd.exe", "bash"]);
    let pages = workspace.path("man1");
    run(program(&["man"]).arg(&pages)).refused(1, &["write manual pages in", "man1", "No such file"]);
    fs::create_dir(&pages).unwrap();
    assert_eq!(run(program(&["man"]).arg(&pages)).code, 0);
    let page = fs::read_to_string(pages.join("superoffload-train.1")).unwrap();
    assert!(page.contains(r"\-\-learning\-rate") && page.contains("Peak learning rate"), "{page}");
    let names: Vec<_> = fs::read_dir(&pages).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(["superoffload.1", "superoffload-doctor.1", "superoffload-bench-step.1"].iter().all(|name| names.contains(&name.to_string())));
}

/// Lines before the first step's line, and lines of the end without those of a slow rank and of the digest.
fn around_the_steps(outcome: &Outcome) -> [Vec<&str>; 2] {
    assert!(outcome.code == 0 && outcome.stderr.is_empty(), "{outcome:?}");
    let lines: Vec<_> = outcome.stdout.lines().collect();
    let first = lines.iter().position(|line| line.starts_with("step ")).unwrap_or_else(|| panic!("{outcome:?}"));
    let end = lines.iter().position(|line| line.starts_with("finished ")).unwrap_or_else(|| panic!("{outcome:?}"));
    [
        lines[..first].to_vec(),
        lines[end..].iter().copied().filter(|line| !line.starts_with("digest: ") && !line.starts_with("  slow ")).collect(),
    ]
}

#[test]
fn a_run_prints_six_lines_before_its_first_step_and_six_at_its_end() {
    let workspace = Workspace::new();
    let run_toml = workspace.path("run.toml");
    let plain = |out: &str, flags: &[&str]| {
        let mut command = program(&["train", "--logging-steps=1", "--config"]);
        run(command.arg(&run_toml).arg("--output-dir").arg(workspace.path(out)).args(flags))
    };
    for (out, flags) in [
        ("out", &["--max-steps=4"][..]),
        ("resumed", &["--resume-from-checkpoint=auto", "--max-steps=4"]),
        ("ranks", &["--gpus=2", "--device=cpu", "--max-steps=4"]),
    ] {
        if out == "resumed" {
            workspace.copy_checkpoints("out", out, &[2]);
        }
        let outcome = plain(out, flags);
        let [before, after] = around_the_steps(&outcome);
        let labels: Vec<_> = before.iter().map(|line| line.split_whitespace().next().unwrap()).collect();
        assert_eq!(labels, ["model", "data", "plan", "memory", "files", "device"], "{outcome:?}");
        assert!(after.len() == 6 && after[5].starts_with("next: superoffload report "), "{outcome:?}");
    }
}

/// An output that fails every write, as on a full disk.
fn full() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn unread_output_ends_no_training_and_never_panics() {
    let workspace = Workspace::new();
    let quiet = run(workspace.train("out", &["--digest=false"]).stdout(full()));
    assert!(quiet.code == 0 && quiet.stderr.starts_with("\nfinished 12 of 12 steps") && !quiet.stderr.contains("step      3"), "{quiet:?}");
    assert_eq!(workspace.metrics("out").len() as u64, STEPS);
    let checkpoint = workspace.path("out/checkpoint-12");
    run(program(&["digest"]).arg(&checkpoint).stdout(full())).refused(1, &["standard output", "No space left"]);
    run(program(&["doctor"]).stdout(full())).refused(1, &["standard output"]);
    let deaf = |command: &mut Command| run(command.stdout(full()).stderr(full())).code;
    assert_eq!(deaf(&mut program(&["doctor"])), 1);
    assert_eq!(deaf(&mut program(&["train", "--seed", "x"])), 2);
    assert_eq!(deaf(&mut workspace.train("out", &["--digest=false"])), 0, "even a warning has nobody to hear it");
}

#[test]
fn bench_step_answers_with_one_json_line_or_appends_it() {
    let workspace = Workspace::new();
    let config = workspace.path("model/config.json");
    let bench = |flags: &[&str]| {
        let mut command = program(&["bench", "step", "--device=cpu", "--seq-length=8", "--threads=1", "--warmup=0", "--steps=2"]);
        run(command.arg("--model-config").arg(&config).args(flags))
    };
    let answered = bench(&["--clip=every-2"]);
    assert_eq!(answered.code, 0, "{answered:?}");
    let line: Value = serde_json::from_str(&answered.stdout).unwrap();
    assert_eq!(line["verdicts"], json!({"commit": 1, "clip": 1, "skip": 0}));
    assert!(answered.stderr.contains("plan") && answered.stderr.contains("TFLOP/s"), "{answered:?}");
    let out = workspace.path("steps.jsonl");
    for lines in 1..=2 {
        let appended = bench(&["--out", out.to_str().unwrap()]);
        assert!(appended.code == 0 && appended.stdout.is_empty(), "{appended:?}");
        assert_eq!(fs::read_to_string(&out).unwrap().lines().count(), lines);
    }
    for loss in ["dpo", "dapo", "distill"] {
        let answered = bench(&["--loss", loss, "--per-device-train-batch-size=2"]);
        assert_eq!(answered.code, 0, "random rows of {loss}: {answered:?}");
        let line: Value = serde_json::from_str(&answered.stdout).unwrap();
        assert!(line["settings"]["loss"] == loss && line["loss"]["last"].is_f64(), "{line}");
    }
    bench(&["--out", "/nowhere/steps.jsonl"]).refused(1, &["append to", "/nowhere/steps.jsonl"]);
    bench(&["--clip", "often"]).refused(2, &["--clip", "every-N"]);
    bench(&["--steps", "0"]).refused(2, &["--steps"]);
    bench(&["--save-steps", "3"]).refused(2, &["--save-steps"]);
    run(&mut program(&["bench", "step", "--model-config", "llama-9b"])).refused(2, &["--model llama-9b", "llama-8b"]);
    run(&mut program(&["bench", "step", "--model-config", "gpt-5b", "--seq-length", "2048"])).refused(2, &["1024 positions"]);
}

#[test]
fn a_probe_measures_the_machine_and_writes_a_profile() {
    let workspace = Workspace::new();
    let out = workspace.write("my-box.toml", "what was there before, and longer".repeat(1000));
    let probe = |flags: &[&str]| {
        let mut command = program(&["probe", "--device=cpu"]);
        run(command.args(flags))
    };
    let probed = probe(&["--seconds=1", "--out", out.to_str().unwrap()]);
    assert!(probed.code == 0 && probed.stdout.contains("adam_bytes_per_s, 1 thread "), "{probed:?}");
    assert!(probed.stderr.contains("host:") && !probed.stdout.contains("link"), "{probed:?}");
    let profile = Profile::load(out.to_str().unwrap()).unwrap();
    assert!(profile.name == "my-box" && profile.gpu.is_none() && profile.link.is_none() && profile.contention.is_none());
    let rates = [profile.host.memory_bytes_per_s.value, profile.cpu_device.unwrap().matmul_flops.value];
    assert!(rates.iter().all(|rate| (1e7..1e15).contains(rate)), "{rates:?}");
    assert!(profile.facts.iter().any(|fact| fact.starts_with("superoffload 0.")), "{:?}", profile.facts);
    probe(&["--out", "/nowhere/box.toml"]).refused(1, &["write", "/nowhere/box.toml"]);
    probe(&["--seconds", "0"]).refused(2, &["--seconds"]);
    probe(&["--save"]).refused(2, &["--save: runs on the CPU device need no profile"]);
    probe(&["--save", "--out", "box.toml"]).refused(2, &["cannot be used with"]);
}
