//! Settings in the words of flags, for people.

use serde::Serialize;
use serde_json::Value;

/// The flag that sets the field `name` of [`Settings`](crate::config::settings::Settings), without its dashes.
pub(crate) fn flag_name(name: &str) -> String {
    name.replace('_', "-")
}

/// The value of a setting as checkpoints hold it, or the error message if JSON cannot represent it.
pub(crate) fn value(value: &impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_else(|cause| Value::String(cause.to_string()))
}

/// The flag and value that set the field `name` to `value`.
pub(crate) fn flag(name: &str, value: &Value) -> String {
    let (flag, value) = named(name, value);
    format!("--{flag} {}", written(value))
}

/// Settings with flags that take several values as separate words.
const LISTS_OF_PATHS: [&str; 2] = ["data", "eval_data"];

/// Settings with flags that take one value and may be repeated: their values may have commas.
const LISTS_OF_EXPRESSIONS: [&str; 2] = ["freeze", "train_only"];

/// The command-line arguments that set the field `name` to `value`.
pub(crate) fn words(name: &str, value: &Value) -> Vec<String> {
    let (flag, value) = named(name, value);
    match value {
        Value::Bool(_) => vec![format!("--{flag}={}", written(value))],
        Value::Array(all) if LISTS_OF_PATHS.contains(&name) => [format!("--{flag}")].into_iter().chain(all.iter().map(written)).collect(),
        Value::Array(all) if LISTS_OF_EXPRESSIONS.contains(&name) => all.iter().map(|one| format!("--{flag}={}", written(one))).collect(),
        value => vec![format!("--{flag}"), written(value)],
    }
}

/// `word` as a shell reads it.
pub(crate) fn as_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,=@+%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// A value in the notation of the command line.
pub(crate) fn written(value: &Value) -> String {
    match value {
        Value::Array(all) => all.iter().map(written).collect::<Vec<_>>().join(","),
        Value::Number(number) => number.as_f64().filter(|_| number.is_f64()).map_or_else(|| number.to_string(), short),
        value => text(value),
    }
}

/// The shortest notation of a number, such as `5e-5` and `3`.
fn short(number: f64) -> String {
    format!("{number:?}").trim_end_matches(".0").into()
}

/// The message that the setting `key`, a field of [`Settings`](crate::config::settings::Settings) as JSON, changed from `then` to `now`.
pub(crate) fn changed(key: &str, then: &Value, now: &Value) -> String {
    let ((flag, then), (flag_now, now)) = (named(key, then), named(key, now));
    let (before, after) = (text(then), text(now));
    if flag == flag_now {
        format!("--{flag} was {before} before and is {after} from here on")
    } else {
        format!("--{flag} was {before} before; from here on --{flag_now} is {after}")
    }
}

/// The flag that sets `key`, and its value.
pub(crate) fn named<'v>(key: &str, value: &'v Value) -> (String, &'v Value) {
    match (key, value.get("steps"), value.get("epochs")) {
        ("train_length", Some(steps), _) => ("max-steps".into(), steps),
        ("train_length", _, Some(epochs)) => ("num-train-epochs".into(), epochs),
        _ => (flag_name(key), value),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "not set".into(),
        Value::String(text) => text.clone(),
        Value::Array(all) if all.is_empty() => "not set".into(),
        Value::Array(all) => all.iter().map(text).collect::<Vec<_>>().join(" "),
        // A choice that holds a value, such as a number of buckets.
        Value::Object(choice) if choice.len() == 1 => choice.values().map(text).collect(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::choices::ResidentBuckets;
    use serde_json::json;

    #[test]
    fn changes_are_shown_as_flags() {
        let steps = |n: u64| json!({"steps": n});
        assert_eq!(changed("train_length", &steps(60), &steps(90)), "--max-steps was 60 before and is 90 from here on");
        let mixed = changed("train_length", &steps(60), &json!({"epochs": 3.0}));
        assert_eq!(mixed, "--max-steps was 60 before; from here on --num-train-epochs is 3.0");
        assert_eq!(changed("learning_rate", &json!(0.01), &json!(0.5)), "--learning-rate was 0.01 before and is 0.5 from here on");
        assert_eq!(changed("data", &json!(["a", "b"]), &json!([])), "--data was a b before and is not set from here on");
    }

    #[test]
    fn values_are_written_as_flags_take_them() {
        assert_eq!(flag("resident_buckets", &value(&ResidentBuckets::Count(5))), "--resident-buckets 5");
        assert_eq!(flag("resident_buckets", &value(&ResidentBuckets::All)), "--resident-buckets all");
        assert_eq!(flag("bucket_mib", &json!(32.0)), "--bucket-mib 32");
        assert_eq!(flag("learning_rate", &json!(5e-5)), "--learning-rate 5e-5");
        assert_eq!(flag("without", &json!(["stv", "mpam"])), "--without stv,mpam");
        assert_eq!(flag("train_length", &json!({"steps": 60})), "--max-steps 60");
    }
}
