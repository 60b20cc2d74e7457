//! Several devices at the same time, with a thread each as in training: links to the host, pulls from each other, and the optimizers of all
//! ranks.
#![allow(unsafe_code)]

use super::copies::{Copies, CopyDirection};
use super::samples::{Samples, sourced};
use super::states::States;
use super::work_done::WorkDone;
use super::workers::memory_policy;
use crate::device::{DeviceSlice, EventId, Peers, Stream};
use crate::dtype::Dtype;
use crate::engine::pool::Pool;
use crate::engine::step_job::StepJob;
use crate::error::{Error, Result};
use crate::hardware::peer_route::PeerRoute;
use crate::hardware::profile::Together;
use crate::hardware::topology::Topology;
use crate::host::affinity::workers_beside_others;
use crate::host::doorbell::Doorbell;
use crate::host::pinned::HostMemory;
use crate::host::pool::Job;
use crate::launch::ranks::Leave;
use crate::ranks::RankContext;
use crate::ranks::progress::{CounterSizes, ProgressCounters};
use std::sync::{Arc, OnceLock};

/// Number of turns of each load, so that other load on a shared machine affects all of them.
const TURNS: usize = 3;

/// An operation that a rank keeps running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadLane {
    Link(CopyDirection),
    Pull,
    Adam,
}

impl LoadLane {
    const COUNT: usize = 4;

    fn index(self) -> usize {
        match self {
            Self::Link(way) => way as usize,
            Self::Pull => 2,
            Self::Adam => 3,
        }
    }
}

/// Concurrent operations on every device, in the order of [`Together`].
const LOADS: [&[LoadLane]; 5] = [
    &[LoadLane::Pull],
    &[LoadLane::Link(CopyDirection::ToHost)],
    &[LoadLane::Link(CopyDirection::ToDevice)],
    &[LoadLane::Link(CopyDirection::ToHost), LoadLane::Link(CopyDirection::ToDevice)],
    &[LoadLane::Adam],
];

/// Bytes per second of each lane, by load and turn.
type LoadRates = [[f64; TURNS]; LOADS.len()];

/// Parameters of the measurement.
pub(crate) struct JointProbe<'a> {
    pub(crate) topology: &'a Topology,
    /// The memory node near each device, if known.
    pub(crate) gpu_nodes: &'a [Option<usize>],
    /// Route of copies between the devices.
    pub(crate) route: PeerRoute,
    pub(crate) are_gpus: bool,
    /// Bytes of a copy over a link.
    pub(crate) copy_bytes: usize,
    pub(crate) time_s: f64,
}

/// A rank's part of the machine.
pub(crate) struct RankPart {
    pub(crate) rank: usize,
    pub(crate) topology: Topology,
    /// Threads of its optimizer.
    pub(crate) threads: usize,
    /// The doorbell that wakes its driver.
    pub(crate) bell: Arc<Doorbell>,
}

/// A rank's device and optimizer pool.
type Equipment<D> = (D, Pool<StepJob>);

/// Measures one device for each of `joint_probe.homes`. `make` creates it from the rank's part, on that rank's thread.
///
/// # Errors
/// The first failure of a rank, with its name.
pub(crate) fn measure<D: Peers>(joint_probe: &JointProbe<'_>, make: impl Fn(&RankPart) -> Result<Equipment<D>> + Sync) -> Result<Together> {
    let ranks = joint_probe.gpu_nodes.len();
    let progress = Arc::new(ProgressCounters::new(CounterSizes { ranks, on_gpus: joint_probe.are_gpus, ..CounterSizes::default() }, None));
    let peer_handles: Vec<OnceLock<(D::PeerHandle, DeviceSlice)>> = (0..ranks).map(|_| OnceLock::new()).collect();
    let rates = std::thread::scope(|scope| {
        let rank = |rank| {
            let (leave, make, peer_handles) = (Leave(RankContext { progress: progress.clone(), rank }), &make, &peer_handles);
            scope.spawn(move || joint_probe.rank(&leave.0, make, peer_handles).map_err(|error| leave.0.attribute(error)))
        };
        let threads: Vec<_> = (0..ranks).map(rank).collect();
        // A rank that panicked has printed its message and left the progress counters.
        let left = || progress.failure().unwrap_or_else(|| Error::resource("measure all devices at once", "one of them is gone"));
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(left()))).collect();
        ended.into_iter().collect::<Result<Vec<LoadRates>>>()
    })?;
    let of_each = |load: usize| Samples::new(rates.iter().flat_map(|rates| rates[load]).collect()).sourced();
    let of_all = Samples::new((0..TURNS).map(|turn| rates.iter().map(|rates| rates[4][turn]).sum()).collect());
    let [peer_bytes_per_s, to_host_bytes_per_s, to_device_bytes_per_s, both_ways_bytes_per_s] = [0, 1, 2, 3].map(of_each);
    Ok(Together {
        gpus: sourced(ranks as f64, "all were busy"),
        peer_bytes_per_s,
        peer_route: joint_probe.route,
        to_host_bytes_per_s,
        to_device_bytes_per_s,
        both_ways_bytes_per_s,
        all_adam_bytes_per_s: of_all.sourced(),
    })
}

impl JointProbe<'_> {
    /// The measured rates of the rank of `context`.
    fn rank<D: Peers>(
        &self,
        context: &RankContext,
        make: &(impl Fn(&RankPart) -> Result<Equipment<D>> + Sync),
        peer_handles: &[OnceLock<(D::PeerHandle, DeviceSlice)>],
    ) -> Result<LoadRates> {
        let part = self.part(context);
        // Users of the memory are declared later, so they are dropped earlier.
        let mut memory = HostMemory::new(memory_policy(&part.topology, part.threads)?);
        // SAFETY: the rank runs one job at a time, and waits for it before `memory` is dropped.
        let states = unsafe { States::new(&part.topology, &mut memory) }?;
        let (mut dev, pool) = make(&part)?;
        let copies = Copies::new(&mut dev, &mut memory, self.copy_bytes)?;
        // As many elements of a bucket as a rank pulls from each other rank.
        let elems = copies.bucket_bytes() / 4 / self.gpu_nodes.len();
        let [lent, pulled] = [dev.alloc("lent", elems, Dtype::Float32)?, dev.alloc("pulled", elems, Dtype::Float32)?];
        let ends = [dev.event()?, dev.event()?, dev.event()?];
        // No other rank sets this entry.
        let _ = peer_handles[context.rank].set((dev.peer_handle(), lent));
        let mut meetings = Meetings { context, count: 0 };
        meetings.next()?;
        let (peer_handles, lent): (Vec<_>, Vec<_>) = peer_handles.iter().filter_map(OnceLock::get).cloned().unzip();
        dev.admit(context.clone(), peer_handles)?;
        let mut working = RankAtWork { dev, copies, lent, pulled, ends, states: &states, pool, rank: context.rank, begun: 0 };
        let (mut rates, each_s) = (LoadRates::default(), self.time_s / (TURNS * LOADS.len()) as f64);
        for turn in 0..TURNS {
            for (lanes, rates) in LOADS.into_iter().zip(&mut rates) {
                meetings.next()?;
                rates[turn] = working.turn(lanes, each_s)?;
            }
        }
        // Memory must stay allocated while other ranks pull from it.
        meetings.next()?;
        Ok(rates)
    }

    /// CPUs and memory of the rank of `context`.
    fn part(&self, RankContext { progress, rank }: &RankContext) -> RankPart {
        let ranks = self.gpu_nodes.len();
        let workers = |topology: &Topology| workers_beside_others(topology.usable_cpus().map_or(1, |usable| usable.count()));
        let own = self.topology.cpu_slice(*rank, self.gpu_nodes);
        let threads = own.as_ref().map_or_else(|| (workers(self.topology) / ranks).max(1), workers);
        let topology = own.unwrap_or_else(|| self.topology.clone());
        let memory_available_bytes = topology.memory_available_bytes.map(|bytes| bytes / ranks as u64);
        RankPart { rank: *rank, topology: Topology { memory_available_bytes, ..topology }, threads, bell: progress.bell(*rank) }
    }
}

/// Barriers: all ranks must reach one before any continues.
struct Meetings<'a> {
    context: &'a RankContext,
    count: u64,
}

impl Meetings<'_> {
    /// Waits until all ranks have arrived.
    ///
    /// # Errors
    /// The failure of another rank.
    fn next(&mut self) -> Result<()> {
        let RankContext { progress, rank } = self.context;
        progress.publish_written(*rank);
        let have_written = || progress.all_written(self.count);
        progress.bell(*rank).wait_until(|| have_written() || progress.has_failed());
        // A rank that has ended leaves the progress counters, and may be ahead.
        if !have_written() {
            self.context.check()?;
        }
        self.count += 1;
        Ok(())
    }
}

/// A rank's device and pool during the measurement.
struct RankAtWork<'a, D> {
    dev: D,
    copies: Copies,
    /// Memory of each rank that the others pull.
    lent: Vec<DeviceSlice>,
    pulled: DeviceSlice,
    ends: [EventId; 3],
    states: &'a States,
    pool: Pool<StepJob>,
    rank: usize,
    /// Number of pulls and jobs so far.
    begun: usize,
}

impl<D: Peers> RankAtWork<'_, D> {
    /// Mean bytes per second of `lanes`, all of which run for `time_s`.
    fn turn(&mut self, lanes: &[LoadLane], time_s: f64) -> Result<f64> {
        let (start_ns, mut done) = (self.dev.now_ns(), [WorkDone::default(); LoadLane::COUNT]);
        let is_short = |done: &[WorkDone]| lanes.iter().any(|lane| done[lane.index()].done == 0.0);
        while (self.dev.now_ns().saturating_sub(start_ns) as f64) < time_s * 1e9 || is_short(&done) {
            for &lane in lanes {
                if self.is_free(lane)? {
                    let bytes = self.begin(lane)?;
                    done[lane.index()].next(self.dev.now_ns(), bytes as f64);
                }
            }
            self.rest()?;
        }
        while !lanes.iter().map(|&lane| self.is_free(lane)).collect::<Result<Vec<_>>>()?.into_iter().all(|is_free| is_free) {
            self.rest()?;
        }
        Ok(lanes.iter().map(|lane| done[lane.index()].rate(start_ns)).sum::<f64>() / lanes.len() as f64)
    }

    fn is_free(&mut self, lane: LoadLane) -> Result<bool> {
        match lane {
            LoadLane::Adam => self.pool.is_idle(),
            lane => self.dev.is_done(self.ends[lane.index()]),
        }
    }

    /// Starts one operation. Returns its bytes.
    fn begin(&mut self, lane: LoadLane) -> Result<u64> {
        let (stream, bytes) = match lane {
            LoadLane::Adam => {
                self.begun += 1;
                let job = self.states.adam(self.begun);
                let bytes = job.traffic_bytes();
                self.pool.submit(job);
                return Ok(bytes);
            }
            LoadLane::Pull => {
                // Pulls from one peer at a time, and from all peers in turn.
                let peer = (self.rank + 1 + self.begun % (self.lent.len() - 1)) % self.lent.len();
                self.begun += 1;
                self.dev.pull(Stream::Reduce, peer, self.lent[peer], self.pulled)?;
                (Stream::Reduce, self.pulled.bytes())
            }
            LoadLane::Link(way) => {
                let bytes = self.copies.bucket_bytes();
                self.copies.enqueue(&mut self.dev, way, bytes)?;
                (way.stream(), bytes)
            }
        };
        self.dev.record(self.ends[lane.index()], stream)?;
        Ok(bytes as u64)
    }

    /// Advances a simulated device, or yields to other threads of a busy machine.
    fn rest(&mut self) -> Result<()> {
        if !self.dev.idle()? {
            std::thread::yield_now();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::CpuDevice;
    use crate::device::cpu::StreamOrder;
    use crate::device::sim::SimDevice;
    use crate::hardware::profile::Profile;
    use crate::launch::open;
    use crate::optim::moments::Moments;
    use crate::optim::simd::Isa;
    use crate::planner::machine::Machine;
    use crate::probe::workers::Workers;

    fn joint_probe<'a>(topology: &'a Topology, gpu_nodes: &'a [Option<usize>]) -> JointProbe<'a> {
        JointProbe { topology, gpu_nodes, route: PeerRoute::Own, are_gpus: false, copy_bytes: 1 << 20, time_s: 0.15 }
    }

    fn small_machine() -> Topology {
        Topology { caches: Vec::new(), memory_available_bytes: Some(1 << 28), ..Topology::this_machine() }
    }

    fn on_cpus(part: &RankPart) -> Result<Equipment<CpuDevice>> {
        let dev = open::cpu(1, StreamOrder::Threads, part.bell.clone(), 0)?;
        Ok((dev, Workers::ringing(part.bell.clone(), &part.topology, part.threads)?.pool))
    }

    #[test]
    fn devices_of_this_machine_are_measured_together() {
        let topology = small_machine();
        for ranks in [2, 3] {
            let gpu_nodes = vec![None; ranks];
            let together = measure(&joint_probe(&topology, &gpu_nodes), on_cpus).unwrap();
            assert_eq!((together.gpus.value, together.peer_route), (ranks as f64, PeerRoute::Own));
            let Together { peer_bytes_per_s, to_host_bytes_per_s, both_ways_bytes_per_s, all_adam_bytes_per_s, .. } = together;
            for number in [peer_bytes_per_s, to_host_bytes_per_s, both_ways_bytes_per_s, all_adam_bytes_per_s] {
                assert!(number.value > 1e6 && number.source.starts_with("measured by "), "{number:?}");
            }
        }
    }

    #[test]
    fn simulated_gpus_are_measured_as_in_their_profile() {
        let (profile, topology) = (Profile::load("h200-x2").unwrap(), small_machine());
        let machine = Machine::of_several(&profile, 2).unwrap();
        let make = |_: &RankPart| {
            let (dev, pool) = SimDevice::new("h200", &machine.rates, (machine.kind, machine.device), (32, Isa::Avx2, Moments::Float32), 0);
            Ok((dev, Pool::Simulated(pool)))
        };
        let loads = JointProbe { copy_bytes: 64 << 20, time_s: 1.0, ..joint_probe(&topology, &[None, None]) };
        let measured = measure(&loads, make).unwrap();
        let wanted = profile.together.unwrap();
        for (measured, wanted) in [
            (measured.peer_bytes_per_s, wanted.peer_bytes_per_s),
            (measured.to_host_bytes_per_s, wanted.to_host_bytes_per_s),
            (measured.to_device_bytes_per_s, wanted.to_device_bytes_per_s),
            (measured.both_ways_bytes_per_s, wanted.both_ways_bytes_per_s),
            (measured.all_adam_bytes_per_s, wanted.all_adam_bytes_per_s),
        ] {
            assert!((measured.value / wanted.value - 1.0).abs() < 0.05, "{measured:?} instead of {wanted:?}");
        }
    }

    #[test]
    fn a_device_that_does_not_open_or_panics_ends_the_measurement_by_name() {
        let topology = small_machine();
        let fails = |panics: bool| {
            let make = move |part: &RankPart| match (part.rank, panics) {
                (1, true) => panic!("on purpose"),
                (1, false) => Err(Error::resource("open it", "it is gone")),
                _ => on_cpus(part),
            };
            measure(&joint_probe(&topology, &[None, None]), make).unwrap_err().to_string()
        };
        assert_eq!(fails(false), "rank 1: open it: it is gone");
        assert_eq!(fails(true), "rank 1: it panicked; see the message above");
    }
}
