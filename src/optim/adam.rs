//! AdamW: the scalar specification.

/// The constants of one AdamW step for one decay group, rounded once from f64 so that every device uses the same bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamConsts {
    /// `beta1`.
    pub beta1: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `1 - lr * weight_decay`.
    pub decay: f32,
    /// `-lr / (1 - beta1^t)`.
    pub neg_step_size: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub inv_sqrt_bias2: f32,
    /// `epsilon`.
    pub eps: f32,
}
