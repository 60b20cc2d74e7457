//! Distillation: the cross-entropy between a teacher's distribution of the next token and that of the model. The data has the teacher's most
//! likely tokens with their probabilities; all other tokens share the rest of its probability, the tail. Everything is computed in fp64.
//!
//! Let `q` be the probabilities of the model, `Q` their sum over the tokens of the teacher, and `P` the sum of the teacher's probabilities `p`.
//! The loss of a token is `-sum of p ln q - tail ln(1 - Q)`. The model's statistics are those of the tokens *outside* of the teacher's tokens, so
//! that `1 - Q` is a sum and never a difference.

use serde::{Deserialize, Serialize};

/// Most tokens of a teacher for each token of the data.
pub(crate) const TOP_K_MAX: usize = 64;
/// Words of a teacher's token in the list of a micro-batch: its id plus 1, and its probability as a 32-bit float. A place without a token has
/// zeros, and no token follows it.
pub(crate) const ENTRY_WORDS: usize = 2;
/// Sums of a teacher's probabilities may exceed 1 by so much.
pub(crate) const SUM_ERROR_MAX: f64 = 1e-3;

/// Formula of a loss of distillation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TeacherLossKind {
    /// Distillation: the cross-entropy to stored probabilities of a teacher.
    Distill,
}

/// A loss of distillation with its coefficients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeacherLoss {
    /// Part of the distillation in the loss; the other part is the cross-entropy of the data's tokens.
    pub kd_ratio: f64,
    /// Most tokens of the teacher for each token of the data.
    pub top_k: usize,
}

/// A token of the teacher.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TeacherEntry {
    /// Its probability by the teacher.
    pub probability: f64,
    /// Its logit by the model.
    pub logit: f64,
    /// Whether it is the token of the data.
    pub is_target: bool,
}

/// A row of the head: logits of the model, as far as the loss reads them.
#[derive(Clone, Copy, Debug)]
pub struct TeacherRow<'a> {
    /// The tokens of the teacher.
    pub entries: &'a [TeacherEntry],
    /// The largest logit of all other tokens, and their sum of exponentials relative to it: `-inf` and 0 if there is no other token.
    pub outside: [f64; 2],
    /// The logit of the data's token.
    pub target: f64,
}

/// The loss of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TeacherTerms {
    /// Distillation and cross-entropy, mixed.
    pub loss: f64,
    /// Divergence of the model from the teacher, with the tail as one token.
    pub kl: f64,
    /// Cross-entropy of the data's token.
    pub cross_entropy: f64,
    /// The derivative by the logit of a token outside is this factor times its softmax among the tokens outside.
    pub outside: f64,
    /// The derivative by the logit of the data's token, if that token is outside.
    pub target: f64,
}

/// Means over the tokens of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TeacherMetrics {
    /// Divergence of the model from the teacher.
    pub kl: f64,
    /// Cross-entropy of the data's tokens.
    pub cross_entropy: f64,
}

/// `x ln x`, which is 0 at 0.
fn x_log_x(x: f64) -> f64 {
    if x == 0.0 { 0.0 } else { x * libm::log(x) }
}

impl TeacherLoss {
    /// The loss of a row. Writes the derivative by the logit of each token of the teacher to `gradients`, which is as long as the entries.
    pub fn terms(&self, row: TeacherRow<'_>, gradients: &mut [f64]) -> TeacherTerms {
        let TeacherRow { entries, outside: [outside_max, outside_sum], target } = row;
        let is_whole = outside_sum == 0.0;
        let max = entries.iter().fold(outside_max, |max, entry| max.max(entry.logit));
        let outside = if is_whole { 0.0 } else { outside_sum * libm::exp(outside_max - max) };
        let inside: f64 = entries.iter().map(|entry| libm::exp(entry.logit - max)).sum();
        let (total, known) = (inside + outside, entries.iter().map(|entry| entry.probability).sum::<f64>());
        let log_sum = max + libm::log(total);
        let tail = if is_whole { 0.0 } else { (1.0 - known).max(0.0) };
        let of_tail = if tail > 0.0 { tail * (log_sum - outside_max - libm::log(outside_sum)) } else { 0.0 };
        let of_entry = |entry: &TeacherEntry| if entry.probability > 0.0 { entry.probability * (log_sum - entry.logit) } else { 0.0 };
        let distillation = entries.iter().map(of_entry).sum::<f64>() + of_tail;
        let entropy = -entries.iter().map(|entry| x_log_x(entry.probability)).sum::<f64>() - x_log_x(tail);
        let (own, other, cross_entropy) = (self.kd_ratio, 1.0 - self.kd_ratio, log_sum - target);
        for (gradient, entry) in gradients.iter_mut().zip(entries) {
            let q = libm::exp(entry.logit - max) / total;
            let hit = f64::from(u8::from(entry.is_target));
            *gradient = own * (q * (known + tail) - entry.probability) + other * (q - hit);
        }
        let outside_factor = own * (known * (outside / total) - tail * (inside / total)) + other * (outside / total);
        TeacherTerms {
            loss: own * distillation + other * cross_entropy,
            kl: distillation - entropy,
            cross_entropy,
            outside: outside_factor,
            target: libm::exp(target - outside_max) / outside_sum * outside_factor - other,
        }
    }

    /// The metrics in the numbers that a step reports: weighted sums over tokens, all divided by the same number.
    pub(crate) fn metrics(&self, [_, kl, cross_entropy, _, _, weight]: [f64; 6]) -> TeacherMetrics {
        let mean = |sum: f64| sum / weight.max(f64::MIN_POSITIVE);
        TeacherMetrics { kl: mean(kl), cross_entropy: mean(cross_entropy) }
    }
}

impl TeacherTerms {
    /// Numbers that are reported of a token with this weight.
    pub(crate) fn report(&self, weight: f64) -> [f64; 6] {
        [weight * self.loss, weight * self.kl, weight * self.cross_entropy, 0.0, 0.0, weight]
    }
}

/// The words of a teacher's token.
pub(crate) fn entry_words(id: u32, probability: f32) -> [i32; ENTRY_WORDS] {
    [id as i32 + 1, probability.to_bits() as i32]
}

/// The teacher's tokens in their words: ids and probabilities.
pub(crate) fn entries(words: &[i32]) -> impl Iterator<Item = (u32, f32)> {
    let words = words.as_chunks::<ENTRY_WORDS>().0.iter();
    words.take_while(|[id, _]| *id > 0).map(|[id, probability]| (*id as u32 - 1, f32::from_bits(*probability as u32)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f64; 7] = [0.5, -1.25, 2.0, 0.0, -3.0, 1.0, 0.25];

    /// The loss of `logits` by its definition.
    fn defined(loss: TeacherLoss, logits: &[f64], teacher: &[(usize, f64)], target: usize) -> f64 {
        let sum: f64 = logits.iter().map(|x| x.exp()).sum();
        let q = |id: usize| logits[id].exp() / sum;
        let inside: f64 = teacher.iter().map(|(id, _)| q(*id)).sum();
        let tail = 1.0 - teacher.iter().map(|(_, p)| p).sum::<f64>();
        let known: f64 = teacher.iter().map(|(id, p)| -p * q(*id).ln()).sum();
        let of_tail = if tail > 1e-12 { -tail * (1.0 - inside).ln() } else { 0.0 };
        loss.kd_ratio * (known + of_tail) - (1.0 - loss.kd_ratio) * q(target).ln()
    }

    /// The terms of `logits`, and the derivatives by all of them.
    fn found(loss: TeacherLoss, logits: &[f64], teacher: &[(usize, f64)], target: usize) -> (TeacherTerms, Vec<f64>) {
        let entry =
            |(id, probability): &(usize, f64)| TeacherEntry { probability: *probability, logit: logits[*id], is_target: *id == target };
        let entries: Vec<_> = teacher.iter().map(entry).collect();
        let outside: Vec<usize> = (0..logits.len()).filter(|id| teacher.iter().all(|(other, _)| other != id)).collect();
        let max = outside.iter().map(|id| logits[*id]).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = outside.iter().map(|id| (logits[*id] - max).exp()).sum();
        let mut gradients = vec![0.0; entries.len()];
        let terms = loss.terms(TeacherRow { entries: &entries, outside: [max, sum], target: logits[target] }, &mut gradients);
        let mut all = vec![0.0; logits.len()];
        outside.iter().for_each(|id| all[*id] = (logits[*id] - max).exp() / sum * terms.outside);
        if outside.contains(&target) {
            all[target] = terms.target;
        }
        teacher.iter().zip(gradients).for_each(|((id, _), gradient)| all[*id] = gradient);
        (terms, all)
    }

    #[test]
    fn losses_and_derivatives_are_those_of_the_definition() {
        let teachers: [&[(usize, f64)]; 4] =
            [&[(2, 0.5)], &[(2, 0.5), (0, 0.25), (4, 0.125)], &[(2, 0.75), (0, 0.25)], &[(1, 0.0), (3, 0.5)]];
        let step = 1e-6;
        for (teacher, target) in teachers.into_iter().flat_map(|teacher| [0, 2, 6].map(|target| (teacher, target))) {
            for kd_ratio in [1.0, 0.25, 0.0] {
                let loss = TeacherLoss { kd_ratio, top_k: 4 };
                let (terms, gradients) = found(loss, &LOGITS, teacher, target);
                assert!((terms.loss - defined(loss, &LOGITS, teacher, target)).abs() < 1e-14, "{teacher:?} {kd_ratio}");
                for (id, have) in gradients.iter().enumerate() {
                    let at = |by: f64| {
                        let mut logits = LOGITS;
                        logits[id] += by;
                        defined(loss, &logits, teacher, target)
                    };
                    let want = (at(step) - at(-step)) / (2.0 * step);
                    assert!((have - want).abs() < 1e-8, "{teacher:?} {target} {kd_ratio}, token {id}: {have}, {want}");
                }
            }
        }
    }

    /// The probability of the tail is `e^-700` here, which no difference from 1 has.
    #[test]
    fn a_model_that_is_certain_of_the_teachers_tokens_has_a_finite_loss() {
        let mut logits = [0.0; 7];
        logits[2] = 700.0;
        let (terms, gradients) = found(TeacherLoss { kd_ratio: 1.0, top_k: 1 }, &logits, &[(2, 0.75)], 2);
        let want = 0.25 * (700.0 - 6f64.ln());
        assert!((terms.loss - want).abs() < 1e-9, "{} {want}", terms.loss);
        assert!((gradients[2] - 0.25).abs() < 1e-12 && gradients[..2].iter().all(|x| (x + 0.25 / 6.0).abs() < 1e-12), "{gradients:?}");
    }

    #[test]
    fn a_teacher_of_the_whole_vocabulary_has_no_tail() {
        let teacher: Vec<(usize, f64)> = (0..7).map(|id| (id, 0.142_857)).collect();
        let (terms, gradients) = found(TeacherLoss { kd_ratio: 1.0, top_k: 7 }, &LOGITS, &teacher, 0);
        assert!(terms.loss.is_finite() && gradients.iter().all(|x| x.is_finite()), "{terms:?}");
    }

    #[test]
    fn the_divergence_from_itself_is_zero() {
        let sum: f64 = LOGITS.iter().map(|x| x.exp()).sum();
        let teacher: Vec<(usize, f64)> = [2, 5, 0].map(|id| (id, LOGITS[id].exp() / sum)).into();
        let (terms, gradients) = found(TeacherLoss { kd_ratio: 1.0, top_k: 3 }, &LOGITS, &teacher, 0);
        assert!(terms.kl.abs() < 1e-14 && gradients.iter().all(|x| x.abs() < 1e-14), "{terms:?} {gradients:?}");
    }

    #[test]
    fn tokens_of_a_teacher_survive_their_words() {
        let words = [entry_words(0, 0.5), entry_words(7, 0.0), [0; 2], [0; 2]].concat();
        assert_eq!(entries(&words).collect::<Vec<_>>(), [(0, 0.5), (7, 0.0)]);
    }
}
