//! What the person asked for: flags and a TOML file ([`mod@file`], other spellings in [`aliases`]), resolved and checked ([`resolve`]).
//! The table of all settings is in [`settings`], the types of their values in [`options`].

pub(crate) mod aliases;
pub(crate) mod checks;
mod deepspeed;
mod deepspeed_keys;
pub(crate) mod describe;
mod document;
pub(crate) mod file;
pub(crate) mod options;
pub(crate) mod resolve;
pub(crate) mod settings;
