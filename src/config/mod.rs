//! Configuration of a run: flags and a file in TOML, YAML or JSON ([`mod@file`]; other spellings in
//! [`aliases`], DeepSpeed's in [`deepspeed`], whole files of other trainers in [`foreign`]), resolved and checked ([`resolve`]), of which
//! [`request`] makes the request for a plan.
//! The table of all settings is in [`settings`], the types of their values in [`options`], the launchers' variables in `launchers`.

pub(crate) mod aliases;
pub(crate) mod checks;
mod deepspeed;
mod deepspeed_keys;
mod document;
pub(crate) mod file;
pub(crate) mod foreign;
pub(crate) mod launchers;
mod objective;
pub(crate) mod options;
mod program;
mod request;
pub(crate) mod resolve;
pub(crate) mod settings;
mod train_tokens;
