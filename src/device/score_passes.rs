//! Attention by products: both passes as products of whole blocks and the softmax of the scores between them, on any device that has these
//! kernels. See [`score_course`](super::score_course) for the order of blocks and heads, which decides the bits.

use super::score_course::{KeyGroup, ScoreBytes, ScoreCourse};
use super::{
    AttentionBackward, AttentionForward, AttentionShape, BatchedMatmul, DeviceSlice, Kernel, Launch, MaskedSoftmax, MatmulLayout,
    MatmulShape, RoundSums, ScoreTile, SoftmaxBackward, StridedMatrices, Zero,
};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use std::ops::Range;

/// The kernels of attention by products.
pub(crate) trait ScoreKernels:
    Launch<BatchedMatmul> + Launch<MaskedSoftmax> + Launch<SoftmaxBackward> + Launch<RoundSums> + Launch<Zero>
{
}
impl<D> ScoreKernels for D where
    D: Launch<BatchedMatmul> + Launch<MaskedSoftmax> + Launch<SoftmaxBackward> + Launch<RoundSums> + Launch<Zero>
{
}

/// Bytes of the workspace of both passes.
pub(crate) fn workspace_bytes(shape: &AttentionShape, dtype: Dtype, block: Option<usize>) -> usize {
    ScoreCourse::new(shape, dtype, block).bytes().total()
}

/// Enqueues [`AttentionForward`]. `workspace` has at least [`workspace_bytes`].
///
/// # Errors
/// `Unsupported` for rows of several documents, which are gathered before; errors of the device.
pub(crate) fn forward(dev: &mut impl ScoreKernels, kernel: &AttentionForward, workspace: DeviceSlice) -> Result<()> {
    let AttentionForward { qkv, documents, out, lse, shape } = *kernel;
    let dtype = kernel.float_format()?;
    one_document(documents)?;
    let course = ScoreCourse::new(&shape, dtype, None);
    let memory = ScoreMemory { course, workspace, dtype };
    for (group, queries) in course.key_groups().flat_map(|group| course.query_blocks().map(move |queries| (group, queries))) {
        for tile in course.tiles(group, &queries) {
            let (scores, probabilities) = (memory.wide(0, &tile), memory.narrow(0, &tile));
            let part = TileParts { shape, course, tile };
            part.scores(dev, [qkv, qkv], [HeadKind::Query, HeadKind::Key], scores)?;
            dev.launch(MaskedSoftmax { scores, probabilities, lse, tile, shape })?;
            part.by_keys(dev, probabilities, (qkv, HeadKind::Value), (out, HeadKind::Output))?;
        }
    }
    Ok(())
}

/// Enqueues [`AttentionBackward`]. `workspace` has at least [`workspace_bytes`] for the same block.
///
/// # Errors
/// The errors of [`forward`].
pub(crate) fn backward(dev: &mut impl ScoreKernels, kernel: &AttentionBackward, workspace: DeviceSlice) -> Result<()> {
    let AttentionBackward { dout, qkv, documents, out, lse, dqkv, shape, block } = *kernel;
    let dtype = kernel.float_format()?;
    one_document(documents)?;
    let course = ScoreCourse::new(&shape, dtype, block);
    let memory = ScoreMemory { course, workspace, dtype };
    for group in course.key_groups() {
        let [dkeys, dvalues] = [0, 1].map(|which| memory.sums(which));
        dev.launch(Zero { x: dkeys })?;
        dev.launch(Zero { x: dvalues })?;
        for tile in course.query_blocks().flat_map(|queries| course.tiles(group, &queries)) {
            let [scores, dprobabilities] = [0, 1].map(|which| memory.wide(which, &tile));
            let [probabilities, dscores] = [0, 1].map(|which| memory.narrow(which, &tile));
            let part = TileParts { shape, course, tile };
            part.scores(dev, [qkv, qkv], [HeadKind::Query, HeadKind::Key], scores)?;
            part.scores(dev, [dout, qkv], [HeadKind::Output, HeadKind::Value], dprobabilities)?;
            dev.launch(SoftmaxBackward { scores, dprobabilities, dout, out, lse, probabilities, dscores, tile, shape })?;
            part.by_keys(dev, dscores, (qkv, HeadKind::Key), (dqkv, HeadKind::Query))?;
            part.by_queries(dev, dscores, (qkv, HeadKind::Query), dkeys)?;
            part.by_queries(dev, probabilities, (dout, HeadKind::Output), dvalues)?;
        }
        for (sums, kind) in [(dkeys, HeadKind::Key), (dvalues, HeadKind::Value)] {
            let heads = LaneHeads { shape, course, group, kind };
            let out = heads.rows(dqkv, 0, 0..shape.seq_length);
            dev.launch(RoundSums { sums, out, size: [shape.seq_length, shape.head_dim, course.lanes] })?;
        }
    }
    Ok(())
}

fn one_document(documents: Option<DeviceSlice>) -> Result<()> {
    match documents {
        None => Ok(()),
        Some(_) => Err(Error::Unsupported("attention by products over rows of several documents that were not gathered".into())),
    }
}

/// Arrays of the workspace.
struct ScoreMemory {
    course: ScoreCourse,
    workspace: DeviceSlice,
    dtype: Dtype,
}

impl ScoreMemory {
    /// Raw scores (0) or gradients of probabilities (1) of a tile.
    fn wide(&self, which: usize, tile: &ScoreTile) -> DeviceSlice {
        let ScoreBytes { wide, .. } = self.course.bytes();
        self.workspace.view(which * wide, tile.elems(), Dtype::Float32)
    }

    /// Probabilities (0) or gradients of scores (1) of a tile.
    fn narrow(&self, which: usize, tile: &ScoreTile) -> DeviceSlice {
        let ScoreBytes { wide, narrow, .. } = self.course.bytes();
        self.workspace.view(2 * wide + which * narrow, tile.elems(), self.dtype)
    }

    /// Sums of the gradients of keys (0) or values (1), `[lanes, seq_length, head_dim]`.
    fn sums(&self, which: usize) -> DeviceSlice {
        let (ScoreBytes { wide, narrow, sums }, elems) = (self.course.bytes(), self.course.sums_elems());
        self.workspace.view(2 * (wide + narrow) + which * sums, elems, Dtype::Float32)
    }
}

/// The place of heads in rows of tokens.
#[derive(Clone, Copy, PartialEq)]
enum HeadKind {
    /// In rows of `qkv`.
    Query,
    Key,
    Value,
    /// In rows of attention's output.
    Output,
}

/// The lanes of a group of keys, in a matrix of tokens.
struct LaneHeads {
    shape: AttentionShape,
    course: ScoreCourse,
    group: KeyGroup,
    kind: HeadKind,
}

impl LaneHeads {
    /// Rows `tokens` of the sequence of query head `member` of each key head, or of the key head itself.
    fn rows(&self, x: DeviceSlice, member: usize, tokens: Range<usize>) -> StridedMatrices {
        let AttentionShape { seq_length, heads, kv_heads, head_dim: d, .. } = self.shape;
        let sharing = heads / kv_heads;
        let KeyGroup { sequence, kv_head } = self.group;
        let (pitch, head, apart) = match self.kind {
            HeadKind::Query => (self.shape.qkv_cols(), kv_head * sharing + member, sharing),
            HeadKind::Output => (self.shape.out_cols(), kv_head * sharing + member, sharing),
            HeadKind::Key => (self.shape.qkv_cols(), heads + kv_head, 1),
            HeadKind::Value => (self.shape.qkv_cols(), heads + kv_heads + kv_head, 1),
        };
        let first = (sequence * seq_length + tokens.start) * pitch + head * d;
        let stride = self.course.stride(seq_length * pitch, apart * d);
        StridedMatrices::of(x, first, [tokens.len(), d, self.course.lanes], [pitch, stride])
    }
}

/// The products of a tile of scores.
struct TileParts {
    shape: AttentionShape,
    course: ScoreCourse,
    tile: ScoreTile,
}

impl TileParts {
    fn rows(&self, (x, kind): (DeviceSlice, HeadKind), member: usize) -> StridedMatrices {
        let ScoreTile { sequence, kv_head, member: first, query, rows, key, keys, .. } = self.tile;
        let group = KeyGroup { sequence, kv_head };
        let heads = LaneHeads { shape: self.shape, course: self.course, group, kind };
        let tokens = if matches!(kind, HeadKind::Key | HeadKind::Value) { key..key + keys } else { query..query + rows };
        heads.rows(x, first + member, tokens)
    }

    /// Matrices of the scores of query head `member` of each key head.
    fn of_member(&self, scores: DeviceSlice, member: usize) -> StridedMatrices {
        let ScoreTile { rows, keys, pitch, lanes, .. } = self.tile;
        let matrix = rows * pitch;
        StridedMatrices::of(scores, member * lanes * matrix, [rows, keys, lanes], [pitch, matrix])
    }

    fn multiply(
        &self,
        dev: &mut impl ScoreKernels,
        (layout, [m, n, k]): (MatmulLayout, [usize; 3]),
        [a, b, c]: [StridedMatrices; 3],
        accumulate: bool,
    ) -> Result<()> {
        let shape = MatmulShape { layout, m, n, k };
        dev.launch(BatchedMatmul { shape, count: self.tile.lanes, a, b, c, accumulate })
    }

    /// `scores = left right^T`: a row for each query, a column for each key.
    fn scores(
        &self,
        dev: &mut impl ScoreKernels,
        [left, right]: [DeviceSlice; 2],
        [of_queries, of_keys]: [HeadKind; 2],
        scores: DeviceSlice,
    ) -> Result<()> {
        let size = [self.tile.rows, self.tile.keys, self.shape.head_dim];
        (0..self.tile.members).try_for_each(|member| {
            let (a, b) = (self.rows((left, of_queries), member), self.rows((right, of_keys), member));
            self.multiply(dev, (MatmulLayout::Nt, size), [a, b, self.of_member(scores, member)], false)
        })
    }

    /// `out = scores of_keys`: a row for each query.
    fn by_keys(
        &self,
        dev: &mut impl ScoreKernels,
        scores: DeviceSlice,
        of_keys: (DeviceSlice, HeadKind),
        out: (DeviceSlice, HeadKind),
    ) -> Result<()> {
        let size = [self.tile.rows, self.shape.head_dim, self.tile.keys];
        (0..self.tile.members).try_for_each(|member| {
            let matrices = [self.of_member(scores, member), self.rows(of_keys, member), self.rows(out, member)];
            self.multiply(dev, (MatmulLayout::Nn, size), matrices, false)
        })
    }

    /// `sums += scores^T of_queries`: a row for each key.
    fn by_queries(
        &self,
        dev: &mut impl ScoreKernels,
        scores: DeviceSlice,
        of_queries: (DeviceSlice, HeadKind),
        sums: DeviceSlice,
    ) -> Result<()> {
        let (ScoreTile { rows, key, keys, lanes, .. }, AttentionShape { seq_length, head_dim: d, .. }) = (self.tile, self.shape);
        let sums = StridedMatrices::of(sums, key * d, [keys, d, lanes], [d, seq_length * d]);
        (0..self.tile.members).try_for_each(|member| {
            let matrices = [self.of_member(scores, member), self.rows(of_queries, member), sums];
            self.multiply(dev, (MatmulLayout::Tn, [keys, d, rows]), matrices, true)
        })
    }
}
