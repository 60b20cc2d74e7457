//! Routing of tokens to experts: choice of experts, order of rows by expert, dispatch and combination.

use super::grouped::check_experts;
use super::product::{MatmulLayout, MatmulShape};
use crate::device::kernel::{Kernel, Operand, operands, refused, rows};
use crate::device::slice::DeviceSlice;
use crate::error::Result;
use crate::hardware::rates::Rates;

/// `logits = x * weight^T (+ bias)` in fp32, whatever the format of the operands, because in a 16-bit format the logits of many experts
/// would tie.
#[derive(Clone, Copy, Debug)]
pub struct RouterLogits {
    /// `[T, channels]`
    pub x: DeviceSlice,
    /// `[experts, channels]`
    pub weight: DeviceSlice,
    /// `[experts]`
    pub bias: Option<DeviceSlice>,
    /// fp32 `[T, experts]`
    pub logits: DeviceSlice,
    pub channels: usize,
}

impl RouterLogits {
    /// Shape of the matrix product.
    pub(crate) fn product(&self) -> MatmulShape {
        let (m, n) = (rows(self.x, self.channels), rows(self.weight, self.channels));
        MatmulShape { layout: MatmulLayout::Nt, m, n, k: self.channels }
    }
}

impl Kernel for RouterLogits {
    const NAME: &'static str = "router_logits";

    fn operands(&self) -> impl AsRef<[Operand]> {
        let MatmulShape { m, n, k, .. } = self.product();
        operands![self; Read x[m * k], Read weight[n * k], Read bias[n], Write logits[m * n] Float32]
    }

    fn flops(&self) -> f64 {
        self.product().flops()
    }

    fn flops_per_s(&self, rates: &Rates) -> f64 {
        let MatmulShape { m, n, k, .. } = self.product();
        rates.matmul_flops(m.min(n).min(k))
    }
}

/// Rule for the choice and the weights of a token's experts. A softmax chooses the experts with the largest logits. Among equal ones the first
/// come first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterRule {
    /// The softmax of the chosen logits, which equals the softmax of all logits divided by its sum over the chosen ones.
    Chosen,
    /// The softmax of all logits, at the chosen ones.
    All,
    Sigmoid(SigmoidRule),
}

/// Each expert has a score, the sigmoid of its logit. A token takes the experts with the largest sums of score and correction, within the
/// groups of experts whose two largest such sums add up to most (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). The weights are the scores
/// without correction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SigmoidRule {
    /// Number of groups of consecutive experts.
    pub groups: usize,
    /// Groups that a token may choose from.
    pub top_groups: usize,
    /// Whether the scores are divided by their sum over the chosen experts.
    pub renormalised: bool,
    /// Factor on the weights.
    pub scale: f32,
}

impl SigmoidRule {
    /// Most groups: a lane of a warp finds the sum of each.
    pub(crate) const GROUPS_MAX: usize = 32;
    /// Added to the sum of scores by which weights are divided.
    pub(crate) const SUM_LEAST: f32 = 1e-20;

    /// The sigmoid at the choice's logit alone: a gate.
    pub(crate) const GATE: Self = Self { groups: 1, top_groups: 1, renormalised: false, scale: 1.0 };

    /// Experts of a group.
    pub(crate) fn group(&self, experts: usize) -> usize {
        experts / self.groups
    }

    /// Whether a token can choose `top_k` experts within its groups.
    pub fn allows(&self, experts: usize, top_k: usize) -> bool {
        let Self { groups, top_groups, .. } = *self;
        let divides = (1..=Self::GROUPS_MAX).contains(&groups) && experts.is_multiple_of(groups);
        let two_each = groups == 1 || self.group(experts) >= 2;
        divides && two_each && (1..=groups).contains(&top_groups) && top_k <= top_groups * self.group(experts)
    }
}

/// Sizes of a routing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteShape {
    pub tokens: usize,
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    pub rule: RouterRule,
}

impl RouteShape {
    /// Number of choices of all tokens, which is the number of rows that experts compute.
    pub fn rows(&self) -> usize {
        self.tokens * self.top_k
    }

    fn check(&self, kernel: &'static str) -> Result<()> {
        check_experts(kernel, self.experts)?;
        let Self { top_k, experts, rule, .. } = *self;
        let groups_fit = if let RouterRule::Sigmoid(rule) = rule { rule.allows(experts, top_k) } else { true };
        if (1..=experts).contains(&top_k) && groups_fit && i32::try_from(self.rows()).is_ok() {
            return Ok(());
        }
        Err(refused(kernel, format!("{self:?} makes no sense")))
    }
}

/// Chooses `top_k` experts for every token, the largest logit, or corrected score, first.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// fp32 `[T, experts]`
    pub logits: DeviceSlice,
    /// With [`RouterRule::Sigmoid`]: `[3, experts]`, whose columns add up to the correction of each expert.
    pub correction: Option<DeviceSlice>,
    /// int32 `[T, k]`
    pub experts: DeviceSlice,
    /// fp32 `[T, k]`
    pub weights: DeviceSlice,
    pub shape: RouteShape,
}

impl Kernel for Route {
    const NAME: &'static str = "route";

    fn check_shape(&self) -> Result<()> {
        if self.correction.is_some() && !matches!(self.shape.rule, RouterRule::Sigmoid(_)) {
            return Err(refused(Self::NAME, "a softmax has no correction".into()));
        }
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (n, rows) = (self.shape.tokens * self.shape.experts, self.shape.rows());
        operands![
            self;
            Read logits[n] Float32, Write experts[rows] Int32, Write weights[rows] Float32;
            Read correction[CORRECTION_PARTS * self.shape.experts],
        ]
    }
}

/// Parts of a correction: as many 16-bit floats hold every bit of a 32-bit one.
pub const CORRECTION_PARTS: usize = 3;

/// Orders the choices by expert, then by token, so that the rows of an expert are contiguous and in the order of their tokens.
#[derive(Clone, Copy, Debug)]
pub struct Segments {
    /// int32 `[T, k]`
    pub experts: DeviceSlice,
    /// Bounds of the experts' segments: int32 `[experts + 1]`.
    pub bounds: DeviceSlice,
    /// The row of each choice: int32 `[T, k]`.
    pub slots: DeviceSlice,
    /// Index `t * k + j` of the routing choice of each row: int32 `[rows]`.
    pub entries: DeviceSlice,
    pub shape: RouteShape,
}

impl Kernel for Segments {
    const NAME: &'static str = "segments";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let rows = self.shape.rows();
        operands![
            self;
            Read experts[rows] Int32, Write slots[rows] Int32, Write entries[rows] Int32;
            Write bounds[self.shape.experts + 1] Int32,
        ]
    }
}

/// `out[slots[t,j]] = x[t]`: one copy of a token for each of its choices.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch {
    /// `[T, cols]`
    pub x: DeviceSlice,
    /// int32 `[T, k]`, a permutation of the rows.
    pub slots: DeviceSlice,
    /// `[rows, cols]`
    pub out: DeviceSlice,
    pub cols: usize,
}

impl Kernel for Dispatch {
    const NAME: &'static str = "dispatch";

    fn check_shape(&self) -> Result<()> {
        check_slots(Self::NAME, self.slots, rows(self.x, self.cols))
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (rows, n) = (self.slots.elems(), rows(self.x, self.cols) * self.cols);
        operands![self; Read x[n], Write out[rows * self.cols]; Read slots[rows] Int32]
    }
}

/// Checks that the rows in `slots` divide evenly among the tokens.
fn check_slots(kernel: &'static str, slots: DeviceSlice, tokens: usize) -> Result<()> {
    let rows = slots.elems();
    if tokens > 0 && rows.is_multiple_of(tokens) {
        return Ok(());
    }
    Err(refused(kernel, format!("{rows} rows cannot be shared out among {tokens} tokens")))
}

/// `out[t] =` the sum over the choices `j` of token `t`, in ascending order, of `weights[t,j] * x[slots[t,j]]`, plus `base[t]`; rounded
/// once.
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    /// `[rows, cols]`
    pub x: DeviceSlice,
    /// int32 `[T, k]`
    pub slots: DeviceSlice,
    /// fp32 `[T, k]`; `None`: all are 1.
    pub weights: Option<DeviceSlice>,
    /// `[T, cols]`: the input of the residual connection.
    pub base: Option<DeviceSlice>,
    /// `[T, cols]`
    pub out: DeviceSlice,
    pub cols: usize,
}

impl Kernel for Combine {
    const NAME: &'static str = "combine";

    fn check_shape(&self) -> Result<()> {
        check_slots(Self::NAME, self.slots, rows(self.out, self.cols))
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (rows, n) = (self.slots.elems(), rows(self.out, self.cols) * self.cols);
        operands![
            self;
            Read x[rows * self.cols], Read base[n], Write out[n];
            Read slots[rows] Int32, Read weights[rows] Float32,
        ]
    }
}

/// The gradient of a router's logits, computed from the gradient of the weights.
#[derive(Clone, Copy, Debug)]
pub struct RouterBackward {
    /// fp32 `[T, experts]`
    pub logits: DeviceSlice,
    /// int32 `[T, k]`
    pub experts: DeviceSlice,
    /// fp32 `[T, k]`
    pub weights: DeviceSlice,
    /// int32 `[T, k]`
    pub slots: DeviceSlice,
    /// The gradient of each row's weight: fp32 `[rows]`.
    pub dweights: DeviceSlice,
    /// `[T, experts]`
    pub dlogits: DeviceSlice,
    pub shape: RouteShape,
}

impl Kernel for RouterBackward {
    const NAME: &'static str = "router_backward";

    fn check_shape(&self) -> Result<()> {
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (n, rows) = (self.shape.tokens * self.shape.experts, self.shape.rows());
        operands![
            self;
            Read logits[n] Float32, Read experts[rows] Int32, Read weights[rows] Float32, Read slots[rows] Int32,
            Read dweights[rows] Float32, Write dlogits[n],
        ]
    }
}

/// Adds the gradient of the balancing loss to a router's gradient. The loss, over all layers and tokens of a micro-batch, is
/// `experts * sum_e f_e P_e`, where `f_e` is the mean number of choices of expert `e` by a token and `P_e` is the mean softmax of expert
/// `e`. Only the softmax has a gradient.
#[derive(Clone, Copy, Debug)]
pub struct RouterBalance {
    /// fp32 `[T, experts]`
    pub logits: DeviceSlice,
    /// int32 `[T, k]`
    pub experts: DeviceSlice,
    /// Bounds of every layer, see [`Segments::bounds`], `stride` apart: int32.
    pub bounds: DeviceSlice,
    pub stride: usize,
    /// `[T, experts]`
    pub dlogits: DeviceSlice,
    /// Factor on `p_e (n_e - sum_j n_j p_j)`, where `n_e` counts the choices of all layers and `p` is a token's softmax.
    pub factor: f32,
    pub shape: RouteShape,
}

impl RouterBalance {
    pub(crate) fn layers(&self) -> usize {
        self.bounds.elems() / self.stride.max(1)
    }
}

impl Kernel for RouterBalance {
    const NAME: &'static str = "router_balance";

    fn check_shape(&self) -> Result<()> {
        if self.stride <= self.shape.experts {
            return Err(refused(Self::NAME, format!("bounds of {} experts every {}", self.shape.experts, self.stride)));
        }
        self.shape.check(Self::NAME)
    }

    fn operands(&self) -> impl AsRef<[Operand]> {
        let (n, bounds) = (self.shape.tokens * self.shape.experts, self.layers() * self.stride);
        operands![
            self;
            Read logits[n] Float32, Read experts[self.shape.rows()] Int32, Read bounds[bounds] Int32, Update dlogits[n],
        ]
    }
}
