//! One line of the table.

use microbench::facts::Facts;
use microbench::run::Timing;
use serde_json::{Value, json};
use std::fmt;

/// What was run and what it took.
pub struct Row {
    /// A pass of Adam, or what memory gives without one.
    pub pass: &'static str,
    /// Instruction set, stores, prefetch; empty for memory's own speed.
    pub kernels: String,
    /// Workers.
    pub threads: usize,
    /// Threads beside them that copy.
    pub hogs: usize,
    /// Parameters of all buckets.
    pub params: usize,
    /// Elements of a job, and the bytes that each moves.
    pub elems: usize,
    pub bytes_per_elem: f64,
    pub timing: Timing,
    /// The best copy past the caches with as many threads.
    pub copy_gb_s: Option<f64>,
}

impl Row {
    /// 1e9 elements a second, over all jobs.
    fn gelem_s(&self) -> f64 {
        (self.elems * self.timing.jobs) as f64 * 1e-9 / self.timing.wall_s
    }

    /// The same without waiting for a job or for each other.
    fn busy_gelem_s(&self) -> f64 {
        (self.elems * self.timing.jobs) as f64 * 1e-9 / self.timing.busy_s
    }

    pub fn gb_s(&self) -> f64 {
        self.gelem_s() * self.bytes_per_elem
    }

    fn share_of_copy(&self) -> Option<f64> {
        self.copy_gb_s.map(|copy| self.gb_s() / copy)
    }

    pub fn json(&self, facts: &Facts) -> Value {
        facts.line(json!({
            "partition": self.timing.partition, "pass": self.pass, "kernels": self.kernels, "threads": self.threads, "pinned": self.timing.pinned, "hogs": self.hogs,
            "params": self.params, "bucket_params": self.elems, "jobs": self.timing.jobs, "bytes_per_param": self.bytes_per_elem,
            "gparam_s": self.gelem_s(), "gb_s": self.gb_s(), "share_of_copy": self.share_of_copy(),
            "median_gparam_s": self.elems as f64 * 1e-9 / self.timing.median_s, "busy_gparam_s": self.busy_gelem_s(),
            "skew_percent": self.timing.skew_percent(), "handover_percent": self.timing.handover_percent(),
        }))
    }
}

pub const HEADER: &str =
    "kernels                     pass                   threads hogs pinned  bucket   Gpar/s    GB/s     busy skew % handover % of copy %";

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, kernels, threads, hogs, elems, timing, .. } = self;
        let (gelem_s, gb_s, busy) = (self.gelem_s(), self.gb_s(), self.busy_gelem_s());
        let (pinned, bucket) = (if timing.pinned { "yes" } else { "no" }, *elems as f64 / f64::from(1 << 20));
        let (skew, handover) = (timing.skew_percent(), timing.handover_percent());
        write!(f, "{kernels:<27} {pass:<22} {threads:>7} {hogs:>4} {pinned:>6} {bucket:>6.1}M {gelem_s:>8.3} {gb_s:>7.1} {busy:>8.3} ")?;
        write!(f, "{skew:>6.1} {handover:>10.1}")?;
        self.share_of_copy().map_or(Ok(()), |share| write!(f, " {:>9.0}", 100.0 * share))
    }
}
