//! The algorithms that cuBLASLt chooses for the matrix products of known models.

use crate::device::{ProductAlgorithm, ProductWay};
use crate::error::Result;
use std::collections::BTreeMap;
use std::fmt;

/// Tokens of the micro-batch: 4 sequences of 4096.
#[cfg(feature = "cuda")]
const TOKENS: usize = 4 * 4096;

/// The algorithms of one model's products in bfloat16.
#[derive(Debug)]
pub(crate) struct ModelProducts {
    pub model: &'static str,
    pub products: Vec<ProductAlgorithm>,
}

/// The algorithms for every preset on the first GPU. No product is computed.
///
/// # Errors
/// `Resource` when there is no GPU or cuBLASLt cannot be opened.
#[cfg(feature = "cuda")]
pub(crate) fn of_presets() -> Result<Vec<ModelProducts>> {
    use crate::device::cuda::product_algorithms;
    use crate::dtype::Dtype;
    use crate::model::{presets, products::products};
    let of = |(model, _)| {
        let shape = presets::shape(std::path::Path::new(model))?;
        Ok(ModelProducts { model, products: product_algorithms(&products(&shape, TOKENS), Dtype::Bfloat16)? })
    };
    presets::PRESETS.into_iter().map(of).collect()
}

/// Empty: this build opens no GPU.
///
/// # Errors
/// None.
#[cfg(not(feature = "cuda"))]
pub(crate) fn of_presets() -> Result<Vec<ModelProducts>> {
    Ok(Vec::new())
}

impl fmt::Display for ModelProducts {
    /// `llama-8b, 15 products: algorithm 66 for 12, 71 in 4 parts for 3; 1 suggestion passed over`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts = BTreeMap::new();
        for p in &self.products {
            *counts.entry((p.algorithm, p.split_k.max(1))).or_insert(0) += 1;
        }
        let parts = |split_k: i32| if split_k > 1 { format!(" in {split_k} parts") } else { String::new() };
        let uses: Vec<_> = counts.iter().map(|((id, split_k), count)| format!("{id}{} for {count}", parts(*split_k))).collect();
        write!(f, "{}, {} products: algorithm {}", self.model, self.products.len(), uses.join(", "))?;
        match self.products.iter().filter(|p| p.way != ProductWay::Whole).count() {
            0 => {}
            in_slices => write!(f, "; {in_slices} in slices")?,
        }
        match self.products.iter().map(|p| p.passed_over).sum::<usize>() {
            0 => Ok(()),
            passed => write!(f, "; {passed} suggested algorithms skipped: their results may be wrong"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{MatmulLayout, MatmulShape};
    use crate::dtype::Dtype;

    #[test]
    fn algorithms_are_counted_with_their_parts() {
        let shape = MatmulShape { layout: MatmulLayout::Tn, m: 8, n: 8, k: 8 };
        let dtype = Dtype::Bfloat16;
        let product = |algorithm, split_k, passed_over| ProductAlgorithm {
            shape,
            experts: None,
            dtype,
            algorithm,
            split_k,
            passed_over,
            way: ProductWay::Whole,
        };
        let line = |products| ModelProducts { model: "m", products }.to_string();
        assert_eq!(
            line(vec![product(66, 1, 0), product(66, 0, 0), product(71, 4, 2)]),
            "m, 3 products: algorithm 66 for 2, 71 in 4 parts for 1; 2 suggested algorithms skipped: their results may be wrong"
        );
        let sliced = ProductAlgorithm { way: ProductWay::Slices(2), ..product(66, 1, 0) };
        assert_eq!(line(vec![product(66, 1, 0), sliced]), "m, 2 products: algorithm 66 for 2; 1 in slices");
    }
}
