//! What the engine asks of a machine that computes: memory, streams, events and copies ([`Device`]), and the
//! transformer's arithmetic ([`Kernels`]). Static dispatch; one thread (the driver) holds the device and enqueues.
//!
//! Everything enqueued on one [`Stream`] runs in order; streams run concurrently and meet only through events.
//! Nothing here waits for the work it enqueues, except [`Device::synchronize`].

mod arguments;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod footprint;
pub mod sim;

use crate::dtype::Dtype;
use crate::error::Result;
use crate::host::pinned::PinnedSlice;
use crate::memory::{MemorySpace, RingShape};
use crate::optim::adam::AdamConsts;
use crate::trace::{self, Recorder};

pub use footprint::DeviceKind;

/// The queues of a step. A device makes its streams, its lanes and its tracks of the timeline from [`Stream::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Forward, backward, norms and the optimizer of resident buckets.
    Compute = 0,
    /// Gradients leave.
    D2h = 1,
    /// Parameters return.
    H2d = 2,
}

impl Stream {
    /// All streams, in the order of their indices.
    pub const ALL: [Self; 3] = [Self::Compute, Self::D2h, Self::H2d];
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();

    /// Its track of the timeline.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::D2h => "d2h",
            Self::H2d => "h2d",
        }
    }

    /// Whether what it does goes before what others do: copies are short, and the step waits for them.
    pub fn is_urgent(self) -> bool {
        self != Self::Compute
    }

    /// A recorder for each, with room for `trace_spans` spans.
    fn recorders(trace_spans: usize) -> [Recorder; Self::COUNT] {
        Self::ALL.map(|stream| Recorder::new(stream.name(), trace_spans))
    }
}

/// A point in a stream that others can wait for; made by [`Device::event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventId(pub u32);

/// A typed view of device memory: an address that only the device may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    /// Address of the first element on the device.
    pub addr: u64,
    /// Elements.
    pub elems: usize,
    /// Format of each element.
    pub dtype: Dtype,
}

impl DeviceSlice {
    /// The part that starts at element `start` and holds `elems` elements.
    ///
    /// # Panics
    /// If the part reaches outside.
    pub fn slice(self, start: usize, elems: usize) -> Self {
        assert!(start.checked_add(elems).is_some_and(|end| end <= self.elems), "slice {start}+{elems} of {}", self.elems);
        Self { addr: self.addr + (start * self.dtype.bytes()) as u64, elems, dtype: self.dtype }
    }

    /// Size in bytes.
    pub fn bytes(self) -> usize {
        self.elems * self.dtype.bytes()
    }
}

/// What a span of [`Device::prefetch`] is called.
fn prefetch_span(space: MemorySpace) -> &'static str {
    match space {
        MemorySpace::Device => "page_in",
        MemorySpace::Host => "page_out",
    }
}

/// Memory, streams, events and copies. No arithmetic.
pub trait Device {
    /// What this device is, for people: `cpu (AMD EPYC 9B45, 2 threads, avx512)`.
    fn describe(&self) -> String;

    /// The algorithms of all products so far, where a library chooses among several.
    fn product_algorithms(&self) -> Vec<ProductAlgorithm> {
        Vec::new()
    }

    /// Zeroed device memory, aligned to 256 bytes, for the life of the device. Only before step 0.
    ///
    /// # Errors
    /// `Resource` when it does not fit; `name` is in the message.
    fn alloc(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice>;

    /// What was taken so far, by the names that were asked for, and what the device took for itself: names and bytes. Nothing where
    /// nothing is taken.
    fn allocations(&self) -> Vec<(&str, usize)> {
        Vec::new()
    }

    /// [`Device::alloc`] for memory that repeats. Both sizes are whole multiples of [`DeviceKind::ring_grain_bytes`].
    ///
    /// # Errors
    /// As there.
    fn alloc_ring(&mut self, name: &str, elems: usize, dtype: Dtype, shape: RingShape) -> Result<DeviceSlice>;

    /// [`Device::alloc`] in memory that host and device know by one address. It lies on the host, where kernels reach it over the
    /// link.
    ///
    /// # Errors
    /// As there; `Unsupported` where there is no such memory.
    fn alloc_unified(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice>;

    /// On `stream`, moves unified memory to `space`, from where it stays valid for both sides. Nothing moves where page tables are
    /// shared, or memory is.
    fn prefetch(&mut self, stream: Stream, memory: DeviceSlice, space: MemorySpace) -> Result<()>;

    /// Prepares host memory for copies that run beside everything else. Only before step 0.
    ///
    /// # Errors
    /// `Resource` when the system refuses to lock it.
    fn pin(&mut self, memory: PinnedSlice) -> Result<()>;

    /// A new event; it counts as done until it is first recorded.
    fn event(&mut self) -> Result<EventId>;

    /// Marks the present end of `stream`; earlier recordings of the event are forgotten.
    fn record(&mut self, event: EventId, stream: Stream) -> Result<()>;

    /// What is enqueued on `stream` from now on runs after the recorded point.
    fn wait(&mut self, stream: Stream, event: EventId) -> Result<()>;

    /// Whether everything before the recorded point has run. Never blocks.
    fn is_done(&mut self, event: EventId) -> Result<bool>;

    /// Blocks the driver until [`Device::is_done`].
    fn synchronize(&mut self, event: EventId) -> Result<()>;

    /// Called when the driver finds nothing to do: a device whose time only passes here does one operation and says
    /// `true`. A device that works by itself says `false`, and the driver sleeps until it is rung.
    fn idle(&mut self) -> Result<bool>;

    /// The clock of the spans: the timeline's, unless time only passes in the device's imagination.
    fn now_ns(&self) -> u64 {
        trace::now_ns()
    }

    /// Nanoseconds so far in which the compute stream waited for an event of another stream.
    fn waited_ns(&self) -> u64;

    /// Device to pinned host memory; sizes in bytes must agree.
    fn copy_d2h(&mut self, stream: Stream, src: DeviceSlice, dst: PinnedSlice) -> Result<()>;

    /// Pinned host memory to device; sizes in bytes must agree.
    fn copy_h2d(&mut self, stream: Stream, src: PinnedSlice, dst: DeviceSlice) -> Result<()>;

    /// Ends the streams, which must be idle, and returns the spans that they recorded.
    fn finish(&mut self) -> Vec<Recorder>;
}

/// How the two inputs of a [`Kernels::matmul`] are laid out. All matrices are row-major and dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MatmulLayout {
    /// `c[m,n] = a[m,k] * b[n,k]^T`: a linear layer's forward, `b` its weight `[out, in]`.
    Nt,
    /// `c[m,n] = a[m,k] * b[k,n]`: the gradient of a linear layer's input.
    Nn,
    /// `c[m,n] = a[k,m]^T * b[k,n]`: the gradient of a linear layer's weight.
    Tn,
}

impl MatmulLayout {
    /// All layouts.
    pub const ALL: [Self; 3] = [Self::Nt, Self::Nn, Self::Tn];
}

/// Sizes of a [`Kernels::matmul`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct MatmulShape {
    /// Layout of the inputs.
    pub layout: MatmulLayout,
    /// Rows of `c`.
    pub m: usize,
    /// Columns of `c`.
    pub n: usize,
    /// The dimension summed over.
    pub k: usize,
}

/// The algorithm that a library chose for the products of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ProductAlgorithm {
    /// The product.
    #[serde(flatten)]
    pub shape: MatmulShape,
    /// Format of its matrices.
    pub dtype: Dtype,
    /// The library's number for the algorithm.
    pub algorithm: i32,
    /// Parts that the sum over `k` is split into; 0 and 1 are no split.
    pub split_k: i32,
    /// Suggestions before it that were passed over because their results may be wrong.
    pub passed_over: usize,
}

/// Shape of one layer's attention. Rows of `qkv` are tokens (`batch * seq_length`); a row holds `heads` queries, then
/// `kv_heads` keys, then `kv_heads` values, each of `head_dim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq_length: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`. Query head `h` reads key head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Factor on the scores before the softmax.
    pub scale: f32,
    /// A token sees this many tokens, itself included (sliding window); `None`: all before it.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// Tokens: rows of `qkv` and of the output.
    pub fn tokens(&self) -> usize {
        self.batch * self.seq_length
    }

    /// Columns of `qkv`: `(heads + 2 kv_heads) * head_dim`.
    pub fn qkv_cols(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of the attention's output: `heads * head_dim`.
    pub fn out_cols(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// Who computes attention on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// The engine's own kernels: any format and shape.
    Plain,
    /// cuDNN's fused kernels.
    Cudnn {
        /// The backward pass gives the same bits every time.
        deterministic: bool,
    },
}

/// Memory of one call of the optimizer on the device: equally long parts of a resident bucket.
#[derive(Clone, Copy, Debug)]
pub struct AdamArgs {
    /// fp32 parameters, updated.
    pub params: DeviceSlice,
    /// First moments, updated.
    pub m: DeviceSlice,
    /// Second moments, updated.
    pub v: DeviceSlice,
    /// Gradients.
    pub grads: DeviceSlice,
    /// Working weights, written.
    pub out: DeviceSlice,
    /// The step's constants.
    pub consts: AdamConsts,
    /// Factor on the gradients: clip scale over loss scale.
    pub scale: f32,
}

/// The arithmetic of a transformer and of the transfer path. Enqueued on [`Stream::Compute`] unless a stream is named.
///
/// Activations, weights and gradients share one float format per call (the slices' dtype); arithmetic inside a kernel
/// is fp32 and a result is rounded once. Sums have a fixed order, so that results never depend on timing or on the
/// number of threads. `accumulate` adds to what the output holds (rounding once more); otherwise it is overwritten.
#[expect(clippy::too_many_arguments, reason = "a kernel's arguments are its contract; a struct for each would only rename them")]
pub trait Kernels: Device {
    /// Gets ready for attention of this shape and format: what has to be compiled or allocated for it. Only before step 0.
    fn prepare_attention(&mut self, shape: AttentionShape, dtype: Dtype) -> Result<()>;

    /// `out[t,:] = wte[tokens[t],:] + wpe[positions[t],:]`. `tokens` and `positions` int32 `[T]`, `out` `[T, channels]`.
    /// Both are already known to be inside of their tables, here and below.
    fn embed(
        &mut self,
        tokens: DeviceSlice,
        positions: DeviceSlice,
        wte: DeviceSlice,
        wpe: Option<DeviceSlice>,
        out: DeviceSlice,
        channels: usize,
    ) -> Result<()>;

    /// Gradients of [`Kernels::embed`]: rows of `dwte` and `dwpe` sum the rows of `dout` that used them; rows never
    /// used become zero (or stay, with their `accumulate`).
    fn embed_backward(
        &mut self,
        tokens: DeviceSlice,
        positions: DeviceSlice,
        dout: DeviceSlice,
        dwte: DeviceSlice,
        accumulate_wte: bool,
        dwpe: Option<DeviceSlice>,
        accumulate_wpe: bool,
        channels: usize,
    ) -> Result<()>;

    /// `c = a * b (+ bias over columns) (+ base)`, fp32 accumulation over k in ascending order, rounded once. `base` is as
    /// large as `c` and is `c` itself, to accumulate, or does not overlap it: what a residual branch joins.
    fn matmul(
        &mut self,
        shape: MatmulShape,
        a: DeviceSlice,
        b: DeviceSlice,
        bias: Option<DeviceSlice>,
        base: Option<DeviceSlice>,
        c: DeviceSlice,
    ) -> Result<()>;

    /// Column sums: `dbias[c] (+)= sum over rows of dout[r,c]`; the columns are `dbias.elems`.
    fn bias_backward(&mut self, dout: DeviceSlice, dbias: DeviceSlice, accumulate: bool) -> Result<()>;

    /// `out = x * rstd * weight` by rows of `weight.elems`, `rstd = 1/sqrt(mean(x^2) + eps)`, kept as fp32 `[rows]`.
    fn rms_norm(&mut self, x: DeviceSlice, weight: DeviceSlice, eps: f32, out: DeviceSlice, rstd: DeviceSlice) -> Result<()>;

    /// Adds the input's gradient into `dx`; `dweight (+)=` the weight's.
    fn rms_norm_backward(
        &mut self,
        dout: DeviceSlice,
        x: DeviceSlice,
        weight: DeviceSlice,
        rstd: DeviceSlice,
        dx: DeviceSlice,
        dweight: DeviceSlice,
        accumulate: bool,
    ) -> Result<()>;

    /// `out = (x - mean) * rstd * weight + bias` by rows; `stats` fp32 `[rows, 2]` keeps mean and rstd.
    fn layer_norm(
        &mut self,
        x: DeviceSlice,
        weight: DeviceSlice,
        bias: DeviceSlice,
        eps: f32,
        out: DeviceSlice,
        stats: DeviceSlice,
    ) -> Result<()>;

    /// Adds the input's gradient into `dx`; `dweight (+)=` and `dbias (+)=` the parameters'.
    fn layer_norm_backward(
        &mut self,
        dout: DeviceSlice,
        x: DeviceSlice,
        weight: DeviceSlice,
        stats: DeviceSlice,
        dx: DeviceSlice,
        dweight: DeviceSlice,
        dbias: DeviceSlice,
        accumulate: bool,
    ) -> Result<()>;

    /// RMS-normalises every query head with `q_weight` and every key head with `k_weight` (both `[head_dim]`), copies
    /// the values. `rstd` fp32 `[T, heads + kv_heads]`. `out` must not be `qkv`.
    fn qk_norm(
        &mut self,
        qkv: DeviceSlice,
        q_weight: DeviceSlice,
        k_weight: DeviceSlice,
        eps: f32,
        out: DeviceSlice,
        rstd: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()>;

    /// Turns `dqkv` (gradient of `qk_norm`'s output) into the gradient of its input, in place; `dq_weight (+)=`, `dk_weight (+)=`.
    fn qk_norm_backward(
        &mut self,
        dqkv: DeviceSlice,
        qkv: DeviceSlice,
        q_weight: DeviceSlice,
        k_weight: DeviceSlice,
        rstd: DeviceSlice,
        dq_weight: DeviceSlice,
        dk_weight: DeviceSlice,
        accumulate: bool,
        shape: AttentionShape,
    ) -> Result<()>;

    /// Rotates queries and keys in place by `positions`, int32 `[T]`. `table` fp32 `[seq_length, rotary_dim / 2, 2]` holds (cos, sin) by
    /// position; channel `i` pairs with `i + rotary_dim / 2`; channels from `rotary_dim` on pass. `inverse` rotates back: the backward.
    fn rope(
        &mut self,
        qkv: DeviceSlice,
        positions: DeviceSlice,
        table: DeviceSlice,
        rotary_dim: usize,
        inverse: bool,
        shape: AttentionShape,
    ) -> Result<()>;

    /// Causal attention. `out` `[T, heads * head_dim]`; `lse` fp32 `[batch, heads, seq_length]` keeps log-sum-exp of the scaled scores.
    /// `documents` int32 `[T]` is where in its row each token's document begins: it sees nothing before that. They do not descend along
    /// a row. `None`: every row is one document.
    ///
    /// # Errors
    /// `Unsupported` for documents where a library computes attention and has no bounds for them.
    fn attention(
        &mut self,
        qkv: DeviceSlice,
        documents: Option<DeviceSlice>,
        out: DeviceSlice,
        lse: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()>;

    /// `dqkv` is overwritten with the gradient of `qkv`. `documents` as in [`Kernels::attention`].
    fn attention_backward(
        &mut self,
        dout: DeviceSlice,
        qkv: DeviceSlice,
        documents: Option<DeviceSlice>,
        out: DeviceSlice,
        lse: DeviceSlice,
        dqkv: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()>;

    /// `out[r,c] = silu(x[r,c]) * x[r, c + cols]` with `x` `[rows, 2 cols]` (gate, then up).
    fn swiglu(&mut self, gate_up: DeviceSlice, out: DeviceSlice, cols: usize) -> Result<()>;

    /// `dgate_up` is overwritten.
    fn swiglu_backward(&mut self, dout: DeviceSlice, gate_up: DeviceSlice, dgate_up: DeviceSlice, cols: usize) -> Result<()>;

    /// GELU, tanh form (`gelu_new`, `gelu_pytorch_tanh`).
    fn gelu(&mut self, x: DeviceSlice, out: DeviceSlice) -> Result<()>;

    /// `dx` is overwritten; it may be `dout`.
    fn gelu_backward(&mut self, dout: DeviceSlice, x: DeviceSlice, dx: DeviceSlice) -> Result<()>;

    /// Softmax statistics of one tile of logits `[rows, cols]`, whose first column is token `vocab_start`. `stats` fp32
    /// `[rows, 3]` holds running maximum, running sum of exponentials and the target's logit; `first` starts anew. Where the target,
    /// int32 `[rows]`, is negative they are 0, 1 and 0, whatever the logits are: no loss.
    fn cross_entropy_stats(
        &mut self,
        logits: DeviceSlice,
        targets: DeviceSlice,
        stats: DeviceSlice,
        vocab_start: usize,
        cols: usize,
        first: bool,
    ) -> Result<()>;

    /// Turns the tile into `(softmax - onehot(target)) * scale`, in place; a row whose target is negative into zeros.
    fn cross_entropy_grad(
        &mut self,
        logits: DeviceSlice,
        targets: DeviceSlice,
        stats: DeviceSlice,
        vocab_start: usize,
        cols: usize,
        scale: f32,
    ) -> Result<()>;

    /// `loss[0] (+)= scale * sum over rows of (log-sum-exp - target's logit)`, folded in row order in fp64; `loss` is fp32.
    fn cross_entropy_loss(&mut self, stats: DeviceSlice, loss: DeviceSlice, scale: f32, accumulate: bool) -> Result<()>;

    /// Fills with zero.
    fn zero(&mut self, x: DeviceSlice) -> Result<()>;

    /// Converts between float32 and another float format, on `stream`; within one format it copies.
    fn cast(&mut self, stream: Stream, src: DeviceSlice, dst: DeviceSlice) -> Result<()>;

    /// One fp32 sum of squares per block of [`crate::optim::norm::BLOCK`] gradients into `partials`; `nonfinite[0]` (int32)
    /// becomes 1 if any gradient is infinite or NaN and is left alone otherwise. See [`crate::optim::norm`].
    fn grad_norm_partials(&mut self, grads: DeviceSlice, partials: DeviceSlice, nonfinite: DeviceSlice) -> Result<()>;

    /// The optimizer's step on resident memory; gradients and working weights share a format; to the bit what [`crate::optim::adam`] specifies.
    fn adam_step(&mut self, args: AdamArgs) -> Result<()>;

    /// Writes `value` (rounded to the slice's dtype) into element `index`: fault injection, see `inject` in the configuration.
    fn poke(&mut self, x: DeviceSlice, index: usize, value: f32) -> Result<()>;
}
