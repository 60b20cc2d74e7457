//! A run begins at some step in a directory that may hold more: an earlier run, or the abandoned end of this one. That is
//! moved aside, never overwritten, so that "newest checkpoint" always means this run's.

use crate::error::{Error, Result};
use std::ffi::OsString;
use std::fs;
use std::path::Path;

/// Moves checkpoints after `step` into `previous-<n>/`, and metrics and timeline too when the run is fresh (`step` 0). Returns
/// a line for people when there were any.
///
/// # Errors
/// `Io` when the directory cannot be listed or written.
pub(super) fn move_aside(output_dir: &Path, step: u64) -> Result<Option<String>> {
    let listed = fs::read_dir(output_dir).map_err(|e| Error::io("list", output_dir, e))?;
    let names: Vec<_> = listed.flatten().map(|entry| entry.file_name()).filter(|name| is_later(&name.to_string_lossy(), step)).collect();
    // A timeline alone, or metrics without a line, are what a run leaves that never began.
    let has_content = |name: &OsString| output_dir.join(name).metadata().is_ok_and(|m| m.is_dir() || m.len() > 0);
    if !names.iter().any(|name| name != "trace.json" && has_content(name)) {
        return Ok(None);
    }
    let free = (1..).map(|n| output_dir.join(format!("previous-{n}"))).find(|dir| !dir.exists());
    let Some(target) = free else { return Ok(None) };
    fs::create_dir(&target).map_err(|e| Error::io("create", &target, e))?;
    for name in &names {
        fs::rename(output_dir.join(name), target.join(name)).map_err(|e| Error::io("move to", target.join(name), e))?;
    }
    let what =
        if step == 0 { "the earlier run that was here".into() } else { format!("checkpoints after step {step}, where this run goes on") };
    Ok(Some(format!("moved to {}: {what}", target.display())))
}

fn is_later(name: &str, step: u64) -> bool {
    match name.strip_prefix("checkpoint-") {
        Some(number) => number.parse().is_ok_and(|saved: u64| saved > step),
        None => step == 0 && (name == "metrics.jsonl" || name == "trace.json"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_run_is_moved_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        assert_eq!(move_aside(dir.path(), 0).unwrap(), None);
        for run in 1..=2 {
            fs::create_dir(path("checkpoint-5")).unwrap();
            fs::write(path("metrics.jsonl"), run.to_string()).unwrap();
            fs::write(path("notes.txt"), "mine").unwrap();
            assert!(move_aside(dir.path(), 0).unwrap().is_some());
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
        assert!(move_aside(dir.path(), 4).unwrap().is_some());
        let kept = ["checkpoint-2", "checkpoint-4", "checkpoint-x", "metrics.jsonl", "previous-1/checkpoint-6"];
        assert!(kept.iter().all(|name| path(name).exists()) && !path("checkpoint-6").exists());
        assert_eq!(move_aside(dir.path(), 4).unwrap(), None);
    }
}
