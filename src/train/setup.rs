//! Everything before step 0: model, data, plan, device, engine, and the state to begin from.

use super::run_dir::RunDir;
use super::session::{Companions, Session};
use super::{Facts, Observer, identity, previous_run, resume, text};
use crate::checkpoint::checkpoint_bytes;
use crate::config::options::{Init, RunPart};
use crate::config::settings::{Settings, TrainLength};
use crate::data;
use crate::data::loader::{DataPosition, Loader, steps_for_epochs};
use crate::data::packing::Dataset;
use crate::data::preparation::{News, Preparation};
use crate::data::tokenizer::Tokenizer;
use crate::device::Kernels;
use crate::device::cpu::{CpuDevice, Schedule};
#[cfg(feature = "cuda")]
use crate::device::cuda::{CudaDevice, CudaOptions};
use crate::engine::executor::Engine;
use crate::engine::step_job::StepJob;
use crate::error::{Error, Result};
use crate::hardware::topology::Topology;
use crate::host::affinity::{Placement, name_and_pin};
use crate::host::doorbell::Doorbell;
use crate::host::memory_policy::MemoryPolicy;
#[cfg(feature = "mpam")]
use crate::host::partition;
use crate::host::perf::WORKER_ROLE;
use crate::host::pool::Pool;
use crate::launch::devices::Chosen;
use crate::model::shape::{DEMO_CONFIG, ModelShape, Positions};
use crate::model::tensors::TensorTable;
use crate::model::weights;
use crate::model_dir::{CONFIG, ModelDir};
use crate::optim::StatePart;
use crate::optim::schedule::Schedule as LearningRate;
use crate::planner::plan::Plan;
use crate::search::best_plan;
use crate::signals::StopFlag;
use std::path::Path;
use std::sync::Arc;

/// What was computed of the data files, in the output directory.
const CHECKSUMS: &str = "data.json";

/// A model as it was found: its shape, and the files to export it with.
struct Source {
    shape: ModelShape,
    files: Vec<(String, Vec<u8>)>,
}

/// Builds a session on the `chosen` device, whose engine `engine` makes, ready for its first step.
///
/// # Errors
/// Whatever is missing, broken or too large; nothing has been trained yet.
pub fn prepare<D: Kernels>(
    settings: &Settings,
    chosen: &Chosen,
    run_dir: RunDir,
    stop: &StopFlag,
    observer: &mut impl Observer,
    engine: impl FnOnce(&Plan, &ModelShape, &Topology) -> Result<Engine<D>>,
) -> Result<Session<D>> {
    observer.note(&format!("reading {}", describe_sources(settings)));
    let data_bytes = data::source::host_bytes(&settings.data, settings.seq_length, !settings.no_shuffle);
    let settings = &Settings { data_bytes, ..settings.clone() };
    let topology = Topology::this_machine();
    chosen.warning.iter().for_each(|line| observer.warn(line));
    let source = find_model(settings)?;
    check_context(settings, &source.shape, settings.model.as_deref().unwrap_or(Path::new("the built-in model")))?
        .iter()
        .for_each(|line| observer.warn(line));
    let mut plan = best_plan(settings, &source.shape, &chosen.machine, true)?;
    plan.host_memory = host_memory(settings, &plan, &topology)?;
    let resumed = resume::find(settings, run_dir.path(), observer)?;
    let kept = resumed.as_ref().filter(|_| !settings.allow_changed.contains(&RunPart::Tokenizer));
    let saved = kept.map(|loaded| &loaded.manifest().trainer.settings);
    let (tokenizer, settings) = &text::tokenizer(settings, &source.shape, saved)?;
    let (dataset, run) = open_data(settings, &source.shape, tokenizer, run_dir.path(), stop, observer)?;
    let resumed = resumed.map(|loaded| resume::accept(loaded, settings, dataset.sequences(), run.clone(), observer)).transpose()?;
    let run = resumed.as_ref().map_or(run, |accepted| accepted.run.clone());
    let max_steps = max_steps(settings, &dataset);
    if resumed.as_ref().is_none_or(|accepted| accepted.step() < max_steps) {
        run_dir.expect_room(checkpoint_bytes(TensorTable::new(&source.shape).params(), &source.files))?;
    }
    let data = format!("{} tokens, {} sequences of {}; tokenizer {tokenizer}", dataset.tokens(), dataset.sequences(), settings.seq_length);
    let mut engine = engine(&plan, &source.shape, &topology)?;
    let position = match resumed {
        Some(accepted) => accepted.restore(&mut engine)?,
        None => begin(&mut engine, settings, &source.shape)?,
    };
    if chosen.is_gpu() {
        keep_off_workers(engine.plan(), &topology)?;
    }
    previous_run::move_aside(run_dir.dir(), engine.train_step())?.iter().for_each(|line| observer.warn(line));
    let loader = Loader::new(dataset, plan.batch, settings.seed, !settings.no_shuffle, position)?;
    let facts = Facts {
        device: describe_device(chosen, &engine.describe(), &topology),
        rates: chosen.basis.as_ref().map(ToString::to_string),
        model: describe_model(settings, &source.shape),
        data,
        host: engine.host_memory().report(Path::new("/")).to_string(),
        partition: join_partition(settings, &plan, |line| observer.warn(line)),
        step: engine.train_step(),
        max_steps,
        logging_steps: settings.logging_steps,
    };
    source.shape.ignored_dropout.iter().for_each(|key| observer.warn(&format!("dropout is not applied: config.json sets {key}")));
    observer.begin(&plan, &facts);
    let schedule = LearningRate {
        scheduler: settings.lr_scheduler_type,
        peak_lr: settings.learning_rate,
        warmup_steps: settings.warmup(max_steps),
        max_steps,
    };
    let companions = Companions { settings: settings.clone(), model_files: source.files, run };
    Session::new(engine, loader, schedule, companions, run_dir, observer)
}

/// The data, read and kept as far as need be, and what the run learns with and from; `observer` hears how far it is.
fn open_data(
    settings: &Settings,
    shape: &ModelShape,
    tokenizer: &Tokenizer,
    output_dir: &Path,
    stop: &StopFlag,
    observer: &mut impl Observer,
) -> Result<(Dataset, identity::Run)> {
    let tell = |news: News<'_>| match news {
        News::Note(line) => observer.note(line),
        News::Warn(line) => observer.warn(line),
        News::Progress { what, done, all } => observer.progress(what, done, all),
    };
    let mut preparation = Preparation::new(stop, data::preparation::cache(), output_dir.to_path_buf(), tell);
    let dataset = Dataset::open(&settings.data, tokenizer, shape.vocab, settings.seq_length, &mut preparation)?;
    drop(preparation);
    text::warning(tokenizer, &dataset).iter().for_each(|line| observer.warn(line));
    let mut progress = |file: &Path, done| {
        observer.progress("checking data", done, file.metadata().map_or(done, |metadata| metadata.len()));
        if stop.is_set() { Err(Error::Interrupted("the data was checked".into())) } else { Ok(()) }
    };
    let run = identity::of(shape, tokenizer, &settings.data, &output_dir.join(CHECKSUMS), &mut progress)?;
    Ok((dataset, run))
}

/// `DIR and a.txt`, `DIR and a.txt with 3 more`, `the built-in text`.
fn describe_sources(settings: &Settings) -> String {
    let model = settings.model.as_ref().map_or(String::new(), |dir| format!("{} and ", dir.display()));
    match &settings.data[..] {
        [] => format!("{model}the built-in text"),
        [path] => format!("{model}{}", path.display()),
        [path, others @ ..] => format!("{model}{} with {} more", path.display(), others.len()),
    }
}

fn find_model(settings: &Settings) -> Result<Source> {
    let Some(dir) = &settings.model else {
        let files = vec![(CONFIG.to_string(), DEMO_CONFIG.as_bytes().to_vec())];
        return Ok(Source { shape: ModelShape::demo(), files });
    };
    let shape = ModelShape::read(&ModelDir::open(dir)?.file(CONFIG)?)?;
    Ok(Source { shape, files: weights::model_files(dir)? })
}

/// Refuses sequences longer than the positions that a model has learned. `config` is where it was found. Rotary positions do not end:
/// for those, a line for people where the sequence is longer than any that the model was trained on.
///
/// # Errors
/// `Usage` with flag, model and remedy.
pub fn check_context(settings: &Settings, shape: &ModelShape, config: &Path) -> Result<Option<String>> {
    let (seq_length, positions, config) = (settings.seq_length, shape.max_positions, config.display());
    if seq_length <= positions {
        return Ok(None);
    }
    let key = shape.family.spec().keys.max_positions;
    if shape.positions == Positions::Learned {
        let remedy = format!("use --seq-length {positions} or less");
        return Err(Error::usage(format!(
            "--seq-length {seq_length}: {config} has {positions} positions ({key} in its config.json); {remedy}"
        )));
    }
    Ok(Some(format!(
        "--seq-length {seq_length}: {config} was made for {positions} positions ({key} in its config.json); it learns the others here"
    )))
}

fn max_steps(settings: &Settings, dataset: &Dataset) -> u64 {
    match settings.train_length {
        TrainLength::Steps(steps) => steps,
        TrainLength::Epochs(epochs) => {
            let sequences_per_step = settings.per_device_train_batch_size * settings.gradient_accumulation_steps;
            steps_for_epochs(epochs, dataset.sequences(), sequences_per_step)
        }
    }
}

fn describe_device(chosen: &Chosen, device: &str, topology: &Topology) -> String {
    let why = chosen.note.as_ref().map_or(String::new(), |note| format!("; auto: {note}"));
    format!("{device} on {}{why}", topology.cpu_model.as_deref().unwrap_or("an unnamed processor"))
}

fn describe_model(settings: &Settings, shape: &ModelShape) -> String {
    let from = settings.model.as_ref().map_or("built in".to_string(), |dir| dir.display().to_string());
    let ModelShape { layers, channels, heads, kv_heads, vocab, .. } = shape;
    format!("{from}: {} with {layers} layers of {channels}, {heads} heads ({kv_heads} kv), vocabulary {vocab}", shape.family.architecture())
}

/// The optimizer's threads join their partition; what is in force, in words. `warn` hears why they could not.
#[cfg(feature = "mpam")]
pub fn join_partition(settings: &Settings, plan: &Plan, warn: impl FnOnce(&str)) -> String {
    if !plan.techniques.mpam {
        return "off".into();
    }
    partition::join_optimizer(&settings.resctrl_group, Path::new(superoffload_resctrl::DEFAULT_ROOT)).unwrap_or_else(|error| {
        warn(&error.to_string());
        "none".into()
    })
}

/// The optimizer's threads join no partition: the feature is off.
#[cfg(not(feature = "mpam"))]
pub fn join_partition(_: &Settings, _: &Plan, _: impl FnOnce(&str)) -> String {
    "compiled out (cargo feature mpam)".into()
}

/// The engine on this machine's CPU.
///
/// # Errors
/// `Resource` when memory or threads cannot be had.
pub fn cpu_engine(plan: &Plan, shape: &ModelShape, topology: &Topology) -> Result<Engine<CpuDevice>> {
    let bell = Arc::new(Doorbell::default());
    let schedule = plan.adversary.map_or(Schedule::Threads, |seed| Schedule::Adversary { seed });
    let dev = CpuDevice::new(plan.threads, schedule, bell.clone(), plan.trace_spans)?;
    let pool = match schedule {
        Schedule::Adversary { .. } => Pool::stepped(plan.trace_spans),
        Schedule::Threads => worker_threads(plan, topology, &bell)?,
    };
    Engine::new(plan.clone(), shape.clone(), dev, pool, bell)
}

/// The engine on this machine's first GPU.
///
/// # Errors
/// `Resource` when there is none, one of NVIDIA's libraries is missing, or memory or threads cannot be had.
#[cfg(feature = "cuda")]
pub fn cuda_engine(plan: &Plan, shape: &ModelShape, topology: &Topology) -> Result<Engine<CudaDevice>> {
    let bell = Arc::new(Doorbell::default());
    let libraries = plan.cuda_libraries.clone();
    let dev = CudaDevice::new(&CudaOptions { libraries, attention: plan.attention, trace_spans: plan.trace_spans })?;
    let pool = worker_threads(plan, topology, &bell)?;
    Engine::new(plan.clone(), shape.clone(), dev, pool, bell)
}

/// Where host memory comes from on the machine of `topology`, beside the CPUs of the optimizer's workers.
///
/// # Errors
/// `Resource` when `--huge-pages explicit` cannot be had.
pub fn host_memory(settings: &Settings, plan: &Plan, topology: &Topology) -> Result<MemoryPolicy> {
    let workers = placement(plan, topology).map_or_else(Vec::new, |placement| placement.workers);
    MemoryPolicy::new(topology, settings.huge_pages, &workers, plan.threads)
}

/// Keeps the calling thread, the driver, and what it starts from now on off the optimizer's CPUs.
///
/// # Errors
/// `Resource` when the kernel refuses.
pub fn keep_off_workers(plan: &Plan, topology: &Topology) -> Result<()> {
    placement(plan, topology).map_or(Ok(()), |placement| placement.keep_off_workers("driver"))
}

fn worker_threads(plan: &Plan, topology: &Topology, bell: &Arc<Doorbell>) -> Result<Pool<StepJob>> {
    let placement = placement(plan, topology);
    let on_start = move |worker: usize| placement.as_ref().map_or(Ok(()), |place| name_and_pin(WORKER_ROLE, worker, place.workers[worker]));
    Pool::threads(plan.threads, plan.host_memory.homes(), bell.clone(), plan.trace_spans, on_start)
}

/// A CPU for each worker, when there are enough that are this process's own.
fn placement(plan: &Plan, topology: &Topology) -> Option<Placement> {
    if plan.techniques.mpam { Placement::on(topology, plan.threads) } else { None }
}

/// First weights: random, or the model's own.
fn begin<D: Kernels>(engine: &mut Engine<D>, settings: &Settings, shape: &ModelShape) -> Result<DataPosition> {
    match (settings.init, &settings.model) {
        (Init::Checkpoint, Some(dir)) => {
            let specs = engine.table().specs().to_vec();
            let mut flat = vec![0.0; engine.table().flat_elems()];
            weights::load(dir, shape, engine.table(), &mut flat)?;
            specs.iter().try_for_each(|spec| engine.write_state(StatePart::Params, spec.offset_elems, &flat[spec.range()]))?;
        }
        _ => engine.init_state(settings.seed, engine.plan().threads)?,
    }
    engine.send_weights()?;
    Ok(DataPosition::default())
}
