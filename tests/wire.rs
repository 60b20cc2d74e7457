//! Messages between processes are checked before use, and a client without the run token cannot prevent a run from starting.

use crate::program::{Outcome, Workspace, run};
use crate::resume::{await_line, send};
use crate::sweep::PROMPTLY;
use crate::wire_proxy::{HARMS, Harm, PHASES, Phase, Plot, WireProxy};
use nix::sys::signal::Signal;
use std::fs::Permissions;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const TOKEN: (&str, &str) = ("SUPEROFFLOAD_RUN_TOKEN", "a token that nobody guesses");

/// Environment variables of launchers, under which these tests may run.
const LAUNCHERS: [&str; 6] = ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"];

/// Number of concurrent runs.
const AT_ONCE: usize = 4;

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The command of one process. All processes together have six shares a step.
fn one(workspace: &Workspace, out: &str, processes: usize, flags: &[&str]) -> Command {
    let accumulation = format!("--gradient-accumulation-steps={}", 6 / processes);
    let cut = ["--device=cpu", "--threads=1", "--bucket-mib=0.03125", "--gradient-shares=6", "--stall-limit=30", &accumulation];
    let mut command = workspace.train(out, &[&cut[..], flags].concat());
    LAUNCHERS.iter().for_each(|name| _ = command.env_remove(name));
    command.env(TOKEN.0, TOKEN.1);
    command
}

/// Process `process` of `processes`, with the rendezvous at `port`.
fn member(workspace: &Workspace, out: &str, [process, processes]: [usize; 2], port: u16, flags: &[&str]) -> Command {
    let (all, nth, at) = (format!("--processes={processes}"), format!("--process={process}"), format!("--rendezvous=127.0.0.1:{port}"));
    one(workspace, out, processes, &[&[&all[..], &nth, &at], flags].concat())
}

fn end(child: Child) -> Outcome {
    child.wait_with_output().unwrap().into()
}

/// Runs two processes through a proxy that damages one message.
fn harmed(workspace: &Workspace, plot: Plot, whole: &str) {
    let (port, out) = (free_port(), format!("{:?}-{:?}-{}", plot.phase, plot.harm, plot.nth));
    let proxy = WireProxy::to(port, plot);
    let ports = [port, proxy.port];
    let [first, second] =
        [0, 1].map(|process| member(workspace, &out, [process, 2], ports[process], &["--rendezvous-limit=30"]).spawn().unwrap());
    let (first, second) = (end(first), end(second));
    let message = || format!("{plot:?}: {first:?}, {second:?}");
    assert!(
        [&first, &second].iter().all(|outcome| [0, 1].contains(&outcome.code) && !outcome.stderr.contains("panicked")),
        "{}",
        message()
    );
    assert!(proxy.has_struck(), "there is no such message: {}", message());
    if first.code == 0 {
        assert_eq!(first.digest(), whole, "{plot:?}");
    }
    let all_well = first.code == 0 && second.code == 0;
    let may_heal = matches!(plot.phase, Phase::Handshake | Phase::Rendezvous | Phase::Alive | Phase::End);
    match plot.harm {
        Harm::Delay => assert!(all_well, "{}", message()),
        _ => assert!(!all_well || may_heal, "nobody noticed: {}", message()),
    }
    if matches!(plot.phase, Phase::Gradients | Phase::Weights | Phase::Notices | Phase::Orders) && plot.harm == Harm::Flip {
        let kind = match plot.phase {
            Phase::Gradients => "gradients",
            Phase::Weights => "weights",
            _ => "notices",
        };
        for (outcome, other) in [&first, &second].into_iter().zip([1, 0]) {
            let is_named = outcome.stderr.contains("process 0 on ") || outcome.stderr.contains("process 1 on ");
            assert!(outcome.code == 1 && is_named, "of process {other}: {}", message());
        }
        let words = format!("{kind} from it arrived damaged after step ");
        assert!(first.stderr.contains(&words) && second.stderr.contains(&words), "{}", message());
    }
    let resumed = one(workspace, &out, 1, &["--resume-from-checkpoint=auto"]).output().unwrap();
    assert_eq!(Outcome::from(resumed).digest(), whole, "{plot:?}: the last checkpoint is good");
}

/// A message of each kind in each phase of a run: no run may finish with other bits. A campaign tests a thousand of them.
#[test]
fn a_message_that_is_harmed_on_its_way_is_never_used() {
    let workspace = Workspace::new();
    let whole = end(one(&workspace, "one", 1, &[]).spawn().unwrap()).digest().to_string();
    // The first heartbeat of a run leaves after 200 ms, in which a fast machine finishes this run.
    let slow = Workspace::new();
    slow.settings("faults = [{rank = 0, step = 3, phase = 'optimize', kind = 'slow'}]");
    let plots = PHASES.into_iter().enumerate().flat_map(|(nth, phase)| {
        let harms: Vec<Harm> = crate::sweep::sweep([0, 2, 5].map(|at| HARMS[(nth + at) % HARMS.len()]).to_vec(), HARMS.to_vec());
        // Each plot has an output directory of its own: none occurs twice.
        let is_named = matches!(phase, Phase::Gradients | Phase::Weights | Phase::Notices | Phase::Orders);
        let always = (is_named && !harms.contains(&Harm::Flip)).then_some(Harm::Flip);
        let choice = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(nth as u64 + 1);
        let late = if matches!(phase, Phase::Handshake | Phase::Alive | Phase::End) { 0 } else { 5 };
        harms.into_iter().chain(always).map(move |harm| Plot { phase, harm, nth: late, choice })
    });
    let plots: Vec<Plot> = plots.collect();
    std::thread::scope(|scope| {
        for job in 0..AT_ONCE {
            let (workspace, slow, whole, plots) = (&workspace, &slow, &whole, &plots);
            let harmed = move |plot: &Plot| harmed(if plot.phase == Phase::Alive { slow } else { workspace }, *plot, whole);
            scope.spawn(move || plots.iter().skip(job).step_by(AT_ONCE).for_each(harmed));
        }
    });
}

/// Connections that send nothing or single bytes, before process 0 has met any process and while it waits.
#[test]
fn slow_strangers_do_not_keep_a_run_from_starting() {
    let workspace = Workspace::new();
    let whole = end(one(&workspace, "one", 1, &[]).spawn().unwrap()).digest().to_string();
    let port = free_port();
    let mut first = member(&workspace, "two", [0, 2], port, &[]).spawn().unwrap();
    await_line(&mut first, "listening at ");
    let begin = Instant::now();
    let mut strangers: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    let dripping = std::thread::spawn(move || {
        while begin.elapsed() < Duration::from_secs(8) {
            // Rejected connections are closed.
            strangers.iter_mut().for_each(|stream| _ = stream.write_all(b"S"));
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    std::thread::sleep(Duration::from_millis(300));
    let second = end(member(&workspace, "two", [1, 2], port, &[]).spawn().unwrap());
    assert_eq!(second.code, 0, "{second:?}");
    assert_eq!(end(first).digest(), whole);
    dripping.join().unwrap();
}

/// Each output names a process and a cause only once.
#[test]
fn a_process_that_ends_is_named_once_by_all_others() {
    let workspace = Workspace::new();
    for (phase, step) in [("start", 1), ("backward", 3)] {
        workspace.settings(&format!("faults = [{{rank = 1, step = {step}, phase = '{phase}', kind = 'hang'}}]"));
        let port = free_port();
        let mut all: Vec<Child> = (0..3).map(|process| member(&workspace, phase, [process, 3], port, &[]).spawn().unwrap()).collect();
        await_line(&mut all[1], "all 3 processes are here");
        std::thread::sleep(Duration::from_millis(700));
        all[1].kill().unwrap();
        for (process, child) in all.into_iter().enumerate().filter(|(process, _)| *process != 1) {
            let outcome = end(child);
            let errors: Vec<&str> = outcome.stderr.lines().collect();
            assert!(outcome.code == 1 && errors.len() == 1, "{outcome:?}");
            let is_clean = errors[0].starts_with("error: process 1 on ") && errors[0].matches("process 1 on").count() == 1;
            assert!(is_clean && !errors[0].contains("; then "), "process {process} in {phase}: {outcome:?}");
        }
    }
}

#[test]
fn the_wait_for_peers_has_a_limit_and_a_signal_ends_it_in_all() {
    let workspace = Workspace::new();
    let late = run(&mut member(&workspace, "late", [0, 2], free_port(), &["--rendezvous-limit=1"]));
    late.refused(1, &["no connection from process [1]", "--rendezvous-limit 1 is over"]);
    let late = run(&mut member(&workspace, "late", [1, 2], free_port(), &["--rendezvous-limit=1"]));
    late.refused(1, &["no answer from 127.0.0.1:", "--rendezvous-limit 1 is over"]);
    let none = run(&mut member(&workspace, "late", [0, 2], free_port(), &["--rendezvous-limit=0"]));
    none.refused(2, &["--rendezvous-limit 0", "must be from 1 to"]);
    let port = free_port();
    let mut all: Vec<Child> = (0..2).map(|process| member(&workspace, "told", [process, 3], port, &[]).spawn().unwrap()).collect();
    await_line(&mut all[1], "meeting the others at ");
    std::thread::sleep(Duration::from_millis(500));
    send(&all[1], Signal::SIGTERM);
    let begin = Instant::now();
    assert!(all.into_iter().map(end).all(|outcome| outcome.code == 75 && outcome.stdout.contains("interrupted while")));
    assert!(begin.elapsed() < PROMPTLY);
}

#[test]
fn a_readable_token_is_a_warning_and_a_short_one_is_refused() {
    let workspace = Workspace::new();
    let alone = |command: &mut Command| run(command.env_remove(TOKEN.0));
    let by_file = |bytes: &[u8], mode: u32| {
        let path = workspace.write("token", bytes);
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let file = format!("--run-token-file={}", path.display());
        alone(&mut member(&workspace, "out", [0, 2], free_port(), &[&file, "--rendezvous-limit=1"]))
    };
    by_file(&[0xff; 6], 0o600).refused(2, &["token: a run token of 6 bytes can be guessed"]);
    let missing = "no connection from process [1]";
    let good = by_file(&[0xff, 0x80].repeat(8), 0o600);
    assert!(good.code == 1 && good.stderr.contains(missing) && !good.stderr.contains("warning"), "{good:?}");
    let open = by_file(b"0123456789abcdef", 0o644);
    assert!(open.code == 1 && open.stderr.contains("token: other users may read the run token (mode 644)"), "{open:?}");
    let weak = by_file(&[b'a'; 16], 0o600);
    assert!(weak.code == 1 && weak.stderr.contains("the run token may be guessed: it repeats one byte"), "{weak:?}");
    // Different bytes are different tokens, even if neither is valid text.
    let port = free_port();
    let with = |process: usize, byte: u8| {
        let mut command = member(&workspace, "bytes", [process, 2], port, &["--rendezvous-limit=20"]);
        command.env(TOKEN.0, std::ffi::OsStr::from_bytes(&[&[byte; 20][..], b"x"].concat())).spawn().unwrap()
    };
    let mut first = with(0, 0xff);
    end(with(1, 0x80)).refused(1, &["has another run token"]);
    first.kill().unwrap();
    first.wait().unwrap();
}
