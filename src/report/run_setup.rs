//! What a run learned with and from, as its newest checkpoint says, or its metrics where it has none.

use crate::checkpoint;
use crate::error::Result;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The settings of a run, and what they came to.
pub(super) struct RunSetup {
    /// The settings, as JSON.
    pub(super) settings: Value,
    /// Model, tokenizer, data and more, as JSON.
    pub(super) run: Value,
    pub(super) params: u64,
    pub(super) max_steps: u64,
    /// Where the model's files were: the checkpoint's copies of them, or the model that the settings name.
    pub(super) model_dir: Option<PathBuf>,
}

impl RunSetup {
    /// What the checkpoint in `path` says.
    ///
    /// # Errors
    /// Whatever is wrong with it, as far as its manifest and sizes tell.
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

    /// What a run without a checkpoint says of itself in its metrics.
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
