//! Pieces of work on text and records, done by a tokenizer in this process or in a sandbox: a message takes several there, and another one
//! brings back the results.

use super::diagnostics::RecordSamples;
use super::local_encoder::LocalEncoder;
use super::marked_text::TextPiece;
use super::samples::{shown, trained_samples};
use crate::data::chat::record::{Content, DataFormat, ReadContent};
use crate::data::loss_weight::LossWeight;
use crate::data::sandbox::codec::{MessageReader, MessageWriter};
use crate::data::sandbox::{Service, work_on};
use crate::data::tokenizer::Token;
use clap::ValueEnum;

/// A request for tokenization.
#[derive(Clone, Copy, Debug)]
pub(in crate::data) enum TextWork<'a> {
    /// The ids of a text.
    Text(&'a str),
    /// The tokens of a part of a text, with their places.
    Part(&'a str),
    /// The ids of a record.
    Record(DataFormat, &'a str),
    /// A record as people see it.
    ShownRecord(DataFormat, &'a str),
    /// A text as people see it.
    ShownText(&'a str),
    /// The ids of a prompt, up to where the model begins to answer.
    Prompt(&'a str),
}

/// Result of a request.
#[derive(Debug, PartialEq)]
pub(in crate::data) enum Done {
    Ids(Vec<u32>),
    Placed(Vec<Token>),
    /// The samples of a record.
    Samples(RecordSamples),
    /// Of each document the number of its tokens, and its text.
    Shown(Vec<(usize, Vec<TextPiece>)>),
}

impl TextWork<'_> {
    /// Does it.
    ///
    /// # Errors
    /// A description of the fault in the text or the record.
    pub(super) fn answer(self, encoder: &LocalEncoder) -> Result<Done, String> {
        let read = |format, line| encoder.rules.read(format, line);
        match self {
            Self::Text(text) => encoder.tokenizer.encode(text).map(Done::Ids).map_err(|e| e.to_string()),
            Self::Part(text) => encoder.tokenizer.encode_part(text).map(Done::Placed).map_err(|e| e.to_string()),
            Self::Record(format, line) => record(encoder.rules.read_with_remarks(format, line)?, encoder),
            Self::ShownRecord(format, line) => documents(read(format, line)?, encoder),
            Self::ShownText(text) => documents(Content::Text(text.into()), encoder),
            Self::Prompt(text) => prompt(text, encoder),
        }
    }

    /// Bytes of its text.
    fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Part(text) | Self::ShownText(text) | Self::Prompt(text) => text,
            Self::Record(_, text) | Self::ShownRecord(_, text) => text,
        }
    }

    /// The kind of work and, of a record, its format.
    fn kind(&self) -> (usize, usize) {
        let number = |format: &DataFormat| DataFormat::value_variants().iter().position(|known| known == format).unwrap_or(0);
        match self {
            Self::Text(_) => (0, 0),
            Self::Part(_) => (1, 0),
            Self::Record(format, _) => (2, number(format)),
            Self::ShownRecord(format, _) => (3, number(format)),
            Self::ShownText(_) => (4, 0),
            Self::Prompt(_) => (5, 0),
        }
    }
}

fn record(ReadContent { content, remarks }: ReadContent, encoder: &LocalEncoder) -> Result<Done, String> {
    if let Content::Text(text) = content {
        return TextWork::Text(&text).answer(encoder);
    }
    let mut found = trained_samples(content, &encoder.tokenizer).map_err(|e| e.to_string())?;
    found.remarks.sentences = remarks.into_iter().collect();
    Ok(Done::Samples(found))
}

fn documents(content: Content, encoder: &LocalEncoder) -> Result<Done, String> {
    shown(content, &encoder.tokenizer).map(Done::Shown).map_err(|e| e.to_string())
}

/// As a user's message through the chat template, if there is one; else as the beginning of a document.
fn prompt(text: &str, encoder: &LocalEncoder) -> Result<Done, String> {
    let rules = &encoder.rules;
    match &rules.template {
        Ok(template) => TextWork::Text(&template.asking(text, &rules.template_variables)?).answer(encoder),
        Err(_) => encoder
            .tokenizer
            .encode(text)
            .map(|ids| Done::Ids([encoder.tokenizer.begin_of_text(), &ids].concat()))
            .map_err(|e| e.to_string()),
    }
}

/// The message that asks for `works`.
pub(in crate::data) fn request(works: &[TextWork<'_>]) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    writer.number(works.len());
    for work in works {
        let (kind, format) = work.kind();
        writer.number(kind);
        writer.number(format);
        writer.text(work.text());
    }
    writer.into_bytes()
}

fn requested<'a>(parts: &mut MessageReader<'a>) -> Option<TextWork<'a>> {
    let (kind, format, text) = (parts.number()?, *DataFormat::value_variants().get(parts.number()?)?, parts.text()?);
    Some(match kind {
        0 => TextWork::Text(text),
        1 => TextWork::Part(text),
        2 => TextWork::Record(format, text),
        3 => TextWork::ShownRecord(format, text),
        4 => TextWork::ShownText(text),
        5 => TextWork::Prompt(text),
        _ => return None,
    })
}

impl Service for LocalEncoder {
    /// As much of a request as goes well, and the words of the first thing that does not.
    fn answer(&mut self, request: &[u8]) -> Vec<u8> {
        let works = MessageReader::of(request).list(requested).unwrap_or_default();
        let mut writer = MessageWriter::default();
        for (item, work) in works.into_iter().enumerate() {
            work_on(item);
            let done = work.answer(self);
            let is_done = done.is_ok();
            put(&mut writer, done);
            if !is_done {
                break;
            }
        }
        writer.into_bytes()
    }
}

fn put(writer: &mut MessageWriter, done: Result<Done, String>) {
    match done {
        Ok(Done::Ids(ids)) => {
            writer.number(0);
            writer.ids(&ids);
        }
        Ok(Done::Placed(tokens)) => {
            writer.number(1);
            writer.ids(bytemuck::cast_slice(&tokens));
        }
        Ok(Done::Samples(samples)) => {
            writer.number(2);
            samples.write(writer);
        }
        Ok(Done::Shown(documents)) => {
            writer.number(3);
            writer.number(documents.len());
            for document in &documents {
                put_document(writer, document);
            }
        }
        Err(cause) => {
            writer.number(4);
            writer.text(&cause);
        }
    }
}

fn put_document(writer: &mut MessageWriter, (tokens, pieces): &(usize, Vec<TextPiece>)) {
    writer.number(*tokens);
    writer.number(pieces.len());
    for TextPiece { text, weight } in pieces {
        writer.number(weight.units() as usize);
        writer.text(text);
    }
}

/// The results of `count` requests: of all of them, or of those before the first failure.
///
/// # Errors
/// The first failure with its description; `None` for a malformed message.
pub(in crate::data) fn answered(answer: &[u8], count: usize) -> Option<Result<Vec<Done>, (usize, String)>> {
    let (mut parts, mut all) = (MessageReader::of(answer), Vec::with_capacity(count));
    for item in 0..count {
        match take(&mut parts)? {
            Ok(done) => all.push(done),
            Err(cause) => return Some(Err((item, cause))),
        }
    }
    Some(Ok(all))
}

fn take(parts: &mut MessageReader<'_>) -> Option<Result<Done, String>> {
    let document = |parts: &mut MessageReader<'_>| {
        let tokens = parts.number()?;
        let piece =
            |parts: &mut MessageReader<'_>| Some(TextPiece { weight: LossWeight::of_units(parts.number()?)?, text: parts.text()?.into() });
        Some((tokens, parts.list(piece)?))
    };
    Some(Ok(match parts.number()? {
        0 => Done::Ids(parts.ids()?),
        1 => Done::Placed(parts.values()?),
        2 => Done::Samples(RecordSamples::read(parts)?),
        3 => Done::Shown(parts.list(document)?),
        4 => return Some(Err(parts.text()?.into())),
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::diagnostics::RecordRemarks;

    #[test]
    fn work_and_its_results_are_transferred_unchanged() {
        let works = [
            TextWork::Text("é"),
            TextWork::Record(DataFormat::Alpaca, "{}"),
            TextWork::ShownText(""),
            TextWork::Part("a"),
            TextWork::Prompt("b"),
        ];
        let message = request(&works);
        let back = MessageReader::of(&message).list(requested).unwrap();
        assert_eq!(format!("{back:?}"), format!("{works:?}"));
        assert!((0..message.len()).all(|cut| MessageReader::of(&message[..cut]).list(requested).is_none()));

        let piece = |weight| TextPiece { text: "é".into(), weight: LossWeight::nearest(weight).unwrap() };
        let done = || {
            [
                Done::Ids(vec![1, 2]),
                Done::Placed(vec![Token { id: 1, start: 2, end: 3 }]),
                Done::Samples(RecordSamples {
                    samples: vec![vec![1], vec![]],
                    remarks: RecordRemarks {
                        is_unasked: true,
                        crossing: 2,
                        loses_reasoning: false,
                        is_endless: true,
                        sentences: vec!["é".into(), "b".into()],
                    },
                }),
                Done::Shown(vec![(3, vec![piece(1.0), piece(0.25), piece(0.0)])]),
            ]
        };
        let mut writer = MessageWriter::default();
        done().into_iter().for_each(|done| put(&mut writer, Ok(done)));
        put(&mut writer, Err("odd".into()));
        let answer = writer.into_bytes();
        assert_eq!(answered(&answer, 4), Some(Ok(done().into())));
        assert_eq!(answered(&answer, 5), Some(Err((4, "odd".into()))));
        assert_eq!((answered(&answer, 6).is_some(), answered(&answer[..9], 1)), (true, None));
    }
}
