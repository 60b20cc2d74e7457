//! A message with normalised keys: a role, and its content as one text.

use super::token_weights::ROUNDED;
use super::{choices, foreign_names, integers, parts, tool_calls};
use serde_json::{Map, Value, json};

/// A message as templates are given it.
#[derive(Debug)]
pub(super) struct ReadMessage {
    pub(super) message: Value,
    /// Sentences about keys and the role that are not read.
    pub(super) remarks: Vec<String>,
}

/// Reads a message; `takes_parts` decides for a role whether its content stays a list of parts. Keys that are null are left out, as in
/// `transformers`: a template would write the null, or would treat the key as set.
///
/// # Errors
/// The fault of the message, in words that follow its name.
pub(super) fn read(message: &Value, takes_parts: impl Fn(&str) -> bool) -> Result<ReadMessage, String> {
    let mut message = normal(without_nulls(message))?;
    let mut remarks = foreign_names::of_message(&message)?;
    let mark = choices::resolve(&mut message)?;
    remarks.extend(choices::is_rounded(&message).then(|| ROUNDED.to_string()));
    remarks.extend(mark.filter(|_| message["role"] != "assistant").map(|mark| {
        format!(
            "`{mark}` of a message of role {} is not read: messages of role assistant are trained, or all messages with --train-on all",
            message["role"]
        )
    }));
    read_calls(&mut message)?;
    read_content(&mut message, takes_parts)?;
    Ok(ReadMessage { message, remarks })
}

fn without_nulls(message: &Value) -> Map<String, Value> {
    let entries = message.as_object().into_iter().flatten();
    entries.filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn read_calls(message: &mut Value) -> Result<(), String> {
    let Some(calls) = message.get("tool_calls") else { return Ok(()) };
    let calls = tool_calls::calls(calls).map_err(|cause| format!("has a `tool_calls` that {cause}"))?;
    match (calls, message.as_object_mut()) {
        (Some(calls), _) => message["tool_calls"] = calls,
        (None, Some(entries)) => drop(entries.shift_remove("tool_calls")),
        (None, None) => {}
    }
    Ok(())
}

fn read_content(message: &mut Value, takes_parts: impl Fn(&str) -> bool) -> Result<(), String> {
    let is_text = |part: &Value| part["type"] == "text" && part["text"].is_string();
    let is_of_tool = message["role"] == "tool";
    let text = match &message["content"] {
        Value::String(_) | Value::Null => return Ok(()),
        // A tool may answer with any JSON.
        Value::Array(list) if !is_of_tool || list.iter().all(is_text) => parts::joined(list)?,
        _ if is_of_tool => return Ok(()),
        // Some templates write nothing of these.
        _ => return Err("has content that is neither text nor parts".into()),
    };
    if !takes_parts(message["role"].as_str().unwrap_or_default()) {
        message["content"] = text.into();
    }
    Ok(())
}
/// A message with `role` and `content`.
///
/// # Errors
/// As [`read`].
pub(super) fn normal(mut normal: Map<String, Value>) -> Result<Value, String> {
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
    let parsed: Value = integers::parse(value.as_str()?).ok()?;
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
