//! Frozen tensors: their own ranges, and the modules in which nothing is trained.

use super::{HfPart, Module, Role, TENSOR_ALIGN_ELEMS, TensorSpec, TensorTable};
use crate::dtype::mxfp4::Mxfp4;
use std::ops::Range;

impl HfPart {
    /// Whether files may store this part in MXFP4.
    pub(in crate::model) fn may_be_packed(&self) -> bool {
        self.stacked.is_some() && self.transposed && !self.either_way
    }
}

impl TensorSpec {
    /// Whether the gradient of the tensor is a product of its own, or that of an embedding, so that it need not be computed.
    pub(in crate::model) fn is_matrix(&self) -> bool {
        self.shape.len() == 2 && self.role != Role::DeltaConv
    }
}

impl TensorTable {
    /// Every frozen tensor in the compute format, in the order of their range.
    pub fn frozen(&self) -> &[TensorSpec] {
        &self.frozen
    }

    /// Every frozen tensor in MXFP4, in the order of their range.
    pub fn packed(&self) -> &[TensorSpec] {
        &self.packed
    }

    pub(super) fn all_frozen(&self) -> impl Iterator<Item = &TensorSpec> {
        self.frozen.iter().chain(&self.packed)
    }

    /// Roles of the frozen tensors of `module`.
    pub(in crate::model) fn frozen_roles(&self, module: Module) -> Vec<Role> {
        self.all_frozen().filter(|spec| spec.module == module).map(|spec| spec.role).collect()
    }

    /// Every tensor: trained tensors in flat order, then frozen ones.
    pub(crate) fn all(&self) -> impl Iterator<Item = &TensorSpec> {
        self.specs.iter().chain(self.all_frozen())
    }

    /// Length of the range of frozen tensors, including padding.
    pub fn frozen_elems(&self) -> usize {
        end_of(&self.frozen)
    }

    /// Length of the range of packed tensors, including padding.
    pub fn packed_elems(&self) -> usize {
        end_of(&self.packed)
    }

    /// Bytes of the codes and scales of that range.
    pub fn packed_bytes(&self) -> usize {
        Mxfp4::bytes(self.packed_elems()).into_iter().sum()
    }

    /// Elements of the memory into which the packed tensors of one module are expanded at a time.
    pub fn expanded_elems(&self) -> usize {
        self.packed.iter().map(|spec| self.expanded(spec).end.next_multiple_of(TENSOR_ALIGN_ELEMS)).max().unwrap_or(0)
    }

    /// The place in that memory of the packed tensor `spec`.
    pub(in crate::model) fn expanded(&self, spec: &TensorSpec) -> Range<usize> {
        let first = self.packed.partition_point(|other| self.module_index(other.module) < self.module_index(spec.module));
        let start = spec.offset_elems - self.packed[first].offset_elems;
        start..start + spec.elems()
    }

    /// Elements of the memory into which kernels write gradients of frozen vectors, which they compute together with other gradients.
    pub(crate) fn unused_grad_elems(&self) -> usize {
        2 * self.longest_frozen_vector()
    }

    /// The place in that memory of the gradient of `spec`. A kernel computes at most two gradients, of neighbours in the table.
    pub(in crate::model) fn unused_grad(&self, spec: &TensorSpec) -> Range<usize> {
        let start = spec.index % 2 * self.longest_frozen_vector();
        start..start + spec.elems()
    }

    fn longest_frozen_vector(&self) -> usize {
        let longest = self.frozen.iter().filter(|spec| !spec.is_matrix()).map(TensorSpec::elems).max();
        longest.unwrap_or(0).next_multiple_of(TENSOR_ALIGN_ELEMS)
    }

    /// The lowest layer in which the backward pass computes anything; the number of layers if there is none.
    pub(crate) fn first_backward_layer(&self) -> usize {
        self.modules().filter(|module| matches!(module, Module::Layer(_)) && !self.runs_backward(*module)).count()
    }

    /// Whether the backward pass computes anything in `module`: a tensor of it, or of a module below it, is trained.
    ///
    /// # Panics
    /// If the model has no such layer.
    pub(crate) fn runs_backward(&self, module: Module) -> bool {
        self.specs.last().is_some_and(|lowest| self.module_index(module) <= self.module_index(lowest.module))
    }
}

/// End of the range of `specs`, including padding.
fn end_of(specs: &[TensorSpec]) -> usize {
    specs.last().map_or(0, |last| last.range().end.next_multiple_of(TENSOR_ALIGN_ELEMS))
}
