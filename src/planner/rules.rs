//! Permissions of the step protocol: part of the plan, followed by the coordinator.

/// The effect of a speculation on the optimizer state, and the way it is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Speculation writes only the working weights. The state follows one step later, fused with the next speculation, so there is nothing
    /// to undo.
    Deferred,
    /// The paper's scheme: speculation steps the state in place and is undone algebraically, which loses bits.
    Inverse,
    /// No speculation: the state is stepped in place once the verdict is known (ZeRO-Offload).
    ValidateFirst,
}

/// Permissions of the coordinator, fixed for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The rollback policy.
    pub policy: Policy,
    /// Stop speculating while clips are frequent.
    pub adaptive: bool,
    /// Processes the bucket first that the next forward pass needs first; otherwise in order of arrival.
    pub(crate) deadline_order: bool,
    /// Writes pending updates while no bucket is in transit; otherwise with the next step's speculation, or while waiting for a verdict.
    pub(crate) early_commit: bool,
}

impl Rules {
    /// Whether the coordinator may speculate. Without the feature `stv` this is a compile-time constant, which removes the dependent code.
    pub(crate) fn may_speculate(&self) -> bool {
        cfg!(feature = "stv") && self.policy != Policy::ValidateFirst
    }

    pub(crate) fn takes_earliest_deadline(&self) -> bool {
        cfg!(feature = "deadline-order") && self.deadline_order
    }
}
