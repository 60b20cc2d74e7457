//! Performance counters of the optimizer's workers. Each thread has its own set, which is read once, from outside, so counters add no work
//! to a step.
//!
//! Cycles that a worker spends spinning for its next job are included.

use crate::error::{Error, Result};
use crate::units::counted;
use perf_event::events::{Cache, CacheOp, CacheResult, Event, Hardware, Software, WhichCache};
use perf_event::{Builder, Counter};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Prefix of the names of the optimizer's threads.
pub(crate) const WORKER_ROLE: &str = "adam";

const LLC_READ_MISS: Cache = Cache { which: WhichCache::LL, operation: CacheOp::READ, result: CacheResult::MISS };

/// Counted events, in the order of the report. `cache_misses` depends on the CPU: last-level misses on Intel, first-level misses on Arm.
const EVENTS: [(&str, Event); 7] = [
    ("cycles", Event::Hardware(Hardware::CPU_CYCLES)),
    ("instructions", Event::Hardware(Hardware::INSTRUCTIONS)),
    ("llc_read_misses", Event::Cache(LLC_READ_MISS)),
    ("cache_misses", Event::Hardware(Hardware::CACHE_MISSES)),
    ("task_clock_ns", Event::Software(Software::TASK_CLOCK)),
    ("page_faults", Event::Software(Software::PAGE_FAULTS)),
    ("context_switches", Event::Software(Software::CONTEXT_SWITCHES)),
];

/// Running counters of several threads; dropping them stops them.
pub(crate) struct WorkerCounters {
    threads: usize,
    counters: Vec<(&'static str, Counter)>,
    /// Events that cannot be counted, by the kernel's error message.
    missing: BTreeMap<String, Vec<&'static str>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct WorkerCounts {
    pub threads: usize,
    /// Events by name. Counts of events that shared a hardware counter are extrapolated from the time during which they were counted.
    pub counts: BTreeMap<&'static str, u64>,
    /// Events that could not be counted, with the reason.
    pub missing: Vec<String>,
}

impl WorkerCounters {
    /// Starts counting on this process's threads whose names begin with `role`: see [`WORKER_ROLE`].
    ///
    /// # Errors
    /// `Io` when the process cannot list its own threads.
    pub(crate) fn start(role: &str) -> Result<Self> {
        threads(Path::new("/proc/self/task"), role).map(Self::on)
    }

    /// Starts counting on the calling thread.
    pub(crate) fn of_this_thread() -> Self {
        Self::on(vec![0])
    }

    fn on(threads: Vec<i32>) -> Self {
        let mut counters = Self { threads: threads.len(), counters: Vec::new(), missing: BTreeMap::new() };
        for thread in threads {
            for (name, event) in &EVENTS {
                counters.add(name, event, thread);
            }
        }
        counters
    }

    fn add(&mut self, name: &'static str, event: &Event, thread: i32) {
        match count(event, thread) {
            Ok(counter) => self.counters.push((name, counter)),
            Err(e) => {
                let names = self.missing.entry(e.to_string()).or_default();
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
    }

    /// Counts since the start.
    ///
    /// # Errors
    /// `Resource` when a counter cannot be read.
    pub(crate) fn read(&mut self) -> Result<WorkerCounts> {
        let mut counts = BTreeMap::new();
        for (name, counter) in &mut self.counters {
            let read = counter.read_count_and_time().map_err(|e| Error::resource(format!("read the counter of {name}"), e))?;
            let scale = if read.time_running == 0 { 0.0 } else { read.time_enabled as f64 / read.time_running as f64 };
            *counts.entry(*name).or_default() += (read.count as f64 * scale) as u64;
        }
        let missing = self.missing.iter().map(|(cause, names)| format!("{}: {cause}", names.join(", "))).collect();
        Ok(WorkerCounts { threads: self.threads, counts, missing })
    }
}

/// A running counter of `event` on `thread`. Only user mode is counted, except for context switches, which happen in the kernel.
fn count(event: &Event, thread: i32) -> std::io::Result<Counter> {
    let mut builder = Builder::new().observe_pid(thread).kind(event.clone());
    if *event == Event::Software(Software::CONTEXT_SWITCHES) {
        builder.include_kernel();
    }
    let mut counter = builder.build()?;
    counter.enable()?;
    Ok(counter)
}

/// Ids of the threads in `tasks` whose names begin with `role` and a hyphen. Threads that end meanwhile are skipped.
fn threads(tasks: &Path, role: &str) -> Result<Vec<i32>> {
    let entries = std::fs::read_dir(tasks).map_err(|e| Error::io("list", tasks, e))?;
    let name_of = |id: &i32| std::fs::read_to_string(tasks.join(id.to_string()).join("comm")).unwrap_or_default();
    let is_worker = |id: &i32| name_of(id).strip_prefix(role).is_some_and(|rest| rest.starts_with('-'));
    let mut ids: Vec<i32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_worker).collect();
    ids.sort_unstable();
    Ok(ids)
}

impl WorkerCounts {
    /// Events that can be counted and events that cannot: `task clock, page faults; not counted: cycles: ...`
    pub(crate) fn availability(&self) -> String {
        let countable: Vec<_> = EVENTS.iter().map(|(name, _)| *name).filter(|name| self.counts.contains_key(name)).collect();
        let missing = self.missing.iter().map(|missing| format!("not counted: {missing}"));
        Some(countable.join(", ")).into_iter().filter(|list| !list.is_empty()).chain(missing).collect::<Vec<_>>().join("; ")
    }
}

impl fmt::Display for WorkerCounts {
    /// For example `15 threads: cycles 1.2e12, instructions 9.1e11 (0.76 a cycle), ...; not counted: ...`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&counted(self.threads, "thread"))?;
        let number = |count: u64| if count < 100_000 { count.to_string() } else { format!("{:.3e}", count as f64) };
        let known = EVENTS.iter().filter_map(|(name, _)| Some((*name, *self.counts.get(name)?)));
        for (index, (name, count)) in known.enumerate() {
            write!(f, "{} {} {}", if index == 0 { ":" } else { "," }, name.replace('_', " "), number(count))?;
        }
        if let (Some(&cycles @ 1..), Some(&instructions)) = (self.counts.get("cycles"), self.counts.get("instructions")) {
            write!(f, "; {:.2} instructions a cycle", instructions as f64 / cycles as f64)?;
        }
        self.missing.iter().try_for_each(|missing| write!(f, "; not counted: {missing}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::topology::tests::tree;
    use crate::sweep::PROMPTLY;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    #[test]
    fn workers_are_known_by_their_names() {
        let dir = tree(&[("11/comm", "adam-00@cpu3\n"), ("9/comm", "adam-01\n"), ("7/comm", "driver\n"), ("x/comm", "adam-02\n")]);
        assert_eq!(threads(dir.path(), "adam").unwrap(), [9, 11]);
        assert!(threads(&dir.path().join("nowhere"), "adam").is_err());
    }

    /// On the test machine software events are counted, or a reason is given.
    #[test]
    fn a_worker_is_counted_from_outside() {
        let (counted, done) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let work = || {
                let mut x = 1u64;
                while !done.load(Ordering::Relaxed) {
                    x = std::hint::black_box(x.wrapping_mul(3));
                    counted.store(true, Ordering::Relaxed);
                }
            };
            std::thread::Builder::new().name("counted-00".into()).spawn_scoped(scope, work).unwrap();
            while !counted.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let mut counters = WorkerCounters::start("counted").unwrap();
            let (begin, is_counted) =
                (Instant::now(), |counts: &WorkerCounts| counts.counts.get("task_clock_ns").is_none_or(|&ns| ns > 1_000_000));
            let mut counts = counters.read().unwrap();
            while !is_counted(&counts) && begin.elapsed() < PROMPTLY {
                std::thread::sleep(Duration::from_millis(30));
                counts = counters.read().unwrap();
            }
            done.store(true, Ordering::Relaxed);
            assert_eq!(counts.threads, 1);
            assert!(is_counted(&counts), "{counts}");
            assert!(!counts.counts.is_empty() || !counts.missing.is_empty(), "{counts}");
        });
    }

    #[test]
    fn counts_print_in_order_and_absence_is_noted_once() {
        let counts = [("instructions", 3_000_000), ("cycles", 2_000_000), ("page_faults", 7)].into_iter().collect();
        let missing = vec!["llc_read_misses: not here".into()];
        let text = WorkerCounts { threads: 2, counts, missing }.to_string();
        let expected = "2 threads: cycles 2.000e6, instructions 3.000e6, page faults 7; 1.50 instructions a cycle; \
            not counted: llc_read_misses: not here";
        assert_eq!(text, expected);
        let of_this_thread = WorkerCounters::of_this_thread().read().unwrap();
        assert!(!of_this_thread.availability().is_empty());
    }
}
