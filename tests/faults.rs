//! Failures around a run: data that shrinks, a full log disk, steps that are always skipped, a hang-up, stopped threads. Finished steps are
//! saved, losses are reported, and nothing hangs.

use crate::program::{Outcome, STEPS, Workspace, program, run};
use crate::resume::{await_line, limit_files, send};
use crate::support::{Noise, digest, emulator, random_params, settings, start, tiny_llama};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use superoffload::internals::data::{Batch, Batches};
use superoffload::internals::planner::Machine;
use superoffload::{Error, Plan, Result};

const ACCUM: usize = 3;

/// Micro-batches that depend only on their index. Reading one of them fails once.
struct Fragile {
    next: usize,
    broken: Option<usize>,
}

impl Batches for Fragile {
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        if self.broken == Some(self.next) {
            self.broken = None;
            return Err(Error::resource("read data", "it is gone"));
        }
        self.next += 1;
        Noise::new(self.next as u64, 64).fill(batch)
    }
}

/// Every strategy, with an adversary that may be at any point of the previous step when the data fails.
#[test]
fn a_step_without_its_data_leaves_the_engine_as_it_was() {
    let shape = tiny_llama(3, 32, 64, true);
    let common = "seq-length = 8\nper-device-train-batch-size = 2\ngradient-accumulation-steps = 3\nbucket-mib = 0.0156\nseed = 5\n\
                  learning-rate = 1e-2\nmax-steps = 99\nmax-grad-norm = 1.7\ninject = [{step = 2, element = 5, value = 'nan'}]";
    for (seed, strategy) in (0..).zip(["superoffload", "zero-offload", "no-offload", "superoffload", "zero-offload", "superoffload"]) {
        let settings = settings(&format!("{common}\nstrategy = '{strategy}'\nadversary = {seed}\ndevice = 'cpu'"));
        let plan = Plan::new(&settings.request(&shape), &Machine::cpu(2), false).unwrap();
        // The digest of a run with this number of steps.
        let whole = |steps: usize| {
            let (mut engine, mut data) = (start(&plan, &shape, random_params(5)), Fragile { next: 0, broken: None });
            (0..steps).for_each(|_| _ = engine.step(1e-2, &mut data).unwrap());
            digest(&mut engine)
        };
        for (done, micro_step) in [(0, 1), (1, 0), (2, 1), (3, 2)] {
            let mut engine = start(&plan, &shape, random_params(5));
            let mut data = Fragile { next: 0, broken: Some(done * ACCUM + micro_step) };
            (0..done).for_each(|_| _ = engine.step(1e-2, &mut data).unwrap());
            assert!(engine.step(1e-2, &mut data).unwrap_err().to_string().contains("it is gone"));
            assert_eq!((engine.train_step(), digest(&mut engine)), (done as u64, whole(done)), "{strategy}, {done}, {micro_step}");
            data.next = done * ACCUM;
            engine.step(1e-2, &mut data).unwrap();
            assert_eq!(digest(&mut engine), whole(done + 1), "{strategy} goes on after {done}, {micro_step}");
        }
    }
}

/// The losses in the summary of a failed run.
fn lost(outcome: &Outcome) -> Vec<&str> {
    outcome.stdout.lines().filter_map(|line| line.strip_prefix("  lost          ")).collect()
}

fn only_checkpoint(workspace: &Workspace, out: &str) -> String {
    let names = workspace.names(out, "checkpoint-");
    assert_eq!(names.len(), 1, "{names:?}");
    names[0].clone()
}

#[test]
fn data_that_shrinks_under_a_run_costs_no_step() {
    let workspace = Workspace::new();
    let tokens: Vec<u8> = (0..40_000u32).flat_map(|i| ((i * i % 251) as u16).to_le_bytes()).collect();
    let data = workspace.write("tokens.bin", &tokens);
    let flags = |steps: &'static str| ["--data", data.to_str().unwrap(), "--save-steps", "1000000", "--max-steps", steps].map(String::from);
    let train = |out: &str, steps| {
        let mut command = workspace.train(out, &[]);
        command.args(flags(steps)).args(["--gradient-accumulation-steps", "2"]);
        command
    };
    let mut child = train("out", "1000000").spawn().unwrap();
    await_line(&mut child, "step      3");
    fs::write(&data, []).unwrap();
    let failed: Outcome = child.wait_with_output().unwrap().into();
    failed.refused(1, &["read", "tokens.bin"]);
    fs::write(&data, tokens).unwrap();
    assert!(failed.stdout.contains("\nfailed at step ") && lost(&failed).is_empty(), "{failed:?}");
    let checkpoint = only_checkpoint(&workspace, "out");
    let steps = workspace.metrics("out").len();
    assert_eq!(checkpoint, format!("checkpoint-{steps}"), "the step that failed is not done");
    let digest_of = |name: &str| run(program(&["digest"]).arg(workspace.path(name))).digest().to_string();
    // Compares with a fault-free run up to the failure, and with one more step, which must use the data of the failed one.
    let (steps, next): (&'static str, &'static str) = (steps.to_string().leak(), (steps + 1).to_string().leak());
    assert_eq!(run(&mut train("whole", steps)).digest(), digest_of(&format!("out/{checkpoint}")));
    let whole = run(&mut train("longer", next)).digest().to_string();
    assert_eq!(run(train("out", next).args(["--resume-from-checkpoint", "auto"])).digest(), whole);
}

/// The command with a limit on file sizes of `blocks` of 512 bytes.
pub fn limited(train: &Command, blocks: u64) -> Command {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f $1; shift; exec \"$@\"", "sh", &blocks.to_string()]).arg(train.get_program()).args(train.get_args());
    limited.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    limited
}

#[test]
fn limits_of_memory_too_small_to_start_in_are_named() {
    if emulator().is_some() {
        return;
    }
    // A debug build maps 44 MB before it can print anything.
    for (flag, kilobytes) in [("-v", "56000"), ("-d", "20000")] {
        let mut limited = Command::new("sh");
        limited.args(["-c", "ulimit $1 $2 && exec \"$3\" train --device cpu", "sh", flag, kilobytes]).arg(program(&[]).get_program());
        run(&mut limited).refused(1, &["start: ", &format!("ulimit {flag} allows "), "the program alone needs "]);
    }
}

/// Thread arenas that reserve address space would leave too little for the memory of this run, a third of the limit.
#[test]
fn limited_addresses_go_to_memory_that_is_used() {
    if emulator().is_some() {
        return;
    }
    let workspace = Workspace::new();
    let whole = run(&mut workspace.train("whole", &["--device=cpu"])).digest().to_string();
    let train = workspace.train("limited", &["--device=cpu"]);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -v 250000 && exec \"$@\"", "sh"]).arg(train.get_program()).args(train.get_args());
    assert_eq!(run(&mut limited).digest(), whole);
}

/// Bytes of the first line of a log, with the facts, and of a line after it.
fn line_bytes(log: &str) -> (u64, u64) {
    let lengths: Vec<u64> = log.lines().map(|line| line.len() as u64 + 1).collect();
    (lengths[0], lengths[1])
}

#[test]
fn a_full_log_disk_ends_the_run_after_a_save() {
    let workspace = Workspace::new();
    let whole = run(&mut workspace.train("whole", &[])).digest().to_string();
    run(&mut workspace.train("out", &["--max-steps", "2"]));
    // The existing log leaves space for one or two lines.
    let log = workspace.path("out/metrics.jsonl");
    let state = fs::metadata(workspace.path("out/checkpoint-2/state.bin")).unwrap().len();
    let blocks = (state + 40_000).div_ceil(512);
    let lines = fs::read_to_string(&log).unwrap();
    let (facts, per_line) = line_bytes(&lines);
    // The resumed run writes its own facts.
    let bytes_max = (blocks * 512 - 5 * per_line / 2 - facts) as usize - lines.len();
    let filler = format!("{{\"step\":1,\"filler\":\"{}\"}}\n", "x".repeat(bytes_max - 25));
    fs::write(&log, filler + &lines).unwrap();
    let full = run(&mut limited(&workspace.resume("out", &["--save-steps", "100"]), blocks));
    full.refused(1, &["write", "metrics.jsonl", "File too large"]);
    assert_eq!(lost(&full), ["the metrics of step 5"], "{full:?}");
    assert_eq!(workspace.names("out", "checkpoint-"), ["checkpoint-2", "checkpoint-5"]);
    assert_eq!(workspace.names("out", "."), [".lock", ".superoffload"]);
    assert_eq!(run(&mut workspace.resume("out", &[])).digest(), whole);
}

#[test]
fn a_second_failed_save_is_reported_with_the_lost_steps() {
    let workspace = Workspace::new();
    run(&mut workspace.train("out", &["--max-steps", "2"]));
    let log = workspace.path("out/metrics.jsonl");
    let (facts, per_line) = line_bytes(&fs::read_to_string(&log).unwrap());
    // Space for the facts and five lines, and for no state.
    let bytes_max = 2 * facts + 5 * per_line + per_line / 2;
    let mut child = workspace.resume("out", &["--max-steps=1000000", "--save-steps=1000000"]).spawn().unwrap();
    await_line(&mut child, "step      3");
    limit_files(&child, bytes_max);
    let both: Outcome = child.wait_with_output().unwrap().into();
    both.refused(1, &["write", "metrics.jsonl", "File too large", "; then reserve", "state.bin"]);
    let printed = lost(&both);
    assert!(printed[0].starts_with("steps 3 to ") && printed[0].ends_with("all since the checkpoint of the start"), "{printed:?}");
    assert!(printed[1].starts_with("the metrics of step ") && printed[2] == "the timeline", "{printed:?}");
    assert_eq!(workspace.names("out", "."), [".lock", ".superoffload"]);
}

#[test]
fn a_timeline_that_cannot_be_written_is_lost_and_nothing_else() {
    let workspace = Workspace::new();
    let failed = run(&mut workspace.train("out", &["--trace", "/dev/full"]));
    failed.refused(1, &["/dev/full", "No space left"]);
    assert_eq!(lost(&failed), ["the timeline"]);
    assert_eq!(workspace.names("out", "checkpoint-").len() as u64, STEPS / 2);
}

#[test]
fn a_run_that_only_skips_ends_and_keeps_its_last_save() {
    let workspace = Workspace::new();
    let skips: Vec<_> = (5..=40).map(|step| format!("{{step = {step}, element = 3, value = 'nan'}}")).collect();
    workspace.settings(&format!("inject = [{}]\nsave-total-limit = 1", skips.join(", ")));
    let flags = ["--max-steps", "100", "--max-skipped-steps", "12"];
    let ended = run(&mut workspace.train("out", &flags));
    let before = workspace.path("out/checkpoint-4");
    ended.refused(1, &["12 steps", "from step 5 on", "--max-skipped-steps 12", "--learning-rate", before.to_str().unwrap()]);
    assert!(ended.stderr.contains("warning: 10 steps in a row"), "{ended:?}");
    assert_eq!(workspace.names("out", "checkpoint-"), ["checkpoint-16", "checkpoint-4"]);
    // No step learned anything, so both checkpoints have the same state.
    let digest_of = |step: u64| run(program(&["digest"]).arg(workspace.path(&format!("out/checkpoint-{step}")))).digest().to_string();
    assert_eq!(digest_of(4), digest_of(16));
    // A restarted run continues the sequence of skipped steps: it stops after two more, and keeps the checkpoint before the sequence.
    let again = run(&mut workspace.resume("out", &["--max-steps", "100", "--max-skipped-steps", "14"]));
    again.refused(1, &["14 steps", "from step 5 on"]);
    assert_eq!(workspace.names("out", "checkpoint-"), ["checkpoint-18", "checkpoint-4"]);
    // After the sequence ends, its protected checkpoint is subject to the rotation again.
    workspace.settings("inject = [{step = 5, element = 3, value = 'nan'}, {step = 6, element = 3, value = 'nan'}]\nsave-total-limit = 1");
    assert_eq!(run(&mut workspace.train("short", &["--max-skipped-steps", "3"])).code, 0);
    assert_eq!(workspace.names("short", "checkpoint-"), ["checkpoint-12"]);
    let never = run(&mut workspace.train("never", &["--max-skipped-steps", "0", "--max-steps", "8"]));
    assert_eq!(never.code, 0, "{never:?}");
}

#[test]
fn a_hang_up_that_was_ignored_at_the_start_stays_ignored() {
    let workspace = Workspace::new();
    let train = workspace.train("out", &["--max-steps", "100000"]);
    let mut nohup = Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(train.get_program()).args(train.get_args());
    let mut child = nohup.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    await_line(&mut child, "step      3");
    send(&child, Signal::SIGHUP);
    await_line(&mut child, "step ");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(child.try_wait().unwrap(), None, "ended by a hang-up");
    send(&child, Signal::SIGTERM);
    let ended: Outcome = child.wait_with_output().unwrap().into();
    assert_eq!(ended.code, 75, "{ended:?}");
}

#[test]
fn the_summary_goes_to_standard_error_when_standard_output_is_closed() {
    let workspace = Workspace::new();
    let mut child = workspace.train("out", &["--max-steps", "100000"]).spawn().unwrap();
    await_line(&mut child, "step      3");
    // Closes the pipe, as if `tee` had exited.
    drop(child.stdout.take());
    send(&child, Signal::SIGINT);
    let ended: Outcome = child.wait_with_output().unwrap().into();
    assert!(ended.stderr.starts_with("\ninterrupted at step ") && ended.stderr.contains("out/checkpoint-"), "{ended:?}");
}

/// The threads of `child` with this name prefix.
fn threads(child: &Child, name: &str) -> Vec<Pid> {
    let tasks = fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().map(|task| task.unwrap().path());
    let named = tasks.filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.starts_with(name)));
    named.map(|task| Pid::from_raw(task.file_name().unwrap().to_str().unwrap().parse().unwrap())).collect()
}

/// Stops a thread of `child`. It continues when the tracer, which is this thread, ends or detaches.
fn freeze(thread: Pid) {
    use nix::sys::ptrace;
    ptrace::seize(thread, ptrace::Options::empty()).unwrap();
    ptrace::interrupt(thread).unwrap();
}

/// Starts a run, stops its thread `name` after some steps, and waits for the end of the run.
fn run_with_frozen(name: &str, limit: &str, more: &[&str]) -> (Outcome, Duration) {
    let workspace = Workspace::new();
    let flags = [&["--max-steps", "1000000", "--save-steps", "1000000", "--stall-limit", limit], more].concat();
    let mut child = workspace.train("out", &flags).spawn().unwrap();
    await_line(&mut child, "step      9");
    let frozen = threads(&child, name);
    assert_eq!(frozen.len(), 1, "threads named {name}");
    freeze(frozen[0]);
    let (at, pid) = (Instant::now(), child.id());
    let reaper = std::thread::spawn(move || child.wait_with_output().unwrap());
    while !reaper.is_finished() {
        assert!(at.elapsed() < Duration::from_secs(60), "{pid} hangs");
        has_ended(frozen[0]);
        std::thread::sleep(Duration::from_millis(20));
    }
    (reaper.join().unwrap().into(), at.elapsed())
}

#[test]
fn a_worker_that_stands_still_is_named_and_the_run_ends_with_an_account() {
    if emulator().is_some() {
        return;
    }
    let (ended, time) = run_with_frozen("adam-01", "4", &[]);
    assert_eq!(ended.code, 1, "{ended:?}");
    assert!(time >= Duration::from_secs(3), "{time:?}");
    let mut lines = ended.stderr.lines();
    let worker = lines.next().unwrap();
    assert!(worker.starts_with("warning: optimizer worker adam-01 has made no progress for 2s in bucket "), "{worker}");
    let bucket = worker.rsplit(' ').next().unwrap();
    assert!(lines.next().unwrap().starts_with("error: no progress for 4s (--stall-limit): the run ends"), "{ended:?}");
    assert!(ended.stderr.contains(&format!("\n  worker        adam-01 owes bucket {bucket}, after ")), "{ended:?}");
    assert!(ended.stderr.contains("\n  worker        adam-00 is idle"), "{ended:?}");
    assert!(ended.stderr.contains("is with the optimizer's workers\n") && ended.stderr.contains(" s  begin step "), "{ended:?}");
    let events = ended.stderr.lines().filter(|line| line.contains(" s  ")).count();
    // On a GPU fewer steps have run by then than the history holds.
    let on_gpu = std::env::var("SUPEROFFLOAD_DEVICE").is_ok_and(|device| device == "cuda");
    assert!(if on_gpu { (64..=256).contains(&events) } else { events == 256 }, "the last events: {events}");
}

#[test]
fn a_stalled_stream_ends_the_run_and_names_its_pending_operations() {
    if emulator().is_some() {
        return;
    }
    let (ended, _) = run_with_frozen("d2h", "2", &[]);
    assert_eq!(ended.code, 1, "{ended:?}");
    assert!(ended.stderr.starts_with("error: no progress for 2s"), "{ended:?}");
    assert!(ended.stderr.contains("\n  stream        d2h owes the gradient's copy of bucket "), "{ended:?}");
    assert!(ended.stderr.contains(": waits for its gradient's copy to the host\n"), "{ended:?}");
}

#[test]
fn of_several_ranks_the_one_that_stands_still_is_named_first() {
    if emulator().is_some() {
        return;
    }
    let (ended, _) = run_with_frozen("rank-2", "2", &["--device=cpu", "--gpus=3"]);
    assert_eq!(ended.code, 1, "{ended:?}");
    let lines: Vec<&str> = ended.stderr.lines().collect();
    let [first, ranks @ ..] = &lines[..4] else { panic!("{ended:?}") };
    assert!(first.starts_with("error: no progress for 2s (--stall-limit): the run ends"), "{first}");
    assert!(ranks[0].starts_with("  rank 2        ") && !ranks[0].contains(" of rank"), "{ranks:?}");
    let waits = |rank: usize| ranks.iter().find(|line| line.starts_with(&format!("  rank {rank}        waits for "))).unwrap();
    assert!(waits(0).ends_with(" of rank 2"), "{ranks:?}");
    // Rank 1 may be waiting for the next order of rank 0.
    assert!(waits(1).ends_with(" of rank 2") || waits(1).ends_with(" of rank 0"), "{ranks:?}");
    assert!((0..3).all(|rank| lines.iter().any(|line| line.starts_with(&format!("rank {rank} ")))), "{lines:#?}");
}

/// Rank 1 stops for three seconds, longer than all short waits of a busy machine together. Rank 0 has nothing to compute for that time, and
/// the report names both.
#[test]
fn a_slow_rank_is_logged_with_the_time_its_peers_waited() {
    if emulator().is_some() {
        return;
    }
    let workspace = Workspace::new();
    let mut child = workspace.train("out", &["--device=cpu", "--gpus=2", "--max-steps=40", "--save-steps=100"]).spawn().unwrap();
    await_line(&mut child, "step      5");
    let slow = threads(&child, "rank-1")[0];
    freeze(slow);
    std::thread::sleep(Duration::from_secs(3));
    waitpid(slow, Some(WaitPidFlag::__WALL)).unwrap();
    nix::sys::ptrace::detach(slow, None).unwrap();
    let ended: Outcome = child.wait_with_output().unwrap().into();
    assert_eq!(ended.code, 0, "{ended:?}");
    let waits = workspace.metrics("out").iter().filter_map(|line| line["exposed_peer_ms"].as_f64()).fold(0.0, f64::max);
    // This holds even if the rank was waiting for rank 0 when it was stopped.
    let message = " ms for other ranks (rank 0, the longest)\n  slow          rank 1: ";
    assert!(waits > 2900.0 && ended.stdout.contains(message), "{ended:?}");
}

/// Whether a stopped thread has ended. A traced thread is only removed after its tracer has reaped it.
fn has_ended(thread: Pid) -> bool {
    loop {
        match waitpid(thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => return false,
            Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) | Err(_) => return true,
            Ok(_) => {}
        }
    }
}

/// After suspending a laptop or a job, only the time in which the process could run counts.
#[test]
fn a_process_that_was_stopped_is_no_older_when_it_goes_on() {
    if emulator().is_some() {
        return;
    }
    let workspace = Workspace::new();
    let mut child = workspace.train("out", &["--max-steps", "1000000", "--save-steps", "1000000", "--stall-limit", "4"]).spawn().unwrap();
    await_line(&mut child, "step      9");
    let frozen = threads(&child, "d2h")[0];
    freeze(frozen);
    std::thread::sleep(Duration::from_secs(1));
    send(&child, Signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(5));
    send(&child, Signal::SIGCONT);
    std::thread::sleep(Duration::from_secs(1));
    assert!(!has_ended(frozen), "it ended after two seconds of its own");
    let at = Instant::now();
    while !has_ended(frozen) {
        assert!(at.elapsed() < Duration::from_secs(30), "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    let ended: Outcome = child.wait_with_output().unwrap().into();
    assert!(ended.code == 1 && ended.stderr.starts_with("error: no progress for 4s"), "{ended:?}");
}
