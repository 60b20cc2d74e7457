//! A row of the table.

use microbench::facts::Facts;
use microbench::run::Timing;
use serde_json::{Value, json};
use std::fmt;

/// The settings and the timing of a row.
pub struct Row {
    /// A pass of Adam, or a memory kernel.
    pub pass: &'static str,
    /// Instruction set, stores and prefetch; empty for memory kernels.
    pub kernels: String,
    /// Fraction of the parameters with denormal first moments.
    pub denormal: f64,
    /// Worker threads.
    pub threads: usize,
    /// Concurrent threads that copy memory.
    pub hogs: usize,
    /// Parameters of all buckets.
    pub params: usize,
    /// Elements of a job, and the bytes of memory traffic per element.
    pub elems: usize,
    pub bytes_per_elem: f64,
    pub timing: Timing,
    /// Rate of the best copy that bypasses the caches, with as many threads.
    pub copy_gb_s: Option<f64>,
}

impl Row {
    /// Rate in 1e9 elements per second, over all jobs.
    fn gelem_s(&self) -> f64 {
        (self.elems * self.timing.jobs) as f64 * 1e-9 / self.timing.wall_s
    }

    /// Rate in 1e9 elements per second without the time in which workers wait for a job or for each other.
    fn busy_gelem_s(&self) -> f64 {
        (self.elems * self.timing.jobs) as f64 * 1e-9 / self.timing.busy_s
    }

    pub fn gb_s(&self) -> f64 {
        self.gelem_s() * self.bytes_per_elem
    }

    fn fraction_of_copy(&self) -> Option<f64> {
        self.copy_gb_s.map(|copy| self.gb_s() / copy)
    }

    pub fn json(&self, facts: &Facts) -> Value {
        facts.line(json!({
            "partition": self.timing.partition, "pass": self.pass, "kernels": self.kernels, "denormal_moments": self.denormal, "threads": self.threads, "pinned": self.timing.pinned, "hogs": self.hogs,
            "params": self.params, "bucket_params": self.elems, "jobs": self.timing.jobs, "bytes_per_param": self.bytes_per_elem,
            "gparam_s": self.gelem_s(), "gb_s": self.gb_s(), "share_of_copy": self.fraction_of_copy(),
            "median_gparam_s": self.elems as f64 * 1e-9 / self.timing.median_s, "busy_gparam_s": self.busy_gelem_s(),
            "skew_percent": self.timing.skew_percent(), "handover_percent": self.timing.handover_percent(),
        }))
    }
}

pub const HEADER: &str = "kernels                     pass                   denormal threads hogs pinned  bucket   Gpar/s    GB/s     busy skew % handover % of copy %";

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, kernels, denormal, threads, hogs, elems, timing, .. } = self;
        let (gelem_s, gb_s, busy) = (self.gelem_s(), self.gb_s(), self.busy_gelem_s());
        let (pinned, bucket) = (if timing.pinned { "yes" } else { "no" }, *elems as f64 / f64::from(1 << 20));
        let (skew, handover) = (timing.skew_percent(), timing.handover_percent());
        write!(
            f,
            "{kernels:<27} {pass:<22} {denormal:>8.2} {threads:>7} {hogs:>4} {pinned:>6} {bucket:>6.1}M {gelem_s:>8.3} {gb_s:>7.1} {busy:>8.3} "
        )?;
        write!(f, "{skew:>6.1} {handover:>10.1}")?;
        self.fraction_of_copy().map_or(Ok(()), |fraction| write!(f, " {:>9.0}", 100.0 * fraction))
    }
}
