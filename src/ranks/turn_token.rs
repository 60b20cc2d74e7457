//! A turn token for tests: exactly one rank runs at a time, drawn from a seed whenever the running rank passes or has nothing to do.

use crate::host::doorbell::Doorbell;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Consecutive passes by idle ranks, per rank, after which the ranks count as deadlocked.
const IDLE_PASSES: u64 = 64;

/// The turn token: the rank that runs, and the number of consecutive idle passes.
pub(crate) struct TurnToken {
    seed: u64,
    /// The rank that runs.
    turn: AtomicU64,
    /// Ranks that take part, as a bit mask.
    present: AtomicU64,
    passes: AtomicU64,
    idle: AtomicU64,
    bells: Vec<Arc<Doorbell>>,
}

impl TurnToken {
    /// A token for the ranks that wait at `bells`. Rank 0 has the first turn.
    pub(crate) fn new(seed: u64, bells: Vec<Arc<Doorbell>>) -> Self {
        let present = AtomicU64::new((1 << bells.len()) - 1);
        Self { seed, turn: AtomicU64::new(0), present, passes: AtomicU64::new(0), idle: AtomicU64::new(0), bells }
    }

    /// Blocks the thread of `rank` until it is the turn of `rank`.
    pub(crate) fn take(&self, rank: usize) {
        self.bells[rank].wait_until(|| self.turn.load(Ordering::Acquire) == rank as u64);
    }

    /// Resets the count of idle passes.
    pub(crate) fn progress(&self) {
        self.idle.store(0, Ordering::Relaxed);
    }

    /// Ends a turn of `rank` that made progress: draws the next rank and waits for the next turn of `rank`.
    pub(crate) fn pass(&self, rank: usize) {
        self.progress();
        self.draw();
        self.take(rank);
    }

    /// Ends an idle turn of `rank`. Returns false after too many consecutive idle passes of all ranks, which means a deadlock.
    pub(crate) fn pass_idle(&self, rank: usize) -> bool {
        if self.idle.fetch_add(1, Ordering::Relaxed) > IDLE_PASSES * self.bells.len() as u64 {
            return false;
        }
        self.draw();
        self.take(rank);
        true
    }

    /// Removes `rank` from the draw. It waits for its turn first, so that the mask changes only under the token.
    pub(crate) fn leave(&self, rank: usize) {
        self.take(rank);
        self.present.fetch_and(!(1 << rank), Ordering::AcqRel);
        self.draw();
    }

    /// Draws the next rank. Only the rank that has the token calls this.
    fn draw(&self) {
        let present = self.present.load(Ordering::Acquire);
        let ranks: u64 = u64::from(present.count_ones());
        if ranks == 0 {
            return;
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_word_pos(u128::from(2 * self.passes.fetch_add(1, Ordering::Relaxed)));
        let drawn = (0..self.bells.len()).filter(|rank| present >> rank & 1 == 1).nth((rng.next_u64() % ranks) as usize);
        if let Some(rank) = drawn {
            self.turn.store(rank as u64, Ordering::Release);
            self.bells[rank].ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bells(ranks: usize) -> Vec<Arc<Doorbell>> {
        (0..ranks).map(|_| Arc::default()).collect()
    }

    /// Threads that log their turns. Never do two run at once, and equal seeds give equal orders.
    fn turns(seed: u64) -> Vec<u64> {
        let turn_token = TurnToken::new(seed, bells(3));
        let (inside, log): (AtomicU64, Vec<AtomicU64>) = (AtomicU64::new(0), (0..3 * 50).map(|_| AtomicU64::new(0)).collect());
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (turn_token, inside, log, next) = (&turn_token, &inside, &log, &next);
                scope.spawn(move || {
                    turn_token.take(rank);
                    for _ in 0..50 {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two ranks run");
                        log[next.fetch_add(1, Ordering::SeqCst) as usize].store(rank as u64, Ordering::SeqCst);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        turn_token.pass(rank);
                    }
                    turn_token.leave(rank);
                });
            }
        });
        log.into_iter().map(AtomicU64::into_inner).collect()
    }

    #[test]
    fn one_rank_runs_and_the_seed_chooses_it() {
        assert_eq!(turns(1), turns(1));
        assert_ne!(turns(1), turns(2));
    }

    #[test]
    fn idle_ranks_are_reported_as_a_deadlock() {
        let turn_token = TurnToken::new(3, bells(1));
        assert!(turn_token.pass_idle(0));
        turn_token.pass(0);
        let passes = (0..).take_while(|_| turn_token.pass_idle(0)).count();
        assert_eq!(passes as u64, IDLE_PASSES + 1);
    }
}
