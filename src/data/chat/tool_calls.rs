//! Calls of tools and their schemas, as lists: some data holds them as JSON in strings, and tables fill in keys that a row lacks.

use super::integers;
use serde_json::{Map, Value};

/// Keywords of JSON Schema under which null is a value, and under which no schemas stand.
const VALUES: [&str; 4] = ["default", "const", "enum", "examples"];
/// Keywords of JSON Schema under which names stand, each with a schema.
const NAMED_SCHEMAS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// The tools that `value` holds: a list, or its JSON; `None` for null, an empty list and an empty string.
///
/// # Errors
/// Errors of the parser, in words that follow a name; a value that is no list.
pub(super) fn tools(value: &Value) -> Result<Option<Value>, String> {
    let Some(list) = list(value)? else { return Ok(None) };
    Ok((!list.is_empty()).then(|| list.into_iter().map(without_filled_in).collect()))
}

/// The calls that `value` holds: a list of objects, or its JSON; `None` for null and an empty string. Arguments stay as they are.
///
/// # Errors
/// Errors of the parser, in words that follow a name; a value that is no list of objects.
pub(super) fn calls(value: &Value) -> Result<Option<Value>, String> {
    let Some(list) = list(value)? else { return Ok(None) };
    let call = |call: Value| match call {
        Value::Object(call) => Ok(without_nulls(call).into()),
        _ => Err("is not a list of calls".to_string()),
    };
    list.into_iter().map(call).collect::<Result<Vec<Value>, _>>().map(|list| Some(list.into()))
}

/// Reads a list; the list and its elements may be JSON in strings.
fn list(value: &Value) -> Result<Option<Vec<Value>>, String> {
    let parsed = |value: &Value| match value {
        Value::String(text) => integers::parse(text).map_err(|e| format!("is not the JSON of a list: {e}")),
        other => Ok(other.clone()),
    };
    match value {
        Value::Null => Ok(None),
        Value::String(text) if text.trim().is_empty() => Ok(None),
        value => match parsed(value)? {
            Value::Null => Ok(None),
            Value::Array(list) => list.iter().map(parsed).collect::<Result<_, _>>().map(Some),
            _ => Err("is not a list".into()),
        },
    }
}

/// A call, and the function in it, without keys that are null.
fn without_nulls(call: Map<String, Value>) -> Map<String, Value> {
    let function = |(key, value): (String, Value)| match value {
        Value::Object(function) if key == "function" => (key, function.into_iter().filter(|(_, value)| !value.is_null()).collect()),
        value => (key, value),
    };
    call.into_iter().filter(|(_, value)| !value.is_null()).map(function).collect()
}

/// A tool or a schema in it, without keys that are null where null is no value of the keyword.
fn without_filled_in(schema: Value) -> Value {
    match schema {
        Value::Array(list) => list.into_iter().map(without_filled_in).collect(),
        Value::Object(keywords) => keywords.into_iter().filter_map(|(keyword, value)| keyword_value(keyword, value)).collect(),
        other => other,
    }
}

fn keyword_value(keyword: String, value: Value) -> Option<(String, Value)> {
    let kept = match value {
        value if VALUES.contains(&keyword.as_str()) => value,
        Value::Null => return None,
        Value::Object(named) if NAMED_SCHEMAS.contains(&keyword.as_str()) => {
            named.into_iter().filter(|(_, schema)| !schema.is_null()).map(|(name, schema)| (name, without_filled_in(schema))).collect()
        }
        value => without_filled_in(value),
    };
    Some((keyword, kept))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lists_may_be_json_in_strings_whole_or_one_by_one() {
        let call = json!({"function": {"name": "f", "arguments": "{}"}});
        for held in
            [json!([call]), json!([call.to_string()]), json!(json!([call]).to_string()), json!(json!([call.to_string()]).to_string())]
        {
            assert_eq!(calls(&held), Ok(Some(json!([call]))), "{held}");
            assert_eq!(tools(&held), Ok(Some(json!([call]))), "{held}");
        }
        for none in [json!(null), json!(""), json!(" "), json!("null")] {
            assert_eq!((calls(&none), tools(&none)), (Ok(None), Ok(None)), "{none}");
        }
        assert_eq!((calls(&json!([])), tools(&json!([]))), (Ok(Some(json!([]))), Ok(None)));
        for odd in [json!({}), json!(5), json!("{}"), json!("[1"), json!("x"), json!(["x"])] {
            assert!(calls(&odd).is_err() && tools(&odd).is_err(), "{odd}");
        }
        assert_eq!(calls(&json!([1])), Err("is not a list of calls".into()));
    }

    #[test]
    fn keys_that_a_table_filled_in_are_dropped_and_values_stay() {
        let filled = json!([{"type": "function", "id": null, "function": {"name": "f", "description": null, "arguments": {"x": null}}}]);
        let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"x": null}}}]);
        assert_eq!(calls(&filled), Ok(Some(call)), "an argument may be null");
        let schema = |nulls: bool| {
            let mut properties = json!({"a": {"type": "string", "default": null, "enum": ["b", null]}, "default": {"type": "integer"}});
            let mut tool = json!({"type": "function"});
            if nulls {
                properties["day"] = Value::Null;
                properties["a"]["items"] = Value::Null;
                tool["strict"] = Value::Null;
            }
            tool["function"] = json!({"name": "f", "parameters": {"type": "object", "properties": properties, "anyOf": [{"const": null}]}});
            json!([tool])
        };
        assert_eq!(tools(&schema(true)), Ok(Some(schema(false))));
        let named = json!([{"parameters": {"properties": {"default": null, "x": {}}}}]);
        assert_eq!(
            tools(&named),
            Ok(Some(json!([{"parameters": {"properties": {"x": {}}}}]))),
            "a property may have the name of a keyword"
        );
    }
}
