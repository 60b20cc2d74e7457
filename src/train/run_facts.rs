//! The facts of a run before its first step, a line for each, and the line of a step.

use super::extent::ApproximateDuration;
use crate::metrics::StepMetrics;
use crate::simulate::outcome::of_a_large_product;
use std::fmt;
use std::time::Duration;

/// The facts of a run about to start, in words. Printed, each text is a line.
#[derive(Clone, Debug)]
pub struct RunFacts {
    /// Name, architecture, size and format of the model, and the checkpoint that the run resumes from.
    pub model: String,
    /// Counts of the data, and the passes over it.
    pub data: String,
    /// The work of a step, its predicted time and its bottleneck.
    pub plan: String,
    /// Planned and available memory.
    pub memory: String,
    /// The output directory, and the checkpoints to be written.
    pub files: String,
    /// The device.
    pub device: String,
    /// FLOPs a second of large matrix products on all devices, by the profile of a GPU.
    pub matmul_flops: Option<f64>,
    /// Steps already done.
    pub step: u64,
    /// Steps of the whole run.
    pub max_steps: u64,
    /// Steps between log lines.
    pub logging_steps: u64,
}

impl fmt::Display for RunFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, data, plan, memory, files, device, .. } = self;
        write!(f, "model   {model}\ndata    {data}\nplan    {plan}\nmemory  {memory}\nfiles   {files}\ndevice  {device}")
    }
}

impl RunFacts {
    /// The line of `step` in the log; `None` for most steps. The time left is that of the remaining steps at the mean pace of this run,
    /// whose steps took `elapsed` so far.
    pub fn log_line(&self, step: &StepMetrics, elapsed: Duration) -> Option<String> {
        let is_logged = step.step == 1 || step.step.is_multiple_of(self.logging_steps);
        is_logged.then(|| self.step_line(step, self.left(step.step, elapsed)))
    }

    /// The time of the steps after `step`; `None` after the last step.
    fn left(&self, step: u64, elapsed: Duration) -> Option<Duration> {
        let (done, left) = (step.checked_sub(self.step)?, self.max_steps.checked_sub(step)?);
        let seconds = elapsed.as_secs_f64() / done as f64 * left as f64;
        Duration::try_from_secs_f64(seconds).ok().filter(|_| left > 0)
    }

    fn step_line(&self, step: &StepMetrics, left: Option<Duration>) -> String {
        let StepMetrics { step: number, loss, grad_norm, learning_rate, tokens_per_second, model_tflops, .. } = step;
        let norm = grad_norm.map_or("non-finite".into(), |norm| format!("{norm:.3}"));
        let rate = if *learning_rate == 0.0 { "0".to_string() } else { format!("{learning_rate:.2e}") };
        let (digits, fraction) =
            (tflops_digits(*model_tflops), of_a_large_product(self.matmul_flops.map(|peak| model_tflops * 1e12 / peak)));
        let left = left.map_or(String::new(), |left| format!("  {} left", ApproximateDuration(left.as_secs_f64())));
        let mark = match step.verdict {
            "clip" => "  clipped",
            "skip" => "  skipped",
            _ => "",
        };
        format!(
            "step {number:>6}  loss {loss:.4}  grad_norm {norm}  lr {rate:<8}  {tokens_per_second:>6.0} tokens/s  \
             {model_tflops:.digits$} TFLOP/s{fraction}{left}{mark}"
        )
    }
}

/// Digits behind the point for four digits in all; at most four.
fn tflops_digits(tflops: f64) -> usize {
    match tflops {
        ..1.0 => 4,
        ..10.0 => 3,
        ..100.0 => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::protocol::coordinator::Counts;

    fn facts() -> RunFacts {
        let [model, data, plan, memory, files, device] = [const { String::new() }; 6];
        RunFacts { model, data, plan, memory, files, device, matmul_flops: None, step: 4, max_steps: 24, logging_steps: 10 }
    }

    fn step() -> StepMetrics {
        StepMetrics {
            step: 5,
            epoch: 0.5,
            loss: 2.5,
            grad_norm: Some(0.25),
            learning_rate: 0.0,
            loss_scale: 1.0,
            verdict: "commit",
            step_ms: 1.0,
            replan_ms: 0.0,
            save_wait_ms: 0.0,
            tokens_per_second: 5088.2,
            model_tflops: 0.122,
            counts: Counts::default(),
            exposed_cpu_ms: 0.0,
            exposed_transfer_ms: 0.0,
            exposed_peer_ms: 0.0,
            exposed_peer_rank: None,
            d2h_bytes: 0,
            h2d_bytes: 0,
            objective: None,
            expert_load: None,
            rss_bytes: 0,
        }
    }

    #[test]
    fn a_step_line_has_a_mark_only_where_the_step_was_clipped_or_skipped() {
        let (facts, half_minute) = (facts(), Some(Duration::from_secs(30)));
        let plain = facts.step_line(&step(), half_minute);
        assert_eq!(plain, "step      5  loss 2.5000  grad_norm 0.250  lr 0           5088 tokens/s  0.1220 TFLOP/s  30 s left");
        let clipped = StepMetrics { verdict: "clip", learning_rate: 3e-3, model_tflops: 541.26, ..step() };
        assert_eq!(
            facts.step_line(&clipped, None),
            "step      5  loss 2.5000  grad_norm 0.250  lr 3.00e-3     5088 tokens/s  541.3 TFLOP/s  clipped"
        );
        let skipped = facts.step_line(&StepMetrics { verdict: "skip", grad_norm: None, ..step() }, None);
        assert!(skipped.contains("grad_norm non-finite  ") && skipped.ends_with("TFLOP/s  skipped"), "{skipped}");
    }

    #[test]
    fn the_time_left_is_that_of_the_steps_left_at_the_mean_pace_of_this_run() {
        let left = |step, seconds| facts().left(step, Duration::from_secs(seconds)).map(|left| left.as_secs());
        assert_eq!([left(5, 2), left(14, 30), left(24, 40), left(4, 3), left(3, 1)], [Some(38), Some(30), None, None, None]);
        let logged = |number| facts().log_line(&StepMetrics { step: number, ..step() }, Duration::from_secs(1)).is_some();
        assert_eq!([logged(1), logged(5), logged(10), logged(20)], [true, false, true, true]);
    }
}
