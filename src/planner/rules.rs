//! What the step protocol may do: part of the plan, obeyed by the coordinator.

/// How a speculation leaves the optimizer state, and how it is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Speculation writes only the working weights; the state follows one step later, fused with the next speculation.
    /// Nothing to take back.
    Deferred,
    /// The paper's: speculation steps the state in place and is taken back by algebra, which loses bits.
    Inverse,
    /// No speculation: step in place once the verdict is known (ZeRO-Offload).
    ValidateFirst,
}

/// What the coordinator may do; fixed for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// See [`Policy`].
    pub policy: Policy,
    /// Stop speculating while clips are frequent.
    pub adaptive: bool,
    /// Take the bucket that the next forward needs first; otherwise as they arrive.
    pub(crate) deadline_order: bool,
    /// Write what is pending while no bucket is under way; otherwise with the next step's speculation, or while a verdict is awaited.
    pub(crate) early_commit: bool,
}

impl Rules {
    /// Without the feature `stv` this is known at compile time, and with it all that follows.
    pub(crate) fn may_speculate(&self) -> bool {
        cfg!(feature = "stv") && self.policy != Policy::ValidateFirst
    }

    pub(crate) fn takes_earliest_deadline(&self) -> bool {
        cfg!(feature = "deadline-order") && self.deadline_order
    }
}
