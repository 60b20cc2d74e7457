//! The optimizer of a run as a value: its hyperparameters, and the arrays of its state.

use crate::dtype::Dtype;
use crate::optim::adam::AdamHyper;
use crate::optim::moments::Moments;
use crate::optim::split::Masters;
use crate::optim::state_array::{ArrayRounding, StateArray, StateArrays, StatePart};

/// An optimizer with the settings that decide its results. A further optimizer is a variant here, its passes in
/// [`HostPasses`](crate::optim::host_passes::HostPasses), and a kernel for states on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// AdamW with decoupled weight decay.
    AdamW {
        /// Hyperparameters; the learning rate of a step comes from the schedule.
        hyper: AdamHyper,
        /// Format of both moments between steps.
        moments: Moments,
    },
}

impl Optimizer {
    /// Name in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AdamW { .. } => "AdamW",
        }
    }

    /// The arrays of the state, on the host and in checkpoints.
    pub const fn arrays(&self) -> StateArrays {
        match self {
            Self::AdamW { moments, .. } => moments.arrays(),
        }
    }

    /// The arrays in device memory of a state that the device steps.
    pub(crate) const fn device_arrays(&self, masters: Masters) -> StateArrays {
        match self {
            Self::AdamW { moments, .. } => moments.device_arrays(masters),
        }
    }

    /// Whether a step needs whole tensors, so that no bucket may hold a part of one.
    pub const fn needs_whole_tensors(&self) -> bool {
        match self {
            Self::AdamW { .. } => false,
        }
    }
}

impl Moments {
    /// The arrays of AdamW's state with moments in this format.
    pub const fn arrays(self) -> StateArrays {
        match self {
            Self::Float32 => StateArrays::new(&FLOAT32),
            Self::Bfloat16 => StateArrays::new(&BFLOAT16),
            Self::Int8 => StateArrays::new(&INT8),
        }
    }

    /// The arrays in device memory of a state of AdamW that the device steps.
    pub const fn device_arrays(self, masters: Masters) -> StateArrays {
        match (masters, self) {
            (Masters::Float32, _) => self.arrays(),
            (Masters::Split, Self::Float32) => StateArrays::new(&SPLIT_FLOAT32),
            (Masters::Split, Self::Bfloat16) => StateArrays::new(&SPLIT_BFLOAT16),
            (Masters::Split, Self::Int8) => StateArrays::new(&SPLIT_INT8),
        }
    }
}

impl StatePart {
    /// AdamW's first moments.
    pub const M: Self = Self::at(1);
    /// AdamW's second moments.
    pub const V: Self = Self::at(2);
}

/// The arrays of AdamW's state: `masters`, and moments in the format `dtype`.
const fn adamw(masters: StateArray, dtype: Dtype) -> [StateArray; 3] {
    let m = StateArray { name: "m", dtype, rounding: ArrayRounding::Nearest, is_nonnegative: false };
    let v = StateArray { name: "v", dtype, rounding: ArrayRounding::Stochastic, is_nonnegative: true };
    [masters, m, v]
}

const FLOAT32: [StateArray; 3] = adamw(StateArray::PARAMS, Dtype::Float32);
const BFLOAT16: [StateArray; 3] = adamw(StateArray::PARAMS, Dtype::Bfloat16);
const INT8: [StateArray; 3] = adamw(StateArray::SETTLED, Dtype::Uint8);
const SPLIT_FLOAT32: [StateArray; 3] = adamw(StateArray::LOWER, Dtype::Float32);
const SPLIT_BFLOAT16: [StateArray; 3] = adamw(StateArray::LOWER, Dtype::Bfloat16);
const SPLIT_INT8: [StateArray; 3] = adamw(StateArray::LOWER, Dtype::Uint8);

/// One application of a gradient: optimizer step, learning rate and gradient scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// The optimizer step, from 1: Adam's `t`.
    pub optimizer_step: u64,
    /// Learning rate of that step.
    pub learning_rate: f64,
    /// Factor on the gradients: clip scale divided by loss scale.
    pub scale: f32,
}
