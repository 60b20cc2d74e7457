//! Which documents share a row: best-fit decreasing. The longest come first, and each goes to the row that it fills best.

use std::cmp::Reverse;
use std::collections::BTreeSet;

/// For each of `lengths`, in tokens, the row that it goes to, of rows with room for `row_len` tokens. Rows are counted in the order of
/// their first document, so that those which stand near each other in the data are read together.
///
/// # Panics
/// If a length exceeds the room, or there are 2^32 of them.
pub(in crate::data) fn best_fit_decreasing(lengths: &[u32], row_len: u32) -> Vec<u32> {
    let count = u32::try_from(lengths.len()).expect("fewer than 2^32 documents");
    let mut longest_first: Vec<u32> = (0..count).collect();
    longest_first.sort_by_key(|&idx| Reverse(lengths[idx as usize]));
    // Room that is left and row: the first of those that are large enough is the best fit, and of equals the oldest.
    let (mut open, mut rows, mut begun) = (BTreeSet::new(), vec![0; lengths.len()], 0);
    for idx in longest_first {
        let length = lengths[idx as usize];
        assert!(length <= row_len, "a document of {length} tokens in a row of {row_len}");
        let best = open.range((length, 0)..).next().copied();
        let (left, row) = best.unwrap_or((row_len, begun));
        begun += u32::from(best.is_none());
        open.remove(&(left, row));
        if left > length {
            open.insert((left - length, row));
        }
        rows[idx as usize] = row;
    }
    number_by_first(&mut rows, begun);
    rows
}

/// Counts the `begun` rows anew, by their first document.
fn number_by_first(rows: &mut [u32], begun: u32) {
    let (mut numbers, mut next) = (vec![None; begun as usize], 0);
    for row in rows {
        *row = *numbers[*row as usize].get_or_insert_with(|| {
            next += 1;
            next - 1
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The lengths in each row.
    fn packed(lengths: &[u32], row_len: u32) -> Vec<Vec<u32>> {
        let rows = best_fit_decreasing(lengths, row_len);
        let mut packed = vec![Vec::new(); rows.iter().max().map_or(0, |last| *last as usize + 1)];
        rows.iter().zip(lengths).for_each(|(row, length)| packed[*row as usize].push(*length));
        packed
    }

    #[test]
    fn a_document_goes_where_it_leaves_least_room() {
        // 7, 6 and 6 begin rows; 4 goes to the older of two equals, 3 to the row of 7, which it fills.
        assert_eq!(packed(&[3, 6, 7, 4, 6], 10), [vec![3, 7], vec![6, 4], vec![6]]);
        assert_eq!(packed(&[10, 10, 1], 10), [[10], [10], [1]]);
        assert_eq!(packed(&[1; 7], 3).len(), 3);
        assert_eq!(packed(&[], 8), [[0; 0]; 0]);
    }

    /// As it is defined, looking at every row.
    fn naive(lengths: &[u32], row_len: u32) -> usize {
        let (mut left, mut sorted): (Vec<u32>, _) = (Vec::new(), lengths.to_vec());
        sorted.sort_by_key(|length| Reverse(*length));
        for length in sorted {
            match left.iter_mut().filter(|left| **left >= length).min_by_key(|left| **left) {
                Some(left) => *left -= length,
                None => left.push(row_len - length),
            }
        }
        left.len()
    }

    proptest! {
        #[test]
        fn no_row_overflows_and_there_are_as_few_as_best_fit_needs(lengths in prop::collection::vec(1..=32u32, 0..200)) {
            let packed = packed(&lengths, 32);
            let filled: Vec<u32> = packed.iter().map(|row| row.iter().sum()).collect();
            prop_assert!(filled.iter().all(|filled| (1..=32).contains(filled)), "{:?}", filled);
            prop_assert_eq!(filled.iter().sum::<u32>(), lengths.iter().sum::<u32>());
            prop_assert_eq!(packed.len(), naive(&lengths, 32));
            // Two rows that fit together would be one.
            let mut least = filled;
            least.sort_unstable();
            prop_assert!(least.len() < 2 || least[0] + least[1] > 32);
        }
    }
}
