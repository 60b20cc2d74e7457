//! `superchip-check`: the measurements that tell how the program does on a GH200, GB200 or GB300, in about ten minutes.
//!
//! It probes the machine, runs the conformance suite, and times two workloads and the rows of the paper's Table 2. The result is one JSON
//! file and a report that its reader completes.

mod report;
mod rows;

use crate::bench::options::StepOptions;
use crate::bench::step::StepBench;
use crate::config::options::DeviceChoice;
use crate::config::settings::TrainOptions;
use crate::engine::watch::watchdog::Alarm;
use crate::error::{Error, Result};
use crate::facts::{BuildFacts, MachineFacts};
use crate::hardware::gpu::GpuFacts;
use crate::hardware::topology::Topology;
use crate::probe::{self, ProbeOptions};
use crate::simulate::clip::Clip;
use crate::simulate::random_tokens::RandomData;
use rows::{ROWS, STEPS, TimedRow, WARMUP};
use serde_json::{Value, json};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Words in the name of a GPU that is part of a superchip.
const SUPERCHIPS: [&str; 4] = ["GH200", "GB200", "GB300", "GB10"];
/// The files of a check.
const FILES: [&str; 3] = ["profile.toml", "superchip.json", "superchip.md"];
/// Minutes of the probe and of the conformance suite.
const PROBE_MINUTES: f64 = 1.0;
const SELFTEST_MINUTES: f64 = 3.0;

/// Options of `superchip-check`.
#[derive(clap::Args, Clone, Debug)]
pub struct SuperchipOptions {
    /// Directory for profile.toml, superchip.json and superchip.md. None of these may exist.
    #[arg(short, long, value_name = "DIR", default_value = "superchip-check")]
    pub out: PathBuf,

    /// Print what would run and how long, and run nothing.
    #[arg(long)]
    pub dry_run: bool,

    /// Directory to search first for NVIDIA's libraries.
    #[arg(long, value_name = "DIR")]
    pub cuda_libraries: Option<PathBuf>,
}

/// Parts of the program that the check calls.
pub struct Calls<'a> {
    /// Runs the conformance suite. Returns its JSON result, and whether every case passed.
    pub selftest: &'a mut dyn FnMut() -> Result<(Value, bool)>,
    /// Makes the function that ends a run that hangs.
    pub on_alarm: &'a dyn Fn() -> Box<dyn Fn(Alarm) + Send>,
    /// Receives lines for people.
    pub log: &'a mut dyn FnMut(&dyn Display),
}

/// Everything that runs, with its minutes.
pub(crate) fn plan() -> String {
    let parts = [("probe", PROBE_MINUTES), ("selftest", SELFTEST_MINUTES)];
    let all = parts.into_iter().chain(ROWS.iter().map(|row| (row.name, row.minutes)));
    let lines: String = all.clone().map(|(name, minutes)| format!("  {minutes:>4.1} min  {name}\n")).collect();
    let minutes: f64 = all.map(|(_, minutes)| minutes).sum();
    format!("superchip-check runs\n{lines}about {minutes:.0} minutes, of which a slow disk or a cold machine may add some")
}

/// Runs the check, and writes its files. Returns the report, and whether everything ran and passed.
///
/// # Errors
/// `Usage` if the directory has a file of an earlier check; `Resource` without a GPU; `Io` if a file cannot be written; the stop of a run by the user. A row that fails is a line of the report.
pub(crate) fn run(options: &SuperchipOptions, calls: Calls<'_>) -> Result<(String, bool)> {
    let Calls { selftest, on_alarm, log } = calls;
    if options.dry_run {
        return Ok((plan(), true));
    }
    refuse_earlier_files(&options.out)?;
    log(&plan());
    let gpu = GpuFacts::read()?;
    let name = gpu.name.unwrap_or_else(|| "a GPU without a name".into());
    let is_superchip = is_superchip(&name);
    if !is_superchip {
        log(&format_args!("warning: {name} is no superchip: the report shows the form, with this machine's numbers"));
    }
    std::fs::create_dir_all(&options.out).map_err(|e| Error::io("make directory", &options.out, e))?;
    let profile = options.out.join(FILES[0]);
    let probed = probe_machine(options, &profile, log);
    let (tested, has_passed) = selftest()?;
    let rows: Vec<Value> = ROWS.iter().map(|row| measure(row, options, on_alarm(), log)).collect::<Result<_>>()?;
    let topology = Topology::this_machine();
    let record = json!({
        "bench": "superchip-check", "build": BuildFacts::this_program(), "machine": MachineFacts::new(&topology), "gpu": name,
        "is_superchip": is_superchip, "probe": probed.as_ref().err().map_or(json!(FILES[0]), |e| json!({"error": e.to_string()})),
        "selftest": tested, "rows": rows,
    });
    let text = report::of(&record);
    write(options, FILES[1], &format!("{record}\n"))?;
    write(options, FILES[2], &text)?;
    let is_good = has_passed && probed.is_ok() && rows.iter().all(|row| row.get("error").is_none());
    Ok((text, is_good))
}

fn is_superchip(gpu: &str) -> bool {
    SUPERCHIPS.iter().any(|chip| gpu.contains(chip))
}

/// An earlier report may have been completed by hand, so no file is replaced.
fn refuse_earlier_files(out: &Path) -> Result<()> {
    match FILES.iter().map(|name| out.join(name)).find(|path| path.symlink_metadata().is_ok()) {
        None => Ok(()),
        Some(path) => Err(Error::usage(format!("{} exists: name another directory with --out, or move the file", path.display()))),
    }
}

fn write(options: &SuperchipOptions, name: &str, text: &str) -> Result<()> {
    let path = options.out.join(name);
    std::fs::write(&path, text).map_err(|e| Error::io("write", path, e))
}

fn probe_machine(options: &SuperchipOptions, profile: &Path, log: &mut dyn FnMut(&dyn Display)) -> Result<()> {
    let request = ProbeOptions {
        device: DeviceChoice::Cuda,
        gpus: None,
        seconds: 40,
        out: Some(profile.into()),
        save: false,
        cuda_libraries: options.cuda_libraries.clone(),
    };
    let measured = probe::run(&request, log)?;
    log(&measured.table());
    request.file()?.map_or(Ok(()), |file| file.write(&measured))
}

/// The record of a row, or its error.
fn measure(
    row: &TimedRow,
    options: &SuperchipOptions,
    alarm: Box<dyn Fn(Alarm) + Send>,
    log: &mut dyn FnMut(&dyn Display),
) -> Result<Value> {
    log(&format_args!("\n{}", row.name));
    let outcome = step_options(row, options)
        .and_then(|options| StepBench::new(options)?.run(Some(Box::new(move |why| alarm(Alarm::Stall(why)))), log));
    let mut line = json!({"name": row.name, "paper_tflops": row.paper_tflops});
    match outcome {
        Err(error @ Error::Interrupted(_)) => return Err(error),
        Err(error) => {
            log(&format_args!("warning: {}: {error}", row.name));
            line["error"] = json!(error.to_string());
        }
        Ok(record) => line["record"] = serde_json::to_value(&record).map_err(|e| Error::format("the record of a row", e))?,
    }
    Ok(line)
}

fn step_options(row: &TimedRow, options: &SuperchipOptions) -> Result<StepOptions> {
    let train = TrainOptions::from_toml(row.settings).map_err(|e| Error::format(row.name, e))?;
    let model = Some(row.model.into());
    let train = TrainOptions { model, device: Some(DeviceChoice::Cuda), cuda_libraries: options.cuda_libraries.clone(), ..train };
    Ok(StepOptions { warmup: WARMUP, steps: STEPS, clip: Clip::Never, data: RandomData::default(), out: None, train })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_a_run_of_ten_minutes_in_all() {
        let options = SuperchipOptions { out: "out".into(), dry_run: false, cuda_libraries: None };
        for row in &ROWS {
            let options = step_options(row, &options).unwrap_or_else(|e| panic!("{}: {e}", row.name));
            StepBench::new(options).unwrap_or_else(|e| panic!("{}: {e}", row.name));
        }
        let minutes = PROBE_MINUTES + SELFTEST_MINUTES + ROWS.iter().map(|row| row.minutes).sum::<f64>();
        assert!((8.0..=11.0).contains(&minutes), "{minutes}");
        assert!(plan().contains("about 10 minutes") && plan().contains("Table 2: + resident buckets"), "{}", plan());
    }

    #[test]
    fn a_file_of_an_earlier_check_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        assert!(refuse_earlier_files(dir.path()).is_ok() && refuse_earlier_files(&dir.path().join("new")).is_ok());
        for name in FILES {
            let path = dir.path().join(name);
            std::fs::write(&path, "by hand").unwrap();
            let error = refuse_earlier_files(dir.path()).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("--out"), "{error}");
            std::fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn a_superchip_is_known_by_its_gpu() {
        let are = ["NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA GB10", "NVIDIA H200", "NVIDIA H100 80GB HBM3"].map(is_superchip);
        assert_eq!(are, [true, true, true, false, false]);
    }
}
