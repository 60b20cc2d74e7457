//! Which text of a conversation is trained.
//!
//! With `{% generation %}` in the template, exactly the marked text ([`super::marks`]). Without, by the longest common prefix: for a
//! turn, the text that the template writes up to its end, after the beginning that this text shares with the prompt that asks for the turn
//! ([`super::span`]). A prompt may open a reasoning block that the turn does not have, so the prompt need not be the beginning of the text.
//! Where a later turn changes how an earlier one is written (reasoning that is left out afterwards), the earlier one becomes a sample of
//! its own: that is the text that a model sees when it answers.

use super::choices;
use super::marks;
use super::sample::{ChatSample, ChatSamples, TrainedSpan};
use super::span::{TurnSpans, common_prefix};
use super::template::{ChatTemplate, Renderings};
use crate::data::loss_weight::LossWeight;
use serde_json::{Map, Value};

/// Values of `--train-on`: the tokens that contribute to the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrainOn {
    /// Text and token ids all, a completion after its prompt, all answers of a chat.
    Auto,
    /// Every token.
    All,
    /// Text after the prompt, if there is a prompt.
    Completion,
    /// All answers of the assistant.
    Assistant,
    /// The last answer of the assistant.
    Last,
}

/// Text of all answers that are samples of their own; each of these samples repeats the conversation before the answer.
const ALONE_BYTES_MAX: usize = 16 << 20;

/// Messages, and from which of them on answers may be trained.
pub(super) struct Conversation {
    pub(super) messages: Vec<Value>,
    pub(super) tools: Option<Value>,
    /// Variables of the template beside them.
    pub(super) variables: Map<String, Value>,
    /// Messages of the prompt, where the record separates it from the completion.
    pub(super) prompt: usize,
}

impl Conversation {
    /// The samples that `train_on` makes of it; none where nothing is trained.
    ///
    /// # Errors
    /// The template's, in words; for a template that would have a prompt trained, and for more text than a record may become.
    pub(super) fn samples(&self, template: &ChatTemplate, train_on: TrainOn) -> Result<ChatSamples, String> {
        let mut renderings = template.renderings(&self.messages, self.tools.as_ref())?.given(&self.variables)?;
        let whole = renderings.whole()?;
        let answers = self.answers();
        let mut trained = self.trained(&answers, train_on);
        let is_whole = trained.iter().all(|&turn| self.weight(turn) == LossWeight::WHOLE);
        if train_on == TrainOn::All && trained.len() == self.messages.len() && is_whole {
            return Ok(ChatSamples { samples: vec![ChatSample::trained_from(0, whole.text)], ..ChatSamples::default() });
        }
        if template.has_marks() && train_on != TrainOn::All {
            let loses_reasoning = trained.iter().any(|&turn| self.loses_reasoning(turn, &whole.text));
            let samples = marks::samples(&self.messages, &mut renderings, whole, (&answers, &trained))?;
            return Ok(ChatSamples { samples, loses_reasoning, is_unasked: false });
        }
        let is_unasked = train_on != TrainOn::All && trained.first() == Some(&0);
        trained.drain(..usize::from(is_unasked));
        Ok(ChatSamples { is_unasked, ..self.by_common_prefix(template, &mut renderings, whole.text, &trained)? })
    }

    /// Indices of the assistant's messages.
    fn answers(&self) -> Vec<usize> {
        (0..self.messages.len()).filter(|&turn| self.messages[turn]["role"] == "assistant").collect()
    }

    /// Indices of the messages that are trained: those that `train_on` asks for, but for the ones that are marked as not trained.
    fn trained(&self, answers: &[usize], train_on: TrainOn) -> Vec<usize> {
        let requested: Vec<usize> = match train_on {
            TrainOn::All => (0..self.messages.len()).collect(),
            TrainOn::Auto | TrainOn::Completion | TrainOn::Assistant => {
                answers.iter().copied().filter(|&turn| turn >= self.prompt).collect()
            }
            TrainOn::Last => answers.last().copied().into_iter().collect(),
        };
        requested.into_iter().filter(|&turn| self.weight(turn).is_trained()).collect()
    }

    fn weight(&self, turn: usize) -> LossWeight {
        choices::weight(&self.messages[turn])
    }

    fn by_common_prefix(
        &self,
        template: &ChatTemplate,
        renderings: &mut Renderings<'_>,
        whole: String,
        trained: &[usize],
    ) -> Result<ChatSamples, String> {
        let (mut shared, mut alone, mut bytes) = (Vec::new(), Vec::new(), 0);
        let (spans, mut loses_reasoning) = (TurnSpans { messages: &self.messages }, false);
        let sample = |text: String, trained: Vec<TrainedSpan>, last: usize| {
            let next = template.after_answers().map(String::from);
            ChatSample { text, trained, next, hands_over: self.hands_over(last) }
        };
        for &turn in trained {
            let until = renderings.render(turn + 1, false)?.text;
            let span = TrainedSpan { weight: self.weight(turn), ..spans.span(renderings, turn, &until)? };
            loses_reasoning |= self.loses_reasoning(turn, &until);
            if span.range.is_empty() {
                continue;
            }
            if let Some(span) = self.within(renderings, turn, &whole, &until, &span)? {
                shared.push(span);
                continue;
            }
            bytes += until.len();
            if bytes > ALONE_BYTES_MAX {
                let why = "each answer is a sample of its own, because the chat template renders an answer differently once more \
                    messages follow";
                return Err(format!(
                    "its answers come to more than {ALONE_BYTES_MAX} bytes of text: {why}; cut it into shorter conversations"
                ));
            }
            alone.push(sample(until, vec![span], turn));
        }
        if !shared.is_empty() {
            alone.push(sample(whole, shared, self.messages.len() - 1));
        }
        Ok(ChatSamples { samples: alone, loses_reasoning, is_unasked: false })
    }

    /// The `span` of message `turn` in the text `whole` of all messages; `until` is the text up to its end. `None` where `whole` has the
    /// message otherwise. An end that the template appends to any last message is no change of the message.
    ///
    /// # Errors
    /// The template's.
    fn within(
        &self,
        renderings: &mut Renderings<'_>,
        turn: usize,
        whole: &str,
        until: &str,
        span: &TrainedSpan,
    ) -> Result<Option<TrainedSpan>, String> {
        let end = common_prefix(whole, until);
        let (range, ending) = (span.range.start..end, &until[end..]);
        let found = || Ok(Some(TrainedSpan { range: range.clone(), prompt: span.prompt.clone(), ending: ending.into(), ..*span }));
        if ending.is_empty() {
            return found();
        }
        if range.start >= range.end || !whole.ends_with(ending) {
            return Ok(None);
        }
        let witness = if turn > 0 { turn } else { turn + 2 };
        if renderings.render(witness, false)?.text.ends_with(ending) { found() } else { Ok(None) }
    }

    /// Whether message `turn` is an answer after which the user speaks.
    fn hands_over(&self, turn: usize) -> bool {
        let message = &self.messages[turn];
        message["role"] == "assistant" && message["tool_calls"].as_array().is_none_or(Vec::is_empty)
    }

    /// Whether message `turn` has reasoning that `text` does not hold.
    fn loses_reasoning(&self, turn: usize, text: &str) -> bool {
        let message = &self.messages[turn];
        let in_content = || Some(message["content"].as_str()?.split_once("</think>")?.0.rsplit("<think>").next()?.trim());
        let reasoning = message["reasoning_content"].as_str().map(str::trim).or_else(in_content);
        reasoning.is_some_and(|reasoning| !reasoning.is_empty() && !text.contains(reasoning))
    }
}
