//! Configurations of multimodal models.

use super::*;
use crate::device::RouterRule;
use crate::model::layer_shape::Moe;
use crate::model::shape::RopeScaling;
use serde_json::json;

const NESTED: [(&str, &str); 8] = [
    ("Gemma3ForConditionalGeneration", "gemma3_text"),
    ("Mistral3ForConditionalGeneration", "mistral"),
    ("Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
];

fn text(architecture: &str) -> Value {
    let mut keys = json!({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-6});
    if architecture.contains("Moe") {
        let experts = json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": true,
            "shared_expert_intermediate_size": 20});
        keys.as_object_mut().unwrap().extend(experts.as_object().unwrap().clone());
    }
    keys
}

/// The shape of a model with these keys, and these in `text_config`.
fn read(architecture: &str, top: Value, nested: Value) -> Result<ModelShape> {
    let mut config = json!({"architectures": [architecture], "text_config": text(architecture)});
    for (map, changes) in [("", top), ("/text_config", nested)] {
        for (key, value) in changes.as_object().unwrap() {
            config.pointer_mut(map).unwrap()[key] = value.clone();
        }
    }
    parse(&config.to_string(), Path::new("m/config.json"))
}

fn error(shape: Result<ModelShape>) -> String {
    shape.expect_err("must be refused").to_string()
}

#[test]
fn a_nested_configuration_is_that_of_the_text_model() {
    let alone = [
        "Gemma3ForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    ];
    for ((architecture, model_type), alone) in NESTED.into_iter().zip(alone) {
        let rope = json!({"rope_theta": 5e4, "tie_word_embeddings": false, "model_type": model_type});
        let shape = read(architecture, json!({}), rope.clone()).unwrap();
        let mut flat = text(architecture);
        flat.as_object_mut().unwrap().extend(rope.as_object().unwrap().clone());
        flat["architectures"] = json!([alone]);
        let want = parse(&flat.to_string(), Path::new("m/config.json")).unwrap();
        assert_eq!(shape.arithmetic(), want.arithmetic(), "{architecture}");
        assert!(!shape.media_tokens.is_empty() && want.media_tokens.is_empty());
        let message = error(read(architecture, json!({}), json!({"hidden_size": "x"})));
        assert_eq!(message, "m/config.json: text_config.hidden_size: expected a whole number, found \"x\"");
        let message = error(read(architecture, json!({}), json!({"model_type": "other"})));
        assert!(message.contains(&format!("text_config.model_type = \"other\" (known: {model_type}")), "{message}");
        let message = error(read(architecture, json!({"text_config": 5}), json!({})));
        assert!(message.contains("text_config: expected an object, found 5"), "{message}");
        for level in [[json!({"quantization_config": {"quant_method": "fp8"}}), json!({})], [json!({}), json!({"quantization_config": {}})]]
        {
            let [top, nested] = level;
            let message = error(read(architecture, top, nested));
            assert!(message.contains("quantization_config = {") && message.contains("-BF16"), "{message}");
        }
    }
}

#[test]
fn old_files_of_qwen_are_flat_and_others_are_not() {
    for (architecture, _) in NESTED {
        let mut flat = text(architecture);
        flat["architectures"] = json!([architecture]);
        flat["rope_scaling"] = json!({"type": "mrope", "mrope_section": [1, 1, 2]});
        let read_flat = parse(&flat.to_string(), Path::new("m/config.json"));
        if architecture.starts_with("Qwen2") {
            assert_eq!(read_flat.unwrap(), read(architecture, json!({}), json!({})).unwrap());
        } else {
            assert!(error(read_flat).contains("text_config: missing; expected an object"), "{architecture}");
        }
    }
}

#[test]
fn missing_keys_have_the_defaults_of_the_class() {
    // As google published Gemma 3 of 4 B.
    let sparse = json!({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
        "model_type": "gemma3_text", "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}});
    let shape = parse(&sparse.to_string(), Path::new("m/config.json")).unwrap();
    let Attn { heads, kv_heads, head_dim, window, scale, .. } = shape.layers[0].attn;
    assert_eq!((heads, kv_heads, head_dim, window, scale), (8, 4, 256, Some(1024), 1.0 / 16.0));
    assert_eq!((shape.vocab, shape.max_positions, shape.tied, shape.final_norm.eps), (262_208, 131_072, true, 1e-6));
    assert_eq!((shape.ropes[0].theta, &shape.ropes[0].scaling), (1e6, &RopeScaling::Linear { factor: 8.0 }));
    assert_eq!((shape.ropes[1].theta, shape.layers[5].attn.window), (1e4, None));
    assert_eq!(TensorTable::new(&shape).params(), 3_880_263_168);
    for (architecture, eps) in [("Qwen2VLForConditionalGeneration", 1e-5), ("Qwen3VLForConditionalGeneration", 1e-6)] {
        let shape = read(architecture, json!({}), json!({"rms_norm_eps": null})).err();
        assert!(shape.is_some(), "null is no default");
        let mut config = json!({"architectures": [architecture], "text_config": text(architecture)});
        config["text_config"].as_object_mut().unwrap().remove("rms_norm_eps");
        let shape = parse(&config.to_string(), Path::new("m/config.json")).unwrap();
        assert_eq!(shape.final_norm.eps, eps as f32);
    }
    let mut config = json!({"architectures": [NESTED[5].0], "text_config": text(NESTED[5].0)});
    for key in ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"] {
        config["text_config"].as_object_mut().unwrap().remove(key);
    }
    let moe = |config: &Value| parse(&config.to_string(), Path::new("m/config.json")).unwrap().layers[0].mlp.moe().unwrap();
    let Moe { experts, top_k, ffn, rule, .. } = moe(&config);
    assert_eq!((experts, top_k, ffn.width, rule), (60, 4, 1408, RouterRule::Chosen));
    for key in ["num_experts", "num_local_experts"] {
        let mut named = config.clone();
        named["text_config"][key] = json!(8);
        assert_eq!(moe(&named).experts, 8, "{key}");
    }
    let theta = |architecture: &str| read(architecture, json!({}), json!({})).unwrap().ropes[0].theta;
    assert_eq!([3, 4, 5, 1].map(|i: usize| theta(NESTED[i].0)), [1e6, 5e5, 5e5, 1e4]);
    let std = |top: Value, nested: Value| read("Qwen3VLForConditionalGeneration", top, nested).unwrap().init_std;
    assert_eq!(std(json!({"initializer_range": 0.5}), json!({})), 0.5);
    assert_eq!(std(json!({"initializer_range": 0.5}), json!({"initializer_range": 0.1})), 0.1);
}

#[test]
fn ties_are_read_at_the_top_then_nested_then_from_the_class() {
    let tied = |architecture: &str, top: Option<bool>, nested: Option<bool>| {
        let level = |tied: Option<bool>| tied.map_or(json!({}), |tied| json!({"tie_word_embeddings": tied}));
        read(architecture, level(top), level(nested)).unwrap().tied
    };
    for ((architecture, _), default) in NESTED.into_iter().zip([true, true, false, false, false, false, false, false]) {
        assert_eq!(tied(architecture, None, None), default, "{architecture}");
        for value in [true, false] {
            assert_eq!(tied(architecture, None, Some(value)), value, "{architecture}");
            assert_eq!(tied(architecture, Some(value), None), value, "{architecture}");
        }
        assert!(tied(architecture, Some(true), Some(false)));
        // Saves of transformers 4 had the key of classes that once were flat in the nested object alone.
        assert_eq!(tied(architecture, Some(false), Some(true)), architecture.starts_with("Qwen2"), "{architecture}");
    }
}

#[test]
fn rotations_in_sections_are_plain_for_text() {
    for (architecture, _) in &NESTED[2..] {
        for rope in [
            json!({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}),
            json!({"rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2], "mrope_interleaved": true}}),
            json!({"rope_parameters": {"rope_type": "mrope", "mrope_section": [1, 1, 2]}}),
        ] {
            assert_eq!(read(architecture, json!({}), rope).unwrap().ropes[0].scaling, RopeScaling::Default);
        }
        let yarn = json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mrope_section": [1, 1, 2]}});
        assert!(matches!(read(architecture, json!({}), yarn).unwrap().ropes[0].scaling, RopeScaling::Yarn { .. }), "yarn still stretches");
    }
    let mut alone = text("Qwen2ForCausalLM");
    alone["architectures"] = json!(["Qwen2ForCausalLM"]);
    alone["rope_scaling"] = json!({"type": "mrope", "mrope_section": [1, 1, 2]});
    assert!(error(parse(&alone.to_string(), Path::new("m/config.json"))).contains("mrope"), "a text model has no such rotation");
}

#[test]
fn attention_in_both_directions_is_accepted_between_tokens_of_images_alone() {
    let scope = |value: Value| read("Gemma3ForConditionalGeneration", json!({}), json!({"use_bidirectional_attention": value}));
    for value in [json!("vision"), json!(null), json!(false)] {
        scope(value).unwrap();
    }
    for value in [json!("all"), json!(true), json!("text"), json!(["vision"])] {
        assert!(error(scope(value)).contains("text_config.use_bidirectional_attention = "));
    }
}

#[test]
fn tokens_of_images_come_from_either_level_or_the_class() {
    let tokens = |architecture: &str, top: Value, nested: Value| -> Vec<(&str, u32)> {
        read(architecture, top, nested).unwrap().media_tokens.into_iter().map(|token| (token.key, token.id)).collect()
    };
    let qwen = |top, nested| tokens("Qwen3VLForConditionalGeneration", top, nested);
    let all =
        [("image_token_id", 151_655), ("video_token_id", 151_656), ("vision_start_token_id", 151_652), ("vision_end_token_id", 151_653)];
    assert_eq!(qwen(json!({}), json!({})), all);
    assert_eq!(qwen(json!({"video_token_id": 3}), json!({"image_token_id": 2}))[..2], [("image_token_id", 2), ("video_token_id", 3)]);
    let gemma = tokens("Gemma3ForConditionalGeneration", json!({"image_token_id": 7}), json!({}));
    assert_eq!(gemma, [("image_token_id", 7), ("boi_token_index", 255_999), ("eoi_token_index", 256_000)]);
    for value in [json!(-1), json!("x"), json!(u64::MAX)] {
        assert!(error(read("Qwen3VLForConditionalGeneration", json!({"image_token_id": value}), json!({}))).contains("image_token_id"));
    }
}

/// The published rotation of Ministral 3.
fn ministral_rope() -> Value {
    json!({"rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000000.0, "rope_type": "yarn", "type": "yarn"}})
}

/// The shape of Ministral 3 with these keys in `text_config`, as `read` gives it.
fn ministral(changes: Value) -> Result<ModelShape> {
    let mut nested = json!({"model_type": "ministral3"});
    for keys in [ministral_rope(), changes] {
        nested.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    }
    read("Mistral3ForConditionalGeneration", json!({}), nested)
}

#[test]
fn the_type_of_the_text_part_chooses_the_decoder_of_mistral3() {
    let shape = ministral(json!({})).unwrap();
    let yarn = RopeScaling::Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, truncate: true, original_max_positions: 16384 };
    assert_eq!((&shape.ropes[0].scaling, shape.ropes[0].attention_factor, shape.ropes[0].theta), (&yarn, 1.0, 1e9));
    assert_eq!((shape.max_positions, shape.limits_sequences(), shape.layers[0].attn.window, shape.tied), (16384, true, None, true));
    let mistral = read("Mistral3ForConditionalGeneration", json!({}), ministral_rope()).unwrap();
    assert_eq!((mistral.max_positions, mistral.limits_sequences(), mistral.layers[0].attn.window), (128, false, Some(4096)));
    let mut alone = text("Ministral3ForCausalLM");
    alone["architectures"] = json!(["Ministral3ForCausalLM"]);
    alone["rope_parameters"] = ministral_rope()["rope_parameters"].clone();
    let alone = parse(&alone.to_string(), Path::new("m/config.json")).unwrap();
    assert_eq!(ModelShape { tied: true, ..alone }.arithmetic(), shape.arithmetic());
    let message = error(ministral(json!({"model_type": "other"})));
    assert!(message.contains("text_config.model_type = \"other\" (known: mistral, ministral3)"), "{message}");
    let config = json!({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3",
        "rope_parameters": ministral_rope()["rope_parameters"]}});
    let of_class = parse(&config.to_string(), Path::new("m/config.json")).unwrap();
    assert_eq!((of_class.vocab, of_class.channels, of_class.layers.len(), of_class.final_norm.eps), (131_072, 4096, 34, 1e-5));
    assert_eq!(of_class.layers[0].attn.head_dim, 128);
}

#[test]
fn rotations_of_ministral3_are_named_in_full() {
    let without = |key: &str| {
        let mut rope = ministral_rope();
        rope["rope_parameters"].as_object_mut().unwrap().remove(key);
        ministral(rope)
    };
    assert!(error(ministral(json!({"rope_parameters": null}))).contains("rope_scaling: missing; expected an object with the rotations"));
    assert!(error(without("llama_4_scaling_beta")).contains("rope_parameters.llama_4_scaling_beta: missing; expected a number"));
    assert!(error(without("original_max_position_embeddings")).contains("original_max_position_embeddings: missing"));
    let mut unscaled = ministral_rope();
    unscaled["rope_parameters"]["llama_4_scaling_beta"] = json!(0.0);
    let unscaled = ministral(unscaled).unwrap();
    assert_eq!((unscaled.max_positions, unscaled.limits_sequences()), (128, false), "a factor of 1 everywhere is no limit");
}
