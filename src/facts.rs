//! Facts in a record besides its measurements: program, machine, model, plan.

use crate::bucket::layout::Tier;
use crate::data::dataset::Dataset;
use crate::device::ExpertProducts;
use crate::hardware::gpu::GpuFacts;
use crate::hardware::profile::Profile;
use crate::hardware::topology::Topology;
use crate::model::layer_shape::Attn;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::optim::moments::Moments;
use crate::planner::plan::Plan;
use crate::planner::techniques::Techniques;
use crate::request::choices::{LayerOrder, Strategy};
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Clone, Debug, Serialize)]
pub struct BuildFacts {
    pub version: &'static str,
    /// Commit of the build's git clone, or the value of `SUPEROFFLOAD_COMMIT`.
    pub(crate) git_commit: Option<&'static str>,
    pub features: Vec<&'static str>,
    /// Whether the build has optimizations and no debug assertions.
    pub release: bool,
}

impl BuildFacts {
    pub fn this_program() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            git_commit: option_env!("SUPEROFFLOAD_COMMIT"),
            features: env!("SUPEROFFLOAD_FEATURES").split(',').filter(|name| !name.is_empty()).collect(),
            release: !cfg!(debug_assertions),
        }
    }
}

/// Facts of the training data.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DataFacts {
    /// Documents of text data; token files have none.
    documents: u64,
    tokens: usize,
    trained_tokens: u64,
    rows: usize,
    row_tokens: usize,
    /// Padding tokens, in rows that documents do not fill.
    padding: usize,
    /// Number of documents, as attention sees them, by length: each key is a power of two, and counts lengths up to it and above half of
    /// it.
    up_to: BTreeMap<usize, usize>,
    /// Description of the packing, if documents are kept whole.
    packing: Option<String>,
}

impl DataFacts {
    pub(crate) fn new(dataset: &Dataset) -> Self {
        let (rows, row_tokens, lengths) = (dataset.sequences(), dataset.seq_length(), dataset.lengths());
        let mut up_to = BTreeMap::new();
        for (length, count) in &lengths {
            *up_to.entry(length.next_power_of_two()).or_default() += count;
        }
        let filled: usize = lengths.iter().map(|(length, count)| length * count).sum();
        Self {
            documents: dataset.documents(),
            tokens: dataset.tokens(),
            trained_tokens: dataset.tokens() as u64 - dataset.untrained(),
            rows,
            row_tokens,
            padding: rows * row_tokens - filled,
            up_to,
            packing: dataset.became().map(String::from),
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct MachineFacts {
    pub cpu: Option<String>,
    /// `x86_64`, `aarch64`.
    pub(crate) arch: &'static str,
    /// Physical cores.
    pub(crate) cores: Option<usize>,
    /// CPUs that the process could use.
    pub usable_cpus: Option<usize>,
    pub(crate) memory_bytes: Option<u64>,
    /// Kernel release.
    pub kernel: Option<String>,
    /// The GPU, whether the steps used it or not.
    pub gpu: Option<GpuFacts>,
    /// Why facts of a GPU are not available.
    pub(crate) gpu_missing: Option<String>,
}

impl MachineFacts {
    /// Facts of `topology`, and of the GPU of this machine.
    pub fn new(topology: &Topology) -> Self {
        let (gpu, gpu_missing) = match GpuFacts::read() {
            Ok(facts) => (Some(facts), None),
            Err(cause) => (None, Some(cause.to_string())),
        };
        Self {
            cpu: topology.cpu_model.clone(),
            arch: topology.arch,
            cores: topology.cores(),
            usable_cpus: topology.usable_cpus().map(|usable| usable.count()),
            memory_bytes: topology.memory_total_bytes,
            kernel: topology.kernel.clone(),
            gpu,
            gpu_missing,
        }
    }
}

/// The profile of a simulation.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct HardwareFacts {
    pub profile: String,
    /// Description of the machine.
    pub machine: String,
    pub(crate) date: String,
}

impl HardwareFacts {
    /// Facts of `profile`.
    pub(crate) fn of(profile: &Profile) -> Self {
        Self { profile: profile.name.clone(), machine: profile.machine.clone(), date: profile.date.clone() }
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct ModelFacts {
    /// Preset or file of the model's configuration.
    pub config: String,
    /// Class name in `transformers`.
    pub(crate) architecture: &'static str,
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub channels: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Inner width of the MLP.
    pub(crate) ffn: usize,
    pub vocab: usize,
    /// Whether the output matrix is the token embedding.
    pub tied: bool,
    pub params: usize,
    /// Parameters that take part in matrix products.
    pub(crate) matmul_params: usize,
    /// Trained parameters, if tensors are frozen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) trained_params: Option<usize>,
}

impl ModelFacts {
    /// Facts of `shape`, which was read from `config`.
    pub(crate) fn new(config: String, shape: &ModelShape) -> Self {
        let table = TensorTable::new(shape);
        let ModelShape { channels, vocab, tied, ref layers, .. } = *shape;
        let Attn { heads, kv_heads, head_dim, .. } = *shape.first_attention();
        let (layers, ffn) = (layers.len(), layers[0].mlp_cols().1);
        let (architecture, params, matmul_params) = (shape.family.architecture(), table.params(), table.matmul_params());
        let trained_params = (!shape.frozen.is_empty()).then(|| table.trained_params());
        Self { config, architecture, layers, channels, heads, kv_heads, head_dim, ffn, vocab, tied, params, matmul_params, trained_params }
    }
}

/// The plan in numbers.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PlanFacts {
    /// Named set of techniques.
    pub strategy: Strategy,
    /// Enabled techniques.
    pub(crate) techniques: Techniques,
    /// `Deferred`, `Inverse` or `ValidateFirst`.
    pub policy: String,
    /// Format of weights, activations and gradients on the device.
    pub dtype: String,
    /// Format of the operands of layers' matrix products.
    pub(crate) matmul_dtype: String,
    pub link_dtype: String,
    /// Format of the optimizer's moments.
    pub(crate) moments: Moments,
    /// Storage of master weights whose buckets the device steps.
    pub(crate) masters: String,
    /// Storage of master weights whose buckets the host steps; split ones are stepped after the verdict.
    pub(crate) host_masters: String,
    /// Instruction set of the optimizer.
    pub isa: String,
    /// Optimizer threads.
    pub threads: usize,
    pub buckets: usize,
    /// Buckets with their optimizer state on the device.
    pub(crate) resident_buckets: usize,
    /// Buckets with states in unified memory, which are moved to the device for each step.
    pub(crate) paged_buckets: usize,
    /// Buckets of a tied embedding that leave early.
    pub(crate) early_buckets: usize,
    /// Parameters of a bucket.
    pub bucket_elems: usize,
    /// Parameters whose state is in host memory, padding included.
    pub offloaded_elems: usize,
    /// Host slots for gradients.
    pub(crate) grad_slots: usize,
    /// Host slots for working weights.
    pub(crate) param_slots: usize,
    /// Parameters with weights that stream through a ring on the device; 0 if all weights stay on the device.
    pub streamed_elems: usize,
    /// Parameters that fit into the ring.
    pub(crate) weight_ring_elems: usize,
    /// Whether each rank of each process holds only its own part of these weights.
    pub(crate) fully_sharded: bool,
    /// Whether the sums of the shares' gradients are stored on the host and pass through the device.
    pub(crate) sums_on_host: bool,
    /// Order of layers and micro-batches: `whole`, or `segments:LAYERS,TURN`.
    pub(crate) layer_order: LayerOrder,
    /// Number of layers by the activations that they keep for the backward pass.
    pub(crate) layer_policies: BTreeMap<String, usize>,
    /// Layers that recompute their forward pass in the backward pass.
    pub(crate) recomputed_layers: usize,
    pub attention: String,
    /// Implementation of the experts' matrix products on a GPU.
    pub expert_products: ExpertProducts,
    /// Bytes of gradients and weights that each device receives from other processes in a step; it sends as many.
    pub(crate) network_bytes: usize,
    /// The step time that the planner simulated or predicted, if it has rates.
    pub(crate) predicted_step_ms: Option<f64>,
}

impl PlanFacts {
    /// Facts of `plan`.
    pub(crate) fn new(plan: &Plan) -> Self {
        let layout = &plan.placement.layout;
        let mut layer_policies = BTreeMap::new();
        for policy in &plan.placement.layer_policies {
            *layer_policies.entry(policy.to_string()).or_default() += 1;
        }
        Self {
            strategy: plan.protocol.strategy,
            techniques: plan.protocol.techniques,
            policy: format!("{:?}", plan.protocol.rules.policy),
            dtype: plan.recipe.numerics.dtype.to_string(),
            matmul_dtype: if plan.recipe.numerics.fp8 { "fp8".into() } else { plan.recipe.numerics.dtype.to_string() },
            link_dtype: plan.protocol.link_dtype.to_string(),
            moments: plan.recipe.numerics.moments,
            masters: plan.protocol.masters.to_string(),
            host_masters: plan.host_masters().to_string(),
            isa: plan.site.isa.to_string(),
            threads: plan.site.threads,
            buckets: layout.count(),
            resident_buckets: layout.buckets_in(Tier::Device).len(),
            paged_buckets: layout.buckets_in(Tier::Unified).len(),
            early_buckets: layout.early().len(),
            bucket_elems: layout.bucket_elems(),
            offloaded_elems: layout.offloaded_elems(),
            grad_slots: plan.placement.grad_slots,
            param_slots: plan.placement.param_slots,
            streamed_elems: plan.placement.rings.weights.map_or(0, |ring| ring.ringed_elems),
            weight_ring_elems: plan.placement.rings.weights.map_or(0, |ring| ring.period_elems),
            fully_sharded: plan.placement.rings.fully_sharded,
            sums_on_host: plan.placement.rings.sums_on_host,
            layer_order: plan.layer_order(),
            layer_policies,
            recomputed_layers: plan.placement.layer_policies.iter().filter(|policy| policy.recomputes_block()).count(),
            attention: format!("{:?}", plan.recipe.numerics.attention),
            expert_products: plan.recipe.numerics.experts,
            network_bytes: plan.forecast.peer_traffic.inter_node,
            predicted_step_ms: plan.forecast.simulated_step_ms.or(plan.forecast.predicted.map(|predicted| predicted.step_s * 1e3)),
        }
    }
}
