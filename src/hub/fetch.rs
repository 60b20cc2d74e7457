//! One file into the cache's blobs: resumed where it stopped, checked, and given its name only when it is whole.

use super::client::{ATTEMPTS, HttpFailure, HubAnswer, HubClient};
use super::listing::{ChecksumSoFar, RemoteFile};
use crate::disk::{Dir, FileKind, Lock, OutFile, try_lock};
use crate::error::{Error, Result};
use crate::signals::StopFlag;
use nix::fcntl::OFlag;
use std::fs::File;
use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const BLOCK_BYTES: usize = 256 << 10;
/// How long a wait goes on before it looks whether to stop.
const NAP: Duration = Duration::from_millis(50);

/// Where files of a repository go, and who watches.
pub(super) struct Fetcher {
    pub(super) client: HubClient,
    pub(super) blobs: Dir,
    /// Of all that use the cache: a file is downloaded once.
    pub(super) locks: Dir,
    pub(super) stop: StopFlag,
    /// Bytes that are here.
    pub(super) done: AtomicU64,
    /// Grows with each attempt that brought nothing.
    pub(super) pause: Duration,
}

/// A file that is not whole yet.
struct PartialFile {
    out: OutFile,
    bytes: u64,
    checksum: ChecksumSoFar,
    /// Whether it holds bytes of an earlier download.
    is_resumed: bool,
}

impl Fetcher {
    /// Sees to it that the blob of `file`, which lies at `path` on the hub, is here.
    ///
    /// # Errors
    /// `Resource` for what the hub answers, for a wrong length or checksum; `Io`; `Interrupted`.
    pub(super) fn fetch(&self, file: &RemoteFile, path: &str) -> Result<()> {
        let blob = file.checksum.hex();
        let _lock = self.lock(&format!("{blob}.lock"))?;
        if self.blobs.kind(blob)? == Some(FileKind::File(file.bytes)) {
            self.done.fetch_add(file.bytes, Ordering::Relaxed);
            return Ok(());
        }
        loop {
            let mut partial = self.open_partial(file)?;
            self.complete(file, path, &mut partial)?;
            let PartialFile { out, checksum, is_resumed, .. } = partial;
            let found = checksum.finish();
            if found == blob {
                out.sync()?;
                return self.blobs.rename(partial_name(file), blob);
            }
            self.blobs.remove(partial_name(file))?;
            self.done.fetch_sub(file.bytes, Ordering::Relaxed);
            // What lay there may have been of another file: once more, without it.
            if !is_resumed {
                return Err(self.error(file, format!("its checksum is {found} instead of {blob}")));
            }
        }
    }

    fn error(&self, file: &RemoteFile, cause: String) -> Error {
        Error::resource(format_args!("download {} from {}", file.name, self.client.endpoint()), cause)
    }

    fn go_on(&self) -> Result<()> {
        go_on(&self.stop)
    }

    /// Waits until nobody else has the lock `name`.
    pub(super) fn lock(&self, name: &str) -> Result<File> {
        let path = self.locks.join(name);
        let file = self.locks.open_at(name, OFlag::O_RDWR | OFlag::O_CREAT).map_err(|e| Error::io("write", &path, e))?;
        while try_lock(&file).map_err(|e| Error::io("lock", &path, e))? == Lock::Taken {
            self.go_on()?;
            thread::sleep(NAP);
        }
        Ok(file)
    }

    /// What an earlier download left, added up.
    fn open_partial(&self, file: &RemoteFile) -> Result<PartialFile> {
        let name = partial_name(file);
        if !matches!(self.blobs.kind(&name)?, Some(FileKind::File(bytes)) if bytes <= file.bytes) {
            return self.begin(file);
        }
        let (out, mut left) = (self.blobs.append_file(&name)?, self.blobs.open_file(&name)?);
        let mut partial = PartialFile { out, bytes: 0, checksum: file.checksum.begin(file.bytes), is_resumed: true };
        let mut block = vec![0; BLOCK_BYTES];
        while let Some(left) = &mut left {
            self.go_on()?;
            let read = left.read(&mut block).map_err(|e| Error::io("read", self.blobs.join(&name), e))?;
            if read == 0 {
                break;
            }
            partial.bytes += read as u64;
            partial.checksum.update(&block[..read]);
        }
        self.done.fetch_add(partial.bytes, Ordering::Relaxed);
        Ok(partial)
    }

    /// Nothing of the file; what is there goes.
    fn begin(&self, file: &RemoteFile) -> Result<PartialFile> {
        let out = self.blobs.recreate_file(partial_name(file))?;
        Ok(PartialFile { out, bytes: 0, checksum: file.checksum.begin(file.bytes), is_resumed: false })
    }

    /// Brings what is missing, in as many attempts as it takes while each brings something.
    fn complete(&self, file: &RemoteFile, path: &str, partial: &mut PartialFile) -> Result<()> {
        let mut in_vain = 0;
        while partial.bytes < file.bytes {
            self.go_on()?;
            let before = partial.bytes;
            match self.attempt(file, path, partial)? {
                Ok(()) => {}
                Err(HttpFailure::Lasting(cause)) => return Err(self.error(file, cause)),
                Err(HttpFailure::Passing(cause)) => {
                    in_vain = if partial.bytes > before { 1 } else { in_vain + 1 };
                    if in_vain == ATTEMPTS {
                        let cause = format!(
                            "{cause}, {ATTEMPTS} times in a row; {} of {} bytes are kept for the next run",
                            partial.bytes, file.bytes
                        );
                        return Err(self.error(file, cause));
                    }
                    sleep(&self.stop, self.pause * in_vain)?;
                }
            }
        }
        Ok(())
    }

    /// One request, and what it brings. The outer error is this machine's, the inner one the hub's.
    fn attempt(&self, file: &RemoteFile, path: &str, partial: &mut PartialFile) -> Result<std::result::Result<(), HttpFailure>> {
        let mut answer = match self.client.get(path, partial.bytes) {
            Ok(answer) => answer,
            Err(failure) => return Ok(Err(failure)),
        };
        if partial.bytes > 0 && answer.status() == 200 {
            // The whole file comes.
            self.done.fetch_sub(partial.bytes, Ordering::Relaxed);
            *partial = self.begin(file)?;
        }
        if let Err(cause) = expect_rest(file, partial.bytes, &answer) {
            return Ok(Err(HttpFailure::Lasting(cause)));
        }
        let (mut reader, mut block) = (answer.body_mut().as_reader(), vec![0; BLOCK_BYTES]);
        while partial.bytes < file.bytes {
            self.go_on()?;
            let read = match reader.read(&mut block) {
                Ok(0) => return Ok(Err(HttpFailure::Passing(format!("it ends after {} of {} bytes", partial.bytes, file.bytes)))),
                Ok(read) => read,
                Err(e) => return Ok(Err(HttpFailure::Passing(e.to_string()))),
            };
            if read as u64 > file.bytes - partial.bytes {
                return Ok(Err(HttpFailure::Lasting(format!("it is longer than its {} bytes", file.bytes))));
            }
            partial.out.write(&block[..read])?;
            partial.checksum.update(&block[..read]);
            partial.bytes += read as u64;
            self.done.fetch_add(read as u64, Ordering::Relaxed);
        }
        Ok(Ok(()))
    }
}

fn go_on(stop: &StopFlag) -> Result<()> {
    if stop.is_set() { Err(interrupted()) } else { Ok(()) }
}

/// Sleeps so long, unless it shall stop.
pub(super) fn sleep(stop: &StopFlag, pause: Duration) -> Result<()> {
    let mut left = pause;
    while !left.is_zero() {
        go_on(stop)?;
        let nap = left.min(NAP);
        thread::sleep(nap);
        left -= nap;
    }
    Ok(())
}

pub(super) fn interrupted() -> Error {
    Error::Interrupted("files were being downloaded; the next run goes on with them".into())
}

/// As `huggingface_hub` calls it.
pub(super) fn partial_name(file: &RemoteFile) -> String {
    format!("{}.incomplete", file.checksum.hex())
}

/// Whether `answer` is the rest of `file` from byte `from` on, as far as it says.
fn expect_rest(file: &RemoteFile, from: u64, answer: &HubAnswer) -> std::result::Result<(), String> {
    let header = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
    if from > 0 {
        let range = header("Content-Range").unwrap_or_default();
        let expected = format!("bytes {from}-{}/{}", file.bytes - 1, file.bytes);
        if range != expected {
            return Err(format!("it answers {range:?} where {expected:?} was asked for"));
        }
    }
    match header("Content-Length").and_then(|length| length.parse::<u64>().ok()) {
        Some(length) if length != file.bytes - from => Err(format!("{length} bytes come, {} were expected", file.bytes - from)),
        _ => Ok(()),
    }
}
