//! Foreign files are compiled, rendered and read in processes of their own, where their worst is an error line.
//!
//! A template, a tokenizer or a parquet file comes with a model or with data, and anybody may have written it. The libraries that read
//! them are safe Rust, which ends the whole program in three ways that no caller can catch: memory that cannot be had, a stack that
//! ends, and work that does not. Hence one mechanism for all three: a forked child whose memory, stack and CPU time the kernel bounds
//! ([`process`], [`guard`]). The child's death is an error of its parent, which names the work and the limit ([`notes`]).
//!
//! The child is forked and not executed. So it works wherever the library is, also where the program is Python or a test; it begins in a
//! millisecond, and it knows all that its parent knew. It runs before the devices of a run are opened, and calls no driver where one is
//! open, as in a program that trains twice.
//!
//! A [`Sandbox`] has a first process, which reads tokenizer and template once. Nothing runs beside the thread that does it, so the thread
//! forks workers safely: one for each thread that asks, with the tables of the tokenizer shared. Work goes in batches, one message each
//! way ([`channel`]). A [`SandboxStream`] is a single child that sends messages until it has no more.
//!
//! No child outlives its parent: a child that reads from a connection whose other end is gone ends, a worker is killed with the first
//! process, and work between two reads is bounded. Signals that a terminal or a job sends to all processes are the parent's to answer.

mod channel;
pub(super) mod codec;
mod guard;
mod notes;
mod process;
mod task;

use self::channel::{NoMessage, SandboxChannel};
use self::guard::{quiet_guarded_panics, raise_fence};
use self::notes::Notes;
use self::process::ProcessEnd;
use crate::error::Error;
use crate::signals::StopFlag;
use nix::unistd::Pid;
use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(in crate::data) use self::guard::{guard, work_on};
pub(in crate::data) use self::task::SandboxTask;

/// Why a sandbox gives no answer.
#[derive(Debug)]
pub(in crate::data) enum Ended {
    /// Somebody asked to stop.
    Stopped,
    /// Its process died while it worked on this item of the request.
    Died { item: usize, task: SandboxTask, cause: String },
    /// The system has no process for it.
    Refused(Error),
}

/// The error of an answer that is no message.
pub(in crate::data) fn unreadable() -> Error {
    Error::resource("read foreign files", "the reader process sent an invalid answer")
}

/// Answers requests in a process of a sandbox.
pub(in crate::data) trait Service: Send {
    fn answer(&mut self, request: &[u8]) -> Vec<u8>;
}

/// Processes that answer requests.
pub(in crate::data) struct Sandbox {
    first: Mutex<SandboxProcess>,
    /// Workers that wait for a request.
    idle: Mutex<Vec<SandboxWorker>>,
}

/// One process that sends messages.
#[cfg(feature = "parquet")]
pub(in crate::data) struct SandboxStream(SandboxProcess);

/// A child of this process.
struct SandboxProcess {
    channel: SandboxChannel,
    notes: Notes,
    pid: Pid,
    /// Whether it was waited for.
    is_over: bool,
    /// Whether it has children, which it waits for.
    is_parent: bool,
}

/// A child of a sandbox's first process.
struct SandboxWorker {
    channel: SandboxChannel,
    notes: Notes,
    pid: i32,
}

/// Requests to a first process: a worker is forked that takes the descriptors which come along, or waited for.
const FORK: &[u8] = b"fork";
const WAIT: &[u8] = b"wait";

impl Sandbox {
    /// Starts the first process, which makes the service and a message about it: the second result. Without a service the process ends.
    ///
    /// # Errors
    /// The cause if the process ended before it sent a message.
    pub(in crate::data) fn start<S: Service>(make: impl FnOnce() -> (Vec<u8>, Option<S>) + Send) -> Result<(Self, Vec<u8>), Ended> {
        let never = StopFlag::default();
        let mut first = SandboxProcess::start(false, |mut channel| {
            let (facts, service) = make();
            let is_sent = channel.send(&facts, &StopFlag::default()).is_ok();
            if let Some(mut service) = service.filter(|_| is_sent) {
                serve_first(&mut channel, &mut service);
            }
        })?;
        let facts = first.channel.receive(&never).map_err(|none| first.ended(none))?;
        Ok((Self { first: Mutex::new(first), idle: Mutex::default() }, facts))
    }

    /// The answer of a worker to `request`, unless `stop` is set before it is here.
    ///
    /// # Errors
    /// How the worker ended.
    pub(in crate::data) fn request(&self, request: &[u8], stop: &StopFlag) -> Result<Vec<u8>, Ended> {
        let idle = held(&self.idle).pop();
        let mut worker = idle.map_or_else(|| self.fork(), Ok)?;
        match worker.channel.send(request, stop).and_then(|()| worker.channel.receive(stop)) {
            Ok(answer) => {
                held(&self.idle).push(worker);
                Ok(answer)
            }
            Err(NoMessage::Stopped) => Err(Ended::Stopped),
            Err(NoMessage::Gone) => Err(self.explain(&worker)),
        }
    }

    fn fork(&self) -> Result<SandboxWorker, Ended> {
        let (channel, socket) = SandboxChannel::pair().map_err(refused)?;
        let notes = Notes::new().map_err(refused)?;
        let file = notes.file().map_err(refused)?;
        let pid = held(&self.first).request(FORK, &[&socket, &file])?;
        let pid = <[u8; 4]>::try_from(&pid[..]).map(i32::from_le_bytes);
        match pid {
            Ok(pid) if pid > 0 => Ok(SandboxWorker { channel, notes, pid }),
            _ => Err(refused("no process can be forked (ulimit -u, or the limit of a container)")),
        }
    }

    /// How `worker` ended.
    fn explain(&self, worker: &SandboxWorker) -> Ended {
        let request = [WAIT, &worker.pid.to_le_bytes()].concat();
        let ending = held(&self.first).request(&request, &[]).ok().and_then(|answer| {
            let (signal, code) = answer.split_at_checked(4)?;
            let number = |bytes: &[u8]| bytes.try_into().ok().map(i32::from_le_bytes);
            Some(ProcessEnd { signal: number(signal)?, code: number(code)? })
        });
        died(&worker.notes, ending)
    }
}

impl Drop for Sandbox {
    /// Workers end before the first process waits for them.
    fn drop(&mut self) {
        held(&self.idle).clear();
    }
}

#[cfg(feature = "parquet")]
impl SandboxStream {
    /// Starts a process that runs `body`. Its argument sends a message and returns whether the parent wants more.
    ///
    /// # Errors
    /// `Ended::Refused`.
    pub(in crate::data) fn start(body: impl FnOnce(&mut dyn FnMut(&[u8]) -> bool) + Send) -> Result<Self, Ended> {
        SandboxProcess::start(true, |mut channel| body(&mut |message| channel.send(message, &StopFlag::default()).is_ok())).map(Self)
    }

    /// The next message, unless `stop` is set before it is here.
    ///
    /// # Errors
    /// How the process ended.
    pub(in crate::data) fn next(&mut self, stop: &StopFlag) -> Result<Vec<u8>, Ended> {
        self.0.channel.receive(stop).map_err(|none| self.0.ended(none))
    }
}

impl SandboxProcess {
    fn start(bound: bool, body: impl FnOnce(SandboxChannel) + Send) -> Result<Self, Ended> {
        quiet_guarded_panics();
        let (channel, socket) = SandboxChannel::pair().map_err(refused)?;
        let notes = Notes::new().map_err(refused)?;
        let file = notes.file().map_err(refused)?;
        let pid = process::start(socket, file, bound, fenced(body)).map_err(refused)?;
        Ok(Self { channel, notes, pid, is_over: false, is_parent: !bound })
    }

    fn request(&mut self, request: &[u8], descriptors: &[&OwnedFd]) -> Result<Vec<u8>, Ended> {
        let never = StopFlag::default();
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let sent = self.channel.send_with(request, &descriptors, &never);
        sent.and_then(|()| self.channel.receive(&never)).map_err(|none| self.ended(none))
    }

    /// How the process ended that sends no message.
    fn ended(&mut self, none: NoMessage) -> Ended {
        match none {
            NoMessage::Stopped => Ended::Stopped,
            NoMessage::Gone => {
                self.is_over = true;
                died(&self.notes, process::wait(self.pid))
            }
        }
    }
}

impl Drop for SandboxProcess {
    fn drop(&mut self) {
        match (self.is_over, self.is_parent) {
            (true, _) => {}
            (false, false) => process::end_now(self.pid),
            (false, true) => {
                self.channel.close();
                process::end(self.pid);
            }
        }
    }
}

/// `body` in a process of its own.
fn fenced(body: impl FnOnce(SandboxChannel) + Send) -> impl FnOnce(OwnedFd) + Send {
    |socket| {
        raise_fence();
        body(SandboxChannel::of(socket));
    }
}

/// The first process: forks workers until its parent is gone.
fn serve_first(channel: &mut SandboxChannel, service: &mut impl Service) {
    let (never, mut workers) = (StopFlag::default(), Vec::new());
    while let Ok((request, descriptors)) = channel.receive_with(&never) {
        let answer = match <[OwnedFd; 2]>::try_from(descriptors) {
            Ok([socket, notes]) => {
                let pid = process::start(socket, notes, true, fenced(|channel| serve(channel, service)));
                workers.extend(pid);
                pid.map_or(0, Pid::as_raw).to_le_bytes().to_vec()
            }
            Err(_) => ending_of(&request, &mut workers)
                .map_or(vec![], |ProcessEnd { signal, code }| [signal, code].map(i32::to_le_bytes).concat()),
        };
        if channel.send(&answer, &never).is_err() {
            break;
        }
    }
    workers.into_iter().for_each(process::end_now);
}

/// How the worker ended that a request names.
fn ending_of(request: &[u8], workers: &mut Vec<Pid>) -> Option<ProcessEnd> {
    let pid = Pid::from_raw(i32::from_le_bytes(request.strip_prefix(WAIT)?.try_into().ok()?));
    let at = workers.iter().position(|worker| *worker == pid)?;
    process::wait(workers.swap_remove(at))
}

/// A worker: answers until its parent is gone.
fn serve(mut channel: SandboxChannel, service: &mut impl Service) {
    let never = StopFlag::default();
    while let Ok(request) = channel.receive(&never) {
        if channel.send(&service.answer(&request), &never).is_err() {
            break;
        }
    }
}

fn died(notes: &Notes, ending: Option<ProcessEnd>) -> Ended {
    let (item, task, cause) = notes.explain(ending);
    Ended::Died { item, task, cause }
}

fn refused(cause: impl Display) -> Ended {
    Ended::Refused(Error::resource("start a process that reads foreign files", cause))
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
