//! Quantities that must not be mixed up, as types; and how sizes are printed.

use std::fmt;

/// Sum of squares of a gradient. Not a norm: see [`Norm`].
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct NormSq(pub f64);

/// Euclidean norm of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Norm(pub f64);

impl NormSq {
    /// The root; `inv_loss_scale` undoes the loss scale, which multiplied every gradient.
    pub fn norm(self, inv_loss_scale: f32) -> Norm {
        Norm(self.0.sqrt() * f64::from(inv_loss_scale))
    }
}

/// Factor on every gradient of a step, at most 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipScale(pub f32);

impl Norm {
    /// `torch.nn.utils.clip_grad_norm_`'s factor: `max_norm / (norm + 1e-6)`, at most 1; `None` when it changes nothing.
    pub fn clip_scale(self, max_norm: f64) -> Option<ClipScale> {
        let scale = max_norm / (self.0 + 1e-6);
        (scale < 1.0).then_some(ClipScale(scale as f32))
    }
}

/// Prints a byte count with a binary unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", units[unit]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_is_torchs_and_never_enlarges() {
        assert_eq!(Norm(0.5).clip_scale(1.0), None);
        assert_eq!(Norm(4.0).clip_scale(1.0), Some(ClipScale((1.0 / 4.000001) as f32)));
        // Just under the threshold torch's epsilon still clips: 1 / (1 + 1e-6) < 1.
        assert!(Norm(1.0).clip_scale(1.0).is_some());
        assert_eq!(NormSq(9.0).norm(0.5), Norm(1.5));
    }

    #[test]
    fn bytes_print_with_one_decimal() {
        assert_eq!(Bytes(17).to_string(), "17 B");
        assert_eq!(Bytes(3 << 20).to_string(), "3.0 MiB");
    }
}
