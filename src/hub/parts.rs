//! A file that comes in parts: large ones in several requests at once, others in one.
//!
//! The first part lies where the whole file will, so that what is there is always the file's beginning, for Python, too; each other one
//! in a file of its own, until all are here.

use super::listing::{ChecksumSoFar, RemoteFile};
use crate::disk::OutFile;
use crate::error::Result;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Parts of a large file.
const PARTS: u64 = 4;
/// What is large.
pub(super) const LARGE_BYTES: u64 = 64 << 20;

/// A file on its way here.
pub(super) struct FileInParts {
    pub(super) file: RemoteFile,
    /// On the hub.
    pub(super) path: String,
    parts: Vec<Range<u64>>,
    state: Mutex<PartsState>,
    /// It comes as one after all.
    is_as_one: AtomicBool,
    /// Bytes of its first part that are here, and of the others together: whoever tells how far it is does not wait for the state.
    here: [AtomicU64; 2],
}

/// What those who bring its parts have to know of one another.
#[derive(Default)]
pub(super) struct PartsState {
    pub(super) is_begun: bool,
    /// Held from the first part to the last.
    pub(super) lock: Option<File>,
    /// The blob was here before.
    pub(super) is_here: bool,
    /// Whether a part holds bytes of an earlier download.
    pub(super) is_resumed: bool,
    /// The first part, when it is here.
    pub(super) first: Option<PartialFile>,
    /// Parts that have come.
    pub(super) come: usize,
}

/// A part of a file, or all of it, that is not whole yet.
pub(super) struct PartialFile {
    pub(super) out: OutFile,
    /// Which bytes of the file it shall hold.
    pub(super) range: Range<u64>,
    /// The next one that it lacks.
    pub(super) at: u64,
    /// Of the file's beginning; other parts are added up when they are joined to it.
    pub(super) checksum: Option<ChecksumSoFar>,
    /// Whether it holds bytes of an earlier download.
    pub(super) is_resumed: bool,
}

impl FileInParts {
    /// `file`, in parts if it has `large_bytes`.
    pub(super) fn new(file: RemoteFile, path: String, large_bytes: u64) -> Self {
        let size = if file.bytes >= large_bytes { file.bytes.div_ceil(PARTS).max(1) } else { file.bytes.max(1) };
        let starts = (0..file.bytes.max(1)).step_by(size as usize);
        let parts = starts.map(|start| start..(start + size).min(file.bytes)).collect();
        Self { file, path, parts, state: Mutex::default(), is_as_one: AtomicBool::new(false), here: Default::default() }
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

    /// Takes it as one from here on: what is here of other parts counts no more. Returns whether it was so before.
    pub(super) fn take_as_one(&self) -> bool {
        self.is_as_one.swap(true, Ordering::Relaxed)
    }

    /// Bytes that are here.
    pub(super) fn here(&self) -> u64 {
        let [first, others] = &self.here;
        first.load(Ordering::Relaxed) + if self.is_as_one() { 0 } else { others.load(Ordering::Relaxed) }
    }

    /// Counts `bytes` more of the part that begins at `start`.
    pub(super) fn count(&self, start: u64, bytes: u64) {
        self.here[usize::from(start > 0)].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Its first byte is awaited once more.
    pub(super) fn forget(&self) {
        self.here[0].store(0, Ordering::Relaxed);
    }

    /// The name of the part's own file.
    pub(super) fn name(&self, part: usize) -> String {
        match part {
            0 => partial_name(&self.file),
            part => format!("{}-{part}", partial_name(&self.file)),
        }
    }
}

impl PartialFile {
    /// Bytes of its range that have come.
    pub(super) fn come(&self) -> u64 {
        self.at - self.range.start
    }

    /// Bytes of its range.
    pub(super) fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// For the end of a refusal.
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
        self.checksum.iter_mut().for_each(|checksum| checksum.update(bytes));
    }
}

/// As `huggingface_hub` calls it.
pub(super) fn partial_name(file: &RemoteFile) -> String {
    format!("{}.incomplete", file.checksum.hex())
}
