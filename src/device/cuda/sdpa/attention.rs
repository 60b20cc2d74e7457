//! Causal attention and its gradients as graphs that cuDNN's fused engines recognise.
//!
//! The engines match the pattern of nodes, so the graphs contain nodes that compute nothing new. Formats matter as well: a plan for an
//! output in fp32 compiles, and writes garbage.

use super::blocks::BlockSize;
use super::graph::{AttentionTensor, Extent, Graph, Id, Operation, Storage, Tensor};
use super::sys::{DataType, Fold, Mode};
use crate::device::AttentionShape;

struct GraphBuilder {
    graph: Graph,
    /// Format of q, k, v, of their gradients, and of the tensors multiplied with them.
    dtype: DataType,
    scale: f32,
    window: Option<usize>,
    batch: i64,
    /// Tokens of a sequence in memory.
    seq: i64,
    /// Number of queries and of the keys that they see. If `is_causal`, the last keys belong to the same tokens as the queries.
    queries: i64,
    keys: i64,
    is_causal: bool,
    heads: i64,
    kv_heads: i64,
    width: i64,
    /// Columns, over all heads, of the packed queries, keys and values, and of the output.
    qkv_columns: i64,
    out_columns: i64,
}

/// Dims and strides of a virtual tensor; cuDNN reads only the dims.
#[derive(Clone, Copy)]
struct Shape(Extent, Extent);

impl GraphBuilder {
    /// A builder for a block of queries and keys of each sequence of `part`, which is a part of `shape`.
    fn new(shape: &AttentionShape, part: &AttentionShape, BlockSize { queries, keys, is_causal }: BlockSize, dtype: DataType) -> Self {
        let AttentionShape { batch, seq_length, heads, kv_heads, head_dim, scale, window, softcap: _ } = *part;
        let [qkv_columns, out_columns] = [shape.qkv_cols(), shape.out_cols()].map(|cols| cols as i64);
        let [batch, seq, heads, kv_heads, width] = [batch, seq_length, heads, kv_heads, head_dim].map(|size| size as i64);
        // A window that reaches from the last query to the first key hides nothing.
        let window = window.filter(|window| *window < keys);
        let (queries, keys) = (queries as i64, keys as i64);
        let graph = Graph::default();
        Self { graph, dtype, scale, window, batch, seq, queries, keys, is_causal, heads, kv_heads, width, qkv_columns, out_columns }
    }

    /// One score for each query and key.
    fn scores(&self) -> Shape {
        dense([self.batch, self.heads, self.queries, self.keys])
    }

    /// One number for each query.
    fn rows(&self) -> Shape {
        dense([self.batch, self.heads, self.queries, 1])
    }

    /// A vector for each query head of each of `tokens`.
    fn vectors(&self, tokens: i64) -> Shape {
        dense([self.batch, self.heads, tokens, self.width])
    }

    /// The transpose of the scores, with the same memory layout.
    fn turned(&self) -> Shape {
        let Shape([batch, heads, queries, keys], [in_batch, in_head, row, column]) = self.scores();
        Shape([batch, heads, keys, queries], [in_batch, in_head, column, row])
    }

    /// Number of tokens of a caller's tensor: of queries or of keys.
    fn tokens(&self, role: AttentionTensor) -> i64 {
        use AttentionTensor::{Dk, Dv, K, V};
        if matches!(role, K | V | Dk | Dv) { self.keys } else { self.queries }
    }

    fn tensor(&mut self, dtype: DataType, Shape(dims, strides): Shape, place: Storage) -> Id {
        self.graph.tensor(Tensor { dtype, dims, strides, place })
    }

    fn value(&mut self, value: f32) -> Id {
        self.tensor(DataType::F32, dense([1; 4]), Storage::Value(value))
    }

    /// One of the caller's tensors; each row of `columns` is a token.
    fn caller(&mut self, role: AttentionTensor, heads: i64, columns: i64) -> Id {
        let dims = [self.batch, heads, self.tokens(role), self.width];
        self.tensor(self.dtype, Shape(dims, [self.seq * columns, self.width, columns, 1]), Storage::Caller(role))
    }

    /// The transpose of a caller's tensor, as the second factor of a product.
    fn transposed(&mut self, role: AttentionTensor, heads: i64, columns: i64) -> Id {
        let dims = [self.batch, heads, self.width, self.tokens(role)];
        self.tensor(self.dtype, Shape(dims, [self.seq * columns, self.width, 1, columns]), Storage::Caller(role))
    }

    fn lse(&mut self) -> Id {
        let Shape(dims, _) = self.rows();
        let strides = [self.heads * self.seq, self.seq, 1, 1];
        self.tensor(DataType::F32, Shape(dims, strides), Storage::Caller(AttentionTensor::Lse))
    }

    /// `mode(x, b)` as a virtual fp32 tensor.
    fn pointwise(&mut self, mode: Mode, x: Id, b: Option<Id>, shape: Shape) -> Id {
        let y = self.tensor(DataType::F32, shape, Storage::Virtual);
        self.pointwise_into(mode, x, b, y)
    }

    fn pointwise_into(&mut self, mode: Mode, x: Id, b: Option<Id>, y: Id) -> Id {
        self.graph.node(Operation::Pointwise { mode, axis: None, b, t: None }, x, y)
    }

    fn reduce(&mut self, fold: Fold, x: Id) -> Id {
        let y = self.tensor(DataType::F32, self.rows(), Storage::Virtual);
        self.graph.node(Operation::Reduce(fold), x, y)
    }

    fn product(&mut self, a: Id, b: Id, c: Id) -> Id {
        self.graph.node(Operation::Matmul { b }, a, c)
    }

    fn index(&mut self, axis: i64, x: Id) -> Id {
        let y = self.tensor(DataType::I32, self.scores(), Storage::Virtual);
        self.graph.node(Operation::Pointwise { mode: Mode::Index, axis: Some(axis), b: None, t: None }, x, y)
    }

    /// `x` where `mode(left, right)` holds, minus infinity elsewhere.
    fn keep(&mut self, x: Id, mode: Mode, left: Id, right: Id) -> Id {
        let holds = self.tensor(DataType::Bool, self.scores(), Storage::Virtual);
        self.pointwise_into(mode, left, Some(right), holds);
        let fill = self.value(f32::NEG_INFINITY);
        let y = self.tensor(DataType::F32, self.scores(), Storage::Virtual);
        self.graph.node(Operation::Pointwise { mode: Mode::Select, axis: None, b: Some(fill), t: Some(holds) }, x, y)
    }

    /// Index of each query's own key: the row plus the number of keys before the first query.
    fn diagonal(&mut self, x: Id) -> Id {
        let row = self.index(2, x);
        if self.keys == self.queries {
            return row;
        }
        // The engines recognise this pattern as an alignment: both numbers, in this order.
        let (keys, queries) = (self.integer(self.keys), self.integer(self.queries));
        let below = self.shifted(Mode::Add, row, keys);
        self.shifted(Mode::Sub, below, queries)
    }

    fn integer(&mut self, value: i64) -> Id {
        self.tensor(DataType::I32, dense([1; 4]), Storage::Integer(value as i32))
    }

    fn shifted(&mut self, mode: Mode, index: Id, by: Id) -> Id {
        let y = self.tensor(DataType::I32, self.scores(), Storage::Virtual);
        self.pointwise_into(mode, index, Some(by), y)
    }

    /// Masks later keys, then keys that are a window or more behind the query.
    fn masked(&mut self, mut x: Id) -> Id {
        if !self.is_causal {
            return x;
        }
        let (row, column) = (self.diagonal(x), self.index(3, x));
        x = self.keep(x, Mode::CmpGe, row, column);
        if let Some(window) = self.window {
            let (row, column) = (self.index(2, x), self.index(3, x));
            let window = self.value((window as i64 - (self.keys - self.queries)) as f32);
            let end = self.pointwise(Mode::Add, column, Some(window), self.scores());
            x = self.keep(x, Mode::CmpGt, end, row);
        }
        x
    }

    /// `q k^T * scale`
    fn scaled_scores(&mut self, q: Id, k: Id, scale: Id) -> Id {
        let raw = self.tensor(DataType::F32, self.scores(), Storage::Virtual);
        self.product(q, k, raw);
        self.pointwise(Mode::Mul, raw, Some(scale), self.scores())
    }
}

/// Shape of a dense tensor.
fn dense(dims: Extent) -> Shape {
    Shape(dims, [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1])
}

/// Graph of the output and the log-sum-exp, from packed queries, keys and values.
pub(super) fn forward(shape: &AttentionShape, dtype: DataType) -> Graph {
    let all = BlockSize { queries: shape.seq_length, keys: shape.seq_length, is_causal: true };
    let mut b = GraphBuilder::new(shape, shape, all, dtype);
    let (heads, kv_heads, columns) = (b.heads, b.kv_heads, b.qkv_columns);
    let q = b.caller(AttentionTensor::Q, heads, columns);
    let k = b.transposed(AttentionTensor::K, kv_heads, columns);
    let v = b.caller(AttentionTensor::V, kv_heads, columns);
    let out = b.caller(AttentionTensor::Out, heads, b.out_columns);
    let lse = b.lse();

    let scale = b.value(b.scale);
    let scaled = b.scaled_scores(q, k, scale);
    let scores = b.masked(scaled);
    let top = b.reduce(Fold::Max, scores);
    let below = b.pointwise(Mode::Sub, scores, Some(top), b.scores());
    let exp = b.pointwise(Mode::Exp, below, None, b.scores());
    let sum = b.reduce(Fold::Add, exp);
    let log = b.pointwise(Mode::Log, sum, None, b.rows());
    b.pointwise_into(Mode::Add, top, Some(log), lse);
    let p = b.tensor(dtype, b.scores(), Storage::Virtual);
    b.pointwise_into(Mode::Div, exp, Some(sum), p);
    b.product(p, v, out);
    b.graph
}

/// Graph of the packed gradients of queries, keys and values, for the block `size` of each sequence of `part`. With `deterministic`, dq is
/// summed in a fixed order, which takes workspace for every score; otherwise thread blocks add to dq in fp32 as they finish.
pub(super) fn backward(shape: &AttentionShape, part: &AttentionShape, size: BlockSize, dtype: DataType, deterministic: bool) -> Graph {
    let mut b = GraphBuilder::new(shape, part, size, dtype);
    let (heads, kv_heads, columns) = (b.heads, b.kv_heads, b.qkv_columns);
    let q = b.caller(AttentionTensor::Q, heads, columns);
    let k_t = b.transposed(AttentionTensor::K, kv_heads, columns);
    let v_t = b.transposed(AttentionTensor::V, kv_heads, columns);
    let out = b.caller(AttentionTensor::Out, heads, b.out_columns);
    let dout = b.caller(AttentionTensor::Dout, heads, b.out_columns);
    let lse = b.lse();
    let dq = b.caller(AttentionTensor::Dq, heads, columns);

    // Delta: the row sums of dout * out. The product with one takes the place of dropout, which is part of the pattern.
    let products = b.pointwise(Mode::Mul, dout, Some(out), b.vectors(b.queries));
    let sums = b.reduce(Fold::Add, products);
    let one = b.value(1.0);
    let delta = b.tensor(DataType::F32, b.rows(), Storage::Workspace);
    b.pointwise_into(Mode::Mul, sums, Some(one), delta);

    // Recompute the probabilities.
    let scale = b.value(b.scale);
    let scaled = b.scaled_scores(q, k_t, scale);
    let below = b.pointwise(Mode::Sub, scaled, Some(lse), b.scores());
    let scores = b.masked(below);
    let p = b.pointwise(Mode::Exp, scores, None, b.scores());

    // dv = p^T dout
    b.gradient_of_keys(p, dout, AttentionTensor::Dv);

    // ds = p * (dout v^T - delta) * scale
    let dp = b.tensor(DataType::F32, b.scores(), Storage::Virtual);
    b.product(dout, v_t, dp);
    let centred = b.pointwise(Mode::Sub, dp, Some(delta), b.scores());
    let weighted = b.pointwise(Mode::Mul, centred, Some(p), b.scores());
    let ds = b.pointwise(Mode::Mul, weighted, Some(scale), b.scores());

    // dk = ds^T q
    b.gradient_of_keys(ds, q, AttentionTensor::Dk);

    // dq = ds k
    let dims = [b.batch, kv_heads, b.keys, b.width];
    let k = b.tensor(DataType::F32, Shape(dims, [b.seq * columns, b.width, columns, 1]), Storage::Virtual);
    b.graph.node(Operation::Reshape, k_t, k);
    if deterministic {
        b.product(ds, k, dq);
    } else {
        let sum = b.tensor(DataType::F32, b.vectors(b.queries), Storage::Workspace);
        b.product(ds, k, sum);
        b.pointwise_into(Mode::Identity, sum, None, dq);
    }
    b.graph
}

impl GraphBuilder {
    /// `x^T y` for every query head, summed over the query heads that share a key head.
    fn gradient_of_keys(&mut self, x: Id, y: Id, role: AttentionTensor) {
        let x_t = self.tensor(self.dtype, self.turned(), Storage::Virtual);
        self.graph.node(Operation::Reshape, x, x_t);
        let gradient = self.caller(role, self.kv_heads, self.qkv_columns);
        if self.heads == self.kv_heads {
            self.product(x_t, y, gradient);
        } else {
            let each = self.tensor(self.dtype, self.vectors(self.keys), Storage::Virtual);
            self.product(x_t, y, each);
            self.graph.node(Operation::Reduce(Fold::Add), each, gradient);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape {
        batch: 4,
        seq_length: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        scale: 0.088_388_346,
        window: None,
        softcap: None,
    };

    fn nodes(shape: AttentionShape, deterministic: bool) -> [usize; 2] {
        [forward(&shape, DataType::Bf16), whole(&shape, &shape, DataType::Bf16, deterministic)].map(|graph| graph.nodes.len())
    }

    /// A block of `queries` queries, with keys up to the last of them.
    fn block(queries: usize, keys: usize) -> BlockSize {
        BlockSize { queries, keys, is_causal: true }
    }

    /// The backward pass over all queries of `part`.
    fn whole(shape: &AttentionShape, part: &AttentionShape, dtype: DataType, deterministic: bool) -> Graph {
        backward(shape, part, block(shape.seq_length, shape.seq_length), dtype, deterministic)
    }

    /// Dims and strides of a caller's tensor.
    fn caller(graph: &Graph, role: AttentionTensor) -> (Extent, Extent) {
        let tensor = graph.tensors.iter().find(|tensor| tensor.place == Storage::Caller(role)).unwrap();
        (tensor.dims, tensor.strides)
    }

    #[test]
    fn a_block_has_its_queries_and_the_keys_before_them() {
        let part = AttentionShape { batch: 1, heads: 4, kv_heads: 1, ..SHAPE };
        let graph = backward(&SHAPE, &part, block(1024, 3072), DataType::Bf16, true);
        assert_eq!(graph.nodes.len(), 25);
        let before = backward(&SHAPE, &part, BlockSize { is_causal: false, ..block(1024, 3072) }, DataType::Bf16, true);
        // Two indices, their comparison, and the selection.
        assert_eq!(before.nodes.len(), whole(&SHAPE, &part, DataType::Bf16, true).nodes.len() - 4, "nothing is hidden");
        let whole = whole(&SHAPE, &part, DataType::Bf16, true);
        use AttentionTensor::{Dk, Dout, Dq, Dv, K, Lse, Out, Q, V};
        for (role, tokens) in [(Q, 1024), (Out, 1024), (Lse, 1024), (Dout, 1024), (Dq, 1024), (K, 3072), (V, 3072), (Dk, 3072), (Dv, 3072)]
        {
            let ((dims, strides), (whole_dims, whole_strides)) = (caller(&graph, role), caller(&whole, role));
            assert_eq!((dims, strides), (whole_dims.map(|dim| if dim == 4096 { tokens } else { dim }), whole_strides), "{role:?}");
        }
        let numbers: Vec<_> =
            graph.tensors.iter().filter_map(|tensor| if let Storage::Integer(x) = tensor.place { Some(x) } else { None }).collect();
        assert_eq!(numbers, [3072, 1024]);
        // Query `r` sees key `c` of a block while `c + window > r + 2048`.
        let windowed = AttentionShape { window: Some(2500), ..SHAPE };
        let value = |keys: usize, shift: f32| {
            let part = AttentionShape { window: Some(2500), ..part };
            let graph = backward(&windowed, &part, block(1024, keys), DataType::Bf16, true);
            graph.tensors.iter().any(|tensor| tensor.place == Storage::Value(shift))
        };
        assert!(value(3072, 2500.0 - 2048.0) && !value(2048, 2500.0 - 1024.0), "a window that hides nothing is left out");
    }

    #[test]
    fn graphs_have_the_nodes_that_the_engines_know() {
        let mha = AttentionShape { kv_heads: 32, ..SHAPE };
        let windowed = AttentionShape { window: Some(1024), ..SHAPE };
        let wide = AttentionShape { window: Some(4096), ..SHAPE };
        assert_eq!(nodes(SHAPE, false), [14, 24]);
        assert_eq!(nodes(SHAPE, true), [14, 23]);
        assert_eq!(nodes(mha, false), [14, 22]);
        assert_eq!(nodes(windowed, false), [19, 29]);
        assert_eq!(nodes(wide, false), [14, 24]);
    }

    #[test]
    fn every_role_is_bound_once_and_packed_rows_are_strided() {
        let graph = whole(&SHAPE, &SHAPE, DataType::F16, true);
        let callers: Vec<_> = graph.tensors.iter().filter(|tensor| matches!(tensor.place, Storage::Caller(_))).collect();
        assert_eq!(callers.len(), AttentionTensor::COUNT);
        let q = callers.iter().find(|tensor| tensor.place == Storage::Caller(AttentionTensor::Q)).unwrap();
        assert_eq!((q.dims, q.strides), ([4, 32, 4096, 128], [4096 * 6144, 128, 6144, 1]));
        let k = callers.iter().find(|tensor| tensor.place == Storage::Caller(AttentionTensor::K)).unwrap();
        assert_eq!((k.dims, k.strides), ([4, 8, 128, 4096], [4096 * 6144, 128, 1, 6144]));
    }

    #[test]
    fn a_part_has_the_rows_of_the_whole() {
        let part = AttentionShape { batch: 1, heads: 8, kv_heads: 2, ..SHAPE };
        let graph = whole(&SHAPE, &part, DataType::Bf16, true);
        let [q, out] = [AttentionTensor::Q, AttentionTensor::Out].map(|role| caller(&graph, role));
        assert_eq!(q, ([1, 8, 4096, 128], [4096 * 6144, 128, 6144, 1]));
        assert_eq!(out, ([1, 8, 4096, 128], [4096 * 4096, 128, 4096, 1]));
    }
}
