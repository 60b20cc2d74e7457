//! Kernels that treat every element alone.

use super::super::launch::{Arg, LaunchConfig, Queue, args, size};
use super::super::modules::PtxSource;
use super::grid::{whole_vectors, wide};
use crate::device::arguments::{arguments, check, rows};
use crate::device::{DeviceSlice, Stream};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: "transformer/pointwise.ptx",
    ptx: include_str!("../../../../ptx/transformer/pointwise.ptx"),
    typed: &["swiglu", "swiglu_backward", "gelu", "gelu_backward"],
    plain: &[],
};

/// Threads of a block, as in `pointwise.cu`.
const THREADS: usize = 256;

/// See [`crate::device::Kernels::swiglu`].
pub(super) fn swiglu(dev: &mut impl Queue, gate_up: DeviceSlice, out: DeviceSlice, cols: usize) -> Result<()> {
    let n = rows(out, cols) * cols;
    check("swiglu", arguments![out.dtype => in gate_up[2 * n], out out[n]])?;
    let groups = Groups::new(out, cols, &[gate_up, out])?;
    launch(dev, "swiglu", out, groups, args![gate_up, out, groups.count, size(cols)?, groups.wide])
}

/// See [`crate::device::Kernels::swiglu_backward`].
pub(super) fn swiglu_backward(
    dev: &mut impl Queue,
    dout: DeviceSlice,
    gate_up: DeviceSlice,
    dgate_up: DeviceSlice,
    cols: usize,
) -> Result<()> {
    let n = rows(dout, cols) * cols;
    check("swiglu_backward", arguments![dout.dtype => in dout[n], in gate_up[2 * n], out dgate_up[2 * n]])?;
    let groups = Groups::new(dout, cols, &[dout, gate_up, dgate_up])?;
    launch(dev, "swiglu_backward", dout, groups, args![dout, gate_up, dgate_up, groups.count, size(cols)?, groups.wide])
}

/// See [`crate::device::Kernels::gelu`].
pub(super) fn gelu(dev: &mut impl Queue, x: DeviceSlice, out: DeviceSlice) -> Result<()> {
    check("gelu", arguments![x.dtype => in x[out.elems], out out[x.elems]])?;
    let groups = Groups::new(out, out.elems, &[x, out])?;
    launch(dev, "gelu", out, groups, args![x, out, groups.count, groups.wide])
}

/// See [`crate::device::Kernels::gelu_backward`].
pub(super) fn gelu_backward(dev: &mut impl Queue, dout: DeviceSlice, x: DeviceSlice, dx: DeviceSlice) -> Result<()> {
    check("gelu_backward", arguments![x.dtype => in x[dx.elems], out dx[x.elems]])?;
    if dout != dx {
        check("gelu_backward", arguments![x.dtype => in dout[x.elems], out dx[x.elems]])?;
    }
    let groups = Groups::new(dx, dx.elems, &[dout, x, dx])?;
    launch(dev, "gelu_backward", dx, groups, args![dout, x, dx, groups.count, groups.wide])
}

/// How threads share out the elements of one result.
#[derive(Clone, Copy)]
struct Groups {
    /// One for each thread; they do not reach past 2^32 even when whole blocks of threads take them.
    count: u32,
    /// Whether a group is 16 bytes, not one element.
    wide: bool,
}

impl Groups {
    /// Of `out`, whose rows of `cols`, in all of `slices`, decide how wide they are.
    ///
    /// # Errors
    /// `Unsupported` when they are too many for one grid.
    fn new(out: DeviceSlice, cols: usize, slices: &[DeviceSlice]) -> Result<Self> {
        let wide_groups = whole_vectors(cols, slices);
        let count = if wide_groups { out.elems / wide(out.dtype) } else { out.elems };
        size(count.next_multiple_of(THREADS))?;
        Ok(Self { count: size(count)?, wide: wide_groups })
    }
}

fn launch<const N: usize>(dev: &mut impl Queue, name: &'static str, out: DeviceSlice, groups: Groups, args: [Arg; N]) -> Result<()> {
    let blocks = groups.count.div_ceil(THREADS as u32);
    dev.launch(Stream::Compute, name, Some(out.dtype), LaunchConfig::new(blocks, THREADS as u32), args)
}
