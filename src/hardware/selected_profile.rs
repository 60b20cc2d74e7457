//! Selection of the profile for a run on a GPU: a named profile, one that `probe --save` measured on this machine, or that of the most
//! similar machine.

use super::gpu::GpuFacts;
use super::profile::{ASSUMED, Profile};
use super::topology::Topology;
use crate::disk;
use crate::error::{Error, Result};
use std::fmt;
use std::path::{Path, PathBuf};

/// The value of `--hardware` for automatic selection.
pub(crate) const AUTO: &str = "auto";

/// Words of a GPU's name, and the profile of the most similar machine. The first row with all words in the name is used.
const NEAREST: [(&[&str], &str); 18] = [
    (&["gh200", "144"], "gh200-144"),
    (&["gh200"], "gh200-96"),
    (&["gb200"], "gb200"),
    (&["gb300"], "gb300"),
    (&["gb10"], "gb10"),
    (&["b200"], "b200"),
    (&["h200"], "h200-pcie5"),
    (&["h100", "pcie"], "h100-pcie"),
    (&["h100", "nvl"], "h100-pcie"),
    // The same chip and power limit as an H200, with slower memory. One of them has a profile that derives from this one.
    (&["h100"], "h200-pcie5"),
    (&["a100", "40gb"], "a100-40"),
    (&["a100"], "a100-80"),
    (&["l40"], "l40s"),
    (&["rtx 6000 ada"], "rtx-6000-ada"),
    (&["rtx pro 6000"], "rtx-pro-6000"),
    (&["rtx 3090"], "rtx-3090"),
    (&["rtx 4090"], "rtx-4090"),
    (&["rtx 5090"], "rtx-5090"),
];

/// A machine with a GPU, identified by the parts that determine its rates.
#[derive(Clone, Debug)]
pub(crate) struct MachineId {
    gpu: String,
    cpu: String,
    cpus: usize,
}

impl MachineId {
    /// The machine of `topology` with the first GPU that is visible to CUDA.
    pub(crate) fn new(topology: &Topology) -> Result<Self> {
        GpuFacts::read().map(|gpu| Self::of(topology, &gpu))
    }

    /// The machine of `topology` with this GPU.
    pub(crate) fn of(topology: &Topology, gpu: &GpuFacts) -> Self {
        let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "unnamed".into());
        Self { gpu: name(&gpu.name), cpu: name(&topology.cpu_model), cpus: topology.usable_cpus().map_or(1, |usable| usable.count()) }
    }

    /// File of its measured profile, in the user's cache; `None` if the environment names no cache.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        disk::user_cache().map(|cache| cache.join(self.file_name()))
    }

    /// File name of its own, because one home directory may serve many machines.
    fn file_name(&self) -> String {
        format!("{}.{}.{}-cpus.toml", slug(&self.gpu), slug(&self.cpu), self.cpus)
    }
}

/// `name` in lower case, with a dash in place of every run of other characters.
fn slug(name: &str) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

/// A profile of a machine with a GPU, and the reason for its selection.
#[derive(Clone, Debug)]
pub(crate) struct SelectedProfile {
    pub profile: Profile,
    origin: Origin,
}

#[derive(Clone, Debug, PartialEq)]
enum Origin {
    Named,
    Measured(PathBuf),
    /// An assumed profile, and any error in the saved profile or in reading the GPU's name.
    Assumed {
        is_near: bool,
        because: Option<String>,
    },
}

impl SelectedProfile {
    /// A warning about a profile of this machine whose samples differ.
    pub(crate) fn unsteady(&self) -> Option<String> {
        let text = self.profile.unsteady().filter(|_| matches!(self.origin, Origin::Measured(_)))?;
        Some(format!("{text}: `superoffload probe --save`"))
    }

    /// The profile for a run on `gpus` GPUs of `machine`. `hardware` is `auto`, the name of a shipped profile, or a file.
    ///
    /// # Errors
    /// Errors of [`Profile::load`] for a named profile; `Usage` if it has no GPU. If `auto` cannot use a measured profile, that is not an
    /// error: `Display` shows the reason.
    pub(crate) fn of(hardware: &Path, machine: Result<MachineId>, gpus: usize) -> Result<Self> {
        if hardware == Path::new("this") {
            let cause = "--hardware this: only for plan and simulate; for runs, measure once with `superoffload probe --save`";
            return Err(Error::usage(cause));
        }
        if hardware != Path::new(AUTO) {
            return Ok(Self { profile: load(hardware)?, origin: Origin::Named });
        }
        let machine = match machine {
            Ok(machine) => machine,
            Err(why) => return Self::assumed("", gpus, Some(why.to_string())),
        };
        match machine.file().and_then(Self::kept) {
            None => Self::assumed(&machine.gpu, gpus, None),
            Some(Ok(kept)) => Ok(kept),
            Some(Err(why)) => Self::assumed(&machine.gpu, gpus, Some(why.to_string())),
        }
    }

    /// The profile saved in `file`, if the file exists.
    ///
    /// # Errors
    /// Errors of [`Profile::load`]; `Usage` if it has no GPU.
    pub(crate) fn kept(file: PathBuf) -> Option<Result<Self>> {
        file.exists().then(|| Ok(Self { profile: load(&file)?, origin: Origin::Measured(file) }))
    }

    /// A line about assumed rates, if the profile has no rates for `gpus` GPUs together.
    pub(crate) fn unknown_together(&self, gpus: usize) -> Option<String> {
        let Profile { name, .. } = &self.profile;
        let text = match self.profile.gpus() {
            known if gpus == 1 || known == gpus => return None,
            1 => "has no rates for several GPUs; assumed: the optimizer is shared, links are not, GPUs copy as fast as links".into(),
            known => format!("has rates for {known} GPUs, which are assumed, with the optimizer shared by {gpus}"),
        };
        let remedy = format!("`superoffload probe --save --gpus {gpus}` measures them");
        Some(format!("rates of {gpus} GPUs together: {name} {text}; {remedy}"))
    }

    /// The profile of the most similar machine: with as many GPUs, else with more, else with the most. For an unknown GPU no profile of
    /// several GPUs is used, because its links are unknown.
    fn assumed(gpu: &str, gpus: usize, because: Option<String>) -> Result<Self> {
        let gpu = gpu.to_ascii_lowercase();
        let nearest = NEAREST.iter().find(|(words, _)| words.iter().all(|word| gpu.contains(word)));
        let near = nearest.map_or(ASSUMED, |(_, name)| *name);
        let is_named = |profile: &Profile| profile.name.split('-').next().is_some_and(|word| gpu.contains(word));
        let several = Profile::several(near).filter(|_| gpus > 1 && nearest.is_some());
        let distance = |profile: &Profile| (profile.gpus() < gpus, profile.gpus().abs_diff(gpus), !is_named(profile));
        let is_own = |profile: &Profile| profile.gpus() == 1 && profile.name.split('-').all(|word| gpu.contains(word));
        let mut own = Profile::derived(near).filter(|profile| gpus == 1 && nearest.is_some() && is_own(profile));
        let profile = several.min_by_key(distance).or_else(|| own.next()).map_or_else(|| Profile::load(near), Ok)?;
        Ok(Self { profile, origin: Origin::Assumed { is_near: nearest.is_some(), because } })
    }
}

/// Loads a profile, which must have a GPU.
fn load(name_or_file: &Path) -> Result<Profile> {
    let name = name_or_file.to_string_lossy();
    let profile = Profile::load(&name)?;
    if profile.gpu.is_none() {
        return Err(Error::usage(format!("hardware profile {name}: it describes a machine without a GPU, but this run uses a GPU")));
    }
    Ok(profile)
}

impl fmt::Display for SelectedProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Profile { name, machine, date, .. } = &self.profile;
        match &self.origin {
            Origin::Named => write!(f, "{name}: {machine}"),
            Origin::Measured(file) => {
                write!(f, "measured on this machine on {date} ({})", file.display())?;
                self.unsteady().map_or(Ok(()), |text| write!(f, "; {text}"))
            }
            Origin::Assumed { is_near, because } => {
                let near = if *is_near { "the shipped profile closest to this machine" } else { "no shipped profile is close to this GPU" };
                write!(f, "assumed, {name}: {near}; `superoffload probe --save` measures this machine")?;
                if let Some(why) = &because { write!(f, " ({why})") } else { Ok(()) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(gpu: &str) -> MachineId {
        MachineId { gpu: gpu.into(), cpu: "Intel(R) Xeon(R) 8592+".into(), cpus: 16 }
    }

    #[test]
    fn a_gpu_gets_the_profile_of_the_nearest_machine() {
        for (gpu, profile) in [
            ("NVIDIA H200", "h200-pcie5"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA B200", "b200"),
            ("NVIDIA GB300", "gb300"),
            ("NVIDIA GB10", "gb10"),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
            ("NVIDIA GH200 480GB", "gh200-96"),
            ("NVIDIA GH200 144G HBM3e", "gh200-144"),
            ("NVIDIA GB200", "gb200"),
            ("NVIDIA A100-SXM4-40GB", "a100-40"),
            ("NVIDIA A100 80GB PCIe", "a100-80"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
            ("NVIDIA GeForce RTX 3090", "rtx-3090"),
            ("NVIDIA GeForce RTX 4090", "rtx-4090"),
            ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ] {
            let selected = SelectedProfile::assumed(gpu, 1, None).unwrap();
            assert_eq!(selected.profile.name, profile, "{gpu}");
            assert!(selected.to_string().contains("closest to this machine; `superoffload probe --save`"), "{selected}");
        }
        let unknown = SelectedProfile::assumed("NVIDIA A30", 1, None).unwrap();
        assert!(unknown.to_string().starts_with("assumed, h200-pcie5: no shipped profile is close"), "{unknown}");
        let nameless = SelectedProfile::of(Path::new(AUTO), Err(Error::usage("no name")), 1).unwrap();
        assert!(nameless.to_string().ends_with("(no name)"), "{nameless}");
    }

    #[test]
    fn several_gpus_get_a_matching_profile_or_a_note_about_its_machine() {
        for (gpu, gpus, profile, message) in [
            ("NVIDIA H200", 1, "h200-pcie5", None),
            ("NVIDIA H200", 2, "h200-x2", None),
            ("NVIDIA H200", 3, "h200-x4", Some("rates for 4 GPUs")),
            ("NVIDIA H200", 4, "h200-x4", None),
            ("NVIDIA H200", 8, "h200-x4", Some("rates for 4 GPUs")),
            ("NVIDIA H100 80GB HBM3", 2, "h100-x2", None),
            ("NVIDIA H100 80GB HBM3", 4, "h200-x4", None),
            ("NVIDIA GH200 480GB", 2, "gh200-x4", Some("rates for 4 GPUs")),
            ("NVIDIA GB200", 2, "gb200", Some("no rates for several GPUs")),
            ("NVIDIA GeForce RTX 4090", 2, "rtx-4090", Some("no rates for several GPUs")),
            ("NVIDIA RTX A6000", 2, "h200-pcie5", Some("no rates for several GPUs")),
        ] {
            let selected = SelectedProfile::assumed(gpu, gpus, None).unwrap();
            assert_eq!(selected.profile.name, profile, "{gpus} x {gpu}");
            assert!(selected.to_string().contains(profile), "{selected}");
            let line = selected.unknown_together(gpus);
            assert!(
                line.as_deref().map_or(message.is_none(), |line| message.is_some_and(|message| line.contains(message))),
                "{gpus} x {gpu}: {line:?}"
            );
        }
    }

    #[test]
    fn a_named_profile_is_used_if_it_has_a_gpu_and_the_machine_is_not_measured() {
        let selected = |hardware: &str| SelectedProfile::of(Path::new(hardware), Ok(key("NVIDIA H200")), 1);
        let named = selected("gb200").unwrap();
        assert!(named.profile.name == "gb200" && named.to_string().starts_with("gb200: NVIDIA GB200"), "{named}");
        for refused in ["this", "nowhere.toml"] {
            assert_eq!(selected(refused).unwrap_err().exit_code(), 2, "{refused}");
        }
    }

    #[test]
    fn a_kept_profile_is_used_if_it_is_readable_and_has_a_gpu() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kept.toml");
        let kept = || SelectedProfile::kept(file.clone());
        assert!(kept().is_none());
        let profile = Profile::load("gb200").unwrap();
        std::fs::write(&file, profile.to_string()).unwrap();
        let selected = kept().unwrap().unwrap();
        assert!(selected.profile == profile && selected.to_string().starts_with("measured on this machine on 20"), "{selected}");
        std::fs::write(&file, include_str!("../../paper-figures/results/h200-probe-3-quiet.toml")).unwrap();
        assert!(!kept().unwrap().unwrap().to_string().contains("samples differ"));
        let of_two = Profile::load("h200-x2").unwrap();
        std::fs::write(&file, of_two.to_string()).unwrap();
        let selected = kept().unwrap().unwrap();
        assert_eq!((selected.unknown_together(2), &selected.profile.together), (None, &of_two.together));
        assert!(selected.unknown_together(4).unwrap().ends_with("; `superoffload probe --save --gpus 4` measures them"));
        std::fs::write(&file, include_str!("../../paper-figures/results/h200-probe-3-busy.toml")).unwrap();
        let busy = "samples differ in host.adam_bytes_per_s_by_threads by 35 %, host.cast_bytes_per_s_by_threads by 68 %; measure again";
        let selected = kept().unwrap().unwrap().to_string();
        assert!(selected.contains(busy) && selected.ends_with("`superoffload probe --save`"), "{selected}");
        std::fs::write(&file, "version = 1").unwrap();
        assert!(kept().unwrap().unwrap_err().to_string().contains("kept.toml"));
        std::fs::write(&file, include_str!("../../paper-figures/results/cpu-probe.toml")).unwrap();
        assert!(kept().unwrap().unwrap_err().to_string().contains("without a GPU"));
    }

    #[test]
    fn every_machine_has_a_file_of_its_own() {
        assert_eq!(key("NVIDIA H200").file_name(), "nvidia-h200.intel-r-xeon-r-8592.16-cpus.toml");
        assert_eq!(key("//").file_name(), ".intel-r-xeon-r-8592.16-cpus.toml");
    }
}
