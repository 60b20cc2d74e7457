//! Other spellings of flags: underscores for dashes, and the names of Hugging Face, TRL, axolotl and LLaMA-Factory. One table serves the
//! command line and the configuration file.

use crate::error::{Error, Result};
use clap::{Arg, Command};
use std::ffi::OsString;
use std::iter::Peekable;
use std::vec::IntoIter;

/// Meaning of a foreign option name or value in this program.
#[derive(Clone, Copy, Debug)]
enum Sense {
    Set(&'static str, &'static str),
    /// The flag of the same name, with the value as it is written.
    AsWritten,
    /// The program always behaves this way.
    Holds,
    /// The option is ignored for this reason.
    Ignored(&'static str),
    /// The option is not available. The text names the alternative.
    Refused(&'static str),
}

use Sense::{AsWritten, Holds, Ignored, Refused, Set};

#[derive(Clone, Copy, Debug)]
enum AliasRule {
    Name(&'static str),
    /// A boolean. It is true if no value follows.
    Switch {
        yes: Sense,
        no: Sense,
    },
    /// Known words, and the meaning of all other words.
    Words {
        known: &'static [(&'static str, Sense)],
        other: Sense,
    },
    /// A value below 1 is a ratio and sets this flag.
    FractionOf(&'static str),
    /// The meaning for every value.
    Always(Sense),
}

use AliasRule::{Always, FractionOf, Name, Switch, Words};

const BEST_IS_KEPT: &str = "the best checkpoint of an evaluation is kept beside the last: superoffload export RUN OUT --best";
const ALL_PARAMETERS: &str = "every parameter is trained here; leave it out";
const NO_LAUNCHER: &str = "one process drives all GPUs and divides the states among them: --gpus N";

/// Names in dashes. A name that ends with `*` is a prefix. The first match applies.
#[rustfmt::skip]
const TABLE: &[(&str, AliasRule)] = &[
    ("model-name-or-path", Name("model")),
    ("base-model", Name("model")),
    ("max-length", Name("seq-length")),
    ("max-seq-length", Name("seq-length")),
    ("cutoff-len", Name("seq-length")),
    ("sequence-len", Name("seq-length")),
    ("dataset", Name("data")),
    ("dataset-name", Name("data")),
    ("eval-dataset", Name("eval-data")),
    ("chat-template-path", Name("chat-template")),
    ("optimizer", Name("optim")),
    ("train-file", Name("data")),
    ("gradient-clipping", Name("max-grad-norm")),
    ("micro-batch-size", Name("per-device-train-batch-size")),
    ("num-epochs", Name("num-train-epochs")),
    ("lr-scheduler", Name("lr-scheduler-type")),
    ("torch-dtype", Name("dtype")),
    ("bf16", Switch { yes: Set("dtype", "bfloat16"), no: Ignored("--dtype sets the format: bfloat16 by default, float16 or float32") }),
    ("fp16", Switch { yes: Set("dtype", "float16"), no: Holds }),
    ("dtype", Words { known: &[("bf16", Set("dtype", "bfloat16")), ("fp16", Set("dtype", "float16")), ("fp32", Set("dtype", "float32"))], other: AsWritten }),
    ("gradient-checkpointing", Switch { yes: Set("activations", "recompute-block"), no: Set("activations", "keep") }),
    ("gradient-checkpointing-kwargs", Always(Ignored("--activations chooses what is recomputed"))),
    ("optim", Words {
        known: &[("adamw", Holds), ("adamw-hf", Holds), ("adamw-torch", Holds), ("adamw-torch-fused", Holds), ("adamw-torch-xla", Holds),
            ("adamw-torch-npu-fused", Holds), ("adamw-apex-fused", Holds)],
        other: Refused("the optimizer is AdamW with 32-bit states: use adamw_torch, adamw_torch_fused, adamw_hf or adamw_apex_fused"),
    }),
    ("warmup-steps", FractionOf("warmup-ratio")),
    ("lr-scheduler-type", Words {
        known: &[("constant-with-warmup", Set("lr-scheduler-type", "constant")), ("warmup-stable-decay", Set("lr-scheduler-type", "wsd"))],
        other: AsWritten,
    }),
    ("max-steps", Words { known: &[("-1", Holds)], other: AsWritten }),
    ("report-to", Words {
        known: &[("all", Set("report-to", "tensorboard"))],
        other: AsWritten,
    }),
    ("save-strategy", Words {
        known: &[("steps", Holds), ("no", Refused("the last step is always saved; a --save-steps above --max-steps saves nothing before it"))],
        other: Refused("use --save-steps N: checkpoints are counted in steps"),
    }),
    ("logging-strategy", Words { known: &[("steps", Holds)], other: Refused("use --logging-steps N: log lines are counted in steps") }),
    ("evaluation-strategy", Name("eval-strategy")),
    ("do-eval", Switch { yes: Holds, no: Set("eval-strategy", "no") }),
    ("load-best-model-at-end", Switch { yes: Ignored(BEST_IS_KEPT), no: Holds }),
    ("metric-for-best-model", Words { known: &[("eval-loss", Holds), ("loss", Holds)], other: Refused("the best has the lowest eval_loss") }),
    ("greater-is-better", Switch { yes: Refused("the best has the lowest eval_loss"), no: Holds }),
    ("eval-split", Words { known: &[("0", Holds), ("0.0", Holds)], other: AsWritten }),
    ("val-set-size", Name("eval-split")),
    ("val-size", Name("eval-split")),
    ("validation-split", Name("eval-split")),
    ("per-device-eval-batch-size", Always(Ignored("an evaluation uses the micro-batches of a step"))),
    ("sample-packing", Switch { yes: Set("packing", "bfd"), no: Set("packing", "off") }),
    ("packing", Words { known: &[("true", Set("packing", "bfd")), ("false", Set("packing", "off"))], other: AsWritten }),
    ("packing-strategy", Words {
        known: &[("bfd", Ignored("--packing bfd is both switch and strategy"))],
        other: Refused("use --packing wrapped|bfd|off, and --overlong split where documents are to be split"),
    }),
    ("assistant-only-loss", Switch { yes: Set("train-on", "assistant"), no: Set("train-on", "all") }),
    ("completion-only-loss", Switch { yes: Set("train-on", "completion"), no: Set("train-on", "all") }),
    ("train-on-inputs", Switch { yes: Set("train-on", "all"), no: Holds }),
    ("train-on-prompt", Name("train-on-inputs")),
    ("do-train", Switch { yes: Holds, no: Refused("train does nothing else") }),
    ("overwrite-output-dir", Switch { yes: Ignored("an earlier run in the output directory is moved aside, never deleted"), no: Holds }),
    ("use-cpu", Switch { yes: Set("device", "cpu"), no: Holds }),
    ("no-cuda", Name("use-cpu")),
    ("push-to-hub", Switch { yes: Refused("superoffload export writes a directory that `hf upload` takes"), no: Holds }),
    ("hub-*", Always(Ignored("nothing is uploaded"))),
    ("label-smoothing-factor", Words { known: &[("0", Holds), ("0.0", Holds)], other: Refused("the loss is plain cross-entropy; leave it out") }),
    ("fsdp*", Always(Refused(NO_LAUNCHER))),
    ("lora-*", Always(Refused(ALL_PARAMETERS))),
    ("use-peft", Switch { yes: Refused(ALL_PARAMETERS), no: Holds }),
    ("load-in-4bit", Switch { yes: Refused(ALL_PARAMETERS), no: Holds }),
    ("load-in-8bit", Switch { yes: Refused(ALL_PARAMETERS), no: Holds }),
    ("attn-implementation", Always(Ignored("--attention auto|cudnn|products|plain chooses"))),
    ("flash-attention", Always(Ignored("--attention auto|cudnn|products|plain chooses"))),
    ("flash-attn", Always(Ignored("--attention auto|cudnn|products|plain chooses"))),
    ("dataloader-*", Always(Ignored("the training thread reads the data of a step itself, in microseconds"))),
    ("dataset-num-proc", Always(Ignored("text is tokenized on all CPUs, once"))),
    ("preprocessing-num-workers", Always(Ignored("text is tokenized on all CPUs, once"))),
    ("group-by-length", Always(Ignored("rows have --seq-length tokens; --packing bfd fills them with documents of fitting lengths"))),
    ("remove-unused-columns", Always(Ignored("other columns are never read"))),
    ("data-seed", Always(Ignored("--seed also sets the data order"))),
    ("ddp-*", Always(Ignored(NO_LAUNCHER))),
    ("local-rank", Always(Ignored(NO_LAUNCHER))),
    ("tf32", Always(Ignored("--dtype is the format of products; float32 is computed in float32"))),
    ("torch-compile*", Always(Ignored("this program does not use PyTorch"))),
    ("use-liger-kernel", Always(Ignored("this program does not use PyTorch"))),
    ("trust-remote-code", Always(Ignored("code of a model repository is never run"))),
    ("logging-first-step", Always(Ignored("step 1 is always logged"))),
    ("logging-dir", Always(Ignored("logs go to the output directory"))),
    ("run-name", Always(Ignored("the output directory is the run's name"))),
    ("disable-tqdm", Always(Ignored("the bar is shown on terminals alone"))),
    ("save-safetensors", Always(Ignored("superoffload export writes safetensors"))),
    ("ignore-data-skip", Always(Ignored("a resumed run continues at its position in the data"))),
    ("stage", Words { known: &[("sft", Holds), ("pt", Holds)], other: Refused("train does sft and pt; --loss dpo trains on pairs") }),
    ("finetuning-type", Words { known: &[("full", Holds)], other: Refused(ALL_PARAMETERS) }),
    ("adapter", Words { known: &[("", Holds)], other: Refused(ALL_PARAMETERS) }),
    ("quantization-*", Always(Refused(ALL_PARAMETERS))),
    ("freeze-*", Switch { yes: Refused("use --freeze REGEX, for the names of tensors in the model's files"), no: Holds }),
    ("template", Always(Refused("the model's own chat template is used; --chat-template FILE names another one"))),
    ("max-samples", Always(Refused("give a shorter file, or use --max-steps N"))),
    ("mask-history", Switch { yes: Set("train-on", "last"), no: Holds }),
    ("neat-packing", Switch { yes: Set("packing", "bfd"), no: Holds }),
    ("disable-shuffling", Switch { yes: Set("no-shuffle", "true"), no: Holds }),
    ("special-tokens", Always(Refused("--eos-token TOKEN names the end of text; padding needs no token"))),
    ("evals-per-epoch", Always(Refused("use --eval-strategy epoch, or --eval-steps N"))),
    ("saves-per-epoch", Always(Refused("use --save-steps N: checkpoints are counted in steps"))),
    ("neftune-noise-alpha", Words { known: &[("0", Holds), ("0.0", Holds)], other: Refused("no noise is added to embeddings; leave it out") }),
    ("loss-type", Words {
        known: &[
            ("nll", Holds),
            ("sigmoid", Set("loss", "dpo")),
            ("hinge", Set("loss", "hinge")),
            ("ipo", Set("loss", "ipo")),
            ("robust", Set("loss", "robust")),
            ("apo-zero", Set("loss", "apo-zero")),
            ("apo-down", Set("loss", "apo-down")),
            ("sigmoid-norm", Set("loss", "sigmoid-norm")),
            ("simpo", Set("loss", "simpo")),
        ],
        other: Refused("the losses are plain cross-entropy and those of --loss"),
    }),
    ("model-revision", Words { known: &[("main", Holds)], other: Refused("use --model NAME@REVISION") }),
    ("dataset-train-split", Words { known: &[("train", Holds)], other: Refused("name the files of that part: --data PATH") }),
    ("dataset-test-split", Words { known: &[("test", Holds)], other: Refused("name the files of that part: --eval-data PATH") }),
    ("dataset-text-field", Words { known: &[("text", Holds)], other: Refused("use --columns text=NAME") }),
    ("plot-loss", Always(Ignored("superoffload report draws the loss"))),
    ("dataset-prepared-path", Always(Ignored("prepared text is in the cache"))),
    ("overwrite-cache", Always(Ignored("prepared text is found by its content"))),
    ("pad-to-sequence-len", Always(Ignored("every row has --seq-length tokens"))),
    ("padding-free", Always(Ignored("--packing bfd fills rows with whole documents"))),
    ("eval-sample-packing", Always(Ignored("an evaluation has the rows of training"))),
    ("eval-packing", Always(Ignored("an evaluation has the rows of training"))),
    ("save-only-model", Always(Ignored("a checkpoint always has all that a resume needs"))),
    ("auto-resume-from-checkpoints", Always(Ignored("superoffload resume OUT continues a run"))),
    ("include-num-input-tokens-seen", Always(Ignored("metrics.jsonl has the tokens of each step"))),
    ("strict", Always(Ignored("unknown keys are errors"))),
    ("model-type", Always(Ignored("config.json names the architecture"))),
    ("tokenizer-type", Always(Ignored("tokenizer.json contains the tokenizer's type"))),
    ("streaming", Always(Ignored("rows are read when a step needs them"))),
    ("enable-liger-kernel", Always(Ignored("this program does not use PyTorch"))),
    ("use-unsloth", Always(Ignored("this program does not use PyTorch"))),
    ("xformers-attention", Always(Ignored("--attention auto|cudnn|products|plain chooses"))),
    ("sdp-attention", Always(Ignored("--attention auto|cudnn|products|plain chooses"))),
    ("full-determinism", Always(Ignored("runs are bit-reproducible by default"))),
];

fn rule(name: &str) -> Option<&'static AliasRule> {
    let fits = |pattern: &str| pattern.strip_suffix('*').map_or(pattern == name, |start| name.starts_with(start));
    TABLE.iter().find(|(pattern, _)| fits(pattern)).map(|(_, rule)| rule)
}

/// The names of other programs that are known here, in dashes.
pub(super) fn names() -> Vec<&'static str> {
    TABLE.iter().map(|(name, _)| *name).filter(|name| !name.ends_with('*')).collect()
}

/// The flag, or the entry of the table, that `name` in dashes is another name for.
pub(super) fn plain_name(name: &str) -> &str {
    match rule(name) {
        Some(Name(other)) => plain_name(other),
        _ => name,
    }
}

/// Translation of a name and its value.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Translation {
    AsWritten,
    /// Another flag, or another value.
    Flag(&'static str, String),
    /// The program always behaves this way.
    Nothing,
    /// The option is ignored. The text gives the reason.
    Ignored(String),
}

/// Translates the option `name`, in dashes, with the value `value`.
///
/// # Errors
/// A sentence that names the alternative.
pub(super) fn outcome(name: &str, value: &str) -> std::result::Result<Translation, String> {
    let word = word(value);
    let sense = match rule(name) {
        None | Some(Name(_)) => AsWritten,
        Some(FractionOf(flag)) => {
            let is_fraction = value.parse::<f64>().is_ok_and(|fraction| fraction > 0.0 && fraction < 1.0);
            return Ok(if is_fraction { Translation::Flag(flag, value.into()) } else { Translation::AsWritten });
        }
        Some(Always(sense)) => *sense,
        Some(Words { known, other }) => known.iter().find(|(known, _)| *known == word).map_or(*other, |(_, sense)| *sense),
        Some(Switch { yes, no }) => match truth(value) {
            Some(true) => *yes,
            Some(false) => *no,
            // The flag's default applies.
            None if word == "auto" => Holds,
            None => return Err(format!("{name} {value}: expected true or false")),
        },
    };
    match sense {
        AsWritten => Ok(Translation::AsWritten),
        Holds => Ok(Translation::Nothing),
        Set(flag, value) => Ok(Translation::Flag(flag, value.into())),
        Ignored(why) => Ok(Translation::Ignored(format!("{name} ({why})"))),
        Refused(why) => Err(format!("{name} {value}: {why}")),
    }
}

/// Normalizes a word to this program's spelling: lower case, with dashes.
fn word(text: &str) -> String {
    text.to_lowercase().replace('_', "-")
}

fn truth(text: &str) -> Option<bool> {
    match text.to_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Some(true),
        "false" | "no" | "off" | "0" => Some(false),
        _ => None,
    }
}

/// `value` with each word spelled as `flag` knows it: `zero_offload` is `zero-offload`, `True` is `true`.
pub(super) fn choice(flag: &Arg, value: &str) -> String {
    let known = flag.get_possible_values();
    let is_known = |word: &str| known.iter().any(|value| value.get_name() == word);
    let spell = |part: &str| if is_known(part) || !is_known(&word(part)) { part.to_string() } else { word(part) };
    if known.is_empty() { value.into() } else { value.split(',').map(spell).collect::<Vec<_>>().join(",") }
}

/// A command line in this program's own spelling.
#[derive(Debug, Default)]
pub(crate) struct Rewritten {
    /// The arguments, the program's name first.
    pub args: Vec<OsString>,
    /// A line for each ignored flag, with the reason.
    pub ignored: Vec<String>,
}

/// The arguments after the current one.
type Rest = Peekable<IntoIter<OsString>>;

/// Spells `args`, the arguments of `command` with the program's name first, as the parser knows them.
///
/// # Errors
/// `Usage` that names the alternative for a flag of another program that is not available here.
pub(crate) fn rewrite(command: &Command, args: Vec<OsString>) -> Result<Rewritten> {
    let mut rest = args.into_iter().peekable();
    let mut rewritten = Rewritten { args: rest.next().into_iter().collect(), ..Rewritten::default() };
    let mut command = command;
    while let Some(sub) = rest.peek().and_then(|word| command.find_subcommand(word)) {
        command = sub;
        rewritten.args.extend(rest.next());
    }
    while let Some(word) = rest.next() {
        if word == "--" {
            rewritten.args.extend([word].into_iter().chain(rest));
            break;
        }
        match word.to_str().and_then(|word| word.strip_prefix("--")) {
            Some(flag) => rewritten.flag(command, flag, &mut rest)?,
            None => rewritten.args.push(word),
        }
    }
    Ok(rewritten)
}

impl Rewritten {
    /// One flag, without its dashes.
    fn flag(&mut self, command: &Command, written: &str, rest: &mut Rest) -> Result<()> {
        let (name, value) = written.split_once('=').map_or((written, None), |(name, value)| (name, Some(value.to_string())));
        let dashed = name.replace('_', "-");
        let find = |name: &str| command.get_arguments().find(|arg| arg.get_long() == Some(name));
        let trains = find("learning-rate").is_some();
        let name = own_name(command, if trains { plain_name(&dashed) } else { &dashed });
        let (arg, rule) = (find(name), rule(name).filter(|_| trains));
        let value = value.or_else(|| value_after(arg, rule, rest));
        let value = match (value, rule) {
            (None, Some(Switch { .. })) => "true".into(),
            (None, Some(Always(_))) => String::new(),
            (Some(value), _) => value,
            (None, _) => {
                self.args.push(format!("--{name}").into());
                return Ok(());
            }
        };
        let outcome = if trains { outcome(name, &value) } else { Ok(Translation::AsWritten) };
        match outcome.map_err(|cause| Error::usage(format!("--{cause}")))? {
            Translation::AsWritten => {
                let value = arg.map_or_else(|| value.clone(), |arg| choice(arg, &value));
                self.args.push(format!("--{name}={value}").into());
            }
            Translation::Flag(flag, value) => self.args.push(format!("--{flag}={value}").into()),
            Translation::Nothing => {}
            Translation::Ignored(line) => self.ignored.push(format!("--{line}")),
        }
        Ok(())
    }
}

/// `name`, or `model` for its older name `model-config`, where `command` takes a model.
fn own_name<'n>(command: &Command, name: &'n str) -> &'n str {
    let takes_model = command.get_arguments().any(|arg| arg.get_long() == Some("model"));
    if name == "model-config" && takes_model && command.get_name() != "train" { "model" } else { name }
}

/// The next argument, if it is the value of this flag and needs translation.
fn value_after(arg: Option<&Arg>, rule: Option<&AliasRule>, rest: &mut Rest) -> Option<String> {
    let is_switch = arg.is_some_and(Arg::is_require_equals_set) || matches!(rule, Some(Switch { .. }));
    // For a flag without a value, clap reports the possible values true and false.
    let has_choices = arg.is_some_and(|arg| arg.get_action().takes_values() && !arg.get_possible_values().is_empty());
    let is_value = |next: &OsString| match next.to_str() {
        Some(text) if is_switch => truth(text).is_some(),
        Some(text) => (rule.is_some() || has_choices) && !text.starts_with("--"),
        None => false,
    };
    rest.next_if(is_value).and_then(|value| value.into_string().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::TrainOptions;
    use crate::config::settings::tests::flags;
    use clap::Args;
    use proptest::prelude::*;

    fn train() -> Command {
        Command::new("superoffload").subcommand(TrainOptions::augment_args(Command::new("train"))).subcommand(Command::new("other"))
    }

    fn rewritten(args: &[&str]) -> Result<Rewritten> {
        rewrite(&train(), [&["superoffload", "train"], args].concat().into_iter().map(OsString::from).collect())
    }

    /// The flags after the subcommand.
    fn spelled(args: &[&str]) -> Vec<String> {
        let rewritten = rewritten(args).unwrap();
        assert!(rewritten.ignored.is_empty(), "{rewritten:?}");
        rewritten.args[2..].iter().map(|arg| arg.to_str().unwrap().to_string()).collect()
    }

    #[test]
    fn underscores_are_dashes_in_names_and_in_words() {
        assert_eq!(
            spelled(&["--per_device_train_batch_size", "4", "--max_steps=5"]),
            ["--per-device-train-batch-size", "4", "--max-steps=5"]
        );
        assert_eq!(
            spelled(&["--strategy", "zero_offload", "--activations=recompute_block"]),
            ["--strategy=zero-offload", "--activations=recompute-block"]
        );
        assert_eq!(spelled(&["--without", "stv,deadline_order"]), ["--without=stv,deadline-order"]);
        assert_eq!(spelled(&["--no_shuffle", "True", "--digest"]), ["--no-shuffle=true", "--digest"]);
        assert_eq!(spelled(&["--output_dir", "my_run", "--", "--a_b"]), ["--output-dir", "my_run", "--", "--a_b"]);
        assert_eq!(spelled(&["--learning_rate", "-1"]), ["--learning-rate", "-1"]);
        assert_eq!(spelled(&["--dry-run", "run.toml"]), ["--dry-run", "run.toml"], "a switch of ours takes no value");
        let other = rewrite(&train(), ["superoffload", "other", "--tf32", "--a_b=c_d"].map(OsString::from).into()).unwrap();
        assert_eq!(other.args[2..], ["--tf32", "--a-b=c_d"], "what does not train has no aliases");
    }

    #[test]
    fn names_of_other_programs_are_ours() {
        assert_eq!(spelled(&["--model_name_or_path", "m", "--base-model=n"]), ["--model", "m", "--model=n"]);
        for name in ["--max_length", "--max_seq_length", "--cutoff_len", "--sequence_len"] {
            assert_eq!(spelled(&[name, "8"]), ["--seq-length", "8"]);
        }
        assert_eq!(spelled(&["--bf16", "--seed", "1"]), ["--dtype=bfloat16", "--seed", "1"]);
        assert_eq!(spelled(&["--fp16", "True", "--fp16=false"]), ["--dtype=float16"]);
        assert_eq!(spelled(&["--gradient_checkpointing"]), ["--activations=recompute-block"]);
        assert_eq!(spelled(&["--gradient_checkpointing", "false"]), ["--activations=keep"]);
        assert_eq!(spelled(&["--optim", "adamw_torch_fused", "--evaluation_strategy=no"]), ["--eval-strategy=no"]);
        assert_eq!(spelled(&["--report_to", "none", "--report_to=all"]), ["--report-to=none", "--report-to=tensorboard"]);
        assert_eq!(spelled(&["--warmup_steps", "0.1", "--warmup_steps=20"]), ["--warmup-ratio=0.1", "--warmup-steps=20"]);
        assert_eq!(spelled(&["--lr_scheduler_type", "constant_with_warmup"]), ["--lr-scheduler-type=constant"]);
        assert_eq!(spelled(&["--lr_scheduler=warmup_stable_decay"]), ["--lr-scheduler-type=wsd"]);
        assert_eq!(spelled(&["--val_set_size", "0.05", "--val_size=0.0", "--validation_split=9"]), ["--eval-split=0.05", "--eval-split=9"]);
        assert_eq!(spelled(&["--max_steps", "-1", "--dtype", "bf16"]), ["--dtype=bfloat16"]);
        assert_eq!(spelled(&["--assistant_only_loss", "--assistant_only_loss=False"]), ["--train-on=assistant", "--train-on=all"]);
        assert_eq!(spelled(&["--completion_only_loss", "true", "--completion_only_loss=no"]), ["--train-on=completion", "--train-on=all"]);
        assert_eq!(spelled(&["--train_on_inputs", "--train_on_prompt=True"]), ["--train-on=all", "--train-on=all"]);
        assert_eq!(spelled(&["--train_on_inputs", "false", "--train_on_prompt=False"]), [""; 0], "so it is anyway");
        assert_eq!(spelled(&["--dataset", "a", "b", "--gradient_clipping=0.5"]), ["--data", "a", "b", "--max-grad-norm=0.5"]);
    }

    #[test]
    fn options_without_meaning_are_logged_and_consume_their_value() {
        let odd = rewritten(&["--dataloader_num_workers", "4", "--tf32", "--seed", "1", "--ddp_timeout=9", "--bf16", "false"]).unwrap();
        assert_eq!(odd.args[2..], ["--seed", "1"]);
        let names: Vec<_> = odd.ignored.iter().map(|line| line.split(' ').next().unwrap()).collect();
        assert_eq!(names, ["--dataloader-num-workers", "--tf32", "--ddp-timeout", "--bf16"]);
        assert!(odd.ignored.iter().all(|line| line.ends_with(')')), "{odd:?}");
    }

    #[test]
    fn unsupported_names_are_answered_with_a_replacement() {
        for (args, words) in [
            (&["--optim", "adafactor"][..], &["--optim adafactor", "adamw_torch"][..]),
            (&["--optim", "adamw_8bit"], &["32-bit states"]),
            (&["--save_strategy", "epoch"], &["--save-steps"]),
            (&["--metric_for_best_model", "accuracy"], &["eval_loss"]),
            (&["--packing_strategy", "wrapped"], &["--packing wrapped"]),
            (&["--bf16=maybe"], &["--bf16 maybe: expected true or false"]),
            (&["--lora_r", "8"], &["every parameter"]),
        ] {
            let refused = rewritten(args).unwrap_err();
            let message = refused.to_string();
            assert!(refused.exit_code() == 2 && words.iter().all(|word| message.contains(word)), "{message}");
        }
    }

    /// An entry for a flag of this program must not change its own values, and every target flag must exist.
    #[test]
    fn the_table_shadows_no_flag_and_leads_to_flags() {
        let is_flag = |name: &str| flags().iter().any(|flag| flag.get_long() == Some(name));
        for flag in flags() {
            let name = flag.get_long().unwrap();
            let leaves = matches!(rule(name), None | Some(FractionOf(_)) | Some(Words { other: AsWritten, .. }));
            assert!(leaves, "--{name} is shadowed by {:?}", rule(name));
            let own = flag.get_possible_values().iter().all(|value| outcome(name, value.get_name()) == Ok(Translation::AsWritten));
            assert!(own, "--{name}");
        }
        for (name, rule) in TABLE {
            let targets: Vec<&str> = match rule {
                Name(_) => vec![plain_name(name)],
                FractionOf(flag) => vec![flag],
                Switch { yes, no } => {
                    [yes, no].into_iter().filter_map(|sense| if let Set(flag, _) = sense { Some(*flag) } else { None }).collect()
                }
                Words { known, .. } => {
                    known.iter().filter_map(|(_, sense)| if let Set(flag, _) = sense { Some(*flag) } else { None }).collect()
                }
                Always(_) => vec![],
            };
            assert!(targets.iter().all(|target| is_flag(target) || super::rule(target).is_some()), "{name}: {targets:?}");
            assert!(!name.contains('_'), "{name}");
        }
    }

    proptest! {
        #[test]
        fn no_command_line_panics(args in prop::collection::vec("-{0,3}[a-z_=0-9-]{0,12}", 0..6)) {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let _ = rewritten(&args);
        }
    }
}
