//! State of the other processes at process 0 during the rendezvous: which have arrived, their hello messages, and which were lost again.

use super::control_connection::{BEAT, ControlConnection};
use super::hello_message::{HelloMessage, RendezvousError};
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
struct ConnectedProcess {
    line: Option<ControlConnection>,
    hello: Option<HelloMessage>,
    /// Whether the process has all its connections.
    is_ready: bool,
    /// A second process that claims the same index, and when it connected. Either the first one is gone, or two processes have one index.
    rival: Option<(ControlConnection, Instant)>,
}

/// The processes that have connected to process 0.
pub(super) struct ControlServer {
    /// By process, starting with process 1.
    peers: Vec<ConnectedProcess>,
}

impl ConnectedProcess {
    /// Handles the messages that arrived from `process`. The inner result is an error if its connection failed.
    ///
    /// # Errors
    /// `Over` if two processes claim the index `process`, or if a message is invalid.
    fn serve(&mut self, process: usize, stop: &StopFlag) -> Result<io::Result<()>, RendezvousError> {
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
                Topic::Stop => stop.request(),
                topic => {
                    return Err(
                        Error::format(format!("the message of process {process}"), format!("{topic:?} is not expected here")).into()
                    );
                }
            }
        }
        match &self.rival {
            // Messages that a process sent before it lost this connection may arrive after its next connection. A live one sends heartbeats.
            Some((_, since)) if line.last_received() > *since + BEAT => {
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

impl ControlServer {
    /// A server for `processes` processes, including process 0.
    pub(super) fn new(processes: usize) -> Self {
        Self { peers: (1..processes).map(|_| ConnectedProcess::default()).collect() }
    }

    /// Accepts a new control connection from `process`.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn admit(&mut self, process: usize, connection: SealedConnection) -> io::Result<()> {
        let (line, peer) = (ControlConnection::new(connection)?, &mut self.peers[process - 1]);
        match peer.line {
            None => *peer = ConnectedProcess { line: Some(line), ..ConnectedProcess::default() },
            Some(_) => peer.rival = Some((line, Instant::now())),
        }
        Ok(())
    }

    /// Handles the messages that arrived from all processes, and returns a line for each process that was lost. Sets `stop` if a process
    /// requests a stop.
    ///
    /// # Errors
    /// `Over` if two processes claim one index, or if a message is invalid.
    pub(super) fn serve(&mut self, stop: &StopFlag) -> Result<Vec<String>, RendezvousError> {
        let mut gone = Vec::new();
        for (process, peer) in (1..).zip(&mut self.peers) {
            if let Err(why) = peer.serve(process, stop)? {
                gone.push(format!("{} is gone before the run began: {why}", peer.name(process)));
                *peer = ConnectedProcess { line: peer.rival.take().map(|(line, _)| line), ..ConnectedProcess::default() };
            }
        }
        Ok(gone)
    }

    /// Processes that have not sent their hello message.
    pub(super) fn missing(&self) -> Vec<usize> {
        (1..).zip(&self.peers).filter(|(_, peer)| peer.hello.is_none()).map(|(process, _)| process).collect()
    }

    /// Whether all processes have reported that they have all their connections.
    pub(super) fn all_ready(&self) -> bool {
        self.peers.iter().all(|peer| peer.is_ready)
    }

    /// The hello messages of all processes, in order.
    pub(super) fn hellos(&self) -> impl Iterator<Item = HelloMessage> + '_ {
        self.peers.iter().filter_map(|peer| peer.hello.clone())
    }

    /// Sends `words` as JSON to all connected processes. Failed connections are detected by the next [`ControlServer::serve`].
    pub(super) fn broadcast_json(&mut self, words: &impl Serialize) {
        let text = serde_json::to_string(words).unwrap_or_default();
        self.broadcast(&Notice::new(Topic::Agreement, &[]).with_text(&text));
    }

    /// Sends `notice` to all connected processes.
    pub(super) fn broadcast(&mut self, notice: &Notice) {
        for peer in &mut self.peers {
            let rival = peer.rival.as_mut().map(|(line, _)| line);
            for line in peer.line.iter_mut().chain(rival) {
                _ = line.send(notice);
            }
        }
    }

    /// Closes all connections after the last message, which each process has time to read.
    pub(super) fn close(self) {
        let lines = self.peers.into_iter().flat_map(|peer| peer.line.into_iter().chain(peer.rival.map(|(line, _)| line)));
        thread::scope(|scope| lines.for_each(|line| _ = scope.spawn(|| line.close_after_last_message())));
    }

    /// Closes all connections. The processes connect again.
    pub(super) fn clear(&mut self) {
        for peer in &mut self.peers {
            *peer = ConnectedProcess::default();
        }
    }

    /// The control connections of all processes, in order.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn into_connections(self) -> io::Result<Vec<SealedConnection>> {
        self.peers.into_iter().filter_map(|peer| peer.line).map(ControlConnection::into_connection).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::Seal;
    use super::*;
    use crate::sweep::PROMPTLY;
    use std::net::{TcpListener, TcpStream};

    fn connection() -> (SealedConnection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (SealedConnection::bare(one), listener.accept().unwrap().0)
    }

    /// The lines about lost processes, without an error, until `is_so`.
    fn served_until(server: &mut ControlServer, is_so: impl Fn(&ControlServer, &[String]) -> bool) -> Vec<String> {
        let (begin, stop, mut gone) = (Instant::now(), StopFlag::default(), Vec::new());
        while !is_so(server, &gone) {
            assert!(begin.elapsed() < PROMPTLY, "{gone:?}");
            gone.extend(server.serve(&stop).unwrap_or_else(|_| panic!("two processes")));
        }
        gone
    }

    #[test]
    fn a_process_that_lost_its_connection_and_connects_again_is_not_two() {
        let mut server = ControlServer::new(2);
        let [(old, mut sent), (new, mut again)] = [(); 2].map(|()| connection());
        server.admit(1, old).unwrap();
        server.admit(1, new).unwrap();
        // The first connection has a message that arrives late, and then its end.
        Notice::new(Topic::Ready, &[]).write(&mut sent, &mut Seal::default()).unwrap();
        assert!(served_until(&mut server, |server, _| server.all_ready()).is_empty());
        drop(sent);
        let gone = served_until(&mut server, |_, gone| !gone.is_empty());
        assert!(gone[0].starts_with("process 1 is gone before the run began: ") && !server.all_ready(), "{gone:?}");
        Notice::new(Topic::Ready, &[]).write(&mut again, &mut Seal::default()).unwrap();
        served_until(&mut server, |server, _| server.all_ready());
    }
}
