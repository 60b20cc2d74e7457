//! Models by their name on the Hugging Face hub: [`name`] is what they are called, [`cache`] where their files lie on this machine.

pub(crate) mod cache;
mod name;

use crate::error::{Error, Result};
use cache::HubCache;
use name::HubName;
use std::path::{Path, PathBuf};

/// The directory that `--model` means: what lies at that path, else what the cache has of that name. Anything else is left to whoever
/// opens it.
///
/// # Errors
/// `Usage` for a name that is neither.
pub(crate) fn find_model(model: &Path) -> Result<PathBuf> {
    find_in(HubCache::of(variable), model)
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn find_in(cache: Option<HubCache>, model: &Path) -> Result<PathBuf> {
    let is_there = model.symlink_metadata().is_ok();
    let Some(name) = model.to_str().filter(|_| !is_there).and_then(HubName::parse) else { return Ok(model.into()) };
    let fetch = format!("hf download {}", fetched(&name));
    let refused = |why: String| Err(Error::usage(format!("--model {name}: no such directory, and {why}")));
    let Some(cache) = cache else { return refused("neither HF_HOME nor HOME says where the Hugging Face cache is".into()) };
    let root = cache.root.display();
    match cache.find(&name)? {
        Some(snapshot) if snapshot.join(crate::model_dir::CONFIG).exists() => Ok(snapshot),
        Some(snapshot) => refused(format!("its files in the cache, {}, lack config.json; complete them: {fetch}", snapshot.display())),
        None if cache.holds(&name) => refused(format!("the Hugging Face cache {root} has other revisions of it; {fetch}")),
        None => refused(format!("not in the Hugging Face cache {root}; download it: {fetch}")),
    }
}

/// The arguments of the command that downloads `name`.
fn fetched(HubName { repo, revision }: &HubName) -> String {
    if HubName::parse(repo).is_some_and(|plain| plain.revision == *revision) {
        repo.clone()
    } else {
        format!("{repo} --revision {revision}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_directory_wins_then_the_cache_and_what_is_neither_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let find = |model: &str| find_in(Some(HubCache { root: dir.path().into() }), Path::new(model));
        let refused = |model: &str| {
            let error = find(model).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        };
        let cause = format!("no such directory, and not in the Hugging Face cache {}; ", dir.path().display());
        let whole = refused("meta-llama/Llama-3.1-8B");
        assert_eq!(whole, format!("--model meta-llama/Llama-3.1-8B: {cause}download it: hf download meta-llama/Llama-3.1-8B"));
        assert!(refused("a/b@v1").ends_with("download it: hf download a/b --revision v1"));
        let commit = "a".repeat(40);
        let snapshot = dir.path().join("models--a--b/snapshots").join(&commit);
        fs::create_dir_all(&snapshot).unwrap();
        assert!(refused(&format!("a/b@{commit}")).contains("lack config.json; complete them: hf download a/b --revision aaaa"));
        assert!(refused("a/b").contains("has other revisions of it; hf download a/b"), "{}", refused("a/b"));
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        assert_eq!(find(&format!("a/b@{commit}")).unwrap(), snapshot);
        for path in ["/no/where", "../model", "nowhere", "a/b/c", "src/hub"] {
            assert_eq!(find(path).unwrap(), Path::new(path), "a path, which its reader judges");
        }
        assert!(find_in(None, Path::new("a/b")).unwrap_err().to_string().contains("neither HF_HOME nor HOME"));
    }
}
