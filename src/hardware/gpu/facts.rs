//! Facts about a GPU, and samples of its state.

#[cfg(not(feature = "cuda"))]
use crate::error::Error;
use crate::units::Bytes;
use std::fmt;

/// Facts about a GPU. A fact that the driver does not report is `None`.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct GpuFacts {
    /// Marketing name.
    pub name: Option<String>,
    /// Release of the kernel driver.
    pub driver: Option<String>,
    /// Newest CUDA version that the driver supports: `13.0`.
    pub cuda: Option<String>,
    pub memory_bytes: Option<u64>,
    /// Memory in use by all processes.
    pub memory_used_bytes: Option<u64>,
    /// Current generation of the PCIe link. An idle GPU may have reduced it.
    pub pcie_generation: Option<u32>,
    /// Current number of lanes of the PCIe link.
    pub pcie_lanes: Option<u32>,
    /// Power limit in force.
    pub power_limit_w: Option<f64>,
    /// Highest clock of the multiprocessors.
    pub sm_clock_max_mhz: Option<u32>,
}

/// A GPU that is visible to CUDA.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct GpuId {
    /// Index in the order of `CUDA_VISIBLE_DEVICES`.
    pub index: usize,
    /// Address on the PCI bus, as `0000:0F:00.0`.
    pub pci: String,
    /// Marketing name.
    pub model: String,
}

impl fmt::Display for GpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.index, self.pci)
    }
}

impl fmt::Display for GpuFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name.as_deref().unwrap_or("NVIDIA GPU without a name"))?;
        if let Some(bytes) = self.memory_bytes {
            write!(f, ", {}", Bytes(bytes))?;
        }
        if let (Some(generation), Some(lanes)) = (self.pcie_generation, self.pcie_lanes) {
            write!(f, ", PCIe {generation} x{lanes}")?;
        }
        if let Some(watts) = self.power_limit_w {
            write!(f, ", {watts:.0} W")?;
        }
        if let Some(driver) = &self.driver {
            write!(f, ", driver {driver}")?;
        }
        if let Some(cuda) = &self.cuda { write!(f, " (CUDA {cuda})") } else { Ok(()) }
    }
}

/// The error in a build without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub(crate) fn no_cuda() -> Error {
    Error::Unsupported("this build has no CUDA device (cargo feature cuda)".into())
}

/// A sample of the GPU's state. A value that the GPU does not report is `None`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    pub(super) power_w: Option<f64>,
    pub(super) sm_clock_mhz: Option<f64>,
    pub(super) d2h_gb_per_s: Option<f64>,
    pub(super) h2d_gb_per_s: Option<f64>,
    pub(super) memory_used_bytes: Option<u64>,
}
