//! Text to token ids: a model's `tokenizer.json`, or bytes.

mod added;
mod byte_level;
mod decode;
mod facts;
mod growth;
mod local;
mod model_file;
mod special;
mod special_files;
mod token;

pub(crate) use decode::TokenDecoder;
pub(super) use facts::{Facts, TokenizerKind};
pub(super) use local::{LocalKind, LocalTokenizer};
pub(super) use model_file::{model_in_this_process, read_model};
pub use special::AddBos;
pub(super) use special_files::BYTES_MAX;
pub(super) use token::{Token, floor_boundary};
