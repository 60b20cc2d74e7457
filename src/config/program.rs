//! The trainer that a configuration file belongs to, recognized by its keys.

use super::document::DocumentEntry;
use std::fmt;

/// A program with a known configuration format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    DeepSpeed,
    Accelerate,
    Axolotl,
    LlamaFactory,
    Trl,
}

/// Keys that identify the program of a file. The first of equal matches applies.
#[rustfmt::skip]
const SIGNATURES: [(Program, &[&str]); 5] = [
    (Program::DeepSpeed, &["zero-optimization", "train-micro-batch-size-per-gpu", "train-batch-size", "wall-clock-breakdown", "steps-per-print"]),
    (Program::Accelerate, &["compute-environment", "distributed-type", "machine-rank", "mixed-precision", "num-machines", "num-processes", "main-training-function"]),
    (Program::Axolotl, &["base-model", "datasets", "sequence-len", "micro-batch-size", "val-set-size", "sample-packing", "dataset-prepared-path", "num-epochs", "evals-per-epoch"]),
    (Program::LlamaFactory, &["finetuning-type", "stage", "cutoff-len", "template", "dataset-dir", "plot-loss", "overwrite-cache", "dataset"]),
    (Program::Trl, &["model-name-or-path", "dataset-name", "max-length", "assistant-only-loss", "completion-only-loss", "attn-implementation", "use-peft"]),
];

/// Whether the key `name`, spelled with dashes, identifies another program.
pub(super) fn identifies_a_program(name: &str) -> bool {
    SIGNATURES.iter().any(|(_, signature)| signature.contains(&name))
}

impl Program {
    /// The program of a file with `entries`, identified by its keys.
    pub(super) fn of(entries: &[DocumentEntry]) -> Option<Self> {
        let keys: Vec<String> = entries.iter().map(|entry| entry.key.replace('_', "-")).collect();
        let matches = |signature: &[&str]| signature.iter().filter(|key| keys.iter().any(|present| present == *key)).count();
        let best = SIGNATURES.iter().rev().max_by_key(|(_, signature)| matches(signature))?;
        (matches(best.1) > 0).then_some(best.0)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DeepSpeed => "DeepSpeed",
            Self::Accelerate => "accelerate",
            Self::Axolotl => "axolotl",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Trl => "TRL",
        })
    }
}
