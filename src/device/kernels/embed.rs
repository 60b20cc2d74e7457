//! Token and position embeddings. Tokens and positions are already known to be inside of their tables.

use crate::device::kernel::{Kernel, Operand, bytes, operands, rows};
use crate::device::slice::DeviceSlice;

/// `out[t,:] = wte[tokens[t],:] + wpe[positions[t],:]`
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// int32 `[T]`
    pub tokens: DeviceSlice,
    /// int32 `[T]`
    pub positions: DeviceSlice,
    /// `[vocabulary, channels]`
    pub wte: DeviceSlice,
    /// `[positions, channels]`; `None`: nothing is added.
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

/// Gradients of [`Embed`]: rows of `dwte` and `dwpe` sum the rows of `dout` that used them; rows never used become zero, or stay where
/// gradients accumulate.
#[derive(Clone, Copy, Debug)]
pub struct EmbedBackward {
    /// int32 `[T]`
    pub tokens: DeviceSlice,
    /// int32 `[T]`
    pub positions: DeviceSlice,
    /// Gradient of the output, `[T, channels]`.
    pub dout: DeviceSlice,
    /// `[vocabulary, channels]`
    pub dwte: DeviceSlice,
    /// Adds to `dwte`.
    pub accumulate_wte: bool,
    /// `[positions, channels]`, where there is such a table.
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

/// Elements of the whole rows of a table.
fn whole(table: Option<DeviceSlice>, channels: usize) -> usize {
    table.map_or(0, |table| rows(table, channels) * channels)
}
