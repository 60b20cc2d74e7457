//! The board: what ranks tell each other, all of it in atomics. A rank writes its own entries, everybody reads all.
//!
//! Counts only go up, from the first step to the last, so that nothing is ever taken back. Whoever has read a count sees what was
//! done before it was published (release and acquire): an event, in particular, that was recorded before.

use super::baton::Baton;
use crate::error::Error;
use crate::host::doorbell::Doorbell;
use crate::trace::{Recorder, now_ns};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Numbers that a rank tells of a step when it is over.
pub(crate) const AMOUNTS: usize = 14;

/// Numbers that go with an order.
pub(crate) const ORDER_WORDS: usize = 6;

/// What rank 0 finds in the reports of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Sum of squares of all gradients.
    pub norm_sq: f64,
    /// Whether one of them is infinite or NaN.
    pub nonfinite: bool,
    /// The step's loss.
    pub loss: f32,
}

/// What one rank tells.
#[derive(Debug)]
struct Entry {
    /// Gradients of so many buckets are enqueued on its compute stream, and each one's event is recorded.
    written: AtomicU64,
    /// So many have been pulled from all others, and the event is recorded.
    pulled: AtomicU64,
    /// For each bucket: its weights are final in so many versions, and the event of what writes them is recorded.
    settled: Box<[AtomicU64]>,
    /// So many of its partial sums are on the board.
    partials: AtomicU64,
    /// The step whose losses and flag are on the board.
    reported: AtomicU64,
    nonfinite: AtomicBool,
    /// What it did in its last step.
    amounts: [AtomicU64; AMOUNTS],
    /// Rows of each expert of each layer in its last step.
    expert_rows: Box<[AtomicU64]>,
    /// Orders that it has carried out.
    done: AtomicU64,
    /// How often it has come to where all ranks meet, between two steps.
    met: AtomicU64,
    /// When it changed any of these last, by [`now_ns`].
    published_ns: AtomicU64,
    /// Its tracks of the timeline, when it has ended.
    tracks: OnceLock<Vec<Recorder>>,
}

/// The board of one process.
pub(crate) struct Board {
    /// One a rank, or rank 0's alone, of which all others are mirror images.
    entries: Vec<Entry>,
    bells: Vec<Arc<Doorbell>>,
    /// The norm's partial sums of all ranks, in flat order, as bits.
    partials: Box<[AtomicU32]>,
    /// The loss of each share, as bits.
    losses: Box<[AtomicU32]>,
    /// Norm, loss and flag of the step `outcome_step`.
    outcome: [AtomicU64; 3],
    outcome_step: AtomicU64,
    /// The order given last: how many there were, its number and what goes with it.
    orders: AtomicU64,
    order: [AtomicU64; ORDER_WORDS + 1],
    /// Data that an order is about.
    mail: Box<[AtomicU32]>,
    failure: OnceLock<(usize, String)>,
    on_gpus: bool,
    baton: Option<Baton>,
}

/// Sizes of a [`Board`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    /// Ranks.
    pub ranks: usize,
    /// Buckets.
    pub buckets: usize,
    /// Partial sums of the norm.
    pub partials: usize,
    /// Shares of a step.
    pub shares: usize,
    /// Experts of all layers.
    pub experts: usize,
    /// Words of the mail.
    pub mail_words: usize,
    /// Whether each rank is a GPU, and known by it.
    pub on_gpus: bool,
}

impl Sizes {
    /// Bytes that the board takes for numbers whose count depends on the model.
    pub fn bytes(&self) -> usize {
        4 * (self.partials + self.shares + self.mail_words) + 8 * self.ranks * (self.buckets + self.experts)
    }
}

fn zeros<T: Default>(count: usize) -> Box<[T]> {
    (0..count).map(|_| T::default()).collect()
}

impl Board {
    /// An empty board; with `adversary`, a seed, exactly one rank runs at a time.
    pub(crate) fn new(sizes: Sizes, adversary: Option<u64>) -> Self {
        Self::with_entries(sizes.ranks, sizes, adversary)
    }

    /// A board on which all ranks have published what rank 0 has, the only one that is there.
    pub(crate) fn mirrored(sizes: Sizes) -> Self {
        Self::with_entries(1, sizes, None)
    }

    fn with_entries(entries: usize, sizes: Sizes, adversary: Option<u64>) -> Self {
        let bells: Vec<Arc<Doorbell>> = (0..sizes.ranks).map(|_| Arc::default()).collect();
        let entry = || Entry {
            written: AtomicU64::new(0),
            pulled: AtomicU64::new(0),
            settled: zeros(sizes.buckets),
            partials: AtomicU64::new(0),
            reported: AtomicU64::new(0),
            nonfinite: AtomicBool::new(false),
            amounts: Default::default(),
            expert_rows: zeros(sizes.experts),
            done: AtomicU64::new(0),
            met: AtomicU64::new(0),
            published_ns: AtomicU64::new(0),
            tracks: OnceLock::new(),
        };
        Self {
            entries: (0..entries).map(|_| entry()).collect(),
            baton: adversary.map(|seed| Baton::new(seed, bells.clone())),
            bells,
            partials: zeros(sizes.partials),
            losses: zeros(sizes.shares),
            outcome: Default::default(),
            outcome_step: AtomicU64::new(0),
            orders: AtomicU64::new(0),
            order: Default::default(),
            mail: zeros(sizes.mail_words),
            failure: OnceLock::new(),
            on_gpus: sizes.on_gpus,
        }
    }

    /// How many ranks meet here.
    pub(crate) fn ranks(&self) -> usize {
        self.bells.len()
    }

    /// What `rank` tells, or the one of which it is an image.
    fn entry(&self, rank: usize) -> &Entry {
        self.entries.get(rank).unwrap_or(&self.entries[0])
    }

    /// How many buckets they have.
    pub(crate) fn buckets(&self) -> u64 {
        self.entries[0].settled.len() as u64
    }

    /// The bell that wakes the driver of `rank`.
    pub(crate) fn bell(&self, rank: usize) -> Arc<Doorbell> {
        self.bells[rank].clone()
    }

    /// What decides whose turn it is, in tests.
    pub(crate) fn baton(&self) -> Option<&Baton> {
        self.baton.as_ref()
    }

    fn others(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranks()).filter(move |other| *other != rank)
    }

    /// `rank` has changed its entries.
    fn ring_others(&self, rank: usize) {
        self.entry(rank).published_ns.store(now_ns(), Ordering::Release);
        self.baton.iter().for_each(Baton::progress);
        self.others(rank).for_each(|other| self.bells[other].ring());
    }

    /// When a rank other than `rank` published last, by [`now_ns`]; 0 before, and from mirror images, which do nothing of their own.
    pub(crate) fn published_ns(&self, rank: usize) -> u64 {
        let others = self.entries.iter().enumerate().filter(|(other, _)| *other != rank);
        others.map(|(_, entry)| entry.published_ns.load(Ordering::Acquire)).max().unwrap_or(0)
    }

    /// One more bucket of `rank` is written; its event is recorded.
    pub(crate) fn publish_written(&self, rank: usize) {
        self.entry(rank).written.fetch_add(1, Ordering::Release);
        self.ring_others(rank);
    }

    /// Buckets that `rank` has written.
    pub(crate) fn written(&self, rank: usize) -> u64 {
        self.entry(rank).written.load(Ordering::Acquire)
    }

    /// Whether every rank has written more than `nth` buckets.
    pub(crate) fn all_written(&self, nth: u64) -> bool {
        (0..self.ranks()).all(|rank| self.written(rank) > nth)
    }

    /// One more bucket of `rank` is pulled; its event is recorded.
    pub(crate) fn publish_pulled(&self, rank: usize) {
        self.entry(rank).pulled.fetch_add(1, Ordering::Release);
        self.ring_others(rank);
    }

    /// Buckets that `rank` has pulled.
    pub(crate) fn pulled(&self, rank: usize) -> u64 {
        self.entry(rank).pulled.load(Ordering::Acquire)
    }

    /// Whether every rank has pulled at least `count` buckets.
    pub(crate) fn all_pulled(&self, count: u64) -> bool {
        (0..self.ranks()).all(|rank| self.pulled(rank) >= count)
    }

    /// Version `version` of the weights of the slice of `bucket` that `rank` owns is final; the event of what writes them is recorded.
    pub(crate) fn publish_settled(&self, rank: usize, bucket: usize, version: u64) {
        self.entry(rank).settled[bucket].store(version, Ordering::Release);
        self.ring_others(rank);
    }

    /// The version of `bucket` that `rank` has published.
    pub(crate) fn settled(&self, rank: usize, bucket: usize) -> u64 {
        self.entry(rank).settled[bucket].load(Ordering::Acquire)
    }

    /// Writes partial sums of the norm from `start` on.
    pub(crate) fn write_partials(&self, start: usize, values: &[f32]) {
        self.partials[start..].iter().zip(values).for_each(|(word, value)| word.store(value.to_bits(), Ordering::Relaxed));
    }

    /// `count` more partial sums of `rank` are on the board.
    pub(crate) fn publish_partials(&self, rank: usize, count: usize) {
        self.entry(rank).partials.fetch_add(count as u64, Ordering::Release);
        self.ring_others(rank);
    }

    /// Partial sums that `rank` has published, in all steps. A mirror image, whose slice may be longer, has all.
    pub(crate) fn published_partials(&self, rank: usize) -> u64 {
        self.entries.get(rank).map_or(u64::MAX, |entry| entry.partials.load(Ordering::Acquire))
    }

    /// The partial sum at `at`.
    pub(crate) fn partial(&self, at: usize) -> f32 {
        f32::from_bits(self.partials[at].load(Ordering::Relaxed))
    }

    /// Writes the loss of `share`.
    pub(crate) fn write_loss(&self, share: usize, loss: f32) {
        self.losses[share].store(loss.to_bits(), Ordering::Relaxed);
    }

    /// Losses and flag of `rank` are those of `step`.
    pub(crate) fn publish_report(&self, rank: usize, nonfinite: bool, step: u64) {
        self.entry(rank).nonfinite.store(nonfinite, Ordering::Relaxed);
        self.entry(rank).reported.store(step, Ordering::Release);
        self.ring_others(rank);
    }

    /// The step that `rank` has reported last.
    pub(crate) fn reported(&self, rank: usize) -> u64 {
        self.entry(rank).reported.load(Ordering::Acquire)
    }

    /// Of `step`, whether a gradient of any rank is infinite or NaN, and the sum of the shares' losses in their order; `None` until every
    /// rank has told.
    pub(crate) fn reports(&self, step: u64) -> Option<(bool, f32)> {
        let all = (0..self.ranks()).all(|rank| self.reported(rank) >= step);
        let nonfinite = || self.entries.iter().any(|entry| entry.nonfinite.load(Ordering::Relaxed));
        all.then(|| (nonfinite(), self.losses() as f32))
    }

    /// The sum of the shares' losses, in their order.
    pub(crate) fn losses(&self) -> f64 {
        self.losses.iter().map(|bits| f64::from(f32::from_bits(bits.load(Ordering::Relaxed)))).sum()
    }

    /// What rank 0 found in `step`.
    pub(crate) fn publish_outcome(&self, step: u64, outcome: StepOutcome) {
        let words = [outcome.norm_sq.to_bits(), u64::from(outcome.loss.to_bits()), u64::from(outcome.nonfinite)];
        self.outcome.iter().zip(words).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        self.outcome_step.store(step, Ordering::Release);
        self.ring_others(0);
    }

    /// The outcome of `step`, once it is known.
    pub(crate) fn outcome(&self, step: u64) -> Option<StepOutcome> {
        let word = |at: usize| self.outcome[at].load(Ordering::Relaxed);
        let outcome = || StepOutcome { norm_sq: f64::from_bits(word(0)), loss: f32::from_bits(word(1) as u32), nonfinite: word(2) != 0 };
        (self.outcome_step.load(Ordering::Acquire) >= step).then(outcome)
    }

    /// Rank 0 gives all others an order: a number, and what goes with it. They must have carried out the one before.
    pub(crate) fn give_order(&self, number: u64, words: [u64; ORDER_WORDS]) {
        self.order.iter().zip([number].into_iter().chain(words)).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        self.orders.fetch_add(1, Ordering::Release);
        self.ring_others(0);
    }

    /// The order after `seen` others, if it was given.
    pub(crate) fn next_order(&self, seen: u64) -> Option<(u64, [u64; ORDER_WORDS])> {
        let word = |at: usize| self.order[at].load(Ordering::Relaxed);
        (self.orders.load(Ordering::Acquire) > seen).then(|| (word(0), std::array::from_fn(|at| word(at + 1))))
    }

    /// What `rank` did in a step; that it has carried out its order tells of it.
    pub(crate) fn write_amounts(&self, rank: usize, amounts: impl Iterator<Item = u64>) {
        self.entry(rank).amounts.iter().zip(amounts).for_each(|(place, amount)| place.store(amount, Ordering::Relaxed));
    }

    /// What `rank` did in its last step.
    pub(crate) fn amounts(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        self.entry(rank).amounts.iter().map(|amount| amount.load(Ordering::Relaxed))
    }

    /// How many rows each expert had on `rank` in a step, told as [`Board::write_amounts`] tells.
    pub(crate) fn write_expert_rows(&self, rank: usize, rows: &[u64]) {
        self.entry(rank).expert_rows.iter().zip(rows).for_each(|(place, rows)| place.store(*rows, Ordering::Relaxed));
    }

    /// And in its last step.
    pub(crate) fn expert_rows(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        self.entry(rank).expert_rows.iter().map(|rows| rows.load(Ordering::Relaxed))
    }

    /// `rank` has ended, and these are its tracks of the timeline.
    pub(crate) fn publish_tracks(&self, rank: usize, tracks: Vec<Recorder>) {
        // It ends once.
        let _ = self.entry(rank).tracks.set(tracks);
    }

    /// The tracks of `rank`; none until it has ended.
    pub(crate) fn tracks(&self, rank: usize) -> &[Recorder] {
        self.entry(rank).tracks.get().map_or(&[], Vec::as_slice)
    }

    /// `rank` has carried out one more order.
    pub(crate) fn publish_done(&self, rank: usize) {
        self.entry(rank).done.fetch_add(1, Ordering::Release);
        self.ring_others(rank);
    }

    /// Whether `rank` has carried out every order; rank 0, who gives them, always has, and so have its images.
    pub(crate) fn is_done(&self, rank: usize) -> bool {
        let orders = self.orders.load(Ordering::Relaxed);
        rank == 0 || self.entries.get(rank).is_none_or(|entry| entry.done.load(Ordering::Acquire) == orders)
    }

    /// Whether all ranks have.
    pub(crate) fn all_done(&self) -> bool {
        (0..self.ranks()).all(|rank| self.is_done(rank))
    }

    /// `rank` has come to where all meet.
    pub(crate) fn publish_met(&self, rank: usize) {
        self.entry(rank).met.fetch_add(1, Ordering::Release);
        self.ring_others(rank);
    }

    /// Whether all ranks have come there at least `count` times.
    pub(crate) fn all_met(&self, count: u64) -> bool {
        (0..self.ranks()).all(|rank| self.entry(rank).met.load(Ordering::Acquire) >= count)
    }

    /// Puts words into the mail from `start` on. An order tells of them.
    pub(crate) fn post(&self, start: usize, words: impl IntoIterator<Item = u32>) {
        self.mail[start..].iter().zip(words).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
    }

    /// Words of the mail from `start` on.
    pub(crate) fn mail(&self, start: usize) -> impl Iterator<Item = u32> + '_ {
        self.mail[start..].iter().map(|word| word.load(Ordering::Relaxed))
    }

    /// Words that the mail has room for.
    pub(crate) fn mail_words(&self) -> usize {
        self.mail.len()
    }

    /// `rank` cannot go on, and so nobody can; the first to say so is named.
    pub(crate) fn fail(&self, rank: usize, why: &str) {
        // A later failure is mostly a consequence of the first.
        let _ = self.failure.set((rank, why.to_string()));
        self.bells.iter().for_each(|bell| bell.ring());
    }

    /// What ended all ranks, if something did.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.get().map(|(rank, why)| self.error_of(*rank, why.clone()))
    }

    /// What `rank` says, as an error.
    pub(crate) fn error_of(&self, rank: usize, cause: String) -> Error {
        Error::Rank { name: self.name(rank), cause }
    }

    fn name(&self, rank: usize) -> String {
        if self.on_gpus { format!("rank {rank} (GPU {rank})") } else { format!("rank {rank}") }
    }

    /// Whether all ranks end.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board(ranks: usize) -> Board {
        Board::new(Sizes { ranks, buckets: 3, partials: 4, shares: 2, mail_words: 5, on_gpus: ranks == 3, ..Sizes::default() }, None)
    }

    #[test]
    fn what_all_have_told_is_what_the_last_has_told() {
        let board = board(3);
        for rank in [2, 0] {
            board.publish_written(rank);
            board.publish_pulled(rank);
            board.publish_met(rank);
            board.publish_report(rank, rank == 2, 7);
        }
        assert!(!board.all_met(1) && !board.all_written(0) && !board.all_pulled(1) && board.all_pulled(0) && board.reports(7).is_none());
        board.publish_written(1);
        board.publish_pulled(1);
        board.publish_met(1);
        board.write_loss(1, 0.5);
        board.write_loss(0, 1.0);
        board.publish_report(1, false, 7);
        assert!(board.all_written(0) && !board.all_written(1) && board.all_pulled(1) && board.all_met(1) && !board.all_met(2));
        assert_eq!((board.reports(7), board.reports(8)), (Some((true, 1.5)), None));
    }

    #[test]
    fn a_publication_has_a_time_for_all_others() {
        let (board, before) = (board(2), now_ns());
        board.publish_written(1);
        let at = board.published_ns(0);
        assert!(before <= at && at <= now_ns() && board.published_ns(1) == 0);
    }

    #[test]
    fn mirror_images_have_published_what_rank_0_has() {
        let board = Board::mirrored(Sizes { ranks: 3, buckets: 3, partials: 4, shares: 3, mail_words: 5, ..Sizes::default() });
        assert!(board.ranks() == 3 && !board.all_written(0) && !board.all_pulled(1) && board.settled(2, 1) == 0);
        board.publish_written(0);
        board.publish_pulled(0);
        board.publish_settled(0, 1, 4);
        board.publish_partials(0, 2);
        board.publish_report(0, false, 1);
        board.give_order(1, [0; ORDER_WORDS]);
        assert!(board.all_written(0) && !board.all_written(1) && board.all_pulled(1) && board.all_done());
        assert_eq!([0, 2].map(|rank| (board.settled(rank, 1), board.settled(rank, 0))), [(4, 0); 2]);
        assert_eq!([0, 2].map(|rank| board.published_partials(rank)), [2, u64::MAX]);
        assert_eq!(board.reports(1), Some((false, 0.0)));
        assert_eq!(board.published_ns(0), 0);
    }

    #[test]
    fn orders_come_one_after_the_other_with_their_mail() {
        let board = board(2);
        assert!(board.all_done() && board.next_order(0).is_none());
        board.post(3, [8, 9]);
        board.give_order(4, [1, 2, 3, 4, 5, 6]);
        assert_eq!(board.next_order(0), Some((4, [1, 2, 3, 4, 5, 6])));
        assert!(board.mail(2).eq([0, 8, 9]) && !board.all_done() && board.next_order(1).is_none());
        board.publish_done(1);
        assert!(board.all_done());
    }

    #[test]
    fn the_first_failure_is_the_one_that_is_told() {
        let board = board(3);
        assert!(board.failure().is_none());
        board.fail(1, "no memory");
        board.fail(2, "rank 1 is gone");
        assert_eq!(board.failure().unwrap().to_string(), "rank 1 (GPU 1): no memory");
    }

    #[test]
    fn an_outcome_comes_back_to_the_bit() {
        let (board, outcome) = (board(2), StepOutcome { norm_sq: f64::NAN, nonfinite: true, loss: -0.0 });
        board.publish_outcome(3, outcome);
        let read = board.outcome(3).unwrap();
        assert_eq!((read.norm_sq.to_bits(), read.nonfinite, read.loss.to_bits()), (f64::NAN.to_bits(), true, 0x8000_0000));
        assert!(board.outcome(4).is_none());
    }
}
