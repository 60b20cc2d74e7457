//! Matrix products by cuBLASLt. What it needs to know about a product, its descriptors and the algorithm, is a plan, made
//! when a shape is first seen and kept.
//!
//! The algorithm is the library's first suggestion, chosen without timing, among those that sum in a fixed order in fp32:
//! the same in every process with this library on this GPU. One algorithm whose results may be wrong is passed over.

use super::driver::RawStream;
use super::error::failed;
use super::libraries::{CUBLASLT, Libraries, functions};
use crate::device::footprint::gpu::MATMUL_WORKSPACE_BYTES as WORKSPACE_BYTES;
use crate::device::{DeviceSlice, Kernel, Matmul, MatmulLayout, MatmulShape, ProductAlgorithm, ScaledMatmul};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::units::Bytes;
use cust::memory::DeviceBuffer;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;

/// Suggestions to choose from: the first may need what is excluded.
const SUGGESTIONS: usize = 8;

/// cuBLASLt's numbers, from `cublasLt.h` of CUDA 13.0; they are the same in 12.
const COMPUTE_32F: i32 = 68;
const TYPE_F32: i32 = 0;
const TYPE_F16: i32 = 2;
const TYPE_BF16: i32 = 14;
const TYPE_E4M3: i32 = 28;
const TYPE_E5M2: i32 = 29;
const DESC_TRANSPOSE_A: i32 = 3;
const DESC_TRANSPOSE_B: i32 = 4;
const DESC_EPILOGUE: i32 = 7;
const DESC_BIAS_POINTER: i32 = 8;
const DESC_SCALE_POINTER_A: i32 = 17;
const DESC_SCALE_POINTER_B: i32 = 18;
const EPILOGUE_BIAS: u32 = 4;
const PREFERENCE_WORKSPACE_BYTES: i32 = 1;
const PREFERENCE_REDUCTION_SCHEMES: i32 = 3;
/// Of A; those of B, C and D follow.
const PREFERENCE_ALIGNMENT: i32 = 5;
/// Parts of a split product are kept in fp32 and added in a pass of their own; no split is always allowed. The others
/// add in the output's format, in place.
const REDUCTION_IN_FP32: u32 = 2;
/// No product is split.
const NO_REDUCTION: u32 = 0;
const CONFIG_ALGORITHM: i32 = 0;
const CONFIG_SPLIT_K: i32 = 2;

/// NVIDIA's release notes list wrong results of this algorithm with split-K on Hopper, in cuBLAS 12.6.3 to 13.7. It is passed over in
/// every version and on every GPU: a library that has it mended has others that are as fast.
const WRONG_WITH_SPLIT_K: i32 = 66;

/// The oldest cuBLAS whose products in FP8 are used: 12.1, the first that has them on Ada, too. Their sums are in fp32, as `FAST_ACCUM` is off
/// unless it is asked for.
const OLDEST_FP8: usize = 120_100;

type Opaque = *mut c_void;

/// `cublasLtMatmulAlgo_t`
type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Suggestion {
    algorithm: Algorithm,
    workspace_bytes: usize,
    status: i32,
    waves: f32,
    reserved: [i32; 4],
}

functions! {
    /// The part of cuBLASLt used here.
    CublasLt {
        version = c"cublasLtGetVersion"() -> usize;
        status_name = c"cublasLtGetStatusName"(i32) -> *const c_char;
        create = c"cublasLtCreate"(*mut Opaque) -> i32;
        destroy = c"cublasLtDestroy"(Opaque) -> i32;
        layout_create = c"cublasLtMatrixLayoutCreate"(*mut Opaque, i32, u64, u64, i64) -> i32;
        layout_destroy = c"cublasLtMatrixLayoutDestroy"(Opaque) -> i32;
        desc_create = c"cublasLtMatmulDescCreate"(*mut Opaque, i32, i32) -> i32;
        desc_set = c"cublasLtMatmulDescSetAttribute"(Opaque, i32, *const c_void, usize) -> i32;
        desc_destroy = c"cublasLtMatmulDescDestroy"(Opaque) -> i32;
        preference_create = c"cublasLtMatmulPreferenceCreate"(*mut Opaque) -> i32;
        preference_set = c"cublasLtMatmulPreferenceSetAttribute"(Opaque, i32, *const c_void, usize) -> i32;
        preference_destroy = c"cublasLtMatmulPreferenceDestroy"(Opaque) -> i32;
        suggest = c"cublasLtMatmulAlgoGetHeuristic"(
            Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, i32, *mut Suggestion, *mut i32
        ) -> i32;
        algorithm_get = c"cublasLtMatmulAlgoConfigGetAttribute"(*const Algorithm, i32, *mut c_void, usize, *mut usize) -> i32;
        matmul = c"cublasLtMatmul"(
            Opaque, Opaque, *const f32, u64, Opaque, u64, Opaque, *const f32, u64, Opaque, u64, Opaque,
            *const Algorithm, u64, usize, Opaque
        ) -> i32;
    }
}

impl CublasLt {
    fn check(&self, status: i32, operation: impl FnOnce() -> String) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the name is a constant of the library.
        let name = unsafe { CStr::from_ptr((self.status_name)(status)) };
        Err(Error::resource(operation(), format!("cuBLASLt status {status} ({})", name.to_string_lossy())))
    }
}

/// A product of either kind.
#[derive(Clone, Copy)]
pub(super) struct CublasProduct {
    shape: MatmulShape,
    a: DeviceSlice,
    b: DeviceSlice,
    /// Of a and b, where these have scales.
    scales: Option<[DeviceSlice; 2]>,
    bias: Option<DeviceSlice>,
    base: Option<DeviceSlice>,
    c: DeviceSlice,
    formats: Formats,
}

impl CublasProduct {
    /// # Errors
    /// `Unsupported` when its operands are of several formats.
    pub(super) fn of(kernel: Matmul) -> Result<Self> {
        let Matmul { shape, a, b, bias, base, c } = kernel;
        Ok(Self { shape, a, b, scales: None, bias, base, c, formats: Formats::one(kernel.float_format()?) })
    }

    /// # Errors
    /// `Unsupported` when what is added is of another format than the result.
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

/// Addresses that a description holds and that are set anew for each product; 0 where there is none.
#[derive(Clone, Copy)]
struct Pointers {
    bias: u64,
    /// Of a and b.
    scales: [u64; 2],
}

impl Pointers {
    const NONE: Self = Self { bias: 0, scales: [0; 2] };

    fn of(product: &CublasProduct) -> Self {
        let scales = product.scales.map_or([0; 2], |scales| scales.map(DeviceSlice::addr));
        Self { bias: product.bias.map_or(0, DeviceSlice::addr), scales }
    }

    /// cuBLASLt's first factor is `b`.
    fn set(self, lt: &CublasLt, description: Opaque) -> Result<()> {
        let [a_scale, b_scale] = self.scales;
        let all = [(DESC_BIAS_POINTER, self.bias), (DESC_SCALE_POINTER_A, b_scale), (DESC_SCALE_POINTER_B, a_scale)];
        let mut given = all.into_iter().filter(|(_, address)| *address != 0);
        given.try_for_each(|(attribute, address)| set_attribute(lt, lt.desc_set, description, attribute, address))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct MatmulKey {
    shape: MatmulShape,
    formats: Formats,
    /// Bytes to which a, b, base and c are aligned; the bias as well, or 0 when there is none.
    alignments: [u16; 5],
}

/// A product that is ready to run.
#[derive(Clone, Copy)]
struct MatmulPlan {
    description: Opaque,
    /// Of the first and the second factor as cuBLASLt sees them, and of the result.
    layouts: [Opaque; 3],
    algorithm: Algorithm,
    chosen: AlgorithmChoice,
}

/// What is known of a plan's algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AlgorithmChoice {
    algorithm: i32,
    split_k: i32,
    passed_over: usize,
}

/// The library, the plans made so far, and the memory that they share.
pub(super) struct Gemm {
    lt: CublasLt,
    handle: Opaque,
    plans: HashMap<MatmulKey, MatmulPlan>,
    workspace: DeviceBuffer<u8>,
}

impl Gemm {
    /// Opens the library for the current context.
    pub(super) fn new(libraries: &Libraries) -> Result<Self> {
        let lt = CublasLt::bind(&libraries.open(&CUBLASLT)?)?;
        // SAFETY: written before it is read: cuBLASLt clears what it counts on.
        let workspace = unsafe { DeviceBuffer::uninitialized(WORKSPACE_BYTES) }.map_err(|e| {
            let operation = format!("allocate {} of GPU memory for cuBLASLt", Bytes(WORKSPACE_BYTES as u64));
            failed(e as u32, operation)
        })?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        lt.check(unsafe { (lt.create)(&mut handle) }, || "start cuBLASLt".into())?;
        Ok(Self { lt, handle, plans: HashMap::new(), workspace })
    }

    /// As 130100 for 13.1.0.
    pub(super) fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.lt.version)() }
    }

    /// # Errors
    /// `Unsupported` when this version has no products in FP8 that are used here.
    pub(super) fn check_fp8(&self) -> Result<()> {
        let version = self.version();
        if version >= OLDEST_FP8 {
            return Ok(());
        }
        Err(Error::Unsupported(format!("products in FP8 by cuBLASLt {version}: they need {OLDEST_FP8} (CUDA 12.1) or newer")))
    }

    /// What enqueues a product. `None`: the result has no elements.
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
        pointers.set(&lt, plan.description)?;
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

    /// The plan for `key`, made now if this is its first use. `pointers` stand for all of their alignments.
    fn plan(&mut self, key: MatmulKey, pointers: Pointers) -> Result<MatmulPlan> {
        if let Some(plan) = self.plans.get(&key) {
            return Ok(*plan);
        }
        let mut parts = Parts { lt: self.lt, description: ptr::null_mut(), layouts: [ptr::null_mut(); 3], preference: ptr::null_mut() };
        parts.fill(key, pointers)?;
        let (suggestion, chosen) = parts.choose(self.handle, key)?;
        let plan = parts.keep(suggestion, chosen);
        self.plans.insert(key, plan);
        Ok(plan)
    }

    /// The algorithms of all plans so far, in an order of their own: that of every process.
    pub(super) fn algorithms(&self) -> Vec<ProductAlgorithm> {
        let all = self.plans.iter().map(|(&MatmulKey { shape, formats, .. }, plan)| {
            let AlgorithmChoice { algorithm, split_k, passed_over } = plan.chosen;
            ProductAlgorithm { shape, dtype: formats.a, algorithm, split_k, passed_over }
        });
        let mut all: Vec<_> = all.collect();
        all.sort_unstable();
        all
    }

    /// The algorithm of a product of well aligned matrices without bias; runs nothing.
    pub(super) fn algorithm_of(&mut self, shape: MatmulShape, dtype: Dtype) -> Result<ProductAlgorithm> {
        let key = MatmulKey { shape, formats: Formats::one(dtype), alignments: [256, 256, 256, 256, 0] };
        let AlgorithmChoice { algorithm, split_k, passed_over } = self.plan(key, Pointers::NONE)?.chosen;
        Ok(ProductAlgorithm { shape, dtype, algorithm, split_k, passed_over })
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        for plan in self.plans.values() {
            drop(Parts { lt: self.lt, description: plan.description, layouts: plan.layouts, preference: ptr::null_mut() });
        }
        // SAFETY: made by `new`, destroyed once; the device's streams are idle.
        unsafe { (self.lt.destroy)(self.handle) };
    }
}

/// Descriptors of a plan in the making; those that are not null are destroyed with it.
struct Parts {
    lt: CublasLt,
    description: Opaque,
    layouts: [Opaque; 3],
    preference: Opaque,
}

impl Drop for Parts {
    fn drop(&mut self) {
        // SAFETY: made by `fill`, destroyed once; cuBLASLt ignores null.
        unsafe {
            for layout in self.layouts {
                (self.lt.layout_destroy)(layout);
            }
            (self.lt.desc_destroy)(self.description);
            (self.lt.preference_destroy)(self.preference);
        }
    }
}

impl Parts {
    /// cuBLASLt's matrices are column-major: a row-major matrix is its transpose there. So `c^T = op(b)^T op(a)^T`, the
    /// first factor is `b`, and `c^T` has n rows.
    fn fill(&mut self, key: MatmulKey, pointers: Pointers) -> Result<()> {
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
        for (out, ([rows, columns], format)) in self.layouts.iter_mut().zip(matrices) {
            // SAFETY: writes one handle.
            let status = unsafe { (self.lt.layout_create)(out, data_type(format)?, rows as u64, columns as u64, rows as i64) };
            self.lt.check(status, || format!("describe a matrix of {columns} x {rows}"))?;
        }
        // SAFETY: writes one handle.
        let status = unsafe { (self.lt.desc_create)(&mut self.description, COMPUTE_32F, TYPE_F32) };
        self.lt.check(status, || "describe a matrix product".into())?;
        self.describe(DESC_TRANSPOSE_A, i32::from(transpose_b))?;
        self.describe(DESC_TRANSPOSE_B, i32::from(transpose_a))?;
        if pointers.bias != 0 {
            self.describe(DESC_EPILOGUE, EPILOGUE_BIAS)?;
        }
        pointers.set(&self.lt, self.description)?;
        // SAFETY: writes one handle.
        let status = unsafe { (self.lt.preference_create)(&mut self.preference) };
        self.lt.check(status, || "describe what algorithms may do".into())?;
        self.prefer(PREFERENCE_WORKSPACE_BYTES, WORKSPACE_BYTES as u64)?;
        self.prefer(PREFERENCE_REDUCTION_SCHEMES, REDUCTION_IN_FP32)?;
        let [a, b, base, c, _] = key.alignments;
        [b, a, base, c].iter().zip(PREFERENCE_ALIGNMENT..).try_for_each(|(bytes, which)| self.prefer(which, u32::from(*bytes)))
    }

    fn describe<T>(&self, attribute: i32, value: T) -> Result<()> {
        set_attribute(&self.lt, self.lt.desc_set, self.description, attribute, value)
    }

    fn prefer<T>(&self, attribute: i32, value: T) -> Result<()> {
        set_attribute(&self.lt, self.lt.preference_set, self.preference, attribute, value)
    }

    /// The first suggestion that can run and is right. The library has been told to suggest none whose sums have no fixed order. Where all
    /// are of the algorithm that is passed over, it is asked for those that do not split.
    fn choose(&self, handle: Opaque, key: MatmulKey) -> Result<(Suggestion, AlgorithmChoice)> {
        let operation = || format!("choose an algorithm for a matrix product, {:?} on {}", key.shape, key.formats.a);
        let none = || Error::resource(operation(), "cuBLASLt has none");
        let (found, passed_over) = self.first_right(&self.suggestions(handle, operation)?)?;
        let (suggestion, chosen) = match found {
            None if passed_over > 0 => {
                self.prefer(PREFERENCE_REDUCTION_SCHEMES, NO_REDUCTION)?;
                self.first_right(&self.suggestions(handle, operation)?)?.0.ok_or_else(none)?
            }
            found => found.ok_or_else(none)?,
        };
        Ok((suggestion, AlgorithmChoice { passed_over, ..chosen }))
    }

    /// What the library suggests by the present preferences.
    fn suggestions(&self, handle: Opaque, operation: impl FnOnce() -> String) -> Result<Vec<Suggestion>> {
        let mut suggestions = [Suggestion::default(); SUGGESTIONS];
        let mut count = 0;
        let [first, second, result] = self.layouts;
        // SAFETY: all are live; writes at most as many suggestions as there are.
        let status = unsafe {
            let most = SUGGESTIONS as i32;
            let to = suggestions.as_mut_ptr();
            (self.lt.suggest)(handle, self.description, first, second, result, result, self.preference, most, to, &mut count)
        };
        self.lt.check(status, operation)?;
        Ok(suggestions[..count as usize].iter().filter(|suggestion| suggestion.status == 0).copied().collect())
    }

    /// The first of `suggestions` that is right, and how many before it were not.
    fn first_right(&self, suggestions: &[Suggestion]) -> Result<(Option<(Suggestion, AlgorithmChoice)>, usize)> {
        for (passed_over, suggestion) in suggestions.iter().enumerate() {
            let [algorithm, split_k] = [CONFIG_ALGORITHM, CONFIG_SPLIT_K].map(|attribute| self.configured(suggestion, attribute));
            let chosen = AlgorithmChoice { algorithm: algorithm?, split_k: split_k?, passed_over };
            if !may_be_wrong(chosen) {
                return Ok((Some((*suggestion, chosen)), passed_over));
            }
        }
        Ok((None, suggestions.len()))
    }

    /// One number of a suggested algorithm's configuration.
    fn configured(&self, suggestion: &Suggestion, attribute: i32) -> Result<i32> {
        let (mut value, mut written) = (0i32, 0);
        // SAFETY: the algorithm is one that the library made; it writes at most the size of the number.
        let status =
            unsafe { (self.lt.algorithm_get)(&suggestion.algorithm, attribute, (&raw mut value).cast(), size_of::<i32>(), &mut written) };
        self.lt.check(status, || format!("read attribute {attribute} of an algorithm"))?;
        Ok(value)
    }

    /// Keeps what running needs.
    fn keep(mut self, suggestion: Suggestion, chosen: AlgorithmChoice) -> MatmulPlan {
        let algorithm = suggestion.algorithm;
        let description = std::mem::replace(&mut self.description, ptr::null_mut());
        let layouts = std::mem::replace(&mut self.layouts, [ptr::null_mut(); 3]);
        MatmulPlan { description, layouts, algorithm, chosen }
    }
}

/// See [`WRONG_WITH_SPLIT_K`].
fn may_be_wrong(chosen: AlgorithmChoice) -> bool {
    chosen.algorithm == WRONG_WITH_SPLIT_K && !matches!(chosen.split_k, 0 | 1)
}

type SetAttribute = unsafe extern "C" fn(Opaque, i32, *const c_void, usize) -> i32;

/// `T` is the type that the header names for the attribute.
fn set_attribute<T>(lt: &CublasLt, set: SetAttribute, object: Opaque, attribute: i32, value: T) -> Result<()> {
    // SAFETY: the object is live; the value is read during the call.
    let status = unsafe { set(object, attribute, (&raw const value).cast(), size_of::<T>()) };
    lt.check(status, || format!("set attribute {attribute} of a matrix product"))
}

fn data_type(dtype: Dtype) -> Result<i32> {
    match dtype {
        Dtype::Bfloat16 => Ok(TYPE_BF16),
        Dtype::Float16 => Ok(TYPE_F16),
        Dtype::Float32 => Ok(TYPE_F32),
        Dtype::Float8E4m3 => Ok(TYPE_E4M3),
        Dtype::Float8E5m2 => Ok(TYPE_E5M2),
        Dtype::Int32 => Err(Error::Unsupported("a matrix product of int32".into())),
    }
}

/// The largest power of two that divides the address, up to the 256 beyond which nothing gains.
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

    #[test]
    fn one_algorithm_is_passed_over_where_it_splits_its_sums() {
        let may_be_wrong = |algorithm, split_k| may_be_wrong(AlgorithmChoice { algorithm, split_k, passed_over: 0 });
        assert!(may_be_wrong(66, 2) && may_be_wrong(66, -1));
        assert!(!may_be_wrong(66, 1) && !may_be_wrong(66, 0) && !may_be_wrong(67, 4));
    }

    #[test]
    fn int32_has_no_products() {
        assert!(data_type(Dtype::Int32).is_err());
    }
}
