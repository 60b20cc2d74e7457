//! Tables that grouped expert products of cuBLASLt read. `ptx/groups.ptx` writes them, and `gemm/groups.rs` describes them to the library.

use crate::device::{EXPERTS_MAX, MatmulLayout};

/// Matrices with one part for each expert: input rows X, output rows Y, weights. In cuBLASLt's column-major view, an expert's `X` is `ins`
/// by rows, its `Y` is `outs` by rows, and its weight is `ins` by `outs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segmented {
    X,
    Y,
    Weights,
}

/// A size of an expert's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupSize {
    Rows,
    Outs,
    Ins,
}

impl Segmented {
    /// Column-major rows and columns; rows are the leading dimension.
    pub(super) fn sizes(self) -> [GroupSize; 2] {
        match self {
            Self::X => [GroupSize::Ins, GroupSize::Rows],
            Self::Y => [GroupSize::Outs, GroupSize::Rows],
            Self::Weights => [GroupSize::Ins, GroupSize::Outs],
        }
    }
}

/// Operands of a product: both factors, whether each is transposed, and the result.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupRoles {
    pub(super) factors: [(Segmented, bool); 2],
    pub(super) result: Segmented,
    /// Number of terms of each sum.
    pub(super) terms: GroupSize,
}

impl GroupRoles {
    pub(super) fn of(layout: MatmulLayout) -> Self {
        use Segmented::{Weights, X, Y};
        match layout {
            MatmulLayout::Nt => Self { factors: [(Weights, true), (X, false)], result: Y, terms: GroupSize::Ins },
            MatmulLayout::Nn => Self { factors: [(Weights, false), (Y, false)], result: X, terms: GroupSize::Outs },
            MatmulLayout::Tn => Self { factors: [(X, false), (Y, true)], result: Weights, terms: GroupSize::Rows },
        }
    }
}

/// Address of the tables; `ptx/groups.ptx` documents their layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupTables(pub(super) u64);

impl GroupTables {
    const ADDRESSES: u64 = 8 * EXPERTS_MAX as u64;
    const SIZES: u64 = 4 * EXPERTS_MAX as u64;
    const FACTORS: u64 = 3 * Self::ADDRESSES + 3 * Self::SIZES;
    pub(super) const BYTES: usize = Self::FACTORS as usize + 8;

    /// Address of the table of matrix addresses, 8 bytes for each expert.
    pub(super) fn addresses(self, of: Segmented) -> u64 {
        self.0 + of as u64 * Self::ADDRESSES
    }

    /// Address of the table of sizes, one int32 for each expert.
    pub(super) fn sizes(self, of: GroupSize) -> u64 {
        self.0 + 3 * Self::ADDRESSES + of as u64 * Self::SIZES
    }

    /// Addresses of the factors of the product and of the addend, fp32 each.
    pub(super) fn factors(self) -> [u64; 2] {
        [self.0 + Self::FACTORS, self.0 + Self::FACTORS + 4]
    }
}
