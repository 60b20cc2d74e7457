//! The parts of a run that are compared when it is continued.

use clap::ValueEnum;

/// A part of a run that a resume compares with the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunPart {
    /// Settings of the model's configuration that change arithmetic.
    Model,
    /// How text becomes tokens.
    Tokenizer,
    /// The content of the data files, in order.
    Data,
    /// Decisions of the plan that change bits.
    Numerics,
    /// Format of the optimizer's moments, which are converted.
    Moments,
}

impl RunPart {
    /// All parts, in the order of messages.
    pub const ALL: [Self; 5] = [Self::Model, Self::Tokenizer, Self::Data, Self::Numerics, Self::Moments];

    /// The name in flags and checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Tokenizer => "tokenizer",
            Self::Data => "data",
            Self::Numerics => "numerics",
            Self::Moments => "moments",
        }
    }
}
