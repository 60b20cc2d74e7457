//! Downloads one file into the cache's blobs. A download resumes where an earlier one stopped; the file is verified, and gets its final
//! name only when it is complete.

use super::client::{ATTEMPTS, HttpFailure, HubAnswer, HubClient, WaitLimits};
use super::listing::{ChecksumSoFar, RemoteFile};
use super::parts::{FileInParts, PartialFile, PartsState, partial_name};
use crate::disk::{Dir, FileKind, Lock, try_lock};
use crate::error::{Error, Result};
use crate::signals::StopFlag;
use nix::fcntl::OFlag;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const BLOCK_BYTES: usize = 256 << 10;
/// Interval at which a wait checks the stop flag.
pub(super) const NAP: Duration = Duration::from_millis(50);

/// Downloads the files of a repository into the cache's blobs.
pub(super) struct Fetcher {
    pub(super) client: Arc<HubClient>,
    pub(super) blobs: Dir,
    /// Directory of the lock files that all programs with this cache share. A lock prevents two simultaneous downloads of one file.
    pub(super) locks: Dir,
    pub(super) stop: StopFlag,
    /// Pause before the second attempt. It grows with each attempt that transferred nothing.
    pub(super) pause: Duration,
    /// Lines for the user that have not been printed yet.
    pub(super) messages: Mutex<Vec<String>>,
}

/// Measures the transfer rate of a file over all attempts and rejects a rate that is too low.
struct TransferRate {
    window: Duration,
    begun: Instant,
    /// Bytes received in the current window.
    come: u64,
}

impl TransferRate {
    fn new(window: Duration) -> Self {
        Self { window, begun: Instant::now(), come: 0 }
    }

    /// # Errors
    /// A description, if a window has ended with too few bytes.
    fn expect(&mut self) -> std::result::Result<(), String> {
        if self.begun.elapsed() < self.window {
            return Ok(());
        }
        let last = std::mem::replace(self, Self::new(self.window));
        let least = WaitLimits::WINDOW_BYTES;
        if last.come >= least {
            Ok(())
        } else {
            Err(format!("{} bytes came in {:?}, at least {least} were expected", last.come, last.window))
        }
    }
}

impl Fetcher {
    /// Downloads one part of `whole`. The call that completes the last part also creates the blob.
    ///
    /// # Errors
    /// `Resource` for an error of the hub, a wrong length or a wrong checksum; `Io`; `Interrupted`.
    pub(super) fn fetch(&self, whole: &FileInParts, part: usize) -> Result<()> {
        if self.is_here(whole)? {
            return Ok(());
        }
        if part == 0 || !whole.is_as_one() {
            let mut partial = self.open_partial(whole, part)?;
            self.complete(whole, &mut partial)?;
            let mut state = whole.state();
            state.is_resumed |= partial.is_resumed;
            if part == 0 {
                state.first = Some(partial);
            }
        }
        let mut state = whole.state();
        state.come += 1;
        if state.come == whole.parts().len() { self.finish(whole, &mut state) } else { Ok(()) }
    }

    /// Whether the blob exists already. The first call for a file checks this and takes the file's lock, so no other process downloads the
    /// file afterwards.
    fn is_here(&self, whole: &FileInParts) -> Result<bool> {
        let (file, mut state) = (&whole.file, whole.state());
        if !state.is_begun {
            let lock = self.lock(&format!("{}.lock", file.checksum.hex()))?;
            state.is_begun = true;
            state.is_here = self.blobs.kind(file.checksum.hex())? == Some(FileKind::File(file.bytes));
            if state.is_here {
                whole.count(0, file.bytes);
                return Ok(true);
            }
            state.lock = Some(lock);
            // Another program has downloaded more than the first part from the file's beginning.
            if self.held(&whole.name(0))? > whole.parts()[0].end {
                whole.take_as_one();
            }
        }
        Ok(state.is_here)
    }

    /// Joins the parts of a file, all of which are on disk, and creates the blob.
    fn finish(&self, whole: &FileInParts, state: &mut PartsState) -> Result<()> {
        let (file, blob) = (&whole.file, whole.file.checksum.hex());
        let Some(mut partial) = state.first.take() else { return Ok(()) };
        partial.range.end = file.bytes;
        for part in 1..whole.parts().len() {
            if !whole.is_as_one() {
                self.join(&mut partial, &whole.name(part))?;
            } else if self.blobs.kind(whole.name(part))?.is_some() {
                self.blobs.remove(whole.name(part))?;
            }
        }
        let mut is_resumed = state.is_resumed;
        loop {
            self.complete_alone(whole, &mut partial)?;
            let found = partial.checksum.take().map(ChecksumSoFar::finish).unwrap_or_default();
            if found == blob {
                partial.out.sync()?;
                self.blobs.rename(partial_name(file), blob)?;
                state.lock = None;
                return Ok(());
            }
            self.blobs.remove(partial_name(file))?;
            // The bytes that an earlier download left may belong to another file: download again without them.
            if !is_resumed {
                return Err(self.error(file, format!("its checksum is {found} instead of {blob}")));
            }
            is_resumed = false;
            whole.take_as_one();
            partial = self.begin(whole, 0, 0..file.bytes)?;
        }
    }

    /// Appends the part in the file `name` to the file's beginning.
    fn join(&self, partial: &mut PartialFile, name: &str) -> Result<()> {
        self.each_block(name, |block| partial.put(block))?;
        self.blobs.remove(name)
    }

    /// Calls `each` with every block of the file `name`. A missing file has no blocks.
    fn each_block(&self, name: &str, mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (Some(mut file), mut block) = (self.blobs.open_file(name)?, vec![0; BLOCK_BYTES]) else { return Ok(()) };
        loop {
            self.check_stop()?;
            match file.read(&mut block).map_err(|e| Error::io("read", self.blobs.join(name), e))? {
                0 => return Ok(()),
                read => each(&block[..read])?,
            }
        }
    }

    /// Size of the file `name` in bytes; 0 if it does not exist.
    fn held(&self, name: &str) -> Result<u64> {
        Ok(if let Some(FileKind::File(bytes)) = self.blobs.kind(name)? { bytes } else { 0 })
    }

    fn error(&self, file: &RemoteFile, cause: String) -> Error {
        Error::resource(format_args!("download {} from {}", file.name, self.client.endpoint()), cause)
    }

    fn check_stop(&self) -> Result<()> {
        check_stop(&self.stop)
    }

    /// Takes the lock `name`. Blocks until no other process or thread holds it.
    pub(super) fn lock(&self, name: &str) -> Result<File> {
        let path = self.locks.join(name);
        let file = self.locks.open_at(name, OFlag::O_RDWR | OFlag::O_CREAT).map_err(|e| Error::io("write", &path, e))?;
        while try_lock(&file).map_err(|e| Error::io("lock", &path, e))? == Lock::Taken {
            self.check_stop()?;
            thread::sleep(NAP);
        }
        Ok(file)
    }

    /// Opens the partial file that an earlier download left of a part, and adds its bytes to the checksum.
    fn open_partial(&self, whole: &FileInParts, part: usize) -> Result<PartialFile> {
        let (name, mut range) = (whole.name(part), whole.parts()[part].clone());
        if part == 0 && whole.is_as_one() {
            range.end = whole.file.bytes;
        }
        let held = self.blobs.kind(&name)?;
        if !matches!(held, Some(FileKind::File(bytes)) if bytes <= range.end - range.start) {
            return self.begin(whole, part, range);
        }
        let (out, left) = (self.blobs.append_file(&name)?, self.held(&name)?);
        let checksum = (part == 0).then(|| whole.file.checksum.begin(whole.file.bytes));
        let mut partial = PartialFile { out, at: range.start, range, checksum, is_resumed: true };
        match part {
            0 => self.each_block(&name, |block| {
                partial.count(block);
                Ok(())
            })?,
            _ => partial.at += left,
        }
        whole.count(partial.range.start, partial.at - partial.range.start);
        Ok(partial)
    }

    /// Starts a part with no bytes. Removes an existing partial file.
    fn begin(&self, whole: &FileInParts, part: usize, range: Range<u64>) -> Result<PartialFile> {
        let out = self.blobs.recreate_file(whole.name(part))?;
        if part == 0 {
            whole.forget();
        }
        let checksum = (part == 0).then(|| whole.file.checksum.begin(whole.file.bytes));
        Ok(PartialFile { out, at: range.start, range, checksum, is_resumed: false })
    }

    /// Downloads the missing bytes of a part. Stops early if the file has switched to a download in one piece.
    fn complete(&self, whole: &FileInParts, partial: &mut PartialFile) -> Result<()> {
        self.bring(whole, partial, &|partial| partial.range.start > 0 && whole.is_as_one())
    }

    /// Downloads the missing bytes of the whole file.
    fn complete_alone(&self, whole: &FileInParts, partial: &mut PartialFile) -> Result<()> {
        self.bring(whole, partial, &|_| false)
    }

    /// Downloads the missing bytes until `ends` returns true. Retries without limit as long as attempts transfer bytes and [`TransferRate`]
    /// accepts the rate. Gives up after [`ATTEMPTS`] failed attempts in a row; progress restarts the count.
    fn bring(&self, whole: &FileInParts, partial: &mut PartialFile, ends: &dyn Fn(&PartialFile) -> bool) -> Result<()> {
        let (file, mut pace, mut in_vain) = (&whole.file, TransferRate::new(self.client.patience.window), 0);
        while partial.at < partial.range.end && !ends(partial) {
            self.check_stop()?;
            let before = partial.at;
            match self.attempt(whole, partial, &mut pace)? {
                Ok(()) => {}
                Err(HttpFailure::Lasting(cause)) => return Err(self.error(file, cause)),
                Err(HttpFailure::Passing(cause)) => {
                    in_vain = if partial.at > before { 1 } else { in_vain + 1 };
                    if in_vain == ATTEMPTS {
                        return Err(self.error(file, format!("{cause}, {ATTEMPTS} times in a row; {}", partial.kept())));
                    }
                    pace.expect().map_err(|cause| self.error(file, format!("{cause}; {}", partial.kept())))?;
                    sleep(&self.stop, self.pause * in_vain)?;
                }
            }
        }
        Ok(())
    }

    /// Sends one request and stores its answer. The outer error is local, the inner one is from the hub.
    fn attempt(
        &self,
        whole: &FileInParts,
        partial: &mut PartialFile,
        pace: &mut TransferRate,
    ) -> Result<std::result::Result<(), HttpFailure>> {
        let file = &whole.file;
        let received = partial.at..partial.range.end;
        let mut answer = match self.client.get(&whole.path, received.start, (received.end < file.bytes).then_some(received.end)) {
            Ok(answer) => answer,
            Err(failure) => return Ok(Err(failure)),
        };
        if received != (0..file.bytes) && answer.status() == 200 {
            if whole.parts().len() > 1 {
                self.take_as_one(whole);
            }
            if partial.range.start > 0 {
                return Ok(Ok(()));
            }
            // The answer is the whole file.
            *partial = self.begin(whole, 0, 0..file.bytes)?;
        }
        if let Err(cause) = expect_range(file, partial.at..partial.range.end, &answer) {
            return Ok(Err(HttpFailure::Lasting(cause)));
        }
        let (mut reader, mut block) = (answer.body_mut().as_reader(), vec![0; BLOCK_BYTES]);
        while partial.at < partial.range.end {
            self.check_stop()?;
            if let Err(cause) = pace.expect() {
                return Ok(Err(HttpFailure::Lasting(format!("{cause}; {}", partial.kept()))));
            }
            let (come, bytes) = (partial.come(), partial.bytes());
            let read = match reader.read(&mut block) {
                Ok(0) => return Ok(Err(HttpFailure::Passing(format!("it ends after {come} of {bytes} bytes")))),
                Ok(read) => read,
                Err(e) => return Ok(Err(HttpFailure::Passing(e.to_string()))),
            };
            if read as u64 > bytes - come {
                return Ok(Err(HttpFailure::Lasting(format!("it is longer than its {bytes} bytes"))));
            }
            partial.put(&block[..read])?;
            whole.count(partial.range.start, read as u64);
            pace.come += read as u64;
        }
        Ok(Ok(()))
    }

    /// Switches the file to a download in one piece, because the hub answers a request for a range with the whole file.
    fn take_as_one(&self, whole: &FileInParts) {
        if !whole.take_as_one() {
            let messages = format!("{} is downloaded in one stream: the server does not support ranges", whole.file.name);
            self.messages.lock().unwrap_or_else(PoisonError::into_inner).push(messages);
        }
    }
}

pub(super) fn check_stop(stop: &StopFlag) -> Result<()> {
    if stop.is_set() { Err(interrupted()) } else { Ok(()) }
}

/// Sleeps for `pause`, unless the stop flag is set.
pub(super) fn sleep(stop: &StopFlag, pause: Duration) -> Result<()> {
    let mut left = pause;
    while !left.is_zero() {
        check_stop(stop)?;
        let nap = left.min(NAP);
        thread::sleep(nap);
        left -= nap;
    }
    Ok(())
}

pub(super) fn interrupted() -> Error {
    Error::Interrupted("files were being downloaded; the next run continues the download".into())
}

/// Checks that the headers of `answer` agree with the requested range of `file`. Headers that are absent are not checked, except for
/// `Content-Range` of a partial request.
fn expect_range(file: &RemoteFile, received: Range<u64>, answer: &HubAnswer) -> std::result::Result<(), String> {
    let header = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
    if received != (0..file.bytes) {
        let range = header("Content-Range").unwrap_or_default();
        let expected = format!("bytes {}-{}/{}", received.start, received.end - 1, file.bytes);
        if range != expected {
            return Err(format!("it answers {range:?} where {expected:?} was asked for"));
        }
    }
    let expected = received.end - received.start;
    match header("Content-Length").and_then(|length| length.parse::<u64>().ok()) {
        Some(length) if length != expected => Err(format!("{length} bytes come, {expected} were expected")),
        _ => Ok(()),
    }
}
