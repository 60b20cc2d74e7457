//! Fraction of clipped steps in a benchmark. Speculation fails in clipped steps.

use serde::{Serialize, Serializer};
use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clip {
    /// None.
    Never,
    /// Every N-th step, the last of each group of N; 1 means every step.
    OneIn(NonZeroU64),
}

/// Thresholds above every norm of a finite gradient, and below every norm of a random model. 0 would turn clipping off.
const NEVER: f64 = 1e30;
const ALWAYS: f64 = 1e-2;

impl Clip {
    /// Whether `step`, counted from 1, is clipped.
    pub(crate) fn clips(self, step: u64) -> bool {
        match self {
            Self::Never => false,
            Self::OneIn(every) => step.is_multiple_of(every.get()),
        }
    }

    /// The gradient norm above which `step` is clipped.
    pub(crate) fn max_grad_norm(self, step: u64) -> f64 {
        if self.clips(step) { ALWAYS } else { NEVER }
    }
}

impl FromStr for Clip {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "never" => Ok(Self::Never),
            "always" => Ok(Self::OneIn(NonZeroU64::MIN)),
            _ => {
                let every = text.strip_prefix("every-").and_then(|number| number.parse().ok());
                every.map(Self::OneIn).ok_or_else(|| "expected never, always or every-N with N from 1".to_string())
            }
        }
    }
}

impl fmt::Display for Clip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => f.write_str("never"),
            Self::OneIn(NonZeroU64::MIN) => f.write_str("always"),
            Self::OneIn(every) => write!(f, "every-{every}"),
        }
    }
}

impl Serialize for Clip {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_names_the_clipped_steps() {
        let clipped = |text: &str| {
            let clip: Clip = text.parse().unwrap();
            assert_eq!(clip.to_string(), text);
            (1..=9).filter(|&step| clip.clips(step)).collect::<Vec<_>>()
        };
        assert!(clipped("never").is_empty());
        assert_eq!(clipped("always").len(), 9);
        assert_eq!(clipped("every-4"), [4, 8]);
        for text in ["every-0", "every-", "every--1", "sometimes", ""] {
            assert!(text.parse::<Clip>().is_err(), "{text}");
        }
    }
}
