//! The handshake of a connection between two processes of a run. Both sides prove that they have the run token, and the connecting side
//! sends its process index and the purpose of the connection. All messages have a fixed length, the handshake has one deadline, and a
//! connection without proof is dropped.

use super::run_token::{NONCE_BYTES, Nonce, Proof, RunToken, is_same, nonce};
use super::wire::{Seal, SealedConnection, array};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Magic bytes and version of the protocol.
const PROTOCOL: [u8; 8] = *b"SPROFF\0\x03";

/// The purpose of a connection, as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Channel(u8);

impl Channel {
    /// Notices between two processes.
    pub(super) const CONTROL: Self = Self(0);

    /// All channels between two processes with `ranks` ranks each, in the order of their indices.
    pub(super) fn all(ranks: usize) -> Vec<Self> {
        (0..=Self::weights(ranks, ranks - 1).0).map(Self).collect()
    }

    /// The channel for gradients between two ranks. `connects` and `accepts` are their indices in the connecting and the accepting process.
    pub(super) fn gradients(ranks: usize, [connects, accepts]: [usize; 2]) -> Self {
        Self((1 + connects * ranks + accepts) as u8)
    }

    /// The channel for new weights between the ranks with index `place` in both processes.
    pub(super) fn weights(ranks: usize, place: usize) -> Self {
        Self((1 + ranks * ranks + place) as u8)
    }

    /// Index of the channel.
    pub(super) fn place(self) -> usize {
        usize::from(self.0)
    }
}

/// The identification that the connecting side sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) channel: Channel,
    pub(super) process: u32,
    /// The number that process 0 assigned to this attempt of the rendezvous; 0 before it has assigned one.
    pub(super) round: u64,
}

const CLAIM_BYTES: usize = 13;

impl Claim {
    fn bytes(self) -> [u8; CLAIM_BYTES] {
        let mut bytes = [self.channel.0; CLAIM_BYTES];
        bytes[1..5].copy_from_slice(&self.process.to_le_bytes());
        bytes[5..].copy_from_slice(&self.round.to_le_bytes());
        bytes
    }

    fn of(bytes: [u8; CLAIM_BYTES]) -> Self {
        let [channel, a, b, c, d, round @ ..] = bytes;
        Self { channel: Channel(channel), process: u32::from_le_bytes([a, b, c, d]), round: u64::from_le_bytes(round) }
    }
}

fn strange() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the peer is no process of a run, or has another version of this program")
}

/// Whether `error` means that the peer has another token.
pub(super) fn is_other_token(error: &io::Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied
}

fn check(found: &Proof, expected: &Proof) -> io::Result<()> {
    if is_same(found, expected) { Ok(()) } else { Err(io::Error::new(ErrorKind::PermissionDenied, "it has another run token")) }
}

/// The inputs of all proofs: the token, the claim, and the nonces of the connecting and the accepting side.
struct Secrets<'a> {
    token: &'a RunToken,
    claim: Claim,
    nonces: [Nonce; 2],
}

impl Secrets<'_> {
    /// The proof for this `stage` of the handshake.
    fn proof(&self, stage: &str) -> Proof {
        let [connects, accepts] = &self.nonces;
        self.token.prove(&[&PROTOCOL, stage.as_bytes(), &self.claim.bytes(), connects, accepts])
    }

    /// The seals of the messages that the connecting side sends, and of those that the accepting side sends.
    fn seals(&self) -> [Seal; 2] {
        ["sent by who connects", "sent by who accepts"].map(|stage| {
            let [a, b, c, d, ..] = self.proof(stage);
            Seal::new(u32::from_le_bytes([a, b, c, d]))
        })
    }
}

/// Opens the connection of `claim` on `stream`, as the connecting side. Returns the seals of outgoing and incoming messages once the peer
/// has admitted the connection.
///
/// # Errors
/// Errors of the stream; `PermissionDenied` if the peer has another token, `InvalidData` if it uses another protocol.
pub(super) fn open(stream: &mut (impl Read + Write), token: &RunToken, claim: Claim) -> io::Result<[Seal; 2]> {
    let own = nonce();
    stream.write_all(&[&PROTOCOL[..], &claim.bytes(), &own].concat())?;
    if array(stream)? != PROTOCOL {
        return Err(strange());
    }
    let (other, proof): (Nonce, Proof) = (array(stream)?, array(stream)?);
    let secrets = Secrets { token, claim, nonces: [own, other] };
    check(&proof, &secrets.proof("accepts"))?;
    stream.write_all(&secrets.proof("connects"))?;
    check(&array(stream)?, &secrets.proof("admits"))?;
    Ok(secrets.seals())
}

/// Authenticates the connecting side of `stream` and admits it. Returns its claim, and the seals of outgoing and incoming messages.
///
/// # Errors
/// Errors of the stream; `InvalidData` if the peer is not a process of any run, `PermissionDenied` if it belongs to another run.
pub(super) fn answer(stream: &mut (impl Read + Write), token: &RunToken) -> io::Result<(Claim, [Seal; 2])> {
    let received: [u8; 8] = array(stream)?;
    if received != PROTOCOL {
        // A process with another version receives this version and can report it. Any other peer gets no reply.
        return if received[..7] == PROTOCOL[..7] { stream.write_all(&PROTOCOL).and(Err(strange())) } else { Err(strange()) };
    }
    let (claim, other): (_, Nonce) = (Claim::of(array(stream)?), array::<NONCE_BYTES>(stream)?);
    let own = nonce();
    let secrets = Secrets { token, claim, nonces: [other, own] };
    stream.write_all(&[&PROTOCOL[..], &own, &secrets.proof("accepts")].concat())?;
    check(&array(stream)?, &secrets.proof("connects"))?;
    stream.write_all(&secrets.proof("admits"))?;
    let [into, out] = secrets.seals();
    Ok((claim, [out, into]))
}

/// A socket with one deadline for all of its reads and writes together.
pub(super) struct Deadlined<'a>(&'a TcpStream, Instant);

impl Deadlined<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.1.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Deadlined<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.set_read_timeout(self.left()?)?;
        self.0.read(out)
    }
}

impl Write for Deadlined<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.set_write_timeout(self.left()?)?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs `talk` on `stream` with a timeout of `patience` for all reads and writes together.
///
/// # Errors
/// Errors of `talk`; `TimedOut` or `WouldBlock` at the deadline.
pub(super) fn within<T>(stream: &TcpStream, patience: Duration, talk: impl FnOnce(&mut Deadlined<'_>) -> io::Result<T>) -> io::Result<T> {
    let outcome = talk(&mut Deadlined(stream, Instant::now() + patience))?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(outcome)
}

/// Calls [`open`] with a timeout of `patience`.
///
/// # Errors
/// Errors of [`open`]; `TimedOut` or `WouldBlock` at the deadline.
pub(super) fn open_within(stream: TcpStream, patience: Duration, token: &RunToken, claim: Claim) -> io::Result<SealedConnection> {
    stream.set_nodelay(true)?;
    let seals = within(&stream, patience, |stream| open(stream, token, claim))?;
    Ok(SealedConnection::new(stream, seals))
}

/// Calls [`answer`] with a timeout of `patience`.
///
/// # Errors
/// Errors of [`answer`]; `TimedOut` or `WouldBlock` at the deadline.
pub(super) fn answer_within(stream: TcpStream, patience: Duration, token: &RunToken) -> io::Result<(Claim, SealedConnection)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let (claim, seals) = within(&stream, patience, |stream| answer(stream, token))?;
    Ok((claim, SealedConnection::new(stream, seals)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::net::UnixStream;

    fn token(text: &str) -> RunToken {
        RunToken::new(text.as_bytes(), "here").unwrap()
    }

    /// The seals of both directions of a connection.
    type Seals = [Seal; 2];

    /// Performs a handshake. Returns the seals of each side, and the claim as the accepting side reads it.
    fn meet(connects: &RunToken, accepts: &RunToken, claim: Claim) -> (io::Result<Seals>, io::Result<(Claim, Seals)>) {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let opened = scope.spawn(move || open(&mut one, connects, claim));
            let answered = answer(&mut other, accepts);
            drop(other);
            (opened.join().unwrap(), answered)
        })
    }

    #[test]
    fn only_peers_with_the_token_are_admitted() {
        let (own, foreign) = (token("0123456789abcdef"), token("0123456789abcdeF"));
        for (nth, channel) in (0..).zip(Channel::all(2)) {
            let claim = Claim { channel, process: nth, round: u64::from(nth) << 40 };
            let (opened, answered) = meet(&own, &own, claim);
            let ([out, into], (understood, [their_out, their_into])) = (opened.unwrap(), answered.unwrap());
            assert_eq!((understood, &their_into, &their_out), (claim, &out, &into));
            assert_ne!(out, into, "each direction has a seed of its own");
            let (opened, answered) = meet(&foreign, &own, claim);
            assert!(is_other_token(&opened.unwrap_err()) && answered.is_err());
        }
    }

    /// A peer without a proof is not admitted, and one byte changed in transit fails the handshake on both sides.
    #[test]
    fn a_side_is_open_when_the_other_has_admitted_it() {
        let token = token("0123456789abcdef");
        let claim = Claim { channel: Channel::CONTROL, process: 1, round: 0 };
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let opened = std::thread::spawn({
            let token = token.clone();
            move || open(&mut one, &token, claim)
        });
        let (_, connects): ([u8; 8 + CLAIM_BYTES], Nonce) = (array(&mut other).unwrap(), array(&mut other).unwrap());
        let secrets = Secrets { token: &token, claim, nonces: [connects, [9; NONCE_BYTES]] };
        other.write_all(&[&PROTOCOL[..], &[9; NONCE_BYTES], &secrets.proof("accepts")].concat()).unwrap();
        assert_eq!(array::<32>(&mut other).unwrap(), secrets.proof("connects"));
        drop(other);
        assert_eq!(opened.join().unwrap().unwrap_err().kind(), ErrorKind::UnexpectedEof, "nobody has admitted it");
    }

    #[test]
    fn another_version_is_named_to_both_sides() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        one.write_all(b"SPROFF\0\x02").unwrap();
        let refused = answer(&mut other, &token("0123456789abcdef")).unwrap_err().to_string();
        assert!(refused.contains("another version of this program"), "{refused}");
        assert_eq!(array(&mut one).unwrap(), PROTOCOL);
    }

    /// A peer that sends single bytes keeps each read alive, but not the handshake beyond its deadline.
    #[test]
    fn a_slow_side_ends_at_the_deadline_of_the_whole_handshake() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, begin) = (listener.accept().unwrap().0, Instant::now());
        let dripping = std::thread::spawn(move || {
            for byte in PROTOCOL.into_iter().chain([0; 40]) {
                if slow.write_all(&[byte]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(250));
            }
        });
        assert!(answer_within(stream, Duration::from_millis(400), &token("0123456789abcdef")).is_err());
        assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
        dripping.join().unwrap();
    }

    #[test]
    fn every_two_ranks_have_a_channel_of_their_own() {
        let pairs = (0..3).flat_map(|one| (0..3).map(move |other| Channel::gradients(3, [one, other])));
        let weights = (0..3).map(|place| Channel::weights(3, place));
        assert!([Channel::CONTROL].into_iter().chain(pairs).chain(weights).eq(Channel::all(3)));
    }

    /// An attacker without the token that ignores the proof of the other side.
    #[test]
    fn a_proof_of_another_connection_opens_none() {
        let token = token("0123456789abcdef");
        let claim = Claim { channel: Channel::CONTROL, process: 1, round: 0 };
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let answered = std::thread::spawn({
            let token = token.clone();
            move || answer(&mut other, &token)
        });
        one.write_all(&[&PROTOCOL[..], &claim.bytes(), &[7; NONCE_BYTES]].concat()).unwrap();
        let (_, accepts): ([u8; 8 + NONCE_BYTES], Proof) = (array(&mut one).unwrap(), array(&mut one).unwrap());
        one.write_all(&accepts).unwrap();
        assert!(is_other_token(&answered.join().unwrap().unwrap_err()), "its own proof is sent back");
    }

    proptest! {
        #[test]
        fn noise_is_dropped(noise in prop::collection::vec(any::<u8>(), 0..120), begins: bool) {
            let (mut one, mut other) = UnixStream::pair().unwrap();
            let head = if begins { &PROTOCOL[..] } else { &[] };
            one.write_all(&[head, &noise].concat()).unwrap();
            one.shutdown(std::net::Shutdown::Write).unwrap();
            prop_assert!(answer(&mut other, &token("0123456789abcdef")).is_err());
        }
    }
}
