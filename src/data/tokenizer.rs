//! Text to token ids: a model's `tokenizer.json`, or bytes.

mod byte_level;
mod special;
mod token;

pub use special::AddBos;
pub(super) use token::{Token, floor_boundary};

use crate::data::chat::record::RecordRules;
use crate::data::checksum;
use crate::data::contain::contain;
use crate::disk;
use crate::error::{Error, Result};
use crate::model_dir::ModelDir;
use byte_level::ByteLevelBpe;
use serde_json::Value;
use special::{BYTES_MAX, Special};
use std::fmt;
use std::path::PathBuf;

/// Turns text into token ids.
pub struct Tokenizer {
    kind: TokenizerKind,
    vocab_size: usize,
    end_of_text: Option<u32>,
    begin_of_text: Vec<u32>,
    rules: RecordRules,
}

enum TokenizerKind {
    /// The data are token ids already.
    Absent,
    /// Vocabulary 256, the id is the byte.
    Bytes,
    Model(Box<TokenizerModel>),
}

struct TokenizerModel {
    path: PathBuf,
    /// Of the file's bytes.
    sha256: String,
    tokenizer: tokenizers::Tokenizer,
    /// The faster way, if there is one.
    byte_level: Option<ByteLevelBpe>,
}

impl Tokenizer {
    /// The byte tokenizer: 256 ids, no end-of-text token.
    pub fn bytes() -> Self {
        Self { kind: TokenizerKind::Bytes, vocab_size: 256, end_of_text: None, begin_of_text: Vec::new(), rules: RecordRules::default() }
    }

    /// The byte tokenizer with the id `end_of_text` between documents.
    ///
    /// # Errors
    /// `Usage` for an `end_of_text` that is no id, and where `add_bos` asks for a token that bytes do not have.
    pub(crate) fn bytes_with(end_of_text: Option<&str>, add_bos: AddBos) -> Result<Self> {
        if add_bos == AddBos::Yes {
            return Err(Error::usage("--add-bos yes: bytes have no bos_token"));
        }
        let id =
            |token: &str| token.parse().map_err(|_| Error::usage(format!("--eos-token {token:?}: bytes have no such token; name an id")));
        Ok(Self { end_of_text: end_of_text.map(id).transpose()?, ..Self::bytes() })
    }

    /// No tokenizer, for data that are token ids.
    pub fn absent() -> Self {
        Self { kind: TokenizerKind::Absent, vocab_size: 0, end_of_text: None, begin_of_text: Vec::new(), rules: RecordRules::default() }
    }

    /// Reads `tokenizer.json`, if `dir` has one, and what says which tokens stand around documents: the flags `--eos-token` and
    /// `--add-bos`, or the files beside it.
    ///
    /// # Errors
    /// `Io` when a file is there and cannot be read; `Format` when one is broken or names a token that `tokenizer.json` does not have;
    /// `Usage` when a flag does.
    pub fn load(dir: &ModelDir, end_of_text: Option<&str>, add_bos: AddBos) -> Result<Option<Self>> {
        let path = dir.file("tokenizer.json")?;
        let Some(bytes) = disk::read_if_present(&path, BYTES_MAX)? else { return Ok(None) };
        let parsed = contain("tokenizer", || parse(&bytes)).map_err(|e| Error::format(&path, e))?;
        let (tokenizer, post_processor) = parsed.map_err(|e| Error::format(&path, e))?;
        let vocab_size = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let special = Special::new(dir, &tokenizer);
        let (end_of_text, begin_of_text) = (special.end_of_text(end_of_text)?, special.begin_of_text(add_bos, &post_processor)?);
        let byte_level = ByteLevelBpe::new(&tokenizer);
        let model = TokenizerModel { path, sha256: checksum::sha256(&bytes), tokenizer, byte_level };
        let kind = TokenizerKind::Model(Box::new(model));
        Ok(Some(Self { kind, vocab_size, end_of_text, begin_of_text, rules: RecordRules::default() }))
    }

    /// This tokenizer, with rules for records.
    pub(crate) fn with_rules(self, rules: RecordRules) -> Self {
        Self { rules, ..self }
    }

    /// How records are read.
    pub(super) fn rules(&self) -> &RecordRules {
        &self.rules
    }

    /// Whether the data may hold answers to prompts.
    pub(crate) fn reads_answers(&self) -> bool {
        self.rules.has_answers
    }

    /// Whether this is the byte tokenizer.
    pub(crate) fn is_bytes(&self) -> bool {
        matches!(self.kind, TokenizerKind::Bytes)
    }

    /// The id that separates documents, if the tokenizer has one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// What each document begins with, most often nothing or one id.
    pub fn begin_of_text(&self) -> &[u32] {
        &self.begin_of_text
    }

    /// The ids of a text, without those that begin or end a document.
    ///
    /// # Errors
    /// `Format` that names `tokenizer.json` when it cannot express the text; `Unsupported` when there is no tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let model = match &self.kind {
            TokenizerKind::Absent => return Err(Error::Unsupported("text without a tokenizer".into())),
            TokenizerKind::Bytes => return Ok(text.bytes().map(u32::from).collect()),
            TokenizerKind::Model(model) => model,
        };
        model.encode(text)
    }

    /// What decides which ids a text becomes, wherever its files lie: two tokenizers with the same identity make the same tokens.
    pub(crate) fn identity(&self) -> serde_json::Value {
        let (end, begin) = (self.end_of_text, &self.begin_of_text);
        let tokenizer = match &self.kind {
            TokenizerKind::Absent => "none".into(),
            TokenizerKind::Bytes => end.map_or("bytes".into(), |end| serde_json::json!({"bytes": true, "end_of_text": end})),
            TokenizerKind::Model(model) => serde_json::json!({"tokenizer.json": model.sha256, "end_of_text": end, "begin_of_text": begin}),
        };
        match (self.rules.identity(), tokenizer) {
            (None, tokenizer) => tokenizer,
            (Some(rules), Value::Object(mut parts)) => {
                parts.insert("records".into(), rules);
                parts.into()
            }
            (Some(rules), name) => serde_json::json!({"name": name, "records": rules}),
        }
    }

    /// A token's own text, for people.
    pub(super) fn name_of(&self, id: u32) -> String {
        let name = match &self.kind {
            TokenizerKind::Model(model) => model.tokenizer.id_to_token(id),
            TokenizerKind::Absent | TokenizerKind::Bytes => None,
        };
        name.unwrap_or_else(|| format!("<{id}>"))
    }

    /// The ids of a part of a document, each with the bytes of `text` that it stands for.
    pub(super) fn encode_part(&self, text: &str) -> Result<Vec<Token>> {
        let model = match &self.kind {
            TokenizerKind::Model(model) => model,
            _ => {
                let ids = self.encode(text)?;
                return Ok((0..).zip(ids).map(|(at, id)| Token { id, start: at, end: at + 1 }).collect());
            }
        };
        model.encode_part(text)
    }
}

impl TokenizerModel {
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let fast = |model: &ByteLevelBpe| model.encode(&self.tokenizer, text, |tokens, _| ids.extend(tokens.iter().map(|token| token.id)));
        if self.contained(|| self.byte_level.as_ref().and_then(fast))?.is_some() {
            return Ok(ids);
        }
        let encoding = self.contained(|| self.tokenizer.encode_fast(text, false))?.map_err(|e| self.error(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn encode_part(&self, text: &str) -> Result<Vec<Token>> {
        let mut placed = Vec::with_capacity(text.len() / 3);
        let fast = |model: &ByteLevelBpe| {
            model.encode(&self.tokenizer, text, |tokens, at| placed.extend(tokens.iter().map(|token| token.after(at))))
        };
        if self.contained(|| self.byte_level.as_ref().and_then(fast))?.is_some() {
            return Ok(placed);
        }
        let encoding = self.contained(|| self.tokenizer.encode(text, false))?.map_err(|e| self.error(e))?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(tokens.map(|(&id, &(start, end))| Token { id, start: start as u32, end: end as u32 }).collect())
    }

    fn contained<T>(&self, call: impl FnOnce() -> T) -> Result<T> {
        contain("tokenizer", call).map_err(|e| self.error(e))
    }

    fn error(&self, cause: impl fmt::Display) -> Error {
        Error::format(&self.path, format!("cannot encode: {cause}"))
    }
}

impl fmt::Display for Tokenizer {
    /// For people: `bytes (256 ids)`, `m/tokenizer.json (32000 ids, end of text 2, each document begins with 1)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            TokenizerKind::Absent => return f.write_str("none: the data are token ids"),
            TokenizerKind::Bytes => f.write_str("bytes")?,
            TokenizerKind::Model(model) => write!(f, "{}", model.path.display())?,
        }
        write!(f, " ({} ids", self.vocab_size)?;
        self.end_of_text.iter().try_for_each(|id| write!(f, ", end of text {id}"))?;
        self.begin_of_text.iter().take(1).try_for_each(|_| f.write_str(", each document begins with"))?;
        self.begin_of_text.iter().try_for_each(|id| write!(f, " {id}"))?;
        f.write_str(")")
    }
}

/// The parts of `tokenizer.json` that turn text into ids, and its post-processor.
fn parse(bytes: &[u8]) -> serde_json::Result<(tokenizers::Tokenizer, Value)> {
    let mut parts: serde_json::Map<String, Value> = serde_json::from_slice(bytes)?;
    let post_processor = parts.remove("post_processor").unwrap_or(Value::Null);
    // Limits made for inference would silently cut or fill documents; the decoder only reads ids back.
    for unused in ["truncation", "padding", "post_processor", "decoder"] {
        parts.insert(unused.to_string(), Value::Null);
    }
    Ok((serde_json::from_value(parts.into())?, post_processor))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;

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

    /// As [`WORDS`], with a post-processor that puts `b` = 1 before and `</s>` = 7 after a text.
    pub(crate) fn with_bos(tokenizer: &str) -> String {
        with(
            tokenizer,
            r#"{"post_processor": {"type": "RobertaProcessing", "cls": ["b", 1], "sep": ["</s>", 7], "trim_offsets": true, "add_prefix_space": false}}"#,
        )
    }

    /// The tokenizer in `dir` as its files describe it, else bytes.
    pub(crate) fn load_or_bytes(dir: &Path) -> Result<Tokenizer> {
        Ok(Tokenizer::load(&ModelDir::open(dir)?, None, AddBos::Auto)?.unwrap_or_else(Tokenizer::bytes))
    }

    fn load(files: &[(&str, &str)]) -> Result<Tokenizer> {
        load_or_bytes(model_dir(files).path())
    }

    /// The tokenizer `json` with these parts in place of its own.
    fn with(json: &str, parts: &str) -> String {
        let mut json: serde_json::Map<String, Value> = serde_json::from_str(json).unwrap();
        json.extend(serde_json::from_str::<serde_json::Map<_, _>>(parts).unwrap());
        serde_json::to_string(&json).unwrap()
    }

    #[test]
    fn a_directory_without_a_tokenizer_has_none_and_a_broken_one_is_an_error() {
        let dir = model_dir(&[("config.json", "{}")]);
        assert!(Tokenizer::load(&ModelDir::open(dir.path()).unwrap(), None, AddBos::Auto).unwrap().is_none());
        let bytes = Tokenizer::bytes();
        assert_eq!((bytes.vocab_size, bytes.end_of_text()), (256, None));
        assert_eq!(bytes.encode("aé").unwrap(), [97, 0xc3, 0xa9]);
        assert_eq!(bytes.to_string(), "bytes (256 ids)");
        let message = load(&[("tokenizer.json", "{")]).err().unwrap().to_string();
        assert!(message.contains("tokenizer.json: "), "{message}");
        std::os::unix::fs::symlink("nowhere", dir.path().join("tokenizer.json")).unwrap();
        assert!(matches!(load_or_bytes(dir.path()), Err(Error::Io { .. })));
        assert!(Tokenizer::absent().encode("a").is_err());
    }

    #[test]
    fn a_models_tokenizer_is_not_cut_and_counts_ids_beyond_holes() {
        let tokenizer = load(&[("tokenizer.json", WORDS)]).unwrap();
        assert_eq!(tokenizer.encode("a b c a").unwrap(), [0, 1, 2, 0]);
        assert_eq!((tokenizer.vocab_size, tokenizer.end_of_text()), (8, Some(7)));
        assert!(tokenizer.to_string().ends_with("tokenizer.json (8 ids, end of text 7)"));
        let tokenizer = load(&[("tokenizer.json", &with_bos(WORDS))]).unwrap();
        assert_eq!((tokenizer.encode("a").unwrap(), tokenizer.begin_of_text()), (vec![0], &[1][..]));
        assert!(tokenizer.to_string().ends_with("tokenizer.json (8 ids, end of text 7, each document begins with 1)"));
    }

    #[test]
    fn the_identity_is_what_makes_tokens_and_not_where_it_lies() {
        let identity = |files: &[(&str, &str)]| load(files).unwrap().identity();
        let words = identity(&[("tokenizer.json", WORDS)]);
        assert_eq!(words, identity(&[("tokenizer.json", WORDS)]));
        assert_eq!(Tokenizer::bytes().identity(), "bytes");
        assert_ne!(words, identity(&[("tokenizer.json", &WORDS.replace("\"a\": 0", "\"c\": 0"))]));
        assert_ne!(words, identity(&[("tokenizer.json", WORDS), ("tokenizer_config.json", r#"{"eos_token": "b"}"#)]));
        assert_ne!(identity(&[("tokenizer.json", &with_bos(WORDS))])["begin_of_text"], words["begin_of_text"]);
    }

    #[test]
    fn the_files_name_the_end_of_text_in_the_order_of_transformers() {
        const WORDS_FILE: (&str, &str) = ("tokenizer.json", WORDS);
        let end = |files: &[(&str, &str)]| load(&[&[WORDS_FILE], files].concat()).map(|tokenizer| tokenizer.end_of_text());
        let (config, map, generation) = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json");
        let (a, b) = (r#"{"eos_token": "a"}"#, r#"{"eos_token": {"content": "b"}}"#);
        for (files, id) in [
            (&[(config, a)][..], 0),
            (&[(config, b)], 1),
            (&[(config, r#"{"eos_token": null}"#)], 7),
            (&[(map, a)], 0),
            (&[(config, a), (map, b)], 1),
            (&[(config, r#"{"eos_token": "a", "added_tokens_decoder": {}}"#), (map, b)], 0),
            (&[(config, r#"{"added_tokens_decoder": {}}"#), (map, b)], 1),
            (&[(generation, r#"{"eos_token_id": 2}"#)], 2),
            (&[(generation, r#"{"eos_token_id": [1, 0]}"#), ("config.json", r#"{"eos_token_id": 2}"#)], 1),
            (&[("config.json", r#"{"eos_token_id": 2}"#)], 2),
            (&[(map, a), (generation, r#"{"eos_token_id": 2}"#)], 0),
            (&[("config.json", r#"{"eos_token_id": null}"#)], 7),
        ] {
            assert_eq!(end(files).unwrap(), Some(id), "{files:?}");
        }
        for (file, content, cause) in [
            (config, r#"{"eos_token": "z"}"#, "eos_token \"z\""),
            (config, "[", "EOF"),
            (map, r#"{"eos_token": "\u001b[31mz"}"#, "\\u{1b}[31mz"),
            (generation, r#"{"eos_token_id": "</s>"}"#, "eos_token_id \"</s>\""),
            (generation, r#"{"eos_token_id": -1}"#, "eos_token_id -1"),
        ] {
            let message = end(&[(file, content)]).unwrap_err().to_string();
            assert!(message.contains(&format!("{file}: ")) && message.contains(cause), "{message}");
        }
    }

    #[test]
    fn flags_win_over_files_and_name_what_is_unknown() {
        let dir = model_dir(&[("tokenizer.json", &with_bos(WORDS)), ("tokenizer_config.json", r#"{"eos_token": "z"}"#)]);
        let dir = ModelDir::open(dir.path()).unwrap();
        let load = |eos, bos| {
            Tokenizer::load(&dir, Some(eos), bos).map(|tokenizer| tokenizer.map(|t| (t.end_of_text(), t.begin_of_text().to_vec())))
        };
        assert_eq!(load("a", AddBos::Auto).unwrap(), Some((Some(0), vec![1])));
        assert_eq!(load("2", AddBos::No).unwrap(), Some((Some(2), vec![])));
        let refused = load("<eot>", AddBos::Auto).unwrap_err();
        assert!(refused.exit_code() == 2 && refused.to_string().starts_with("--eos-token \"<eot>\""), "{refused}");
    }

    #[test]
    fn a_token_before_documents_is_the_post_processors_or_asked_for() {
        let begin = |files: &[(&str, &str)], add| {
            let dir = model_dir(files);
            Tokenizer::load(&ModelDir::open(dir.path())?, None, add).map(|tokenizer| tokenizer.unwrap().begin_of_text().to_vec())
        };
        let plain = ("tokenizer.json", WORDS);
        assert_eq!(begin(&[plain], AddBos::Auto).unwrap(), [0; 0]);
        assert_eq!(begin(&[plain, ("special_tokens_map.json", r#"{"bos_token": "a"}"#)], AddBos::Auto).unwrap(), [0; 0]);
        assert_eq!(begin(&[plain, ("special_tokens_map.json", r#"{"bos_token": "a"}"#)], AddBos::Yes).unwrap(), [0]);
        assert_eq!(begin(&[plain, ("config.json", r#"{"bos_token_id": 2}"#)], AddBos::Yes).unwrap(), [2]);
        let refused = begin(&[plain], AddBos::Yes).unwrap_err();
        assert!(refused.exit_code() == 2 && refused.to_string().contains("no bos_token"), "{refused}");
        for broken in [r#"{"post_processor": {"type": "New"}}"#, r#"{"post_processor": 5}"#] {
            let broken = with(WORDS, broken);
            assert!(
                begin(&[("tokenizer.json", &broken)], AddBos::Auto).unwrap_err().to_string().contains("tokenizer.json: post_processor: ")
            );
            assert_eq!(begin(&[("tokenizer.json", &broken)], AddBos::No).unwrap(), [0; 0]);
        }
    }

    /// What [`WORDS`] makes of a text after `parts` have replaced its own.
    fn hostile(parts: &str) -> Result<Vec<u32>> {
        load(&[("tokenizer.json", &with(WORDS, parts))])?.encode(" a b")
    }

    #[test]
    fn files_that_make_the_library_panic_are_errors() {
        for parts in [
            r#"{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAQAAA=="}}"#,
            r#"{"normalizer": {"type": "Prepend", "prepend": ""}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true}}"#,
            r#"{"model": {"type": "BPE", "continuing_subword_prefix": "~~", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}"#,
        ] {
            let message = hostile(parts).expect_err(parts).to_string();
            assert!(message.contains("tokenizer.json: ") && message.contains("library fails on it"), "{message}");
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
