//! Origin and properties of a tokenizer.

use crate::data::sandbox::codec::{MessageReader, MessageWriter};
use crate::error::Result;
use std::path::PathBuf;

/// Origin of a tokenizer.
pub(in crate::data) enum TokenizerKind {
    /// The data are token ids already.
    Absent,
    /// Vocabulary 256, the id is the byte.
    Bytes,
    /// The file of a model, and the sum of its bytes.
    Model { path: PathBuf, sha256: String },
}

/// Properties of a tokenizer.
#[derive(Clone, Default)]
pub(in crate::data) struct Facts {
    pub(in crate::data) vocab_size: usize,
    pub(in crate::data) end_of_text: Option<u32>,
    /// The text of the end of text, where a model's tokenizer has that token.
    pub(in crate::data) end_token: Option<String>,
    pub(in crate::data) begin_of_text: Vec<u32>,
    /// Checksum of tokens that files beside `tokenizer.json` add; empty where they add none.
    pub(in crate::data) added: String,
    /// Ids of added tokens that are no words of the tokenizer's model, ascending.
    pub(in crate::data) added_ids: Vec<u32>,
}

impl Facts {
    pub(in crate::data) fn message(&self) -> Vec<u8> {
        let mut writer = MessageWriter::default();
        writer.number(1);
        writer.number(self.vocab_size);
        writer.ids(self.end_of_text.as_slice());
        writer.number(self.end_token.is_some().into());
        writer.text(self.end_token.as_deref().unwrap_or_default());
        writer.ids(&self.begin_of_text);
        writer.text(&self.added);
        writer.ids(&self.added_ids);
        writer.into_bytes()
    }

    /// The facts of a message, or its error; `None` for a message that is neither.
    pub(in crate::data) fn read(message: &[u8]) -> Option<Result<Self>> {
        let mut parts = MessageReader::of(message);
        if parts.number()? == 0 {
            return parts.error().map(Err);
        }
        let (vocab_size, end_of_text) = (parts.number()?, parts.ids()?.first().copied());
        let (has_token, token) = (parts.number()? != 0, parts.text()?.to_string());
        let (begin_of_text, added, added_ids) = (parts.ids()?, parts.text()?.into(), parts.ids()?);
        Some(Ok(Self { vocab_size, end_of_text, end_token: has_token.then_some(token), begin_of_text, added, added_ids }))
    }
}
