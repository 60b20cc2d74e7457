//! Files of multimodal models: where their text parts lie, and what is carried.

use super::carried::CarriedTensors;
use super::load::ModelWeights;
use crate::error::Result;
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use crate::model_dir::{CONFIG, SINGLE};
use ::safetensors::SafeTensors;
use ::safetensors::tensor::{Dtype, TensorView, serialize};
use std::fs;
use std::path::{Path, PathBuf};

const MODELS: [&str; 10] = [
    "gemma3_vision",
    "mistral3_vision",
    "ministral3_vision",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_vl_moe_4_57",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
];

type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The weights of the golden model `name` after a change to its tensors.
fn changed(name: &str, change: impl FnOnce(&mut Vec<Tensor>)) -> Result<Vec<f32>> {
    let dir = tempfile::tempdir().unwrap();
    let bytes = fs::read(golden(name).join(SINGLE)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<Tensor> = file.iter().map(|(n, t)| (n.into(), t.dtype(), t.shape().into(), t.data().into())).collect();
    tensors.sort();
    change(&mut tensors);
    let views = tensors.iter().map(|(n, dtype, shape, data)| (n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(dir.path().join(SINGLE), serialize(views, None).unwrap()).unwrap();
    let weights = ModelWeights::open(dir.path(), &ModelShape::read(&golden(name).join(CONFIG))?)?;
    let mut flat = vec![0.0; TensorTable::new(weights.shape()).flat_elems()];
    weights.read(|start, block| {
        flat[start..start + block.len()].copy_from_slice(block);
        Ok(())
    })?;
    let out = dir.path().join("carried");
    let mut written = Vec::new();
    weights.write_carried(|piece| {
        written.extend_from_slice(piece);
        Ok(())
    })?;
    fs::write(&out, written).unwrap();
    CarriedTensors::open(&out).map(|_| flat)
}

fn is_of_tower(name: &str) -> bool {
    ["visual.", "vision_tower.", "multi_modal_projector.", "mtp."].iter().any(|begin| name.trim_start_matches("model.").starts_with(begin))
}

/// `name` without the prefix of its layout.
fn stripped(name: &str) -> &str {
    let begins = ["language_model.model.", "model.language_model.", "language_model.", "model."];
    begins.iter().find_map(|begin| name.strip_prefix(begin)).unwrap_or(name)
}

#[track_caller]
fn assert_error<T>(result: Result<T>, parts: &[&str]) {
    let message = result.err().expect("accepted").to_string();
    assert!(parts.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{message}");
}

#[test]
fn every_layout_of_the_text_part_gives_the_same_weights() {
    for name in MODELS {
        let plain = changed(name, |_| ()).unwrap();
        for (prefix, head) in [("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", "")] {
            let renamed = changed(name, |tensors| {
                for tensor in tensors.iter_mut().filter(|tensor| !is_of_tower(&tensor.0)) {
                    let rest = stripped(&tensor.0);
                    tensor.0 = if rest == "lm_head.weight" { format!("{head}{rest}") } else { format!("{prefix}{rest}") };
                }
            });
            assert!(renamed.unwrap() == plain, "{name} {prefix}");
        }
        let alone = changed(name, |tensors| tensors.retain(|tensor| !is_of_tower(&tensor.0)));
        assert!(alone.unwrap() == plain, "{name}: a save of the text part alone");
        let moved = changed(name, |tensors| {
            for tensor in tensors.iter_mut().filter(|tensor| is_of_tower(&tensor.0)) {
                tensor.0 = tensor.0.strip_prefix("model.").map_or_else(|| format!("model.{}", tensor.0), String::from);
            }
        });
        assert!(moved.unwrap() == plain, "{name}: the tower under the other layout's names");
    }
}

#[test]
fn files_in_which_the_text_part_is_not_clear_are_refused() {
    for name in MODELS {
        let second = changed(name, |tensors| {
            let own = tensors.iter().find(|tensor| tensor.0.ends_with("embed_tokens.weight")).unwrap().clone();
            let other = if own.0.starts_with("language_model.") { "model." } else { "language_model.model." };
            tensors.push((format!("{other}embed_tokens.weight"), own.1, own.2, own.3));
        });
        assert_error(second, &["two token embeddings, ", "language_model.model.embed_tokens.weight"]);
        let none = changed(name, |tensors| tensors.retain(|tensor| !tensor.0.ends_with("embed_tokens.weight")));
        assert_error(none, &["no token embedding of the text part; looked for ", "model.language_model.embed_tokens.weight"]);
        let extra = changed(name, |tensors| tensors.push(("audio_tower.x".into(), Dtype::F32, vec![1], vec![0; 4])));
        assert_error(extra, &["1 tensors that the model does not have: \"audio_tower.x\""]);
        let missing = changed(name, |tensors| tensors.retain(|tensor| !tensor.0.ends_with("layers.1.input_layernorm.weight")));
        assert_error(missing, &["1 tensors are missing", "layers.1.input_layernorm.weight"]);
    }
    let integers = changed("qwen2_5_vl", |tensors| tensors.iter_mut().filter(|t| is_of_tower(&t.0)).for_each(|t| t.1 = Dtype::I32));
    assert!(integers.is_ok(), "carried tensors may have any format");
}

#[test]
fn a_tie_follows_the_tensors() {
    let config = |name: &str| ModelShape::read(&golden(name).join(CONFIG)).unwrap();
    let open = |name: &str| ModelWeights::open(&golden(name), &config(name)).unwrap();
    assert!(config("mistral3_vision").tied && !open("mistral3_vision").shape().tied, "both tensors differ");
    let note = open("mistral3_vision").note().unwrap();
    assert!(note.contains("config.json ties language_model.lm_head.weight to the token embedding"), "{note}");
    for (name, tied) in [("gemma3_vision", true), ("qwen2_vl", true), ("qwen2_5_vl", false), ("qwen3_vl", true)] {
        assert_eq!((open(name).shape().tied, open(name).note()), (tied, None), "{name}");
    }
    // A copy of the embedding under the head's name is the tie itself.
    let equal = changed("qwen3_vl", |tensors| {
        let own = tensors.iter().find(|tensor| tensor.0.ends_with("embed_tokens.weight")).unwrap().clone();
        tensors.push(("lm_head.weight".into(), own.1, own.2, own.3));
    });
    assert!(equal.unwrap() == changed("qwen3_vl", |_| ()).unwrap());
    let tied = changed("mistral3_vision", |tensors| tensors.retain(|tensor| !tensor.0.ends_with("lm_head.weight")));
    assert!(tied.is_ok(), "without the head the class's default ties");
}

#[test]
fn companions_of_other_input_than_text_go_along_with_multimodal_models_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(golden("qwen3_vl").join(CONFIG), dir.path().join(CONFIG)).unwrap();
    let media = [
        "processor_config.json",
        "video_preprocessor_config.json",
        "chat_template.json",
        "tekken.json",
        "params.json",
        "configuration.json",
    ];
    for name in media {
        fs::write(dir.path().join(name), "{}").unwrap();
    }
    let names = |family: &str| {
        let family = crate::model::family::Family::find(family).unwrap();
        super::model_files(dir.path(), family).unwrap().into_iter().map(|(name, _)| name).collect::<Vec<_>>()
    };
    let all = names("Qwen3VLForConditionalGeneration");
    assert!(media.iter().all(|name| all.iter().any(|found| found == name)) && all.len() == 7, "{all:?}");
    assert_eq!(names("Qwen3ForCausalLM"), [CONFIG, "chat_template.json"]);
}

#[test]
fn experts_in_either_orientation_give_the_same_weights() {
    let [plain, transposed] = ["qwen3_vl_moe", "qwen3_vl_moe_4_57"].map(|name| changed(name, |_| ()).unwrap());
    assert!(plain == transposed);
    let one = changed("qwen3_vl_moe", |tensors| {
        let down = tensors.iter_mut().find(|tensor| tensor.0.ends_with("layers.2.mlp.experts.down_proj")).unwrap();
        let values: &[f32] = bytemuck::cast_slice(&down.3);
        let turned: Vec<f32> = (0..8 * 12 * 32).map(|i| values[i / 384 * 384 + i % 32 * 12 + i / 32 % 12]).collect();
        (down.2, down.3) = (vec![8, 12, 32], bytemuck::cast_slice(&turned).to_vec());
    });
    assert!(one.unwrap() == plain, "each tensor has its own orientation");
    let neither = changed("qwen3_vl_moe", |tensors| {
        tensors.iter_mut().filter(|tensor| tensor.0.ends_with("gate_up_proj")).for_each(|tensor| tensor.2 = vec![8, 16, 48]);
    });
    assert_error(neither, &["layers.2.mlp.experts.gate_up_proj has shape [8, 16, 48], config.json implies [8, 24, 32]"]);
}

/// An error of the weights of Qwen3-VL-MoE with experts of this width; every weight is 0.
fn of_width(width: usize) -> Result<ModelWeights> {
    let config = fs::read_to_string(golden("qwen3_vl_moe").join(CONFIG)).unwrap();
    let config = config.replace("\"moe_intermediate_size\": 12", &format!("\"moe_intermediate_size\": {width}"));
    let (dir, shape) = (tempfile::tempdir().unwrap(), ModelShape::parse(&config, Path::new(CONFIG))?);
    let table = TensorTable::new(&shape);
    let parts = table.specs().iter().flat_map(|spec| spec.parts().map(move |part| (spec.part_shape(&part), part.name)));
    let tensors: Vec<_> = parts.map(|(shape, name)| (name, vec![0u8; 4 * shape.iter().product::<usize>()], shape)).collect();
    let views = tensors.iter().map(|(name, data, shape)| (name, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    fs::write(dir.path().join(SINGLE), serialize(views, None).unwrap()).unwrap();
    ModelWeights::open(dir.path(), &shape)
}

#[test]
fn square_experts_are_refused_by_name() {
    for (width, tensor, shape) in [(16, "gate_up_proj", "[8, 32, 32]"), (32, "down_proj", "[8, 32, 32]")] {
        let words = [&format!("mlp.experts.{tensor} has square matrices, {shape}"), "cannot be decided"];
        assert_error(of_width(width), &words);
    }
    assert!(of_width(15).is_ok());
}
