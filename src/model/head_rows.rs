//! The rows of a micro-batch that the head computes: all, or those with a trained target and a few more.
//!
//! A row without a target that counts has no loss, and its gradient is zero. Data with masked prompts has many such rows, and the head can
//! leave them out. The loss and the gradient of the output matrix are sums over rows. Without the zeros of the rows that are left out, these
//! sums are cut into other blocks and rounded elsewhere, so the choice decides bits.

use crate::objective::Objective;
use crate::pair_loss::PAIR_WORDS;
use crate::policy_loss::TOKEN_WORDS;
use crate::teacher_loss::ENTRY_WORDS;
use serde::{Deserialize, Serialize};

/// Rows that the head computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadRows {
    /// Every row.
    All,
    /// Rows whose target counts, and the first other rows up to the next multiple of a row unit.
    Trained,
}

/// Row counts in one tile of the loss: so few that the products of the head have few shapes.
const ROW_COUNTS: usize = 16;
/// Rows of the smallest row unit: the 16 bytes to which fast products in 16-bit formats align sums over rows.
const UNIT_ROWS_MIN: usize = 8;

/// The row unit in tiles of `tile_rows` rows: the head computes a multiple of it.
fn row_unit(tile_rows: usize) -> usize {
    tile_rows.div_ceil(ROW_COUNTS).next_multiple_of(UNIT_ROWS_MIN)
}

/// Rows of the list that the head computes together, at most: the whole row units in a tile of `tile_rows` rows.
pub(crate) fn piece_rows(tile_rows: usize) -> usize {
    let unit = row_unit(tile_rows);
    if tile_rows < unit { tile_rows } else { tile_rows / unit * unit }
}

/// All row counts that the head computes together, for lists of any length.
pub(crate) fn piece_counts(tile_rows: usize) -> impl Iterator<Item = usize> {
    let step = if tile_rows < row_unit(tile_rows) { 1 } else { row_unit(tile_rows) };
    (step..=tile_rows).step_by(step)
}

/// Words of the lists of [`select`] for a micro-batch of `tokens` tokens.
pub(crate) const fn list_words(head_rows: HeadRows, tokens: usize) -> usize {
    match head_rows {
        HeadRows::All => 0,
        HeadRows::Trained => 2 * tokens,
    }
}

/// Writes the ascending indices of selected rows to `rows`, and their targets to `kept`. Selected are all rows whose target in `targets`
/// counts, and the first other rows that fill the last row unit. Returns the number of selected rows, which is at least 1; `None`, without
/// having written anything, if every row is selected. All slices have equal lengths.
pub(crate) fn select(targets: &[i32], rows: &mut [i32], kept: &mut [i32], tile_rows: usize) -> Option<usize> {
    let trained = targets.iter().filter(|target| **target >= 0).count();
    let count = trained.max(1).next_multiple_of(row_unit(tile_rows));
    if count >= targets.len() {
        return None;
    }
    let mut fillers = count - trained;
    let mut selected = rows.iter_mut().zip(kept);
    for (row, &target) in (0..).zip(targets) {
        let is_filler = target < 0 && fillers > 0;
        if (target >= 0 || is_filler)
            && let Some((place, kept)) = selected.next()
        {
            (*place, *kept) = (row, target);
            fillers -= usize::from(is_filler);
        }
    }
    Some(count)
}

/// Changes the list of `objective` from one of all rows to one of the selected `rows`.
pub(crate) fn place_list(objective: &Objective, list: &mut [i32], rows: &[i32]) {
    match objective {
        Objective::Pairs(_) => place_pairs(list, rows),
        Objective::Policy(_) => place_tokens(list, rows, TOKEN_WORDS),
        Objective::Teacher(loss) => place_tokens(list, rows, loss.top_k * ENTRY_WORDS),
    }
}

/// Moves the numbers of the selected `rows`, which ascend and have `words` words each, to the front. Zeros follow.
fn place_tokens(list: &mut [i32], rows: &[i32], words: usize) {
    for (place, row) in rows.iter().enumerate() {
        let first = *row as usize * words;
        list.copy_within(first..first + words, place * words);
    }
    list[rows.len() * words..].fill(0);
}

/// Changes the rows of `pairs` from rows of the micro-batch to places in the list of selected `rows`.
fn place_pairs(pairs: &mut [i32], rows: &[i32]) {
    for words in pairs.as_chunks_mut::<PAIR_WORDS>().0 {
        for row in &mut words[..3] {
            *row = rows.partition_point(|selected| selected < row) as i32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(targets: &[i32], tile_rows: usize) -> Option<(Vec<i32>, Vec<i32>)> {
        let [mut rows, mut kept] = [(); 2].map(|()| vec![-7; targets.len()]);
        let count = select(targets, &mut rows, &mut kept, tile_rows)?;
        assert!([&rows, &kept].iter().all(|list| list[count..].iter().all(|value| *value == -7)), "nothing behind the list");
        Some((rows[..count].to_vec(), kept[..count].to_vec()))
    }

    #[test]
    fn the_unit_divides_a_tile_into_few_counts_of_aligned_rows() {
        assert_eq!([1, 16, 128, 129, 4096, 16_384].map(row_unit), [8, 8, 8, 16, 256, 1024]);
    }

    #[test]
    fn the_pieces_of_a_list_have_few_row_counts() {
        for tile in [1, 7, 8, 20, 100, 128, 4096] {
            let (step, counts) = (piece_rows(tile), Vec::from_iter(piece_counts(tile)));
            assert!(counts.len() <= ROW_COUNTS && counts.ends_with(&[step]) && step <= tile, "{tile}: {step} {counts:?}");
            for count in (row_unit(tile)..3 * tile).step_by(row_unit(tile)) {
                assert!((0..count).step_by(step).all(|start| counts.contains(&step.min(count - start))), "{count} in tiles of {tile}");
            }
        }
    }

    #[test]
    fn trained_rows_are_selected_and_the_first_others_fill_the_unit() {
        let mut targets = [-1; 64];
        (targets[3], targets[40], targets[63]) = (5, 0, 9);
        let (rows, kept) = selected(&targets, 64).unwrap();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 40, 63]);
        assert_eq!(kept.iter().filter(|target| **target >= 0).collect::<Vec<_>>(), [&5, &0, &9]);
        assert_eq!(kept[3], 5);
    }

    #[test]
    fn numbers_of_tokens_follow_their_rows_into_the_list() {
        let mut list: Vec<i32> = (0..6 * TOKEN_WORDS as i32).collect();
        place_list(&crate::objective::tests::policy(crate::policy_loss::PolicyLossKind::Dapo), &mut list, &[0, 3, 4]);
        let firsts: Vec<i32> = list.chunks(TOKEN_WORDS).take(3).map(|words| words[0]).collect();
        assert_eq!((firsts, list[5]), (vec![0, 12, 16], 13));
        assert_eq!(list[3 * TOKEN_WORDS..], [0; 3 * TOKEN_WORDS], "no token stands behind the list");
        let mut list: Vec<i32> = (0..20).collect();
        place_list(&crate::objective::tests::DISTILL, &mut list, &[1, 4]);
        assert_eq!(list[..8], [4, 5, 6, 7, 16, 17, 18, 19], "two tokens of a teacher have four words");
    }

    #[test]
    fn pairs_follow_their_rows_into_the_list() {
        let mut pairs = [4, 9, 12, 0, 7, 7, 7, 7, 12, 15, 16, 0, 5, 5, 5, 5, 0, 0, 0, 0, 0, 0, 0, 0];
        place_pairs(&mut pairs, &[0, 2, 6, 7, 10, 12, 14, 15]);
        assert_eq!(pairs, [2, 4, 5, 0, 7, 7, 7, 7, 5, 7, 8, 0, 5, 5, 5, 5, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_micro_batch_without_trained_rows_has_one_unit_of_rows() {
        let (rows, kept) = selected(&[-100; 40], 40).unwrap();
        assert_eq!((rows, kept), (Vec::from_iter(0..8), vec![-100; 8]));
    }

    #[test]
    fn every_row_is_selected_where_fewer_rows_save_nothing() {
        assert_eq!(selected(&[1; 64], 64), None);
        let mut nearly_all = [1; 64];
        nearly_all[..7].fill(-1);
        assert_eq!(selected(&nearly_all, 64), None, "57 rows fill eight units");
        nearly_all[7] = -1;
        assert_eq!(selected(&nearly_all, 64).unwrap().0, Vec::from_iter(8..64), "56 rows fill seven");
        assert_eq!(selected(&[-1; 8], 8), None);
    }
}
