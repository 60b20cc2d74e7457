//! What the person asked for: flags and a TOML file ([`options`], [`mod@file`], other spellings in [`aliases`]), resolved and checked ([`settings`]).

pub mod aliases;
mod checks;
pub mod describe;
pub mod file;
pub mod options;
pub mod settings;
