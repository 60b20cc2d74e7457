//! Token ids that come as data, and which of them are trained.

use crate::data::loss_weight::VOCAB_MAX;
use serde_json::Value;

/// Columns beside `input_ids` in which 1 stands for a trained token, and 0 for one that is not trained.
pub(super) const MASKS: [&str; 3] = ["assistant_masks", "completion_mask", "loss_mask"];
/// The label of a token that is not trained, as `transformers` has it.
const IGNORED: i64 = -100;

/// A column by the name that the data has for it.
pub(super) struct IdColumn<'a> {
    pub(super) name: &'a str,
    pub(super) value: &'a Value,
}

impl IdColumn<'_> {
    /// Its numbers, of which there are `count`.
    fn numbers(&self, count: usize) -> Result<Vec<i64>, String> {
        let numbers = list(self.value).ok_or_else(|| format!("`{}` is not a list of whole numbers", self.name))?;
        if numbers.len() == count {
            Ok(numbers)
        } else {
            Err(format!("`{}` has {} values for {count} token ids", self.name, numbers.len()))
        }
    }

    /// For each of `count` tokens whether it is trained.
    fn mask(&self, count: usize) -> Result<Vec<bool>, String> {
        let trained = |(at, number)| match number {
            0 | 1 => Ok(number == 1),
            _ => {
                Err(format!("`{}` has {number} for token {at}: 1 stands for a trained token, and 0 for one that is not trained", self.name))
            }
        };
        self.numbers(count)?.into_iter().enumerate().map(trained).collect()
    }
}

/// The ids, each with whether all of `masks` train it.
///
/// # Errors
/// Columns of other lengths or with other values, a mask that contradicts the labels, in words.
pub(super) fn marked(ids: &IdColumn<'_>, labels: Option<&IdColumn<'_>>, masks: &[IdColumn<'_>]) -> Result<Vec<(u32, bool)>, String> {
    let numbers = list(ids.value).ok_or_else(|| format!("`{}` is not a list of token ids", ids.name))?;
    let labels_of = |labels: &IdColumn<'_>| labels.numbers(numbers.len());
    let labelled = labels.map_or_else(|| Ok(numbers.clone()), labels_of)?;
    let token = |(at, (&id, &label)): (usize, (&i64, &i64))| match u32::try_from(id) {
        Ok(id) if id as usize >= VOCAB_MAX => Err(format!("token {at} has id {id}: ids are below {VOCAB_MAX}")),
        Ok(id) if (label == i64::from(id) || label == IGNORED) => Ok((id, label != IGNORED)),
        _ => Err(format!("token {at} has id {id} and label {label}: a label must be the id, or {IGNORED}")),
    };
    let mut tokens: Vec<(u32, bool)> = numbers.iter().zip(&labelled).enumerate().map(token).collect::<Result<_, _>>()?;
    let masks = masks.iter().map(|mask| mask.mask(numbers.len())).collect::<Result<Vec<_>, _>>()?;
    for (at, (_, is_trained)) in tokens.iter_mut().enumerate().filter(|_| !masks.is_empty()) {
        let by_masks = masks.iter().all(|mask| mask[at]);
        if labels.is_some() && *is_trained != by_masks {
            return Err(format!("token {at}: labels and masks beside them disagree on whether it is trained; drop one of the columns"));
        }
        *is_trained = by_masks;
    }
    Ok(tokens)
}

/// Whole numbers; true and false are 1 and 0, as Python has them.
pub(super) fn list(value: &Value) -> Option<Vec<i64>> {
    let whole = |number: f64| (number.fract() == 0.0 && number.abs() < f64::from(u32::MAX)).then_some(number as i64);
    let number = |value: &Value| value.as_i64().or_else(|| value.as_bool().map(i64::from)).or_else(|| value.as_f64().and_then(whole));
    value.as_array()?.iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Which of three tokens are trained, with these columns beside them.
    fn trained(columns: Value) -> Result<Vec<bool>, String> {
        let ids = json!([5, 6, 7]);
        let column = |name: &'static str| columns.get(name).map(|value| IdColumn { name, value });
        let masks: Vec<IdColumn<'_>> = MASKS.into_iter().filter_map(column).collect();
        let marked = marked(&IdColumn { name: "input_ids", value: &ids }, column("labels").as_ref(), &masks)?;
        assert!(marked.iter().map(|(id, _)| *id).eq([5, 6, 7]));
        Ok(marked.into_iter().map(|(_, is_trained)| is_trained).collect())
    }

    #[test]
    fn a_token_is_trained_if_labels_and_all_masks_include_it() {
        let (no, yes) = (false, true);
        assert_eq!(trained(json!({})).unwrap(), [yes; 3]);
        for mask in MASKS {
            assert_eq!(trained(json!({mask: [0, 1, 1]})).unwrap(), [no, yes, yes], "{mask}");
            assert_eq!(trained(json!({mask: [false, true, 1.0]})).unwrap(), [no, yes, yes], "{mask}");
            assert_eq!(trained(json!({mask: [0, 1, 0], "labels": [-100, 6, -100]})).unwrap(), [no, yes, no], "{mask}");
        }
        assert_eq!(trained(json!({"assistant_masks": [0, 1, 1], "completion_mask": [1, 1, 0]})).unwrap(), [no, yes, no]);
        assert_eq!(trained(json!({"labels": [-100, -100, 7]})).unwrap(), [no, no, yes]);
    }

    #[test]
    fn contradicting_columns_are_refused_by_name() {
        for (columns, refused) in [
            (json!({"loss_mask": [0, 1]}), "`loss_mask` has 2 values for 3 token ids"),
            (json!({"loss_mask": [0, 1, 0.5]}), "`loss_mask` is not a list of whole numbers"),
            (json!({"loss_mask": "011"}), "`loss_mask` is not a list of whole numbers"),
            (json!({"completion_mask": [0, 1, 2]}), "`completion_mask` has 2 for token 2: 1 stands for a trained token"),
            (json!({"labels": [5, 6]}), "`labels` has 2 values for 3 token ids"),
            (json!({"labels": [5, 7, 7]}), "token 1 has id 6 and label 7: a label must be the id, or -100"),
            (json!({"labels": [5, 6, 7], "assistant_masks": [0, 1, 1]}), "token 0: labels and masks beside them disagree"),
        ] {
            let cause = trained(columns.clone()).unwrap_err();
            assert!(cause.starts_with(refused), "{columns}: {cause}");
        }
    }
}
