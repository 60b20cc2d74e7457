//! Data files: their names, formats and compression, and their content in blocks of checked text, lines and rows.

pub(super) mod compression;
pub(crate) mod demo;
pub(super) mod elements;
pub(crate) mod files;
#[cfg(feature = "parquet")]
pub(super) mod parquet_rows;
pub(super) mod pattern;
pub(super) mod position;
pub(super) mod saved_dataset;
pub(super) mod text;
