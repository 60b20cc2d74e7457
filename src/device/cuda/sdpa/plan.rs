//! A compiled cuDNN graph and its memory.

use super::graph::{ALIGNMENT, AttentionTensor, Graph, Storage};
use super::sys::{Attribute, Cudnn, Descriptor, DescriptorKind, Handle, Heuristic};
use crate::error::{Error, Result};
use std::ffi::c_void;

pub(super) enum Target {
    /// The GPU of the handle.
    Gpu(Handle),
    /// A GPU described by cuDNN's device properties, which need not be installed.
    #[cfg(test)]
    Described(Descriptor),
}

impl Target {
    fn name_handle(&self, attribute: Attribute, descriptor: &Descriptor) -> Result<()> {
        match self {
            Self::Gpu(handle) => descriptor.set(attribute, &[*handle]),
            #[cfg(test)]
            Self::Described(_) => Ok(()),
        }
    }

    fn name_device(&self, _heuristic: &Descriptor) -> Result<()> {
        match self {
            Self::Gpu(_) => Ok(()),
            #[cfg(test)]
            Self::Described(device) => _heuristic.refer(Attribute::HeuristicDevice, device),
        }
    }
}

/// Location of a graph's tensor at execution.
#[derive(Clone, Copy)]
enum Binding {
    Caller(AttentionTensor),
    /// Offset in bytes into the workspace.
    Workspace(u64),
    /// Index in `values`.
    Value(usize),
}

/// Device addresses of the caller's tensors, by role.
pub(super) type Addresses = [u64; AttentionTensor::COUNT];

/// An executable graph. The vectors of a variant pack are reused, so execution allocates no memory here.
pub(super) struct ExecutionPlan {
    cudnn: Cudnn,
    plan: Descriptor,
    ids: Vec<i64>,
    bindings: Vec<Binding>,
    pointers: Vec<*mut c_void>,
    /// Bits of numbers passed by value.
    values: Vec<u32>,
    /// Range of cuDNN's own part of the workspace.
    own: std::ops::Range<u64>,
}

// SAFETY: the pointers are written before each use.
unsafe impl Send for ExecutionPlan {}

impl ExecutionPlan {
    /// Compiles the first suggested engine that works, which is the same in every process.
    pub(super) fn build(cudnn: Cudnn, graph: &Graph, target: &Target) -> Result<Self> {
        let operations = graph.lower(cudnn)?;
        let operations = Descriptor::build(cudnn, DescriptorKind::OperationGraph, |all| {
            target.name_handle(Attribute::GraphHandle, all)?;
            all.refer_all(Attribute::GraphOperations, &operations)
        })?;
        let heuristic = Descriptor::build(cudnn, DescriptorKind::EngineHeuristic, |heuristic| {
            heuristic.refer(Attribute::HeuristicGraph, &operations)?;
            heuristic.set(Attribute::HeuristicMode, &[Heuristic::A])?;
            target.name_device(heuristic)
        })?;
        let mut refusal = Error::resource("find a cuDNN engine for attention", "cuDNN suggests none");
        for config in heuristic.get_all(Attribute::HeuristicResults, DescriptorKind::EngineConfig)? {
            let plan = Descriptor::build(cudnn, DescriptorKind::ExecutionPlan, |plan| {
                target.name_handle(Attribute::PlanHandle, plan)?;
                plan.refer(Attribute::PlanConfig, &config)
            });
            match plan {
                Ok(plan) => return Self::bind(cudnn, plan, graph),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    /// Lays out the workspace: the graph's tensors first, then cuDNN's own part.
    fn bind(cudnn: Cudnn, plan: Descriptor, graph: &Graph) -> Result<Self> {
        let mut own_bytes = [0i64];
        plan.get(Attribute::PlanWorkspaceBytes, &mut own_bytes)?;
        let (mut ids, mut bindings, mut values, mut end) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for (id, tensor) in graph.tensors() {
            bindings.push(match tensor.place {
                Storage::Virtual => continue,
                Storage::Caller(role) => Binding::Caller(role),
                Storage::Workspace => {
                    let start = end;
                    end += (tensor.elems() * 4).next_multiple_of(256);
                    Binding::Workspace(start)
                }
                Storage::Value(value) => number(&mut values, value.to_bits()),
                Storage::Integer(value) => number(&mut values, value.cast_unsigned()),
            });
            ids.push(id.number());
        }
        let pointers = vec![std::ptr::null_mut(); ids.len()];
        Ok(Self { cudnn, plan, ids, bindings, pointers, values, own: end..end + own_bytes[0] as u64 })
    }

    pub(super) fn workspace_bytes(&self) -> usize {
        self.own.end as usize
    }

    /// Enqueues the plan.
    ///
    /// # Errors
    /// `Resource` when an address is not aligned to 16 bytes, or when cuDNN fails.
    ///
    /// # Safety
    /// Every role in the graph has device memory of its size; the workspace has [`ExecutionPlan::workspace_bytes`].
    pub(super) unsafe fn execute(&mut self, handle: Handle, addresses: &Addresses, workspace: u64) -> Result<()> {
        for (pointer, binding) in self.pointers.iter_mut().zip(&self.bindings) {
            *pointer = match *binding {
                Binding::Caller(role) => aligned(role, addresses[role as usize])? as *mut c_void,
                Binding::Workspace(offset) => (workspace + offset) as *mut c_void,
                Binding::Value(index) => (&raw const self.values[index]).cast_mut().cast(),
            };
        }
        let pack = Descriptor::build(self.cudnn, DescriptorKind::VariantPack, |pack| {
            pack.set(Attribute::PackIds, &self.ids)?;
            pack.set(Attribute::PackPointers, &self.pointers)?;
            pack.set(Attribute::PackWorkspace, &[(workspace + self.own.start) as *mut c_void])
        })?;
        // SAFETY: the caller upholds the contract; the numbers live in `self`.
        unsafe { self.plan.execute(handle, &pack) }
    }

    /// cuDNN's description of the plan, including the compiled kernels.
    #[cfg(test)]
    pub(super) fn json(&self) -> String {
        let bytes = self.plan.get::<u8>(Attribute::PlanJson, &mut []).unwrap();
        let mut text = vec![0u8; bytes];
        self.plan.get(Attribute::PlanJson, &mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    }
}

fn number(values: &mut Vec<u32>, bits: u32) -> Binding {
    values.push(bits);
    Binding::Value(values.len() - 1)
}

fn aligned(role: AttentionTensor, address: u64) -> Result<u64> {
    if address.is_multiple_of(ALIGNMENT) {
        return Ok(address);
    }
    Err(Error::resource("run cuDNN's attention", format!("{role:?} at {address:#x} is not aligned to {ALIGNMENT} bytes")))
}
