//! Runs cases and reports their results.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;
use superoffload::Error;
use superoffload::internals::error::printable_lines;
use superoffload::internals::facts::{BuildFacts, MachineFacts};
use superoffload::internals::hardware::Topology;

/// The result of a case that passes: its largest error relative to the bound, 0 for exact comparisons.
pub type Outcome = Result<f64, Missed>;

/// A case that did not pass.
pub enum Missed {
    /// The case found an error.
    Failed(String),
    /// The case could not run on this device.
    Skipped(String),
}

impl From<Error> for Missed {
    fn from(e: Error) -> Self {
        Self::Failed(e.to_string())
    }
}

/// Fails with `label` unless `holds`.
pub fn require(holds: bool, label: impl FnOnce() -> String) -> Result<(), Missed> {
    if holds { Ok(()) } else { Err(Missed::Failed(label())) }
}

/// Counts and prints results.
pub struct Report<W: Write> {
    out: W,
    filters: Vec<String>,
    skips: Vec<String>,
    verbose: bool,
    seed: u64,
    device: String,
    passed: usize,
    failed: usize,
    skipped: usize,
    cases: Vec<serde_json::Value>,
}

impl<W: Write> Report<W> {
    /// A report of the cases whose name contains one of `filters`, if there are any, and none of `skips`. With `verbose` it also prints
    /// cases that pass. `seed` determines the inputs.
    pub fn new(out: W, [filters, skips]: [Vec<String>; 2], verbose: bool, seed: u64) -> Self {
        Self { out, filters, skips, verbose, seed, device: String::new(), passed: 0, failed: 0, skipped: 0, cases: Vec::new() }
    }

    /// Starts the results of `device`.
    pub fn begin(&mut self, device: &str) {
        self.device = device.to_string();
        self.print_line(&format!("on {device}"));
    }

    /// Writes a line.
    pub fn print_line(&mut self, line: &str) {
        // A failed write cannot be reported.
        let _ = writeln!(self.out, "{}", printable_lines(line)).and_then(|()| self.out.flush());
    }

    /// Whether a case with this name is selected.
    pub fn wants(&self, name: &str) -> bool {
        let is_in = |texts: &[String]| texts.iter().any(|text| name.contains(text.as_str()));
        (self.filters.is_empty() || is_in(&self.filters)) && !is_in(&self.skips)
    }

    /// Runs a case if it is selected. A panic fails only this case. Returns whether it failed.
    pub fn case(&mut self, name: &str, body: impl FnOnce() -> Outcome) -> bool {
        if !self.wants(name) {
            return false;
        }
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(body));
        let outcome = outcome.unwrap_or_else(|panic| Err(Missed::Failed(format!("panicked: {}", message(&*panic)))));
        self.log(name, &outcome, start.elapsed().as_secs_f64() * 1e3);
        matches!(outcome, Err(Missed::Failed(_)))
    }

    /// Counts a case and prints its result.
    fn log(&mut self, name: &str, outcome: &Outcome, ms: f64) {
        let (word, detail, count) = match outcome {
            Ok(worst) => ("ok", if *worst > 0.0 { format!("{worst:.3} of the bound") } else { String::new() }, &mut self.passed),
            Err(Missed::Failed(why)) => ("FAILED", why.clone(), &mut self.failed),
            Err(Missed::Skipped(why)) => ("skipped", why.clone(), &mut self.skipped),
        };
        *count += 1;
        if self.verbose || outcome.is_err() {
            self.print_line(&format!("{word} {name} ({ms:.0} ms) {detail}"));
        }
        let worst = outcome.as_ref().ok();
        let case = serde_json::json!({"device": self.device, "case": name, "outcome": word, "detail": detail, "worst": worst, "ms": ms});
        self.cases.push(case);
    }

    /// Prints the closing line.
    pub fn finish(&mut self) {
        self.print_line(&format!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped));
    }

    /// Whether any case has run.
    pub fn has_run(&self) -> bool {
        self.passed + self.failed + self.skipped > 0
    }

    /// Whether a case failed.
    pub fn has_failed(&self) -> bool {
        self.failed > 0
    }

    /// The whole report as JSON: program, machine, and cases.
    pub fn json(&self) -> serde_json::Value {
        let Self { seed, passed, failed, skipped, cases, .. } = self;
        let (program, machine) = (BuildFacts::this_program(), MachineFacts::new(&Topology::this_machine()));
        serde_json::json!({
            "program": program, "machine": machine, "seed": seed, "passed": passed, "failed": failed, "skipped": skipped, "cases": cases,
        })
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}
