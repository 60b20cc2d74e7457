//! Saves of several processes beside steps: the files of saves that stop training, and processes that die meanwhile.

use crate::processes::{digest_of_one, ends, start, start_in};
use crate::program::{Outcome, Workspace, program, run};
use crate::resume::{await_line, limit_files, send};
use crate::sweep::PROMPTLY;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::process::Child;
use std::time::Instant;

const TOTAL: u64 = 8;

/// The bytes of a rank's file of state, from a run of two steps.
fn part_bytes(workspace: &Workspace) -> u64 {
    let outcomes = ends(start(workspace, "short", 2, &["--max-steps=2"]));
    assert!(outcomes.iter().all(|outcome| outcome.code == 0), "{outcomes:?}");
    fs::metadata(workspace.path("short/checkpoint-2/state-0.bin")).unwrap().len()
}

/// The manifest without its seal and its settings, which name the flags of saves.
fn manifest(workspace: &Workspace, checkpoint: &str) -> Value {
    let text = fs::read_to_string(workspace.path(&format!("{checkpoint}/trainer_state.json"))).unwrap();
    let mut manifest = serde_json::from_str::<Value>(&text).unwrap()["manifest"].take();
    manifest["trainer"].as_object_mut().unwrap().remove("settings").unwrap();
    manifest
}

fn expect_beside_steps(outcome: &Outcome, step: u64) {
    let place = |text: String| outcome.stdout.find(&text).unwrap_or_else(|| panic!("no {text}: {outcome:?}"));
    assert!(place(format!("checkpoint-{step}\n")) > place(format!("\nstep {:>6}", step + 1)), "not beside steps: {outcome:?}");
}

#[test]
fn processes_save_beside_steps_the_bytes_that_they_save_while_training_stops() {
    let workspace = Workspace::new();
    let bytes = part_bytes(&workspace);
    for (nth, [processes, ranks]) in [[2, 1], [2, 2], [3, 1]].into_iter().enumerate() {
        let [steps, moments] = [format!("--max-steps={TOTAL}"), format!("--moments={}", ["float32", "bfloat16", "int8"][nth])];
        let common = [steps.as_str(), moments.as_str(), "--save-steps=3"];
        let of = |name: &str, more: &[&str]| {
            let out = format!("{name}-{nth}");
            let outcomes = ends(start_in(&workspace, &out, [processes, ranks], &[&common[..], more].concat()));
            assert!(outcomes.iter().all(|outcome| outcome.code == 0 && outcome.stderr.is_empty()), "{outcomes:?}");
            (out, outcomes)
        };
        let (stopping, _) = of("stopping", &["--save-memory=off"]);
        // Each save takes about a quarter of a second, longer than a step.
        let rate = format!("--save-rate={}", 4 * bytes);
        for memory in ["--save-memory=0", "--save-memory=auto"] {
            let (beside, outcomes) = of(&format!("beside{}", memory.len()), &[&rate, memory]);
            expect_beside_steps(&outcomes[0], 3);
            for step in [3, 6, TOTAL] {
                let [one, other] = [&stopping, &beside].map(|out| format!("{out}/checkpoint-{step}"));
                assert_eq!(manifest(&workspace, &one), manifest(&workspace, &other), "{other}");
                for rank in 0..processes * ranks {
                    let [one, other] = [&one, &other].map(|dir| fs::read(workspace.path(&format!("{dir}/state-{rank}.bin"))).unwrap());
                    assert!(one == other, "state-{rank}.bin of {beside} after step {step}");
                }
            }
        }
    }
}

/// A run whose save after step 3 takes several seconds. Returns its processes after step 4.
fn saving(workspace: &Workspace, out: &str) -> Vec<Child> {
    let rate = format!("--save-rate={}", part_bytes(workspace) / 4);
    let mut children = start(workspace, out, 2, &["--max-steps=8", "--save-steps=3", &rate]);
    await_line(&mut children[0], "step      4");
    children
}

#[test]
fn a_process_that_dies_in_a_save_beside_steps_ends_the_other_and_the_run_goes_on() {
    let workspace = Workspace::new();
    let whole = digest_of_one(&workspace, "whole", 1, &["--max-steps=8"]);
    for victim in [0, 1] {
        let out = format!("dies-{victim}");
        let mut children = saving(&workspace, &out);
        let killed = Instant::now();
        children[victim].kill().unwrap();
        let other = ends(children).remove(1 - victim);
        assert!(killed.elapsed() < PROMPTLY, "took {:?}", killed.elapsed());
        other.refused(1, &[&format!("process {victim} on "), "it ended before the end of the run"]);
        assert_eq!(workspace.names(&out, "checkpoint-"), [""; 0], "no process knows all checksums");
        let resumed = ends(start(&workspace, &out, 2, &["--max-steps=8", "--resume-from-checkpoint=auto"]));
        assert_eq!(resumed[0].digest(), whole, "{out}");
        assert_eq!(workspace.names(&out, ".checkpoint-"), [""; 0], "remains in {out}");
    }
}

#[test]
fn a_signal_in_a_save_of_several_processes_ends_the_run_after_that_save_and_one_of_its_last_step() {
    let workspace = Workspace::new();
    let whole = digest_of_one(&workspace, "whole", 1, &["--max-steps=500"]);
    let rate = format!("--save-rate={}", part_bytes(&workspace) / 3);
    let mut children = start(&workspace, "told", 2, &["--max-steps=5000", "--save-steps=500", &rate]);
    await_line(&mut children[0], "step    501");
    send(&children[1], Signal::SIGTERM);
    let outcomes = ends(children);
    assert!(outcomes.iter().all(|outcome| outcome.code == 75 && outcome.stderr.is_empty()), "{outcomes:?}");
    let last = workspace.metrics("told").len();
    assert!((501..1000).contains(&last), "{outcomes:?}");
    assert_eq!(workspace.names("told", "checkpoint-"), ["checkpoint-500".to_string(), format!("checkpoint-{last}")]);
    let saved = run(program(&["digest"]).arg(workspace.path("told/checkpoint-500")));
    assert_eq!(saved.digest(), whole);
    let last = run(program(&["digest"]).arg(workspace.path("told")));
    assert!(outcomes[0].stdout.contains(&format!("digest: {}", last.digest())), "{outcomes:?}");
}

/// States on the devices have no memory for copies in these runs, so each rank writes its file before the next step.
#[cfg(feature = "repartition")]
#[test]
fn processes_without_memory_for_copies_of_states_on_devices_stop_for_a_save_with_the_same_bytes() {
    let workspace = Workspace::new();
    let of = |out: &str, memory: &str| {
        let outcomes = ends(start(&workspace, out, 2, &["--max-steps=4", "--save-steps=2", "--resident-buckets=all", memory]));
        assert!(outcomes.iter().all(|outcome| outcome.code == 0), "{outcomes:?}");
        outcomes
    };
    let outcomes = of("none", "--save-memory=0");
    assert!(outcomes[0].stdout.contains("copies of the states on the device take"), "{outcomes:?}");
    of("stopping", "--save-memory=off");
    for name in ["checkpoint-2/state-0.bin", "checkpoint-2/state-1.bin", "checkpoint-4/state-1.bin"] {
        let [none, stopping] = ["none", "stopping"].map(|out| fs::read(workspace.path(&format!("{out}/{name}"))).unwrap());
        assert!(none == stopping, "{name}");
    }
}

/// A process that cannot write its file ends the run with its error, in a save beside steps and in one that stops training.
#[test]
fn a_process_whose_disk_fails_in_a_save_ends_the_run_and_leaves_the_checkpoint_before() {
    let workspace = Workspace::new();
    let (whole, bytes) = (digest_of_one(&workspace, "whole", 1, &["--max-steps=300"]), part_bytes(&workspace));
    for (out, memory) in [("beside", "--save-memory=auto"), ("stopping", "--save-memory=off")] {
        let mut children = start(&workspace, out, 2, &["--max-steps=100000", "--save-steps=300", memory]);
        await_line(&mut children[0], "checkpoint-300");
        limit_files(&children[1], bytes / 2);
        let outcomes = ends(children);
        outcomes[1].refused(1, &["File too large"]);
        outcomes[0].refused(1, &["process 1 on ", "File too large"]);
        let saved = run(program(&["digest"]).arg(workspace.path(&format!("{out}/checkpoint-300"))));
        assert_eq!(saved.digest(), whole, "{outcomes:?}");
        assert_eq!(workspace.names(out, ".checkpoint-"), [""; 0], "remains in {out}");
    }
}
