//! The doors through which files of strangers come in. Each takes the bytes of a file and may refuse them; it may not panic,
//! hang or take much memory. The fuzzers, the replay of their corpora and the campaigns all come in here.

use std::fs;
use std::path::{Path, PathBuf};
use superoffload::internals::checkpoint;
use superoffload::internals::config::file;
use superoffload::internals::data::{AddBos, Dataset, Preparation, RowRules, Tokenizer, render_in_this_process};
use superoffload::internals::model::{CarriedTensors, ModelShape, ModelWeights, TensorTable};
use superoffload::internals::model_dir::ModelDir;
use superoffload::{Result, Settings, StopFlag, TrainOptions};

/// Reads one input; `dir` is an empty directory of its own, which may be written.
type Door = fn(input: &[u8], dir: &Path);

/// Name and door; the name is that of the corpus, too.
pub const DOORS: [(&str, Door); 18] = [
    ("config_json", config_json),
    ("settings_toml", settings_toml),
    ("settings_yaml", settings_yaml),
    ("settings_json", settings_json),
    ("deepspeed", deepspeed),
    ("safetensors", safetensors),
    ("mxfp4", mxfp4),
    ("carried", carried),
    ("index", index),
    ("tokenizer", tokenizer),
    ("chat_template", chat_template),
    ("template", template),
    ("format", format),
    ("tojson", tojson),
    ("normalizer", normalizer),
    ("manifest", manifest),
    ("parquet", parquet),
    ("resctrl_profile", resctrl_profile),
];

/// Gives `input` to the door called `name`.
///
/// # Panics
/// If there is none, or the door does.
pub fn call(name: &str, input: &[u8]) {
    thread_local!(static DIR: tempfile::TempDir = scratch());
    let (_, door) = DOORS.into_iter().find(|(door, _)| *door == name).unwrap_or_else(|| panic!("no door {name}"));
    DIR.with(|dir| door(input, dir.path()));
}

/// In memory where that is possible: the same few files are written millions of times.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory")
}

fn put(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, bytes).expect("the scratch directory is ours");
    path
}

/// A model whose tensors are few and small.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 6, "vocab_size": 5, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true}"#;

/// A model whose experts are packed: there is one, whose rows are a block each.
pub const PACKED_CONFIG: &str = r#"{"architectures": ["GptOssForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 32, "num_local_experts": 1,
    "num_experts_per_tok": 1, "vocab_size": 5, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": false,
    "quantization_config": {"quant_method": "mxfp4"}}"#;

fn config_json(input: &[u8], _: &Path) {
    let Ok(text) = str::from_utf8(input) else { return };
    if let Ok(shape) = ModelShape::parse(text, Path::new("config.json")) {
        assert!(shape.flops_per_step(1, 16) >= 0.0);
        assert!(TensorTable::new(&shape).params() > 0);
    }
}

fn settings_toml(input: &[u8], dir: &Path) {
    settings(&put(dir, "run.toml", input));
}

fn settings_yaml(input: &[u8], dir: &Path) {
    settings(&put(dir, "run.yaml", input));
}

fn settings_json(input: &[u8], dir: &Path) {
    settings(&put(dir, "run.json", input));
}

fn deepspeed(input: &[u8], dir: &Path) {
    let options = TrainOptions { deepspeed: Some(put(dir, "ds.json", input)), ..TrainOptions::default() };
    if let Ok(options) = options.over_config_file() {
        let _ = Settings::resolve(options);
    }
}

fn settings(path: &Path) {
    if let Ok(options) = file::load(path) {
        let _ = Settings::resolve(options);
    }
}

/// The weights in `dir` of a model that `config` describes.
pub fn load_weights(config: &str, dir: &Path) -> Result<Vec<f32>> {
    let shape = ModelShape::parse(config, Path::new("config.json")).expect("the door's model");
    let weights = ModelWeights::open(dir, &shape)?;
    let mut flat = vec![0.0; TensorTable::new(weights.shape()).flat_elems()];
    weights.read(|start, block| {
        flat[start..start + block.len()].copy_from_slice(block);
        Ok(())
    })?;
    Ok(flat)
}

/// As a whole file, and as a header whose length is told rightly, before as much data as it asks for, within reason.
fn safetensors(input: &[u8], dir: &Path) {
    file_and_header(CONFIG, input, dir);
}

/// In the same two ways, for a model with packed experts.
fn mxfp4(input: &[u8], dir: &Path) {
    file_and_header(PACKED_CONFIG, input, dir);
}

fn file_and_header(config: &str, input: &[u8], dir: &Path) {
    let path = put(dir, "model.safetensors", input);
    let _ = load_weights(config, dir);
    let Some(last) = last_offset(input) else { return };
    let data = vec![0x3c; last];
    fs::write(path, [&(input.len() as u64).to_le_bytes()[..], input, &data].concat()).expect("the scratch directory is ours");
    let _ = load_weights(config, dir);
}

/// A whole file of carried tensors; and its header, a line `=== source`, and its list of the source, before as much data as the header asks for.
fn carried(input: &[u8], dir: &Path) {
    let path = put(dir, "carried.safetensors", input);
    let _ = read_carried(&path);
    let mut parts = split(input, b"\n=== source\n").into_iter();
    let (header, list) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let Some(last) = last_offset(header) else { return };
    let data = vec![0x3c; last.saturating_sub(list.len())];
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, list, &data].concat()).expect("the scratch directory is ours");
    let _ = read_carried(&path);
}

/// The bytes of all carried tensors in the file at `path`.
pub fn read_carried(path: &Path) -> Result<usize> {
    let (carried, mut bytes) = (CarriedTensors::open(path)?, 0);
    for tensor in carried.source().iter().filter(|tensor| tensor.trained.is_none()) {
        carried.read(&tensor.name, |piece| {
            bytes += piece.len();
            Ok(())
        })?;
    }
    Ok(bytes)
}

/// The largest number in a header that could be the end of its data.
fn last_offset(header: &[u8]) -> Option<usize> {
    let numbers = header.split(|byte| !byte.is_ascii_digit()).filter_map(|digits| str::from_utf8(digits).ok()?.parse::<usize>().ok());
    numbers.filter(|&n| n < 1 << 16).max()
}

/// Rows as documents of bytes.
fn parquet(input: &[u8], dir: &Path) {
    let path = put(dir, "data.parquet", input);
    let _ = Dataset::open(&[path], &Tokenizer::bytes(), 256, RowRules::wrapped(4), &mut Preparation::default());
}

/// An index over two shards, of which one is empty and one holds a tensor.
fn index(input: &[u8], dir: &Path) {
    let header = br#"{"model.norm.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    put(dir, "a.safetensors", &[&(header.len() as u64).to_le_bytes()[..], header, &[0; 16]].concat());
    put(dir, "b.safetensors", &[&2u64.to_le_bytes()[..], b"{}"].concat());
    put(dir, "model.safetensors.index.json", input);
    let _ = load_weights(CONFIG, dir);
}

/// What stands between the files of a tokenizer directory in one input; `tokenizer.json` comes first.
const NEXT_FILE: &[u8] = b"\n=== ";

/// `tokenizer.json`, then `=== NAME` lines before further files.
fn tokenizer(input: &[u8], dir: &Path) {
    const OTHERS: [&str; 3] = ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"];
    for name in OTHERS {
        let _ = fs::remove_file(dir.join(name));
    }
    let mut parts = split(input, NEXT_FILE).into_iter();
    put(dir, "tokenizer.json", parts.next().unwrap_or_default());
    for part in parts {
        let line = part.iter().position(|&byte| byte == b'\n').unwrap_or(part.len());
        if let Some(name) = OTHERS.into_iter().find(|name| name.as_bytes() == &part[..line]) {
            put(dir, name, &part[(line + 1).min(part.len())..]);
        }
    }
    let load = |dir: &ModelDir| Tokenizer::load(dir, None, AddBos::Auto);
    if let Ok(Some(tokenizer)) = ModelDir::open(dir).and_then(|dir| load(&dir)) {
        assert!(!tokenizer.to_string().is_empty());
        let _ = tokenizer.encode("The naïve café, 12345 \u{1f600}\n\n  a b </s>");
    }
}

/// A chat template, a line `=== records`, and records that go through it.
fn chat_template(input: &[u8], dir: &Path) {
    let mut parts = split(input, b"\n=== records\n").into_iter();
    let template = put(dir, "template.jinja", parts.next().unwrap_or_default());
    let data = put(dir, "records.jsonl", parts.next().unwrap_or_default());
    let (data, chat_template, seq_length) = (Some(vec![data]), Some(template), Some(1));
    let options = TrainOptions { data, chat_template, seq_length, ..TrainOptions::default() };
    let _ = Settings::resolve(options).and_then(|settings| {
        let view = superoffload::view_data(&settings, 3, false, &StopFlag::default())?;
        assert!(!view.to_string().contains('\x1b'));
        Ok(())
    });
}

/// A record whose one message holds `content`; templates are given it as it is.
fn record(content: &serde_json::Value) -> String {
    serde_json::json!({"messages": [{"role": "tool", "content": content}, {"role": "assistant", "content": "b"}]}).to_string()
}

/// The source of a template, in this process: no sandbox holds what the engine does.
fn template(input: &[u8], _: &Path) {
    let Ok(source) = str::from_utf8(input) else { return };
    let _ = render_in_this_process(source, &record(&"a, b".into()));
}

/// A format, in both forms that templates know.
fn format(input: &[u8], _: &Path) {
    let Ok(text) = str::from_utf8(input) else { return };
    for call in [
        "{{ t.format(1, -0.0, 2**64, 'é', a=[1, {'k': 1e300}], k=3) }}",
        "{{ t|format(1, -0.0, 2**64, 'é') }}",
        "{{ t|format(a=-1.5, b=255) }}",
    ] {
        let _ = render_in_this_process(&format!("{{% set t = messages[0].content %}}{call}"), &record(&text.into()));
    }
}

/// An indent and JSON.
fn tojson(input: &[u8], _: &Path) {
    let Ok(text) = str::from_utf8(input) else { return };
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (indent, json) = (text[..digits].parse::<u64>().unwrap_or(0), serde_json::from_str(&text[digits..]).unwrap_or_default());
    for call in ["x|tojson", "x|tojson(indent=INDENT, sort_keys=true)", "[x, {'x': x, 'y': messages}, [x] * 30]|tojson(indent=INDENT)"] {
        let source = format!("{{% set x = messages[0].content %}}{{{{ {} }}}}", call.replace("INDENT", &indent.to_string()));
        let _ = render_in_this_process(&source, &record(&json));
    }
}

/// A normalizer, in a tokenizer of words, in this process.
fn normalizer(input: &[u8], _: &Path) {
    let head = br#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}, "normalizer": "#;
    if let Ok(tokenizer) = Tokenizer::in_this_process(&[&head[..], input, b"}"].concat()) {
        let _ = tokenizer.encode("The na\u{ef}ve caf\u{e9} e\u{301}, 12345 \u{1f600}\n\n  aa a \u{4e2d} \u{ac00}");
    }
}

fn split<'a>(mut bytes: &'a [u8], by: &[u8]) -> Vec<&'a [u8]> {
    let mut parts = vec![];
    while let Some(at) = bytes.windows(by.len()).position(|window| window == by) {
        parts.push(&bytes[..at]);
        bytes = &bytes[at + by.len()..];
    }
    parts.push(bytes);
    parts
}

/// As it is, and sealed as a forger would: what a checksum lets through is believed no more than what it stops.
fn manifest(input: &[u8], dir: &Path) {
    put(dir, "state.bin", &[0; 192]);
    fs::create_dir_all(dir.join("model")).expect("the scratch directory is ours");
    put(&dir.join("model"), "config.json", b"{}");
    for bytes in [input.to_vec(), sealed(input)] {
        put(dir, "trainer_state.json", &bytes);
        if let Ok(mut loaded) = checkpoint::open(dir) {
            for part in loaded.manifest().arrays().parts() {
                let _ = loaded.read_state("norm", part, 0, &mut [0.0; 4]);
            }
            let _ = loaded.read_model_files();
        }
        let _ = checkpoint::verify(dir);
        let _ = checkpoint::digest_checkpoint(dir);
    }
}

/// The file that holds this manifest, with a checksum that is right.
pub fn sealed(manifest: &[u8]) -> Vec<u8> {
    let body = [b"{\"manifest\":", manifest].concat();
    let seal = format!(",\n\"crc32c\":\"{:08x}\"}}\n", crc32c::crc32c(&body));
    [body, seal.into_bytes()].concat()
}

fn resctrl_profile(input: &[u8], _: &Path) {
    let Ok(text) = str::from_utf8(input) else { return };
    if let Ok(profile) = superoffload_resctrl::Profile::parse(text) {
        profile.groups.iter().for_each(|group| assert!(!group.path().to_string().is_empty()));
    }
}
