//! Host memory of data during steps.

use super::context::IN_MEMORY_BYTES_MAX;
use super::encode::text_files::bytes_of;
use super::read::demo::DEMO_TEXT;
use super::read::files::{SourceKind, kind};
use super::rows::hold_out::EvalSplit;
use super::rows::row_rules::RowRules;
use super::run_sources::KnownSources;
use std::path::PathBuf;

/// Host memory that the data which `paths` name takes while steps run, at most: small text, which documents are in which row, the order of
/// the rows, and, where documents are held out, the pieces of the stream. No file is read. A file that cannot be found and is not `known`
/// counts as empty; opening it later is an error.
pub(crate) fn host_bytes(paths: &[PathBuf], known: &KnownSources, rules: RowRules, shuffle: bool, split: Option<EvalSplit>) -> u64 {
    let files = known.find_files(paths).unwrap_or_default();
    let (tokens, texts): (Vec<_>, Vec<_>) = files.iter().map(PathBuf::as_path).partition(|path| kind(path) == Some(SourceKind::Tokens));
    let text = if paths.is_empty() { DEMO_TEXT.len() as u64 } else { bytes_of(&texts, known) };
    let in_memory = if text <= IN_MEMORY_BYTES_MAX { size_of::<u32>() as u64 * text } else { 0 };
    let order = if shuffle { size_of::<u32>() as u64 * rules.rows_max(text, bytes_of(&tokens, known) / 2) } else { 0 };
    in_memory + rules.table_bytes(text) + order + split.map_or(0, |_| EvalSplit::bytes_max(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::tokenizer_handle::tests::model_dir;

    #[test]
    fn disk_use_of_data_follows_from_its_sizes() {
        let dir = model_dir(&[("a.txt", "12345678"), ("b.bin", "12345678")]);
        let of = |name: &str, shuffle| host_bytes(&[dir.path().join(name)], &KnownSources::default(), RowRules::wrapped(2), shuffle, None);
        assert_eq!((of("a.txt", false), of("a.txt", true), of("b.bin", false), of("b.bin", true)), (32, 32 + 16, 0, 8));
        assert_eq!((of("missing.txt", true), of("", true)), (0, 32 + 16 + 8));
        let large = std::fs::File::create(dir.path().join("large.txt")).unwrap();
        large.set_len(1 << 30).unwrap();
        assert_eq!((of("large.txt", false), of("large.txt", true)), (0, 2 << 30));
        assert!(host_bytes(&[], &KnownSources::default(), RowRules::wrapped(256), true, None) > 4 * DEMO_TEXT.len() as u64);
    }
}
