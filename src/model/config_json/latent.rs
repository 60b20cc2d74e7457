//! Multi-head latent attention, from `config.json`.

use super::keys::{Keys, SIZE_MAX};
use crate::error::Result;
use crate::model::family::FamilySpec;
use crate::model::family::latent::LatentSpec;
use crate::model::layer_shape::{Attn, AttnKind, Latent, Values};
use serde_json::{Map, Value};

/// Attention shared by all layers, without rope; `None` if the family has no latent attention.
pub(super) fn attention(keys: &Keys, spec: &FamilySpec) -> Result<Option<Attn>> {
    let Some(latent) = spec.latent() else { return Ok(None) };
    refuse_unsupported(keys, spec, &latent)?;
    let size = |key| keys.count(key, SIZE_MAX);
    let (heads, plain, value) = (size(spec.keys.heads)?, size("qk_nope_head_dim")?, size("v_head_dim")?);
    let latent = Latent { query_rank: query_rank(keys)?, rank: size("kv_lora_rank")?, rotary: size("qk_rope_head_dim")?, value };
    let head_dim = plain + latent.rotary;
    if !latent.rotary.is_multiple_of(2) {
        return Err(keys.bad("qk_rope_head_dim", format_args!("{}: rope needs an even number", latent.rotary)));
    }
    if value > head_dim {
        let note = format!("at most the {head_dim} of qk_nope_head_dim and qk_rope_head_dim is supported");
        return Err(keys.unsupported("v_head_dim", &Value::from(value), &note));
    }
    if heads * head_dim > SIZE_MAX {
        return Err(keys.bad(spec.keys.heads, format_args!("{heads} heads of {head_dim} are more than {SIZE_MAX} channels")));
    }
    let kv_heads = keys.count_or("num_key_value_heads", heads, SIZE_MAX)?;
    if kv_heads != heads {
        let note = format!("only the {heads} of {} are supported", spec.keys.heads);
        return Err(keys.unsupported("num_key_value_heads", &Value::from(kv_heads), &note));
    }
    Ok(Some(Attn {
        kind: AttnKind::Latent(latent),
        heads,
        kv_heads,
        head_dim,
        qkv_bias: false,
        out_bias: false,
        qk_norm: None,
        values: Values::Projected,
        rope: None,
        window: None,
        scale: scale(keys, head_dim)?,
        softcap: None,
        sinks: false,
    }))
}

/// Channels of the latent vector of queries: `null` means none, and a missing key is an error, because its default fits one model only.
fn query_rank(keys: &Keys) -> Result<Option<usize>> {
    match keys.map.get("q_lora_rank") {
        Some(Value::Null) => Ok(None),
        _ => keys.count("q_lora_rank", SIZE_MAX).map(Some),
    }
}

/// `head_dim^-1/2`, times the square of a factor that grows with the context where the rotation names one.
fn scale(keys: &Keys, head_dim: usize) -> Result<f32> {
    let (empty, plain) = (Map::new(), (head_dim as f64).sqrt().recip());
    let (within, map) = keys.rope_parameters(&empty)?;
    let inner = Keys { map, within, ..*keys };
    let is_default = inner.get("rope_type").or(inner.get("type")).is_none_or(|kind| kind == "default");
    let growth = inner.number("mscale_all_dim", Some(0.0), 0.0, 1e9)?;
    if is_default || growth == 0.0 {
        return Ok(plain as f32);
    }
    let factor = inner.number("factor", None, 1e-6, 1e9)?;
    let growth = if factor <= 1.0 { 1.0 } else { 0.1 * growth * libm::log(factor) + 1.0 };
    Ok((plain * growth * growth) as f32)
}

/// Rejects options that would change the arithmetic, also those that `transformers` does not read, and missing keys whose defaults fit one
/// model only.
fn refuse_unsupported(keys: &Keys, spec: &FamilySpec, latent: &LatentSpec) -> Result<()> {
    let other = |key: &str, supported: Value| keys.get(key).filter(|value| **value != supported);
    let sigmoid = spec.moe.as_ref().is_some_and(|moe| moe.sigmoid);
    let factor = keys.get("routed_scaling_factor").filter(|value| !sigmoid && value.as_f64() != Some(1.0));
    let found = [
        ("attention_bias", other("attention_bias", false.into()), "only false is supported".to_string()),
        ("mlp_bias", other("mlp_bias", false.into()), "only false is supported".into()),
        ("moe_layer_freq", other("moe_layer_freq", 1.into()), "only 1 is supported".into()),
        ("scoring_func", other("scoring_func", latent.scoring.into()), format!("only {} is supported", latent.scoring)),
        ("topk_method", other("topk_method", latent.choice.into()), format!("only {} is supported", latent.choice)),
        ("routed_scaling_factor", factor, "only 1 is supported with softmax scores".into()),
        (
            "norm_topk_prob",
            other("norm_topk_prob", false.into()).filter(|_| !sigmoid),
            "only false is supported with softmax scores".into(),
        ),
    ];
    if let Some((key, value, note)) = found.into_iter().find_map(|(key, value, note)| Some((key, value?, note))) {
        return Err(keys.unsupported(key, value, &note));
    }
    let needed = ["n_group", "topk_group", "routed_scaling_factor"];
    match needed.into_iter().find(|key| sigmoid && keys.get(key).is_none()) {
        None => Ok(()),
        Some(key) => Err(keys.missing(key, "a number")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{RouterRule, SigmoidRule};
    use crate::model::shape::ModelShape;
    use serde_json::json;
    use std::path::Path;

    /// The shape of a model with three layers and with these keys.
    fn read(architecture: &str, more: Value) -> Result<ModelShape> {
        let mut config = json!({
            "architectures": [architecture], "vocab_size": 37, "hidden_size": 22, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 4, "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "q_lora_rank": null, "kv_lora_rank": 10,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_shared_experts": 1, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "n_group": 1,
            "topk_group": 1,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config.as_object_mut().unwrap().retain(|_, value| *value != "absent");
        ModelShape::parse(&config.to_string(), Path::new("config.json"))
    }

    #[test]
    fn heads_ranks_and_scales_are_those_of_the_file() {
        let shape = read("DeepseekV2ForCausalLM", json!({"head_dim": 4})).unwrap();
        let attn = shape.layers[2].attn;
        assert_eq!(attn.latent(), Some(Latent { query_rank: None, rank: 10, rotary: 4, value: 8 }));
        assert_eq!((attn.heads, attn.kv_heads, attn.head_dim, attn.scale), (4, 4, 10, 10f32.sqrt().recip()));
        assert_eq!((attn.projected_cols(), attn.qkv_cols(), attn.out_cols(), attn.value_cols()), (40, 120, 40, 32));
        assert_eq!((shape.ropes[0].rotary_dim, shape.ropes[0].interleaved, attn.rope), (4, true, Some(0)));
        assert_eq!(shape.layers[1].mlp.moe().map(|moe| (moe.rule, moe.corrected)), Some((RouterRule::All, false)));
        assert!(shape.layers[0].mlp.moe().is_none());
        let yarn = json!({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16});
        let keys = json!({"q_lora_rank": 9, "rope_scaling": yarn, "rope_interleave": false, "routed_scaling_factor": 2.5});
        let shape = read("DeepseekV3ForCausalLM", keys).unwrap();
        let attn = shape.layers[2].attn;
        let growth = 0.1 * 40f64.ln() + 1.0;
        assert_eq!((attn.scale, attn.projected_cols()), ((growth * growth / 10f64.sqrt()) as f32, 9));
        assert_eq!((shape.ropes[0].attention_factor, shape.ropes[0].interleaved), (1.0, false));
        let rule = SigmoidRule { groups: 1, top_groups: 1, renormalised: true, scale: 2.5 };
        assert_eq!(shape.layers[1].mlp.moe().map(|moe| (moe.rule, moe.corrected)), Some((RouterRule::Sigmoid(rule), true)));
    }

    #[test]
    fn layers_with_experts_are_named_or_all_but_the_first() {
        let sparse =
            |more| read("Glm4MoeLiteForCausalLM", more).map(|shape| shape.layers.iter().map(|l| l.mlp.moe().is_some()).collect::<Vec<_>>());
        assert_eq!(sparse(json!({})).unwrap(), [false, true, true]);
        assert_eq!(sparse(json!({"mlp_layer_types": ["sparse", "dense", "sparse"]})).unwrap(), [true, false, true]);
        for (more, cause) in [
            (json!({"first_k_dense_replace": 2}), "first_k_dense_replace = 2"),
            (json!({"mlp_layer_types": ["sparse", "dense"]}), "mlp_layer_types: expected a list of 3"),
            (json!({"mlp_layer_types": ["sparse", "dense", "full"]}), "mlp_layer_types = \"full\""),
            (json!({"mlp_layer_types": ["dense", "dense", "dense"]}), "mlp_layer_types: no layer has experts"),
        ] {
            assert!(sparse(more).unwrap_err().to_string().contains(cause), "{cause}");
        }
    }

    #[test]
    fn other_arithmetic_is_refused_by_key() {
        let (v2, v3) = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM");
        for (architecture, more, cause) in [
            (v2, json!({"topk_method": "group_limited_greedy"}), "topk_method = \"group_limited_greedy\" (only greedy"),
            (v3, json!({"topk_method": "greedy"}), "topk_method = \"greedy\" (only noaux_tc"),
            (v2, json!({"scoring_func": "sigmoid"}), "scoring_func"),
            (v3, json!({"scoring_func": "softmax"}), "scoring_func"),
            (v2, json!({"n_group": 2}), "n_group = 2"),
            (v2, json!({"routed_scaling_factor": 16.0}), "routed_scaling_factor = 16.0"),
            (v2, json!({"norm_topk_prob": true}), "norm_topk_prob = true"),
            (v3, json!({"attention_bias": true}), "attention_bias = true"),
            (v2, json!({"mlp_bias": true}), "mlp_bias = true"),
            (v3, json!({"moe_layer_freq": 2}), "moe_layer_freq = 2"),
            (v3, json!({"num_key_value_heads": 2}), "num_key_value_heads = 2"),
            (v3, json!({"v_head_dim": 11}), "v_head_dim = 11 (at most the 10"),
            (v3, json!({"qk_rope_head_dim": 3}), "qk_rope_head_dim: 3: rope needs"),
            (v3, json!({"q_lora_rank": "absent"}), "q_lora_rank: missing"),
            (v3, json!({"kv_lora_rank": "absent"}), "kv_lora_rank: missing"),
            (v3, json!({"n_group": "absent"}), "n_group: missing"),
            (v3, json!({"routed_scaling_factor": null}), "routed_scaling_factor"),
            (v3, json!({"qk_nope_head_dim": 1 << 24}), "num_attention_heads: 4 heads"),
            (v3, json!({"rope_scaling": {"type": "ntk"}}), "rope_scaling.type"),
            (v3, json!({"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}), "rope_scaling.factor"),
            (v3, json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ] {
            let refused = read(architecture, more.clone()).unwrap_err().to_string();
            assert!(refused.contains(cause), "{more}: {refused}");
        }
        assert!(
            read(v2, json!({"topk_method": "greedy", "scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": false})).is_ok()
        );
    }
}
