//! Token ids with the most likely tokens of a teacher and their probabilities.

use super::ids::{IdColumn, list};
use crate::data::loss_weight::{LossWeight, VOCAB_MAX};
use crate::data::number_words::{word_of_count, words_with_id};
use crate::teacher_loss::{SUM_ERROR_MAX, TOP_K_MAX};
use serde_json::Value;

/// The columns beside the ids.
pub(super) const TEACHER_IDS: &str = "teacher_ids";
pub(super) const TEACHER_PROBS: &str = "teacher_probs";
pub(super) const TEACHER_LOGPROBS: &str = "teacher_logprobs";

/// Token ids with a teacher's tokens.
#[derive(Debug, PartialEq)]
pub(in crate::data) struct Taught {
    pub(in crate::data) tokens: Vec<(u32, LossWeight)>,
    /// For each trained token but the first of the record: the word of a count, and so many ids with probabilities.
    pub(in crate::data) teacher: Vec<u32>,
}

/// Columns of a teacher.
pub(super) struct TeacherColumns<'a> {
    pub(super) ids: IdColumn<'a>,
    pub(super) probs: Option<IdColumn<'a>>,
    pub(super) logprobs: Option<IdColumn<'a>>,
    /// Tokens of the record before the first one that the columns have a list for.
    pub(super) first: usize,
}

/// How a column states probabilities.
#[derive(Clone, Copy)]
enum ProbabilityScale {
    Plain,
    Logarithmic,
}

impl ProbabilityScale {
    /// The probability that `value` states, as a 32-bit float.
    fn probability(self, value: &Value) -> Option<f32> {
        let number = value.as_f64().filter(|number| number.is_finite())?;
        let probability = match self {
            Self::Plain => number,
            Self::Logarithmic => libm::exp(number),
        };
        Some(probability as f32).filter(|probability| probability.is_finite() && *probability >= 0.0)
    }

    fn expected(self) -> &'static str {
        match self {
            Self::Plain => "expected a finite number that is at least 0",
            Self::Logarithmic => "expected the natural logarithm of a probability",
        }
    }
}

impl TeacherColumns<'_> {
    /// `tokens` with the teacher's tokens.
    ///
    /// # Errors
    /// A description of the first fault.
    pub(super) fn read(&self, tokens: Vec<(u32, LossWeight)>) -> Result<Taught, String> {
        let (numbers, scale) = match (&self.probs, &self.logprobs) {
            (Some(probs), None) => (probs, ProbabilityScale::Plain),
            (None, Some(logprobs)) => (logprobs, ProbabilityScale::Logarithmic),
            (None, None) => return Err(format!("lacks `{TEACHER_PROBS}` or `{TEACHER_LOGPROBS}` beside `{}`", self.ids.name)),
            (Some(probs), Some(logprobs)) => return Err(format!("has `{}` and `{}`; leave one out", probs.name, logprobs.name)),
        };
        let count = tokens.len() - self.first;
        let (ids, probabilities) = (lists(&self.ids, count)?, lists(numbers, count)?);
        let mut teacher = Vec::new();
        for (place, (ids, probabilities)) in ids.iter().zip(probabilities).enumerate() {
            let at = self.first + place;
            // The first token of a record is nobody's target.
            if at > 0 && tokens[at].1.is_trained() {
                let of = TokenLists { names: [self.ids.name, numbers.name], place, scale };
                teacher.extend(of.words(ids, probabilities)?);
            }
        }
        Ok(Taught { tokens, teacher })
    }
}

/// The list of each of `count` tokens in a column.
fn lists<'a>(column: &IdColumn<'a>, count: usize) -> Result<&'a [Value], String> {
    let name = column.name;
    let values = column.value.as_array().ok_or_else(|| format!("`{name}` is not a list of lists, one for each token"))?;
    if values.len() == count {
        Ok(values)
    } else {
        Err(format!("`{name}` has {} values for {count} token ids; write one list for each id", values.len()))
    }
}

/// The names of both columns and the place of a token in them.
struct TokenLists<'a> {
    names: [&'a str; 2],
    place: usize,
    scale: ProbabilityScale,
}

impl TokenLists<'_> {
    /// The words of the teacher's tokens.
    fn words(&self, ids: &Value, probabilities: &Value) -> Result<Vec<u32>, String> {
        let (ids, probabilities) = (self.ids(ids)?, self.probabilities(probabilities)?);
        let ([id_name, name], place) = (self.names, self.place);
        let (count, numbers) = (ids.len(), probabilities.len());
        if count != numbers {
            return Err(format!("`{name}` has {numbers} values for {count} ids of `{id_name}` for token {place}"));
        }
        let sum: f64 = probabilities.iter().map(|number| f64::from(*number)).sum();
        if sum > 1.0 + SUM_ERROR_MAX {
            return Err(format!("`{name}` for token {place}: probabilities add up to {sum:.4}, which is above 1"));
        }
        let entries = ids.into_iter().zip(probabilities).flat_map(|(id, number)| words_with_id(id, number));
        Ok([word_of_count(count)].into_iter().chain(entries).collect())
    }

    /// The ids, at least one and at most [`TOP_K_MAX`] different ones.
    fn ids(&self, value: &Value) -> Result<Vec<u32>, String> {
        let ([name, _], place) = (self.names, self.place);
        let numbers = list(value).ok_or_else(|| format!("`{name}` for token {place} is not a list of token ids"))?;
        if !(1..=TOP_K_MAX).contains(&numbers.len()) {
            return Err(format!("`{name}` has {} ids for token {place}: a trained token needs 1 to {TOP_K_MAX}", numbers.len()));
        }
        let id = |number: &i64| u32::try_from(*number).ok().filter(|id| (*id as usize) < VOCAB_MAX).ok_or(*number);
        let ids: Vec<u32> = numbers
            .iter()
            .map(id)
            .collect::<Result<_, _>>()
            .map_err(|number| format!("`{name}` has id {number} for token {place}: ids are from 0 to {}", VOCAB_MAX - 1))?;
        match ids.iter().enumerate().find(|(at, id)| ids[..*at].contains(id)) {
            Some((_, id)) => Err(format!("`{name}` has id {id} twice for token {place}; write each id once")),
            None => Ok(ids),
        }
    }

    fn probabilities(&self, value: &Value) -> Result<Vec<f32>, String> {
        let ([_, name], place) = (self.names, self.place);
        let values = value.as_array().ok_or_else(|| format!("`{name}` for token {place} is not a list of numbers"))?;
        let number = |value: &Value| {
            let wrong = || format!("`{name}` has {value} for token {place}: {}", self.scale.expected());
            self.scale.probability(value).ok_or_else(wrong)
        };
        values.iter().map(number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::number_words::{count_of, number_of};
    use serde_json::json;

    fn tokens(trained: &[bool]) -> Vec<(u32, LossWeight)> {
        trained.iter().map(|is_trained| (5, if *is_trained { LossWeight::WHOLE } else { LossWeight::NONE })).collect()
    }

    fn read(columns: &Value, first: usize, trained: &[bool]) -> Result<Vec<u32>, String> {
        let column = |name: &'static str| columns.get(name).map(|value| IdColumn { name, value });
        let (probs, logprobs) = (column(TEACHER_PROBS), column(TEACHER_LOGPROBS));
        let columns = TeacherColumns { ids: column(TEACHER_IDS).unwrap(), probs, logprobs, first };
        columns.read(tokens(trained)).map(|taught| taught.teacher)
    }

    /// The ids and probabilities of each token.
    fn entries(words: &[u32]) -> Vec<Vec<(u32, f32)>> {
        let (mut found, mut at) = (Vec::new(), 0);
        while at < words.len() {
            let count = count_of(words[at] as i32);
            let entry = |words: &[u32; 3]| (words[0] & 0x7_ffff, number_of(&words.map(|word| word as i32)));
            found.push(words[at + 1..][..3 * count].as_chunks::<3>().0.iter().map(entry).collect());
            at += 1 + 3 * count;
        }
        found
    }

    #[test]
    fn trained_tokens_have_the_teachers_tokens_and_others_may_have_none() {
        let columns = json!({TEACHER_IDS: [[9], null, [7, 300], []], TEACHER_PROBS: [[2], null, [0.5, 0], []]});
        assert_eq!(entries(&read(&columns, 0, &[true, false, true, false]).unwrap()), [vec![(7, 0.5), (300, 0.0)]]);
        let columns = json!({TEACHER_IDS: [[1, 2], [3]], TEACHER_LOGPROBS: [[-0.5, -1], [0]]});
        let have = entries(&read(&columns, 2, &[false, false, true, true]).unwrap());
        assert_eq!(have, [vec![(1, (-0.5f64).exp() as f32), (2, (-1f64).exp() as f32)], vec![(3, 1.0)]]);
    }

    #[test]
    fn faulty_columns_are_refused_by_name() {
        let wide = (0..65).collect::<Vec<_>>();
        for (ids, probs, cause) in [
            (json!("a"), json!([[1], [1]]), "`teacher_ids` is not a list of lists, one for each token"),
            (json!([[1]]), json!([[1], [1]]), "`teacher_ids` has 1 values for 2 token ids; write one list for each id"),
            (json!([[1], [1]]), json!([[1]]), "`teacher_probs` has 1 values for 2 token ids; write one list for each id"),
            (json!([[1], []]), json!([[1], []]), "`teacher_ids` has 0 ids for token 1: a trained token needs 1 to 64"),
            (json!([[1], wide]), json!([[1], [1]]), "`teacher_ids` has 65 ids for token 1: a trained token needs 1 to 64"),
            (json!([[1], [0.5]]), json!([[1], [1]]), "`teacher_ids` for token 1 is not a list of token ids"),
            (json!([[1], [-1]]), json!([[1], [1]]), "`teacher_ids` has id -1 for token 1: ids are from 0 to 524287"),
            (json!([[1], [1 << 19]]), json!([[1], [1]]), "`teacher_ids` has id 524288 for token 1: ids are from 0 to 524287"),
            (json!([[1], [7, 8, 7]]), json!([[1], [0, 0, 0]]), "`teacher_ids` has id 7 twice for token 1; write each id once"),
            (json!([[1], [7, 8]]), json!([[1], [0.5]]), "`teacher_probs` has 1 values for 2 ids of `teacher_ids` for token 1"),
            (json!([[1], [7]]), json!([[1], 0.5]), "`teacher_probs` for token 1 is not a list of numbers"),
            (json!([[1], [7]]), json!([[1], ["x"]]), "`teacher_probs` has \"x\" for token 1: expected a finite number that is at least 0"),
            (json!([[1], [7]]), json!([[1], [-0.5]]), "`teacher_probs` has -0.5 for token 1: expected a finite number that is at least 0"),
            (
                json!([[1], [7]]),
                json!([[1], [1e300]]),
                "`teacher_probs` has 1e+300 for token 1: expected a finite number that is at least 0",
            ),
            (
                json!([[1], [7, 8]]),
                json!([[1], [0.75, 0.252]]),
                "`teacher_probs` for token 1: probabilities add up to 1.0020, which is above 1",
            ),
        ] {
            assert_eq!(read(&json!({TEACHER_IDS: ids, TEACHER_PROBS: probs}), 0, &[true, true]).unwrap_err(), cause);
        }
        assert!(read(&json!({TEACHER_IDS: [[1], [7, 8]], TEACHER_PROBS: [[1], [0.75, 0.2505]]}), 0, &[true; 2]).is_ok(), "rounding");
        let ids = json!([[1], [1]]);
        let without = read(&json!({TEACHER_IDS: ids}), 0, &[true; 2]).unwrap_err();
        assert_eq!(without, "lacks `teacher_probs` or `teacher_logprobs` beside `teacher_ids`");
        let both = read(&json!({TEACHER_IDS: ids, TEACHER_PROBS: ids, TEACHER_LOGPROBS: ids}), 0, &[true; 2]).unwrap_err();
        assert_eq!(both, "has `teacher_probs` and `teacher_logprobs`; leave one out");
        let above = read(&json!({TEACHER_IDS: ids, TEACHER_LOGPROBS: [[0], [0.5]]}), 0, &[true; 2]).unwrap_err();
        assert_eq!(above, "`teacher_logprobs` for token 1: probabilities add up to 1.6487, which is above 1");
    }
}
