//! Validation of manifests. A matching checksum proves that a manifest is unchanged, not that it is valid.

use super::format::{CHUNK_BYTES, Manifest, PARTS_VERSION, STATE, TrainerState, first_version, moments_of};
use super::state_parts::ELEMS_MAX;
use crate::engine::protocol::loss_scale;
use crate::model::weights::{COMPANION_BYTES_MAX, is_model_file_name};
use crate::optim::state_array::StateArrays;
use std::collections::HashSet;

/// More steps than any run has. Up to here a float64 counts exactly, and sums of a few such numbers fit an u64.
pub(crate) const STEPS_MAX: u64 = 1 << 53;
/// All files of `model/` together, which are held in memory.
const MODEL_BYTES_MAX: u64 = 4 << 30;

type Verified = Result<(), String>;

impl Manifest {
    /// Every claim that can be checked without the other files.
    pub(super) fn validate(&self) -> Verified {
        if self.format_version == 0 {
            return Err("format 0 does not exist".into());
        }
        let moments = moments_of(&self.run).ok_or_else(|| format!("moments in a format that is not known: {}", self.run["moments"]))?;
        if self.format_version < first_version(moments) {
            return Err(format!("moments in {moments}, which format {} does not have", self.format_version));
        }
        self.trainer.validate()?;
        self.validate_tensors(moments.arrays())?;
        self.validate_parts(moments.arrays())?;
        self.validate_files()
    }

    fn validate_tensors(&self, arrays: StateArrays) -> Verified {
        let mut names = HashSet::new();
        let mut end = 0;
        for t in &self.tensors {
            let elems = t.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64));
            if elems != Some(t.elems) || t.offset != end || !names.insert(&t.name) {
                return Err(format!("tensor {:?}: shape, size, offset or name is wrong", t.name));
            }
            let bytes = (t.elems <= ELEMS_MAX).then(|| arrays.bytes(t.elems as usize) as u64);
            end = bytes.and_then(|bytes| bytes.checked_add(end)).ok_or_else(|| format!("tensor {:?}: its size overflows", t.name))?;
        }
        let chunks = if self.parts.is_some() { 0 } else { self.state_bytes.div_ceil(CHUNK_BYTES as u64) };
        if end != self.state_bytes || chunks != self.state_crc32c.len() as u64 {
            return Err(format!("{STATE} of {} bytes does not hold tensors of {end}", self.state_bytes));
        }
        Ok(())
    }

    fn validate_parts(&self, arrays: StateArrays) -> Verified {
        let Some(parts) = &self.parts else {
            let version = self.format_version;
            return if version == PARTS_VERSION { Err(format!("format {version} without the parts of its state")) } else { Ok(()) };
        };
        if self.format_version < PARTS_VERSION {
            return Err(format!("parts of several processes, which format {} does not have", self.format_version));
        }
        parts.validate(&self.tensors.iter().map(|tensor| tensor.elems).collect::<Vec<_>>(), arrays)
    }

    fn validate_files(&self) -> Verified {
        let mut names = HashSet::new();
        let mut bytes_left = MODEL_BYTES_MAX;
        for file in &self.files {
            if !is_model_file_name(&file.name) || !names.insert(&file.name) {
                return Err(format!("file name {:?} is not allowed", file.name));
            }
            if file.bytes > COMPANION_BYTES_MAX.min(bytes_left) {
                let bytes = file.bytes;
                return Err(format!(
                    "file {:?} of {bytes} bytes: at most {COMPANION_BYTES_MAX}, {MODEL_BYTES_MAX} all together",
                    file.name
                ));
            }
            bytes_left -= file.bytes;
        }
        Ok(())
    }
}

impl TrainerState {
    fn validate(&self) -> Verified {
        let Self { step, optimizer_step, loss_scale, scheduler, .. } = self;
        if *step > STEPS_MAX || optimizer_step > step {
            return Err(format!("optimizer step {optimizer_step} at step {step}: must be at most the step, and at most {STEPS_MAX}"));
        }
        if !loss_scale::is_possible(loss_scale.scale, loss_scale.good_steps) {
            return Err(format!(
                "loss scale {:e} after {} good steps: no run can have this loss scale",
                loss_scale.scale, loss_scale.good_steps
            ));
        }
        if !(scheduler.base_lr.is_finite() && scheduler.base_lr >= 0.0) {
            return Err(format!("learning rate {:e}", scheduler.base_lr));
        }
        Ok(())
    }
}
