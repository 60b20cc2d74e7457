//! Several devices of one machine, with a thread each. They must give the same bits and files as one device, and end together when one
//! fails.

use crate::program::{Outcome, Workspace, run};
#[cfg(feature = "weight-flow")]
use crate::resume::streamable;
use crate::resume::{await_line, send, stop_signals};
use crate::support::{Noise, load, random_params, resident, settings, tiny_llama};
use crate::sweep::PROMPTLY;
use nix::sys::signal::Signal;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};
use superoffload::internals::device::Kernels;
use superoffload::internals::engine::Engine;
use superoffload::internals::hardware::Topology;
use superoffload::internals::launch::{UseEngine, on_cpus};
use superoffload::internals::optim::StatePart;
use superoffload::internals::planner::Machine;
use superoffload::{Error, Plan, Result};

/// Buckets of 16 KiB: four blocks for each of up to four ranks.
const CUT: [&str; 3] = ["--bucket-mib=0.03125", "--max-grad-norm=1.5", "--gradient-shares=4"];

/// A step with enough micro-batches to take minutes.
const LONG_STEP: &str = "--gradient-accumulation-steps=300000";

/// CPUs, or the device in `SUPEROFFLOAD_DEVICE`; `cuda` needs four GPUs.
fn device() -> &'static str {
    if std::env::var("SUPEROFFLOAD_DEVICE").is_ok_and(|device| device == "cuda") { "--device=cuda" } else { "--device=cpu" }
}

fn gpus(count: usize, more: &[&str]) -> Vec<String> {
    let flags = [device()].into_iter().chain(CUT).chain(more.iter().copied()).map(str::to_string);
    flags.chain([format!("--gpus={count}"), format!("--gradient-accumulation-steps={}", 4 / count)]).collect()
}

fn train(workspace: &Workspace, out: &str, flags: &[String]) -> String {
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    run(&mut workspace.train(out, &flags)).digest().to_string()
}

#[test]
fn one_two_and_four_devices_train_to_the_same_bits_and_files() {
    let workspace = Workspace::new();
    // Without resident buckets a GPU has data to send.
    let offloaded = ["--resident-buckets=0"];
    let digest = train(&workspace, "1", &gpus(1, &offloaded));
    let state = |out: &str| fs::read(workspace.path(&format!("{out}/checkpoint-12/state.bin"))).unwrap();
    for count in [2, 4] {
        let out = count.to_string();
        assert_eq!(train(&workspace, &out, &gpus(count, &offloaded)), digest, "{count} devices");
        assert!(state(&out) == state("1"), "{count} devices write another state");
        for (one, several) in workspace.metrics("1").iter().zip(workspace.metrics(&out)) {
            for key in ["loss", "grad_norm", "learning_rate", "verdict", "epoch"] {
                assert_eq!(one[key], several[key], "{key} of step {} on {count} devices", one["step"]);
            }
        }
    }
    // Each device has its part of every bucket, and the total traffic over all links equals that of one device.
    let total = |out: &str, key: &str| workspace.metrics(out).iter().map(|line| line[key].as_u64().unwrap()).sum::<u64>();
    let steps = |out: &str| total(out, "committed") + total(out, "clipped");
    for (count, out) in [(2, "2"), (4, "4")] {
        assert_eq!((steps(out), total(out, "d2h_bytes")), (count * steps("1"), total("1", "d2h_bytes")), "{count} devices");
    }
    assert!(workspace.metrics("1").iter().all(|line| line["exposed_peer_ms"] == 0.0 && line["exposed_peer_rank"].is_null()));
    let first = run(&mut workspace.train("first", &[device(), "--gpus=2", "--gradient-accumulation-steps=3"]));
    assert!(first.stdout.contains("\n  step        2 ranks x 3 x 2 x 16 = 192 tokens in 2 gradient shares; "), "{first:?}");
    // By default each device has one share of one micro-batch.
    let short = |count: &str, shares: &str| run(&mut workspace.train("short", &[device(), count, shares])).digest().to_string();
    assert_eq!(short("--gpus=4", "--gradient-shares=4"), short("--gpus=1", "--gradient-shares=4"));
}

#[test]
fn the_timeline_has_the_tracks_of_every_rank() {
    let workspace = Workspace::new();
    train(&workspace, "out", &gpus(2, &[]));
    let trace: serde_json::Value = serde_json::from_str(&fs::read_to_string(workspace.path("out/trace.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let names: Vec<(&str, usize)> = events
        .iter()
        .filter(|event| event["ph"] == "M")
        .map(|event| {
            let spans = events.iter().filter(|other| other["ph"] == "X" && other["tid"] == event["tid"]).count();
            (event["args"]["name"].as_str().unwrap(), spans)
        })
        .collect();
    let tracks = ["driver", "compute", "d2h", "h2d", "reduce", "gather", "adam-00"];
    let all: Vec<String> = (0..2).flat_map(|rank| tracks.map(|track| format!("rank {rank} {track}"))).collect();
    assert_eq!(names.iter().map(|(name, _)| *name).collect::<Vec<_>>(), all);
    names.iter().for_each(|(name, spans)| assert!(*spans > 0, "{name} is empty"));
    let has = |track: &str, span: &str| {
        let tid = &events.iter().find(|event| event["ph"] == "M" && event["args"]["name"] == track).unwrap()["tid"];
        events.iter().any(|event| event["ph"] == "X" && event["tid"] == *tid && event["name"] == span)
    };
    assert!(has("rank 1 reduce", "pull") && has("rank 1 reduce", "sum_slices") && has("rank 1 gather", "pull"));
}

#[test]
fn a_run_goes_on_with_another_number_of_devices() {
    let workspace = Workspace::new();
    let digest = train(&workspace, "whole", &gpus(4, &[]));
    for count in [1, 2, 4] {
        let out = format!("resumed-{count}");
        workspace.copy_checkpoints("whole", &out, &[6]);
        let flags = [device().to_string(), "--bucket-mib=0.03125".into(), "--max-grad-norm=1.5".into(), format!("--gpus={count}")];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let resumed = run(&mut workspace.resume(&out, &flags));
        assert_eq!(resumed.digest(), digest, "{count} devices");
        assert!(resumed.stderr.is_empty(), "{resumed:?}");
    }
    workspace.copy_checkpoints("whole", "three", &[6]);
    run(&mut workspace.resume("three", &[device(), "--gpus=3"])).refused(2, &["--gpus 3", "4 micro-batches"]);
}

/// Sharded weights give the bits of one device, with evaluation, and after a resume with another number of devices or another placement of
/// weights.
#[cfg(feature = "weight-flow")]
#[test]
fn devices_that_keep_parts_of_the_weights_train_to_the_same_bits() {
    let workspace = Workspace::new();
    workspace.write("model/config.json", streamable());
    let eval = format!("--eval-data={}", workspace.path("data.txt").display());
    let flags = |count, weights: &'static str| gpus(count, &[&eval, "--eval-steps=3", weights]);
    let digest = train(&workspace, "1", &gpus(1, &[]));
    for count in [2, 4] {
        let out = format!("sharded-{count}");
        let command = flags(count, "--weights=sharded");
        let sharded = run(&mut workspace.train(&out, &command.iter().map(String::as_str).collect::<Vec<_>>()));
        assert!(sharded.digest() == digest && sharded.stdout.contains("stream from the slices of all"), "{sharded:?}");
        assert_eq!(workspace.metrics(&out).last().unwrap()["eval_loss"], workspace.metrics("sharded-2").last().unwrap()["eval_loss"]);
    }
    for (resumed, flags) in [
        ("one", gpus(1, &[])),
        ("replicated", flags(4, "--weights=replicated")),
        ("sharded", flags(2, "--weights=sharded")),
        ("auto", flags(2, "--weights=auto")),
    ] {
        workspace.copy_checkpoints("sharded-4", resumed, &[6]);
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        assert_eq!(run(&mut workspace.resume(resumed, &flags)).digest(), digest, "{resumed}");
    }
}

#[test]
fn options_unsupported_on_several_devices_are_refused_with_a_remedy() {
    let workspace = Workspace::new();
    let instead_of_flow: &[&str] =
        if cfg!(feature = "weight-flow") { &["--weights flow", "--weights sharded"] } else { &["--weights flow"] };
    let cases: [(&[&str], &[&str]); 8] = [
        (&["--gpus=all"], &["--gpus all", "a number"]),
        (&["--gpus=0"], &["--gpus 0", "at least 1"]),
        (&["--gpus=9"], &["--gpus 9", "at most 8"]),
        (&["--gpus=2", "--gradient-shares=3", "--gradient-accumulation-steps=3"], &["--gradient-shares 3", "multiple of --gpus 2"]),
        (&["--gpus=2", "--weights=flow"], instead_of_flow),
        (&["--weights=sharded"], &["--weights sharded"]),
        (&["--gpus=4", "--bucket-mib=0.01"], &["--gpus 4", "--bucket-mib"]),
        (&["--gpus=2", "--gradient-shares=0"], &["at least 1"]),
    ];
    for (flags, words) in cases {
        run(&mut workspace.train("out", &[&["--device=cpu"], flags].concat())).refused(2, words);
    }
    run(&mut crate::program::program(&["plan", "--model", "qwen3-4b", "--hardware", "h200-pcie5", "--gpus=2"]))
        .refused(2, &["--gpus 2", "h200-pcie5 has rates for at most 1", "use --gpus 1, or --hardware h200-x2"]);
}

/// A fault of rank 0 that ends the run: an error or a panic, between steps or while other ranks are in a step.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Data,
    Panic,
}

struct Faulty(Fault);

impl UseEngine for Faulty {
    type Output = ();

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<()> {
        load(&mut engine, random_params(1));
        engine.step(1e-3, &mut Noise::new(1, 64))?;
        match self.0 {
            Fault::Data => Err(Error::resource("read data", "it is gone")),
            Fault::Panic => panic!("on purpose"),
        }
    }
}

#[test]
fn no_rank_waits_for_a_lost_rank() {
    let shape = tiny_llama(2, 32, 64, true);
    let lines =
        "gpus = 3\ndevice = 'cpu'\nseq-length = 8\nper-device-train-batch-size = 2\nmax-steps = 9\nbucket-mib = 0.046875\nthreads = 2";
    for (adversary, fault) in (0..6).flat_map(|seed| [(seed, Fault::Data), (seed, Fault::Panic)]) {
        let adversary = if adversary < 3 { String::new() } else { format!("\nadversary = {adversary}") };
        let plan = Plan::new(&settings(&format!("{lines}{adversary}")).request(&shape), &Machine::cpu(2), false).unwrap();
        let start = Instant::now();
        let whole = std::panic::catch_unwind(|| on_cpus(&plan, &shape, &Topology::this_machine(), Faulty(fault)));
        assert!(start.elapsed() < PROMPTLY, "{fault:?} took {:?}", start.elapsed());
        match fault {
            Fault::Data => assert_eq!(whole.unwrap().unwrap_err().to_string(), "read data: it is gone"),
            Fault::Panic => assert!(whole.is_err()),
        }
    }
}

/// Phases in which a rank can fail, and the step for the injected fault. State is written before the first step and read after it.
const PHASES: [(&str, u64); 13] = [
    ("start", 1),
    ("write", 1),
    ("module", 2),
    ("backward", 2),
    ("sum", 2),
    ("grads-out", 2),
    ("optimize", 2),
    ("params-in", 2),
    ("step-on-device", 2),
    ("verdict", 2),
    ("gather", 2),
    ("flush", 2),
    ("read", 2),
];

/// Runs every phase, led by rank 0.
struct EveryPhase;

impl UseEngine for EveryPhase {
    type Output = ();

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<()> {
        let mut state = vec![0.01; engine.table().flat_elems()];
        engine.write_state(StatePart::PARAMS, 0, &state)?;
        engine.send_weights()?;
        let mut noise = Noise::new(1, 64);
        engine.evaluate(&mut noise)?;
        engine.step(1e-3, &mut noise)?;
        engine.flush()?;
        engine.read_state(StatePart::PARAMS, 0, &mut state)?;
        (0..2).try_for_each(|_| engine.step(1e-3, &mut noise).map(drop))
    }
}

/// Runs three ranks with buckets on the host and on the device. One rank fails.
fn ends_with(fault: &str, adversary: Option<usize>) -> Error {
    let shape = tiny_llama(4, 32, 64, true);
    let adversary = adversary.map_or(String::new(), |seed| format!("\nadversary = {seed}"));
    let plan = settings(&format!(
        "gpus = 3\ndevice = 'cpu'\nseq-length = 8\nper-device-train-batch-size = 2\nmax-steps = 9\nbucket-mib = 0.046875\nthreads = 3\n\
         {}faults = [{fault}]{adversary}",
        resident("superoffload")
    ));
    let plan = Plan::new(&plan.request(&shape), &Machine::cpu(3), false).unwrap();
    assert!(plan.placement.layout.offloaded() > 0);
    let start = Instant::now();
    let error = on_cpus(&plan, &shape, &Topology::this_machine(), EveryPhase).expect_err(fault);
    assert!(start.elapsed() < PROMPTLY, "{fault} took {:?}", start.elapsed());
    error
}

/// 13 phases, two ranks and two kinds of fault: in all 52 cases all ranks end at once, and the error names the failed rank and phase.
#[test]
fn a_rank_that_fails_in_any_phase_ends_all_and_is_named() {
    let can_happen = |phase: &str| phase != "step-on-device" || cfg!(feature = "repartition");
    for (nth, (phase, step)) in PHASES.into_iter().enumerate().filter(|(_, (phase, _))| can_happen(phase)) {
        for rank in [1, 2] {
            for kind in ["error", "panic"] {
                let fault = format!("{{rank = {rank}, step = {step}, phase = '{phase}', kind = '{kind}'}}");
                let message = ends_with(&fault, (nth % 2 == 1).then_some(nth)).to_string();
                let words = match kind {
                    "error" => format!("of step {step}: it was to fail (faults)"),
                    _ => "it panicked; see the message above".into(),
                };
                assert!(message.starts_with(&format!("rank {rank}: ")) && message.ends_with(&words), "{fault}: {message}");
                let named: String = phase.split('-').collect();
                assert!(kind == "panic" || message.to_lowercase().contains(&format!("rank {rank}: {named} of")), "{fault}: {message}");
            }
        }
    }
    // Rank 0 leads on the caller's thread. Its error has its name, too, also when it writes state, sends weights, evaluates or reads.
    let outside_steps = [("write", 1), ("gather", 1), ("module", 1), ("read", 2)];
    for (phase, step) in outside_steps.into_iter().chain(["module", "sum", "optimize", "verdict", "flush"].map(|phase| (phase, 2))) {
        let message = ends_with(&format!("{{rank = 0, step = {step}, phase = '{phase}'}}"), None).to_string();
        let words = format!("of step {step}: it was to fail (faults)");
        assert!(message.starts_with("rank 0: ") && message.ends_with(&words), "{phase}: {message}");
    }
}

/// Rank 1 fails while the checkpoint of step 6 is written, and then in the middle of a step.
#[test]
fn a_rank_that_fails_leaves_the_last_checkpoint_whole() {
    let workspace = Workspace::new();
    let whole = train(&workspace, "whole", &gpus(2, &[]));
    let stops = "--save-memory=off";
    for (phase, step, lost, memory) in [
        ("read", 7, "steps 4 to 6", "--save-memory=auto"),
        ("read", 7, "steps 4 to 6", stops),
        ("flush", 7, "steps 4 to 6", "--save-memory=auto"),
        ("flush", 7, "steps 4 to 6", stops),
        // The save after step 3 must have ended.
        ("gather", 6, "steps 4 to 5", stops),
    ] {
        let flags = gpus(2, &["--save-steps=3", memory]);
        workspace.settings(&format!("faults = [{{rank = 1, step = {step}, phase = '{phase}'}}]"));
        let (flags, out): (Vec<&str>, _) = (flags.iter().map(String::as_str).collect(), format!("{phase}{memory}"));
        let start = Instant::now();
        let failed = run(&mut workspace.train(&out, &flags));
        assert!(start.elapsed() < PROMPTLY, "{out} took {:?}", start.elapsed());
        failed.refused(1, &[&format!("of step {step}: it was to fail (faults)")]);
        let is_named = ["error: rank 1: ", "error: rank 1 (GPU 1): "].iter().any(|name| failed.stderr.starts_with(name));
        assert!(is_named && !failed.stderr.contains("; then"), "{failed:?}");
        let last = workspace.path(&format!("{out}/checkpoint-3"));
        assert!(failed.stdout.contains(&format!("\n  checkpoint    {}\n", last.display())), "{failed:?}");
        assert!(failed.stdout.contains(&format!("\n  lost          {lost}, all since {}\n", last.display())), "{failed:?}");
        assert_eq!(workspace.names(&out, "checkpoint-"), ["checkpoint-3"]);
        assert_eq!(workspace.names(&out, ".checkpoint"), [""; 0]);
        workspace.settings("");
        assert_eq!(run(&mut workspace.resume(&out, &flags)).digest(), whole, "goes on after {out}");
    }
}

/// A hanging rank is reported whatever rank 0 does meanwhile, also between steps.
#[test]
fn a_stall_report_names_the_rank_that_all_wait_for() {
    let workspace = Workspace::new();
    let eval_data = format!("--eval-data={}", workspace.path("data.txt").display());
    for (phase, step, waits) in [
        ("backward", 3, "waits for the gradient of bucket 0 of rank 1"),
        ("verdict", 3, "waits for the gradient norm of rank 1"),
        ("read", 3, "waits for the reply of rank 1"),
        // An evaluation runs before the first step.
        ("module", 1, "waits for the reply of rank 1"),
    ] {
        workspace.settings(&format!("faults = [{{rank = 1, step = {step}, phase = '{phase}', kind = 'hang'}}]"));
        let flags = gpus(2, &["--stall-limit=1", &eval_data, "--eval-on-start"]);
        let train = workspace.train(phase, &flags.iter().map(String::as_str).collect::<Vec<_>>());
        let stalled = run(Command::new("timeout").arg("60").arg(train.get_program()).args(train.get_args()));
        let message: Vec<&str> = stalled.stderr.lines().take(3).collect();
        assert!(stalled.code == 1 && message[0].starts_with("error: no progress for 1s"), "{phase}: {message:?}");
        assert!(message[1].starts_with("  rank 1        ") && message[2] == format!("  rank 0        {waits}"), "{phase}: {message:?}");
        assert_eq!(workspace.names(phase, "checkpoint-").len(), usize::from(!["read", "module"].contains(&phase)));
    }
}

#[test]
fn a_signal_saves_all_ranks_at_one_step_and_a_second_one_ends_them() {
    let workspace = Workspace::new();
    for count in [2, 4] {
        let flags = gpus(count, &["--max-steps=30", "--save-steps=1000"]);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let whole = run(&mut workspace.train(&format!("whole-{count}"), &flags)).digest().to_string();
        for signal in stop_signals().take(crate::sweep::sweep(8 / count, 8)) {
            let out = format!("{count}-{signal}");
            let mut child = workspace.train(&out, &flags).spawn().unwrap();
            await_line(&mut child, "step      3");
            send(&child, signal);
            let ended: Outcome = child.wait_with_output().unwrap().into();
            assert!(ended.code == 75 && ended.stderr.is_empty() && ended.stdout.contains("\ninterrupted at step "), "{out}: {ended:?}");
            let steps = workspace.metrics(&out).len();
            assert_eq!(workspace.names(&out, "checkpoint-"), [format!("checkpoint-{steps}")]);
            assert_eq!(run(&mut workspace.resume(&out, &flags)).digest(), whole, "{out}");
        }
        // A step that would take minutes.
        let flags: [&str; 4] = [device(), &format!("--gpus={count}"), &format!("--gradient-shares={count}"), LONG_STEP];
        let mut child = workspace.train("long", &flags).spawn().unwrap();
        await_line(&mut child, "device ");
        std::thread::sleep(Duration::from_millis(500));
        send(&child, Signal::SIGTERM);
        // A second signal within a second would count as the same request.
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(child.try_wait().unwrap(), None, "the first signal waits for the step");
        send(&child, Signal::SIGINT);
        let sent = Instant::now();
        assert_eq!(Outcome::from(child.wait_with_output().unwrap()).code, 128 + Signal::SIGINT as i32);
        assert!(sent.elapsed() < PROMPTLY);
    }
}
