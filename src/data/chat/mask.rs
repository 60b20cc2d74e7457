//! Which text of a conversation is trained.
//!
//! With `{% generation %}` in the template, what it marks. Without, by the longest common prefix: for a turn, what the template writes up
//! to its end, after what that has in common with the prompt that asks for the turn. A prompt may open a reasoning block that the turn
//! does not have, so the one need not be the beginning of the other. Where a later turn changes how an earlier one is written (reasoning
//! that is left out afterwards), the earlier one becomes a sample of its own: that is what a model sees when it answers.

use super::template::ChatTemplate;
use serde_json::Value;
use std::ops::Range;

/// What `--train-on` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrainOn {
    /// Text and token ids all, a completion after its prompt, all answers of a chat.
    Auto,
    /// Every token.
    All,
    /// What follows the prompt, where there is one.
    Completion,
    /// All answers of the assistant.
    Assistant,
    /// The last answer of the assistant.
    Last,
}

/// Text, and the bytes of it that are trained, in order.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct ChatSample {
    pub(in crate::data) text: String,
    pub(in crate::data) trained: Vec<Range<usize>>,
}

/// Messages, and from which of them on answers may be trained.
pub(super) struct Conversation {
    pub(super) messages: Vec<Value>,
    pub(super) tools: Option<Value>,
    /// Messages of the prompt, where the record tells it apart.
    pub(super) prompt: usize,
}

impl Conversation {
    /// The samples that `train_on` makes of it; none where nothing is trained.
    ///
    /// # Errors
    /// The template's, in words.
    pub(super) fn samples(&self, template: &ChatTemplate, train_on: TrainOn) -> Result<Vec<ChatSample>, String> {
        let whole = template.render(&self.messages, self.tools.as_ref(), false)?;
        let answers = self.answers();
        let trained = self.trained(&answers, train_on);
        if train_on == TrainOn::All && trained.len() == self.messages.len() {
            return Ok(vec![ChatSample { trained: std::iter::once(0..whole.text.len()).collect(), text: whole.text }]);
        }
        if template.has_marks() && whole.generated.len() == answers.len() && train_on != TrainOn::All {
            let spans = answers.iter().zip(whole.generated).filter(|(turn, span)| trained.contains(turn) && !span.is_empty());
            let spans: Vec<_> = spans.map(|(_, span)| span).collect();
            return Ok(if spans.is_empty() { vec![] } else { vec![ChatSample { text: whole.text, trained: spans }] });
        }
        self.by_common_prefix(template, whole.text, &trained)
    }

    /// Indices of the assistant's messages.
    fn answers(&self) -> Vec<usize> {
        (0..self.messages.len()).filter(|&turn| self.messages[turn]["role"] == "assistant").collect()
    }

    /// Indices of the messages that are trained: what was asked for, but for those that say no themselves.
    fn trained(&self, answers: &[usize], train_on: TrainOn) -> Vec<usize> {
        let asked: Vec<usize> = match train_on {
            TrainOn::All => (0..self.messages.len()).collect(),
            TrainOn::Auto | TrainOn::Completion | TrainOn::Assistant => {
                answers.iter().copied().filter(|&turn| turn >= self.prompt).collect()
            }
            TrainOn::Last => answers.last().copied().into_iter().collect(),
        };
        let says_no = |message: &Value| message["train"] == false || message["weight"].as_f64() == Some(0.0);
        asked.into_iter().filter(|&turn| !says_no(&self.messages[turn])).collect()
    }

    fn by_common_prefix(&self, template: &ChatTemplate, whole: String, trained: &[usize]) -> Result<Vec<ChatSample>, String> {
        let (mut shared, mut alone) = (Vec::new(), Vec::new());
        for &turn in trained {
            let asks = self.messages[turn]["role"] == "assistant";
            let before = template.render(&self.messages[..turn], self.tools.as_ref(), asks)?.text;
            let until = template.render(&self.messages[..=turn], self.tools.as_ref(), false)?.text;
            let span = common_prefix(&before, &until)..until.len();
            if span.is_empty() {
                continue;
            }
            if whole.starts_with(&until) {
                shared.push(span);
            } else {
                alone.push(ChatSample { text: until, trained: vec![span] });
            }
        }
        alone.extend((!shared.is_empty()).then_some(ChatSample { text: whole, trained: shared }));
        Ok(alone)
    }
}

/// Bytes of the longest common prefix, whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}
