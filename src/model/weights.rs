//! Hugging Face model directories in and out: `config.json`, the tokenizer's files, `*.safetensors`.
//!
//! Weights stream through a small buffer in both directions; nothing is mapped into memory, so that a file that
//! shrinks while it is read is an error and not a signal.

mod export;
mod load;
mod safetensors;

pub use export::{Exported, MAX_SHARD_BYTES, Options, export, export_checkpoint};
pub use load::load;

use crate::disk;
use crate::error::Result;
use crate::model::tensors::{HfPart, TensorSpec};
use std::path::Path;

/// Weights in one file.
const SINGLE: &str = "model.safetensors";
/// Which tensor is in which shard.
const INDEX: &str = "model.safetensors.index.json";
/// What describes the model.
const CONFIG: &str = "config.json";

/// What a model directory may hold besides weights, and what a checkpoint keeps of it.
const COMPANIONS: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// No such file is larger; tokenizers have some tens of megabytes.
const COMPANION_BYTES_MAX: u64 = 256 << 20;

/// Name and content of `config.json` and of the files that go with it, as far as `dir` has them.
///
/// # Errors
/// `config.json` is missing, or a file cannot be read.
pub fn model_files(dir: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let present = COMPANIONS.into_iter().filter(|name| dir.join(name).exists());
    let read = |name: &str| Ok((name.to_string(), disk::read_small(&dir.join(name), COMPANION_BYTES_MAX)?));
    std::iter::once(CONFIG).chain(present).map(read).collect()
}

/// Where element `i` of the file's tensor `part` lies in ours.
fn position(spec: &TensorSpec, part: &HfPart, i: usize) -> usize {
    let cols = spec.row_elems();
    match part.transposed {
        false => part.row_start * cols + i,
        true => (part.row_start + i % part.rows) * cols + i / part.rows,
    }
}

#[cfg(test)]
mod tests;
