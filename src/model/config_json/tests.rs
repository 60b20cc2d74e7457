//! Tests of accepted and rejected configurations.

use super::*;
use crate::device::{RouterRule, SigmoidRule};
use crate::model::layer_shape::{NormKind, QkSpan, SharedExpertShape};
use crate::model::shape::{RopeConfig, RopeScaling};
use proptest::prelude::*;
use serde_json::json;

fn base(architecture: &str) -> Value {
    json!({
        "architectures": [architecture], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24, "layer_norm_epsilon": 1e-5,
        "norm_epsilon": 1e-5
    })
}

fn with(architecture: &str, changes: Value) -> Result<ModelShape> {
    let mut config = base(architecture);
    for (key, value) in changes.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    parse(&config.to_string(), Path::new("m/config.json"))
}

fn without(architecture: &str, key: &str) -> Result<ModelShape> {
    let mut config = base(architecture);
    config.as_object_mut().map(|map| map.remove(key));
    parse(&config.to_string(), Path::new("m/config.json"))
}

fn error(shape: Result<ModelShape>) -> String {
    shape.expect_err("must be refused").to_string()
}

fn windows_of(shape: Result<ModelShape>) -> Vec<Option<usize>> {
    shape.unwrap().layers.iter().map(|layer| layer.attn.window).collect()
}

#[test]
fn families_differ_as_in_transformers() {
    let biases = |s: &ModelShape| {
        let LayerShape { attn, mlp, .. } = s.layers[0];
        (attn.qkv_bias, attn.out_bias, mlp.ffn().bias)
    };
    let get = |architecture| with(architecture, json!({})).unwrap();
    let gpt2 = get("GPT2LMHeadModel");
    let (LayerShape { attn, norm, .. }, ffn) = (gpt2.layers[0], gpt2.layers[0].mlp.ffn());
    assert_eq!((norm.kind, ffn.act, gpt2.learned_positions, &gpt2.ropes), (NormKind::Layer, Act::GeluTanh, true, &vec![]));
    assert_eq!((ffn.width, attn.kv_heads, gpt2.max_positions, gpt2.tied), (128, 4, 24, true));
    assert_eq!(biases(&gpt2), (true, true, true));
    assert_eq!(biases(&get("LlamaForCausalLM")), (false, false, false));
    assert_eq!(biases(&get("Qwen2ForCausalLM")), (true, false, false));
    assert_eq!(biases(&get("SeedOssForCausalLM")), (true, false, false));
    assert_eq!(biases(&with("LlamaForCausalLM", json!({"attention_bias": true})).unwrap()), (true, true, false));
    assert_eq!(biases(&with("MistralForCausalLM", json!({"attention_bias": true})).unwrap()), (false, false, false));
    assert_eq!(get("Qwen3ForCausalLM").layers[2].attn.qk_norm, Some(QkSpan::Head));
    assert_eq!(windows_of(Ok(get("MistralForCausalLM"))), [Some(4096); 3]);
    assert_eq!(windows_of(Ok(get("Phi3ForCausalLM"))), [None; 3]);
    assert_eq!(windows_of(with("MistralForCausalLM", json!({"sliding_window": null}))), [None; 3]);
}

#[test]
fn gated_delta_rules_match_the_family_s_row_and_other_forms_are_refused() {
    let read = |changes: Value| {
        let mut all = json!({"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 5});
        changes.as_object().into_iter().flatten().for_each(|(key, value)| all[key] = value.clone());
        with("Qwen3_5ForCausalLM", all)
    };
    let kinds = |changes: Value| read(changes).unwrap().layers.iter().map(|layer| layer.attn.kind).collect::<Vec<_>>();
    use AttnKind::{Delta, GatedSoftmax};
    assert_eq!(kinds(json!({})), [Delta; 3]);
    assert_eq!(kinds(json!({"full_attention_interval": 2})), [Delta, GatedSoftmax, Delta]);
    assert_eq!(
        kinds(json!({"layer_types": ["full_attention", "linear_attention", "full_attention"]})),
        [GatedSoftmax, Delta, GatedSoftmax]
    );
    let shape = read(json!({"full_attention_interval": 3})).unwrap();
    let [delta, attn] = [0, 2].map(|layer| shape.layers[layer].attn);
    assert_eq!((delta.heads, delta.kv_heads, delta.head_dim, delta.qkv_cols(), delta.out_cols()), (6, 2, 5, 50, 30));
    assert_eq!((delta.qk_norm, delta.rope, delta.lse_cols(), delta.rule_cols()), (None, None, 0, 6));
    assert_eq!((attn.qk_norm, attn.rope, attn.gate_cols(), attn.rule_cols()), (Some(QkSpan::Head), Some(0), 32, 0));
    assert_eq!((shape.ropes[0].rotary_dim, shape.layers[0].norm.plus_one, shape.first_attention().kind), (2, true, GatedSoftmax));
    let defaults = with("Qwen3_5ForCausalLM", json!({})).unwrap().layers[0].attn;
    assert_eq!((defaults.heads, defaults.kv_heads, defaults.head_dim), (32, 16, 128));
    for (key, value, cause) in [
        ("linear_conv_kernel_dim", json!(3), "linear_conv_kernel_dim = 3 (only 4 is supported)"),
        ("attention_bias", json!(true), "attention_bias = true (only false is supported)"),
        ("attn_output_gate", json!(false), "attn_output_gate = false (only true is supported)"),
        ("output_gate_type", json!("sigmoid"), "output_gate_type = \"sigmoid\" (only swish is supported)"),
        ("hidden_act", json!("gelu_pytorch_tanh"), "hidden_act = \"gelu_pytorch_tanh\""),
        ("linear_value_head_dim", json!(6), "linear_value_head_dim = 6 (only the 5 of linear_key_head_dim is supported)"),
        ("linear_num_key_heads", json!(4), "linear_num_key_heads: 4 does not divide the 6 of linear_num_value_heads"),
        ("linear_num_value_heads", json!(1 << 24), "are more than 16777216 channels"),
        ("layer_types", json!(["full_attention"]), "layer_types: expected a list of 3 layer types"),
        ("layer_types", json!(["full_attention", "linear_attention", "sliding_attention"]), "known: full_attention, linear_attention"),
        ("num_experts", json!(4), "num_experts = 4"),
        ("quantization_config", json!({"quant_method": "fp8"}), "-BF16"),
    ] {
        let message = error(read(json!({key: value})));
        assert!(message.contains(cause), "{message}");
    }
}

/// A model of three layers with eight experts each and two experts per token.
fn experts(architecture: &str, changes: Value) -> Result<ModelShape> {
    let mut all = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12});
    changes.as_object().into_iter().flatten().for_each(|(key, value)| all[key] = value.clone());
    with(architecture, all)
}

#[test]
fn experts_match_the_family_s_row() {
    let moe = |shape: Result<ModelShape>| shape.unwrap().layers[1].mlp.moe().unwrap();
    let qwen3 = moe(experts("Qwen3MoeForCausalLM", json!({})));
    assert_eq!((qwen3.experts, qwen3.top_k, qwen3.ffn.width, qwen3.rule), (8, 2, 12, RouterRule::All));
    assert_eq!(moe(experts("Qwen3MoeForCausalLM", json!({"norm_topk_prob": true}))).rule, RouterRule::Chosen);
    assert_eq!(moe(experts("Qwen3MoeForCausalLM", json!({"num_experts": null, "num_local_experts": 4}))).experts, 4);
    let mixtral = moe(experts("MixtralForCausalLM", json!({})));
    assert_eq!((mixtral.ffn.width, mixtral.rule), (40, RouterRule::Chosen));
    let olmoe = experts("OlmoeForCausalLM", json!({"num_key_value_heads": 4})).unwrap();
    assert_eq!(olmoe.layers[0].attn.qk_norm, Some(QkSpan::Whole));
    let sparse = |changes| -> Vec<bool> {
        experts("Qwen3MoeForCausalLM", changes).unwrap().layers.iter().map(|layer| layer.mlp.moe().is_some()).collect()
    };
    assert_eq!(sparse(json!({"decoder_sparse_step": 2})), [false, true, false]);
    assert_eq!(sparse(json!({"mlp_only_layers": [0, 7]})), [false, true, true]);
    assert_eq!(windows_of(experts("Qwen3MoeForCausalLM", json!({"use_sliding_window": true}))), [Some(4096); 3]);
    assert_eq!(windows_of(experts("Qwen3MoeForCausalLM", json!({"sliding_window": 5}))), [None; 3]);
    for (key, value) in [
        ("num_experts", json!(0)),
        ("num_experts", json!(1025)),
        ("num_experts_per_tok", json!(9)),
        ("num_experts_per_tok", json!(null)),
        ("moe_intermediate_size", json!(0)),
        ("norm_topk_prob", json!(1)),
        ("decoder_sparse_step", json!(4)),
        ("decoder_sparse_step", json!(0)),
        ("mlp_only_layers", json!(["0"])),
        ("mlp_only_layers", json!(1)),
    ] {
        let message = error(experts("Qwen3MoeForCausalLM", json!({key: value})));
        assert!(message.contains(key), "{key} = {value}: {message}");
    }
    assert!(error(experts("GptOssForCausalLM", json!({}))).contains("rope_scaling: missing"));
    let many = json!({"num_hidden_layers": 100, "num_experts": 1000});
    assert!(error(experts("Qwen3MoeForCausalLM", many)).contains("65536"));
}

#[test]
fn shared_experts_and_sigmoid_routers_match_the_family_s_row() {
    let glm = |changes: Value| {
        let mut all = json!({"num_experts": null, "n_routed_experts": 8, "n_shared_experts": 2});
        changes.as_object().into_iter().flatten().for_each(|(key, value)| all[key] = value.clone());
        experts("Glm4MoeForCausalLM", all)
    };
    let moe = |shape: &ModelShape| shape.layers[1].mlp.moe().unwrap();
    let shape = glm(json!({"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": true})).unwrap();
    let rule = SigmoidRule { groups: 4, top_groups: 2, renormalised: true, scale: 2.5 };
    assert_eq!((moe(&shape).rule, moe(&shape).corrected), (RouterRule::Sigmoid(rule), true));
    assert_eq!(moe(&shape).shared, Some(SharedExpertShape { width: 24, gated: false }));
    assert_eq!(shape.layers.iter().map(|layer| layer.mlp.moe().is_some()).collect::<Vec<_>>(), [false, true, true]);
    assert_eq!((shape.layers[0].attn.qk_norm, shape.ropes[0].rotary_dim), (Some(QkSpan::Head), 4));
    assert_eq!(glm(json!({})).unwrap().layers[0].attn.qk_norm, None);
    for (key, value, cause) in [
        ("n_group", json!(3), "3 groups of 8 experts"),
        ("n_group", json!(8), "8 groups of 8 experts"),
        ("n_group", json!(64), "outside 1 to 32"),
        ("topk_group", json!(2), "outside 1 to 1"),
        ("first_k_dense_replace", json!(3), "no layer has experts"),
        ("n_shared_experts", json!(1 << 23), "wider"),
        ("n_shared_experts", json!(null), "expected a whole number"),
        ("routed_scaling_factor", json!(0), "outside"),
    ] {
        let message = error(glm(json!({key: value})));
        assert!(message.contains(key) || message.contains("n_group"), "{key} = {value}: {message}");
        assert!(message.contains(cause), "{key} = {value}: {message}");
    }
    let qwen2 = |changes: Value| {
        let mut all = json!({"shared_expert_intermediate_size": 20});
        changes.as_object().into_iter().flatten().for_each(|(key, value)| all[key] = value.clone());
        experts("Qwen2MoeForCausalLM", all)
    };
    let shape = qwen2(json!({})).unwrap();
    assert_eq!((moe(&shape).rule, moe(&shape).corrected), (RouterRule::All, false));
    assert_eq!(moe(&shape).shared, Some(SharedExpertShape { width: 20, gated: true }));
    assert!(error(qwen2(json!({"n_group": 2}))).contains("n_group"));
    assert_eq!(windows_of(qwen2(json!({"use_sliding_window": true, "max_window_layers": 2}))), [Some(4096), None, None]);
    assert_eq!(windows_of(qwen2(json!({"use_sliding_window": true, "max_window_layers": 3}))), [Some(4096), None, Some(4096)]);
    let dots = json!({"n_shared_experts": 1, "max_window_layers": 1, "sliding_window": 5});
    assert_eq!(windows_of(experts("Dots1ForCausalLM", dots)), [None, Some(5), Some(5)]);
}

#[test]
fn windows_of_single_layers() {
    let by_depth = json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 1});
    assert_eq!(windows_of(with("Qwen2ForCausalLM", by_depth)), [None, Some(5), Some(5)]);
    let types = json!(["sliding_attention", "full_attention", "full_attention"]);
    let by_type = json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 0, "layer_types": types});
    assert_eq!(windows_of(with("Qwen3ForCausalLM", by_type)), [Some(5), None, None]);
    let off = json!({"use_sliding_window": false, "sliding_window": 5, "max_window_layers": 0});
    assert_eq!(windows_of(with("Qwen2ForCausalLM", off)), [None; 3]);
    let contradiction = json!({"sliding_window": 5, "layer_types": types});
    assert!(error(with("Qwen3ForCausalLM", contradiction)).contains("use_sliding_window"));
}

#[test]
fn old_and_new_rope_spellings_agree() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    let old = with("LlamaForCausalLM", json!({"rope_theta": 5e5, "rope_scaling": llama3})).unwrap();
    let mut inner = llama3.clone();
    inner["rope_theta"] = json!(5e5);
    let new = with("LlamaForCausalLM", json!({"rope_parameters": inner})).unwrap();
    assert_eq!(old, new);
    let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 64 };
    assert_eq!(old.ropes[0], RopeConfig { theta: 5e5, rotary_dim: 8, interleaved: false, scaling, attention_factor: 1.0 });
    let linear = with("LlamaForCausalLM", json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
    assert_eq!(
        linear.ropes[0],
        RopeConfig { theta: 1e4, rotary_dim: 8, interleaved: false, scaling: RopeScaling::Linear { factor: 2.0 }, attention_factor: 1.0 }
    );
    let partial = with("Phi3ForCausalLM", json!({"partial_rotary_factor": 0.5})).unwrap();
    assert_eq!(partial.ropes[0].rotary_dim, 4);
}

#[test]
fn yarn_s_attention_factor_is_the_file_s_or_follows_from_the_stretch() {
    let factor_of = |changes: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 8.0});
        for (key, value) in changes.as_object().into_iter().flatten() {
            scaling[key] = value.clone();
        }
        with("Qwen3ForCausalLM", json!({"rope_scaling": scaling})).unwrap().ropes[0].attention_factor
    };
    assert_eq!(factor_of(json!({})), (0.1 * 8f64.ln() + 1.0) as f32);
    assert_eq!(factor_of(json!({"attention_factor": 0.5})), 0.5);
    assert_eq!(factor_of(json!({"mscale": 2.0, "mscale_all_dim": 0.0})), factor_of(json!({})));
    assert_eq!(factor_of(json!({"mscale": 2.0, "mscale_all_dim": 1.0})), ((0.2 * 8f64.ln() + 1.0) / (0.1 * 8f64.ln() + 1.0)) as f32);
    assert_eq!(factor_of(json!({"factor": 0.5})), 1.0);
}

#[test]
fn longrope_stretches_by_the_file_s_factors() {
    let scaling = |kind: &str| json!({"type": kind, "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 3.0, 4.0]});
    let read = |kind: &str, original: usize| {
        let changes = json!({"rope_scaling": scaling(kind), "original_max_position_embeddings": original});
        with("Phi3ForCausalLM", changes).unwrap().ropes[0].clone()
    };
    let rope = read("longrope", 32);
    assert_eq!(rope.attention_factor, (1.0 + 4f64.ln() / 32f64.ln()).sqrt() as f32);
    assert!(matches!(&rope.scaling, RopeScaling::Long { long, original_max_positions: 32, .. } if *long == [1.0, 2.0, 3.0, 4.0]));
    assert_eq!((read("su", 32), read("yarn", 32)), (rope.clone(), rope));
    assert_eq!(read("longrope", 128).attention_factor, 1.0);
    assert!(error(with("Phi3ForCausalLM", json!({"rope_scaling": scaling("longrope")}))).contains("original_max_position_embeddings"));
    let short = json!({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0, 3.0, 4.0]});
    assert!(error(with("Phi3ForCausalLM", json!({"rope_scaling": short}))).contains("rope_scaling.short_factor"));
}

#[test]
fn layers_that_slide_have_a_rotation_of_their_own() {
    let read = |changes| with("Olmo3ForCausalLM", changes);
    let [full, sliding] =
        [json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}), json!({"rope_type": "default", "rope_theta": 1e3})];
    let shape = read(json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}))
    .unwrap();
    assert_eq!(shape.layers.iter().map(|layer| layer.attn.rope).collect::<Vec<_>>(), [Some(1), Some(0), Some(1)]);
    let rope = |theta, scaling| RopeConfig { theta, rotary_dim: 8, interleaved: false, scaling, attention_factor: 1.0 };
    assert_eq!(shape.ropes, [rope(1e6, RopeScaling::Linear { factor: 2.0 }), rope(1e3, RopeScaling::Default)]);
    // The old spelling scales layers with full attention, and has no object for the others.
    let old = read(json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e6})).unwrap();
    assert_eq!(old.ropes, [rope(1e6, RopeScaling::Linear { factor: 2.0 }), rope(5e5, RopeScaling::Default)]);
    assert_eq!(read(json!({})).unwrap().ropes, [rope(5e5, RopeScaling::Default), rope(5e5, RopeScaling::Default)]);
    assert_eq!(read(json!({"rope_parameters": {"sliding_attention": sliding}})).unwrap().ropes[1].theta, 1e3);
    let both =
        |factor: f64| json!({"rope_parameters": {"full_attention": full}, "rope_scaling": {"rope_type": "linear", "factor": factor}});
    assert_eq!(read(both(2.0)).unwrap().ropes[0], rope(1e6, RopeScaling::Linear { factor: 2.0 }), "the old name repeats the new one");
    for (changes, words) in [
        (json!({"rope_parameters": full}), "rope_parameters: expected objects full_attention and sliding_attention"),
        (both(3.0), "no other rope_scaling beside"),
        (json!({"rope_parameters": {"full_attention": 1}}), "rope_parameters.full_attention: expected an object"),
        (json!({"rope_parameters": {"sliding_attention": {"rope_theta": -1.0}}}), "rope_parameters.sliding_attention.rope_theta"),
    ] {
        let message = error(read(changes));
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn layers_without_rope() {
    let rotates = |changes| with("SmolLM3ForCausalLM", changes).map(|shape| shape.layers.iter().map(|l| l.attn.rope).collect::<Vec<_>>());
    assert_eq!(rotates(json!({"no_rope_layer_interval": 2})).unwrap(), [Some(0), None, Some(0)]);
    assert_eq!(rotates(json!({"no_rope_layers": [0, 0, 1]})).unwrap(), [None, None, Some(0)]);
    let slides = json!({"no_rope_layer_interval": 2, "use_sliding_window": true, "sliding_window": 5});
    assert_eq!(windows_of(with("SmolLM3ForCausalLM", slides)), [None, Some(5), None]);
    for marks in [json!([1, 1]), json!([1, 1, 2]), json!("all")] {
        assert!(error(with("SmolLM3ForCausalLM", json!({"no_rope_layers": marks}))).contains("no_rope_layers"));
    }
}

#[test]
fn unsupported_architectures_are_named() {
    let cases = [
        (with("JambaForCausalLM", json!({})), "JambaForCausalLM"),
        (with("LlamaForCausalLM", json!({"num_experts": 4})), "num_experts = 4"),
        (experts("MixtralForCausalLM", json!({"router_jitter_noise": 0.1})), "router_jitter_noise = 0.1"),
        (experts("MixtralForCausalLM", json!({"hidden_act": "gelu_new"})), "hidden_act = \"gelu_new\""),
        (experts("OlmoeForCausalLM", json!({"clip_qkv": 8.0})), "clip_qkv = 8.0"),
        (experts("Qwen3MoeForCausalLM", json!({"n_group": 2})), "n_group = 2"),
        (experts("Qwen3MoeForCausalLM", json!({"output_router_logits": true})), "output_router_logits = true (set it to false"),
        (with("CohereForCausalLM", json!({})), "side by side, which this decoder lacks; known: GPT2LMHeadModel, LlamaForCausalLM"),
        (with("LlamaForCausalLM", json!({"hidden_act": "relu"})), "hidden_act = \"relu\""),
        (with("LlamaForCausalLM", json!({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}})), "rope_scaling.rope_type = \"mrope\""),
        (with("LlamaForCausalLM", json!({"partial_rotary_factor": 0.5})), "partial_rotary_factor = 0.5"),
        (with("LlamaForCausalLM", json!({"quantization_config": {"quant_method": "fp8"}})), "often with -BF16 in its name"),
        (with("LlamaForCausalLM", json!({"quantization_config": {"bits": 4}})), "quantization_config"),
        (with("LlamaForCausalLM", json!({"is_causal": false})), "is_causal = false"),
        (with("GPT2LMHeadModel", json!({"scale_attn_by_inverse_layer_idx": true})), "scale_attn_by_inverse_layer_idx = true"),
        (with("Qwen3ForCausalLM", json!({"layer_types": ["linear_attention", "full_attention", "full_attention"]})), "linear_attention"),
    ];
    for (shape, needle) in cases {
        assert!(matches!(&shape, Err(Error::Unsupported(_))), "{needle}: {shape:?}");
        let message = error(shape);
        assert!(message.contains(needle) && message.contains("m/config.json"), "{message}");
    }
}

#[test]
fn senseless_values_name_their_key() {
    let sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"];
    for key in sizes.into_iter().chain(["num_key_value_heads", "head_dim"]) {
        for value in [json!(0), json!(-1), json!(1.5), json!("64"), json!([]), json!(u64::MAX)] {
            assert!(error(with("Qwen3ForCausalLM", json!({key: value}))).contains(key), "{key} = {value}");
        }
        assert!(error(without("Qwen3ForCausalLM", key)).contains(key), "{key} missing");
    }
    for (key, value) in [
        ("num_attention_heads", json!(5)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(7)),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!(-1e-5)),
        ("rms_norm_eps", json!(null)),
        ("rope_theta", json!(0.0)),
        ("rope_scaling", json!([1])),
        ("rope_scaling", json!({"type": "linear", "factor": 0.0})),
        ("tie_word_embeddings", json!("yes")),
        ("architectures", json!([])),
        ("architectures", json!("LlamaForCausalLM")),
    ] {
        assert!(error(with("LlamaForCausalLM", json!({key: value}))).contains(key), "{key} = {value}");
    }
}

#[test]
fn the_largest_sizes_do_not_overflow() {
    let huge = json!({"hidden_size": SIZE_MAX, "intermediate_size": SIZE_MAX, "num_hidden_layers": LAYERS_MAX, "vocab_size": VOCAB_MAX,
        "num_attention_heads": 1 << 12, "num_key_value_heads": 1 << 12, "head_dim": 1 << 12});
    assert!(error(with("LlamaForCausalLM", huge)).contains("parameters"));
    let gpt2 = json!({"n_embd": SIZE_MAX, "n_inner": SIZE_MAX, "n_layer": LAYERS_MAX, "n_positions": INDEX_MAX, "vocab_size": VOCAB_MAX});
    assert!(error(with("GPT2LMHeadModel", gpt2)).contains("parameters"));
}

#[test]
fn numbers_that_are_not_json_are_refused() {
    for number in ["NaN", "Infinity", "1e999", "-"] {
        let text = base("LlamaForCausalLM").to_string().replace("1e-6", number);
        assert!(text.contains(number));
        assert!(error(parse(&text, Path::new("m/config.json"))).starts_with("m/config.json: "), "{number}");
    }
}

/// An arbitrary small JSON value.
fn any_json() -> impl Strategy<Value = Value> {
    let number = prop_oneof![any::<i64>().prop_map(Value::from), any::<f64>().prop_map(Value::from), (0u64..300).prop_map(Value::from)];
    let text = prop_oneof![
        "[a-z_0-9]{0,12}",
        Just("sliding_attention".to_string()),
        Just("llama3".to_string()),
        Just("yarn".to_string()),
        Just("longrope".to_string()),
        Just("dynamic".to_string()),
        Just("é".repeat(90))
    ];
    let leaf = prop_oneof![Just(Value::Null), any::<bool>().prop_map(Value::from), number, text.prop_map(Value::from)];
    leaf.prop_recursive(2, 8, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("[a-z_]{1,8}|rope_type|factor|rope_theta|short_factor|long_factor|full_attention", inner), 0..4)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(text in ".{0,200}") {
        let _ = parse(&text, Path::new("m/config.json"));
    }

    #[test]
    fn arbitrary_values_never_panic(family in any::<prop::sample::Index>(), changes in prop::collection::vec((0usize..40, any_json()), 1..4)) {
        let mut config = base(Family::architectures().nth(family.index(Family::architectures().count())).unwrap());
        if family.index(2) == 0 {
            config["text_config"] = config.clone();
        }
        let extra = ["rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "layer_types", "use_sliding_window",
            "max_window_layers", "no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern", "partial_rotary_factor", "tie_word_embeddings", "attention_bias", "n_inner", "initializer_range",
            "text_config", "image_token_id", "model_type", "use_bidirectional_attention"];
        let mut keys: Vec<String> = config.as_object().into_iter().flat_map(|map| map.keys().cloned()).collect();
        keys.extend(extra.map(String::from));
        for (key, value) in changes {
            config[&keys[key % keys.len()]] = value;
        }
        if let Ok(shape) = parse(&config.to_string(), Path::new("m/config.json")) {
            let table = TensorTable::new(&shape);
            prop_assert!(table.flat_elems() >= table.params());
        }
    }
}
