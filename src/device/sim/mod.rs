//! A device that computes nothing: every operation takes the time given by a machine's profile, on a simulated clock.
//!
//! The engine, the coordinator and the model's loop run on it unchanged. It therefore shows how a plan would run on another machine, with
//! the same spans, counters and reports. `world` simulates the machine, `pool` the optimizer's pool; each kernel states its own cost.

mod disk;
mod disk_writes;
mod pool;
mod world;

use super::{
    Checked, Device, DeviceKind, DeviceLibraries, DeviceSlice, EventId, Kernel, Launch, MatrixPart, Peers, PinMemory, Stream, Swap,
};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::hardware::rates::{HostFormats, Rates};
use crate::host::pinned::PinnedSlice;
use crate::memory::DeviceMemory;
use crate::memory::{Addressing, MemorySpace, RingShape};
use crate::optim::simd::Isa;
use crate::ranks::{NcclUniqueId, RankContext};
use crate::trace::Recorder;
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use world::{OpKind, SimWork, World};

pub(crate) use disk::SimDisk;
pub(crate) use pool::SimPool;
pub(crate) use world::CLOCK_MAX_NS;

/// Alignment of addresses, which have no memory.
const ALIGN_BYTES: u64 = 256;

pub(crate) struct SimDevice {
    name: String,
    kind: DeviceKind,
    rates: Rates,
    memory: DeviceMemory,
    world: Rc<RefCell<World>>,
    next_addr: u64,
    /// Rank of this device.
    rank: usize,
    /// Number of ranks in a process.
    local_ranks: usize,
}

impl SimDevice {
    /// A device with the kind and memory `on` at these `rates`, and its optimizer's pool with the number of workers, their instruction set
    /// and the formats of the state. `name` is for people.
    pub(crate) fn new(
        name: &str,
        rates: &Rates,
        on: (DeviceKind, DeviceMemory),
        workers: (usize, Isa, impl Into<HostFormats>),
        trace_spans: usize,
    ) -> (Self, SimPool) {
        let shares_cores = on.0 == DeviceKind::Cpu;
        let world = Rc::new(RefCell::new(World::new(rates, shares_cores, trace_spans)));
        let (bytes_per_s, wake_up_s) = (rates.adam_bytes_per_s(workers.0, workers.1, workers.2), rates.wake_up_s);
        let pool = SimPool { world: world.clone(), bytes_per_s, wake_up_s };
        let (name, rates, (kind, memory)) = (name.into(), rates.clone(), on);
        let device = Self { name, kind, rates, memory, world, next_addr: ALIGN_BYTES, rank: 0, local_ranks: usize::MAX };
        (device, pool)
    }

    /// The disk of the machine.
    pub(crate) fn disk(&self) -> SimDisk {
        SimDisk { world: self.world.clone() }
    }

    /// Places this device among `local_ranks` ranks of its process; further ranks belong to other processes.
    pub(crate) fn among(self, local_ranks: usize) -> Self {
        Self { local_ranks, ..self }
    }

    /// Enqueues an operation that takes `seconds` without contention; the driver is busy for the duration of a launch.
    fn enqueue(&mut self, stream: Stream, kind: OpKind, name: &'static str, seconds: f64) {
        let mut world = self.world.borrow_mut();
        world.enqueue(stream, SimWork { kind, name, index: u32::MAX, alone_ns: seconds * 1e9 });
        world.spend(self.rates.launch_s * 1e9);
    }

    fn enqueue_pull(&mut self, stream: Stream, peer: usize, bytes: usize) {
        let rates = &self.rates;
        let (kind, seconds) = if peer / self.local_ranks != self.rank / self.local_ranks {
            (OpKind::OverHosts, rates.between_hosts().exchange_s(bytes))
        } else if peer != self.rank {
            (OpKind::FromPeer, rates.latency_s + bytes as f64 / rates.peer_bytes_per_s)
        } else {
            // A GPU copies within its memory by a kernel, which reads and writes.
            (OpKind::Compute, rates.kernel_s + 2.0 * bytes as f64 / rates.device_bytes_per_s)
        };
        self.enqueue(stream, kind, "pull", seconds);
    }
}

/// The time of a kernel is the larger of the times for its FLOPs and for its bytes, plus the minimum time of a kernel. A second kernel on
/// a GPU adds its time.
impl<K: Kernel> Launch<K> for SimDevice {
    fn accept(&mut self, kernel: Checked<K>) -> Result<()> {
        let kernel = *kernel;
        let (flops_s, bytes_s) = (kernel.flops() / kernel.flops_per_s(&self.rates), kernel.bytes() / self.rates.device_bytes_per_s);
        let bytes_after = if self.kind == DeviceKind::Gpu { kernel.bytes_after() } else { 0.0 };
        let after_s = if bytes_after > 0.0 { self.rates.kernel_s + bytes_after / self.rates.device_bytes_per_s } else { 0.0 };
        self.enqueue(kernel.stream(), OpKind::Compute, K::NAME, self.rates.kernel_s + flops_s.max(bytes_s) + after_s);
        Ok(())
    }
}

/// Peers behave exactly like this device, so their events are represented by its own events.
impl Peers for SimDevice {
    type PeerHandle = ();

    fn peer_handle(&mut self) {}

    fn leave(&mut self) -> Result<()> {
        Ok(())
    }

    fn reclaim(&mut self) -> Result<()> {
        Ok(())
    }

    fn admit(&mut self, context: RankContext, _cards: Vec<()>) -> Result<()> {
        self.rank = context.rank;
        Ok(())
    }

    fn waited_for_peers_ns(&self) -> u64 {
        self.world.borrow().waited_for_peers_ns()
    }

    fn wait_for(&mut self, stream: Stream, _peer: usize, event: EventId) -> Result<()> {
        self.wait(stream, event)
    }

    /// A pull from the device itself, which is rank 0 unless it was admitted, reads and writes one memory.
    fn pull(&mut self, stream: Stream, peer: usize, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "pull");
        self.enqueue_pull(stream, peer, src.bytes());
        Ok(())
    }

    fn connect(&mut self, _: &NcclUniqueId, _: &[PathBuf]) -> Result<()> {
        Ok(())
    }

    /// All ranks send and receive at once, each direction at the speed of the network.
    fn swap(&mut self, swaps: impl Iterator<Item = Swap>) -> Result<()> {
        let [out, into] = swaps.fold([0, 0], |[out, into], swap| [out + swap.out.bytes(), into + swap.into.bytes()]);
        self.enqueue(Stream::Compute, OpKind::Swap, "swap", self.rates.between_processes().exchange_s(out.max(into)));
        Ok(())
    }

    /// Copy engines copy rows of at least an attention head as fast as contiguous memory.
    fn pull_rows(&mut self, stream: Stream, peer: usize, src: MatrixPart, dst: MatrixPart) -> Result<()> {
        assert!(src.fits(dst), "pull {src:?} to {dst:?}");
        self.enqueue_pull(stream, peer, src.bytes());
        Ok(())
    }
}

impl DeviceLibraries for SimDevice {}

impl PinMemory for SimDevice {
    fn pin(&mut self, _memory: PinnedSlice) -> Result<()> {
        Ok(())
    }

    fn unpin(&mut self, _memory: PinnedSlice) -> Result<()> {
        Ok(())
    }
}

impl Device for SimDevice {
    fn describe(&self) -> String {
        format!("simulated {}", self.name)
    }

    fn alloc(&mut self, _name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        let addr = self.next_addr;
        self.next_addr += ((elems * dtype.bytes()) as u64).next_multiple_of(ALIGN_BYTES);
        Ok(DeviceSlice::at(addr, elems, dtype))
    }

    fn alloc_ring(&mut self, name: &str, elems: usize, dtype: Dtype, _shape: RingShape) -> Result<DeviceSlice> {
        self.alloc(name, elems, dtype)
    }

    fn alloc_unified(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice> {
        self.alloc(name, elems, dtype)
    }

    fn free(&mut self, _memory: DeviceSlice) -> Result<()> {
        Ok(())
    }

    fn prefetch(&mut self, stream: Stream, memory: DeviceSlice, space: MemorySpace) -> Result<()> {
        if let DeviceMemory::Own { addressing: Addressing::Managed | Addressing::Separate, .. } = self.memory {
            let seconds = self.rates.latency_s + memory.bytes() as f64 / self.rates.managed_bytes_per_s;
            self.enqueue(stream, OpKind::Paging, super::prefetch_span(space), seconds);
        }
        Ok(())
    }

    /// Accepts all addresses, because none has memory.
    fn check_memory(&self, _memory: DeviceSlice) -> Result<()> {
        Ok(())
    }

    fn event(&mut self) -> Result<EventId> {
        Ok(EventId(self.world.borrow_mut().event() as u32))
    }

    fn record(&mut self, event: EventId, stream: Stream) -> Result<()> {
        self.world.borrow_mut().record(event.0 as usize, stream);
        Ok(())
    }

    fn wait(&mut self, stream: Stream, event: EventId) -> Result<()> {
        self.world.borrow_mut().wait(stream, event.0 as usize);
        Ok(())
    }

    fn is_done(&mut self, event: EventId) -> Result<bool> {
        Ok(self.world.borrow().is_done(event.0 as usize))
    }

    fn synchronize(&mut self, event: EventId) -> Result<()> {
        while !self.is_done(event)? {
            self.idle()?;
        }
        Ok(())
    }

    fn idle(&mut self) -> Result<bool> {
        let advanced = self.world.borrow_mut().advance();
        if advanced {
            Ok(true)
        } else {
            Err(Error::resource("wait for the step", "no operation is in progress: a deadlock in the step protocol"))
        }
    }

    fn now_ns(&self) -> u64 {
        self.world.borrow().now_ns()
    }

    fn waited_ns(&self) -> u64 {
        self.world.borrow().waited_ns()
    }

    fn copy_d2h(&mut self, stream: Stream, src: DeviceSlice, dst: PinnedSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "copy_d2h");
        self.enqueue(stream, OpKind::ToHost, "copy_d2h", self.rates.to_host_s(src.bytes()));
        Ok(())
    }

    fn copy_h2d(&mut self, stream: Stream, src: PinnedSlice, dst: DeviceSlice) -> Result<()> {
        assert_eq!(src.bytes(), dst.bytes(), "copy_h2d");
        self.enqueue(stream, OpKind::ToDevice, "copy_h2d", self.rates.to_device_s(src.bytes()));
        Ok(())
    }

    fn finish(&mut self) -> Vec<Recorder> {
        self.world.borrow_mut().take_streams()
    }
}
