//! Orders that rank 0 issues to all ranks.

/// An order of rank 0 to all ranks. Its number identifies it in the progress counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Order {
    /// Run the next step. Arguments: learning rate, sum of the targets' weights, clipping threshold.
    Step,
    /// Write all decided updates into the state.
    Flush,
    /// Initialize random parameters. Arguments: seed, threads.
    Init,
    /// Write state from the mail buffer. Arguments: part, first element, elements.
    Write,
    /// Read state into the mail buffer. Arguments: part, first element, elements.
    Read,
    /// Compute working weights from the state.
    Send,
    /// Compute the losses of micro-batches. Arguments: sum of the targets' weights, micro-batches of a rank, and whether to keep
    /// the numbers of their reference, or to pass those of the last evaluation to rank 0.
    Evaluate,
    /// Restore counters from a checkpoint. Arguments: steps, optimizer steps, loss scale, good steps, verdicts.
    Resume,
    /// End all threads, and publish the tracks of the timeline.
    Finish,
    /// Change to the plan in the rendezvous.
    Replan,
    /// Save this rank's slices, and write the checksums into the mail buffer. Arguments: two words for the code that saves.
    Save,
    /// Begin a save of the state after the last step, and publish this rank's part of the state, or write it. Arguments: as of `Save`.
    BeginSave,
    /// Wait until the running save has read this rank's state.
    EndSave,
    /// Write weights of frozen tensors from the mail buffer. Arguments: first element, elements.
    WriteFrozen,
    /// Write into the mail buffer whether this rank has written its slices of the save that was begun.
    ReportPart,
    /// Wait until this rank has written its slices of the save that was begun, and write the checksums into the mail buffer.
    FinishPart,
    /// Write weights of frozen tensors in MXFP4 from the mail buffer, codes first. Arguments: first element, elements.
    WritePacked,
    /// Begin to pin memory for copies of states, for the saves to come.
    PrepareSave,
}

impl Order {
    const ALL: [Self; 18] = [
        Self::Step,
        Self::Flush,
        Self::Init,
        Self::Write,
        Self::Read,
        Self::Send,
        Self::Evaluate,
        Self::Resume,
        Self::Finish,
        Self::Replan,
        Self::Save,
        Self::BeginSave,
        Self::EndSave,
        Self::WriteFrozen,
        Self::ReportPart,
        Self::FinishPart,
        Self::WritePacked,
        Self::PrepareSave,
    ];

    /// The order of this number, if there is one.
    pub(in crate::engine) fn of(number: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Description of a process that is executing this order.
    pub(in crate::engine) fn description(self) -> &'static str {
        match self {
            Self::Step => "is in a step",
            Self::Flush => "is writing updates",
            Self::Init | Self::Write | Self::WriteFrozen | Self::WritePacked | Self::Send | Self::Resume => "is taking the state",
            Self::Read => "is reading the state",
            Self::Evaluate => "is evaluating",
            Self::Finish => "is ending its threads",
            Self::Replan => "is moving states",
            Self::Save | Self::PrepareSave | Self::BeginSave | Self::EndSave | Self::ReportPart | Self::FinishPart => "is saving",
        }
    }
}
