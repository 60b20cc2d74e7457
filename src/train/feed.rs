//! The data as the engine's steps take it. Remembers where the last whole step ended, and whether it was the data that failed.

use crate::data::loader::{DataPosition, Loader};
use crate::engine::executor::Batches;
use crate::error::Result;

impl Batches for Loader {
    fn fill(&mut self, inputs: &mut [i32], targets: &mut [i32]) -> Result<()> {
        Loader::fill(self, inputs, targets)
    }
}

/// A loader, and what a checkpoint after a failed step must know of it.
pub(super) struct Feed {
    loader: Loader,
    step_end: DataPosition,
    failed: bool,
}

impl Feed {
    /// Feeds steps from where `loader` stands.
    pub(super) fn new(loader: Loader) -> Self {
        Self { step_end: loader.position(), loader, failed: false }
    }

    /// The step is done for which the last batches were.
    pub(super) fn step_done(&mut self) {
        self.step_end = self.loader.position();
    }

    /// Where the last whole step ended: that of a step that failed half way is dealt again.
    pub(super) fn position(&self) -> DataPosition {
        self.step_end
    }

    /// Sequences of one pass over the data.
    pub(super) fn sequences(&self) -> usize {
        self.loader.dataset().sequences()
    }

    /// Whether a batch could not be read.
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }
}

impl Batches for Feed {
    fn fill(&mut self, inputs: &mut [i32], targets: &mut [i32]) -> Result<()> {
        self.loader.fill(inputs, targets).inspect_err(|_| self.failed = true)
    }
}
