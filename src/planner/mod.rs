//! Plans of a run: its memory by class and location ([`budget`]) on a [`machine`], the choice of resident buckets and recomputation
//! ([`choice`]) by predicted step time ([`predict`]), and, if nothing fits, the smallest change that helps ([`refusal`]).

pub(crate) mod budget;
pub(crate) mod choice;
pub(crate) mod display;
mod early;
mod experts;
pub(crate) mod machine;
mod passes;
pub(crate) mod peer_traffic;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod refusal;
pub(crate) mod rules;

#[cfg(test)]
mod tests;
