mod config;

use self::config::config;
use super::safetensors::TensorFile;
use super::*;
use crate::checkpoint::export::{Exportable, Options, export, export_checkpoint, parse_shape};
use crate::checkpoint::tests::{TensorSource, save};
use crate::checkpoint::{SavedLossScale, Scheduler, TrainerState, open, verify};
use crate::disk::faults::{self, Mode};
use crate::dtype::{Dtype, Element};
use crate::model::correction;
use crate::model::family::Family;
use crate::model::shape::ModelShape;
use crate::model::tensors::{Module, Role, TensorTable};
use crate::model_dir::{INDEX, SINGLE};
use ::safetensors::SafeTensors;
use ::safetensors::tensor::{Dtype as FileDtype, TensorView, serialize};
use half::{bf16, f16};
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Families whose exports need nothing beside the trained tensors.
fn text_only() -> impl Iterator<Item = &'static str> {
    Family::architectures().filter(|name| Family::find(name).unwrap().text_part().is_none())
}

struct Model {
    shape: ModelShape,
    table: TensorTable,
    files: Vec<(String, Vec<u8>)>,
    flat: Vec<f32>,
}

/// A model of random finite bits below 2, including subnormal ones; padding is 7.
fn model(config: &Value) -> Model {
    let text = config.to_string();
    let shape = ModelShape::parse(&text, Path::new("config.json")).unwrap();
    let (table, mut rng) = (TensorTable::new(&shape), ChaCha8Rng::seed_from_u64(1));
    let mut flat = vec![7.0; table.flat_elems()];
    for spec in table.specs() {
        let mut value = || f32::from_bits(rng.next_u32() & !(1 << 30));
        match spec.parts().find(|part| part.split) {
            None => flat[spec.range()].fill_with(value),
            Some(HfPart { rows, .. }) => {
                for expert in 0..rows {
                    let parts = correction::split(value());
                    parts.iter().zip((spec.offset_elems + expert..).step_by(rows)).for_each(|(part, at)| flat[at] = *part);
                }
            }
        }
    }
    Model { shape, table, files: vec![(CONFIG.into(), text.into()), ("tokenizer.json".into(), b"{}".to_vec())], flat }
}

impl Model {
    fn export(&self, out: &Path, options: Options) -> Result<()> {
        let shape = parse_shape(&out.join(CONFIG), &self.files)?;
        let model = Exportable { files: self.files.clone(), shape, carried: None };
        let read = |spec: &TensorSpec, out: &mut [f32]| {
            out.copy_from_slice(&self.flat[spec.range()]);
            Ok(())
        };
        export(out, &model, options, read).map(drop)
    }

    fn load(&self, dir: &Path) -> Result<Vec<f32>> {
        let mut flat = vec![7.0; self.table.flat_elems()];
        let keep = |start: usize, block: &[f32]| {
            flat[start..start + block.len()].copy_from_slice(block);
            Ok(())
        };
        ModelWeights::open(dir, &self.shape)?.read(keep)?;
        Ok(flat)
    }
}

fn exported(architecture: &str, options: Options) -> (tempfile::TempDir, PathBuf, Model) {
    let (dir, model) = (tempfile::tempdir().unwrap(), model(&config(architecture)));
    let out = dir.path().join("out");
    model.export(&out, options).unwrap();
    (dir, out, model)
}

fn sharded(bytes: u64) -> Options {
    Options { max_shard_bytes: bytes, ..Options::default() }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

type Tensor = (String, FileDtype, Vec<usize>, Vec<u8>);

/// Rewrites `model.safetensors` in `dir` after a change to its tensors.
fn edit(dir: &Path, change: impl FnOnce(&mut Vec<Tensor>)) {
    let bytes = fs::read(dir.join(SINGLE)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<Tensor> = file.iter().map(|(n, t)| (n.into(), t.dtype(), t.shape().into(), t.data().into())).collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(n, dtype, shape, data)| (n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(dir.join(SINGLE), serialize(views, None).unwrap()).unwrap();
}

fn find<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|t| t.0 == name).unwrap()
}

#[track_caller]
fn assert_error<T>(result: Result<T>, parts: &[&str]) {
    let message = result.err().expect("accepted").to_string();
    assert!(parts.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{message}");
}

#[test]
fn every_family_comes_back_to_the_bit_and_exports_to_the_same_files() {
    for architecture in text_only() {
        for options in [Options::default(), sharded(6000)] {
            let (dir, out, model) = exported(architecture, options);
            let back = Model { flat: model.load(&out).unwrap(), ..model };
            assert_eq!(bits(&back.flat), bits(&self::model(&config(architecture)).flat), "{architecture}");
            let again = dir.path().join("again");
            back.export(&again, options).unwrap();
            assert_eq!(names(&again), names(&out));
            for name in names(&out) {
                assert!(fs::read(out.join(&name)).unwrap() == fs::read(again.join(&name)).unwrap(), "{architecture} {name}");
            }
        }
    }
}

#[test]
fn corrections_are_exported_in_fp32_and_layers_of_further_predictions_are_refused_with_a_remedy() {
    let (_dir, out, model) = exported("Glm4MoeForCausalLM", Options { dtype: Some(Dtype::Bfloat16), ..Options::default() });
    let correction = "model.layers.1.mlp.gate.e_score_correction_bias";
    edit(&out, |tensors| {
        assert!(tensors.iter().all(|(name, dtype, ..)| (*dtype == FileDtype::F32) == (name == correction)), "{tensors:?}");
        let one = find(tensors, correction).clone();
        tensors.push(("model.layers.2.enorm.weight".into(), one.1, one.2, one.3));
    });
    assert_error(model.load(&out), &["1 tensors that the model does not have: \"model.layers.2.enorm.weight\"", "save_pretrained"]);
    edit(&out, |tensors| find(tensors, "model.layers.2.enorm.weight").0 = "model.layers.1.enorm.weight".into());
    let message = model.load(&out).unwrap_err().to_string();
    assert!(message.contains("enorm") && !message.contains("save_pretrained"), "{message}");
}

#[test]
fn weights_come_in_blocks_that_cover_every_tensor_once() {
    for architecture in text_only() {
        let (_dir, out, model) = exported(architecture, sharded(6000));
        let mut times = vec![0; model.table.flat_elems()];
        let (mut largest, mut blocks) = (0, 0);
        let count = |start: usize, block: &[f32]| {
            times[start..start + block.len()].iter_mut().for_each(|times| *times += 1);
            (largest, blocks) = (largest.max(block.len()), blocks + 1);
            Ok(())
        };
        ModelWeights::open(&out, &model.shape).unwrap().read(count).unwrap();
        let specs = model.table.specs();
        assert!(specs.iter().all(|spec| times[spec.range()].iter().all(|&times| times == 1)), "{architecture}");
        assert_eq!(times.iter().sum::<i32>() as usize, model.table.params(), "{architecture}: padding is left alone");
        // Transposed tensors are passed in whole rows.
        assert!((73..=100).contains(&largest) && blocks > 2 * specs.len(), "{architecture}: {largest} of {blocks}");
    }
}

fn gpt_oss_golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gpt_oss_mxfp4")
}

/// Copies the tiny GPT-OSS with packed experts, changes its tensors, and returns the weights that are read.
fn packed(change: impl FnOnce(&mut Vec<Tensor>)) -> Result<Vec<f32>> {
    let (dir, golden) = (tempfile::tempdir().unwrap(), gpt_oss_golden());
    fs::copy(golden.join(SINGLE), dir.path().join(SINGLE)).unwrap();
    edit(dir.path(), change);
    let config: Value = serde_json::from_slice(&fs::read(golden.join(CONFIG)).unwrap()).unwrap();
    model(&config).load(dir.path())
}

#[test]
fn mxfp4_is_read_as_transformers_widens_it() {
    let have = packed(|_| ()).unwrap();
    let want = packed(|tensors| {
        let bytes = fs::read(gpt_oss_golden().join("unpacked.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        *tensors = file.iter().map(|(n, t)| (n.into(), t.dtype(), t.shape().into(), t.data().into())).collect();
    });
    assert_eq!(bits(&have), bits(&want.unwrap()));
}

/// Blocks and scales are in different shards.
#[test]
fn mxfp4_in_several_shards_is_read_as_from_one_file() {
    const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let (dir, golden) = (tempfile::tempdir().unwrap(), gpt_oss_golden());
    let bytes = fs::read(golden.join(SINGLE)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let place = |name: &str| SHARDS[usize::from(name.ends_with("_scales"))];
    for shard in SHARDS {
        let views = file.iter().filter(|(name, _)| place(name) == shard);
        fs::write(dir.path().join(shard), serialize(views, None).unwrap()).unwrap();
    }
    let weight_map: BTreeMap<&str, &str> = file.iter().map(|(name, _)| (name, place(name))).collect();
    assert_eq!(weight_map.values().filter(|shard| **shard == SHARDS[1]).count(), 2);
    fs::write(dir.path().join(INDEX), json!({"weight_map": weight_map}).to_string()).unwrap();
    let config: Value = serde_json::from_slice(&fs::read(golden.join(CONFIG)).unwrap()).unwrap();
    assert_eq!(bits(&model(&config).load(dir.path()).unwrap()), bits(&packed(|_| ()).unwrap()));
}

#[test]
fn mxfp4_that_does_not_fit_is_named() {
    const GATE_UP: &str = "model.layers.0.mlp.experts.gate_up_proj";
    let (blocks, scales) = (format!("{GATE_UP}_blocks"), format!("{GATE_UP}_scales"));
    assert_error(packed(|tensors| find(tensors, &blocks).1 = FileDtype::I8), &[SINGLE, &blocks, "U8"]);
    assert_error(packed(|tensors| find(tensors, &scales).2.swap(0, 1)), &[SINGLE, &scales, "[3, 64, 2]"]);
    assert_error(packed(|tensors| tensors.retain(|tensor| tensor.0 != scales)), &[SINGLE, GATE_UP]);
    assert_error(packed(|tensors| find(tensors, &scales).3[7] = 255), &[SINGLE, &blocks, "element 224"]);
}

/// The golden's weights after `change`, with all matrices of experts frozen. In MXFP4 they are read as they are and widened here.
fn frozen_experts(packs_experts: bool, change: impl FnOnce(&mut Vec<Tensor>)) -> Result<Vec<f32>> {
    let (dir, golden) = (tempfile::tempdir().unwrap(), gpt_oss_golden());
    fs::copy(golden.join(SINGLE), dir.path().join(SINGLE)).unwrap();
    edit(dir.path(), change);
    let config: Value = serde_json::from_slice(&fs::read(golden.join(CONFIG)).unwrap()).unwrap();
    let frozen = ["layers.0.mlp.down", "layers.0.mlp.gate_up"].map(String::from).into();
    let shape = ModelShape { frozen, packs_experts, ..model(&config).shape };
    let (weights, table) = (ModelWeights::open(dir.path(), &shape)?, TensorTable::new(&shape));
    let mut out = vec![f32::NAN; table.frozen_elems() + table.packed_elems()];
    weights.read_frozen(|start, block| {
        out[start..start + block.len()].copy_from_slice(block);
        Ok(())
    })?;
    weights.read_packed(|start, numbers| {
        numbers.widen(&mut out[start..start + numbers.elems()]);
        Ok(())
    })?;
    Ok(out)
}

#[test]
fn frozen_experts_are_read_in_mxfp4_with_the_values_that_expansion_has() {
    let (packed, expanded) = (frozen_experts(true, |_| ()).unwrap(), frozen_experts(false, |_| ()).unwrap());
    assert_eq!(bits(&packed), bits(&expanded));
    assert!(packed.iter().all(|x| x.is_finite()) && packed.len() == 3 * 64 * (64 + 32));
}

#[test]
fn frozen_experts_with_infinite_or_no_numbers_and_in_another_format_are_named() {
    const DOWN: &str = "model.layers.0.mlp.experts.down_proj";
    let (blocks, scales) = (format!("{DOWN}_blocks"), format!("{DOWN}_scales"));
    for (scale, code, refused) in
        [(255, 0, true), (254, 0x44, true), (254, 0x33, false), (253, 0x76, true), (253, 0x55, false), (252, 0x77, false)]
    {
        let read = frozen_experts(true, |tensors| {
            find(tensors, &scales).3[5] = scale;
            find(tensors, &blocks).3[5 * 16..6 * 16].fill(code);
        });
        match refused {
            true => assert_error(read, &[SINGLE, &blocks, "element 160"]),
            false => assert!(read.is_ok(), "{scale} {code}"),
        }
    }
    let plain = frozen_experts(true, |tensors| {
        let bytes = fs::read(gpt_oss_golden().join("unpacked.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        *tensors = file.iter().map(|(n, t)| (n.into(), t.dtype(), t.shape().into(), t.data().into())).collect();
    });
    assert_error(plain, &[SINGLE, "is BF16, config.json implies MXFP4", "remove quantization_config"]);
}

#[test]
fn packed_weights_leave_as_plain_ones() {
    let (dir, golden) = (tempfile::tempdir().unwrap(), gpt_oss_golden());
    let config: Value = serde_json::from_slice(&fs::read(golden.join(CONFIG)).unwrap()).unwrap();
    let (model, out) = (model(&config), dir.path().join("out"));
    let flat = model.load(&golden).unwrap();
    Model { flat: flat.clone(), ..model }.export(&out, Options::default()).unwrap();
    let written: Value = serde_json::from_slice(&fs::read(out.join(CONFIG)).unwrap()).unwrap();
    assert_eq!((written.get("quantization_config"), &written["dtype"]), (None, &json!("bfloat16")));
    let unpacked = fs::read(golden.join("unpacked.safetensors")).unwrap();
    edit(&out, |tensors| {
        let want = SafeTensors::deserialize(&unpacked).unwrap();
        assert_eq!(tensors.len(), want.len());
        for (name, _, shape, data) in tensors {
            let want = want.tensor(name).unwrap();
            assert_eq!((&shape[..], &data[..]), (want.shape(), want.data()), "{name}");
        }
    });
}

#[test]
fn fused_and_transposed_weights_take_their_original_form() {
    let (_dir, out, model) = exported("GPT2LMHeadModel", Options::default());
    let qkv = model.table.find(Module::Layer(1), Role::Qkv).unwrap();
    edit(&out, |tensors| {
        let (_, _, shape, data) = find(tensors, "transformer.h.1.attn.c_attn.weight");
        assert_eq!(*shape, [24, 72]);
        let expected = model.flat[qkv.range()][50 * 24 + 3].to_le_bytes();
        assert_eq!(data[(3 * 72 + 50) * 4..][..4], expected);
    });
    let (_dir, out, model) = exported("Qwen2ForCausalLM", Options::default());
    let bias = model.table.find(Module::Layer(0), Role::QkvBias).unwrap();
    edit(&out, |tensors| {
        let (_, _, shape, data) = find(tensors, "model.layers.0.self_attn.k_proj.bias");
        assert_eq!(*shape, [12]);
        assert_eq!(*data, bytemuck::cast_slice::<f32, u8>(&model.flat[bias.range()][24..36]));
        assert!(tensors.iter().any(|t| t.0 == LM_HEAD));
    });
}

fn llama() -> Family {
    Family::find("LlamaForCausalLM").unwrap()
}

const LM_HEAD: &str = "lm_head.weight";

#[test]
fn shards_keep_their_limit_and_the_index_locates_every_tensor() {
    let (_dir, out, model) = exported("LlamaForCausalLM", sharded(6000));
    let index: Value = serde_json::from_slice(&fs::read(out.join(INDEX)).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], model.table.params() * 4);
    let map = index["weight_map"].as_object().unwrap();
    let shards: Vec<_> = names(&out).into_iter().filter(|n| n.ends_with(".safetensors")).collect();
    assert_eq!(shards[0], format!("model-00001-of-{:05}.safetensors", shards.len()));
    let mut tensors = 0;
    for shard in &shards {
        let bytes = fs::read(out.join(shard)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert!(file.names().iter().all(|&name| map[name] == shard.as_str()));
        assert!(file.len() == 1 || file.iter().map(|(_, t)| t.data().len()).sum::<usize>() <= 6000);
        let header = bytes.len() - file.iter().map(|(_, t)| t.data().len()).sum::<usize>();
        assert_eq!(header % 8, 0);
        tensors += file.len();
    }
    assert!(shards.len() > 3 && tensors == map.len());
}

#[test]
fn the_dtype_is_the_configurations_or_the_callers_and_the_export_records_it() {
    let cases = [
        (json!({"torch_dtype": "bfloat16"}), None, Dtype::Bfloat16, json!({"torch_dtype": "bfloat16"})),
        (json!({"dtype": "float16"}), None, Dtype::Float16, json!({"dtype": "float16"})),
        (json!({}), None, Dtype::Float32, json!({"torch_dtype": "float32"})),
        (
            json!({"dtype": "auto", "torch_dtype": "float32"}),
            Some(Dtype::Bfloat16),
            Dtype::Bfloat16,
            json!({"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ),
    ];
    for (keys, wanted, dtype, output) in cases {
        let mut config = config("Qwen3ForCausalLM");
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let (dir, model) = (tempfile::tempdir().unwrap(), model(&config));
        let out = dir.path().join("out");
        model.export(&out, Options { dtype: wanted, ..Options::default() }).unwrap();
        let mut rounded = model.flat.clone();
        for x in model.table.specs().iter().flat_map(|spec| spec.range()) {
            rounded[x] = match dtype {
                Dtype::Bfloat16 => <bf16 as Element>::from_f32(rounded[x]).to_f32(),
                Dtype::Float16 => Element::to_f32(<f16 as Element>::from_f32(rounded[x])),
                _ => rounded[x],
            };
        }
        assert_eq!(bits(&model.load(&out).unwrap()), bits(&rounded));
        let written: Value = serde_json::from_slice(&fs::read(out.join(CONFIG)).unwrap()).unwrap();
        for key in ["dtype", "torch_dtype"] {
            assert_eq!(written.get(key), output.get(key));
        }
        assert_eq!(written["rms_norm_eps"], config["rms_norm_eps"]);
    }
    let (dir, mut config) = (tempfile::tempdir().unwrap(), config("LlamaForCausalLM"));
    config["torch_dtype"] = json!("float8");
    assert_error(model(&config).export(&dir.path().join("out"), Options::default()), &["config.json", "float8"]);
    let int32 = Options { dtype: Some(Dtype::Int32), ..Options::default() };
    assert_error(model(&config).export(&dir.path().join("out"), int32), &["int32"]);
    assert!(names(dir.path()).is_empty());
}

#[test]
fn names_without_prefix_old_buffers_and_a_second_copy_of_tied_weights_are_accepted() {
    let (_dir, out, model) = exported("GPT2LMHeadModel", Options::default());
    edit(&out, |tensors| {
        let mut head = find(tensors, "transformer.wte.weight").clone();
        head.0 = LM_HEAD.into();
        tensors.push(head);
        tensors.push(("transformer.h.0.attn.bias".into(), FileDtype::BOOL, vec![1, 4], vec![1; 4]));
        tensors.push(("transformer.h.0.attn.masked_bias".into(), FileDtype::F32, vec![], vec![0; 4]));
        tensors.iter_mut().for_each(|t| t.0 = t.0.trim_start_matches("transformer.").to_string());
    });
    assert_eq!(bits(&model.load(&out).unwrap()), bits(&model.flat));
    edit(&out, |tensors| find(tensors, LM_HEAD).3[100] ^= 1);
    let weights = ModelWeights::open(&out, &model.shape).unwrap();
    assert!(model.shape.tied && !weights.shape().tied);
    assert!(weights.note().unwrap().contains("config.json ties lm_head.weight to the token embedding, but their values differ"));
}

#[test]
fn a_tie_that_both_tensors_break_is_no_tie_and_the_export_records_it() {
    let config = config("Qwen3ForCausalLM");
    let tied = json!({"tie_word_embeddings": true});
    let mut broken = config.clone();
    broken.as_object_mut().unwrap().extend(tied.as_object().unwrap().clone());
    let (dir, untied) = (tempfile::tempdir().unwrap(), model(&config));
    let (out, again) = (dir.path().join("out"), dir.path().join("again"));
    untied.export(&out, Options::default()).unwrap();
    fs::write(out.join(CONFIG), broken.to_string()).unwrap();
    let shape = crate::model::presets::shape(&out).unwrap();
    assert_eq!((shape.tied, &shape), (false, &untied.shape), "a plan counts both");
    assert_eq!(bits(&Model { shape: ModelShape { tied: true, ..shape }, ..model(&config) }.load(&out).unwrap()), bits(&untied.flat));
    let checkpoint = Model { files: vec![(CONFIG.into(), broken.to_string().into())], ..untied };
    export_checkpoint(&save_checkpoint(dir.path(), 1, &checkpoint), &again, Options::default()).unwrap();
    let written: Value = serde_json::from_slice(&fs::read(again.join(CONFIG)).unwrap()).unwrap();
    assert_eq!(written["tie_word_embeddings"], json!(false));
    assert_eq!(fs::read(again.join(SINGLE)).unwrap(), fs::read(out.join(SINGLE)).unwrap());
}

#[test]
fn tensors_that_do_not_fit_are_named_with_their_file() {
    let name = "model.layers.1.self_attn.k_proj.weight";
    type Change<'a> = &'a dyn Fn(&mut Vec<Tensor>);
    let cases: [(Change, &[&str]); 7] = [
        (&|t| t.retain(|t| t.0 != name), &["model.safetensors", "1 tensors are missing", name]),
        (&|t| t.retain(|t| !t.0.starts_with("model.layers.1")), &["9 tensors are missing", ", ..."]),
        (&|t| find(t, name).0 = "model.layers.1.k_proj.weight".into(), &["1 tensors are missing", name]),
        (&|t| t.push(("extra".into(), FileDtype::F32, vec![1], vec![0; 4])), &["1 tensors that the model does not have: \"extra\""]),
        (&|t| t.push(("\u{1b}[31mEVIL\nerror".into(), FileDtype::F32, vec![1], vec![0; 4])), &["have: \"\\u{1b}[31mEVIL\\nerror\""]),
        (&|t| find(t, name).2 = vec![24, 12], &["model.safetensors", name, "[24, 12]", "[12, 24]"]),
        (&|t| find(t, name).1 = FileDtype::I32, &["model.safetensors", name, "I32"]),
    ];
    for (change, parts) in cases {
        let (_dir, out, model) = exported("LlamaForCausalLM", Options::default());
        edit(&out, change);
        assert_error(ModelWeights::open(&out, &model.shape), parts);
    }
    assert_error(model(&config("LlamaForCausalLM")).load(Path::new("/nonexistent")), &["read /nonexistent: No such file"]);
}

fn raw(header: &[u8], data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, &vec![0; data]].concat()
}

#[test]
fn headers_that_lie_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(SINGLE);
    let f32s = |shape: &str, start: u64, end: u64| format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}"#);
    let (a, max) = (f32s("[2]", 0, 8), u64::MAX);
    let headers = [
        (format!(r#"{{"a":{a},"b":{}}}"#, f32s("[2]", 4, 12)), 12, "does not add up"),
        (format!(r#"{{"a":{a},"b":{}}}"#, f32s("[2]", 12, 20)), 20, "does not add up"),
        (format!(r#"{{"a":{a},"a":{a}}}"#), 8, "comes twice"),
        (format!(r#"{{"a":{a}}}"#), 7, "holds 7 bytes"),
        (format!(r#"{{"a":{a}}}"#), 9, "holds 9 bytes"),
        (format!(r#"{{"a":{}}}"#, f32s("[3]", 0, 8)), 8, "does not add up"),
        (format!(r#"{{"a":{}}}"#, f32s(&format!("[{max},{max}]"), 0, 8)), 8, "does not add up"),
        (format!(r#"{{"a":{}}}"#, f32s("[2]", 8, 0)), 8, "does not add up"),
        (format!(r#"{{"a":{},"b":{}}}"#, f32s("[0]", 0, 0), f32s("[2]", max - 7, max)), 8, "does not add up"),
        (format!(r#"{{"a":{}}}"#, f32s("[-1]", 0, 8)), 8, "header: "),
        (r#"{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}"#.into(), 8, "F33"),
        (r#"{"a":"#.into(), 8, "header: "),
        ("[]".into(), 0, "an object of tensor names"),
        ("[".repeat(100_000), 0, "header: "),
        (String::new(), 0, "header: "),
    ];
    for (header, data, part) in headers {
        fs::write(&path, raw(header.as_bytes(), data)).unwrap();
        assert_error(TensorFile::open(&path), &["model.safetensors", part]);
    }
    fs::write(&path, raw(b"{\"\xff\":1}", 0)).unwrap();
    assert_error(TensorFile::open(&path), &["model.safetensors", "header: "]);
    for bytes in [vec![], vec![0; 7], u64::MAX.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()] {
        fs::write(&path, bytes).unwrap();
        assert_error(TensorFile::open(&path), &["model.safetensors"]);
    }
    fs::write(&path, raw(format!(r#"{{"__metadata__":{{"format":"pt"}},"a":{a}}}   "#).as_bytes(), 8)).unwrap();
    TensorFile::open(&path).unwrap();
}

#[test]
fn every_truncation_is_refused() {
    let (_dir, out, model) = exported("Phi3ForCausalLM", Options::default());
    let whole = fs::read(out.join(SINGLE)).unwrap();
    for cut in (0..whole.len()).step_by(101).chain([1, 7, 8, 9, whole.len() - 1]) {
        fs::write(out.join(SINGLE), &whole[..cut]).unwrap();
        assert_error(model.load(&out), &["model.safetensors"]);
    }
}

#[test]
fn an_index_that_lies_or_leads_outside_is_refused() {
    let (dir, out, model) = exported("LlamaForCausalLM", sharded(6000));
    let honest: Value = serde_json::from_slice(&fs::read(out.join(INDEX)).unwrap()).unwrap();
    let shards: Vec<_> = names(&out).into_iter().filter(|n| n.ends_with(".safetensors")).collect();
    let shard = out.join(&shards[0]);
    fs::copy(&shard, dir.path().join("x.safetensors")).unwrap();
    fs::create_dir(out.join("sub")).unwrap();
    fs::copy(&shard, out.join("sub/x.safetensors")).unwrap();
    let outside = dir.path().join("x.safetensors").display().to_string();
    let embed = "model.embed_tokens.weight";
    for (to, part) in [
        ("../x.safetensors", "not a file in this directory"),
        ("sub/x.safetensors", "not a file in this directory"),
        (outside.as_str(), "not a file in this directory"),
        ("..", "not a file in this directory"),
        ("", "not a file in this directory"),
        (&shards[1], "does not hold it"),
        ("absent.safetensors", "absent.safetensors"),
        ("config.json", "config.json"),
        ("sub", "not a regular file"),
    ] {
        let mut index = honest.clone();
        index["weight_map"][embed] = json!(to);
        fs::write(out.join(INDEX), index.to_string()).unwrap();
        assert_error(model.load(&out), &[part]);
    }
    let mut index = honest.clone();
    index["weight_map"].as_object_mut().unwrap().shift_remove("model.norm.weight");
    fs::write(out.join(INDEX), index.to_string()).unwrap();
    assert_error(model.load(&out), &[INDEX, "does not place \"model.norm.weight\""]);
    for text in ["", "{}", "[]", r#"{"weight_map":{"a":1}}"#, r#"{"weight_map":{"a":"b","a":"b"}}"#] {
        fs::write(out.join(INDEX), text).unwrap();
        assert_error(model.load(&out), &[INDEX]);
    }
    fs::write(out.join(INDEX), honest.to_string()).unwrap();
    model.load(&out).unwrap();
    fs::remove_file(shard).unwrap();
    assert_error(model.load(&out), &[&shards[0]]);
}

#[test]
fn nothing_is_overwritten_and_a_failure_leaves_nothing() {
    let (dir, out, model) = exported("LlamaForCausalLM", Options::default());
    let error = model.export(&out, Options::default()).unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("not empty"));
    for odd in ["/", "..", ""] {
        assert_eq!(model.export(Path::new(odd), Options::default()).unwrap_err().exit_code(), 2);
    }
    let (file, fresh) = (dir.path().join("file"), dir.path().join("fresh"));
    fs::write(&file, "x").unwrap();
    assert_error(model.export(&file, Options::default()), &["file"]);
    fs::create_dir(&fresh).unwrap();
    for at in 0.. {
        faults::arm(Some((at, Mode::Error)));
        let result = model.export(&fresh, sharded(6000));
        let reached = faults::disarm().len() > at;
        if !reached {
            result.unwrap();
            break;
        }
        assert_error(result, &["No space left"]);
        assert_eq!(names(dir.path()), ["file", "fresh", "out"]);
        if !names(&fresh).is_empty() {
            // Only the sync of the parent can fail after the directory has its name.
            fs::remove_dir_all(&fresh).unwrap();
            fs::create_dir(&fresh).unwrap();
        }
    }
    assert_eq!(bits(&model.load(&fresh).unwrap()), bits(&model.flat));
}

fn save_checkpoint(dir: &Path, step: u64, model: &Model) -> PathBuf {
    let trainer = TrainerState {
        step,
        optimizer_step: step,
        loss_scale: SavedLossScale { scale: 1.0, good_steps: 0 },
        scheduler: Scheduler { name: "constant".into(), base_lr: 1e-3, warmup_steps: 0, max_steps: 9 },
        seed: 0,
        data_position: Value::Null,
        clip: Default::default(),
        speculation: Value::Null,
        settings: Value::Null,
    };
    let tensors = model.table.specs().iter().map(|spec| {
        let params = &model.flat[spec.range()];
        TensorSource { name: &spec.name, shape: &spec.shape, params, m: params, v: params }
    });
    save(dir, &trainer, &model.files, tensors, None).unwrap().path
}

#[test]
fn a_checkpoint_exports_without_the_model_that_it_came_from() {
    let (dir, model) = (tempfile::tempdir().unwrap(), model(&config("GPT2LMHeadModel")));
    save_checkpoint(dir.path(), 1, &model);
    let newest = save_checkpoint(dir.path(), 2, &model);
    let direct = dir.path().join("direct");
    let exported = export_checkpoint(&newest, &direct, Options::default()).unwrap();
    assert_eq!((exported.step, exported.checkpoint.clone()), (2, newest.clone()));
    assert_eq!(bits(&model.load(&direct).unwrap()), bits(&model.flat));
    assert_eq!(names(&direct), ["config.json", "model.safetensors", "tokenizer.json"]);

    fs::write(newest.join("model/tokenizer.json"), "[]").unwrap();
    assert_error(export_checkpoint(&newest, &dir.path().join("x"), Options::default()), &["tokenizer.json", "checksum"]);
    let fallback = export_checkpoint(dir.path(), &dir.path().join("y"), Options::default()).unwrap();
    assert_eq!((fallback.step, fallback.warnings.len()), (1, 1));
    assert_error(export_checkpoint(&direct, &dir.path().join("z"), Options::default()), &["no good checkpoint"]);
}

#[test]
fn an_export_finds_damage_in_the_parameters_and_reads_no_moments() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config("GPT2LMHeadModel");
    config["vocab_size"] = json!(30_000);
    let model = model(&config);
    save_checkpoint(dir.path(), 1, &model);
    let newest = save_checkpoint(dir.path(), 2, &model);
    let state = newest.join("state.bin");
    let flip = |at: usize| {
        let mut bytes = fs::read(&state).unwrap();
        bytes[at] ^= 1;
        fs::write(&state, bytes).unwrap();
    };
    // The first tensor is the largest: its parameters, m and v are longer than two chunks each.
    let array = 4 * 30_000 * 24;
    assert!(array > 2 << 20 && model.table.specs().iter().any(|spec| 4 * spec.elems() == array));
    let moments = moments_of_the_largest(&newest, array);
    flip(moments + array / 2);
    assert!(verify(&newest).is_err());
    let exported = export_checkpoint(dir.path(), &dir.path().join("x"), Options::default()).unwrap();
    assert_eq!((exported.step, exported.warnings.len()), (2, 0));
    assert_eq!(bits(&model.load(&dir.path().join("x")).unwrap()), bits(&model.flat));

    flip(moments - array / 2);
    let fallback = export_checkpoint(dir.path(), &dir.path().join("y"), Options::default()).unwrap();
    assert_eq!((fallback.step, fallback.warnings.len()), (1, 1));
    assert!(fallback.warnings[0].contains("state.bin: damaged: the checksum of bytes"), "{:?}", fallback.warnings);
    assert_error(export_checkpoint(&newest, &dir.path().join("z"), Options::default()), &["state.bin", "damaged"]);
    assert_eq!(names(dir.path()).iter().filter(|name| name.starts_with('.')).count(), 0, "no remains of the failed export");
}

/// Where the first moments of the tensor begin whose arrays have `array` bytes, in `state.bin`.
fn moments_of_the_largest(checkpoint: &Path, array: usize) -> usize {
    let opened = open(checkpoint).unwrap();
    let largest = opened.manifest().tensors.iter().find(|tensor| 4 * tensor.elems as usize == array).unwrap();
    largest.offset as usize + array
}

#[test]
fn code_templates_and_licences_go_along_and_links_to_elsewhere_do_not() {
    let (dir, out, _) = exported("LlamaForCausalLM", Options::default());
    let auto_map = json!({"AutoConfig": "configuration_x.X", "AutoModel": "owner/name--modeling_y.Y", "AutoModelForCausalLM": "../z.Z"});
    let mut config = config("LlamaForCausalLM");
    config["auto_map"] = auto_map;
    fs::write(out.join(CONFIG), config.to_string()).unwrap();
    fs::write(out.join(TOKENIZER_CONFIG), r#"{"auto_map": {"AutoTokenizer": ["tokenization_x.X", null]}}"#).unwrap();
    let kept = ["LICENSE", "LICENSE.txt", "chat_template.jinja", "configuration_x.py", "preprocessor_config.json", "tokenization_x.py"];
    for name in kept.into_iter().chain(["setup.py", "modeling_y.py", "notes.txt", "../z.py"]) {
        fs::write(out.join(name), name).unwrap();
    }
    fs::create_dir(out.join("LICENSES")).unwrap();
    let mut collected: Vec<_> = model_files(&out, llama()).unwrap().into_iter().map(|(name, _)| name).collect();
    collected.sort();
    let mut expected = [&kept[..], &[CONFIG, "tokenizer.json", TOKENIZER_CONFIG]].concat();
    expected.sort();
    assert_eq!(collected, expected);

    let secret = dir.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    for name in ["merges.txt", "LICENSE", "configuration_x.py", SINGLE, CONFIG] {
        let path = out.join(name);
        let content = fs::read(&path).ok();
        let _ = fs::remove_file(&path);
        std::os::unix::fs::symlink(&secret, &path).unwrap();
        let model = model(&config);
        let result = if name == SINGLE { model.load(&out).map(|_| ()) } else { model_files(&out, llama()).map(|_| ()) };
        assert_error(result, &[name, "is a link to", "secret"]);
        fs::remove_file(&path).unwrap();
        content.iter().for_each(|content| fs::write(&path, content).unwrap());
    }
}

#[test]
fn weights_in_another_format_are_named_with_the_way_to_convert_them() {
    let (_dir, out, model) = exported("LlamaForCausalLM", Options::default());
    fs::remove_file(out.join(SINGLE)).unwrap();
    assert_error(model.load(&out), &["neither model.safetensors nor", "--init random"]);
    fs::write(out.join("pytorch_model.bin"), "").unwrap();
    assert_error(model.load(&out), &["pytorch_model.bin is there", "only safetensors", "save_pretrained("]);
}

#[test]
fn the_files_around_the_weights_are_collected() {
    let (_dir, out, model) = exported("LlamaForCausalLM", Options::default());
    let files = model_files(&out, llama()).unwrap();
    assert_eq!(files.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["config.json", "tokenizer.json"]);
    assert_eq!(files[1], model.files[1]);
    fs::remove_file(out.join(CONFIG)).unwrap();
    assert_error(model_files(&out, llama()), &["config.json"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn arbitrary_headers_never_panic(header in prop::collection::vec(any::<u8>(), 0..200), data in 0usize..64) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SINGLE);
        fs::write(&path, raw(&header, data)).unwrap();
        let _ = TensorFile::open(&path);
        fs::write(&path, header).unwrap();
        let _ = TensorFile::open(&path);
    }

    #[test]
    fn headers_of_arbitrary_numbers_never_panic_and_never_reach_outside(
        tensors in prop::collection::vec((0u64..12, 0u64..12, prop::collection::vec(any::<u64>().prop_map(|n| n >> (n % 64)), 0..3)), 0..4),
        data in 0usize..24,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SINGLE);
        let map: serde_json::Map<String, Value> = tensors.iter().enumerate().map(|(i, (start, end, shape))| {
            (format!("t{i}"), json!({"dtype": "U8", "shape": shape, "data_offsets": [start, end]}))
        }).collect();
        fs::write(&path, raw(Value::Object(map).to_string().as_bytes(), data)).unwrap();
        if let Ok(file) = TensorFile::open(&path) {
            let ends = file.names().map(|name| file.info(name).unwrap().data_offsets.1);
            prop_assert_eq!(ends.max().unwrap_or(0), data);
        }
    }

    #[test]
    fn a_damaged_file_loads_or_is_refused(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let (_dir, out, model) = exported("Phi3ForCausalLM", Options::default());
        let mut bytes = fs::read(out.join(SINGLE)).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
        bytes[at.index(header)] = byte;
        fs::write(out.join(SINGLE), bytes).unwrap();
        if let Err(e) = model.load(&out) {
            prop_assert!(!e.to_string().contains('\n'));
        }
    }
}

#[test]
fn weights_that_are_not_finite_are_refused_with_tensor_and_element() {
    type Value = (FileDtype, fn(f32) -> Vec<u8>);
    let formats: [Value; 3] = [
        (FileDtype::F32, |x| x.to_le_bytes().into()),
        (FileDtype::BF16, |x| bf16::from_f32(x).to_le_bytes().into()),
        (FileDtype::F16, |x| f16::from_f32(x).to_le_bytes().into()),
    ];
    for (dtype, bytes) in formats {
        for (value, output) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
            let (_dir, out, model) = exported("Qwen3ForCausalLM", Options::default());
            edit(&out, |tensors| {
                // More elements than a block of the reader.
                let (_, file_dtype, shape, data) = find(tensors, "model.embed_tokens.weight");
                assert_eq!(*shape, [37, 24]);
                let elem = |idx: usize| bytes(if idx == 700 { value } else { 0.5 });
                (*file_dtype, *data) = (dtype, (0..37 * 24).flat_map(elem).collect());
            });
            let parts = ["model.safetensors: ", "model.embed_tokens.weight", &format!("holds {output} at element 700 of [37, 24]")];
            assert_error(model.load(&out), &parts);
        }
    }
}
