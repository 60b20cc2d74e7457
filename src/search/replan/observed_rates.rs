//! Measured rates of a run, as far as its plan assumes them: those that vary between hosts and hours, and the fraction of clipped steps.

use crate::engine::executor::StepReport;
use crate::engine::protocol::counters::Exposed;
use crate::engine::protocol::verdict::Verdict;
use crate::hardware::rates::Rates;
use crate::simulate::clip::Clip;
use crate::simulate::outcome::Outcome;
use crate::simulate::timed::Steps;
use std::array;
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;

/// Number of steps per measurement.
pub(crate) const WINDOW: usize = 20;
/// Deviations below this fraction are ignored, for rates and for the fraction of clipped steps.
const TOLERANCE: f64 = 0.1;
/// Maximum ratio of a measured rate to the assumed one. Larger ratios are clamped.
const RATIO_MAX: f64 = 10.0;
/// Clips that are rarer than one in this many steps are ignored.
const CLIP_EVERY_MAX: f64 = 32.0;

/// Rates of measured or simulated steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ObservedRates {
    /// Mean seconds of a step. For a run the longest step is left out as a possible outlier.
    pub(crate) step_s: f64,
    /// Bytes per second that the optimizer pool reads and writes while it has a job; `None` if it had none.
    pub(crate) adam_bytes_per_s: Option<f64>,
    /// Seconds of a step in which the device computes.
    pub(crate) device_s: f64,
    /// Fraction of clipped steps.
    pub(crate) clipped_fraction: f64,
}

impl ObservedRates {
    pub(super) fn of(outcome: &Outcome) -> Self {
        let mean_s = outcome.step_ms.total() / outcome.step_ms.samples.len() as f64 / 1e3;
        let verdicts = outcome.verdicts;
        Self {
            step_s: mean_s,
            adam_bytes_per_s: outcome.adam.busy_gb_per_s.map(|rate| rate * 1e9),
            device_s: mean_s * outcome.exposed.device_busy_share,
            clipped_fraction: verdicts.clip as f64 / (verdicts.clip + verdicts.commit).max(1) as f64,
        }
    }

    /// Rates of the optimizer and of the device relative to `assumed`. Without a measurement the ratio is 1.
    pub(super) fn relative_to(&self, assumed: &Self) -> [f64; 2] {
        let adam = self.adam_bytes_per_s.zip(assumed.adam_bytes_per_s).map_or(1.0, |(seen, assumed)| seen / assumed);
        [adam, assumed.device_s / self.device_s].map(|ratio| ratio.clamp(1.0 / RATIO_MAX, RATIO_MAX))
    }

    /// Whether these rates deviate from `assumed` by more than the tolerance.
    pub(crate) fn has_left(&self, assumed: &Self) -> bool {
        let is_other = |ratio: f64| (ratio - 1.0).abs() > TOLERANCE;
        self.relative_to(assumed).into_iter().any(is_other) || !self.is_clipped_as(assumed)
    }

    /// Whether the fractions of clipped steps agree. Otherwise step times of different plans are not comparable.
    pub(crate) fn is_clipped_as(&self, other: &Self) -> bool {
        (self.clipped_fraction - other.clipped_fraction).abs() <= TOLERANCE
    }

    /// Rates that turn the simulated `assumed` into these measurements: `rates` scaled by the measured ratios.
    pub(super) fn rates(&self, assumed: &Self, rates: &Rates) -> Rates {
        let [adam, device] = self.relative_to(assumed);
        rates.with_faster_host(adam).with_faster_device(device)
    }

    /// Steps for a simulation that clips about equally often.
    pub(super) fn steps(&self) -> Steps {
        let every = (1.0 / self.clipped_fraction).round();
        let (clip, timed) = if every > CLIP_EVERY_MAX {
            (Clip::Never, 10)
        } else {
            let every = every.max(1.0) as u64;
            (NonZeroU64::new(every).map_or(Clip::Never, Clip::OneIn), every * 10u64.div_ceil(every))
        };
        // A coordinator needs a few verdicts to estimate how often gradients are clipped.
        Steps { warmup: 6, timed, clip }
    }
}

/// Measurements of one step.
#[derive(Clone, Copy, Debug)]
struct StepObservation {
    adam_bytes: u64,
    adam_busy_ns: u64,
    step_s: f64,
    device_s: f64,
    clipped: bool,
}

/// The last steps of a run.
#[derive(Clone, Debug)]
pub(crate) struct RecentSteps(VecDeque<StepObservation>);

impl Default for RecentSteps {
    fn default() -> Self {
        Self(VecDeque::with_capacity(WINDOW))
    }
}

impl RecentSteps {
    /// Adds a step that took `time`. Skipped steps are ignored, because they have no usable time or verdict.
    pub(crate) fn add(&mut self, report: &StepReport, time: Duration) {
        if report.verdict == Verdict::SkipNonFinite {
            return;
        }
        if self.0.len() == WINDOW {
            self.0.pop_front();
        }
        let Exposed { cpu_ns, transfer_ns, peer_ns } = report.exposed;
        let idle = Duration::from_nanos(cpu_ns + transfer_ns + peer_ns);
        self.0.push_back(StepObservation {
            adam_bytes: report.counters.adam_bytes,
            adam_busy_ns: report.counters.adam_busy_ns,
            step_s: time.as_secs_f64(),
            device_s: time.saturating_sub(idle).as_secs_f64(),
            clipped: matches!(report.verdict, Verdict::Clip(_)),
        });
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Rates of the last steps, once there are enough. The device time is the median, so that one slow step does not matter.
    pub(crate) fn observed_rates(&self) -> Option<ObservedRates> {
        if self.0.len() < WINDOW {
            return None;
        }
        let sum = |of: fn(&StepObservation) -> u64| self.0.iter().map(of).sum::<u64>();
        let (bytes, busy_ns) = (sum(|seen| seen.adam_bytes), sum(|seen| seen.adam_busy_ns));
        let mut device_s: [f64; WINDOW] = array::from_fn(|at| self.0[at].device_s);
        device_s.sort_by(f64::total_cmp);
        let longest_s = self.0.iter().map(|seen| seen.step_s).fold(0.0, f64::max);
        let others_s = self.0.iter().map(|seen| seen.step_s).sum::<f64>() - longest_s;
        Some(ObservedRates {
            step_s: others_s / (WINDOW - 1) as f64,
            adam_bytes_per_s: (busy_ns > 0).then(|| bytes as f64 / busy_ns as f64 * 1e9),
            device_s: device_s[WINDOW / 2],
            clipped_fraction: sum(|seen| u64::from(seen.clipped)) as f64 / WINDOW as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::protocol::coordinator::Counts;
    use crate::engine::protocol::counters::Counters;
    use crate::hardware::rates::tests::round_rates;
    use crate::optim::moments::Moments;
    use crate::optim::simd::Isa;
    use crate::ranks::RANKS_MAX;
    use crate::units::{ClipScale, Norm};

    /// A step of 1 s. The device is idle for a quarter of it, and the pool moves 4 GB in 0.5 s.
    fn step(verdict: Verdict) -> StepReport {
        let counters = Counters { adam_bytes: 4_000_000_000, adam_busy_ns: 500_000_000, ..Counters::default() };
        let exposed = Exposed { cpu_ns: 200_000_000, transfer_ns: 50_000_000, peer_ns: 0 };
        StepReport {
            loss: 1.0,
            grad_norm: Norm(1.0),
            learning_rate: 0.1,
            loss_scale: 1.0,
            verdict,
            counts: Counts::default(),
            exposed,
            counters,
            objective: None,
            exposed_to_peers_ns: [0; RANKS_MAX],
            expert_load: None,
        }
    }

    const SECOND: Duration = Duration::from_secs(1);
    const PACE: ObservedRates = ObservedRates { step_s: 1.0, adam_bytes_per_s: Some(8e9), device_s: 0.75, clipped_fraction: 0.1 };

    #[test]
    fn a_window_knows_the_last_steps_and_nothing_of_skipped_ones() {
        let mut window = RecentSteps::default();
        let clip = Verdict::Clip(ClipScale(0.5));
        (0..5).for_each(|_| window.add(&step(clip), 9 * SECOND));
        (0..WINDOW - 3).for_each(|_| window.add(&step(Verdict::Commit), SECOND));
        window.add(&step(Verdict::SkipNonFinite), 100 * SECOND);
        // The window drops the first two steps, and three of the remaining ones are slow.
        window.add(&step(Verdict::Commit), SECOND);
        assert_eq!(window.observed_rates(), Some(ObservedRates { step_s: 27.0 / 19.0, ..PACE }));
        window.clear();
        (1..WINDOW).for_each(|_| window.add(&step(Verdict::Commit), SECOND));
        assert_eq!(window.observed_rates(), None);
    }

    #[test]
    fn a_deviation_of_more_than_a_tenth_leaves_the_plan() {
        let has_left = |change: fn(&mut ObservedRates)| {
            let mut observed_rates = PACE;
            change(&mut observed_rates);
            observed_rates.has_left(&PACE)
        };
        assert!(!has_left(|_| ()) && !has_left(|observed_rates| observed_rates.adam_bytes_per_s = None));
        assert!(
            !has_left(|observed_rates| observed_rates.adam_bytes_per_s = Some(7.3e9))
                && has_left(|observed_rates| observed_rates.adam_bytes_per_s = Some(7.1e9))
        );
        assert!(has_left(|observed_rates| observed_rates.adam_bytes_per_s = Some(8.9e9)));
        assert!(
            !has_left(|observed_rates| observed_rates.device_s = 0.8)
                && has_left(|observed_rates| observed_rates.device_s = 0.84)
                && has_left(|observed_rates| observed_rates.device_s = 0.6)
        );
        assert!(
            !has_left(|observed_rates| observed_rates.clipped_fraction = 0.19)
                && has_left(|observed_rates| observed_rates.clipped_fraction = 0.25)
        );
        assert!(!has_left(|observed_rates| observed_rates.clipped_fraction = 0.0));
    }

    #[test]
    fn rates_follow_observations() {
        let (rates, workers) = (round_rates(), 1);
        let seen = ObservedRates { adam_bytes_per_s: Some(4e9), device_s: 1.5, ..PACE };
        let slower = seen.rates(&PACE, &rates);
        assert_eq!(
            slower.adam_bytes_per_s(workers, Isa::Avx2, Moments::Float32),
            rates.adam_bytes_per_s(workers, Isa::Avx2, Moments::Float32) / 2.0
        );
        assert_eq!(slower.matmul_flops(64), rates.matmul_flops(64) / 2.0);
        assert_eq!(slower.to_host_s(1 << 20), rates.to_host_s(1 << 20));
        // A window in which the device never computed.
        let idle = ObservedRates { device_s: 0.0, ..PACE }.rates(&PACE, &rates);
        assert_eq!(idle.matmul_flops(64), RATIO_MAX * rates.matmul_flops(64));
    }

    #[test]
    fn simulated_steps_are_clipped_as_often_as_real_ones() {
        let clipped = |clipped_fraction| {
            let steps = ObservedRates { clipped_fraction, ..PACE }.steps();
            let timed = steps.warmup + 1..=steps.warmup + steps.timed;
            timed.filter(|&step| steps.clip.clips(step)).count() as f64 / steps.timed as f64
        };
        assert_eq!([clipped(0.0), clipped(0.01), clipped(0.05), clipped(0.1), clipped(0.5), clipped(1.0)], [0.0, 0.0, 0.05, 0.1, 0.5, 1.0]);
        assert!((clipped(0.3) - 0.3).abs() < 0.05);
    }
}
