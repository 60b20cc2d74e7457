//! Short causal convolutions along the tokens of a document.

use crate::device::kernel::{Kernel, Operand, operands, refused, rows};
use crate::device::slice::DeviceSlice;
use crate::error::Result;

/// Tokens that each output sees: its own and those before it.
pub(crate) const TAPS: usize = 4;

/// Convolves each channel over the last four tokens of a document, then applies SiLU: `out[t] = silu(sum_j weight[j] x[t - 3 + j])`. Tokens
/// before the document count as zeros.
#[derive(Clone, Copy, Debug)]
pub struct ShortConv {
    /// `[T, channels]`
    pub x: DeviceSlice,
    /// `[channels, 4]`
    pub weight: DeviceSlice,
    /// Index in its row at which each token's document begins, int32 `[T]`. `None`: every row is one document.
    pub documents: Option<DeviceSlice>,
    /// `[T, channels]`
    pub out: DeviceSlice,
    /// Tokens of a row.
    pub seq_length: usize,
}

impl ShortConv {
    /// Tokens and channels.
    pub(crate) fn size(&self) -> [usize; 2] {
        size(self.x, self.weight)
    }
}

impl Kernel for ShortConv {
    const NAME: &'static str = "short_conv";

    fn check_shape(&self) -> Result<()> {
        check(Self::NAME, self.size(), self.seq_length)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let [tokens, channels] = self.size();
        let n = tokens * channels;
        operands![self; Read x[n], Write out[n]; Read weight[TAPS * channels], Read documents[tokens] Int32]
    }
}

/// Overwrites `dx` with the gradient of [`ShortConv`]'s input; `dweight (+)=` the gradient of the weight.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvBackward {
    /// Gradient of the output, `[T, channels]`.
    pub dout: DeviceSlice,
    /// `[T, channels]`
    pub x: DeviceSlice,
    /// `[channels, 4]`
    pub weight: DeviceSlice,
    /// See [`ShortConv::documents`].
    pub documents: Option<DeviceSlice>,
    /// `[T, channels]`
    pub dx: DeviceSlice,
    /// `[channels, 4]`
    pub dweight: DeviceSlice,
    /// Adds to `dweight`.
    pub accumulate: bool,
    /// Tokens of a row.
    pub seq_length: usize,
}

impl ShortConvBackward {
    /// Tokens and channels.
    pub(crate) fn size(&self) -> [usize; 2] {
        size(self.x, self.weight)
    }
}

impl Kernel for ShortConvBackward {
    const NAME: &'static str = "short_conv_backward";

    fn check_shape(&self) -> Result<()> {
        check(Self::NAME, self.size(), self.seq_length)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let [tokens, channels] = self.size();
        let n = tokens * channels;
        operands![
            self;
            Read dout[n], Read x[n], Write dx[n];
            Read weight[TAPS * channels], Write dweight[TAPS * channels], Read documents[tokens] Int32,
        ]
    }
}

fn size(x: DeviceSlice, weight: DeviceSlice) -> [usize; 2] {
    let channels = weight.elems() / TAPS;
    [rows(x, channels), channels]
}

/// An error of `kernel` unless the tokens fill rows.
fn check(kernel: &'static str, [tokens, channels]: [usize; 2], seq_length: usize) -> Result<()> {
    if seq_length > 0 && channels > 0 && tokens.is_multiple_of(seq_length) {
        return Ok(());
    }
    Err(refused(kernel, format!("{tokens} tokens of {channels} channels in rows of {seq_length}")))
}
