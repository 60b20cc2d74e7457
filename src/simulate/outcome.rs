//! Results of timed steps: times, FLOPs, idle time, copies, optimizer.
//!
//! Rates are over wall time unless their name contains `busy`. G and T are powers of ten.

use super::flops::StepFlops;
use crate::engine::memory::expert_rows::ExpertLoad;
use crate::engine::protocol::coordinator::Counts;
use crate::units::counted;
use serde::Serialize;
use std::fmt;

/// Results of timed steps on any device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    pub step_ms: Spread,
    /// Tokens of a step.
    pub tokens_per_step: usize,
    /// Tokens divided by the time of the median step.
    pub tokens_per_second: f64,
    /// FLOP/s, and their fraction of the device's peak.
    pub(crate) speed: Speed,
    /// Idle time of the device.
    pub(crate) exposed: ExposedTime,
    /// Traffic of the host link, mostly gradients to the host and weights to the device.
    pub link: Link,
    pub adam: AdamOutcome,
    pub(crate) verdicts: Verdicts,
    pub(crate) bucket_steps: Counts,
    /// Mean loss of the first and of the last timed step.
    pub loss: FirstAndLast,
    /// Load of the experts in the last step, if the model has experts and the device routes tokens.
    #[serde(flatten)]
    pub expert_load: Option<ExpertLoad>,
}

/// Distribution of samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// All samples in order of time.
    pub samples: Vec<f64>,
}

impl Spread {
    /// Distribution of `samples`.
    ///
    /// # Panics
    /// If there is no sample.
    pub(crate) fn new(samples: Vec<f64>) -> Self {
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let (below, above) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Self { median: (below + above) / 2.0, min: sorted[0], max: sorted[sorted.len() - 1], samples }
    }

    pub(crate) fn total(&self) -> f64 {
        self.samples.iter().sum()
    }
}

/// FLOP/s of the median step.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Speed {
    /// FLOPs of a step on one device, without recomputation.
    pub(crate) model_flops: f64,
    /// Formula of `model_flops`.
    pub(crate) model_flops_formula: &'static str,
    /// FLOPs of a step on one device, including recomputed layers.
    pub(crate) hardware_flops: f64,
    /// `model_flops` a second, in 10^12.
    pub model_tflops: f64,
    /// `hardware_flops` a second, in 10^12.
    pub(crate) hardware_tflops: f64,
    /// 10^12 FLOP/s of a large matrix product on the same device, measured before the steps.
    pub(crate) matmul_tflops: Option<f64>,
    /// `model_tflops` over `matmul_tflops`.
    pub(crate) model_share: Option<f64>,
    /// `hardware_tflops` over `matmul_tflops`.
    pub(crate) hardware_share: Option<f64>,
}

impl Speed {
    /// Speed of a step of `flops`, which the formula counts, in `seconds`, on a device with `matmul_flops` FLOP/s in a large matrix product.
    pub(crate) fn new((flops, formula): (StepFlops, &'static str), seconds: f64, matmul_flops: Option<f64>) -> Self {
        let (model, hardware) = (flops.model / seconds, flops.hardware / seconds);
        Self {
            model_flops: flops.model,
            model_flops_formula: formula,
            hardware_flops: flops.hardware,
            model_tflops: model / 1e12,
            hardware_tflops: hardware / 1e12,
            matmul_tflops: matmul_flops.map(|peak| peak / 1e12),
            model_share: matmul_flops.map(|peak| model / peak),
            hardware_share: matmul_flops.map(|peak| hardware / peak),
        }
    }
}

/// Idle time of the device in a mean step, by cause.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct ExposedTime {
    /// The optimizer was not done, or held the slots that gradients needed.
    pub(crate) cpu_ms: f64,
    /// A copy was not done.
    pub(crate) transfer_ms: f64,
    /// Other ranks were not ready. With several ranks, each of these times is a mean of the maximum over the ranks in a step.
    pub(crate) peer_ms: f64,
    /// The rank that waited longest for other ranks, over all steps.
    pub(crate) peer_rank: Option<usize>,
    /// Fraction of the step in which the device was not idle.
    pub(crate) device_busy_share: f64,
}

/// Traffic of the host link in a mean step: gradients, weights, paged states and gradient sums. Busy rates need a timeline (`--trace`).
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Link {
    /// Bytes sent to the host a step.
    pub d2h_bytes: f64,
    /// Bytes sent to the device a step.
    pub h2d_bytes: f64,
    /// `d2h_bytes` over wall time.
    pub(crate) d2h_gb_per_s: f64,
    /// `h2d_bytes` over wall time.
    pub(crate) h2d_gb_per_s: f64,
    /// `d2h_bytes` over the time of copies to the host.
    pub(crate) d2h_busy_gb_per_s: Option<f64>,
    /// `h2d_bytes` over the time of copies to the device.
    pub(crate) h2d_busy_gb_per_s: Option<f64>,
}

/// The optimizer's pool in a mean step. Rates are over the time in which it had a job.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct AdamOutcome {
    /// Parameters passed over in a step.
    pub params: f64,
    /// Time with a job in a step.
    pub(crate) busy_ms: f64,
    /// 10^9 parameters a second; `None` when nothing is offloaded.
    pub(crate) busy_gparams_per_s: Option<f64>,
    /// Bytes read and written, 10^9 a second.
    pub(crate) busy_gb_per_s: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Verdicts {
    /// Gradients were used unchanged.
    pub commit: u64,
    /// Gradients were scaled down.
    pub clip: u64,
    /// A gradient was not finite.
    pub skip: u64,
}

/// A first and a last value.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct FirstAndLast {
    /// First.
    pub first: f32,
    /// Last.
    pub last: f32,
}

/// ` (76 % of a large product)`: speed of a step as a percentage of a large matrix product's; empty if unknown.
pub(crate) fn of_a_large_product(fraction: Option<f64>) -> String {
    fraction.map_or(String::new(), |fraction| format!(" ({:.0} % of a large product)", fraction * 1e2))
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (speed, link, adam) = (&self.speed, &self.link, &self.adam);
        let or_none = |rate: Option<f64>| rate.map_or("none".into(), |rate| format!("{rate:.2}"));
        writeln!(
            f,
            "  step         {:.1} ms, {:.1} to {:.1} over {}",
            self.step_ms.median,
            self.step_ms.min,
            self.step_ms.max,
            counted(self.step_ms.samples.len(), "step")
        )?;
        writeln!(f, "  tokens       {:.0} a second", self.tokens_per_second)?;
        writeln!(f, "  model        {:.3} TFLOP/s{}", speed.model_tflops, of_a_large_product(speed.model_share))?;
        writeln!(f, "  hardware     {:.3} TFLOP/s{}", speed.hardware_tflops, of_a_large_product(speed.hardware_share))?;
        let ExposedTime { cpu_ms, transfer_ms, peer_ms, peer_rank, device_busy_share } = self.exposed;
        let peers = peer_rank.map_or(String::new(), |rank| format!(", {peer_ms:.1} ms for other ranks (rank {rank}, the longest)"));
        writeln!(
            f,
            "  device busy  {:.1} %; exposed {cpu_ms:.1} ms waiting for the optimizer, {transfer_ms:.1} ms for copies{peers}",
            device_busy_share * 1e2
        )?;
        writeln!(f, "  link         {:.2} GB/s out, {:.2} GB/s in over the step", link.d2h_gb_per_s, link.h2d_gb_per_s)?;
        writeln!(
            f,
            "  adam         {} Gparam/s, {} GB/s while busy, {:.1} ms a step",
            or_none(adam.busy_gparams_per_s),
            or_none(adam.busy_gb_per_s),
            adam.busy_ms
        )?;
        let Verdicts { commit, clip, skip } = self.verdicts;
        write!(f, "  verdicts     {commit} committed, {clip} clipped, {skip} skipped")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_keeps_the_samples_in_order_and_knows_the_middle() {
        let odd = Spread::new(vec![3.0, 1.0, 2.0]);
        assert_eq!((odd.median, odd.min, odd.max, odd.total()), (2.0, 1.0, 3.0, 6.0));
        assert_eq!(odd.samples, [3.0, 1.0, 2.0]);
        assert_eq!(Spread::new(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
    }

    #[test]
    fn shares_are_of_the_measured_product() {
        let flops = StepFlops { model: 3e12, hardware: 4e12 };
        let speed = Speed::new((flops, ""), 0.5, Some(16e12));
        assert_eq!((speed.model_tflops, speed.model_share, speed.hardware_share), (6.0, Some(0.375), Some(0.5)));
    }
}
