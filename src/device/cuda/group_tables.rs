//! What cuBLASLt reads of products of experts, and where: `ptx/groups.ptx` writes it, `gemm/groups.rs` describes it to the library.

use crate::device::{EXPERTS_MAX, MatmulLayout};

/// What lies by segments: the rows that go in, those that come out, the weights. Column-major, as cuBLASLt's matrices are, an expert's `X` is
/// `ins` by rows, its `Y` `outs` by rows, and its weight `ins` by `outs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segmented {
    X,
    Y,
    Weights,
}

/// Which of a matrix's sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupSize {
    Rows,
    Outs,
    Ins,
}

impl Segmented {
    /// Rows and columns, column-major; rows are the leading dimension.
    pub(super) fn sizes(self) -> [GroupSize; 2] {
        match self {
            Self::X => [GroupSize::Ins, GroupSize::Rows],
            Self::Y => [GroupSize::Outs, GroupSize::Rows],
            Self::Weights => [GroupSize::Ins, GroupSize::Outs],
        }
    }
}

/// Who is what in a product: both factors, whether each is transposed, and the result.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupRoles {
    pub(super) factors: [(Segmented, bool); 2],
    pub(super) result: Segmented,
    /// What is summed over.
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

/// Where `ptx/groups.ptx` writes: see there.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupTables(pub(super) u64);

impl GroupTables {
    const ADDRESSES: u64 = 8 * EXPERTS_MAX as u64;
    const SIZES: u64 = 4 * EXPERTS_MAX as u64;
    const FACTORS: u64 = 3 * Self::ADDRESSES + 3 * Self::SIZES;
    pub(super) const BYTES: usize = Self::FACTORS as usize + 8;

    /// Of a matrix of each expert, 8 bytes each.
    pub(super) fn addresses(self, of: Segmented) -> u64 {
        self.0 + of as u64 * Self::ADDRESSES
    }

    /// Int32, one an expert.
    pub(super) fn sizes(self, of: GroupSize) -> u64 {
        self.0 + 3 * Self::ADDRESSES + of as u64 * Self::SIZES
    }

    /// Of the product and of what it is added to, fp32 each.
    pub(super) fn factors(self) -> [u64; 2] {
        [self.0 + Self::FACTORS, self.0 + Self::FACTORS + 4]
    }
}
