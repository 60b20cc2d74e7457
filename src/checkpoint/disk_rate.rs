//! The bytes a second that a save can write into a directory, measured.

use super::format::STATE;
use super::store::hidden_of;
use super::writers::PIECE_BYTES;
use crate::disk::{DIRECT_ALIGN, Dir, PlacedFile, TmpDir};
use crate::error::Result;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Largest file, and longest time, of a measurement.
const BYTES_MAX: u64 = 1 << 30;
const TIME_MAX: Duration = Duration::from_millis(400);

/// Bytes a second that `writers` threads write into `output_dir`, past the page cache where that is possible. The file is removed again.
///
/// # Errors
/// `Io` when the disk is full or fails.
pub(crate) fn disk_rate(output_dir: &Dir, writers: usize) -> Result<f64> {
    let tmp = TmpDir::create(output_dir, hidden_of(0, u64::from(std::process::id())))?;
    let (file, next, start) = (PlacedFile::create(tmp.dir(), STATE)?, AtomicU64::new(0), Instant::now());
    thread::scope(|scope| {
        let writers: Vec<_> = (0..writers).map(|_| scope.spawn(|| write(&file, &next, start))).collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("a writer reports its failures"))
    })?;
    file.sync()?;
    Ok(file.id()?.bytes as f64 / start.elapsed().as_secs_f64())
}

/// Writes pieces, each at the next free place, until the time is over or the file is large enough.
fn write(file: &PlacedFile, next: &AtomicU64, start: Instant) -> Result<()> {
    let memory: Vec<u8> = (0..PIECE_BYTES + DIRECT_ALIGN).map(|i| (i % 251) as u8).collect();
    let piece = &memory[memory.as_ptr().align_offset(DIRECT_ALIGN)..][..PIECE_BYTES];
    while start.elapsed() < TIME_MAX {
        let offset = next.fetch_add(PIECE_BYTES as u64, Ordering::Relaxed);
        if offset >= BYTES_MAX {
            return Ok(());
        }
        file.write_at(offset, piece)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_measured_and_nothing_stays() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        assert!([1, 4].into_iter().all(|writers| disk_rate(&dir, writers).unwrap() > 1e5) && dir.names().unwrap().is_empty());
    }
}
