//! The phases of a bucket's step, and the allowed transitions as a table.

use Phase::{Arrived, Copying, CopyingRows, LacksRows, Ready, RowsArrived, Running, Settled, Speculated};
use Queued::{Commit, Redo, Restore};

/// Phase of a bucket in its step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Settled,
    Ready,
    Copying,
    Arrived,
    Running,
    Speculated,
    /// Speculated except for the batch's rows.
    LacksRows,
    CopyingRows,
    RowsArrived,
    Queued(Queued),
}

impl Phase {
    /// Whether the device holds, or will hold, weights that a verdict may overturn.
    pub(super) fn is_speculated(self) -> bool {
        matches!(self, Speculated | LacksRows | CopyingRows | RowsArrived)
    }
}

/// Number of buckets in the phases that the coordinator searches for, so that it skips a search without a match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Buckets that are not settled.
    pub(super) under_way: usize,
    pub(super) ready: usize,
    pub(super) lacking_rows: usize,
    /// Buckets that wait for the pool.
    pub(super) for_pool: usize,
}

impl Tally {
    pub(super) fn enter(&mut self, phase: Phase) {
        self.under_way += usize::from(phase != Settled);
        self.place(phase).into_iter().for_each(|count| *count += 1);
    }

    pub(super) fn leave(&mut self, phase: Phase) {
        self.under_way -= usize::from(phase != Settled);
        self.place(phase).into_iter().for_each(|count| *count -= 1);
    }

    fn place(&mut self, phase: Phase) -> Option<&mut usize> {
        match phase {
            Ready => Some(&mut self.ready),
            LacksRows => Some(&mut self.lacking_rows),
            Arrived | RowsArrived | Phase::Queued(_) => Some(&mut self.for_pool),
            Settled | Copying | Running | Speculated | CopyingRows => None,
        }
    }
}

/// Why a bucket waits for the pool without a new gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Queued {
    /// The speculation used the wrong scale.
    Redo,
    /// The step is skipped and the device holds speculated weights, or the state was set from outside and its weights were never sent.
    Restore,
    /// A flush of the pending update.
    Commit,
}

/// The part of a bucket's gradient that is missing in its slot, or in the copy into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Late {
    Nothing,
    /// The batch's rows.
    Rows,
    /// The batch's rows, which are now enqueued on the device.
    EnqueuedRows,
}

/// A bucket's part in the running save of the state after step N.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// No save needs the bucket's memory.
    Free,
    /// Step N of the bucket is under way.
    UnderWay,
    /// Update N is decided and not yet in the state.
    Due,
    /// The state is that after step N and must not be written.
    Held,
    /// As `Held`; the pool's copy of the state is complete, and the writer leaves the bucket's memory.
    Leaving,
}

impl Hold {
    pub(super) fn is_held(self) -> bool {
        matches!(self, Self::Held | Self::Leaving)
    }
}

/// Allowed transitions; any other transition is a bug.
const LAW: [(Phase, &[Phase]); 12] = [
    (Settled, &[Ready, Phase::Queued(Restore), Phase::Queued(Commit)]),
    (Ready, &[Copying, Settled]),
    (Copying, &[Arrived]),
    (Arrived, &[Running, Settled, Ready]),
    (Running, &[Speculated, LacksRows, Settled, Ready, Phase::Queued(Redo), Phase::Queued(Restore)]),
    (Speculated, &[Settled, Phase::Queued(Redo), Phase::Queued(Restore)]),
    (LacksRows, &[CopyingRows, Ready, Phase::Queued(Restore)]),
    (CopyingRows, &[RowsArrived]),
    (RowsArrived, &[Running, Ready, Phase::Queued(Restore)]),
    (Phase::Queued(Redo), &[Running]),
    (Phase::Queued(Restore), &[Running]),
    (Phase::Queued(Commit), &[Running]),
];

/// Whether a bucket may change from one phase to the other.
pub(super) fn allows(from: Phase, to: Phase) -> bool {
    LAW.iter().any(|(before, after)| *before == from && after.contains(&to))
}
