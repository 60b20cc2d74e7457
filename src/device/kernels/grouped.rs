//! Expert products: the rows of a matrix form one segment for each expert, and each expert has its own weight.

use super::product::{MatmulLayout, MatmulShape};
use crate::device::kernel::{Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::error::Result;
use crate::hardware::rates::Rates;

/// Maximum experts of a layer: kernels keep a number for each expert.
pub(crate) const EXPERTS_MAX: usize = 1024;

/// Sizes of a [`GroupedMatmul`], named as in a linear layer. The weights of all experts together are `[experts * outs, ins]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupedShape {
    pub layout: MatmulLayout,
    pub experts: usize,
    /// Rows of all segments.
    pub rows: usize,
    /// Rows of an expert's weight.
    pub outs: usize,
    /// Columns of an expert's weight.
    pub ins: usize,
}

impl GroupedShape {
    /// The product of all rows with a single weight, which has the same FLOPs.
    pub(crate) fn as_one(&self) -> MatmulShape {
        let Self { layout, rows, outs, ins, .. } = *self;
        let (m, n, k) = match layout {
            MatmulLayout::Nt => (rows, outs, ins),
            MatmulLayout::Nn => (rows, ins, outs),
            MatmulLayout::Tn => (outs, ins, rows),
        };
        MatmulShape { layout, m, n, k }
    }

    /// Elements of `a`, `b` and `c`.
    fn elems(&self) -> [usize; 3] {
        let Self { layout, experts, rows, outs, ins } = *self;
        let (x, y, weights) = (rows * ins, rows * outs, experts * outs * ins);
        match layout {
            MatmulLayout::Nt => [x, weights, y],
            MatmulLayout::Nn => [y, weights, x],
            MatmulLayout::Tn => [y, x, weights],
        }
    }
}

/// A [`Matmul`](super::product::Matmul) for each expert `e`, over rows `bounds[e]..bounds[e + 1]`:
///
/// - `Nt`: `c[rows, outs] = a[rows, ins] * b_e[outs, ins]^T`, the layer's forward;
/// - `Nn`: `c[rows, ins] = a[rows, outs] * b_e[outs, ins]`, the gradient of its input;
/// - `Tn`: `c_e[outs, ins] (+)= a[rows, outs]^T * b[rows, ins]`, the gradient of its weight: zeros where an expert has no row.
#[derive(Clone, Copy, Debug)]
pub struct GroupedMatmul {
    pub shape: GroupedShape,
    pub a: DeviceSlice,
    pub b: DeviceSlice,
    /// Bounds of the experts' segments: int32 `[experts + 1]`, ascending from 0 to `rows`.
    pub bounds: DeviceSlice,
    pub c: DeviceSlice,
    /// Whether to add to the gradient of a weight.
    pub accumulate: bool,
}

impl Kernel for GroupedMatmul {
    const NAME: &'static str = "grouped_matmul";

    fn check_shape(&self) -> Result<()> {
        let Self { accumulate, shape: GroupedShape { layout, experts, .. }, .. } = *self;
        check_experts(Self::NAME, experts)?;
        if accumulate && layout != MatmulLayout::Tn {
            return Err(refused(Self::NAME, format!("only gradients of weights accumulate, not {layout:?}")));
        }
        Ok(())
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let [a, b, c] = self.shape.elems();
        operands![self; Read a[a], Read b[b], Write c[c]; Read bounds[self.shape.experts + 1] Int32]
    }

    fn flops(&self) -> f64 {
        self.shape.as_one().flops()
    }

    fn flops_per_s(&self, rates: &Rates) -> f64 {
        let GroupedShape { experts, rows, outs, ins, .. } = self.shape;
        rates.grouped_flops(rows.div_ceil(experts.max(1)), outs.min(ins))
    }
}

/// `out_e[c] (+)=` the sum of column `c` over the rows of expert `e`, each row times its weight if there are weights.
#[derive(Clone, Copy, Debug)]
pub struct SegmentSums {
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// Routing weights by choice, fp32 `[T * k]`.
    pub weights: Option<DeviceSlice>,
    /// Index of the routing choice of each row, int32 `[rows]`.
    pub entries: DeviceSlice,
    /// See [`GroupedMatmul::bounds`].
    pub bounds: DeviceSlice,
    /// `[experts, cols]`
    pub out: DeviceSlice,
    /// Adds to `out`.
    pub accumulate: bool,
    pub cols: usize,
}

impl Kernel for SegmentSums {
    const NAME: &'static str = "segment_sums";

    fn check_shape(&self) -> Result<()> {
        check_experts(Self::NAME, self.bounds.elems().saturating_sub(1))
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (rows, experts) = (self.entries.elems(), self.bounds.elems() - 1);
        operands![
            self;
            Read x[rows * self.cols], Write out[experts * self.cols];
            Read weights[rows] Float32, Read entries[rows] Int32, Read bounds[experts + 1] Int32,
        ]
    }
}

/// An error of `kernel` for an unsupported number of experts.
pub(super) fn check_experts(kernel: &'static str, experts: usize) -> Result<()> {
    if (1..=EXPERTS_MAX).contains(&experts) {
        return Ok(());
    }
    Err(refused(kernel, format!("{experts} experts, not 1 to {EXPERTS_MAX}")))
}
