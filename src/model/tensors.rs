//! The table of a model's tensors: one flat range of parameters in backward order.
//!
//! Weights, gradients, fp32 parameters and both moments use the same offsets. Tensors are ordered as their gradients become final, so that
//! a contiguous bucket is complete early: [`Module::Head`], the last layer down to layer 0, [`Module::Embed`].
//!
//! Frozen tensors have only weights. They lie in a range of their own, in the same order; frozen tensors that stay in MXFP4 lie in a third one.
//! The trained rows of a frozen table are a tensor of their own in the flat range.

mod counts;
mod delta;
mod file_rows;
mod frozen;
mod interleaved;
mod latent;
mod moe_norms;
mod role;
mod token_rows;

use self::file_rows::FileRows;
use self::interleaved::Interleaved;
use super::family::{ExpertFiles, MoeNames, Names, Orientation, SharedNames};
use super::layer_shape::{Attn, AttnKind, Ffn, LayerShape, Mlp, Moe, NormKind, NormSpec, QkSpan, SharedExpertShape, Values};
use super::shape::ModelShape;
use crate::device::CORRECTION_PARTS;
use std::fmt::Display;
use std::ops::Range;

pub(crate) use self::role::{HEAD, Role};

/// Every tensor starts at a multiple of this many elements; the padding between is zero and stays zero.
pub(crate) const TENSOR_ALIGN_ELEMS: usize = 128;
/// The flat length is a multiple of this many elements: one block of the gradient norm.
pub(crate) const FLAT_ALIGN_ELEMS: usize = crate::optim::norm::BLOCK;

/// Name in files of the correction of a router's scores.
const CORRECTION: &str = "e_score_correction_bias";

/// A step of the forward and of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Module {
    /// Token and position embeddings, including a tied output matrix.
    Embed,
    Layer(usize),
    /// Final norm, output matrix and loss.
    Head,
}

/// Initial values of a tensor under `--init random`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Init {
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
    Zeros,
    Ones,
    /// Logarithm of a number between two bounds, all of which are equally likely.
    LogUniform {
        /// Lower bound.
        low: f32,
        /// Upper bound.
        high: f32,
    },
}

/// A Hugging Face tensor that contains some rows of one of the table's tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfPart {
    /// Name in the safetensors files.
    pub name: String,
    /// First row of the table's tensor (for vectors, first element) in this part.
    pub(crate) row_start: usize,
    /// Number of rows (for vectors, elements) in this part.
    pub rows: usize,
    /// Whether the file has `[in, out]` (GPT-2's Conv1D): column `c` of the file is row `row_start + c` here.
    pub transposed: bool,
    /// Number of matrices, or vectors, in a stacked tensor of the file: its first dimension.
    pub(crate) stacked: Option<usize>,
    /// Whether some files have the orientation opposite to `transposed`.
    pub(crate) either_way: bool,
    /// Whether the table's tensor has the elements of the file as sums of [`super::correction::split`].
    pub(crate) split: bool,
    /// The order of rows in the file, if it is not the table's.
    pub(crate) interleaved: Option<Interleaved>,
    /// The place of these rows in a tensor of the file that has further rows.
    pub(crate) file_rows: Option<FileRows>,
}

impl HfPart {
    /// The file's tensor `name`, whose rows are those from `row_start` on.
    fn plain(name: String, row_start: usize, rows: usize) -> Self {
        Self {
            name,
            row_start,
            rows,
            transposed: false,
            stacked: None,
            either_way: false,
            split: false,
            interleaved: None,
            file_rows: None,
        }
    }

    /// Row in the table's part of row `row` of the file's tensor.
    pub(crate) fn table_row(&self, row: usize) -> usize {
        self.interleaved.map_or(row, |order| order.table_row(row, self.rows))
    }

    /// Number of matrices in this part, and rows of each.
    pub(crate) fn matrices(&self) -> (usize, usize) {
        let count = self.stacked.unwrap_or(1);
        (count, self.rows / count)
    }
}

/// One tensor of the flat range.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Index among all tensors of the model, which is also the random stream of its initialisation.
    pub index: usize,
    /// Name in this program: `layers.3.attn.qkv`.
    pub name: String,
    pub(crate) role: Role,
    /// The module after which its gradient is complete.
    pub module: Module,
    /// `[out, in]` row-major, or `[n]`.
    pub shape: Vec<usize>,
    /// First element in the flat range, in the range of frozen tensors, or in that of packed tensors; a multiple of [`TENSOR_ALIGN_ELEMS`].
    pub offset_elems: usize,
    /// Whether training leaves the tensor as it is.
    pub frozen: bool,
    /// Whether the tensor is frozen and stays in MXFP4 on the device.
    pub packed: bool,
    /// Number of experts in the tensor, and number of experts for each token; 1 and 1 without experts.
    pub(crate) experts: (usize, usize),
    /// Whether weight decay applies: matrices, embeddings and, as in the Hugging Face Trainer, sinks and factors of a router; not norms and
    /// biases.
    pub decay: bool,
    pub(crate) init: Init,
    /// Parts in files, see [`TensorSpec::parts`]. If each expert has its own tensors, the parts of one expert, with names relative to its
    /// path.
    pub(super) files: Vec<HfPart>,
    /// Path of the numbered experts, if each expert has its own tensors.
    pub(super) experts_path: Option<String>,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// Range in the flat range, in the range of frozen tensors, or in that of packed tensors, without padding.
    pub fn range(&self) -> Range<usize> {
        self.offset_elems..self.offset_elems + self.elems()
    }

    /// Elements of one row: 1 for vectors.
    pub fn row_elems(&self) -> usize {
        self.shape.get(1).copied().unwrap_or(1)
    }

    /// The Hugging Face tensors that make up this tensor, by ascending rows, covering all rows. Names are built on demand: a model with
    /// experts has tens of thousands, and most tables do not need them.
    pub fn parts(&self) -> impl Iterator<Item = HfPart> {
        let copies = if self.experts_path.is_some() { self.experts.0 } else { 1 };
        let rows = self.shape[0] / copies;
        let of_copy = move |copy: usize| {
            let name = move |name: &String| match &self.experts_path {
                Some(path) => format!("{path}.{copy}.{name}"),
                None => name.clone(),
            };
            self.files.iter().map(move |file| HfPart { name: name(&file.name), row_start: copy * rows + file.row_start, ..*file })
        };
        (0..copies).flat_map(of_copy)
    }

    /// The shape of `part` in its file.
    pub fn part_shape(&self, part: &HfPart) -> Vec<usize> {
        let rows = part.file_rows.map_or(part.matrices().1, |rows| rows.all);
        let one = match (self.shape.get(1), part.transposed) {
            (None, _) => vec![rows],
            (Some(&cols), false) => vec![rows, cols],
            (Some(&cols), true) => vec![cols, rows],
        };
        part.stacked.into_iter().chain(one).collect()
    }

    /// `part` in the orientation of a tensor of shape `found` in a file. Without a second orientation, or if neither fits, `part` itself.
    pub(crate) fn oriented(&self, part: HfPart, found: &[usize]) -> HfPart {
        let turned = HfPart { transposed: !part.transposed, ..part.clone() };
        if part.either_way && self.part_shape(&turned) == found { turned } else { part }
    }
}

/// All tensors of a model, in flat order.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorTable {
    specs: Vec<TensorSpec>,
    /// Frozen tensors in the compute format.
    frozen: Vec<TensorSpec>,
    /// Frozen tensors in MXFP4.
    packed: Vec<TensorSpec>,
    /// First element of every module in backward order, then the end.
    module_starts: Vec<usize>,
    /// Elements of the longest module that a ring may hold, and of the longest pair of such modules in flat order.
    longest_streamed: [usize; 2],
}

impl TensorTable {
    /// The table of `shape`.
    pub fn new(shape: &ModelShape) -> Self {
        let mut builder = TableBuilder {
            shape,
            names: shape.family.spec().names,
            specs: Vec::new(),
            row_tensors: 0,
            end: 0,
            frozen_end: 0,
            packed_end: 0,
        };
        let mut module_starts = vec![0];
        builder.head();
        module_starts.push(builder.end);
        for layer in (0..shape.layers.len()).rev() {
            builder.layer(layer);
            module_starts.push(builder.end);
        }
        builder.embed();
        module_starts.push(builder.end.max(token_rows::least_elems(shape)).next_multiple_of(FLAT_ALIGN_ELEMS));
        let longest_streamed = longest(&module_starts);
        let (frozen, specs): (Vec<_>, _) = builder.specs.into_iter().partition(|spec| spec.frozen);
        let (packed, frozen) = frozen.into_iter().partition(|spec| spec.packed);
        Self { specs, frozen, packed, module_starts, longest_streamed }
    }

    /// Elements of the longest module that a ring may hold: every module but the embeddings.
    pub(crate) fn longest_streamed_module(&self) -> usize {
        self.longest_streamed[0]
    }

    /// Elements of the longest such module together with the next one in flat order.
    pub(crate) fn longest_streamed_pair(&self) -> usize {
        self.longest_streamed[1]
    }

    /// Elements of the longest layer.
    pub(crate) fn longest_layer(&self) -> usize {
        let layers = self.modules().filter(|module| matches!(module, Module::Layer(_)));
        layers.map(|layer| self.module_range(layer).len()).max().unwrap_or(0)
    }

    /// Every trained tensor, in flat order.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// The tensor of `module` with `role`, if the model has one.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn find(&self, module: Module, role: Role) -> Option<&TensorSpec> {
        let frozen = self.all_frozen().filter(|spec| spec.module == module);
        self.of(module).iter().chain(frozen).find(|spec| spec.role == role)
    }

    /// Trained tensors of `module`.
    fn of(&self, module: Module) -> &[TensorSpec] {
        let Range { start, end } = self.module_range(module);
        let before = |offset| self.specs.partition_point(|spec| spec.offset_elems < offset);
        &self.specs[before(start)..before(end)]
    }

    /// Modules in backward order: head, last layer to first, embeddings.
    pub fn modules(&self) -> impl DoubleEndedIterator<Item = Module> + use<> {
        let layers = self.module_starts.len() - 3;
        std::iter::once(Module::Head).chain((0..layers).rev().map(Module::Layer)).chain(std::iter::once(Module::Embed))
    }

    /// The flat range of `module`, including padding; the ranges of all modules cover the flat range without gaps.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub fn module_range(&self, module: Module) -> Range<usize> {
        let idx = self.module_index(module);
        self.module_starts[idx]..self.module_starts[idx + 1]
    }

    /// Number of modules before `module` in backward order.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn module_index(&self, module: Module) -> usize {
        let layers = self.module_starts.len() - 3;
        match module {
            Module::Head => 0,
            Module::Layer(layer) => {
                assert!(layer < layers, "layer {layer} of {layers}");
                layers - layer
            }
            Module::Embed => layers + 1,
        }
    }

    /// Ranges of `module` that belong to no tensor.
    pub fn padding(&self, module: Module) -> impl Iterator<Item = Range<usize>> {
        let specs = self.of(module);
        let ends = specs.iter().skip(1).map(|next| next.offset_elems).chain([self.module_range(module).end]);
        specs.iter().zip(ends).map(|(spec, end)| spec.range().end..end).filter(|pad| !pad.is_empty())
    }

    /// Length of the flat range, including padding: a multiple of [`FLAT_ALIGN_ELEMS`].
    pub fn flat_elems(&self) -> usize {
        self.module_starts[self.module_starts.len() - 1]
    }
}

/// The longest module, and the longest pair of neighbours, of modules that begin at `starts`, without the last module.
fn longest(starts: &[usize]) -> [usize; 2] {
    let streamed = &starts[..starts.len() - 1];
    let longest_of = |modules: usize| streamed.windows(modules + 1).map(|pair| pair[modules] - pair[0]).max();
    let module = longest_of(1).unwrap_or(0);
    [module, longest_of(2).unwrap_or(module)]
}

struct TableBuilder<'a> {
    shape: &'a ModelShape,
    names: &'static Names,
    /// All tensors.
    specs: Vec<TensorSpec>,
    /// Tensors of rows among them.
    row_tensors: usize,
    end: usize,
    /// End of the range of frozen tensors.
    frozen_end: usize,
    /// End of the range of packed tensors.
    packed_end: usize,
}

impl TableBuilder<'_> {
    fn push(&mut self, module: Module, role: Role, shape: Vec<usize>, init: Init, files: Vec<HfPart>) {
        let name = match module {
            Module::Layer(layer) => format!("layers.{layer}.{}", role.name(self.gated(layer))),
            _ => role.name(false).to_string(),
        };
        let decay = shape.len() == 2 || matches!(role, Role::Sinks | Role::DeltaRate | Role::RouterScale | Role::ExpertScale);
        let (index, frozen, experts_path) = (self.specs.len() - self.row_tensors, self.shape.frozen.contains(&name), None);
        let packed = frozen && self.shape.packs_experts && files.iter().all(HfPart::may_be_packed);
        let end = match (frozen, packed) {
            (_, true) => &mut self.packed_end,
            (true, false) => &mut self.frozen_end,
            (false, false) => &mut self.end,
        };
        let (offset_elems, experts) = (*end, (1, 1));
        let spec = TensorSpec { index, name, role, module, shape, offset_elems, frozen, packed, experts, decay, init, files, experts_path };
        *end = (offset_elems + spec.elems()).next_multiple_of(TENSOR_ALIGN_ELEMS);
        self.specs.push(spec);
    }

    /// A tensor that equals one Hugging Face tensor.
    fn whole(&mut self, module: Module, role: Role, shape: Vec<usize>, init: Init, name: String) {
        let part = HfPart::plain(name, 0, shape[0]);
        self.push(module, role, shape, init, vec![part]);
    }

    fn matrix_init(&self) -> Init {
        Init::Normal { std: self.shape.init_std }
    }

    /// GPT-2 scales down the initial values of the two matrices of each layer that write to the residual stream.
    fn residual_init(&self) -> Init {
        let depth = if self.names.transposed { (2.0 * self.shape.layers.len() as f32).sqrt() } else { 1.0 };
        Init::Normal { std: self.shape.init_std / depth }
    }

    fn gated(&self, layer: usize) -> bool {
        self.shape.layers[layer].mlp.ffn().gated()
    }

    fn norm(&mut self, module: Module, norm: NormSpec, (weight, bias): (Role, Role), path: Option<String>) {
        let (Some(path), channels) = (path, self.shape.channels) else { return };
        self.whole(module, weight, vec![channels], norm_init(norm), format!("{path}.weight"));
        if norm.kind == NormKind::Layer {
            self.whole(module, bias, vec![channels], Init::Zeros, format!("{path}.bias"));
        }
    }

    /// A linear layer with the rows of `paths` concatenated, `rows[i]` each.
    fn linear(&mut self, module: Module, roles: (Role, Option<Role>), paths: &[String], rows: &[usize], cols: usize, init: Init) {
        let total = rows.iter().sum();
        self.push(module, roles.0, vec![total, cols], init, in_a_row(paths, "weight", rows, self.names.transposed));
        if let Some(bias) = roles.1 {
            self.push(module, bias, vec![total], Init::Zeros, in_a_row(paths, "bias", rows, false));
        }
    }

    fn head(&mut self) {
        let Names { prefix, head, final_norm, .. } = *self.names;
        let ModelShape { vocab, channels, tied, final_norm: norm, .. } = *self.shape;
        if !tied {
            self.table(Module::Head, [Role::LmHead, Role::LmHeadRows], [vocab, channels], head.into());
        }
        self.norm(Module::Head, norm, (Role::FinalNorm, Role::FinalNormBias), Some(format!("{prefix}{final_norm}")));
    }

    fn layer(&mut self, layer: usize) {
        let path = format!("{}{}.{layer}.", self.names.prefix, self.names.layers);
        let at = |name: &str| format!("{path}{name}");
        let shape = self.shape.layers[layer];
        if shape.scaled {
            self.whole(Module::Layer(layer), Role::LayerScale, vec![1], Init::Ones, at("layer_scalar"));
        }
        self.mlp(Module::Layer(layer), shape, at);
        self.attention(Module::Layer(layer), shape, at);
    }

    fn mlp(&mut self, module: Module, LayerShape { mlp, norm, .. }: LayerShape, at: impl Fn(&str) -> String) {
        let Names { mlp_norm, post_mlp_norm, .. } = *self.names;
        self.norm(module, norm, (Role::PostMlpNorm, Role::PostMlpNormBias), post_mlp_norm.map(&at));
        match (mlp, &self.shape.family.spec().moe) {
            (Mlp::Moe(moe), Some(spec)) => self.experts(module, moe, &spec.names, &at),
            _ => self.dense(module, mlp.ffn(), &at),
        }
        self.norm(module, norm, (Role::MlpNorm, Role::MlpNormBias), mlp_norm.map(&at));
    }

    fn dense(&mut self, module: Module, ffn: Ffn, at: impl Fn(&str) -> String) {
        let (&Names { mlp_in, mlp_out, .. }, channels) = (self.names, self.shape.channels);
        let in_rows = vec![ffn.in_cols() / mlp_in.len(); mlp_in.len()];
        let paths: Vec<String> = mlp_in.iter().map(|name| at(name)).collect();
        let bias = |role| ffn.bias.then_some(role);
        self.linear(module, (Role::MlpOut, bias(Role::MlpOutBias)), &[at(mlp_out)], &[channels], ffn.width, self.residual_init());
        self.linear(module, (Role::MlpIn, bias(Role::MlpInBias)), &paths, &in_rows, channels, self.matrix_init());
    }

    /// Experts and their router.
    fn experts(&mut self, module: Module, moe: Moe, names: &MoeNames, at: impl Fn(&str) -> String) {
        let from = self.specs.len();
        match names.files {
            ExpertFiles::Each(files) => {
                self.experts_apart(module, moe, files);
                for spec in &mut self.specs[from..] {
                    spec.experts_path = Some(at(names.experts));
                }
            }
            ExpertFiles::Stacked(files, orientation) => {
                self.experts_stacked(module, moe, (files, orientation), |name| at(&format!("{}.{name}", names.experts)));
            }
        }
        for spec in &mut self.specs[from..] {
            spec.experts = (moe.experts, moe.top_k);
        }
        let roles = (Role::Router, moe.router_bias.then_some(Role::RouterBias));
        self.linear(module, roles, &[at(names.router)], &[moe.experts], self.shape.channels, self.matrix_init());
        if moe.corrected {
            self.correction(module, moe.experts, at(&format!("{}.{CORRECTION}", names.router)));
        }
        if moe.own_norms {
            self.moe_norms(module, moe.experts, &at);
        }
        if let (Some(shape), Some(shared)) = (moe.shared, &names.shared) {
            self.shared_expert(module, shape, shared, at);
        }
    }

    fn correction(&mut self, module: Module, experts: usize, name: String) {
        let part = HfPart { split: true, ..HfPart::plain(name, 0, experts) };
        self.push(module, Role::Correction, vec![CORRECTION_PARTS * experts], Init::Zeros, vec![part]);
    }

    fn shared_expert(&mut self, module: Module, shape: SharedExpertShape, names: &SharedNames, at: impl Fn(&str) -> String) {
        let (SharedExpertShape { width, .. }, channels) = (shape, self.shape.channels);
        let path = |name: &str| at(&format!("{}.{name}", names.path));
        let (residual_init, init) = (self.residual_init(), self.matrix_init());
        self.linear(module, (Role::SharedOut, None), &[path("down_proj")], &[channels], width, residual_init);
        self.linear(module, (Role::SharedIn, None), &[path("gate_proj"), path("up_proj")], &[width, width], channels, init);
        if let Some(gate) = names.gate {
            self.linear(module, (Role::SharedGate, None), &[at(gate)], &[1], channels, init);
        }
    }

    fn experts_apart(&mut self, module: Module, moe: Moe, [gate, up, down]: [&str; 3]) {
        let (Moe { experts, ffn, .. }, channels) = (moe, self.shape.channels);
        let (residual_init, init) = (self.residual_init(), self.matrix_init());
        let mut each = |role, names: &[&str], (rows, cols): (usize, usize), init| {
            let files = in_a_row(names, "weight", &vec![rows; names.len()], self.names.transposed);
            self.push(module, role, vec![experts * names.len() * rows, cols], init, files);
        };
        each(Role::MlpOut, &[down], (channels, ffn.width), residual_init);
        each(Role::MlpIn, &[gate, up], (ffn.width, channels), init);
    }

    fn experts_stacked(
        &mut self,
        module: Module,
        moe: Moe,
        ([into, out], orientation): ([&str; 2], Orientation),
        at: impl Fn(&str) -> String,
    ) {
        let (Moe { experts, ffn, .. }, channels, init) = (moe, self.shape.channels, self.matrix_init());
        let (transposed, either_way) = (orientation == Orientation::Transposed, orientation == Orientation::ByShape);
        let mut stack = |roles: (Role, Role), name: &str, rows: usize, cols: usize| {
            let rows = experts * rows;
            let vectors = HfPart { stacked: Some(experts), ..HfPart::plain(at(name), 0, rows) };
            self.push(module, roles.0, vec![rows, cols], init, vec![HfPart { transposed, either_way, ..vectors.clone() }]);
            if ffn.bias {
                self.push(module, roles.1, vec![rows], Init::Zeros, vec![HfPart { name: at(&format!("{name}_bias")), ..vectors }]);
            }
        };
        stack((Role::MlpOut, Role::MlpOutBias), out, channels, ffn.width);
        stack((Role::MlpIn, Role::MlpInBias), into, ffn.in_cols(), channels);
    }

    fn attention(&mut self, module: Module, LayerShape { attn, norm, .. }: LayerShape, at: impl Fn(&str) -> String) {
        let (&Names { attn_norm, post_attn_norm, .. }, norms) = (self.names, (Role::AttnNorm, Role::AttnNormBias));
        self.norm(module, norm, (Role::PostAttnNorm, Role::PostAttnNormBias), post_attn_norm.map(&at));
        match attn.kind {
            AttnKind::Delta => self.delta(module, attn, &at),
            AttnKind::Latent(latent) => self.latent(module, attn, latent, &at),
            AttnKind::Softmax | AttnKind::GatedSoftmax => self.softmax(module, attn, norm, &at),
        }
        self.norm(module, norm, norms, attn_norm.map(&at));
    }

    /// Tensors of attention with scores, without the norms of the residual stream.
    fn softmax(&mut self, module: Module, attn: Attn, norm: NormSpec, at: impl Fn(&str) -> String) {
        let (&Names { qkv, attn_out, .. }, channels) = (self.names, self.shape.channels);
        let Attn { kind, heads, kv_heads, head_dim, qk_norm, values, qkv_bias, out_bias, sinks, .. } = attn;
        let (q_rows, kv_rows) = (heads * head_dim, kv_heads * head_dim);
        let qkv_rows: &[usize] = match (qkv.len(), values) {
            (1, _) => &[q_rows + 2 * kv_rows],
            (_, Values::NormedKeys) => &[q_rows, kv_rows],
            _ => &[q_rows, kv_rows, kv_rows],
        };
        let paths: Vec<String> = qkv.iter().take(qkv_rows.len()).map(|name| at(name)).collect();
        let out_roles = (Role::AttnOut, out_bias.then_some(Role::AttnOutBias));
        self.linear(module, out_roles, &[at(attn_out)], &[channels], q_rows, self.residual_init());
        if let Some(span) = qk_norm {
            let (q, k) = if span == QkSpan::Head { (head_dim, head_dim) } else { (q_rows, kv_rows) };
            self.whole(module, Role::QNorm, vec![q], norm_init(norm), at("self_attn.q_norm.weight"));
            self.whole(module, Role::KNorm, vec![k], norm_init(norm), at("self_attn.k_norm.weight"));
        }
        if sinks {
            self.whole(module, Role::Sinks, vec![heads], self.matrix_init(), at("self_attn.sinks"));
        }
        let qkv_roles = (Role::Qkv, qkv_bias.then_some(Role::QkvBias));
        if kind != AttnKind::GatedSoftmax {
            return self.linear(module, qkv_roles, &paths, qkv_rows, channels, self.matrix_init());
        }
        let mut files = in_a_row(&paths, "weight", &[2 * q_rows, kv_rows, kv_rows], false);
        files[0].interleaved = Some(Interleaved::new(&[head_dim, head_dim]));
        self.push(module, Role::Qkv, vec![2 * (q_rows + kv_rows), channels], self.matrix_init(), files);
    }

    fn embed(&mut self) {
        let Names { prefix, wte, .. } = *self.names;
        let ModelShape { vocab, channels, max_positions, learned_positions, .. } = *self.shape;
        self.table(Module::Embed, [Role::Wte, Role::WteRows], [vocab, channels], format!("{prefix}{wte}.weight"));
        if learned_positions {
            self.whole(Module::Embed, Role::Wpe, vec![max_positions, channels], self.matrix_init(), format!("{prefix}wpe.weight"));
        }
    }
}

/// Parts with the rows of `paths` concatenated, `rows[i]` each.
fn in_a_row(paths: &[impl Display], suffix: &str, rows: &[usize], transposed: bool) -> Vec<HfPart> {
    let mut end = 0;
    let file = |(path, &rows)| {
        end += rows;
        HfPart { transposed, ..HfPart::plain(format!("{path}.{suffix}"), end - rows, rows) }
    };
    paths.iter().zip(rows).map(file).collect()
}

/// A norm initially multiplies by one.
fn norm_init(norm: NormSpec) -> Init {
    if norm.plus_one { Init::Zeros } else { Init::Ones }
}

#[cfg(test)]
pub(in crate::model) mod tests {
    use super::super::family::Family;
    use super::*;
    use std::path::Path;

    /// The configuration `text`, with its keys in `text_config` too if the family may read them there.
    fn nested(architecture: &str, text: &str) -> String {
        let mut config: serde_json::Value = serde_json::from_str(text).unwrap();
        if Family::find(architecture).unwrap().text_part().is_some() {
            config["text_config"] = config.clone();
        }
        config.to_string()
    }

    pub(in crate::model) fn shape(architecture: &str) -> ModelShape {
        let spec = Family::find(architecture).unwrap().spec();
        let more = match spec.moe {
            _ if spec.is_gemma4() => {
                r#", "hidden_size_per_layer_input": 0, "global_head_dim": 12, "attention_k_eq_v": true, "num_global_key_value_heads": 1,
                "enable_moe_block": true, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 12,
                "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5}, "sliding_attention":
                {"rope_type": "default"}}"#
            }
            _ if spec.latent().is_some() => {
                r#", "num_key_value_heads": 4, "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                "v_head_dim": 5, "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1,
                "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1"#
            }
            None if spec.scales_queries => r#", "rope_scaling": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}"#,
            None => "",
            Some(_) => {
                r#", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1,
                "shared_expert_intermediate_size": 20, "max_window_layers": 2, "rope_scaling": {"rope_type": "default"}"#
            }
        };
        let text = format!(
            r#"{{"architectures": ["{architecture}"], "vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
            "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "full_attention_interval": 2{more}}}"#
        );
        ModelShape::parse(&nested(architecture, &text), Path::new("config.json")).unwrap()
    }

    #[test]
    fn modules_tile_the_flat_range_in_backward_order() {
        for architecture in Family::architectures() {
            let table = TensorTable::new(&shape(architecture));
            let modules: Vec<Module> = table.modules().collect();
            assert_eq!(modules, [Module::Head, Module::Layer(1), Module::Layer(0), Module::Embed]);
            let mut end = 0;
            for module in modules {
                let range = table.module_range(module);
                assert_eq!(range.start, end, "{architecture} {module:?}");
                end = range.end;
                let inside = |spec: &TensorSpec| range.start <= spec.range().start && spec.range().end <= range.end;
                assert!(table.specs().iter().all(|spec| (spec.module == module) == inside(spec)), "{architecture} {module:?}");
            }
            assert_eq!((end, end % FLAT_ALIGN_ELEMS), (table.flat_elems(), 0));
        }
    }

    #[test]
    fn tensors_are_aligned_apart_and_covered_by_their_parts() {
        for architecture in Family::architectures() {
            let table = TensorTable::new(&shape(architecture));
            let mut end = 0;
            for (i, spec) in table.specs().iter().enumerate() {
                assert_eq!((spec.index, spec.offset_elems % TENSOR_ALIGN_ELEMS), (i, 0), "{}", spec.name);
                assert!(spec.offset_elems >= end && spec.offset_elems < end + TENSOR_ALIGN_ELEMS, "{}", spec.name);
                end = spec.range().end;
                let rows = spec.parts().fold(0, |row, part| {
                    assert_eq!(part.row_start, row, "{}", spec.name);
                    row + part.rows * if part.split { CORRECTION_PARTS } else { 1 }
                });
                assert_eq!(rows, spec.shape[0], "{architecture} {}", spec.name);
            }
        }
    }

    #[test]
    fn parts_have_their_hugging_face_shapes() {
        let part = |architecture: &str, role, index: usize| {
            let table = TensorTable::new(&shape(architecture));
            let spec = table.find(Module::Layer(1), role).unwrap();
            let part = spec.parts().nth(index).unwrap();
            (part.name.clone(), spec.part_shape(&part))
        };
        assert_eq!(part("LlamaForCausalLM", Role::Qkv, 1), ("model.layers.1.self_attn.k_proj.weight".into(), vec![16, 32]));
        assert_eq!(part("Qwen3_5ForCausalLM", Role::Qkv, 0), ("model.layers.1.self_attn.q_proj.weight".into(), vec![64, 32]));
        assert_eq!(part("LlamaForCausalLM", Role::MlpIn, 0), ("model.layers.1.mlp.gate_proj.weight".into(), vec![40, 32]));
        assert_eq!(part("Phi3ForCausalLM", Role::Qkv, 0), ("model.layers.1.self_attn.qkv_proj.weight".into(), vec![64, 32]));
        assert_eq!(part("GPT2LMHeadModel", Role::Qkv, 0), ("transformer.h.1.attn.c_attn.weight".into(), vec![32, 96]));
        assert_eq!(part("GPT2LMHeadModel", Role::QkvBias, 0), ("transformer.h.1.attn.c_attn.bias".into(), vec![96]));
        assert_eq!(part("Qwen3ForCausalLM", Role::KNorm, 0), ("model.layers.1.self_attn.k_norm.weight".into(), vec![8]));
        let of_an_expert = part("Qwen3MoeForCausalLM", Role::MlpIn, 5);
        assert_eq!(of_an_expert, ("model.layers.1.mlp.experts.2.up_proj.weight".into(), vec![12, 32]));
        let gemma = |role| part("Gemma4ForCausalLM", role, 0);
        assert_eq!(gemma(Role::MlpIn), ("model.layers.1.experts.gate_up_proj".into(), vec![3, 24, 32]));
        assert_eq!(gemma(Role::SharedIn), ("model.layers.1.mlp.gate_proj.weight".into(), vec![40, 32]));
        assert_eq!(gemma(Role::ExpertScale), ("model.layers.1.router.per_expert_scale".into(), vec![3]));
        let latent = |role| part("DeepseekV3ForCausalLM", role, 0);
        for (role, name, shape) in [
            (Role::Qkv, "q_a_proj", vec![14, 32]),
            (Role::LatentQueryNorm, "q_a_layernorm", vec![14]),
            (Role::LatentQueries, "q_b_proj", vec![40, 14]),
            (Role::Latent, "kv_a_proj_with_mqa", vec![14, 32]),
            (Role::LatentNorm, "kv_a_layernorm", vec![10]),
            (Role::LatentKv, "kv_b_proj", vec![44, 10]),
            (Role::AttnOut, "o_proj", vec![32, 20]),
        ] {
            assert_eq!(latent(role), (format!("model.layers.1.self_attn.{name}.weight"), shape));
        }
    }

    #[test]
    fn decay_spares_norms_and_biases() {
        let table = TensorTable::new(&shape("GPT2LMHeadModel"));
        let spared = |spec: &&TensorSpec| !spec.decay;
        assert!(table.specs().iter().filter(spared).all(|spec| spec.name.contains("norm") || spec.name.ends_with("bias")));
        assert_eq!(table.specs().iter().filter(spared).count(), 2 * 8 + 2);
        // Factors of a router decay, norms of experts do not.
        let table = TensorTable::new(&shape("Gemma4ForCausalLM"));
        let decayed = table.specs().iter().filter(|spec| spec.shape.len() == 1 && spec.decay).map(|spec| spec.role);
        assert_eq!(decayed.collect::<Vec<_>>(), [Role::ExpertScale, Role::RouterScale].repeat(2));
    }

    #[test]
    fn counts_of_a_known_model() {
        // Computed by hand, per layer: qkv 64x32, out 32x32, gate and up 80x32, down 32x40, two norms.
        let (layer, embed) = ((64 + 32 + 80 + 40) * 32, 60 * 32);
        let table = TensorTable::new(&shape("LlamaForCausalLM"));
        assert_eq!(table.params(), 2 * (layer + 64) + 2 * embed + 32);
        assert_eq!(table.matmul_params(), 2 * layer + embed);
        let tied = ModelShape { tied: true, ..shape("LlamaForCausalLM") };
        assert_eq!(TensorTable::new(&tied).params(), 2 * (layer + 64) + embed + 32);
        assert_eq!(TensorTable::new(&tied).matmul_params(), 2 * layer + embed);
        let attention = 6.0 * 2.0 * 32.0 * 16.0 * 48.0;
        assert_eq!(tied.flops_per_step(3, 16), 6.0 * (2 * layer + embed) as f64 * 48.0 + attention);
        // Scores of latent attention: heads of 10 channels, values of 5.
        let latent = shape("DeepseekV3ForCausalLM");
        let scores = latent.flops_per_step(3, 16) - 6.0 * TensorTable::new(&latent).matmul_params() as f64 * 48.0;
        assert_eq!(scores, 6.0 * 2.0 * 4.0 * (10.0 + 5.0) / 2.0 * 16.0 * 48.0);
        // A window of 8 in 16 tokens: 8*9/2 + 8*8 of 16*17/2 scores; without the diagonal's half this is 3/4.
        let mut windowed = tied;
        windowed.layers.iter_mut().for_each(|layer| layer.attn.window = Some(8));
        assert_eq!(windowed.flops_per_step(3, 16), 6.0 * (2 * layer + embed) as f64 * 48.0 + 0.75 * attention);
    }

    #[test]
    fn gpt2_shrinks_weights_that_write_to_the_residual_stream() {
        let table = TensorTable::new(&shape("GPT2LMHeadModel"));
        for (role, std) in [(Role::AttnOut, 0.01), (Role::MlpOut, 0.01), (Role::Qkv, 0.02), (Role::MlpIn, 0.02)] {
            assert_eq!(table.find(Module::Layer(0), role).unwrap().init, Init::Normal { std }, "{role:?}");
        }
    }

    #[test]
    fn the_demo_has_three_to_four_million_parameters() {
        let params = TensorTable::new(&ModelShape::demo()).params();
        assert!((3_000_000..4_000_000).contains(&params), "{params}");
    }
}
