//! Host memory whose pages threads fault in and lock while steps run.

use super::driver::Registered;
use super::open::open;
use crate::device::PagesToCome;
use crate::error::{Error, Result};
use crate::host::pages::fault_in;
use crate::host::pinned::PinnedSlice;
use cust::device::Device;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

/// A thread that locks pages part by part, so that it holds the driver's own locks for short times, and one that faults others in.
pub(super) struct PageLocks {
    pages: PagesToCome,
    stop: Arc<AtomicBool>,
    /// Returns all locks.
    locking: Option<JoinHandle<Result<Vec<Registered>>>>,
    faulting: Option<JoinHandle<Result<()>>>,
}

impl PageLocks {
    /// Begins to lock `pages` for `gpu`. The memory must stay mapped until this value is dropped.
    ///
    /// # Errors
    /// `Resource` when the system starts no thread.
    pub(super) fn begin(gpu: Device, pages: PagesToCome) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut locks = Self { pages, stop: stop.clone(), locking: None, faulting: None };
        let is_stopped = stop.clone();
        locks.locking = Some(start("page locks", move || lock(gpu, parts(pages.pinned, pages.part_bytes, &is_stopped)))?);
        locks.faulting = Some(start("page faults", move || parts(pages.pageable, pages.part_bytes, &stop).try_for_each(fault_in_part))?);
        Ok(locks)
    }

    /// The memory that is being locked.
    pub(super) fn memory(&self) -> PinnedSlice {
        self.pages.pinned
    }

    /// Waits until all parts are locked, and returns the locks. Pages that are not locked may still come.
    ///
    /// # Errors
    /// `Resource` when the system refuses to lock a part; then no part stays locked.
    pub(super) fn take(&mut self) -> Result<Vec<Registered>> {
        let ended = |why| Error::resource("lock pages of host memory", why);
        let thread = self.locking.take().ok_or_else(|| ended("the locks were taken before"))?;
        thread.join().map_err(|_| ended("the thread panicked"))?
    }
}

impl Drop for PageLocks {
    /// Ends both threads after their present parts, and releases locks that were not taken. Pages that were not granted are granted when
    /// they are written.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(self.locking.take().map(JoinHandle::join));
        drop(self.faulting.take().map(JoinHandle::join));
    }
}

fn start<T: Send + 'static>(name: &str, body: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(body).map_err(|e| Error::resource("start a thread for pages of host memory", e))
}

fn lock(gpu: Device, mut parts: impl Iterator<Item = PinnedSlice>) -> Result<Vec<Registered>> {
    let _context = open(gpu)?;
    parts.try_fold(Vec::new(), |mut locked, part| {
        fault_in_part(part)?;
        locked.push(Registered::new(part)?);
        Ok(locked)
    })
}

fn fault_in_part(part: PinnedSlice) -> Result<()> {
    fault_in(part.addr()..part.addr() + part.bytes()).map_err(|e| Error::resource("fault in host memory for copies", e))
}

/// Parts of at most `bytes` of `memory`, until `stop` is set.
fn parts(memory: PinnedSlice, bytes: usize, stop: &AtomicBool) -> impl Iterator<Item = PinnedSlice> {
    let starts = (0..memory.bytes()).step_by(bytes.max(1)).take_while(|_| !stop.load(Ordering::Relaxed));
    starts.map(move |start| memory.slice(start, bytes.min(memory.bytes() - start)))
}
