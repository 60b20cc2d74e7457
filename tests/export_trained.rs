//! An export is what was trained: its chat template, its end of text, its additional templates, and rotations that every version of transformers
//! reads. With `SUPEROFFLOAD_TRANSFORMERS_PYTHON`, a Python with transformers 4 or 5, that program reads the exports, too.

use crate::program::{CONFIG, Workspace, program, run};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const RAG: &str = "{{ messages[0]['content'] }} by the documents";

/// A tokenizer of single characters, with the end of text of a base model and that of its chats.
fn tokenizer() -> String {
    let characters = (32u8..127).chain([b'\n']).map(char::from).enumerate();
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].into_iter().enumerate();
    let characters = characters.map(|(id, c)| (c.to_string(), json!(id + 3)));
    let vocab: serde_json::Map<String, Value> = specials.clone().map(|(id, name)| (name.into(), json!(id))).chain(characters).collect();
    let special = |(id, content): (usize, &str)| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let added: Vec<_> = specials.map(special).collect();
    let split = json!({"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": false});
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "?"});
    json!({"version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": split, "post_processor": null,
        "decoder": {"type": "Fuse"}, "model": model})
    .to_string()
}

/// A workspace whose model is a base model with a tokenizer; and a conversation.
fn workspace(config: &Value) -> Workspace {
    let workspace = Workspace::new();
    workspace.write("model/config.json", config.to_string());
    workspace.write("model/generation_config.json", json!({"eos_token_id": 0}).to_string());
    workspace.write("model/tokenizer.json", tokenizer());
    let tokenizer = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": "{{ 1 }}"});
    workspace.write("model/tokenizer_config.json", tokenizer.to_string());
    workspace.write("model/special_tokens_map.json", json!({"eos_token": "<|endoftext|>"}).to_string());
    let chat = json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]});
    workspace.write("chat.jsonl", format!("{chat}\n"));
    workspace.write("chatml.jinja", CHATML);
    workspace
}

fn llama() -> Value {
    let mut config: Value = serde_json::from_str(CONFIG).unwrap();
    config["model_type"] = json!("llama");
    config["eos_token_id"] = json!(0);
    config
}

/// Trains a step with `flags`, exports it, and gives the directory's name.
fn exported(workspace: &Workspace, flags: &[&str]) -> String {
    let (data, out) = (format!("--data={}", workspace.path("chat.jsonl").display()), workspace.path("out"));
    run(&mut workspace.train("run", &[&[data.as_str(), "--max-steps=1", "--device=cpu", "--seq-length=64"], flags].concat())).digest();
    let export = run(program(&["export"]).arg(workspace.path("run")).arg(&out));
    assert_eq!(export.code, 0, "{export:?}");
    out.display().to_string()
}

fn read(dir: &str, name: &str) -> Value {
    serde_json::from_slice(&fs::read(Path::new(dir).join(name)).unwrap()).unwrap()
}

#[test]
fn the_template_and_the_end_of_text_are_those_of_training() {
    let workspace = workspace(&llama());
    let template = format!("--chat-template={}", workspace.path("chatml.jinja").display());
    let out = exported(&workspace, &[&template, "--eos-token=<|im_end|>"]);
    assert_eq!(fs::read_to_string(Path::new(&out).join("chat_template.jinja")).unwrap(), CHATML);
    assert_eq!(read(&out, "tokenizer_config.json")["chat_template"], Value::Null);
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        assert_eq!(read(&out, name)["eos_token"], "<|im_end|>", "{name}");
    }
    assert_eq!(read(&out, "generation_config.json")["eos_token_id"], json!([2, 0]));
    assert_eq!(read(&out, "config.json")["eos_token_id"], 2);
    // The text, not the path, is in the checkpoint.
    let kept = workspace.path("run/checkpoint-1/model/chat_template.jinja");
    assert_eq!(fs::read_to_string(kept).unwrap(), CHATML);
    transformers(&out, json!({"eos": "<|im_end|>", "chat": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "theta": 1e4}));
}

#[test]
fn a_template_writes_the_end_of_text_in_use() {
    let workspace = workspace(&llama());
    let template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}";
    let template = format!("--chat-template={}", workspace.write("end.jinja", template).display());
    for end in ["--eos-token=<|im_end|>", "--eos-token=2"] {
        let mut data = program(&["data", "--model"]);
        data.arg(workspace.path("model")).args([&template, end]).arg(workspace.path("chat.jsonl"));
        let shown = run(&mut data);
        assert!(shown.stdout.contains("hi<|im_end|>⟦yes<|im_end|>⟧"), "{shown:?}");
    }
    let out = exported(&workspace, &[&template, "--eos-token=<|im_end|>"]);
    let resumed = run(program(&["resume"]).arg(workspace.path("run")).args(["--max-steps=2"]));
    assert_eq!(resumed.code, 0, "{resumed:?}");
    transformers(&out, json!({"eos": "<|im_end|>", "chat": "hi<|im_end|>"}));
}

#[test]
fn a_correct_configuration_stays_byte_for_byte_and_additional_templates_are_copied() {
    let workspace = workspace(&llama());
    workspace.write("model/chat_template.jinja", CHATML);
    workspace.write("model/additional_chat_templates/rag.jinja", RAG);
    workspace.write("model/additional_chat_templates/notes.txt", "not a template");
    let out = exported(&workspace, &[]);
    for name in ["chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "tokenizer.json"] {
        let of = |dir: &Path| fs::read(dir.join(name)).unwrap();
        assert!(of(&workspace.path("model")) == of(Path::new(&out)), "{name}");
    }
    assert_eq!(fs::read_to_string(Path::new(&out).join("additional_chat_templates/rag.jinja")).unwrap(), RAG);
    assert_eq!(fs::read_dir(Path::new(&out).join("additional_chat_templates")).unwrap().count(), 1);
    // A run goes on, and a digest is taken, of a checkpoint that has the folder.
    let resumed = run(program(&["resume"]).arg(workspace.path("run")).args(["--max-steps=2"]));
    assert_eq!(resumed.code, 0, "{resumed:?}");
    transformers(&out, json!({"eos": "<|endoftext|>", "templates": ["default", "rag"]}));
}

#[test]
fn a_named_template_becomes_the_default_one() {
    let workspace = workspace(&llama());
    let templates = json!([{"name": "default", "template": "{{ 1 }}"}, {"name": "chat", "template": CHATML}]);
    let tokenizer = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": templates});
    workspace.write("model/tokenizer_config.json", tokenizer.to_string());
    let out = exported(&workspace, &["--chat-template-name=chat"]);
    assert_eq!(fs::read_to_string(Path::new(&out).join("chat_template.jinja")).unwrap(), CHATML);
}

#[test]
fn rotations_are_read_alike_under_old_and_new_names() {
    let mut config = llama();
    config.as_object_mut().unwrap().remove("rope_theta");
    config["rope_parameters"] = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5});
    let workspace = workspace(&config);
    let template = format!("--chat-template={}", workspace.path("chatml.jinja").display());
    let out = exported(&workspace, &[&template]);
    let exported = read(&out, "config.json");
    assert_eq!(exported["rope_parameters"], config["rope_parameters"]);
    assert_eq!((&exported["rope_theta"], &exported["rope_scaling"]), (&json!(5e5), &json!({"rope_type": "linear", "factor": 2.0})));
    transformers(&out, json!({"theta": 5e5, "factor": 2.0}));
    // An export is a model again, and goes on to the same rotations.
    let (data, again) = (format!("--data={}", workspace.path("chat.jsonl").display()), format!("--model={out}"));
    let from = run(
        &mut workspace.train("again", &[&data, &template, &again, "--max-steps=1", "--device=cpu", "--seq-length=64", "--init=random"])
    );
    assert_eq!(from.digest(), run(program(&["digest"]).arg(workspace.path("run"))).digest(), "the same shape, seed and data");
}

/// What transformers reads in `dir` is `expected`, where a Python with it is named.
fn transformers(dir: &str, expected: Value) {
    let Some(python) = std::env::var_os("SUPEROFFLOAD_TRANSFORMERS_PYTHON") else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/read_export.py");
    let output = Command::new(python).arg(script).args([dir, &expected.to_string()]).output().unwrap();
    assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
}
