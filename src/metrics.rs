//! Metrics of a run, one JSON object a step, and its memory use.

use crate::engine::memory::expert_rows::ExpertLoad;
use crate::engine::protocol::coordinator::Counts;
use crate::hardware::parse::meminfo_bytes;
use crate::memory::MemorySpace;
use crate::objective::ObjectiveMetrics;
use crate::pair_loss::PairMetrics;
use crate::planner::plan::Plan;
use crate::policy_loss::PolicyMetrics;
use crate::teacher_loss::TeacherMetrics;
use std::collections::BTreeMap;
use std::fmt;

/// Bytes by class, the sum over all ranks.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct MemoryUse {
    /// Planned on the device, by class.
    pub(crate) device_bytes: BTreeMap<&'static str, u64>,
    /// Planned in pinned host memory, by class.
    pub(crate) host_bytes: BTreeMap<&'static str, u64>,
    /// Resident set of the process as the kernel reports it; 0 if it does not.
    pub(crate) rss_bytes: u64,
}

impl MemoryUse {
    /// Planned bytes of each class of `plan`, and the current resident set of the process.
    pub(crate) fn of(plan: &Plan) -> Self {
        let at = |space| plan.forecast.memory.iter().filter(|m| m.space == space).map(|m| (m.name, m.bytes as u64)).collect();
        Self { device_bytes: at(MemorySpace::Device), host_bytes: at(MemorySpace::Host), rss_bytes: rss_bytes() }
    }
}

/// One training step.
#[derive(Clone, Debug, serde::Serialize)]
pub struct StepMetrics {
    /// Training step, from 1; skipped steps count.
    pub step: u64,
    /// Passes over the data, including the fraction.
    pub epoch: f64,
    /// Mean loss over the step's tokens.
    pub loss: f32,
    /// Gradient norm before clipping; null when a gradient was not finite.
    pub grad_norm: Option<f64>,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Factor on the loss.
    pub loss_scale: f32,
    /// `commit`, `clip` or `skip`.
    pub verdict: &'static str,
    /// Wall time of the step.
    pub step_ms: f64,
    /// Wall time of a change of plan before this step; 0 without one.
    pub replan_ms: f64,
    /// Time since the line before in which training waited for a save; 0 without one.
    pub save_wait_ms: f64,
    /// Real tokens (no padding) per second.
    pub tokens_per_second: f64,
    /// Model FLOPs, as [`FLOPS_FORMULA`](crate::model::flops::FLOPS_FORMULA) counts them, over wall time.
    pub model_tflops: f64,
    /// Bucket steps since the last line, of all ranks. Each rank steps its slice of every bucket.
    #[serde(flatten)]
    pub counts: Counts,
    /// Idle time of compute because the optimizer was not done, or held the slots that gradients needed.
    pub exposed_cpu_ms: f64,
    /// Idle time of compute because a copy was not done.
    pub exposed_transfer_ms: f64,
    /// Idle time of compute because other ranks were not ready. With several ranks, each of these times is the maximum over the ranks.
    pub exposed_peer_ms: f64,
    /// The rank that waited longest for other ranks; null if none waited.
    pub exposed_peer_rank: Option<usize>,
    /// Bytes copied to host memory since the last line, over the links of all ranks.
    pub d2h_bytes: u64,
    /// Bytes copied to the devices since the last line, over the links of all ranks.
    pub h2d_bytes: u64,
    /// Means over the pairs, completions or trained tokens of the step; omitted for the cross-entropy of tokens.
    #[serde(flatten)]
    pub objective: Option<ObjectiveLine>,
    /// How evenly the step's rows were distributed to experts; omitted if the model has none.
    #[serde(flatten)]
    pub expert_load: Option<ExpertLoad>,
    /// Resident set of the process as the kernel reports it; 0 if it does not.
    pub rss_bytes: u64,
}

/// Means over pairs of answers, by the names of TRL.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct PairLine {
    /// Reward of the chosen answer: beta times the log-ratio of model and reference.
    #[serde(rename = "rewards/chosen")]
    pub reward_chosen: f64,
    /// Reward of the rejected answer.
    #[serde(rename = "rewards/rejected")]
    pub reward_rejected: f64,
    /// Difference of these rewards.
    #[serde(rename = "rewards/margins")]
    pub margin: f64,
    /// Fraction of pairs whose chosen answer has the larger reward.
    #[serde(rename = "rewards/accuracies")]
    pub accuracy: f64,
    /// Log-probability of the chosen answer.
    #[serde(rename = "logps/chosen")]
    pub logp_chosen: f64,
    /// Log-probability of the rejected answer.
    #[serde(rename = "logps/rejected")]
    pub logp_rejected: f64,
}

/// Means over the tokens of completions, by the names of TRL.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct PolicyLine {
    /// Probability now divided by that when the token was sampled.
    #[serde(rename = "sampling/importance_sampling_ratio/mean")]
    pub ratio: f64,
    /// Fraction of tokens whose ratio is clipped from below.
    #[serde(rename = "clip_ratio/low_mean")]
    pub clipped_low: f64,
    /// Fraction of tokens whose ratio is clipped from above.
    #[serde(rename = "clip_ratio/high_mean")]
    pub clipped_high: f64,
    /// Fraction of tokens whose ratio is clipped.
    #[serde(rename = "clip_ratio/region_mean")]
    pub clipped: f64,
    /// Divergence from the reference; omitted if beta is 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
}

impl PolicyLine {
    /// The names and the numbers.
    fn numbers(&self) -> Vec<(&'static str, f64)> {
        let always = [
            ("sampling/importance_sampling_ratio/mean", self.ratio),
            ("clip_ratio/low_mean", self.clipped_low),
            ("clip_ratio/high_mean", self.clipped_high),
            ("clip_ratio/region_mean", self.clipped),
        ];
        always.into_iter().chain(self.kl.map(|kl| ("kl", kl))).collect()
    }
}

/// Means over the trained tokens of a loss of distillation.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct TeacherLine {
    /// Divergence of the model from the teacher, with all tokens that the teacher does not name as one token.
    pub kl: f64,
    /// Cross-entropy of the data's tokens.
    pub cross_entropy: f64,
}

impl TeacherLine {
    /// The names and the numbers.
    fn numbers(&self) -> [(&'static str, f64); 2] {
        [("kl", self.kl), ("cross_entropy", self.cross_entropy)]
    }
}

/// Means over pairs, over the tokens of completions, or over trained tokens.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(untagged)]
pub enum ObjectiveLine {
    /// Of a loss of pairs.
    Pairs(PairLine),
    /// Of a loss of completions.
    Policy(PolicyLine),
    /// Of a loss of distillation.
    Teacher(TeacherLine),
}

impl ObjectiveLine {
    /// The names and the numbers.
    pub(crate) fn numbers(&self) -> Vec<(&'static str, f64)> {
        match self {
            Self::Pairs(line) => line.numbers().into(),
            Self::Policy(line) => line.numbers(),
            Self::Teacher(line) => line.numbers().into(),
        }
    }
}

impl From<ObjectiveMetrics> for ObjectiveLine {
    fn from(metrics: ObjectiveMetrics) -> Self {
        match metrics {
            ObjectiveMetrics::Pairs(metrics) => Self::Pairs(metrics.into()),
            ObjectiveMetrics::Policy(metrics) => Self::Policy(metrics.into()),
            ObjectiveMetrics::Teacher(TeacherMetrics { kl, cross_entropy }) => Self::Teacher(TeacherLine { kl, cross_entropy }),
        }
    }
}

impl From<PolicyMetrics> for PolicyLine {
    fn from(metrics: PolicyMetrics) -> Self {
        let PolicyMetrics { ratio, clipped_low, clipped_high, kl } = metrics;
        Self { ratio, clipped_low, clipped_high, clipped: clipped_low + clipped_high, kl }
    }
}

impl PairLine {
    /// The names and the numbers.
    fn numbers(&self) -> [(&'static str, f64); 6] {
        [
            ("rewards/chosen", self.reward_chosen),
            ("rewards/rejected", self.reward_rejected),
            ("rewards/margins", self.margin),
            ("rewards/accuracies", self.accuracy),
            ("logps/chosen", self.logp_chosen),
            ("logps/rejected", self.logp_rejected),
        ]
    }
}

impl From<PairMetrics> for PairLine {
    fn from(metrics: PairMetrics) -> Self {
        let PairMetrics { reward_chosen, reward_rejected, accuracy, logp_chosen, logp_rejected } = metrics;
        Self { reward_chosen, reward_rejected, margin: reward_chosen - reward_rejected, accuracy, logp_chosen, logp_rejected }
    }
}

/// Writes the numbers with `eval_` before their names.
fn with_eval_names<S: serde::Serializer>(objective: &Option<ObjectiveLine>, serializer: S) -> Result<S::Ok, S::Error> {
    let numbers = objective.iter().flat_map(ObjectiveLine::numbers);
    serializer.collect_map(numbers.map(|(name, number)| (format!("eval_{name}"), number)))
}

/// One evaluation.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(crate) struct EvalMetrics {
    /// Training steps done before the evaluation.
    pub step: u64,
    /// Mean loss over the counted targets.
    pub eval_loss: f64,
    /// `exp(eval_loss)`.
    pub eval_perplexity: f64,
    /// Means over all pairs or completions; omitted for the cross-entropy of tokens.
    #[serde(flatten, serialize_with = "with_eval_names")]
    pub objective: Option<ObjectiveLine>,
    /// Counted targets.
    pub eval_tokens: u64,
    /// Wall time.
    pub eval_seconds: f64,
}

/// Text that a model wrote after a prompt.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct WrittenSample {
    pub(crate) prompt: String,
    pub(crate) text: String,
}

/// The line of an evaluation, and what was written at it.
#[derive(serde::Serialize)]
pub(crate) struct EvalLine {
    #[serde(flatten)]
    pub(crate) metrics: EvalMetrics,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) samples: Vec<WrittenSample>,
}

impl fmt::Display for EvalMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, eval_loss, eval_perplexity, objective, eval_tokens, eval_seconds } = self;
        write!(f, "eval {step:>6}  loss {eval_loss:.4}  ")?;
        match objective {
            None => write!(f, "perplexity {eval_perplexity:.3}")?,
            Some(ObjectiveLine::Pairs(PairLine { margin, accuracy, .. })) => write!(f, "margin {margin:.3}  accuracy {accuracy:.3}")?,
            Some(ObjectiveLine::Teacher(TeacherLine { kl, cross_entropy })) => write!(f, "kl {kl:.4}  cross-entropy {cross_entropy:.4}")?,
            Some(ObjectiveLine::Policy(PolicyLine { ratio, clipped, .. })) => write!(f, "ratio {ratio:.3}  clipped {clipped:.3}")?,
        }
        write!(f, "  {eval_tokens} tokens in {eval_seconds:.1} s")
    }
}

/// Resident set of this process in bytes; 0 if the kernel does not report it.
pub fn rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    meminfo_bytes(&status, "VmRSS").unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_a_resident_set() {
        assert!(rss_bytes() > 1 << 20);
    }
}
