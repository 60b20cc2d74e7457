//! Rules that scale down the gradients of a step, and the values that a rule keeps from step to step.

use crate::units::{ClipScale, Norm};
use serde::{Deserialize, Serialize};

/// A rule for clipping. Every rank applies it to the same norms, so all ranks keep the same memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ClipRule {
    /// Scales gradients whose global norm exceeds `max_norm`; 0 turns clipping off, as in Hugging Face's TrainingArguments.
    GlobalNorm {
        /// Largest norm that is not clipped.
        max_norm: f64,
    },
}

impl ClipRule {
    /// The memory of a run that begins.
    pub fn memory(&self) -> ClipMemory {
        match self {
            Self::GlobalNorm { .. } => ClipMemory::default(),
        }
    }

    /// The factor on the gradients of a step with this finite norm; `None` if they are used unchanged. It is called once for each step
    /// that is not skipped, and may change the values of `memory`, but not their number.
    pub fn scale(&self, norm: Norm, _memory: &mut ClipMemory) -> Option<ClipScale> {
        match *self {
            Self::GlobalNorm { max_norm } => norm.clip_scale(max_norm).filter(|_| max_norm > 0.0),
        }
    }

    /// The memory with which a resumed run continues, if its checkpoint has the values `saved`. A checkpoint of a rule without memory has
    /// none.
    ///
    /// # Errors
    /// A message if the rule keeps another number of values, or a value is not finite.
    pub(crate) fn resumed(&self, saved: &ClipMemory) -> Result<ClipMemory, String> {
        let new = self.memory();
        match saved.0.iter().find(|value| !value.is_finite()) {
            Some(value) => Err(format!("clipping: {value} is not a value that a rule keeps")),
            None if saved.0.is_empty() => Ok(new),
            None if saved.0.len() == new.0.len() => Ok(saved.clone()),
            None => Err(format!("clipping: {} values, and the rule of this run keeps {}", saved.0.len(), new.0.len())),
        }
    }
}

/// Values that a rule keeps from step to step. They are part of the checkpoint, so that a resumed run clips as an uninterrupted run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClipMemory(Vec<f32>);

impl ClipMemory {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The values, for other ranks.
    pub(crate) fn values(&self) -> &[f32] {
        &self.0
    }

    /// The memory with values of another rank.
    pub(crate) fn of(values: Vec<f32>) -> Self {
        Self(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_resumes_with_the_memory_that_it_keeps_and_refuses_any_other() {
        let rule = ClipRule::GlobalNorm { max_norm: 1.0 };
        assert_eq!(rule.resumed(&ClipMemory::default()), Ok(ClipMemory::default()));
        let refused = |values: &[f32]| rule.resumed(&ClipMemory::of(values.to_vec())).unwrap_err();
        assert_eq!(refused(&[1.0, 2.0]), "clipping: 2 values, and the rule of this run keeps 0");
        assert_eq!(refused(&[f32::NAN]), "clipping: NaN is not a value that a rule keeps");
    }
}
