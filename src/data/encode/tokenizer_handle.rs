//! The [`Tokenizer`] of the program: a handle that pairs a model's tokenizer with the rules of records. Code that a model's files steer runs
//! in a sandbox; the handle encodes bytes alone itself.

use super::local_encoder::{LocalEncoder, compile};
use super::media_token::MediaToken;
use super::text_work::{Done, TextWork, answered, request};
use crate::data::chat::record::RecordRules;
use crate::data::checksum;
use crate::data::sandbox::codec::MessageWriter;
use crate::data::sandbox::{Ended, Sandbox, SandboxTask, unreadable};
use crate::data::stopped::interrupted;
use crate::data::tokenizer::{AddBos, BYTES_MAX, Facts, LocalKind, Token, TokenDecoder, TokenizerKind, model_in_this_process, read_model};
use crate::disk;
use crate::error::{Error, Result};
use crate::model_dir::ModelDir;
use crate::signals::StopFlag;
use serde_json::Value;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Turns text into token ids.
pub struct Tokenizer {
    kind: TokenizerKind,
    facts: Facts,
    rules: Arc<RecordRules>,
    place: TokenizerPlace,
    /// Tokens that the data must not have.
    media: Vec<MediaToken>,
}

/// Where text becomes ids.
enum TokenizerPlace {
    Here(LocalEncoder),
    Sandbox(Sandbox),
}

impl Tokenizer {
    /// The byte tokenizer: 256 ids, no end-of-text token.
    pub fn bytes() -> Self {
        Self::here(TokenizerKind::Bytes, LocalKind::Bytes, Facts { vocab_size: 256, ..Facts::default() }, Arc::default())
    }

    /// The byte tokenizer with the id `end_of_text` between documents.
    ///
    /// # Errors
    /// `Usage` for an `end_of_text` that is no id, and where `add_bos` asks for a token that bytes do not have; those of a chat template.
    pub(crate) fn bytes_with(end_of_text: Option<&str>, add_bos: AddBos, rules: Arc<RecordRules>) -> Result<Self> {
        if add_bos == AddBos::Yes {
            return Err(Error::usage("--add-bos yes: bytes have no bos_token"));
        }
        let id =
            |token: &str| token.parse().map_err(|_| Error::usage(format!("--eos-token {token:?}: bytes have no such token; name an id")));
        let facts = Facts { vocab_size: 256, end_of_text: end_of_text.map(id).transpose()?, ..Facts::default() };
        Self::with_rules(TokenizerKind::Bytes, rules, || Ok((LocalKind::Bytes, facts)))
    }

    /// No tokenizer, for data that are token ids.
    pub(crate) fn absent(rules: Arc<RecordRules>) -> Self {
        Self::here(TokenizerKind::Absent, LocalKind::Absent, Facts::default(), rules)
    }

    /// Reads `tokenizer.json`, if `dir` has one, and the settings of the tokens around documents: the flags `--eos-token` and `--add-bos`,
    /// or the files beside `tokenizer.json`.
    ///
    /// # Errors
    /// `Io` when a file is there and cannot be read; `Format` when one is broken or names a token that `tokenizer.json` does not have;
    /// `Usage` when a flag does.
    pub fn load(dir: &ModelDir, end_of_text: Option<&str>, add_bos: AddBos) -> Result<Option<Self>> {
        Self::load_with(dir, end_of_text, add_bos, &Arc::default())
    }

    /// As [`Self::load`], with rules for records.
    ///
    /// # Errors
    /// As [`Self::load`]; those of a chat template.
    pub(crate) fn load_with(dir: &ModelDir, end_of_text: Option<&str>, add_bos: AddBos, rules: &Arc<RecordRules>) -> Result<Option<Self>> {
        let path = dir.file("tokenizer.json")?;
        let Some(bytes) = disk::read_if_present(&path, BYTES_MAX)? else { return Ok(None) };
        let kind = TokenizerKind::Model { path: path.clone(), sha256: checksum::sha256(&bytes) };
        Self::with_rules(kind, rules.clone(), || read_model(dir, path, &bytes, end_of_text, add_bos)).map(Some)
    }

    /// The tokenizer of the file content `bytes`, in this process: for fuzzers, which do not follow child processes.
    ///
    /// # Errors
    /// `Format` that describes the fault in the file.
    pub fn in_this_process(bytes: &[u8]) -> Result<Self> {
        let path = PathBuf::from("tokenizer.json");
        let kind = TokenizerKind::Model { path: path.clone(), sha256: checksum::sha256(bytes) };
        Ok(Self::here(kind, model_in_this_process(path, bytes)?, Facts::default(), Arc::default()))
    }

    /// A tokenizer of this kind, which `make` makes where foreign files are read.
    fn with_rules(kind: TokenizerKind, rules: Arc<RecordRules>, make: impl FnOnce() -> Result<(LocalKind, Facts)> + Send) -> Result<Self> {
        let is_foreign = matches!(kind, TokenizerKind::Model { .. }) || rules.template.is_ok();
        if !is_foreign || cfg!(fuzzing) {
            return compile(&rules).and_then(|()| make()).map(|(local, facts)| Self::here(kind, local, facts, rules));
        }
        let start = || match compile(&rules).and_then(|()| make()) {
            Ok((local, facts)) => (facts.message(), Some(LocalEncoder::new(local, &facts, rules.clone()))),
            Err(error) => (refusal(&error), None),
        };
        let started = Sandbox::start(start).map_err(|ended| match ended {
            Ended::Died { task: SandboxTask::Compile, cause, .. } => Error::format(&rules.template_file, cause),
            other => wrong(&kind, other, |_, cause| Error::Unsupported(cause)),
        });
        let (sandbox, message) = started?;
        let facts = Facts::read(&message).unwrap_or_else(|| Err(unreadable()))?;
        Ok(Self { kind, facts, rules, place: TokenizerPlace::Sandbox(sandbox), media: Vec::new() })
    }

    /// A tokenizer that no file decides.
    fn here(kind: TokenizerKind, local: LocalKind, facts: Facts, rules: Arc<RecordRules>) -> Self {
        let encoder = LocalEncoder::new(local, &facts, rules.clone());
        Self { kind, facts, rules, place: TokenizerPlace::Here(encoder), media: Vec::new() }
    }

    /// The tokenizer without its processes, when all text is encoded: it encodes no more.
    pub(crate) fn closed(self) -> Self {
        let Self { kind, facts, rules, media, .. } = self;
        Self::here(kind, LocalKind::Absent, facts, rules).refusing(media)
    }

    /// This tokenizer for data that must not have the tokens `media`.
    pub(crate) fn refusing(self, media: Vec<MediaToken>) -> Self {
        Self { media, ..self }
    }

    /// Tokens that the data must not have.
    pub(in crate::data) fn media_tokens(&self) -> &[MediaToken] {
        &self.media
    }

    /// How records are read.
    pub(crate) fn rules(&self) -> &RecordRules {
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

    /// Whether text becomes ids in this process, which takes next to no time.
    pub(in crate::data) fn is_here(&self) -> bool {
        matches!(self.place, TokenizerPlace::Here(_))
    }

    /// The decoder of this tokenizer, which itself only encodes.
    ///
    /// # Errors
    /// `Unsupported` where there is no tokenizer; `Io` and `Format` when its file cannot be read again, or has changed.
    pub(crate) fn decoder(&self) -> Result<TokenDecoder> {
        TokenDecoder::of(&self.kind)
    }

    /// The id that separates documents, if the tokenizer has one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.facts.end_of_text
    }

    /// The text of the token that separates documents, where a model's tokenizer has it.
    pub(crate) fn end_token(&self) -> Option<&str> {
        self.facts.end_token.as_deref()
    }

    /// Ids of tokens that the tokenizer has beside its vocabulary, ascending.
    pub(crate) fn added_ids(&self) -> &[u32] {
        &self.facts.added_ids
    }

    /// Token ids at the beginning of each document, most often none or one.
    pub fn begin_of_text(&self) -> &[u32] {
        &self.facts.begin_of_text
    }

    /// The ids of a text, without those that begin or end a document.
    ///
    /// # Errors
    /// `Format` that names `tokenizer.json` when it cannot express the text; `Unsupported` when there is no tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let done = self.run(&[TextWork::Text(text)], &StopFlag::default(), |_, cause| self.refuse(cause))?;
        if let Some(Done::Ids(ids)) = done.into_iter().next() { Ok(ids) } else { Err(unreadable()) }
    }

    /// The ids of a part of a document, each with the bytes of `text` that it stands for.
    pub(in crate::data) fn encode_part(&self, text: &str) -> Result<Vec<Token>> {
        let done = self.run(&[TextWork::Part(text)], &StopFlag::default(), |_, cause| self.refuse(cause))?;
        if let Some(Done::Placed(tokens)) = done.into_iter().next() { Ok(tokens) } else { Err(unreadable()) }
    }

    /// The results of `works`, until `stop` is set.
    ///
    /// # Errors
    /// `refuse` of the first that goes wrong; `Interrupted`; `Resource` where there is no process for it.
    pub(in crate::data) fn run(
        &self,
        works: &[TextWork<'_>],
        stop: &StopFlag,
        refuse: impl Fn(usize, String) -> Error,
    ) -> Result<Vec<Done>> {
        let sandbox = match &self.place {
            TokenizerPlace::Sandbox(sandbox) => sandbox,
            TokenizerPlace::Here(local) => {
                let answer = |(item, work): (usize, &TextWork<'_>)| match stop.is_set() {
                    true => Err(interrupted()),
                    false => work.answer(local).map_err(|cause| refuse(item, cause)),
                };
                return works.iter().enumerate().map(answer).collect();
            }
        };
        let answer = sandbox.request(&request(works), stop).map_err(|ended| wrong(&self.kind, ended, &refuse))?;
        let done = answered(&answer, works.len()).ok_or_else(unreadable)?;
        done.map_err(|(item, cause)| refuse(item, cause))
    }

    /// Converts the `cause` of a text's error, which may name `tokenizer.json` already.
    fn refuse(&self, cause: String) -> Error {
        let TokenizerKind::Model { path, .. } = &self.kind else { return Error::Unsupported(cause) };
        let named = format!("{}: ", path.display());
        Error::format(path, cause.strip_prefix(&named).unwrap_or(&cause))
    }

    /// All settings that determine the ids of a text, without paths: two tokenizers with the same identity produce the same tokens.
    pub(crate) fn identity(&self) -> Value {
        let (end, begin) = (self.end_of_text(), self.begin_of_text());
        let tokenizer = match &self.kind {
            TokenizerKind::Absent => "none".into(),
            TokenizerKind::Bytes => end.map_or("bytes".into(), |end| serde_json::json!({"bytes": true, "end_of_text": end})),
            TokenizerKind::Model { sha256, .. } if self.facts.added.is_empty() => {
                serde_json::json!({"tokenizer.json": sha256, "end_of_text": end, "begin_of_text": begin})
            }
            TokenizerKind::Model { sha256, .. } => {
                serde_json::json!({"tokenizer.json": sha256, "end_of_text": end, "begin_of_text": begin, "added_tokens": self.facts.added})
            }
        };
        let media = (!self.media.is_empty()).then(|| serde_json::json!(self.media));
        with(with(tokenizer, "records", self.rules.identity()), "media_tokens", media)
    }
}

/// An identity with one more entry.
fn with(identity: Value, name: &str, entry: Option<Value>) -> Value {
    match (entry, identity) {
        (None, identity) => identity,
        (Some(entry), Value::Object(mut parts)) => {
            parts.insert(name.into(), entry);
            parts.into()
        }
        (Some(entry), identity) => serde_json::json!({"name": identity, name: entry}),
    }
}

impl fmt::Display for Tokenizer {
    /// For people: `bytes (256 ids)`, `m/tokenizer.json (32000 ids, end of text 2, each document begins with 1)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            TokenizerKind::Absent => return f.write_str("none: the data are token ids"),
            TokenizerKind::Bytes => f.write_str("bytes")?,
            TokenizerKind::Model { path, .. } => write!(f, "{}", path.display())?,
        }
        write!(f, " ({} ids", self.facts.vocab_size)?;
        self.end_of_text().iter().try_for_each(|id| write!(f, ", end of text {id}"))?;
        self.begin_of_text().iter().take(1).try_for_each(|_| f.write_str(", each document begins with"))?;
        self.begin_of_text().iter().try_for_each(|id| write!(f, " {id}"))?;
        f.write_str(")")
    }
}

/// The message of an error.
fn refusal(error: &Error) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    writer.number(0);
    writer.error(error);
    writer.into_bytes()
}

/// The error of a sandbox that gives no answer.
fn wrong(kind: &TokenizerKind, ended: Ended, refuse: impl Fn(usize, String) -> Error) -> Error {
    match (ended, kind) {
        (Ended::Stopped, _) => interrupted(),
        (Ended::Refused(error), _) => error,
        (Ended::Died { task: SandboxTask::Load, cause, .. }, TokenizerKind::Model { path, .. }) => Error::format(path, cause),
        (Ended::Died { item, task: SandboxTask::Encode, cause }, TokenizerKind::Model { path, .. }) => {
            refuse(item, format!("{}: {cause}", path.display()))
        }
        (Ended::Died { item, cause, .. }, _) => refuse(item, cause),
    }
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
        assert_eq!((bytes.facts.vocab_size, bytes.end_of_text()), (256, None));
        assert_eq!(bytes.encode("aé").unwrap(), [97, 0xc3, 0xa9]);
        assert_eq!(bytes.to_string(), "bytes (256 ids)");
        let message = load(&[("tokenizer.json", "{")]).err().unwrap().to_string();
        assert!(message.contains("tokenizer.json: "), "{message}");
        std::os::unix::fs::symlink("nowhere", dir.path().join("tokenizer.json")).unwrap();
        assert!(matches!(load_or_bytes(dir.path()), Err(Error::Io { .. })));
        assert!(Tokenizer::absent(Arc::default()).encode("a").is_err());
    }

    #[test]
    fn a_models_tokenizer_is_not_cut_and_counts_ids_beyond_holes() {
        let tokenizer = load(&[("tokenizer.json", WORDS)]).unwrap();
        assert_eq!(tokenizer.encode("a b c a").unwrap(), [0, 1, 2, 0]);
        assert_eq!((tokenizer.facts.vocab_size, tokenizer.end_of_text()), (8, Some(7)));
        assert!(tokenizer.to_string().ends_with("tokenizer.json (8 ids, end of text 7)"));
        let tokenizer = load(&[("tokenizer.json", &with_bos(WORDS))]).unwrap();
        assert_eq!((tokenizer.encode("a").unwrap(), tokenizer.begin_of_text()), (vec![0], &[1][..]));
        assert!(tokenizer.to_string().ends_with("tokenizer.json (8 ids, end of text 7, each document begins with 1)"));
    }

    #[test]
    fn the_identity_covers_tokenization_and_not_the_location() {
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
    fn flags_win_over_files_and_unknown_names_are_errors() {
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
    fn a_token_before_documents_comes_from_the_post_processor_or_a_flag() {
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

    /// Ids of a text by [`WORDS`] with `parts` in place of its own.
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

    #[test]
    fn files_that_take_memory_or_time_without_end_are_errors() {
        let replace = r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}"#;
        let grow =
            |count: usize| format!(r#"{{"normalizer": {{"type": "Sequence", "normalizers": [{}]}}}}"#, vec![replace; count].join(","));
        for count in [8, 12] {
            let refused = hostile(&grow(count)).unwrap_err().to_string();
            assert!(refused.contains("tokenizer.json: cannot encode: normalizer 6 would make 10000"), "{refused}");
        }
        assert_eq!(hostile(&grow(2)).unwrap(), [2, 1]);
        // No earlier limit catches this: one stage makes a gigabyte of text, which takes thirty in the library.
        let large = format!(
            r#"{{"normalizer": {{"type": "Replace", "pattern": {{"Regex": "a|b| "}}, "content": "{}"}}}}"#,
            "c".repeat(100_000_000)
        );
        let refused = hostile(&large).unwrap_err().to_string();
        assert!(refused.contains("tokenizer.json: tokenizing one text takes more than 4.0 GiB of memory"), "{refused}");
        let words = r###"{"model": {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 1000000000,
            "vocab": {"<unk>": 0, "a": 1, "##a": 2}}}"###;
        let refused = hostile(words).unwrap_err().to_string();
        assert!(refused.contains("tokenizer.json: model: max_input_chars_per_word 1000000000"), "{refused}");
        let nested = format!("{}null{}", r#"{"type": "Sequence", "normalizers": ["#.repeat(50_000), "]}".repeat(50_000));
        let refused = load(&[("tokenizer.json", &WORDS.replace(r#""normalizer": null"#, &format!(r#""normalizer": {nested}"#)))])
            .err()
            .unwrap()
            .to_string();
        assert!(refused.contains("tokenizer.json: recursion limit exceeded"), "{refused}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
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
