//! What a run says about itself, one JSON object a step, and the memory behind it.

use crate::config::plan::Plan;
use crate::engine::coordinator::Counts;
use crate::error::{Error, Result};
use crate::hardware::parse::meminfo_bytes;
use crate::planner::machine::Place;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Bytes by class.
#[derive(Clone, Debug, serde::Serialize)]
pub struct MemoryUse {
    /// Planned on the device, by class.
    pub device_bytes: BTreeMap<&'static str, u64>,
    /// Planned in pinned host memory, by class.
    pub host_bytes: BTreeMap<&'static str, u64>,
    /// Resident set of the process, as the kernel counts it; 0 when it does not say.
    pub rss_bytes: u64,
}

impl MemoryUse {
    /// What `plan` gives each class, and the process's resident set now.
    pub fn of(plan: &Plan) -> Self {
        let at = |place| plan.memory.iter().filter(|m| m.place == place).map(|m| (m.name, m.bytes as u64)).collect();
        Self { device_bytes: at(Place::Device), host_bytes: at(Place::Host), rss_bytes: rss_bytes() }
    }
}

/// One training step.
#[derive(Clone, Debug, serde::Serialize)]
pub struct StepMetrics {
    /// Training step, from 1; skipped ones count.
    pub step: u64,
    /// Passes over the data, with the fraction.
    pub epoch: f64,
    /// Mean loss over the step's tokens.
    pub loss: f32,
    /// Gradient norm before clipping; null when a gradient was not finite.
    pub grad_norm: Option<f64>,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Factor on the loss.
    pub loss_scale: f32,
    /// `commit`, `clip` or `skip`.
    pub verdict: &'static str,
    /// Wall time of the step.
    pub step_ms: f64,
    /// Real tokens (no padding) per second.
    pub tokens_per_second: f64,
    /// Model FLOPs, as [`FLOPS_FORMULA`](crate::model::shape::FLOPS_FORMULA) counts them, over wall time.
    pub model_tflops: f64,
    /// Bucket steps since the last line.
    #[serde(flatten)]
    pub counts: Counts,
    /// Compute was idle because the optimizer was not done.
    pub exposed_cpu_ms: f64,
    /// Compute was idle because a copy was not done.
    pub exposed_transfer_ms: f64,
    /// Memory by class.
    pub memory: MemoryUse,
}

/// `metrics.jsonl`, one line a step.
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    line: Vec<u8>,
}

impl MetricsFile {
    /// Opens `path` to go on after `step`: later lines, which a resumed run will write again, are dropped.
    ///
    /// # Errors
    /// `Io` when the file cannot be read or written.
    pub fn open(path: &Path, step: u64) -> Result<Self> {
        let kept = match std::fs::read_to_string(path) {
            Ok(text) => text.lines().filter(|line| step_of(line).is_some_and(|s| s <= step)).map(|l| format!("{l}\n")).collect(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(Error::io("read", path, e)),
        };
        // Renamed into place: a run that dies here must not take the earlier steps with it.
        let beside = path.with_extension("jsonl.tmp");
        let open = || -> std::io::Result<File> {
            let mut file = File::create(&beside)?;
            file.write_all(kept.as_bytes())?;
            std::fs::rename(&beside, path)?;
            Ok(file)
        };
        let file = open().map_err(|e| Error::io("write", path, e))?;
        Ok(Self { path: path.to_path_buf(), file, line: Vec::with_capacity(1024) })
    }

    /// Appends one line.
    ///
    /// # Errors
    /// `Io` when it cannot be written.
    pub fn write(&mut self, metrics: &StepMetrics) -> Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, metrics).map_err(|e| Error::format(&self.path, e))?;
        self.line.push(b'\n');
        self.file.write_all(&self.line).map_err(|e| Error::io("write", &self.path, e))
    }
}

fn step_of(line: &str) -> Option<u64> {
    serde_json::from_str::<serde_json::Value>(line).ok()?.get("step")?.as_u64()
}

/// Resident set of this process in bytes; 0 when the kernel does not say.
pub fn rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    meminfo_bytes(&status, "VmRSS").unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reopening_drops_the_lines_that_will_be_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4,\"lo").unwrap();
        MetricsFile::open(&path, 2).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":1}\n{\"step\":2}\n");
    }

    #[test]
    fn this_process_has_a_resident_set() {
        assert!(rss_bytes() > 1 << 20);
    }
}
