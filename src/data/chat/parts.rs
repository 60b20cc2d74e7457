//! Content as a list of parts. Templates of language models write nothing of a list, or write it as Python does; those of other models go
//! over its parts. A template is asked once for each role: a short conversation with two parts shows whether both are written as text.

use super::template::ChatTemplate;
use serde_json::{Map, Value, json};
use std::sync::OnceLock;

/// Roles that templates know.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];
/// Two texts that no template holds.
const PART_TEXTS: [&str; 2] = ["superoffload-one", "superoffload-two"];

/// For each role whether the template goes over the parts of content, as far as it was asked: without tools, and with tools.
#[derive(Default)]
pub(in crate::data) struct PartRoles([[OnceLock<bool>; ROLES.len()]; 2]);

impl PartRoles {
    /// Whether `template` writes the parts of a message of `role`, given `variables`, in a conversation that has tools or has none.
    pub(super) fn are_written(&self, template: &ChatTemplate, variables: &Map<String, Value>, has_tools: bool, role: &str) -> bool {
        let known = ROLES.iter().position(|known| *known == role).and_then(|at| self.0[usize::from(has_tools)].get(at));
        known.is_some_and(|known| *known.get_or_init(|| writes_parts(template, variables, has_tools, role).unwrap_or(false)))
    }
}

fn writes_parts(template: &ChatTemplate, variables: &Map<String, Value>, has_tools: bool, role: &str) -> Result<bool, String> {
    let function = json!({"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}});
    let tools = has_tools.then(|| json!([{"type": "function", "function": function}]));
    let part = |text: &str| json!({"type": "text", "text": text});
    let requested = json!({"role": role, "content": PART_TEXTS.map(part), "name": "f", "tool_call_id": "call00000"});
    let user = json!({"role": "user", "content": "a"});
    let call = json!({"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}});
    let messages = match role {
        "system" => vec![requested, user],
        "user" => vec![requested],
        "assistant" => vec![user, requested],
        _ => vec![user, json!({"role": "assistant", "content": "", "tool_calls": [call]}), requested],
    };
    let template = template.for_tools(tools.as_ref());
    let text = template.renderings(&messages, tools.as_ref())?.given(variables)?.whole()?.text;
    let between = text.split_once(PART_TEXTS[0]).and_then(|(_, rest)| rest.split_once(PART_TEXTS[1]));
    Ok(between.is_some_and(|(between, _)| !between.contains(['"', '\''])))
}

/// Parts as one text.
///
/// # Errors
/// For a part that is no text, in words that follow the message's name.
pub(super) fn joined(parts: &[Value]) -> Result<String, String> {
    let text = |part: &Value| {
        let text = part["text"].as_str().filter(|_| part["type"] == "text").map(String::from);
        text.ok_or_else(|| format!("has a part of type {}: text parts only", part["type"]))
    };
    parts.iter().map(text).collect()
}
