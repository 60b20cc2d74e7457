//! Text that a model writes after prompts: the likeliest token each time, or a random one of a seed.

use crate::data::encode::prompt;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::rows::batch::{Batch, Batches};
use crate::data::tokenizer::TokenDecoder;
use crate::device::Kernels;
use crate::engine::executor::Engine;
use crate::error::{Error, Result};
use crate::signals::StopFlag;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How much is written, and how a token is chosen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sampling {
    pub(super) max_new_tokens: usize,
    /// 0 takes the likeliest token.
    pub(super) temperature: f64,
    pub(super) seed: u64,
}

/// Text that a model wrote after a prompt.
#[derive(Debug)]
pub(crate) struct Completion {
    /// Ids of the prompt.
    pub(crate) prompt: Vec<u32>,
    /// Ids that were written, with the end of text if that was one of them.
    pub(crate) ids: Vec<u32>,
    /// The log-probability of each of these ids at temperature 1.
    pub(crate) logps: Vec<f64>,
    /// The text of these ids, without the end of text.
    pub(crate) text: String,
}

/// A row while it is written.
struct OpenRow {
    /// The prompt and the text so far.
    ids: Vec<u32>,
    logps: Vec<f64>,
    /// The end of text, once it was chosen.
    end: Option<u32>,
}

/// A writer of text after prompts, with the weights of an engine.
pub(super) struct TextSampler {
    decoder: TokenDecoder,
    end_of_text: Option<u32>,
    /// The ids of each prompt.
    prompts: Vec<Vec<u32>>,
    sampling: Sampling,
}

impl TextSampler {
    /// A sampler of `prompts`.
    ///
    /// # Errors
    /// As [`prompt::ids`] and [`Tokenizer::decoder`].
    pub(super) fn new(tokenizer: &Tokenizer, prompts: &[String], sampling: Sampling, stop: &StopFlag) -> Result<Self> {
        let prompts = prompts.iter().map(|prompt| prompt::ids(tokenizer, prompt, stop)).collect::<Result<_>>()?;
        Ok(Self { decoder: tokenizer.decoder()?, end_of_text: tokenizer.end_of_text(), prompts, sampling })
    }

    /// How many prompts there are.
    pub(super) fn prompts(&self) -> usize {
        self.prompts.len()
    }

    /// Tokens of the longest prompt plus the most new tokens.
    pub(super) fn longest(&self) -> usize {
        self.prompts.iter().map(Vec::len).max().unwrap_or(0) + self.sampling.max_new_tokens
    }

    /// The completion that the model of `engine` writes after each prompt, until its end of text, the limit, or the end of a row.
    ///
    /// # Errors
    /// The engine's; `Interrupted`.
    pub(super) fn completions<D: Kernels>(&self, engine: &mut Engine<D>, stop: &StopFlag) -> Result<Vec<Completion>> {
        let (mut completions, rows) = (Vec::new(), engine.plan().recipe.step.micro_batch);
        for prompts in self.prompts.chunks(rows) {
            let written = self.written(engine, prompts, completions.len(), stop)?;
            for (prompt, OpenRow { ids, logps, end }) in prompts.iter().zip(written) {
                let text = self.text_after(prompt, &ids, stop)?;
                let ids = ids[prompt.len()..].iter().copied().chain(end).collect();
                completions.push(Completion { prompt: prompt.clone(), ids, logps, text });
            }
        }
        Ok(completions)
    }

    /// The rows that begin with `prompts`, the first of which is number `first`.
    fn written<D: Kernels>(&self, engine: &mut Engine<D>, prompts: &[Vec<u32>], first: usize, stop: &StopFlag) -> Result<Vec<OpenRow>> {
        let (vocab, seq_length) = (engine.shape().vocab, engine.plan().recipe.step.seq_length);
        let row = |prompt: &Vec<u32>| OpenRow { ids: prompt.clone(), logps: Vec::new(), end: None };
        let (mut rows, mut logits) = (prompts.iter().map(row).collect::<Vec<_>>(), Vec::new());
        let mut open: Vec<usize> = (0..rows.len()).collect();
        let mut dice: Vec<_> = (first..).take(rows.len()).map(|number| self.dice(number)).collect();
        for _ in 0..self.sampling.max_new_tokens {
            open.retain(|&row| rows[row].ids.len() < seq_length);
            if open.is_empty() {
                break;
            }
            if stop.is_set() {
                return Err(Error::Interrupted("text was sampled".into()));
            }
            let places: Vec<usize> = open.iter().map(|&row| row * seq_length + rows[row].ids.len() - 1).collect();
            engine.next_logits(&mut PromptRows { rows: &rows, is_dealt: false }, &places, &mut logits)?;
            let mut of_rows = logits.chunks_exact(vocab);
            open.retain(|&row| {
                let Some(logits) = of_rows.next() else { return false };
                rows[row].push(self.chosen(logits, &mut dice[row]), logits, self.end_of_text)
            });
        }
        Ok(rows)
    }

    fn text_after(&self, prompt: &[u32], row: &[u32], stop: &StopFlag) -> Result<String> {
        let (whole, before) = (self.decoder.text(row, stop)?, self.decoder.text(prompt, stop)?);
        // Where a decoder joins characters across the boundary, the new tokens stand alone.
        whole.strip_prefix(&before).map_or_else(|| self.decoder.text(&row[prompt.len()..], stop), |text| Ok(text.into()))
    }

    /// Random numbers of a prompt, whichever others there are.
    fn dice(&self, number: usize) -> ChaCha8Rng {
        let mut dice = ChaCha8Rng::seed_from_u64(self.sampling.seed);
        dice.set_stream(number as u64);
        dice
    }

    fn chosen(&self, logits: &[f32], dice: &mut ChaCha8Rng) -> u32 {
        let temperature = self.sampling.temperature;
        if temperature == 0.0 { likeliest(logits) } else { drawn(logits, temperature, dice) }
    }
}

impl OpenRow {
    /// Adds the token `id`, which was chosen by `logits`. Returns whether the row goes on.
    fn push(&mut self, id: u32, logits: &[f32], end_of_text: Option<u32>) -> bool {
        self.logps.push(log_probability(logits, id));
        let is_end = Some(id) == end_of_text;
        if is_end {
            self.end = Some(id)
        } else {
            self.ids.push(id)
        }
        !is_end
    }
}

/// The log-probability of token `id`.
fn log_probability(logits: &[f32], id: u32) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let of = |logit: f32| f64::from(logit) - f64::from(top);
    let sum: f64 = logits.iter().map(|logit| libm::exp(of(*logit))).sum();
    logits.get(id as usize).map_or(f64::NEG_INFINITY, |logit| of(*logit) - libm::log(sum))
}

/// The place of the largest logit, the first of equal ones.
fn likeliest(logits: &[f32]) -> u32 {
    let largest = (0u32..).zip(logits).fold(None, |best: Option<(u32, f32)>, (id, &logit)| match best {
        Some((_, before)) if logit <= before || logit.is_nan() => best,
        _ => Some((id, logit)),
    });
    largest.map_or(0, |(id, _)| id)
}

/// A place with the probability that its logit has at `temperature`.
fn drawn(logits: &[f32], temperature: f64, dice: &mut ChaCha8Rng) -> u32 {
    let top = f64::from(logits[likeliest(logits) as usize]);
    let weight = |logit: &f32| libm::exp((f64::from(*logit) - top) / temperature);
    let sum: f64 = logits.iter().map(weight).filter(|weight| weight.is_finite()).sum();
    let mut left = (dice.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * sum;
    let drawn = (0u32..).zip(logits).find(|(_, logit)| {
        left -= Some(weight(logit)).filter(|weight| weight.is_finite()).unwrap_or(0.0);
        left < 0.0
    });
    drawn.map_or_else(|| likeliest(logits), |(id, _)| id)
}

/// A micro-batch with rows that begin with the text so far; all other rows are empty.
struct PromptRows<'a> {
    rows: &'a [OpenRow],
    is_dealt: bool,
}

impl Batches for PromptRows<'_> {
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        let rows = if self.is_dealt { &[] } else { self.rows };
        batch.tokens.fill(0);
        batch.targets.fill(-1);
        for (row, written) in batch.rows().zip(rows) {
            for (token, id) in row.tokens.iter_mut().zip(&written.ids) {
                *token = *id as i32;
            }
            // A loss is computed beside the logits, and needs a target.
            row.targets[0] = 0;
        }
        self.is_dealt = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_token_is_the_first_of_the_largest() {
        assert_eq!(likeliest(&[0.5, 2.0, f32::NAN, 2.0, -1.0]), 1);
        assert_eq!((likeliest(&[]), likeliest(&[f32::NEG_INFINITY, -3.0])), (0, 1));
    }

    #[test]
    fn a_row_ends_with_its_end_of_text_and_every_token_has_a_log_probability() {
        let (logits, mut row) = ([0.0, f32::ln(3.0)], OpenRow { ids: vec![7], logps: Vec::new(), end: None });
        assert!(row.push(1, &logits, Some(0)) && !row.push(0, &logits, Some(0)));
        assert_eq!((&row.ids[..], row.end), (&[7, 1][..], Some(0)));
        for (logp, expected) in row.logps.iter().zip([0.75f64, 0.25]) {
            assert!((logp - expected.ln()).abs() < 1e-7, "{logp}");
        }
    }

    #[test]
    fn tokens_are_drawn_by_their_probabilities() {
        let (logits, mut dice) = ([0.0, f32::ln(2.0), f32::NEG_INFINITY, f32::ln(5.0)], ChaCha8Rng::seed_from_u64(7));
        let mut counts = [0.0f64; 4];
        (0..8000).for_each(|_| counts[drawn(&logits, 1.0, &mut dice) as usize] += 1.0);
        for (count, expected) in counts.into_iter().zip([1.0, 2.0, 0.0, 5.0]) {
            assert!((count / 1000.0 - expected).abs() < 0.2, "{counts:?}");
        }
        assert!((0..100).all(|_| drawn(&logits, 1e-3, &mut dice) == 3), "cold is greedy");
        assert!((0..100).any(|_| drawn(&logits, 100.0, &mut dice) == 0));
    }
}
