//! The interface of a compute device: memory, streams, events and copies ([`Device`]), and the transformer's arithmetic ([`Kernels`]).
//! Dispatch is static; one thread, the driver, owns the device and enqueues operations.
//!
//! Operations on one [`Stream`] run in order; streams run concurrently and synchronize only through events. No function here waits for the
//! operations that it enqueues, except [`Device::synchronize`].

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod documents;
pub(crate) mod footprint;
mod kernel;
pub(crate) mod kernels;
mod lease;
mod pin;
mod score_course;
#[cfg(any(test, feature = "cuda"))]
mod score_passes;
pub(crate) mod sim;
mod slice;
mod stream;

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::host::pinned::PinnedSlice;
use crate::memory::{MemorySpace, RingShape};
use crate::ranks::{NcclUniqueId, RankContext};
use crate::trace::{self, Recorder};
use std::path::PathBuf;

pub use crate::hardware::grouped_rates::ExpertProducts;
pub use footprint::DeviceKind;
pub use kernel::Kernel;
pub(crate) use kernel::{Checked, Operand};
pub(crate) use kernels::*;
pub(crate) use lease::{Lease, Sides};
pub(crate) use pin::{PagesToCome, PinMemory};
pub use slice::DeviceSlice;
pub(crate) use slice::MatrixPart;
pub use stream::{EventId, Stream};

/// Name of the span of [`Device::prefetch`].
fn prefetch_span(space: MemorySpace) -> &'static str {
    match space {
        MemorySpace::Device => "page_in",
        MemorySpace::Host => "page_out",
    }
}

/// The error when a peer still uses this device's memory.
fn still_lent() -> Error {
    Error::resource("free device memory that other ranks map", "one of them still maps it")
}

/// The libraries that a device computes with.
pub trait DeviceLibraries {
    /// Versions that affect the bits of results besides this program: names and versions of GPU, driver and libraries. Empty if only this
    /// program computes.
    fn versions(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// The algorithms of all products so far, if a library chooses among several.
    fn product_algorithms(&self) -> Vec<ProductAlgorithm> {
        Vec::new()
    }

    /// Chooses how to compute a product of well aligned matrices, and computes nothing. `None` if there is no choice.
    ///
    /// # Errors
    /// `Resource` when the library has no algorithm for the product.
    fn choose_product(&mut self, _request: ProductRequest) -> Result<Option<ProductAlgorithm>> {
        Ok(None)
    }

    /// Whether the device loads kernels, and chooses library algorithms, on their first use.
    fn learns_by_doing(&self) -> bool {
        false
    }
}

/// Memory, streams, events and copies, without arithmetic.
pub trait Device: DeviceLibraries + PinMemory {
    /// Description of this device for people: `cpu (AMD EPYC 9B45, 2 threads, avx512)`.
    fn describe(&self) -> String;

    /// Allocates zeroed device memory, aligned to 256 bytes. It lives until it is freed or the device is dropped. Only between steps.
    ///
    /// # Errors
    /// `Resource` when there is not enough memory; `name` is in the message.
    fn alloc(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice>;

    /// Frees an allocation, once all enqueued operations have run.
    ///
    /// # Errors
    /// Errors of the device.
    fn free(&mut self, memory: DeviceSlice) -> Result<()>;

    /// Names and bytes of all allocations, including the device's own. Empty on a device without memory of its own.
    fn allocations(&self) -> Vec<(&str, usize)> {
        Vec::new()
    }

    /// [`Device::alloc`] for memory with a periodic mapping. Both sizes are multiples of [`DeviceKind::ring_grain_bytes`].
    fn alloc_ring(&mut self, name: &str, elems: usize, dtype: Dtype, shape: RingShape) -> Result<DeviceSlice>;

    /// [`Device::alloc`] for memory with the same address on host and device. It lies on the host, and kernels access it over the link.
    ///
    /// # Errors
    /// The errors of [`Device::alloc`]; `Unsupported` if the device has no such memory.
    fn alloc_unified(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice>;

    /// Moves unified memory to `space`, on `stream`. The memory stays valid for both sides. Nothing moves if host and device share page
    /// tables or memory.
    fn prefetch(&mut self, stream: Stream, memory: DeviceSlice, space: MemorySpace) -> Result<()>;

    /// An error unless this device has allocated `memory`. The simulated device, whose addresses have no memory, accepts all.
    ///
    /// # Errors
    /// `Resource` with the address.
    fn check_memory(&self, memory: DeviceSlice) -> Result<()>;

    /// Compiles and allocates everything that attention of this shape and format needs; with `separates_documents`, rows may hold several
    /// documents. Only before step 0.
    ///
    /// # Errors
    /// `Unsupported` when no kernel supports the shape and format.
    fn prepare_attention(&mut self, _shape: AttentionShape, _dtype: Dtype, _separates_documents: bool) -> Result<()> {
        Ok(())
    }

    /// Allocates everything that delta rules of this shape need. Only before step 0.
    ///
    /// # Errors
    /// `Unsupported` when no kernel supports the shape and format.
    fn prepare_delta(&mut self, _shape: DeltaShape, _dtype: Dtype) -> Result<()> {
        Ok(())
    }

    /// Prepares for FP8 products. Only before step 0.
    ///
    /// # Errors
    /// `Unsupported` with the missing feature.
    fn prepare_fp8(&mut self) -> Result<()> {
        Ok(())
    }

    /// Announces the values of the operand `documents` of attention in kernels launched from now on: the index in its row of `seq_length`
    /// at which each token's document begins. A device may need them on the host before a kernel runs.
    ///
    /// # Errors
    /// Errors of the device.
    fn set_documents(&mut self, _starts: &[i32], _seq_length: usize) -> Result<()> {
        Ok(())
    }

    /// Creates an event, which counts as done until it is first recorded.
    fn event(&mut self) -> Result<EventId>;

    /// Records the present end of `stream`; the event's earlier record is overwritten.
    fn record(&mut self, event: EventId, stream: Stream) -> Result<()>;

    /// Makes operations that are enqueued on `stream` from now on run after the recorded point.
    fn wait(&mut self, stream: Stream, event: EventId) -> Result<()>;

    /// Whether all operations before the recorded point have run. Never blocks.
    fn is_done(&mut self, event: EventId) -> Result<bool>;

    /// Blocks the driver thread until [`Device::is_done`].
    fn synchronize(&mut self, event: EventId) -> Result<()>;

    /// Called when the driver thread has nothing to do. A device whose time only advances here performs one operation and returns `true`. A
    /// device that runs by itself returns `false`, and the driver sleeps until its doorbell is rung.
    fn idle(&mut self) -> Result<bool>;

    /// The clock of the spans: the host's, or the simulated clock of a simulated device.
    fn now_ns(&self) -> u64 {
        trace::now_ns()
    }

    /// Nanoseconds so far during which the compute stream waited for an event of another stream.
    fn waited_ns(&self) -> u64;

    /// Copies device memory to pinned host memory; sizes in bytes must agree.
    fn copy_d2h(&mut self, stream: Stream, src: DeviceSlice, dst: PinnedSlice) -> Result<()>;

    /// Copies pinned host memory to device memory; sizes in bytes must agree.
    fn copy_h2d(&mut self, stream: Stream, src: PinnedSlice, dst: DeviceSlice) -> Result<()>;

    /// Ends the streams, which must be idle, and returns their recorded spans.
    fn finish(&mut self) -> Vec<Recorder>;
}

/// An exchange with another rank: the slice to send, and the destination of the slice to receive.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "only GPUs swap"))]
pub(crate) struct Swap {
    pub(crate) peer: usize,
    pub(crate) out: DeviceSlice,
    pub(crate) into: DeviceSlice,
}

/// The error of a device without a connection to devices of other processes.
fn no_rail() -> Error {
    Error::Unsupported("transfers from this device to devices of other processes; use --transport tcp".into())
}

/// A device with peers of its kind in the same process: it waits for their events and reads their memory.
pub(crate) trait Peers: Device {
    /// A handle through which peers access a device.
    type PeerHandle: Clone + Send + Sync + 'static;

    /// The handle of this device for its peers. Peers cannot access memory that is allocated later.
    fn peer_handle(&mut self) -> Self::PeerHandle;

    /// Waits until all enqueued operations have run, and drops the peers' handles.
    ///
    /// # Errors
    /// Errors of the device.
    fn leave(&mut self) -> Result<()>;

    /// Takes back the memory that peers could access through the handle, once all peers have dropped the handle, so that the memory can be
    /// freed.
    ///
    /// # Errors
    /// `Resource` when a peer still has the handle.
    fn reclaim(&mut self) -> Result<()>;

    /// Connects this device to its peers; `peer_handles` are the handles of all ranks, by rank. Starts the streams beyond [`Stream::ALL`]
    /// unless they already run. From now on waits of this device fail when another rank has failed.
    ///
    /// # Errors
    /// `Resource` when a stream cannot start.
    fn admit(&mut self, context: RankContext, peer_handles: Vec<Self::PeerHandle>) -> Result<()>;

    /// The part of [`Device::waited_ns`] that was spent on peers, or on this device's streams that pull from peers.
    fn waited_for_peers_ns(&self) -> u64;

    /// Makes operations that are enqueued on `stream` from now on run after the point that `peer` last recorded for its `event`.
    fn wait_for(&mut self, stream: Stream, peer: usize, event: EventId) -> Result<()>;

    /// Whether the pulls of a bucket and their sum can be enqueued on `stream` without blocking the host on earlier operations.
    ///
    /// # Errors
    /// Errors of the device.
    fn has_capacity(&mut self, _stream: Stream) -> Result<bool> {
        Ok(true)
    }

    /// Copies `src`, memory of `peer`, to `dst`, on `stream`; sizes in bytes must agree.
    ///
    /// # Errors
    /// `Resource` when `src` or `dst` is not memory of its device.
    fn pull(&mut self, stream: Stream, peer: usize, src: DeviceSlice, dst: DeviceSlice) -> Result<()>;

    /// Opens the connection to devices of other processes, which all pass the same `key`. `libraries` are folders to search for NVIDIA's
    /// library. Called once, after [`Peers::admit`].
    ///
    /// # Errors
    /// `Unsupported` if the device has no such connection; errors of the library; the failure of another rank.
    fn connect(&mut self, key: &NcclUniqueId, libraries: &[PathBuf]) -> Result<()>;

    /// Sends slices of this device to devices of other processes and receives theirs, on [`Stream::Compute`]. The operation begins when all
    /// earlier ones have run, and ends when all peers have done their parts. All ranks make the same calls in the same order.
    ///
    /// # Errors
    /// The errors of [`Peers::connect`].
    fn swap(&mut self, swaps: impl Iterator<Item = Swap>) -> Result<()>;

    /// Copies the rows `src`, memory of `peer`, to `dst`, on `stream`. Both have the same number and length of rows; `peer` may be this
    /// device.
    ///
    /// # Errors
    /// The errors of [`Peers::pull`].
    fn pull_rows(&mut self, stream: Stream, peer: usize, src: MatrixPart, dst: MatrixPart) -> Result<()>;
}

/// Implementations of operations on a GPU for which there is a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engines {
    pub attention: Attention,
    pub expert_products: ExpertProducts,
    pub long_sums: LongSums,
}

impl Engines {
    /// This program's own kernels for all operations.
    pub const OWN: Self = Self { attention: Attention::Plain, expert_products: ExpertProducts::Own, long_sums: LongSums::Slices };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// This program's own kernels, for any format and shape.
    Plain,
    /// cuDNN's fused kernels.
    Cudnn {
        /// Whether the backward pass is reproducible bit for bit.
        deterministic: bool,
    },
    /// Products of whole blocks by cuBLASLt, for 16-bit formats and any shape.
    Products,
    /// cuDNN's fused kernels where they have the shape, and products elsewhere.
    CudnnOrProducts {
        /// See [`Attention::Cudnn`].
        deterministic: bool,
    },
}

/// The widest heads of cuDNN's attention on any GPU.
const CUDNN_HEAD_DIM: usize = 256;

/// How a layer of attention is computed on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionWay {
    Plain,
    Fused,
    Products,
}

impl Attention {
    /// How layers of this shape are computed on a GPU.
    pub(crate) fn way(self, shape: &AttentionShape) -> AttentionWay {
        match self {
            Self::Plain => AttentionWay::Plain,
            Self::Products => AttentionWay::Products,
            Self::CudnnOrProducts { .. } if Self::cudnn_lacks(shape).is_some() => AttentionWay::Products,
            Self::Cudnn { .. } | Self::CudnnOrProducts { .. } => AttentionWay::Fused,
        }
    }

    /// Whether cuDNN's backward pass, if it is used, is reproducible bit for bit; `None` if cuDNN is not used.
    pub(crate) fn cudnn(self) -> Option<bool> {
        match self {
            Self::Plain | Self::Products => None,
            Self::Cudnn { deterministic } | Self::CudnnOrProducts { deterministic } => Some(deterministic),
        }
    }

    /// The property of `shape` that cuDNN's attention has on no GPU.
    pub(crate) fn cudnn_lacks(shape: &AttentionShape) -> Option<&'static str> {
        if shape.softcap.is_some() {
            Some("soft caps on scores")
        } else if shape.head_dim > CUDNN_HEAD_DIM {
            Some("heads of more than 256 channels")
        } else {
            None
        }
    }
}
