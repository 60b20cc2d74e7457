//! What the gradient norm says about a step, and whether speculating on the next one pays.

use crate::units::{ClipScale, Norm};

/// The outcome of validation (paper 4.4), known once all gradients of the step exist.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// The gradients are used as they are.
    Commit,
    /// The norm exceeds the limit: every gradient is multiplied.
    Clip(ClipScale),
    /// A gradient is infinite or NaN: the step does not happen.
    SkipNonFinite,
}

impl Verdict {
    /// `max_norm` 0 turns clipping off, as in Hugging Face's TrainingArguments.
    pub fn new(norm: Norm, nonfinite: bool, max_norm: f64) -> Self {
        // A sum of squares that overflows is a gradient that no step should use.
        if nonfinite || !norm.0.is_finite() {
            return Self::SkipNonFinite;
        }
        match norm.clip_scale(max_norm) {
            Some(scale) if max_norm > 0.0 => Self::Clip(scale),
            _ => Self::Commit,
        }
    }
}

/// Decides whether to speculate, from the last verdicts alone: a failed speculation costs an optimizer pass, a step that
/// waits for its verdict costs the overlap with backward. Part of the checkpoint, so that a resumed run decides alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SpeculationHistory {
    /// The last verdicts, newest in bit 0; 1: a speculation would have failed.
    failures: u32,
}

/// Verdicts that count.
const WINDOW: u32 = 16;
/// Failures in the window from which on speculation stops paying: a redo costs about as much as the overlap wins.
const FAILURES_MAX: u32 = 4;

impl SpeculationHistory {
    pub fn record(&mut self, verdict: Verdict) {
        self.failures = (self.failures << 1 | u32::from(verdict != Verdict::Commit)) & ((1 << WINDOW) - 1);
    }

    /// Whether these are verdicts of the window alone: what a run can have recorded.
    pub(crate) fn is_possible(self) -> bool {
        self.failures >> WINDOW == 0
    }

    /// As a number, for other ranks.
    pub(super) fn bits(self) -> u64 {
        u64::from(self.failures)
    }

    /// The verdicts of that number.
    pub(super) fn of(bits: u64) -> Self {
        Self { failures: bits as u32 }
    }

    /// Whether failures are rare enough.
    pub fn pays(self) -> bool {
        self.failures.count_ones() < FAILURES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        assert_eq!(Verdict::new(Norm(0.5), false, 1.0), Verdict::Commit);
        assert!(matches!(Verdict::new(Norm(2.0), false, 1.0), Verdict::Clip(s) if s.0 == (1.0 / 2.000001f64) as f32));
        assert_eq!(Verdict::new(Norm(2.0), false, 0.0), Verdict::Commit, "0 turns clipping off");
        assert_eq!(Verdict::new(Norm(0.5), true, 1.0), Verdict::SkipNonFinite);
        assert_eq!(Verdict::new(Norm(f64::INFINITY), false, 0.0), Verdict::SkipNonFinite);
        assert_eq!(Verdict::new(Norm(f64::NAN), false, 0.0), Verdict::SkipNonFinite);
    }

    #[test]
    fn speculation_stops_when_clips_are_frequent_and_starts_again() {
        let mut history = SpeculationHistory::default();
        assert!(history.pays());
        (0..4).for_each(|_| history.record(Verdict::Clip(ClipScale(0.5))));
        assert!(!history.pays());
        (0..13).for_each(|_| history.record(Verdict::Commit));
        assert!(history.pays());
    }
}
