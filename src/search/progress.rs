//! Progress of a long search: it simulates hundreds of plans, of large models for a second each.

use std::fmt::Display;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Number of plans that this process has simulated.
static SIMULATED: AtomicUsize = AtomicUsize::new(0);
/// Interval between lines. A shorter search prints none.
const INTERVAL: Duration = Duration::from_secs(5);

/// Counts a simulated plan.
pub(super) fn count() {
    SIMULATED.fetch_add(1, Ordering::Relaxed);
}

/// Runs `search` and calls `log` with a progress line every few seconds.
pub(crate) fn with_progress<T: Send>(log: &mut dyn FnMut(&dyn Display), search: impl FnOnce() -> T + Send) -> T {
    with_progress_every(INTERVAL, log, search)
}

fn with_progress_every<T: Send>(interval: Duration, log: &mut dyn FnMut(&dyn Display), search: impl FnOnce() -> T + Send) -> T {
    let (began, before, (over, is_over)) = (Instant::now(), SIMULATED.load(Ordering::Relaxed), mpsc::channel::<()>());
    thread::scope(|scope| {
        // The thread owns the sender, so it is dropped even if the search panics.
        let searching = scope.spawn(move || {
            let _over = over;
            search()
        });
        while is_over.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            let (plans, seconds) = (SIMULATED.load(Ordering::Relaxed) - before, began.elapsed().as_secs_f64());
            log(&format_args!("searching for the fastest plan: {plans} simulated in {seconds:.0} s"));
        }
        searching.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_search_logs_its_progress_and_a_short_one_is_silent() {
        let lines_within = |takes: Duration, interval: Duration| {
            let mut lines = Vec::new();
            let found = with_progress_every(interval, &mut |line| lines.push(line.to_string()), || {
                count();
                thread::sleep(takes);
                7
            });
            assert_eq!(found, 7);
            lines
        };
        let lines = lines_within(Duration::from_millis(200), Duration::from_millis(20));
        assert!(!lines.is_empty() && lines.iter().all(|line| line.starts_with("searching for the fastest plan: ")), "{lines:?}");
        assert!(!lines[0].contains(": 0 simulated"), "{lines:?}");
        assert!(lines_within(Duration::ZERO, INTERVAL).is_empty());
    }
}
