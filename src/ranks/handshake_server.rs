//! The listening side of a process: accepts connections and authenticates them. Each connection that is not authenticated yet has a thread.
//! Their number is limited; a new connection beyond the limit closes the oldest one. So strangers cannot block a process of the run for
//! long, because it tries again.

use super::handshake::{Claim, answer_within};
use super::run_token::RunToken;
use super::wire::SealedConnection;
use std::collections::VecDeque;
use std::fs;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Timeout of a whole handshake.
pub(super) const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of connections in a handshake.
const STRANGERS_MAX: usize = 128;
/// Maximum number of connections accepted before finished handshakes are handled.
const ACCEPTED_AT_ONCE: usize = 64;
/// Time to wait for a finished handshake when there is none.
const LOOK: Duration = Duration::from_millis(5);
/// Stack size of a handshake thread.
const STACK_BYTES: usize = 256 << 10;

/// Whether IPv6 sockets refuse IPv4 connections.
const V6_ONLY: &str = "/proc/sys/net/ipv6/bindv6only";

/// The result of a handshake, with the number of its connection.
type HandshakeOutcome = (u64, io::Result<(Claim, SealedConnection)>);

/// A listener that authenticates connections.
pub(super) struct HandshakeServer {
    listener: TcpListener,
    token: RunToken,
    /// Connections in a handshake, the oldest first.
    pending: VecDeque<(u64, TcpStream)>,
    accepted: u64,
    admitted: VecDeque<(Claim, SealedConnection)>,
    /// Number of connections that failed to authenticate.
    dropped: usize,
    outcomes: (mpsc::Sender<HandshakeOutcome>, mpsc::Receiver<HandshakeOutcome>),
}

impl HandshakeServer {
    /// Listens on `port` of all addresses of this machine. With port 0 the system chooses a port.
    ///
    /// # Errors
    /// Errors of the system; `AddrInUse` if another program has the port.
    pub(super) fn at(port: u16, token: &RunToken) -> io::Result<Self> {
        let listener = everywhere(port)?;
        listener.set_nonblocking(true)?;
        let (strangers, admitted) = Default::default();
        Ok(Self { listener, token: token.clone(), pending: strangers, accepted: 0, admitted, dropped: 0, outcomes: mpsc::channel() })
    }

    /// The address of the listener.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Number of connections that were dropped because they failed to authenticate.
    pub(super) fn dropped(&self) -> usize {
        self.dropped
    }

    /// The next authenticated connection. `None` if there is none after a short wait.
    pub(super) fn next(&mut self) -> Option<(Claim, SealedConnection)> {
        for _ in 0..ACCEPTED_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, _)) => self.welcome(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // No file descriptor is left, or the connection is already closed.
                Err(_) => self.drop_oldest_pending(),
            }
        }
        if self.admitted.is_empty()
            && let Ok(outcome) = self.outcomes.1.recv_timeout(LOOK)
        {
            self.settle(outcome);
        }
        self.settle_all();
        self.admitted.pop_front()
    }

    /// Starts the handshake on a new connection.
    fn welcome(&mut self, stream: TcpStream) {
        self.settle_all();
        if self.pending.len() == STRANGERS_MAX {
            self.drop_oldest_pending();
        }
        // Without a free descriptor the connection is closed, and its process tries again.
        let Ok(own) = stream.try_clone() else { return };
        let (number, token, outcomes) = (self.accepted, self.token.clone(), self.outcomes.0.clone());
        // The receiver is gone once all processes have connected.
        let body = move || _ = outcomes.send((number, answer_within(stream, HANDSHAKE_PATIENCE, &token)));
        if thread::Builder::new().name("handshake".into()).stack_size(STACK_BYTES).spawn(body).is_ok() {
            self.pending.push_back((number, own));
            self.accepted += 1;
        }
    }

    /// Closes the oldest connection in a handshake, which ends its thread.
    fn drop_oldest_pending(&mut self) {
        if let Some((_, stream)) = self.pending.pop_front() {
            self.dropped += 1;
            // The connection may already be closed.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn settle_all(&mut self) {
        while let Ok(outcome) = self.outcomes.1.try_recv() {
            self.settle(outcome);
        }
    }

    fn settle(&mut self, (number, outcome): HandshakeOutcome) {
        // A connection that was closed as the oldest is already counted.
        let Some(at) = self.pending.iter().position(|(stranger, _)| *stranger == number) else { return };
        self.pending.remove(at);
        match outcome {
            Ok(admitted) => self.admitted.push_back(admitted),
            Err(_) => self.dropped += 1,
        }
    }
}

/// A listener on `port` of all addresses, IPv6 and IPv4. It is IPv4 only if the system has no IPv6 or separates the two.
fn everywhere(port: u16) -> io::Result<TcpListener> {
    let keeps_apart = fs::read_to_string(V6_ONLY).is_ok_and(|value| value.trim() == "1");
    let both = if keeps_apart { Err(ErrorKind::Unsupported.into()) } else { TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) };
    match both {
        Err(error) if !matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied) => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        }
        both => both,
    }
}

#[cfg(test)]
mod tests {
    use super::super::handshake::{Channel, open_within};
    use super::*;
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use std::io::Write;
    use std::time::Instant;

    fn server() -> (HandshakeServer, RunToken, u16) {
        let token = RunToken::new(b"0123456789abcdef", "here").unwrap();
        let server = HandshakeServer::at(0, &token).unwrap();
        let port = server.address().unwrap().port();
        (server, token, port)
    }

    #[test]
    fn all_addresses_of_a_machine_lead_there() {
        let (mut server, token, port) = server();
        for (process, host) in (1..).zip(["127.0.0.1", "127.0.1.1", "127.3.2.1"]) {
            let claim = Claim { channel: Channel::CONTROL, process, round: 7 };
            let (token, stream) = (token.clone(), TcpStream::connect((host, port)).unwrap());
            let opened = thread::spawn(move || open_within(stream, HANDSHAKE_PATIENCE, &token, claim).map(drop));
            let found = std::iter::from_fn(|| Some(server.next())).flatten().next().unwrap();
            assert_eq!(found.0, claim);
            opened.join().unwrap().unwrap();
        }
        assert_eq!(server.dropped(), 0);
    }

    /// Half of the strangers send nothing, the others one byte. They are more than the limit.
    #[test]
    fn a_thousand_slow_connections_do_not_block_a_peer() {
        let (_, descriptors) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, descriptors.min(1 << 14), descriptors).unwrap();
        let (mut server, token, port) = server();
        let knock = move |nth: usize| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            if nth.is_multiple_of(2) {
                // The connection may already be closed.
                let _ = stream.write_all(b"S");
            }
            stream
        };
        let strangers = thread::spawn(move || (0..1000).map(knock).collect::<Vec<_>>());
        let claim = Claim { channel: Channel::CONTROL, process: 1, round: 0 };
        let (begin, own) = (Instant::now(), token.clone());
        let opens = thread::spawn(move || {
            let open = || open_within(TcpStream::connect(("127.0.0.1", port)).unwrap(), HANDSHAKE_PATIENCE, &own, claim);
            std::iter::repeat_with(open).find_map(Result::ok).unwrap()
        });
        let found = std::iter::from_fn(|| Some(server.next())).flatten().next().unwrap();
        assert!(found.0 == claim && begin.elapsed() < crate::sweep::PROMPTLY, "{:?}", begin.elapsed());
        opens.join().unwrap();
        // All connections are accepted in the end, and the newest ones are kept, up to the limit.
        while server.accepted < 1001 {
            assert!(server.next().is_none());
        }
        let held = strangers.join().unwrap();
        let oldest = server.pending.front().map_or(server.accepted, |(number, _)| *number);
        assert!(oldest + STRANGERS_MAX as u64 >= server.accepted && begin.elapsed() < crate::sweep::PROMPTLY, "{:?}", begin.elapsed());
        drop(held);
    }
}
