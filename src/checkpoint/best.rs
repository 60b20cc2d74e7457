//! The best checkpoint of a run, as recorded in its newest one.

use super::owned::published;
use super::{is_checkpoint, newest_by, open};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Key of the evaluations in a checkpoint's `run`.
const EVALUATIONS: &str = "evaluations";

/// The results of a run's evaluations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Evaluations {
    /// The lowest loss.
    pub(crate) lowest: Option<f64>,
    /// Evaluations in a row that did not lower it, or by too little.
    pub(crate) without_improvement: u64,
    /// One is due and was not finished.
    pub(crate) is_due: bool,
    /// Of the checkpoints that were evaluated the best.
    pub(crate) best: Option<Best>,
}

/// A checkpoint and the loss that its evaluation found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Best {
    pub(crate) step: u64,
    pub(crate) eval_loss: f64,
}

impl Evaluations {
    /// Evaluations recorded in `run` of a checkpoint; the default if there are none.
    pub(crate) fn of(run: &Map<String, Value>) -> Self {
        run.get(EVALUATIONS).and_then(|found| Self::deserialize(found).ok()).unwrap_or_default()
    }

    /// `run` with these.
    pub(crate) fn kept_in(&self, mut run: Map<String, Value>) -> Map<String, Value> {
        if *self != Self::default() {
            run.insert(EVALUATIONS.into(), serde_json::to_value(self).unwrap_or_default());
        }
        run
    }
}

/// The best checkpoint of an output directory, not opened yet.
pub(super) struct BestCheckpoint {
    pub(super) path: PathBuf,
    eval_loss: f64,
    /// A line for each newer checkpoint without a good manifest.
    pub(super) warnings: Vec<String>,
}

impl BestCheckpoint {
    /// The error of an output directory `dir` whose best checkpoint has a fault.
    pub(super) fn fault(&self, dir: &Path, fault: &Error) -> Error {
        Error::format(dir, format_args!("the best checkpoint, of eval loss {:.4}, was {}: {fault}", self.eval_loss, self.path.display()))
    }
}

/// The checkpoint in the output directory `dir` that the newest good manifest names as best. The manifest is checked, and no state is read.
///
/// # Errors
/// `Usage` for a directory that is a checkpoint itself; `Format` where no checkpoint is named.
pub(super) fn find_best(dir: &Path) -> Result<BestCheckpoint> {
    if is_checkpoint(dir) {
        return Err(Error::usage(format!("--best: {} is a checkpoint; name its output directory instead", dir.display())));
    }
    let newest = newest_by(dir, |path| Ok(open(path)))?;
    let best = newest.found.and_then(|(_, checkpoint)| Evaluations::of(&checkpoint.manifest().run).best);
    let best = best.ok_or_else(|| Error::format(dir, "no checkpoint here was evaluated; train with --eval-data or --eval-split"))?;
    Ok(BestCheckpoint { path: dir.join(published(best.step)), eval_loss: best.eval_loss, warnings: newest.warnings })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_checkpoint_keeps_results_of_evaluations_and_invalid_ones_are_none() {
        let all = Evaluations { lowest: Some(1.25), without_improvement: 2, is_due: true, best: Some(Best { step: 40, eval_loss: 1.25 }) };
        let run = all.kept_in(Map::from_iter([("other".to_string(), json!(1))]));
        assert_eq!((Evaluations::of(&run), &run["other"]), (all, &json!(1)));
        assert!(Evaluations::default().kept_in(Map::new()).is_empty());
        for nonsense in [json!(5), json!({"lowest": "x"}), json!({"without_improvement": -1}), json!(null)] {
            assert_eq!(Evaluations::of(&Map::from_iter([(EVALUATIONS.to_string(), nonsense)])), Evaluations::default());
        }
    }
}
