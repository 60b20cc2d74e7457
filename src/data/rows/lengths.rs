//! How long the documents of data are.

use super::bounds::Bounds;
use crate::data::context::Preparation;
use crate::error::Result;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Width of the longest bar.
const BAR: u64 = 40;

/// Documents by their length in tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(in crate::data) struct DocumentLengths {
    pub(in crate::data) documents: u64,
    pub(in crate::data) tokens: u64,
    pub(in crate::data) shortest: u64,
    pub(in crate::data) longest: u64,
    /// How many have so many tokens at most and more than half of that: powers of two.
    pub(in crate::data) up_to: BTreeMap<u64, u64>,
}

impl DocumentLengths {
    /// Of the documents that begin and end at `bounds`.
    ///
    /// # Errors
    /// Errors of [`Bounds::for_each`].
    pub(in crate::data) fn of(bounds: &Bounds, preparation: &Preparation<'_>) -> Result<Self> {
        let mut lengths = Self { shortest: u64::MAX, ..Self::default() };
        bounds.for_each(preparation, |document| {
            lengths.add(document.tokens.end - document.tokens.start);
            Ok(())
        })?;
        lengths.shortest = lengths.shortest.min(lengths.longest);
        Ok(lengths)
    }

    fn add(&mut self, tokens: u64) {
        self.documents += 1;
        self.tokens += tokens;
        self.shortest = self.shortest.min(tokens);
        self.longest = self.longest.max(tokens);
        *self.up_to.entry(tokens.next_power_of_two()).or_default() += 1;
    }
}

impl fmt::Display for DocumentLengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { documents, tokens, shortest, longest, up_to } = self;
        if *documents == 0 {
            return f.write_str("not known: token files do not mark where documents end");
        }
        write!(f, "{shortest} to {longest} tokens, {:.1} on average", *tokens as f64 / *documents as f64)?;
        let most = up_to.values().max().copied().unwrap_or(1);
        for (limit, count) in up_to {
            let bar = "#".repeat((count * BAR).div_ceil(most) as usize);
            write!(f, "\n  up to {limit:>8}  {count:>8}  {bar}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_counted_by_powers_of_two_and_drawn_by_the_largest() {
        let mut lengths = DocumentLengths { shortest: u64::MAX, ..DocumentLengths::default() };
        [4, 3, 5, 8, 7, 100].into_iter().for_each(|tokens| lengths.add(tokens));
        assert_eq!(lengths.up_to, BTreeMap::from([(4, 2), (8, 3), (128, 1)]));
        let lines: Vec<String> = lengths.to_string().lines().map(String::from).collect();
        assert_eq!(lines[0], "3 to 100 tokens, 21.2 on average");
        assert_eq!(lines.iter().map(|line| line.matches('#').count()).collect::<Vec<_>>(), [0, 27, 40, 14]);
    }
}
