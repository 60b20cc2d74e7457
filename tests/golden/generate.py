"""Writes the golden values of tests/parity.rs: tiny random models of every family, trained for ten steps by PyTorch.

Made with torch 2.15.0, transformers 5.23.0 (ministral3, gemma4, gemma4_moe, gemma4_moe_packed, glm4_moe, dots1, qwen2_moe, qwen3_weighted, qwen3_5, qwen3_5_moe, qwen3_next, latent ones, frozen ones, tokens ones: 5.24.0), peft 0.21.2 (tokens ones) and safetensors 0.8.0 on one CPU thread, in float32 with eager attention:

    python generate.py [FAMILY...]

Each family gets a Hugging Face directory (config.json and model.safetensors, for mistral in two shards with an index) and
golden.safetensors:
    tokens, targets     int32 [steps, batch, sequence]
    weights             float32 [steps, batch, sequence], of the targets, in weighted families
    freeze              uint8, lines with the expressions of --freeze, in families with frozen parameters
    trained_tokens      int64 [2], the range of --train-tokens, in families with trained rows of frozen tables
    documents           int32 [steps, batch, sequence], where in its row each token's document begins, in packed families
    logits              float32 [batch, sequence, vocabulary], before the first step
    loss, grad_norm     float64 [steps], at the start of each step; the norm before clipping
    final.NAME          float32, each parameter after the last step
"""

import json
import pathlib
import re
import sys
import tempfile
import types

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.trainer_pt_utils import get_parameter_names

STEPS, BATCH, SEQUENCE = 10, 2, 16
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.1, 0.5
# Some gradients are zero in exact arithmetic (key biases: softmax ignores them) and pure rounding noise in practice. Adam
# divides them by their own size; an epsilon far above the noise keeps m / (sqrt(v) + eps) near zero there.
EPSILON = 1e-3

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)
COMMON = dict(initializer_range=0.2, attention_dropout=0.0, pad_token_id=None, bos_token_id=None, eos_token_id=None, use_cache=False)
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
)


YARN = dict(
    rope_type="yarn", rope_theta=150.0, factor=8.0, beta_fast=4.0, beta_slow=1.0, original_max_position_embeddings=32, truncate=False
)
# With both scales, cosines and sines have no factor. Queries have one from position 32 on.
MINISTRAL_ROPE = dict(YARN, rope_theta=100.0, truncate=True, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)


def plain_rope(theta):
    return dict(rope_type="default", rope_theta=theta)


def phi3_longrope(original):
    """Sequences of 16 take the short factors up to 16 original positions, else the long ones."""
    factors = dict(short_factor=[1.0, 1.25, 1.5, 2.0], long_factor=[1.5, 3.0, 4.5, 6.0])
    return transformers.Phi3Config(
        **SIZES, **COMMON, num_key_value_heads=2, resid_pdrop=0.0, embd_pdrop=0.0, original_max_position_embeddings=original,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=100.0, original_max_position_embeddings=original, **factors
        ),
    )


FAMILIES = {
    "gpt2": transformers.GPT2Config(
        vocab_size=64, n_positions=24, n_embd=32, n_layer=2, n_head=4, n_inner=80, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, use_cache=False,
    ),
    "llama": transformers.LlamaConfig(
        **SIZES, **COMMON, num_key_value_heads=2, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5
    ),
    "mistral": transformers.MistralConfig(
        **SIZES, **COMMON, num_key_value_heads=2, sliding_window=7, rope_parameters=plain_rope(100.0), rms_norm_eps=1e-5
    ),
    "ministral3": transformers.Ministral3Config(
        **SIZES, **COMMON, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, rope_parameters=MINISTRAL_ROPE
    ),
    "qwen2": transformers.Qwen2Config(
        **SIZES, **COMMON, num_key_value_heads=2, use_sliding_window=True, sliding_window=5, max_window_layers=1,
        tie_word_embeddings=True, rope_parameters=plain_rope(1000.0),
    ),
    "qwen3": transformers.Qwen3Config(
        **SIZES, **COMMON, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, rope_parameters=plain_rope(1000000.0)
    ),
    "phi3": transformers.Phi3Config(
        **SIZES, **COMMON, num_key_value_heads=2, sliding_window=6, resid_pdrop=0.0, embd_pdrop=0.0,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    ),
    "seed_oss": transformers.SeedOssConfig(
        **SIZES, **COMMON, num_key_value_heads=2, head_dim=12, residual_dropout=0.0,
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0),
    ),
    "qwen3_yarn": transformers.Qwen3Config(
        **SIZES, **COMMON, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=8.0),
    ),
    "phi3_short": phi3_longrope(16),
    "phi3_long": phi3_longrope(8),
    "smollm3": transformers.SmolLM3Config(
        **(SIZES | dict(num_hidden_layers=4)), **COMMON, num_key_value_heads=2, rope_parameters=plain_rope(100.0)
    ),
    "starcoder2": transformers.Starcoder2Config(
        **SIZES, **COMMON, num_key_value_heads=2, sliding_window=6, residual_dropout=0.0, embedding_dropout=0.0,
        tie_word_embeddings=False, rope_parameters=plain_rope(100.0),
    ),
    "granite": transformers.GraniteConfig(
        **SIZES, **COMMON, num_key_value_heads=2, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7,
        logits_scaling=1.5, rope_parameters=plain_rope(100.0),
    ),
    "olmo2": transformers.Olmo2Config(**SIZES, **COMMON, num_key_value_heads=2, rope_parameters=plain_rope(100.0)),
    "glm4": transformers.Glm4Config(
        **SIZES, **COMMON, num_key_value_heads=2, head_dim=12,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
    ),
    "gemma2": transformers.Gemma2Config(
        **SIZES, **COMMON, num_key_value_heads=2, head_dim=12, query_pre_attn_scalar=20, sliding_window=5,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0, rope_parameters=plain_rope(100.0),
    ),
    # The first layer slides, and only the other stretches its rotation; transformers reads `truncate` beside the types of layers alone.
    "olmo3": transformers.Olmo3Config(
        **SIZES, **COMMON, num_key_value_heads=2, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(full_attention=YARN | dict(truncate=True), sliding_attention=plain_rope(100.0)),
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **(SIZES | dict(num_hidden_layers=3)), **COMMON, num_key_value_heads=2, head_dim=12, query_pre_attn_scalar=20, sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1000.0, factor=8.0), sliding_attention=plain_rope(100.0)),
    ),
    # Full attention has wider heads, fewer key heads, and keys that are values. Two of eight pairs of its channels rotate.
    "gemma4": transformers.Gemma4TextConfig(
        **(SIZES | dict(num_hidden_layers=3)), **COMMON, num_key_value_heads=2, head_dim=8, global_head_dim=16, num_global_key_value_heads=1,
        attention_k_eq_v=True, sliding_window=5, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, final_logit_softcapping=3.0,
        rope_parameters=dict(
            full_attention=dict(rope_type="proportional", rope_theta=1000.0, partial_rotary_factor=0.25), sliding_attention=plain_rope(100.0)
        ),
    ),
    # The first of three layers has no experts.
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **dict(SIZES, num_hidden_layers=3), **COMMON, num_key_value_heads=2, head_dim=16, moe_intermediate_size=12, num_experts=8,
        num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[0], rope_parameters=plain_rope(1000000.0),
    ),
    "qwen3_moe_balanced": transformers.Qwen3MoeConfig(
        **dict(SIZES, num_hidden_layers=3), **COMMON, num_key_value_heads=2, head_dim=16, moe_intermediate_size=12, num_experts=8,
        num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[1], rope_parameters=plain_rope(10000.0),
    ),
    # Two of four groups of two experts; the first of three layers has no experts.
    "glm4_moe": transformers.Glm4MoeConfig(
        **dict(SIZES, num_hidden_layers=3), **COMMON, num_key_value_heads=2, head_dim=16, use_qk_norm=True, attention_bias=True,
        moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, first_k_dense_replace=1, num_mtp_layers=0, rope_parameters=dict(plain_rope(1000.0), partial_rotary_factor=0.5),
    ),
    "dots1": transformers.Dots1Config(
        **SIZES, **COMMON, num_key_value_heads=2, head_dim=8, moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2,
        n_shared_experts=2, norm_topk_prob=False, sliding_window=5, max_window_layers=1, rope_parameters=plain_rope(1000.0),
    ),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SIZES, **COMMON, num_key_value_heads=2, moe_intermediate_size=12, shared_expert_intermediate_size=20, num_experts=6,
        num_experts_per_tok=2, mlp_only_layers=[], rope_parameters=plain_rope(1000.0),
    ),
    "olmoe": transformers.OlmoeConfig(
        **SIZES, **COMMON, num_key_value_heads=4, num_experts=8, num_experts_per_tok=3, rope_parameters=plain_rope(10000.0)
    ),
    "mixtral": transformers.MixtralConfig(
        **SIZES, **COMMON, num_key_value_heads=2, sliding_window=7, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters=plain_rope(1000000.0),
    ),
    "gpt_oss": transformers.GptOssConfig(
        **dict(SIZES, intermediate_size=24), **COMMON, num_key_value_heads=2, head_dim=8, num_local_experts=6, num_experts_per_tok=3,
        sliding_window=5, swiglu_limit=1.5, rope_parameters=YARN,
    ),
}


# Outputs of a delta rule may be tiny, and their norm divides them by their length: with a small epsilon, rounding alone moves the norm of
# torch's float32 gradients by 1e-5 and more.
DELTA_EPSILON = 0.1
# Two layers with a gated delta rule, then attention with a gate. A quarter of the channels of a head rotate.
FAMILIES["qwen3_5"] = transformers.Qwen3_5TextConfig(
    **dict(SIZES, num_hidden_layers=3), **COMMON, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "linear_attention", "full_attention"],
    rms_norm_eps=DELTA_EPSILON, rope_parameters=dict(plain_rope(1000.0), partial_rotary_factor=0.25),
)
# The same beside experts: two of six, and a shared expert with a gate.
FAMILIES["qwen3_5_moe"] = transformers.Qwen3_5MoeTextConfig(
    **{key: value for key, value in SIZES.items() if key not in ("intermediate_size", "num_hidden_layers")}, **COMMON, num_hidden_layers=2,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"], moe_intermediate_size=12, shared_expert_intermediate_size=20, num_experts=6,
    num_experts_per_tok=2, rms_norm_eps=DELTA_EPSILON, rope_parameters=dict(plain_rope(1000.0), partial_rotary_factor=0.25),
)
# Projections whose rows alternate by head of keys, and a layer without experts.
FAMILIES["qwen3_next"] = transformers.Qwen3NextConfig(
    **dict(SIZES, num_hidden_layers=3), **COMMON, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6,
    linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "linear_attention", "full_attention"],
    moe_intermediate_size=12, shared_expert_intermediate_size=20, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
    mlp_only_layers=[1], rms_norm_eps=DELTA_EPSILON, rope_parameters=dict(plain_rope(1000.0), partial_rotary_factor=0.25),
)
# Two of six experts beside an MLP, which have widths of their own.
GEMMA4_MOE = dict(
    **SIZES, **COMMON, num_key_value_heads=2, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True,
    sliding_window=5, layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
    final_logit_softcapping=3.0, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=12,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=1000.0, partial_rotary_factor=0.25), sliding_attention=plain_rope(100.0)
    ),
)
FAMILIES["gemma4_moe"] = transformers.Gemma4TextConfig(**GEMMA4_MOE)
# Latent attention in three layers, the first without experts. Values have fewer channels than queries and keys, unless stated otherwise.
LATENT = dict(
    **dict(SIZES, num_hidden_layers=3), **COMMON, num_key_value_heads=4, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3, rms_norm_eps=1e-3,
)
LATENT_YARN = dict(YARN, rope_theta=100.0, truncate=True, mscale_all_dim=0.707)
FAMILIES["deepseek_v2"] = transformers.DeepseekV2Config(
    **LATENT, q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    rope_parameters=dict(LATENT_YARN, mscale=0.707),
)
FAMILIES["deepseek_v3"] = transformers.DeepseekV3Config(
    **LATENT, q_lora_rank=None, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.446, first_k_dense_replace=1,
    num_mtp_layers=0, rope_parameters=plain_rope(1000.0),
)
# Queries from a latent vector, groups of experts, a rotation with a factor on cosines and sines, and pairs of channels that lie apart.
FAMILIES["deepseek_v3_lora"] = transformers.DeepseekV3Config(
    **LATENT, q_lora_rank=20, n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=1,
    num_mtp_layers=0, rope_interleave=False, rope_parameters=dict(LATENT_YARN, mscale=1.0),
)
# Values with as many channels as queries and keys.
FAMILIES["glm4_moe_lite"] = transformers.Glm4MoeLiteConfig(
    **dict(LATENT, v_head_dim=12), q_lora_rank=20, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.8,
    mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters=plain_rope(1000.0),
)
# Lengths of documents in rows of packed families, row by row in turn. Each document runs alone: transformers' delta rule in plain torch
# ignores where documents begin.
PACKED = {"qwen3_5_packed": [[130], [1, 63, 64, 2], [65, 65], [66, 64]], "gemma4_moe_packed": [[16], [1, 15], [5, 11], [7, 2, 7]]}
PACKED["deepseek_v3_packed"] = PACKED["gemma4_moe_packed"]
FAMILIES["deepseek_v3_packed"] = FAMILIES["deepseek_v3_lora"]
FAMILIES["qwen3_5_packed"] = FAMILIES["qwen3_5"]
# Scores of Gemma 4 have no factor, and its softmax is sharp: with a smaller epsilon, float32 norms are off by 1e-6 and more from those in float64.
FAMILIES["gemma4_moe_packed"] = transformers.Gemma4TextConfig(**GEMMA4_MOE, rms_norm_eps=0.1)

# Multiples of 1/4096, some of them 0 and 1, weigh the targets of these families.
WEIGHTED = {"qwen3_weighted"}
FAMILIES["qwen3_weighted"] = FAMILIES["qwen3"]
# Expressions for names of parameters that stay as they are. Names of experts are those in memory and those in files.
FROZEN = {
    "frozen": [r"embed_tokens", r"layers\.0\.", r"layers\.1\.mlp\.(gate|up)_proj", r"layers\.2\..*layernorm", r"layers\.3\..*\.bias$"],
    "frozen_tied": [r"embed_tokens", r"layers\.1\.", r"layers\.0\.(self_attn\.o_proj|self_attn\.[qk]_norm|mlp\.down_proj)"],
    "frozen_moe": [r"lm_head", r"mlp\.experts\.", r"layers\.1\.mlp\.gate\.", r"layers\.0\.self_attn"],
    "frozen_gpt_oss": [r"embed_tokens", r"sinks", r"\.bias$", r"_bias$", r"layers\.0\.mlp\.experts\.gate_up_proj"],
    "frozen_delta": [r"embed_tokens", r"model\.norm\.", r"conv1d", r"A_log", r"dt_bias", r"linear_attn\.norm", r"in_proj_z", r"in_proj_a"],
}
FAMILIES["frozen"] = transformers.LlamaConfig(
    **SIZES | dict(num_hidden_layers=4), **COMMON, num_key_value_heads=2, attention_bias=True, mlp_bias=True, rope_parameters=plain_rope(1e4),
    rms_norm_eps=1e-5
)
FAMILIES["frozen_tied"] = FAMILIES["qwen3"]
FAMILIES["frozen_moe"] = FAMILIES["qwen3_moe"]
FAMILIES["frozen_gpt_oss"] = FAMILIES["gpt_oss"]
FAMILIES["frozen_delta"] = FAMILIES["qwen3_5"]
# Ranges of tokens whose rows alone are trained, by PEFT's trainable_token_indices. Expressions of FROZEN choose among the other parameters; without
# any, all are frozen.
TOKENS = {"tokens": (37, 53), "tokens_tied": (30, 41)}
FROZEN["tokens"] = [r"layers\.0\.", r"norm"]
FAMILIES["tokens"] = FAMILIES["llama"]
FAMILIES["tokens_tied"] = FAMILIES["qwen3"]
# Where two experts nearly tie with the usual seed.
SEEDS = {"gemma4_moe_packed": 1237, "deepseek_v3_lora": 1236}
# The factor on the loss that balances experts.
BALANCE = {"qwen3_moe_balanced": 2.0}


def randomize(model, generator):
    """Norms off one and biases off zero, so that each of them matters."""
    centred = [name for name, module in model.named_modules() if type(module).__name__ in ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm")]
    names = {name for name, _ in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                # Some heads forget within a few tokens, others remember for hundreds.
                parameter.copy_(-2.0 + 1.5 * noise)
            elif name.endswith("conv1d.weight"):
                parameter.copy_(0.35 * noise)
            elif name.endswith("router.proj.weight") and name.removesuffix("proj.weight") + "scale" in names:
                # The input of Gemma 4's router is short: a row has length 1.
                parameter.copy_(noise)
            elif parameter.dim() > 1 and not name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                at_zero = name.endswith("bias") or name.removesuffix(".weight") in centred
                parameter.copy_((0.0 if at_zero else 1.0) + 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * torch.randn(buffer.shape, generator=generator))


def decay_groups(model):
    """The parameter groups of the Hugging Face Trainer."""
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], patterns))
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[name in decayed].append(parameter)
    return [dict(params=groups[True], weight_decay=WEIGHT_DECAY), dict(params=groups[False], weight_decay=0.0)]


def old_spelling(path):
    """The config.json as transformers 4 wrote it."""
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n")


def save(model, family, directory):
    model.save_pretrained(directory, max_shard_size="40KB" if family == "mistral" else "1GB")
    (directory / "generation_config.json").unlink(missing_ok=True)
    if family == "llama":
        old_spelling(directory / "config.json")


def watch_routers(model):
    """Fails where rounding could choose other experts: where the last chosen logit nearly ties with the first that was not."""

    def margin(keys, count):
        keys = keys.sort(dim=-1, descending=True).values
        return (keys[..., count - 1] - keys[..., count]).min() if count < keys.shape[-1] else torch.inf

    def check(module, _, output):
        # Gemma 4 gives probabilities in place of logits.
        keys = output[0].detach().log() if hasattr(module, "per_expert_scale") else output[0].detach()
        margins = []
        if hasattr(module, "e_score_correction_bias"):
            keys = (keys.sigmoid() + module.e_score_correction_bias).unflatten(-1, (module.num_group, -1))
            groups = keys.topk(2, dim=-1).values.sum(dim=-1)
            margins.append(margin(groups, module.topk_group))
            chosen = groups.topk(module.topk_group, dim=-1).indices
            keys = keys.gather(-2, chosen[..., None].expand(-1, -1, keys.shape[-1])).flatten(-2)
        margins.append(margin(keys, module.config.top_k_experts if hasattr(module, "per_expert_scale") else module.top_k))
        assert min(margins) > 1e-4, f"two experts or groups nearly tie: {margins}"

    for module in model.modules():
        if type(module).__name__.lower().endswith(("topkrouter", "gemma4textrouter")):
            module.register_forward_hook(check)


def saved(model):
    """The parameters by the names that files have: experts are one tensor in memory, and one each in files."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(pathlib.Path(directory) / "model.safetensors")


def freeze(model, expressions):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(expression, name) for expression in expressions))
    assert all(any(re.search(expression, name) for name, _ in model.named_parameters()) for expression in expressions)


def train_rows(model, tokens, expressions):
    """The model with trained rows of its embedding and its output matrix, by PEFT. Its LoRA is the identity, and is not trained."""
    import peft

    indices = list(range(*tokens))
    tables = ["embed_tokens"] if model.config.tie_word_embeddings else ["embed_tokens", "lm_head"]
    others = [name for name, _ in model.named_parameters() if not any(table in name for table in tables)]
    trained = {name for name in others if expressions and not any(re.search(expression, name) for expression in expressions)}
    config = peft.LoraConfig(r=1, target_modules=["o_proj"], trainable_token_indices={table: indices for table in tables})
    model = peft.get_peft_model(model, config).eval()
    found = set()
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        found |= {plain} & trained
        parameter.requires_grad_("trainable_tokens_delta" in name or plain in trained)
    assert found == trained
    deltas = [parameter.shape for name, parameter in model.named_parameters() if "trainable_tokens_delta" in name]
    assert deltas == [(len(indices), model.config.hidden_size)] * len(tables), deltas
    return model


def weighted_mean(logits, targets, weights):
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), reduction="none")
    return (weights.flatten() * losses).sum() / weights.sum()


def run(model, tokens, lengths, balance):
    """The output for rows of tokens; of rows with documents of these lengths, the logits alone."""
    if lengths is None:
        return model(input_ids=tokens.long(), **(dict(output_router_logits=True) if balance else {}))
    rows = [torch.cat([model(input_ids=part[None].long()).logits[0] for part in row.split(of)]) for row, of in zip(tokens, lengths)]
    return types.SimpleNamespace(logits=torch.stack(rows))


def train(model, tokens, targets, weights, balance, lengths=None):
    """With the loss that balances experts, times this factor, in the gradients but not in the losses."""
    watch_routers(model)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=EPSILON, foreach=False)
    losses, norms, first_logits = [], [], None
    for step in range(STEPS):
        output = run(model, tokens[step], lengths and lengths[step], balance)
        logits = output.logits
        first_logits = logits.detach().clone() if first_logits is None else first_logits
        if weights is None:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[step].long().flatten())
        else:
            loss = weighted_mean(logits, targets[step], weights[step])
        optimizer.zero_grad()
        aux = output.aux_loss if balance else 0.0
        (loss + balance * aux).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM, f"step {step}: norm {norm} does not clip"
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return first_logits, losses, norms


def starts(lengths):
    """Where in its row each token's document begins."""
    return [sum(lengths[:nth]) for nth, length in enumerate(lengths) for _ in range(length)]


def generate(family, root):
    directory = root / family
    directory.mkdir(exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    generator = torch.Generator().manual_seed(SEEDS.get(family, 1234))
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager").float().eval()
    randomize(model, generator)
    save(model, family, directory)
    lengths = PACKED.get(family)
    sequence = sum(lengths[0]) if lengths else SEQUENCE
    text = torch.randint(0, 64, (STEPS, BATCH, sequence + 1), generator=generator, dtype=torch.int32)
    tokens, targets = text[..., :-1].contiguous(), text[..., 1:].contiguous()
    weights = None
    if family in WEIGHTED:
        units = torch.randint(-1024, 4097 + 1024, targets.shape, generator=generator)
        weights = units.clamp(0, 4096).float() / 4096
    # The saved directory is what gets trained: it must hold everything.
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    if family in TOKENS:
        model = train_rows(model, TOKENS[family], FROZEN.get(family, []))
    else:
        freeze(model, FROZEN.get(family, []))
    balance = BALANCE.get(family, 0.0)
    if lengths:
        lengths = [[lengths[(step * BATCH + row) % len(lengths)] for row in range(BATCH)] for step in range(STEPS)]
    logits, losses, norms = train(model, tokens, targets, weights, balance, lengths)
    golden = dict(tokens=tokens, targets=targets, logits=logits)
    if lengths:
        golden["documents"] = torch.tensor([[starts(row) for row in rows] for rows in lengths], dtype=torch.int32)
    if weights is not None:
        golden["weights"] = weights
    golden |= dict(loss=torch.tensor(losses, dtype=torch.float64), grad_norm=torch.tensor(norms, dtype=torch.float64))
    if family in TOKENS:
        golden["trained_tokens"] = torch.tensor(TOKENS[family], dtype=torch.int64)
        model = model.merge_and_unload()
    if family in FROZEN:
        golden["freeze"] = torch.frombuffer(bytearray("\n".join(FROZEN[family]), "utf-8"), dtype=torch.uint8)
    if balance:
        golden["balance"] = torch.tensor([balance], dtype=torch.float64)
    golden |= {f"final.{name}": tensor for name, tensor in saved(model).items()}
    save_file(golden, directory / "golden.safetensors")
    print(f"{family}: loss {losses[0]:.4f} to {losses[-1]:.4f}, gradient norm {min(norms):.2f} to {max(norms):.2f}")


def main():
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    root = pathlib.Path(__file__).parent
    for family in sys.argv[1:] or FAMILIES:
        generate(family, root)


if __name__ == "__main__":
    main()
