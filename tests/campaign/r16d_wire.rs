//! R16d: a network that changes, drops, duplicates, reorders, inserts, delays or truncates a message between two processes.

use crate::harness::*;
use crate::wire_proxy::{HARMS, Harm, PHASES, Phase, Plot, WireProxy};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R16d",
    what: "a proxy between two processes that train together, on CPUs over TCP, flips a byte of one message, or drops, doubles, moves, delays or cuts \
           it, or inserts another, in 8 phases: handshake, rendezvous, signs of life, gradients, weights, notices, orders, end: both come to the \
           undisturbed digest, or end with exit 1, one line each, and the last checkpoint goes on to that digest",
    runs: 1000,
    smoke: 3,
    start,
};

/// Maximum duration of a run. Detecting a lost message takes five seconds, and ending takes as long.
const ENDS_S: f64 = 45.0;
/// Every run with an index divisible by this resumes from its last checkpoint.
const RESUMED: u64 = 4;

/// Two micro-batches a step, with a gradient share each.
const CUT: [&str; 6] =
    ["--device=cpu", "--threads=1", "--bucket-mib=0.03125", "--gradient-shares=2", "--rendezvous-limit=30", "--stall-limit=20"];

fn start(harness: &Harness) -> Result<Trial, String> {
    expect(harness.has_flag("--rendezvous-limit"), || "this program has no --rendezvous-limit".into())?;
    let alone = ["--gpus=1", "--gradient-accumulation-steps=2"];
    let cut: Vec<&str> = CUT.into_iter().filter(|flag| !flag.starts_with("--rendezvous")).collect();
    let whole = harness.run(harness.train("whole", &[&cut[..], &alone].concat())).digest()?;
    Ok(Box::new(move |harness, turn| {
        let (phase, harm) = (PHASES[turn.index as usize % PHASES.len()], turn.one_of(&HARMS));
        // A run has at least this many messages of each kind.
        let most = match phase {
            Phase::Handshake => 12,
            Phase::Rendezvous => 6,
            Phase::Alive | Phase::End => 2,
            Phase::Gradients | Phase::Weights => 24,
            Phase::Orders => 14,
            Phase::Notices => 200,
        };
        let plot = Plot { phase, harm, nth: turn.pick(most), choice: turn.pick(u64::MAX) };
        harness.fresh("harmed");
        let (port, token) = (free_port(), format!("a token that only run {} of seed {} has", turn.index, harness.seed));
        let proxy = WireProxy::to(port, plot);
        let [first, second] = both(harness, [port, proxy.port], &token).map(Running::finish);
        let struck = if proxy.has_struck() { "" } else { ", no such message" };
        turn.kind = format!("{phase:?} {harm:?}{struck}").to_lowercase();
        let message = |why: String| format!("{plot:?}: {why}; process 0: {first}; process 1: {second}");
        judge(&plot, !struck.is_empty(), [&first, &second], &whole).map_err(message)?;
        if turn.index % RESUMED == 0 {
            let [first, second] = both(harness, [free_port(); 2], &token).map(Running::finish);
            first.expect_digest(&whole).map_err(|e| format!("{plot:?}: then resumed: {e}"))?;
            second.expect_orderly(&[0]).map_err(|e| format!("{plot:?}: then resumed: {e}"))?;
            harness.expect_tidy("harmed")?;
        }
        Ok(())
    }))
}

/// Checks that both processes ended as required.
fn judge(plot: &Plot, is_unharmed: bool, outcomes: [&Outcome; 2], whole: &str) -> Result<(), String> {
    for outcome in outcomes {
        outcome.expect_orderly(&[0, 1])?;
        expect(outcome.seconds < ENDS_S, || format!("it took {} s", outcome.seconds))?;
    }
    let [first, second] = outcomes;
    if first.code == 0 {
        first.expect_digest(whole)?;
    }
    let all_well = first.code == 0 && second.code == 0;
    if is_unharmed || plot.harm == Harm::Delay {
        return expect(all_well, || "nothing was harmed".into());
    }
    // Damage is tolerated in three cases: the rendezvous is repeated, a process that has sent its final message needs no reply, and a
    // duplicate of the last message of a connection is never read.
    let is_early_or_late = matches!(plot.phase, Phase::Handshake | Phase::Rendezvous | Phase::Alive | Phase::End);
    let may_heal = is_early_or_late || plot.harm == Harm::Double;
    expect(!all_well || may_heal, || "nobody noticed".into())?;
    expect(all_well || [first, second].iter().any(|outcome| outcome.stderr.contains("process ")), || "no process is named".into())
}

/// A port that no concurrent run of this campaign has, below the ports that the kernel gives to connections.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let port = 20_000 + NEXT.fetch_add(1, Ordering::Relaxed) % 12_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Both processes of a run that resumes from the newest checkpoint in `harmed`, with their rendezvous ports. No other run has the `token`.
fn both(harness: &Harness, ports: [u16; 2], token: &str) -> [Running; 2] {
    [0, 1].map(|process| {
        let (rendezvous, process_flag) = (format!("--rendezvous=127.0.0.1:{}", ports[process]), format!("--process={process}"));
        let flags = ["--gradient-accumulation-steps=1", "--processes=2", &process_flag, &rendezvous, "--resume-from-checkpoint=auto"];
        let mut command = harness.train("harmed", &[&CUT[..], &flags].concat());
        command.env("SUPEROFFLOAD_RUN_TOKEN", token);
        let running = harness.spawn_as(command, &format!("process-{process}"));
        std::thread::sleep(Duration::from_millis(20));
        running
    })
}
