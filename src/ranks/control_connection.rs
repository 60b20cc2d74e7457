//! A control connection during the rendezvous. Reads do not block, so one thread serves all connections. Both sides send a heartbeat every
//! two seconds, so the loss of a machine is noticed, too.

use super::handshake::within;
use super::notice::{Notice, Topic};
use super::wire::SealedConnection;
use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// Time between two heartbeats.
pub(super) const BEAT: Duration = Duration::from_secs(2);
/// Time without a complete message after which the peer counts as lost.
const SILENCE: Duration = Duration::from_secs(8);
/// Timeout for sending a message.
const WRITE_PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for a peer to read the last message and to close its side.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes of one read.
const PIECE_BYTES: usize = 16 << 10;

/// A control connection that is polled without blocking.
pub(super) struct ControlConnection {
    connection: SealedConnection,
    /// Time of the last complete message received.
    last_received: Instant,
    /// Time of the last message sent.
    last_sent: Instant,
}

impl ControlConnection {
    /// # Errors
    /// Errors of the system.
    pub(super) fn new(connection: SealedConnection) -> io::Result<Self> {
        connection.stream.set_nonblocking(true)?;
        Ok(Self { connection, last_received: Instant::now(), last_sent: Instant::now() })
    }

    /// The next complete message that is not a heartbeat, or `None` if none has arrived. Also sends a heartbeat if one is due.
    ///
    /// # Errors
    /// Errors of the connection: `UnexpectedEof` when it is closed, `TimedOut` when the peer is silent, `InvalidData` for a damaged
    /// message.
    pub(super) fn next(&mut self) -> io::Result<Option<Notice>> {
        if self.last_sent.elapsed() >= BEAT {
            self.send(&Notice::new(Topic::Alive, &[]))?;
        }
        loop {
            while let Some(notice) = self.parse()? {
                self.last_received = Instant::now();
                if notice.topic != Topic::Alive {
                    return Ok(Some(notice));
                }
            }
            if !self.read()? {
                let silent = self.last_received.elapsed() > SILENCE;
                let error = || io::Error::new(ErrorKind::TimedOut, format!("no message from it for {} s", SILENCE.as_secs()));
                return if silent { Err(error()) } else { Ok(None) };
            }
        }
    }

    /// Time of the last complete message.
    pub(super) fn last_received(&self) -> Instant {
        self.last_received
    }

    /// Removes the first message from the bytes received, if it is complete.
    fn parse(&mut self) -> io::Result<Option<Notice>> {
        let SealedConnection { early, into, .. } = &mut self.connection;
        let (mut rest, mut seal) = (&early[..], into.clone());
        match Notice::read(&mut rest, &mut seal) {
            Ok(notice) => {
                let used = early.len() - rest.len();
                early.drain(..used);
                *into = seal;
                Ok(Some(notice))
            }
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the bytes that have arrived. Returns whether there were any.
    fn read(&mut self) -> io::Result<bool> {
        let mut piece = [0; PIECE_BYTES];
        match self.connection.stream.read(&mut piece) {
            Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "its connection is closed")),
            Ok(count) => {
                self.connection.early.extend_from_slice(&piece[..count]);
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sends `notice`.
    ///
    /// # Errors
    /// Errors of the connection.
    pub(super) fn send(&mut self, notice: &Notice) -> io::Result<()> {
        let SealedConnection { stream, out, .. } = &mut self.connection;
        stream.set_nonblocking(false)?;
        within(stream, WRITE_PATIENCE, |stream| notice.write(stream, out))?;
        stream.set_nonblocking(true)?;
        self.last_sent = Instant::now();
        Ok(())
    }

    /// Closes the connection once the peer has had time to read the last message. A socket that is closed with unread bytes resets the
    /// connection, and a reset discards bytes that the peer has not read yet: bytes of the peer are read until it closes its side, for
    /// [`LINGER`] at most.
    pub(super) fn close_after_last_message(self) {
        let stream = &self.connection.stream;
        let end = Instant::now() + LINGER;
        let mut piece = [0; PIECE_BYTES];
        let mut read = |mut stream: &TcpStream| {
            stream.set_read_timeout(Some(end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))))?;
            stream.read(&mut piece)
        };
        let lingers = stream.set_nonblocking(false).is_ok() && stream.shutdown(Shutdown::Write).is_ok();
        while lingers && Instant::now() < end && matches!(read(stream), Ok(1..)) {}
    }

    /// Returns the connection, including bytes that were received but not parsed.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn into_connection(self) -> io::Result<SealedConnection> {
        self.connection.stream.set_nonblocking(false)?;
        Ok(self.connection)
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::Seal;
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;

    fn line() -> (ControlConnection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (ControlConnection::new(SealedConnection::bare(one)).unwrap(), listener.accept().unwrap().0)
    }

    fn within_a_moment<T>(mut look: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < end, "in vain");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn messages_come_whole_whatever_pieces_they_come_in_and_the_rest_is_kept() {
        let ((mut line, mut other), mut seal, mut wire) = (line(), Seal::default(), Vec::new());
        let long = Notice::new(Topic::Agreement, &[]).with_text(&"x".repeat(3 * PIECE_BYTES));
        for notice in [&long, &Notice::new(Topic::Alive, &[]), &Notice::new(Topic::Begin, &[])] {
            notice.write(&mut wire, &mut seal).unwrap();
        }
        let (first, rest) = wire.split_at(7);
        other.write_all(first).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(line.next().unwrap(), None);
        other.write_all(rest).unwrap();
        assert_eq!(within_a_moment(|| line.next().unwrap()), long);
        assert_eq!(within_a_moment(|| line.next().unwrap()).topic, Topic::Begin);
        // Later bytes belong to the next owner of the connection.
        Notice::new(Topic::Stop, &[]).write(&mut other, &mut seal).unwrap();
        let ((mut input, mut seal), _) = line.into_connection().unwrap().split().unwrap();
        assert_eq!(Notice::read(&mut input, &mut seal).unwrap().topic, Topic::Stop);
    }

    /// The peer reads the last message although bytes of its own were never read.
    #[test]
    fn the_last_message_outlives_unread_bytes_of_the_peer() {
        let (mut line, mut other) = line();
        let last = Notice::new(Topic::Stop, &[]);
        line.send(&last).unwrap();
        other.write_all(&[0; 1000]).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let closing = std::thread::spawn(|| line.close_after_last_message());
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(Notice::read(&mut other, &mut Seal::default()).unwrap(), last);
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
        drop(other);
        closing.join().unwrap();
    }

    /// One peer sends a byte at a time and then stops.
    #[test]
    fn a_silent_slow_or_closed_peer_is_lost_and_a_live_one_is_not() {
        let [(mut silent, _kept), (mut dripping, mut drips), (mut alive, mut beats), (mut closed, closes)] = [(); 4].map(|()| line());
        drop(closes);
        assert_eq!(within_a_moment(|| closed.next().err()).kind(), ErrorKind::UnexpectedEof);
        let (mut seal, mut long, begin) = (Seal::default(), Vec::new(), Instant::now());
        Notice::new(Topic::Agreement, &[]).with_text(&"x".repeat(1000)).write(&mut long, &mut Seal::default()).unwrap();
        let mut bytes = long.into_iter();
        let mut gone = [false; 2];
        while gone != [true; 2] {
            assert!(begin.elapsed() < crate::sweep::PROMPTLY, "{gone:?}");
            Notice::new(Topic::Alive, &[]).write(&mut beats, &mut seal).unwrap();
            drips.write_all(&[bytes.next().unwrap()]).unwrap();
            for (gone, line) in gone.iter_mut().zip([&mut silent, &mut dripping]) {
                *gone |= line.next().is_err();
            }
            assert_eq!(alive.next().unwrap(), None);
            std::thread::sleep(Duration::from_millis(100));
        }
        assert!(begin.elapsed() + BEAT >= SILENCE);
    }
}
