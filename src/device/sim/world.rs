//! The simulated machine: lanes that execute work, a driver that polls, and one clock.
//!
//! Time passes only when the driver spends time (it enqueues) or has nothing to do (it waits for the next completion). Concurrent
//! operations slow each other down by factors of the profile, so the progress of an operation is a rate that changes whenever another
//! operation begins or ends.

use super::disk_writes::DiskWrites;
use crate::device::Stream;
use crate::hardware::peer_route::PeerRoute;
use crate::hardware::rates::Rates;
use crate::trace::Recorder;
use std::array;
use std::collections::VecDeque;

/// Lanes: the streams of a device with peers, then the optimizer's pool and the disk.
const POOL: usize = Stream::WITH_PEERS.len();
const DISK: usize = POOL + 1;
const LANES: usize = DISK + 1;
/// Work with less than this remaining time counts as done. It exceeds the resolution of the clock after an hour; a smaller value would let
/// the simulated time stand still.
const EPSILON_NS: f64 = 1e-2;

/// The resource that an operation occupies, which determines its contention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpKind {
    /// The device's arithmetic.
    Compute,
    /// The link, device to host.
    ToHost,
    /// The link, host to device.
    ToDevice,
    /// Transfers of managed pages; measured in both directions at once.
    Paging,
    /// Copies from peers: links between devices, which contend with nothing else, or another route given by the profile.
    FromPeer,
    /// Both hosts' memories and the network between them.
    OverHosts,
    /// The network between devices of several processes.
    Swap,
    /// The CPUs and their memory.
    Adam,
    /// The disk.
    Disk,
}

/// An operation that takes time.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimWork {
    pub kind: OpKind,
    pub name: &'static str,
    /// Bucket, layer or step; `u32::MAX` if there is none.
    pub index: u32,
    /// Time without contention.
    pub(crate) alone_ns: f64,
}

impl SimWork {
    fn within_the_clock(self) -> Self {
        Self { alone_ns: self.alone_ns.min(CLOCK_MAX_NS), ..self }
    }
}

/// End of the clock, after 31 years; sums of such times still fit into 64 bits.
pub(crate) const CLOCK_MAX_NS: f64 = 1e18;

/// Rounds a time to integer nanoseconds, limited to the end of the clock.
fn whole_ns(ns: f64) -> u64 {
    ns.min(CLOCK_MAX_NS) as u64
}

#[derive(Clone, Copy, Debug)]
enum SimOp {
    Work(SimWork),
    Record { event: usize, version: u64 },
    Wait { event: usize, version: u64 },
}

#[derive(Clone, Copy, Debug)]
struct WorkInProgress {
    work: SimWork,
    start_ns: f64,
    left_ns: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct SimEvent {
    /// The lane of its last record.
    lane: usize,
    recorded: u64,
    done: u64,
}

struct Lane {
    queue: VecDeque<SimOp>,
    running: Option<WorkInProgress>,
    waiting_since_ns: Option<f64>,
    recorder: Recorder,
    busy_ns: f64,
}

impl Lane {
    fn new(track: &str, trace_spans: usize) -> Self {
        Self { queue: VecDeque::new(), running: None, waiting_since_ns: None, recorder: Recorder::new(track, trace_spans), busy_ns: 0.0 }
    }

    fn span(&mut self, name: &'static str, index: u32, start_ns: f64, end_ns: f64) {
        self.recorder.past_span(name, index, whole_ns(start_ns), whole_ns(end_ns - start_ns));
    }

    fn is_idle(&self) -> bool {
        self.running.is_none() && self.queue.is_empty()
    }
}

/// Slowdown of each kind of work beside other kinds; factors in (0, 1].
#[derive(Clone, Copy, Debug)]
struct Contention {
    compute_under_copies: f64,
    copies_both_ways: [f64; 2],
    copies_under_adam: f64,
    adam_under_copies: f64,
    /// Contention between kernels and the optimizer on the same cores; 1 if they have separate cores.
    compute_under_adam: f64,
    adam_under_compute: f64,
    peers: PeerRoute,
    /// Fraction of the link, in both directions, that slices between hosts use.
    over_hosts: f64,
}

impl Contention {
    fn new(rates: &Rates, shares_cores: bool) -> Self {
        let both_ways = |alone: f64| (rates.both_ways_bytes_per_s / alone).min(1.0);
        Self {
            compute_under_copies: rates.matmul_under_copies,
            copies_both_ways: [both_ways(rates.to_host_bytes_per_s), both_ways(rates.to_device_bytes_per_s)],
            copies_under_adam: rates.copies_under_adam,
            adam_under_copies: rates.adam_under_copies,
            compute_under_adam: when(shares_cores, rates.cpu_device_under_adam),
            adam_under_compute: when(shares_cores, rates.adam_under_cpu_device),
            peers: rates.peer_route,
            over_hosts: rates.between_hosts().bytes_per_s / rates.both_ways_bytes_per_s,
        }
    }

    /// Speed of work of this kind, where 1 is the speed without contention; `active` tests which kinds of work are running.
    fn speed(&self, kind: OpKind, active: impl Fn(OpKind) -> bool) -> f64 {
        let over_hosts = active(OpKind::OverHosts);
        let from_peers = |passed: PeerRoute| over_hosts || self.peers >= passed && active(OpKind::FromPeer);
        let [out, back] = [OpKind::ToHost, OpKind::ToDevice].map(&active);
        // A factor measured with copies in both directions counts half for one direction.
        let under_copies = |factor: f64, passed: PeerRoute| match (out, back, from_peers(passed)) {
            (true, true, _) | (_, _, true) => factor,
            (false, false, false) => 1.0,
            _ => f64::midpoint(1.0, factor),
        };
        let by_adam = |is_slowed: bool| when(is_slowed && active(OpKind::Adam), self.copies_under_adam);
        // A GPU's link carries its own pulls and pulls of its peers, so its copies share both directions with them.
        let beside_peers = self.peers >= PeerRoute::Links && active(OpKind::FromPeer);
        let beside_slices = when(beside_peers, 0.5) * when(over_hosts, 1.0 - self.over_hosts);
        let copy = |is_both_ways: bool, both_ways: f64| when(is_both_ways, both_ways) * beside_slices * by_adam(true);
        match kind {
            OpKind::Compute => {
                under_copies(self.compute_under_copies, PeerRoute::Links) * when(active(OpKind::Adam), self.compute_under_adam)
            }
            OpKind::Adam => under_copies(self.adam_under_copies, PeerRoute::Host) * when(active(OpKind::Compute), self.adam_under_compute),
            OpKind::Paging | OpKind::Swap | OpKind::Disk => 1.0,
            OpKind::FromPeer => when(self.peers >= PeerRoute::Links && (out || back), 0.5) * by_adam(self.peers == PeerRoute::Host),
            // Slices between hosts get half of the link, and half of each hop.
            OpKind::OverHosts => when(out || back, (0.25 / self.over_hosts).min(1.0)) * by_adam(true),
            OpKind::ToHost => copy(back || beside_peers, self.copies_both_ways[0]),
            OpKind::ToDevice => copy(out || beside_peers, self.copies_both_ways[1]),
        }
    }
}

/// `factor` if the condition holds, else 1.
fn when(condition: bool, factor: f64) -> f64 {
    if condition { factor } else { 1.0 }
}

/// Lanes, events and the clock.
pub(super) struct World {
    now_ns: f64,
    lanes: [Lane; LANES],
    /// Speed of each lane's running work, until the next begin or end of an operation.
    speeds: [f64; LANES],
    events: Vec<SimEvent>,
    contention: Contention,
    /// The save that the disk writes.
    disk: Option<DiskWrites>,
    waited_ns: f64,
    waited_for_peers_ns: f64,
}

impl World {
    pub(super) fn new(rates: &Rates, shares_cores: bool, trace_spans: usize) -> Self {
        let track = |lane: usize| Stream::WITH_PEERS.get(lane).map_or("adam", |stream| stream.name());
        let lanes = array::from_fn(|lane| if lane == DISK { Lane::new("disk", 0) } else { Lane::new(track(lane), trace_spans) });
        Self {
            now_ns: 0.0,
            lanes,
            speeds: [0.0; LANES],
            events: Vec::new(),
            contention: Contention::new(rates, shares_cores),
            disk: None,
            waited_ns: 0.0,
            waited_for_peers_ns: 0.0,
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        whole_ns(self.now_ns)
    }

    /// Time during which the compute stream had nothing to do but wait for an event.
    pub(super) fn waited_ns(&self) -> u64 {
        whole_ns(self.waited_ns)
    }

    /// The part of `waited_ns` that was spent on streams that pull from peers.
    pub(super) fn waited_for_peers_ns(&self) -> u64 {
        whole_ns(self.waited_for_peers_ns)
    }

    fn compute_waits_for_peers(&self) -> bool {
        let front = self.lanes[Stream::Compute as usize].queue.front();
        matches!(front, Some(SimOp::Wait { event, .. }) if self.events[*event].lane >= Stream::COUNT)
    }

    pub(super) fn event(&mut self) -> usize {
        self.events.push(SimEvent::default());
        self.events.len() - 1
    }

    pub(super) fn record(&mut self, event: usize, stream: Stream) {
        self.events[event].lane = stream as usize;
        self.events[event].recorded += 1;
        let version = self.events[event].recorded;
        self.push(stream, SimOp::Record { event, version });
    }

    pub(super) fn wait(&mut self, stream: Stream, event: usize) {
        let version = self.events[event].recorded;
        self.push(stream, SimOp::Wait { event, version });
    }

    pub(super) fn is_done(&self, event: usize) -> bool {
        self.events[event].done >= self.events[event].recorded
    }

    pub(super) fn enqueue(&mut self, stream: Stream, work: SimWork) {
        self.push(stream, SimOp::Work(work.within_the_clock()));
    }

    fn push(&mut self, stream: Stream, op: SimOp) {
        self.push_to(stream as usize, op);
    }

    /// Only this lane can make progress; all others have settled before.
    fn push_to(&mut self, lane: usize, op: SimOp) {
        let was_idle = self.lanes[lane].running.is_none();
        self.lanes[lane].queue.push_back(op);
        if self.settle_lane(lane) {
            self.settle();
        } else if was_idle {
            self.speeds = self.speeds_now();
        }
    }

    pub(super) fn submit(&mut self, work: SimWork) {
        self.push_to(POOL, SimOp::Work(work.within_the_clock()));
    }

    /// The disk writes `writes` from now on.
    pub(super) fn write(&mut self, writes: DiskWrites) {
        self.disk = Some(writes);
    }

    /// Gives the disk the pieces that are ready.
    fn feed_disk(&mut self) {
        let Some(mut disk) = self.disk.take() else { return };
        while let Some(alone_ns) = disk.next_ns(self.lanes[DISK].queue.len() + usize::from(self.lanes[DISK].running.is_some())) {
            let piece = SimWork { kind: OpKind::Disk, name: "write", index: u32::MAX, alone_ns };
            self.push_to(DISK, SimOp::Work(piece.within_the_clock()));
        }
        self.disk = Some(disk);
    }

    pub(crate) fn pool_is_idle(&self) -> bool {
        self.lanes[POOL].is_idle()
    }

    pub(crate) fn pool_busy_ns(&self) -> u64 {
        whole_ns(self.lanes[POOL].busy_ns)
    }

    /// Advances the clock by the time that the driver works; the lanes make progress meanwhile.
    pub(crate) fn spend(&mut self, ns: f64) {
        self.feed_disk();
        let until = self.now_ns + ns;
        while let Some(next) = self.next_end_ns().filter(|next| *next <= until) {
            self.pass(next);
        }
        self.pass(until);
    }

    /// Advances the clock to the next completion; false when no work is running.
    pub(crate) fn advance(&mut self) -> bool {
        self.feed_disk();
        let next = self.next_end_ns();
        if let Some(at) = next {
            self.pass(at);
        }
        next.is_some()
    }

    /// The tracks of all streams; streams for peers only if they recorded spans.
    pub(crate) fn take_streams(&mut self) -> Vec<Recorder> {
        let tracks = self.lanes[..POOL].iter_mut().map(|lane| std::mem::take(&mut lane.recorder)).enumerate();
        tracks.filter(|(lane, track)| *lane < Stream::COUNT || !track.spans().is_empty()).map(|(_, track)| track).collect()
    }

    pub(crate) fn take_pool(&mut self) -> Recorder {
        std::mem::take(&mut self.lanes[POOL].recorder)
    }

    fn speeds_now(&self) -> [f64; LANES] {
        let running = |kind| self.lanes.iter().filter(|lane| lane.running.is_some_and(|running| running.work.kind == kind)).count();
        let active = |kind| running(kind) > 0;
        // Concurrent transfers over the same route share its bandwidth equally.
        let parts = |kind| if matches!(kind, OpKind::FromPeer | OpKind::OverHosts) { running(kind) as f64 } else { 1.0 };
        let speed = |kind| self.contention.speed(kind, active) / parts(kind);
        array::from_fn(|lane| self.lanes[lane].running.map_or(0.0, |running| speed(running.work.kind)))
    }

    fn next_end_ns(&self) -> Option<f64> {
        let ends = self.lanes.iter().zip(self.speeds).filter_map(|(lane, speed)| Some(self.now_ns + lane.running?.left_ns / speed));
        ends.min_by(f64::total_cmp)
    }

    /// Advances the clock to `until`; no work ends earlier.
    fn pass(&mut self, until: f64) {
        let (mut has_ended, ns) = (false, until - self.now_ns);
        if self.lanes[Stream::Compute as usize].waiting_since_ns.is_some() {
            self.waited_ns += ns;
            self.waited_for_peers_ns += if self.compute_waits_for_peers() { ns } else { 0.0 };
        }
        let began = std::mem::replace(&mut self.now_ns, until);
        for (lane, speed) in self.lanes.iter_mut().zip(self.speeds) {
            let Some(running) = &mut lane.running else { continue };
            // Repeats the computation of the work's end, because after days of simulated steps the time is too coarse for the remainder to
            // reach 0.
            let is_over = began + running.left_ns / speed <= until;
            running.left_ns -= ns * speed;
            if is_over || running.left_ns <= EPSILON_NS {
                let WorkInProgress { work, start_ns, .. } = *running;
                lane.busy_ns += until - start_ns;
                lane.span(work.name, work.index, start_ns, until);
                lane.running = None;
                has_ended = true;
            }
        }
        if has_ended {
            self.settle();
            self.feed_disk();
        }
    }

    /// Starts all work that can start, and completes operations that take no time.
    fn settle(&mut self) {
        while (0..LANES).any(|lane| self.settle_lane(lane)) {}
        self.speeds = self.speeds_now();
    }

    /// Returns whether an event was recorded that may unblock another lane.
    fn settle_lane(&mut self, lane: usize) -> bool {
        let (lane, now_ns) = (&mut self.lanes[lane], self.now_ns);
        let mut progressed = false;
        while lane.running.is_none() {
            match lane.queue.front() {
                None => break,
                Some(SimOp::Wait { event, version }) if self.events[*event].done < *version => {
                    lane.waiting_since_ns.get_or_insert(now_ns);
                    break;
                }
                Some(SimOp::Wait { .. }) => {
                    let since = lane.waiting_since_ns.take().filter(|since| *since < now_ns);
                    if let Some(since) = since {
                        lane.span("wait", u32::MAX, since, now_ns);
                    }
                }
                Some(SimOp::Record { event, version }) => {
                    self.events[*event].done = *version;
                    progressed = true;
                }
                Some(SimOp::Work(work)) => lane.running = Some(WorkInProgress { work: *work, start_ns: now_ns, left_ns: work.alone_ns }),
            }
            lane.queue.pop_front();
        }
        progressed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::rates::tests::round_rates;

    fn work(kind: OpKind, alone_ns: f64) -> SimWork {
        SimWork { kind, name: "work", index: 0, alone_ns }
    }

    fn world() -> World {
        World::new(&round_rates(), false, 16)
    }

    #[test]
    fn work_ends_also_after_days() {
        let mut world = world();
        // So late that 64-bit floats resolve only a sixteenth of a nanosecond.
        for alone_ns in [4e14, 0.03, 1.01, 7.77] {
            world.enqueue(Stream::Compute, work(OpKind::Compute, alone_ns));
        }
        assert_eq!((0..10).take_while(|_| world.advance()).count(), 4);
    }

    #[test]
    fn a_lane_works_in_order_and_waits_for_events() {
        let mut world = world();
        let copied = world.event();
        assert!(world.is_done(copied), "an event that was never recorded");
        world.enqueue(Stream::D2h, work(OpKind::Compute, 30.0));
        world.record(copied, Stream::D2h);
        world.enqueue(Stream::Compute, work(OpKind::Compute, 10.0));
        world.wait(Stream::Compute, copied);
        world.enqueue(Stream::Compute, work(OpKind::Compute, 5.0));
        assert!(!world.is_done(copied));
        world.spend(29.0);
        assert!(!world.is_done(copied) && world.waited_ns() == 19);
        while world.advance() {}
        assert_eq!((world.now_ns(), world.waited_ns(), world.is_done(copied)), (35, 20, true));
        let spans = world.take_streams().remove(0).spans().iter().map(|span| (span.start_ns, span.duration_ns)).collect::<Vec<_>>();
        assert_eq!(spans, [(0, 10), (10, 20), (30, 5)], "work, wait, work");
    }

    #[test]
    fn concurrent_operations_slow_each_other() {
        // Copies in both directions run at half speed, and so do copies beside Adam: see `round_rates`.
        let mut world = world();
        world.enqueue(Stream::D2h, work(OpKind::ToHost, 100.0));
        world.enqueue(Stream::H2d, work(OpKind::ToDevice, 100.0));
        while world.advance() {}
        assert_eq!(world.now_ns(), 200);
        world.enqueue(Stream::D2h, work(OpKind::ToHost, 100.0));
        world.submit(work(OpKind::Adam, 60.0));
        while world.advance() {}
        // Adam runs at speed 0.75 beside one copy: it takes 80 ns, during which the copy completes 40 of its 100 ns.
        assert_eq!((world.now_ns(), world.pool_busy_ns()), (340, 80));
    }

    #[test]
    fn copies_from_peers_slow_the_links_they_cross() {
        use OpKind::{Adam, FromPeer, ToHost};
        // A copy of 100 ns to the host beside a pull of the same time, and the optimizer beside a pull.
        let ends = |peer_route, beside| {
            let mut rates = round_rates();
            rates.peer_route = peer_route;
            let mut world = World::new(&rates, false, 0);
            world.enqueue(Stream::Reduce, work(FromPeer, 100.0));
            match beside {
                Adam => world.submit(work(Adam, 100.0)),
                kind => world.enqueue(Stream::D2h, work(kind, 100.0)),
            }
            while world.advance() {}
            world.now_ns()
        };
        assert_eq!([PeerRoute::Own, PeerRoute::Links, PeerRoute::Host].map(|route| ends(route, ToHost)), [100, 250, 250]);
        assert_eq!([PeerRoute::Own, PeerRoute::Links, PeerRoute::Host].map(|route| ends(route, Adam)), [100, 100, 200]);
        // Two concurrent pulls.
        assert_eq!(ends(PeerRoute::Own, FromPeer), 200);
    }

    #[test]
    fn slices_between_hosts_share_the_link_and_swaps_of_devices_do_not() {
        use OpKind::{Adam, OverHosts, Swap, ToHost};
        let ends = |far, beside| {
            let mut world = world();
            world.enqueue(if far == Swap { Stream::Compute } else { Stream::Reduce }, work(far, 100.0));
            match beside {
                Adam => world.submit(work(Adam, 100.0)),
                kind => world.enqueue(Stream::D2h, work(kind, 100.0)),
            }
            while world.advance() {}
            world.now_ns()
        };
        // Slices between hosts get half of the link, so both operations take twice as long. Beside Adam both have half speed.
        assert_eq!([ToHost, Adam].map(|beside| ends(OverHosts, beside)), [200, 200]);
        assert_eq!([ToHost, Adam].map(|beside| ends(Swap, beside)), [100, 100]);
        // Two concurrent slices have half speed, too.
        assert_eq!(ends(OverHosts, OverHosts), 200);
    }

    #[test]
    fn a_device_on_the_hosts_cores_shares_them_with_the_optimizer() {
        let mut world = World::new(&round_rates(), true, 0);
        world.enqueue(Stream::Compute, work(OpKind::Compute, 100.0));
        world.submit(work(OpKind::Adam, 50.0));
        while world.advance() {}
        assert_eq!(world.now_ns(), 150);
    }
}
