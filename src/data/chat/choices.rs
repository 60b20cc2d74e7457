//! Keys of a message that set whether it is trained. Several programs document such a key, each under a name of its own.

use crate::data::loss_weight::LossWeight;
use serde_json::Value;

/// Values that a mark may have.
#[derive(Clone, Copy, PartialEq)]
enum MarkValues {
    Bools,
    /// Numbers from 0 to 1: a message is trained with this weight.
    Weights,
    /// Truth values, or 0 and 1.
    Both,
}

/// One key.
struct MessageMark {
    key: &'static str,
    values: MarkValues,
    /// The value, as a truth value, with which the message is trained.
    trained_if: bool,
    /// The programs that document the key.
    source: &'static str,
}

const fn mark(key: &'static str, values: MarkValues, trained_if: bool, source: &'static str) -> MessageMark {
    MessageMark { key, values, trained_if, source }
}

/// The mark that is a weight.
const WEIGHT: &str = "weight";

const MARKS: [MessageMark; 11] = [
    mark("train", MarkValues::Bools, true, "this program, axolotl"),
    mark(WEIGHT, MarkValues::Weights, true, "this program, OpenAI, Mistral, Together"),
    mark("loss", MarkValues::Both, true, "ms-swift, LLaMA-Factory, XTuner"),
    mark("loss_scale", MarkValues::Both, true, "ms-swift"),
    mark("loss_mask", MarkValues::Both, true, "verl"),
    mark("step_loss_mask", MarkValues::Both, true, "slime"),
    mark("loss_weight", MarkValues::Both, true, "converters of chat data"),
    mark("masked", MarkValues::Both, false, "torchtune"),
    mark("train_on_turn", MarkValues::Both, true, "home-llm"),
    mark("training", MarkValues::Both, true, "axolotl"),
    mark("trainable", MarkValues::Both, true, "Tinker"),
];

/// Gives the message `train: false` where one of its marks leaves it untrained. Returns the mark by which the message is trained, if it has
/// one.
///
/// # Errors
/// For a value of a mark that means neither, and for two marks that contradict each other, in words that follow the message's name.
pub(super) fn resolve(message: &mut Value) -> Result<Option<&'static str>, String> {
    let mut found: Option<(&MessageMark, bool)> = None;
    for mark in &MARKS {
        let Some(is_trained) = mark.read(&message[mark.key])? else { continue };
        match found {
            Some((other, before)) if before != is_trained => {
                return Err(format!(
                    "has {} {} and {} {}, which contradict each other",
                    other.key, message[other.key], mark.key, message[mark.key]
                ));
            }
            _ => found = Some((mark, is_trained)),
        }
    }
    if let Some((_, false)) = found {
        message["train"] = false.into();
    }
    Ok(found.filter(|(_, is_trained)| *is_trained).map(|(mark, _)| mark.key))
}

/// The weight of a message whose marks are resolved.
pub(super) fn weight(message: &Value) -> LossWeight {
    let weight = message[WEIGHT].as_f64().and_then(LossWeight::nearest).unwrap_or(LossWeight::WHOLE);
    if message["train"] == false { LossWeight::NONE } else { weight }
}

/// Whether the weight of a message whose marks are resolved differs from the number in the data.
pub(super) fn is_rounded(message: &Value) -> bool {
    message[WEIGHT].as_f64().is_some_and(|number| LossWeight::nearest(number).is_some_and(|weight| !weight.is(number)))
}

impl MessageMark {
    /// Whether a message with this value is trained; `None` where the message lacks the key.
    fn read(&self, value: &Value) -> Result<Option<bool>, String> {
        let number = value.as_f64().filter(|number| [0.0, 1.0].contains(number)).map(|number| number == 1.0);
        let truth = match self.values {
            _ if value.is_null() => return Ok(None),
            MarkValues::Bools => value.as_bool(),
            MarkValues::Weights => value.as_f64().and_then(LossWeight::nearest).map(LossWeight::is_trained),
            MarkValues::Both => value.as_bool().or(number),
        };
        let choice = if self.values == MarkValues::Weights { "numbers from 0 to 1" } else { "true or false" };
        let wrong = || format!("has {} {value}: {choice} are its possible values (a key of {})", self.key, self.source);
        truth.map(|truth| Some(truth == self.trained_if)).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Whether a message with these keys is trained; `None` where no key sets it.
    fn trained(keys: Value) -> Result<Option<bool>, String> {
        let mut message = keys;
        let mark = resolve(&mut message)?;
        Ok(if message["train"] == false { Some(false) } else { mark.map(|_| true) })
    }

    #[test]
    fn each_mark_is_obeyed_and_a_value_that_means_neither_is_refused() {
        for MessageMark { key, values, trained_if, .. } in &MARKS {
            let bools = [json!(false), json!(true)];
            let numbers = [json!(0), json!(1.0)];
            for (are_allowed, pair) in [(*values != MarkValues::Weights, bools), (*values != MarkValues::Bools, numbers)] {
                for (truth, value) in [false, true].into_iter().zip(pair) {
                    let found = trained(json!({*key: value}));
                    assert_eq!(found.is_ok(), are_allowed, "{key} {value}: {found:?}");
                    assert!(found.is_err() || found == Ok(Some(truth == *trained_if)), "{key} {value}");
                }
            }
            let fraction = (*values != MarkValues::Weights).then(|| json!(0.5));
            for odd in [json!(2), json!(-1), json!("0"), json!([0]), json!({})].into_iter().chain(fraction) {
                let refused = trained(json!({*key: odd})).unwrap_err();
                assert!(refused.starts_with(&format!("has {key} {odd}: ")) && refused.contains("are its possible values"), "{refused}");
            }
            assert_eq!(trained(json!({*key: null})), Ok(None));
        }
    }

    #[test]
    fn equal_marks_are_one_and_different_marks_contradict_each_other() {
        assert_eq!(trained(json!({"weight": 0, "loss": false, "masked": true})), Ok(Some(false)));
        assert_eq!(trained(json!({"weight": 1, "loss": true, "masked": false})), Ok(Some(true)));
        let refused = trained(json!({"train": true, "loss_mask": 0})).unwrap_err();
        assert_eq!(refused, "has train true and loss_mask 0, which contradict each other");
    }

    #[test]
    fn a_weight_between_0_and_1_trains_a_message_by_so_much() {
        let of = |keys: Value| {
            let mut message = keys;
            resolve(&mut message).map(|_| (weight(&message).value(), is_rounded(&message)))
        };
        assert_eq!(of(json!({"weight": 0.25, "train": true})), Ok((0.25, false)));
        assert_eq!(of(json!({"weight": 0.1})), Ok((410.0 / 4096.0, true)));
        assert_eq!(
            (of(json!({})), of(json!({"weight": 0})), of(json!({"train": false}))),
            (Ok((1.0, false)), Ok((0.0, false)), Ok((0.0, false)))
        );
        assert_eq!(of(json!({"weight": 0.25, "loss": false})).unwrap_err(), "has weight 0.25 and loss false, which contradict each other");
    }
}
