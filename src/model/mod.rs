//! One decoder for every supported family: a Hugging Face `config.json` becomes a [`shape::ModelShape`], the shape a table of
//! tensors, and the same forward and backward pass runs them all.

pub mod family;
pub mod init;
pub mod shape;
pub mod tensors;
pub mod weights;
