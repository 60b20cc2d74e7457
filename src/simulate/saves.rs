//! A save beside simulated steps: the engine and its coordinator run unchanged, and a simulated disk takes the state.

use super::random_tokens::RandomTokens;
use super::simulated_engine;
use super::timed::Steps;
use crate::checkpoint::{PIECE_BYTES, PIECES};
use crate::device::sim::{SimDevice, SimDisk};
use crate::engine::executor::Engine;
use crate::error::Result;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::request::choices::SaveMemory;
use crate::units::{Bytes, counted};
use serde::Serialize;
use std::fmt;

/// The saves of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SaveSchedule {
    /// Bytes that the disk takes in a second.
    pub(crate) bytes_per_s: f64,
    /// Steps between two saves.
    pub(crate) every: u64,
}

/// A save of a plan on a disk of a given rate.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SimulatedSave {
    /// Bytes of the state of all ranks.
    pub(crate) bytes: u64,
    /// Rate of the disk.
    pub(crate) disk_bytes_per_s: f64,
    /// Memory for copies of states that wait for the disk, in bytes.
    pub(crate) copy_bytes: u64,
    /// Time in which the disk writes the state.
    pub(crate) write_s: f64,
    /// Time by which the save prolongs training.
    pub(crate) wait_s: f64,
    /// Fraction of the training time that saves take.
    pub(crate) wait_share: f64,
    /// Steps between two saves.
    pub(crate) every: u64,
    /// Reason that training stops for the save.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stops: Option<String>,
}

/// Simulates a save of `plan`, after the warm-up steps and the timed steps of `steps`.
///
/// # Errors
/// Errors of [`simulate`](super::simulate).
pub(crate) fn simulate_save(
    (plan, shape): (&Plan, &ModelShape),
    name: &str,
    steps: Steps,
    SaveSchedule { bytes_per_s, every }: SaveSchedule,
) -> Result<SimulatedSave> {
    let bytes = plan.optimizer().arrays().bytes(plan.trained_params()) as u64;
    let stops = match plan.site.save_memory {
        SaveMemory::Off => Some("--save-memory off".into()),
        _ => plan.save_obstacle(),
    };
    let (mut engine, disk) = simulated_engine(plan.clone(), shape, name, 0)?;
    let mut tokens = RandomTokens::new(0, shape.vocab);
    steps.warm_up(&mut engine, &mut tokens)?;
    let step_s = steps.time(&mut engine, &mut tokens, &mut |_| ())?.median_ms() / 1e3;
    let write_s = bytes as f64 / bytes_per_s;
    let wait_s = match stops {
        Some(_) => write_s,
        None => wait_s((engine, &disk), (steps, tokens), step_s, bytes_per_s / plan.site.ranks as f64)?,
    };
    let (wait_share, copy_bytes) = (wait_s / (wait_s + every as f64 * step_s), plan.save_copy_bytes());
    Ok(SimulatedSave { bytes, disk_bytes_per_s: bytes_per_s, copy_bytes, write_s, wait_s, wait_share, every, stops })
}

/// Seconds by which a save prolongs the steps beside it, which take `step_s` alone. The disk takes `bytes_per_s` of the state of one rank.
fn wait_s(
    (mut engine, disk): (Engine<SimDevice>, &SimDisk),
    (steps, mut tokens): (Steps, RandomTokens),
    step_s: f64,
    bytes_per_s: f64,
) -> Result<f64> {
    let start_ns = engine.now_ns();
    for mut reader in engine.begin_simulated_save()? {
        disk.write(bytes_per_s, PIECES, move || reader.next_piece(PIECE_BYTES));
    }
    let mut beside = 0;
    while engine.may_wait_for_save() {
        beside += 1;
        steps.step(&mut engine, &mut tokens, steps.warmup + steps.timed + beside)?;
    }
    let took_s = (engine.now_ns() - start_ns) as f64 / 1e9;
    Ok((took_s - beside as f64 * step_s).max(0.0))
}

impl fmt::Display for SimulatedSave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, rate) = (Bytes(self.bytes), Bytes(self.disk_bytes_per_s as u64));
        write!(f, "{bytes} in {:.1} s at {rate} a second", self.write_s)?;
        let share = format!("{:.1} % of the time with a save every {}", self.wait_share * 1e2, counted(self.every, "step"));
        match &self.stops {
            Some(why) => write!(f, ", while training stops: {why}; {share}"),
            None => write!(f, " beside steps, which wait {:.1} s with {} for copies; {share}", self.wait_s, Bytes(self.copy_bytes)),
        }
    }
}
