//! Resources of each process of a run, and the assignment of GPUs and CPUs that follows from them. All processes have the same data about
//! all processes, so each computes the same assignment.

use super::gpu;
use crate::config::launchers::local_process;
use crate::config::options::DeviceChoice;
use crate::config::settings::Settings;
use crate::error::{Error, Result};
use crate::hardware::cpu_list::CpuList;
use crate::hardware::gpu::GpuId;
use crate::hardware::topology::Topology;
use crate::request::choices::Transport;
use serde::{Deserialize, Serialize};
use std::fs;

/// File with the kernel's ID of this boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Resources of one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct HostResources {
    /// ID of the machine, which is equal for all processes on it.
    machine: String,
    /// CPUs that the process may use.
    cpus: String,
    /// Local rank of the process on its machine, if a launcher provides one.
    local: Option<usize>,
    /// GPUs that are visible to CUDA, or the reason why there is none.
    gpus: std::result::Result<Vec<GpuId>, String>,
    /// Version of NCCL, or the reason why NCCL is not available.
    nccl: std::result::Result<String, String>,
}

impl HostResources {
    /// Resources of this process on `host`, the machine of `topology`.
    ///
    /// # Errors
    /// `Usage` for an invalid variable of a launcher.
    pub(crate) fn of_this_process(settings: &Settings, topology: &Topology, host: &str) -> Result<Self> {
        let boot = fs::read_to_string(BOOT).unwrap_or_default();
        let gpus = match settings.device {
            DeviceChoice::Cpu => Err("--device cpu".into()),
            DeviceChoice::Auto | DeviceChoice::Cuda => gpu::visible().map_err(|why| why.to_string()),
        };
        let cpus = topology.usable_cpus().map_or(String::new(), |usable| usable.affinity.to_string());
        let nccl = match settings.transport {
            Transport::Tcp => Err("--transport tcp".into()),
            _ if gpus.is_err() => Err("it has no GPU".into()),
            Transport::Auto | Transport::Nccl => gpu::nccl_release(settings.cuda_libraries.as_slice()).map_err(|why| why.to_string()),
        };
        let local = local_process(&|name| std::env::var(name).ok())?;
        Ok(Self { machine: format!("{host} {}", boot.trim()), cpus, local, gpus, nccl })
    }

    fn shares_cpus_with(&self, other: &Self) -> bool {
        let of = |equipment: &Self| CpuList::parse(&equipment.cpus).unwrap_or_default();
        self.machine == other.machine && !of(self).intersection(&of(other)).is_empty()
    }
}

/// Resources that one process of a run has been assigned.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ProcessInfo {
    /// GPUs of the process. Empty if CPUs train.
    pub(crate) gpus: Vec<GpuId>,
    /// Number of the run's processes on this machine, this one included.
    pub(crate) on_machine: usize,
    /// First GPU of each process that shares CPUs with this one, and the index of this process in that list.
    cpu_mates: (Vec<Option<GpuId>>, usize),
    /// Transport of slices to other processes.
    pub(crate) transport: Transport,
    /// Lines for the user.
    pub(crate) notes: Vec<String>,
    /// How gradients and weights pass between GPUs of processes.
    pub(crate) transport_note: Option<String>,
}

impl ProcessInfo {
    /// Assigns the resources of process `process`, given the resources `all` and the `names` of all processes.
    ///
    /// # Errors
    /// `Resource` if only some processes have a GPU, or the requested NCCL; `Usage` if a machine has too few GPUs for its processes;
    /// `Unsupported` if the models of the GPUs differ.
    pub(crate) fn among(all: &[HostResources], names: &[String], process: usize, settings: &Settings) -> Result<Self> {
        let device = settings.device;
        let all_gpus = gpus_of_all(all, names, settings)?;
        let of = |other: usize| all_gpus.get(other).and_then(|gpus| gpus.first()).cloned();
        let on_machine = processes_on_machine_of(all, process).len();
        let sharers: Vec<usize> = (0..all.len()).filter(|&other| other == process || all[other].shares_cpus_with(&all[process])).collect();
        let nth = sharers.iter().position(|&other| other == process).unwrap_or(0);
        let gpus = all_gpus.get(process).cloned().unwrap_or_default();
        let mut notes = Vec::new();
        if !gpus.is_empty() && on_machine > 1 {
            let sees_no_other = all[process].gpus.as_ref().is_ok_and(|visible| visible.len() == gpus.len());
            let why = match (sees_no_other, gpus.len()) {
                (true, 1) => "the only one that CUDA_VISIBLE_DEVICES shows it".into(),
                (true, _) => "all that CUDA_VISIBLE_DEVICES shows it".into(),
                (false, 1) => "one for each process of its machine".into(),
                (false, each) => format!("{each} for each process of its machine"),
            };
            let names: Vec<String> = gpus.iter().map(ToString::to_string).collect();
            notes.push(format!("process {process} takes {}, {why}", names.join(", ")));
        }
        let why_no_gpu = all[process].gpus.as_ref().err().filter(|_| gpus.is_empty() && device == DeviceChoice::Auto);
        notes.extend(why_no_gpu.map(|why| format!("no GPU: {why}")));
        let is_tcp = gpus.is_empty() && settings.transport != Transport::Nccl;
        let (transport, transport_note) = if is_tcp { (Transport::Tcp, None) } else { transport(all, names, settings.transport)? };
        Ok(Self { gpus, on_machine, cpu_mates: (sharers.into_iter().map(of).collect(), nth), transport, notes, transport_note })
    }

    /// This process's part of the CPUs of `machine`, or `None` if there are fewer CPUs than processes; and the number of CPUs that the
    /// process may use.
    pub(crate) fn cpu_slice_of(&self, machine: &Topology) -> (Option<Topology>, usize) {
        let (same_machine, nth) = &self.cpu_mates;
        let gpu_nodes: Vec<_> = same_machine.iter().map(|gpu| machine.node_of_gpu(&gpu.as_ref()?.pci)).collect();
        let own = machine.cpu_slice(*nth, &gpu_nodes);
        let cpus = |topology: &Topology| topology.usable_cpus().map_or(1, |usable| usable.affinity.len());
        let usable = machine.usable_cpus().map_or(1, |usable| usable.count());
        let part = own.as_ref().map_or(usable / same_machine.len(), |own| usable * cpus(own) / cpus(machine));
        (own, part.max(1))
    }
}

/// Selects the transport of slices between GPUs. Also returns a line for the user.
///
/// # Errors
/// `Resource` with the obstacle, if NCCL was requested and is not available.
fn transport(all: &[HostResources], names: &[String], requested: Transport) -> Result<(Transport, Option<String>)> {
    let lacking = all.iter().zip(names).find_map(|(one, name)| Some(format!("{name}: {}", one.nccl.as_ref().err()?)));
    let releases: Vec<&String> = all.iter().filter_map(|one| one.nccl.as_ref().ok()).collect();
    let other = releases.iter().position(|release| *release != releases[0]);
    let differs = || other.map(|other| format!("{} has NCCL {}, {} has {}", names[0], releases[0], names[other], releases[other]));
    match lacking.or_else(differs) {
        _ if requested == Transport::Tcp => Ok((Transport::Tcp, None)),
        None => Ok((Transport::Nccl, Some(format!("gradients and weights pass from GPU to GPU by NCCL {}", releases[0])))),
        Some(why) if requested == Transport::Auto => Ok((Transport::Tcp, Some(format!("gradients and weights pass over TCP: {why}")))),
        Some(why) => Err(Error::resource("use --transport nccl", format!("{why}; or use --transport tcp, which is slower"))),
    }
}

/// The processes on the machine of `process`.
fn processes_on_machine_of(all: &[HostResources], process: usize) -> Vec<usize> {
    (0..all.len()).filter(|&other| all[other].machine == all[process].machine).collect()
}

/// The GPUs of each process. Empty if CPUs train.
fn gpus_of_all(all: &[HostResources], names: &[String], settings: &Settings) -> Result<Vec<Vec<GpuId>>> {
    let (device, each) = (settings.device, settings.gpus);
    let lacking = all.iter().zip(names).find_map(|(one, name)| Some((name, one.gpus.as_ref().err()?)));
    match lacking {
        _ if device == DeviceChoice::Cpu => return Ok(Vec::new()),
        Some(_) if device == DeviceChoice::Auto && all.iter().all(|one| one.gpus.is_err()) => return Ok(Vec::new()),
        Some((name, why)) => {
            let remedy = "give each process a GPU, or use --device cpu";
            return Err(Error::resource("use a GPU in each process", format!("{name} has none: {why}; {remedy}")));
        }
        None => {}
    }
    let gpus = (0..all.len()).map(|process| gpus_of(all, names, process, each)).collect::<Result<Vec<_>>>()?;
    let first = &gpus[0][0];
    let other =
        gpus.iter().zip(names).flat_map(|(gpus, name)| gpus.iter().map(move |gpu| (gpu, name))).find(|(gpu, _)| gpu.model != first.model);
    other.map_or(Ok(()), |(gpu, name)| {
        let [one, other] = [(&names[0], first), (name, gpu)].map(|(name, gpu)| format!("{name} has a {}", gpu.model));
        Err(Error::Unsupported(format!("GPUs of several models: {one}, {other}; name GPUs of one model in CUDA_VISIBLE_DEVICES")))
    })?;
    Ok(gpus)
}

/// The `each` GPUs of `process`: all visible ones if their number fits, else a chunk chosen by the process's local rank.
fn gpus_of(all: &[HostResources], names: &[String], process: usize, each: usize) -> Result<Vec<GpuId>> {
    let same_machine = processes_on_machine_of(all, process);
    let candidates = |one: usize| {
        let place = all[one].local.or_else(|| same_machine.iter().position(|&mate| mate == one));
        let gpus = all[one].gpus.as_ref().map_or(&[][..], Vec::as_slice);
        if gpus.len() == each { Some(gpus) } else { gpus.chunks_exact(each).nth(place?) }
    };
    let own = candidates(process);
    let has_any_of = |own: &[GpuId], other: &[GpuId]| own.iter().any(|gpu| other.iter().any(|other| other.pci == gpu.pci));
    let is_taken =
        |own: &[GpuId]| same_machine.iter().any(|&mate| mate != process && candidates(mate).is_some_and(|gpus| has_any_of(own, gpus)));
    own.filter(|own| !is_taken(own)).map(<[_]>::to_vec).ok_or_else(|| {
        let visible = all[process].gpus.as_ref().map_or(0, Vec::len);
        let remedy = "start fewer processes, or give each process its own GPUs in CUDA_VISIBLE_DEVICES";
        let need = if each > 1 { format!(", each with --gpus {each}") } else { String::new() };
        Error::usage(format!(
            "--processes {}: {} sees GPUs: {visible}, processes on its machine: {}{need}; {remedy}",
            all.len(),
            names[process],
            same_machine.len()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::super::devices;
    use super::*;
    use crate::hardware::topology::Process;
    use crate::hardware::topology::tests::two_sockets;

    /// A process on `machine` that sees the GPUs with these numbers, all of one model.
    fn on(machine: &str, gpus: &[usize]) -> HostResources {
        let gpu = |(index, number): (usize, &usize)| GpuId { index, pci: format!("0000:{number}F:00.0"), model: "H100".into() };
        let gpus = gpus.iter().enumerate().map(gpu).collect();
        HostResources { machine: machine.into(), cpus: "0-6".into(), local: None, gpus: Ok(gpus), nccl: Ok("2.28.9".into()) }
    }

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|process| format!("process {process} on a")).collect()
    }

    fn asking(device: DeviceChoice) -> Settings {
        Settings { device, ..Settings::demo() }
    }

    fn pci_of_each(all: &[HostResources]) -> Result<Vec<String>> {
        let of = |process| ProcessInfo::among(all, &names(all.len()), process, &asking(DeviceChoice::Auto));
        (0..all.len()).map(|process| Ok(of(process)?.gpus.first().map_or("none".into(), |gpu| gpu.pci[5..7].to_string()))).collect()
    }

    #[test]
    fn each_process_has_the_gpu_of_its_place_on_its_machine() {
        assert_eq!(pci_of_each(&[on("a", &[0, 1]), on("a", &[0, 1]), on("b", &[3, 4])]).unwrap(), ["0F", "1F", "3F"]);
        // The local rank of a launcher has priority.
        let message = |local, machine: &str| HostResources { local: Some(local), ..on(machine, &[0, 1]) };
        assert_eq!(pci_of_each(&[message(1, "a"), message(0, "a")]).unwrap(), ["1F", "0F"]);
        // A process that sees one GPU takes it.
        let alone = [on("a", &[5]), on("a", &[2])];
        assert_eq!(pci_of_each(&alone).unwrap(), ["5F", "2F"]);
        let second = ProcessInfo::among(&alone, &names(2), 1, &asking(DeviceChoice::Cuda)).unwrap();
        assert_eq!(second.notes[..1], ["process 1 takes GPU 0 (0000:2F:00.0), the only one that CUDA_VISIBLE_DEVICES shows it"]);
    }

    #[test]
    fn a_process_takes_gpus_in_a_row() {
        let settings = Settings { gpus: 2, ..asking(DeviceChoice::Cuda) };
        let of_each = |all: &[HostResources]| -> Result<Vec<Vec<usize>>> {
            let of = |process| ProcessInfo::among(all, &names(all.len()), process, &settings);
            (0..all.len()).map(|process| Ok(of(process)?.gpus.iter().map(|gpu| gpu.index).collect())).collect()
        };
        let (sees_four, sees_two) = (|machine: &str| on(machine, &[0, 1, 2, 3]), |machine: &str| on(machine, &[4, 5]));
        assert_eq!(of_each(&[sees_four("a"), sees_four("a"), sees_two("b")]).unwrap(), [[0, 1], [2, 3], [0, 1]]);
        let message = |local| HostResources { local: Some(local), ..sees_four("a") };
        assert_eq!(of_each(&[message(1), message(0)]).unwrap(), [[2, 3], [0, 1]]);
        let second = ProcessInfo::among(&[sees_four("a"), sees_four("a")], &names(2), 1, &settings).unwrap();
        assert_eq!(second.notes[0], "process 1 takes GPU 2 (0000:2F:00.0), GPU 3 (0000:3F:00.0), 2 for each process of its machine");
        let few = of_each(&[on("a", &[0, 1, 2]), on("a", &[0, 1, 2])]).unwrap_err().to_string();
        assert!(few.contains("process 1 on a sees GPUs: 3, processes on its machine: 2, each with --gpus 2"), "{few}");
        let overlapping = of_each(&[on("a", &[0, 1]), on("a", &[1, 2])]).unwrap_err().to_string();
        assert!(overlapping.contains("sees GPUs: 2"), "{overlapping}");
    }

    #[test]
    fn too_few_gpus_are_refused_with_both_numbers() {
        let refused = |all: &[HostResources]| pci_of_each(all).unwrap_err().to_string();
        let few = refused(&[on("a", &[0, 1]), on("a", &[0, 1]), on("a", &[0, 1])]);
        assert!(few.contains("process 2 on a sees GPUs: 2, processes on its machine: 3"), "{few}");
        // Another process sees the same single GPU.
        let one = refused(&[on("a", &[0]), on("a", &[0])]);
        assert!(one.contains("process 0 on a sees GPUs: 1, processes on its machine: 2") && one.contains("CUDA_VISIBLE_DEVICES"));
        let message = HostResources { local: Some(0), ..on("a", &[0, 1]) };
        assert!(refused(&[message.clone(), message]).contains("--processes 2"));
    }

    #[test]
    fn processes_that_differ_in_devices_are_refused_and_named() {
        let without = HostResources { gpus: Err("no driver".into()), ..on("b", &[]) };
        let mixed = pci_of_each(&[on("a", &[0]), without.clone()]).unwrap_err().to_string();
        assert!(mixed.contains("process 1 on a has none: no driver") && mixed.contains("--device cpu"), "{mixed}");
        assert_eq!(pci_of_each(&[without.clone(), without.clone()]).unwrap(), ["none"; 2]);
        let cuda = ProcessInfo::among(&[without.clone(), without], &names(2), 0, &asking(DeviceChoice::Cuda)).unwrap_err();
        assert!(cuda.to_string().contains("process 0 on a has none"));
        let mut other = on("b", &[0]);
        other.gpus.as_mut().unwrap()[0].model = "H200".into();
        let models = pci_of_each(&[on("a", &[0]), other]).unwrap_err().to_string();
        assert!(models.contains("process 0 on a has a H100, process 1 on a has a H200"), "{models}");
    }

    #[test]
    fn processes_of_one_machine_divide_its_cpus_unless_a_launcher_has() {
        let topology = Topology::read(two_sockets().path(), Process::default());
        let slices = |all: &[HostResources]| -> Vec<(String, usize)> {
            let of =
                |process| ProcessInfo::among(all, &names(all.len()), process, &asking(DeviceChoice::Cpu)).unwrap().cpu_slice_of(&topology);
            let words = |(own, cpus): (Option<Topology>, usize)| {
                (own.map_or("all".into(), |own| own.usable_cpus().unwrap().affinity.to_string()), cpus)
            };
            (0..all.len()).map(of).map(words).collect()
        };
        let process = || on("a", &[]);
        assert_eq!(slices(&[process(), process()]), [("0-1,4".into(), 3), ("2-3,5-6".into(), 4)]);
        assert_eq!(slices(&[process(), on("b", &[])])[0], ("0-6".into(), 7));
        assert_eq!(slices(&vec![process(); 8])[7], ("all".into(), 1), "fewer CPUs than processes");
        let bound = |cpus: &str| HostResources { cpus: cpus.into(), ..process() };
        assert_eq!(slices(&[bound("0-3"), bound("4-6")])[0], ("0-6".into(), 7), "each has its own");
    }

    #[test]
    fn processes_of_one_machine_divide_its_memory_and_reject_too_many_threads() {
        let topology = Topology::read(two_sockets().path(), Process { free_address_bytes: Some(6 << 20), ..Process::default() });
        let settings = Settings { threads: Some(7), ..asking(DeviceChoice::Cpu) };
        let chosen = |all: &[HostResources]| {
            let process_info = ProcessInfo::among(all, &names(all.len()), 0, &settings).unwrap();
            let selected = devices::agreed(&settings, &topology, &process_info, process_info.cpu_slice_of(&topology).1).unwrap();
            (selected.machine.host_bytes, selected.machine.cpus, selected.warning)
        };
        assert_eq!(chosen(&[on("a", &[]), on("b", &[])]), (6 << 20, 7, None));
        let message = "--threads 7: processes of this machine divide its CPUs, of which this one has 3; use --threads 3".to_string();
        assert_eq!(chosen(&[on("a", &[]), on("a", &[])]), (3 << 20, 3, Some(message)));
    }

    #[test]
    fn nccl_is_used_where_all_have_one_release_and_otherwise_the_reason_is_logged() {
        let with =
            |nccl: std::result::Result<&str, &str>| HostResources { nccl: nccl.map(Into::into).map_err(Into::into), ..on("a", &[0, 1]) };
        let chosen = |transport, nccl: [std::result::Result<&str, &str>; 2]| -> std::result::Result<_, String> {
            let settings = Settings { transport, ..asking(DeviceChoice::Auto) };
            let process_info = ProcessInfo::among(&nccl.map(with), &names(2), 0, &settings).map_err(|e| e.to_string())?;
            Ok((process_info.transport, process_info.transport_note.unwrap_or_default()))
        };
        let both = [Ok("2.28.9"); 2];
        let by_nccl = (Transport::Nccl, "gradients and weights pass from GPU to GPU by NCCL 2.28.9".to_string());
        assert_eq!(chosen(Transport::Auto, both), Ok(by_nccl.clone()));
        assert_eq!(chosen(Transport::Nccl, both), Ok(by_nccl));
        assert_eq!(chosen(Transport::Tcp, both), Ok((Transport::Tcp, String::new())));
        for (nccl, why) in [
            ([Ok("2.28.9"), Err("not in [/opt]")], "process 1 on a: not in [/opt]"),
            ([Ok("2.28.9"), Ok("2.27.7")], "process 0 on a has NCCL 2.28.9, process 1 on a has 2.27.7"),
        ] {
            assert_eq!(chosen(Transport::Auto, nccl), Ok((Transport::Tcp, format!("gradients and weights pass over TCP: {why}"))));
            let refused = chosen(Transport::Nccl, nccl).unwrap_err();
            assert!(refused.contains("--transport nccl") && refused.contains(why) && refused.contains("--transport tcp"), "{refused}");
        }
        // Without GPUs there is no note about NCCL, unless NCCL was requested.
        let without = HostResources { gpus: Err("no driver".into()), nccl: Err("it has no GPU".into()), ..on("a", &[]) };
        let requested = |transport| {
            let settings = Settings { transport, ..asking(DeviceChoice::Auto) };
            ProcessInfo::among(&[without.clone(), without.clone()], &names(2), 0, &settings)
                .map(|process_info| (process_info.transport, process_info.notes))
        };
        assert_eq!(requested(Transport::Auto).unwrap(), (Transport::Tcp, vec!["no GPU: no driver".to_string()]));
        assert!(requested(Transport::Nccl).unwrap_err().to_string().contains("process 0 on a: it has no GPU"));
    }
}
