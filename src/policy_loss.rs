//! Losses of reinforcement learning on stored samples: GRPO and losses like it, with the names and formulas of TRL.
//!
//! Each token of a sampled completion has an advantage, and the log-probability that it had when it was sampled. A loss is a function of these
//! numbers and of the token's log-probability now. Everything is computed in fp64.

use serde::{Deserialize, Serialize};

/// Words of a token in the list of a micro-batch: its advantage, its log-probability when it was sampled, and that of the reference, as 32-bit
/// floats, and the number of tokens of its completion. A log-probability that is NaN is absent.
pub(crate) const TOKEN_WORDS: usize = 4;
/// Place of the log-probability of the reference in these words.
pub(crate) const REFERENCE_WORD: usize = 2;

/// Normalization of the loss of completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyLossKind {
    /// Policy gradients with clipped ratios: the mean over the tokens of all completions of a step.
    Dapo,
    /// Policy gradients with clipped ratios: the mean over completions of their means over tokens.
    Grpo,
    /// Policy gradients with clipped ratios: the sum over tokens, divided by completions and a constant length.
    #[value(alias = "dr_grpo")]
    #[serde(alias = "dr_grpo")]
    DrGrpo,
}

impl PolicyLossKind {
    /// Number of the loss in the kernel of a GPU.
    pub(crate) fn number(self) -> u32 {
        self as u32
    }

    /// Whether the loss is a mean over completions; otherwise it is a mean over tokens.
    pub(crate) fn counts_completions(self) -> bool {
        self != Self::Dapo
    }
}

/// A loss of sampled completions with its coefficients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyLoss {
    /// Normalization.
    pub kind: PolicyLossKind,
    /// The ratio of probabilities counts down to `1 - epsilon`.
    pub epsilon: f64,
    /// The ratio of probabilities counts up to `1 + epsilon_high`.
    pub epsilon_high: f64,
    /// Factor on the divergence from the reference.
    pub beta: f64,
    /// Divisor of [`PolicyLossKind::DrGrpo`], in tokens.
    pub max_completion_length: usize,
}

/// Numbers of a token of a completion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyToken {
    /// How much better than expected the completion is, or this token.
    pub advantage: f64,
    /// Log-probability when the token was sampled; NaN: that of now.
    pub old: f64,
    /// Log-probability under the reference, which a beta above 0 needs; NaN: absent.
    pub reference: f64,
    /// Tokens of the completion.
    pub tokens: f64,
}

/// The loss of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyTerms {
    /// The loss with the weight of the token in the sum over a step.
    pub loss: f64,
    /// Derivative of `loss` by the log-probability.
    pub slope: f64,
    /// Probability now divided by that when the token was sampled.
    pub ratio: f64,
    /// Whether the ratio is clipped from below, and from above.
    pub is_clipped: [bool; 2],
    /// Divergence from the reference; 0 if beta is 0.
    pub kl: f64,
}

impl PolicyTerms {
    /// Numbers that are reported of a token.
    pub(crate) fn report(&self) -> [f64; 6] {
        let [low, high] = self.is_clipped.map(|is_clipped| f64::from(u8::from(is_clipped)));
        [self.loss, self.ratio, low, high, self.kl, 1.0]
    }
}

/// Means over the tokens of completions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicyMetrics {
    /// Ratio of the probability to that when the token was sampled.
    pub ratio: f64,
    /// Fraction of tokens whose ratio is clipped from below.
    pub clipped_low: f64,
    /// Fraction of tokens whose ratio is clipped from above.
    pub clipped_high: f64,
    /// Divergence from the reference; `None` if beta is 0.
    pub kl: Option<f64>,
}

impl PolicyLoss {
    /// The weight of a token of a completion of so many tokens, in a sum that is divided by the number of tokens or completions of a step.
    fn weight(&self, tokens: f64) -> f64 {
        match self.kind {
            PolicyLossKind::Dapo => 1.0,
            PolicyLossKind::Grpo => 1.0 / tokens.max(1.0),
            PolicyLossKind::DrGrpo => 1.0 / self.max_completion_length as f64,
        }
    }

    /// Whether the loss compares log-probabilities with those of a reference.
    pub fn has_reference(&self) -> bool {
        self.beta > 0.0
    }

    /// The log-probability that the loss computes with. A loss with a reference rounds it to a 32-bit float, as that of the reference is stored:
    /// equal weights have the divergence 0.
    pub fn rounded(&self, logp: f64) -> f64 {
        if self.has_reference() { f64::from(logp as f32) } else { logp }
    }

    /// `token` with the log-probability `logp` in the place of one of the reference that the loss needs and that is absent. The pass that computes
    /// the reference meets such tokens, and no step does.
    pub fn with_reference(&self, token: PolicyToken, logp: f64) -> PolicyToken {
        let is_absent = self.has_reference() && token.reference.is_nan();
        PolicyToken { reference: if is_absent { logp } else { token.reference }, ..token }
    }

    /// The loss of a token with the log-probability `logp`.
    pub fn terms(&self, logp: f64, token: PolicyToken) -> PolicyTerms {
        let PolicyToken { advantage, old, reference, tokens } = token;
        let ratio = if old.is_nan() { 1.0 } else { libm::exp(logp - old) };
        let [least, most] = [1.0 - self.epsilon, 1.0 + self.epsilon_high];
        let (gain, clipped_gain) = (ratio * advantage, ratio.max(least).min(most) * advantage);
        let (x, difference) = if self.beta == 0.0 { (1.0, 0.0) } else { (libm::exp(reference - logp), reference - logp) };
        let divergence = x - difference - 1.0;
        let kl = divergence * ratio;
        let live = if gain <= clipped_gain { gain } else { 0.0 };
        let weight = self.weight(tokens);
        PolicyTerms {
            loss: weight * (self.beta * kl - gain.min(clipped_gain)),
            slope: weight * (self.beta * ((1.0 - x) * ratio + kl) - live),
            ratio,
            is_clipped: [ratio < least && advantage < 0.0, ratio > most && advantage > 0.0],
            kl,
        }
    }

    /// The metrics in the numbers that a step reports: sums over tokens, all divided by the same number.
    pub(crate) fn metrics(&self, [_, ratio, low, high, kl, tokens]: [f64; 6]) -> PolicyMetrics {
        let mean = |sum: f64| sum / tokens.max(f64::MIN_POSITIVE);
        let kl = (self.beta > 0.0).then(|| mean(kl));
        PolicyMetrics { ratio: mean(ratio), clipped_low: mean(low), clipped_high: mean(high), kl }
    }
}

impl PolicyToken {
    /// The words of the token.
    pub(crate) fn words([advantage, old, reference]: [f32; 3], tokens: i32) -> [i32; TOKEN_WORDS] {
        let bits = |x: f32| x.to_bits() as i32;
        [bits(advantage), bits(old), bits(reference), tokens]
    }

    /// The token in its words.
    pub(crate) fn of_words(&[advantage, old, reference, tokens]: &[i32; TOKEN_WORDS]) -> Self {
        let float = |word: i32| f64::from(f32::from_bits(word as u32));
        Self { advantage: float(advantage), old: float(old), reference: float(reference), tokens: f64::from(tokens) }
    }
}

/// The log-probability of the reference in the words of a token; `None` for words that belong to no token.
pub(crate) fn reference_of(words: &[i32; TOKEN_WORDS]) -> Option<f32> {
    let [_, _, reference, tokens] = *words;
    (tokens > 0).then(|| f32::from_bits(reference as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn loss(kind: PolicyLossKind, beta: f64) -> PolicyLoss {
        PolicyLoss { kind, epsilon: 0.2, epsilon_high: 0.28, beta, max_completion_length: 16 }
    }

    fn token(advantage: f64, old: f64) -> PolicyToken {
        PolicyToken { advantage, old, reference: -2.4, tokens: 4.0 }
    }

    #[test]
    fn slopes_are_the_derivatives_of_the_loss() {
        let step = 1e-6;
        for kind in PolicyLossKind::value_variants() {
            for (logp, old, advantage) in [(-2.0, -2.1, 1.5), (-2.0, -2.1, -1.5), (-2.0, -3.0, 1.5), (-2.0, -3.0, -1.5), (-3.0, -2.0, -0.5)]
            {
                for beta in [0.0, 0.3] {
                    let at = |by: f64| loss(*kind, beta).terms(logp + by, token(advantage, old)).loss;
                    let want = (at(step) - at(-step)) / (2.0 * step);
                    let have = loss(*kind, beta).terms(logp, token(advantage, old)).slope;
                    assert!((have - want).abs() < 1e-8, "{kind:?} {logp} {old} {advantage} {beta}: {have}, {want}");
                }
            }
        }
    }

    #[test]
    fn losses_have_the_values_of_the_formulas_of_trl() {
        let (r, d) = ((0.5f64).exp(), -0.4f64);
        let kl = (d.exp() - d - 1.0) * r;
        for (advantage, gain) in [(2.0, 1.28 * 2.0), (-2.0, -2.0 * r)] {
            for (kind, weight) in [(PolicyLossKind::Dapo, 1.0), (PolicyLossKind::Grpo, 0.25), (PolicyLossKind::DrGrpo, 1.0 / 16.0)] {
                let have = loss(kind, 0.04).terms(-2.0, token(advantage, -2.5));
                assert!((have.loss - weight * (0.04 * kl - gain)).abs() < 1e-15, "{kind:?}: {have:?}");
                assert!((have.kl - kl).abs() < 1e-15 && (have.ratio - r).abs() < 1e-15);
                assert_eq!(have.is_clipped, [false, advantage > 0.0]);
            }
        }
        assert_eq!(loss(PolicyLossKind::Dapo, 0.0).terms(-3.0, token(-1.0, -2.0)).is_clipped, [true, false]);
    }

    #[test]
    fn a_token_without_an_old_log_probability_has_the_ratio_1() {
        let have = loss(PolicyLossKind::Dapo, 0.0).terms(-2.0, PolicyToken { reference: f64::NAN, ..token(1.5, f64::NAN) });
        assert_eq!(have, PolicyTerms { loss: -1.5, slope: -1.5, ratio: 1.0, is_clipped: [false; 2], kl: 0.0 });
    }

    #[test]
    fn a_loss_with_a_reference_rounds_log_probabilities_and_takes_them_for_an_absent_reference() {
        let (logp, kind) = (-2.0 - 1e-9, PolicyLossKind::Dapo);
        assert_eq!([0.0, 0.1].map(|beta| loss(kind, beta).rounded(logp)), [logp, -2.0]);
        let absent = PolicyToken { reference: f64::NAN, ..token(1.5, -2.0) };
        let with = |beta, token| loss(kind, beta).with_reference(token, -2.0).reference;
        assert_eq!((with(0.1, absent), with(0.1, token(1.5, -2.0)), with(0.0, absent).is_nan()), (-2.0, -2.4, true));
        assert_eq!(loss(kind, 0.1).terms(-2.0, loss(kind, 0.1).with_reference(absent, -2.0)).kl, 0.0);
    }

    #[test]
    fn a_token_survives_its_words() {
        let have = PolicyToken::of_words(&PolicyToken::words([1.5, -0.25, -3.0], 7));
        assert_eq!(have, PolicyToken { advantage: 1.5, old: -0.25, reference: -3.0, tokens: 7.0 });
        assert_eq!([7, 0].map(|tokens| reference_of(&PolicyToken::words([1.5, -0.25, -3.0], tokens))), [Some(-3.0), None]);
    }
}
