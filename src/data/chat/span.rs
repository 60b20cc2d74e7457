//! Beginning and end of a message's text in the output of a template.

use super::probe;
use super::sample::TrainedSpan;
use super::template::Renderings;
use crate::data::tokenizer::floor_boundary;
use serde_json::Value;

/// Characters of a prompt that are compared with the text in their place; no tokenizer's token is longer.
const INSTEAD_MAX: usize = 64;
/// The remedy for a template that does not separate answers from their prompts.
pub(super) const MARK_ANSWERS: &str = "put {% generation %} and {% endgeneration %} around the text of answers, in a --chat-template FILE";

/// Finds the spans of `messages`.
pub(super) struct TurnSpans<'a> {
    pub(super) messages: &'a [Value],
}

impl TurnSpans<'_> {
    /// The span of message `turn` in `until`, the text up to its end. It never begins before the end of the message in front.
    ///
    /// # Errors
    /// Errors of the template, and where the end of the message in front is ambiguous.
    pub(super) fn span(&self, renderings: &mut Renderings<'_>, turn: usize, until: &str) -> Result<TrainedSpan, String> {
        if turn == 0 {
            return Ok((0..until.len()).into());
        }
        let before = renderings.render(turn, self.is_answer(turn))?.text;
        let start = common_prefix(&before, until);
        if start < before.len() && !self.prompt_differs(renderings, turn, until, &before)? {
            return self.behind(renderings, turn, until, &before);
        }
        Ok(self.begun(turn, start, until, &before[start..]))
    }

    /// The span of message `turn` from `start` to the end of `until`, where the prompt goes on as `prompt`.
    fn begun(&self, turn: usize, start: usize, until: &str, prompt: &str) -> TrainedSpan {
        let prompt = Some(prompt.chars().take(INSTEAD_MAX).collect());
        TrainedSpan { prompt, is_answer: self.is_answer(turn), ..(start..until.len()).into() }
    }

    fn is_answer(&self, turn: usize) -> bool {
        self.messages[turn]["role"] == "assistant"
    }

    /// Whether `until` is as `before` up to where the latter asks for answer `turn`: the two differ in how the answer begins alone.
    fn prompt_differs(&self, renderings: &mut Renderings<'_>, turn: usize, until: &str, before: &str) -> Result<bool, String> {
        let start = common_prefix(before, until);
        if start == 0 || !self.is_answer(turn) {
            return Ok(false);
        }
        let front = renderings.render(turn, false)?.text;
        let requested = common_prefix(&front, before);
        // Where the request for an answer comes later, something new stands before it.
        Ok(start >= requested && start >= common_prefix(&front, until) && !until[start..].contains(&before[requested..]))
    }

    /// As [`Self::span`], where the messages in front are written otherwise in `until`: both texts are compared from the end of the content
    /// in front on.
    fn behind(&self, renderings: &mut Renderings<'_>, turn: usize, until: &str, before: &str) -> Result<TrainedSpan, String> {
        let front = probe::marked(&self.messages[turn - 1], turn - 1)?;
        let marked = [(turn - 1, front.ok_or_else(|| untold(turn))?)];
        let mut end = |turns, prompts, text: &str| {
            let marked = renderings.render_with(turns, prompts, &marked).ok()?.text;
            let (_, end) = *probe::marks(&marked).last()?;
            text.strip_suffix(&marked[end..]).map(str::len)
        };
        let is_answer = self.is_answer(turn);
        let ends = end(turn, is_answer, before).zip(end(turn + 1, false, until));
        let (before_end, until_end) = ends.ok_or_else(|| untold(turn))?;
        let (prompt, answer) = (&before[before_end..], &until[until_end..]);
        let shared = common_prefix(prompt, answer);
        let span = self.begun(turn, until_end + shared, until, &prompt[shared..]);
        if shared == prompt.len() || !is_answer {
            return Ok(span);
        }
        let front = renderings.render(turn, false)?.text;
        let front = end_of(&front, before_end, before).ok_or_else(|| untold(turn))?;
        let requested = common_prefix(front, prompt);
        // A template may join an answer to one right before it.
        let header = &prompt[requested..];
        let is_joined = self.is_answer(turn - 1) && (header.is_empty() || !answer.contains(header));
        if shared >= requested && !answer[shared..].contains(header) || is_joined { Ok(span) } else { Err(untold(turn)) }
    }
}

/// The text behind `end` in `front`, which has the beginning of `before` up to there.
fn end_of<'a>(front: &'a str, end: usize, before: &str) -> Option<&'a str> {
    front.strip_prefix(&before[..end])
}

fn untold(turn: usize) -> String {
    let how = "the chat template renders it differently when an answer follows";
    format!("text before message {turn} would be trained: {how}; {MARK_ANSWERS}")
}

/// Bytes of the longest common prefix, whole characters.
pub(in crate::data) fn common_prefix(a: &str, b: &str) -> usize {
    if b.starts_with(a) {
        return a.len();
    }
    floor_boundary(a, a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count())
}
