//! The `config.json` of a small model of each architecture.

use crate::model::family::Family;
use serde_json::{Value, json};

pub(super) fn config(architecture: &str) -> Value {
    match architecture {
        "GPT2LMHeadModel" => json!({
            "architectures": [architecture], "model_type": "gpt2", "vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 4,
            "n_positions": 16, "layer_norm_epsilon": 1e-5,
        }),
        "Ministral3ForCausalLM" => {
            let mut config = config("MistralForCausalLM");
            config["architectures"] = json!([architecture]);
            config["rope_parameters"] = json!({"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32});
            config
        }
        "Qwen3_5ForCausalLM" => json!({
            "architectures": [architecture], "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
            "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 5,
            "full_attention_interval": 2,
        }),
        _ if Family::find(architecture).unwrap().spec().latent().is_some() => json!({
            "architectures": [architecture], "vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "q_lora_rank": 14, "kv_lora_rank": 10,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 3, "num_experts_per_tok": 2,
            "moe_intermediate_size": 10, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
        }),
        _ if Family::find(architecture).unwrap().spec().moe.is_some() => json!({
            "architectures": [architecture], "vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
            "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "rope_scaling": {"rope_type": "default"},
            "n_shared_experts": 1, "shared_expert_intermediate_size": 14, "max_window_layers": 2, "partial_rotary_factor": 1.0,
            "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 5,
            "full_attention_interval": 2, "hidden_size_per_layer_input": 0, "global_head_dim": 10, "enable_moe_block": true, "top_k_experts": 2,
            "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
        }),
        _ => json!({
            "architectures": [architecture], "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
            "norm_epsilon": 1e-5, "partial_rotary_factor": 1.0, "pad_token_id": 0,
            "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
        }),
    }
}
