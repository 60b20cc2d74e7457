//! A run begins at some step in a directory that may hold more: an earlier run, or the abandoned end of this one. That is
//! moved aside, never overwritten, so that "newest checkpoint" always means this run's. Foreign content that would be taken for a
//! checkpoint gets another name.

use super::sinks::SINKS;
use crate::checkpoint::CHECKPOINT;
use crate::disk::{Dir, FileKind, OwnedName};
use crate::error::Result;
use crate::trace::file::TRACE;
use crate::units::Bytes;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Total bytes of earlier runs from which on they are reported.
const LOGGED_BYTES_MIN: u64 = 1 << 30;

/// Moves checkpoints after `step` into `previous-<n>/`, metrics, timeline and events too when the run is fresh (`step` 0). Content with the
/// name of a later checkpoint that the program did not make (a directory, a link or a file) becomes `<name>.foreign-<n>`. Returns lines
/// for people.
///
/// # Errors
/// `Io` when the directory cannot be listed or written.
pub(super) fn move_aside(output_dir: &Dir, step: u64) -> Result<Vec<String>> {
    let (mut own, mut lines) = (vec![], vec![]);
    for name in output_dir.names()? {
        match later(&name, step) {
            Some(owned) if owned.is_own(output_dir, &name)? => own.push(name),
            Some(owned) if owned.pattern == CHECKPOINT.pattern => {
                let aside = output_dir.set_aside(&name)?;
                let path = output_dir.join(&name);
                lines.push(format!("{}: not a checkpoint of this program; it is now {}", path.display(), aside.display()));
            }
            _ => {}
        }
    }
    lines.extend(move_own(output_dir, &own, step)?);
    Ok(lines)
}

fn move_own(output_dir: &Dir, names: &[OsString], step: u64) -> Result<Option<String>> {
    // A run that never began leaves only a timeline, optional sinks, or required ones that are empty.
    let has_content = |name: &OsString| {
        let sink = SINKS.into_iter().find(|kind| kind.name.matches(name));
        let is_secondary = TRACE.matches(name) || sink.is_some_and(|kind| !kind.is_required());
        Ok(!is_secondary && (sink.is_none() || output_dir.kind(name)? != Some(FileKind::File(0))))
    };
    if !names.iter().map(has_content).collect::<Result<Vec<_>>>()?.contains(&true) {
        return Ok(None);
    }
    let target = next_free(output_dir)?;
    names.iter().try_for_each(|name| output_dir.rename_into(name, &target, name))?;
    let reached = if step == 0 {
        "the earlier run that was here".into()
    } else {
        format!("checkpoints after step {step}, from which this run continues")
    };
    Ok(Some(format!("moved to {}: {reached}{}", target.path().display(), size_of_all(output_dir)?)))
}

/// The owned name that `name` matches, if its content comes after `step`.
fn later(name: &OsStr, step: u64) -> Option<&'static OwnedName> {
    if CHECKPOINT.matches(name) {
        let number = name.to_str()?.strip_prefix("checkpoint-")?.parse::<u64>();
        return number.is_ok_and(|saved| saved > step).then_some(&CHECKPOINT);
    }
    SINKS.into_iter().map(|kind| kind.name).chain([&TRACE]).find(|owned| step == 0 && owned.matches(name))
}

/// A new directory `previous-<n>`.
fn next_free(output_dir: &Dir) -> Result<Dir> {
    let mut number = 1u64;
    while output_dir.kind(format!("previous-{number}"))?.is_some() {
        number += 1;
    }
    output_dir.create_dir(format!("previous-{number}"))
}

/// The size of all earlier runs, if large enough to report: the program never removes them.
fn size_of_all(output_dir: &Dir) -> Result<String> {
    let names = output_dir.names()?.into_iter().filter(|name| name.to_string_lossy().starts_with("previous-"));
    let bytes = names.map(|name| output_dir.tree_bytes(Path::new(&name))).sum::<Result<u64>>()?;
    Ok(if bytes > LOGGED_BYTES_MIN { format!(" (all previous-* there: {})", Bytes(bytes)) } else { String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::faults;
    use std::fs;
    use std::os::unix::fs::symlink;

    const LOG: &str = "{\"facts\":{\"from_step\":0}}\n";

    fn aside(dir: &Path, step: u64) -> Vec<String> {
        move_aside(&Dir::open(dir).unwrap(), step).unwrap()
    }

    #[test]
    fn an_earlier_run_is_moved_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        assert_eq!(aside(dir.path(), 0), [""; 0]);
        for run in 1..=2 {
            fs::create_dir(path("checkpoint-5")).unwrap();
            fs::write(path("metrics.jsonl"), format!("{LOG}{run}")).unwrap();
            fs::write(path("notes.txt"), "mine").unwrap();
            let [line] = aside(dir.path(), 0).try_into().unwrap();
            assert!(line.ends_with(&format!("previous-{run}: the earlier run that was here")), "{line}");
            assert!(!path("checkpoint-5").exists() && path("notes.txt").exists());
            assert_eq!(fs::read_to_string(path(&format!("previous-{run}/metrics.jsonl"))).unwrap(), format!("{LOG}{run}"));
        }
    }

    #[test]
    fn a_run_in_the_lower_layer_of_an_overlay_is_copied_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for folder in ["checkpoint-5/model", "checkpoint-7", "tb"] {
            fs::create_dir_all(path(folder)).unwrap();
        }
        fs::write(path("checkpoint-5/model/config.json"), "{}").unwrap();
        fs::write(path("metrics.jsonl"), LOG).unwrap();
        faults::arm_overlay(["checkpoint-5", "checkpoint-7", "tb"].map(path).into());
        let lines = aside(dir.path(), 0);
        faults::disarm();
        assert!(lines[0].ends_with("previous-1: the earlier run that was here"), "{lines:?}");
        assert_eq!(fs::read_to_string(path("previous-1/checkpoint-5/model/config.json")).unwrap(), "{}");
        assert!(path("previous-1/checkpoint-7").is_dir() && path("previous-1/tb").is_dir());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_resumed_run_keeps_its_base_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-x"].iter().for_each(|name| fs::create_dir(path(name)).unwrap());
        fs::write(path("metrics.jsonl"), "").unwrap();
        assert_eq!(aside(dir.path(), 4).len(), 1);
        let kept = ["checkpoint-2", "checkpoint-4", "checkpoint-x", "metrics.jsonl", "previous-1/checkpoint-6"];
        assert!(kept.iter().all(|name| path(name).exists()) && !path("checkpoint-6").exists());
        assert_eq!(aside(dir.path(), 4), [""; 0]);
    }

    #[test]
    fn an_entry_in_the_way_of_a_checkpoint_is_renamed() {
        for make in [
            |path: &Path| symlink("/nowhere", path).unwrap(),
            |path: &Path| symlink("checkpoint-4", path).unwrap(),
            |path: &Path| fs::write(path, "a file").unwrap(),
            |path: &Path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
            |path: &Path| fs::create_dir(path).and_then(|()| fs::write(path.join("thesis.tex"), "mine")).unwrap(),
        ] {
            let dir = tempfile::tempdir().unwrap();
            make(&dir.path().join("checkpoint-4"));
            let [line] = aside(dir.path(), 2).try_into().unwrap();
            assert!(line.ends_with("checkpoint-4: not a checkpoint of this program; it is now checkpoint-4.foreign-1"), "{line}");
            assert!(dir.path().join("checkpoint-4").symlink_metadata().is_err());
            assert!(dir.path().join("checkpoint-4.foreign-1").symlink_metadata().is_ok());
        }
    }

    #[test]
    fn disk_use_of_earlier_runs_is_logged_from_a_gibibyte_on() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("previous-7/checkpoint-1")).unwrap();
        fs::File::create(dir.path().join("previous-7/checkpoint-1/state.bin")).unwrap().set_len(3 << 30).unwrap();
        fs::create_dir(dir.path().join("checkpoint-1")).unwrap();
        let [printed] = aside(dir.path(), 0).try_into().unwrap();
        assert!(printed.contains("previous-1: ") && printed.ends_with("(all previous-* there: 3.0 GiB)"), "{printed}");
    }
}
