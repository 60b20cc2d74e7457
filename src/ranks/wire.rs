//! Format of a message between two processes: a head with the length of the body, the number and the kind of the message, then the body,
//! then the checksum of the body. TCP's own checksum has 16 bits and lets one of 65,536 damaged packets pass, so that head and body have a
//! CRC-32C each, which the receiver compares before it uses anything. The number counts the messages of a connection in one direction: a
//! lost, doubled, inserted or reordered message has a wrong number. Each direction begins its checksums with a seed of its own from the
//! handshake, so that a message of another connection, direction or run counts as damaged, too. The checksum of a body comes last: both
//! sides compute it of pieces that their caches hold between memory and socket.

use crc32c::crc32c_append;
use std::io::{self, Cursor, ErrorKind, Read, Write};
use std::net::TcpStream;

/// Bytes of length, number and kind, which the checksums of head and body cover.
const FACTS_BYTES: usize = 9;
const SUM_BYTES: usize = 4;
/// Bytes of the facts and of the checksum of the head.
const HEAD_BYTES: usize = FACTS_BYTES + SUM_BYTES;
/// Most bytes of the start of a body, which is written together with the head.
const START_BYTES_MAX: usize = 56;
/// Bytes of a body that go through the socket and the checksum in turn: a part of the second-level cache.
const PIECE_BYTES: usize = 128 << 10;

/// One direction of a connection: the seed of its checksums, and the number of the next message.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Seal {
    seed: u32,
    next: u32,
}

/// Head of the next message of a connection.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) kind: u8,
    /// Bytes of the body.
    pub(super) length: usize,
    facts_sum: u32,
}

impl Seal {
    /// A direction whose checksums begin with `seed`.
    pub(super) fn new(seed: u32) -> Self {
        Self { seed, next: 0 }
    }

    /// Writes the next message, of `kind`, whose body is `start` followed by `rest`.
    ///
    /// # Errors
    /// Errors of `out`.
    ///
    /// # Panics
    /// If `start` has more than [`START_BYTES_MAX`] bytes.
    pub(super) fn write(&mut self, out: &mut impl Write, kind: u8, start: &[u8], rest: &[u8]) -> io::Result<()> {
        let mut first = [0; HEAD_BYTES + START_BYTES_MAX];
        first[..4].copy_from_slice(&((start.len() + rest.len()) as u32).to_le_bytes());
        first[4..8].copy_from_slice(&self.next.to_le_bytes());
        first[8] = kind;
        let facts_sum = crc32c_append(self.seed, &first[..FACTS_BYTES]);
        first[FACTS_BYTES..HEAD_BYTES].copy_from_slice(&facts_sum.to_le_bytes());
        first[HEAD_BYTES..][..start.len()].copy_from_slice(start);
        self.next = self.next.wrapping_add(1);
        out.write_all(&first[..HEAD_BYTES + start.len()])?;
        let mut sum = crc32c_append(facts_sum, start);
        for piece in rest.chunks(PIECE_BYTES) {
            sum = crc32c_append(sum, piece);
            out.write_all(piece)?;
        }
        out.write_all(&sum.to_le_bytes())
    }

    /// Reads the head of the next message.
    ///
    /// # Errors
    /// Errors of `input`; `InvalidData` for a damaged head, and for the head of another message than the next.
    pub(super) fn head(&self, input: &mut impl Read) -> io::Result<Header> {
        let [facts @ .., s, t, u, v]: [u8; HEAD_BYTES] = array(input)?;
        let facts_sum = crc32c_append(self.seed, &facts);
        if facts_sum != u32::from_le_bytes([s, t, u, v]) {
            return Err(damage(format!("the CRC-32C of the head of message {} differs", self.next)));
        }
        let [a, b, c, d, e, f, g, h, kind] = facts;
        let (length, number) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        if number != self.next {
            return Err(damage(format!("message {number} came in place of message {}", self.next)));
        }
        Ok(Header { kind, length: length as usize, facts_sum })
    }

    /// Reads the body of the message of `head` into `start` and then `rest`, which have its length together, and compares its checksum.
    /// `name` names the message by its start.
    ///
    /// # Errors
    /// Errors of `input`; `InvalidData` for a damaged body.
    pub(super) fn body(
        &mut self,
        input: &mut impl Read,
        head: &Header,
        (start, rest): (&mut [u8], &mut [u8]),
        name: impl FnOnce(&[u8]) -> String,
    ) -> io::Result<()> {
        debug_assert_eq!(head.length, start.len() + rest.len());
        let mut sum = head.facts_sum;
        for piece in [&mut *start].into_iter().chain(rest.chunks_mut(PIECE_BYTES)) {
            input.read_exact(piece)?;
            sum = crc32c_append(sum, piece);
        }
        if sum.to_le_bytes() != array(input)? {
            return Err(damage(format!("the CRC-32C of the body of message {}, {}, differs", self.next, name(start))));
        }
        self.next = self.next.wrapping_add(1);
        Ok(())
    }
}

/// A message that cannot be used, in words.
pub(super) fn damage(cause: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, cause)
}

/// The next bytes, as many as the array has.
///
/// # Errors
/// Errors of `input`.
pub(super) fn array<const N: usize>(input: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes).map(|()| bytes)
}

/// A connection between two processes that have shown each other that they belong to one run.
#[derive(Debug)]
pub(crate) struct SealedConnection {
    pub(super) stream: TcpStream,
    /// Bytes that came, and that nobody has used yet.
    pub(super) early: Vec<u8>,
    /// Seal of sent messages.
    pub(super) out: Seal,
    /// Seal of received messages.
    pub(super) into: Seal,
}

impl SealedConnection {
    /// A connection over `stream`, whose handshake gave the seals of sent and of received messages.
    pub(super) fn new(stream: TcpStream, [out, into]: [Seal; 2]) -> Self {
        Self { stream, early: Vec::new(), out, into }
    }

    /// A connection without a handshake.
    #[cfg(test)]
    pub(crate) fn bare(stream: TcpStream) -> Self {
        Self::new(stream, [Seal::default(), Seal::default()])
    }

    /// Second handle of the connection, for another owner. Only one of both owners may read and write.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        let (early, out, into) = (self.early.clone(), self.out.clone(), self.into.clone());
        Ok(Self { stream: self.stream.try_clone()?, early, out, into })
    }

    /// Both directions, for a thread each: received messages, then sent messages.
    pub(super) fn split(self) -> io::Result<((impl Read + Send + 'static, Seal), (TcpStream, Seal))> {
        let input = Cursor::new(self.early).chain(self.stream.try_clone()?);
        Ok(((input, self.into), (self.stream, self.out)))
    }

    /// Whether the other side has not closed it, as far as this one knows.
    pub(super) fn is_open(&self) -> bool {
        let peek = |stream: &TcpStream| match stream.peek(&mut [0]) {
            Ok(count) => count > 0,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        self.stream.set_nonblocking(true).is_ok() && peek(&self.stream) && self.stream.set_nonblocking(false).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Messages of these bodies, as they go over the wire.
    fn sent(seed: u32, bodies: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut seal = Seal::new(seed);
        let write = |(kind, body): (u8, &Vec<u8>)| {
            let (start, rest) = body.split_at(body.len() / 2);
            let mut wire = Vec::new();
            seal.write(&mut wire, kind, start, rest).map(|()| wire).unwrap()
        };
        (0..).zip(bodies).map(write).collect()
    }

    /// All messages of `wire` up to the first that is none.
    fn received(seed: u32, wire: &[u8]) -> (Vec<(u8, Vec<u8>)>, Option<io::Error>) {
        let (mut seal, mut input, mut all) = (Seal::new(seed), wire, Vec::new());
        let mut next = |input: &mut &[u8]| {
            let head = seal.head(input)?;
            if head.length > input.len() {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let mut body = vec![0; head.length];
            let (start, rest) = body.split_at_mut(head.length / 3);
            seal.body(input, &head, (start, rest), |_| "x".into())?;
            Ok((head.kind, body))
        };
        while !input.is_empty() {
            match next(&mut input) {
                Ok(message) => all.push(message),
                Err(error) => return (all, Some(error)),
            }
        }
        (all, None)
    }

    fn bodies() -> impl Strategy<Value = Vec<Vec<u8>>> {
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 2..5)
    }

    proptest! {
        #[test]
        fn messages_come_as_they_were_sent(bodies in bodies(), seed: u32) {
            let (all, error) = received(seed, &sent(seed, &bodies).concat());
            prop_assert!(error.is_none() && all == (0..).zip(bodies).collect::<Vec<_>>());
        }

        #[test]
        fn a_byte_that_differs_is_never_used(bodies in bodies(), seed: u32, at: prop::sample::Index, flip in 1u8..) {
            let mut wire = sent(seed, &bodies).concat();
            let at = at.index(wire.len());
            wire[at] ^= flip;
            let (all, error) = received(seed, &wire);
            prop_assert!(error.is_some() && all.iter().map(|(_, body)| body).eq(&bodies[..all.len()]));
        }

        #[test]
        fn messages_that_are_lost_doubled_moved_or_of_another_connection_are_errors(bodies in bodies(), seed: u32, at: prop::sample::Index) {
            let messages = sent(seed, &bodies);
            let at = at.index(messages.len() - 1);
            let changed = |change: &dyn Fn(&mut Vec<Vec<u8>>)| {
                let mut messages = messages.clone();
                change(&mut messages);
                received(seed, &messages.concat())
            };
            let other = sent(seed ^ 1, &bodies);
            for (cause, (all, error)) in [
                ("lost", changed(&|messages| drop(messages.remove(at)))),
                ("doubled", changed(&|messages| messages.insert(at, messages[at].clone()))),
                ("moved", changed(&|messages| messages.swap(at, at + 1))),
                ("of another connection", changed(&|messages| messages[at] = other[at].clone())),
            ] {
                prop_assert!(error.is_some() && all.len() <= at + 1, "{cause}: {all:?}");
            }
        }
    }

    #[test]
    fn errors_name_the_message_and_its_fault() {
        let messages = sent(7, &[vec![1; 9], vec![2; 9], vec![3; 9]]);
        let text = |wire: &[u8]| received(7, wire).1.unwrap().to_string();
        assert_eq!(text(&[&messages[0][..], &messages[2]].concat()), "message 2 came in place of message 1");
        let (mut head, mut body) = (messages[0].clone(), messages[0].clone());
        head[0] ^= 0x80;
        body[HEAD_BYTES] ^= 1;
        assert_eq!(text(&head), "the CRC-32C of the head of message 0 differs");
        assert_eq!(text(&body), "the CRC-32C of the body of message 0, x, differs");
    }
}
