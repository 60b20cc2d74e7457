//! Context in which data is opened: the receiver of progress messages, the stop flag, and the folders for results.

use super::run_sources::KnownSources;
use super::stopped::interrupted;
use crate::disk;
use crate::error::Result;
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;
use std::path::PathBuf;

/// The tokens of at most so many bytes of text are held in memory, and kept beside the run. They take four times that.
pub(crate) const IN_MEMORY_BYTES_MAX: u64 = 4 << 20;

/// The circumstances in which data is opened.
pub struct Preparation<'a> {
    stop: StopFlag,
    emit: Box<dyn FnMut(ProgressEvent<'_>) + 'a>,
    pub(super) cache: Option<PathBuf>,
    pub(super) output_dir: Option<PathBuf>,
    pub(super) in_memory_bytes_max: u64,
    /// Of the data.
    pub(super) known: KnownSources,
}

impl Default for Preparation<'_> {
    /// Nobody watches, and nothing is kept: for text that is small.
    fn default() -> Self {
        Self {
            stop: StopFlag::default(),
            emit: Box::new(|_| ()),
            cache: None,
            output_dir: None,
            in_memory_bytes_max: IN_MEMORY_BYTES_MAX,
            known: KnownSources::default(),
        }
    }
}

impl<'a> Preparation<'a> {
    /// `emit` receives messages until `stop` is set. Prepared text is kept in `cache`, or below `output_dir` where `cache` cannot be
    /// written, or the text is small; `output_dir`, if there is one, exists and keeps which files were checked.
    pub fn new(stop: &StopFlag, cache: Option<PathBuf>, output_dir: Option<PathBuf>, emit: impl FnMut(ProgressEvent<'_>) + 'a) -> Self {
        Self { stop: stop.clone(), emit: Box::new(emit), cache, output_dir, ..Self::default() }
    }

    /// Sets the `known` facts about the data.
    pub(crate) fn knowing(self, known: KnownSources) -> Self {
        Self { known, ..self }
    }

    /// The known facts about the data, at the end of the preparation.
    pub(crate) fn into_known(self) -> KnownSources {
        self.known
    }

    pub(super) fn note(&mut self, line: impl AsRef<str>) {
        (self.emit)(ProgressEvent::Note(line.as_ref()));
    }

    pub(super) fn detail(&mut self, line: impl AsRef<str>) {
        (self.emit)(ProgressEvent::Detail(line.as_ref()));
    }

    pub(super) fn warn(&mut self, line: impl AsRef<str>) {
        (self.emit)(ProgressEvent::Warn(line.as_ref()));
    }

    pub(super) fn progress(&mut self, activity: &str, done: u64, all: u64) {
        (self.emit)(ProgressEvent::Progress { activity, done, all });
    }

    pub(super) fn stop(&self) -> &StopFlag {
        &self.stop
    }

    /// `Interrupted` once somebody asked to stop.
    pub(super) fn check_stop(&self) -> Result<()> {
        if self.stop.is_set() { Err(interrupted()) } else { Ok(()) }
    }
}

/// Where prepared text is kept: `SUPEROFFLOAD_CACHE`, else below the user's cache; `None` where the environment names no home.
pub(crate) fn cache() -> Option<PathBuf> {
    let set = std::env::var_os("SUPEROFFLOAD_CACHE").filter(|path| !path.is_empty()).map(PathBuf::from);
    set.or_else(|| disk::user_cache().map(|cache| cache.join("data")))
}
