//! FLOPs of a step: those that the model needs, and those that the device executes.

use crate::model::policy::LayerPolicy;
use crate::model::shape::ModelShape;
use crate::model::tensors::{Module, TensorTable};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepFlops {
    /// FLOPs of the model by [`flops_formula`](crate::model::flops::flops_formula), without recomputation.
    pub model: f64,
    /// FLOPs including the forward passes that the plan recomputes.
    pub hardware: f64,
}

impl StepFlops {
    /// FLOPs of a pass over `documents` (number of documents by length in tokens), in which layers keep the activations of `policies`.
    pub(crate) fn of(shape: &ModelShape, documents: &BTreeMap<usize, usize>, policies: &[LayerPolicy]) -> Self {
        let table = TensorTable::new(shape);
        let (model, all_trained) =
            (shape.flops_by(&table, documents), ModelShape { frozen: BTreeSet::new(), trained_tokens: None, ..shape.clone() });
        let all = if shape.frozen.is_empty() { &table } else { &TensorTable::new(&all_trained) };
        let tokens: usize = documents.iter().map(|(length, count)| length * count).sum();
        let output_matrix = 6.0 * (shape.vocab * shape.channels) as f64 * tokens as f64;
        // The forward pass is one of three equal parts. Layers count equally, though their attention windows may differ.
        let forward = (all_trained.flops_by(all, documents) - output_matrix) / 3.0;
        let attention = all_trained.attention_flops_by(all, documents) / 3.0;
        let layers = || policies.iter().enumerate().filter(|(layer, _)| table.runs_backward(Module::Layer(*layer)));
        let of = |holds: fn(LayerPolicy) -> bool| layers().filter(|(_, policy)| holds(**policy)).count() as f64 / policies.len() as f64;
        Self { model, hardware: model + forward * of(LayerPolicy::recomputes_block) - attention * of(LayerPolicy::sends_attention) }
    }

    /// Without `flops` FLOPs that neither the model needs nor the device executes.
    pub(crate) fn less(self, flops: f64) -> Self {
        Self { model: self.model - flops, hardware: self.hardware - flops }
    }

    /// One of `gpus` equal shares.
    pub(crate) fn shared(self, gpus: usize) -> Self {
        Self { model: self.model / gpus as f64, hardware: self.hardware / gpus as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;
    use std::path::Path;

    #[test]
    fn the_cost_of_steps_matches_an_estimate_by_hand() {
        // Name, batch size, sequence length, PFLOP of the model, and PFLOP with every layer recomputed.
        let cases = [
            ("qwen3-4b", 4, 4096, 0.455, 0.594),
            ("llama-8b", 4, 4096, 0.791, 1.037),
            ("gpt-5b", 8, 1024, 0.259, 0.343),
            ("qwen3-14b", 4, 4096, 1.458, 1.919),
        ];
        for (name, batch, seq_length, model, recomputed) in cases {
            let shape = presets::shape(Path::new(name)).unwrap();
            let all = |policy| vec![policy; shape.layers.len()];
            let kept = StepFlops::of(&shape, &[(seq_length, 10 * batch)].into(), &all(LayerPolicy::Keep)).shared(10);
            let again = StepFlops::of(&shape, &[(seq_length, batch)].into(), &all(LayerPolicy::Host));
            let attended = StepFlops::of(&shape, &[(seq_length, batch)].into(), &all(LayerPolicy::HostAttention));
            // Four FLOPs for each channel of a query and key, and half of the keys are visible.
            let [s, cols] = [seq_length, shape.layers[0].attn.out_cols()].map(|n| n as f64);
            let attention = shape.layers.len() as f64 * batch as f64 * 2.0 * s * s * cols;
            assert!(((again.hardware - attended.hardware) / attention - 1.0).abs() < 1e-9, "{name}");
            assert_eq!(kept.model, kept.hardware);
            assert!((kept.model / again.model - 1.0).abs() < 1e-12);
            assert!((kept.model / 1e15 - model).abs() < 6e-4, "{name}: {} PFLOP", kept.model / 1e15);
            assert!((again.hardware / 1e15 - recomputed).abs() < 2e-3 * recomputed, "{name}: {} PFLOP", again.hardware / 1e15);
        }
    }
}
