//! A file's download in parts: large files take several parallel requests, small files one.
//!
//! The first part is written to the file's usual partial name, so `huggingface_hub` can resume from it. Each other part is written to a
//! file of its own until all parts are complete.

use super::listing::{ChecksumSoFar, RemoteFile};
use crate::disk::OutFile;
use crate::error::Result;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Number of parts of a large file.
const PARTS: u64 = 4;
/// Size in bytes from which a file is downloaded in parts.
pub(super) const LARGE_BYTES: u64 = 64 << 20;

/// A file that is being downloaded.
pub(super) struct FileInParts {
    pub(super) file: RemoteFile,
    /// URL path on the hub.
    pub(super) path: String,
    parts: Vec<Range<u64>>,
    state: Mutex<PartsState>,
    /// Whether the file has switched to a download in one piece.
    is_as_one: AtomicBool,
    /// Bytes on disk of the first part, and of all other parts together. Atomic, so that progress is read without the lock on `state`.
    received: [AtomicU64; 2],
}

/// State that the threads downloading the parts of one file share.
#[derive(Default)]
pub(super) struct PartsState {
    pub(super) is_begun: bool,
    /// The file's lock, held from the first part to the last.
    pub(super) lock: Option<File>,
    /// Whether the blob existed before the download.
    pub(super) is_here: bool,
    /// Whether a part holds bytes of an earlier download.
    pub(super) is_resumed: bool,
    /// The first part, once it is complete.
    pub(super) first: Option<PartialFile>,
    /// Number of completed parts.
    pub(super) come: usize,
}

/// An incomplete part of a file, or an incomplete file.
pub(super) struct PartialFile {
    pub(super) out: OutFile,
    /// Range of the file's bytes that this part covers.
    pub(super) range: Range<u64>,
    /// Position in the file of the next missing byte.
    pub(super) at: u64,
    /// Checksum of the first part. The bytes of other parts are added when the parts are joined.
    pub(super) checksum: Option<ChecksumSoFar>,
    /// Whether it holds bytes of an earlier download.
    pub(super) is_resumed: bool,
}

impl FileInParts {
    /// Splits `file` into parts if it has at least `large_bytes` bytes.
    pub(super) fn new(file: RemoteFile, path: String, large_bytes: u64) -> Self {
        let size = if file.bytes >= large_bytes { file.bytes.div_ceil(PARTS).max(1) } else { file.bytes.max(1) };
        let starts = (0..file.bytes.max(1)).step_by(size as usize);
        let parts = starts.map(|start| start..(start + size).min(file.bytes)).collect();
        Self { file, path, parts, state: Mutex::default(), is_as_one: AtomicBool::new(false), received: Default::default() }
    }

    pub(super) fn parts(&self) -> &[Range<u64>] {
        &self.parts
    }

    pub(super) fn state(&self) -> MutexGuard<'_, PartsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_as_one(&self) -> bool {
        self.is_as_one.load(Ordering::Relaxed)
    }

    /// Switches to a download in one piece, and stops counting bytes of other parts. Returns whether the file had switched before.
    pub(super) fn take_as_one(&self) -> bool {
        self.is_as_one.swap(true, Ordering::Relaxed)
    }

    /// Number of bytes on disk.
    pub(super) fn received(&self) -> u64 {
        let [first, others] = &self.received;
        first.load(Ordering::Relaxed) + if self.is_as_one() { 0 } else { others.load(Ordering::Relaxed) }
    }

    /// Counts `bytes` more of the part that begins at `start`.
    pub(super) fn count(&self, start: u64, bytes: u64) {
        self.received[usize::from(start > 0)].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Resets the byte count of the first part.
    pub(super) fn forget(&self) {
        self.received[0].store(0, Ordering::Relaxed);
    }

    /// Name of the file that holds the part.
    pub(super) fn name(&self, part: usize) -> String {
        match part {
            0 => partial_name(&self.file),
            part => format!("{}-{part}", partial_name(&self.file)),
        }
    }
}

impl PartialFile {
    /// Number of bytes of this part that are on disk.
    pub(super) fn come(&self) -> u64 {
        self.at - self.range.start
    }

    /// Number of bytes of this part.
    pub(super) fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// A clause for the end of an error message.
    pub(super) fn kept(&self) -> String {
        format!("{} of {} bytes are kept for the next run", self.come(), self.bytes())
    }

    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write(bytes)?;
        self.count(bytes);
        Ok(())
    }

    pub(super) fn count(&mut self, bytes: &[u8]) {
        self.at += bytes.len() as u64;
        if let Some(checksum) = &mut self.checksum {
            checksum.update(bytes);
        }
    }
}

/// Name of the partial file, as in `huggingface_hub`.
pub(super) fn partial_name(file: &RemoteFile) -> String {
    format!("{}.incomplete", file.checksum.hex())
}
