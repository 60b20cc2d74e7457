//! The record of a run as options: `resume` and `sample` need its directory and nothing else.

use super::identity::DIRECTORY;
use crate::checkpoint::{self, Check, Loaded, is_checkpoint};
use crate::config::options::Resume;
use crate::config::settings::{KEYS, Settings, TrainOptions};
use crate::describe;
use crate::error::{Error, Result};
use clap::{Args, Command, FromArgMatches};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Settings of one start, which do not apply to the next one.
const OF_A_START: [&str; 6] = ["output_dir", "resume_from_checkpoint", "allow_changed", "dry_run", "process", "trace"];
/// Settings that follow from the checkpoint itself: how its steps are cut, on any number of devices.
const OF_THE_CHECKPOINT: [&str; 3] = ["gradient_accumulation_steps", "gradient_shares", "gradient_group"];
/// Settings that are paths; a profile may be a name, too.
const PATHS: [&str; 7] = ["model", "data", "eval_data", "chat_template", "cuda_libraries", "run_token_file", "prompts"];
/// Flags that decide together: where one of them is given, the record is silent on all.
const DECIDED_TOGETHER: [&[&str]; 4] = [
    &["max_steps", "num_train_epochs"],
    &["warmup_steps", "warmup_ratio"],
    &["tokens_per_step", "per_device_train_batch_size"],
    &["eval_data", "eval_split"],
];

/// A checkpoint, and the output directory of its run.
pub(crate) struct RecordedRun {
    pub(crate) loaded: Loaded,
    /// The output directory; `None` where the checkpoint itself was named.
    output_dir: Option<PathBuf>,
}

impl RecordedRun {
    /// The run in `dir`, an output directory or a checkpoint in it that passes `check`. Damaged checkpoints are named by the run that passes
    /// over them.
    ///
    /// # Errors
    /// `Format` when `dir` holds no good checkpoint; `Io` when it cannot be read.
    pub(crate) fn open(dir: &Path, check: Check) -> Result<Self> {
        let (path, _) = checkpoint::find(dir, check)?;
        let output_dir = (!is_checkpoint(dir)).then(|| dir.to_path_buf());
        Ok(Self { loaded: checkpoint::open(&path)?, output_dir })
    }

    /// The options that the run was started with, over which `flags` win: they go on with it, in its own directory.
    ///
    /// # Errors
    /// `Usage` for a flag that names another directory or checkpoint; `Format` for a record that no program of this version writes.
    pub(crate) fn resumed(&self, flags: TrainOptions) -> Result<TrainOptions> {
        for flag in ["output_dir", "resume_from_checkpoint"] {
            if flags.explicit_flags().contains(&flag) {
                let cause = "resume continues from the directory in its argument; leave the flag out";
                return Err(Error::usage(format!("--{}: {cause}", describe::flag_name(flag))));
            }
        }
        let options = self.options(flags)?;
        let checkpoint = self.loaded.dir();
        let parent = checkpoint.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let (output_dir, from) = match &self.output_dir {
            Some(dir) => (dir.clone(), Resume::Auto),
            None => (parent.to_path_buf(), Resume::Dir(checkpoint.to_path_buf())),
        };
        Ok(TrainOptions { output_dir: Some(output_dir), resume_from_checkpoint: Some(from), ..options })
    }

    /// `flags` over the options that the run was started with.
    ///
    /// # Errors
    /// `Format` for a record that no program of this version writes.
    pub(crate) fn options(&self, flags: TrainOptions) -> Result<TrainOptions> {
        let settings = self.loaded.manifest().trainer.settings.as_object().cloned().unwrap_or_default();
        let settings = self.with_copies(self.with_paths_from_here(settings));
        let text = flags.explicit_flags();
        let is_decided =
            |flag: &str| DECIDED_TOGETHER.iter().any(|group| group.contains(&flag) && group.iter().any(|other| text.contains(other)));
        let is_left_out = |name: &str| OF_A_START.contains(&name) || OF_THE_CHECKPOINT.contains(&name) || Settings::is_file_only(name);
        let keys = KEYS.iter().map(|key| key.name).filter(|name| !is_left_out(name));
        let recorded = keys.filter_map(|name| Some((name, settings.get(name).filter(|value| is_set(value))?)));
        let recorded = recorded.filter(|(name, value)| !is_decided(&describe::named(name, value).0.replace('-', "_")));
        let words = recorded.flat_map(|(name, value)| describe::words(name, value));
        let command = TrainOptions::augment_args(Command::new("resume"));
        let parsed = command.try_get_matches_from(["resume".to_string()].into_iter().chain(words));
        let options = parsed.and_then(|matches| TrainOptions::from_arg_matches(&matches));
        let cause = |e: clap::Error| e.to_string().lines().next().unwrap_or_default().to_string();
        Ok(flags.over(options.map_err(|e| Error::format(self.loaded.manifest_path(), cause(e)))?))
    }

    /// The settings with paths that lead from the working directory, wherever that was when the run started.
    fn with_paths_from_here(&self, mut settings: Map<String, Value>) -> Map<String, Value> {
        let directory = self.loaded.manifest().run.get(DIRECTORY).and_then(Value::as_str).map(PathBuf::from);
        let Some(directory) = directory.filter(|then| std::env::current_dir().is_ok_and(|now| now != *then)) else { return settings };
        let join = |path: &mut Value| {
            if let Some(joined) = path.as_str().and_then(|path| directory.join(path).to_str().map(Value::from)) {
                *path = joined;
            }
        };
        for key in PATHS {
            match settings.get_mut(key) {
                Some(Value::Array(all)) => all.iter_mut().for_each(join),
                Some(path) => join(path),
                None => {}
            }
        }
        settings
    }

    /// The settings with the checkpoint's copy of the model's files, where the model or the chat template is gone.
    fn with_copies(&self, mut settings: Map<String, Value>) -> Map<String, Value> {
        let is_gone = |key: &str| settings.get(key).and_then(Value::as_str).is_some_and(|path| !Path::new(path).exists());
        if is_gone("model") || is_gone("chat_template") {
            let copies = self.loaded.model_dir().to_str().map(Value::from);
            copies.and_then(|copies| settings.insert("model".into(), copies));
            settings.remove("chat_template");
        }
        settings
    }
}

/// Whether a flag can express `value`.
fn is_set(value: &Value) -> bool {
    !value.is_null() && value.as_array().is_none_or(|all| !all.is_empty())
}
