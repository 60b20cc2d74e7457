//! Linear layers: matrix products, and the gradient of a bias. All matrices are row-major and dense.

use super::quantize::FP8_GRAIN;
use crate::device::kernel::{Kernel, Operand, operands, refused, rows};
use crate::device::slice::DeviceSlice;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::hardware::rates::Rates;
use std::fmt;

/// Layout of the two factors of a [`Matmul`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MatmulLayout {
    /// `c[m,n] = a[m,k] * b[n,k]^T`: the forward pass of a linear layer with weight `b`, `[out, in]`.
    Nt,
    /// `c[m,n] = a[m,k] * b[k,n]`: the gradient of a linear layer's input.
    Nn,
    /// `c[m,n] = a[k,m]^T * b[k,n]`: the gradient of a linear layer's weight.
    Tn,
}

impl MatmulLayout {
    pub const ALL: [Self; 3] = [Self::Nt, Self::Nn, Self::Tn];
}

/// Sizes of a [`Matmul`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct MatmulShape {
    pub layout: MatmulLayout,
    /// Rows of `c`.
    pub m: usize,
    /// Columns of `c`.
    pub n: usize,
    /// The dimension of the sum.
    pub k: usize,
}

impl MatmulShape {
    /// Multiplications and additions.
    pub(crate) fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }
}

/// The algorithm that cuBLASLt chose for the products of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct ProductAlgorithm {
    #[serde(flatten)]
    pub shape: MatmulShape,
    /// Number of experts of a grouped product, whose `shape` is that of all experts together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) experts: Option<usize>,
    pub dtype: Dtype,
    /// Number of the algorithm in cuBLASLt.
    pub(crate) algorithm: i32,
    /// Parts into which the sum over `k` is split; 0 and 1 mean no split.
    pub(crate) split_k: i32,
    /// Number of earlier suggestions that were skipped because their results may be wrong.
    pub(crate) passed_over: usize,
}

impl fmt::Display for ProductAlgorithm {
    /// For example `algorithm 71 in 4 parts for 8 x 16 x 32 (Tn) on bfloat16`, followed by `of 32 experts` for grouped products.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MatmulShape { layout, m, n, k } = self.shape;
        let parts = if self.split_k > 1 { format!(" in {} parts", self.split_k) } else { String::new() };
        write!(f, "algorithm {}{parts} for {m} x {n} x {k} ({layout:?}) on {}", self.algorithm, self.dtype)?;
        if let Some(experts) = self.experts { write!(f, " of {experts} experts") } else { Ok(()) }
    }
}

/// `c = a * b (+ bias over columns) (+ base)`, fp32 accumulation over k in ascending order, rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    pub shape: MatmulShape,
    /// `m * k` elements.
    pub a: DeviceSlice,
    /// `k * n` elements.
    pub b: DeviceSlice,
    /// `[n]`
    pub bias: Option<DeviceSlice>,
    /// Addend of the product, `[m, n]`: `c` itself, to accumulate, or the input of a residual connection, which does not overlap `c`.
    pub base: Option<DeviceSlice>,
    /// `[m, n]`
    pub c: DeviceSlice,
}

impl Matmul {
    /// `c = a * b`
    pub fn plain(shape: MatmulShape, [a, b, c]: [DeviceSlice; 3]) -> Self {
        Self { shape, a, b, bias: None, base: None, c }
    }

    /// Uses `c` as the base if the product is to `accumulate`.
    pub(crate) fn onto_itself(self, accumulate: bool) -> Self {
        Self { base: accumulate.then_some(self.c), ..self }
    }

    /// The base, if it is not `c` itself.
    pub(crate) fn base_apart(&self) -> Option<DeviceSlice> {
        self.base.filter(|base| *base != self.c)
    }
}

impl Kernel for Matmul {
    const NAME: &'static str = "matmul";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let MatmulShape { m, n, k, .. } = self.shape;
        operands![self; Read a[m * k], Read b[k * n], Read bias[n], ReadInPlace base[m * n], Write c[m * n]]
    }

    fn flops(&self) -> f64 {
        self.shape.flops()
    }

    fn flops_per_s(&self, rates: &Rates) -> f64 {
        let MatmulShape { m, n, k, .. } = self.shape;
        rates.matmul_flops(m.min(n).min(k))
    }
}

/// Alignment in bytes of all operands of a [`ScaledMatmul`], including scales; cuBLASLt rejects smaller alignments.
pub(crate) const FP8_ALIGN_BYTES: u64 = 16;

/// `c = (a * b^T) a_scale b_scale (+ bias over columns) (+ base)` over 8-bit floats: `c[m,n]`, `a[m,k]`, `b[n,k]`. The sum over k is fp32,
/// in ascending order; `c` is rounded once.
#[derive(Clone, Copy, Debug)]
pub struct ScaledMatmul {
    /// `[m, k]`, in either 8-bit format.
    pub a: DeviceSlice,
    /// Scale of `a`, fp32 `[1]`.
    pub a_scale: DeviceSlice,
    /// `[n, k]`, E4M3.
    pub b: DeviceSlice,
    /// Scale of `b`, fp32 `[1]`.
    pub b_scale: DeviceSlice,
    /// `[n]`
    pub bias: Option<DeviceSlice>,
    /// See [`Matmul::base`].
    pub base: Option<DeviceSlice>,
    /// `[m, n]`, not in an 8-bit format.
    pub c: DeviceSlice,
    /// Rows of `c`.
    pub m: usize,
    /// Columns of `c`.
    pub n: usize,
    /// The dimension of the sum.
    pub k: usize,
}

impl ScaledMatmul {
    pub(crate) fn shape(&self) -> MatmulShape {
        MatmulShape { layout: MatmulLayout::Nt, m: self.m, n: self.n, k: self.k }
    }

    /// See [`Matmul::base_apart`].
    pub(crate) fn base_apart(&self) -> Option<DeviceSlice> {
        self.base.filter(|base| *base != self.c)
    }
}

impl Kernel for ScaledMatmul {
    const NAME: &'static str = "scaled_matmul";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let Self { m, n, k, .. } = *self;
        operands![
            self; Read a[m * k], Read b[n * k] Float8E4m3, Read bias[n], ReadInPlace base[m * n], Write c[m * n];
            Read a_scale[1] Float32, Read b_scale[1] Float32
        ]
    }

    fn flops(&self) -> f64 {
        self.shape().flops()
    }

    fn flops_per_s(&self, rates: &Rates) -> f64 {
        rates.fp8_flops(self.m.min(self.n).min(self.k))
    }

    fn check_shape(&self) -> Result<()> {
        if !self.a.dtype().is_fp8() {
            return Err(refused(Self::NAME, format!("a is {}, no format of 8 bits", self.a.dtype())));
        }
        if let Some(dim) = [self.m, self.n, self.k].into_iter().find(|dim| !dim.is_multiple_of(FP8_GRAIN)) {
            return Err(refused(Self::NAME, format!("a dimension of {dim} is no multiple of {FP8_GRAIN}")));
        }
        let is_odd = |operand: &&Operand| operand.slice.is_some_and(|slice| !slice.addr().is_multiple_of(FP8_ALIGN_BYTES));
        match self.operands().as_ref().iter().find(is_odd) {
            None => Ok(()),
            Some(operand) => Err(refused(Self::NAME, format!("{} begins at no multiple of {FP8_ALIGN_BYTES} bytes", operand.name))),
        }
    }

    /// The common format of the result and of its addends.
    fn float_format(&self) -> Result<Dtype> {
        let dtype = self.c.dtype();
        match [self.bias, self.base].into_iter().flatten().find(|added| added.dtype() != dtype) {
            None => Ok(dtype),
            Some(added) => Err(Error::Unsupported(format!("{} of {dtype} that adds {}", Self::NAME, added.dtype()))),
        }
    }
}

/// Column sums: `dbias[c] (+)= sum over rows of dout[r,c]`.
#[derive(Clone, Copy, Debug)]
pub struct BiasBackward {
    /// `[rows, cols]`
    pub dout: DeviceSlice,
    /// `[cols]`
    pub dbias: DeviceSlice,
    /// Adds to `dbias`.
    pub accumulate: bool,
}

impl Kernel for BiasBackward {
    const NAME: &'static str = "bias_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let cols = self.dbias.elems();
        operands![self; Read dout[rows(self.dout, cols) * cols]; Write dbias[cols]]
    }
}
