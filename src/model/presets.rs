//! Configurations that ship with the program: shapes for benchmarks and comparisons, without weights.

use super::shape::ModelShape;
use super::weights::ModelWeights;
use crate::error::{Error, Result};
use crate::model_dir::{CONFIG, ModelDir};
use std::path::Path;

/// Name and `config.json` of every preset. The sizes are those of the published `google/gemma-2-2b`, `google/gemma-2-9b`,
/// `google/gemma-2-27b`, `google/gemma-3-1b-pt`, `microsoft/phi-4`, `ByteDance-Seed/Seed-OSS-36B-Base`, `meta-llama/Llama-3.1-70B`,
/// `Qwen/Qwen3-VL-8B-Instruct`, `mistralai/Ministral-3-14B-Base-2512`, `mistralai/Mistral-Small-3.1-24B-Base-2503` and
/// `google/gemma-3-27b-pt`; `gemma-4-31b` is `google/gemma-4-31b` and `gemma-4-26b-a4b` is `google/gemma-4-26B-A4B`; the other presets are
/// published under their own names, `qwen3.5-9b` as `Qwen/Qwen3.5-9B` and `qwen3-next-80b-a3b` as `Qwen/Qwen3-Next-80B-A3B-Instruct`. Presets of multimodal models have the text part alone.
pub const PRESETS: [(&str, &str); 32] = [
    ("qwen3-4b", include_str!("presets/qwen3-4b.json")),
    ("llama-8b", include_str!("presets/llama-8b.json")),
    ("qwen3-14b", include_str!("presets/qwen3-14b.json")),
    // The vocabulary is GPT-2's 50257, padded to a multiple of 128, as is usual.
    ("gpt-5b", include_str!("presets/gpt-5b.json")),
    ("olmoe-1b-7b", include_str!("presets/olmoe-1b-7b.json")),
    ("gpt-oss-20b", include_str!("presets/gpt-oss-20b.json")),
    ("gpt-oss-120b", include_str!("presets/gpt-oss-120b.json")),
    ("qwen3-30b-a3b", include_str!("presets/qwen3-30b-a3b.json")),
    ("mixtral-8x7b", include_str!("presets/mixtral-8x7b.json")),
    ("gemma-2-2b", include_str!("presets/gemma-2-2b.json")),
    ("gemma-2-9b", include_str!("presets/gemma-2-9b.json")),
    ("gemma-2-27b", include_str!("presets/gemma-2-27b.json")),
    ("gemma-3-1b", include_str!("presets/gemma-3-1b.json")),
    ("phi-4", include_str!("presets/phi-4.json")),
    ("seed-oss-36b", include_str!("presets/seed-oss-36b.json")),
    ("llama-70b", include_str!("presets/llama-70b.json")),
    ("qwen3-32b", include_str!("presets/qwen3-32b.json")),
    ("qwen3-vl-8b", include_str!("presets/qwen3-vl-8b.json")),
    ("ministral-3-14b", include_str!("presets/ministral-3-14b.json")),
    // The published file says nothing about a tie, and its class has one by default; its weights have an output matrix.
    ("mistral-small-24b", include_str!("presets/mistral-small-24b.json")),
    ("gemma-3-27b", include_str!("presets/gemma-3-27b.json")),
    ("gemma-4-31b", include_str!("presets/gemma-4-31b.json")),
    ("gemma-4-26b-a4b", include_str!("presets/gemma-4-26b-a4b.json")),
    ("qwen3.5-0.8b", include_str!("presets/qwen3.5-0.8b.json")),
    ("qwen3.5-4b", include_str!("presets/qwen3.5-4b.json")),
    ("qwen3.5-9b", include_str!("presets/qwen3.5-9b.json")),
    ("qwen3.5-27b", include_str!("presets/qwen3.5-27b.json")),
    ("qwen3.5-35b-a3b", include_str!("presets/qwen3.5-35b-a3b.json")),
    ("qwen3-next-80b-a3b", include_str!("presets/qwen3-next-80b-a3b.json")),
    ("glm-4.7-flash", include_str!("presets/glm-4.7-flash.json")),
    ("moonlight-16b-a3b", include_str!("presets/moonlight-16b-a3b.json")),
    ("deepseek-v2-lite", include_str!("presets/deepseek-v2-lite.json")),
];

/// Published models with the shape of a preset: their names, and its name.
const SAME_SHAPES: [(&str, &str); 2] = [("qwen3.6-27b", "qwen3.5-27b"), ("qwen3.6-35b-a3b", "qwen3.5-35b-a3b")];

/// Names of the presets, for messages.
pub(crate) fn names() -> String {
    PRESETS.iter().chain(&SAME_SHAPES).map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// The shape of the preset named by `config`, or of the `config.json` or model directory at the path `config`. Messages name --model.
///
/// # Errors
/// `Usage` when `config` is neither; errors of [`ModelDir::file`], [`ModelShape::read`] and [`ModelWeights::decided_tie`].
pub fn shape(config: &Path) -> Result<ModelShape> {
    let listed = |list: &[(&str, &'static str)], name: &Path| list.iter().find(|(known, _)| Path::new(known) == name).map(|(_, of)| *of);
    if let Some(text) = listed(&PRESETS, listed(&SAME_SHAPES, config).map_or(config, Path::new)) {
        return ModelShape::parse(text, config);
    }
    if !config.exists() {
        return Err(Error::usage(format!("--model {}: neither a file nor one of {}", config.display(), names())));
    }
    if !config.is_dir() {
        return ModelShape::read(config);
    }
    let dir = ModelDir::open(config)?;
    ModelWeights::decided_tie(&dir, ModelShape::read(&dir.file(CONFIG)?)?)
}

#[cfg(test)]
mod tests {
    use super::super::tensors::TensorTable;
    use super::*;

    #[test]
    fn every_preset_has_its_models_parameters() {
        let billions = |name: &str| TensorTable::new(&shape(Path::new(name)).unwrap()).params() as f64 / 1e9;
        for (name, expected) in [("qwen3-4b", 4.022), ("llama-8b", 8.030), ("qwen3-14b", 14.77), ("gpt-5b", 5.143)] {
            assert!((billions(name) - expected).abs() < 5e-4 * expected, "{name}: {} B", billions(name));
        }
    }

    /// The parameters of the published files.
    #[test]
    fn dense_presets_have_every_parameter_of_the_published_files() {
        for (name, params) in [
            ("gemma-2-2b", 2_614_341_888),
            ("gemma-2-9b", 9_241_705_984),
            ("gemma-2-27b", 27_227_128_320),
            ("gemma-3-1b", 999_885_952),
            ("phi-4", 14_659_507_200),
            ("seed-oss-36b", 36_151_104_512),
            ("llama-70b", 70_553_706_496),
            ("qwen3-32b", 32_762_123_264),
        ] {
            assert_eq!(TensorTable::new(&shape(Path::new(name)).unwrap()).params(), params, "{name}");
        }
        let (phi, seed) = (shape(Path::new("phi-4")).unwrap(), shape(Path::new("seed-oss-36b")).unwrap());
        assert!(phi.layers.iter().all(|layer| layer.attn.window.is_none() && !layer.attn.qkv_bias));
        assert!(seed.layers.iter().all(|layer| layer.attn.qkv_bias && !layer.attn.out_bias));
        let gemma = shape(Path::new("gemma-2-27b")).unwrap();
        assert_eq!([0, 1].map(|layer| gemma.layers[layer].attn.window), [Some(4096), None]);
        assert_eq!((gemma.layers[0].attn.scale, gemma.logit_softcap), (1.0 / 12.0, Some(30.0)));
        let gemma = shape(Path::new("gemma-3-1b")).unwrap();
        assert_eq!([0, 5].map(|layer| gemma.layers[layer].attn.window), [Some(512), None]);
    }

    /// The parameters of the published files without tower and projector.
    #[test]
    fn presets_of_text_parts_have_every_parameter_of_their_text_models() {
        for (name, params, tied) in [
            ("qwen3-vl-8b", 8_190_735_360, false),
            ("ministral-3-14b", 13_506_073_600, false),
            ("mistral-small-24b", 23_572_403_200, false),
            ("gemma-3-27b", 27_009_346_304, true),
        ] {
            let shape = shape(Path::new(name)).unwrap();
            assert_eq!((TensorTable::new(&shape).params(), shape.tied), (params, tied), "{name}");
            assert!(shape.family.text_part().is_some() && shape.layers.iter().all(|layer| layer.attn.head_dim == 128), "{name}");
        }
        let gemma = shape(Path::new("gemma-3-27b")).unwrap();
        assert_eq!([4, 5].map(|layer| gemma.layers[layer].attn.window), [Some(1024), None]);
        assert_eq!(gemma.layers[0].attn.scale, 168f32.sqrt().recip());
        assert_eq!(shape(Path::new("ministral-3-14b")).unwrap().max_positions, 16_384);
    }

    /// The parameters that transformers counts, and a factor for each layer.
    #[test]
    fn gemma_4_has_its_parameters_and_two_kinds_of_layers() {
        let shape = shape(Path::new("gemma-4-31b")).unwrap();
        assert_eq!(TensorTable::new(&shape).params(), 30_697_345_340);
        let [sliding, full] = [0, 59].map(|layer| shape.layers[layer].attn);
        assert_eq!((sliding.head_dim, sliding.kv_heads, sliding.window), (256, 16, Some(1024)));
        assert_eq!((full.head_dim, full.kv_heads, full.window, full.scale), (512, 4, None, 1.0));
        assert_eq!([sliding, full].map(|attn| attn.rope.map(|rope| shape.ropes[rope].rotary_dim)), [Some(256), Some(512)]);
        assert_eq!((shape.logit_softcap, shape.tied, shape.layers[7].scaled), (Some(30.0), true, true));
    }

    /// The parameters that transformers counts for these configurations.
    #[test]
    fn presets_with_gated_delta_rules_have_their_models_parameters() {
        for (name, params, heads, tied) in [
            ("qwen3.5-0.8b", 752_393_024, 16, true),
            ("qwen3.5-4b", 4_205_751_296, 32, true),
            ("qwen3.5-9b", 8_953_803_264, 32, false),
            ("qwen3.5-27b", 26_895_998_464, 48, false),
        ] {
            let shape = shape(Path::new(name)).unwrap();
            assert_eq!((TensorTable::new(&shape).params(), shape.tied), (params, tied), "{name}");
            let kinds = shape.layers.iter().map(|layer| layer.attn.is_delta());
            assert!(kinds.eq((1..=shape.layers.len()).map(|number| !number.is_multiple_of(4))), "{name}");
            let (delta, attn) = (shape.layers[0].attn, shape.first_attention());
            assert_eq!((delta.heads, delta.kv_heads, delta.head_dim, attn.head_dim), (heads, 16, 128, 256), "{name}");
            assert_eq!((shape.ropes[0].rotary_dim, delta.rope, attn.rope), (64, None, Some(0)), "{name}");
        }
    }

    #[test]
    fn models_with_the_shape_of_a_preset_have_a_name_of_their_own() {
        for (name, preset) in SAME_SHAPES {
            assert_eq!(shape(Path::new(name)).unwrap(), shape(Path::new(preset)).unwrap());
            assert!(names().contains(name));
        }
    }

    /// The parameters that transformers counts for these configurations, and the parameters that a token uses without the embedding.
    #[test]
    fn presets_with_experts_have_their_models_parameters_and_work() {
        for (name, params, taken) in [
            ("olmoe-1b-7b", 6_919_161_856, 1_178_861_568),
            ("gpt-oss-20b", 20_914_757_184, 3_607_142_400),
            ("gpt-oss-120b", 116_829_156_672, 5_131_100_160),
            ("qwen3-30b-a3b", 30_532_122_624, 3_041_656_832),
            ("mixtral-8x7b", 46_702_792_704, 12_748_587_008),
            ("qwen3.5-35b-a3b", 34_660_610_688, 2_945_269_760),
            ("qwen3-next-80b-a3b", 79_674_391_296, 3_562_373_120),
            // With a factor for each layer.
            ("gemma-4-26b-a4b", 25_233_141_790, 3_821_830_144),
            // With corrections of scores in three parts.
            ("glm-4.7-flash", 29_943_390_976 + 3 * 2944, 3_579_314_176),
            ("moonlight-16b-a3b", 15_960_108_544 + 3 * 1664, 2_579_103_744),
            ("deepseek-v2-lite", 15_706_484_224, 2_451_308_544),
        ] {
            let table = TensorTable::new(&shape(Path::new(name)).unwrap());
            assert_eq!((table.params(), table.matmul_params()), (params, taken), "{name}");
        }
    }

    #[test]
    fn a_file_is_read_and_anything_else_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, super::super::shape::DEMO_CONFIG).unwrap();
        assert_eq!(shape(&path).unwrap(), ModelShape::demo());
        let refused = shape(Path::new("llama-9b")).unwrap_err();
        assert!(refused.to_string().starts_with("--model llama-9b: "), "{refused}");
        assert!(refused.exit_code() == 2 && refused.to_string().contains("llama-8b"), "{refused}");
    }
}
