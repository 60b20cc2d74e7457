//! Reading and writing Hugging Face model directories: `config.json`, tokenizer files, `*.safetensors`.
//!
//! Weights stream through a small buffer in both directions. Files are not memory-mapped, so a file that shrinks while it is read causes an
//! error and not a signal.

pub(crate) mod carried;
mod load;
pub(crate) mod safetensors;

pub use load::ModelWeights;

use crate::disk::{self, is_plain_file_name};
use crate::error::{Error, Result};
use crate::model::family::Family;
use crate::model::tensors::{HfPart, TensorSpec};
use crate::model_dir::{ADDITIONAL_TEMPLATES, CONFIG, ModelDir};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Configuration of the tokenizer beside its own file.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Files of a model directory besides weights, which checkpoints copy.
const COMPANIONS: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "preprocessor_config.json",
];

/// Further such files of multimodal models: processors, and descriptions for other programs.
const MEDIA_COMPANIONS: [&str; 5] =
    ["processor_config.json", "video_preprocessor_config.json", "tekken.json", "params.json", "configuration.json"];

/// Prefixes of further such files: `chat_template.jinja`, `LICENSE.txt`.
const COMPANION_PREFIXES: [&str; 2] = ["chat_template.", "LICENSE"];

/// Maximum size of such a file; tokenizers have some tens of megabytes.
pub(crate) const COMPANION_BYTES_MAX: u64 = 256 << 20;

/// Names and contents of `config.json` and its accompanying files in `dir`, of a model of `family`: tokenizer, code named by `auto_map`,
/// licences, and what goes with other input than text.
///
/// # Errors
/// When `config.json` is missing; when a file cannot be read, is not JSON although it must be, or is a link out of the directory.
pub(crate) fn model_files(dir: &Path, family: Family) -> Result<Vec<(String, Vec<u8>)>> {
    let dir = ModelDir::open(dir)?;
    let read = |name: &str| Ok(disk::read_if_present(&dir.file(name)?, COMPANION_BYTES_MAX)?.map(|bytes| (name.to_string(), bytes)));
    let config = disk::read_small(&dir.file(CONFIG)?, COMPANION_BYTES_MAX)?;
    let mut files = vec![(CONFIG.to_string(), config)];
    let of_media = if family.text_part().is_some() { &MEDIA_COMPANIONS[..] } else { &[] };
    for name in COMPANIONS.iter().chain(of_media) {
        files.extend(read(name)?);
    }
    let mut code = BTreeSet::new();
    for (name, bytes) in files.iter().filter(|(name, _)| [CONFIG, TOKENIZER_CONFIG].contains(&name.as_str())) {
        let json: Value = serde_json::from_slice(bytes).map_err(|e| Error::format(dir.path().join(name), e))?;
        named_code(&json["auto_map"], &mut code);
    }
    let is_companion = |name: &String| code.contains(name) || COMPANION_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    for name in dir.names()?.iter().filter(|name| is_companion(name)) {
        files.extend(read(name)?);
    }
    files.extend(additional_templates(&dir)?);
    Ok(files)
}

/// Whether `name` may be the name of a file that goes with a model: a plain name, or the path of an additional chat template.
pub(crate) fn is_model_file_name(name: &str) -> bool {
    let template = name.strip_prefix(ADDITIONAL_TEMPLATES).and_then(|rest| rest.strip_prefix('/'));
    is_plain_file_name(template.unwrap_or(name))
}

/// The chat templates that `transformers` keeps beside the default one, by the names of their files in `dir`.
fn additional_templates(dir: &ModelDir) -> Result<Vec<(String, Vec<u8>)>> {
    let folder = dir.file(ADDITIONAL_TEMPLATES)?;
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let inner = ModelDir::open(&folder)?;
    let names = inner.names()?.into_iter().filter(|name| name.ends_with(".jinja"));
    let read = |name: String| {
        let path = format!("{ADDITIONAL_TEMPLATES}/{name}");
        Ok(disk::read_if_present(&dir.file(&path)?, COMPANION_BYTES_MAX)?.map(|bytes| (path, bytes)))
    };
    names.filter_map(|name| read(name).transpose()).collect()
}

/// Adds the files of Python code named by an `auto_map` as `module.Class`. Names of another repository, `owner/name--module.Class`, match
/// no file in the directory.
fn named_code(auto_map: &Value, names: &mut BTreeSet<String>) {
    match auto_map {
        Value::Object(map) => map.values().for_each(|value| named_code(value, names)),
        Value::Array(list) => list.iter().for_each(|value| named_code(value, names)),
        Value::String(class) => names.extend(class.split_once('.').map(|(module, _)| format!("{module}.py"))),
        _ => {}
    }
}

/// Index in the table's tensor of element `i` of the file's tensor `part`.
pub(crate) fn position(spec: &TensorSpec, part: &HfPart, i: usize) -> usize {
    let (cols, (_, rows)) = (spec.row_elems(), part.matrices());
    let (matrix, i) = (i / (rows * cols) * rows, i % (rows * cols));
    match part.transposed {
        false => (part.row_start + matrix + part.table_row(i / cols)) * cols + i % cols,
        true => (part.row_start + matrix + i % rows) * cols + i / rows,
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod text_part_tests;
