//! Messages with a mark at the end of their content, which shows where a template writes them.

use serde_json::Value;

/// The mark, around the index of a message: no character of any text.
pub(super) const PROBE: char = '\u{10fffe}';

/// `message` with the mark of `turn` at the end of its content; `None` where it has no text.
///
/// # Errors
/// For content that holds the mark's character already.
pub(super) fn marked(message: &Value, turn: usize) -> Result<Option<Value>, String> {
    let mut marked = message.clone();
    let content = marked.get_mut("content");
    let text = match content {
        Some(Value::Array(parts)) => parts.last_mut().and_then(|part| part.get_mut("text")),
        content => content,
    };
    let Some(Value::String(text)) = text.filter(|text| text.as_str().is_some_and(|text| !text.is_empty())) else { return Ok(None) };
    if text.contains(PROBE) {
        return Err(format!("message {turn} holds a private character (U+10FFFE)"));
    }
    text.push_str(&format!("{PROBE}{turn}{PROBE}"));
    Ok(Some(marked))
}

/// The marks in `text`, in order: for each the index of its message and the byte after it.
pub(super) fn marks(text: &str) -> Vec<(usize, usize)> {
    let ends: Vec<usize> = text.match_indices(PROBE).map(|(at, mark)| at + mark.len()).collect();
    let mark = |pair: &[usize]| Some((text[pair[0]..pair[1]].trim_end_matches(PROBE).parse().ok()?, pair[1]));
    ends.chunks_exact(2).filter_map(mark).collect()
}
