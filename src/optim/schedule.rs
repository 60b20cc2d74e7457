//! Learning-rate schedules, with the values of Hugging Face's schedulers of the same names.

/// Course of the learning rate after the warm-up, which is linear from 0 in all schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LrScheduler {
    /// Stays (`constant_with_warmup`).
    Constant,
    /// Falls in a straight line to 0 at the last step.
    Linear,
    /// Falls along half a cosine to 0 at the last step.
    Cosine,
    /// Warm-up, stable, decay: stays, then falls along half a cosine to 0 during the last tenth of the steps (at least one).
    Wsd,
}

/// Length of training.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrainLength {
    /// This many optimizer steps.
    Steps(u64),
    /// This many passes over the data.
    Epochs(f64),
}

/// A learning rate for every step of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LrSchedule {
    /// Shape after the warm-up.
    pub(crate) scheduler: LrScheduler,
    /// The learning rate at its peak.
    pub(crate) peak_lr: f64,
    /// Steps of warm-up.
    pub(crate) warmup_steps: u64,
    /// Steps of the run.
    pub max_steps: u64,
}

impl LrSchedule {
    /// Learning rate of optimizer step `step`, counted from 0.
    pub(crate) fn lr(&self, step: u64) -> f64 {
        self.peak_lr * self.factor(step)
    }

    /// Factor on the peak: 0 to 1.
    fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let steps_after_warmup = self.max_steps.saturating_sub(self.warmup_steps).max(1);
        match self.scheduler {
            LrScheduler::Constant => 1.0,
            LrScheduler::Linear => self.max_steps.saturating_sub(step) as f64 / steps_after_warmup as f64,
            LrScheduler::Cosine => half_cosine((step - self.warmup_steps) as f64 / steps_after_warmup as f64),
            LrScheduler::Wsd => self.wsd_factor(step),
        }
    }

    fn wsd_factor(&self, step: u64) -> f64 {
        let decay_steps = (self.max_steps / 10).max(1);
        let decay_start = self.max_steps.saturating_sub(decay_steps);
        match step {
            _ if step < decay_start => 1.0,
            _ if step < self.max_steps => half_cosine((step - decay_start) as f64 / decay_steps as f64),
            _ => 0.0,
        }
    }
}

/// From 1 at 0 to 0 at 1. Uses the cosine of `libm`, so that all machines train with the same bits.
fn half_cosine(progress: f64) -> f64 {
    (0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress))).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: [u64; 14] = [0, 1, 4, 5, 9, 10, 20, 45, 46, 47, 49, 50, 51, 60];

    fn assert_factors(scheduler: LrScheduler, warmup_steps: u64, golden: [f64; 14]) {
        let schedule = LrSchedule { scheduler, peak_lr: 0.5, warmup_steps, max_steps: 50 };
        for (step, golden) in STEPS.into_iter().zip(golden) {
            // One ulp of 1: the two cosines may round differently, and `1 + cos` cancels.
            let error = (schedule.lr(step) - 0.5 * golden).abs();
            assert!(error <= 0.5 * f64::EPSILON, "{scheduler:?}, warm-up {warmup_steps}, step {step}: off by {error}");
        }
    }

    /// From `transformers` 5: `get_{constant,linear,cosine}_schedule_with_warmup` and `get_wsd_schedule(num_decay_steps=5)`,
    /// 50 training steps, at `STEPS`.
    #[test]
    fn factors_are_hugging_faces() {
        use LrScheduler::{Constant, Cosine, Linear, Wsd};
        assert_factors(Constant, 0, [1.0; 14]);
        assert_factors(Constant, 5, [0.0, 0.2, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_factors(Linear, 0, [1.0, 0.98, 0.92, 0.9, 0.82, 0.8, 0.6, 0.1, 0.08, 0.06, 0.02, 0.0, 0.0, 0.0]);
        let (ninth, tenth) = (0.911_111_111_111_111_1, 0.888_888_888_888_888_8);
        let (s45, s46, s47, s49) = (0.111_111_111_111_111_1, 0.088_888_888_888_888_89, 0.066_666_666_666_666_67, 0.022_222_222_222_222_223);
        assert_factors(Linear, 5, [0.0, 0.2, 0.8, 1.0, ninth, tenth, 2.0 / 3.0, s45, s46, s47, s49, 0.0, 0.0, 0.0]);
        let cosine = [
            1.0,
            0.9990133642141358,
            0.9842915805643155,
            0.9755282581475768,
            0.9221639627510075,
            0.9045084971874737,
            0.6545084971874737,
            0.024471741852423234,
            0.015708419435684462,
            0.008856374635655695,
            0.0009866357858642205,
            0.0,
            0.0009866357858642205,
            0.09549150281252622,
        ];
        assert_factors(Cosine, 0, cosine);
        let cosine_warm = [
            0.0,
            0.2,
            0.8,
            1.0,
            0.9806308479691594,
            0.9698463103929542,
            0.75,
            0.03015368960704584,
            0.019369152030840553,
            0.010926199633097156,
            0.0012179748700879012,
            0.0,
            0.0012179748700878457,
            0.116977778440511,
        ];
        assert_factors(Cosine, 5, cosine_warm);
        let (d46, d47, d49) = (0.9045084971874737, 0.6545084971874737, 0.09549150281252633);
        assert_factors(Wsd, 0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, d46, d47, d49, 0.0, 0.0, 0.0]);
        assert_factors(Wsd, 5, [0.0, 0.2, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, d46, d47, d49, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_warm_up_longer_than_the_run_never_peaks_early() {
        for (scheduler, last) in
            [(LrScheduler::Constant, 1.0), (LrScheduler::Linear, 0.0), (LrScheduler::Cosine, 1.0), (LrScheduler::Wsd, 0.0)]
        {
            let schedule = LrSchedule { scheduler, peak_lr: 1.0, warmup_steps: 60, max_steps: 50 };
            assert_eq!(schedule.lr(45), 0.75);
            assert_eq!(schedule.lr(60), last);
        }
    }
}
