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
    let bytes = plan.optimizer().arrays().bytes(plan.trained_params()) as u64;
    if bytes < MEASURED_BYTES || extent.saves(settings.save_steps) < 2 {
        return Ok(String::new());
    }
    let limit = settings.save_rate.map_or(f64::INFINITY, |limit| limit.0 as f64);
    let rate = disk_rate(run_dir.dir(), WRITERS)?.min(limit);
    let stops = plan.site.save_memory == SaveMemory::Off || plan.save_obstacle().is_some();
    let disk = SaveDisk { rate, processes: plan.site.processes };
    Ok(format!("; {}", save_time(bytes, disk, (!stops).then(|| (plan.save_copy_bytes(), plan.copied_first_s())))))
}

/// The shortest pause of training that is announced, in seconds.
const ANNOUNCED_S: f64 = 0.05;

/// The disk of a run's directory.
struct SaveDisk {
    /// Bytes a second, as process 0 measured them alone.
    rate: f64,
    /// Processes that write their parts of a save at the same time.
    processes: usize,
}

/// The time of a save of `bytes`, over all processes, on `disk`. With `copies`, steps wait for the seconds in which states
/// leave the device from their own memory, and until the disk has taken the bytes that copies have no memory for; without `copies` it waits for the whole
/// save.
fn save_time(bytes: u64, disk: SaveDisk, copies: Option<(u64, f64)>) -> String {
    let SaveDisk { rate, processes } = disk;
    let seconds = |bytes: u64| format!("{:.1} s", bytes as f64 / rate);
    let shared = if processes > 1 { format!(", if {processes} processes share this disk") } else { String::new() };
    let save = format!("a save takes about {} at {} a second{shared}", seconds(bytes), Bytes(rate as u64));
    let Some((copied, copied_first_s)) = copies else { return format!("{save} and stops training") };
    let rest = bytes.saturating_sub(copied);
    let first =
        (copied_first_s >= ANNOUNCED_S).then(|| format!("{copied_first_s:.1} s less the time of a step for states to leave the GPU"));
    let rest = (rest > 0).then(|| format!("{} less the time of a step for the disk", seconds(rest)));
    let waits: Vec<_> = first.into_iter().chain(rest).collect();
    if waits.is_empty() { format!("{save}, beside steps") } else { format!("{save}, beside steps, which wait {}", waits.join(" and ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_save_and_of_the_wait_for_it_are_announced() {
        let disk = |processes| SaveDisk { rate: (1u64 << 30) as f64, processes };
        let time = |copies: Option<u64>| save_time(20 << 30, disk(1), copies.map(|bytes| (bytes, 0.01)));
        let save = "a save takes about 20.0 s at 1.0 GiB a second";
        assert_eq!(time(None), format!("{save} and stops training"));
        assert_eq!(time(Some(15 << 30)), format!("{save}, beside steps, which wait 5.0 s less the time of a step for the disk"));
        assert_eq!(time(Some(25 << 30)), format!("{save}, beside steps"));
        assert_eq!(
            save_time(20 << 30, disk(2), Some((25 << 30, 0.01))),
            "a save takes about 20.0 s at 1.0 GiB a second, if 2 processes share this disk, beside steps"
        );
        let leaving = |copies| save_time(20 << 30, disk(1), Some((copies, 1.12)));
        assert_eq!(
            leaving(20 << 30),
            format!("{save}, beside steps, which wait 1.1 s less the time of a step for states to leave the GPU")
        );
        assert!(leaving(15 << 30).ends_with(
            "which wait 1.1 s less the time of a step for states to leave the GPU and 5.0 s less the time of a step for the disk"
        ));
    }
}
