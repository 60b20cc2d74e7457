//! The column `weights` beside `input_ids`: a weight in the loss for each token.

use super::ids::IdColumn;
use crate::data::loss_weight::LossWeight;
use serde_json::Value;

/// The column.
pub(super) const WEIGHTS: &str = "weights";
/// The sentence about a record with a weight that is not a multiple of the unit.
pub(super) const ROUNDED: &str = "a weight is rounded to the nearest multiple of 1/4096 above 0";

/// Weights as the loss has them.
pub(super) struct TokenWeights {
    pub(super) weights: Vec<LossWeight>,
    /// Whether one of them differs from the number in the data.
    pub(super) are_rounded: bool,
}

/// The weights of `count` tokens in `column`.
///
/// # Errors
/// A column of another length or with a value that is no weight, and one without a weight above 0, in words.
pub(super) fn read(column: &IdColumn<'_>, count: usize) -> Result<TokenWeights, String> {
    let name = column.name;
    let values = column.value.as_array().ok_or_else(|| format!("`{name}` is not a list of numbers from 0 to 1"))?;
    if values.len() != count {
        return Err(format!("`{name}` has {} values for {count} token ids; write one weight for each id", values.len()));
    }
    let mut are_rounded = false;
    let mut weight = |(at, value): (usize, &Value)| {
        let number = number(value);
        let wrong =
            || format!("`{name}` has {value} for token {at}: weights are numbers from 0 to 1; divide all weights by the largest one");
        let weight = number.and_then(LossWeight::nearest).ok_or_else(wrong)?;
        are_rounded |= number.is_some_and(|number| !weight.is(number));
        Ok(weight)
    };
    let weights: Vec<LossWeight> = values.iter().enumerate().map(&mut weight).collect::<Result<_, String>>()?;
    if weights.iter().any(|weight| weight.is_trained()) || weights.is_empty() {
        Ok(TokenWeights { weights, are_rounded })
    } else {
        Err(format!("all `{name}` are 0, so no token is trained; leave the record out"))
    }
}

/// A number; true and false are 1 and 0, as Python has them.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_bool().map(f64::from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn units(value: &Value) -> Result<(Vec<u32>, bool), String> {
        let TokenWeights { weights, are_rounded } = read(&IdColumn { name: "w", value }, 3)?;
        Ok((weights.into_iter().map(LossWeight::units).collect(), are_rounded))
    }

    #[test]
    fn weights_are_numbers_or_truth_values_and_rounding_is_noticed() {
        assert_eq!(units(&json!([0, 1, 0.25])).unwrap(), (vec![0, 4096, 1024], false));
        assert_eq!(units(&json!([false, true, 1.0])).unwrap(), (vec![0, 4096, 4096], false));
        assert_eq!(units(&json!([0.1, 0, 1e-9])).unwrap(), (vec![410, 0, 1], true));
    }

    #[test]
    fn bad_weights_are_refused_with_the_token_and_the_remedy() {
        let range = "weights are numbers from 0 to 1; divide all weights by the largest one";
        for (value, cause) in [
            (json!([0.5, 1]), "`w` has 2 values for 3 token ids; write one weight for each id".to_string()),
            (json!([0.5, -0.5, 1]), format!("`w` has -0.5 for token 1: {range}")),
            (json!([0.5, 1, 1.5]), format!("`w` has 1.5 for token 2: {range}")),
            (json!([null, 1, 1]), format!("`w` has null for token 0: {range}")),
            (json!(["1", 1, 1]), format!("`w` has \"1\" for token 0: {range}")),
            (json!([0, 0.0, 0]), "all `w` are 0, so no token is trained; leave the record out".to_string()),
            (json!("011"), "`w` is not a list of numbers from 0 to 1".to_string()),
        ] {
            assert_eq!(units(&value).unwrap_err(), cause, "{value}");
        }
    }
}
