//! The arrays of one micro-batch: inputs, activations of every layer, and workspaces. [`super::activations`] plans their memory.

use super::fp8::{Fp8Work, LINEARS};
use super::heads::SequenceRank;
use super::host_turns::HostTurn;
use super::loss_tile::LossTile;
use super::policy::LayerPolicy;
use crate::device::DeviceSlice;
use crate::pair_loss::PairLoss;
use crate::policy_loss::PolicyLoss;
use crate::teacher_loss::TeacherLoss;

/// Device memory of one micro-batch of T = `batch * seq_length` tokens. With sequence parallelism T is the number of this rank's tokens.
/// Arrays are in the compute format unless stated otherwise.
#[derive(Debug)]
pub(crate) struct Activations {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence, over all ranks that share it.
    pub seq_length: usize,
    /// This rank's part of the sequences.
    pub(crate) sequence: SequenceRank,
    /// Tile of the loss, limited to the size of the micro-batch and vocabulary.
    pub tile: LossTile,
    /// Tokens that an MLP processes at once.
    pub(super) mlp_tile: usize,
    /// A [`crate::data::rows::batch::Batch`] as int32 `[arrays, T]`, filled by the caller. The next four slices are its arrays. The lists
    /// of [`super::head_rows::select`] follow, if the head computes selected rows.
    pub(crate) inputs: DeviceSlice,
    /// Token ids.
    pub(super) tokens: DeviceSlice,
    /// Next tokens; negative targets are ignored.
    pub(super) targets: DeviceSlice,
    /// Positions of tokens in their documents.
    pub(super) positions: DeviceSlice,
    /// Index in its row at which each token's document begins, for the tokens of all ranks; `None`: every row is one document.
    pub(super) documents: Option<DeviceSlice>,
    /// Table of each of [`ModelShape::ropes`], fp32 `[seq_length, rotary_dim / 2, 2]`; filled by the caller with
    /// [`super::rope::RopeTable`].
    pub(crate) rope_tables: Vec<DeviceSlice>,
    /// Rows that the head computes and their workspaces, if it computes [`super::head_rows::HeadRows::Trained`].
    pub(super) head_rows: Option<HeadRowsWork>,
    /// Arrays of the loss of pairs, completions or a teacher; `None` for the cross-entropy of tokens.
    pub(crate) objective: Option<ObjectiveWork>,
    /// Mean loss of the optimizer step, fp32 `[1]`; not multiplied by the loss scale. With an objective `[6]`: see
    /// [`crate::pair_loss::REPORT_WORDS`].
    pub loss: DeviceSlice,
    pub(super) layers: Vec<LayerActivations>,
    /// Residual stream after the last layer, `[T, channels]`.
    pub(super) final_norm_in: DeviceSlice,
    pub(super) final_norm_out: DeviceSlice,
    pub(super) final_norm_stats: DeviceSlice,
    /// Logits of a tile of the loss, and in their place the gradients of these logits.
    pub(crate) logits: DeviceSlice,
    pub(super) loss_stats: DeviceSlice,
    /// Gradient of the residual stream, updated in place from the head down to the embeddings, `[T, channels]`.
    pub(super) dresidual: DeviceSlice,
    /// Gradient of a norm's output, `[T, channels]`.
    pub(super) dnorm: DeviceSlice,
    /// Workspaces of sequence parallelism.
    pub(super) sequence_work: Option<SequenceWork>,
    /// Workspaces of experts.
    pub(super) experts: Option<ExpertWork>,
    /// Workspaces of shared experts.
    pub(super) shared: Option<SharedWork>,
    /// Workspaces of FP8 products, if layers use FP8.
    pub(super) fp8: Option<Fp8Work>,
    /// Workspaces of gates of attention's output.
    pub(super) gates: Option<AttnGateWork>,
    /// Workspaces of gated delta rules.
    pub(super) delta: Option<DeltaWork>,
    /// Gradient of a second matrix's input: attention's output or the activation, `[T, max]`.
    pub(super) dinner: DeviceSlice,
    /// Gradient of a first matrix's output: qkv or gate and up, `[T, max]`.
    pub(super) dfused: DeviceSlice,
}

/// Activations of one layer, its own or shared, in the order of the forward pass. The first dimension is T unless stated otherwise.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerActivations {
    pub policy: LayerPolicy,
    /// Whether this is the last layer of its segment that uses the shared buffers, so that they still hold its values when its backward
    /// pass begins.
    pub(crate) intact: bool,
    /// Whether a segment other than the first begins with this layer. The segment below leaves the residual stream after its last layer in
    /// [`Activations::final_norm_in`], because both segments use the same memory.
    pub(crate) begins_segment: bool,
    /// Residual stream before the layer.
    pub input: DeviceSlice,
    /// Offload of the input to host memory, if there is any.
    pub(crate) host_input: Option<HostTurn>,
    /// Offload of `attn_out` and `lse`.
    pub(super) host_attention: [Option<HostTurn>; 2],
    pub(crate) attn_norm: NormActivations,
    /// The projections, if a norm or a convolution changes them before attention.
    pub(crate) projected: Option<ProjectedQkv>,
    /// Projection to the gate of attention's output, and the next two projections of a gated delta rule; each empty without one.
    pub(crate) attn_gate: DeviceSlice,
    pub(crate) decay: DeviceSlice,
    pub(crate) strength: DeviceSlice,
    /// Latent vectors; empty without them.
    pub(crate) latent: LatentActivations,
    /// Normalised and rotated, convolved, or assembled from latent vectors. With sequence parallelism, this array and the next two hold all tokens and this rank's heads.
    pub qkv: DeviceSlice,
    pub(crate) attn_out: DeviceSlice,
    /// `[batch, heads, seq_length]`; empty without scores.
    pub lse: DeviceSlice,
    pub(crate) post_attn: RawActivations,
    /// Residual stream after attention.
    pub(crate) mid: DeviceSlice,
    pub(crate) mlp_norm: NormActivations,
    /// Like `mlp_act`, this array holds all tokens if the layer saves it, otherwise the tokens that the MLP processes at once.
    pub(crate) mlp_in: DeviceSlice,
    pub(crate) mlp_act: DeviceSlice,
    /// Output of the first matrix of the shared expert; empty without one.
    pub(crate) shared_in: DeviceSlice,
    pub(crate) post_mlp: RawActivations,
    /// Norms of experts beside an MLP; empty without them.
    pub(crate) moe_norms: MoeNormActivations,
    /// Routing results, if the layer has experts.
    pub(crate) routed: Option<RoutedActivations>,
    /// Inputs of the linear layers, transposed and in 8 bits, if they are saved.
    pub(super) fp8: [Option<DeviceSlice>; LINEARS],
}

impl LayerActivations {
    /// Offloaded activations.
    pub(super) fn on_host(&self) -> impl Iterator<Item = &HostTurn> {
        self.host_input.iter().chain(self.host_attention.iter().flatten())
    }
}

/// Latent vectors of latent attention. The vector of queries before its norm is [`ProjectedQkv::raw`].
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentActivations {
    /// Vector of keys and values before its norm, `[T, rank]`.
    pub(super) raw: DeviceSlice,
    /// Channels of keys before their rotation, `[T, rotary]`.
    pub(super) key: DeviceSlice,
    /// Normalised vector of keys and values, `[T, rank]`.
    pub(super) normed: DeviceSlice,
    /// Normalised vector of queries, `[T, query_rank]`; empty if queries are projections of the input.
    pub(super) queries: DeviceSlice,
}

/// Output and statistics of the norm before attention or an MLP; empty without such a norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormActivations {
    pub out: DeviceSlice,
    pub stats: DeviceSlice,
}

/// Input and statistics of the norm after attention or an MLP; empty without such a norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawActivations {
    pub raw: DeviceSlice,
    pub stats: DeviceSlice,
}

/// Norms of experts beside an MLP. The norms of the router's input and of the experts' input have the statistics of the norm before the MLP,
/// whose input is theirs.
#[derive(Clone, Copy, Debug)]
pub(super) struct MoeNormActivations {
    /// Output of the norm before the experts.
    pub(super) experts: DeviceSlice,
    pub(super) post_experts: RawActivations,
    pub(super) post_shared: RawActivations,
}

/// Results of a router: see [`crate::device::Route`] and [`crate::device::Segments`].
#[derive(Clone, Copy, Debug)]
pub(super) struct RoutedActivations {
    pub logits: DeviceSlice,
    pub experts: DeviceSlice,
    pub weights: DeviceSlice,
    pub bounds: DeviceSlice,
    /// Bounds of all layers with experts, and the number of elements between the bounds of two layers.
    pub(crate) all_bounds: (DeviceSlice, usize),
    pub slots: DeviceSlice,
    pub entries: DeviceSlice,
}

/// Workspaces of sequence parallelism; T is the number of this rank's tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceWork {
    /// All heads, `[T, max]`.
    pub(super) qkv: DeviceSlice,
    pub(super) out: DeviceSlice,
    /// All tokens, this rank's heads.
    pub(super) dout: DeviceSlice,
    pub(super) dqkv: DeviceSlice,
    /// Gradients of keys and values that several ranks contribute to, and their sum.
    pub(super) parts: DeviceSlice,
}

/// Selected rows of the head. The caller fills the lists, which lie behind the other inputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadRowsWork {
    /// Indices of selected rows, int32 `[T]`.
    pub(super) rows: DeviceSlice,
    /// Their targets, int32 `[T]`.
    pub(super) targets: DeviceSlice,
    /// Hidden states of the selected rows of a tile, `[tile rows, channels]`.
    pub(super) hidden: DeviceSlice,
    /// Gradients of these hidden states.
    pub(super) dhidden: DeviceSlice,
}

/// A loss, with the array that it alone needs.
#[derive(Clone, Copy, Debug)]
pub(super) enum LossWork {
    Pairs {
        loss: PairLoss,
        /// Sums of log-probabilities, int32 `[places, 4]`: see [`crate::pair_loss::SUM_WORDS`].
        sums: DeviceSlice,
    },
    Policy(PolicyLoss),
    Teacher {
        loss: TeacherLoss,
        /// For each row the logits of the teacher's tokens, and then the gradients of these logits and of the target's, fp32 `[T, top_k + 1]`.
        entries: DeviceSlice,
    },
}

impl ObjectiveWork {
    /// The numbers of the reference after a forward pass: sums of log-probabilities of pairs, see [`LossWork::Pairs`], or the list of tokens, see
    /// [`crate::device::PolicyLosses`]; `None` with losses of a teacher.
    pub(crate) fn reference(&self) -> Option<DeviceSlice> {
        match self.loss {
            LossWork::Pairs { sums, .. } => Some(sums),
            LossWork::Policy(_) => Some(self.list),
            LossWork::Teacher { .. } => None,
        }
    }
}

/// Arrays of a loss of pairs, completions or a teacher.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObjectiveWork {
    /// The loss.
    pub(super) loss: LossWork,
    /// The list of the micro-batch, behind its other arrays: pairs, int32 `[places, 8]`, see [`crate::pair_loss::PAIR_WORDS`], or numbers of
    /// all rows, int32 `[T, 4]`, see [`crate::policy_loss::TOKEN_WORDS`], or tokens of a teacher, int32 `[T, top_k, 2]`, see
    /// [`crate::teacher_loss::ENTRY_WORDS`].
    pub(super) list: DeviceSlice,
    /// Softmax statistics of all rows, fp32 `[T, 3]`.
    pub(super) stats: DeviceSlice,
    /// Scales of the gradients of all rows, fp32 `[T]`.
    pub(super) scales: DeviceSlice,
    /// Sums of the reported numbers in fp64, int32 `[6, 2]`.
    pub(super) totals: DeviceSlice,
}

/// Workspaces of experts, for the R = `T * k` rows of all tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertWork {
    /// Inputs or outputs of the experts, `[R, channels]`.
    pub rows: DeviceSlice,
    /// Activations of the experts, `[R, width]`.
    pub act: DeviceSlice,
    /// Gradients of the rows' weights, fp32 `[R]`.
    pub(crate) dweights: DeviceSlice,
    /// Gradients of logits, `[T, experts]`.
    pub(crate) dlogits: DeviceSlice,
    /// Weights of choices times the factors of their experts, fp32 `[T, k]`; empty without such factors.
    pub(super) scaled: DeviceSlice,
}

/// Workspaces of shared experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedWork {
    /// Activation, `[T, width]`.
    pub act: DeviceSlice,
    pub(crate) gate: Option<GateWork>,
}

/// Workspaces of a shared expert's gate: see [`crate::device::Route`] and [`crate::device::Segments`] with a single expert.
#[derive(Clone, Copy, Debug)]
pub(super) struct GateWork {
    pub logits: DeviceSlice,
    pub weights: DeviceSlice,
    /// Gradients of the weights, fp32 `[T]`.
    pub(crate) dweights: DeviceSlice,
    /// Gradients of the logits, `[T]`.
    pub(crate) dlogits: DeviceSlice,
    pub(crate) choices: DeviceSlice,
    pub slots: DeviceSlice,
    pub entries: DeviceSlice,
    pub bounds: DeviceSlice,
}

/// The projections before the norm of queries and keys, or before the short convolution; with latent vectors, queries or their latent vector
/// before its norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProjectedQkv {
    pub raw: DeviceSlice,
    /// Statistics of the norm; empty without one. With latent vectors, of the norm of that of keys and values, then of that of queries.
    pub rstd: DeviceSlice,
}

impl ProjectedQkv {
    /// The projections `raw`, if they have memory of their own.
    pub(super) fn of(raw: DeviceSlice, rstd: DeviceSlice) -> Option<Self> {
        (raw.elems() > 0).then_some(Self { raw, rstd })
    }
}

/// Workspaces of gates of attention's output, for the widest layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttnGateWork {
    /// Attention's output after the gate; in the backward pass also the gradient of attention's output.
    pub(super) out: DeviceSlice,
    /// Gradient of the projection to the gate.
    pub(super) dgate: DeviceSlice,
}

/// Workspaces of gated delta rules, for the widest layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaWork {
    /// Gradient of the output of the short convolution.
    pub(super) dqkv: DeviceSlice,
    pub(super) ddecay: DeviceSlice,
    pub(super) dstrength: DeviceSlice,
}
