//! Dynamic loss scaling for float16, like `torch.amp.GradScaler`; other formats keep a scale of 1.

use crate::dtype::Dtype;

/// The factor on the loss. It is always a power of two, so that scaling and unscaling a normal number is exact.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    scale: f32,
    good_steps: u32,
    dynamic: bool,
}

/// Steps without overflow after which the scale doubles.
const GROWTH_INTERVAL: u32 = 2000;
/// Largest scale.
const SCALE_MAX: f32 = 16_777_216.0;

/// Whether a run can have this scale after `good_steps` steps without overflow: a power of two from 1 to 2^24, with fewer steps than the
/// growth interval.
pub(crate) fn is_possible(scale: f32, good_steps: u64) -> bool {
    (1.0..=SCALE_MAX).contains(&scale)
        && (scale as u32).is_power_of_two()
        && scale.fract() == 0.0
        && good_steps < u64::from(GROWTH_INTERVAL)
}

impl LossScale {
    /// 2^16 and dynamic for float16, 1 and fixed otherwise.
    pub fn new(dtype: Dtype) -> Self {
        let dynamic = dtype == Dtype::Float16;
        Self { scale: if dynamic { 65536.0 } else { 1.0 }, good_steps: 0, dynamic }
    }

    pub fn scale(self) -> f32 {
        self.scale
    }

    /// The factor that undoes the scale; exact.
    pub fn inverse(self) -> f32 {
        1.0 / self.scale
    }

    /// Steps without overflow since the scale last changed.
    pub(crate) fn good_steps(self) -> u32 {
        self.good_steps
    }

    /// Restores the scale of a checkpoint, for which [`is_possible`] must hold. Formats without loss scaling keep 1.
    pub(crate) fn restore(&mut self, scale: f32, good_steps: u64) {
        if self.dynamic {
            (self.scale, self.good_steps) = (scale, good_steps as u32);
        }
    }

    /// Halves the scale after an overflow (not below 1), and doubles it after a growth interval without one (not above 2^24).
    pub fn update(&mut self, overflow: bool) {
        if !self.dynamic {
            return;
        }
        self.good_steps = if overflow { 0 } else { self.good_steps + 1 };
        if overflow {
            self.scale = (self.scale / 2.0).max(1.0);
        } else if self.good_steps == GROWTH_INTERVAL {
            self.scale = (self.scale * 2.0).min(SCALE_MAX);
            self.good_steps = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_scales_that_updates_reach_are_possible() {
        let mut s = LossScale::new(Dtype::Float16);
        for step in 0..60_000 {
            assert!(is_possible(s.scale(), u64::from(s.good_steps())), "{s:?}");
            s.update(step > 30_000 && step % 3 == 0);
        }
        for scale in [-1.0, 0.0, 1e-45, 0.5, 3.0, 1.5, 3e38, 33_554_432.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!is_possible(scale, 0), "{scale}");
        }
        assert!(is_possible(1.0, 1999) && !is_possible(1.0, 2000) && !is_possible(1.0, u64::MAX));
    }

    #[test]
    fn the_scale_halves_on_overflow_and_doubles_after_a_window() {
        let mut s = LossScale::new(Dtype::Float16);
        s.update(true);
        assert_eq!((s.scale(), s.inverse()), (32768.0, 1.0 / 32768.0));
        (0..GROWTH_INTERVAL).for_each(|_| s.update(false));
        assert_eq!(s.scale(), 65536.0);
        (0..40).for_each(|_| s.update(true));
        assert_eq!(s.scale(), 1.0);
        let mut fixed = LossScale::new(Dtype::Bfloat16);
        fixed.update(true);
        assert_eq!(fixed.scale(), 1.0);
    }
}
