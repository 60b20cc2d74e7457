//! Signals that save a run or end it at once, and the time from which they are handled.

use crate::program::{Outcome, Workspace, run};
use crate::resume::{await_line, await_listening, has_signal, send};
use crate::sweep::{PROMPTLY, sweep};
use nix::sys::signal::Signal;
use std::process::Child;
use std::time::{Duration, Instant};

/// A run in a step that takes minutes.
fn in_a_long_step(workspace: &Workspace, flags: &[&str]) -> Child {
    let long = ["--gradient-accumulation-steps", "1000000"];
    let mut child = workspace.train("long", &[&long, flags].concat()).spawn().unwrap();
    await_line(&mut child, "device ");
    std::thread::sleep(Duration::from_millis(500));
    child
}

fn pause(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

#[track_caller]
fn expect_ended_at_once(child: Child, code: i32) {
    let sent = Instant::now();
    let ended: Outcome = child.wait_with_output().unwrap().into();
    assert_eq!(ended.code, code, "{ended:?}");
    assert!(sent.elapsed() < PROMPTLY);
}

#[test]
fn a_second_signal_ends_the_program_at_once_unless_it_is_the_same_request() {
    let workspace = Workspace::new();
    for (first, second) in [(Signal::SIGTERM, Signal::SIGTERM), (Signal::SIGINT, Signal::SIGTERM), (Signal::SIGTERM, Signal::SIGINT)] {
        let mut child = in_a_long_step(&workspace, &[]);
        send(&child, first);
        for ms in [0, 1, 10, 100, 500] {
            pause(ms);
            send(&child, second);
        }
        pause(150);
        assert_eq!(child.try_wait().unwrap(), None, "signals within a second are one request");
        pause(600);
        send(&child, second);
        expect_ended_at_once(child, 128 + second as i32);
    }
}

/// Schedulers send TERM at a time limit after a warning signal, and a limit of CPU time warns every second.
#[test]
fn a_warning_of_a_batch_system_is_neither_the_first_nor_the_second_of_two_signals() {
    let workspace = Workspace::new();
    for warning in [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGXCPU].into_iter().take(sweep(1, 3)) {
        let mut child = in_a_long_step(&workspace, &[]);
        for signal in [warning, warning, Signal::SIGTERM, warning] {
            send(&child, signal);
            pause(1200);
            assert_eq!(child.try_wait().unwrap(), None, "{warning}, then {signal}");
        }
        send(&child, Signal::SIGTERM);
        expect_ended_at_once(child, 128 + Signal::SIGTERM as i32);
    }
}

#[test]
fn unnamed_signals_keep_their_default_action() {
    let workspace = Workspace::new();
    for (flag, kept, other) in [("TERM", Signal::SIGTERM, Signal::SIGUSR1), ("sigusr1,XCPU", Signal::SIGUSR1, Signal::SIGTERM)] {
        let flags = ["--max-steps=100000", "--save-steps=100000", "--stop-signals", flag];
        let mut child = workspace.train(flag, &flags).spawn().unwrap();
        await_line(&mut child, "step      3");
        assert!(!has_signal(&child.id().to_string(), "SigCgt", other));
        send(&child, kept);
        let ended: Outcome = child.wait_with_output().unwrap().into();
        assert_eq!(ended.code, 75, "{ended:?}");
        let mut child = workspace.train(&format!("{flag}-other"), &flags).spawn().unwrap();
        await_line(&mut child, "step      3");
        send(&child, other);
        let ended: Outcome = child.wait_with_output().unwrap().into();
        assert_eq!(ended.code, -(other as i32), "{ended:?}");
    }
}

#[test]
fn stop_signals_are_names_of_signals_in_flags_and_files() {
    let workspace = Workspace::new();
    run(&mut workspace.train("r", &["--stop-signals", "TERM,KILL"]))
        .refused(2, &["'KILL'", "--stop-signals", "TERM, INT, HUP, USR1, USR2, XCPU"]);
    workspace.settings("stop-signals = []");
    run(&mut workspace.train("r", &[])).refused(2, &["--stop-signals", "one or more of TERM,INT,HUP,USR1,USR2,XCPU"]);
    workspace.settings("stop-signals = ['STOP']");
    run(&mut workspace.train("r", &[])).refused(2, &["run.toml", "STOP"]);
    workspace.settings("stop-signals = ['usr2', 'SIGTERM']");
    let mut child = workspace.train("r", &["--max-steps=100000", "--save-steps=100000"]).spawn().unwrap();
    await_line(&mut child, "step      3");
    let caught = |signal| has_signal(&child.id().to_string(), "SigCgt", signal);
    assert_eq!([Signal::SIGTERM, Signal::SIGUSR2, Signal::SIGINT, Signal::SIGUSR1].map(caught), [true, true, false, false]);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Before there is anything to save, a launcher's second signal must not end the run abruptly either.
#[test]
fn two_signals_while_a_run_prepares_are_one() {
    let workspace = Workspace::new();
    let mut child = workspace.train("r", &["--max-steps=100000", "--save-steps=100000"]).spawn().unwrap();
    await_listening(&mut child);
    send(&child, Signal::SIGTERM);
    send(&child, Signal::SIGINT);
    pause(2);
    send(&child, Signal::SIGTERM);
    let ended: Outcome = child.wait_with_output().unwrap().into();
    assert_eq!(ended.code, 75, "{ended:?}");
}
