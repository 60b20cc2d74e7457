//! The fraction of time spent computing if every weight is streamed over the link (paper, section 4.2).
//!
//! A forward pass computes `2 * batch * seq_length` operations per parameter and transfers 2 bytes per parameter, without overlap:
//! `efficiency = 1 / (1 + peak / (bandwidth * batch * seq_length))`.

use crate::config::Flags;
use serde_json::{Value, json};

/// Returns the line for `bandwidth-gbps`, `batch`, `seq-length` and `peak-tflops`.
///
/// # Errors
/// Name of the flag that is missing or not a positive number.
pub fn line(flags: &Flags) -> Result<Value, String> {
    let number = |flag: &str| {
        let value = flags.get(flag).and_then(|value| value.as_float().or(value.as_integer().map(|value| value as f64)));
        value.filter(|value| value.is_finite() && *value > 0.0).ok_or_else(|| format!("{flag} is no positive number"))
    };
    let (bandwidth_gbps, batch) = (number("bandwidth-gbps")?, number("batch")?);
    let (seq_length, peak_tflops) = (number("seq-length")?, number("peak-tflops")?);
    let percent = efficiency_percent(bandwidth_gbps, batch * seq_length, peak_tflops);
    Ok(json!({
        "bench": "weight-flow",
        "bandwidth_gbps": bandwidth_gbps,
        "batch": batch,
        "seq_length": seq_length,
        "peak_tflops": peak_tflops,
        "efficiency_percent": (percent * 1000.0).round() / 1000.0,
    }))
}

/// Fraction of time spent computing, in percent.
fn efficiency_percent(bandwidth_gbps: f64, tokens: f64, peak_tflops: f64) -> f64 {
    100.0 / (1.0 + peak_tflops * 1e12 / (bandwidth_gbps * 1e9 * tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(text: &str) -> Flags {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn half_the_time_computes_when_the_link_feeds_the_peak() {
        // At 700e12 operations per second and 4096 tokens, a link must supply 700e12 / 4096 bytes per second, as each parameter has 2 bytes
        // and 2 operations per token.
        let line = line(&flags("bandwidth-gbps = 170.8984375\nbatch = 4\nseq-length = 1024\npeak-tflops = 700\n")).unwrap();
        assert_eq!(line["efficiency_percent"], 50.0);
    }

    #[test]
    fn non_numbers_are_refused() {
        let all = "batch = 4\nseq-length = 1024\npeak-tflops = 700\n";
        assert_eq!(line(&flags(all)).unwrap_err(), "bandwidth-gbps is no positive number");
        assert!(line(&flags(&format!("{all}bandwidth-gbps = -1\n"))).is_err());
        assert!(line(&flags(&format!("{all}bandwidth-gbps = \"fast\"\n"))).is_err());
    }
}
