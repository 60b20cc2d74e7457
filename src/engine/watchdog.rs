//! A thread that notices when others stand still: an optimizer worker is named, and a driver without progress ends the run with an
//! account of what everything waits for. It reads what they publish ([`Vitals`]); they never wait for it.

use super::route::Hop;
use super::vitals::{Doing, Mark, Vitals};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::trace::now_ns;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two looks, at most.
const PERIOD: Duration = Duration::from_secs(1);
/// A worker that stands still for longer is named, or for longer than half the stall limit.
const WORKER_LIMIT: Duration = Duration::from_secs(30);

/// What the watchdog has to say.
#[derive(Debug)]
pub enum Alarm {
    /// An optimizer worker stands still; the run may go on.
    Worker(String),
    /// The driver makes no progress: lines that say what it and everything else waits for. Nothing can be saved any more.
    Stall(String),
}

/// Who hears it, on the watchdog's thread.
pub(crate) type OnAlarm = Box<dyn Fn(Alarm) + Send>;

/// The thread; it ends when this is dropped.
pub struct Watchdog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches from now on. A driver that makes no progress inside a step for `limit` is an alarm, unless `limit` is 0.
    ///
    /// # Errors
    /// `Resource` when the thread cannot start.
    pub fn start(vitals: Arc<Vitals>, limit: Duration, on_alarm: OnAlarm) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut watch = Watch::new(vitals, limit);
        let (stopped, period) = (stop.clone(), watch.period);
        let body = move || {
            while !stopped.load(Ordering::Relaxed) {
                std::thread::park_timeout(period);
                watch.look().into_iter().for_each(&on_alarm);
            }
        };
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(body);
        let thread = thread.map_err(|e| Error::resource("start the watchdog", e))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there has said so itself, and ends no training.
            let _ = thread.join();
        }
    }
}

/// For how long a count has not changed, in looks: a process that was stopped for hours is no older when it goes on.
#[derive(Clone, Debug, Default)]
struct Still {
    count: u64,
    looks: u32,
}

impl Still {
    fn look(&mut self, count: u64) -> u32 {
        self.looks = if count == self.count { self.looks + 1 } else { 0 };
        self.count = count;
        self.looks
    }
}

struct Watch {
    vitals: Arc<Vitals>,
    period: Duration,
    /// In looks; `u32::MAX` looks never come.
    limit: u32,
    worker_limit: u32,
    driver: Still,
    workers: Vec<Still>,
}

impl Watch {
    fn new(vitals: Arc<Vitals>, limit: Duration) -> Self {
        let no_limit = limit.is_zero();
        let period = if no_limit { PERIOD } else { PERIOD.min(limit / 8) };
        let looks = |time: Duration| u32::try_from(time.as_nanos() / period.as_nanos()).unwrap_or(u32::MAX);
        let worker_limit = if no_limit { WORKER_LIMIT } else { WORKER_LIMIT.min(limit / 2) };
        let workers = vec![Still::default(); vitals.workers.workers()];
        let limit = if no_limit { u32::MAX } else { looks(limit) };
        Self { period, limit, worker_limit: looks(worker_limit), driver: Still::default(), workers, vitals }
    }

    /// Looks once; what there is to say.
    fn look(&mut self) -> Vec<Alarm> {
        let mut alarms = Vec::new();
        for worker in 0..self.workers.len() {
            if let Some(bucket) = self.stands_still(worker) {
                let time = self.period * self.worker_limit;
                alarms.push(Alarm::Worker(format!("optimizer worker adam-{worker:02} has stood still for {time:?} in bucket {bucket}")));
            }
        }
        let in_step = self.vitals.doing().0 != Doing::Else;
        let looks = self.driver.look(self.vitals.progress());
        if !in_step {
            self.driver.looks = 0;
        } else if looks == self.limit {
            alarms.push(Alarm::Stall(self.report()));
        }
        alarms
    }

    /// The bucket in which `worker` has stood still for just as long as it may.
    fn stands_still(&mut self, worker: usize) -> Option<u64> {
        let pulse = &self.vitals.workers;
        let still = &mut self.workers[worker];
        let Some((job, bucket)) = pulse.owes(worker) else {
            still.looks = 0;
            return None;
        };
        (still.look(pulse.pieces(worker).wrapping_add(job)) == self.worker_limit).then_some(bucket)
    }

    fn report(&self) -> String {
        let (doing, number) = self.vitals.doing();
        let mut text = format!("no progress for {:?} (--stall-limit): the run ends; its last checkpoint stays\n", self.period * self.limit);
        let with_bucket = matches!(doing, Doing::Gradient | Doing::Params | Doing::Gather);
        let bucket = if with_bucket { format!(" {number}") } else { String::new() };
        // Writing into a string does not fail.
        let _ = writeln!(text, "  driver        {}{bucket}", doing.words());
        self.streams(&mut text);
        self.workers(&mut text);
        self.buckets(&mut text);
        self.events(&mut text);
        text
    }

    fn streams(&self, text: &mut String) {
        for stream in Stream::WITH_PEERS {
            let owed = |(hop, bucket): (Hop, u64)| format!("{} of bucket {bucket}", hop.leg().what);
            let pending = self.vitals.pending(stream).map_or("nothing that is known".into(), owed);
            let _ = writeln!(text, "  stream        {} owes {pending}", stream.name());
        }
    }

    fn workers(&self, text: &mut String) {
        for worker in 0..self.workers.len() {
            let owes = self.vitals.workers.owes(worker).map_or("is idle".into(), |(_, bucket)| format!("owes bucket {bucket}"));
            let pieces = self.vitals.workers.pieces(worker);
            let _ = writeln!(text, "  worker        adam-{worker:02} {owes}, after {pieces} pieces");
        }
    }

    /// Buckets that wait for the same thing, together.
    fn buckets(&self, text: &mut String) {
        let mut by_mark: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (bucket, mark) in self.vitals.buckets().enumerate() {
            by_mark.entry(mark.pending()).or_default().push(bucket.to_string());
        }
        for (pending, buckets) in by_mark {
            let _ = writeln!(text, "  bucket        {}: {pending}", buckets.join(", "));
        }
    }

    fn events(&self, text: &mut String) {
        let now = now_ns();
        for (at_ns, mark, number) in self.vitals.events().filter(|(_, mark, _)| *mark != Mark::Nothing) {
            let _ = writeln!(text, "  {:>10.3} s  {} {number}", -(now.saturating_sub(at_ns) as f64 / 1e9), mark.event());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::doorbell::Doorbell;
    use crate::host::homes::Homes;
    use crate::host::pool::{Call, Threads};

    const LIMIT: Duration = Duration::from_secs(80);

    fn watch(limit: Duration) -> Watch {
        Watch::new(Arc::new(Vitals::new(4, Arc::default(), Arc::default())), limit)
    }

    /// Looks until there is something to say, at most `looks` times: after how many looks, and what.
    fn look(watch: &mut Watch, looks: u32) -> Option<(u32, Alarm)> {
        (1..=looks).find_map(|n| watch.look().pop().map(|alarm| (n, alarm)))
    }

    fn stall(alarm: Option<(u32, Alarm)>) -> (u32, String) {
        match alarm {
            Some((looks, Alarm::Stall(report))) => (looks, report),
            other => panic!("no stall: {other:?}"),
        }
    }

    #[test]
    fn a_driver_without_progress_is_told_once_with_what_everything_waits_for() {
        let mut watch = watch(LIMIT);
        let vitals = watch.vitals.clone();
        vitals.record(Mark::Step, 17);
        vitals.record(Mark::Begun(Hop::GradsOut), 2);
        vitals.record(Mark::Begun(Hop::Optimize), 3);
        vitals.front(Stream::D2h, Some((Hop::GradsOut, 2)));
        vitals.now(Doing::Params, 3);
        // The first look sees the progress of before.
        let (looks, report) = stall(look(&mut watch, 200));
        assert_eq!(looks, 81);
        for line in [
            "no progress for 80s (--stall-limit): the run ends",
            "  driver        waits for the parameters of bucket 3\n",
            "  stream        compute owes nothing that is known\n",
            "  stream        d2h owes the gradient's copy of bucket 2\n",
            "  bucket        0, 1: nothing is pending\n",
            "  bucket        2: waits for its gradient's copy to the host\n",
            "  bucket        3: is with the optimizer's workers\n",
            " s  begin step 17\n",
            " s  copy gradient: bucket 2\n",
            " s  give the workers bucket 3\n",
        ] {
            assert!(report.contains(line), "{line:?} is not in {report}");
        }
        assert!(look(&mut watch, 200).is_none(), "told twice");
    }

    #[test]
    fn any_event_is_progress_and_what_is_no_step_is_not_watched() {
        let mut watch = watch(LIMIT);
        let vitals = watch.vitals.clone();
        vitals.now(Doing::Else, 0);
        assert!(look(&mut watch, 500).is_none(), "a long save");
        vitals.now(Doing::Norm, 0);
        for bucket in 0..4 {
            assert!(look(&mut watch, 79).is_none());
            vitals.record(Mark::Done(Hop::GradsOut), bucket);
        }
        assert_eq!(stall(look(&mut watch, 100)).0, 81);
    }

    #[test]
    fn without_a_limit_no_driver_stalls() {
        let mut watch = watch(Duration::ZERO);
        watch.vitals.now(Doing::Data, 0);
        assert!(look(&mut watch, 10_000).is_none());
    }

    /// Lets a worker go on when it is dropped, so that a test that fails does not hang.
    struct Release(Arc<AtomicBool>);
    impl Drop for Release {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_worker_that_stands_still_is_named_with_its_bucket() {
        let (bell, go) = (Arc::new(Doorbell::default()), Arc::new(AtomicBool::new(false)));
        let mut pool = Threads::start(2, Homes::default(), bell.clone(), 0, |_| Ok(())).unwrap();
        let mut watch = Watch::new(Arc::new(Vitals::new(8, bell.clone(), pool.pulse())), Duration::ZERO);
        assert!(look(&mut watch, 100).is_none(), "idle");
        let release = Release(go.clone());
        // The second piece is done when somebody says so.
        let run = move |piece: usize| {
            while piece == 1 && !go.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        pool.submit(Call { label: ("stuck", 7), pieces: 2, run });
        let stuck = |pulse: &crate::host::pulse::Pulse| (0..2).filter(|&worker| pulse.owes(worker).is_some()).count() == 1;
        while !(stuck(&pool.pulse()) && (0..2).map(|worker| pool.pulse().pieces(worker)).sum::<u64>() == 2) {
            std::thread::yield_now();
        }
        let worker = (0..2).find(|&worker| pool.pulse().owes(worker).is_some()).unwrap();
        let (looks, alarm) = look(&mut watch, 100).unwrap();
        let Alarm::Worker(line) = alarm else { panic!("{alarm:?}") };
        assert_eq!((looks, line), (31, format!("optimizer worker adam-0{worker} has stood still for 30s in bucket 7")));
        let report = watch.report();
        assert!(report.contains(&format!("  worker        adam-0{worker} owes bucket 7, after ")), "{report}");
        assert!(report.contains(&format!("  worker        adam-0{} is idle, after ", 1 - worker)), "{report}");
        assert!(look(&mut watch, 100).is_none(), "named twice");
        drop(release);
        bell.wait_until(|| pool.is_idle().unwrap());
        assert!(look(&mut watch, 100).is_none(), "idle again");
        pool.finish().unwrap();
    }

    #[test]
    fn the_thread_looks_by_itself_and_ends_with_its_owner() {
        let vitals = Arc::new(Vitals::new(1, Arc::default(), Arc::default()));
        let stalled = Arc::new(AtomicBool::new(false));
        let heard = stalled.clone();
        vitals.now(Doing::Data, 0);
        let on_alarm = Box::new(move |alarm| heard.store(matches!(alarm, Alarm::Stall(_)), Ordering::Relaxed));
        let dog = Watchdog::start(vitals.clone(), Duration::from_millis(80), on_alarm).unwrap();
        while !stalled.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(dog);
        assert_eq!(Arc::strong_count(&vitals), 1, "the thread still holds it");
    }
}
