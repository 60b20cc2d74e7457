//! Aggregates the lines of `metrics.jsonl` in one pass and in bounded memory.

use super::curve::StepCurve;
use crate::disk::Dir;
use crate::error::{Error, Result};
use crate::metrics::WrittenSample;
use crate::train::sinks::metrics_file::{METRICS, MetricsLine, read_line};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::BufReader;

/// A line of a step or an evaluation, of any version of the program. Missing fields are unknown.
#[derive(Deserialize, Default)]
#[serde(default)]
struct MetricsRecord {
    step: u64,
    epoch: Option<f64>,
    loss: Option<f64>,
    grad_norm: Option<f64>,
    learning_rate: Option<f64>,
    verdict: Option<String>,
    step_ms: Option<f64>,
    tokens_per_second: Option<f64>,
    model_tflops: Option<f64>,
    speculated: Option<u64>,
    rolled_back: Option<u64>,
    committed: Option<u64>,
    clipped: Option<u64>,
    skipped: Option<u64>,
    exposed_cpu_ms: Option<f64>,
    exposed_transfer_ms: Option<f64>,
    exposed_peer_ms: Option<f64>,
    save_wait_ms: Option<f64>,
    expert_largest_over_mean: Option<f64>,
    expert_unused_share: Option<f64>,
    rss_bytes: Option<u64>,
    /// Present in files of versions without a line of facts.
    memory: Option<MemoryRecord>,
    eval_loss: Option<f64>,
    eval_seconds: Option<f64>,
    samples: Vec<WrittenSample>,
}

/// A line with a run's facts.
#[derive(Deserialize)]
struct FactsRecord {
    facts: Value,
}

/// Bytes by memory class.
#[derive(Deserialize, Default, Debug)]
#[serde(default)]
pub(super) struct MemoryRecord {
    pub(super) device_bytes: BTreeMap<String, u64>,
    pub(super) host_bytes: BTreeMap<String, u64>,
    rss_bytes: Option<u64>,
}

/// Outcomes of bucket steps, in the order of [`History::bucket_steps`].
pub(super) const BUCKET_STEPS: [&str; 5] = ["speculated", "rolled back", "committed", "clipped", "skipped"];
/// Causes of waiting, in the order of [`History::exposed_ms`].
pub(super) const WAITS: [&str; 3] = ["the optimizer", "copies", "other ranks"];

/// Most evaluations whose sampled texts are kept.
const WRITTEN_MAX: usize = 6;

/// Counts of the training data.
#[derive(Deserialize, Debug)]
pub(super) struct DataRecord {
    pub(super) documents: u64,
    pub(super) tokens: u64,
    pub(super) trained_tokens: u64,
    pub(super) rows: u64,
    pub(super) row_tokens: u64,
    pub(super) padding: u64,
    pub(super) up_to: BTreeMap<u64, u64>,
    pub(super) packing: Option<String>,
}

/// Values of a run by step.
#[derive(Default, Debug)]
pub(super) struct HistoryCurves {
    pub(super) loss: StepCurve,
    pub(super) eval_loss: StepCurve,
    pub(super) grad_norm: StepCurve,
    pub(super) learning_rate: StepCurve,
    pub(super) tokens_per_second: StepCurve,
    pub(super) step_ms: StepCurve,
    pub(super) save_wait_ms: StepCurve,
    /// Totals after each step: trained tokens, and milliseconds in steps.
    pub(super) tokens_by_step: StepCurve,
    pub(super) ms_by_step: StepCurve,
    pub(super) expert_largest: StepCurve,
    pub(super) expert_unused: StepCurve,
    /// 1 at a clipped or skipped step, else NaN.
    pub(super) clips: StepCurve,
    pub(super) skips: StepCurve,
}

/// Aggregated metrics of a run.
#[derive(Default, Debug)]
pub(super) struct History {
    pub(super) curves: HistoryCurves,
    pub(super) steps: u64,
    pub(super) last_step: u64,
    pub(super) epoch: Option<f64>,
    pub(super) clipped_steps: u64,
    pub(super) skipped_steps: u64,
    /// Number of steps with a missing or non-finite loss.
    pub(super) steps_without_loss: u64,
    /// Loss of the first and of the last step; NaN if the file has none.
    pub(super) first_loss: f64,
    pub(super) last_loss: f64,
    pub(super) tokens: f64,
    pub(super) total_ms: f64,
    /// Model FLOPs of all steps, in 10^9.
    pub(super) gflop: f64,
    pub(super) exposed_ms: [f64; 3],
    pub(super) bucket_steps: [u64; 5],
    pub(super) evaluations: u64,
    pub(super) eval_seconds: f64,
    /// Sampled texts of the first evaluations and of the last one, with their steps.
    pub(super) written: Vec<(u64, Vec<WrittenSample>)>,
    /// Step and loss of the last and of the best evaluation.
    pub(super) last_eval: Option<(u64, f64)>,
    pub(super) best_eval: Option<(u64, f64)>,
    /// Planned memory, from the last line that has it.
    pub(super) memory: Option<MemoryRecord>,
    /// Resident set size, from the last step that has it.
    pub(super) rss_bytes: u64,
    /// The last line of facts; null if the file has none.
    pub(super) facts: Value,
    pub(super) damaged_lines: u64,
    /// Whether the last line is incomplete: the run is still writing it, or has died.
    pub(super) is_cut_short: bool,
}

impl History {
    /// Counts of the training data, if the file has them.
    pub(super) fn data(&self) -> Option<DataRecord> {
        DataRecord::deserialize(&self.facts["data_counts"]).ok()
    }

    /// Reads the metrics in `dir`; `None` if there are none.
    ///
    /// # Errors
    /// `Io` if the file cannot be read, `Format` if it is not a regular file.
    pub(super) fn read(dir: &Dir) -> Result<Option<Self>> {
        let Some(file) = dir.open_log(METRICS.pattern)? else { return Ok(None) };
        let (mut history, mut lines, mut line) = (Self::default(), BufReader::new(file), Vec::new());
        while let Some(read) = read_line(&mut lines, &mut line).map_err(|e| Error::io("read", dir.join(METRICS.pattern), e))? {
            match read {
                MetricsLine::Facts(_) => history.add_facts(&line),
                MetricsLine::CutShort => history.is_cut_short = true,
                MetricsLine::Damaged => history.damaged_lines += 1,
                MetricsLine::Step(_) => match serde_json::from_slice(&line) {
                    Ok(record) => history.add(record),
                    Err(_) => history.damaged_lines += 1,
                },
            }
        }
        Ok(Some(history))
    }

    fn add_facts(&mut self, line: &[u8]) {
        let Ok(FactsRecord { facts }) = serde_json::from_slice(line) else { return };
        self.memory = MemoryRecord::deserialize(&facts["memory"]).ok().or(self.memory.take());
        self.facts = facts;
    }

    fn add(&mut self, mut record: MetricsRecord) {
        self.add_written(record.step, std::mem::take(&mut record.samples));
        match record.eval_loss {
            Some(loss) => self.add_evaluation(record.step, loss, record.eval_seconds.unwrap_or(0.0)),
            // An evaluation with a non-finite loss still has its seconds.
            None if record.eval_seconds.is_some() => self.add_evaluation(record.step, f64::NAN, 0.0),
            None => self.add_step(record),
        }
    }

    fn add_written(&mut self, step: u64, samples: Vec<WrittenSample>) {
        if samples.is_empty() {
            return;
        }
        self.written.truncate(WRITTEN_MAX - 1);
        self.written.push((step, samples));
    }

    fn add_evaluation(&mut self, step: u64, loss: f64, seconds: f64) {
        self.curves.eval_loss.push(step as f64, loss);
        self.evaluations += 1;
        self.eval_seconds += seconds;
        self.last_eval = Some((step, loss));
        let is_best = self.best_eval.is_none_or(|(_, best)| loss < best || best.is_nan());
        self.best_eval = if is_best { self.last_eval } else { self.best_eval };
    }

    fn add_step(&mut self, record: MetricsRecord) {
        let (x, loss) = (record.step as f64, record.loss.unwrap_or(f64::NAN));
        let (step_ms, tokens_per_second) = (record.step_ms.unwrap_or(0.0), record.tokens_per_second.unwrap_or(0.0));
        if self.steps == 0 {
            self.first_loss = loss;
        }
        (self.steps, self.last_step, self.last_loss) = (self.steps + 1, record.step, loss);
        self.steps_without_loss += u64::from(!loss.is_finite());
        self.epoch = record.epoch.or(self.epoch);
        self.tokens += (tokens_per_second * step_ms / 1e3).round();
        self.total_ms += step_ms;
        self.gflop += record.model_tflops.unwrap_or(0.0) * step_ms;
        let waited = [record.exposed_cpu_ms, record.exposed_transfer_ms, record.exposed_peer_ms];
        for (sum, ms) in self.exposed_ms.iter_mut().zip(waited) {
            *sum += ms.unwrap_or(0.0);
        }
        let buckets = [record.speculated, record.rolled_back, record.committed, record.clipped, record.skipped];
        for (sum, count) in self.bucket_steps.iter_mut().zip(buckets) {
            *sum = sum.saturating_add(count.unwrap_or(0));
        }
        let rss_bytes = record.rss_bytes.or(record.memory.as_ref().and_then(|memory| memory.rss_bytes));
        self.rss_bytes = rss_bytes.unwrap_or(self.rss_bytes);
        self.memory = record.memory.or(self.memory.take());
        self.draw(x, loss, [record.grad_norm, record.learning_rate, record.tokens_per_second, record.step_ms]);
        self.curves.save_wait_ms.push(x, record.save_wait_ms.unwrap_or(f64::NAN));
        self.curves.tokens_by_step.push(x, self.tokens);
        self.curves.ms_by_step.push(x, self.total_ms);
        self.curves.expert_largest.push(x, record.expert_largest_over_mean.unwrap_or(f64::NAN));
        self.curves.expert_unused.push(x, record.expert_unused_share.map_or(f64::NAN, |fraction| 100.0 * fraction));
        self.mark(x, record.verdict.as_deref());
    }

    fn draw(&mut self, x: f64, loss: f64, others: [Option<f64>; 4]) {
        self.curves.loss.push(x, loss);
        let curves =
            [&mut self.curves.grad_norm, &mut self.curves.learning_rate, &mut self.curves.tokens_per_second, &mut self.curves.step_ms];
        for (curve, y) in curves.into_iter().zip(others) {
            curve.push(x, y.unwrap_or(f64::NAN));
        }
    }

    fn mark(&mut self, x: f64, verdict: Option<&str>) {
        let (is_clip, is_skip) = (verdict == Some("clip"), verdict == Some("skip"));
        self.clipped_steps += u64::from(is_clip);
        self.skipped_steps += u64::from(is_skip);
        self.curves.clips.push(x, if is_clip { 1.0 } else { f64::NAN });
        self.curves.skips.push(x, if is_skip { 1.0 } else { f64::NAN });
    }

    /// Milliseconds in which compute did not wait.
    pub(super) fn compute_ms(&self) -> f64 {
        (self.total_ms - self.exposed_ms.iter().sum::<f64>()).max(0.0)
    }

    /// Mean over all steps.
    pub(super) fn mean_tokens_per_second(&self) -> f64 {
        if self.total_ms > 0.0 { self.tokens / self.total_ms * 1e3 } else { f64::NAN }
    }

    /// Mean model TFLOP/s over all steps, and their fraction of the rate of large matrix products; `None` if the run's profile lacks that
    /// rate.
    pub(super) fn mean_tflops_and_fraction(&self) -> Option<(f64, f64)> {
        let (tflops, peak) = (self.gflop / self.total_ms, self.facts["matmul_flops"].as_f64()? / 1e12);
        Some((tflops, tflops / peak)).filter(|(_, fraction)| fraction.is_finite() && *fraction > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(text: &str) -> History {
        let tmp = tempfile::tempdir().unwrap();
        std::fs::write(tmp.path().join(METRICS.pattern), text).unwrap();
        History::read(&Dir::open(tmp.path()).unwrap()).unwrap().unwrap()
    }

    #[test]
    fn lines_add_up_and_damage_is_counted() {
        let step = |step: u64, verdict: &str| {
            format!(
                r#"{{"step":{step},"loss":{step}.5,"verdict":"{verdict}","step_ms":500.0,"tokens_per_second":64.0,"model_tflops":2.0,"exposed_cpu_ms":100.0,"clipped":3}}"#
            )
        };
        let eval = r#"{"step":2,"eval_loss":2.25,"eval_seconds":1.5}"#;
        let lines =
            [step(1, "commit"), "nonsense".into(), r#"{"step":9,"loss":"x"}"#.into(), step(2, "clip"), eval.into(), step(3, "skip")];
        let all = history(&(lines.join("\n") + "\n{\"step\":4,\"lo"));
        assert_eq!((all.steps, all.last_step, all.damaged_lines, all.is_cut_short), (3, 3, 2, true));
        assert_eq!((all.first_loss, all.last_loss, all.tokens, all.total_ms), (1.5, 3.5, 96.0, 1500.0));
        assert_eq!(all.gflop, 3000.0);
        assert_eq!((all.exposed_ms, all.compute_ms(), all.mean_tokens_per_second()), ([300.0, 0.0, 0.0], 1200.0, 64.0));
        assert_eq!((all.bucket_steps, all.clipped_steps, all.skipped_steps), ([0, 0, 0, 9, 0], 1, 1));
        assert_eq!((all.evaluations, all.last_eval, all.curves.clips.points().collect::<Vec<_>>()), (1, Some((2, 2.25)), vec![(2.0, 1.0)]));
    }

    #[test]
    fn loads_of_experts_are_drawn_where_a_line_has_them() {
        let all = history("{\"step\":1}\n{\"step\":2,\"expert_largest_over_mean\":2.5,\"expert_unused_share\":0.25}\n");
        let points = |curve: &StepCurve| curve.points().collect::<Vec<_>>();
        assert_eq!((points(&all.curves.expert_largest), points(&all.curves.expert_unused)), (vec![(2.0, 2.5)], vec![(2.0, 25.0)]));
    }

    #[test]
    fn waits_for_saves_are_drawn_where_a_line_has_them() {
        let all = history("{\"step\":1}\n{\"step\":2,\"save_wait_ms\":12.5}\n{\"step\":3,\"save_wait_ms\":0}\n");
        assert_eq!(all.curves.save_wait_ms.points().collect::<Vec<_>>(), [(2.0, 12.5), (3.0, 0.0)]);
    }

    #[test]
    fn facts_are_written_once_and_older_lines_have_memory_each() {
        let facts = r#"{"facts":{"from_step":0,"memory":{"device_bytes":{"weights":7}},"build":{"version":"9"}}}"#;
        let new = history(&format!("{facts}\n{{\"step\":1,\"loss\":1.0,\"rss_bytes\":5}}\n"));
        let old = history("{\"step\":1,\"loss\":1.0,\"memory\":{\"device_bytes\":{\"weights\":7},\"rss_bytes\":5}}\n");
        for history in [&new, &old] {
            assert_eq!((history.steps, history.damaged_lines, history.rss_bytes), (1, 0, 5));
            assert_eq!(history.memory.as_ref().unwrap().device_bytes["weights"], 7);
        }
        assert_eq!((&new.facts["build"]["version"], &old.facts), (&Value::from("9"), &Value::Null));
    }

    #[test]
    fn lines_of_other_versions_and_losses_that_are_no_numbers_are_steps() {
        let all = history("{\"step\":1}\n{\"step\":2,\"loss\":null,\"new\":[{}],\"grad_norm\":null}\n");
        assert_eq!((all.steps, all.steps_without_loss, all.curves.loss.range()), (2, 2, None));
        assert!(all.last_loss.is_nan() && all.mean_tokens_per_second().is_nan() && all.memory.is_none());
        assert_eq!(history("").steps, 0);
    }
}
