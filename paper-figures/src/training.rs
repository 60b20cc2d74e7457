//! A training run as lines: steps of its `metrics.jsonl`, and one line for the whole run with settings, counts and digest.

use crate::error::{Error, Result};
use crate::lines;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Interval of the steps that become lines. Steps with a rollback always become lines.
const EVERY: u64 = 10;
/// Fields of a step's line.
const FIELDS: [&str; 6] = ["step", "loss", "grad_norm", "verdict", "rolled_back", "step_ms"];
/// Fields of an evaluation's line. Every evaluation becomes a line.
const EVALUATED: [&str; 3] = ["step", "eval_loss", "eval_tokens"];
/// Settings that distinguish the steps of different runs.
const OF_RUN: [&str; 4] = ["strategy", "matmul_dtype", "moments", "seed"];

/// Returns the lines of the run in `folder` with the output `text`.
///
/// # Errors
/// An error if the run left no metrics, no checkpoint with settings, or no digest.
pub fn lines(folder: &Path, text: &str) -> Result<Vec<Value>> {
    let wrong = |cause: &str| Error::Format { path: folder.into(), cause: cause.into() };
    let (of_steps, facts): (Vec<_>, Vec<_>) =
        lines::read(&folder.join("metrics.jsonl"))?.iter().cloned().partition(|line| line.get("step").is_some());
    let facts = facts.first().map_or(&Value::Null, |line| &line["facts"]);
    let (evaluations, steps): (Vec<_>, Vec<_>) = of_steps.into_iter().partition(|line| line.get("eval_loss").is_some());
    let last = steps.last().and_then(|line| line["step"].as_u64()).ok_or_else(|| wrong("no steps in metrics.jsonl"))?;
    let state = std::fs::read_to_string(folder.join(format!("checkpoint-{last}/trainer_state.json"))).unwrap_or_default();
    let state: Value =
        serde_json::from_str(&state).map_err(|error| wrong(&format!("trainer_state.json of the last checkpoint: {error}")))?;
    let settings = lines::field(&state, "manifest.trainer.settings");
    let settings = settings.ok_or_else(|| wrong("no settings in the last checkpoint"))?;
    let digest = text.lines().find_map(|line| line.strip_prefix("digest: ")).ok_or_else(|| wrong("no digest was printed"))?;
    let kept = steps.iter().filter(|line| line["step"].as_u64().is_some_and(|step| step % EVERY == 0) || has_rollback(line));
    let steps_kept = kept.map(|line| of_run("train step", line, &FIELDS, settings));
    let evaluations_kept = evaluations.iter().map(|line| of_run("train evaluation", line, &EVALUATED, settings));
    let mut lines: Vec<_> = steps_kept.chain(evaluations_kept).collect();
    lines.push(whole(facts, (&steps, evaluations.last()), settings, digest));
    Ok(lines)
}

fn has_rollback(line: &Value) -> bool {
    line["rolled_back"].as_u64() > Some(0)
}

/// Selects `fields` of a line and adds the settings that identify the run.
fn of_run(bench: &str, line: &Value, fields: &[&str], settings: &Value) -> Value {
    let mut kept = Map::from_iter([("bench".into(), bench.into())]);
    kept.extend(OF_RUN.iter().filter_map(|name| Some(((*name).into(), settings.get(name)?.clone()))));
    kept.extend(fields.iter().map(|name| ((*name).into(), line[name].clone())));
    Value::Object(kept)
}

fn whole(facts: &Value, (steps, evaluated): (&[Value], Option<&Value>), settings: &Value, digest: &str) -> Value {
    let is_clipped = |line: &&Value| line["verdict"] == "clip";
    let (rolled_back, others): (Vec<_>, Vec<_>) = steps.iter().partition(|line| has_rollback(line));
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    json!({
        "bench": "train",
        "unix_seconds": seconds,
        "build": facts["build"],
        "machine": facts["machine"],
        "device": facts["device"],
        "settings": settings,
        "steps": steps.len(),
        "clipped_steps": steps.iter().filter(is_clipped).count(),
        "rolled_back_steps": rolled_back.len(),
        "rolled_back_share": rolled_back.len() as f64 / steps.len() as f64,
        "median_ms": median_ms(&others),
        "median_rolled_back_ms": median_ms(&rolled_back),
        "loss": {"first": steps[0]["loss"], "last": steps[steps.len() - 1]["loss"]},
        "eval_loss": evaluated.map(|line| &line["eval_loss"]),
        "digest": digest,
    })
}

fn median_ms(steps: &[&Value]) -> Option<f64> {
    let mut ms: Vec<_> = steps.iter().filter_map(|line| line["step_ms"].as_f64()).collect();
    ms.sort_by(f64::total_cmp);
    ms.get(ms.len() / 2).copied()
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
        let steps = format!("{steps}{}\n", json!({"step": 20, "eval_loss": 2.5, "eval_tokens": 8, "eval_seconds": 0.1}));
        std::fs::write(dir.path().join("metrics.jsonl"), format!("{{\"facts\": {{\"device\": \"cpu\"}}}}\n{steps}")).unwrap();
        assert!(lines(dir.path(), "digest: ab\n").unwrap_err().to_string().contains("trainer_state.json of the last checkpoint"));
        std::fs::create_dir(dir.path().join("checkpoint-20")).unwrap();
        let state = "{\"manifest\":{\"trainer\":{\"settings\":{\"strategy\":\"superoffload\"}}},\n\"crc32c\":\"00\"}\n";
        std::fs::write(dir.path().join("checkpoint-20/trainer_state.json"), state).unwrap();
        let lines = lines(dir.path(), "done\ndigest: ab\n").unwrap();
        assert_eq!(lines.iter().filter_map(|line| line["step"].as_u64()).collect::<Vec<_>>(), [3, 10, 20, 20]);
        let evaluation = json!({"bench": "train evaluation", "strategy": "superoffload", "step": 20, "eval_loss": 2.5, "eval_tokens": 8});
        assert_eq!(lines[3], evaluation);
        let whole = &lines[4];
        assert_eq!(whole["device"], "cpu");
        assert_eq!((&whole["loss"]["last"], &whole["eval_loss"]), (&1.0.into(), &2.5.into()));
        assert_eq!((&whole["clipped_steps"], &whole["rolled_back_steps"], &whole["digest"]), (&4.into(), &1.into(), &"ab".into()));
        assert_eq!((&whole["median_ms"], &whole["median_rolled_back_ms"]), (&11.0.into(), &3.0.into()));
    }
}
