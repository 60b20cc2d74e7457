//! Memory that a device takes for itself, in addition to allocations. The planner adds these sizes without a device, and the devices use
//! the same sizes.

use super::{Attention, AttentionShape, AttentionWay, DeltaShape};
use crate::dtype::Dtype;
use crate::host::pinned;
use crate::memory::{MemorySpace, RingShape};

/// The kind of processor that computes. It does not determine the place of memory: some GPUs have no memory of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The host's own cores.
    Cpu,
    Gpu,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryClass {
    pub name: &'static str,
    pub space: MemorySpace,
    pub bytes: usize,
}

impl DeviceKind {
    /// Granularity of the sizes of a [`RingShape`], in bytes.
    pub(crate) fn ring_grain_bytes(self) -> usize {
        match self {
            Self::Cpu => pinned::RING_GRAIN_BYTES,
            Self::Gpu => gpu::RING_CHUNK_BYTES,
        }
    }

    /// Bytes of physical memory for `elems` elements, which are mapped periodically if there is a `ring`.
    pub(crate) fn flat_bytes(self, elems: usize, dtype: Dtype, ring: Option<RingShape>) -> usize {
        let bytes = elems * dtype.bytes();
        let Some(RingShape { ringed_elems, period_elems }) = ring else { return bytes };
        let whole = if self == Self::Gpu { bytes.next_multiple_of(gpu::RING_CHUNK_BYTES) } else { bytes };
        whole - (ringed_elems - period_elems) * dtype.bytes()
    }

    /// Bytes that the driver of a GPU adds to an allocation of `bytes` in device memory.
    pub(crate) fn rounding_bytes(self, bytes: usize) -> usize {
        if self == Self::Gpu { bytes.next_multiple_of(gpu::PAGE_BYTES) - bytes } else { 0 }
    }

    /// Host memory in which a GPU's driver stores the page list of `pinned` bytes of host memory.
    pub(crate) fn page_list_bytes(self, pinned: usize) -> usize {
        if self == Self::Gpu { pinned / gpu::PINNED_PER_LISTED } else { 0 }
    }

    /// The device's own memory for layers with attention `shapes`, and for delta rules of shape `delta`; with `separates_documents`, rows may
    /// hold several documents.
    pub fn own_memory(
        self,
        attention: Attention,
        shapes: &[AttentionShape],
        delta: Option<&DeltaShape>,
        separates_documents: bool,
    ) -> Vec<MemoryClass> {
        if self == Self::Cpu {
            return Vec::new();
        }
        let class = |name, space, bytes| MemoryClass { name, space, bytes };
        let of_attention: Vec<_> = shapes.iter().map(|shape| gpu::attention_bytes(attention, shape, separates_documents)).collect();
        let [workspace, scores, packed] = [0, 1, 2].map(|class| of_attention.iter().map(|bytes| bytes[class]).max().unwrap_or(0));
        vec![
            class("matrix workspace", MemorySpace::Device, gpu::MATMUL_WORKSPACE_BYTES),
            class("attention workspace", MemorySpace::Device, workspace),
            class("scores of attention", MemorySpace::Device, scores),
            class("packed documents", MemorySpace::Device, packed),
            class("kernel scratch", MemorySpace::Device, gpu::scratch_bytes(delta)),
            class("context, libraries", MemorySpace::Device, gpu::CONTEXT_BYTES),
            class("process, driver", MemorySpace::Host, gpu::PROCESS_BYTES),
        ]
    }
}

impl Attention {
    /// Queries and keys of a block of cuDNN's backward pass; `None` if there is only one block, or if cuDNN does not compute this shape.
    pub(crate) fn block(self, shape: &AttentionShape) -> Option<usize> {
        let is_cut = self.way(shape) == AttentionWay::Fused && self.cudnn() == Some(true);
        let block = gpu::attention_block(shape, is_cut);
        Some(block).filter(|block| *block < shape.seq_length)
    }
}

/// Sizes of an NVIDIA GPU.
pub(crate) mod gpu {
    use super::{Attention, AttentionShape, AttentionWay, DeltaShape};
    use crate::device::CHUNK;
    use crate::device::documents::{batch_block, batch_shapes, most_tokens};
    use crate::device::score_course::ScoreCourse;
    use crate::dtype::Dtype;

    /// Remaining device memory (0.6 GiB on an H200): the CUDA context; the code of cuBLASLt and cuDNN, which is loaded kernel by kernel;
    /// rounding of each allocation to 2 MiB by the driver, except for the many arrays of resident states.
    pub(super) const CONTEXT_BYTES: usize = 1 << 30;
    /// Remaining host memory: the driver's, the libraries' and this program's own.
    pub(super) const PROCESS_BYTES: usize = 1 << 30;
    /// Ratio of pinned host memory to the driver's page list for each GPU, which takes 32 bytes for each page of 4 KiB (two H200, 182 GiB
    /// pinned: 2.5 GiB).
    pub(super) const PINNED_PER_LISTED: usize = 4096 / 32;
    /// Chunk size of rings: a multiple of the GPU's 2 MiB pages, large enough that many gigabytes need few mappings.
    pub const RING_CHUNK_BYTES: usize = 32 << 20;
    /// Page size of managed memory, and granularity of allocations.
    pub(crate) const PAGE_BYTES: usize = 2 << 20;
    /// cuBLASLt's workspace for partial sums of split products; NVIDIA recommends 32 MiB or more for Hopper.
    pub(crate) const MATMUL_WORKSPACE_BYTES: usize = 64 << 20;
    /// Initial scratch for partial sums of this program's kernels, and for the parts of products that cuBLASLt does not compute as a whole. It grows at the first call of a kernel that needs more: norms of more
    /// than 31,000 channels, micro-batches of more than 8 million tokens.
    pub(crate) const SCRATCH_BYTES: usize = 64 << 20;

    /// Bytes of the scratch memory, which delta rules of shape `delta` also use.
    pub(crate) fn scratch_bytes(delta: Option<&DeltaShape>) -> usize {
        delta.map_or(0, delta_scratch_bytes).max(SCRATCH_BYTES)
    }

    /// Bytes of the scratch memory of a delta rule's backward pass, which suffices for the forward pass.
    pub(crate) fn delta_scratch_bytes(shape: &DeltaShape) -> usize {
        DeltaScratch::new(shape).total()
    }

    /// Maximum scratch bytes of a delta rule for which all heads are computed at once; one key head may exceed it. 4 x 4096 tokens of 32
    /// value heads with 128 channels take 1.5 GiB.
    const DELTA_BYTES: usize = 2 << 30;

    /// Bytes of the arrays in the scratch memory of a delta rule, each a multiple of 256, for a group of heads. Heads are independent, so a
    /// group changes no bit.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct DeltaScratch {
        /// Key heads of a group; divides the shape's.
        pub(crate) key_heads: usize,
        /// Place of each token in its document, int32 `[T, 2]`.
        pub(crate) spans: usize,
        /// Queries and keys of unit length, bfloat16 `[2, key_heads, T, width]`.
        pub(crate) units: usize,
        /// fp32 `[2, key_heads, T]`
        pub(crate) lengths: usize,
        /// Decays and corrections, fp32 `[2, value heads, T]`.
        pub(crate) gates: usize,
        /// Each of four matrices with a row for each token, bfloat16 `[value heads, T, width]`.
        pub(crate) rows: usize,
        /// Each of two matrices with a square for each chunk, bfloat16 `[value heads, T, 64]`.
        pub(crate) squares: usize,
        /// States, and equally many gradients, bfloat16 `[value heads, T / 64, width, width]`.
        pub(crate) states: usize,
        /// Sums over the value heads of a key head, fp32 `[2, key_heads, T, width]`.
        pub(crate) vectors: usize,
        /// Sums over tokens, fp32 `[2, T / 64, all value heads]`.
        pub(crate) sums: usize,
    }

    impl DeltaScratch {
        pub(crate) fn new(shape: &DeltaShape) -> Self {
            let divisors = (1..=shape.key_heads).rev().filter(|heads| shape.key_heads.is_multiple_of(*heads));
            let mut groups = divisors.map(|key_heads| Self::of_group(shape, key_heads));
            groups.find(|group| group.total() <= DELTA_BYTES).unwrap_or_else(|| Self::of_group(shape, 1))
        }

        fn of_group(shape: &DeltaShape, key_heads: usize) -> Self {
            let (tokens, heads, width) = (shape.tokens(), key_heads * shape.value_heads / shape.key_heads, shape.width);
            let chunks = tokens.div_ceil(CHUNK);
            let bytes = |elems: usize, dtype: Dtype| (elems * dtype.bytes()).next_multiple_of(256);
            let [narrow, wide] = [Dtype::Bfloat16, Dtype::Float32].map(|dtype| move |elems| bytes(elems, dtype));
            Self {
                key_heads,
                spans: bytes(2 * tokens, Dtype::Int32),
                units: narrow(2 * key_heads * tokens * width),
                lengths: wide(2 * key_heads * tokens),
                gates: wide(2 * heads * tokens),
                rows: narrow(heads * tokens * width),
                squares: narrow(heads * tokens * CHUNK),
                states: narrow(heads * chunks * width * width),
                vectors: if heads > key_heads { wide(2 * key_heads * tokens * width) } else { 0 },
                sums: wide(2 * chunks * shape.value_heads),
            }
        }

        pub(crate) fn total(&self) -> usize {
            let Self { spans, units, lengths, gates, rows, squares, states, vectors, sums, .. } = self;
            spans + units + lengths + gates + 4 * rows + 2 * squares + 2 * states + vectors + sums
        }
    }

    /// Memory of NCCL: buffers for peers, and its kernels.
    pub(crate) const NCCL_BYTES: usize = 1 << 30;

    /// Maximum bytes of cuDNN's workspace for a part of attention's backward pass; the smallest part may exceed it. On an H200, Llama-8B's
    /// step of 4 x 4096 tokens takes 0.15 % longer in two parts and 0.9 % longer in four, so the limit admits its 4.25 GiB in one part.
    const ATTENTION_PART_BYTES: usize = 9 << 29;
    /// Log-sum-exps in 16 bytes. cuDNN requires the log-sum-exps of each part to begin at a multiple of 16 bytes.
    const ALIGNED_LSE: usize = 4;

    /// Maximum bytes of one key head's scores for which a sequence is one block. Sequences of 32,768 tokens of Llama-8B are one block.
    const WHOLE_SCORES_BYTES: u128 = 8 << 30;
    /// Maximum bytes of the scores of a block; the smallest block may exceed it. Two heads then fit into a part, or two key heads of four
    /// query heads each. cuDNN computes dq with one thread block for 128 queries of a head, and reaches its full speed with several thread
    /// blocks on each multiprocessor.
    const BLOCK_SCORES_BYTES: usize = 2 << 30;
    /// Queries of the smallest block.
    const LEAST_BLOCK: usize = 128;

    /// Queries and keys of a block of attention's backward pass: the whole sequence, unless the scores of one key head exceed the limit;
    /// then a power of two. Sums over blocks change bits, so the size follows from the shape alone, not from available memory. For rows of
    /// several documents, the size applies to each document.
    pub(crate) fn attention_block(shape: &AttentionShape, deterministic: bool) -> usize {
        let (of_a_pair, n) = (2 * shape.heads / shape.kv_heads, shape.seq_length);
        if !deterministic || of_a_pair as u128 * n as u128 * n as u128 <= WHOLE_SCORES_BYTES {
            return n;
        }
        let pairs = BLOCK_SCORES_BYTES / of_a_pair;
        let most = pairs.isqrt();
        // A quarter more than the limit, because otherwise the shortest window would halve the block.
        let behind = |window| pairs / 4 * 5 / (most + window);
        1 << shape.hiding_window().map_or(most, behind).clamp(LEAST_BLOCK, most.max(LEAST_BLOCK)).ilog2()
    }

    /// Bytes of cuDNN's workspace, of the scores of products, and of packed documents, for layers of attention `shape`.
    pub(super) fn attention_bytes(attention: Attention, shape: &AttentionShape, separates_documents: bool) -> [usize; 3] {
        let of_parts = |batch: &_| match (attention.way(shape), attention.cudnn()) {
            (AttentionWay::Products, _) => [0, ScoreCourse::new(batch, Dtype::Bfloat16, None).bytes().total()],
            (AttentionWay::Fused, Some(deterministic)) => {
                let block = batch_block(shape, attention_block(shape, deterministic), batch);
                [attention_workspace_bytes(&attention_part(batch, block, deterministic), block, deterministic), 0]
            }
            _ => [0, 0],
        };
        if attention == Attention::Plain {
            return [0; 3];
        }
        if !separates_documents {
            let [workspace, scores] = of_parts(shape);
            return [workspace, scores, 0];
        }
        let largest = |class: usize| batch_shapes(shape).map(|batch| of_parts(&batch)[class]).max().unwrap_or(0);
        [largest(0), largest(1), document_scratch(shape).total() + document_table_bytes(shape)]
    }

    /// The part of attention's backward pass that is computed at once, so that its workspace is bounded. A part has as many sequences as
    /// divide the batch, or as many heads of one sequence with their key heads. Each part is computed in blocks of `block` queries and
    /// keys. No sum extends over parts, so they do not change bits.
    pub(crate) fn attention_part(shape: &AttentionShape, block: usize, deterministic: bool) -> AttentionShape {
        let divisors = |n: usize| (1..=n).rev().filter(move |part| n.is_multiple_of(*part));
        let sharing = shape.heads / shape.kv_heads;
        let sequences = divisors(shape.batch).map(|batch| AttentionShape { batch, ..*shape });
        let heads = divisors(shape.kv_heads).map(|kv_heads| AttentionShape { batch: 1, heads: sharing * kv_heads, kv_heads, ..*shape });
        let aligned = |part: &AttentionShape| part == shape || (part.tokens() * part.heads).is_multiple_of(ALIGNED_LSE);
        let parts: Vec<_> = sequences.chain(heads).filter(aligned).collect();
        let fits = |part: &&AttentionShape| cudnn_bytes(part, block, deterministic) <= ATTENTION_PART_BYTES;
        *parts.iter().find(fits).unwrap_or(&parts[parts.len() - 1])
    }

    /// Bytes of the arrays of gathered documents, each aligned to 256 bytes: `qkv` and its gradient; attention's output and its gradient;
    /// the log-sum-exp.
    pub(crate) struct DocumentScratch {
        pub(crate) qkv: usize,
        pub(crate) out: usize,
        pub(crate) lse: usize,
    }

    impl DocumentScratch {
        pub(crate) fn total(&self) -> usize {
            2 * (self.qkv + self.out) + self.lse
        }
    }

    pub(crate) fn document_scratch(shape: &AttentionShape) -> DocumentScratch {
        let (tokens, narrow) = (most_tokens(shape), Dtype::Bfloat16.bytes());
        let [qkv, out, lse] =
            [tokens * shape.qkv_cols() * narrow, tokens * shape.out_cols() * narrow, tokens * shape.heads * Dtype::Float32.bytes()]
                .map(|bytes| bytes.next_multiple_of(256));
        DocumentScratch { qkv, out, lse }
    }

    /// Bytes of the table with the first token and the number of tokens of each document; there are at most as many documents as tokens.
    pub(crate) fn document_table_bytes(shape: &AttentionShape) -> usize {
        2 * shape.tokens() * Dtype::Int32.bytes()
    }

    /// Bytes of the workspace for the backward pass of `shape` in blocks of `block` queries and keys, which suffices for both passes:
    /// cuDNN's workspace, followed by the sums over blocks. All layers share it.
    pub(crate) fn attention_workspace_bytes(shape: &AttentionShape, block: usize, deterministic: bool) -> usize {
        let sums = if block < shape.seq_length { key_gradient_sums(shape) + query_gradient_sums(shape, block) } else { 0 };
        cudnn_bytes(shape, block, deterministic) + sums * Dtype::Float32.bytes()
    }

    /// Workspace bytes of cuDNN 9.19: delta; dq in fp32, or tiles of scores when deterministic; dk and dv of every query head when query
    /// heads share key heads.
    fn cudnn_bytes(shape: &AttentionShape, block: usize, deterministic: bool) -> usize {
        let heads = shape.batch * shape.heads;
        let queries = shape.longest_block(block);
        let n = shape.most_keys(block);
        let vectors = |tokens: usize| 4 * heads * tokens * shape.head_dim;
        // The only size that grows with the square of the sequence. It is capped at a size that no machine has, so that sums cannot
        // overflow.
        let scores = 2 * heads as u128 * queries.next_multiple_of(64) as u128 * n.next_multiple_of(128) as u128;
        let delta = (4 * heads * queries).next_multiple_of(256);
        let dq = if deterministic { scores.min(1 << 56) as usize } else { vectors(queries).next_multiple_of(256) };
        let each = if shape.heads == shape.kv_heads { 0 } else { 2 * (vectors(n) / 2).next_multiple_of(128) };
        delta + dq + each + 256
    }

    /// Elements of the sums over blocks of key and value gradients.
    pub(crate) fn key_gradient_sums(part: &AttentionShape) -> usize {
        part.tokens() * 2 * part.kv_heads * part.head_dim
    }

    /// Elements of the sums over blocks of keys of query gradients, for one block of queries.
    pub(crate) fn query_gradient_sums(part: &AttentionShape, block: usize) -> usize {
        part.batch * part.longest_block(block) * part.heads * part.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape =
        AttentionShape { batch: 1, seq_length: 4096, heads: 32, kv_heads: 8, head_dim: 128, scale: 0.1, window: None, softcap: None };

    /// (sequences, heads, key heads) of a part.
    fn part(batch: usize, seq_length: usize, heads: usize, kv_heads: usize) -> (usize, usize, usize) {
        let shape = AttentionShape { batch, seq_length, heads, kv_heads, ..SHAPE };
        let part = gpu::attention_part(&shape, gpu::attention_block(&shape, true), true);
        (part.batch, part.heads, part.kv_heads)
    }

    #[test]
    fn queries_are_cut_into_blocks_where_their_scores_take_too_much_of_one_key_head() {
        let shape = |seq_length, heads, kv_heads| AttentionShape { seq_length, heads, kv_heads, ..SHAPE };
        let block = |seq_length, heads, kv_heads| gpu::attention_block(&shape(seq_length, heads, kv_heads), true);
        // Two bytes for each score; four query heads for each key head, then one, then a million.
        assert_eq!([4096, 32_768, 32_769, 131_072, 1 << 40].map(|n| block(n, 32, 8)), [4096, 32_768, 16_384, 16_384, 16_384]);
        assert_eq!([65_536, 131_072].map(|n| block(n, 32, 32)), [65_536, 32_768]);
        assert_eq!(block(1 << 40, 1_000_000, 1), 128);
        assert_eq!(gpu::attention_block(&shape(131_072, 32, 8), false), 131_072);
        // A window adds keys to those of the block.
        let windowed = |window| gpu::attention_block(&AttentionShape { window: Some(window), ..shape(131_072, 32, 8) }, true);
        assert_eq!([128, 4096, 16_384, 65_536, 131_072].map(windowed), [16_384, 16_384, 8192, 4096, 16_384]);
        let part = AttentionShape { heads: 4, kv_heads: 1, ..shape(131_072, 4, 1) };
        let sums = 131_072 * 2 * 128 * 4 + 16_384 * 4 * 128 * 4;
        assert_eq!(
            gpu::attention_workspace_bytes(&part, 16_384, true),
            (4 * 4 * 16_384) + 2 * 4 * (1 << 28) + 2 * (2 * 4 * 16_384 * 128) + 256 + sums
        );
        // A remainder of one query extends its block by one tile of queries.
        let rest = AttentionShape { seq_length: 2 * 8192 + 1, ..part };
        let (scores, each, sums) = (2 * 4 * (8192 + 64) * (8192 + 128), 2 * 2 * 4 * 8193 * 128, (16_385 * 2 + 8193 * 4) * 128 * 4);
        let delta = (4 * 4 * 8193usize).next_multiple_of(256);
        assert_eq!(gpu::attention_workspace_bytes(&rest, 8192, true), delta + scores + each + 256 + sums);
        let long =
            |shapes: &[AttentionShape]| DeviceKind::Gpu.own_memory(Attention::Cudnn { deterministic: true }, shapes, None, false)[1].bytes;
        let two = AttentionShape { heads: 8, kv_heads: 2, ..part };
        assert_eq!(long(&[shape(131_072, 32, 8)]), gpu::attention_workspace_bytes(&two, 16_384, true));
        // Layers of both kinds share the larger workspace.
        let windowed = AttentionShape { window: Some(4096), ..shape(131_072, 32, 8) };
        let mixed = long(&[windowed, shape(131_072, 32, 8)]);
        assert_eq!((mixed, mixed), (long(&[shape(131_072, 32, 8), windowed]), long(&[windowed]).max(long(&[shape(131_072, 32, 8)]))));
    }

    #[test]
    fn attention_goes_back_in_parts_that_bound_its_workspace() {
        assert_eq!(part(4, 4096, 32, 8), (4, 32, 8));
        assert_eq!(part(8, 4096, 64, 8), (2, 64, 8));
        assert_eq!(part(6, 4096, 32, 8), (3, 32, 8));
        assert_eq!(part(2, 16384, 32, 8), (1, 8, 2));
        // One group of heads is the smallest part, whatever its workspace; two blocks of two groups fit, whatever their sums take.
        assert_eq!((part(1, 32_768, 32, 8), part(1, 131_072, 32, 8), part(1, 1 << 20, 32, 8)), ((1, 4, 1), (1, 8, 2), (1, 8, 2)));
        assert_eq!(part(1, 458_752, 20, 20), (1, 2, 2));
    }

    /// Shapes of `tests/gpu/attention_parts.rs`, which would not test parts if these shapes were computed at once.
    #[test]
    fn shapes_that_are_compared_with_a_head_alone_go_in_parts_of_sequences_and_of_heads() {
        let part = |batch, seq_length| {
            let shape = AttentionShape { batch, seq_length, kv_heads: 4, head_dim: 64, ..SHAPE };
            let part = gpu::attention_part(&shape, gpu::attention_block(&shape, true), true);
            (part.batch, part.heads, part.kv_heads)
        };
        assert_eq!([part(2, 8192), part(1, 12_288)], [(1, 32, 4), (1, 8, 1)]);
    }

    #[test]
    fn parts_begin_where_cudnn_reads_whole_vectors() {
        // A second sequence of three heads would begin at byte 12, a second head at byte 8.
        assert_eq!(part(2, 30_001, 3, 3), (2, 3, 3));
        assert_eq!(part(1, 60_002, 2, 2), (1, 2, 2));
    }

    #[test]
    fn heads_of_delta_rules_are_computed_in_groups_that_fit_the_scratch_memory() {
        let shape = DeltaShape { batch: 4, seq_length: 4096, key_heads: 16, value_heads: 32, width: 128 };
        let groups = |batch| gpu::DeltaScratch::new(&DeltaShape { batch, ..shape });
        assert_eq!([1, 4, 8, 64, 1 << 20].map(|batch| groups(batch).key_heads), [16, 16, 8, 1, 1]);
        assert_eq!(groups(8).total(), gpu::scratch_bytes(Some(&DeltaShape { batch: 8, ..shape })));
        // U, W, the corrections and their gradients; R and P; states and their gradients; sums over value heads; units; gates and lengths.
        let (token_heads, tokens) = (32 * 16384, 16384);
        let each = 4 * 256 + 2 * 128 + 2 * 512 + 512 + 256 + 8 + 4;
        assert_eq!(groups(4).total(), token_heads * each + 8 * tokens + 2 * 256 * 32 * 4);
        assert_eq!(gpu::scratch_bytes(None), gpu::SCRATCH_BYTES);
    }
}
