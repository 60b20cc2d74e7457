//! Queries, keys and values of multi-head latent attention, and the width of heads.

use crate::device::kernel::{Kernel, Operand, operands, refused, rows};
use crate::device::slice::DeviceSlice;
use crate::error::Result;

/// The heads of a token in latent attention. A query or key has `plain` channels, and `rotary` channels that a rotation by the position
/// changes; the latter are the same in all keys of a token. A value has `value` channels and lies in the first ones of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentHeads {
    pub heads: usize,
    pub plain: usize,
    /// An even number.
    pub rotary: usize,
    /// At most `plain + rotary`.
    pub value: usize,
    /// Whether pairs of the rotation are adjacent channels; otherwise channels that are `rotary / 2` apart.
    pub interleaved: bool,
}

impl LatentHeads {
    /// Channels of a head.
    pub(crate) fn head_dim(&self) -> usize {
        self.plain + self.rotary
    }

    /// Columns of all queries of a token.
    pub(crate) fn query_cols(&self) -> usize {
        self.heads * self.head_dim()
    }

    /// Columns of the projected keys and values of a token: for each head the plain channels of a key, then a value.
    pub(crate) fn projected_cols(&self) -> usize {
        self.heads * (self.plain + self.value)
    }

    fn check(&self, kernel: &'static str) -> Result<()> {
        let Self { heads, plain, rotary, value, .. } = *self;
        let fits = heads * plain * rotary * value > 0 && rotary.is_multiple_of(2) && value <= self.head_dim();
        if fits { Ok(()) } else { Err(refused(kernel, format!("{self:?} makes no sense"))) }
    }
}

/// Queries, keys and values as attention reads them: rotates queries and keys, gives every head the token's rotated channels of keys, and
/// fills heads of values with zeros.
#[derive(Clone, Copy, Debug)]
pub struct AssembleHeads {
    /// `[T, heads * (plain + rotary)]`
    pub queries: DeviceSlice,
    /// `[T, heads * (plain + value)]`
    pub projected: DeviceSlice,
    /// The channels of keys that rotate, `[T, rotary]`.
    pub key: DeviceSlice,
    /// int32 `[T]`, each a row of the table.
    pub positions: DeviceSlice,
    /// (cos, sin) by position, fp32 `[positions, rotary / 2, 2]`.
    pub table: DeviceSlice,
    /// `[T, 3 * heads * (plain + rotary)]`
    pub qkv: DeviceSlice,
    pub heads: LatentHeads,
}

impl Kernel for AssembleHeads {
    const NAME: &'static str = "assemble_heads";

    fn check_shape(&self) -> Result<()> {
        self.heads.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, heads) = (self.positions.elems(), self.heads);
        let angles = rows(self.table, heads.rotary) * heads.rotary;
        operands![
            self;
            Read queries[t * heads.query_cols()], Read projected[t * heads.projected_cols()], Read key[t * heads.rotary],
            Write qkv[t * 3 * heads.query_cols()], Read table[angles] Float32, Read positions[t] Int32,
        ]
    }
}

/// The gradients of the inputs of [`AssembleHeads`]. The gradient of `key` is a sum over heads in their order, in fp32.
#[derive(Clone, Copy, Debug)]
pub struct AssembleHeadsBackward {
    /// Gradient of the output, `[T, 3 * heads * (plain + rotary)]`.
    pub dqkv: DeviceSlice,
    /// See [`AssembleHeads::positions`].
    pub positions: DeviceSlice,
    /// See [`AssembleHeads::table`].
    pub table: DeviceSlice,
    /// `[T, heads * (plain + rotary)]`
    pub dqueries: DeviceSlice,
    /// `[T, heads * (plain + value)]`
    pub dprojected: DeviceSlice,
    /// `[T, rotary]`
    pub dkey: DeviceSlice,
    pub heads: LatentHeads,
}

impl Kernel for AssembleHeadsBackward {
    const NAME: &'static str = "assemble_heads_backward";

    fn check_shape(&self) -> Result<()> {
        self.heads.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, heads) = (self.positions.elems(), self.heads);
        let angles = rows(self.table, heads.rotary) * heads.rotary;
        operands![
            self;
            Read dqkv[t * 3 * heads.query_cols()], Write dqueries[t * heads.query_cols()], Write dprojected[t * heads.projected_cols()],
            Write dkey[t * heads.rotary], Read table[angles] Float32, Read positions[t] Int32,
        ]
    }
}

/// Copies rows of one width to rows of another: without the last columns, or followed by zeros.
#[derive(Clone, Copy, Debug)]
pub struct ResizeRows {
    /// `[rows, from]`
    pub x: DeviceSlice,
    /// `[rows, to]`
    pub out: DeviceSlice,
    pub from: usize,
    pub to: usize,
}

impl Kernel for ResizeRows {
    const NAME: &'static str = "resize_rows";

    fn check_shape(&self) -> Result<()> {
        let Self { from, to, .. } = *self;
        if from * to > 0 { Ok(()) } else { Err(refused(Self::NAME, format!("rows of {from} columns to rows of {to}"))) }
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let rows = rows(self.x, self.from);
        operands![self; Read x[rows * self.from], Write out[rows * self.to]]
    }
}
