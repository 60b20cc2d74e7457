//! Tests of the rendezvous with strangers, wrong tokens, signals and processes that die.

use super::*;
use crate::sweep::PROMPTLY;
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpListener;

const TOKEN: &str = "0123456789abcdef";

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn meeting(address: &str, process: usize, processes: usize, token: &str) -> ProcessRendezvous {
    let (token, limit) = (RunToken::new(token.as_bytes(), "here").unwrap(), Duration::from_secs(60));
    ProcessRendezvous { address: address.into(), process, processes, ranks: 2, token, limit }
}

/// The result of each process, given its facts.
fn meet(address: &str, facts: &[Value]) -> Vec<Result<Mesh>> {
    let all = facts.len();
    thread::scope(|scope| {
        let run = |process: usize| {
            let (facts, has) = (facts[process].as_object().unwrap().clone(), json!({"gpus": process}));
            let own = HelloMessage { host: format!("host-{process}"), facts, resources: has, address: None };
            meeting(address, process, all, TOKEN).meet(own, &StopFlag::default(), &mut |_| ())
        };
        let threads: Vec<_> = (0..facts.len()).rev().map(|process| scope.spawn(move || run(process))).collect();
        threads.into_iter().rev().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn each_two_of_four_processes_are_connected_while_strangers_come() {
    let address = free_address();
    let noise = address.clone();
    let stranger = thread::spawn(move || {
        for words in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], b""] {
            let end = Instant::now() + Duration::from_secs(5);
            while Instant::now() < end {
                let Ok(mut stream) = TcpStream::connect(&noise) else { continue };
                stream.write_all(words).unwrap();
                if !words.is_empty() {
                    assert!(!matches!(stream.read(&mut [0; 8]), Ok(1..)), "it is dropped without a word");
                }
                break;
            }
        }
    });
    let meshes: Vec<Mesh> = meet(&address, &vec![json!({"processes": 4}); 4]).into_iter().map(Result::unwrap).collect();
    stranger.join().unwrap();
    for (process, mesh) in meshes.iter().enumerate() {
        for (other, hello) in mesh.all.iter().enumerate() {
            assert_eq!((&hello.host, &hello.resources), (&format!("host-{other}"), &json!({"gpus": other})));
        }
        for (other, connections) in mesh.connections.iter().enumerate() {
            assert_eq!(connections.is_some(), other != process);
            for (channel, connection) in connections.iter().flatten().enumerate() {
                let (_, (mut out, mut seal)) = connection.try_clone().unwrap().split().unwrap();
                seal.write(&mut out, 77, &[process as u8, channel as u8], &[]).unwrap();
            }
        }
    }
    for mesh in &meshes {
        for (other, connections) in mesh.connections.iter().enumerate() {
            for (channel, connection) in connections.iter().flatten().enumerate() {
                let ((mut input, mut seal), _) = connection.try_clone().unwrap().split().unwrap();
                let mut next = || {
                    let head = seal.head(&mut input).unwrap();
                    let mut body = vec![0; head.length];
                    seal.body(&mut input, &head, (&mut body, &mut []), |_| String::new()).unwrap();
                    (head.kind, body)
                };
                // Heartbeats may arrive before.
                let sent = std::iter::repeat_with(&mut next).find(|(kind, _)| *kind == 77).unwrap();
                assert_eq!(sent.1, [other as u8, channel as u8]);
            }
        }
    }
}

#[test]
fn all_processes_receive_a_difference_with_both_values() {
    let facts = |seed: u64| json!({"program": "0.1.0", "processes": 3, "seed": seed});
    let outcomes = meet(&free_address(), &[facts(1), facts(1), facts(2)]);
    for outcome in outcomes {
        let message = outcome.err().unwrap();
        assert_eq!(
            message.to_string(),
            "seed: 1 for process 0 on host-0, 2 for process 2 on host-2; all processes of a run need equal values"
        );
        assert_eq!(message.exit_code(), 2);
    }
}

#[test]
fn a_peer_with_another_token_gets_an_error_and_a_stop_ends_the_wait() {
    let (address, stop) = (free_address(), StopFlag::default());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| meeting(&address, 0, 2, TOKEN).meet(HelloMessage::default(), &stop, &mut |_| ()));
        let refused = meeting(&address, 1, 2, "another-token-is-this").meet(HelloMessage::default(), &StopFlag::default(), &mut |_| ());
        assert!(refused.err().unwrap().to_string().contains("has another run token"));
        stop.request();
        assert_eq!(waiting.join().unwrap().err().unwrap().exit_code(), 75);
    });
}

/// The line of `event` behind its kind.
fn line_of(event: ProgressEvent<'_>) -> String {
    match event {
        ProgressEvent::Note(line) => format!("note: {line}"),
        ProgressEvent::Detail(line) => format!("detail: {line}"),
        ProgressEvent::Warn(line) => format!("warning: {line}"),
        ProgressEvent::Progress { activity, .. } => activity.into(),
    }
}

#[test]
fn only_a_long_wait_for_other_processes_is_a_note() {
    let address = free_address();
    let [mut first, second] = [0, 1].map(|process| ThreadedProcess::start(&address, process, 2));
    let lines = std::mem::replace(&mut first.lines, mpsc::channel().1);
    assert!([first, second].into_iter().all(|process| process.mesh().all.len() == 2));
    let lines: Vec<String> = lines.iter().collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line.starts_with("detail: ")), "{lines:?}");
    let (address, begun) = (free_address(), Instant::now());
    let first = ThreadedProcess::start(&address, 0, 2);
    first.expect_line(&format!("note: process 0 of 2: meeting the others at {address}"));
    assert!(begun.elapsed() >= SHORT_WAIT);
    let second = ThreadedProcess::start(&address, 1, 2);
    assert!([first, second].into_iter().all(|process| process.mesh().all.len() == 2));
}

/// A process that runs the rendezvous on its own thread, and the lines that it prints.
struct ThreadedProcess {
    thread: thread::JoinHandle<Result<Mesh>>,
    stop: StopFlag,
    lines: mpsc::Receiver<String>,
}

impl ThreadedProcess {
    /// Starts process `process` of `processes`, which reaches process 0 at `address`.
    fn start(address: &str, process: usize, processes: usize) -> Self {
        Self::with(meeting(address, process, processes, TOKEN))
    }

    fn with(meeting: ProcessRendezvous) -> Self {
        let (stop, (sender, lines)) = (StopFlag::default(), mpsc::channel());
        let own = HelloMessage { host: format!("host-{}", meeting.process), ..HelloMessage::default() };
        let stop_of_thread = stop.clone();
        let thread = thread::spawn(move || meeting.meet(own, &stop_of_thread, &mut |event| _ = sender.send(line_of(event))));
        Self { thread, stop, lines }
    }

    /// Waits for a line that contains `words`.
    fn expect_line(&self, words: &str) {
        let end = Instant::now() + Duration::from_secs(30);
        let found = std::iter::from_fn(|| self.lines.recv_timeout(end.saturating_duration_since(Instant::now())).ok());
        assert!({ found }.any(|line| line.contains(words)), "no line says {words:?}");
    }

    fn mesh(self) -> Mesh {
        self.thread.join().unwrap().unwrap()
    }

    fn error(self) -> Error {
        self.thread.join().unwrap().err().unwrap()
    }
}

fn port_of(address: &str) -> &str {
    address.rsplit_once(':').unwrap().1
}

/// A control connection of process `process` that sends its hello message and nothing afterwards.
fn visitor(address: &str, process: u32) -> ControlConnection {
    let (token, claim) = (RunToken::new(TOKEN.as_bytes(), "here").unwrap(), Claim { channel: Channel::CONTROL, process, round: 0 });
    let connected = std::iter::repeat_with(|| connect(address, &token, claim)).find_map(std::result::Result::ok);
    let mut line = ControlConnection::new(connected.unwrap()).unwrap();
    let hello = HelloMessage { host: "here".into(), ..HelloMessage::default() };
    line.send(&Notice::new(Topic::Agreement, &[]).with_text(&serde_json::to_string(&hello).unwrap())).unwrap();
    line
}

/// A machine's own name may resolve to an address that leads to this machine alone, such as 127.0.1.1.
#[test]
fn process_0_listens_at_all_addresses_whatever_its_name_means_there() {
    let address = free_address();
    let first = ThreadedProcess::start(&format!("127.0.1.1:{}", port_of(&address)), 0, 3);
    first.expect_line("all addresses of this machine");
    let [second, third] = [1, 2].map(|process| ThreadedProcess::start(&address, process, 3));
    let mesh = third.mesh();
    assert_eq!(mesh.connections.iter().flatten().count(), 2);
    assert!([first, second].into_iter().all(|process| process.mesh().all.len() == 3));
}

#[test]
fn an_address_of_the_machine_itself_is_one_of_process_0() {
    let of = |address: &str, first: &str| reachable(Some(address.parse().unwrap()), first.parse().unwrap());
    assert_eq!(of("127.0.0.1:7", "10.0.0.4"), "10.0.0.4:7");
    assert_eq!(of("[::1]:7", "fd00::4"), "[fd00::4]:7");
    assert_eq!(of("10.0.0.5:7", "10.0.0.4"), "10.0.0.5:7");
}

#[test]
fn a_port_in_use_is_tried_again() {
    let address = free_address();
    let other = TcpListener::bind(&address).unwrap();
    let first = ThreadedProcess::start(&address, 0, 2);
    first.expect_line("is in use by another program: trying again for 60 s");
    drop(other);
    let second = ThreadedProcess::start(&address, 1, 2);
    assert!([first, second].into_iter().all(|process| process.mesh().all.len() == 2));
    // Without success until the limit.
    let kept = TcpListener::bind(&address).unwrap();
    let limit = Duration::from_secs(1);
    let error = ThreadedProcess::with(ProcessRendezvous { limit, ..meeting(&address, 0, 2, TOKEN) }).error().to_string();
    assert!(
        error.starts_with(&format!("listen at port {}", port_of(&address))) && error.contains("--rendezvous-limit 1 is over"),
        "{error}"
    );
    drop(kept);
}

/// The system assigns a port to each connection, which may be the port that it connects to.
#[test]
fn a_connection_that_leads_to_itself_is_none() {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let bounds: Vec<u16> = range.split_whitespace().map(|bound| bound.parse().unwrap()).collect();
    let end = Instant::now() + Duration::from_secs(20);
    let address = SocketAddr::from(([127, 0, 0, 1], bounds[0] + (bounds[1] - bounds[0]) / 4 * 2));
    let itself = std::iter::repeat_with(|| TcpStream::connect(address)).take_while(|_| Instant::now() < end).find_map(io::Result::ok);
    // The number of attempts is up to the system.
    itself.iter().for_each(|itself| assert!(leads_to_itself(itself).unwrap()));
    drop(itself);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(!leads_to_itself(&TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap());
}

#[test]
fn the_time_limit_names_missing_processes_in_all() {
    let address = free_address();
    let limit = Duration::from_secs(2);
    let first = ThreadedProcess::with(ProcessRendezvous { limit, ..meeting(&address, 0, 3, TOKEN) });
    let second = ThreadedProcess::start(&address, 1, 3);
    let missing = format!("meet the 3 processes of this run at {address}: no connection from process [2]; --rendezvous-limit 2 is over");
    assert_eq!(first.error().to_string(), missing);
    assert_eq!(second.error().to_string(), format!("process 0: {missing}"));
    let alone = ThreadedProcess::with(ProcessRendezvous { limit, ..meeting(&free_address(), 1, 3, TOKEN) }).error().to_string();
    assert!(alone.contains("no answer from ") && alone.contains("--rendezvous-limit 2 is over"), "{alone}");
}

/// A process dies after its hello message and again while connections are made. A process that replaces it is admitted.
#[test]
fn a_process_that_dies_before_the_run_begins_may_come_again() {
    let address = free_address();
    let first = ThreadedProcess::start(&address, 0, 3);
    drop(visitor(&address, 1));
    first.expect_line("process 1 on here is gone before the run began");
    let second = ThreadedProcess::start(&address, 1, 3);
    let mut dying = visitor(&address, 2);
    let answered = std::iter::repeat_with(|| dying.next().unwrap()).flatten().next();
    assert_eq!(answered.map(|notice| notice.topic), Some(Topic::Agreement));
    drop(dying);
    first.expect_line("; all processes connect again");
    second.expect_line("process 0 is gone before the run began");
    let third = ThreadedProcess::start(&address, 2, 3);
    for process in [first, second, third] {
        let mesh = process.mesh();
        assert_eq!(mesh.all.iter().map(|hello| hello.host.as_str()).collect::<Vec<_>>(), ["host-0", "host-1", "host-2"]);
    }
}

#[test]
fn a_second_process_of_one_number_is_refused_by_name_while_the_first_lives() {
    let address = free_address();
    let first = ThreadedProcess::start(&address, 0, 3);
    let [one, other] = [(); 2].map(|()| ThreadedProcess::start(&address, 1, 3));
    for process in [first, one, other] {
        let error = process.error();
        assert_eq!((error.to_string().as_str(), error.exit_code()), ("--process 1: two processes have the number 1", 2));
    }
}

/// Peers that do not reply, are silent, send single bytes or wait for more processes: a signal ends each of these waits.
#[test]
fn a_stop_ends_every_wait_and_all_that_wait_there() {
    let (silent, dripping, address) = (free_address(), free_address(), free_address());
    let (silent_door, drips) = (TcpListener::bind(&silent).unwrap(), TcpListener::bind(&dripping).unwrap());
    let drip = thread::spawn(move || {
        let (mut stream, _) = drips.accept().unwrap();
        while stream.write_all(b"S").is_ok() {
            thread::sleep(Duration::from_millis(100));
        }
    });
    let waiting = [&silent, &dripping, &free_address()].map(|address| ThreadedProcess::start(address, 1, 2));
    let (first, second) = (ThreadedProcess::start(&address, 0, 3), ThreadedProcess::start(&address, 1, 3));
    thread::sleep(Duration::from_millis(700));
    let begin = Instant::now();
    for process in waiting {
        process.stop.request();
        assert_eq!(process.error().exit_code(), 75);
    }
    second.stop.request();
    assert_eq!([second.error().exit_code(), first.error().exit_code()], [75; 2], "process 0 is told");
    assert!(begin.elapsed() < PROMPTLY, "{:?}", begin.elapsed());
    drop(silent_door);
    drip.join().unwrap();
}
