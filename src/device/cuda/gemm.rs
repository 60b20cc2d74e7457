//! Matrix products by cuBLASLt. A product's descriptors and algorithm form a plan, which is made when a shape is first used and then
//! cached.
//!
//! The algorithm is the library's first suggestion, chosen without timing, among those that sum in a fixed order in fp32. It is therefore
//! the same in every process with this library on this GPU. One algorithm with possibly wrong results is skipped.

mod groups;
mod parts;

use super::driver::RawStream;
use super::error::failed;
use super::group_tables::GroupTables;
use super::libraries::{CUBLASLT, Libraries};
use crate::device::footprint::gpu::MATMUL_WORKSPACE_BYTES as WORKSPACE_BYTES;
use crate::device::{DeviceSlice, GroupedShape, Kernel, Matmul, MatmulLayout, MatmulShape, ProductAlgorithm, ScaledMatmul};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::units::Bytes;
use cust::context::CurrentContext;
use cust::error::CudaError;
use cust::memory::DeviceBuffer;
use groups::GroupProducts;
use parts::{CublasLt, MatmulPlan, Opaque, Parts, data_type};
use std::collections::HashMap;
use std::ptr;

/// Constants of cuBLASLt, from `cublasLt.h` of CUDA 13.0; they are the same in CUDA 12.
const DESC_EPILOGUE: i32 = 7;
const DESC_BIAS_POINTER: i32 = 8;
const DESC_SCALE_POINTER_A: i32 = 17;
const DESC_SCALE_POINTER_B: i32 = 18;
const EPILOGUE_BIAS: u32 = 4;

/// The oldest cuBLAS used for FP8 products: 12.1, the first version that supports them on Ada, too. Sums are in fp32, because `FAST_ACCUM`
/// is off by default.
const OLDEST_FP8: usize = 120_100;

/// A product with or without scales.
#[derive(Clone, Copy)]
pub(super) struct CublasProduct {
    shape: MatmulShape,
    a: DeviceSlice,
    b: DeviceSlice,
    /// Scales of a and b, if they have scales.
    scales: Option<[DeviceSlice; 2]>,
    bias: Option<DeviceSlice>,
    base: Option<DeviceSlice>,
    c: DeviceSlice,
    formats: Formats,
}

impl CublasProduct {
    /// # Errors
    /// `Unsupported` when the operands have different formats.
    pub(super) fn of(kernel: Matmul) -> Result<Self> {
        let Matmul { shape, a, b, bias, base, c } = kernel;
        Ok(Self { shape, a, b, scales: None, bias, base, c, formats: Formats::one(kernel.float_format()?) })
    }

    /// # Errors
    /// `Unsupported` when bias or base have another format than the result.
    pub(super) fn scaled(kernel: ScaledMatmul) -> Result<Self> {
        let ScaledMatmul { a, a_scale, b, b_scale, bias, base, c, .. } = kernel;
        let formats = Formats { a: a.dtype(), b: b.dtype(), c: kernel.float_format()? };
        Ok(Self { shape: kernel.shape(), a, b, scales: Some([a_scale, b_scale]), bias, base, c, formats })
    }
}

/// Formats of the factors and of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Formats {
    a: Dtype,
    b: Dtype,
    c: Dtype,
}

impl Formats {
    fn one(dtype: Dtype) -> Self {
        Self { a: dtype, b: dtype, c: dtype }
    }
}

/// Device addresses in a matmul descriptor, which are set for each product; 0 for absent operands.
#[derive(Clone, Copy)]
struct Pointers {
    bias: u64,
    /// Scales of a and b.
    scales: [u64; 2],
}

impl Pointers {
    const NONE: Self = Self { bias: 0, scales: [0; 2] };

    fn of(product: &CublasProduct) -> Self {
        let scales = product.scales.map_or([0; 2], |scales| scales.map(DeviceSlice::addr));
        Self { bias: product.bias.map_or(0, DeviceSlice::addr), scales }
    }

    /// The first factor of cuBLASLt is `b`.
    fn set(self, describe: impl Fn(i32, u64) -> Result<()>) -> Result<()> {
        let [a_scale, b_scale] = self.scales;
        let all = [(DESC_BIAS_POINTER, self.bias), (DESC_SCALE_POINTER_A, b_scale), (DESC_SCALE_POINTER_B, a_scale)];
        let mut given = all.into_iter().filter(|(_, address)| *address != 0);
        given.try_for_each(|(attribute, address)| describe(attribute, address))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct MatmulKey {
    shape: MatmulShape,
    formats: Formats,
    /// Alignments of a, b, base, c and bias in bytes; 0 for an absent bias.
    alignments: [u16; 5],
}

/// The reason why the installed cuBLASLt has no grouped expert products on a GPU of this generation; `None` if it has them.
///
/// # Errors
/// `Resource` when cuBLASLt is not installed.
pub(super) fn grouped_obstacle(libraries: &Libraries, generation: i32) -> Result<Option<String>> {
    let lt = CublasLt::bind(&libraries.open(&CUBLASLT)?)?;
    // SAFETY: the function takes no arguments and needs no context.
    Ok(groups::obstacle(unsafe { (lt.version)() }, generation))
}

/// The library, the cached plans, and their shared workspace.
pub(super) struct Gemm {
    lt: CublasLt,
    handle: Opaque,
    plans: HashMap<MatmulKey, MatmulPlan>,
    groups: Option<GroupProducts>,
    workspace: DeviceBuffer<u8>,
}

impl Gemm {
    /// Opens the library for the current context.
    pub(super) fn new(libraries: &Libraries) -> Result<Self> {
        let lt = CublasLt::bind(&libraries.open(&CUBLASLT)?)?;
        // SAFETY: products read only parts of the workspace that they have written; for grouped products the workspace is cleared when they
        // are enabled.
        let workspace = unsafe { DeviceBuffer::uninitialized(WORKSPACE_BYTES) }.map_err(|e| {
            let operation = format!("allocate {} of GPU memory for cuBLASLt", Bytes(WORKSPACE_BYTES as u64));
            failed(e as u32, operation)
        })?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        lt.check(unsafe { (lt.create)(&mut handle) }, || "start cuBLASLt".into())?;
        Ok(Self { lt, handle, plans: HashMap::new(), groups: None, workspace })
    }

    /// Enables grouped expert products on a GPU of `generation`.
    ///
    /// # Errors
    /// `Unsupported` when the library or the GPU does not support them.
    pub(super) fn open_groups(&mut self, libraries: &Libraries, generation: i32) -> Result<()> {
        self.groups = Some(GroupProducts::new(libraries, self.version(), generation)?);
        let clear = |e: CudaError| failed(e as u32, "clear cuBLASLt's memory for products of experts".into());
        // The grouped kernels read more of the workspace than they have written (13.8, by initcheck), so clear it for reproducible bits.
        self.workspace.set_zero().map_err(clear)?;
        // The streams of products are non-blocking and would not wait for this memset.
        CurrentContext::synchronize().map_err(clear)
    }

    /// Tables that kernels write and grouped expert products read; `None` unless the products are enabled.
    pub(super) fn group_tables(&self) -> Option<GroupTables> {
        self.groups.as_ref().map(GroupProducts::tables)
    }

    /// Returns a closure that enqueues the grouped expert products that the tables describe, of 16-bit `dtype`. All sizes in `shape` must
    /// be positive.
    ///
    /// # Errors
    /// `Unsupported` unless grouped products are enabled; `Resource` when the library has no algorithm.
    pub(super) fn groups(&mut self, shape: GroupedShape, dtype: Dtype) -> Result<impl FnOnce(&RawStream) -> Result<()> + use<>> {
        let workspace = self.workspace.as_device_ptr().as_raw();
        let groups =
            self.groups.as_mut().ok_or_else(|| Error::Unsupported("products of experts that are not prepared in cuBLASLt".into()))?;
        groups.product((self.lt, self.handle, workspace), shape, dtype)
    }

    /// Version as a number, such as 130100 for 13.1.0.
    pub(super) fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.lt.version)() }
    }

    /// # Errors
    /// `Unsupported` when this version does not support the FP8 products used here.
    pub(super) fn check_fp8(&self) -> Result<()> {
        let version = self.version();
        if version >= OLDEST_FP8 {
            return Ok(());
        }
        Err(Error::Unsupported(format!("products in FP8 by cuBLASLt {version}: they need {OLDEST_FP8} (CUDA 12.1) or newer")))
    }

    /// Returns a closure that enqueues a product. `None`: the result has no elements.
    ///
    /// # Errors
    /// `Unsupported` on int32, and for sums of no terms (`k = 0`).
    pub(super) fn product(&mut self, product: CublasProduct) -> Result<Option<impl FnOnce(&RawStream) -> Result<()> + use<>>> {
        let CublasProduct { shape, a, b, bias, base, c, formats, .. } = product;
        if c.elems() == 0 {
            return Ok(None);
        }
        if shape.k == 0 {
            return Err(Error::Unsupported(format!("a matrix product of {} x {} sums of no terms", shape.m, shape.n)));
        }
        let addend = base.unwrap_or(c);
        let alignments = [alignment(a), alignment(b), alignment(addend), alignment(c), bias.map_or(0, alignment)];
        let pointers = Pointers::of(&product);
        let plan = self.plan(MatmulKey { shape, formats, alignments }, pointers)?;
        let Self { lt, handle, ref workspace, .. } = *self;
        let workspace = workspace.as_device_ptr().as_raw();
        pointers.set(|attribute, address| plan.describe(&lt, attribute, address))?;
        let (one, beta) = (1f32, if base.is_some() { 1f32 } else { 0f32 });
        let [first, second, result] = plan.layouts;
        Ok(Some(move |raw: &RawStream| {
            // SAFETY: the layouts describe these slices; the scalars are read during the call.
            let status = unsafe {
                (lt.matmul)(
                    handle,
                    plan.description,
                    &one,
                    b.addr(),
                    first,
                    a.addr(),
                    second,
                    &beta,
                    addend.addr(),
                    result,
                    c.addr(),
                    result,
                    &plan.algorithm,
                    workspace,
                    WORKSPACE_BYTES,
                    raw.0.cast(),
                )
            };
            lt.check(status, || format!("multiply matrices, {shape:?} on {}", formats.a))
        }))
    }

    /// The plan for `key`, made on its first use. `pointers` represent all pointers with the same alignments.
    fn plan(&mut self, key: MatmulKey, pointers: Pointers) -> Result<MatmulPlan> {
        if let Some(plan) = self.plans.get(&key) {
            return Ok(*plan);
        }
        let (lt, mut parts) = (self.lt, Parts::new(self.lt));
        describe(&lt, &mut parts, key, pointers)?;
        let operation = || format!("choose an algorithm for a matrix product, {:?} on {}", key.shape, key.formats.a);
        let (suggestion, chosen) = parts.choose(self.handle, operation)?;
        let plan = parts.keep(suggestion, chosen);
        self.plans.insert(key, plan);
        Ok(plan)
    }

    /// Algorithms of all plans so far, sorted, so that the order is the same in every process.
    pub(super) fn algorithms(&self) -> Vec<ProductAlgorithm> {
        let single = self.plans.iter().map(|(key, plan)| plan.algorithm(key.shape, None, key.formats.a));
        let mut all: Vec<_> = single.chain(self.groups.iter().flat_map(GroupProducts::algorithms)).collect();
        all.sort_unstable();
        all
    }

    /// The algorithm of a product of well aligned matrices without bias. Runs no kernel.
    pub(super) fn algorithm_of(&mut self, shape: MatmulShape, dtype: Dtype) -> Result<ProductAlgorithm> {
        let key = MatmulKey { shape, formats: Formats::one(dtype), alignments: [256, 256, 256, 256, 0] };
        Ok(self.plan(key, Pointers::NONE)?.algorithm(shape, None, dtype))
    }
}

/// Matrices of cuBLASLt are column-major, so a row-major matrix is passed as its transpose. The product becomes `c^T = op(b)^T op(a)^T`:
/// the first factor is `b`, and `c^T` has n rows.
fn describe(lt: &CublasLt, parts: &mut Parts, key: MatmulKey, pointers: Pointers) -> Result<()> {
    let MatmulShape { layout, m, n, k } = key.shape;
    let (b, transpose_b) = match layout {
        MatmulLayout::Nt => ([k, n], true),
        MatmulLayout::Nn | MatmulLayout::Tn => ([n, k], false),
    };
    let (a, transpose_a) = match layout {
        MatmulLayout::Tn => ([m, k], true),
        MatmulLayout::Nt | MatmulLayout::Nn => ([k, m], false),
    };
    let Formats { a: a_format, b: b_format, c: c_format } = key.formats;
    let matrices = [(b, b_format), (a, a_format), ([n, m], c_format)];
    for (out, ([rows, columns], format)) in parts.layouts.iter_mut().zip(matrices) {
        // SAFETY: writes one handle.
        let status = unsafe { (lt.layout_create)(out, data_type(format)?, rows as u64, columns as u64, rows as i64) };
        lt.check(status, || format!("describe a matrix of {columns} x {rows}"))?;
    }
    parts.describe_product([transpose_b, transpose_a])?;
    if pointers.bias != 0 {
        parts.describe(DESC_EPILOGUE, EPILOGUE_BIAS)?;
    }
    pointers.set(|attribute, address| parts.describe(attribute, address))?;
    let [a, b, base, c, _] = key.alignments;
    parts.prefer_all([b, a, base, c])
}

impl Drop for Gemm {
    fn drop(&mut self) {
        let experts = self.groups.iter().flat_map(GroupProducts::plans);
        for plan in self.plans.values().chain(experts) {
            plan.destroy(self.lt);
        }
        // SAFETY: made by `new`, destroyed once; the device's streams are idle.
        unsafe { (self.lt.destroy)(self.handle) };
    }
}

/// The largest power of two that divides the address, at most 256, because larger alignments gain nothing.
fn alignment(slice: DeviceSlice) -> u16 {
    1 << slice.addr().trailing_zeros().min(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(addr: u64, elems: usize) -> DeviceSlice {
        DeviceSlice::at(addr, elems, Dtype::Bfloat16)
    }

    #[test]
    fn alignment_is_the_largest_power_of_two_up_to_256() {
        assert_eq!([2, 48, 4096 + 256, 1 << 40].map(|addr| alignment(slice(addr, 1))), [2, 16, 256, 256]);
    }
}
