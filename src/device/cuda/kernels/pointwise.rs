//! Elementwise kernels.

use super::super::launch::{Arg, GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{whole_vectors, wide};
use super::quantize::{ScalingKernel, also_without_scale};
use crate::device::{
    DeviceSlice, Geglu, GegluBackward, Gelu, GeluBackward, Kernel, ScaleAdd, SigmoidGate, SigmoidGateBackward, Stream, Swiglu,
    SwigluBackward,
};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/pointwise.ptx"),
    typed: &[
        "swiglu",
        "swiglu_backward",
        "geglu",
        "geglu_backward",
        "gelu",
        "gelu_backward",
        "scale_add",
        "sigmoid_gate",
        "sigmoid_gate_backward",
    ],
    plain: &[],
};

/// Threads of a block, as in `pointwise.cu`.
const THREADS: usize = 256;

also_without_scale!(Swiglu, SwigluBackward, Geglu, GegluBackward, Gelu, GeluBackward, ScaleAdd);

impl ScalingKernel for Swiglu {
    fn enqueue_scaling(self, queue: &mut impl Queue, [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { gate_up, out, cols } = self;
        let groups = Groups::new(out, cols, &[gate_up, out])?;
        launch(queue, &self, groups, args![gate_up, out, groups.count, size(cols)?, groups.wide, cell, exponent])
    }
}

impl ScalingKernel for SwigluBackward {
    fn enqueue_scaling(self, queue: &mut impl Queue, [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { dout, gate_up, dgate_up, cols } = self;
        let groups = Groups::new(dout, cols, &[dout, gate_up, dgate_up])?;
        launch(queue, &self, groups, args![dout, gate_up, dgate_up, groups.count, size(cols)?, groups.wide, cell, exponent])
    }
}

impl ScalingKernel for Geglu {
    fn enqueue_scaling(self, queue: &mut impl Queue, [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { gate_up, out, cols } = self;
        let groups = Groups::new(out, cols, &[gate_up, out])?;
        launch(queue, &self, groups, args![gate_up, out, groups.count, size(cols)?, groups.wide, cell, exponent])
    }
}

impl ScalingKernel for GegluBackward {
    fn enqueue_scaling(self, queue: &mut impl Queue, [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { dout, gate_up, dgate_up, cols } = self;
        let groups = Groups::new(dout, cols, &[dout, gate_up, dgate_up])?;
        launch(queue, &self, groups, args![dout, gate_up, dgate_up, groups.count, size(cols)?, groups.wide, cell, exponent])
    }
}

impl ScalingKernel for Gelu {
    fn enqueue_scaling(self, queue: &mut impl Queue, [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { x, out } = self;
        let groups = Groups::new(out, out.elems(), &[x, out])?;
        launch(queue, &self, groups, args![x, out, groups.count, groups.wide, cell, exponent])
    }
}

impl ScalingKernel for GeluBackward {
    fn enqueue_scaling(self, queue: &mut impl Queue, [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { dout, x, dx } = self;
        let groups = Groups::new(dx, dx.elems(), &[dout, x, dx])?;
        launch(queue, &self, groups, args![dout, x, dx, groups.count, groups.wide, cell, exponent])
    }
}

impl ScalingKernel for ScaleAdd {
    fn enqueue_scaling(self, queue: &mut impl Queue, [cell, exponent]: [Arg; 2]) -> Result<()> {
        let Self { x, scale, base, out } = self;
        let groups = Groups::new(out, out.elems(), &[x, base.unwrap_or(x), out])?;
        launch(queue, &self, groups, args![x, base, out, groups.count, scale, groups.wide, cell, exponent])
    }
}

impl GpuKernel for SigmoidGate {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, gate, out } = self;
        let groups = Groups::new(out, out.elems(), &[x, gate, out])?;
        launch(queue, &self, groups, args![x, gate, out, groups.count, groups.wide])
    }
}

impl GpuKernel for SigmoidGateBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dout, x, gate, dx, dgate } = self;
        let groups = Groups::new(dx, dx.elems(), &[dout, x, gate, dx, dgate])?;
        launch(queue, &self, groups, args![dout, x, gate, dx, dgate, groups.count, groups.wide])
    }
}

/// Division of a result's elements into groups, one group for each thread.
#[derive(Clone, Copy)]
struct Groups {
    /// Number of groups. Rounded up to whole blocks of threads it stays below 2^32.
    count: u32,
    /// Whether a group is a 16-byte vector instead of one element.
    wide: bool,
}

impl Groups {
    /// Groups of `out`. They are vectors if rows of `cols` columns consist of whole vectors in all of `slices`.
    ///
    /// # Errors
    /// `Unsupported` when there are too many groups for one grid.
    fn new(out: DeviceSlice, cols: usize, slices: &[DeviceSlice]) -> Result<Self> {
        let wide_groups = whole_vectors(cols, slices);
        let count = if wide_groups { out.elems() / wide(out.dtype()) } else { out.elems() };
        size(count.next_multiple_of(THREADS))?;
        Ok(Self { count: size(count)?, wide: wide_groups })
    }
}

fn launch<K: Kernel, const N: usize>(queue: &mut impl Queue, kernel: &K, groups: Groups, args: [Arg; N]) -> Result<()> {
    let blocks = LaunchConfig::new(groups.count.div_ceil(THREADS as u32), THREADS as u32);
    queue.launch(Stream::Compute, K::NAME, Some(kernel.float_format()?), blocks, args)
}
