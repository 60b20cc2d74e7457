//! Text from a run's checkpoint, or from the weights that a run begins with.

use super::record::RecordedRun;
use super::sampling::{Completion, Sampling, TextSampler};
use super::{frozen, text};
use crate::checkpoint::carried::Carrier;
use crate::checkpoint::{Check, Loaded, engine_state};
use crate::config::options::{DeviceChoice, ReplanChoice, TokenizerChoice};
use crate::config::settings::{Settings, TrainOptions};
use crate::data::encode::prompt;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::rows::row_rules::Packing;
use crate::data::tokenizer::AddBos;
use crate::device::Kernels;
use crate::engine::executor::Engine;
use crate::engine::protocol::loss_scale::LossScale;
use crate::engine::protocol::verdict::SpeculationHistory;
use crate::error::{Error, Result};
use crate::launch::context::check_context;
use crate::launch::engine::{Launcher, UseEngine};
use crate::model::shape::ModelShape;
use crate::model_dir::ModelDir;
use crate::optim::PIECE_ELEMS;
use crate::signals::StopFlag;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Prompts that are answered side by side.
const ROWS_MAX: usize = 8;
/// Rows of a multiple of so many tokens suit every kernel of attention.
const GRAIN: usize = 64;
/// No prompt is answered at greater length.
const NEW_TOKENS_MAX: usize = 1 << 20;
/// Largest number of texts after a prompt.
const SAMPLES_MAX: usize = 1 << 16;

/// The options of `sample`.
#[derive(clap::Args, Clone, Debug)]
pub struct SampleOptions {
    /// A checkpoint, or the output directory of a run for its newest good checkpoint.
    pub run: PathBuf,

    /// Prompt, rendered by the run's chat template if it has one; may be given several times.
    #[arg(long, value_name = "TEXT", required = true)]
    pub prompt: Vec<String>,

    /// Maximum number of tokens of a text.
    #[arg(long, value_name = "N", default_value_t = 48)]
    pub max_new_tokens: usize,

    /// Sampling temperature: 0 takes the most probable token, 1 samples from the model's distribution.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f64,

    /// Seed for sampling.
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,

    /// Number of texts after each prompt.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub samples: usize,

    /// Print a line of JSON for each text, with token ids and log-probabilities.
    #[arg(long)]
    pub json: bool,

    /// Device [default: as in the run].
    #[arg(long, value_enum)]
    pub device: Option<DeviceChoice>,

    /// Compute threads [default: as in the run].
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

impl SampleOptions {
    fn sampling(&self) -> Result<Sampling> {
        let Self { max_new_tokens, temperature, seed, .. } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(Error::usage(format!("--temperature {temperature}: must be at least 0")));
        }
        if !(1..=NEW_TOKENS_MAX).contains(&max_new_tokens) {
            return Err(Error::usage(format!("--max-new-tokens {max_new_tokens}: must be from 1 to {NEW_TOKENS_MAX}")));
        }
        if !(1..=SAMPLES_MAX).contains(&self.samples) {
            return Err(Error::usage(format!("--samples {}: must be from 1 to {SAMPLES_MAX}", self.samples)));
        }
        Ok(Sampling { max_new_tokens, temperature, seed })
    }
}

/// A text as a line of JSON. Training on completions reads such lines, once each has an advantage.
#[derive(serde::Serialize)]
struct SampleLine<'a> {
    prompt: &'a str,
    completion: &'a str,
    prompt_ids: &'a [u32],
    completion_ids: &'a [u32],
    old_logps: &'a [f64],
}

/// Samples the model of the run that `options` name after each of their prompts. Returns the texts with their prompts as the options print
/// them.
///
/// # Errors
/// `Usage` for invalid options; errors of the checkpoint and of the device; `Interrupted`.
pub(crate) fn sample(options: &SampleOptions, stop: &StopFlag) -> Result<String> {
    let sampling = options.sampling()?;
    let run = RecordedRun::open(&options.run, Check::Now)?;
    let flags = TrainOptions { device: options.device, threads: options.threads, ..TrainOptions::default() };
    let settings = Settings::resolve(run.options(flags)?)?;
    let dir = run.loaded.model_dir();
    let shape = run.loaded.shape()?.computing_in(settings.weight_dtype());
    let tokenizer = tokenizer(&run, &settings, &dir)?.refusing(shape.media_tokens.clone());
    let prompts: Vec<String> = options.prompt.iter().flat_map(|prompt| std::iter::repeat_n(prompt.clone(), options.samples)).collect();
    let sampler = TextSampler::new(&tokenizer, &prompts, sampling, stop)?;
    let carrier = frozen::carrier_of(&settings, &run.loaded, &shape, stop)?;
    let written = write(&settings, &shape, &sampler, WeightSource::Checkpoint(Box::new(run.loaded), carrier), stop)?;
    Ok(if options.json { json_lines(&prompts, &written)? } else { texts(&prompts, written) })
}

/// The texts, each after its prompt if there are several.
fn texts(prompts: &[String], written: Vec<Completion>) -> String {
    let is_one = written.len() == 1;
    let text = |(prompt, Completion { text, .. }): (&String, Completion)| if is_one { text } else { format!("> {prompt}\n{text}\n") };
    prompts.iter().zip(written).map(text).collect::<Vec<_>>().join("\n")
}

/// A line of JSON for each text.
fn json_lines(prompts: &[String], written: &[Completion]) -> Result<String> {
    let line = |(prompt, completion): (&String, &Completion)| {
        let Completion { prompt: prompt_ids, ids: completion_ids, logps: old_logps, text: completion } = completion;
        serde_json::to_string(&SampleLine { prompt, completion, prompt_ids, completion_ids, old_logps })
    };
    let lines: std::result::Result<Vec<_>, _> = prompts.iter().zip(written).map(line).collect();
    Ok(lines.map_err(|error| Error::resource("write samples as JSON", error))?.join("\n"))
}

/// Samples the built-in model after `prompt`: that of the checkpoint in `path`, or as a run with `settings` begins.
///
/// # Errors
/// As [`sample`].
pub(super) fn of_demo(settings: &Settings, prompt: &str, path: Option<&Path>, stop: &StopFlag) -> Result<String> {
    let sampling = Sampling { max_new_tokens: 48, temperature: 0.0, seed: 0 };
    let from = path.map_or(Ok(WeightSource::Seed(settings.seed)), |path| {
        crate::checkpoint::open(path).map(|loaded| WeightSource::Checkpoint(Box::new(loaded), None))
    })?;
    let sampler = TextSampler::new(&Tokenizer::bytes(), &[prompt.to_string()], sampling, stop)?;
    let written = write(settings, &ModelShape::demo(), &sampler, from, stop)?;
    Ok(written.into_iter().map(|completion| completion.text).collect())
}

/// The weights that are sampled.
enum WeightSource {
    Seed(u64),
    /// A checkpoint, with its frozen tensors if it has any.
    Checkpoint(Box<Loaded>, Option<Carrier>),
}

fn write(settings: &Settings, shape: &ModelShape, sampler: &TextSampler, from: WeightSource, stop: &StopFlag) -> Result<Vec<Completion>> {
    let settings = alone(settings, sampler);
    check_context(&settings, shape, Path::new("the model"))?;
    let (launcher, settings) = Launcher::new(&settings)?;
    let plan = launcher.plan(&settings, shape, false)?;
    launcher.engine(&plan, shape, Writing { sampler, from, stop })
}

/// `settings` of one device and rows that are just long enough.
fn alone(settings: &Settings, sampler: &TextSampler) -> Settings {
    Settings {
        seq_length: sampler.longest().next_multiple_of(GRAIN),
        per_device_train_batch_size: sampler.prompts().min(ROWS_MAX),
        gpus: 1,
        all_gpus: false,
        processes: 1,
        process: 0,
        sequence_ranks: 1,
        gradient_accumulation_steps: None,
        gradient_shares: None,
        gradient_group: None,
        tokens_per_step: None,
        packing: Packing::Wrapped,
        replan: ReplanChoice::Off,
        ..settings.clone().without_objective()
    }
}

/// The tokenizer that the run had, by the files in its checkpoint: its data may be gone.
fn tokenizer(run: &RecordedRun, settings: &Settings, dir: &Path) -> Result<Tokenizer> {
    let dir = ModelDir::open(dir)?;
    let uses_template = run.loaded.manifest().run.get("tokenizer").and_then(|of| of.pointer("/records/chat_template"));
    let uses_template = uses_template.is_some_and(Value::is_string);
    let rules = Arc::new(text::record_flags(settings).rules(Some(&dir), |_| uses_template)?);
    let end_of_text = settings.eos_token.as_deref();
    let tokenizer = match settings.tokenizer {
        TokenizerChoice::Bytes => Tokenizer::bytes_with(end_of_text, AddBos::No, rules)?,
        TokenizerChoice::Auto => {
            let found = Tokenizer::load_with(&dir, end_of_text, settings.add_bos, &rules)?;
            found.unwrap_or_else(|| Tokenizer::absent(rules))
        }
    };
    match prompt::lacking_template(&tokenizer).filter(|_| uses_template) {
        Some(cause) => Err(Error::format(dir.path(), format!("the run used a chat template that is not here any more: {cause}"))),
        None => Ok(tokenizer),
    }
}

/// Writes with an engine once it has its weights.
struct Writing<'a> {
    sampler: &'a TextSampler,
    from: WeightSource,
    stop: &'a StopFlag,
}

impl UseEngine for Writing<'_> {
    type Output = Vec<Completion>;

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<Vec<Completion>> {
        match self.from {
            WeightSource::Seed(seed) => engine.init_state(seed, engine.plan().site.threads)?,
            WeightSource::Checkpoint(loaded, carrier) => {
                let (step, optimizer_step) = (loaded.manifest().trainer.step, loaded.manifest().trainer.optimizer_step);
                let loss_scale = LossScale::new(engine.plan().recipe.numerics.dtype);
                let clip_memory = engine.clip_memory().clone();
                engine.resume(step, optimizer_step, loss_scale, SpeculationHistory::default(), clip_memory)?;
                engine_state::restore(&mut engine, &loaded, PIECE_ELEMS)?;
                frozen::read(&mut engine, carrier.as_ref().and_then(Carrier::weights))?;
            }
        }
        engine.send_weights()?;
        let completions = self.sampler.completions(&mut engine, self.stop)?;
        engine.finish()?;
        Ok(completions)
    }
}
