//! Measures the speed of tokenization and the memory use of `superoffload prepare` by the number of CPUs. It runs the program itself,
//! restricted to these CPUs, on generated text with a generated tokenizer (both deterministic) or on the files in its options. It prints
//! one JSON line per number of CPUs to stdout and a table to stderr.

mod text;

use clap::Parser;
use microbench::facts::Facts;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::CpuPlacement;
use superoffload::{Error, Result};

/// Size of a small text: the peak memory of its preparation is mainly the tokenizer's.
const SMALL_BYTES: u64 = 1 << 20;

/// Measures `superoffload prepare`.
#[derive(Parser, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
struct Options {
    /// Numbers of CPUs to measure; by default 1, 2, 4, ... and all.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    cpus: Vec<usize>,
    /// After each number of CPUs, also runs one program on each CPU with a part of the text: an upper bound of the speed.
    #[arg(long)]
    apart: bool,
    /// Size of the generated text, in MiB.
    #[arg(long, value_name = "N", default_value_t = 256)]
    text_mib: u64,
    /// Vocabulary size of the generated tokenizer.
    #[arg(long, value_name = "N", default_value_t = 128_000)]
    vocab_size: usize,
    /// Model directory with a tokenizer, in place of a generated tokenizer.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Data file, in place of generated text.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Directory for a temporary folder, which is removed at the end.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    work_dir: PathBuf,
    /// Path of `superoffload`; by default next to this program.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Measurements and results of one run of the program.
#[derive(Default)]
struct Prepared {
    peak_bytes: u64,
    user_s: f64,
    tokens: u64,
    seconds: f64,
}

struct Runs<'a> {
    program: &'a Path,
    model: &'a Path,
    cache: PathBuf,
}

impl Runs<'_> {
    /// Runs the program on `cpus` with an empty cache.
    fn prepare(&self, data: &Path, cpus: &[usize]) -> Result<Prepared> {
        if self.cache.exists() {
            fs::remove_dir_all(&self.cache).map_err(|e| Error::io("remove", &self.cache, e))?;
        }
        let list: Vec<String> = cpus.iter().map(ToString::to_string).collect();
        let mut command = Command::new("taskset");
        command
            .args(["--cpu-list", &list.join(",")])
            .arg(self.program)
            .arg("prepare")
            .arg("--model")
            .arg(self.model)
            .arg("--data")
            .arg(data);
        let child = command.env("SUPEROFFLOAD_CACHE", &self.cache).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.map_err(|e| Error::io("start", "taskset", e))?;
        let (peak_bytes, user_s) = watch(&mut child);
        let output = child.wait_with_output().map_err(|e| Error::io("wait for", self.program, e))?;
        if !output.status.success() {
            return Err(Error::resource(format_args!("run {}", self.program.display()), String::from_utf8_lossy(&output.stderr).trim()));
        }
        let message = String::from_utf8_lossy(&output.stdout);
        let tokens = number_after(&message, "prepared ").unwrap_or(0.0) as u64;
        // The printed seconds have only one decimal.
        let seconds = tokens as f64 * 1e-6 / number_after(&message, "speed ").unwrap_or(0.0);
        Ok(Prepared { peak_bytes, user_s, tokens, seconds })
    }
}

/// Runs one process per CPU of `cpus`, all concurrently, and returns the sum of their results.
fn prepare_apart(runs: &Runs<'_>, data: &Path, cpus: &[usize]) -> Result<Prepared> {
    let each: Vec<Prepared> = thread::scope(|scope| {
        let start = |&cpu: &usize| {
            let own = Runs { cache: runs.cache.with_extension(cpu.to_string()), ..*runs };
            scope.spawn(move || own.prepare(data, &[cpu]))
        };
        let started: Vec<_> = cpus.iter().map(start).collect();
        started.into_iter().map(|thread| thread.join().expect("it returns its errors")).collect::<Result<_>>()
    })?;
    let mut all = Prepared::default();
    for Prepared { peak_bytes, user_s, tokens, seconds } in each {
        all.peak_bytes += peak_bytes;
        all.user_s += user_s;
        all.tokens += tokens;
        all.seconds = all.seconds.max(seconds);
    }
    Ok(all)
}

/// The longest interval between two readings of memory; each reading takes a while.
const PAUSE_MAX: Duration = Duration::from_millis(50);
/// The shortest interval; a small text takes less than 20 ms.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// Returns the peak memory and the observed CPU time of `child` and its descendants. Memory that processes share counts once.
fn watch(child: &mut Child) -> (u64, f64) {
    let (mut peak_kib, mut ticks, started) = (0.0f64, 0.0f64, Instant::now());
    while matches!(child.try_wait(), Ok(None)) {
        let family = family(child.id());
        let sum = |of: &dyn Fn(u32) -> Option<f64>| family.iter().filter_map(|pid| of(*pid)).sum::<f64>();
        let read = |pid: u32, name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        peak_kib = peak_kib.max(sum(&|pid| number_after(&read(pid, "smaps_rollup"), "\nPss:")));
        // The CPU time is the twelfth field after the name, which may contain spaces.
        ticks = ticks.max(sum(&|pid| read(pid, "stat").rsplit(')').next()?.split_whitespace().nth(11)?.parse().ok()));
        thread::sleep((started.elapsed() / 20).clamp(PAUSE_MIN, PAUSE_MAX));
    }
    // All Linux systems count 100 ticks per second.
    (peak_kib as u64 * 1024, ticks / 100.0)
}

/// `pid` and all its descendants.
fn family(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> =
        children.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect();
    std::iter::once(pid).chain(children.into_iter().flat_map(family)).collect()
}

fn number_after(text: &str, mark: &str) -> Option<f64> {
    let rest = text.split_once(mark)?.1.trim_start();
    rest[..rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len())].parse().ok()
}

/// The numbers 1, 2, 4, … below `all`, and `all`.
fn doubling(all: usize) -> Vec<usize> {
    let powers = (0..).map(|power| 1 << power).take_while(|&cpus| cpus < all);
    powers.chain([all]).collect()
}

fn start(options: &Options) -> Result<()> {
    let topology = Topology::this_machine();
    let facts = Facts::new("prepare", &topology, options);
    let all = facts.machine.usable_cpus.unwrap_or(1);
    let cpus = if options.cpus.is_empty() { doubling(all) } else { options.cpus.clone() };
    if let Some(many) = cpus.iter().find(|&&cpus| cpus == 0 || cpus > all) {
        return Err(Error::usage(format!("--cpus {many}: this process may use {all}")));
    }
    let beside = || std::env::current_exe().map(|path| path.with_file_name("superoffload"));
    let program = options.program.clone().map_or_else(beside, Ok).map_err(|e| Error::resource("find this program", e))?;
    let dir = options.work_dir.join(format!("superoffload-prepare-{}", std::process::id()));
    fs::create_dir_all(&dir).map_err(|e| Error::io("create", &dir, e))?;
    let outcome = measure(options, &facts, &cpus, &program, &dir, &topology);
    fs::remove_dir_all(&dir).map_err(|e| Error::io("remove", &dir, e))?;
    outcome
}

fn measure(options: &Options, facts: &Facts, cpus: &[usize], program: &Path, dir: &Path, topology: &Topology) -> Result<()> {
    if options.model.is_none() {
        text::write_model(dir, options.vocab_size)?;
    }
    let (small, made) = (dir.join("small.jsonl"), dir.join("text.jsonl"));
    text::write_lines(&small, SMALL_BYTES)?;
    if options.data.is_none() {
        text::write_lines(&made, options.text_mib << 20)?;
    }
    let data = options.data.as_ref().unwrap_or(&made);
    let runs = Runs { program, model: options.model.as_deref().unwrap_or(dir), cache: dir.join("cache") };
    let text_bytes = data.metadata().map_err(|e| Error::io("read", data, e))?.len();
    let tokenizer_bytes = runs.prepare(&small, &[0])?.peak_bytes;
    eprintln!(
        "{facts}\n{:>4} {:>8} {:>12} {:>9} {:>9} {:>8} {:>14}",
        "cpus", "programs", "M tokens/s", "times", "user s", "s", "MB beside"
    );
    let mut first = None;
    let modes = if options.apart { &[false, true][..] } else { &[false] };
    for (&cpus, &is_apart) in cpus.iter().flat_map(|cpus| modes.iter().map(move |is_apart| (cpus, is_apart))) {
        let unknown = || Error::resource("choose CPUs", "the machine does not say which there are");
        let workers = CpuPlacement::on(topology, cpus).ok_or_else(unknown)?.workers;
        let Prepared { peak_bytes, user_s, tokens, seconds } = if is_apart {
            let part = dir.join("part.jsonl");
            text::write_lines(&part, text_bytes / cpus as u64)?;
            prepare_apart(&runs, &part, &workers)?
        } else {
            runs.prepare(data, &workers)?
        };
        let tokens_per_s = tokens as f64 / seconds;
        let times = tokens_per_s / *first.get_or_insert(tokens_per_s);
        let beside_bytes = peak_bytes.saturating_sub(tokenizer_bytes);
        let programs = if is_apart { cpus } else { 1 };
        eprintln!(
            "{cpus:>4} {programs:>8} {:>12.2} {times:>9.2} {user_s:>9.1} {seconds:>8.2} {:>14.0}",
            tokens_per_s * 1e-6,
            beside_bytes as f64 * 1e-6
        );
        let line = json!({ "cpus": cpus, "programs": programs, "tokens_per_s": tokens_per_s, "times_first": times, "seconds": seconds, "user_s": user_s, "tokens": tokens,
            "text_bytes": text_bytes, "peak_bytes": peak_bytes, "tokenizer_bytes": tokenizer_bytes, "beside_bytes": beside_bytes });
        println!("{}", facts.line(line));
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    microbench::exit_code(start(&Options::parse()))
}
