//! Messages of which a template writes nothing: those of a role that it does not know, most often.

use super::sample::ChatSample;
use serde_json::Value;

/// Sentences about those of `messages` that stand in none of `samples`. Messages behind the last answer may do so.
pub(super) fn remarks(messages: &[Value], samples: &[ChatSample]) -> Vec<String> {
    let Some(last) = messages.iter().rposition(|message| message["role"] == "assistant").filter(|_| !samples.is_empty()) else {
        return vec![];
    };
    let lost = messages[..=last].iter().filter(|message| is_lost(message, samples));
    let mut remarks: Vec<String> = lost.map(|message| format!("the chat template omits a message of role {}", message["role"])).collect();
    remarks.dedup();
    remarks
}

/// Whether no line of the message stands in a sample, neither as it is nor as JSON writes it.
fn is_lost(message: &Value, samples: &[ChatSample]) -> bool {
    let Some(content) = message["content"].as_str() else { return false };
    let in_samples = |line: &str| samples.iter().rev().any(|sample| sample.text.contains(line));
    // A template may write an answer without the reasoning on the same line.
    let behind_reasoning = |line: &str| line.rsplit_once("</think>").is_some_and(|(_, rest)| !rest.is_empty() && in_samples(rest));
    let is_written = |line: &str| in_samples(line) || in_samples(Value::from(line).to_string().trim_matches('"')) || behind_reasoning(line);
    let mut lines = content.lines().map(str::trim).filter(|line| !line.is_empty()).peekable();
    lines.peek().is_some() && !lines.any(is_written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_message_is_lost_where_no_line_of_it_is_written() {
        let sample = |text: &str| ChatSample::trained_from(0, text.into());
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let of = |content: &str, texts: &[&str]| {
            let samples: Vec<ChatSample> = texts.iter().map(|text| sample(text)).collect();
            remarks(&[turn("developer", content), turn("assistant", "yes"), turn("user", "behind the answer")], &samples).len()
        };
        assert_eq!(of("be good", &["<user>a<assistant>yes"]), 1);
        assert_eq!(of("be good", &["<user>be good<assistant>yes"]), 0);
        assert_eq!(of("be good", &["be good yes", "another sample yes"]), 0, "one of several samples");
        assert_eq!(of("<think>a thought</think>\nbe good \n", &["be good yes"]), 0, "a line is dropped, the message is not");
        assert_eq!(of("<think>a thought</think>good", &["good yes"]), 0, "reasoning on the same line is dropped, the message is not");
        assert_eq!(of("say \"a\"\tb", &["{\"say \\\"a\\\"\\tb\"} yes"]), 0, "as JSON");
        assert_eq!((of("", &["yes"]), of(" \n", &["yes"]), of("be good", &[])), (0, 0, 0));
        let developers = [turn("developer", "one"), turn("developer", "two"), turn("assistant", "yes")];
        assert_eq!(remarks(&developers, &[sample("yes")]), ["the chat template omits a message of role \"developer\""]);
    }
}
