//! Which directories are checkpoints that the program made, whole or not, and their removal: file by file, so that foreign files in
//! them stay.

use super::format::{MANIFEST, MANIFEST_HEAD, MODEL, Manifest, STATE};
use super::state_parts::is_file_name;
use crate::disk::{Dir, FileKind, OwnMark, OwnedName};
use crate::error::{Error, Result};
use crate::model_dir::ADDITIONAL_TEMPLATES;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// A checkpoint.
pub(crate) const CHECKPOINT: OwnedName = OwnedName { pattern: "checkpoint-#", kind: "checkpoint", mark: OwnMark::Folder(is_checkpoint) };
/// One that is being written.
pub(crate) const BEING_WRITTEN: OwnedName = OwnedName { pattern: ".checkpoint-#.tmp-#", ..CHECKPOINT };
/// One that was moved aside while another takes its name.
pub(crate) const BEING_REPLACED: OwnedName = OwnedName { pattern: ".checkpoint-#.old-#", ..CHECKPOINT };
/// One that is being removed.
pub(crate) const BEING_REMOVED: OwnedName = OwnedName { pattern: ".checkpoint-#.del-#", ..CHECKPOINT };
/// Shows that several processes have one file system.
pub(super) const MEETING: &str = "meeting";

/// The name of the checkpoint of `step`.
pub(super) fn published(step: u64) -> String {
    CHECKPOINT.pattern.replace('#', &step.to_string())
}

/// It has a manifest, or only files that are written before the manifest.
fn is_checkpoint(dir: &Dir) -> Result<bool> {
    let manifest = OwnedName { pattern: MANIFEST, kind: "manifest", mark: OwnMark::Head(MANIFEST_HEAD) };
    if dir.kind(MANIFEST)?.is_some_and(|kind| kind != FileKind::File(0)) && manifest.is_own(dir, MANIFEST)? {
        return Ok(true);
    }
    let is_part = |name: &OsStr| {
        Ok(match dir.kind(name)? {
            Some(FileKind::File(_)) => is_own_file(name),
            Some(FileKind::Dir) => name == MODEL,
            _ => false,
        })
    };
    dir.names()?.iter().map(|name| is_part(name)).try_fold(true, |all, part: Result<bool>| Ok(all && part?))
}

fn is_own_file(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| [MANIFEST, STATE, MEETING].contains(&name) || is_file_name(name))
}

/// Removes the checkpoint at `name`, or the remains of one of `step`. Foreign files in it stay, as `checkpoint-<step>.foreign-<n>`,
/// which the returned line reports. The manifest goes first: from then on it is no checkpoint.
///
/// # Errors
/// `Io` when it cannot be removed; `Format` where it is none of the program's.
pub(super) fn remove(output_dir: &Dir, name: impl AsRef<Path>, step: u64) -> Result<Option<String>> {
    let name = name.as_ref();
    if !CHECKPOINT.is_own(output_dir, name)? {
        return Err(Error::format(output_dir.join(name), "not removed: no run of this program made it"));
    }
    if output_dir.remove_listed(name, &files(&output_dir.open_dir(name)?)?)? {
        return Ok(None);
    }
    let aside = output_dir.set_aside_as(name, OsStr::new(&published(step)))?;
    let kept = output_dir.join(aside);
    Ok(Some(format!("{}: kept, because no run of this program wrote it; the rest of checkpoint-{step} was removed", kept.display())))
}

/// The program's files in a checkpoint, as paths in it.
fn files(dir: &Dir) -> Result<Vec<PathBuf>> {
    let manifest = Manifest::read(dir.path()).ok();
    let model: Option<BTreeSet<String>> = manifest.map(|manifest| manifest.files.into_iter().map(|file| file.name).collect());
    let is_model = |name: &str| model.as_ref().is_none_or(|model| model.contains(name));
    let mut files = regular(dir, is_own_file)?;
    files.sort_by_key(|name| name != Path::new(MANIFEST));
    if dir.kind(MODEL)? == Some(FileKind::Dir) {
        files.extend(model_files(&dir.open_dir(MODEL)?, is_model)?.iter().map(|name| Path::new(MODEL).join(name)));
    }
    Ok(files)
}

/// The files in the directory of a model, and in its folder of additional chat templates, whose names in it are wanted.
pub(super) fn model_files(dir: &Dir, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let is_model = |folder: &str, name: &OsStr| name.to_str().is_some_and(|name| is_wanted(&format!("{folder}{name}")));
    let mut files = regular(dir, |name| is_model("", name))?;
    if dir.kind(ADDITIONAL_TEMPLATES)? == Some(FileKind::Dir) {
        let templates = regular(&dir.open_dir(ADDITIONAL_TEMPLATES)?, |name| is_model(&format!("{ADDITIONAL_TEMPLATES}/"), name))?;
        files.extend(templates.iter().map(|name| Path::new(ADDITIONAL_TEMPLATES).join(name)));
    }
    Ok(files)
}

fn regular(dir: &Dir, is_wanted: impl Fn(&OsStr) -> bool) -> Result<Vec<PathBuf>> {
    let mut files = vec![];
    for name in dir.names()?.into_iter().filter(|name| is_wanted(name)) {
        if matches!(dir.kind(&name)?, Some(FileKind::File(_))) {
            files.push(name.into());
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn parts_of_a_checkpoint_are_known_and_other_folders_of_its_name_are_not() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, path) = (Dir::open(tmp.path()).unwrap(), tmp.path().join("checkpoint-4"));
        let own = || CHECKPOINT.is_own(&dir, "checkpoint-4").unwrap();
        assert!(!own());
        fs::create_dir(&path).unwrap();
        assert!(own(), "a run was killed before it wrote a byte");
        for part in ["state.bin", "state-3.bin", "meeting"] {
            fs::write(path.join(part), "x").unwrap();
        }
        fs::create_dir(path.join("model")).unwrap();
        assert!(own());
        fs::write(path.join("thesis.tex"), "x").unwrap();
        assert!(!own() && remove(&dir, "checkpoint-4", 4).is_err() && path.join("state.bin").exists());
        fs::write(path.join("trainer_state.json"), "{\"global_step\": 4}").unwrap();
        assert!(!own(), "another trainer's");
        fs::write(path.join("trainer_state.json"), "{\"manifest\":{").unwrap();
        assert!(own(), "damaged, and the program's");
        fs::rename(&path, tmp.path().join("elsewhere")).unwrap();
        symlink("elsewhere", &path).unwrap();
        assert!(!own());
    }

    #[test]
    fn foreign_files_in_a_checkpoint_outlive_it() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, path) = (Dir::open(tmp.path()).unwrap(), tmp.path().join("checkpoint-4"));
        fs::create_dir_all(path.join("model")).unwrap();
        fs::write(path.join("trainer_state.json"), "{\"manifest\":{").unwrap();
        fs::write(path.join("state.bin"), "x").unwrap();
        fs::write(path.join("notes.txt"), "mine").unwrap();
        symlink("/nowhere", path.join("model/link")).unwrap();
        let line = remove(&dir, "checkpoint-4", 4).unwrap().unwrap();
        let kept = tmp.path().join("checkpoint-4.foreign-1");
        assert!(line.contains("checkpoint-4.foreign-1: kept") && fs::read_to_string(kept.join("notes.txt")).unwrap() == "mine", "{line}");
        assert!(kept.join("model/link").is_symlink() && !kept.join("state.bin").exists() && !path.exists());
    }
}
