//! The flags of `train`: one definition of each feeds the parser, the help text and the configuration file's keys.
//!
//! Every field is optional, so that a flag overrides the file and the file overrides the default (see
//! [`crate::config::settings`]). A key in the file is the flag's name; other spellings are in [`crate::config::aliases`].

use crate::data::tokenizer::AddBos;
use crate::host::memory_policy::HugePagesChoice;
use crate::host::resctrl_group::ResctrlGroup;
use crate::model::policy::LayerPolicy;
use crate::optim::schedule::LrScheduler;
use crate::units::Bytes;
use clap::ValueEnum;
use clap::builder::{PathBufValueParser, StringValueParser, TypedValueParser};
use serde::de::value::StrDeserializer;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::str::FromStr;

/// Where the first parameters come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Init {
    /// Seeded random values; only `config.json` is read.
    Random,
    /// The model directory's safetensors.
    Checkpoint,
}

/// What turns text into tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TokenizerChoice {
    /// The model's `tokenizer.json`; bytes for a model of 256 ids that has none.
    Auto,
    /// Bytes.
    Bytes,
}

/// Which machine computes forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceChoice {
    /// The GPU if this build and this machine have one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// Which set of techniques runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Speculate, validate, commit: the optimizer on the CPU runs under backward and forward.
    Superoffload,
    /// Validate first, then step on the CPU, then copy back.
    ZeroOffload,
    /// Every state stays on the device.
    NoOffload,
}

/// How a speculation that failed is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rollback {
    /// Nothing is undone: the state is written only once the verdict is known. Exact.
    Deferred,
    /// The step is written at once and inverted by algebra, as in the paper. Loses bits.
    Inverse,
}

/// Format of weights, activations and gradients on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrainDtype {
    /// 16 bits, the exponent of float32.
    Bfloat16,
    /// 16 bits, trained with dynamic loss scaling.
    Float16,
    /// 32 bits.
    Float32,
}

/// Instruction set of the CPU optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IsaChoice {
    /// The widest one that this CPU has.
    Auto,
    /// The scalar specification.
    Scalar,
    /// 256-bit vectors.
    Avx2,
    /// 512-bit vectors.
    Avx512,
    /// Arm's 128-bit vectors.
    Neon,
    /// Arm's vectors of any length.
    Sve2,
}

/// Which side converts gradients between formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CastSide {
    /// The plan decides from the measured bandwidths.
    Auto,
    /// The device casts and float32 crosses the link.
    Device,
    /// The 16-bit format crosses the link and the host casts.
    Host,
}

/// What a layer keeps of its forward pass for its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActivationsChoice {
    /// The plan decides, layer by layer, from the device's memory.
    Auto,
    /// Every layer keeps everything.
    Keep,
    /// Every layer computes norms and the MLP's activation again: little memory traffic, no matrix product.
    RecomputeCheap,
    /// Every layer keeps only its input and runs its forward pass again.
    RecomputeBlock,
    /// Every layer keeps only its input, in host memory.
    Host,
}

impl ActivationsChoice {
    /// The policy of every layer; `None` when the plan decides.
    pub fn policy(self) -> Option<LayerPolicy> {
        match self {
            Self::Auto => None,
            Self::Keep => Some(LayerPolicy::Keep),
            Self::RecomputeCheap => Some(LayerPolicy::RecomputeCheap),
            Self::RecomputeBlock => Some(LayerPolicy::RecomputeBlock),
            Self::Host => Some(LayerPolicy::Host),
        }
    }
}

/// Where layers' weights lie while steps run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightsChoice {
    /// On the device, unless only streaming makes the model fit.
    Auto,
    /// On the device.
    Stationary,
    /// In host memory, from which they come layer by layer, forward and backward.
    Flow,
}

/// Who computes attention on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionChoice {
    /// cuDNN for 16-bit formats, the engine's own kernel for float32.
    Auto,
    /// NVIDIA's fused kernels.
    Cudnn,
    /// The engine's own kernel.
    Plain,
}

/// Kind of host memory that holds the offloaded states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostMemoryKind {
    /// Locked pages, copied explicitly.
    Pinned,
    /// One address on both sides, and every optimizer on the GPU: CUDA managed memory, or the system's where the GPU shares its
    /// page tables.
    Unified,
}

/// A technique that can be turned off at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Technique {
    /// Speculation, then validation.
    Stv,
    /// Earliest deadline first on the optimizer pool.
    DeadlineOrder,
    /// Resident tail buckets.
    Repartition,
    /// Casts on the device.
    SuperchipCast,
    /// Vector CPU Adam.
    GraceAdam,
    /// Cache and bandwidth partitions, core affinity.
    Mpam,
    /// Weights that stream layer by layer.
    WeightFlow,
    /// Speculation pauses while clips are frequent.
    Adaptive,
}

/// Which checkpoint training continues from.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", from = "PathBuf")]
pub enum Resume {
    /// The newest good one in the output directory; a fresh start when there is none.
    Auto,
    /// This one.
    Dir(PathBuf),
}

impl From<PathBuf> for Resume {
    fn from(path: PathBuf) -> Self {
        if path.as_os_str() == "auto" { Self::Auto } else { Self::Dir(path) }
    }
}

/// A part of a run without which a checkpoint means something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunPart {
    /// What of the model's configuration changes arithmetic.
    Model,
    /// How text becomes tokens.
    Tokenizer,
    /// What the data files hold, in order.
    Data,
}

impl RunPart {
    /// All, in the order of messages.
    pub const ALL: [Self; 3] = [Self::Model, Self::Tokenizer, Self::Data];

    /// As the flag spells it, and as checkpoints do.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Tokenizer => "tokenizer",
            Self::Data => "data",
        }
    }
}

/// How many tail buckets keep their optimizer state on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResidentBuckets {
    /// The plan decides.
    Auto,
    /// Every bucket: nothing is offloaded.
    All,
    /// This many.
    Count(usize),
}

impl fmt::Display for ResidentBuckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::All => f.write_str("all"),
            Self::Count(count) => write!(f, "{count}"),
        }
    }
}

impl FromStr for ResidentBuckets {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "all" => Ok(Self::All),
            number => number.parse().map(Self::Count).map_err(|_| "expected a number of buckets, `auto` or `all`".to_string()),
        }
    }
}

/// A value written into the gradient, to test what a step does with it.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Injection {
    /// The training step, counted from 1; skipped steps count.
    pub step: u64,
    /// Index into the flat gradient.
    pub element: usize,
    /// What is written: a number, `nan`, `inf` or `-inf`. Serialised as text, because JSON has no NaN.
    #[serde(deserialize_with = "scalar", serialize_with = "as_text")]
    pub value: f32,
}

/// Everything that `train` can be told, as it was written; `None` means not said.
#[derive(clap::Args, serde::Deserialize, Default, Clone, Debug, PartialEq)]
#[command(about = "Train a language model with the optimizer on the CPU", long_about = None, allow_negative_numbers = true)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct TrainOptions {
    /// TOML file whose keys are these flags; flags win [default: none].
    #[arg(long, value_name = "FILE.toml")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Hugging Face model directory [default: a small built-in model].
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// Where the first weights come from [default: checkpoint with --model, else random].
    #[arg(long)]
    pub init: Option<Init>,

    /// Files or directories of .txt, .jsonl and .bin [default: the text that ships with the program].
    #[arg(long, num_args = 1.., value_name = "PATH")]
    #[serde(deserialize_with = "one_or_many")]
    pub data: Option<Vec<PathBuf>>,

    /// What turns text into tokens: the model's tokenizer.json, or bytes [default: auto].
    #[arg(long)]
    pub tokenizer: Option<TokenizerChoice>,

    /// The token between documents, as text or id [default: the one that the model's files name].
    #[arg(long, value_name = "TOKEN")]
    #[serde(deserialize_with = "some_scalar")]
    pub eos_token: Option<String>,

    /// Begin each document with a token; auto is as the tokenizer does [default: auto].
    #[arg(long)]
    pub add_bos: Option<AddBos>,

    /// Where checkpoints and metrics go [default: runs/train].
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,

    /// Machine that runs forward and backward [default: auto].
    #[arg(long)]
    pub device: Option<DeviceChoice>,

    /// Set of offloading techniques [default: superoffload].
    #[arg(long)]
    pub strategy: Option<Strategy>,

    /// How a failed speculation is undone [default: deferred].
    #[arg(long)]
    pub rollback: Option<Rollback>,

    /// Format of weights and gradients on the device [default: bfloat16].
    #[arg(long)]
    pub dtype: Option<TrainDtype>,

    /// Optimizer steps; wins over --num-train-epochs [default: none].
    #[arg(long, value_name = "N")]
    pub max_steps: Option<u64>,

    /// Passes over the data, fractions allowed [default: 3].
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub num_train_epochs: Option<f64>,

    /// Sequences of a micro-batch [default: 8].
    #[arg(long, value_name = "N")]
    pub per_device_train_batch_size: Option<usize>,

    /// Micro-batches of an optimizer step [default: 1].
    #[arg(long, value_name = "N")]
    pub gradient_accumulation_steps: Option<usize>,

    /// Tokens of a sequence [default: 1024].
    #[arg(long, value_name = "N")]
    pub seq_length: Option<usize>,

    /// Peak learning rate [default: 5e-5].
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub learning_rate: Option<f64>,

    /// Shape of the learning rate over the steps [default: linear].
    #[arg(long)]
    pub lr_scheduler_type: Option<LrScheduler>,

    /// Steps of linear warm-up [default: 0].
    #[arg(long, value_name = "N")]
    pub warmup_steps: Option<u64>,

    /// Share of all steps that warms up, rounded up, where --warmup-steps is 0 [default: 0].
    #[arg(long, value_name = "X")]
    #[serde(deserialize_with = "some_scalar")]
    pub warmup_ratio: Option<f64>,

    /// Decoupled weight decay; norms and biases have none [default: 0].
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub weight_decay: Option<f64>,

    /// Decay of Adam's first moment [default: 0.9].
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub adam_beta1: Option<f64>,

    /// Decay of Adam's second moment [default: 0.999].
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub adam_beta2: Option<f64>,

    /// Adam's epsilon [default: 1e-8].
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub adam_epsilon: Option<f64>,

    /// Gradient norm above which gradients are clipped; 0 is never [default: 1].
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub max_grad_norm: Option<f64>,

    /// Seed of random weights and of the data order [default: 42].
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Steps between log lines [default: 10].
    #[arg(long, value_name = "N")]
    pub logging_steps: Option<u64>,

    /// Steps between checkpoints [default: 500].
    #[arg(long, value_name = "N")]
    pub save_steps: Option<u64>,

    /// Checkpoints kept, the newest ones [default: all].
    #[arg(long, value_name = "N")]
    pub save_total_limit: Option<usize>,

    /// Steps in a row with gradients that are not finite after which a run ends; 0 is never [default: 100].
    #[arg(long, value_name = "N")]
    pub max_skipped_steps: Option<u64>,

    /// Seconds without progress after which a run tells why and ends; 0 is never [default: 300].
    #[arg(long, value_name = "SECONDS")]
    pub stall_limit: Option<u64>,

    /// Checkpoint to continue from, `auto` for the newest good one [default: none].
    #[arg(long, value_name = "auto|DIR", value_parser = PathBufValueParser::new().map(Resume::from))]
    pub resume_from_checkpoint: Option<Resume>,

    /// Parts that may differ from the checkpoint's, separated by commas [default: none].
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    #[serde(deserialize_with = "one_or_many")]
    pub allow_changed: Option<Vec<RunPart>>,

    /// Compute threads, and as many optimizer threads [default: one for each core].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Size of a bucket in MiB of 16-bit parameters [default: the plan decides].
    #[arg(long, value_name = "X")]
    pub bucket_mib: Option<f64>,

    /// Tail buckets whose optimizer stays on the device [default: auto].
    #[arg(long, value_name = "auto|all|N")]
    #[serde(deserialize_with = "some_scalar")]
    pub resident_buckets: Option<ResidentBuckets>,

    /// What layers keep for their backward pass [default: auto].
    #[arg(long)]
    pub activations: Option<ActivationsChoice>,

    /// Where layers' weights lie: on the device, or streamed from host memory [default: auto].
    #[arg(long)]
    pub weights: Option<WeightsChoice>,

    /// Machine whose rates a GPU's plan rests on: auto, a profile's name or file [default: auto].
    #[arg(long, value_name = "PROFILE|FILE")]
    pub hardware: Option<PathBuf>,

    /// Use no more GPU memory than this, for example 80GiB [default: all that is free].
    #[arg(long, value_name = "SIZE")]
    #[serde(deserialize_with = "some_scalar")]
    pub hbm_limit: Option<Bytes>,

    /// Use no more host memory than this, for example 1.5TiB [default: all that is free].
    #[arg(long, value_name = "SIZE")]
    #[serde(deserialize_with = "some_scalar")]
    pub host_limit: Option<Bytes>,

    /// Host memory of offloaded states; unified needs a GPU [default: pinned].
    #[arg(long)]
    pub memory: Option<HostMemoryKind>,

    /// Page sizes of host memory [default: auto].
    #[arg(long)]
    pub huge_pages: Option<HugePagesChoice>,

    /// Who computes attention on a GPU [default: auto].
    #[arg(long)]
    pub attention: Option<AttentionChoice>,

    /// Allow GPU kernels whose results may differ between runs in the last bit [default: false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub nondeterministic: Option<bool>,

    /// Look for NVIDIA's libraries here first [default: where the system looks].
    #[arg(long, value_name = "DIR")]
    pub cuda_libraries: Option<PathBuf>,

    /// Take the sequences in file order [default: false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub no_shuffle: Option<bool>,

    /// Write the timeline for Perfetto here, not to trace.json in the output directory [default: none].
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Count cycles, cache misses and page faults of the optimizer's threads [default: false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub perf_counters: Option<bool>,

    /// Print a digest of the final state as the last line [default: false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub digest: Option<bool>,

    /// Instruction set of the CPU optimizer [default: auto].
    #[arg(long)]
    pub isa: Option<IsaChoice>,

    /// Partition of cache and bandwidth that the optimizer's threads join [default: auto].
    #[arg(long, value_name = "auto|none|NAME", value_parser = StringValueParser::new().map(ResctrlGroup::from))]
    pub resctrl_group: Option<ResctrlGroup>,

    /// Staging slots for gradients and as many for parameters [default: chosen with the plan].
    #[arg(long, value_name = "N")]
    pub slots: Option<usize>,

    /// Techniques to turn off, separated by commas [default: none].
    #[arg(long, value_name = "TECHNIQUE", value_delimiter = ',')]
    #[serde(deserialize_with = "one_or_many")]
    pub without: Option<Vec<Technique>>,

    /// Side that converts gradients [default: auto].
    #[arg(long)]
    pub cast: Option<CastSide>,

    /// Seed of legal reorderings of events, to test the engine on --device cpu [default: none].
    #[arg(long, hide = true, value_name = "SEED")]
    pub adversary: Option<u64>,

    /// Values written into gradients, to test the engine; only in the file.
    #[arg(skip)]
    pub inject: Option<Vec<Injection>>,

    /// Lines for people: keys of the file that mean nothing here, and why.
    #[arg(skip)]
    #[serde(skip)]
    pub ignored: Vec<String>,
}

impl TrainOptions {
    /// These options, and those of `lower` where these say nothing.
    pub fn over(self, lower: Self) -> Self {
        Self {
            config: self.config.or(lower.config),
            model: self.model.or(lower.model),
            init: self.init.or(lower.init),
            data: self.data.or(lower.data),
            tokenizer: self.tokenizer.or(lower.tokenizer),
            eos_token: self.eos_token.or(lower.eos_token),
            add_bos: self.add_bos.or(lower.add_bos),
            output_dir: self.output_dir.or(lower.output_dir),
            device: self.device.or(lower.device),
            strategy: self.strategy.or(lower.strategy),
            rollback: self.rollback.or(lower.rollback),
            dtype: self.dtype.or(lower.dtype),
            max_steps: self.max_steps.or(lower.max_steps),
            num_train_epochs: self.num_train_epochs.or(lower.num_train_epochs),
            per_device_train_batch_size: self.per_device_train_batch_size.or(lower.per_device_train_batch_size),
            gradient_accumulation_steps: self.gradient_accumulation_steps.or(lower.gradient_accumulation_steps),
            seq_length: self.seq_length.or(lower.seq_length),
            learning_rate: self.learning_rate.or(lower.learning_rate),
            lr_scheduler_type: self.lr_scheduler_type.or(lower.lr_scheduler_type),
            warmup_steps: self.warmup_steps.or(lower.warmup_steps),
            warmup_ratio: self.warmup_ratio.or(lower.warmup_ratio),
            weight_decay: self.weight_decay.or(lower.weight_decay),
            adam_beta1: self.adam_beta1.or(lower.adam_beta1),
            adam_beta2: self.adam_beta2.or(lower.adam_beta2),
            adam_epsilon: self.adam_epsilon.or(lower.adam_epsilon),
            max_grad_norm: self.max_grad_norm.or(lower.max_grad_norm),
            seed: self.seed.or(lower.seed),
            logging_steps: self.logging_steps.or(lower.logging_steps),
            save_steps: self.save_steps.or(lower.save_steps),
            save_total_limit: self.save_total_limit.or(lower.save_total_limit),
            max_skipped_steps: self.max_skipped_steps.or(lower.max_skipped_steps),
            stall_limit: self.stall_limit.or(lower.stall_limit),
            resume_from_checkpoint: self.resume_from_checkpoint.or(lower.resume_from_checkpoint),
            allow_changed: self.allow_changed.or(lower.allow_changed),
            threads: self.threads.or(lower.threads),
            bucket_mib: self.bucket_mib.or(lower.bucket_mib),
            resident_buckets: self.resident_buckets.or(lower.resident_buckets),
            activations: self.activations.or(lower.activations),
            weights: self.weights.or(lower.weights),
            hardware: self.hardware.or(lower.hardware),
            hbm_limit: self.hbm_limit.or(lower.hbm_limit),
            host_limit: self.host_limit.or(lower.host_limit),
            memory: self.memory.or(lower.memory),
            huge_pages: self.huge_pages.or(lower.huge_pages),
            attention: self.attention.or(lower.attention),
            nondeterministic: self.nondeterministic.or(lower.nondeterministic),
            cuda_libraries: self.cuda_libraries.or(lower.cuda_libraries),
            no_shuffle: self.no_shuffle.or(lower.no_shuffle),
            trace: self.trace.or(lower.trace),
            perf_counters: self.perf_counters.or(lower.perf_counters),
            digest: self.digest.or(lower.digest),
            isa: self.isa.or(lower.isa),
            resctrl_group: self.resctrl_group.or(lower.resctrl_group),
            slots: self.slots.or(lower.slots),
            without: self.without.or(lower.without),
            cast: self.cast.or(lower.cast),
            adversary: self.adversary.or(lower.adversary),
            inject: self.inject.or(lower.inject),
            ignored: [self.ignored, lower.ignored].concat(),
        }
    }
}

/// Reads a number, a word or a boolean as the command line would: through `FromStr`.
fn scalar<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(deserializer: D) -> Result<T, D::Error> {
    struct Text;
    impl Visitor<'_> for Text {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number or a word")
        }
        fn visit_str<E>(self, text: &str) -> Result<String, E> {
            Ok(text.to_string())
        }
        fn visit_i64<E>(self, number: i64) -> Result<String, E> {
            Ok(number.to_string())
        }
        fn visit_u64<E>(self, number: u64) -> Result<String, E> {
            Ok(number.to_string())
        }
        fn visit_f64<E>(self, number: f64) -> Result<String, E> {
            Ok(number.to_string())
        }
    }
    let text = deserializer.deserialize_any(Text)?;
    text.parse().map_err(|cause| de::Error::custom(format!("`{text}`: {cause}")))
}

fn some_scalar<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(deserializer: D) -> Result<Option<T>, D::Error> {
    scalar(deserializer).map(Some)
}

fn as_text<S: serde::Serializer>(value: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// Reads a list, or one string as a list of one.
fn one_or_many<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<Vec<T>>, D::Error> {
    struct List<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string or a list of strings")
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<T>, E> {
            T::deserialize(StrDeserializer::new(text)).map(|one| vec![one])
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut all = Vec::new();
            while let Some(one) = list.next_element()? {
                all.push(one);
            }
            Ok(all)
        }
    }
    deserializer.deserialize_any(List(PhantomData)).map(Some)
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
        let inject = Some(vec![Injection { step: 1, element: 2, value: 3.0 }]);
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
