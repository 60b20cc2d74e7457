//! Numbers outside their sense are refused before anything is read.

use crate::config::settings::{Settings, TrainLength, require};
use crate::error::Result;

/// A step of AdamW moves every parameter by about the learning rate, and parameters are of order 1: more is a slip of the pen, and
/// overwrites all weights with noise in one step.
const LEARNING_RATE_MAX: f64 = 10.0;
/// Gradients are far smaller: a larger epsilon would leave nothing of them.
const EPSILON_MAX: f64 = 1.0;
/// 1 TiB.
const BUCKET_MIB_MAX: f64 = 1_048_576.0;

impl Settings {
    /// Whether learning rate, decays, epsilon and lengths make sense.
    ///
    /// # Errors
    /// `Usage` that names flag, value and what is allowed.
    pub(super) fn check_numbers(&self) -> Result<()> {
        self.check_update()?;
        let norm = self.max_grad_norm;
        check(norm.is_finite() && norm >= 0.0, "max-grad-norm", norm, "finite and at least 0")?;
        check((0.0..=1.0).contains(&self.warmup_ratio), "warmup-ratio", self.warmup_ratio, "0 to 1")?;
        let mib = self.bucket_mib.unwrap_or(1.0);
        check(mib > 0.0 && mib <= BUCKET_MIB_MAX, "bucket-mib", mib, &format!("above 0, at most {BUCKET_MIB_MAX}"))?;
        match self.train_length {
            TrainLength::Steps(steps) => require(steps >= 1, "max-steps", steps, "at least 1"),
            TrainLength::Epochs(epochs) => check(epochs.is_finite() && epochs > 0.0, "num-train-epochs", epochs, "finite and above 0"),
        }
    }

    fn check_update(&self) -> Result<()> {
        let (lr, decay) = (self.learning_rate, self.weight_decay);
        let allowed = format!("finite and at least 0, at most {LEARNING_RATE_MAX}");
        check((0.0..=LEARNING_RATE_MAX).contains(&lr), "learning-rate", lr, &allowed)?;
        check(decay.is_finite() && decay >= 0.0, "weight-decay", decay, "finite and at least 0")?;
        // A step multiplies parameters by `1 - lr * decay`.
        check(lr * decay < 1.0, "weight-decay", decay, &format!("less than 1 / --learning-rate {lr:?}"))?;
        for (flag, beta) in [("adam-beta1", self.adam_beta1), ("adam-beta2", self.adam_beta2)] {
            // The optimizer computes in float32, in which a decay may round to 1 and an epsilon to 0.
            check((0.0..1.0).contains(&beta) && (beta as f32) < 1.0, flag, beta, "at least 0 and below 1 in float32")?;
        }
        let eps = self.adam_epsilon;
        check(eps <= EPSILON_MAX && eps as f32 > 0.0, "adam-epsilon", eps, &format!("above 0 in float32, at most {EPSILON_MAX}"))
    }
}

/// As [`require`], with numbers in their shortest form: 1e300 rather than 301 digits.
fn check(holds: bool, flag: &str, value: f64, allowed: &str) -> Result<()> {
    require(holds, flag, format_args!("{value:?}"), allowed)
}

#[cfg(test)]
mod tests {
    use crate::config::options::tests::command_line;
    use crate::config::settings::Settings;

    fn resolve(args: &[&str]) -> crate::error::Result<Settings> {
        Settings::resolve(command_line(args).unwrap())
    }

    #[test]
    fn numbers_that_cannot_train_are_refused_in_a_line_with_flag_and_range() {
        let cases = [
            ("--learning-rate", "1e30", "1e30: allowed is finite and at least 0, at most 10"),
            ("--learning-rate", "1e308", "1e308: allowed"),
            ("--learning-rate", "inf", "inf: allowed"),
            ("--learning-rate", "-3e-4", "-0.0003: allowed"),
            ("--weight-decay", "-0.1", "-0.1: allowed is finite and at least 0"),
            ("--weight-decay", "400", "400.0: allowed is less than 1 / --learning-rate 0.003"),
            ("--adam-beta1", "-0.9", "-0.9: allowed is at least 0 and below 1"),
            ("--adam-beta2", "0.999999999", "0.999999999: allowed is at least 0 and below 1 in float32"),
            ("--adam-beta2", "inf", "inf: allowed"),
            ("--adam-epsilon", "2", "2.0: allowed is above 0 in float32, at most 1"),
            ("--adam-epsilon", "-1e-8", "-1e-8: allowed"),
            ("--adam-epsilon", "inf", "inf: allowed"),
            ("--adam-epsilon", "nan", "NaN: allowed"),
            ("--max-grad-norm", "nan", "NaN: allowed is finite and at least 0"),
            ("--max-grad-norm", "-1", "-1.0: allowed"),
            ("--num-train-epochs", "-1", "-1.0: allowed is finite and above 0"),
            ("--num-train-epochs", "inf", "inf: allowed"),
        ];
        for (flag, value, message) in cases {
            let refused = resolve(&["--seed", "1", flag, value]).unwrap_err();
            assert_eq!(refused.exit_code(), 2);
            let told = refused.to_string();
            assert!(told.starts_with(&format!("{flag} {message}")) && told.lines().count() == 1, "{flag} {value}: {told}");
        }
    }

    #[test]
    fn what_people_use_is_allowed() {
        for args in [
            ["--learning-rate", "0"],
            ["--learning-rate", "1"],
            ["--weight-decay", "0.3"],
            ["--adam-beta1", "0"],
            ["--adam-epsilon", "1e-15"],
            ["--max-grad-norm", "0"],
        ] {
            assert!(resolve(&args).is_ok(), "{args:?}");
        }
    }
}
