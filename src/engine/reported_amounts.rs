//! Amounts at the end of the last report, from which those of the next one are counted.

use super::protocol::coordinator::Counts;
use super::protocol::counters::Counters;

/// Amounts since the start of the engine that were reported.
#[derive(Default)]
pub(super) struct ReportedAmounts {
    counts: Counts,
    counters: Counters,
}

impl ReportedAmounts {
    /// Reports the amounts since the last report; `counts` and `counters` are those since the start of the engine.
    pub(super) fn report(&mut self, counts: Counts, counters: Counters) -> (Counts, Counters) {
        let since = (counts - self.counts, counters - self.counters);
        *self = Self { counts, counters };
        since
    }

    /// Excludes the amounts in `counters` that were not reported yet from the next report.
    pub(super) fn exclude(&mut self, counters: Counters) {
        self.counters = counters;
    }
}
