//! The CPU as a device: the specification of every kernel, with real streams.
//!
//! There are two ways to run the operations ([`Schedule`]): one thread per stream, like a GPU; or, for tests, a seeded adversary that
//! delays and interleaves the streams in any order that their events allow. An operation with a missing wait then reads old bytes, and a
//! digest changes.
#![allow(unsafe_code)]

mod compute;
#[cfg(all(loom, test))]
mod interleavings;
mod kernels;
mod launch;
mod peers;
pub(crate) use kernels::SUM_BLOCK;
#[cfg(test)]
pub(crate) use peers::QUEUED_OPS_MAX;
#[cfg(test)]
pub(crate) mod nccl_stand_in;
mod stream;
mod task_memory;
mod team;

use super::slice::Allocated;
use super::{AttentionShape, Device, DeviceLibraries, DeviceSlice, EventId, PinMemory, Stream, prefetch_span};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::host::doorbell::Doorbell;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::memory::{MemorySpace, RingShape};
use crate::ranks::RankContext;
use crate::trace::{Recorder, now_ns};
use crate::units::counted;
use compute::ComputeOwner;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use stream::{Op, OpQueue, Point, Task};

/// Threads and order in which operations run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamOrder {
    /// One thread per stream.
    Threads,
    /// The driver's thread, in a random order that events allow.
    Adversary {
        /// The seed determines the order.
        seed: u64,
    },
}

pub struct CpuDevice {
    memory: HostMemory,
    allocated: Allocated,
    shared: Arc<StreamsShared>,
    /// Point of the last record of each event: a packed [`Point`], because peers read it.
    events: Vec<Arc<AtomicU64>>,
    /// Connections to the devices of the other ranks, if there are any.
    device_group: Option<DeviceGroup>,
    #[cfg(test)]
    nccl: Option<nccl_stand_in::NcclStandIn>,
    runner: Runner,
    compute: ComputeOwner,
    /// Capacity of each stream's trace track, in spans.
    trace_spans: usize,
}

/// Connections of a device to the devices of the other ranks.
struct DeviceGroup {
    context: RankContext,
    /// Memory that peers may read; `None` once the device has taken it back. Every peer holds a reference, so the memory lives as long as a
    /// peer may read it.
    lent: Option<Arc<HostMemory>>,
    peer_handles: Vec<PeerHandle>,
}

/// A device's handle for its peers.
#[derive(Clone)]
pub(crate) struct PeerHandle {
    shared: Weak<StreamsShared>,
    events: Vec<Arc<AtomicU64>>,
    memory: Arc<HostMemory>,
    /// Allocations in `memory`.
    allocated: Arc<Allocated>,
}

#[expect(clippy::large_enum_variant, reason = "a device has one")]
enum Runner {
    Threads(Vec<JoinHandle<Recorder>>),
    Adversary(Adversary),
}

/// Decides which stream runs next, and when.
struct Adversary {
    rng: ChaCha8Rng,
    recorders: Vec<Recorder>,
    /// Probability, in eighths, that an operation runs right after an enqueue.
    eagerness: u32,
    /// A stream that runs only when the driver waits and no other stream can run. A quarter of all seeds have one. Seeds below 16 have
    /// none; tests use them when something must happen within a step, such as speculation, which stops when gradients always arrive after
    /// the verdict.
    starved: Option<usize>,
}

impl Adversary {
    fn new(seed: u64, recorders: Vec<Recorder>) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let streams = Stream::WITH_PEERS.len();
        let starved = Some(rng.next_u32() as usize % (2 * streams)).filter(|stream| *stream < streams && seed / 16 % 2 == 1);
        Self { rng, recorders, eagerness: (seed % 8) as u32, starved }
    }

    /// Whether to run an operation although the driver does not wait.
    fn is_eager(&mut self) -> bool {
        self.rng.next_u32() % 8 < self.eagerness
    }

    /// A random runnable stream among `streams`.
    fn choose(&mut self, streams: usize, can_run: impl Fn(usize) -> bool) -> Option<usize> {
        let first = self.rng.next_u32() as usize % streams;
        let others = (0..streams).map(|i| (first + i) % streams).filter(|stream| Some(*stream) != self.starved);
        others.chain(self.starved.filter(|stream| *stream < streams)).find(|stream| can_run(*stream))
    }
}

struct StreamsShared {
    queues: [OpQueue; Stream::WITH_PEERS.len()],
    /// Devices of all ranks, set when the ranks connect.
    peers: OnceLock<Vec<Weak<StreamsShared>>>,
    stop: AtomicBool,
    /// Set when an operation panics: its stream is dead, and every wait must fail instead of hanging.
    failed: AtomicBool,
    compute_waited_ns: AtomicU64,
    /// The part of `compute_waited_ns` that was spent on peers and on streams that pull from peers.
    compute_waited_for_peers_ns: AtomicU64,
    driver: Arc<Doorbell>,
}

impl CpuDevice {
    /// A device with `threads` compute threads; `driver` is rung whenever an operation is done.
    ///
    /// # Safety
    /// Operations on different streams that touch the same bytes are ordered by events if one of them writes. Host memory of a copy lives,
    /// and is not accessed elsewhere, until the copy is done.
    ///
    /// # Errors
    /// `Resource` when a thread cannot start.
    pub unsafe fn new(threads: usize, schedule: StreamOrder, driver: Arc<Doorbell>, trace_spans: usize) -> Result<Self> {
        let compute = ComputeOwner::new(threads)?;
        let queues = Stream::WITH_PEERS.map(|_| OpQueue::new());
        let shared = Arc::new(StreamsShared {
            queues,
            peers: OnceLock::new(),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            compute_waited_ns: AtomicU64::new(0),
            compute_waited_for_peers_ns: AtomicU64::new(0),
            driver,
        });
        let recorders = Stream::recorders(trace_spans);
        let runner = match schedule {
            StreamOrder::Adversary { seed } => Runner::Adversary(Adversary::new(seed, recorders.into())),
            StreamOrder::Threads => Runner::Threads(start_streams(&shared, 0, recorders)?),
        };
        Ok(Self {
            memory: HostMemory::default(),
            allocated: Allocated::default(),
            shared,
            events: Vec::new(),
            device_group: None,
            #[cfg(test)]
            nccl: None,
            runner,
            compute,
            trace_spans,
        })
    }

    /// Runs `task` on `stream`, after all operations enqueued there before.
    fn enqueue(&mut self, stream: Stream, name: &'static str, task: impl FnOnce() + Copy + Send + 'static) -> Result<()> {
        self.push(stream, Op::Run(Task::new(name, task)))
    }

    fn push(&mut self, stream: Stream, op: Op) -> Result<()> {
        let queue = stream as usize;
        self.run_until(|shared| !shared.queues[queue].is_full())?;
        self.shared.queues[queue].push(op);
        self.delay_randomly()
    }

    /// Lets the adversary run operations after an enqueue, so that streams lag behind the driver by a random amount. Some seeds run
    /// operations as soon as they are enqueued, some only when the driver has to wait, most something between.
    fn delay_randomly(&mut self) -> Result<()> {
        while let Runner::Adversary(adversary) = &mut self.runner {
            let may_run = |stream: usize| Some(stream) != adversary.starved && self.shared.can_run(stream);
            if !((0..self.shared.queues.len()).any(may_run) && adversary.is_eager()) {
                break;
            }
            self.advance()?;
        }
        Ok(())
    }

    /// Blocks the driver until `ready`.
    fn run_until(&mut self, ready: impl Fn(&StreamsShared) -> bool) -> Result<()> {
        while !ready(&self.shared) {
            if !self.advance()? {
                let (shared, device_group) = (&self.shared, &self.device_group);
                let others_failed = || device_group.as_ref().is_some_and(|device_group| device_group.context.progress.has_failed());
                // A peer may have made a stream of the adversary runnable.
                let is_own = matches!(self.runner, Runner::Adversary { .. });
                let can_run = || is_own && (0..shared.queues.len()).any(|stream| shared.can_run(stream));
                let is_over = || shared.failed.load(Ordering::Acquire) || others_failed();
                shared.driver.wait_until(|| ready(shared) || can_run() || is_over());
            }
            self.check()?;
        }
        Ok(())
    }

    /// Waits until all enqueued operations have run.
    fn finish_streams(&mut self) -> Result<()> {
        self.run_until(|shared| shared.queues.iter().all(|queue| queue.done() >= queue.enqueued()))
    }

    fn recorded(&self, event: EventId) -> Point {
        Point::unpack(self.events[event.0 as usize].load(Ordering::Acquire))
    }

    fn check(&self) -> Result<()> {
        if self.shared.failed.load(Ordering::Acquire) {
            return Err(Error::resource("run an operation on the cpu device", "it panicked; see the message above"));
        }
        self.device_group.as_ref().map_or(Ok(()), |device_group| device_group.context.check())
    }

    /// Lets the adversary run one operation of a random stream; false when threads run the operations.
    ///
    /// # Errors
    /// `Resource` if no stream is runnable: the driver waits for an operation that will never run.
    fn advance(&mut self) -> Result<bool> {
        let Runner::Adversary(adversary) = &mut self.runner else { return Ok(false) };
        let streams = if self.device_group.is_some() { Stream::WITH_PEERS.len() } else { Stream::COUNT };
        let Some(stream) = adversary.choose(streams, |stream| self.shared.can_run(stream)) else {
            if let Some(device_group) = &self.device_group {
                return device_group.context.pass_idle();
            }
            return Err(Error::resource("wait for the cpu device", "no stream can continue: a deadlock in the step protocol"));
        };
        self.shared.run_front(stream, &mut adversary.recorders[stream]);
        self.device_group.iter().for_each(|device_group| device_group.context.progress.wake_local_ranks());
        Ok(true)
    }

    /// Ends the streams and returns their recorded spans.
    fn join(&mut self) -> Vec<Recorder> {
        match &mut self.runner {
            Runner::Adversary(adversary) => std::mem::take(&mut adversary.recorders),
            Runner::Threads(handles) => {
                self.shared.stop.store(true, Ordering::Release);
                self.shared.queues.iter().for_each(|r| r.bell.ring());
                handles.drain(..).filter_map(|h| h.join().ok()).collect()
            }
        }
    }
}

impl Drop for CpuDevice {
    fn drop(&mut self) {
        // The streams' threads must end before their memory is unmapped.
        self.join();
        #[cfg(test)]
        self.nccl.iter().for_each(nccl_stand_in::NcclStandIn::withdraw);
    }
}

/// Starts the threads of the streams from `first` on.
fn start_streams(
    shared: &Arc<StreamsShared>,
    first: usize,
    recorders: impl IntoIterator<Item = Recorder>,
) -> Result<Vec<JoinHandle<Recorder>>> {
    let start = |(stream, recorder): (usize, Recorder)| {
        let (shared, name) = (shared.clone(), recorder.track.clone());
        let body = move || run_stream(&shared, stream, recorder);
        std::thread::Builder::new().name(name).spawn(body).map_err(|e| Error::resource("start a stream of the cpu device", e))
    };
    (first..).zip(recorders).map(start).collect()
}

fn run_stream(shared: &StreamsShared, stream: usize, mut recorder: Recorder) -> Recorder {
    let _guard = StreamPanic(shared);
    let queue = &shared.queues[stream];
    loop {
        queue.bell.wait_until(|| queue.front().is_some() || shared.stop.load(Ordering::Acquire));
        if queue.front().is_some() && !shared.can_run(stream) {
            shared.wait_for_stream(stream, &mut recorder);
        }
        if !shared.can_run(stream) {
            // The device stops: there is no operation left, or only a wait that will never end.
            return recorder;
        }
        shared.run_front(stream, &mut recorder);
        shared.wake(stream);
        shared.driver.ring();
    }
}

/// Turns a panic on a stream's thread into an error on the driver instead of a hang.
struct StreamPanic<'a>(&'a StreamsShared);

impl Drop for StreamPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, Ordering::Release);
            self.0.driver.ring();
        }
    }
}

impl StreamsShared {
    fn can_run(&self, stream: usize) -> bool {
        match self.queues[stream].front() {
            None => false,
            Some(Op::Run(_)) => true,
            Some(Op::Wait(point)) => self.has_passed(point),
            Some(Op::WaitForPeer { peer, point }) => self.peer_has_passed(peer, point),
        }
    }

    fn has_passed(&self, Point { stream, ops }: Point) -> bool {
        self.queues[stream].done() >= ops
    }

    /// Blocks until the wait at the front of the queue is over.
    fn wait_for_stream(&self, stream: usize, recorder: &mut Recorder) {
        let start = now_ns();
        let (point, for_peers) = match self.queues[stream].front() {
            Some(Op::Wait(point)) => (point, point.stream >= Stream::COUNT),
            Some(Op::WaitForPeer { point, .. }) => (point, true),
            _ => return,
        };
        self.queues[stream].wait_for(point, || self.can_run(stream) || self.stop.load(Ordering::Acquire));
        recorder.span("wait", u32::MAX, start);
        if stream == Stream::Compute as usize {
            let waited = now_ns() - start;
            self.compute_waited_ns.fetch_add(waited, Ordering::Relaxed);
            self.compute_waited_for_peers_ns.fetch_add(if for_peers { waited } else { 0 }, Ordering::Relaxed);
        }
    }

    fn run_front(&self, stream: usize, recorder: &mut Recorder) {
        if let Some(Op::Run(task)) = self.queues[stream].front() {
            let start = now_ns();
            task.run();
            recorder.span(task.name, u32::MAX, start);
        }
        self.queues[stream].pop();
    }
}

impl DeviceLibraries for CpuDevice {}

impl PinMemory for CpuDevice {
    fn pin(&mut self, _memory: PinnedSlice) -> Result<()> {
        Ok(())
    }

    fn unpin(&mut self, _memory: PinnedSlice) -> Result<()> {
        self.finish_streams()
    }
}

impl Device for CpuDevice {
    fn describe(&self) -> String {
        format!("cpu ({}, {})", counted(self.compute.threads(), "thread"), self.compute.isa())
    }

    fn alloc(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        let block = self.memory.alloc(name, elems * dtype.bytes())?;
        Ok(self.allocated.add(DeviceSlice::at(block.addr() as u64, elems, dtype)))
    }

    fn allocations(&self) -> Vec<(&str, usize)> {
        let lent = self.device_group.iter().filter_map(|device_group| device_group.lent.as_ref()).flat_map(|lent| lent.allocations());
        lent.chain(self.memory.allocations()).collect()
    }

    fn alloc_ring(&mut self, name: &str, elems: usize, dtype: Dtype, shape: RingShape) -> Result<DeviceSlice> {
        let [bytes, ringed, period] = [elems, shape.ringed_elems, shape.period_elems].map(|elems| elems * dtype.bytes());
        let block = self.memory.alloc_ring(name, bytes, ringed, period)?;
        Ok(self.allocated.add(DeviceSlice::at(block.addr() as u64, elems, dtype)))
    }

    fn alloc_unified(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        self.alloc(name, elems, dtype)
    }

    fn free(&mut self, memory: DeviceSlice) -> Result<()> {
        if memory.elems() == 0 {
            return Ok(());
        }
        self.finish_streams()?;
        self.allocated.remove(memory);
        self.memory.give_back(memory.addr() as usize, 0);
        Ok(())
    }

    /// Moves no data; the operation only records a span in stream order.
    fn prefetch(&mut self, stream: Stream, memory: DeviceSlice, space: MemorySpace) -> Result<()> {
        self.check_memory(memory)?;
        self.enqueue(stream, prefetch_span(space), || ())
    }

    fn check_memory(&self, memory: DeviceSlice) -> Result<()> {
        self.allocated.check(memory)
    }

    fn prepare_attention(&mut self, shape: AttentionShape, _dtype: Dtype, _separates_documents: bool) -> Result<()> {
        shape.check("attention")
    }

    fn event(&mut self) -> Result<EventId> {
        self.events.push(Arc::default());
        Ok(EventId(self.events.len() as u32 - 1))
    }

    fn record(&mut self, event: EventId, stream: Stream) -> Result<()> {
        let point = Point { stream: stream as usize, ops: self.shared.queues[stream as usize].enqueued() };
        self.events[event.0 as usize].store(point.pack(), Ordering::Release);
        Ok(())
    }

    fn wait(&mut self, stream: Stream, event: EventId) -> Result<()> {
        let point = self.recorded(event);
        if point.stream == stream as usize || self.shared.has_passed(point) {
            return Ok(());
        }
        self.push(stream, Op::Wait(point))
    }

    fn is_done(&mut self, event: EventId) -> Result<bool> {
        self.check()?;
        Ok(self.shared.has_passed(self.recorded(event)))
    }

    fn synchronize(&mut self, event: EventId) -> Result<()> {
        let point = self.recorded(event);
        self.run_until(|shared| shared.has_passed(point))
    }

    fn waited_ns(&self) -> u64 {
        self.shared.compute_waited_ns.load(Ordering::Relaxed)
    }

    fn idle(&mut self) -> Result<bool> {
        let Runner::Adversary(_) = self.runner else { return Ok(false) };
        if (0..self.shared.queues.len()).all(|s| !self.shared.can_run(s)) {
            return Ok(false);
        }
        self.advance()
    }

    fn copy_d2h(&mut self, stream: Stream, src: DeviceSlice, dst: PinnedSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "copy_d2h");
        self.check_memory(src)?;
        self.enqueue(stream, "copy_d2h", move || {
            // SAFETY: sizes agree; the device owns one side, and the maker of the device guarantees that the other side lives until the
            // copy is done.
            unsafe { std::ptr::copy_nonoverlapping(src.addr() as *const u8, dst.addr() as *mut u8, dst.bytes()) }
        })
    }

    fn copy_h2d(&mut self, stream: Stream, src: PinnedSlice, dst: DeviceSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "copy_h2d");
        self.check_memory(dst)?;
        self.enqueue(stream, "copy_h2d", move || {
            // SAFETY: sizes agree; the device owns one side, and the maker of the device guarantees that the other side lives until the
            // copy is done.
            unsafe { std::ptr::copy_nonoverlapping(src.addr() as *const u8, dst.addr() as *mut u8, src.bytes()) }
        })
    }

    fn finish(&mut self) -> Vec<Recorder> {
        self.join()
    }
}
