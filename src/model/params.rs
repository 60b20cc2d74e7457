//! A model's tensors as device slices, resolved once by role, so that the passes need no look-ups.

use super::fp8::{Fp8Linear, LastWriter};
use super::tensors::{Module, Role, TensorSpec, TensorTable};
use crate::device::{Device, DeviceSlice, ExpandMxfp4, ScaleCell};
use crate::dtype::Dtype;
use crate::dtype::mxfp4::{BLOCK_BYTES, Mxfp4};
use crate::error::{Error, Result};
use std::ops::Range;

/// A vector, or a small matrix whose gradient is not a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Param {
    pub value: DeviceSlice,
    /// The gradient; memory that nothing reads if the tensor is frozen.
    pub grad: DeviceSlice,
}

/// A matrix of products, or an embedding.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixParam {
    pub value: DeviceSlice,
    /// The gradient; `None` if the matrix is frozen.
    pub grad: Option<DeviceSlice>,
}

impl MatrixParam {
    /// A range of the elements.
    pub(super) fn slice(self, start: usize, elems: usize) -> Self {
        Self { value: self.value.slice(start, elems), grad: self.grad.map(|grad| grad.slice(start, elems)) }
    }
}

/// A linear layer: weight `[out_cols, in_cols]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinearParams {
    pub weight: MatrixParam,
    pub bias: Option<Param>,
    pub out_cols: usize,
    pub(crate) in_cols: usize,
    /// FP8 parameters, if the layer uses FP8.
    pub fp8: Option<Fp8Linear>,
}

impl LinearParams {
    /// Destination of the input's scale, if the kernel that writes the input computes it.
    pub(super) fn input_scale(&self) -> Option<ScaleCell> {
        self.fp8.filter(|fp8| fp8.writers[0] == LastWriter::Branch).map(|fp8| fp8.input())
    }

    /// Destination of the scale of the output's gradient, if `writer` computes it.
    pub(super) fn gradient_scale(&self, writer: LastWriter) -> Option<ScaleCell> {
        self.fp8.filter(|fp8| fp8.writers[1] == writer).map(|fp8| fp8.gradient())
    }
}

impl LinearParams {
    /// Only these rows of the weight, for a layer without bias.
    fn rows(&self, rows: Range<usize>) -> Self {
        let weight = self.weight.slice(rows.start * self.in_cols, rows.len() * self.in_cols);
        Self { weight, out_cols: rows.len(), ..*self }
    }
}

/// A norm: LayerNorm if it has a bias, otherwise RMSNorm.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormParams {
    pub weight: Param,
    pub bias: Option<Param>,
}

/// The trained rows of a frozen table with a row for each token.
#[derive(Clone, Debug)]
pub(super) struct TokenRows {
    /// The tokens.
    pub(super) tokens: Range<usize>,
    /// Their rows as the optimizer writes them. [`TokenRows::place`] gets a copy before the table is read.
    pub(super) value: DeviceSlice,
    /// Their gradient.
    pub(super) grad: DeviceSlice,
    /// Their rows in the table.
    pub(super) place: DeviceSlice,
}

impl TokenRows {
    /// The rows of these `tokens` of them: those of the table, with their gradient.
    pub(super) fn matrix(&self, tokens: &Range<usize>) -> MatrixParam {
        let columns = self.value.elems() / self.tokens.len();
        let all = MatrixParam { value: self.place, grad: Some(self.grad) };
        all.slice((tokens.start - self.tokens.start) * columns, tokens.len() * columns)
    }
}

#[derive(Debug)]
pub(super) struct EmbedParams {
    pub wte: MatrixParam,
    /// Trained rows of a frozen `wte`.
    pub rows: Option<TokenRows>,
    pub wpe: Option<MatrixParam>,
}

#[derive(Debug)]
pub(super) struct LayerParams {
    pub(crate) attn_norm: Option<NormParams>,
    pub(crate) post_attn_norm: Option<NormParams>,
    pub qkv: LinearParams,
    /// Projection to the gate of attention's output.
    pub(crate) attn_gate: Option<LinearParams>,
    pub(crate) delta: Option<DeltaParams>,
    pub(crate) latent: Option<LatentParams>,
    /// Norm weights of queries and of keys.
    pub qk_norm: Option<(Param, Param)>,
    pub(crate) attn_out: LinearParams,
    pub(crate) sinks: Option<Param>,
    /// Factor on the residual stream after the layer.
    pub(crate) scale: Option<Param>,
    pub(crate) mlp_norm: Option<NormParams>,
    pub(crate) post_mlp_norm: Option<NormParams>,
    /// Router of the experts.
    pub(crate) router: Option<LinearParams>,
    /// Correction of the experts' scores: see [`super::correction`].
    pub(crate) correction: Option<Param>,
    pub(crate) shared: Option<SharedParams>,
    pub(crate) moe_norms: Option<MoeNormParams>,
    pub(crate) mlp_in: LinearParams,
    pub(crate) mlp_out: LinearParams,
    /// Expansions of the layer's matrices in MXFP4 into the memory of their values, which all layers share.
    pub(crate) expansions: Vec<ExpandMxfp4>,
}

/// Tensors of a gated delta rule.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeltaParams {
    pub(crate) decay: LinearParams,
    pub(crate) strength: LinearParams,
    pub(crate) conv: Param,
    /// Logarithm of the rate of decay.
    pub(crate) rate: Param,
    pub(crate) decay_bias: Param,
    /// Weight of the gated norm.
    pub(crate) norm: Param,
}

/// Tensors of latent attention; the projection to queries or to their latent vector is [`LayerParams::qkv`].
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentParams {
    /// Projection to the latent vector of keys and values.
    pub(crate) latent: LinearParams,
    /// Projection to the rotated channels of keys.
    pub(crate) key: LinearParams,
    pub(crate) norm: NormParams,
    /// Keys and values from their latent vector.
    pub(crate) kv: LinearParams,
    /// Norm of the latent vector of queries, and queries from it.
    pub(crate) queries: Option<(NormParams, LinearParams)>,
}

/// The shared expert of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedParams {
    pub(crate) mlp_in: LinearParams,
    pub(crate) mlp_out: LinearParams,
    /// Weight `[1, channels]`.
    pub gate: Option<LinearParams>,
}

/// Norms and factors of experts beside an MLP.
#[derive(Clone, Copy, Debug)]
pub(super) struct MoeNormParams {
    /// Factor on the router's normalised input, as the weight of a norm.
    pub router: NormParams,
    /// Factors on the weights of choices.
    pub expert_scale: Param,
    pub(crate) experts: NormParams,
    pub(crate) post_experts: NormParams,
    pub(crate) post_shared: NormParams,
}

#[derive(Debug)]
pub(super) struct HeadParams {
    pub norm: NormParams,
    /// The token embedding if it is tied.
    pub output: LinearParams,
    /// Trained rows of a frozen `output`.
    pub rows: Option<TokenRows>,
}

/// The memory of a model's parameters, in the compute format unless stated otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParamMemory {
    /// Flat weights of trained tensors, `[table.flat_elems()]`.
    pub(crate) weights: DeviceSlice,
    /// Flat gradients, `[table.flat_elems()]`.
    pub(crate) grads: DeviceSlice,
    pub(crate) frozen: FrozenMemory,
}

/// The memory of frozen tensors, in the compute format unless stated otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrozenMemory {
    /// Weights of frozen tensors in the compute format, `[table.frozen_elems()]`.
    pub(crate) weights: DeviceSlice,
    /// Memory for gradients that nothing reads, `[table.unused_grad_elems()]`.
    pub(crate) unused_grads: DeviceSlice,
    /// Codes of all tensors in MXFP4, then their scales: uint8 `[table.packed_bytes()]`.
    packed: DeviceSlice,
    /// The expanded tensors of one module, `[table.expanded_elems()]`.
    expanded: DeviceSlice,
}

impl FrozenMemory {
    /// Allocates the memory of the frozen tensors of `table`.
    ///
    /// # Errors
    /// `Resource` when memory is not available.
    pub(crate) fn alloc<D: Device>(dev: &mut D, table: &TensorTable, dtype: Dtype) -> Result<Self> {
        Ok(Self {
            weights: dev.alloc("frozen weights", table.frozen_elems(), dtype)?,
            unused_grads: dev.alloc("unused gradients", table.unused_grad_elems(), dtype)?,
            packed: dev.alloc("packed experts", table.packed_bytes(), Dtype::Uint8)?,
            expanded: dev.alloc("expanded experts", table.expanded_elems(), dtype)?,
        })
    }

    /// Codes and scales of `elems` packed elements from element `start` of their range on; both are whole blocks.
    pub(crate) fn packed(&self, start: usize, elems: usize) -> [DeviceSlice; 2] {
        let ([code, scale], [codes, scales]) = (Mxfp4::bytes(start), Mxfp4::bytes(elems));
        [self.packed.slice(code, codes), self.packed.slice(self.all_codes() + scale, scales)]
    }

    /// Bytes of the codes of all tensors.
    fn all_codes(&self) -> usize {
        self.packed.elems() / (BLOCK_BYTES + 1) * BLOCK_BYTES
    }
}

impl ParamMemory {
    /// Checks the lengths for `table`, and that the compute format is `dtype`.
    pub(super) fn check(&self, table: &TensorTable, dtype: Dtype) -> Result<()> {
        let (flat, FrozenMemory { weights, unused_grads, packed, expanded }) = (table.flat_elems(), self.frozen);
        let all = [
            ("weights", self.weights, flat, dtype),
            ("gradients", self.grads, flat, dtype),
            ("frozen weights", weights, table.frozen_elems(), dtype),
            ("unused gradients", unused_grads, table.unused_grad_elems(), dtype),
            ("packed experts", packed, table.packed_bytes(), Dtype::Uint8),
            ("expanded experts", expanded, table.expanded_elems(), dtype),
        ];
        match all.into_iter().find(|(_, slice, elems, dtype)| (slice.elems(), slice.dtype()) != (*elems, *dtype)) {
            None => Ok(()),
            Some((name, slice, elems, dtype)) => {
                Err(Error::usage(format_args!("model {name}: {} of {}, expected {elems} of {dtype}", slice.elems(), slice.dtype())))
            }
        }
    }
}

/// The memory of all parameters, by the ranges of a table.
pub(super) struct Flat<'a> {
    pub table: &'a TensorTable,
    pub memory: ParamMemory,
}

impl Flat<'_> {
    pub(super) fn embed(&self) -> EmbedParams {
        let wpe = self.table.find(Module::Embed, Role::Wpe).map(|spec| self.matrix(spec));
        let rows = self.token_rows(Module::Embed, [Role::Wte, Role::WteRows]);
        EmbedParams { wte: self.matrix(self.spec(Module::Embed, Role::Wte)), rows, wpe }
    }

    /// The trained rows of a frozen table.
    fn token_rows(&self, module: Module, [table, rows]: [Role; 2]) -> Option<TokenRows> {
        let spec = self.table.find(module, rows)?;
        let (first, columns, Param { value, grad }) = (spec.first_token()?, spec.row_elems(), self.slice(spec));
        let place = self.value(self.spec(module, table)).slice(first * columns, spec.elems());
        Some(TokenRows { tokens: first..first + spec.shape[0], value, grad, place })
    }

    pub(super) fn layer(&self, layer: usize) -> LayerParams {
        let module = Module::Layer(layer);
        let (qkv, attn_gate) = self.qkv(module);
        LayerParams {
            attn_norm: self.norm(module, Role::AttnNorm, Role::AttnNormBias),
            post_attn_norm: self.norm(module, Role::PostAttnNorm, Role::PostAttnNormBias),
            qkv,
            attn_gate,
            delta: self.delta(module),
            latent: self.latent(module),
            qk_norm: self.find(module, Role::QNorm).zip(self.find(module, Role::KNorm)),
            attn_out: self.linear(module, Role::AttnOut, Some(Role::AttnOutBias)),
            sinks: self.find(module, Role::Sinks),
            scale: self.find(module, Role::LayerScale),
            mlp_norm: self.norm(module, Role::MlpNorm, Role::MlpNormBias),
            post_mlp_norm: self.norm(module, Role::PostMlpNorm, Role::PostMlpNormBias),
            router: self.table.find(module, Role::Router).map(|_| self.linear(module, Role::Router, Some(Role::RouterBias))),
            correction: self.find(module, Role::Correction),
            shared: self.shared(module),
            moe_norms: self.moe_norms(module),
            mlp_in: self.linear(module, Role::MlpIn, Some(Role::MlpInBias)),
            mlp_out: self.linear(module, Role::MlpOut, Some(Role::MlpOutBias)),
            expansions: self.expansions(module),
        }
    }

    fn expansions(&self, module: Module) -> Vec<ExpandMxfp4> {
        let packed = self.table.packed().iter().filter(|spec| spec.module == module);
        let expansion = |spec: &TensorSpec| {
            let [codes, scales] = self.memory.frozen.packed(spec.offset_elems, spec.elems());
            ExpandMxfp4 { codes, scales, out: self.value(spec) }
        };
        packed.map(expansion).collect()
    }

    /// The projections to queries, keys and values, and to the gate of attention's output.
    fn qkv(&self, module: Module) -> (LinearParams, Option<LinearParams>) {
        let all = self.linear(module, Role::Qkv, Some(Role::QkvBias));
        match self.spec(module, Role::Qkv).gate_rows() {
            0 => (all, self.table.find(module, Role::DeltaGate).map(|_| self.linear(module, Role::DeltaGate, None))),
            gates => (all.rows(gates..all.out_cols), Some(all.rows(0..gates))),
        }
    }

    fn delta(&self, module: Module) -> Option<DeltaParams> {
        let conv = self.find(module, Role::DeltaConv)?;
        let decay = self.linear(module, Role::DeltaDecay, None);
        let (decay, strength) = match self.spec(module, Role::DeltaDecay).gate_rows() {
            0 => (decay, self.linear(module, Role::DeltaStrength, None)),
            rows => (decay.rows(0..rows), decay.rows(rows..decay.out_cols)),
        };
        Some(DeltaParams {
            decay,
            strength,
            conv,
            rate: self.expect(module, Role::DeltaRate),
            decay_bias: self.expect(module, Role::DeltaDecayBias),
            norm: self.expect(module, Role::DeltaNorm),
        })
    }

    fn latent(&self, module: Module) -> Option<LatentParams> {
        let norm = |role| Some(NormParams { weight: self.find(module, role)?, bias: None });
        let (normed, kv) = (norm(Role::LatentNorm)?, self.linear(module, Role::LatentKv, None));
        let all = self.linear(module, Role::Latent, None);
        let (latent, key) = (all.rows(0..kv.in_cols), all.rows(kv.in_cols..all.out_cols));
        let queries = norm(Role::LatentQueryNorm).map(|norm| (norm, self.linear(module, Role::LatentQueries, None)));
        Some(LatentParams { latent, key, norm: normed, kv, queries })
    }

    fn shared(&self, module: Module) -> Option<SharedParams> {
        let has = |role| self.table.find(module, role).is_some();
        has(Role::SharedIn).then(|| SharedParams {
            mlp_in: self.linear(module, Role::SharedIn, None),
            mlp_out: self.linear(module, Role::SharedOut, None),
            gate: has(Role::SharedGate).then(|| self.linear(module, Role::SharedGate, None)),
        })
    }

    fn moe_norms(&self, module: Module) -> Option<MoeNormParams> {
        let norm = |role| Some(NormParams { weight: self.find(module, role)?, bias: None });
        Some(MoeNormParams {
            router: norm(Role::RouterScale)?,
            expert_scale: self.find(module, Role::ExpertScale)?,
            experts: norm(Role::ExpertsNorm)?,
            post_experts: norm(Role::PostExpertsNorm)?,
            post_shared: norm(Role::PostSharedNorm)?,
        })
    }

    pub(super) fn head(&self) -> HeadParams {
        let tied = self.table.find(Module::Head, Role::LmHead).is_none();
        let (module, roles) =
            if tied { (Module::Embed, [Role::Wte, Role::WteRows]) } else { (Module::Head, [Role::LmHead, Role::LmHeadRows]) };
        let norm = NormParams { weight: self.expect(Module::Head, Role::FinalNorm), bias: self.find(Module::Head, Role::FinalNormBias) };
        HeadParams { norm, output: self.linear(module, roles[0], None), rows: self.token_rows(module, roles) }
    }

    fn linear(&self, module: Module, weight: Role, bias: Option<Role>) -> LinearParams {
        let spec = self.spec(module, weight);
        LinearParams {
            weight: self.matrix(spec),
            bias: bias.and_then(|role| self.find(module, role)),
            out_cols: spec.shape[0],
            in_cols: spec.row_elems(),
            fp8: None,
        }
    }

    fn norm(&self, module: Module, weight: Role, bias: Role) -> Option<NormParams> {
        self.find(module, weight).map(|weight| NormParams { weight, bias: self.find(module, bias) })
    }

    fn find(&self, module: Module, role: Role) -> Option<Param> {
        self.table.find(module, role).map(|spec| self.slice(spec))
    }

    fn expect(&self, module: Module, role: Role) -> Param {
        self.slice(self.spec(module, role))
    }

    fn spec(&self, module: Module, role: Role) -> &TensorSpec {
        self.table.find(module, role).expect("every decoder has this tensor")
    }

    fn slice(&self, spec: &TensorSpec) -> Param {
        let unused = || {
            let place = self.table.unused_grad(spec);
            self.memory.frozen.unused_grads.slice(place.start, place.len())
        };
        Param { value: self.value(spec), grad: self.grad(spec).unwrap_or_else(unused) }
    }

    fn matrix(&self, spec: &TensorSpec) -> MatrixParam {
        MatrixParam { value: self.value(spec), grad: self.grad(spec) }
    }

    fn value(&self, spec: &TensorSpec) -> DeviceSlice {
        let ParamMemory { weights, frozen, .. } = &self.memory;
        match spec.frozen {
            _ if spec.packed => frozen.expanded.slice(self.table.expanded(spec).start, spec.elems()),
            true => frozen.weights.slice(spec.offset_elems, spec.elems()),
            false => weights.slice(spec.offset_elems, spec.elems()),
        }
    }

    fn grad(&self, spec: &TensorSpec) -> Option<DeviceSlice> {
        (!spec.frozen).then(|| self.memory.grads.slice(spec.offset_elems, spec.elems()))
    }
}
