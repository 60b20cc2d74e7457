//! Reports of a step, over the progress counters: each rank publishes its own, and rank 0 merges them.

use super::PeerExchange;
use crate::bucket::slices::Slices;
use crate::device::{Kernels, Peers};
use crate::engine::ranks::exchange::ReportPort;
use crate::optim::norm::{self, BLOCK};
use crate::pair_loss::{REPORT_WORDS, report_sums};
use crate::ranks::progress::StepOutcome;
use crate::trace::Recorder;
use crate::units::NormSq;

/// Partial sums of the norm that are folded at once.
const FOLDED_AT_ONCE: usize = 64;

/// Progress of a step's reports.
pub(super) struct PeerReports {
    /// Steps with a known outcome.
    steps: u64,
    /// Partial sums of the norm received in this step.
    norm_partials: usize,
    /// On rank 0: the norm folded so far in this step, and the bucket and rank of the next slice to fold.
    norm_sq: NormSq,
    folded: (usize, usize),
}

impl PeerReports {
    /// Before the first step.
    pub(super) fn new() -> Self {
        Self { steps: 0, norm_partials: 0, norm_sq: NormSq(0.0), folded: (0, 0) }
    }
}

impl<D: Kernels + Peers> ReportPort<D> for PeerExchange<D::PeerHandle> {
    fn add_norm_partials(&mut self, norm_partials: &[f32]) {
        let local = self.reports.norm_partials * BLOCK..(self.reports.norm_partials + norm_partials.len()) * BLOCK;
        let mut rest = norm_partials;
        for (flat, _) in self.slices.pieces(local) {
            let (these, others) = rest.split_at(flat.len() / BLOCK);
            self.context.progress.write_norm_partials(flat.start / BLOCK, these);
            rest = others;
        }
        self.reports.norm_partials += norm_partials.len();
        self.context.progress.publish_norm_partials(self.context.rank, norm_partials.len());
    }

    fn report(&mut self, step: u64, nonfinite: bool, losses: &[f32]) {
        <Self as ReportPort<D>>::publish_losses(self, losses);
        self.context.progress.publish_report(self.context.rank, nonfinite, step);
    }

    fn outcome(&mut self, step: u64) -> Option<StepOutcome> {
        if self.context.rank == 0 && self.context.progress.outcome(step).is_none() {
            self.fold();
            let is_whole = self.reports.folded.0 == self.slices.layout().count();
            if let Some(nonfinite) = self.context.progress.reports(step).filter(|_| is_whole) {
                let loss = <Self as ReportPort<D>>::losses(self) as f32;
                self.context.progress.publish_outcome(step, StepOutcome { norm_sq: self.reports.norm_sq.0, nonfinite, loss });
            }
        }
        let outcome = self.context.progress.outcome(step)?;
        (self.reports.steps, self.reports.norm_partials, self.reports.norm_sq, self.reports.folded) =
            (self.reports.steps + 1, 0, NormSq(0.0), (0, 0));
        Some(outcome)
    }

    fn publish_losses(&mut self, losses: &[f32]) {
        let (rank, ranks) = (self.context.rank, self.context.progress.ranks());
        let words = self.batches.report_words;
        for (round, numbers) in losses.chunks_exact(words).enumerate() {
            let first = (round * ranks + rank) * words;
            (first..).zip(numbers).for_each(|(at, number)| self.context.progress.write_loss(at, *number));
        }
    }

    fn reported(&self) -> [f64; REPORT_WORDS] {
        report_sums(self.context.progress.losses(), self.batches.report_words)
    }

    fn publish_amounts(&self, amounts: &mut dyn Iterator<Item = u64>) {
        self.context.progress.write_amounts(self.context.rank, amounts);
    }

    fn amounts_of(&self, rank: usize, amounts: &mut dyn Iterator<Item = &mut u64>) {
        amounts.zip(self.context.progress.amounts(rank)).for_each(|(place, amount)| *place = amount);
    }

    fn publish_expert_rows(&self, rows: &[u64]) {
        self.context.progress.write_expert_rows(self.context.rank, rows);
    }

    fn add_expert_rows(&self, rank: usize, rows: &mut [u64]) {
        rows.iter_mut().zip(self.context.progress.expert_rows(rank)).for_each(|(rows, others)| *rows = rows.saturating_add(others));
    }

    fn publish_tracks(&self, tracks: Vec<Recorder>) {
        self.context.progress.publish_tracks(self.context.rank, self.named(tracks));
    }

    fn all_tracks(&self, own: Vec<Recorder>) -> Vec<Recorder> {
        let mut all = self.named(own);
        self.peers().for_each(|rank| all.extend_from_slice(self.context.progress.tracks(rank)));
        all
    }

    fn waited_ns(&self, dev: &D) -> u64 {
        dev.waited_for_peers_ns()
    }

    fn published_ns(&self) -> u64 {
        self.context.progress.published_ns(self.context.rank)
    }
}

impl<C> PeerExchange<C> {
    /// Adds this rank's number to the names of its tracks.
    fn named(&self, mut tracks: Vec<Recorder>) -> Vec<Recorder> {
        tracks.iter_mut().for_each(|track| track.track.insert_str(0, &format!("rank {} ", self.context.rank)));
        tracks
    }

    /// Folds the received partial sums of the norm in flat order: bucket by bucket, and within a bucket rank by rank.
    fn fold(&mut self) {
        let (buckets, ranks) = (self.slices.layout().count(), self.context.progress.ranks());
        while self.reports.folded.0 < buckets {
            let (bucket, rank) = self.reports.folded;
            let peer_slices = Slices::new(self.slices.layout().clone(), rank, ranks);
            let needed = self.reports.steps * (peer_slices.elems() / BLOCK) as u64 + (peer_slices.local(bucket).end / BLOCK) as u64;
            let published = self.context.progress.published_norm_partials(rank);
            if published.is_some_and(|published| published < needed) {
                return;
            }
            let flat = if published.is_some() { peer_slices.global(bucket) } else { 0..0 };
            for start in flat.clone().step_by(FOLDED_AT_ONCE * BLOCK) {
                let norm_partials = &mut [0.0; FOLDED_AT_ONCE][..((flat.end - start) / BLOCK).min(FOLDED_AT_ONCE)];
                self.context.progress.read_norm_partials(start / BLOCK, norm_partials);
                self.reports.norm_sq = norm::fold(self.reports.norm_sq, norm_partials);
            }
            self.reports.folded = if rank + 1 == ranks { (bucket + 1, 0) } else { (bucket, rank + 1) };
        }
    }
}
