//! The request for a plan: a recipe whose kernels are open, the choices that a search may vary ([`Wanted`]), and the site.
//!
//! Settings become a request once ([`Settings::request`](crate::config::settings::Settings::request)). Planner and search know requests
//! only.

pub(crate) mod check;
pub(crate) mod choices;
pub(crate) mod cut;
pub(crate) mod wanted;

use crate::device::LongSums;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::faults::RankFault;
use crate::model::activations::LossTile;
use crate::model::shape::ModelShape;
use crate::recipe::{Numerics, Recipe, StepShape};
use crate::units::Bytes;
use check::require;
use choices::{
    AttentionChoice, EarlyRows, ExpertProductsChoice, HeadRowsChoice, HostMemoryKind, IsaChoice, LogitsDtypeChoice, MastersChoice,
    SaveMemory, Strategy, Transport,
};
use cut::{StepCut, StepSplit};
use std::path::PathBuf;
use std::sync::Arc;
use wanted::Wanted;

/// The request for a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The recipe. The plan replaces its step, kernels, tiles and device.
    pub recipe: Recipe,
    /// The kernels.
    pub kernels: KernelChoices,
    /// The cut of steps.
    pub cut: StepCut,
    /// Named set of techniques.
    pub strategy: Strategy,
    /// Whether unused rows of a tied embedding leave early.
    pub early_rows: EarlyRows,
    /// The machine and the processes.
    pub site: SiteRequest,
    /// The choices that a search may vary.
    pub wanted: Wanted,
}

/// Choices of kernels and tiles, which decide bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelChoices {
    /// Implementation of attention on a GPU.
    pub attention: AttentionChoice,
    /// Whether kernels must be reproducible bit for bit.
    pub deterministic: bool,
    /// Implementation of the matrix products of experts on a GPU.
    pub experts: ExpertProductsChoice,
    /// Rows that the head computes.
    pub head_rows: HeadRowsChoice,
    /// Format of the logits.
    pub logits_dtype: LogitsDtypeChoice,
    /// Tile of the loss that a checkpoint prescribes.
    pub loss_tile: Option<LossTile>,
    /// How long sums of products are computed, as a checkpoint prescribes.
    pub long_sums: Option<LongSums>,
}

/// Limits and properties of the machine and the processes.
#[derive(Clone, Debug, PartialEq)]
pub struct SiteRequest {
    /// Whether all GPUs are requested, and their number is unknown.
    pub all_gpus: bool,
    /// Transport between processes.
    pub transport: Transport,
    /// Host memory of offloaded states.
    pub memory: HostMemoryKind,
    /// Limit of device memory.
    pub hbm_limit: Option<Bytes>,
    /// Limit of host memory.
    pub host_limit: Option<Bytes>,
    /// Host memory for copies of states that wait to be saved.
    pub save_memory: SaveMemory,
    /// Instruction set of the optimizer.
    pub isa: IsaChoice,
    /// Directory that is searched first for NVIDIA's libraries.
    pub cuda_libraries: Option<PathBuf>,
    /// Bytes of the training data held in memory and of its order.
    pub data_bytes: u64,
    /// Ranks with an injected fault.
    pub rank_faults: Vec<RankFault>,
    /// Reorder events with this seed.
    pub adversary: Option<u64>,
}

impl SiteRequest {
    /// Refuses choices that need a GPU. Called once the run is known to have no GPU.
    ///
    /// # Errors
    /// `Usage` that names flag and value.
    pub(crate) fn check_needs_no_gpu(&self, kernels: KernelChoices) -> Result<()> {
        let rule = "needs --device cuda";
        require(!self.all_gpus, "gpus", "all", "must be a number if CPUs are used instead of GPUs")?;
        require(self.memory == HostMemoryKind::Pinned, "memory", "unified", rule)?;
        require(kernels.attention != AttentionChoice::Cudnn, "attention", "cudnn", rule)?;
        require(kernels.attention != AttentionChoice::Products, "attention", "products", rule)?;
        require(kernels.experts != ExpertProductsChoice::Cublaslt, "expert-products", "cublaslt", rule)?;
        require(self.hbm_limit.is_none(), "hbm-limit", self.hbm_limit.unwrap_or(Bytes(0)), rule)
    }
}

impl Request {
    /// The model.
    pub(crate) fn shape(&self) -> &ModelShape {
        &self.recipe.model
    }

    /// The cut of steps with the wanted split.
    pub(crate) fn step(&self) -> StepShape {
        self.cut.shape(self.wanted.split)
    }

    /// This request with `micro_batch` sequences in a micro-batch.
    pub(crate) fn with_micro_batch(&self, micro_batch: usize) -> Self {
        let split = StepSplit { micro_batch, ..self.wanted.split };
        self.with(Wanted { split, ..self.wanted.clone() })
    }

    /// This request with sequences of `seq_length` tokens.
    pub(crate) fn with_seq_length(&self, seq_length: usize) -> Self {
        Self { cut: StepCut { seq_length, ..self.cut }, ..self.clone() }
    }

    /// This request for the model `shape`.
    pub(crate) fn with_shape(&self, shape: ModelShape) -> Self {
        let recipe = Recipe { model: Arc::new(shape), ..self.recipe.clone() };
        Self { recipe, ..self.clone() }
    }

    /// This request with all splits of a step, the largest micro-batches first.
    ///
    /// # Errors
    /// Errors of [`StepCut::splits`].
    pub(crate) fn splits(&self) -> Result<Vec<Wanted>> {
        let splits = self.cut.splits(self.wanted.split)?.into_iter();
        Ok(splits.map(|split| Wanted { split, ..self.wanted.clone() }).collect())
    }

    /// This request with split masters, if their storage is open and possible: weights are in bfloat16, and no step is inverted.
    pub(crate) fn with_split_masters(&self) -> Option<Self> {
        let Numerics { dtype, inverse_rollback, .. } = self.recipe.numerics;
        let is_open = self.wanted.masters == MastersChoice::Auto && dtype == Dtype::Bfloat16 && !inverse_rollback;
        is_open.then(|| self.with(Wanted { masters: MastersChoice::Split, ..self.wanted.clone() }))
    }

    /// This request with other choices.
    pub(crate) fn with(&self, wanted: Wanted) -> Self {
        Self { wanted, ..self.clone() }
    }
}
