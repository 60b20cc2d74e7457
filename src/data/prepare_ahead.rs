//! Text that is tokenized ahead of training, into the folder that training then finds.

use super::context::Preparation;
use super::dataset::check_vocabulary;
use super::encode::text_files::bytes_of;
use super::encode::tokenizer_handle::Tokenizer;
use super::prepared::cache;
use super::prepared::checked_files::CheckedFiles;
use super::prepared::folder::Prepared;
use super::read::files;
use crate::error::Result;
use crate::units::{Bytes, counted};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Result of preparing the text that some paths name.
pub(crate) enum PreparedText {
    /// There are token files alone.
    NoText,
    /// The tokens of so few bytes are kept by each run.
    Small(u64),
    /// It lies in a folder: for `seconds` it was made, or it was there.
    Kept { folder: PathBuf, seconds: Option<f64>, tokens: u64, untrained: u64, documents: u64, skipped: u64 },
}

impl PreparedText {
    /// Prepares the text that training on `paths` would prepare.
    ///
    /// # Errors
    /// The errors that training has when it opens this data.
    pub(crate) fn new(paths: &[PathBuf], tokenizer: &Tokenizer, vocab_size: usize, preparation: &mut Preparation<'_>) -> Result<Self> {
        check_vocabulary(vocab_size, tokenizer)?;
        let found = files::find_files(paths)?;
        let texts: Vec<&Path> = found.iter().map(PathBuf::as_path).filter(|path| files::is_text(path)).collect();
        let bytes = bytes_of(&texts, &preparation.known);
        if texts.is_empty() {
            return Ok(Self::NoText);
        }
        if bytes <= preparation.in_memory_bytes_max {
            return Ok(Self::Small(bytes));
        }
        let begin = Instant::now();
        let prepared = cache::find_or_prepare(&texts, tokenizer, vocab_size, &mut CheckedFiles::default(), preparation)?;
        let seconds = prepared.is_fresh.then(|| begin.elapsed().as_secs_f64());
        let tokens = prepared.tokens.bytes() / size_of::<u32>() as u64;
        let Prepared { kept, untrained, documents, skipped, .. } = prepared;
        Ok(Self::Kept { folder: kept.folder, seconds, tokens, untrained, documents, skipped })
    }
}

impl fmt::Display for PreparedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Kept { folder, seconds, tokens, untrained, documents, skipped } = self else { return self.write_nothing_kept(f) };
        let word = if seconds.is_some() { "prepared" } else { "found" };
        let percent = 100.0 * (tokens - untrained) as f64 / (*tokens).max(1) as f64;
        write!(f, "{word}  {} of {}, {percent:.1} % trained", counted(*tokens, "token"), counted(*documents, "document"))?;
        if *skipped > 0 {
            write!(f, "; {} without a trained token left out", counted(*skipped, "record"))?;
        }
        if let Some(seconds) = seconds {
            write!(f, "\nspeed     {:.2} M tokens/s ({seconds:.1} s)", *tokens as f64 / seconds / 1e6)?;
        }
        write!(f, "\nfolder    {}", folder.display())
    }
}

impl PreparedText {
    fn write_nothing_kept(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Small(bytes) => write!(f, "nothing to prepare: each run tokenizes up to {} of text itself", Bytes(*bytes)),
            _ => f.write_str("nothing to prepare: token files are read where they are"),
        }
    }
}
