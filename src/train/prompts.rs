//! `--prompts FILE`: text that a model writes at evaluations, in the log, in `metrics.jsonl` and in the report.

use super::sampling::{Sampling, TextSampler};
use crate::config::settings::Settings;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::device::Kernels;
use crate::disk::{self, named_by};
use crate::engine::executor::Engine;
use crate::error::{Error, Result};
use crate::metrics::WrittenSample;
use crate::signals::StopFlag;
use std::path::Path;

/// No file of prompts is larger, and none has more.
const BYTES_MAX: u64 = 1 << 20;
const PROMPTS_MAX: usize = 64;
/// Tokens that are written after each prompt.
const NEW_TOKENS: usize = 48;

/// The prompts of a run.
pub(super) struct Prompts {
    lines: Vec<String>,
    sampler: TextSampler,
}

impl Prompts {
    /// The prompts that `settings` name, if they do.
    ///
    /// # Errors
    /// `Io` when the file cannot be read; `Usage` for a file without prompts or with too many, for a prompt as long as a row, for one that
    /// [`TextSampler::new`] refuses, and where nothing is evaluated.
    pub(super) fn of(settings: &Settings, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let Some(path) = &settings.prompts else { return Ok(None) };
        let refusal = |cause: String| Error::usage(format!("--prompts {}: {cause}", path.display()));
        let refuse = |cause| Err(refusal(cause));
        if settings.eval_data.is_empty() && settings.eval_split.is_none() {
            return refuse("needs --eval-data or --eval-split, since text is written at evaluations".into());
        }
        if settings.sequence_ranks > 1 {
            return refuse("not with --sequence-ranks above 1; `superoffload sample` reads a checkpoint".into());
        }
        let lines = read(path).map_err(|error| named_by("--prompts", error))?;
        if !(1..=PROMPTS_MAX).contains(&lines.len()) {
            return refuse(format!("{} prompts, one a line; must be from 1 to {PROMPTS_MAX}", lines.len()));
        }
        let sampling = Sampling { max_new_tokens: NEW_TOKENS, temperature: 0.0, seed: 0 };
        let of_file = |error| if let Error::Usage(cause) = error { refusal(cause) } else { error };
        let sampler = TextSampler::new(tokenizer, &lines, sampling, &StopFlag::default()).map_err(of_file)?;
        let longest = sampler.longest() - NEW_TOKENS;
        if longest >= settings.seq_length {
            return refuse(format!("a prompt of {longest} tokens, rows have {}; raise --seq-length, or shorten it", settings.seq_length));
        }
        Ok(Some(Self { lines, sampler }))
    }

    /// Samples the model of `engine` after each prompt.
    ///
    /// # Errors
    /// The engine's; `Interrupted`.
    pub(super) fn write<D: Kernels>(&self, engine: &mut Engine<D>, stop: &StopFlag) -> Result<Vec<WrittenSample>> {
        let written = self.sampler.completions(engine, stop)?;
        Ok(self.lines.iter().zip(written).map(|(prompt, written)| WrittenSample { prompt: prompt.clone(), text: written.text }).collect())
    }
}

/// The lines of the file at `path` that are not empty.
fn read(path: &Path) -> Result<Vec<String>> {
    let text = disk::read_small_text(path, BYTES_MAX)?;
    Ok(text.lines().map(str::trim_end).filter(|line| !line.is_empty()).map(String::from).collect())
}
