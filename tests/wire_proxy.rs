//! A proxy between two processes of a run that damages one message. It listens on its own address, forwards all messages, and changes,
//! drops, duplicates, reorders, inserts, delays or truncates the selected one.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Bytes of each side's handshake messages, in order: those of the connecting side, then those of the accepting side.
const HANDSHAKE: [[usize; 2]; 2] = [[37, 32], [56, 32]];
/// Bytes of the head of a message. The length of the body is at its start, and the kind behind the length and the sequence number.
const HEAD_BYTES: usize = 13;
/// Bytes of the checksum behind the body.
const SUM_BYTES: usize = 4;
const KIND_AT: usize = 8;

/// The subject of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    /// Proofs of the run token.
    Handshake,
    /// Rendezvous and agreement.
    Rendezvous,
    /// Heartbeats.
    Alive,
    Gradients,
    Weights,
    Notices,
    Orders,
    /// The end of the run.
    End,
}

pub const PHASES: [Phase; 8] =
    [Phase::Handshake, Phase::Rendezvous, Phase::Alive, Phase::Gradients, Phase::Weights, Phase::Notices, Phase::Orders, Phase::End];

/// Damage to a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Harm {
    /// One byte is changed.
    Flip,
    Drop,
    Double,
    /// The message arrives after the next one.
    Move,
    /// Bytes that no process sent are inserted before it.
    Insert,
    /// The connection ends in the middle of it.
    Cut,
    /// The message arrives later, the first part of it byte by byte.
    Delay,
}

pub const HARMS: [Harm; 7] = [Harm::Flip, Harm::Drop, Harm::Double, Harm::Move, Harm::Insert, Harm::Cut, Harm::Delay];

/// The damage and the damaged message: the `nth` of a phase, starting at 0. `choice` selects the byte.
#[derive(Clone, Copy, Debug)]
pub struct Plot {
    pub phase: Phase,
    pub harm: Harm,
    pub nth: u64,
    pub choice: u64,
}

/// State shared by the threads of a proxy.
struct Harmer {
    plot: Plot,
    /// Number of messages of the phase so far.
    seen: AtomicU64,
    is_done: AtomicBool,
}

/// The proxy, which ends with the test.
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
                // A connection before process 0 listens is refused, as without a proxy.
                if let Ok(far) = TcpStream::connect(("127.0.0.1", port)) {
                    join(&near, &far, &shared);
                }
            }
        });
        Self { port: own, harmer }
    }

    /// Whether the selected message occurred.
    pub fn has_struck(&self) -> bool {
        self.harmer.is_done.load(Ordering::Relaxed)
    }
}

/// Forwards the messages of both sides.
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
    /// The purpose of the connection, once the connecting side has sent it.
    channel: Arc<AtomicU64>,
    harmer: Arc<Harmer>,
    from: TcpStream,
    to: TcpStream,
    /// The previous message.
    last: Vec<u8>,
    /// A message that is held back until the next one.
    held: Option<Vec<u8>>,
}

impl Way {
    fn run(mut self) {
        // When one side closes, the whole connection ends.
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

    /// Reads the rest of a message. Its first bytes are in `message`.
    fn read(&mut self, mut message: Vec<u8>, bytes: usize) -> io::Result<Vec<u8>> {
        let start = message.len();
        message.resize(bytes, 0);
        self.from.read_exact(&mut message[start..])?;
        Ok(message)
    }

    /// The subject of a message of `kind`, from the numbers of channels and topics.
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

    /// Forwards a message, damaged if it is the selected one.
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
