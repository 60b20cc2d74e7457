//! What an output directory holds of its run: metrics, checkpoints, and what the newest of these says about model and settings.

use super::history::History;
use super::run_setup::RunSetup;
use super::samples::DataSamples;
use super::timeline::DrawnStep;
use crate::disk::{Dir, FileKind};
use crate::error::{Error, Result};
use crate::trace::file::TRACE;
use serde_json::Value;
use std::cmp::Reverse;
use std::path::Path;

/// Checkpoints that are looked into, the newest ones.
const CHECKPOINTS_READ: usize = 20;

/// A checkpoint in the directory.
pub(super) struct SavedStep {
    pub(super) step: u64,
    pub(super) bytes: u64,
    /// Why it cannot be used, if it cannot.
    pub(super) damage: Option<String>,
}

/// A run that was, or still is.
pub(super) struct PastRun {
    /// The directory's name.
    pub(super) name: String,
    pub(super) history: History,
    pub(super) setup: Option<RunSetup>,
    /// Newest first, and how many older ones there are.
    pub(super) checkpoints: Vec<SavedStep>,
    pub(super) older_checkpoints: usize,
    pub(super) has_timeline: bool,
    /// A typical step and the slowest one, where the timeline tells.
    pub(super) drawn_steps: Vec<DrawnStep>,
    /// Documents of its data, where somebody asked for them.
    pub(super) samples: Option<DataSamples>,
}

impl PastRun {
    /// Reads the run in `path`, and changes nothing in it.
    ///
    /// # Errors
    /// `Usage` when it is no output directory of a run; `Io` when it cannot be read.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let dir = Dir::open(path)?;
        let (history, mut steps) = (History::read(&dir)?, checkpoint_steps(&dir)?);
        if history.is_none() && steps.is_empty() {
            let cause = "not the output directory of a run: it holds neither metrics.jsonl nor a checkpoint";
            return Err(Error::usage(format_args!("report {}: {cause}", path.display())));
        }
        steps.sort_unstable_by_key(|&step| Reverse(step));
        let (mut checkpoints, mut setup) = (Vec::new(), None);
        for &step in steps.iter().take(CHECKPOINTS_READ) {
            let name = format!("checkpoint-{step}");
            let found = RunSetup::of_checkpoint(&dir.join(&name));
            let damage = found.as_ref().err().map(ToString::to_string);
            setup = setup.or(found.ok());
            checkpoints.push(SavedStep { step, bytes: dir.tree_bytes(&name).unwrap_or(0), damage });
        }
        let setup = setup.or_else(|| history.as_ref().and_then(|history| RunSetup::of_facts(&history.facts)));
        let has_timeline = matches!(dir.kind(TRACE.pattern)?, Some(FileKind::File(_)));
        Ok(Self {
            name: name_of(path),
            history: history.unwrap_or_default(),
            setup,
            older_checkpoints: steps.len() - checkpoints.len(),
            checkpoints,
            has_timeline,
            drawn_steps: if has_timeline { DrawnStep::of_run(&dir)? } else { Vec::new() },
            samples: None,
        })
    }

    /// A value of the setup's JSON, such as `settings` `model`; null where nothing is known.
    pub(super) fn setting(&self, key: &str) -> &Value {
        self.setup.as_ref().map_or(&Value::Null, |setup| &setup.settings[key])
    }

    /// A part of what the run learned with and from.
    pub(super) fn part(&self, key: &str) -> &Value {
        self.setup.as_ref().map_or(&Value::Null, |setup| &setup.run[key])
    }
}

fn name_of(path: &Path) -> String {
    let named = path.canonicalize().ok().and_then(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()));
    named.unwrap_or_else(|| path.display().to_string())
}

fn checkpoint_steps(dir: &Dir) -> Result<Vec<u64>> {
    let names = dir.names()?;
    Ok(names.iter().filter_map(|name| name.to_str()?.strip_prefix("checkpoint-")?.parse().ok()).collect())
}
