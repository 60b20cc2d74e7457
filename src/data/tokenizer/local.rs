//! A tokenizer in the process that runs it: in a sandbox where its file is foreign.

use super::byte_level::ByteLevelBpe;
use super::facts::Facts;
use super::growth::Growth;
use super::token::Token;
use crate::data::sandbox::{SandboxTask, guard};
use crate::error::{Error, Result};
use std::fmt;
use std::path::PathBuf;

/// Turns text into token ids.
pub(in crate::data) struct LocalTokenizer {
    kind: LocalKind,
    end_of_text: Option<u32>,
    begin_of_text: Vec<u32>,
}

/// Where ids come from.
pub(in crate::data) enum LocalKind {
    /// The data are token ids already.
    Absent,
    /// Vocabulary 256, the id is the byte.
    Bytes,
    Model(Box<TokenizerModel>),
}

/// The library's tokenizer.
pub(in crate::data) struct TokenizerModel {
    path: PathBuf,
    tokenizer: tokenizers::Tokenizer,
    /// The faster way, if there is one.
    byte_level: Option<ByteLevelBpe>,
    growth: Option<Growth>,
}

impl LocalTokenizer {
    /// The tokenizer with the ends of documents that `facts` name.
    pub(in crate::data) fn new(kind: LocalKind, facts: &Facts) -> Self {
        Self { kind, end_of_text: facts.end_of_text, begin_of_text: facts.begin_of_text.clone() }
    }

    /// The id that separates documents, if there is one.
    pub(in crate::data) fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// The ids that each document begins with.
    pub(in crate::data) fn begin_of_text(&self) -> &[u32] {
        &self.begin_of_text
    }

    /// The ids of a text, without those that begin or end a document.
    ///
    /// # Errors
    /// `Format` that names `tokenizer.json` when it cannot express the text; `Unsupported` when there is no tokenizer.
    pub(in crate::data) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            LocalKind::Absent => Err(Error::Unsupported("text, since the run has no tokenizer".into())),
            LocalKind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            LocalKind::Model(model) => model.encode(text),
        }
    }

    /// The ids of a part of a document, each with the bytes of `text` that it stands for.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub(in crate::data) fn encode_part(&self, text: &str) -> Result<Vec<Token>> {
        if let LocalKind::Model(model) = &self.kind {
            return model.encode_part(text);
        }
        let ids = self.encode(text)?;
        Ok((0..).zip(ids).map(|(at, id)| Token { id, start: at, end: at + 1 }).collect())
    }

    /// Whether the tokenizer's files add tokens to those that text is cut into.
    pub(in crate::data) fn has_added_tokens(&self) -> bool {
        matches!(&self.kind, LocalKind::Model(model) if !model.tokenizer.get_added_vocabulary().get_added_tokens_decoder().is_empty())
    }

    /// Whether `id` is of such a token.
    pub(in crate::data) fn is_added(&self, id: u32) -> bool {
        matches!(&self.kind, LocalKind::Model(model) if model.tokenizer.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id))
    }

    /// A token's own text, for people.
    pub(in crate::data) fn name_of(&self, id: u32) -> String {
        let name = match &self.kind {
            LocalKind::Model(model) => model.tokenizer.id_to_token(id),
            LocalKind::Absent | LocalKind::Bytes => None,
        };
        name.unwrap_or_else(|| format!("<{id}>"))
    }
}

impl TokenizerModel {
    /// The `tokenizer` of the file at `path`; `growth` describes normalizers that may make text longer.
    pub(super) fn new(path: PathBuf, tokenizer: tokenizers::Tokenizer, growth: Option<Growth>) -> Self {
        let byte_level = ByteLevelBpe::new(&tokenizer);
        Self { path, tokenizer, byte_level, growth }
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let fast = |model: &ByteLevelBpe| model.encode(&self.tokenizer, text, |tokens, _| ids.extend(tokens.iter().map(|token| token.id)));
        if self.guarded(|| self.byte_level.as_ref().and_then(fast))?.is_some() {
            return Ok(ids);
        }
        self.check_growth(text)?;
        let encoding = self.guarded(|| self.tokenizer.encode_fast(text, false))?.map_err(|e| self.error(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn encode_part(&self, text: &str) -> Result<Vec<Token>> {
        let mut placed = Vec::with_capacity(text.len() / 3);
        let fast = |model: &ByteLevelBpe| {
            model.encode(&self.tokenizer, text, |tokens, at| placed.extend(tokens.iter().map(|token| token.after(at))))
        };
        if self.guarded(|| self.byte_level.as_ref().and_then(fast))?.is_some() {
            return Ok(placed);
        }
        self.check_growth(text)?;
        let encoding = self.guarded(|| self.tokenizer.encode(text, false))?.map_err(|e| self.error(e))?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(tokens.map(|(&id, &(start, end))| Token { id, start: start as u32, end: end as u32 }).collect())
    }

    fn check_growth(&self, text: &str) -> Result<()> {
        let Some(growth) = &self.growth else { return Ok(()) };
        self.guarded(|| growth.check(text))?.map_err(|e| self.error(e))
    }

    fn guarded<T>(&self, call: impl FnOnce() -> T) -> Result<T> {
        guard(SandboxTask::Encode, call).map_err(|e| self.error(e))
    }

    fn error(&self, cause: impl fmt::Display) -> Error {
        Error::format(&self.path, format!("cannot encode: {cause}"))
    }
}
