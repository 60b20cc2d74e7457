//! Flags of `bench step`: the flags of `train` that affect a step, and flags of the measurement.

use crate::config::settings::TrainOptions;
use crate::data::rows::row_rules::Packing;
use crate::describe::flag_name;
use crate::error::{Error, Result};
use crate::model::presets;
use crate::model::shape::ModelShape;
use crate::request::check::require;
use crate::simulate::clip::Clip;
use crate::simulate::random_tokens::RandomData;
use clap::Arg;
use std::path::PathBuf;

/// Options of `bench step`.
#[derive(clap::Args, Clone, Debug)]
#[command(mut_args(of_a_benchmark))]
pub struct StepOptions {
    /// Steps of warm-up before the clock starts.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub warmup: u64,

    /// Steps that are timed.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub steps: u64,

    /// Steps with clipped gradients, for which the plan is chosen.
    #[arg(long, value_name = "never|always|every-N", default_value = "never")]
    pub clip: Clip,

    /// The tokens of the steps.
    #[command(flatten)]
    pub data: RandomData,

    /// Append the JSON line to this file instead of printing it.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Options of the step, and the model.
    #[command(flatten)]
    pub train: TrainOptions,
}

impl StepOptions {
    /// Takes the model out of the options of `train`, which would also require data, and reads its shape.
    ///
    /// # Errors
    /// `Usage` if there is no --model; errors of [`presets::shape`].
    pub(crate) fn take_model(&mut self) -> Result<(PathBuf, ModelShape)> {
        let model = self.train.model.take().ok_or_else(|| {
            Error::usage(format!("--model is missing: a config.json, a model's directory, or one of {}", presets::names()))
        })?;
        let shape = presets::shape(&model)?;
        Ok((model, shape))
    }

    /// Refuses flags of `train` that have no effect here, and step counts out of range.
    ///
    /// # Errors
    /// `Usage` that names the first such flag.
    pub fn check(&self) -> Result<()> {
        self.check_except(&[])
    }

    /// Like [`StepOptions::check`], for a command on which the flags `meaningful` of `train` have an effect.
    ///
    /// # Errors
    /// As [`StepOptions::check`].
    pub(super) fn check_except(&self, meaningful: &[&str]) -> Result<()> {
        for (flag, steps, least) in [("warmup", self.warmup, 0), ("steps", self.steps, 1)] {
            require((least..=STEPS_MAX).contains(&steps), flag, steps, format!("must be from {least} to {STEPS_MAX}"))?;
        }
        if self.data.documents.is_some() && self.train.packing != Some(Packing::Bfd) {
            return Err(Error::usage("--documents: needs --packing bfd, the only packing that separates the documents of a row"));
        }
        match self.train.explicit_flags().into_iter().find(|given| MEANINGLESS.contains(given) && !meaningful.contains(given)) {
            None => Ok(()),
            Some("max_grad_norm") => Err(Error::usage("--max-grad-norm: not available in bench step, which sets it from --clip")),
            Some(given) => Err(Error::usage(format!(
                "--{}: not available in bench step, which runs --steps steps on random tokens and weights and saves nothing",
                flag_name(given)
            ))),
        }
    }
}

/// Largest number of warm-up or timed steps: the record holds the time of each timed step, in memory that is allocated before the first
/// one.
const STEPS_MAX: u64 = 100_000;

/// Options of `train` that have no effect in a benchmark.
#[rustfmt::skip]
const MEANINGLESS: [&str; 32] = [
    "init", "data", "eval_data", "output_dir", "max_steps", "num_train_epochs",
    "data_format", "columns", "train_on", "chat_template", "chat_template_name", "chat_template_kwargs",
    "chat_date",
    "lr_scheduler_type", "warmup_steps", "warmup_ratio", "max_grad_norm", "logging_steps", "report_to",
    "eval_strategy", "eval_steps", "eval_on_start", "prompts", "save_steps",
    "save_total_limit", "save_memory", "save_rate", "resume_from_checkpoint", "no_shuffle", "perf_counters", "inject", "faults",
];

/// A flag of `train` as a benchmark has it: without data, the model's shape is enough.
fn of_a_benchmark(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "model" => arg.value_name("NAME|FILE").long_help(None).help("The model's shape: a config.json, or a name such as qwen3-4b"),
        id if MEANINGLESS.contains(&id) => arg.hide(true),
        _ => arg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args, FromArgMatches};

    fn parse(flags: &[&str]) -> StepOptions {
        let command = StepOptions::augment_args(clap::Command::new("step"));
        let matches = command.try_get_matches_from([&["step", "--model=gpt-5b"], flags].concat()).unwrap();
        StepOptions::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn flags_of_train_work_unless_they_mean_nothing() {
        let options = parse(&["--seq-length=8", "--clip=every-3", "--steps=2"]);
        assert_eq!((options.train.seq_length, options.clip.to_string().as_str(), options.steps), (Some(8), "every-3", 2));
        assert!(options.check().is_ok());
        let refused = parse(&["--save-steps=5"]).check().unwrap_err().to_string();
        assert!(refused.starts_with("--save-steps"), "{refused}");
        assert!(parse(&["--max-grad-norm=1"]).check().unwrap_err().to_string().contains("--clip"));
    }

    #[test]
    fn unreasonably_long_runs_are_refused_before_any_allocation() {
        for flag in ["--steps", "--warmup"] {
            for count in [100_001, 1 << 32, 1 << 63, u64::MAX] {
                let refused = parse(&[&format!("{flag}={count}")]).check().unwrap_err().to_string();
                assert!(refused.starts_with(&format!("{flag} {count}: must be from ")), "{refused}");
            }
        }
        assert_eq!(parse(&["--steps=0"]).check().unwrap_err().to_string(), "--steps 0: must be from 1 to 100000");
        assert!(parse(&["--steps=100000", "--warmup=0"]).check().is_ok());
    }

    #[test]
    fn help_shows_the_flags_that_mean_something() {
        let help = StepOptions::augment_args(clap::Command::new("step")).render_long_help().to_string();
        assert!(help.contains("--resident-buckets") && help.contains("--clip"), "{help}");
        assert!(help.contains("--model <NAME|FILE>") && help.contains("such as qwen3-4b"), "{help}");
        assert!(!help.contains("--save-steps") && !help.contains("--max-grad-norm"), "{help}");
    }
}
