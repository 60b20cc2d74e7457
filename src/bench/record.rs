//! The JSON line of one `bench step`, and the table printed for people.
//!
//! Rates are over wall time unless their name contains `busy`. G and T are powers of ten.

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
use crate::simulate::random_tokens::RandomData;
use crate::units::{Bytes, Count};
use serde::Serialize;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options, machine, plan and results of one `bench step`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StepRecord {
    /// `step`.
    pub bench: &'static str,
    /// When the run ended.
    pub(crate) unix_seconds: u64,
    pub build: BuildFacts,
    pub machine: MachineFacts,
    /// Description of the device.
    pub device: String,
    /// The GPUs of all ranks; none on the cpu device.
    pub(crate) gpus: Vec<GpuId>,
    pub model: ModelFacts,
    /// The steps that were to be clipped; overrides `settings.max_grad_norm`.
    pub clip: Clip,
    /// The tokens of the steps, where they are not uniform, not in rows of a single document, or not all trained.
    #[serde(flatten)]
    pub data: RandomData,
    /// Warm-up steps, which are not timed.
    pub(crate) warmup: u64,
    pub steps: u64,
    pub settings: Settings,
    /// Description of the measured rates that the plan of a GPU is based on.
    pub rates: Option<String>,
    pub plan: PlanFacts,
    /// Description of the cache and bandwidth partition of the optimizer.
    pub partition: String,
    /// Time to make random weights and send them.
    pub(crate) init_seconds: f64,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Digest of the state after the last step, as `train --digest` prints it; only with `--digest`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<String>,
    /// Algorithms of the matrix products that a library chose.
    pub products: Vec<ProductAlgorithm>,
    /// Memory, planned and used.
    pub memory: MemoryPeaks,
    /// Pages and nodes of host memory.
    pub host_memory: MemoryReport,
    /// Performance counters of the optimizer's threads during the timed steps.
    pub(crate) perf: WorkerCounts,
    /// Samples of the GPU during the timed steps; `None` on the cpu device.
    pub gpu: Option<GpuSamples>,
    /// Why the GPU could not be sampled.
    pub(crate) gpu_unwatched: Option<String>,
}

/// Memory, planned and used.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MemoryPeaks {
    /// Planned on the device, the sum of all classes.
    pub(crate) device_planned_bytes: u64,
    /// Planned in host memory.
    pub(crate) host_planned_bytes: u64,
    /// Planned memory by class, and the resident set at the end.
    #[serde(flatten)]
    pub(crate) classes: MemoryUse,
    /// Largest resident set of the process.
    pub(crate) rss_peak_bytes: Option<u64>,
    /// Decrease of the machine's available memory between the start of the engine and the end of the steps. Page-locked memory is only
    /// partly counted in the resident set.
    pub(crate) available_drop_bytes: Option<u64>,
}

impl fmt::Display for StepRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = &self.memory;
        let each = if self.settings.gpus > 1 { format!("{} x ", self.settings.gpus) } else { String::new() };
        writeln!(f, "{} of {} parameters on {each}{}", self.model.config, Count(self.model.params), self.device)?;
        // Printed here and not in `Outcome`: a simulated step has no loss.
        let loss = self.outcome.loss;
        writeln!(f, "{}; loss {:.4} -> {:.4}", self.outcome, loss.first, loss.last)?;
        if let Some(load) = self.outcome.expert_load {
            let unused = 100.0 * load.unused_fraction;
            writeln!(f, "  experts      most rows {:.2} times the mean of a layer, {unused:.1} % without a row", load.largest_over_mean)?;
        }
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

/// A file to which lines are appended. It is opened before the measurement, so that an unwritable file fails at once.
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
