//! The cut of a requested step into micro-batches, gradient shares and groups. With a number of tokens per step, several splits are
//! possible.

use super::check::require;
use crate::error::{Error, Result};
use crate::recipe::StepShape;

/// Kernels index tokens with 32 bits.
pub(crate) const MICRO_BATCH_TOKENS_MAX: usize = i32::MAX as usize;
/// Largest number of micro-batches per step on each GPU if their number is open. Each split is simulated.
const OPEN_MAX: usize = 1024;

/// The micro-batches of each group of ranks that share sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSplit {
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches of a step in each group; `None` is one for each gradient share.
    pub accumulation: Option<usize>,
}

/// The cut of a requested step, besides its split into micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCut {
    /// Devices of each process.
    pub gpus: usize,
    /// Processes of the run.
    pub processes: usize,
    /// Tokens of a sequence.
    pub seq_length: usize,
    /// Consecutive ranks that share each sequence.
    pub sequence_ranks: usize,
    /// Gradient shares of a step; `None` is one for each rank.
    pub shares: Option<usize>,
    /// Consecutive shares with a sum that is rounded.
    pub group: Option<usize>,
    /// Tokens of a step; `None` if the split decides.
    pub tokens: Option<usize>,
    /// Whether the size of a micro-batch is open.
    pub is_batch_open: bool,
}

impl StepCut {
    /// Devices that train together, in all processes.
    pub(crate) fn ranks(&self) -> usize {
        self.gpus.saturating_mul(self.processes)
    }

    /// Gradient shares of a step. Gradients of a share's micro-batches are accumulated in the format of weights, and the shares are summed in
    /// float32. Ranks that share sequences have a share each: their parts of the same micro-batches.
    pub(crate) fn partial_sums(&self) -> usize {
        self.shares.unwrap_or(self.ranks())
    }

    /// Number of consecutive shares with a sum that is rounded before all sums are added. It is 1 without such groups, and when one group
    /// would hold all shares.
    pub(crate) fn group(&self) -> usize {
        self.group.filter(|group| *group < self.partial_sums()).unwrap_or(1)
    }

    /// Groups of ranks that share sequences. Each group computes different micro-batches.
    pub(crate) fn groups(&self) -> usize {
        self.ranks() / self.sequence_ranks.max(1)
    }

    /// Micro-batches of a step, on all GPUs together.
    pub(crate) fn micro_batches(&self, split: StepSplit) -> usize {
        let one_each = self.partial_sums() / self.sequence_ranks.max(1);
        split.accumulation.map_or(one_each, |steps| steps.saturating_mul(self.groups()))
    }

    /// The step with this `split`.
    pub(crate) fn shape(&self, split: StepSplit) -> StepShape {
        StepShape {
            micro_batch: split.micro_batch,
            seq_length: self.seq_length,
            micro_batches: self.micro_batches(split),
            shares: self.partial_sums(),
            group: self.group(),
            sequence_ranks: self.sequence_ranks,
        }
    }

    /// The number of devices that train together, in terms of flags.
    pub(crate) fn ranks_in_words(&self) -> String {
        match (self.gpus, self.processes) {
            (gpus, 1) => format!("--gpus {gpus}"),
            (1, processes) => format!("--processes {processes}"),
            (gpus, processes) => format!("--processes {processes} times --gpus {gpus}"),
        }
    }

    /// Checks the number of ranks that share sequences, without the model's number of heads. `coefficient` is that of the load-balancing
    /// loss.
    ///
    /// # Errors
    /// `Usage` that names the flag, its value and the allowed values.
    pub(crate) fn check_sequence_ranks(&self, coefficient: f64) -> Result<()> {
        let (degree, all) = (self.sequence_ranks, self.ranks_in_words());
        let is_within = self.processes == 1 || self.gpus.is_multiple_of(degree);
        require(
            is_within,
            "sequence-ranks",
            degree,
            format!("must divide --gpus {}: only GPUs of one process share sequences", self.gpus),
        )?;
        require(self.ranks().is_multiple_of(degree), "sequence-ranks", degree, format!("must divide {all}"))?;
        let length = self.seq_length;
        require(length.is_multiple_of(degree), "sequence-ranks", degree, format!("must divide --seq-length {length}"))?;
        let rule = "must be 0 with --sequence-ranks: each rank only knows the experts of its own tokens";
        require(degree == 1 || coefficient == 0.0, "router-aux-loss-coef", coefficient, rule)
    }

    /// All splits of a step that fit the given options, the largest micro-batches first. Without a number of tokens per step, `given` is the
    /// only split.
    ///
    /// # Errors
    /// `Usage` that names the tokens and the values that they do not fit.
    pub(crate) fn splits(&self, given: StepSplit) -> Result<Vec<StepSplit>> {
        let Some(tokens) = self.tokens else { return Ok(vec![given]) };
        let (seq_length, groups) = (self.seq_length, self.groups());
        if !tokens.is_multiple_of(seq_length.saturating_mul(groups)) {
            let shared = if self.sequence_ranks > 1 { format!(" / --sequence-ranks {}", self.sequence_ranks) } else { String::new() };
            let on_each = if groups > 1 { format!(" times {}{shared}", self.ranks_in_words()) } else { String::new() };
            return Err(Error::usage(format!("--tokens-per-step {tokens}: not a multiple of the sequence length, {seq_length}{on_each}")));
        }
        let sequences = tokens / seq_length / groups;
        let given_batch = Some(given.micro_batch).filter(|_| !self.is_batch_open);
        let given_steps = given.accumulation.or(given_batch.map(|batch| (sequences / batch).max(1)));
        let steps = given_steps.map_or(1..=sequences.min(OPEN_MAX), |steps| steps..=steps);
        let split = |steps: usize| {
            let micro_batch = sequences / steps;
            let is_exact = sequences.is_multiple_of(steps) && given_batch.is_none_or(|given| given == micro_batch);
            let parts = steps * groups * self.sequence_ranks;
            let is_allowed = micro_batch * seq_length <= MICRO_BATCH_TOKENS_MAX && parts.is_multiple_of(self.partial_sums());
            (is_exact && is_allowed).then_some(StepSplit { micro_batch, accumulation: Some(steps) })
        };
        let splits: Vec<_> = steps.filter_map(split).collect();
        if splits.is_empty() { Err(self.no_split(given, tokens, sequences)) } else { Ok(splits) }
    }

    fn no_split(&self, given: StepSplit, tokens: usize, sequences: usize) -> Error {
        let flags = [
            ("--per-device-train-batch-size", Some(given.micro_batch).filter(|_| !self.is_batch_open)),
            ("--gradient-accumulation-steps", given.accumulation),
            ("--gradient-shares", self.shares),
        ];
        let given: Vec<_> = flags.into_iter().filter_map(|(flag, given)| Some(format!("{flag} {}", given?))).collect();
        let why = match given.is_empty() {
            true => format!("into 1 to {OPEN_MAX} micro-batches of at most {MICRO_BATCH_TOKENS_MAX} tokens"),
            false => format!("as asked for by {}", given.join(" and ")),
        };
        Error::usage(format!("--tokens-per-step {tokens}: {sequences} sequences on each GPU cannot be cut {why}"))
    }
}
