//! Training checkpoints: `OUTPUT_DIR/checkpoint-<step>/`.
//!
//! ```text
//! checkpoint-120/
//!   trainer_state.json   the manifest: step, scheduler, data position, tensor list, checksums; sealed by a checksum of its own
//!   state.bin            fp32 parameters, m and v (in fp32 or bf16), tensor after tensor in the model's order, little endian
//!   state-<rank>.bin     instead of it where several processes save: each one's slices of every bucket
//!   model/               config.json, the tokenizer's files: everything that an export needs besides the weights
//! ```
//!
//! A checkpoint is written beside (`.checkpoint-120.tmp-<pid>`), synced and renamed, so that `checkpoint-120` is whole
//! or absent. Every byte of it is under a CRC32C, which is compared when the byte is read; [`verify`] reads all bytes.

pub(crate) mod background;
pub(crate) mod best;
pub(crate) mod carried;
pub(crate) mod digest;
mod disk_rate;
pub(crate) mod engine_state;
pub(crate) mod export;
mod export_config;
mod export_dir;
mod export_tensors;
mod find;
mod format;
pub(crate) mod frozen;
mod owned;
mod part_files;
mod part_save;
pub(crate) mod parts;
mod placed_state;
mod portions;
mod read_ahead;
mod reader;
mod save_rate;
pub(crate) mod sliced_save;
mod sound;
mod state_file;
mod state_parts;
mod state_writer;
mod store;
mod validate;
mod writer;
mod writers;
mod written;

pub(crate) use disk_rate::disk_rate;
pub(crate) use find::find;
pub(crate) use format::{SavedLossScale, Scheduler, TrainerState};
pub(crate) use owned::{BEING_REMOVED, BEING_REPLACED, BEING_WRITTEN, CHECKPOINT};
pub(crate) use reader::{Check, Loaded};
pub use reader::{open, verify};
pub(crate) use save_rate::SaveRate;
pub(crate) use store::clean;
use store::is_called_checkpoint;
use store::newest_by;
pub(crate) use store::{RetainedCheckpoints, is_checkpoint, is_state_damage, newest_good};
pub(crate) use validate::STEPS_MAX;
pub(crate) use writer::{Saved, Writer, checkpoint_bytes};
pub(crate) use writers::{PIECE_BYTES, PIECES, WRITERS};

#[cfg(test)]
mod check_tests;
#[cfg(test)]
mod store_tests;
#[cfg(test)]
pub(crate) mod tests;
