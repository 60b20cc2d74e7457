//! Record of a campaign: one JSON line with its counts, failures, commit and machine.

use crate::harness::{Campaign, Harness, Kinds};
use serde_json::{Value, json};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// Environment variables that change a campaign.
const SETTINGS: [&str; 2] = ["SUPEROFFLOAD_DEVICE", "SUPEROFFLOAD_SOAK_SECONDS"];
/// Maximum number of failures that a line lists. The count includes all.
const SHOWN: usize = 20;

/// A run in which the program failed a check.
#[derive(Debug)]
pub struct Failure {
    pub index: u64,
    pub kind: String,
    pub message: String,
}

/// Result of one campaign.
pub struct Record {
    id: &'static str,
    what: &'static str,
    /// Number of runs of the complete campaign, unless `is_over` is set earlier.
    complete: u64,
    /// Nothing was left to try.
    pub is_over: bool,
    program: String,
    /// The program's directory: `release` or `debug` if cargo built it.
    build: String,
    seed: u64,
    pub runs: u64,
    pub kinds: Kinds,
    pub failures: Vec<Failure>,
    pub seconds: f64,
    /// The reason why the campaign could not run here.
    pub not_run: Option<String>,
}

impl Record {
    pub fn new(harness: &Harness, campaign: &Campaign) -> Self {
        let version = output_of(Command::new(&harness.program).arg("--version"));
        let (id, what, complete) = (campaign.id, campaign.what, campaign.runs);
        let build = harness.program.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
        let (kinds, failures) = (Kinds::new(), vec![]);
        let (program, seed) = (version, harness.seed);
        Self { id, what, complete, is_over: false, program, build, seed, runs: 0, kinds, failures, seconds: 0.0, not_run: None }
    }

    /// Merges two parts of one campaign.
    pub fn and(mut self, other: Self) -> Self {
        self.runs += other.runs;
        self.is_over &= other.is_over;
        other.kinds.into_iter().for_each(|(kind, runs)| *self.kinds.entry(kind).or_default() += runs);
        self.failures.extend(other.failures);
        self.not_run = self.not_run.or(other.not_run);
        self
    }

    /// Summary for the terminal.
    pub fn summary(&self) -> String {
        let failures: String = self.failures.iter().map(|f| format!("\n  run {} ({}): {}", f.index, f.kind, f.message)).collect();
        match &self.not_run {
            Some(why) => format!("{}: not run: {why}", self.id),
            None => format!("{}: {} runs, {} failures in {:.1} s{failures}", self.id, self.runs, self.failures.len(), self.seconds),
        }
    }

    /// The JSON line for the record.
    pub fn line(&self) -> String {
        let complete = if self.is_over { self.runs } else { self.complete };
        let failure = |f: &Failure| json!({"run": f.index, "kind": f.kind, "message": f.message});
        let mut line = json!({
            "id": self.id, "what": self.what, "runs": self.runs, "failures": self.failures.len(), "complete": complete,
            "kinds": self.kinds, "failed": self.failures.iter().take(SHOWN).map(failure).collect::<Vec<_>>(),
            "seconds": (self.seconds * 10.0).round() / 10.0, "seed": self.seed,
            "command": self.command(), "program": self.program, "build": self.build,
        });
        let more = line.as_object_mut().unwrap();
        more.extend(self.not_run.iter().map(|why| ("not_run".to_string(), json!(why))));
        more.extend(machine().as_object().unwrap().clone());
        // A program that knows its commit may have come from another tree.
        if let Some((commit, _)) = self.program.split_once("(commit ").and_then(|(_, rest)| rest.split_once(')')) {
            more.insert("commit".into(), json!(commit));
        }
        line.to_string()
    }

    fn command(&self) -> String {
        let set = |name: &str| std::env::var(name).map_or(String::new(), |value| format!("{name}={value} "));
        let environment: String = SETTINGS.iter().map(|name| set(name)).collect();
        format!("{environment}superoffload-campaign --id {} --seed {}", self.id, self.seed)
    }
}

/// The machine and the date.
fn machine() -> Value {
    let field = |file: &str, name: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let value = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        value.trim_start_matches([':', ' ', '\t']).to_string()
    };
    let git = |args: &[&str]| output_of(Command::new("git").args(args).current_dir(env!("CARGO_MANIFEST_DIR")));
    let memory = field("/proc/meminfo", "MemTotal").trim_end_matches(" kB").parse::<u64>().unwrap_or(0);
    let gpu = match crate::harness::device().as_str() {
        "cpu" => String::new(),
        _ => output_of(Command::new("nvidia-smi").args(["--query-gpu=name", "--format=csv,noheader"])),
    };
    json!({
        "gpu": gpu, "date": output_of(Command::new("date").args(["-u", "+%F"])), "commit": git(&["rev-parse", "HEAD"]),
        "dirty": !git(&["status", "--porcelain", "--untracked-files=no"]).is_empty(),
        "cpu": field("/proc/cpuinfo", "model name"), "cores": std::thread::available_parallelism().map_or(0, |n| n.get()),
        "memory_gib": memory >> 20, "kernel": fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim(),
    })
}

/// The trimmed output of a command; empty if it cannot be run.
fn output_of(command: &mut Command) -> String {
    let output = command.output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).trim().to_string()
}

pub fn append(path: &Path, line: &str) -> Result<(), String> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| writeln!(file, "{line}")).map_err(|e| format!("{}: {e}", path.display()))
}
