//! Tests of processes that end before the run is over: their peers learn of it, and of the process that caused the end.

use super::*;
use crate::ranks::run_token::RunToken;
use std::net::TcpListener;

const SILENCE: &str = "no message from it for 30 s";

/// All processes of a run, with the stop flag of each.
fn meet(processes: usize) -> Vec<(Links, StopFlag)> {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let token = RunToken::new(b"a token that nobody guesses", "here").unwrap();
    let be = |process: usize| {
        let meeting = ProcessRendezvous {
            address: address.clone(),
            process,
            processes,
            ranks: 1,
            token: token.clone(),
            limit: Duration::from_secs(60),
        };
        let stop = StopFlag::default();
        (Links::meet(&meeting, HelloMessage { host: "here".into(), ..HelloMessage::default() }, (&stop, &mut |_| ()), None).unwrap(), stop)
    };
    thread::scope(|scope| {
        let all: Vec<_> = (0..processes).map(|process| scope.spawn(move || be(process))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// All processes except the last one, which gave up the process `lost` and ended.
fn after_the_last_gave_up(lost: usize, processes: usize) -> Vec<(Links, StopFlag)> {
    let mut all = meet(processes);
    let (last, _) = all.pop().unwrap();
    last.common.lose(lost, SILENCE);
    last.close(EndOfRun::default());
    all
}

/// The error that ends a process, within a few seconds.
fn message(links: &Links) -> Option<String> {
    let state = links.common.open();
    drop(links.common.changed.wait_timeout_while(state, PARTING_PATIENCE, |state| state.failure.is_none()));
    links.common.cause(&links.common.open()).map(|error| error.to_string())
}

#[test]
fn a_stopped_process_learns_that_another_gave_it_up() {
    let all = after_the_last_gave_up(0, 2);
    assert_eq!(message(&all[0].0).unwrap(), format!("process 1 on here: it lost this process: {SILENCE}"));
}

#[test]
fn a_process_that_ends_for_another_names_it() {
    let all = after_the_last_gave_up(1, 3);
    assert_eq!(message(&all[0].0).unwrap(), format!("process 1 on here: {SILENCE}"));
    assert_eq!(message(&all[1].0).unwrap(), format!("process 2 on here: it lost this process: {SILENCE}"));
}

#[test]
fn process_0_does_not_wait_for_processes_interrupted_before_it() {
    let mut all = meet(2);
    let (interrupted, _) = all.pop().unwrap();
    interrupted.close(EndOfRun { interrupted: true, ..EndOfRun::default() });
    let (first, stop) = &all[0];
    assert_eq!(message(first).unwrap(), "process 1 on here: it was interrupted");
    assert!(stop.is_set());
}

#[test]
fn a_process_that_follows_to_the_end_is_no_loss() {
    let mut all = meet(2);
    let ((follower, _), (first, _)) = (all.pop().unwrap(), all.pop().unwrap());
    let common = first.common.clone();
    let end = EndOfRun { step: 3, max_steps: 3, ..EndOfRun::default() };
    let (step, ()) = thread::scope(|scope| {
        let first = scope.spawn(|| first.close(end));
        let step = follower.end_of_run().unwrap().step;
        follower.close(EndOfRun::default());
        (step, first.join().unwrap())
    });
    assert_eq!((step, common.cause(&common.open()).map(|error| error.to_string())), (3, None));
}
