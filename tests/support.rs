//! Small models, settings and engines for tests.

use superoffload::internals::checkpoint::StateDigest;
use superoffload::internals::data::{Batch, Batches};
use superoffload::internals::device::{CpuDevice, Kernels};
use superoffload::internals::engine::Engine;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::RING_GRAIN_BYTES;
use superoffload::internals::launch::cpu_engine;
use superoffload::internals::memory::RingShape;
use superoffload::internals::model::{ModelShape, Module, TensorSpec, TensorTable, init_tensor};
use superoffload::internals::optim::StatePart;
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Result, Settings, TrainOptions};

/// The emulator for another machine's programs, if the tests use one: see `tests/aarch64/emulate.sh`.
pub fn emulator() -> Option<std::ffi::OsString> {
    std::env::var_os("SUPEROFFLOAD_EMULATOR")
}

/// A llama with a few thousand parameters, with variable `layers`, `channels` and `vocab`, and `tied` embeddings or separate ones.
pub fn tiny_llama(layers: usize, channels: usize, vocab: usize, tied: bool) -> ModelShape {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": channels, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": channels * 2, "vocab_size": vocab,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": tied,
    });
    ModelShape::parse(&config.to_string(), std::path::Path::new("config.json")).unwrap()
}

/// Like [`tiny_llama`], with four experts in every layer except the second. A token uses two of them.
pub fn tiny_moe(layers: usize, channels: usize, vocab: usize, tied: bool) -> ModelShape {
    let config = serde_json::json!({
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": channels, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": channels, "moe_intermediate_size": channels / 2, "num_experts": 4,
        "num_experts_per_tok": 2, "norm_topk_prob": true, "mlp_only_layers": [1], "vocab_size": vocab, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": tied,
    });
    ModelShape::parse(&config.to_string(), std::path::Path::new("config.json")).unwrap()
}

/// Like [`tiny_llama`], with a gated delta rule in every layer except the second, fourth and so on, whose attention has a gate.
pub fn tiny_delta(layers: usize, channels: usize, vocab: usize, tied: bool) -> ModelShape {
    let config = serde_json::json!({
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": channels, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": channels * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2,
        "vocab_size": vocab, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": tied,
    });
    ModelShape::parse(&config.to_string(), std::path::Path::new("config.json")).unwrap()
}

/// Like [`tiny_llama`], with latent attention, and four experts in every layer but the first of several. A token uses two of them.
pub fn tiny_latent(layers: usize, channels: usize, vocab: usize, tied: bool) -> ModelShape {
    let config = serde_json::json!({
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": channels, "num_hidden_layers": layers, "num_attention_heads": 4,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": channels,
        "first_k_dense_replace": usize::from(layers > 1), "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": channels / 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.0, "vocab_size": vocab,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
    });
    ModelShape::parse(&config.to_string(), std::path::Path::new("config.json")).unwrap()
}

/// Like [`tiny_llama`], with layers of Gemma 4: four experts beside an MLP in every layer. A token uses two of them.
pub fn tiny_gemma(layers: usize, channels: usize, vocab: usize, tied: bool) -> ModelShape {
    let config = serde_json::json!({
        "architectures": ["Gemma4ForCausalLM"], "hidden_size": channels, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "attention_k_eq_v": true, "intermediate_size": channels,
        "hidden_size_per_layer_input": 0, "enable_moe_block": true, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": channels / 2,
        "vocab_size": vocab, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "sliding_window": 8, "tie_word_embeddings": tied,
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
    });
    ModelShape::parse(&config.to_string(), std::path::Path::new("config.json")).unwrap()
}

/// The setting of one resident bucket, if the strategy and the build support it.
pub fn resident(strategy: &str) -> &'static str {
    if cfg!(feature = "repartition") && strategy.contains("superoffload") { "resident-buckets = 1\n" } else { "" }
}

/// Settings from the text of a config file, resolved as in the program.
pub fn settings(toml: &str) -> Settings {
    Settings::resolve(TrainOptions::from_toml(toml).unwrap()).unwrap()
}

/// The shortest gradient ring that holds any module and a bucket, if it saves memory. The embeddings stay outside.
pub fn grad_ring(plan: &Plan, table: &TensorTable) -> Option<RingShape> {
    let grain = RING_GRAIN_BYTES / plan.recipe.numerics.dtype.bytes();
    let modules = table.modules().filter(|module| *module != Module::Embed);
    let longest = modules.map(|module| table.module_range(module).len()).max().unwrap();
    let period_elems = (longest + plan.placement.layout.bucket_elems()).next_multiple_of(grain);
    let limit = if plan.site.ranks == 1 { plan.placement.layout.offloaded_elems() } else { plan.placement.layout.flat_elems() };
    let end = table.module_range(Module::Embed).start.min(limit);
    let ringed_elems = end / grain * grain;
    (ringed_elems > period_elems).then_some(RingShape { ringed_elems, period_elems })
}

/// An engine with random weights, ready to step.
pub fn engine(settings: &Settings, shape: &ModelShape) -> Engine<CpuDevice> {
    let plan = Plan::new(&settings.request(shape), &Machine::cpu(2), false).unwrap();
    start(&plan, shape, random_params(settings.seed))
}

/// The weights of a new model.
pub fn random_params(seed: u64) -> impl Fn(&TensorSpec) -> Vec<f32> {
    move |spec| {
        let mut params = vec![0.0; spec.elems()];
        init_tensor(spec, seed, &mut params);
        params
    }
}

/// Like [`random_params`]. Every third parameter lies in the middle of two bfloat16 numbers.
pub fn params_with_ties(seed: u64) -> impl Fn(&TensorSpec) -> Vec<f32> {
    let params = random_params(seed);
    move |spec| {
        let mut params = params(spec);
        params.iter_mut().step_by(3).for_each(|param| *param = f32::from_bits(param.to_bits() & 0xffff_0000 | 0x8000));
        params
    }
}

/// An engine with the given weights, ready to step.
pub fn start(plan: &Plan, shape: &ModelShape, params: impl Fn(&TensorSpec) -> Vec<f32>) -> Engine<CpuDevice> {
    let mut engine = cpu_engine(plan, shape, &Topology::this_machine()).unwrap();
    load(&mut engine, params);
    engine
}

/// Writes these weights into an engine.
pub fn load<D: Kernels>(engine: &mut Engine<D>, params: impl Fn(&TensorSpec) -> Vec<f32>) {
    for spec in engine.table().specs().to_vec() {
        engine.write_state(StatePart::PARAMS, spec.offset_elems, &params(&spec)).unwrap();
    }
    engine.send_weights().unwrap();
}

/// Digest of an engine's flushed state, as `train --digest` prints it.
pub fn digest<D: Kernels>(engine: &mut Engine<D>) -> String {
    engine.flush().unwrap();
    let mut digest = StateDigest::new(engine.optimizer_step(), engine.plan().optimizer().arrays());
    for_each_state(engine, |_, state| STATE.into_iter().zip(state).for_each(|(part, elems)| digest.update(part, elems)));
    digest.finish()
}

/// An engine's flushed parameters, flat.
pub fn read_params(engine: &mut Engine<CpuDevice>) -> Vec<f32> {
    engine.flush().unwrap();
    let mut flat = vec![0.0; engine.table().flat_elems()];
    for_each_state(engine, |spec, [params, _, _]| flat[spec.range()].copy_from_slice(params));
    flat
}

/// The arrays of AdamW's state.
const STATE: [StatePart; 3] = [StatePart::PARAMS, StatePart::M, StatePart::V];

fn for_each_state<D: Kernels>(engine: &mut Engine<D>, mut each: impl FnMut(&TensorSpec, &[Vec<f32>; 3])) {
    for spec in engine.table().specs().to_vec() {
        let state = STATE.map(|part| {
            let mut elems = vec![0.0; spec.elems()];
            engine.read_state(part, spec.offset_elems, &mut elems).unwrap();
            elems
        });
        each(&spec, &state);
    }
}

/// Random tokens, determined by the seed.
#[derive(Clone)]
pub struct Noise {
    state: u64,
    vocab: u64,
}

impl Noise {
    pub fn new(seed: u64, vocab: usize) -> Self {
        Self { state: seed.wrapping_mul(2) + 1, vocab: vocab as u64 }
    }

    pub fn next(&mut self) -> i32 {
        self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.state >> 33) % self.vocab) as i32
    }
}

impl Batches for Noise {
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        batch.tokens.iter_mut().chain(&mut *batch.targets).for_each(|x| *x = self.next());
        Ok(())
    }
}
