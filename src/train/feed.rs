//! The data as the engine's steps take it. Remembers where the last whole step ended.

use crate::data::loader::{DataPosition, Loader};
use crate::data::rows::batch::{Batch, Batches};
use crate::error::Result;

/// A loader, and the loader state that a checkpoint after a failed step needs.
pub(super) struct Feed {
    loader: Loader,
    step_end: DataPosition,
}

impl Feed {
    /// Feeds steps from where `loader` stands.
    pub(super) fn new(loader: Loader) -> Self {
        Self { step_end: loader.position(), loader }
    }

    /// The step is done for which the last batches were.
    pub(super) fn step_done(&mut self) {
        self.step_end = self.loader.position();
    }

    /// Where the last whole step ended: that of a step that failed half way is dealt again.
    pub(super) fn position(&self) -> DataPosition {
        self.step_end
    }

    pub(super) fn sequences(&self) -> usize {
        self.loader.dataset().sequences()
    }
}

impl Batches for Feed {
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        self.loader.fill(batch)
    }
}
