//! Numbers of completed steps, and the loss scale that follows from their verdicts.

use super::protocol::loss_scale::LossScale;
use crate::dtype::Dtype;

/// Completed steps and the current loss scale.
pub(super) struct StepCounters {
    optimizer: u64,
    train: u64,
    loss_scale: LossScale,
}

impl StepCounters {
    /// Before the first step of a run with weights of `dtype`.
    pub(super) fn new(dtype: Dtype) -> Self {
        Self { optimizer: 0, train: 0, loss_scale: LossScale::new(dtype) }
    }

    /// Completed optimizer steps; skipped steps do not count.
    pub(super) fn optimizer(&self) -> u64 {
        self.optimizer
    }

    /// Completed training steps; skipped steps count, because their data is used up.
    pub(super) fn train(&self) -> u64 {
        self.train
    }

    /// Number of the training step that is under way, or that comes next.
    pub(super) fn current(&self) -> u64 {
        self.train + 1
    }

    /// State of dynamic loss scaling.
    pub(super) fn loss_scale(&self) -> LossScale {
        self.loss_scale
    }

    /// Completes a training step, whose optimizer step may have been `skipped`.
    pub(super) fn advance(&mut self, skipped: bool) {
        self.loss_scale.update(skipped);
        self.optimizer += u64::from(!skipped);
        self.train += 1;
    }

    /// Restores the counters of a checkpoint.
    pub(super) fn resume(&mut self, train: u64, optimizer: u64, loss_scale: LossScale) {
        *self = Self { optimizer, train, loss_scale };
    }
}
