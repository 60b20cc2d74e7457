//! The control connections between the processes of a run. Threads read and write the sockets, so a driver never blocks on one. A
//! connection that closes, or is silent for too long, ends the run.

use super::handshake::Channel;
use super::hello_message::HelloMessage;
use super::notice::{Audience, Notice, Outbox, Topic};
use super::progress::{ProgressCounters, RemoteProcesses};
use super::rendezvous::{Connections, ProcessRendezvous};
use super::slice_connections::{RankConnections, SliceConnection, SliceKind};
use super::wire::{Seal, SealedConnection};
use crate::error::{Error, Result};
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Period of the monitoring thread.
const PERIOD: Duration = Duration::from_millis(200);
/// Periods between two heartbeats.
const LOOKS_ALIVE: u32 = 25;
/// Periods without a message after which a process counts as lost: 30 s. The monitor counts periods and not wall time, so a process that
/// was stopped for a while does not report its peers.
const LOOKS_SILENT: u32 = 150;
/// Periods after a failure until a process that has not ended by itself is terminated: 5 s.
const LOOKS_ENDING: u32 = 25;
/// Delay before the end of a slice connection is reported, because the final message of its process may arrive later.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Display name of the messages on a control connection.
const NOTICES: &str = "notices";
/// Timeout for the exchange of final messages.
const PARTING_PATIENCE: Duration = Duration::from_secs(5);

/// The end of a run, as process 0 announces it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EndOfRun {
    pub(crate) step: u64,
    pub(crate) max_steps: u64,
    pub(crate) interrupted: bool,
    pub(crate) failure: Option<String>,
    /// The process that failed; if `None`, the failure is the sender's own.
    pub(crate) of: Option<usize>,
    /// The lost process and the cause, if the sender ends because it lost a process. [`Links::close`] sets it.
    pub(crate) lost: Option<(usize, String)>,
}

/// Prints a cause and terminates this process, if it does not end by itself.
pub(crate) type LastResort = Box<dyn Fn(String) + Send>;

/// State shared by the threads of [`Links`].
struct SharedLinks {
    process: usize,
    names: Vec<String>,
    /// By process.
    resources: Vec<Value>,
    state: Mutex<LinkState>,
    changed: Condvar,
    /// Periods since the last message of each process.
    silent: Vec<AtomicU32>,
    closing: AtomicBool,
    /// Queues of the writer threads, by process.
    outgoing: Vec<Option<mpsc::Sender<Notice>>>,
}

/// The slice connections of one rank, by the peer rank. `None` for ranks of its own process.
pub(crate) type ConnectionsByRank = Vec<Option<RankConnections>>;

/// State that follows from the messages received so far.
#[derive(Default)]
struct LinkState {
    progress: Option<Arc<ProgressCounters>>,
    /// Notices that arrived before the progress counters existed.
    early: Vec<(usize, Notice)>,
    agreements: VecDeque<String>,
    /// The first process that failed, and the cause.
    failure: Option<(usize, String)>,
    over: Option<EndOfRun>,
    /// Processes that have announced the end of their run.
    gone: Vec<bool>,
}

/// The connections to the other processes of a run.
pub(crate) struct Links {
    common: Arc<SharedLinks>,
    stop: StopFlag,
    sockets: Vec<TcpStream>,
    writers: Vec<JoinHandle<()>>,
    monitor: Option<JoinHandle<()>>,
    /// The data connections to each other process, until [`Links::attach`] takes them.
    connections: Mutex<Vec<Option<Connections>>>,
}

impl SharedLinks {
    fn open(&self) -> MutexGuard<'_, LinkState> {
        // A reader thread that panicked has closed its connection, which ends the run.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, process: usize, notice: Notice) {
        // A writer that has ended has already reported the cause.
        if let Some(outgoing) = &self.outgoing[process] {
            _ = outgoing.send(notice.clone());
        }
    }

    /// Records that `process` failed, which ends the run.
    fn lose(&self, process: usize, why: &str) {
        let progress = {
            let mut state = self.open();
            if state.gone[process] || self.closing.load(Ordering::Relaxed) {
                return;
            }
            state.failure.get_or_insert((process, why.to_owned()));
            state.progress.clone()
        };
        self.changed.notify_all();
        if let Some(progress) = &progress {
            progress.lose(process, why);
        }
    }

    /// Records the loss of `process` after `error` on the connection that carries `cause`.
    fn lose_by(&self, process: usize, cause: &str, error: &io::Error) {
        let step = self.open().progress.as_ref().map_or(0, |progress| progress.decided_step());
        let remedy = "look for a failing network card, switch or memory, and resume from the last checkpoint";
        self.lose(
            process,
            &match error.kind() {
                ErrorKind::UnexpectedEof => "it ended before the end of the run: its connection is closed".into(),
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
                    format!("it ended before the end of the run, or its network failed: {error}")
                }
                ErrorKind::InvalidData => format!("{cause} from it arrived damaged after step {step}: {error}; {remedy}"),
                _ => format!("its connection failed: {error}"),
            },
        );
    }

    /// Handles a notice from `process`.
    ///
    /// # Errors
    /// A description of the notice if it is invalid.
    fn receive(&self, process: usize, notice: Notice, stop: &StopFlag) -> std::result::Result<(), String> {
        self.silent[process].store(0, Ordering::Relaxed);
        match notice.topic {
            Topic::Alive => {}
            Topic::Stop => stop.request(),
            Topic::Agreement => self.open().agreements.push_back(notice.text()),
            Topic::Over => self.part(process, &notice.text(), stop),
            Topic::Failed => self.lose(process, &notice.text()),
            _ => return self.publish(process, notice),
        }
        self.changed.notify_all();
        Ok(())
    }

    fn publish(&self, process: usize, notice: Notice) -> std::result::Result<(), String> {
        let mut state = self.open();
        match &state.progress {
            Some(progress) => progress.receive(process, &notice),
            None => {
                state.early.push((process, notice));
                Ok(())
            }
        }
    }

    /// Handles the final message of `process`.
    fn part(&self, process: usize, words: &str, stop: &StopFlag) {
        let end: EndOfRun = serde_json::from_str(words).unwrap_or_default();
        if process == 0 {
            let progress = {
                let mut state = self.open();
                state.gone[0] = true;
                state.over = Some(end);
                state.progress.clone()
            };
            return progress.iter().for_each(|progress| progress.lose(0, "the run has ended"));
        }
        match (end.failure, end.lost) {
            (Some(why), _) => self.lose(process, &why),
            // The given-up process may be alive, and must not wait for the process that gave it up.
            (None, Some((lost, why))) if lost == self.process => self.lose(process, &format!("it lost this process: {why}")),
            (None, Some((lost, why))) if lost < self.names.len() => self.lose(lost, &why),
            _ if self.process == 0 && self.open().over.is_none() => {
                if end.interrupted {
                    stop.request();
                }
                self.lose(process, if end.interrupted { "it was interrupted" } else { "it ended before the end of the run" });
            }
            _ => {}
        }
        self.open().gone[process] = true;
    }
}

impl Outbox for SharedLinks {
    fn send(&self, to: Audience, notice: Notice) {
        match to {
            Audience::First => self.post(0, notice),
            Audience::All => (0..self.names.len()).for_each(|process| self.post(process, notice.clone())),
        }
    }
}

impl Links {
    /// Runs the rendezvous with the other processes, which must agree with `own`, and starts to receive their messages. A request to `stop`
    /// this process is forwarded to process 0. `log` receives lines for people. `last_resort` terminates this process if it does not end
    /// after another process has ended.
    ///
    /// # Errors
    /// Errors of [`ProcessRendezvous::meet`]; `Resource` if a thread cannot start.
    pub(crate) fn meet(
        meeting: &ProcessRendezvous,
        own: HelloMessage,
        (stop, log): (&StopFlag, &mut dyn FnMut(ProgressEvent<'_>)),
        last_resort: Option<LastResort>,
    ) -> Result<Self> {
        let (process, mesh) = (meeting.process, meeting.meet(own, stop, log)?);
        let names = mesh.all.iter().enumerate().map(|(process, hello)| format!("process {process} on {}", hello.host)).collect();
        let (outgoing, boxes): (Vec<_>, Vec<_>) =
            mesh.connections.iter().map(|other| other.as_ref().map(|_| mpsc::channel()).unzip()).unzip();
        let common = Arc::new(SharedLinks {
            process,
            silent: mesh.all.iter().map(|_| AtomicU32::new(0)).collect(),
            state: Mutex::new(LinkState { gone: vec![false; mesh.all.len()], ..LinkState::default() }),
            names,
            resources: mesh.all.into_iter().map(|hello| hello.resources).collect(),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
            outgoing,
        });
        let mut links =
            Self { common, stop: stop.clone(), sockets: Vec::new(), writers: Vec::new(), monitor: None, connections: Mutex::default() };
        links
            .start(mesh.connections, boxes)
            .and_then(|()| links.look(last_resort))
            .map_err(|e| Error::resource("start the threads of connections", e))?;
        Ok(links)
    }

    fn start(&mut self, connections: Vec<Option<Connections>>, boxes: Vec<Option<mpsc::Receiver<Notice>>>) -> io::Result<()> {
        let mut data_connections = Vec::new();
        for (process, (connections, outgoing)) in connections.into_iter().zip(boxes).enumerate() {
            let (Some(connections), Some(outgoing)) = (connections, outgoing) else {
                data_connections.push(None);
                continue;
            };
            for connection in &connections {
                self.sockets.push(connection.stream.try_clone()?);
            }
            let (input, out) = connections[Channel::CONTROL.place()].try_clone()?.split()?;
            data_connections.push(Some(connections));
            let (common, stop) = (self.common.clone(), self.stop.clone());
            named("hear", process).spawn(move || receive_notices(&common, process, input, &stop))?;
            let common = self.common.clone();
            self.writers.push(named("tell", process).spawn(move || send_notices(&common, process, out, &outgoing))?);
        }
        self.connections = Mutex::new(data_connections);
        Ok(())
    }

    /// Starts the monitoring thread: heartbeats, silence of other processes, forwarded stops and the last resort.
    fn look(&mut self, last_resort: Option<LastResort>) -> io::Result<()> {
        let (common, stop) = (self.common.clone(), self.stop.clone());
        let body = move || {
            let (mut ending, mut stopped) = (0, false);
            for nth in 0u32.. {
                thread::sleep(PERIOD);
                if common.closing.load(Ordering::Relaxed) {
                    return;
                }
                if nth.is_multiple_of(LOOKS_ALIVE) {
                    common.send(Audience::All, Notice::new(Topic::Alive, &[]));
                }
                if stop.is_set() && !stopped {
                    stopped = true;
                    common.send(Audience::First, Notice::new(Topic::Stop, &[]));
                }
                for (process, silent) in common.silent.iter().enumerate().filter(|(process, _)| *process != common.process) {
                    if silent.fetch_add(1, Ordering::Relaxed) == LOOKS_SILENT {
                        common.lose(process, &format!("no message from it for {} s", (PERIOD * LOOKS_SILENT).as_secs()));
                    }
                }
                ending += u32::from(common.open().failure.is_some());
                if ending == LOOKS_ENDING {
                    let why = common.cause(&common.open()).map_or(String::new(), |error| error.to_string());
                    if let Some(end) = &last_resort {
                        end(why.clone());
                    }
                }
            }
        };
        self.monitor = Some(named("links of", self.common.process).spawn(body)?);
        Ok(())
    }

    /// Index of this process.
    pub(crate) fn process(&self) -> usize {
        self.common.process
    }

    /// Display names of the processes, by index.
    pub(crate) fn names(&self) -> &[String] {
        &self.common.names
    }

    /// The hardware that each process reported, by index.
    pub(crate) fn resources_by_process(&self) -> &[Value] {
        &self.common.resources
    }

    /// Sends the facts that must agree before step 0, from process 0 to all others.
    pub(crate) fn propose(&self, agreement: &str) {
        self.common.send(Audience::All, Notice::new(Topic::Agreement, &[]).with_text(agreement));
    }

    /// Waits for the proposal of process 0. Returns the end of the run if that arrives first.
    ///
    /// # Errors
    /// The failure of another process.
    pub(crate) fn proposal(&self) -> Result<std::result::Result<String, EndOfRun>> {
        let mut state = self.common.open();
        loop {
            if let Some(agreement) = state.agreements.pop_front() {
                return Ok(Ok(agreement));
            }
            if let Some(end) = &state.over {
                return Ok(Err(end.clone()));
            }
            if let Some((process, why)) = &state.failure {
                return Err(self.common.error_of(*process, why));
            }
            state = self.common.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for the proposal of process 0 when the run must not end before it.
    ///
    /// # Errors
    /// The failure of another process, or the end of process 0.
    pub(crate) fn expect_proposal(&self) -> Result<String> {
        self.proposal()?.map_err(|end| self.failure_of(end).unwrap_or_else(|| self.common.error_of(0, "the run has ended")))
    }

    /// The end of the run, as process 0 announces it. Waits a few seconds for the announcement.
    ///
    /// # Errors
    /// The failure of this or another process, if no announcement arrived.
    pub(crate) fn end_of_run(&self) -> Result<EndOfRun> {
        let state = self.common.open();
        let unknown = |state: &mut LinkState| state.over.is_none() && state.failure.is_none();
        let (state, _) = self.common.changed.wait_timeout_while(state, PARTING_PATIENCE, unknown).unwrap_or_else(PoisonError::into_inner);
        match &state.over {
            Some(end) => Ok(end.clone()),
            None => Err(self.common.cause(&state).unwrap_or_else(|| self.common.error_of(0, "its last message gives no reason"))),
        }
    }

    /// The end of a run that `error` ended in this process. A failure of another process keeps its name.
    pub(crate) fn end_by(&self, error: &Error) -> EndOfRun {
        let (of, why) = match error {
            Error::Rank { name, cause } => (self.names().iter().position(|known| known == name), cause.clone()),
            error => (None, error.to_string()),
        };
        let failure = Some(if of.is_some() { why } else { error.to_string() });
        EndOfRun { failure, of, ..EndOfRun::default() }
    }

    /// The failure in the `end` that process 0 announced, if any.
    pub(crate) fn failure_of(&self, end: EndOfRun) -> Option<Error> {
        let of = end.of.filter(|process| *process < self.names().len()).unwrap_or(0);
        end.failure.map(|why| self.common.error_of(of, &why))
    }

    /// Creates the progress counters of this process with `make`, and the slice connections of each of its ranks, by rank. A message has at
    /// most `parcel_bytes`.
    ///
    /// # Errors
    /// `Resource` if a thread cannot start; the failure of another process.
    ///
    /// # Panics
    /// If it is called twice.
    pub(crate) fn attach(
        &self,
        make: impl FnOnce(RemoteProcesses) -> ProgressCounters,
        parcel_bytes: usize,
    ) -> Result<(Arc<ProgressCounters>, Vec<ConnectionsByRank>)> {
        let common = &self.common;
        let progress = Arc::new(make(RemoteProcesses { process: common.process, names: common.names.clone(), outbox: common.clone() }));
        let connections = std::mem::take(&mut *self.connections.lock().unwrap_or_else(PoisonError::into_inner));
        assert!(!connections.is_empty(), "lanes are given once");
        let of = |rank: usize| -> io::Result<ConnectionsByRank> {
            let by_process = connections.iter().enumerate().map(|(process, streams)| match streams {
                Some(streams) => self.connections_to((process, streams), &progress, rank, parcel_bytes),
                None => Ok(progress.local_ranks().map(|_| None).collect()),
            });
            Ok(by_process.collect::<io::Result<Vec<_>>>()?.into_iter().flatten().collect())
        };
        let connections = progress.local_ranks().map(of).collect::<io::Result<_>>();
        let connections = connections.map_err(|e| Error::resource("start the threads of lanes", e))?;
        let mut state = common.open();
        for (process, notice) in std::mem::take(&mut state.early) {
            progress.receive(process, &notice).map_err(|cause| common.error_of(process, &invalid_message(&cause)))?;
        }
        if let Some((process, why)) = &state.failure {
            return Err(common.error_of(*process, why));
        }
        if let Some(end) = &state.over {
            return Err(self.failure_of(end.clone()).unwrap_or_else(|| common.error_of(0, "the run has ended")));
        }
        state.progress = Some(progress.clone());
        Ok((progress, connections))
    }

    /// The slice connections between `rank`, of this process, and each rank of `process`.
    fn connections_to(
        &self,
        (process, connections): (usize, &Connections),
        progress: &ProgressCounters,
        rank: usize,
        parcel_bytes: usize,
    ) -> io::Result<ConnectionsByRank> {
        let (own, ranks) = (rank - progress.local_ranks().start, progress.local_ranks().len());
        let connection = |kind: SliceKind, channel: Channel| {
            let common = self.common.clone();
            let connection = SealedConnection::try_clone(&connections[channel.place()])?;
            SliceConnection::start(connection, (kind, parcel_bytes), progress.bell(rank), move |error: &io::Error| {
                // A process that ends closes all its connections, and sends the cause on the control connection.
                thread::sleep(LAST_WORDS);
                common.lose_by(process, kind.name(), error);
            })
        };
        let to = |place: usize| {
            // The process with the larger index is the connecting side.
            let pair = if self.common.process > process { [own, place] } else { [place, own] };
            let weights = (place == own).then(|| connection(SliceKind::Weights, Channel::weights(ranks, own))).transpose()?;
            Ok(Some(RankConnections { grads: connection(SliceKind::Gradients, Channel::gradients(ranks, pair))?, weights }))
        };
        (0..ranks).map(to).collect()
    }

    /// Sends the final message with the `end` of the run, and waits a few seconds for those of the other processes.
    pub(crate) fn close(mut self, mut end: EndOfRun) {
        let mut state = self.common.open();
        end.lost = state.failure.clone();
        let words = serde_json::to_string(&end).unwrap_or_default();
        self.common.send(Audience::All, Notice::new(Topic::Over, &[]).with_text(&words));
        if self.common.process == 0 {
            state.over = Some(end.clone());
        }
        let waits = self.common.process == 0 && end.failure.is_none();
        let others_stay =
            |state: &mut LinkState| waits && state.failure.is_none() && (1..state.gone.len()).any(|process| !state.gone[process]);
        drop(self.common.changed.wait_timeout_while(state, PARTING_PATIENCE, others_stay));
        self.common.closing.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + PARTING_PATIENCE;
        while self.writers.iter().any(|writer| !writer.is_finished()) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        self.writers.clear();
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.common.closing.store(true, Ordering::Relaxed);
        // The reader and writer threads end when their sockets are shut down.
        for socket in &self.sockets {
            _ = socket.shutdown(Shutdown::Both);
        }
        // A panic in the thread has already printed its message.
        self.monitor.take().map(JoinHandle::join);
    }
}

impl SharedLinks {
    fn error_of(&self, process: usize, why: &str) -> Error {
        Error::Rank { name: self.names[process].clone(), cause: why.to_owned() }
    }

    /// The first cause of the end of the run: a rank of this process, from the progress counters, or another process.
    fn cause(&self, state: &LinkState) -> Option<Error> {
        let lost = || state.failure.as_ref().map(|(process, why)| self.error_of(*process, why));
        state.progress.as_ref().and_then(|progress| progress.failure()).or_else(lost)
    }
}

fn named(cause: &str, process: usize) -> thread::Builder {
    thread::Builder::new().name(format!("{cause} {process}"))
}

fn invalid_message(cause: &str) -> String {
    format!("it sent an invalid message: {cause}")
}

fn receive_notices(common: &SharedLinks, process: usize, (input, mut seal): (impl Read, Seal), stop: &StopFlag) {
    let mut input = BufReader::new(input);
    loop {
        match Notice::read(&mut input, &mut seal) {
            Ok(notice) => {
                if let Err(cause) = common.receive(process, notice, stop) {
                    return common.lose(process, &invalid_message(&cause));
                }
            }
            Err(error) => return common.lose_by(process, NOTICES, &error),
        }
    }
}

fn send_notices(common: &SharedLinks, process: usize, (out, mut seal): (TcpStream, Seal), outgoing: &mpsc::Receiver<Notice>) {
    let mut out = BufWriter::new(out);
    while let Ok(notice) = outgoing.recv() {
        let mut next = Some(notice);
        let mut is_last = false;
        while let Some(notice) = next {
            is_last |= notice.topic == Topic::Over;
            if let Err(error) = notice.write(&mut out, &mut seal) {
                return common.lose_by(process, NOTICES, &error);
            }
            next = outgoing.try_recv().ok();
        }
        if let Err(error) = out.flush() {
            return common.lose_by(process, NOTICES, &error);
        }
        if is_last {
            return;
        }
    }
}

#[cfg(test)]
#[path = "links_tests.rs"]
mod tests;
