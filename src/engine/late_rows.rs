//! The rows of a tied embedding that a micro-batch uses. The backward pass of the embedding adds only to these rows; the gradient of all
//! other rows is final when that of the output matrix is.
//!
//! Between device and host the rows are *packed*: stored consecutively. A bucket is a range of the flat order that may begin and end within
//! a row, so its rows are a range of the packed order.

use crate::bucket::layout::BucketLayout;
use crate::data::rows::batch::distinct;
use crate::device::{Device, Lease};
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::model::shape::ModelShape;
use crate::model::tensors::{Module, Role, TensorTable};
use std::iter;
use std::ops::Range;

/// Maps rows of a table between the flat order and the packed order. The table has `channels` columns and begins at `start` in the flat
/// order.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedRows<'a> {
    /// Distinct row numbers in ascending order.
    pub rows: &'a [i32],
    pub channels: usize,
    pub start: usize,
}

impl PackedRows<'_> {
    /// The packed range of the rows' elements within `flat`.
    pub(super) fn packed(&self, flat: &Range<usize>) -> Range<usize> {
        self.before(flat.start)..self.before(flat.end)
    }

    /// Number of packed elements before the flat position `flat`.
    fn before(&self, flat: usize) -> usize {
        let within = flat.saturating_sub(self.start);
        let (row, column) = (within / self.channels, within % self.channels);
        let whole = self.rows.partition_point(|&other| (other as usize) < row);
        let part = if self.rows.get(whole).is_some_and(|&other| other as usize == row) { column } else { 0 };
        whole * self.channels + part
    }

    /// The rows with elements in the packed range, and how many elements of the first row lie before it.
    pub(super) fn rows_of(&self, packed: &Range<usize>) -> (Range<usize>, usize) {
        (packed.start / self.channels..packed.end.div_ceil(self.channels), packed.start % self.channels)
    }

    /// The flat ranges of a packed range, one for each row, with their packed positions.
    pub(super) fn pieces(&self, packed: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let mut at = packed.start;
        iter::from_fn(move || {
            let (row, column) = (at / self.channels, at % self.channels);
            let elems = (self.channels - column).min(packed.end - at);
            let flat = self.start + *self.rows.get(row)? as usize * self.channels + column;
            let piece = (flat..flat + elems, at);
            at += elems;
            (elems > 0).then_some(piece)
        })
    }
}

/// The rows of the last micro-batch of a step. They are valid until the next step replaces them.
#[derive(Debug)]
pub(super) struct LateRows {
    ids: PinnedSlice,
    count: usize,
    channels: usize,
    start: usize,
    /// One bit for each row of the table.
    used: Vec<u64>,
}

impl LateRows {
    /// Allocates memory for the rows of `tokens` tokens, if buckets of `layout` leave early.
    ///
    /// # Errors
    /// `Resource` when memory is not available or cannot be locked.
    pub(super) fn take<D: Device>(
        layout: &BucketLayout,
        (shape, table): (&ModelShape, &TensorTable),
        tokens: usize,
        (dev, host): (&mut D, &mut HostMemory),
        lease: &mut Lease,
    ) -> Result<Option<Self>> {
        let Some(wte) = table.find(Module::Embed, Role::Wte).filter(|_| !layout.early().is_empty()) else { return Ok(None) };
        let bytes = distinct(tokens, shape.vocab) * 4;
        let ids = lease.alloc_pinned((dev, host), "embedding rows", bytes, bytes)?;
        Ok(Some(Self { ids, count: 0, channels: shape.channels, start: wte.offset_elems, used: vec![0; shape.vocab.div_ceil(64)] }))
    }

    /// Replaces the rows by those that `tokens` use. The previous rows must no longer be in use.
    pub(super) fn collect(&mut self, host: &mut HostMemory, tokens: PinnedSlice) {
        mark(host.lend(tokens), &mut self.used);
        self.count = list(&self.used, host.lend_mut(self.ids));
    }

    /// The row numbers, int32.
    pub(super) fn ids(&self) -> PinnedSlice {
        self.ids.slice(0, self.count * 4)
    }

    pub(super) fn packing<'a>(&self, host: &'a HostMemory) -> PackedRows<'a> {
        PackedRows { rows: host.lend(self.ids()), channels: self.channels, start: self.start }
    }

    /// The rows within a flat range.
    pub(super) fn part(&self, host: &HostMemory, flat: &Range<usize>) -> RowPart {
        RowPart { ids: self.ids(), channels: self.channels, start: self.start, packed: self.packing(host).packed(flat) }
    }
}

/// Sets the bit of each row that `tokens` use, and clears all others.
fn mark(tokens: &[i32], used: &mut [u64]) {
    used.fill(0);
    for token in tokens {
        used[*token as usize / 64] |= 1 << (token % 64);
    }
}

/// Writes the numbers of marked rows in ascending order and returns their count.
fn list(used: &[u64], ids: &mut [i32]) -> usize {
    let mut count = 0;
    for (first, mut bits) in (0..).step_by(64).zip(used.iter().copied()) {
        while bits != 0 {
            ids[count] = first + bits.trailing_zeros() as i32;
            count += 1;
            bits &= bits - 1;
        }
    }
    count
}

/// The rows of a part of the flat order, for a job.
#[derive(Clone, Debug)]
pub(super) struct RowPart {
    /// Numbers of all rows, int32.
    pub ids: PinnedSlice,
    pub channels: usize,
    /// Position of the table in the flat order.
    pub start: usize,
    /// The packed range of these rows.
    pub packed: Range<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Buckets that begin and end anywhere cut the packed order without gaps, and its pieces are the rows' elements in order.
        #[test]
        fn buckets_cut_the_packed_order(
            rows in prop::collection::btree_set(0i32..40, 0..40), channels in 1usize..30, start in 0usize..50, bucket in 1usize..200, step in 1usize..40,
        ) {
            let rows: Vec<i32> = rows.into_iter().collect();
            let packing = PackedRows { rows: &rows, channels, start };
            let want: Vec<usize> = rows.iter().flat_map(|&row| (0..channels).map(move |c| start + row as usize * channels + c)).collect();
            let (mut have, mut end) = (Vec::new(), 0);
            for first in (0..start + 40 * channels + bucket).step_by(bucket) {
                let (flat, packed) = (first..first + bucket, packing.packed(&(first..first + bucket)));
                prop_assert_eq!(packed.start, end);
                prop_assert!(packed.clone().all(|at| flat.contains(&want[at])));
                let (of, skipped) = packing.rows_of(&packed);
                if !packed.is_empty() {
                    prop_assert_eq!(of.start * channels + skipped, packed.start);
                    prop_assert!((of.end - 1) * channels < packed.end && packed.end <= of.end * channels);
                }
                // The pieces of a job cut the range again.
                for from in packed.clone().step_by(step) {
                    for (piece, at) in packing.pieces(from..(from + step).min(packed.end)) {
                        prop_assert_eq!(at, have.len());
                        have.extend(piece);
                    }
                }
                end = packed.end;
            }
            prop_assert_eq!(have, want);
        }
    }

    #[test]
    fn the_rows_of_a_micro_batch_are_each_there_once_in_order() {
        let (mut used, mut ids) = ([0; 3], [-1; 6]);
        for (tokens, want) in
            [([129, 0, 64, 63, 0, 5], &[0, 5, 63, 64, 129][..]), ([7; 6], &[7]), ([6, 2, 3, 5, 4, 1], &[1, 2, 3, 4, 5, 6])]
        {
            mark(&tokens, &mut used);
            let count = list(&used, &mut ids);
            assert_eq!(ids[..count], *want);
        }
    }
}
