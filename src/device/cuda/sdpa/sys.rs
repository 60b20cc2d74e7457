//! The functions of cuDNN's backend interface used by attention, with descriptors as owned values.
//!
//! Constants are those of `cudnn_graph.h` of cuDNN 9, which only adds new ones. The enums here are only passed to cuDNN, never received
//! from it.

use crate::device::cuda::libraries::{CUBLASLT, CUDNN, Libraries, functions};
use crate::error::{Error, Result};
use cust::sys::CUstream;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;

/// The oldest supported cuDNN: before 9.16 the backward pass needs another graph for lengths that are no multiple of 128.
const OLDEST: usize = 91_600;

/// Kinds of descriptors.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum DescriptorKind {
    Pointwise = 0,
    EngineConfig = 3,
    EngineHeuristic = 4,
    ExecutionPlan = 5,
    OperationPointwise = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    OperationMatmul = 19,
    Reduction = 21,
    OperationReduction = 22,
    OperationReshape = 31,
    #[cfg(test)]
    DeviceProperties = 38,
}

/// Attributes of descriptors.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Attribute {
    PointwiseMode = 0,
    PointwisePrecision = 1,
    PointwiseAxis = 9,
    HeuristicMode = 200,
    HeuristicGraph = 201,
    HeuristicResults = 202,
    #[cfg(test)]
    HeuristicDevice = 204,
    PlanHandle = 400,
    PlanConfig = 401,
    PlanWorkspaceBytes = 402,
    #[cfg(test)]
    PlanJson = 405,
    OperationPointwise = 750,
    OperationPointwiseX = 751,
    OperationPointwiseB = 752,
    OperationPointwiseY = 753,
    OperationPointwiseT = 758,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorAlignment = 900,
    TensorType = 901,
    TensorDims = 902,
    TensorStrides = 903,
    TensorId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    PackIds = 1000,
    PackPointers = 1001,
    PackWorkspace = 1003,
    MatmulPrecision = 1500,
    OperationMatmulA = 1520,
    OperationMatmulB = 1521,
    OperationMatmulC = 1522,
    OperationMatmul = 1523,
    ReductionOperator = 1600,
    ReductionPrecision = 1601,
    OperationReductionX = 1610,
    OperationReductionY = 1611,
    OperationReduction = 1612,
    OperationReshapeX = 2200,
    OperationReshapeY = 2201,
    #[cfg(test)]
    DeviceJson = 2702,
}

/// A value of the C type with the number `TYPE`.
///
/// # Safety
/// The type has the layout of the C type.
pub(super) unsafe trait AttributeValue: Copy {
    const TYPE: i32;
}

macro_rules! values {
    ($($number:literal $type:ty),* $(,)?) => {
        // SAFETY: integers, floats, pointers and enums of the sizes that the header defines for these numbers.
        $(unsafe impl AttributeValue for $type { const TYPE: i32 = $number; })*
    };
}

values! { 0 Handle, 1 DataType, 2 bool, 3 i64, 4 f32, 6 *mut c_void, 8 Heuristic, 14 Mode, 15 Raw, 18 Fold, 24 u8 }

/// A library handle.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Handle(*mut c_void);

// SAFETY: cuDNN allows any thread to use a handle, one at a time.
unsafe impl Send for Handle {}

/// A descriptor's address.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Raw(*mut c_void);

// SAFETY: memory of cuDNN, which is not bound to a thread.
unsafe impl Send for Raw {}

/// Formats of tensors and of arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum DataType {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    Bf16 = 9,
    Bool = 11,
}

/// Elementwise operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Mode {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    CmpGt = 302,
    CmpGe = 303,
    /// An element's index along an axis.
    Index = 501,
    Select = 601,
}

/// Reductions along a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Fold {
    Add = 0,
    Max = 3,
}

/// Heuristic for plan suggestions: cuDNN's best heuristic without timing.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum Heuristic {
    A = 3,
}

functions! {
    /// cuDNN's functions.
    pub(super) Cudnn {
        version = c"cudnnGetVersion"() -> usize;
        last_error = c"cudnnGetLastErrorString"(*mut c_char, usize) -> ();
        create = c"cudnnCreate"(*mut *mut c_void) -> i32;
        destroy = c"cudnnDestroy"(Handle) -> i32;
        set_stream = c"cudnnSetStream"(Handle, CUstream) -> i32;
        descriptor_create = c"cudnnBackendCreateDescriptor"(DescriptorKind, *mut *mut c_void) -> i32;
        descriptor_destroy = c"cudnnBackendDestroyDescriptor"(Raw) -> i32;
        descriptor_finalize = c"cudnnBackendFinalize"(Raw) -> i32;
        descriptor_set = c"cudnnBackendSetAttribute"(Raw, Attribute, i32, i64, *const c_void) -> i32;
        descriptor_get = c"cudnnBackendGetAttribute"(Raw, Attribute, i32, i64, *mut i64, *mut c_void) -> i32;
        execute = c"cudnnBackendExecute"(Handle, Raw, Raw) -> i32;
    }
}

impl Cudnn {
    /// Opens cuDNN and the libraries that it opens by name.
    ///
    /// # Errors
    /// `Resource` when a library is missing; `Unsupported` when cuDNN is too old.
    pub(super) fn open(libraries: &Libraries) -> Result<Self> {
        libraries.open_nvrtc()?;
        libraries.open(&CUBLASLT)?;
        let library = libraries.open(&CUDNN)?;
        let cudnn = Self::bind(&library)?;
        match cudnn.version() {
            OLDEST.. => Ok(cudnn),
            old => Err(Error::Unsupported(format!("cuDNN {old} in {}: attention needs {OLDEST} or later", library.path.display()))),
        }
    }

    /// Version as a number, such as 91900 for 9.19.0.
    pub(super) fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.version)() }
    }

    pub(super) fn check(&self, status: i32, operation: impl FnOnce() -> String) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut text = [0; 1024];
        // SAFETY: the buffer has the stated length; the last byte stays 0.
        let text = unsafe {
            (self.last_error)(text.as_mut_ptr(), text.len() - 1);
            CStr::from_ptr(text.as_ptr()).to_string_lossy()
        };
        Err(Error::resource(operation(), format!("cuDNN status {status}: {}", text.trim())))
    }
}

/// A cuDNN handle for the GPU of the current context.
pub(super) struct Connection {
    pub(super) cudnn: Cudnn,
    pub(super) handle: Handle,
}

impl Connection {
    /// A connection whose plans run on `stream`.
    pub(super) fn new(cudnn: Cudnn, stream: CUstream) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        cudnn.check(unsafe { (cudnn.create)(&mut handle) }, || "start cuDNN".into())?;
        let connection = Self { cudnn, handle: Handle(handle) };
        // SAFETY: both are live; the stream outlives the connection's use.
        cudnn.check(unsafe { (cudnn.set_stream)(connection.handle, stream) }, || "give cuDNN a stream".into())?;
        Ok(connection)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { (self.cudnn.destroy)(self.handle) };
    }
}

/// One backend descriptor.
pub(super) struct Descriptor {
    cudnn: Cudnn,
    kind: DescriptorKind,
    raw: Raw,
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { (self.cudnn.descriptor_destroy)(self.raw) };
    }
}

impl Descriptor {
    /// A finalized descriptor, with the attributes that `fill` sets. Attributes can be set only before, and read only after, finalization.
    pub(super) fn build(cudnn: Cudnn, kind: DescriptorKind, fill: impl FnOnce(&Self) -> Result<()>) -> Result<Self> {
        let descriptor = Self::new(cudnn, kind)?;
        fill(&descriptor)?;
        // SAFETY: live.
        let status = unsafe { (cudnn.descriptor_finalize)(descriptor.raw) };
        cudnn.check(status, || format!("finalize cuDNN's {kind:?}"))?;
        Ok(descriptor)
    }

    fn new(cudnn: Cudnn, kind: DescriptorKind) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: writes one address.
        cudnn.check(unsafe { (cudnn.descriptor_create)(kind, &mut raw) }, || format!("create cuDNN's {kind:?}"))?;
        Ok(Self { cudnn, kind, raw: Raw(raw) })
    }

    pub(super) fn set<T: AttributeValue>(&self, attribute: Attribute, values: &[T]) -> Result<()> {
        // SAFETY: reads as many values of this type as stated.
        let status = unsafe { (self.cudnn.descriptor_set)(self.raw, attribute, T::TYPE, values.len() as i64, values.as_ptr().cast()) };
        self.cudnn.check(status, || format!("set {attribute:?} of cuDNN's {:?}", self.kind))
    }

    pub(super) fn refer(&self, attribute: Attribute, descriptor: &Descriptor) -> Result<()> {
        self.set(attribute, &[descriptor.raw])
    }

    pub(super) fn refer_all(&self, attribute: Attribute, descriptors: &[Descriptor]) -> Result<()> {
        self.set(attribute, &descriptors.iter().map(|descriptor| descriptor.raw).collect::<Vec<_>>())
    }

    /// Reads into `values` and returns the number of values; with empty `values`, only returns the number.
    pub(super) fn get<T: AttributeValue>(&self, attribute: Attribute, values: &mut [T]) -> Result<usize> {
        let mut count = 0;
        // A null pointer makes cuDNN return only the number.
        let to = if values.is_empty() { ptr::null_mut() } else { values.as_mut_ptr().cast() };
        // SAFETY: writes at most as many values of this type as stated.
        let status = unsafe { (self.cudnn.descriptor_get)(self.raw, attribute, T::TYPE, values.len() as i64, &mut count, to) };
        self.cudnn.check(status, || format!("read {attribute:?} of cuDNN's {:?}", self.kind))?;
        Ok(count as usize)
    }

    /// Reads descriptors, all of one kind. cuDNN fills descriptors that the caller creates.
    pub(super) fn get_all(&self, attribute: Attribute, kind: DescriptorKind) -> Result<Vec<Descriptor>> {
        let count = self.get::<Raw>(attribute, &mut [])?;
        let mut made = (0..count).map(|_| Descriptor::new(self.cudnn, kind)).collect::<Result<Vec<_>>>()?;
        let filled = self.get(attribute, &mut made.iter().map(|descriptor| descriptor.raw).collect::<Vec<_>>())?;
        made.truncate(filled);
        Ok(made)
    }

    /// Runs this plan with the memory of `pack`, on the connection's stream.
    ///
    /// # Safety
    /// The pack's pointers have the sizes that the plan's graph states.
    pub(super) unsafe fn execute(&self, handle: Handle, pack: &Descriptor) -> Result<()> {
        // SAFETY: both are finalized; the caller guarantees the memory.
        let status = unsafe { (self.cudnn.execute)(handle, self.raw, pack.raw) };
        self.cudnn.check(status, || "run cuDNN's attention".into())
    }
}
