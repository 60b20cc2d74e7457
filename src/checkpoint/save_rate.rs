//! A limit on the bytes that a save writes in a second.

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The limit, and when the next bytes may be written. Without a limit by default.
#[derive(Default)]
pub(crate) struct SaveRate {
    /// 0: no limit.
    bytes_per_second: u64,
    next: Mutex<Option<Instant>>,
}

impl SaveRate {
    /// At most `bytes_per_second`; 0 is no limit.
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, next: Mutex::default() }
    }

    /// Waits until `bytes` more bytes may be written.
    pub(super) fn pass(&self, bytes: u64) {
        if self.bytes_per_second > 0 {
            let wait = self.reserve(bytes, Instant::now());
            thread::sleep(wait);
        }
    }

    /// Reserves the time of `bytes` bytes; returns the time from `now` until it is over.
    fn reserve(&self, bytes: u64, now: Instant) -> Duration {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let end = next.map_or(now, |next| next.max(now)) + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        *next = Some(end);
        end - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_their_time_and_unused_time_is_lost() {
        let (rate, now) = (SaveRate::new(1000), Instant::now());
        assert_eq!(rate.reserve(500, now), Duration::from_millis(500));
        assert_eq!(rate.reserve(250, now), Duration::from_millis(750));
        let later = now + Duration::from_secs(9);
        assert_eq!(rate.reserve(100, later), Duration::from_millis(100));
        SaveRate::new(0).pass(u64::MAX);
    }
}
