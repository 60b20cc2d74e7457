//! How the processes of a run find each other: one listens at an address that all know, hears from each who it is and where it listens itself,
//! and tells all. Then each two have a connection of each kind.

use super::handshake::{Channel, Claim, answer, is_other_token, open, within};
use super::notice::{Notice, Topic};
use super::run_token::RunToken;
use crate::error::{Error, Result, printable};
use crate::signals::StopFlag;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// How long the others may take to come.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long somebody who has connected may take to show that it belongs to the run.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);
/// Connections that are heard at once; others wait, so that strangers take few threads.
const HEARD_AT_ONCE: usize = 64;
/// Time between two tries, and between two looks.
const PERIOD: Duration = Duration::from_millis(50);

/// Where the processes of a run meet, and which of them this is.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    /// `HOST:PORT`, at which process 0 listens.
    pub(crate) address: String,
    pub(crate) process: usize,
    pub(crate) processes: usize,
    /// Ranks of each process.
    pub(crate) ranks: usize,
    pub(crate) token: RunToken,
}

/// What a process says of itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) host: String,
    /// Where it listens, once it does.
    pub(crate) address: Option<SocketAddr>,
    /// What must be the same everywhere.
    pub(crate) facts: Map<String, Value>,
    /// What it has, for all to know.
    pub(crate) has: Value,
}

/// What process 0 answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Reply {
    /// All are there, and alike: what each said of itself but for its facts.
    Welcome(Vec<Hello>),
    Refused(String),
}

/// The connections to another process, in the order of [`Channel::all`].
pub(super) type Connections = Vec<TcpStream>;

/// All processes of a run, as this one knows them.
pub(super) struct Mesh {
    /// What each said of itself but for its facts.
    pub(super) all: Vec<Hello>,
    /// By process; none to itself.
    pub(super) connections: Vec<Option<Connections>>,
}

/// Connections as they come, by process and channel.
type Slots = Vec<Vec<Option<TcpStream>>>;

impl Meeting {
    fn what(&self) -> String {
        format!("meet the {} processes of this run at {}", self.processes, self.address)
    }

    fn failed(&self, cause: impl Display) -> Error {
        Error::resource(self.what(), cause)
    }

    fn waited(&self, stop: &StopFlag, deadline: Instant, missing: impl FnOnce() -> String) -> Result<()> {
        if stop.is_set() {
            return Err(Error::Interrupted("the processes of the run met".into()));
        }
        if Instant::now() < deadline { Ok(()) } else { Err(self.failed(missing())) }
    }

    /// Meets the others, who must agree with this process, which says `own`, in all facts.
    ///
    /// # Errors
    /// `Resource` that names who is missing, has another token, or differs, and in what; `Interrupted`.
    pub(super) fn meet(&self, own: Hello, stop: &StopFlag) -> Result<Mesh> {
        let deadline = Instant::now() + PATIENCE;
        let channels = Channel::all(self.ranks).len();
        let mut slots: Slots = (0..self.processes).map(|_| (0..channels).map(|_| None).collect()).collect();
        let all = match self.process {
            0 => self.receive(own, &mut slots, (stop, deadline))?,
            _ => self.join(own, &mut slots, (stop, deadline))?,
        };
        Ok(Mesh { all, connections: slots.into_iter().map(|slots| slots.into_iter().collect()).collect() })
    }

    /// Process 0: all come to it.
    fn receive(&self, own: Hello, slots: &mut Slots, (stop, deadline): (&StopFlag, Instant)) -> Result<Vec<Hello>> {
        let listener = Doorkeeper::at(&self.address, &self.token).map_err(|e| Error::resource(format!("listen at {}", self.address), e))?;
        let mut hellos = vec![own];
        self.gather(&listener, 1..self.processes, &[Channel::CONTROL], slots, (stop, deadline))?;
        for (process, slots) in slots.iter_mut().enumerate().skip(1) {
            let hello = slots[0].as_mut().map_or(Ok(None), |stream| within(stream, HANDSHAKE_PATIENCE, hear).map(Some));
            let hello = hello.map_err(|e| self.failed(format_args!("process {process} does not say who it is: {e}")))?;
            hellos.extend(hello);
        }
        let refusal = (1..hellos.len()).find_map(|process| difference(&hellos, process));
        let reply = match &refusal {
            Some(why) => Reply::Refused(why.clone()),
            None => {
                hellos.iter_mut().for_each(|hello| hello.facts.clear());
                Reply::Welcome(hellos.clone())
            }
        };
        for (process, slots) in slots.iter_mut().enumerate() {
            let told = slots[0].as_mut().map_or(Ok(()), |stream| within(stream, HANDSHAKE_PATIENCE, |stream| say(stream, &reply)));
            told.map_err(|e| self.failed(format_args!("process {process} hears no answer: {e}")))?;
        }
        refusal.map_or(Ok(()), |why| Err(Error::usage(why)))?;
        self.gather(&listener, 1..self.processes, &Channel::all(self.ranks)[1..], slots, (stop, deadline))?;
        Ok(hellos)
    }

    /// Another process: it goes to those before it, and those behind it come.
    fn join(&self, own: Hello, slots: &mut Slots, (stop, deadline): (&StopFlag, Instant)) -> Result<Vec<Hello>> {
        let mut control = self.connect(&self.address, Channel::CONTROL, (stop, deadline))?;
        let here = || -> io::Result<_> {
            let listener = Doorkeeper::at((control.local_addr()?.ip(), 0), &self.token)?;
            Ok((listener.listener.local_addr()?, listener))
        };
        let (address, listener) = here().map_err(|e| Error::resource("listen for the other processes", e))?;
        let reply = within(&mut control, PATIENCE, |stream| {
            say(stream, &Hello { address: Some(address), ..own })?;
            hear::<Reply>(stream)
        });
        let lost = |e| {
            self.failed(format_args!("process 0 gives no answer: {e}; it may be that it has ended, or that another process is missing"))
        };
        let all = match reply.map_err(lost)? {
            Reply::Welcome(all) if all.len() == self.processes => all,
            Reply::Welcome(all) => return Err(self.failed(format_args!("process 0 counts {} processes", all.len()))),
            Reply::Refused(why) => return Err(Error::usage(printable(why))),
        };
        slots[0][0] = Some(control);
        let channels = Channel::all(self.ranks);
        for channel in &channels[1..] {
            slots[0][channel.place()] = Some(self.connect(&self.address, *channel, (stop, deadline))?);
        }
        for process in 1..self.process {
            let address = all[process].address.map_or(String::new(), |address| address.to_string());
            for channel in &channels {
                slots[process][channel.place()] = Some(self.connect(&address, *channel, (stop, deadline))?);
            }
        }
        self.gather(&listener, self.process + 1..self.processes, &channels, slots, (stop, deadline))?;
        Ok(all)
    }

    /// Connects to `address`, at which another process listens or soon will.
    fn connect(&self, address: &str, channel: Channel, (stop, deadline): (&StopFlag, Instant)) -> Result<TcpStream> {
        let claim = Claim { channel, process: self.process as u32 };
        loop {
            let tried = TcpStream::connect(address)
                .and_then(|mut stream| within(&mut stream, PATIENCE, |stream| open(stream, &self.token, claim)).map(|()| stream));
            match tried {
                Ok(stream) => return Ok(stream),
                Err(e) if is_other_token(&e) => {
                    return Err(self.failed(format_args!("the process at {address} has another run token; give all processes the same")));
                }
                Err(e) => self.waited(stop, deadline, || format!("nobody answers at {address}: {e}"))?,
            }
            thread::sleep(PERIOD);
        }
    }

    /// Waits for these `channels` of `processes`.
    fn gather(
        &self,
        listener: &Doorkeeper,
        processes: std::ops::Range<usize>,
        channels: &[Channel],
        slots: &mut Slots,
        (stop, deadline): (&StopFlag, Instant),
    ) -> Result<()> {
        loop {
            let is_whole = |process: usize, slots: &Slots| channels.iter().all(|channel| slots[process][channel.place()].is_some());
            let missing: Vec<usize> = processes.clone().filter(|process| !is_whole(*process, slots)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            self.waited(stop, deadline, || {
                let strangers = listener.strangers.load(Ordering::Relaxed);
                let dropped =
                    if strangers == 0 { String::new() } else { format!("; {strangers} connections without the run token were dropped") };
                format!("within {} s there came no process {missing:?}{dropped}", PATIENCE.as_secs())
            })?;
            let Some((claim, stream)) = listener.next() else { continue };
            let process = claim.process as usize;
            if !processes.contains(&process) {
                return Err(Error::usage(format!(
                    "--process {process}: no process {process} belongs here, of {} processes",
                    self.processes
                )));
            }
            // One with more ranks hears soon that it differs.
            let Some(slot) = slots[process].get_mut(claim.channel.place()) else { continue };
            if slot.replace(stream).is_some() {
                return Err(Error::usage(format!("--process {process}: two processes say that they are process {process}")));
            }
        }
    }
}

/// Listens, and hears those who come beside each other, so that nobody holds up others.
struct Doorkeeper {
    listener: TcpListener,
    token: RunToken,
    /// To and from the threads that hear.
    hears: mpsc::SyncSender<(Claim, TcpStream)>,
    heard: mpsc::Receiver<(Claim, TcpStream)>,
    hearing: Arc<AtomicUsize>,
    /// Who could not show that it belongs to the run.
    strangers: Arc<AtomicUsize>,
}

impl Doorkeeper {
    fn at(address: impl ToSocketAddrs, token: &RunToken) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let (hears, heard) = mpsc::sync_channel(HEARD_AT_ONCE);
        Ok(Self { listener, token: token.clone(), hears, heard, hearing: Arc::default(), strangers: Arc::default() })
    }

    /// Somebody of this run who has come; nobody within a moment.
    fn next(&self) -> Option<(Claim, TcpStream)> {
        if self.hearing.load(Ordering::Relaxed) < HEARD_AT_ONCE
            && let Ok((stream, _)) = self.listener.accept()
        {
            self.hear(stream);
        }
        self.heard.recv_timeout(PERIOD / 10).ok()
    }

    fn hear(&self, mut stream: TcpStream) {
        let (token, heard, hearing, strangers) = (self.token.clone(), self.hears.clone(), self.hearing.clone(), self.strangers.clone());
        hearing.fetch_add(1, Ordering::Relaxed);
        let body = move || {
            let shake = |stream: &mut TcpStream| answer(stream, &token);
            let claim = stream.set_nonblocking(false).and_then(|()| within(&mut stream, HANDSHAKE_PATIENCE, shake));
            match claim {
                // Nobody takes it any more once all are there.
                Ok(claim) => _ = heard.try_send((claim, stream)),
                Err(_) => _ = strangers.fetch_add(1, Ordering::Relaxed),
            }
            hearing.fetch_sub(1, Ordering::Relaxed);
        };
        if thread::Builder::new().name("handshake".into()).spawn(body).is_err() {
            self.hearing.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn say(stream: &mut TcpStream, what: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(what)?;
    Notice::new(Topic::Agreement, &[]).saying(&text).write(stream)
}

fn hear<T: for<'a> Deserialize<'a>>(stream: &mut TcpStream) -> io::Result<T> {
    Ok(serde_json::from_slice(&Notice::read(stream)?.tail)?)
}

/// In what `process` is not as process 0 is, in words.
fn difference(hellos: &[Hello], process: usize) -> Option<String> {
    let (first, other) = (&hellos[0], &hellos[process]);
    let names = || first.facts.keys().chain(other.facts.keys());
    let of = |hello: &Hello, name: &str| hello.facts.get(name).cloned().unwrap_or(Value::Null);
    let name = names().find(|name| of(first, name) != of(other, name))?;
    let value = |hello| of(hello, name).to_string();
    Some(printable(differs(name, [(0, &first.host, value(first)), (process, &other.host, value(other))])))
}

/// `name` is not the same for two processes, of which each has a number, a host and a value.
pub(crate) fn differs(name: &str, [one, other]: [(usize, &str, String); 2]) -> String {
    let of = |(process, host, value): (usize, &str, String)| format!("{value} for process {process} on {host}");
    format!("{name}: {}, {}; all processes of a run need the same", of(one), of(other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io::{Read, Write};

    const TOKEN: &str = "0123456789abcdef";

    fn free_address() -> String {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
    }

    fn meeting(address: &str, process: usize, processes: usize, token: &str) -> Meeting {
        Meeting { address: address.into(), process, processes, ranks: 2, token: RunToken::new(token, "here").unwrap() }
    }

    /// What comes of each process, which has these facts.
    fn meet(address: &str, facts: &[Value]) -> Vec<Result<Mesh>> {
        let all = facts.len();
        thread::scope(|scope| {
            let run = |process: usize| {
                let (facts, has) = (facts[process].as_object().unwrap().clone(), json!({"gpus": process}));
                let own = Hello { host: format!("host-{process}"), facts, has, address: None };
                meeting(address, process, all, TOKEN).meet(own, &StopFlag::default())
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
                assert_eq!((&hello.host, &hello.has), (&format!("host-{other}"), &json!({"gpus": other})));
            }
            for (other, connections) in mesh.connections.iter().enumerate() {
                assert_eq!(connections.is_some(), other != process);
                for (channel, mut stream) in connections.iter().flatten().enumerate() {
                    stream.write_all(&[process as u8, channel as u8]).unwrap();
                }
            }
        }
        for mesh in &meshes {
            for (other, connections) in mesh.connections.iter().enumerate() {
                for (channel, stream) in connections.iter().flatten().enumerate() {
                    assert_eq!(super::super::notice::array(&mut &*stream).unwrap(), [other as u8, channel as u8]);
                }
            }
        }
    }

    #[test]
    fn what_differs_is_told_to_all_with_both_values() {
        let facts = |seed: u64| json!({"program": "0.1.0", "processes": 3, "seed": seed});
        let outcomes = meet(&free_address(), &[facts(1), facts(1), facts(2)]);
        for outcome in outcomes {
            let told = outcome.err().unwrap();
            assert_eq!(
                told.to_string(),
                "seed: 1 for process 0 on host-0, 2 for process 2 on host-2; all processes of a run need the same"
            );
            assert_eq!(told.exit_code(), 2);
        }
    }

    #[test]
    fn another_token_is_told_to_who_has_it_and_a_stop_ends_the_wait() {
        let (address, stop) = (free_address(), StopFlag::default());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| meeting(&address, 0, 2, TOKEN).meet(Hello::default(), &stop));
            let refused = meeting(&address, 1, 2, "another-token-is-this").meet(Hello::default(), &StopFlag::default());
            assert!(refused.err().unwrap().to_string().contains("has another run token"));
            stop.ask();
            assert_eq!(waiting.join().unwrap().err().unwrap().exit_code(), 75);
        });
    }
}
