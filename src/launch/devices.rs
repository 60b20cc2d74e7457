//! Which device a run gets, and what the planner may use of the machine.

use super::gpu;
use super::peer_links::PeerLinks;
use crate::config::options::{DeviceChoice, HostMemoryKind};
use crate::config::settings::Settings;
use crate::device::DeviceKind;
use crate::error::{Error, Result};
use crate::hardware::gpu::GpuId;
use crate::hardware::limits;
use crate::hardware::profile::Profile;
use crate::hardware::rates::Rates;
use crate::hardware::selected_profile::{AUTO, MachineId, SelectedProfile};
use crate::hardware::topology::Topology;
use crate::host::memory_policy::HugePagesChoice;
use crate::memory::{Addressing, DeviceMemory};
use crate::planner::machine::Machine;
use std::path::Path;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub struct SelectedDevice {
    /// CPUs and free memory.
    pub machine: Machine,
    /// The GPUs of all ranks, by rank; none on CPUs.
    pub(crate) gpus: Vec<GpuId>,
    /// Lines about what lies between several GPUs, and about rates of their work together that nobody knows.
    pub(crate) peers: Vec<String>,
    /// Why it is not a GPU although that was open; nothing when there is nothing to say.
    pub note: Option<String>,
    /// What makes it much slower than the machine.
    pub warning: Option<String>,
    /// What the plan of a GPU rests on.
    pub(crate) rates_from: Option<SelectedProfile>,
}

impl SelectedDevice {
    pub(crate) fn is_gpu(&self) -> bool {
        self.machine.kind == DeviceKind::Gpu
    }
}

/// What `settings` ask for on the machine of `topology`; `auto` is a GPU where there is one.
///
/// # Errors
/// `Resource` when a GPU was asked for and cannot be had, `Usage` and `Unsupported` when several cannot; those of
/// [`limits::check_threads`], [`SelectedProfile::of`] and [`Profile::load`].
pub fn choose(settings: &Settings, topology: &Topology) -> Result<SelectedDevice> {
    if settings.processes > 1 && settings.device == DeviceChoice::Auto && gpu::visible().is_ok() {
        let (count, way_out) = (settings.processes, "use --device cpu, or one process with --gpus all");
        return Err(Error::usage(format!("--processes {count}: several processes train on CPUs so far, not on GPUs; {way_out}")));
    }
    let on_cpus = (DeviceKind::Cpu, DeviceMemory::Shared, Vec::new());
    let ((kind, device, gpus), note) = match settings.device {
        DeviceChoice::Cpu => (on_cpus, None),
        DeviceChoice::Cuda => (open_gpus(settings)?.map_err(|why| Error::resource("use --device cuda", why))?, None),
        DeviceChoice::Auto => match open_gpus(settings)? {
            Ok(gpus) => (gpus, None),
            Err(why) if settings.all_gpus => return Err(Error::resource("use --gpus all", why)),
            Err(why) => (on_cpus, Some(why.to_string())),
        },
    };
    if settings.memory == HostMemoryKind::Unified && matches!(device, DeviceMemory::Own { addressing: Addressing::Separate, .. }) {
        return Err(Error::Unsupported("--memory unified: host and GPU cannot use managed memory at the same time here".into()));
    }
    let warning = limits::check_threads(topology, settings.threads, kind == DeviceKind::Gpu)?;
    let cpus = topology.usable_cpus().map_or(1, |usable| usable.count());
    let warning = warning.or_else(|| gpu::crowded(gpus.len(), cpus));
    let reserved = if settings.huge_pages == HugePagesChoice::Explicit { topology.reserved_free_bytes() } else { 0 };
    let host_bytes = topology.memory_usable_bytes().map_or(u64::MAX, |bytes| bytes.saturating_add(reserved));
    let rates_from = rates_from(settings, topology, kind, gpus.len())?;
    let links = PeerLinks::between(&gpus)?;
    let of_each = |profile| Arc::new(Rates::of_each(profile, gpus.len().max(1)).with_peers(links.route()));
    let rates = rates_from.as_ref().map_or_else(Rates::assumed, |rates_from| of_each(&rates_from.profile));
    let mut peers = links.lines();
    peers.extend(rates_from.as_ref().and_then(|rates_from| rates_from.unknown_together(gpus.len())));
    Ok(SelectedDevice { machine: Machine { cpus, host_bytes, kind, device, rates }, gpus, peers, note, warning, rates_from })
}

/// The GPUs that are asked for and what is free on each, or why there is no GPU to open.
///
/// # Errors
/// Those of [`gpu::first`].
fn open_gpus(settings: &Settings) -> Result<Result<(DeviceKind, DeviceMemory, Vec<GpuId>)>> {
    let visible = match gpu::visible() {
        Ok(visible) => visible,
        Err(why) => return Ok(Err(why)),
    };
    let count = if settings.all_gpus { visible.len() } else { settings.gpus };
    let gpus = gpu::first(visible, count)?;
    Ok(gpu::free_memory(&gpus).map(|(kind, device)| (kind, device, gpus)))
}

/// CPUs as the device are planned without rates; what is named must be there all the same.
fn rates_from(settings: &Settings, topology: &Topology, kind: DeviceKind, gpus: usize) -> Result<Option<SelectedProfile>> {
    if kind == DeviceKind::Gpu {
        return SelectedProfile::of(&settings.hardware, MachineId::new(topology), gpus).map(Some);
    }
    if settings.hardware != Path::new(AUTO) {
        Profile::load(&settings.hardware.to_string_lossy())?;
    }
    Ok(None)
}
