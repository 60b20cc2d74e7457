//! The matrix products of a training step.

use super::shape::ModelShape;
use super::tensors::TensorTable;
use crate::device::{MatmulLayout, MatmulShape};

/// The products of a step on `tokens` tokens with the loss in one tile, each shape once. A linear layer has one product for the forward
/// pass, one for the gradient of its input, and one for the gradient of its weight. Expert products are not included.
pub fn products(shape: &ModelShape, tokens: usize) -> Vec<MatmulShape> {
    let mut all = Vec::new();
    for spec in TensorTable::new(shape).product_matrices().filter(|spec| spec.experts.0 == 1) {
        let [out, cols] = [spec.shape[0], spec.shape[1]];
        let forward = MatmulShape { layout: MatmulLayout::Nt, m: tokens, n: out, k: cols };
        let to_input = MatmulShape { layout: MatmulLayout::Nn, m: tokens, n: cols, k: out };
        let to_weight = MatmulShape { layout: MatmulLayout::Tn, m: out, n: cols, k: tokens };
        for product in [forward, to_input, to_weight] {
            if !all.contains(&product) {
                all.push(product);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;
    use std::path::Path;

    #[test]
    fn a_step_has_three_products_of_each_kind_of_matrix() {
        let shape = presets::shape(Path::new("qwen3-4b")).unwrap();
        let products = products(&shape, 4 * 4096);
        assert_eq!(products.len(), 15, "{products:?}");
        let wide = |m, n, k| MatmulShape { layout: MatmulLayout::Tn, m, n, k };
        assert!(products.contains(&wide(151_936, 2560, 16_384)) && products.contains(&wide(2560, 9728, 16_384)), "{products:?}");
        // The products of one layer and of the output matrix are the FLOPs of the step without attention.
        let flops = |layers: usize| 6.0 * 16_384.0 * TensorTable::new(&shape.with_layers(layers)).matmul_params() as f64;
        let listed: f64 = products.iter().map(|p| 2.0 * p.m as f64 * p.n as f64 * p.k as f64).sum();
        assert_eq!(listed, flops(1));
    }
}
