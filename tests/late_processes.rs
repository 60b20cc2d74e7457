//! Processes that are slow or cannot write: the others wait for a slow process, and one that cannot write is rejected before the first
//! step.

use crate::faults::limited;
use crate::processes::{digest_of_one, ends, flags, free_port, one, start};
use crate::program::{Outcome, Workspace};
use crate::resume::{await_line, send};
use nix::sys::signal::Signal;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

/// Makes rank `rank` pause for two seconds in `phase` of `step`, longer than the stall limit of one second.
fn slow(workspace: &Workspace, rank: usize, step: u64, phase: &str) {
    workspace.settings(&format!("faults = [{{rank = {rank}, step = {step}, phase = '{phase}', kind = 'slow'}}]"));
}

#[test]
fn a_process_that_saves_or_evaluates_for_longer_than_the_stall_limit_is_waited_for_and_named() {
    let workspace = Workspace::new();
    let eval_data = format!("--eval-data={}", workspace.path("data.txt").display());
    let flags = ["--stall-limit=1", "--save-steps=6", &eval_data, "--eval-steps=6"];
    let whole = digest_of_one(&workspace, "whole", 1, &flags);
    for (phase, words) in [("read", "is saving"), ("evaluate", "is evaluating")] {
        for victim in [0, 1] {
            let out = format!("{phase}-{victim}");
            slow(&workspace, victim, 7, phase);
            let outcomes = ends(start(&workspace, &out, 2, &flags));
            assert_eq!(outcomes[0].digest(), whole, "{out}");
            assert_eq!((outcomes[1].code, outcomes[1].stderr.as_str()), (0, ""), "{out}");
            let message = outcomes[0].stderr.contains(&format!(" {words}; this process has waited for it for 1s\n"));
            assert_eq!(message, victim == 1, "{out}: {outcomes:?}");
            assert!(victim == 0 || outcomes[0].stderr.starts_with("warning: process 1 on "), "{out}: {outcomes:?}");
        }
    }
}

#[test]
fn a_signal_while_another_process_is_slow_saves_and_exits_with_75() {
    let workspace = Workspace::new();
    let long: &[&str] = &["--stall-limit=1", "--max-steps=12", "--save-steps=3"];
    let whole = digest_of_one(&workspace, "whole", 1, long);
    for message in [0, 1] {
        let out = format!("told-{message}");
        slow(&workspace, 1, 4, "read");
        let mut children = start(&workspace, &out, 2, long);
        await_line(&mut children[0], "step      3");
        send(&children[message], Signal::SIGTERM);
        let outcomes = ends(children);
        assert!(outcomes.iter().all(|outcome| outcome.code == 75), "{outcomes:?}");
        let steps = workspace.metrics(&out).len();
        assert!(workspace.path(&format!("{out}/checkpoint-{steps}")).is_dir(), "{outcomes:?}");
        workspace.settings("");
        assert_eq!(ends(start(&workspace, &out, 2, &[long, &["--resume-from-checkpoint=auto"]].concat()))[0].digest(), whole);
    }
}

/// If a process hangs while it carries out an order, its own watchdog ends it. If it hangs before it has published its last weights, process
/// 0 waits for these weights, and its watchdog has the shorter limit.
#[test]
fn a_process_that_stands_still_in_an_evaluation_ends_the_run() {
    let workspace = Workspace::new();
    let eval_data = format!("--eval-data={}", workspace.path("data.txt").display());
    workspace.settings("faults = [{rank = 1, step = 7, phase = 'module', kind = 'hang'}]");
    let outcomes = ends(start(&workspace, "hangs", 2, &["--stall-limit=2", &eval_data, "--eval-steps=6", "--save-steps=6"]));
    assert!(outcomes.iter().all(|outcome| outcome.code == 1), "{outcomes:?}");
    let has = |process: usize, words: &str| outcomes[process].stderr.contains(words);
    let ended_by_itself = has(1, "error: no progress for 2.5s (--stall-limit): the run ends") && has(0, "error: process 1 on ");
    let ended_by_process_0 = has(0, "error: no progress for 2s (--stall-limit): the run ends") && has(1, "error: process 0 on ");
    assert!(ended_by_itself || ended_by_process_0 && has(0, "waits for other ranks' parameters"), "{outcomes:?}");
}

/// Runs two processes. `other` modifies the command of process `victim`.
fn with_other(workspace: &Workspace, out: &str, victim: usize, other: impl Fn(Command) -> Command) -> Vec<Outcome> {
    let rendezvous = format!("--rendezvous=127.0.0.1:{}", free_port());
    let all = flags(2, &[&rendezvous, "--processes=2"]);
    let command = |process: usize| {
        let command = one(workspace, out, &[&all[..], &[format!("--process={process}")]].concat());
        if process == victim { other(command) } else { command }
    };
    ends((0..2).map(|process| command(process).spawn().unwrap()).collect())
}

fn keep_environment(from: &Command, mut to: Command) -> Command {
    for (name, value) in from.get_envs() {
        match value {
            Some(value) => to.env(name, value),
            None => to.env_remove(name),
        };
    }
    to.current_dir("/").stdin(Stdio::null());
    to.stdout(Stdio::piped()).stderr(Stdio::piped());
    to
}

#[test]
fn a_process_whose_files_may_not_grow_is_named_before_the_first_step() {
    let workspace = Workspace::new();
    for victim in [0, 1] {
        let outcomes = with_other(&workspace, "small", victim, |train| keep_environment(&train, limited(&train, 60)));
        for outcome in &outcomes {
            outcome.refused(1, &["ulimit -f allows files of 30.0 KiB", "raise it (ulimit -f unlimited)"]);
            assert!(!outcome.stdout.contains("\nstep "), "{outcome:?}");
        }
        assert!(outcomes[1 - victim].stderr.contains(&format!("process {victim} on ")), "{outcomes:?}");
    }
}

/// One process may enter the directory but not write to it, as with another user.
#[test]
fn a_process_that_cannot_write_is_named_before_the_first_step_with_a_remedy() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let workspace = Workspace::new();
    fs::set_permissions(workspace.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let as_other_user = |train: Command| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(train.get_program()).args(train.get_args());
        keep_environment(&train, command)
    };
    let outcomes = with_other(&workspace, "foreign", 1, as_other_user);
    for outcome in &outcomes {
        let words =
            ["as process 1 on ", "create", "/probe-1: Permission denied (os error 13)", "each process writes its part", "as one user"];
        outcome.refused(1, &words);
        assert!(!outcome.stdout.contains("\nstep "), "{outcome:?}");
    }
    assert_eq!(workspace.names("foreign", ".checkpoint-"), [""; 0]);
    assert_eq!(workspace.names("foreign", "checkpoint-"), [""; 0]);
}
