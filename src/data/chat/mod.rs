//! Records of chat data: which columns hold what ([`record`], [`message`]), the text that a model sees of them ([`template`]) and which of it is
//! trained ([`mask`]).

mod date;
pub(crate) mod find;
mod limit;
pub(crate) mod mask;
mod message;
mod python;
pub(crate) mod record;
mod stack;
mod template;
#[cfg(test)]
mod tests;
