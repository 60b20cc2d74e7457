//! Physical limits of the machine. Every output line contains the fraction of its limit.

use microbench::facts::Facts;
use superoffload::Result;
use superoffload::internals::hardware::{GpuFacts, Topology};
use superoffload::internals::host::workers_beside_others;
use superoffload::internals::memory::Addressing;
use superoffload::internals::probe::{States, Triad, Workers, kernels::SmallKernels};

/// A physical limit, or the best known rate.
#[derive(Clone, Debug)]
pub struct Limit {
    /// Bytes a second.
    pub bytes_per_s: f64,
    /// Description of the limit.
    pub what: String,
}

/// The limits of a machine.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The link, in one direction.
    pub link: Limit,
    /// The host's memory, reads and writes together.
    pub host: Limit,
    /// The device's memory, reads and writes together.
    pub device: Limit,
    /// Worker threads of the optimizer.
    pub workers: usize,
}

/// Bytes of memory traffic for each byte that a triad counts: the cache reads a line before a store overwrites it.
const TRIAD_TRAFFIC: f64 = 4.0 / 3.0;
/// Rated bandwidth of a Grace Hopper's NVLink-C2C, in one direction.
const C2C_BYTES_PER_S: f64 = 450e9;

impl Limits {
    /// Limits of this machine. Measures the host's memory for about `time_s`.
    ///
    /// # Errors
    /// `Resource` if threads cannot be started.
    pub fn measure(
        topology: &Topology,
        states: &States,
        addressing: Option<Addressing>,
        (facts, small): (&Facts, &SmallKernels),
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

/// Limit of copies within host memory, which read one byte for each byte written.
fn through_memory(host: &Limit) -> Limit {
    Limit { bytes_per_s: host.bytes_per_s / 2.0, what: format!("{}, a read and a write for each byte", host.what) }
}

/// Bandwidth of the PCIe lanes after line encoding, without the overhead of packet headers.
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
