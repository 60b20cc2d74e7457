//! The differences between the supported families, as one table.

pub(super) mod delta;
mod gemma;
pub(super) mod latent;
mod text_parts;

use super::layer_shape::{Act, NormKind, QkSpan};
use super::text_part::TextPart;
use std::fmt;

/// A family of decoders, given by its row of the table.
#[derive(Clone, Copy)]
pub struct Family(&'static FamilySpec);

/// Presence of a component in a family's layers: fixed, or a key of `config.json` with its default.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Presence {
    Never,
    Always,
    Key(&'static str, bool),
}

/// Layers with a sliding window.
#[derive(Debug)]
pub(crate) enum WindowRule {
    Never,
    /// All layers, when `sliding_window` is set; the value is the default of a missing key.
    All(Option<usize>),
    /// All layers, when this key is true; the value is the default of a missing `sliding_window`.
    AllIf(&'static str, usize),
    /// The layers named in `layer_types`.
    ByType(TypeRule),
}

/// Defaults when `config.json` has no `layer_types`.
#[derive(Debug)]
pub(crate) struct TypeRule {
    /// Whether layers slide only if `use_sliding_window` is true.
    pub(crate) switch: bool,
    /// Sliding layers when `layer_types` is missing.
    pub(crate) missing_types: Pattern,
    /// The window when `sliding_window` is missing; `None`: an error.
    pub(crate) missing_window: Option<usize>,
}

/// Layers selected by index.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pattern {
    /// Layers from the index in this key on.
    From(&'static str),
    /// All layers except the n-th, 2n-th and so on; `sliding_window_pattern` may override n.
    NotEvery(usize),
    /// Every other layer, the first one included, before the index in this key.
    EveryOtherBefore(&'static str),
    /// Layers without rotation, with the interval of [`Rotates::NotEvery`].
    WithoutRope(usize),
}

/// Layers that rotate queries and keys.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rotates {
    /// No layers: positions are learned.
    Never,
    All,
    /// Layers marked with 1 in `no_rope_layers`; if that is missing, all layers except the n-th, 2n-th and so on.
    NotEvery(usize),
    /// All layers; layers with a sliding window have a separate rotation.
    ByType(LocalRope),
}

/// Base of the frequencies of layers with a sliding window, when the file has no rotation for them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalRope {
    /// A key with the base.
    pub(crate) key: Option<&'static str>,
    /// The base when the key is missing, too.
    pub(crate) theta: f64,
}

/// Meaning of a missing key of `config.json`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Missing {
    /// An error: the default of `transformers` fits one model only.
    Refuse,
    /// Derived from the other sizes.
    Derive,
}

/// Source of the factor on attention's scores.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ScaleRule {
    /// `head_dim^-1/2`.
    HeadDim,
    /// 1, in the layers of Gemma 4.
    One,
    /// `head_dim^-1/2`, or 1 if this key is false.
    Unless(&'static str),
    /// The value of this key, or 1.
    Key(&'static str),
    /// The value of this key, or its default, to the power of -1/2.
    Root(&'static str, f64),
}

/// Defaults of `attn_logit_softcapping` and `final_logit_softcapping`; `null` in the file means none.
#[derive(Debug)]
pub(crate) struct Softcaps {
    pub(crate) scores: Option<f64>,
    pub(crate) logits: Option<f64>,
}

/// Keys of factors with the default 1.
#[derive(Debug)]
pub(crate) struct Multipliers {
    /// Factor on embeddings.
    pub(crate) embed: &'static str,
    /// Factor on branches that are added to the residual stream.
    pub(crate) residual: &'static str,
    /// Divisor of logits.
    pub(crate) logits: &'static str,
}

/// The keys of sizes in `config.json`.
#[derive(Debug)]
pub(crate) struct SizeKeys {
    pub channels: &'static str,
    pub layers: &'static str,
    pub heads: &'static str,
    /// `None`: one key head for each query head.
    pub(crate) kv_heads: Option<&'static str>,
    /// `None`: channels divided by heads.
    pub(crate) head_dim: Option<&'static str>,
    pub(crate) ffn: &'static str,
    pub(crate) max_positions: &'static str,
    pub eps: &'static str,
    pub(crate) activation: &'static str,
}

/// Names of a family's tensors in Hugging Face files. Linear layers listed together form one fused tensor here.
#[derive(Debug)]
pub(crate) struct Names {
    pub prefix: &'static str,
    /// The output matrix, which has no prefix in common with the other tensors.
    pub(crate) head: &'static str,
    pub wte: &'static str,
    pub layers: &'static str,
    pub(crate) final_norm: &'static str,
    /// Norm before attention.
    pub(crate) attn_norm: Option<&'static str>,
    /// Norm after attention.
    pub(crate) post_attn_norm: Option<&'static str>,
    pub qkv: &'static [&'static str],
    pub(crate) attn_out: &'static str,
    /// Norm before the MLP.
    pub(crate) mlp_norm: Option<&'static str>,
    /// Norm after the MLP.
    pub(crate) post_mlp_norm: Option<&'static str>,
    pub(crate) mlp_in: &'static [&'static str],
    pub(crate) mlp_out: &'static str,
    /// Whether linear weights are stored as `[in, out]`.
    pub transposed: bool,
}

/// Tensor names of a family's experts.
#[derive(Debug)]
pub(crate) struct MoeNames {
    pub(crate) router: &'static str,
    pub(crate) experts: &'static str,
    pub(crate) files: ExpertFiles,
    pub(crate) shared: Option<SharedNames>,
}

/// Tensor names of a layer's shared expert.
#[derive(Debug)]
pub(crate) struct SharedNames {
    /// Path of its three matrices.
    pub(crate) path: &'static str,
    /// Its gate, if it has one.
    pub(crate) gate: Option<&'static str>,
}

/// Storage of a layer's experts in files.
#[derive(Debug)]
pub(crate) enum ExpertFiles {
    /// One tensor for each matrix of each numbered expert: gate, up and down projection.
    Each([&'static str; 3]),
    /// One tensor for all first matrices and one for all second matrices.
    Stacked([&'static str; 2], Orientation),
}

/// Orientation of the matrices in a stacked tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Orientation {
    /// `[experts, out, in]`.
    Plain,
    /// `[experts, in, out]`.
    Transposed,
    /// `[experts, out, in]` or `[experts, in, out]`; the shape of the tensor decides.
    ByShape,
}

/// Layers with experts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ExpertLayers {
    All,
    /// Every n-th layer, except listed ones.
    ByStep,
    /// The layers from the index in this key on; the value is the default.
    From(&'static str, usize),
    /// The layers named `sparse` in `mlp_layer_types`; all layers but the first if that is missing.
    ByType,
    /// All layers if this key is true, otherwise none.
    If(&'static str),
}

/// Source of the width of a shared expert.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SharedWidth {
    Key(&'static str),
    /// The width of an expert, times the number in this key.
    Times(&'static str),
}

/// Properties of a family's layers with experts.
#[derive(Debug)]
pub(crate) struct MoeSpec {
    pub names: MoeNames,
    /// The key of an expert's width.
    pub(crate) width: &'static str,
    /// Whether the weights of a token sum to 1.
    pub(crate) renormalised: Presence,
    pub(crate) layers: ExpertLayers,
    /// Whether scores are sigmoids with a correction, chosen by groups.
    pub(crate) sigmoid: bool,
    /// Source of the shared expert's width, if layers have one.
    pub(crate) shared: Option<SharedWidth>,
    /// Whether router and experts have biases, and gate and up projection are interleaved and clamped.
    pub(crate) is_gpt_oss: bool,
}

/// All properties of one family.
#[derive(Debug)]
pub(crate) struct FamilySpec {
    pub(crate) architecture: &'static str,
    pub keys: &'static SizeKeys,
    pub names: &'static Names,
    pub(crate) norm: NormKind,
    /// Whether norms multiply by their weight plus one.
    pub(crate) plus_one: bool,
    pub(crate) act: Act,
    pub(crate) qkv_bias: Presence,
    pub(crate) out_bias: Presence,
    pub(crate) mlp_bias: Presence,
    pub qk_norm: Option<QkSpan>,
    /// Whether queries and keys are normalised, where the family has such norms.
    pub(crate) has_qk_norm: Presence,
    pub tied: bool,
    pub(crate) kv_heads: Missing,
    pub(crate) head_dim: Missing,
    /// Default width of the MLP in multiples of the channels; `None`: a missing key is an error.
    pub(crate) ffn_ratio: Option<usize>,
    pub window: WindowRule,
    pub(crate) rotates: Rotates,
    /// Base of the frequencies when `rope_theta` is missing.
    pub(crate) rope_theta: f64,
    /// Whether the file must specify the rotation, because `transformers` has no plain default.
    pub(crate) names_rope: bool,
    /// Whether queries at positions beyond the original context have a factor, as in Llama 4.
    pub(crate) scales_queries: bool,
    /// Default of `partial_rotary_factor`; `None`: only 1 is supported.
    pub(crate) partial_rotary: Option<f64>,
    pub(crate) scale: ScaleRule,
    pub(crate) multipliers: Option<Multipliers>,
    /// Whether embeddings are multiplied by the square root of the channels, rounded to the format of the weights.
    pub(crate) root_embed_scale: bool,
    pub(crate) softcaps: Option<Softcaps>,
    /// Whether adjacent channels rotate as a pair.
    pub(crate) interleaved: bool,
    /// Whether attention has sinks.
    pub(crate) sinks: bool,
    pub(crate) moe: Option<MoeSpec>,
    /// Storage of the gated delta rule that some layers have, if attention of all other layers has a gate, as in Qwen3.5.
    pub(crate) delta: Option<delta::DeltaFiles>,
    /// How files hold this decoder as the text part of a multimodal model; `None`: the model is text only.
    pub(crate) text_part: Option<TextPart>,
}

impl FamilySpec {
    /// Whether layers are those of Gemma 4: full attention has heads of its own, values are normalised, and each layer ends with a factor.
    pub(crate) fn is_gemma4(&self) -> bool {
        matches!(self.scale, ScaleRule::One)
    }
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

const STARCODER2_KEYS: SizeKeys = SizeKeys { eps: "norm_epsilon", ..LLAMA_KEYS };

const LLAMA_NAMES: Names = Names {
    prefix: "model.",
    head: "lm_head.weight",
    wte: "embed_tokens",
    layers: "layers",
    final_norm: "norm",
    attn_norm: Some("input_layernorm"),
    post_attn_norm: None,
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    attn_out: "self_attn.o_proj",
    mlp_norm: Some("post_attention_layernorm"),
    post_mlp_norm: None,
    mlp_in: &["mlp.gate_proj", "mlp.up_proj"],
    mlp_out: "mlp.down_proj",
    transposed: false,
};

const PHI3_NAMES: Names = Names { qkv: &["self_attn.qkv_proj"], mlp_in: &["mlp.gate_up_proj"], ..LLAMA_NAMES };

const STARCODER2_NAMES: Names = Names { mlp_in: &["mlp.c_fc"], mlp_out: "mlp.c_proj", ..LLAMA_NAMES };

/// Norms come after attention and MLP only.
const OLMO_NAMES: Names = Names {
    attn_norm: None,
    post_attn_norm: Some("post_attention_layernorm"),
    mlp_norm: None,
    post_mlp_norm: Some("post_feedforward_layernorm"),
    ..LLAMA_NAMES
};

const GLM4_NAMES: Names = Names {
    post_attn_norm: Some("post_self_attn_layernorm"),
    post_mlp_norm: Some("post_mlp_layernorm"),
    mlp_in: &["mlp.gate_up_proj"],
    ..LLAMA_NAMES
};

const GPT2_NAMES: Names = Names {
    prefix: "transformer.",
    head: "lm_head.weight",
    wte: "wte",
    layers: "h",
    final_norm: "ln_f",
    attn_norm: Some("ln_1"),
    post_attn_norm: None,
    qkv: &["attn.c_attn"],
    attn_out: "attn.c_proj",
    mlp_norm: Some("ln_2"),
    post_mlp_norm: None,
    mlp_in: &["mlp.c_fc"],
    mlp_out: "mlp.c_proj",
    transposed: true,
};

const QWEN_TYPES: TypeRule = TypeRule { switch: true, missing_types: Pattern::From("max_window_layers"), missing_window: None };
const LLAMA_EXPERTS: MoeNames =
    MoeNames { router: "mlp.gate", experts: "mlp.experts", files: ExpertFiles::Each(["gate_proj", "up_proj", "down_proj"]), shared: None };
const GATED_EXPERT: SharedNames = SharedNames { path: "mlp.shared_expert", gate: Some("mlp.shared_expert_gate") };
const STACKED: [&str; 2] = ["gate_up_proj", "down_proj"];

const LLAMA: FamilySpec = FamilySpec {
    architecture: "LlamaForCausalLM",
    keys: &LLAMA_KEYS,
    names: &LLAMA_NAMES,
    norm: NormKind::Rms,
    plus_one: false,
    act: Act::Swiglu,
    qkv_bias: Presence::Key("attention_bias", false),
    out_bias: Presence::Key("attention_bias", false),
    mlp_bias: Presence::Key("mlp_bias", false),
    qk_norm: None,
    has_qk_norm: Presence::Always,
    tied: false,
    kv_heads: Missing::Derive,
    head_dim: Missing::Derive,
    ffn_ratio: None,
    window: WindowRule::Never,
    rotates: Rotates::All,
    rope_theta: 10_000.0,
    names_rope: false,
    scales_queries: false,
    partial_rotary: None,
    scale: ScaleRule::HeadDim,
    multipliers: None,
    root_embed_scale: false,
    softcaps: None,
    interleaved: false,
    sinks: false,
    moe: None,
    delta: None,
    text_part: None,
};

const MISTRAL: FamilySpec = FamilySpec {
    architecture: "MistralForCausalLM",
    qkv_bias: Presence::Never,
    out_bias: Presence::Never,
    mlp_bias: Presence::Never,
    kv_heads: Missing::Refuse,
    window: WindowRule::All(Some(4096)),
    ..LLAMA
};

const MINISTRAL3: FamilySpec = FamilySpec {
    architecture: "Ministral3ForCausalLM",
    head_dim: Missing::Refuse,
    window: WindowRule::All(None),
    rope_theta: 1_000_000.0,
    names_rope: true,
    scales_queries: true,
    ..MISTRAL
};

const QWEN2: FamilySpec = FamilySpec {
    architecture: "Qwen2ForCausalLM",
    qkv_bias: Presence::Always,
    out_bias: Presence::Never,
    mlp_bias: Presence::Never,
    kv_heads: Missing::Refuse,
    window: WindowRule::ByType(QWEN_TYPES),
    ..LLAMA
};

const QWEN3: FamilySpec = FamilySpec {
    architecture: "Qwen3ForCausalLM",
    mlp_bias: Presence::Never,
    qk_norm: Some(QkSpan::Head),
    kv_heads: Missing::Refuse,
    head_dim: Missing::Refuse,
    window: WindowRule::ByType(QWEN_TYPES),
    ..LLAMA
};

const OLMO2: FamilySpec =
    FamilySpec { architecture: "Olmo2ForCausalLM", names: &OLMO_NAMES, mlp_bias: Presence::Never, qk_norm: Some(QkSpan::Whole), ..LLAMA };

const GLM4_MOE: FamilySpec = FamilySpec {
    architecture: "Glm4MoeForCausalLM",
    out_bias: Presence::Never,
    mlp_bias: Presence::Never,
    qk_norm: Some(QkSpan::Head),
    has_qk_norm: Presence::Key("use_qk_norm", false),
    kv_heads: Missing::Refuse,
    partial_rotary: Some(0.5),
    moe: Some(MoeSpec {
        names: MoeNames { shared: Some(SharedNames { path: "mlp.shared_experts", gate: None }), ..LLAMA_EXPERTS },
        width: "moe_intermediate_size",
        renormalised: Presence::Key("norm_topk_prob", true),
        layers: ExpertLayers::From("first_k_dense_replace", 1),
        sigmoid: true,
        shared: Some(SharedWidth::Times("n_shared_experts")),
        is_gpt_oss: false,
    }),
    ..LLAMA
};

const QWEN3_MOE: FamilySpec = FamilySpec {
    architecture: "Qwen3MoeForCausalLM",
    mlp_bias: Presence::Never,
    qk_norm: Some(QkSpan::Head),
    kv_heads: Missing::Refuse,
    window: WindowRule::AllIf("use_sliding_window", 4096),
    moe: Some(MoeSpec {
        names: LLAMA_EXPERTS,
        width: "moe_intermediate_size",
        renormalised: Presence::Key("norm_topk_prob", false),
        layers: ExpertLayers::ByStep,
        sigmoid: false,
        shared: None,
        is_gpt_oss: false,
    }),
    ..LLAMA
};

static FAMILIES: &[FamilySpec] = &[
    FamilySpec {
        architecture: "GPT2LMHeadModel",
        keys: &GPT2_KEYS,
        names: &GPT2_NAMES,
        norm: NormKind::Layer,
        act: Act::GeluTanh,
        rotates: Rotates::Never,
        qkv_bias: Presence::Always,
        out_bias: Presence::Always,
        mlp_bias: Presence::Always,
        tied: true,
        ffn_ratio: Some(4),
        scale: ScaleRule::Unless("scale_attn_weights"),
        ..LLAMA
    },
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    delta::QWEN35,
    FamilySpec {
        architecture: "Phi3ForCausalLM",
        names: &PHI3_NAMES,
        qkv_bias: Presence::Never,
        out_bias: Presence::Never,
        mlp_bias: Presence::Never,
        window: WindowRule::All(None),
        partial_rotary: Some(1.0),
        ..LLAMA
    },
    FamilySpec {
        architecture: "SeedOssForCausalLM",
        qkv_bias: Presence::Key("attention_bias", true),
        out_bias: Presence::Key("attention_out_bias", false),
        kv_heads: Missing::Refuse,
        head_dim: Missing::Refuse,
        ..LLAMA
    },
    FamilySpec {
        architecture: "SmolLM3ForCausalLM",
        tied: true,
        kv_heads: Missing::Refuse,
        window: WindowRule::ByType(TypeRule { missing_types: Pattern::WithoutRope(4), ..QWEN_TYPES }),
        rotates: Rotates::NotEvery(4),
        rope_theta: 2_000_000.0,
        ..LLAMA
    },
    FamilySpec {
        architecture: "Starcoder2ForCausalLM",
        keys: &STARCODER2_KEYS,
        names: &STARCODER2_NAMES,
        norm: NormKind::Layer,
        act: Act::GeluTanh,
        qkv_bias: Presence::Key("use_bias", true),
        out_bias: Presence::Key("use_bias", true),
        mlp_bias: Presence::Key("use_bias", true),
        tied: true,
        kv_heads: Missing::Refuse,
        window: WindowRule::All(None),
        ..LLAMA
    },
    FamilySpec {
        architecture: "GraniteForCausalLM",
        scale: ScaleRule::Key("attention_multiplier"),
        multipliers: Some(Multipliers { embed: "embedding_multiplier", residual: "residual_multiplier", logits: "logits_scaling" }),
        ..LLAMA
    },
    OLMO2,
    FamilySpec {
        architecture: "Olmo3ForCausalLM",
        window: WindowRule::ByType(TypeRule { switch: false, missing_types: Pattern::NotEvery(4), missing_window: Some(4096) }),
        rotates: Rotates::ByType(LocalRope { key: None, theta: 500_000.0 }),
        rope_theta: 500_000.0,
        ..OLMO2
    },
    FamilySpec {
        architecture: "Glm4ForCausalLM",
        names: &GLM4_NAMES,
        qkv_bias: Presence::Key("attention_bias", true),
        out_bias: Presence::Never,
        mlp_bias: Presence::Never,
        kv_heads: Missing::Refuse,
        head_dim: Missing::Refuse,
        partial_rotary: Some(0.5),
        interleaved: true,
        ..LLAMA
    },
    gemma::GEMMA2,
    gemma::GEMMA3,
    gemma::GEMMA4,
    GLM4_MOE,
    latent::GLM4_MOE_LITE,
    latent::DEEPSEEK_V2,
    latent::DEEPSEEK_V3,
    FamilySpec {
        architecture: "Dots1ForCausalLM",
        out_bias: Presence::Key("attention_bias", false),
        has_qk_norm: Presence::Always,
        window: WindowRule::ByType(TypeRule { switch: false, missing_types: Pattern::From("max_window_layers"), missing_window: None }),
        partial_rotary: None,
        ..GLM4_MOE
    },
    FamilySpec {
        architecture: "Qwen2MoeForCausalLM",
        qkv_bias: Presence::Key("qkv_bias", true),
        out_bias: Presence::Never,
        mlp_bias: Presence::Never,
        kv_heads: Missing::Refuse,
        window: WindowRule::ByType(TypeRule {
            switch: true,
            missing_types: Pattern::EveryOtherBefore("max_window_layers"),
            missing_window: Some(4096),
        }),
        moe: Some(MoeSpec {
            names: MoeNames { shared: Some(GATED_EXPERT), ..LLAMA_EXPERTS },
            width: "moe_intermediate_size",
            renormalised: Presence::Key("norm_topk_prob", false),
            layers: ExpertLayers::ByStep,
            sigmoid: false,
            shared: Some(SharedWidth::Key("shared_expert_intermediate_size")),
            is_gpt_oss: false,
        }),
        ..LLAMA
    },
    QWEN3_MOE,
    delta::QWEN35_MOE,
    delta::QWEN3_NEXT,
    FamilySpec {
        architecture: "OlmoeForCausalLM",
        mlp_bias: Presence::Never,
        qk_norm: Some(QkSpan::Whole),
        moe: Some(MoeSpec {
            names: LLAMA_EXPERTS,
            width: "intermediate_size",
            renormalised: Presence::Key("norm_topk_prob", false),
            layers: ExpertLayers::All,
            sigmoid: false,
            shared: None,
            is_gpt_oss: false,
        }),
        ..LLAMA
    },
    FamilySpec {
        architecture: "MixtralForCausalLM",
        qkv_bias: Presence::Never,
        out_bias: Presence::Never,
        mlp_bias: Presence::Never,
        kv_heads: Missing::Refuse,
        window: WindowRule::All(None),
        rope_theta: 1_000_000.0,
        moe: Some(MoeSpec {
            names: MoeNames {
                router: "block_sparse_moe.gate",
                experts: "block_sparse_moe.experts",
                files: ExpertFiles::Each(["w1", "w3", "w2"]),
                shared: None,
            },
            width: "intermediate_size",
            renormalised: Presence::Always,
            layers: ExpertLayers::All,
            sigmoid: false,
            shared: None,
            is_gpt_oss: false,
        }),
        ..LLAMA
    },
    FamilySpec {
        architecture: "GptOssForCausalLM",
        qkv_bias: Presence::Key("attention_bias", true),
        out_bias: Presence::Key("attention_bias", true),
        mlp_bias: Presence::Never,
        kv_heads: Missing::Refuse,
        head_dim: Missing::Refuse,
        window: WindowRule::ByType(TypeRule { switch: false, missing_types: Pattern::NotEvery(2), missing_window: Some(128) }),
        rope_theta: 150_000.0,
        names_rope: true,
        sinks: true,
        moe: Some(MoeSpec {
            names: MoeNames {
                router: "mlp.router",
                experts: "mlp.experts",
                files: ExpertFiles::Stacked(STACKED, Orientation::Transposed),
                shared: None,
            },
            width: "intermediate_size",
            renormalised: Presence::Always,
            layers: ExpertLayers::All,
            sigmoid: false,
            shared: None,
            is_gpt_oss: true,
        }),
        ..LLAMA
    },
];

/// Unsupported families that users may try, with the missing feature.
const INEXPRESSIBLE: &[(&str, &str)] = &[
    ("CohereForCausalLM", "attention and MLP side by side"),
    ("Cohere2ForCausalLM", "attention and MLP side by side"),
    ("PhiForCausalLM", "attention and MLP side by side"),
    ("FalconForCausalLM", "attention and MLP side by side"),
    ("GPTNeoXForCausalLM", "attention and MLP side by side"),
    ("Llama4ForCausalLM", "chunked attention and scaled queries"),
    ("Llama4ForConditionalGeneration", "chunked attention and scaled queries"),
    ("JambaForCausalLM", "state space layers"),
];

impl Family {
    /// The `architectures` entry of this family's `config.json`.
    pub(crate) fn architecture(self) -> &'static str {
        self.0.architecture
    }

    pub(crate) fn spec(self) -> &'static FamilySpec {
        self.0
    }

    pub(crate) fn find(architecture: &str) -> Option<Self> {
        FAMILIES.iter().chain(&text_parts::ROWS).find(|spec| spec.architecture == architecture).map(Self)
    }

    /// The row of the decoder that the text part's `model_type` names; this row, if no other one of the architecture has this type.
    pub(crate) fn with_decoder(self, model_type: &str) -> Self {
        let is_named = |spec: &&FamilySpec| {
            let part = spec.text_part.as_ref().filter(|_| spec.architecture == self.architecture());
            part.is_some_and(|part| part.model_types.contains(&model_type))
        };
        text_parts::OTHER_DECODERS.iter().find(is_named).map_or(self, Self)
    }

    /// The values of `model_type` of the text parts that this architecture may have.
    pub(crate) fn decoders(self) -> impl Iterator<Item = &'static str> {
        let rows = text_parts::ROWS.iter().chain(&text_parts::OTHER_DECODERS).filter(move |spec| spec.architecture == self.architecture());
        rows.filter_map(|spec| spec.text_part.as_ref()).flat_map(|part| part.model_types.iter().copied())
    }

    /// The missing feature for `architecture`, if it is a known unsupported family.
    pub(crate) fn lacking(architecture: &str) -> Option<&'static str> {
        INEXPRESSIBLE.iter().find(|(name, _)| *name == architecture).map(|(_, lacking)| *lacking)
    }

    /// How files hold this decoder as the text part of a multimodal model, if they do.
    pub(crate) fn text_part(self) -> Option<&'static TextPart> {
        self.0.text_part.as_ref()
    }

    /// All supported architectures.
    pub(crate) fn architectures() -> impl Iterator<Item = &'static str> {
        FAMILIES.iter().chain(&text_parts::ROWS).map(|spec| spec.architecture)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.architecture() == other.architecture()
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.architecture())
    }
}
