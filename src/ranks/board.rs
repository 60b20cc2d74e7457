//! The board: what ranks tell each other, all of it in atomics. A rank writes its own entries, everybody reads all.
//!
//! Counts only go up, from the first step to the last, so that nothing is ever taken back. Whoever has read a count sees what was
//! done before it was published (release and acquire): an event, in particular, that was recorded before.
//!
//! Of several processes each has a board: what its own ranks publish it tells the others, who hear it in the same order.

use super::baton::Baton;
use super::notice::{Audience, Notice, Outbox, TAIL_MAX, Topic};
use crate::error::Error;
use crate::host::doorbell::Doorbell;
use crate::trace::{Recorder, now_ns};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Numbers that a rank tells of a step when it is over.
pub(crate) const AMOUNTS: usize = 14;

/// Numbers that go with an order.
pub(crate) const ORDER_WORDS: usize = 6;

/// What rank 0 finds in the reports of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepOutcome {
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
    /// So often it has handed over activations to those that share its sequences, and each time's event is recorded.
    handed: AtomicU64,
    /// So many have been pulled from all others, and the event is recorded.
    pulled: AtomicU64,
    /// The slices of so many buckets of weights have come to it from its namesakes, in all versions, and each one's event is recorded.
    carried: AtomicU64,
    /// Twice for each module that it fetched: what it carries of the weights has come, and it has pulled what the others of its process have; each
    /// time's event is recorded.
    fetched: AtomicU64,
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

/// The other processes, as a board knows them.
pub(crate) struct Abroad {
    /// Which process this is.
    pub(crate) process: usize,
    /// Who a process is, in words: by its number. All have as many ranks.
    pub(crate) names: Vec<String>,
    pub(crate) outbox: Arc<dyn Outbox>,
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
    /// Who cannot go on, and why.
    failure: OnceLock<(String, String)>,
    on_gpus: bool,
    baton: Option<Baton>,
    /// The ranks of this process.
    mates: Range<usize>,
    abroad: Option<Abroad>,
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

/// Whether `count` more after the `first` are among `places`.
fn fits<T>(places: &[T], first: u64, count: usize) -> bool {
    (places.len() as u64).checked_sub(first).is_some_and(|rest| count as u64 <= rest)
}

fn store(places: &[AtomicU32], notice: &Notice) {
    places.iter().zip(notice.words()).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
}

fn store_long(places: &[AtomicU64], notice: &Notice) {
    places.iter().zip(notice.long_words()).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
}

impl Board {
    /// An empty board; with `adversary`, a seed, exactly one rank runs at a time.
    pub(crate) fn new(sizes: Sizes, adversary: Option<u64>) -> Self {
        Self::with_entries(sizes.ranks, sizes, adversary)
    }

    /// A board on which all ranks have published what rank 0 has, the only one that is there. Its process has so many `mates`, itself among them.
    pub(crate) fn mirrored(sizes: Sizes, mates: usize) -> Self {
        Self { mates: 0..mates, ..Self::with_entries(1, sizes, None) }
    }

    /// A board of one of several processes.
    pub(crate) fn linked(sizes: Sizes, abroad: Abroad) -> Self {
        let each = sizes.ranks / abroad.names.len();
        let mates = abroad.process * each..(abroad.process + 1) * each;
        Self { mates, abroad: Some(abroad), ..Self::with_entries(sizes.ranks, sizes, None) }
    }

    fn with_entries(entries: usize, sizes: Sizes, adversary: Option<u64>) -> Self {
        let bells: Vec<Arc<Doorbell>> = (0..sizes.ranks).map(|_| Arc::default()).collect();
        let entry = || Entry {
            written: AtomicU64::new(0),
            handed: AtomicU64::new(0),
            pulled: AtomicU64::new(0),
            carried: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
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
            mates: 0..sizes.ranks,
            abroad: None,
        }
    }

    /// How many ranks meet here.
    pub(crate) fn ranks(&self) -> usize {
        self.bells.len()
    }

    /// The ranks of this process.
    pub(crate) fn mates(&self) -> Range<usize> {
        self.mates.clone()
    }

    /// The ranks of `process`, if there are several.
    fn ranks_of(&self, process: usize) -> Range<usize> {
        let each = self.ranks() / self.abroad.as_ref().map_or(1, |abroad| abroad.names.len());
        process * each..(process + 1) * each
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
        self.wake(self.others(rank));
    }

    /// A device of a rank of this process has done something that it did not publish.
    pub(crate) fn ring_mates(&self) {
        self.wake(self.mates());
    }

    /// Lets `ranks` look again; with a baton, who has it next does anyway.
    fn wake(&self, ranks: impl Iterator<Item = usize>) {
        match &self.baton {
            Some(baton) => baton.progress(),
            None => ranks.for_each(|rank| self.bells[rank].ring()),
        }
    }

    /// Tells other processes what `rank` publishes, if it is one of this process's.
    fn tell(&self, rank: usize, to: Audience, notice: impl FnOnce() -> Notice) {
        if let Some(abroad) = self.abroad.as_ref().filter(|_| self.mates().contains(&rank)) {
            abroad.outbox.tell(to, notice());
        }
    }

    /// As [`Board::tell`], what only ranks of this process can publish, in pieces of `bytes` of `elem_bytes` each: the topic's numbers are
    /// made of the piece's first element, which lies at `start` and after.
    fn tell_long(&self, to: Audience, start: usize, (bytes, elem_bytes): (Vec<u8>, usize), notice: impl Fn(u64) -> Notice) {
        for (nth, piece) in bytes.chunks(TAIL_MAX).enumerate() {
            let first = start + nth * (TAIL_MAX / elem_bytes);
            self.abroad.iter().for_each(|abroad| abroad.outbox.tell(to, notice(first as u64).with(piece.to_vec())));
        }
    }

    /// When a rank other than `rank` published last, by [`now_ns`]; 0 before, and from mirror images, which do nothing of their own.
    pub(crate) fn published_ns(&self, rank: usize) -> u64 {
        let others = self.entries.iter().enumerate().filter(|(other, _)| *other != rank);
        others.map(|(_, entry)| entry.published_ns.load(Ordering::Acquire)).max().unwrap_or(0)
    }

    /// One more bucket of `rank` is written; its event is recorded.
    pub(crate) fn publish_written(&self, rank: usize) {
        self.entry(rank).written.fetch_add(1, Ordering::Release);
        self.tell(rank, Audience::All, || Notice::new(Topic::Written, &[rank as u64]));
        self.ring_others(rank);
    }

    /// Buckets that `rank` has written.
    pub(crate) fn written(&self, rank: usize) -> u64 {
        self.entry(rank).written.load(Ordering::Acquire)
    }

    /// Whether every rank of this process has written more than `nth` buckets.
    pub(crate) fn all_written(&self, nth: u64) -> bool {
        self.mates().all(|rank| self.written(rank) > nth)
    }

    /// `rank` hands over activations once more; the event is recorded. Those that share its sequences are of its process.
    pub(crate) fn publish_handed(&self, rank: usize) {
        self.entry(rank).handed.fetch_add(1, Ordering::Release);
        self.ring_others(rank);
    }

    /// How often `rank` has.
    pub(crate) fn handed(&self, rank: usize) -> u64 {
        self.entry(rank).handed.load(Ordering::Acquire)
    }

    /// One more bucket of `rank` is pulled; its event is recorded.
    pub(crate) fn publish_pulled(&self, rank: usize) {
        self.entry(rank).pulled.fetch_add(1, Ordering::Release);
        self.tell(rank, Audience::All, || Notice::new(Topic::Pulled, &[rank as u64]));
        self.ring_others(rank);
    }

    /// Buckets that `rank` has pulled.
    pub(crate) fn pulled(&self, rank: usize) -> u64 {
        self.entry(rank).pulled.load(Ordering::Acquire)
    }

    /// Whether every rank of this process has pulled at least `count` buckets.
    pub(crate) fn all_pulled(&self, count: u64) -> bool {
        self.mates().all(|rank| self.pulled(rank) >= count)
    }

    /// The slices of one more bucket of weights have come to `rank` from its namesakes, for all ranks of its process; the event is recorded.
    pub(crate) fn publish_carried(&self, rank: usize) {
        self.entry(rank).carried.fetch_add(1, Ordering::Release);
        self.ring_others(rank);
    }

    /// Of how many buckets the weights have come to every rank of this process from its namesakes, in all versions.
    pub(crate) fn carried_by_all(&self) -> u64 {
        self.mates().map(|rank| self.entry(rank).carried.load(Ordering::Acquire)).min().unwrap_or(0)
    }

    /// `rank` has come half of a fetch further; the event is recorded.
    pub(crate) fn publish_fetched(&self, rank: usize) {
        self.entry(rank).fetched.fetch_add(1, Ordering::Release);
        self.ring_others(rank);
    }

    /// How many halves of fetches `rank` has behind it.
    pub(crate) fn fetched(&self, rank: usize) -> u64 {
        self.entry(rank).fetched.load(Ordering::Acquire)
    }

    /// Whether every rank of this process has at least `count`.
    pub(crate) fn all_fetched(&self, count: u64) -> bool {
        self.mates().all(|rank| self.fetched(rank) >= count)
    }

    /// Version `version` of the weights of the slice of `bucket` that `rank` owns is final; the event of what writes them is recorded.
    pub(crate) fn publish_settled(&self, rank: usize, bucket: usize, version: u64) {
        self.entry(rank).settled[bucket].store(version, Ordering::Release);
        self.tell(rank, Audience::All, || Notice::new(Topic::Settled, &[rank as u64, bucket as u64, version]));
        self.ring_others(rank);
    }

    /// The version of `bucket` that `rank` has published.
    pub(crate) fn settled(&self, rank: usize, bucket: usize) -> u64 {
        self.entry(rank).settled[bucket].load(Ordering::Acquire)
    }

    /// Writes partial sums of the norm from `start` on.
    pub(crate) fn write_partials(&self, start: usize, values: &[f32]) {
        self.partials[start..].iter().zip(values).for_each(|(word, value)| word.store(value.to_bits(), Ordering::Relaxed));
        if self.abroad.is_some() {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.tell_long(Audience::First, start, (bytes, 4), |first| Notice::new(Topic::Partials, &[first]));
        }
    }

    /// `count` more partial sums of `rank` are on the board.
    pub(crate) fn publish_partials(&self, rank: usize, count: usize) {
        self.entry(rank).partials.fetch_add(count as u64, Ordering::Release);
        self.tell(rank, Audience::First, || Notice::new(Topic::PartialsTold, &[rank as u64, count as u64]));
        self.ring_others(rank);
    }

    /// Partial sums that `rank` has published, in all steps; none of a mirror image, which computes none: they are zeros.
    pub(crate) fn published_partials(&self, rank: usize) -> Option<u64> {
        self.entries.get(rank).map(|entry| entry.partials.load(Ordering::Acquire))
    }

    /// Reads partial sums from the one at `start` on.
    pub(crate) fn read_partials(&self, start: usize, values: &mut [f32]) {
        let words = &self.partials[start..start + values.len()];
        values.iter_mut().zip(words).for_each(|(value, word)| *value = f32::from_bits(word.load(Ordering::Relaxed)));
    }

    /// Writes the loss of `share`.
    pub(crate) fn write_loss(&self, share: usize, loss: f32) {
        self.losses[share].store(loss.to_bits(), Ordering::Relaxed);
        let notice = || Notice::new(Topic::Loss, &[share as u64, u64::from(loss.to_bits())]);
        self.abroad.iter().for_each(|abroad| abroad.outbox.tell(Audience::First, notice()));
    }

    /// Losses and flag of `rank` are those of `step`.
    pub(crate) fn publish_report(&self, rank: usize, nonfinite: bool, step: u64) {
        self.entry(rank).nonfinite.store(nonfinite, Ordering::Relaxed);
        self.entry(rank).reported.store(step, Ordering::Release);
        self.tell(rank, Audience::First, || Notice::new(Topic::Reported, &[rank as u64, u64::from(nonfinite), step]));
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
        self.tell(0, Audience::All, || Notice::new(Topic::Outcome, &[step, words[0], words[1], words[2]]));
        self.put_outcome(step, words);
    }

    fn put_outcome(&self, step: u64, words: [u64; 3]) {
        self.outcome.iter().zip(words).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        self.outcome_step.store(step, Ordering::Release);
        self.ring_others(0);
    }

    /// The last step whose outcome is known; 0 before the first.
    pub(crate) fn decided_step(&self) -> u64 {
        self.outcome_step.load(Ordering::Acquire)
    }

    /// The outcome of `step`, once it is known.
    pub(crate) fn outcome(&self, step: u64) -> Option<StepOutcome> {
        let word = |at: usize| self.outcome[at].load(Ordering::Relaxed);
        let outcome = || StepOutcome { norm_sq: f64::from_bits(word(0)), loss: f32::from_bits(word(1) as u32), nonfinite: word(2) != 0 };
        (self.outcome_step.load(Ordering::Acquire) >= step).then(outcome)
    }

    /// Rank 0 gives all others an order: a number, and what goes with it. They must have carried out the one before.
    pub(crate) fn give_order(&self, number: u64, words: [u64; ORDER_WORDS]) {
        let [a, b, c, d, e, f] = words;
        self.tell(0, Audience::All, || Notice::new(Topic::Order, &[number, a, b, c, d, e, f]));
        self.put_order(number, words);
    }

    fn put_order(&self, number: u64, words: [u64; ORDER_WORDS]) {
        self.order.iter().zip([number].into_iter().chain(words)).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        self.orders.fetch_add(1, Ordering::Release);
        self.ring_others(0);
    }

    /// The order after `seen` others, if it was given.
    pub(crate) fn next_order(&self, seen: u64) -> Option<(u64, [u64; ORDER_WORDS])> {
        let word = |at: usize| self.order[at].load(Ordering::Relaxed);
        (self.orders.load(Ordering::Acquire) > seen).then(|| (word(0), std::array::from_fn(|at| word(at + 1))))
    }

    /// How many orders there were, and the number of the last one, which must have been given.
    pub(crate) fn last_order(&self) -> (u64, u64) {
        (self.orders.load(Ordering::Acquire), self.order[0].load(Ordering::Relaxed))
    }

    /// What `rank` did in a step; that it has carried out its order tells of it.
    pub(crate) fn write_amounts(&self, rank: usize, amounts: impl Iterator<Item = u64>) {
        self.entry(rank).amounts.iter().zip(amounts).for_each(|(place, amount)| place.store(amount, Ordering::Relaxed));
        let bytes = || self.amounts(rank).flat_map(u64::to_le_bytes).collect();
        self.tell(rank, Audience::First, || Notice::new(Topic::Amounts, &[rank as u64]).with(bytes()));
    }

    /// What `rank` did in its last step.
    pub(crate) fn amounts(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        self.entry(rank).amounts.iter().map(|amount| amount.load(Ordering::Relaxed))
    }

    /// How many rows each expert had on `rank` in a step, told as [`Board::write_amounts`] tells.
    pub(crate) fn write_expert_rows(&self, rank: usize, rows: &[u64]) {
        self.entry(rank).expert_rows.iter().zip(rows).for_each(|(place, rows)| place.store(*rows, Ordering::Relaxed));
        if self.abroad.is_some() {
            let bytes = rows.iter().flat_map(|rows| rows.to_le_bytes()).collect();
            self.tell_long(Audience::First, 0, (bytes, 8), |first| Notice::new(Topic::ExpertRows, &[rank as u64, first]));
        }
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
        self.tell(rank, Audience::First, || Notice::new(Topic::Done, &[rank as u64]));
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
        self.tell(rank, Audience::All, || Notice::new(Topic::Met, &[rank as u64]));
        self.ring_others(rank);
    }

    /// Whether all ranks have come there at least `count` times.
    pub(crate) fn all_met(&self, count: u64) -> bool {
        (0..self.ranks()).all(|rank| self.entry(rank).met.load(Ordering::Acquire) >= count)
    }

    /// `rank` puts words into the mail from `start` on. An order tells of them.
    pub(crate) fn post(&self, rank: usize, start: usize, words: impl IntoIterator<Item = u32>) {
        let places = self.mail[start..].iter().zip(words);
        if self.abroad.is_none() {
            return places.for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        }
        let store = |(place, word): (&AtomicU32, u32)| {
            place.store(word, Ordering::Relaxed);
            word.to_le_bytes()
        };
        let to = if rank == 0 { Audience::All } else { Audience::First };
        self.tell_long(to, start, (places.flat_map(store).collect(), 4), |first| Notice::new(Topic::Mail, &[first]));
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
        let cause = if self.abroad.is_some() && self.mates().len() > 1 { format!("rank {rank}: {why}") } else { why.to_string() };
        if self.end(self.name(rank), &cause) {
            self.tell(rank, Audience::All, || Notice::new(Topic::Failed, &[rank as u64]).saying(&cause));
        }
    }

    /// `process` cannot go on, as was heard here.
    pub(crate) fn lose(&self, process: usize, why: &str) {
        self.abroad.iter().for_each(|abroad| _ = self.end(abroad.names[process].clone(), why));
    }

    /// `name`, a rank or a process, cannot go on, as an error of this process says, which is no news to the others.
    pub(crate) fn end_for(&self, name: &str, why: &str) {
        self.end(name.to_owned(), why);
    }

    /// `rank` has done what it had to: the others of its process end, and nobody else hears of it.
    pub(crate) fn leave(&self, rank: usize) {
        self.end(self.name(rank), "its run is over");
    }

    /// All ranks of this process end; whether nothing had ended them before.
    fn end(&self, name: String, why: &str) -> bool {
        // A later failure is mostly a consequence of the first.
        let is_first = self.failure.set((name, why.to_string())).is_ok();
        self.bells.iter().for_each(|bell| bell.ring());
        is_first
    }

    /// What ended all ranks, if something did.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.get().map(|(name, why)| Error::Rank { name: name.clone(), cause: why.clone() })
    }

    /// What `rank` says, as an error.
    pub(crate) fn error_of(&self, rank: usize, cause: String) -> Error {
        Error::Rank { name: self.name(rank), cause }
    }

    /// The process of `rank`, or the rank where there is one process.
    pub(crate) fn name(&self, rank: usize) -> String {
        if let Some(abroad) = &self.abroad {
            return abroad.names[rank / self.mates().len()].clone();
        }
        if self.on_gpus { format!("rank {rank} (GPU {rank})") } else { format!("rank {rank}") }
    }

    /// Takes what `process` tells of its ranks.
    ///
    /// # Errors
    /// What makes no sense, in words: a number that is too large, a rank that is not the sender's, an order by another than process 0.
    pub(crate) fn hear(&self, process: usize, notice: &Notice) -> std::result::Result<(), String> {
        let theirs = self.ranks_of(process);
        let is_theirs = |rank: &u64| theirs.contains(&(*rank as usize));
        let wrong = || format!("{:?} {:?} with {} bytes", notice.topic, notice.numbers(), notice.tail.len());
        let is_possible = match (notice.topic, notice.numbers()) {
            (Topic::Settled, [of, bucket, _]) => is_theirs(of) && *bucket < self.buckets(),
            (Topic::PartialsTold, [of, count]) => is_theirs(of) && *count <= self.partials.len() as u64,
            (Topic::ExpertRows, [of, first]) => {
                is_theirs(of) && fits(&self.entry(*of as usize).expert_rows, *first, notice.long_words().len())
            }
            (Topic::Partials, [first]) => fits(&self.partials, *first, notice.words().len()),
            (Topic::Mail, [first]) => fits(&self.mail, *first, notice.words().len()),
            (Topic::Loss, [share, bits]) => *share < self.losses.len() as u64 && *bits <= u64::from(u32::MAX),
            (Topic::Outcome | Topic::Order, _) => process == 0,
            (_, [of, ..]) => is_theirs(of),
            _ => false,
        };
        if !is_possible {
            return Err(wrong());
        }
        self.take(notice);
        Ok(())
    }

    /// Publishes here what another process has published there. What is of a rank names it first.
    fn take(&self, notice: &Notice) {
        let rank = notice.numbers().first().map_or(0, |rank| *rank as usize);
        match (notice.topic, notice.numbers()) {
            (Topic::Written, _) => self.publish_written(rank),
            (Topic::Pulled, _) => self.publish_pulled(rank),
            (Topic::Settled, [_, bucket, version]) => self.publish_settled(rank, *bucket as usize, *version),
            (Topic::PartialsTold, [_, count]) => self.publish_partials(rank, *count as usize),
            (Topic::Reported, [_, nonfinite, step]) => self.publish_report(rank, *nonfinite != 0, *step),
            (Topic::Done, _) => self.publish_done(rank),
            (Topic::Met, _) => self.publish_met(rank),
            (Topic::Failed, _) => self.fail(rank, &notice.text()),
            (Topic::Outcome, [step, norm, loss, flag]) => self.put_outcome(*step, [*norm, *loss, *flag]),
            (Topic::Order, [number, a, b, c, d, e, f]) => self.put_order(*number, [*a, *b, *c, *d, *e, *f]),
            (Topic::Loss, [share, bits]) => self.losses[*share as usize].store(*bits as u32, Ordering::Relaxed),
            (Topic::Amounts, _) => store_long(&self.entry(rank).amounts, notice),
            (Topic::ExpertRows, [_, first]) => store_long(&self.entry(rank).expert_rows[*first as usize..], notice),
            (Topic::Partials, [first]) => store(&self.partials[*first as usize..], notice),
            (Topic::Mail, [first]) => store(&self.mail[*first as usize..], notice),
            // What is about no rank does not come here.
            _ => {}
        }
    }

    /// Whether all ranks end.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }
}

#[cfg(test)]
#[path = "board_tests.rs"]
mod tests;
