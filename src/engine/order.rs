//! Orders: what rank 0 has all ranks do.

/// What rank 0 has all ranks do. Its numbers are the board's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Order {
    /// The next step: learning rate, targets that count, limit of the norm.
    Step,
    /// Write what was decided into the state.
    Flush,
    /// Random parameters: seed, threads.
    Init,
    /// State from the mail: part, first element, elements.
    Write,
    /// State into the mail: part, first element, elements.
    Read,
    /// Working weights from the state.
    Send,
    /// The losses of micro-batches: targets that count.
    Evaluate,
    /// Counters from a checkpoint: steps, optimizer steps, loss scale, good steps, verdicts.
    Resume,
    /// End all threads, and hand over the tracks of the timeline.
    Finish,
    /// Go over to the plan in the hall.
    Replan,
    /// Save its slices: two words for whoever does; checksums into the mail.
    Save,
}

impl Order {
    const ALL: [Self; 11] = [
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
    ];

    /// The order of this number, if there is one.
    pub(super) fn of(number: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// What a process does that carries it out, in words.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Step => "is in a step",
            Self::Flush => "is writing updates",
            Self::Init | Self::Write | Self::Send | Self::Resume => "is taking the state",
            Self::Read => "is reading the state",
            Self::Evaluate => "is evaluating",
            Self::Finish => "is ending its threads",
            Self::Replan => "is moving states",
            Self::Save => "is saving",
        }
    }
}
