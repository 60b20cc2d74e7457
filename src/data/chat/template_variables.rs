//! Variables that a chat template is given beside messages: those of a flag, and those of a record.

use super::integers;
use serde_json::{Map, Value};

/// Names that a template is given in any case.
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// The variables that `value` holds: an object, or its JSON in a string.
///
/// # Errors
/// A value that is no object, and a variable with a reserved name, in words that follow a name.
pub(super) fn of(value: &Value) -> Result<Map<String, Value>, String> {
    let expected = "is not an object of variables, such as {\"enable_thinking\": false}";
    let parsed = match value {
        Value::String(text) => integers::parse(text).map_err(|e| format!("{expected}: {e}"))?,
        other => other.clone(),
    };
    let Value::Object(variables) = parsed else { return Err(expected.into()) };
    match variables.keys().find(|name| RESERVED.contains(&name.as_str())) {
        Some(name) => Err(format!("names `{name}`, which every template already receives")),
        None => Ok(variables),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn variables_are_an_object_or_its_json_and_no_name_that_has_its_meaning() {
        let variables = json!({"enable_thinking": false, "effort": null});
        for held in [variables.clone(), variables.to_string().into()] {
            assert_eq!(Value::from(of(&held).unwrap()), variables);
        }
        for odd in [json!([]), json!("[]"), json!("{"), json!(1), json!("enable_thinking=false")] {
            assert!(of(&odd).unwrap_err().starts_with("is not an object of variables"), "{odd}");
        }
        for name in RESERVED {
            assert_eq!(of(&json!({name: 1})), Err(format!("names `{name}`, which every template already receives")));
        }
    }
}
