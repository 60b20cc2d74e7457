//! Parts of attention by products: batched products, and the softmax of a tile of scores that lies in memory.

use super::attention::AttentionShape;
use super::product::{MatmulLayout, MatmulShape};
use crate::device::kernel::{Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::hardware::rates::Rates;

/// Matrices of one size at equal distances.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StridedMatrices {
    /// Memory from the first element of the first matrix to the last element of the last one.
    pub memory: DeviceSlice,
    /// Elements between the beginnings of two rows.
    pub pitch: usize,
    /// Elements between the beginnings of two matrices.
    pub stride: usize,
}

impl From<StridedMatrices> for Option<DeviceSlice> {
    fn from(matrices: StridedMatrices) -> Self {
        Some(matrices.memory)
    }
}

impl StridedMatrices {
    /// `count` matrices of `rows` and `cols` that begin at element `first` of `x`.
    ///
    /// # Panics
    /// If the matrices exceed `x`.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn of(x: DeviceSlice, first: usize, [rows, cols, count]: [usize; 3], [pitch, stride]: [usize; 2]) -> Self {
        let one = Self { memory: x, pitch, stride };
        Self { memory: x.slice(first, one.span([rows, cols, count])), ..one }
    }

    /// Elements from the first to the last.
    fn span(&self, [rows, cols, count]: [usize; 3]) -> usize {
        if rows * cols * count == 0 { 0 } else { (count - 1) * self.stride + (rows - 1) * self.pitch + cols }
    }

    /// Whether rows of `cols` lie apart.
    fn separates(&self, cols: usize) -> bool {
        cols <= self.pitch
    }
}

/// `c[i] = a[i] * b[i] (+ c[i])` for each of several matrices, with fp32 sums. The result has the format of the factors, or fp32.
#[derive(Clone, Copy, Debug)]
pub struct BatchedMatmul {
    /// Shape of each product.
    pub shape: MatmulShape,
    /// Number of products.
    pub count: usize,
    pub a: StridedMatrices,
    pub b: StridedMatrices,
    /// Matrices of the result; elements between their rows are not accessed.
    pub c: StridedMatrices,
    /// Adds to `c`.
    pub accumulate: bool,
}

impl BatchedMatmul {
    /// Rows and columns of a, b and c as they are stored.
    pub(crate) fn stored(&self) -> [[usize; 2]; 3] {
        let MatmulShape { layout, m, n, k } = self.shape;
        match layout {
            MatmulLayout::Nt => [[m, k], [n, k], [m, n]],
            MatmulLayout::Nn => [[m, k], [k, n], [m, n]],
            MatmulLayout::Tn => [[k, m], [k, n], [m, n]],
        }
    }
}

impl Kernel for BatchedMatmul {
    const NAME: &'static str = "batched_matmul";

    fn check_shape(&self) -> Result<()> {
        let cols = self.stored().map(|[_, cols]| cols);
        let separate = [self.a, self.b, self.c].iter().zip(cols).all(|(matrices, cols)| matrices.separates(cols));
        if separate && self.count > 0 {
            return Ok(());
        }
        Err(refused(Self::NAME, format!("{} products {:?} in rows of {cols:?} columns that overlap", self.count, self.shape)))
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let [a, b, c] = self.stored();
        let span = |matrices: &StridedMatrices, [rows, cols]: [usize; 2]| matrices.span([rows, cols, self.count]);
        operands![self; Read a[span(&self.a, a)], Read b[span(&self.b, b)], Update c[span(&self.c, c)]]
    }

    fn bytes(&self) -> f64 {
        let [a, b, c] = self.stored().map(|[rows, cols]| (rows * cols * self.count) as f64);
        let written = if self.accumulate { 2.0 } else { 1.0 } * self.c.memory.dtype().bytes() as f64;
        (a + b) * self.a.memory.dtype().bytes() as f64 + c * written
    }

    fn flops(&self) -> f64 {
        self.shape.flops() * self.count as f64
    }

    fn flops_per_s(&self, rates: &Rates) -> f64 {
        let MatmulShape { m, n, k, .. } = self.shape;
        rates.matmul_flops(m.min(n).min(k))
    }

    fn float_format(&self) -> Result<Dtype> {
        let [a, b, c] = [self.a, self.b, self.c].map(|matrices| matrices.memory.dtype());
        if a == b && (c == a || c == Dtype::Float32) {
            return Ok(a);
        }
        Err(Error::Unsupported(format!("{} of {a} and {b} into {c}", Self::NAME)))
    }
}

/// The tile of scores of some queries of some heads, fp32 or in another format `[matrices, rows, pitch]`.
///
/// Matrix `i` is that of query head `(kv_head + l) * group + member + i / lanes` of sequence `sequence`, where `l = i % lanes` and `group` is
/// the number of query heads of a key head. With `across_sequences` the lanes are sequences instead of key heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreTile {
    pub sequence: usize,
    pub kv_head: usize,
    /// First query head of each key head.
    pub member: usize,
    /// Query heads of each key head.
    pub members: usize,
    /// Key heads, or sequences.
    pub lanes: usize,
    pub across_sequences: bool,
    /// First query, and number of queries.
    pub query: usize,
    pub rows: usize,
    /// First key, and number of keys; the last key is that of the last query.
    pub key: usize,
    pub keys: usize,
    /// Columns between the beginnings of two rows: `keys`, rounded up to a multiple of [`ScoreTile::GRAIN`].
    pub pitch: usize,
}

impl ScoreTile {
    /// The pitch of scores is a multiple of this number, so that rows of a 16-bit format begin at multiples of 16 bytes.
    pub(crate) const GRAIN: usize = 8;

    /// Number of matrices.
    pub(crate) fn matrices(&self) -> usize {
        self.members * self.lanes
    }

    /// Elements of all matrices.
    pub(crate) fn elems(&self) -> usize {
        self.matrices() * self.rows * self.pitch
    }

    /// Sequence and query head of matrix `i`.
    pub(crate) fn place(&self, shape: &AttentionShape, i: usize) -> (usize, usize) {
        let (member, lane) = (self.member + i / self.lanes, i % self.lanes);
        let (sequence, kv_head) = if self.across_sequences { (lane, 0) } else { (0, lane) };
        (self.sequence + sequence, (self.kv_head + kv_head) * (shape.heads / shape.kv_heads) + member)
    }

    /// Scores that some query sees, without those that windows hide.
    fn seen(&self) -> f64 {
        (self.matrices() * self.rows) as f64 * (self.keys as f64 - (self.rows as f64 - 1.0) / 2.0)
    }

    /// An error of `kernel` unless the tile lies inside the shape.
    fn check(&self, kernel: &'static str, shape: &AttentionShape) -> Result<()> {
        shape.check(kernel)?;
        let [sequences, kv_heads] = if self.across_sequences { [self.lanes, 1] } else { [1, self.lanes] };
        let fits = self.sequence + sequences <= shape.batch
            && self.kv_head + kv_heads <= shape.kv_heads
            && self.member + self.members <= shape.heads / shape.kv_heads
            && self.matrices() * self.rows > 0
            && self.query + self.rows <= shape.seq_length
            && self.key + self.keys == self.query + self.rows
            && self.keys <= self.pitch
            && self.pitch.is_multiple_of(Self::GRAIN);
        let sees = self.key <= shape.window.map_or(0, |window| (self.query + 1).saturating_sub(window));
        if fits && sees { Ok(()) } else { Err(refused(kernel, format!("{self:?} is no tile of {shape:?}"))) }
    }
}

/// Turns the raw scores of a tile into probabilities, 0 for hidden keys, and writes each query's log-sum-exp.
#[derive(Clone, Copy, Debug)]
pub struct MaskedSoftmax {
    /// Products of queries and keys, fp32.
    pub scores: DeviceSlice,
    pub probabilities: DeviceSlice,
    /// Log-sum-exp of the scaled scores, fp32 `[batch, heads, seq_length]`; other queries keep theirs.
    pub lse: DeviceSlice,
    pub tile: ScoreTile,
    /// Sizes of the whole attention.
    pub shape: AttentionShape,
}

impl Kernel for MaskedSoftmax {
    const NAME: &'static str = "masked_softmax";

    fn check_shape(&self) -> Result<()> {
        self.tile.check(Self::NAME, &self.shape)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (n, rows) = (self.tile.elems(), self.shape.tokens() * self.shape.heads);
        operands![self; Read scores[n] Float32, Write probabilities[n]; Update lse[rows] Float32]
    }

    fn bytes(&self) -> f64 {
        self.tile.seen() * 4.0 + self.probabilities.bytes() as f64
    }
}

/// Computes probabilities of a tile again, and turns the gradients of the probabilities into gradients of the raw scores. Both are 0 for
/// hidden keys.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxBackward {
    /// Products of queries and keys, fp32.
    pub scores: DeviceSlice,
    /// Gradients of the probabilities, fp32: products of the output's gradients and the values.
    pub dprobabilities: DeviceSlice,
    /// Gradient of attention's output, `[T, heads * head_dim]`.
    pub dout: DeviceSlice,
    /// Attention's output, `[T, heads * head_dim]`.
    pub out: DeviceSlice,
    /// See [`MaskedSoftmax::lse`].
    pub lse: DeviceSlice,
    pub probabilities: DeviceSlice,
    /// Gradients of the raw scores.
    pub dscores: DeviceSlice,
    pub tile: ScoreTile,
    /// Sizes of the whole attention.
    pub shape: AttentionShape,
}

impl Kernel for SoftmaxBackward {
    const NAME: &'static str = "softmax_backward";

    fn check_shape(&self) -> Result<()> {
        self.tile.check(Self::NAME, &self.shape)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (n, rows, out_elems) = (self.tile.elems(), self.shape.tokens() * self.shape.heads, self.shape.tokens() * self.shape.out_cols());
        operands![
            self;
            Read scores[n] Float32, Read dprobabilities[n] Float32, Write probabilities[n], Write dscores[n],
            Read dout[out_elems], Read out[out_elems];
            Read lse[rows] Float32,
        ]
    }

    fn bytes(&self) -> f64 {
        let of_outputs = 2 * self.tile.matrices() * self.tile.rows * self.shape.head_dim * self.out.dtype().bytes();
        self.tile.seen() * 8.0 + 2.0 * self.probabilities.bytes() as f64 + of_outputs as f64
    }
}

/// Rounds fp32 sums of gradients, contiguous `[count, rows, cols]`, into columns of the rows of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct RoundSums {
    pub sums: DeviceSlice,
    pub out: StridedMatrices,
    /// Rows, columns and number of matrices.
    pub size: [usize; 3],
}

impl Kernel for RoundSums {
    const NAME: &'static str = "round_sums";

    fn check_shape(&self) -> Result<()> {
        let [_, cols, count] = self.size;
        if self.out.separates(cols) && cols * count > 0 {
            return Ok(());
        }
        Err(refused(Self::NAME, format!("{count} matrices of {cols} columns in rows of {}", self.out.pitch)))
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        operands![self; Read sums[self.size.iter().product()] Float32, Update out[self.out.span(self.size)]]
    }

    fn bytes(&self) -> f64 {
        self.sums.elems() as f64 * (4 + self.out.memory.dtype().bytes()) as f64
    }
}
