//! Families with gated delta rules.

use super::{ExpertLayers, FamilySpec, GATED_EXPERT, LLAMA_EXPERTS, MoeNames, MoeSpec, Presence, QWEN3, SharedWidth, WindowRule};

/// Storage of a gated delta rule's projections in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeltaFiles {
    /// One tensor each for queries, keys and values, for the gate, for the decay and for the strength.
    Apart,
    /// One tensor for queries, keys, values and the gate, one for strength and decay; their rows alternate by head of keys.
    ByHead,
}

/// Experts with a shared expert that has a gate, in each layer.
pub(super) const GATED_MOE: MoeSpec = MoeSpec {
    names: MoeNames { shared: Some(GATED_EXPERT), ..LLAMA_EXPERTS },
    width: "moe_intermediate_size",
    renormalised: Presence::Always,
    layers: ExpertLayers::All,
    sigmoid: false,
    shared: Some(SharedWidth::Key("shared_expert_intermediate_size")),
    is_gpt_oss: false,
};

pub(super) const QWEN35: FamilySpec = FamilySpec {
    architecture: "Qwen3_5ForCausalLM",
    plus_one: true,
    qkv_bias: Presence::Never,
    out_bias: Presence::Never,
    window: WindowRule::Never,
    partial_rotary: Some(0.25),
    delta: Some(DeltaFiles::Apart),
    ..QWEN3
};

pub(super) const QWEN35_MOE: FamilySpec = FamilySpec { architecture: "Qwen3_5MoeForCausalLM", moe: Some(GATED_MOE), ..QWEN35 };

pub(super) const QWEN3_NEXT: FamilySpec = FamilySpec {
    architecture: "Qwen3NextForCausalLM",
    delta: Some(DeltaFiles::ByHead),
    moe: Some(MoeSpec { renormalised: Presence::Key("norm_topk_prob", true), layers: ExpertLayers::ByStep, ..GATED_MOE }),
    ..QWEN35
};
