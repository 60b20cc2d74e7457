//! Matrix products by cuBLASLt. Descriptors and algorithm of a call form a plan, which is made when a product is first used and then
//! cached.
//!
//! [`choice`] has the rule by which a product gets its algorithm, and [`cut`] the parts of products that the library refuses as a whole.

mod choice;
mod cut;
mod groups;
mod parts;
mod request;

use super::driver::RawStream;
use super::error::failed;
use super::group_tables::GroupTables;
use super::libraries::{CUBLASLT, Libraries};
use crate::device::footprint::gpu::MATMUL_WORKSPACE_BYTES as WORKSPACE_BYTES;
use crate::device::{FirstWay, GroupedShape, LongSums, MatmulLayout, MatmulShape, ProductAlgorithm, ProductRequest};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::units::Bytes;
use choice::{Answer, PlanProducts, Reductions, Way};
use cust::context::CurrentContext;
use cust::error::CudaError;
use cust::memory::DeviceBuffer;
pub(super) use cut::{Course, ProductCut, ProductPart};
use groups::GroupProducts;
use parts::{CublasLt, MatmulPlan, Opaque, Parts, data_type};
pub(super) use request::{CallAddresses, CublasProduct, LibraryProduct, Pointers};
use request::{Formats, ProductKey};
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

impl Pointers {
    /// The first factor of cuBLASLt is `b`.
    fn set(self, describe: impl Fn(i32, u64) -> Result<()>) -> Result<()> {
        let [a_scale, b_scale] = self.scales;
        let all = [(DESC_BIAS_POINTER, self.bias), (DESC_SCALE_POINTER_A, b_scale), (DESC_SCALE_POINTER_B, a_scale)];
        let mut given = all.into_iter().filter(|(_, address)| *address != 0);
        given.try_for_each(|(attribute, address)| describe(attribute, address))
    }
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

/// How this program computes a product.
pub(super) enum ProductCall<F> {
    /// By one call, which the closure enqueues.
    Whole(F),
    /// In parts, each by [`Gemm::call`].
    InParts(ProductCut),
}

/// The library, the cached plans, and their shared workspace.
pub(super) struct Gemm {
    lt: CublasLt,
    handle: Opaque,
    /// How long sums are computed that the library wants to split, and the first way that is tried for a product.
    rule: (LongSums, FirstWay),
    ways: HashMap<ProductKey, Way<MatmulPlan>>,
    /// The library's answers for all calls.
    answers: HashMap<(LibraryProduct, Reductions), Answer<MatmulPlan>>,
    groups: Option<GroupProducts>,
    workspace: DeviceBuffer<u8>,
}

impl Gemm {
    /// Opens the library for the current context.
    pub(super) fn new(libraries: &Libraries, rule: (LongSums, FirstWay)) -> Result<Self> {
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
        Ok(Self { lt, handle, rule, ways: HashMap::new(), answers: HashMap::new(), groups: None, workspace })
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

    /// How to compute a product. `None`: the result has no elements.
    ///
    /// # Errors
    /// `Unsupported` on int32, and for sums of no terms (`k = 0`); `Resource` when the library has no algorithm.
    pub(super) fn product(
        &mut self,
        product: &CublasProduct,
    ) -> Result<Option<ProductCall<impl FnOnce(&RawStream) -> Result<()> + use<>>>> {
        let MatmulShape { m, n, k, .. } = product.shape;
        if product.c.elems() == 0 {
            return Ok(None);
        }
        if k == 0 {
            return Err(Error::Unsupported(format!("a matrix product of {m} x {n} sums of no terms")));
        }
        let (key, addresses) = (product.key(), CallAddresses::of(product));
        Ok(Some(match self.way(key, addresses.pointers)? {
            Way::Whole(plan, _) => ProductCall::Whole(self.enqueuing(plan, LibraryProduct::whole(&key), addresses)?),
            Way::InParts(cut) => ProductCall::InParts(cut),
        }))
    }

    /// Returns a closure that enqueues a call of a [`ProductCut`].
    ///
    /// # Errors
    /// `Resource` when the library has no algorithm.
    pub(super) fn call(&mut self, call: LibraryProduct, addresses: CallAddresses) -> Result<impl FnOnce(&RawStream) -> Result<()> + use<>> {
        let answer = ProductPlanner { gemm: self, pointers: addresses.pointers }.plan(&call, Reductions::None)?;
        self.enqueuing(answer.found().ok_or_else(|| none(call.shape, call.formats))?, call, addresses)
    }

    /// Returns a closure that enqueues a call of several products.
    ///
    /// # Errors
    /// The errors of [`Gemm::call`].
    pub(super) fn batch(
        &mut self,
        call: LibraryProduct,
        addresses: CallAddresses,
    ) -> Result<impl FnOnce(&RawStream) -> Result<()> + use<>> {
        let typical = call.standing_for_batch();
        let mut planner = ProductPlanner { gemm: self, pointers: addresses.pointers };
        if !planner.gemm.answers.contains_key(&(call, Reductions::None))
            && let Some(plan) = planner.plan(&typical, Reductions::None)?.found()
        {
            planner.plan_as(&call, &plan)?;
        }
        self.call(call, addresses)
    }

    fn enqueuing(
        &self,
        plan: MatmulPlan,
        LibraryProduct { shape, formats, .. }: LibraryProduct,
        CallAddresses { a, b, addend, adds, c, pointers }: CallAddresses,
    ) -> Result<impl FnOnce(&RawStream) -> Result<()> + use<>> {
        let Self { lt, handle, ref workspace, .. } = *self;
        let workspace = workspace.as_device_ptr().as_raw();
        pointers.set(|attribute, address| plan.describe(&lt, attribute, address))?;
        let (one, beta) = (1f32, if adds { 1f32 } else { 0f32 });
        let [first, second, result] = plan.layouts;
        Ok(move |raw: &RawStream| {
            // SAFETY: the layouts describe the matrices at these addresses; the scalars are read during the call.
            let status = unsafe {
                (lt.matmul)(
                    handle,
                    plan.description,
                    &one,
                    b,
                    first,
                    a,
                    second,
                    &beta,
                    addend,
                    result,
                    c,
                    result,
                    &plan.algorithm,
                    workspace,
                    WORKSPACE_BYTES,
                    raw.0.cast(),
                )
            };
            lt.check(status, || format!("multiply matrices, {shape:?} on {}", formats.a))
        })
    }

    /// The way of a product with `key`, chosen on its first use. `pointers` represent all pointers with the same alignments.
    fn way(&mut self, key: ProductKey, pointers: Pointers) -> Result<Way<MatmulPlan>> {
        if let Some(way) = self.ways.get(&key) {
            return Ok(*way);
        }
        let rule = self.rule;
        let way = choice::way(&mut ProductPlanner { gemm: self, pointers }, &key, rule)?.ok_or_else(|| none(key.shape, key.formats))?;
        self.ways.insert(key, way);
        Ok(way)
    }

    /// Algorithms of all products so far, sorted, so that the order is the same in every process.
    pub(super) fn algorithms(&self) -> Vec<ProductAlgorithm> {
        let single = self.ways.iter().filter_map(|(key, way)| self.algorithm(key, way));
        let mut all: Vec<_> = single.chain(self.groups.iter().flat_map(GroupProducts::algorithms)).collect();
        all.sort_unstable();
        all
    }

    fn algorithm(&self, key: &ProductKey, way: &Way<MatmulPlan>) -> Option<ProductAlgorithm> {
        let of = |plan: MatmulPlan| plan.algorithm(key.shape, None, key.formats.a);
        match way {
            Way::Whole(plan, skipped) => Some(of(plan.after(*skipped))),
            Way::InParts(cut) => {
                let first = self.answers.get(&(*cut.calls().first()?, Reductions::None))?.found()?;
                Some(ProductAlgorithm { way: cut.way(), ..of(first) })
            }
        }
    }

    /// Chooses the algorithm of a product of well aligned matrices. Runs no kernel.
    ///
    /// # Errors
    /// The errors of [`Gemm::product`].
    pub(super) fn algorithm_of(&mut self, request: ProductRequest) -> Result<ProductAlgorithm> {
        let key = ProductKey::aligned(request);
        let way = self.way(key, Pointers::standing_for(&key))?;
        self.algorithm(&key, &way).ok_or_else(|| none(key.shape, key.formats))
    }
}

/// The library, as the rule of [`choice`] asks it. `pointers` represent those of all products with the same alignments.
struct ProductPlanner<'a> {
    gemm: &'a mut Gemm,
    pointers: Pointers,
}

impl PlanProducts for ProductPlanner<'_> {
    type Plan = MatmulPlan;

    fn plan(&mut self, call: &LibraryProduct, reductions: Reductions) -> Result<Answer<MatmulPlan>> {
        if let Some(answer) = self.gemm.answers.get(&(*call, reductions)) {
            return Ok(*answer);
        }
        let (lt, mut parts) = (self.gemm.lt, Parts::new(self.gemm.lt));
        describe(&lt, &mut parts, call, self.pointers.of_call(call))?;
        let answer = parts.plan(self.gemm.handle, reductions, || operation(call.shape, call.formats))?;
        self.gemm.answers.insert((*call, reductions), answer);
        Ok(answer)
    }
}

impl ProductPlanner<'_> {
    /// Gives `call` the algorithm of `plan`, if the library accepts it there.
    fn plan_as(&mut self, call: &LibraryProduct, plan: &MatmulPlan) -> Result<()> {
        let (lt, mut parts) = (self.gemm.lt, Parts::new(self.gemm.lt));
        describe(&lt, &mut parts, call, self.pointers.of_call(call))?;
        if let Some(plan) = parts.plan_as(self.gemm.handle, plan) {
            self.gemm.answers.insert((*call, Reductions::None), Answer::Found(plan));
        }
        Ok(())
    }
}

fn operation(shape: MatmulShape, formats: Formats) -> String {
    format!("choose an algorithm for a matrix product, {shape:?} on {}", formats.a)
}

/// The error of a product that the library refuses in every way.
fn none(shape: MatmulShape, formats: Formats) -> Error {
    Error::resource(operation(shape, formats), "cuBLASLt has none")
}

/// Matrices of cuBLASLt are column-major, so a row-major matrix is passed as its transpose. The product becomes `c^T = op(b)^T op(a)^T`:
/// the first factor is `b`, and `c^T` has n rows.
fn describe(lt: &CublasLt, parts: &mut Parts, call: &LibraryProduct, pointers: Pointers) -> Result<()> {
    let &LibraryProduct { shape: MatmulShape { layout, m, n, k }, pitches: [a_pitch, b_pitch, c_pitch], formats, alignments, bias, batch } =
        call;
    let (b, transpose_b) = match layout {
        MatmulLayout::Nt => ([k, n], true),
        MatmulLayout::Nn | MatmulLayout::Tn => ([n, k], false),
    };
    let (a, transpose_a) = match layout {
        MatmulLayout::Tn => ([m, k], true),
        MatmulLayout::Nt | MatmulLayout::Nn => ([k, m], false),
    };
    let matrices = [(b, b_pitch, formats.b), (a, a_pitch, formats.a), ([n, m], c_pitch, formats.c)];
    for (out, ([rows, columns], pitch, format)) in parts.layouts.iter_mut().zip(matrices) {
        // SAFETY: writes one handle.
        let status = unsafe { (lt.layout_create)(out, data_type(format)?, rows as u64, columns as u64, pitch as i64) };
        lt.check(status, || format!("describe a matrix of {columns} x {rows}"))?;
    }
    batch.map_or(Ok(()), |batch| parts.repeat(batch))?;
    parts.describe_product([transpose_b, transpose_a])?;
    if bias != 0 {
        parts.describe(DESC_EPILOGUE, EPILOGUE_BIAS)?;
    }
    pointers.set(|attribute, address| parts.describe(attribute, address))?;
    let [a, b, base, c] = alignments;
    parts.prefer_all([b, a, base, c])
}

impl Drop for Gemm {
    fn drop(&mut self) {
        let experts = self.groups.iter().flat_map(GroupProducts::plans).copied();
        for plan in self.answers.values().filter_map(|answer| answer.found()).chain(experts) {
            plan.destroy(self.lt);
        }
        // SAFETY: made by `new`, destroyed once; the device's streams are idle.
        unsafe { (self.lt.destroy)(self.handle) };
    }
}
