//! What a device takes for itself, beside the memory that it is asked for. No device is needed to know it: the planner adds it up, and the
//! devices take their sizes from here.

use super::{Attention, AttentionShape};
use crate::dtype::Dtype;
use crate::host::pinned;
use crate::memory::{MemorySpace, RingShape};

/// What computes. Where its memory lies is another question: there are GPUs without memory of their own.
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
    /// What the sizes of a [`RingShape`] are multiples of, in bytes.
    pub(crate) fn ring_grain_bytes(self) -> usize {
        match self {
            Self::Cpu => pinned::RING_GRAIN_BYTES,
            Self::Gpu => gpu::RING_CHUNK_BYTES,
        }
    }

    /// Memory behind `elems` elements that repeat as `ring` says, if they do.
    pub(crate) fn flat_bytes(self, elems: usize, dtype: Dtype, ring: Option<RingShape>) -> usize {
        let bytes = elems * dtype.bytes();
        let Some(RingShape { ringed_elems, period_elems }) = ring else { return bytes };
        let whole = if self == Self::Gpu { bytes.next_multiple_of(gpu::RING_CHUNK_BYTES) } else { bytes };
        whole - (ringed_elems - period_elems) * dtype.bytes()
    }

    /// What it takes for itself, where layers attend to tokens as `shape` says.
    pub fn own_memory(self, attention: Attention, shape: &AttentionShape) -> Vec<MemoryClass> {
        if self == Self::Cpu {
            return Vec::new();
        }
        let class = |name, space, bytes| MemoryClass { name, space, bytes };
        let workspace = match attention {
            Attention::Cudnn { deterministic } => gpu::attention_workspace_bytes(shape, deterministic),
            Attention::Plain => 0,
        };
        vec![
            class("matrix workspace", MemorySpace::Device, gpu::MATMUL_WORKSPACE_BYTES),
            class("attention workspace", MemorySpace::Device, workspace),
            class("kernel scratch", MemorySpace::Device, gpu::SCRATCH_BYTES),
            class("context, libraries", MemorySpace::Device, gpu::CONTEXT_BYTES),
            class("process, driver", MemorySpace::Host, gpu::PROCESS_BYTES),
        ]
    }
}

/// An NVIDIA GPU's sizes.
pub(crate) mod gpu {
    use super::AttentionShape;

    /// Device memory that no class names (0.6 GiB on an H200): the CUDA context, the code of cuBLASLt and cuDNN, which is loaded
    /// kernel by kernel, and what the driver loses by rounding each allocation up to 2 MiB.
    pub(super) const CONTEXT_BYTES: usize = 1 << 30;
    /// Host memory that no class names: the driver's, the libraries' and this program's own.
    pub(super) const PROCESS_BYTES: usize = 1 << 30;
    /// Chunks that a ring is made of: a multiple of the 2 MiB pages of the GPU, and few maps for many gigabytes.
    pub const RING_CHUNK_BYTES: usize = 32 << 20;
    /// Pages of managed memory.
    pub(crate) const PAGE_BYTES: usize = 2 << 20;
    /// cuBLASLt's memory for partial sums of split products; NVIDIA's advice for Hopper is 32 MiB or more.
    pub(crate) const MATMUL_WORKSPACE_BYTES: usize = 64 << 20;
    /// Partial sums of this engine's kernels, from the start. Kernels that need more make it grow at their first call: norms of more than
    /// 31,000 channels, micro-batches of more than 8 million tokens.
    pub(crate) const SCRATCH_BYTES: usize = 64 << 20;

    /// Bytes that cuDNN 9.19 wants for the backward pass of a shape, and so for both: delta; dq in fp32, or tiles of scores
    /// when deterministic; dk and dv of every query head when these share key heads. All layers share one workspace.
    pub(crate) fn attention_workspace_bytes(shape: &AttentionShape, deterministic: bool) -> usize {
        let (heads, n) = (shape.batch * shape.heads, shape.seq_length);
        let vectors = 4 * heads * n * shape.head_dim;
        let padded = |tile: usize| n.next_multiple_of(tile) as u128;
        // The one size that grows with the square of the sequence: cut to what no machine has, where sums cannot overflow.
        let scores = (2 * heads as u128 * padded(64) * padded(128)).min(1 << 56) as usize;
        let delta = (4 * heads * n).next_multiple_of(256);
        let dq = if deterministic { scores } else { vectors.next_multiple_of(256) };
        let each = if shape.heads == shape.kv_heads { 0 } else { 2 * (vectors / 2).next_multiple_of(128) };
        delta + dq + each + 256
    }
}
