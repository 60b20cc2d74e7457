//! `superoffload-campaign`: provokes failures of long runs many times, and counts the results. Each campaign prints one JSON line.
//!
//! - `--list`: prints all campaigns with their numbers of runs
//! - `--id R1,R4`: runs these campaigns; `--all`: runs all of them
//! - `--runs N`: uses this number of runs for each; `--minutes M`: time limit for all campaigns together
//! - `--jobs N`: concurrent runs of a campaign, for a machine with many CPUs; each run makes the same random choices as alone
//! - `--seed S`: other random choices; `--only I`: only run I, to repeat a failure
//! - `--program PATH`: another `superoffload` than the one that cargo built
//! - `--out FILE`: appends the lines to the file
//! - `--report`: prints `docs/reliability.md` from the records in tests/campaigns/, without runs
//!
//! Without options, as under `cargo test`, a few runs of each campaign show that the campaigns work, and the committed page is compared
//! with its records. Exits with 1 if a run failed.

#[path = "../../fuzz/doors.rs"]
mod doors;
mod harness;
mod list;
mod mutate;
mod pair;
mod power;
mod r01_kill;
mod r02_power;
mod r03_disk;
mod r03b_file_systems;
mod r04_truncation;
mod r05_flips;
mod r07_injection;
mod r08b_rollbacks;
mod r09_signals;
mod r09b_two_signals;
mod r10_memory;
mod r11_limits;
mod r13_driver;
mod r14_stall;
mod r14b_slow_process;
mod r15_hang;
mod r16_ranks;
mod r16b_processes;
mod r16c_unwritable;
mod r16d_wire;
mod r17_data;
mod r18_fuzz;
mod r21_forged;
mod r22_resume;
mod r23_determinism;
mod r23b_replans;
mod r25_soak;
mod r27_starved;
mod r28_clock;
mod r32_formats;
mod r34_placements;
mod recipes;
mod record;
mod report;
mod shim;
mod suites;
#[path = "../wire_proxy.rs"]
mod wire_proxy;

use harness::{Campaign, Harness};
use list::CAMPAIGNS;
use record::Record;
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Options of the command line.
#[derive(Default)]
struct Options {
    list: bool,
    all: bool,
    ids: Vec<String>,
    runs: Option<u64>,
    minutes: Option<f64>,
    jobs: Option<u64>,
    seed: u64,
    only: Option<u64>,
    program: Option<PathBuf>,
    out: Option<PathBuf>,
    report: bool,
    door: Option<String>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg}: a value is missing"));
            let number = |text: String| text.parse().map_err(|e| format!("{text}: {e}"));
            match arg.as_str() {
                "--list" => options.list = true,
                "--all" => options.all = true,
                "--id" => options.ids = value()?.split(',').map(str::to_string).collect(),
                "--runs" => options.runs = Some(number(value()?)?),
                "--minutes" => options.minutes = Some(value()?.parse().map_err(|e| format!("--minutes: {e}"))?),
                "--jobs" => options.jobs = Some(number(value()?)?.max(1)),
                "--seed" => options.seed = number(value()?)?,
                "--only" => options.only = Some(number(value()?)?),
                "--program" => options.program = Some(value()?.into()),
                "--out" => options.out = Some(value()?.into()),
                "--report" => options.report = true,
                // One batch of inputs for a fuzzed entry point, in a separate process that `r18_fuzz` starts.
                "--door" => options.door = Some(value()?),
                // cargo test passes the options of the standard harness, and name filters of other tests, to every binary.
                _ if arg.starts_with("--id") || arg.starts_with("--run") => return Err(format!("{arg}: unknown; see the head of main.rs")),
                _ => {}
            }
        }
        match options.ids.iter().find(|id| !CAMPAIGNS.iter().any(|campaign| campaign.id == **id)) {
            Some(id) => Err(format!("--id {id}: none is called so; --list names all")),
            None => Ok(options),
        }
    }

    /// Whether this is the smoke test under `cargo test`.
    fn is_smoke(&self) -> bool {
        self.ids.is_empty() && !self.all
    }

    fn wants(&self, campaign: &Campaign) -> bool {
        if self.is_smoke() { campaign.smoke > 0 } else { self.all || self.ids.iter().any(|id| id == campaign.id) }
    }
}

fn main() -> ExitCode {
    let run = |options: Options| match &options {
        Options { door: Some(door), .. } => r18_fuzz::batch(door, options.seed, options.runs.unwrap_or(1)).map(|()| 0),
        Options { list: true, .. } => list::print().map(|()| 0),
        Options { report: true, .. } => report::print().map(|()| 0),
        _ if options.is_smoke() => report::check().and_then(|()| run_all(&options)),
        _ => run_all(&options),
    };
    match Options::parse(std::env::args().skip(1)).and_then(run) {
        Ok(failures) => ExitCode::from(u8::from(failures > 0)),
        Err(e) => {
            print_line(&format!("error: {e}"));
            ExitCode::from(2)
        }
    }
}

/// Runs the requested campaigns. Returns the number of failures.
fn run_all(options: &Options) -> Result<u64, String> {
    let harness = Harness::new(options.program.clone(), options.seed, options.is_smoke())?;
    let wanted: Vec<&Campaign> = CAMPAIGNS.iter().filter(|campaign| options.wants(campaign)).collect();
    let (start, mut failures) = (Instant::now(), 0);
    let whole = options.minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0));
    for (idx, campaign) in wanted.iter().enumerate() {
        // Time that a campaign leaves of its share is available to the later ones.
        let time_limit = whole.map(|whole| whole.saturating_sub(start.elapsed()) / (wanted.len() - idx) as u32);
        let runs = options.runs.unwrap_or(if options.is_smoke() { campaign.smoke } else { campaign.runs });
        let record = harness.campaign(
            campaign,
            options.only.map_or(0..runs, |only| only..only + 1),
            time_limit,
            options.jobs.unwrap_or(1) as usize,
        )?;
        failures += record.failures.len() as u64;
        log(&record, options)?;
    }
    Ok(failures)
}

fn log(record: &Record, options: &Options) -> Result<(), String> {
    let line = record.line();
    print_line(&if options.is_smoke() { record.summary() } else { line.clone() });
    match &options.out {
        Some(path) => record::append(path, &line),
        None => Ok(()),
    }
}

/// Prints a line. Errors are ignored, because the output may be closed.
fn print_line(line: &str) {
    let _ = writeln!(stdout(), "{line}");
}
