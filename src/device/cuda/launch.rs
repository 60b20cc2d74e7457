//! Kernel launches: name, grid and arguments.

use super::CudaDevice;
use super::error::check;
use super::group_tables::GroupTables;
use crate::device::kernels::launches;
use crate::device::{Checked, Device, DeviceSlice, GroupedMatmul, GroupedShape, Kernel, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::units::Bytes;
use cust::sys;

/// One kernel argument. Kernels take pointers, 32-bit and 64-bit numbers; all begin at the first of eight bytes.
#[derive(Clone, Copy)]
pub(super) struct Arg(pub(super) u64);

impl From<DeviceSlice> for Arg {
    fn from(x: DeviceSlice) -> Self {
        Self(x.addr())
    }
}

/// A null pointer for `None`.
impl From<Option<DeviceSlice>> for Arg {
    fn from(x: Option<DeviceSlice>) -> Self {
        Self(x.map_or(0, DeviceSlice::addr))
    }
}

impl From<u32> for Arg {
    fn from(x: u32) -> Self {
        Self(u64::from(x))
    }
}

impl From<bool> for Arg {
    fn from(x: bool) -> Self {
        Self(u64::from(x))
    }
}

impl From<u64> for Arg {
    fn from(x: u64) -> Self {
        Self(x)
    }
}

impl From<f32> for Arg {
    fn from(x: f32) -> Self {
        Self(u64::from(x.to_bits()))
    }
}

impl From<f64> for Arg {
    fn from(x: f64) -> Self {
        Self(x.to_bits())
    }
}

/// Arguments in the order of the kernel's parameters.
macro_rules! args {
    ($($x:expr),* $(,)?) => { [$($crate::device::cuda::launch::Arg::from($x)),*] };
}
pub(super) use args;

/// Converts a size to a kernel argument.
///
/// # Errors
/// `Unsupported` above 2^32.
pub(super) fn size(x: usize) -> Result<u32> {
    u32::try_from(x).map_err(|_| Error::Unsupported(format!("a kernel over {x} elements in one dimension")))
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchConfig {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
}

impl LaunchConfig {
    /// A one-dimensional grid without dynamic shared memory.
    pub(super) fn new(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 }
    }
}

/// Maximum bytes of dynamic shared memory that need no function attribute.
const SHARED_BYTES_BY_DEFAULT: u32 = 48 << 10;

/// Destination of launches: the GPU, or a list in tests.
pub(super) trait Queue {
    /// Whether kernels for Hopper only (`sm_90a`) may be launched.
    fn is_hopper(&self) -> bool;

    /// Tables for grouped expert products of cuBLASLt; `None` unless cuBLASLt computes them.
    fn group_tables(&self) -> Option<GroupTables>;

    /// Enqueues the grouped expert products that the tables describe, of 16-bit `dtype`, on the compute stream by cuBLASLt.
    fn multiply_groups(&mut self, shape: GroupedShape, dtype: Dtype) -> Result<()>;

    /// Enqueues the kernel `name` on `stream`; with a `dtype`, the kernel `name_bf16` and so on. An empty grid launches nothing.
    fn launch<const N: usize>(
        &mut self,
        stream: Stream,
        name: &'static str,
        dtype: Option<Dtype>,
        blocks: LaunchConfig,
        args: [Arg; N],
    ) -> Result<()>;

    /// At least `elems` fp32 elements of scratch for the kernel that is being enqueued on the compute stream.
    fn scratch(&mut self, elems: usize) -> Result<DeviceSlice>;

    /// Fills with zero bytes, on the compute stream.
    fn zero(&mut self, x: DeviceSlice) -> Result<()>;

    /// Copies between slices of equal size that do not overlap.
    fn copy(&mut self, stream: Stream, src: DeviceSlice, dst: DeviceSlice) -> Result<()>;
}

/// The launches of a kernel on a GPU.
pub(super) trait GpuKernel: Kernel {
    /// Enqueues the kernel; its operands have been checked.
    fn enqueue(self, queue: &mut impl Queue) -> Result<()>;
}

launches!(CudaDevice, enqueue_kernel: ScatterRows, Zero, Cast, SumSlices, GradNormPartials, Adam, SplitAdam);

impl CudaDevice {
    /// Enqueues the launches of a kernel.
    fn enqueue_kernel<K: GpuKernel>(&mut self, kernel: Checked<K>) -> Result<()> {
        (*kernel).enqueue(self)
    }
}

impl Queue for CudaDevice {
    fn is_hopper(&self) -> bool {
        self.hopper
    }

    fn group_tables(&self) -> Option<GroupTables> {
        self.gemm.group_tables()
    }

    fn multiply_groups(&mut self, shape: GroupedShape, dtype: Dtype) -> Result<()> {
        let products = self.gemm.groups(shape, dtype)?;
        self.timed(Stream::Compute, GroupedMatmul::NAME, products)
    }

    fn launch<const N: usize>(
        &mut self,
        stream: Stream,
        name: &'static str,
        dtype: Option<Dtype>,
        blocks: LaunchConfig,
        args: [Arg; N],
    ) -> Result<()> {
        let LaunchConfig { grid, block, shared_bytes } = blocks;
        if grid.contains(&0) {
            return Ok(());
        }
        let function = self.modules.get(name, dtype)?;
        if shared_bytes > SHARED_BYTES_BY_DEFAULT {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            check(unsafe { sys::cuFuncSetAttribute(function, most, shared_bytes as i32) }, || format!("give {name} shared memory"))?;
        }
        let mut pointers = args.each_ref().map(|arg| std::ptr::from_ref(&arg.0).cast_mut().cast());
        let raw = self.streams[stream as usize].0;
        self.timed(stream, name, |_| {
            // SAFETY: the function is loaded; the arguments match its parameters and live for the call.
            let status = unsafe {
                sys::cuLaunchKernel(
                    function,
                    grid[0],
                    grid[1],
                    grid[2],
                    block[0],
                    block[1],
                    block[2],
                    shared_bytes,
                    raw,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            check(status, || format!("launch {name} on {grid:?} blocks of {block:?}"))
        })
    }

    fn scratch(&mut self, elems: usize) -> Result<DeviceSlice> {
        if self.scratch.elems() < elems {
            // Pending kernels may still use the old scratch, so it is not freed.
            self.scratch = self.alloc("kernels' scratch", elems, Dtype::Float32)?;
        }
        Ok(self.scratch.slice(0, elems))
    }

    fn zero(&mut self, x: DeviceSlice) -> Result<()> {
        self.fill_zero(x)
    }

    fn copy(&mut self, stream: Stream, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        if src.elems() == 0 {
            return Ok(());
        }
        self.timed(stream, "cast", |raw| {
            // SAFETY: the caller guarantees equal sizes and no overlap.
            let status = unsafe { sys::cuMemcpyDtoDAsync_v2(dst.addr(), src.addr(), src.bytes(), raw.0) };
            check(status, || format!("copy {} within the GPU", Bytes(src.bytes() as u64)))
        })
    }
}
