//! Model, data and settings of a run, from its newest checkpoint, or from its metrics if it has no checkpoint.

use crate::checkpoint;
use crate::error::Result;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Settings of a run, and values derived from them.
pub(super) struct RunSetup {
    /// The settings, as JSON.
    pub(super) settings: Value,
    /// Model, tokenizer, data and more, as JSON.
    pub(super) run: Value,
    pub(super) params: u64,
    pub(super) max_steps: u64,
    /// Directory of the model's files: the checkpoint's copies, or the model of the settings.
    pub(super) model_dir: Option<PathBuf>,
}

impl RunSetup {
    /// Reads the setup from the checkpoint in `path`.
    ///
    /// # Errors
    /// Errors of the checkpoint, as far as its manifest and file sizes show them.
    pub(super) fn of_checkpoint(path: &Path) -> Result<Self> {
        let loaded = checkpoint::open(path)?;
        let manifest = loaded.manifest();
        Ok(Self {
            settings: manifest.trainer.settings.clone(),
            run: Value::Object(manifest.run.clone()),
            params: manifest.tensors.iter().map(|tensor| tensor.elems).sum(),
            max_steps: manifest.trainer.scheduler.max_steps,
            model_dir: Some(loaded.model_dir()),
        })
    }

    /// Reads the setup from the facts in the metrics of a run without a checkpoint.
    pub(super) fn of_facts(facts: &Value) -> Option<Self> {
        let settings = facts.get("settings").filter(|settings| settings.is_object())?;
        Some(Self {
            settings: settings.clone(),
            run: Value::Null,
            params: facts["model"]["params"].as_u64()?,
            max_steps: facts["max_steps"].as_u64()?,
            model_dir: settings["model"].as_str().map(PathBuf::from),
        })
    }
}
