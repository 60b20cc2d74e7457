//! The rendezvous of the processes of a run. Process 0 listens on an address that all processes know. Each process sends it a hello message
//! with its own address, and process 0 sends all hello messages to all processes. Each pair of processes then opens one connection of each
//! kind. The run begins when all connections are open. A process that dies earlier may be restarted: the processes that it had met start
//! the rendezvous again.

use super::control_connection::ControlConnection;
use super::control_server::ControlServer;
use super::handshake::{Channel, Claim, is_other_token, open_within};
use super::handshake_server::{HANDSHAKE_PATIENCE, HandshakeServer};
use super::hello_message::{HelloMessage, RendezvousError};
use super::notice::{Notice, Topic};
use super::run_token::{RunToken, nonce};
use super::wire::SealedConnection;
use crate::error::{Error, Result, printable};
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Time between two attempts, and between two polls.
const PERIOD: Duration = Duration::from_millis(50);
/// A shorter wait for the other processes is not worth a line.
const SHORT_WAIT: Duration = Duration::from_secs(2);
/// A peer must prove another token this often in a row before the error is reported, because a byte may be damaged in transit.
const TOKEN_TRIES: u32 = 3;

/// Parameters of the rendezvous of this process.
#[derive(Clone, Debug)]
pub(crate) struct ProcessRendezvous {
    /// `HOST:PORT` of process 0, which listens on the port.
    pub(crate) address: String,
    pub(crate) process: usize,
    pub(crate) processes: usize,
    /// Ranks of each process.
    pub(crate) ranks: usize,
    pub(crate) token: RunToken,
    /// Maximum duration of the rendezvous.
    pub(crate) limit: Duration,
}

/// The reply of process 0 to a hello message.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum RendezvousReply {
    /// All processes have arrived and agree: the number of this attempt, and all hello messages without their facts.
    Welcome(u64, Vec<HelloMessage>),
    /// Processes differ: the difference.
    Refused(String),
    /// Process 0 has ended: the cause.
    Ended(String),
}

/// The connections to another process, in the order of [`Channel::all`].
pub(super) type Connections = Vec<SealedConnection>;

/// The result of a rendezvous: all processes and the connections to them.
pub(super) struct Mesh {
    /// The hello messages without their facts.
    pub(super) all: Vec<HelloMessage>,
    /// By process; `None` for this process.
    pub(super) connections: Vec<Option<Connections>>,
}

/// Open connections, by process and channel.
type Slots = Vec<Vec<Option<SealedConnection>>>;

/// Conditions that end a wait: a stop request or the deadline.
struct RendezvousDeadline<'a> {
    stop: &'a StopFlag,
    deadline: Instant,
    /// The line for people about this wait, and the time from which on it is printed.
    late: Option<(Instant, String)>,
    /// Receives lines for people.
    log: &'a mut dyn FnMut(ProgressEvent<'_>),
}

impl RendezvousDeadline<'_> {
    /// Checks whether the wait may continue. A wait that is no longer short is logged once.
    ///
    /// # Errors
    /// `Interrupted` when a stop of this process is requested; the error of `missing` at the deadline.
    fn look(&mut self, missing: impl FnOnce() -> Error) -> Result<()> {
        if self.stop.is_set() {
            return Err(Error::Interrupted("the processes of the run met".into()));
        }
        if let Some((_, line)) = self.late.take_if(|(from, _)| *from <= Instant::now()) {
            (self.log)(ProgressEvent::Note(&line));
        }
        if Instant::now() < self.deadline { Ok(()) } else { Err(missing()) }
    }
}

impl ProcessRendezvous {
    fn failed(&self, cause: impl Display) -> Error {
        Error::resource(format!("meet the {} processes of this run at {}", self.processes, self.address), cause)
    }

    /// The error at the end of `--rendezvous-limit`, with `why` as the reason for the wait.
    fn late(&self, why: impl Display) -> Error {
        self.failed(format_args!("{why}; --rendezvous-limit {} is over", self.limit.as_secs()))
    }

    /// Connects to the other processes and checks that their facts equal those of `own`. Progress messages go to `log`.
    ///
    /// # Errors
    /// `Resource`, which names the processes that are missing or have another token; `Usage`, which names a process that differs, and the
    /// difference; `Interrupted`.
    pub(super) fn meet(&self, own: HelloMessage, stop: &StopFlag, log: &mut dyn FnMut(ProgressEvent<'_>)) -> Result<Mesh> {
        let begun = Instant::now();
        let place = format!("process {} of {}: meeting the others at {}", self.process, self.processes, self.address);
        log(ProgressEvent::Detail(&place));
        let mut wait = RendezvousDeadline { stop, deadline: begun + self.limit, late: Some((begun + SHORT_WAIT, place)), log };
        if self.process == 0 { self.receive(&own, &mut wait) } else { self.join(&own, &mut wait) }
    }

    /// The rendezvous in process 0, to which all other processes connect.
    fn receive(&self, own: &HelloMessage, wait: &mut RendezvousDeadline<'_>) -> Result<Mesh> {
        let (mut server, mut control) = (self.listen(wait)?, ControlServer::new(self.processes));
        loop {
            match self.gather(own, (&mut server, &mut control), wait) {
                Ok((all, mut slots)) => {
                    for (slots, control) in slots.iter_mut().skip(1).zip(control.into_connections().map_err(|e| self.failed(e))?) {
                        slots[0] = Some(control);
                    }
                    return Ok(Mesh { all, connections: complete(slots) });
                }
                Err(RendezvousError::Again(why)) => {
                    (wait.log)(ProgressEvent::Note(&format!("{why}; all processes connect again")));
                    control.clear();
                }
                Err(RendezvousError::Over(error)) => {
                    match &error {
                        Error::Interrupted(_) => control.broadcast(&Notice::new(Topic::Stop, &[])),
                        Error::Usage(why) => control.broadcast_json(&RendezvousReply::Refused(why.clone())),
                        error => control.broadcast_json(&RendezvousReply::Ended(error.to_string())),
                    }
                    control.close();
                    return Err(error);
                }
            }
        }
    }

    /// A listener on the port of the rendezvous. Waits while another program has the port.
    fn listen(&self, wait: &mut RendezvousDeadline<'_>) -> Result<HandshakeServer> {
        let port = self.address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        let port = port.ok_or_else(|| Error::usage(format!("--rendezvous {}: HOST:PORT is needed", self.address)))?;
        let failed = |e: &dyn Display| Error::resource(format!("listen at port {port}"), e);
        let mut is_logged = false;
        loop {
            match HandshakeServer::at(port, &self.token) {
                Ok(server) => {
                    let address = server.address().map_err(|e| failed(&e))?;
                    (wait.log)(ProgressEvent::Detail(&format!("listening at {address}: all addresses of this machine")));
                    return Ok(server);
                }
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                    let limit = self.limit.as_secs();
                    wait.look(|| failed(&format_args!("{e}; --rendezvous-limit {limit} is over: choose another port in --rendezvous")))?;
                    if !std::mem::replace(&mut is_logged, true) {
                        let line = format!("port {port} is in use by another program: trying again for {limit} s");
                        (wait.log)(ProgressEvent::Note(&line));
                    }
                }
                Err(e) => return Err(failed(&e)),
            }
            thread::sleep(PERIOD);
        }
    }

    /// Process 0: collects the hello messages of all processes, and all connections except the control connections, which are at the
    /// `control`.
    fn gather(
        &self,
        own: &HelloMessage,
        (server, control): (&mut HandshakeServer, &mut ControlServer),
        wait: &mut RendezvousDeadline<'_>,
    ) -> std::result::Result<(Vec<HelloMessage>, Slots), RendezvousError> {
        while !control.missing().is_empty() {
            let gone = self.look_after(None, (&mut *server, &mut *control), wait)?;
            // A process that requested a stop of the run does not come back.
            for gone in gone.iter().filter(|_| !wait.stop.is_set()) {
                (wait.log)(ProgressEvent::Note(&format!("{gone}; it may connect again")));
            }
        }
        let mut all: Vec<HelloMessage> = [own.clone()].into_iter().chain(control.hellos()).collect();
        if let Some(why) = (1..all.len()).find_map(|process| difference(&all, process)) {
            return Err(Error::usage(why).into());
        }
        for hello in &mut all {
            hello.facts.clear();
        }
        let round = u64::from_le_bytes(*nonce().first_chunk().expect("a nonce is longer"));
        control.broadcast_json(&RendezvousReply::Welcome(round, all.clone()));
        let mut slots = self.slots();
        let channels = Channel::all(self.ranks);
        loop {
            if let Some(gone) = self.look_after(Some((round, &mut slots)), (&mut *server, &mut *control), wait)?.into_iter().next() {
                return Err(RendezvousError::Again(gone));
            }
            let is_whole =
                |slots: &Slots| slots[1..].iter().all(|slots| channels[1..].iter().all(|channel| slots[channel.place()].is_some()));
            if control.all_ready() && is_whole(&slots) {
                // The reader of a connection detects a process that was lost since then.
                control.broadcast(&Notice::new(Topic::Begin, &[]));
                return Ok((all, slots));
            }
        }
    }

    /// Process 0: handles new connections and messages. Returns a line for each process that was lost.
    fn look_after(
        &self,
        round: Option<(u64, &mut Slots)>,
        (server, control): (&mut HandshakeServer, &mut ControlServer),
        wait: &mut RendezvousDeadline<'_>,
    ) -> std::result::Result<Vec<String>, RendezvousError> {
        wait.look(|| {
            let dropped = match server.dropped() {
                0 => String::new(),
                1 => "; 1 connection without the run token was dropped".into(),
                count => format!("; {count} connections without the run token were dropped"),
            };
            let missing = control.missing();
            match missing.is_empty() {
                true => self.late(format_args!("not all processes could connect to each other{dropped}")),
                false => self.late(format_args!("no connection from process {missing:?}{dropped}")),
            }
        })?;
        if let Some((claim, connection)) = server.next() {
            let process = claim.process as usize;
            if !(1..self.processes).contains(&process) {
                let cause = format!("--process {process}: this run has {} processes, numbered from 0", self.processes);
                return Err(Error::usage(cause).into());
            }
            match round {
                _ if claim.channel == Channel::CONTROL => control.admit(process, connection).map_err(|e| self.failed(e))?,
                Some((round, slots)) if claim.round == round => put(slots, claim, connection),
                // The connection belongs to an earlier attempt.
                _ => {}
            }
        }
        control.serve(wait.stop)
    }

    /// The rendezvous in a later process, which connects to all processes with a smaller index and accepts connections from the others.
    fn join(&self, own: &HelloMessage, wait: &mut RendezvousDeadline<'_>) -> Result<Mesh> {
        let mut server = HandshakeServer::at(0, &self.token).map_err(|e| Error::resource("listen for the other processes", e))?;
        loop {
            match self.visit(own, &mut server, wait) {
                Ok(mesh) => return Ok(mesh),
                Err(RendezvousError::Over(error)) => return Err(error),
                Err(RendezvousError::Again(why)) => {
                    wait.look(|| self.late(&why))?;
                    (wait.log)(ProgressEvent::Note(&format!("{why}; trying again")));
                    thread::sleep(PERIOD);
                }
            }
        }
    }

    /// One attempt of [`ProcessRendezvous::join`].
    fn visit(
        &self,
        own: &HelloMessage,
        server: &mut HandshakeServer,
        wait: &mut RendezvousDeadline<'_>,
    ) -> std::result::Result<Mesh, RendezvousError> {
        let control = self.reach_first(wait)?;
        let failed = |e: io::Error| RendezvousError::from(Error::resource("listen for the other processes", e));
        let addresses = || Ok((control.stream.local_addr()?.ip(), control.stream.peer_addr()?.ip(), server.address()?.port()));
        let (own_host, first, port) = addresses().map_err(failed)?;
        let mut line = ControlConnection::new(control).map_err(failed)?;
        let outcome =
            self.meet_over(&mut line, &HelloMessage { address: Some((own_host, port).into()), ..own.clone() }, first, server, wait);
        if let Err(RendezvousError::Over(Error::Interrupted(_))) = &outcome {
            // If process 0 does not receive the stop request, it detects the loss of this process.
            let _ = line.send(&Notice::new(Topic::Stop, &[]));
        }
        let (all, mut slots) = outcome?;
        slots[0][0] = Some(line.into_connection().map_err(failed)?);
        Ok(Mesh { all, connections: complete(slots) })
    }

    /// Meets the other processes over `line`, the control connection to process 0. `first` is the address of process 0.
    fn meet_over(
        &self,
        line: &mut ControlConnection,
        own: &HelloMessage,
        first: IpAddr,
        server: &mut HandshakeServer,
        wait: &mut RendezvousDeadline<'_>,
    ) -> std::result::Result<(Vec<HelloMessage>, Slots), RendezvousError> {
        let text = serde_json::to_string(own).map_err(|e| Error::format("the message of this process", e))?;
        line.send(&Notice::new(Topic::Agreement, &[]).with_text(&text)).map_err(lost)?;
        let (round, all) = loop {
            match self.listen_to(line, wait)? {
                Some(Notice { topic: Topic::Agreement, tail, .. }) => break self.welcome(&tail)?,
                _ => thread::sleep(PERIOD / 10),
            }
        };
        let slots = self.connect_all(round, (&all, first), (line, server), wait)?;
        line.send(&Notice::new(Topic::Ready, &[])).map_err(lost)?;
        while !self.may_begin(line, wait)? {
            thread::sleep(PERIOD / 10);
        }
        Ok((all, slots))
    }

    /// The next message of process 0, if one has arrived.
    fn listen_to(
        &self,
        line: &mut ControlConnection,
        wait: &mut RendezvousDeadline<'_>,
    ) -> std::result::Result<Option<Notice>, RendezvousError> {
        wait.look(|| self.late("not all processes have connected"))?;
        let notice = line.next().map_err(lost)?;
        if notice.as_ref().is_some_and(|notice| notice.topic == Topic::Stop) {
            wait.stop.request();
        }
        Ok(notice)
    }

    /// Whether process 0 has announced that the run begins, after its reply to the hello message.
    fn may_begin(&self, line: &mut ControlConnection, wait: &mut RendezvousDeadline<'_>) -> std::result::Result<bool, RendezvousError> {
        match self.listen_to(line, wait)? {
            Some(Notice { topic: Topic::Agreement, tail, .. }) => {
                self.welcome(&tail)?;
                Err(self.failed("process 0 sent the list of processes twice").into())
            }
            notice => Ok(notice.is_some_and(|notice| notice.topic == Topic::Begin)),
        }
    }

    /// Parses the reply of process 0. Any reply except `Welcome` is an error.
    fn welcome(&self, answer: &[u8]) -> Result<(u64, Vec<HelloMessage>)> {
        match serde_json::from_slice(answer).map_err(|e| Error::format("the answer of process 0", e))? {
            RendezvousReply::Welcome(round, all) if all.len() == self.processes => Ok((round, all)),
            RendezvousReply::Welcome(_, all) => Err(self.failed(format_args!("process 0 counts {} processes", all.len()))),
            RendezvousReply::Refused(why) => Err(Error::usage(printable(why))),
            RendezvousReply::Ended(why) => Err(Error::Rank { name: "process 0".into(), cause: why }),
        }
    }

    /// Opens the control connection to process 0, retrying until process 0 listens.
    fn reach_first(&self, wait: &mut RendezvousDeadline<'_>) -> std::result::Result<SealedConnection, RendezvousError> {
        let (claim, mut refusals) = (self.claim(Channel::CONTROL, 0), 0);
        loop {
            let why = match self.dial(&self.address, claim, || {
                wait.look(|| self.unreachable_error(&self.address, "it takes too long")).map_err(RendezvousError::Over)
            })? {
                Ok(connection) => return Ok(connection),
                Err(why) => why,
            };
            self.count_refusal(&why, &self.address, &mut refusals)?;
            wait.look(|| self.unreachable_error(&self.address, &why))?;
            thread::sleep(PERIOD);
        }
    }

    fn claim(&self, channel: Channel, round: u64) -> Claim {
        Claim { channel, process: self.process as u32, round }
    }

    fn unreachable_error(&self, address: &str, why: impl Display) -> Error {
        self.late(format_args!("no answer from {address}: {why}"))
    }

    /// Counts consecutive proofs of another token.
    ///
    /// # Errors
    /// `Resource` if the peer at `address` has proved another token [`TOKEN_TRIES`] times in a row.
    fn count_refusal(&self, why: &io::Error, address: &str, refusals: &mut u32) -> Result<()> {
        *refusals = if is_other_token(why) { *refusals + 1 } else { 0 };
        let cause = format_args!("the process at {address} has another run token; give all processes the same token");
        if *refusals == TOKEN_TRIES { Err(self.failed(cause)) } else { Ok(()) }
    }

    /// Opens the connections to all other processes in this `round`, except the control connection to process 0.
    fn connect_all(
        &self,
        round: u64,
        (all, first): (&[HelloMessage], IpAddr),
        (line, server): (&mut ControlConnection, &mut HandshakeServer),
        wait: &mut RendezvousDeadline<'_>,
    ) -> std::result::Result<Slots, RendezvousError> {
        let (channels, mut slots, mut refusals) = (Channel::all(self.ranks), self.slots(), 0);
        let to = |process: usize| channels.iter().skip(usize::from(process == 0)).map(move |channel| (process, *channel));
        let is_open =
            |slots: &Slots, (process, channel): (usize, Channel)| slots[process][channel.place()].as_ref().map(SealedConnection::is_open);
        loop {
            // If process 0 starts again, it closes connections of this round right after admitting them. Only a message on this line
            // announces it.
            self.may_begin(line, wait)?;
            let wants = |slots: &Slots| (0..self.process).flat_map(to).find(|&slot| is_open(slots, slot) != Some(true));
            if let Some((process, channel)) = wants(&slots) {
                let address = if process == 0 { self.address.clone() } else { reachable(all[process].address, first) };
                let tried = self.dial(&address, self.claim(channel, round), || self.may_begin(line, wait).map(drop))?;
                match tried {
                    Ok(connection) => slots[process][channel.place()] = Some(connection),
                    Err(why) => {
                        self.count_refusal(&why, &address, &mut refusals)?;
                        wait.look(|| self.unreachable_error(&address, &why))?;
                        thread::sleep(PERIOD);
                    }
                }
                continue;
            }
            let comes = |claim: &Claim| claim.round == round && (self.process + 1..self.processes).contains(&(claim.process as usize));
            if let Some((claim, connection)) = server.next().filter(|(claim, _)| comes(claim)) {
                put(&mut slots, claim, connection);
            }
            if (self.process + 1..self.processes).flat_map(to).all(|slot| is_open(&slots, slot) == Some(true)) {
                return Ok(slots);
            }
        }
    }

    /// Tries once to open the connection of `claim` to `address`, on a separate thread, because name resolution and connecting may take
    /// long. Calls `watching` meanwhile.
    fn dial(
        &self,
        address: &str,
        claim: Claim,
        mut watching: impl FnMut() -> std::result::Result<(), RendezvousError>,
    ) -> std::result::Result<io::Result<SealedConnection>, RendezvousError> {
        let (sender, message) = mpsc::channel();
        let (address, token) = (address.to_owned(), self.token.clone());
        // The receiver is gone once this process stops.
        let body = move || _ = sender.send(connect(&address, &token, claim));
        if let Err(error) = thread::Builder::new().name("connect".into()).spawn(body) {
            return Ok(Err(error));
        }
        loop {
            match message.recv_timeout(PERIOD) {
                Ok(tried) => return Ok(tried),
                Err(RecvTimeoutError::Timeout) => watching()?,
                Err(RecvTimeoutError::Disconnected) => return Ok(Err(io::Error::other("the thread that connects has ended"))),
            }
        }
    }

    fn slots(&self) -> Slots {
        let channels = Channel::all(self.ranks).len();
        (0..self.processes).map(|_| (0..channels).map(|_| None).collect()).collect()
    }
}

/// Resolves `address`, connects to the first resolved address that accepts, and opens the connection of `claim`.
fn connect(address: &str, token: &RunToken, claim: Claim) -> io::Result<SealedConnection> {
    let mut why = io::Error::new(io::ErrorKind::NotFound, "its host name has no address");
    for address in address.to_socket_addrs()? {
        let tried = TcpStream::connect_timeout(&address, HANDSHAKE_PATIENCE).and_then(|stream| {
            if leads_to_itself(&stream)? {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            open_within(stream, HANDSHAKE_PATIENCE, token, claim)
        });
        match tried {
            Err(error) => why = error,
            opened => return opened,
        }
    }
    Err(why)
}

/// Whether both ends of a connection are the same socket. The system may give a connection the very port that it connects to, if nothing
/// listens there.
fn leads_to_itself(stream: &TcpStream) -> io::Result<bool> {
    Ok(stream.local_addr()? == stream.peer_addr()?)
}

/// The address at which a process is reached that listens on `address`, if process 0 is reached at `first`. A loopback address means the
/// machine of process 0.
fn reachable(address: Option<SocketAddr>, first: IpAddr) -> String {
    let of = |address: SocketAddr| if address.ip().is_loopback() { (first, address.port()).into() } else { address };
    address.map_or(String::new(), |address| of(address).to_string())
}

/// Stores the connection of `claim`. Ignores a channel out of range: a process with more ranks soon learns that it differs. The last
/// connection wins, because a process retries after a loss.
fn put(slots: &mut Slots, claim: Claim, connection: SealedConnection) {
    if let Some(slot) = slots[claim.process as usize].get_mut(claim.channel.place()) {
        *slot = Some(connection);
    }
}

/// Converts filled slots. The slots of this process are empty and become `None`.
fn complete(slots: Slots) -> Vec<Option<Connections>> {
    slots.into_iter().map(|slots| slots.into_iter().collect()).collect()
}

/// The error after the loss of the connection to process 0.
fn lost(why: io::Error) -> RendezvousError {
    RendezvousError::Again(format!("process 0 is gone before the run began: {why}"))
}

/// The first fact in which `process` differs from process 0, as text.
fn difference(hellos: &[HelloMessage], process: usize) -> Option<String> {
    let (first, other) = (&hellos[0], &hellos[process]);
    let names = || first.facts.keys().chain(other.facts.keys());
    let of = |hello: &HelloMessage, name: &str| hello.facts.get(name).cloned().unwrap_or(Value::Null);
    let name = names().find(|name| of(first, name) != of(other, name))?;
    let value = |hello| of(hello, name).to_string();
    Some(printable(differs(name, [(0, &first.host, value(first)), (process, &other.host, value(other))])))
}

/// The error text if `name` differs between two processes, given by index, host and value.
pub(crate) fn differs(name: &str, [one, other]: [(usize, &str, String); 2]) -> String {
    let of = |(process, host, value): (usize, &str, String)| format!("{value} for process {process} on {host}");
    format!("{name}: {}, {}; all processes of a run need equal values", of(one), of(other))
}

#[cfg(test)]
#[path = "rendezvous_tests.rs"]
mod tests;
