//! Families of Gemma.

use super::{
    ExpertFiles, ExpertLayers, FamilySpec, LLAMA, LLAMA_KEYS, LLAMA_NAMES, LocalRope, Missing, MoeNames, MoeSpec, Names, Orientation,
    Pattern, Presence, Rotates, STACKED, ScaleRule, SharedNames, SharedWidth, SizeKeys, Softcaps, TypeRule, WindowRule,
};
use crate::model::layer_shape::{Act, QkSpan};

const GEMMA_KEYS: SizeKeys = SizeKeys { activation: "hidden_activation", ..LLAMA_KEYS };

pub(super) const GEMMA_NAMES: Names = Names {
    post_attn_norm: Some("post_attention_layernorm"),
    mlp_norm: Some("pre_feedforward_layernorm"),
    post_mlp_norm: Some("post_feedforward_layernorm"),
    ..LLAMA_NAMES
};

pub(super) const GEMMA2: FamilySpec = FamilySpec {
    architecture: "Gemma2ForCausalLM",
    keys: &GEMMA_KEYS,
    names: &GEMMA_NAMES,
    plus_one: true,
    act: Act::Geglu,
    mlp_bias: Presence::Never,
    tied: true,
    kv_heads: Missing::Refuse,
    head_dim: Missing::Refuse,
    window: WindowRule::ByType(TypeRule { switch: false, missing_types: Pattern::NotEvery(2), missing_window: Some(4096) }),
    scale: ScaleRule::Root("query_pre_attn_scalar", 256.0),
    root_embed_scale: true,
    softcaps: Some(Softcaps { scores: Some(50.0), logits: Some(30.0) }),
    ..LLAMA
};

pub(super) const GEMMA3: FamilySpec = FamilySpec {
    architecture: "Gemma3ForCausalLM",
    qk_norm: Some(QkSpan::Head),
    window: WindowRule::ByType(TypeRule { switch: false, missing_types: Pattern::NotEvery(6), missing_window: Some(4096) }),
    rotates: Rotates::ByType(LocalRope { key: Some("rope_local_base_freq"), theta: 10_000.0 }),
    rope_theta: 1_000_000.0,
    softcaps: Some(Softcaps { scores: None, logits: None }),
    ..GEMMA2
};

pub(super) const GEMMA4: FamilySpec = FamilySpec {
    architecture: "Gemma4ForCausalLM",
    plus_one: false,
    window: WindowRule::ByType(TypeRule { switch: false, missing_types: Pattern::NotEvery(6), missing_window: Some(512) }),
    rotates: Rotates::ByType(LocalRope { key: None, theta: 10_000.0 }),
    names_rope: true,
    scale: ScaleRule::One,
    moe: Some(MoeSpec {
        // The MLP beside the experts has the names of an MLP.
        names: MoeNames {
            router: "router.proj",
            experts: "experts",
            files: ExpertFiles::Stacked(STACKED, Orientation::Plain),
            shared: Some(SharedNames { path: "mlp", gate: None }),
        },
        width: "moe_intermediate_size",
        renormalised: Presence::Always,
        layers: ExpertLayers::If("enable_moe_block"),
        sigmoid: false,
        shared: Some(SharedWidth::Key("intermediate_size")),
        is_gpt_oss: false,
    }),
    ..GEMMA3
};
