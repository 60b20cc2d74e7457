//! A document as text with its trained parts.

use serde::Serialize;

/// Text that is trained, or not, as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct TextPiece {
    pub(crate) text: String,
    pub(crate) trained: bool,
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

/// `pieces`, neighbours of one kind joined, at most `characters` in all.
pub(in crate::data) fn joined(pieces: impl IntoIterator<Item = TextPiece>, mut characters: usize) -> Vec<TextPiece> {
    let mut joined: Vec<TextPiece> = Vec::new();
    for TextPiece { mut text, trained } in pieces {
        let is_cut = text.char_indices().nth(characters).is_some_and(|(end, _)| {
            text.truncate(end);
            text.push_str("...");
            true
        });
        characters = characters.saturating_sub(text.chars().count());
        match joined.last_mut() {
            Some(last) if last.trained == trained => last.text.push_str(&text),
            _ if text.is_empty() => {}
            _ => joined.push(TextPiece { text, trained }),
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
        let piece = |text: &str, trained| TextPiece { text: text.into(), trained };
        let pieces = || [piece("a", false), piece("b", true), piece("", false), piece("cä", true), piece("d", false)];
        assert_eq!(joined(pieces(), 100), [piece("a", false), piece("bcä", true), piece("d", false)]);
        assert_eq!(joined(pieces(), 3), [piece("a", false), piece("bc...", true)]);
    }
}
