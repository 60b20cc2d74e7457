//! The observer of a run.

use super::run_facts::RunFacts;
use crate::engine::watch::watchdog::Alarm;
use crate::metrics::StepMetrics;
use crate::planner::plan::Plan;

/// Receives the events of a run.
pub trait Observer {
    /// Everything is resolved and checked; training begins at `step` of `max_steps`.
    fn begin(&mut self, plan: &Plan, facts: &RunFacts);
    /// A step is done.
    fn step(&mut self, metrics: &StepMetrics);
    /// A line for people: a checkpoint was written, something was tidied up.
    fn note(&mut self, line: &str);
    /// A line for people who ask for details: how the run was prepared, tables of the plan. Nothing by default.
    fn detail(&mut self, _line: &str) {}
    /// A line for people: something is not as it should be, and training goes on.
    fn warn(&mut self, line: &str);
    /// Of `all` bytes of data `done` are read; `activity` is done with them, in words. Comes often, before [`Observer::begin`].
    fn progress(&mut self, _activity: &str, _done: u64, _all: u64) {}
    /// The handler, called on another thread, of stalled threads. By default there is none, and threads are not watched.
    fn on_alarm(&mut self) -> Option<Box<dyn Fn(Alarm) + Send>> {
        None
    }
}
