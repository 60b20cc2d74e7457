//! A kernel as a value: its operands, their requirements, and its cost.

use super::slice::DeviceSlice;
use super::stream::Stream;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::hardware::rates::Rates;
use std::ops::Deref;

/// One call of a kernel. Arithmetic inside is fp32, and a result is rounded once. Sums have a fixed order, so results do not depend on
/// timing or on the number of threads. With `accumulate` the result is added to the output (and rounded once more); otherwise it overwrites
/// the output.
pub trait Kernel: Copy + Send + 'static {
    /// Name in errors and spans.
    const NAME: &'static str;

    /// The operands: memory that the kernel reads and writes. Errors are reported in their order.
    fn operands(&self) -> impl AsRef<[Operand]>;

    /// Bytes read and written. With the memory bandwidth they give the minimum time.
    fn bytes(&self) -> f64 {
        self.operands().as_ref().iter().map(Operand::traffic).sum()
    }

    /// FLOPs, if they may take longer than the bytes.
    fn flops(&self) -> f64 {
        0.0
    }

    /// FLOP/s of this kernel on a machine with these rates.
    fn flops_per_s(&self, _: &Rates) -> f64 {
        f64::INFINITY
    }

    /// Bytes that a second kernel is expected to read and write on a GPU to complete this one; 0 without a second kernel.
    fn bytes_after(&self) -> f64 {
        0.0
    }

    fn stream(&self) -> Stream {
        Stream::Compute
    }

    /// An error if the sizes are invalid, whatever the operands are.
    fn check_shape(&self) -> Result<()> {
        Ok(())
    }

    /// The common float format of all operands whose format is open, for devices whose kernels support one format only.
    ///
    /// # Errors
    /// `Unsupported` when their formats differ.
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

/// Access of a kernel to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read; it may overlap other read operands.
    Read,
    /// Read; it may also be identical to the written operand.
    ReadInPlace,
    /// Written; it overlaps no operand.
    Write,
    /// Read and written; it overlaps no operand.
    Update,
}

impl Access {
    pub(super) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Update)
    }
}

/// One operand of a kernel, and its requirements.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Name in errors.
    pub name: &'static str,
    /// Memory of the operand; `None` if it is absent.
    pub slice: Option<DeviceSlice>,
    /// Format; `None`: any float format that the device supports.
    pub dtype: Option<Dtype>,
    /// Number of elements.
    pub elems: usize,
    pub(crate) access: Access,
    /// Whether the operand is small compared with the others, so that it does not count for the kernel's time.
    pub small: bool,
}

impl Operand {
    fn may_share(&self, other: &Self) -> bool {
        match (self.access, other.access) {
            (Access::Write, Access::ReadInPlace) | (Access::ReadInPlace, Access::Write) => self.slice == other.slice,
            (one, other) => !one.writes() && !other.writes(),
        }
    }

    /// Bytes that count for the kernel's time.
    pub(super) fn traffic(&self) -> f64 {
        let ways = if self.access == Access::Update { 2.0 } else { 1.0 };
        self.slice.filter(|_| !self.small).map_or(0.0, |slice| ways * slice.bytes() as f64)
    }

    /// An error for a wrong format or size of an operand of `kernel`, or a written operand that overlaps another.
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

/// Makes the operands of `$kernel` from its fields: access, elements, and the format unless it is an open float format. Small operands
/// follow after a semicolon.
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

/// A kernel whose operands have been checked and belong to the device that it is launched on.
pub struct Checked<K>(K);

impl<K: Kernel> Checked<K> {
    /// Checks `kernel`: its sizes, its operands, and with `owned` the memory of all operands.
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

/// Rows of `cols` columns in `x`.
pub(super) fn rows(x: DeviceSlice, cols: usize) -> usize {
    x.elems() / cols.max(1)
}
