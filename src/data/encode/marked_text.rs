//! A document as text with its trained parts.

use crate::data::loss_weight::LossWeight;
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

/// Text of one weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TextPiece {
    pub(crate) text: String,
    pub(crate) weight: LossWeight,
}

impl TextPiece {
    /// The weight, where it is neither 0 nor 1.
    fn fraction(&self) -> Option<f32> {
        (![LossWeight::NONE, LossWeight::WHOLE].contains(&self.weight)).then(|| self.weight.value())
    }

    /// The weight for people, with four digits, where it is neither 0 nor 1.
    pub(crate) fn shown_weight(&self) -> Option<f64> {
        self.fraction().map(|weight| (f64::from(weight) * 1e4).round() / 1e4)
    }
}

impl Serialize for TextPiece {
    /// `text` and `trained`, and a `weight` that is neither 0 nor 1.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let fraction = self.fraction();
        let mut piece = serializer.serialize_struct("TextPiece", 2 + usize::from(fraction.is_some()))?;
        piece.serialize_field("text", &self.text)?;
        piece.serialize_field("trained", &self.weight.is_trained())?;
        if let Some(weight) = fraction {
            piece.serialize_field("weight", &weight)?;
        }
        piece.end()
    }
}

/// A document as the model reads it.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ShownDocument {
    pub(crate) file: String,
    /// From 1; nothing where the file is one document.
    pub(crate) line: Option<u64>,
    /// Nothing where only its beginning was read.
    pub(crate) tokens: Option<usize>,
    pub(crate) pieces: Vec<TextPiece>,
}

/// `pieces`, neighbours of one weight joined, at most `characters` in all.
pub(in crate::data) fn joined(pieces: impl IntoIterator<Item = TextPiece>, mut characters: usize) -> Vec<TextPiece> {
    let mut joined: Vec<TextPiece> = Vec::new();
    for TextPiece { mut text, weight } in pieces {
        let is_cut = text.char_indices().nth(characters).is_some_and(|(end, _)| {
            text.truncate(end);
            text.push_str("...");
            true
        });
        characters = characters.saturating_sub(text.chars().count());
        match joined.last_mut() {
            Some(last) if last.weight == weight => last.text.push_str(&text),
            _ if text.is_empty() => {}
            _ => joined.push(TextPiece { text, weight }),
        }
        if is_cut {
            break;
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_kind_are_one_and_long_text_is_cut() {
        let weight = |trained| if trained { LossWeight::WHOLE } else { LossWeight::NONE };
        let piece = |text: &str, trained| TextPiece { text: text.into(), weight: weight(trained) };
        let pieces = || [piece("a", false), piece("b", true), piece("", false), piece("cä", true), piece("d", false)];
        assert_eq!(joined(pieces(), 100), [piece("a", false), piece("bcä", true), piece("d", false)]);
        assert_eq!(joined(pieces(), 3), [piece("a", false), piece("bc...", true)]);
    }

    #[test]
    fn a_piece_is_written_with_a_weight_where_it_is_a_fraction() {
        let written = |weight| {
            let piece = TextPiece { text: "a".into(), weight: LossWeight::nearest(weight).unwrap() };
            serde_json::to_string(&piece).unwrap()
        };
        assert_eq!(written(1.0), r#"{"text":"a","trained":true}"#);
        assert_eq!(written(0.25), r#"{"text":"a","trained":true,"weight":0.25}"#);
        assert_eq!(written(0.0), r#"{"text":"a","trained":false}"#);
    }
}
