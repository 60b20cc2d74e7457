//! Merges the step reports of all ranks into one. Counts and bytes are added. For times the maximum over the ranks is taken, because a step
//! lasts as long as its slowest rank.

use super::executor::{Engine, StepReport};
use super::protocol::verdict::Verdict;
use crate::device::Kernels;
use crate::error::{Error, Result};

impl<D: Kernels> Engine<D> {
    /// On rank 0, the merged report of all ranks, once each rank has published its own. On another rank, its own report.
    ///
    /// # Errors
    /// The failure that ended another rank. `Resource` when a rank reached another norm, verdict or loss scale than rank 0: from this step
    /// on the weights would differ.
    pub(super) fn of_all_ranks(&mut self, own: StepReport) -> Result<StepReport> {
        let (rank, ranks) = (self.exchange.slices().rank(), self.exchange.slices().ranks());
        let mut all = own;
        all.exposed_to_peers_ns[rank] = own.exposed.peer_ns;
        let mut ended = own.ended() ^ self.exchange.swapped();
        let expected = ended;
        self.expert_rows.count(&self.host);
        self.exchange.publish_expert_rows(&self.expert_rows.rows);
        self.exchange.publish_amounts(&mut all.amounts().chain([&mut ended]).map(|amount| *amount));
        if rank > 0 {
            return Ok(all);
        }
        self.await_done()?;
        for other in 1..ranks {
            let mut other_amounts = own;
            self.exchange.amounts_of(other, &mut other_amounts.amounts().chain([&mut ended]));
            if ended != expected {
                let cause =
                    format!("rank {other} differs from rank 0 in norm, verdict or loss scale, or exchanged slices in another order");
                return Err(Error::resource("end a step", cause));
            }
            all.add(other, &other_amounts);
            self.exchange.add_expert_rows(other, &mut self.expert_rows.rows);
        }
        all.expert_load = self.expert_rows.load();
        Ok(all)
    }
}

impl StepReport {
    /// All numbers that a rank publishes about its step, in a fixed order.
    fn amounts(&mut self) -> impl Iterator<Item = &mut u64> {
        self.counts.each().chain(self.counters.each()).chain(self.exposed.each())
    }

    /// A hash of the step's outcome (verdict, norm, loss, loss scale), which must be equal on all ranks.
    fn ended(&self) -> u64 {
        let verdict = match self.verdict {
            Verdict::Commit => 0,
            Verdict::SkipNonFinite => 1,
            Verdict::Clip(scale) => scale.0.to_bits().into(),
        };
        let words = [verdict, self.grad_norm.0.to_bits(), self.loss.to_bits().into(), self.loss_scale.to_bits().into()];
        words.into_iter().fold(0, |hash: u64, word| (hash.rotate_left(7) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn add(&mut self, rank: usize, other: &Self) {
        let busy_ns = self.counters.adam_busy_ns.max(other.counters.adam_busy_ns);
        self.counts += other.counts;
        self.counters += other.counters;
        self.counters.adam_busy_ns = busy_ns;
        let mut other_amounts = other.exposed;
        self.exposed.each().zip(other_amounts.each()).for_each(|(most, other_amounts)| *most = (*most).max(*other_amounts));
        self.exposed_to_peers_ns[rank] = other.exposed.peer_ns;
    }

    /// The rank that waited longest for its peers, if any rank waited.
    pub(crate) fn most_exposed_to_peers(&self) -> Option<usize> {
        self.exposed_to_peers_ns.iter().position(|&ns| ns > 0 && ns == self.exposed.peer_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::protocol::verdict::Verdict;
    use crate::ranks::progress::AMOUNTS;
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
            objective: None,
            exposed_to_peers_ns,
            expert_load: None,
        };
        report.amounts().zip(first..).for_each(|(amount, value)| *amount = value);
        report
    }

    #[test]
    fn amounts_are_added_and_the_longest_time_is_reported_with_its_rank() {
        let (mut all, mut other_amounts) = (report(100), report(1000));
        assert_eq!(
            other_amounts.amounts().count() + 1,
            AMOUNTS,
            "the progress counters have a place for each amount and for the results of the step"
        );
        other_amounts.exposed.cpu_ns = 7;
        all.exposed_to_peers_ns[0] = all.exposed.peer_ns;
        all.add(2, &other_amounts);
        let c = all.counts;
        assert_eq!([c.speculated, c.rolled_back, c.committed, c.clipped, c.skipped], [1100, 1102, 1104, 1106, 1108]);
        let c = all.counters;
        assert_eq!([c.d2h_bytes, c.h2d_bytes, c.adam_elems, c.adam_bytes, c.adam_busy_ns], [1110, 1112, 1114, 1116, 1009]);
        assert_eq!([all.exposed.cpu_ns, all.exposed.transfer_ns, all.exposed.peer_ns], [110, 1011, 1012]);
        assert_eq!((&all.exposed_to_peers_ns[..4], all.most_exposed_to_peers()), (&[112, 0, 1012, 0][..], Some(2)));
        assert_eq!(report(0).most_exposed_to_peers(), None);
    }

    #[test]
    fn steps_that_came_to_something_else_differ_in_a_number() {
        let (one, mut other) = (report(1), report(2));
        assert_eq!(one.ended(), other.ended(), "what each rank did is its own");
        let others = [
            StepReport { verdict: Verdict::SkipNonFinite, ..one },
            StepReport { grad_norm: Norm(1.5), ..one },
            StepReport { loss: 2.0, ..one },
            StepReport { loss_scale: 0.5, ..one },
        ];
        assert!(others.iter().all(|report| report.ended() != one.ended()));
        other.learning_rate = 0.2;
        assert_eq!(one.ended(), other.ended(), "it is told to all");
    }
}
