//! Against PyTorch: tiny models of every family, their logits, and ten steps of AdamW with clipping, in float32 on the CPU
//! device. How the golden values were made, and where the bounds come from, is in golden/README.md.

use safetensors::{Dtype as FileDtype, SafeTensors};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use superoffload::device::cpu::CpuDevice;
use superoffload::device::{Device, DeviceSlice, Stream};
use superoffload::dtype::Dtype;
use superoffload::host::pinned::PinnedSlice;
use superoffload::model::activations::{ActivationPlan, LossTile};
use superoffload::model::rope::rope_table;
use superoffload::model::shape::{ModelShape, Positions};
use superoffload::model::tensors::{HfPart, Stage, TensorSpec, TensorTable};
use superoffload::model::{MicroStep, Model};

const FAMILIES: [&str; 7] = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "seed_oss"];

// What golden/generate.py used.
const STEPS: usize = 10;
const BATCH: usize = 2;
const SEQ_LENGTH: usize = 16;
const TOKENS: usize = BATCH * SEQ_LENGTH;
const LEARNING_RATE: f64 = 1e-3;
const WEIGHT_DECAY: f64 = 0.1;
const BETA1: f64 = 0.9;
const BETA2: f64 = 0.999;
const EPSILON: f64 = 1e-3;
const MAX_NORM: f64 = 0.5;

/// Bytes of every tensor of some safetensors files, by name.
type Tensors = HashMap<String, Vec<u8>>;

fn directory(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(family)
}

/// All tensors of the files of `dir` whose names start with `stem`: one file or shards.
fn read_tensors(dir: &Path, stem: &str) -> Tensors {
    let mut tensors = Tensors::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with(stem) && name.ends_with(".safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            tensors.extend(file.tensors().into_iter().map(|(name, view)| {
                assert!(matches!(view.dtype(), FileDtype::F32 | FileDtype::F64 | FileDtype::I32), "{name}");
                (name, view.data().to_vec())
            }));
        }
    }
    tensors
}

fn values<T: bytemuck::Pod>(tensors: &Tensors, name: &str) -> Vec<T> {
    let bytes = tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// The flat parameters, gathered from the Hugging Face tensors that the table names.
fn gather(table: &TensorTable, tensors: &Tensors, prefix: &str) -> Vec<f32> {
    let mut flat = vec![0.0; table.flat_elems()];
    for spec in table.specs() {
        for part in &spec.parts {
            let file: Vec<f32> = values(tensors, &format!("{prefix}{}", part.name));
            place(spec, part, &file, &mut flat[spec.range()]);
        }
    }
    flat
}

fn place(spec: &TensorSpec, part: &HfPart, file: &[f32], out: &mut [f32]) {
    let cols = spec.row_elems();
    assert_eq!(file.len(), part.rows * cols, "{}", part.name);
    for row in 0..part.rows {
        for col in 0..cols {
            let from = if part.transposed { col * part.rows + row } else { row * cols + col };
            out[(part.row_start + row) * cols + col] = file[from];
        }
    }
}

struct Trainer {
    dev: CpuDevice,
    model: Model,
    params: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
}

impl Trainer {
    fn new(family: &str) -> Self {
        let shape = ModelShape::read(&directory(family).join("config.json")).unwrap();
        let tile = LossTile { rows: 20, vocab: 40 };
        let plan = ActivationPlan::new(&shape, BATCH, SEQ_LENGTH, Dtype::Float32, tile).unwrap();
        let mut dev = CpuDevice::new(2).unwrap();
        let flat = TensorTable::new(&shape).flat_elems();
        let weights = dev.alloc("weights", flat, Dtype::Float32).unwrap();
        let grads = dev.alloc("grads", flat, Dtype::Float32).unwrap();
        let activations = plan.allocate(&mut dev).unwrap();
        let model = Model::new(shape, weights, grads, activations).unwrap();
        let params = gather(&model.table, &read_tensors(&directory(family), "model"), "");
        let mut trainer = Self { dev, model, params, m: vec![0.0; flat], v: vec![0.0; flat] };
        if let (Positions::Rope(rope), Some(table)) = (trainer.model.shape.positions, trainer.model.activations.rope_table) {
            trainer.upload(&rope_table(&rope, SEQ_LENGTH), table);
        }
        trainer
    }

    fn wait(&mut self) {
        let event = self.dev.event().unwrap();
        self.dev.record(event, Stream::Compute).unwrap();
        self.dev.synchronize(event).unwrap();
    }

    fn upload<T: bytemuck::Pod>(&mut self, values: &[T], dst: DeviceSlice) {
        let src = PinnedSlice { addr: values.as_ptr() as usize, bytes: size_of_val(values) };
        self.dev.copy_h2d(Stream::Compute, src, dst).unwrap();
        self.wait();
    }

    fn download(&mut self, src: DeviceSlice) -> Vec<f32> {
        let mut values = vec![0.0f32; src.elems];
        let dst = PinnedSlice { addr: values.as_mut_ptr() as usize, bytes: src.bytes() };
        self.dev.copy_d2h(Stream::Compute, src, dst).unwrap();
        self.wait();
        values
    }

    /// Weights and batch of `step` go to the device.
    fn feed(&mut self, golden: &Tensors, step: usize) {
        let (weights, params) = (self.model.weights, self.params.clone());
        self.upload(&params, weights);
        let (tokens, targets) = (self.model.activations.tokens, self.model.activations.targets);
        for (name, slice) in [("tokens", tokens), ("targets", targets)] {
            let text: Vec<i32> = values(golden, name);
            self.upload(&text[step * TOKENS..(step + 1) * TOKENS], slice);
        }
    }

    fn logits(&mut self) -> Vec<f32> {
        let out = self.dev.alloc("logits", TOKENS * self.model.shape.vocab, Dtype::Float32).unwrap();
        self.model.logits(&mut self.dev, out).unwrap();
        self.download(out)
    }

    fn loss_and_grads(&mut self) -> (f32, Vec<f32>) {
        let micro = MicroStep { first: true, inv_tokens: 1.0 / TOKENS as f32, loss_scale: 1.0 };
        for stage in self.model.table.stages().rev().filter(|stage| *stage != Stage::Head) {
            self.model.forward(&mut self.dev, stage).unwrap();
        }
        self.model.head(&mut self.dev, micro, true).unwrap();
        for stage in self.model.table.stages().filter(|stage| *stage != Stage::Head) {
            self.model.backward(&mut self.dev, stage, true).unwrap();
        }
        let (loss, grads) = (self.model.activations.loss, self.model.grads);
        (self.download(loss)[0], self.download(grads))
    }

    /// AdamW on the gradients times `clip`, as `torch.optim.AdamW` computes it: decay first, then the step.
    fn adamw(&mut self, grads: &[f32], clip: f32, step: usize) {
        let t = step as i32 + 1;
        let (bias1, bias2_sqrt) = (1.0 - BETA1.powi(t), (1.0 - BETA2.powi(t)).sqrt());
        let (step_size, keep) = ((LEARNING_RATE / bias1) as f32, (1.0 - LEARNING_RATE * WEIGHT_DECAY) as f32);
        for spec in self.model.table.specs() {
            for i in spec.range() {
                let g = grads[i] * clip;
                self.m[i] += (1.0 - BETA1) as f32 * (g - self.m[i]);
                self.v[i] = BETA2 as f32 * self.v[i] + (1.0 - BETA2) as f32 * g * g;
                let p = if spec.decay { self.params[i] * keep } else { self.params[i] };
                self.params[i] = p - step_size * self.m[i] / (self.v[i].sqrt() / bias2_sqrt as f32 + EPSILON as f32);
            }
        }
    }
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn logits_are_those_of_transformers() {
    for family in FAMILIES {
        let golden = read_tensors(&directory(family), "golden");
        let mut trainer = Trainer::new(family);
        trainer.feed(&golden, 0);
        let (have, want) = (trainer.logits(), values::<f32>(&golden, "logits"));
        assert_eq!(have.len(), want.len(), "{family}");
        let largest = want.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        let error = have.iter().zip(&want).fold(0.0f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(error <= 2e-5 * largest, "{family}: off by {error} of {largest}");
    }
}

#[test]
fn ten_clipped_steps_end_where_torch_ends() {
    for family in FAMILIES {
        let golden = read_tensors(&directory(family), "golden");
        let (losses, norms): (Vec<f64>, Vec<f64>) = (values(&golden, "loss"), values(&golden, "grad_norm"));
        let mut trainer = Trainer::new(family);
        let start = trainer.params.clone();
        for step in 0..STEPS {
            trainer.feed(&golden, step);
            let (loss, grads) = trainer.loss_and_grads();
            let grad_norm = norm(&grads);
            assert!((f64::from(loss) / losses[step] - 1.0).abs() < 2e-6, "{family} step {step}: loss {loss}, torch {}", losses[step]);
            assert!((grad_norm / norms[step] - 1.0).abs() < 2e-6, "{family} step {step}: norm {grad_norm}, torch {}", norms[step]);
            assert!(grad_norm > MAX_NORM, "{family} step {step}: clipping is active");
            trainer.adamw(&grads, (MAX_NORM / (grad_norm + 1e-6)) as f32, step);
        }
        let want = gather(&trainer.model.table, &golden, "final.");
        for spec in trainer.model.table.specs() {
            for i in spec.range() {
                let (have, error) = (trainer.params[i], f64::from((trainer.params[i] - want[i]).abs()));
                let bound = parameter_bound(start[i], want[i]);
                assert!(error <= bound, "{family} {} [{i}]: {have}, torch {}, off by {error} of {bound}", spec.name, want[i]);
            }
        }
    }
}

/// 1e-5 of the largest update that ten steps can make, and the rounding of the parameter itself: see golden/README.md.
fn parameter_bound(start: f32, end: f32) -> f64 {
    let update = LEARNING_RATE * STEPS as f64;
    let largest = start.abs().max(end.abs()) + update as f32;
    let ulp = f64::from(f32::from_bits(largest.to_bits() + 1) - largest);
    1e-5 * update + 2.0 * STEPS as f64 * ulp
}
