//! R9: a signal requests a stop in every phase.

use crate::harness::*;
use nix::sys::signal::{Signal, kill};

pub const CAMPAIGN: Campaign = Campaign {
    id: "R9",
    what: "SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU, two of SIGTERM, and SIGTERM before SIGKILL, in each phase, evaluations among them: exit 75 with a checkpoint, or the end was near; \
           a resume comes to the uninterrupted run's digest",
    runs: 800,
    smoke: 4,
    start,
};

type Phase = (&'static str, fn(&Running, &Harness) -> bool);

/// In this phase every step is followed by an evaluation, which takes longer.
const EVALUATION: &str = "an evaluation";

/// Phases that are visible from outside. Compilation, waits for data and the passes of a step are part of "a step".
const PHASES: [Phase; 8] = [
    ("signals are heard", |run, _| listens(run)),
    ("data", |run, _| run.stdout().contains("\ndata ")),
    ("plan", |run, _| run.stdout().contains("\nplan")),
    ("first step", |run, _| run.stdout().contains("\ndevice ")),
    ("a step", |run, _| run.stdout().contains("\nstep      5")),
    ("save", |_, harness| names(&harness.path("stopped")).iter().any(|name| name.contains(".tmp-"))),
    (EVALUATION, |run, _| run.stdout().contains("\nstep      5")),
    ("last step", |run, _| run.stdout().contains("\nstep     12")),
];

#[derive(Clone, Copy, Debug)]
enum Way {
    Term,
    Int,
    Hup,
    Usr1,
    Usr2,
    Xcpu,
    Twice,
    ThenKilled,
}

const WAYS: [Way; 8] = [Way::Term, Way::Int, Way::Hup, Way::Twice, Way::ThenKilled, Way::Usr1, Way::Usr2, Way::Xcpu];

fn start(harness: &Harness) -> Result<Trial, String> {
    let (digest, _) = harness.reference("whole", &[])?;
    Ok(Box::new(move |harness, turn| {
        let (phase, way) = (PHASES[turn.index as usize % 8], WAYS[turn.index as usize / 8 % 8]);
        turn.kind = format!("{way:?}: {}", phase.0).to_lowercase();
        harness.remove("stopped");
        let eval_data = format!("--eval-data={}", harness.path("data.txt").display());
        let evaluating = [eval_data.as_str(), "--eval-steps=1"];
        let flags = if phase.0 == EVALUATION { &evaluating[..] } else { &[] };
        let mut child = harness.spawn(harness.train("stopped", flags));
        if child.wait_until(|child| phase.1(child, harness)) {
            std::thread::sleep(std::time::Duration::from_micros(turn.pick(3000)));
            send(&mut child, way);
        }
        let ended = child.finish();
        let allowed: &[i32] = match way {
            Way::ThenKilled => &[75, 0, -9],
            _ => &[75, 0],
        };
        expect(allowed.contains(&ended.code) && !ended.hung, || format!("{ended}"))?;
        expect(ended.code != 75 || ended.stdout.contains("interrupted"), || format!("does not say so: {ended}"))?;
        harness.run(harness.resume("stopped", &[])).expect_digest(&digest).map_err(|e| format!("after exit {}: {e}", ended.code))?;
        harness.expect_tidy("stopped")
    }))
}

fn send(child: &mut Running, way: Way) {
    let signals: &[Signal] = match way {
        Way::Term => &[Signal::SIGTERM],
        Way::Int => &[Signal::SIGINT],
        Way::Hup => &[Signal::SIGHUP],
        Way::Usr1 => &[Signal::SIGUSR1],
        Way::Usr2 => &[Signal::SIGUSR2],
        Way::Xcpu => &[Signal::SIGXCPU],
        Way::Twice => &[Signal::SIGTERM, Signal::SIGTERM],
        Way::ThenKilled => &[Signal::SIGTERM, Signal::SIGKILL],
    };
    for &signal in signals {
        // The process may have ended.
        let _ = kill(child.pid(), signal);
        std::thread::sleep(std::time::Duration::from_micros(300));
    }
}

/// Whether the process has installed its signal handlers.
fn listens(run: &Running) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", run.child.id())).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    let caught = u64::from_str_radix(caught.trim(), 16).unwrap_or(0);
    [Signal::SIGTERM, Signal::SIGINT].iter().all(|&signal| caught >> (signal as i32 - 1) & 1 == 1)
}
