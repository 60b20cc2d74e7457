//! Derives the peers that a rank waits for, from its driver's current activity and the shared progress counters ([`Board`]).

use super::order::Order;
use super::vitals::Doing;
use crate::ranks::board::Board;
use std::fmt;

/// A missing publication, and the ranks that have not made it.
#[derive(Debug, PartialEq)]
pub(super) struct Awaited {
    what: String,
    pub(super) ranks: Vec<usize>,
}

impl Awaited {
    /// The publication that `rank` waits for while its driver is in the state `doing`; `None` when it waits for no other rank.
    pub(super) fn of(board: &Board, rank: usize, (doing, number): (Doing, u64)) -> Option<Self> {
        match doing {
            Doing::Sums | Doing::Gradient => gradient(board, rank).or_else(|| pull(board, rank)),
            Doing::Norm => gradient(board, rank).or_else(|| norm(board, rank)),
            Doing::Gather => weights(board, rank, number as usize).or_else(|| fetch(board, rank)),
            Doing::HandOver => activations(board, rank, number as usize),
            Doing::Orders => Self::by(board, "the reply", |other| board.is_done(other)),
            Doing::Else if rank > 0 && board.is_done(rank) => Some(Self { what: "the next order".into(), ranks: vec![0] }),
            _ => None,
        }
    }

    /// `what` is missing from all ranks for which `has_published` is false.
    fn by(board: &Board, what: impl Into<String>, has_published: impl Fn(usize) -> bool) -> Option<Self> {
        let ranks: Vec<usize> = (0..board.ranks()).filter(|rank| !has_published(*rank)).collect();
        (!ranks.is_empty()).then(|| Self { what: what.into(), ranks })
    }
}

/// An order that other processes have not completed.
#[derive(Debug)]
pub(super) struct Orders {
    order: Order,
    /// Sequence number of the order.
    pub(super) count: u64,
    /// Names of these processes.
    processes: Vec<String>,
    /// Whether every rank of this process has completed the order.
    pub(super) is_done_here: bool,
}

impl Orders {
    /// The last order, unless every other process has completed it.
    pub(super) fn abroad(board: &Board) -> Option<Self> {
        let mates = board.mates();
        let late = || (0..board.ranks()).filter(|rank| !board.is_done(*rank));
        let late_abroad = || late().filter(|rank| !mates.contains(rank));
        // Most polls end here. They must not allocate.
        late_abroad().next()?;
        let (count, number) = board.last_order();
        let order = Order::of(number)?;
        let mut processes: Vec<String> = late_abroad().map(|rank| board.name(rank)).collect();
        processes.dedup();
        Some(Self { order, count, processes, is_done_here: !late().any(|rank| mates.contains(&rank)) })
    }
}

impl fmt::Display for Orders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.processes.join(", "), self.order.words())
    }
}

impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.ranks.iter().map(usize::to_string).collect();
        let rank = if numbers.len() == 1 { "rank" } else { "ranks" };
        write!(f, "{} of {rank} {}", self.what, numbers.join(", "))
    }
}

/// The ranks that have not written the gradient of the bucket that `rank` sums next.
fn gradient(board: &Board, rank: usize) -> Option<Awaited> {
    let next = board.pulled(rank);
    let what = format!("the gradient of bucket {}", next % board.buckets());
    Awaited::by(board, what, |other| board.written(other) > next).filter(|missing| !missing.ranks.contains(&rank))
}

/// The local ranks that have not pulled the last gradient that `rank` wrote.
fn pull(board: &Board, rank: usize) -> Option<Awaited> {
    let last = board.written(rank).checked_sub(1)?;
    let what = format!("the pull of bucket {}", last % board.buckets());
    Awaited::by(board, what, |other| !board.mates().contains(&other) || board.pulled(other) > last)
        .filter(|missing| !missing.ranks.contains(&rank))
}

/// The ranks of the same sequence group (`sequence_ranks` ranks) that have not published as many activation exchanges as `rank`.
fn activations(board: &Board, rank: usize, sequence_ranks: usize) -> Option<Awaited> {
    let group = |rank: usize| rank / sequence_ranks.max(1);
    Awaited::by(board, "activations", |other| group(other) != group(rank) || board.handed(other) >= board.handed(rank))
}

/// The ranks that have not reported the step, or rank 0, which publishes the verdict after all reports.
fn norm(board: &Board, rank: usize) -> Option<Awaited> {
    let step = board.reported(rank);
    if board.outcome(step).is_some() {
        // `rank` itself has not reported the current step yet.
        return None;
    }
    let verdict = || (rank > 0).then(|| Awaited { what: "the verdict".into(), ranks: vec![0] });
    Awaited::by(board, "the gradient norm", |other| board.reported(other) >= step).or_else(verdict)
}

/// Weights are gathered from the last bucket to the first. Returns the first bucket in this order whose version some rank has not
/// published.
fn weights(board: &Board, rank: usize, bucket: usize) -> Option<Awaited> {
    let version = board.settled(rank, bucket);
    let missing = |bucket| Awaited::by(board, format!("the weights of bucket {bucket}"), |other| board.settled(other, bucket) >= version);
    (bucket..board.buckets() as usize).rev().find_map(missing)
}

/// The local ranks that are behind `rank` in fetching a module's weights. A fetch counts as two halves.
fn fetch(board: &Board, rank: usize) -> Option<Awaited> {
    let is_behind = |other: &usize| board.mates().contains(other) && board.fetched(*other) < board.fetched(rank);
    Awaited::by(board, "the weights of a module", |other| !is_behind(&other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::board::{Sizes, StepOutcome};

    const RANKS: usize = 3;

    fn board() -> Board {
        Board::new(Sizes { ranks: RANKS, buckets: 4, partials: 4, shares: 3, ..Sizes::default() }, None)
    }

    /// The description of the publication that each rank waits for in the state `doing`.
    fn waits(board: &Board, doing: Doing, number: u64) -> [String; RANKS] {
        std::array::from_fn(|rank| Awaited::of(board, rank, (doing, number)).map_or(String::new(), |missing| missing.to_string()))
    }

    fn write(board: &Board, rank: usize, buckets: usize) {
        (0..buckets).for_each(|_| board.publish_written(rank));
    }

    #[test]
    fn who_sums_waits_for_gradients_and_who_has_summed_for_pulls() {
        let board = board();
        // In the second round of four buckets: rank 2 is one bucket behind, and rank 1 has all of its sums but one.
        [7, 7, 6].into_iter().enumerate().for_each(|(rank, buckets)| write(&board, rank, buckets));
        [6, 5, 6].into_iter().enumerate().for_each(|(rank, buckets)| (0..buckets).for_each(|_| board.publish_pulled(rank)));
        for doing in [Doing::Sums, Doing::Gradient, Doing::Norm] {
            assert_eq!(waits(&board, doing, 0)[..2], ["the gradient of bucket 2 of rank 2", ""]);
        }
        write(&board, 2, 1);
        [0, 2].into_iter().for_each(|rank| board.publish_pulled(rank));
        assert_eq!(waits(&board, Doing::Sums, 0), ["the pull of bucket 2 of rank 1", "", "the pull of bucket 2 of rank 1"]);
        assert_eq!(waits(&board, Doing::Params, 1), [""; RANKS]);
    }

    #[test]
    fn the_norm_waits_for_every_report_and_then_for_rank_0() {
        let board = board();
        let outcome = StepOutcome { norm_sq: 1.0, nonfinite: false, loss: 1.0 };
        (0..RANKS).for_each(|rank| board.publish_report(rank, false, 4));
        board.publish_outcome(4, outcome);
        assert_eq!(waits(&board, Doing::Norm, 0), [""; RANKS], "nobody has reported");
        board.publish_report(0, false, 5);
        assert_eq!(waits(&board, Doing::Norm, 0), ["the gradient norm of ranks 1, 2", "", ""]);
        (1..RANKS).for_each(|rank| board.publish_report(rank, false, 5));
        assert_eq!(waits(&board, Doing::Norm, 0), ["", "the verdict of rank 0", "the verdict of rank 0"]);
    }

    #[test]
    fn who_gathers_waits_for_the_last_bucket_that_is_missing() {
        let board = board();
        [(0, 3, 2), (1, 3, 2), (2, 3, 2), (0, 2, 2), (2, 2, 2), (0, 1, 2)]
            .into_iter()
            .for_each(|(rank, b, v)| board.publish_settled(rank, b, v));
        assert_eq!(waits(&board, Doing::Gather, 1)[0], "the weights of bucket 2 of rank 1");
        board.publish_settled(1, 2, 2);
        assert_eq!(waits(&board, Doing::Gather, 1)[0], "the weights of bucket 1 of ranks 1, 2");
        (1..3).for_each(|rank| board.publish_settled(rank, 1, 2));
        (0..2).for_each(|rank| board.publish_fetched(rank));
        assert_eq!(waits(&board, Doing::Gather, 1), ["the weights of a module of rank 2", "the weights of a module of rank 2", ""]);
    }

    #[test]
    fn who_hands_over_waits_for_those_of_its_sequences() {
        let board = Board::new(Sizes { ranks: 4, buckets: 4, partials: 4, shares: 4, ..Sizes::default() }, None);
        (0..3).for_each(|rank| board.publish_handed(rank));
        board.publish_handed(0);
        let waits = |rank| Awaited::of(&board, rank, (Doing::HandOver, 2)).map_or(String::new(), |missing| missing.to_string());
        assert_eq!([0, 1, 2, 3].map(waits), ["activations of rank 1", "", "activations of rank 3", ""]);
    }

    #[test]
    fn orders_are_waited_for_on_both_sides() {
        let board = board();
        board.give_order(1, [0; 6]);
        board.publish_done(2);
        assert_eq!(waits(&board, Doing::Orders, 0)[0], "the reply of rank 1");
        // Rank 1 has not started on the order.
        assert_eq!(waits(&board, Doing::Else, 0), ["", "", "the next order of rank 0"]);
    }
}
