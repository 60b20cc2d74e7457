//! The optimizer's pool in the simulated machine: the time of a job follows from its bytes.

use super::world::{OpKind, SimWork, World};
use crate::trace::Recorder;
use std::cell::RefCell;
use std::rc::Rc;

/// A pool that accepts jobs but computes nothing.
pub struct SimPool {
    pub(super) world: Rc<RefCell<World>>,
    pub(super) bytes_per_s: f64,
    pub(super) wake_up_s: f64,
}

impl SimPool {
    /// Starts a job that reads and writes `bytes`.
    pub fn submit(&mut self, (name, index): (&'static str, u32), bytes: u64) {
        assert!(self.is_idle(), "one job at a time");
        let alone_ns = (self.wake_up_s + bytes as f64 / self.bytes_per_s) * 1e9;
        self.world.borrow_mut().submit(SimWork { kind: OpKind::Adam, name, index, alone_ns });
    }

    /// Whether the last job is done.
    pub fn is_idle(&self) -> bool {
        self.world.borrow().pool_is_idle()
    }

    /// Nanoseconds so far during which the pool had a job.
    pub(crate) fn busy_ns(&self) -> u64 {
        self.world.borrow().pool_busy_ns()
    }

    pub fn finish(&self) -> Recorder {
        self.world.borrow_mut().take_pool()
    }
}
