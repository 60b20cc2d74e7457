//! Reads a file once, from all CPUs.

use crate::data::context::Preparation;
use crate::data::encode::pipeline::threads;
use crate::data::stopped::interrupted;
use crate::disk::InFile;
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Bytes of a block.
pub(in crate::data) const BLOCK_BYTES: usize = 1 << 20;
/// Gives `check` every block of `file`, each with its number; the last may be shorter. `activity` names the purpose for people.
///
/// # Errors
/// The error of the first faulty block; `Interrupted`.
pub(in crate::data) fn scan(
    file: &InFile,
    activity: &str,
    preparation: &mut Preparation<'_>,
    check: impl Fn(u64, &[u8]) -> Result<()> + Sync,
) -> Result<()> {
    let blocks = file.bytes().div_ceil(BLOCK_BYTES as u64);
    let threads = threads().min(blocks as usize);
    let (next, failed, stop) = (AtomicU64::new(0), AtomicBool::new(false), preparation.stop().clone());
    let reporter = thread::current();
    // Blocks are dealt in order: when one fails, all before it are in somebody's hands.
    let work = || {
        let mut buffer = vec![0u64; BLOCK_BYTES / 8];
        let mut wrong = None;
        while wrong.is_none() && !failed.load(Ordering::Relaxed) && !stop.is_set() {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                break;
            }
            let offset = block * BLOCK_BYTES as u64;
            let bytes = &mut bytemuck::cast_slice_mut(&mut buffer)[..BLOCK_BYTES.min((file.bytes() - offset) as usize)];
            wrong = file.read_at(offset, bytes).and_then(|()| check(block, bytes)).err().map(|error| (block, error));
        }
        failed.fetch_or(wrong.is_some(), Ordering::Relaxed);
        reporter.unpark();
        wrong
    };
    let wrong = thread::scope(|scope| {
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).map_err(|e| Error::resource("start a thread that reads", e));
        let workers: Vec<_> = (0..threads).map(spawn).collect::<Result<_>>()?;
        // Progress is reported at least once: workers may be done before the first poll.
        let mut is_done = workers.is_empty();
        while !is_done {
            thread::park_timeout(Duration::from_millis(100));
            is_done = workers.iter().all(|worker| worker.is_finished());
            preparation.progress(activity, (next.load(Ordering::Relaxed).min(blocks) * BLOCK_BYTES as u64).min(file.bytes()), file.bytes());
        }
        let joined = workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        Ok::<_, Error>(joined.flatten().min_by_key(|(block, _)| *block))
    })?;
    match wrong {
        Some((_, error)) => Err(error),
        None if stop.is_set() => Err(interrupted()),
        None => Ok(()),
    }
}
