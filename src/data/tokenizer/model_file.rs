//! Reads a model's `tokenizer.json` and the files beside it.

use super::added::DeclaredTokens;
use super::facts::Facts;
use super::growth::{self, Growth};
use super::local::{LocalKind, TokenizerModel};
use super::special::{AddBos, Special};
use super::special_files::SpecialFiles;
use crate::data::loss_weight::VOCAB_MAX;
use crate::data::sandbox::{SandboxTask, guard};
use crate::error::{Error, Result};
use crate::model_dir::ModelDir;
use serde_json::Value;
use std::path::PathBuf;
use tokenizers::Model;

/// The parts of `tokenizer.json`.
struct ParsedFile {
    tokenizer: tokenizers::Tokenizer,
    growth: Option<Growth>,
    post_processor: Value,
}

/// The tokenizer in the file at `path` with content `bytes`, and its properties by the files in `dir`.
pub(in crate::data) fn read_model(
    dir: &ModelDir,
    path: PathBuf,
    bytes: &[u8],
    end_of_text: Option<&str>,
    add_bos: AddBos,
) -> Result<(LocalKind, Facts)> {
    let refuse = |cause: String| Error::format(&path, cause);
    let parsed = guard(SandboxTask::Load, || parse(bytes)).and_then(|parsed| parsed).map_err(refuse)?;
    let ParsedFile { mut tokenizer, growth, post_processor } = parsed;
    let files = SpecialFiles::read(dir)?;
    let added = DeclaredTokens::read(&files, &tokenizer)?;
    guard(SandboxTask::Load, || added.apply(&mut tokenizer)).and_then(|applied| applied).map_err(refuse)?;
    let special = Special::new(&files, &tokenizer, &added);
    let (end_of_text, begin_of_text) = (special.end_of_text(end_of_text)?, special.begin_of_text(add_bos, &post_processor)?);
    let end_token = end_of_text.and_then(|id| tokenizer.id_to_token(id));
    let vocab_size = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
    if vocab_size > VOCAB_MAX {
        return Err(refuse(format!("it has id {}: ids are below {VOCAB_MAX}", vocab_size - 1)));
    }
    let added_ids = added_ids(&tokenizer);
    let model = TokenizerModel::new(path, tokenizer, growth);
    let facts = Facts { vocab_size, end_of_text, end_token, begin_of_text, added: added.identity(), added_ids };
    Ok((LocalKind::Model(Box::new(model)), facts))
}

/// The ids of added tokens that are no words of the tokenizer's model, ascending.
fn added_ids(tokenizer: &tokenizers::Tokenizer) -> Vec<u32> {
    let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
    let mut ids: Vec<u32> =
        added.iter().filter(|(_, token)| tokenizer.get_model().token_to_id(&token.content).is_none()).map(|(id, _)| *id).collect();
    ids.sort_unstable();
    ids
}

/// The tokenizer with the file content `bytes` alone, in this process: for fuzzers.
///
/// # Errors
/// `Format` that describes the fault in the file.
pub(in crate::data) fn model_in_this_process(path: PathBuf, bytes: &[u8]) -> Result<LocalKind> {
    let parsed = guard(SandboxTask::Load, || parse(bytes)).and_then(|parsed| parsed);
    let ParsedFile { tokenizer, growth, .. } = parsed.map_err(|cause| Error::format(&path, cause))?;
    Ok(LocalKind::Model(Box::new(TokenizerModel::new(path, tokenizer, growth))))
}

/// The parts of `tokenizer.json` that turn text into ids, and its post-processor.
fn parse(bytes: &[u8]) -> std::result::Result<ParsedFile, String> {
    let mut parts: serde_json::Map<String, Value> = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    growth::check_file(&parts)?;
    let post_processor = parts.remove("post_processor").unwrap_or(Value::Null);
    // Limits made for inference would silently cut or fill documents; the decoder only reads ids back.
    for unused in ["truncation", "padding", "post_processor", "decoder"] {
        parts.insert(unused.to_string(), Value::Null);
    }
    let growth = Growth::new(parts.get("normalizer").unwrap_or(&Value::Null));
    let tokenizer = serde_json::from_value(parts.into()).map_err(|e| e.to_string())?;
    Ok(ParsedFile { tokenizer, growth: growth.map_err(|e| e.to_string())?, post_processor })
}
