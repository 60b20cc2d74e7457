//! What fits where: the memory of a run by class and place ([`budget`]) on a [`machine`], the choice of what stays on the
//! device and what is computed twice ([`choice`]) by a predicted step time ([`predict`]), and, when nothing fits, the
//! smallest change that would ([`refusal`]).

pub mod budget;
pub mod choice;
pub mod machine;
mod passes;
pub mod plan;
pub mod predict;
pub mod refusal;
pub mod rules;

#[cfg(test)]
mod tests;
