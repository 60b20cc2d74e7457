//! Facts that every result line contains besides its numbers: time, program, machine and settings.

use serde::Serialize;
use serde_json::{Value, json};
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};
use superoffload::internals::facts::{BuildFacts, MachineFacts};
use superoffload::internals::hardware::Topology;
use superoffload::internals::optim::Isa;

/// Facts that all lines of a benchmark have in common.
pub struct Facts {
    common: Value,
    /// The machine.
    pub machine: MachineFacts,
}

impl Facts {
    /// Facts about this program on a machine with `topology`.
    ///
    /// # Panics
    /// If `settings` is not a JSON object.
    pub fn new(bench: &str, topology: &Topology, settings: impl Serialize) -> Self {
        let settings = json!(settings);
        assert!(settings.is_object(), "settings are names and values, not {settings}");
        let (build, machine) = (BuildFacts::this_program(), MachineFacts::new(topology));
        let best = Isa::detect().name();
        Self { common: json!({ "bench": bench, "build": build, "machine": machine, "best_isa": best, "settings": settings }), machine }
    }

    /// Returns a line with the current time, these facts and `fields`.
    pub fn line(&self, fields: Value) -> Value {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        join(join(self.common.clone(), json!({ "unix_seconds": seconds })), fields)
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpu = self.machine.cpu.as_deref().unwrap_or("unknown CPU");
        let cpus = self.machine.usable_cpus.map_or("unknown".into(), |cpus| cpus.to_string());
        write!(f, "{cpu}, {cpus} cpus, {}", Isa::detect())
    }
}

/// Merges two objects; `b` overrides `a`.
pub fn join(mut a: Value, b: Value) -> Value {
    if let (Some(to), Value::Object(from)) = (a.as_object_mut(), b) {
        to.extend(from);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_benchmark_machine_settings_and_time() {
        let facts = Facts::new("tea", &Topology::this_machine(), json!({ "cups": 3 }));
        let line = facts.line(json!({ "gb_s": 1.5 }));
        assert_eq!((&line["bench"], &line["settings"]["cups"], &line["gb_s"]), (&json!("tea"), &json!(3), &json!(1.5)));
        assert!(
            line["machine"]["kernel"].is_string() && line["build"]["version"].is_string() && line["unix_seconds"].as_u64() > Some(1 << 30)
        );
    }
}
