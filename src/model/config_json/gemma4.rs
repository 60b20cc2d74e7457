//! Layers of Gemma 4, from `config.json`.

use super::keys::{Keys, SIZE_MAX};
use crate::error::Result;
use crate::model::family::FamilySpec;
use crate::model::layer_shape::{Attn, Values};
use serde_json::{Map, Value};

/// Channels of a head of full attention, if the file does not say so.
const FULL_HEAD_DIM: usize = 512;
/// Heads of each layer by its index, as `transformers` saves them since 5.24.
const BY_LAYER: &str = "per_layer_config";
const BY_LAYER_WITHIN: &str = "per_layer_config.";
/// Keys of [`BY_LAYER`], in this order.
const OF_LAYER: [&str; 2] = ["head_dim", "num_key_value_heads"];

/// Attention of each layer; `slides` marks those with a window. Families other than Gemma 4 have `attn` in all layers.
pub(super) fn attention(keys: &Keys, spec: &FamilySpec, attn: Attn, slides: &[bool]) -> Result<Vec<Attn>> {
    if !spec.is_gemma4() {
        return Ok(vec![attn; slides.len()]);
    }
    refuse_unsupported(keys)?;
    let shares = keys.flag("attention_k_eq_v", false)?;
    let sizes = match keys.object(BY_LAYER)? {
        Some(map) => by_layer(&Keys { map, within: BY_LAYER_WITHIN, ..*keys }, attn, slides.len())?,
        None => by_type(keys, attn, shares, slides)?,
    };
    let layer = |([head_dim, kv_heads], slides): ([usize; 2], &bool)| {
        if !attn.heads.is_multiple_of(kv_heads) {
            return Err(keys.bad("num_attention_heads", format_args!("{kv_heads} key heads of a layer do not divide {}", attn.heads)));
        }
        if attn.heads * head_dim > SIZE_MAX {
            let cause = format_args!("{} heads of {head_dim} channels are more than {SIZE_MAX} channels", attn.heads);
            return Err(keys.bad("num_attention_heads", cause));
        }
        let values = if shares && !slides { Values::NormedKeys } else { Values::Normed };
        Ok(Attn { head_dim, kv_heads, values, ..attn })
    };
    let layers: Vec<Attn> = sizes.into_iter().zip(slides).map(layer).collect::<Result<_>>()?;
    let first = |slid: bool| layers.iter().zip(slides).find(|(_, slides)| **slides == slid).map(|(attn, _)| attn.head_dim);
    match layers.iter().zip(slides).find(|(attn, slides)| first(**slides) != Some(attn.head_dim)) {
        None => Ok(layers),
        Some((attn, _)) => Err(keys.bad(BY_LAYER, format_args!("heads of {} channels beside others in layers of one type", attn.head_dim))),
    }
}

/// Channels of a head and number of key heads: those of full attention have keys of their own.
fn by_type(keys: &Keys, attn: Attn, shares: bool, slides: &[bool]) -> Result<Vec<[usize; 2]>> {
    let head_dim = keys.count_or("global_head_dim", FULL_HEAD_DIM, SIZE_MAX)?;
    let kv_heads = if shares { keys.count_or("num_global_key_value_heads", attn.kv_heads, SIZE_MAX)? } else { attn.kv_heads };
    Ok(slides.iter().map(|slides| if *slides { [attn.head_dim, attn.kv_heads] } else { [head_dim, kv_heads] }).collect())
}

/// Channels of a head and number of key heads of each layer, where the file lists layers that differ from the common keys.
fn by_layer(listed: &Keys, attn: Attn, layers: usize) -> Result<Vec<[usize; 2]>> {
    let mut sizes = vec![[attn.head_dim, attn.kv_heads]; layers];
    for (key, value) in listed.map {
        let layer = key.parse().ok().filter(|layer: &usize| *layer < layers);
        let layer = layer.ok_or_else(|| listed.bad(key, format_args!("expected the index of one of {layers} layers")))?;
        let Value::Object(map) = value else { return Err(listed.wrong(key, value, "an object")) };
        sizes[layer] = of_layer(&Keys { map, ..*listed }, map, sizes[layer])?;
    }
    Ok(sizes)
}

fn of_layer(keys: &Keys, map: &Map<String, Value>, [head_dim, kv_heads]: [usize; 2]) -> Result<[usize; 2]> {
    if let Some((key, value)) = map.iter().find(|(key, _)| !OF_LAYER.contains(&key.as_str())) {
        return Err(keys.unsupported(key, value, "known: head_dim, num_key_value_heads"));
    }
    Ok([keys.count_or(OF_LAYER[0], head_dim, SIZE_MAX)?, keys.count_or(OF_LAYER[1], kv_heads, SIZE_MAX)?])
}

/// Refuses the parts of E2B and E4B, by key.
fn refuse_unsupported(keys: &Keys) -> Result<()> {
    let on = |key: &str| keys.get(key).filter(|value| **value != false && **value != 0);
    let every_layer = Value::from(256);
    let per_layer = match keys.map.get("hidden_size_per_layer_input") {
        // The class of `transformers` has such embeddings by default.
        None => Some(&every_layer),
        Some(_) => on("hidden_size_per_layer_input"),
    };
    let found = [
        (
            "num_kv_shared_layers",
            on("num_kv_shared_layers"),
            "layers that read the keys and values of other layers are not supported (E2B, E4B)",
        ),
        (
            "hidden_size_per_layer_input",
            per_layer,
            "an embedding for each layer is not supported (E2B, E4B); a file of another model has 0",
        ),
    ];
    match found.into_iter().find_map(|(key, value, note)| Some((key, value?, note))) {
        None => Ok(()),
        Some((key, value, note)) => Err(keys.unsupported(key, value, note)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{ExpertActivation, RouterRule};
    use crate::model::layer_shape::{Act, Ffn, Mlp, Moe, SharedExpertShape};
    use crate::model::shape::{ModelShape, RopeScaling};
    use serde_json::json;
    use std::path::Path;

    /// The shape of a model with three layers, the last of full attention, and with these keys.
    fn read(more: Value) -> Result<ModelShape> {
        let mut config = json!({
            "architectures": ["Gemma4ForCausalLM"], "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
            "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default"},
            },
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config.as_object_mut().unwrap().retain(|_, value| *value != "absent");
        ModelShape::parse(&config.to_string(), Path::new("config.json"))
    }

    fn heads(shape: &ModelShape) -> Vec<(usize, usize, Values)> {
        shape.layers.iter().map(|layer| (layer.attn.head_dim, layer.attn.kv_heads, layer.attn.values)).collect()
    }

    #[test]
    fn full_attention_has_heads_of_its_own_by_either_spelling() {
        use Values::{Normed, NormedKeys};
        let plain = read(json!({})).unwrap();
        assert_eq!(heads(&plain), [(6, 2, Normed), (512, 2, Normed), (512, 2, Normed)], "the last layer is full");
        let shares = json!({"attention_k_eq_v": true, "global_head_dim": 16, "num_global_key_value_heads": 1});
        let shared = read(shares).unwrap();
        assert_eq!(heads(&shared), [(6, 2, Normed), (16, 1, NormedKeys), (16, 1, NormedKeys)]);
        // Keys of their own count only where they are values.
        assert_eq!(heads(&read(json!({"num_global_key_value_heads": 1})).unwrap()), heads(&plain));
        let full = json!({"head_dim": 16, "num_key_value_heads": 1});
        let listed =
            read(json!({"attention_k_eq_v": true, "per_layer_config": {"1": full, "2": full}, "num_global_key_value_heads": null}));
        assert_eq!(heads(&listed.unwrap()), heads(&shared));
        let rotations: Vec<_> = shared.ropes.iter().map(|rope| (rope.rotary_dim, rope.scaling.clone(), rope.theta)).collect();
        assert_eq!(rotations, [(16, RopeScaling::Proportional { pairs: 2 }, 1e6), (6, RopeScaling::Default, 1e4)]);
        assert!(shared.layers.iter().all(|layer| layer.scaled && layer.attn.scale == 1.0 && !layer.norm.plus_one));
    }

    #[test]
    fn parts_of_other_models_are_refused_by_key() {
        for (more, key) in [
            (json!({"hidden_size_per_layer_input": 256}), "hidden_size_per_layer_input = 256"),
            (json!({"hidden_size_per_layer_input": "absent"}), "hidden_size_per_layer_input = 256"),
            (json!({"num_kv_shared_layers": 2}), "num_kv_shared_layers = 2"),
            (json!({"enable_moe_block": true}), "num_experts"),
            (json!({"enable_moe_block": true, "num_experts": 8}), "top_k_experts"),
            (json!({"enable_moe_block": true, "num_experts": 8, "top_k_experts": 9}), "top_k_experts: 9 of 8 experts"),
            (json!({"enable_moe_block": true, "num_experts": 8, "top_k_experts": 2}), "moe_intermediate_size"),
            (json!({"enable_moe_block": 1}), "enable_moe_block"),
            (json!({"use_bidirectional_attention": "all"}), "use_bidirectional_attention"),
            (json!({"per_layer_config": {"1": {"head_dim": 16, "rope": 1}}}), "per_layer_config.rope = 1"),
            (json!({"per_layer_config": {"3": {"head_dim": 16}}}), "per_layer_config.3: expected the index of one of 3 layers"),
            (json!({"per_layer_config": {"1": 16}}), "per_layer_config.1"),
            (json!({"per_layer_config": {"1": {"head_dim": 16}}}), "per_layer_config: heads of 6 channels beside others"),
            (json!({"attention_k_eq_v": true, "num_global_key_value_heads": 3}), "num_attention_heads: 3 key heads"),
            (json!({"global_head_dim": 1_000_000_000}), "global_head_dim"),
            (json!({"rope_parameters": "absent"}), "rope_scaling"),
        ] {
            let refused = read(more.clone()).unwrap_err().to_string();
            assert!(refused.contains(key), "{more}: {refused}");
        }
        assert!(read(json!({"use_bidirectional_attention": "vision", "num_experts": 8})).is_ok());
    }
    /// A file of transformers has the keys of experts also where `enable_moe_block` is false.
    #[test]
    fn experts_lie_beside_an_mlp_in_every_layer_or_in_none() {
        let keys = json!({"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 12});
        let dense = read(keys.clone()).unwrap();
        assert!(dense.layers.iter().all(|layer| layer.mlp == Mlp::Dense(Ffn { width: 40, act: Act::Geglu, bias: false })));
        let mut on = keys;
        on["enable_moe_block"] = json!(true);
        let expected = Moe {
            experts: 8,
            top_k: 3,
            ffn: Ffn { width: 12, act: Act::Geglu, bias: false },
            activation: ExpertActivation::Geglu,
            rule: RouterRule::Chosen,
            router_bias: false,
            corrected: false,
            shared: Some(SharedExpertShape { width: 40, gated: false }),
            own_norms: true,
        };
        assert!(read(on).unwrap().layers.iter().all(|layer| layer.mlp == Mlp::Moe(expected)));
    }
}
