//! Text to token ids: a model's `tokenizer.json`, or bytes.

use crate::data::contain::contain;
use crate::disk;
use crate::error::{Error, Result};
use std::fmt;
use std::path::{Path, PathBuf};

/// No tokenizer is larger; the largest have some tens of megabytes.
const BYTES_MAX: u64 = 256 << 20;

/// Names under which common models keep their end-of-text token, tried when `tokenizer_config.json` names none.
const END_OF_TEXT_NAMES: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<seed:eos>"];

/// Turns text into token ids.
pub struct Tokenizer {
    /// `None` is the byte tokenizer: vocabulary 256, the id is the byte.
    model: Option<Model>,
    vocab_size: usize,
    end_of_text: Option<u32>,
}

struct Model {
    path: PathBuf,
    tokenizer: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// The byte tokenizer: 256 ids, no end-of-text token.
    pub fn bytes() -> Self {
        Self { model: None, vocab_size: 256, end_of_text: None }
    }

    /// Reads `dir/tokenizer.json`; the byte tokenizer when `dir` is `None` or holds no such file.
    ///
    /// # Errors
    /// `Io` when the file is there and cannot be read; `Format` when it, or `tokenizer_config.json` beside it, is broken,
    /// or when the end-of-text token that the latter names is unknown to the former.
    pub fn load(dir: Option<&Path>) -> Result<Self> {
        let Some(dir) = dir else { return Ok(Self::bytes()) };
        let path = dir.join("tokenizer.json");
        let Some(bytes) = disk::read_if_present(&path, BYTES_MAX)? else { return Ok(Self::bytes()) };
        let parsed = contain(|| parse(&bytes)).map_err(|e| Error::format(&path, e))?;
        let tokenizer = parsed.map_err(|e| Error::format(&path, e))?;
        let vocab_size = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let end_of_text = end_of_text(dir, &tokenizer)?;
        Ok(Self { model: Some(Model { path, tokenizer }), vocab_size, end_of_text })
    }

    /// Whether this is the byte tokenizer.
    pub fn is_bytes(&self) -> bool {
        self.model.is_none()
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id that separates documents, if the tokenizer has one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// The ids of one document, without begin or end tokens.
    ///
    /// # Errors
    /// `Format` that names `tokenizer.json` when it cannot express the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Some(model) = &self.model else { return Ok(text.bytes().map(u32::from).collect()) };
        let encoding = contain(|| model.tokenizer.encode_fast(text, false)).and_then(|encoding| encoding.map_err(|e| e.to_string()));
        encoding.map(|encoding| encoding.get_ids().to_vec()).map_err(|e| Error::format(&model.path, format!("cannot encode: {e}")))
    }
}

impl fmt::Display for Tokenizer {
    /// For people: `bytes (256 ids)`, `m/tokenizer.json (50257 ids, end of text 50256)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.model {
            None => f.write_str("bytes")?,
            Some(model) => write!(f, "{}", model.path.display())?,
        }
        write!(f, " ({} ids", self.vocab_size)?;
        self.end_of_text.iter().try_for_each(|id| write!(f, ", end of text {id}"))?;
        f.write_str(")")
    }
}

/// The parts of `tokenizer.json` that turn text into ids.
fn parse(bytes: &[u8]) -> serde_json::Result<tokenizers::Tokenizer> {
    let mut parts: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(bytes)?;
    // Limits made for inference would silently cut or fill documents; the others only add markers or read ids back.
    for unused in ["truncation", "padding", "post_processor", "decoder"] {
        parts.insert(unused.to_string(), serde_json::Value::Null);
    }
    serde_json::from_value(parts.into())
}

/// The end-of-text token of `dir/tokenizer_config.json`, else one of the usual names.
fn end_of_text(dir: &Path, tokenizer: &tokenizers::Tokenizer) -> Result<Option<u32>> {
    let path = dir.join("tokenizer_config.json");
    let Some(bytes) = disk::read_if_present(&path, BYTES_MAX)? else { return Ok(usual_end_of_text(tokenizer)) };
    let config: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| Error::format(&path, e))?;
    // Either the token itself or an object that describes it.
    let name = config["eos_token"].as_str().or(config["eos_token"]["content"].as_str());
    let Some(name) = name else { return Ok(usual_end_of_text(tokenizer)) };
    let id = tokenizer.token_to_id(name);
    id.map(Some).ok_or_else(|| Error::format(&path, format!("eos_token {name:?} is not in tokenizer.json")))
}

fn usual_end_of_text(tokenizer: &tokenizers::Tokenizer) -> Option<u32> {
    END_OF_TEXT_NAMES.iter().find_map(|name| tokenizer.token_to_id(name))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Words `a` = 0 and `b` = 1, `<unk>` = 2, end of text `</s>` = 7; cuts documents after one token if let.
    pub(crate) const WORDS: &str = r#"{
        "version": "1.0", "padding": null, "normalizer": null, "post_processor": null, "decoder": null,
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        "added_tokens": [{"id": 7, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<unk>": 2, "</s>": 7}, "unk_token": "<unk>"}
    }"#;

    pub(crate) fn model_dir(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    fn load(files: &[(&str, &str)]) -> Result<Tokenizer> {
        Tokenizer::load(Some(model_dir(files).path()))
    }

    #[test]
    fn bytes_are_used_only_when_there_is_no_tokenizer() {
        for tokenizer in [Tokenizer::load(None).unwrap(), load(&[("config.json", "{}")]).unwrap()] {
            assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_text()), (256, None));
            assert_eq!(tokenizer.encode("aé").unwrap(), [97, 0xc3, 0xa9]);
            assert_eq!(tokenizer.to_string(), "bytes (256 ids)");
        }
        let message = load(&[("tokenizer.json", "{")]).err().unwrap().to_string();
        assert!(message.contains("tokenizer.json: "), "{message}");
        let dir = model_dir(&[]);
        std::os::unix::fs::symlink("nowhere", dir.path().join("tokenizer.json")).unwrap();
        assert!(matches!(Tokenizer::load(Some(dir.path())), Err(Error::Io { .. })));
    }

    #[test]
    fn a_models_tokenizer_is_not_cut_and_counts_ids_beyond_holes() {
        let tokenizer = load(&[("tokenizer.json", WORDS)]).unwrap();
        assert_eq!(tokenizer.encode("a b c a").unwrap(), [0, 1, 2, 0]);
        assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_text()), (8, Some(7)));
        assert!(tokenizer.to_string().ends_with("tokenizer.json (8 ids, end of text 7)"));
    }

    #[test]
    fn the_configuration_names_the_end_of_text() {
        let end = |config: &str| load(&[("tokenizer.json", WORDS), ("tokenizer_config.json", config)]).map(|t| t.end_of_text());
        assert_eq!(end(r#"{"eos_token": "b"}"#).unwrap(), Some(1));
        assert_eq!(end(r#"{"eos_token": {"content": "b"}}"#).unwrap(), Some(1));
        assert_eq!(end(r#"{"eos_token": null}"#).unwrap(), Some(7));
        for (config, cause) in [(r#"{"eos_token": "z"}"#, "eos_token \"z\""), ("[", "EOF")] {
            let message = end(config).unwrap_err().to_string();
            assert!(message.contains("tokenizer_config.json: ") && message.contains(cause), "{message}");
        }
    }

    /// What [`WORDS`] makes of a text after `parts` have replaced its own.
    fn hostile(parts: &str) -> Result<Vec<u32>> {
        let mut json: serde_json::Map<String, serde_json::Value> = serde_json::from_str(WORDS).unwrap();
        json.extend(serde_json::from_str::<serde_json::Map<_, _>>(parts).unwrap());
        load(&[("tokenizer.json", &serde_json::to_string(&json).unwrap())])?.encode(" a b")
    }

    #[test]
    fn files_that_make_the_library_panic_are_errors() {
        for parts in [
            r#"{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAQAAA=="}}"#,
            r#"{"normalizer": {"type": "Prepend", "prepend": ""}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true}}"#,
            r#"{"model": {"type": "BPE", "continuing_subword_prefix": "~~", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}"#,
        ] {
            let message = hostile(parts).expect_err(parts).to_string();
            assert!(message.contains("tokenizer.json: ") && message.contains("library panicked"), "{message}");
        }
        assert_eq!(hostile("{}").unwrap(), [0, 1]);
    }

    proptest! {
        #[test]
        fn a_damaged_tokenizer_never_panics(at in 0..WORDS.len(), byte in 0x20..0x7fu8, cut in 0..WORDS.len(), text: String) {
            let mut damaged = WORDS.as_bytes().to_vec();
            damaged[at] = byte;
            damaged.truncate(if cut % 4 == 0 { cut } else { damaged.len() });
            if let Ok(tokenizer) = load(&[("tokenizer.json", str::from_utf8(&damaged).unwrap())]) {
                let _ = tokenizer.encode(&text);
            }
        }
    }
}
