//! Frozen experts that stay in MXFP4 change no bit of a gradient.

use super::*;
use crate::dtype::mxfp4::Mxfp4;
use half::bf16;
use std::collections::BTreeSet;

/// Frozen tensors of seven layers: both matrices of experts, either of them, none, and a bias.
const FROZEN: [&str; 8] = [
    "layers.0.mlp.gate_up",
    "layers.0.mlp.down",
    "layers.1.mlp.down",
    "layers.2.mlp.gate_up",
    "layers.2.mlp.gate_up.bias",
    "layers.4.mlp.down",
    "layers.4.mlp.gate_up",
    "layers.6.mlp.down",
];

fn shape(packs_experts: bool, frozen: &[&str]) -> ModelShape {
    ModelShape { packs_experts, frozen: frozen.iter().map(|name| name.to_string()).collect(), ..deep("gpt_oss_mxfp4") }
}

/// Random codes of `elems` numbers, with scales that make them about as large as weights.
fn codes(layer: usize, elems: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut noise, [codes, scales]) = (Noise(layer as u64 + elems as u64), Mxfp4::bytes(elems));
    let codes = (0..codes).map(|_| noise.bits() as u8).collect();
    (codes, (0..scales).map(|_| 120 + (noise.bits() % 4) as u8).collect())
}

/// Gives `harness` the same frozen experts, packed or expanded.
fn fill(harness: &mut Harness) {
    let table = harness.model.table.clone();
    for spec in table.all().filter(|spec| spec.frozen && spec.shape.len() == 2) {
        let Module::Layer(layer) = spec.module else { continue };
        let ((codes, scales), mut wide) = (codes(layer, spec.elems()), vec![bf16::ZERO; spec.elems()]);
        Mxfp4 { codes: &codes, scales: &scales }.widen(&mut wide);
        let params = &harness.model.layers[layer];
        let value = [&params.mlp_in, &params.mlp_out].map(|linear| linear.weight.value);
        let value = value.into_iter().find(|value| value.elems() == spec.elems()).unwrap();
        match params.expansions.iter().find(|expansion| expansion.out == value).copied() {
            Some(expansion) => {
                harness.upload(&codes, expansion.codes);
                harness.upload(&scales, expansion.scales);
            }
            None => harness.upload(&wide, value),
        }
    }
}

/// Loss and gradients, as bits, after two micro-steps of which the second adds.
fn results(shape: &ModelShape, policies: &[LayerPolicy], seed: u64) -> (u32, Vec<u16>) {
    let mut harness = Harness::with_policies::<bf16>(shape, 2, ONE_TILE, policies, StreamOrder::Adversary { seed });
    fill(&mut harness);
    harness.crowd = 2;
    for (sequence, first) in [(0, true), (2, false)] {
        harness.feed(sequence);
        harness.train(MicroStep { first, balance: 0.01, ..whole(&harness.model) });
    }
    (harness.download(harness.model.activations.loss)[0], harness.download(harness.model.grads))
}

#[test]
fn experts_in_mxfp4_change_no_bit_of_a_gradient() {
    for (seed, policies) in POLICIES.into_iter().enumerate() {
        let [expanded, packed] = [false, true].map(|packs| results(&shape(packs, &FROZEN), &policies, seed as u64));
        assert!(expanded.1.iter().any(|grad| *grad != 0));
        assert!(expanded == packed, "{policies:?}");
    }
}

#[test]
fn packed_tensors_have_a_range_of_their_own_and_share_the_memory_of_a_layer() {
    let (table, plain) = (TensorTable::new(&shape(true, &FROZEN)), TensorTable::new(&shape(false, &FROZEN)));
    let names = |specs: &[TensorSpec]| specs.iter().map(|spec| spec.name.clone()).collect::<BTreeSet<_>>();
    assert_eq!(names(table.frozen()), BTreeSet::from(["layers.2.mlp.gate_up.bias".to_string()]));
    assert_eq!(names(table.packed()), FROZEN.iter().filter(|name| !name.ends_with("bias")).map(|name| name.to_string()).collect());
    assert_eq!((plain.packed().len(), plain.packed_bytes(), plain.expanded_elems()), (0, 0, 0));
    assert_eq!((table.params(), table.trained_params(), table.flat_elems()), (plain.params(), plain.trained_params(), plain.flat_elems()));
    // Three experts of 64 x 64 and of 64 x 32.
    let (gate_up, down) = (3 * 64 * 64, 3 * 64 * 32);
    assert_eq!((table.packed_elems(), table.expanded_elems()), (3 * gate_up + 4 * down, gate_up + down));
    assert_eq!(table.packed_bytes(), (3 * gate_up + 4 * down) * 17 / 32);
    for spec in table.packed() {
        let start = if spec.name.ends_with("down") || spec.name.contains("layers.2") { 0 } else { down };
        assert_eq!(table.expanded(spec), start..start + spec.elems(), "{}", spec.name);
    }
    assert!(shape(true, &FROZEN).computing_in(Dtype::Bfloat16).packs_experts);
    assert!(!shape(true, &FROZEN).computing_in(Dtype::Float16).packs_experts);
    assert!(deep("gpt_oss_mxfp4").packs_experts && !deep("gpt_oss").packs_experts);
}
