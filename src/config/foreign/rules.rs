//! Rules for keys with a meaning that depends on the program, or with a value that no flag accepts as written.
//! All other keys have the same meaning as on the command line.

use super::datasets::{self, LlamaFactoryData};
use super::fate::{Fate, set};
use crate::config::document::{DocumentEntry, DocumentNode, NodeValue};
use crate::config::program::Program;

/// A rule for some keys of a program.
enum Rule {
    Ignored(&'static str),
    Missing(&'static str),
    /// The program always behaves this way for one of these values. Any other value is not available.
    Only(&'static [&'static str], &'static str),
    /// A flag with a different name.
    Flag(&'static str),
}

use Rule::{Flag, Ignored, Missing, Only};

const PARALLEL: &str = "one process drives all GPUs of a machine and divides the states among them: --gpus N";
const FOLLOW: &str = "`python -m superoffload.follow OUT --to wandb` shows a run there";
const BY_STEPS: &str = "checkpoints are counted in steps: --save-steps, 500 by default; the last step is always saved";
const MACHINES: &str = "each machine starts a process of its own: --processes N --process K --rendezvous HOST:PORT";
const TEMPLATE: &str = "the model's own chat template is used; --chat-template FILE names another one";

#[rustfmt::skip]
const RULES: &[(Program, &str, Rule)] = &[
    (Program::Axolotl, "chat-template", Only(&["tokenizer-default"], "put the template into a file, and name that: chat_template: FILE.jinja")),
    (Program::Axolotl, "chat-template-jinja", Missing("put the template into a file, and name that: chat_template: FILE.jinja")),
    (Program::Axolotl, "saves-per-epoch", Ignored(BY_STEPS)),
    (Program::Axolotl, "tokens", Missing("add tokens to the model's tokenizer.json and rows to its embedding first")),
    (Program::Axolotl, "plugins", Ignored("this program has its own kernels")),
    (Program::Axolotl, "liger-*", Ignored("this program has its own kernels")),
    (Program::Axolotl, "wandb-*", Ignored(FOLLOW)),
    (Program::Axolotl, "mlflow-*", Ignored(FOLLOW)),
    (Program::Axolotl, "unfrozen-parameters", Missing("give each as train-only: a regular expression for the names of tensors")),
    (Program::Axolotl, "rl", Missing("the data of pairs is not converted; name the files: --data FILE --loss dpo")),
    (Program::Axolotl, "fsdp*", Ignored(PARALLEL)),
    (Program::LlamaFactory, "template", Ignored(TEMPLATE)),
    (Program::LlamaFactory, "max-samples", Ignored("all records are read; use a shorter file or --max-steps N to train on fewer")),
    (Program::LlamaFactory, "dataset-dir", Ignored("its dataset_info.json lists the files of `dataset`")),
    (Program::LlamaFactory, "mix-strategy", Only(&["concat"], "files are read one after another, and their sequences are shuffled")),
    (Program::LlamaFactory, "fsdp*", Ignored(PARALLEL)),
    (Program::Trl, "fsdp*", Ignored(PARALLEL)),
    (Program::Trl, "dataset-config", Missing("name the files of the configuration: dataset_name: PATH")),
    (Program::Accelerate, "compute-environment", Ignored("the launcher decides where the program runs")),
    (Program::Accelerate, "distributed-type", Ignored(PARALLEL)),
    (Program::Accelerate, "num-machines", Only(&["1"], MACHINES)),
    (Program::Accelerate, "machine-rank", Only(&["0"], MACHINES)),
    (Program::Accelerate, "main-process-*", Ignored(MACHINES)),
    (Program::Accelerate, "rdzv-backend", Ignored(MACHINES)),
    (Program::Accelerate, "same-network", Ignored(MACHINES)),
    (Program::Accelerate, "num-processes", Flag("gpus")),
    (Program::Accelerate, "gpu-ids", Only(&["all"], "set CUDA_VISIBLE_DEVICES to these")),
    (Program::Accelerate, "main-training-function", Ignored("there is no Python to call")),
    (Program::Accelerate, "downcast-bf16", Ignored("it is for TPUs")),
    (Program::Accelerate, "tpu-*", Ignored("it is for TPUs")),
    (Program::Accelerate, "fsdp-config", Ignored(PARALLEL)),
    (Program::Accelerate, "dynamo-config", Ignored("this program has its own kernels")),
    (Program::Accelerate, "enable-cpu-affinity", Ignored("threads are pinned where that helps")),
    (Program::Accelerate, "debug", Ignored("errors name operation, subject and remedy anyway")),
];

/// Flags for the defaults of other programs that differ from the defaults here.
pub(super) const DEFAULTS: &[(Program, &str, &str)] = &[
    (Program::Axolotl, "seq-length", "512"),
    (Program::Axolotl, "per-device-train-batch-size", "1"),
    (Program::Axolotl, "num-train-epochs", "1"),
    (Program::Axolotl, "lr-scheduler-type", "cosine"),
    (Program::LlamaFactory, "seq-length", "2048"),
    (Program::Trl, "learning-rate", "2e-5"),
];

/// Keys with another default in the other program, for which no flag fits every data format.
pub(super) const OTHERWISE: &[(Program, &str, &str)] = &[(
    Program::Trl,
    "assistant_only_loss",
    "only the answers of conversations are trained here, all messages there; --train-on all trains all messages",
)];

/// The fate of `entry` in a file of `program`, if the program has a rule of its own for it. `all` are the keys of the file.
pub(super) fn own(program: Program, entry: &DocumentEntry, all: &[DocumentEntry]) -> Option<Fate> {
    let (name, node) = (entry.key.replace('_', "-"), &entry.node);
    structured(program, &name, node, all).or_else(|| {
        let fits = |pattern: &str| pattern.strip_suffix('*').map_or(pattern == name, |start| name.starts_with(start));
        let (_, _, rule) = RULES.iter().find(|(of, pattern, _)| *of == program && fits(pattern))?;
        Some(plain(rule, node))
    })
}

fn plain(rule: &Rule, node: &DocumentNode) -> Fate {
    let is_off = matches!(node.value, NodeValue::Truth(false)) || node.text().is_empty() && !matches!(node.value, NodeValue::Table(_));
    match rule {
        Ignored(_) | Missing(_) if is_off => Fate::Holds,
        Ignored(why) => Fate::Ignored((*why).into()),
        Missing(why) => Fate::Missing((*why).into()),
        Only(values, _) if values.contains(&node.text().to_lowercase().replace('_', "-").as_str()) => Fate::Holds,
        Only(_, why) => Fate::Missing((*why).into()),
        Flag(flag) => Fate::Used(vec![set(flag, node.value.clone())], String::new()),
    }
}

fn text(word: &str) -> NodeValue {
    NodeValue::Text(word.into())
}

/// Keys with a structured value.
fn structured(program: Program, name: &str, node: &DocumentNode, all: &[DocumentEntry]) -> Option<Fate> {
    Some(match (program, name) {
        (Program::Axolotl | Program::Trl, "datasets") => datasets::listed(node, "data"),
        (Program::Axolotl, "test-datasets") => datasets::listed(node, "eval-data"),
        (Program::Axolotl, "evals-per-epoch") => evaluations(node, all),
        (Program::Axolotl | Program::LlamaFactory, "special-tokens" | "new-special-tokens") => special_tokens(node),
        (Program::Axolotl, "tokenizer-config") => {
            let is_model = all.iter().any(|entry| entry.key == "base_model" && entry.node.value == node.value);
            if is_model { Fate::Holds } else { Fate::Missing("put the tokenizer's files into the model's directory".into()) }
        }
        (Program::LlamaFactory, "dataset") => LlamaFactoryData::of(all).fate(&node.text(), "data"),
        (Program::LlamaFactory, "eval-dataset") => LlamaFactoryData::of(all).fate(&node.text(), "eval-data"),
        (Program::LlamaFactory | Program::Trl, "report-to") if !["none", "all", "tensorboard"].contains(&node.text().as_str()) => {
            Fate::Missing(format!("{FOLLOW}; leave it out"))
        }
        (Program::Trl, "dataset-text-field") => Fate::Used(vec![set("columns", text(&format!("text={}", node.text())))], String::new()),
        (Program::Accelerate, "mixed-precision") => match node.text().as_str() {
            "bf16" => Fate::Used(vec![set("dtype", text("bfloat16"))], String::new()),
            "fp16" => Fate::Used(vec![set("dtype", text("float16"))], String::new()),
            "no" => Fate::Used(vec![set("dtype", text("float32"))], String::new()),
            _ => Fate::Missing("bf16, fp16 and no are available; for 8-bit matrix products use --matmul-dtype fp8".into()),
        },
        (Program::Accelerate, "deepspeed-config") => deepspeed(node),
        (_, "deepspeed") if matches!(node.value, NodeValue::Text(_)) && node.text().is_empty() => Fate::Holds,
        _ => return None,
    })
}

/// Translates the number of evaluations per epoch.
fn evaluations(node: &DocumentNode, all: &[DocumentEntry]) -> Fate {
    let is_evaluated = |entry: &DocumentEntry| match entry.key.as_str() {
        "val_set_size" => !["0", "0.0", ""].contains(&entry.node.text().as_str()),
        "test_datasets" => true,
        _ => false,
    };
    match node.text().as_str() {
        "0" | "" => Fate::Holds,
        _ if !all.iter().any(is_evaluated) => Fate::Ignored("the file names no evaluation data".into()),
        "1" => Fate::Used(vec![set("eval-strategy", text("epoch"))], String::new()),
        _ => Fate::Used(
            vec![set("eval-strategy", text("epoch"))],
            "one evaluation per epoch; --eval-steps N sets the number of steps between evaluations".into(),
        ),
    }
}

fn special_tokens(node: &DocumentNode) -> Fate {
    let NodeValue::Table(tokens) = &node.value else {
        return plain(&Missing("add tokens to the model's tokenizer.json and rows to its embedding first"), node);
    };
    let end = tokens.iter().find(|token| token.key == "eos_token");
    let others = "other special tokens come from the model's files, and padding needs no token";
    match end {
        Some(end) => Fate::Used(vec![set("eos-token", end.node.value.clone())], others.into()),
        None => Fate::Ignored(others.into()),
    }
}

/// The part of a DeepSpeed configuration that accelerate writes.
fn deepspeed(node: &DocumentNode) -> Fate {
    let NodeValue::Table(entries) = &node.value else { return plain(&Ignored(PARALLEL), node) };
    let flag = |key: &str| match key {
        "deepspeed_config_file" => Some("deepspeed"),
        "gradient_accumulation_steps" => Some("gradient-accumulation-steps"),
        "gradient_clipping" => Some("max-grad-norm"),
        _ => None,
    };
    let is_set = |entry: &&DocumentEntry| !["auto", ""].contains(&entry.node.text().as_str());
    let flags: Vec<_> = entries.iter().filter(is_set).filter_map(|entry| Some(set(flag(&entry.key)?, entry.node.value.clone()))).collect();
    let why = "the plan places optimizer states; --strategy, --weights and --gpus change the placement";
    if flags.is_empty() { Fate::Ignored(why.into()) } else { Fate::Used(flags, why.into()) }
}
