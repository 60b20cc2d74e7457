//! The JSON line of one `bench step`, and the table that a person reads.
//!
//! Rates are over wall time unless they say `busy`; G and T are powers of ten.

use crate::config::settings::Settings;
use crate::device::ProductAlgorithm;
use crate::error::{Error, Result};
use crate::facts::{BuildFacts, MachineFacts, ModelFacts, PlanFacts};
use crate::hardware::gpu::{GpuId, GpuSamples};
use crate::host::memory_report::MemoryReport;
use crate::host::perf::WorkerCounts;
use crate::metrics::MemoryUse;
use crate::simulate::clip::Clip;
use crate::simulate::outcome::Outcome;
use crate::simulate::random_tokens::LengthRange;
use crate::units::{Bytes, Count};
use serde::Serialize;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Everything that was asked for, found and measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StepRecord {
    /// `step`.
    pub bench: &'static str,
    /// When it ended.
    pub(crate) unix_seconds: u64,
    pub build: BuildFacts,
    pub machine: MachineFacts,
    /// The device, in words.
    pub device: String,
    /// The GPUs of all ranks; none on the cpu device.
    pub(crate) gpus: Vec<GpuId>,
    pub model: ModelFacts,
    /// Which steps were to be clipped; wins over `settings.max_grad_norm`.
    pub clip: Clip,
    /// Tokens of the documents in a row, least and most, where rows hold several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<LengthRange>,
    /// Steps before the clock.
    pub(crate) warmup: u64,
    pub steps: u64,
    pub settings: Settings,
    /// What the plan of a GPU rests on, in words.
    pub rates: Option<String>,
    pub plan: PlanFacts,
    /// Partition of cache and bandwidth that the optimizer has, in words.
    pub partition: String,
    /// Time to make random weights and send them.
    pub(crate) init_seconds: f64,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Of the state after the last step, as `train --digest` prints it, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<String>,
    /// The algorithms of the matrix products, where a library chose them.
    pub products: Vec<ProductAlgorithm>,
    /// Memory, planned and used.
    pub memory: MemoryPeaks,
    /// Pages and nodes of host memory.
    pub host_memory: MemoryReport,
    /// What was counted of the optimizer's threads while steps were timed.
    pub(crate) perf: WorkerCounts,
    /// The GPU while the steps were timed; `None` on the cpu device.
    pub gpu: Option<GpuSamples>,
    /// Why the GPU could not be watched.
    pub(crate) gpu_unwatched: Option<String>,
}

/// Memory, planned and used.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MemoryPeaks {
    /// Planned on the device, all classes together.
    pub(crate) device_planned_bytes: u64,
    /// Planned in host memory.
    pub(crate) host_planned_bytes: u64,
    /// Planned, by class, and the resident set at the end.
    #[serde(flatten)]
    pub(crate) classes: MemoryUse,
    /// Largest resident set of the process.
    pub(crate) rss_peak_bytes: Option<u64>,
    /// By how much the machine's available memory fell from before the engine to after the steps: page-locked memory
    /// does not all show in the resident set.
    pub(crate) available_drop_bytes: Option<u64>,
}

impl fmt::Display for StepRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = &self.memory;
        let each = if self.settings.gpus > 1 { format!("{} x ", self.settings.gpus) } else { String::new() };
        writeln!(f, "{} of {} parameters on {each}{}", self.model.config, Count(self.model.params), self.device)?;
        // A simulated step has none: the loss is a run's to tell.
        let loss = self.outcome.loss;
        writeln!(f, "{}; loss {:.4} -> {:.4}", self.outcome, loss.first, loss.last)?;
        let bytes = |bytes: Option<u64>| bytes.map_or("unknown".into(), |bytes| Bytes(bytes).to_string());
        write!(
            f,
            "  memory       planned {} on the device, {} on the host; available memory fell by {}",
            Bytes(memory.device_planned_bytes),
            Bytes(memory.host_planned_bytes),
            bytes(memory.available_drop_bytes)
        )?;
        write!(f, "\n  host memory  {}", self.host_memory)?;
        write!(f, "\n  counters     {}", self.perf)?;
        self.digest.iter().try_for_each(|digest| write!(f, "\n  digest       {digest}"))?;
        let Some(gpu) = self.gpu else { return Ok(()) };
        let mean = |value: Option<f64>, unit: &str| value.map_or("unknown".into(), |value| format!("{value:.0} {unit}"));
        write!(f, "\n  gpu          {}, {}, {} in use", mean(gpu.power_w, "W"), mean(gpu.sm_clock_mhz, "MHz"), bytes(gpu.memory_used_bytes))
    }
}

/// A file to which lines are appended. It is opened before anything is measured, so that nothing is measured in vain.
pub(crate) struct RecordFile {
    path: PathBuf,
    file: File,
}

impl RecordFile {
    /// Opens or creates `path`.
    ///
    /// # Errors
    /// `Io` when it cannot be written.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|e| Error::io("append to", path, e))?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    /// Appends `record` as a line of JSON.
    ///
    /// # Errors
    /// `Io` when it cannot be written.
    pub(crate) fn append(&mut self, record: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(record).map_err(|e| Error::format(&self.path, e))?;
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(|e| Error::io("append to", &self.path, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_appended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("steps.jsonl");
        for record in [vec![], vec![1]] {
            RecordFile::open(&path).unwrap().append(&record).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "[]\n[1]\n");
        assert!(RecordFile::open(dir.path()).is_err());
    }
}
