//! Sentences about records, each with the number of its records and the first of them: a run prints each sentence once.

use crate::data::read::position::DocumentPosition;
use std::collections::BTreeMap;

/// Sentences that are counted, at most: they name keys and roles, which foreign data may have without end.
const SENTENCES_MAX: usize = 32;

/// Sentences with their counts.
#[derive(Debug, Default)]
pub(in crate::data) struct Sentences(BTreeMap<String, (u64, DocumentPosition)>);

impl Sentences {
    /// Counts a sentence about the record at `place`.
    pub(in crate::data) fn add(&mut self, sentence: String, place: &DocumentPosition) {
        if let Some((count, _)) = self.0.get_mut(&sentence) {
            *count += 1;
        } else if self.0.len() < SENTENCES_MAX {
            self.0.insert(sentence, (1, place.clone()));
        }
    }

    /// A warning for each sentence, about so many of all `records`, in the order of their first records.
    pub(in crate::data) fn warnings(&self, records: u64) -> Vec<String> {
        let mut all: Vec<_> = self.0.iter().collect();
        all.sort_by_key(|(_, (_, first))| (first.source, first.line));
        let warning = |(sentence, (count, first)): (&String, &(u64, DocumentPosition))| {
            first.error(format_args!("{sentence} (in {count} of {records} records)")).to_string()
        };
        all.into_iter().map(warning).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn each_sentence_is_one_warning_with_its_count_and_first_record() {
        let place = |line| DocumentPosition { path: Path::new("a.jsonl").into(), source: 0, line: Some(line) };
        let mut sentences = Sentences::default();
        for line in [3, 5, 7] {
            sentences.add("b".into(), &place(line));
        }
        (1..99).for_each(|nth| sentences.add(format!("a {nth}"), &place(9)));
        let warnings = sentences.warnings(8);
        assert_eq!((warnings[0].as_str(), warnings.len()), ("a.jsonl: line 3: b (in 3 of 8 records)", SENTENCES_MAX));
    }
}
