//! Samples of a conversation: text, and which spans of it are trained.

use crate::data::loss_weight::LossWeight;
use std::ops::Range;

/// Text, and its spans that are trained, in order.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct ChatSample {
    pub(in crate::data) text: String,
    pub(in crate::data) trained: Vec<TrainedSpan>,
    /// The text that the template would write next if the user spoke, where its answers end with nothing of their own.
    pub(in crate::data) next: Option<String>,
    /// Whether it ends with an answer after which the user speaks, not with one that calls tools.
    pub(in crate::data) hands_over: bool,
}

/// A part of a text that is trained.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct TrainedSpan {
    /// Its bytes.
    pub(in crate::data) range: Range<usize>,
    /// For text that follows a prompt, the beginning of the text with which the prompt goes on from here instead: it may open a block that
    /// the answer does not have. Empty where the prompt ends here; `None` where a template marks the span or nothing precedes it.
    pub(in crate::data) prompt: Option<String>,
    /// The text that a template would write after the span if nothing came later; empty where that makes no difference.
    pub(in crate::data) ending: String,
    /// Whether it is an answer that no template marks: then its end is trained, too.
    pub(in crate::data) is_answer: bool,
    /// Weight of its tokens.
    pub(in crate::data) weight: LossWeight,
}

/// The samples that are made of a record's conversation.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::data) struct ChatSamples {
    pub(in crate::data) samples: Vec<ChatSample>,
    /// Whether its first message is an answer, which is not trained: nothing asks for it.
    pub(in crate::data) is_unasked: bool,
    /// Whether the template leaves out the reasoning of an answer that is trained.
    pub(in crate::data) loses_reasoning: bool,
}

impl From<Range<usize>> for TrainedSpan {
    fn from(range: Range<usize>) -> Self {
        Self { range, prompt: None, ending: String::new(), is_answer: false, weight: LossWeight::WHOLE }
    }
}

impl ChatSample {
    /// `text` with all of it trained from `begin` on, after the prompt that ends there.
    pub(in crate::data) fn trained_from(begin: usize, text: String) -> Self {
        let prompt = (begin > 0).then(String::new);
        Self { trained: vec![TrainedSpan { prompt, ..(begin..text.len()).into() }], text, next: None, hands_over: false }
    }
}
