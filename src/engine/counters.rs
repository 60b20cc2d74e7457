//! How much was moved and stepped: counted by the driver, so that a report can name rates.

use std::ops::{AddAssign, Sub};

/// Amounts since the engine began, or between two reports. Counted when work is given out, not when it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Bytes of gradients, or of paged states, sent to host memory.
    pub d2h_bytes: u64,
    /// Bytes of parameters, or of paged states, sent to the device.
    pub h2d_bytes: u64,
    /// Parameters passed over by the optimizer's pool; a redone or restored bucket counts again.
    pub adam_elems: u64,
    /// Bytes that those passes read and wrote.
    pub adam_bytes: u64,
    /// Nanoseconds in which the pool had a job.
    pub adam_busy_ns: u64,
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.d2h_bytes += other.d2h_bytes;
        self.h2d_bytes += other.h2d_bytes;
        self.adam_elems += other.adam_elems;
        self.adam_bytes += other.adam_bytes;
        self.adam_busy_ns += other.adam_busy_ns;
    }
}

impl Sub for Counters {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            d2h_bytes: self.d2h_bytes - other.d2h_bytes,
            h2d_bytes: self.h2d_bytes - other.h2d_bytes,
            adam_elems: self.adam_elems - other.adam_elems,
            adam_bytes: self.adam_bytes - other.adam_bytes,
            adam_busy_ns: self.adam_busy_ns - other.adam_busy_ns,
        }
    }
}
