//! Documents and records to token ids: work for a tokenizer in a sandbox, the samples of a record, and their order on many threads.

pub(super) mod boundary_tokens;
pub(super) mod diagnostic_lines;
pub(super) mod diagnostics;
pub(super) mod documents;
pub(super) mod encoder;
mod local_encoder;
pub(crate) mod marked_text;
pub(crate) mod media_token;
pub(super) mod pieces;
pub(super) mod pipeline;
pub(crate) mod prompt;
pub(super) mod samples;
pub(crate) mod text_files;
pub(super) mod text_work;
pub(super) mod token_spans;
pub(crate) mod tokenizer_handle;
