//! All settings, each defined once: flag and key of the file, help, type, default, and behavior on resume.
//!
//! The table generates [`TrainOptions`] (parser, help, file, merge), [`Settings`] (defaults, JSON, flags in results) and [`KEYS`]
//! (comparison on resume). A new setting needs an entry here, its check in `checks.rs` where it has one, and its use.
//!
//! The table is a macro that makes typed options. Merging untyped TOML tables first would detect an invalid value too late to name its
//! flag or line of the file. Groups exist only in the table: [`Settings`] stays flat, as checkpoints and files are, so that
//! `Settings { seq_length, ..other }` works.

use super::options::{
    DeviceChoice, EvalStrategy, GpuCount, InitChoice, MatmulDtype, ReplanChoice, ReportTo, Resume, Rollback, TokenizerChoice, TrainDtype,
    TrainTokens, one_or_many, some_json, some_scalar,
};
use crate::data::chat::mask::TrainOn;
use crate::data::chat::record::DataFormat;
use crate::data::rows::hold_out::EvalSplit;
use crate::data::rows::row_rules::{Overlong, Packing};
use crate::data::tokenizer::AddBos;
use crate::describe;
use crate::device::LongSums;
use crate::faults::{Injection, RankFault};
use crate::hardware::selected_profile;
use crate::host::memory_policy::HugePagesChoice;
use crate::host::resctrl_group::ResctrlGroup;
use crate::model::activations::LossTile;
use crate::objective::ObjectiveKind;
use crate::optim::moments::Moments;
use crate::optim::schedule::{LrScheduler, TrainLength};
use crate::recipe::part::RunPart;
use crate::request::choices::{
    ActivationsChoice, AttentionChoice, CastSide, EarlyRows, ExpertProductsChoice, HeadRowsChoice, HostMemoryKind, IsaChoice, LayerOrder,
    LogitsDtypeChoice, MastersChoice, ResidentBuckets, SaveMemory, Strategy, Technique, Transport, WeightsChoice,
};
use crate::signals::StopSignal;
use crate::units::Bytes;
use clap::builder::{PathBufValueParser, StringValueParser, TypedValueParser};
use std::fmt::Display;
use std::path::PathBuf;

/// A setting, with its name in [`Settings`] and checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SettingKey {
    /// Field of [`Settings`].
    pub name: &'static str,
    /// Behavior on resume if the setting changed.
    pub(crate) on_resume: OnResume,
}

/// Behavior on resume if a setting differs from the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnResume {
    /// Ignored: the setting does not change the training result, or is compared by its contents (see [`RunPart`]).
    Free,
    /// The difference is reported, because it changes the training result.
    Logged,
    /// A difference is refused, because the data position would mean other sequences.
    Order,
    /// The checkpoint's value is the default. Any other value is refused, because the data position would mean other tokens.
    Tokens,
}

impl OnResume {
    /// The settings of this kind, in the table's order.
    pub(crate) fn keys(self) -> Vec<&'static str> {
        KEYS.iter().filter(|key| key.on_resume == self).map(|key| key.name).collect()
    }
}

/// The part that a setting feeds. A test compares this column of the table with [`Settings::request`].
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Feeds {
    /// The recipe.
    Recipe,
    /// The choices of placement that a search may vary.
    Wanted,
    /// The machine and the processes.
    Site,
    /// Data, tokens and initial weights, which are compared by their contents.
    Inputs,
    /// Logging, saving, evaluating and resuming.
    Run,
}

/// The text for clap: the sentence `help` and the default.
fn explained(help: &str, default: impl Display) -> String {
    format!("{} [default: {default}]", help.trim().trim_end_matches('.'))
}

/// Type of a setting: the type of its flag, or an `Option` of this type if the setting has no default.
macro_rules! settled {
    ($kind:ty) => { Option<$kind> };
    ($kind:ty, $default:expr) => { $kind };
}

macro_rules! default_value {
    () => {
        None
    };
    ($default:expr) => {
        $default
    };
}

/// Text of the default: the words in the table, or the value in the notation of the command line.
macro_rules! default_text {
    ($kind:ty, $($default:expr)?, $words:literal) => {
        $words
    };
    ($kind:ty, $default:expr,) => {{
        let default: $kind = $default;
        describe::written(&describe::value(&default))
    }};
}

/// The table of settings. An entry is `/// Help.`, attributes for clap and serde, and
///
/// ```text
/// name: Type [= default] [=> "the default in words"], OnResume, Feeds [, unless "is_..."];
/// ```
///
/// Without a default the setting is an `Option`. `unless` keeps a value out of the JSON. `flags` are several flags that make one setting.
/// Settings in `file` have no flag.
macro_rules! settings {
    ($($group:ident {
        $(flags $whole:ident: $whole_kind:ty = $whole_default:expr, $whole_resume:ident, $whole_feeds:ident {
            $(#[doc = $part_help:literal] $(#[$part_attr:meta])* $part:ident: $part_kind:ty => $part_words:literal;)*
        })?
        $(
            #[doc = $help:literal]
            $(#[$attr:meta])*
            $name:ident: $kind:ty $(= $default:expr)? $(=> $words:literal)?, $resume:ident, $feeds:ident $(, unless $skip:literal)?;
        )*
        $(file {
            $(#[doc = $file_help:literal] $file:ident: $file_kind:ty = $file_default:expr, $file_resume:ident, $file_feeds:ident;)*
        })?
    })*) => {
        /// Options of `train` as given. `None` means not set.
        #[derive(clap::Args, serde::Deserialize, Default, Clone, Debug, PartialEq)]
        #[command(about = "Train a language model with the optimizer on the CPU", long_about = None, allow_negative_numbers = true)]
        #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
        pub struct TrainOptions {
            /// TOML, YAML or JSON file with these flags as keys; flags win [default: none].
            #[arg(long, value_name = "FILE")]
            #[serde(skip)]
            pub config: Option<PathBuf>,
            /// DeepSpeed configuration; flags and --config win [default: none].
            #[arg(long, value_name = "FILE.json")]
            pub deepspeed: Option<PathBuf>,
            $(
                $($(
                    #[doc = $part_help]
                    #[arg(long, help = explained($part_help, $part_words))]
                    $(#[$part_attr])*
                    pub $part: Option<$part_kind>,
                )*)?
                $(
                    #[doc = $help]
                    #[arg(long, help = explained($help, default_text!($kind, $($default)?, $($words)?)))]
                    $(#[$attr])*
                    pub $name: Option<$kind>,
                )*
                $($(
                    #[doc = $file_help]
                    #[arg(skip)]
                    pub $file: Option<$file_kind>,
                )*)?
            )*
            /// Messages about ignored keys of the file, with the reason.
            #[arg(skip)]
            #[serde(skip)]
            pub ignored: Vec<String>,
            /// Blocks of lines with the outcome of each key of a DeepSpeed configuration.
            #[arg(skip)]
            #[serde(skip)]
            pub notes: Vec<String>,
        }

        impl TrainOptions {
            /// Merges these options over `lower`: an option that is not set here comes from `lower`.
            pub fn over(self, lower: Self) -> Self {
                Self {
                    config: self.config.or(lower.config),
                    deepspeed: self.deepspeed.or(lower.deepspeed),
                    $(
                        $($($part: self.$part.or(lower.$part),)*)?
                        $($name: self.$name.or(lower.$name),)*
                        $($($file: self.$file.or(lower.$file),)*)?
                    )*
                    ignored: [self.ignored, lower.ignored].concat(),
                    notes: [self.notes, lower.notes].concat(),
                }
            }

            /// The field names of the options that are set.
            pub fn explicit_flags(&self) -> Vec<&'static str> {
                let given = [$(
                    $($(self.$part.is_some().then_some(stringify!($part)),)*)?
                    $(self.$name.is_some().then_some(stringify!($name)),)*
                    $($(self.$file.is_some().then_some(stringify!($file)),)*)?
                )*];
                given.into_iter().flatten().collect()
            }
        }

        /// Settings of `train`: the given options, and defaults for the rest. Made and checked by [`Settings::resolve`].
        #[derive(Clone, Debug, PartialEq, serde::Serialize)]
        pub struct Settings {
            $(
                $(
                    #[doc = concat!("What ", $("`", stringify!($part), "` ",)* "make together.")]
                    pub $whole: $whole_kind,
                )?
                $(
                    #[doc = $help]
                    $(#[serde(skip_serializing_if = $skip)])?
                    pub $name: settled!($kind $(, $default)?),
                )*
                $($(
                    #[doc = $file_help]
                    pub $file: $file_kind,
                )*)?
            )*
            /// Host memory that the data takes while steps run, once its files are known: see [`crate::data::host_bytes::host_bytes`].
            #[serde(skip)]
            pub data_bytes: u64,
            /// The tokens of a step are given, and the size of a micro-batch is open.
            #[serde(skip)]
            pub is_batch_open: bool,
            /// `--gpus all` was given, and the GPUs are not counted yet: see [`Settings::on_gpus`].
            #[serde(skip)]
            pub all_gpus: bool,
            /// Tile of the loss that a checkpoint was made with, and that its run keeps.
            #[serde(skip)]
            pub loss_tile: Option<LossTile>,
            /// How long sums of products were computed when a checkpoint was made, which its run keeps.
            #[serde(skip)]
            pub long_sums: Option<LongSums>,
            /// Files that settings were read from.
            #[serde(skip)]
            pub sources: Vec<PathBuf>,
        }

        impl Default for Settings {
            /// The defaults of Hugging Face's `TrainingArguments` where they have the argument.
            fn default() -> Self {
                Self {
                    $(
                        $($whole: $whole_default,)?
                        $($name: default_value!($($default)?),)*
                        $($($file: $file_default,)*)?
                    )*
                    data_bytes: 0,
                    is_batch_open: false,
                    all_gpus: false,
                    loss_tile: None,
                    long_sums: None,
                    sources: Vec::new(),
                }
            }
        }

        impl Settings {
            /// Takes the value of each given option that has a setting of the same name.
            pub(super) fn take(&mut self, options: TrainOptions) {
                $(
                    $(if let Some(given) = options.$name { self.$name = given.into() })*
                    $($(if let Some(given) = options.$file { self.$file = given })*)?
                )*
            }
        }

        impl Settings {
            /// Whether the setting `name` exists only in the file.
            pub(crate) fn is_file_only(name: &str) -> bool {
                FILE_ONLY.contains(&name)
            }
        }

        /// All settings, in the table's order.
        pub(crate) const KEYS: &[SettingKey] = &[$(
            $(SettingKey { name: stringify!($whole), on_resume: OnResume::$whole_resume },)?
            $(SettingKey { name: stringify!($name), on_resume: OnResume::$resume },)*
            $($(SettingKey { name: stringify!($file), on_resume: OnResume::$file_resume },)*)?
        )*];

        /// The part that each setting feeds.
        #[cfg(test)]
        pub(super) const FEEDS: &[(&str, Feeds)] = &[$(
            $((stringify!($whole), Feeds::$whole_feeds),)?
            $((stringify!($name), Feeds::$feeds),)*
            $($((stringify!($file), Feeds::$file_feeds),)*)?
        )*];

        /// Keys that exist only in the file.
        pub(super) const FILE_ONLY: &[&str] = &[$($($(stringify!($file),)*)?)*];
    };
}

settings! {
    Model {
        /// Hugging Face directory, or a name on the hub: org/model(@revision).
        #[arg(value_name = "DIR|NAME")]
        model: PathBuf => "a small built-in model", Free, Inputs;
        /// Tensors to freeze: a regular expression for names in the model's files; repeatable.
        #[arg(value_name = "REGEX")]
        #[serde(deserialize_with = "one_or_many")]
        freeze: Vec<String> = Vec::new() => "none", Free, Inputs, unless "Vec::is_empty";
        /// Tensors to train, all others are frozen: a regular expression for names; repeatable.
        #[arg(value_name = "REGEX")]
        #[serde(deserialize_with = "one_or_many")]
        train_only: Vec<String> = Vec::new() => "all", Free, Inputs, unless "Vec::is_empty";
        /// Tokens whose rows alone of embedding and output matrix are trained.
        #[arg(value_name = "added|A..B")]
        #[serde(deserialize_with = "some_scalar")]
        train_tokens: TrainTokens => "none", Free, Inputs, unless "Option::is_none";
        /// Source of the initial weights.
        init: InitChoice = InitChoice::Random => "checkpoint with --model, else random", Free, Inputs;
    }

    Data {
        /// Files, directories, patterns, or hub names: org/data.
        #[arg(num_args = 1.., value_name = "PATH|NAME")]
        #[serde(deserialize_with = "one_or_many")]
        data: Vec<PathBuf> = Vec::new() => "the built-in text", Free, Inputs;
        /// Evaluation data: files, directories, patterns or hub names.
        #[arg(num_args = 1.., value_name = "PATH|NAME")]
        #[serde(deserialize_with = "one_or_many")]
        eval_data: Vec<PathBuf> = Vec::new() => "none", Free, Inputs;
        /// Fraction or number of the data's documents to hold out for evaluation.
        #[arg(value_name = "SHARE|N")]
        #[serde(deserialize_with = "some_scalar")]
        eval_split: EvalSplit => "none", Order, Recipe;
        /// Tokenizer: the model's tokenizer.json, or bytes.
        tokenizer: TokenizerChoice = TokenizerChoice::Auto, Tokens, Inputs;
        /// The token between documents, as text or id.
        #[arg(value_name = "TOKEN")]
        #[serde(deserialize_with = "some_scalar")]
        eos_token: String => "from the model's files", Tokens, Inputs;
        /// Begin each document with the begin-of-text token; auto follows the tokenizer.
        add_bos: AddBos = AddBos::Auto, Tokens, Inputs;
        /// Meaning of the columns of records; auto goes by their names.
        data_format: DataFormat = DataFormat::Auto, Tokens, Inputs;
        /// Column names of the data, as OURS=THEIRS, separated by commas.
        #[arg(value_name = "OURS=THEIRS", value_delimiter = ',')]
        #[serde(deserialize_with = "one_or_many")]
        columns: Vec<String> = Vec::new() => "none", Tokens, Inputs;
        /// Trained part of a record; auto: whole texts, completions, answers of chats.
        train_on: TrainOn = TrainOn::Auto, Tokens, Inputs;
        /// Chat template to use, a Jinja file.
        #[arg(value_name = "FILE")]
        chat_template: PathBuf => "the model's", Free, Inputs;
        /// Packing of rows: one stream of text, whole documents, or one document each.
        packing: Packing = Packing::Auto, Order, Recipe;
        /// Handling of documents longer than a row; auto splits text, truncates records.
        overlong: Overlong = Overlong::Auto, Order, Recipe, unless "is_auto";
        /// Largest number of tokens of an answer with its prompt, for --loss.
        #[arg(value_name = "N")]
        pair_length: usize => "half of a row", Order, Recipe, unless "Option::is_none";
        /// Name of the chat template, if the model has several.
        #[arg(value_name = "NAME")]
        chat_template_name: String => "the template named default", Tokens, Inputs;
        /// Variables of chat templates, as JSON: {"enable_thinking": false}.
        #[arg(value_name = "JSON")]
        #[serde(deserialize_with = "some_json")]
        chat_template_kwargs: String => "none", Tokens, Inputs;
        /// Date that chat templates receive.
        #[arg(value_name = "YYYY-MM-DD")]
        chat_date: String => "today, or the checkpoint's", Tokens, Inputs;
        /// Output directory for checkpoints and metrics.
        #[arg(value_name = "DIR")]
        output_dir: PathBuf = "runs/train".into(), Free, Run;
    }

    Method {
        flags gpus: usize = 1, Free, Site {
            /// GPUs that train together, in each process.
            #[arg(value_name = "N|all")]
            #[serde(deserialize_with = "some_scalar")]
            gpus: GpuCount => "1";
        }

        /// Sequence-parallel degree (Ulysses): GPUs that share each sequence.
        #[arg(value_name = "N")]
        sequence_ranks: usize = 1, Free, Recipe, unless "is_one";
        /// Device for the forward and backward passes.
        device: DeviceChoice = DeviceChoice::Auto, Free, Site;
        /// Set of offloading techniques.
        strategy: Strategy = Strategy::Superoffload, Free, Wanted;
        /// Method to undo a failed speculation.
        rollback: Rollback = Rollback::Deferred, Logged, Recipe;
        /// Loss of pairs of answers, sampled completions or a teacher.
        loss: ObjectiveKind => "none: the loss of tokens", Order, Recipe, unless "Option::is_none";
        /// Factor on log-ratios of pairs, or on divergences of completions.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        beta: f64 => "0.1 with pairs, else 0", Logged, Recipe, unless "Option::is_none";
        /// Factor on the chosen answer's cross-entropy, for --loss cpo and simpo.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        cpo_alpha: f64 => "1, 0 with simpo", Logged, Recipe, unless "Option::is_none";
        /// Range below 1 of ratios that count, for --loss dapo.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        epsilon: f64 => "0.2 with --loss", Logged, Recipe, unless "Option::is_none";
        /// Range above 1 of ratios that count, for --loss dapo.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        epsilon_high: f64 => "that of --epsilon", Logged, Recipe, unless "Option::is_none";
        /// Tokens by which --loss dr-grpo divides.
        #[arg(value_name = "N")]
        max_completion_length: usize => "512 with --loss", Logged, Recipe, unless "Option::is_none";
        /// Part of distillation in --loss distill, beside cross-entropy.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        kd_ratio: f64 => "1 with --loss distill", Logged, Recipe, unless "Option::is_none";
        /// Most tokens of a teacher for each token, for --loss distill.
        #[arg(value_name = "K")]
        loss_top_k: usize => "64 with --loss distill", Logged, Recipe, unless "Option::is_none";
        /// Model that is the reference of --loss: a directory, or a hub name.
        #[arg(value_name = "DIR|NAME")]
        reference: PathBuf => "the initial model", Free, Inputs, unless "Option::is_none";
        /// Probability that a label is wrong, for --loss robust.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        label_smoothing: f64 => "0 with --loss", Logged, Recipe, unless "Option::is_none";
        /// Margin of --loss simpo.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        simpo_gamma: f64 => "0.5 with --loss", Logged, Recipe, unless "Option::is_none";
        /// Format of weights and gradients on the device.
        dtype: TrainDtype = TrainDtype::Bfloat16, Logged, Recipe;
        /// Format of layers' matrix products; fp8 is faster and coarser.
        matmul_dtype: MatmulDtype => "that of --dtype", Free, Recipe;
        /// Format of AdamW's moments between steps.
        moments: Moments = Moments::Float32, Free, Recipe;
        /// Storage of master weights; split saves 2 bytes a parameter, without loss.
        masters: MastersChoice = MastersChoice::Auto, Free, Wanted;
    }

    Processes {
        /// Processes that train together.
        #[arg(value_name = "N")]
        processes: usize = 1 => "the launcher's, else 1", Free, Site, unless "is_one";
        /// Number of this process, from 0.
        #[arg(value_name = "N")]
        process: usize = 0 => "the launcher's, else 0", Free, Site, unless "is_first";
        /// Host and port of process 0, to which the other processes connect.
        #[arg(value_name = "HOST:PORT")]
        rendezvous: String => "the launcher's", Free, Site, unless "Option::is_none";
        /// Seconds that a process waits for the other processes at the start.
        #[arg(value_name = "SECONDS")]
        rendezvous_limit: u64 = 600, Free, Site;
        /// File with the secret of a run's processes.
        #[arg(value_name = "FILE")]
        run_token_file: PathBuf => "the variable SUPEROFFLOAD_RUN_TOKEN", Free, Site, unless "Option::is_none";
        /// Transport of gradients and weights between processes.
        transport: Transport = Transport::Auto, Free, Site, unless "is_open";
    }

    Schedule {
        flags train_length: TrainLength = TrainLength::Epochs(3.0), Logged, Recipe {
            /// Optimizer steps; wins over --num-train-epochs.
            #[arg(value_name = "N")]
            max_steps: u64 => "none";
            /// Passes over the data, fractions allowed.
            #[arg(value_name = "N", allow_hyphen_values = true)]
            num_train_epochs: f64 => "3";
        }

        /// Sequences of a micro-batch.
        #[arg(value_name = "N")]
        per_device_train_batch_size: usize = 8, Logged, Wanted;
        /// Tokens of an optimizer step, which the plan cuts into micro-batches.
        #[arg(value_name = "N")]
        tokens_per_step: usize => "none", Free, Recipe;
        /// Micro-batches of an optimizer step on each GPU.
        #[arg(value_name = "N")]
        gradient_accumulation_steps: usize => "one for each gradient share", Free, Wanted;
        /// Partial gradient sums of a step, added in float32.
        #[arg(value_name = "N")]
        gradient_shares: usize => "the GPUs, or the checkpoint's", Free, Recipe;
        /// Partial sums in a group; the sum of each group is rounded.
        #[arg(value_name = "N")]
        gradient_group: usize => "none, or the checkpoint's", Free, Recipe, unless "Option::is_none";
        /// Tokens of a sequence.
        #[arg(value_name = "N")]
        seq_length: usize = 1024, Order, Recipe;
        /// Peak learning rate.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        learning_rate: f64 = 5e-5, Logged, Recipe;
        /// Shape of the learning rate over the steps.
        lr_scheduler_type: LrScheduler = LrScheduler::Linear, Logged, Recipe;
        /// Steps of linear warm-up.
        #[arg(value_name = "N")]
        warmup_steps: u64 = 0, Logged, Recipe;
        /// Fraction of all steps for warm-up, rounded up, if --warmup-steps is 0.
        #[arg(value_name = "X")]
        #[serde(deserialize_with = "some_scalar")]
        warmup_ratio: f64 = 0.0, Logged, Recipe, unless "is_zero";
        /// Decoupled weight decay; norms and biases have none.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        weight_decay: f64 = 0.0, Logged, Recipe;
        /// Decay of Adam's first moment.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        adam_beta1: f64 = 0.9, Logged, Recipe;
        /// Decay of Adam's second moment.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        adam_beta2: f64 = 0.999, Logged, Recipe;
        /// Adam's epsilon.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        adam_epsilon: f64 = 1e-8, Logged, Recipe;
        /// Gradient norm above which gradients are clipped; 0 disables clipping.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        max_grad_norm: f64 = 1.0, Logged, Recipe;
        /// Coefficient of the load-balancing loss of routers; 0 disables it.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        router_aux_loss_coef: f64 = 0.0, Logged, Recipe, unless "is_zero";
        /// Seed of random weights and of the data order.
        #[arg(value_name = "N")]
        seed: u64 = 42, Order, Recipe;
    }

    Run {
        /// Steps between log lines.
        #[arg(value_name = "N")]
        logging_steps: u64 = 10, Free, Run;
        /// Loggers of steps besides metrics.jsonl, separated by commas.
        #[arg(value_name = "LOGGER", value_delimiter = ',')]
        #[serde(deserialize_with = "one_or_many")]
        report_to: Vec<ReportTo> = vec![ReportTo::Tensorboard], Free, Run;
        /// Schedule of evaluations.
        eval_strategy: EvalStrategy => "steps with --eval-data or --eval-split", Free, Run;
        /// Steps between evaluations.
        #[arg(value_name = "N")]
        eval_steps: u64 => "as --save-steps", Free, Run;
        /// Evaluate before the first step, too.
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        eval_on_start: bool = false, Free, Run;
        /// Prompts, one a line; the model continues each of them at every evaluation.
        #[arg(value_name = "FILE")]
        prompts: PathBuf => "none", Free, Run;
        /// Number of consecutive evaluations without a lower loss after which a run ends.
        #[arg(value_name = "N")]
        early_stopping_patience: u64 => "none", Free, Run;
        /// Smallest decrease of the loss that counts for --early-stopping-patience.
        #[arg(value_name = "X", allow_hyphen_values = true)]
        early_stopping_threshold: f64 = 0.0, Free, Run, unless "is_zero";
        /// Steps between checkpoints.
        #[arg(value_name = "N")]
        save_steps: u64 = 500, Free, Run;
        /// Number of newest checkpoints to keep, besides the one with the best evaluation.
        #[arg(value_name = "N")]
        save_total_limit: usize => "all", Free, Run;
        /// Host memory for saves beside steps; off: a save stops training.
        #[arg(value_name = "off|auto|SIZE")]
        #[serde(deserialize_with = "some_scalar")]
        save_memory: SaveMemory = SaveMemory::Auto, Free, Site;
        /// Let saves write at most this much in a second, for example 500MiB.
        #[arg(value_name = "SIZE")]
        #[serde(deserialize_with = "some_scalar")]
        save_rate: Bytes => "as fast as the disk", Free, Run;
        /// Consecutive steps with non-finite gradients after which a run ends; 0 is never.
        #[arg(value_name = "N")]
        max_skipped_steps: u64 = 100, Free, Run;
        /// Seconds without progress after which a run reports the cause and ends; 0 is never.
        #[arg(value_name = "SECONDS")]
        stall_limit: u64 = 300, Free, Run;
        /// Signals that save and end a run, separated by commas.
        #[arg(value_name = "SIGNAL", value_delimiter = ',', ignore_case = true)]
        #[serde(deserialize_with = "one_or_many")]
        stop_signals: Vec<StopSignal> = StopSignal::ALL.to_vec(), Free, Run, unless "are_all_signals";
        /// Checkpoint to continue from, `auto` for the newest good one.
        #[arg(value_name = "auto|DIR", value_parser = PathBufValueParser::new().map(Resume::from))]
        resume_from_checkpoint: Resume => "none", Free, Run;
        /// Show the data and the plan, then exit without training or writing files.
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        dry_run: bool = false, Free, Run;
        /// Parts of a run that may differ from the checkpoint, separated by commas.
        #[arg(value_name = "PART", value_delimiter = ',')]
        #[serde(deserialize_with = "one_or_many")]
        allow_changed: Vec<RunPart> = Vec::new() => "none", Free, Run;
    }

    Memory {
        /// Compute threads, and as many optimizer threads.
        #[arg(value_name = "N")]
        threads: usize => "one for each core", Free, Wanted;
        /// Size of a bucket in MiB of 16-bit parameters.
        #[arg(value_name = "X")]
        bucket_mib: f64 => "the plan decides", Free, Wanted;
        /// Order of layers and micro-batches; with segments fewer bytes cross the link.
        #[arg(value_name = "auto|whole|segments:LAYERS,TURN")]
        #[serde(deserialize_with = "some_scalar")]
        layer_order: LayerOrder = LayerOrder::Auto, Free, Wanted;
        /// Tail buckets with their optimizer states on the device.
        #[arg(value_name = "auto|all|N")]
        #[serde(deserialize_with = "some_scalar")]
        resident_buckets: ResidentBuckets = ResidentBuckets::Auto, Free, Wanted;
        /// Activations that layers keep for their backward pass.
        activations: ActivationsChoice = ActivationsChoice::Auto, Free, Wanted;
        /// Placement of layer weights: on the device, or streamed from host memory.
        weights: WeightsChoice = WeightsChoice::Auto, Free, Wanted;
        /// Replan during the run if steps differ from the plan's assumptions.
        replan: ReplanChoice = ReplanChoice::Auto, Free, Run, unless "is_replanned";
    }

    Machine {
        /// Hardware profile with the rates for a GPU's plan: auto, a name or a file.
        #[arg(value_name = "PROFILE|FILE")]
        hardware: PathBuf = selected_profile::AUTO.into(), Free, Site;
        /// Use no more GPU memory than this, for example 80GiB.
        #[arg(value_name = "SIZE")]
        #[serde(deserialize_with = "some_scalar")]
        hbm_limit: Bytes => "all free memory", Free, Site;
        /// Use no more host memory than this, for example 1.5TiB.
        #[arg(value_name = "SIZE")]
        #[serde(deserialize_with = "some_scalar")]
        host_limit: Bytes => "free memory, less a reserve", Free, Site;
        /// Host memory of offloaded states; unified needs a GPU.
        memory: HostMemoryKind = HostMemoryKind::Pinned, Free, Site;
        /// Page sizes of host memory.
        huge_pages: HugePagesChoice = HugePagesChoice::Auto, Free, Site;
        /// Implementation of attention on a GPU.
        attention: AttentionChoice = AttentionChoice::Auto, Free, Recipe;
        /// Implementation of expert matrix products on a GPU.
        expert_products: ExpertProductsChoice = ExpertProductsChoice::Auto, Free, Recipe;
        /// Rows that the head computes: output matrix and loss.
        head_rows: HeadRowsChoice = HeadRowsChoice::Auto, Free, Recipe;
        /// Format of the logits, from which losses and log-probabilities are computed.
        logits_dtype: LogitsDtypeChoice = LogitsDtypeChoice::Auto, Free, Recipe, unless "LogitsDtypeChoice::is_auto";
        /// Allow GPU kernels whose results may differ between runs in the last bit.
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        nondeterministic: bool = false, Free, Recipe;
        /// Directory to search first for NVIDIA's libraries.
        #[arg(value_name = "DIR")]
        cuda_libraries: PathBuf => "the system's search path", Free, Site;
    }

    // Settings for measuring, comparing and testing.
    Debug {
        /// Take the sequences in file order.
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        no_shuffle: bool = false, Order, Recipe;
        /// Write the timeline for Perfetto here, not to trace.json in the output directory.
        #[arg(value_name = "FILE")]
        trace: PathBuf => "none", Free, Run;
        /// Count cycles, cache misses and page faults of the optimizer's threads.
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        perf_counters: bool = false, Free, Run;
        /// Print a digest of the final state as the last line.
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        digest: bool = false, Free, Run;
        /// Instruction set of the CPU optimizer.
        isa: IsaChoice = IsaChoice::Auto, Free, Site;
        /// Partition of cache and bandwidth that the optimizer's threads join.
        #[arg(value_name = "auto|none|NAME", value_parser = StringValueParser::new().map(ResctrlGroup::from))]
        resctrl_group: ResctrlGroup = ResctrlGroup::Auto, Free, Site;
        /// Staging slots for gradients and as many for parameters.
        #[arg(value_name = "N")]
        slots: usize => "chosen with the plan", Free, Wanted;
        /// Techniques to turn off, separated by commas.
        #[arg(value_name = "TECHNIQUE", value_delimiter = ',')]
        #[serde(deserialize_with = "one_or_many")]
        without: Vec<Technique> = Vec::new() => "none", Free, Wanted;
        /// Side that converts gradients.
        cast: CastSide = CastSide::Auto, Free, Wanted;
        /// Step the rows of a tied embedding first that the batch does not use.
        early_rows: EarlyRows = EarlyRows::Auto, Free, Wanted;
        /// Seed of legal reorderings of events, to test the engine on --device cpu.
        #[arg(hide = true, value_name = "SEED")]
        adversary: u64 => "none", Free, Site;

        file {
            /// Values written into gradients, to test the engine; only in the file.
            inject: Vec<Injection> = Vec::new(), Free, Recipe;
            /// Faults of ranks, to test how a run ends; only in the file.
            faults: Vec<RankFault> = Vec::new(), Free, Site;
        }
    }
}

fn is_auto(overlong: &Overlong) -> bool {
    *overlong == Overlong::Auto
}

fn are_all_signals(signals: &[StopSignal]) -> bool {
    signals == StopSignal::ALL
}

fn is_replanned(replan: &ReplanChoice) -> bool {
    *replan == ReplanChoice::Auto
}

fn is_open(transport: &Transport) -> bool {
    *transport == Transport::Auto
}

fn is_one(count: &usize) -> bool {
    *count == 1
}

fn is_first(process: &usize) -> bool {
    *process == 0
}

fn is_zero(x: &f64) -> bool {
    *x == 0.0
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use clap::{Arg, Args, FromArgMatches};

    /// Every flag of `train` as clap knows it.
    pub(crate) fn flags() -> Vec<Arg> {
        TrainOptions::augment_args(clap::Command::new("train")).get_arguments().cloned().collect()
    }

    pub(crate) fn command_line(args: &[&str]) -> Result<TrainOptions, clap::Error> {
        let command = TrainOptions::augment_args(clap::Command::new("train"));
        let matches = command.try_get_matches_from(["train"].iter().chain(args))?;
        TrainOptions::from_arg_matches(&matches)
    }

    /// A flag's name and a value that is not its default.
    pub(crate) fn sample(flag: &Arg) -> (String, String) {
        let values: Vec<String> = flag.get_possible_values().iter().map(|value| value.get_name().to_string()).collect();
        let value = match values.last() {
            Some(last) if last == "false" => "true",
            Some(last) => last,
            None if flag.get_id() == "layer_order" => "segments:2,5",
            None if flag.get_id() == "train_tokens" => "2..5",
            None => "2",
        };
        (flag.get_long().unwrap().to_string(), value.to_string())
    }

    pub(crate) fn sample_options(flag: &Arg) -> TrainOptions {
        let (name, value) = sample(flag);
        command_line(&[&format!("--{name}={value}")]).unwrap()
    }

    #[test]
    fn every_flag_survives_merging_and_the_upper_one_wins() {
        for flag in flags() {
            let set = sample_options(&flag);
            assert_ne!(set, TrainOptions::default(), "{}", flag.get_id());
            assert_eq!(set.clone().over(TrainOptions::default()), set, "{}", flag.get_id());
            assert_eq!(TrainOptions::default().over(set.clone()), set, "{}", flag.get_id());
        }
        let inject = Some(vec![Injection { step: 1, element: 2, share: 0, value: 3.0 }]);
        let injected = TrainOptions { inject, ..Default::default() };
        assert_eq!(TrainOptions::default().over(injected.clone()), injected);
        let upper = command_line(&["--seed", "1", "--no-shuffle=false"]).unwrap();
        let lower = command_line(&["--seed", "2", "--no-shuffle", "--slots", "3"]).unwrap();
        let merged = upper.over(lower);
        assert_eq!((merged.seed, merged.no_shuffle, merged.slots), (Some(1), Some(false), Some(3)));
    }

    #[test]
    fn lists_and_words_parse() {
        let options = command_line(&["--data", "a", "b", "--without", "stv,mpam", "--resident-buckets", "auto"]).unwrap();
        assert_eq!(options.data, Some(vec!["a".into(), "b".into()]));
        assert_eq!(options.without, Some(vec![Technique::Stv, Technique::Mpam]));
        assert_eq!(options.resident_buckets, Some(ResidentBuckets::Auto));
        assert_eq!(command_line(&["--resident-buckets=all"]).unwrap().resident_buckets, Some(ResidentBuckets::All));
        let gpus = |given: &str| command_line(&[&format!("--gpus={given}")]).unwrap().gpus;
        assert_eq!((gpus("all"), gpus("4")), (Some(GpuCount::All), Some(GpuCount::Count(4))));
        assert!(command_line(&["--gpus=some"]).unwrap_err().to_string().contains("a number of GPUs or `all`"));
        assert_eq!(command_line(&["--hbm-limit=80GiB"]).unwrap().hbm_limit, Some(Bytes(80 << 30)));
        assert!(command_line(&["--host-limit=much"]).unwrap_err().to_string().contains("expected a size"));
        let resume = |word| command_line(&["--resume-from-checkpoint", word]).unwrap().resume_from_checkpoint;
        assert_eq!(resume("auto"), Some(Resume::Auto));
        assert_eq!(resume("./auto"), Some(Resume::Dir("./auto".into())));
        assert!(command_line(&["--resident-buckets", "many"]).unwrap_err().to_string().contains("number of buckets, `auto` or `all`"));
        assert_eq!(command_line(&["--learning-rate", "-1"]).unwrap().learning_rate, Some(-1.0));
    }

    #[test]
    fn every_flag_is_explained_in_one_short_sentence_with_its_default() {
        for flag in flags() {
            let help = flag.get_help().unwrap().to_string();
            assert!(help.ends_with(']') && help.contains(" [default: "), "{}: {help}", flag.get_id());
            assert!(help.chars().count() <= 100 && !help.contains(". "), "{}: {help}", flag.get_id());
        }
    }
}
