//! Derives the peers that a rank waits for, from its driver's current activity and the shared progress counters ([`ProgressCounters`]).

use super::driver_state::DriverActivity;
use crate::engine::protocol::order::Order;
use crate::ranks::progress::ProgressCounters;
use std::fmt;

/// A missing publication, and the ranks that have not made it.
#[derive(Debug, PartialEq)]
pub(in crate::engine) struct WaitEdge {
    awaited: String,
    pub(in crate::engine) ranks: Vec<usize>,
}

impl WaitEdge {
    /// The publication that `rank` waits for while its driver is in the state `activity`; `None` when it waits for no other rank.
    pub(in crate::engine) fn of(progress: &ProgressCounters, rank: usize, (activity, number): (DriverActivity, u64)) -> Option<Self> {
        match activity {
            DriverActivity::Sums | DriverActivity::Gradient => gradient(progress, rank).or_else(|| pull(progress, rank)),
            DriverActivity::Norm => gradient(progress, rank).or_else(|| norm(progress, rank)),
            DriverActivity::Gather => weights(progress, rank, number as usize).or_else(|| fetch(progress, rank)),
            DriverActivity::HandOver => activations(progress, rank, number as usize),
            DriverActivity::Orders => Self::by(progress, "the reply", |other| progress.is_done(other)),
            DriverActivity::Else if rank > 0 && progress.is_done(rank) => Some(Self { awaited: "the next order".into(), ranks: vec![0] }),
            _ => None,
        }
    }

    /// `awaited` is missing from all ranks for which `has_published` is false.
    fn by(progress: &ProgressCounters, awaited: impl Into<String>, has_published: impl Fn(usize) -> bool) -> Option<Self> {
        let ranks: Vec<usize> = (0..progress.ranks()).filter(|rank| !has_published(*rank)).collect();
        (!ranks.is_empty()).then(|| Self { awaited: awaited.into(), ranks })
    }
}

/// An order that other processes have not completed.
#[derive(Debug)]
pub(in crate::engine) struct PendingOrder {
    order: Order,
    /// Sequence number of the order.
    pub(in crate::engine) count: u64,
    /// Names of these processes.
    processes: Vec<String>,
    /// Whether every rank of this process has completed the order.
    pub(in crate::engine) is_done_here: bool,
}

impl PendingOrder {
    /// The last order, unless every other process has completed it.
    pub(in crate::engine) fn on_remote_processes(progress: &ProgressCounters) -> Option<Self> {
        let local_ranks = progress.local_ranks();
        let late = || (0..progress.ranks()).filter(|rank| !progress.is_done(*rank));
        let late_abroad = || late().filter(|rank| !local_ranks.contains(rank));
        // Most polls end here. They must not allocate.
        late_abroad().next()?;
        let (count, number) = progress.last_order();
        let order = Order::of(number)?;
        let mut processes: Vec<String> = late_abroad().map(|rank| progress.name(rank)).collect();
        processes.dedup();
        Some(Self { order, count, processes, is_done_here: !late().any(|rank| local_ranks.contains(&rank)) })
    }
}

impl fmt::Display for PendingOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.processes.join(", "), self.order.description())
    }
}

impl fmt::Display for WaitEdge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.ranks.iter().map(usize::to_string).collect();
        let rank = if numbers.len() == 1 { "rank" } else { "ranks" };
        write!(f, "{} of {rank} {}", self.awaited, numbers.join(", "))
    }
}

/// The ranks that have not written the gradient of the bucket that `rank` sums next.
fn gradient(progress: &ProgressCounters, rank: usize) -> Option<WaitEdge> {
    let next = progress.pulled(rank);
    let awaited = format!("the gradient of bucket {}", progress.next_summed(rank));
    WaitEdge::by(progress, awaited, |other| progress.written(other) > next).filter(|missing| !missing.ranks.contains(&rank))
}

/// The local ranks that have not pulled the last gradient that `rank` wrote.
fn pull(progress: &ProgressCounters, rank: usize) -> Option<WaitEdge> {
    let last = progress.written(rank).checked_sub(1)?;
    let awaited = format!("the pull of bucket {}", progress.last_written(rank));
    WaitEdge::by(progress, awaited, |other| !progress.local_ranks().contains(&other) || progress.pulled(other) > last)
        .filter(|missing| !missing.ranks.contains(&rank))
}

/// The ranks of the same sequence group (`sequence_ranks` ranks) that have not published as many activation exchanges as `rank`.
fn activations(progress: &ProgressCounters, rank: usize, sequence_ranks: usize) -> Option<WaitEdge> {
    let group = |rank: usize| rank / sequence_ranks.max(1);
    WaitEdge::by(progress, "activations", |other| group(other) != group(rank) || progress.handed(other) >= progress.handed(rank))
}

/// The ranks that have not reported the step, or rank 0, which publishes the verdict after all reports.
fn norm(progress: &ProgressCounters, rank: usize) -> Option<WaitEdge> {
    let step = progress.reported(rank);
    if progress.outcome(step).is_some() {
        // `rank` itself has not reported the current step yet.
        return None;
    }
    let verdict = || (rank > 0).then(|| WaitEdge { awaited: "the verdict".into(), ranks: vec![0] });
    WaitEdge::by(progress, "the gradient norm", |other| progress.reported(other) >= step).or_else(verdict)
}

/// Weights are gathered from the last bucket to the first. Returns the first bucket in this order whose version some rank has not
/// published.
fn weights(progress: &ProgressCounters, rank: usize, bucket: usize) -> Option<WaitEdge> {
    let version = progress.settled(rank, bucket);
    let missing =
        |bucket| WaitEdge::by(progress, format!("the weights of bucket {bucket}"), |other| progress.settled(other, bucket) >= version);
    (bucket..progress.buckets() as usize).rev().find_map(missing)
}

/// The local ranks that are behind `rank` in fetching a module's weights. A fetch counts as two halves.
fn fetch(progress: &ProgressCounters, rank: usize) -> Option<WaitEdge> {
    let is_behind = |other: &usize| progress.local_ranks().contains(other) && progress.fetched(*other) < progress.fetched(rank);
    WaitEdge::by(progress, "the weights of a module", |other| !is_behind(&other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::progress::{CounterSizes, StepOutcome};

    const RANKS: usize = 3;

    fn progress() -> ProgressCounters {
        ProgressCounters::new(CounterSizes { ranks: RANKS, buckets: 4, norm_partials: 4, partial_sums: 3, ..CounterSizes::default() }, None)
    }

    /// The description of the publication that each rank waits for in the state `activity`.
    fn waits(progress: &ProgressCounters, activity: DriverActivity, number: u64) -> [String; RANKS] {
        std::array::from_fn(|rank| WaitEdge::of(progress, rank, (activity, number)).map_or(String::new(), |missing| missing.to_string()))
    }

    fn write(progress: &ProgressCounters, rank: usize, buckets: usize) {
        (0..buckets).for_each(|_| progress.publish_written(rank));
        name_buckets(progress, rank);
    }

    fn pull(progress: &ProgressCounters, rank: usize, buckets: usize) {
        (0..buckets).for_each(|_| progress.publish_pulled(rank));
        name_buckets(progress, rank);
    }

    fn name_buckets(progress: &ProgressCounters, rank: usize) {
        let buckets = [progress.written(rank).saturating_sub(1), progress.pulled(rank)].map(|count| count % progress.buckets());
        progress.name_buckets(rank, buckets.map(|bucket| bucket as usize));
    }

    #[test]
    fn a_summing_rank_waits_for_gradients_and_a_summed_one_for_pulls() {
        let progress = progress();
        // In the second round of four buckets: rank 2 is one bucket behind, and rank 1 has all of its sums but one.
        [7, 7, 6].into_iter().enumerate().for_each(|(rank, buckets)| write(&progress, rank, buckets));
        [6, 5, 6].into_iter().enumerate().for_each(|(rank, buckets)| pull(&progress, rank, buckets));
        for activity in [DriverActivity::Sums, DriverActivity::Gradient, DriverActivity::Norm] {
            assert_eq!(waits(&progress, activity, 0)[..2], ["the gradient of bucket 2 of rank 2", ""]);
        }
        write(&progress, 2, 1);
        [0, 2].into_iter().for_each(|rank| pull(&progress, rank, 1));
        assert_eq!(waits(&progress, DriverActivity::Sums, 0), ["the pull of bucket 2 of rank 1", "", "the pull of bucket 2 of rank 1"]);
        assert_eq!(waits(&progress, DriverActivity::Params, 1), [""; RANKS]);
    }

    #[test]
    fn the_norm_waits_for_every_report_and_then_for_rank_0() {
        let progress = progress();
        let outcome = StepOutcome { norm_sq: 1.0, nonfinite: false, loss: 1.0 };
        (0..RANKS).for_each(|rank| progress.publish_report(rank, false, 4));
        progress.publish_outcome(4, outcome);
        assert_eq!(waits(&progress, DriverActivity::Norm, 0), [""; RANKS], "nobody has reported");
        progress.publish_report(0, false, 5);
        assert_eq!(waits(&progress, DriverActivity::Norm, 0), ["the gradient norm of ranks 1, 2", "", ""]);
        (1..RANKS).for_each(|rank| progress.publish_report(rank, false, 5));
        assert_eq!(waits(&progress, DriverActivity::Norm, 0), ["", "the verdict of rank 0", "the verdict of rank 0"]);
    }

    #[test]
    fn a_gathering_rank_waits_for_the_last_missing_bucket() {
        let progress = progress();
        [(0, 3, 2), (1, 3, 2), (2, 3, 2), (0, 2, 2), (2, 2, 2), (0, 1, 2)]
            .into_iter()
            .for_each(|(rank, b, v)| progress.publish_settled(rank, b, v));
        assert_eq!(waits(&progress, DriverActivity::Gather, 1)[0], "the weights of bucket 2 of rank 1");
        progress.publish_settled(1, 2, 2);
        assert_eq!(waits(&progress, DriverActivity::Gather, 1)[0], "the weights of bucket 1 of ranks 1, 2");
        (1..3).for_each(|rank| progress.publish_settled(rank, 1, 2));
        (0..2).for_each(|rank| progress.publish_fetched(rank));
        assert_eq!(
            waits(&progress, DriverActivity::Gather, 1),
            ["the weights of a module of rank 2", "the weights of a module of rank 2", ""]
        );
    }

    #[test]
    fn a_rank_that_hands_over_waits_for_its_sequence_group() {
        let progress = ProgressCounters::new(
            CounterSizes { ranks: 4, buckets: 4, norm_partials: 4, partial_sums: 4, ..CounterSizes::default() },
            None,
        );
        (0..3).for_each(|rank| progress.publish_handed(rank));
        progress.publish_handed(0);
        let waits =
            |rank| WaitEdge::of(&progress, rank, (DriverActivity::HandOver, 2)).map_or(String::new(), |missing| missing.to_string());
        assert_eq!([0, 1, 2, 3].map(waits), ["activations of rank 1", "", "activations of rank 3", ""]);
    }

    #[test]
    fn orders_are_waited_for_on_both_sides() {
        let progress = progress();
        progress.give_order(1, [0; 6]);
        progress.publish_done(2);
        assert_eq!(waits(&progress, DriverActivity::Orders, 0)[0], "the reply of rank 1");
        // Rank 1 has not started on the order.
        assert_eq!(waits(&progress, DriverActivity::Else, 0), ["", "", "the next order of rank 0"]);
    }
}
