//! Checks of the settings of a loss of pairs, of sampled completions or of a teacher.

use super::checks::check;
use super::settings::Settings;
use crate::data::chat::mask::TrainOn;
use crate::data::chat::record::DataFormat;
use crate::data::rows::row_rules::{Overlong, Packing};
use crate::describe;
use crate::error::Result;
use crate::objective::ObjectiveKind;
use crate::pair_loss::PairLossKind;
use crate::policy_loss::PolicyLossKind;
use crate::request::check::require;
use crate::request::choices::LogitsDtypeChoice;
use crate::teacher_loss::TOP_K_MAX;

/// Remedies for settings that belong to another loss.
const NEEDS_PAIRS: &str = "needs a loss of pairs, such as --loss dpo";
const NEEDS_COMPLETIONS: &str = "needs --loss dapo, grpo or dr-grpo";
const NEEDS_REFERENCE: &str = "needs a loss with a reference, such as --loss dpo";
const NEEDS_TEACHER: &str = "needs --loss distill";

impl ObjectiveKind {
    /// The format of data that the loss reads.
    pub(super) fn data_format(self) -> DataFormat {
        match self {
            Self::Pairs(_) => DataFormat::Preference,
            Self::Policy(_) => DataFormat::Rollouts,
            Self::Teacher(_) => DataFormat::Teacher,
        }
    }
}

impl Settings {
    /// The settings for the cross-entropy of tokens.
    pub(crate) fn without_objective(self) -> Self {
        let (loss, beta, label_smoothing, simpo_gamma, cpo_alpha, pair_length) = (None, None, None, None, None, None);
        let (epsilon, epsilon_high, max_completion_length, kd_ratio, loss_top_k, reference) = (None, None, None, None, None, None);
        let data_format = if self.loss.is_some() { DataFormat::Auto } else { self.data_format };
        // The format of the logits stays that of the loss.
        let logits_dtype = match self.logits_dtype {
            LogitsDtypeChoice::Auto if self.loss.is_some() => LogitsDtypeChoice::Float32,
            chosen => chosen,
        };
        Self {
            loss,
            beta,
            label_smoothing,
            simpo_gamma,
            cpo_alpha,
            pair_length,
            epsilon,
            epsilon_high,
            max_completion_length,
            kd_ratio,
            loss_top_k,
            reference,
            data_format,
            logits_dtype,
            ..self
        }
    }

    /// Checks the settings of a loss of pairs, completions or a teacher, or that there are none without it.
    pub(super) fn check_objective(&self) -> Result<()> {
        self.check_reference()?;
        let Some(loss) = self.loss else { return self.check_no_objective() };
        let name = describe::written(&describe::value(&loss));
        let format = describe::written(&describe::value(&loss.data_format()));
        require(self.sequence_ranks == 1, "loss", &name, "must be left out with --sequence-ranks: answers are not cut between GPUs")?;
        let is_read = self.data_format == loss.data_format();
        let given = describe::written(&describe::value(&self.data_format));
        require(is_read, "data-format", given, format!("must be {format} with --loss {name}"))?;
        require(self.packing == Packing::Bfd, "packing", self.packing, "must be bfd with --loss: rows hold whole answers")?;
        let whole = [TrainOn::Auto, TrainOn::Completion].contains(&self.train_on);
        let train_on = describe::written(&describe::value(&self.train_on));
        require(whole, "train-on", train_on, "must be completion with --loss: the loss is that of whole answers")?;
        let overlong = describe::written(&describe::value(&self.overlong));
        require(self.overlong == Overlong::Auto, "overlong", overlong, "must be auto with --loss")?;
        match loss {
            ObjectiveKind::Pairs(kind) => self.check_pairs(kind),
            ObjectiveKind::Policy(kind) => self.check_completions(kind),
            ObjectiveKind::Teacher(_) => self.check_teacher(),
        }
    }

    /// Checks that a run with a loss of pairs, completions or a teacher has data. Plans and benchmarks have random tokens instead.
    pub(super) fn check_data_of_objective(&self) -> Result<()> {
        let Some(loss) = self.loss else { return Ok(()) };
        let columns = match loss {
            ObjectiveKind::Pairs(_) => "needs --data with the columns chosen and rejected",
            ObjectiveKind::Policy(_) => "needs --data with the columns prompt_ids, completion_ids and advantage",
            ObjectiveKind::Teacher(_) => "needs --data with the columns input_ids, teacher_ids and teacher_probs",
        };
        require(!self.data.is_empty(), "loss", describe::written(&describe::value(&loss)), columns)
    }

    /// Checks that no setting of a loss of pairs, completions or a teacher is given.
    fn check_no_objective(&self) -> Result<()> {
        let needs = "needs --loss";
        for format in [DataFormat::Preference, DataFormat::Rollouts, DataFormat::Teacher] {
            require(self.data_format != format, "data-format", describe::written(&describe::value(&format)), needs)?;
        }
        require(self.beta.is_none(), "beta", self.beta.unwrap_or_default(), needs)?;
        self.check_no_pairs(needs)?;
        self.check_no_completions(needs)?;
        self.check_no_teacher(needs)
    }

    /// Checks that a model for the reference is given only to a loss that has one.
    fn check_reference(&self) -> Result<()> {
        let Some(reference) = &self.reference else { return Ok(()) };
        let (has_reference, remedy) = match self.loss {
            Some(ObjectiveKind::Pairs(kind)) => (kind.has_reference(), NEEDS_REFERENCE),
            Some(ObjectiveKind::Policy(_)) => (self.beta.is_some_and(|beta| beta > 0.0), "needs --beta above 0 with a loss of completions"),
            Some(ObjectiveKind::Teacher(_)) | None => (false, NEEDS_REFERENCE),
        };
        require(has_reference, "reference", reference.display(), remedy)
    }

    /// Checks that no setting is given that only losses of pairs have.
    fn check_no_pairs(&self, needs: &str) -> Result<()> {
        require(self.pair_length.is_none(), "pair-length", self.pair_length.unwrap_or_default(), needs)?;
        let numbers = [("label-smoothing", self.label_smoothing), ("simpo-gamma", self.simpo_gamma), ("cpo-alpha", self.cpo_alpha)];
        numbers.into_iter().try_for_each(|(flag, value)| require(value.is_none(), flag, value.unwrap_or_default(), needs))
    }

    /// Checks that no setting is given that only losses of completions have.
    fn check_no_completions(&self, needs: &str) -> Result<()> {
        let most = self.max_completion_length;
        require(most.is_none(), "max-completion-length", most.unwrap_or_default(), needs)?;
        let numbers = [("epsilon", self.epsilon), ("epsilon-high", self.epsilon_high)];
        numbers.into_iter().try_for_each(|(flag, value)| require(value.is_none(), flag, value.unwrap_or_default(), needs))
    }

    /// Checks that no setting is given that only a loss of a teacher has.
    fn check_no_teacher(&self, needs: &str) -> Result<()> {
        require(self.kd_ratio.is_none(), "kd-ratio", self.kd_ratio.unwrap_or_default(), needs)?;
        require(self.loss_top_k.is_none(), "loss-top-k", self.loss_top_k.unwrap_or_default(), needs)
    }

    /// Checks the settings of a loss of a teacher.
    fn check_teacher(&self) -> Result<()> {
        self.check_no_pairs(NEEDS_PAIRS)?;
        self.check_no_completions(NEEDS_COMPLETIONS)?;
        require(self.beta.is_none(), "beta", self.beta.unwrap_or_default(), "needs a loss of pairs or completions")?;
        let ratio = self.kd_ratio.unwrap_or(1.0);
        check((0.0..=1.0).contains(&ratio), "kd-ratio", ratio, "must be from 0 to 1")?;
        let top_k = self.loss_top_k.unwrap_or(TOP_K_MAX);
        require((1..=TOP_K_MAX).contains(&top_k), "loss-top-k", top_k, format!("must be from 1 to {TOP_K_MAX}"))
    }

    /// Checks the settings of a loss of pairs.
    fn check_pairs(&self, kind: PairLossKind) -> Result<()> {
        self.check_no_completions(NEEDS_COMPLETIONS)?;
        self.check_no_teacher(NEEDS_TEACHER)?;
        let (length, half) = (self.pair_length().unwrap_or_default(), self.seq_length / 2);
        let rule = format!("must be from 2 to {half}, half of --seq-length, so that a pair fits a row");
        require((2..=half).contains(&length), "pair-length", length, rule)?;
        let beta = self.beta.unwrap_or(0.1);
        check(beta.is_finite() && beta > 0.0, "beta", beta, "must be finite and above 0")?;
        let (smoothing, gamma) = (self.label_smoothing.unwrap_or_default(), self.simpo_gamma.unwrap_or_default());
        let is_robust = kind == PairLossKind::Robust;
        check(is_robust || self.label_smoothing.is_none(), "label-smoothing", smoothing, "needs --loss robust")?;
        check((0.0..0.5).contains(&smoothing), "label-smoothing", smoothing, "must be at least 0 and below 0.5")?;
        let is_simpo = kind == PairLossKind::Simpo;
        check(is_simpo || self.simpo_gamma.is_none(), "simpo-gamma", gamma, "needs --loss simpo")?;
        check(gamma.is_finite() && gamma >= 0.0, "simpo-gamma", gamma, "must be finite and at least 0")?;
        let (alpha, has_alpha) = (self.cpo_alpha.unwrap_or_default(), is_simpo || kind == PairLossKind::Cpo);
        check(has_alpha || self.cpo_alpha.is_none(), "cpo-alpha", alpha, "needs --loss cpo or simpo")?;
        check(alpha.is_finite() && alpha >= 0.0, "cpo-alpha", alpha, "must be finite and at least 0")
    }

    /// Checks the settings of a loss of completions.
    fn check_completions(&self, kind: PolicyLossKind) -> Result<()> {
        self.check_no_pairs(NEEDS_PAIRS)?;
        self.check_no_teacher(NEEDS_TEACHER)?;
        let beta = self.beta.unwrap_or_default();
        check(beta.is_finite() && beta >= 0.0, "beta", beta, "must be finite and at least 0")?;
        let (low, high) = (self.epsilon.unwrap_or_default(), self.epsilon_high.unwrap_or_default());
        check((0.0..=1.0).contains(&low), "epsilon", low, "must be from 0 to 1")?;
        check(high.is_finite() && high >= 0.0, "epsilon-high", high, "must be finite and at least 0")?;
        let (most, is_divided) = (self.max_completion_length, kind == PolicyLossKind::DrGrpo);
        require(is_divided || most.is_none(), "max-completion-length", most.unwrap_or_default(), "needs --loss dr-grpo")?;
        require(most != Some(0), "max-completion-length", 0, "must be at least 1")
    }
}
