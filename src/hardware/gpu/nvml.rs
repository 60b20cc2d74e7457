//! NVIDIA's management library (NVML), loaded at run time.

use super::facts::{GpuFacts, GpuId, Sample};
use super::links::GpuLink;
use crate::error::{Error, Result};
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter, TopologyLevel};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

/// The name with a version. Only development packages have the name without one.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Maximum number of NVLinks of a GPU.
const NVLINKS_MAX: u32 = 18;

/// The first GPU that is visible to CUDA.
pub(super) struct VisibleGpu {
    nvml: Nvml,
    visible: Visible,
}

/// Selection of the first GPU.
enum Visible {
    Index(u32),
    Uuid(String),
}

impl Visible {
    /// The first GPU in `CUDA_VISIBLE_DEVICES`, by index or UUID. CUDA counts only these GPUs, and the library counts all.
    fn first() -> Self {
        let named = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "0".into());
        let first = named.split(',').next().unwrap_or_default().trim();
        first.parse().map_or_else(|_| Self::Uuid(first.into()), Self::Index)
    }

    /// The operation, for an error.
    fn wanted() -> String {
        let named = std::env::var("CUDA_VISIBLE_DEVICES").map(|named| format!("first of CUDA_VISIBLE_DEVICES={named:?}"));
        format!("find the GPU that is {}", named.as_deref().unwrap_or("first"))
    }
}

fn failed(e: NvmlError) -> Error {
    Error::resource(format!("query the GPU through {LIBRARY}"), e)
}

fn open_library() -> Result<Nvml> {
    Nvml::builder().lib_path(LIBRARY.as_ref()).init().map_err(failed)
}

/// Implements [`super::links`].
pub(super) fn links(gpus: &[GpuId]) -> Result<Vec<([usize; 2], GpuLink)>> {
    let nvml = open_library()?;
    let address = |device: Device<'_>| device.pci_info().map(|pci| pci.bus_id);
    let all = (0..nvml.device_count().map_err(failed)?).filter_map(|index| nvml.device_by_index(index).and_then(address).ok());
    let all: Vec<_> = all.collect();
    let devices = gpus.iter().map(|gpu| nvml.device_by_pci_bus_id(&*gpu.pci).map_err(failed)).collect::<Result<Vec<_>>>()?;
    let ends: Vec<_> = devices.iter().map(far_ends).collect();
    let pairs = (0..gpus.len()).flat_map(|b| (0..b).map(move |a| [a, b]));
    let link = |[a, b]: [usize; 2]| {
        let other = nvml.device_by_pci_bus_id(&*gpus[b].pci).map_err(failed)?;
        let pcie = devices[a].topology_common_ancestor(other).map_or("unknown path", in_words);
        Ok(([a, b], GpuLink::between((&gpus[a].pci, &ends[a]), (&gpus[b].pci, &ends[b]), &all, pcie)))
    };
    pairs.map(link).collect()
}

/// Addresses at the far ends of the active NVLinks; an empty address if the library does not report it.
fn far_ends(device: &Device<'_>) -> Vec<String> {
    let links = (0..NVLINKS_MAX).map(|link| device.link_wrapper_for(link)).filter(|link| link.is_active().is_ok_and(|is_up| is_up));
    links.map(|link| link.remote_pci_info().map_or_else(|_| String::new(), |pci| pci.bus_id)).collect()
}

fn in_words(level: TopologyLevel) -> &'static str {
    match level {
        TopologyLevel::Internal => "on one board",
        TopologyLevel::Single => "through one switch",
        TopologyLevel::Multiple => "through several switches",
        TopologyLevel::HostBridge => "through one host bridge",
        TopologyLevel::Node => "within a memory node",
        TopologyLevel::System => "across memory nodes",
    }
}

impl VisibleGpu {
    pub(super) fn open() -> Result<Self> {
        let nvml = open_library()?;
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
        let (cuda, memory) = (self.nvml.sys_cuda_driver_version().ok(), device.memory_info().ok());
        GpuFacts {
            name: device.name().ok(),
            driver: self.nvml.sys_driver_version().ok(),
            cuda: cuda.map(|version| format!("{}.{}", cuda_driver_version_major(version), cuda_driver_version_minor(version))),
            memory_bytes: memory.as_ref().map(|memory| memory.total),
            memory_used_bytes: memory.map(|memory| memory.used),
            pcie_generation: device.current_pcie_link_gen().ok(),
            pcie_lanes: device.current_pcie_link_width().ok(),
            power_limit_w: device.enforced_power_limit().ok().map(watts),
            sm_clock_max_mhz: device.max_clock_info(Clock::SM).ok(),
        }
    }

    pub(super) fn sample(&self) -> Sample {
        let Ok(device) = self.device() else { return Sample::default() };
        // KiB per second, averaged over 20 ms. Each of the two calls takes that long.
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
