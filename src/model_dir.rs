//! A Hugging Face model directory: its files by name, and none from elsewhere.
//!
//! A hub's cache keeps files in `blobs/` and links to them from `snapshots/<revision>/`; people link one name to another.
//! A link to anywhere else would put a file that is no part of the model into every checkpoint and export.

use crate::disk::did_you_mean;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// The file that describes the model.
pub(crate) const CONFIG: &str = "config.json";
/// The folder of a model's chat templates beside the default one.
pub(crate) const ADDITIONAL_TEMPLATES: &str = "additional_chat_templates";
/// All weights in one file; it wins over shards.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Which tensor is in which shard.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const INDEX_BYTES_MAX: u64 = 64 << 20;

/// A directory for opening files by name.
#[derive(Debug)]
pub struct ModelDir {
    path: PathBuf,
    /// Where links may lead: below the directory itself, and into the cache's `blobs`.
    allowed: Vec<PathBuf>,
}

impl ModelDir {
    /// The directory at `path`, which may be a link itself.
    ///
    /// # Errors
    /// `Io` for a path that is no directory.
    pub fn open(path: &Path) -> Result<Self> {
        let read = |e| Error::io("read", path, e);
        let root = path.canonicalize().map_err(read)?;
        if !root.is_dir() {
            return Err(read(std::io::ErrorKind::NotADirectory.into()));
        }
        // As written, not resolved: a `blobs` that is a link itself leads elsewhere.
        let snapshots = root.ancestors().find(|dir| dir.file_name().is_some_and(|name| name == "snapshots"));
        let blobs = snapshots.and_then(Path::parent).map(|cache| cache.join("blobs"));
        Ok(Self { path: path.to_path_buf(), allowed: std::iter::once(root).chain(blobs).collect() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the file `name`, whether it is there or not.
    ///
    /// # Errors
    /// `Io` for a link that leads nowhere; `Format` for one that leads out of the directory and its cache.
    pub fn file(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        if path.is_symlink() {
            let target = path.canonicalize().map_err(|e| Error::io("read", &path, e))?;
            if !self.allowed.iter().any(|dir| target.starts_with(dir)) {
                let cause = format!("is a link to {}, outside the model's directory; put the file itself there", target.display());
                return Err(Error::format(path, cause));
            }
        }
        Ok(path)
    }

    /// The names of files in the directory, sorted; those that are not UTF-8 left out.
    ///
    /// # Errors
    /// `Io` when it cannot be listed.
    pub fn names(&self) -> Result<Vec<String>> {
        let read = |e| Error::io("read", &self.path, e);
        let entries: Vec<_> = std::fs::read_dir(&self.path).and_then(Iterator::collect).map_err(read)?;
        let files = entries.into_iter().filter(|entry| !entry.path().is_dir());
        let mut names: Vec<String> = files.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        Ok(names)
    }
}

/// Refuses a path that `--model` names and nothing lies at.
///
/// # Errors
/// `Usage` with the nearest name beside it, and the form of a name on the hub.
pub(crate) fn expect_exists(model: &Path) -> Result<()> {
    if model.symlink_metadata().is_ok() {
        return Ok(());
    }
    let meant = did_you_mean(model, Path::is_dir);
    let allowed = "a directory with config.json, or a name on the hub as org/model";
    Err(Error::usage(format!("--model {}: no such directory{meant}; expected {allowed}", model.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_is_not_there_is_named_with_its_nearest_neighbour() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["tiny", "other", "tinyy.txt"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::remove_dir(dir.path().join("tinyy.txt")).unwrap();
        fs::write(dir.path().join("tinyy.txt"), "a file").unwrap();
        let refused = |name: &str| expect_exists(&dir.path().join(name)).unwrap_err();
        let folder = dir.path().display();
        let expected = "expected a directory with config.json, or a name on the hub as org/model";
        assert_eq!(
            refused("tinyy").to_string(),
            format!("--model {folder}/tinyy: no such directory; did you mean {folder}/tiny?; {expected}")
        );
        assert_eq!(refused("xxxx").to_string(), format!("--model {folder}/xxxx: no such directory; {expected}"));
        assert_eq!(refused("tinyy").exit_code(), 2);
        for path in ["/no/where/at/all", "..x", "nowhere-at-all", "", "a/.."] {
            assert!(expect_exists(Path::new(path)).unwrap_err().to_string().starts_with(&format!("--model {path}: no such")), "{path}");
        }
        assert!(expect_exists(&dir.path().join("tiny")).is_ok());
    }
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_stay_inside_the_directory_or_its_cache() {
        let cache = tempfile::tempdir().unwrap();
        let path = |name: &str| cache.path().join(name);
        fs::create_dir_all(path("snapshots/1a2b")).unwrap();
        fs::create_dir_all(path("blobs")).unwrap();
        for name in ["blobs/0f", "snapshots/1a2b/plain", "snapshots/stranger", "blobs-not/x", "secret"] {
            fs::create_dir_all(path(name).parent().unwrap()).unwrap();
            fs::write(path(name), "x").unwrap();
        }
        let secret = path("secret");
        let links = [
            ("cached", "../../blobs/0f"),
            ("inside", "plain"),
            ("twice", "cached"),
            ("absolute", secret.to_str().unwrap()),
            ("beside", "../stranger"),
            ("prefix", "../../blobs-not/x"),
            ("hop", "absolute"),
            ("dangling", "nowhere"),
        ];
        links.iter().for_each(|(name, target)| symlink(target, path("snapshots/1a2b").join(name)).unwrap());
        symlink("snapshots/1a2b", path("revision")).unwrap();
        for dir in ["snapshots/1a2b", "revision"] {
            let dir = ModelDir::open(&path(dir)).unwrap();
            for name in ["cached", "inside", "twice", "plain", "absent"] {
                assert_eq!(dir.file(name).unwrap(), dir.path().join(name));
            }
            for (name, target) in [("absolute", "/secret"), ("beside", "stranger"), ("prefix", "blobs-not/x"), ("hop", "/secret")] {
                let message = dir.file(name).unwrap_err().to_string();
                assert!(message.contains(&format!("/{name}: is a link to ")) && message.contains(target), "{message}");
            }
            assert!(matches!(dir.file("dangling"), Err(Error::Io { .. })));
        }
        // A directory of one's own that only calls itself a cache: its blobs may not lie elsewhere.
        fs::rename(path("blobs"), path("elsewhere")).unwrap();
        symlink("elsewhere", path("blobs")).unwrap();
        assert!(ModelDir::open(&path("snapshots/1a2b")).unwrap().file("cached").is_err());
    }

    #[test]
    fn non_directories_are_refused() {
        for path in ["/no/where", "../model", "org/name", "a/b/c"] {
            assert!(matches!(ModelDir::open(Path::new(path)), Err(Error::Io { .. })), "{path}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(ModelDir::open(file.path()).unwrap_err().to_string().contains("not a directory"));
    }
}
