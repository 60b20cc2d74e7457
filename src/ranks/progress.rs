//! Progress counters through which ranks coordinate, all of them atomics. A rank writes its own entry, and every rank reads all
//! entries.
//!
//! Counters only grow, from the first step to the last. They are published with release and read with acquire, so a rank that has read a
//! counter also sees every write before its publication, for example that an event was recorded.
//!
//! Each process of a run has its own counters. It sends the publications of its own ranks to the other processes, which apply them in
//! order.

use super::notice::{Audience, Notice, Outbox, TAIL_MAX, Topic};
use super::turn_token::TurnToken;
use crate::error::Error;
use crate::host::doorbell::Doorbell;
use crate::trace::{Recorder, now_ns};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Number of 64-bit words in a rank's report of a step.
pub(crate) const AMOUNTS: usize = 14;

/// Number of argument words of an order.
pub(crate) const ORDER_WORDS: usize = 6;

/// The outcome of a step, which rank 0 derives from the reports of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepOutcome {
    /// Sum of squares of all gradients.
    pub norm_sq: f64,
    /// Whether any gradient is infinite or NaN.
    pub nonfinite: bool,
    /// The step's loss.
    pub loss: f32,
}

/// The counters and reports of one rank.
#[derive(Debug)]
struct RankCounters {
    /// Buckets whose gradients are enqueued on the rank's compute stream. The event of each bucket is recorded.
    written: AtomicU64,
    /// The bucket whose gradient the rank wrote last, and the bucket that it sums next. Only ranks of this process publish them.
    last_written: AtomicU64,
    next_summed: AtomicU64,
    /// Handovers of activations to the ranks that share its sequences. The event of each handover is recorded.
    handed: AtomicU64,
    /// Buckets that the rank has pulled from all other ranks. The event of each pull is recorded.
    pulled: AtomicU64,
    /// Buckets of weights whose slices arrived from the inter-node peers, counted over all versions. The event of each arrival is recorded.
    relayed: AtomicU64,
    /// Half fetches of modules, two for each module: first the inter-node peers' slices of the weights arrived, then the rank pulled the
    /// slices of its process's other ranks. The event of each half is recorded.
    fetched: AtomicU64,
    /// For each bucket, the number of final versions of its weights. The event of the writing operation is recorded.
    settled: Box<[AtomicU64]>,
    /// Partial sums of the norm that the rank has published.
    norm_partials: AtomicU64,
    /// The last step whose losses and non-finite flag the rank has published.
    reported: AtomicU64,
    nonfinite: AtomicBool,
    /// The rank's report of its last step.
    amounts: [AtomicU64; AMOUNTS],
    /// Rows of each expert of each layer in the rank's last step.
    expert_rows: Box<[AtomicU64]>,
    /// Orders that the rank has carried out.
    done: AtomicU64,
    /// Arrivals of the rank at the meeting of all ranks between two steps.
    met: AtomicU64,
    /// Time of the rank's last publication, by [`now_ns`].
    published_ns: AtomicU64,
    /// The rank's tracks of the timeline, set when the rank ends.
    tracks: OnceLock<Vec<Recorder>>,
}

/// The other processes of the run.
pub(crate) struct RemoteProcesses {
    /// Index of this process.
    pub(crate) process: usize,
    /// Display names of the processes, by index. All processes have equally many ranks.
    pub(crate) names: Vec<String>,
    pub(crate) outbox: Arc<dyn Outbox>,
}

/// The progress counters of one process.
pub(crate) struct ProgressCounters {
    /// One entry a rank. Mirrored counters have only the entry of rank 0, which stands for all ranks.
    entries: Vec<RankCounters>,
    bells: Vec<Arc<Doorbell>>,
    /// Partial sums of the norm of all ranks, in flat order, as bits.
    norm_partials: Box<[AtomicU32]>,
    /// Numbers that each gradient share reports, as bits: the loss first.
    losses: Box<[AtomicU32]>,
    /// Norm, loss and non-finite flag of the step `outcome_step`.
    outcome: [AtomicU64; 3],
    outcome_step: AtomicU64,
    /// Number of orders given so far, and the code and arguments of the last order.
    orders: AtomicU64,
    order: [AtomicU64; ORDER_WORDS + 1],
    /// Data that belongs to an order.
    mail: Box<[AtomicU32]>,
    /// The first rank or process that failed, and the cause.
    failure: OnceLock<(String, String)>,
    on_gpus: bool,
    turn_token: Option<TurnToken>,
    /// The ranks of this process.
    local_ranks: Range<usize>,
    remote: Option<RemoteProcesses>,
}

/// Dimensions of a [`ProgressCounters`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CounterSizes {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of buckets.
    pub buckets: usize,
    /// Number of partial sums of the norm.
    pub norm_partials: usize,
    /// Number of numbers that the gradient shares of a step report: one loss each, or several numbers.
    pub partial_sums: usize,
    /// Number of experts of all layers together.
    pub experts: usize,
    /// Number of words in the mail.
    pub mail_words: usize,
    /// Whether each rank is a GPU, which its display name then includes.
    pub on_gpus: bool,
}

impl CounterSizes {
    /// Bytes of the arrays whose length depends on the model.
    pub fn bytes(&self) -> usize {
        4 * (self.norm_partials + self.partial_sums + self.mail_words) + 8 * self.ranks * (self.buckets + self.experts)
    }
}

fn zeros<T: Default>(count: usize) -> Box<[T]> {
    (0..count).map(|_| T::default()).collect()
}

/// Whether `count` elements from `first` on are inside `places`.
fn fits<T>(places: &[T], first: u64, count: usize) -> bool {
    (places.len() as u64).checked_sub(first).is_some_and(|rest| count as u64 <= rest)
}

fn store(places: &[AtomicU32], notice: &Notice) {
    for (place, word) in places.iter().zip(notice.words()) {
        place.store(word, Ordering::Relaxed);
    }
}

fn store_long(places: &[AtomicU64], notice: &Notice) {
    for (place, word) in places.iter().zip(notice.long_words()) {
        place.store(word, Ordering::Relaxed);
    }
}

impl ProgressCounters {
    /// Counters at zero. With `adversary`, a seed, exactly one rank runs at a time.
    pub(crate) fn new(sizes: CounterSizes, adversary: Option<u64>) -> Self {
        Self::with_entries(sizes.ranks, sizes, adversary)
    }

    /// Counters of rank 0 only, whose entry stands for every rank. Rank 0's process has `local_ranks` ranks, including rank 0.
    pub(crate) fn mirrored(sizes: CounterSizes, local_ranks: usize) -> Self {
        Self { local_ranks: 0..local_ranks, ..Self::with_entries(1, sizes, None) }
    }

    /// The counters of one process among several.
    pub(crate) fn linked(sizes: CounterSizes, remote: RemoteProcesses) -> Self {
        let each = sizes.ranks / remote.names.len();
        let local_ranks = remote.process * each..(remote.process + 1) * each;
        Self { local_ranks, remote: Some(remote), ..Self::with_entries(sizes.ranks, sizes, None) }
    }

    fn with_entries(entries: usize, sizes: CounterSizes, adversary: Option<u64>) -> Self {
        let bells: Vec<Arc<Doorbell>> = (0..sizes.ranks).map(|_| Arc::default()).collect();
        let entry = || RankCounters {
            written: AtomicU64::new(0),
            last_written: AtomicU64::new(0),
            next_summed: AtomicU64::new(0),
            handed: AtomicU64::new(0),
            pulled: AtomicU64::new(0),
            relayed: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            settled: zeros(sizes.buckets),
            norm_partials: AtomicU64::new(0),
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
            turn_token: adversary.map(|seed| TurnToken::new(seed, bells.clone())),
            bells,
            norm_partials: zeros(sizes.norm_partials),
            losses: zeros(sizes.partial_sums),
            outcome: Default::default(),
            outcome_step: AtomicU64::new(0),
            orders: AtomicU64::new(0),
            order: Default::default(),
            mail: zeros(sizes.mail_words),
            failure: OnceLock::new(),
            on_gpus: sizes.on_gpus,
            local_ranks: 0..sizes.ranks,
            remote: None,
        }
    }

    /// Number of ranks of the run.
    pub(crate) fn ranks(&self) -> usize {
        self.bells.len()
    }

    /// The ranks of this process.
    pub(crate) fn local_ranks(&self) -> Range<usize> {
        self.local_ranks.clone()
    }

    /// The ranks of `process`; of a single process, all ranks.
    fn ranks_of(&self, process: usize) -> Range<usize> {
        let each = self.ranks() / self.remote.as_ref().map_or(1, |remote| remote.names.len());
        process * each..(process + 1) * each
    }

    /// The entry of `rank`. In mirrored counters it is the entry of rank 0.
    fn entry(&self, rank: usize) -> &RankCounters {
        self.entries.get(rank).unwrap_or(&self.entries[0])
    }

    /// Number of buckets.
    pub(crate) fn buckets(&self) -> u64 {
        self.entries[0].settled.len() as u64
    }

    /// The doorbell that wakes the driver of `rank`.
    pub(crate) fn bell(&self, rank: usize) -> Arc<Doorbell> {
        self.bells[rank].clone()
    }

    /// The turn token, which only tests have.
    pub(crate) fn turn_token(&self) -> Option<&TurnToken> {
        self.turn_token.as_ref()
    }

    fn peers_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranks()).filter(move |other| *other != rank)
    }

    /// Records the time of a publication by `rank` and wakes the other ranks.
    fn wake_peers(&self, rank: usize) {
        self.entry(rank).published_ns.store(now_ns(), Ordering::Release);
        self.wake(self.peers_of(rank));
    }

    /// Wakes the ranks of this process after a device made progress that is not published.
    pub(crate) fn wake_local_ranks(&self) {
        self.wake(self.local_ranks());
    }

    /// Wakes `ranks`. With a turn token, the next rank in turn polls by itself.
    fn wake(&self, ranks: impl Iterator<Item = usize>) {
        match &self.turn_token {
            Some(turn_token) => turn_token.progress(),
            None => ranks.for_each(|rank| self.bells[rank].ring()),
        }
    }

    /// Sends a publication of `rank` to other processes, if `rank` belongs to this process.
    fn notify(&self, rank: usize, to: Audience, notice: impl FnOnce() -> Notice) {
        if let Some(remote) = self.remote.as_ref().filter(|_| self.local_ranks().contains(&rank)) {
            remote.outbox.send(to, notice());
        }
    }

    /// Sends an array that only ranks of this process publish. The array is sent in pieces; `bytes` is its content, in elements of
    /// `elem_bytes`, and its first element has index `start`. `notice` builds the message from the index of a piece's first element.
    fn notify_in_pieces(&self, to: Audience, start: usize, (bytes, elem_bytes): (Vec<u8>, usize), notice: impl Fn(u64) -> Notice) {
        for (nth, piece) in bytes.chunks(TAIL_MAX).enumerate() {
            let first = start + nth * (TAIL_MAX / elem_bytes);
            if let Some(remote) = &self.remote {
                remote.outbox.send(to, notice(first as u64).with(piece.to_vec()));
            }
        }
    }

    /// Time of the last publication by a rank other than `rank`, by [`now_ns`]. 0 before the first one, and in mirrored counters.
    pub(crate) fn published_ns(&self, rank: usize) -> u64 {
        let others = self.entries.iter().enumerate().filter(|(other, _)| *other != rank);
        others.map(|(_, entry)| entry.published_ns.load(Ordering::Acquire)).max().unwrap_or(0)
    }

    /// Publishes that `rank` has written one more bucket. The bucket's event must be recorded.
    pub(crate) fn publish_written(&self, rank: usize) {
        self.entry(rank).written.fetch_add(1, Ordering::Release);
        self.notify(rank, Audience::All, || Notice::new(Topic::Written, &[rank as u64]));
        self.wake_peers(rank);
    }

    /// Publishes the bucket whose gradient `rank` wrote last, and the bucket that `rank` sums next, for the watchdog.
    pub(crate) fn name_buckets(&self, rank: usize, [last_written, next_summed]: [usize; 2]) {
        self.entry(rank).last_written.store(last_written as u64, Ordering::Relaxed);
        self.entry(rank).next_summed.store(next_summed as u64, Ordering::Relaxed);
    }

    /// The bucket whose gradient `rank`, a rank of this process, wrote last.
    pub(crate) fn last_written(&self, rank: usize) -> u64 {
        self.entry(rank).last_written.load(Ordering::Relaxed)
    }

    /// The bucket that `rank`, a rank of this process, sums next.
    pub(crate) fn next_summed(&self, rank: usize) -> u64 {
        self.entry(rank).next_summed.load(Ordering::Relaxed)
    }

    /// Number of buckets that `rank` has written.
    pub(crate) fn written(&self, rank: usize) -> u64 {
        self.entry(rank).written.load(Ordering::Acquire)
    }

    /// Whether every rank of this process has written more than `nth` buckets.
    pub(crate) fn all_written(&self, nth: u64) -> bool {
        self.local_ranks().all(|rank| self.written(rank) > nth)
    }

    /// Publishes one more handover of activations by `rank`. Its event must be recorded. Only ranks of one process share sequences.
    pub(crate) fn publish_handed(&self, rank: usize) {
        self.entry(rank).handed.fetch_add(1, Ordering::Release);
        self.wake_peers(rank);
    }

    /// Number of handovers of `rank`.
    pub(crate) fn handed(&self, rank: usize) -> u64 {
        self.entry(rank).handed.load(Ordering::Acquire)
    }

    /// Publishes that `rank` has pulled one more bucket. Its event must be recorded.
    pub(crate) fn publish_pulled(&self, rank: usize) {
        self.entry(rank).pulled.fetch_add(1, Ordering::Release);
        self.notify(rank, Audience::All, || Notice::new(Topic::Pulled, &[rank as u64]));
        self.wake_peers(rank);
    }

    /// Number of buckets that `rank` has pulled.
    pub(crate) fn pulled(&self, rank: usize) -> u64 {
        self.entry(rank).pulled.load(Ordering::Acquire)
    }

    /// Whether every rank of this process has pulled at least `count` buckets.
    pub(crate) fn all_pulled(&self, count: u64) -> bool {
        self.local_ranks().all(|rank| self.pulled(rank) >= count)
    }

    /// Publishes that the inter-node peers' slices of one more bucket of weights have arrived at `rank`. The ranks of its process pull them
    /// from there. The event must be recorded.
    pub(crate) fn publish_relayed(&self, rank: usize) {
        self.entry(rank).relayed.fetch_add(1, Ordering::Release);
        self.wake_peers(rank);
    }

    /// Number of buckets of weights, over all versions, whose slices have arrived from the inter-node peers at every rank of this process.
    pub(crate) fn relayed_to_all(&self) -> u64 {
        self.local_ranks().map(|rank| self.entry(rank).relayed.load(Ordering::Acquire)).min().unwrap_or(0)
    }

    /// Publishes one more half fetch of `rank`. Its event must be recorded.
    pub(crate) fn publish_fetched(&self, rank: usize) {
        self.entry(rank).fetched.fetch_add(1, Ordering::Release);
        self.wake_peers(rank);
    }

    /// Number of half fetches that `rank` has completed.
    pub(crate) fn fetched(&self, rank: usize) -> u64 {
        self.entry(rank).fetched.load(Ordering::Acquire)
    }

    /// Whether every rank of this process has completed at least `count` half fetches.
    pub(crate) fn all_fetched(&self, count: u64) -> bool {
        self.local_ranks().all(|rank| self.fetched(rank) >= count)
    }

    /// Publishes that version `version` of `rank`'s slice of `bucket` is final. The event of the writing operation must be recorded.
    pub(crate) fn publish_settled(&self, rank: usize, bucket: usize, version: u64) {
        self.entry(rank).settled[bucket].store(version, Ordering::Release);
        self.notify(rank, Audience::All, || Notice::new(Topic::Settled, &[rank as u64, bucket as u64, version]));
        self.wake_peers(rank);
    }

    /// The last version of its slice of `bucket` that `rank` has published.
    pub(crate) fn settled(&self, rank: usize, bucket: usize) -> u64 {
        self.entry(rank).settled[bucket].load(Ordering::Acquire)
    }

    /// Writes partial sums of the norm, from index `start` on.
    pub(crate) fn write_norm_partials(&self, start: usize, values: &[f32]) {
        for (word, value) in self.norm_partials[start..].iter().zip(values) {
            word.store(value.to_bits(), Ordering::Relaxed);
        }
        if self.remote.is_some() {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.notify_in_pieces(Audience::First, start, (bytes, 4), |first| Notice::new(Topic::Partials, &[first]));
        }
    }

    /// Publishes `count` more partial sums of `rank`.
    pub(crate) fn publish_norm_partials(&self, rank: usize, count: usize) {
        self.entry(rank).norm_partials.fetch_add(count as u64, Ordering::Release);
        self.notify(rank, Audience::First, || Notice::new(Topic::PartialsPublished, &[rank as u64, count as u64]));
        self.wake_peers(rank);
    }

    /// Number of partial sums that `rank` has published, over all steps. `None` for the ranks that mirrored counters lack: they compute
    /// none, and their partial sums are zero.
    pub(crate) fn published_norm_partials(&self, rank: usize) -> Option<u64> {
        self.entries.get(rank).map(|entry| entry.norm_partials.load(Ordering::Acquire))
    }

    /// Reads partial sums from index `start` on.
    pub(crate) fn read_norm_partials(&self, start: usize, values: &mut [f32]) {
        let words = &self.norm_partials[start..start + values.len()];
        for (value, word) in values.iter_mut().zip(words) {
            *value = f32::from_bits(word.load(Ordering::Relaxed));
        }
    }

    /// Writes the number at index `at` of those that shares report.
    pub(crate) fn write_loss(&self, at: usize, loss: f32) {
        self.losses[at].store(loss.to_bits(), Ordering::Relaxed);
        let notice = || Notice::new(Topic::Loss, &[at as u64, u64::from(loss.to_bits())]);
        if let Some(remote) = &self.remote {
            remote.outbox.send(Audience::First, notice());
        }
    }

    /// Publishes the losses and the non-finite flag of `rank` for `step`.
    pub(crate) fn publish_report(&self, rank: usize, nonfinite: bool, step: u64) {
        self.entry(rank).nonfinite.store(nonfinite, Ordering::Relaxed);
        self.entry(rank).reported.store(step, Ordering::Release);
        self.notify(rank, Audience::First, || Notice::new(Topic::Reported, &[rank as u64, u64::from(nonfinite), step]));
        self.wake_peers(rank);
    }

    /// The last step that `rank` has reported.
    pub(crate) fn reported(&self, rank: usize) -> u64 {
        self.entry(rank).reported.load(Ordering::Acquire)
    }

    /// For `step`, whether a gradient of any rank is infinite or NaN. `None` until every rank has reported.
    pub(crate) fn reports(&self, step: u64) -> Option<bool> {
        let all = (0..self.ranks()).all(|rank| self.reported(rank) >= step);
        let nonfinite = || self.entries.iter().any(|entry| entry.nonfinite.load(Ordering::Relaxed));
        all.then(nonfinite)
    }

    /// The numbers that shares report, in the order of shares.
    pub(crate) fn losses(&self) -> impl Iterator<Item = f32> + '_ {
        self.losses.iter().map(|bits| f32::from_bits(bits.load(Ordering::Relaxed)))
    }

    /// Publishes the outcome of `step`, which rank 0 computed.
    pub(crate) fn publish_outcome(&self, step: u64, outcome: StepOutcome) {
        let words = [outcome.norm_sq.to_bits(), u64::from(outcome.loss.to_bits()), u64::from(outcome.nonfinite)];
        self.notify(0, Audience::All, || Notice::new(Topic::Outcome, &[step, words[0], words[1], words[2]]));
        self.put_outcome(step, words);
    }

    fn put_outcome(&self, step: u64, words: [u64; 3]) {
        for (place, word) in self.outcome.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        self.outcome_step.store(step, Ordering::Release);
        self.wake_peers(0);
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

    /// Publishes an order of rank 0: its code and its arguments. The other ranks must have carried out the previous order.
    pub(crate) fn give_order(&self, number: u64, words: [u64; ORDER_WORDS]) {
        let [a, b, c, d, e, f] = words;
        self.notify(0, Audience::All, || Notice::new(Topic::Order, &[number, a, b, c, d, e, f]));
        self.put_order(number, words);
    }

    fn put_order(&self, number: u64, words: [u64; ORDER_WORDS]) {
        for (place, word) in self.order.iter().zip([number].into_iter().chain(words)) {
            place.store(word, Ordering::Relaxed);
        }
        self.orders.fetch_add(1, Ordering::Release);
        self.wake_peers(0);
    }

    /// The order after the first `seen` orders, if rank 0 has given it.
    pub(crate) fn next_order(&self, seen: u64) -> Option<(u64, [u64; ORDER_WORDS])> {
        let word = |at: usize| self.order[at].load(Ordering::Relaxed);
        (self.orders.load(Ordering::Acquire) > seen).then(|| (word(0), std::array::from_fn(|at| word(at + 1))))
    }

    /// Number of orders given so far, and the code of the last one. At least one order must have been given.
    pub(crate) fn last_order(&self) -> (u64, u64) {
        (self.orders.load(Ordering::Acquire), self.order[0].load(Ordering::Relaxed))
    }

    /// Writes the report of `rank` for a step. [`ProgressCounters::publish_done`] publishes it.
    pub(crate) fn write_amounts(&self, rank: usize, amounts: impl Iterator<Item = u64>) {
        for (place, amount) in self.entry(rank).amounts.iter().zip(amounts) {
            place.store(amount, Ordering::Relaxed);
        }
        let bytes = || self.amounts(rank).flat_map(u64::to_le_bytes).collect();
        self.notify(rank, Audience::First, || Notice::new(Topic::Amounts, &[rank as u64]).with(bytes()));
    }

    /// The report of `rank` for its last step.
    pub(crate) fn amounts(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        self.entry(rank).amounts.iter().map(|amount| amount.load(Ordering::Relaxed))
    }

    /// Writes the rows of each expert on `rank` in a step. As with [`ProgressCounters::write_amounts`], [`ProgressCounters::publish_done`]
    /// publishes them.
    pub(crate) fn write_expert_rows(&self, rank: usize, rows: &[u64]) {
        for (place, rows) in self.entry(rank).expert_rows.iter().zip(rows) {
            place.store(*rows, Ordering::Relaxed);
        }
        if self.remote.is_some() {
            let bytes = rows.iter().flat_map(|rows| rows.to_le_bytes()).collect();
            self.notify_in_pieces(Audience::First, 0, (bytes, 8), |first| Notice::new(Topic::ExpertRows, &[rank as u64, first]));
        }
    }

    /// The rows of each expert on `rank` in its last step.
    pub(crate) fn expert_rows(&self, rank: usize) -> impl Iterator<Item = u64> + '_ {
        self.entry(rank).expert_rows.iter().map(|rows| rows.load(Ordering::Relaxed))
    }

    /// Publishes the timeline tracks of `rank`, which has ended.
    pub(crate) fn publish_tracks(&self, rank: usize, tracks: Vec<Recorder>) {
        // A rank ends once.
        let _ = self.entry(rank).tracks.set(tracks);
    }

    /// The tracks of `rank`; empty until the rank has ended.
    pub(crate) fn tracks(&self, rank: usize) -> &[Recorder] {
        self.entry(rank).tracks.get().map_or(&[], Vec::as_slice)
    }

    /// Publishes that `rank` has carried out one more order.
    pub(crate) fn publish_done(&self, rank: usize) {
        self.entry(rank).done.fetch_add(1, Ordering::Release);
        self.notify(rank, Audience::First, || Notice::new(Topic::Done, &[rank as u64]));
        self.wake_peers(rank);
    }

    /// Whether `rank` has carried out every order. Always true for rank 0, which gives the orders, and for all ranks of mirrored counters.
    pub(crate) fn is_done(&self, rank: usize) -> bool {
        let orders = self.orders.load(Ordering::Relaxed);
        rank == 0 || self.entries.get(rank).is_none_or(|entry| entry.done.load(Ordering::Acquire) == orders)
    }

    /// Whether all ranks have carried out every order.
    pub(crate) fn all_done(&self) -> bool {
        (0..self.ranks()).all(|rank| self.is_done(rank))
    }

    /// Publishes that `rank` has arrived at the meeting of all ranks.
    pub(crate) fn publish_met(&self, rank: usize) {
        self.entry(rank).met.fetch_add(1, Ordering::Release);
        self.notify(rank, Audience::All, || Notice::new(Topic::Met, &[rank as u64]));
        self.wake_peers(rank);
    }

    /// Whether every rank has arrived at least `count` times.
    pub(crate) fn all_met(&self, count: u64) -> bool {
        (0..self.ranks()).all(|rank| self.entry(rank).met.load(Ordering::Acquire) >= count)
    }

    /// Writes words into the mail from index `start` on, by `rank`. A later order publishes them.
    pub(crate) fn post(&self, rank: usize, start: usize, words: impl IntoIterator<Item = u32>) {
        let places = self.mail[start..].iter().zip(words);
        if self.remote.is_none() {
            return places.for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        }
        let store = |(place, word): (&AtomicU32, u32)| {
            place.store(word, Ordering::Relaxed);
            word.to_le_bytes()
        };
        let to = if rank == 0 { Audience::All } else { Audience::First };
        self.notify_in_pieces(to, start, (places.flat_map(store).collect(), 4), |first| Notice::new(Topic::Mail, &[first]));
    }

    /// Words of the mail from index `start` on.
    pub(crate) fn mail(&self, start: usize) -> impl Iterator<Item = u32> + '_ {
        self.mail[start..].iter().map(|word| word.load(Ordering::Relaxed))
    }

    /// Capacity of the mail in words.
    pub(crate) fn mail_words(&self) -> usize {
        self.mail.len()
    }

    /// Publishes that `rank` failed, which ends all ranks. The first failure is the one that is reported.
    pub(crate) fn fail(&self, rank: usize, why: &str) {
        let cause = if self.remote.is_some() && self.local_ranks().len() > 1 { format!("rank {rank}: {why}") } else { why.to_string() };
        if self.end(self.name(rank), &cause) {
            self.notify(rank, Audience::All, || Notice::new(Topic::Failed, &[rank as u64]).with_text(&cause));
        }
    }

    /// Records that `process` failed, as this process has learned, and ends all ranks.
    pub(crate) fn lose(&self, process: usize, why: &str) {
        if let Some(remote) = &self.remote {
            _ = self.end(remote.names[process].clone(), why);
        }
    }

    /// Ends all ranks of this process because of a failure of `name`, a rank or a process. Other processes already know of it and are not
    /// notified.
    pub(crate) fn end_for(&self, name: &str, why: &str) {
        self.end(name.to_owned(), why);
    }

    /// Ends the ranks of this process because `rank` has finished its work. Other processes are not notified.
    pub(crate) fn leave(&self, rank: usize) {
        self.end(self.name(rank), "the run has ended");
    }

    /// Ends all ranks of this process. Returns whether this is the first cause.
    fn end(&self, name: String, why: &str) -> bool {
        // A later failure is mostly a consequence of the first.
        let is_first = self.failure.set((name, why.to_string())).is_ok();
        for bell in &self.bells {
            bell.ring();
        }
        is_first
    }

    /// The error that ended all ranks, if any.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.get().map(|(name, why)| Error::Rank { name: name.clone(), cause: why.clone() })
    }

    /// An error of `rank` with this `cause`.
    pub(crate) fn error_of(&self, rank: usize, cause: String) -> Error {
        Error::Rank { name: self.name(rank), cause }
    }

    /// Display name of `rank`: the name of its process, or the rank itself in a run of one process.
    pub(crate) fn name(&self, rank: usize) -> String {
        if let Some(remote) = &self.remote {
            return remote.names[rank / self.local_ranks().len()].clone();
        }
        if self.on_gpus { format!("rank {rank} (GPU {rank})") } else { format!("rank {rank}") }
    }

    /// Applies a notice that `process` sent about its ranks.
    ///
    /// # Errors
    /// A description of the notice if it is invalid: a number out of range, a rank of another process, or an order or outcome from a
    /// process other than 0.
    pub(crate) fn receive(&self, process: usize, notice: &Notice) -> std::result::Result<(), String> {
        let ranks = self.ranks_of(process);
        let is_of_process = |rank: &u64| ranks.contains(&(*rank as usize));
        let wrong = || format!("{:?} {:?} with {} bytes", notice.topic, notice.numbers(), notice.tail.len());
        let is_possible = match (notice.topic, notice.numbers()) {
            (Topic::Settled, [of, bucket, _]) => is_of_process(of) && *bucket < self.buckets(),
            (Topic::PartialsPublished, [of, count]) => is_of_process(of) && *count <= self.norm_partials.len() as u64,
            (Topic::ExpertRows, [of, first]) => {
                is_of_process(of) && fits(&self.entry(*of as usize).expert_rows, *first, notice.long_words().len())
            }
            (Topic::Partials, [first]) => fits(&self.norm_partials, *first, notice.words().len()),
            (Topic::Mail, [first]) => fits(&self.mail, *first, notice.words().len()),
            (Topic::Loss, [partial_sum, bits]) => *partial_sum < self.losses.len() as u64 && *bits <= u64::from(u32::MAX),
            (Topic::Outcome | Topic::Order, _) => process == 0,
            (_, [of, ..]) => is_of_process(of),
            _ => false,
        };
        if !is_possible {
            return Err(wrong());
        }
        self.take(notice);
        Ok(())
    }

    /// Applies the publication of another process to these counters. Every notice about a rank has the rank as its first number.
    fn take(&self, notice: &Notice) {
        let rank = notice.numbers().first().map_or(0, |rank| *rank as usize);
        match (notice.topic, notice.numbers()) {
            (Topic::Written, _) => self.publish_written(rank),
            (Topic::Pulled, _) => self.publish_pulled(rank),
            (Topic::Settled, [_, bucket, version]) => self.publish_settled(rank, *bucket as usize, *version),
            (Topic::PartialsPublished, [_, count]) => self.publish_norm_partials(rank, *count as usize),
            (Topic::Reported, [_, nonfinite, step]) => self.publish_report(rank, *nonfinite != 0, *step),
            (Topic::Done, _) => self.publish_done(rank),
            (Topic::Met, _) => self.publish_met(rank),
            (Topic::Failed, _) => self.fail(rank, &notice.text()),
            (Topic::Outcome, [step, norm, loss, flag]) => self.put_outcome(*step, [*norm, *loss, *flag]),
            (Topic::Order, [number, a, b, c, d, e, f]) => self.put_order(*number, [*a, *b, *c, *d, *e, *f]),
            (Topic::Loss, [partial_sum, bits]) => self.losses[*partial_sum as usize].store(*bits as u32, Ordering::Relaxed),
            (Topic::Amounts, _) => store_long(&self.entry(rank).amounts, notice),
            (Topic::ExpertRows, [_, first]) => store_long(&self.entry(rank).expert_rows[*first as usize..], notice),
            (Topic::Partials, [first]) => store(&self.norm_partials[*first as usize..], notice),
            (Topic::Mail, [first]) => store(&self.mail[*first as usize..], notice),
            // The caller filters out all other topics.
            _ => {}
        }
    }

    /// Whether a failure has ended all ranks.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }
}

#[cfg(test)]
#[path = "progress_tests.rs"]
mod tests;
