//! Files of a model's directory that describe special tokens beside `tokenizer.json`.

use crate::disk;
use crate::error::{Error, Result};
use crate::model_dir::ModelDir;
use serde_json::Value;
use std::path::PathBuf;

/// Maximum size of a tokenizer's file; the largest have some tens of megabytes.
pub(in crate::data) const BYTES_MAX: u64 = 256 << 20;

/// Key of `tokenizer_config.json` that describes added tokens by their ids.
pub(super) const DECODER: &str = "added_tokens_decoder";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
const ADDED_TOKENS: &str = "added_tokens.json";

/// The files of a model's directory that describe special tokens.
pub(super) struct SpecialFiles<'a> {
    pub(super) dir: &'a ModelDir,
    config: Value,
    map: Value,
}

impl<'a> SpecialFiles<'a> {
    /// Reads the files in `dir`.
    ///
    /// # Errors
    /// `Io` for a file that cannot be read; `Format` for one that is no JSON.
    pub(super) fn read(dir: &'a ModelDir) -> Result<Self> {
        Ok(Self { dir, config: json(dir, TOKENIZER_CONFIG)?.1, map: json(dir, SPECIAL_TOKENS_MAP)?.1 })
    }

    /// The content of `tokenizer_config.json`, null if there is none.
    pub(super) fn config(&self) -> &Value {
        &self.config
    }

    /// The content of `special_tokens_map.json`, null if there is none.
    pub(super) fn map(&self) -> &Value {
        &self.map
    }

    /// Whether `tokenizer_config.json` describes its added tokens: `transformers` 5 reads no older file beside such a description.
    pub(super) fn has_decoder(&self) -> bool {
        !self.config[DECODER].is_null()
    }

    /// The value of `key`: that of `special_tokens_map.json`, where the file is read and has one, else that of `tokenizer_config.json`.
    pub(super) fn setting(&self, key: &str) -> &Value {
        if self.has_decoder() || self.map[key].is_null() { &self.config[key] } else { &self.map[key] }
    }

    /// The files from which keys are read; the last one takes precedence.
    pub(super) fn counted(&self) -> impl Iterator<Item = &Value> {
        [Some(&self.config), (!self.has_decoder()).then_some(&self.map)].into_iter().flatten()
    }

    /// The path of `added_tokens.json`, and its content, null if there is none.
    pub(super) fn added_tokens(&self) -> Result<(PathBuf, Value)> {
        json(self.dir, ADDED_TOKENS)
    }

    /// The error of a key that describes special tokens.
    pub(super) fn wrong_config(&self, cause: String) -> Error {
        Error::format(self.dir.path().join(TOKENIZER_CONFIG), cause)
    }

    /// The files that name special tokens by their text, the one that counts first.
    pub(super) fn by_text(&self) -> [(&'static str, &Value); 2] {
        let (config, map) = ((TOKENIZER_CONFIG, &self.config), (SPECIAL_TOKENS_MAP, &self.map));
        if self.has_decoder() { [config, map] } else { [map, config] }
    }
}

/// The path of the file `name` in `dir`, and its content, null if there is none.
pub(super) fn json(dir: &ModelDir, name: &str) -> Result<(PathBuf, Value)> {
    let path = dir.file(name)?;
    let bytes = disk::read_if_present(&path, BYTES_MAX)?;
    let content = bytes.map_or(Ok(Value::Null), |bytes| serde_json::from_slice(&bytes).map_err(|e| Error::format(&path, e)))?;
    Ok((path, content))
}
