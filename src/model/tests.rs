//! Tests of whole passes on the CPU device: gradients against finite differences, and different divisions of a batch.

use super::activations::{ActivationPlan, LossTile, MicroBatch};
use super::fp8::{self, LastWriter};
use super::head_rows::{self, HeadRows};
use super::layer_shape::{AttnKind, Ffn, Latent, LayerShape, Mlp, Moe};
use super::policy::LayerPolicy::{self, Host, HostAttention, Keep, RecomputeBlock, RecomputeCheap};
use super::rope::RopeTable;
use super::shape::ModelShape;
use super::tensors::{Module, TensorSpec, TensorTable};
use super::{FrozenMemory, HeadGradients, MicroStep, Model, ParamMemory};
use crate::data::rows::batch::{self, Batch};
use crate::device::cpu::{CpuDevice, StreamOrder};
use crate::device::{Device, DeviceSlice, Lease, RouterRule, SigmoidRule, Stream};
use crate::dtype::{Dtype, Element};
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::sweep::sweep;
use std::path::{Path, PathBuf};

mod frozen;
mod logits;
mod packed;

const SEQ_LENGTH: usize = 12;
const ONE_TILE: LossTile = LossTile { rows: usize::MAX, vocab: usize::MAX, tail: 0 };

/// Four sequences in fp32, of `shape` with the `policies` of its layers.
fn micro_batch<'a>(shape: &'a ModelShape, policies: &'a [LayerPolicy]) -> MicroBatch<'a> {
    MicroBatch {
        shape,
        batch: 4,
        seq_length: SEQ_LENGTH,
        sequence_ranks: 1,
        separates_documents: false,
        objective: None,
        dtype: Dtype::Float32,
        logits_dtype: Dtype::Float32,
        fp8: false,
        head_rows: HeadRows::All,
        tile: ONE_TILE,
        mlp_tile: None,
        policies,
        segments: &[0],
    }
}

/// Pseudorandom numbers between -1 and 1.
struct Noise(u64);

impl Noise {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn next(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

/// A model with random weights on its own device; fp32 unless stated otherwise.
struct Harness {
    dev: CpuDevice,
    host: HostMemory,
    model: Model,
    /// Number of unrelated copies on each copy stream before each module, like those of gradients and parameters.
    crowd: usize,
    crowd_memory: [(DeviceSlice, PinnedSlice); 2],
}

impl Harness {
    fn new(shape: &ModelShape, batch: usize, tile: LossTile) -> Self {
        Self::narrow::<f32>(shape, batch, tile)
    }

    fn narrow<E: Element>(shape: &ModelShape, batch: usize, tile: LossTile) -> Self {
        Self::with_policies::<E>(shape, batch, tile, &vec![Keep; shape.layers.len()], StreamOrder::Adversary { seed: 1 })
    }

    fn with_policies<E: Element>(
        shape: &ModelShape,
        batch: usize,
        tile: LossTile,
        policies: &[LayerPolicy],
        schedule: StreamOrder,
    ) -> Self {
        Self::with_documents::<E>(shape, (batch, false), (tile, None), policies, schedule)
    }

    fn with_documents<E: Element>(
        shape: &ModelShape,
        (batch, documents): (usize, bool),
        (tile, mlp_tile): (LossTile, Option<usize>),
        policies: &[LayerPolicy],
        schedule: StreamOrder,
    ) -> Self {
        let micro_batch = MicroBatch {
            batch,
            separates_documents: documents,
            dtype: E::DTYPE,
            logits_dtype: E::DTYPE,
            tile,
            mlp_tile,
            ..micro_batch(shape, policies)
        };
        Self::of::<E>(micro_batch, schedule)
    }

    fn of<E: Element>(micro_batch: MicroBatch<'_>, schedule: StreamOrder) -> Self {
        let (mut dev, mut host) = (crate::launch::open::cpu(1, schedule, Default::default(), 0).unwrap(), HostMemory::default());
        let shape = micro_batch.shape;
        let flat = TensorTable::new(shape).flat_elems();
        let plan = ActivationPlan::new(micro_batch).unwrap();
        let weights = dev.alloc("weights", flat, E::DTYPE).unwrap();
        let grads = dev.alloc("grads", flat, E::DTYPE).unwrap();
        let activations = plan.allocate(&mut dev, &mut host, &mut Lease::default()).unwrap();
        assert_eq!(host.allocations().map(|(_, bytes)| bytes as u64).sum::<u64>(), plan.host_bytes().0);
        let table = TensorTable::new(shape);
        let frozen = FrozenMemory::alloc(&mut dev, &table, E::DTYPE).unwrap();
        let model = Model::new(shape.clone(), ParamMemory { weights, grads, frozen }, activations).unwrap();
        let crowd_memory = [(); 2].map(|()| (dev.alloc("crowd", 1, Dtype::Float32).unwrap(), host.alloc("crowd", 4).unwrap()));
        let mut harness = Self { dev, host, model, crowd: 0, crowd_memory };
        for (rope, target) in shape.ropes.iter().zip(harness.model.activations.rope_tables.clone()) {
            let mut table = vec![0.0; target.elems()];
            RopeTable::new(rope, SEQ_LENGTH).write(0..table.len(), &mut table);
            harness.upload(&table, target);
        }
        let (mut specs, mut frozen_specs) = (random_weights(&harness.model.table), random_values(table.frozen(), table.frozen_elems()));
        move_rows(&table, &mut frozen_specs, &mut specs);
        for (values, memory) in [(specs, weights), (frozen_specs, frozen.weights)] {
            harness.upload(&values.into_iter().map(E::from_f32).collect::<Vec<_>>(), memory);
        }
        harness
    }

    fn wait(&mut self) {
        let event = self.dev.event().unwrap();
        self.dev.record(event, Stream::Compute).unwrap();
        self.dev.synchronize(event).unwrap();
    }

    fn upload<T: bytemuck::Pod>(&mut self, values: &[T], dst: DeviceSlice) {
        let src = self.host.alloc("upload", size_of_val(values)).unwrap();
        self.host.lend_mut(src).copy_from_slice(values);
        self.dev.copy_h2d(Stream::Compute, src, dst).unwrap();
        self.wait();
    }

    fn download<T: bytemuck::Pod>(&mut self, src: DeviceSlice) -> Vec<T> {
        let dst = self.host.alloc("download", src.bytes()).unwrap();
        self.dev.copy_d2h(Stream::Compute, src, dst).unwrap();
        self.wait();
        self.host.lend(dst).to_vec()
    }

    /// Makes sequences `first..first + batch` of a fixed text the micro-batch.
    fn feed(&mut self, first: usize) {
        let (inputs, rows) = (self.model.activations.inputs, self.model.activations.tokens.elems());
        let (start, vocab) = (first * SEQ_LENGTH, self.model.shape.vocab as u64);
        let mut noise = Noise(77);
        let text: Vec<i32> = (0..start + rows + 1).map(|_| (noise.bits() % vocab) as i32).collect();
        let (mut memory, documents) = (vec![0; inputs.elems()], self.model.activations.documents.is_some());
        let mut batch = Batch::new(&mut memory[..batch::arrays(documents) * rows], SEQ_LENGTH, documents);
        batch.tokens.copy_from_slice(&text[start..start + rows]);
        batch.targets.copy_from_slice(&text[start + 1..]);
        if documents {
            set_documents(&mut batch);
        }
        self.upload(&memory, inputs);
    }

    fn crowd(&mut self) {
        let [(leaving, to), (returning, from)] = self.crowd_memory;
        for _ in 0..self.crowd {
            self.dev.copy_d2h(Stream::D2h, leaving, to).unwrap();
            self.dev.copy_h2d(Stream::H2d, from, returning).unwrap();
        }
    }

    fn forward(&mut self) {
        for module in self.model.table.modules().rev().filter(|module| *module != Module::Head) {
            self.crowd();
            self.model.scale_weights(&mut self.dev, module).unwrap();
            self.model.forward(&mut self.dev, module).unwrap();
        }
    }

    fn train(&mut self, micro: MicroStep) {
        self.forward();
        self.model.head(&mut self.dev, micro, Some(HeadGradients::All)).unwrap();
        for module in self.model.table.modules().filter(|module| *module != Module::Head) {
            self.crowd();
            self.model.backward(&mut self.dev, module, micro).unwrap();
        }
    }

    fn loss(&mut self) -> f32 {
        self.forward();
        let micro = whole(&self.model);
        self.model.head(&mut self.dev, micro, None).unwrap();
        self.download(self.model.activations.loss)[0]
    }

    /// Loss and gradients of sequences `0..batch` in one micro-step.
    fn loss_and_grads(&mut self) -> (f32, Vec<f32>) {
        self.feed(0);
        self.train(whole(&self.model));
        (self.download(self.model.activations.loss)[0], self.download(self.model.grads))
    }
}

/// Two documents in each row, the first of 5 tokens; every third target has no loss.
fn set_documents(batch: &mut Batch<'_>) {
    batch.targets.iter_mut().step_by(3).for_each(|target| *target = -1);
    let documents = batch.documents.as_mut().unwrap().chunks_exact_mut(SEQ_LENGTH);
    for (positions, documents) in batch.positions.chunks_exact_mut(SEQ_LENGTH).zip(documents) {
        positions[5..].iter_mut().for_each(|position| *position -= 5);
        documents[5..].fill(5);
    }
}

fn whole(model: &Model) -> MicroStep {
    MicroStep { first: true, inv_weight: 1.0 / model.activations.tokens.elems() as f32, loss_scale: 1.0, balance: 0.0, head_rows: None }
}

/// Weights of norms near one, all other weights around zero; padding zero.
fn random_weights(table: &TensorTable) -> Vec<f32> {
    random_values(table.specs(), table.flat_elems())
}

/// The values of `specs` in a range of `elems` elements.
fn random_values(specs: &[TensorSpec], elems: usize) -> Vec<f32> {
    let mut weights = vec![0.0; elems];
    for spec in specs {
        let mut noise = Noise(spec.index as u64);
        let center = if spec.init == super::tensors::Init::Ones { 1.0 } else { 0.0 };
        weights[spec.range()].fill_with(|| center + 0.35 * noise.next());
    }
    weights
}

/// Moves trained rows of the tables in `frozen` to their own tensors in `flat`. A pass must copy them back before it reads the tables.
fn move_rows(table: &TensorTable, frozen: &mut [f32], flat: &mut [f32]) {
    for rows in table.specs() {
        let Some(first) = rows.first_token() else { continue };
        let whole = table.frozen().iter().find(|spec| rows.name == format!("{}.rows", spec.name)).unwrap();
        let place = whole.offset_elems + first * whole.row_elems();
        flat[rows.range()].copy_from_slice(&frozen[place..place + rows.elems()]);
        frozen[place..place + rows.elems()].fill(f32::NAN);
    }
}

/// One folder for each family, and for each of its rotations.
fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn goldens() -> Vec<String> {
    let folders = std::fs::read_dir(golden_dir()).unwrap().map(|entry| entry.unwrap());
    let golden = folders.filter(|folder| folder.path().join("golden.safetensors").exists());
    let names = golden.map(|folder| folder.file_name().into_string().unwrap());
    // Folders of frozen tensors and of trained tokens repeat families.
    names.filter(|name| !name.starts_with("frozen") && !name.starts_with("tokens")).collect()
}

fn golden_shape(family: &str) -> ModelShape {
    ModelShape::read(&golden_dir().join(family).join("config.json")).unwrap()
}

/// Every family with all its features, and every family with each feature inverted.
fn shapes() -> Vec<(String, ModelShape)> {
    let both = |family: &str| {
        let shape = golden_shape(family);
        let mut other = ModelShape { tied: !shape.tied, ..shape.clone() };
        for LayerShape { attn, mlp, .. } in &mut other.layers {
            (attn.qkv_bias, attn.out_bias, attn.window) = (!attn.qkv_bias, !attn.out_bias, attn.window.xor(Some(3)));
            // Latent attention has as many key heads as query heads.
            attn.kv_heads = if attn.latent().is_some() { attn.heads } else { 1 };
            *mlp = match *mlp {
                Mlp::Dense(ffn) => Mlp::Dense(Ffn { bias: !ffn.bias, ..ffn }),
                Mlp::Moe(moe) => Mlp::Moe(Moe { rule: other_rule(moe.rule), top_k: moe.experts, ..moe }),
            };
        }
        [(family.to_string(), shape), (format!("{family} inverted"), other)]
    };
    goldens().iter().flat_map(|family| both(family)).collect()
}

fn other_rule(rule: RouterRule) -> RouterRule {
    match rule {
        RouterRule::Chosen => RouterRule::All,
        RouterRule::All => RouterRule::Chosen,
        RouterRule::Sigmoid(rule) => {
            RouterRule::Sigmoid(SigmoidRule { groups: 1, top_groups: 1, renormalised: !rule.renormalised, ..rule })
        }
    }
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

/// Central difference of the loss along `direction` (index, component) in the flat weights.
fn slope(harness: &mut Harness, weights: &[f32], direction: &[(usize, f32)]) -> f64 {
    let mut loss_at = |sign: f32| {
        let mut moved = weights.to_vec();
        direction.iter().for_each(|(i, d)| moved[*i] += sign * d);
        let slice = harness.model.weights;
        harness.upload(&moved, slice);
        f64::from(harness.loss())
    };
    (loss_at(1.0) - loss_at(-1.0)) / 2.0
}

/// All elements of the tensor moved up or down together, then three elements separately.
fn directions(spec: &TensorSpec) -> Vec<Vec<(usize, f32)>> {
    let mut noise = Noise(1000 + spec.index as u64);
    let step = 5e-3 / (spec.elems() as f32).sqrt();
    let mut all = vec![spec.range().map(|i| (i, step * noise.next().signum())).collect::<Vec<_>>()];
    for _ in 0..3 {
        all.push(vec![(spec.offset_elems + noise.bits() as usize % spec.elems(), 5e-3)]);
    }
    all
}

/// The loss is a float near 5. Its rounding (about 1e-6 over the passes) over a step of 5e-3 limits the precision of a slope to 2e-4; the
/// error from curvature is below 1 % of the tensor's gradient.
#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let documents = |(name, shape): (String, ModelShape)| [(format!("{name}, documents"), shape.clone(), true), (name, shape, false)];
    // Each kind of position embedding, a window, and gated delta rules.
    let apart = |name: &str| ["gpt2", "llama", "mistral", "qwen3_5"].contains(&name.split(',').next().unwrap_or(name));
    // A step could change the choices of a router that leaves out some experts.
    let is_smooth = |shape: &ModelShape| shape.layers.iter().all(|layer| layer.mlp.moe().is_none_or(|moe| moe.top_k == moe.experts));
    let wanted = |(name, shape, documents): &(String, ModelShape, bool)| is_smooth(shape) && (!documents || apart(name));
    for (name, shape, documents) in shapes().into_iter().flat_map(documents).filter(wanted) {
        let (tile, policies) = (LossTile { rows: 10, vocab: 24, tail: 0 }, vec![Keep; shape.layers.len()]);
        let mut harness =
            Harness::with_documents::<f32>(&shape, (2, documents), (tile, None), &policies, StreamOrder::Adversary { seed: 1 });
        let weights = random_weights(&harness.model.table);
        let (_, grads) = harness.loss_and_grads();
        // The factor of a layer is no parameter.
        for spec in harness.model.table.clone().specs().iter().filter(|spec| spec.role != super::tensors::Role::LayerScale) {
            let scale = norm(&grads[spec.range()]);
            for direction in directions(spec) {
                let step = direction.iter().map(|(_, d)| f64::from(*d).powi(2)).sum::<f64>().sqrt();
                let have = direction.iter().map(|(i, d)| f64::from(grads[*i]) * f64::from(*d)).sum::<f64>() / step;
                let want = slope(&mut harness, &weights, &direction) / step;
                assert!((have - want).abs() < 0.01 * scale + 4e-4, "{name} {}: gradient {have}, slope {want}, of {scale}", spec.name);
            }
        }
    }
}

fn assert_close(have: &[f32], want: &[f32], table: &TensorTable, context: &str) {
    for spec in table.specs() {
        // A different order of summation causes a few roundings of the largest terms.
        let tolerance = 1e-5 * norm(&want[spec.range()]).max(1e-3);
        for (i, (a, b)) in have[spec.range()].iter().zip(&want[spec.range()]).enumerate() {
            assert!(f64::from((a - b).abs()) <= tolerance, "{context} {} [{i}]: {a} and {b}", spec.name);
        }
    }
}

#[test]
fn two_micro_steps_are_one_batch_of_twice_the_size() {
    for (name, shape) in shapes() {
        let (loss, grads) = Harness::new(&shape, 4, ONE_TILE).loss_and_grads();
        let mut half = Harness::new(&shape, 2, ONE_TILE);
        let inv_weight = 1.0 / (4 * SEQ_LENGTH) as f32;
        for (first, sequence) in [(true, 0), (false, 2)] {
            half.feed(sequence);
            half.train(MicroStep { first, inv_weight, loss_scale: 1.0, balance: 0.0, head_rows: None });
        }
        let (loss_slice, grads_slice) = (half.model.activations.loss, half.model.grads);
        assert!((half.download::<f32>(loss_slice)[0] - loss).abs() < 2e-6 * loss, "{name}");
        assert_close(&half.download(grads_slice), &grads, &half.model.table, &name);
    }
}

#[test]
fn vocabulary_and_row_tiles_change_nothing_but_rounding() {
    for family in ["gpt2", "llama"] {
        let shape = golden_shape(family);
        let (loss, grads) = Harness::new(&shape, 2, ONE_TILE).loss_and_grads();
        let tails = [(usize::MAX, shape.vocab, 1), (7, shape.vocab, 13)];
        for (rows, vocab, tail) in
            [(usize::MAX, 32, 0), (usize::MAX, 27, 0), (7, usize::MAX, 0), (7, 27, 0), (1, 1, 0)].into_iter().chain(tails)
        {
            let mut harness = Harness::new(&shape, 2, LossTile { rows, vocab, tail });
            let (tiled_loss, tiled) = harness.loss_and_grads();
            assert!((tiled_loss - loss).abs() < 2e-6 * loss, "{family} {rows} {vocab} {tail}: {tiled_loss} and {loss}");
            assert_close(&tiled, &grads, &harness.model.table, &format!("{family} {rows} rows {vocab} columns, tail {tail}"));
        }
    }
}

/// Feeds every third target of sequences `first..first + batch` alone, with the lists of the head's selected rows.
fn feed_few_targets(harness: &mut Harness, first: usize) -> Option<usize> {
    harness.feed(first);
    let (inputs, tokens) = (harness.model.activations.inputs, harness.model.activations.tokens.elems());
    let mut memory: Vec<i32> = harness.download(inputs);
    let (batch, lists) = memory.split_at_mut(batch::arrays(false) * tokens);
    let (rows, kept) = lists.split_at_mut(lists.len() / 2);
    batch[tokens..2 * tokens].iter_mut().enumerate().filter(|(at, _)| !(at + first).is_multiple_of(3)).for_each(|(_, target)| *target = -1);
    let selected = if rows.is_empty() { None } else { head_rows::select(batch::targets(batch, tokens), rows, kept, tokens) };
    harness.upload(&memory, inputs);
    selected
}

#[test]
fn a_head_of_trained_rows_changes_nothing_but_rounding() {
    for (family, rows, vocab) in [("gpt2", usize::MAX, usize::MAX), ("llama", 7, 27), ("llama", 20, usize::MAX), ("llama", 7, 0)] {
        let (shape, policies) = (golden_shape(family), vec![Keep; golden_shape(family).layers.len()]);
        let (vocab, tail) = if vocab == 0 { (shape.vocab, 13) } else { (vocab, 0) };
        let [all, trained] = [HeadRows::All, HeadRows::Trained].map(|head_rows| {
            let micro_batch = MicroBatch { head_rows, tile: LossTile { rows, vocab, tail }, ..micro_batch(&shape, &policies) };
            let mut harness = Harness::of::<f32>(micro_batch, StreamOrder::Adversary { seed: 1 });
            // Two micro-steps whose trained rows differ: the second one must not see gradients of the first one.
            for (first, sequence) in [(true, 0), (false, 4)] {
                let selected = feed_few_targets(&mut harness, sequence);
                assert_eq!(selected, (head_rows == HeadRows::Trained).then_some(16), "of 48 rows");
                let inv_weight = 1.0 / 32.0;
                harness.train(MicroStep { first, inv_weight, loss_scale: 1.0, balance: 0.0, head_rows: selected });
            }
            let (loss, grads) = (harness.model.activations.loss, harness.model.grads);
            (harness.download::<f32>(loss)[0], harness.download::<f32>(grads))
        });
        assert!((all.0 - trained.0).abs() < 2e-6 * all.0, "{family}: {} and {}", all.0, trained.0);
        assert_close(&trained.1, &all.1, &TensorTable::new(&shape), family);
    }
}

#[test]
fn the_first_micro_step_forgets_the_last_step_and_padding_stays_zero() {
    for (name, shape) in shapes() {
        let mut harness = Harness::new(&shape, 2, LossTile { rows: 10, vocab: 24, tail: 0 });
        let once = harness.loss_and_grads();
        assert_eq!(harness.loss_and_grads(), once, "{name}");
        let mut padding = vec![true; once.1.len()];
        harness.model.table.specs().iter().for_each(|spec| padding[spec.range()].fill(false));
        assert!(once.1.iter().zip(padding).all(|(g, padding)| !padding || *g == 0.0), "{name}");
    }
}

#[test]
fn the_loss_scale_multiplies_gradients_but_not_the_loss() {
    let shape = golden_shape("llama");
    let mut harness = Harness::new(&shape, 2, ONE_TILE);
    let (loss, grads) = harness.loss_and_grads();
    harness.train(MicroStep { loss_scale: 1024.0, ..whole(&harness.model) });
    let scaled = harness.download::<f32>(harness.model.grads);
    // A power of two scales every float exactly.
    assert!(grads.iter().zip(&scaled).all(|(g, s)| g * 1024.0 == *s));
    assert_eq!(harness.download::<f32>(harness.model.activations.loss)[0], loss);
}

/// The model in a format with relative rounding `unit`: the loss must agree within a few roundings.
fn narrow_loss<E: Element>(shape: &ModelShape, unit: f32) {
    let (loss, _) = Harness::new(shape, 2, ONE_TILE).loss_and_grads();
    let mut harness = Harness::narrow::<E>(shape, 2, LossTile { rows: 10, vocab: 24, tail: 0 });
    harness.feed(0);
    harness.train(whole(&harness.model));
    let narrow = harness.download::<f32>(harness.model.activations.loss)[0];
    assert!(narrow != loss && (narrow - loss).abs() < 4.0 * unit * loss, "{:?} {}: {narrow} and {loss}", shape.family, E::DTYPE);
}

/// Loss and gradients after each of two steps of two micro-steps, all on different sequences, so that stale values cannot pass for new
/// ones.
fn two_steps<E: Element>(shape: &ModelShape, policies: &[LayerPolicy], schedule: StreamOrder, crowd: usize) -> Vec<Vec<u8>> {
    two_steps_in_tiles::<E>(shape, policies, (schedule, crowd), None)
}

fn two_steps_in_tiles<E: Element>(
    shape: &ModelShape,
    policies: &[LayerPolicy],
    (schedule, crowd): (StreamOrder, usize),
    mlp_tile: Option<usize>,
) -> Vec<Vec<u8>> {
    let tiles = (LossTile { rows: 10, vocab: 24, tail: 0 }, mlp_tile);
    let mut harness = Harness::with_documents::<E>(shape, (1, false), tiles, policies, schedule);
    harness.crowd = crowd;
    let mut results = Vec::new();
    for sequence in 0..4 {
        harness.feed(sequence);
        harness.train(MicroStep {
            first: sequence % 2 == 0,
            inv_weight: 1.0 / (2 * SEQ_LENGTH) as f32,
            loss_scale: 1.0,
            balance: 0.0,
            head_rows: None,
        });
        if sequence % 2 == 1 {
            let (loss, grads) = (harness.model.activations.loss, harness.model.grads);
            results.extend([loss, grads].map(|slice| harness.download::<u8>(slice)));
        }
    }
    results
}

/// Policies of seven layers, chosen so that offloaded arrays leave, return, and stay.
const POLICIES: [[LayerPolicy; 7]; 10] = [
    [RecomputeCheap; 7],
    [RecomputeBlock; 7],
    [Host; 7],
    [Host, RecomputeCheap, Host, Keep, Host, RecomputeBlock, Host],
    [Keep, Host, Host, Host, Host, RecomputeCheap, Keep],
    [RecomputeBlock, Keep, RecomputeCheap, RecomputeCheap, RecomputeBlock, Host, RecomputeCheap],
    [Host, Host, Host, Keep, Keep, Keep, Host],
    [HostAttention; 7],
    [HostAttention, Host, HostAttention, RecomputeBlock, HostAttention, Keep, HostAttention],
    [HostAttention, HostAttention, RecomputeCheap, HostAttention, HostAttention, Host, RecomputeBlock],
];

fn deep(family: &str) -> ModelShape {
    golden_shape(family).with_layers(POLICIES[0].len())
}

/// Computed by hand, for two sequences: three layers, two of them with eight experts of 12 columns and three experts for each token, in 32
/// channels.
#[test]
fn memory_of_experts_is_that_of_the_rows_of_all_tokens() {
    let (shape, policies) = (golden_shape("qwen3_moe"), [RecomputeBlock; 3]);
    let (batch, seq_length, tile) = (2, SEQ_LENGTH, LossTile { rows: 10, vocab: 24, tail: 0 });
    let micro_batch = MicroBatch { batch, seq_length, tile, ..micro_batch(&shape, &policies) };
    let plan = ActivationPlan::new(micro_batch).unwrap();
    let tokens = batch * seq_length;
    let aligned = |elems: usize| elems.next_multiple_of(128);
    for (name, elems) in [
        ("layers.router_logits", 2 * aligned(tokens * 8)),
        ("layers.expert_weights", 2 * aligned(tokens * 3)),
        ("layers.choices", 2 * aligned(tokens * 3 * 3)),
        ("layers.expert_bounds", 2 * 128),
        // Recomputed gate and up projections of experts have 72 columns; the dense layer has more.
        ("layers.mlp_in", aligned(tokens * 2 * 40)),
        ("layers.mlp_act", aligned(tokens * 40)),
        ("expert_rows", tokens * 3 * 32),
        ("expert_act", tokens * 3 * 12),
        ("dexpert_weights", tokens * 3),
        ("drouter_logits", tokens * 8),
    ] {
        let found = plan.allocations().iter().find(|allocation| allocation.name == name).map(|allocation| allocation.elems);
        assert_eq!(found, Some(elems), "{name}");
    }
}

/// Computed by hand, for two sequences of two layers in 32 channels: beside six experts, of which a token takes two, an MLP of 40 columns.
#[test]
fn memory_of_experts_beside_an_mlp_has_the_inputs_of_their_norms() {
    let (shape, tokens, aligned) = (golden_shape("gemma4_moe"), 2 * SEQ_LENGTH, |elems: usize| elems.next_multiple_of(128));
    let tile = LossTile { rows: 10, vocab: 24, tail: 0 };
    let elems_of = |shape: &ModelShape, policies: &[LayerPolicy], name: &str| {
        let plan = ActivationPlan::new(MicroBatch { batch: 2, tile, ..micro_batch(shape, policies) }).unwrap();
        plan.allocations().iter().find(|allocation| allocation.name == name).map(|allocation| allocation.elems)
    };
    let elems = |policies: &[LayerPolicy], name: &str| elems_of(&shape, policies, name);
    let (rows, stats) = (aligned(tokens * 32), aligned(tokens));
    for (name, of_layer) in [
        ("layers.experts_raw", rows),
        ("layers.experts_raw_stats", stats),
        ("layers.shared_raw", rows),
        ("layers.shared_raw_stats", stats),
        ("layers.mlp_raw", rows),
        ("layers.shared_in", aligned(tokens * 80)),
    ] {
        let numbers = [[Keep; 2], [RecomputeCheap; 2], [RecomputeBlock; 2]].map(|policies| elems(&policies, name));
        assert_eq!(numbers, [Some(2 * of_layer), Some(2 * of_layer), Some(of_layer)], "{name}");
    }
    let numbers = [[Keep; 2], [RecomputeCheap; 2]].map(|policies| elems(&policies, "layers.experts_norm_out"));
    assert_eq!(numbers, [Some(2 * rows), Some(rows)]);
    assert_eq!(elems(&[Keep; 2], "scaled_expert_weights"), Some(tokens * 2));
    assert_eq!(elems_of(&golden_shape("gemma4"), &[Keep; 3], "layers.experts_raw"), None);
    // The widest gradient is that of attention's output, unless it is that of a norm.
    assert_eq!(elems(&[Keep; 2], "dinner"), Some(tokens * 64));
    assert_eq!(elems_of(&ModelShape { channels: 96, ..shape.clone() }, &[Keep; 2], "dinner"), Some(tokens * 96));
}

/// Computed by hand, for two sequences of three layers in 32 channels: four heads of 12 channels, 4 of which rotate, values of 6 channels,
/// and latent vectors of 12 channels for keys and values and of 20 for queries.
#[test]
fn memory_of_latent_attention_has_the_vectors_before_and_after_their_norms() {
    let (shape, tokens, aligned) = (golden_shape("deepseek_v3_lora"), 2 * SEQ_LENGTH, |elems: usize| elems.next_multiple_of(128));
    let tile = LossTile { rows: 10, vocab: 24, tail: 0 };
    let elems_of = |shape: &ModelShape, policies: &[LayerPolicy], name: &str| {
        let plan = ActivationPlan::new(MicroBatch { batch: 2, tile, ..micro_batch(shape, policies) }).unwrap();
        plan.allocations().iter().find(|allocation| allocation.name == name).map(|allocation| allocation.elems)
    };
    let elems = |policies: &[LayerPolicy], name: &str| elems_of(&shape, policies, name);
    for (name, cols) in [("layers.qkv_raw", 20), ("layers.latent_raw", 12), ("layers.latent_key", 4), ("layers.qk_rstd", 2)] {
        let numbers = [[Keep; 3], [RecomputeCheap; 3], [RecomputeBlock; 3]].map(|policies| elems(&policies, name));
        let of_layer = aligned(tokens * cols);
        assert_eq!(numbers, [Some(3 * of_layer), Some(3 * of_layer), Some(of_layer)], "{name}");
    }
    for (name, cols) in [("layers.latent_norm_out", 12), ("layers.query_norm_out", 20), ("layers.qkv", 3 * 48)] {
        let numbers = [[Keep; 3], [RecomputeCheap; 3]].map(|policies| elems(&policies, name));
        assert_eq!(numbers, [Some(3 * aligned(tokens * cols)), Some(aligned(tokens * cols))], "{name}");
    }
    let without = golden_shape("deepseek_v3");
    assert_eq!(
        ["layers.query_norm_out", "layers.qkv_raw"].map(|name| elems_of(&without, &[Keep; 3], name)),
        [None, Some(3 * aligned(tokens * 48))]
    );
    // The widest gradient is that of queries, keys and values, unless it is that of vectors and their norms.
    assert_eq!(elems(&[Keep; 3], "dfused"), Some(tokens * 3 * 48));
    let mut long = shape.clone();
    for layer in &mut long.layers {
        let latent = layer.attn.latent().unwrap();
        layer.attn.kind = AttnKind::Latent(Latent { rank: 100, ..latent });
    }
    assert_eq!(elems_of(&long, &[Keep; 3], "dfused"), Some(tokens * 2 * (100 + 20)));
}

/// Norms with and without bias, with and without a norm of queries and keys, with experts in some layers. Copies run as early as events
/// allow, or so late, behind many unrelated copies, that a pass with a missing wait reads old data.
#[test]
fn kept_activations_change_no_bit() {
    for family in ["gpt2", "llama", "qwen3", "qwen3_moe", "qwen3_5", "gemma4_moe", "deepseek_v3_lora"] {
        let shape = deep(family);
        let kept = two_steps::<f32>(&shape, &[Keep; 7], StreamOrder::Threads, 0);
        let schedules = || (0..sweep(3, 8)).map(|seed| StreamOrder::Adversary { seed }).chain([StreamOrder::Threads]);
        for (policies, crowd) in POLICIES.into_iter().flat_map(|policies| [(policies, 0), (policies, 100)]) {
            for schedule in schedules() {
                let same = two_steps::<f32>(&shape, &policies, schedule, crowd) == kept;
                assert!(same, "{family} {policies:?} {schedule:?} crowd {crowd}: another result than keeping everything");
            }
        }
    }
}

/// All layers of a long sequence would take as long as a step. Every second layer of this family has a window.
#[test]
fn a_device_gets_ready_by_one_layer_of_each_kind() {
    let kinds = |family: &str, policies: &[LayerPolicy; 7]| {
        Harness::with_policies::<f32>(&deep(family), 1, ONE_TILE, policies, StreamOrder::Threads).model.layer_kinds()
    };
    assert_eq!(kinds("llama", &[Keep; 7]), [0]);
    assert_eq!(kinds("gpt_oss", &[Keep; 7]), [0, 1]);
    assert_eq!(kinds("qwen3_5", &[Keep; 7]), [0, 2]);
    assert_eq!(kinds("gemma4_moe", &[Keep; 7]), [0, 1]);
    assert_eq!(kinds("deepseek_v2", &[Keep; 7]), [0, 1]);
    assert_eq!(kinds("gpt_oss", &[Host, Host, Keep, Keep, Host, Host, Keep]), [0, 1, 2, 3]);
}

#[test]
fn kept_activations_change_no_bit_of_a_narrow_format() {
    for family in ["qwen3", "mixtral", "qwen3_5", "gemma4_moe", "deepseek_v2"] {
        let shape = deep(family);
        let kept = two_steps::<half::bf16>(&shape, &[Keep; 7], StreamOrder::Threads, 0);
        for policies in POLICIES {
            assert!(two_steps::<half::bf16>(&shape, &policies, StreamOrder::Adversary { seed: 3 }, 0) == kept, "{family} {policies:?}");
        }
    }
}

/// An MLP in tiles of five of twelve tokens: with biases, with gates, with a norm after it or a factor, beside experts.
#[test]
fn an_mlp_in_tiles_computes_the_same_and_no_bit_depends_on_kept_activations() {
    for family in ["gpt2", "llama", "gemma2", "granite", "qwen3_moe"] {
        let shape = deep(family);
        let steps = |policies: &[LayerPolicy], seed, mlp_tile| {
            two_steps_in_tiles::<f32>(&shape, policies, (StreamOrder::Adversary { seed }, 0), mlp_tile)
        };
        let (whole, kept) = (steps(&[Keep; 7], 0, None), steps(&[Keep; 7], 0, Some(5)));
        for (whole, kept) in whole.iter().zip(&kept) {
            let (whole, kept): (&[f32], &[f32]) = (bytemuck::cast_slice(whole), bytemuck::cast_slice(kept));
            let largest = whole.iter().fold(0f32, |most, x| most.max(x.abs()));
            assert!(whole.iter().zip(kept).all(|(a, b)| (a - b).abs() <= 2e-6 * largest), "{family}");
        }
        assert_ne!(whole, kept, "{family}: sums over tiles are rounded otherwise");
        for (seed, policies) in POLICIES.iter().enumerate() {
            assert!(steps(policies, seed as u64, Some(5)) == kept, "{family} {policies:?}");
        }
    }
}

/// The shape with sizes that FP8 supports.
fn for_fp8(mut shape: ModelShape) -> ModelShape {
    for layer in &mut shape.layers {
        layer.attn.head_dim = 16;
        if let Mlp::Dense(ffn) = &mut layer.mlp {
            ffn.width = 48;
        }
    }
    shape
}

/// Loss, gradients and scales of a micro-batch from `sequence` on, as bits.
fn step_in_fp8(harness: &mut Harness, sequence: usize) -> (u32, Vec<u16>, Vec<u32>) {
    let (loss, grads, scales) =
        (harness.model.activations.loss, harness.model.grads, harness.model.activations.fp8.map(|work| work.raised()).unwrap());
    harness.feed(sequence);
    harness.train(whole(&harness.model));
    (harness.download(loss)[0], harness.download(grads), harness.download(scales))
}

#[test]
fn scales_that_kernels_find_are_those_of_passes() {
    let supported = shapes().into_iter().filter(|(_, shape)| !shape.has_delta() && !shape.has_latent());
    for (seed, (name, shape)) in supported.enumerate() {
        let shape = for_fp8(shape);
        let cycle = [Keep, RecomputeCheap, RecomputeBlock, HostAttention, Host].into_iter().cycle().skip(seed);
        let policies: Vec<_> = cycle.take(shape.layers.len()).collect();
        let (dtype, tile) = (Dtype::Bfloat16, ONE_TILE);
        let micro_batch = MicroBatch { dtype, logits_dtype: dtype, fp8: true, tile, ..micro_batch(&shape, &policies) };
        fp8::check(&shape, 4 * SEQ_LENGTH).unwrap();
        let mut harness = Harness::of::<half::bf16>(micro_batch, StreamOrder::Adversary { seed: seed as u64 });
        // The second micro-batch must not depend on the first.
        let found = [0, 4].map(|sequence| step_in_fp8(&mut harness, sequence));
        assert!(found.iter().all(|(loss, ..)| f32::from_bits(*loss).is_finite()), "{name}");
        for layer in &mut harness.model.layers {
            let linears = [&mut layer.qkv, &mut layer.attn_out, &mut layer.mlp_in, &mut layer.mlp_out];
            linears.into_iter().filter_map(|linear| linear.fp8.as_mut()).for_each(|fp8| fp8.writers = [LastWriter::Library; 2]);
        }
        assert!([0, 4].map(|sequence| step_in_fp8(&mut harness, sequence)) == found, "{name}");
    }
}

#[test]
fn half_precision_computes_the_same_loss_less_precisely() {
    for family in goldens() {
        let shape = golden_shape(&family);
        narrow_loss::<half::bf16>(&shape, 1.0 / 256.0);
        narrow_loss::<half::f16>(&shape, 1.0 / 2048.0);
    }
}

#[test]
fn a_model_refuses_slices_that_do_not_fit() {
    let shape = golden_shape("qwen3");
    let flat = TensorTable::new(&shape).flat_elems();
    let build = |weights: usize, dtype: Dtype| {
        let mut dev = crate::launch::open::cpu(1, StreamOrder::Adversary { seed: 1 }, Default::default(), 0).unwrap();
        let (seq_length, policies) = (SEQ_LENGTH, &vec![Keep; shape.layers.len()]);
        let batch = MicroBatch { batch: 1, seq_length, ..micro_batch(&shape, policies) };
        let plan = ActivationPlan::new(batch).unwrap();
        let activations = plan.allocate(&mut dev, &mut HostMemory::default(), &mut Lease::default()).unwrap();
        let weights = dev.alloc("weights", weights, dtype).unwrap();
        let grads = dev.alloc("grads", flat, Dtype::Float32).unwrap();
        let frozen = FrozenMemory::alloc(&mut dev, &TensorTable::new(&shape), Dtype::Float32).unwrap();
        Model::new(shape.clone(), ParamMemory { weights, grads, frozen }, activations).map(|_| ())
    };
    assert!(build(flat, Dtype::Float32).is_ok());
    assert!(build(flat - 1, Dtype::Float32).unwrap_err().to_string().contains("weights"));
    assert!(build(flat, Dtype::Bfloat16).unwrap_err().to_string().contains("bfloat16"));
}
