//! Layers with experts and the router's rule, from `config.json`.

use super::check_activation;
use super::keys::{Keys, SIZE_MAX};
use crate::device::{EXPERTS_MAX, ExpertActivation, RouterRule, SigmoidRule};
use crate::error::Result;
use crate::model::family::{ExpertLayers, FamilySpec, MoeSpec, SharedWidth};
use crate::model::layer_shape::{Act, Ffn, Mlp, Moe, SharedExpertShape};
use serde_json::Value;

/// Maximum experts of all layers together, because each has its own tensor names in the files.
const ALL_EXPERTS_MAX: usize = 1 << 16;

/// The MLP of every layer; `dense` reads the MLP of a layer without experts.
pub(super) fn mlps(keys: &Keys, spec: &FamilySpec, layers: usize, dense: impl Fn() -> Result<Ffn>) -> Result<Vec<Mlp>> {
    let Some(moe_spec) = &spec.moe else { return Ok(vec![Mlp::Dense(dense()?); layers]) };
    let sparse = sparse_layers(keys, moe_spec, layers)?;
    if !sparse.contains(&true) {
        return Ok(vec![Mlp::Dense(dense()?); layers]);
    }
    let mlp = Mlp::Moe(moe(keys, spec, moe_spec, sparse.iter().filter(|sparse| **sparse).count())?);
    let dense = if sparse.contains(&false) { Mlp::Dense(dense()?) } else { mlp };
    Ok(sparse.into_iter().map(|sparse| if sparse { mlp } else { dense }).collect())
}

fn moe(keys: &Keys, spec: &FamilySpec, moe_spec: &MoeSpec, layers: usize) -> Result<Moe> {
    refuse_unsupported(keys, moe_spec)?;
    check_activation(keys, spec)?;
    let names = ["num_experts", "n_routed_experts"];
    let missing = if spec.is_gemma4() { names[0] } else { "num_local_experts" };
    let key = names.into_iter().find(|key| keys.get(key).is_some()).unwrap_or(missing);
    let experts = keys.count(key, EXPERTS_MAX)?;
    if experts * layers > ALL_EXPERTS_MAX {
        return Err(keys.bad(key, format_args!("{experts} in each of {layers} layers are more than {ALL_EXPERTS_MAX}")));
    }
    let top_k_key = if spec.is_gemma4() { "top_k_experts" } else { "num_experts_per_tok" };
    let top_k = keys.count(top_k_key, SIZE_MAX)?;
    if top_k > experts {
        return Err(keys.bad(top_k_key, format_args!("{top_k} of {experts} experts")));
    }
    let biased = moe_spec.is_gpt_oss;
    let ffn = Ffn { width: keys.count(moe_spec.width, SIZE_MAX)?, act: spec.act, bias: biased };
    let rule = match (moe_spec.sigmoid, keys.rule(moe_spec.renormalised)?) {
        (true, renormalised) => RouterRule::Sigmoid(sigmoid(keys, (experts, top_k), renormalised)?),
        (false, true) => RouterRule::Chosen,
        (false, false) => RouterRule::All,
    };
    let activation = match spec.act {
        _ if moe_spec.is_gpt_oss => clamped(keys)?,
        Act::Geglu => ExpertActivation::Geglu,
        Act::Swiglu | Act::GeluTanh => ExpertActivation::Swiglu,
    };
    let shared = moe_spec.shared.map_or(Ok(None), |width| shared(keys, moe_spec, width, ffn.width))?;
    let (corrected, own_norms) = (moe_spec.sigmoid, spec.is_gemma4());
    Ok(Moe { experts, top_k, ffn, activation, rule, router_bias: biased, corrected, shared, own_norms })
}

/// The choice by groups of experts, and the weights.
fn sigmoid(keys: &Keys, (experts, top_k): (usize, usize), renormalised: bool) -> Result<SigmoidRule> {
    let groups = keys.count_or("n_group", 1, SigmoidRule::GROUPS_MAX)?;
    let top_groups = keys.count_or("topk_group", 1, groups)?;
    let scale = keys.number("routed_scaling_factor", Some(1.0), 1e-6, 1e6)? as f32;
    let rule = SigmoidRule { groups, top_groups, renormalised, scale };
    if rule.allows(experts, top_k) {
        return Ok(rule);
    }
    Err(keys.bad("n_group", format_args!("{groups} groups of {experts} experts, of which {top_groups} give {top_k} experts to a token")))
}

fn shared(keys: &Keys, moe_spec: &MoeSpec, width: SharedWidth, of_expert: usize) -> Result<Option<SharedExpertShape>> {
    let width = match width {
        SharedWidth::Key(key) => keys.count(key, SIZE_MAX)?,
        SharedWidth::Times(key) => {
            let width = of_expert.saturating_mul(keys.count(key, SIZE_MAX)?);
            if width > SIZE_MAX {
                return Err(keys.bad(key, format_args!("shared experts of {width} columns are wider than {SIZE_MAX}")));
            }
            width
        }
    };
    let gated = moe_spec.names.shared.as_ref().is_some_and(|names| names.gate.is_some());
    Ok(Some(SharedExpertShape { width, gated }))
}

fn clamped(keys: &Keys) -> Result<ExpertActivation> {
    let alpha = keys.number("swiglu_alpha", Some(1.702), 0.0, 1e3)? as f32;
    Ok(ExpertActivation::Clamped { alpha, limit: keys.number("swiglu_limit", Some(7.0), 1e-3, 1e6)? as f32 })
}

/// Rejects options that would change the arithmetic of a router.
fn refuse_unsupported(keys: &Keys, spec: &MoeSpec) -> Result<()> {
    let jitter = keys.get("router_jitter_noise").filter(|value| value.as_f64() != Some(0.0));
    let groups = keys.get("n_group").filter(|value| !spec.sigmoid && value.as_u64() != Some(1));
    let clip = keys.get("clip_qkv");
    let found = [("router_jitter_noise", jitter), ("n_group", groups), ("clip_qkv", clip)];
    if let Some((key, value)) = found.into_iter().find_map(|(key, value)| Some((key, value?))) {
        return Err(keys.unsupported(key, value, "not supported by this program"));
    }
    match keys.flag("output_router_logits", false)? {
        false => Ok(()),
        true => Err(keys.unsupported(
            "output_router_logits",
            &Value::from(true),
            "set it to false, and add the loss with --router-aux-loss-coef",
        )),
    }
}

/// Whether each layer has experts.
fn sparse_layers(keys: &Keys, spec: &MoeSpec, layers: usize) -> Result<Vec<bool>> {
    match spec.layers {
        ExpertLayers::All => Ok(vec![true; layers]),
        ExpertLayers::ByStep => layers_by_step(keys, layers),
        ExpertLayers::ByType => layers_by_type(keys, layers),
        ExpertLayers::If(key) => Ok(vec![keys.flag(key, false)?; layers]),
        ExpertLayers::From(key, default) => {
            let first = if keys.get(key).is_some() { keys.whole(key)? } else { default };
            if first >= layers {
                return Err(keys.bad(key, "no layer has experts"));
            }
            Ok((0..layers).map(|layer| layer >= first).collect())
        }
    }
}

/// The layers named `sparse`, or all but the first.
fn layers_by_type(keys: &Keys, layers: usize) -> Result<Vec<bool>> {
    let (key, dense) = ("mlp_layer_types", "first_k_dense_replace");
    let sparse: Vec<bool> = match (keys.get(key), keys.get(dense)) {
        (None, Some(first)) if first.as_u64() != Some(1) => {
            return Err(keys.unsupported(dense, first, "only 1 is supported without mlp_layer_types"));
        }
        (None, _) => (0..layers).map(|layer| layer > 0).collect(),
        (Some(types), _) => {
            let types = types.as_array().filter(|types| types.len() == layers);
            let types = types.ok_or_else(|| keys.bad(key, format_args!("expected a list of {layers} layer types")))?;
            let is_sparse = |kind: &Value| match kind.as_str() {
                Some("dense") => Ok(false),
                Some("sparse") => Ok(true),
                _ => Err(keys.unsupported(key, kind, "known: dense, sparse")),
            };
            types.iter().map(is_sparse).collect::<Result<_>>()?
        }
    };
    if sparse.contains(&true) { Ok(sparse) } else { Err(keys.bad(key, "no layer has experts")) }
}

/// Every n-th layer except the listed ones.
fn layers_by_step(keys: &Keys, layers: usize) -> Result<Vec<bool>> {
    let step = keys.count_or("decoder_sparse_step", 1, SIZE_MAX)?;
    let mut sparse: Vec<bool> = (0..layers).map(|layer| (layer + 1).is_multiple_of(step)).collect();
    let expected = "a list of layers";
    let none = Value::Array(Vec::new());
    let named = keys.get("mlp_only_layers").unwrap_or(&none);
    for layer in named.as_array().ok_or_else(|| keys.wrong("mlp_only_layers", named, expected))? {
        let index = layer.as_u64().and_then(|layer| usize::try_from(layer).ok());
        let index = index.ok_or_else(|| keys.wrong("mlp_only_layers", named, expected))?;
        // transformers ignores indices of layers that the model does not have.
        for sparse in sparse.iter_mut().skip(index).take(1) {
            *sparse = false;
        }
    }
    if !sparse.contains(&true) {
        return Err(keys.bad("decoder_sparse_step", "no layer has experts"));
    }
    Ok(sparse)
}
