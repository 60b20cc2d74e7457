//! Ranks of several processes, each a thread here, that swap slices by a stand-in for NCCL: the bits of the ranks of one process, whatever
//! their streams and pools do first, and one end for all.

use crate::checkpoint::engine_state;
use crate::config::options::{FaultKind, FaultPhase, RankFault, Strategy, Technique, WeightsChoice};
use crate::config::settings::Settings;
use crate::device::Kernels;
use crate::device::cpu::CpuDevice;
use crate::device::cpu::rail::RailHub;
use crate::engine::executor::Engine;
use crate::engine::pulls::Reach;
use crate::engine::verdict::Verdict;
use crate::error::{Error, Result};
use crate::hardware::topology::Topology;
use crate::host::doorbell::Doorbell;
use crate::launch::engine::{UseEngine, cpu_device, cpu_pool, on_cpus};
use crate::launch::ranks::{self, Crew};
use crate::launch::share::{self, Share};
use crate::model::shape::ModelShape;
use crate::optim::StatePart;
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use crate::ranks::board::Board;
use crate::ranks::links::{EndOfRun, Links};
use crate::ranks::rendezvous::{Hello, Meeting};
use crate::ranks::run_token::RunToken;
use crate::ranks::{RailKey, Seat};
use crate::signals::StopFlag;
use crate::simulate::random_tokens::RandomTokens;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps, an evaluation after every second one, and a resume in the middle.
struct Course {
    steps: u64,
}

/// Losses of steps and evaluations, verdicts that clipped, and the digest.
type Learned = (Vec<f64>, usize, String);

impl UseEngine for Course {
    type Output = Learned;

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<Learned> {
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
                go_on_from_here(&mut engine)?;
            }
        }
        Ok((losses, clipped, engine_state::digest(&mut engine)?))
    }
}

/// As from a checkpoint.
fn go_on_from_here<D: Kernels>(engine: &mut Engine<D>) -> Result<()> {
    engine.flush()?;
    let mut state = vec![0.0; engine.table().params()];
    for part in StatePart::ALL {
        engine.read_state(part, 0, &mut state)?;
        engine.write_state(part, 0, &state)?;
    }
    engine.send_weights()
}

/// What the ranks of process `process` do with their engines; the first of all leads by `course`.
fn be(process: usize, meeting: &Meeting, key: RailKey, (plan, shape): (&Plan, &ModelShape), course: Course) -> Result<Option<Learned>> {
    let links = Links::meet(meeting, Hello { host: "here".into(), ..Hello::default() }, &StopFlag::default(), None)?;
    let (board, _) = links.attach(|abroad| Board::linked(plan.board_sizes(), abroad), 1 << 20)?;
    let adversary = plan.adversary.map(|seed| seed + process as u64);
    let shares = share::of(&Plan { adversary, ..plan.clone() }, &Topology::this_machine(), &vec![None; meeting.ranks]);
    let make = |share: &Share, bell: &Arc<Doorbell>, _| Ok((cpu_device(&share.plan, bell)?, cpu_pool(share, bell)?));
    let lead = |mut engine: Engine<CpuDevice>, seat: &Seat| match process {
        0 => course.run(engine).map(Some),
        _ => engine.follow(|| Ok(())).map(|()| None).map_err(|error| seat.blame(error)),
    };
    let crew = Crew { board, reaches: shares.iter().map(|_| Reach::Rail(key)).collect() };
    let learned = ranks::run(crew, shape, &shares, make, lead, |engine, _| engine.follow(|| Ok(())));
    links.close(&EndOfRun::default());
    learned
}

/// Layers enough to share where `settings` say how weights lie.
fn shape(settings: &Settings) -> ModelShape {
    ModelShape::demo().with_layers(if settings.weights == WeightsChoice::Auto { 2 } else { 3 })
}

fn plan(settings: &Settings) -> Plan {
    Plan::new(settings, &shape(settings), &Machine::cpu(2), false).unwrap()
}

/// What all processes of a run come to, by process.
fn as_processes(settings: &Settings, steps: u64) -> Vec<Result<Option<Learned>>> {
    by_rail(settings, steps, RailHub::open())
}

/// The same where they meet in the hub of `key`.
fn by_rail(settings: &Settings, steps: u64, key: RailKey) -> Vec<Result<Option<Learned>>> {
    let (processes, ranks, plan, shape) = (settings.processes, settings.gpus, plan(settings), shape(settings));
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        let start = |process| {
            let token = RunToken::new("a token that nobody guesses", "here").unwrap();
            let meeting = Meeting { address: address.clone(), process, processes, ranks, token };
            let of = (&plan, &shape);
            scope.spawn(move || be(process, &meeting, key, of, Course { steps }))
        };
        let threads: Vec<_> = (0..processes).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The same by ranks of one process, which pull.
fn as_ranks(settings: &Settings, steps: u64) -> Learned {
    let settings = Settings { gpus: settings.ranks(), processes: 1, ..settings.clone() };
    on_cpus(&plan(&settings), &shape(&settings), &Topology::this_machine(), Course { steps }).unwrap()
}

fn settings(processes: usize) -> Settings {
    let (bucket_mib, threads) = (Some(0.03125), Some(1));
    Settings { processes, bucket_mib, threads, seq_length: 8, per_device_train_batch_size: 1, max_grad_norm: 1.0, ..Settings::demo() }
}

fn same_bits(settings: &Settings) -> Learned {
    let (whole, mut all) = (as_ranks(settings, 6), as_processes(settings, 6));
    let led = all.swap_remove(0).unwrap().unwrap();
    assert_eq!(led, whole, "{settings:?}");
    led
}

/// By speculation all cases; by the other strategies, unless all is swept, the first three.
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
            // Two shares on each of two ranks of two processes, which pull from each other what the swaps have brought.
            Settings { gpus: 2, ..shares(8, 2) },
            Settings { max_grad_norm: 0.0, processes: 3, ..base.clone() },
            base.clone(),
            // Two shares of two micro-batches each.
            shares(4, 4),
            Settings { gpus: 2, ..base.clone() },
            // Groups in two rounds, and those that no process sums.
            Settings { gpus: 2, gradient_group: Some(2), ..shares(8, 2) },
            Settings { processes: 4, gradient_group: Some(2), ..shares(8, 2) },
        ];
        let some = crate::sweep::sweep(0..3, 0..cases.len()).len();
        let taken = if strategy == Strategy::Superoffload { cases.len() } else { some };
        clips += cases[..taken].iter().filter(|case| same_bits(case).1 > 0).count();
    }
    assert!(clips > 0, "nothing was clipped");
}

/// Ranks that keep what they carry: no rank has all weights, and each process has every slice of them.
#[cfg(feature = "weight-flow")]
#[test]
fn swaps_into_slices_that_a_process_shares_give_the_bits_of_one_rank_that_has_all() {
    for (strategy, gradient_group, adversary) in [
        (Strategy::Superoffload, None, None),
        (Strategy::Superoffload, Some(2), Some(17)),
        (Strategy::ZeroOffload, Some(2), None),
        (Strategy::NoOffload, None, Some(18)),
    ] {
        let base = Settings { strategy, gradient_group, gpus: 2, weights: WeightsChoice::Replicated, ..settings(2) };
        let sharded = Settings { weights: WeightsChoice::Sharded, adversary, ..base.clone() };
        assert_eq!(as_processes(&sharded, 6).swap_remove(0).unwrap().unwrap(), as_ranks(&base, 6), "{sharded:?}");
    }
}

/// Of two ranks in each of two processes each sends half of its gradient, and with groups a quarter.
#[test]
fn the_sum_of_a_group_leaves_its_process_once() {
    let flat = Settings { gpus: 2, ..settings(2) };
    let sent = |settings: &Settings| {
        let key = RailHub::open();
        by_rail(settings, 1, key).swap_remove(0).unwrap();
        RailHub::sent_bytes(&key)
    };
    let (shares, groups) = (sent(&flat), sent(&Settings { gradient_group: Some(2), ..flat.clone() }));
    let bytes = (plan(&flat).layout.flat_elems() * plan(&flat).dtype.bytes()) as u64;
    assert_eq!(shares - groups, 4 * (bytes / 2 - bytes / 4));
    // Weights are sent at the start, after the step, and as from a checkpoint; a word of each to each at their connection.
    let words = 8 * plan(&flat).dtype.bytes() as u64;
    assert_eq!(groups, bytes + 3 * bytes + words);
}

/// Streams and pools of each process run in another order, as far as their events allow.
#[test]
fn what_a_process_does_first_does_not_decide_the_order_of_swaps() {
    for seed in crate::sweep::sweep(0..4, 0..64) {
        let without = if seed % 2 == 0 { vec![Technique::DeadlineOrder] } else { Vec::new() };
        let settings =
            Settings { adversary: Some(seed), without, gradient_shares: Some(4), gradient_accumulation_steps: Some(2), ..settings(2) };
        let whole = as_ranks(&Settings { adversary: None, ..settings.clone() }, 6);
        assert_eq!(as_processes(&settings, 6).swap_remove(0).unwrap().unwrap(), whole, "seed {seed}");
    }
}

/// Whoever waits in a swap for a rank that fails ends with it.
#[test]
fn the_failure_of_one_ends_all_that_wait_for_it() {
    let start = Instant::now();
    let faults = vec![RankFault { rank: 1, step: 2, phase: FaultPhase::Backward, kind: FaultKind::Error }];
    for outcome in as_processes(&Settings { faults, ..settings(3) }, 6) {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, Error::Rank { name, .. } if name == "process 1 on here"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}
