//! Settings in the words of flags, for people.

use serde_json::Value;

/// What a person reads when the setting `key`, a field of [`Settings`](super::settings::Settings) as JSON, was `then` and is `now`.
pub fn changed(key: &str, then: &Value, now: &Value) -> String {
    let ((flag, before), (flag_now, after)) = (named(key, then), named(key, now));
    if flag == flag_now {
        format!("--{flag} was {before} before and is {after} from here on")
    } else {
        format!("--{flag} was {before} before; from here on --{flag_now} is {after}")
    }
}

/// The flag that sets `key`, and its value as one writes it.
fn named(key: &str, value: &Value) -> (String, String) {
    match (key, value.get("steps"), value.get("epochs")) {
        ("train_length", Some(steps), _) => ("max-steps".into(), text(steps)),
        ("train_length", _, Some(epochs)) => ("num-train-epochs".into(), text(epochs)),
        _ => (key.replace('_', "-"), text(value)),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "not set".into(),
        Value::String(text) => text.clone(),
        Value::Array(all) if all.is_empty() => "not set".into(),
        Value::Array(all) => all.iter().map(text).collect::<Vec<_>>().join(" "),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn changes_are_told_in_flags() {
        let steps = |n: u64| json!({"steps": n});
        assert_eq!(changed("train_length", &steps(60), &steps(90)), "--max-steps was 60 before and is 90 from here on");
        let mixed = changed("train_length", &steps(60), &json!({"epochs": 3.0}));
        assert_eq!(mixed, "--max-steps was 60 before; from here on --num-train-epochs is 3.0");
        assert_eq!(changed("learning_rate", &json!(0.01), &json!(0.5)), "--learning-rate was 0.01 before and is 0.5 from here on");
        assert_eq!(changed("data", &json!(["a", "b"]), &json!([])), "--data was a b before and is not set from here on");
    }
}
