//! Plans of a run. [`resolve`] turns settings into a plan: its memory by class and location ([`budget`]) on a [`machine`], the choice of
//! resident buckets and recomputation ([`choice`]) by predicted step time ([`predict`]), and, if nothing fits, the smallest change that helps
//! ([`refusal`]).

pub(crate) mod budget;
mod checks;
pub(crate) mod choice;
pub(crate) mod display;
mod early;
mod experts;
pub(crate) mod forecast;
pub(crate) mod machine;
pub(crate) mod order;
mod passes;
pub(crate) mod peer_traffic;
pub(crate) mod placement;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod protocol;
pub(crate) mod refusal;
pub(crate) mod resolve;
pub(crate) mod rules;
mod save_copies;
pub(crate) mod site;
pub(crate) mod techniques;

#[cfg(test)]
mod attention_tests;
#[cfg(test)]
mod loss_tile_tests;
#[cfg(test)]
mod small_card_tests;
#[cfg(test)]
mod split_master_tests;
#[cfg(test)]
mod tests;
