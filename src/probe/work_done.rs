//! Counters of repeated work under concurrent load.

/// Progress of one kind of work.
#[derive(Clone, Copy, Default)]
pub(super) struct WorkDone {
    under_way: f64,
    pub(super) done: f64,
    done_ns: u64,
}

impl WorkDone {
    /// Counts the operation under way as done, and starts one of `units`.
    pub(super) fn next(&mut self, now_ns: u64, units: f64) {
        *self = Self { under_way: units, done: self.done + self.under_way, done_ns: now_ns };
    }

    /// Units per second from `start_ns` to the end of the last completed operation.
    pub(super) fn rate(self, start_ns: u64) -> f64 {
        self.done / (self.done_ns.saturating_sub(start_ns).max(1) as f64 * 1e-9)
    }
}
