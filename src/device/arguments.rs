//! What kernels are given, checked before they are enqueued: a task could only panic.

use crate::device::{AttentionShape, DeviceSlice};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// What a kernel expects of one argument.
pub(super) struct Argument {
    pub(super) name: &'static str,
    pub(super) slice: DeviceSlice,
    pub(super) dtype: Dtype,
    pub(super) elems: usize,
    pub(super) written: bool,
}

impl Argument {
    fn overlaps(&self, other: &Self) -> bool {
        let end = |slice: DeviceSlice| slice.addr + slice.bytes() as u64;
        self.slice.addr < end(other.slice) && other.slice.addr < end(self.slice)
    }
}

/// An error that names what is wrong with the arguments of `kernel`: format, size, or one written that overlaps another.
pub(super) fn check<const N: usize>(kernel: &'static str, arguments: [Argument; N]) -> Result<()> {
    let wrong = |cause: String| Err(Error::resource(format!("launch {kernel}"), cause));
    for (i, a) in arguments.iter().enumerate() {
        if (a.slice.dtype, a.slice.elems) != (a.dtype, a.elems) {
            return wrong(format!("{} holds {} {}, not {} {}", a.name, a.slice.elems, a.slice.dtype, a.elems, a.dtype));
        }
        if let Some(b) = arguments[..i].iter().find(|b| (a.written || b.written) && a.overlaps(b)) {
            return wrong(format!("{} overlaps {}", a.name, b.name));
        }
    }
    Ok(())
}

/// The arguments of a kernel by format: `out` is written, `in` is not.
macro_rules! arguments {
    ($($dtype:expr => $($direction:tt $slice:ident [$elems:expr]),+);+) => {
        [$($($crate::device::arguments::Argument {
            name: stringify!($slice),
            slice: $slice,
            dtype: $dtype,
            elems: $elems,
            written: matches!(stringify!($direction).as_bytes(), b"out"),
        }),+),+]
    };
}
pub(crate) use arguments;

/// Rows of `cols` in `x`.
pub(super) fn rows(x: DeviceSlice, cols: usize) -> usize {
    x.elems / cols.max(1)
}

/// An error if there are documents, but not of every token.
pub(super) fn check_documents(kernel: &'static str, documents: Option<DeviceSlice>, shape: &AttentionShape) -> Result<()> {
    documents.map_or(Ok(()), |documents| check(kernel, arguments![Dtype::Int32 => in documents[shape.tokens()]]))
}

/// An error if the heads do not fit together or the sequences are empty.
pub(super) fn check_shape(kernel: &'static str, shape: &AttentionShape) -> Result<()> {
    let whole = shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads);
    if whole && shape.heads * shape.head_dim * shape.tokens() > 0 && shape.window != Some(0) {
        return Ok(());
    }
    Err(Error::resource(format!("launch {kernel}"), format!("{shape:?} makes no sense")))
}
