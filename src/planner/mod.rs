//! What fits where: the memory of a run by class and place ([`budget`]) on a [`machine`], the choice of what stays on the
//! device and what is computed twice ([`choice`]) by a predicted step time ([`predict`]), and, when nothing fits, the
//! smallest change that would ([`refusal`]).

pub mod answer;
pub mod budget;
pub mod choice;
pub mod limits;
pub mod machine;
mod passes;
pub mod predict;
pub mod rates;
pub mod refusal;
pub mod search;

// Of the whole program: what is measured had every technique.
#[cfg(all(
    test,
    feature = "stv",
    feature = "deadline-order",
    feature = "repartition",
    feature = "superchip-cast",
    feature = "weight-flow"
))]
mod search_tests;
#[cfg(test)]
mod tests;
