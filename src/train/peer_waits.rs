//! How long ranks waited for each other in a run, and whether one of them is slow.

use std::fmt;
use std::time::Duration;

/// A rank is slow when every other one waited for its peers longer than it did, by this share of the time.
const SLOW_FRACTION: f64 = 0.05;

/// How long ranks waited for each other.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerWaits {
    /// The rank that waited longest, and its milliseconds.
    most: (usize, f64),
    /// The rank that the others wait for, and by how many milliseconds they waited longer than it did.
    slow: Option<(usize, f64)>,
}

impl PeerWaits {
    /// Of several ranks that waited so long while steps took `time`.
    ///
    /// # Panics
    /// If there are not several.
    pub(super) fn new(waited_ns: &[u64], time: Duration) -> Self {
        let mut ranks: Vec<(usize, f64)> = waited_ns.iter().map(|&ns| ns as f64 / 1e6).enumerate().collect();
        ranks.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        let [(least, ms), (_, next_ms), ..] = ranks[..] else { panic!("{} ranks", ranks.len()) };
        let more_ms = next_ms - ms;
        let is_slow = more_ms > SLOW_FRACTION * time.as_secs_f64() * 1e3;
        Self { most: ranks[ranks.len() - 1], slow: is_slow.then_some((least, more_ms)) }
    }
}

impl fmt::Display for PeerWaits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, ms) = self.most;
        write!(f, "{ms:.0} ms for other ranks (rank {rank}, the longest)")?;
        let Some((slow, more_ms)) = self.slow else { return Ok(()) };
        write!(f, "\n  slow          rank {slow}: every other rank waited at least {more_ms:.0} ms longer for its peers than it did")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_all_peers_wait_for_is_slow() {
        let message = |waited_ms: &[u64]| {
            let waited_ns: Vec<u64> = waited_ms.iter().map(|ms| ms * 1_000_000).collect();
            PeerWaits::new(&waited_ns, Duration::from_secs(1)).to_string()
        };
        assert_eq!(message(&[10, 59]), "59 ms for other ranks (rank 1, the longest)");
        let slow = "\n  slow          rank 0: every other rank waited at least 51 ms longer for its peers than it did";
        assert_eq!(message(&[10, 61]), format!("61 ms for other ranks (rank 1, the longest){slow}"));
        // Two that are quick and two that are not: nobody is the one to look at.
        assert_eq!(message(&[10, 400, 11, 300]), "400 ms for other ranks (rank 1, the longest)");
        assert!(message(&[310, 400, 11, 300]).contains("rank 2: every other rank waited at least 289 ms longer"));
    }
}
