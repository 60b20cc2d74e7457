//! A thread that detects stalls. It names an optimizer worker that makes no progress. If no driver makes progress, it reports all pending
//! waits, of all ranks if there are several, and the run ends. It reads published state ([`DriverState`], the progress counters); no other
//! thread ever waits for it.
//!
//! With several processes, each watches its own ranks. A driver that waits for other processes to complete an order makes no progress of
//! its own, but this is not a stall: those processes watch themselves, and the connection detects a process that dies or stops responding.

use super::driver_state::{DriverActivity, DriverEvent, DriverState, EVENTS};
use super::wait_graph::{PendingOrder, WaitEdge};
use crate::device::Stream;
use crate::engine::protocol::route::Hop;
use crate::error::{Error, Result};
use crate::ranks::progress::ProgressCounters;
use crate::trace::now_ns;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest time between two polls.
const PERIOD: Duration = Duration::from_secs(1);
/// A worker is named after this time without progress, or after half the stall limit if that is shorter.
const WORKER_LIMIT: Duration = Duration::from_secs(30);

/// The state that a watchdog reads.
#[derive(Clone)]
pub struct Watched {
    /// State of the driver and workers of each local rank.
    pub(in crate::engine) ranks: Vec<Arc<DriverState>>,
    /// Progress counters, if there are several ranks.
    pub(in crate::engine) progress: Option<Arc<ProgressCounters>>,
}

impl Watched {
    /// A single driver without peers.
    pub(in crate::engine) fn alone(driver_state: Arc<DriverState>) -> Self {
        Self { ranks: vec![driver_state], progress: None }
    }

    /// The local ranks with their numbers.
    fn numbered(&self) -> impl Iterator<Item = (usize, &DriverState)> {
        let first = self.progress.as_ref().map_or(0, |progress| progress.local_ranks().start);
        self.ranks.iter().enumerate().map(move |(place, driver_state)| (first + place, &**driver_state))
    }

    /// Every local rank with its missing publications. Ranks that block others come before the ranks that wait for them.
    fn by_lateness(&self) -> Vec<(usize, &DriverState, Option<WaitEdge>)> {
        let missing = |rank: usize, driver_state: &DriverState| {
            self.progress.as_ref().and_then(|progress| WaitEdge::of(progress, rank, driver_state.activity()))
        };
        let mut ranks: Vec<_> = self.numbered().map(|(rank, driver_state)| (rank, driver_state, missing(rank, driver_state))).collect();
        let named: Vec<usize> =
            ranks.iter().filter_map(|(_, _, missing)| missing.as_ref()).flat_map(|missing| missing.ranks.clone()).collect();
        ranks.sort_by_key(|(rank, driver_state, missing)| (missing.is_some(), !named.contains(rank), driver_state.recorded()));
        ranks
    }

    /// ` of rank 1`, if there are several ranks.
    fn of_rank(&self, rank: usize) -> String {
        self.progress.as_ref().map_or(String::new(), |_| format!(" of rank {rank}"))
    }

    /// The order that a local rank waits for, if ranks of other processes have not completed it.
    fn remote_order(&self) -> Option<PendingOrder> {
        let waits = self.ranks.iter().any(|driver_state| driver_state.activity().0 == DriverActivity::Orders);
        self.progress.as_ref().filter(|_| waits).and_then(|progress| PendingOrder::on_remote_processes(progress))
    }

    /// Whether a driver is inside a step, which has to make progress. A driver that waits for an order is not, if only ranks of other
    /// processes have yet to complete it.
    fn is_in_step(&self, remote: Option<&PendingOrder>) -> bool {
        let waits_abroad = remote.is_some_and(|orders| orders.is_done_here);
        self.ranks.iter().map(|driver_state| driver_state.activity().0).any(|activity| match activity {
            // A save may take as long as the disk takes.
            DriverActivity::Else | DriverActivity::Save => false,
            DriverActivity::Orders => !waits_abroad,
            _ => true,
        })
    }
}

/// A report of the watchdog.
#[derive(Debug)]
pub enum Alarm {
    /// An optimizer worker or the disk makes no progress; the run may continue.
    Worker(String),
    /// Another process takes long to complete an order; the run waits as long as that process lives.
    Process(String),
    /// No driver makes progress: a report of all pending waits. Nothing can be saved any more.
    Stall(String),
}

/// Receives alarms, on the watchdog's thread.
pub(crate) type OnAlarm = Box<dyn Fn(Alarm) + Send>;

/// The watchdog's thread; it ends when this is dropped.
pub struct Watchdog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts to watch. A stall is reported if no driver makes progress for `limit` while one of them is inside a step; a `limit` of 0
    /// turns this off.
    ///
    /// # Errors
    /// `Resource` when the thread cannot start.
    pub fn start(watched: Watched, limit: Duration, on_alarm: OnAlarm) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut watch = Watch::new(watched, limit);
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

    /// Makes the watchdog poll now, in addition to its regular polls.
    pub fn poll_now(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.poll_now();
        if let Some(thread) = self.thread.take() {
            // The panic handler has reported a panic of this thread, and it must not end training.
            let _ = thread.join();
        }
    }
}

/// Number of polls in which a count has not changed. It counts polls, not wall time, so that a process that was stopped for hours is not
/// reported as stalled.
#[derive(Clone, Debug, Default)]
struct StallCounter {
    count: u64,
    looks: u32,
}

impl StallCounter {
    fn look(&mut self, count: u64) -> u32 {
        self.looks = if count == self.count { self.looks + 1 } else { 0 };
        self.count = count;
        self.looks
    }
}

struct Watch {
    watched: Watched,
    period: Duration,
    /// Limits in polls; `u32::MAX` means never.
    limit: u32,
    worker_limit: u32,
    drivers: StallCounter,
    /// Polls in which training waited for the disk.
    disk: StallCounter,
    /// Polls of the order that other processes have not completed.
    remote_order: StallCounter,
    /// By rank and worker.
    workers: Vec<Vec<StallCounter>>,
}

impl Watch {
    fn new(watched: Watched, limit: Duration) -> Self {
        let no_limit = limit.is_zero();
        let period = if no_limit { PERIOD } else { PERIOD.min(limit / 8) };
        let looks = |time: Duration| u32::try_from(time.as_nanos() / period.as_nanos()).unwrap_or(u32::MAX);
        let worker_limit = if no_limit { WORKER_LIMIT } else { WORKER_LIMIT.min(limit / 2) };
        let workers = watched.ranks.iter().map(|driver_state| vec![StallCounter::default(); driver_state.workers.workers()]).collect();
        let limit = if no_limit { u32::MAX } else { looks(limit) };
        let (drivers, disk, remote_order) = Default::default();
        Self { period, limit, worker_limit: looks(worker_limit), drivers, disk, remote_order, workers, watched }
    }

    /// Polls once; returns the alarms.
    fn look(&mut self) -> Vec<Alarm> {
        let remote = self.watched.remote_order();
        let mut alarms = self.poll_workers();
        alarms.extend(self.poll_disk());
        alarms.extend(self.poll_remote_order(remote.as_ref()));
        alarms.extend(self.poll_drivers(remote.as_ref()));
        alarms
    }

    fn poll_workers(&mut self) -> Vec<Alarm> {
        let mut alarms = Vec::new();
        for ((rank, driver_state), stills) in self.watched.numbered().zip(&mut self.workers) {
            for (worker, still) in stills.iter_mut().enumerate() {
                if let Some(bucket) = stalled_bucket(driver_state, worker, still, self.worker_limit) {
                    let (of_rank, time) = (self.watched.of_rank(rank), self.period * self.worker_limit);
                    let line = format!("optimizer worker adam-{worker:02}{of_rank} has made no progress for {time:?} in bucket {bucket}");
                    alarms.push(Alarm::Worker(line));
                }
            }
        }
        alarms
    }

    /// Names the disk if training waits for a save from which the disk takes nothing.
    fn poll_disk(&mut self) -> Option<Alarm> {
        let progress = self.progress();
        if self.watched.ranks.iter().all(|driver_state| driver_state.activity().0 != DriverActivity::Save) {
            self.disk.looks = 0;
            return None;
        }
        let time = self.period * self.worker_limit;
        let line = || format!("training waits for a checkpoint, of which the disk has taken nothing for {time:?}");
        (self.disk.look(progress) == self.worker_limit).then(|| Alarm::Worker(line()))
    }

    fn progress(&self) -> u64 {
        self.watched.ranks.iter().fold(0u64, |sum, driver_state| sum.wrapping_add(driver_state.progress()))
    }

    /// Names the processes that have not completed the order, once for each stall limit that has passed.
    fn poll_remote_order(&mut self, remote: Option<&PendingOrder>) -> Option<Alarm> {
        let Some(orders) = remote else {
            self.remote_order.looks = 0;
            return None;
        };
        let looks = self.remote_order.look(orders.count);
        let is_due = looks > 0 && looks.is_multiple_of(self.limit);
        is_due.then(|| Alarm::Process(format!("{orders}; this process has waited for it for {:?}", self.period * looks)))
    }

    fn poll_drivers(&mut self, remote: Option<&PendingOrder>) -> Option<Alarm> {
        let progress = self.progress();
        let looks = self.drivers.look(progress);
        if !self.watched.is_in_step(remote) {
            self.drivers.looks = 0;
            return None;
        }
        (looks == self.limit).then(|| Alarm::Stall(self.report(remote)))
    }

    /// The stall report: one line for each rank and for an order that other processes execute, then the full state of each rank.
    fn report(&self, remote: Option<&PendingOrder>) -> String {
        let mut text =
            format!("no progress for {:?} (--stall-limit): the run ends; its last checkpoint remains\n", self.period * self.limit);
        let ranks = self.watched.by_lateness();
        let several = ranks.len() > 1;
        // Writing into a string cannot fail.
        for (rank, driver_state, missing) in &ranks {
            let name = if several { format!("rank {rank}") } else { "driver".into() };
            let _ = match missing {
                Some(missing) => writeln!(text, "  {name:<14}waits for {missing}"),
                None => writeln!(text, "  {name:<14}{}", activity(driver_state)),
            };
        }
        let _ = remote.map_or(Ok(()), |orders| writeln!(text, "  {orders}"));
        for (rank, driver_state, _) in ranks {
            if several {
                let _ = writeln!(text, "rank {rank} {}", activity(driver_state));
            }
            account(driver_state, EVENTS / self.watched.ranks.len(), &mut text);
        }
        text
    }
}

/// The bucket of `worker`, if the worker has made no progress for exactly `limit` polls.
fn stalled_bucket(driver_state: &DriverState, worker: usize, still: &mut StallCounter, limit: u32) -> Option<u64> {
    let heartbeats = &driver_state.workers;
    let Some((job, bucket)) = heartbeats.owes(worker) else {
        still.looks = 0;
        return None;
    };
    (still.look(heartbeats.pieces(worker).wrapping_add(job)) == limit).then_some(bucket)
}

/// Description of a driver's current activity.
fn activity(driver_state: &DriverState) -> String {
    let (activity, number) = driver_state.activity();
    let bucket = if activity.has_bucket() { format!(" {number}") } else { String::new() };
    format!("{}{bucket}", activity.description())
}

/// Appends the pending waits of the streams, workers and buckets of one rank, and its last events.
fn account(driver_state: &DriverState, events: usize, text: &mut String) {
    streams(driver_state, text);
    workers(driver_state, text);
    buckets(driver_state, text);
    last_events(driver_state, events, text);
}

fn streams(driver_state: &DriverState, text: &mut String) {
    for stream in Stream::WITH_PEERS {
        let owed = |(hop, bucket): (Hop, u64)| format!("{} of bucket {bucket}", hop.leg().noun);
        let pending = driver_state.pending(stream).map_or("no known operation".into(), owed);
        let _ = writeln!(text, "  stream        {} owes {pending}", stream.name());
    }
}

fn workers(driver_state: &DriverState, text: &mut String) {
    for worker in 0..driver_state.workers.workers() {
        let owes = driver_state.workers.owes(worker).map_or("is idle".into(), |(_, bucket)| format!("owes bucket {bucket}"));
        let pieces = driver_state.workers.pieces(worker);
        let _ = writeln!(text, "  worker        adam-{worker:02} {owes}, after {pieces} pieces");
    }
}

/// Groups buckets by the description of their wait.
fn buckets(driver_state: &DriverState, text: &mut String) {
    let mut by_mark: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (bucket, mark) in driver_state.buckets().enumerate() {
        by_mark.entry(mark.pending()).or_default().push(bucket.to_string());
    }
    for (pending, buckets) in by_mark {
        let _ = writeln!(text, "  bucket        {}: {pending}", buckets.join(", "));
    }
}

fn last_events(driver_state: &DriverState, count: usize, text: &mut String) {
    let now = now_ns();
    for (at_ns, mark, number) in driver_state.events(count).filter(|(_, mark, _)| *mark != DriverEvent::Nothing) {
        let _ = writeln!(text, "  {:>10.3} s  {} {number}", -(now.saturating_sub(at_ns) as f64 / 1e9), mark.event());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::protocol::order::Order;
    use crate::host::doorbell::Doorbell;
    use crate::host::pool::{Call, Threads};
    use crate::host::worker_nodes::WorkerNodes;
    use crate::ranks::notice::{Audience, Notice, Outbox};
    use crate::ranks::progress::{CounterSizes, RemoteProcesses};

    const LIMIT: Duration = Duration::from_secs(80);

    fn watch(limit: Duration) -> Watch {
        Watch::new(Watched::alone(Arc::new(DriverState::new(4, Arc::default(), Arc::default()))), limit)
    }

    /// Polls until there is an alarm, at most `looks` times; returns the number of polls and the alarm.
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
    fn a_driver_without_progress_is_reported_once_with_all_waits() {
        let mut watch = watch(LIMIT);
        let driver_state = watch.watched.ranks[0].clone();
        driver_state.record(DriverEvent::Step, 17);
        driver_state.record(DriverEvent::Begun(Hop::GradsOut), 2);
        driver_state.record(DriverEvent::Begun(Hop::Optimize), 3);
        driver_state.set_pending(Stream::D2h, Some((Hop::GradsOut, 2)));
        driver_state.set_activity(DriverActivity::Params, 3);
        // The first poll sees earlier progress.
        let (looks, report) = stall(look(&mut watch, 200));
        assert_eq!(looks, 81);
        for line in [
            "no progress for 80s (--stall-limit): the run ends",
            "  driver        waits for the parameters of bucket 3\n",
            "  stream        compute owes no known operation\n",
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
    fn a_stall_report_names_the_late_rank_first_and_the_ranks_that_wait() {
        let driver_state: Vec<_> = (0..3).map(|_| Arc::new(DriverState::new(4, Arc::default(), Arc::default()))).collect();
        let progress = Arc::new(ProgressCounters::new(
            CounterSizes { ranks: 3, buckets: 4, norm_partials: 4, partial_sums: 3, ..CounterSizes::default() },
            None,
        ));
        let watched = Watched { ranks: driver_state.clone(), progress: Some(progress.clone()) };
        let mut watch = Watch::new(watched, LIMIT);
        // Rank 1 saves, or is outside of a step for another reason; peers that wait for it are not reported.
        progress.give_order(0, [0; 6]);
        assert!(look(&mut watch, 200).is_none());
        [0, 2].into_iter().for_each(|rank| progress.publish_written(rank));
        driver_state[0].set_activity(DriverActivity::Norm, 0);
        driver_state[1].set_activity(DriverActivity::Device, 0);
        driver_state[2].set_activity(DriverActivity::Params, 3);
        driver_state[1].record(DriverEvent::Begun(Hop::GradsOut), 2);
        (0..3).for_each(|_| driver_state[2].record(DriverEvent::Module, 1));
        let (looks, report) = stall(look(&mut watch, 200));
        assert_eq!(looks, 81);
        let order = [
            "  rank 1        waits for the device to finish enqueued work\n",
            "  rank 2        waits for the parameters of bucket 3\n",
            "  rank 0        waits for the gradient of bucket 0 of rank 1\n",
            "\nrank 1 waits for the device",
            "  bucket        2: waits for its gradient's copy to the host\n",
            "\nrank 2 waits for the parameters of bucket 3\n",
            "\nrank 0 waits for the gradient norm\n",
        ];
        let places: Vec<_> = order.iter().map(|line| report.find(line).unwrap_or_else(|| panic!("{line:?} is not in {report}"))).collect();
        assert!(places.is_sorted(), "{report}");
    }

    /// Process 0 of two with two ranks each; its rank 0 waits until `order` is completed. Returns its progress counters, too.
    fn watch_of_two_processes(order: u64) -> (Watch, Arc<ProgressCounters>) {
        let driver_state: Vec<_> = (0..2).map(|_| Arc::new(DriverState::new(4, Arc::default(), Arc::default()))).collect();
        let remote =
            RemoteProcesses { process: 0, names: vec!["process 0 on a".into(), "process 1 on b".into()], outbox: Arc::new(NoOutbox) };
        let progress = Arc::new(ProgressCounters::linked(CounterSizes { ranks: 4, buckets: 4, ..CounterSizes::default() }, remote));
        progress.give_order(order, [0; 6]);
        driver_state[0].set_activity(DriverActivity::Orders, 0);
        (Watch::new(Watched { ranks: driver_state, progress: Some(progress.clone()) }, LIMIT), progress)
    }

    struct NoOutbox;
    impl Outbox for NoOutbox {
        fn send(&self, _: Audience, _: Notice) {}
    }

    #[test]
    fn an_order_that_another_process_carries_out_is_no_stall_and_that_process_is_named() {
        for (order, words) in [(Order::Save, "is saving"), (Order::Evaluate, "is evaluating"), (Order::Step, "is in a step")] {
            let (mut watch, progress) = watch_of_two_processes(order as u64);
            [1, 3].into_iter().for_each(|rank| progress.publish_done(rank));
            for nth in 1..=3 {
                let (looks, alarm) = look(&mut watch, 200).unwrap();
                let Alarm::Process(line) = alarm else { panic!("{alarm:?}") };
                let expected = format!("process 1 on b {words}; this process has waited for it for {}s", 80 * nth);
                assert_eq!((looks, line), (80 + u32::from(nth == 1), expected));
            }
            progress.publish_done(2);
            watch.watched.ranks[0].set_activity(DriverActivity::Else, 0);
            assert!(look(&mut watch, 200).is_none(), "{order:?} is carried out");
        }
    }

    #[test]
    fn a_rank_here_that_does_not_carry_out_an_order_is_a_stall_and_the_report_names_the_process_that_saves() {
        let (mut watch, _) = watch_of_two_processes(Order::Save as u64);
        let mut alarms = Vec::new();
        (0..82).for_each(|_| alarms.extend(watch.look()));
        let [Alarm::Stall(report), Alarm::Process(_)] = &alarms[..] else { panic!("{alarms:?}") };
        assert!(report.contains("  rank 0        waits for the reply of ranks 1, 2, 3\n  process 1 on b is saving\n"), "{report}");
    }

    #[test]
    fn a_process_behind_the_first_watches_its_own_ranks_by_their_numbers() {
        let driver_state: Vec<_> = (0..2).map(|_| Arc::new(DriverState::new(4, Arc::default(), Arc::default()))).collect();
        let remote =
            RemoteProcesses { process: 1, names: vec!["process 0 on a".into(), "process 1 on b".into()], outbox: Arc::new(NoOutbox) };
        let progress = Arc::new(ProgressCounters::linked(CounterSizes { ranks: 4, buckets: 4, ..CounterSizes::default() }, remote));
        let mut watch = Watch::new(Watched { ranks: driver_state.clone(), progress: Some(progress) }, LIMIT);
        assert!(look(&mut watch, 200).is_none(), "between two orders");
        driver_state[1].set_activity(DriverActivity::Device, 0);
        let (_, report) = stall(look(&mut watch, 200));
        assert!(report.contains("  rank 3        waits for the device") && report.contains("\nrank 2 is not in a step\n"), "{report}");
    }

    #[test]
    fn any_event_is_progress_and_only_steps_are_watched() {
        let mut watch = watch(LIMIT);
        let driver_state = watch.watched.ranks[0].clone();
        driver_state.set_activity(DriverActivity::Else, 0);
        assert!(look(&mut watch, 500).is_none(), "a long save");
        driver_state.set_activity(DriverActivity::Norm, 0);
        for bucket in 0..4 {
            assert!(look(&mut watch, 79).is_none());
            driver_state.record(DriverEvent::Done(Hop::GradsOut), bucket);
        }
        assert_eq!(stall(look(&mut watch, 100)).0, 81);
    }

    #[test]
    fn a_disk_that_stands_still_is_named_and_ends_no_run() {
        let mut watch = watch(LIMIT);
        let driver_state = watch.watched.ranks[0].clone();
        driver_state.set_activity(DriverActivity::Save, 0);
        let (looks, alarm) = look(&mut watch, 100).unwrap();
        let Alarm::Worker(line) = alarm else { panic!("{alarm:?}") };
        let expected = "training waits for a checkpoint, of which the disk has taken nothing for 30s";
        assert_eq!((looks, line.as_str()), (30, expected));
        assert!(look(&mut watch, 500).is_none(), "named twice, or a stall");
        driver_state.record(DriverEvent::Done(Hop::Save), 0);
        assert_eq!(look(&mut watch, 100).unwrap().0, 31, "it goes on and stands still again");
    }

    #[test]
    fn without_a_limit_no_driver_stalls() {
        let mut watch = watch(Duration::ZERO);
        watch.watched.ranks[0].set_activity(DriverActivity::Data, 0);
        assert!(look(&mut watch, 10_000).is_none());
    }

    /// Releases a worker when it is dropped, so that a failing test does not hang.
    struct Release(Arc<AtomicBool>);
    impl Drop for Release {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_worker_that_stands_still_is_named_with_its_bucket() {
        let (bell, go) = (Arc::new(Doorbell::default()), Arc::new(AtomicBool::new(false)));
        let mut pool = Threads::start(2, WorkerNodes::default(), bell.clone(), 0, |_| Ok(())).unwrap();
        // The other rank has no workers.
        let idle = Arc::new(DriverState::new(8, Arc::default(), Arc::default()));
        let progress = Arc::new(ProgressCounters::new(
            CounterSizes { ranks: 2, buckets: 8, norm_partials: 0, partial_sums: 2, ..CounterSizes::default() },
            None,
        ));
        let watched =
            Watched { ranks: vec![idle, Arc::new(DriverState::new(8, bell.clone(), pool.heartbeats()))], progress: Some(progress) };
        let mut watch = Watch::new(watched, Duration::ZERO);
        assert!(look(&mut watch, 100).is_none(), "idle");
        let release = Release(go.clone());
        // The second piece blocks until `go` is set.
        let run = move |piece: usize| {
            while piece == 1 && !go.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        pool.submit(Call { label: ("stuck", 7), pieces: 2, run });
        let stuck =
            |heartbeats: &crate::host::heartbeats::Heartbeats| (0..2).filter(|&worker| heartbeats.owes(worker).is_some()).count() == 1;
        while !(stuck(&pool.heartbeats()) && (0..2).map(|worker| pool.heartbeats().pieces(worker)).sum::<u64>() == 2) {
            std::thread::yield_now();
        }
        let worker = (0..2).find(|&worker| pool.heartbeats().owes(worker).is_some()).unwrap();
        let (looks, alarm) = look(&mut watch, 100).unwrap();
        let Alarm::Worker(line) = alarm else { panic!("{alarm:?}") };
        assert_eq!((looks, line), (31, format!("optimizer worker adam-0{worker} of rank 1 has made no progress for 30s in bucket 7")));
        let report = watch.report(None);
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
        let driver_state = Arc::new(DriverState::new(1, Arc::default(), Arc::default()));
        let stalled = Arc::new(AtomicBool::new(false));
        let received = stalled.clone();
        driver_state.set_activity(DriverActivity::Data, 0);
        let on_alarm = Box::new(move |alarm| received.store(matches!(alarm, Alarm::Stall(_)), Ordering::Relaxed));
        let dog = Watchdog::start(Watched::alone(driver_state.clone()), Duration::from_millis(80), on_alarm).unwrap();
        while !stalled.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(dog);
        assert_eq!(Arc::strong_count(&driver_state), 1, "the thread still holds it");
    }
}
