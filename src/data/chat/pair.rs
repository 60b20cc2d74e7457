//! A prompt with a chosen and a rejected answer, by the rules of TRL.

use super::template::ChatTemplate;
use serde_json::{Map, Value};

/// A prompt and two answers to it, as texts.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct PairTexts {
    /// The text before the answers. A template may write its end otherwise when an answer follows.
    pub(in crate::data) prompt: String,
    /// The prompt with the chosen answer, and with the rejected answer.
    pub(in crate::data) whole: [String; 2],
    /// Whether no template wrote them: then begin and end of text stand around them.
    pub(in crate::data) is_plain: bool,
}

impl PairTexts {
    /// Of plain texts. Without a prompt, the common beginning of both answers is the prompt.
    ///
    /// # Errors
    /// A description of the fault: an empty answer, or answers without a common beginning.
    pub(super) fn of_text(prompt: Option<String>, chosen: String, rejected: String) -> Result<Self, String> {
        let has_prompt = prompt.is_some();
        let prompt = prompt.unwrap_or_else(|| common_beginning(&chosen, &rejected).into());
        if prompt.is_empty() {
            return Err("has no prompt: neither a column `prompt`, nor a common beginning of `chosen` and `rejected`".into());
        }
        let whole = if has_prompt { [chosen, rejected].map(|answer| prompt.clone() + &answer) } else { [chosen, rejected] };
        Ok(Self { prompt, whole, is_plain: true })
    }

    /// Of the messages of a prompt and of both answers, as `template` writes them with these tools and variables.
    ///
    /// # Errors
    /// A description of the fault: no prompt, or an error of the template.
    pub(super) fn of_messages(
        prompt: &[Value],
        answers: [Vec<Value>; 2],
        template: &ChatTemplate,
        (tools, variables): (Option<&Value>, &Map<String, Value>),
    ) -> Result<Self, String> {
        if prompt.is_empty() {
            return Err("has no prompt: neither a column `prompt`, nor common first messages of `chosen` and `rejected`".into());
        }
        let renderings = |answer: &[Value]| template.renderings(&[prompt, answer].concat(), tools)?.given(variables);
        let [mut chosen, mut rejected] = [renderings(&answers[0])?, renderings(&answers[1])?];
        let before = chosen.render(prompt.len(), true)?.text;
        Ok(Self { prompt: before, whole: [chosen.whole()?.text, rejected.whole()?.text], is_plain: false })
    }
}

/// The text with which both answers begin. Where they differ after a space, the space belongs to the answers.
fn common_beginning<'a>(chosen: &'a str, rejected: &str) -> &'a str {
    let different = chosen.char_indices().zip(rejected.chars()).find(|((_, a), b)| a != b).map(|((at, _), _)| at);
    match different {
        Some(at) => chosen[..at].strip_suffix(' ').unwrap_or(&chosen[..at]),
        // One answer is the beginning of the other one: its last character belongs to both answers.
        None => {
            let shorter = if chosen.len() < rejected.len() { chosen } else { &chosen[..rejected.len()] };
            let last = shorter.char_indices().next_back().map_or(0, |(at, _)| at);
            &chosen[..last]
        }
    }
}

/// Takes the messages with which both answers begin. Where one answer is the beginning of the other one, its last message stays.
pub(super) fn take_common(answers: &mut [Vec<Value>; 2]) -> Vec<Value> {
    let [chosen, rejected] = answers;
    let equal = chosen.iter().zip(rejected.iter()).take_while(|(a, b)| a == b).count();
    let common = equal.min(chosen.len().min(rejected.len()).saturating_sub(1));
    rejected.drain(..common);
    chosen.drain(..common).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::chat::date::Day;
    use serde_json::json;

    fn prompt_of(chosen: &str, rejected: &str) -> Result<String, String> {
        PairTexts::of_text(None, chosen.into(), rejected.into()).map(|pair| pair.prompt)
    }

    #[test]
    fn the_common_beginning_is_the_prompt_as_trl_extracts_it() {
        assert_eq!(prompt_of("The sky is blue.", "The sky is green."), Ok("The sky is".into()));
        assert_eq!(prompt_of("2+2=4", "2+2=5"), Ok("2+2=".into()));
        assert_eq!(prompt_of("ab", "abc"), Ok("a".into()));
        assert_eq!(prompt_of("äöü", "äöü"), Ok("äö".into()));
        for (chosen, rejected) in [("", ""), ("a", "b"), ("a", "a"), ("", "x")] {
            assert!(prompt_of(chosen, rejected).unwrap_err().contains("has no prompt"), "{chosen} {rejected}");
        }
    }

    #[test]
    fn common_messages_are_the_prompt_and_one_answer_stays() {
        let message = |content: &str| json!({"role": "user", "content": content});
        let messages = |contents: &[&str]| contents.iter().map(|content| message(content)).collect::<Vec<_>>();
        let taken = |chosen: &[&str], rejected: &[&str]| {
            let mut answers = [messages(chosen), messages(rejected)];
            let prompt = take_common(&mut answers);
            (prompt.len(), answers.map(|answer| answer.len()))
        };
        assert_eq!(taken(&["q", "a"], &["q", "b"]), (1, [1, 1]));
        assert_eq!(taken(&["q", "a"], &["q", "a", "r", "b"]), (1, [1, 3]));
        assert_eq!(taken(&["a"], &["b"]), (0, [1, 1]));
        assert_eq!(taken(&[], &["b"]), (0, [0, 1]));
    }

    #[test]
    fn a_template_writes_the_prompt_up_to_where_the_answer_begins() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let template = ChatTemplate::new(source, Map::new(), Day::today()).unwrap();
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let answers = ["yes", "no"].map(|content| vec![turn("assistant", content)]);
        let pair = PairTexts::of_messages(&[turn("user", "well?")], answers.clone(), &template, (None, &Map::new())).unwrap();
        let whole = ["<user>well?<assistant>yes".into(), "<user>well?<assistant>no".into()];
        assert_eq!(pair, PairTexts { prompt: "<user>well?<assistant>".into(), whole, is_plain: false });
        assert!(PairTexts::of_messages(&[], answers, &template, (None, &Map::new())).unwrap_err().contains("has no prompt"));
    }
}
