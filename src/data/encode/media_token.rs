//! Tokens that stand for images, sound or video in a text. Training processes text alone, so data with such a token are refused.

use serde::Serialize;

/// A token that stands for other input than text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MediaToken {
    /// Its key in the model's `config.json`.
    pub(crate) key: &'static str,
    pub(crate) id: u32,
}

impl MediaToken {
    /// The cause of an error about data with this token, in words that follow the name of its place.
    pub(crate) fn refusal(&self) -> String {
        format!("has id {}, which is {} in config.json: the text part is trained on text alone", self.id, self.key)
    }
}

/// The one among `media` with this id.
pub(in crate::data) fn find(media: &[MediaToken], id: u32) -> Option<&MediaToken> {
    media.iter().find(|token| token.id == id)
}
