//! Messages between a sandbox and its parent: a length and so many bytes over a socket, which may take open descriptors along.

use super::process::received;
use crate::signals::StopFlag;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, send, sendmsg};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How often a parent that waits looks whether it was asked to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Memory that is taken for a message before its bytes are there.
const AHEAD_BYTES: usize = 1 << 20;

/// One end of a connection.
pub(super) struct SandboxChannel(UnixStream);

/// Why there is no message.
#[derive(Debug)]
pub(super) enum NoMessage {
    /// The other end is gone, or does not answer.
    Gone,
    /// Somebody asked to stop.
    Stopped,
}

impl SandboxChannel {
    /// The parent's end, and the child's.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (parent, child) = UnixStream::pair()?;
        parent.set_read_timeout(Some(LOOK_EVERY))?;
        parent.set_write_timeout(Some(LOOK_EVERY))?;
        Ok((Self(parent), child.into()))
    }

    /// The child's end, in the child.
    pub(super) fn of(socket: OwnedFd) -> Self {
        Self(socket.into())
    }

    /// The other end has nothing more to wait for.
    pub(super) fn close(&self) {
        // A connection that is gone is closed.
        let _ = self.0.shutdown(Shutdown::Both);
    }

    /// Sends a message, unless `stop` is set before it is through.
    pub(super) fn send(&mut self, message: &[u8], stop: &StopFlag) -> Result<(), NoMessage> {
        self.send_with(message, &[], stop)
    }

    /// Sends a message and `descriptors`.
    pub(super) fn send_with(&mut self, message: &[u8], descriptors: &[BorrowedFd<'_>], stop: &StopFlag) -> Result<(), NoMessage> {
        let length = u32::try_from(message.len()).map_err(|_| NoMessage::Gone)?.to_le_bytes();
        let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let attached = if raw.is_empty() { &[][..] } else { &rights[..] };
        // Descriptors go with the first byte.
        let first = || sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(&length[..1])], attached, MsgFlags::MSG_NOSIGNAL, None);
        patiently(stop, || first().map_err(io::Error::from))?;
        self.send_bytes(&length[1..], stop)?;
        self.send_bytes(message, stop)
    }

    fn send_bytes(&mut self, mut bytes: &[u8], stop: &StopFlag) -> Result<(), NoMessage> {
        while !bytes.is_empty() {
            let sent = patiently(stop, || send(self.0.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL).map_err(io::Error::from))?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// The next message, unless `stop` is set before it is here.
    pub(super) fn receive(&mut self, stop: &StopFlag) -> Result<Vec<u8>, NoMessage> {
        self.receive_with(stop).map(|(message, _)| message)
    }

    /// The next message and the descriptors that came along.
    pub(super) fn receive_with(&mut self, stop: &StopFlag) -> Result<(Vec<u8>, Vec<OwnedFd>), NoMessage> {
        let mut length = [0; 4];
        let (first, rest) = length.split_at_mut(1);
        let descriptors = patiently(stop, || receive_byte(&self.0, first))?;
        let mut rest = &mut rest[..];
        while !rest.is_empty() {
            let read = patiently(stop, || some(self.0.read(rest)))?;
            rest = &mut rest[read..];
        }
        let length = u32::from_le_bytes(length) as usize;
        let mut message = Vec::with_capacity(length.min(AHEAD_BYTES));
        while message.len() < length {
            // Bytes that were read before a timeout are in the message, and another attempt reads that many fewer.
            let attempt = || {
                let left = (length - message.len()) as u64;
                some((&self.0).take(left).read_to_end(&mut message))
            };
            patiently(stop, attempt)?;
        }
        Ok((message, descriptors))
    }
}

/// No bytes are the end of a connection.
fn some(read: io::Result<usize>) -> io::Result<usize> {
    if let Ok(0) = read { Err(ErrorKind::UnexpectedEof.into()) } else { read }
}

/// One byte, and the descriptors that came along.
fn receive_byte(socket: &UnixStream, byte: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let mut control = nix::cmsg_space!([RawFd; 2]);
    let mut parts = [IoSliceMut::new(byte)];
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC)?;
    some(Ok(message.bytes))?;
    let rights = |control| if let ControlMessageOwned::ScmRights(descriptors) = control { descriptors } else { Vec::new() };
    Ok(message.cmsgs()?.flat_map(rights).map(received).collect())
}

/// Calls `attempt` until it does not only wait.
fn patiently<T>(stop: &StopFlag, mut attempt: impl FnMut() -> io::Result<T>) -> Result<T, NoMessage> {
    loop {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(e) if [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted].contains(&e.kind()) => {}
            Err(_) => return Err(NoMessage::Gone),
        }
        if stop.is_set() {
            return Err(NoMessage::Stopped);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::thread;

    /// The peer pauses in the middle of a message for longer than a read waits. The next message lies behind it in the socket.
    #[test]
    fn a_message_that_comes_in_pieces_ends_where_the_next_one_begins() {
        let (mut channel, peer) = SandboxChannel::pair().unwrap();
        let messages = [vec![1; 1000], vec![2; 500]];
        let wire: Vec<u8> = messages.iter().flat_map(|message| [&(message.len() as u32).to_le_bytes()[..], message].concat()).collect();
        let writer = thread::spawn(move || {
            let mut peer = UnixStream::from(peer);
            for piece in [&wire[..2], &wire[2..300], &wire[300..]] {
                peer.write_all(piece).unwrap();
                thread::sleep(3 * LOOK_EVERY);
            }
        });
        for message in &messages {
            assert_eq!(&channel.receive(&StopFlag::default()).unwrap(), message);
        }
        writer.join().unwrap();
    }
}
