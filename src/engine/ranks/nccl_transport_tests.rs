//! Ranks of several processes, each a thread in this test, that exchange slices through a stand-in for NCCL. Their bits must equal those of
//! ranks of one process, in any order of streams and pools; all must end together; and the memory that they allocate must match the plan,
//! for each transport.

use crate::checkpoint::engine_state;
use crate::config::settings::Settings;
use crate::device::cpu::CpuDevice;
use crate::device::cpu::nccl_stand_in::NcclStandInHub;
use crate::device::{DeviceKind, Kernels};
use crate::engine::executor::Engine;
use crate::engine::protocol::verdict::Verdict;
use crate::engine::ranks::peer_exchange::PeerTransport;
use crate::error::{Error, Result};
use crate::faults::{FaultKind, FaultPhase, RankFault};
use crate::hardware::topology::Topology;
use crate::host::doorbell::Doorbell;
use crate::launch::cpu_slice::{self, CpuSlice};
use crate::launch::engine::{UseEngine, cpu_device, cpu_pool, on_cpus};
use crate::launch::ranks::{self, LocalRanks};
use crate::memory::{Addressing, DeviceMemory};
use crate::model::shape::{DEMO_CONFIG, ModelShape};
use crate::optim::norm::BLOCK;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::ranks::hello_message::HelloMessage;
use crate::ranks::links::{EndOfRun, Links};
use crate::ranks::progress::ProgressCounters;
use crate::ranks::rendezvous::ProcessRendezvous;
use crate::ranks::run_token::RunToken;
use crate::ranks::{NcclUniqueId, RankContext};
use crate::request::choices::{Strategy, Technique, WeightsChoice};
use crate::signals::StopFlag;
use crate::simulate::random_tokens::RandomTokens;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Module of the program's tests.
#[path = "../../../tests/gpu/planned.rs"]
#[allow(unreachable_pub, reason = "it is public in the program")]
mod planned;

/// Steps, an evaluation after every second step, and a resume in the middle.
#[derive(Clone, Copy)]
struct TrainingSchedule {
    steps: u64,
}

/// Losses of steps and evaluations, number of clipping verdicts, and digest.
type TrainingResult = (Vec<f64>, usize, String);

impl UseEngine for TrainingSchedule {
    type Output = TrainingResult;

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<TrainingResult> {
        let (mut tokens, mut losses, mut clipped) = (RandomTokens::new(3, engine.shape().vocab), Vec::new(), 0);
        engine.init_state(7, 1)?;
        engine.send_weights()?;
        for step in 0..self.steps {
            let report = engine.step(1e-2, &mut tokens)?;
            losses.push(f64::from(report.loss));
            clipped += usize::from(matches!(report.verdict, Verdict::Clip(_)));
            if step % 2 == 1 {
                losses.push(engine.evaluate(&mut tokens)?.loss);
            }
            if step == self.steps / 2 {
                resume_in_place(&mut engine)?;
            }
        }
        Ok((losses, clipped, engine_state::digest(&mut engine)?))
    }
}

/// Reads and writes the state, as a resume from a checkpoint does.
fn resume_in_place<D: Kernels>(engine: &mut Engine<D>) -> Result<()> {
    engine.flush()?;
    let mut state = vec![0.0; engine.table().params()];
    for part in engine.plan().optimizer().arrays().parts() {
        engine.read_state(part, 0, &mut state)?;
        engine.write_state(part, 0, &state)?;
    }
    engine.send_weights()
}

/// Work of a process on the engine of its first rank before the first order.
type FirstWork<'a> = &'a (dyn Fn(usize, &mut Engine<CpuDevice>) -> Result<()> + Sync);

/// Runs the ranks of process `process`, over NCCL with `key` or over TCP. Rank 0 runs `course`.
fn be<U: UseEngine>(
    process: usize,
    meeting: &ProcessRendezvous,
    key: Option<NcclUniqueId>,
    (plan, shape): (&Plan, &ModelShape),
    begin: FirstWork<'_>,
    course: U,
) -> Result<Option<U::Output>> {
    let links =
        Links::meet(meeting, HelloMessage { host: "here".into(), ..HelloMessage::default() }, (&StopFlag::default(), &mut |_| ()), None)?;
    let (progress, connections) = links.attach(|remote| ProgressCounters::linked(plan.board_sizes(), remote), 1 << 20)?;
    let mut of_process = plan.clone();
    of_process.site.adversary = plan.site.adversary.map(|seed| seed + process as u64);
    let shares = cpu_slice::of(&of_process, &Topology::this_machine(), &vec![None; meeting.ranks]);
    let make = |share: &CpuSlice, bell: &Arc<Doorbell>, _| Ok((cpu_device(&share.plan, bell)?, cpu_pool(share, bell)?));
    let lead = |mut engine: Engine<CpuDevice>, context: &RankContext| {
        begin(process, &mut engine).map_err(|error| context.attribute(error))?;
        match process {
            0 => course.run(engine).map(Some).map_err(|error| context.attribute(error)),
            _ => engine.follow(|| Ok(())).map(|()| None).map_err(|error| context.attribute(error)),
        }
    };
    let local_ranks = LocalRanks {
        progress,
        reaches: connections.into_iter().map(|connections| key.map_or(PeerTransport::Tcp(connections), PeerTransport::Nccl)).collect(),
    };
    let learned = ranks::run(local_ranks, shape, &shares, make, lead, |engine, _| engine.follow(|| Ok(())));
    links.close(EndOfRun::default());
    learned
}

/// The demo with layers of half the width, enough of them to shard if `settings` choose the location of weights.
fn shape(settings: &Settings) -> ModelShape {
    let narrow =
        [("size\": 256,\n  \"intermediate_size\": 512", "size\": 128,\n  \"intermediate_size\": 256"), ("heads\": 8", "heads\": 4")];
    let config = narrow.iter().fold(DEMO_CONFIG.to_string(), |config, (from, to)| config.replace(from, to));
    let shape = ModelShape::parse(&config, Path::new("config.json")).unwrap();
    assert_eq!(shape.channels, 128);
    shape.with_layers(if settings.weights == WeightsChoice::Auto { 2 } else { 3 })
}

fn plan(settings: &Settings) -> Plan {
    Plan::new(&settings.request(&shape(settings)), &Machine::cpu(2), false).unwrap()
}

/// Runs all processes of a run; results by process.
fn as_processes(settings: &Settings, steps: u64) -> Vec<Result<Option<TrainingResult>>> {
    by_way(&plan(settings), &shape(settings), TrainingSchedule { steps }, Some(NcclStandInHub::open()))
}

/// Runs `course` in all processes, connected by the hub of `key` or over TCP.
fn by_way<U: UseEngine + Copy + Send>(
    plan: &Plan,
    shape: &ModelShape,
    course: U,
    key: Option<NcclUniqueId>,
) -> Vec<Result<Option<U::Output>>>
where
    U::Output: Send,
{
    after(&|_, _| Ok(()), (plan, shape), course, key)
}

/// Like `by_way`, after each process has run `begin`.
fn after<U: UseEngine + Copy + Send>(
    begin: FirstWork<'_>,
    (plan, shape): (&Plan, &ModelShape),
    course: U,
    key: Option<NcclUniqueId>,
) -> Vec<Result<Option<U::Output>>>
where
    U::Output: Send,
{
    let (processes, ranks) = (plan.site.processes, plan.site.ranks / plan.site.processes);
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        let start = |process| {
            let token = RunToken::new(b"a token that nobody guesses", "here").unwrap();
            let meeting = ProcessRendezvous { address: address.clone(), process, processes, ranks, token, limit: Duration::from_secs(60) };
            scope.spawn(move || be(process, &meeting, key, (plan, shape), begin, course))
        };
        let threads: Vec<_> = (0..processes).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `steps` steps on ranks of one process.
fn as_ranks(settings: &Settings, steps: u64) -> TrainingResult {
    let settings = Settings { gpus: settings.cut().ranks(), processes: 1, ..settings.clone() };
    on_cpus(&plan(&settings), &shape(&settings), &Topology::this_machine(), TrainingSchedule { steps }).unwrap()
}

fn settings(processes: usize) -> Settings {
    let (bucket_mib, threads) = (Some(0.03125), Some(1));
    Settings { processes, bucket_mib, threads, seq_length: 8, per_device_train_batch_size: 1, max_grad_norm: 1.0, ..Settings::demo() }
}

fn same_bits(settings: &Settings) -> TrainingResult {
    let (whole, mut all) = (as_ranks(settings, 6), as_processes(settings, 6));
    let led = all.swap_remove(0).unwrap().unwrap();
    assert_eq!(led, whole, "{settings:?}");
    led
}

/// Speculation runs all cases; the other strategies run the first three, unless the sweep is complete.
#[test]
fn swaps_in_the_order_of_the_plan_give_the_bits_of_pulls() {
    let mut clips = 0;
    for strategy in [Strategy::Superoffload, Strategy::ZeroOffload, Strategy::NoOffload] {
        let base = Settings { strategy, ..settings(2) };
        let shares = |shares, accumulation| Settings {
            gradient_shares: Some(shares),
            gradient_accumulation_steps: Some(accumulation),
            ..base.clone()
        };
        let cases = [
            // Groups that are summed within a process.
            Settings { gpus: 2, gradient_group: Some(2), ..base.clone() },
            // Two partial sums on each of two ranks of two processes, which pull relayed weights from each other.
            Settings { gpus: 2, ..shares(8, 2) },
            Settings { max_grad_norm: 0.0, processes: 3, ..base.clone() },
            base.clone(),
            // Two partial sums of two micro-batches each.
            shares(4, 4),
            Settings { gpus: 2, ..base.clone() },
            // Groups in two rounds, and groups that no process sums by itself.
            Settings { gpus: 2, gradient_group: Some(2), ..shares(8, 2) },
            Settings { processes: 4, gradient_group: Some(2), ..shares(8, 2) },
        ];
        let some = crate::sweep::sweep(0..3, 0..cases.len()).len();
        let taken = if strategy == Strategy::Superoffload { cases.len() } else { some };
        clips += cases[..taken].iter().filter(|case| same_bits(case).1 > 0).count();
    }
    assert!(clips > 0, "nothing was clipped");
}

/// Ranks that keep relayed weights, or receive them with each fetch. No rank has all weights: each process has every slice, or only all
/// processes together have.
#[cfg(feature = "weight-flow")]
#[test]
fn swaps_of_weights_that_ranks_share_give_the_bits_of_one_rank_that_has_all() {
    use WeightsChoice::{FullySharded, Sharded};
    for (weights, [processes, gpus], strategy, gradient_group, adversary) in [
        (Sharded, [2, 2], Strategy::Superoffload, None, None),
        (Sharded, [2, 2], Strategy::Superoffload, Some(2), Some(17)),
        (Sharded, [2, 2], Strategy::ZeroOffload, Some(2), None),
        (Sharded, [2, 2], Strategy::NoOffload, None, Some(18)),
        (FullySharded, [2, 2], Strategy::Superoffload, None, None),
        (FullySharded, [2, 2], Strategy::Superoffload, Some(2), Some(17)),
        (FullySharded, [2, 1], Strategy::Superoffload, None, Some(19)),
        (FullySharded, [3, 2], Strategy::ZeroOffload, Some(2), None),
        (FullySharded, [2, 3], Strategy::NoOffload, None, Some(18)),
    ] {
        // Each of six ranks owns a block of every bucket.
        let base = Settings {
            strategy,
            gradient_group,
            gpus,
            weights: WeightsChoice::Replicated,
            bucket_mib: Some(0.0625),
            ..settings(processes)
        };
        let sharded = Settings { weights, adversary, ..base.clone() };
        assert_eq!(plan(&sharded).placement.rings.fully_sharded, weights == FullySharded);
        assert_eq!(as_processes(&sharded, 6).swap_remove(0).unwrap().unwrap(), as_ranks(&base, 6), "{sharded:?}");
    }
}

/// Compares the memory of a plan with the memory allocated by rank 0, which has the longest slices.
#[derive(Clone, Copy)]
struct Compared;

impl UseEngine for Compared {
    type Output = ();

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<()> {
        planned::check(&engine, DeviceKind::Cpu).unwrap_or_else(|wrong| panic!("{wrong}"));
        engine.init_state(7, 1)
    }
}

/// A plan of a model with slices of equal length on all ranks.
fn even(settings: &Settings, machine: &Machine) -> (Plan, ModelShape) {
    let of = |vocab: usize| {
        let config = DEMO_CONFIG.replace("\"vocab_size\": 256", &format!("\"vocab_size\": {vocab}"));
        let shape = ModelShape::parse(&config, Path::new("config.json")).unwrap().with_layers(6);
        (Plan::new(&settings.request(&shape), machine, false).unwrap(), shape)
    };
    let is_even = |plan: &Plan| {
        (0..plan.placement.layout.count()).all(|bucket| (plan.placement.layout.range(bucket).len() / BLOCK).is_multiple_of(plan.site.ranks))
    };
    (256..1024).step_by(16).map(of).find(|(plan, _)| is_even(plan)).expect("a row of the embedding is a part of a block")
}

#[test]
fn every_memory_class_of_a_plan_for_several_processes_matches_allocations() {
    let device = DeviceMemory::Own { bytes: 4 << 30, addressing: Addressing::Managed };
    let machine = Machine { device, ..Machine::cpu(2) };
    let all = [WeightsChoice::Replicated, WeightsChoice::Sharded, WeightsChoice::FullySharded];
    for (weights, [processes, gpus]) in all.into_iter().flat_map(|weights| [[2, 2], [2, 1], [3, 2], [2, 4]].map(|layout| (weights, layout)))
    {
        let is_possible =
            weights == WeightsChoice::Replicated || cfg!(feature = "weight-flow") && (weights, gpus) != (WeightsChoice::Sharded, 1);
        if !is_possible {
            continue;
        }
        let settings = Settings { gpus, weights, bucket_mib: Some(0.1875), ..settings(processes) };
        let (plan, shape) = even(&settings, &machine);
        assert_eq!(plan.placement.rings.weights.is_some(), weights != WeightsChoice::Replicated);
        for key in [None, Some(NcclStandInHub::open())] {
            by_way(&plan, &shape, Compared, key).swap_remove(0).unwrap();
        }
    }
}

/// With two ranks in each of two processes, each rank sends half of its gradient, and a quarter of it with groups.
#[test]
fn the_sum_of_a_group_leaves_its_process_once() {
    let flat = Settings { gpus: 2, ..settings(2) };
    let sent = |settings: &Settings| {
        let key = NcclStandInHub::open();
        by_way(&plan(settings), &shape(settings), TrainingSchedule { steps: 1 }, Some(key)).swap_remove(0).unwrap();
        NcclStandInHub::sent_bytes(&key)
    };
    let (shares, groups) = (sent(&flat), sent(&Settings { gradient_group: Some(2), ..flat.clone() }));
    let bytes = (plan(&flat).placement.layout.flat_elems() * plan(&flat).recipe.numerics.dtype.bytes()) as u64;
    assert_eq!(shares - groups, 4 * (bytes / 2 - bytes / 4));
    // Weights are sent at the start, after the step, and after the simulated resume; connections exchange one word between each pair.
    let words = 8 * plan(&flat).recipe.numerics.dtype.bytes() as u64;
    assert_eq!(groups, bytes + 3 * bytes + words);
}

/// Streams and pools of each process run in a random order that their events allow.
#[test]
fn the_order_of_swaps_is_independent_of_a_process_s_first_operation() {
    for seed in crate::sweep::sweep(0..4, 0..64) {
        let without = if seed % 2 == 0 { vec![Technique::DeadlineOrder] } else { Vec::new() };
        let settings =
            Settings { adversary: Some(seed), without, gradient_shares: Some(4), gradient_accumulation_steps: Some(2), ..settings(2) };
        let whole = as_ranks(&Settings { adversary: None, ..settings.clone() }, 6);
        assert_eq!(as_processes(&settings, 6).swap_remove(0).unwrap().unwrap(), whole, "seed {seed}");
    }
}

/// A rank that blocks in an exchange with a failed rank ends with it.
#[test]
fn the_failure_of_one_ends_all_that_wait_for_it() {
    let start = Instant::now();
    let faults = vec![RankFault { rank: 1, step: 2, phase: FaultPhase::Backward, kind: FaultKind::Error }];
    for outcome in as_processes(&Settings { faults, ..settings(3) }, 6) {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, Error::Rank { name, .. } if name == "process 1 on here"), "{error}");
    }
    assert!(start.elapsed() < crate::sweep::PROMPTLY, "{:?}", start.elapsed());
}

/// Slices have equal length, so only the hash of exchanges detects a wrong order.
#[test]
fn processes_that_swap_in_another_order_end_with_an_error() {
    let settings = settings(2);
    let (plan, shape) = (plan(&settings), shape(&settings));
    assert_eq!(plan.placement.layout.range(0).len(), plan.placement.layout.range(1).len());
    let begun = |orders: [[usize; 2]; 2]| {
        let begin = |process: usize, engine: &mut Engine<CpuDevice>| -> Result<()> {
            orders[process].into_iter().try_for_each(|bucket| engine.exchange.swap_weights(&mut engine.dev, bucket))
        };
        after(&begin, (&plan, &shape), TrainingSchedule { steps: 1 }, Some(NcclStandInHub::open()))
    };
    begun([[0, 1], [0, 1]]).swap_remove(0).unwrap();
    for outcome in begun([[0, 1], [1, 0]]) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("rank 1 differs from rank 0") && error.contains("exchanged slices in another order"), "{error}");
    }
}
