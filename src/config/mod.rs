//! What the person asked for: flags and a TOML file ([`options`], [`mod@file`]), resolved and checked ([`settings`]).

pub mod file;
pub mod options;
pub mod plan;
pub mod settings;
