//! A kernel as a value: its operands, what they must be like, and what it costs.

use super::slice::DeviceSlice;
use super::stream::Stream;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::hardware::rates::Rates;
use std::ops::Deref;

/// One call of a kernel. Arithmetic inside of it is fp32 and a result is rounded once. Sums have a fixed order, so that results never depend
/// on timing or on the number of threads. `accumulate` adds to what the output holds (rounding once more); otherwise it is overwritten.
pub trait Kernel: Copy + Send + 'static {
    /// What errors and spans call it.
    const NAME: &'static str;

    /// The memory that it reads and writes. The order of `operands` is that of the complaints.
    fn operands(&self) -> impl AsRef<[Operand]>;

    /// Bytes read and written: what it takes at least, by the memory's bandwidth.
    fn bytes(&self) -> f64 {
        self.operands().as_ref().iter().map(Operand::traffic).sum()
    }

    /// FLOPs that may take longer than the bytes.
    fn flops(&self) -> f64 {
        0.0
    }

    /// How fast a machine of these rates does its FLOPs.
    fn flops_per_s(&self, _: &Rates) -> f64 {
        f64::INFINITY
    }

    fn stream(&self) -> Stream {
        Stream::Compute
    }

    /// An error if its numbers make no sense, whatever its operands are.
    fn check_shape(&self) -> Result<()> {
        Ok(())
    }

    /// The one float format of all operands whose format is open, for devices whose kernels have one.
    ///
    /// # Errors
    /// `Unsupported` when they are of several.
    fn float_format(&self) -> Result<Dtype> {
        let operands = self.operands();
        let open = operands.as_ref().iter().filter(|operand| operand.dtype.is_none());
        let mut open = open.filter_map(|operand| Some((operand.name, operand.slice?.dtype())));
        let Some((first, dtype)) = open.next() else { return Ok(Dtype::Float32) };
        match open.find(|(_, other)| *other != dtype) {
            None => Ok(dtype),
            Some((name, other)) => {
                Err(Error::Unsupported(format!("{} of two formats, {first} of {dtype} and {name} of {other}", Self::NAME)))
            }
        }
    }
}

/// What a kernel does with an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Reads it: it may overlap others that are read.
    Read,
    /// Reads it: it also may be exactly what is written.
    ReadInPlace,
    /// Writes it: it overlaps nothing.
    Write,
    /// Reads and writes it: it overlaps nothing.
    Update,
}

impl Access {
    pub(super) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Update)
    }
}

/// One operand of a kernel, and what it must be like.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// What errors call it.
    pub name: &'static str,
    /// Where it lies; `None`: it is left out.
    pub slice: Option<DeviceSlice>,
    /// Its format; `None`: a float format, of which devices say what they take.
    pub dtype: Option<Dtype>,
    /// Its elements.
    pub elems: usize,
    pub(crate) access: Access,
    /// It is small beside others, by whose bytes the kernel takes time.
    pub small: bool,
}

impl Operand {
    fn may_share(&self, other: &Self) -> bool {
        match (self.access, other.access) {
            (Access::Write, Access::ReadInPlace) | (Access::ReadInPlace, Access::Write) => self.slice == other.slice,
            (one, other) => !one.writes() && !other.writes(),
        }
    }

    /// Bytes that count.
    fn traffic(&self) -> f64 {
        let ways = if self.access == Access::Update { 2.0 } else { 1.0 };
        self.slice.filter(|_| !self.small).map_or(0.0, |slice| ways * slice.bytes() as f64)
    }

    /// An error that names what is wrong with `operands` of `kernel`: format, size, or one written that overlaps another.
    fn check(kernel: &'static str, operands: &[Self]) -> Result<()> {
        for (i, operand) in operands.iter().enumerate() {
            let Some(slice) = operand.slice else { continue };
            let dtype = operand.dtype.unwrap_or(slice.dtype());
            let Self { name, elems, .. } = operand;
            if (slice.dtype(), slice.elems()) != (dtype, *elems) {
                return Err(refused(kernel, format!("{name} holds {} {}, not {elems} {dtype}", slice.elems(), slice.dtype())));
            }
            let overlaps = |other: &&Self| other.slice.is_some_and(|other| slice.overlaps(other)) && !operand.may_share(other);
            if let Some(other) = operands[..i].iter().find(overlaps) {
                return Err(refused(kernel, format!("{name} overlaps {}", other.name)));
            }
        }
        Ok(())
    }
}

/// The operands of `$kernel` by its fields: access, elements and, unless it is a float format that is open, format. Behind a semicolon come
/// those that are small beside the others.
macro_rules! operands {
    (
        $kernel:expr;
        $($access:ident $field:ident [$elems:expr] $($dtype:ident)?),+ $(,)?
        $(; $($small_access:ident $small:ident [$small_elems:expr] $($small_dtype:ident)?),+ $(,)?)?
    ) => {
        [
            $($crate::device::kernel::operands!(@ $kernel, $access $field [$elems] false $($dtype)?)),+
            $(, $($crate::device::kernel::operands!(@ $kernel, $small_access $small [$small_elems] true $($small_dtype)?)),+)?
        ]
    };
    (@format) => { None };
    (@format $dtype:ident) => { Some($crate::dtype::Dtype::$dtype) };
    (@ $kernel:expr, $access:ident $field:ident [$elems:expr] $small:literal $($dtype:ident)?) => {
        $crate::device::kernel::Operand {
            name: stringify!($field),
            slice: Option::<$crate::device::slice::DeviceSlice>::from($kernel.$field),
            dtype: $crate::device::kernel::operands!(@format $($dtype)?),
            elems: $elems,
            access: $crate::device::kernel::Access::$access,
            small: $small,
        }
    };
}
pub(super) use operands;

/// The error of a kernel that cannot be launched.
pub(super) fn refused(kernel: &'static str, cause: String) -> Error {
    Error::resource(format!("launch {kernel}"), cause)
}

/// A kernel whose operands fit, and lie in the memory of the device that it goes to.
pub struct Checked<K>(K);

impl<K: Kernel> Checked<K> {
    /// `kernel`, if it makes sense and `owned` knows the memory of all its operands.
    pub(super) fn new(kernel: K, owned: impl Fn(DeviceSlice) -> Result<()>) -> Result<Self> {
        kernel.check_shape()?;
        let operands = kernel.operands();
        Operand::check(K::NAME, operands.as_ref())?;
        operands.as_ref().iter().filter_map(|operand| operand.slice).try_for_each(owned)?;
        drop(operands);
        Ok(Self(kernel))
    }
}

impl<K> Deref for Checked<K> {
    type Target = K;
    fn deref(&self) -> &K {
        &self.0
    }
}

/// Bytes of all `slices`.
pub(super) fn bytes<const N: usize>(slices: [DeviceSlice; N]) -> f64 {
    slices.iter().map(|slice| slice.bytes() as f64).sum()
}

/// Rows of `cols` in `x`.
pub(super) fn rows(x: DeviceSlice, cols: usize) -> usize {
    x.elems() / cols.max(1)
}
