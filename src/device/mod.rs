//! What the engine asks of a machine that computes: memory, streams, events and copies ([`Device`]), and the
//! transformer's arithmetic ([`Kernels`]). Static dispatch; one thread (the driver) holds the device and enqueues.
//!
//! Everything enqueued on one [`Stream`] runs in order; streams run concurrently and meet only through events.
//! Nothing here waits for the work it enqueues, except [`Device::synchronize`].

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod documents;
pub(crate) mod footprint;
mod kernel;
mod kernels;
mod lease;
pub(crate) mod sim;
mod slice;
mod stream;

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::host::pinned::PinnedSlice;
use crate::memory::{MemorySpace, RingShape};
use crate::ranks::{RailKey, Seat};
use crate::trace::{self, Recorder};
use std::path::PathBuf;

pub use crate::hardware::grouped_rates::ExpertProducts;
pub use footprint::DeviceKind;
pub use kernel::Kernel;
pub(crate) use kernel::{Checked, Operand};
pub use kernels::attention::{AttentionBackward, AttentionForward, AttentionShape};
pub use kernels::cross_entropy::{CrossEntropyGrad, CrossEntropyLoss, CrossEntropyStats};
pub use kernels::embed::{Embed, EmbedBackward, ScatterRows};
pub use kernels::experts::{ClampedSwiglu, ExpertActivation, ExpertBackward, ExpertBias, ExpertBiasDot};
pub(crate) use kernels::grouped::EXPERTS_MAX;
pub use kernels::grouped::{GroupedMatmul, GroupedShape, SegmentSums};
pub use kernels::key_gradients::AddKeyGradients;
pub use kernels::norm::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
pub use kernels::pointwise::{Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd, Swiglu, SwigluBackward};
pub use kernels::product::{BiasBackward, Matmul, MatmulLayout, MatmulShape, ScaledMatmul};
pub(crate) use kernels::product::{FP8_ALIGN_BYTES, ProductAlgorithm};
#[cfg(feature = "cuda")]
pub(crate) use kernels::quantize::largest_exponent;
pub use kernels::quantize::{AbsMaxScale, Quantize, ScaleCell, WithScale};
pub(crate) use kernels::quantize::{FP8_GRAIN, WritesMatrix, scale_of};
pub use kernels::rope::{QkNorm, QkNormBackward, Rope};
pub use kernels::route::{Combine, Dispatch, Route, RouteShape, RouterBackward, RouterBalance, RouterLogits, RouterRule, Segments};
pub use kernels::sinks::{Sinks, SinksBackward};
pub(crate) use kernels::transfer::PARTS_MAX;
pub use kernels::transfer::{Adam, Cast, GradNormPartials, Poke, SumSlices, Zero};
pub use kernels::{Kernels, Launch};
pub(crate) use lease::Lease;
pub use slice::DeviceSlice;
pub(crate) use slice::MatrixPart;
pub use stream::{EventId, Stream};

/// What a span of [`Device::prefetch`] is called.
fn prefetch_span(space: MemorySpace) -> &'static str {
    match space {
        MemorySpace::Device => "page_in",
        MemorySpace::Host => "page_out",
    }
}

/// Why a device's memory is not its own again.
fn still_lent() -> Error {
    Error::resource("take device memory back from the other ranks", "one of them still has its card")
}

/// Memory, streams, events and copies. No arithmetic.
pub trait Device {
    /// What this device is, for people: `cpu (AMD EPYC 9B45, 2 threads, avx512)`.
    fn describe(&self) -> String;

    /// What its bits depend on besides this program: names, and which they are. Nothing where this program alone computes.
    fn versions(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// The algorithms of all products so far, where a library chooses among several.
    fn product_algorithms(&self) -> Vec<ProductAlgorithm> {
        Vec::new()
    }

    /// Zeroed device memory, aligned to 256 bytes, until it is given back or the device goes. Only between steps.
    ///
    /// # Errors
    /// `Resource` when it does not fit; `name` is in the message.
    fn alloc(&mut self, name: &str, elems: usize, dtype: Dtype) -> Result<DeviceSlice>;

    /// Gives an allocation back, once all that is enqueued has run.
    ///
    /// # Errors
    /// The device's.
    fn free(&mut self, memory: DeviceSlice) -> Result<()>;

    /// What was taken so far, by the names that were asked for, and what the device took for itself: names and bytes. Nothing where
    /// nothing is taken.
    fn allocations(&self) -> Vec<(&str, usize)> {
        Vec::new()
    }

    /// [`Device::alloc`] for memory that repeats. Both sizes are whole multiples of [`DeviceKind::ring_grain_bytes`].
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

    /// Prepares host memory for copies that run beside everything else. Only between steps.
    ///
    /// # Errors
    /// `Resource` when the system refuses to lock it.
    fn pin(&mut self, memory: PinnedSlice) -> Result<()>;

    /// Takes that back, once all that is enqueued has run: the memory may then go.
    ///
    /// # Errors
    /// The device's.
    fn unpin(&mut self, memory: PinnedSlice) -> Result<()>;

    /// An error unless this device has allocated `memory`, where addresses lead somewhere.
    ///
    /// # Errors
    /// `Resource` with the address.
    fn check_memory(&self, memory: DeviceSlice) -> Result<()>;

    /// Gets ready for attention of this shape and format, over rows that may hold several documents if it separates them: what has to be
    /// compiled or allocated for it. Only before step 0.
    ///
    /// # Errors
    /// `Unsupported` when no kernel takes them.
    fn prepare_attention(&mut self, _shape: AttentionShape, _dtype: Dtype, _separates_documents: bool) -> Result<()> {
        Ok(())
    }

    /// Gets ready for products in FP8. Only before step 0.
    ///
    /// # Errors
    /// `Unsupported` with what the device lacks.
    fn prepare_fp8(&mut self) -> Result<()> {
        Ok(())
    }

    /// Announces what the `documents` of attention hold in the kernels that are launched from now on: where in its row of `seq_length` each
    /// token's document begins. A device may have to know it before a kernel runs.
    ///
    /// # Errors
    /// The device's.
    fn set_documents(&mut self, _starts: &[i32], _seq_length: usize) -> Result<()> {
        Ok(())
    }

    /// Whether it loads kernels, and chooses among a library's, when they are first used.
    fn learns_by_doing(&self) -> bool {
        false
    }

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

/// What goes to another rank, and where what comes of it goes.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(any(test, feature = "cuda")), expect(dead_code, reason = "only GPUs swap"))]
pub(crate) struct Swap {
    pub(crate) peer: usize,
    pub(crate) out: DeviceSlice,
    pub(crate) into: DeviceSlice,
}

/// Why a device knows no way to those of other processes.
fn no_rail() -> Error {
    Error::Unsupported("a way from this device to those of other processes; use --transport tcp".into())
}

/// A device that works beside others of its kind in one process: it waits for their events and reads their memory.
pub(crate) trait Peers: Device {
    /// How others reach it.
    type Card: Clone + Send + Sync + 'static;

    /// Its card, for the others. What is allocated later they do not reach.
    fn card(&mut self) -> Self::Card;

    /// Waits until all that is enqueued has run, and forgets the others' cards.
    ///
    /// # Errors
    /// The device's.
    fn leave(&mut self) -> Result<()>;

    /// Has the memory that others reached by its card to itself again, once all of them have left, so that it can be given back.
    ///
    /// # Errors
    /// `Resource` when one of them has not.
    fn take_back(&mut self) -> Result<()>;

    /// Takes its seat among the devices of all ranks, whose cards these are, by rank: its own streams beyond [`Stream::ALL`] begin, unless
    /// they have. From here on its waits fail when another rank has.
    ///
    /// # Errors
    /// `Resource` when a stream cannot begin.
    fn admit(&mut self, seat: Seat, cards: Vec<Self::Card>) -> Result<()>;

    /// Nanoseconds of [`Device::waited_ns`] in which it waited for peers, or for the own streams that pull from them.
    fn waited_for_peers_ns(&self) -> u64;

    /// What is enqueued on `stream` from now on runs after the point that `peer` has recorded last for its `event`.
    fn wait_for(&mut self, stream: Stream, peer: usize, event: EventId) -> Result<()>;

    /// Whether a bucket's pulls, and their sum, can be enqueued on `stream` at once; else the host would wait for earlier ones.
    ///
    /// # Errors
    /// The device's.
    fn has_room(&mut self, _stream: Stream) -> Result<bool> {
        Ok(true)
    }

    /// On `stream`, copies `src`, memory of `peer`, to `dst`; sizes in bytes must agree.
    ///
    /// # Errors
    /// `Resource` when one of them is not memory of that device.
    fn pull(&mut self, stream: Stream, peer: usize, src: DeviceSlice, dst: DeviceSlice) -> Result<()>;

    /// Opens the way to the devices of other processes, of which each does so by the same `key`. `libraries` are folders to search for NVIDIA's
    /// library. Called once, after [`Peers::admit`].
    ///
    /// # Errors
    /// `Unsupported` where there is no such way; the library's; what ended another rank.
    fn connect(&mut self, key: &RailKey, libraries: &[PathBuf]) -> Result<()>;

    /// On [`Stream::Compute`], passes slices of this device to those of other processes, and takes theirs. It begins when all before it has
    /// run, and ends when the other side of each has done its part. All ranks call it as often, in one order.
    ///
    /// # Errors
    /// As for [`Peers::connect`].
    fn swap(&mut self, swaps: impl Iterator<Item = Swap>) -> Result<()>;

    /// On `stream`, copies the rows `src`, memory of `peer`, which may be this device itself, to `dst`: as many, and as long.
    ///
    /// # Errors
    /// As for [`Peers::pull`].
    fn pull_rows(&mut self, stream: Stream, peer: usize, src: MatrixPart, dst: MatrixPart) -> Result<()>;
}

/// Who computes what on a GPU, where there is a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engines {
    pub attention: Attention,
    pub expert_products: ExpertProducts,
}

impl Engines {
    /// The engine's own kernels for all.
    pub const OWN: Self = Self { attention: Attention::Plain, expert_products: ExpertProducts::Own };
}

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
