//! State of the other processes at process 0 during the rendezvous: which have arrived, their hello messages, and which were lost again.

use super::control_line::ControlLine;
use super::hello::{Hello, Trouble};
use super::notice::{Notice, Topic};
use super::wire::SealedConnection;
use crate::error::Error;
use crate::signals::StopFlag;
use serde::Serialize;
use std::io;
use std::thread;
use std::time::Instant;

/// State of one process.
#[derive(Default)]
struct Guest {
    line: Option<ControlLine>,
    hello: Option<Hello>,
    /// Whether the process has all its connections.
    is_ready: bool,
    /// A second process that claims the same index, and when it connected. Either the first one is gone, or two processes have one index.
    rival: Option<(ControlLine, Instant)>,
}

/// The processes that have connected to process 0.
pub(super) struct Desk {
    /// By process, starting with process 1.
    guests: Vec<Guest>,
}

impl Guest {
    /// Handles the messages that arrived from `process`. The inner result is an error if its connection failed.
    ///
    /// # Errors
    /// `Over` if two processes claim the index `process`, or if a message is invalid.
    fn serve(&mut self, process: usize, stop: &StopFlag) -> Result<io::Result<()>, Trouble> {
        let Some(line) = &mut self.line else { return Ok(Ok(())) };
        loop {
            let notice = match line.next() {
                Ok(Some(notice)) => notice,
                Ok(None) => break,
                Err(error) => return Ok(Err(error)),
            };
            match notice.topic {
                Topic::Agreement if self.hello.is_none() => {
                    let nonsense = |e| Error::format(format!("the message of process {process}"), e);
                    self.hello = Some(serde_json::from_slice(&notice.tail).map_err(nonsense)?);
                }
                Topic::Ready => self.is_ready = true,
                Topic::Stop => stop.ask(),
                topic => {
                    return Err(
                        Error::format(format!("the message of process {process}"), format!("{topic:?} is not expected here")).into()
                    );
                }
            }
        }
        match &self.rival {
            Some((_, since)) if line.heard() > *since => {
                Err(Error::usage(format!("--process {process}: two processes have the number {process}")).into())
            }
            _ => Ok(Ok(())),
        }
    }

    /// Display name of the process.
    fn name(&self, process: usize) -> String {
        self.hello.as_ref().map_or(format!("process {process}"), |hello| format!("process {process} on {}", hello.host))
    }
}

impl Desk {
    /// A desk for `processes` processes, including process 0.
    pub(super) fn new(processes: usize) -> Self {
        Self { guests: (1..processes).map(|_| Guest::default()).collect() }
    }

    /// Accepts a new control connection from `process`.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn admit(&mut self, process: usize, connection: SealedConnection) -> io::Result<()> {
        let (line, guest) = (ControlLine::new(connection)?, &mut self.guests[process - 1]);
        match guest.line {
            None => *guest = Guest { line: Some(line), ..Guest::default() },
            Some(_) => guest.rival = Some((line, Instant::now())),
        }
        Ok(())
    }

    /// Handles the messages that arrived from all processes, and returns a line for each process that was lost. Sets `stop` if a process
    /// requests a stop.
    ///
    /// # Errors
    /// `Over` if two processes claim one index, or if a message is invalid.
    pub(super) fn serve(&mut self, stop: &StopFlag) -> Result<Vec<String>, Trouble> {
        let mut gone = Vec::new();
        for (process, guest) in (1..).zip(&mut self.guests) {
            if let Err(why) = guest.serve(process, stop)? {
                gone.push(format!("{} is gone before the run began: {why}", guest.name(process)));
                *guest = Guest { line: guest.rival.take().map(|(line, _)| line), ..Guest::default() };
            }
        }
        Ok(gone)
    }

    /// Processes that have not sent their hello message.
    pub(super) fn missing(&self) -> Vec<usize> {
        (1..).zip(&self.guests).filter(|(_, guest)| guest.hello.is_none()).map(|(process, _)| process).collect()
    }

    /// Whether all processes have reported that they have all their connections.
    pub(super) fn all_ready(&self) -> bool {
        self.guests.iter().all(|guest| guest.is_ready)
    }

    /// The hello messages of all processes, in order.
    pub(super) fn hellos(&self) -> impl Iterator<Item = Hello> + '_ {
        self.guests.iter().filter_map(|guest| guest.hello.clone())
    }

    /// Sends `words` as JSON to all connected processes. Failed connections are detected by the next [`Desk::serve`].
    pub(super) fn answer(&mut self, words: &impl Serialize) {
        let text = serde_json::to_string(words).unwrap_or_default();
        self.say(&Notice::new(Topic::Agreement, &[]).saying(&text));
    }

    /// Sends `notice` to all connected processes.
    pub(super) fn say(&mut self, notice: &Notice) {
        for guest in &mut self.guests {
            let rival = guest.rival.as_mut().map(|(line, _)| line);
            guest.line.iter_mut().chain(rival).for_each(|line| _ = line.say(notice));
        }
    }

    /// Closes all connections after the last message, which each process has time to read.
    pub(super) fn close(self) {
        let lines = self.guests.into_iter().flat_map(|guest| guest.line.into_iter().chain(guest.rival.map(|(line, _)| line)));
        thread::scope(|scope| lines.for_each(|line| _ = scope.spawn(|| line.close_after_last_message())));
    }

    /// Closes all connections. The processes connect again.
    pub(super) fn clear(&mut self) {
        self.guests.iter_mut().for_each(|guest| *guest = Guest::default());
    }

    /// The control connections of all processes, in order.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn into_connections(self) -> io::Result<Vec<SealedConnection>> {
        self.guests.into_iter().filter_map(|guest| guest.line).map(ControlLine::into_connection).collect()
    }
}
