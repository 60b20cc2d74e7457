//! The options, resolved: every default applied, every value checked.

use crate::config::options::{
    ActivationsChoice, AttentionChoice, CastSide, DeviceChoice, HostMemoryKind, Init, Injection, IsaChoice, ResidentBuckets, Resume,
    Rollback, RunPart, Strategy, Technique, TokenizerChoice, TrainDtype, TrainOptions, WeightsChoice,
};
use crate::data::tokenizer::AddBos;
use crate::error::{Error, Result};
use crate::hardware::basis;
use crate::host::memory_policy::HugePagesChoice;
use crate::host::resctrl_group::ResctrlGroup;
use crate::optim::schedule::LrScheduler;
use crate::units::{Bytes, compact};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// How long training lasts.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrainLength {
    /// This many optimizer steps.
    Steps(u64),
    /// This many passes over the data.
    Epochs(f64),
}

/// What `train` does. Fields are named like the flags; see [`TrainOptions`] for their meaning.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Settings {
    /// Model directory; `None` is the built-in model.
    pub model: Option<PathBuf>,
    /// Where the first weights come from.
    pub init: Init,
    /// Data files and directories; none is the text that ships with the program.
    pub data: Vec<PathBuf>,
    /// What turns text into tokens.
    pub tokenizer: TokenizerChoice,
    /// The token between documents, as text or id; `None` is the one that the model's files name.
    pub eos_token: Option<String>,
    /// Whether each document begins with a token of its own.
    pub add_bos: AddBos,
    /// Where checkpoints and metrics go.
    pub output_dir: PathBuf,
    /// Machine that runs forward and backward.
    pub device: DeviceChoice,
    /// Set of offloading techniques.
    pub strategy: Strategy,
    /// How a failed speculation is undone.
    pub rollback: Rollback,
    /// Format of weights and gradients on the device.
    pub dtype: TrainDtype,
    /// `--max-steps` or `--num-train-epochs`.
    pub train_length: TrainLength,
    /// Sequences of a micro-batch, at least 1.
    pub per_device_train_batch_size: usize,
    /// Micro-batches of an optimizer step, at least 1.
    pub gradient_accumulation_steps: usize,
    /// Tokens of a sequence, at least 1.
    pub seq_length: usize,
    /// Peak learning rate: at least 0, at most 10.
    pub learning_rate: f64,
    /// Shape of the learning rate over the steps.
    pub lr_scheduler_type: LrScheduler,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// Share of all steps that warms up where `warmup_steps` is 0: in [0, 1].
    #[serde(skip_serializing_if = "is_zero")]
    pub warmup_ratio: f64,
    /// Decoupled weight decay: at least 0, times the learning rate below 1.
    pub weight_decay: f64,
    /// In [0, 1).
    pub adam_beta1: f64,
    /// In [0, 1).
    pub adam_beta2: f64,
    /// Above 0 in float32, at most 1.
    pub adam_epsilon: f64,
    /// Finite, at least 0; 0 never clips.
    pub max_grad_norm: f64,
    /// Seed of random weights and of the data order.
    pub seed: u64,
    /// Steps between log lines, at least 1.
    pub logging_steps: u64,
    /// Steps between checkpoints, at least 1.
    pub save_steps: u64,
    /// Checkpoints kept, at least 1; `None` keeps all.
    pub save_total_limit: Option<usize>,
    /// Skipped steps in a row that end a run; 0: none do.
    pub max_skipped_steps: u64,
    /// Seconds without progress inside a step that end a run; 0: none do.
    pub stall_limit: u64,
    /// Checkpoint to continue from; `None` starts afresh.
    pub resume_from_checkpoint: Option<Resume>,
    /// Parts that may differ from the checkpoint's, sorted, each once.
    pub allow_changed: Vec<RunPart>,
    /// Optimizer threads; `None` is one for each core.
    pub threads: Option<usize>,
    /// Size of a bucket in MiB; `None` lets the plan decide.
    pub bucket_mib: Option<f64>,
    /// Tail buckets whose optimizer stays on the device.
    pub resident_buckets: ResidentBuckets,
    /// What layers keep for their backward pass.
    pub activations: ActivationsChoice,
    /// Where layers' weights lie while steps run.
    pub weights: WeightsChoice,
    /// Profile whose rates a GPU's plan rests on; `auto`: as [`basis::Basis::of`] finds it.
    pub hardware: PathBuf,
    /// GPU memory that may be used, at least 1 byte; `None` is all that is free.
    pub hbm_limit: Option<Bytes>,
    /// Host memory that may be used, at least 1 byte; `None` is all that is free.
    pub host_limit: Option<Bytes>,
    /// Host memory of offloaded states.
    pub memory: HostMemoryKind,
    /// Page sizes of host memory.
    pub huge_pages: HugePagesChoice,
    /// Who computes attention on a GPU.
    pub attention: AttentionChoice,
    /// GPU kernels may give results that differ between runs in the last bit.
    pub nondeterministic: bool,
    /// Where NVIDIA's libraries are looked for first.
    pub cuda_libraries: Option<PathBuf>,
    /// Sequences come in file order.
    pub no_shuffle: bool,
    /// Where the timeline is written; `None` writes none.
    pub trace: Option<PathBuf>,
    /// The optimizer's threads are counted.
    pub perf_counters: bool,
    /// The digest of the final state is the last line.
    pub digest: bool,
    /// Instruction set of the CPU optimizer.
    pub isa: IsaChoice,
    /// Resctrl group that the optimizer's threads join.
    pub resctrl_group: ResctrlGroup,
    /// Staging slots for gradients and as many for parameters, at least 1; none: the plan decides.
    pub slots: Option<usize>,
    /// Techniques turned off, sorted, each once.
    pub without: Vec<Technique>,
    /// Side that converts gradients.
    pub cast: CastSide,
    /// Seed of reorderings; `None` completes events in order.
    pub adversary: Option<u64>,
    /// Values written into gradients.
    pub inject: Vec<Injection>,
    /// Host memory that the data takes while steps run, once its files are known: see [`crate::data::source::host_bytes`].
    #[serde(skip)]
    pub data_bytes: u64,
    /// Whether rows of the data hold several documents, which attention then keeps apart.
    #[serde(skip)]
    pub separates_documents: bool,
}

impl Default for Settings {
    /// The defaults of Hugging Face's `TrainingArguments` where they have the argument.
    fn default() -> Self {
        Self {
            model: None,
            init: Init::Random,
            data: Vec::new(),
            tokenizer: TokenizerChoice::Auto,
            eos_token: None,
            add_bos: AddBos::Auto,
            output_dir: "runs/train".into(),
            device: DeviceChoice::Auto,
            strategy: Strategy::Superoffload,
            rollback: Rollback::Deferred,
            dtype: TrainDtype::Bfloat16,
            train_length: TrainLength::Epochs(3.0),
            per_device_train_batch_size: 8,
            gradient_accumulation_steps: 1,
            seq_length: 1024,
            learning_rate: 5e-5,
            lr_scheduler_type: LrScheduler::Linear,
            warmup_steps: 0,
            warmup_ratio: 0.0,
            weight_decay: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            max_grad_norm: 1.0,
            seed: 42,
            logging_steps: 10,
            save_steps: 500,
            save_total_limit: None,
            max_skipped_steps: 100,
            stall_limit: 300,
            resume_from_checkpoint: None,
            allow_changed: Vec::new(),
            threads: None,
            bucket_mib: None,
            resident_buckets: ResidentBuckets::Auto,
            activations: ActivationsChoice::Auto,
            weights: WeightsChoice::Auto,
            hardware: basis::AUTO.into(),
            hbm_limit: None,
            host_limit: None,
            memory: HostMemoryKind::Pinned,
            huge_pages: HugePagesChoice::Auto,
            attention: AttentionChoice::Auto,
            nondeterministic: false,
            cuda_libraries: None,
            no_shuffle: false,
            trace: None,
            perf_counters: false,
            digest: false,
            isa: IsaChoice::Auto,
            resctrl_group: ResctrlGroup::Auto,
            slots: None,
            without: Vec::new(),
            cast: CastSide::Auto,
            adversary: None,
            inject: Vec::new(),
            data_bytes: 0,
            separates_documents: false,
        }
    }
}

/// The flags of [`Settings::demo`], for the help text.
pub const DEMO_FLAGS: &str = "--output-dir runs/demo --max-steps 300 --seq-length 256 --learning-rate 3e-3 --lr-scheduler-type cosine \
    --warmup-steps 10 --weight-decay 0.1 --adam-beta2 0.95 --save-steps 150";

impl Settings {
    /// What runs when neither a model nor data is given: a small model learns the shipped text in a minute or two.
    pub fn demo() -> Self {
        Self {
            output_dir: "runs/demo".into(),
            train_length: TrainLength::Steps(300),
            seq_length: 256,
            learning_rate: 3e-3,
            lr_scheduler_type: LrScheduler::Cosine,
            warmup_steps: 10,
            weight_decay: 0.1,
            adam_beta2: 0.95,
            save_steps: 150,
            ..Self::default()
        }
    }

    /// Fills what `options` leave open from the defaults (from [`Settings::demo`] when neither model nor data is given)
    /// and checks everything.
    ///
    /// # Errors
    /// `Usage` that names flag, value and what is allowed; a model without data.
    pub fn resolve(options: TrainOptions) -> Result<Self> {
        let is_demo = options.model.is_none() && options.data.is_none();
        if options.model.is_some() && options.data.is_none() {
            return Err(Error::usage(
                "--model: --data is missing; name the text to train on (only the built-in model has text of its own)",
            ));
        }
        require(options.data.as_ref().is_none_or(|data| !data.is_empty()), "data", "[]", "name at least one file or directory")?;
        Self::resolve_over(if is_demo { Self::demo() } else { Self::default() }, options)
    }

    /// As [`Settings::resolve`], with the defaults of `base`.
    ///
    /// # Errors
    /// `Usage` that names flag, value and what is allowed.
    pub fn resolve_over(base: Self, options: TrainOptions) -> Result<Self> {
        let settings = base.overridden_by(options);
        settings.check_paths()?;
        settings.check_counts()?;
        settings.check_numbers()?;
        settings.check_combinations()?;
        Ok(settings)
    }

    fn overridden_by(self, options: TrainOptions) -> Self {
        let mut without = options.without.unwrap_or(self.without);
        without.sort_unstable();
        without.dedup();
        let mut allow_changed = options.allow_changed.unwrap_or(self.allow_changed);
        allow_changed.sort_unstable();
        allow_changed.dedup();
        Self {
            init: options.init.unwrap_or(if options.model.is_some() { Init::Checkpoint } else { self.init }),
            model: options.model.or(self.model),
            data: options.data.unwrap_or(self.data),
            tokenizer: options.tokenizer.unwrap_or(self.tokenizer),
            eos_token: options.eos_token.or(self.eos_token),
            add_bos: options.add_bos.unwrap_or(self.add_bos),
            output_dir: options.output_dir.unwrap_or(self.output_dir),
            device: options.device.unwrap_or(self.device),
            strategy: options.strategy.unwrap_or(self.strategy),
            rollback: options.rollback.unwrap_or(self.rollback),
            dtype: options.dtype.unwrap_or(self.dtype),
            train_length: train_length(options.max_steps, options.num_train_epochs).unwrap_or(self.train_length),
            per_device_train_batch_size: options.per_device_train_batch_size.unwrap_or(self.per_device_train_batch_size),
            gradient_accumulation_steps: options.gradient_accumulation_steps.unwrap_or(self.gradient_accumulation_steps),
            seq_length: options.seq_length.unwrap_or(self.seq_length),
            learning_rate: options.learning_rate.unwrap_or(self.learning_rate),
            lr_scheduler_type: options.lr_scheduler_type.unwrap_or(self.lr_scheduler_type),
            // A ratio that somebody asked for wins over steps that nobody asked for.
            warmup_steps: options.warmup_steps.unwrap_or(if options.warmup_ratio.is_some() { 0 } else { self.warmup_steps }),
            warmup_ratio: options.warmup_ratio.unwrap_or(self.warmup_ratio),
            weight_decay: options.weight_decay.unwrap_or(self.weight_decay),
            adam_beta1: options.adam_beta1.unwrap_or(self.adam_beta1),
            adam_beta2: options.adam_beta2.unwrap_or(self.adam_beta2),
            adam_epsilon: options.adam_epsilon.unwrap_or(self.adam_epsilon),
            max_grad_norm: options.max_grad_norm.unwrap_or(self.max_grad_norm),
            seed: options.seed.unwrap_or(self.seed),
            logging_steps: options.logging_steps.unwrap_or(self.logging_steps),
            save_steps: options.save_steps.unwrap_or(self.save_steps),
            save_total_limit: options.save_total_limit.or(self.save_total_limit),
            max_skipped_steps: options.max_skipped_steps.unwrap_or(self.max_skipped_steps),
            stall_limit: options.stall_limit.unwrap_or(self.stall_limit),
            resume_from_checkpoint: options.resume_from_checkpoint.or(self.resume_from_checkpoint),
            allow_changed,
            threads: options.threads.or(self.threads),
            bucket_mib: options.bucket_mib.or(self.bucket_mib),
            resident_buckets: options.resident_buckets.unwrap_or(self.resident_buckets),
            activations: options.activations.unwrap_or(self.activations),
            weights: options.weights.unwrap_or(self.weights),
            hardware: options.hardware.unwrap_or(self.hardware),
            hbm_limit: options.hbm_limit.or(self.hbm_limit),
            host_limit: options.host_limit.or(self.host_limit),
            memory: options.memory.unwrap_or(self.memory),
            huge_pages: options.huge_pages.unwrap_or(self.huge_pages),
            attention: options.attention.unwrap_or(self.attention),
            nondeterministic: options.nondeterministic.unwrap_or(self.nondeterministic),
            cuda_libraries: options.cuda_libraries.or(self.cuda_libraries),
            no_shuffle: options.no_shuffle.unwrap_or(self.no_shuffle),
            trace: options.trace.or(self.trace),
            perf_counters: options.perf_counters.unwrap_or(self.perf_counters),
            digest: options.digest.unwrap_or(self.digest),
            isa: options.isa.unwrap_or(self.isa),
            resctrl_group: options.resctrl_group.unwrap_or(self.resctrl_group),
            slots: options.slots.or(self.slots),
            without,
            cast: options.cast.unwrap_or(self.cast),
            adversary: options.adversary.or(self.adversary),
            inject: options.inject.unwrap_or(self.inject),
            data_bytes: self.data_bytes,
            separates_documents: self.separates_documents,
        }
    }

    /// Paths are echoed into JSON, which holds UTF-8 only: better said now than when the first checkpoint is written.
    fn check_paths(&self) -> Result<()> {
        let resume = match &self.resume_from_checkpoint {
            Some(Resume::Dir(dir)) => Some(dir),
            _ => None,
        };
        let single = [
            ("model", self.model.as_ref()),
            ("output-dir", Some(&self.output_dir)),
            ("resume-from-checkpoint", resume),
            ("trace", self.trace.as_ref()),
            ("cuda-libraries", self.cuda_libraries.as_ref()),
        ];
        let data = self.data.iter().map(|path| ("data", Some(path)));
        single.into_iter().chain(data).filter_map(|(flag, path)| Some((flag, path?))).try_for_each(|(flag, path)| check_path(flag, path))
    }

    fn check_counts(&self) -> Result<()> {
        let at_least_one = [
            ("per-device-train-batch-size", self.per_device_train_batch_size as u64),
            ("gradient-accumulation-steps", self.gradient_accumulation_steps as u64),
            ("seq-length", self.seq_length as u64),
            ("logging-steps", self.logging_steps),
            ("save-steps", self.save_steps),
            ("save-total-limit", self.save_total_limit.unwrap_or(1) as u64),
            ("hbm-limit", self.hbm_limit.map_or(1, |limit| limit.0)),
            ("host-limit", self.host_limit.map_or(1, |limit| limit.0)),
        ];
        for (flag, count) in at_least_one {
            require(count >= 1, flag, count, "at least 1")?;
        }
        let threads = self.threads.unwrap_or(1);
        require((1..=THREADS_MAX).contains(&threads), "threads", threads, format!("1 to {THREADS_MAX}"))?;
        let slots = self.slots.unwrap_or(1);
        require((1..=SLOTS_MAX).contains(&slots), "slots", slots, format!("1 to {SLOTS_MAX}"))?;
        let tokens = self.per_device_train_batch_size.checked_mul(self.seq_length);
        let fits = tokens.is_some_and(|tokens| tokens <= MICRO_BATCH_TOKENS_MAX);
        require(
            fits,
            "per-device-train-batch-size",
            self.per_device_train_batch_size,
            format!("at most {MICRO_BATCH_TOKENS_MAX} tokens in a micro-batch, with --seq-length {}", self.seq_length),
        )?;
        let step_tokens =
            self.per_device_train_batch_size.checked_mul(self.seq_length).and_then(|t| t.checked_mul(self.gradient_accumulation_steps));
        require(
            step_tokens.is_some_and(|tokens| tokens <= STEP_TOKENS_MAX),
            "gradient-accumulation-steps",
            self.gradient_accumulation_steps,
            format!("at most {STEP_TOKENS_MAX} tokens in a step"),
        )
    }

    fn check_combinations(&self) -> Result<()> {
        require(self.init == Init::Random || self.model.is_some(), "init", "checkpoint", "random without --model")?;
        let (unified, allowed) = (self.memory == HostMemoryKind::Unified, "only with --strategy superoffload and --rollback deferred");
        let states_move = self.strategy == Strategy::Superoffload && self.rollback == Rollback::Deferred;
        require(!unified || states_move, "memory", "unified", allowed)?;
        let on_cpu = self.adversary.is_none() || self.device == DeviceChoice::Cpu;
        require(on_cpu, "adversary", self.adversary.unwrap_or_default(), "only with --device cpu")?;
        if self.device == DeviceChoice::Cpu {
            self.check_needs_no_gpu()?;
        }
        let named = matches!(self.resctrl_group, ResctrlGroup::Named(_));
        let mpam = cfg!(feature = "mpam") && !self.without.contains(&Technique::Mpam);
        require(mpam || !named, "resctrl-group", "NAME", "only with the technique mpam")?;
        for injection in &self.inject {
            require(injection.step >= 1, "inject", injection.step, "steps are counted from 1")?;
        }
        Ok(())
    }

    /// Steps of warm-up in a run of `max_steps`, as Hugging Face counts them: the ratio rounds up, and steps win over it.
    pub fn warmup(&self, max_steps: u64) -> u64 {
        if self.warmup_steps > 0 { self.warmup_steps } else { (self.warmup_ratio * max_steps as f64).ceil() as u64 }
    }

    /// Refuses what only a GPU can do. Called when it is known that there will be none.
    ///
    /// # Errors
    /// `Usage` that names flag and value.
    pub fn check_needs_no_gpu(&self) -> Result<()> {
        let allowed = "only with --device cuda";
        require(self.memory == HostMemoryKind::Pinned, "memory", "unified", allowed)?;
        require(self.attention != AttentionChoice::Cudnn, "attention", "cudnn", allowed)?;
        require(self.hbm_limit.is_none(), "hbm-limit", self.hbm_limit.unwrap_or(Bytes(0)), allowed)
    }
}

/// More optimizer threads than any machine has cores.
const THREADS_MAX: usize = 4096;
/// More staging slots than a model has use for.
const SLOTS_MAX: usize = 4096;
/// Kernels index tokens with 32 bits.
const MICRO_BATCH_TOKENS_MAX: usize = i32::MAX as usize;
/// Tokens of an optimizer step: a factor of a thousand above any that was ever trained with.
const STEP_TOKENS_MAX: usize = 1 << 40;

fn train_length(max_steps: Option<u64>, epochs: Option<f64>) -> Option<TrainLength> {
    max_steps.map(TrainLength::Steps).or(epochs.map(TrainLength::Epochs))
}

fn check_path(flag: &str, path: &Path) -> Result<()> {
    require(!path.as_os_str().is_empty(), flag, "\"\"", "a path that is not empty")?;
    require(path.to_str().is_some(), flag, path.display(), "a path in UTF-8")
}

fn is_zero(x: &f64) -> bool {
    *x == 0.0
}

pub(super) fn require(holds: bool, flag: &str, value: impl Display, allowed: impl Display) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::usage(format!("--{flag} {}: allowed is {allowed}", compact(value)))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::tests::{command_line, flags, sample, sample_options};

    fn resolve(args: &[&str]) -> Result<Settings> {
        Settings::resolve(command_line(args).unwrap())
    }

    /// Settings of a run that is not the demo.
    fn base() -> Settings {
        resolve(&["--data", "corpus.txt"]).unwrap()
    }

    #[test]
    fn every_flag_changes_the_settings_or_is_refused_by_name() {
        for flag in flags().into_iter().filter(|flag| flag.get_long() != Some("config")) {
            let (name, _) = sample(&flag);
            let options = sample_options(&flag).over(command_line(&["--data", "corpus.txt"]).unwrap());
            match Settings::resolve(options) {
                Ok(settings) => assert_ne!(settings, base(), "--{name}"),
                Err(refused) => assert!(refused.to_string().contains(&name), "--{name}: {refused}"),
            }
        }
    }

    #[test]
    fn the_defaults_that_help_names_are_the_defaults() {
        let mut checked = 0;
        for flag in flags() {
            let help = flag.get_help().unwrap().to_string();
            let default = help.rsplit("[default: ").next().unwrap().trim_end_matches(']');
            let words = default.contains(' ') || ["none", "all"].contains(&default);
            if !words {
                let named = format!("--{}={default}", flag.get_long().unwrap());
                assert_eq!(resolve(&["--data=corpus.txt", &named]).unwrap(), base(), "{named}");
                checked += 1;
            }
        }
        assert!(checked >= 24, "only {checked} defaults are literal");
    }

    #[test]
    fn nonsense_is_refused_with_flag_value_and_range() {
        let cases = [
            ("--learning-rate=nan", "finite and at least 0"),
            ("--learning-rate=-1", "finite and at least 0"),
            ("--weight-decay=inf", "finite and at least 0"),
            ("--max-grad-norm=-0.5", "finite and at least 0"),
            ("--adam-beta1=1", "below 1"),
            ("--adam-beta2=-0.1", "at least 0"),
            ("--adam-beta2=nan", "below 1"),
            ("--adam-epsilon=0", "above 0"),
            ("--adam-epsilon=1e-60", "above 0 in float32"),
            ("--per-device-train-batch-size=0", "at least 1"),
            ("--gradient-accumulation-steps=0", "at least 1"),
            ("--seq-length=0", "at least 1"),
            ("--logging-steps=0", "at least 1"),
            ("--save-steps=0", "at least 1"),
            ("--save-total-limit=0", "at least 1"),
            ("--threads=0", "1 to"),
            ("--slots=0", "1 to"),
            ("--bucket-mib=0", "above 0"),
            ("--bucket-mib=nan", "above 0"),
            ("--max-steps=0", "at least 1"),
            ("--num-train-epochs=0", "above 0"),
            ("--num-train-epochs=nan", "above 0"),
            ("--init=checkpoint", "--model"),
            ("--adversary=5", "--device cpu"),
            ("--hbm-limit=0", "at least 1"),
            ("--host-limit=0GiB", "at least 1"),
            ("--per-device-train-batch-size=9223372036854775807", "tokens in a micro-batch"),
        ];
        for (arg, range) in cases {
            let args = if arg.contains("epochs") { vec![arg, "--data=corpus.txt"] } else { vec![arg] };
            let refused = resolve(&args).unwrap_err();
            let message = refused.to_string();
            assert!(message.starts_with(arg.split('=').next().unwrap()) && message.contains(range), "{arg}: {message}");
            assert_eq!(refused.exit_code(), 2);
        }
    }

    #[test]
    fn the_cpu_refuses_what_needs_a_gpu() {
        for (flag, value) in [("--memory", "unified"), ("--attention", "cudnn"), ("--hbm-limit", "2.0 GiB")] {
            let message = resolve(&["--device=cpu", flag, value]).unwrap_err().to_string();
            assert_eq!(message, format!("{flag} {value}: allowed is only with --device cuda"));
            assert!(resolve(&["--device=cuda", flag, value]).is_ok());
        }
    }

    #[test]
    fn unified_memory_is_for_what_the_gpu_steps_after_the_verdict() {
        for other in ["--strategy=zero-offload", "--strategy=no-offload", "--rollback=inverse"] {
            let message = resolve(&["--device=cuda", "--memory=unified", other]).unwrap_err().to_string();
            assert!(message.starts_with("--memory unified: allowed is only with --strategy superoffload"), "{message}");
        }
    }

    #[test]
    fn max_steps_wins_and_three_epochs_are_the_default() {
        assert_eq!(base().train_length, TrainLength::Epochs(3.0));
        let both = resolve(&["--max-steps=5", "--num-train-epochs=2"]).unwrap();
        assert_eq!(both.train_length, TrainLength::Steps(5));
    }

    #[test]
    fn the_demo_runs_when_there_is_neither_model_nor_data_and_flags_still_win() {
        assert_eq!(resolve(&[]).unwrap(), Settings::demo());
        let epochs = resolve(&["--num-train-epochs=0.5"]).unwrap();
        assert_eq!(epochs, Settings { train_length: TrainLength::Epochs(0.5), ..Settings::demo() });
        let model = resolve(&["--model", "gpt2", "--data", "corpus.txt"]).unwrap();
        assert_eq!((model.init, model.seq_length, model.output_dir), (Init::Checkpoint, 1024, "runs/train".into()));
        assert_eq!(resolve(&["--model", "gpt2", "--data", "corpus.txt", "--init=random"]).unwrap().init, Init::Random);
        let refused = resolve(&["--model", "gpt2"]).unwrap_err();
        assert!(refused.exit_code() == 2 && refused.to_string().starts_with("--model: --data is missing"), "{refused}");
    }

    #[test]
    fn warm_up_is_counted_as_hugging_face_counts_it() {
        let warmup = |args: &[&str]| resolve(&[args, &["--data=x"]].concat()).unwrap().warmup(250);
        assert_eq!((warmup(&[]), warmup(&["--warmup-ratio=0.1"]), warmup(&["--warmup-ratio=0.003"])), (0, 25, 1));
        assert_eq!(warmup(&["--warmup-ratio=0.1", "--warmup-steps=7"]), 7);
        assert_eq!(resolve(&["--warmup-ratio=0.5"]).unwrap().warmup(300), 150, "the built-in model's ten steps were not asked for");
        assert!(resolve(&["--warmup-ratio=1.5"]).unwrap_err().to_string().contains("0 to 1"));
    }

    #[test]
    fn the_help_names_the_settings_of_the_built_in_model() {
        let said: Vec<_> = DEMO_FLAGS.split(' ').collect();
        assert_eq!(resolve(&[&said[..], &["--data=x"]].concat()).unwrap(), Settings { data: vec!["x".into()], ..Settings::demo() });
    }

    #[test]
    fn long_numbers_are_short_in_messages() {
        let message = resolve(&["--adam-epsilon=-1e300"]).unwrap_err().to_string();
        assert!(message.starts_with("--adam-epsilon -1e300: "), "{message}");
    }

    #[test]
    fn techniques_are_sorted_and_named_once() {
        let without = resolve(&["--without=mpam,stv", "--without=mpam"]).unwrap().without;
        assert_eq!(without, [Technique::Stv, Technique::Mpam]);
    }

    #[test]
    fn settings_are_json_even_with_a_nan_injected() {
        let inject = Some(vec![Injection { step: 1, element: 0, value: f32::NAN }]);
        let settings = Settings::resolve(TrainOptions { inject, ..Default::default() }).unwrap();
        let json = serde_json::to_value(&settings).unwrap();
        assert_eq!(json["inject"][0]["value"], "NaN");
        assert_eq!(json["train_length"]["steps"], 300);
        let back: Injection = serde_json::from_value(json["inject"][0].clone()).unwrap();
        assert!(back.value.is_nan());
    }

    #[test]
    fn paths_that_json_cannot_hold_are_refused() {
        use std::os::unix::ffi::OsStringExt;
        let odd = PathBuf::from(std::ffi::OsString::from_vec(vec![b'a', 0xff]));
        for (options, flag) in [
            (TrainOptions { model: Some(odd.clone()), data: Some(vec!["corpus.txt".into()]), ..Default::default() }, "--model"),
            (TrainOptions { data: Some(vec![odd.clone()]), ..Default::default() }, "--data"),
            (TrainOptions { resume_from_checkpoint: Some(Resume::Dir(odd)), ..Default::default() }, "--resume-from-checkpoint"),
            (TrainOptions { output_dir: Some("".into()), ..Default::default() }, "--output-dir"),
            (TrainOptions { cuda_libraries: Some("".into()), ..Default::default() }, "--cuda-libraries"),
            (TrainOptions { data: Some(vec![]), ..Default::default() }, "--data"),
        ] {
            let message = Settings::resolve(options).unwrap_err().to_string();
            assert!(message.starts_with(flag), "{message}");
        }
    }
}
