//! Sizes of measurements.

/// Upper bounds of the measured sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProbeSizes {
    /// Rows of a matrix product.
    pub product: usize,
    /// Tokens of a sequence.
    pub seq_length: usize,
    /// Bytes of a copy, and of a pointwise kernel's input.
    pub(crate) copy_bytes: usize,
}

impl ProbeSizes {
    /// For a GPU: products, sequences and copies as in a step, and larger.
    pub(crate) const GPU: Self = Self { product: 8192, seq_length: 4096, copy_bytes: 256 << 20 };
    pub(crate) const CPUS: Self = Self { product: 2048, seq_length: 1024, copy_bytes: 4 << 20 };
}
