//! Frozen tensors change no bit of any other gradient, in any family.

use super::*;
use std::collections::BTreeSet;

/// Names of tensors that a random choice freezes: a part of all, all below a random layer, or both.
fn choose(shape: &ModelShape, seed: u64) -> BTreeSet<String> {
    let (table, mut noise) = (TensorTable::new(shape), Noise(seed));
    let lowest = noise.bits() as usize % (shape.layers.len() + 1);
    let is_below = |module| match module {
        Module::Embed => lowest > 0,
        Module::Layer(layer) => layer < lowest,
        Module::Head => false,
    };
    let [by_chance, below] = [0, 1].map(|rest| seed % 3 != rest);
    let chosen = table.specs().iter().filter(|spec| by_chance && noise.next() < 0.0 || below && is_below(spec.module));
    let mut frozen: BTreeSet<String> = chosen.map(|spec| spec.name.clone()).collect();
    if frozen.contains("wte") && shape.learned_positions {
        frozen.insert("wpe".into());
    }
    frozen.remove("final_norm");
    frozen
}

fn policies(shape: &ModelShape, seed: u64) -> Vec<LayerPolicy> {
    let cycle = [Keep, RecomputeCheap, RecomputeBlock, HostAttention, Host].into_iter().cycle();
    cycle.skip(seed as usize % 5).take(shape.layers.len()).collect()
}

/// Gradients by tensor, as bits, after two micro-steps of which the second adds; and the losses.
fn gradients<E: Element>(shape: &ModelShape, fp8: bool, seed: u64) -> (u32, Vec<(String, Vec<u8>)>) {
    let policies = policies(shape, seed);
    let micro_batch = MicroBatch {
        dtype: E::DTYPE,
        logits_dtype: if seed % 2 == 1 { Dtype::Float32 } else { E::DTYPE },
        fp8,
        tile: LossTile { rows: 20, vocab: 40, tail: 0 },
        ..micro_batch(shape, &policies)
    };
    let mut harness = Harness::of::<E>(micro_batch, StreamOrder::Adversary { seed });
    harness.crowd = 2;
    for (sequence, first) in [(0, true), (4, false)] {
        harness.feed(sequence);
        harness.train(MicroStep { first, balance: 0.01, ..whole(&harness.model) });
    }
    let grads: Vec<u8> = harness.download(harness.model.grads);
    let part = |spec: &TensorSpec| grads[spec.offset_elems * E::DTYPE.bytes()..spec.range().end * E::DTYPE.bytes()].to_vec();
    let by_name = harness.model.table.specs().iter().map(|spec| (spec.name.clone(), part(spec))).collect();
    (harness.download(harness.model.activations.loss)[0], by_name)
}

fn expect_same_gradients<E: Element>(name: &str, shape: &ModelShape, fp8: bool, seed: u64) {
    let frozen = choose(shape, seed);
    let (loss, all) = gradients::<E>(shape, fp8, seed);
    let (loss_with_frozen, trained) = gradients::<E>(&ModelShape { frozen: frozen.clone(), ..shape.clone() }, fp8, seed);
    assert_eq!(loss, loss_with_frozen, "{name}");
    let expected: Vec<_> = all.into_iter().filter(|(name, _)| !frozen.contains(name)).collect();
    assert_eq!(trained.len(), expected.len(), "{name}");
    for ((tensor, have), (_, want)) in trained.iter().zip(&expected) {
        assert!(have == want, "{name}: {tensor}, with {frozen:?} frozen");
    }
}

#[test]
fn frozen_tensors_change_no_bit_of_other_gradients() {
    for (nth, (name, shape)) in shapes().into_iter().enumerate() {
        for seed in 0..sweep(1, 3) {
            expect_same_gradients::<f32>(&name, &shape, false, 7 * nth as u64 + seed);
        }
    }
}

#[test]
fn frozen_tensors_change_no_bit_of_other_gradients_in_fp8() {
    let supported = shapes().into_iter().filter(|(_, shape)| !shape.has_delta() && !shape.has_latent());
    for (nth, (name, shape)) in supported.enumerate() {
        expect_same_gradients::<half::bf16>(&name, &for_fp8(shape), true, nth as u64);
    }
}

/// The rows of a range of tokens have the gradients that they have where the whole tables are trained.
fn expect_gradients_of_rows<E: Element>(name: &str, shape: &ModelShape, seed: u64) {
    let tokens = [30..50, 3..62, 63..64, 0..shape.vocab][seed as usize % 4].clone();
    let tokens = if shape.vocab < 64 { 1..4 } else { tokens };
    let mut frozen = choose(shape, seed);
    let tables = if shape.tied { &["wte"][..] } else { &["wte", "lm_head"] };
    frozen.extend(tables.iter().map(|table| table.to_string()));
    let (loss, all) = gradients::<E>(shape, false, seed);
    let (loss_of_rows, trained) =
        gradients::<E>(&ModelShape { frozen, trained_tokens: Some(tokens.clone()), ..shape.clone() }, false, seed);
    assert_eq!(loss, loss_of_rows, "{name}");
    let row = shape.channels * E::DTYPE.bytes();
    for (tensor, have) in &trained {
        let table = tensor.strip_suffix(".rows");
        let (_, want) = all.iter().find(|(name, _)| name == table.unwrap_or(tensor)).unwrap();
        let want = if table.is_some() { &want[tokens.start * row..tokens.end * row] } else { want };
        assert!(have == want, "{name}: {tensor}, tokens {tokens:?}");
    }
    assert_eq!(trained.iter().filter(|(tensor, _)| tensor.ends_with(".rows")).count(), tables.len(), "{name}");
}

#[test]
fn rows_of_some_tokens_have_the_gradients_of_the_whole_tables() {
    for (nth, (name, shape)) in shapes().into_iter().enumerate() {
        expect_gradients_of_rows::<f32>(&name, &shape, nth as u64);
    }
    for (nth, name) in ["llama", "qwen3", "gpt2", "gemma2"].into_iter().enumerate() {
        expect_gradients_of_rows::<half::bf16>(name, &golden_shape(name), nth as u64);
    }
}

#[test]
fn the_lowest_trained_module_is_the_last_of_the_backward_pass() {
    let shape = golden_shape("llama");
    let freezing = |frozen: &[&str]| {
        let table = TensorTable::new(&ModelShape { frozen: frozen.iter().map(|name| name.to_string()).collect(), ..shape.clone() });
        table.modules().filter(|module| table.runs_backward(*module)).count()
    };
    assert_eq!((freezing(&[]), freezing(&["wte"])), (4, 3));
    let table = TensorTable::new(&shape);
    let of_layer = |layer: usize| {
        let specs = table.specs().iter().filter(|spec| spec.module == Module::Layer(layer));
        specs.map(|spec| spec.name.clone()).collect::<Vec<_>>()
    };
    let (lower, upper) = (of_layer(0), of_layer(1));
    let names = |lists: &[&Vec<String>]| lists.iter().flat_map(|list| list.iter().cloned()).collect::<Vec<_>>();
    let count = |frozen: Vec<String>| freezing(&frozen.iter().map(String::as_str).chain(["wte"]).collect::<Vec<_>>());
    assert_eq!((count(names(&[&upper])), count(names(&[&lower])), count(names(&[&lower, &upper]))), (3, 2, 1));
}

#[test]
fn products_of_frozen_matrices_and_below_the_lowest_trained_tensor_do_not_count() {
    let shape = golden_shape("llama");
    let all = TensorTable::new(&shape);
    let count = |table: &TensorTable, holds: &dyn Fn(&TensorSpec) -> bool| -> usize {
        table.product_matrices().filter(|spec| holds(spec)).map(TensorSpec::elems).sum()
    };
    let (matrices, lowest) = (count(&all, &|_| true), count(&all, &|spec| spec.module == Module::Layer(0)));
    assert_eq!(all.multiplied_params(), [matrices; 3]);
    let mut frozen: BTreeSet<String> =
        all.specs().iter().filter(|spec| spec.module == Module::Layer(0)).map(|spec| spec.name.clone()).collect();
    frozen.extend(["wte".to_string(), "lm_head".to_string()]);
    let shape = ModelShape { frozen, ..shape };
    let head = shape.vocab * shape.channels;
    assert_eq!(TensorTable::new(&shape).multiplied_params(), [matrices, matrices - lowest, matrices - lowest - head]);
    let documents = &[(64, 3)].into();
    let scores = |shape: &ModelShape| shape.attention_flops_by(&TensorTable::new(shape), documents);
    let whole = ModelShape { frozen: BTreeSet::new(), ..shape.clone() };
    assert_eq!(scores(&shape), scores(&whole) * (1.0 + 1.0 / 3.0) / 2.0);
    let products = (2 * (3 * matrices - 2 * lowest - head) * 64 * 3) as f64;
    assert_eq!(shape.flops_of(documents), products + scores(&shape));
    assert_eq!((whole.output_flops(), shape.output_flops()), (6.0 * head as f64, 4.0 * head as f64));
}

#[test]
fn rows_of_some_tokens_count_once_as_parameters_and_in_products() {
    for (name, tables) in [("llama", 2), ("qwen3", 1)] {
        let shape = golden_shape(name);
        let frozen = TensorTable::new(&shape).specs().iter().map(|spec| spec.name.clone()).collect();
        let some = ModelShape { frozen, trained_tokens: Some(5..8), ..shape.clone() };
        let (whole, table) = (TensorTable::new(&shape), TensorTable::new(&some));
        assert_eq!((table.params(), table.trained_params()), (whole.params(), tables * 3 * shape.channels), "{name}");
        let products = whole.multiplied_params()[0];
        assert_eq!(table.multiplied_params(), [products, products, 3 * shape.channels], "{name}: every layer passes the gradient on");
        assert_eq!(some.output_flops(), ((4 * shape.vocab + 2 * 3) * shape.channels) as f64, "{name}");
        assert!(table.modules().all(|module| table.runs_backward(module)), "{name}");
    }
}

#[test]
fn a_device_gets_ready_by_layers_with_and_without_frozen_tensors() {
    let kinds = |frozen: &[&str]| {
        let shape = ModelShape { frozen: frozen.iter().map(|name| name.to_string()).collect(), ..deep("llama") };
        Harness::with_policies::<f32>(&shape, 1, ONE_TILE, &[Keep; 7], StreamOrder::Threads).model.layer_kinds()
    };
    assert_eq!(kinds(&["wte"]), [0]);
    assert_eq!(kinds(&["layers.2.mlp.down", "layers.4.mlp.down", "layers.6.attn.qkv"]), [0, 2, 6]);
    let table = TensorTable::new(&deep("llama"));
    let lowest = table.specs().iter().filter(|spec| spec.module == Module::Layer(0)).map(|spec| spec.name.as_str());
    assert_eq!(kinds(&lowest.chain(["wte"]).collect::<Vec<_>>()), [0, 1]);
}
