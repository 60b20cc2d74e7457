//! Bindings of cuBLASLt, and the preparation of a product: descriptors, preferences, suggested algorithms.

use super::choice::{AlgorithmChoice, Answer, Reductions, first_right};
use super::request::CallBatch;
use crate::device::cuda::libraries::functions;
use crate::device::footprint::gpu::MATMUL_WORKSPACE_BYTES as WORKSPACE_BYTES;
use crate::device::{MatmulShape, ProductAlgorithm, ProductWay};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use std::ptr;

/// Number of suggestions requested, several because the first may be excluded.
const SUGGESTIONS: usize = 8;

/// Constants of cuBLASLt, from `cublasLt.h` of CUDA 13.0; they are the same in CUDA 12.
const COMPUTE_32F: i32 = 68;
const TYPE_F32: i32 = 0;
const TYPE_F16: i32 = 2;
const TYPE_BF16: i32 = 14;
const TYPE_E4M3: i32 = 28;
const TYPE_E5M2: i32 = 29;
const DESC_TRANSPOSE_A: i32 = 3;
const DESC_TRANSPOSE_B: i32 = 4;
const PREFERENCE_WORKSPACE_BYTES: i32 = 1;
const PREFERENCE_REDUCTION_SCHEMES: i32 = 3;
/// Attribute of the alignment of A; the attributes of B, C and D follow.
const PREFERENCE_ALIGNMENT: i32 = 5;
/// Reduction scheme for split products: parts are kept in fp32 and added by a second pass. Algorithms without split are always allowed. All
/// further schemes add in the output's format, in place.
const REDUCTION_IN_FP32: u32 = 2;
/// Reduction scheme that excludes split products.
const NO_REDUCTION: u32 = 0;
const CONFIG_ALGORITHM: i32 = 0;
const CONFIG_SPLIT_K: i32 = 2;
const LAYOUT_BATCH_COUNT: i32 = 5;
const LAYOUT_BATCH_STRIDE: i32 = 6;
/// Status of a search for algorithms when the library refuses the product, also where it merely has no algorithm for the preferences.
const NOT_SUPPORTED: i32 = 15;

pub(super) type Opaque = *mut c_void;

/// `cublasLtMatmulAlgo_t`
pub(super) type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Suggestion {
    algorithm: Algorithm,
    workspace_bytes: usize,
    status: i32,
    waves: f32,
    reserved: [i32; 4],
}

functions! {
    /// The functions of cuBLASLt used here.
    pub(super) CublasLt {
        version = c"cublasLtGetVersion"() -> usize;
        status_name = c"cublasLtGetStatusName"(i32) -> *const c_char;
        create = c"cublasLtCreate"(*mut Opaque) -> i32;
        destroy = c"cublasLtDestroy"(Opaque) -> i32;
        layout_create = c"cublasLtMatrixLayoutCreate"(*mut Opaque, i32, u64, u64, i64) -> i32;
        layout_set = c"cublasLtMatrixLayoutSetAttribute"(Opaque, i32, *const c_void, usize) -> i32;
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
        accepts = c"cublasLtMatmulAlgoCheck"(
            Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, *const Algorithm, *mut Suggestion
        ) -> i32;
        algorithm_get = c"cublasLtMatmulAlgoConfigGetAttribute"(*const Algorithm, i32, *mut c_void, usize, *mut usize) -> i32;
        matmul = c"cublasLtMatmul"(
            Opaque, Opaque, *const f32, u64, Opaque, u64, Opaque, *const f32, u64, Opaque, u64, Opaque,
            *const Algorithm, u64, usize, Opaque
        ) -> i32;
    }
}

impl CublasLt {
    pub(super) fn check(&self, status: i32, operation: impl FnOnce() -> String) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the name is a constant of the library.
        let name = unsafe { CStr::from_ptr((self.status_name)(status)) };
        Err(Error::resource(operation(), format!("cuBLASLt status {status} ({})", name.to_string_lossy())))
    }
}

/// A product that is ready to run.
#[derive(Clone, Copy)]
pub(super) struct MatmulPlan {
    pub(super) description: Opaque,
    /// Layouts of the first and second factor in cuBLASLt's order, and of the result.
    pub(super) layouts: [Opaque; 3],
    pub(super) algorithm: Algorithm,
    chosen: AlgorithmChoice,
}

impl MatmulPlan {
    /// Describes the plan's algorithm for logs.
    pub(super) fn algorithm(&self, shape: MatmulShape, experts: Option<usize>, dtype: Dtype) -> ProductAlgorithm {
        let AlgorithmChoice { algorithm, split_k, passed_over } = self.chosen;
        ProductAlgorithm { shape, experts, dtype, algorithm, split_k, passed_over, way: ProductWay::Whole }
    }

    /// This plan, chosen after `skipped` suggestions.
    pub(super) fn after(self, skipped: usize) -> Self {
        Self { chosen: AlgorithmChoice { passed_over: self.chosen.passed_over + skipped, ..self.chosen }, ..self }
    }

    /// Sets an attribute of the plan's descriptor.
    pub(super) fn describe<T>(&self, lt: &CublasLt, attribute: i32, value: T) -> Result<()> {
        set_attribute(lt, lt.desc_set, self.description, attribute, value)
    }

    /// Destroys the descriptors of the plan.
    pub(super) fn destroy(self, lt: CublasLt) {
        drop(Parts { description: self.description, layouts: self.layouts, ..Parts::new(lt) });
    }
}

/// Descriptors of a plan under construction. Descriptors that are not null are destroyed on drop.
pub(super) struct Parts {
    lt: CublasLt,
    description: Opaque,
    pub(super) layouts: [Opaque; 3],
    preference: Opaque,
}

impl Drop for Parts {
    fn drop(&mut self) {
        // SAFETY: made for this plan, destroyed once; cuBLASLt ignores null.
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
    pub(super) fn new(lt: CublasLt) -> Self {
        Self { lt, description: ptr::null_mut(), layouts: [ptr::null_mut(); 3], preference: ptr::null_mut() }
    }

    /// Creates the descriptor of a product summed in fp32; `transposed` gives the transposition of each factor.
    pub(super) fn describe_product(&mut self, transposed: [bool; 2]) -> Result<()> {
        // SAFETY: writes one handle.
        let status = unsafe { (self.lt.desc_create)(&mut self.description, COMPUTE_32F, TYPE_F32) };
        self.lt.check(status, || "describe a matrix product".into())?;
        let mut attributes = [DESC_TRANSPOSE_A, DESC_TRANSPOSE_B].into_iter().zip(transposed);
        attributes.try_for_each(|(attribute, transposed)| self.describe(attribute, i32::from(transposed)))
    }

    /// Sets the preferences of the search for algorithms. `alignments` are those of both factors, of the addend and of the result, in
    /// bytes.
    pub(super) fn prefer_all(&mut self, alignments: [u16; 4]) -> Result<()> {
        // SAFETY: writes one handle.
        let status = unsafe { (self.lt.preference_create)(&mut self.preference) };
        self.lt.check(status, || "set the preferences of algorithms".into())?;
        self.prefer(PREFERENCE_WORKSPACE_BYTES, WORKSPACE_BYTES as u64)?;
        alignments.into_iter().zip(PREFERENCE_ALIGNMENT..).try_for_each(|(bytes, which)| self.prefer(which, u32::from(bytes)))
    }

    pub(super) fn describe<T>(&self, attribute: i32, value: T) -> Result<()> {
        set_attribute(&self.lt, self.lt.desc_set, self.description, attribute, value)
    }

    pub(super) fn prefer<T>(&self, attribute: i32, value: T) -> Result<()> {
        set_attribute(&self.lt, self.lt.preference_set, self.preference, attribute, value)
    }

    /// Makes each layout that of several matrices at equal distances.
    pub(super) fn repeat(&self, CallBatch { count, strides: [a, b, c] }: CallBatch) -> Result<()> {
        for (layout, stride) in self.layouts.into_iter().zip([b, a, c]) {
            set_attribute(&self.lt, self.lt.layout_set, layout, LAYOUT_BATCH_COUNT, count as i32)?;
            set_attribute(&self.lt, self.lt.layout_set, layout, LAYOUT_BATCH_STRIDE, stride as i64)?;
        }
        Ok(())
    }

    /// Turns the parts into a plan with the first suggestion that may split these sums and whose results are right.
    pub(super) fn plan(self, handle: Opaque, reductions: Reductions, operation: impl FnOnce() -> String) -> Result<Answer<MatmulPlan>> {
        let mask = if reductions == Reductions::None { NO_REDUCTION } else { REDUCTION_IN_FP32 };
        self.prefer(PREFERENCE_REDUCTION_SCHEMES, mask)?;
        let configured = |suggestion: Suggestion| {
            let [algorithm, split_k] = [CONFIG_ALGORITHM, CONFIG_SPLIT_K].map(|attribute| self.configured(&suggestion, attribute));
            Ok((suggestion.algorithm, AlgorithmChoice { algorithm: algorithm?, split_k: split_k?, passed_over: 0 }))
        };
        let suggestions = self.suggestions(handle, operation)?.into_iter().map(configured).collect::<Result<_>>()?;
        Ok(match first_right(suggestions) {
            Answer::Found((algorithm, chosen)) => Answer::Found(self.keep(algorithm, chosen)),
            Answer::Excluded(all) => Answer::Excluded(all),
            Answer::Refused => Answer::Refused,
        })
    }

    /// Turns the parts into a plan with the algorithm of `plan`, if the library accepts it for them.
    pub(super) fn plan_as(self, handle: Opaque, plan: &MatmulPlan) -> Option<MatmulPlan> {
        let ([first, second, result], mut checked) = (self.layouts, Suggestion::default());
        // SAFETY: all handles are live; the call writes one suggestion.
        let status = unsafe { (self.lt.accepts)(handle, self.description, first, second, result, result, &plan.algorithm, &mut checked) };
        let accepts = status == 0 && checked.status == 0 && checked.workspace_bytes <= WORKSPACE_BYTES;
        accepts.then(|| self.keep(plan.algorithm, plan.chosen))
    }

    /// The library's suggestions for the present preferences; none if it refuses the product.
    fn suggestions(&self, handle: Opaque, operation: impl FnOnce() -> String) -> Result<Vec<Suggestion>> {
        let mut suggestions = [Suggestion::default(); SUGGESTIONS];
        let mut count = 0;
        let [first, second, result] = self.layouts;
        // SAFETY: all handles are live; the call writes at most `SUGGESTIONS` suggestions.
        let status = unsafe {
            let most = SUGGESTIONS as i32;
            let to = suggestions.as_mut_ptr();
            (self.lt.suggest)(handle, self.description, first, second, result, result, self.preference, most, to, &mut count)
        };
        if status == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        self.lt.check(status, operation)?;
        Ok(suggestions[..count as usize].iter().filter(|suggestion| suggestion.status == 0).copied().collect())
    }

    /// One attribute of a suggested algorithm's configuration.
    fn configured(&self, suggestion: &Suggestion, attribute: i32) -> Result<i32> {
        let (mut value, mut written) = (0i32, 0);
        // SAFETY: the library made the algorithm; the call writes at most the size of the number.
        let status =
            unsafe { (self.lt.algorithm_get)(&suggestion.algorithm, attribute, (&raw mut value).cast(), size_of::<i32>(), &mut written) };
        self.lt.check(status, || format!("read attribute {attribute} of an algorithm"))?;
        Ok(value)
    }

    fn keep(mut self, algorithm: Algorithm, chosen: AlgorithmChoice) -> MatmulPlan {
        let description = std::mem::replace(&mut self.description, ptr::null_mut());
        let layouts = std::mem::replace(&mut self.layouts, [ptr::null_mut(); 3]);
        MatmulPlan { description, layouts, algorithm, chosen }
    }
}

type SetAttribute = unsafe extern "C" fn(Opaque, i32, *const c_void, usize) -> i32;

/// `T` is the attribute's type in the header.
fn set_attribute<T>(lt: &CublasLt, set: SetAttribute, object: Opaque, attribute: i32, value: T) -> Result<()> {
    // SAFETY: the object is live; the value is read during the call.
    let status = unsafe { set(object, attribute, (&raw const value).cast(), size_of::<T>()) };
    lt.check(status, || format!("set attribute {attribute} of a matrix product"))
}

pub(super) fn data_type(dtype: Dtype) -> Result<i32> {
    match dtype {
        Dtype::Bfloat16 => Ok(TYPE_BF16),
        Dtype::Float16 => Ok(TYPE_F16),
        Dtype::Float32 => Ok(TYPE_F32),
        Dtype::Float8E4m3 => Ok(TYPE_E4M3),
        Dtype::Float8E5m2 => Ok(TYPE_E5M2),
        Dtype::Int32 | Dtype::Uint16 | Dtype::Uint8 => Err(Error::Unsupported(format!("a matrix product of {dtype}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_have_no_products() {
        assert!(data_type(Dtype::Int32).is_err() && data_type(Dtype::Uint16).is_err());
    }
}
