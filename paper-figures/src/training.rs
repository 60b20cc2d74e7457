//! A training run as lines: steps of its `metrics.jsonl`, and one for the whole with its settings, counts and digest.

use crate::error::{Error, Result};
use crate::lines;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Steps between those that are kept; one with a rollback always is.
const EVERY: u64 = 10;
/// Fields of a step that are kept.
const FIELDS: [&str; 6] = ["step", "loss", "grad_norm", "verdict", "rolled_back", "step_ms"];

/// The lines of the run in `folder`, which printed `text`.
///
/// # Errors
/// When the run left no metrics, no checkpoint with its settings, or no digest.
pub fn lines(folder: &Path, text: &str) -> Result<Vec<Value>> {
    let wrong = |cause: &str| Error::Format { path: folder.into(), cause: cause.into() };
    let mut steps = lines::read(&folder.join("metrics.jsonl"))?;
    // The first line has facts of the run.
    steps.retain(|line| line.get("step").is_some());
    let last = steps.last().and_then(|line| line["step"].as_u64()).ok_or_else(|| wrong("no steps in metrics.jsonl"))?;
    let state = std::fs::read_to_string(folder.join(format!("checkpoint-{last}/trainer_state.json"))).unwrap_or_default();
    let state: Value =
        serde_json::from_str(&state).map_err(|error| wrong(&format!("trainer_state.json of the last checkpoint: {error}")))?;
    let settings = lines::field(&state, "manifest.trainer.settings");
    let settings = settings.ok_or_else(|| wrong("no settings in the last checkpoint"))?;
    let digest = text.lines().find_map(|line| line.strip_prefix("digest: ")).ok_or_else(|| wrong("no digest was printed"))?;
    let kept = steps.iter().filter(|line| line["step"].as_u64().is_some_and(|step| step % EVERY == 0) || has_rollback(line));
    let mut lines: Vec<_> = kept.map(|line| step(line, &settings["strategy"])).collect();
    lines.push(whole(&steps, settings, digest));
    Ok(lines)
}

fn has_rollback(line: &Value) -> bool {
    line["rolled_back"].as_u64() > Some(0)
}

fn step(line: &Value, strategy: &Value) -> Value {
    let mut kept = Map::from_iter([("bench".into(), "train step".into()), ("strategy".into(), strategy.clone())]);
    kept.extend(FIELDS.map(|name| (name.into(), line[name].clone())));
    Value::Object(kept)
}

fn whole(steps: &[Value], settings: &Value, digest: &str) -> Value {
    let is_clipped = |line: &&Value| line["verdict"] == "clip";
    let (rolled_back, others): (Vec<_>, Vec<_>) = steps.iter().partition(|line| has_rollback(line));
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    json!({
        "bench": "train",
        "unix_seconds": seconds,
        "machine": machine(),
        "settings": settings,
        "steps": steps.len(),
        "clipped_steps": steps.iter().filter(is_clipped).count(),
        "rolled_back_steps": rolled_back.len(),
        "rolled_back_share": rolled_back.len() as f64 / steps.len() as f64,
        "median_ms": median_ms(&others),
        "median_rolled_back_ms": median_ms(&rolled_back),
        "loss": {"first": steps[0]["loss"], "last": steps[steps.len() - 1]["loss"]},
        "digest": digest,
    })
}

fn median_ms(steps: &[&Value]) -> Option<f64> {
    let mut ms: Vec<_> = steps.iter().filter_map(|line| line["step_ms"].as_f64()).collect();
    ms.sort_by(f64::total_cmp);
    ms.get(ms.len() / 2).copied()
}

/// Name and number of the CPUs; a training run does not say.
fn machine() -> Value {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")).map(|rest| rest.trim_start_matches([' ', '\t', ':']));
    json!({"cpu": name, "cpus": std::thread::available_parallelism().map_or(0, usize::from)})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_every_tenth_step_and_every_rollback() {
        let dir = tempfile::tempdir().unwrap();
        let steps: String = (1..=20)
            .map(|step| {
                let rolled_back = u32::from(step == 3);
                let verdict = if step <= 4 { "clip" } else { "commit" };
                format!(
                    "{}\n",
                    json!({"step": step, "loss": 1.0, "verdict": verdict, "rolled_back": rolled_back, "step_ms": f64::from(step)})
                )
            })
            .collect::<String>();
        std::fs::write(dir.path().join("metrics.jsonl"), format!("{{\"facts\": {{}}}}\n{steps}")).unwrap();
        assert!(lines(dir.path(), "digest: ab\n").unwrap_err().to_string().contains("trainer_state.json of the last checkpoint"));
        std::fs::create_dir(dir.path().join("checkpoint-20")).unwrap();
        let state = "{\"manifest\":{\"trainer\":{\"settings\":{\"strategy\":\"superoffload\"}}},\n\"crc32c\":\"00\"}\n";
        std::fs::write(dir.path().join("checkpoint-20/trainer_state.json"), state).unwrap();
        let lines = lines(dir.path(), "done\ndigest: ab\n").unwrap();
        assert_eq!(lines.iter().filter_map(|line| line["step"].as_u64()).collect::<Vec<_>>(), [3, 10, 20]);
        let whole = &lines[3];
        assert_eq!((&whole["clipped_steps"], &whole["rolled_back_steps"], &whole["digest"]), (&4.into(), &1.into(), &"ab".into()));
        assert_eq!((&whole["median_ms"], &whole["median_rolled_back_ms"]), (&11.0.into(), &3.0.into()));
    }
}
