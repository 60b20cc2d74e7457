//! Work that is repeated beside other work, and how much of it gets done.

/// One kind of work, from one piece to the next.
#[derive(Clone, Copy, Default)]
pub(super) struct WorkDone {
    under_way: f64,
    pub(super) done: f64,
    done_ns: u64,
}

impl WorkDone {
    /// What was under way is done; now `units` are.
    pub(super) fn next(&mut self, now_ns: u64, units: f64) {
        *self = Self { under_way: units, done: self.done + self.under_way, done_ns: now_ns };
    }

    /// Units a second since `start_ns`, up to the end of what is done.
    pub(super) fn rate(self, start_ns: u64) -> f64 {
        self.done / (self.done_ns.saturating_sub(start_ns).max(1) as f64 * 1e-9)
    }
}
