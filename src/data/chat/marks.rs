//! The spans that `{% generation %}` marks: exactly these, however many there are. Where answers differ in their weights, each span is
//! attributed to the message of its text.

use super::choices;
use super::probe;
use super::sample::{ChatSample, TrainedSpan};
use super::span::MARK_ANSWERS;
use super::template::{Rendered, Renderings};
use crate::data::loss_weight::LossWeight;
use serde_json::Value;
use std::ops::Range;

/// The sample of `messages`, whose text is `whole`; of the indices, the first are those of answers and the second those of trained ones.
///
/// # Errors
/// Where marks begin before the first prompt, and where the message of a span is ambiguous.
pub(super) fn samples(
    messages: &[Value],
    renderings: &mut Renderings<'_>,
    whole: Rendered,
    (answers, trained): (&[usize], &[usize]),
) -> Result<Vec<ChatSample>, String> {
    if let (Some(turn), Some(span)) = (answers.first(), whole.generated.first())
        && *turn > 0
        && span.start == 0
        && !span.is_empty()
    {
        let where_it_is = "the chat template has it within {% generation %}";
        return Err(format!("text before message {turn} would be trained: {where_it_is}; {MARK_ANSWERS}"));
    }
    let weight_of = |turn: usize| if trained.contains(&turn) { choices::weight(&messages[turn]) } else { LossWeight::NONE };
    let Some(weight) = trained.first().map(|turn| weight_of(*turn)) else { return Ok(vec![]) };
    let spans = if answers.iter().all(|turn| weight_of(*turn) == weight) {
        whole.generated.into_iter().map(|span| (span, weight)).collect()
    } else {
        weighted(messages, renderings, whole.generated, (answers, &weight_of))?
    };
    let spans = spans.into_iter().filter(|(span, weight)| !span.is_empty() && weight.is_trained());
    let spans: Vec<_> = spans.map(|(span, weight)| TrainedSpan { weight, ..span.into() }).collect();
    Ok(if spans.is_empty() { vec![] } else { vec![ChatSample { text: whole.text, trained: spans, next: None, hands_over: false }] })
}

/// The `spans`, each with the weight of the answers that it belongs to.
fn weighted(
    messages: &[Value],
    renderings: &mut Renderings<'_>,
    spans: Vec<Range<usize>>,
    (answers, weight_of): (&[usize], &dyn Fn(usize) -> LossWeight),
) -> Result<Vec<(Range<usize>, LossWeight)>, String> {
    let mut probed = Vec::new();
    for (turn, message) in messages.iter().enumerate() {
        probed.extend(probe::marked(message, turn)?.map(|marked| (turn, marked)));
    }
    let untold = || {
        let why = "answers differ in their weights, and the {% generation %} spans of the chat template cannot be matched to them";
        format!("{why}; write one span for each answer, around all of its text")
    };
    let marked = renderings.render_with(messages.len(), false, &probed).map_err(|_| untold())?;
    if marked.generated.len() != spans.len() {
        return Err(untold());
    }
    let (marks, mut weighted, mut before) = (probe::marks(&marked.text), Vec::new(), (0, Vec::new()));
    for (span, place) in spans.into_iter().zip(&marked.generated) {
        let owns = owners(place, &marks, answers, (before.0 == place.start).then_some(&before.1));
        let mut weights = owns.iter().map(|turn| weight_of(*turn));
        match weights.next() {
            _ if span.is_empty() => {}
            Some(weight) if weights.all(|other| other == weight) => weighted.push((span, weight)),
            _ => return Err(untold()),
        }
        before = (place.end, owns);
    }
    Ok(weighted)
}

/// The `answers` that the text at `place` may belong to: answers that end in it; else the answers of the span in `front`, if the two spans
/// are adjacent; else all from the message before it to the one after it.
fn owners(place: &Range<usize>, marks: &[(usize, usize)], answers: &[usize], front: Option<&Vec<usize>>) -> Vec<usize> {
    let of = |turns: &dyn Fn(usize) -> bool| answers.iter().copied().filter(|turn| turns(*turn)).collect::<Vec<_>>();
    let within = of(&|turn| marks.iter().any(|(marked, end)| *marked == turn && place.start < *end && *end <= place.end));
    if let Some(front) = front.filter(|front| within.is_empty() && !front.is_empty()) {
        return front.clone();
    }
    if !within.is_empty() {
        return within;
    }
    let before = marks.iter().rfind(|(_, end)| *end <= place.start).map_or(0, |(turn, _)| *turn);
    let after = marks.iter().find(|(_, end)| *end > place.end).map_or(usize::MAX, |(turn, _)| *turn);
    of(&|turn| (before..=after).contains(&turn))
}
