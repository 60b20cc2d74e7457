//! The error for a plan that does not fit: both sizes, the memory that is short, and the smallest change that helps.

use super::budget::Balance;
use super::machine::Machine;
use crate::bucket::layout::Tier;
use crate::config::options::{ActivationsChoice, ResidentBuckets, Rollback, Strategy, WeightsChoice};
use crate::config::settings::Settings;
use crate::error::{Error, Result};
use crate::memory::MemorySpace;
use crate::model::shape::ModelShape;
use crate::optim::moments::Moments;
use crate::planner::plan::Plan;
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
    /// Rejects a plan that does not fit, before any allocation. `settings` and `shape` are its inputs. The advice is found by planning
    /// again with one changed setting.
    ///
    /// # Errors
    /// `Resource` with the memory that is too small, both sizes, and the smallest change that helps.
    pub(crate) fn check_fits(&self, settings: &Settings, shape: &ModelShape) -> Result<()> {
        let Some(shortage) = self.shortage() else { return Ok(()) };
        let host = self.host_shortage(settings, shape);
        let (shortage, advice) = match (host, self.advice(settings, shape)) {
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
    fn host_shortage(&self, settings: &Settings, shape: &ModelShape) -> Option<Balance> {
        let [_, host] = self.balances();
        let (machine, settings) =
            (Machine { host_bytes: u64::MAX, ..self.site.machine.clone() }, Settings { host_limit: None, ..settings.clone() });
        let other = Plan::new(&settings, shape, &machine, self.site.trace_spans > 0).ok().filter(|plan| plan.shortage().is_none())?;
        let [_, needed] = other.balances();
        Some(Balance { available: host.available, ..needed }).filter(|balance| balance.lacking() > 0)
    }

    /// The first change of one setting with which the plan fits.
    fn advice(&self, settings: &Settings, shape: &ModelShape) -> Option<String> {
        self.remedies(settings).into_iter().find_map(|(flag, changed)| {
            let plan =
                Plan::new(&changed, shape, &self.site.machine, self.site.trace_spans > 0).ok().filter(|plan| plan.shortage().is_none())?;
            let value = match flag {
                "resident-buckets" => format!(" {}", plan.placement.layout.buckets_in(Tier::Device).len()),
                "activations" if changed.activations == ActivationsChoice::Auto => " auto".into(),
                "activations" => " recompute-block".into(),
                "per-device-train-batch-size" => format!(" {}", plan.recipe.step.micro_batch),
                "gradient-shares" | "moments bfloat16 --gradient-shares" => format!(" {}", plan.recipe.step.shares),
                "seq-length" => format!(" {}", plan.recipe.step.seq_length),
                _ => String::new(),
            };
            Some(format!("--{flag}{value} would fit"))
        })
    }

    /// Settings that differ in the named flag, the smallest change first: changes that cost time come before changes of the training.
    fn remedies(&self, settings: &Settings) -> Vec<(&'static str, Settings)> {
        let with = |change: &dyn Fn(&mut Settings)| {
            let mut changed = settings.clone();
            change(&mut changed);
            changed
        };
        let halves = |from: usize, least: usize| std::iter::successors(Some(from / 2), |n| Some(n / 2)).take_while(move |&n| n >= least);
        let smaller = |batch: usize| {
            let steps = self.micro_batches_of_rank() * self.recipe.step.micro_batch / batch;
            with(&|s| {
                s.per_device_train_batch_size = batch;
                // Keeps the requested tokens per step.
                s.gradient_accumulation_steps = s.tokens_per_step.map_or(s.gradient_accumulation_steps, |_| Some(steps));
            })
        };
        let batches = halves(self.recipe.step.micro_batch, 1).map(|batch| ("per-device-train-batch-size", smaller(batch)));
        let lengths = halves(self.recipe.step.seq_length, SEQ_LENGTH_MIN).map(|n| ("seq-length", with(&|s| s.seq_length = n)));
        let mut remedies = vec![
            ("resident-buckets", with(&|s| s.resident_buckets = ResidentBuckets::Auto)),
            ("activations", with(&|s| s.activations = ActivationsChoice::Auto)),
            ("activations", with(&|s| s.activations = ActivationsChoice::RecomputeBlock)),
            ("strategy superoffload", with(&|s| s.strategy = Strategy::Superoffload)),
            ("weights sharded", with(&|s| s.weights = WeightsChoice::Sharded)),
            ("weights fully-sharded", with(&|s| s.weights = WeightsChoice::FullySharded)),
            ("weights flow", with(&|s| s.weights = WeightsChoice::Flow)),
            ("allow-changed numerics", with(&|s| s.loss_tile = None)),
        ];
        remedies.extend(batches);
        // fp32 sums may be stored on the host. Gradients of a single share accumulate in place.
        let is_alone = self.site.ranks == 1 && self.recipe.step.micro_batches > 1 && self.recipe.step.shares == 1;
        let partial_sums = settings.gradient_shares.or(is_alone.then_some(self.recipe.step.micro_batches));
        remedies.push(("gradient-shares", with(&|s| s.gradient_shares = partial_sums)));
        if settings.rollback == Rollback::Deferred {
            remedies.push(("moments bfloat16", with(&|s| s.moments = Moments::Bfloat16)));
            let both = with(&|s| (s.gradient_shares, s.moments) = (partial_sums, Moments::Bfloat16));
            remedies.extend(is_alone.then_some(("moments bfloat16 --gradient-shares", both)));
        }
        remedies.push(("nondeterministic", with(&|s| s.nondeterministic = true)));
        remedies.extend(lengths);
        remedies.retain(|(_, changed)| changed != settings);
        remedies
    }
}
