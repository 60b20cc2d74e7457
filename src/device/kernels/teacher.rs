//! Distillation: rows of logits beside the tokens of a teacher.

use crate::device::kernel::{Kernel, Operand, operands, refused};
use crate::device::slice::DeviceSlice;
use crate::error::Result;
use crate::pair_loss::REPORT_WORDS;
use crate::teacher_loss::{ENTRY_WORDS, TeacherLoss};

/// Softmax statistics of the tokens that are not the teacher's, of one tile of logits, and the logits of the teacher's tokens in this tile. The
/// tile's logits of these tokens become minus infinity. A row with a negative target has no loss: its statistics are 0, 1 and 0, and its logits
/// and entries stay as they are.
#[derive(Clone, Copy, Debug)]
pub struct TeacherStats {
    /// `[rows, cols]`
    pub logits: DeviceSlice,
    /// int32 `[rows]`
    pub targets: DeviceSlice,
    /// Tokens of the teacher, int32 `[rows, top_k, 2]`: see [`ENTRY_WORDS`].
    pub teacher: DeviceSlice,
    /// Running maximum and running sum of exponentials of the tokens outside, and the target's logit, fp32 `[rows, 3]`. Without a token
    /// outside, maximum and sum are minus infinity and 0.
    pub stats: DeviceSlice,
    /// Logits of the teacher's tokens, after the soft cap, fp32 `[rows, top_k + 1]`. The last place of each row keeps its contents.
    pub entries: DeviceSlice,
    /// Most tokens of the teacher for each row.
    pub top_k: usize,
    /// Token of the first column.
    pub vocab_start: usize,
    /// Columns of the tile.
    pub cols: usize,
    /// Soft cap: logits `x` become `cap * tanh(x / cap)`.
    pub softcap: Option<f32>,
    /// Whether this is the first tile, which overwrites `stats`.
    pub first: bool,
}

impl Kernel for TeacherStats {
    const NAME: &'static str = "teacher_stats";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, k) = (self.targets.elems(), self.top_k);
        operands![self;
            Update logits[t * self.cols];
            Read targets[t] Int32, Read teacher[t * k * ENTRY_WORDS] Int32, Update stats[3 * t] Float32, Update entries[t * (k + 1)] Float32
        ]
    }
}

/// Losses of distillation, from the statistics of rows: the loss of a step, and the gradients of the logits of each row with a target.
#[derive(Clone, Copy, Debug)]
pub struct TeacherLosses {
    /// See [`TeacherStats::teacher`].
    pub teacher: DeviceSlice,
    /// int32 `[rows]`. Each row counts by the weight of its target.
    pub targets: DeviceSlice,
    /// See [`TeacherStats::stats`].
    pub stats: DeviceSlice,
    /// Logits of the teacher's tokens, which become gradients; the last place of each row becomes the gradient of the target's logit.
    pub entries: DeviceSlice,
    /// Factors on the softmax among the tokens outside, fp32 `[rows]`; those of rows with a negative target are zero.
    pub scales: DeviceSlice,
    /// Sums of the reported numbers over the rows, in fp64, int32 `[6, 2]`: loss, divergence, cross-entropy, two zeros, and the weights.
    pub totals: DeviceSlice,
    /// These sums so far, divided by `weight`, fp32 `[6]`.
    pub report: DeviceSlice,
    /// The loss.
    pub loss: TeacherLoss,
    /// See [`TeacherStats::softcap`]: the gradients are those of the logits before the cap.
    pub softcap: Option<f32>,
    /// Sum of the weights of all targets of the step.
    pub weight: f64,
    /// Factor on the gradients, not on the loss.
    pub scale: f32,
    /// Adds to `totals`.
    pub accumulate: bool,
}

impl Kernel for TeacherLosses {
    const NAME: &'static str = "teacher_losses";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, k) = (self.targets.elems(), self.loss.top_k);
        operands![self;
            Read teacher[t * k * ENTRY_WORDS] Int32, Read targets[t] Int32, Read stats[3 * t] Float32, Update entries[t * (k + 1)] Float32,
            Write scales[t] Float32, Update totals[2 * REPORT_WORDS] Int32, Write report[REPORT_WORDS] Float32
        ]
    }
}

/// Writes the gradients of the teacher's tokens and of the targets to their columns of one tile. All other columns keep their contents.
#[derive(Clone, Copy, Debug)]
pub struct TeacherGrad {
    /// Gradients of the logits, `[rows, pitch]`, of which the first `cols` columns count.
    pub logits: DeviceSlice,
    /// Elements between the beginnings of two rows of `logits`.
    pub pitch: usize,
    /// int32 `[rows]`. Rows with a negative target keep their contents.
    pub targets: DeviceSlice,
    /// See [`TeacherStats::teacher`].
    pub teacher: DeviceSlice,
    /// Gradients: see [`TeacherLosses::entries`].
    pub entries: DeviceSlice,
    /// Most tokens of the teacher for each row.
    pub top_k: usize,
    /// Token of the first column.
    pub vocab_start: usize,
    /// Columns of the tile.
    pub cols: usize,
}

impl Kernel for TeacherGrad {
    const NAME: &'static str = "teacher_grad";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (t, k) = (self.targets.elems(), self.top_k);
        operands![self;
            Update logits[t * self.pitch];
            Read targets[t] Int32, Read teacher[t * k * ENTRY_WORDS] Int32, Read entries[t * (k + 1)] Float32
        ]
    }

    fn check_shape(&self) -> Result<()> {
        if self.pitch >= self.cols {
            return Ok(());
        }
        Err(refused(Self::NAME, format!("rows of {} columns that begin {} elements apart", self.cols, self.pitch)))
    }

    fn bytes(&self) -> f64 {
        (self.teacher.bytes() + self.entries.bytes()) as f64
    }
}
