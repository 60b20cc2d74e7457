//! Models and data sets by their name on the Hugging Face hub. [`name`] parses names, [`cache`] finds files in the local cache, and
//! `download` fetches missing files in builds with the feature `hub`.

pub(crate) mod cache;
#[cfg(feature = "hub")]
mod client;
#[cfg(feature = "hub")]
mod download;
#[cfg(all(test, feature = "hub"))]
mod download_tests;
#[cfg(feature = "hub")]
mod fetch;
#[cfg(feature = "hub")]
mod listing;
mod name;
#[cfg(feature = "hub")]
mod parts;
#[cfg(feature = "hub")]
mod roots;

use crate::disk;
use crate::error::{Error, Result};
use crate::model_dir::{CONFIG, INDEX, INDEX_BYTES_MAX, SINGLE};
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;
use cache::{HubCache, part_dir};
use name::{HubName, RepoKind};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A search for a model or data set by path or hub name, with the stop flag and the event sink of a possible download.
pub(crate) struct HubQuery<'a> {
    /// Whether the model's weights will be read.
    pub(crate) with_weights: bool,
    #[cfg_attr(not(feature = "hub"), expect(dead_code, reason = "only a download takes time"))]
    pub(crate) stop: &'a StopFlag,
    #[cfg_attr(not(feature = "hub"), expect(dead_code, reason = "only a download takes time"))]
    pub(crate) emit: &'a mut dyn FnMut(ProgressEvent<'_>),
}

impl HubQuery<'_> {
    /// Resolves `--model` to a directory: an existing path first, then a snapshot in the cache, then a download. An argument that is
    /// neither an existing path nor a hub name is returned unchanged; opening it reports the error.
    ///
    /// # Errors
    /// `Usage` for a name that is not in the cache and cannot be downloaded; errors of the download.
    pub(crate) fn model(self, model: &Path) -> Result<PathBuf> {
        self.find(&variable, model, HubName::model)
    }

    /// Resolves a path of `--data` in the same way as [`Self::model`].
    ///
    /// # Errors
    /// The errors of [`Self::model`].
    pub(crate) fn data(self, data: &Path) -> Result<PathBuf> {
        self.find(&variable, data, HubName::data)
    }

    fn find(self, variable: &Variable<'_>, path: &Path, parse: fn(&str) -> Option<HubName>) -> Result<PathBuf> {
        let is_there = path.symlink_metadata().is_ok();
        let Some(name) = path.to_str().filter(|_| !is_there).and_then(parse) else { return Ok(path.into()) };
        let Some(cache) = HubCache::of(variable) else {
            return Err(refusal(&name, "the place of the Hugging Face cache is unknown: set HF_HOME or HOME".into()));
        };
        let snapshot = cache.find(&name)?;
        let whole = snapshot.as_ref().and_then(|snapshot| whole(&name, snapshot, self.with_weights));
        match (whole, snapshot) {
            (Some(whole), _) => Ok(whole),
            #[cfg(feature = "hub")]
            _ if !is_offline(variable) => self.download(variable, &cache, &name),
            // The reader of the weights reports missing weight files.
            (_, Some(snapshot)) if snapshot.join(CONFIG).exists() => Ok(snapshot),
            (_, snapshot) => Err(refusal(&name, absence(&cache, &name, snapshot.as_deref(), variable))),
        }
    }

    #[cfg(feature = "hub")]
    fn download(self, variable: &Variable<'_>, cache: &HubCache, name: &HubName) -> Result<PathBuf> {
        use crate::hub::client::HubClient;
        use crate::hub::download::{Download, FIRST_PAUSE};
        use crate::hub::parts::LARGE_BYTES;
        let Self { with_weights, stop, emit } = self;
        Download { cache, name, with_weights, stop, emit, pause: FIRST_PAUSE, large_bytes: LARGE_BYTES }.run(HubClient::of(variable)?)
    }
}

/// Whether `path` has the form of a model's name on the hub.
pub(crate) fn is_model_name(path: &Path) -> bool {
    path.to_str().and_then(HubName::model).is_some()
}

/// Reads an environment variable.
type Variable<'a> = dyn Fn(&str) -> Option<PathBuf> + 'a;

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The directory in `snapshot` if it is complete enough for a run. Other programs may have downloaded single files of a snapshot.
fn whole(name: &HubName, snapshot: &Path, with_weights: bool) -> Option<PathBuf> {
    let is_model = || snapshot.join(CONFIG).exists() && (!with_weights || holds_weights(snapshot));
    match name.kind {
        RepoKind::Model => is_model().then(|| snapshot.to_path_buf()),
        RepoKind::Dataset => part_dir(snapshot, &name.part),
    }
}

/// Whether all weights are in `snapshot`: in one file, or in every shard that the index names.
fn holds_weights(snapshot: &Path) -> bool {
    let index = || disk::read_if_present(&snapshot.join(INDEX), INDEX_BYTES_MAX).ok().flatten();
    let places = || serde_json::from_slice::<Value>(&index()?).ok()?["weight_map"].as_object().cloned();
    let is_here = |shard: &Value| shard.as_str().is_some_and(|shard| snapshot.join(shard).exists());
    snapshot.join(SINGLE).exists() || places().is_some_and(|places| places.values().all(is_here))
}

fn refusal(name: &HubName, cause: String) -> Error {
    Error::usage(format!("{} {name}: no such directory, and {cause}", name.kind.flag()))
}

/// Describes why the cache has no usable snapshot, and the command that downloads one.
fn absence(cache: &HubCache, name: &HubName, found: Option<&Path>, variable: &Variable<'_>) -> String {
    let (root, fetch) = (cache.root.display(), format!("hf download {}", name.arguments()));
    let offline = if is_offline(variable) { " (HF_HUB_OFFLINE is set)" } else { "" };
    match found {
        Some(snapshot) => {
            let lack = if name.kind == RepoKind::Model { CONFIG.into() } else { format!("config/{}/*.parquet", name.part.split) };
            format!("its files in the cache, {}, lack {lack}; complete them: {fetch}{offline}", snapshot.display())
        }
        None if cache.holds(name) => {
            format!("the Hugging Face cache {root} has other revisions of it; download this one: {fetch}{offline}")
        }
        None => format!("not in the Hugging Face cache {root}; download it: {fetch}{offline}"),
    }
}

/// Whether `HF_HUB_OFFLINE` is set, with the same values that `huggingface_hub` accepts.
fn is_offline(variable: &Variable<'_>) -> bool {
    let value = variable("HF_HUB_OFFLINE").and_then(|value| value.into_os_string().into_string().ok());
    value.is_some_and(|value| ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_directory_wins_then_the_cache_and_missing_names_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let offline = |name: &str| match name {
            "HF_HUB_CACHE" => Some(dir.path().into()),
            "HF_HUB_OFFLINE" => Some("1".into()),
            _ => None,
        };
        let find = |model: &str, with_weights| {
            HubQuery { with_weights, stop: &StopFlag::default(), emit: &mut |_| panic!("nothing is downloaded") }.find(
                &offline,
                Path::new(model),
                HubName::model,
            )
        };
        let refused = |model: &str| {
            let error = find(model, false).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        };
        let cause = format!("no such directory, and not in the Hugging Face cache {}; ", dir.path().display());
        let message =
            format!("--model meta-llama/Llama-3.1-8B: {cause}download it: hf download meta-llama/Llama-3.1-8B (HF_HUB_OFFLINE is set)");
        assert_eq!(refused("meta-llama/Llama-3.1-8B"), message);
        assert!(refused("a/b@v1").contains("download it: hf download a/b --revision v1"));
        let commit = "a".repeat(40);
        let (snapshot, by_commit) = (dir.path().join("models--a--b/snapshots").join(&commit), format!("a/b@{commit}"));
        fs::create_dir_all(&snapshot).unwrap();
        assert!(refused(&by_commit).contains("lack config.json; complete them: hf download a/b --revision aaaa"));
        assert!(refused("a/b").contains("has other revisions of it; download this one: hf download a/b"));
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        for with_weights in [false, true] {
            assert_eq!(find(&by_commit, with_weights).unwrap(), snapshot);
        }
        let find_whole = || whole(&HubName::model(&by_commit).unwrap(), &snapshot, true);
        assert_eq!(find_whole(), None);
        fs::write(snapshot.join(INDEX), r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#).unwrap();
        for (shard, expected) in [("model-1.safetensors", None), ("model-2.safetensors", Some(snapshot.clone()))] {
            fs::write(snapshot.join(shard), "").unwrap();
            assert_eq!(find_whole(), expected, "{shard}");
        }
        for path in ["/no/where", "../model", "nowhere", "a/b/c", "src/hub"] {
            assert_eq!(find(path, false).unwrap(), Path::new(path), "a path, which its reader judges");
        }
        let query = HubQuery { with_weights: false, stop: &StopFlag::default(), emit: &mut |_| () };
        assert!(query.find(&|_| None, Path::new("a/b"), HubName::model).unwrap_err().to_string().contains("set HF_HOME or HOME"));
    }
}
