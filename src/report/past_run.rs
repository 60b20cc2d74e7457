//! The contents of a run's output directory: metrics, checkpoints, and the model and settings recorded in the newest checkpoint.

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

/// Number of newest checkpoints that are read.
const CHECKPOINTS_READ: usize = 20;

/// A checkpoint in the output directory.
pub(super) struct CheckpointedStep {
    pub(super) step: u64,
    pub(super) bytes: u64,
    /// Why the checkpoint cannot be used, if it is damaged.
    pub(super) damage: Option<String>,
}

/// A finished or running training run.
pub(super) struct PastRun {
    /// Name of the output directory.
    pub(super) name: String,
    pub(super) history: History,
    pub(super) setup: Option<RunSetup>,
    /// The newest checkpoints, newest first, and the number of older ones.
    pub(super) checkpoints: Vec<CheckpointedStep>,
    pub(super) older_checkpoints: usize,
    pub(super) has_timeline: bool,
    /// A typical step and the slowest one, if the timeline has them.
    pub(super) drawn_steps: Vec<DrawnStep>,
    /// Documents of the run's data, if requested.
    pub(super) samples: Option<DataSamples>,
}

impl PastRun {
    /// Reads the run in `path`. Does not change any file.
    ///
    /// # Errors
    /// `Usage` if `path` is not the output directory of a run; `Io` if it cannot be read.
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
            checkpoints.push(CheckpointedStep { step, bytes: dir.tree_bytes(&name).unwrap_or(0), damage });
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

    /// A value of the run's settings, such as `model`; null if unknown.
    pub(super) fn setting(&self, key: &str) -> &Value {
        self.setup.as_ref().map_or(&Value::Null, |setup| &setup.settings[key])
    }

    /// A part of the run's record, such as `model`, `data` or `numerics`; null if unknown.
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
