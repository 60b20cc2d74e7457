//! What tells the supported families apart, as one table.

use super::layer_shape::{Act, NormKind, QkSpan};

/// A family of decoders: how Hugging Face names it and what its layers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `GPT2LMHeadModel`
    Gpt2,
    /// `LlamaForCausalLM`
    Llama,
    /// `MistralForCausalLM`
    Mistral,
    /// `Qwen2ForCausalLM`
    Qwen2,
    /// `Qwen3ForCausalLM`
    Qwen3,
    /// `Phi3ForCausalLM`
    Phi3,
    /// `SeedOssForCausalLM`
    SeedOss,
    /// `Qwen3MoeForCausalLM`
    Qwen3Moe,
    /// `OlmoeForCausalLM`
    Olmoe,
    /// `MixtralForCausalLM`
    Mixtral,
    /// `GptOssForCausalLM`
    GptOss,
}

/// Whether a family's layers have something: fixed, or a key of `config.json` with its default.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Presence {
    Never,
    Always,
    Key(&'static str, bool),
}

/// Which layers see only a sliding window.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WindowRule {
    Never,
    /// All, when `sliding_window` is set; the value is the default of a missing key.
    All(Option<usize>),
    /// All, when this key is true; the value is the default of a missing `sliding_window`.
    AllIf(&'static str, usize),
    /// Those that `layer_types` names, or every other one from the first on; the value is the default of a missing `sliding_window`.
    Alternating(usize),
    /// Those that `layer_types` or `max_window_layers` name, when `use_sliding_window` is true.
    PerLayer,
}

/// What a key of `config.json` means when it is missing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Missing {
    /// An error: `transformers` would take a number that fits no other model.
    Refuse,
    /// Derived from the other sizes.
    Derive,
}

/// Where the factor on attention's scores comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ScaleRule {
    /// `head_dim^-1/2`.
    HeadDim,
    /// The same, or 1 where this key is false.
    Unless(&'static str),
}

/// The keys of `config.json` that hold the sizes.
#[derive(Debug)]
pub(crate) struct SizeKeys {
    pub channels: &'static str,
    pub layers: &'static str,
    pub heads: &'static str,
    /// `None`: as many as query heads.
    pub(crate) kv_heads: Option<&'static str>,
    /// `None`: the heads share the channels.
    pub(crate) head_dim: Option<&'static str>,
    pub(crate) ffn: &'static str,
    pub(crate) max_positions: &'static str,
    pub eps: &'static str,
    pub(crate) activation: &'static str,
}

/// How Hugging Face names a family's tensors. Linear layers listed together are one fused tensor here.
#[derive(Debug)]
pub(crate) struct Names {
    pub prefix: &'static str,
    pub wte: &'static str,
    pub layers: &'static str,
    pub(crate) final_norm: &'static str,
    pub(crate) attn_norm: &'static str,
    pub qkv: &'static [&'static str],
    pub(crate) attn_out: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) mlp_in: &'static [&'static str],
    pub(crate) mlp_out: &'static str,
    /// Linear weights are stored `[in, out]`.
    pub transposed: bool,
}

/// How a family names its experts.
#[derive(Debug)]
pub(crate) struct MoeNames {
    pub(crate) router: &'static str,
    pub(crate) experts: &'static str,
    pub(crate) files: ExpertFiles,
}

/// What files have for the experts of a layer.
#[derive(Debug)]
pub(crate) enum ExpertFiles {
    /// A tensor for each matrix of each expert, by its number: gate, up and down.
    Each([&'static str; 3]),
    /// One for all first and one for all second matrices, `[experts, in, out]`, with biases.
    Stacked([&'static str; 2]),
}

/// What the layers of experts of a family are like.
#[derive(Debug)]
pub(crate) struct MoeSpec {
    pub names: MoeNames,
    /// The key of an expert's width.
    pub(crate) width: &'static str,
    /// A token's weights sum to 1.
    pub(crate) renormalised: Presence,
    /// Some layers may have none.
    pub(crate) mixes_layers: bool,
    /// Router and experts have biases, and gate and up, which lie in turns, are clamped.
    pub(crate) is_gpt_oss: bool,
}

/// Everything that distinguishes one family.
#[derive(Debug)]
pub(crate) struct FamilySpec {
    pub family: Family,
    pub(crate) architecture: &'static str,
    pub keys: &'static SizeKeys,
    pub names: &'static Names,
    pub(crate) norm: NormKind,
    pub(crate) act: Act,
    /// Positions are learned; otherwise queries and keys rotate.
    pub(crate) learned_positions: bool,
    pub(crate) qkv_bias: Presence,
    pub(crate) out_bias: Presence,
    pub(crate) mlp_bias: Presence,
    pub qk_norm: Option<QkSpan>,
    pub tied: bool,
    pub(crate) kv_heads: Missing,
    pub(crate) head_dim: Missing,
    /// Width of the MLP in channels where its key is missing; `None`: an error.
    pub(crate) ffn_ratio: Option<usize>,
    pub window: WindowRule,
    pub(crate) partial_rotary: bool,
    pub(crate) scale: ScaleRule,
    /// Attention has sinks.
    pub(crate) sinks: bool,
    pub(crate) moe: Option<MoeSpec>,
}

const LLAMA_KEYS: SizeKeys = SizeKeys {
    channels: "hidden_size",
    layers: "num_hidden_layers",
    heads: "num_attention_heads",
    kv_heads: Some("num_key_value_heads"),
    head_dim: Some("head_dim"),
    ffn: "intermediate_size",
    max_positions: "max_position_embeddings",
    eps: "rms_norm_eps",
    activation: "hidden_act",
};

const GPT2_KEYS: SizeKeys = SizeKeys {
    channels: "n_embd",
    layers: "n_layer",
    heads: "n_head",
    kv_heads: None,
    head_dim: None,
    ffn: "n_inner",
    max_positions: "n_positions",
    eps: "layer_norm_epsilon",
    activation: "activation_function",
};

const LLAMA_NAMES: Names = Names {
    prefix: "model.",
    wte: "embed_tokens",
    layers: "layers",
    final_norm: "norm",
    attn_norm: "input_layernorm",
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    attn_out: "self_attn.o_proj",
    mlp_norm: "post_attention_layernorm",
    mlp_in: &["mlp.gate_proj", "mlp.up_proj"],
    mlp_out: "mlp.down_proj",
    transposed: false,
};

const PHI3_NAMES: Names = Names { qkv: &["self_attn.qkv_proj"], mlp_in: &["mlp.gate_up_proj"], ..LLAMA_NAMES };

const GPT2_NAMES: Names = Names {
    prefix: "transformer.",
    wte: "wte",
    layers: "h",
    final_norm: "ln_f",
    attn_norm: "ln_1",
    qkv: &["attn.c_attn"],
    attn_out: "attn.c_proj",
    mlp_norm: "ln_2",
    mlp_in: &["mlp.c_fc"],
    mlp_out: "mlp.c_proj",
    transposed: true,
};

const LLAMA_EXPERTS: MoeNames =
    MoeNames { router: "mlp.gate", experts: "mlp.experts", files: ExpertFiles::Each(["gate_proj", "up_proj", "down_proj"]) };

const LLAMA: FamilySpec = FamilySpec {
    family: Family::Llama,
    architecture: "LlamaForCausalLM",
    keys: &LLAMA_KEYS,
    names: &LLAMA_NAMES,
    norm: NormKind::Rms,
    act: Act::Swiglu,
    learned_positions: false,
    qkv_bias: Presence::Key("attention_bias", false),
    out_bias: Presence::Key("attention_bias", false),
    mlp_bias: Presence::Key("mlp_bias", false),
    qk_norm: None,
    tied: false,
    kv_heads: Missing::Derive,
    head_dim: Missing::Derive,
    ffn_ratio: None,
    window: WindowRule::Never,
    partial_rotary: false,
    scale: ScaleRule::HeadDim,
    sinks: false,
    moe: None,
};

static FAMILIES: [FamilySpec; 11] = [
    FamilySpec {
        family: Family::Gpt2,
        architecture: "GPT2LMHeadModel",
        keys: &GPT2_KEYS,
        names: &GPT2_NAMES,
        norm: NormKind::Layer,
        act: Act::GeluTanh,
        learned_positions: true,
        qkv_bias: Presence::Always,
        out_bias: Presence::Always,
        mlp_bias: Presence::Always,
        tied: true,
        ffn_ratio: Some(4),
        scale: ScaleRule::Unless("scale_attn_weights"),
        ..LLAMA
    },
    LLAMA,
    FamilySpec {
        family: Family::Mistral,
        architecture: "MistralForCausalLM",
        qkv_bias: Presence::Never,
        out_bias: Presence::Never,
        mlp_bias: Presence::Never,
        kv_heads: Missing::Refuse,
        window: WindowRule::All(Some(4096)),
        ..LLAMA
    },
    FamilySpec {
        family: Family::Qwen2,
        architecture: "Qwen2ForCausalLM",
        qkv_bias: Presence::Always,
        out_bias: Presence::Never,
        mlp_bias: Presence::Never,
        kv_heads: Missing::Refuse,
        window: WindowRule::PerLayer,
        ..LLAMA
    },
    FamilySpec {
        family: Family::Qwen3,
        architecture: "Qwen3ForCausalLM",
        mlp_bias: Presence::Never,
        qk_norm: Some(QkSpan::Head),
        kv_heads: Missing::Refuse,
        head_dim: Missing::Refuse,
        window: WindowRule::PerLayer,
        ..LLAMA
    },
    FamilySpec {
        family: Family::Phi3,
        architecture: "Phi3ForCausalLM",
        names: &PHI3_NAMES,
        qkv_bias: Presence::Never,
        out_bias: Presence::Never,
        mlp_bias: Presence::Never,
        window: WindowRule::All(None),
        partial_rotary: true,
        ..LLAMA
    },
    FamilySpec {
        family: Family::SeedOss,
        architecture: "SeedOssForCausalLM",
        qkv_bias: Presence::Key("attention_bias", true),
        out_bias: Presence::Key("attention_out_bias", false),
        kv_heads: Missing::Refuse,
        head_dim: Missing::Refuse,
        ..LLAMA
    },
    FamilySpec {
        family: Family::Qwen3Moe,
        architecture: "Qwen3MoeForCausalLM",
        mlp_bias: Presence::Never,
        qk_norm: Some(QkSpan::Head),
        kv_heads: Missing::Refuse,
        head_dim: Missing::Refuse,
        window: WindowRule::AllIf("use_sliding_window", 4096),
        moe: Some(MoeSpec {
            names: LLAMA_EXPERTS,
            width: "moe_intermediate_size",
            renormalised: Presence::Key("norm_topk_prob", false),
            mixes_layers: true,
            is_gpt_oss: false,
        }),
        ..LLAMA
    },
    FamilySpec {
        family: Family::Olmoe,
        architecture: "OlmoeForCausalLM",
        mlp_bias: Presence::Never,
        qk_norm: Some(QkSpan::Whole),
        moe: Some(MoeSpec {
            names: LLAMA_EXPERTS,
            width: "intermediate_size",
            renormalised: Presence::Key("norm_topk_prob", false),
            mixes_layers: false,
            is_gpt_oss: false,
        }),
        ..LLAMA
    },
    FamilySpec {
        family: Family::Mixtral,
        architecture: "MixtralForCausalLM",
        qkv_bias: Presence::Never,
        out_bias: Presence::Never,
        mlp_bias: Presence::Never,
        kv_heads: Missing::Refuse,
        window: WindowRule::All(None),
        moe: Some(MoeSpec {
            names: MoeNames {
                router: "block_sparse_moe.gate",
                experts: "block_sparse_moe.experts",
                files: ExpertFiles::Each(["w1", "w3", "w2"]),
            },
            width: "intermediate_size",
            renormalised: Presence::Always,
            mixes_layers: false,
            is_gpt_oss: false,
        }),
        ..LLAMA
    },
    FamilySpec {
        family: Family::GptOss,
        architecture: "GptOssForCausalLM",
        qkv_bias: Presence::Key("attention_bias", true),
        out_bias: Presence::Key("attention_bias", true),
        mlp_bias: Presence::Never,
        kv_heads: Missing::Refuse,
        head_dim: Missing::Refuse,
        window: WindowRule::Alternating(128),
        sinks: true,
        moe: Some(MoeSpec {
            names: MoeNames {
                router: "mlp.router",
                experts: "mlp.experts",
                files: ExpertFiles::Stacked(["gate_up_proj", "down_proj"]),
            },
            width: "intermediate_size",
            renormalised: Presence::Always,
            mixes_layers: false,
            is_gpt_oss: true,
        }),
        ..LLAMA
    },
];

impl Family {
    /// The `architectures` entry of this family's `config.json`.
    pub(crate) fn architecture(self) -> &'static str {
        self.spec().architecture
    }

    pub(crate) fn spec(self) -> &'static FamilySpec {
        &FAMILIES[self as usize]
    }

    pub(crate) fn find(architecture: &str) -> Option<&'static FamilySpec> {
        FAMILIES.iter().find(|spec| spec.architecture == architecture)
    }

    /// All supported architectures, for messages.
    pub(crate) fn architectures() -> String {
        FAMILIES.iter().map(|spec| spec.architecture).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, spec) in FAMILIES.iter().enumerate() {
            assert_eq!(spec.family as usize, i, "{}", spec.architecture);
            assert_eq!(Family::find(spec.architecture).map(|s| s.family), Some(spec.family));
        }
    }
}
