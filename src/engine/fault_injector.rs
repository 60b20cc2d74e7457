//! What tests do to a run on purpose: gradients that are made wrong, and a coin that decides who goes on first. A normal run has none.

use crate::config::options::{FaultKind, FaultPhase, Injection, RankFault};
use crate::device::{DeviceSlice, Kernels, Poke};
use crate::error::{Error, Result};
use crate::planner::plan::Plan;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::ops::Range;
use std::time::Duration;

/// How long a slow rank stands still.
const SLOW: Duration = Duration::from_secs(2);

/// What a plan asks for of it.
pub(super) struct FaultInjector {
    faults: Vec<Injection>,
    rank_faults: Vec<RankFault>,
    coin: Option<ChaCha8Rng>,
}

impl FaultInjector {
    /// What `rank` does; `None` in a normal run.
    pub(super) fn of(plan: &Plan, rank: usize) -> Option<Self> {
        let coin = plan.adversary.map(|seed| ChaCha8Rng::seed_from_u64(seed ^ 0xc01));
        let rank_faults: Vec<_> = plan.rank_faults.iter().filter(|fault| fault.rank == rank).copied().collect();
        let is_normal = coin.is_none() && plan.inject.is_empty() && rank_faults.is_empty();
        (!is_normal).then(|| Self { faults: plan.inject.clone(), rank_faults, coin })
    }

    /// Goes wrong if that is asked for in this phase of a step, counted from 1.
    ///
    /// # Errors
    /// `Resource` that names phase and step.
    pub(super) fn strike(&self, phase: FaultPhase, step: u64) -> Result<()> {
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

    /// Writes what is injected in a step, counted from 1, over the gradients of one of its shares, as far as the flat range goes.
    pub(super) fn spoil<D: Kernels>(&self, dev: &mut D, grads: DeviceSlice, range: &Range<usize>, step: u64, share: usize) -> Result<()> {
        let mut hit = self.faults.iter().filter(|fault| (fault.step, fault.share) == (step, share) && range.contains(&fault.element));
        hit.try_for_each(|fault| dev.launch(Poke { x: grads, index: fault.element, value: fault.value }))
    }

    /// Whether the coin decides: nothing goes on by itself then, so that nothing under way is a deadlock.
    pub(super) fn decides(&self) -> bool {
        self.coin.is_some()
    }

    /// Whether a pool without threads does its job before the driver looks.
    pub(super) fn pool_hurries(&mut self) -> bool {
        self.falls(4)
    }

    /// Whether it goes on before the device, where both wait.
    pub(super) fn pool_is_first(&mut self) -> bool {
        self.falls(2)
    }

    /// The coin, true one time in `faces`.
    fn falls(&mut self, faces: u32) -> bool {
        self.coin.as_mut().is_some_and(|coin| coin.next_u32().is_multiple_of(faces))
    }
}
