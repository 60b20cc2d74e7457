//! Which text of a conversation is trained.
//!
//! With `{% generation %}` in the template, what it marks. Without, by the longest common prefix: for a turn, what the template writes up
//! to its end, after what that has in common with the prompt that asks for the turn. A prompt may open a reasoning block that the turn
//! does not have, so the one need not be the beginning of the other. Where a later turn changes how an earlier one is written (reasoning
//! that is left out afterwards), the earlier one becomes a sample of its own: that is what a model sees when it answers.

use super::template::{ChatTemplate, Rendered, Renderings};
use crate::data::tokenizer::floor_boundary;
use serde_json::{Map, Value};
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

/// Characters of a prompt that are compared with what is there in their place; no tokenizer's token is longer.
const INSTEAD_MAX: usize = 64;
const MARK_ANSWERS: &str = "put {% generation %} and {% endgeneration %} around what answers say, in a --chat-template FILE";
/// Text of all answers that are samples of their own, each of which repeats what came before.
const ALONE_BYTES_MAX: usize = 16 << 20;

/// Text, and what of it is trained, in order.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct ChatSample {
    pub(in crate::data) text: String,
    pub(in crate::data) trained: Vec<TrainedSpan>,
}

/// A part of a text that is trained.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct TrainedSpan {
    /// Its bytes.
    pub(in crate::data) range: Range<usize>,
    /// How the prompt begins that goes on otherwise from here: it may open a block that the text does not have.
    pub(in crate::data) instead: String,
}

/// What a record's conversation becomes.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct ChatSamples {
    pub(in crate::data) samples: Vec<ChatSample>,
    /// Whether its first message is an answer, which is not trained: nothing asks for it.
    pub(in crate::data) is_unasked: bool,
}

/// Messages, and from which of them on answers may be trained.
pub(super) struct Conversation {
    pub(super) messages: Vec<Value>,
    pub(super) tools: Option<Value>,
    /// Variables of the template beside them.
    pub(super) variables: Map<String, Value>,
    /// Messages of the prompt, where the record tells it apart.
    pub(super) prompt: usize,
}

impl From<Range<usize>> for TrainedSpan {
    fn from(range: Range<usize>) -> Self {
        Self { range, instead: String::new() }
    }
}

impl ChatSample {
    /// `text` with all of it trained from `begin` on.
    pub(in crate::data) fn trained_from(begin: usize, text: String) -> Self {
        Self { trained: vec![(begin..text.len()).into()], text }
    }
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
        if train_on == TrainOn::All && trained.len() == self.messages.len() {
            return Ok(ChatSamples { samples: vec![ChatSample::trained_from(0, whole.text)], is_unasked: false });
        }
        if template.has_marks() && whole.generated.len() == answers.len() && train_on != TrainOn::All {
            return Ok(ChatSamples { samples: by_marks(whole, &answers, &trained)?, is_unasked: false });
        }
        let is_unasked = train_on != TrainOn::All && trained.first() == Some(&0);
        trained.drain(..usize::from(is_unasked));
        Ok(ChatSamples { samples: self.by_common_prefix(&mut renderings, whole.text, &trained)?, is_unasked })
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

    fn by_common_prefix(&self, renderings: &mut Renderings<'_>, whole: String, trained: &[usize]) -> Result<Vec<ChatSample>, String> {
        let (mut shared, mut alone, mut bytes) = (Vec::new(), Vec::new(), 0);
        for &turn in trained {
            let until = renderings.render(turn + 1, false)?.text;
            let span = self.span(renderings, turn, &until, Some(&turn) == trained.first())?;
            if span.range.is_empty() {
                continue;
            }
            if whole.starts_with(&until) {
                shared.push(span);
                continue;
            }
            bytes += until.len();
            if bytes > ALONE_BYTES_MAX {
                let why = "each is a sample of its own, for the chat template writes answers otherwise once others follow";
                return Err(format!(
                    "its answers come to more than {ALONE_BYTES_MAX} bytes of text: {why}; cut it into shorter conversations"
                ));
            }
            alone.push(ChatSample { text: until, trained: vec![span] });
        }
        alone.extend((!shared.is_empty()).then_some(ChatSample { text: whole, trained: shared }));
        Ok(alone)
    }

    /// What message `turn` is of `until`, which ends with it.
    ///
    /// # Errors
    /// The template's, and where what comes before the message would be a part of it. That is looked at for the first one that is trained.
    fn span(&self, renderings: &mut Renderings<'_>, turn: usize, until: &str, is_first: bool) -> Result<TrainedSpan, String> {
        if turn == 0 {
            return Ok((0..until.len()).into());
        }
        let is_answer = |turn: usize| self.messages[turn]["role"] == "assistant";
        let before = renderings.render(turn, is_answer(turn))?.text;
        let start = common_prefix(&before, until);
        // A template may join an answer to one right before it, and then their prompt differs.
        let prompt = match is_first && is_answer(turn) && !is_answer(turn - 1) {
            true => common_prefix(&renderings.render(turn, false)?.text, &before),
            false => 0,
        };
        if start < prompt.max(1) {
            let how = "the chat template writes it otherwise when an answer follows";
            return Err(format!("what comes before message {turn} would be trained: {how}; {MARK_ANSWERS}"));
        }
        Ok(TrainedSpan { range: start..until.len(), instead: before[start..].chars().take(INSTEAD_MAX).collect() })
    }
}

/// What the template marks, of those `answers` that are `trained`.
///
/// # Errors
/// Where the marks begin before the first prompt.
fn by_marks(whole: Rendered, answers: &[usize], trained: &[usize]) -> Result<Vec<ChatSample>, String> {
    if let Some((turn, span)) = answers.iter().zip(&whole.generated).next()
        && *turn > 0
        && span.start == 0
        && !span.is_empty()
    {
        let where_it_is = "the chat template has it within {% generation %}";
        return Err(format!("what comes before message {turn} would be trained: {where_it_is}; {MARK_ANSWERS}"));
    }
    let spans = answers.iter().zip(whole.generated).filter(|(turn, span)| trained.contains(turn) && !span.is_empty());
    let spans: Vec<TrainedSpan> = spans.map(|(_, span)| span.into()).collect();
    Ok(if spans.is_empty() { vec![] } else { vec![ChatSample { text: whole.text, trained: spans }] })
}

/// Bytes of the longest common prefix, whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    floor_boundary(a, a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count())
}
