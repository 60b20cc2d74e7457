//! The recipe of a run: all choices that decide the bits of its weights.
//!
//! Two runs with equal recipes, data and initial weights end with equal weights, wherever their states, weights and activations lie. The
//! parts of a plan that only decide places and times are not here. [`difference`] walks over all fields once; the record in checkpoints
//! ([`record`]), the facts that processes compare, and the check of a change of placement derive from that walk.

pub(crate) mod difference;
pub(crate) mod part;
pub(crate) mod record;
#[cfg(test)]
pub(crate) mod tests;

use crate::data::rows::batch;
use crate::data::rows::hold_out::EvalSplit;
use crate::data::rows::row_rules::{Overlong, Packing};
use crate::device::{Attention, DeviceKind, ExpertProducts, LongSums};
use crate::dtype::Dtype;
use crate::faults::Injection;
use crate::model::activations::LossTile;
use crate::model::head_rows::HeadRows;
use crate::model::shape::ModelShape;
use crate::objective::{Objective, REPORT_WORDS};
use crate::optim::adam::AdamHyper;
use crate::optim::moments::Moments;
use crate::optim::optimizer::Optimizer;
use crate::optim::schedule::{LrSchedule, LrScheduler, TrainLength};
use std::sync::Arc;

/// All choices that decide the bits of a run's weights, besides the contents of its data and its initial weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// The model.
    pub model: Arc<ModelShape>,
    /// How documents become rows, and their order.
    pub rows: RowOrder,
    /// How a step is cut.
    pub step: StepShape,
    /// Formats, kernels and tiles.
    pub numerics: Numerics,
    /// The loss of pairs or of sampled completions; `None` for the cross-entropy of tokens.
    pub objective: Option<Objective>,
    /// Hyperparameters of Adam. The learning rate is that at the peak of the schedule.
    pub optimizer: AdamHyper,
    /// Course of the learning rate.
    pub schedule: Schedule,
    /// Norm above which gradients are clipped; 0 never clips.
    pub max_grad_norm: f64,
    /// Coefficient of the load-balancing loss of experts; 0 disables it.
    pub router_aux_loss_coef: f64,
    /// Values written into gradients, to test the engine.
    pub inject: Vec<Injection>,
}

/// How documents become rows, and the order in which steps read them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowOrder {
    /// How documents become rows.
    pub packing: Packing,
    /// Treatment of documents that are longer than a row.
    pub overlong: Overlong,
    /// Largest number of tokens of an answer of a pair with its prompt; `None` if the data has no pairs.
    pub pair_length: Option<usize>,
    /// Documents that are held out for evaluation.
    pub held_out: Option<EvalSplit>,
    /// Whether rows are shuffled in each epoch; otherwise they are read in the order of files.
    pub shuffled: bool,
    /// Seed of the order of rows, and of random initial weights.
    pub seed: u64,
}

/// How a step is cut into micro-batches and gradient shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Tokens of a sequence, over all ranks that share it.
    pub seq_length: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Gradient shares of a step, each of equally many consecutive micro-batches. Gradients of one share accumulate in the format of
    /// weights, the shares in fp32.
    pub shares: usize,
    /// Consecutive shares that are summed and rounded to the format of weights before the groups are summed; 1 without rounding.
    pub group: usize,
    /// Consecutive ranks that share each sequence.
    pub sequence_ranks: usize,
}

/// Formats, kernels and tiles of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numerics {
    /// Format of weights, activations and gradients on the device.
    pub dtype: Dtype,
    /// Format of logits: that of the weights or float32.
    pub logits_dtype: Dtype,
    /// Whether the matrix products of layers are computed in FP8.
    pub fp8: bool,
    /// Format of the optimizer's moments.
    pub moments: Moments,
    /// Implementation of attention.
    pub attention: Attention,
    /// Implementation of the matrix products of experts.
    pub experts: ExpertProducts,
    /// How long sums of products are computed.
    pub long_sums: LongSums,
    /// Rows that the head computes.
    pub head_rows: HeadRows,
    /// Tile of the loss. It is smaller than the usual tile if that one does not fit.
    pub loss_tile: LossTile,
    /// Queries and keys of a block of the first layer's attention backward pass; `None` if it runs in one piece.
    pub attention_block: Option<usize>,
    /// Tokens of a tile of the MLP; `None` if it runs in one piece.
    pub mlp_tile: Option<usize>,
    /// Kind of device that computes the passes.
    pub device: DeviceKind,
    /// Terms of a block of long fp32 sums on the CPU; `None` on a GPU, whose kernels and libraries have orders of their own.
    pub sum_block: Option<usize>,
    /// Whether failed speculations are undone algebraically, which loses bits.
    pub inverse_rollback: bool,
}

/// Length of training, and course of the learning rate. The number of steps in an epoch is known with the data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Length of training.
    pub length: TrainLength,
    /// Shape after the warm-up.
    pub scheduler: LrScheduler,
    /// Steps of warm-up; 0 if the ratio decides.
    pub warmup_steps: u64,
    /// Fraction of all steps for warm-up, if the number of steps is 0.
    pub warmup_ratio: f64,
}

impl Recipe {
    /// Whether rows hold several documents that attention must separate.
    pub fn separates_documents(&self) -> bool {
        self.rows.packing == Packing::Bfd
    }

    /// Words of a micro-batch, or of its part on each of `ranks` ranks that share its rows.
    pub(crate) fn batch_words(&self, ranks: usize) -> usize {
        let rows = (self.step.micro_batch, self.step.seq_length);
        batch::part_words(rows, ranks, self.separates_documents()) + self.list_words()
    }

    /// Words of the list of a micro-batch; 0 for the cross-entropy of tokens.
    pub(crate) fn list_words(&self) -> usize {
        self.objective.map_or(0, |objective| objective.list_words((self.step.micro_batch, self.step.seq_length)))
    }

    /// Numbers that each partial sum reports: the loss, and those of the objective.
    pub(crate) fn report_words(&self) -> usize {
        self.objective.map_or(1, |_| REPORT_WORDS)
    }

    /// The optimizer, with the formats of its state.
    pub(crate) fn optimizer(&self) -> Optimizer {
        Optimizer::AdamW { hyper: self.optimizer, moments: self.numerics.moments }
    }

    /// The learning rates of a run of `max_steps`.
    pub(crate) fn lr_schedule(&self, max_steps: u64) -> LrSchedule {
        let (scheduler, warmup_steps) = (self.schedule.scheduler, self.schedule.warmup(max_steps));
        LrSchedule { scheduler, peak_lr: self.optimizer.lr, warmup_steps, max_steps }
    }
}

impl StepShape {
    /// Tokens of an optimizer step.
    pub fn tokens(&self) -> usize {
        self.micro_batch * self.seq_length * self.micro_batches
    }

    /// Tokens of a micro-batch on one rank.
    pub(crate) fn tokens_of_rank(&self) -> usize {
        self.micro_batch.saturating_mul(self.seq_length) / self.sequence_ranks
    }

    /// Micro-batches of each of `parts` equal parts of a step, if a micro-batch counts once for each rank that shares it.
    pub(crate) fn micro_batches_each(&self, parts: usize) -> usize {
        self.micro_batches * self.sequence_ranks / parts
    }
}

impl Schedule {
    /// Steps of warm-up in a run of `max_steps`, as Hugging Face counts them: the ratio rounds up, and steps win over it.
    pub(crate) fn warmup(&self, max_steps: u64) -> u64 {
        if self.warmup_steps > 0 { self.warmup_steps } else { (self.warmup_ratio * max_steps as f64).ceil() as u64 }
    }
}
