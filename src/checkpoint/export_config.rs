//! Rotations in the `config.json` of an export: as `transformers` 5 names them, and beside that as version 4 and the servers on it do,
//! which would otherwise rotate by their defaults without a word.

use serde_json::{Map, Value};

const NEW: &str = "rope_parameters";
const OLD: &str = "rope_scaling";
const THETA: &str = "rope_theta";
/// Parameters that both versions have beside the object.
const BESIDE: [&str; 2] = [THETA, "partial_rotary_factor"];
/// The base of layers that slide, as version 4 of models with two rotations names it.
const LOCAL_THETA: &str = "rope_local_base_freq";

/// The text of a JSON file.
pub(super) fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// Adds the old names of keys that `config` has under new names; existing old names stay.
pub(super) fn add_old_names(config: &mut Map<String, Value>) {
    // Version 4 has no Gemma 4, and version 5 would read the old name in place of the new one.
    let is_new = config.get("model_type").and_then(Value::as_str).is_some_and(|kind| kind.starts_with("gemma4"));
    let Some(Value::Object(new)) = config.get(NEW).filter(|_| !is_new).cloned() else { return };
    let of_type = |kind: &str| new.get(kind).and_then(Value::as_object);
    let (all, sliding) = (of_type("full_attention").unwrap_or(&new), of_type("sliding_attention"));
    let add = |config: &mut Map<String, Value>, key: &str, value: Option<&Value>| {
        if let Some(value) = value.filter(|_| config.get(key).is_none_or(Value::is_null)) {
            config.insert(key.into(), value.clone());
        }
    };
    for key in BESIDE {
        add(config, key, all.get(key));
    }
    add(config, LOCAL_THETA, sliding.and_then(|sliding| sliding.get(THETA)));
    add(config, OLD, stretched(all).as_ref());
}

/// The object of a rotation that is stretched, without the other parameters beside it.
fn stretched(parameters: &Map<String, Value>) -> Option<Value> {
    let kind = parameters.get("rope_type").or(parameters.get("type")).filter(|kind| !kind.is_null())?;
    let inner = parameters.iter().filter(|(key, _)| !BESIDE.contains(&key.as_str()));
    (kind != "default").then(|| inner.map(|(key, value)| (key.clone(), value.clone())).collect::<Map<_, _>>().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with_old_names(config: Value) -> Value {
        let mut config = config.as_object().cloned().unwrap();
        add_old_names(&mut config);
        config.into()
    }

    #[test]
    fn new_names_are_also_written_under_old_ones_and_old_ones_stay() {
        let default = json!({"rope_theta": 5e5, "rope_type": "default"});
        let gemma4 = json!({"model_type": "gemma4_text", "rope_parameters": {"full_attention": {"rope_type": "proportional"}}});
        assert_eq!(with_old_names(gemma4.clone()), gemma4);
        let flat = with_old_names(json!({"rope_parameters": default}));
        assert_eq!(flat, json!({"rope_parameters": default, "rope_theta": 5e5}));
        let llama3 = json!({"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "partial_rotary_factor": 0.5});
        let stretched = with_old_names(json!({"rope_parameters": llama3}));
        let old = json!({"rope_type": "llama3", "factor": 8.0});
        let want = json!({"rope_parameters": llama3, "rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": old});
        assert_eq!(stretched, want);
        let two = json!({"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}});
        let both = with_old_names(json!({"rope_parameters": two}));
        let old = json!({"rope_type": "linear", "factor": 8.0});
        assert_eq!(both, json!({"rope_parameters": two, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": old}));
        for text in [json!({"rope_theta": 1e4}), json!({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7.0}}), json!({})] {
            assert_eq!(with_old_names(text.clone()), text);
        }
    }
}
