//! The command line: the only place that prints to a person or exits.

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use superoffload::bench::options::StepOptions;
use superoffload::bench::record::RecordFile;
use superoffload::bench::simulate::{self, Simulation};
use superoffload::bench::step::StepBench;
use superoffload::checkpoint;
use superoffload::checkpoint::digest::digest_checkpoint;
use superoffload::checkpoint::export::{Options, export_checkpoint};
use superoffload::config::aliases;
use superoffload::config::resolve::DEMO_FLAGS;
use superoffload::config::settings::{Settings, TrainOptions};
use superoffload::doctor::{self, Probes};
use superoffload::dtype::Dtype;
use superoffload::engine::watchdog::{Alarm, OnAlarm};
use superoffload::error::{EXIT_INTERRUPTED, Error, Result};
use superoffload::hardware::limits;
use superoffload::hardware::topology::Topology;
use superoffload::launch::context::check_context;
use superoffload::metrics::StepMetrics;
use superoffload::model::presets;
use superoffload::optim::simd::Isa;
use superoffload::planner::machine::Machine;
use superoffload::planner::plan::Plan;
use superoffload::probe::{self, ProbeOptions};
use superoffload::search::SearchQuery;
use superoffload::search::report::SearchReport;
use superoffload::signals::{self, StopFlag};
use superoffload::simulate::outcome::of_a_large_product;
use superoffload::train::{self, Observer, RunFacts, Summary};
use superoffload::units::Bytes;

/// Trains language models with the optimizer on the CPU: exact speculative offload.
#[derive(Parser)]
#[command(version = superoffload::facts::version(), about, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    /// Train a model; with no options, a small one on the text that ships with the program.
    #[command(after_help = format!("Without --model and --data the built-in model runs with {DEMO_FLAGS}; flags win."))]
    Train(Box<TrainOptions>),
    /// Write a checkpoint as a Hugging Face model directory.
    Export {
        /// A checkpoint, or an output directory whose newest good checkpoint is taken.
        dir: PathBuf,
        /// The directory to write; must not exist or be empty.
        out: PathBuf,
        /// Largest shard in MB (10^6 bytes) [default: 5000].
        #[arg(long, value_name = "MB")]
        max_shard_mb: Option<u64>,
        /// Format of the weights; auto is as config.json says, else float32.
        #[arg(long, value_enum, default_value_t = ExportDtype::Auto)]
        dtype: ExportDtype,
    },
    /// Print the digest of a checkpoint: the same digest, the same bits.
    Digest {
        /// A checkpoint, or an output directory whose newest good checkpoint is taken.
        dir: PathBuf,
    },
    /// Say what this machine is, and what would make it faster.
    Doctor,
    /// Choose how to train a model on a machine, here (`--hardware this`) or not: does it fit, how fast, what binds, what else there is.
    Plan(Box<PlanOptions>),
    /// Measure this machine in less than a minute: a profile for the planner, every number with its source.
    Probe(ProbeOptions),
    /// Time steps on a machine that is not here, by its profile (`--hardware`).
    Simulate(Box<SimulateOptions>),
    /// Measure what this machine does.
    #[command(subcommand)]
    Bench(Bench),
}

/// Formats of exported weights.
#[derive(Clone, Copy, clap::ValueEnum)]
enum ExportDtype {
    Auto,
    Float32,
    Bfloat16,
}

#[derive(clap::Args)]
struct PlanOptions {
    /// Tokens of an optimizer step; the plan cuts them into micro-batches [default: as the batch flags say].
    #[arg(long, value_name = "N")]
    tokens_per_step: Option<usize>,
    /// Print a JSON line instead of tables.
    #[arg(long)]
    json: bool,
    /// What is fixed; `--model` may be the name of a configuration that ships with the program. The rest is chosen.
    #[command(flatten)]
    train: TrainOptions,
}

#[derive(clap::Args)]
struct SimulateOptions {
    /// Print the JSON line instead of a table and a picture.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    step: StepOptions,
}

#[derive(Subcommand)]
enum Bench {
    /// Time training steps on random weights and tokens; one JSON line is the result.
    Step(Box<StepOptions>),
}

fn main() {
    let code = match signals::outlive_file_size_limit().and_then(|()| limits::check_memory_limits()).and_then(|()| parse()).and_then(run) {
        Ok(code) => code,
        Err(error) => {
            match error {
                Error::Interrupted(_) => log(&error),
                _ => complain("error", &error),
            }
            error.exit_code()
        }
    };
    std::process::exit(code);
}

/// The command that was asked for, in whatever spelling; a request for help or the version is answered here.
fn parse() -> Result<CliCommand> {
    let rewritten = aliases::rewrite(&Cli::command(), std::env::args_os().collect())?;
    rewritten.ignored.iter().for_each(|line| complain("ignored", line));
    match Cli::try_parse_from(rewritten.args) {
        Ok(cli) => Ok(cli.command),
        Err(e) => match e.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => e.exit(),
            _ => Err(Error::usage(one_line(&e.render().to_string()))),
        },
    }
}

/// The parser's message without its epilogue: `error: ...`, possible values, tips.
fn one_line(message: &str) -> String {
    let is_epilogue = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information");
    let lines = message.lines().map(str::trim).take_while(|line| !is_epilogue(line)).filter(|line| !line.is_empty());
    let joined = lines.collect::<Vec<_>>().join(" ").replace(" tip: ", "; tip: ");
    joined.trim_start_matches("error: ").to_string()
}

/// Prints what was asked for. `println!` would panic when nobody reads it.
fn answer(text: impl Display) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|e| Error::io("write", "standard output", e))
}

/// Prints what a training run tells on its way. A reader who has gone (`| head`) must not end it: its results are files.
fn log(text: impl Display) {
    let _ = answer(text);
}

/// Prints how a run ended: to standard error when nobody takes standard output any more (`| tee`, ended by the same Ctrl-C).
fn announce(text: impl Display) {
    if answer(&text).is_err() {
        remark(text);
    }
}

/// Prints a line to standard error; if that is gone, too, there is nobody left to tell.
fn remark(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn complain(kind: &str, text: impl Display) {
    remark(format_args!("{kind}: {text}"));
}

fn run(command: CliCommand) -> Result<i32> {
    match command {
        CliCommand::Train(options) => run_train(*options),
        CliCommand::Export { dir, out, max_shard_mb, dtype } => run_export(&dir, &out, max_shard_mb, dtype),
        CliCommand::Digest { dir } => run_digest(&dir),
        CliCommand::Doctor => {
            let (topology, isa) = (Topology::this_machine(), Isa::detect().to_string());
            let probes = Probes::this_machine(&topology);
            answer(doctor::report(&topology, &isa, &probes, Path::new("/sys/fs/resctrl")).trim_end())?;
            Ok(0)
        }
        CliCommand::Plan(options) => run_plan(*options),
        CliCommand::Probe(options) => run_probe(&options),
        CliCommand::Simulate(options) => run_simulate(*options),
        CliCommand::Bench(Bench::Step(options)) => bench_step(*options),
    }
}

/// The options over those of the configuration file; a line for each of its keys that means nothing here.
fn over_file(options: TrainOptions) -> Result<TrainOptions> {
    let options = options.over_config_file()?;
    options.ignored.iter().for_each(|line| complain("ignored", line));
    Ok(options)
}

fn run_train(options: TrainOptions) -> Result<i32> {
    let settings = Settings::resolve(over_file(options)?)?;
    let stop = StopFlag::on_signals()?;
    let mut person = Person::default();
    let summary = train::run(&settings, &stop, &mut person)?;
    person.bar.finish_and_clear();
    print_summary(&summary, |line| announce(line));
    if let Some(digest) = &summary.digest {
        answer(format_args!("digest: {digest}"))?;
    }
    if let Some(failure) = summary.failure {
        return Err(failure);
    }
    Ok(if summary.interrupted { EXIT_INTERRUPTED } else { 0 })
}

fn run_export(dir: &Path, out: &Path, max_shard_mb: Option<u64>, dtype: ExportDtype) -> Result<i32> {
    let dtype = match dtype {
        ExportDtype::Auto => None,
        ExportDtype::Float32 => Some(Dtype::Float32),
        ExportDtype::Bfloat16 => Some(Dtype::Bfloat16),
    };
    let mut options = Options { dtype, ..Options::default() };
    if let Some(mb) = max_shard_mb {
        options.max_shard_bytes =
            mb.checked_mul(1_000_000).filter(|&b| b > 0).ok_or_else(|| Error::usage("--max-shard-mb: expected 1 or more"))?;
    }
    let exported = export_checkpoint(dir, out, options)?;
    exported.warnings.iter().for_each(|line| complain("warning", line));
    answer(format_args!("exported step {} of {} to {}", exported.step, exported.checkpoint.display(), out.display()))?;
    Ok(0)
}

fn run_digest(dir: &Path) -> Result<i32> {
    let (checkpoint, warnings) = checkpoint::find(dir)?;
    warnings.iter().for_each(|line| complain("warning", line));
    let digest = digest_checkpoint(&checkpoint)?;
    if checkpoint != dir {
        answer(format_args!("checkpoint {}", checkpoint.display()))?;
    }
    answer(format_args!("digest: {digest}"))?;
    Ok(0)
}

/// The line goes to standard output or a file, all that people read to standard error.
fn bench_step(options: StepOptions) -> Result<i32> {
    let out = options.out.clone();
    let bench = StepBench::new(StepOptions { train: over_file(options.train)?, ..options })?;
    let file = out.as_deref().map(RecordFile::open).transpose()?;
    let record = bench.run(&mut |line| remark(line))?;
    remark(format_args!("\n{record}"));
    let line = serde_json::to_string(&record).map_err(|e| Error::format("the result", e))?;
    match file {
        Some(mut file) => file.append(&line)?,
        None => answer(line)?,
    }
    Ok(0)
}

fn run_plan(options: PlanOptions) -> Result<i32> {
    let PlanOptions { tokens_per_step, json, train } = options;
    let options = over_file(TrainOptions { model: None, ..train.clone() })?;
    let config = train.model.ok_or_else(|| Error::usage("plan: --model is missing: a model's directory, or a name"))?;
    let profile = simulate::profile(&options, &mut |line| remark(line))?;
    let (settings, shape) = (Settings::resolve_over(Settings::default(), options)?, presets::shape("model", &config)?);
    check_context(&settings, &shape, &config)?.iter().for_each(|line| complain("warning", line));
    let machine = Machine::of(&profile);
    let query = SearchQuery { settings: &settings, tokens_per_step, shape: &shape, machine: &machine };
    let chosen = SearchReport::of(query, &config.display().to_string(), &profile)?;
    if json {
        answer(serde_json::to_string(&chosen).map_err(|e| Error::format("the answer", e))?)?;
    } else {
        answer(&chosen)?;
    }
    Ok(0)
}

/// The table goes to standard output, the profile to a file.
fn run_probe(options: &ProbeOptions) -> Result<i32> {
    let file = options.file()?;
    let profile = probe::run(options, &mut |line| remark(line))?;
    answer(profile.table())?;
    profile.unsteady().into_iter().for_each(remark);
    if let Some(file) = file {
        file.write(&profile)?;
    }
    Ok(0)
}

fn run_simulate(options: SimulateOptions) -> Result<i32> {
    let SimulateOptions { json, step } = options;
    let out = step.out.clone();
    let step = StepOptions { train: over_file(step.train.clone())?, ..step };
    let profile = simulate::profile(&step.train, &mut |line| remark(line))?;
    let simulation = Simulation::new(step, profile)?;
    let file = out.as_deref().map(RecordFile::open).transpose()?;
    if !json {
        answer(simulation.plan()?)?;
    }
    let record = simulation.run()?;
    let line = serde_json::to_string(&record).map_err(|e| Error::format("the result", e))?;
    file.map_or(Ok(()), |mut file| file.append(&line))?;
    if json {
        answer(line)?
    } else {
        answer(format_args!("\n{record}"))?
    }
    Ok(0)
}

/// Time between lines that say how far the data is, where there is no bar.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Shows a run to a person: a progress bar on a terminal, plain lines otherwise.
struct Person {
    bar: ProgressBar,
    logging_steps: u64,
    /// FLOPs a second of a large matrix product, if they are known.
    matmul_flops: Option<f64>,
    /// When a person last heard how far the data is.
    last_progress: Instant,
}

impl Default for Person {
    fn default() -> Self {
        Self { bar: ProgressBar::hidden(), logging_steps: 1, matmul_flops: None, last_progress: Instant::now() }
    }
}

impl Person {
    fn line(&self, line: &str) {
        self.bar.suspend(|| log(line));
    }
}

impl Observer for Person {
    fn begin(&mut self, plan: &Plan, facts: &RunFacts) {
        self.bar.finish_and_clear();
        log(format_args!("device  {}", facts.device));
        facts.rates.iter().for_each(|rates| log(format_args!("rates   {rates}")));
        log(format_args!("model   {}", facts.model));
        log(format_args!("data    {}", facts.data));
        log(format_args!("resctrl {}", facts.partition));
        log(plan);
        log(format_args!("pages   {}", facts.host));
        if facts.step < facts.max_steps {
            log(format_args!("training steps {} to {}; TFLOP/s do not count what is recomputed", facts.step + 1, facts.max_steps));
        }
        self.logging_steps = facts.logging_steps;
        self.matmul_flops = facts.matmul_flops;
        if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("{bar:32} {pos}/{len} steps  {elapsed} < {eta}  {msg}");
            self.bar = ProgressBar::with_draw_target(Some(facts.max_steps), ProgressDrawTarget::stderr());
            self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            self.bar.set_position(facts.step);
        }
    }

    fn step(&mut self, m: &StepMetrics) {
        self.bar.set_position(m.step);
        let norm = m.grad_norm.map_or("non-finite".into(), |norm| format!("{norm:.3}"));
        self.bar.set_message(format!("loss {:.4}  norm {norm}  {:.0} tok/s", m.loss, m.tokens_per_second));
        if m.step == 1 || m.step.is_multiple_of(self.logging_steps) {
            let share = of_a_large_product(self.matmul_flops.map(|peak| m.model_tflops * 1e12 / peak));
            self.line(&format!(
                "step {:>6}  loss {:.4}  grad_norm {norm}  lr {:.2e}  {:>6.0} tok/s  {:.4} TFLOP/s{share}  {}",
                m.step, m.loss, m.learning_rate, m.tokens_per_second, m.model_tflops, m.verdict
            ));
        }
    }

    fn note(&mut self, line: &str) {
        self.line(line);
    }

    fn warn(&mut self, line: &str) {
        self.bar.suspend(|| complain("warning", line));
    }

    fn progress(&mut self, what: &str, done: u64, all: u64) {
        if std::io::stderr().is_terminal() {
            if self.bar.is_hidden() || self.bar.is_finished() {
                let style = ProgressStyle::with_template("{bar:32} {bytes}/{total_bytes}  {elapsed} < {eta}  {msg}");
                self.bar = ProgressBar::with_draw_target(Some(all), ProgressDrawTarget::stderr());
                self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            }
            self.bar.set_length(all);
            self.bar.set_message(what.to_string());
            self.bar.set_position(done);
        } else if self.last_progress.elapsed() >= PROGRESS_INTERVAL {
            self.last_progress = Instant::now();
            log(format_args!("{what}: {} of {}", Bytes(done), Bytes(all)));
        }
    }

    fn on_alarm(&mut self) -> Option<OnAlarm> {
        let bar = self.bar.clone();
        Some(Box::new(move |alarm| match alarm {
            Alarm::Worker(line) => bar.suspend(|| complain("warning", line)),
            Alarm::Stall(report) => {
                complain("error", report);
                signals::exit_at_once(1);
            }
        }))
    }
}

fn print_summary(s: &Summary, log: impl Fn(std::fmt::Arguments)) {
    if s.steps_here == 0 && !s.interrupted && s.failure.is_none() {
        let asked = if s.step == s.max_steps { String::new() } else { format!(", {} were asked for", s.max_steps) };
        return log(format_args!("\nnothing to do: step {} was already done{asked}", s.step));
    }
    let state = if s.failure.is_some() {
        "failed"
    } else if s.interrupted {
        "interrupted"
    } else {
        "done"
    };
    log(format_args!("\n{state} at step {} of {} ({} here)", s.step, s.max_steps, s.steps_here));
    if let Some((first, last)) = s.loss {
        log(format_args!("  loss          {first:.4} -> {last:.4}"));
        log(format_args!("  speed         {:.0} tokens/s", s.tokens_per_second));
    }
    let c = s.counts;
    log(format_args!(
        "  bucket steps  {} committed, {} clipped, {} skipped; {} speculated, {} of them rolled back",
        c.committed, c.clipped, c.skipped, c.speculated, c.rolled_back
    ));
    log(format_args!("  exposed       {:.0} ms waiting for the optimizer, {:.0} ms for copies", s.exposed_ms.0, s.exposed_ms.1));
    s.perf.iter().for_each(|perf| log(format_args!("  counters      {perf}")));
    match &s.checkpoint {
        Some(path) => log(format_args!("  checkpoint    {}", path.display())),
        None if s.steps_here == 0 => log(format_args!("  checkpoint    none (no step was done)")),
        None => log(format_args!("  checkpoint    none")),
    }
    match &s.metrics {
        Some(path) => log(format_args!("  metrics       {}", path.display())),
        None => log(format_args!("  metrics       gone: somebody removed the file")),
    }
    s.lost.iter().for_each(|what| log(format_args!("  lost          {what}")));
    let Some(trace) = &s.trace else { return };
    let dropped = if s.trace_dropped > 0 { format!(" (full: {} later spans left out)", s.trace_dropped) } else { String::new() };
    log(format_args!("  timeline      {}{dropped} (open in ui.perfetto.dev)", trace.display()));
}
