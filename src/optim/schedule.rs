//! Learning-rate schedules, with the values of Hugging Face's schedulers of the same names.

/// How the learning rate moves after the warm-up, which is linear from 0 in all of them.
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

/// A learning rate for every step of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Shape after the warm-up.
    pub scheduler: LrScheduler,
    /// The learning rate at its peak.
    pub peak_lr: f64,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Steps of the run.
    pub max_steps: u64,
}

impl Schedule {
    /// Learning rate of optimizer step `step`, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        self.peak_lr * self.factor(step)
    }

    /// What the peak is multiplied with: 0 to 1.
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

/// From 1 at 0 to 0 at 1. `libm`'s cosine, so that all machines train with the same bits.
fn half_cosine(progress: f64) -> f64 {
    (0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress))).max(0.0)
}
