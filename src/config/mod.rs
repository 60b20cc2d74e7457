//! What the person asked for: flags and a TOML file ([`mod@file`], other spellings in [`aliases`]), resolved and checked ([`resolve`]).
//! The table of all settings is in [`settings`], the types of their values in [`options`].

pub mod aliases;
mod checks;
pub mod describe;
pub mod file;
pub mod options;
pub mod resolve;
pub mod settings;
