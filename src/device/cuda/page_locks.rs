//! Host memory whose pages a thread faults in and locks while steps run.

use super::driver::Registered;
use super::open::open;
use crate::device::PagesToCome;
use crate::error::{Error, Result};
use crate::host::pages::fault_in;
use crate::host::pinned::PinnedSlice;
use cust::device::Device;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

/// Name of the thread.
const THREAD: &str = "page locks";

/// A thread that locks pages part by part, so that it holds the driver's own locks for short times, and then faults others in.
pub(super) struct PageLocks {
    pages: PagesToCome,
    stop: Arc<AtomicBool>,
    /// All locks, once they are made.
    locked: Receiver<Result<Vec<Registered>>>,
    thread: Option<JoinHandle<()>>,
}

impl PageLocks {
    /// Begins to lock `pages` for `gpu`. The memory must stay mapped until the thread has ended.
    ///
    /// # Errors
    /// `Resource` when the system starts no thread.
    pub(super) fn begin(gpu: Device, pages: PagesToCome) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (send, locked) = sync_channel(1);
        let is_stopped = stop.clone();
        let body = move || prepare(gpu, pages, &send, &is_stopped);
        let thread = Builder::new().name(THREAD.into()).spawn(body).map_err(|e| Error::resource("start a thread that locks pages", e))?;
        Ok(Self { pages, stop, locked, thread: Some(thread) })
    }

    /// The memory that is being locked.
    pub(super) fn memory(&self) -> PinnedSlice {
        self.pages.pinned
    }

    /// Waits until all parts are locked, and returns the locks. The thread goes on with pages that it does not lock.
    ///
    /// # Errors
    /// `Resource` when the system refuses to lock a part; then no part stays locked.
    pub(super) fn take(&mut self) -> Result<Vec<Registered>> {
        self.locked
            .recv()
            .unwrap_or_else(|_| Err(Error::resource("lock pages of host memory", "the locks were taken, or the thread has ended")))
    }
}

impl Drop for PageLocks {
    /// Ends the thread after its present part, and releases locks that nobody has taken.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// Locks the memory to be pinned, sends the locks, and faults in the pageable memory, until `stop` is set.
fn prepare(gpu: Device, pages: PagesToCome, send: &SyncSender<Result<Vec<Registered>>>, stop: &AtomicBool) {
    let parts = |memory| parts(memory, pages.part_bytes).take_while(|_| !stop.load(Ordering::Relaxed));
    let lock = || {
        let _context = open(gpu)?;
        parts(pages.pinned).map(|part| fault_in_part(part).and_then(|()| Registered::new(part))).collect()
    };
    // The channel holds one message.
    drop(send.send(lock()));
    // Pages that are not granted now are granted when they are written.
    let _ = parts(pages.pageable).try_for_each(fault_in_part);
}

fn fault_in_part(part: PinnedSlice) -> Result<()> {
    fault_in(part).map_err(|e| Error::resource("fault in host memory for copies", e))
}

/// Parts of at most `bytes` of `memory`.
fn parts(memory: PinnedSlice, bytes: usize) -> impl Iterator<Item = PinnedSlice> {
    let starts = (0..memory.bytes()).step_by(bytes.max(1));
    starts.map(move |start| memory.slice(start, bytes.min(memory.bytes() - start)))
}
