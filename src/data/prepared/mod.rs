//! Tokens on disk: token files, and the folder of prepared text with its cache.

pub(crate) mod cache;
pub(crate) mod checked_files;
pub(crate) mod folder;
pub(super) mod parallel_scan;
pub(crate) mod token_file;
