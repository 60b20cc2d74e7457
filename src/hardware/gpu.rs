//! The NVIDIA GPU according to the management library (NVML): facts, and samples during a run.

#[cfg_attr(not(feature = "cuda"), path = "gpu/absent.rs")]
mod nvml;

mod facts;
mod links;

#[cfg(not(feature = "cuda"))]
pub(crate) use facts::no_cuda;
pub use facts::{GpuFacts, GpuId};
pub(crate) use links::{GpuLink, is_same_pci};

use crate::error::{Error, Result};
use facts::Sample;
use nvml::VisibleGpu;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two samples. Taking a sample adds about 40 ms.
const INTERVAL: Duration = Duration::from_millis(100);

impl GpuFacts {
    /// Reads the facts of the first GPU that is visible to CUDA.
    ///
    /// # Errors
    /// `Unsupported` in a build without the CUDA device, `Resource` if there is no management library or no GPU.
    pub fn read() -> Result<Self> {
        VisibleGpu::open().map(|gpu| gpu.facts())
    }
}

/// The link between each pair of `gpus`, with their indices in the list.
///
/// # Errors
/// Errors of [`GpuFacts::read`].
pub(crate) fn links(gpus: &[GpuId]) -> Result<Vec<([usize; 2], GpuLink)>> {
    nvml::links(gpus)
}

/// Summary of the samples of a GPU. Gigabytes are 10^9 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub(crate) struct GpuSamples {
    /// Number of samples.
    pub samples: usize,
    /// Mean power.
    pub(crate) power_w: Option<f64>,
    /// Mean clock of the multiprocessors.
    pub(crate) sm_clock_mhz: Option<f64>,
    /// Lowest clock of the multiprocessors.
    pub(crate) sm_clock_min_mhz: Option<f64>,
    /// Mean rate of PCIe transfers out of the GPU, by its own counters, including the protocol.
    pub(crate) pcie_d2h_gb_per_s: Option<f64>,
    /// Mean rate of PCIe transfers into the GPU.
    pub(crate) pcie_h2d_gb_per_s: Option<f64>,
    /// Maximum memory in use by all processes.
    pub(crate) memory_used_bytes: Option<u64>,
}

impl From<&[Sample]> for GpuSamples {
    fn from(samples: &[Sample]) -> Self {
        let mean = |of: fn(&Sample) -> Option<f64>| {
            let values: Vec<f64> = samples.iter().filter_map(of).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        Self {
            samples: samples.len(),
            power_w: mean(|s| s.power_w),
            sm_clock_mhz: mean(|s| s.sm_clock_mhz),
            sm_clock_min_mhz: samples.iter().filter_map(|s| s.sm_clock_mhz).reduce(f64::min),
            pcie_d2h_gb_per_s: mean(|s| s.d2h_gb_per_s),
            pcie_h2d_gb_per_s: mean(|s| s.h2d_gb_per_s),
            memory_used_bytes: samples.iter().filter_map(|s| s.memory_used_bytes).max(),
        }
    }
}

/// A thread that samples the GPU several times a second.
pub(crate) struct Sampler {
    stopping: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Sampler {
    /// Starts to sample the first GPU that is visible to CUDA.
    ///
    /// # Errors
    /// Errors of [`GpuFacts::read`]; `Resource` if the thread cannot start.
    pub(crate) fn start() -> Result<Self> {
        let gpu = VisibleGpu::open()?;
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = stopping.clone();
        let body = move || watch(&gpu, &stop);
        let thread = std::thread::Builder::new().name("gpu-sampler".into()).spawn(body);
        Ok(Self { stopping, thread: thread.map_err(|e| Error::resource("start the GPU's sampler", e))? })
    }

    /// Stops the thread and returns a summary of its samples.
    ///
    /// # Errors
    /// `Resource` if the thread panicked.
    pub(crate) fn stop(self) -> Result<GpuSamples> {
        self.stopping.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        let samples = self.thread.join().map_err(|_| Error::resource("watch the GPU", "its thread panicked"))?;
        Ok(GpuSamples::from(&samples[..]))
    }
}

fn watch(gpu: &VisibleGpu, stop: &AtomicBool) -> Vec<Sample> {
    let mut samples = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        samples.push(gpu.sample());
        std::thread::park_timeout(INTERVAL);
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_become_means_of_known_values() {
        let watts = |power_w| Sample { power_w, ..Sample::default() };
        let sum = GpuSamples::from(&[watts(Some(300.0)), watts(None), watts(Some(500.0))][..]);
        assert_eq!((sum.samples, sum.power_w, sum.sm_clock_mhz), (3, Some(400.0), None));
    }

    #[test]
    fn facts_print_as_far_as_they_are_known() {
        assert_eq!(GpuFacts::default().to_string(), "NVIDIA GPU without a name");
        let facts = GpuFacts {
            name: Some("NVIDIA H200".into()),
            memory_bytes: Some(150_754_820_096),
            pcie_generation: Some(5),
            pcie_lanes: Some(16),
            power_limit_w: Some(700.0),
            driver: Some("580.1".into()),
            cuda: Some("13.0".into()),
            ..GpuFacts::default()
        };
        assert_eq!(facts.to_string(), "NVIDIA H200, 140.4 GiB, PCIe 5 x16, 700 W, driver 580.1 (CUDA 13.0)");
    }

    #[test]
    fn a_gpu_that_cannot_be_queried_is_an_error_with_a_reason() {
        if let Err(error) = GpuFacts::read() {
            assert!(matches!(error, Error::Resource { .. } | Error::Unsupported(_)), "{error}");
            assert_eq!(Sampler::start().err().unwrap().to_string(), error.to_string());
        }
    }
}
