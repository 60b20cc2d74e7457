//! A thread that detects stalls. It names an optimizer worker that makes no progress. If no driver makes progress, it reports all pending
//! waits, of all ranks if there are several, and the run ends. It reads published state ([`Vitals`], the progress counters); no other
//! thread ever waits for it.
//!
//! With several processes, each watches its own ranks. A driver that waits for other processes to complete an order makes no progress of
//! its own, but this is not a stall: those processes watch themselves, and the connection detects a process that dies or stops responding.

use super::awaited::{Awaited, Orders};
use super::route::Hop;
use super::vitals::{Doing, EVENTS, Mark, Vitals};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::ranks::board::Board;
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
    pub(super) ranks: Vec<Arc<Vitals>>,
    /// Progress counters, if there are several ranks.
    pub(super) board: Option<Arc<Board>>,
}

impl Watched {
    /// A single driver without peers.
    pub(super) fn alone(vitals: Arc<Vitals>) -> Self {
        Self { ranks: vec![vitals], board: None }
    }

    /// The local ranks with their numbers.
    fn numbered(&self) -> impl Iterator<Item = (usize, &Vitals)> {
        let first = self.board.as_ref().map_or(0, |board| board.mates().start);
        self.ranks.iter().enumerate().map(move |(place, vitals)| (first + place, &**vitals))
    }

    /// Every local rank with its missing publications. Ranks that block others come before the ranks that wait for them.
    fn by_lateness(&self) -> Vec<(usize, &Vitals, Option<Awaited>)> {
        let missing = |rank: usize, vitals: &Vitals| self.board.as_ref().and_then(|board| Awaited::of(board, rank, vitals.doing()));
        let mut ranks: Vec<_> = self.numbered().map(|(rank, vitals)| (rank, vitals, missing(rank, vitals))).collect();
        let named: Vec<usize> =
            ranks.iter().filter_map(|(_, _, missing)| missing.as_ref()).flat_map(|missing| missing.ranks.clone()).collect();
        ranks.sort_by_key(|(rank, vitals, missing)| (missing.is_some(), !named.contains(rank), vitals.recorded()));
        ranks
    }

    /// ` of rank 1`, if there are several ranks.
    fn of_rank(&self, rank: usize) -> String {
        self.board.as_ref().map_or(String::new(), |_| format!(" of rank {rank}"))
    }

    /// The order that a local rank waits for, if ranks of other processes have not completed it.
    fn order_abroad(&self) -> Option<Orders> {
        let waits = self.ranks.iter().any(|vitals| vitals.doing().0 == Doing::Orders);
        self.board.as_ref().filter(|_| waits).and_then(|board| Orders::abroad(board))
    }

    /// Whether a driver is inside a step, which has to make progress. A driver that waits for an order is not, if only ranks of other
    /// processes have yet to complete it.
    fn is_in_step(&self, abroad: Option<&Orders>) -> bool {
        let waits_abroad = abroad.is_some_and(|orders| orders.is_done_here);
        self.ranks.iter().map(|vitals| vitals.doing().0).any(|doing| match doing {
            Doing::Else => false,
            Doing::Orders => !waits_abroad,
            _ => true,
        })
    }
}

/// A report of the watchdog.
#[derive(Debug)]
pub enum Alarm {
    /// An optimizer worker makes no progress; the run may continue.
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
    pub fn look(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.look();
        if let Some(thread) = self.thread.take() {
            // The panic handler has reported a panic of this thread, and it must not end training.
            let _ = thread.join();
        }
    }
}

/// Number of polls in which a count has not changed. It counts polls, not wall time, so that a process that was stopped for hours is not
/// reported as stalled.
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
    watched: Watched,
    period: Duration,
    /// Limits in polls; `u32::MAX` means never.
    limit: u32,
    worker_limit: u32,
    drivers: Still,
    /// Polls of the order that other processes have not completed.
    abroad: Still,
    /// By rank and worker.
    workers: Vec<Vec<Still>>,
}

impl Watch {
    fn new(watched: Watched, limit: Duration) -> Self {
        let no_limit = limit.is_zero();
        let period = if no_limit { PERIOD } else { PERIOD.min(limit / 8) };
        let looks = |time: Duration| u32::try_from(time.as_nanos() / period.as_nanos()).unwrap_or(u32::MAX);
        let worker_limit = if no_limit { WORKER_LIMIT } else { WORKER_LIMIT.min(limit / 2) };
        let workers = watched.ranks.iter().map(|vitals| vec![Still::default(); vitals.workers.workers()]).collect();
        let limit = if no_limit { u32::MAX } else { looks(limit) };
        let (drivers, abroad) = Default::default();
        Self { period, limit, worker_limit: looks(worker_limit), drivers, abroad, workers, watched }
    }

    /// Polls once; returns the alarms.
    fn look(&mut self) -> Vec<Alarm> {
        let abroad = self.watched.order_abroad();
        let mut alarms = self.look_at_workers();
        alarms.extend(self.look_abroad(abroad.as_ref()));
        alarms.extend(self.look_at_drivers(abroad.as_ref()));
        alarms
    }

    fn look_at_workers(&mut self) -> Vec<Alarm> {
        let mut alarms = Vec::new();
        for ((rank, vitals), stills) in self.watched.numbered().zip(&mut self.workers) {
            for (worker, still) in stills.iter_mut().enumerate() {
                if let Some(bucket) = stands_still(vitals, worker, still, self.worker_limit) {
                    let (of_rank, time) = (self.watched.of_rank(rank), self.period * self.worker_limit);
                    let line = format!("optimizer worker adam-{worker:02}{of_rank} has made no progress for {time:?} in bucket {bucket}");
                    alarms.push(Alarm::Worker(line));
                }
            }
        }
        alarms
    }

    /// Names the processes that have not completed the order, once for each stall limit that has passed.
    fn look_abroad(&mut self, abroad: Option<&Orders>) -> Option<Alarm> {
        let Some(orders) = abroad else {
            self.abroad.looks = 0;
            return None;
        };
        let looks = self.abroad.look(orders.count);
        let is_due = looks > 0 && looks.is_multiple_of(self.limit);
        is_due.then(|| Alarm::Process(format!("{orders}; this process has waited for it for {:?}", self.period * looks)))
    }

    fn look_at_drivers(&mut self, abroad: Option<&Orders>) -> Option<Alarm> {
        let progress = self.watched.ranks.iter().fold(0u64, |sum, vitals| sum.wrapping_add(vitals.progress()));
        let looks = self.drivers.look(progress);
        if !self.watched.is_in_step(abroad) {
            self.drivers.looks = 0;
            return None;
        }
        (looks == self.limit).then(|| Alarm::Stall(self.report(abroad)))
    }

    /// The stall report: one line for each rank and for an order that other processes execute, then the full state of each rank.
    fn report(&self, abroad: Option<&Orders>) -> String {
        let mut text =
            format!("no progress for {:?} (--stall-limit): the run ends; its last checkpoint remains\n", self.period * self.limit);
        let ranks = self.watched.by_lateness();
        let several = ranks.len() > 1;
        // Writing into a string cannot fail.
        for (rank, vitals, missing) in &ranks {
            let name = if several { format!("rank {rank}") } else { "driver".into() };
            let _ = match missing {
                Some(missing) => writeln!(text, "  {name:<14}waits for {missing}"),
                None => writeln!(text, "  {name:<14}{}", doing(vitals)),
            };
        }
        let _ = abroad.map_or(Ok(()), |orders| writeln!(text, "  {orders}"));
        for (rank, vitals, _) in ranks {
            if several {
                let _ = writeln!(text, "rank {rank} {}", doing(vitals));
            }
            account(vitals, EVENTS / self.watched.ranks.len(), &mut text);
        }
        text
    }
}

/// The bucket of `worker`, if the worker has made no progress for exactly `limit` polls.
fn stands_still(vitals: &Vitals, worker: usize, still: &mut Still, limit: u32) -> Option<u64> {
    let pulse = &vitals.workers;
    let Some((job, bucket)) = pulse.owes(worker) else {
        still.looks = 0;
        return None;
    };
    (still.look(pulse.pieces(worker).wrapping_add(job)) == limit).then_some(bucket)
}

/// Description of a driver's current activity.
fn doing(vitals: &Vitals) -> String {
    let (doing, number) = vitals.doing();
    let bucket = if doing.has_bucket() { format!(" {number}") } else { String::new() };
    format!("{}{bucket}", doing.words())
}

/// Appends the pending waits of the streams, workers and buckets of one rank, and its last events.
fn account(vitals: &Vitals, events: usize, text: &mut String) {
    streams(vitals, text);
    workers(vitals, text);
    buckets(vitals, text);
    last_events(vitals, events, text);
}

fn streams(vitals: &Vitals, text: &mut String) {
    for stream in Stream::WITH_PEERS {
        let owed = |(hop, bucket): (Hop, u64)| format!("{} of bucket {bucket}", hop.leg().what);
        let pending = vitals.pending(stream).map_or("no known operation".into(), owed);
        let _ = writeln!(text, "  stream        {} owes {pending}", stream.name());
    }
}

fn workers(vitals: &Vitals, text: &mut String) {
    for worker in 0..vitals.workers.workers() {
        let owes = vitals.workers.owes(worker).map_or("is idle".into(), |(_, bucket)| format!("owes bucket {bucket}"));
        let pieces = vitals.workers.pieces(worker);
        let _ = writeln!(text, "  worker        adam-{worker:02} {owes}, after {pieces} pieces");
    }
}

/// Groups buckets by the description of their wait.
fn buckets(vitals: &Vitals, text: &mut String) {
    let mut by_mark: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (bucket, mark) in vitals.buckets().enumerate() {
        by_mark.entry(mark.pending()).or_default().push(bucket.to_string());
    }
    for (pending, buckets) in by_mark {
        let _ = writeln!(text, "  bucket        {}: {pending}", buckets.join(", "));
    }
}

fn last_events(vitals: &Vitals, count: usize, text: &mut String) {
    let now = now_ns();
    for (at_ns, mark, number) in vitals.events(count).filter(|(_, mark, _)| *mark != Mark::Nothing) {
        let _ = writeln!(text, "  {:>10.3} s  {} {number}", -(now.saturating_sub(at_ns) as f64 / 1e9), mark.event());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::order::Order;
    use crate::host::doorbell::Doorbell;
    use crate::host::homes::Homes;
    use crate::host::pool::{Call, Threads};
    use crate::ranks::board::{Abroad, Sizes};
    use crate::ranks::notice::{Audience, Notice, Outbox};

    const LIMIT: Duration = Duration::from_secs(80);

    fn watch(limit: Duration) -> Watch {
        Watch::new(Watched::alone(Arc::new(Vitals::new(4, Arc::default(), Arc::default()))), limit)
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
    fn a_driver_without_progress_is_told_once_with_what_everything_waits_for() {
        let mut watch = watch(LIMIT);
        let vitals = watch.watched.ranks[0].clone();
        vitals.record(Mark::Step, 17);
        vitals.record(Mark::Begun(Hop::GradsOut), 2);
        vitals.record(Mark::Begun(Hop::Optimize), 3);
        vitals.front(Stream::D2h, Some((Hop::GradsOut, 2)));
        vitals.now(Doing::Params, 3);
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
    fn of_several_ranks_the_late_one_is_told_first_and_whom_the_others_wait_for() {
        let vitals: Vec<_> = (0..3).map(|_| Arc::new(Vitals::new(4, Arc::default(), Arc::default()))).collect();
        let board = Arc::new(Board::new(Sizes { ranks: 3, buckets: 4, partials: 4, shares: 3, ..Sizes::default() }, None));
        let watched = Watched { ranks: vitals.clone(), board: Some(board.clone()) };
        let mut watch = Watch::new(watched, LIMIT);
        // Rank 1 saves, or is outside of a step for another reason; peers that wait for it are not reported.
        board.give_order(0, [0; 6]);
        assert!(look(&mut watch, 200).is_none());
        [0, 2].into_iter().for_each(|rank| board.publish_written(rank));
        vitals[0].now(Doing::Norm, 0);
        vitals[1].now(Doing::Device, 0);
        vitals[2].now(Doing::Params, 3);
        vitals[1].record(Mark::Begun(Hop::GradsOut), 2);
        (0..3).for_each(|_| vitals[2].record(Mark::Module, 1));
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
    fn watch_of_two_processes(order: u64) -> (Watch, Arc<Board>) {
        let vitals: Vec<_> = (0..2).map(|_| Arc::new(Vitals::new(4, Arc::default(), Arc::default()))).collect();
        let abroad = Abroad { process: 0, names: vec!["process 0 on a".into(), "process 1 on b".into()], outbox: Arc::new(Nobody) };
        let board = Arc::new(Board::linked(Sizes { ranks: 4, buckets: 4, ..Sizes::default() }, abroad));
        board.give_order(order, [0; 6]);
        vitals[0].now(Doing::Orders, 0);
        (Watch::new(Watched { ranks: vitals, board: Some(board.clone()) }, LIMIT), board)
    }

    struct Nobody;
    impl Outbox for Nobody {
        fn tell(&self, _: Audience, _: Notice) {}
    }

    #[test]
    fn an_order_that_another_process_carries_out_is_no_stall_and_that_process_is_named() {
        for (order, words) in [(Order::Save, "is saving"), (Order::Evaluate, "is evaluating"), (Order::Step, "is in a step")] {
            let (mut watch, board) = watch_of_two_processes(order as u64);
            [1, 3].into_iter().for_each(|rank| board.publish_done(rank));
            for nth in 1..=3 {
                let (looks, alarm) = look(&mut watch, 200).unwrap();
                let Alarm::Process(line) = alarm else { panic!("{alarm:?}") };
                let expected = format!("process 1 on b {words}; this process has waited for it for {}s", 80 * nth);
                assert_eq!((looks, line), (80 + u32::from(nth == 1), expected));
            }
            board.publish_done(2);
            watch.watched.ranks[0].now(Doing::Else, 0);
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
        let vitals: Vec<_> = (0..2).map(|_| Arc::new(Vitals::new(4, Arc::default(), Arc::default()))).collect();
        let abroad = Abroad { process: 1, names: vec!["process 0 on a".into(), "process 1 on b".into()], outbox: Arc::new(Nobody) };
        let board = Arc::new(Board::linked(Sizes { ranks: 4, buckets: 4, ..Sizes::default() }, abroad));
        let mut watch = Watch::new(Watched { ranks: vitals.clone(), board: Some(board) }, LIMIT);
        assert!(look(&mut watch, 200).is_none(), "between two orders");
        vitals[1].now(Doing::Device, 0);
        let (_, report) = stall(look(&mut watch, 200));
        assert!(report.contains("  rank 3        waits for the device") && report.contains("\nrank 2 is not in a step\n"), "{report}");
    }

    #[test]
    fn any_event_is_progress_and_what_is_no_step_is_not_watched() {
        let mut watch = watch(LIMIT);
        let vitals = watch.watched.ranks[0].clone();
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
        watch.watched.ranks[0].now(Doing::Data, 0);
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
        let mut pool = Threads::start(2, Homes::default(), bell.clone(), 0, |_| Ok(())).unwrap();
        // The other rank has no workers.
        let idle = Arc::new(Vitals::new(8, Arc::default(), Arc::default()));
        let board = Arc::new(Board::new(Sizes { ranks: 2, buckets: 8, partials: 0, shares: 2, ..Sizes::default() }, None));
        let watched = Watched { ranks: vec![idle, Arc::new(Vitals::new(8, bell.clone(), pool.pulse()))], board: Some(board) };
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
        let stuck = |pulse: &crate::host::pulse::Pulse| (0..2).filter(|&worker| pulse.owes(worker).is_some()).count() == 1;
        while !(stuck(&pool.pulse()) && (0..2).map(|worker| pool.pulse().pieces(worker)).sum::<u64>() == 2) {
            std::thread::yield_now();
        }
        let worker = (0..2).find(|&worker| pool.pulse().owes(worker).is_some()).unwrap();
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
        let vitals = Arc::new(Vitals::new(1, Arc::default(), Arc::default()));
        let stalled = Arc::new(AtomicBool::new(false));
        let heard = stalled.clone();
        vitals.now(Doing::Data, 0);
        let on_alarm = Box::new(move |alarm| heard.store(matches!(alarm, Alarm::Stall(_)), Ordering::Relaxed));
        let dog = Watchdog::start(Watched::alone(vitals.clone()), Duration::from_millis(80), on_alarm).unwrap();
        while !stalled.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(dog);
        assert_eq!(Arc::strong_count(&vitals), 1, "the thread still holds it");
    }
}
