//! Calls of foreign code: in a sandbox within the limits of their task, and everywhere with panics as errors.

use super::notes::Notes;
use super::process::{limit_cpu, limit_memory};
use super::task::SandboxTask;
use nix::sys::uio::pwrite;
use std::cell::{Cell, RefCell};
use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

/// Assumed address space where the kernel does not report it: more than a process with a GPU reserves.
const ADDRESS_SPACE_UNKNOWN: u64 = 1 << 46;

thread_local! {
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
    static FENCE: RefCell<Option<SandboxLimits>> = const { RefCell::new(None) };
}

/// The limits of this process, which is a sandbox.
struct SandboxLimits {
    /// Bytes of address space that it was started with.
    base: u64,
    task: SandboxTask,
    item: u32,
}

/// Puts a fence around the calling thread of a sandbox process.
pub(super) fn raise_fence() {
    let pages = fs::read_to_string("/proc/self/statm").ok().and_then(|statm| statm.split(' ').next()?.parse::<u64>().ok());
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096) as u64;
    let mut fence = SandboxLimits { base: pages.map_or(ADDRESS_SPACE_UNKNOWN, |pages| pages * page), task: SandboxTask::Start, item: 0 };
    fence.enter(SandboxTask::Start, 0);
    FENCE.set(Some(fence));
}

/// Notes that this sandbox works on `item` of a message.
pub(in crate::data) fn work_on(item: usize) {
    FENCE.with_borrow_mut(|fence| fence.iter_mut().for_each(|fence| fence.enter(fence.task, item as u32)));
}

/// Runs foreign code for `task`, which must leave nothing half done that is used after a panic.
///
/// # Errors
/// The message of a panic in it, on one line. The panic is not reported otherwise; panics of other threads are. A sandbox that goes beyond
/// a limit ends, and its parent reports it.
pub(in crate::data) fn guard<T>(task: SandboxTask, call: impl FnOnce() -> T) -> Result<T, String> {
    quiet_guarded_panics();
    FENCE.with_borrow_mut(|fence| {
        if let Some(fence) = fence {
            if fence.task != task {
                fence.enter(task, fence.item);
            }
            limit_cpu(task.cpu_s());
        }
    });
    let was_guarded = IS_GUARDED.replace(true);
    let outcome = panic::catch_unwind(AssertUnwindSafe(call));
    IS_GUARDED.set(was_guarded);
    outcome.map_err(|payload| {
        let literal = payload.downcast_ref::<&str>().copied();
        let message = literal.or(payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown");
        format!("the {} library fails on it: {}", task.foreign_library(), message.replace('\n', " "))
    })
}

/// Keeps panics that become errors from being printed.
pub(super) fn quiet_guarded_panics() {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !IS_GUARDED.get() {
                report(panic);
            }
        }));
    });
}

impl SandboxLimits {
    fn enter(&mut self, task: SandboxTask, item: u32) {
        (self.task, self.item) = (task, item);
        limit_memory(self.base.saturating_add(task.memory_bytes()));
        // Standard error is the file of notes; without them an error names less.
        let _ = pwrite(io::stderr(), &Notes::head(task, item), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message_and_a_value_passes() {
        assert_eq!(guard(SandboxTask::Load, || 5), Ok(5));
        let refused = Err::<(), _>("the tokenizer library fails on it: bad 7".to_string());
        assert_eq!(guard(SandboxTask::Load, || panic!("bad\n{}", 7)), refused);
        assert!(!IS_GUARDED.get());
    }
}
