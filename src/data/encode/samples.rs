//! The samples of a record: their tokens and weights.

use super::boundary_tokens::{missing_begin, missing_end};
use super::diagnostics::{RecordRemarks, RecordSamples};
use super::marked_text::TextPiece;
use super::token_spans::{MaskedTokens, has_end, masked};
use crate::data::chat::pair::PairTexts;
use crate::data::chat::record::Content;
use crate::data::chat::rollout::Rollout;
use crate::data::chat::sample::{ChatSample, ChatSamples};
use crate::data::chat::span::common_prefix;
use crate::data::chat::teacher::Taught;
use crate::data::loss_weight::{LossWeight, id_of};
use crate::data::number_words;
use crate::data::tokenizer::{LocalTokenizer, Token, floor_boundary};
use crate::error::Result;

/// The tokens of those samples of a record that are trained.
///
/// # Errors
/// The tokenizer's.
pub(in crate::data) fn trained_samples(content: Content, tokenizer: &LocalTokenizer) -> Result<RecordSamples> {
    let is_trained = |sample: &Vec<u32>| sample.iter().skip(1).any(|token| LossWeight::of(*token).is_trained());
    let (is_pair, is_rollout) = (matches!(content, Content::Pair(_)), matches!(content, Content::Rollout(_)));
    let is_taught = matches!(content, Content::Taught(_));
    let mut found = samples(content, tokenizer)?;
    if is_rollout {
        return Ok(found);
    }
    if is_taught {
        let keeps = found.samples.first().is_some_and(is_trained);
        found.samples.truncate(if keeps { 2 } else { 0 });
        return Ok(found);
    }
    // A pair of which one answer is empty has nothing to compare.
    let is_whole = found.samples.iter().all(is_trained);
    found.samples.retain(|sample| if is_pair { is_whole } else { is_trained(sample) });
    Ok(found)
}

/// The tokens of the chosen answer and of the rejected answer, each with the prompt. Both answers begin where the tokens of one of them
/// first differ from those of the prompt.
fn pair(PairTexts { prompt, whole: texts, is_plain }: &PairTexts, tokenizer: &LocalTokenizer) -> Result<RecordSamples> {
    let ids = |text: &str| Ok::<_, crate::error::Error>(tokenizer.encode(text)?.into_iter().map(|id| LossWeight::NONE.word(id)).collect());
    let begun = |tokens: Vec<u32>| -> Vec<u32> {
        let begin = if *is_plain { missing_begin(&tokens, tokenizer.begin_of_text()) } else { &[] };
        begin.iter().map(|id| LossWeight::NONE.word(*id)).chain(tokens.iter().copied()).collect()
    };
    let prompt = begun(ids(prompt)?);
    let mut answers = [begun(ids(&texts[0])?), begun(ids(&texts[1])?)];
    let common = |answer: &Vec<u32>| answer.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
    let start = answers.iter().map(common).min().unwrap_or(0);
    for answer in &mut answers {
        let trained = answer[start..].iter_mut();
        trained.for_each(|token| *token = id_of(*token));
        let end = if *is_plain { missing_end(answer, tokenizer.end_of_text()) } else { None };
        answer.extend(end);
    }
    let remarks = RecordRemarks { crossing: prompt.len() - start, ..RecordRemarks::default() };
    Ok(RecordSamples { samples: answers.into(), remarks })
}

/// The tokens of a prompt and its completion, and behind them the numbers of the completion's tokens.
fn rollout(Rollout { prompt, completion, numbers }: Rollout) -> RecordSamples {
    let tokens = prompt.into_iter().map(|id| LossWeight::NONE.word(id)).chain(completion).collect();
    let numbers = numbers.into_iter().flatten().flat_map(number_words::words_of).collect();
    RecordSamples { samples: vec![tokens, numbers], ..RecordSamples::default() }
}

/// The tokens of a record, and behind them the teacher's tokens for each of them that is trained.
fn taught(Taught { tokens, teacher }: Taught) -> RecordSamples {
    let tokens = tokens.into_iter().map(|(id, weight)| weight.word(id)).collect();
    RecordSamples { samples: vec![tokens, teacher], ..RecordSamples::default() }
}

/// The tokens of a record's samples. The first token of a sample is nobody's target, whether it is trained or not.
fn samples(content: Content, tokenizer: &LocalTokenizer) -> Result<RecordSamples> {
    let document = |sample: Vec<u32>| RecordSamples { samples: vec![sample], ..RecordSamples::default() };
    match content {
        Content::Rendered(chat) => rendered(&chat, tokenizer),
        Content::Completed(sample) => {
            let MaskedTokens { tokens, crossing } = masked(&sample, tokenizer)?;
            let found = document(whole(&ids(&tokens).collect::<Vec<_>>(), tokenizer));
            Ok(RecordSamples { remarks: RecordRemarks { crossing, ..found.remarks }, ..found })
        }
        Content::Text(text) => Ok(document(whole(&tokenizer.encode(&text)?, tokenizer))),
        Content::Ids(ids) => Ok(document(ids.into_iter().map(|(id, weight)| weight.word(id)).collect())),
        Content::Pair(texts) => pair(&texts, tokenizer),
        Content::Rollout(found) => Ok(rollout(found)),
        Content::Taught(found) => Ok(taught(found)),
    }
}

/// A document of `tokens` with the begin and the end of text that it lacks.
fn whole(tokens: &[u32], tokenizer: &LocalTokenizer) -> Vec<u32> {
    let begin = missing_begin(tokens, tokenizer.begin_of_text()).iter().map(|id| LossWeight::NONE.word(*id));
    begin.chain(tokens.iter().copied()).chain(missing_end(tokens, tokenizer.end_of_text())).collect()
}

/// The samples of a conversation.
fn rendered(chat: &ChatSamples, tokenizer: &LocalTokenizer) -> Result<RecordSamples> {
    let &ChatSamples { is_unasked, loses_reasoning, .. } = chat;
    let remarks = RecordRemarks { is_unasked, loses_reasoning, ..RecordRemarks::default() };
    let mut found = RecordSamples { samples: Vec::with_capacity(chat.samples.len()), remarks };
    for sample in &chat.samples {
        let MaskedTokens { tokens, crossing } = masked(sample, tokenizer)?;
        found.remarks.crossing += crossing;
        found.remarks.is_endless |= tokenizer.has_added_tokens() && !has_end(sample, &tokens, tokenizer);
        found.samples.push(ids(&tokens).collect());
    }
    Ok(found)
}

/// Words as the data has them.
fn ids(tokens: &[(Token, LossWeight)]) -> impl Iterator<Item = u32> {
    tokens.iter().map(|(token, weight)| weight.word(token.id))
}

/// The samples of a record in text: for each the number of its tokens, and which text is trained.
///
/// # Errors
/// The tokenizer's.
pub(in crate::data) fn shown(content: Content, tokenizer: &LocalTokenizer) -> Result<Vec<(usize, Vec<TextPiece>)>> {
    let named = |id: u32, weight| TextPiece { text: tokenizer.name_of(id), weight };
    let around = |sample: &ChatSample| {
        let (tokens, pieces) = text_pieces(sample, tokenizer)?;
        let ids: Vec<u32> = ids(&masked(sample, tokenizer)?.tokens).collect();
        let (begin, end) = (missing_begin(&ids, tokenizer.begin_of_text()), missing_end(&ids, tokenizer.end_of_text()));
        let all = begin.iter().map(|id| named(*id, LossWeight::NONE)).chain(pieces).chain(end.map(|id| named(id, LossWeight::WHOLE)));
        Ok((tokens + begin.len() + usize::from(end.is_some()), all.collect()))
    };
    match content {
        Content::Rendered(chat) => chat.samples.iter().map(|sample| text_pieces(sample, tokenizer)).collect(),
        Content::Completed(sample) => Ok(vec![around(&sample)?]),
        Content::Text(text) => Ok(vec![around(&ChatSample::trained_from(0, text))?]),
        Content::Pair(PairTexts { prompt, whole, is_plain }) => {
            let sample = |text: String| ChatSample::trained_from(common_prefix(&prompt, &text), text);
            whole.into_iter().map(sample).map(|sample| if is_plain { around(&sample) } else { text_pieces(&sample, tokenizer) }).collect()
        }
        Content::Rollout(Rollout { prompt, completion, .. }) => {
            let of = |ids: Vec<u32>, weight| ids.into_iter().map(move |id| named(id, weight));
            let tokens = prompt.len() + completion.len();
            Ok(vec![(tokens, of(prompt, LossWeight::NONE).chain(of(completion, LossWeight::WHOLE)).collect())])
        }
        Content::Taught(Taught { tokens: ids, .. }) | Content::Ids(ids) => {
            Ok(vec![(ids.len(), ids.into_iter().map(|(id, weight)| named(id, weight)).collect())])
        }
    }
}

/// A sample's text, token by token; text without a token goes with the next token.
fn text_pieces(sample: &ChatSample, tokenizer: &LocalTokenizer) -> Result<(usize, Vec<TextPiece>)> {
    let (MaskedTokens { tokens, .. }, text, mut done) = (masked(sample, tokenizer)?, &sample.text, 0);
    let mut pieces = Vec::with_capacity(tokens.len());
    for (Token { id, start, end }, weight) in &tokens {
        let is_appended = *start as usize == text.len();
        let end = floor_boundary(text, *end as usize).max(done);
        let text = if is_appended { tokenizer.name_of(*id) } else { text[done..end].into() };
        pieces.push(TextPiece { text, weight: *weight });
        done = end;
    }
    Ok((tokens.len(), pieces))
}
