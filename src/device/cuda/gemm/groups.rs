//! Expert products by cuBLASLt's grouped layouts, which read addresses and sizes on the GPU, so the host does not wait for them.
//!
//! Kernels write addresses and sizes into tables just before (`ptx/groups.ptx`). The algorithm follows from sizes that the host knows, such
//! as the mean rows of an expert, never from the actual rows of an expert. It is therefore the same in every step and process.

use super::choice::{Answer, Reductions};
use super::parts::{CublasLt, MatmulPlan, Opaque, Parts, data_type};
use crate::device::cuda::driver::RawStream;
use crate::device::cuda::error::failed;
use crate::device::cuda::group_tables::{GroupRoles, GroupSize, GroupTables};
use crate::device::cuda::libraries::{CUBLASLT, Libraries, functions};
use crate::device::footprint::gpu::MATMUL_WORKSPACE_BYTES as WORKSPACE_BYTES;
use crate::device::{GroupedShape, ProductAlgorithm};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use cust::memory::DeviceBuffer;
use std::collections::HashMap;
use std::ops::RangeInclusive;

/// The oldest cuBLAS whose grouped layouts are used. NVIDIA's release notes list wrong products on Hopper, and calls that hang, for earlier
/// versions.
const OLDEST: usize = 130_800;

/// GPU generations with grouped layouts: Hopper and data-centre Blackwell.
const GENERATIONS: RangeInclusive<i32> = 9..=11;

const DESC_POINTER_MODE: i32 = 2;
const POINTER_MODE_DEVICE: i32 = 1;
/// Attribute of the mean number of terms of a sum; the attributes of the result's mean rows and columns follow.
const PREFERENCE_MEANS: i32 = 13;
/// Alignment of every matrix in bytes.
const ALIGNMENT: u16 = 16;

functions! {
    /// Functions of newer cuBLAS releases only.
    GroupedLayouts {
        create = c"cublasLtGroupedMatrixLayoutCreate"(*mut Opaque, i32, i32, u64, u64, u64) -> i32;
    }
}

/// State of grouped expert products.
pub(super) struct GroupProducts {
    layouts: GroupedLayouts,
    tables: DeviceBuffer<u8>,
    plans: HashMap<(GroupedShape, Dtype), MatmulPlan>,
}

impl GroupProducts {
    /// For a GPU of `generation` and cuBLASLt of `version`.
    ///
    /// # Errors
    /// `Unsupported` with the [`obstacle`]; `Resource` when there is not enough memory.
    pub(super) fn new(libraries: &Libraries, version: usize, generation: i32) -> Result<Self> {
        if let Some(obstacle) = obstacle(version, generation) {
            return Err(Error::Unsupported(format!(
                "--expert-products cublaslt: {obstacle}; or use --expert-products own (where the run began otherwise with --allow-changed \
                 numerics)"
            )));
        }
        let layouts = GroupedLayouts::bind(&libraries.open(&CUBLASLT)?)?;
        // SAFETY: kernels write the tables before products read them.
        let tables = unsafe { DeviceBuffer::uninitialized(GroupTables::BYTES) }
            .map_err(|e| failed(e as u32, "allocate GPU memory for tables of experts".into()))?;
        Ok(Self { layouts, tables, plans: HashMap::new() })
    }

    pub(super) fn tables(&self) -> GroupTables {
        GroupTables(self.tables.as_device_ptr().as_raw())
    }

    pub(super) fn plans(&self) -> impl Iterator<Item = &MatmulPlan> {
        self.plans.values()
    }

    /// Algorithms of the plans so far.
    pub(super) fn algorithms(&self) -> impl Iterator<Item = ProductAlgorithm> {
        self.plans.iter().map(|((shape, dtype), plan)| plan.algorithm(shape.as_one(), Some(shape.experts), *dtype))
    }

    /// Returns a closure that enqueues the products that the tables describe. Takes the library, its handle and its workspace.
    pub(super) fn product(
        &mut self,
        (lt, handle, workspace): (CublasLt, Opaque, u64),
        shape: GroupedShape,
        dtype: Dtype,
    ) -> Result<impl FnOnce(&RawStream) -> Result<()> + use<>> {
        let tables = self.tables();
        let plan = match self.plans.get(&(shape, dtype)) {
            Some(plan) => *plan,
            None => {
                let plan = plan((lt, handle), &self.layouts, tables, shape, dtype)?;
                self.plans.insert((shape, dtype), plan);
                plan
            }
        };
        let GroupRoles { factors: [(a, _), (b, _)], result, .. } = GroupRoles::of(shape.layout);
        let [a, b, c] = [a, b, result].map(|of| tables.addresses(of));
        let [first, second, layout] = plan.layouts;
        let [one, beta] = tables.factors().map(|address| address as *const f32);
        Ok(move |raw: &RawStream| {
            // SAFETY: the layouts describe the matrices in the tables; tables and factors are in GPU memory, as the plan states.
            let status = unsafe {
                (lt.matmul)(
                    handle,
                    plan.description,
                    one,
                    a,
                    first,
                    b,
                    second,
                    beta,
                    c,
                    layout,
                    c,
                    layout,
                    &plan.algorithm,
                    workspace,
                    WORKSPACE_BYTES,
                    raw.0.cast(),
                )
            };
            lt.check(status, || format!("multiply experts' matrices, {shape:?} on {dtype}"))
        })
    }
}

/// Makes the plan for the products of `shape`: the first suggestion whose results are right, or else the first without split sums.
fn plan(
    (lt, handle): (CublasLt, Opaque),
    layouts: &GroupedLayouts,
    tables: GroupTables,
    shape: GroupedShape,
    dtype: Dtype,
) -> Result<MatmulPlan> {
    let operation = || format!("choose an algorithm for products of experts, {shape:?} on {dtype}");
    let plan = |reductions| parts(lt, layouts, tables, shape, dtype)?.plan(handle, reductions, operation);
    let skipped = match plan(Reductions::InFp32)? {
        Answer::Found(plan) => return Ok(plan),
        Answer::Excluded(skipped) => skipped,
        Answer::Refused => 0,
    };
    let none = || Error::resource(operation(), "cuBLASLt has none; use --expert-products own");
    plan(Reductions::None)?.found().map(|plan| plan.after(skipped)).ok_or_else(none)
}

/// The description of the products of `shape`.
fn parts(lt: CublasLt, layouts: &GroupedLayouts, tables: GroupTables, shape: GroupedShape, dtype: Dtype) -> Result<Parts> {
    let GroupRoles { factors: [(a, transpose_a), (b, transpose_b)], result, terms } = GroupRoles::of(shape.layout);
    let mut parts = Parts::new(lt);
    for (out, of) in parts.layouts.iter_mut().zip([a, b, result]) {
        let [rows, columns] = of.sizes().map(|size| tables.sizes(size));
        // SAFETY: writes one handle; the GPU reads the addresses when a product runs.
        let status = unsafe { (layouts.create)(out, data_type(dtype)?, shape.experts as i32, rows, columns, rows) };
        lt.check(status, || format!("describe matrices of {} experts", shape.experts))?;
    }
    parts.describe_product([transpose_a, transpose_b])?;
    parts.describe(DESC_POINTER_MODE, POINTER_MODE_DEVICE)?;
    parts.prefer_all([ALIGNMENT; 4])?;
    let [rows, columns] = result.sizes();
    for (size, attribute) in [terms, rows, columns].into_iter().zip(PREFERENCE_MEANS..) {
        parts.prefer(attribute, mean(shape, size))?;
    }
    Ok(parts)
}

/// Mean of `size` over all experts. The header documents 32 bits, but 13.8.2 requires 64 and rejects 32.
fn mean(shape: GroupedShape, size: GroupSize) -> i64 {
    let GroupedShape { experts, rows, outs, ins, .. } = shape;
    let mean = match size {
        GroupSize::Rows => rows.div_ceil(experts),
        GroupSize::Outs => outs,
        GroupSize::Ins => ins,
    };
    mean as i64
}

/// The reason why grouped layouts of cuBLASLt are not used with this `version` on a GPU of this generation.
pub(super) fn obstacle(version: usize, generation: i32) -> Option<String> {
    if !GENERATIONS.contains(&generation) {
        return Some(format!("cuBLASLt does it on Hopper and Blackwell in data centres, this GPU's compute capability is {generation}"));
    }
    (version < OLDEST)
        .then(|| format!("cuBLASLt does it from {OLDEST} on, and faster, this is {version} (pip install 'nvidia-cublas>=13.8')"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::MatmulLayout;

    #[test]
    fn old_libraries_and_other_gpus_are_refused_with_the_requirement() {
        assert_eq!([obstacle(130_800, 9), obstacle(131_000, 10)], [None, None]);
        let text = |version, generation| obstacle(version, generation).unwrap();
        assert!(text(130_799, 9).starts_with("cuBLASLt does it from 130800 on, and faster, this is 130799"), "{}", text(130_799, 9));
        assert!(text(130_800, 8).contains("compute capability is 8") && text(130_800, 12).contains("compute capability is 12"));
    }

    #[test]
    fn means_follow_from_sizes_that_the_host_knows() {
        let shape = GroupedShape { layout: MatmulLayout::Tn, experts: 3, rows: 10, outs: 24, ins: 8 };
        assert_eq!([GroupSize::Rows, GroupSize::Outs, GroupSize::Ins].map(|size| mean(shape, size)), [4, 24, 8]);
    }
}
