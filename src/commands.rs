//! The program's commands, one function each, for the command line and other front ends.
//!
//! `log` receives lines for the user. A line that begins with `warning: ` reports a problem.

use crate::bench::options::StepOptions;
use crate::bench::record::RecordFile;
use crate::bench::simulate::{Simulation, profile};
use crate::bench::step::StepBench;
use crate::checkpoint::digest::digest_checkpoint;
use crate::checkpoint::export::{MAX_SHARD_BYTES, Options, export_best, export_checkpoint};
use crate::checkpoint::{self, Check};
use crate::config::aliases;
use crate::config::foreign;
use crate::config::settings::{Settings, TrainOptions};
use crate::data::context::{self, Preparation};
use crate::data::view::{DataView, ViewRequest};
use crate::describe::as_word;
use crate::disk::{ResultFile, ResultKind};
use crate::doctor::{DoctorReport, Probes};
use crate::dtype::Dtype;
use crate::engine::watch::watchdog::Alarm;
use crate::error::{Error, Result};
use crate::hardware::limits;
use crate::hardware::topology::Topology;
use crate::host::pages::share_one_heap;
use crate::hub::HubQuery;
use crate::launch::context::check_context;
use crate::launch::open;
use crate::model::presets;
use crate::model::weights::ModelWeights;
use crate::optim::simd::Isa;
use crate::planner::machine::Machine;
use crate::probe::{self, ProbeOptions};
use crate::progress_event::ProgressEvent;
use crate::report::write_report;
use crate::search::SearchQuery;
use crate::search::progress;
use crate::search::report::SearchReport;
use crate::signals::{self, StopFlag, StopSignal};
use crate::superchip::{self, Calls as SuperchipCalls, SuperchipOptions};
use crate::train::record::RecordedRun;
use crate::train::sample::{self, SampleOptions};
use crate::train::{Observer, ahead, packing, text, trained_rows};
use serde::Serialize;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of `export`.
#[derive(clap::Args, Clone, Debug)]
pub struct ExportOptions {
    /// A checkpoint, or an output directory for its newest good checkpoint.
    pub dir: PathBuf,

    /// The directory to write; must not exist or be empty.
    pub out: PathBuf,

    /// Take the output directory's checkpoint of the lowest evaluation loss instead of its newest.
    #[arg(long)]
    pub best: bool,

    /// Largest shard in MB (10^6 bytes) [default: 5000].
    #[arg(long, value_name = "MB")]
    pub max_shard_mb: Option<u64>,

    /// Format of the weights; auto is as config.json says, else float32.
    #[arg(long, value_enum, default_value_t = ExportDtype::Auto)]
    pub dtype: ExportDtype,
}

/// Formats of exported weights.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum ExportDtype {
    Auto,
    Float32,
    Bfloat16,
}

/// Prepares the process while it has one thread: disables NCCL's multicast, checks that memory limits leave enough room, reduces the use of
/// address space if that is limited, and makes a write beyond the file size limit fail instead of killing the process.
///
/// # Errors
/// `Resource` for a memory limit that is too low, or if the system rejects a signal handler.
pub fn prepare_process() -> Result<()> {
    open::prepare_environment();
    signals::outlive_file_size_limit()?;
    if limits::has_address_limit() {
        share_one_heap();
    }
    limits::check_memory_limits()
}

/// Adds the process number and the number of processes from a launcher's environment variables to `options`.
///
/// # Errors
/// `Usage` if flags and launcher contradict each other, or if a value is missing.
pub fn under_launcher(options: TrainOptions) -> Result<TrainOptions> {
    options.under_launcher(&|name| std::env::var(name).ok())
}

/// Translates flag names of Hugging Face, TRL, axolotl and LLaMA-Factory in `args`, the arguments of `command` with the program's name
/// first. `log` receives a line for each flag that has no effect here.
///
/// # Errors
/// `Usage` for a flag of another program that this program lacks, with the flag to use instead.
pub fn respell(command: &clap::Command, args: Vec<OsString>, log: &mut dyn FnMut(&dyn Display)) -> Result<Vec<OsString>> {
    let rewritten = aliases::rewrite(command, args)?;
    for line in &rewritten.ignored {
        log(&format_args!("ignored: {line}"));
    }
    Ok(rewritten.args)
}

/// Plans how to train a model on the machine of `options`: memory, speed, bottleneck, and alternatives. The model is a directory, a
/// `config.json`, a name on the hub, or a preset.
///
/// # Errors
/// `Usage` for invalid options; `Resource` if no plan fits, with the smallest change that would help.
pub fn plan(model: &Path, options: TrainOptions, log: &mut dyn FnMut(&dyn Display)) -> Result<impl Display + Serialize + use<>> {
    let profile = profile(&options, log)?;
    // Weights of a checkpoint need no more memory than random ones.
    let options = TrainOptions { init: None, ..options };
    let mut emit = |event: ProgressEvent<'_>| match event {
        ProgressEvent::Note(line) | ProgressEvent::Detail(line) | ProgressEvent::Warn(line) => log(&line),
        ProgressEvent::Progress { .. } => {}
    };
    let model = &HubQuery { with_weights: false, stop: &StopFlag::default(), emit: &mut emit }.model(model)?;
    let settings = Settings::resolve_over(Settings::default(), options)?;
    let shape = settings.freezing(presets::shape(model)?, Some(model))?;
    if let Some(line) = &check_context(&settings, &shape, model)? {
        log(&format_args!("warning: {line}"));
    }
    let settings = packing::settle_for_plan(&settings, &mut |line| log(&line));
    let settings = trained_rows::settle_for_plan(&settings, &mut |line| log(&line));
    let machine = Machine::of_run(&profile, &settings.cut())?;
    let request = settings.request(&shape);
    let query = SearchQuery::new(&request, &machine);
    let carried_bytes = if model.is_dir() { ModelWeights::carried_bytes_in(model, &shape)? } else { 0 };
    let saves = settings.save_schedule();
    progress::with_progress(log, || SearchReport::of(query, (&model.display().to_string(), carried_bytes), &profile, saves))
}

/// Converts the configuration of another trainer at `path` to TOML for this program, into the file `out` if it is set. `log` receives
/// the table of its keys. Returns the configuration, or a command that uses it.
///
/// # Errors
/// `Usage` with every key that is not available here, for a file of no known program, and for an existing `out` with other content.
pub fn convert_config(path: &Path, out: Option<&Path>, log: &mut dyn FnMut(&dyn Display)) -> Result<String> {
    let converted = foreign::convert(path)?;
    log(&converted);
    let text = converted.toml()?;
    let Some(out) = out else { return Ok(text.trim_end().into()) };
    ResultFile::open(out, &CONFIGURATION)?.write(|file| file.write_all(text.as_bytes()))?;
    Ok(format!("{}: superoffload train {}", out.display(), as_word(&out.to_string_lossy())))
}

const CONFIGURATION: ResultKind =
    ResultKind { name: "converted configuration", head: foreign::HEAD, flag: "--out", operation: "write configuration" };

/// Returns the options that continue the run in `dir`, an output directory or a checkpoint. They are the options of its record, which
/// `flags` override.
///
/// # Errors
/// `Format` when `dir` holds no intact checkpoint; `Usage` for a flag that names another directory.
pub fn resume(dir: &Path, flags: TrainOptions) -> Result<TrainOptions> {
    // The run itself checks the state.
    RecordedRun::open(dir, Check::WhenRead)?.resumed(flags)
}

/// Samples the model of a run after each prompt of `options`. The result prints the texts, each after its prompt if there are several, or
/// lines of JSON.
///
/// # Errors
/// `Usage` for invalid options; errors of the checkpoint and of the device.
pub fn sample(options: &SampleOptions) -> Result<impl Display + use<>> {
    sample::sample(options, &StopFlag::on_signals(&StopSignal::ALL)?)
}

/// Measures training steps on random weights and tokens. Appends the record to `options.out` as a line of JSON, if set. Of several
/// processes, only the first returns a record. `on_alarm` is called on another thread with the reason when the process has to be ended
/// because it is stalled.
///
/// # Errors
/// `Usage` for invalid options; errors of missing or insufficient resources; `Io` if a file cannot be written.
pub fn bench_step(
    options: StepOptions,
    on_alarm: Box<dyn Fn(Alarm) + Send>,
    log: &mut dyn FnMut(&dyn Display),
) -> Result<Option<impl Display + Serialize + use<>>> {
    let out = options.out.clone().filter(|_| options.train.process.unwrap_or(0) == 0);
    let bench = StepBench::new(options)?;
    let file = out.as_deref().map(RecordFile::open).transpose()?;
    let Some(record) = bench.run(Some(Box::new(move |why| on_alarm(Alarm::Stall(why)))), log)? else { return Ok(None) };
    // Printed before the file is written, so a write error does not lose the measurements.
    log(&format_args!("\n{record}"));
    if let Some(mut file) = file {
        file.append(&record)?;
    }
    Ok(Some(record))
}

/// Simulates steps on the machine of `options`, which need not be this one. Appends the record to `options.out` as a line of JSON, if set.
///
/// # Errors
/// Errors of [`bench_step`]; `Resource` if the steps do not fit that machine, with a remedy.
pub fn simulate(options: StepOptions, log: &mut dyn FnMut(&dyn Display)) -> Result<impl Display + Serialize + use<>> {
    let out = options.out.clone();
    let profile = profile(&options.train, log)?;
    let simulation = Simulation::new(options, profile)?;
    let file = out.as_deref().map(RecordFile::open).transpose()?;
    let record = progress::with_progress(log, || simulation.run())?;
    if let Some(mut file) = file {
        file.append(&record)?;
    }
    Ok(record)
}

/// Measures this machine and writes its hardware profile to the file of `options`. Returns the profile as a table.
///
/// # Errors
/// `Usage` and `Io` for a file that cannot be written; errors of unavailable devices; `Resource` for an implausible measurement.
pub fn probe(options: &ProbeOptions, log: &mut dyn FnMut(&dyn Display)) -> Result<impl Display + use<>> {
    let file = options.file()?;
    let profile = probe::run(options, log)?;
    // A write error does not lose the measurements.
    file.map_or(Ok(()), |file| file.write(&profile)).inspect_err(|_| log(&profile.table()))?;
    if let Some(line) = profile.unsteady() {
        log(&line);
    }
    Ok(profile.table())
}

/// Measures a superchip in about ten minutes: probe, conformance suite, two workloads and the rows of the paper's Table 2. Returns the
/// report, and whether everything ran and passed.
///
/// # Errors
/// `Resource` without a GPU; `Io` if a file cannot be written.
pub fn superchip_check(options: &SuperchipOptions, calls: SuperchipCalls<'_>) -> Result<(String, bool)> {
    superchip::run(options, calls)
}

/// Reports the hardware of this machine, settings that affect performance, and the rate of the disk of `output_dir`.
pub fn doctor(output_dir: Option<&Path>) -> impl Display + Serialize + use<> {
    let topology = Topology::this_machine();
    let probes = Probes::this_machine(&topology, output_dir);
    DoctorReport::new(&topology, &Isa::detect().to_string(), &probes, Path::new("/sys/fs/resctrl"))
}

/// The directory and the digest of a checkpoint. Checkpoints with the same digest are bit-identical. `dir` is a checkpoint, or an output
/// directory, of which the newest good checkpoint is used.
///
/// # Errors
/// `Format` if there is no good checkpoint; `Io` if it cannot be read.
pub fn digest(dir: &Path, log: &mut dyn FnMut(&dyn Display)) -> Result<(PathBuf, String)> {
    let (checkpoint, warnings) = checkpoint::find(dir, Check::Now)?;
    for line in &warnings {
        log(&format_args!("warning: {line}"));
    }
    let digest = digest_checkpoint(&checkpoint)?;
    Ok((checkpoint, digest))
}

/// Exports a checkpoint as a Hugging Face model directory. Returns a line that describes the exported checkpoint.
///
/// # Errors
/// `Usage` for a shard size of 0; errors for a missing good checkpoint, a non-empty `out`, or a file that cannot be written.
pub fn export(options: &ExportOptions, log: &mut dyn FnMut(&dyn Display)) -> Result<impl Display + use<>> {
    let dtype = match options.dtype {
        ExportDtype::Auto => None,
        ExportDtype::Float32 => Some(Dtype::Float32),
        ExportDtype::Bfloat16 => Some(Dtype::Bfloat16),
    };
    let bytes = |mb: u64| mb.checked_mul(1_000_000).filter(|&b| b > 0).ok_or_else(|| Error::usage("--max-shard-mb: expected 1 or more"));
    let max_shard_bytes = options.max_shard_mb.map_or(Ok(MAX_SHARD_BYTES), bytes)?;
    let export = if options.best { export_best } else { export_checkpoint };
    let exported = export(&options.dir, &options.out, Options { dtype, max_shard_bytes })?;
    for line in &exported.warnings {
        log(&format_args!("warning: {line}"));
    }
    Ok(format!("exported step {} of {} to {}", exported.step, exported.checkpoint.display(), options.out.display()))
}

/// Previews the training data of `settings`: counts, and the text of the first `shown` documents with the trained parts marked.
///
/// # Errors
/// The errors of training with the model, tokenizer and data.
pub fn view_data(settings: &Settings, shown: usize, in_colour: bool, stop: &StopFlag) -> Result<impl Display + Serialize + use<>> {
    let mut notes = Vec::new();
    let mut emit = |event: ProgressEvent<'_>| match event {
        ProgressEvent::Note(line) | ProgressEvent::Detail(line) => notes.push(line.to_string()),
        ProgressEvent::Warn(line) => notes.push(format!("warning: {line}")),
        ProgressEvent::Progress { .. } => {}
    };
    let settings = &text::find_sources(settings, false, stop, &mut emit)?;
    let settings = &packing::settle(settings, None, &mut |line| emit(ProgressEvent::Note(line)))?;
    let (shape, tokenizer, settings) = text::reader(settings, None)?;
    let (paths, split) = (&settings.data, settings.eval_split.map(|split| (split, settings.seed)));
    let request = ViewRequest { paths, rules: settings.row_rules(), split, shown, in_colour };
    let mut preparation = Preparation::new(stop, context::cache(), None, emit);
    let view = DataView::new(&request, &tokenizer, shape.vocab, &mut preparation)?;
    drop(preparation);
    Ok(view.with_notes(notes))
}

/// Tokenizes the text of `settings` into the folder where training finds it. `observer` receives progress events. Returns a description of
/// the prepared data.
///
/// # Errors
/// The errors of training with the model, tokenizer and data.
pub fn prepare(settings: &Settings, stop: &StopFlag, observer: &mut dyn Observer) -> Result<impl Display + use<>> {
    let prepared = ahead::prepare(settings, stop, observer)?;
    Ok(prepared.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

/// Writes an HTML page about the training runs in the output directories `runs` to `out`, and returns a line with its path. The page
/// contains text of the training data only if `with_samples` is set.
///
/// # Errors
/// `Usage` for too many runs, a directory without a run, or an `out` that exists and is not a report; `Io` if a file cannot be read or
/// written.
pub fn report(runs: &[PathBuf], out: &Path, with_samples: bool) -> Result<impl Display + use<>> {
    write_report(runs, out, with_samples)?;
    Ok(format!("report  {}", out.display()))
}
