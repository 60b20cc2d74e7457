//! Against transformers: an export has the tensors of the files that transformers saved, by name, shape and bits, whatever they are called and
//! fused to in between. How the files were made is in golden/README.md.

use crate::program::{Workspace, program, run};
use half::bf16;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Format, shape and bytes of each tensor, by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Every folder that generate.py made.
fn goldens() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let folders = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    folders.filter(|folder| folder.join("golden.safetensors").exists()).collect()
}

/// All tensors of the model in `dir`, in one file or in shards.
fn tensors(dir: &Path) -> Tensors {
    let mut all = Tensors::new();
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    for file in names.filter(|name| name.starts_with("model") && name.ends_with(".safetensors")) {
        let bytes = fs::read(dir.join(file)).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let other = all.insert(name.to_string(), (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()));
            assert!(other.is_none(), "{name} is in two files of {}", dir.display());
        }
    }
    all
}

/// Whether training carries the tensor `name` over.
fn is_carried(name: &str) -> bool {
    ["visual.", "vision_tower.", "embed_vision.", "multi_modal_projector.", "mtp."]
        .iter()
        .any(|begin| name.trim_start_matches("model.").starts_with(begin))
}

/// The same, each number of a trained tensor of float32 as the nearest of bfloat16.
fn rounded(tensors: &Tensors) -> Tensors {
    let narrow = |data: &[u8]| -> Vec<u8> {
        data.chunks_exact(4).flat_map(|x| bf16::from_f32(bytemuck::pod_read_unaligned::<f32>(x)).to_le_bytes()).collect()
    };
    let round = |(name, tensor): (&String, &(Dtype, Vec<usize>, Vec<u8>))| match tensor {
        kept if is_carried(name) || name.ends_with("e_score_correction_bias") => (name.clone(), kept.clone()),
        (_, shape, data) => (name.clone(), (Dtype::BF16, shape.clone(), narrow(data))),
    };
    tensors.iter().map(round).collect()
}

/// `config.json` in `dir`, but for the format of weights, and for the old names of rotations where it has the new ones.
fn config(dir: &Path) -> Value {
    let mut config: Value = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
    let formats = ["dtype", "torch_dtype"];
    let old = ["rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"];
    let has_new = config["rope_parameters"].is_object();
    config.as_object_mut().unwrap().retain(|key, _| !(formats.contains(&key.as_str()) || has_new && old.contains(&key.as_str())));
    config
}

fn assert_same(have: &Tensors, want: &Tensors, at: &str) {
    assert_eq!(Vec::from_iter(have.keys()), Vec::from_iter(want.keys()), "names in {at}");
    for ((name, have), want) in have.iter().zip(want.values()) {
        assert_eq!((have.0, &have.1), (want.0, &want.1), "{name} in {at}");
        assert!(have.2 == want.2, "values of {name} in {at}");
    }
}

#[test]
fn an_export_has_the_tensors_that_transformers_saved() {
    let (workspace, goldens) = (Workspace::new(), goldens());
    assert!(goldens.len() > 20, "{goldens:?}");
    // Bytes that are tokens of a vocabulary of 64.
    workspace.write("data.txt", "0123456789".repeat(20));
    // A step that leaves weights as they are: a checkpoint of what was read.
    let still = ["--init", "checkpoint", "--tokenizer", "bytes", "--device", "cpu", "--max-steps", "1", "--learning-rate", "0"];
    for golden in &goldens {
        let family = golden.file_name().unwrap().to_str().unwrap();
        run(workspace.train(family, &still).arg("--model").arg(golden)).digest();
        let (saved, output) = (tensors(golden), config(golden));
        assert!(output["architectures"].is_array() && output["model_type"].is_string(), "{family}: {output}");
        for (dtype, want) in [("bfloat16", &rounded(&saved)), ("auto", &saved)] {
            let (at, out) = (format!("{family} as {dtype}"), workspace.path(&format!("{family}-{dtype}")));
            let outcome = run(program(&["export", "--dtype", dtype]).arg(workspace.path(family)).arg(&out));
            assert_eq!(outcome.code, 0, "{at}: {outcome:?}");
            assert_same(&tensors(&out), want, &at);
            assert_eq!(config(&out), output, "{at}");
        }
    }
}
