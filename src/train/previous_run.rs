//! A fresh run in a directory that already holds one: the old one is moved aside, never overwritten, so that "newest
//! checkpoint" always means this run's.

use crate::error::{Error, Result};
use std::fs;
use std::path::Path;

/// Moves checkpoints and metrics of an earlier run into `previous-<n>/`. Returns a line for people when there were any.
///
/// # Errors
/// `Io` when the directory cannot be listed or written.
pub(super) fn move_aside(output_dir: &Path) -> Result<Option<String>> {
    let listed = fs::read_dir(output_dir).map_err(|e| Error::io("list", output_dir, e))?;
    let names: Vec<_> = listed.flatten().map(|entry| entry.file_name()).filter(|name| is_output(&name.to_string_lossy())).collect();
    if !names.iter().any(|name| name.to_string_lossy().starts_with("checkpoint-")) {
        return Ok(None);
    }
    let free = (1..).map(|n| output_dir.join(format!("previous-{n}"))).find(|dir| !dir.exists());
    let Some(target) = free else { return Ok(None) };
    fs::create_dir(&target).map_err(|e| Error::io("create", &target, e))?;
    for name in &names {
        fs::rename(output_dir.join(name), target.join(name)).map_err(|e| Error::io("move to", target.join(name), e))?;
    }
    Ok(Some(format!("{} holds the earlier run that was here; --resume-from-checkpoint auto would have continued it", target.display())))
}

fn is_output(name: &str) -> bool {
    name.starts_with("checkpoint-") || name == "metrics.jsonl" || name == "trace.json"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_run_is_moved_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        assert_eq!(move_aside(dir.path()).unwrap(), None);
        for run in 1..=2 {
            fs::create_dir(path("checkpoint-5")).unwrap();
            fs::write(path("metrics.jsonl"), run.to_string()).unwrap();
            fs::write(path("notes.txt"), "mine").unwrap();
            assert!(move_aside(dir.path()).unwrap().is_some());
            assert!(!path("checkpoint-5").exists() && path("notes.txt").exists());
            assert_eq!(fs::read_to_string(path(&format!("previous-{run}/metrics.jsonl"))).unwrap(), run.to_string());
        }
    }
}
