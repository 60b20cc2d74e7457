//! Losses other than the cross-entropy of tokens. Each makes a scale for the gradient of every row of the head, from the log-probabilities of
//! all rows of a micro-batch and a list of numbers behind its other arrays.

use crate::pair_loss::{PAIR_TOKENS_MIN, PAIR_WORDS, PairLoss, PairLossKind, PairMetrics, SUM_WORDS};
use crate::policy_loss::{PolicyLoss, PolicyLossKind, PolicyMetrics, TOKEN_WORDS};
use crate::teacher_loss::{ENTRY_WORDS, TeacherLoss, TeacherLossKind, TeacherMetrics};
use clap::ValueEnum;
use clap::builder::PossibleValue;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Numbers that a step reports of a loss of this kind at most, the loss first.
pub(crate) use crate::pair_loss::REPORT_WORDS;

/// Formula of a loss other than the cross-entropy of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ObjectiveKind {
    /// A loss of pairs of answers.
    Pairs(PairLossKind),
    /// A loss of sampled completions.
    Policy(PolicyLossKind),
    /// A loss of distillation.
    Teacher(TeacherLossKind),
}

/// A loss other than the cross-entropy of tokens, with its coefficients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Objective {
    /// A loss of pairs of answers.
    Pairs(PairLoss),
    /// A loss of sampled completions.
    Policy(PolicyLoss),
    /// A loss of distillation.
    Teacher(TeacherLoss),
}

/// Means over a step or an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ObjectiveMetrics {
    /// Means over pairs of answers.
    Pairs(PairMetrics),
    /// Means over the tokens of completions.
    Policy(PolicyMetrics),
    /// Means over trained tokens.
    Teacher(TeacherMetrics),
}

impl ValueEnum for ObjectiveKind {
    fn value_variants<'a>() -> &'a [Self] {
        use {ObjectiveKind::*, PairLossKind::*, PolicyLossKind::*, TeacherLossKind::*};
        &[
            Pairs(Dpo),
            Pairs(Hinge),
            Pairs(Ipo),
            Pairs(Robust),
            Pairs(ApoZero),
            Pairs(ApoDown),
            Pairs(SigmoidNorm),
            Pairs(Simpo),
            Pairs(Cpo),
            Pairs(Orpo),
            Policy(Dapo),
            Policy(Grpo),
            Policy(DrGrpo),
            Teacher(Distill),
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Pairs(kind) => kind.to_possible_value(),
            Self::Policy(kind) => kind.to_possible_value(),
            Self::Teacher(kind) => kind.to_possible_value(),
        }
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pairs(loss) => write!(f, "{loss:?}"),
            Self::Policy(loss) => write!(f, "{loss:?}"),
            Self::Teacher(loss) => write!(f, "{loss:?}"),
        }
    }
}

impl Objective {
    /// Words of the list of a micro-batch of `rows` rows of `seq_length` tokens.
    pub(crate) fn list_words(&self, (rows, seq_length): (usize, usize)) -> usize {
        match self {
            Self::Pairs(_) => rows * (seq_length / PAIR_TOKENS_MIN) * PAIR_WORDS,
            Self::Policy(_) => rows * seq_length * TOKEN_WORDS,
            Self::Teacher(loss) => rows * seq_length * loss.top_k * ENTRY_WORDS,
        }
    }

    /// Whether the loss compares log-probabilities with those of a reference, which the engine computes before step 0 unless the data has them.
    pub(crate) fn has_reference(&self) -> bool {
        match self {
            Self::Pairs(loss) => loss.kind.has_reference(),
            Self::Policy(loss) => loss.has_reference(),
            Self::Teacher(_) => false,
        }
    }

    /// Words of the numbers of a reference of a micro-batch of `rows` rows of `seq_length` tokens, as the engine keeps them on the host: two
    /// sums for each place of pairs, or the list of tokens; 0 without a reference.
    pub(crate) fn reference_words(&self, (rows, seq_length): (usize, usize)) -> usize {
        match self {
            _ if !self.has_reference() => 0,
            Self::Pairs(_) => rows * (seq_length / PAIR_TOKENS_MIN) * SUM_WORDS,
            Self::Policy(_) => self.list_words((rows, seq_length)),
            Self::Teacher(_) => 0,
        }
    }

    /// The metrics in the numbers that a step reports.
    pub(crate) fn metrics(&self, reported: [f64; REPORT_WORDS]) -> ObjectiveMetrics {
        match self {
            Self::Pairs(_) => ObjectiveMetrics::Pairs(PairMetrics::of(reported)),
            Self::Policy(loss) => ObjectiveMetrics::Policy(loss.metrics(reported)),
            Self::Teacher(loss) => ObjectiveMetrics::Teacher(loss.metrics(reported)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// A loss of pairs.
    pub(crate) const DPO: Objective =
        Objective::Pairs(PairLoss { kind: PairLossKind::Dpo, beta: 0.1, label_smoothing: 0.0, margin: 0.5, alpha: 0.0 });

    /// A loss of sampled completions.
    pub(crate) fn policy(kind: PolicyLossKind) -> Objective {
        Objective::Policy(PolicyLoss { kind, epsilon: 0.2, epsilon_high: 0.3, beta: 0.0, max_completion_length: 16 })
    }

    /// A loss of distillation.
    pub(crate) const DISTILL: Objective = Objective::Teacher(TeacherLoss { kd_ratio: 0.5, top_k: 2 });

    #[test]
    fn every_kind_of_loss_is_a_value_of_the_flag() {
        let names = |kinds: &[PossibleValue]| kinds.iter().map(|kind| kind.get_name().to_string()).collect::<Vec<_>>();
        let all: Vec<_> = ObjectiveKind::value_variants().iter().filter_map(ValueEnum::to_possible_value).collect();
        let pairs = PairLossKind::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let policy = PolicyLossKind::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let teacher = TeacherLossKind::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        assert_eq!(names(&all), names(&pairs.chain(policy).chain(teacher).collect::<Vec<_>>()));
        for kind in ObjectiveKind::value_variants() {
            let name = kind.to_possible_value().unwrap().get_name().to_string();
            assert_eq!(json!(kind), json!(name));
        }
        assert_eq!(serde_json::from_value::<ObjectiveKind>(json!("dr_grpo")).unwrap(), ObjectiveKind::Policy(PolicyLossKind::DrGrpo));
    }

    #[test]
    fn a_loss_survives_its_record() {
        for loss in [DPO, policy(PolicyLossKind::Dapo), DISTILL] {
            assert_eq!(serde_json::from_value::<Objective>(json!(loss)).unwrap(), loss);
        }
    }
}
