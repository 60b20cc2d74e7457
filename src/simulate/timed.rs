//! Steps timed by the device's clock, and their results.

use super::clip::Clip;
use super::flops::StepFlops;
use super::outcome::{AdamOutcome, ExposedTime, FirstAndLast, Link, Outcome, Speed, Spread, Verdicts};
use super::random_tokens::RandomTokens;
use crate::device::Kernels;
use crate::engine::executor::{Engine, StepReport};
use crate::engine::memory::expert_rows::ExpertLoad;
use crate::engine::protocol::coordinator::Counts;
use crate::engine::protocol::counters::{Counters, Exposed};
use crate::engine::protocol::verdict::Verdict;
use crate::error::Result;
use crate::model::flops::flops_formula;
use crate::model::head_rows::HeadRows;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::ranks::RANKS_MAX;
use crate::trace::Recorder;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    /// Warm-up steps, which are not timed.
    pub(crate) warmup: u64,
    pub timed: u64,
    pub clip: Clip,
}

impl Steps {
    /// Runs the warm-up steps.
    pub(crate) fn warm_up<D: Kernels>(self, engine: &mut Engine<D>, tokens: &mut RandomTokens) -> Result<()> {
        (1..=self.warmup).try_for_each(|step| self.step(engine, tokens, step).map(drop))
    }

    pub(super) fn step<D: Kernels>(self, engine: &mut Engine<D>, tokens: &mut RandomTokens, step: u64) -> Result<StepReport> {
        engine.set_max_grad_norm(self.clip.max_grad_norm(step));
        let learning_rate = engine.plan().recipe.optimizer.lr;
        engine.step(learning_rate, tokens)
    }

    /// Runs the timed steps, after the warm-up steps; `log` receives warnings.
    pub(crate) fn time<D: Kernels>(
        self,
        engine: &mut Engine<D>,
        tokens: &mut RandomTokens,
        log: &mut dyn FnMut(&dyn Display),
    ) -> Result<Timed> {
        let (mut reports, mut samples) = (Vec::with_capacity(self.timed as usize), Vec::with_capacity(self.timed as usize));
        tokens.forget();
        let from_ns = engine.now_ns();
        let mut start_ns = from_ns;
        for step in self.warmup + 1..=self.warmup + self.timed {
            let report = self.step(engine, tokens, step)?;
            // Steps are timed from end to end, so that work that overlaps with the next step is counted in one of the two.
            let end_ns = engine.now_ns();
            samples.push((end_ns - start_ns) as f64 / 1e6);
            start_ns = end_ns;
            if self.clip.clips(step) != matches!(report.verdict, Verdict::Clip(_)) {
                log(&format_args!("step {step}: {:?} at gradient norm {:.3e}, not as --clip asks", report.verdict, report.grad_norm.0));
            }
            reports.push(report);
        }
        let (documents, untrained) = (tokens.documents().clone(), tokens.untrained());
        Ok(Timed { documents, untrained, ..Timed::new(Spread::new(samples), from_ns..start_ns, &reports) })
    }
}

/// Totals of the timed steps.
pub(crate) struct Timed {
    step_ms: Spread,
    /// Number of documents by length.
    documents: BTreeMap<usize, usize>,
    /// Number of tokens without a trained target.
    untrained: usize,
    /// Window of the steps on the device's clock.
    pub(crate) window_ns: Range<u64>,
    exposed: Exposed,
    /// By rank.
    exposed_to_peers_ns: [u64; RANKS_MAX],
    counters: Counters,
    bucket_steps: Counts,
    verdicts: Verdicts,
    loss: FirstAndLast,
    /// Of the last step.
    expert_load: Option<ExpertLoad>,
}

impl Timed {
    fn new(step_ms: Spread, window_ns: Range<u64>, reports: &[StepReport]) -> Self {
        let last = &reports[reports.len() - 1];
        let (loss, expert_load) = (FirstAndLast { first: reports[0].loss, last: last.loss }, last.expert_load);
        let (documents, untrained, exposed, exposed_to_peers_ns, counters, bucket_steps, verdicts) = Default::default();
        let mut timed = Self {
            step_ms,
            documents,
            untrained,
            window_ns,
            exposed,
            exposed_to_peers_ns,
            counters,
            bucket_steps,
            verdicts,
            loss,
            expert_load,
        };
        for report in reports {
            timed.exposed += report.exposed;
            for (total, ns) in timed.exposed_to_peers_ns.iter_mut().zip(report.exposed_to_peers_ns) {
                *total += ns;
            }
            timed.counters += report.counters;
            timed.bucket_steps += report.counts;
            match report.verdict {
                Verdict::Commit => timed.verdicts.commit += 1,
                Verdict::Clip(_) => timed.verdicts.clip += 1,
                Verdict::SkipNonFinite => timed.verdicts.skip += 1,
            }
        }
        timed
    }

    /// Milliseconds of the median step.
    pub(super) fn median_ms(&self) -> f64 {
        self.step_ms.median
    }

    /// Extrapolates to steps with more micro-batches, assuming that each further micro-batch takes equally long. `few` are steps with fewer
    /// micro-batches. `times` is the number of micro-batches to add, divided by the difference between `self` and `few`.
    pub(crate) fn drawn_out(self, mut few: Self, times: f64) -> Self {
        let drawn_out = |more: f64, few: f64| more + (more - few) * times;
        let longer = |more: &mut u64, few: u64| *more = drawn_out(*more as f64, few as f64).max(0.0).round() as u64;
        let samples = self.step_ms.samples.iter().zip(&few.step_ms.samples).map(|(&more, &few)| drawn_out(more, few));
        let mut long = Self { step_ms: Spread::new(samples.collect()), ..self };
        for (more, few) in long.exposed.each().zip(few.exposed.each()) {
            longer(more, *few);
        }
        for (more, few) in long.exposed_to_peers_ns.iter_mut().zip(few.exposed_to_peers_ns) {
            longer(more, few);
        }
        for (more, few) in long.counters.each().zip(few.counters.each()) {
            longer(more, *few);
        }
        for (length, more) in &mut long.documents {
            *more = drawn_out(*more as f64, few.documents.get(length).copied().unwrap_or(0) as f64).round() as usize;
        }
        long
    }

    /// The results in a record. With several GPUs, the speed is that of one GPU, and counts are totals over the ranks. `tracks` is the
    /// timeline, if one was recorded; `matmul_flops` is the device's speed in a large matrix product.
    pub(crate) fn outcome(self, shape: &ModelShape, plan: &Plan, matmul_flops: Option<f64>, tracks: &[Recorder]) -> Outcome {
        let head_rows = plan.recipe.numerics.head_rows;
        let left_out = match head_rows {
            HeadRows::All => 0.0,
            HeadRows::Trained => shape.output_flops() * self.untrained as f64,
        };
        let flops = StepFlops::of(shape, &self.documents, &plan.placement.layer_policies)
            .less(left_out)
            .shared(self.step_ms.samples.len() * plan.site.ranks);
        let seconds = self.step_ms.median / 1e3;
        Outcome {
            tokens_per_step: plan.tokens_per_step(),
            tokens_per_second: plan.tokens_per_step() as f64 / seconds,
            speed: Speed::new((flops, flops_formula(shape, head_rows)), seconds, matmul_flops),
            exposed: self.exposed(),
            link: self.link(tracks),
            adam: self.adam(),
            verdicts: self.verdicts,
            bucket_steps: self.bucket_steps,
            loss: self.loss,
            expert_load: self.expert_load,
            step_ms: self.step_ms,
        }
    }

    /// Mean of a total over the steps.
    fn per_step(&self, total: u64) -> f64 {
        total as f64 / self.step_ms.samples.len() as f64
    }

    fn exposed(&self) -> ExposedTime {
        let Exposed { cpu_ns, transfer_ns, peer_ns } = self.exposed;
        let [cpu_ms, transfer_ms, peer_ms] = [cpu_ns, transfer_ns, peer_ns].map(|ns| self.per_step(ns) / 1e6);
        let mean_ms = self.step_ms.total() / self.step_ms.samples.len() as f64;
        let device_busy_share = (1.0 - (cpu_ms + transfer_ms + peer_ms) / mean_ms).max(0.0);
        let peer_rank = (0..RANKS_MAX).max_by_key(|&rank| (self.exposed_to_peers_ns[rank], Reverse(rank))).filter(|_| peer_ns > 0);
        ExposedTime { cpu_ms, transfer_ms, peer_ms, peer_rank, device_busy_share }
    }

    fn link(&self, tracks: &[Recorder]) -> Link {
        let Counters { d2h_bytes, h2d_bytes, .. } = self.counters;
        let seconds = self.step_ms.total() / 1e3;
        Link {
            d2h_bytes: self.per_step(d2h_bytes),
            h2d_bytes: self.per_step(h2d_bytes),
            d2h_gb_per_s: d2h_bytes as f64 / seconds / 1e9,
            h2d_gb_per_s: h2d_bytes as f64 / seconds / 1e9,
            d2h_busy_gb_per_s: per_ns(d2h_bytes, self.time_on(tracks, "d2h", "copy_d2h")),
            h2d_busy_gb_per_s: per_ns(h2d_bytes, self.time_on(tracks, "h2d", "copy_h2d")),
        }
    }

    /// Nanoseconds of the spans `name` on `track`, of any rank, that began within the timed steps; 0 without a timeline.
    fn time_on(&self, tracks: &[Recorder], track: &str, name: &str) -> u64 {
        let spans = tracks.iter().filter(|recorder| recorder.track.ends_with(track)).flat_map(Recorder::spans);
        spans.filter(|span| span.name == name && self.window_ns.contains(&span.start_ns)).map(|span| span.duration_ns).sum()
    }

    fn adam(&self) -> AdamOutcome {
        let Counters { adam_elems, adam_bytes, adam_busy_ns, .. } = self.counters;
        AdamOutcome {
            params: self.per_step(adam_elems),
            busy_ms: self.per_step(adam_busy_ns) / 1e6,
            busy_gparams_per_s: per_ns(adam_elems, adam_busy_ns),
            busy_gb_per_s: per_ns(adam_bytes, adam_busy_ns),
        }
    }
}

/// Rate in 10^9 a second; `None` if no time was spent.
fn per_ns(amount: u64, ns: u64) -> Option<f64> {
    (ns > 0).then(|| amount as f64 / ns as f64)
}
