//! The parts of a recipe that follow from settings alone.

use super::settings::Settings;
use crate::data::rows::row_table::RowRules;
use crate::optim::adam::AdamHyper;
use crate::recipe::{RowOrder, Schedule, StepShape};

impl Settings {
    /// How the data becomes rows.
    pub(crate) fn row_rules(&self) -> RowRules {
        RowRules { seq_length: self.seq_length, packing: self.packing, overlong: self.overlong }
    }

    /// How documents become rows, and their order.
    pub(crate) fn row_order(&self) -> RowOrder {
        let Self { packing, overlong, eval_split: held_out, no_shuffle, seed, .. } = *self;
        RowOrder { packing, overlong, held_out, shuffled: !no_shuffle, seed }
    }

    /// How a step is cut.
    pub(crate) fn step_shape(&self) -> StepShape {
        StepShape {
            micro_batch: self.per_device_train_batch_size,
            seq_length: self.seq_length,
            micro_batches: self.micro_batches(),
            shares: self.partial_sums(),
            group: self.group(),
            sequence_ranks: self.sequence_ranks,
        }
    }

    /// Hyperparameters of Adam.
    pub(crate) fn optimizer(&self) -> AdamHyper {
        AdamHyper {
            lr: self.learning_rate,
            beta1: self.adam_beta1,
            beta2: self.adam_beta2,
            eps: self.adam_epsilon,
            weight_decay: self.weight_decay,
        }
    }

    /// Length of training, and course of the learning rate.
    pub(crate) fn schedule(&self) -> Schedule {
        Schedule {
            length: self.train_length,
            scheduler: self.lr_scheduler_type,
            warmup_steps: self.warmup_steps,
            warmup_ratio: self.warmup_ratio,
        }
    }
}
