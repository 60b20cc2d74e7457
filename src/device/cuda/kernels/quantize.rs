//! Quantization of bfloat16 to 8-bit floats, on GPUs since Ada.

use super::super::launch::{Arg, GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{MULTIPROCESSORS, whole_vectors, wide};
use crate::device::{AbsMaxScale, DeviceSlice, Quantize, ScaleCell, Stream, WithScale, WritesMatrix, largest_exponent};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

pub(super) const SOURCE: PtxSource =
    PtxSource { file: ptx_file!("generated/quantize_sm89.ptx"), typed: &[], plain: &["abs_max_scale", "quantize_e4m3", "quantize_e5m2"] };

/// Constants of `quantize_sm89.cu`: threads of a block, rows and columns of its tile.
const THREADS: usize = 256;
const TILE: usize = 128;
/// Blocks of `abs_max_scale` for each multiprocessor: as many as it runs concurrently.
const BLOCKS_EACH: usize = 8;

impl GpuKernel for AbsMaxScale {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, scale, format } = self;
        check_input(x)?;
        queue.zero(scale)?;
        let (vectors, rest) = (x.elems() / wide(x.dtype()), x.elems() % wide(x.dtype()));
        let blocks = vectors.div_ceil(THREADS).clamp(1, BLOCKS_EACH * MULTIPROCESSORS);
        let blocks = LaunchConfig::new(size(blocks)?, THREADS as u32);
        let args = args![x, scale, largest_exponent(format), vectors as u64, size(rest)?];
        queue.launch(Stream::Compute, "abs_max_scale", None, blocks, args)
    }
}

/// A kernel that can compute the scale of its output: its last two arguments are the `SCALE_PARAMS` of `scale.cuh`.
pub(super) trait ScalingKernel: WritesMatrix {
    fn enqueue_scaling(self, queue: &mut impl Queue, scale: [Arg; 2]) -> Result<()>;
}

/// Implements the kernels without a scale.
macro_rules! also_without_scale {
    ($($kernel:ident),+ $(,)?) => {
        $(impl $crate::device::cuda::launch::GpuKernel for $kernel {
            fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
                self.enqueue_scaling(queue, args![0u64, 0u64])
            }
        })+
    };
}
pub(super) use also_without_scale;

impl<K: ScalingKernel> GpuKernel for WithScale<K> {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Some(ScaleCell { scale, format }) = self.cell else { return self.kernel.enqueue_scaling(queue, args![0u64, 0u64]) };
        check_format(self.kernel.written())?;
        self.kernel.enqueue_scaling(queue, args![scale, largest_exponent(format)])
    }
}

impl GpuKernel for Quantize {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, scale, out, transposed, cols } = self;
        [Some(x), out, transposed].into_iter().flatten().try_for_each(check_aligned)?;
        check_input(x)?;
        let rows = x.elems() / cols;
        let tiles = rows.div_ceil(TILE) * cols.div_ceil(TILE);
        let name = if self.format()? == Dtype::Float8E5m2 { "quantize_e5m2" } else { "quantize_e4m3" };
        let blocks = LaunchConfig::new(size(tiles)?, THREADS as u32);
        queue.launch(Stream::Compute, name, None, blocks, args![x, scale, out, transposed, size(rows)?, size(cols)?])
    }
}

/// # Errors
/// `Unsupported` for other formats than bfloat16, and for unaligned addresses.
fn check_input(x: DeviceSlice) -> Result<()> {
    check_format(x)?;
    check_aligned(x)
}

fn check_format(x: DeviceSlice) -> Result<()> {
    let bfloat16 = x.dtype() == Dtype::Bfloat16;
    if bfloat16 { Ok(()) } else { Err(Error::Unsupported(format!("FP8 of {}: kernels take bfloat16", x.dtype()))) }
}

fn check_aligned(x: DeviceSlice) -> Result<()> {
    let vectors = whole_vectors(wide(x.dtype()), &[x]);
    if vectors { Ok(()) } else { Err(Error::Unsupported(format!("FP8 at address {:x}: kernels take multiples of 16", x.addr()))) }
}
