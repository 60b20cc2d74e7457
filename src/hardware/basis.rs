//! What a run on a GPU is planned by: a profile that was named, one that `probe --save` measured on this machine, or that of a machine
//! with such a GPU.

use super::gpu::GpuFacts;
use super::profile::Profile;
use super::topology::Topology;
use crate::error::{Error, Result};
use std::fmt;
use std::path::{Path, PathBuf};

/// The choice of `--hardware` that leaves it to the program.
pub const AUTO: &str = "auto";

/// What GPUs are called whose machines have a profile, the most special ones first: one all of whose words are in the GPU's name.
const LIKE: [(&[&str], &str); 7] = [
    (&["gh200", "144"], "gh200-144"),
    (&["gh200"], "gh200-96"),
    (&["gb200"], "gb200"),
    (&["h200"], "h200-pcie5"),
    (&["h100", "pcie"], "h100-pcie"),
    (&["h100", "nvl"], "h100-pcie"),
    // The same chip under the same power limit as an H200, with slower memory.
    (&["h100"], "h200-pcie5"),
];

/// A machine with a GPU, as far as its rates depend on it.
#[derive(Clone, Debug)]
pub struct Key {
    gpu: Option<String>,
    cpu: Option<String>,
    cpus: usize,
}

impl Key {
    /// The machine of `topology` and of the GPU with this name.
    pub fn new(topology: &Topology, gpu: Option<String>) -> Self {
        Self { gpu, cpu: topology.cpu_model.clone(), cpus: topology.usable_cpus().map_or(1, |usable| usable.count()) }
    }

    /// The machine of `topology` and the GPU that CUDA shows first.
    ///
    /// # Errors
    /// Those of [`GpuFacts::read`].
    pub fn of_gpu(topology: &Topology) -> Result<Self> {
        GpuFacts::read().map(|gpu| Self::new(topology, gpu.name))
    }

    /// A file of its own in the user's cache, since a home directory may serve many machines; none where no cache is known.
    pub fn file(&self) -> Option<PathBuf> {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
        let [gpu, cpu] = [&self.gpu, &self.cpu].map(|name| slug(name.as_deref().unwrap_or("unnamed")));
        Some(cache.join("superoffload").join(format!("{gpu}.{cpu}.{}-cpus.toml", self.cpus)))
    }
}

/// Lower-case letters and digits, and one dash in place of all between them.
fn slug(name: &str) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

/// A profile, and how it came to be the one.
#[derive(Clone, Debug)]
pub struct Basis {
    /// The profile.
    pub profile: Profile,
    origin: Origin,
}

#[derive(Clone, Debug, PartialEq)]
enum Origin {
    Named,
    Measured(PathBuf),
    /// The profile of another machine with such a GPU, if there is one; and why not what was kept.
    Assumed {
        is_alike: bool,
        unread: Option<String>,
    },
}

impl Basis {
    /// The profile that `hardware` names: `auto`, a shipped one, or a file.
    ///
    /// # Errors
    /// Those of [`Profile::load`] for what is named. A kept profile that cannot be read is told by `Display`, and not used.
    pub fn of(hardware: &Path, machine: &Key) -> Result<Self> {
        Self::with_kept(hardware, machine, machine.file())
    }

    fn with_kept(hardware: &Path, machine: &Key, kept: Option<PathBuf>) -> Result<Self> {
        if hardware == Path::new("this") {
            let cause = "--hardware this: plan and simulate measure; for a run, `superoffload probe --save` measures once and is kept";
            return Err(Error::usage(cause));
        }
        if hardware != Path::new(AUTO) {
            return Ok(Self { profile: Profile::load(&hardware.to_string_lossy())?, origin: Origin::Named });
        }
        let kept = kept.filter(|file| file.exists());
        match kept.map(|file| (Profile::load(&file.to_string_lossy()), file)) {
            Some((Ok(profile), file)) => Ok(Self { profile, origin: Origin::Measured(file) }),
            Some((Err(why), _)) => Self::assumed(machine, Some(why.to_string())),
            None => Self::assumed(machine, None),
        }
    }

    fn assumed(machine: &Key, unread: Option<String>) -> Result<Self> {
        let gpu = machine.gpu.as_deref().unwrap_or_default().to_ascii_lowercase();
        let like = LIKE.iter().find(|(words, _)| words.iter().all(|word| gpu.contains(word)));
        let profile = Profile::load(like.map_or("h200-pcie5", |(_, name)| name))?;
        Ok(Self { profile, origin: Origin::Assumed { is_alike: like.is_some(), unread } })
    }
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Profile { name, machine, date, .. } = &self.profile;
        match &self.origin {
            Origin::Named => write!(f, "{name}: {machine}"),
            Origin::Measured(file) => write!(f, "measured on this machine on {date} ({})", file.display()),
            Origin::Assumed { is_alike, unread } => {
                let alike = if *is_alike { "a machine with such a GPU" } else { "none is known of this GPU" };
                write!(f, "assumed, {name}: {alike}; `superoffload probe --save` measures this one")?;
                unread.as_ref().map_or(Ok(()), |why| write!(f, " ({why})"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(gpu: &str) -> Key {
        Key { gpu: Some(gpu.into()), cpu: Some("Intel(R) Xeon(R) 8592+".into()), cpus: 16 }
    }

    #[test]
    fn a_gpu_gets_the_profile_of_its_kind() {
        for (gpu, profile) in [
            ("NVIDIA H200", "h200-pcie5"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("NVIDIA H100 80GB HBM3", "h200-pcie5"),
            ("NVIDIA GH200 480GB", "gh200-96"),
            ("NVIDIA GH200 144G HBM3e", "gh200-144"),
            ("NVIDIA GB200", "gb200"),
        ] {
            let basis = Basis::assumed(&key(gpu), None).unwrap();
            assert_eq!(basis.profile.name, profile, "{gpu}");
            assert!(basis.to_string().contains("such a GPU; `superoffload probe --save`"), "{basis}");
        }
        let unknown = Basis::assumed(&key("NVIDIA L40S"), None).unwrap();
        assert!(unknown.to_string().starts_with("assumed, h200-pcie5: none is known of this GPU"), "{unknown}");
    }

    #[test]
    fn what_is_named_is_taken_and_this_is_not_measured() {
        let basis = Basis::of(Path::new("gb200"), &key("NVIDIA H200")).unwrap();
        assert!(basis.profile.name == "gb200" && basis.to_string().starts_with("gb200: NVIDIA GB200"), "{basis}");
        assert_eq!(Basis::of(Path::new("this"), &key("NVIDIA H200")).unwrap_err().exit_code(), 2);
        assert_eq!(Basis::of(Path::new("nowhere.toml"), &key("NVIDIA H200")).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn what_was_kept_wins_and_what_cannot_be_read_is_told() {
        let (folder, machine) = (tempfile::tempdir().unwrap(), key("NVIDIA H100 PCIe"));
        let basis = |file: &Path| Basis::with_kept(Path::new(AUTO), &machine, Some(file.into())).unwrap();
        let file = folder.path().join("kept.toml");
        assert_eq!(basis(&file).profile.name, "h100-pcie");
        std::fs::write(&file, include_str!("profiles/gb200.toml")).unwrap();
        assert!(basis(&file).profile.name == "gb200" && basis(&file).to_string().starts_with("measured on this machine on 20"));
        std::fs::write(&file, "version = 1").unwrap();
        let told = basis(&file).to_string();
        assert!(told.starts_with("assumed, h100-pcie") && told.contains("kept.toml"), "{told}");
    }

    #[test]
    fn names_make_files() {
        let file = key("NVIDIA H200").file().unwrap();
        assert!(file.ends_with("superoffload/nvidia-h200.intel-r-xeon-r-8592.16-cpus.toml"), "{}", file.display());
        assert_eq!(slug("Intel(R) Xeon(R) 8592+"), "intel-r-xeon-r-8592");
        assert_eq!(slug("///"), "");
    }
}
