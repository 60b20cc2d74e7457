//! What slices of gradients and weights travel on between two ranks of two processes: a connection of its own for each kind, so that data holds up no word,
//! and a thread for each direction, so that no driver waits. What does not fit into the few places of a lane waits on the other side: the
//! network's own flow control is the only one.

use super::notice::array;
use crate::host::doorbell::Doorbell;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

/// Slices of each kind and direction that pass through host memory at once, for each other rank.
pub(crate) const PLACES: usize = 2;
/// Parcels that wait at each end of a direction.
const WAITING: usize = 2;

/// Slices in host memory, at most, on their way over so many lanes: in two directions; in places, in lanes, and one that is read or written.
pub(crate) fn slices_under_way(lanes: usize) -> usize {
    2 * lanes * (PLACES + WAITING + 1)
}

const HEAD_BYTES: usize = 16;

/// A slice under way.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Parcel {
    pub(crate) bucket: u32,
    /// Of gradients the round, counted from the first step; of weights the version or the fetch, in one count.
    pub(crate) round: u64,
    pub(crate) bytes: Arc<Vec<u8>>,
}

/// A lane for one kind, to and from one rank.
pub(crate) struct ParcelLane {
    out: SyncSender<Parcel>,
    arrived: Receiver<Parcel>,
    next: Option<Parcel>,
}

/// The lanes to and from one rank of another process.
pub(crate) struct RankLanes {
    pub(crate) grads: ParcelLane,
    /// To and from a namesake alone.
    pub(crate) weights: Option<ParcelLane>,
}

/// Why a connection ended, in words.
pub(super) fn ended(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => "it ended before the run was over: its connection is closed".into(),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
            format!("it ended before the run was over, or its network did: {error}")
        }
        _ => format!("its connection failed: {error}"),
    }
}

impl Parcel {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&self.bucket.to_le_bytes());
        head[4..12].copy_from_slice(&self.round.to_le_bytes());
        head[12..].copy_from_slice(&(self.bytes.len() as u32).to_le_bytes());
        out.write_all(&head)?;
        out.write_all(&self.bytes)
    }

    /// Reads one of at most `most` bytes.
    fn read(input: &mut impl Read, most: usize) -> io::Result<Self> {
        let (bucket, round) = (u32::from_le_bytes(array(input)?), u64::from_le_bytes(array(input)?));
        let length = u32::from_le_bytes(array(input)?) as usize;
        if length > most {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("a slice of {length} bytes, of at most {most}")));
        }
        let mut bytes = vec![0; length];
        input.read_exact(&mut bytes)?;
        Ok(Self { bucket, round, bytes: Arc::new(bytes) })
    }
}

impl ParcelLane {
    /// A lane over `stream` for parcels of at most `most` bytes. `bell` rings when a place is free or a parcel has come; `lose` hears why the
    /// lane ended.
    ///
    /// # Errors
    /// Those of the system, which has no thread or socket left.
    pub(crate) fn start(
        stream: TcpStream,
        most: usize,
        bell: Arc<Doorbell>,
        lose: impl Fn(&str) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let ((out, leaving), (arriving, arrived)) = (mpsc::sync_channel::<Parcel>(WAITING), mpsc::sync_channel(WAITING));
        let (mut input, mut output) = (stream.try_clone()?, stream);
        let (own_bell, own_lose) = (bell.clone(), lose.clone());
        let write = move || {
            for parcel in leaving {
                if let Err(error) = parcel.write(&mut output) {
                    return own_lose(&ended(&error));
                }
                own_bell.ring();
            }
        };
        let read = move || {
            loop {
                let parcel = match Parcel::read(&mut input, most) {
                    Ok(parcel) => parcel,
                    Err(error) => return lose(&ended(&error)),
                };
                // Nobody takes it any more when the driver has ended.
                if arriving.send(parcel).is_err() {
                    return;
                }
                bell.ring();
            }
        };
        thread::Builder::new().name("send slices".into()).spawn(write)?;
        thread::Builder::new().name("take slices".into()).spawn(read)?;
        Ok(Self { out, arrived, next: None })
    }

    /// Sends a parcel on its way, if there is a place for it. A lane that has ended has said why on the board.
    pub(crate) fn try_send(&self, parcel: &Parcel) -> bool {
        self.out.try_send(parcel.clone()).is_ok()
    }

    /// The parcel that came first of those that nobody has taken.
    pub(crate) fn first(&mut self) -> Option<&Parcel> {
        if self.next.is_none() {
            self.next = self.arrived.try_recv().ok();
        }
        self.next.as_ref()
    }

    /// Takes it.
    pub(crate) fn take(&mut self) -> Option<Parcel> {
        self.next.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    proptest! {
        #[test]
        fn parcels_read_back_and_noise_takes_no_more_memory_than_a_slice(bucket: u32, round: u64, bytes: Vec<u8>, most in 0usize..200) {
            let parcel = Parcel { bucket, round, bytes: Arc::new(bytes) };
            let mut wire = Vec::new();
            parcel.write(&mut wire).unwrap();
            let read = Parcel::read(&mut &wire[..], most);
            if parcel.bytes.len() <= most {
                prop_assert_eq!(read.unwrap(), parcel);
            } else {
                prop_assert_eq!(read.unwrap_err().kind(), ErrorKind::InvalidData);
            }
            for end in 0..wire.len() {
                prop_assert!(Parcel::read(&mut &wire[..end], usize::MAX).is_err());
            }
        }
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
    fn a_lane_keeps_the_order_and_holds_back_who_sends_too_much() {
        let ((one, other), (told, lost)) = (pair(), mpsc::channel());
        let lose = move |why: &str| _ = told.send(why.to_string());
        let lane = |stream| ParcelLane::start(stream, 1 << 20, Arc::default(), lose.clone()).unwrap();
        let (sends, mut takes) = (lane(one.try_clone().unwrap()), lane(other));
        let parcel = |round| Parcel { bucket: 3, round, bytes: Arc::new(vec![round as u8; 1 << 20]) };
        // Buffers of the system hold some; then there is no place.
        let mut sent = 0;
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(300) {
            if sends.try_send(&parcel(sent)) {
                (sent, since) = (sent + 1, Instant::now());
            }
            assert!(sent < 100, "nothing holds it back");
        }
        for round in 0..sent {
            assert_eq!(within(|| takes.first().cloned()), parcel(round));
            takes.take();
        }
        one.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(lost.recv_timeout(Duration::from_secs(10)).unwrap().contains("ended before the run was over"));
    }
}
