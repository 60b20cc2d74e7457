//! One message, whatever keys it came with: a role, and what it says as one text.

use serde_json::{Map, Value, json};

/// A message as templates are given it.
///
/// # Errors
/// What is wrong with it, in words that follow its name.
pub(super) fn read(message: &Value) -> Result<Value, String> {
    let mut message = normal(message)?;
    check_choice(&message)?;
    let text = match &message["content"] {
        Value::String(_) | Value::Null => return Ok(message),
        // What a tool answers may be any JSON.
        _ if message["role"] == "tool" => return Ok(message),
        Value::Array(parts) => text_of(parts)?,
        // Some templates write nothing of these.
        _ => return Err("has content that is neither text nor parts".into()),
    };
    message["content"] = text.into();
    Ok(message)
}

/// Whether it is trained a message says by `train` or by `weight`; anything else there would be trained, whatever it means.
fn check_choice(message: &Value) -> Result<(), String> {
    let wrong = |key: &str, choice| Err(format!("has {key} {}: {choice} says whether it is trained", message[key]));
    match (&message["train"], &message["weight"]) {
        (Value::Bool(_) | Value::Null, Value::Null) => Ok(()),
        (Value::Bool(_) | Value::Null, weight) if [0.0, 1.0].map(Some).contains(&weight.as_f64()) => Ok(()),
        (Value::Bool(_) | Value::Null, _) => wrong("weight", "0 or 1"),
        _ => wrong("train", "true or false"),
    }
}

/// Parts as one text: most templates of language models write nothing of a list.
fn text_of(parts: &[Value]) -> Result<String, String> {
    let text = |part: &Value| {
        let text = part["text"].as_str().filter(|_| part["type"] == "text").map(String::from);
        text.ok_or_else(|| format!("has a part of type {}: only text is trained", part["type"]))
    };
    parts.iter().map(text).collect()
}

/// A message with `role` and `content`.
///
/// # Errors
/// As [`read`].
pub(super) fn normal(message: &Value) -> Result<Value, String> {
    let mut normal = message.as_object().cloned().unwrap_or_default();
    if normal.get("role").is_some_and(Value::is_string) {
        return Ok(with_reasoning(normal));
    }
    let (Some(Value::String(from)), Some(value)) = (normal.remove("from"), normal.remove("value")) else {
        return Err("has neither role and content nor from and value".into());
    };
    if from == "function_call" {
        normal.insert("tool_calls".into(), tool_calls(&value).ok_or("is a function_call without the JSON of a name and arguments")?);
    }
    let (role, content) = match from.as_str() {
        "human" => ("user", value),
        "gpt" => ("assistant", value),
        "observation" => ("tool", value),
        "function_call" => ("assistant", "".into()),
        other => (other, value),
    };
    normal.insert("role".into(), role.into());
    normal.insert("content".into(), content);
    Ok(with_reasoning(normal))
}

/// The calls in a message `function_call`, one or a list, as LLaMA-Factory's data has them.
fn tool_calls(value: &Value) -> Option<Value> {
    let parsed: Value = serde_json::from_str(value.as_str()?).ok()?;
    let calls = if let Value::Array(calls) = parsed { calls } else { vec![parsed] };
    let is_call = |call: &Value| call["name"].is_string() && call.get("arguments").is_some();
    let call = |call: Value| json!({"type": "function", "function": call});
    (!calls.is_empty() && calls.iter().all(is_call)).then(|| calls.into_iter().map(call).collect())
}

/// Fills the names that templates have for a message's reasoning, as `transformers` does.
fn with_reasoning(mut message: Map<String, Value>) -> Value {
    let names = ["reasoning_content", "thinking", "reasoning"];
    if let Some(reasoning) = names.iter().find_map(|name| message.get(*name).filter(|value| !value.is_null())).cloned() {
        message.entry("thinking").or_insert_with(|| reasoning.clone());
        message.insert("reasoning_content".into(), reasoning);
    }
    message.into()
}
