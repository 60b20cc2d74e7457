//! Records that are held out of training, to be evaluated on: conversations, documents of text.
//!
//! The tokens of a record decide: records are held out in the order of their tokens' digests under the seed, smallest first. So copies of
//! a record stay together, and so do all samples of a record. A record that shares a document with a held-out record is held out, too
//! ([`super::duplicate_text`]): no text is both learned and evaluated on.

use super::bounds::Bounds;
use super::duplicate_text::DuplicateText;
use super::token_stream::TokenStream;
use crate::data::context::Preparation;
use crate::data::loss_weight::{UNTRAINED, id_of};
use crate::error::{Error, Result};
use crate::units::counted;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Records that are held out at most, copies aside: each may cut the stream in two, and the pieces are in memory.
const HELD_OUT_MAX: u64 = 1 << 16;
/// Host memory of the pieces that one record leaves behind, in a vector that has grown.
const BYTES_OF_EACH: u64 = 128;
/// No text of one document is shorter.
const DOCUMENT_BYTES_MIN: u64 = 10;

/// How much of the training data is held out.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(untagged)]
pub enum EvalSplit {
    /// So many records.
    Documents(u64),
    /// A share of them.
    Fraction(f64),
}

impl fmt::Display for EvalSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Documents(documents) => write!(f, "{documents}"),
            Self::Fraction(fraction) => write!(f, "{fraction}"),
        }
    }
}

impl FromStr for EvalSplit {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match (text.parse(), text.parse()) {
            (Ok(documents), _) if documents > 0 => Ok(Self::Documents(documents)),
            (Err(_), Ok(fraction)) if fraction > 0.0 && fraction < 1.0 => Ok(Self::Fraction(fraction)),
            _ => Err("expected a number of documents, or a fraction above 0 and below 1".into()),
        }
    }
}

impl EvalSplit {
    /// Host memory that the pieces of `text` bytes of text take at most while steps run.
    pub(in crate::data) fn bytes_max(text: u64) -> u64 {
        (text / DOCUMENT_BYTES_MIN).min(HELD_OUT_MAX) * BYTES_OF_EACH
    }

    /// How many of `records` are held out; there are `documents` of them.
    fn of(self, records: u64, documents: u64) -> Result<u64> {
        let wanted = match self {
            Self::Documents(wanted) => wanted,
            Self::Fraction(fraction) => ((fraction * records as f64).round() as u64).max(1),
        };
        let unit = unit(records, documents);
        let refused = |cause: String| Err(Error::usage(format!("--eval-split {self}: {cause}; use --eval-data with evaluation files")));
        match wanted {
            _ if wanted >= records => refused(format!("none would be left to train on: the data has {}", counted(records, unit))),
            _ if wanted > HELD_OUT_MAX => refused(format!("{wanted} {unit}s, and at most {HELD_OUT_MAX} can be held out")),
            _ => Ok(wanted),
        }
    }
}

/// The name of that of which there are so many.
fn unit(records: u64, documents: u64) -> &'static str {
    if records == documents { "document" } else { "record" }
}

/// The records that are held out.
#[derive(Debug)]
pub(in crate::data) struct HeldOut {
    /// Numbers of the documents of each, ascending.
    records: Vec<Range<u64>>,
    pub(in crate::data) tokens: u64,
    pub(in crate::data) untrained: u64,
}

impl HeldOut {
    /// Chooses by `split` among the records of `stream`, which begin and end at `bounds`; `untrained` of its tokens are not trained.
    ///
    /// # Errors
    /// `Usage` for more than there can be; when the tokens cannot be read; `Interrupted`.
    pub(in crate::data) fn choose(
        (stream, bounds): (&TokenStream, &Bounds),
        untrained: u64,
        (split, seed): (EvalSplit, u64),
        preparation: &mut Preparation<'_>,
    ) -> Result<Self> {
        let mut all = 0;
        bounds.for_each_record(preparation, |_| {
            all += 1;
            Ok(())
        })?;
        let (mut smallest, documents) = (SmallestDigests::new(split.of(all, bounds.documents())?), bounds.documents());
        bounds.for_each_record(preparation, |record| {
            smallest.add(digest(stream, seed, record.tokens())?, record.numbers());
            Ok(())
        })?;
        let mut chosen = smallest.records();
        // Records of one document each that are trained whole are equal in all or in nothing.
        if all != documents || untrained > 0 {
            chosen = DuplicateText { stream, bounds, preparation }.with_equal(chosen)?;
        }
        let mut held_out = Self { records: chosen, tokens: 0, untrained: 0 };
        let (records, unit) = (held_out.records.len(), unit(all, documents));
        if records as u64 == all {
            let are = if all == documents { "are equal" } else { "have text in common" };
            return Err(Error::usage(format!("--eval-split {split}: all {unit}s {are}; use --eval-data with evaluation files")));
        }
        held_out.count(stream, bounds, preparation)?;
        let of_them = if all == documents { String::new() } else { format!(" ({} of {documents} documents)", held_out.documents()) };
        preparation.detail(format!("held out {records} of {}{of_them}, {}", counted(all, unit), counted(held_out.tokens, "token")));
        Ok(held_out)
    }

    pub(in crate::data) fn documents(&self) -> u64 {
        self.records.iter().map(|documents| documents.end - documents.start).sum()
    }

    fn has(&self, document: u64) -> bool {
        let next = self.records.partition_point(|documents| documents.end <= document);
        self.records.get(next).is_some_and(|documents| documents.start <= document)
    }

    fn count(&mut self, stream: &TokenStream, bounds: &Bounds, preparation: &Preparation<'_>) -> Result<()> {
        let (mut tokens, mut untrained) = (0, 0);
        Side::HeldOut(self).for_each(bounds, preparation, |_, document| {
            tokens += document.end - document.start;
            stream.for_each_block(document, |block| untrained += block.iter().filter(|token| **token < 0).count() as u64)
        })?;
        (self.tokens, self.untrained) = (tokens, untrained);
        Ok(())
    }
}

/// Which documents a dataset has.
#[derive(Clone, Copy)]
pub(in crate::data) enum Side<'a> {
    All,
    /// All documents but the held-out ones.
    Kept(&'a HeldOut),
    HeldOut(&'a HeldOut),
}

impl Side<'_> {
    pub(in crate::data) fn has(self, document: u64) -> bool {
        match self {
            Self::All => true,
            Self::Kept(held_out) => !held_out.has(document),
            Self::HeldOut(held_out) => held_out.has(document),
        }
    }

    /// The documents of this side one after another, as they stand in `stream`: each with the separator before it, but the first.
    ///
    /// # Errors
    /// Errors of [`Bounds::for_each`].
    pub(in crate::data) fn stream(self, stream: &TokenStream, bounds: &Bounds, preparation: &Preparation<'_>) -> Result<TokenStream> {
        let mut side = TokenStream::default();
        self.for_each(bounds, preparation, |before, document| {
            let start = if side.tokens() == 0 { document.start } else { before };
            side.push_part(stream, start as usize..document.end as usize);
            Ok(())
        })?;
        Ok(side)
    }

    /// Gives `each` the documents of this side, and where the one before in the data ended.
    fn for_each(self, bounds: &Bounds, preparation: &Preparation<'_>, mut each: impl FnMut(u64, Range<u64>) -> Result<()>) -> Result<()> {
        let (mut number, mut before) = (0, 0);
        bounds.for_each(preparation, |document| {
            let (is_in, end) = (self.has(number), document.tokens.end);
            number += 1;
            if is_in {
                each(before, document.tokens)?;
            }
            before = end;
            Ok(())
        })
    }
}

/// The records of the smallest digests. Those of equal digests come together or not at all, so that there may be more than `wanted`.
struct SmallestDigests {
    wanted: u64,
    count: u64,
    /// Numbers of their documents.
    by_digest: BTreeMap<u64, Vec<Range<u64>>>,
}

impl SmallestDigests {
    fn new(wanted: u64) -> Self {
        Self { wanted, count: 0, by_digest: BTreeMap::new() }
    }

    fn add(&mut self, digest: u64, documents: Range<u64>) {
        if self.count >= self.wanted && self.by_digest.last_key_value().is_some_and(|(largest, _)| digest > *largest) {
            return;
        }
        self.by_digest.entry(digest).or_default().push(documents);
        self.count += 1;
        while let Some(largest) = self.by_digest.last_entry().filter(|largest| self.count - largest.get().len() as u64 >= self.wanted) {
            self.count -= largest.remove().len() as u64;
        }
    }

    /// Ascending.
    fn records(self) -> Vec<Range<u64>> {
        let mut records: Vec<Range<u64>> = self.by_digest.into_values().flatten().collect();
        records.sort_unstable_by_key(|documents| documents.start);
        records
    }
}

/// Digest of the ids of a record, and of which tokens are trained; weights do not count.
fn digest(stream: &TokenStream, seed: u64, tokens: Range<u64>) -> Result<u64> {
    let mut digest = Sha256::new_with_prefix(seed.to_le_bytes());
    stream.for_each_block(tokens, |block| {
        let words: Vec<u32> = block.iter().map(|token| *token as u32 & UNTRAINED | id_of(*token as u32)).collect();
        digest.update(bytemuck::cast_slice::<u32, u8>(&words));
    })?;
    let bytes: [u8; 32] = digest.finalize().into();
    Ok(bytes.iter().take(size_of::<u64>()).fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::dataset::Dataset;
    use crate::data::encode::tokenizer_handle::Tokenizer;
    use crate::data::rows::row_rules::{Packing, RowRules};
    use crate::data::tokenizer::AddBos;
    use proptest::prelude::*;
    use std::path::PathBuf;
    use std::sync::Arc;

    const END: i32 = 300;

    /// Lines of text, each a document, in a file.
    fn lines(dir: &tempfile::TempDir, texts: &[String]) -> PathBuf {
        let path = dir.path().join("lines.jsonl");
        let lines: String = texts.iter().map(|text| format!("{}\n", serde_json::json!({"text": text}))).collect();
        std::fs::write(&path, lines).unwrap();
        path
    }

    fn split(path: &PathBuf, rules: RowRules, split: &str, seed: u64, cache: Option<PathBuf>) -> Result<(Dataset, Dataset)> {
        let tokenizer = Tokenizer::bytes_with(Some(&END.to_string()), AddBos::No, Arc::default()).unwrap();
        let mut preparation = Preparation::default();
        (preparation.in_memory_bytes_max, preparation.cache) = (if cache.is_some() { 0 } else { u64::MAX }, cache);
        Dataset::open_split(std::slice::from_ref(path), &tokenizer, 301, rules, (split.parse().unwrap(), seed), &mut preparation)
    }

    /// The documents of a dataset, by its rows.
    fn documents(dataset: &Dataset) -> Vec<String> {
        let text = |tokens: Vec<i32>| {
            let ended = tokens.split(|token| *token == END).map(|tokens| tokens.iter().map(|token| *token as u8 as char).collect());
            ended.filter(|text: &String| !text.is_empty()).collect::<Vec<_>>()
        };
        let mut found: Vec<String> = (0..dataset.sequences()).flat_map(|row| text(dataset.read_tokens(row))).collect();
        found.sort();
        found
    }

    fn sorted(mut texts: Vec<String>) -> Vec<String> {
        texts.sort();
        texts
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Every document is on one side, whole; copies are on the same; the same everywhere and for any place of the tokens.
        #[test]
        fn each_document_is_either_learned_or_evaluated_on(
            mut texts in prop::collection::vec("[a-h]{1,9}", 3..30), copies in 0..4usize, wanted in 1..3u64, seed: u64, wrapped: bool,
        ) {
            texts.extend(texts.clone().into_iter().take(copies));
            texts.push("another one".into());
            let dir = tempfile::tempdir().unwrap();
            let path = lines(&dir, &texts);
            // Of one row of 1 token each, so that nothing is left over at the end; or a document a row.
            let rules = if wrapped { RowRules::wrapped(1) } else { RowRules { packing: Packing::Off, ..RowRules::wrapped(16) } };
            let Ok((kept, held_out)) = split(&path, rules, &wanted.to_string(), seed, None) else { return Ok(()) };
            let cached = split(&path, rules, &wanted.to_string(), seed, Some(dir.path().join("cache"))).unwrap();
            // Without the copies of one text it would be too few.
            let most_equal = texts.iter().map(|text| texts.iter().filter(|other| *other == text).count()).max().unwrap() as u64;
            prop_assert!(held_out.documents() >= wanted && held_out.documents() < wanted + most_equal);
            prop_assert_eq!(held_out.documents() + kept.documents(), texts.len() as u64);
            for (one, other) in [(&kept, &cached.0), (&held_out, &cached.1)] {
                prop_assert_eq!((one.sequences(), one.tokens(), one.untrained()), (other.sequences(), other.tokens(), other.untrained()));
                prop_assert!((0..one.sequences()).all(|row| one.read_tokens(row) == other.read_tokens(row)));
            }
            if !wrapped {
                let (kept, held_out) = (documents(&kept), documents(&held_out));
                prop_assert!(held_out.iter().all(|text| !kept.contains(text)));
                prop_assert_eq!(sorted([kept, held_out].concat()), sorted(texts));
            }
        }
    }

    #[test]
    fn streams_are_those_of_the_documents_alone() {
        let dir = tempfile::tempdir().unwrap();
        let texts: Vec<String> = (0..40).map(|n| format!("document {n}, and so on")).collect();
        let path = lines(&dir, &texts);
        let packed = split(&path, RowRules { packing: Packing::Off, ..RowRules::wrapped(64) }, "0.2", 7, None).unwrap();
        let cut = split(&path, RowRules::wrapped(8), "0.2", 7, None).unwrap();
        for (packed, cut) in [(&packed.0, &cut.0), (&packed.1, &cut.1)] {
            let chosen: Vec<String> = texts.iter().filter(|text| documents(packed).contains(text)).cloned().collect();
            let alone = tempfile::tempdir().unwrap();
            let tokenizer = Tokenizer::bytes_with(Some(&END.to_string()), AddBos::No, Arc::default()).unwrap();
            let of = [lines(&alone, &chosen)];
            let alone = Dataset::open(&of, &tokenizer, 301, RowRules::wrapped(8), &mut Preparation::default()).unwrap();
            assert_eq!((cut.sequences(), cut.tokens()), (alone.sequences(), alone.tokens()));
            assert!((0..cut.sequences()).all(|row| cut.read_tokens(row) == alone.read_tokens(row)));
        }
        assert_eq!((packed.1.documents(), cut.1.documents()), (8, 8));
        let other = split(&path, RowRules { packing: Packing::Off, ..RowRules::wrapped(64) }, "8", 8, None).unwrap();
        assert_ne!(documents(&other.1), documents(&packed.1), "the seed chooses");
    }

    #[test]
    fn records_of_equal_ids_are_on_one_side_whatever_their_weights() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids.jsonl");
        let record = |id: usize, weight: f64| serde_json::json!({"input_ids": [id, 1, 2], "weights": [1.0, weight, 0.5]}).to_string();
        let records: Vec<String> = (0..12).map(|nth| record(nth / 3, [1.0, 0.25, 0.75][nth % 3])).collect();
        std::fs::write(&path, records.join("\n")).unwrap();
        let rules = RowRules { packing: Packing::Off, ..RowRules::wrapped(4) };
        for seed in 0..8 {
            let (kept, held_out) = split(&path, rules, "1", seed, None).unwrap();
            let first = |dataset: &Dataset| (0..dataset.sequences()).map(|row| dataset.read_tokens(row)[0]).collect::<Vec<_>>();
            let (kept, held_out) = (first(&kept), first(&held_out));
            assert!(held_out.len() == 3 && held_out.iter().all(|id| !kept.contains(id)), "seed {seed}: {kept:?}, {held_out:?}");
        }
    }

    #[test]
    fn impossible_eval_splits_are_refused_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = lines(&dir, &["one".into(), "two".into(), "two".into()]);
        let refused = |how: &str, path: &PathBuf| split(path, RowRules::wrapped(1), how, 1, None).err().unwrap().to_string();
        assert!(
            refused("3", &path).starts_with("--eval-split 3: none would be left to train on: the data has 3 documents; use --eval-data")
        );
        let equal = tempfile::tempdir().unwrap();
        assert!(refused("0.5", &lines(&equal, &vec!["same".into(); 4])).contains("all documents are equal"));
        let ids = dir.path().join("ids.bin");
        std::fs::write(&ids, [1, 0, 2, 0]).unwrap();
        assert!(refused("1", &ids).contains("ids.bin does not mark where documents end"));
        for word in ["0", "1.0", "-1", "0.0", "nan", "many", "1e3"] {
            assert!(word.parse::<EvalSplit>().is_err(), "{word}");
        }
        assert!(EvalSplit::Documents(HELD_OUT_MAX + 1).of(1 << 40, 1 << 40).unwrap_err().to_string().contains("at most 65536"));
        assert_eq!(EvalSplit::Fraction(0.001).of(10, 10).unwrap(), 1);
    }
}
