//! The error for a plan that does not fit: both sizes, the memory that is short, and the smallest change that helps.

use super::budget::Balance;
use super::machine::Machine;
use super::order::in_segments;
use crate::bucket::layout::Tier;
use crate::error::{Error, Result};
use crate::memory::MemorySpace;
use crate::optim::moments::Moments;
use crate::optim::optimizer::Optimizer;
use crate::planner::plan::Plan;
use crate::request::Request;
use crate::request::choices::{ActivationsChoice, MastersChoice, ResidentBuckets, Strategy, WeightsChoice};
use crate::units::Bytes;

/// Shorter sequences are never recommended.
const SEQ_LENGTH_MIN: usize = 128;

/// The shortage of host memory if the host had to hold the states that the device cannot.
fn host_lacks(host: Balance) -> String {
    let [needed, available] = Bytes::apart([host.needed, host.available]);
    let bounds = "free memory, cgroup limit, --host-limit";
    format!("the rest would need {needed} of host memory, {available} are available ({bounds})")
}

impl Plan {
    /// Rejects a plan that does not fit, before any allocation. `request` is its input. The advice is found by planning
    /// again with one changed choice.
    ///
    /// # Errors
    /// `Resource` with the memory that is too small, both sizes, and the smallest change that helps.
    pub(crate) fn check_fits(&self, request: &Request) -> Result<()> {
        let Some(shortage) = self.shortage() else { return Ok(()) };
        let host = self.host_shortage(request);
        let (shortage, advice) = match (host, self.advice(request)) {
            (Some(host), None) => (host, format!("short by {}", Bytes(host.lacking()))),
            (Some(host), Some(advice)) if shortage.space == MemorySpace::Device => (shortage, format!("{}; {advice}", host_lacks(host))),
            (_, advice) => (shortage, advice.unwrap_or_else(|| "no smaller batch or sequence would fit either".into())),
        };
        let (memory, bounds) = match shortage.space {
            MemorySpace::Device => ("device memory", "free memory, --hbm-limit"),
            MemorySpace::Host => ("host memory", "free memory, cgroup limit, --host-limit"),
        };
        let [needed, available] = Bytes::apart([shortage.needed, shortage.available]);
        let cause = format!("{} parameters need {needed}, {available} of {memory} are available ({bounds}); {advice}", self.params());
        Err(Error::resource(format!("not enough {memory}"), cause))
    }

    /// The memory with the largest shortage.
    pub(crate) fn shortage(&self) -> Option<Balance> {
        self.balances().into_iter().filter(|balance| balance.lacking() > 0).max_by_key(Balance::lacking)
    }

    /// The host's shortage, if only the host is too small. States that the host cannot hold are placed on the device, which then appears
    /// short instead.
    fn host_shortage(&self, request: &Request) -> Option<Balance> {
        let [_, host] = self.balances();
        let machine = Machine { host_bytes: u64::MAX, ..self.site.machine.clone() };
        let mut unlimited = request.with_split_masters().unwrap_or_else(|| request.clone());
        unlimited.site.host_limit = None;
        let other = Plan::new(&unlimited, &machine, self.site.trace_spans > 0).ok().filter(|plan| plan.shortage().is_none())?;
        let [_, needed] = other.balances();
        Some(Balance { available: host.available, ..needed }).filter(|balance| balance.lacking() > 0)
    }

    /// The first change of one setting with which the plan fits.
    fn advice(&self, request: &Request) -> Option<String> {
        self.remedies(request).into_iter().find_map(|(flag, changed)| {
            let plan = self.fitting(&changed).or_else(|| in_segments(&changed).find_map(|changed| self.fitting(&changed)))?;
            let value = match flag {
                "resident-buckets" => format!(" {}", plan.placement.layout.buckets_in(Tier::Device).len()),
                "activations" if changed.wanted.activations == ActivationsChoice::Auto => " auto".into(),
                "activations" => " recompute-block".into(),
                "per-device-train-batch-size" => format!(" {}", plan.recipe.step.micro_batch),
                "layer-order" => format!(" {}", plan.layer_order()),
                "gradient-shares" | "moments bfloat16 --gradient-shares" => format!(" {}", plan.recipe.step.shares),
                "seq-length" => format!(" {}", plan.recipe.step.seq_length),
                _ => String::new(),
            };
            Some(format!("--{flag}{value} would fit"))
        })
    }

    /// The plan of `request` on this machine, if it fits.
    fn fitting(&self, request: &Request) -> Option<Self> {
        Self::new(request, &self.site.machine, self.site.trace_spans > 0).ok().filter(|plan| plan.shortage().is_none())
    }

    /// Requests that differ in the named flag, the smallest change first: changes that cost time come before changes of the training.
    fn remedies(&self, request: &Request) -> Vec<(&'static str, Request)> {
        let with = |change: &dyn Fn(&mut Request)| {
            let mut changed = request.clone();
            change(&mut changed);
            changed
        };
        let halves = |from: usize, least: usize| std::iter::successors(Some(from / 2), |n| Some(n / 2)).take_while(move |&n| n >= least);
        let smaller = |batch: usize| {
            let steps = self.micro_batches_of_rank() * self.recipe.step.micro_batch / batch;
            with(&|r| {
                r.wanted.split.micro_batch = batch;
                // Keeps the requested tokens per step.
                r.wanted.split.accumulation = r.cut.tokens.map_or(r.wanted.split.accumulation, |_| Some(steps));
            })
        };
        let batches = halves(self.recipe.step.micro_batch, 1).map(|batch| ("per-device-train-batch-size", smaller(batch)));
        let lengths = halves(self.recipe.step.seq_length, SEQ_LENGTH_MIN).map(|n| ("seq-length", with(&|r| r.cut.seq_length = n)));
        let mut remedies = vec![
            ("resident-buckets", with(&|r| r.wanted.resident_buckets = ResidentBuckets::Auto)),
            ("activations", with(&|r| r.wanted.activations = ActivationsChoice::Auto)),
            ("activations", with(&|r| r.wanted.activations = ActivationsChoice::RecomputeBlock)),
            ("strategy superoffload", with(&|r| r.strategy = Strategy::Superoffload)),
            ("weights sharded", with(&|r| r.wanted.weights = WeightsChoice::Sharded)),
            ("weights fully-sharded", with(&|r| r.wanted.weights = WeightsChoice::FullySharded)),
            ("weights flow", with(&|r| r.wanted.weights = WeightsChoice::Flow)),
            ("masters auto", with(&|r| r.wanted.masters = MastersChoice::Auto)),
            ("allow-changed numerics", with(&|r| r.kernels.loss_tile = None)),
        ];
        remedies.extend(in_segments(request).map(|changed| ("layer-order", changed)));
        remedies.extend(batches);
        // fp32 sums may be stored on the host. Gradients of a single share accumulate in place.
        let is_alone = self.site.ranks == 1 && self.recipe.step.micro_batches > 1 && self.recipe.step.shares == 1;
        let partial_sums = request.cut.shares.or(is_alone.then_some(self.recipe.step.micro_batches));
        remedies.push(("gradient-shares", with(&|r| r.cut.shares = partial_sums)));
        if !request.recipe.numerics.inverse_rollback {
            remedies.push(("moments bfloat16", with(&|r| r.recipe.numerics.moments = Moments::Bfloat16)));
            let both = with(&|r| (r.cut.shares, r.recipe.numerics.moments) = (partial_sums, Moments::Bfloat16));
            remedies.extend(is_alone.then_some(("moments bfloat16 --gradient-shares", both)));
            let Optimizer::AdamW { hyper, .. } = request.recipe.optimizer();
            let int8 = (hyper.beta1 <= Moments::Int8.beta1_max()).then(|| with(&|r| r.recipe.numerics.moments = Moments::Int8));
            remedies.extend(int8.map(|int8| ("moments int8", int8)));
        }
        remedies.push(("nondeterministic", with(&|r| r.kernels.deterministic = false)));
        remedies.extend(lengths);
        remedies.retain(|(_, changed)| changed != request);
        remedies
    }
}
