//! An operation graph as plain data, and its translation to cuDNN's descriptors.

use super::sys::{Attribute, Cudnn, DataType, Descriptor, DescriptorKind, Fold, Mode};
use crate::error::Result;

/// Alignment in bytes of every tensor in memory.
pub(super) const ALIGNMENT: u64 = 16;

/// Roles of the caller's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttentionTensor {
    Q,
    K,
    V,
    Out,
    Lse,
    Dout,
    Dq,
    Dk,
    Dv,
}

impl AttentionTensor {
    pub(super) const ALL: [Self; 9] = [Self::Q, Self::K, Self::V, Self::Out, Self::Lse, Self::Dout, Self::Dq, Self::Dk, Self::Dv];
    pub(super) const COUNT: usize = Self::ALL.len();
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Storage {
    /// No memory: the tensor passes between nodes.
    Virtual,
    /// The caller's memory.
    Caller(AttentionTensor),
    /// The workspace: fp32 and dense.
    Workspace,
    /// A number on the host, read at each execution.
    Value(f32),
    Integer(i32),
}

/// Batch, head, row and column.
pub(super) type Extent = [i64; 4];

#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    pub(super) dtype: DataType,
    pub(super) dims: Extent,
    pub(super) strides: Extent,
    pub(super) place: Storage,
}

impl Tensor {
    pub(super) fn elems(&self) -> u64 {
        self.dims.iter().product::<i64>() as u64
    }
}

/// Index of a tensor in the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id(pub(super) usize);

impl Id {
    /// The tensor's identifier in cuDNN.
    pub(super) fn number(self) -> i64 {
        self.0 as i64 + 1
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Operation {
    /// `y = x b`
    Matmul { b: Id },
    /// `y = mode(x, b, t)`; `Select` takes x where t holds and b elsewhere, `Index` has an axis.
    Pointwise { mode: Mode, axis: Option<i64>, b: Option<Id>, t: Option<Id> },
    /// Reduces the dimensions in which y has size 1, or fewer heads.
    Reduce(Fold),
    /// `y` is x with other dimensions.
    Reshape,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) operation: Operation,
    pub(super) x: Id,
    pub(super) y: Id,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    pub(super) tensors: Vec<Tensor>,
    pub(super) nodes: Vec<Node>,
}

impl Graph {
    pub(super) fn tensors(&self) -> impl Iterator<Item = (Id, &Tensor)> {
        self.tensors.iter().enumerate().map(|(index, tensor)| (Id(index), tensor))
    }

    pub(super) fn tensor(&mut self, tensor: Tensor) -> Id {
        self.tensors.push(tensor);
        Id(self.tensors.len() - 1)
    }

    pub(super) fn node(&mut self, operation: Operation, x: Id, y: Id) -> Id {
        self.nodes.push(Node { operation, x, y });
        y
    }

    /// Translates the operations to cuDNN's descriptors.
    pub(super) fn lower(&self, cudnn: Cudnn) -> Result<Vec<Descriptor>> {
        let tensors = self.tensors().map(|(id, tensor)| lower_tensor(cudnn, id, tensor)).collect::<Result<Vec<_>>>()?;
        let lower = |node: &Node| lower_node(cudnn, node, self.tensors[node.y.0].dtype, &tensors);
        self.nodes.iter().map(lower).collect()
    }
}

fn lower_tensor(cudnn: Cudnn, id: Id, tensor: &Tensor) -> Result<Descriptor> {
    Descriptor::build(cudnn, DescriptorKind::Tensor, |descriptor| {
        descriptor.set(Attribute::TensorType, &[tensor.dtype])?;
        descriptor.set(Attribute::TensorDims, &tensor.dims)?;
        descriptor.set(Attribute::TensorStrides, &tensor.strides)?;
        descriptor.set(Attribute::TensorId, &[id.number()])?;
        descriptor.set(Attribute::TensorAlignment, &[ALIGNMENT as i64])?;
        match tensor.place {
            Storage::Virtual => descriptor.set(Attribute::TensorIsVirtual, &[true]),
            Storage::Value(_) | Storage::Integer(_) => descriptor.set(Attribute::TensorIsByValue, &[true]),
            Storage::Caller(_) | Storage::Workspace => Ok(()),
        }
    })
}

/// `dtype` is the format of the node's `y`.
fn lower_node(cudnn: Cudnn, node: &Node, dtype: DataType, tensors: &[Descriptor]) -> Result<Descriptor> {
    use Attribute as A;
    let tensor = |id: Id| &tensors[id.0];
    let (x, y) = (tensor(node.x), tensor(node.y));
    match node.operation {
        Operation::Matmul { b } => {
            let how = Descriptor::build(cudnn, DescriptorKind::Matmul, |how| how.set(A::MatmulPrecision, &[DataType::F32]))?;
            let parts = [(A::OperationMatmul, &how), (A::OperationMatmulA, x), (A::OperationMatmulB, tensor(b)), (A::OperationMatmulC, y)];
            operation(cudnn, DescriptorKind::OperationMatmul, &parts)
        }
        Operation::Pointwise { mode, axis, b, t } => {
            let how = pointwise(cudnn, mode, axis, dtype)?;
            let mut parts = vec![(A::OperationPointwise, &how), (A::OperationPointwiseX, x), (A::OperationPointwiseY, y)];
            parts.extend(b.map(|b| (A::OperationPointwiseB, tensor(b))));
            parts.extend(t.map(|t| (A::OperationPointwiseT, tensor(t))));
            operation(cudnn, DescriptorKind::OperationPointwise, &parts)
        }
        Operation::Reduce(fold) => {
            let how = Descriptor::build(cudnn, DescriptorKind::Reduction, |how| {
                how.set(A::ReductionPrecision, &[DataType::F32])?;
                how.set(A::ReductionOperator, &[fold])
            })?;
            let parts = [(A::OperationReduction, &how), (A::OperationReductionX, x), (A::OperationReductionY, y)];
            operation(cudnn, DescriptorKind::OperationReduction, &parts)
        }
        Operation::Reshape => operation(cudnn, DescriptorKind::OperationReshape, &[(A::OperationReshapeX, x), (A::OperationReshapeY, y)]),
    }
}

fn pointwise(cudnn: Cudnn, mode: Mode, axis: Option<i64>, dtype: DataType) -> Result<Descriptor> {
    let precision = match mode {
        Mode::CmpGt | Mode::CmpGe => DataType::Bool,
        Mode::Add | Mode::Sub if dtype == DataType::I32 => DataType::I32,
        _ => DataType::F32,
    };
    Descriptor::build(cudnn, DescriptorKind::Pointwise, |how| {
        how.set(Attribute::PointwiseMode, &[mode])?;
        how.set(Attribute::PointwisePrecision, &[precision])?;
        axis.map_or(Ok(()), |axis| how.set(Attribute::PointwiseAxis, &[axis]))
    })
}

fn operation(cudnn: Cudnn, kind: DescriptorKind, parts: &[(Attribute, &Descriptor)]) -> Result<Descriptor> {
    Descriptor::build(cudnn, kind, |node| parts.iter().try_for_each(|(attribute, part)| node.refer(*attribute, part)))
}
