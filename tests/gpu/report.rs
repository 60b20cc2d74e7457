//! Runs cases and says what became of them.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;
use superoffload::Error;
use superoffload::internals::error::printable_lines;
use superoffload::internals::facts::{BuildFacts, MachineFacts};
use superoffload::internals::hardware::Topology;

/// What a case gives when it passes: its largest error as a part of the bound, 0 where bits are compared.
pub type Outcome = Result<f64, Missed>;

/// A case that did not pass.
pub enum Missed {
    /// It found something wrong.
    Failed(String),
    /// It could not run, and need not here.
    Skipped(String),
}

impl From<Error> for Missed {
    fn from(e: Error) -> Self {
        Self::Failed(e.to_string())
    }
}

/// An outcome that fails with `what` unless `holds`.
pub fn require(holds: bool, what: impl FnOnce() -> String) -> Result<(), Missed> {
    if holds { Ok(()) } else { Err(Missed::Failed(what())) }
}

/// Counts and tells.
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
    /// Cases run if their name holds one of `filters`, or if there are none, and none of `skips`. Those that pass are told one by one if
    /// `verbose`. Inputs come of `seed`.
    pub fn new(out: W, [filters, skips]: [Vec<String>; 2], verbose: bool, seed: u64) -> Self {
        Self { out, filters, skips, verbose, seed, device: String::new(), passed: 0, failed: 0, skipped: 0, cases: Vec::new() }
    }

    /// What follows runs on `device`.
    pub fn begin(&mut self, device: &str) {
        self.device = device.to_string();
        self.say(&format!("on {device}"));
    }

    /// Writes a line.
    pub fn say(&mut self, line: &str) {
        // Nobody can be told that telling failed.
        let _ = writeln!(self.out, "{}", printable_lines(line)).and_then(|()| self.out.flush());
    }

    /// Whether a case of this name is asked for.
    pub fn wants(&self, name: &str) -> bool {
        let is_in = |texts: &[String]| texts.iter().any(|text| name.contains(text.as_str()));
        (self.filters.is_empty() || is_in(&self.filters)) && !is_in(&self.skips)
    }

    /// Runs a case, if it is asked for. A panic fails it and no other. Returns whether it failed.
    pub fn case(&mut self, name: &str, body: impl FnOnce() -> Outcome) -> bool {
        if !self.wants(name) {
            return false;
        }
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(body));
        let outcome = outcome.unwrap_or_else(|panic| Err(Missed::Failed(format!("panicked: {}", message(&*panic)))));
        self.tell(name, &outcome, start.elapsed().as_secs_f64() * 1e3);
        matches!(outcome, Err(Missed::Failed(_)))
    }

    /// Counts a case and says what became of it.
    fn tell(&mut self, name: &str, outcome: &Outcome, ms: f64) {
        let (word, detail, count) = match outcome {
            Ok(worst) => ("ok", if *worst > 0.0 { format!("{worst:.3} of the bound") } else { String::new() }, &mut self.passed),
            Err(Missed::Failed(why)) => ("FAILED", why.clone(), &mut self.failed),
            Err(Missed::Skipped(why)) => ("skipped", why.clone(), &mut self.skipped),
        };
        *count += 1;
        if self.verbose || outcome.is_err() {
            self.say(&format!("{word} {name} ({ms:.0} ms) {detail}"));
        }
        let worst = outcome.as_ref().ok();
        let case = serde_json::json!({"device": self.device, "case": name, "outcome": word, "detail": detail, "worst": worst, "ms": ms});
        self.cases.push(case);
    }

    /// The closing line.
    pub fn finish(&mut self) {
        self.say(&format!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped));
    }

    /// Whether there was a case.
    pub fn has_run(&self) -> bool {
        self.passed + self.failed + self.skipped > 0
    }

    /// Whether a case failed.
    pub fn has_failed(&self) -> bool {
        self.failed > 0
    }

    /// Everything: program, machine, and cases.
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
