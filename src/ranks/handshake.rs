//! How a connection between two processes of a run begins: both prove that they have the run's token, and the one that connects says which
//! process it is and what the connection is for. Everything has a fixed length, and whoever cannot prove it is dropped.

use super::notice::array;
use super::run_token::{NONCE_BYTES, Nonce, Proof, RunToken, is_same, nonce};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// What both sides speak: a name, and its version.
const PROTOCOL: [u8; 8] = *b"SPROFF\0\x02";

/// What a connection is for, as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Channel(u8);

impl Channel {
    /// What processes tell each other.
    pub(super) const CONTROL: Self = Self(0);

    /// All between two processes of so many `ranks` each, in the order of their places.
    pub(super) fn all(ranks: usize) -> Vec<Self> {
        (0..=Self::weights(ranks, ranks - 1).0).map(Self).collect()
    }

    /// Gradients between two ranks, which have these places in the process that connects and in the one that accepts.
    pub(super) fn gradients(ranks: usize, [connects, accepts]: [usize; 2]) -> Self {
        Self((1 + connects * ranks + accepts) as u8)
    }

    /// New weights between the ranks that have this place in both.
    pub(super) fn weights(ranks: usize, place: usize) -> Self {
        Self((1 + ranks * ranks + place) as u8)
    }

    /// Its place among all.
    pub(super) fn place(self) -> usize {
        usize::from(self.0)
    }
}

/// What the side that connects says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) channel: Channel,
    pub(super) process: u32,
}

const CLAIM_BYTES: usize = 5;

impl Claim {
    fn bytes(self) -> [u8; CLAIM_BYTES] {
        let [a, b, c, d] = self.process.to_le_bytes();
        [self.channel.0, a, b, c, d]
    }

    fn of([channel, process @ ..]: [u8; CLAIM_BYTES]) -> Self {
        Self { channel: Channel(channel), process: u32::from_le_bytes(process) }
    }
}

fn strange(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// The token of the other side is another.
pub(super) fn is_other_token(error: &io::Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied
}

fn check(found: &Proof, expected: &Proof) -> io::Result<()> {
    if is_same(found, expected) { Ok(()) } else { Err(io::Error::new(ErrorKind::PermissionDenied, "it has another run token")) }
}

fn proofs(token: &RunToken, claim: Claim, [theirs, ours]: [&Nonce; 2]) -> [Proof; 2] {
    ["accepts", "connects"].map(|side| token.prove(&[&PROTOCOL, side.as_bytes(), &claim.bytes(), theirs, ours]))
}

/// Opens the connection that `claim` is about on `stream`, as the side that connected.
///
/// # Errors
/// Those of the stream; `PermissionDenied` when the other side has another token.
pub(super) fn open(stream: &mut (impl Read + Write), token: &RunToken, claim: Claim) -> io::Result<()> {
    let own = nonce();
    stream.write_all(&[&PROTOCOL[..], &claim.bytes(), &own].concat())?;
    let (other, proof): (Nonce, Proof) = (array(stream)?, array(stream)?);
    let [accepts, connects] = proofs(token, claim, [&own, &other]);
    check(&proof, &accepts)?;
    stream.write_all(&connects)
}

/// Hears who has connected on `stream`.
///
/// # Errors
/// Those of the stream; `InvalidData` for what is no process of a run; `PermissionDenied` for one of another run.
pub(super) fn answer(stream: &mut (impl Read + Write), token: &RunToken) -> io::Result<Claim> {
    if array::<8>(stream)? != PROTOCOL {
        return Err(strange("no process of a run, or of another version of this program"));
    }
    let (claim, theirs): (_, Nonce) = (Claim::of(array(stream)?), array::<NONCE_BYTES>(stream)?);
    let own = nonce();
    let [accepts, connects] = proofs(token, claim, [&theirs, &own]);
    stream.write_all(&[&own[..], &accepts].concat())?;
    check(&array(stream)?, &connects).map(|()| claim)
}

/// The same on a socket, which may be silent for `patience`, and forever once it is open.
///
/// # Errors
/// As there.
pub(super) fn within<T>(stream: &mut TcpStream, patience: Duration, shake: impl FnOnce(&mut TcpStream) -> io::Result<T>) -> io::Result<T> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    let shaken = shake(stream)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(shaken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::net::UnixStream;

    fn token(text: &str) -> RunToken {
        RunToken::new(text, "here").unwrap()
    }

    /// What both sides say of the connection of `claim`.
    fn meet(connects: &RunToken, accepts: &RunToken, claim: Claim) -> (io::Result<()>, io::Result<Claim>) {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let opened = scope.spawn(move || open(&mut one, connects, claim));
            let answered = answer(&mut other, accepts);
            drop(other);
            (opened.join().unwrap(), answered)
        })
    }

    #[test]
    fn who_has_the_token_is_heard_and_nobody_else() {
        let (ours, theirs) = (token("0123456789abcdef"), token("0123456789abcdeF"));
        for (nth, channel) in (0..).zip(Channel::all(2)) {
            let claim = Claim { channel, process: nth };
            let (opened, answered) = meet(&ours, &ours, claim);
            opened.unwrap();
            assert_eq!(answered.unwrap(), claim);
            let (opened, answered) = meet(&theirs, &ours, claim);
            assert!(is_other_token(&opened.unwrap_err()) && answered.is_err());
        }
    }

    #[test]
    fn every_two_ranks_have_a_channel_of_their_own() {
        let pairs = (0..3).flat_map(|one| (0..3).map(move |other| Channel::gradients(3, [one, other])));
        let weights = (0..3).map(|place| Channel::weights(3, place));
        assert!([Channel::CONTROL].into_iter().chain(pairs).chain(weights).eq(Channel::all(3)));
    }

    /// Somebody who has no token and does not look at what the other side proves.
    #[test]
    fn a_proof_of_another_connection_opens_none() {
        let token = token("0123456789abcdef");
        let claim = Claim { channel: Channel::CONTROL, process: 1 };
        let (mut one, mut other) = UnixStream::pair().unwrap();
        let answered = std::thread::spawn({
            let token = token.clone();
            move || answer(&mut other, &token)
        });
        one.write_all(&[&PROTOCOL[..], &claim.bytes(), &[7; NONCE_BYTES]].concat()).unwrap();
        let (_, accepts): (Nonce, Proof) = (array(&mut one).unwrap(), array(&mut one).unwrap());
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
