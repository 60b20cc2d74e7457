//! Connections between two ranks of two processes, which carry slices of gradients and of weights. Each kind has a TCP connection of its
//! own, so that slices delay no control message, and a thread for each direction, so that no driver thread blocks on a socket. A slice for
//! which a connection has no place waits at its sender: the flow control of TCP is the only one. A direction without slices sends an empty
//! message from time to time, so that the receiver notices a lost slice by the number of the message that follows. Slices reuse the host
//! memory of earlier slices: memory that is fresh from the system costs a page fault for every 4 KiB, which takes longer than the copy.

use super::wire::{Seal, SealedConnection, damage};
use crate::host::doorbell::Doorbell;
use std::io::{self, BufWriter, Read, Write};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::Duration;

/// Slices of each kind and direction that pass through host memory at once, for each other rank.
pub(crate) const PLACES: usize = 2;
/// Messages that wait at each end of a direction.
const WAITING: usize = 2;

/// Slices in host memory, at most, on their way over so many connections: in two directions; in places, in connections, and one that is
/// read or written.
pub(crate) fn slices_under_way(connections: usize) -> usize {
    2 * connections * (PLACES + WAITING + 1)
}

/// Time after which a direction without slices sends an empty message.
const BEAT: Duration = Duration::from_secs(5);
/// Kind of the empty message.
const NOTHING: u8 = 0;

/// Bytes of a message before its slice: bucket and round.
const LABEL_BYTES: usize = 12;

/// Content of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SliceKind {
    Gradients = 1,
    Weights = 2,
}

/// Host memory of slices that were sent or received, for the slices to come.
#[derive(Default)]
pub(crate) struct SliceBuffers(Vec<Arc<Vec<u8>>>);

impl SliceBuffers {
    /// Memory of a slice of `length` bytes, which `fill` writes. The memory of an earlier slice serves again once every clone of its `Arc`
    /// is dropped.
    ///
    /// # Errors
    /// Errors of `fill`.
    pub(crate) fn fill<E>(&mut self, length: usize, fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Arc<Vec<u8>>, E> {
        let free = self.0.iter_mut().position(|buffer| Arc::get_mut(buffer).is_some());
        let mut buffer = free.map(|free| self.0.swap_remove(free)).unwrap_or_default();
        let bytes = Arc::get_mut(&mut buffer).expect("no clone of a free buffer exists");
        bytes.resize(length, 0);
        fill(bytes)?;
        self.0.push(buffer.clone());
        Ok(buffer)
    }
}

/// A slice under way.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SliceMessage {
    pub(crate) bucket: u32,
    /// Of gradients the round, counted from the first step; of weights the version or the fetch, in one count.
    pub(crate) round: u64,
    pub(crate) bytes: Arc<Vec<u8>>,
}

/// A connection for one kind, to and from one rank.
pub(crate) struct SliceConnection {
    out: SyncSender<SliceMessage>,
    arrived: Receiver<SliceMessage>,
    next: Option<SliceMessage>,
}

/// The connections to and from one rank of another process.
pub(crate) struct RankConnections {
    pub(crate) grads: SliceConnection,
    /// To and from an inter-node peer alone.
    pub(crate) weights: Option<SliceConnection>,
}

impl SliceKind {
    /// Its name, for people.
    pub(super) fn name(self) -> &'static str {
        if self == Self::Gradients { "gradients" } else { "weights" }
    }
}

impl SliceMessage {
    fn write(&self, out: &mut impl Write, kind: SliceKind, seal: &mut Seal) -> io::Result<()> {
        let mut label = [0; LABEL_BYTES];
        label[..4].copy_from_slice(&self.bucket.to_le_bytes());
        label[4..].copy_from_slice(&self.round.to_le_bytes());
        seal.write(out, kind as u8, &label, &self.bytes)
    }

    /// Reads a message of `kind` with at most `most` bytes into one of `buffers`; nothing where the peer sent the message of a direction
    /// without slices.
    fn read(
        input: &mut impl Read,
        (kind, most): (SliceKind, usize),
        seal: &mut Seal,
        buffers: &mut SliceBuffers,
    ) -> io::Result<Option<Self>> {
        let head = seal.head(input)?;
        if head.kind == NOTHING && head.length == 0 {
            return seal.body(input, &head, (&mut [], &mut []), |_| "of no slice".into()).map(|()| None);
        }
        let length = head.length.checked_sub(LABEL_BYTES).filter(|length| *length <= most && head.kind == kind as u8);
        let wrong = || damage(format!("a message of kind {} with {} bytes, of at most {}", head.kind, head.length, LABEL_BYTES + most));
        let mut label = [0; LABEL_BYTES];
        let bytes = buffers.fill(length.ok_or_else(wrong)?, |bytes| seal.body(input, &head, (&mut label, bytes), name_by_label))?;
        let (bucket, round) = parse_label(label);
        Ok(Some(Self { bucket, round, bytes }))
    }
}

/// Bucket and round of a label.
fn parse_label([a, b, c, d, round @ ..]: [u8; LABEL_BYTES]) -> (u32, u64) {
    (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(round))
}

/// Name of a damaged message in an error. Its label may be damaged as well.
fn name_by_label(label: &[u8]) -> String {
    let (bucket, round) = parse_label(label.try_into().expect("a label of a parcel"));
    format!("bucket {bucket} of round {round}")
}

/// Writes each message of `leaving` until the connection is dropped.
fn send(leaving: &Receiver<SliceMessage>, out: &mut impl Write, (kind, mut seal): (SliceKind, Seal), bell: &Doorbell) -> io::Result<()> {
    loop {
        match leaving.recv_timeout(BEAT) {
            Ok(message) => message.write(out, kind, &mut seal)?,
            Err(RecvTimeoutError::Timeout) => seal.write(out, NOTHING, &[], &[])?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        out.flush()?;
        bell.ring();
    }
}

/// Passes each received message to `arriving` until the connection is dropped.
fn receive(
    arriving: &SyncSender<SliceMessage>,
    input: &mut impl Read,
    expected: (SliceKind, usize),
    mut seal: Seal,
    bell: &Doorbell,
) -> io::Result<()> {
    let mut buffers = SliceBuffers::default();
    loop {
        let Some(message) = SliceMessage::read(input, expected, &mut seal, &mut buffers)? else { continue };
        // Nobody takes it any more when the driver has ended.
        if arriving.send(message).is_err() {
            return Ok(());
        }
        bell.ring();
    }
}

impl SliceConnection {
    /// A connection over `connection` for messages of a kind, of at most so many bytes. `bell` rings when a place is free or a message has
    /// come; `lose` receives the error that ends the connection.
    ///
    /// # Errors
    /// Errors of the system, which has no thread or socket left.
    pub(crate) fn start(
        connection: SealedConnection,
        (kind, most): (SliceKind, usize),
        bell: Arc<Doorbell>,
        lose: impl Fn(&io::Error) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let ((out, leaving), (arriving, arrived)) = (mpsc::sync_channel::<SliceMessage>(WAITING), mpsc::sync_channel(WAITING));
        let ((mut input, opens), (output, seals)) = connection.split()?;
        let mut output = BufWriter::new(output);
        let (own_bell, own_lose) = (bell.clone(), lose.clone());
        let write = move || _ = send(&leaving, &mut output, (kind, seals), &own_bell).inspect_err(|e| own_lose(e));
        let read = move || _ = receive(&arriving, &mut input, (kind, most), opens, &bell).inspect_err(|e| lose(e));
        thread::Builder::new().name("send slices".into()).spawn(write)?;
        thread::Builder::new().name("take slices".into()).spawn(read)?;
        Ok(Self { out, arrived, next: None })
    }

    /// Queues a message if the connection has a free place; returns whether it had. The error of a connection that has ended is in the
    /// progress counters.
    pub(crate) fn try_send(&self, message: &SliceMessage) -> bool {
        self.out.try_send(message.clone()).is_ok()
    }

    /// The first message that has arrived and is not taken.
    pub(crate) fn first(&mut self) -> Option<&SliceMessage> {
        if self.next.is_none() {
            self.next = self.arrived.try_recv().ok();
        }
        self.next.as_ref()
    }

    /// Takes it.
    pub(crate) fn take(&mut self) -> Option<SliceMessage> {
        self.next.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::convert::Infallible;
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    proptest! {
        #[test]
        fn parcels_read_back_and_noise_takes_no_more_memory_than_a_slice(bucket: u32, round: u64, bytes: Vec<u8>, most in 0usize..200) {
            let (message, kind) = (SliceMessage { bucket, round, bytes: Arc::new(bytes) }, SliceKind::Weights);
            let mut wire = Vec::new();
            message.write(&mut wire, kind, &mut Seal::default()).unwrap();
            let read = |wire: &[u8], want| SliceMessage::read(&mut &*wire, want, &mut Seal::default(), &mut SliceBuffers::default());
            if message.bytes.len() <= most {
                prop_assert_eq!(read(&wire, (kind, most)).unwrap(), Some(message));
            } else {
                prop_assert_eq!(read(&wire, (kind, most)).unwrap_err().kind(), ErrorKind::InvalidData);
            }
            prop_assert_eq!(read(&wire, (SliceKind::Gradients, 200)).unwrap_err().kind(), ErrorKind::InvalidData);
            for end in 0..wire.len() {
                prop_assert!(read(&wire[..end], (kind, usize::MAX)).is_err());
            }
        }
    }

    #[test]
    fn memory_of_an_unused_slice_is_reused() {
        let mut buffers = SliceBuffers::default();
        let mut next = |byte: u8, length| {
            buffers.fill(length, |bytes| {
                bytes.fill(byte);
                Ok::<(), Infallible>(())
            })
        };
        let Ok(one) = next(1, 40);
        let Ok(two) = next(2, 40);
        let address = one.as_ptr();
        assert_ne!(address, two.as_ptr());
        drop(one);
        let Ok(shorter) = next(3, 30);
        assert_eq!((shorter.as_ptr(), &shorter[..]), (address, &[3; 30][..]));
        assert_eq!((next(4, 9).unwrap().len(), &two[..]), (9, &[2; 40][..]));
    }

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    fn within<T>(mut look: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < end, "in vain");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_connection_keeps_the_order_and_blocks_a_sender_that_is_ahead() {
        let ((one, other), (text, lost)) = (pair(), mpsc::channel());
        let lose = move |why: &io::Error| _ = text.send((why.kind(), why.to_string()));
        let connection = |stream| {
            SliceConnection::start(SealedConnection::bare(stream), (SliceKind::Gradients, 1 << 20), Arc::default(), lose.clone()).unwrap()
        };
        let (sends, mut takes) = (connection(one.try_clone().unwrap()), connection(other));
        let message = |round| SliceMessage { bucket: 3, round, bytes: Arc::new(vec![round as u8; 1 << 20]) };
        // Buffers of the system hold some; then there is no place.
        let mut sent = 0;
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(300) {
            if sends.try_send(&message(sent)) {
                (sent, since) = (sent + 1, Instant::now());
            }
            assert!(sent < 100, "nothing holds it back");
        }
        for round in 0..sent {
            assert_eq!(within(|| takes.first().cloned()), message(round));
            takes.take();
        }
        one.shutdown(std::net::Shutdown::Both).unwrap();
        let (kind, why) = lost.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(kind, ErrorKind::UnexpectedEof, "{why}");
    }

    /// The receiver notices a lost message even where none follows: the number of the next empty message is wrong.
    #[test]
    fn a_damaged_or_lost_message_ends_the_connection_before_it_is_taken() {
        let message = SliceMessage { bucket: 3, round: 5, bytes: Arc::new(vec![7; 1000]) };
        let mut seal = Seal::default();
        let mut next = |write: &dyn Fn(&mut Vec<u8>, &mut Seal)| {
            let mut wire = Vec::new();
            write(&mut wire, &mut seal);
            wire
        };
        let first = next(&|wire, seal| message.write(wire, SliceKind::Gradients, seal).unwrap());
        let nothing = next(&|wire, seal| seal.write(wire, NOTHING, &[], &[]).unwrap());
        let mut damaged = first.clone();
        damaged[500] ^= 4;
        for (wire, words) in [
            (&damaged, "the CRC-32C of the body of message 0, bucket 3 of round 5, differs"),
            (&nothing, "message 1 came in place of message 0"),
        ] {
            let ((mut one, other), (text, lost)) = (pair(), mpsc::channel());
            let lose = move |why: &io::Error| _ = text.send((why.kind(), why.to_string()));
            let mut connection =
                SliceConnection::start(SealedConnection::bare(other), (SliceKind::Gradients, 1000), Arc::default(), lose).unwrap();
            one.write_all(wire).unwrap();
            assert_eq!(lost.recv_timeout(Duration::from_secs(10)).unwrap(), (ErrorKind::InvalidData, words.to_string()));
            assert_eq!(connection.first(), None);
        }
    }
}
