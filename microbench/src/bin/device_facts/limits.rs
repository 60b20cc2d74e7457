//! What the machine could do at best: each case is told how much of that it gets.

use microbench::facts::Facts;
use superoffload::Result;
use superoffload::internals::hardware::{GpuFacts, Topology};
use superoffload::internals::host::workers_beside_others;
use superoffload::internals::memory::Addressing;
use superoffload::internals::probe::{States, Triad, Workers, kernels::Small};

/// A rate that cannot be exceeded, or the best one known.
#[derive(Clone, Debug)]
pub struct Limit {
    /// Bytes a second.
    pub bytes_per_s: f64,
    /// What it is the rate of.
    pub what: String,
}

/// All of them.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The link, one way.
    pub link: Limit,
    /// The host's memory, reads and writes together.
    pub host: Limit,
    /// The device's memory, reads and writes together.
    pub device: Limit,
    /// Threads of the optimizer.
    pub workers: usize,
}

/// Bytes that move for each that a triad counts: a line is read before it is written.
const TRIAD_TRAFFIC: f64 = 4.0 / 3.0;
/// NVLink-C2C of a Grace Hopper, rated, one way.
const C2C_BYTES_PER_S: f64 = 450e9;

impl Limits {
    /// Of this machine; the host's memory is measured for about `time_s`.
    ///
    /// # Errors
    /// `Resource` when threads cannot be had.
    pub fn measure(
        topology: &Topology,
        states: &States,
        addressing: Option<Addressing>,
        (facts, small): (&Facts, &Small),
        time_s: f64,
    ) -> Result<Self> {
        let cpus = topology.usable_cpus().map_or(1, |usable| usable.count());
        let triad = Workers::<Triad>::new(topology, cpus)?.rates(time_s, |_| states.triad())?.median();
        let what = format!("host memory: triad of {cpus} threads, with what its stores read first");
        let host = Limit { bytes_per_s: triad * TRIAD_TRAFFIC, what };
        let link = match addressing {
            None => through_memory(&host),
            Some(Addressing::Coherent) => Limit { bytes_per_s: C2C_BYTES_PER_S, what: "NVLink-C2C as rated, one way".into() },
            Some(_) => facts.machine.gpu.as_ref().and_then(pcie).unwrap_or_else(|| through_memory(&host)),
        };
        let device = Limit { bytes_per_s: small.memory_bytes_per_s.median(), what: "device memory: norms of rows".into() };
        Ok(Self { link, host, device, workers: if addressing.is_some() { workers_beside_others(cpus) } else { cpus } })
    }
}

/// A copy within the host reads a byte for each that it writes.
fn through_memory(host: &Limit) -> Limit {
    Limit { bytes_per_s: host.bytes_per_s / 2.0, what: format!("{}, a read and a write for each byte", host.what) }
}

/// The rate of the lanes after their encoding, before headers of packets.
fn pcie(gpu: &GpuFacts) -> Option<Limit> {
    let (generation, lanes) = (gpu.pcie_generation?, gpu.pcie_lanes?);
    let lane_bytes_per_s = match generation {
        1 => 2.5e9 * 0.8,
        2 => 5e9 * 0.8,
        3..=5 => 8e9 * f64::from(1u32 << (generation - 3)) * 128.0 / 130.0,
        _ => 64e9 * 242.0 / 256.0,
    } / 8.0;
    Some(Limit { bytes_per_s: lane_bytes_per_s * f64::from(lanes), what: format!("PCIe {generation} x{lanes}, one way") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_of_sixteen_lanes() {
        let gpu = |generation| GpuFacts { pcie_generation: Some(generation), pcie_lanes: Some(16), ..GpuFacts::default() };
        let gb_s = |generation| (pcie(&gpu(generation)).unwrap().bytes_per_s * 1e-8).round() / 10.0;
        assert_eq!([3, 4, 5, 6].map(gb_s), [15.8, 31.5, 63.0, 121.0]);
        assert!(pcie(&GpuFacts::default()).is_none());
    }
}
