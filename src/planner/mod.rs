//! What fits where: the memory of a run by class and place ([`budget`]) on a [`machine`], the choice of what stays on the
//! device and what is computed twice ([`choice`]) by a predicted step time ([`predict`]), and, when nothing fits, the
//! smallest change that would ([`refusal`]).

pub(crate) mod budget;
pub(crate) mod choice;
pub(crate) mod crossing;
pub(crate) mod display;
mod early;
mod experts;
pub(crate) mod machine;
mod passes;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod refusal;
pub(crate) mod rules;

#[cfg(test)]
mod tests;
