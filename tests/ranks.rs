//! Several devices of one machine, each a thread of the program: the same bits as one, the same files, and one end when one fails.

use crate::program::{Workspace, run};
use crate::support::{Noise, load, random_params, settings, tiny_llama};
use std::fs;
use std::time::{Duration, Instant};
use superoffload::internals::device::Kernels;
use superoffload::internals::engine::{Engine, Exchange};
use superoffload::internals::hardware::Topology;
use superoffload::internals::launch::{UseEngine, on_cpus};
use superoffload::internals::planner::Machine;
use superoffload::{Error, Plan, Result};

/// Buckets of 16 KiB: four blocks for each of up to four ranks.
const CUT: [&str; 4] = ["--device=cpu", "--bucket-mib=0.03125", "--max-grad-norm=1.5", "--gradient-shares=4"];

fn gpus(count: usize, more: &[&str]) -> Vec<String> {
    let flags = CUT.into_iter().chain(more.iter().copied()).map(str::to_string);
    flags.chain([format!("--gpus={count}"), format!("--gradient-accumulation-steps={}", 4 / count)]).collect()
}

fn train(workspace: &Workspace, out: &str, flags: &[String]) -> String {
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    run(&mut workspace.train(out, &flags)).digest().to_string()
}

#[test]
fn one_two_and_four_devices_train_to_the_same_bits_and_files() {
    let workspace = Workspace::new();
    let digest = train(&workspace, "1", &gpus(1, &[]));
    let state = |out: &str| fs::read(workspace.path(&format!("{out}/checkpoint-12/state.bin"))).unwrap();
    for count in [2, 4] {
        let out = count.to_string();
        assert_eq!(train(&workspace, &out, &gpus(count, &[])), digest, "{count} devices");
        assert!(state(&out) == state("1"), "{count} devices write another state");
        for (one, several) in workspace.metrics("1").iter().zip(workspace.metrics(&out)) {
            for key in ["loss", "grad_norm", "learning_rate", "verdict", "epoch"] {
                assert_eq!(one[key], several[key], "{key} of step {} on {count} devices", one["step"]);
            }
        }
    }
    // Where nothing is said each device has a share of one micro-batch.
    let short = |count: &str, shares: &str| run(&mut workspace.train("short", &["--device=cpu", count, shares])).digest().to_string();
    assert_eq!(short("--gpus=4", "--gradient-shares=4"), short("--gpus=1", "--gradient-shares=4"));
}

#[test]
fn a_run_goes_on_with_another_number_of_devices() {
    let workspace = Workspace::new();
    let digest = train(&workspace, "whole", &gpus(4, &[]));
    for count in [1, 2, 4] {
        let out = format!("resumed-{count}");
        workspace.copy_checkpoints("whole", &out, &[6]);
        let flags = ["--device=cpu".to_string(), "--bucket-mib=0.03125".into(), "--max-grad-norm=1.5".into(), format!("--gpus={count}")];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let resumed = run(&mut workspace.resume(&out, &flags));
        assert_eq!(resumed.digest(), digest, "{count} devices");
        assert!(resumed.stderr.is_empty(), "{resumed:?}");
    }
    workspace.copy_checkpoints("whole", "three", &[6]);
    run(&mut workspace.resume("three", &["--device=cpu", "--gpus=3"])).refused(2, &["--gpus 3", "4 micro-batches"]);
}

#[test]
fn what_several_devices_cannot_do_is_refused_with_a_way_out() {
    let workspace = Workspace::new();
    let instead_of_flow: &[&str] =
        if cfg!(feature = "weight-flow") { &["--weights flow", "--weights stationary"] } else { &["--weights flow"] };
    let cases: [(&[&str], &[&str]); 7] = [
        (&["--gpus=all"], &["--gpus all", "a number"]),
        (&["--gpus=0"], &["--gpus 0", "at least 1"]),
        (&["--gpus=9"], &["--gpus 9", "at most 8"]),
        (&["--gpus=2", "--gradient-shares=3", "--gradient-accumulation-steps=3"], &["--gradient-shares 3", "multiple of --gpus 2"]),
        (&["--gpus=2", "--weights=flow"], instead_of_flow),
        (&["--gpus=4", "--bucket-mib=0.01"], &["--gpus 4", "--bucket-mib"]),
        (&["--gpus=2", "--gradient-shares=0"], &["at least 1"]),
    ];
    for (flags, words) in cases {
        run(&mut workspace.train("out", &[&["--device=cpu"], flags].concat())).refused(2, words);
    }
    run(&mut crate::program::program(&["plan", "--model", "qwen3-4b", "--hardware", "h200-pcie5", "--gpus=2"]))
        .refused(2, &["--gpus 2", "h200-pcie5 knows what 1 do", "use --gpus 1, or --hardware h200-x2"]);
}

/// What rank 0 does before it ends the run: fails or panics between steps, or while others are within one.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Data,
    Panic,
}

struct Faulty(Fault);

impl UseEngine for Faulty {
    type Output = ();

    fn run<D: Kernels, X: Exchange<D>>(self, mut engine: Engine<D, X>) -> Result<()> {
        load(&mut engine, random_params(1));
        engine.step(1e-3, &mut Noise::new(1, 64))?;
        match self.0 {
            Fault::Data => Err(Error::resource("read data", "it is gone")),
            Fault::Panic => panic!("on purpose"),
        }
    }
}

#[test]
fn nobody_waits_for_a_rank_that_is_gone() {
    let shape = tiny_llama(2, 32, 64, true);
    let lines =
        "gpus = 3\ndevice = 'cpu'\nseq-length = 8\nper-device-train-batch-size = 2\nmax-steps = 9\nbucket-mib = 0.046875\nthreads = 2";
    for (adversary, fault) in (0..6).flat_map(|seed| [(seed, Fault::Data), (seed, Fault::Panic)]) {
        let adversary = if adversary < 3 { String::new() } else { format!("\nadversary = {adversary}") };
        let plan = Plan::new(&settings(&format!("{lines}{adversary}")), &shape, &Machine::cpu(2), false).unwrap();
        let start = Instant::now();
        let whole = std::panic::catch_unwind(|| on_cpus(&plan, &shape, &Topology::this_machine(), Faulty(fault)));
        assert!(start.elapsed() < Duration::from_secs(5), "{fault:?} took {:?}", start.elapsed());
        match fault {
            Fault::Data => assert_eq!(whole.unwrap().unwrap_err().to_string(), "read data: it is gone"),
            Fault::Panic => assert!(whole.is_err()),
        }
    }
}
