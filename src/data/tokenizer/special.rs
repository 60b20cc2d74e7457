//! The tokens around documents: by the flags, else by the model's files as `transformers` reads them.
//!
//! A text begins as the post-processor of `tokenizer.json` begins it: `transformers` 5 asks nothing else, and
//! `add_bos_token` of `tokenizer_config.json` only where there is no `tokenizer.json`. Its end tokens are not used: a
//! separator stands between documents, whether the tokenizer would add one or not.

use super::added::DeclaredTokens;
use super::special_files::{SpecialFiles, json};
use crate::data::sandbox::{SandboxTask, guard};
use crate::error::{Error, Result};
use crate::model_dir::{CONFIG, ModelDir};
use clap::ValueEnum;
use serde_json::Value;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{Encoding, PostProcessor, Token, Tokenizer};

/// Whether each document begins with a token of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AddBos {
    /// Follow the tokenizer's post-processor; a resumed run follows its checkpoint.
    Auto,
    Yes,
    No,
}

/// Names under which common models keep their end-of-text token, tried when no file names one.
const END_OF_TEXT_NAMES: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<seed:eos>"];

/// Stands for a text's tokens; no tokenizer has so many ids.
const TEXT: u32 = u32::MAX;

/// Settings of special tokens in a model's directory.
pub(super) struct Special<'a> {
    files: &'a SpecialFiles<'a>,
    tokenizer: &'a Tokenizer,
    added: &'a DeclaredTokens,
}

impl<'a> Special<'a> {
    /// Of a `tokenizer` to which `added` were added.
    pub(super) fn new(files: &'a SpecialFiles<'a>, tokenizer: &'a Tokenizer, added: &'a DeclaredTokens) -> Self {
        Self { files, tokenizer, added }
    }

    /// The token between documents: `requested` for as text or id, else named by a file, else one of the usual names.
    pub(super) fn end_of_text(&self, requested: Option<&str>) -> Result<Option<u32>> {
        if let Some(token) = requested {
            // An id first: digits are tokens, too, and a checkpoint keeps the id.
            let id = token.parse().ok().or_else(|| self.tokenizer.token_to_id(token));
            return id.map(Some).ok_or_else(|| Error::usage(format!("--eos-token {token:?}: neither a token of tokenizer.json nor an id")));
        }
        let usual = || END_OF_TEXT_NAMES.iter().find_map(|name| self.tokenizer.token_to_id(name));
        Ok(self.named("eos")?.or_else(usual))
    }

    /// Token ids at the beginning of each document; `post_processor` is from `tokenizer.json`.
    pub(super) fn begin_of_text(&self, add: AddBos, post_processor: &Value) -> Result<Vec<u32>> {
        if add == AddBos::No {
            return Ok(vec![]);
        }
        let begin = guard(SandboxTask::Load, || before_text(post_processor)).and_then(|begin| begin);
        let begin = begin.map_err(|e| Error::format(self.dir().path().join("tokenizer.json"), format!("post_processor: {e}")))?;
        match add {
            AddBos::Yes if begin.is_empty() => self.named("bos")?.map(|id| vec![id]).ok_or_else(|| {
                let looked = "tokenizer_config.json and special_tokens_map.json name no bos_token, and generation_config.json and config.json no bos_token_id";
                Error::usage(format!("--add-bos yes: {}: {looked}", self.dir().path().display()))
            }),
            _ => Ok(begin),
        }
    }

    /// The token of a role, `bos` or `eos`, that a file names.
    fn named(&self, role: &str) -> Result<Option<u32>> {
        for (file, json) in self.files.by_text() {
            let token = &json[format!("{role}_token")];
            // Either the token itself or an object that describes it.
            let Some(token) = token.as_str().or(token["content"].as_str()) else { continue };
            let id = self.tokenizer.token_to_id(token).filter(|_| !self.added.is_only_named(token));
            let unknown = || Error::format(self.dir().path().join(file), format!("{role}_token {token:?} is not in tokenizer.json"));
            return id.map(Some).ok_or_else(unknown);
        }
        for file in ["generation_config.json", CONFIG] {
            let id = &json(self.dir(), file)?.1[format!("{role}_token_id")];
            let id = id.get(0).unwrap_or(id);
            if !id.is_null() {
                let known = id.as_u64().and_then(|id| u32::try_from(id).ok());
                let cause = format!("{role}_token_id {id} is not a token's id");
                return known.map(Some).ok_or_else(|| Error::format(self.dir().path().join(file), cause));
            }
        }
        Ok(None)
    }

    fn dir(&self) -> &ModelDir {
        self.files.dir
    }
}

/// The ids that a post-processor puts before a text.
fn before_text(post_processor: &Value) -> std::result::Result<Vec<u32>, String> {
    if post_processor.is_null() {
        return Ok(vec![]);
    }
    let processor: PostProcessorWrapper = serde_json::from_value(post_processor.clone()).map_err(|e| e.to_string())?;
    let text = Encoding::from_tokens(vec![Token::new(TEXT, "a".into(), (0, 1))], 0);
    let whole = processor.process(text, None, true).map_err(|e| e.to_string())?;
    let end = whole.get_ids().iter().position(|&id| id == TEXT);
    end.map(|end| whole.get_ids()[..end].to_vec()).ok_or_else(|| "leaves the text out".into())
}
