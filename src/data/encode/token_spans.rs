//! Which tokens of a sample are trained: spans of text as spans of tokens.
//!
//! A marked span has every token that overlaps it, as `transformers` has it. A span after a prompt begins where the ids of the text and
//! those of the prompt alone differ, as TRL has it: a token that begins in the prompt and ends in the answer is trained.

use crate::data::chat::sample::{ChatSample, TrainedSpan};
use crate::data::loss_weight::LossWeight;
use crate::data::tokenizer::{LocalTokenizer, Token, floor_boundary};
use crate::error::Result;

/// Text before the end of a prompt, and after it, that decides which tokens are there.
const CONTEXT: usize = 64;

/// The tokens of a sample's text with their weights.
pub(in crate::data) struct MaskedTokens {
    pub(in crate::data) tokens: Vec<(Token, LossWeight)>,
    /// How many tokens begin in a prompt and end in an answer.
    pub(in crate::data) crossing: usize,
}

/// Encodes the text of `sample` once, and finds its trained tokens.
///
/// # Errors
/// The tokenizer's.
pub(in crate::data) fn masked(sample: &ChatSample, tokenizer: &LocalTokenizer) -> Result<MaskedTokens> {
    let tokens = tokenizer.encode_part(&sample.text)?;
    let mut masked = MaskedTokens { tokens: tokens.iter().map(|token| (*token, LossWeight::NONE)).collect(), crossing: 0 };
    let placed = PlacedText { text: &sample.text, tokens: &tokens, tokenizer };
    for span in &sample.trained {
        let (begin, end) = (placed.begin(span)?, placed.end(span)?);
        let is_crossed = span.prompt.as_ref().is_some_and(String::is_empty);
        masked.crossing += usize::from(is_crossed && tokens.get(begin).is_some_and(|token| (token.start as usize) < span.range.start));
        for (_, weight) in &mut masked.tokens[begin.min(end)..end] {
            *weight = span.weight.max(*weight);
        }
        if span.is_answer {
            placed.train_end(&mut masked.tokens, (end, span.weight), sample.next.is_some());
        }
    }
    placed.append_end(&mut masked.tokens, sample)?;
    Ok(masked)
}

/// Whether the last trained token of `sample` ends a turn, whitespace aside: whether it is an added one, and no part of an answer of a
/// template whose answers end with nothing of their own.
pub(in crate::data) fn has_end(sample: &ChatSample, tokens: &[(Token, LossWeight)], tokenizer: &LocalTokenizer) -> bool {
    let placed = PlacedText { text: &sample.text, tokens: &[], tokenizer };
    let is_part = |token: &Token| (token.start as usize) < sample.text.len() && token.end as usize == sample.text.len();
    let last = tokens.iter().rfind(|(token, weight)| weight.is_trained() && !placed.is_blank(token));
    last.is_none_or(|(token, _)| tokenizer.is_added(token.id) && !(sample.next.is_some() && is_part(token)))
}

/// A text and its tokens.
struct PlacedText<'a> {
    text: &'a str,
    tokens: &'a [Token],
    tokenizer: &'a LocalTokenizer,
}

impl PlacedText<'_> {
    /// The first token of `span`.
    fn begin(&self, span: &TrainedSpan) -> Result<usize> {
        let TrainedSpan { range, prompt, .. } = span;
        match prompt {
            _ if range.start == 0 => Ok(0),
            Some(prompt) => self.first_difference(range.start, prompt),
            None => Ok(self.first_after(range.start)),
        }
    }

    /// The token after the last one of `span`.
    fn end(&self, span: &TrainedSpan) -> Result<usize> {
        let TrainedSpan { range, ending, .. } = span;
        let overlaps = self.tokens.partition_point(|token| (token.start as usize) < range.end);
        if ending.is_empty() { Ok(overlaps) } else { Ok(overlaps.min(self.first_difference(range.end, ending)?)) }
    }

    /// The first token that ends after byte `at`.
    fn first_after(&self, at: usize) -> usize {
        self.tokens.partition_point(|token| token.end as usize <= at)
    }

    /// The first token that the text does not share with the one that goes on as `instead` from byte `at`. All before it is compared from
    /// some text before `at` on.
    fn first_difference(&self, at: usize, instead: &str) -> Result<usize> {
        let is_begin = |idx: &usize| self.text.is_char_boundary(self.tokens[*idx].start as usize);
        let first = self.tokens.partition_point(|token| token.start as usize + CONTEXT < at).min(self.tokens.len().saturating_sub(1));
        let first = (0..=first).rev().find(is_begin).unwrap_or(0);
        let from = self.tokens.get(first).map_or(0, |token| token.start as usize).min(at);
        let other = self.tokenizer.encode_part(&[&self.text[from..at], instead].concat())?;
        let here =
            self.tokens[first..].iter().map(|token| Token { start: token.start - from as u32, end: token.end - from as u32, ..*token });
        if here.take(other.len()).eq(other.iter().copied()) {
            return Ok(first + other.len());
        }
        // The text from there on may begin with another token than in its place, which is no difference.
        let alone = self.tokenizer.encode_part(&self.text[from..floor_boundary(self.text, at + CONTEXT)])?;
        let different = alone.iter().zip(&other).find(|(one, joined)| one != joined);
        let own = different.map_or(at, |(token, _)| from + token.start as usize);
        Ok(self.tokens.partition_point(|token| (token.start as usize) < own).min(self.first_after(at)))
    }

    fn is_blank(&self, token: &Token) -> bool {
        self.text.get(token.start as usize..token.end as usize).is_some_and(|text| token.start < token.end && text.trim().is_empty())
    }

    /// Trains the token at `end`, which follows an answer of this weight, where it ends the turn: some templates write no other end than the
    /// next role, and `is_always` so.
    fn train_end(&self, tokens: &mut [(Token, LossWeight)], (end, weight): (usize, LossWeight), is_always: bool) {
        if (is_always || self.is_open(&tokens[..end]))
            && let Some((_, own)) = tokens.get_mut(end).filter(|(next, _)| self.tokenizer.is_added(next.id))
        {
            *own = weight.max(*own);
        }
    }

    /// Appends the token that ends a last answer that has no other end: the first one of the text that would come next.
    fn append_end(&self, tokens: &mut Vec<(Token, LossWeight)>, sample: &ChatSample) -> Result<()> {
        let weight = tokens.last().map_or(LossWeight::NONE, |(_, weight)| *weight);
        let Some(next) = sample.next.as_ref().filter(|_| sample.hands_over && weight.is_trained()) else { return Ok(()) };
        let end = self.text.len() as u32;
        let first = self.tokenizer.encode_part(next)?.first().filter(|token| self.tokenizer.is_added(token.id)).copied();
        tokens.extend(first.map(|token| (Token { start: end, end, ..token }, weight)));
        Ok(())
    }

    /// Whether `tokens` end with text that is trained, whitespace aside, and with no end of a turn.
    fn is_open(&self, tokens: &[(Token, LossWeight)]) -> bool {
        tokens.last().is_some_and(|(_, weight)| weight.is_trained())
            && tokens.iter().rfind(|(token, _)| !self.is_blank(token)).is_some_and(|(token, _)| !self.tokenizer.is_added(token.id))
    }
}
