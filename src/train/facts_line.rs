//! The first line of `metrics.jsonl`: facts common to all steps. A resumed run writes another one before its lines.

use crate::config::settings::Settings;
use crate::facts::{BuildFacts, DataFacts, MachineFacts, ModelFacts, PlanFacts};
use crate::metrics::MemoryUse;
use crate::model::flops::flops_formula;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use serde::Serialize;
use serde_json::Value;
use std::time::{SystemTime, UNIX_EPOCH};

/// Entries of a setting that is a list; data may be very many files, and a line has a limit.
const ENTRIES_MAX: usize = 100;

#[derive(Serialize)]
pub(super) struct FactsLine {
    facts: StartFacts,
}

/// The facts of a run, written once.
#[derive(Serialize)]
struct StartFacts {
    /// Steps that were done before the lines that follow.
    from_step: u64,
    /// Steps of the whole run.
    max_steps: u64,
    /// FLOPs a second of large matrix products on all devices, by the profile of a GPU.
    matmul_flops: Option<f64>,
    /// Seconds since 1970.
    started: u64,
    build: BuildFacts,
    machine: MachineFacts,
    /// The device, in words.
    device: String,
    model: ModelFacts,
    /// The data, in words.
    data: String,
    data_counts: DataFacts,
    plan: PlanFacts,
    memory: MemoryUse,
    /// Of a step, on average over the data, without padding.
    tokens_per_step: f64,
    flops_per_step: f64,
    flops_formula: &'static str,
    settings: Value,
}

/// Facts that a session gets from its caller.
pub(super) struct RunDescription {
    pub(super) machine: MachineFacts,
    /// The device, the model's place and the data, in words.
    pub(super) device: String,
    pub(super) model: String,
    pub(super) data: String,
    pub(super) data_counts: DataFacts,
    pub(super) max_steps: u64,
    pub(super) matmul_flops: Option<f64>,
}

impl FactsLine {
    /// The facts of a run that continues after `from_step`, with the tokens and FLOPs of a step.
    pub(super) fn new(
        about: RunDescription,
        from_step: u64,
        settings: &Settings,
        plan: &Plan,
        shape: &ModelShape,
        (tokens_per_step, flops_per_step): (f64, f64),
    ) -> Self {
        let RunDescription { machine, device, model, data, data_counts, max_steps, matmul_flops } = about;
        let facts = StartFacts {
            from_step,
            max_steps,
            matmul_flops,
            started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            build: BuildFacts::this_program(),
            machine,
            device,
            model: ModelFacts::new(model, shape),
            data,
            data_counts,
            plan: PlanFacts::new(plan),
            memory: MemoryUse::of(plan),
            tokens_per_step,
            flops_per_step,
            flops_formula: flops_formula(shape, plan.recipe.numerics.head_rows),
            settings: shortened(settings),
        };
        Self { facts }
    }
}

/// The settings as JSON, of long lists the beginning.
fn shortened(settings: &Settings) -> Value {
    let mut settings = serde_json::to_value(settings).unwrap_or_default();
    let values = settings.as_object_mut().into_iter().flat_map(|settings| settings.values_mut());
    for list in values.filter_map(Value::as_array_mut) {
        list.truncate(ENTRIES_MAX);
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_shortened_and_nothing_else() {
        let data = (0..1000).map(|n| format!("{n}.txt").into()).collect();
        let settings = Settings { data, ..Settings::demo() };
        let (whole, short) = (serde_json::to_value(&settings).unwrap(), shortened(&settings));
        assert_eq!(short["data"].as_array().unwrap()[..], whole["data"].as_array().unwrap()[..ENTRIES_MAX]);
        let without = |mut value: Value| value.as_object_mut().unwrap().remove("data").map(|_| value);
        assert_eq!(without(short), without(whole));
    }
}
