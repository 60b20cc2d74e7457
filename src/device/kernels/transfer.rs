//! Transfer kernels: casts, gradient norm, optimizer of resident buckets, and helpers of a step.

use crate::device::kernel::{Access, Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::device::stream::Stream;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::optim::adam::AdamConsts;
use crate::optim::int8::{GROUP, MomentGroup};
use crate::optim::norm::BLOCK;

/// Fills with zero.
#[derive(Clone, Copy, Debug)]
pub struct Zero {
    /// Any format.
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
    /// Same number of elements as `src`.
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

/// Maximum parts of one [`SumSlices`].
pub(crate) const PARTS_MAX: usize = 8;

/// `out[i] = ((before[i] + first part[i]) + second part[i]) + ...` in fp32, rounded once; without `before` the sum begins with the first
/// part.
#[derive(Clone, Copy, Debug)]
pub struct SumSlices {
    pub stream: Stream,
    /// Parts in order, in one format. The first is not `None`. One part may be `out`.
    pub parts: [Option<DeviceSlice>; PARTS_MAX],
    /// fp32; may be `out`.
    pub before: Option<DeviceSlice>,
    /// Any size, in the format of the parts or in fp32.
    pub out: DeviceSlice,
}

impl SumSlices {
    /// The sum of `parts` on `stream`.
    ///
    /// # Panics
    /// If there are more than [`PARTS_MAX`] parts.
    pub fn new(stream: Stream, parts: &[DeviceSlice], before: Option<DeviceSlice>, out: DeviceSlice) -> Self {
        let mut all = [None; PARTS_MAX];
        for (place, part) in all[..parts.len()].iter_mut().zip(parts) {
            *place = Some(*part);
        }
        Self { stream, parts: all, before, out }
    }

    /// The format of the parts.
    pub(crate) fn dtype(&self) -> Dtype {
        self.parts[0].map_or(Dtype::Float32, |first| first.dtype())
    }
}

impl Kernel for SumSlices {
    const NAME: &'static str = "sum_slices";

    fn check_shape(&self) -> Result<()> {
        let (dtype, out) = (self.dtype(), self.out.dtype());
        let fits = self.parts[0].is_some() && self.parts.iter().flatten().all(|part| part.dtype() == dtype);
        if fits && (out == dtype || out == Dtype::Float32) {
            return Ok(());
        }
        Err(refused(Self::NAME, format!("parts are of one format, {dtype}, and their sum of that or float32, not {out}")))
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let elems = self.out.elems();
        let read = |name, slice, dtype| Operand { name, slice, dtype, elems, access: Access::ReadInPlace, small: false };
        let mut all = [read("before", self.before, Some(Dtype::Float32)); PARTS_MAX + 2];
        all[1..=PARTS_MAX].iter_mut().zip(self.parts).for_each(|(place, part)| *place = read("part", part, None));
        all[PARTS_MAX + 1] = Operand { access: Access::Write, ..read("out", Some(self.out), None) };
        all
    }

    fn stream(&self) -> Stream {
        self.stream
    }
}

/// Sums of squares of gradients by blocks of [`BLOCK`], and whether a gradient is infinite or NaN. See [`crate::optim::norm`].
#[derive(Clone, Copy, Debug)]
pub struct GradNormPartials {
    pub stream: Stream,
    /// Any size.
    pub grads: DeviceSlice,
    /// One sum for each block, fp32.
    pub partials: DeviceSlice,
    /// int32 `[1]`: set to 1 if a gradient is not finite, otherwise unchanged.
    pub nonfinite: DeviceSlice,
}

impl Kernel for GradNormPartials {
    const NAME: &'static str = "grad_norm_partials";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.grads.elems();
        operands![self; Read grads[n], Write partials[n.div_ceil(BLOCK)] Float32; Write nonfinite[1] Int32]
    }

    fn stream(&self) -> Stream {
        self.stream
    }
}

/// The optimizer's step on a part of a resident bucket; bit-identical to [`crate::optim::adam`], with 8-bit moments to
/// [`crate::optim::int8_state`]. All operands have the same number of elements.
#[derive(Clone, Copy, Debug)]
pub struct Adam {
    /// Index of the first element in the flat order.
    pub first: usize,
    /// fp32 parameters, updated.
    pub params: DeviceSlice,
    /// First moments, fp32, bf16, or uint8 for groups of 8-bit moments; updated.
    pub m: DeviceSlice,
    /// Second moments, in the format of `m`, updated.
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
        let moments = moment_values(self.m.dtype(), n);
        let mut all = operands![self; Update params[n] Float32, Update m[moments], Update v[moments], Read grads[n], Write out[n]];
        for moment in [1, 2] {
            all[moment].dtype = Some(self.m.dtype());
        }
        all
    }

    fn check_shape(&self) -> Result<()> {
        check_moments(Self::NAME, self.m.dtype(), self.first, self.params.elems())
    }
}

/// [`Adam`] with split masters; bit-identical to [`crate::optim::split`]. All operands have the same number of elements.
#[derive(Clone, Copy, Debug)]
pub struct SplitAdam {
    /// Index of the first element in the flat order.
    pub first: usize,
    /// Working weights, bf16, updated.
    pub weights: DeviceSlice,
    /// Lower halves of the masters, uint16, updated.
    pub lower: DeviceSlice,
    /// First moments, fp32, bf16, or uint8 for groups of 8-bit moments; updated.
    pub m: DeviceSlice,
    /// Second moments in the format of `m`, updated. The ties of the masters are in their signs, unless they have 8 bits.
    pub v: DeviceSlice,
    /// bf16.
    pub grads: DeviceSlice,
    pub consts: AdamConsts,
    /// Factor on the gradients: clip scale over loss scale.
    pub scale: f32,
}

impl Kernel for SplitAdam {
    const NAME: &'static str = "adam_step_split";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let n = self.weights.elems();
        let moments = moment_values(self.m.dtype(), n);
        let mut all = operands![
            self; Update weights[n] Bfloat16, Update lower[n] Uint16, Update m[moments], Update v[moments], Read grads[n] Bfloat16
        ];
        for moment in [2, 3] {
            all[moment].dtype = Some(self.m.dtype());
        }
        all
    }

    fn check_shape(&self) -> Result<()> {
        check_moments(Self::NAME, self.m.dtype(), self.first, self.weights.elems())
    }
}

/// Values of `dtype` that have the moments of `elems` elements. Moments of `uint8` are [`MomentGroup`]s.
const fn moment_values(dtype: Dtype, elems: usize) -> usize {
    match dtype {
        Dtype::Uint8 => elems.div_ceil(GROUP) * size_of::<MomentGroup>(),
        _ => elems,
    }
}

/// Checks the format of moments in device memory, of `elems` elements from `first` on.
fn check_moments(kernel: &'static str, dtype: Dtype, first: usize, elems: usize) -> Result<()> {
    match dtype {
        Dtype::Float32 | Dtype::Bfloat16 => Ok(()),
        Dtype::Uint8 if first.is_multiple_of(GROUP) && elems.is_multiple_of(GROUP) => Ok(()),
        Dtype::Uint8 => Err(refused(kernel, format!("8-bit moments of {elems} elements from {first} on, not of whole groups of {GROUP}"))),
        other => Err(refused(kernel, format!("moments of {other}"))),
    }
}

/// Writes `value`, rounded to the format, to element `index`: fault injection, see `inject` in the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Poke {
    /// Any size.
    pub x: DeviceSlice,
    /// Less than the number of elements.
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
