//! Systems that figures compare. A system has one colour in every figure.

use serde::Deserialize;

/// A system that trains models.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum System {
    /// The paper's system, and its public release in DeepSpeed.
    SuperOffload,
    /// This program.
    ThisProgram,
    /// The baseline of the paper.
    ZeroOffload,
    /// PyTorch without offload.
    Pytorch,
    /// PyTorch's FSDP with offload.
    FsdpOffload,
    /// This program with the schedule of ZeRO-Offload.
    ThisProgramAsZeroOffload,
    /// Megatron-LM.
    Megatron,
    /// DeepSpeed ZeRO-3.
    Zero3,
    /// DeepSpeed ZeRO-2.
    Zero2,
    /// DeepSpeed ZeRO-Infinity.
    ZeroInfinity,
    /// torchao's optimizer with CPU offload.
    Torchao,
    /// DeepSpeed Ulysses.
    Ulysses,
}

/// Words in a series' name that name a system.
const NAMES: [&str; 11] = [
    "this program",
    "SuperOffload",
    "ZeRO-Offload",
    "ZeRO-2",
    "ZeRO-3",
    "ZeRO-Infinity",
    "FSDP",
    "torchao",
    "Megatron",
    "PyTorch DDP",
    "Ulysses",
];

impl System {
    /// Index of the system's colour.
    pub const fn colour(self) -> usize {
        self as usize
    }

    /// Whether the name of a series names a system.
    pub fn is_named_in(name: &str) -> bool {
        NAMES.iter().any(|system| name.contains(system))
    }
}
