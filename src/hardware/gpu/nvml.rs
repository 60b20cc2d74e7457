//! NVIDIA's management library, opened at run time.

use super::facts::{GpuFacts, Sample};
use crate::error::{Error, Result};
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

/// The name with a version: the one without belongs to development packages.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// The GPU that CUDA shows first.
pub(super) struct VisibleGpu {
    nvml: Nvml,
    visible: Visible,
}

/// How CUDA was told which GPU comes first.
enum Visible {
    Index(u32),
    Uuid(String),
}

impl Visible {
    /// CUDA counts only the GPUs that `CUDA_VISIBLE_DEVICES` names, by index or UUID; the library counts all.
    fn first() -> Self {
        let named = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "0".into());
        let first = named.split(',').next().unwrap_or_default().trim();
        first.parse().map_or_else(|_| Self::Uuid(first.into()), Self::Index)
    }

    /// What was looked for, for an error.
    fn wanted() -> String {
        let named = std::env::var("CUDA_VISIBLE_DEVICES").map(|named| format!("first of CUDA_VISIBLE_DEVICES={named:?}"));
        format!("find the GPU that is {}", named.as_deref().unwrap_or("first"))
    }
}

impl VisibleGpu {
    pub(super) fn open() -> Result<Self> {
        let failed = |e: NvmlError| Error::resource(format!("ask {LIBRARY} about the GPU"), e);
        let nvml = Nvml::builder().lib_path(LIBRARY.as_ref()).init().map_err(failed)?;
        let gpu = Self { nvml, visible: Visible::first() };
        match gpu.device() {
            Ok(_) => Ok(gpu),
            Err(e) => Err(Error::resource(Visible::wanted(), e)),
        }
    }

    fn device(&self) -> std::result::Result<Device<'_>, NvmlError> {
        match &self.visible {
            Visible::Index(index) => self.nvml.device_by_index(*index),
            Visible::Uuid(uuid) => self.nvml.device_by_uuid(uuid.as_str()),
        }
    }

    pub(super) fn facts(&self) -> GpuFacts {
        let Ok(device) = self.device() else { return GpuFacts::default() };
        let cuda = self.nvml.sys_cuda_driver_version().ok();
        GpuFacts {
            name: device.name().ok(),
            driver: self.nvml.sys_driver_version().ok(),
            cuda: cuda.map(|version| format!("{}.{}", cuda_driver_version_major(version), cuda_driver_version_minor(version))),
            memory_bytes: device.memory_info().ok().map(|memory| memory.total),
            pcie_generation: device.current_pcie_link_gen().ok(),
            pcie_lanes: device.current_pcie_link_width().ok(),
            power_limit_w: device.enforced_power_limit().ok().map(watts),
            sm_clock_max_mhz: device.max_clock_info(Clock::SM).ok(),
        }
    }

    pub(super) fn sample(&self) -> Sample {
        let Ok(device) = self.device() else { return Sample::default() };
        // KiB a second over 20 ms, which is how long each of the two calls takes.
        let rate = |counter| device.pcie_throughput(counter).ok().map(|kib| f64::from(kib) * 1024.0 / 1e9);
        Sample {
            power_w: device.power_usage().ok().map(watts),
            sm_clock_mhz: device.clock_info(Clock::SM).ok().map(f64::from),
            d2h_gb_per_s: rate(PcieUtilCounter::Send),
            h2d_gb_per_s: rate(PcieUtilCounter::Receive),
            memory_used_bytes: device.memory_info().ok().map(|memory| memory.used),
        }
    }
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1e3
}
