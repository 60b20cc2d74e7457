//! Faults that tests inject: wrong gradients, failures of a rank, and a random schedule. A normal run has none.

use crate::device::{DeviceSlice, Kernels, Poke};
use crate::error::{Error, Result};
use crate::faults::{FaultKind, FaultPhase, Injection, RankFault};
use crate::planner::plan::Plan;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::ops::Range;
use std::time::Duration;

/// Duration of the pause of a slow rank.
const SLOW: Duration = Duration::from_secs(2);

/// The faults of a plan.
pub(in crate::engine) struct FaultInjector {
    faults: Vec<Injection>,
    rank_faults: Vec<RankFault>,
    coin: Option<ChaCha8Rng>,
}

impl FaultInjector {
    /// The faults of `rank`; `None` in a normal run.
    pub(in crate::engine) fn of(plan: &Plan, rank: usize) -> Option<Self> {
        let coin = plan.site.adversary.map(|seed| ChaCha8Rng::seed_from_u64(seed ^ 0xc01));
        let rank_faults: Vec<_> = plan.site.rank_faults.iter().filter(|fault| fault.rank == rank).copied().collect();
        let is_normal = coin.is_none() && plan.recipe.inject.is_empty() && rank_faults.is_empty();
        (!is_normal).then(|| Self { faults: plan.recipe.inject.clone(), rank_faults, coin })
    }

    /// Runs the fault that the plan has for this phase of a step, if any. Steps are counted from 1.
    ///
    /// # Errors
    /// `Resource` that names phase and step.
    pub(in crate::engine) fn inject(&self, phase: FaultPhase, step: u64) -> Result<()> {
        let Some(fault) = self.rank_faults.iter().find(|fault| (fault.step, fault.phase) == (step, phase)) else { return Ok(()) };
        match fault.kind {
            FaultKind::Error => Err(Error::resource(format!("{phase:?} of step {step}"), "it was to fail (faults)")),
            FaultKind::Panic => panic!("{phase:?} of step {step} was to panic (faults)"),
            FaultKind::Hang => loop {
                std::thread::park();
            },
            FaultKind::Slow => {
                std::thread::sleep(SLOW);
                Ok(())
            }
        }
    }

    /// Writes the values injected in `step`, counted from 1, over the gradients of `share` within the flat `range`.
    pub(in crate::engine) fn spoil<D: Kernels>(
        &self,
        dev: &mut D,
        grads: DeviceSlice,
        range: &Range<usize>,
        step: u64,
        share: usize,
    ) -> Result<()> {
        let mut hit = self.faults.iter().filter(|fault| (fault.step, fault.share) == (step, share) && range.contains(&fault.element));
        hit.try_for_each(|fault| dev.launch(Poke { x: grads, index: fault.element, value: fault.value }))
    }

    /// Whether the schedule is random. Then nothing progresses without the driver, and an idle driver with nothing pending is a deadlock.
    pub(in crate::engine) fn decides(&self) -> bool {
        self.coin.is_some()
    }

    /// Whether a pool without threads completes its job before the driver polls.
    pub(in crate::engine) fn pool_hurries(&mut self) -> bool {
        self.falls(4)
    }

    /// Whether the pool progresses before the device when both have work.
    pub(in crate::engine) fn pool_is_first(&mut self) -> bool {
        self.falls(2)
    }

    /// Random choice, true one time in `faces`.
    fn falls(&mut self, faces: u32) -> bool {
        self.coin.as_mut().is_some_and(|coin| coin.next_u32().is_multiple_of(faces))
    }
}
