//! Where a process listens for others of its run, and who of those that connect belongs to it. Whoever has not shown that yet is a stranger: a
//! thread each, at most so many, and the oldest goes where one more comes, so that nobody keeps a process of the run out for long: it tries again.

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

/// How long all of a handshake may take.
pub(super) const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);
/// Strangers at once.
const STRANGERS_MAX: usize = 128;
/// Connections that are accepted before those that were are looked at.
const ACCEPTED_AT_ONCE: usize = 64;
/// How long a look takes where nobody comes.
const LOOK: Duration = Duration::from_millis(5);
/// A handshake needs little.
const STACK_BYTES: usize = 256 << 10;

/// Whether the kernel keeps sockets of version 6 from taking connections of version 4.
const V6_ONLY: &str = "/proc/sys/net/ipv6/bindv6only";

/// What a handshake came to, by the number of its stranger.
type HandshakeOutcome = (u64, io::Result<(Claim, SealedConnection)>);

/// See above.
pub(super) struct Doorkeeper {
    listener: TcpListener,
    token: RunToken,
    /// The oldest first.
    strangers: VecDeque<(u64, TcpStream)>,
    accepted: u64,
    admitted: VecDeque<(Claim, SealedConnection)>,
    /// Strangers that did not show that they belong to the run.
    dropped: usize,
    outcomes: (mpsc::Sender<HandshakeOutcome>, mpsc::Receiver<HandshakeOutcome>),
}

impl Doorkeeper {
    /// Listens at `port` of all addresses of this machine; 0 is a port that the system chooses.
    ///
    /// # Errors
    /// The system's; `AddrInUse` where the port is another program's.
    pub(super) fn at(port: u16, token: &RunToken) -> io::Result<Self> {
        let listener = everywhere(port)?;
        listener.set_nonblocking(true)?;
        let (strangers, admitted) = Default::default();
        Ok(Self { listener, token: token.clone(), strangers, accepted: 0, admitted, dropped: 0, outcomes: mpsc::channel() })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// How many connections were dropped since they did not show that they belong to the run.
    pub(super) fn dropped(&self) -> usize {
        self.dropped
    }

    /// A process of this run that has connected; none where none has within a moment.
    pub(super) fn next(&mut self) -> Option<(Claim, SealedConnection)> {
        for _ in 0..ACCEPTED_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, _)) => self.welcome(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // No descriptor is left, or the connection is gone already.
                Err(_) => self.turn_away(),
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

    /// Begins the handshake with whoever has connected on `stream`.
    fn welcome(&mut self, stream: TcpStream) {
        self.settle_all();
        if self.strangers.len() == STRANGERS_MAX {
            self.turn_away();
        }
        // Where the system has nothing left for it, it is closed, and tries again.
        let Ok(own) = stream.try_clone() else { return };
        let (number, token, outcomes) = (self.accepted, self.token.clone(), self.outcomes.0.clone());
        // Nobody waits for the outcome once all are there.
        let body = move || _ = outcomes.send((number, answer_within(stream, HANDSHAKE_PATIENCE, &token)));
        if thread::Builder::new().name("handshake".into()).stack_size(STACK_BYTES).spawn(body).is_ok() {
            self.strangers.push_back((number, own));
            self.accepted += 1;
        }
    }

    /// Closes the connection of the oldest stranger, which ends its thread.
    fn turn_away(&mut self) {
        if let Some((_, stream)) = self.strangers.pop_front() {
            self.dropped += 1;
            // One that is closed already needs nothing.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn settle_all(&mut self) {
        while let Ok(outcome) = self.outcomes.1.try_recv() {
            self.settle(outcome);
        }
    }

    fn settle(&mut self, (number, outcome): HandshakeOutcome) {
        // The outcome of one that was turned away is counted.
        let Some(at) = self.strangers.iter().position(|(stranger, _)| *stranger == number) else { return };
        self.strangers.remove(at);
        match outcome {
            Ok(admitted) => self.admitted.push_back(admitted),
            Err(_) => self.dropped += 1,
        }
    }
}

/// A listener at `port` of all addresses: those of version 6 and 4 alike, or those of version 4 where the system has no others or keeps them
/// apart.
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

    fn doorkeeper() -> (Doorkeeper, RunToken, u16) {
        let token = RunToken::new(b"0123456789abcdef", "here").unwrap();
        let door = Doorkeeper::at(0, &token).unwrap();
        let port = door.address().unwrap().port();
        (door, token, port)
    }

    #[test]
    fn all_addresses_of_a_machine_lead_there() {
        let (mut door, token, port) = doorkeeper();
        for (process, host) in (1..).zip(["127.0.0.1", "127.0.1.1", "127.3.2.1"]) {
            let claim = Claim { channel: Channel::CONTROL, process, round: 7 };
            let (token, stream) = (token.clone(), TcpStream::connect((host, port)).unwrap());
            let opened = thread::spawn(move || open_within(stream, HANDSHAKE_PATIENCE, &token, claim).map(drop));
            let found = std::iter::from_fn(|| Some(door.next())).flatten().next().unwrap();
            assert_eq!(found.0, claim);
            opened.join().unwrap().unwrap();
        }
        assert_eq!(door.dropped(), 0);
    }

    /// Those that say nothing, and those that say a byte at a time: more than have room at once.
    #[test]
    fn a_thousand_slow_strangers_keep_nobody_out() {
        let (_, descriptors) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, descriptors.min(1 << 14), descriptors).unwrap();
        let (mut door, token, port) = doorkeeper();
        let knock = move |nth: usize| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            if nth.is_multiple_of(2) {
                // It may have been turned away already.
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
        let found = std::iter::from_fn(|| Some(door.next())).flatten().next().unwrap();
        assert!(found.0 == claim && begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
        opens.join().unwrap();
        // All that connected are accepted in the end, and the newest of them are kept, as many as have room.
        while door.accepted < 1001 {
            assert!(door.next().is_none());
        }
        let held = strangers.join().unwrap();
        let oldest = door.strangers.front().map_or(door.accepted, |(number, _)| *number);
        assert!(oldest + STRANGERS_MAX as u64 >= door.accepted && begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
        drop(held);
    }
}
