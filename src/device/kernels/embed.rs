//! Token and position embeddings. The caller guarantees that tokens and positions lie inside their tables.

use crate::device::kernel::{Kernel, Operand, bytes, operands, refused, rows};
use crate::device::slice::DeviceSlice;
use crate::device::stream::Stream;
use crate::error::Result;

/// `out[t,:] = wte[tokens[t],:] + wpe[positions[t],:]`
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// int32 `[T]`
    pub tokens: DeviceSlice,
    /// int32 `[T]`
    pub positions: DeviceSlice,
    /// `[vocabulary, channels]`
    pub wte: DeviceSlice,
    /// `[positions, channels]`; `None`: no position embedding.
    pub wpe: Option<DeviceSlice>,
    /// `[T, channels]`
    pub out: DeviceSlice,
    /// Columns of the tables.
    pub channels: usize,
}

impl Kernel for Embed {
    const NAME: &'static str = "embed";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, vocab, places) = (self.tokens.elems(), whole(Some(self.wte), self.channels), whole(self.wpe, self.channels));
        operands![
            self;
            Read wte[vocab], Read wpe[places], Write out[t * self.channels], Read tokens[t] Int32, Read positions[t] Int32,
        ]
    }

    fn bytes(&self) -> f64 {
        bytes([self.tokens, self.out, self.out])
    }
}

/// Gradients of [`Embed`]: rows of `dwte` and `dwpe` sum the rows of `dout` that used them. Unused rows become zero, or keep their value
/// with accumulation. Tokens without a row in `dwte` have no part in it.
#[derive(Clone, Copy, Debug)]
pub struct EmbedBackward {
    /// int32 `[T]`
    pub tokens: DeviceSlice,
    /// int32 `[T]`
    pub positions: DeviceSlice,
    /// Gradient of the output, `[T, channels]`.
    pub dout: DeviceSlice,
    /// `[tokens, channels]`, the rows of successive tokens.
    pub dwte: DeviceSlice,
    /// The token of the first row of `dwte`.
    pub first_token: usize,
    /// Adds to `dwte`.
    pub accumulate_wte: bool,
    /// `[positions, channels]`, if there is a position embedding.
    pub dwpe: Option<DeviceSlice>,
    /// Adds to `dwpe`.
    pub accumulate_wpe: bool,
    /// Columns of the tables.
    pub channels: usize,
}

impl Kernel for EmbedBackward {
    const NAME: &'static str = "embed_backward";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, vocab, places) = (self.tokens.elems(), whole(Some(self.dwte), self.channels), whole(self.dwpe, self.channels));
        operands![
            self;
            Read dout[t * self.channels], Write dwte[vocab], Write dwpe[places], Read tokens[t] Int32, Read positions[t] Int32,
        ]
    }

    fn bytes(&self) -> f64 {
        let zeroed = if self.accumulate_wte { 0.0 } else { bytes([self.dwte]) };
        bytes([self.tokens, self.dout, self.dout]) + zeroed
    }
}

/// Copies elements of some rows to their places in a table: `table[rows[r] * channels + c - below] = packed[r * channels + c - skipped]`,
/// for all elements of `packed`. Rows ascend without repetition, and all written elements lie inside the table.
#[derive(Clone, Copy, Debug)]
pub struct ScatterRows {
    pub stream: Stream,
    /// int32 `[R]`
    pub rows: DeviceSlice,
    /// Contiguous rows. The first row lacks its first `skipped` elements; the last row may end early.
    pub packed: DeviceSlice,
    /// A part of a table.
    pub table: DeviceSlice,
    /// Elements of the table before this part.
    pub below: usize,
    pub skipped: usize,
    /// Columns of the table.
    pub channels: usize,
}

impl Kernel for ScatterRows {
    const NAME: &'static str = "scatter_rows";

    fn check_shape(&self) -> Result<()> {
        let (elems, rows) = (self.skipped + self.packed.elems(), self.rows.elems());
        let fits = self.skipped < self.channels.max(1) && elems.div_ceil(self.channels.max(1)) == rows;
        let cause = || format!("{} elements of {rows} rows of {}, after {}", self.packed.elems(), self.channels, self.skipped);
        if fits { Ok(()) } else { Err(refused(Self::NAME, cause())) }
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let [packed, table, rows] = [self.packed, self.table, self.rows].map(DeviceSlice::elems);
        operands![self; Read packed[packed], Write table[table], Read rows[rows] Int32]
    }

    fn bytes(&self) -> f64 {
        bytes([self.rows, self.packed, self.packed])
    }

    fn stream(&self) -> Stream {
        self.stream
    }
}

/// Elements of a table in whole rows.
fn whole(table: Option<DeviceSlice>, channels: usize) -> usize {
    table.map_or(0, |table| rows(table, channels) * channels)
}
