//! The ranks of this process: one thread and one engine per rank. The first rank runs on the caller's thread; the others follow its orders.

use super::cpu_slice::CpuSlice;
use crate::device::{Kernels, Peers};
use crate::engine::executor::Engine;
use crate::engine::pool::Pool;
use crate::engine::ranks::peer_exchange::PeerTransport;
use crate::engine::ranks::rendezvous::Rendezvous;
use crate::engine::step_job::StepJob;
use crate::error::{Error, Result};
use crate::host::doorbell::Doorbell;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::ranks::RankContext;
use crate::ranks::progress::ProgressCounters;
use std::sync::Arc;

/// The shared progress counters, and for each rank of this process the connection to ranks of other processes.
pub(crate) struct LocalRanks {
    pub(crate) progress: Arc<ProgressCounters>,
    pub(crate) reaches: Vec<PeerTransport>,
}

impl LocalRanks {
    /// The connections for a `plan` whose ranks are all in this process.
    pub(super) fn of_this_process(plan: &Plan) -> Self {
        let progress = Arc::new(ProgressCounters::new(plan.board_sizes(), plan.site.adversary));
        Self { progress, reaches: (0..plan.site.ranks).map(|_| PeerTransport::Memory).collect() }
    }
}

/// Creates the engines of this process's ranks, each from the device and pool that `make` creates. `make` gets the rank's share, its
/// doorbell and its index in the process, and runs on the rank's thread, where the device stays. The engine of the first rank goes to
/// `lead`, those of the other ranks to `follow`.
///
/// # Errors
/// `Resource` if memory or threads are not available; errors of `lead`; `Rank` if another rank has failed.
pub(crate) fn run<D: Kernels + Peers, T>(
    LocalRanks { progress, reaches }: LocalRanks,
    shape: &ModelShape,
    cpu_slices: &[CpuSlice],
    make: impl Fn(&CpuSlice, &Arc<Doorbell>, usize) -> Result<(D, Pool<StepJob>)> + Sync,
    lead: impl FnOnce(Engine<D>, &RankContext) -> Result<T>,
    follow: impl Fn(&mut Engine<D>, &RankContext) -> Result<()> + Sync,
) -> Result<T> {
    let (local_ranks, rendezvous) = (progress.local_ranks(), Arc::new(Rendezvous::new(cpu_slices.len())));
    let join = |context: &RankContext, transport: PeerTransport| -> Result<Engine<D>> {
        let place = context.rank - local_ranks.start;
        let cpu_slice = &cpu_slices[place];
        let (dev, pool) = make(cpu_slice, &progress.bell(context.rank), place)?;
        Engine::join((cpu_slice.plan.clone(), shape.clone()), (dev, pool), context, &rendezvous, transport)
    };
    std::thread::scope(|scope| {
        let mut seats = local_ranks.clone().map(|rank| Leave(RankContext { progress: progress.clone(), rank })).zip(reaches);
        let (leader, transport) = seats.next().expect("a process has a rank");
        let mut followers = Vec::new();
        for (leave, transport) in seats {
            let (rank, join, follow) = (leave.0.rank, &join, &follow);
            let body = move || {
                if let Err(error) = join(&leave.0, transport).and_then(|mut engine| follow(&mut engine, &leave.0)) {
                    leave.0.fail(&error);
                }
            };
            let spawned = std::thread::Builder::new().name(format!("rank-{rank}")).spawn_scoped(scope, body);
            followers.push(spawned.map_err(|e| Error::resource(format!("start rank {rank}"), e))?);
        }
        let outcome = join(&leader.0, transport).map_err(|error| leader.0.attribute(error)).and_then(|engine| lead(engine, &leader.0));
        drop(leader);
        // A panic of a follower has printed its message, and `lead` returns it as an error.
        for follower in followers {
            _ = follower.join();
        }
        outcome
    })
}

/// Marks the rank as gone when it is dropped, also in a panic, because no other rank can continue without it.
pub(crate) struct Leave(pub(crate) RankContext);

impl Drop for Leave {
    fn drop(&mut self) {
        match std::thread::panicking() {
            true => self.0.progress.fail(self.0.rank, "it panicked; see the message above"),
            false => self.0.progress.leave(self.0.rank),
        }
        if let Some(turn_token) = self.0.progress.turn_token() {
            turn_token.leave(self.0.rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::Settings;
    use crate::data::rows::batch::{Batch, Batches};
    use crate::device::cpu::CpuDevice;
    use crate::hardware::topology::Topology;
    use crate::launch::cpu_slice;
    use crate::launch::engine::{cpu_device, cpu_pool};
    use crate::planner::machine::Machine;
    use std::time::{Duration, Instant};

    struct Zeros;

    impl Batches for Zeros {
        fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
            batch.tokens.iter_mut().chain(&mut *batch.targets).for_each(|x| *x = 0);
            Ok(())
        }
    }

    /// Runs steps until a rank fails.
    fn endless(plan: &Plan, shape: &ModelShape, follow: impl Fn(&mut Engine<CpuDevice>, &RankContext) -> Result<()> + Sync) -> Error {
        let cpu_slices = cpu_slice::of(plan, &Topology::this_machine(), &vec![None; plan.site.ranks]);
        let make = |cpu_slice: &CpuSlice, bell: &Arc<Doorbell>, _| Ok((cpu_device(&cpu_slice.plan, bell)?, cpu_pool(cpu_slice, bell)?));
        let lead = |mut engine: Engine<CpuDevice>, _: &RankContext| -> Result<()> {
            engine.init_state(1, 1)?;
            engine.send_weights()?;
            loop {
                engine.step(1e-3, &mut Zeros)?;
            }
        };
        run(LocalRanks::of_this_process(plan), shape, &cpu_slices, make, lead, follow).unwrap_err()
    }

    /// Rank 1 fails at a random moment, in any phase of a step: all ranks end at once, and rank 0 reports the error of rank 1.
    #[test]
    fn the_failure_of_a_rank_ends_all_and_names_it() {
        let shape = ModelShape::demo().with_layers(1);
        for nth in 0..50u64 {
            let adversary = (nth % 2 == 1).then_some(nth);
            let settings = Settings { gpus: 3, seq_length: 16, threads: Some(3), adversary, ..Settings::demo() };
            let plan = Plan::new(&settings.request(&shape), &Machine::cpu(3), false).unwrap();
            let follow = |engine: &mut Engine<CpuDevice>, context: &RankContext| {
                if context.rank == 1 {
                    let context = context.clone();
                    std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_micros(700 * nth));
                        context.fail(&Error::resource("use the device", "it fell off the bus"));
                    });
                }
                engine.follow(|| Ok(()))
            };
            let start = Instant::now();
            let error = endless(&plan, &shape, follow);
            assert_eq!(error.to_string(), "rank 1: use the device: it fell off the bus");
            assert!(start.elapsed() < crate::sweep::PROMPTLY, "{nth}: {:?}", start.elapsed());
        }
    }

    #[test]
    fn a_rank_that_panics_before_the_first_step_is_named() {
        let settings = Settings { gpus: 2, seq_length: 16, threads: Some(2), ..Settings::demo() };
        let shape = ModelShape::demo();
        let plan = Plan::new(&settings.request(&shape), &Machine::cpu(2), false).unwrap();
        let follow = |_: &mut Engine<CpuDevice>, _: &RankContext| -> Result<()> { panic!("on purpose") };
        let error = endless(&plan, &shape, follow);
        assert_eq!(error.to_string(), "rank 1: it panicked; see the message above");
    }
}
