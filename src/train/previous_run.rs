//! A run begins at some step in a directory that may hold more: an earlier run, or the abandoned end of this one. That is
//! moved aside, never overwritten, so that "newest checkpoint" always means this run's.

use super::event_file::EVENTS;
use super::metrics_file::METRICS;
use super::run_dir::TRACE;
use crate::disk::{Dir, FileKind};
use crate::error::Result;
use crate::units::Bytes;
use std::ffi::OsString;
use std::path::Path;

/// What earlier runs hold in all before a person is told.
const WORTH_TELLING: u64 = 1 << 30;

/// Moves all that has the name of a checkpoint after `step`, be it a directory, a link or a file, into `previous-<n>/`, metrics,
/// timeline and events too when the run is fresh (`step` 0). Returns a line for people when there were any.
///
/// # Errors
/// `Io` when the directory cannot be listed or written.
pub(super) fn move_aside(output_dir: &Dir, step: u64) -> Result<Option<String>> {
    let mut names = output_dir.names()?;
    names.retain(|name| is_later(&name.to_string_lossy(), step));
    // A timeline or events alone, or metrics without a line, are what a run leaves that never began.
    let has_content = |name: &OsString| {
        let says_little = name == TRACE || name == EVENTS;
        Ok(!says_little && (name != METRICS || output_dir.kind(name)? != Some(FileKind::File(0))))
    };
    if !names.iter().map(has_content).collect::<Result<Vec<_>>>()?.contains(&true) {
        return Ok(None);
    }
    let target = next_free(output_dir)?;
    names.iter().try_for_each(|name| output_dir.rename_into(name, &target, name))?;
    let what =
        if step == 0 { "the earlier run that was here".into() } else { format!("checkpoints after step {step}, where this run goes on") };
    Ok(Some(format!("moved to {}: {what}{}", target.path().display(), size_of_all(output_dir)?)))
}

fn is_later(name: &str, step: u64) -> bool {
    match name.strip_prefix("checkpoint-") {
        Some(number) => number.parse().is_ok_and(|saved: u64| saved > step),
        None => step == 0 && [METRICS, TRACE, EVENTS].contains(&name),
    }
}

/// A new directory `previous-<n>`.
fn next_free(output_dir: &Dir) -> Result<Dir> {
    let mut number = 1u64;
    while output_dir.kind(format!("previous-{number}"))?.is_some() {
        number += 1;
    }
    output_dir.create_dir(format!("previous-{number}"))
}

/// What all earlier runs take, if that is worth a word: nobody else removes them.
fn size_of_all(output_dir: &Dir) -> Result<String> {
    let names = output_dir.names()?.into_iter().filter(|name| name.to_string_lossy().starts_with("previous-"));
    let bytes = names.map(|name| output_dir.tree_bytes(Path::new(&name))).sum::<Result<u64>>()?;
    Ok(if bytes > WORTH_TELLING { format!(" (all previous-* there: {})", Bytes(bytes)) } else { String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn aside(dir: &Path, step: u64) -> Option<String> {
        move_aside(&Dir::open(dir).unwrap(), step).unwrap()
    }

    #[test]
    fn an_earlier_run_is_moved_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        assert_eq!(aside(dir.path(), 0), None);
        for run in 1..=2 {
            fs::create_dir(path("checkpoint-5")).unwrap();
            fs::write(path("metrics.jsonl"), run.to_string()).unwrap();
            fs::write(path("notes.txt"), "mine").unwrap();
            assert!(aside(dir.path(), 0).unwrap().ends_with(&format!("previous-{run}: the earlier run that was here")));
            assert!(!path("checkpoint-5").exists() && path("notes.txt").exists());
            assert_eq!(fs::read_to_string(path(&format!("previous-{run}/metrics.jsonl"))).unwrap(), run.to_string());
        }
    }

    #[test]
    fn a_resumed_run_keeps_what_it_stands_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-x"].iter().for_each(|name| fs::create_dir(path(name)).unwrap());
        fs::write(path("metrics.jsonl"), "").unwrap();
        assert!(aside(dir.path(), 4).is_some());
        let kept = ["checkpoint-2", "checkpoint-4", "checkpoint-x", "metrics.jsonl", "previous-1/checkpoint-6"];
        assert!(kept.iter().all(|name| path(name).exists()) && !path("checkpoint-6").exists());
        assert_eq!(aside(dir.path(), 4), None);
    }

    #[test]
    fn names_that_a_checkpoint_could_not_take_are_moved_whatever_they_are() {
        for make in [
            |path: &Path| symlink("/nowhere", path).unwrap(),
            |path: &Path| symlink("checkpoint-4", path).unwrap(),
            |path: &Path| fs::write(path, "a file").unwrap(),
            |path: &Path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
        ] {
            let dir = tempfile::tempdir().unwrap();
            make(&dir.path().join("checkpoint-4"));
            assert!(aside(dir.path(), 2).is_some());
            assert!(dir.path().join("checkpoint-4").symlink_metadata().is_err());
            assert!(dir.path().join("previous-1/checkpoint-4").symlink_metadata().is_ok());
        }
    }

    #[test]
    fn what_earlier_runs_take_is_told_from_a_gibibyte_on() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("previous-7/checkpoint-1")).unwrap();
        fs::File::create(dir.path().join("previous-7/checkpoint-1/state.bin")).unwrap().set_len(3 << 30).unwrap();
        fs::create_dir(dir.path().join("checkpoint-1")).unwrap();
        let printed = aside(dir.path(), 0).unwrap();
        assert!(printed.contains("previous-1: ") && printed.ends_with("(all previous-* there: 3.0 GiB)"), "{printed}");
    }
}
