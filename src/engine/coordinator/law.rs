//! The law of a bucket's step as a table: which phases there are, and what may follow what.

use Phase::{Arrived, Copying, CopyingRows, LacksRows, Ready, RowsArrived, Running, Settled, Speculated};
use Queued::{Commit, Redo, Restore};

/// Where a bucket is in its step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Settled,
    Ready,
    Copying,
    Arrived,
    Running,
    Speculated,
    /// Speculated but for the batch's rows.
    LacksRows,
    CopyingRows,
    RowsArrived,
    Queued(Queued),
}

impl Phase {
    /// The device holds, or will hold, weights that a verdict may overturn.
    pub(super) fn is_speculated(self) -> bool {
        matches!(self, Speculated | LacksRows | CopyingRows | RowsArrived)
    }
}

/// How many buckets are in the phases that are looked for, so that nobody looks where none is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Those that are not settled.
    pub(super) under_way: usize,
    pub(super) ready: usize,
    pub(super) lacking_rows: usize,
    /// Those that the pool may be given.
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

/// Why a bucket waits for the pool though its gradient is not new.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Queued {
    /// The speculation used the wrong scale.
    Redo,
    /// The step does not happen; the device holds weights that must go. Also: fresh state, weights never sent.
    Restore,
    /// A flush: only the pending update.
    Commit,
}

/// What of a bucket's gradient its slot, or the copy into it, lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Late {
    Nothing,
    /// The batch's rows.
    Rows,
    /// The batch's rows, which by now are enqueued on the device.
    EnqueuedRows,
}

/// What may follow what; everything else is a bug.
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

/// Whether a bucket may go from one phase to the other.
pub(super) fn allows(from: Phase, to: Phase) -> bool {
    LAW.iter().any(|(before, after)| *before == from && after.contains(&to))
}
