//! Tests the exchange alone: ranks with gradients and weights only, and an adversary that delays operations at random. Each number encodes
//! its rank and step, so that reading or overwriting too early yields a wrong number.

use super::*;
use crate::bucket::layout::{BucketLayout, Tier};
use crate::config::settings::Settings;
use crate::device::cpu::{CpuDevice, QUEUED_OPS_MAX, StreamOrder};
use crate::device::{Device, DeviceSlice, EventId, Launch, Poke, Stream};
use crate::dtype::Dtype;
use crate::engine::ranks::exchange::{GradientPort, RendezvousPort, ReportPort, WeightPort};
use crate::engine::ranks::rendezvous::RankMemory;
use crate::engine::ranks::shards::Shards;
use crate::engine::watch::driver_state::DriverState;
use crate::host::pinned::{HostMemory, PinnedSlice, RING_GRAIN_BYTES};
use crate::launch::open;
use crate::memory::RingShape;
use crate::model::shape::ModelShape;
use crate::optim::norm::{self, BLOCK};
use crate::planner::machine::Machine;
use crate::ranks::progress::{CounterSizes, ProgressCounters, StepOutcome};
use crate::units::NormSq;
use proptest::prelude::*;
use std::panic::AssertUnwindSafe;

#[derive(Clone, Copy, Debug)]
struct Case {
    seed: u64,
    ranks: usize,
    rounds: usize,
    blocks: usize,
    bucket_blocks: usize,
    /// Buckets in the ring of gradients, if the layout has more; 0 means no ring.
    ring: usize,
}

const STEPS: u64 = 3;

type Card = <CpuDevice as Peers>::PeerHandle;

/// Not integers, so that the order of a sum is visible.
fn gradient(step: u64, partial_sum: usize, bucket: usize) -> f32 {
    (step * 4096 + partial_sum as u64 * 256 + bucket as u64) as f32 * 0.1
}

fn weight(step: u64, owner: usize, bucket: usize) -> f32 {
    -((step * 4096 + owner as u64 * 256 + bucket as u64) as f32)
}

/// Partial sums whose total depends on their order.
fn partial(block: usize) -> f32 {
    [1e12, 1.7e-5, 3e-4][block % 3] * (block + 1) as f32
}

fn plan(case: Case) -> Plan {
    let settings = Settings { seq_length: 8, per_device_train_batch_size: 1, ..Settings::demo() };
    let mut plan = Plan::new(&settings.request(&ModelShape::demo()), &Machine::cpu(1), false).unwrap();
    let layout = BucketLayout::new(case.blocks * BLOCK, case.bucket_blocks * BLOCK, Tier::Device);
    let partial_sums = case.ranks * case.rounds;
    // A single rank keeps no slices of sums.
    let is_ringed = case.ranks > 1 && (1..layout.count()).contains(&case.ring);
    let ring = RingShape { ringed_elems: layout.flat_elems(), period_elems: case.ring * layout.bucket_elems() };
    let grad_ring = is_ringed.then_some(ring);
    plan.site.ranks = case.ranks;
    (plan.placement.layout, plan.placement.rings.grads) = (layout, grad_ring);
    plan.recipe.numerics.dtype = Dtype::Float32;
    (plan.recipe.step.shares, plan.recipe.step.micro_batches) = (partial_sums, partial_sums);
    plan
}

/// Not used by these tests.
fn driver_state(context: &RankContext) -> Arc<DriverState> {
    Arc::new(DriverState::new(0, context.progress.bell(context.rank), Arc::default()))
}

struct Rank {
    dev: CpuDevice,
    exchange: PeerExchange<Card>,
    grads: DeviceSlice,
    weights: DeviceSlice,
    stepped: Vec<EventId>,
    host: HostMemory,
    seen: PinnedSlice,
    sums: Vec<usize>,
}

impl Rank {
    fn join(case: Case, context: &RankContext, rendezvous: &Arc<Rendezvous<Card>>) -> Result<Self> {
        let plan = plan(case);
        let schedule = StreamOrder::Adversary { seed: case.seed + context.rank as u64 };
        let mut dev = open::cpu(1, schedule, context.progress.bell(context.rank), 0)?;
        let mut exchange = PeerExchange::new(&mut dev, &plan, context.clone(), rendezvous.clone(), PeerTransport::Memory)?;
        let mut flat = |ring| Lease::default().alloc_flat(&mut dev, "flat", plan.placement.layout.flat_elems(), Dtype::Float32, ring);
        let (grads, weights) = (flat(plan.placement.rings.grads)?, flat(None)?);
        let stepped = (0..plan.placement.layout.count()).map(|_| dev.event()).collect::<Result<Vec<_>>>()?;
        let mut host = HostMemory::default();
        let seen = host.alloc("seen", 4 * plan.placement.layout.count() * case.ranks)?;
        exchange.introduce(
            &mut dev,
            RankMemory { grads, weights, shards: Shards::default(), activations: None },
            stepped.clone(),
            &driver_state(context),
        );
        (0..case.ranks).for_each(|rank| context.progress.bell(rank).ring());
        context.progress.bell(context.rank).wait_until(|| rendezvous.is_full());
        let mut rank = Self { dev, exchange, grads, weights, stepped, host, seen, sums: Vec::new() };
        rank.exchange.exchange_handles(&mut rank.dev)?;
        context.progress.turn_token().unwrap().take(context.rank);
        Ok(rank)
    }

    /// Runs the event loop until `ready`.
    fn until(&mut self, mut ready: impl FnMut(&mut Self) -> Result<bool>) -> Result<()> {
        loop {
            while let Some(bucket) = self.exchange.poll(&mut self.dev, self.grads)? {
                self.sums.push(bucket);
            }
            self.exchange.gather(&mut self.dev, self.weights)?;
            for stream in [Stream::Reduce, Stream::Gather] {
                // A bucket's pulls may fill the queue.
                assert!(self.dev.ahead(stream) < QUEUED_OPS_MAX + 4 * self.exchange.peers.len() + 4, "{stream:?} has no room");
            }
            if ready(self)? {
                return Ok(());
            }
            if self.dev.idle()? {
                RendezvousPort::<CpuDevice>::pass(&self.exchange)?
            } else {
                RendezvousPort::<CpuDevice>::pass_idle(&self.exchange)?
            }
        }
    }

    /// One step: writes every partial sum, reads the sums, sends new weights, and reads them at the point where all ranks use them.
    fn step(&mut self, case: Case, step: u64) -> Result<()> {
        let (own, count) = (self.exchange.slices.clone(), self.stepped.len());
        for round in 0..case.rounds {
            if round > 0 {
                self.until(|rank| rank.exchange.may_overwrite(&mut rank.dev, own.layout().flat_elems()))?;
            }
            for bucket in 0..count {
                if let Some(before) = bucket.checked_sub(case.ring).filter(|_| case.ring > 0) {
                    self.until(|rank| rank.exchange.may_overwrite(&mut rank.dev, own.layout().range(before).end))?;
                }
                let value = gradient(step, round * case.ranks + own.rank(), bucket);
                for flat in (0..case.ranks).map(|owner| own.of(owner, bucket)).filter(|flat| !flat.is_empty()) {
                    self.dev.launch(Poke { x: self.grads, index: flat.start, value })?;
                }
                self.exchange.written(&mut self.dev, self.grads, bucket)?;
            }
        }
        self.until(|rank| Ok(GradientPort::<CpuDevice>::is_summed(&rank.exchange)))?;
        assert_eq!(std::mem::take(&mut self.sums), Vec::from_iter(0..count), "each bucket once, in order");
        let want = |bucket| (0..case.ranks * case.rounds).map(|partial_sum| gradient(step, partial_sum, bucket)).sum();
        for bucket in (0..count).filter(|&bucket| !own.global(bucket).is_empty()) {
            let (flat, local) = (own.global(bucket), own.local(bucket));
            let sum = GradientPort::<CpuDevice>::own_grads(&self.exchange, self.grads, &flat, local.start);
            self.see(Stream::Reduce, sum.slice(0, 1), bucket, want(bucket))?;
        }
        self.verdict(case, step)?;
        // The pool's order is arbitrary.
        for bucket in (0..count).rev().map(|bucket| (bucket + case.seed as usize) % count) {
            let flat = own.global(bucket);
            if !flat.is_empty() {
                self.dev.launch(Poke { x: self.weights, index: flat.start, value: weight(step, own.rank(), bucket) })?;
            }
            self.dev.record(self.stepped[bucket], Stream::Compute)?;
            WeightPort::<CpuDevice>::settle(&mut self.exchange, bucket);
            self.until(|_| Ok(true))?;
        }
        for bucket in (0..count).rev() {
            self.until(|rank| Ok(WeightPort::<CpuDevice>::is_gathered(&rank.exchange, bucket)))?;
            self.exchange.arrive(&mut self.dev, bucket)?;
            for owner in (0..case.ranks).filter(|&owner| !own.of(owner, bucket).is_empty()) {
                let place = self.weights.slice(own.of(owner, bucket).start, 1);
                self.see(Stream::Compute, place, bucket * case.ranks + owner, weight(step, owner, bucket))?;
            }
        }
        Ok(())
    }

    /// Reads one element on `stream`, in stream order.
    fn see(&mut self, stream: Stream, source: DeviceSlice, place: usize, want: f32) -> Result<()> {
        let (event, target) = (self.dev.event()?, self.seen.slice(4 * place, 4));
        self.dev.copy_d2h(stream, source, target)?;
        self.dev.record(event, stream)?;
        self.until(|rank| rank.dev.is_done(event))?;
        assert_eq!(self.host.lend::<f32>(target)[0], want, "element {place} on {stream:?}");
        Ok(())
    }

    /// Waits until all ranks have reported, as in a step.
    fn verdict(&mut self, case: Case, step: u64) -> Result<()> {
        let exchange = &mut self.exchange;
        let own = exchange.slices.pieces(0..exchange.slices.elems()).flat_map(|(flat, _)| flat.step_by(BLOCK));
        let blocks: Vec<f32> = own.map(|start| partial(start / BLOCK)).collect();
        let losses = vec![1.0; case.rounds];
        ReportPort::<CpuDevice>::add_norm_partials(exchange, &blocks);
        ReportPort::<CpuDevice>::report(exchange, step, false, &losses);
        let mut found = None;
        self.until(|rank| {
            found = ReportPort::<CpuDevice>::outcome(&mut rank.exchange, step);
            Ok(found.is_some())
        })?;
        let partial_sums = case.rounds * case.ranks;
        let all: Vec<f32> = (0..self.exchange.slices.layout().flat_elems() / BLOCK).map(partial).collect();
        let norm_sq = norm::fold(NormSq(0.0), &all).0;
        assert_eq!(found, Some(StepOutcome { norm_sq, nonfinite: false, loss: partial_sums as f32 }));
        WeightPort::<CpuDevice>::next_version(&mut self.exchange);
        Ok(())
    }
}

fn run(case: Case) {
    let layout = plan(case).placement.layout;
    let (norm_partials, partial_sums) = (layout.flat_elems() / BLOCK, case.ranks * case.rounds);
    let sizes = CounterSizes { ranks: case.ranks, buckets: layout.count(), norm_partials, partial_sums, ..CounterSizes::default() };
    let progress = Arc::new(ProgressCounters::new(sizes, Some(case.seed)));
    let rendezvous = Arc::new(Rendezvous::new(case.ranks));
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let spawn = |rank: usize| {
            let (context, rendezvous) = (RankContext { progress: progress.clone(), rank }, &rendezvous);
            scope.spawn(move || {
                let whole = std::panic::catch_unwind(AssertUnwindSafe(|| {
                    let mut rank = Rank::join(case, &context, rendezvous)?;
                    (1..=STEPS).try_for_each(|step| rank.step(case, step))?;
                    // Peers may still wait for work that is enqueued here.
                    for stream in Stream::WITH_PEERS {
                        let done = rank.dev.event()?;
                        rank.dev.record(done, stream)?;
                        rank.until(|rank| rank.dev.is_done(done))?;
                    }
                    rank.verdict(case, STEPS + 1)
                }));
                let outcome = whole.unwrap_or_else(|_| Err(crate::error::Error::resource("run a rank", "it panicked")));
                if let Err(error) = &outcome {
                    context.fail(error);
                }
                context.progress.turn_token().unwrap().leave(rank);
                outcome
            })
        };
        let threads: Vec<_> = (0..case.ranks).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap_or_else(|error| panic!("{error}: {case:?}")));
}

/// A peer may never publish after a failure, so a poll must return the failure.
#[test]
fn after_a_failure_no_rank_waits_for_publications() {
    let case = Case { seed: 0, ranks: 2, rounds: 1, blocks: 2, bucket_blocks: 2, ring: 0 };
    let progress = Arc::new(ProgressCounters::new(
        CounterSizes { ranks: 2, buckets: 1, norm_partials: 2, partial_sums: 2, ..CounterSizes::default() },
        None,
    ));
    let context = RankContext { progress: progress.clone(), rank: 0 };
    let mut dev = open::cpu(1, StreamOrder::Threads, progress.bell(0), 0).unwrap();
    let mut exchange: PeerExchange<Card> =
        PeerExchange::new(&mut dev, &plan(case), context, Arc::new(Rendezvous::new(2)), PeerTransport::Memory).unwrap();
    let grads = dev.alloc("flat", 2 * BLOCK, Dtype::Float32).unwrap();
    exchange.written(&mut dev, grads, 0).unwrap();
    assert_eq!(exchange.poll(&mut dev, grads).unwrap(), None, "rank 1 has written nothing");
    progress.fail(1, "it is gone");
    assert_eq!(exchange.poll(&mut dev, grads).unwrap_err().to_string(), "rank 1: it is gone");
}

/// A driver that blocked on a full launch queue would not run its event loop, and its pool would be idle.
#[test]
fn a_pull_without_room_waits_while_the_driver_polls() {
    run(Case { seed: 1, ranks: 3, rounds: 2, blocks: 96, bucket_blocks: 3, ring: 0 });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ranks_pull_the_gradients_written_for_them(
        seed in any::<u32>(), ranks in 1usize..5, rounds in 1usize..4, blocks in 1usize..14, bucket_blocks in 1usize..5, ring in 0usize..4,
    ) {
        let bucket_blocks = bucket_blocks.max(ranks);
        // A ring repeats in whole grains.
        let grain = if ring > 0 { RING_GRAIN_BYTES / (BLOCK * size_of::<f32>()) } else { 1 };
        run(Case { seed: u64::from(seed), ranks, rounds, blocks: blocks.max(ranks) * grain, bucket_blocks: bucket_blocks * grain, ring });
    }
}
