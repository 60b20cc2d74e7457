//! The port of an exchange for reports.

use crate::device::Kernels;
use crate::pair_loss::REPORT_WORDS;
use crate::ranks::progress::StepOutcome;
use crate::trace::Recorder;

/// Reports of a step: its norm, losses, amounts and times, merged by rank 0.
///
/// Methods poll, unless their documentation says that they wait.
pub(crate) trait ReportPort<D: Kernels> {
    /// Adds the next partial sums of the norm, in the local order.
    fn add_norm_partials(&mut self, norm_partials: &[f32]);

    /// Completes this rank's report of `step`: whether one of its gradients is infinite or NaN, and the numbers that its partial sums report,
    /// the loss first.
    fn report(&mut self, step: u64, nonfinite: bool, losses: &[f32]);

    /// The merged outcome of `step` over all ranks, once it is known. Poll it until then.
    fn outcome(&mut self, step: u64) -> Option<StepOutcome>;

    /// Publishes the numbers of this rank's partial sums outside of a step.
    fn publish_losses(&mut self, losses: &[f32]);

    /// Sum of the losses that were published last, in the order of partial sums. With several ranks, it is valid after all have completed their
    /// orders.
    fn losses(&self) -> f64 {
        self.reported()[0]
    }

    /// Like [`Self::losses`], for each number that partial sums report; 0 for numbers that they do not report.
    fn reported(&self) -> [f64; REPORT_WORDS];

    /// Publishes this rank's amounts of a step for rank 0.
    fn publish_amounts(&self, _amounts: &mut dyn Iterator<Item = u64>) {}

    /// Reads the amounts of the last step that `rank` has published.
    fn amounts_of(&self, _rank: usize, _amounts: &mut dyn Iterator<Item = &mut u64>) {}

    /// Publishes the number of rows of each expert on this rank in a step, for rank 0.
    fn publish_expert_rows(&self, _rows: &[u64]) {}

    /// Adds the rows of each expert that `rank` has published to `rows`.
    fn add_expert_rows(&self, _rank: usize, _rows: &mut [u64]) {}

    /// Passes this rank's tracks of the timeline to rank 0.
    fn publish_tracks(&self, _tracks: Vec<Recorder>) {}

    /// The tracks of all ranks, once they are published; `own` are those of rank 0.
    fn all_tracks(&self, own: Vec<Recorder>) -> Vec<Recorder> {
        own
    }

    /// Nanoseconds so far in which the compute stream waited for peers.
    fn waited_ns(&self, _dev: &D) -> u64 {
        0
    }

    /// Time of the last publication of a peer, by the device's clock; 0 before the first, and without peers.
    fn published_ns(&self) -> u64 {
        0
    }
}
