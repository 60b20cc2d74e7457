//! Cross-entropy over the vocabulary, one tile of logits at a time.

use crate::device::kernel::{Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::pair_loss::{PAIR_WORDS, PairLoss, REPORT_WORDS, SUM_WORDS};
use crate::policy_loss::{PolicyLoss, TOKEN_WORDS};

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
    /// Format of the gradients: that of the logits, or 16 bits for logits in fp32. Each row of gradients begins where its row of logits begins.
    /// The bytes behind a row of narrower gradients are undefined.
    pub gradients: Dtype,
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

    fn bytes(&self) -> f64 {
        gradient_bytes(self.logits, self.gradients)
    }

    fn check_shape(&self) -> Result<()> {
        check_gradients(Self::NAME, self.logits, self.gradients)
    }
}

/// Bytes of logits that are read, and of their gradients.
fn gradient_bytes(logits: DeviceSlice, gradients: Dtype) -> f64 {
    (logits.bytes() + logits.elems() * gradients.bytes()) as f64
}

/// An error for gradients in a format that `kernel` cannot write in the place of its `logits`.
fn check_gradients(kernel: &'static str, logits: DeviceSlice, gradients: Dtype) -> Result<()> {
    let is_narrower = logits.dtype() == Dtype::Float32 && [Dtype::Bfloat16, Dtype::Float16].contains(&gradients);
    if is_narrower || gradients == logits.dtype() {
        return Ok(());
    }
    Err(refused(kernel, format!("logits of {} with gradients of {gradients}", logits.dtype())))
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

/// Like [`CrossEntropyGrad`], with a scale for each row: `(softmax - onehot(target)) * scale of the row`.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyRowGrad {
    /// `[rows, cols]`
    pub logits: DeviceSlice,
    /// See [`CrossEntropyGrad::gradients`].
    pub gradients: Dtype,
    /// int32 `[rows]`
    pub targets: DeviceSlice,
    /// See [`CrossEntropyGrad::stats`].
    pub stats: DeviceSlice,
    /// Factors on the gradients, fp32 `[rows]`. Rows with a negative target may have any factor.
    pub scales: DeviceSlice,
    /// Token of the first column.
    pub vocab_start: usize,
    /// Columns of the tile.
    pub cols: usize,
    /// See [`CrossEntropyGrad::softcap`].
    pub softcap: Option<f32>,
}

impl Kernel for CrossEntropyRowGrad {
    const NAME: &'static str = "cross_entropy_row_grad";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let t = self.targets.elems();
        operands![self; Update logits[t * self.cols]; Read targets[t] Int32, Read stats[3 * t] Float32, Read scales[t] Float32]
    }

    fn bytes(&self) -> f64 {
        gradient_bytes(self.logits, self.gradients)
    }

    fn check_shape(&self) -> Result<()> {
        check_gradients(Self::NAME, self.logits, self.gradients)
    }
}

/// Losses of pairs of answers, from the statistics of their rows: sums of log-probabilities in fp64, the mean loss of the pairs of a step, and
/// for each row of an answer the scale of its gradient, `-d mean loss / d log-probability`.
#[derive(Clone, Copy, Debug)]
pub struct PairLosses {
    /// Pairs, int32 `[pairs, 8]`: see [`PAIR_WORDS`]. A place without a pair has the rows 0 to 0.
    pub pairs: DeviceSlice,
    /// int32 `[rows]`. Rows with a negative target belong to no answer. Targets with less than the whole weight are tokens of a prompt, whose
    /// cross-entropy alone may be trained.
    pub targets: DeviceSlice,
    /// fp32 `[rows, 3]`
    pub stats: DeviceSlice,
    /// Scales of rows, fp32 `[rows]`; rows outside of pairs keep their contents.
    pub scales: DeviceSlice,
    /// Sums of log-probabilities, int32 `[pairs, 4]`: see [`SUM_WORDS`].
    pub sums: DeviceSlice,
    /// Sums of the numbers of [`REPORT_WORDS`] over the pairs, in fp64, int32 `[6, 2]`.
    pub totals: DeviceSlice,
    /// The numbers of [`REPORT_WORDS`] so far, as means over the pairs of the step, fp32 `[6]`.
    pub report: DeviceSlice,
    /// The loss.
    pub loss: PairLoss,
    /// Pairs of the whole step.
    pub step_pairs: f64,
    /// Factor on the scales, not on the loss.
    pub scale: f32,
    /// Adds to `totals`.
    pub accumulate: bool,
}

impl PairLosses {
    /// Places of pairs.
    pub(crate) fn places(&self) -> usize {
        self.sums.elems() / SUM_WORDS
    }
}

impl Kernel for PairLosses {
    const NAME: &'static str = "pair_losses";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (pairs, t) = (self.places(), self.targets.elems());
        operands![self;
            Read pairs[PAIR_WORDS * pairs] Int32, Read targets[t] Int32, Read stats[3 * t] Float32, Write scales[t] Float32,
            Write sums[SUM_WORDS * pairs] Int32, Update totals[2 * REPORT_WORDS] Int32, Write report[REPORT_WORDS] Float32
        ]
    }
}

/// Losses of the tokens of sampled completions, from the statistics of their rows: the loss of a step, and for each row with a target the scale
/// of its gradient, `-d loss of the step / d log-probability`.
#[derive(Clone, Copy, Debug)]
pub struct PolicyLosses {
    /// Numbers of the tokens, int32 `[rows, 4]`: see [`TOKEN_WORDS`]. A log-probability of the reference that the loss needs and that is absent
    /// becomes that of the row.
    pub tokens: DeviceSlice,
    /// int32 `[rows]`. Rows with a negative target belong to no completion.
    pub targets: DeviceSlice,
    /// fp32 `[rows, 3]`
    pub stats: DeviceSlice,
    /// Scales of rows, fp32 `[rows]`; those of rows with a negative target are zero.
    pub scales: DeviceSlice,
    /// Sums of the reported numbers over the rows, in fp64, int32 `[6, 2]`: loss, ratio, clipped from below and from above, divergence, and
    /// the number of rows.
    pub totals: DeviceSlice,
    /// These sums so far, divided by `count`, fp32 `[6]`.
    pub report: DeviceSlice,
    /// The loss.
    pub loss: PolicyLoss,
    /// Tokens or completions of the whole step.
    pub count: f64,
    /// Factor on the scales, not on the loss.
    pub scale: f32,
    /// Adds to `totals`.
    pub accumulate: bool,
}

impl Kernel for PolicyLosses {
    const NAME: &'static str = "policy_losses";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let t = self.targets.elems();
        operands![self;
            Update tokens[TOKEN_WORDS * t] Int32, Read targets[t] Int32, Read stats[3 * t] Float32, Write scales[t] Float32,
            Update totals[2 * REPORT_WORDS] Int32, Write report[REPORT_WORDS] Float32
        ]
    }
}
