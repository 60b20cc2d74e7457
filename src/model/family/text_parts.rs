//! Text parts of multimodal models: rows of the table for decoders that files hold beside a tower for images. The tower is carried: it is
//! neither read nor trained, and an export writes it as it was.
//!
//! Text tokens have equal temporal, vertical and horizontal positions. Therefore rotations in sections (`mrope`) are plain rotations for
//! them, in any division of the channels.

use super::delta::{GATED_MOE, QWEN35, QWEN35_MOE};
use super::gemma::{GEMMA_NAMES, GEMMA3, GEMMA4};
use super::{
    ExpertFiles, ExpertLayers, FamilySpec, LLAMA_EXPERTS, LLAMA_NAMES, MINISTRAL3, MISTRAL, MoeNames, MoeSpec, Names, Orientation,
    Presence, QWEN2, QWEN3, QWEN3_MOE, STACKED, WindowRule,
};
use crate::model::text_part::{Layout, TextPart};

const OUTSIDE: Layout = Layout { prefix: "language_model.model.", head: "language_model.lm_head.weight" };
/// The layout that `transformers` 4.52 introduced.
const INSIDE: Layout = Layout { prefix: "model.language_model.", head: "lm_head.weight" };
/// The layout of a save of the text part alone.
const ALONE: Layout = Layout { prefix: "model.", head: "lm_head.weight" };

const OUTSIDE_FIRST: [Layout; 3] = [OUTSIDE, INSIDE, ALONE];
const INSIDE_FIRST: [Layout; 3] = [INSIDE, OUTSIDE, ALONE];
const ALONE_FIRST: [Layout; 3] = [ALONE, INSIDE, OUTSIDE];

const OUTSIDE_NAMES: Names = Names { prefix: OUTSIDE.prefix, head: OUTSIDE.head, ..LLAMA_NAMES };
const OUTSIDE_GEMMA_NAMES: Names = Names { prefix: OUTSIDE.prefix, head: OUTSIDE.head, ..GEMMA_NAMES };
const INSIDE_GEMMA_NAMES: Names = Names { prefix: INSIDE.prefix, head: INSIDE.head, ..GEMMA_NAMES };
const INSIDE_NAMES: Names = Names { prefix: INSIDE.prefix, head: INSIDE.head, ..LLAMA_NAMES };

const TOWER_AND_PROJECTOR: &[&str] = &["vision_tower.", "multi_modal_projector."];
const GEMMA4_TOWERS: &[&str] = &["vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."];
const VISUAL: &[&str] = &["visual."];
/// The tower, and layers that predict further tokens.
const VISUAL_AND_MTP: &[&str] = &["visual.", "mtp."];

const QWEN_MEDIA: &[(&[&str], u32)] = &[
    (&["image_token_id"], 151_655),
    (&["video_token_id"], 151_656),
    (&["vision_start_token_id"], 151_652),
    (&["vision_end_token_id"], 151_653),
];

const QWEN35_MEDIA: &[(&[&str], u32)] = &[
    (&["image_token_id"], 248_056),
    (&["video_token_id"], 248_057),
    (&["vision_start_token_id"], 248_053),
    (&["vision_end_token_id"], 248_054),
];

const QWEN2_VL: TextPart = TextPart {
    may_be_flat: true,
    model_types: &["qwen2_vl_text", "qwen2_vl"],
    defaults: &[
        ("vocab_size", 152_064.0),
        ("hidden_size", 8192.0),
        ("intermediate_size", 29_568.0),
        ("num_hidden_layers", 80.0),
        ("num_attention_heads", 64.0),
        ("num_key_value_heads", 8.0),
        ("max_position_embeddings", 32_768.0),
        ("rms_norm_eps", 1e-5),
        ("sliding_window", 4096.0),
        ("max_window_layers", 80.0),
    ],
    layouts: ALONE_FIRST,
    carried: VISUAL,
    media: QWEN_MEDIA,
};

const MISTRAL3: &str = "Mistral3ForConditionalGeneration";

const MINISTRAL3_PART: TextPart = TextPart {
    may_be_flat: false,
    model_types: &["ministral3"],
    defaults: &[
        ("vocab_size", 131_072.0),
        ("hidden_size", 4096.0),
        ("intermediate_size", 14_336.0),
        ("num_hidden_layers", 34.0),
        ("num_attention_heads", 32.0),
        ("num_key_value_heads", 8.0),
        ("head_dim", 128.0),
        ("max_position_embeddings", 262_144.0),
        ("rms_norm_eps", 1e-5),
    ],
    layouts: OUTSIDE_FIRST,
    carried: TOWER_AND_PROJECTOR,
    media: &[(&["image_token_index", "image_token_id"], 10)],
};

/// Rows for text parts with a `model_type` that the row of the architecture does not have.
pub(super) static OTHER_DECODERS: [FamilySpec; 1] =
    [FamilySpec { architecture: MISTRAL3, names: &OUTSIDE_NAMES, tied: true, text_part: Some(MINISTRAL3_PART), ..MINISTRAL3 }];

pub(super) static ROWS: [FamilySpec; 9] = [
    FamilySpec {
        architecture: "Gemma3ForConditionalGeneration",
        names: &OUTSIDE_GEMMA_NAMES,
        text_part: Some(TextPart {
            may_be_flat: false,
            model_types: &["gemma3_text"],
            defaults: &[
                ("vocab_size", 262_208.0),
                ("hidden_size", 2304.0),
                ("intermediate_size", 9216.0),
                ("num_hidden_layers", 26.0),
                ("num_attention_heads", 8.0),
                ("num_key_value_heads", 4.0),
                ("head_dim", 256.0),
                ("max_position_embeddings", 131_072.0),
                ("rms_norm_eps", 1e-6),
            ],
            layouts: OUTSIDE_FIRST,
            carried: TOWER_AND_PROJECTOR,
            media: &[
                (&["image_token_index", "image_token_id"], 262_144),
                (&["boi_token_index", "boi_token_id"], 255_999),
                (&["eoi_token_index", "eoi_token_id"], 256_000),
            ],
        }),
        ..GEMMA3
    },
    FamilySpec {
        architecture: "Gemma4ForConditionalGeneration",
        names: &INSIDE_GEMMA_NAMES,
        text_part: Some(TextPart {
            may_be_flat: false,
            model_types: &["gemma4_text"],
            defaults: &[
                ("vocab_size", 262_144.0),
                ("hidden_size", 2304.0),
                ("intermediate_size", 9216.0),
                ("num_hidden_layers", 30.0),
                ("num_attention_heads", 8.0),
                ("num_key_value_heads", 4.0),
                ("head_dim", 256.0),
                ("max_position_embeddings", 131_072.0),
                ("rms_norm_eps", 1e-6),
            ],
            layouts: INSIDE_FIRST,
            carried: GEMMA4_TOWERS,
            media: &[
                (&["image_token_id"], 258_880),
                (&["video_token_id"], 258_884),
                (&["audio_token_id"], 258_881),
                (&["boi_token_id"], 255_999),
                (&["eoi_token_id"], 258_882),
                (&["boa_token_id"], 256_000),
                (&["eoa_token_index", "eoa_token_id"], 258_883),
            ],
        }),
        ..GEMMA4
    },
    FamilySpec {
        architecture: MISTRAL3,
        names: &OUTSIDE_NAMES,
        tied: true,
        text_part: Some(TextPart {
            model_types: &["mistral"],
            defaults: &[
                ("vocab_size", 32_000.0),
                ("hidden_size", 4096.0),
                ("intermediate_size", 14_336.0),
                ("num_hidden_layers", 32.0),
                ("num_attention_heads", 32.0),
                ("num_key_value_heads", 8.0),
                ("max_position_embeddings", 131_072.0),
                ("rms_norm_eps", 1e-6),
            ],
            ..MINISTRAL3_PART
        }),
        ..MISTRAL
    },
    FamilySpec { architecture: "Qwen2VLForConditionalGeneration", rope_theta: 1_000_000.0, text_part: Some(QWEN2_VL), ..QWEN2 },
    FamilySpec {
        architecture: "Qwen2_5_VLForConditionalGeneration",
        rope_theta: 1_000_000.0,
        text_part: Some(TextPart { model_types: &["qwen2_5_vl_text", "qwen2_5_vl"], ..QWEN2_VL }),
        ..QWEN2
    },
    FamilySpec {
        architecture: "Qwen3VLForConditionalGeneration",
        names: &INSIDE_NAMES,
        window: WindowRule::Never,
        rope_theta: 500_000.0,
        text_part: Some(TextPart {
            may_be_flat: false,
            model_types: &["qwen3_vl_text"],
            defaults: &[
                ("vocab_size", 151_936.0),
                ("hidden_size", 4096.0),
                ("intermediate_size", 22_016.0),
                ("num_hidden_layers", 32.0),
                ("num_attention_heads", 32.0),
                ("num_key_value_heads", 32.0),
                ("head_dim", 128.0),
                ("max_position_embeddings", 128_000.0),
                ("rms_norm_eps", 1e-6),
            ],
            layouts: INSIDE_FIRST,
            carried: VISUAL,
            media: QWEN_MEDIA,
        }),
        ..QWEN3
    },
    FamilySpec {
        architecture: "Qwen3_5ForConditionalGeneration",
        names: &INSIDE_NAMES,
        text_part: Some(TextPart {
            may_be_flat: false,
            model_types: &["qwen3_5_text"],
            defaults: &[
                ("vocab_size", 248_320.0),
                ("hidden_size", 4096.0),
                ("intermediate_size", 12_288.0),
                ("num_hidden_layers", 32.0),
                ("num_attention_heads", 16.0),
                ("num_key_value_heads", 4.0),
                ("head_dim", 256.0),
                ("max_position_embeddings", 32_768.0),
                ("rms_norm_eps", 1e-6),
            ],
            layouts: INSIDE_FIRST,
            carried: VISUAL_AND_MTP,
            media: QWEN35_MEDIA,
        }),
        ..QWEN35
    },
    FamilySpec {
        architecture: "Qwen3_5MoeForConditionalGeneration",
        names: &INSIDE_NAMES,
        moe: Some(MoeSpec {
            names: MoeNames { files: ExpertFiles::Stacked(STACKED, Orientation::ByShape), ..GATED_MOE.names },
            ..GATED_MOE
        }),
        text_part: Some(TextPart {
            may_be_flat: false,
            model_types: &["qwen3_5_moe_text"],
            defaults: &[
                ("vocab_size", 248_320.0),
                ("hidden_size", 2048.0),
                ("num_hidden_layers", 40.0),
                ("num_attention_heads", 16.0),
                ("num_key_value_heads", 2.0),
                ("head_dim", 256.0),
                ("max_position_embeddings", 32_768.0),
                ("rms_norm_eps", 1e-6),
                ("moe_intermediate_size", 512.0),
                ("shared_expert_intermediate_size", 512.0),
                ("num_experts_per_tok", 8.0),
                // The second name, so that it counts only where the first is missing, too.
                ("num_local_experts", 256.0),
            ],
            layouts: INSIDE_FIRST,
            carried: VISUAL_AND_MTP,
            media: QWEN35_MEDIA,
        }),
        ..QWEN35_MOE
    },
    FamilySpec {
        architecture: "Qwen3VLMoeForConditionalGeneration",
        names: &INSIDE_NAMES,
        window: WindowRule::Never,
        rope_theta: 500_000.0,
        moe: Some(MoeSpec {
            // transformers 4 saved the transposed matrices, and transformers 5 saves the matrices as they are.
            names: MoeNames { files: ExpertFiles::Stacked(STACKED, Orientation::ByShape), ..LLAMA_EXPERTS },
            width: "moe_intermediate_size",
            renormalised: Presence::Always,
            layers: ExpertLayers::ByStep,
            sigmoid: false,
            shared: None,
            is_gpt_oss: false,
        }),
        text_part: Some(TextPart {
            may_be_flat: false,
            model_types: &["qwen3_vl_moe_text"],
            defaults: &[
                ("vocab_size", 151_936.0),
                ("hidden_size", 2048.0),
                ("intermediate_size", 5632.0),
                ("num_hidden_layers", 24.0),
                ("num_attention_heads", 16.0),
                ("num_key_value_heads", 16.0),
                ("max_position_embeddings", 128_000.0),
                ("rms_norm_eps", 1e-6),
                ("moe_intermediate_size", 1408.0),
                ("num_experts_per_tok", 4.0),
                // The second name, so that it counts only where the first is missing, too.
                ("num_local_experts", 60.0),
            ],
            layouts: INSIDE_FIRST,
            carried: VISUAL,
            media: QWEN_MEDIA,
        }),
        ..QWEN3_MOE
    },
];
