//! The command line: the only place that prints to a person or exits.

/// Cases by which a device shows that it computes what the CPU device does.
#[path = "../tests/gpu/mod.rs"]
mod selftest;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use indicatif::{BinaryBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use selftest::run::{Request, conduct};
use serde::Serialize;
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use superoffload::internals::commands::{self, ProbeOptions, SampleOptions, StepOptions, SuperchipCalls, SuperchipOptions};
use superoffload::internals::error::{printable_json, printable_lines};
use superoffload::{Alarm, Error, ExportOptions, Observer, Plan, Result, RunFacts, Settings, StepMetrics, StopFlag, TrainOptions};

/// Trains language models with the optimizer on the CPU: exact speculative offload.
#[derive(Parser)]
#[command(version = env!("SUPEROFFLOAD_VERSION"), long_version = env!("SUPEROFFLOAD_LONG_VERSION"), about, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    /// Train a model; with no options, a small one on the text that ships with the program.
    #[command(after_help = format!("Without --model and --data, the built-in model is trained with {}; flags override these \
        settings.", TrainOptions::DEMO_FLAGS))]
    Train(Box<TrainCommand>),
    /// Continue an interrupted run with the model, data and settings of its record.
    Resume(Box<ResumeOptions>),
    /// Generate text after a prompt with the model of a run.
    Sample(SampleOptions),
    /// Write a checkpoint as a Hugging Face model directory.
    Export(ExportOptions),
    /// Print the digest of a checkpoint; equal digests mean bit-identical checkpoints.
    Digest {
        /// A checkpoint, or an output directory for its newest good checkpoint.
        dir: PathBuf,
    },
    /// Report hardware and settings that affect performance.
    Doctor {
        /// Print a JSON line instead of text.
        #[arg(long)]
        json: bool,
        /// Measure how fast saves write into this directory, too.
        #[arg(long, value_name = "DIR")]
        output_dir: Option<PathBuf>,
    },
    /// Test kernels, training and failures on the devices of this machine; please send the output for a GPU that is not yet measured.
    Selftest {
        /// Print a JSON line with every case; readable lines go to standard error.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        request: Request,
    },
    /// Plan a run on this machine (`--hardware this`) or another machine: memory, speed, bottleneck.
    Plan(Box<PlanOptions>),
    /// Measure this machine in about a minute, and write a hardware profile for the planner.
    Probe(ProbeOptions),
    /// Measure a GH200, GB200 or GB300 in about ten minutes, and write a JSON file and a report to send; please do if you have one.
    SuperchipCheck(SuperchipOptions),
    /// Simulate steps on another machine from its hardware profile (`--hardware`).
    Simulate(Box<SimulateOptions>),
    /// Preview how data is tokenized, packed and masked.
    Data(Box<DataOptions>),
    /// Tokenize text ahead of training, into the cache that `train` reads.
    Prepare(Box<PrepareOptions>),
    /// Write an HTML report of training runs: loss, speed, bottleneck, memory, settings.
    Report {
        /// Output directories of `train`; several are drawn over each other.
        #[arg(required = true, value_name = "RUN")]
        runs: Vec<PathBuf>,
        /// The page to write; only an earlier report is replaced.
        #[arg(short, long, value_name = "FILE", default_value = "report.html")]
        out: PathBuf,
        /// Include five documents of each run's data, with trained text marked; by default the page has no text of the data.
        #[arg(long)]
        with_samples: bool,
    },
    /// Convert a configuration of TRL, axolotl, LLaMA-Factory, accelerate or DeepSpeed, and list the result for each key.
    ConvertConfig {
        /// YAML, JSON or TOML of another trainer.
        file: PathBuf,
        /// The configuration to write; only an earlier converted configuration is replaced [default: standard output].
        #[arg(short, long, value_name = "FILE.toml")]
        out: Option<PathBuf>,
    },
    /// Run benchmarks on this machine.
    #[command(subcommand)]
    Bench(Bench),
    /// Print the completion script for a shell.
    Completions { shell: Shell },
    /// Write this program's manual pages.
    Man {
        /// An existing directory, as ~/.local/share/man/man1.
        dir: PathBuf,
    },
}

#[derive(clap::Args)]
struct TrainCommand {
    /// TOML, YAML or JSON file with the flags below as keys; equivalent to --config.
    #[arg(conflicts_with = "config")]
    file: Option<PathBuf>,
    #[command(flatten)]
    details: Details,
    #[command(flatten)]
    train: TrainOptions,
}

#[derive(clap::Args)]
struct Details {
    /// Print how the run is prepared, and the table of its plan: techniques, buckets, memory by class, pages.
    #[arg(short, long)]
    verbose: bool,
}

#[derive(clap::Args)]
struct ResumeOptions {
    /// The output directory of a run, or a checkpoint in it.
    dir: PathBuf,
    #[command(flatten)]
    details: Details,
    /// Settings that win over the run's record.
    #[command(flatten)]
    train: TrainOptions,
}

#[derive(clap::Args)]
struct DataOptions {
    /// Files, directories or names on the hub; equivalent to --data.
    #[arg(conflicts_with = "data", value_name = "DATA")]
    paths: Vec<PathBuf>,
    /// Documents to show.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 3)]
    first: usize,
    /// Print a JSON line instead of text.
    #[arg(long)]
    json: bool,
    /// Options of `train`; those unrelated to data are ignored.
    #[command(flatten)]
    train: TrainOptions,
}

#[derive(clap::Args)]
struct PrepareOptions {
    /// Files, directories or names on the hub; equivalent to --data.
    #[arg(conflicts_with = "data", value_name = "DATA")]
    paths: Vec<PathBuf>,
    /// Options of `train`; those unrelated to data are ignored.
    #[command(flatten)]
    train: TrainOptions,
}

#[derive(clap::Args)]
struct PlanOptions {
    /// Print a JSON line instead of tables.
    #[arg(long)]
    json: bool,
    /// Settings that are fixed; `--model` may be the name of a configuration that ships with the program. The rest is chosen.
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
    let code = match commands::prepare_process().and_then(|()| parse()).and_then(run) {
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

/// The requested command, in any accepted spelling; a request for help or the version is answered here.
fn parse() -> Result<CliCommand> {
    let args = commands::respell(&Cli::command(), std::env::args_os().collect(), &mut |line| remark(line))?;
    match Cli::try_parse_from(args) {
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

/// Writes lines as a terminal may have them: every line for people goes through here, but for those of a progress bar.
fn put(mut out: impl Write, text: impl Display) -> std::io::Result<()> {
    writeln!(out, "{}", printable_lines(text)).and_then(|()| out.flush())
}

/// Prints the result. `println!` would panic on a closed pipe.
fn answer(text: impl Display) -> Result<()> {
    put(std::io::stdout(), text).map_err(|e| Error::io("write", "standard output", e))
}

/// Prints the result as a line of JSON.
fn answer_json(record: &impl Serialize) -> Result<()> {
    answer(printable_json(serde_json::to_string(record).map_err(|e| Error::format("the result", e))?))
}

/// Prints a view of data, which may set colours and escapes foreign text.
fn show(view: impl Display) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{view}").and_then(|()| out.flush()).map_err(|e| Error::io("write", "standard output", e))
}

/// Prints a log line of training. A closed pipe (`| head`) must not end the run: its results are files.
fn log(text: impl Display) {
    let _ = answer(text);
}

/// Prints how a run ended: to standard error when nobody takes standard output any more (`| tee`, ended by the same Ctrl-C).
fn announce(text: impl Display) {
    if answer(&text).is_err() {
        remark(text);
    }
}

/// Prints a line to standard error; failures are ignored.
fn remark(text: impl Display) {
    let _ = put(std::io::stderr(), text);
}

fn complain(kind: &str, text: impl Display) {
    remark(format_args!("{kind}: {text}"));
}

fn run(command: CliCommand) -> Result<i32> {
    match command {
        CliCommand::Train(options) => return run_train(*options),
        CliCommand::Resume(options) => return run_resume(*options),
        CliCommand::Sample(options) => answer(commands::sample(&options)?)?,
        CliCommand::Export(options) => answer(superoffload::export(&options, &mut |line| remark(line))?)?,
        CliCommand::Digest { dir } => run_digest(&dir)?,
        CliCommand::Doctor { json: is_json, output_dir } => {
            let found = commands::doctor(output_dir.as_deref());
            if is_json { answer_json(&found)? } else { answer(found)? }
        }
        CliCommand::Selftest { json: is_json, request } => return run_selftest(is_json, &request),
        CliCommand::Plan(options) => run_plan(*options)?,
        CliCommand::Probe(options) => run_probe(&options)?,
        CliCommand::SuperchipCheck(options) => return run_superchip_check(&options),
        CliCommand::Data(options) => run_data(*options)?,
        CliCommand::Prepare(options) => run_prepare(*options)?,
        CliCommand::Report { runs, out, with_samples } => answer(superoffload::report(&runs, &out, with_samples)?)?,
        CliCommand::ConvertConfig { file, out } => answer(commands::convert_config(&file, out.as_deref(), &mut |line| remark(line))?)?,
        CliCommand::Simulate(options) => run_simulate(*options)?,
        CliCommand::Bench(Bench::Step(options)) => bench_step(*options)?,
        CliCommand::Completions { shell } => answer(completions(shell))?,
        CliCommand::Man { dir } => {
            clap_mangen::generate_to(Cli::command(), &dir).map_err(|e| Error::io("write manual pages in", dir, e))?
        }
    }
    Ok(0)
}

/// The options over those of the configuration files; a line for each key that means nothing here.
fn over_file(options: TrainOptions) -> Result<TrainOptions> {
    let options = options.over_config_file()?;
    for line in &options.ignored {
        complain("ignored", line);
    }
    options.notes.iter().for_each(remark);
    Ok(options)
}

fn run_train(TrainCommand { file, details, train }: TrainCommand) -> Result<i32> {
    conduct_run(over_file(TrainOptions { config: file.or_else(|| train.config.clone()), ..train })?, &details)
}

fn run_resume(ResumeOptions { dir, details, train }: ResumeOptions) -> Result<i32> {
    conduct_run(commands::resume(&dir, over_file(train)?)?, &details)
}

fn conduct_run(options: TrainOptions, details: &Details) -> Result<i32> {
    let settings = Settings::resolve(commands::under_launcher(options)?)?;
    let stop = StopFlag::on_signals(&settings.stop_signals)?;
    if settings.dry_run {
        show(superoffload::view_data(&settings, DRY_RUN_SHOWS, std::io::stdout().is_terminal(), &stop)?)?;
    }
    let mut person = Person::new(details.verbose);
    let mut summary = superoffload::train(&settings, &stop, &mut person)?;
    person.bar.finish_and_clear();
    announce(format_args!("\n{summary}"));
    if let Some(digest) = &summary.digest {
        answer(format_args!("digest: {digest}"))?;
    }
    summary.failure.take().map_or(Ok(summary.exit_code()), Err)
}

/// Exits 1 if a case failed.
fn run_selftest(is_json: bool, request: &Request) -> Result<i32> {
    let out: Box<dyn Write> = if is_json { Box::new(std::io::stderr()) } else { Box::new(std::io::stdout()) };
    let report = conduct(request, out)?;
    if is_json {
        answer_json(&report.json())?;
    }
    Ok(i32::from(report.has_failed()))
}

/// The script for `shell`, without its last line's end.
fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "superoffload", &mut script);
    String::from_utf8_lossy(&script).trim_end().to_owned()
}

/// Documents that a dry run shows.
const DRY_RUN_SHOWS: usize = 2;

fn run_data(DataOptions { paths, first, json: is_json, train }: DataOptions) -> Result<()> {
    let data = if paths.is_empty() { train.data.clone() } else { Some(paths) };
    let settings = Settings::resolve(over_file(TrainOptions { data, ..train })?)?;
    let view = superoffload::view_data(&settings, first, std::io::stdout().is_terminal(), &StopFlag::on_signals(&settings.stop_signals)?)?;
    if is_json { answer_json(&view) } else { show(view) }
}

fn run_prepare(PrepareOptions { paths, train }: PrepareOptions) -> Result<()> {
    let data = if paths.is_empty() { train.data.clone() } else { Some(paths) };
    let settings = Settings::resolve(over_file(TrainOptions { data, ..train })?)?;
    let mut person = Person::new(true);
    let prepared = superoffload::prepare(&settings, &StopFlag::on_signals(&settings.stop_signals)?, &mut person)?;
    person.bar.finish_and_clear();
    answer(prepared)
}

fn run_digest(dir: &Path) -> Result<()> {
    let (checkpoint, digest) = superoffload::digest(dir, &mut |line| remark(line))?;
    if checkpoint != dir {
        answer(format_args!("checkpoint {}", checkpoint.display()))?;
    }
    answer(format_args!("digest: {digest}"))
}

/// The line goes to standard output or a file, all that people read to standard error.
fn bench_step(options: StepOptions) -> Result<()> {
    let is_printed = options.out.is_none();
    let options = StepOptions { train: commands::under_launcher(over_file(options.train)?)?, ..options };
    let record = commands::bench_step(options, Box::new(end_on_alarm(ProgressBar::hidden())), &mut |line| remark(line))?;
    if let Some(record) = record.filter(|_| is_printed) { answer_json(&record) } else { Ok(()) }
}

fn run_plan(options: PlanOptions) -> Result<()> {
    let PlanOptions { json: is_json, train } = options;
    let mut options = over_file(train)?;
    let model = options.model.take().ok_or_else(|| Error::usage("plan: --model is missing: a model's directory, or a name"))?;
    let chosen = superoffload::plan(&model, options, &mut |line| remark(line))?;
    if is_json { answer_json(&chosen) } else { answer(chosen) }
}

/// The table goes to standard output, the profile to a file.
fn run_probe(options: &ProbeOptions) -> Result<()> {
    answer(commands::probe(options, &mut |line| remark(line))?)
}

/// Exits 1 if a part failed.
fn run_superchip_check(options: &SuperchipOptions) -> Result<i32> {
    let request = Request::of_the_gpu(options.cuda_libraries.clone());
    let mut selftest = || {
        let report = conduct(&request, Box::new(std::io::stderr()))?;
        Ok((report.json(), !report.has_failed()))
    };
    let on_alarm = || -> Box<dyn Fn(Alarm) + Send> { Box::new(end_on_alarm(ProgressBar::hidden())) };
    let calls = SuperchipCalls { selftest: &mut selftest, on_alarm: &on_alarm, log: &mut |line| remark(line) };
    let (report, is_good) = commands::superchip_check(options, calls)?;
    answer(report)?;
    Ok(i32::from(!is_good))
}

fn run_simulate(options: SimulateOptions) -> Result<()> {
    let SimulateOptions { json: is_json, step } = options;
    let options = StepOptions { train: over_file(step.train)?, ..step };
    let record = commands::simulate(options, &mut |line| remark(line))?;
    if is_json { answer_json(&record) } else { answer(record) }
}

/// Time between progress lines of the data, where there is no bar.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Shows a run to a person: a progress bar on a terminal, plain lines otherwise.
struct Person {
    bar: ProgressBar,
    /// Whether details are shown.
    is_verbose: bool,
    /// The facts of the run, once it has begun.
    facts: Option<RunFacts>,
    /// Time of the first step's beginning.
    start: Instant,
    /// Time of the last progress line.
    last_progress: Instant,
}

impl Person {
    fn new(is_verbose: bool) -> Self {
        let now = Instant::now();
        Self { bar: ProgressBar::hidden(), is_verbose, facts: None, start: now, last_progress: now }
    }

    fn line(&self, line: &str) {
        self.bar.suspend(|| log(line));
    }
}

impl Observer for Person {
    fn begin(&mut self, _: &Plan, facts: &RunFacts) {
        self.bar.finish_and_clear();
        log(facts);
        self.start = Instant::now();
        self.facts = Some(facts.clone());
        if std::io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("{bar:32} {pos}/{len} steps  {elapsed} elapsed, {eta} left  {msg}");
            self.bar = ProgressBar::with_draw_target(Some(facts.max_steps), ProgressDrawTarget::stderr());
            self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            self.bar.set_position(facts.step);
        }
    }

    fn step(&mut self, m: &StepMetrics) {
        self.bar.set_position(m.step);
        let norm = m.grad_norm.map_or("non-finite".into(), |norm| format!("{norm:.3}"));
        self.bar.set_message(format!("loss {:.4}  norm {norm}  {:.0} tokens/s", m.loss, m.tokens_per_second));
        let line = self.facts.as_ref().and_then(|facts| facts.log_line(m, self.start.elapsed()));
        if let Some(line) = &line {
            self.line(line);
        }
    }

    fn note(&mut self, line: &str) {
        self.line(line);
    }

    fn detail(&mut self, line: &str) {
        if self.is_verbose {
            self.line(line);
        }
    }

    fn warn(&mut self, line: &str) {
        self.bar.suspend(|| complain("warning", line));
    }

    fn progress(&mut self, activity: &str, done: u64, all: u64) {
        if std::io::stderr().is_terminal() {
            if self.bar.is_hidden() || self.bar.is_finished() {
                let style = ProgressStyle::with_template("{bar:32} {bytes}/{total_bytes}  {elapsed} elapsed, {eta} left  {msg}");
                self.bar = ProgressBar::with_draw_target(Some(all), ProgressDrawTarget::stderr());
                self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            }
            self.bar.set_length(all);
            self.bar.set_message(printable_lines(activity));
            self.bar.set_position(done);
        } else if self.last_progress.elapsed() >= PROGRESS_INTERVAL {
            self.last_progress = Instant::now();
            log(format_args!("{activity}: {} of {}", BinaryBytes(done), BinaryBytes(all)));
        }
    }

    fn on_alarm(&mut self) -> Option<Box<dyn Fn(Alarm) + Send>> {
        Some(Box::new(end_on_alarm(self.bar.clone())))
    }
}

/// Reports stalled threads above `bar`, and ends the program if the run cannot continue.
fn end_on_alarm(bar: ProgressBar) -> impl Fn(Alarm) + Send {
    move |alarm| match alarm {
        Alarm::Worker(line) | Alarm::Process(line) => bar.suspend(|| complain("warning", line)),
        Alarm::Stall(report) => {
            complain("error", report);
            // Nothing is waited for, and no library tidies up, which might wait for ever.
            signal_hook::low_level::exit(1);
        }
    }
}
