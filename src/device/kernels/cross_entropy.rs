//! Cross-entropy over the vocabulary, one tile of logits at a time.

use crate::device::kernel::{Kernel, Operand, operands};
use crate::device::slice::DeviceSlice;

/// Softmax statistics of one tile of logits. A row with a negative target has no loss: its statistics are 0, 1 and 0, whatever the logits
/// are. The word of any other target holds its token and its weight: [`crate::data::loss_weight`].
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyStats {
    /// `[rows, cols]`
    pub logits: DeviceSlice,
    /// int32 `[rows]`
    pub targets: DeviceSlice,
    /// Running maximum, running sum of exponentials and the target's logit, fp32 `[rows, 3]`.
    pub stats: DeviceSlice,
    /// Token of the first column.
    pub vocab_start: usize,
    /// Columns of the tile.
    pub cols: usize,
    /// Soft cap: logits `x` become `cap * tanh(x / cap)`.
    pub softcap: Option<f32>,
    /// Whether this is the first tile, which overwrites `stats`.
    pub first: bool,
}

impl Kernel for CrossEntropyStats {
    const NAME: &'static str = "cross_entropy_stats";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let t = self.targets.elems();
        operands![self; Read logits[t * self.cols]; Read targets[t] Int32, Write stats[3 * t] Float32]
    }
}

/// Turns the tile into `(softmax - onehot(target)) * (weight of the target * scale)`, in place; rows with a negative target become zero.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyGrad {
    /// `[rows, cols]`
    pub logits: DeviceSlice,
    /// int32 `[rows]`
    pub targets: DeviceSlice,
    /// Statistics over all tiles, see [`CrossEntropyStats::stats`].
    pub stats: DeviceSlice,
    /// Token of the first column.
    pub vocab_start: usize,
    /// Columns of the tile.
    pub cols: usize,
    /// See [`CrossEntropyStats::softcap`]; the result is the gradient of the logits before the cap.
    pub softcap: Option<f32>,
    /// Factor on the gradient.
    pub scale: f32,
}

impl Kernel for CrossEntropyGrad {
    const NAME: &'static str = "cross_entropy_grad";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let t = self.targets.elems();
        operands![self; Update logits[t * self.cols]; Read targets[t] Int32, Read stats[3 * t] Float32]
    }
}

/// `loss[0] (+)= scale * sum over rows of weight of the target * (log-sum-exp - target's logit)`, summed in row order in fp64.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyLoss {
    /// int32 `[rows]`
    pub targets: DeviceSlice,
    /// fp32 `[rows, 3]`
    pub stats: DeviceSlice,
    /// fp32 `[1]`
    pub loss: DeviceSlice,
    /// Factor on the sum.
    pub scale: f32,
    /// Adds to `loss`.
    pub accumulate: bool,
}

impl Kernel for CrossEntropyLoss {
    const NAME: &'static str = "cross_entropy_loss";

    fn operands(&self) -> impl AsRef<[Operand]> {
        operands![self; Read targets[self.targets.elems()] Int32, Read stats[3 * self.targets.elems()] Float32; Write loss[1] Float32]
    }
}
