//! The time that the saves of a run take, measured before its first step.

use super::extent::RunExtent;
use super::run_dir::RunDir;
use crate::checkpoint::{WRITERS, disk_rate};
use crate::config::settings::Settings;
use crate::error::Result;
use crate::planner::plan::Plan;
use crate::request::choices::SaveMemory;
use crate::units::Bytes;

/// From this size on, a run measures the disk.
const MEASURED_BYTES: u64 = 1 << 30;

/// Measures the disk if a run under `plan` writes large checkpoints between steps of `extent`, and describes the time of a save: a part of
/// the line about files. Empty for all other runs.
///
/// # Errors
/// `Io` when the disk fails.
pub(super) fn describe_save_times(run_dir: &RunDir, settings: &Settings, plan: &Plan, extent: &RunExtent) -> Result<String> {
    let bytes = plan.optimizer().arrays().bytes(plan.params()) as u64;
    if bytes < MEASURED_BYTES || extent.saves(settings.save_steps) < 2 || plan.site.processes > 1 {
        return Ok(String::new());
    }
    let limit = settings.save_rate.map_or(f64::INFINITY, |limit| limit.0 as f64);
    let rate = disk_rate(run_dir.dir(), WRITERS)?.min(limit);
    let stops = plan.site.save_memory == SaveMemory::Off || plan.save_obstacle().is_some();
    Ok(format!("; {}", save_time(bytes, rate, (!stops).then(|| plan.save_copy_bytes()))))
}

/// The time of a save of `bytes` on a disk that takes `rate` bytes a second. With memory for `copies` training waits until the disk has
/// taken all other bytes; without `copies` it waits for the whole save.
fn save_time(bytes: u64, rate: f64, copies: Option<u64>) -> String {
    let seconds = |bytes: u64| format!("{:.1} s", bytes as f64 / rate);
    let save = format!("a save takes about {} at {} a second", seconds(bytes), Bytes(rate as u64));
    match copies.map(|copies| bytes.saturating_sub(copies)) {
        None => format!("{save} and stops training"),
        Some(0) => format!("{save}, beside steps"),
        Some(rest) => format!("{save}, beside steps, which wait {} less the time of a step", seconds(rest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_save_and_of_the_wait_for_it_are_announced() {
        let time = |copies| save_time(20 << 30, (1u64 << 30) as f64, copies);
        let save = "a save takes about 20.0 s at 1.0 GiB a second";
        assert_eq!(time(None), format!("{save} and stops training"));
        assert_eq!(time(Some(15 << 30)), format!("{save}, beside steps, which wait 5.0 s less the time of a step"));
        assert_eq!(time(Some(25 << 30)), format!("{save}, beside steps"));
    }
}
