//! A sampled completion of a prompt, as token ids, with its advantage and log-probabilities.

use super::ids::{self, IdColumn};
use serde_json::Value;

/// The columns of numbers beside the ids.
pub(super) const ADVANTAGE: &str = "advantage";
pub(super) const OLD_LOGPS: &str = "old_logps";
pub(super) const REF_LOGPS: &str = "ref_logps";

/// A completion with numbers for each of its tokens.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::data) struct Rollout {
    pub(in crate::data) prompt: Vec<u32>,
    pub(in crate::data) completion: Vec<u32>,
    /// For each token of the completion the advantage, the log-probability when it was sampled, and that of the reference. An absent
    /// log-probability is NaN.
    pub(in crate::data) numbers: Vec<[f32; 3]>,
}

/// Columns of a rollout.
pub(super) struct RolloutColumns<'a> {
    pub(super) prompt: IdColumn<'a>,
    pub(super) completion: IdColumn<'a>,
    pub(super) advantage: IdColumn<'a>,
    pub(super) old: Option<IdColumn<'a>>,
    pub(super) reference: Option<IdColumn<'a>>,
}

impl RolloutColumns<'_> {
    /// The rollout of the columns.
    ///
    /// # Errors
    /// A description of the first faulty column.
    pub(super) fn read(&self) -> Result<Rollout, String> {
        let ids = |column: &IdColumn<'_>| match ids::marked(column, None, &[])? {
            ids if ids.is_empty() => Err(format!("`{}` is empty", column.name)),
            ids => Ok(ids.into_iter().map(|(id, _)| id).collect::<Vec<u32>>()),
        };
        let (prompt, completion) = (ids(&self.prompt)?, ids(&self.completion)?);
        let count = completion.len();
        let absent = || Ok(vec![f32::NAN; count]);
        let logps = |column: &Option<IdColumn<'_>>| column.as_ref().map_or_else(absent, |column| numbers(column, count));
        let advantages = match finite(self.advantage.value) {
            Some(advantage) => vec![advantage; count],
            None => numbers(&self.advantage, count)?,
        };
        let logps = logps(&self.old)?.into_iter().zip(logps(&self.reference)?);
        let numbers = advantages.into_iter().zip(logps).map(|(advantage, (old, reference))| [advantage, old, reference]).collect();
        Ok(Rollout { prompt, completion, numbers })
    }
}

/// The numbers of a column with one number for each of `count` tokens.
fn numbers(column: &IdColumn<'_>, count: usize) -> Result<Vec<f32>, String> {
    let name = column.name;
    let values =
        column.value.as_array().ok_or_else(|| format!("`{name}` is not a list of numbers, one for each token of the completion"))?;
    if values.len() != count {
        return Err(format!("`{name}` has {} values for {count} tokens of the completion; write one for each token", values.len()));
    }
    let number = |(at, value)| finite(value).ok_or_else(|| format!("`{name}` has {value} for token {at}: expected a finite number"));
    values.iter().enumerate().map(number).collect()
}

/// A number that is finite as a 32-bit float.
fn finite(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(columns: &Value) -> Result<Rollout, String> {
        let column = |name: &'static str| columns.get(name).map(|value| IdColumn { name, value });
        RolloutColumns {
            prompt: column("prompt_ids").unwrap(),
            completion: column("completion_ids").unwrap(),
            advantage: column(ADVANTAGE).unwrap(),
            old: column(OLD_LOGPS),
            reference: column(REF_LOGPS),
        }
        .read()
    }

    #[test]
    fn numbers_are_of_a_token_and_absent_log_probabilities_are_nan() {
        let rollout = read(&json!({"prompt_ids": [4], "completion_ids": [5, 6], "advantage": -0.5, "old_logps": [-1, -2.5]})).unwrap();
        assert_eq!((&rollout.prompt[..], &rollout.completion[..]), (&[4][..], &[5, 6][..]));
        assert!(rollout.numbers.iter().all(|[advantage, _, reference]| *advantage == -0.5 && reference.is_nan()));
        assert_eq!([rollout.numbers[0][1], rollout.numbers[1][1]], [-1.0, -2.5]);
        let listed = read(&json!({"prompt_ids": [4], "completion_ids": [5, 6], "advantage": [1, 2], "ref_logps": [-3, -4]})).unwrap();
        assert!(listed.numbers[0][1].is_nan() && listed.numbers[1][2] == -4.0 && listed.numbers[1][0] == 2.0);
    }

    #[test]
    fn faulty_columns_are_refused_by_name() {
        let whole = json!({"prompt_ids": [4], "completion_ids": [5, 6], "advantage": 1.0});
        for (name, value, cause) in [
            ("prompt_ids", json!([]), "`prompt_ids` is empty"),
            ("completion_ids", json!([]), "`completion_ids` is empty"),
            ("completion_ids", json!([0.5]), "`completion_ids` is not a list of token ids"),
            ("completion_ids", json!([1 << 19]), "token 0 has id 524288: ids are below 524288"),
            ("advantage", json!("good"), "`advantage` is not a list of numbers, one for each token of the completion"),
            ("advantage", json!([1.0]), "`advantage` has 1 values for 2 tokens of the completion; write one for each token"),
            ("old_logps", json!([-1.0, null]), "`old_logps` has null for token 1: expected a finite number"),
            ("ref_logps", json!([-1e99, 0]), "`ref_logps` has -1e+99 for token 0: expected a finite number"),
        ] {
            let mut columns = whole.clone();
            columns[name] = value;
            assert_eq!(read(&columns).unwrap_err(), cause);
        }
    }
}
