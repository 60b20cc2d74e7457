//! What all ranks did in a step, told as one report. Counts and bytes are added up; of times the longest is told, for it is what a step waits
//! for.

use super::exchange::Exchange;
use super::executor::{Engine, StepReport};
use crate::device::Kernels;
use crate::error::Result;

impl<D: Kernels, X: Exchange<D>> Engine<D, X> {
    /// The report of all ranks on rank 0, once each has told its own; on another rank its own.
    pub(super) fn of_all_ranks(&mut self, own: StepReport) -> Result<StepReport> {
        let (rank, ranks) = (self.exchange.slices().rank(), self.exchange.slices().ranks());
        let mut all = own;
        all.exposed_to_peers_ns[rank] = own.exposed.peer_ns;
        self.exchange.publish_amounts(all.amounts().map(|amount| *amount));
        if rank > 0 {
            return Ok(all);
        }
        self.await_done()?;
        for other in 1..ranks {
            let mut theirs = own;
            self.exchange.amounts_of(other, theirs.amounts());
            all.add(other, &theirs);
        }
        Ok(all)
    }
}

impl StepReport {
    /// What each rank tells of itself.
    fn amounts(&mut self) -> impl Iterator<Item = &mut u64> {
        self.counts.each().chain(self.counters.each()).chain(self.exposed.each())
    }

    fn add(&mut self, rank: usize, other: &Self) {
        let busy_ns = self.counters.adam_busy_ns.max(other.counters.adam_busy_ns);
        self.counts += other.counts;
        self.counters += other.counters;
        self.counters.adam_busy_ns = busy_ns;
        let mut theirs = other.exposed;
        self.exposed.each().zip(theirs.each()).for_each(|(most, theirs)| *most = (*most).max(*theirs));
        self.exposed_to_peers_ns[rank] = other.exposed.peer_ns;
    }

    /// The rank that waited longest for its peers, if one did.
    pub(crate) fn most_exposed_to_peers(&self) -> Option<usize> {
        self.exposed_to_peers_ns.iter().position(|&ns| ns > 0 && ns == self.exposed.peer_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::verdict::Verdict;
    use crate::ranks::board::AMOUNTS;
    use crate::units::Norm;

    fn report(first: u64) -> StepReport {
        let (counts, counters, exposed, exposed_to_peers_ns) = Default::default();
        let (grad_norm, verdict) = (Norm(1.0), Verdict::Commit);
        let mut report = StepReport {
            loss: 1.0,
            grad_norm,
            learning_rate: 0.1,
            loss_scale: 1.0,
            verdict,
            counts,
            exposed,
            counters,
            exposed_to_peers_ns,
        };
        report.amounts().zip(first..).for_each(|(amount, value)| *amount = value);
        report
    }

    #[test]
    fn amounts_are_added_and_of_times_the_longest_is_told_with_its_rank() {
        let (mut all, mut theirs) = (report(100), report(1000));
        assert_eq!(theirs.amounts().count(), AMOUNTS, "the board has a place for each");
        theirs.exposed.cpu_ns = 7;
        all.exposed_to_peers_ns[0] = all.exposed.peer_ns;
        all.add(2, &theirs);
        let c = all.counts;
        assert_eq!([c.speculated, c.rolled_back, c.committed, c.clipped, c.skipped], [1100, 1102, 1104, 1106, 1108]);
        let c = all.counters;
        assert_eq!([c.d2h_bytes, c.h2d_bytes, c.adam_elems, c.adam_bytes, c.adam_busy_ns], [1110, 1112, 1114, 1116, 1009]);
        assert_eq!([all.exposed.cpu_ns, all.exposed.transfer_ns, all.exposed.peer_ns], [110, 1011, 1012]);
        assert_eq!((&all.exposed_to_peers_ns[..4], all.most_exposed_to_peers()), (&[112, 0, 1012, 0][..], Some(2)));
        assert_eq!(report(0).most_exposed_to_peers(), None);
    }
}
