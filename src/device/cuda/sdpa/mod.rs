//! Attention by cuDNN's fused kernels, through its backend interface: a graph of what attention computes ([`attention`]),
//! translated ([`graph`]) and compiled ([`plan`]) once for each shape.

mod attention;
mod graph;
mod plan;
mod sys;

use super::error::{check, failed};
use super::libraries::Libraries;
use crate::device::footprint::gpu::attention_part;
use crate::device::{AttentionBackward, AttentionForward, AttentionShape, DeviceSlice, Kernel};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::units::Bytes;
use cust::memory::DeviceBuffer;
use cust::sys::{CUstream, cuMemsetD8Async, cuStreamSynchronize};
use graph::AttentionTensor;
use plan::{Addresses, ExecutionPlan, Target};
use sys::{Connection, Cudnn, DataType};

/// What cuDNN's kernels take on the GPUs of a generation, by its table (documentation of 9.18.1, "Support Matrix").
struct AttentionLimits {
    /// The first generation that these are of; they hold up to the next one.
    from: i32,
    /// Channels of the widest head whose backward pass there is.
    head_dim: usize,
    /// The first version whose backward pass can repeat its bits, as 91900 for 9.19.0.
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
    /// `Unsupported` for a version whose backward pass would give other bits each time.
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

/// cuDNN, the plans made so far, and the workspace that they share.
pub(super) struct Sdpa {
    // Dropped in this order: the connection last.
    plans: Vec<Plans>,
    workspace: DeviceBuffer<u8>,
    connection: Connection,
    stream: CUstream,
    limits: &'static AttentionLimits,
    deterministic: bool,
}

/// Both directions of one shape.
struct Plans {
    shape: AttentionShape,
    dtype: Dtype,
    forward: ExecutionPlan,
    /// What `backward` computes at a time.
    part: AttentionShape,
    backward: ExecutionPlan,
}

impl Sdpa {
    /// Opens cuDNN for the current context; it will run on the stream, on a GPU of the generation. Unless `deterministic`, repeated backward passes
    /// differ in the last bits of dq; with it, they take 8 % more time and 2 bytes of workspace for every score.
    ///
    /// # Errors
    /// `Resource` when a library is missing; `Unsupported` when cuDNN is too old.
    pub(super) fn new(libraries: &Libraries, (stream, generation): (CUstream, i32), deterministic: bool) -> Result<Self> {
        let (cudnn, limits) = (Cudnn::open(libraries)?, AttentionLimits::of(generation));
        limits.check_version(cudnn.version(), deterministic)?;
        let connection = Connection::new(cudnn, stream)?;
        Ok(Self { plans: Vec::new(), workspace: allocate(0)?, connection, stream, limits, deterministic })
    }

    /// Bytes of the workspace.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.workspace.len()
    }

    /// As 91900 for 9.19.0.
    pub(super) fn version(&self) -> usize {
        self.connection.cudnn.version()
    }

    /// Compiles both directions for a shape and makes room for them; nothing if that is done. Half a second each; only
    /// before step 0, for a step must not wait for it.
    ///
    /// # Errors
    /// `Unsupported` for shapes and formats that cuDNN's kernels do not take.
    pub(super) fn prepare(&mut self, shape: &AttentionShape, dtype: Dtype) -> Result<()> {
        self.plans(shape, dtype).map(drop)
    }

    fn plans(&mut self, shape: &AttentionShape, dtype: Dtype) -> Result<&mut Plans> {
        let known = self.plans.iter().position(|plans| plans.shape == *shape && plans.dtype == dtype);
        let index = match known {
            Some(index) => index,
            None => {
                let target = Target::Gpu(self.connection.handle);
                let format = supported(shape, dtype, self.limits)?;
                let plans = Plans::build(self.connection.cudnn, &target, shape, (dtype, format), self.deterministic)?;
                self.reserve(plans.workspace_bytes())?;
                self.plans.push(plans);
                self.plans.len() - 1
            }
        };
        Ok(&mut self.plans[index])
    }

    fn reserve(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.workspace.len() {
            // What is enqueued uses the old one.
            // SAFETY: the stream is live.
            check(unsafe { cuStreamSynchronize(self.stream) }, || "grow cuDNN's workspace".into())?;
            self.workspace = allocate(0)?;
            self.workspace = allocate(bytes)?;
            self.fill_workspace()?;
        }
        Ok(())
    }

    /// Fills the workspace with NaN of every format. cuDNN reads rows of it that it never wrote (9.19, `fmha_reduce_head`); should
    /// one of them ever count, nothing hides it.
    fn fill_workspace(&self) -> Result<()> {
        const NAN_BYTE: u8 = 0xff;
        let (address, bytes) = (self.workspace.as_device_ptr().as_raw(), self.workspace.len());
        // SAFETY: just allocated, of this size.
        check(unsafe { cuMemsetD8Async(address, NAN_BYTE, bytes, self.stream) }, || "fill cuDNN's workspace".into())
    }

    /// Enqueues one direction of a shape.
    ///
    /// # Errors
    /// `Unsupported` for shapes and formats that cuDNN's kernels do not take; `Resource` when an address is not aligned to 16 bytes.
    pub(super) fn enqueue(&mut self, call: &AttentionCall) -> Result<()> {
        let handle = self.connection.handle;
        self.prepare(&call.shape, call.dtype)?;
        let workspace = self.workspace.as_device_ptr().as_raw();
        let plans = self.plans(&call.shape, call.dtype)?;
        // SAFETY: the slices of a call have been checked against its shape, which its parts are of; the workspace is large enough for every
        // plan made.
        unsafe {
            match call.direction {
                Direction::Forward => plans.forward.execute(handle, &call.addresses, workspace),
                Direction::Backward => parts_of(&call.shape, &plans.part).try_for_each(|place| {
                    let addresses = call.addresses_of(&plans.part, place);
                    plans.backward.execute(handle, &addresses, workspace)
                }),
            }
        }
    }
}

impl Plans {
    fn build(
        cudnn: Cudnn,
        target: &Target,
        shape: &AttentionShape,
        (dtype, format): (Dtype, DataType),
        deterministic: bool,
    ) -> Result<Self> {
        let forward = ExecutionPlan::build(cudnn, &attention::forward(shape, format), target);
        let part = attention_part(shape, deterministic);
        let backward = ExecutionPlan::build(cudnn, &attention::backward(shape, &part, format, deterministic), target);
        let refused = |error: Error| match error {
            Error::Resource { operation, cause } => unsupported(shape, dtype, &format!("{operation}: {cause}")),
            other => other,
        };
        Ok(Self { shape: *shape, dtype, forward: forward.map_err(refused)?, part, backward: backward.map_err(refused)? })
    }

    fn workspace_bytes(&self) -> usize {
        self.forward.workspace_bytes().max(self.backward.workspace_bytes())
    }
}

/// cuDNN's format, if its kernels take the shape.
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
            &format!("on this GPU it takes bfloat16 and float16, and multiples of 8 up to {}", limits.head_dim),
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

/// Where a part begins: its first sequence, and which of the groups of heads it has.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PartPlace {
    sequence: usize,
    group: usize,
}

/// The parts of `shape` that are as large as `part`.
fn parts_of(shape: &AttentionShape, part: &AttentionShape) -> impl Iterator<Item = PartPlace> + use<> {
    let (sequences, at_a_time, groups) = (shape.batch, part.batch, shape.kv_heads / part.kv_heads);
    (0..sequences).step_by(at_a_time).flat_map(move |sequence| (0..groups).map(move |group| PartPlace { sequence, group }))
}

/// Addresses of queries, keys and values in a packed buffer.
fn qkv_addresses(packed: DeviceSlice, shape: &AttentionShape) -> [u64; 3] {
    let bytes = (shape.head_dim * packed.dtype().bytes()) as u64;
    [0, shape.heads, shape.heads + shape.kv_heads].map(|head| packed.addr() + head as u64 * bytes)
}

/// One direction of attention over memory that was checked against its shape.
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
    Backward,
}

impl AttentionCall {
    /// The output and the log-sum-exp, where every row is one document.
    ///
    /// # Errors
    /// `Unsupported` for operands of several formats.
    pub(super) fn forward(kernel: &AttentionForward) -> Result<Self> {
        let AttentionForward { qkv, documents: _, out, lse, shape } = *kernel;
        let mut addresses = [0; AttentionTensor::COUNT];
        addresses[AttentionTensor::Q as usize..=AttentionTensor::V as usize].copy_from_slice(&qkv_addresses(qkv, &shape));
        addresses[AttentionTensor::Out as usize] = out.addr();
        addresses[AttentionTensor::Lse as usize] = lse.addr();
        let dtype = kernel.float_format()?;
        Ok(Self { name: AttentionForward::NAME, dtype, shape, direction: Direction::Forward, addresses })
    }

    /// The gradient of [`AttentionCall::forward`].
    pub(super) fn backward(kernel: &AttentionBackward) -> Result<Self> {
        let AttentionBackward { dout, qkv, documents: _, out, lse, dqkv, shape } = *kernel;
        let [q, k, v] = qkv_addresses(qkv, &shape);
        let [dq, dk, dv] = qkv_addresses(dqkv, &shape);
        let addresses = [q, k, v, out.addr(), lse.addr(), dout.addr(), dq, dk, dv];
        let dtype = kernel.float_format()?;
        Ok(Self { name: AttentionBackward::NAME, dtype, shape, direction: Direction::Backward, addresses })
    }

    /// Those of the part at `place`, as large as `part`.
    fn addresses_of(&self, part: &AttentionShape, place: PartPlace) -> Addresses {
        let shape = &self.shape;
        let row = place.sequence * shape.seq_length;
        let column = |heads: usize| place.group * heads * shape.head_dim;
        let mut addresses = self.addresses;
        for role in AttentionTensor::ALL {
            use AttentionTensor::{Dk, Dout, Dq, Dv, K, Lse, Out, Q, V};
            let bytes = match role {
                Q | Dq => (row * shape.qkv_cols() + column(part.heads)) * self.dtype.bytes(),
                K | V | Dk | Dv => (row * shape.qkv_cols() + column(part.kv_heads)) * self.dtype.bytes(),
                Out | Dout => (row * shape.out_cols() + column(part.heads)) * self.dtype.bytes(),
                Lse => (row * shape.heads + place.group * part.heads * shape.seq_length) * Dtype::Float32.bytes(),
            };
            addresses[role as usize] += bytes as u64;
        }
        addresses
    }
}

#[cfg(test)]
mod tests;
