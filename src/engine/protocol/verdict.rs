//! The verdict that follows from a step's gradient norm, and the decision whether to speculate on the next step.

use crate::optim::clip::{ClipMemory, ClipRule};
use crate::units::{ClipScale, Norm};

/// The outcome of validation (paper 4.4), known after all gradients of the step are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// The gradients are used unchanged.
    Commit,
    /// The norm exceeds the threshold: every gradient is scaled.
    Clip(ClipScale),
    /// A gradient is infinite or NaN: the step is skipped.
    SkipNonFinite,
}

impl Verdict {
    /// Decides the verdict. `rule` clips, and keeps its values in `memory`.
    pub fn new(norm: Norm, nonfinite: bool, rule: ClipRule, memory: &mut ClipMemory) -> Self {
        // If the sum of squares overflows, no step should use the gradients.
        if nonfinite || !norm.0.is_finite() {
            return Self::SkipNonFinite;
        }
        rule.scale(norm, memory).map_or(Self::Commit, Self::Clip)
    }
}

/// Decides whether to speculate, from the last verdicts only. A failed speculation costs an optimizer pass; a step that waits for its
/// verdict loses the overlap with backward. It is part of the checkpoint, so that a resumed run decides the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SpeculationHistory {
    /// The last verdicts, newest in bit 0. A set bit means that a speculation would have failed.
    failures: u32,
}

/// Number of verdicts considered.
const WINDOW: u32 = 16;
/// Number of failures in the window at which speculation stops: a redo costs about as much as the overlap gains.
const FAILURES_MAX: u32 = 4;

impl SpeculationHistory {
    pub fn record(&mut self, verdict: Verdict) {
        self.failures = (self.failures << 1 | u32::from(verdict != Verdict::Commit)) & ((1 << WINDOW) - 1);
    }

    /// Whether only bits of the window are set, as in any recorded history.
    pub(crate) fn is_possible(self) -> bool {
        self.failures >> WINDOW == 0
    }

    /// The history as a number, for other ranks.
    pub(in crate::engine) fn bits(self) -> u64 {
        u64::from(self.failures)
    }

    /// The history of that number.
    pub(in crate::engine) fn of(bits: u64) -> Self {
        Self { failures: bits as u32 }
    }

    /// Whether failures are rare enough to speculate.
    pub fn pays(self) -> bool {
        self.failures.count_ones() < FAILURES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        let verdict = |norm: f64, nonfinite, max_norm| {
            Verdict::new(Norm(norm), nonfinite, ClipRule::GlobalNorm { max_norm }, &mut ClipMemory::default())
        };
        assert_eq!(verdict(0.5, false, 1.0), Verdict::Commit);
        assert!(matches!(verdict(2.0, false, 1.0), Verdict::Clip(s) if s.0 == (1.0 / 2.000001f64) as f32));
        assert_eq!(verdict(2.0, false, 0.0), Verdict::Commit, "0 turns clipping off");
        assert_eq!(verdict(0.5, true, 1.0), Verdict::SkipNonFinite);
        assert_eq!(verdict(f64::INFINITY, false, 0.0), Verdict::SkipNonFinite);
        assert_eq!(verdict(f64::NAN, false, 0.0), Verdict::SkipNonFinite);
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
