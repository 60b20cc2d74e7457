//! The ids of `--train-tokens`: a range, or the tokens that a tokenizer has beside its vocabulary.

use super::options::{TokenizerChoice, TrainTokens};
use super::settings::Settings;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::tokenizer::AddBos;
use crate::error::{Error, Result, printable};
use crate::model_dir::ModelDir;
use std::ops::Range;
use std::path::Path;

/// Ranges that an error lists at most.
const RANGES_LISTED: usize = 4;

impl Settings {
    /// The ids of `--train-tokens` in a model of `vocab` rows in the directory `dir`.
    ///
    /// # Errors
    /// `Usage` for `added` without a tokenizer, without added tokens that have rows, or with such tokens in several ranges of ids; errors of
    /// [`Tokenizer::load`].
    pub(super) fn trained_ids(&self, vocab: usize, dir: Option<&Path>) -> Result<Option<Range<usize>>> {
        match &self.train_tokens {
            None => Ok(None),
            Some(TrainTokens::Ids(ids)) => Ok(Some(ids.clone())),
            Some(TrainTokens::Added) => {
                let dir = dir.filter(|dir| self.tokenizer != TokenizerChoice::Bytes && dir.is_dir());
                let dir = dir.ok_or_else(|| refused("needs the tokenizer.json of a model's directory"))?;
                let tokenizer = Tokenizer::load(&ModelDir::open(dir)?, None, AddBos::Auto)?;
                let tokenizer = tokenizer.ok_or_else(|| refused(&format!("{} has no tokenizer.json", printable(dir.display()))))?;
                one_range(tokenizer.added_ids(), vocab).map(Some)
            }
        }
    }
}

/// The range of those of the ascending `added` ids that have rows in a table of `vocab`.
fn one_range(added: &[u32], vocab: usize) -> Result<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for id in added.iter().map(|&id| id as usize).filter(|id| *id < vocab) {
        match ranges.last_mut() {
            Some(last) if last.end == id => last.end += 1,
            _ => ranges.push(id..id + 1),
        }
    }
    match &ranges[..] {
        [one] => Ok(one.clone()),
        [] if added.is_empty() => Err(refused("the tokenizer has no tokens beside its vocabulary; name the ids, as START..END")),
        [] => {
            let cause = format!("the model's token embedding has {vocab} rows, and the first added token is {}", added[0]);
            Err(refused(&format!("{cause}; add rows to the embedding first")))
        }
        several => {
            let listed: Vec<String> = several.iter().take(RANGES_LISTED).map(|ids| format!("{}..{}", ids.start, ids.end)).collect();
            let more = if several.len() > RANGES_LISTED { ", ..." } else { "" };
            let cause = format!("the added tokens have several ranges of ids, {}{more}", listed.join(", "));
            Err(refused(&format!("{cause}; name one range, as START..END")))
        }
    }
}

fn refused(cause: &str) -> Error {
    Error::usage(format!("--train-tokens added: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn added_tokens_with_rows_are_one_range() {
        assert_eq!(one_range(&[7, 8, 9, 12], 10).unwrap(), 7..10, "ids without rows do not count");
        let refused = |added: &[u32]| one_range(added, 10).unwrap_err().to_string();
        assert!(refused(&[]).contains("no tokens beside its vocabulary"), "{}", refused(&[]));
        assert!(refused(&[10, 11]).contains("has 10 rows, and the first added token is 10"), "{}", refused(&[10, 11]));
        assert!(refused(&[2, 3, 7]).contains("several ranges of ids, 2..4, 7..8;"), "{}", refused(&[2, 3, 7]));
    }
}
