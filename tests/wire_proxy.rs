//! A network between two processes of a run that does harm to one message: it stands at an address of its own, hands on what the processes say to
//! each other, and changes, loses, doubles, moves, inserts, delays or cuts the message that it was told to.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Bytes of each side's part of a handshake, which come one after the other: those of the side that connects, and of the other one.
const HANDSHAKE: [[usize; 2]; 2] = [[37, 32], [56, 32]];
/// Bytes of the head of a message: its length lies at the start, its kind behind length and number.
const HEAD_BYTES: usize = 13;
/// Bytes of the checksum behind the body.
const SUM_BYTES: usize = 4;
const KIND_AT: usize = 8;

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    /// Both prove that they have the run's token.
    Handshake,
    /// They meet, and agree on what they do.
    Rendezvous,
    /// They live.
    Alive,
    Gradients,
    Weights,
    Notices,
    Orders,
    /// The run is over.
    End,
}

pub const PHASES: [Phase; 8] =
    [Phase::Handshake, Phase::Rendezvous, Phase::Alive, Phase::Gradients, Phase::Weights, Phase::Notices, Phase::Orders, Phase::End];

/// What happens to a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Harm {
    /// A byte of it is another one.
    Flip,
    Drop,
    Double,
    /// It comes behind the next one.
    Move,
    /// Something stands before it that nobody has sent.
    Insert,
    /// The connection ends in the middle of it.
    Cut,
    /// It comes later, a byte at a time at first.
    Delay,
}

pub const HARMS: [Harm; 7] = [Harm::Flip, Harm::Drop, Harm::Double, Harm::Move, Harm::Insert, Harm::Cut, Harm::Delay];

/// The harm that is done, and to which message: the `nth` of a phase, from 0. `choice` decides the byte.
#[derive(Clone, Copy, Debug)]
pub struct Plot {
    pub phase: Phase,
    pub harm: Harm,
    pub nth: u64,
    pub choice: u64,
}

/// What the threads of a proxy share.
struct Harmer {
    plot: Plot,
    /// Messages of the phase so far.
    seen: AtomicU64,
    is_done: AtomicBool,
}

/// See above. It ends with the test.
pub struct WireProxy {
    pub port: u16,
    harmer: Arc<Harmer>,
}

impl WireProxy {
    /// A proxy to `port` of this machine.
    pub fn to(port: u16, plot: Plot) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().port();
        let harmer = Arc::new(Harmer { plot, seen: AtomicU64::new(0), is_done: AtomicBool::new(false) });
        let shared = harmer.clone();
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                // Whoever connects before process 0 listens is refused, as by the network itself.
                if let Ok(far) = TcpStream::connect(("127.0.0.1", port)) {
                    join(&near, &far, &shared);
                }
            }
        });
        Self { port: own, harmer }
    }

    /// Whether there was such a message.
    pub fn has_struck(&self) -> bool {
        self.harmer.is_done.load(Ordering::Relaxed)
    }
}

/// Hands on what both sides say.
fn join(near: &TcpStream, far: &TcpStream, harmer: &Arc<Harmer>) {
    let channel = Arc::new(AtomicU64::new(0));
    for (side, from, to) in [(0, near, far), (1, far, near)] {
        let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { return };
        let _ = to.set_nodelay(true);
        let way = Way { side, channel: channel.clone(), harmer: harmer.clone(), from, to, last: Vec::new(), held: None };
        thread::spawn(move || way.run());
    }
}

/// One direction of a connection.
struct Way {
    side: usize,
    /// What the connection is for, once the side that connects has said so.
    channel: Arc<AtomicU64>,
    harmer: Arc<Harmer>,
    from: TcpStream,
    to: TcpStream,
    /// The message before.
    last: Vec<u8>,
    /// A message that waits for the next one.
    held: Option<Vec<u8>>,
}

impl Way {
    fn run(mut self) {
        // A side that closes ends the connection.
        let _ = self.hand_on();
        for stream in [&self.from, &self.to] {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn hand_on(&mut self) -> io::Result<()> {
        for bytes in HANDSHAKE[self.side] {
            let message = self.read(Vec::new(), bytes)?;
            if self.side == 0 && bytes == HANDSHAKE[0][0] {
                self.channel.store(u64::from(message[8]), Ordering::Relaxed);
            }
            self.pass(message, Phase::Handshake)?;
        }
        loop {
            let head = self.read(Vec::new(), HEAD_BYTES)?;
            let (length, kind) = (u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize, head[KIND_AT]);
            let message = self.read(head, HEAD_BYTES + length + SUM_BYTES)?;
            let phase = self.phase(kind);
            self.pass(message, phase)?;
        }
    }

    /// The next message, of which some bytes are here.
    fn read(&mut self, mut message: Vec<u8>, bytes: usize) -> io::Result<Vec<u8>> {
        let start = message.len();
        message.resize(bytes, 0);
        self.from.read_exact(&mut message[start..])?;
        Ok(message)
    }

    /// What a message of `kind` is about, by the numbers of connections and topics.
    fn phase(&self, kind: u8) -> Phase {
        match (self.channel.load(Ordering::Relaxed), kind) {
            (0, 0) | (1.., 0) => Phase::Alive,
            (0, 1 | 19 | 20) => Phase::Rendezvous,
            (0, 3) => Phase::End,
            (0, 13) => Phase::Orders,
            (0, _) => Phase::Notices,
            (_, 1) => Phase::Gradients,
            (_, _) => Phase::Weights,
        }
    }

    /// Hands on a message, or what becomes of it.
    fn pass(&mut self, message: Vec<u8>, phase: Phase) -> io::Result<()> {
        let Harmer { plot, seen, is_done } = &*self.harmer;
        let is_meant = phase == plot.phase && seen.fetch_add(1, Ordering::Relaxed) == plot.nth;
        if !is_meant {
            self.to.write_all(&message)?;
            self.last.clone_from(&message);
            return self.held.take().map_or(Ok(()), |held| self.to.write_all(&held));
        }
        is_done.store(true, Ordering::Relaxed);
        let plot = *plot;
        self.harm(message, plot)
    }

    fn harm(&mut self, mut message: Vec<u8>, Plot { harm, choice, .. }: Plot) -> io::Result<()> {
        match harm {
            Harm::Flip => {
                let at = choice as usize % message.len();
                message[at] ^= ((choice >> 32) as u8).max(1);
            }
            Harm::Drop => return Ok(()),
            Harm::Double => message.extend_from_within(..),
            Harm::Move => {
                self.held = Some(message);
                return Ok(());
            }
            Harm::Insert => {
                let noise: Vec<u8> = (0..choice % 60 + 1).map(|nth| (choice.rotate_left(nth as u32) ^ nth) as u8).collect();
                let repeats = choice >> 63 == 1 && !self.last.is_empty();
                self.to.write_all(if repeats { &self.last } else { &noise })?;
            }
            Harm::Cut => {
                self.to.write_all(&message[..message.len() / 2])?;
                return Err(ErrorKind::ConnectionAborted.into());
            }
            Harm::Delay => {
                let (slow, rest) = message.split_at(message.len().min(40));
                for byte in slow {
                    self.to.write_all(&[*byte])?;
                    thread::sleep(Duration::from_millis(5));
                }
                return self.to.write_all(rest);
            }
        }
        self.to.write_all(&message)
    }
}
