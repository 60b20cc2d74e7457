//! Families with latent attention.

use super::{ExpertLayers, FamilySpec, LLAMA, LLAMA_EXPERTS, MoeNames, MoeSpec, Presence, SharedNames, SharedWidth};

/// Keys of files with latent attention.
#[derive(Debug)]
pub(crate) struct LatentSpec {
    /// Whether adjacent channels rotate as a pair.
    pub(crate) interleaved: Presence,
    /// The supported `scoring_func` of routers.
    pub(crate) scoring: &'static str,
    /// The supported `topk_method` of routers.
    pub(crate) choice: &'static str,
}

const MOE: MoeSpec = MoeSpec {
    names: MoeNames { shared: Some(SharedNames { path: "mlp.shared_experts", gate: None }), ..LLAMA_EXPERTS },
    width: "moe_intermediate_size",
    renormalised: Presence::Key("norm_topk_prob", true),
    layers: ExpertLayers::From("first_k_dense_replace", 3),
    sigmoid: true,
    shared: Some(SharedWidth::Times("n_shared_experts")),
    is_gpt_oss: false,
};

pub(super) const DEEPSEEK_V3: FamilySpec = FamilySpec {
    architecture: "DeepseekV3ForCausalLM",
    qkv_bias: Presence::Never,
    out_bias: Presence::Never,
    mlp_bias: Presence::Never,
    moe: Some(MOE),
    ..LLAMA
};

pub(super) const DEEPSEEK_V2: FamilySpec = FamilySpec {
    architecture: "DeepseekV2ForCausalLM",
    moe: Some(MoeSpec { renormalised: Presence::Never, layers: ExpertLayers::From("first_k_dense_replace", 0), sigmoid: false, ..MOE }),
    ..DEEPSEEK_V3
};

pub(super) const GLM4_MOE_LITE: FamilySpec =
    FamilySpec { architecture: "Glm4MoeLiteForCausalLM", moe: Some(MoeSpec { layers: ExpertLayers::ByType, ..MOE }), ..DEEPSEEK_V3 };

impl FamilySpec {
    /// The keys of a family with latent attention.
    pub(crate) fn latent(&self) -> Option<LatentSpec> {
        let is = |family: &Self| self.architecture == family.architecture;
        let of_v3 = LatentSpec { interleaved: Presence::Key("rope_interleave", true), scoring: "sigmoid", choice: "noaux_tc" };
        if is(&DEEPSEEK_V2) {
            return Some(LatentSpec { interleaved: Presence::Always, scoring: "softmax", choice: "greedy" });
        }
        (is(&DEEPSEEK_V3) || is(&GLM4_MOE_LITE)).then_some(of_v3)
    }
}
