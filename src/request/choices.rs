//! Choices of a request, with words as values.

use crate::device::ExpertProducts;
use crate::dtype::Dtype;
use crate::error;
use crate::model::head_rows::HeadRows;
use crate::model::policy::LayerPolicy;
use crate::optim::split::Masters;
use crate::units::Bytes;
use clap::ValueEnum;
use std::fmt;
use std::str::FromStr;

/// Offloading strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Speculate, validate, commit: the optimizer on the CPU runs under backward and forward.
    Superoffload,
    /// Validate first, then step on the CPU, then copy back.
    ZeroOffload,
    /// Every state stays on the device.
    NoOffload,
}

/// Instruction set of the CPU optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IsaChoice {
    /// The widest one that this CPU has.
    Auto,
    /// The scalar specification.
    Scalar,
    /// 256-bit vectors.
    Avx2,
    /// 512-bit vectors.
    Avx512,
    /// Arm's 128-bit vectors.
    Neon,
    /// Arm's vectors of any length.
    Sve2,
}

/// Storage of fp32 master weights: of buckets that the device steps, and of streamed weights where nothing else fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MastersChoice {
    /// As float32, or split if the usual loss tile does not fit otherwise.
    Auto,
    /// 32 bits beside each weight.
    Float32,
    /// 16 bits beside each bfloat16 weight, without loss.
    Split,
}

impl From<Masters> for MastersChoice {
    fn from(masters: Masters) -> Self {
        match masters {
            Masters::Float32 => Self::Float32,
            Masters::Split => Self::Split,
        }
    }
}

/// Side of the link that converts gradients between formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CastSide {
    /// The plan decides from the measured bandwidths.
    Auto,
    /// The device casts and float32 crosses the link.
    Device,
    /// The 16-bit format crosses the link and the host casts.
    Host,
}

/// Whether rows of a tied embedding that the batch does not use leave early: their gradient is complete once the output matrix's is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EarlyRows {
    /// On one device that speculates, where a micro-batch uses at most half of the rows.
    Auto,
    /// Also if a micro-batch uses more than half of the rows.
    On,
    /// All rows are stepped together.
    Off,
}

/// Activations that a layer keeps from its forward pass for its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActivationsChoice {
    /// The plan decides, layer by layer, from the device's memory.
    Auto,
    /// Every layer keeps everything.
    Keep,
    /// Every layer computes norms and the MLP's activation again: little memory traffic, no matrix product.
    RecomputeCheap,
    /// Every layer keeps only its input and runs its forward pass again.
    RecomputeBlock,
    /// Every layer keeps its input and attention's output, in host memory: attention is not computed again.
    HostAttention,
    /// Every layer keeps only its input, in host memory.
    Host,
}

impl ActivationsChoice {
    /// The policy of every layer; `None` when the plan decides.
    pub fn policy(self) -> Option<LayerPolicy> {
        match self {
            Self::Auto => None,
            Self::Keep => Some(LayerPolicy::Keep),
            Self::RecomputeCheap => Some(LayerPolicy::RecomputeCheap),
            Self::RecomputeBlock => Some(LayerPolicy::RecomputeBlock),
            Self::HostAttention => Some(LayerPolicy::HostAttention),
            Self::Host => Some(LayerPolicy::Host),
        }
    }
}

/// Placement of the layers' weights while steps run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightsChoice {
    /// On every device, unless another placement makes the model fit or a step faster.
    Auto,
    /// On every device.
    #[value(alias = "stationary")]
    #[serde(alias = "stationary")]
    Replicated,
    /// Each device of a process stores a part and copies the other parts from its peers, layer by layer, forward and backward.
    Sharded,
    /// Sharded over the devices of all processes; weights of other processes cross the network layer by layer.
    FullySharded,
    /// In host memory; weights stream to the device layer by layer, forward and backward.
    Flow,
}

/// Transport of gradient and weight slices between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// NCCL between GPUs where all processes have it, else TCP.
    Auto,
    /// NVIDIA's library, from GPU to GPU.
    Nccl,
    /// Through host memory and sockets.
    Tcp,
}

/// Implementation of attention on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionChoice {
    /// In 16-bit formats cuDNN, or products where it lacks the layer; in float32 the engine's own kernel.
    Auto,
    /// NVIDIA's fused kernels.
    Cudnn,
    /// Products by cuBLASLt: 16-bit formats, any width, soft caps.
    Products,
    /// The engine's own kernel.
    Plain,
}

/// Implementation of the experts' matrix products on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpertProductsChoice {
    /// cuBLASLt where supported, else the engine's own kernels; a resumed run keeps its implementation.
    Auto,
    /// The engine's own kernels.
    Own,
    /// cuBLASLt's grouped layouts, from 13.8 on.
    Cublaslt,
}

impl From<ExpertProducts> for ExpertProductsChoice {
    fn from(by: ExpertProducts) -> Self {
        match by {
            ExpertProducts::Own => Self::Own,
            ExpertProducts::Cublaslt => Self::Cublaslt,
        }
    }
}

/// Rows of a micro-batch that the head computes: output matrix and loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeadRowsChoice {
    /// `trained` where records have prompts with answers; otherwise `all`. A resumed run keeps the rows of its checkpoint.
    Auto,
    /// Every row.
    All,
    /// Rows with a trained target, rounded up to a multiple of a sixteenth of the loss's tile.
    Trained,
}

impl From<HeadRows> for HeadRowsChoice {
    fn from(rows: HeadRows) -> Self {
        match rows {
            HeadRows::All => Self::All,
            HeadRows::Trained => Self::Trained,
        }
    }
}

impl HeadRowsChoice {
    /// The rows of a run with this choice.
    pub(crate) fn resolve(self) -> HeadRows {
        match self {
            Self::Auto | Self::All => HeadRows::All,
            Self::Trained => HeadRows::Trained,
        }
    }
}

/// Format of the logits, from which losses and log-probabilities are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogitsDtypeChoice {
    /// `float32` for losses of pairs, completions and teachers; otherwise `--dtype`. A resumed run keeps its format.
    Auto,
    /// With `--dtype bfloat16`.
    Bfloat16,
    /// With `--dtype float16`.
    Float16,
    /// With every `--dtype`.
    Float32,
}

impl From<Dtype> for LogitsDtypeChoice {
    /// The choice of a format of logits.
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bfloat16 => Self::Bfloat16,
            Dtype::Float16 => Self::Float16,
            _ => Self::Float32,
        }
    }
}

impl LogitsDtypeChoice {
    pub(crate) fn is_auto(&self) -> bool {
        *self == Self::Auto
    }

    /// The format of logits in a run with this choice and weights of `dtype`.
    ///
    /// # Errors
    /// `Usage` for 16 bits of another format than that of the weights.
    pub(crate) fn resolve(self, dtype: Dtype, has_objective: bool) -> error::Result<Dtype> {
        let wanted = match self {
            Self::Auto => return Ok(if has_objective { Dtype::Float32 } else { dtype }),
            Self::Bfloat16 => Dtype::Bfloat16,
            Self::Float16 => Dtype::Float16,
            Self::Float32 => Dtype::Float32,
        };
        if [dtype, Dtype::Float32].contains(&wanted) {
            return Ok(wanted);
        }
        let of_weights = if dtype == Dtype::Float32 { String::new() } else { format!("{dtype} or ") };
        Err(error::Error::usage(format_args!("--logits-dtype {wanted} with --dtype {dtype}: use --logits-dtype {of_weights}float32")))
    }
}

/// Kind of host memory that holds the offloaded states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostMemoryKind {
    /// Locked pages, copied explicitly.
    Pinned,
    /// One address on both sides, and every optimizer on the GPU: CUDA managed memory, or the system's where the GPU shares its
    /// page tables.
    Unified,
}

/// A technique that can be turned off at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Technique {
    /// Speculation, then validation.
    Stv,
    /// Earliest deadline first on the optimizer pool.
    DeadlineOrder,
    /// Resident tail buckets.
    Repartition,
    /// Casts on the device.
    SuperchipCast,
    /// Vector CPU Adam.
    GraceAdam,
    /// Cache and bandwidth partitions, core affinity.
    Mpam,
    /// Weights that stream layer by layer.
    WeightFlow,
    /// Speculation pauses while clips are frequent.
    Adaptive,
    /// Updates are written to the state while no gradients come.
    EarlyCommit,
}

/// Number of tail buckets with optimizer state on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResidentBuckets {
    /// The plan decides.
    Auto,
    /// Every bucket: nothing is offloaded.
    All,
    /// This many.
    Count(usize),
}

impl fmt::Display for ResidentBuckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::All => f.write_str("all"),
            Self::Count(count) => write!(f, "{count}"),
        }
    }
}

/// Order in which a step of several micro-batches goes through the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerOrder {
    /// The plan decides.
    Auto,
    /// One micro-batch after the other through all layers.
    Whole,
    /// All micro-batches through a segment of layers before the next segment.
    Segments {
        /// Layers of a segment.
        layers: usize,
        /// Last layers, which run forward and backward at once.
        turn: usize,
    },
}

impl fmt::Display for LayerOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Whole => f.write_str("whole"),
            Self::Segments { layers, turn } => write!(f, "segments:{layers},{turn}"),
        }
    }
}

impl serde::Serialize for LayerOrder {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for LayerOrder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let segments = |numbers: &str| {
            let (layers, turn) = numbers.split_once(',')?;
            let [layers, turn] = [layers.parse().ok().filter(|layers| *layers > 0)?, turn.parse().ok()?];
            Some(Self::Segments { layers, turn })
        };
        match text {
            "auto" => Ok(Self::Auto),
            "whole" => Ok(Self::Whole),
            text => text.strip_prefix("segments:").and_then(segments).ok_or_else(|| {
                "expected `auto`, `whole` or `segments:LAYERS,TURN`, such as `segments:2,5` for segments of 2 layers and 5 last layers that \
                 run forward and backward at once"
                    .to_string()
            }),
        }
    }
}

/// Host memory for copies of states that wait to be saved while training goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SaveMemory {
    /// None: a save stops training.
    Off,
    /// All memory that the plan leaves free, as far as copies need it.
    Auto,
    /// This much.
    Size(Bytes),
}

impl fmt::Display for SaveMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::Size(Bytes(bytes)) => write!(f, "{bytes}"),
        }
    }
}

impl FromStr for SaveMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            size => size.parse().map(Self::Size).map_err(|cause| format!("{cause}, `auto` or `off`")),
        }
    }
}

impl FromStr for ResidentBuckets {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "all" => Ok(Self::All),
            number => number.parse().map(Self::Count).map_err(|_| "expected a number of buckets, `auto` or `all`".to_string()),
        }
    }
}
