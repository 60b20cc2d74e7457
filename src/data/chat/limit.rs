//! Ends the program where one rendering of a chat template does not end. The template engine counts instructions, of which one may work for
//! ever: a list joined with itself some forty times has more items than memory holds, and making it is not counted (minijinja 3.1.0).

use super::stack;
use nix::unistd::{Pid, gettid};
use std::cell::OnceCell;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// CPU time of one rendering. Those that the engine's own limit lets through take half a second.
const CPU_MAX: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Beginnings and ends of a thread's renderings, so that odd numbers are renderings; [`OVER`] when the thread ends.
type Turns = Arc<AtomicU64>;
const OVER: u64 = u64::MAX;

thread_local!(static WATCHED: OnceCell<RenderThread> = const { OnceCell::new() });

/// A thread that renders, and the one that looks after it. Where none can be had renderings have the engine's limit alone.
struct RenderThread {
    turns: Turns,
    watcher: Option<Thread>,
}

/// Runs `render`, which does not outlast [`CPU_MAX`] nor its stack: the program ends then.
pub(super) fn limited<T>(render: impl FnOnce() -> T) -> T {
    let turns = WATCHED.with(|watched| watched.get_or_init(RenderThread::new).turns.clone());
    turns.fetch_add(1, Ordering::Relaxed);
    // It ends by a panic, too, which may be caught.
    let _ended = Ended(turns);
    stack::watched(render)
}

struct Ended(Turns);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl RenderThread {
    /// This thread.
    fn new() -> Self {
        Self::looked_at(LOOK_EVERY)
    }

    /// The same, as often as this.
    fn looked_at(every: Duration) -> Self {
        let turns = Turns::default();
        let (theirs, thread) = (turns.clone(), gettid());
        let started = thread::Builder::new().name("chat-limit".into()).spawn(move || watch(thread, &theirs, every));
        Self { turns, watcher: started.ok().map(|watcher| watcher.thread().clone()) }
    }
}

impl Drop for RenderThread {
    /// The watcher ends at once: threads that render come and go with every file.
    fn drop(&mut self) {
        self.turns.store(OVER, Ordering::Release);
        self.watcher.iter().for_each(Thread::unpark);
    }
}

/// Until the watched thread is gone. Where the kernel does not count a thread's time, the time of day is taken.
fn watch(thread: Pid, turns: &Turns, every: Duration) {
    let began = Instant::now();
    let (mut seen, mut since) = (0, Duration::ZERO);
    loop {
        thread::park_timeout(every);
        let (turn, time) = (turns.load(Ordering::Acquire), cpu_time(thread).unwrap_or(began.elapsed()));
        if turn == OVER {
            return;
        }
        if turn % 2 == 0 || turn != seen {
            (seen, since) = (turn, time);
        } else if time.saturating_sub(since) > CPU_MAX {
            let seconds = CPU_MAX.as_secs();
            eprintln!("error: the chat template works for more than {seconds} s on one conversation: does it join lists in a loop?");
            // The thread cannot be asked to end, and takes more memory meanwhile.
            signal_hook::low_level::exit(1);
        }
    }
}

/// What the kernel counted of it.
fn cpu_time(thread: Pid) -> Option<Duration> {
    let counted = fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    counted.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rendering_is_over_also_where_it_panicked() {
        let turn = || WATCHED.with(|watched| watched.get().unwrap().turns.load(Ordering::Relaxed));
        assert_eq!(limited(turn), 1);
        assert!(std::panic::catch_unwind(|| limited(|| panic!("as a library may"))).is_err());
        assert_eq!(turn(), 4);
    }
    /// A watcher that sleeps on holds a stack; a thousand short files a second would have hundreds of megabytes of them.
    #[test]
    fn a_watcher_ends_with_its_thread() {
        let watched = RenderThread::looked_at(Duration::from_secs(3600));
        let (held, began) = (Arc::downgrade(&watched.turns), Instant::now());
        drop(watched);
        while held.strong_count() > 0 {
            assert!(began.elapsed() < Duration::from_secs(60), "it sleeps on");
            thread::yield_now();
        }
    }
}
