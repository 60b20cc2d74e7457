//! Ids back to text. The decoder of a model is foreign content, and runs in a sandbox of its own, which outlives that of the tokenizer.

use super::facts::TokenizerKind;
use super::special_files::BYTES_MAX;
use crate::data::checksum;
use crate::data::sandbox::codec::{MessageReader, MessageWriter};
use crate::data::sandbox::{Ended, Sandbox, SandboxTask, Service, guard, unreadable};
use crate::data::stopped::interrupted;
use crate::disk;
use crate::error::{Error, Result};
use crate::signals::StopFlag;
use serde_json::Value;
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Turns ids into the text that they stand for: those of a model, or bytes.
pub(crate) struct TokenDecoder(Option<ModelDecoder>);

/// The decoder of the file at `path`.
struct ModelDecoder {
    path: PathBuf,
    sandbox: Sandbox,
}

/// The library's tokenizer, in the process that decodes.
struct DecodeService(tokenizers::Tokenizer);

impl TokenDecoder {
    /// The decoder of a tokenizer of this `kind`; the tokenizer only encodes and does not keep it.
    ///
    /// # Errors
    /// `Unsupported` where there is no tokenizer; `Io` and `Format` when its file cannot be read again, or has changed.
    pub(in crate::data) fn of(kind: &TokenizerKind) -> Result<Self> {
        match kind {
            TokenizerKind::Absent => Err(Error::Unsupported("text of a run on token ids: it has no tokenizer".into())),
            TokenizerKind::Bytes => Ok(Self(None)),
            TokenizerKind::Model { path, sha256 } => {
                let bytes = disk::read_small(path, BYTES_MAX)?;
                if checksum::sha256(&bytes) != *sha256 {
                    return Err(Error::format(path, "the file changed since the tokenizer was read; start again"));
                }
                ModelDecoder::start(path, &bytes).map(|decoder| Self(Some(decoder)))
            }
        }
    }

    /// The text of `ids`, without special tokens.
    ///
    /// # Errors
    /// `Format` where the tokenizer cannot express them; `Interrupted`.
    pub(crate) fn text(&self, ids: &[u32], stop: &StopFlag) -> Result<String> {
        if let Self(Some(model)) = self {
            return model.text(ids, stop);
        }
        let bytes: Vec<u8> = ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl ModelDecoder {
    fn start(path: &Path, bytes: &[u8]) -> Result<Self> {
        let make = || match guard(SandboxTask::Load, || read(bytes)).and_then(|read| read) {
            Ok(tokenizer) => (message(Ok("")), Some(DecodeService(tokenizer))),
            Err(cause) => (message(Err(&cause)), None),
        };
        let (sandbox, answer) = Sandbox::start(make).map_err(|ended| wrong(path, ended))?;
        text_of(path, &answer)?;
        Ok(Self { path: path.into(), sandbox })
    }

    fn text(&self, ids: &[u32], stop: &StopFlag) -> Result<String> {
        let mut request = MessageWriter::default();
        request.ids(ids);
        let answer = self.sandbox.request(&request.into_bytes(), stop).map_err(|ended| wrong(&self.path, ended))?;
        text_of(&self.path, &answer)
    }
}

impl Service for DecodeService {
    fn answer(&mut self, request: &[u8]) -> Vec<u8> {
        let ids = MessageReader::of(request).ids().unwrap_or_default();
        let decoded = guard(SandboxTask::Decode, || self.0.decode(&ids, true).map_err(|e| e.to_string()));
        match decoded.and_then(|decoded| decoded) {
            Ok(text) => message(Ok(&text)),
            Err(cause) => message(Err(&format!("cannot decode: {cause}"))),
        }
    }
}

/// The parts of `tokenizer.json` that turn ids into text.
fn read(bytes: &[u8]) -> std::result::Result<tokenizers::Tokenizer, String> {
    let wrong = |cause: serde_json::Error| cause.to_string();
    let mut parts: serde_json::Map<String, Value> = serde_json::from_slice(bytes).map_err(wrong)?;
    for unused in ["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"] {
        parts.insert(unused.into(), Value::Null);
    }
    serde_json::from_value(parts.into()).map_err(wrong)
}

/// A text, or the cause for which there is none.
fn message(text: std::result::Result<&str, &str>) -> Vec<u8> {
    let mut writer = MessageWriter::default();
    writer.number(text.is_ok().into());
    writer.text(text.unwrap_or_else(|cause| cause));
    writer.into_bytes()
}

fn text_of(path: &Path, message: &[u8]) -> Result<String> {
    let mut parts = MessageReader::of(message);
    match (parts.number(), parts.text()) {
        (Some(1), Some(text)) => Ok(text.into()),
        (Some(0), Some(cause)) => Err(refused(path, cause)),
        _ => Err(unreadable()),
    }
}

fn wrong(path: &Path, ended: Ended) -> Error {
    match ended {
        Ended::Stopped => interrupted(),
        Ended::Refused(error) => error,
        Ended::Died { cause, .. } => refused(path, cause),
    }
}

fn refused(path: &Path, cause: impl Display) -> Error {
    Error::format(path, cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::tokenizer_handle::Tokenizer;
    use crate::data::encode::tokenizer_handle::tests::{WORDS, load_or_bytes, model_dir};
    use serde_json::json;
    use std::fs;

    fn text(tokenizer: &Tokenizer, ids: &[u32]) -> Result<String> {
        tokenizer.decoder()?.text(ids, &StopFlag::default())
    }

    /// The words with this decoder.
    fn words(decoder: &Value) -> (tempfile::TempDir, Tokenizer) {
        let mut file: Value = serde_json::from_str(WORDS).unwrap();
        file["decoder"] = decoder.clone();
        let dir = model_dir(&[("tokenizer.json", &file.to_string())]);
        let tokenizer = load_or_bytes(dir.path()).unwrap();
        (dir, tokenizer)
    }

    #[test]
    fn ids_are_the_text_that_they_were() {
        let (dir, words) = words(&Value::Null);
        let ids = words.encode("a b a").unwrap();
        assert_eq!(text(&words, &ids).unwrap(), "a b a");
        assert_eq!(text(&words.closed(), &ids).unwrap(), "a b a", "a closed tokenizer encodes no more");
        assert_eq!(text(&Tokenizer::bytes(), &[0x68, 0xc3, 0xa9, 300, 0xff]).unwrap(), "h\u{e9}\u{fffd}");
        assert!(text(&Tokenizer::absent(std::sync::Arc::default()), &[1]).is_err());
        drop(dir);
    }

    #[test]
    fn hostile_decoders_are_errors_that_name_the_file() {
        let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(1000)});
        let (_dir, grows) = words(&json!({"type": "Sequence", "decoders": vec![replace; 5]}));
        let refused = text(&grows, &[0]).unwrap_err().to_string();
        assert!(refused.contains("tokenizer.json: ") && refused.contains("does its decoder make the text longer and longer?"), "{refused}");
        let (_dir, unknown) = words(&json!({"type": "Unheard", "of": 1}));
        let refused = text(&unknown, &[0]).unwrap_err().to_string();
        assert!(refused.contains("tokenizer.json: "), "{refused}");
        let (dir, changed) = words(&Value::Null);
        fs::write(dir.path().join("tokenizer.json"), WORDS.replace("\"b\": 1", "\"c\": 1")).unwrap();
        assert!(text(&changed, &[0]).unwrap_err().to_string().contains("the file changed since"));
    }
}
