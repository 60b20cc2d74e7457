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

/// How long sums of products are computed that a library wants to split by an algorithm with possibly wrong results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LongSums {
    /// By the library, without split sums: as all sums before this choice existed.
    Library,
    /// The library computes slices of the sum, and a kernel adds them.
    Slices,
}

impl LongSums {
    /// Terms of the shortest sum that is cut into slices, as short as the shortest measured sum that the library wanted to split. An H200
    /// multiplies 576 x 576 x 8,192 numbers of bfloat16 in 19 us in slices, and in 195 us at once.
    #[cfg(any(feature = "cuda", test))]
    const TERMS_MIN: usize = 8_192;
    /// Terms from which on the library wanted to split most measured sums whose tiles are fewer than processors. Of shorter sums it splits
    /// few.
    const EXPECTED_TERMS_MIN: usize = 16_384;

    /// Whether a sum of `k` terms is cut into slices if the library wants to split it.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn slices(self, k: usize) -> bool {
        self == Self::Slices && k >= Self::TERMS_MIN
    }

    /// Bytes of two slices of fp32 sums, which are written and read, and of the result in `dtype`, if a library is expected to split the
    /// sums of a product: cuBLASLt does so where tiles of the result are fewer than processors.
    fn expected_bytes(MatmulShape { m, n, k, .. }: MatmulShape, dtype: Dtype) -> f64 {
        let tiles = m.div_ceil(TILE) * n.div_ceil(TILE);
        let per_elem = 2 * 2 * Dtype::Float32.bytes() + dtype.bytes();
        if k >= Self::EXPECTED_TERMS_MIN && tiles < PROCESSORS { (m * n * per_elem) as f64 } else { 0.0 }
    }
}

/// Rows and columns of the result that a processor of a GPU computes at once.
const TILE: usize = 128;
/// Processors of an H100 and an H200.
const PROCESSORS: usize = 132;

/// The first way of a product that is tried. Tests begin with later ones, which are rare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FirstWay {
    #[default]
    Whole,
    Slices,
    Widened,
}

/// How a product is computed whose factors a library multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ProductWay {
    /// The library computes the product at once.
    Whole,
    /// The library computes this number of slices of the sum over `k`, and a kernel adds them in fp32.
    Slices(usize),
    /// The 8-bit factors are widened to bfloat16, because the library has no algorithm for them.
    Widened,
}

impl ProductWay {
    fn is_whole(&self) -> bool {
        *self == Self::Whole
    }
}

/// The algorithm that cuBLASLt chose for the products of one shape. If it computes them in parts, that of the first part.
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
    #[serde(skip_serializing_if = "ProductWay::is_whole")]
    pub way: ProductWay,
}

impl ProductAlgorithm {
    /// A line about a product that is computed in another format than the requested one, by `library`.
    pub(crate) fn note(&self, library: &str) -> Option<String> {
        let MatmulShape { m, n, k, .. } = self.shape;
        (self.way == ProductWay::Widened)
            .then(|| format!("fp8: the product {m} x {n} x {k} of {} in bfloat16: {library} has no algorithm for it", self.dtype))
    }
}

impl fmt::Display for ProductAlgorithm {
    /// For example `algorithm 71 in 4 parts for 8 x 16 x 32 (Tn) on bfloat16`, followed by `of 32 experts` for grouped products, and by the
    /// way unless it is [`ProductWay::Whole`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MatmulShape { layout, m, n, k } = self.shape;
        let parts = if self.split_k > 1 { format!(" in {} parts", self.split_k) } else { String::new() };
        write!(f, "algorithm {}{parts} for {m} x {n} x {k} ({layout:?}) on {}", self.algorithm, self.dtype)?;
        if let Some(experts) = self.experts {
            write!(f, " of {experts} experts")?;
        }
        match self.way {
            ProductWay::Whole => Ok(()),
            ProductWay::Slices(slices) => write!(f, " in {slices} slices"),
            ProductWay::Widened => write!(f, " widened to bfloat16"),
        }
    }
}

/// A product before it is launched, so that a device can choose how to compute it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProductRequest {
    pub shape: MatmulShape,
    /// Formats of both factors and of the result.
    pub formats: [Dtype; 3],
    /// Whether a bias is added.
    pub bias: bool,
}

/// `c = a * b (+ bias over columns) (+ base)`, fp32 accumulation over k in ascending order, rounded once. The result has the format of the
/// factors, or without a bias also fp32.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    pub shape: MatmulShape,
    /// `m * k` elements, or the whole rows of a matrix with a pitch.
    pub a: DeviceSlice,
    /// Elements between the beginnings of two stored rows of `a`; `None`: its rows are contiguous.
    pub a_pitch: Option<usize>,
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
        Self { shape, a, a_pitch: None, b, bias: None, base: None, c }
    }

    /// Reads stored rows of `a` that begin `pitch` elements apart.
    pub(crate) fn with_pitch(self, pitch: usize) -> Self {
        Self { a_pitch: Some(pitch), ..self }
    }

    /// Stored rows of `a`, and elements of each.
    fn a_rows(&self) -> [usize; 2] {
        let MatmulShape { layout, m, k, .. } = self.shape;
        if layout == MatmulLayout::Tn { [k, m] } else { [m, k] }
    }

    /// Elements between the beginnings of two stored rows of `a`.
    pub(crate) fn pitch(&self) -> usize {
        self.a_pitch.unwrap_or(self.a_rows()[1])
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
        operands![self; Read a[self.a_rows()[0] * self.pitch()], Read b[k * n], Read bias[n], ReadInPlace base[m * n], Write c[m * n]]
    }

    /// Bytes between the rows of `a` are not read.
    fn bytes(&self) -> f64 {
        let [rows, cols] = self.a_rows();
        let between = rows * self.pitch().saturating_sub(cols) * self.a.dtype().bytes();
        self.operands().as_ref().iter().map(Operand::traffic).sum::<f64>() - between as f64
    }

    fn check_shape(&self) -> Result<()> {
        let ([_, cols], pitch) = (self.a_rows(), self.pitch());
        if pitch >= cols {
            return Ok(());
        }
        Err(refused(Self::NAME, format!("rows of {cols} elements of a that begin {pitch} apart")))
    }

    /// The format of the factors.
    fn float_format(&self) -> Result<Dtype> {
        let (dtype, result) = (self.a.dtype(), self.c.dtype());
        let two = |[(first, one), (second, other)]: [(&str, Dtype); 2]| {
            Err(Error::Unsupported(format!("{} of two formats, {first} of {one} and {second} of {other}", Self::NAME)))
        };
        match (self.bias, self.base) {
            _ if self.b.dtype() != dtype => two([("a", dtype), ("b", self.b.dtype())]),
            (Some(bias), _) if bias.dtype() != dtype => two([("a", dtype), ("bias", bias.dtype())]),
            (_, Some(base)) if base.dtype() != result => two([("base", base.dtype()), ("c", result)]),
            (None, _) if result == Dtype::Float32 => Ok(dtype),
            _ if result != dtype => two([("a", dtype), ("c", result)]),
            _ => Ok(dtype),
        }
    }

    fn flops(&self) -> f64 {
        self.shape.flops()
    }

    fn flops_per_s(&self, rates: &Rates) -> f64 {
        let MatmulShape { m, n, k, .. } = self.shape;
        rates.matmul_flops(m.min(n).min(k))
    }

    fn bytes_after(&self) -> f64 {
        LongSums::expected_bytes(self.shape, self.c.dtype())
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

    fn bytes_after(&self) -> f64 {
        LongSums::expected_bytes(self.shape(), self.c.dtype())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_few_tiles_and_many_terms_are_expected_in_slices() {
        let bytes = |(m, n, k)| LongSums::expected_bytes(MatmulShape { layout: MatmulLayout::Tn, m, n, k }, Dtype::Bfloat16);
        assert_eq!(bytes((896, 896, 65_536)), (896 * 896 * 18) as f64);
        // Enough tiles for all processors, and a short sum.
        assert_eq!([bytes((1536, 1536, 65_536)), bytes((896, 896, 8192))], [0.0; 2]);
        assert!([LongSums::Slices, LongSums::Library].map(|sums| sums.slices(16_384)) == [true, false]);
    }

    #[test]
    fn products_in_parts_are_named_in_logs() {
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 896, n: 896, k: 65_536 };
        let by = |way| ProductAlgorithm { shape, experts: None, dtype: Dtype::Float8E5m2, algorithm: 66, split_k: 1, passed_over: 0, way };
        let note = by(ProductWay::Widened).note("cuBLASLt 130100");
        let line = "fp8: the product 896 x 896 x 65536 of float8e5m2 in bfloat16: cuBLASLt 130100 has no algorithm for it";
        assert_eq!(note.as_deref(), Some(line));
        assert!([ProductWay::Whole, ProductWay::Slices(2)].map(|way| by(way).note("")).iter().all(Option::is_none));
        let json = |way| serde_json::to_value(by(way)).unwrap();
        assert_eq!((json(ProductWay::Slices(2))["way"]["slices"].as_i64(), json(ProductWay::Whole).get("way")), (Some(2), None));
        assert!(by(ProductWay::Slices(2)).to_string().ends_with("(Nt) on float8e5m2 in 2 slices"));
    }
}
