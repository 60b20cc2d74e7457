//! The transfer path: casts, the gradient's norm, the optimizer of resident buckets, and what a step needs beside.

use crate::device::kernel::{Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::device::stream::Stream;
use crate::error::Result;
use crate::optim::adam::AdamConsts;
use crate::optim::norm::BLOCK;

/// Fills with zero.
#[derive(Clone, Copy, Debug)]
pub struct Zero {
    /// Of any format.
    pub x: DeviceSlice,
}

impl Kernel for Zero {
    const NAME: &'static str = "zero";

    fn operands(&self) -> impl AsRef<[Operand]> {
        operands![self; Write x[self.x.elems()]]
    }
}

/// Converts between float32 and another float format; within one format it copies.
///
/// # Errors
/// `Unsupported` between the 16-bit formats and for int32.
#[derive(Clone, Copy, Debug)]
pub struct Cast {
    pub stream: Stream,
    /// Any size.
    pub src: DeviceSlice,
    /// As many elements.
    pub dst: DeviceSlice,
}

impl Kernel for Cast {
    const NAME: &'static str = "cast";

    fn operands(&self) -> impl AsRef<[Operand]> {
        operands![self; Read src[self.dst.elems()], Write dst[self.src.elems()]]
    }

    fn stream(&self) -> Stream {
        self.stream
    }
}

/// Sums of squares of gradients by blocks of [`BLOCK`], and whether one is infinite or NaN. See [`crate::optim::norm`].
#[derive(Clone, Copy, Debug)]
pub struct GradNormPartials {
    /// Any size.
    pub grads: DeviceSlice,
    /// One sum a block, fp32.
    pub partials: DeviceSlice,
    /// int32 `[1]`: becomes 1 if any gradient is not finite and is left alone otherwise.
    pub nonfinite: DeviceSlice,
}

impl Kernel for GradNormPartials {
    const NAME: &'static str = "grad_norm_partials";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.grads.elems();
        operands![self; Read grads[n], Write partials[n.div_ceil(BLOCK)] Float32; Write nonfinite[1] Int32]
    }
}

/// The optimizer's step on equally long parts of a resident bucket; to the bit what [`crate::optim::adam`] specifies.
#[derive(Clone, Copy, Debug)]
pub struct Adam {
    /// fp32 parameters, updated.
    pub params: DeviceSlice,
    /// First moments, fp32, updated.
    pub m: DeviceSlice,
    /// Second moments, fp32, updated.
    pub v: DeviceSlice,
    pub grads: DeviceSlice,
    /// Working weights, written.
    pub out: DeviceSlice,
    pub consts: AdamConsts,
    /// Factor on the gradients: clip scale over loss scale.
    pub scale: f32,
}

impl Kernel for Adam {
    const NAME: &'static str = "adam_step";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.params.elems();
        operands![self; Update params[n] Float32, Update m[n] Float32, Update v[n] Float32, Read grads[n], Write out[n]]
    }
}

/// Writes `value`, rounded to the format, into element `index`: fault injection, see `inject` in the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Poke {
    /// Any size.
    pub x: DeviceSlice,
    /// Below its elements.
    pub index: usize,
    pub value: f32,
}

impl Kernel for Poke {
    const NAME: &'static str = "poke";

    fn check_shape(&self) -> Result<()> {
        if self.index < self.x.elems() { Ok(()) } else { Err(refused(Self::NAME, format!("element {} of {}", self.index, self.x.elems()))) }
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        operands![self; Write x[self.x.elems()]]
    }

    fn bytes(&self) -> f64 {
        0.0
    }
}
