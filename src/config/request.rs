//! The request of settings: the one place where settings are bound to a recipe, to the choices that a search may vary, and to the site.

use super::options::{MatmulDtype, Rollback, TrainDtype};
use super::settings::Settings;
use crate::data::rows::row_rules::{NumberRules, RowRules};
use crate::device::{Attention, DeviceKind, ExpertProducts, LongSums};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::model::activations::LossTile;
use crate::model::freeze::FreezeRules;
use crate::model::head_rows::HeadRows;
use crate::model::shape::ModelShape;
use crate::objective::{Objective, ObjectiveKind};
use crate::optim::adam::AdamHyper;
use crate::pair_loss::{PairLoss, PairLossKind};
use crate::policy_loss::PolicyLoss;
use crate::recipe::{Numerics, Recipe, RowOrder, Schedule};
use crate::request::cut::{StepCut, StepSplit};
use crate::request::wanted::Wanted;
use crate::request::{KernelChoices, Request, SiteRequest};
use crate::simulate::saves::SaveSchedule;
use crate::teacher_loss::{TOP_K_MAX, TeacherLoss};
use std::path::Path;
use std::sync::Arc;

impl Settings {
    /// The request for a plan of a run with these settings of the model `shape`.
    pub fn request(&self, shape: &ModelShape) -> Request {
        Request {
            recipe: self.recipe(shape),
            kernels: self.kernels(),
            cut: self.cut(),
            strategy: self.strategy,
            early_rows: self.early_rows,
            site: self.site(),
            wanted: self.wanted(),
        }
    }

    /// `shape` with the format and the frozen tensors that these settings choose. `dir` is the model's directory, if it has one.
    ///
    /// # Errors
    /// Errors of [`ModelShape::freezing`] and of [`Settings::trained_ids`].
    pub(crate) fn freezing(&self, shape: ModelShape, dir: Option<&Path>) -> Result<ModelShape> {
        let tokens = self.trained_ids(shape.vocab, dir)?;
        let rules = FreezeRules { freeze: &self.freeze, train_only: &self.train_only, tokens: tokens.as_ref() };
        shape.computing_in(self.weight_dtype()).freezing(rules)
    }

    /// Format of weights, activations and gradients on the device.
    pub(crate) fn weight_dtype(&self) -> Dtype {
        match self.dtype {
            TrainDtype::Bfloat16 => Dtype::Bfloat16,
            TrainDtype::Float16 => Dtype::Float16,
            TrainDtype::Float32 => Dtype::Float32,
        }
    }

    /// The saves of a run on a disk that takes `save_rate`; `None` if no rate is set.
    pub(crate) fn save_schedule(&self) -> Option<SaveSchedule> {
        self.save_rate.filter(|rate| rate.0 > 0).map(|rate| SaveSchedule { bytes_per_s: rate.0 as f64, every: self.save_steps })
    }

    /// Bytes that saves may write in a second; 0: no limit.
    pub(crate) fn save_limit(&self) -> u64 {
        self.save_rate.map_or(0, |rate| rate.0)
    }

    pub(super) fn kernels(&self) -> KernelChoices {
        KernelChoices {
            attention: self.attention,
            deterministic: !self.nondeterministic,
            experts: self.expert_products,
            head_rows: self.head_rows,
            logits_dtype: self.logits_dtype,
            loss_tile: self.loss_tile,
            long_sums: self.long_sums,
        }
    }

    /// The recipe. The plan replaces its step, kernels, tiles and device, with the order of the device's sums.
    fn recipe(&self, shape: &ModelShape) -> Recipe {
        Recipe {
            model: Arc::new(shape.clone()),
            rows: self.row_order(),
            step: self.cut().shape(self.split()),
            numerics: Numerics {
                dtype: self.weight_dtype(),
                logits_dtype: self.weight_dtype(),
                fp8: self.matmul_dtype == Some(MatmulDtype::Fp8),
                moments: self.moments,
                attention: Attention::Plain,
                experts: ExpertProducts::Own,
                long_sums: LongSums::Library,
                head_rows: HeadRows::All,
                loss_tile: LossTile { rows: 1, vocab: shape.vocab, tail: 0 },
                attention_block: None,
                mlp_tile: None,
                device: DeviceKind::Cpu,
                sum_block: None,
                inverse_rollback: self.rollback == Rollback::Inverse,
            },
            objective: self.objective(),
            optimizer: AdamHyper {
                lr: self.learning_rate,
                beta1: self.adam_beta1,
                beta2: self.adam_beta2,
                eps: self.adam_epsilon,
                weight_decay: self.weight_decay,
            },
            schedule: self.schedule(),
            max_grad_norm: self.max_grad_norm,
            router_aux_loss_coef: self.router_aux_loss_coef,
            inject: self.inject.clone(),
        }
    }

    /// How the data becomes rows.
    pub(crate) fn row_rules(&self) -> RowRules {
        let numbers = |objective| match objective {
            Objective::Pairs(_) => None,
            Objective::Policy(loss) => Some(NumberRules::Rollouts { needs_reference: loss.has_reference() }),
            Objective::Teacher(loss) => Some(NumberRules::Teacher { top_k: loss.top_k }),
        };
        let Self { seq_length, packing, overlong, .. } = *self;
        let (pair_length, numbers) = (self.pair_length(), self.objective().and_then(numbers));
        let trains_prompts = matches!(self.loss, Some(ObjectiveKind::Pairs(kind)) if kind.trains_prompts());
        RowRules { seq_length, packing, overlong, pair_length, trains_prompts, numbers }
    }

    /// The loss of pairs, of completions or of a teacher; `None` for the cross-entropy of tokens. The defaults are those of TRL.
    fn objective(&self) -> Option<Objective> {
        let Self { beta, label_smoothing, simpo_gamma, cpo_alpha, epsilon, epsilon_high, max_completion_length, .. } = *self;
        let Self { kd_ratio, loss_top_k, .. } = *self;
        let alpha = |kind| match kind {
            PairLossKind::Cpo => cpo_alpha.unwrap_or(1.0),
            PairLossKind::Simpo => cpo_alpha.unwrap_or(0.0),
            PairLossKind::Orpo => 1.0,
            _ => 0.0,
        };
        let loss = |kind| match kind {
            ObjectiveKind::Pairs(kind) => Objective::Pairs(PairLoss {
                kind,
                beta: beta.unwrap_or(0.1),
                label_smoothing: label_smoothing.unwrap_or(0.0),
                margin: simpo_gamma.unwrap_or(0.5),
                alpha: alpha(kind),
            }),
            ObjectiveKind::Policy(kind) => Objective::Policy(PolicyLoss {
                kind,
                epsilon: epsilon.unwrap_or(0.2),
                epsilon_high: epsilon_high.or(epsilon).unwrap_or(0.2),
                beta: beta.unwrap_or(0.0),
                max_completion_length: max_completion_length.unwrap_or(512),
            }),
            ObjectiveKind::Teacher(_) => {
                Objective::Teacher(TeacherLoss { kd_ratio: kd_ratio.unwrap_or(1.0), top_k: loss_top_k.unwrap_or(TOP_K_MAX) })
            }
        };
        self.loss.map(loss)
    }

    /// Largest number of tokens of an answer of a pair with its prompt; `None` if the data has no pairs.
    pub(super) fn pair_length(&self) -> Option<usize> {
        let is_of_pairs = matches!(self.loss, Some(ObjectiveKind::Pairs(_)));
        is_of_pairs.then(|| self.pair_length.unwrap_or(self.seq_length / 2))
    }

    fn row_order(&self) -> RowOrder {
        let Self { packing, overlong, eval_split: held_out, no_shuffle, seed, .. } = *self;
        RowOrder { packing, overlong, pair_length: self.pair_length(), held_out, shuffled: !no_shuffle, seed }
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

    /// The cut of steps.
    pub(crate) fn cut(&self) -> StepCut {
        StepCut {
            gpus: self.gpus,
            processes: self.processes,
            seq_length: self.seq_length,
            sequence_ranks: self.sequence_ranks,
            shares: self.gradient_shares,
            group: self.gradient_group,
            tokens: self.tokens_per_step,
            is_batch_open: self.is_batch_open,
        }
    }

    /// The split of a step.
    pub(crate) fn split(&self) -> StepSplit {
        StepSplit { micro_batch: self.per_device_train_batch_size, accumulation: self.gradient_accumulation_steps }
    }

    /// These settings with the split of a plan, if they leave it to the plan.
    pub(crate) fn settled(&self, StepSplit { micro_batch, accumulation }: StepSplit) -> Self {
        if self.tokens_per_step.is_none() {
            return self.clone();
        }
        Self { per_device_train_batch_size: micro_batch, gradient_accumulation_steps: accumulation, ..self.clone() }
    }

    pub(super) fn site(&self) -> SiteRequest {
        SiteRequest {
            all_gpus: self.all_gpus,
            transport: self.transport,
            memory: self.memory,
            hbm_limit: self.hbm_limit,
            host_limit: self.host_limit,
            save_memory: self.save_memory,
            isa: self.isa,
            cuda_libraries: self.cuda_libraries.clone(),
            data_bytes: self.data_bytes,
            rank_faults: self.faults.clone(),
            adversary: self.adversary,
        }
    }

    fn wanted(&self) -> Wanted {
        Wanted {
            split: self.split(),
            activations: self.activations,
            weights: self.weights,
            layer_order: self.layer_order,
            resident_buckets: self.resident_buckets,
            masters: self.masters,
            bucket_mib: self.bucket_mib,
            cast: self.cast,
            threads: self.threads,
            slots: self.slots,
            without: self.without.clone(),
        }
    }

    /// Micro-batches of a step, on all GPUs together.
    pub(crate) fn micro_batches(&self) -> usize {
        self.cut().micro_batches(self.split())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::tests::{command_line, sample_options};
    use crate::config::settings::{FEEDS, Feeds};
    use crate::policy_loss::PolicyLossKind;
    use crate::teacher_loss::TeacherLossKind;

    fn splits(flags: &[&str]) -> std::result::Result<Vec<(usize, usize)>, String> {
        let all = [&["--data=corpus.txt", "--seq-length=16"], flags].concat();
        let splits = Settings::resolve(command_line(&all).unwrap()).and_then(|settings| settings.cut().splits(settings.split()));
        let pair = |split: &StepSplit| (split.micro_batch, split.accumulation.unwrap_or(0));
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

    /// A setting of the recipe or of the placement changes that part of the request, and inputs and the run change nothing in it.
    #[test]
    fn each_setting_feeds_the_part_of_its_column() {
        let shape = ModelShape::demo();
        for flag in crate::config::settings::tests::flags() {
            let name = flag.get_id().as_str().replace('-', "_");
            let Some((_, feeds)) = FEEDS.iter().find(|(key, _)| *key == name) else { continue };
            let options = sample_options(&flag);
            let is_of_pairs = ["beta", "label_smoothing", "simpo_gamma", "pair_length"].contains(&name.as_str());
            let is_of_completions = ["epsilon", "epsilon_high", "max_completion_length"].contains(&name.as_str());
            let completions = is_of_completions.then_some(ObjectiveKind::Policy(PolicyLossKind::Dapo));
            let is_of_teacher = ["kd_ratio", "loss_top_k"].contains(&name.as_str());
            let teacher = is_of_teacher.then_some(ObjectiveKind::Teacher(TeacherLossKind::Distill));
            let cpo = (name == "cpo_alpha").then_some(ObjectiveKind::Pairs(PairLossKind::Cpo));
            let loss = is_of_pairs.then_some(ObjectiveKind::Pairs(PairLossKind::Dpo)).or(cpo).or(completions).or(teacher);
            let base = Settings { loss, ..Settings::default() };
            let mut settings = base.clone();
            settings.take(options);
            let (was, is) = (base.request(&shape), settings.request(&shape));
            let recipe = was.recipe != is.recipe || was.kernels != is.kernels || was.cut != is.cut;
            let wanted = was.wanted != is.wanted || was.strategy != is.strategy || was.early_rows != is.early_rows;
            match feeds {
                Feeds::Recipe => assert!(recipe && !wanted, "{name}"),
                Feeds::Wanted => assert!(wanted, "{name}"),
                Feeds::Site => assert!(!wanted, "{name}"),
                Feeds::Inputs | Feeds::Run => assert_eq!(was, is, "{name}"),
            }
        }
    }
}
