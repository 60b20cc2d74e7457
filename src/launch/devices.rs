//! Selection of a run's device, and the resources of the machine that the planner may use.

use super::gpu;
use super::peer_links::PeerLinks;
use super::process_info::ProcessInfo;
use crate::config::options::DeviceChoice;
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
use crate::planner::machine::{GroupedLayouts, Machine};
use crate::request::choices::HostMemoryKind;
use std::path::Path;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub struct SelectedDevice {
    /// CPUs, memory, the kind of device, and rates.
    pub machine: Machine,
    /// GPUs of all ranks, by rank. Empty on CPUs.
    pub(crate) gpus: Vec<GpuId>,
    /// Lines about the links between several GPUs, and about missing measurements of several GPUs.
    pub(crate) peers: Vec<String>,
    /// Why the CPU was chosen, if `--device auto` found no GPU.
    pub note: Option<String>,
    /// A reason why the run will be much slower than the machine allows.
    pub warning: Option<String>,
    /// The hardware profile with the rates for the plan of a GPU.
    pub(crate) rates_from: Option<SelectedProfile>,
}

impl SelectedDevice {
    pub(crate) fn is_gpu(&self) -> bool {
        self.machine.kind == DeviceKind::Gpu
    }
}

/// Selects the device of `settings` on the machine of `topology`. `auto` selects a GPU if there is one.
///
/// # Errors
/// `Resource` if a requested GPU is not available, `Usage` and `Unsupported` if several are not; errors of [`limits::check_threads`],
/// [`SelectedProfile::of`] and [`Profile::load`].
pub fn choose(settings: &Settings, topology: &Topology) -> Result<SelectedDevice> {
    let (devices, note) = match settings.device {
        DeviceChoice::Cpu => (on_cpus(), None),
        DeviceChoice::Cuda => (open_gpus(settings)?.map_err(|why| Error::resource("use --device cuda", why))?, None),
        DeviceChoice::Auto => match open_gpus(settings)? {
            Ok(gpus) => (gpus, None),
            Err(why) if settings.all_gpus => return Err(Error::resource("use --gpus all", why)),
            Err(why) => (on_cpus(), Some(why.to_string())),
        },
    };
    let (cpus, gpus_in_use) = (topology.usable_cpus().map_or(1, |usable| usable.count()), devices.2.len());
    let selected = select(settings, topology, devices, ResourceCounts { cpus, gpus_in_use, on_machine: 1 })?;
    Ok(SelectedDevice { note, ..selected })
}

/// Resources of this process as agreed with the other processes of the run. This process may use `cpus` CPUs of `machine`.
///
/// # Errors
/// Errors of [`choose`].
pub(super) fn agreed(settings: &Settings, machine: &Topology, process_info: &ProcessInfo, cpus: usize) -> Result<SelectedDevice> {
    let gpus = process_info.gpus.clone();
    let devices = if gpus.is_empty() { Ok(on_cpus()) } else { gpu::free_memory(&gpus).map(|(kind, device)| (kind, device, gpus)) };
    let on_machine = process_info.on_machine;
    select(settings, machine, devices?, ResourceCounts { cpus, gpus_in_use: on_machine * settings.gpus, on_machine })
}

/// The kind of device, its memory, and the GPUs.
type Devices = (DeviceKind, DeviceMemory, Vec<GpuId>);

fn on_cpus() -> Devices {
    (DeviceKind::Cpu, DeviceMemory::Shared, Vec::new())
}

/// Resources of the machine that are left to this process beside its peers.
struct ResourceCounts {
    /// CPUs that this process may use.
    cpus: usize,
    /// Number of GPUs of this machine that train together.
    gpus_in_use: usize,
    /// Number of the run's processes on this machine.
    on_machine: usize,
}

/// Selects these devices, together with this process's part of `machine`.
fn select(
    settings: &Settings,
    machine: &Topology,
    (kind, device, gpus): Devices,
    ResourceCounts { cpus, gpus_in_use, on_machine }: ResourceCounts,
) -> Result<SelectedDevice> {
    if settings.memory == HostMemoryKind::Unified && matches!(device, DeviceMemory::Own { addressing: Addressing::Separate, .. }) {
        return Err(Error::Unsupported("--memory unified: host and GPU cannot use managed memory at the same time here".into()));
    }
    let warning = limits::check_threads(machine, settings.threads, kind == DeviceKind::Gpu)?;
    let warning = warning.or_else(|| gpu::crowded(gpus.len(), cpus)).or_else(|| too_many_threads(settings, cpus));
    let reserved = if settings.huge_pages == HugePagesChoice::Explicit { machine.reserved_free_bytes() } else { 0 };
    let of_all = |bytes: u64| bytes.saturating_add(reserved) / on_machine as u64;
    let host_bytes = machine.memory_usable_bytes().map_or(u64::MAX, of_all);
    let rates_from = rates_from(settings, machine, kind, gpus_in_use)?;
    let links = PeerLinks::between(&gpus)?;
    let all_cpus = machine.usable_cpus().map_or(cpus, |usable| usable.count());
    let of_each = |profile: &Profile| {
        let network = profile.network.as_ref().filter(|_| settings.processes > on_machine);
        let rates = Rates::of_each(profile, gpus_in_use.max(1)).in_part(cpus, all_cpus);
        Arc::new(rates.with_peers(links.route()).with_network(network))
    };
    let rates = rates_from.as_ref().map_or_else(Rates::assumed, |rates_from| of_each(&rates_from.profile));
    let mut peers = links.lines();
    peers.extend(rates_from.as_ref().and_then(|rates_from| rates_from.unknown_together(gpus_in_use)));
    let machine = Machine { cpus, host_bytes, kind, device, rates, grouped_layouts: GroupedLayouts::Unknown };
    Ok(SelectedDevice { machine, gpus, peers, note: None, warning, rates_from })
}

/// A warning if a process has more threads than CPUs in its part of the machine.
fn too_many_threads(settings: &Settings, cpus: usize) -> Option<String> {
    let threads = settings.threads.filter(|threads| *threads > cpus)?;
    Some(format!("--threads {threads}: processes of this machine divide its CPUs, of which this one has {cpus}; use --threads {cpus}"))
}

/// The requested GPUs and the free memory on each; the inner error explains why no GPU can be opened.
///
/// # Errors
/// Errors of [`gpu::first`].
fn open_gpus(settings: &Settings) -> Result<Result<Devices>> {
    let visible = match gpu::visible() {
        Ok(visible) => visible,
        Err(why) => return Ok(Err(why)),
    };
    let count = if settings.all_gpus { visible.len() } else { settings.gpus };
    let gpus = gpu::first(visible, count)?;
    Ok(gpu::free_memory(&gpus).map(|(kind, device)| (kind, device, gpus)))
}

/// The hardware profile. CPU devices are planned without rates; a profile named on the command line is still loaded, to report its errors.
fn rates_from(settings: &Settings, topology: &Topology, kind: DeviceKind, gpus: usize) -> Result<Option<SelectedProfile>> {
    if kind == DeviceKind::Gpu {
        return SelectedProfile::of(&settings.hardware, MachineId::new(topology), gpus).map(Some);
    }
    if settings.hardware != Path::new(AUTO) {
        Profile::load(&settings.hardware.to_string_lossy())?;
    }
    Ok(None)
}
