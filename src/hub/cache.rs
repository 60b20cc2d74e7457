//! The cache of Python's `huggingface_hub`. Each repository has a folder such as `models--org--name`: `refs/REVISION` holds a commit, and
//! `snapshots/COMMIT` holds the files by name, as links into `blobs`.

use super::name::{DataPart, HubName, RepoKind};
use crate::disk;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

pub(super) const SNAPSHOTS: &str = "snapshots";
/// Size limit in bytes of a file in `refs`.
const REF_BYTES_MAX: u64 = 1024;

/// A repository at one commit in the local cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) repo: String,
    pub(crate) commit: String,
}

/// The cache, with its root directory.
pub(super) struct HubCache {
    pub(super) root: PathBuf,
}

impl HubCache {
    /// Finds the cache from the environment: `HF_HUB_CACHE`, else `HF_HOME`, else the user's cache directory. `None` if no variable names a
    /// home.
    pub(super) fn of(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Option<Self> {
        let beside = || home_dir(variable).map(|home_dir| home_dir.join("hub"));
        let root = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE")).or_else(beside);
        root.map(|root| Self { root })
    }

    /// The snapshot directory of `name`; `None` if its revision is not in the cache.
    ///
    /// # Errors
    /// `Io`; `Format` if a file in `refs` holds no commit, or names a commit but holds another one.
    pub(super) fn find(&self, name: &HubName) -> Result<Option<PathBuf>> {
        let repo = self.repo(name);
        let Some(commit) = commit(&repo, &name.revision)? else { return Ok(None) };
        let snapshot = repo.join(SNAPSHOTS).join(commit);
        Ok(snapshot.is_dir().then_some(snapshot))
    }

    /// Whether the cache has any snapshot of the repository.
    pub(super) fn holds(&self, name: &HubName) -> bool {
        self.repo(name).join(SNAPSHOTS).is_dir()
    }

    /// The repository's folder.
    pub(super) fn repo(&self, name: &HubName) -> PathBuf {
        self.root.join(folder(name))
    }
}

impl Snapshot {
    /// The snapshot at `path`, derived from the names of its parent folders.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        let commit = path.file_name()?.to_str().filter(|name| is_commit(name))?;
        let snapshots = path.parent().filter(|parent| parent.ends_with(SNAPSHOTS))?;
        let repo = snapshots.parent()?.file_name()?.to_str()?.strip_prefix(RepoKind::Model.plural())?.strip_prefix("--")?;
        Some(Self { repo: repo.replace("--", "/"), commit: commit.into() })
    }
}

/// The home directory of Hugging Face's programs.
pub(super) fn home_dir(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let cache = || variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home_dir| home_dir.join(".cache")));
    variable("HF_HOME").or_else(|| cache().map(|cache| cache.join("huggingface")))
}

pub(super) fn folder(name: &HubName) -> String {
    format!("{}--{}", name.kind.plural(), name.repo.replace('/', "--"))
}

/// The directory of one split in `snapshot`; `None` if it is not there. An existing directory is complete, because a download renames it
/// last.
pub(super) fn part_dir(snapshot: &Path, DataPart { config, split }: &DataPart) -> Option<PathBuf> {
    let configs = || std::fs::read_dir(snapshot).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let config = config.clone().or_else(|| one_of(configs().filter(|name| !name.starts_with('.'))))?;
    Some(snapshot.join(config).join(split)).filter(|dir| dir.is_dir())
}

/// The only element of `configs`, or the one named `default`.
pub(super) fn one_of(configs: impl Iterator<Item = String>) -> Option<String> {
    let mut configs: Vec<String> = configs.collect();
    if configs.len() == 1 { configs.pop() } else { configs.into_iter().find(|config| config == "default") }
}

/// The commit of `revision` in `repo`. A revision that is itself a commit resolves to itself.
fn commit(repo: &Path, revision: &str) -> Result<Option<String>> {
    let path = repo.join("refs").join(revision);
    // A revision may be the folder of other revisions.
    let named = if path.is_dir() { None } else { disk::read_if_present(&path, REF_BYTES_MAX)? };
    let Some(bytes) = named else { return Ok(is_commit(revision).then(|| revision.into())) };
    let text = String::from_utf8_lossy(&bytes);
    let commit = text.trim();
    if !is_commit(commit) {
        return Err(Error::format(path, format_args!("no commit: {commit:?}")));
    }
    if is_commit(revision) && revision != commit {
        let cause = format!("it maps commit {revision} to {commit}, which is no commit: remove this file");
        return Err(Error::format(path, cause));
    }
    Ok(Some(commit.into()))
}

pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn the_environment_names_the_cache_as_for_python() {
        let root = |set: &[(&str, &str)]| {
            let variable = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value));
            HubCache::of(&variable).map(|cache| cache.root.display().to_string())
        };
        assert_eq!(root(&[]), None);
        let mut set = vec![("HOME", "/home/me")];
        for (variable, value, expected) in [
            ("HOME", "/home/me", "/home/me/.cache/huggingface/hub"),
            ("XDG_CACHE_HOME", "/c", "/c/huggingface/hub"),
            ("HF_HOME", "/h", "/h/hub"),
            ("HUGGINGFACE_HUB_CACHE", "/old", "/old"),
            ("HF_HUB_CACHE", "/new", "/new"),
        ] {
            set.push((variable, value));
            assert_eq!(root(&set).as_deref(), Some(expected));
        }
    }

    #[test]
    fn revisions_lead_to_commits_and_commits_to_snapshots() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, repo) = (HubCache { root: dir.path().into() }, dir.path().join("models--org--name"));
        let find = |text: &str| cache.find(&HubName::model(text).unwrap());
        assert_eq!((find("org/name").unwrap(), cache.holds(&HubName::model("org/name").unwrap())), (None, false));
        let snapshot = repo.join("snapshots").join(COMMIT);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(repo.join("refs/refs/pr")).unwrap();
        for (revision, commit) in [("main", COMMIT.to_string()), ("refs/pr/1", format!("{COMMIT}\n")), ("gone", "f".repeat(40))] {
            fs::write(repo.join("refs").join(revision), commit).unwrap();
        }
        let by_commit = format!("org/name@{COMMIT}");
        for text in ["org/name", "org/name@main", "org/name@refs/pr/1", &by_commit] {
            assert_eq!(find(text).unwrap().as_ref(), Some(&snapshot), "{text}");
        }
        for text in ["org/name@dev", "org/name@refs", "org/name@gone", "org/other", "org/name@ffffffffffffffffffffffffffffffffffffffff"] {
            assert_eq!(find(text).unwrap(), None, "{text}");
        }
        fs::write(repo.join("refs/bad"), "../../elsewhere").unwrap();
        assert!(find("org/name@bad").unwrap_err().to_string().contains("refs/bad: no commit: \"../../elsewhere\""));
        let other = "a".repeat(40);
        fs::write(repo.join("refs").join(&other), COMMIT).unwrap();
        let refused = find(&format!("org/name@{other}")).unwrap_err().to_string();
        assert!(refused.contains(&format!("refs/{other}: it maps commit {other} to {COMMIT}")), "{refused}");
        fs::write(repo.join("refs").join(COMMIT), COMMIT).unwrap();
        assert_eq!(find(&by_commit).unwrap().as_ref(), Some(&snapshot), "an entry that is right");
        assert_eq!(Snapshot::at(&snapshot), Some(Snapshot { repo: "org/name".into(), commit: COMMIT.into() }));
        for path in [dir.path(), &repo, Path::new("/models--a--b/snapshots/main"), Path::new("/a/snapshots").join(COMMIT).as_path()] {
            assert_eq!(Snapshot::at(path), None, "{}", path.display());
        }
    }
}
