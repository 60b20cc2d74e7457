//! A baton for tests: of all ranks exactly one runs, drawn from a seed whenever one may go on or has nothing to do.

use crate::host::doorbell::Doorbell;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Passes in a row by ranks with nothing to do, for each rank, after which nobody ever will have.
const IDLE_PASSES: u64 = 64;

/// Whose turn it is, and how often in a row a rank had nothing to do.
pub(crate) struct Baton {
    seed: u64,
    /// The rank that runs.
    turn: AtomicU64,
    /// Ranks that take part, a bit each.
    present: AtomicU64,
    passes: AtomicU64,
    idle: AtomicU64,
    bells: Vec<Arc<Doorbell>>,
}

impl Baton {
    /// A baton for the ranks that wait at `bells`; rank 0 has it first.
    pub(crate) fn new(seed: u64, bells: Vec<Arc<Doorbell>>) -> Self {
        let present = AtomicU64::new((1 << bells.len()) - 1);
        Self { seed, turn: AtomicU64::new(0), present, passes: AtomicU64::new(0), idle: AtomicU64::new(0), bells }
    }

    /// Waits for the turn of `rank`, on its thread.
    pub(crate) fn take(&self, rank: usize) {
        self.bells[rank].wait_until(|| self.turn.load(Ordering::Acquire) == rank as u64);
    }

    /// Something was done.
    pub(crate) fn progress(&self) {
        self.idle.store(0, Ordering::Relaxed);
    }

    /// `rank` has done something; who goes on is drawn.
    pub(crate) fn pass(&self, rank: usize) {
        self.progress();
        self.draw();
        self.take(rank);
    }

    /// `rank` has nothing to do. False when nobody has had for so long that nobody will: a deadlock.
    pub(crate) fn pass_idle(&self, rank: usize) -> bool {
        if self.idle.fetch_add(1, Ordering::Relaxed) > IDLE_PASSES * self.bells.len() as u64 {
            return false;
        }
        self.draw();
        self.take(rank);
        true
    }

    /// `rank` is drawn no more. It has its turn once more before that: who draws knows all that have left.
    pub(crate) fn leave(&self, rank: usize) {
        self.take(rank);
        self.present.fetch_and(!(1 << rank), Ordering::AcqRel);
        self.draw();
    }

    /// Only who has the baton draws.
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

    /// Threads that write down their turns: never two at once, and the same order for the same seed.
    fn turns(seed: u64) -> Vec<u64> {
        let baton = Baton::new(seed, bells(3));
        let (inside, log): (AtomicU64, Vec<AtomicU64>) = (AtomicU64::new(0), (0..3 * 50).map(|_| AtomicU64::new(0)).collect());
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (baton, inside, log, next) = (&baton, &inside, &log, &next);
                scope.spawn(move || {
                    baton.take(rank);
                    for _ in 0..50 {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two ranks run");
                        log[next.fetch_add(1, Ordering::SeqCst) as usize].store(rank as u64, Ordering::SeqCst);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        baton.pass(rank);
                    }
                    baton.leave(rank);
                });
            }
        });
        log.into_iter().map(AtomicU64::into_inner).collect()
    }

    #[test]
    fn one_rank_runs_and_the_seed_says_which() {
        assert_eq!(turns(1), turns(1));
        assert_ne!(turns(1), turns(2));
    }

    #[test]
    fn when_nobody_has_anything_to_do_that_is_said() {
        let baton = Baton::new(3, bells(1));
        assert!(baton.pass_idle(0));
        baton.pass(0);
        let passes = (0..).take_while(|_| baton.pass_idle(0)).count();
        assert_eq!(passes as u64, IDLE_PASSES + 1);
    }
}
