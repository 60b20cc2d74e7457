//! Attention by cuDNN's fused kernels, through its backend interface. A graph describes the arithmetic of attention ([`attention`]). It is
//! translated ([`graph`]) and compiled ([`plan`]) once for each shape.

mod attention;
mod blocks;
mod compile;
mod graph;
mod plan;
mod sys;

use super::error::{check, failed};
use super::libraries::Libraries;
use crate::device::footprint::gpu::{attention_block, attention_part, attention_workspace_bytes, key_gradient_sums, query_gradient_sums};
use crate::device::{AddKeyGradients, AttentionBackward, AttentionForward, AttentionShape, DeviceSlice, Kernel};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::units::Bytes;
use blocks::{BlockSize, ScoreBlock, blocks};
use compile::make_all;
use cust::memory::DeviceBuffer;
use cust::sys::{CUcontext, CUstream, cuCtxGetCurrent, cuCtxSetCurrent, cuMemsetD8Async, cuStreamSynchronize};
use graph::{AttentionTensor, Graph};
use plan::{Addresses, ExecutionPlan, Target};
use std::ptr;
use std::thread::available_parallelism;
use sys::{Connection, Cudnn, DataType};

/// Maximum plans compiled at once; other ranks of the machine compile at the same time.
const COMPILING_MAX: usize = 8;

/// Limits of cuDNN's kernels on the GPUs of a generation, from the documentation of 9.18.1, "Support Matrix".
struct AttentionLimits {
    /// First generation with these limits, which apply up to the next entry.
    from: i32,
    /// Channels of the widest head with a backward pass.
    head_dim: usize,
    /// First version with a deterministic backward pass, such as 91900 for 9.19.0.
    deterministic: usize,
}

const LIMITS: [AttentionLimits; 3] = [
    // Ampere and Ada.
    AttentionLimits { from: 8, head_dim: 128, deterministic: 0 },
    // Hopper.
    AttentionLimits { from: 9, head_dim: 256, deterministic: 0 },
    // Blackwell; its deterministic backward pass came with 9.18.1 (Transformer Engine, pull request 2584).
    AttentionLimits { from: 10, head_dim: 128, deterministic: 91_801 },
];

impl AttentionLimits {
    fn of(generation: i32) -> &'static Self {
        LIMITS.iter().rev().find(|limits| limits.from <= generation).unwrap_or(&LIMITS[0])
    }

    /// # Errors
    /// `Unsupported` for a version whose backward pass is not reproducible, if `deterministic`.
    fn check_version(&self, version: usize, deterministic: bool) -> Result<()> {
        if deterministic && version < self.deterministic {
            let needed = self.deterministic;
            let helps = "a newer one, `--attention plain`, or `--nondeterministic` does";
            return Err(Error::Unsupported(format!(
                "cuDNN {version} for a repeatable backward pass on this GPU, which needs {needed}: {helps}"
            )));
        }
        Ok(())
    }
}

/// cuDNN, the cached plans, and their shared workspace.
pub(super) struct Sdpa {
    // Fields are dropped in this order: the connections last.
    forward: Vec<ForwardPlan>,
    backward: Vec<BackwardPlans>,
    workspace: DeviceBuffer<u8>,
    connection: Connection,
    /// Connections of the additional compiling threads. They stay open because plans may refer to the connection that compiled them.
    compilers: Vec<Connection>,
    stream: CUstream,
    limits: &'static AttentionLimits,
    deterministic: bool,
}

struct ForwardPlan {
    of: (AttentionShape, Dtype),
    plan: ExecutionPlan,
}

/// The backward pass of one shape with one block size.
struct BackwardPlans {
    of: (AttentionShape, Dtype, usize),
    /// Sequences and heads that are computed at a time, block by block.
    part: AttentionShape,
    blocks: Vec<ScoreBlock>,
    /// One plan for each size of a block.
    plans: Vec<(BlockSize, ExecutionPlan)>,
}

impl Sdpa {
    /// Opens cuDNN for the current context, to run on `stream` of a GPU of `generation`. Without `deterministic`, repeated backward passes
    /// differ in the last bits of dq. With it, they take 8 % more time and 2 bytes of workspace for every score.
    ///
    /// # Errors
    /// `Resource` when a library is missing; `Unsupported` when cuDNN is too old.
    pub(super) fn new(libraries: &Libraries, (stream, generation): (CUstream, i32), deterministic: bool) -> Result<Self> {
        let (cudnn, limits) = (Cudnn::open(libraries)?, AttentionLimits::of(generation));
        limits.check_version(cudnn.version(), deterministic)?;
        let connection = Connection::new(cudnn, stream)?;
        Ok(Self {
            forward: Vec::new(),
            backward: Vec::new(),
            workspace: allocate(0)?,
            connection,
            compilers: Vec::new(),
            stream,
            limits,
            deterministic,
        })
    }

    /// Bytes of the workspace.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.workspace.len()
    }

    /// Version as a number, such as 91900 for 9.19.0.
    pub(super) fn version(&self) -> usize {
        self.connection.cudnn.version()
    }

    /// Default size of the backward pass's blocks, in queries and keys.
    pub(super) fn block(&self, shape: &AttentionShape) -> usize {
        attention_block(shape, self.deterministic)
    }

    /// Compiles the missing plans of both directions for `shapes` and allocates their workspace; each shape comes with the block size of
    /// its backward pass. Each direction and each size of a block needs a plan, and a plan takes half a second of one thread. Call this
    /// before step 0 only, because a step must not wait for it.
    ///
    /// # Errors
    /// `Unsupported` for shapes and formats that cuDNN's kernels do not support.
    pub(super) fn prepare(&mut self, shapes: &[(AttentionShape, usize)], dtype: Dtype) -> Result<()> {
        let forward = shapes.iter().map(|(shape, _)| (*shape, dtype)).collect();
        self.compile_missing(forward, shapes.iter().map(|(shape, block)| (*shape, dtype, *block)).collect())
    }

    fn compile_missing(&mut self, mut forward: Vec<(AttentionShape, Dtype)>, backward: Vec<(AttentionShape, Dtype, usize)>) -> Result<()> {
        forward.retain(|of| self.forward.iter().all(|known| known.of != *of));
        let is_missing = |of: &(AttentionShape, Dtype, usize)| self.backward.iter().all(|known| known.of != *of);
        let mut backward: Vec<_> = backward.into_iter().filter(is_missing).map(|of| BackwardPlans::new(of, self.deterministic)).collect();
        if forward.is_empty() && backward.is_empty() {
            return Ok(());
        }
        let mut wanted = forward.iter().map(|of| WantedGraph::forward(*of, self.limits)).collect::<Result<Vec<_>>>()?;
        for plans in &backward {
            wanted.extend(plans.wanted(self.limits, self.deterministic)?);
        }
        let mut made = self.compile(&wanted)?.into_iter();
        for (of, plan) in forward.into_iter().zip(made.by_ref()) {
            self.forward.push(ForwardPlan { of, plan });
        }
        for plans in &mut backward {
            plans.take(&mut made);
        }
        self.backward.extend(backward);
        let forward = self.forward.iter().map(|forward| forward.plan.workspace_bytes());
        let bytes = forward.chain(self.backward.iter().map(|plans| plans.workspace_bytes(self.deterministic))).max();
        self.reserve(bytes.unwrap_or(0))
    }

    /// Compiles plans on several threads, if available, and returns them in order.
    fn compile(&mut self, wanted: &[WantedGraph]) -> Result<Vec<ExecutionPlan>> {
        let threads = available_parallelism().map_or(1, usize::from).min(COMPILING_MAX).min(wanted.len());
        while self.compilers.len() + 1 < threads {
            self.compilers.push(Connection::new(self.connection.cudnn, self.stream)?);
        }
        let connections = std::iter::once(&self.connection).chain(&self.compilers).take(threads.max(1));
        let mut targets: Vec<_> = connections.map(|connection| Target::Gpu(connection.handle)).collect();
        let mut context = ptr::null_mut();
        // SAFETY: writes one address.
        check(unsafe { cuCtxGetCurrent(&mut context) }, || "find the GPU's context".into())?;
        let context = context as usize;
        // SAFETY: the context outlives this call, which waits for its threads.
        let enter = || check(unsafe { cuCtxSetCurrent(context as CUcontext) }, || "enter the GPU's context".into());
        make_all(&mut targets, wanted, enter, |target, wanted| wanted.build(self.connection.cudnn, target))
    }

    fn forward_plan(&mut self, shape: &AttentionShape, dtype: Dtype) -> &mut ExecutionPlan {
        let known = self.forward.iter_mut().find(|known| known.of == (*shape, dtype));
        &mut known.expect("steps() has prepared it").plan
    }

    fn backward_plans(&mut self, shape: &AttentionShape, block: usize, dtype: Dtype) -> &mut BackwardPlans {
        self.backward.iter_mut().find(|known| known.of == (*shape, dtype, block)).expect("steps() has prepared them")
    }

    fn reserve(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.workspace.len() {
            // Pending operations use the old workspace. SAFETY: the stream is live.
            check(unsafe { cuStreamSynchronize(self.stream) }, || "grow cuDNN's workspace".into())?;
            self.workspace = allocate(0)?;
            self.workspace = allocate(bytes)?;
            self.fill_workspace()?;
        }
        Ok(())
    }

    /// Fills the workspace with bytes that are NaN in every format. cuDNN reads rows of the workspace that it never wrote (9.19,
    /// `fmha_reduce_head`); if such a row ever affected a result, the NaN would show.
    fn fill_workspace(&self) -> Result<()> {
        const NAN_BYTE: u8 = 0xff;
        let (address, bytes) = (self.workspace.as_device_ptr().as_raw(), self.workspace.len());
        // SAFETY: just allocated, of this size.
        check(unsafe { cuMemsetD8Async(address, NAN_BYTE, bytes, self.stream) }, || "fill cuDNN's workspace".into())
    }

    /// The steps of a call in order, in groups; [`Self::sums_behind`] returns the sums after each group.
    ///
    /// # Errors
    /// `Unsupported` for shapes and formats that cuDNN's kernels do not support.
    pub(super) fn steps(&mut self, call: &AttentionCall) -> Result<Vec<Vec<AttentionStep>>> {
        match call.direction {
            Direction::Forward => {
                self.compile_missing(vec![(call.shape, call.dtype)], Vec::new())?;
                Ok(vec![vec![AttentionStep::Forward]])
            }
            Direction::Backward { block, .. } => {
                self.compile_missing(Vec::new(), vec![(call.shape, call.dtype, block)])?;
                Ok(self.backward_plans(&call.shape, block, call.dtype).steps(&call.shape))
            }
        }
    }

    /// Enqueues a step of a call.
    ///
    /// # Errors
    /// `Resource` when an address is not aligned to 16 bytes.
    pub(super) fn enqueue(&mut self, call: &AttentionCall, step: AttentionStep) -> Result<()> {
        let (handle, workspace) = (self.connection.handle, self.workspace.as_device_ptr().as_raw());
        let (plan, addresses) = match (step, call.direction) {
            (AttentionStep::Backward { place, block }, Direction::Backward { block: queries, .. }) => {
                let plans = self.backward_plans(&call.shape, queries, call.dtype);
                let addresses = call.addresses_of(&plans.part, place, &plans.blocks[block]);
                (plans.plan(block), addresses)
            }
            _ => (self.forward_plan(&call.shape, call.dtype), call.addresses),
        };
        // SAFETY: the slices of a call have been checked against its shape, and parts and blocks lie inside it; the workspace is large
        // enough for every plan.
        unsafe { plan.execute(handle, &addresses, workspace) }
    }

    /// Sums over blocks after a group of steps, for each sequence of the step's part; empty if there is only one block.
    pub(super) fn sums_behind(&mut self, call: &AttentionCall, steps: &[AttentionStep]) -> Result<Vec<AddKeyGradients>> {
        let (&[AttentionStep::Backward { place, block }], Direction::Backward { dqkv, block: queries }) = (steps, call.direction) else {
            return Ok(Vec::new());
        };
        let workspace = self.workspace.as_device_ptr().as_raw();
        let plans = self.backward_plans(&call.shape, queries, call.dtype);
        if plans.blocks.len() == 1 {
            return Ok(Vec::new());
        }
        let elems = plans.sums();
        let sums = DeviceSlice::at(workspace + plans.own_bytes() as u64, elems, Dtype::Float32);
        Ok(plans.add_gradients(&call.shape, place, block, (dqkv, sums)))
    }
}

/// A plan to be compiled.
struct WantedGraph {
    shape: AttentionShape,
    dtype: Dtype,
    graph: Graph,
}

impl WantedGraph {
    fn forward((shape, dtype): (AttentionShape, Dtype), limits: &AttentionLimits) -> Result<Self> {
        let format = supported(&shape, dtype, limits)?;
        Ok(Self { shape, dtype, graph: attention::forward(&shape, format) })
    }

    /// Compiles the plan; a failure to compile is reported as `Unsupported`.
    fn build(&self, cudnn: Cudnn, target: &Target) -> Result<ExecutionPlan> {
        ExecutionPlan::build(cudnn, &self.graph, target).map_err(|error| match error {
            Error::Resource { operation, cause } => unsupported(&self.shape, self.dtype, &format!("{operation}: {cause}")),
            other => other,
        })
    }
}

impl BackwardPlans {
    /// Backward plans before compilation.
    fn new(of: (AttentionShape, Dtype, usize), deterministic: bool) -> Self {
        let (shape, _, block) = of;
        Self { of, part: attention_part(&shape, block, deterministic), blocks: blocks(&shape, block), plans: Vec::new() }
    }

    /// All sizes of blocks, each once.
    fn sizes(&self) -> Vec<BlockSize> {
        let mut sizes: Vec<_> = self.blocks.iter().map(ScoreBlock::size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// The plans to compile, by size.
    fn wanted(&self, limits: &AttentionLimits, deterministic: bool) -> Result<Vec<WantedGraph>> {
        let (shape, dtype, _) = self.of;
        let format = supported(&shape, dtype, limits)?;
        let graph = |size| attention::backward(&shape, &self.part, size, format, deterministic);
        Ok(self.sizes().into_iter().map(|size| WantedGraph { shape, dtype, graph: graph(size) }).collect())
    }

    /// Takes the compiled plans from the front of `made`.
    fn take(&mut self, made: &mut impl Iterator<Item = ExecutionPlan>) {
        self.plans = self.sizes().into_iter().zip(made).collect();
    }

    /// Workspace bytes of cuDNN's plans.
    fn own_bytes(&self) -> usize {
        self.plans.iter().map(|(_, plan)| plan.workspace_bytes()).max().unwrap_or(0).next_multiple_of(256)
    }

    /// Workspace bytes with the sums over blocks. With several blocks, at least the workspace of a layer without window, because layers
    /// share the workspace.
    fn workspace_bytes(&self, deterministic: bool) -> usize {
        if self.blocks.len() == 1 {
            return self.plans[0].1.workspace_bytes();
        }
        let with_sums = self.own_bytes() + self.sums() * Dtype::Float32.bytes();
        with_sums.max(attention_workspace_bytes(&self.part, self.of.2, deterministic))
    }

    /// Elements of the sums over blocks of a part.
    fn sums(&self) -> usize {
        key_gradient_sums(&self.part) + query_gradient_sums(&self.part, self.of.2)
    }

    /// The plan of block `index`.
    fn plan(&mut self, index: usize) -> &mut ExecutionPlan {
        let size = self.blocks[index].size();
        let known = self.plans.iter().position(|(known, _)| *known == size).expect("there is a plan for every block");
        &mut self.plans[known].1
    }

    /// Steps for all parts and blocks, in order; with several blocks each step is a group of its own.
    fn steps(&self, shape: &AttentionShape) -> Vec<Vec<AttentionStep>> {
        let blocks = self.blocks.len();
        let steps = parts_of(shape, &self.part).flat_map(|place| (0..blocks).map(move |block| AttentionStep::Backward { place, block }));
        if blocks == 1 { vec![steps.collect()] } else { steps.map(|step| vec![step]).collect() }
    }

    /// Sums after block `index` for each sequence of the part at `place`. `sums` has the sums of keys, then those of queries.
    fn add_gradients(
        &self,
        shape: &AttentionShape,
        place: PartPlace,
        index: usize,
        (dqkv, sums): (DeviceSlice, DeviceSlice),
    ) -> Vec<AddKeyGradients> {
        let of_keys = key_gradient_sums(&self.part);
        let of_both = [sums.slice(0, of_keys), sums.slice(of_keys, sums.elems() - of_keys)];
        let of_sequence = |sequence: usize| {
            let [keys, queries] = of_both.map(|sums| {
                let elems = sums.elems() / self.part.batch;
                sums.slice(sequence * elems, elems)
            });
            let rows = (dqkv, (place.sequence + sequence) * shape.seq_length);
            let keys = self.add_keys((shape, place.group), index, rows, keys);
            std::iter::once(keys).chain(self.add_queries((shape, place.group), index, rows, queries))
        };
        (0..self.part.batch).flat_map(of_sequence).collect()
    }

    /// Sums of keys for one sequence, which begins at row `first` of `dqkv`. The sum of a key extends from the first to the last block of
    /// queries that sees the key.
    fn add_keys(
        &self,
        (shape, group): (&AttentionShape, usize),
        index: usize,
        (dqkv, first): (DeviceSlice, usize),
        sums: DeviceSlice,
    ) -> AddKeyGradients {
        let (pitch, width) = (shape.qkv_cols(), self.part.kv_heads * shape.head_dim);
        let ScoreBlock { queries, keys } = &self.blocks[index];
        let seen_later =
            self.blocks[index..].iter().find(|later| later.queries.start >= queries.end).map_or(keys.end, |later| later.keys.start);
        let of_keys = shape.heads * shape.head_dim + group * width;
        AddKeyGradients {
            dqkv: dqkv.slice((first + keys.start) * pitch, keys.len() * pitch),
            sums: sums.slice(keys.start * 2 * width, keys.len() * 2 * width),
            pitch,
            columns: [of_keys, of_keys + shape.kv_heads * shape.head_dim],
            width,
            begun: queries.start.clamp(keys.start, keys.end) - keys.start,
            done: seen_later.clamp(keys.start, keys.end) - keys.start,
        }
    }

    /// Sums of queries for one sequence, if the queries have at least two blocks of keys. They extend from the first to the last block of
    /// keys. Because [`AddKeyGradients`] adds two column ranges, each range is half of the query columns.
    fn add_queries(
        &self,
        (shape, group): (&AttentionShape, usize),
        index: usize,
        (dqkv, first): (DeviceSlice, usize),
        sums: DeviceSlice,
    ) -> Option<AddKeyGradients> {
        let (pitch, width) = (shape.qkv_cols(), self.part.heads * shape.head_dim / 2);
        let queries = &self.blocks[index].queries;
        let is_of_them = |other: usize| self.blocks.get(other).is_some_and(|other| other.queries == *queries);
        let (is_begun, continues) = (index > 0 && is_of_them(index - 1), is_of_them(index + 1));
        let column = group * 2 * width;
        let rows = |holds: bool| if holds { queries.len() } else { 0 };
        (is_begun || continues).then(|| AddKeyGradients {
            dqkv: dqkv.slice((first + queries.start) * pitch, queries.len() * pitch),
            sums: sums.slice(0, queries.len() * 2 * width),
            pitch,
            columns: [column, column + width],
            width,
            begun: rows(is_begun),
            done: rows(!continues),
        })
    }
}

/// cuDNN's format, if its kernels support the shape.
fn supported(shape: &AttentionShape, dtype: Dtype, limits: &AttentionLimits) -> Result<DataType> {
    if shape.softcap.is_some() {
        return Err(unsupported(shape, dtype, "its graph has no soft caps on scores"));
    }
    let fits = shape.head_dim.is_multiple_of(8) && shape.head_dim <= limits.head_dim;
    match dtype {
        Dtype::Bfloat16 if fits => Ok(DataType::Bf16),
        Dtype::Float16 if fits => Ok(DataType::F16),
        _ => Err(unsupported(
            shape,
            dtype,
            &format!("on this GPU it supports bfloat16 and float16, and multiples of 8 up to {}", limits.head_dim),
        )),
    }
}

fn unsupported(shape: &AttentionShape, dtype: Dtype, why: &str) -> Error {
    let AttentionShape { seq_length, heads, kv_heads, head_dim, .. } = shape;
    Error::Unsupported(format!(
        "cuDNN's attention over {seq_length} tokens, {heads}/{kv_heads} heads of {head_dim} channels, {dtype} ({why}); \
         `--attention plain` computes it"
    ))
}

fn allocate(bytes: usize) -> Result<DeviceBuffer<u8>> {
    // SAFETY: filled by the caller.
    unsafe { DeviceBuffer::uninitialized(bytes) }
        .map_err(|e| failed(e as u32, format!("allocate {} of GPU memory for cuDNN's attention", Bytes(bytes as u64))))
}

/// Position of a part: its first sequence, and the index of its group of heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PartPlace {
    sequence: usize,
    group: usize,
}

/// Positions of the parts of `shape` that have the size of `part`.
fn parts_of(shape: &AttentionShape, part: &AttentionShape) -> impl Iterator<Item = PartPlace> + use<> {
    let (sequences, at_a_time, groups) = (shape.batch, part.batch, shape.kv_heads / part.kv_heads);
    (0..sequences).step_by(at_a_time).flat_map(move |sequence| (0..groups).map(move |group| PartPlace { sequence, group }))
}

/// Addresses of queries, keys and values in a packed buffer.
fn qkv_addresses(packed: DeviceSlice, shape: &AttentionShape) -> [u64; 3] {
    let bytes = (shape.head_dim * packed.dtype().bytes()) as u64;
    [0, shape.heads, shape.heads + shape.kv_heads].map(|head| packed.addr() + head as u64 * bytes)
}

/// A step of a call, which is enqueued at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum AttentionStep {
    Forward,
    /// One block of a part.
    Backward {
        place: PartPlace,
        block: usize,
    },
}

/// One direction of attention over memory that has been checked against its shape.
pub(super) struct AttentionCall {
    pub(super) name: &'static str,
    dtype: Dtype,
    shape: AttentionShape,
    direction: Direction,
    addresses: Addresses,
}

#[derive(Clone, Copy)]
enum Direction {
    Forward,
    /// In blocks of `block` queries and keys.
    Backward {
        dqkv: DeviceSlice,
        block: usize,
    },
}

impl AttentionCall {
    /// The output and the log-sum-exp; every row is one document.
    ///
    /// # Errors
    /// `Unsupported` for operands of different formats.
    pub(super) fn forward(kernel: &AttentionForward) -> Result<Self> {
        let AttentionForward { qkv, documents: _, out, lse, shape } = *kernel;
        let mut addresses = [0; AttentionTensor::COUNT];
        addresses[AttentionTensor::Q as usize..=AttentionTensor::V as usize].copy_from_slice(&qkv_addresses(qkv, &shape));
        addresses[AttentionTensor::Out as usize] = out.addr();
        addresses[AttentionTensor::Lse as usize] = lse.addr();
        let dtype = kernel.float_format()?;
        Ok(Self { name: AttentionForward::NAME, dtype, shape, direction: Direction::Forward, addresses })
    }

    /// The gradient of [`AttentionCall::forward`], in blocks of `block` queries and keys unless the kernel sets its own size.
    pub(super) fn backward(kernel: &AttentionBackward, block: usize) -> Result<Self> {
        let AttentionBackward { dout, qkv, documents: _, out, lse, dqkv, shape, block: text } = *kernel;
        let [q, k, v] = qkv_addresses(qkv, &shape);
        let [dq, dk, dv] = qkv_addresses(dqkv, &shape);
        let addresses = [q, k, v, out.addr(), lse.addr(), dout.addr(), dq, dk, dv];
        let dtype = kernel.float_format()?;
        let block = text.unwrap_or(block);
        if block == 1 && shape.seq_length > 1 {
            return Err(Error::Unsupported("cuDNN's attention in blocks of one query, of which its gradients are wrong".into()));
        }
        let direction = Direction::Backward { dqkv, block };
        Ok(Self { name: AttentionBackward::NAME, dtype, shape, direction, addresses })
    }

    /// Addresses of a block of the part at `place`, which has the size of `part`.
    fn addresses_of(&self, part: &AttentionShape, place: PartPlace, block: &ScoreBlock) -> Addresses {
        let shape = &self.shape;
        let first = place.sequence * shape.seq_length;
        let (query, key) = (first + block.queries.start, first + block.keys.start);
        let column = |heads: usize| place.group * heads * shape.head_dim;
        let mut addresses = self.addresses;
        for role in AttentionTensor::ALL {
            use AttentionTensor::{Dk, Dout, Dq, Dv, K, Lse, Out, Q, V};
            let bytes = match role {
                Q | Dq => (query * shape.qkv_cols() + column(part.heads)) * self.dtype.bytes(),
                K | V | Dk | Dv => (key * shape.qkv_cols() + column(part.kv_heads)) * self.dtype.bytes(),
                Out | Dout => (query * shape.out_cols() + column(part.heads)) * self.dtype.bytes(),
                Lse => (first * shape.heads + place.group * part.heads * shape.seq_length + block.queries.start) * Dtype::Float32.bytes(),
            };
            addresses[role as usize] += bytes as u64;
        }
        addresses
    }
}

#[cfg(test)]
mod tests;
