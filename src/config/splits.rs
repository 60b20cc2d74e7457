//! `--tokens-per-step`: the ways to split the tokens of a step into micro-batches.

use super::checks::MICRO_BATCH_TOKENS_MAX;
use super::settings::Settings;
use crate::error::{Error, Result};

/// Largest number of micro-batches per step on each GPU if their number is open. Each split is simulated.
const OPEN_MAX: usize = 1024;

impl Settings {
    /// All splits of a step that fit the given options, the largest micro-batches first.
    /// Without a number of tokens per step, these settings are the only split.
    ///
    /// # Errors
    /// `Usage` that names the tokens and the values that they do not fit.
    pub(crate) fn splits(&self) -> Result<Vec<Self>> {
        let Some(tokens) = self.tokens_per_step else { return Ok(vec![self.clone()]) };
        let (seq_length, groups) = (self.seq_length, self.groups());
        if !tokens.is_multiple_of(seq_length.saturating_mul(groups)) {
            let shared = if self.sequence_ranks > 1 { format!(" / --sequence-ranks {}", self.sequence_ranks) } else { String::new() };
            let on_each = if groups > 1 { format!(" times {}{shared}", self.ranks_in_words()) } else { String::new() };
            return Err(Error::usage(format!("--tokens-per-step {tokens}: not a multiple of the sequence length, {seq_length}{on_each}")));
        }
        let sequences = tokens / seq_length / groups;
        let given_batch = Some(self.per_device_train_batch_size).filter(|_| !self.is_batch_open);
        let given_steps = self.gradient_accumulation_steps.or(given_batch.map(|batch| (sequences / batch).max(1)));
        let steps = given_steps.map_or(1..=sequences.min(OPEN_MAX), |steps| steps..=steps);
        let split = |steps: usize| {
            let batch = sequences / steps;
            let is_exact = sequences.is_multiple_of(steps) && given_batch.is_none_or(|given| given == batch);
            let parts = steps * groups * self.sequence_ranks;
            let is_allowed = batch * seq_length <= MICRO_BATCH_TOKENS_MAX && parts.is_multiple_of(self.partial_sums());
            let split = || Self { per_device_train_batch_size: batch, gradient_accumulation_steps: Some(steps), ..self.clone() };
            (is_exact && is_allowed).then(split)
        };
        let splits: Vec<_> = steps.filter_map(split).collect();
        if splits.is_empty() { Err(self.no_split(tokens, sequences)) } else { Ok(splits) }
    }

    fn no_split(&self, tokens: usize, sequences: usize) -> Error {
        let flags = [
            ("--per-device-train-batch-size", Some(self.per_device_train_batch_size).filter(|_| !self.is_batch_open)),
            ("--gradient-accumulation-steps", self.gradient_accumulation_steps),
            ("--gradient-shares", self.gradient_shares),
        ];
        let given: Vec<_> = flags.into_iter().filter_map(|(flag, given)| Some(format!("{flag} {}", given?))).collect();
        let why = match given.is_empty() {
            true => format!("into 1 to {OPEN_MAX} micro-batches of at most {MICRO_BATCH_TOKENS_MAX} tokens"),
            false => format!("as asked for by {}", given.join(" and ")),
        };
        Error::usage(format!("--tokens-per-step {tokens}: {sequences} sequences on each GPU cannot be cut {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::tests::command_line;

    fn splits(flags: &[&str]) -> std::result::Result<Vec<(usize, usize)>, String> {
        let all = [&["--data=corpus.txt", "--seq-length=16"], flags].concat();
        let splits = Settings::resolve(command_line(&all).unwrap()).and_then(|settings| settings.splits());
        let pair = |split: &Settings| (split.per_device_train_batch_size, split.gradient_accumulation_steps.unwrap_or(0));
        splits.map(|splits| splits.iter().map(pair).collect()).map_err(|e| e.to_string())
    }

    #[test]
    fn all_divisions_that_agree_with_the_settings_the_largest_micro_batch_first() {
        assert_eq!(splits(&["--tokens-per-step=192"]).unwrap(), [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]);
        assert_eq!(splits(&["--tokens-per-step=192", "--gpus=2"]).unwrap(), [(6, 1), (3, 2), (2, 3), (1, 6)]);
        assert_eq!(splits(&["--tokens-per-step=192", "--gradient-shares=4"]).unwrap(), [(3, 4), (1, 12)]);
        assert_eq!(splits(&["--tokens-per-step=192", "--per-device-train-batch-size=4"]).unwrap(), [(4, 3)]);
        assert_eq!(splits(&["--tokens-per-step=192", "--gradient-accumulation-steps=2"]).unwrap(), [(6, 2)]);
        // The default of a flag does not count as a given value.
        assert_eq!(splits(&[]).unwrap(), [(8, 0)]);
        assert_eq!(splits(&["--tokens-per-step=16"]).unwrap(), [(1, 1)]);
        assert!(splits(&["--tokens-per-step=1099511627776"]).unwrap().iter().all(|(batch, steps)| batch * 16 < 1 << 31 && *steps <= 1024));
    }

    #[test]
    fn indivisible_tokens_per_step_are_refused_with_their_divisor() {
        let refused = [
            (&["--tokens-per-step=0"][..], "must be from 1 to"),
            (&["--tokens-per-step=9223372036854775807"], "must be from 1 to"),
            (&["--tokens-per-step=100"], "not a multiple of the sequence length, 16"),
            (&["--tokens-per-step=48", "--gpus=2"], "16 times --gpus 2"),
            (&["--tokens-per-step=64", "--per-device-train-batch-size=3"], "4 sequences on each GPU cannot be cut as asked for by --per"),
            (&["--tokens-per-step=64", "--per-device-train-batch-size=8"], "batch-size 8"),
            (&["--tokens-per-step=64", "--gradient-accumulation-steps=3"], "accumulation-steps 3"),
            (&["--tokens-per-step=64", "--per-device-train-batch-size=1", "--gradient-accumulation-steps=2"], "size 1 and --gradient-acc"),
            (&["--tokens-per-step=64", "--gradient-shares=3"], "--gradient-shares 3"),
            (&["--tokens-per-step=549755813392"], "cannot be cut into 1 to 1024 micro-batches"),
        ];
        for (flags, words) in refused {
            let message = splits(flags).unwrap_err();
            assert!(message.starts_with("--tokens-per-step") && message.contains(words), "{flags:?}: {message}");
        }
    }
}
