use super::*;
use nix::sys::signal::{Signal, kill};
use std::fs;
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

/// Adds each message to its initial value, and misbehaves on request.
struct Adder(Vec<u8>);

impl Service for Adder {
    fn answer(&mut self, request: &[u8]) -> Vec<u8> {
        work_on(7);
        let outcome = match request {
            b"memory" => guard(SandboxTask::Encode, || black_box(vec![1u8; 5 << 30]).len()),
            b"stack" => guard(SandboxTask::Encode, || deep(u64::MAX) as usize),
            b"time" => guard(SandboxTask::Render, spin),
            b"code" => guard(SandboxTask::Load, || std::process::exit(3)),
            b"signal" => guard(SandboxTask::Load, || kill(Pid::this(), Signal::SIGKILL).map_or(1, |()| 0)),
            b"panic" => guard(SandboxTask::Rows, || panic!("odd")),
            b"descriptors" => return fs::read_dir("/proc/self/fd").unwrap().count().to_string().into(),
            b"pid" => return Pid::this().to_string().into(),
            _ => return [&self.0, request].concat(),
        };
        outcome.map_or_else(String::into_bytes, |count| count.to_string().into())
    }
}

fn deep(levels: u64) -> u64 {
    if black_box(levels) == 0 { 0 } else { 1 + black_box(deep(levels - 1)) }
}

fn spin() -> usize {
    loop {
        black_box(());
    }
}

fn adder() -> Sandbox {
    let (sandbox, facts) = Sandbox::start(|| (b"facts".to_vec(), Some(Adder(b"a".to_vec())))).unwrap();
    assert_eq!(facts, b"facts");
    sandbox
}

fn request_of(sandbox: &Sandbox, request: &[u8]) -> Result<Vec<u8>, Ended> {
    sandbox.request(request, &StopFlag::default())
}

fn is_alive(pid: i32) -> bool {
    kill(Pid::from_raw(pid), None).is_ok()
}

fn number(answer: &[u8]) -> i32 {
    str::from_utf8(answer).unwrap().parse().unwrap()
}

#[test]
fn threads_have_workers_and_long_messages_pass() {
    let sandbox = adder();
    thread::scope(|scope| {
        for size in [0, 1, 3 << 20] {
            let sandbox = &sandbox;
            scope.spawn(move || {
                for _ in 0..3 {
                    let request = vec![b'b'; size];
                    assert_eq!(request_of(sandbox, &request).unwrap(), [b"a", &request[..]].concat());
                }
            });
        }
    });
    assert!((1..=3).contains(&held(&sandbox.idle).len()));
}

#[test]
fn each_death_is_reported_with_its_task_and_limit() {
    let sandbox = adder();
    for (request, words) in [
        ("memory", "tokenizing one text takes more than 4.0 GiB of memory"),
        ("stack", "tokenizing one text takes more than 64.0 MiB of stack"),
        ("time", "rendering one conversation by the chat template takes more than 2 s of CPU time"),
        ("code", "reading the tokenizer ended its process with code 3"),
        ("signal", "reading the tokenizer was killed by signal 9"),
    ] {
        match request_of(&sandbox, request.as_bytes()) {
            Err(Ended::Died { item: 7, cause, .. }) => assert!(cause.starts_with(words), "{request}: {cause}"),
            other => panic!("{request}: {other:?}"),
        }
        assert_eq!(request_of(&sandbox, b"b").unwrap(), b"ab", "another worker goes on");
    }
    assert_eq!(request_of(&sandbox, b"panic").unwrap(), b"the parquet library fails on it: odd");
}

#[test]
fn a_first_process_that_dies_is_reported_at_the_start() {
    let started = Sandbox::start(|| -> (Vec<u8>, Option<Adder>) {
        let _ = guard(SandboxTask::Load, || deep(u64::MAX));
        (vec![], None)
    });
    assert!(
        matches!(started, Err(Ended::Died { task: SandboxTask::Load, ref cause, .. }) if cause.contains("of stack")),
        "{:?}",
        started.err()
    );
    let (sandbox, facts) = Sandbox::start(|| (b"none".to_vec(), None::<Adder>)).unwrap();
    assert_eq!(facts, b"none");
    assert!(matches!(request_of(&sandbox, b"b"), Err(Ended::Died { .. })));
}

/// Signals of a terminal go to all its processes; locks and files of the parent are not the child's.
#[test]
fn a_worker_has_nothing_of_its_parent_and_leaves_signals_to_it() {
    let _file = tempfile::tempfile().unwrap();
    let sandbox = adder();
    let pid = number(&request_of(&sandbox, b"pid").unwrap());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGTSTP] {
        kill(Pid::from_raw(pid), signal).unwrap();
        assert_eq!(number(&request_of(&sandbox, b"pid").unwrap()), pid, "{signal}");
    }
    // Three of every process, the connection, and the directory that is read.
    assert_eq!(request_of(&sandbox, b"descriptors").unwrap(), b"5");
}

#[test]
fn no_process_is_left_when_a_sandbox_ends_or_is_stopped() {
    let sandbox = adder();
    let worker = number(&request_of(&sandbox, b"pid").unwrap());
    let first = held(&sandbox.first).pid.as_raw();
    assert!(is_alive(worker) && is_alive(first));
    let stop = StopFlag::default();
    let began = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            stop.request();
        });
        assert!(matches!(sandbox.request(b"time", &stop), Err(Ended::Stopped)));
    });
    assert!(began.elapsed() < crate::sweep::PROMPTLY);
    drop(sandbox);
    assert!(!is_alive(worker) && !is_alive(first), "also the one that works");
}

#[cfg(feature = "parquet")]
#[test]
fn a_stream_sends_until_the_reader_ends() {
    let start = |count: u32| {
        SandboxStream::start(move |send| {
            let mut sent = (0..count).take_while(|number| send(&number.to_le_bytes()));
            let _ = sent.by_ref().count();
        })
    };
    let mut stream = start(3).unwrap();
    let next =
        |stream: &mut SandboxStream| stream.next(&StopFlag::default()).ok().map(|message| u32::from_le_bytes(message.try_into().unwrap()));
    assert_eq!([(); 4].map(|()| next(&mut stream)), [Some(0), Some(1), Some(2), None]);
    let mut endless = start(u32::MAX).unwrap();
    assert_eq!(next(&mut endless), Some(0));
    let pid = endless.0.pid.as_raw();
    drop(endless);
    assert!(!is_alive(pid));
}
