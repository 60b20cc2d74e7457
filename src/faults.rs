//! Faults that tests inject into a run: values in gradients, and failures of ranks.

use crate::scalar::{as_text, scalar};

/// A value written into the gradient, to test the step's reaction.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Injection {
    /// The training step, counted from 1; skipped steps count.
    pub step: u64,
    /// Index into the flat gradient.
    pub element: usize,
    /// The partial sum of the step, counted from 0.
    #[serde(default)]
    pub share: usize,
    /// The written value: a number, `nan`, `inf` or `-inf`. Serialised as text, because JSON has no NaN.
    #[serde(deserialize_with = "scalar", serialize_with = "as_text")]
    pub value: f32,
}

/// A fault injected into one rank, to test how all ranks end.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankFault {
    /// The training step, counted from 1; between two steps it is the next one.
    pub step: u64,
    /// The rank, counted from 0.
    pub rank: usize,
    /// The phase of the step.
    pub phase: FaultPhase,
    /// The kind of fault.
    #[serde(default)]
    pub kind: FaultKind,
}

/// Phases of a step in which a fault can be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultPhase {
    /// The rank has allocated its memory and has not reported it to the other ranks.
    Start,
    /// A module is enqueued.
    Module,
    /// The gradient of a bucket is enqueued.
    Backward,
    /// The sum of a bucket's gradients is enqueued.
    Sum,
    /// A gradient is copied from the device.
    GradsOut,
    /// A bucket is handed to the optimizer workers.
    Optimize,
    /// Parameters are copied to the device.
    ParamsIn,
    /// The device runs the optimizer step of a bucket.
    StepOnDevice,
    /// The rank waits for the verdict.
    Verdict,
    /// The rank waits for the other ranks' weights.
    Gather,
    /// Activations are sent to the ranks that share the same sequences.
    HandOver,
    /// Pending updates are written before a save.
    Flush,
    /// A rank other than 0 hands over its state for a save.
    Read,
    /// A rank other than 0 takes over state from a checkpoint.
    Write,
    /// The rank has moved its memory to a new plan and has not reported it to the other ranks.
    Move,
    /// The rank has computed its part of an evaluation and has not reported it to the other ranks.
    Evaluate,
}

/// Kinds of injected faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// An operation fails.
    #[default]
    Error,
    /// The thread panics.
    Panic,
    /// The thread blocks forever.
    Hang,
    /// The thread blocks for two seconds.
    Slow,
}
