//! Losses of pairs of answers to one prompt, of which one is preferred: DPO and losses like it, with the names and formulas of TRL.
//!
//! A loss is a function of the sums of log-probabilities of the two answers. Its derivatives by these sums give the gradient of every token,
//! because each token of an answer adds its log-probability to the answer's sum. Everything is computed in fp64.

use serde::{Deserialize, Serialize};

/// Words of a pair in the list of a micro-batch's pairs: first row of the chosen answer, first row of the rejected answer, end of the
/// rejected answer, an unused word, and the reference sums of both answers as the two halves of a 64-bit float, the lower half first.
pub(crate) const PAIR_WORDS: usize = 8;
/// Words of the two sums of a pair: a 64-bit float each, the lower half first.
pub(crate) const SUM_WORDS: usize = 4;
/// Tokens of a pair at least: each answer has a token of the prompt and a trained token.
pub(crate) const PAIR_TOKENS_MIN: usize = 4;
/// Numbers that a step reports of an objective. Of pairs they are means over the pairs: loss, rewards of both answers, fraction of pairs whose chosen answer has
/// the larger reward, and sums of log-probabilities of both answers.
pub(crate) const REPORT_WORDS: usize = 6;

/// Loss of a pair of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PairLossKind {
    /// Direct preference optimization: the log-sigmoid of the difference of rewards.
    #[value(alias = "sigmoid")]
    #[serde(alias = "sigmoid")]
    Dpo,
    /// A hinge on the difference of rewards.
    Hinge,
    /// The squared distance of the difference of mean log-ratios from a margin.
    Ipo,
    /// DPO for labels that are wrong with the probability of --label-smoothing.
    Robust,
    /// Makes chosen answers more likely and rejected answers less likely.
    #[value(alias = "apo_zero")]
    #[serde(alias = "apo_zero")]
    ApoZero,
    /// Makes both answers less likely, rejected answers more so.
    #[value(alias = "apo_down")]
    #[serde(alias = "apo_down")]
    ApoDown,
    /// DPO with mean log-ratios.
    #[value(alias = "sigmoid_norm")]
    #[serde(alias = "sigmoid_norm")]
    SigmoidNorm,
    /// The log-sigmoid of the difference of mean log-probabilities, less a margin, without a reference.
    Simpo,
    /// The log-sigmoid of the difference of log-probabilities, and the cross-entropy of the chosen answer, without a reference.
    Cpo,
    /// The log-sigmoid of the log odds ratio, and the cross-entropy of the chosen answer with its prompt, without a reference.
    Orpo,
}

impl PairLossKind {
    /// Number of the loss in the kernel of a GPU.
    pub(crate) fn number(self) -> u32 {
        self as u32
    }

    /// Whether the loss compares log-probabilities with those of a reference.
    pub(crate) fn has_reference(self) -> bool {
        !self.has_cross_entropy()
    }

    /// Whether the cross-entropy of the chosen answer may be a part of the loss.
    pub(crate) fn has_cross_entropy(self) -> bool {
        matches!(self, Self::Simpo | Self::Cpo | Self::Orpo)
    }

    /// Whether the tokens of the chosen answer's prompt are trained.
    pub(crate) fn trains_prompts(self) -> bool {
        self == Self::Orpo
    }

    /// Whether the loss is a function of mean log-probabilities, and rewards are means.
    fn has_means(self) -> bool {
        matches!(self, Self::Simpo | Self::Orpo)
    }
}

/// A loss of pairs with its coefficients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairLoss {
    /// The formula.
    pub kind: PairLossKind,
    /// Factor on log-ratios.
    pub beta: f64,
    /// Probability that a label of [`PairLossKind::Robust`] is wrong.
    pub label_smoothing: f64,
    /// Margin of [`PairLossKind::Simpo`].
    pub margin: f64,
    /// Factor on the mean cross-entropy of the chosen answer, of losses that have one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub alpha: f64,
}

fn is_zero(x: &f64) -> bool {
    *x == 0.0
}

/// The log-probabilities of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerSum {
    /// Sum over the trained tokens.
    pub sum: f64,
    /// Number of trained tokens.
    pub tokens: f64,
    /// The sum of the reference.
    pub reference: f64,
    /// Sum over the tokens of the prompt that are trained, and their number.
    pub prompt: [f64; 2],
}

/// The loss of a pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairTerms {
    pub loss: f64,
    /// Derivatives of the loss by the sums of the chosen and of the rejected answer.
    pub slopes: [f64; 2],
    /// Derivative of the loss by the sum of the chosen answer's prompt.
    pub prompt_slope: f64,
    /// Rewards of the chosen and of the rejected answer.
    pub rewards: [f64; 2],
}

impl PairTerms {
    /// The pair's contribution to the numbers that a step reports.
    pub(crate) fn report(&self, sums: [f64; 2]) -> [f64; REPORT_WORDS] {
        let [chosen, rejected] = self.rewards;
        [self.loss, chosen, rejected, f64::from(u8::from(chosen > rejected)), sums[0], sums[1]]
    }
}

/// Means over pairs of answers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairMetrics {
    /// Reward of the chosen answer: beta times the log-ratio of model and reference.
    pub reward_chosen: f64,
    /// Reward of the rejected answer.
    pub reward_rejected: f64,
    /// Fraction of pairs whose chosen answer has the larger reward.
    pub accuracy: f64,
    /// Sum of the log-probabilities of the chosen answer's tokens.
    pub logp_chosen: f64,
    /// Sum of the log-probabilities of the rejected answer's tokens.
    pub logp_rejected: f64,
}

impl PairMetrics {
    /// The metrics in the numbers that the partial sums of a step report.
    pub(crate) fn of([_, reward_chosen, reward_rejected, accuracy, logp_chosen, logp_rejected]: [f64; REPORT_WORDS]) -> Self {
        Self { reward_chosen, reward_rejected, accuracy, logp_chosen, logp_rejected }
    }
}

/// `1 / (1 + e^-x)` without overflow.
fn sigmoid(x: f64) -> f64 {
    let small = libm::exp(-x.abs());
    if x >= 0.0 { 1.0 / (1.0 + small) } else { small / (1.0 + small) }
}

/// The slope of [`sigmoid`].
fn sigmoid_slope(x: f64) -> f64 {
    let y = sigmoid(x);
    y * (1.0 - y)
}

/// `1 - e^x` for a negative x.
fn one_minus_exp(x: f64) -> f64 {
    -libm::expm1(x)
}

/// `-ln(sigmoid(x))` without overflow.
fn log_loss(x: f64) -> f64 {
    (-x).max(0.0) + libm::log1p(libm::exp(-x.abs()))
}

impl PairLoss {
    /// The loss of a pair.
    pub fn terms(&self, chosen: AnswerSum, rejected: AnswerSum) -> PairTerms {
        let Self { kind, beta, label_smoothing, margin, .. } = *self;
        let [c, r] = [chosen, rejected].map(|answer| answer.sum - answer.reference);
        let [c_tokens, r_tokens] = [chosen, rejected].map(|answer| answer.tokens.max(1.0));
        let (difference, mean_difference) = (beta * (c - r), c / c_tokens - r / r_tokens);
        let by_sums = |slope: f64| [slope, -slope];
        let by_means = |slope: f64| [slope / c_tokens, -slope / r_tokens];
        let (loss, slopes) = match kind {
            PairLossKind::Dpo | PairLossKind::Cpo => (log_loss(difference), by_sums(-beta * sigmoid(-difference))),
            PairLossKind::Hinge => ((1.0 - difference).max(0.0), by_sums(if difference < 1.0 { -beta } else { 0.0 })),
            PairLossKind::Ipo => {
                let distance = mean_difference - 1.0 / (2.0 * beta);
                (distance * distance, by_means(2.0 * distance))
            }
            PairLossKind::Robust => {
                let [right, wrong, scale] = [1.0 - label_smoothing, label_smoothing, 1.0 - 2.0 * label_smoothing];
                let loss = right * log_loss(difference) - wrong * log_loss(-difference);
                (loss / scale, by_sums(-beta * (right * sigmoid(-difference) + wrong * sigmoid(difference)) / scale))
            }
            PairLossKind::ApoZero => {
                let slopes = [-beta * sigmoid_slope(beta * c), beta * sigmoid_slope(beta * r)];
                (1.0 - sigmoid(beta * c) + sigmoid(beta * r), slopes)
            }
            PairLossKind::ApoDown => {
                let both = beta * sigmoid_slope(difference);
                (sigmoid(beta * c) + 1.0 - sigmoid(difference), [beta * sigmoid_slope(beta * c) - both, both])
            }
            PairLossKind::SigmoidNorm => {
                let x = beta * mean_difference;
                (log_loss(x), by_means(-beta * sigmoid(-x)))
            }
            PairLossKind::Simpo => {
                let x = beta * mean_difference - margin;
                (log_loss(x), by_means(-beta * sigmoid(-x)))
            }
            PairLossKind::Orpo => {
                let [c_rest, r_rest] = [c / c_tokens, r / r_tokens].map(one_minus_exp);
                let odds = mean_difference - (libm::log(c_rest) - libm::log(r_rest));
                let [c_slope, r_slope] = by_means(-beta * sigmoid(-odds));
                (beta * log_loss(odds), [c_slope / c_rest, r_slope / r_rest])
            }
        };
        let [c_length, r_length] = if kind.has_means() { [c_tokens, r_tokens] } else { [1.0; 2] };
        let terms = PairTerms { loss, slopes, prompt_slope: 0.0, rewards: [beta * c / c_length, beta * r / r_length] };
        if kind.has_cross_entropy() && self.alpha > 0.0 { self.with_cross_entropy(terms, chosen) } else { terms }
    }

    /// `terms` with the mean cross-entropy of the chosen answer.
    fn with_cross_entropy(
        &self,
        mut terms: PairTerms,
        AnswerSum { sum, tokens, prompt: [prompt, prompt_tokens], .. }: AnswerSum,
    ) -> PairTerms {
        let slope = -self.alpha / (tokens + prompt_tokens).max(1.0);
        terms.loss += slope * (sum + prompt);
        terms.slopes[0] += slope;
        terms.prompt_slope = slope;
        terms
    }

    /// The coefficient that is not a coefficient of every loss: the probability of a wrong label, or the factor on the cross-entropy.
    pub(crate) fn own_coefficient(&self) -> f64 {
        if self.kind.has_cross_entropy() { self.alpha } else { self.label_smoothing }
    }
}

/// Sums of the `words` numbers that each partial sum reports, in the order of partial sums; 0 for all other numbers.
pub(crate) fn report_sums(reported: impl Iterator<Item = f32>, words: usize) -> [f64; REPORT_WORDS] {
    let mut sums = [0.0; REPORT_WORDS];
    reported.enumerate().for_each(|(at, number)| sums[at % words] += f64::from(number));
    sums
}

/// The two words of a 64-bit float, the lower half first.
pub(crate) fn words_of(x: f64) -> [i32; 2] {
    let bits = x.to_bits();
    [bits as u32 as i32, (bits >> 32) as u32 as i32]
}

/// The 64-bit float of two words.
pub(crate) fn float_of(words: [i32; 2]) -> f64 {
    f64::from_bits(u64::from(words[0] as u32) | u64::from(words[1] as u32) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn loss(kind: PairLossKind) -> PairLoss {
        PairLoss { kind, beta: 0.3, label_smoothing: 0.2, margin: 0.5, alpha: 0.7 }
    }

    fn answer(sum: f64, tokens: f64, reference: f64) -> AnswerSum {
        AnswerSum { sum, tokens, reference, prompt: [-6.0, 2.0] }
    }

    #[test]
    fn slopes_are_the_derivatives_of_the_loss() {
        let step = 1e-6;
        for kind in PairLossKind::value_variants() {
            for (c, r) in [(-3.0, -9.5), (-9.5, -3.0), (-20.0, -2.0), (-4.0, -4.0)] {
                let [c_reference, r_reference] = if kind.has_reference() { [-5.0, -5.5] } else { [0.0; 2] };
                let [chosen, rejected] = [answer(c, 3.0, c_reference), answer(r, 7.0, r_reference)];
                let at = |dc: f64, dr: f64| {
                    let moved = |answer: AnswerSum, by| AnswerSum { sum: answer.sum + by, ..answer };
                    loss(*kind).terms(moved(chosen, dc), moved(rejected, dr)).loss
                };
                let want = [(at(step, 0.0) - at(-step, 0.0)) / (2.0 * step), (at(0.0, step) - at(0.0, -step)) / (2.0 * step)];
                let PairTerms { slopes: have, prompt_slope, .. } = loss(*kind).terms(chosen, rejected);
                let moved = |by: f64| loss(*kind).terms(AnswerSum { prompt: [-6.0 + by, 2.0], ..chosen }, rejected).loss;
                assert!((prompt_slope - (moved(step) - moved(-step)) / (2.0 * step)).abs() < 1e-8, "{kind:?}: {prompt_slope}");
                assert!(have.iter().zip(want).all(|(have, want)| (have - want).abs() < 1e-8), "{kind:?} {c} {r}: {have:?}, {want:?}");
            }
        }
    }

    /// Values of TRL 1.16's formulas in PyTorch's fp64, for the sums -3 and -9.5 of 3 and 7 tokens with the references -5 and -5.5.
    #[test]
    fn losses_and_rewards_have_the_values_of_the_formulas_of_trl() {
        let (c, r, e) = (2.0f64, -4.0f64, 0.2f64);
        let s = |x: f64| 1.0 / (1.0 + (-x).exp());
        let want = |kind: PairLossKind| match kind {
            PairLossKind::Dpo => -s(0.3 * (c - r)).ln(),
            PairLossKind::Hinge => (1.0 - 0.3 * (c - r)).max(0.0),
            PairLossKind::Ipo => (c / 3.0 - r / 7.0 - 1.0 / 0.6).powi(2),
            PairLossKind::Robust => (-(1.0 - e) * s(0.3 * (c - r)).ln() + e * s(-0.3 * (c - r)).ln()) / (1.0 - 2.0 * e),
            PairLossKind::ApoZero => 1.0 - s(0.3 * c) + s(0.3 * r),
            PairLossKind::ApoDown => s(0.3 * c) + 1.0 - s(0.3 * (c - r)),
            PairLossKind::SigmoidNorm => -s(0.3 * (c / 3.0 - r / 7.0)).ln(),
            PairLossKind::Simpo => 0.7 * 9.0 / 5.0 - s(0.3 * (-3.0 / 3.0 + 9.5 / 7.0) - 0.5).ln(),
            PairLossKind::Cpo => 0.7 * 9.0 / 5.0 - s(0.3 * (-3.0 + 9.5)).ln(),
            PairLossKind::Orpo => {
                let odds = |mean: f64| (mean.exp() / (1.0 - mean.exp())).ln();
                0.7 * 9.0 / 5.0 - 0.3 * s(odds(-1.0) - odds(-9.5 / 7.0)).ln()
            }
        };
        for kind in PairLossKind::value_variants() {
            let reference = |sum| if kind.has_reference() { sum } else { 0.0 };
            let have = loss(*kind).terms(answer(-3.0, 3.0, reference(-5.0)), answer(-9.5, 7.0, reference(-5.5)));
            assert!((have.loss - want(*kind)).abs() < 2e-14, "{kind:?}: {have:?}, {}", want(*kind));
            let rewards = match kind {
                PairLossKind::Simpo | PairLossKind::Orpo => [-0.3, -0.3 * 9.5 / 7.0],
                PairLossKind::Cpo => [-0.3 * 3.0, -0.3 * 9.5],
                _ => [0.6, -1.2],
            };
            assert!(have.rewards.iter().zip(rewards).all(|(have, want)| (have - want).abs() < 1e-15), "{kind:?}: {have:?}");
        }
    }

    #[test]
    fn equal_log_ratios_have_the_loss_ln_2_to_the_bit() {
        let have = loss(PairLossKind::Dpo).terms(answer(-3.25, 3.0, -3.25), answer(-9.5, 7.0, -9.5));
        assert_eq!((have.loss, have.rewards, have.slopes), (std::f64::consts::LN_2, [0.0; 2], [-0.15, 0.15]));
        assert_eq!(have.report([-3.25, -9.5]), [std::f64::consts::LN_2, 0.0, 0.0, 0.0, -3.25, -9.5]);
    }

    #[test]
    fn large_differences_do_not_overflow() {
        for kind in PairLossKind::value_variants() {
            for (c, r) in [(-1e6, -1.0), (-1.0, -1e6)] {
                let [c_reference, r_reference] = if kind.has_reference() { [-5.0, -5.5] } else { [0.0; 2] };
                let have = loss(*kind).terms(answer(c, 3.0, c_reference), answer(r, 7.0, r_reference));
                assert!(have.loss.is_finite() && have.slopes.iter().all(|slope| slope.is_finite()), "{kind:?}: {have:?}");
            }
        }
    }

    #[test]
    fn a_float_survives_its_words() {
        for x in [0.0, -0.0, 1.5, -1_234.5, f64::MIN_POSITIVE] {
            assert_eq!(float_of(words_of(x)).to_bits(), x.to_bits());
        }
    }
}
