//! The planner's description of a machine.

use crate::device::{Attention, DeviceKind, ExpertProducts};
use crate::error::{Error, Result};
use crate::hardware::profile::{Gpu, Profile};
use crate::hardware::rates::{AttentionKernels, Rates};
use crate::host::affinity::workers_beside_others;
use crate::memory::DeviceMemory;
use crate::request::cut::StepCut;
use crate::units::Bytes;
use std::sync::Arc;

/// Whether cuBLASLt on a machine computes expert products.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupedLayouts {
    Usable,
    /// Not usable, with the reason.
    Unusable(String),
    /// Unknown: the machine is not this one, and its profile has no rate for them.
    Unknown,
}

/// Resources of a plan: the whole host, and GPUs of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// CPUs that this process may use.
    pub cpus: usize,
    /// Free host memory in bytes; `u64::MAX` if unknown.
    pub host_bytes: u64,
    pub kind: DeviceKind,
    /// Memory of each GPU.
    pub device: DeviceMemory,
    /// Rates of each GPU while all GPUs of the run are busy.
    pub rates: Arc<Rates>,
    pub grouped_layouts: GroupedLayouts,
}

impl Machine {
    /// A machine without a GPU and with unlimited memory.
    pub fn cpu(cpus: usize) -> Self {
        let (kind, device, grouped_layouts) = (DeviceKind::Cpu, DeviceMemory::Shared, GroupedLayouts::Unknown);
        Self { cpus, host_bytes: u64::MAX, kind, device, rates: Rates::assumed(), grouped_layouts }
    }

    /// The machine of `profile` with one of its GPUs.
    pub fn of(profile: &Profile) -> Self {
        Self::with_rates(profile, Rates::of(profile))
    }

    /// The machine of `profile` with `gpus` of its GPUs, which train together.
    ///
    /// # Errors
    /// `Usage` if the profile has no rates for this number of GPUs.
    pub(crate) fn of_several(profile: &Profile, gpus: usize) -> Result<Self> {
        match gpus <= profile.gpus() {
            true => Ok(Self::with_rates(profile, Rates::of_each(profile, gpus))),
            false => Err(unknown_together(profile, gpus)),
        }
    }

    /// The machine of one process of a run with this `cut`; each process has its own machine.
    ///
    /// # Errors
    /// `Usage` if the profile has no rates for this number of GPUs, or no network for this number of machines.
    pub(crate) fn of_run(profile: &Profile, cut: &StepCut) -> Result<Self> {
        let (machine, processes) = (Self::of_several(profile, cut.gpus)?, cut.processes);
        if processes > profile.machines() {
            return Err(unknown_network(profile, processes));
        }
        let network = profile.network.as_ref().filter(|_| processes > 1);
        Ok(Self { rates: Arc::new((*machine.rates).clone().with_network(network)), ..machine })
    }

    fn with_rates(profile: &Profile, rates: Rates) -> Self {
        let device = match &profile.gpu {
            Some(gpu @ Gpu { shares_host_memory: false, .. }) => {
                DeviceMemory::Own { bytes: gpu.memory_bytes.value as u64, addressing: gpu.addressing }
            }
            _ => DeviceMemory::Shared,
        };
        let kind = if profile.gpu.is_some() { DeviceKind::Gpu } else { DeviceKind::Cpu };
        let (cpus, host_bytes) = (profile.host.cpus.value as usize, profile.host.memory_bytes.value as u64);
        let has_grouped = profile.gpu.as_ref().is_some_and(|gpu| gpu.cublaslt_grouped_flops_by_rows.is_some());
        let grouped_layouts = if has_grouped { GroupedLayouts::Usable } else { GroupedLayouts::Unknown };
        Self { cpus, host_bytes, kind, device, rates: Arc::new(rates), grouped_layouts }
    }

    /// This machine with the rates of `by` for expert products.
    pub(super) fn multiplying_experts_by(self, by: ExpertProducts) -> Self {
        Self { rates: Arc::new(self.rates.multiplying_experts_by(by)), ..self }
    }

    /// This machine with the rates of its kernels for `attention`. On CPUs only one implementation exists.
    pub(super) fn attending_by(self, attention: Attention) -> Self {
        let kernels = match (self.kind, attention) {
            (DeviceKind::Gpu, Attention::Plain) => AttentionKernels::Plain,
            (DeviceKind::Gpu, Attention::Cudnn { deterministic: true }) => AttentionKernels::Deterministic,
            (DeviceKind::Gpu, Attention::Products) => AttentionKernels::Products,
            (DeviceKind::Gpu, Attention::CudnnOrProducts { deterministic }) => AttentionKernels::CudnnOrProducts { deterministic },
            _ => AttentionKernels::AsMeasured,
        };
        Self { rates: Arc::new(self.rates.attending_by(kernels)), ..self }
    }

    /// Number of optimizer workers: one a CPU. With a GPU, some CPUs are left for drivers and other threads.
    pub fn workers(&self) -> usize {
        match self.kind {
            DeviceKind::Cpu => self.cpus.max(1),
            DeviceKind::Gpu => workers_beside_others(self.cpus),
        }
    }

    /// This machine, reduced to `--hbm-limit` and `--host-limit`.
    pub fn limited(&self, hbm_limit: Option<Bytes>, host_limit: Option<Bytes>) -> Self {
        let at_most = |bytes: u64, limit: Option<Bytes>| limit.map_or(bytes, |limit| bytes.min(limit.0));
        let device = match self.device {
            DeviceMemory::Shared => DeviceMemory::Shared,
            DeviceMemory::Own { bytes, addressing } => DeviceMemory::Own { bytes: at_most(bytes, hbm_limit), addressing },
        };
        Self { host_bytes: at_most(self.host_bytes, host_limit), device, ..self.clone() }
    }
}

fn unknown_together(profile: &Profile, gpus: usize) -> Error {
    let (name, most) = (&profile.name, profile.gpus());
    let several: Vec<_> = Profile::names().into_iter().filter(|name| Profile::load(name).is_ok_and(|known| known.gpus() >= gpus)).collect();
    let known = if several.is_empty() { String::new() } else { format!(", or --hardware {}", several.join(", ")) };
    Error::usage(format!(
        "--gpus {gpus}: the hardware profile {name} has rates for at most {most} (section `together`); use --gpus {most}{known}"
    ))
}

fn unknown_network(profile: &Profile, processes: usize) -> Error {
    let (name, most) = (&profile.name, profile.machines());
    let remedy = match profile.network {
        Some(_) => {
            format!("has rates for {most} machines, one for each process (section `network`); use --processes {most}, or raise `machines`")
        }
        None => "has no rates between machines; add a section `network` (docs/guide/several-machines.md)".into(),
    };
    Error::usage(format!("--processes {processes}: the hardware profile {name} {remedy}"))
}
