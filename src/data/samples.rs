//! The samples of a record: their tokens, and what of them is trained.

use super::around::{missing_begin, missing_end};
use super::chat::mask::{ChatSample, TrainedSpan};
use super::chat::record::Content;
use super::documents::UNTRAINED;
use super::shown::TextPiece;
use super::tokenizer::{LocalTokenizer, Token, floor_boundary};
use crate::error::Result;
use std::ops::Range;

/// Text before the end of a prompt, and after it, that decides where a token begins there.
const CONTEXT: usize = 64;

/// The tokens of those samples of a record that are trained.
///
/// # Errors
/// The tokenizer's.
pub(super) fn trained_samples(content: Content, tokenizer: &LocalTokenizer) -> Result<Vec<Vec<u32>>> {
    let is_trained = |sample: &Vec<u32>| sample.iter().skip(1).any(|token| token & UNTRAINED == 0);
    let mut trained = samples(content, tokenizer)?;
    trained.retain(is_trained);
    Ok(trained)
}

/// The tokens of a record's samples. The first token of a sample is nobody's target, whether it is trained or not.
fn samples(content: Content, tokenizer: &LocalTokenizer) -> Result<Vec<Vec<u32>>> {
    let marked = |id: u32, is_trained: bool| if is_trained { id } else { id | UNTRAINED };
    match content {
        Content::Rendered(chat) => chat.samples.iter().map(|sample| masked(sample, tokenizer)).collect(),
        Content::Completed(sample) => Ok(vec![whole(&masked(&sample, tokenizer)?, tokenizer)]),
        Content::Text(text) => Ok(vec![whole(&tokenizer.encode(&text)?, tokenizer)]),
        Content::Ids(ids) => Ok(vec![ids.into_iter().map(|(id, is_trained)| marked(id, is_trained)).collect()]),
    }
}

/// A document of `tokens` with those around it that it lacks.
fn whole(tokens: &[u32], tokenizer: &LocalTokenizer) -> Vec<u32> {
    let begin = missing_begin(tokens, tokenizer.begin_of_text()).iter().map(|id| id | UNTRAINED);
    begin.chain(tokens.iter().copied()).chain(missing_end(tokens, tokenizer.end_of_text())).collect()
}

fn masked(sample: &ChatSample, tokenizer: &LocalTokenizer) -> Result<Vec<u32>> {
    let tokens = tokens_of(sample, tokenizer)?.into_iter();
    Ok(tokens.map(|(Token { id, .. }, is_trained)| if is_trained { id } else { id | UNTRAINED }).collect())
}

/// One encoding of the whole text; a token is trained if its first character is.
fn tokens_of(sample: &ChatSample, tokenizer: &LocalTokenizer) -> Result<Vec<(Token, bool)>> {
    let spans = sample.trained.iter().map(|span| own_tokens(span, &sample.text, tokenizer)).collect::<Result<Vec<_>>>()?;
    let mut spans = spans.iter().peekable();
    let is_trained = |token: Token| {
        let start = token.start as usize;
        while spans.next_if(|span| span.end <= start).is_some() {}
        (token, spans.peek().is_some_and(|span| span.contains(&start)))
    };
    Ok(tokenizer.encode_part(&sample.text)?.into_iter().map(is_trained).collect())
}

/// The bytes of a span from its first token on. Where the prompt goes on otherwise, text and prompt may have characters in common that are not
/// a token in both: of `<b>` and `<think>` the first. Then the span begins with the first token that the prompt does not have.
fn own_tokens(span: &TrainedSpan, text: &str, tokenizer: &LocalTokenizer) -> Result<Range<usize>> {
    let TrainedSpan { range: Range { start, end }, instead } = span;
    if instead.is_empty() {
        return Ok(*start..*end);
    }
    let (from, until) = (floor_boundary(text, start.saturating_sub(CONTEXT)), floor_boundary(text, start + CONTEXT));
    let prompt = tokenizer.encode_part(&[&text[from..*start], instead].concat())?;
    let tokens = tokenizer.encode_part(&text[from..until])?;
    let own = tokens.iter().zip(&prompt).find(|(token, prompt)| token != prompt);
    let begin = own.map_or(*start, |(token, _)| from + token.start as usize);
    Ok(begin.min(*start)..*end)
}

/// The samples of a record in text: for each the number of its tokens, and which text is trained.
///
/// # Errors
/// The tokenizer's.
pub(super) fn shown(content: Content, tokenizer: &LocalTokenizer) -> Result<Vec<(usize, Vec<TextPiece>)>> {
    let named = |id: u32, trained| TextPiece { text: tokenizer.name_of(id), trained };
    let around = |sample: &ChatSample| {
        let (tokens, pieces) = text_pieces(sample, tokenizer)?;
        let ids = masked(sample, tokenizer)?;
        let (begin, end) = (missing_begin(&ids, tokenizer.begin_of_text()), missing_end(&ids, tokenizer.end_of_text()));
        let all = begin.iter().map(|id| named(*id, false)).chain(pieces).chain(end.map(|id| named(id, true)));
        Ok((tokens + begin.len() + usize::from(end.is_some()), all.collect()))
    };
    match content {
        Content::Rendered(chat) => chat.samples.iter().map(|sample| text_pieces(sample, tokenizer)).collect(),
        Content::Completed(sample) => Ok(vec![around(&sample)?]),
        Content::Text(text) => Ok(vec![around(&ChatSample::trained_from(0, text))?]),
        Content::Ids(ids) => Ok(vec![(ids.len(), ids.into_iter().map(|(id, is_trained)| named(id, is_trained)).collect())]),
    }
}

/// A sample's text, token by token; what no token stands for goes with the next one.
fn text_pieces(sample: &ChatSample, tokenizer: &LocalTokenizer) -> Result<(usize, Vec<TextPiece>)> {
    let (tokens, text, mut done) = (tokens_of(sample, tokenizer)?, &sample.text, 0);
    let mut pieces = Vec::with_capacity(tokens.len());
    for (Token { end, .. }, trained) in &tokens {
        let end = floor_boundary(text, *end as usize).max(done);
        pieces.push(TextPiece { text: text[done..end].into(), trained: *trained });
        done = end;
    }
    Ok((tokens.len(), pieces))
}
